-- Put before every script: names, time, and the few moves that several scripts share.
-- ARGV[1] is the key prefix of the deployment.
local P = ARGV[1]
-- A job's event stream: entries kept, and seconds after its last one.
local EVENTS_KEPT, EVENTS_TTL_S = 256, 259200

local function key(...)
  return P .. table.concat({ ... }, ':')
end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function int(n)
  return string.format('%d', n)
end

-- Tell every API process that a dataset looks different now.
local function changed(tenant, dataset)
  local n = redis.call('INCR', key('changes'))
  redis.call('ZADD', key('changed'), n, tenant .. '/' .. dataset)
  redis.call('PUBLISH', key('changed'), int(n))
end

-- kind: 'context' or 'table'; holder: who keeps the file alive.
local function refer(tenant, kind, digest, holder)
  if digest and digest ~= '' then
    redis.call('SADD', key('refs', tenant, kind, digest), holder)
    redis.call('SREM', key('dying', tenant), kind .. ':' .. digest)
  end
end

-- The last reference's end marks the file dying; whoever holds the folder's lock may then unlink it.
local function unrefer(tenant, kind, digest, holder)
  if not digest or digest == '' then
    return
  end
  local refs = key('refs', tenant, kind, digest)
  if redis.call('SREM', refs, holder) == 1 and redis.call('SCARD', refs) == 0 then
    redis.call('SADD', key('dying', tenant), kind .. ':' .. digest)
  end
end

-- A job that waits stands in its tenant's list; tenants take turns.
local function enqueue(job, tenant, queue, at_head)
  local waiting = key('wait', queue, tenant)
  if redis.call('LLEN', waiting) == 0 then
    redis.call('RPUSH', key('turns', queue), tenant)
  end
  redis.call(at_head and 'LPUSH' or 'RPUSH', waiting, job)
  redis.call('ZADD', key('queued', queue), at_head and 0 or now_ms(), job)
end

-- A dataset expires `ttl_s` after its current version was published, or never.
local function set_expiry(tenant, dataset, v)
  local entry, member = key('dataset', tenant, dataset), tenant .. '/' .. dataset
  if v.ttl_s and v.ttl_s > 0 then
    local at = int(v.created_ms + v.ttl_s * 1000)
    redis.call('HSET', entry, 'expires_ms', at)
    redis.call('ZADD', key('expiring'), at, member)
  else
    redis.call('HDEL', entry, 'expires_ms')
    redis.call('ZREM', key('expiring'), member)
  end
end

-- Append what a job looks like now to its capped event stream; the entry's id is Redis' own time.
local function event(job)
  local f = redis.call('HMGET', key('job', job), 'state', 'phase', 'fraction', 'attempt')
  local events = key('events', job)
  redis.call('XADD', events, 'MAXLEN', '~', EVENTS_KEPT, '*', 'state', f[1], 'phase', f[2] or '', 'fraction', f[3] or '0',
    'attempt', f[4] or '0')
  redis.call('EXPIRE', events, EVENTS_TTL_S)
end

-- End a job in `state`; extra is a flat list of field, value.
local function finish(job, state, extra)
  local hash = key('job', job)
  local f = redis.call('HMGET', hash, 'tenant', 'dataset', 'queue', 'table')
  redis.call('HSET', hash, 'state', state, 'finished_ms', int(now_ms()), 'token', '', unpack(extra))
  redis.call('ZREM', key('running'), job)
  redis.call('ZREM', key('queued', f[3]), job)
  redis.call('SREM', key('pending', f[1], f[2]), job)
  unrefer(f[1], 'table', f[4], 'job/' .. job)
  event(job)
  changed(f[1], f[2])
end

local function end_version(tenant, dataset, version)
  local versions = key('versions', tenant, dataset)
  local record = redis.call('HGET', versions, version)
  if not record then
    return
  end
  local v = cjson.decode(record)
  redis.call('HDEL', versions, version)
  local holder = 'dataset/' .. dataset .. '/' .. version
  unrefer(tenant, 'context', v.context, holder)
  unrefer(tenant, 'table', v.table, holder)
  if redis.call('EXISTS', key('refs', tenant, 'context', v.context)) == 0
    and redis.call('HGET', key('keys', tenant), v.key) == v.context then
    redis.call('HDEL', key('keys', tenant), v.key)
  end
end

-- A dataset without versions and jobs is no dataset.
local function forget_dataset(tenant, dataset)
  redis.call('DEL', key('dataset', tenant, dataset), key('versions', tenant, dataset), key('pending', tenant, dataset))
  redis.call('ZREM', key('datasets', tenant), dataset)
  redis.call('ZREM', key('expiring'), tenant .. '/' .. dataset)
end
