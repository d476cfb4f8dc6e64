use std::sync::Arc;

use proptest::prelude::*;

use super::{
    address::Address,
    encode::{Encoder, Fields, Layout},
    keys::Keys,
    pack,
    probe::config_misfits,
    reply::{self, Class, classify},
    server::Server,
    *,
};
use crate::{
    sink::{RowKind, SinkError},
    value::Value,
};

fn config(columns: &[(&str, Kind)], row_key: &[&str]) -> RedisConfig {
    RedisConfig {
        columns: columns.iter().map(|(name, kind)| ((*name).to_owned(), *kind)).collect(),
        row_key: row_key.iter().map(|name| (*name).to_owned()).collect(),
        ..RedisConfig::new("redis://127.0.0.1/0", "p:")
    }
}

fn encoder(config: &RedisConfig) -> Encoder {
    Encoder::new(Arc::new(Layout::of(config)))
}

type Encoded = (Vec<(String, Vec<u8>)>, Vec<String>, Vec<u8>);

/// Names and values that are set, names that are removed, and the key.
fn encoded(encoder: &Encoder, values: &[Value<'_>]) -> Result<Encoded, String> {
    let (mut row, mut key) = (Vec::new(), Vec::new());
    encoder.encode(RowKind::Write, values, &mut row, &mut key).map_err(|bad| bad.to_string())?;
    let fields = Fields::read(&row).expect("it was just encoded");
    let mut rest = fields.packed;
    let mut text = || pack::take(&mut rest).expect("a whole row").to_vec();
    let utf8 = |bytes: Vec<u8>| String::from_utf8(bytes).expect("a name");
    let set = (0..fields.set).map(|_| (utf8(text()), text())).collect();
    let removed = (0..fields.removed).map(|_| utf8(text())).collect();
    assert!(rest.is_empty());
    Ok((set, removed, key))
}

#[test]
fn a_value_is_set_a_null_is_removed_and_what_is_missing_stays() {
    let encoder = encoder(&config(
        &[("id", Kind::Text), ("n", Kind::Number), ("gone", Kind::Json), ("left", Kind::Text)],
        &["id"],
    ));
    let values = [Value::Text("a:b%"), Value::Json("1.50"), Value::Json("null"), Value::Missing];
    let (set, removed, key) = encoded(&encoder, &values).unwrap();
    assert_eq!(set, [("id".to_owned(), b"a:b%".to_vec()), ("n".to_owned(), b"1.50".to_vec())]);
    assert_eq!((removed, key), (vec!["gone".to_owned()], b"p:a:b%".to_vec()));
    let named = &encoder.columns()[1];
    assert!(named.nullable && named.has_default);
    assert!(!encoder.columns()[0].nullable && !encoder.columns()[0].has_default);
}

#[test]
fn bad_values_name_their_column_and_leave_the_buffers_as_they_were() {
    let columns = super::types::KINDS;
    let encoder = encoder(&config(&columns, &["text", "integer"]));
    let good = [
        "\"a\"",
        "1",
        "1",
        "true",
        "\"2024-01-01T00:00:00Z\"",
        "\"00112233445566778899aabbccddeeff\"",
        "[]",
        "\"\"",
    ];
    encoded(&encoder, &good.map(Value::Json)).unwrap();
    for (column, json) in [
        (0, "1"),
        (0, "\"\\ud800\""),
        (0, "null"),
        (1, "9223372036854775808"),
        (1, "1.5"),
        (2, "\"1,5\""),
        (2, "true"),
        (3, "1"),
        (4, "\"2024-01-01T00:00:00\""),
        (4, "\"2024-01-01T00:00:00.0000000001Z\""),
        (4, "\"2024-01-01T00:00:00.Z\""),
        (4, "\"2024-01-01T23:59:60Z\""),
        (4, "1704067200"),
        (5, "\"0011\""),
        (7, "\"\\\\x0\""),
    ] {
        let mut values = good.map(Value::Json);
        values[column] = Value::Json(json);
        let (mut row, mut key) = (b"row".to_vec(), b"key".to_vec());
        let bad = encoder.encode(RowKind::Write, &values, &mut row, &mut key).expect_err(json);
        assert_eq!(bad.column, columns[column].0, "{json}: {bad}");
        assert_eq!((row.as_slice(), key.as_slice()), (&b"row"[..], &b"key"[..]), "{json}");
        let value = json.trim_matches('"');
        assert!(value.len() < 5 || json == "null" || !bad.to_string().contains(value), "{bad}");
    }
}

#[test]
fn moments_of_versions_are_in_utc_with_nine_decimals() {
    let mut config = config(&[("id", Kind::Text), ("at", Kind::Timestamp)], &["id"]);
    let given = [
        ("2024-05-01T12:00:00+02:00", "2024-05-01T10:00:00.000000000Z"),
        ("2024-05-01T12:00:00.5-00:30", "2024-05-01T12:30:00.500000000Z"),
        ("1969-12-31T23:59:59.123456789Z", "1969-12-31T23:59:59.123456789Z"),
        ("9999-12-31T23:59:59.9999999990Z", "9999-12-31T23:59:59.999999999Z"),
        ("0000-01-01T00:00:00Z", "0000-01-01T00:00:00.000000000Z"),
    ];
    for (text, utc) in given {
        let values = [Value::Text("a"), Value::Text(text)];
        let (set, ..) = encoded(&encoder(&config), &values).unwrap();
        assert_eq!(set[1].1, text.as_bytes(), "as it was given");
        (config.mode, config.version) = (Mode::UpsertIfNewer, Some("at".to_owned()));
        let (set, ..) = encoded(&encoder(&config), &values).unwrap();
        assert_eq!(set[1].1, utc.as_bytes());
        (config.mode, config.version) = (Mode::Upsert, None);
    }
    let micros = [Value::Text("a"), Value::Micros(-1_500_000)];
    let (set, ..) = encoded(&encoder(&config), &micros).unwrap();
    assert_eq!(set[1].1, b"1969-12-31T23:59:58.5Z");
    (config.mode, config.version) = (Mode::UpsertIfNewer, Some("at".to_owned()));
    for far in ["9999-12-31T23:59:59-00:01", "0000-01-01T00:00:00+00:01", "+10000-01-01T00:00:00Z"] {
        encoded(&encoder(&config), &[Value::Text("a"), Value::Text(far)]).expect_err(far);
    }
}

proptest! {
    /// Different row keys never make one key, and equal ones do.
    #[test]
    fn row_keys_are_told_apart(a in prop::array::uniform2("[ab:%2]{0,4}"), b in prop::array::uniform2("[ab:%2]{0,4}")) {
        let encoder = encoder(&config(&[("x", Kind::Text), ("y", Kind::Text)], &["y", "x"]));
        let key = |parts: &[String; 2]| encoded(&encoder, &[Value::Text(&parts[0]), Value::Text(&parts[1])]).unwrap().2;
        prop_assert_eq!(a == b, key(&a) == key(&b));
    }

    #[test]
    fn packed_texts_are_read_back(texts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 0..8)) {
        let mut packed = Vec::new();
        for (at, text) in texts.iter().enumerate() {
            if at % 2 == 0 {
                pack::text(text, &mut packed);
            } else {
                let mut write = |out: &mut Vec<u8>| { out.extend_from_slice(text); Ok(()) };
                let (from, to) = pack::text_of(&mut write, &mut packed).unwrap();
                prop_assert_eq!(&packed[from..to], &text[..]);
            }
        }
        let mut rest = packed.as_slice();
        for text in &texts {
            prop_assert_eq!(pack::take(&mut rest), Some(&text[..]));
        }
        prop_assert_eq!(pack::take(&mut rest), None);
    }

    #[test]
    fn nothing_that_is_no_row_panics(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        if let Some(fields) = Fields::read(&bytes) {
            prop_assert!(fields.longest().is_none_or(|name| name.len() <= bytes.len()));
        }
    }
}

