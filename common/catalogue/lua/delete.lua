-- Delete a dataset with all its versions; jobs that would publish into it are cancelled.
-- ARGV: prefix, tenant, dataset. Returns 1, or 0 when there is no such dataset.
local tenant, dataset = ARGV[2], ARGV[3]
local entry = key('dataset', tenant, dataset)
if redis.call('EXISTS', entry) == 0 then
  return 0
end
local pending = key('pending', tenant, dataset)
for _, job in ipairs(redis.call('SMEMBERS', pending)) do
  cancel(job)
end
for _, job in ipairs(redis.call('LRANGE', key('dead', tenant), 0, -1)) do
  if redis.call('HGET', key('job', job), 'dataset') == dataset then
    undead(tenant, job)
  end
end
local versions = key('versions', tenant, dataset)
for _, version in ipairs(redis.call('HKEYS', versions)) do
  end_version(tenant, dataset, version)
end
forget_dataset(tenant, dataset)
changed(tenant, dataset)
return 1
