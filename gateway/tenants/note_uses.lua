-- Note the days on which keys were used last, of keys that there are. It is no change: the version stays.
-- KEYS: keys (hash), days (hash). ARGV[1], msgpack: days (id to day). Returns msgpack: true.
local argument = cmsgpack.unpack(ARGV[1])
for id, day in pairs(argument.days) do
  if redis.call('HEXISTS', KEYS[1], id) == 1 and (redis.call('HGET', KEYS[2], id) or '') < day then
    redis.call('HSET', KEYS[2], id, day)
  end
end
return cmsgpack.pack(true)
