-- The arithmetic of quotas/limits.py, function for function; a stateful test holds the two together.
-- Times are integer microseconds: 2^53 of them last until the year 2255.

-- Redis' own clock, so that all gateways share one. A test may bring its own time.
local function now_us(given)
  if given > 0 then return given end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- A moment of a rate is exact: whole microseconds and a rest in parts of the limit's amount, because an
-- amount that does not divide its window costs a fraction. {first, whole, rest} is a restart.
local function later(a, b)
  return a[2] > b[2] or (a[2] == b[2] and a[3] > b[3])
end

local function shift(restart, whole, rest, amount)
  restart[2] = restart[2] + whole
  restart[3] = restart[3] + rest
  if restart[3] >= amount then
    restart[2], restart[3] = restart[2] + 1, restart[3] - amount
  elseif restart[3] < 0 then
    restart[2], restart[3] = restart[2] - 1, restart[3] + amount
  end
end

-- What is missing until the bucket is full: whole microseconds and the rest.
local function debt(state, now)
  local latest = {0, now, 0}
  for _, restart in ipairs(state.r) do
    if later(restart, latest) then latest = restart end
  end
  return latest[2] - now, latest[3]
end

-- Keep one restart, the latest TAT, for each span between open reservations. Both lists are sorted.
local function merge(state)
  local merged, span, last_span = {}, 1, nil
  for _, restart in ipairs(state.r) do
    while state.o[span] and state.o[span] < restart[1] do span = span + 1 end
    if last_span ~= span then
      merged[#merged + 1] = restart
      last_span = span
    elseif later(restart, merged[#merged]) then
      merged[#merged] = restart
    end
  end
  state.r = merged
end

local function remove(list, value)
  for index, one in ipairs(list) do
    if one == value then table.remove(list, index) return end
  end
end

local function period_start(limit, now)
  local start = limit.b[1]
  for _, boundary in ipairs(limit.b) do
    if boundary <= now then start = boundary end
  end
  return start
end

local function period_end(limit, now)
  for _, boundary in ipairs(limit.b) do
    if boundary > now then return boundary end
  end
  return now
end

local function roll(limit, state, now)
  local start = period_start(limit, now)
  if start > state.p then
    state.p = start
    state.u = 0
  end
end

local function expire_leases(state, now)
  local count, latest, kept = 0, now, {}
  for id, ends in pairs(state.l) do
    if ends > now then
      kept[id] = ends
      count = count + 1
      if ends > latest then latest = ends end
    end
  end
  state.l = kept
  return count, latest
end

local function fresh(kind)
  if kind == 'rate' then return {r = {}, o = {}} end
  if kind == 'calendar' then return {p = 0, u = 0} end
  return {l = {}}
end

local function read_state(key, limit)
  local packed = redis.call('HGET', key, limit.f)
  if packed then return cmsgpack.unpack(packed) end
  return fresh(limit.k)
end

local function write_state(key, limit, state)
  redis.call('HSET', key, limit.f, cmsgpack.pack(state))
end

local function wait_us(limit, state, now)
  if limit.k == 'rate' then
    local whole, rest = debt(state, now)
    whole, rest = whole + limit.q - limit.w, rest + limit.r
    if rest >= limit.a then whole, rest = whole + 1, rest - limit.a end
    if rest > 0 then whole = whole + 1 end
    return math.max(0, whole)
  elseif limit.k == 'calendar' then
    roll(limit, state, now)
    if state.u + limit.c <= limit.a then return 0 end
    return period_end(limit, now) - now
  end
  local count = expire_leases(state, now)
  if count + limit.c <= limit.a then return 0 end
  return 1000000
end

local function take(limit, state, number, id, now, lease)
  if limit.k == 'rate' then
    state.r[#state.r + 1] = {number, now, 0}
    for _, restart in ipairs(state.r) do shift(restart, limit.q, limit.r, limit.a) end
    state.o[#state.o + 1] = number
    merge(state)
  elseif limit.k == 'calendar' then
    roll(limit, state, now)
    state.u = state.u + limit.c
  else
    state.l[id] = now + lease
  end
end

-- Close a reservation at its true cost. reserved: what `take` was called with.
local function give_back(limit, state, number, id, reserved)
  if limit.k == 'rate' then
    for _, restart in ipairs(state.r) do
      if restart[1] <= number then
        shift(restart, limit.q - reserved.q, limit.r - reserved.r, limit.a)
      end
    end
    remove(state.o, number)
    merge(state)
  elseif limit.k == 'calendar' then
    if reserved.p == state.p then state.u = state.u + limit.c - reserved.c end
  else
    state.l[id] = nil
  end
end

-- What quotas/redis_ledger.py makes a Standing of: what is used, when it is back, and a rate's rest.
local function standing(limit, state, now)
  if limit.k == 'rate' then
    local whole, rest = debt(state, now)
    return {whole, whole, rest}
  elseif limit.k == 'calendar' then
    roll(limit, state, now)
    return {state.u, period_end(limit, now) - now}
  end
  local count, latest = expire_leases(state, now)
  return {count, latest - now}
end

local function standings(key, limits, now)
  local shown = {}
  for index, limit in ipairs(limits) do
    shown[index] = standing(limit, read_state(key, limit), now)
  end
  return shown
end
