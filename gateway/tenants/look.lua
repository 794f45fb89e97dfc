-- Return the clock of Redis in microseconds and the version of the keys and tenants, with a space between them.
-- KEYS: version.
local time = redis.call('TIME')
return string.format('%d%06d ', time[1], time[2]) .. (redis.call('GET', KEYS[1]) or '')
