-- Count what a day has recorded of an end user as that of all others, and drop the state of its limits.
-- KEYS: usage of end users on a day (hash), or states of limits (hash) and the ends of their use (sorted set).
-- ARGV[1], msgpack: name of the end user, of all others, and the fields to count or to drop.
local name, other, fields = unpack(cmsgpack.unpack(ARGV[1]))
local END = string.char(31)
if #KEYS == 2 then
  for _, field in ipairs(fields) do
    redis.call('HDEL', KEYS[1], field)
    redis.call('ZREM', KEYS[2], field)
  end
  return cmsgpack.pack(#fields)
end
local found = redis.call('HDEL', KEYS[1], name .. END)
if found == 1 then redis.call('HINCRBY', KEYS[1], END, -1) end
for _, field in ipairs(fields) do
  local amount = redis.call('HGET', KEYS[1], field)
  if amount and field:sub(1, #name + 1) == name .. END then
    redis.call('HINCRBY', KEYS[1], other .. field:sub(#name + 1), amount)
    redis.call('HDEL', KEYS[1], field)
  end
end
return cmsgpack.pack(found)
