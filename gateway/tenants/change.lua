-- Change keys and tenants together with their version, even if the client has timed out meanwhile.
-- KEYS: keys (hash), tenants (hash), version.
-- ARGV[1], msgpack: version, put: {index of the hash, field, value, ...}, remove: {index of the hash, field, ...}.
-- Returns msgpack: the number of removed fields.
local argument = cmsgpack.unpack(ARGV[1])
local removed = 0
for at = 1, #argument.put, 3 do
  redis.call('HSET', KEYS[argument.put[at]], argument.put[at + 1], argument.put[at + 2])
end
for at = 1, #argument.remove, 2 do
  removed = removed + redis.call('HDEL', KEYS[argument.remove[at]], argument.remove[at + 1])
end
redis.call('SET', KEYS[3], argument.version)
return cmsgpack.pack(removed)
