-- Bring recorded versions of a dataset back; what the catalogue knows already stays as it is.
-- ARGV: prefix, tenant, dataset, JSON: {next, pinned, versions: [{version, record, open}]}
-- `open`: the record file does not tell whether it was published; a job that is still known tells, by its absence here.
-- Returns {1 when the dataset was not there, 1 when it was pinned, version restored, ...}
local tenant, dataset, given = ARGV[2], ARGV[3], cjson.decode(ARGV[4])
local entry, versions = key('dataset', tenant, dataset), key('versions', tenant, dataset)
local there = redis.call('HEXISTS', entry, 'current') == 1
local current = tonumber(redis.call('HGET', entry, 'current') or '0')
local restored, job_of, highest, newest, oldest_ms = {}, {}, 0, nil, nil

for _, item in ipairs(given.versions) do
  local number, v = int(item.version), cjson.decode(item.record)
  local undecided = item.open and redis.call('EXISTS', key('job', v.job)) == 1
  if not undecided and redis.call('HEXISTS', versions, number) == 0 then
    local holder = 'dataset/' .. dataset .. '/' .. number
    redis.call('HSET', versions, number, item.record)
    refer(tenant, 'context', v.context, holder)
    refer(tenant, 'table', v.table, holder)
    redis.call('HSETNX', key('keys', tenant), v.key, v.context)
    restored[#restored + 1], job_of[number] = number, v.job
    oldest_ms = math.min(oldest_ms or v.created_ms, v.created_ms)
    if item.version > highest then
      highest, newest = item.version, v
    end
  end
end

if #restored > 0 then
  redis.call('HSETNX', entry, 'created_ms', int(oldest_ms))
  redis.call('HSETNX', entry, 'updated_ms', int(newest.created_ms))
  redis.call('ZADD', key('datasets', tenant), 0, dataset)
  if highest > current then
    redis.call('HSET', entry, 'current', int(highest))
    set_expiry(tenant, dataset, newest)
  end
  if tonumber(redis.call('HGET', entry, 'next') or '0') < given.next then
    redis.call('HSET', entry, 'next', int(given.next))
  end
  -- A job that an emptied catalogue took may have been given a number that was used before.
  for _, job in ipairs(redis.call('SMEMBERS', key('pending', tenant, dataset))) do
    local f = redis.call('HMGET', key('job', job), 'state', 'version')
    if job_of[f[2]] and job_of[f[2]] ~= job then
      if f[1] == 'queued' then
        redis.call('HSET', key('job', job), 'version', redis.call('HINCRBY', entry, 'next', 1))
      else
        redis.call('HSET', key('job', job), 'cancel', 1)
      end
    end
  end
end

local pinned = 0
if given.pinned and redis.call('HEXISTS', entry, 'current') == 1 then
  pinned = redis.call('HSETNX', entry, 'pinned', 1)
  redis.call('SADD', key('pinned'), tenant .. '/' .. dataset)
end
if #restored > 0 or pinned == 1 then
  changed(tenant, dataset)
end
return { (#restored > 0 and not there) and 1 or 0, pinned, unpack(restored) }
