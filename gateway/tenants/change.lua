-- Keys and tenants change together with their version, or not at all: also where the caller is gone by then.
-- KEYS: keys (hash), tenants (hash), version.
-- ARGV[1], msgpack: version, put: {place of the hash, field, value, ...}, remove: {place of it, field, ...}.
-- Answers msgpack: how many fields were removed.
local ask = cmsgpack.unpack(ARGV[1])
local removed = 0
for at = 1, #ask.put, 3 do
  redis.call('HSET', KEYS[ask.put[at]], ask.put[at + 1], ask.put[at + 2])
end
for at = 1, #ask.remove, 2 do
  removed = removed + redis.call('HDEL', KEYS[ask.remove[at]], ask.remove[at + 1])
end
redis.call('SET', KEYS[3], ask.version)
return cmsgpack.pack(removed)
