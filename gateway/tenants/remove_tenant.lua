-- Remove a tenant and every key of it in one step, so that a key created meanwhile is either removed too or
-- belongs to no tenant, and record that.
-- KEYS: keys (hash), tenants (hash), version, removals (sorted set), audit records (sorted set), days on which
-- keys were used last (hash).
-- ARGV[1], msgpack: version (random), expected (version; absent: any), tenant, removal, kept (s), audit (absent:
-- no record).
-- Returns msgpack: the number of removed entries, -1 if the version is another one and nothing has changed.
local argument = cmsgpack.unpack(ARGV[1])
if argument.expected and (redis.call('GET', KEYS[3]) or '') ~= argument.expected then return cmsgpack.pack(-1) end
local removed = redis.call('HDEL', KEYS[2], argument.tenant)
local fields = redis.call('HGETALL', KEYS[1])
for at = 1, #fields, 2 do
  local is_json, key = pcall(cjson.decode, fields[at + 1])
  if is_json and type(key) == 'table' and key.tenant == argument.tenant then
    removed = removed + redis.call('HDEL', KEYS[1], fields[at])
    redis.call('HDEL', KEYS[6], fields[at])
  end
end
record_removal(KEYS[4], argument.removal, argument.kept)
if argument.audit and removed > 0 then append_audit(KEYS[5], argument.audit) end
redis.call('SET', KEYS[3], next_version(KEYS[3], argument.version))
return cmsgpack.pack(removed)
