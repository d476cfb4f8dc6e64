-- One batch. Looks at everything, answers with the rows' outcomes if they are not those expected, and else writes.
-- KEYS: dead letters, tombstones, tombstones by time; per step shard, marks, marks by sequence, marks by time; rows
local STEPS, ROWS, MARKS, LETTERS = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local mode, kind, field, owner, route = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local look, expected = ARGV[10] == 'look', ARGV[11]
local letters_key, tombs_key, tomb_times_key = KEYS[1], KEYS[2], KEYS[3]
local at = 11
local versioned = mode == 'upsert-if-newer'

local function step_key(step, which)
  return KEYS[3 + 4 * (step - 1) + which]
end

-- P4: every shard at sequence n - 1 under our epoch. One that another owner took outranks one that stands elsewhere.
local elsewhere
for step = 1, STEPS do
  local base = at + 5 * (step - 1)
  local epoch, before, sequence = ARGV[base + 1], ARGV[base + 2], ARGV[base + 3]
  local row = redis.call('HMGET', step_key(step, 1), 'epoch', 'sequence', 'owner')
  local other = not_ours(step, row, epoch, owner)
  if other and other[1] == 'fenced' then
    return other
  end
  if not other and row[2] ~= before then
    local ahead = row[2] and tonumber(row[2]) >= tonumber(sequence)
    other = {ahead and 'ahead' or 'back', whole(step), row[1], row[2] or ''}
  end
  elsewhere = elsewhere or other
end
if elsewhere then
  return elsewhere
end
local steps_at = at
at = at + 5 * STEPS

