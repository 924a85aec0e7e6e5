-- End one version; the pointer goes to the highest that remains, and a dataset without any is forgotten.
-- ARGV: prefix, tenant, dataset, version, its context, 1 to spare a current version or a pinned dataset
-- Returns 1, or 0 when that version is not there, has another context, or is spared.
local tenant, dataset, version, context, sparing = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6] == '1'
local entry, versions = key('dataset', tenant, dataset), key('versions', tenant, dataset)
local record = redis.call('HGET', versions, version)
if not record or cjson.decode(record).context ~= context then
  return 0
end
local f = redis.call('HMGET', entry, 'current', 'pinned')
if sparing and (f[1] == version or f[2] == '1') then
  return 0
end
end_version(tenant, dataset, version)
if f[1] == version then
  local highest = 0
  for _, number in ipairs(redis.call('HKEYS', versions)) do
    highest = math.max(highest, tonumber(number))
  end
  if highest > 0 then
    redis.call('HSET', entry, 'current', int(highest))
    set_expiry(tenant, dataset, cjson.decode(redis.call('HGET', versions, int(highest))))
  elseif redis.call('SCARD', key('pending', tenant, dataset)) > 0 then
    redis.call('HDEL', entry, 'current')
  else
    forget_dataset(tenant, dataset)
  end
end
changed(tenant, dataset)
return 1
