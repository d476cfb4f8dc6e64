//! Values of each type, through a real server: what went in comes out, digit by digit.

use std::collections::BTreeMap;

use adapters::{
    redis::{Kind, RedisConfig, RedisSink},
    sink::{Acquire, Batch, Mode, OnRefused, Row, RowKind, RowOutcome, Session, ShardStep, Sink, Source},
    value::Value,
};
use oncegate_tests::{conformance::encode, servers::Redis};
use rand::{Rng, SeedableRng, rngs::SmallRng};

use crate::rig::server;

/// A random value of a column, as JSON, and what Redis must hold; none if the field must be gone.
fn random_value(random: &mut SmallRng, kind: Kind) -> (String, Option<Vec<u8>>) {
    if random.random_bool(0.1) {
        return ("null".to_owned(), None);
    }
    let digits = |random: &mut SmallRng, most: usize| -> String {
        let count = random.random_range(1..=most);
        let first = random.random_range(b'1'..=b'9') as char;
        std::iter::once(first).chain((1..count).map(|_| random.random_range(b'0'..=b'9') as char)).collect()
    };
    let sign = if random.random_bool(0.3) { "-" } else { "" };
    match kind {
        Kind::Text => {
            let length = if random.random_bool(0.05) { 70_000 } else { random.random_range(0..40) };
            let text: String = (0..length)
                .map(|_| match random.random_range(0..5) {
                    0 => char::from(random.random_range(0..32u8)),
                    1 => {
                        ['é', '€', '𝄞', '"', '\\', ':', '%', '\u{7f}', '\u{2028}'][random.random_range(0..9)]
                    }
                    _ => char::from(random.random_range(32..127u8)),
                })
                .collect();
            (serde_json::to_string(&text).expect("JSON"), Some(text.into_bytes()))
        }
        Kind::Integer => {
            let value: i64 = match random.random_range(0..4) {
                0 => [i64::MIN, i64::MAX, 0, -1, (1 << 53) + 1][random.random_range(0..5)],
                1 => random.random_range(-100..100),
                _ => random.random(),
            };
            let json = match random.random_range(0..3) {
                0 => format!("{value}.00"),
                1 => format!("\"{value}\""),
                _ => value.to_string(),
            };
            (json, Some(value.to_string().into_bytes()))
        }
        Kind::Number => {
            let text = match random.random_range(0..3) {
                0 => format!("{sign}{}.{}", digits(random, 30), digits(random, 30)),
                1 => format!("{sign}{}E{}", digits(random, 5), random.random_range(-999..999)),
                _ => format!("{sign}{}", digits(random, 60)),
            };
            let json = if random.random_bool(0.3) { format!("\"{text}\"") } else { text.clone() };
            (json, Some(text.into_bytes()))
        }
        Kind::Boolean => {
            let text = random.random_bool(0.5).to_string();
            (text.clone(), Some(text.into_bytes()))
        }
        Kind::Timestamp => {
            let fraction = if random.random_bool(0.5) {
                format!(".{:0width$}", random.random_range(0..10), width = random.random_range(1..=9))
            } else {
                String::new()
            };
            let offset = ["Z", "+02:00", "-11:30"][random.random_range(0..3)];
            let text = format!(
                "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}{fraction}{offset}",
                random.random_range(1..9999),
                random.random_range(1..=12),
                random.random_range(1..=28),
                random.random_range(0..24),
                random.random_range(0..60),
                random.random_range(0..60)
            );
            (format!("\"{text}\""), Some(text.into_bytes()))
        }
        Kind::Uuid => {
            let id = format!("{:032x}", random.random::<u128>());
            let written = [&id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]].join("-");
            let json = if random.random_bool(0.5) { id.to_uppercase() } else { written.clone() };
            (format!("\"{json}\""), Some(written.into_bytes()))
        }
        Kind::Json => {
            let json = ["{\"a\": [1.0, 2e5], \"b\":null}", "[]", "\"\\u00e9\"", " 12.50".trim(), "false"];
            let json = json[random.random_range(0..json.len())];
            (json.to_owned(), Some(json.into()))
        }
        Kind::Binary => {
            let bytes: Vec<u8> = (0..random.random_range(0..50)).map(|_| random.random()).collect();
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            (format!("\"\\\\x{hex}\""), Some(bytes))
        }
    }
}

/// All columns of a row in Redis.
fn row(redis: &Redis, key: &str) -> BTreeMap<String, Vec<u8>> {
    redis::cmd("HGETALL").arg(key).query(&mut redis.connect(1)).expect("a hash")
}

async fn write(
    session: &mut dyn Session,
    step: &ShardStep,
    rows: &[(RowKind, Vec<u8>, Vec<u8>)],
) -> Vec<RowOutcome> {
    let source = Source { step: 0, position: None, key: b"", payload: None, event_ms: 0 };
    let rows: Vec<Row<'_>> =
        rows.iter().map(|(kind, bytes, row_key)| Row { kind: *kind, bytes, row_key, source }).collect();
    let steps = [step.clone()];
    let batch = Batch {
        steps: &steps,
        rows: &rows,
        dead_letters: &[],
        on_refused: OnRefused::Report,
        known_new: false,
        seal: &|_| Vec::new(),
    };
    session.deliver(&batch).await.expect("goes in").rows
}

