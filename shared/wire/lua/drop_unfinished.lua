-- ARGV: now, group, reason. Under max_lag: what is still to be generated of a group is DROPPED. Returns how many.
local group, moved = ARGV[2], 0
if tonumber(redis.call('HGET', R .. ':run', 'min_group') or 0) == 0 then return 0 end
for _, id in ipairs(members(group)) do
  local state = state_of(id)
  if state == 'accepted' or state == 'generating' then
    move(id, 'dropped', ARGV[1], ARGV[3])
    moved = moved + 1
  end
end
settle_todo(group)
if moved > 0 then settle_group(group) end
return moved
