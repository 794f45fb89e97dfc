-- Append records whose changes were made elsewhere.
-- KEYS: audit records (sorted set). ARGV[1], msgpack: audit. Returns msgpack: true.
append_audit(KEYS[1], cmsgpack.unpack(ARGV[1]).audit)
return cmsgpack.pack(true)
