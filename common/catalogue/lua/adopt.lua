-- A running job has parsed its upload: note the table, its key and shape.
-- ARGV: prefix, job, token, table digest, context key, then field, value, ... Returns 'ok' or 'stale'.
local job, token, digest, context_key = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local hash = key('job', job)
local f = redis.call('HMGET', hash, 'state', 'token', 'tenant')
if f[1] ~= 'running' or f[2] ~= token then
  return 'stale'
end
redis.call('HSET', hash, 'table', digest, 'key', context_key, 'upload', '', unpack(ARGV, 6))
refer(f[3], 'table', digest, 'job/' .. job)
return 'ok'
