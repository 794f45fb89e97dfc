-- Add refused calls of tenants on one day. KEYS: counts by tenant (hash).
-- ARGV[1], msgpack: counts (tenant to number), ttl (s). Returns msgpack: true.
local argument = cmsgpack.unpack(ARGV[1])
for tenant, number in pairs(argument.counts) do redis.call('HINCRBY', KEYS[1], tenant, number) end
redis.call('EXPIRE', KEYS[1], argument.ttl)
return cmsgpack.pack(true)
