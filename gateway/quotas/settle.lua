-- Close a reservation at its true cost, once; a second time changes nothing. A refund is a cost of zero.
-- KEYS: limits' state, open reservations, their ends, usage of the day.
-- ARGV[1], msgpack: now, id, limits as in reserve.lua with the true costs, usage: field → amount, usage_ttl.
-- Answers msgpack: ok (whether this was the closing), s standings.
local ask = cmsgpack.unpack(ARGV[1])
local now = now_us(ask.now)
local closing = false
local packed = redis.call('HGET', KEYS[2], ask.id)
local ends = redis.call('ZSCORE', KEYS[3], ask.id)
-- Past its end it has been spent, also where nothing has come by yet to sweep it away.
if packed and ends and tonumber(ends) > now then
  closing = true
  local record = cmsgpack.unpack(packed)
  redis.call('HDEL', KEYS[2], ask.id)
  redis.call('ZREM', KEYS[3], ask.id)
  for _, limit in ipairs(ask.limits) do
    local reserved = record.c[limit.f]
    if reserved then
      local state = read_state(KEYS[1], limit)
      give_back(limit, state, record.n, ask.id, reserved)
      write_state(KEYS[1], limit, state)
    end
  end
  local counted = false
  for field, amount in pairs(ask.usage) do
    redis.call('HINCRBY', KEYS[4], field, amount)
    counted = true
  end
  if counted then redis.call('EXPIRE', KEYS[4], ask.usage_ttl) end
end
return cmsgpack.pack({ok = closing, s = standings(KEYS[1], ask.limits, now)})
