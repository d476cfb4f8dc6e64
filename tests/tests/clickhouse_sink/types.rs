//! Every type goes in and is read back as the engine shows it.

use adapters::sink::RowKind;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::rig::Rig;

/// Column type, JSON, and the engine's own text of it.
const VALUES: &[(&str, &str, &str)] = &[
    ("Int8", "-128", "-128"),
    ("UInt16", "65535", "65535"),
    ("Int64", "\"-9223372036854775808\"", "-9223372036854775808"),
    ("UInt64", "18446744073709551615", "18446744073709551615"),
    ("Int128", "-170141183460469231731687303715884105728", "-170141183460469231731687303715884105728"),
    (
        "UInt256",
        "115792089237316195423570985008687907853269984665640564039457584007913129639935",
        "115792089237316195423570985008687907853269984665640564039457584007913129639935",
    ),
    ("Int256", "-1e60", "-1000000000000000000000000000000000000000000000000000000000000"),
    ("Float32", "0.1", "0.1"),
    ("Float64", "0.30000000000000004", "0.30000000000000004"),
    ("Float64", "\"NaN\"", "nan"),
    ("Float64", "\"-Infinity\"", "-inf"),
    ("Decimal(9, 2)", "-1.5", "-1.5"),
    ("Decimal(38, 10)", "1234567890123456789012345678.0123456789", "1234567890123456789012345678.0123456789"),
    ("Decimal(76, 3)", "-0.001", "-0.001"),
    ("Bool", "true", "true"),
    ("String", "\"a\\\"\\u00e9\\ud83d\\ude00\"", "a\"é😀"),
    ("String", "{\"a\":  [1.50]}", "{\"a\":  [1.50]}"),
    ("LowCardinality(String)", "\"x\"", "x"),
    ("FixedString(3)", "\"abc\"", "abc"),
    ("UUID", "\"00112233-4455-6677-8899-aabbccddeeff\"", "00112233-4455-6677-8899-aabbccddeeff"),
    ("Date", "\"2149-06-06\"", "2149-06-06"),
    ("Date32", "\"1900-01-01\"", "1900-01-01"),
    ("Date32", "\"2299-12-31\"", "2299-12-31"),
    ("DateTime('UTC')", "\"2106-02-07T06:28:15Z\"", "2106-02-07 06:28:15"),
    ("DateTime('Asia/Tokyo')", "\"2024-01-01T00:00:00+01:00\"", "2024-01-01 08:00:00"),
    ("DateTime64(3, 'UTC')", "\"1969-12-31T23:59:59.5Z\"", "1969-12-31 23:59:59.500"),
    ("DateTime64(9, 'UTC')", "\"2024-02-29T12:00:00.123456789Z\"", "2024-02-29 12:00:00.123456789"),
    ("DateTime64(6, 'UTC')", "\"1900-01-01T00:00:00Z\"", "1900-01-01 00:00:00.000000"),
    ("DateTime64(0, 'UTC')", "\"2299-12-31T23:59:59Z\"", "2299-12-31 23:59:59"),
    ("Enum8('a' = 1, 'it\\'s' = -2)", "\"it's\"", "it's"),
    ("Enum16('b' = 1000)", "\"b\"", "b"),
    ("IPv4", "\"192.168.0.1\"", "192.168.0.1"),
    ("IPv6", "\"2001:db8::1\"", "2001:db8::1"),
    ("Nullable(Int32)", "null", "\\N"),
    ("Nullable(Int32)", "7", "7"),
    ("Array(Nullable(UInt8))", "[1, null, 3]", "[1,NULL,3]"),
    ("Array(Array(String))", "[[\"a\"], []]", "[['a'],[]]"),
    ("Map(String, Int64)", "{\"a\":1,\"b\":-2}", "{'a':1,'b':-2}"),
    ("Map(UInt64, Array(Decimal(9, 1)))", "{\"18446744073709551615\":[1.5]}", "{18446744073709551615:[1.5]}"),
    ("Tuple(Int8, String)", "[1, \"a\"]", "(1,'a')"),
    ("Tuple(a Int8, b Tuple(c Nullable(String)))", "{\"b\":{\"c\":null},\"a\":1}", "(1,(NULL))"),
];

#[tokio::test]
async fn every_type_is_read_back_as_it_was_sent() {
    let columns: Vec<String> =
        VALUES.iter().enumerate().map(|(at, (kind, ..))| format!("c{at} {kind}")).collect();
    let mut rig = Rig::new(
        &format!(
            "({}) ENGINE = MergeTree ORDER BY tuple() SETTINGS non_replicated_deduplication_window = 1000",
            columns.join(", ")
        ),
        |_| {},
    )
    .await;
    let names: Vec<String> = (0..VALUES.len()).map(|at| format!("c{at}")).collect();
    let fields: Vec<(&str, &str)> =
        names.iter().zip(VALUES).map(|(name, (_, json, _))| (name.as_str(), *json)).collect();
    rig.deliver(&[&fields]).await.unwrap();
    for (name, (kind, json, text)) in names.iter().zip(VALUES) {
        assert_eq!(rig.lines(name).await, [*text], "{kind} {json}");
    }
}

