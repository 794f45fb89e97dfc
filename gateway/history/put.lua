-- Store the part of a minute, unless it is there or was folded.
-- KEYS: parts of the minute (hash; a folded one is empty), minutes that have parts (sorted set).
-- ARGV[1], msgpack: name, content, minute, kept (s). Returns msgpack: true.
local argument = cmsgpack.unpack(ARGV[1])
if redis.call('HSETNX', KEYS[1], argument.name, argument.content) == 1 then
  redis.call('EXPIRE', KEYS[1], argument.kept)
  redis.call('ZADD', KEYS[2], argument.minute, argument.minute)
  redis.call('EXPIRE', KEYS[2], argument.kept)
end
return cmsgpack.pack(true)
