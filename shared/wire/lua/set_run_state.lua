-- ARGV: now, state, reason, detail, epoch ('': not a trainer), the only state to come from and its only reason (absent: any)
local old = redis.call('HGET', R .. ':run', 'state')
if not old then return redis.error_reply('UNKNOWN_RUN ' .. RUN) end
if ARGV[5] ~= '' then
  local refused = fenced(ARGV[5])
  if refused then return refused end
end
local new = ARGV[2]
if ARGV[6] and old ~= ARGV[6] then return 'not ' .. ARGV[6] end
if ARGV[7] and redis.call('HGET', R .. ':run', 'reason') ~= ARGV[7] then return 'not ' .. ARGV[7] end
if old == new and (new == 'running' or is_over(new)) then return 'ok' end
if is_over(old) then return redis.error_reply('RUN_OVER ' .. old) end
redis.call('HSET', R .. ':run', 'state', new, 'reason', ARGV[3], 'detail', ARGV[4])
event('run.' .. new, '', '', ARGV[3])
-- Its last checkpoint is durable, even where Valkey forgot that.
if new == 'completed' then train_until(tonumber(redis.call('HGET', R .. ':run', 'num_steps')), ARGV[1], '') end
if new == 'stopped' or new == 'failed' then
  -- Whatever a later checkpoint turns out to cover becomes TRAINED again: the checkpoint is the truth.
  local run = redis.call('HMGET', R .. ':run', 'durable_step', 'prompts_per_step', 'queue_bound_batches')
  local first = run[1] * run[2]
  for number = first, first + run[2] * run[3] - 1 do
    local name = string.format('%d', number)
    for _, id in ipairs(members(group_of(number))) do
      if not is_final(state_of(id)) then move(id, 'dropped', ARGV[1], 'cancelled') end
    end
    forget_entry(name)
    redis.call('ZREM', R .. ':todo', name)
    redis.call('ZREM', R .. ':closable', name)
  end
end
return 'ok'
