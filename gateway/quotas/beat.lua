-- Record a gateway as alive and count the live ones, on the clock of Redis: the clocks of gateways may differ
-- by more than `alive`.
-- KEYS: gateways by the time of their last heartbeat (sorted set).
-- ARGV[1], msgpack: now (0: the clock of Redis), id, alive (µs), ttl (s).
-- Returns msgpack: the number of live gateways.
local argument = cmsgpack.unpack(ARGV[1])
local now = now_us(argument.now)
-- ZADD comes first: a server without memory refuses it, but would accept it after another write.
redis.call('ZADD', KEYS[1], now, argument.id)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - argument.alive)
-- A heartbeat in the future was recorded before the clock stepped back.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now), '+inf')
redis.call('EXPIRE', KEYS[1], argument.ttl)
return cmsgpack.pack(redis.call('ZCARD', KEYS[1]))
