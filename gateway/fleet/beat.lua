-- Renew the record of a gateway, forget gateways that are silent, and return the open questions. The clock is
-- that of Redis: those of gateways may differ.
-- KEYS: members by the time of their last record (sorted set), record, questions by their end (sorted set).
-- ARGV[1], msgpack: id, record, kept (s). Returns msgpack: the questions.
local argument = cmsgpack.unpack(ARGV[1])
local now = tonumber(redis.call('TIME')[1])
-- SET comes first: a server without memory refuses it, but would accept it after another write.
redis.call('SET', KEYS[2], argument.record, 'EX', argument.kept)
redis.call('ZADD', KEYS[1], now, argument.id)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - argument.kept)
redis.call('EXPIRE', KEYS[1], argument.kept)
return cmsgpack.pack(redis.call('ZRANGEBYSCORE', KEYS[3], now, '+inf'))
