-- ARGV: now, reason, groups of evaluations. Their unfinished samples are DROPPED. Returns how many.
local moved = 0
for i = 3, #ARGV do
  local group = ARGV[i]
  for _, id in ipairs(members(group)) do
    if not is_final(state_of(id)) then
      move(id, 'dropped', ARGV[1], ARGV[2])
      redis.call('HINCRBY', R .. ':eval:' .. string.match(group, '%.e(%d+)%.'), 'num_finished', 1)
      moved = moved + 1
    end
  end
  settle_todo(group)
end
return moved
