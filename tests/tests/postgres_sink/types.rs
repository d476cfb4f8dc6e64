//! Every type goes in and is read back as the server shows it, by each of the three ways in.

use adapters::sink::Mode;

use crate::rig::{Rig, Rows};

const SCALARS: &str = r#"
CREATE TYPE mood AS ENUM ('sad', 'fair enough', 'glad');
CREATE DOMAIN cents AS numeric(12, 2) CHECK (VALUE >= 0);
CREATE TABLE t (
  id int PRIMARY KEY, s smallint, i integer, b bigint, r real, d double precision, n numeric, n2 numeric(10, 2), c cents,
  x text, v varchar(5), ch char(4), u uuid, ok boolean, raw bytea, day date, clock time, clock3 time(3), at timestamptz,
  plain timestamp, at0 timestamptz(0), j json, jb jsonb, m mood, ip inet)
"#;

/// Column, JSON, and the server's own text of it.
const VALUES: &[(&str, &str, &str)] = &[
    ("s", "-32768", "-32768"),
    ("i", "2147483647", "2147483647"),
    ("b", "-9223372036854775808", "-9223372036854775808"),
    ("b", "\"9007199254740993\"", "9007199254740993"),
    ("b", "1e18", "1000000000000000000"),
    ("r", "0.1", "0.1"),
    ("r", "3.4028235e38", "3.4028235e+38"),
    ("d", "0.30000000000000004", "0.30000000000000004"),
    ("d", "5e-324", "5e-324"),
    ("d", "\"NaN\"", "NaN"),
    ("d", "-0.0", "-0"),
    (
        "n",
        "123456789012345678901234567890.123456789012345678901234567890",
        "123456789012345678901234567890.123456789012345678901234567890",
    ),
    ("n", "-0.00001", "-0.00001"),
    ("n", "1.50", "1.50"),
    ("n", "12e-3", "0.012"),
    ("n", "1e30", "1000000000000000000000000000000"),
    ("n", "0", "0"),
    ("n", "10000", "10000"),
    ("n", "0.00010001", "0.00010001"),
    ("n", "\"NaN\"", "NaN"),
    ("n", "\"-Infinity\"", "-Infinity"),
    ("n2", "99999999.99", "99999999.99"),
    ("n2", "-1.5", "-1.50"),
    ("c", "12.30", "12.30"),
    ("x", r#""a\"\\\n\u00e9\ud83d\ude00""#, "a\"\\\né😀"),
    ("x", "\"\"", ""),
    ("v", "\"ééééé\"", "ééééé"),
    ("ch", "\"ab\"", "ab  "),
    ("u", "\"00112233-4455-6677-8899-AABBCCDDEEFF\"", "00112233-4455-6677-8899-aabbccddeeff"),
    ("ok", "true", "true"),
    ("raw", "\"AP8=\"", "\\x00ff"),
    ("raw", "\"\\\\x00ff10\"", "\\x00ff10"),
    ("day", "\"2024-02-29\"", "2024-02-29"),
    ("day", "\"-4713-11-24\"", "4714-11-24 BC"),
    ("day", "\"+5874897-12-31\"", "5874897-12-31"),
    ("day", "\"infinity\"", "infinity"),
    ("clock", "\"23:59:59.999999\"", "23:59:59.999999"),
    ("clock", "\"24:00:00\"", "24:00:00"),
    ("clock3", "\"01:02:03.456\"", "01:02:03.456"),
    ("at", "\"2024-02-29T23:59:59.123456+02:00\"", "2024-02-29 21:59:59.123456+00"),
    ("at", "\"1969-12-31T23:59:59.999999Z\"", "1969-12-31 23:59:59.999999+00"),
    ("at", "\"-infinity\"", "-infinity"),
    ("at", "\"+294246-12-31T23:59:59.999999Z\"", "294246-12-31 23:59:59.999999+00"),
    ("plain", "\"2024-01-01T00:00:00.000001\"", "2024-01-01 00:00:00.000001"),
    ("at0", "\"2024-01-01T00:00:00Z\"", "2024-01-01 00:00:00+00"),
    ("j", r#"{"b": 1.50, "a": [null]}"#, r#"{"b": 1.50, "a": [null]}"#),
    ("jb", r#"{"b":12345678901234567890.10,"a":"\u00e9"}"#, r#"{"a": "é", "b": 12345678901234567890.10}"#),
    ("m", "\"fair enough\"", "fair enough"),
    ("ip", "\"10.1.2.0/24\"", "10.1.2.0/24"),
    ("ip", "\"2001:db8::1\"", "2001:db8::1/128"),
    ("x", "null", ""),
];

async fn round_trip(rig: &mut Rig, values: &[(&str, &str, &str)]) {
    let records: Vec<String> = values
        .iter()
        .enumerate()
        .map(|(id, (column, json, _))| format!(r#"{{"id": {id}, "{column}": {json}}}"#))
        .collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    assert_eq!(rig.deliver(&records).await, "W".repeat(values.len()));
    rig.client.batch_execute("SET timezone = 'UTC'").await.unwrap();
    for (id, (column, json, expected)) in values.iter().enumerate() {
        let query = format!("SELECT coalesce({column}::text, '') FROM t WHERE id = $1");
        let query = if *column == "ch" { query.replace("ch::text", "rpad(ch::text, 4)") } else { query };
        let text: String = rig.client.query_one(&query, &[&(id as i32)]).await.unwrap().get(0);
        assert_eq!(text, *expected, "{column} {json}");
    }
    rig.client.batch_execute("TRUNCATE t").await.unwrap();
}

#[tokio::test]
async fn every_scalar_is_kept_exactly_by_each_way_in() {
    let mut rig = Rig::new(SCALARS, |config| config.row_key = vec!["id".into()]).await;
    round_trip(&mut rig, VALUES).await; // one statement
    rig.options.known_new = true;
    let repeated: Vec<_> = VALUES.iter().copied().cycle().take(VALUES.len() * 6).collect();
    round_trip(&mut rig, &repeated).await; // straight COPY
    let mut rig = Rig::new(SCALARS, |config| {
        config.row_key = vec!["id".into()];
        config.mode = Mode::Upsert;
    })
    .await;
    round_trip(&mut rig, VALUES).await; // staged
}

const ARRAYS: &str = r#"
CREATE TYPE mood AS ENUM ('sad', 'glad');
CREATE TABLE t (id int PRIMARY KEY, ints int[], texts text[], nums numeric(6, 2)[], times timestamptz[], js jsonb[], moods mood[],
  chars char(3)[], x text)
"#;

#[tokio::test]
async fn arrays_are_kept_exactly_straight_and_staged() {
    let values: &[(&str, &str, &str)] = &[
        ("ints", "[1, null, -3]", "{1,NULL,-3}"),
        ("ints", "[[1, 2], [3, 4]]", "{{1,2},{3,4}}"),
        ("ints", "[]", "{}"),
        ("ints", "null", ""),
        ("texts", r#"["a,b", "", "null", null, "\"q\""]"#, r#"{"a,b","","null",NULL,"\"q\""}"#),
        ("nums", "[1.5, 9999.99]", "{1.50,9999.99}"),
        ("times", "[\"2024-01-01T00:00:00Z\"]", "{\"2024-01-01 00:00:00+00\"}"),
        ("js", r#"[{"a":1}, [1, [2]], 3, null]"#, r#"{"{\"a\": 1}","[1, [2]]",3,NULL}"#),
        ("moods", "[\"glad\"]", "{glad}"),
        ("chars", "[\"a\"]", "{\"a  \"}"),
    ];
    for mode in [Mode::Insert, Mode::Upsert] {
        for known_new in [false, true] {
            let mut rig = Rig::new(ARRAYS, |config| {
                config.row_key = vec!["id".into()];
                config.mode = mode;
            })
            .await;
            rig.options.known_new = known_new;
            round_trip(&mut rig, values).await;
        }
    }
}

#[tokio::test]
async fn what_does_not_fit_is_refused_with_column_type_and_bound_but_not_the_value() {
    let rig = Rig::new(SCALARS, |config| config.row_key = vec!["id".into()]).await;
    for (column, json, reason) in [
        ("s", "32768", "above 32767"),
        ("i", "1.5", "fraction"),
        ("i", "true", "needs a number, got a boolean"),
        ("b", "9223372036854775808", "above 9223372036854775807"),
        ("r", "16777217", "more digits"),
        ("d", "9007199254740993", "more digits"),
        ("d", "1e999", "beyond"),
        ("n2", "1.005", "more than 2 digits behind the point"),
        ("n2", "100000000", "more than 8 digits before the point"),
        ("x", "12", "needs a string"),
        ("x", r#""a\u0000""#, "NUL"),
        ("x", r#""\ud800""#, "lone surrogate"),
        ("v", "\"123456\"", "more than 5 characters"),
        ("u", "\"123\"", "UUID"),
        ("ok", "1", "true or false"),
        ("raw", "\"?\"", "base64"),
        ("day", "\"2023-02-29\"", "no such day"),
        ("clock", "\"12:00:00.0000001\"", "finer than a microsecond"),
        ("clock3", "\"12:00:00.0001\"", "more than 3 digits"),
        ("at", "\"2024-01-01T00:00:00\"", "needs an offset"),
        ("at0", "\"2024-01-01T00:00:00.5Z\"", "more than 0 digits"),
        ("plain", "\"2024-01-01T00:00:00+01:00\"", "offset"),
        ("jb", r#"{"a":"\u0000"}"#, "u0000"),
        ("j", r#"{"a":"\ud800"}"#, "lone surrogate"),
        ("m", "\"furious\"", "none of the enum's labels: sad, fair enough, glad"),
        ("ip", "\"10.0.0.300\"", "IP address"),
        ("id", "null", "row key"),
    ] {
        let record = if column == "id" {
            format!(r#"{{"id": {json}}}"#)
        } else {
            format!(r#"{{"id": 1, "{column}": {json}}}"#)
        };
        let error =
            Rows::new(&*rig.encoder, &[&record]).err().unwrap_or_else(|| panic!("{column} {json} was taken"));
        assert_eq!(error.column, column);
        assert!(!error.column_type.is_empty());
        assert!(error.reason.contains(reason), "{column} {json}: {}", error.reason);
    }
}

#[tokio::test]
async fn a_member_left_out_means_the_default_and_never_null() {
    let ddl = "CREATE TABLE t (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, a int DEFAULT 7, b int NOT NULL DEFAULT 8, \
               c text, g int GENERATED ALWAYS AS (a * 2) STORED)";
    for known_new in [false, true] {
        let mut rig = Rig::new(ddl, |_| {}).await;
        rig.options.known_new = known_new;
        let records = [
            r#"{"c": "all"}"#,
            r#"{"a": null, "c": "null"}"#,
            r#"{"a": 1, "b": 2}"#,
            r#"{"id": 50, "b": 3}"#,
        ];
        assert_eq!(rig.deliver(&records).await, "WWWW");
        let rows = rig.client.query("SELECT a, b, c, g FROM t", &[]).await.unwrap();
        let mut rows: Vec<(_, i32, Option<String>, Option<i32>)> =
            rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect();
        rows.sort();
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(
            rows,
            [
                (None, 8, text("null"), None),
                (Some(1), 2, None, Some(2)),
                (Some(7), 3, None, Some(14)),
                (Some(7), 8, text("all"), Some(14))
            ]
        );
        assert!(Rows::new(&*rig.encoder, &[r#"{"b": null}"#]).is_err());
    }
}

#[tokio::test]
async fn an_upsert_leaves_alone_what_the_record_leaves_to_its_default() {
    let mut rig =
        Rig::new("CREATE TABLE t (id int PRIMARY KEY, a int DEFAULT 7, b int DEFAULT 8)", |config| {
            config.row_key = vec!["id".into()];
            config.mode = Mode::Upsert;
        })
        .await;
    assert_eq!(rig.deliver(&[r#"{"id": 1, "a": 5}"#, r#"{"id": 1, "b": 6}"#, r#"{"id": 2}"#]).await, "WUW");
    assert_eq!(rig.table().await, [r#"{"a": 5, "b": 6, "id": 1}"#, r#"{"a": 7, "b": 8, "id": 2}"#]);
    assert_eq!(rig.deliver(&[r#"{"id": 1}"#]).await, "U");
    assert_eq!(rig.table().await[0], r#"{"a": 5, "b": 6, "id": 1}"#);
}
