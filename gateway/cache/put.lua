-- Store entries with a time to live, as long as all live entries together stay within a bound.
-- KEYS: bytes written by time slot (hash), and one key per entry.
-- ARGV[1], msgpack: ttl and slot (ms), bytes (the bound), overhead (bytes of an entry besides key and value),
--   values.
-- An entry that is alive was written at most a ttl ago. The bytes written in the slots since then are therefore
-- an upper bound of the bytes of all live entries.
-- Returns msgpack: entries stored, and the upper bound of live bytes.
local argument = cmsgpack.unpack(ARGV[1])
local time = redis.call('TIME')
local slot = math.floor((time[1] * 1000 + math.floor(time[2] / 1000)) / argument.slot)
local oldest = slot - math.ceil(argument.ttl / argument.slot)

local live, past = 0, {}
local written = redis.call('HGETALL', KEYS[1])
for at = 1, #written, 2 do
  if tonumber(written[at]) < oldest then
    past[#past + 1] = written[at]
  else
    live = live + tonumber(written[at + 1])
  end
end

local stored, size = 0, 0
for index, value in ipairs(argument.values) do
  local cost = #value + #KEYS[index + 1] + argument.overhead
  if live + size + cost <= argument.bytes then
    redis.call('SET', KEYS[index + 1], value, 'PX', argument.ttl)
    stored, size = stored + 1, size + cost
  end
end
if #past > 0 then redis.call('HDEL', KEYS[1], unpack(past)) end
if size > 0 then
  redis.call('HINCRBY', KEYS[1], slot, size)
  redis.call('PEXPIRE', KEYS[1], argument.ttl + 2 * argument.slot)
end
return cmsgpack.pack({stored, live + size})
