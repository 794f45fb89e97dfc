-- Remove a tenant and every key of it in one step, so that a key created meanwhile is either removed too or
-- belongs to no tenant.
-- KEYS: keys (hash), tenants (hash), version, removals (sorted set).
-- ARGV[1], msgpack: version (random), tenant, removal, kept (s).
-- Returns msgpack: the number of removed entries.
local argument = cmsgpack.unpack(ARGV[1])
local removed = redis.call('HDEL', KEYS[2], argument.tenant)
local fields = redis.call('HGETALL', KEYS[1])
for at = 1, #fields, 2 do
  local is_json, key = pcall(cjson.decode, fields[at + 1])
  if is_json and type(key) == 'table' and key.tenant == argument.tenant then
    removed = removed + redis.call('HDEL', KEYS[1], fields[at])
  end
end
record_removal(KEYS[4], argument.removal, argument.kept)
redis.call('SET', KEYS[3], next_version(KEYS[3], argument.version))
return cmsgpack.pack(removed)
