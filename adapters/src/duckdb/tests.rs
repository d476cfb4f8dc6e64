//! The sink against real files. What holds for every sink is in the conformance suite of the `tests` package.

mod probe;
mod types;

use bytes::Bytes;
use duckdb::types::FromSql;
use tempfile::TempDir;

use super::*;
use crate::{
    sink::{
        Acquire, Batch, MarkBlock, OnRefused, Receipts, Row, RowKind, RowOutcome, ShardId, ShardStep,
        SinkError, Source,
    },
    value::Value,
};

const SHARD: &str = "http/0";

/// A file, its sink, and one session that owns [`SHARD`].
struct Bed {
    folder: TempDir,
    config: DuckdbConfig,
    encoder: Arc<dyn Encode>,
    session: Box<dyn Session>,
    epoch: i64,
    sequence: i64,
    known_new: bool,
    /// Runs in the file between the rows and the commit, beside the sink.
    meanwhile: Option<String>,
}

impl Bed {
    async fn new(ddl: &str, change: impl FnOnce(&mut DuckdbConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = DuckdbConfig::new(folder.path().join("rows.db"), "t");
        config.create = Some(ddl.to_owned());
        config.busy_timeout = Duration::from_millis(200);
        change(&mut config);
        let sink = DuckdbSink::new(config.clone());
        let encoder = sink.probe().await.unwrap();
        let mut session = sink.session("r", "me");
        let state = session.acquire(&[ShardId::from(SHARD)], Acquire::Force).await.unwrap();
        let (epoch, sequence) = (state[0].epoch, state[0].sequence);
        Self { folder, config, encoder, session, epoch, sequence, known_new: false, meanwhile: None }
    }

    async fn keyed(ddl: &str, mode: Mode, row_key: &[&str], version: Option<&str>) -> Self {
        Self::new(ddl, |config| {
            config.mode = mode;
            config.row_key = row_key.iter().map(|name| (*name).to_owned()).collect();
            config.version = version.map(str::to_owned);
        })
        .await
    }

    fn step(&self) -> ShardStep {
        ShardStep {
            shard: SHARD.into(),
            epoch: self.epoch,
            sequence: self.sequence + 1,
            position: None,
            watermark_ms: 0,
        }
    }

    /// Rows of raw JSON values.
    async fn deliver(&mut self, rows: &[(RowKind, &[&str])]) -> Result<Receipts, SinkError> {
        let encoded: Vec<(RowKind, Vec<u8>, Vec<u8>)> = rows
            .iter()
            .map(|(kind, values)| {
                let values: Vec<Value<'_>> = values
                    .iter()
                    .map(|json| if json.is_empty() { Value::Missing } else { Value::Json(json) })
                    .collect();
                let (mut row, mut key) = (Vec::new(), Vec::new());
                self.encoder.encode(*kind, &values, &mut row, &mut key).unwrap();
                (*kind, row, key)
            })
            .collect();
        self.deliver_encoded(&encoded).await
    }

    async fn deliver_encoded(
        &mut self,
        encoded: &[(RowKind, Vec<u8>, Vec<u8>)],
    ) -> Result<Receipts, SinkError> {
        let source = Source { step: 0, position: None, key: &[7; 16], payload: Some(b"{}"), event_ms: 5 };
        let rows: Vec<Row<'_>> = encoded
            .iter()
            .map(|(kind, bytes, row_key)| Row { kind: *kind, bytes, row_key, source })
            .collect();
        let steps = [self.step()];
        let meanwhile = self.meanwhile.clone().map(|sql| (self.config.path.clone(), sql));
        let seal = move |outcomes: &[RowOutcome]| {
            if let Some((path, sql)) = &meanwhile {
                FileConnection::open(path).unwrap().execute_batch(sql).unwrap();
            }
            vec![MarkBlock {
                step: 0,
                min_ms: 5,
                max_ms: 5,
                count: outcomes.len(),
                block: Bytes::from_static(b"m"),
            }]
        };
        let batch = Batch {
            steps: &steps,
            rows: &rows,
            dead_letters: &[],
            on_refused: OnRefused::DeadLetter,
            known_new: self.known_new,
            seal: &seal,
        };
        let receipts = self.session.deliver(&batch).await;
        if receipts.is_ok() {
            self.sequence += 1;
        }
        receipts
    }

    fn sql<T: FromSql>(&self, sql: &str) -> T {
        FileConnection::open(&self.config.path).unwrap().query_row(sql, [], |row| row.get(0)).unwrap()
    }

    fn execute(&self, sql: &str) {
        FileConnection::open(&self.config.path).unwrap().execute_batch(sql).unwrap();
    }
}

use RowKind::{Delete, Write};
use RowOutcome::{Stale, Updated, Written};

#[tokio::test]
async fn insert_skips_what_exists_and_keeps_the_first_copy() {
    let mut bed =
        Bed::keyed("CREATE TABLE t (id VARCHAR PRIMARY KEY, n INTEGER)", Mode::Insert, &["id"], None).await;
    let first = bed
        .deliver(&[(Write, &["\"b\"", "1"]), (Write, &["\"a\"", "2"]), (Write, &["\"b\"", "3"])])
        .await
        .unwrap();
    assert_eq!(first.rows, [Written, Written, Stale]);
    assert_eq!(
        bed.deliver(&[(Write, &["\"a\"", "9"]), (Write, &["\"c\"", "4"])]).await.unwrap().rows,
        [Stale, Written]
    );
    assert_eq!(bed.sql::<String>("SELECT string_agg(id || n, ',' ORDER BY id) FROM t"), "a2,b1,c4");
    assert_eq!(bed.sql::<i64>("SELECT sequence FROM oncegate_shards"), 2);
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM oncegate_marks"), 2);
}

#[tokio::test]
async fn p9_a_lost_bet_on_new_rows_falls_back_under_the_same_sequence() {
    let mut bed =
        Bed::keyed("CREATE TABLE t (id BIGINT PRIMARY KEY, n INTEGER)", Mode::Insert, &["id"], None).await;
    bed.known_new = true;
    assert_eq!(
        bed.deliver(&[(Write, &["1", "1"]), (Write, &["2", "1"])]).await.unwrap().rows,
        [Written, Written]
    );
    let rows: &[(RowKind, &[&str])] = &[(Write, &["2", "2"]), (Write, &["3", "2"])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Stale, Written]);
    assert_eq!(bed.sql::<String>("SELECT string_agg(id::VARCHAR || n, ',' ORDER BY id) FROM t"), "11,21,32");
    assert_eq!(bed.sql::<i64>("SELECT sequence FROM oncegate_shards"), 2);
}

