-- Give the next waiting job of a queue to a worker: fair turns between tenants.
-- ARGV: prefix, queue, worker, holder (one life of that worker), pid, token, lease in ms
-- Returns the job's hash as a flat list, or nil when nobody waits.
local queue, worker, holder, pid, token, lease_ms = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local turns = key('turns', queue)

for _ = 1, 10000 do
  local tenant = redis.call('LPOP', turns)
  if not tenant then
    return nil
  end
  local waiting = key('wait', queue, tenant)
  local job = redis.call('LPOP', waiting)
  if redis.call('LLEN', waiting) > 0 then
    redis.call('RPUSH', turns, tenant)
  end
  if job then
    redis.call('ZREM', key('queued', queue), job)
    local hash = key('job', job)
    if redis.call('HGET', hash, 'state') == 'queued' then
      local now = now_ms()
      redis.call('HINCRBY', hash, 'attempt', 1)
      redis.call('HSET', hash, 'state', 'running', 'phase', 'loading', 'fraction', 0, 'worker', worker, 'pid', pid,
        'token', token, 'started_ms', int(now), 'phase_ms', int(now))
      redis.call('ZADD', key('running'), now + lease_ms, job)
      redis.call('SET', key('holds', holder), job .. ' ' .. token .. ' ' .. pid, 'EX', 172800)
      event(job)
      changed(tenant, redis.call('HGET', hash, 'dataset'))
      return redis.call('HGETALL', hash)
    end
  end
end
return nil
