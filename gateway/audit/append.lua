-- Append records of changes in the same step as the changes. A record that is there already stays as it is.
-- key: of the records (sorted set, by milliseconds since 1970). audit: records (list of {ms, JSON}), most, and
-- oldest (ms): what exceeds them is removed, the oldest first.
local function append_audit(key, audit)
  for _, record in ipairs(audit.records) do
    redis.call('ZADD', key, record[1], record[2])
  end
  redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. audit.oldest)
  redis.call('ZREMRANGEBYRANK', key, 0, -audit.most - 1)
end
