-- Store entries with a time to live, as long as all live entries together stay within a bound, and those of their
-- owner within a share of it.
-- KEYS: bytes written by part of the time to live (hash), the same of the owner, and one key per entry.
-- ARGV[1], msgpack: ttl and part (ms), bytes (the bound), share (an owner may hold so many times what stays free; 0:
--   all), overhead (bytes of an entry besides key and value), values.
-- An entry that is alive was written at most a ttl ago. The bytes written in the parts since then are therefore
-- an upper bound of the bytes of all live entries.
-- Returns msgpack: entries stored, and the upper bound of live bytes.
local argument = cmsgpack.unpack(ARGV[1])
local time = redis.call('TIME')
local part = math.floor((time[1] * 1000 + math.floor(time[2] / 1000)) / argument.part)
local oldest = part - math.ceil(argument.ttl / argument.part)

-- Return the bytes of the live parts, and remove the others.
local function live_bytes(key)
  local live, past, written = 0, {}, redis.call('HGETALL', key)
  for at = 1, #written, 2 do
    if tonumber(written[at]) < oldest then
      past[#past + 1] = written[at]
    else
      live = live + tonumber(written[at + 1])
    end
  end
  if #past > 0 then redis.call('HDEL', key, unpack(past)) end
  return live
end

local live, own = live_bytes(KEYS[1]), live_bytes(KEYS[2])

local stored, size = 0, 0
for index, value in ipairs(argument.values) do
  local cost = #value + #KEYS[index + 2] + argument.overhead
  local free = argument.bytes - (live + size + cost)
  if free >= 0 and (argument.share == 0 or own + size + cost <= argument.share * free) then
    redis.call('SET', KEYS[index + 2], value, 'PX', argument.ttl)
    stored, size = stored + 1, size + cost
  end
end
if size > 0 then
  for index = 1, 2 do
    redis.call('HINCRBY', KEYS[index], part, size)
    redis.call('PEXPIRE', KEYS[index], argument.ttl + 2 * argument.part)
  end
end
return cmsgpack.pack({stored, live + size})
