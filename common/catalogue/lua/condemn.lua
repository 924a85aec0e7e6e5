-- Mark a file that nobody refers to as dying; whoever holds the tenant's lock may then unlink it.
-- ARGV: prefix, epoch, tenant, kind, digest. Returns 1, or 0 when it is needed or the epoch is another one.
local epoch, tenant, kind, digest = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if epoch == '' or redis.call('GET', key('epoch')) ~= epoch then
  return 0
end
if redis.call('EXISTS', key('refs', tenant, kind, digest)) == 1 then
  return 0
end
redis.call('SADD', key('dying', tenant), kind .. ':' .. digest)
return 1
