-- ARGV: now, trajectory id, record, source of a reward known already ('' if none), its JSON
-- A sample that is already generated, or was dropped meanwhile, stays as it is.
local now, id = ARGV[1], ARGV[2]
local t = R .. ':t:' .. id
local fields = redis.call('HMGET', t, 'state', 'group', 'deadline_s')
local state, group = fields[1], fields[2]
if not state then return 'unknown' end
if state ~= 'accepted' and state ~= 'generating' then return state end
redis.call('HSET', t, 'record', ARGV[3])
if ARGV[4] ~= '' then
  redis.call('HSET', t, 'reward:' .. ARGV[4], ARGV[5])
  redis.call('HINCRBY', t, 'rewards_revision', 1)
end
if is_eval(group) then
  move(id, 'evaluated', now)
  redis.call('HINCRBY', R .. ':eval:' .. string.match(group, '%.e(%d+)%.'), 'num_finished', 1)
else
  await_rewards(id, now, fields[3])
end
settle_todo(group)
return state_of(id)
