-- Add a question to all gateways, unless as many as allowed are open.
-- KEYS: questions by their end (sorted set).
-- ARGV[1], msgpack: question, seconds, most, asker (a tenant, empty for an operator; of each one question may
-- be open), most_of_tenants. Returns msgpack: true if it was added.
local argument = cmsgpack.unpack(ARGV[1])
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. now)
local questions = redis.call('ZRANGE', KEYS[1], 0, -1)
if #questions >= argument.most then return cmsgpack.pack(false) end
if argument.asker ~= '' then
  local of_tenants = 0
  for _, text in ipairs(questions) do
    local is_json, question = pcall(cjson.decode, text)
    local asker = is_json and type(question) == 'table' and question.asker or ''
    if asker == argument.asker then return cmsgpack.pack(false) end
    if asker ~= '' then of_tenants = of_tenants + 1 end
  end
  if of_tenants >= argument.most_of_tenants then return cmsgpack.pack(false) end
end
redis.call('ZADD', KEYS[1], now + argument.seconds, argument.question)
redis.call('EXPIRE', KEYS[1], argument.seconds + 1)
return cmsgpack.pack(true)
