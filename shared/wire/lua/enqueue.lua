-- ARGV: now, number, group record, then per sample the `rewards_revision` that the record was built from
local now, number = ARGV[1], ARGV[2]
local run = redis.call('HMGET', R .. ':run', 'state', 'prompts_per_step', 'queue_bound_batches')
local ids = members(RUN .. '.' .. number)
if redis.call('HEXISTS', R .. ':queued', number) == 1 then return 'duplicate' end
for i, id in ipairs(ids) do
  local fields = redis.call('HMGET', R .. ':t:' .. id, 'state', 'rewards_revision')
  if fields[1] ~= 'rewarded' then
    redis.call('ZREM', R .. ':closable', number)
    return 'not_ready'
  end
  if fields[2] ~= ARGV[3 + i] then return 'changed' end
end
if redis.call('XLEN', R .. ':queue') >= run[2] * run[3] then return 'full' end
local entry = redis.call('XADD', R .. ':queue', '*', 'number', number, 'group', ARGV[3])
redis.call('HSET', R .. ':queued', number, entry)
redis.call('ZREM', R .. ':closable', number)
for _, id in ipairs(ids) do move(id, 'queued', now) end
return 'queued'
