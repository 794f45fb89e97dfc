-- Describe the queue of a job.
-- KEYS: the job's stream, results of its finished chunks (hash). ARGV[1], msgpack: group, lease (ms).
-- Returns msgpack: {whether the stream exists, its entries, finished chunks, whether no consumer has an entry}.
local argument = cmsgpack.unpack(ARGV[1])
local stream = KEYS[1]
local open = redis.call('XLEN', stream)
local is_idle = open > 0
if is_idle then
  -- Those that others may claim have been idle for a lease. They are few: a gateway gives back what it has claimed.
  for _, entry in ipairs(redis.call('XPENDING', stream, argument.group, '-', '+', 1000)) do
    if entry[3] < argument.lease then is_idle = false end
  end
end
return cmsgpack.pack({redis.call('EXISTS', stream) == 1, open, redis.call('HLEN', KEYS[2]), is_idle})