/// Random rows of all types against a model: the last value, gone where it was null, left where it was missing.
#[tokio::test]
async fn values_of_each_type_are_kept_exactly() {
    let redis = server();
    let kinds = adapters::redis::KINDS;
    let columns = [("key".to_owned(), Kind::Integer)];
    let columns = columns.into_iter().chain(kinds.map(|(name, kind)| (name.to_owned(), kind))).collect();
    let sink = RedisSink::new(RedisConfig {
        columns,
        mode: Mode::Upsert,
        row_key: vec!["key".to_owned()],
        ..RedisConfig::new(redis.url(1), "row:")
    })
    .expect("a good configuration");
    let encoder = sink.probe().await.expect("it fits");
    let mut session = sink.session("route", "owner");
    let mut state = session.acquire(&["s".into()], Acquire::Force).await.expect("acquired").remove(0);
    let seed: u64 = rand::rng().random();
    println!("seed {seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    let mut model: BTreeMap<u8, BTreeMap<String, Vec<u8>>> = BTreeMap::new();
    for _ in 0..60 {
        let mut rows = Vec::new();
        for _ in 0..20 {
            let key = random.random_range(0..40u8);
            let expected = model.entry(key).or_default();
            expected.insert("key".to_owned(), key.to_string().into_bytes());
            let mut texts = vec![Some(key.to_string())];
            for (name, kind) in kinds {
                if random.random_bool(0.1) {
                    texts.push(None);
                    continue;
                }
                let (json, kept) = random_value(&mut random, kind);
                texts.push(Some(json));
                match kept {
                    Some(kept) => drop(expected.insert(name.to_owned(), kept)),
                    None => drop(expected.remove(name)),
                }
            }
            let values: Vec<Value<'_>> =
                texts.iter().map(|text| text.as_deref().map_or(Value::Missing, Value::Json)).collect();
            let (row, row_key) = encode(&*encoder, RowKind::Write, &values).unwrap_or_else(|bad| {
                panic!("seed {seed}: {bad}: {texts:?}");
            });
            rows.push((RowKind::Write, row, row_key));
        }
        let step = ShardStep {
            shard: "s".into(),
            epoch: state.epoch,
            sequence: state.sequence + 1,
            position: None,
            watermark_ms: 0,
        };
        write(&mut *session, &step, &rows).await;
        state.sequence += 1;
    }
    for (key, expected) in model {
        assert_eq!(row(&redis, &format!("row:{key}")), expected, "seed {seed}, row {key}");
    }
}

/// Versions of all sizes and signs, of texts and of moments: the server's order is the types' order.
#[tokio::test]
async fn versions_are_compared_as_what_they_are() {
    let redis = server();
    let edges = [i64::MIN, i64::MIN + 1, -(1 << 53) - 1, -(1 << 53), -10, -9, -1, 0, 1, 9, 10, 99, 100];
    let integers: Vec<String> = edges
        .into_iter()
        .chain([(1 << 53), (1 << 53) + 1, i64::MAX - 1, i64::MAX])
        .map(|n| n.to_string())
        .collect();
    // In UTF-8, and byte by byte: neither as a locale has it nor up to a NUL.
    let texts = ["", "\0", "\0a", "A", "B", "Z", "a", "a\0", "a\0b", "aa", "b", "é", "𝄞"];
    let moments = [
        "0001-01-01T00:00:00Z",
        "2024-05-01T12:00:00+02:00",
        "2024-05-01T10:00:00.000000001Z",
        "2024-05-01T09:00:00.5-02:00",
        "9999-12-31T23:59:59.999999999Z",
    ];
    let json = |text: &str| serde_json::to_string(text).expect("JSON");
    let lists: [(Kind, Vec<String>); 3] = [
        (Kind::Integer, integers),
        (Kind::Text, texts.map(json).to_vec()),
        (Kind::Timestamp, moments.map(json).to_vec()),
    ];
    for (kind, versions) in lists {
        redis.command(1, &["FLUSHDB"]).expect("emptied");
        let sink = RedisSink::new(RedisConfig {
            columns: vec![("id".to_owned(), Kind::Integer), ("version".to_owned(), kind)],
            mode: Mode::UpsertIfNewer,
            row_key: vec!["id".to_owned()],
            version: Some("version".to_owned()),
            ..RedisConfig::new(redis.url(1), "row:")
        })
        .expect("a good configuration");
        let encoder = sink.probe().await.expect("it fits");
        let mut session = sink.session("route", "owner");
        let state = session.acquire(&["s".into()], Acquire::Force).await.expect("acquired").remove(0);
        let (mut first, mut second, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        let mut id = 0;
        for (i, a) in versions.iter().enumerate() {
            for (j, b) in versions.iter().enumerate() {
                // Half of the first are deletes, whose versions stay too.
                let kind = if id % 2 == 0 { RowKind::Write } else { RowKind::Delete };
                let text = id.to_string();
                let row = |version: &str, kind| {
                    let values = [Value::Json(&text), Value::Json(version)];
                    let (row, key) = encode(&*encoder, kind, &values).expect("a good row");
                    (kind, row, key)
                };
                first.push(row(a, kind));
                second.push(row(b, RowKind::Write));
                expected.push(match (j > i, kind) {
                    (false, _) => RowOutcome::Stale,
                    (true, RowKind::Write) => RowOutcome::Updated,
                    (true, RowKind::Delete) => RowOutcome::Written,
                });
                id += 1;
            }
        }
        let step = |sequence| ShardStep {
            shard: "s".into(),
            epoch: state.epoch,
            sequence,
            position: None,
            watermark_ms: 0,
        };
        let outcomes = write(&mut *session, &step(1), &first).await;
        assert!(outcomes.iter().all(|outcome| *outcome == RowOutcome::Written), "{kind:?}");
        assert_eq!(write(&mut *session, &step(2), &second).await, expected, "{kind:?}");
    }
}
