-- Replace a key by one that ends, create its successor, and record both.
-- KEYS: keys (hash), version, audit records (sorted set).
-- ARGV[1], msgpack: version (random), id, expected and value (JSON), successor (id), key (JSON), audit.
-- Returns msgpack: 1 if it was done, 0 if there is a key of the successor's id, -1 if the key has another value.
local argument = cmsgpack.unpack(ARGV[1])
if redis.call('HGET', KEYS[1], argument.id) ~= argument.expected then return cmsgpack.pack(-1) end
if redis.call('HSETNX', KEYS[1], argument.successor, argument.key) == 0 then return cmsgpack.pack(0) end
redis.call('HSET', KEYS[1], argument.id, argument.value)
append_audit(KEYS[3], argument.audit)
redis.call('SET', KEYS[2], next_version(KEYS[2], argument.version))
return cmsgpack.pack(1)
