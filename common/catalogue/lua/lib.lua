-- Put before every script: names, time, and the few moves that several scripts share.
-- ARGV[1] is the key prefix of the deployment.
local P = ARGV[1]
-- A job's event stream: entries kept, and seconds after its last one.
local EVENTS_KEPT, EVENTS_TTL_S = 256, 259200
-- Every so many claims of a queue, the batch jobs go first, so that they never starve.
local BATCH_TURN = 5
-- Batch jobs stand behind every interactive one in the order that positions are told from.
local BEHIND_MS = 1e13
-- How many ends of running jobs the drain rate is told from.
local DRAIN_KEPT = 32

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

-- A job that waits stands in its tenant's list of its queue and priority; tenants take turns.
local function enqueue(job, at_head)
  local f = redis.call('HMGET', key('job', job), 'tenant', 'queue', 'priority')
  local tenant, queue, priority = f[1], f[2], f[3]
  local waiting = key('wait', queue, priority, tenant)
  if redis.call('LLEN', waiting) == 0 then
    redis.call('RPUSH', key('turns', queue, priority), tenant)
  end
  redis.call(at_head and 'LPUSH' or 'RPUSH', waiting, job)
  local place = at_head and 0 or now_ms()
  redis.call('ZADD', key('queued', queue), int(place + (priority == 'batch' and BEHIND_MS or 0)), job)
end

-- Take a waiting job out of whatever it waits in.
local function dequeue(job)
  local f = redis.call('HMGET', key('job', job), 'tenant', 'queue', 'priority', 'leader')
  local waiting = key('wait', f[2], f[3], f[1])
  if redis.call('LREM', waiting, 1, job) > 0 and redis.call('LLEN', waiting) == 0 then
    redis.call('LREM', key('turns', f[2], f[3]), 0, f[1])
  end
  redis.call('ZREM', key('queued', f[2]), job)
  if f[4] and f[4] ~= '' then
    redis.call('LREM', key('followers', f[4]), 1, job)
    redis.call('SREM', key('joined', f[1]), job)
  end
end

-- Make a waiting job follow another that fits the same content; it is not in the queue until that one ends.
local function join(job, leader, tenant)
  redis.call('HSET', key('job', job), 'leader', leader)
  redis.call('RPUSH', key('followers', leader), job)
  redis.call('SADD', key('joined', tenant), job)
end

-- The jobs that had joined one which ends, freed from it, oldest first.
local function part(job, tenant)
  local followers = redis.call('LRANGE', key('followers', job), 0, -1)
  redis.call('DEL', key('followers', job))
  for _, follower in ipairs(followers) do
    redis.call('HSET', key('job', follower), 'leader', '')
    redis.call('SREM', key('joined', tenant), follower)
  end
  return followers
end

-- The first of these jobs leads the others and the content key.
local function lead(followers, tenant, context_key)
  local first = followers[1]
  redis.call('HSET', key('leads', tenant), context_key, first)
  for i = 2, #followers do
    join(followers[i], first, tenant)
  end
  return first
end

local function close(job, state, extra)
  local hash = key('job', job)
  local f = redis.call('HMGET', hash, 'tenant', 'dataset', 'queue', 'table', 'state')
  if f[5] == 'running' then
    redis.call('LPUSH', key('drained'), int(now_ms()))
    redis.call('LTRIM', key('drained'), 0, DRAIN_KEPT - 1)
  end
  redis.call('HSET', hash, 'state', state, 'finished_ms', int(now_ms()), 'token', '', unpack(extra))
  redis.call('ZREM', key('running'), job)
  redis.call('ZREM', key('deadlines'), job)
  redis.call('SREM', key('pending', f[1], f[2]), job)
  unrefer(f[1], 'table', f[4], 'job/' .. job)
  event(job)
  changed(f[1], f[2])
end

-- End a job in `state`; extra is a flat list of field, value. What becomes of the jobs that joined it:
-- its content is there after a success, so each of them publishes it; a fault of the content is theirs too;
-- after a cancel or its own deadline the first of them goes on in its place.
local function finish(job, state, extra, own_fault)
  local f = redis.call('HMGET', key('job', job), 'tenant', 'key', 'state')
  if f[3] == 'queued' then
    dequeue(job)
  end
  close(job, state, extra)
  local tenant, context_key = f[1], f[2] or ''
  if redis.call('HGET', key('leads', tenant), context_key) == job then
    redis.call('HDEL', key('leads', tenant), context_key)
  end
  local followers = part(job, tenant)
  if #followers == 0 then
    return
  end
  if state == 'succeeded' then
    for i = #followers, 1, -1 do
      enqueue(followers[i], true)
    end
  elseif state == 'failed' and not own_fault then
    for _, follower in ipairs(followers) do
      close(follower, 'failed', extra)
    end
  else
    enqueue(lead(followers, tenant, context_key), true)
  end
end

-- Cancel: at once while it waits; at its worker's next look while it runs; the work of one that others joined
-- goes on for the first of them, under the same claim.
local function cancel(job)
  local hash = key('job', job)
  local f = redis.call('HMGET', hash, 'state', 'tenant', 'key', 'holder', 'token', 'pid')
  if f[1] == 'queued' then
    finish(job, 'cancelled', { 'error', '' })
  elseif f[1] == 'running' then
    local followers = part(job, f[2])
    if #followers == 0 then
      if redis.call('HGET', hash, 'cancel') ~= '1' then
        redis.call('HSET', hash, 'cancel', 1, 'cancel_ms', int(now_ms()))
        event(job)
      end
      return
    end
    local heir = lead(followers, f[2], f[3])
    local theirs = key('job', heir)
    for _, name in ipairs({ 'phase', 'fraction', 'attempt', 'worker', 'pid', 'token', 'holder', 'started_ms', 'phase_ms' }) do
      redis.call('HSET', theirs, name, redis.call('HGET', hash, name) or '')
    end
    redis.call('HSET', theirs, 'state', 'running')
    redis.call('ZADD', key('running'), redis.call('ZSCORE', key('running'), job) or now_ms(), heir)
    redis.call('SET', key('holds', f[4]), heir .. ' ' .. f[5] .. ' ' .. f[6], 'KEEPTTL')
    redis.call('HSET', hash, 'moved_to', heir)
    close(job, 'cancelled', { 'error', '' })
    event(heir)
    changed(f[2], redis.call('HGET', theirs, 'dataset'))
  end
end

-- Whether a claim still holds: 'ok', 'stale', or 'moved:<job>' when its work now belongs to a job that had joined.
local function claimed(job, token)
  local at = job
  for _ = 1, 1000 do
    local f = redis.call('HMGET', key('job', at), 'state', 'token', 'moved_to')
    if f[1] == 'running' and f[2] == token then
      return at == job and 'ok' or 'moved:' .. at
    end
    if not f[3] then
      return 'stale'
    end
    at = f[3]
  end
  return 'stale'
end

local function overdue(job)
  local deadline = tonumber(redis.call('HGET', key('job', job), 'deadline_ms') or '0') or 0
  return deadline > 0 and deadline < now_ms()
end

-- No longer keep a dead job's table for a retry.
local function undead(tenant, job)
  if redis.call('LREM', key('dead', tenant), 1, job) > 0 then
    unrefer(tenant, 'table', redis.call('HGET', key('job', job), 'table'), 'dead/' .. job)
  end
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
  redis.call('SREM', key('pinned'), tenant .. '/' .. dataset)
end
