-- Arithmetic of limits: the same functions as quotas/limits.py. A stateful test compares the two.
-- Times are integer microseconds: 2^53 of them reach the year 2255.

-- Return the clock of Redis, so that all gateways share one, or a test's time.
local function now_us(test_time)
  if test_time > 0 then return test_time end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- A moment of a rate is exact: whole microseconds and a rest in parts of the limit's amount, because the cost
-- is a fraction of a microsecond if the amount does not divide the window.
local function sum(whole, rest, more, more_rest, amount)
  whole, rest = whole + more, rest + more_rest
  if rest >= amount then return whole + 1, rest - amount end
  return whole, rest
end

local function difference(whole, rest, less, less_rest, amount)
  whole, rest = whole - less, rest - less_rest
  if rest < 0 then return whole - 1, rest + amount end
  return whole, rest
end

local function is_less(whole, rest, other, other_rest)
  return whole < other or (whole == other and rest < other_rest)
end

-- Create a limit's state. Of a rate, as in RateMeter: restarts (f firsts, t and s their TATs minus the common
-- offset), m and n the common offset, l and e the latest TAT, open reservations (o numbers, q and r their cost).
-- Of a calendar: p the start of its period, u used. In flight: l leases by id.
local function new_state(limit)
  if limit.k == 'rate' then
    local restarts = {k = 'rate', a = limit.a, f = {}, t = {}, s = {}, m = 0, n = 0, l = 0, e = 0}
    restarts.o, restarts.q, restarts.r = {}, {}, {}
    return restarts
  end
  if limit.k == 'calendar' then return {k = 'calendar', p = 0, u = 0} end
  return {k = 'flight', l = {}}
end

-- Move a state back with a clock that stepped back, so that no request waits for the step in addition.
-- Returns true if the state has changed. w: when the state was written.
local function follow_clock(state, now)
  local step = (state.w or now) - now
  if step <= 0 or state.k == 'calendar' then return false end
  if state.k == 'rate' then
    state.l, state.m = state.l - step, state.m - step
  else
    for id, ends in pairs(state.l) do state.l[id] = ends - step end
  end
  return true
end

-- Return the time until the bucket is full: whole microseconds and the rest.
local function debt(state, now)
  if is_less(state.l, state.e, now, 0) then return 0, 0 end
  return state.l - now, state.e
end

-- Drop this restart, or its neighbours, if they can never be the latest again: see RateMeter.
local function prune(state, later)
  local f, t, s, o, amount = state.f, state.t, state.s, state.o, state.a
  while later > 1 and f[later] do
    local reserved, reserved_rest, between = 0, 0, false
    for index = #o, 1, -1 do
      if o[index] < f[later - 1] then break end
      if o[index] < f[later] then
        between = true
        reserved, reserved_rest = sum(reserved, reserved_rest, state.q[index], state.r[index], amount)
      end
    end
    local lead, lead_rest = difference(t[later - 1], s[later - 1], t[later], s[later], amount)
    local dropped = later
    if is_less(lead, lead_rest, reserved, reserved_rest) then
      if between then return end
      dropped = later - 1
    end
    table.remove(f, dropped)
    table.remove(t, dropped)
    table.remove(s, dropped)
    if dropped < later then return end
  end
end

-- Close a reservation of a rate, and move the restarts before it by whole and rest.
local function correct(state, number, whole, rest)
  local f, t, s, after = state.f, state.t, state.s, 1
  local latest, latest_rest = -state.m, 0
  for index = 1, #f do
    if f[index] <= number then
      t[index], s[index] = sum(t[index], s[index], whole, rest, state.a)
      after = index + 1
    end
    if index == 1 or is_less(latest, latest_rest, t[index], s[index]) then
      latest, latest_rest = t[index], s[index]
    end
  end
  state.l, state.e = sum(latest, latest_rest, state.m, state.n, state.a)
  for index, open in ipairs(state.o) do
    if open == number then
      table.remove(state.o, index)
      table.remove(state.q, index)
      table.remove(state.r, index)
      break
    end
  end
  prune(state, after)
