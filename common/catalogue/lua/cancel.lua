-- Cancel a job. ARGV: prefix, job. Returns the state after it, or '' for an unknown job.
local job = ARGV[2]
cancel(job)
return redis.call('HGET', key('job', job), 'state') or ''
