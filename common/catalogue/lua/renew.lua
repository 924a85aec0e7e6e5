-- Renew a lease. ARGV: prefix, job, token, lease in ms. Returns 1, or 0 when the claim is no longer ours.
local job, token, lease_ms = ARGV[2], ARGV[3], tonumber(ARGV[4])
if claimed(job, token) ~= 'ok' then
  return 0
end
redis.call('ZADD', key('running'), now_ms() + lease_ms, job)
return 1
