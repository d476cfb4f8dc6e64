//! Change events of Debezium, in the shapes that its documentation gives for each connector.

use super::*;
use crate::format::{
    Content, Debezium, Deletes, Encoding, Format, Member, Semantic, Snapshots, Tables, Tombstones,
    Unavailable, Unit, Version,
};

const TOPIC: &str = "dbserver1.inventory.customers";

/// Rules of a route that takes `debezium`, with row key `id` and version column `version`.
fn cdc(debezium: Debezium) -> NamingRules {
    NamingRules {
        format: Format {
            encoding: Encoding::Json,
            content: Content::Debezium(debezium),
            ..Format::default()
        },
        row_key: vec!["id".into()],
        version: Some("version".into()),
        ..NamingRules::new(KeySpec::new(vec![Part::Debezium(Member::Position)]).unwrap())
    }
}

fn change<'a>(payload: Option<&'a str>, key: Option<&'a str>, offset: i64) -> Record<'a> {
    let key = key.map(str::as_bytes);
    let origin = KafkaOrigin { topic: TOPIC, partition: 0, offset, key, timestamp_ms: Some(1), shard: 0 };
    Record { payload: payload.map(str::as_bytes), kafka: Some(origin), ..Record::new(b"", 5_000_999) }
}

fn postgres(op: &str, before: &str, after: &str, lsn: u64, more: &str) -> String {
    format!(
        r#"{{"before":{before},"after":{after},"source":{{"version":"3.0.0.Final","connector":"postgresql","name":"dbserver1","ts_ms":1559033904863,"snapshot":"false","db":"shop","sequence":"[\"24023119\",\"{lsn}\"]","ts_us":1559033904863769,"ts_ns":1559033904863769000,"schema":"inventory","table":"customers","txId":555,"lsn":{lsn},"xmin":null{more}}},"transaction":null,"op":"{op}","ts_ms":1559033904999,"ts_us":1559033904999123,"ts_ns":1559033904999123456}}"#
    )
}

const ANNE: &str = r#"{"id":1004,"name":"Anne"}"#;
const KEY: &str = r#"{"id":1004}"#;

#[test]
fn writes_take_after_and_the_version_of_the_position() {
    let namer = namer(cdc(Debezium::new(false)), &["id", "name", "version"]);
    for (op, before) in [("c", "null"), ("u", ANNE)] {
        let seen = see(&namer, &change(Some(&postgres(op, before, ANNE, 24_023_128, "")), Some(KEY), 1));
        assert_eq!(
            seen.row(),
            r#"id=Json("1004");name=Json("\"Anne\"");version=Text("200000000000024023128");"#
        );
        assert_eq!(seen.named.kind, RowKind::Write);
    }
}

