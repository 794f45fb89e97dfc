-- Store the part of a minute, unless it is there or was folded, and the names of its rows.
-- KEYS: parts of the minute (hash; a folded one is empty), minutes that have parts (sorted set), names (hash).
-- ARGV[1], msgpack: name, content, minute, kept (s), names (pairs of number and name), names_kept (s), most.
-- Returns msgpack: true.
local argument = cmsgpack.unpack(ARGV[1])
if redis.call('HSETNX', KEYS[1], argument.name, argument.content) == 1 then
  redis.call('EXPIRE', KEYS[1], argument.kept)
  redis.call('ZADD', KEYS[2], argument.minute, argument.minute)
  redis.call('EXPIRE', KEYS[2], argument.kept)
end
local room = argument.most - redis.call('HLEN', KEYS[3])
for _, pair in ipairs(argument.names) do
  if room <= 0 then break end
  room = room - redis.call('HSETNX', KEYS[3], pair[1], pair[2])
end
redis.call('EXPIRE', KEYS[3], argument.names_kept)
return cmsgpack.pack(true)
