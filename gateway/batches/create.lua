-- Create the stream of a job and its consumer group, unless they exist.
-- KEYS: the job's stream. ARGV[1], msgpack: group. Returns msgpack: whether it was created.
local argument = cmsgpack.unpack(ARGV[1])
local reply = redis.pcall('XGROUP', 'CREATE', KEYS[1], argument.group, '0', 'MKSTREAM')
if reply.err and not string.find(reply.err, 'BUSYGROUP') then return redis.error_reply(reply.err) end
return cmsgpack.pack(not reply.err)
