-- Report a phase and its fraction, or other fields of a running job.
-- ARGV: prefix, job, token, phase, fraction, then field, value, ...
-- Returns 'ok', 'cancel' (somebody wants it ended) or 'stale' (the claim is no longer ours).
local job, token, phase, fraction = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local hash = key('job', job)
local f = redis.call('HMGET', hash, 'state', 'token', 'phase', 'cancel')
if f[1] ~= 'running' or f[2] ~= token then
  return 'stale'
end
if f[3] ~= phase then
  redis.call('HSET', hash, 'phase_ms', int(now_ms()))
end
redis.call('HSET', hash, 'phase', phase, 'fraction', fraction, unpack(ARGV, 6))
event(job)
if f[4] == '1' then
  return 'cancel'
end
return 'ok'