local function bytes_above(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x > y
    end
  end
  return #a > #b
end

local function digits(text)
  local sign, digits = string.match(text, '^(%-?)0*(%d+)$')
  return digits == '0' and '' or sign, digits
end

-- Numbers of Lua are doubles and its order of texts is the host's: both would be wrong here.
local function above(a, b)
  if kind ~= 'integer' then
    return bytes_above(a, b)
  end
  local sign_a, a_digits = digits(a)
  local sign_b, b_digits = digits(b)
  if sign_a ~= sign_b then
    return sign_b == '-'
  end
  if sign_a == '-' then
    a_digits, b_digits = b_digits, a_digits
  end
  if #a_digits ~= #b_digits then
    return #a_digits > #b_digits
  end
  return bytes_above(a_digits, b_digits)
end

local function comparable(text)
  return kind ~= 'integer' or digits(text) ~= nil
end

if versioned then
  local trouble = misplaced(tombs_key, 'hash')
  if trouble then
    return trouble
  end
end

-- What becomes of each row, as if they had come one after another.
local rows_at = 3 + 4 * STEPS
local known, rows, outcomes, reasons = {}, {}, {}, {}
for i = 1, ROWS do
  local key = KEYS[rows_at + i]
  local row = cmsgpack.unpack(ARGV[at + i])
  rows[i] = row
  local now = known[key]
  if not now then
    now = {}
    known[key] = now
    local found = redis.call('TYPE', key).ok
    now.there = found == 'hash'
    if not now.there and found ~= 'none' then
      now.bad = found
    end
    if versioned then
      now.version = now.there and redis.call('HGET', key, field) or nil
      local buried = redis.call('HGET', tombs_key, key)
      now.tomb = buried and cmsgpack.unpack(buried)[1] or nil
      if (now.version and not comparable(now.version)) or (now.tomb and not comparable(now.tomb)) then
        now.bad = 'version'
      end
    end
  end
  local version, outcome = row[2], nil
  if now.bad then
    outcome = 'r'
    reasons[#reasons + 1] = whole(i)
    reasons[#reasons + 1] = now.bad
  elseif versioned and ((now.version and not above(version, now.version)) or (now.tomb and not above(version, now.tomb))) then
    outcome = 's'
  elseif row[1] == 'd' then
    outcome = now.there and 'u' or 'w'
    now.there, now.version = false, nil
    now.tomb = versioned and version or nil
  elseif mode == 'insert' and now.there then
    outcome = 's'
  else
    outcome = now.there and 'u' or 'w'
    row.unbury = now.tomb ~= nil
    now.there, now.version, now.tomb = true, versioned and version or nil, nil
  end
  outcomes[i] = outcome
end
at = at + ROWS
local became = table.concat(outcomes)
if look or became ~= expected then
  return {'outcomes', became, reasons}
end

-- Whatever else could fail.
local trouble = misplaced(letters_key, 'stream') or misplaced(tombs_key, 'hash') or misplaced(tomb_times_key, 'zset')
for step = 1, STEPS do
  local shard, marks, order, times = step_key(step, 1), step_key(step, 2), step_key(step, 3), step_key(step, 4)
  trouble = trouble or misplaced(marks, 'hash') or misplaced(order, 'zset') or misplaced(times, 'zset')
    or forbidden('HSET', shard, '-', '-') or forbidden('HSET', marks, '-', '-')
    or forbidden('ZADD', order, '0', '-') or forbidden('ZADD', times, '0', '-')
end
if LETTERS > 0 then
  trouble = trouble or forbidden('XADD', letters_key, '*', '-', '-')
end
if versioned then
  trouble = trouble or forbidden('HSET', tombs_key, '-', '-') or forbidden('HDEL', tombs_key, '-')
    or forbidden('ZADD', tomb_times_key, '0', '-') or forbidden('ZREM', tomb_times_key, '-')
end
for i = 1, ROWS do
  if trouble then
    break
  end
  local outcome = outcomes[i]
  if outcome == 'w' or outcome == 'u' then
    local key = KEYS[rows_at + i]
    if rows[i][1] == 'd' then
      trouble = forbidden('UNLINK', key)
    else
      trouble = forbidden('HSET', key, '-', '-') or (rows[i][5] > 0 and forbidden('HDEL', key, '-') or nil)
    end
  end
end
if trouble then
  return trouble
end

-- Nothing below fails. The fence moves last, so that a half that nobody foresaw would be written again, not lost.
local now = whole(now_ms())
trouble = refused('HSET', step_key(1, 1), 'heartbeat_ms', now)
if trouble then
  return trouble
end
local FEW = 1000
for i = 1, ROWS do
  local outcome, row, key = outcomes[i], rows[i], KEYS[rows_at + i]
  if outcome == 'w' or outcome == 'u' then
    if row[1] == 'd' then
      if outcome == 'u' then
        redis.call('UNLINK', key)
      end
      if versioned then
        redis.call('HSET', tombs_key, key, cmsgpack.pack({row[2], row[3], route}))
        redis.call('ZADD', tomb_times_key, row[3], key)
      end
    else
      local first, last = 6, 5 + 2 * row[4]
      while first <= last do
        local till = math.min(first + 2 * FEW - 1, last)
        redis.call('HSET', key, unpack(row, first, till))
        first = till + 1
      end
      last = last + row[5]
      while first <= last do
        local till = math.min(first + FEW - 1, last)
        redis.call('HDEL', key, unpack(row, first, till))
        first = till + 1
      end
      if row.unbury then
        redis.call('HDEL', tombs_key, key)
        redis.call('ZREM', tomb_times_key, key)
      end
    end
  end
end
for _ = 1, MARKS do
  local step = tonumber(ARGV[at + 1])
  local sequence = ARGV[steps_at + 5 * (step - 1) + 3]
  redis.call('HSET', step_key(step, 2), sequence, ARGV[at + 5], sequence .. '/about', ARGV[at + 2])
  redis.call('ZADD', step_key(step, 3), sequence, sequence)
  redis.call('ZADD', step_key(step, 4), ARGV[at + 4], sequence)
  at = at + 5
end
for _ = 1, LETTERS do
  redis.call('XADD', letters_key, '*', unpack(cmsgpack.unpack(ARGV[at + 1])))
  at = at + 1
end
for step = 1, STEPS do
  local base = steps_at + 5 * (step - 1)
  local shard = step_key(step, 1)
  redis.call('HSET', shard, 'sequence', ARGV[base + 3], 'watermark_ms', ARGV[base + 5], 'heartbeat_ms', now)
  if ARGV[base + 4] ~= '' then
    redis.call('HSET', shard, 'position', ARGV[base + 4])
  end
end
return {'applied'}
