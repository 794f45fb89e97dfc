-- Return, with a space between them: the clock of Redis in microseconds, the digest of the first key, and the
-- version of the keys and tenants.
-- KEYS: version, first key.
local time, first_key = redis.call('TIME'), redis.call('GET', KEYS[2]) or ''
return string.format('%d%06d ', time[1], time[2]) .. first_key .. ' ' .. (redis.call('GET', KEYS[1]) or '')
