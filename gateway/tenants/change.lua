-- Set or remove one field together with the version, even if the client has timed out meanwhile.
-- KEYS: the hash of the field, version, keys (hash), tenants (hash).
-- ARGV[1], msgpack: version, field, value (absent: remove the field).
-- Returns msgpack: {number of removed fields, there were neither keys nor tenants before}.
local argument = cmsgpack.unpack(ARGV[1])
local was_empty, removed = redis.call('EXISTS', KEYS[3], KEYS[4]) == 0, 0
if argument.value then
  redis.call('HSET', KEYS[1], argument.field, argument.value)
else
  removed = redis.call('HDEL', KEYS[1], argument.field)
end
redis.call('SET', KEYS[2], argument.version)
return cmsgpack.pack({removed, was_empty})
