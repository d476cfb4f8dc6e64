-- What an owner does beside delivering. KEYS: tombstones, tombstones by time; per shard shard, marks, marks by sequence, marks by time
-- ARGV: what, how many, owner, floor, marks at most; per shard epoch, sequence seen on this connection, value; route, tombstones at most
local what, COUNT, owner, floor, most = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local lenient = what == 'partitions' or what == 'source' or what == 'renew'
local ours, elsewhere = {}, nil
for i = 1, COUNT do
  local base = 5 + 3 * (i - 1)
  local row = redis.call('HMGET', KEYS[2 + 4 * (i - 1) + 1], 'epoch', 'sequence', 'owner')
  local other = not_ours(i, row, ARGV[base + 1], owner)
  ours[i] = not other
  if not lenient then
    if other and other[1] == 'fenced' then
      return other
    end
    if not other and tonumber(row[2]) < tonumber(ARGV[base + 2]) then
      other = {'back', whole(i), row[1], row[2]}
    end
    elsewhere = elsewhere or other
  end
end
if elsewhere then
  return elsewhere
end
if COUNT == 0 then
  return {'done', '0'}
end
local trouble = misplaced(KEYS[1], 'hash') or misplaced(KEYS[2], 'zset')
for i = 1, COUNT do
  local base = 2 + 4 * (i - 1)
  trouble = trouble or misplaced(KEYS[base + 2], 'hash') or misplaced(KEYS[base + 3], 'zset') or misplaced(KEYS[base + 4], 'zset')
    or forbidden('HSET', KEYS[base + 1], '-', '-') or forbidden('HDEL', KEYS[base + 1], '-')
  if what == 'expire' or what == 'forget' then
    trouble = trouble or forbidden('HDEL', KEYS[base + 2], '-') or forbidden('ZREM', KEYS[base + 3], '-')
      or forbidden('ZREM', KEYS[base + 4], '-') or forbidden('UNLINK', KEYS[base + 2], KEYS[base + 3], KEYS[base + 4])
  end
end
trouble = trouble or refused_but_for_memory(KEYS[3])
if trouble then
  return trouble
end

local gone, before = 0, {'kept'}
for i = 1, COUNT do
  local base, value = 2 + 4 * (i - 1), ARGV[5 + 3 * (i - 1) + 3]
  local shard, marks, order, times = KEYS[base + 1], KEYS[base + 2], KEYS[base + 3], KEYS[base + 4]
  if what == 'heartbeat' then
    redis.call('HSET', shard, 'heartbeat_ms', whole(now_ms()))
  elseif what == 'expire' then
    if tonumber(redis.call('HGET', shard, 'floor_ms')) < tonumber(floor) then
      redis.call('HSET', shard, 'floor_ms', floor)
    end
    for _, sequence in ipairs(redis.call('ZRANGEBYSCORE', times, '-inf', '(' .. floor, 'LIMIT', 0, most - gone)) do
      redis.call('HDEL', marks, sequence, sequence .. '/about')
      redis.call('ZREM', order, sequence)
      redis.call('ZREM', times, sequence)
      gone = gone + 1
    end
  elseif what == 'forget' then
    gone = gone + redis.call('ZCARD', order)
    redis.call('UNLINK', marks, order, times)
    redis.call('HSET', shard, 'watermark_ms', LEAST, 'floor_ms', LEAST)
  else
    local field = what == 'partitions' and 'partitions' or 'source'
    local was = ours[i] and redis.call('HGET', shard, field)
    before[i + 1] = was or false
    if ours[i] and was ~= value and (not was or what ~= 'source') then
      redis.call('HSET', shard, field, value)
      if was and what == 'renew' then
        redis.call('HDEL', shard, 'position')
      end
    end
  end
end
if what == 'expire' then
  -- A tombstone of another route's is left to that route.
  local route, bury = ARGV[5 + 3 * COUNT + 1], tonumber(ARGV[5 + 3 * COUNT + 2])
  local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. floor, 'LIMIT', 0, bury)
  for _, key in ipairs(due) do
    local buried = redis.call('HGET', KEYS[1], key)
    if buried then
      local tomb = cmsgpack.unpack(buried)
      if tomb[3] == route and tonumber(tomb[2]) < tonumber(floor) then
        redis.call('HDEL', KEYS[1], key)
      end
    end
    redis.call('ZREM', KEYS[2], key)
  end
  -- Who asks goes on until none went: not for marks alone, for one batch has one of them and any number of tombstones.
  if #due == bury then
    gone = gone + 1
  end
end
if lenient then
  return before
end
return {'done', whole(gone)}