#[test]
fn errors_of_the_server_say_whether_something_was_written() {
    let again = |text| matches!(classify(text), Class::Refused { retry: true, .. });
    let never = |text| matches!(classify(text), Class::Refused { retry: false, .. });
    for text in [
        "OOM command not allowed when used memory > 'maxmemory'.",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down",
        "LOADING Redis is loading the dataset in memory",
        "MISCONF Errors writing to the AOF file: No space left on device",
        "NOREPLICAS Not enough good replicas to write.",
        "ERR Error running script (call to f_0): @user_script:12: -OOM command not allowed when used memory > 'maxmemory'.",
        "ERR Error running script (call to f_0): @user_script:1: Script killed by user with SCRIPT KILL...",
        "ERR Script killed by user with SCRIPT KILL. script: 0, on @user_script:1.",
    ] {
        assert!(again(text), "{text}");
    }
    for text in [
        "NOAUTH Authentication required.",
        "WRONGPASS invalid username-password pair or user is disabled.",
        "NOPERM this user has no permissions to run the 'evalsha' command",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
        "MOVED 3999 127.0.0.1:6381",
        "CROSSSLOT Keys in request don't hash to the same slot",
        "CLUSTERDOWN The cluster is down",
    ] {
        assert!(never(text), "{text}");
    }
    // From inside a script, which may have written.
    for text in [
        "NOPERM No permissions to access a key script: 0, on @user_script:160.",
        "ERR user_script:7: attempt to index a nil value script: 0, on @user_script:7.",
        "ERR something new",
        "",
    ] {
        assert_eq!(classify(text), Class::Doubt, "{text}");
    }
}

