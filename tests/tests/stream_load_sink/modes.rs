//! Upserts, versions, deletes; types.

use std::collections::BTreeMap;

use adapters::{
    sink::{Mode, OnRefused, RowKind, RowOutcome},
    stream_load::Dialect,
};
use oncegate_tests::servers::stream_load::{Model, TableSpec};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::rig::{BOTH, Fields, Rig, keyed, rows_of};

#[tokio::test]
async fn upsert_ends_in_the_last_write_and_deletes() {
    use RowKind::{Delete, Write};
    for dialect in BOTH {
        let mut rig = Rig::new(dialect, &rows_of(Model::Keyed, false), keyed(Mode::Upsert)).await;
        let outcomes = rig
            .deliver_kinds(
                &[
                    (Write, &[("id", "1"), ("must", "1"), ("note", "\"a\"")]),
                    (Write, &[("id", "1"), ("must", "2")]),
                    (Write, &[("id", "2"), ("must", "1")]),
                    (Delete, &[("id", "2")]),
                    (Delete, &[("id", "3")]),
                    (Write, &[("id", "3"), ("must", "5"), ("note", "null")]),
                ],
                OnRefused::Report,
            )
            .await
            .unwrap();
        assert_eq!(outcomes[0], RowOutcome::Written);
        assert_eq!(
            rig.server.rows(&rig.table, &["id", "v", "note", "must"]),
            ["1\t0\tnone\t2", "3\t0\t\\N\t5"]
        );
        rig.deliver_kinds(&[(Delete, &[("id", "1")])], OnRefused::Report).await.unwrap();
        assert_eq!(rig.ids(), ["3"]);
    }
}

