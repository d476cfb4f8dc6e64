//! Tokens, partitions, modes, errors; what is lost and driven again.

use std::collections::BTreeMap;

use adapters::{
    clickhouse::Compression,
    sink::{Resolution, RowKind, RowOutcome, SinkError},
};
use oncegate_tests::proxy::http::{Cut, HttpProxy};

use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::rig::Rig;

const PLAIN: &str = "(id UInt64, v String DEFAULT '') ENGINE = MergeTree ORDER BY id SETTINGS non_replicated_deduplication_window = 1000";

/// P15: one batch, driven fifty times behind replies that are lost, is in once.
#[tokio::test]
async fn p15_one_batch_driven_fifty_times_is_in_once() {
    let mut rig = Rig::new(PLAIN, |_| {}).await;
    let proxy = HttpProxy::start(rig.server.port()).await;
    rig.config.url = rig.server.url_through(proxy.port());
    rig.again().await.unwrap();
    proxy.cut_inserts(50, Cut::Answer);
    let lost = rig.deliver(&[&[("id", "1")], &[("id", "2")]]).await.unwrap_err();
    assert!(matches!(lost, SinkError::Unknown { .. }), "{lost}");
    let mut asked = 1;
    let resolution = loop {
        match rig.resolve().await {
            Ok(resolution) => break resolution,
            Err(SinkError::Unknown { .. }) => asked += 1,
            Err(other) => panic!("{other}"),
        }
    };
    assert!(matches!(resolution, Resolution::Applied(_)));
    assert_eq!((asked, proxy.inserts(), rig.count().await), (50, 51, 2));
}

/// A batch is packed once, and sent as it is in the journal however often: also if it was made by a build or a configuration that packs
/// otherwise.
#[tokio::test]
async fn p15_a_body_is_packed_once_and_sent_again_byte_for_byte() {
    use Compression::{None, Zstd};
    let mut lengths = BTreeMap::new();
    for (made, now) in [(Zstd, Zstd), (None, Zstd), (Zstd, None)] {
        let mut rig = Rig::new(PLAIN, |_| {}).await;
        let proxy = HttpProxy::start(rig.server.port()).await;
        rig.config.url = rig.server.url_through(proxy.port());
        rig.config.compression = made;
        rig.again().await.unwrap();
        proxy.keep_inserts();
        proxy.cut_inserts(1, Cut::Request);
        proxy.cut_inserts(1, Cut::Answer);
        let ids: Vec<String> = (0..1000).map(|n| n.to_string()).collect();
        let rows: Vec<[(&str, &str); 2]> =
            ids.iter().map(|id| [("id", id.as_str()), ("v", "\"a note\"")]).collect();
        let fields: Vec<&[(&str, &str)]> = rows.iter().map(|row| &row[..]).collect();
        let lost = rig.deliver(&fields).await.unwrap_err();
        assert!(matches!(lost, SinkError::Unknown { .. }), "{lost}");
        let journaled: Vec<u8> =
            rig.book().query_row("SELECT body FROM oncegate_journal_parts", [], |row| row.get(0)).unwrap();
        rig.config.compression = now;
        rig.again().await.unwrap();
        assert_eq!((rig.state.sequence, rig.count().await), (1, 1000), "{made:?}, {now:?}");
        let kept = proxy.kept();
        assert_eq!(kept.len(), 3);
        for (head, body) in kept {
            assert_eq!(head.contains("content-encoding: zstd"), made == Zstd, "{head}");
            assert!(body == journaled, "{made:?}, {now:?}");
        }
        lengths.insert(made == Zstd, journaled.len());
        rig.deliver(&[&[("id", "5")]]).await.unwrap();
        assert_eq!(proxy.kept()[3].0.contains("content-encoding: zstd"), now == Zstd);
    }
    assert!(lengths[&true] < lengths[&false] / 2, "{lengths:?}");
}