#[tokio::test]
async fn upsert_takes_the_last_write_and_leaves_missing_columns_with_defaults_alone() {
    let ddl = "CREATE TABLE t (id INTEGER PRIMARY KEY, a VARCHAR, b VARCHAR DEFAULT 'd')";
    let mut bed = Bed::keyed(ddl, Mode::Upsert, &["id"], None).await;
    let rows: &[(RowKind, &[&str])] =
        &[(Write, &["1", "\"x\"", "\"y\""]), (Write, &["1", "\"z\"", ""]), (Delete, &["2", "", ""])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Written, Updated, Written]);
    assert_eq!(bed.sql::<String>("SELECT a || b FROM t"), "zy");
    // Delete and write of one key: what is left out has its default again.
    let rows: &[(RowKind, &[&str])] = &[(Delete, &["1", "", ""]), (Write, &["1", "\"w\"", ""])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Updated, Written]);
    assert_eq!(bed.sql::<String>("SELECT a || b FROM t"), "wd");
    assert_eq!(bed.deliver(&[(Delete, &["1", "", ""])]).await.unwrap().rows, [Updated]);
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM t"), 0);
}

#[tokio::test]
async fn upserts_of_new_rows_and_rows_that_are_there_are_told_apart() {
    let ddl = "CREATE TABLE t (id VARCHAR, day DATE, n INTEGER UNIQUE, UNIQUE (day, id))";
    let mut bed = Bed::keyed(ddl, Mode::Upsert, &["id", "day"], None).await;
    let a = |n| ["\"a\"", "\"2024-01-01\"", n];
    let b = |n| ["\"a\"", "\"2024-01-02\"", n];
    assert_eq!(bed.deliver(&[(Write, &a("1"))]).await.unwrap().rows, [Written]);
    assert_eq!(bed.deliver(&[(Write, &b("2")), (Write, &a("3"))]).await.unwrap().rows, [Written, Updated]);
    // Another column of a unique index is changed, back and forth.
    for n in ["4", "3", "4", "3"] {
        assert_eq!(bed.deliver(&[(Write, &a(n))]).await.unwrap().rows, [Updated]);
    }
    assert_eq!(bed.sql::<String>("SELECT string_agg(n::VARCHAR, ',' ORDER BY day) FROM t"), "3,2");
}

