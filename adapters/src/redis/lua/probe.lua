-- What this user may not do, of all that the scripts do. KEYS: one of ours, one of a row
local own = {
  {'HSET', '-', '-'}, {'HDEL', '-'}, {'HMGET', '-'}, {'HGET', '-'}, {'HSTRLEN', '-'}, {'ZADD', '0', '-'}, {'ZREM', '-'}, {'ZCARD'},
  {'ZRANGEBYSCORE', '-inf', '0'}, {'SADD', '-'}, {'SMEMBERS'}, {'XADD', '*', '-', '-'}, {'UNLINK'}, {'TYPE'}, {'EXISTS'},
}
local rows = {{'HSET', '-', '-'}, {'HDEL', '-'}, {'HGET', '-'}, {'TYPE'}, {'UNLINK'}}
local missing = {}
if redis.acl_check_cmd then
  for which, commands in ipairs({own, rows}) do
    for _, command in ipairs(commands) do
      if not redis.acl_check_cmd(command[1], KEYS[which], unpack(command, 2)) then
        missing[#missing + 1] = command[1] .. (which == 1 and ' on keys of Oncegate' or ' on rows')
      end
    end
  end
end
now_ms()
local _ = cmsgpack.unpack(cmsgpack.pack({'-'}))
return missing
