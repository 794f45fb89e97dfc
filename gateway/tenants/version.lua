-- Return the next version of the keys and tenants: lineage.number.random, where the number grows by one with each
-- change, and the lineage is new in an empty store. That distinguishes a change from a loss of data.
-- random: of the caller. An earlier release wrote only that: its last one becomes the lineage.
local function next_version(key, random)
  local present = redis.call('GET', key) or ''
  local lineage, number = string.match(present, '^(%w+)%.(%d+)%.')
  if not lineage then lineage = string.match(present, '^%w+$') end
  return string.format('%s.%.0f.%s', lineage or random, (tonumber(number) or 0) + 1, random)
end

-- Remember for `kept` seconds that operators removed something: a gateway which keeps it after a loss of data must
-- not. removed: name of a key or a tenant, after `key ` or `tenant `.
local function record_removal(key, removed, kept)
  local time = redis.call('TIME')
  local now = tonumber(time[1])
  redis.call('ZADD', key, string.format('%d.%06d', time[1], time[2]), removed)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now - kept)
  redis.call('EXPIRE', key, kept)
end
