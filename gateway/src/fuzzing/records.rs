//! Records on their way to a row: payloads, record keys and headers, change events, registered formats.

use std::sync::{Arc, LazyLock};

use adapters::{
    decode,
    fuzzing::parts,
    sink::{Column, Encode, RowKind},
    value::{BadValue, Value},
};
use dedup_store::{Algorithm, Hasher, Identity};

use crate::{
    format::{Content, Debezium, Deletes, Encoding, Format, Member, Tombstones, avro::AvroSchema},
    key::{IdempotencyKey, KeySpec, Part, Pointer},
    naming::{
        Chunk, ColumnSource, EventTime, Headers, KafkaOrigin, Namer, NamingRules, Record, TimeUnit,
        UnknownFields,
    },
};

/// Reads each value as its column's type says.
#[derive(Debug)]
struct Read {
    columns: Vec<Column>,
}

impl Encode for Read {
    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn encode(
        &self,
        _: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        assert_eq!(values.len(), self.columns.len());
        let (start, mut scratch) = (row.len(), String::new());
        for (column, value) in self.columns.iter().zip(values) {
            let read = match value {
                Value::Json(json) if decode::is_null(json) => Ok(()),
                Value::Json(json) => match &*column.type_name {
                    "number" => decode::number_text(json, &mut scratch)
                        .map(|text| row.extend_from_slice(text.as_bytes())),
                    "time" => decode::string(json, &mut scratch).and_then(decode::timestamp).map(drop),
                    _ => decode::append_string(json, row),
                },
                Value::Text(text) => {
                    row.extend_from_slice(text.as_bytes());
                    Ok(())
                }
                Value::Bytes(bytes) => {
                    row.extend_from_slice(bytes);
                    Ok(())
                }
                Value::Missing | Value::Integer(_) | Value::Micros(_) => Ok(()),
            };
            if let Err(fault) = read {
                row.truncate(start);
                let (column, column_type) = (column.name.clone(), column.type_name.clone());
                return Err(BadValue { column, column_type, reason: fault.to_string() });
            }
        }
        row_key.extend_from_slice(b"key");
        Ok(())
    }
}

fn namer(rules: NamingRules, columns: &[(&str, &str)]) -> Namer {
    let column = |(name, type_name): &(&str, &str)| Column {
        name: (*name).into(),
        type_name: (*type_name).into(),
        nullable: true,
        has_default: true,
    };
    let hasher = Hasher::new(&Identity {
        route_id: *b"route-0123456789",
        key_spec_id: rules.key.id(),
        algorithm: Algorithm::Xxh3Secret,
        secret: [7; 192],
    });
    let encoder = Arc::new(Read { columns: columns.iter().map(column).collect() });
    Namer::new(rules, encoder, hasher).unwrap_or_else(|misfits| panic!("{misfits:?}"))
}

/// Names it with each of `namers`: one record each, whose ranges lie in the chunk.
fn name_with(namers: &[Namer], record: &Record<'_>) {
    let mut chunk = Chunk::default();
    for namer in namers {
        namer.name(record, &mut chunk);
    }
    assert_eq!(chunk.records.len(), namers.len());
    for named in &chunk.records {
        let payload = named.payload.as_ref().map(|range| chunk.slice(range));
        assert_eq!(payload, record.payload);
        chunk.slice(&named.row);
        chunk.slice(&named.row_key);
        assert!(named.problem.is_none() || named.row.is_empty() && named.row_key.is_empty());
    }
}

