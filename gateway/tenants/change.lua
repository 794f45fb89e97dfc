-- Set or remove one field together with the version and the record of the change, even if the client has timed
-- out meanwhile.
-- KEYS: the hash of the field, version, tenants (hash), removals (sorted set), audit records (sorted set), days
-- on which keys were used last (hash).
-- ARGV[1], msgpack: version (random), field, value (absent: remove the field), removal, kept (s), expected
-- (absent: any; the value that the field has, empty for none), audit (absent: no record), kept_elsewhere (a
-- removal is recorded even if the field was lost).
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
  if KEYS[1] ~= KEYS[3] then redis.call('HDEL', KEYS[6], argument.field) end
end
if argument.audit and (argument.value or removed > 0 or argument.kept_elsewhere) then
  append_audit(KEYS[5], argument.audit)
end
redis.call('SET', KEYS[2], next_version(KEYS[2], argument.version))
return cmsgpack.pack({removed, had_no_tenant})
