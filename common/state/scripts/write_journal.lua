-- Writes a journal entry unless the stored one has a newer epoch or is final.
-- KEYS: 1 entry hash, 2 index sorted set (score = updated, wall s)
-- ARGV: 1 request id, 2 epoch, 3 1 if final, 4 entry JSON, 5 ttl ms, 6 updated wall s, 7 entries kept in the index
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'final')
if stored[1] and (tonumber(stored[1]) > tonumber(ARGV[2]) or stored[2] == '1') then
  return 0
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'final', ARGV[3], 'entry', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('ZADD', KEYS[2], ARGV[6], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -tonumber(ARGV[7]) - 1)
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[5]) then
  redis.call('PEXPIRE', KEYS[2], ARGV[5])
end
return 1
