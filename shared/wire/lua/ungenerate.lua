-- ARGV: now, groups. Their GENERATING samples are ACCEPTED again: whoever generated them is gone. Returns how many.
local moved = 0
for i = 2, #ARGV do
  for _, id in ipairs(members(ARGV[i])) do
    if state_of(id) == 'generating' then
      move(id, 'accepted', ARGV[1])
      moved = moved + 1
    end
  end
end
return moved
