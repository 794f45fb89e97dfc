-- Add or replace the row of a file or a job, within the bounds on bytes; or remove it.
-- KEYS: rows (hash), bytes by tenant, with those of all under an empty name (hash), active jobs, unfinished
--   uploads, shown rows of the kind, those of the tenant, and its active jobs (sorted sets).
-- ARGV[1], msgpack: id, tenant, at, bytes, shown, active, unfinished, row (empty: remove),
--   of_tenant, total (bounds on bytes; 0: none), shown_max, active_max (bounds on rows; -1: none), trial
--   (change nothing).
-- Returns msgpack: '' or the exceeded bound.
local argument = cmsgpack.unpack(ARGV[1])
local id, tenant = argument.id, argument.tenant
local encoded = redis.call('HGET', KEYS[1], id)
local old = encoded and cjson.decode(encoded)
local more = argument.bytes
if old then more = more - old.bytes end
if argument.shown_max >= 0 and not (old and old.is_shown) then
  if argument.active and redis.call('ZCARD', KEYS[7]) >= argument.active_max then return cmsgpack.pack('active') end
  if redis.call('ZCARD', KEYS[6]) >= argument.shown_max then return cmsgpack.pack('shown') end
end
if more > 0 and argument.total > 0 then
  local of_tenant = tonumber(redis.call('HGET', KEYS[2], 't' .. tenant) or 0)
  if of_tenant + more > argument.of_tenant then return cmsgpack.pack('tenant') end
  local total = tonumber(redis.call('HGET', KEYS[2], '') or 0)
  if total + more > argument.total then return cmsgpack.pack('total') end
end
if argument.trial then return cmsgpack.pack('') end
local function place(key, is_member)
  if is_member then redis.call('ZADD', key, argument.at, id) else redis.call('ZREM', key, id) end
end
if argument.row == '' then
  if not old then return cmsgpack.pack('') end
  redis.call('HDEL', KEYS[1], id)
else
  redis.call('HSET', KEYS[1], id, argument.row)
end
if more ~= 0 then
  if redis.call('HINCRBY', KEYS[2], 't' .. tenant, more) == 0 then redis.call('HDEL', KEYS[2], 't' .. tenant) end
  redis.call('HINCRBY', KEYS[2], '', more)
end
place(KEYS[3], argument.active)
place(KEYS[4], argument.unfinished)
place(KEYS[5], argument.shown)
place(KEYS[6], argument.shown)
place(KEYS[7], argument.active)
return cmsgpack.pack('')