/// A request that never reached the server, one that reached it in part or after it was given up, one whose answer was lost or came too
/// late.
#[tokio::test]
async fn p5_cut_connections_lose_and_double_nothing() {
    let mut rig = Rig::new(PLAIN, |_| {}).await;
    let proxy = HttpProxy::start(rig.server.port()).await;
    rig.config.request_timeout = std::time::Duration::from_secs(1);
    rig.config.url = rig.server.url_through(proxy.port());
    rig.again().await.unwrap();
    let mut ids: Vec<String> = Vec::new();
    for (at, cut) in [Cut::Request, Cut::InsideRequest, Cut::Answer, Cut::Late, Cut::Held]
        .into_iter()
        .cycle()
        .take(10)
        .enumerate()
    {
        proxy.cut_inserts(1, cut);
        let id = at.to_string();
        match rig.deliver(&[&[("id", &id)]]).await {
            Err(SinkError::Unknown { .. }) => {
                assert!(matches!(rig.resolve().await.unwrap(), Resolution::Applied(_)));
            }
            other => panic!("{cut:?}: {other:?}"),
        }
        ids.push(id);
        assert_eq!(rig.lines("id").await.len(), ids.len(), "{cut:?}");
    }
    // What came late is not seen yet.
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    assert_eq!(rig.lines("id").await.len(), 10);
    // A server that is not there at all has nothing of it.
    proxy.refuse(true);
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    let away = rig.deliver(&[&[("id", "99")]]).await.unwrap_err();
    assert!(matches!(away, SinkError::NotApplied { retry: true, .. }), "{away}");
    assert!(rig.session.connected(), "the book is there");
    proxy.refuse(false);
    rig.deliver(&[&[("id", "99")]]).await.unwrap();
    assert_eq!(rig.count().await, 11);
}

/// The engine drops equal blocks only by their token: rows that are equal to earlier ones are kept.
#[tokio::test]
async fn equal_rows_of_two_batches_are_two_rows() {
    let mut rig = Rig::new(PLAIN, |_| {}).await;
    for _ in 0..3 {
        rig.deliver(&[&[("id", "1"), ("v", "\"same\"")]]).await.unwrap();
    }
    assert_eq!(rig.count().await, 3);
}

#[tokio::test]
async fn two_routes_into_one_table_lose_nothing_of_each_other() {
    let mut one = Rig::new(PLAIN, |_| {}).await;
    let mut two = Rig::on(one.server, one.table.clone(), "others", |_| {}).await;
    let folder = one.config.journal.folder.clone();
    let mut three =
        Rig::on(one.server, one.table.clone(), "third", |config| config.journal.folder = folder).await;
    for _ in 0..3 {
        for rig in [&mut one, &mut two, &mut three] {
            rig.deliver(&[&[("id", "7")], &[("id", "8")]]).await.unwrap();
        }
    }
    assert_eq!(one.count().await, 18);
}

#[tokio::test]
async fn p15_a_batch_over_many_partitions_is_cut_by_them() {
    for (key, partitions) in [
        ("toYYYYMM(at)", 3),
        ("toDate(at, 'Asia/Tokyo')", 60),
        ("(kind, toYear(at))", 6),
        ("id % 4", 4),
        ("cityHash64(kind) % 8", 3),
    ] {
        let mut rig = Rig::new(
            &format!(
                "(id UInt64, kind LowCardinality(String), at DateTime('UTC')) ENGINE = MergeTree PARTITION BY {key} ORDER BY id \
                 SETTINGS non_replicated_deduplication_window = 1000"
            ),
            |_| {},
        )
        .await;
        let rows: Vec<[String; 3]> = (0..600)
            .map(|n| {
                let at =
                    jiff::Timestamp::from_second(1_704_067_200 + n * 8640 * if n % 7 == 0 { -1 } else { 1 })
                        .unwrap();
                [n.to_string(), format!("\"k{}\"", n % 3), format!("\"{at}\"")]
            })
            .collect();
        let fields: Vec<Vec<(&str, &str)>> = rows
            .iter()
            .map(|[id, kind, at]| vec![("id", id.as_str()), ("kind", kind.as_str()), ("at", at.as_str())])
            .collect();
        let fields: Vec<&[(&str, &str)]> = fields.iter().map(Vec::as_slice).collect();
        rig.deliver(&fields).await.unwrap();
        // With the answers at hand.
        rig.deliver(&fields).await.unwrap();
        assert_eq!(rig.count().await, 1200, "{key}");
        let found = rig.server.number(&format!("SELECT uniqExact(_partition_id) FROM {}", rig.table)).await;
        assert!(found >= partitions, "{key}: {found} partitions");
    }
}

