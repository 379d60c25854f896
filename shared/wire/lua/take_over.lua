-- ARGV: now, next step. Returns {new epoch, trajectories trained}.
local run = redis.call('HMGET', R .. ':run', 'state', 'durable_step')
if not run[1] then return redis.error_reply('UNKNOWN_RUN ' .. RUN) end
if is_over(run[1]) then return redis.error_reply('RUN_OVER ' .. run[1]) end
if tonumber(ARGV[2]) < tonumber(run[2]) then return redis.error_reply('BEHIND ' .. run[2]) end
local epoch = redis.call('HINCRBY', R .. ':run', 'epoch', 1)
local moved = train_until(tonumber(ARGV[2]), ARGV[1], '')
redis.call('HSET', R .. ':run', 'step', ARGV[2])
return {epoch, moved}
