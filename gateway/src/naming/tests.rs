//! Naming against an encoder that writes down what it is given.

use std::sync::Arc;

use adapters::{
    sink::{Column, Encode, RowKind},
    value::{BadValue, Value},
};
use dedup_store::{Algorithm, Digest, Hasher, Identity};
use http::{HeaderMap, HeaderValue};
use proptest::prelude::*;

mod changes;

use super::*;
use crate::key::{IdempotencyKey, KeySpec, OnMissing, Part, Pointer};

/// A row is one `name=value` a column; the row key is the values of `row_key`.
#[derive(Debug)]
struct Written {
    columns: Vec<Column>,
    row_key: Vec<String>,
}

impl Encode for Written {
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
        for (column, value) in self.columns.iter().zip(values) {
            if *value == Value::Json("\"bad\"") {
                let (column, column_type) = (column.name.clone(), column.type_name.clone());
                return Err(BadValue { column, column_type, reason: "not that".into() });
            }
        }
        for (column, value) in self.columns.iter().zip(values) {
            row.extend_from_slice(format!("{}={value:?};", column.name).as_bytes());
            if self.row_key.contains(&column.name) {
                row_key.extend_from_slice(format!("{value:?};").as_bytes());
            }
        }
        Ok(())
    }
}

fn encoder(names: &[&str], row_key: &[&str]) -> Arc<Written> {
    let column = |name: &&str| Column {
        name: (*name).into(),
        type_name: if name.starts_with("bin") { "bytea" } else { "text" }.into(),
        nullable: !name.starts_with("must"),
        has_default: name.starts_with("dflt"),
    };
    let row_key = row_key.iter().map(|name| (*name).to_owned()).collect();
    Arc::new(Written { columns: names.iter().map(column).collect(), row_key })
}

fn hasher(spec: &KeySpec) -> Hasher {
    let secret = std::array::from_fn(|at| at as u8);
    let (route_id, algorithm) = (*b"route id 16 byte", Algorithm::Xxh3Secret);
    Hasher::new(&Identity { route_id, key_spec_id: spec.id(), algorithm, secret })
}

fn rules(pointers: &[&str]) -> NamingRules {
    NamingRules::new(KeySpec::pointers(pointers.iter().copied()).unwrap())
}

fn namer(rules: NamingRules, columns: &[&str]) -> Namer {
    let row_key: Vec<&str> = rules.row_key.iter().map(String::as_str).collect();
    let encoder = encoder(columns, &row_key);
    let hasher = hasher(&rules.key);
    Namer::new(rules, encoder, hasher).unwrap()
}

/// A record after naming, with its ranges read.
#[derive(Debug)]
struct Seen {
    named: Named,
    row: String,
    row_key: String,
}

impl Seen {
    fn problem(&self) -> &Problem {
        self.named.problem.as_deref().unwrap_or_else(|| panic!("no problem: {self:?}"))
    }

    fn bad(&self) -> &str {
        match self.problem() {
            Problem::BadRecord(text) => text,
            other => panic!("{other:?}"),
        }
    }

    fn row(&self) -> &str {
        assert_eq!(self.named.problem, None);
        &self.row
    }
}

fn see(namer: &Namer, record: &Record<'_>) -> Seen {
    let mut chunk = Chunk { bytes: b"before".to_vec(), records: Vec::new() };
    namer.name(record, &mut chunk);
    assert_eq!(chunk.records.len(), 1);
    let named = chunk.records.remove(0);
    let text = |range: &std::ops::Range<u32>| {
        String::from_utf8(chunk.bytes[range.start as usize..range.end as usize].to_vec()).unwrap()
    };
    let payload = named.payload.as_ref().map(|range| &chunk.bytes[range.start as usize..range.end as usize]);
    assert_eq!(payload, record.payload);
    assert!(chunk.bytes.starts_with(b"before"));
    assert!(named.problem.is_none() || named.row.is_empty() && named.row_key.is_empty());
    let (row, row_key) = (text(&named.row), text(&named.row_key));
    Seen { named, row, row_key }
}

fn see_json(namer: &Namer, payload: &str) -> Seen {
    see(namer, &Record::new(payload.as_bytes(), 5_000_999))
}