const REPLACING: &str = "(id UInt64, at DateTime64(3, 'UTC'), v String DEFAULT 'none', gone UInt8) \
     ENGINE = ReplacingMergeTree(at, gone) ORDER BY id SETTINGS non_replicated_deduplication_window = 1000";

async fn replacing() -> Rig {
    Rig::new(REPLACING, |config| {
        config.mode = adapters::sink::Mode::UpsertIfNewer;
        config.row_key = vec!["id".to_owned()];
        config.version = Some("at".to_owned());
    })
    .await
}

#[tokio::test]
async fn upsert_if_newer_ends_in_the_newest_and_deletes_keep_older_writes_away() {
    use RowKind::{Delete, Write};
    let mut rig = replacing().await;
    let at = |second: u32| format!("\"2024-01-01T00:00:{second:02}Z\"");
    let (t1, t2, t3, t4) = (at(1), at(2), at(3), at(4));
    let outcomes = rig
        .deliver_kinds(&[
            (Write, &[("id", "1"), ("at", &t2), ("v", "\"b\"")]),
            (Write, &[("id", "1"), ("at", &t1), ("v", "\"a\"")]),
            (Write, &[("id", "2"), ("at", &t1), ("v", "\"x\"")]),
            (Write, &[("id", "1"), ("at", &t3), ("v", "\"c\"")]),
            (Write, &[("id", "3"), ("at", &t1)]),
        ])
        .await
        .unwrap();
    let written = RowOutcome::Written;
    assert_eq!(
        outcomes,
        [RowOutcome::Stale, RowOutcome::Stale, written.clone(), written.clone(), written.clone()]
    );
    rig.deliver_kinds(&[
        (Write, &[("id", "1"), ("at", &t2), ("v", "\"older\"")]),
        (Delete, &[("id", "2"), ("at", &t3)]),
        (Delete, &[("id", "3"), ("at", &t2)]),
    ])
    .await
    .unwrap();
    rig.deliver_kinds(&[
        (Write, &[("id", "2"), ("at", &t2), ("v", "\"too old\"")]),
        (Write, &[("id", "3"), ("at", &t4), ("v", "\"again\"")]),
    ])
    .await
    .unwrap();
    let read = format!("SELECT id, v FROM {} FINAL ORDER BY id FORMAT TSV", rig.table);
    assert_eq!(rig.server.lines(&read).await, ["1\tc", "3\tagain"]);
    // Among equal versions the last stays, in one batch as in two.
    let equal: [(RowKind, &[(&str, &str)]); 3] = [
        (Write, &[("id", "4"), ("at", &t1), ("v", "\"first\"")]),
        (Write, &[("id", "4"), ("at", &t1), ("v", "\"second\"")]),
        (Write, &[("id", "4"), ("at", &t1), ("v", "\"third\"")]),
    ];
    let outcomes = rig.deliver_kinds(&equal[..2]).await.unwrap();
    assert_eq!(outcomes, [RowOutcome::Stale, written]);
    assert_eq!(rig.server.lines(&read).await[2], "4\tsecond");
    rig.deliver_kinds(&equal[2..]).await.unwrap();
    assert_eq!(rig.server.lines(&read).await[2], "4\tthird");
    let missing = rig.encode(Delete, &[("id", "1")]).unwrap_err();
    assert!(missing.column == "at" && missing.reason.contains("the version"), "{missing}");
}

