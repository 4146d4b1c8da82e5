-- Removes a worker's record if it still belongs to this incarnation.
-- KEYS: 1 record hash, 2 members sorted set.  ARGV: 1 worker id, 2 incarnation
if redis.call('HGET', KEYS[1], 'incarnation') == ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
  return 1
end
return 0
