-- Before every script of Oncegate. A script that writes checks all that can fail first: Redis takes nothing back.
local LEAST = '-9223372036854775808'

local function whole(number)
  return string.format('%.0f', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A key that is there and is of another kind: the reply that says so.
local function misplaced(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then
    return {'type', key, found}
  end
end

-- The first write. What the server refuses (no memory, a replica, too few replicas, a disk that fails, no permission) it refuses here, or
-- not at all: none of that changes while a script runs, and memory is not looked at once it has written.
local function refused(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    return {'refused', reply.err}
  end
end

-- As `refused`, for what must also go in when memory is full, because it makes room or is small: a command that needs no memory goes first.
local function refused_but_for_memory(key)
  return refused('HDEL', key, '-')
end

-- Servers of version 6 cannot be asked.
local function forbidden(command, key, ...)
  if redis.acl_check_cmd and not redis.acl_check_cmd(command, key, ...) then
    return {'refused', 'NOPERM this user may not run ' .. command .. ' on a key that a batch needs'}
  end
end

-- Whether a shard is under `epoch` and ours: nothing, or the reply that says how it is not. `row` is epoch, sequence, owner.
local function not_ours(index, row, epoch, owner)
  local found = row[1]
  if found and (tonumber(found) > tonumber(epoch) or (found == epoch and row[3] ~= owner)) then
    return {'fenced', whole(index), row[3] or '', found}
  end
  if found ~= epoch then
    return {'back', whole(index), found or '', row[2] or ''}
  end
end
