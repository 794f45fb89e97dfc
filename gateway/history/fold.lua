-- Mark parts as folded, and store what they add up to, in one step.
-- KEYS: number of the last fold, minutes that have parts (sorted set), then the keys that steps name by index.
-- ARGV[1], msgpack: version, parts (index, minute, names), merged (index, name, content),
-- chunks (index, content, seconds), marks_kept and kept (s). Returns msgpack: false if another fold came between.
local argument = cmsgpack.unpack(ARGV[1])
if tonumber(redis.call('GET', KEYS[1]) or '0') ~= argument.version then return cmsgpack.pack(false) end
for _, step in ipairs(argument.parts) do
  for _, name in ipairs(step[3]) do
    local content = redis.call('HGET', KEYS[step[1]], name)
    if not content or content == '' then return cmsgpack.pack(false) end
  end
end
for _, chunk in ipairs(argument.chunks) do
  redis.call('SET', KEYS[chunk[1]], chunk[2], 'EX', chunk[3])
end
redis.call('INCR', KEYS[1])
redis.call('EXPIRE', KEYS[1], argument.kept)
for _, part in ipairs(argument.merged) do
  redis.call('HSET', KEYS[part[1]], part[2], part[3])
end
for _, step in ipairs(argument.parts) do
  for _, name in ipairs(step[3]) do redis.call('HSET', KEYS[step[1]], name, '') end
  local is_open = false
  for _, content in ipairs(redis.call('HVALS', KEYS[step[1]])) do
    if content ~= '' then is_open = true end
  end
  if not is_open then
    redis.call('ZREM', KEYS[2], step[2])
    redis.call('EXPIRE', KEYS[step[1]], argument.marks_kept)
  end
end
return cmsgpack.pack(true)
