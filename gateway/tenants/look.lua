-- Return, with a space between them: the clock of Redis in microseconds, the number of keys and of tenants, the
-- digest of the first key, and the version of the keys and tenants.
-- KEYS: version, first key, keys (hash), tenants (hash).
local time, first_key = redis.call('TIME'), redis.call('GET', KEYS[2]) or ''
local keys, tenants = redis.call('HLEN', KEYS[3]), redis.call('HLEN', KEYS[4])
return string.format('%d%06d %d %d ', time[1], time[2], keys, tenants)
  .. first_key .. ' ' .. (redis.call('GET', KEYS[1]) or '')
