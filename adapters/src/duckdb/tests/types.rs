//! Every type against the real engine: what went in comes out.

use proptest::prelude::*;
use tokio::runtime::Runtime;

use super::*;

/// One value in a column of `declared`, and what DuckDB reads there as text.
fn kept(runtime: &Runtime, declared: &str, values: &[Value<'_>]) -> Vec<Result<Option<String>, String>> {
    runtime.block_on(async {
        let mut bed = Bed::new(
            &format!("CREATE TYPE mood AS ENUM ('sad', 'it''s'); CREATE TABLE t (n INTEGER, v {declared})"),
            |_| {},
        )
        .await;
        let mut rows = Vec::new();
        let mut found: Vec<Result<Option<String>, String>> = Vec::new();
        for (n, value) in values.iter().enumerate() {
            let (mut row, mut key) = (Vec::new(), Vec::new());
            let given = [Value::Integer(n as i64), *value];
            match bed.encoder.encode(RowKind::Write, &given, &mut row, &mut key) {
                Ok(()) => rows.push(row),
                Err(bad) => assert!(row.is_empty() && key.is_empty() && !bad.reason.is_empty()),
            }
            found.push(
                bed.encoder
                    .encode(RowKind::Write, &given, &mut Vec::new(), &mut Vec::new())
                    .map(|()| None)
                    .map_err(|bad| bad.reason),
            );
        }
        let outcomes = bed
            .deliver_encoded(
                &rows.iter().map(|row| (RowKind::Write, row.clone(), Vec::new())).collect::<Vec<_>>(),
            )
            .await
            .unwrap()
            .rows;
        assert!(outcomes.iter().all(|outcome| *outcome == Written), "{declared}: {outcomes:?}");
        let connection = FileConnection::open(&bed.config.path).unwrap();
        let mut query = connection
            .prepare("SELECT n, CASE WHEN typeof(v) = 'BLOB' THEN hex(v::BLOB) ELSE v::VARCHAR END FROM t")
            .unwrap();
        let read =
            query.query_map([], |row| Ok((row.get::<_, i32>(0)?, row.get::<_, Option<String>>(1)?))).unwrap();
        for row in read {
            let (n, text) = row.unwrap();
            found[n as usize] = Ok(text);
        }
        found
    })
}

#[track_caller]
fn holds(declared: &str, cases: &[(&str, &str)], refused: &[&str]) {
    let runtime = Runtime::new().unwrap();
    let values: Vec<Value<'_>> =
        cases.iter().map(|(json, _)| *json).chain(refused.iter().copied()).map(Value::Json).collect();
    let found = kept(&runtime, declared, &values);
    for ((json, text), found) in cases.iter().zip(&found) {
        assert_eq!(found.as_ref().map(|text| text.as_deref()), Ok(Some(*text)), "{declared}: {json}");
    }
    for (json, found) in refused.iter().zip(&found[cases.len()..]) {
        assert!(found.is_err(), "{declared}: {json}: {found:?}");
    }
}

#[test]
fn the_edges_of_every_type_are_kept_or_refused() {
    holds("BOOLEAN", &[("true", "true"), ("false", "false")], &["1", "\"yes\"", "{}"]);
    holds("TINYINT", &[("-128", "-128"), ("127.0", "127")], &["128", "-129", "0.5", "true"]);
    holds("UTINYINT", &[("0", "0"), ("-0", "0"), ("\"255\"", "255")], &["256", "-1"]);
    holds("SMALLINT", &[("-32768", "-32768"), ("32767", "32767")], &["32768"]);
    holds("USMALLINT", &[("65535", "65535")], &["65536"]);
    holds("INTEGER", &[("-2147483648", "-2147483648")], &["2147483648"]);
    holds("UINTEGER", &[("4294967295", "4294967295")], &["4294967296", "-1"]);
    holds(
        "BIGINT",
        &[("-9223372036854775808", "-9223372036854775808"), ("9007199254740993", "9007199254740993")],
        &["9223372036854775808"],
    );
    holds("UBIGINT", &[("18446744073709551615", "18446744073709551615")], &["18446744073709551616", "1e99"]);
    holds(
        "HUGEINT",
        &[
            ("-170141183460469231731687303715884105728", "-170141183460469231731687303715884105728"),
            ("170141183460469231731687303715884105727", "170141183460469231731687303715884105727"),
        ],
        &["170141183460469231731687303715884105728", "-170141183460469231731687303715884105729"],
    );
    holds(
        "UHUGEINT",
        &[("340282366920938463463374607431768211455", "340282366920938463463374607431768211455"), ("0", "0")],
        &["340282366920938463463374607431768211456", "-1"],
    );
    holds("DECIMAL(4,1)", &[("-999.9", "-999.9"), ("1e2", "100.0")], &["1000", "0.05"]);
    holds("DECIMAL(18,3)", &[("999999999999999.999", "999999999999999.999")], &["1000000000000000"]);
    holds(
        "DECIMAL(38,10)",
        &[("-9999999999999999999999999999.9999999999", "-9999999999999999999999999999.9999999999")],
        &["1e28"],
    );
    holds("DECIMAL(38,38)", &[("0.1", ".10000000000000000000000000000000000000")], &["1"]);
    holds(
        "DOUBLE",
        &[("0.1", "0.1"), ("\"NaN\"", "nan"), ("\"-Infinity\"", "-inf"), ("-0.0", "-0.0")],
        &["1e999", "9007199254740993"],
    );
    holds("FLOAT", &[("0.5", "0.5"), ("16777216", "16777216.0")], &["16777217", "1e39"]);
    holds("VARCHAR", &[("\"\\u00e9\\u0000x\"", "\u{e9}\0x"), ("\"\"", "")], &["\"\\ud800\"", "5"]);
    holds("JSON", &[("{\"a\": 1.50}", "{\"a\": 1.50}"), ("\"x\"", "\"x\""), ("1e400", "1e400")], &[]);
    holds("BLOB", &[("\"AP8=\"", "00FF"), ("\"\\\\xdead\"", "DEAD")], &["\"\\\\xd\"", "7"]);
    holds(
        "DATE",
        &[("\"2024-02-29\"", "2024-02-29"), ("\"+5881580-07-10\"", "5881580-07-10")],
        &["\"2023-02-29\"", "\"+5881580-07-11\"", "\"+5881581-01-01\""],
    );
    holds(
        "TIME",
        &[("\"24:00:00\"", "24:00:00"), ("\"01:02:03.000004\"", "01:02:03.000004")],
        &["\"01:02:03.0000004\""],
    );
    holds(
        "TIMESTAMP",
        &[("\"2024-01-02T03:04:05.000006\"", "2024-01-02 03:04:05.000006")],
        &["\"2024-01-02T03:04:05.0000006\"", "\"2024-01-02T03:04:05+01:00\""],
    );
    holds(
        "TIMESTAMP_S",
        &[("\"2024-01-02T03:04:05Z\"", "2024-01-02 03:04:05")],
        &["\"2024-01-02T03:04:05.5\""],
    );
    holds(
        "TIMESTAMP_MS",
        &[("\"1969-12-31T23:59:59.999\"", "1969-12-31 23:59:59.999")],
        &["\"2024-01-02T03:04:05.0005\""],
    );
    holds(
        "TIMESTAMP_NS",
        &[
            ("\"2262-04-11T23:47:16.854775806\"", "2262-04-11 23:47:16.854775806"),
            ("\"1677-09-22T00:00:00\"", "1677-09-22 00:00:00"),
        ],
        &[
            "\"2262-04-11T23:47:16.854775807\"",
            "\"2262-04-12T00:00:00\"",
            "\"2024-01-02T03:04:05.0000000001\"",
        ],
    );
    holds(
        "INTERVAL",
        &[("\"P1Y2M10DT2H30M0.5S\"", "1 year 2 months 10 days 02:30:00.5"), ("\"-P1D\"", "-1 day")],
        &["\"1 day\"", "\"PT0.0000001S\"", "5"],
    );
    holds(
        "UUID",
        &[
            ("\"00000000-0000-0000-0000-000000000001\"", "00000000-0000-0000-0000-000000000001"),
            ("\"FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF\"", "ffffffff-ffff-ffff-ffff-ffffffffffff"),
        ],
        &["\"x\""],
    );
    holds("mood", &[("\"sad\"", "sad"), ("\"it's\"", "it's")], &["\"ok\"", "\"\"", "0"]);
}

#[test]
fn a_time_with_an_offset_is_its_instant() {
    let runtime = Runtime::new().unwrap();
    let given = [
        Value::Json("\"2024-01-02T03:04:05.000006+01:00\""),
        Value::Micros(1),
        Value::Json("\"2024-01-02T03:04:05\""),
    ];
    let found = runtime.block_on(async {
        let mut bed = Bed::new("CREATE TABLE t (v TIMESTAMPTZ)", |_| {}).await;
        let encode = |value: Value<'_>| {
            let mut row = Vec::new();
            bed.encoder
                .encode(RowKind::Write, &[value], &mut row, &mut Vec::new())
                .map(|()| (RowKind::Write, row, Vec::new()))
        };
        let rows: Vec<_> = given[..2].iter().map(|value| encode(*value).unwrap()).collect();
        assert!(encode(given[2]).unwrap_err().reason.contains("offset"));
        bed.deliver_encoded(&rows).await.unwrap();
        bed.sql::<String>("SELECT string_agg(epoch_us(v)::VARCHAR, ',') FROM t")
    });
    assert_eq!(found, "1704161045000006,1");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]
    /// A batch of all types: making a file costs more than its rows.
    #[test]
    fn what_went_in_comes_out(
        rows in proptest::collection::vec(
            (any::<i128>(), any::<f64>(), ".{0,40}", proptest::collection::vec(any::<u8>(), 0..30),
             -200_000_000_000_000_000i64..200_000_000_000_000_000, any::<u128>()),
            100,
        ),
    ) {
        let runtime = Runtime::new().unwrap();
        let given: Vec<[String; 6]> = rows.iter().map(|(number, double, text, _, _, id)| {
            let double = match double {
                double if double.is_nan() => "NaN".to_owned(),
                double if double.is_infinite() => "Infinity".to_owned(),
                double => format!("{double:e}"),
            };
            let hex = format!("{id:032x}");
            let id = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
            let decimal = format!("{}.{:03}", number % 10i128.pow(30), number.unsigned_abs() % 1000);
            [number.to_string(), number.cast_unsigned().to_string(), decimal, double, text.clone(), id]
        }).collect();
        let found = runtime.block_on(async {
            let ddl = "CREATE TABLE t (n INTEGER, h HUGEINT, u UHUGEINT, d DECIMAL(33, 3), f DOUBLE, s VARCHAR, i UUID, b BLOB, m TIMESTAMP)";
            let mut bed = Bed::new(ddl, |_| {}).await;
            let encoded: Vec<_> = rows.iter().zip(&given).enumerate().map(|(n, ((_, _, _, blob, micros, _), texts))| {
                let mut values = vec![Value::Integer(n as i64)];
                values.extend(texts.iter().map(|text| Value::Text(text)));
                values.extend([Value::Bytes(blob), Value::Micros(*micros)]);
                let mut row = Vec::new();
                bed.encoder.encode(RowKind::Write, &values, &mut row, &mut Vec::new()).unwrap();
                (RowKind::Write, row, Vec::new())
            }).collect();
            bed.deliver_encoded(&encoded).await.unwrap();
            let connection = FileConnection::open(&bed.config.path).unwrap();
            let mut query = connection.prepare("SELECT h::VARCHAR, u::VARCHAR, d::VARCHAR, f, s, i::VARCHAR, b, epoch_us(m) FROM t ORDER BY n").unwrap();
            query.query_map([], |row| Ok((
                [row.get(0)?, row.get(1)?, row.get(2)?, row.get(4)?, row.get(5)?],
                row.get::<_, f64>(3)?, row.get::<_, Vec<u8>>(6)?, row.get::<_, i64>(7)?,
            ))).unwrap().collect::<Result<Vec<([String; 5], _, _, _)>, _>>().unwrap()
        });
        prop_assert_eq!(found.len(), rows.len());
        for (((_, double, _, blob, micros, _), given), (texts, back, bytes, time)) in rows.iter().zip(&given).zip(found) {
            let [huge, uhuge, decimal, _, text, id] = given.clone();
            prop_assert_eq!(texts, [huge, uhuge, decimal, text, id]);
            prop_assert!(back.to_bits() == double.to_bits() || back.is_nan() && double.is_nan() || back.is_infinite() && double.is_infinite());
            prop_assert_eq!((&bytes, time), (blob, *micros));
        }
    }

    /// Canonical forms sort as DuckDB sorts.
    #[test]
    fn row_keys_and_versions_sort_as_duckdb_does(
        doubles in proptest::collection::vec(prop_oneof![any::<f64>(), Just(0.0), Just(-0.0), Just(f64::NAN)], 30),
        texts in proptest::collection::vec("[\0-\u{3}a-c\u{e9}]{0,4}", 30),
        numbers in proptest::collection::vec(any::<i64>(), 30),
    ) {
        let runtime = Runtime::new().unwrap();
        let doubles: Vec<String> = doubles.iter().map(|double| if double.is_nan() { "NaN".to_owned() } else if *double == f64::INFINITY { "Infinity".to_owned() } else if *double == f64::NEG_INFINITY { "-Infinity".to_owned() } else { format!("{double:e}") }).collect();
        let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
        for (declared, given) in [("DOUBLE", doubles), ("VARCHAR", texts), ("HUGEINT", numbers.clone()), ("BIGINT", numbers)] {
            runtime.block_on(async {
                let mut bed = Bed::new(&format!("CREATE TABLE t (k BLOB, v {declared})"), |_| {}).await;
                let kind = super::super::types::Kind::of(declared).unwrap();
                let mut rows = Vec::new();
                for text in &given {
                    let (mut plain, mut ordered) = (Vec::new(), Vec::new());
                    values::put(&kind, Value::Text(text), &mut plain).unwrap();
                    values::put_ordered(&kind, values::take(&kind, &plain).0, &mut ordered);
                    let mut row = Vec::new();
                    bed.encoder.encode(RowKind::Write, &[Value::Bytes(&ordered), Value::Text(text)], &mut row, &mut Vec::new()).unwrap();
                    rows.push((RowKind::Write, row, Vec::new()));
                }
                bed.deliver_encoded(&rows).await.unwrap();
                let differ = "SELECT count(*) FROM t AS a, t AS b WHERE (a.k < b.k) <> (a.v < b.v) OR (a.k = b.k) <> (a.v = b.v)";
                assert_eq!(bed.sql::<i64>(differ), 0, "{declared}: {given:?}");
            });
        }
    }
}
