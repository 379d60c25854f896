-- ARGV: now, epoch, number, entry id, detail. The group is DROPPED(poison) and the run pauses for the operator to decide.
local refused = fenced(ARGV[2])
if refused then return refused end
local number = ARGV[3]
redis.call('XACK', R .. ':queue', 'trainer', ARGV[4])
redis.call('XDEL', R .. ':queue', ARGV[4])
redis.call('HDEL', R .. ':queued', number)
if redis.call('HEXISTS', R .. ':fingerprints', number) == 1 then redis.call('SADD', R .. ':dropped', number) end
for _, id in ipairs(members(RUN .. '.' .. number)) do
  if not is_final(state_of(id)) then move(id, 'dropped', ARGV[1], 'poison') end
end
if not is_over(redis.call('HGET', R .. ':run', 'state')) then
  redis.call('HSET', R .. ':run', 'state', 'paused', 'reason', 'poison', 'detail', ARGV[5])
  event('run.paused', '', RUN .. '.' .. number, 'poison')
end
return 'ok'
