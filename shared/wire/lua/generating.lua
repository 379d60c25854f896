-- ARGV: now, trajectory ids. Returns the ids that are now GENERATING.
-- A paused run starts nothing, also for a dispatcher that saw it running a moment ago.
if redis.call('HGET', R .. ':run', 'state') == 'paused' then return {} end
local started = {}
for i = 2, #ARGV do
  local state = state_of(ARGV[i])
  if state == 'accepted' then move(ARGV[i], 'generating', ARGV[1]) end
  if state == 'accepted' or state == 'generating' then started[#started + 1] = ARGV[i] end
end
return started