/// Random writes and deletes of a few row keys, in any order of their versions, behind lost replies.
#[tokio::test]
async fn upsert_if_newer_ends_in_its_model_behind_lost_replies() {
    let mut rig = replacing().await;
    let proxy = HttpProxy::start(rig.server.port()).await;
    rig.config.url = rig.server.url_through(proxy.port());
    rig.again().await.unwrap();
    let mut random = StdRng::seed_from_u64(23);
    let mut model: BTreeMap<u64, (u32, bool)> = BTreeMap::new();
    // Each version once: what equal versions end in is left to the engine.
    let mut versions: Vec<u32> = (0..1500).collect();
    for at in (1..versions.len()).rev() {
        versions.swap(at, random.random_range(0..=at));
    }
    for batch in versions.chunks(50) {
        let rows: Vec<(RowKind, [String; 3])> = batch
            .iter()
            .map(|&version| {
                let (id, gone) = (random.random_range(0..40), random.random_bool(0.3));
                let newest = model.entry(id).or_insert((version, gone));
                if version > newest.0 {
                    *newest = (version, gone);
                }
                let at = jiff::Timestamp::from_second(1_700_000_000 + i64::from(version)).unwrap();
                let kind = if gone { RowKind::Delete } else { RowKind::Write };
                (kind, [id.to_string(), format!("\"{at}\""), format!("\"v{version}\"")])
            })
            .collect();
        let fields: Vec<(RowKind, [(&str, &str); 3])> = rows
            .iter()
            .map(|(kind, [id, at, v])| (*kind, [("id", id.as_str()), ("at", at.as_str()), ("v", v.as_str())]))
            .collect();
        let fields: Vec<(RowKind, &[(&str, &str)])> =
            fields.iter().map(|(kind, fields)| (*kind, &fields[..])).collect();
        if random.random_bool(0.4) {
            proxy.cut_inserts(1, [Cut::Request, Cut::Answer, Cut::Late][random.random_range(0..3)]);
        }
        if rig.deliver_kinds(&fields).await.is_err() {
            assert!(matches!(rig.resolve().await.unwrap(), Resolution::Applied(_)));
        }
    }
    let read = format!("SELECT id, v FROM {} FINAL ORDER BY id FORMAT TSV", rig.table);
    let expected: Vec<String> = model
        .iter()
        .filter(|(_, (_, gone))| !gone)
        .map(|(id, (version, _))| format!("{id}\tv{version}"))
        .collect();
    assert_eq!(rig.server.lines(&read).await, expected);
}

/// P15: rows that replace themselves may come again as often as need be. Under a token that the table knows they would not, and a server that
/// was killed may know one whose rows it has not.
#[tokio::test]
async fn p15_what_replaces_itself_comes_again_whatever_the_table_remembers() {
    let mut rig = replacing().await;
    let proxy = HttpProxy::start(rig.server.port()).await;
    rig.config.url = rig.server.url_through(proxy.port());
    rig.again().await.unwrap();
    let read = format!("SELECT id, v FROM {} FINAL ORDER BY id FORMAT TSV", rig.table);
    let row: &[(&str, &str)] = &[("id", "1"), ("at", "\"2024-01-01T00:00:00Z\""), ("v", "\"a\"")];
    proxy.cut_inserts(2, Cut::Answer);
    rig.deliver(&[row]).await.unwrap_err();
    rig.server
        .query(&format!("ALTER TABLE {} DELETE WHERE 1 SETTINGS mutations_sync = 2", rig.table))
        .await
        .unwrap();
    assert!(rig.server.lines(&read).await.is_empty(), "a token without its rows");
    rig.resolve().await.unwrap_err();
    assert_eq!(rig.server.lines(&read).await, ["1\ta"]);
    // Nor does it matter how much has come since.
    rig.server
        .query(&format!("ALTER TABLE {} MODIFY SETTING non_replicated_deduplication_window = 100", rig.table))
        .await
        .unwrap();
    for second in 1..=101 {
        let at = format!("toDateTime('2020-01-01 00:00:00') + {second}");
        let insert =
            format!("INSERT INTO {} (id, at, v) SELECT 2, {at}, 'x' SETTINGS async_insert = 0", rig.table);
        rig.server.query(&insert).await.unwrap();
    }
    rig.again().await.unwrap();
    assert_eq!((rig.state.sequence, proxy.inserts()), (1, 3));
    assert_eq!(rig.server.lines(&read).await, ["1\ta", "2\tx"]);
}