#[test]
fn what_scripts_say_is_an_error_or_their_work() {
    use ::redis::Value::{BulkString, Int, Nil};
    let said = |words: &[&str]| {
        let parts: Vec<_> = words.iter().map(|word| BulkString(word.as_bytes().to_vec())).collect();
        reply::refusal(&parts, &|index| format!("s{index}"))
    };
    let fenced = said(&["fenced", "2", "other", "7"]).unwrap();
    assert!(
        matches!(fenced, Some(SinkError::Fenced { shard, owner, epoch: 7 }) if shard == "s1" && owner == "other")
    );
    let held = said(&["held", "1", "other", "-3"]).unwrap();
    assert!(matches!(held, Some(SinkError::Held { seen_ms: 0, .. })), "clocks may step back");
    assert!(matches!(said(&["ahead", "1", "4", "9"]).unwrap(), Some(SinkError::Unknown { .. })));
    for back in [["back", "1", "", ""], ["back", "1", "4", "9"]] {
        let Some(SinkError::NotApplied { reason, retry: true }) = said(&back).unwrap() else {
            panic!("{back:?}")
        };
        assert!(reason.starts_with("the server went back"), "{reason}");
    }
    let misplaced = said(&["type", "oncegate:x", "list"]).unwrap();
    assert!(matches!(misplaced, Some(SinkError::NotApplied { retry: false, .. })));
    let refused = said(&["refused", "-OOM command not allowed"]).unwrap();
    assert!(
        matches!(refused, Some(SinkError::NotApplied { reason, retry: true }) if reason.starts_with("OOM"))
    );
    for work in ["applied", "outcomes", "taken", "done", "kept", "route"] {
        assert!(said(&[work]).unwrap().is_none());
    }
    for strange in [vec![], vec![Int(1)], vec![Nil], vec![BulkString(b"fenced".to_vec())]] {
        assert!(reply::refusal(&strange, &|_| String::new()).is_err(), "{strange:?}");
    }
}

#[test]
fn urls_are_read_and_never_shown() {
    let address = Address::parse("redis://me:p%40ss@redis.example.com:6380/3").unwrap();
    assert_eq!(
        (address.host.as_str(), address.port, address.tls.is_none()),
        ("redis.example.com", 6380, true)
    );
    assert_eq!(
        (address.login.username(), address.login.password(), address.login.db()),
        (Some("me"), Some("p@ss"), 3)
    );
    assert!(!format!("{address:?}").contains("p@ss"));
    assert!(Address::parse("rediss://redis.example.com").unwrap().tls.is_some());
    assert_eq!(Address::parse("redis://:secret@[::1]").unwrap().port, 6379);
    for bad in [
        "",
        "localhost:6379",
        "http://a",
        "redis://",
        "redis://u:hunter2@a?x=1",
        "redis://u:hunter2@a/x",
        "unix:///tmp/s",
    ] {
        let misfit = Address::parse(bad).map(|_| ()).expect_err(bad);
        assert!(!misfit.to_string().contains("hunter2"), "{misfit}");
    }
    let config = RedisConfig::new("redis://u:hunter2@a", "p:");
    assert!(!format!("{config:?}").contains("hunter2"));
}

#[test]
fn configurations_that_do_not_fit_are_named() {
    let good = config(&[("id", Kind::Text), ("v", Kind::Integer), ("n", Kind::Number)], &["id"]);
    assert!(config_misfits(&good).is_empty());
    let newer = RedisConfig { mode: Mode::UpsertIfNewer, version: Some("v".into()), ..good.clone() };
    assert!(config_misfits(&newer).is_empty());
    let cases: [(RedisConfig, &str); 10] = [
        (RedisConfig { prefix: String::new(), ..good.clone() }, "prefix is empty"),
        (RedisConfig { prefix: "oncegate:x".into(), ..good.clone() }, "own keys"),
        (RedisConfig { prefix: "once".into(), ..good.clone() }, "own keys"),
        (RedisConfig { columns: Vec::new(), row_key: vec!["id".into()], ..good.clone() }, "0 columns"),
        (RedisConfig { row_key: Vec::new(), ..good.clone() }, "no row key"),
        (RedisConfig { row_key: vec!["x".into()], ..good.clone() }, "\"x\" is none"),
        (RedisConfig { row_key: vec!["n".into()], ..good }, "written differently"),
        (RedisConfig { version: None, ..newer.clone() }, "no version column"),
        (RedisConfig { version: Some("x".into()), ..newer.clone() }, "\"x\" is none"),
        (RedisConfig { version: Some("n".into()), ..newer }, "no order"),
    ];
    for (config, says) in cases {
        let misfits: Vec<String> = config_misfits(&config).iter().map(ToString::to_string).collect();
        assert!(misfits.iter().any(|misfit| misfit.contains(says)), "{says}: {misfits:?}");
        assert!(RedisSink::new(config).is_err());
    }
}

