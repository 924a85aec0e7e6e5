-- Pin or unpin a dataset. ARGV: prefix, tenant, dataset, 1 or 0. Returns 1, or 0 when there is no such dataset.
local tenant, dataset = ARGV[2], ARGV[3]
local entry = key('dataset', tenant, dataset)
if redis.call('HEXISTS', entry, 'current') == 0 then
  return 0
end
redis.call('HSET', entry, 'pinned', ARGV[4])
redis.call(ARGV[4] == '1' and 'SADD' or 'SREM', key('pinned'), tenant .. '/' .. dataset)
changed(tenant, dataset)
return 1
