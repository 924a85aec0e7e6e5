-- Accept a fit job, or answer with the job that already did the same.
-- ARGV: prefix, job id, tenant, dataset, queue, context key or '', idempotency key or '', fingerprint,
--       most waiting jobs, most of one tenant, ended jobs kept, 1 to fit even what is current, seconds to its deadline
--       or 0, then field, value, ...
-- Returns {outcome, job id}: accepted, joined (another job fits the same content now), known (already current),
--       repeated (same idempotency key), or {'full', waiting, bound}, {'mismatch'} (the idempotency key came with another payload).
local job, tenant, dataset, queue = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local context_key, idempotency, fingerprint = ARGV[6], ARGV[7], ARGV[8]
local most, most_tenant, kept = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local again, deadline_s = ARGV[12] == '1', tonumber(ARGV[13])
local QUEUES, PRIORITIES = { 'fit.small', 'fit.large' }, { 'interactive', 'batch' }

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
if not again and context_key ~= '' and current and redis.call('SCARD', pending) == 0 then
  local record = redis.call('HGET', key('versions', tenant, dataset), current)
  if record then
    local v = cjson.decode(record)
    if v.key == context_key and redis.call('EXISTS', key('job', v.job)) == 1 then
      remember(v.job)
      return { 'known', v.job }
    end
  end
end

local waiting, theirs = 0, redis.call('SCARD', key('joined', tenant))
for _, name in ipairs(QUEUES) do
  waiting = waiting + redis.call('ZCARD', key('queued', name))
  for _, priority in ipairs(PRIORITIES) do
    theirs = theirs + redis.call('LLEN', key('wait', name, priority, tenant))
  end
end
if theirs >= most_tenant then
  return { 'full', int(theirs), int(most_tenant) }
end
if waiting >= most then
  return { 'full', int(waiting), int(most) }
end

local now = now_ms()
if redis.call('HSETNX', entry, 'created_ms', int(now)) == 1 then
  redis.call('ZADD', key('datasets', tenant), 0, dataset)
end
local version = redis.call('HINCRBY', entry, 'next', 1)
local hash = key('job', job)
redis.call('HSET', hash, 'id', job, 'tenant', tenant, 'dataset', dataset, 'queue', queue, 'version', version,
  'key', context_key, 'state', 'queued', 'attempt', 0, 'created_ms', int(now), unpack(ARGV, 14))
redis.call('ZADD', key('jobs', tenant), int(now), job)
redis.call('SADD', pending, job)
if deadline_s > 0 then
  redis.call('HSET', hash, 'deadline_ms', int(now + deadline_s * 1000))
  redis.call('ZADD', key('deadlines'), int(now + deadline_s * 1000), job)
end
refer(tenant, 'table', redis.call('HGET', hash, 'table'), 'job/' .. job)

local outcome = 'accepted'
local leader = context_key ~= '' and redis.call('HGET', key('leads', tenant), context_key)
local l = leader and redis.call('HMGET', key('job', leader), 'state', 'cancel', 'priority')
if l and (l[1] == 'queued' or (l[1] == 'running' and l[2] ~= '1')) then
  outcome = 'joined'
  join(job, leader, tenant)
  if l[1] == 'queued' and l[3] == 'batch' and redis.call('HGET', hash, 'priority') == 'interactive' then
    dequeue(leader)
    redis.call('HSET', key('job', leader), 'priority', 'interactive')
    enqueue(leader, false)
  end
else
  if context_key ~= '' then
    redis.call('HSET', key('leads', tenant), context_key, job)
  end
  enqueue(job, false)
end
remember(job)
changed(tenant, dataset)

-- The list of a tenant's jobs is bounded: the oldest ended ones go.
local over = redis.call('ZCARD', key('jobs', tenant)) - kept
if over > 0 then
  for _, old in ipairs(redis.call('ZRANGE', key('jobs', tenant), 0, math.min(over, 16) - 1)) do
    local state = redis.call('HGET', key('job', old), 'state')
    if state ~= 'queued' and state ~= 'running' then
      undead(tenant, old)
      redis.call('DEL', key('job', old), key('events', old))
      redis.call('ZREM', key('jobs', tenant), old)
    end
  end
end
return { outcome, job }
