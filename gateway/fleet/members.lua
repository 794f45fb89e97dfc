-- Return the members with the seconds since their last record.
-- KEYS: members by the time of their last record (sorted set).
-- ARGV[1], msgpack: most members. Returns msgpack: a list of id and seconds, the newest first.
local argument = cmsgpack.unpack(ARGV[1])
local now = tonumber(redis.call('TIME')[1])
local found = redis.call('ZREVRANGE', KEYS[1], 0, argument.most - 1, 'WITHSCORES')
local members = {}
for index = 1, #found, 2 do
  members[#members + 1] = { found[index], math.max(0, now - tonumber(found[index + 1])) }
end
return cmsgpack.pack(members)
