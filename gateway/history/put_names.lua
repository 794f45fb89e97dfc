-- Store names of rows, as many as there is room for.
-- KEYS: names (hash).
-- ARGV[1], msgpack: names (pairs of number and name), kept (s), most. Returns msgpack: true.
local argument = cmsgpack.unpack(ARGV[1])
local room = argument.most - redis.call('HLEN', KEYS[1])
for _, pair in ipairs(argument.names) do
  if room <= 0 then break end
  room = room - redis.call('HSETNX', KEYS[1], pair[1], pair[2])
end
redis.call('EXPIRE', KEYS[1], argument.kept)
return cmsgpack.pack(true)
