-- A page of marks. KEYS: marks, marks by sequence; ARGV: above which sequence, bytes, most
local page, bytes = {}, 0
for _, sequence in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], '+inf', 'LIMIT', 0, tonumber(ARGV[3]))) do
  -- A block that does not fit is not even read, but for the first.
  bytes = bytes + redis.call('HSTRLEN', KEYS[1], sequence)
  if #page > 0 and bytes > tonumber(ARGV[2]) then
    break
  end
  page[#page + 1] = sequence
  page[#page + 1] = redis.call('HGET', KEYS[1], sequence)
end
return page
