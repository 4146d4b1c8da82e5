-- The next epoch of a request; the counter always has a TTL.
-- KEYS: 1 counter.  ARGV: 1 ttl s
local epoch = redis.call('INCR', KEYS[1])
redis.call('EXPIRE', KEYS[1], ARGV[1])
return epoch
