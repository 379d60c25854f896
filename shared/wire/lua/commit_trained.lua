-- ARGV: now, epoch, durable step, archive URI or ''. Returns the number of newly trained trajectories.
local refused = fenced(ARGV[2])
if refused then return refused end
return train_until(tonumber(ARGV[3]), ARGV[1], ARGV[4])
