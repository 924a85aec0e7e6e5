-- Renew a lease. ARGV: prefix, job, token, lease in ms. Returns 1, or 0 when the claim is no longer ours.
local job, token, lease_ms = ARGV[2], ARGV[3], tonumber(ARGV[4])
local f = redis.call('HMGET', key('job', job), 'state', 'token')
if f[1] ~= 'running' or f[2] ~= token then
  return 0
end
redis.call('ZADD', key('running'), now_ms() + lease_ms, job)
return 1