end

local DAY_US = 86400000000

-- Return the first day of the month of a day; both are days since 1970. Years begin with March here, so that
-- the leap day is the last one (Howard Hinnant's civil_from_days).
local function first_of_month(day)
  local in_era = (day + 719468) % 146097
  local years = in_era - math.floor(in_era / 1460) + math.floor(in_era / 36524) - math.floor(in_era / 146096)
  years = math.floor(years / 365)
  local in_year = in_era - (365 * years + math.floor(years / 4) - math.floor(years / 100))
  local month = math.floor((5 * in_year + 2) / 153)
  return day - (in_year - math.floor((153 * month + 2) / 5))
end

-- Return the start of a calendar's period and the start of the next one, UTC.
local function period(limit, now)
  local day = math.floor(now / DAY_US)
  if limit.p == 'day' then return day * DAY_US, (day + 1) * DAY_US end
  local first = first_of_month(day)
  return first * DAY_US, first_of_month(first + 31) * DAY_US
end

local function roll(limit, state, now)
  local start = period(limit, now)
  if start > state.p then
    state.p = start
    state.u = 0
  end
end

-- Leases of each state: their number and the last expiry. Counted once per call of the script, during which time
-- stands still.
local leases = {}

local function expire_leases(state, now)
  if leases[state] then return leases[state].count, leases[state].latest end
  local count, latest = 0, now
  for id, ends in pairs(state.l) do
    if ends > now then
      count = count + 1
      if ends > latest then latest = ends end
    else
      state.l[id] = nil
    end
  end
  leases[state] = {count = count, latest = latest}
  return count, latest
end

local function take_lease(state, id, ends, now)
  local count, latest = expire_leases(state, now)
  if not state.l[id] then count = count + 1 end
  state.l[id] = ends
  leases[state] = {count = count, latest = math.max(ends, latest)}
end

local function end_lease(state, id, now)
  local count, latest = expire_leases(state, now)
  if not state.l[id] then return end
  -- If this lease was the last to expire, the last expiry has to be searched again.
  leases[state] = state.l[id] < latest and {count = count - 1, latest = latest} or nil
  state.l[id] = nil
end

-- Return the time until a cost fits. c: the cost in the limit's unit; q and r in time, whole and rest.
local function wait_us(limit, state, c, q, r, now)
  if limit.k == 'rate' then
    local whole, rest = debt(state, now)
    whole, rest = sum(whole, rest, q - limit.w, r, limit.a)
    if rest > 0 then whole = whole + 1 end
    return math.max(0, whole)
  elseif limit.k == 'calendar' then
    roll(limit, state, now)
    if state.u + c <= limit.a then return 0 end
    local _, ends = period(limit, now)
    return ends - now
  end
  if expire_leases(state, now) + c <= limit.a then return 0 end
  return 1000000
end

local function take(limit, state, number, id, c, q, r, now, lease)
  if limit.k == 'rate' then
    local last, amount = #state.f + 1, limit.a
    state.f[last] = number
    state.t[last], state.s[last] = difference(now, 0, state.m, state.n, amount)
    prune(state, last)
    local open = #state.o + 1
    state.o[open], state.q[open], state.r[open] = number, q, r
    state.m, state.n = sum(state.m, state.n, q, r, amount)
    if is_less(state.l, state.e, now, 0) then state.l, state.e = now, 0 end
    state.l, state.e = sum(state.l, state.e, q, r, amount)
  elseif limit.k == 'calendar' then
    roll(limit, state, now)
    state.u = state.u + c
  else
    take_lease(state, id, now + lease, now)
  end
end

-- Return a limit's state as quotas/operations.py decodes it: used, time to reset, and of a rate the rest.
local function status(limit, state, now)
  if limit.k == 'rate' then
    local whole, rest = debt(state, now)
    return {whole, whole, rest}
  elseif limit.k == 'calendar' then
    roll(limit, state, now)
    local _, ends = period(limit, now)
    return {state.u, ends - now}
  end
  local count, latest = expire_leases(state, now)
  return {count, latest - now}
end
