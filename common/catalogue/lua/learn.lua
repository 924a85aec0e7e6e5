-- Move exponentially weighted means of the `speed` hash towards new values; a first value is taken as it is.
-- ARGV: prefix, then field, value, weight, ...
local hash = key('speed')
for i = 2, #ARGV, 3 do
  local old, value = tonumber(redis.call('HGET', hash, ARGV[i]) or ''), tonumber(ARGV[i + 1])
  if old then
    value = old + tonumber(ARGV[i + 2]) * (value - old)
  end
  redis.call('HSET', hash, ARGV[i], string.format('%.6g', value))
end
return 'ok'
