-- ARGV: now, epoch, number, record of the group without them ('': too few are left), then id and reason of each queued
-- trajectory that no trainer can train
local refused = fenced(ARGV[2])
if refused then return refused end
local now, number = ARGV[1], ARGV[3]
-- A repeat after a lost reply must not meet the samples that took their place; an entry that is gone comes back by itself.
if redis.call('HEXISTS', R .. ':queued', number) == 0 then return 'gone' end
for i = 5, #ARGV, 2 do
  if not is_final(state_of(ARGV[i])) then move(ARGV[i], 'dropped', now, ARGV[i + 1]) end
end
if ARGV[4] == '' then return fall_short(number, now) end
forget_entry(number)
local entry = redis.call('XADD', R .. ':queue', '*', 'number', number, 'group', ARGV[4])
redis.call('HSET', R .. ':queued', number, entry)
return 'ok'
