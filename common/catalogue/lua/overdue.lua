-- End a waiting job whose deadline has passed. ARGV: prefix, job, error (JSON). Returns 1, or 0 when it does not wait.
local job = ARGV[2]
if redis.call('HGET', key('job', job), 'state') ~= 'queued' then
  redis.call('ZREM', key('deadlines'), job)
  return 0
end
if not overdue(job) then
  return 0
end
finish(job, 'failed', { 'error', ARGV[3] }, true)
return 1
