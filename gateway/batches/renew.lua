-- Set for how long entries of a job's stream have not been renewed.
-- KEYS: the job's stream. ARGV[1], msgpack: group, consumer, idle (ms), ids.
-- Returns msgpack: the number of entries that are still there.
local argument = cmsgpack.unpack(ARGV[1])
local command = {'XCLAIM', KEYS[1], argument.group, argument.consumer, 0}
for _, id in ipairs(argument.ids) do command[#command + 1] = id end
for _, word in ipairs({'IDLE', argument.idle, 'JUSTID'}) do command[#command + 1] = word end
if redis.call('EXISTS', KEYS[1]) == 0 then return cmsgpack.pack(0) end
return cmsgpack.pack(#redis.call(unpack(command)))
