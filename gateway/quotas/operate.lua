-- One tenant's operations: settle what is over, then reserve, each all of its limits or none.
-- Every limit is read once and written once, and nothing is written before everything has been decided.
-- KEYS: limits' state (hash), open reservations (hash), their ends (sorted set), usage of a day, ...
-- ARGV[1], msgpack: now (0: Redis' clock), lease (µs), ttl, usage_ttl (s),
--   limits: {f name, k kind, a amount, w window of a rate, p period of a calendar},
--   settles: {id, mark, key of the usage, {place of the limit, c, q, r, true c, q, r, ...}, {field, amount, ...}},
--   reserves: {id, expires (µs from now), shadow, {place of the limit, c, q, r, ...}}.
-- c is a cost, q and r the same in a rate's time. mark (µs, or 0): where nothing is open, leave a mark for so
-- long: a reserve that was given up may still be on its way, and must take nothing then.
-- Answers msgpack: now, the limits' standings at the end, and for each reserve
--   {ok, place among its limits of the one that blocks or 0, wait, standing, ...}.
local ask = cmsgpack.unpack(ARGV[1])
local now = now_us(ask.now)
-- What is swept in one run; the next goes on.
local SWEPT_MAX = 32

local states, changed = {}, {}
-- How many reservations there were, and since when they are counted.
local names = {'#', '@'}
for index, limit in ipairs(ask.limits) do names[index + 2] = limit.f end
local packed = redis.call('HMGET', KEYS[1], unpack(names))
local number, since = tonumber(packed[1] or 0), tonumber(packed[2] or now)

local function read(name, one)
  local state = cmsgpack.unpack(one)
  changed[name] = follow(state, now) or nil
  return state
end

for index, limit in ipairs(ask.limits) do
  states[limit.f] = packed[index + 2] and read(limit.f, packed[index + 2]) or fresh(limit)
end

local function state_of(name)
  if states[name] == nil then
    local one = redis.call('HGET', KEYS[1], name)
    states[name] = one and read(name, one) or false
  end
  return states[name]
end

-- Reservations by id: what Redis holds of those in question, and what it shall hold. A record is its number
-- and, by limit, the period of a calendar or 0; the mark of one that was closed before it was made is empty.
local stored, records, ends = {}, {}, {}
local ids = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, SWEPT_MAX)
local swept = #ids
for _, one in ipairs(ask.settles) do ids[#ids + 1] = one[1] end
for _, one in ipairs(ask.reserves) do ids[#ids + 1] = one[1] end
if #ids > 0 then
  for index, one in ipairs(redis.call('HMGET', KEYS[2], unpack(ids))) do
    stored[ids[index]] = one
    records[ids[index]] = one
  end
end

-- What was not settled by its end counts as spent: its cost stays, only the record of it goes.
for index = 1, swept do
  local record = records[ids[index]]
  if record and record ~= '' then
    record = cmsgpack.unpack(record)
    for name in pairs(record.p) do
      local state = state_of(name)
      if state and state.k == 'rate' then
        correct(state, record.n, 0, 0)
        changed[name] = true
      end
    end
  end
  records[ids[index]] = false
end

-- Past its end it has been spent, also where it has not been swept away yet.
local function is_open(id)
  if not records[id] or records[id] == '' then return false end
  if swept < SWEPT_MAX then return true end
  return tonumber(redis.call('ZSCORE', KEYS[3], id) or 0) > now
end

local usage = {}
for _, one in ipairs(ask.settles) do
  local id, mark, key, amounts, used = unpack(one)
  if is_open(id) then
    local record = cmsgpack.unpack(records[id])
    for at = 1, #amounts, 7 do
      local limit = ask.limits[amounts[at]]
      local state, period = states[limit.f], record.p[limit.f]
      if limit.k == 'rate' then
        local q, r, true_q, true_r = amounts[at + 2], amounts[at + 3], amounts[at + 5], amounts[at + 6]
        correct(state, record.n, difference(true_q, true_r, q, r, limit.a))
      elseif limit.k == 'calendar' then
        if period == state.p then state.u = state.u + amounts[at + 4] - amounts[at + 1] end
      else
        end_lease(state, id, now)
      end
      changed[limit.f] = true
    end
    records[id] = false
    for at = 1, #used, 2 do usage[#usage + 1] = {KEYS[key], used[at], used[at + 1]} end
  elseif mark > 0 and not records[id] then
    records[id], ends[id] = '', now + mark
  end
end

local function reserve(id, expires, shadow, amounts)
  local longest, blocking, told = 0, 0, {true, 0, 0}
  local again = records[id]
  for at = 1, #amounts, 4 do
    local limit = ask.limits[amounts[at]]
    local wait = wait_us(limit, states[limit.f], amounts[at + 1], amounts[at + 2], amounts[at + 3], now)
    if wait > longest then longest, blocking = wait, (at + 3) / 4 end
  end
  -- The same reservation again is a retry of a call whose answer was lost.
  if not again then
    told[1], told[2], told[3] = longest == 0 or shadow, blocking, longest
  end
  if told[1] and not again then
    number = number + 1
    local record = {n = number, p = {}}
    for at = 1, #amounts, 4 do
      local limit = ask.limits[amounts[at]]
      local state = states[limit.f]
      take(limit, state, number, id, amounts[at + 1], amounts[at + 2], amounts[at + 3], now, ask.lease)
      record.p[limit.f] = state.p or 0
      changed[limit.f] = true
    end
    records[id], ends[id] = cmsgpack.pack(record), now + expires
  end
  for at = 1, #amounts, 4 do
    local limit = ask.limits[amounts[at]]
    told[#told + 1] = standing(limit, states[limit.f], now)
  end
  return told
end

local told = {}
for index, one in ipairs(ask.reserves) do told[index] = reserve(unpack(one)) end
local shown = {}
for index, limit in ipairs(ask.limits) do shown[index] = standing(limit, states[limit.f], now) end

local kept, set, deleted, scores, gone = {'#', number, '@', since}, {}, {}, {}, {}
for name in pairs(changed) do
  states[name].w = now
  kept[#kept + 1] = name
  kept[#kept + 1] = cmsgpack.pack(states[name])
end
for id, record in pairs(records) do
  if record and record ~= stored[id] then
    set[#set + 1], set[#set + 2] = id, record
    scores[#scores + 1], scores[#scores + 2] = ends[id], id
  elseif stored[id] and not record then
    deleted[#deleted + 1] = id
  end
end
for index = 1, swept do gone[ids[index]] = true end
for _, id in ipairs(deleted) do gone[id] = true end
local unlisted = {}
for id in pairs(gone) do
  if not records[id] then unlisted[#unlisted + 1] = id end
end
if next(changed) then redis.call('HSET', KEYS[1], unpack(kept)) end
if #deleted > 0 then redis.call('HDEL', KEYS[2], unpack(deleted)) end
if #unlisted > 0 then redis.call('ZREM', KEYS[3], unpack(unlisted)) end
if #set > 0 then
  redis.call('HSET', KEYS[2], unpack(set))
  redis.call('ZADD', KEYS[3], unpack(scores))
  for index = 1, 3 do redis.call('EXPIRE', KEYS[index], ask.ttl) end
end
for _, one in ipairs(usage) do
  redis.call('HINCRBY', one[1], one[2], one[3])
end
for index = 4, usage[1] and #KEYS or 0 do redis.call('EXPIRE', KEYS[index], ask.usage_ttl) end
return cmsgpack.pack({now, shown, told})
