-- Make the leases and reservations of calls that are still in flight last longer.
-- KEYS: limits' state, open reservations, their ends.
-- ARGV[1], msgpack: now, ids, expires (microseconds from now), lease, names of the in-flight limits.
local ask = cmsgpack.unpack(ARGV[1])
local now = now_us(ask.now)
for _, id in ipairs(ask.ids) do
  if redis.call('HEXISTS', KEYS[2], id) == 1 then
    redis.call('ZADD', KEYS[3], now + ask.expires, id)
  end
end
for _, name in ipairs(ask.names) do
  local packed = redis.call('HGET', KEYS[1], name)
  if packed then
    local state = cmsgpack.unpack(packed)
    for _, id in ipairs(ask.ids) do
      if state.l[id] then state.l[id] = now + ask.lease end
    end
    redis.call('HSET', KEYS[1], name, cmsgpack.pack(state))
  end
end
return cmsgpack.pack({ok = true})
