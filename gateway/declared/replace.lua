-- Replace all additions if the stored version is the expected one: of two concurrent writers one has to retry.
-- KEYS: additions (hash: version, additions).
-- ARGV[1], msgpack: expected, version, additions. Returns msgpack: true if they were replaced.
local argument = cmsgpack.unpack(ARGV[1])
if (redis.call('HGET', KEYS[1], 'version') or '') ~= argument.expected then return cmsgpack.pack(false) end
redis.call('HSET', KEYS[1], 'version', argument.version, 'additions', argument.additions)
return cmsgpack.pack(true)
