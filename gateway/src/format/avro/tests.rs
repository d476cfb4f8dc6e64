use proptest::prelude::*;

use super::*;

fn schema(text: &str) -> AvroSchema {
    AvroSchema::parse([].into_iter(), text).unwrap_or_else(|fault| panic!("{fault}\n{text}"))
}

fn read(schema: &AvroSchema, bytes: &[u8]) -> Result<String, String> {
    let mut out = String::new();
    schema.read(bytes, &|text| text == "\"kept\"", &mut out).map(|()| out)
}

/// Variable length, zigzag.
fn long(value: i64) -> Vec<u8> {
    let mut rest = (value << 1 ^ value >> 63).cast_unsigned();
    let mut bytes = Vec::new();
    while rest > 0x7f {
        bytes.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    bytes.push(rest as u8);
    bytes
}

fn text(value: &str) -> Vec<u8> {
    [long(value.len() as i64), value.as_bytes().to_vec()].concat()
}

#[test]
fn every_type_is_read_exactly() {
    for (of, bytes, expected) in [
        ("\"null\"", vec![], "null"),
        ("boolean", vec![1], "true"),
        ("\"int\"", long(-2_147_483_648), "-2147483648"),
        ("\"long\"", long(i64::MIN), "-9223372036854775808"),
        ("\"long\"", long(9_007_199_254_740_993), "9007199254740993"),
        ("\"float\"", 0.1f32.to_le_bytes().to_vec(), "0.1"),
        ("\"double\"", 1e300f64.to_le_bytes().to_vec(), "1e+300"),
        ("\"double\"", f64::NAN.to_le_bytes().to_vec(), "\"NaN\""),
        ("\"float\"", f32::NEG_INFINITY.to_le_bytes().to_vec(), "\"-Infinity\""),
        ("\"bytes\"", [long(2), vec![0, 255]].concat(), "\"AP8=\""),
        ("\"string\"", text("a\"\u{0}é"), "\"a\\\"\\u0000é\""),
        (r#"{"type":"fixed","name":"f","size":3}"#, vec![1, 2, 3], "\"AQID\""),
        (r#"{"type":"enum","name":"e","symbols":["A","B"]}"#, long(1), "\"B\""),
        (r#"{"type":"array","items":"int"}"#, [long(2), long(1), long(-1), long(0)].concat(), "[1,-1]"),
        // A negative count comes with the block's size; blocks follow each other.
        (
            r#"{"type":"array","items":"int"}"#,
            [long(-1), long(1), long(7), long(1), long(8), long(0)].concat(),
            "[7,8]",
        ),
        (
            r#"{"type":"map","values":"int"}"#,
            [long(1), text("a b"), long(5), long(0)].concat(),
            "{\"a b\":5}",
        ),
        (r#"["null","string"]"#, [long(1), text("x")].concat(), "\"x\""),
        (r#"["null","string"]"#, long(0), "null"),
        (
            r#"{"type":"record","name":"n.R","fields":[{"name":"a","type":"int"},{"name":"b","type":{"type":"string"}}]}"#,
            [long(1), text("z")].concat(),
            "{\"a\":1,\"b\":\"z\"}",
        ),
    ] {
        assert_eq!(read(&schema(of), &bytes).as_deref(), Ok(expected), "{of}");
    }
}

#[test]
fn logical_types_and_connects_declared_types_are_read() {
    for (of, bytes, expected) in [
        (
            r#"{"type":"bytes","logicalType":"decimal","precision":9,"scale":2}"#,
            [long(2), vec![0x30, 0x39]].concat(),
            "\"123.45\"",
        ),
        (
            r#"{"type":"fixed","name":"f","size":2,"logicalType":"decimal","precision":4,"scale":1}"#,
            vec![0xff, 0xff],
            "\"-0.1\"",
        ),
        (r#"{"type":"int","logicalType":"date"}"#, long(19_782), "\"2024-02-29\""),
        (r#"{"type":"int","logicalType":"time-millis"}"#, long(1), "\"00:00:00.001\""),
        (r#"{"type":"long","logicalType":"time-micros"}"#, long(1), "\"00:00:00.000001\""),
        (r#"{"type":"long","logicalType":"timestamp-millis"}"#, long(-1), "\"1969-12-31T23:59:59.999Z\""),
        (r#"{"type":"long","logicalType":"timestamp-micros"}"#, long(1), "\"1970-01-01T00:00:00.000001Z\""),
        (r#"{"type":"long","logicalType":"timestamp-nanos"}"#, long(1), "\"1970-01-01T00:00:00.000000001Z\""),
        (
            r#"{"type":"long","logicalType":"local-timestamp-micros"}"#,
            long(1),
            "\"1970-01-01T00:00:00.000001\"",
        ),
        (r#"{"type":"string","logicalType":"uuid"}"#, text("u"), "\"u\""),
        (
            r#"{"type":"fixed","name":"u","size":16,"logicalType":"uuid"}"#,
            (0..16).collect(),
            "\"00010203-0405-0607-0809-0a0b0c0d0e0f\"",
        ),
        (
            r#"{"type":"fixed","name":"d","size":12,"logicalType":"duration"}"#,
            vec![1, 0, 0, 0, 2, 0, 0, 0, 0xdc, 5, 0, 0],
            "\"P1M2DT1.500S\"",
        ),
        (r#"{"type":"long","logicalType":"unheard-of"}"#, long(5), "5"),
        (
            r#"{"type":"bytes","scale":2,"precision":64,"connect.version":1,"connect.parameters":{"scale":"2"},"connect.name":"org.apache.kafka.connect.data.Decimal","logicalType":"decimal"}"#,
            [long(1), vec![0xff]].concat(),
            "\"-0.01\"",
        ),
        (
            r#"{"type":"long","connect.version":1,"connect.name":"io.debezium.time.MicroTimestamp"}"#,
            long(1),
            "\"1970-01-01T00:00:00.000001\"",
        ),
        // Connect's own timestamps have no zone, whatever the logical type beside them says.
        (
            r#"{"type":"long","connect.name":"org.apache.kafka.connect.data.Timestamp","logicalType":"timestamp-millis"}"#,
            long(1),
            "\"1970-01-01T00:00:00.001\"",
        ),
        (r#"{"type":"string","connect.name":"io.debezium.data.Json"}"#, text("{\"a\":1}"), "{\"a\":1}"),
        (
            r#"{"type":"bytes","connect.name":"io.debezium.data.Bits","connect.parameters":{"length":"3"}}"#,
            [long(1), vec![5]].concat(),
            "\"101\"",
        ),
        (
            r#"{"type":"record","name":"V","connect.name":"io.debezium.data.VariableScaleDecimal","fields":[{"name":"scale","type":"int"},{"name":"value","type":"bytes"}]}"#,
            [long(3), long(1), vec![1]].concat(),
            "\"0.001\"",
        ),
        (r#"{"type":"string","connect.name":"io.debezium.data.Json"}"#, text("kept"), "\"kept\""),
    ] {
        assert_eq!(read(&schema(of), &bytes).as_deref(), Ok(expected), "{of}");
    }
}

#[test]
fn named_types_are_found_by_namespace_and_in_references() {
    let inner = r#"{"type":"record","name":"Inner","namespace":"a.b","fields":[{"name":"x","type":"int"}]}"#;
    for name in ["a.b.Inner", "Inner"] {
        let outer = format!(
            r#"{{"type":"record","name":"Outer","namespace":"a.b","fields":[{{"name":"one","type":"{name}"}},{{"name":"two","type":["null","{name}"]}}]}}"#
        );
        let schema = AvroSchema::parse([inner].into_iter(), &outer).unwrap();
        let bytes = [long(1), long(1), long(2)].concat();
        assert_eq!(read(&schema, &bytes).as_deref(), Ok(r#"{"one":{"x":1},"two":{"x":2}}"#));
    }
    for (bad, says) in [
        (
            r#"{"type":"record","name":"R","fields":[{"name":"a","type":"Missing"}]}"#,
            "\"Missing\" is not defined",
        ),
        (
            r#"{"type":"record","name":"R","fields":[{"name":"a","type":"int"},{"name":"a","type":"int"}]}"#,
            "two fields",
        ),
        (r#"[{"type":"fixed","name":"F","size":1},{"type":"fixed","name":"F","size":1}]"#, "defined twice"),
        (r#"{"type":"record","fields":[]}"#, "no name"),
        ("{", "not JSON"),
        ("5", "neither a name"),
    ] {
        let said = AvroSchema::parse([].into_iter(), bad).unwrap_err();
        assert!(said.contains(says), "{bad}: {said}");
    }
    let deep = format!("{}\"int\"{}", "[".repeat(10_000), "]".repeat(10_000));
    assert!(AvroSchema::parse([].into_iter(), &deep).unwrap_err().contains("128 levels"));
}

#[test]
fn damaged_bytes_are_named_by_field_and_byte() {
    let order = schema(
        r#"{"type":"record","name":"R","fields":[{"name":"id","type":"long"},{"name":"note","type":"string"},{"name":"tags","type":{"type":"array","items":"string"}}]}"#,
    );
    let good = [long(5), text("hello"), long(1), text("t"), long(0)].concat();
    assert!(read(&order, &good).is_ok());
    for cut in 0..good.len() {
        let said = read(&order, &good[..cut]).unwrap_err();
        assert!(said.contains("byte") && said.contains("damaged") && !said.contains("hello"), "{said}");
    }
    let said = read(&order, &[good, vec![0]].concat()).unwrap_err();
    assert!(said.contains("1 bytes are left"), "{said}");
    for (bytes, says) in [
        (
            [long(5), long(i64::MAX)].concat(),
            "field note, byte 11 of 11: 9223372036854775807 bytes are wanted",
        ),
        ([long(5), long(-1)].concat(), "a length is negative"),
        ([long(5), long(2), vec![0xff, 0xfe]].concat(), "not UTF-8 at byte 2"),
        (vec![0xff; 11], "more than 64 bits"),
        ([long(5), text("x"), long(i64::MAX)].concat(), "field tags"),
    ] {
        let said = read(&order, &bytes).unwrap_err();
        assert!(said.contains(says), "{said}");
    }
    assert!(read(&schema("\"int\""), &long(1 << 40)).unwrap_err().contains("32 bits"));
    assert!(read(&schema("\"boolean\""), &[2]).unwrap_err().contains("neither 0 nor 1"));
    assert!(read(&schema(r#"["null"]"#), &long(1)).unwrap_err().contains("branch number 1"));
    assert!(
        read(&schema(r#"{"type":"enum","name":"e","symbols":["A"]}"#), &long(-1))
            .unwrap_err()
            .contains("symbol number -1")
    );
}

#[test]
fn nothing_nests_or_grows_without_bound() {
    let list = schema(r#"{"type":"record","name":"L","fields":[{"name":"next","type":["null","L"]}]}"#);
    let said = read(&list, &[2u8].repeat(1_000_000)).unwrap_err();
    assert!(said.contains("deeper than 128"), "{said}");
    // No byte is needed to go deeper here.
    let endless = schema(r#"{"type":"record","name":"E","fields":[{"name":"e","type":"E"}]}"#);
    assert!(read(&endless, &[]).unwrap_err().contains("deeper than 128"));
    let nulls = schema(r#"{"type":"array","items":"null"}"#);
    assert!(read(&nulls, &[long(i64::MAX), long(0)].concat()).unwrap_err().contains("longer than"));
    let empty = schema(r#"{"type":"array","items":{"type":"record","name":"N","fields":[]}}"#);
    assert!(read(&empty, &[long(i64::MAX), long(0)].concat()).unwrap_err().contains("longer than"));
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let all = schema(r#"{"type":"record","name":"R","fields":[
            {"name":"a","type":["null","long"]},{"name":"b","type":{"type":"map","values":["string","bytes","double"]}},
            {"name":"c","type":{"type":"array","items":{"type":"bytes","logicalType":"decimal","precision":9,"scale":2}}},
            {"name":"d","type":["null","R"]},{"name":"e","type":{"type":"string","connect.name":"io.debezium.data.Json"}}]}"#);
        if let Ok(json) = read(&all, &bytes) {
            prop_assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{}", json);
        }
    }

    #[test]
    fn any_number_and_text_come_back(number: i64, words in "\\PC{0,40}") {
        let bytes = [long(number), text(&words)].concat();
        let record = schema(r#"{"type":"record","name":"R","fields":[{"name":"n","type":"long"},{"name":"t","type":"string"}]}"#);
        let json: serde_json::Value = serde_json::from_str(&read(&record, &bytes).unwrap()).unwrap();
        prop_assert_eq!(json["n"].as_i64(), Some(number));
        prop_assert_eq!(json["t"].as_str(), Some(words.as_str()));
    }
}