#[tokio::test]
async fn the_highest_version_wins_also_over_deleted_rows() {
    let ddl = "CREATE TABLE t (id VARCHAR PRIMARY KEY, v TIMESTAMP_NS NOT NULL, a VARCHAR)";
    let mut bed = Bed::keyed(ddl, Mode::UpsertIfNewer, &["id"], Some("v")).await;
    let (early, late) = ("\"2024-01-01T00:00:00Z\"", "\"2024-01-01T00:00:00.000000001Z\"");
    let rows: &[(RowKind, &[&str])] = &[
        (Write, &["\"a\"", early, "\"one\""]),
        (Write, &["\"a\"", late, "\"two\""]),
        (Write, &["\"a\"", late, "\"three\""]),
    ];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Stale, Written, Stale]);
    assert_eq!(bed.sql::<String>("SELECT a FROM t"), "two");
    assert_eq!(bed.deliver(&[(Delete, &["\"a\"", early, ""])]).await.unwrap().rows, [Stale]);
    let newer = "\"2024-01-01T01:00:00Z\"";
    let rows: &[(RowKind, &[&str])] = &[(Delete, &["\"a\"", newer, ""]), (Delete, &["\"b\"", newer, ""])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Updated, Written]);
    let rows: &[(RowKind, &[&str])] =
        &[(Write, &["\"a\"", newer, "\"four\""]), (Write, &["\"b\"", early, "\"b\""])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Stale, Stale]);
    let newest = "\"2024-01-01T01:00:01Z\"";
    let rows: &[(RowKind, &[&str])] =
        &[(Write, &["\"a\"", newest, "\"five\""]), (Write, &["\"c\"", newest, "\"c\""])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Written, Written]);
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM oncegate_tombstones"), 1);
    let rows: &[(RowKind, &[&str])] =
        &[(Write, &["\"a\"", newer, "\"no\""]), (Write, &["\"c\"", "\"2025-01-01T00:00:00\"", "\"d\""])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Stale, Updated]);
    assert_eq!(bed.sql::<String>("SELECT string_agg(a, ',' ORDER BY id) FROM t"), "five,d");
}

#[tokio::test]
async fn rule10_bad_rows_cost_one_outcome_each() {
    let mut bed = Bed::keyed(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER CHECK (n > 0 AND 100 / (n - 7) < 1000))",
        Mode::Upsert,
        &["id"],
        None,
    )
    .await;
    bed.known_new = true;
    let texts: Vec<[String; 2]> = (0..500)
        .map(|n| [n.to_string(), if n % 50 == 49 { "-1".to_owned() } else { "5".to_owned() }])
        .collect();
    let texts: Vec<[&str; 2]> = texts.iter().map(|row| [row[0].as_str(), row[1].as_str()]).collect();
    let rows: Vec<(RowKind, &[&str])> = texts.iter().map(|row| (Write, row.as_slice())).collect();
    let outcomes = bed.deliver(&rows).await.unwrap().rows;
    for (n, outcome) in outcomes.iter().enumerate() {
        match outcome {
            RowOutcome::Refused { reason } => {
                assert!(
                    n % 50 == 49 && reason.contains("CHECK") && reason.contains("\"t\""),
                    "{n}: {reason}"
                );
            }
            other => assert!(n % 50 != 49 && *other == Written, "{n}: {other:?}"),
        }
    }
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM t"), 490);
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM oncegate_dead_letters WHERE kind = 'rejected'"), 10);
    assert_eq!(bed.sql::<i64>("SELECT count FROM oncegate_marks"), 500);
}

