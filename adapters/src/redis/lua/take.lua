-- Takes shards over, under higher epochs. With 'resolve' only those that no other owner has taken since, and their marks of one sequence.
-- KEYS: the route's shards; per shard shard, marks
local COUNT, owner, stale_ms, resolve = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4] == 'resolve'
local rise, most = tonumber(ARGV[5]), tonumber(ARGV[6])
-- A connection is asked for, and no shard yet.
if COUNT == 0 then
  return {'taken'}
end
-- As `Lineage::taken` does it.
local function taken_over(lineage, sequence, epoch)
  local reigns = {}
  for reign in string.gmatch(lineage, '%S+') do
    if (tonumber(string.match(reign, '^[^:]*')) or math.huge) < tonumber(sequence) then
      reigns[#reigns + 1] = reign
    end
  end
  reigns[#reigns + 1] = sequence .. ':' .. epoch
  return table.concat(reigns, ' ', math.max(1, #reigns - most + 1))
end
local now = now_ms()
local trouble = misplaced(KEYS[1], 'set')
local epochs = {}
for i = 1, COUNT do
  local shard, ours = KEYS[2 * i], ARGV[6 + 4 * (i - 1) + 3]
  local row = redis.call('HMGET', shard, 'epoch', 'owner', 'heartbeat_ms')
  epochs[i] = row[1]
  if stale_ms ~= '' and row[2] and row[2] ~= owner and now - tonumber(row[3]) < tonumber(stale_ms) then
    return {'held', whole(i), row[2], whole(now - tonumber(row[3]))}
  end
  if resolve and row[1] and (tonumber(row[1]) > tonumber(ours) or row[2] ~= owner) then
    return {'fenced', whole(i), row[2] or '', row[1]}
  end
  trouble = trouble or misplaced(KEYS[2 * i + 1], 'hash') or forbidden('HSET', shard, '-', '-') or forbidden('HDEL', shard, '-')
    or forbidden('SADD', KEYS[1], '-')
end
trouble = trouble or refused_but_for_memory(KEYS[2])
if trouble then
  return trouble
end
local taken = {'taken'}
for i = 1, COUNT do
  local shard, base = KEYS[2 * i], 6 + 4 * (i - 1)
  local least = tonumber(ARGV[base + 2])
  local epoch = whole(math.max(tonumber(epochs[i] or '0'), least) + rise)
  if not epochs[i] then
    redis.call('SADD', KEYS[1], ARGV[base + 1])
    redis.call('HSET', shard, 'sequence', '0', 'watermark_ms', LEAST, 'floor_ms', LEAST)
  end
  local stands = redis.call('HMGET', shard, 'sequence', 'lineage')
  local lineage = taken_over(stands[2] or '', stands[1], epoch)
  redis.call('HSET', shard, 'epoch', epoch, 'lineage', lineage, 'owner', owner, 'heartbeat_ms', whole(now))
  local row = redis.call('HMGET', shard, 'epoch', 'sequence', 'position', 'watermark_ms', 'floor_ms', 'lineage')
  row[7] = resolve and redis.call('HGET', KEYS[2 * i + 1], ARGV[base + 4]) or false
  taken[i + 1] = row
end
return taken
