-- ARGV: now, trajectory id, source, revision, reward JSON (equal bodies are equal strings)
local now, id, source, revision, body = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local t = R .. ':t:' .. id
local fields = redis.call('HMGET', t, 'state', 'group', 'sources', 'reward:' .. source)
local state = fields[1]
if not state then return {'unknown', ''} end
local eval = is_eval(fields[2])
if not eval then
  local expected = false
  for _, name in ipairs(cjson.decode(fields[3])) do expected = expected or name == source end
  if not expected then return {'unexpected_source', fields[3]} end
end
if fields[4] then
  local stored = tonumber(cjson.decode(fields[4]).revision)
  if revision == stored and body == fields[4] then return {'unchanged', ''} end
  if revision <= stored then return {'conflict', fields[4]} end
end
if not eval and (state == 'queued' or state == 'leased' or is_final(state)) then
  redis.call('HINCRBY', R .. ':counts', 'rewards_late', 1)
  return {'late', state}
end
redis.call('HSET', t, 'reward:' .. source, body)
redis.call('HINCRBY', t, 'rewards_revision', 1)
settle_reward(id, now)
return {'applied', ''}
