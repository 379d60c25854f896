-- ARGV: epoch, step, metrics JSON
local refused = fenced(ARGV[1])
if refused then return refused end
redis.call('XADD', R .. ':steps', '*', 'step', ARGV[2], 'epoch', ARGV[1], 'metrics', ARGV[3])
redis.call('HSET', R .. ':run', 'step', ARGV[2] + 1)
return 'ok'
