-- Take a job from a worker that is going or gone.
-- ARGV: prefix, job, token or '' (then only an expired lease is taken), most attempts, 1 to hand back, error (JSON),
--       error of a passed deadline (JSON), dead letters kept
-- Handing back puts the job at the head and does not count the attempt. Otherwise the job goes to the tail,
-- or, after the most attempts, ends as failed and is noted in its tenant's dead-letter list, its table kept.
-- Returns the queue that must be woken, 'failed', 'cancelled', or '' when there was nothing to take.
local job, token, most, handback = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'
local hash = key('job', job)
local f = redis.call('HMGET', hash, 'state', 'token', 'attempt', 'cancel', 'tenant', 'queue', 'table', 'dataset')
local tenant = f[5]
if f[1] ~= 'running' then
  redis.call('ZREM', key('running'), job)
  return ''
end
if token ~= '' then
  if f[2] ~= token then
    return ''
  end
else
  local lease = redis.call('ZSCORE', key('running'), job)
  if lease and tonumber(lease) >= now_ms() then
    return ''
  end
end
if f[4] == '1' then
  finish(job, 'cancelled', { 'error', '' })
  return 'cancelled'
end
if overdue(job) then
  finish(job, 'failed', { 'error', ARGV[7] }, true)
  return 'failed'
end
if handback then
  redis.call('HINCRBY', hash, 'attempt', -1)
elseif tonumber(f[3]) >= most then
  local dead = key('dead', tenant)
  refer(tenant, 'table', f[7], 'dead/' .. job)
  redis.call('LPUSH', dead, job)
  for _, old in ipairs(redis.call('LRANGE', dead, tonumber(ARGV[8]), -1)) do
    undead(tenant, old)
  end
  finish(job, 'failed', { 'error', ARGV[6] })
  return 'failed'
end
redis.call('HSET', hash, 'state', 'queued', 'token', '', 'phase', '', 'fraction', 0)
redis.call('ZREM', key('running'), job)
enqueue(job, handback)
event(job)
changed(tenant, f[8])
return f[6]
