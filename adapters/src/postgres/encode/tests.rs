use proptest::prelude::*;

use super::*;
use crate::postgres::row::Encoded;

fn target(name: &str, kind: Kind, nullable: bool, has_default: bool) -> Target {
    let column = Column { name: name.into(), type_name: format!("{kind:?}"), nullable, has_default };
    Target { column, kind, array_oid: 0, element_oid: 0, base_type: String::new() }
}

fn orders() -> Encoder {
    let targets = vec![
        target("id", Kind::Int4, false, false),
        target("name", Kind::Text(Some(3)), true, false),
        target("ok", Kind::Bool, true, true),
        target("at", Kind::TimestampTz(6), false, false),
    ];
    Encoder::new(targets, vec![0], Some(3))
}

fn encode(encoder: &Encoder, kind: RowKind, values: &[Value<'_>]) -> Result<(Vec<u8>, Vec<u8>), BadValue> {
    let (mut row, mut key) = (b"before".to_vec(), b"k".to_vec());
    let done = encoder.encode(kind, values, &mut row, &mut key);
    if done.is_err() {
        assert_eq!(
            (row.as_slice(), key.as_slice()),
            (&b"before"[..], &b"k"[..]),
            "both buffers are as they were"
        );
    }
    done.map(|()| (row.split_off(6), key.split_off(1)))
}

#[test]
fn golden_rows() {
    let at = Value::Json("\"2000-01-01T00:00:00.000001Z\"");
    let (row, key) =
        encode(&orders(), RowKind::Write, &[Value::Json("-2"), Value::Json("\"ab\""), Value::Missing, at])
            .unwrap();
    let tuple = [
        &[0, 3][..],
        &[0, 0, 0, 4, 0xff, 0xff, 0xff, 0xfe],
        &[0, 0, 0, 2, b'a', b'b'],
        &[0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1],
    ]
    .concat();
    let version = [0x80, 0, 0, 0, 0, 0, 0, 1];
    let header = [&[2, 0, 0, 0, tuple.len() as u8][..], &[0, 0, 0, 0, 0, 0, 0, 1]].concat();
    assert_eq!(row, [&header[..], &tuple, &version].concat());
    assert_eq!(key, [0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe]);
    let read = Encoded::read(&row).unwrap();
    assert_eq!((read.shape, read.tuple, read.version), (1, &tuple[..], &version[..]));
    assert_eq!(read.fields().count(), 3);

    let (row, key_of_delete) =
        encode(&orders(), RowKind::Delete, &[Value::Json("-2"), Value::Missing, Value::Missing, at]).unwrap();
    let tuple =
        [&[0, 2][..], &[0, 0, 0, 4, 0xff, 0xff, 0xff, 0xfe], &[0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1]].concat();
    assert_eq!(row, [&[1, 0, 0, 0, tuple.len() as u8][..], &tuple, &version].concat());
    assert_eq!(key_of_delete, key);
}

#[test]
fn what_is_missing_or_null_is_decided_by_the_column() {
    let at = Value::Json("\"2000-01-01T00:00:00Z\"");
    let id = Value::Json("1");
    assert!(encode(&orders(), RowKind::Write, &[id, Value::Missing, Value::Json("null"), at]).is_ok());
    for (values, column) in [
        ([Value::Missing, Value::Missing, Value::Missing, at], "id"),
        ([id, Value::Json("\"abcd\""), Value::Missing, at], "name"),
        ([id, Value::Missing, Value::Missing, Value::Json("null")], "at"),
        ([id, Value::Missing, Value::Missing, Value::Missing], "at"),
    ] {
        assert_eq!(encode(&orders(), RowKind::Write, &values).unwrap_err().column, column);
    }
    assert!(encode(&orders(), RowKind::Write, &[id]).is_err());
}

#[test]
fn values_from_outside_json_fit_their_columns() {
    let micros = 946_684_800_000_001;
    let field = |kind: Kind, value: Value<'_>| {
        let mut out = Vec::new();
        append_value(&kind, &value, &mut out).map(|()| out)
    };
    assert_eq!(field(Kind::TimestampTz(6), Value::Micros(micros)), Ok(1i64.to_be_bytes().to_vec()));
    assert_eq!(field(Kind::Int8, Value::Micros(micros)), Ok(micros.to_be_bytes().to_vec()));
    assert_eq!(field(Kind::Text(None), Value::Micros(micros)), Ok(b"2000-01-01T00:00:00.000001Z".to_vec()));
    assert!(
        field(Kind::TimestampTz(3), Value::Micros(micros)).is_err()
            && field(Kind::Date, Value::Micros(0)).is_err()
    );
    assert_eq!(field(Kind::Int2, Value::Integer(-1)), Ok(vec![0xff, 0xff]));
    assert!(field(Kind::Int2, Value::Integer(40_000)).is_err());
    assert_eq!(field(Kind::Text(None), Value::Integer(7)), Ok(b"7".to_vec()));
    assert_eq!(field(Kind::Bytea, Value::Bytes(&[0, 255])), Ok(vec![0, 255]));
    assert!(field(Kind::Text(None), Value::Bytes(&[255])).is_err());
    assert!(field(Kind::Text(None), Value::Bytes(b"a\0")).is_err());
    assert_eq!(field(Kind::Jsonb, Value::Text("a\"b")), Ok(b"\x01\"a\\\"b\"".to_vec()));
    assert_eq!(field(Kind::Int4, Value::Text("12")), Ok(12i32.to_be_bytes().to_vec()));
}

