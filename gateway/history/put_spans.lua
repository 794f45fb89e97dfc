-- Store the replicas of one process on a day, if there is room.
-- KEYS: replicas of the day by process (hash). ARGV[1], msgpack: recorder, content, kept (s), most.
-- Returns msgpack: false if there was no room.
local argument = cmsgpack.unpack(ARGV[1])
local is_new = redis.call('HEXISTS', KEYS[1], argument.recorder) == 0
if is_new and redis.call('HLEN', KEYS[1]) >= argument.most then return cmsgpack.pack(false) end
redis.call('HSET', KEYS[1], argument.recorder, argument.content)
redis.call('EXPIRE', KEYS[1], argument.kept)
return cmsgpack.pack(true)
