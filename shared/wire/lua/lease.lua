-- ARGV: now, epoch, step, numbers of the batch's groups. Answers 'paused' without a change, or 'ok'.
local refused = fenced(ARGV[2])
if refused then return refused end
local state = redis.call('HGET', R .. ':run', 'state')
if is_over(state) then return redis.error_reply('RUN_OVER ' .. state) end
if state == 'paused' then return 'paused' end
for i = 4, #ARGV do
  for _, id in ipairs(members(RUN .. '.' .. ARGV[i])) do
    if state_of(id) == 'queued' then move(id, 'leased', ARGV[1]) end
    redis.call('HSET', R .. ':t:' .. id, 'step', ARGV[3])
  end
end
return 'ok'
