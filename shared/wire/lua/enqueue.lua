-- ARGV: now, number, record of the surviving group, then per survivor its id and the `rewards_revision` that the record
-- was built from
local now, number = ARGV[1], ARGV[2]
local run = redis.call('HMGET', R .. ':run', 'state', 'prompts_per_step', 'queue_bound_batches', 'min_group')
local least = tonumber(run[4] or 0)
local given, num_given = {}, (#ARGV - 3) / 2
for i = 4, #ARGV, 2 do given[ARGV[i]] = ARGV[i + 1] end
if redis.call('HEXISTS', R .. ':queued', number) == 1 then return 'duplicate' end
local survivors, is_changed = {}, false
local is_ready = not is_over(run[1]) and not is_dropped(number)
for _, id in ipairs(members(RUN .. '.' .. number)) do
  local fields = redis.call('HMGET', R .. ':t:' .. id, 'state', 'rewards_revision')
  if fields[1] == 'rewarded' then
    survivors[#survivors + 1] = id
    is_changed = is_changed or given[id] ~= fields[2]
  elseif fields[1] ~= 'dropped' or least == 0 then
    is_ready = false
  end
end
if not is_ready then
  redis.call('ZREM', R .. ':closable', number)
  return 'not_ready'
end
if is_changed or #survivors ~= num_given then return 'changed' end
if #survivors < least then return fall_short(number, now) end
if redis.call('XLEN', R .. ':queue') >= run[2] * run[3] then return 'full' end
local entry = redis.call('XADD', R .. ':queue', '*', 'number', number, 'group', ARGV[3])
redis.call('HSET', R .. ':queued', number, entry)
redis.call('ZREM', R .. ':closable', number)
for _, id in ipairs(survivors) do move(id, 'queued', now) end
return 'queued'
