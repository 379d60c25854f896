-- ARGV: now, eval id, step, digest, seed, metadata JSON, then per item: record, n
local now, eval = ARGV[1], ARGV[2]
local e = R .. ':eval:' .. eval
if redis.call('HEXISTS', R .. ':run', 'state') == 0 then return redis.error_reply('UNKNOWN_RUN ' .. RUN) end
if redis.call('EXISTS', e) == 1 then return 'ok' end
local newest = redis.call('ZRANGE', 'tz:runs', 0, 0, 'REV')[1]
if newest ~= RUN then return redis.error_reply('SUPERSEDED ' .. newest) end
local item, total = 0, 0
for i = 7, #ARGV, 2 do
  local n, name = tonumber(ARGV[i + 1]), 'e' .. eval .. '.' .. item
  redis.call('HSET', e, 'item:' .. item, ARGV[i])
  redis.call('ZADD', R .. ':eval_todo', eval, name)
  for sample = 0, n - 1 do
    local id = RUN .. '.' .. name .. '.' .. sample
    redis.call('HSET', R .. ':t:' .. id, 'state', 'accepted', 'group', RUN .. '.' .. name, 'number', item,
      'sample', sample, 'n', n, 'at:accepted', now)
  end
  item, total = item + 1, total + n
end
redis.call('HSET', e, 'created', now, 'step', ARGV[3], 'digest', ARGV[4], 'seed', ARGV[5], 'metadata', ARGV[6],
  'num_items', item, 'num_trajectories', total, 'num_finished', 0)
redis.call('ZADD', R .. ':evals', eval, eval)
redis.call('HINCRBY', R .. ':counts', 'eval:accepted', total)
redis.call('HINCRBY', R .. ':counts', 'eval:state:accepted', total)
event('evaluation.accepted', '', RUN .. '.e' .. eval, '')
return 'ok'
