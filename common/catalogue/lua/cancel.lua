-- Cancel a job: at once while it waits, at its worker's next look while it runs.
-- ARGV: prefix, job. Returns the state after it, or '' for an unknown job.
local job = ARGV[2]
local hash = key('job', job)
local f = redis.call('HMGET', hash, 'state', 'tenant', 'queue')
if not f[1] then
  return ''
end
if f[1] == 'queued' then
  redis.call('LREM', key('wait', f[3], f[2]), 1, job)
  finish(job, 'cancelled', { 'error', '' })
  return 'cancelled'
end
if f[1] == 'running' then
  redis.call('HSET', hash, 'cancel', 1)
end
return f[1]
