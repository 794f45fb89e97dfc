-- Extend the leases and reservations of requests that are still in flight.
-- KEYS: states of limits, open reservations, their expiries.
-- ARGV[1], msgpack: now, lease (µs), ttl (s), calls: {id, time of its reserve, expires (µs from now), {field of a
-- limit in flight, ...}}.
local argument = cmsgpack.unpack(ARGV[1])
local now = now_us(argument.now)
redis.call('HSETNX', KEYS[1], '@', now)
local since = tonumber(redis.call('HGET', KEYS[1], '@'))
local states = {}

local function state_of(field)
  if states[field] == nil then
    local packed = redis.call('HGET', KEYS[1], field)
    states[field] = packed and cmsgpack.unpack(packed) or {k = 'flight', l = {}}
    follow_clock(states[field], now)
    states[field].w = now
  end
  return states[field]
end

for _, call in ipairs(argument.calls) do
  local id, at, expires, fields = unpack(call)
  -- The store was emptied while the request was in flight. The request holds its slots again, and nothing
  -- else: what it was charged is lost. A request that is missing for another reason has been settled.
  local forgotten = at < since
  if forgotten then redis.call('HSETNX', KEYS[2], id, cmsgpack.pack({n = 0, p = {}})) end
  if redis.call('HEXISTS', KEYS[2], id) == 1 then redis.call('ZADD', KEYS[3], now + expires, id) end
  for _, field in ipairs(fields) do
    local state = state_of(field)
    if forgotten or state.l[id] then state.l[id] = now + argument.lease end
  end
end
for field, state in pairs(states) do redis.call('HSET', KEYS[1], field, cmsgpack.pack(state)) end
for index = 1, 3 do redis.call('EXPIRE', KEYS[index], argument.ttl) end
return cmsgpack.pack(true)
