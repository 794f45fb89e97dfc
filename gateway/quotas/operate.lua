-- Operations of one tenant: settle, then reserve, each from all of its limits or from none.
-- Every limit is read once and written once, and nothing is written before everything has been decided.
-- KEYS: states of limits (hash), open reservations (hash), their expiries (sorted set), then in any order usage of
--   a day, usage of end users on a day, and the fields of limits of end users by the end of their use (sorted set).
-- ARGV[1], msgpack: now (0: the clock of Redis), lease (µs), ttl, usage_ttl (s),
--   limits: {f field, k kind, a amount, w window of a rate, p period of a calendar, n used amount of an alert, and of
--     an end user o, the field for all others},
--   user_limits: index of that key, or nil; places: fields that it may have; users_ttl (s),
--   settles: {id, mark, index of the usage key, {index of the limit, c, q, r, actual c, q, r, ...}, {field,
--     amount, ...}, and with an end user {index of the key, most, name, {end of the field, amount, ...}}},
--   reserves: {id, expires (µs from now), shadow, {index of the limit, c, q, r, ...}}.
-- c is a cost, q and r the same in a rate's time. mark (µs, or 0): if no reservation is open, leave a mark for
-- this long. A reserve that was withdrawn may still be on its way, and must then take nothing.
-- Returns msgpack: now, the final state of each limit, and for each reserve
--   {ok, index among its limits of the blocking one or 0, wait, state, ...}.
local argument = cmsgpack.unpack(ARGV[1])
local now = now_us(argument.now)
-- Expired reservations, and limits as new, removed per call of the script; the next call continues.
local SWEPT_MAX = 32

local states, changed = {}, {}
-- A limit of an end user whose time has passed is as new: no reservation is open, and nothing is used.
local user_limits = KEYS[argument.user_limits]
local idle = user_limits and redis.call('ZRANGEBYSCORE', user_limits, '-inf', now, 'LIMIT', 0, SWEPT_MAX) or {}
if #idle > 0 then
  redis.call('HDEL', KEYS[1], unpack(idle))
  redis.call('ZREM', user_limits, unpack(idle))
end

-- '#': number of reservations so far; '@': when their count began.
local fields = {'#', '@'}
for index, limit in ipairs(argument.limits) do fields[index + 2] = limit.f end
local packed = redis.call('HMGET', KEYS[1], unpack(fields))
local number, since = tonumber(packed[1] or 0), tonumber(packed[2] or now)

local function read(field, packed_state)
  local state = cmsgpack.unpack(packed_state)
  changed[field] = follow_clock(state, now) or nil
  return state
end

for index, limit in ipairs(argument.limits) do
  states[limit.f] = packed[index + 2] and read(limit.f, packed[index + 2]) or (not limit.o and new_state(limit))
end

local function state_of(field)
  if states[field] == nil then
    local packed_state = redis.call('HGET', KEYS[1], field)
    states[field] = packed_state and read(field, packed_state) or false
  end
  return states[field]
end

-- Return the field of a limit, with a state. That of an end user is the one for all others if no place is free.
local taken
local function field_of(limit)
  if states[limit.f] then return limit.f end
  taken = taken or redis.call('ZCARD', user_limits)
  local field = limit.f
  if taken < argument.places then taken = taken + 1 else field = limit.o end
  if not state_of(field) then
    states[field] = new_state(limit)
    -- Reservations up to this one took from the state before it, which was forgotten.
    states[field].c = number
  end
  return field
end

-- The end of use of each field of an end user that a reservation takes from.
local used_until = {}

