-- Return msgpack: the numbers, from one, of the keys that there are. KEYS: of one tenant.
local present = {}
for number, key in ipairs(KEYS) do
  if redis.call('EXISTS', key) == 1 then present[#present + 1] = number end
end
return cmsgpack.pack(present)
