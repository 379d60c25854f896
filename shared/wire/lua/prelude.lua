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

-- Ids of a group's samples, of the last draw; empty when the group was never accepted.
local function members(group)
  local n = tonumber(redis.call('HGET', R .. ':t:' .. group .. '.0', 'n') or 0)
  local first = n * (redis.call('HGET', R .. ':draws', string.sub(group, #RUN + 2)) or 0)
  local ids = {}
  for i = 1, n do ids[i] = group .. '.' .. string.format('%d', first + i - 1) end
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

-- A group is closable when each of its samples is REWARDED or, under max_lag, DROPPED.
local function settle_group(group)
  for _, id in ipairs(members(group)) do
    local state = state_of(id)
    if state ~= 'rewarded' and state ~= 'dropped' then return end
  end
  local number = string.sub(group, #RUN + 2)
  redis.call('ZADD', R .. ':closable', number, number)
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
  settle_group(fields[3])
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

-- A sample that its group was closed without: no checkpoint makes it TRAINED. What the end of a run cancels may be in one.
local function is_left_out(id)
  local fields = redis.call('HMGET', R .. ':t:' .. id, 'state', 'reason')
  return fields[1] == 'dropped' and fields[2] ~= 'cancelled'
end

-- New samples of an accepted prompt, from index `first` on.
local function add_samples(number, first, n, prompt_id, sources, deadline_s, now)
  local group = group_of(number)
  local place = redis.call('HINCRBY', R .. ':counts', 'accepted', n) - n
  redis.call('HINCRBY', R .. ':counts', 'state:accepted', n)
  for i = 0, n - 1 do
    local sample = string.format('%d', first + i)
    local id = group .. '.' .. sample
    redis.call('HSET', R .. ':t:' .. id, 'state', 'accepted', 'group', group, 'number', number, 'sample', sample, 'n', n,
      'prompt_id', prompt_id, 'sources', sources, 'deadline_s', deadline_s, 'at:accepted', now)
    redis.call('ZADD', R .. ':trajectories', place + i, id)
    event('trajectory.accepted', id, group, '')
  end
end

-- The run waits for whoever mends what left a batch without a group.
local function pause_for(number, dropped_as, again)
  if redis.call('HGET', R .. ':run', 'state') ~= 'running' then return end
  local reason = dropped_as == 'reward_timeout' and 'missing_reward' or dropped_as
  local detail = 'too few samples of group ' .. group_of(number) .. ' are left (' .. dropped_as .. '), and its batch has no ' ..
    'other group; ' .. (again and 'it is sampled again' or 'the batch is trained without it') .. ' when the run is resumed'
  redis.call('HSET', R .. ':run', 'state', 'paused', 'reason', reason, 'detail', detail)
  event('run.paused', '', group_of(number), reason)
end

-- Under max_lag: too few samples of a group are left, so the rest is DROPPED too. The group is sampled again, once; after
-- that its batch does without it. The last group of a batch is sampled as often as it takes, but the run is paused before,
-- since nobody seems to be there. Answers 'replaced' or 'dropped'.
local function fall_short(number, now)
  local name, group = string.format('%d', number), group_of(number)
  local run = redis.call('HMGET', R .. ':run', 'state', 'prompts_per_step')
  local first = redis.call('HMGET', R .. ':t:' .. group .. '.0', 'n', 'prompt_id', 'sources', 'deadline_s', 'sampler')
  local draws = tonumber(redis.call('HGET', R .. ':draws', name) or 0)
  local dropped_as
  for _, id in ipairs(members(group)) do
    if not is_final(state_of(id)) then move(id, 'dropped', now, 'small_group') end
    local reason = redis.call('HGET', R .. ':t:' .. id, 'reason')
    if reason ~= 'small_group' then dropped_as = dropped_as or reason end
  end
  forget_entry(name)
  redis.call('ZREM', R .. ':closable', name)
  if is_over(run[1]) then return 'dropped' end
  local is_last, size = true, tonumber(run[2])
  local begin = math.floor(number / size) * size
  for other = begin, begin + size - 1 do
    if other ~= tonumber(number) and not is_dropped(string.format('%d', other)) then is_last = false end
  end
  -- What was sampled elsewhere can't be sampled again here.
  local again = not first[5] and (draws == 0 or is_last)
  if again then
    redis.call('HSET', R .. ':draws', name, draws + 1)
    redis.call('HINCRBY', R .. ':counts', 'replaced', 1)
    redis.call('ZADD', R .. ':todo', name, name)
    add_samples(name, first[1] * (draws + 1), tonumber(first[1]), first[2], first[3], first[4], now)
  else
    redis.call('SADD', R .. ':dropped', name)
    redis.call('ZREM', R .. ':todo', name)
  end
  if is_last and (draws > 0 or not again) then pause_for(number, dropped_as or 'small_group', again) end
  return again and 'replaced' or 'dropped'
end

-- The group is in a durable checkpoint: its trajectories are TRAINED whatever they were, unless they were in no batch.
-- Returns how many.
local function train_group(number, size, now, archive)
  local name, moved = string.format('%d', number), 0
  if is_dropped(name) then return 0 end
  for _, id in ipairs(members(group_of(number))) do
    if not is_left_out(id) then
      local t = R .. ':t:' .. id
      if move(id, 'trained', now) then moved = moved + 1 end
      redis.call('HSET', t, 'step', string.format('%d', math.floor(number / size)))
      if archive ~= '' and redis.call('HDEL', t, 'record') == 1 then redis.call('HSET', t, 'archive', archive) end
    end
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

