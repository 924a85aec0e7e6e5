-- End a running job as failed or cancelled. ARGV: prefix, job, token, state, error (JSON or ''), timings (JSON)
-- Returns 'ok' or 'stale'.
local job, token, state = ARGV[2], ARGV[3], ARGV[4]
local f = redis.call('HMGET', key('job', job), 'state', 'token')
if f[1] ~= 'running' or f[2] ~= token then
  return 'stale'
end
finish(job, state, { 'error', ARGV[5], 'timings', ARGV[6] })
return 'ok'
