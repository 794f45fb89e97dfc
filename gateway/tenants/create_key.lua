-- Create a key, unless there is one of the same id, even one that cannot be read.
-- KEYS: keys (hash), tenants (hash), version.
-- ARGV[1], msgpack: version (random), id, key (JSON), tenant.
-- Returns msgpack: {it was created, its tenant is stored here}.
local argument = cmsgpack.unpack(ARGV[1])
local is_created = redis.call('HSETNX', KEYS[1], argument.id, argument.key) == 1
if is_created then redis.call('SET', KEYS[3], next_version(KEYS[3], argument.version)) end
return cmsgpack.pack({is_created, redis.call('HEXISTS', KEYS[2], argument.tenant) == 1})
