-- Take a job from a worker that is going or gone.
-- ARGV: prefix, job, token or '' (then only an expired lease is taken), most attempts, 1 to hand back, error (JSON)
-- Handing back puts the job at the head and does not count the attempt. Otherwise the job goes to the tail,
-- or, after the most attempts, ends as failed and is noted in the dead-letter list.
-- Returns the queue that must be woken, 'failed', 'cancelled', or '' when there was nothing to take.
local job, token, most, handback = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'
local hash = key('job', job)
local f = redis.call('HMGET', hash, 'state', 'token', 'attempt', 'cancel', 'tenant', 'queue')
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
if handback then
  redis.call('HINCRBY', hash, 'attempt', -1)
elseif tonumber(f[3]) >= most then
  finish(job, 'failed', { 'error', ARGV[6] })
  redis.call('LPUSH', key('dead'), job)
  redis.call('LTRIM', key('dead'), 0, 9999)
  return 'failed'
end
redis.call('HSET', hash, 'state', 'queued', 'token', '', 'phase', '', 'fraction', 0)
redis.call('ZREM', key('running'), job)
enqueue(job, f[5], f[6], handback)
event(job)
changed(f[5], redis.call('HGET', hash, 'dataset'))
return f[6]
