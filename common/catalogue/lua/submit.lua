-- Accept a fit job, or answer with the job that already did the same.
-- ARGV: prefix, job id, tenant, dataset, queue, context key or '', idempotency key or '', fingerprint,
--       most waiting jobs, ended jobs kept, then field, value, ...
-- Returns {outcome, job id}: accepted, known (already current), repeated (same idempotency key),
--       or {'full', waiting}, {'mismatch'} (the idempotency key came with another payload).
local job, tenant, dataset, queue = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local context_key, idempotency, fingerprint = ARGV[6], ARGV[7], ARGV[8]
local most_waiting, kept = tonumber(ARGV[9]), tonumber(ARGV[10])

local remembered = key('idempotency', tenant, idempotency)
if idempotency ~= '' then
  local earlier = redis.call('HMGET', remembered, 'job', 'fingerprint')
  if earlier[1] then
    if earlier[2] ~= fingerprint then
      return { 'mismatch', earlier[1] }
    end
    return { 'repeated', earlier[1] }
  end
end

local entry = key('dataset', tenant, dataset)
local pending = key('pending', tenant, dataset)
local function remember(id)
  if idempotency ~= '' then
    redis.call('HSET', remembered, 'job', id, 'fingerprint', fingerprint)
    redis.call('EXPIRE', remembered, 86400)
  end
end

local current = redis.call('HGET', entry, 'current')
if context_key ~= '' and current and redis.call('SCARD', pending) == 0 then
  local record = redis.call('HGET', key('versions', tenant, dataset), current)
  if record then
    local v = cjson.decode(record)
    if v.key == context_key and redis.call('EXISTS', key('job', v.job)) == 1 then
      remember(v.job)
      return { 'known', v.job }
    end
  end
end

local waiting = redis.call('ZCARD', key('queued', 'fit.small')) + redis.call('ZCARD', key('queued', 'fit.large'))
if waiting >= most_waiting then
  return { 'full', int(waiting) }
end

local now = int(now_ms())
if redis.call('HSETNX', entry, 'created_ms', now) == 1 then
  redis.call('ZADD', key('datasets', tenant), 0, dataset)
end
local version = redis.call('HINCRBY', entry, 'next', 1)
local hash = key('job', job)
redis.call('HSET', hash, 'id', job, 'tenant', tenant, 'dataset', dataset, 'queue', queue, 'version', version,
  'key', context_key, 'state', 'queued', 'attempt', 0, 'created_ms', now, unpack(ARGV, 11))
redis.call('ZADD', key('jobs', tenant), now, job)
redis.call('SADD', pending, job)
refer(tenant, 'table', redis.call('HGET', hash, 'table'), 'job/' .. job)
enqueue(job, tenant, queue, false)
remember(job)
changed(tenant, dataset)

-- The list of a tenant's jobs is bounded: the oldest ended ones go.
local over = redis.call('ZCARD', key('jobs', tenant)) - kept
if over > 0 then
  for _, old in ipairs(redis.call('ZRANGE', key('jobs', tenant), 0, math.min(over, 16) - 1)) do
    local state = redis.call('HGET', key('job', old), 'state')
    if state ~= 'queued' and state ~= 'running' then
      redis.call('DEL', key('job', old), key('events', old))
      redis.call('ZREM', key('jobs', tenant), old)
    end
  end
end
return { 'accepted', job }
