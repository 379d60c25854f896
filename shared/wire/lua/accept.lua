-- ARGV: now, number, prompt_id, fingerprint, prompt record, n, sources JSON, deadline_s; of a group that was sampled elsewhere
-- also its sampler, then per sample: record, JSON of source -> reward JSON
local now, number, prompt_id, fingerprint, n = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[6])
local run = redis.call('HMGET', R .. ':run', 'state', 'prompts_per_step', 'num_steps', 'durable_step',
  'queue_bound_batches', 'next_number')
if not run[1] then return {'unknown_run'} end
local known = redis.call('HGET', R .. ':fingerprints', number)
if known then return {known == fingerprint and 'duplicate' or 'conflict', number} end
local taken = redis.call('HGET', R .. ':prompt_ids', prompt_id)
if taken then return {'conflict', taken} end
if is_over(run[1]) then return {'run_over', run[1]} end
local size = tonumber(run[2])
if tonumber(number) >= run[3] * size then return {'out_of_range', run[3] * size} end
local gate = (run[4] + run[5]) * size
if tonumber(number) >= gate then return {'gate_closed', gate} end

redis.call('HSET', R .. ':prompts', number, ARGV[5])
redis.call('HSET', R .. ':fingerprints', number, fingerprint)
redis.call('HSET', R .. ':prompt_ids', prompt_id, number)
local sampler = ARGV[9]
if sampler then
  redis.call('HINCRBY', R .. ':counts', 'ingested', n)
else
  redis.call('ZADD', R .. ':todo', number, number)
end
local group = RUN .. '.' .. number
add_samples(number, 0, n, prompt_id, ARGV[7], ARGV[8], now)
if sampler then
  for i = 0, n - 1 do
    redis.call('HSET', R .. ':t:' .. group .. '.' .. i, 'record', ARGV[10 + 2 * i], 'sampler', sampler)
  end
end
-- Trained before it was on disk, forgotten with Valkey's last second, and posted again.
if tonumber(number) < run[4] * size then
  train_group(tonumber(number), size, now, '')
elseif sampler then
  for i = 0, n - 1 do
    local id = group .. '.' .. i
    local t = R .. ':t:' .. id
    for source, body in pairs(cjson.decode(ARGV[11 + 2 * i])) do
      redis.call('HSET', t, 'reward:' .. source, body)
      redis.call('HINCRBY', t, 'rewards_revision', 1)
    end
    await_rewards(id, now, ARGV[8])
  end
end
local next_number = tonumber(run[6])
while redis.call('HEXISTS', R .. ':fingerprints', string.format('%d', next_number)) == 1 do
  next_number = next_number + 1
end
redis.call('HSET', R .. ':run', 'next_number', next_number)
return {'accepted', number}
