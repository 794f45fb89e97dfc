-- Take a cost from all of a tenant's limits, or from none.
-- KEYS: limits' state (hash), open reservations (hash), their ends (sorted set).
-- ARGV[1], msgpack: now (0: Redis' clock), id, expires (microseconds from now), lease, shadow, ttl
-- (seconds), limits: f name, k kind, a amount, c cost; of a rate w window, q and r cost in
-- time, whole and rest; of a calendar b boundaries.
-- Answers msgpack: ok, s standings, at when; where it is refused i, the place of the limit, and w, the wait.
local ask = cmsgpack.unpack(ARGV[1])
local now = now_us(ask.now)

-- What was not settled by its end counts as spent: its cost stays, only the record of it goes.
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 32)) do
  local packed = redis.call('HGET', KEYS[2], id)
  if packed then
    local record = cmsgpack.unpack(packed)
    for name, reserved in pairs(record.c) do
      local state = redis.call('HGET', KEYS[1], name)
      if state and reserved.k == 'rate' then
        state = cmsgpack.unpack(state)
        remove(state.o, record.n)
        merge(state)
        redis.call('HSET', KEYS[1], name, cmsgpack.pack(state))
      end
    end
    redis.call('HDEL', KEYS[2], id)
  end
  redis.call('ZREM', KEYS[3], id)
end

-- The same reservation again is a retry of a call whose answer was lost.
if redis.call('HEXISTS', KEYS[2], ask.id) == 1 then
  return cmsgpack.pack({ok = true, s = standings(KEYS[1], ask.limits, now)})
end

local states, longest, blocking = {}, 0, 0
for index, limit in ipairs(ask.limits) do
  states[index] = read_state(KEYS[1], limit)
  local wait = wait_us(limit, states[index], now)
  if wait > longest then longest, blocking = wait, index end
end
if longest > 0 and not ask.shadow then
  return cmsgpack.pack({ok = false, i = blocking, w = longest, s = standings(KEYS[1], ask.limits, now)})
end

local number = redis.call('HINCRBY', KEYS[1], '#', 1)
local costs, shown = {}, {}
for index, limit in ipairs(ask.limits) do
  take(limit, states[index], number, ask.id, now, ask.lease)
  write_state(KEYS[1], limit, states[index])
  costs[limit.f] = {k = limit.k, c = limit.c, q = limit.q, r = limit.r, p = states[index].p}
  shown[index] = standing(limit, states[index], now)
end
redis.call('HSET', KEYS[2], ask.id, cmsgpack.pack({n = number, c = costs}))
redis.call('ZADD', KEYS[3], now + ask.expires, ask.id)
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ask.ttl) end
return cmsgpack.pack({ok = true, s = shown, i = blocking, w = longest, at = now})
