-- Claim a chunk of a job: one whose consumer has not renewed it in time, else the next one of the stream.
-- KEYS: the job's stream. ARGV[1], msgpack: group, consumer, lease (ms).
-- Returns msgpack: {id of the entry, chunk}, or an empty list.
local argument = cmsgpack.unpack(ARGV[1])
local stream, group, consumer = KEYS[1], argument.group, argument.consumer
if redis.call('EXISTS', stream) == 0 then return cmsgpack.pack({}) end
local function first(entries)
  for _, entry in ipairs(entries or {}) do
    -- Older servers return deleted entries without their fields.
    if entry and entry[2] then return cmsgpack.pack({entry[1], tonumber(entry[2][2])}) end
  end
  return nil
end
local expired = redis.call('XAUTOCLAIM', stream, group, consumer, argument.lease, '0-0', 'COUNT', 1)
local found = first(expired[2])
if found then return found end
local new = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', 1, 'STREAMS', stream, '>')
return new and first(new[1][2]) or cmsgpack.pack({})