/// Payload, record key, and a header with its value.
pub(super) fn record(bytes: &[u8]) {
    static NAMERS: LazyLock<Vec<Namer>> = LazyLock::new(|| {
        let pointer = |text: &str| Pointer::parse(text).expect("a pointer");
        let columns =
            [("id", "text"), ("amount", "number"), ("at", "time"), ("rest", "json"), ("binary", "bytea")];
        let mut by_pointer = NamingRules::new(KeySpec::pointers(["/id", "/a/0/b"]).expect("a key"));
        by_pointer.event_time = EventTime::Pointer { pointer: pointer("/at"), unit: Some(TimeUnit::Millis) };
        by_pointer.unknown_fields = UnknownFields::Column("rest".into());
        by_pointer.columns.insert("binary".into(), ColumnSource::KafkaKey);
        let key =
            KeySpec::new(vec![Part::KafkaKey, Part::KafkaHeader("h".into()), Part::Content]).expect("a key");
        let mut by_origin = NamingRules::new(key);
        by_origin.format = Format { encoding: Encoding::Raw, ..Format::default() };
        for name in ["id", "amount", "at", "rest"] {
            by_origin.columns.insert(name.into(), ColumnSource::Default);
        }
        by_origin.columns.insert("binary".into(), ColumnSource::KafkaHeader("h".into()));
        vec![namer(by_pointer, &columns), namer(by_origin, &columns)]
    });
    let [payload, key, header] = parts(bytes);
    let pairs = [("h", header), ("other", key)];
    let kafka = KafkaOrigin { topic: "t", partition: 3, offset: 42, key, timestamp_ms: Some(1), shard: 0 };
    let record = Record {
        payload,
        headers: Headers::Pairs(&pairs),
        kafka: Some(kafka),
        ..Record::new(b"", 5_000_999)
    };
    name_with(&NAMERS, &record);
    // As an HTTP request brings it.
    static CALLED: LazyLock<Vec<Namer>> = LazyLock::new(|| {
        let key = KeySpec::pointers(["/id"]).and_then(|key| key.with_idempotency_key(IdempotencyKey::First));
        let rules =
            NamingRules { unknown_fields: UnknownFields::Ignore, ..NamingRules::new(key.expect("a key")) };
        vec![namer(rules, &[("id", "text"), ("amount", "number")])]
    });
    let mut headers = http::HeaderMap::new();
    if let Some(value) = header.and_then(|value| http::HeaderValue::from_bytes(value).ok()) {
        headers.insert("idempotency-key", value);
    }
    let called =
        Record { headers: Headers::Http(&headers), ..Record::new(payload.unwrap_or_default(), 5_000_999) };
    name_with(&CALLED, &called);
}

/// A change event and its record key, with a schema and without, flattened or not.
pub(super) fn debezium(bytes: &[u8]) {
    static NAMERS: LazyLock<Vec<Namer>> = LazyLock::new(|| {
        let rules = |debezium: Debezium| NamingRules {
            format: Format { content: Content::Debezium(debezium), ..Format::default() },
            row_key: vec!["id".into()],
            version: Some("version".into()),
            unknown_fields: UnknownFields::Ignore,
            event_time: EventTime::Debezium,
            ..NamingRules::new(KeySpec::new(vec![Part::Debezium(Member::Position)]).expect("a key"))
        };
        let columns = [("id", "text"), ("name", "text"), ("amount", "number"), ("version", "text")];
        let envelope = Debezium::new(false);
        let flat = Debezium { deletes: Deletes::Mark, tombstones: Tombstones::Delete, ..Debezium::new(true) };
        [envelope, flat].map(|debezium| namer(rules(debezium), &columns)).into()
    });
    let [payload, key] = parts(bytes);
    let topic = "dbserver1.inventory.customers";
    let kafka = KafkaOrigin { topic, partition: 0, offset: 9, key, timestamp_ms: Some(1), shard: 0 };
    let record = Record { payload, kafka: Some(kafka), ..Record::new(b"", 5_000_999) };
    name_with(&NAMERS, &record);
    let tombstone = Record { payload: None, ..record };
    name_with(&NAMERS, &tombstone);
}

/// A schema, and a value that was written with it.
pub(super) fn avro(bytes: &[u8]) {
    let [schema, value] = parts(bytes);
    let Ok(schema) = std::str::from_utf8(schema.unwrap_or_default()) else { return };
    let Ok(schema) = AvroSchema::parse(std::iter::empty(), schema) else { return };
    let mut out = String::from("before");
    if schema.read(value.unwrap_or_default(), &|_| false, &mut out).is_ok() {
        is_json(&out);
    }
}

/// The same of Protobuf.
#[cfg(feature = "protobuf")]
pub(super) fn protobuf(bytes: &[u8]) {
    let [schema, value] = parts(bytes);
    let Ok(schema) = std::str::from_utf8(schema.unwrap_or_default()) else { return };
    let Ok(schema) = crate::format::protobuf::ProtobufSchema::parse(&[], schema) else { return };
    let mut out = String::from("before");
    if schema.read(value.unwrap_or_default(), &mut out).is_ok() {
        is_json(&out);
    }
}

fn is_json(out: &str) {
    let text = out.strip_prefix("before").expect("what was there stays");
    assert!(crate::naming::json::whole(text).is_ok(), "no JSON came out");
}
