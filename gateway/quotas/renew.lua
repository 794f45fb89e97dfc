-- Make the leases and reservations of calls that are still in flight last longer.
-- KEYS: limits' state, open reservations, their ends.
-- ARGV[1], msgpack: now, lease (µs), ttl (s), calls: {id, when it was reserved, expires (µs from now), {name of a
-- limit in flight, ...}}.
local ask = cmsgpack.unpack(ARGV[1])
local now = now_us(ask.now)
redis.call('HSETNX', KEYS[1], '@', now)
local since = tonumber(redis.call('HGET', KEYS[1], '@'))
local states = {}

local function state_of(name)
  if states[name] == nil then
    local packed = redis.call('HGET', KEYS[1], name)
    states[name] = packed and cmsgpack.unpack(packed) or {k = 'flight', l = {}}
    follow(states[name], now)
    states[name].w = now
  end
  return states[name]
end

for _, one in ipairs(ask.calls) do
  local id, at, expires, names = unpack(one)
  -- The store was emptied while the call was in flight. It holds its slots again, and nothing else: what it
  -- was charged is forgotten. A call that is not there for another reason has been settled.
  local forgotten = at < since
  if forgotten then redis.call('HSETNX', KEYS[2], id, cmsgpack.pack({n = 0, p = {}})) end
  if redis.call('HEXISTS', KEYS[2], id) == 1 then redis.call('ZADD', KEYS[3], now + expires, id) end
  for _, name in ipairs(names) do
    local state = state_of(name)
    if forgotten or state.l[id] then state.l[id] = now + ask.lease end
  end
end
for name, state in pairs(states) do redis.call('HSET', KEYS[1], name, cmsgpack.pack(state)) end
for index = 1, 3 do redis.call('EXPIRE', KEYS[index], ask.ttl) end
return cmsgpack.pack(true)
