-- What was added is replaced whole, and only by who knows what stands: of two at once, one looks again.
-- KEYS: additions (hash: version, additions).
-- ARGV[1], msgpack: expected, version, additions. Answers msgpack: whether they were replaced.
local ask = cmsgpack.unpack(ARGV[1])
if (redis.call('HGET', KEYS[1], 'version') or '') ~= ask.expected then return cmsgpack.pack(false) end
redis.call('HSET', KEYS[1], 'version', ask.version, 'additions', ask.additions)
return cmsgpack.pack(true)
