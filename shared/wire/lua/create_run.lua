-- ARGV: now, token, config JSON, prompts_per_step, num_steps, queue_bound_batches, min_group (0: all)
-- A repeat with the token of the first call is that call's retry.
local token = redis.call('HGET', R .. ':run', 'token')
if token then return token == ARGV[2] and {'ok'} or {'exists'} end
for _, name in ipairs(redis.call('ZRANGE', 'tz:runs', 0, -1, 'REV')) do
  if not is_over(redis.call('HGET', 'tz:{' .. name .. '}:run', 'state')) then return {'active', name} end
end
redis.call('HSET', R .. ':run', 'token', ARGV[2], 'config', ARGV[3], 'state', 'running', 'reason', '', 'detail', '',
  'created', ARGV[1], 'step', 0, 'durable_step', 0, 'lineage', 0, 'epoch', 0, 'next_number', 0, 'num_evals', 0,
  'prompts_per_step', ARGV[4], 'num_steps', ARGV[5], 'queue_bound_batches', ARGV[6],
  'min_group', ARGV[7])
redis.call('ZADD', 'tz:runs', ARGV[1], RUN)
redis.call('XADD', 'tz:created', '*', 'run', RUN)
event('run.running', '', '', '')
return {'ok'}