/// P11: what is late, or has a key that does not tell the row key, is looked for in the table.
#[tokio::test]
async fn p11_a_late_copy_is_told_by_the_rows_that_are_there() {
    let columns = "(day Date, id LowCardinality(String), v String DEFAULT '') ENGINE = MergeTree PARTITION BY toYYYYMM(day) ORDER BY id \
                   SETTINGS non_replicated_deduplication_window = 1000";
    let mut rig = Rig::new(columns, |config| config.row_key = vec!["id".to_owned(), "day".to_owned()]).await;
    let (written, stale) = (RowOutcome::Written, RowOutcome::Stale);
    let (one, two) = ("\"2024-01-01\"", "\"2024-02-01\"");
    rig.deliver(&[&[("day", one), ("id", "\"a\"")], &[("day", one), ("id", "\"it's \\\\ \\u0000\"")]])
        .await
        .unwrap();
    rig.known_new = false;
    let outcomes = rig
        .deliver(&[
            &[("day", one), ("id", "\"a\"")],
            &[("day", two), ("id", "\"a\"")],
            &[("day", one), ("id", "\"it's \\\\ \\u0000\""), ("v", "\"other\"")],
            &[("day", two), ("id", "\"a\""), ("v", "\"other\"")],
        ])
        .await
        .unwrap();
    assert_eq!(outcomes, [stale.clone(), written.clone(), stale.clone(), stale.clone()]);
    assert_eq!((rig.count().await, rig.lines("sum(v != '')").await), (3, vec!["0".to_owned()]));
    // Nothing but copies: nothing is sent.
    let outcomes = rig.deliver(&[&[("day", two), ("id", "\"a\"")]]).await.unwrap();
    assert_eq!((outcomes, rig.count().await), (vec![stale.clone()], 3));
    // In several questions.
    let ids: Vec<String> = (0..120).map(|n| format!("\"{n} {}\"", "x".repeat(20_000))).collect();
    let rows: Vec<[(&str, &str); 2]> = ids.iter().map(|id| [("day", one), ("id", id.as_str())]).collect();
    let fields: Vec<&[(&str, &str)]> = rows.iter().map(|row| &row[..]).collect();
    assert_eq!(rig.deliver(&fields[..100]).await.unwrap(), vec![written.clone(); 100]);
    let outcomes = rig.deliver(&fields).await.unwrap();
    assert_eq!(outcomes, [vec![stale; 100], vec![written; 20]].concat());
    assert_eq!(rig.count().await, 123);
}

/// P15: with a column that holds the token, a table that may have forgotten it can still be asked.
#[tokio::test]
async fn p15_past_the_window_the_batch_column_is_asked_or_the_lane_stops() {
    for column in [true, false] {
        let mut rig = Rig::new(
            "(id UInt64, batch String) ENGINE = MergeTree ORDER BY id SETTINGS non_replicated_deduplication_window = 100",
            |config| config.batch_column = column.then(|| "batch".to_owned()),
        )
        .await;
        let proxy = HttpProxy::start(rig.server.port()).await;
        rig.config.url = rig.server.url_through(proxy.port());
        rig.again().await.unwrap();
        let row: &[(&str, &str)] = if column { &[("id", "1")] } else { &[("id", "1"), ("batch", "\"\"")] };
        proxy.cut_inserts(1, Cut::Answer);
        rig.deliver(&[row]).await.unwrap_err();
        // Another writer makes the table forget: the token of the lost insert is not known any more.
        for n in 0..101 {
            rig.server
                .query(&format!(
                    "INSERT INTO {} SETTINGS async_insert = 0 VALUES ({}, 'another')",
                    rig.table,
                    100 + n
                ))
                .await
                .unwrap();
        }
        let inserts = proxy.inserts();
        if column {
            assert!(matches!(rig.resolve().await.unwrap(), Resolution::Applied(_)));
        } else {
            let stopped = rig.resolve().await.unwrap_err().to_string();
            assert!(
                stopped.contains("non_replicated_deduplication_window") && stopped.contains("verdict"),
                "{stopped}"
            );
            let refused = rig.again().await.unwrap_err().to_string();
            assert!(refused.contains("could come in twice"), "{refused}");
            rig.book().execute("UPDATE oncegate_journal SET verdict = 'in'", []).unwrap();
            rig.again().await.unwrap();
            assert_eq!(rig.state.sequence, 1);
        }
        assert_eq!((proxy.inserts(), rig.count().await), (inserts, 102));
        // One that never arrived is seen to be missing, and sent.
        if column {
            proxy.cut_inserts(1, Cut::Request);
            rig.deliver(&[&[("id", "2")]]).await.unwrap_err();
            for n in 0..101 {
                rig.server
                    .query(&format!(
                        "INSERT INTO {} SETTINGS async_insert = 0 VALUES ({}, 'another')",
                        rig.table,
                        300 + n
                    ))
                    .await
                    .unwrap();
            }
            assert!(matches!(rig.resolve().await.unwrap(), Resolution::Applied(_)));
            assert_eq!(
                rig.server.number(&format!("SELECT count() FROM {} WHERE id = 2", rig.table)).await,
                1
            );
            let tokens = rig
                .server
                .number(&format!("SELECT uniqExact(batch) FROM {} WHERE id < 100", rig.table))
                .await;
            assert_eq!(tokens, 2);
        }
    }
}

