-- Replace all additions if the stored version is the expected one: of two concurrent writers one has to retry.
-- KEYS: additions (hash: version, additions), audit records (sorted set).
-- ARGV[1], msgpack: expected, version, additions, audit. Returns msgpack: true if they were replaced.
local argument = cmsgpack.unpack(ARGV[1])
if (redis.call('HGET', KEYS[1], 'version') or '') ~= argument.expected then return cmsgpack.pack(false) end
redis.call('HSET', KEYS[1], 'version', argument.version, 'additions', argument.additions)
append_audit(KEYS[2], argument.audit)
return cmsgpack.pack(true)
