-- Set or remove one field together with the version, even if the client has timed out meanwhile.
-- KEYS: the hash of the field, version, tenants (hash), removals (sorted set).
-- ARGV[1], msgpack: version (random), field, value (absent: remove the field), removal, kept (s), expected
-- (absent: any; the value that the field has, empty for none).
-- Returns msgpack: {number of removed fields, there were no tenants before}; nothing is changed and the number
-- is -1 if the field has another value.
local argument = cmsgpack.unpack(ARGV[1])
local had_no_tenant, removed = redis.call('EXISTS', KEYS[3]) == 0, 0
if argument.expected and argument.expected ~= (redis.call('HGET', KEYS[1], argument.field) or '') then
  return cmsgpack.pack({-1, had_no_tenant})
end
if argument.value then
  redis.call('HSET', KEYS[1], argument.field, argument.value)
else
  removed = redis.call('HDEL', KEYS[1], argument.field)
  record_removal(KEYS[4], argument.removal, argument.kept)
end
redis.call('SET', KEYS[2], next_version(KEYS[2], argument.version))
return cmsgpack.pack({removed, had_no_tenant})