#[tokio::test]
async fn rule10_of_rows_that_meet_in_another_unique_key_the_first_goes_in() {
    for (mode, row_key) in [(Mode::Upsert, &["id"][..]), (Mode::Insert, &["id"]), (Mode::Insert, &[])] {
        let ddl = "CREATE TABLE t (id INTEGER PRIMARY KEY, u VARCHAR UNIQUE)";
        let mut bed = Bed::keyed(ddl, mode, row_key, None).await;
        bed.deliver(&[(Write, &["1", "\"a\""])]).await.unwrap();
        let rows: &[(RowKind, &[&str])] = &[
            (Write, &["9", "\"x\""]),
            (Write, &["3", "\"a\""]),
            (Write, &["4", "\"secret\""]),
            (Write, &["5", "\"x\""]),
            (Write, &["2", "\"secret\""]),
        ];
        let outcomes = bed.deliver(rows).await.unwrap().rows;
        let refused: Vec<bool> =
            outcomes.iter().map(|outcome| matches!(outcome, RowOutcome::Refused { .. })).collect();
        assert_eq!(refused, [false, true, false, true, true], "{mode:?}: {outcomes:?}");
        assert!(!format!("{outcomes:?}").contains("secret"), "{outcomes:?}");
        assert_eq!(bed.sql::<String>("SELECT string_agg(id::VARCHAR, ',' ORDER BY id) FROM t"), "1,4,9");
    }
}

#[tokio::test]
async fn rule10_a_value_that_reads_as_an_error_of_duckdb_costs_its_row() {
    for value in [
        "conflict on x",
        "has been invalidated",
        "NOT NULL constraint failed: t.x",
        "No space left",
        "q\\\"q",
    ] {
        let value = format!("\"{value}\"");
        // In another unique key; as the row key of a bet that is lost; in a table that only DuckDB keeps unique.
        for (known_new, row_key) in [(false, &["id"][..]), (true, &["u"]), (false, &[])] {
            let ddl = "CREATE TABLE t (id INTEGER UNIQUE, u VARCHAR UNIQUE)";
            let mut bed = Bed::keyed(ddl, Mode::Insert, row_key, None).await;
            bed.known_new = known_new;
            assert_eq!(bed.deliver(&[(Write, &["1", &value])]).await.unwrap().rows, [Written]);
            let rows: &[(RowKind, &[&str])] = &[(Write, &["2", &value]), (Write, &["3", "\"good\""])];
            let outcomes = bed.deliver(rows).await.unwrap().rows;
            let met = match &outcomes[0] {
                Stale => known_new,
                RowOutcome::Refused { reason } => {
                    !known_new && reason.starts_with("another row has this key") && !reason.contains(&value)
                }
                _ => false,
            };
            assert!(met && outcomes[1] == Written, "{value}: {outcomes:?}");
            assert_eq!(bed.sql::<String>("SELECT string_agg(id::VARCHAR, ',' ORDER BY id) FROM t"), "1,3");
        }
    }
}

#[tokio::test]
async fn a_commit_that_is_refused_is_tried_again_and_not_for_ever() {
    let mut bed = Bed::keyed("CREATE TABLE t (id VARCHAR PRIMARY KEY)", Mode::Insert, &["id"], None).await;
    for n in 1..=4 {
        // Another one takes the key of a row that is written already.
        bed.meanwhile = Some(format!("INSERT INTO t VALUES ('conflict {n}')"));
        let row = format!("\"conflict {n}\"");
        let error = bed.deliver(&[(Write, &[&row])]).await.unwrap_err();
        let SinkError::NotApplied { reason, retry } = &error else { panic!("{error}") };
        assert!(reason.starts_with("committing: ") && !reason.contains(&row[1..row.len() - 1]), "{reason}");
        assert_eq!(*retry, n < 3, "{n}: {reason}");
        assert!(bed.session.connected());
        assert_eq!(bed.sql::<i64>("SELECT sequence FROM oncegate_shards"), 0);
    }
    bed.meanwhile = None;
    assert_eq!(
        bed.deliver(&[(Write, &["\"conflict 1\""]), (Write, &["\"new\""])]).await.unwrap().rows,
        [Stale, Written]
    );
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM t"), 5);
    bed.meanwhile = Some("INSERT INTO t VALUES ('x')".to_owned());
    let error = bed.deliver(&[(Write, &["\"x\""])]).await.unwrap_err();
    assert!(matches!(error, SinkError::NotApplied { retry: true, .. }), "counted from the start: {error}");
}

#[tokio::test]
async fn a_write_takes_what_a_delete_of_its_batch_makes_room_for() {
    let ddl = "CREATE TABLE t (id INTEGER PRIMARY KEY, u VARCHAR UNIQUE)";
    let mut bed = Bed::keyed(ddl, Mode::Upsert, &["id"], None).await;
    bed.deliver(&[(Write, &["1", "\"a\""])]).await.unwrap();
    let rows: &[(RowKind, &[&str])] = &[(Delete, &["1", ""]), (Write, &["2", "\"a\""])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Updated, Written]);
    assert_eq!(bed.sql::<String>("SELECT string_agg(id::VARCHAR || u, ',') FROM t"), "2a");
}

