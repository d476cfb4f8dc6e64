-- First writer wins. KEYS: the route; ARGV: id, key spec, algorithm, secret
local names = {'route_id', 'key_spec_id', 'algorithm', 'secret'}
if redis.call('EXISTS', KEYS[1]) == 0 then
  local trouble = refused('HSET', KEYS[1], names[1], ARGV[1], names[2], ARGV[2], names[3], ARGV[3], names[4], ARGV[4])
  if trouble then
    return trouble
  end
end
return {'route', redis.call('HMGET', KEYS[1], unpack(names))}