#[test]
fn arrays_are_rectangular_or_refused() {
    let array = |json: &str| {
        let mut out = Vec::new();
        append_array(&Kind::Int2, 21, json, &mut out).map(|()| out)
    };
    let head = |numbers: &[i32]| numbers.iter().flat_map(|number| number.to_be_bytes()).collect::<Vec<u8>>();
    assert_eq!(array("[]"), Ok(head(&[0, 0, 21])));
    assert_eq!(
        array("[5, null]"),
        Ok([head(&[1, 1, 21, 2, 1]), head(&[2]), vec![0, 5], head(&[-1])].concat())
    );
    assert_eq!(
        array("[[1],[2]]"),
        Ok([head(&[2, 0, 21, 2, 1, 1, 1]), head(&[2]), vec![0, 1], head(&[2]), vec![0, 2]].concat())
    );
    for json in
        ["[[1],[2,3]]", "[[1],2]", "[1,[2]]", "[[]]", "[[null],null]", "{}", "[[[[[[[1]]]]]]]", "[\"x\"]"]
    {
        assert!(array(json).is_err(), "{json}");
    }
}

fn canonical_of(kind: &Kind, json: &str) -> Vec<u8> {
    let (mut field, mut key) = (Vec::new(), Vec::new());
    append_json(kind, json, &mut field).unwrap();
    canonical::append(kind, &field, &mut key);
    key
}

#[test]
fn equal_row_keys_have_equal_bytes() {
    let numeric = Kind::Numeric(None);
    for same in ["1.0", "1.000", "10e-1", "0.1e1", "\"1\""] {
        assert_eq!(canonical_of(&numeric, same), canonical_of(&numeric, "1"), "{same}");
    }
    assert_eq!(canonical_of(&numeric, "-0.00"), canonical_of(&numeric, "0"));
    assert_eq!(canonical_of(&Kind::Char(Some(4)), "\"a  \""), canonical_of(&Kind::Char(Some(4)), "\"a\""));
    assert_ne!(canonical_of(&Kind::Text(None), "\"a \""), canonical_of(&Kind::Text(None), "\"a\""));
    assert_eq!(canonical_of(&Kind::Float8, "-0.0"), canonical_of(&Kind::Float8, "0"));
    let at = Kind::TimestampTz(6);
    assert_eq!(
        canonical_of(&at, "\"2024-01-01T02:00:00+02:00\""),
        canonical_of(&at, "\"2024-01-01T00:00:00Z\"")
    );
    let pair =
        |a: &str, b: &str| [canonical_of(&Kind::Text(None), a), canonical_of(&Kind::Text(None), b)].concat();
    assert_ne!(pair("\"a\"", "\"bc\""), pair("\"ab\"", "\"c\""));
}

