-- Create a key, unless there is one of the same id, even one that cannot be read, and record that.
-- KEYS: keys (hash), tenants (hash), version, audit records (sorted set).
-- ARGV[1], msgpack: version (random), id, key (JSON), tenant, audit.
-- Returns msgpack: {it was created, its tenant is stored here}.
local argument = cmsgpack.unpack(ARGV[1])
local is_created = redis.call('HSETNX', KEYS[1], argument.id, argument.key) == 1
if is_created then
  append_audit(KEYS[4], argument.audit)
  redis.call('SET', KEYS[3], next_version(KEYS[3], argument.version))
end
return cmsgpack.pack({is_created, redis.call('HEXISTS', KEYS[2], argument.tenant) == 1})