#[test]
fn snapshot_rows_lose_against_streamed_ones() {
    let version = |debezium: Debezium, op: &str, lsn: u64, more: &str| {
        let namer = namer(cdc(debezium), &["id", "name", "version"]);
        let seen = see(&namer, &change(Some(&postgres(op, "null", ANNE, lsn, more)), Some(KEY), 1));
        seen.row().rsplit_once("Text(").unwrap().1.to_owned()
    };
    let lose = || Debezium::new(false);
    let by_position = || Debezium { snapshots: Snapshots::ByPosition, ..Debezium::new(false) };
    // A transaction that began before the snapshot and committed after it has changes with lower positions.
    assert!(version(lose(), "r", 900, "") < version(lose(), "u", 100, ""));
    assert!(version(lose(), "r", 900, "") < version(lose(), "r", 901, ""));
    assert!(version(by_position(), "r", 900, "") > version(by_position(), "u", 100, ""));
    assert!(version(by_position(), "r", 900, "") < version(by_position(), "u", 900, ""));
    for word in
        ["true", "first", "first_in_data_collection", "last_in_data_collection", "last", "incremental"]
    {
        let event = postgres("c", "null", ANNE, 900, "")
            .replace(r#""snapshot":"false""#, &format!(r#""snapshot":"{word}""#));
        let namer = namer(cdc(lose()), &["id", "name", "version"]);
        let seen = see(&namer, &change(Some(&event), Some(KEY), 1));
        assert!(seen.row().contains("Text(\"1000"), "{word}: {}", seen.row());
    }
}

#[test]
fn a_delete_has_a_version_and_the_row_key_of_the_record_key() {
    for deletes in [Deletes::Row, Deletes::Mark] {
        let mut rules = cdc(Debezium { deletes, ..Debezium::new(false) });
        rules.columns.insert("gone".into(), ColumnSource::Debezium(Member::Deleted));
        let namer = namer(rules, &["id", "name", "gone", "version"]);
        let expected =
            r#"id=Json("1004");name=Json("null");gone=Json("true");version=Text("200000000000000000007");"#;
        // REPLICA IDENTITY DEFAULT sends the key alone, NOTHING not even that.
        for before in [r#"{"id":1004,"name":null}"#, r#"{"id":null,"name":null}"#] {
            let seen = see(&namer, &change(Some(&postgres("d", before, "null", 7, "")), Some(KEY), 1));
            assert_eq!(seen.row(), expected, "{before}");
            let kind = if deletes == Deletes::Row { RowKind::Delete } else { RowKind::Write };
            assert_eq!(seen.named.kind, kind);
        }
        let enveloped = r#"{"schema":{"type":"struct","fields":[{"type":"int32","optional":false,"field":"id"}],"optional":false,"name":"dbserver1.inventory.customers.Key"},"payload":{"id":1004}}"#;
        let seen = see(&namer, &change(Some(&postgres("d", "null", "null", 7, "")), Some(enveloped), 1));
        assert_eq!(seen.row_key, r#"Json("1004");"#);
    }
}

#[test]
fn a_tombstone_behind_a_delete_is_counted_and_means_nothing() {
    let namer_of =
        |tombstones| namer(cdc(Debezium { tombstones, ..Debezium::new(false) }), &["id", "name", "version"]);
    for payload in [None, Some("null"), Some(r#"{"schema":null,"payload":null}"#)] {
        let seen = see(&namer_of(Tombstones::Skip), &change(payload, Some(KEY), 1));
        assert_eq!(seen.problem(), &Problem::Passed);
        assert_eq!(seen.named.fingerprint, None);
        let seen = see(&namer_of(Tombstones::Delete), &change(payload, Some(KEY), 1));
        assert_eq!((seen.row_key.as_str(), seen.named.kind), (r#"Json("1004");"#, RowKind::Delete));
        let seen = see(&namer_of(Tombstones::Reject), &change(payload, Some(KEY), 1));
        assert!(seen.bad().contains("tombstones"));
    }
}

#[test]
fn truncates_messages_and_what_is_no_envelope_are_refused_with_the_way_out() {
    let namer = namer(cdc(Debezium::new(false)), &["id", "name", "version"]);
    let bad = |payload: &str| see(&namer, &change(Some(payload), Some(KEY), 1)).bad().to_owned();
    assert!(bad(&postgres("t", "null", "null", 1, "")).contains("truncates a whole table"));
    assert!(bad(&postgres("m", "null", "null", 1, "")).contains("message"));
    assert!(bad(&postgres("x", "null", ANNE, 1, "")).contains("none of c, u, d, r"));
    assert!(bad(&postgres("c", "null", "null", 1, "")).contains("\"after\" is missing"));
    assert!(bad(ANNE).contains("debezium-flat"));
    assert!(bad(r#"{"op":"c","after":{"id":1}}"#).contains("\"source\" is missing"));
    assert!(bad("[1]").contains("no JSON object"));
    assert!(bad("{").contains("not valid JSON"));
    assert!(bad(&postgres("c", "null", r#"{"id":1,"id":2}"#, 1, "")).contains("\"id\" comes twice"));
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(
        bad(&postgres("c", "null", &format!(r#"{{"id":1,"name":{deep}}}"#), 1, "")).contains("nested deeper")
    );
    let deep_schema = format!(r#"{{"schema":{{"type":"struct","fields":{deep}}},"payload":{{"op":"c"}}}}"#);
    assert!(!bad(&deep_schema).is_empty());
    let mut broken = postgres("c", "null", ANNE, 1, "").into_bytes();
    broken[20] = 0xff;
    let origin = KafkaOrigin { topic: TOPIC, ..kafka(Some(KEY.as_bytes())) };
    let record = Record { payload: Some(&broken), kafka: Some(origin), ..Record::new(b"", 0) };
    assert!(see(&namer, &record).bad().contains("not UTF-8 at byte 20"));
}

#[test]
fn changes_of_another_table_are_refused_unless_they_are_named() {
    let bad = |tables: Tables, event: &str| {
        let namer = namer(cdc(Debezium { tables, ..Debezium::new(false) }), &["id", "name", "version"]);
        let seen = see(&namer, &change(Some(event), Some(KEY), 1));
        seen.named.problem.map(|problem| problem.to_string())
    };
    let other = postgres("c", "null", ANNE, 1, "").replace(r#""table":"customers""#, r#""table":"orders""#);
    let said = bad(Tables::Topic, &other).expect("refused");
    assert!(
        said.contains("shop.inventory.orders") && said.contains(TOPIC) && said.contains("tables"),
        "{said}"
    );
    assert_eq!(bad(Tables::Any, &other), None);
    for name in ["orders", "inventory.orders", "shop.inventory.orders"] {
        assert_eq!(bad(Tables::Only(vec![name.into()]), &other), None);
    }
    for name in ["ders", "public.orders", "customers"] {
        assert!(bad(Tables::Only(vec![name.into()]), &other).is_some(), "{name}");
    }
}

#[test]
fn copies_have_one_key_whatever_the_connector_says_of_itself_and_other_changes_have_others() {
    let namer = namer(cdc(Debezium::new(false)), &["id", "name", "version"]);
    let of = |event: &str, key: &str, offset: i64| {
        let seen = see(&namer, &change(Some(event), Some(key), offset));
        assert_eq!(seen.named.problem, None);
        (seen.named.fingerprint.unwrap(), seen.named.digest)
    };
    let event = postgres("c", "null", ANNE, 7, "");
    let first = of(&event, KEY, 1);
    // Sent again after a restart: another processing time, another version of the connector, another offset.
    let again = event.replace("1559033904999", "1559033999999").replace("3.0.0.Final", "3.0.1.Final");
    assert_eq!(first, of(&again, " {\"id\" : 1004} ".trim(), 9));
    let others = [
        of(&postgres("c", "null", ANNE, 8, ""), KEY, 1),
        of(&postgres("u", "null", ANNE, 7, ""), KEY, 1),
        // Rows of one COPY have one position.
        of(&event.replace("1004", "1005"), r#"{"id":1005}"#, 1),
        of(&event.replace("\"name\":\"dbserver1\"", "\"name\":\"dbserver2\""), KEY, 1),
        of(&event.replace("\"schema\":\"inventory\"", "\"schema\":\"archive\""), KEY, 1),
        of(&event.replace("\"db\":\"shop\"", "\"db\":\"shop2\""), KEY, 1),
    ];
    let mut keys: Vec<_> = others.iter().map(|other| other.0).chain([first.0]).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 7);
    // A key that is no JSON is taken as it is.
    assert_ne!(of(&event, "1004", 1).0, of(&event, "1005", 1).0);
}

#[test]
fn a_version_by_time_is_as_fine_as_the_source_and_offsets_decide_among_equals() {
    let namer =
        namer(cdc(Debezium { version: Version::TsMs, ..Debezium::new(false) }), &["id", "name", "version"]);
    let version = |event: &str, offset: i64| {
        let seen = see(&namer, &change(Some(event), Some(KEY), offset));
        seen.row().rsplit_once("Text(").unwrap().1.to_owned()
    };
    let event = postgres("u", "null", ANNE, 7, "");
    let finer = event.replace("1559033904863769000", "1559033904863769001");
    let coarse = event.replace(r#""ts_us":1559033904863769,"ts_ns":1559033904863769000,"#, "");
    assert!(version(&event, 9) < version(&finer, 1));
    assert!(version(&event, 9) < version(&event, 10));
    assert!(version(&coarse, 10) < version(&event, 1));
}

#[test]
fn connectors_without_a_known_order_need_a_version_by_time() {
    let event = r#"{"before":null,"after":{"id":1,"name":"a"},"source":{"version":"3.0.0.Final","connector":"vitess","name":"dbserver1","ts_ms":1,"db":"","table":"customers","vgtid":"[{\"keyspace\":\"k\",\"gtid\":\"x\"}]"},"op":"c"}"#;
    let by_position = namer(cdc(Debezium::new(false)), &["id", "name", "version"]);
    let seen = see(&by_position, &change(Some(event), Some(r#"{"id":1}"#), 1));
    assert!(seen.bad().contains("vitess") && seen.bad().contains("ts_ms"), "{}", seen.bad());
    let by_time =
        namer(cdc(Debezium { version: Version::TsMs, ..Debezium::new(false) }), &["id", "name", "version"]);
    let of = |event: &str| {
        let seen = see(&by_time, &change(Some(event), Some(r#"{"id":1}"#), 1));
        seen.row();
        seen.named.fingerprint.unwrap()
    };
    assert_ne!(of(event), of(&event.replace("\\\"x\\\"", "\\\"y\\\"")));
    assert_eq!(of(event), of(&event.replace("3.0.0", "3.0.1").replace("\"ts_ms\":1,", "\"ts_ms\":2,")));
}

#[test]
fn flattened_events_keep_what_add_fields_kept() {
    let mut rules = cdc(Debezium::new(true));
    rules.columns.insert("op".into(), ColumnSource::Debezium(Member::Op));
    let namer = namer(rules, &["id", "name", "__own", "op", "version"]);
    let event = r#"{"id":1004,"name":"Anne","__own":5,"__op":"u","__table":"customers","__lsn":24023128,"__source_ts_ms":1559033904863,"__ts_ms":7,"__deleted":"false"}"#;
    let seen = see(&namer, &change(Some(event), Some(KEY), 1));
    assert_eq!(
        seen.row(),
        r#"id=Json("1004");name=Json("\"Anne\"");__own=Json("5");op=Text("u");version=Text("200000000000024023128");"#
    );
    let deleted = r#"{"id":1004,"name":null,"__own":null,"__lsn":24023129,"__deleted":"true"}"#;
    let seen = see(&namer, &change(Some(deleted), Some(KEY), 1));
    assert_eq!(seen.named.kind, RowKind::Delete);
    assert!(seen.row().contains("200000000000024023129"));
    let mysql = r#"{"id":1004,"name":"Anne","__own":null,"__op":"c","__source_file":"mysql-bin.000003","__source_pos":154,"__source_row":0}"#;
    assert!(
        see(&namer, &change(Some(mysql), Some(KEY), 1)).row().contains("2000000000000000000030000000000")
    );
    let bare = see(&namer, &change(Some(ANNE), Some(KEY), 1));
    assert!(bare.problem().to_string().contains("add.fields"), "{:?}", bare.problem());
    // A tombstone is the delete itself; it has no version, which a sink that needs one refuses.
    let seen = see(&namer, &change(None, Some(KEY), 1));
    assert_eq!((seen.named.kind, seen.row_key.as_str()), (RowKind::Delete, r#"Json("1004");"#));
}

#[test]
fn declared_types_are_read_from_the_schema() {
    let schema = r#"{"type":"struct","fields":[
        {"type":"struct","optional":true,"name":"dbserver1.inventory.customers.Value","field":"before","fields":[]},
        {"type":"struct","optional":true,"name":"dbserver1.inventory.customers.Value","field":"after","fields":[
            {"type":"int32","optional":false,"field":"id"},
            {"type":"bytes","optional":true,"name":"org.apache.kafka.connect.data.Decimal","version":1,"parameters":{"scale":"2","connect.decimal.precision":"10"},"field":"price"},
            {"type":"struct","optional":true,"name":"io.debezium.data.VariableScaleDecimal","fields":[{"type":"int32","field":"scale"},{"type":"bytes","field":"value"}],"field":"any"},
            {"type":"int64","optional":true,"name":"io.debezium.time.MicroTimestamp","version":1,"field":"at"},
            {"type":"int32","optional":true,"name":"io.debezium.time.Date","version":1,"field":"day"},
            {"type":"string","optional":true,"name":"io.debezium.data.Json","version":1,"field":"doc"},
            {"type":"array","optional":true,"items":{"type":"int32","name":"io.debezium.time.Date"},"field":"days"},
            {"type":"struct","optional":true,"name":"io.debezium.data.geometry.Point","fields":[{"type":"bytes","field":"wkb"}],"field":"spot"},
            {"type":"map","optional":true,"keys":{"type":"string"},"values":{"type":"string"},"field":"tags"},
            {"type":"bytes","optional":true,"field":"bin_raw"}
        ]}],"optional":false,"name":"dbserver1.inventory.customers.Envelope"}"#;
    let after = r#"{"id":1,"price":"MDk=","any":{"scale":3,"value":"/w=="},"at":1709251199123456,"day":19782,"doc":"{\"a\":[1.50]}","days":[0,null,-1],"spot":{"wkb":"AQ=="},"tags":{"a":"b"},"bin_raw":"AAE="}"#;
    let enveloped = format!(r#"{{"schema":{schema},"payload":{}}}"#, postgres("c", "null", after, 7, ""));
    let columns = ["id", "price", "any", "at", "day", "doc", "days", "spot", "tags", "bin_raw", "version"];
    let by_schema = namer(cdc(Debezium::new(false)), &columns);
    let seen = see(&by_schema, &change(Some(&enveloped), Some(r#"{"id":1}"#), 1));
    assert_eq!(
        seen.row(),
        concat!(
            r#"id=Json("1");price=Json("\"123.45\"");any=Json("\"-0.001\"");at=Json("\"2024-02-29T23:59:59.123456\"");"#,
            r#"day=Json("\"2024-02-29\"");doc=Json("{\"a\":[1.50]}");days=Json("[\"1970-01-01\",null,\"1969-12-31\"]");"#,
            r#"spot=Json("{\"wkb\":\"AQ==\"}");tags=Json("{\"a\":\"b\"}");bin_raw=Json("\"AAE=\"");"#,
            r#"version=Text("200000000000000000007");"#
        )
    );
    // Without a schema the route may declare them.
    let types = [
        ("price", Semantic::Decimal { scale: 2 }),
        ("any", Semantic::VariableScaleDecimal),
        ("at", Semantic::Timestamp(Unit::Micros)),
        ("day", Semantic::Date),
        ("doc", Semantic::Json),
    ];
    let types = types.into_iter().map(|(name, semantic)| (name.to_owned(), semantic)).collect();
    let declared = namer(cdc(Debezium { types, ..Debezium::new(false) }), &columns);
    let bare =
        postgres("c", "null", &after.replace("[0,null,-1]", r#"["1970-01-01",null,"1969-12-31"]"#), 7, "");
    assert_eq!(see(&declared, &change(Some(&bare), Some(r#"{"id":1}"#), 1)).row(), seen.row());
    // A value that does not fit is named by its member, never shown.
    let broken = enveloped.replace("\"MDk=\"", "\"secret!\"");
    let seen = see(&by_schema, &change(Some(&broken), Some(r#"{"id":1}"#), 1));
    assert!(seen.bad().contains("\"price\"") && !seen.bad().contains("secret"), "{}", seen.bad());
}

#[test]
fn values_that_were_not_sent_never_overwrite() {
    let event =
        |value: &str| postgres("u", "null", &format!(r#"{{"id":1004,"big":{value},"dflt":{value}}}"#), 7, "");
    let of = |unavailable, value: &str| {
        let namer =
            namer(cdc(Debezium { unavailable, ..Debezium::new(false) }), &["id", "big", "dflt", "version"]);
        see(&namer, &change(Some(&event(value)), Some(KEY), 1))
    };
    for value in [
        "\"__debezium_unavailable_value\"",
        "\"X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==\"",
        "[\"__debezium_unavailable_value\"]",
        "{\"__debezium_unavailable_value\":\"__debezium_unavailable_value\"}",
        "[95,95,100,101,98,101,122,105,117,109,95,117,110,97,118,97,105,108,97,98,108,101,95,118,97,108,117,101]",
    ] {
        let rejected = of(Unavailable::Reject, value);
        assert!(
            rejected.bad().contains("/big") && rejected.bad().contains("REPLICA IDENTITY FULL"),
            "{}",
            rejected.bad()
        );
        let kept = of(Unavailable::Keep, value);
        assert!(kept.bad().contains("\"big\"") && kept.bad().contains("default"), "{}", kept.bad());
    }
    let namer = namer(
        cdc(Debezium { unavailable: Unavailable::Keep, ..Debezium::new(false) }),
        &["id", "dflt", "version"],
    );
    let event = postgres("u", "null", r#"{"id":1004,"dflt":"__debezium_unavailable_value"}"#, 7, "");
    let seen = see(&namer, &change(Some(&event), Some(KEY), 1));
    assert_eq!(seen.row(), r#"id=Json("1004");dflt=Missing;version=Text("200000000000000000007");"#);
}

#[test]
fn each_connectors_envelope_has_a_version() {
    let namer =
        namer(cdc(Debezium { tables: Tables::Any, ..Debezium::new(false) }), &["id", "name", "version"]);
    for (source, digits) in [
        (
            r#"{"version":"2.7.0","connector":"mysql","name":"dbserver1","ts_ms":1,"snapshot":"false","db":"inventory","sequence":null,"table":"customers","server_id":223344,"gtid":null,"file":"mysql-bin.000003","pos":484,"row":1,"thread":7,"query":null}"#,
            "200000000000000000003000000000000000004840000000001",
        ),
        (
            r#"{"version":"2.7.0","connector":"sqlserver","name":"server1","ts_ms":1,"snapshot":"false","db":"testDB","sequence":null,"schema":"dbo","table":"customers","change_lsn":"00000027:00000758:0003","commit_lsn":"00000027:00000758:0005","event_serial_no":"1"}"#,
            "20000000010977524214923269000000001097752421492326700000000000000000001",
        ),
        (
            r#"{"version":"2.7.0","connector":"oracle","name":"server1","ts_ms":1,"ts_us":1,"snapshot":"false","db":"FREE","schema":"DEBEZIUM","table":"CUSTOMERS","txId":"6.28.807","scn":"2122185","commit_scn":"2122185","rs_id":"001234.00012345.0124","ssn":1,"redo_thread":1,"user_name":"u"}"#,
            "2",
        ),
        (
            r#"{"version":"2.7.0","connector":"mongodb","name":"fulfillment","ts_ms":1558965508000,"snapshot":"false","db":"inventory","rs":"rs0","collection":"customers","ord":31,"h":1546547425148721999}"#,
            "20000000155896550800000000000000000000031",
        ),
        (
            r#"{"version":"2.7.0","connector":"db2","name":"server1","ts_ms":1,"snapshot":"false","db":"testdb","schema":"S","table":"CUSTOMERS","change_lsn":"00000000:00000000:0053","commit_lsn":"00000000:00000000:0078"}"#,
            "2",
        ),
    ] {
        let event = format!(r#"{{"before":null,"after":{ANNE},"source":{source},"op":"u","ts_ms":5}}"#);
        let seen = see(&namer, &change(Some(&event), Some(KEY), 1));
        assert!(seen.row().contains(&format!("version=Text(\"{digits}")), "{}", seen.row());
    }
    // MongoDB's documents come as strings that hold JSON.
    let source = r#"{"connector":"mongodb","name":"f","ts_ms":5,"db":"d","collection":"c","ord":1}"#;
    let mongo = |after: &str, more: &str| format!(r#"{{"after":{after},"source":{source},"op":"u"{more}}}"#);
    let seen = see(&namer, &change(Some(&mongo(r#""{\"id\":1,\"name\":\"A\"}""#, "")), Some(KEY), 1));
    assert!(seen.row().starts_with(r#"id=Json("1");name=Json("\"A\"");"#), "{}", seen.row());
    let partial = mongo("null", r#","updateDescription":{"updatedFields":"{}"}"#);
    assert!(see(&namer, &change(Some(&partial), Some(KEY), 1)).bad().contains("change_streams_update_full"));
}

#[test]
fn event_time_may_be_the_sources() {
    let rules = NamingRules { event_time: EventTime::Debezium, ..cdc(Debezium::new(false)) };
    let namer = namer(rules, &["id", "name", "version"]);
    let seen = see(&namer, &change(Some(&postgres("c", "null", ANNE, 7, "")), Some(KEY), 1));
    assert_eq!(seen.named.event_ms, 1_559_033_904_863);
}

#[test]
fn columns_that_cannot_hold_a_version_are_refused_at_the_start() {
    #[derive(Debug)]
    struct Typed(Vec<Column>);
    impl Encode for Typed {
        fn columns(&self) -> &[Column] {
            &self.0
        }
        fn encode(
            &self,
            _: RowKind,
            _: &[Value<'_>],
            _: &mut Vec<u8>,
            _: &mut Vec<u8>,
        ) -> Result<(), BadValue> {
            Ok(())
        }
    }
    let built = |type_name: &str| {
        let column = |name: &str, type_name: &str| Column {
            name: name.into(),
            type_name: type_name.into(),
            nullable: true,
            has_default: false,
        };
        let encoder = Typed(vec![column("id", "bigint"), column("version", type_name)]);
        let rules = cdc(Debezium::new(false));
        let hasher = hasher(&rules.key);
        Namer::new(rules, Arc::new(encoder), hasher).map(drop)
    };
    for good in [
        "numeric",
        "numeric(80,0)",
        "text",
        "TEXT",
        "character varying",
        "varchar(100)",
        "character varying(71)",
    ] {
        assert!(built(good).is_ok(), "{good}");
    }
    for bad in ["bigint", "integer", "timestamp with time zone", "numeric(20,0)", "varchar(20)", "uuid"] {
        let misfits = built(bad).unwrap_err();
        assert!(misfits[0].what.contains("version") && misfits[0].what.contains(bad), "{misfits:?}");
    }
}

#[test]
fn raw_payloads_are_never_looked_into() {
    let format = Format { encoding: Encoding::Raw, ..Format::default() };
    let whole = |name: &str| (name.to_owned(), ColumnSource::Pointer(Pointer::parse("").unwrap()));
    let rules = NamingRules {
        format: format.clone(),
        columns: [whole("bin_payload"), whole("payload")].into(),
        ..NamingRules::new(KeySpec::new(vec![Part::KafkaKey]).unwrap())
    };
    let by_key = namer(rules, &["bin_payload", "payload", "other"]);
    let record = |payload: &'static [u8]| Record {
        payload: Some(payload),
        kafka: Some(kafka(Some(b"k"))),
        ..Record::new(b"", 0)
    };
    let seen = see(&by_key, &record(b"{not json"));
    assert_eq!(
        seen.row(),
        r#"bin_payload=Bytes([123, 110, 111, 116, 32, 106, 115, 111, 110]);payload=Text("{not json");other=Missing;"#
    );
    assert!(see(&by_key, &record(b"\xff\x00")).row().starts_with("bin_payload=Bytes([255, 0])"));
    assert_ne!(see(&by_key, &record(b"a")).named.digest, see(&by_key, &record(b"b")).named.digest);
    let rules = NamingRules { format, row_key: vec!["must".into()], ..rules_of_pointer() };
    let misfits = Namer::new(rules.clone(), encoder(&["must"], &["must"]), hasher(&rules.key)).unwrap_err();
    assert_eq!(misfits.len(), 2, "{misfits:?}");
}

fn rules_of_pointer() -> NamingRules {
    rules(&["/id"])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_event_panics_and_each_has_one_name(payload in "\\PC{0,60}", cut in 0..800usize, key in "\\PC{0,20}") {
        let namer = namer(cdc(Debezium::new(false)), &["id", "name", "version"]);
        let whole = postgres("c", "null", ANNE, 7, "");
        let cut = (0..=cut.min(whole.len())).rev().find(|at| whole.is_char_boundary(*at)).unwrap_or(0);
        let spliced = format!("{}{payload}{}", &whole[..cut], &whole[(cut + payload.len()).min(whole.len())..]);
        for payload in [payload.as_str(), &whole[..cut], &spliced] {
            see(&namer, &change(Some(payload), Some(&key), 1));
        }
    }
}
