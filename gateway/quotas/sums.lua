-- Return the usage of tenants, added up over models and keys.
-- KEYS: of each tenant in turn, its usage (hash) on as many days, the latest first. ARGV[1], msgpack: that number.
-- Returns msgpack: for each tenant six numbers, the requests, tokens and budget of the latest day, and of all days.
local days = cmsgpack.unpack(ARGV[1])
local PLACES = {requests = 1, tokens = 2, budget = 3}
local sums = {}
for index, key in ipairs(KEYS) do
  local day = (index - 1) % days
  local first = 6 * math.floor((index - 1) / days)
  if day == 0 then
    for place = 1, 6 do sums[first + place] = 0 end
  end
  -- What is no hash has no fields.
  local counts = redis.pcall('HGETALL', key)
  for at = 1, #counts, 2 do
    -- A field ends with the unit, after the last "|".
    local place = PLACES[string.match(counts[at], '|(%l+)$')]
    if place then
      local amount = tonumber(counts[at + 1]) or 0
      if day == 0 then sums[first + place] = sums[first + place] + amount end
      sums[first + 3 + place] = sums[first + 3 + place] + amount
    end
  end
end
return cmsgpack.pack(sums)
