-- Publish a context as the job's version, end the job, flip the dataset's pointer (only upwards).
-- ARGV: prefix, job, token, context digest, version record (JSON), versions kept, timings (JSON)
-- Returns 'ok', or why not: 'stale', 'moved:<job>', 'expired' (the lease ran out), 'cancel', 'overdue',
-- 'deleted' (the dataset is gone).
local job, token, digest, record, kept = ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local holds = claimed(job, token)
if holds ~= 'ok' then
  return holds
end
local lease = redis.call('ZSCORE', key('running'), job)
if not lease or tonumber(lease) < now_ms() then
  return 'expired'
end
local f = redis.call('HMGET', key('job', job), 'tenant', 'dataset', 'version', 'cancel', 'table')
if f[4] == '1' then
  return 'cancel'
end
if overdue(job) then
  return 'overdue'
end
local tenant, dataset, version = f[1], f[2], f[3]
local entry = key('dataset', tenant, dataset)
if redis.call('EXISTS', entry) == 0 then
  return 'deleted'
end

local versions = key('versions', tenant, dataset)
local v = cjson.decode(record)
redis.call('HSET', versions, version, record)
local holder = 'dataset/' .. dataset .. '/' .. version
refer(tenant, 'context', digest, holder)
refer(tenant, 'table', f[5], holder)
redis.call('HSET', key('keys', tenant), v.key, digest)
local current = tonumber(redis.call('HGET', entry, 'current') or '0')
if tonumber(version) > current then
  redis.call('HSET', entry, 'current', version)
  set_expiry(tenant, dataset, v)
end
redis.call('HSET', entry, 'updated_ms', int(now_ms()))
local difference = type(v.largest_difference) == 'number' and string.format('%.9g', v.largest_difference) or ''
finish(job, 'succeeded', { 'phase', '', 'fraction', 1, 'context', digest, 'context_bytes', int(v.context_bytes),
  'precision', v.precision, 'cache', v.cache, 'largest_difference', difference, 'timings', ARGV[7], 'error', '' })

if redis.call('HGET', entry, 'pinned') ~= '1' then
  local numbers = {}
  for _, n in ipairs(redis.call('HKEYS', versions)) do
    numbers[#numbers + 1] = tonumber(n)
  end
  table.sort(numbers)
  for i = 1, #numbers - kept do
    end_version(tenant, dataset, int(numbers[i]))
  end
end
return 'ok'
