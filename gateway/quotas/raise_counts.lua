-- Raise counts of one tenant to what was exported of them. A count that is higher stays.
-- KEYS: states of limits (hash), usage of a day (hash).
-- ARGV[1], msgpack: counters: {field, start of its period (µs), used, whether it had an alert, ...}, ttl (s),
--   usage: {field, amount, ...}, usage_ttl (s).
-- Returns msgpack: the number of counters and of amounts of usage that were raised.
local argument, raised = cmsgpack.unpack(ARGV[1]), 0

local counters = argument.counters
for at = 1, #counters, 4 do
  local field, start, used, had_alert = counters[at], counters[at + 1], counters[at + 2], counters[at + 3]
  local packed = redis.call('HGET', KEYS[1], field)
  local state = packed and cmsgpack.unpack(packed) or {k = 'calendar', p = 0, u = 0}
  if start > state.p then state.p, state.u = start, 0 end
  if start == state.p and used > state.u then
    state.u = used
    if had_alert then state.x = start end
    redis.call('HSET', KEYS[1], field, cmsgpack.pack(state))
    raised = raised + 1
  end
end
if #counters > 0 then redis.call('EXPIRE', KEYS[1], argument.ttl) end

local usage = argument.usage
for at = 1, #usage, 2 do
  if usage[at + 1] > tonumber(redis.call('HGET', KEYS[2], usage[at]) or 0) then
    redis.call('HSET', KEYS[2], usage[at], string.format('%.0f', usage[at + 1]))
    raised = raised + 1
  end
end
if #usage > 0 then redis.call('EXPIRE', KEYS[2], argument.usage_ttl) end
return cmsgpack.pack(raised)
