-- Heartbeat of one worker: record, block ownership and membership in one step, unless a newer incarnation took the name.
-- KEYS: 1 record hash, 2 incarnations sorted set (score = order of first publication), 3 members sorted set (score = expiry, wall ms of the server)
-- ARGV: 1 worker id, 2 incarnation, 3 record JSON, 4 census JSON, 5 ttl ms, 6 ttl ms of the orders, 7 incarnations remembered
local order = redis.call('ZSCORE', KEYS[2], ARGV[2])
if not order then
  local newest = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')
  order = (tonumber(newest[2]) or 0) + 1
  redis.call('ZADD', KEYS[2], order, ARGV[2])
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -tonumber(ARGV[7]) - 1)
end
redis.call('PEXPIRE', KEYS[2], ARGV[6])
local current = redis.call('HGET', KEYS[1], 'incarnation')
if current and current ~= ARGV[2] then
  local theirs = redis.call('ZSCORE', KEYS[2], current)
  if theirs and tonumber(theirs) > tonumber(order) then
    return 0
  end
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'record', ARGV[3], 'census', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_ms)
redis.call('ZADD', KEYS[3], now_ms + tonumber(ARGV[5]), ARGV[1])
redis.call('PEXPIRE', KEYS[3], ARGV[6])
return 1