#[test]
fn servers_that_do_not_fit_are_named() {
    const GOOD: &str = "# Server\r\nredis_version:6.2.1\r\nredis_mode:standalone\r\nrole:master\r\nmaxmemory_policy:noeviction\r\n\
                        aof_enabled:1\r\ncluster_enabled:0\r\n";
    let config = config(&[("id", Kind::Text)], &["id"]);
    let always = RedisConfig { durability: Durability::Always, ..config.clone() };
    let of = |info: &str, settings: &[(&str, &str)]| {
        let settings = settings.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
        Server { info: info.to_owned(), settings: settings.collect() }
    };
    let (each_second, each_time) = ([("appendfsync", "everysec")], [("appendfsync", "always")]);
    assert_eq!(of(GOOD, &each_second).misfits(&config), []);
    assert_eq!(of(GOOD, &[]).misfits(&config), []);
    assert_eq!(of(GOOD, &each_time).misfits(&always), []);
    assert!(of(GOOD, &each_time).syncs_always() && !of(GOOD, &each_second).syncs_always());
    for (from, to, says) in [
        ("6.2.1", "5.0.14", "oldest"),
        ("6.2.1", "", "oldest"),
        ("mode:standalone", "mode:sentinel", "Sentinel"),
        ("mode:standalone", "mode:cluster", "cluster mode"),
        ("cluster_enabled:0", "cluster_enabled:1", "cluster mode"),
        ("role:master", "role:slave", "takes no writes"),
        ("noeviction", "allkeys-lfu", "evicted"),
        ("aof_enabled:1", "aof_enabled:0", "asks for more"),
    ] {
        let server = of(&GOOD.replace(from, to), &each_time);
        let misfits = server.misfits(&config);
        assert!(misfits.len() == 1 && misfits[0].to_string().contains(says), "{says}: {misfits:?}");
        let refused = server.fits(&config).expect_err(says).to_string();
        assert!(refused.contains(says) && refused.contains(&misfits[0].remedy), "{refused}");
    }
    let all = of("", &[]).misfits(&config);
    assert!(all.len() >= 3, "one list: {all:?}");
}

#[test]
fn a_server_that_pauses_its_syncs_is_no_durable_one() {
    const GOOD: &str = "redis_version:7.0.15\r\nredis_mode:standalone\r\nrole:master\r\naof_enabled:1\r\n";
    let config = config(&[("id", Kind::Text)], &["id"]);
    for (pauses, durability, says) in [
        ("no", Durability::Always, None),
        ("yes", Durability::Always, Some("no-appendfsync-on-rewrite is yes")),
        ("yes", Durability::EverySecond, None),
        ("yes", Durability::Any, None),
    ] {
        let settings = [("appendfsync", "always"), ("no-appendfsync-on-rewrite", pauses)];
        let settings = settings.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
        let server = Server { info: GOOD.to_owned(), settings: settings.collect() };
        let misfits = server.misfits(&RedisConfig { durability, ..config.clone() });
        let said: Vec<_> = misfits.iter().map(ToString::to_string).collect();
        assert!(said.len() == usize::from(says.is_some()), "{pauses} {durability:?}: {said:?}");
        assert!(said.iter().all(|misfit| misfit.contains(says.unwrap_or_default())), "{said:?}");
        assert_eq!(server.syncs_always(), pauses == "no");
    }
}

#[test]
fn all_keys_of_a_route_have_its_hash_tag() {
    let keys = Keys::new("orders", "row:");
    let mut all = keys.all_of("http/0").to_vec();
    all.extend([keys.route(), keys.shards(), keys.dead_letters(), keys.tombstone_times.clone()]);
    assert!(all.iter().all(|key| key.starts_with("oncegate:{orders}:")), "{all:?}");
    all.push(keys.tombstones.clone());
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 9);
    assert_eq!(keys.shard_prefix() + "http/0", Keys::new("orders", "x").shard("http/0"));
}
