-- ARGV: now, epoch, number, reason. A queued group that no trainer can train is DROPPED; its batch is complete without it.
local refused = fenced(ARGV[2])
if refused then return refused end
local number = ARGV[3]
forget_entry(number)
redis.call('SADD', R .. ':dropped', number)
for _, id in ipairs(members(RUN .. '.' .. number)) do
  if not is_final(state_of(id)) then move(id, 'dropped', ARGV[1], ARGV[4]) end
end
return 'ok'
