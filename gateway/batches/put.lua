-- Add or replace the row of a file or a job, within the bounds on bytes; or remove it.
-- KEYS: rows (hash), bytes by tenant, with those of all under an empty name (hash), active jobs, unfinished
--   uploads, shown rows of the kind, and those of the tenant (sorted sets).
-- ARGV[1], msgpack: id, tenant, at, bytes, shown, active, unfinished, row (empty: remove),
--   of_tenant, total (bounds; 0: none).
-- Returns msgpack: '' or the exceeded bound.
local argument = cmsgpack.unpack(ARGV[1])
local id, tenant = argument.id, argument.tenant
local old = redis.call('HGET', KEYS[1], id)
local more = argument.bytes
if old then more = more - cjson.decode(old).bytes end
if more > 0 and argument.total > 0 then
  local of_tenant = tonumber(redis.call('HGET', KEYS[2], 't' .. tenant) or 0)
  if of_tenant + more > argument.of_tenant then return cmsgpack.pack('tenant') end
  local total = tonumber(redis.call('HGET', KEYS[2], '') or 0)
  if total + more > argument.total then return cmsgpack.pack('total') end
end
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
return cmsgpack.pack('')