async fn others(rig: &Rig, rows: impl Iterator<Item = String>) {
    for row in rows {
        let insert = format!("INSERT INTO {} SETTINGS async_insert = 0 VALUES {row}", rig.table);
        rig.server.query(&insert).await.expect("another row goes in");
    }
}

/// P15: where merges drop rows, or time does, that none are there says nothing.
#[tokio::test]
async fn p15_rows_that_merges_or_time_may_drop_are_not_missing() {
    let setting = "SETTINGS non_replicated_deduplication_window = 100";
    let batch =
        |config: &mut adapters::clickhouse::ClickhouseConfig| config.batch_column = Some("batch".to_owned());
    let sums =
        format!("(id UInt64, n UInt64, batch String) ENGINE = SummingMergeTree(n) ORDER BY id {setting}");
    let mut rig = Rig::new(&sums, batch).await;
    let proxy = HttpProxy::start(rig.server.port()).await;
    rig.config.url = rig.server.url_through(proxy.port());
    rig.again().await.unwrap();
    others(&rig, std::iter::once("(1, 1, 'first')".to_owned())).await;
    proxy.cut_inserts(1, Cut::Answer);
    rig.deliver(&[&[("id", "1"), ("n", "7")]]).await.unwrap_err();
    others(&rig, (0..101).map(|at| format!("(1, 1, 'other {at}')"))).await;
    rig.server.query(&format!("OPTIMIZE TABLE {} FINAL", rig.table)).await.unwrap();
    let ours = rig.server.number(&format!("SELECT count() FROM {} WHERE batch LIKE '%-%'", rig.table)).await;
    assert_eq!(ours, 0, "the merge has dropped the token");
    let stopped = rig.resolve().await.unwrap_err().to_string();
    assert!(stopped.contains("could come in twice"), "{stopped}");
    assert_eq!(rig.server.number(&format!("SELECT sum(n) FROM {}", rig.table)).await, 109);

    // Within the window the token is enough.
    let expiring = format!(
        "(id UInt64, at DateTime('UTC'), batch String) ENGINE = MergeTree ORDER BY id TTL at + INTERVAL 1 DAY {setting}"
    );
    let mut rig = Rig::new(&expiring, batch).await;
    let proxy = HttpProxy::start(rig.server.port()).await;
    rig.config.url = rig.server.url_through(proxy.port());
    rig.again().await.unwrap();
    proxy.cut_inserts(1, Cut::Answer);
    rig.deliver(&[&[("id", "1"), ("at", "\"2020-01-01T00:00:00Z\"")]]).await.unwrap_err();
    rig.server.query(&format!("OPTIMIZE TABLE {} FINAL", rig.table)).await.unwrap();
    assert_eq!(rig.count().await, 0);
    assert!(matches!(rig.resolve().await.unwrap(), Resolution::Applied(_)));
}

