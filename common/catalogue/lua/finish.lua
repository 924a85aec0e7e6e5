-- End a running job as failed or cancelled.
-- ARGV: prefix, job, token, state, error (JSON or ''), timings (JSON), 1 when the fault is this job's alone
-- Returns 'ok', or why the claim no longer holds.
local job, token, state = ARGV[2], ARGV[3], ARGV[4]
local holds = claimed(job, token)
if holds ~= 'ok' then
  return holds
end
finish(job, state, { 'error', ARGV[5], 'timings', ARGV[6] }, ARGV[7] == '1')
return 'ok'