#[test]
fn canonical_bytes_sort_as_the_values_do() {
    let ascending: &[(Kind, &[&str])] = &[
        (Kind::Int8, &["-9223372036854775808", "-1", "0", "1", "9223372036854775807"]),
        (
            Kind::Numeric(None),
            &[
                "\"-Infinity\"",
                "-1e30",
                "-10000",
                "-9999.5",
                "-9999",
                "-1.5",
                "-1",
                "-0.00001",
                "0",
                "1e-20",
                "0.1",
                "1",
                "1.0001",
                "1.5",
                "9999",
                "10000",
                "10000.1",
                "99999999",
                "1e30",
                "\"Infinity\"",
                "\"NaN\"",
            ],
        ),
        (
            Kind::Float8,
            &["\"-Infinity\"", "-1.5", "-1e-300", "0", "1e-300", "1.5", "\"Infinity\"", "\"NaN\""],
        ),
        (Kind::Text(None), &["\"\"", "\"A\"", "\"AB\"", "\"a\"", "\"é\""]),
        (Kind::Date, &["\"-0044-03-15\"", "\"1999-12-31\"", "\"2000-01-01\"", "\"infinity\""]),
    ];
    for (kind, values) in ascending {
        for pair in values.windows(2) {
            assert!(canonical_of(kind, pair[0]) < canonical_of(kind, pair[1]), "{kind:?}: {pair:?}");
        }
    }
}

fn kinds() -> Vec<Kind> {
    vec![
        Kind::Bool,
        Kind::Int2,
        Kind::Int4,
        Kind::Int8,
        Kind::Float4,
        Kind::Float8,
        Kind::Numeric(None),
        Kind::Numeric(Some((5, 2))),
        Kind::Text(Some(3)),
        Kind::Char(Some(2)),
        Kind::Uuid,
        Kind::Bytea,
        Kind::Date,
        Kind::Time(3),
        Kind::Timestamp(0),
        Kind::TimestampTz(6),
        Kind::Json,
        Kind::Jsonb,
        Kind::Inet,
        Kind::Enum(vec!["a".into()]),
        Kind::Array(Box::new(Kind::Numeric(None)), 1700),
    ]
}

proptest! {
    #[test]
    fn no_value_panics_and_errors_leave_the_buffers_alone(text in "\\PC{0,30}", json in "[-0-9.eE+\"\\[\\],a\\\\u:TZ]{0,30}", number in proptest::num::i64::ANY) {
        for kind in kinds() {
            let encoder = Encoder::new(vec![target("x", kind, true, false)], Vec::new(), None);
            for value in [Value::Json(&text), Value::Json(&json), Value::Text(&text), Value::Text(&json), Value::Bytes(json.as_bytes()), Value::Integer(number), Value::Micros(number)] {
                if let Ok((row, _)) = encode(&encoder, RowKind::Write, &[value]) {
                    let read = Encoded::read(&row).unwrap();
                    prop_assert_eq!(read.fields().count(), 1);
                }
            }
        }
    }

    #[test]
    fn numerics_sort_as_their_canonical_bytes(a in -10i64.pow(17)..10i64.pow(17), b in -10i64.pow(17)..10i64.pow(17), places in 0u32..12) {
        let text = |value: i64| format!("{value}e-{places}");
        let kind = Kind::Numeric(None);
        prop_assert_eq!(canonical_of(&kind, &text(a)).cmp(&canonical_of(&kind, &text(b))), a.cmp(&b));
    }
}
