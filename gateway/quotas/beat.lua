-- Which gateways are alive, on Redis' own clock: theirs may differ by more than they are given.
-- KEYS: gateways by when they were last heard of (sorted set).
-- ARGV[1], msgpack: now (0: Redis' clock), id, alive (µs), ttl (s).
-- Answers msgpack: how many they are.
local ask = cmsgpack.unpack(ARGV[1])
local now = now_us(ask.now)
-- First what a full server refuses: after any other write it would take it.
redis.call('ZADD', KEYS[1], now, ask.id)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ask.alive)
-- Who was heard of in the future was so before the clock stepped back.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now), '+inf')
redis.call('EXPIRE', KEYS[1], ask.ttl)
return cmsgpack.pack(redis.call('ZCARD', KEYS[1]))