#[tokio::test]
async fn defaults_apply_and_what_is_needed_is_asked_for() {
    let mut rig = Rig::new(
        "(id UInt64, note String DEFAULT 'none', twice UInt64 MATERIALIZED id * 2, maybe Nullable(String)) \
         ENGINE = MergeTree ORDER BY id SETTINGS non_replicated_deduplication_window = 1000",
        |_| {},
    )
    .await;
    let names: Vec<&str> = rig.encoder.columns().iter().map(|column| column.name.as_str()).collect();
    assert_eq!(names, ["id", "note", "maybe"]);
    rig.deliver(&[&[("id", "1")], &[("id", "2"), ("note", "\"x\""), ("maybe", "\"y\"")]]).await.unwrap();
    assert_eq!(rig.lines("id, note, twice, maybe").await, ["1\tnone\t2\t\\N", "2\tx\t4\ty"]);
    let missing = rig.encode(RowKind::Write, &[("note", "\"x\"")]).unwrap_err();
    assert!(missing.column == "id" && missing.reason.contains("is needed"), "{missing}");
    let null = rig.encode(RowKind::Write, &[("id", "1"), ("note", "null")]).unwrap_err();
    assert!(null.column == "note" && null.reason.contains("cannot be null"), "{null}");
    let far = rig.encode(RowKind::Write, &[("id", "18446744073709551616")]).unwrap_err();
    assert_eq!(far.to_string(), "column \"id\" (UInt64): above the largest value of UInt64");
    let delete = rig.encode(RowKind::Delete, &[("id", "1")]).unwrap_err();
    assert!(delete.reason.contains("no place for a delete"), "{delete}");
}

/// Random values of the wide and the nested types: what goes in comes out.
#[tokio::test]
async fn random_values_come_back() {
    let mut rig = Rig::new(
        "(n UInt32, i Int256, d Decimal(76, 20), f Float64, t DateTime64(9, 'UTC'), s String, m Map(String, Array(Nullable(Int128)))) \
         ENGINE = MergeTree ORDER BY n SETTINGS non_replicated_deduplication_window = 1000",
        |_| {},
    )
    .await;
    let mut random = StdRng::seed_from_u64(5);
    let mut sent = Vec::new();
    for n in 0..2000 {
        let digits = |random: &mut StdRng, most: usize| -> String {
            let count = random.random_range(1..=most);
            let text: String = (0..count).map(|_| random.random_range('0'..='9')).collect();
            let text = text.trim_start_matches('0').to_owned();
            if text.is_empty() { "0".to_owned() } else { text }
        };
        let signed = |random: &mut StdRng, text: String| {
            if text != "0" && random.random_bool(0.5) { format!("-{text}") } else { text }
        };
        let whole = digits(&mut random, 76);
        let i = signed(&mut random, whole);
        let (before, after) = (digits(&mut random, 56), random.random_range(0..10u64.pow(18)));
        let d = signed(&mut random, format!("{before}.{after:018}7"));
        let f = loop {
            let f = f64::from_bits(random.random());
            if f.is_finite() {
                break f;
            }
        };
        let nanos: i64 = random.random_range(-2_208_988_800_000_000_000..9_000_000_000_000_000_000);
        let t = jiff::Timestamp::from_nanosecond(nanos.into()).unwrap();
        let t = format!("{}.{:09}Z", t.strftime("%Y-%m-%dT%H:%M:%S"), nanos.rem_euclid(1_000_000_000));
        let s: String = (0..random.random_range(0..20)).map(|_| random.random::<char>()).collect();
        let m: Vec<String> = (0..random.random_range(0..4))
            .map(|key| format!("\"k{key}\":[null,{}]", random.random::<i128>()))
            .collect();
        let m = format!("{{{}}}", m.join(","));
        let f = format!("{f:e}");
        let s = serde_json::to_string(&s).unwrap();
        sent.push([n.to_string(), i, d, f, format!("\"{t}\""), s, m]);
    }
    let names = ["n", "i", "d", "f", "t", "s", "m"];
    let rows: Vec<Vec<(&str, &str)>> =
        sent.iter().map(|row| names.iter().copied().zip(row.iter().map(String::as_str)).collect()).collect();
    let fields: Vec<&[(&str, &str)]> = rows.iter().map(Vec::as_slice).collect();
    rig.deliver(&fields).await.unwrap();
    let read = rig
        .server
        .lines(&format!(
            "SELECT toString(n), toString(i), toString(d), reinterpretAsUInt64(f), toString(toUnixTimestamp64Nano(t)), hex(s), \
             arrayMap(x -> toString(x[2]), mapValues(m)), mapKeys(m) FROM {} ORDER BY n FORMAT JSONCompactEachRow",
            rig.table
        ))
        .await;
    assert_eq!(read.len(), sent.len());
    for (row, line) in sent.iter().zip(read) {
        let read: Vec<serde_json::Value> = serde_json::from_str(&line).unwrap();
        let text = |at: usize| read[at].as_str().unwrap_or_default().to_owned();
        assert_eq!((text(0), text(1)), (row[0].clone(), row[1].clone()));
        assert_eq!(text(2), row[2], "decimal");
        let bits: u64 =
            read[3].as_str().map_or_else(|| read[3].as_u64().unwrap(), |text| text.parse().unwrap());
        assert_eq!(bits, row[3].parse::<f64>().unwrap().to_bits(), "double");
        let time: jiff::Timestamp = row[4].trim_matches('"').parse().unwrap();
        assert_eq!(text(4), time.as_nanosecond().to_string(), "time");
        let s: String = serde_json::from_str(&row[5]).unwrap();
        assert_eq!(text(5), s.bytes().map(|byte| format!("{byte:02X}")).collect::<String>());
        let m: std::collections::BTreeMap<String, Vec<Option<Box<serde_json::value::RawValue>>>> =
            serde_json::from_str(&row[6]).unwrap();
        let values: Vec<String> =
            m.values().map(|items| items[1].as_ref().unwrap().get().to_owned()).collect();
        assert_eq!(read[6], serde_json::json!(values), "map");
        assert_eq!(read[7], serde_json::json!(m.keys().collect::<Vec<_>>()));
    }
}
