-- Report a phase and its fraction, or other fields of a running job.
-- ARGV: prefix, job, token, phase, fraction, then field, value, ...
-- Returns 'ok', 'cancel' (somebody wants it ended), 'overdue' (its deadline has passed), or why the claim no longer holds.
local job, token, phase, fraction = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local holds = claimed(job, token)
if holds ~= 'ok' then
  return holds
end
local hash = key('job', job)
local f = redis.call('HMGET', hash, 'phase', 'cancel')
if f[1] ~= phase then
  redis.call('HSET', hash, 'phase_ms', int(now_ms()))
end
redis.call('HSET', hash, 'phase', phase, 'fraction', fraction, unpack(ARGV, 6))
event(job)
if f[2] == '1' then
  return 'cancel'
end
return overdue(job) and 'overdue' or 'ok'