#[tokio::test]
async fn a_lane_waits_for_another_one_that_writes_and_gives_its_batch_back() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER)", |_| {}).await;
    let path = bed.config.path.clone();
    let (held, holds) = std::sync::mpsc::channel();
    let (over, end) = std::sync::mpsc::channel::<()>();
    let other = std::thread::spawn(move || {
        let handle = instance::Handle::open(&path).unwrap();
        let _writer = handle.writer(Duration::ZERO).unwrap();
        held.send(()).unwrap();
        end.recv().unwrap();
    });
    holds.recv().unwrap();
    let error = bed.deliver(&[(Write, &["1"])]).await.unwrap_err();
    assert!(
        matches!(&error, SinkError::NotApplied { retry: true, reason } if reason.contains("busy_timeout")),
        "{error}"
    );
    assert!(bed.session.connected());
    over.send(()).unwrap();
    other.join().unwrap();
    assert_eq!(bed.deliver(&[(Write, &["1"])]).await.unwrap().rows, [Written]);
}

#[tokio::test]
#[expect(clippy::await_holding_lock, reason = "the looks are made while somebody writes")]
async fn looks_do_not_wait_for_who_writes() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER)", |config| {
        // Longer than any test may take.
        config.busy_timeout = Duration::from_secs(600);
    })
    .await;
    bed.deliver(&[(Write, &["1"])]).await.unwrap();
    let mut other = DuckdbSink::new(bed.config.clone()).session("r", "other");
    let handle = instance::Handle::open(&bed.config.path).unwrap();
    let connection = handle.connect().unwrap();
    let writer = handle.writer(Duration::ZERO).unwrap();
    connection.execute_batch("BEGIN; DELETE FROM oncegate_marks; DELETE FROM oncegate_shards").unwrap();
    for session in [&mut bed.session, &mut other] {
        let looks = async {
            assert!(session.now_ms().await.unwrap() > 0);
            session.shards("http/").await.unwrap()
        };
        let states = tokio::time::timeout(Duration::from_secs(60), looks).await.expect("no look waits");
        assert_eq!(states[0].sequence, 1, "as it was committed");
    }
    let shard = ShardId::from(SHARD);
    let marks = bed.session.marks_since(&shard, 0);
    let marks = tokio::time::timeout(Duration::from_secs(60), marks).await.expect("no look waits").unwrap();
    assert_eq!(marks.len(), 1);
    connection.execute_batch("ROLLBACK").unwrap();
    drop(writer);
    bed.deliver(&[(Write, &["2"])]).await.unwrap();
}

#[tokio::test]
async fn p4_another_owner_fences_and_names_itself() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER)", |_| {}).await;
    bed.deliver(&[(Write, &["1"])]).await.unwrap();
    let mut other = DuckdbSink::new(bed.config.clone()).session("r", "other");
    let state = other.acquire(&[SHARD.into()], Acquire::Force).await.unwrap();
    assert_eq!((state[0].epoch > bed.epoch, state[0].sequence), (true, 1));
    let error = bed.deliver(&[(Write, &["2"])]).await.unwrap_err();
    assert!(matches!(&error, SinkError::Fenced { owner, .. } if owner == "other"), "{error}");
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM t"), 1);
}

#[tokio::test]
async fn p6_a_file_put_in_place_of_another_is_noticed_before_anything_is_written() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER)", |_| {}).await;
    bed.deliver(&[(Write, &["1"])]).await.unwrap();
    bed.execute("CHECKPOINT");
    let backup = bed.folder.path().join("backup.db");
    std::fs::copy(&bed.config.path, &backup).unwrap();
    bed.deliver(&[(Write, &["2"])]).await.unwrap();
    bed.execute("CHECKPOINT");
    std::fs::rename(&backup, &bed.config.path).unwrap();
    let life = bed.session.life();
    assert!(life.stands());
    let error = bed.deliver(&[(Write, &["3"])]).await.unwrap_err();
    assert!(matches!(error, SinkError::NotApplied { retry: true, .. }), "{error}");
    assert!(!bed.session.connected() && !life.stands() && !bed.session.life().stands());
    let state = bed.session.acquire(&[SHARD.into()], Acquire::Force).await.unwrap();
    assert_eq!(state[0].sequence, 1, "the sink went back, and says so");
    assert!(bed.session.life().stands() && !life.stands());
}

