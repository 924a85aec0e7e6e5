-- A job that came with a raw upload has its table now: note its digest, context key and shape.
-- ARGV: prefix, job, token, table digest, context key, then field, value, ...
-- Returns 'ok', why the claim no longer holds, or 'joined' when another job fits the same content already: this one
-- then waits for it and its claim is over.
local job, token, digest, context_key = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local holds = claimed(job, token)
if holds ~= 'ok' then
  return holds
end
local hash = key('job', job)
local f = redis.call('HMGET', hash, 'tenant', 'key', 'dataset')
local tenant = f[1]
if redis.call('HGET', key('leads', tenant), f[2] or '') == job then
  redis.call('HDEL', key('leads', tenant), f[2])
end
redis.call('HSET', hash, 'table', digest, 'key', context_key, 'upload', '', unpack(ARGV, 6))
refer(tenant, 'table', digest, 'job/' .. job)
local leader = redis.call('HGET', key('leads', tenant), context_key)
local l = leader and redis.call('HMGET', key('job', leader), 'state', 'cancel')
if l and (l[1] == 'queued' or (l[1] == 'running' and l[2] ~= '1')) and redis.call('LLEN', key('followers', job)) == 0 then
  redis.call('HSET', hash, 'state', 'queued', 'token', '', 'phase', '', 'fraction', 0)
  redis.call('HINCRBY', hash, 'attempt', -1)
  redis.call('ZREM', key('running'), job)
  join(job, leader, tenant)
  event(job)
  changed(tenant, f[3])
  return 'joined'
end
redis.call('HSET', key('leads', tenant), context_key, job)
return 'ok'
