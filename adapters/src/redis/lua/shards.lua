-- The route's shards whose ids begin so, as they stand.
-- KEYS: the route's shards; ARGV: what their keys begin with, what their ids begin with
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if string.sub(id, 1, #ARGV[2]) == ARGV[2] then
    local row = redis.call('HMGET', ARGV[1] .. id, 'epoch', 'sequence', 'position', 'watermark_ms', 'floor_ms', 'lineage')
    row[7] = id
    found[#found + 1] = row
  end
end
return found
