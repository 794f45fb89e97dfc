-- Return the present states of tenants' limits, and change nothing.
-- KEYS: of each tenant, the states of its limits (hash). ARGV[1], msgpack: now (0: the clock of Redis), limits (of each
-- tenant a list, each limit as for `operate.lua`).
-- Returns msgpack: of each tenant a list with the state of each limit, as `operate.lua` returns it; false if they
-- cannot be read.
local argument = cmsgpack.unpack(ARGV[1])
local now = now_us(argument.now)

local function states_of(key, limits)
  local fields, states = {}, {}
  for at, limit in ipairs(limits) do fields[at] = limit.f end
  local packed = redis.call('HMGET', key, unpack(fields))
  for at, limit in ipairs(limits) do
    local state = packed[at] and cmsgpack.unpack(packed[at]) or new_state(limit)
    follow_clock(state, now)
    states[at] = status(limit, state, now)
  end
  return states
end

local found = {}
for index, key in ipairs(KEYS) do
  local is_read, states = pcall(states_of, key, argument.limits[index])
  found[index] = is_read and states
end
return cmsgpack.pack(found)
