-- ARGV: now, epoch, step, durable step as the trainer knows it, numbers of the batch's groups.
-- Answers 'ok', or without a change 'forgotten' (a commit_trained was lost), 'paused', or 'dropped' (one of them, just now).
local refused = fenced(ARGV[2])
if refused then return refused end
local run = redis.call('HMGET', R .. ':run', 'state', 'durable_step')
if is_over(run[1]) then return redis.error_reply('RUN_OVER ' .. run[1]) end
if tonumber(run[2]) < tonumber(ARGV[4]) then return 'forgotten' end
if run[1] == 'paused' then return 'paused' end
for i = 5, #ARGV do
  if is_dropped(ARGV[i]) then return 'dropped' end
end
for i = 5, #ARGV do
  for _, id in ipairs(members(RUN .. '.' .. ARGV[i])) do
    if state_of(id) == 'queued' then move(id, 'leased', ARGV[1]) end
    if not is_left_out(id) then redis.call('HSET', R .. ':t:' .. id, 'step', ARGV[3]) end
  end
end
return 'ok'