fn kafka(key: Option<&[u8]>) -> KafkaOrigin<'_> {
    KafkaOrigin { topic: "t", partition: 3, offset: 42, key, timestamp_ms: Some(1234), shard: 7 }
}

fn tombstone(key: Option<&[u8]>) -> Record<'_> {
    Record { payload: None, kafka: Some(kafka(key)), ..Record::new(b"", 5_000_999) }
}

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    map
}

fn over_http<'a>(payload: &'a str, headers: &'a HeaderMap) -> Record<'a> {
    Record { headers: Headers::Http(headers), ..Record::new(payload.as_bytes(), 0) }
}

#[test]
fn a_record_becomes_one_name_and_one_row() {
    let namer = namer(NamingRules { row_key: vec!["id".into()], ..rules(&["/id"]) }, &["id", "a", "b"]);
    let seen = see_json(&namer, r#" {"b":1.50,"id":"x\u0041", "a" : {"k":[1,2]} } "#);
    assert_eq!(seen.row(), r#"id=Json("\"x\\u0041\"");a=Json("{\"k\":[1,2]}");b=Json("1.50");"#);
    assert_eq!(seen.row_key, r#"Json("\"x\\u0041\"");"#);
    assert_eq!((seen.named.kind, seen.named.event_ms), (RowKind::Write, 5000));
    assert_eq!((seen.named.shard, seen.named.position), (0, None));
    let copy = see_json(&namer, r#"{"id":"xA"}"#);
    assert_eq!(copy.row(), r#"id=Json("\"xA\"");a=Missing;b=Missing;"#);
    assert_eq!(copy.named.fingerprint, seen.named.fingerprint);
    assert_ne!(copy.named.digest, seen.named.digest);
    assert_ne!(see_json(&namer, r#"{"id":"xa"}"#).named.fingerprint, seen.named.fingerprint);
}

/// The whole recipe, from payload to fingerprint and digest: never edit the expected values.
#[test]
fn golden_names_of_whole_records() {
    let namer = namer(rules(&["/user", "/at/0"]), &["user", "at"]);
    let seen = see_json(&namer, r#"{"user":"u1","at":[17.0]}"#).named;
    assert_eq!(seen.fingerprint.unwrap().to_string(), "362d20f5cf759ba43fba706f845c287b");
    assert_eq!(seen.digest, Digest(42848955367536293));
    let map = headers(&[("idempotency-key", "\"k\"")]);
    let seen = see(&namer, &over_http("{}", &map)).named;
    assert_eq!(seen.fingerprint.unwrap().to_string(), "3dd1c1bb262e1708b0b86a25f00424e5");
    let seen = see(&namer, &tombstone(None)).named;
    assert_eq!(seen.fingerprint.unwrap().to_string(), "a9a915bc1ebbc64213d4c31680b27eca");
}

#[test]
fn rule10_a_bad_record_costs_one_outcome() {
    let namer = namer(rules(&["/id"]), &["id", "a"]);
    let mut chunk = Chunk::default();
    for payload in [r#"{"id":1}"#, r#"{"id":2"#, r#"{"id":3,"a":"bad"}"#, r#"{"id":4}"#] {
        namer.name(&Record::new(payload.as_bytes(), 0), &mut chunk);
    }
    let problems: Vec<bool> = chunk.records.iter().map(|named| named.problem.is_some()).collect();
    assert_eq!(problems, [false, true, true, false]);
    assert!(chunk.records[1].fingerprint.is_none() && chunk.records[2].fingerprint.is_some());
}

#[test]
fn bad_payloads_are_told_apart_without_their_values() {
    let namer = namer(rules(&["/id"]), &["id", "a"]);
    for (payload, says) in [
        ("", "empty"),
        (" \n", "empty"),
        ("[{\"id\":1}]", "an array; send a JSON object"),
        ("\"secret\"", "a string"),
        ("17", "a number"),
        ("null", "true, false or null"),
        ("secret", "not JSON"),
        ("{\"id\":1", "not valid JSON: EOF"),
        ("{\"id\":1}}", "not valid JSON: trailing characters at line 1 column 9"),
        ("{\"id\":1} {\"id\":2}", "trailing characters"),
        ("{\"id\":01}", "not valid JSON"),
        ("{\"id\":1,}", "trailing comma"),
        ("{\"id\":NaN}", "not valid JSON"),
        ("{id:1}", "key must be a string"),
        ("{\"id\":\"secret\u{1}\"}", "control character"),
        ("{\"id\":1,\"id\":1}", "member \"id\" comes twice"),
        ("{\"id\":1,\"\\u0069d\":1}", "member \"id\" comes twice"),
        ("{\"id\":1,\"a\":{\"b\":1,\"b\":2}}", "column \"a\": /a: member \"b\" comes twice"),
        (
            "{\"id\":1,\"c\":\"secret\"}",
            "member \"c\" has no column; leave it out, add a column, or set unknown_fields",
        ),
        ("{\"id\":1,\"a\":\"bad\"}", "column \"a\" (text): not that"),
    ] {
        let seen = see_json(&namer, payload);
        assert!(seen.bad().contains(says), "{payload}: {}", seen.bad());
        assert!(!seen.bad().contains("secret"), "{}", seen.bad());
    }
    let seen = see(&namer, &Record::new(b"{\"id\":\"\xff\"}", 0));
    assert!(seen.bad().contains("not UTF-8 at byte 7"), "{}", seen.bad());
    let deep = format!("{{\"id\":1,\"a\":{}{}}}", "[".repeat(128), "]".repeat(128));
    assert!(see_json(&namer, &deep).bad().contains("deeper than 127"));
    assert!(see_json(&namer, &deep.replacen('[', "", 1).replacen(']', "", 1)).named.problem.is_none());
    assert!(see_json(&namer, &"{\"a\":".repeat(100_000)).named.problem.is_some());
}

#[test]
fn a_problem_elsewhere_leaves_the_name() {
    let namer = namer(rules(&["/id"]), &["id", "a"]);
    let good = see_json(&namer, r#"{"id":1}"#).named;
    for payload in [r#"{"id":1,"c":2}"#, r#"{"id":1,"a":"bad"}"#, r#"{"id":1,"a":{"b":1,"b":1}}"#] {
        assert_eq!(see_json(&namer, payload).named.fingerprint, good.fingerprint, "{payload}");
    }
}

#[test]
fn missing_and_null_parts_follow_the_policy() {
    let strict = namer(rules(&["/id", "/k"]), &["id", "k"]);
    let missing = see_json(&strict, r#"{"id":1}"#);
    assert_eq!(
        *missing.problem(),
        Problem::KeyMissing(
            "part 2 of the key, /k is missing; send it, or set on_missing = \"allow\"".into()
        )
    );
    assert!(
        matches!(see_json(&strict, r#"{"id":1,"k":null}"#).problem(), Problem::KeyMissing(text) if text.contains("null"))
    );
    let mut allowing = rules(&["/id", "/k"]);
    allowing.key = allowing.key.on_missing(OnMissing::Allow);
    let allow = namer(allowing, &["id", "k"]);
    let names: Vec<_> =
        [r#"{"id":1}"#, r#"{"id":1,"k":null}"#, r#"{"id":1,"k":""}"#, r#"{"id":1,"k":"null"}"#]
            .map(|payload| see_json(&allow, payload).named.fingerprint.unwrap())
            .into();
    let mut different = names.clone();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), 4, "{names:?}");
}

#[test]
fn keys_that_cannot_be_bytes_are_invalid() {
    let namer = namer(rules(&["/id"]), &["id"]);
    for (payload, says) in [
        (r#"{"id":"\ud800"}"#.to_owned(), "surrogate"),
        (r#"{"id":{"a":1,"a":2}}"#.to_owned(), "comes twice"),
        (format!("{{\"id\":\"{}\"}}", "x".repeat(70_000)), "more than 65536"),
        (format!("{{\"id\":{}{}}}", "[".repeat(200), "]".repeat(200)), "deeper"),
    ] {
        let seen = see_json(&namer, &payload);
        assert!(
            matches!(seen.problem(), Problem::KeyInvalid(text) if text.contains(says)),
            "{:?}",
            seen.problem()
        );
        assert_eq!(seen.named.fingerprint, None);
    }
}

#[test]
fn an_idempotency_key_outranks_parts_unless_the_route_says_otherwise() {
    let (k, quoted, other) = (
        headers(&[("idempotency-key", "k")]),
        headers(&[("idempotency-key", "\"k\"")]),
        headers(&[("idempotency-key", "other")]),
    );
    let first = namer(rules(&["/id"]), &["id"]);
    let name = |namer: &Namer, payload: &str, map: &HeaderMap| {
        see(namer, &over_http(payload, map)).named.fingerprint.unwrap()
    };
    let explicit = name(&first, r#"{"id":1}"#, &k);
    assert_eq!(name(&first, r#"{"id":2}"#, &quoted), explicit);
    assert_ne!(name(&first, r#"{"id":1}"#, &other), explicit);
    assert_ne!(name(&first, r#"{"id":"k"}"#, &HeaderMap::new()), explicit, "kinds of name never meet");
    assert_eq!(name(&first, "not JSON", &k), explicit, "the header names what cannot be read, too");

    let mut ignoring = rules(&["/id"]);
    ignoring.key = ignoring.key.with_idempotency_key(IdempotencyKey::Ignore).unwrap();
    let ignore = namer(ignoring, &["id"]);
    assert_eq!(name(&ignore, r#"{"id":1}"#, &k), name(&ignore, r#"{"id":1}"#, &other));

    let require = namer(NamingRules::new(KeySpec::idempotency_key()), &["id"]);
    name(&require, "{}", &k);
    assert!(matches!(see_json(&require, r#"{"id":1}"#).problem(), Problem::KeyMissing(_)));
    let none = HeaderMap::new();
    assert!(matches!(see(&require, &over_http("{}", &none)).problem(), Problem::KeyMissing(_)));

    let twice = headers(&[("idempotency-key", "a"), ("idempotency-key", "b")]);
    let long = headers(&[("idempotency-key", &"a".repeat(256))]);
    for map in [&twice, &long] {
        assert!(matches!(see(&first, &over_http(r#"{"id":1}"#, map)).problem(), Problem::KeyInvalid(_)));
    }
}

#[test]
fn an_idempotency_key_of_several_records_names_each_by_its_place() {
    let namer = namer(rules(&["/id"]), &["id"]);
    let map = headers(&[("idempotency-key", "k")]);
    let name = |index| see(&namer, &Record { index, ..over_http("{}", &map) }).named.fingerprint.unwrap();
    assert_ne!(name(Some(0)), name(Some(1)));
    assert_ne!(name(Some(0)), name(None));
    assert_eq!(name(Some(1)), name(Some(1)));
}

#[test]
fn tenants_never_meet() {
    let namer = namer(rules(&["/id"]), &["id"]);
    let name =
        |tenant| see(&namer, &Record { tenant, ..Record::new(b"{\"id\":1}", 0) }).named.fingerprint.unwrap();
    assert_ne!(name("a"), name("b"));
    assert_ne!(name(""), name("a"));
}

#[test]
fn parts_come_from_headers_and_kafka() {
    let parts =
        vec![Part::Header("X-Id".into()), Part::KafkaHeader("h".into()), Part::KafkaKey, Part::KafkaPosition];
    let spec = KeySpec::new(parts).unwrap().on_missing(OnMissing::Allow);
    let namer = namer(NamingRules::new(spec), &["a"]);
    let pairs: &[(&str, Option<&[u8]>)] =
        &[("X-Id", Some(b"1")), ("h", Some(b"old")), ("h", Some(b"new")), ("n", None)];
    let record =
        Record { kafka: Some(kafka(Some(b"k"))), headers: Headers::Pairs(pairs), ..Record::new(b"{}", 0) };
    let seen = see(&namer, &record).named;
    assert_eq!((seen.shard, seen.position), (7, Some(42)));
    let again = see(&namer, &Record { headers: Headers::Pairs(&pairs[2..]), ..record }).named;
    assert_ne!(again.fingerprint, seen.fingerprint, "X-Id is gone");
    let last: &[(&str, Option<&[u8]>)] = &[("h", Some(b"new")), ("X-Id", Some(b"1"))];
    assert_eq!(
        see(&namer, &Record { headers: Headers::Pairs(last), ..record }).named.fingerprint,
        seen.fingerprint
    );
    let map = headers(&[("x-id", "1")]);
    assert!(see(&namer, &over_http("{}", &map)).named.fingerprint.is_some());

    let content = self::namer(NamingRules::new(KeySpec::new(vec![Part::Content]).unwrap()), &["a"]);
    let name = |payload: &str| see_json(&content, payload).named.fingerprint;
    assert_eq!(name("{\"a\":1}"), name("{\"a\":1}"));
    assert_ne!(name("{\"a\":1}"), name("{\"a\":1} "));
    assert!(name("nonsense").is_some());
}

#[test]
fn tombstones_are_deletes_named_by_position_if_the_key_needs_a_payload() {
    let rules = NamingRules { row_key: vec!["id".into()], ..rules(&["/event"]) };
    let by_payload = namer(rules.clone(), &["id", "event"]);
    let seen = see(&by_payload, &tombstone(Some(b"17")));
    assert_eq!(seen.row(), r#"id=Text("17");event=Missing;"#);
    assert_eq!((seen.named.kind, seen.named.event_ms), (RowKind::Delete, 5000));
    let further = KafkaOrigin { offset: 43, ..kafka(Some(b"17")) };
    let later = see(&by_payload, &Record { kafka: Some(further), ..tombstone(None) });
    assert_ne!(later.named.fingerprint, seen.named.fingerprint);
    assert_eq!(see(&by_payload, &tombstone(Some(b"\"17\""))).row(), r#"id=Json("\"17\"");event=Missing;"#);
    assert_eq!(see(&by_payload, &tombstone(Some(br#"{"id":17}"#))).row(), r#"id=Json("17");event=Missing;"#);
    assert_eq!(see(&by_payload, &tombstone(Some(b"\xff"))).row(), "id=Bytes([255]);event=Missing;");
    let library = Record { payload: None, ..Record::new(b"", 0) };
    assert!(matches!(see(&by_payload, &library).problem(), Problem::KeyMissing(_)));

    let two = NamingRules { row_key: vec!["id".into(), "event".into()], ..rules.clone() };
    let two = namer(two, &["id", "event"]);
    assert_eq!(
        see(&two, &tombstone(Some(br#"{"id":1,"event":"e"}"#))).row(),
        r#"id=Json("1");event=Json("\"e\"");"#
    );
    assert_eq!(see(&two, &tombstone(Some(b"1"))).row(), "id=Missing;event=Missing;");

    let by_key = NamingRules { key: KeySpec::new(vec![Part::KafkaKey]).unwrap(), ..rules };
    let by_key = namer(by_key, &["id", "event"]);
    let write = Record { payload: Some(b"{}"), ..tombstone(Some(b"k")) };
    let (write, delete) = (see(&by_key, &write).named, see(&by_key, &tombstone(Some(b"k"))).named);
    assert_ne!(write.fingerprint, delete.fingerprint, "the event that deletes is not the one that wrote");
    let copy = Record { kafka: Some(KafkaOrigin { offset: 43, ..kafka(Some(b"k")) }), ..tombstone(None) };
    assert_eq!(see(&by_key, &copy).named.fingerprint, delete.fingerprint);
}

#[test]
fn delete_when_makes_tombstones_of_payloads() {
    let delete_when = Some(DeleteWhen { pointer: Pointer::parse("/op").unwrap(), equals: " \"d\"".into() });
    let namer = namer(NamingRules { delete_when, ..rules(&["/id"]) }, &["id"]);
    let kind = |payload: &str| see_json(&namer, payload).named.kind;
    assert_eq!(kind(r#"{"id":1,"op":"\u0064"}"#), RowKind::Delete);
    for write in [r#"{"id":1,"op":"u"}"#, r#"{"id":1}"#, r#"{"id":1,"op":null}"#, r#"{"id":1,"op":["d"]}"#] {
        assert_eq!(kind(write), RowKind::Write, "{write}");
    }
}

#[test]
fn event_time_comes_from_the_payload_or_kafka() {
    let pointer = |unit| EventTime::Pointer { pointer: Pointer::parse("/t/at").unwrap(), unit };
    let with = |event_time| namer(NamingRules { event_time, ..rules(&["/id"]) }, &["id"]);
    let seconds = with(pointer(Some(TimeUnit::Seconds)));
    assert_eq!(see_json(&seconds, r#"{"id":1,"t":{"at":1.5}}"#).named.event_ms, 1500);
    assert_eq!(see_json(&seconds, r#"{"id":1,"t":{"at":"1970-01-01T00:00:02Z"}}"#).named.event_ms, 2000);
    let missing = see_json(&seconds, r#"{"id":1,"t":{}}"#);
    assert!(missing.bad().starts_with("event time /t/at is missing"), "{}", missing.bad());
    assert_eq!(missing.named.event_ms, 5000);
    assert!(see_json(&with(pointer(None)), r#"{"id":1,"t":{"at":1}}"#).bad().contains("time_unit"));
    let timestamp = with(EventTime::KafkaTimestamp);
    let record = Record { kafka: Some(kafka(None)), ..Record::new(b"{\"id\":1}", 5_000_999) };
    assert_eq!(see(&timestamp, &record).named.event_ms, 1234);
    let none = KafkaOrigin { timestamp_ms: None, ..kafka(None) };
    assert!(see(&timestamp, &Record { kafka: Some(none), ..record }).bad().contains("no timestamp"));
    assert_eq!(see_json(&timestamp, r#"{"id":1}"#).named.event_ms, 5000);
    assert_eq!(see(&seconds, &tombstone(Some(b"1"))).named.event_ms, 1234);
}

#[test]
fn the_digest_covers_the_payload_or_the_values_named() {
    let whole = namer(rules(&["/id"]), &["id", "a", "b"]);
    let digest = |namer: &Namer, payload: &str| see_json(namer, payload).named.digest;
    assert_ne!(digest(&whole, r#"{"id":1,"a":1}"#), digest(&whole, r#"{"id":1, "a":1}"#));
    let pointers = DigestOver::Pointers(vec![Pointer::parse("/a").unwrap(), Pointer::parse("/b/c").unwrap()]);
    let some = namer(NamingRules { digest: pointers, ..rules(&["/id"]) }, &["id", "a", "b"]);
    let same = digest(&some, r#"{"id":1,"a":{"x":1,"y":2},"b":{"c":3,"d":4}}"#);
    assert_eq!(digest(&some, r#"{ "b":{"d":5,"c":3}, "a":{"y":2,"x":1},"id":2}"#), same);
    assert_ne!(digest(&some, r#"{"id":1,"a":{"x":1,"y":2},"b":{"c":4}}"#), same);
    assert_ne!(digest(&some, r#"{"id":1,"a":{"x":1,"y":2}}"#), same);
    assert!(
        see_json(&some, r#"{"id":1,"a":{"x":1,"x":2}}"#)
            .bad()
            .contains("digest covers: member \"x\" comes twice")
    );
}

#[test]
fn columns_take_their_values_from_where_the_route_says() {
    let pointer = |text| ColumnSource::Pointer(Pointer::parse(text).unwrap());
    let columns = [
        ("nested", pointer("/in/0/x")),
        ("raw", pointer("")),
        ("head", ColumnSource::Header("X-H".into())),
        ("key", ColumnSource::KafkaKey),
        ("bin_key", ColumnSource::KafkaKey),
        ("kh", ColumnSource::KafkaHeader("h".into())),
        ("ts", ColumnSource::KafkaTimestamp),
        ("topic", ColumnSource::Topic),
        ("part", ColumnSource::Partition),
        ("off", ColumnSource::Offset),
        ("came", ColumnSource::Arrival),
        ("text", ColumnSource::Constant(Constant::Text("c".into()))),
        ("number", ColumnSource::Constant(Constant::Integer(-1))),
        ("json", ColumnSource::Constant(Constant::Json("true".into()))),
        ("left", ColumnSource::Default),
    ];
    let names: Vec<&str> = columns.iter().map(|column| column.0).collect();
    let columns = columns.iter().map(|(name, source)| ((*name).to_owned(), source.clone())).collect();
    let namer = namer(NamingRules { columns, ..rules(&["/in"]) }, &names);
    let pairs: &[(&str, Option<&[u8]>)] = &[("X-H", Some(b"v")), ("h", None)];
    let payload = r#"{"in":[{"x":7}]}"#;
    let record = Record {
        headers: Headers::Pairs(pairs),
        kafka: Some(kafka(Some(b"k"))),
        ..Record::new(payload.as_bytes(), 9)
    };
    assert_eq!(
        see(&namer, &record).row(),
        "nested=Json(\"7\");raw=Json(\"{\\\"in\\\":[{\\\"x\\\":7}]}\");head=Text(\"v\");key=Text(\"k\");bin_key=Bytes([107]);\
         kh=Json(\"null\");ts=Micros(1234000);topic=Text(\"t\");part=Integer(3);off=Integer(42);came=Micros(9);\
         text=Text(\"c\");number=Integer(-1);json=Json(\"true\");left=Missing;"
    );
    let twice = headers(&[("x-h", "a"), ("x-h", "b")]);
    assert!(see(&namer, &over_http(payload, &twice)).bad().contains("more than once"));
    let none = HeaderMap::new();
    assert!(see(&namer, &over_http(payload, &none)).row().contains("head=Missing;key=Missing;"));
}

#[test]
fn unknown_members_are_rejected_ignored_or_kept() {
    let with = |unknown_fields| namer(NamingRules { unknown_fields, ..rules(&["/id"]) }, &["id", "extra"]);
    let payload = r#"{"id":1,"b\n":{"x":1.50},"c":null}"#;
    assert!(see_json(&with(UnknownFields::Reject), payload).bad().contains(r#"member "b\n" has no column"#));
    let ignore = with(UnknownFields::Ignore);
    assert_eq!(see_json(&ignore, payload).row(), "id=Json(\"1\");extra=Missing;");
    assert!(see_json(&ignore, r#"{"id":1,"x":1,"y":2,"\u0078":3}"#).bad().contains("\"x\" comes twice"));
    let keep = with(UnknownFields::Column("extra".into()));
    assert_eq!(
        see_json(&keep, payload).row(),
        r#"id=Json("1");extra=Json("{\"b\\n\":{\"x\":1.50},\"c\":null}");"#
    );
    assert_eq!(see_json(&keep, "{\"id\":1}").row(), "id=Json(\"1\");extra=Json(\"{}\");");
    assert!(
        see_json(&keep, r#"{"id":1,"x":{"a":1,"a":1}}"#)
            .bad()
            .contains("member \"x\": member \"a\" comes twice")
    );
    assert_eq!(
        see_json(&keep, r#"{"id":1,"extra":5}"#).row(),
        r#"id=Json("1");extra=Json("{\"extra\":5}");"#
    );
}

/// Markers that the JSON library uses inside itself are members like others when a record sends them.
#[test]
fn private_markers_of_the_parser_mean_nothing_in_a_record() {
    let namer = namer(
        NamingRules { unknown_fields: UnknownFields::Column("x".into()), ..rules(&["/id"]) },
        &["id", "x"],
    );
    for marker in ["$serde_json::private::RawValue", "$serde_json::private::Number"] {
        let nested = see_json(&namer, &format!(r#"{{"id":{{"{marker}":"1"}},"{marker}":"2"}}"#));
        assert!(nested.row().contains(&format!(r#"x=Json("{{\"{marker}\":\"2\"}}")"#)), "{}", nested.row());
        assert_ne!(nested.named.fingerprint, see_json(&namer, r#"{"id":1}"#).named.fingerprint);
    }
}

#[test]
fn p9_the_key_is_within_the_row_key_if_its_parts_are() {
    let key = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
    let plain = namer(rules(&["/id", "/k"]), &["id", "k", "v"]);
    assert!(plain.key_within_row_key(&key(&["k", "id"])));
    assert!(plain.key_within_row_key(&key(&["k", "id", "v"])));
    assert!(!plain.key_within_row_key(&key(&["id"])));
    assert!(!plain.key_within_row_key(&[]));
    let mapped = [("k".to_owned(), ColumnSource::Pointer(Pointer::parse("/other").unwrap()))].into();
    let mapped = namer(NamingRules { columns: mapped, ..rules(&["/k"]) }, &["id", "k"]);
    assert!(!mapped.key_within_row_key(&key(&["k"])));
    let from_key = [("id".to_owned(), ColumnSource::KafkaKey)].into();
    let spec = KeySpec::new(vec![Part::KafkaKey]).unwrap();
    let from_key = namer(NamingRules { columns: from_key, ..NamingRules::new(spec) }, &["id"]);
    assert!(from_key.key_within_row_key(&key(&["id"])));
    assert!(!namer(NamingRules::new(KeySpec::idempotency_key()), &["id"]).key_within_row_key(&key(&["id"])));
}

#[test]
fn everything_that_does_not_fit_is_said_at_once() {
    let rules = NamingRules {
        columns: [
            ("nope".to_owned(), ColumnSource::Arrival),
            ("must".to_owned(), ColumnSource::Default),
            ("id".to_owned(), ColumnSource::Constant(Constant::Json("{".into()))),
        ]
        .into(),
        unknown_fields: UnknownFields::Column("id".into()),
        delete_when: Some(DeleteWhen { pointer: Pointer::member("d"), equals: "yes".into() }),
        row_key: vec!["gone".into(), "must".into()],
        max_depth: 0,
        ..rules(&["/id"])
    };
    let hasher = hasher(&rules.key);
    let misfits = Namer::new(rules, encoder(&["id", "must"], &[]), hasher).unwrap_err();
    assert_eq!(misfits.len(), 8, "{misfits:#?}");
}

#[test]
fn one_thread_may_name_for_several_routes_in_turn() {
    let (a, b) = (namer(rules(&["/id"]), &["id", "x", "y"]), namer(rules(&["/k"]), &["k"]));
    for _ in 0..3 {
        assert_eq!(see_json(&a, r#"{"y":1,"id":2,"x":3}"#).row(), r#"id=Json("2");x=Json("3");y=Json("1");"#);
        assert_eq!(see_json(&b, r#"{"k":4}"#).row(), r#"k=Json("4");"#);
        assert_eq!(see_json(&a, r#"{"x":3}"#).row, "");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic_and_make_one_record(payload in prop::collection::vec(any::<u8>(), 0..80)) {
        let namer = namer(NamingRules { unknown_fields: UnknownFields::Column("x".into()), ..rules(&["/id"]) }, &["id", "x"]);
        let mut chunk = Chunk::default();
        namer.name(&Record::new(&payload, 0), &mut chunk);
        prop_assert_eq!(chunk.records.len(), 1);
    }

    #[test]
    fn arbitrary_json_like_text_never_panics(payload in r#"(\{|\}|\[|\]|"id"|"a"|"\\u00|\\|"|:|,|1|-|e9| |null|\\ud83d){0,24}"#) {
        let pointers = DigestOver::Pointers(vec![Pointer::parse("/a/0/a").unwrap()]);
        let namer = namer(NamingRules { digest: pointers, ..rules(&["/id/a"]) }, &["id", "a"]);
        let mut chunk = Chunk::default();
        namer.name(&Record::new(payload.as_bytes(), 0), &mut chunk);
        prop_assert_eq!(chunk.records.len(), 1);
    }

    /// Whatever the order of members, every column gets its own value and the name stays.
    #[test]
    fn members_are_found_in_any_order(order in Just((0..8).collect::<Vec<usize>>()).prop_shuffle(), absent in 1_usize..8) {
        let columns = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];
        let namer = namer(rules(&["/c0"]), &columns);
        let members: Vec<String> = order.iter().filter(|at| **at != absent).map(|at| format!("\"c{at}\":{at}")).collect();
        let seen = see_json(&namer, &format!("{{{}}}", members.join(",")));
        let expected: String = (0..8)
            .map(|at| if at == absent { format!("c{at}=Missing;") } else { format!("c{at}=Json(\"{at}\");") })
            .collect();
        prop_assert_eq!(seen.row(), expected);
    }
}
