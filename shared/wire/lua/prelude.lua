-- In front of every script. KEYS[1] is the run's key prefix, 'tz:{run}'. Every change of a trajectory's state goes through
-- move(), so that counts and events can't disagree with the states. Time comes in as an argument, unix seconds.
local R = KEYS[1]
local RUN = string.sub(R, 5, -2)

local function event(type, id, group, reason)
  redis.call('XADD', R .. ':events', '*', 'type', type, 'trajectory_id', id, 'group_id', group, 'reason', reason)
end

local function is_final(state)
  return state == 'trained' or state == 'dropped' or state == 'evaluated'
end

local function is_over(state)
  return state == 'completed' or state == 'stopped' or state == 'failed'
end

local function is_eval(group)
  return string.find(group, '^[^.]+%.e') ~= nil
end

-- Ids of a group's samples; empty when the group was never accepted.
local function members(group)
  local n = tonumber(redis.call('HGET', R .. ':t:' .. group .. '.0', 'n') or 0)
  local ids = {}
  for i = 0, n - 1 do ids[i + 1] = group .. '.' .. i end
  return ids
end

local function group_of(number)
  return RUN .. '.' .. string.format('%d', number)
end

local function state_of(id)
  return redis.call('HGET', R .. ':t:' .. id, 'state')
end

local function move(id, to, now, reason)
  local t = R .. ':t:' .. id
  local counts = R .. ':counts'
  local old = redis.call('HMGET', t, 'state', 'reason', 'group')
  local from, group = old[1], old[3]
  if from == to then return false end
  local lane = is_eval(group) and 'eval:' or ''
  redis.call('HINCRBY', counts, lane .. 'state:' .. from, -1)
  redis.call('HINCRBY', counts, lane .. 'state:' .. to, 1)
  if from == 'dropped' then
    redis.call('HINCRBY', counts, lane .. 'dropped:' .. old[2], -1)
    redis.call('HDEL', t, 'reason')
  end
  if to == 'dropped' then
    redis.call('HINCRBY', counts, lane .. 'dropped:' .. reason, 1)
    redis.call('HSET', t, 'reason', reason)
  end
  redis.call('HSET', t, 'state', to, 'at:' .. to, now)
  if to ~= 'awaiting_reward' then redis.call('ZREM', R .. ':deadlines', id) end
  event('trajectory.' .. to, id, group, reason or '')
  return true
end

-- Takes a group off the dispatcher's list once none of its samples is to be generated any more.
local function settle_todo(group)
  for _, id in ipairs(members(group)) do
    local state = state_of(id)
    if state == 'accepted' or state == 'generating' then return end
  end
  local list = is_eval(group) and ':eval_todo' or ':todo'
  redis.call('ZREM', R .. list, string.sub(group, #RUN + 2))
end

-- AWAITING_REWARD becomes REWARDED when every source has answered; the last of a group makes it closable.
local function settle_reward(id, now)
  local t = R .. ':t:' .. id
  local fields = redis.call('HMGET', t, 'state', 'sources', 'group')
  if fields[1] ~= 'awaiting_reward' then return end
  for _, source in ipairs(cjson.decode(fields[2])) do
    if redis.call('HEXISTS', t, 'reward:' .. source) == 0 then return end
  end
  move(id, 'rewarded', now)
  for _, other in ipairs(members(fields[3])) do
    if state_of(other) ~= 'rewarded' then return end
  end
  local number = string.sub(fields[3], #RUN + 2)
  redis.call('ZADD', R .. ':closable', number, number)
end

-- A sample is there; its rewards may be, or are awaited.
local function await_rewards(id, now, deadline_s)
  move(id, 'awaiting_reward', now)
  redis.call('ZADD', R .. ':deadlines', now + deadline_s, id)
  settle_reward(id, now)
end

-- nil, or the error that a call with this fencing epoch must answer.
local function fenced(epoch)
  local current = redis.call('HGET', R .. ':run', 'epoch')
  if not current then return redis.error_reply('UNKNOWN_RUN ' .. RUN) end
  if tonumber(current) ~= tonumber(epoch) then
    return redis.error_reply('FENCED epoch ' .. epoch .. ', the current one is ' .. current)
  end
end

local function forget_entry(number)
  local entry = redis.call('HGET', R .. ':queued', number)
  if entry then
    redis.call('XACK', R .. ':queue', 'trainer', entry)
    redis.call('XDEL', R .. ':queue', entry)
    redis.call('HDEL', R .. ':queued', number)
  end
end

-- An operator, or the trainer, let its batch be complete without it.
local function is_dropped(number)
  return redis.call('SISMEMBER', R .. ':dropped', number) == 1
end

-- The group is in a durable checkpoint: its trajectories are TRAINED whatever they were, unless it was in no batch.
-- Returns how many.
local function train_group(number, size, now, archive)
  local name, moved = string.format('%d', number), 0
  if is_dropped(name) then return 0 end
  for _, id in ipairs(members(group_of(number))) do
    local t = R .. ':t:' .. id
    if move(id, 'trained', now) then moved = moved + 1 end
    redis.call('HSET', t, 'step', string.format('%d', math.floor(number / size)))
    if archive ~= '' and redis.call('HDEL', t, 'record') == 1 then redis.call('HSET', t, 'archive', archive) end
  end
  forget_entry(name)
  redis.call('ZREM', R .. ':todo', name)
  redis.call('ZREM', R .. ':closable', name)
  return moved
end

-- Batches below `step` are in a durable checkpoint. Returns how many trajectories are newly trained.
local function train_until(step, now, archive)
  local run = redis.call('HMGET', R .. ':run', 'durable_step', 'prompts_per_step')
  local durable, size, moved = tonumber(run[1]), tonumber(run[2]), 0
  for number = durable * size, step * size - 1 do moved = moved + train_group(number, size, now, archive) end
  if step > durable then redis.call('HSET', R .. ':run', 'durable_step', step) end
  return moved
end