#[tokio::test]
async fn names_with_quotes_and_spaces_are_written_to() {
    let ddl = "CREATE TABLE \"t\" (\"i d\" VARCHAR, \"a\"\"b\" VARCHAR, PRIMARY KEY (\"i d\"))";
    let mut bed = Bed::keyed(ddl, Mode::Upsert, &["i d"], None).await;
    let rows: &[(RowKind, &[&str])] = &[(Write, &["\"k\"", "\"1\""]), (Write, &["\"k\"", "\"2\""])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Written, Updated]);
    assert_eq!(bed.deliver(&[(Delete, &["\"k\"", ""])]).await.unwrap().rows, [Updated]);
}

#[tokio::test]
async fn a_file_whose_name_is_that_of_a_schema_is_written_to() {
    let mut bed =
        Bed::new("CREATE TABLE t (id INTEGER)", |config| config.path.set_file_name("main.db")).await;
    assert_eq!(bed.deliver(&[(Write, &["1"])]).await.unwrap().rows, [Written]);
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM t"), 1);
}

#[tokio::test]
async fn rule3_a_table_that_changed_is_no_bad_row() {
    for row_key in [&["id"][..], &[]] {
        let ddl = "CREATE TABLE t (id INTEGER PRIMARY KEY, s VARCHAR)";
        let mut bed = Bed::keyed(ddl, Mode::Insert, row_key, None).await;
        bed.deliver(&[(Write, &["1", "null"])]).await.unwrap();
        bed.execute("ALTER TABLE t RENAME COLUMN s TO z");
        let changed = bed.session.acquire(&[SHARD.into()], Acquire::Force).await;
        bed.epoch = changed.expect("the connection is the same")[0].epoch;
        if row_key.is_empty() {
            // An appender goes by the columns' places.
            continue;
        }
        let changed = bed.deliver(&[(Write, &["2", "null"])]).await.unwrap_err();
        assert!(matches!(&changed, SinkError::NotApplied { retry: false, .. }), "{changed}");
        let mut anew = DuckdbSink::new(bed.config.clone()).session("r", "me");
        anew.acquire(&[SHARD.into()], Acquire::Force)
            .await
            .expect("without a probe any table that fits will do");
    }
}

#[tokio::test]
async fn rule4_a_caller_that_leaves_half_way_leaves_no_half_batch() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER)", |_| {}).await;
    let rows: Vec<[String; 1]> = (0..20_000).map(|n| [n.to_string()]).collect();
    let rows: Vec<[&str; 1]> = rows.iter().map(|row| [row[0].as_str()]).collect();
    let rows: Vec<(RowKind, &[&str])> = rows.iter().map(|row| (Write, row.as_slice())).collect();
    for wait in [0, 1, 5, 20, 40] {
        let left = tokio::time::timeout(Duration::from_millis(wait), bed.deliver(&rows)).await;
        if left.is_ok() {
            continue;
        }
        assert!(!bed.session.connected());
        let state = bed.session.acquire(&[SHARD.into()], Acquire::Force).await.unwrap().remove(0);
        let count = bed.sql::<i64>("SELECT count(*) FROM t");
        assert_eq!(count, state.sequence * 20_000, "whole or not at all");
        (bed.epoch, bed.sequence) = (state.epoch, state.sequence);
    }
    bed.deliver(&rows[..1]).await.unwrap();
}

#[tokio::test]
async fn the_instance_ends_with_its_last_user_and_another_process_may_have_the_file() {
    let bed = Bed::new("CREATE TABLE t (id INTEGER)", |_| {}).await;
    let file = crate::bookkeeping::file_id::FileId::of(&bed.config.path).unwrap();
    assert!(instance::is_open(file));
    let config = bed.config.clone();
    let Bed { folder, session, .. } = bed;
    drop(session);
    // Its thread ends on its own.
    for _ in 0..200 {
        if !instance::is_open(file) {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!instance::is_open(file));
    let other = FileConnection::open(&config.path).unwrap();
    assert_eq!(other.query_row("SELECT count(*) FROM t", [], |row| row.get::<_, i64>(0)).unwrap(), 0);
    drop((other, folder));
}