-- Reservations by id: `stored` is the present content of Redis, `records` the new one. A record holds its number
-- and, by limit, the period of a calendar or 0. The mark of a reservation closed before it was made is empty.
local stored, records, expiries = {}, {}, {}
local ids = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, SWEPT_MAX)
local swept = #ids
for _, settle in ipairs(argument.settles) do ids[#ids + 1] = settle[1] end
for _, request in ipairs(argument.reserves) do ids[#ids + 1] = request[1] end
if #ids > 0 then
  for index, record in ipairs(redis.call('HMGET', KEYS[2], unpack(ids))) do
    stored[ids[index]] = record
    records[ids[index]] = record
  end
end

-- An expired reservation counts as spent: its cost stays, and only its record is removed.
for index = 1, swept do
  local record = records[ids[index]]
  if record and record ~= '' then
    record = cmsgpack.unpack(record)
    for field in pairs(record.p) do
      local state = state_of(field)
      if state and state.k == 'rate' then
        correct(state, record.n, 0, 0)
        changed[field] = true
      end
    end
  end
  records[ids[index]] = false
end

-- Return false for an expired reservation, even if its record has not been removed yet.
local function is_open(id)
  if not records[id] or records[id] == '' then return false end
  if swept < SWEPT_MAX then return true end
  return tonumber(redis.call('ZSCORE', KEYS[3], id) or 0) > now
end

-- Replace negative amounts by zero, in place: no gateway sends any, and they would be a credit.
local function without_credits(amounts)
  for at = 1, #amounts do
    if amounts[at] < 0 then amounts[at] = 0 end
  end
  return amounts
end

local usage, users, alerts = {}, {}, {}
for _, settle in ipairs(argument.settles) do
  local id, mark, key, amounts, used, user = unpack(settle)
  without_credits(amounts)
  if is_open(id) then
    local record = cmsgpack.unpack(records[id])
    for at = 1, #amounts, 7 do
      local limit = argument.limits[amounts[at]]
      local field = limit.o and record.p[limit.f] == nil and limit.o or limit.f
      local state, period = state_of(field), record.p[field]
      -- An end user that was forgotten meanwhile has no state, or a new one.
      if state and not (state.c and record.n <= state.c) then
        if limit.k == 'rate' then
          local q, r, actual_q, actual_r = amounts[at + 2], amounts[at + 3], amounts[at + 5], amounts[at + 6]
          correct(state, record.n, difference(actual_q, actual_r, q, r, limit.a))
        elseif limit.k == 'calendar' then
          roll(limit, state, now)
          if period == state.p then state.u = state.u + amounts[at + 4] - amounts[at + 1] end
          -- Once in a period, for all gateways together. x: start of the last period that had an alert.
          if limit.n and state.u >= limit.n and state.x ~= state.p then
            state.x = state.p
            alerts[limit.f] = true
          end
        else
          end_lease(state, id, now)
        end
        changed[field] = true
      end
    end
    records[id] = false
    for at = 1, #used, 2 do
      if used[at + 1] > 0 then usage[#usage + 1] = {KEYS[key], used[at], used[at + 1]} end
    end
    if user then users[#users + 1] = user end
  elseif mark > 0 and not records[id] then
    records[id], expiries[id] = '', now + mark
  end
end

local function reserve(id, expires, shadow, amounts)
  without_credits(amounts)
  local longest, blocking, reply = 0, 0, {true, 0, 0}
  local is_repeated = records[id]
  for at = 1, #amounts, 4 do
    local limit = argument.limits[amounts[at]]
    local wait = wait_us(limit, states[field_of(limit)], amounts[at + 1], amounts[at + 2], amounts[at + 3], now)
    if wait > longest then longest, blocking = wait, (at + 3) / 4 end
  end
  -- A reserve with a known id is the retry of a call whose reply was lost.
  if not is_repeated then
    reply[1], reply[2], reply[3] = longest == 0 or shadow, blocking, longest
  end
  if reply[1] and not is_repeated then
    number = number + 1
    local record = {n = number, p = {}}
    for at = 1, #amounts, 4 do
      local limit = argument.limits[amounts[at]]
      local field = field_of(limit)
      local state = states[field]
      take(limit, state, number, id, amounts[at + 1], amounts[at + 2], amounts[at + 3], now, argument.lease)
      record.p[field] = state.p or 0
      changed[field] = true
      if limit.o then
        local left = status(limit, state, now)[2] + 1
        used_until[field] = math.max(used_until[field] or 0, now + math.max(left, expires))
      end
    end
    records[id], expiries[id] = cmsgpack.pack(record), now + expires
  end
  for at = 1, #amounts, 4 do
    local limit = argument.limits[amounts[at]]
    reply[#reply + 1] = status(limit, states[field_of(limit)], now)
  end
  return reply
end

local replies = {}
for index, request in ipairs(argument.reserves) do replies[index] = reserve(unpack(request)) end
local final = {}
for index, limit in ipairs(argument.limits) do
  -- Gateways keep no states of end users' limits.
  final[index] = limit.o and {0, 0} or status(limit, states[limit.f], now)
  if alerts[limit.f] then final[index][3] = 1 end
end

local limits_to_set, records_to_set, to_delete, scores, closed = {'#', number, '@', since}, {}, {}, {}, {}
for field in pairs(changed) do
  states[field].w = now
  limits_to_set[#limits_to_set + 1] = field
  limits_to_set[#limits_to_set + 1] = cmsgpack.pack(states[field])
end
for id, record in pairs(records) do
  if record and record ~= stored[id] then
    records_to_set[#records_to_set + 1], records_to_set[#records_to_set + 2] = id, record
    scores[#scores + 1], scores[#scores + 2] = expiries[id], id
  elseif stored[id] and not record then
    to_delete[#to_delete + 1] = id
  end
end
for index = 1, swept do closed[ids[index]] = true end
for _, id in ipairs(to_delete) do closed[id] = true end
local without_expiry = {}
for id in pairs(closed) do
  if not records[id] then without_expiry[#without_expiry + 1] = id end
end
if next(changed) then redis.call('HSET', KEYS[1], unpack(limits_to_set)) end
if #to_delete > 0 then redis.call('HDEL', KEYS[2], unpack(to_delete)) end
if #without_expiry > 0 then redis.call('ZREM', KEYS[3], unpack(without_expiry)) end
if #records_to_set > 0 then
  redis.call('HSET', KEYS[2], unpack(records_to_set))
  redis.call('ZADD', KEYS[3], unpack(scores))
  for index = 1, 3 do redis.call('EXPIRE', KEYS[index], argument.ttl) end
end
local incremented = {}
for _, increment in ipairs(usage) do
  redis.call('HINCRBY', increment[1], increment[2], increment[3])
  incremented[increment[1]] = true
end
for key in pairs(incremented) do redis.call('EXPIRE', key, argument.usage_ttl) end
local END = string.char(31)
for _, user in ipairs(users) do
  local key, most, name, amounts = KEYS[user[1]], user[2], user[3], user[4]
  if redis.call('HEXISTS', key, name .. END) == 0 then
    if tonumber(redis.call('HGET', key, END) or 0) < most then
      redis.call('HSET', key, name .. END, 1)
      redis.call('HINCRBY', key, END, 1)
    else
      name = 'other'
    end
  end
  for at = 1, #amounts, 2 do
    if amounts[at + 1] > 0 then redis.call('HINCRBY', key, name .. amounts[at], amounts[at + 1]) end
  end
  redis.call('EXPIRE', key, argument.users_ttl)
end
for field, ends in pairs(used_until) do
  ends = math.max(ends, tonumber(redis.call('ZSCORE', user_limits, field) or 0))
  redis.call('ZADD', user_limits, ends, field)
end
if next(used_until) then redis.call('EXPIRE', user_limits, argument.ttl) end
return cmsgpack.pack({now, final, replies})
