-- ARGV: now, most. Under max_lag: samples whose reward is overdue are DROPPED, the earliest first. Returns how many.
local run = redis.call('HMGET', R .. ':run', 'state', 'min_group')
if run[1] ~= 'running' or tonumber(run[2] or 0) == 0 then return 0 end
local overdue = redis.call('ZRANGE', R .. ':deadlines', '-inf', ARGV[1], 'BYSCORE', 'LIMIT', 0, ARGV[2])
for _, id in ipairs(overdue) do
  move(id, 'dropped', ARGV[1], 'reward_timeout')
  settle_group(redis.call('HGET', R .. ':t:' .. id, 'group'))
end
return #overdue
