-- Give the next waiting job of a queue to a worker: interactive before batch, fair turns between tenants.
-- ARGV: prefix, queue, worker, holder (one life of that worker), pid, token, lease in ms, the queue that must not wait
-- Returns the job's hash as a flat list, or nil when nobody waits or the worker must stay free for small fits.
local queue, worker, holder, pid, token, lease_ms = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local small = ARGV[8]

-- Where two or more fit workers live, a large fit never takes the last one that serves small ones.
local function must_stay_free()
  local large = {}
  for _, running in ipairs(redis.call('ZRANGE', key('running'), 0, -1)) do
    local f = redis.call('HMGET', key('job', running), 'queue', 'worker')
    if f[1] ~= small then
      large[f[2]] = true
    end
  end
  local live, free, serves = 0, 0, false
  for _, name in ipairs(redis.call('SMEMBERS', key('workers', 'fit'))) do
    local text = redis.call('GET', key('worker', 'fit', name))
    if text then
      live = live + 1
      for _, served in ipairs(cjson.decode(text).queues) do
        if served == small and name == worker then
          serves = true
        elseif served == small and not large[name] then
          free = free + 1
        end
      end
    end
  end
  return live > 1 and serves and free == 0
end

if queue ~= small and must_stay_free() then
  return nil
end

local function take(priority)
  local turns = key('turns', queue, priority)
  for _ = 1, 10000 do
    local tenant = redis.call('LPOP', turns)
    if not tenant then
      return nil
    end
    local waiting = key('wait', queue, priority, tenant)
    local job = redis.call('LPOP', waiting)
    if redis.call('LLEN', waiting) > 0 then
      redis.call('RPUSH', turns, tenant)
    end
    if job then
      redis.call('ZREM', key('queued', queue), job)
      if redis.call('HGET', key('job', job), 'state') == 'queued' then
        return job, tenant
      end
    end
  end
end

local order = { 'interactive', 'batch' }
if redis.call('INCR', key('claims', queue)) % BATCH_TURN == 0 then
  order = { 'batch', 'interactive' }
end
local job, tenant = take(order[1])
if not job then
  job, tenant = take(order[2])
end
if not job then
  return nil
end
local hash = key('job', job)
local now = now_ms()
redis.call('HINCRBY', hash, 'attempt', 1)
redis.call('HSET', hash, 'state', 'running', 'phase', 'loading', 'fraction', 0, 'worker', worker, 'holder', holder,
  'pid', pid, 'token', token, 'started_ms', int(now), 'phase_ms', int(now))
redis.call('ZADD', key('running'), now + lease_ms, job)
redis.call('SET', key('holds', holder), job .. ' ' .. token .. ' ' .. pid, 'EX', 172800)
event(job)
changed(tenant, redis.call('HGET', hash, 'dataset'))
return redis.call('HGETALL', hash)
