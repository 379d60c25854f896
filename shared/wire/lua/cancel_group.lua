-- ARGV: now, number. An operator drops a group; its batch is complete without it. Answers {'ok', samples dropped now}, or
-- without a change {'unknown'}, {'run_over', state} or {'sealed', state}.
local now, number = ARGV[1], ARGV[2]
local run = redis.call('HMGET', R .. ':run', 'state', 'reason', 'step', 'prompts_per_step')
if not run[1] then return redis.error_reply('UNKNOWN_RUN ' .. RUN) end
local ids = members(RUN .. '.' .. number)
if #ids == 0 then return {'unknown'} end
if is_dropped(number) then return {'ok', 0} end
if is_over(run[1]) then return {'run_over', run[1]} end
-- A leased group is in weights that may be about to be published, unless its batch was refused and the run waits for us.
local is_refused = run[1] == 'paused' and run[2] == 'poison' and math.floor(number / run[4]) == tonumber(run[3])
for _, id in ipairs(ids) do
  local state = state_of(id)
  if state == 'trained' or (state == 'leased' and not is_refused) then return {'sealed', state} end
end
redis.call('SADD', R .. ':dropped', number)
local moved = 0
for _, id in ipairs(ids) do
  if not is_final(state_of(id)) and move(id, 'dropped', now, 'cancelled') then moved = moved + 1 end
end
forget_entry(number)
redis.call('ZREM', R .. ':todo', number)
redis.call('ZREM', R .. ':closable', number)
return {'ok', moved}
