-- Add a question to all gateways, unless as many as allowed are open.
-- KEYS: questions by their end (sorted set).
-- ARGV[1], msgpack: question, seconds, most. Returns msgpack: true if it was added.
local argument = cmsgpack.unpack(ARGV[1])
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. now)
if redis.call('ZCARD', KEYS[1]) >= argument.most then return cmsgpack.pack(false) end
redis.call('ZADD', KEYS[1], now + argument.seconds, argument.question)
redis.call('EXPIRE', KEYS[1], argument.seconds + 1)
return cmsgpack.pack(true)
