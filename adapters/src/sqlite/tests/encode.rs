//! Values of every declared type, from JSON text to what SQLite then holds.

use proptest::prelude::*;
use rusqlite::Connection;

use super::super::*;
use crate::{sink::RowKind, value::Value};

/// An encoder for `CREATE TABLE t (<columns>)`, and the file.
fn encoder(
    columns: &str,
    change: impl FnOnce(&mut SqliteConfig),
) -> (encode::Encoder, Connection, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = SqliteConfig::new(folder.path().join("rows.db"), "t");
    config.create = Some(format!("CREATE TABLE t {columns}"));
    change(&mut config);
    let layout = probe::probe(&config).unwrap();
    (encode::Encoder::new(Arc::new(layout)), Connection::open(&config.path).unwrap(), folder)
}

fn encoded(
    encoder: &encode::Encoder,
    values: &[Value<'_>],
) -> Result<(Vec<u8>, Vec<u8>), crate::value::BadValue> {
    let (mut row, mut key) = (Vec::new(), Vec::new());
    encoder.encode(RowKind::Write, values, &mut row, &mut key)?;
    Ok((row, key))
}

/// What a column of type `declared` holds afterwards, as `type:literal`, or the reason of the refusal.
fn kept(declared: &str, strict: &str, value: Value<'_>) -> String {
    let (encoder, connection, _folder) = encoder(&format!("(c {declared}) {strict}"), |_| {});
    let (row, _) = match encoded(&encoder, &[value]) {
        Ok(done) => done,
        Err(bad) => {
            assert_eq!(bad.column, "c");
            return format!("refused: {}", bad.reason);
        }
    };
    let value = encode::take(&row[1..]).0;
    connection.execute("INSERT INTO t VALUES (?1)", [rusqlite::types::ToSqlOutput::Borrowed(value)]).unwrap();
    connection.query_row("SELECT typeof(c) || ':' || quote(c) FROM t", [], |row| row.get(0)).unwrap()
}

#[test]
fn every_declared_type_keeps_its_values_or_refuses_them() {
    let taken = [
        ("INTEGER", "9223372036854775807", "integer:9223372036854775807"),
        ("INTEGER", "-9223372036854775808", "integer:-9223372036854775808"),
        ("BIGINT", "9007199254740993", "integer:9007199254740993"),
        ("INT", "1.5e1", "integer:15"),
        ("SMALLINT", "\"12\"", "integer:12"),
        ("REAL", "0.1", "real:0.1"),
        ("DOUBLE PRECISION", "3", "real:3.0"),
        ("FLOAT", "\"Infinity\"", "real:9.0e+999"),
        ("TEXT", "\"a\\u00e9\\n\"", "text:'a\u{e9}\n'"),
        ("VARCHAR(3)", "\"longer\"", "text:'longer'"),
        ("TEXT", "\"1.0\"", "text:'1.0'"),
        ("BLOB", "\"\\\\x00ff\"", "blob:X'00FF'"),
        ("BLOB", "\"AP8=\"", "blob:X'00FF'"),
        ("NUMERIC", "12.0", "integer:12"),
        ("DECIMAL(10, 2)", "12.30", "real:12.3"),
        ("NUMERIC", "9223372036854775807", "integer:9223372036854775807"),
        ("BOOLEAN", "true", "integer:1"),
        ("BOOL", "false", "integer:0"),
        ("JSON", "{\"a\": 1.50, \"b\": [null]}", "text:'{\"a\": 1.50, \"b\": [null]}'"),
        ("JSON", "\"a\\u0000b\"", "text:'\"a\\u0000b\"'"),
        ("JSON", "17", "integer:17"),
        ("JSON TEXT", "1.50", "text:'1.50'"),
        ("DATE", "\"2024-02-29\"", "text:'2024-02-29'"),
        ("TIME", "\"23:59:59.123456789\"", "text:'23:59:59.123456789'"),
        (
            "TIMESTAMP",
            "\"2024-02-29T00:00:00.123456789+02:00\"",
            "text:'2024-02-29T00:00:00.123456789+02:00'",
        ),
        ("DATETIME", "\"2024-02-29 00:00:00\"", "text:'2024-02-29 00:00:00'"),
        ("UUID", "\"00112233445566778899AABBCCDDEEFF\"", "text:'00112233-4455-6677-8899-aabbccddeeff'"),
        ("", "\"5\"", "text:'5'"),
        ("", "5", "integer:5"),
        ("", "5.0", "real:5.0"),
        ("INTEGER", "null", "null:NULL"),
    ];
    for (declared, json, expected) in taken {
        assert_eq!(kept(declared, "", Value::Json(json)), expected, "{declared} {json}");
    }
    let strict = [("INT", "7", "integer:7"), ("ANY", "\"007\"", "text:'007'"), ("TEXT", "\"x\"", "text:'x'")];
    for (declared, json, expected) in strict {
        assert_eq!(kept(declared, "STRICT", Value::Json(json)), expected, "{declared} {json}");
    }
    let refused = [
        ("INTEGER", "9223372036854775808", "above 9223372036854775807"),
        ("INTEGER", "1.5", "fraction"),
        ("INTEGER", "true", "needs a number"),
        ("REAL", "9007199254740993", "digits"),
        ("REAL", "1e400", "largest"),
        ("REAL", "\"NaN\"", "NaN"),
        ("TEXT", "\"a\\u0000\"", "NUL"),
        ("TEXT", "\"\\ud800\"", "surrogate"),
        ("TEXT", "1", "needs a string"),
        ("TEXT", "{\"a\": 1}", "needs a string"),
        ("BLOB", "\"!\"", "base64"),
        ("DECIMAL(30, 20)", "0.12345678901234567890", "digits"),
        ("NUMERIC", "9223372036854775809", "digits"),
        ("BOOLEAN", "1", "true or false"),
        ("JSON", "0.12345678901234567890", "digits"),
        ("DATE", "\"2023-02-29\"", "no such day"),
        ("DATE", "20240101", "needs a string"),
        ("TIME", "\"25:00:00\"", "24 hours"),
        ("TIMESTAMP", "\"2024-01-01\"", "RFC 3339"),
        ("UUID", "\"no\"", "UUID"),
        ("", "true", "a boolean"),
        ("", "[1]", "an array"),
    ];
    for (declared, json, part) in refused {
        let found = kept(declared, "", Value::Json(json));
        assert!(found.starts_with("refused: ") && found.contains(part), "{declared} {json}: {found}");
    }
}

#[test]
fn values_from_outside_json() {
    let cases = [
        ("INTEGER", Value::Integer(-5), "integer:-5"),
        ("TEXT", Value::Integer(-5), "text:'-5'"),
        ("REAL", Value::Integer(1 << 53), "real:9.007199254740992e+15"),
        ("REAL", Value::Integer((1 << 53) + 1), "refused: "),
        ("BLOB", Value::Bytes(b"\0\xff"), "blob:X'00FF'"),
        ("TEXT", Value::Bytes("é".as_bytes()), "text:'é'"),
        ("TEXT", Value::Bytes(b"\xff"), "refused: is not UTF-8"),
        ("INTEGER", Value::Text("12"), "integer:12"),
        ("BOOLEAN", Value::Text("true"), "integer:1"),
        ("DATE", Value::Text("2024-01-01"), "text:'2024-01-01'"),
        ("TIMESTAMP", Value::Micros(-1), "text:'1969-12-31T23:59:59.999999Z'"),
        ("TEXT", Value::Micros(1_700_000_000_000_000), "text:'2023-11-14T22:13:20.000000Z'"),
        ("INTEGER", Value::Micros(5), "refused: cannot take a time"),
        ("JSON", Value::Text("{}"), "refused: needs a JSON value"),
        ("BLOB", Value::Integer(5), "refused: cannot take an integer"),
    ];
    for (declared, value, expected) in cases {
        let found = kept(declared, "", value);
        assert!(
            found == expected || expected.starts_with("refused") && found.starts_with(expected),
            "{declared} {value:?}: {found}"
        );
    }
}

#[test]
fn missing_and_null() {
    let columns = "(id INTEGER PRIMARY KEY, n TEXT NOT NULL, d TEXT NOT NULL DEFAULT 'd', o TEXT)";
    let (encoder, ..) = encoder(columns, |_| {});
    let good = [Value::Missing, Value::Json("\"x\""), Value::Missing, Value::Missing];
    let (row, _) = encoded(&encoder, &good).unwrap();
    assert_eq!(row[0], 0b1010, "the row id and the default are left out, the other is null");
    for (index, value, part) in [
        (1, Value::Missing, "is needed"),
        (1, Value::Json("null"), "cannot be null"),
        (2, Value::Json("null"), "cannot be null"),
        (0, Value::Json("null"), "cannot be null"),
    ] {
        let mut values = good;
        values[index] = value;
        let bad = encoded(&encoder, &values).unwrap_err();
        assert!(bad.reason.contains(part) && bad.column == encoder.columns()[index].name, "{bad}");
    }
}

#[test]
fn equal_row_keys_have_equal_bytes() {
    let key = |declared: &str, json: &str| {
        let ddl = format!("(k {declared} NOT NULL, UNIQUE (k))");
        let (encoder, ..) = encoder(&ddl, |config| config.row_key = vec!["k".to_owned()]);
        encoded(&encoder, &[Value::Json(json)]).unwrap().1
    };
    for (declared, one, other) in [
        ("NUMERIC", "1", "1.0"),
        ("NUMERIC", "0", "-0.0"),
        ("REAL", "5", "5.0"),
        ("", "5", "5.0"),
        ("TEXT COLLATE NOCASE", "\"AbC\"", "\"aBc\""),
        ("TEXT COLLATE RTRIM", "\"a\"", "\"a  \""),
        ("UUID", "\"00112233445566778899AABBCCDDEEFF\"", "\"00112233-4455-6677-8899-aabbccddeeff\""),
    ] {
        assert_eq!(key(declared, one), key(declared, other), "{declared}");
    }
    for (declared, one, other) in [
        ("TEXT", "\"a\"", "\"A\""),
        ("TEXT", "\"a\"", "\"a \""),
        ("TEXT COLLATE NOCASE", "\"é\"", "\"É\""),
        ("", "5", "\"5\""),
        ("NUMERIC", "1", "1.5"),
    ] {
        assert_ne!(key(declared, one), key(declared, other), "{declared}");
    }
    let ddl = "(a TEXT NOT NULL, b TEXT NOT NULL, PRIMARY KEY (b, a)) WITHOUT ROWID";
    let (encoder, ..) = encoder(ddl, |config| config.row_key = vec!["a".to_owned(), "b".to_owned()]);
    let pair = |a: &str, b: &str| encoded(&encoder, &[Value::Text(a), Value::Text(b)]).unwrap().1;
    assert_ne!(pair("a", "bc"), pair("ab", "c"));
    assert!(pair("z", "a") < pair("a", "b"), "in the order of the index");
}

#[test]
fn versions_compare_as_sqlite_compares_them() {
    use rusqlite::types::ValueRef as V;
    let connection = Connection::open_in_memory().unwrap();
    let values = [
        V::Null,
        V::Integer(i64::MIN),
        V::Integer(-1),
        V::Integer(0),
        V::Integer((1 << 53) + 1),
        V::Integer(i64::MAX),
        V::Real(f64::NEG_INFINITY),
        V::Real(-0.5),
        V::Real(0.0),
        V::Real(9_007_199_254_740_992.0),
        V::Real(9.3e18),
        V::Text(b"a"),
        V::Text(b"ab"),
        V::Text("é".as_bytes()),
        V::Blob(b""),
        V::Blob(b"\0"),
    ];
    let bind = rusqlite::types::ToSqlOutput::Borrowed;
    // ORDER BY compares across types too, null first.
    let sql = "SELECT row_number() OVER (ORDER BY v), n FROM (SELECT ?1 AS v, 0 AS n UNION ALL SELECT ?2, 1) ORDER BY n";
    for a in values {
        for b in values {
            let equal: bool =
                connection.query_row("SELECT ?1 IS ?2", [bind(a), bind(b)], |row| row.get(0)).unwrap();
            let first: i64 = connection.query_row(sql, [bind(a), bind(b)], |row| row.get(0)).unwrap();
            let expected = match (equal, first) {
                (true, _) => std::cmp::Ordering::Equal,
                (false, 1) => std::cmp::Ordering::Less,
                _ => std::cmp::Ordering::Greater,
            };
            assert_eq!(encode::compare_versions(probe::Kind::Any, a, b), expected, "{a:?} {b:?}");
        }
    }
}

#[test]
fn instants_sort_as_time_does() {
    let texts = [
        "0001-01-01T00:00:00Z",
        "1969-12-31T23:59:59.9999999Z",
        "1970-01-01T00:00:00Z",
        "1970-01-01 00:00:00.0000001",
        "1970-01-01T00:00:00.000001Z",
        "2024-01-01T01:00:00+02:00",
        "2024-01-01T00:00:00Z",
        "9999-12-31T23:59:59Z",
    ];
    let sortable: Vec<String> = texts
        .iter()
        .map(|text| encode::instant(rusqlite::types::ValueRef::Text(text.as_bytes())).unwrap().unwrap())
        .collect();
    assert!(sortable.is_sorted_by(|a, b| a < b), "{sortable:?}");
    let same = |text: &str| encode::instant(rusqlite::types::ValueRef::Text(text.as_bytes())).unwrap();
    assert_eq!(same("2024-01-01T00:00:00Z"), same("2024-01-01 01:00:00.0000000+01:00"));
    assert!(encode::instant(rusqlite::types::ValueRef::Text(b"yesterday")).is_err());
    assert!(encode::instant(rusqlite::types::ValueRef::Integer(5)).is_err());
    assert_eq!(encode::instant(rusqlite::types::ValueRef::Null).unwrap(), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Whatever comes, an error or a row; never a panic, and never half a row.
    #[test]
    fn no_value_panics(json in "(\\PC{0,20}|-?[0-9]{1,25}(\\.[0-9]{1,25})?([eE][-+]?[0-9]{1,4})?|\"[^\"\\\\]{0,20}\")") {
        static ENCODER: std::sync::OnceLock<encode::Encoder> = std::sync::OnceLock::new();
        let columns = "(a INTEGER, b REAL, c TEXT, d BLOB, e NUMERIC, f BOOLEAN, g JSON, h DATE, i TIME, j TIMESTAMP, k UUID, l)";
        let encoder = ENCODER.get_or_init(|| encoder(columns, |_| {}).0);
        for index in 0..12 {
            for value in [Value::Json(&json), Value::Text(&json), Value::Bytes(json.as_bytes())] {
                let mut values = [Value::Missing; 12];
                values[index] = value;
                let (mut row, mut key) = (vec![1], vec![2]);
                if encoder.encode(RowKind::Write, &values, &mut row, &mut key).is_err() {
                    prop_assert_eq!((row, key), (vec![1], vec![2]));
                }
            }
        }
    }

    /// Row keys of numbers and text sort as SQLite's index does, and are equal where it calls them equal.
    #[test]
    fn row_keys_sort_as_the_index(
        integers in proptest::collection::vec(proptest::num::i64::ANY, 0..20),
        texts in proptest::collection::vec("[a-c ]{0,4}", 0..20),
    ) {
        let (encoder, connection, _folder) = encoder("(k NOT NULL, UNIQUE (k))", |config| config.row_key = vec!["k".to_owned()]);
        let insert = "INSERT INTO t VALUES (?1) ON CONFLICT DO NOTHING";
        let mut keys = std::collections::BTreeMap::new();
        for integer in integers {
            connection.execute(insert, [integer]).unwrap();
            keys.insert(encoded(&encoder, &[Value::Integer(integer)]).unwrap().1, integer.to_string());
        }
        for text in texts {
            connection.execute(insert, [&text]).unwrap();
            keys.insert(encoded(&encoder, &[Value::Text(&text)]).unwrap().1, text);
        }
        let mut query = connection.prepare("SELECT CAST(k AS TEXT) FROM t ORDER BY k").unwrap();
        let rows: Vec<String> = query.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(keys.into_values().collect::<Vec<_>>(), rows);
    }
}
