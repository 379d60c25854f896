-- ARGV: now, group, reason, ids. Under max_lag: those of a group that are still to be generated are DROPPED. Returns how many.
local group, moved = ARGV[2], 0
if tonumber(redis.call('HGET', R .. ':run', 'min_group') or 0) == 0 then return 0 end
for i = 4, #ARGV do
  local state = state_of(ARGV[i])
  if state == 'accepted' or state == 'generating' then
    move(ARGV[i], 'dropped', ARGV[1], ARGV[3])
    moved = moved + 1
  end
end
settle_todo(group)
if moved > 0 then settle_group(group) end
return moved