/// P6: a table that was put in the place of another gets nothing of it, and is not taken for it.
#[tokio::test]
async fn p6_another_table_is_refused_with_the_way_out() {
    for exchanged in [false, true] {
        let columns = "(id UInt64, batch String) ENGINE = MergeTree ORDER BY id SETTINGS non_replicated_deduplication_window = 1000";
        let mut rig = Rig::new(columns, |config| config.batch_column = Some("batch".to_owned())).await;
        let other = rig.server.table("other", columns).await;
        let proxy = HttpProxy::start(rig.server.port()).await;
        rig.config.url = rig.server.url_through(proxy.port());
        rig.again().await.unwrap();
        proxy.cut_inserts(1, Cut::Answer);
        rig.deliver(&[&[("id", "1")]]).await.unwrap_err();
        let first = rig.table.clone();
        if exchanged {
            rig.server.query(&format!("EXCHANGE TABLES {first} AND {other}")).await.unwrap();
            let stopped = rig.resolve().await.unwrap_err().to_string();
            assert!(stopped.contains("it is not sent"), "{stopped}");
        } else {
            rig.config.table.clone_from(&other);
        }
        let refused = rig.again().await.unwrap_err();
        assert!(
            matches!(&refused, SinkError::NotApplied { retry: false, reason } if reason.contains("oncegate_journal_targets")),
            "{refused}"
        );
        let both = [&first, &other].map(|table| format!("SELECT count() FROM {table}"));
        let counts = [rig.server.number(&both[0]).await, rig.server.number(&both[1]).await];
        assert_eq!(counts, if exchanged { [0, 1] } else { [1, 0] });
        match exchanged {
            true => drop(rig.server.query(&format!("EXCHANGE TABLES {first} AND {other}")).await.unwrap()),
            false => rig.config.table = first,
        }
        rig.again().await.unwrap();
        assert_eq!((rig.state.sequence, rig.count().await), (1, 1));
    }
}

/// The error of a view that was made since the start comes with the rows in the table.
#[tokio::test]
async fn p15_an_error_of_a_later_view_is_unknown() {
    let mut rig = Rig::new(PLAIN, |_| {}).await;
    let view = format!(
        "CREATE MATERIALIZED VIEW {0}_view ENGINE = MergeTree ORDER BY n AS SELECT toUInt8(v) AS n FROM {0}",
        rig.table
    );
    rig.server.query(&view).await.unwrap();
    let row: &[(&str, &str)] = &[("id", "1"), ("v", "\"x\"")];
    let thrown = rig.deliver(&[row]).await.unwrap_err();
    assert!(matches!(&thrown, SinkError::Unknown { reason } if reason.contains("a view's")), "{thrown}");
    rig.server.query(&format!("DROP TABLE {}_view", rig.table)).await.unwrap();
    assert!(matches!(rig.resolve().await.unwrap(), Resolution::Applied(_)));
    assert_eq!(rig.count().await, 1);
}

/// P15: a partition that was dropped counts as a window that has passed.
#[tokio::test]
async fn p15_a_dropped_partition_hides_no_blocks() {
    let columns = "(id UInt64) ENGINE = MergeTree PARTITION BY id < 100 ORDER BY id SETTINGS non_replicated_deduplication_window = 100";
    let mut rig = Rig::new(columns, |_| {}).await;
    let proxy = HttpProxy::start(rig.server.port()).await;
    rig.config.url = rig.server.url_through(proxy.port());
    rig.again().await.unwrap();
    others(&rig, ["(1)", "(200)"].into_iter().map(str::to_owned).cycle().take(100)).await;
    proxy.cut_inserts(1, Cut::Answer);
    rig.deliver(&[&[("id", "2")]]).await.unwrap_err();
    others(&rig, std::iter::repeat_n("(3)".to_owned(), 101)).await;
    rig.server.query(&format!("ALTER TABLE {} DROP PARTITION 0", rig.table)).await.unwrap();
    let stopped = rig.resolve().await.unwrap_err().to_string();
    assert!(stopped.contains("an unknown number of blocks"), "{stopped}");
    assert_eq!(rig.server.number(&format!("SELECT count() FROM {} WHERE id = 2", rig.table)).await, 1);
}

/// P10: a row whose partition cannot be computed is refused by itself.
#[tokio::test]
async fn p10_a_row_for_which_the_partition_key_throws_holds_nobody_up() {
    let mut rig = Rig::new(
        "(id UInt64, day String) ENGINE = MergeTree PARTITION BY toDate(day) ORDER BY id \
         SETTINGS non_replicated_deduplication_window = 1000",
        |_| {},
    )
    .await;
    let day = |n: usize| format!("\"2024-01-{n:02}\"");
    let mut days: Vec<String> = (1..10).map(day).collect();
    days[4] = "\"x\"".to_owned();
    for _ in 0..2 {
        let rows: Vec<[(&str, &str); 2]> =
            days.iter().map(|day| [("id", "1"), ("day", day.as_str())]).collect();
        let fields: Vec<&[(&str, &str)]> = rows.iter().map(|row| &row[..]).collect();
        let outcomes = rig.deliver(&fields).await.unwrap();
        for (at, outcome) in outcomes.iter().enumerate() {
            match outcome {
                RowOutcome::Refused { reason } => {
                    assert!(at == 4 && reason.contains("partition key"), "{at}: {reason}")
                }
                outcome => assert!(at != 4 && *outcome == RowOutcome::Written, "{at}: {outcome:?}"),
            }
        }
    }
    assert_eq!(rig.count().await, 16);
}

