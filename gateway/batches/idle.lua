-- Check whether a job's stream has chunks of which no consumer has one.
-- KEYS: the job's stream. ARGV[1], msgpack: group, lease (ms). Returns msgpack: whether it has.
local argument = cmsgpack.unpack(ARGV[1])
local stream, group = KEYS[1], argument.group
if redis.call('EXISTS', stream) == 0 or redis.call('XLEN', stream) == 0 then return cmsgpack.pack(false) end
-- Those that others may claim have been idle for a lease. They are few: a gateway gives back what it has claimed.
for _, entry in ipairs(redis.call('XPENDING', stream, group, '-', '+', 1000)) do
  if entry[3] < argument.lease then return cmsgpack.pack(false) end
end
return cmsgpack.pack(true)