/// Random writes and deletes of a few keys, behind answers that are lost: as the model says, for each dialect and mode.
#[tokio::test]
async fn keyed_tables_end_in_their_model_behind_lost_answers() {
    for dialect in BOTH {
        for mode in [Mode::Upsert, Mode::UpsertIfNewer] {
            let newer = mode == Mode::UpsertIfNewer;
            let mut rig = Rig::new(dialect, &rows_of(Model::Keyed, newer), keyed(mode)).await;
            if let Some(stand_in) = rig.server.stand_in() {
                stand_in.cluster().chaos(5, 4);
            }
            let deletes = !(newer && dialect == Dialect::StarRocks);
            let mut random = StdRng::seed_from_u64(23);
            let mut model: BTreeMap<u64, (u64, bool)> = BTreeMap::new();
            // Each version once, in any order.
            let mut versions: Vec<u64> = (0..900).collect();
            for at in (1..versions.len()).rev() {
                versions.swap(at, random.random_range(0..=at));
            }
            for batch in versions.chunks(30) {
                let rows: Vec<(RowKind, [String; 4])> = batch
                    .iter()
                    .map(|&version| {
                        let (id, gone) = (random.random_range(0..40), deletes && random.random_bool(0.3));
                        let there = model.entry(id).or_insert((version, gone));
                        if !newer || version > there.0 {
                            *there = (version, gone);
                        }
                        let kind = if gone { RowKind::Delete } else { RowKind::Write };
                        (
                            kind,
                            [id.to_string(), version.to_string(), format!("\"v{version}\""), "1".to_owned()],
                        )
                    })
                    .collect();
                let fields: Vec<(RowKind, [(&str, &str); 4])> = rows
                    .iter()
                    .map(|(kind, [id, v, note, must])| {
                        (
                            *kind,
                            [
                                ("id", id.as_str()),
                                ("v", v.as_str()),
                                ("note", note.as_str()),
                                ("must", must.as_str()),
                            ],
                        )
                    })
                    .collect();
                let fields: Vec<(RowKind, Fields<'_>)> =
                    fields.iter().map(|(kind, fields)| (*kind, &fields[..])).collect();
                rig.deliver_patiently(&fields).await;
            }
            tokio::time::sleep(std::time::Duration::from_millis(400)).await;
            let mut expected: Vec<String> = model
                .iter()
                .filter(|(_, (_, gone))| !gone)
                .map(|(id, (version, _))| format!("{id}\tv{version}"))
                .collect();
            expected.sort();
            assert_eq!(rig.server.rows(&rig.table, &["id", "note"]), expected, "{dialect:?} {mode:?}");
        }
    }
}

#[tokio::test]
async fn what_a_mode_cannot_do_is_said() {
    for dialect in BOTH {
        let rig = Rig::plain(dialect, |_| {}).await;
        let delete = rig.encode(RowKind::Delete, &[("id", "1")]).unwrap_err();
        assert!(delete.reason.contains("only appended"), "{delete}");
        let null = rig.encode(RowKind::Write, &[("id", "null")]).unwrap_err();
        assert!(null.column == "id" && null.reason.contains("cannot be null"), "{null}");
        let missing = rig.encode(RowKind::Write, &[]).unwrap_err();
        assert!(missing.reason.contains("is needed"), "{missing}");
        let newer = Rig::new(dialect, &rows_of(Model::Keyed, true), keyed(Mode::UpsertIfNewer)).await;
        let version = newer.encode(RowKind::Write, &[("id", "1"), ("must", "1")]).unwrap_err();
        assert!(version.column == "v", "{version}");
        let delete = newer.encode(RowKind::Delete, &[("id", "1"), ("v", "5")]);
        match dialect {
            Dialect::StarRocks => {
                assert!(delete.unwrap_err().reason.contains("does not delete under a condition"))
            }
            Dialect::Doris => drop(delete.unwrap()),
        }
    }
}

/// Type (of StarRocks, and of Doris where it has another), JSON, and the text that the load holds.
const VALUES: &[(&str, &str, &str, &str)] = &[
    ("boolean", "", "true", "true"),
    ("tinyint", "", "-128", "-128"),
    ("bigint", "", "\"-9223372036854775808\"", "-9223372036854775808"),
    ("largeint", "", "170141183460469231731687303715884105727", "170141183460469231731687303715884105727"),
    ("double", "", "0.30000000000000004", "0.30000000000000004"),
    ("float", "", "0.1", "0.1"),
    (
        "decimal(38, 10)",
        "",
        "1234567890123456789012345678.0123456789",
        "1234567890123456789012345678.0123456789",
    ),
    ("varchar(60)", "", "\"a\\\"\\t\\\\ \\u00e9\\ud83d\\ude00\"", "a\"\t\\ é😀"),
    ("date", "", "\"9999-12-31\"", "9999-12-31"),
    ("datetime", "datetime(6)", "\"2024-02-29T12:00:00.123456Z\"", "2024-02-29 12:00:00.123456"),
    ("array<bigint>", "", "[9007199254740993, null]", "[\"9007199254740993\",null]"),
    ("map<varchar(9),decimal(9,1)>", "", "{\"a\": 1.5}", "{\"a\":\"1.5\"}"),
    (
        "struct<a int,b varchar(9)>",
        "struct<a:int,b:varchar(9)>",
        "{\"b\":\"x\",\"a\":1}",
        "{\"a\":\"1\",\"b\":\"x\"}",
    ),
    ("json", "", "{\"k\": [1, 1.5, \"x\"]}", "{\"k\":[1,1.5,\"x\"]}"),
];

/// In the stand-in's own words: a real cluster prints nested types in its way, and is asked for the rest.
#[tokio::test]
async fn every_type_goes_out_exactly() {
    for dialect in BOTH {
        let names: Vec<&'static str> =
            vec!["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9", "c10", "c11", "c12", "c13"];
        let mut columns = vec![("id", "bigint", "NOT NULL")];
        columns.extend(VALUES.iter().zip(&names).map(|((starrocks, doris, ..), name)| {
            let kind = if dialect == Dialect::Doris && !doris.is_empty() { doris } else { starrocks };
            (*name, *kind, "NULL")
        }));
        if dialect == Dialect::StarRocks {
            columns.push(("raw", "varbinary(9)", "NULL"));
        }
        columns.push(("made", "datetime", "NULL DEFAULT CURRENT_TIMESTAMP"));
        let spec = TableSpec { columns, model: Model::Duplicate, key: 1, sequence: None };
        let mut rig = Rig::new(dialect, &spec, |_| {}).await;
        assert!(rig.encoder.columns().iter().all(|column| column.name != "made"), "the table makes it");
        let mut fields = vec![("id", "1")];
        fields.extend(VALUES.iter().zip(&names).map(|((.., json, _), name)| (*name, *json)));
        fields.push(("raw", "\"\\\\x00ff\""));
        rig.deliver(&[&fields]).await.unwrap();
        for ((kind, _, json, text), name) in VALUES.iter().zip(&names) {
            let nested = kind.contains('<') || *kind == "json" || *kind == "boolean";
            if rig.server.stand_in().is_some() || !nested {
                assert_eq!(rig.server.rows(&rig.table, &[name]), [*text], "{dialect:?} {kind} {json}");
            }
        }
        if dialect == Dialect::StarRocks && rig.server.stand_in().is_some() {
            assert_eq!(
                rig.server.rows(&rig.table, &["raw"]),
                ["00FF"],
                "as to_binary(.., 'hex') is given it"
            );
        }
    }
}