/// A 200 without a body is not ClickHouse's unless it names the query.
#[tokio::test]
async fn an_answer_that_is_not_clickhouses_settles_nothing() {
    let mut rig = Rig::new(PLAIN, |_| {}).await;
    let proxy = HttpProxy::start(rig.server.port()).await;
    rig.config.url = rig.server.url_through(proxy.port());
    rig.again().await.unwrap();
    proxy.cut_inserts(1, Cut::Empty);
    let unknown = rig.deliver(&[&[("id", "1")]]).await.unwrap_err();
    assert!(
        matches!(&unknown, SinkError::Unknown { reason } if reason.contains("not ClickHouse's")),
        "{unknown}"
    );
    assert_eq!(rig.count().await, 0);
    assert!(matches!(rig.resolve().await.unwrap(), Resolution::Applied(_)));
    assert_eq!(rig.count().await, 1);
}

/// What the server surely refuses is not applied, and the lane may cut the batch again.
#[tokio::test]
async fn a_table_that_does_not_fit_any_more_is_refused_without_a_trace() {
    let mut rig = Rig::new(PLAIN, |_| {}).await;
    rig.server.query(&format!("ALTER TABLE {} DROP COLUMN v", rig.table)).await.unwrap();
    let refused = rig.deliver(&[&[("id", "1"), ("v", "\"secret\"")]]).await.unwrap_err();
    assert!(
        matches!(&refused, SinkError::NotApplied { retry: false, reason } if reason.contains("ClickHouse answers") && !reason.contains("secret")),
        "{refused}"
    );
    let open: i64 =
        rig.book().query_row("SELECT count(*) FROM oncegate_journal", [], |row| row.get(0)).unwrap();
    assert_eq!(open, 0);
    rig.again().await.unwrap();
    rig.deliver(&[&[("id", "1")]]).await.unwrap();
    assert_eq!(rig.lines("id").await, ["1"]);
}

/// Rows that were made for the table as it was are not sent to it as it is.
#[tokio::test]
async fn rows_of_an_older_look_of_the_table_are_not_sent() {
    let mut rig = Rig::new(PLAIN, |_| {}).await;
    let older = rig.encoder.clone();
    rig.server
        .query(&format!("ALTER TABLE {} MODIFY COLUMN v LowCardinality(String)", rig.table))
        .await
        .unwrap();
    rig.again().await.unwrap();
    let newer = std::mem::replace(&mut rig.encoder, older);
    let refused = rig.deliver(&[&[("id", "1")]]).await.unwrap_err();
    assert!(
        matches!(&refused, SinkError::NotApplied { retry: false, reason } if reason.contains("has changed since")),
        "{refused}"
    );
    rig.encoder = newer;
    rig.deliver(&[&[("id", "1")]]).await.unwrap();
    assert_eq!(rig.count().await, 1);
}

#[tokio::test]
async fn a_large_batch_is_one_block() {
    let mut rig = Rig::new(PLAIN, |_| {}).await;
    let ids: Vec<String> = (0..200_000).map(|n| n.to_string()).collect();
    let rows: Vec<[(&str, &str); 1]> = ids.iter().map(|id| [("id", id.as_str())]).collect();
    let fields: Vec<&[(&str, &str)]> = rows.iter().map(|row| &row[..]).collect();
    rig.deliver(&fields).await.unwrap();
    let (database, table) = rig.table.split_once('.').unwrap();
    let parts = format!(
        "SELECT max(max_block_number) FROM system.parts WHERE database = '{database}' AND table = '{table}'"
    );
    assert_eq!((rig.count().await, rig.server.number(&parts).await), (200_000, 1));
}
