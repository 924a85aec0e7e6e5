-- A dead job was retried or is to be forgotten. ARGV: prefix, tenant, job
undead(ARGV[2], ARGV[3])
return 1
