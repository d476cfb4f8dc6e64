//! The sink against real files. What holds for every sink is in the conformance suite of the `tests` package.

mod encode;
mod probe;

use bytes::Bytes;
use tempfile::TempDir;

use super::*;
use crate::{
    sink::{
        Acquire, Batch, MarkBlock, Receipts, Row, RowKind, RowOutcome, ShardId, ShardStep, SinkError, Source,
    },
    value::Value,
};

const SHARD: &str = "http/0";

/// A file, its sink, and one session that owns [`SHARD`].
struct Bed {
    folder: TempDir,
    config: SqliteConfig,
    encoder: Arc<dyn Encode>,
    session: Box<dyn Session>,
    epoch: i64,
    sequence: i64,
}

impl Bed {
    async fn new(ddl: &str, change: impl FnOnce(&mut SqliteConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = SqliteConfig::new(folder.path().join("rows.db"), "t");
        config.create = Some(ddl.to_owned());
        config.busy_timeout = Duration::from_millis(200);
        change(&mut config);
        let sink = SqliteSink::new(config.clone());
        let encoder = sink.probe().await.unwrap();
        let mut session = sink.session("r", "me");
        let state = session.acquire(&[ShardId::from(SHARD)], Acquire::Force).await.unwrap();
        Self { folder, config, encoder, session, epoch: state[0].epoch, sequence: state[0].sequence }
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
        let source = Source { step: 0, position: None, key: &[7; 16], payload: Some(b"{}"), event_ms: 5 };
        let rows: Vec<Row<'_>> = encoded
            .iter()
            .map(|(kind, bytes, row_key)| Row { kind: *kind, bytes, row_key, source })
            .collect();
        let steps = [self.step()];
        let seal = |outcomes: &[RowOutcome]| {
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
            on_refused: crate::sink::OnRefused::DeadLetter,
            known_new: false,
            seal: &seal,
        };
        let receipts = self.session.deliver(&batch).await;
        if receipts.is_ok() {
            self.sequence += 1;
        }
        receipts
    }

    fn sql<T: rusqlite::types::FromSql>(&self, sql: &str) -> T {
        rusqlite::Connection::open(&self.config.path).unwrap().query_row(sql, [], |row| row.get(0)).unwrap()
    }

    fn execute(&self, sql: &str) {
        rusqlite::Connection::open(&self.config.path).unwrap().execute_batch(sql).unwrap();
    }
}

use RowKind::{Delete, Write};
use RowOutcome::{Stale, Updated, Written};

#[tokio::test]
async fn insert_skips_what_exists_and_keeps_the_first_copy() {
    let mut bed =
        Bed::keyed("CREATE TABLE t (id TEXT PRIMARY KEY, n INTEGER)", Mode::Insert, &["id"], None).await;
    let first = bed
        .deliver(&[(Write, &["\"b\"", "1"]), (Write, &["\"a\"", "2"]), (Write, &["\"b\"", "3"])])
        .await
        .unwrap();
    assert_eq!(first.rows, [Written, Written, Stale]);
    assert_eq!(bed.deliver(&[(Write, &["\"a\"", "9"])]).await.unwrap().rows, [Stale]);
    assert_eq!(bed.sql::<String>("SELECT group_concat(id || n) FROM (SELECT * FROM t ORDER BY id)"), "a2,b1");
    assert_eq!(bed.sql::<i64>("SELECT sequence FROM oncegate_shards"), 2);
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM oncegate_marks"), 2);
}

#[tokio::test]
async fn upsert_takes_the_last_write_and_leaves_missing_columns_with_defaults_alone() {
    let ddl = "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT, b TEXT DEFAULT 'd')";
    let mut bed = Bed::keyed(ddl, Mode::Upsert, &["id"], None).await;
    let rows: &[(RowKind, &[&str])] =
        &[(Write, &["1", "\"x\"", "\"y\""]), (Write, &["1", "\"z\"", ""]), (Delete, &["2", "", ""])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Written, Updated, Written]);
    assert_eq!(bed.sql::<String>("SELECT a || b FROM t"), "zy");
    assert_eq!(bed.deliver(&[(Delete, &["1", "", ""])]).await.unwrap().rows, [Updated]);
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM t"), 0);
}

#[tokio::test]
async fn the_highest_version_wins_also_over_deleted_rows() {
    let mut bed = Bed::keyed(
        "CREATE TABLE t (id TEXT PRIMARY KEY, v TIMESTAMP NOT NULL, a TEXT)",
        Mode::UpsertIfNewer,
        &["id"],
        Some("v"),
    )
    .await;
    // The later one sorts before the earlier one as text.
    let (early, late) = ("\"2024-01-01T00:00:00Z\"", "\"2024-01-01T00:00:00.0000000001Z\"");
    let rows: &[(RowKind, &[&str])] = &[
        (Write, &["\"a\"", early, "1"].map(|v| if v == "1" { "\"one\"" } else { v })),
        (Write, &["\"a\"", late, "\"two\""]),
        (Write, &["\"a\"", late, "\"three\""]),
    ];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Stale, Written, Stale]);
    assert_eq!(bed.sql::<String>("SELECT a FROM t"), "two");
    assert_eq!(bed.deliver(&[(Delete, &["\"a\"", early, ""])]).await.unwrap().rows, [Stale]);
    let newer = "\"2024-01-01T02:00:00+01:00\"";
    assert_eq!(bed.deliver(&[(Delete, &["\"a\"", newer, ""])]).await.unwrap().rows, [Updated]);
    assert_eq!(bed.deliver(&[(Write, &["\"a\"", newer, "\"four\""])]).await.unwrap().rows, [Stale]);
    let newest = "\"2024-01-01T01:00:01Z\"";
    assert_eq!(bed.deliver(&[(Write, &["\"a\"", newest, "\"five\""])]).await.unwrap().rows, [Written]);
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM oncegate_tombstones"), 0);
}

#[tokio::test]
async fn rule10_a_bad_row_costs_one_outcome() {
    let mut bed = Bed::keyed(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER CHECK (n > 0), u TEXT UNIQUE ON CONFLICT REPLACE)",
        Mode::Upsert,
        &["id"],
        None,
    )
    .await;
    let rows: &[(RowKind, &[&str])] = &[
        (Write, &["1", "1", "\"a\""]),
        (Write, &["2", "-1", "\"b\""]),
        (Write, &["3", "1", "\"a\""]),
        (Write, &["4", "1", "\"d\""]),
    ];
    let outcomes = bed.deliver(rows).await.unwrap().rows;
    assert_eq!((&outcomes[0], &outcomes[3]), (&Written, &Written));
    assert!(
        matches!(&outcomes[1], RowOutcome::Refused { reason } if reason.contains("CHECK")),
        "{outcomes:?}"
    );
    assert!(matches!(&outcomes[2], RowOutcome::Refused { reason } if reason.contains("t.u")), "{outcomes:?}");
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM t"), 2);
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM oncegate_dead_letters WHERE kind = 'rejected'"), 2);
    assert_eq!(bed.sql::<i64>("SELECT count FROM oncegate_marks"), 4);
}

#[tokio::test]
async fn rule10_a_trigger_that_rolls_back_costs_one_outcome() {
    let mut bed =
        Bed::keyed("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER)", Mode::Insert, &["id"], None).await;
    bed.execute(
        "CREATE TRIGGER no AFTER INSERT ON t WHEN new.n = 13 BEGIN SELECT RAISE(ROLLBACK, 'secret'); END",
    );
    let rows: &[(RowKind, &[&str])] = &[(Write, &["1", "1"]), (Write, &["2", "13"]), (Write, &["3", "13"])];
    let outcomes = bed.deliver(rows).await.unwrap().rows;
    assert_eq!(outcomes[0], Written);
    for outcome in &outcomes[1..] {
        assert!(
            matches!(outcome, RowOutcome::Refused { reason } if !reason.contains("secret")),
            "{outcome:?}"
        );
    }
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM t"), 1);
}

#[tokio::test]
async fn a_busy_file_is_not_applied_and_can_be_tried_again() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER)", |_| {}).await;
    let other = rusqlite::Connection::open(&bed.config.path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = bed.deliver(&[(Write, &["1"])]).await.unwrap_err();
    assert!(matches!(error, SinkError::NotApplied { retry: true, .. }), "{error}");
    assert!(bed.session.connected());
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(bed.deliver(&[(Write, &["1"])]).await.unwrap().rows, [Written]);
}

#[tokio::test]
async fn looks_do_not_wait_for_who_writes() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER)", |config| {
        // Longer than any test may take.
        config.busy_timeout = Duration::from_secs(600);
    })
    .await;
    bed.deliver(&[(Write, &["1"])]).await.unwrap();
    let mut other = SqliteSink::new(bed.config.clone()).session("r", "other");
    let writer = rusqlite::Connection::open(&bed.config.path).unwrap();
    writer.execute_batch("BEGIN IMMEDIATE; DELETE FROM oncegate_marks; DELETE FROM oncegate_shards").unwrap();
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
    writer.execute_batch("ROLLBACK").unwrap();
    bed.deliver(&[(Write, &["2"])]).await.unwrap();
}

#[tokio::test]
async fn p4_another_owner_fences_and_names_itself() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER)", |_| {}).await;
    bed.deliver(&[(Write, &["1"])]).await.unwrap();
    let mut other = SqliteSink::new(bed.config.clone()).session("r", "other");
    let state = other.acquire(&[SHARD.into()], Acquire::Force).await.unwrap();
    let theirs = state[0].epoch;
    assert_eq!((theirs > bed.epoch, state[0].sequence), (true, 1));
    let error = bed.deliver(&[(Write, &["2"])]).await.unwrap_err();
    assert!(
        matches!(&error, SinkError::Fenced { owner, epoch, .. } if owner == "other" && *epoch == theirs),
        "{error}"
    );
    assert_eq!(bed.sql::<i64>("SELECT count(*) FROM t"), 1);
}

#[tokio::test]
async fn p6_a_file_put_in_place_of_another_is_noticed_before_anything_is_written() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER)", |_| {}).await;
    bed.deliver(&[(Write, &["1"])]).await.unwrap();
    bed.execute("PRAGMA wal_checkpoint(TRUNCATE)");
    let backup = bed.folder.path().join("backup.db");
    std::fs::copy(&bed.config.path, &backup).unwrap();
    bed.deliver(&[(Write, &["2"])]).await.unwrap();
    for suffix in ["-wal", "-shm"] {
        std::fs::remove_file(bed.folder.path().join(format!("rows.db{suffix}"))).unwrap();
    }
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
async fn a_commit_is_durable() {
    let bed = Bed::new("CREATE TABLE t (id INTEGER)", |_| {}).await;
    let connection = schema::open(&bed.config).unwrap();
    let pragma = |name: &str| -> String {
        connection
            .query_row(&format!("SELECT CAST({name} AS TEXT) FROM pragma_{name}"), [], |row| row.get(0))
            .unwrap()
    };
    assert_eq!((pragma("journal_mode").as_str(), pragma("synchronous").as_str()), ("wal", "2"));
    assert_eq!(pragma("foreign_keys"), "1");
}

#[tokio::test]
async fn names_with_quotes_and_spaces_are_written_to() {
    let ddl = "CREATE TABLE \"t\" (\"i d\" TEXT, \"a\"\"b\" TEXT, PRIMARY KEY (\"i d\"))";
    let mut bed = Bed::keyed(ddl, Mode::Upsert, &["i d"], None).await;
    let rows: &[(RowKind, &[&str])] = &[(Write, &["\"k\"", "\"1\""]), (Write, &["\"k\"", "\"2\""])];
    assert_eq!(bed.deliver(rows).await.unwrap().rows, [Written, Updated]);
    assert_eq!(bed.deliver(&[(Delete, &["\"k\"", ""])]).await.unwrap().rows, [Updated]);
}

#[tokio::test]
async fn row_keys_meet_by_the_collation_of_their_index() {
    let ddl = "CREATE TABLE t (id TEXT COLLATE NOCASE PRIMARY KEY, n INTEGER)";
    let mut bed = Bed::keyed(ddl, Mode::Upsert, &["id"], None).await;
    assert_eq!(
        bed.deliver(&[(Write, &["\"A\"", "1"]), (Write, &["\"a\"", "2"])]).await.unwrap().rows,
        [Written, Updated]
    );
    assert_eq!(bed.deliver(&[(Delete, &["\"A\"", ""])]).await.unwrap().rows, [Updated]);
    // The column compares one way, its unique index another: the index counts.
    let ddl = "CREATE TABLE t (id TEXT COLLATE NOCASE NOT NULL, n INTEGER); CREATE UNIQUE INDEX i ON t (id COLLATE BINARY)";
    let mut bed = Bed::keyed(ddl, Mode::Upsert, &["id"], None).await;
    assert_eq!(
        bed.deliver(&[(Write, &["\"A\"", "1"]), (Write, &["\"a\"", "2"])]).await.unwrap().rows,
        [Written, Written]
    );
    assert_eq!(bed.deliver(&[(Delete, &["\"A\"", ""])]).await.unwrap().rows, [Updated]);
    assert_eq!(bed.sql::<String>("SELECT id FROM t"), "a");
}

#[tokio::test]
async fn rows_that_refer_to_each_other_keep_their_order() {
    let ddl = "CREATE TABLE t (id INTEGER PRIMARY KEY, parent INTEGER REFERENCES t (id))";
    let mut bed = Bed::keyed(ddl, Mode::Insert, &["id"], None).await;
    let rows: &[(RowKind, &[&str])] = &[(Write, &["9", "null"]), (Write, &["1", "9"]), (Write, &["2", "7"])];
    let outcomes = bed.deliver(rows).await.unwrap().rows;
    assert_eq!(outcomes[..2], [Written, Written]);
    assert!(matches!(&outcomes[2], RowOutcome::Refused { reason } if reason.contains("FOREIGN KEY")));
}

#[tokio::test]
async fn a_full_file_takes_nothing_and_can_be_tried_again() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER, s TEXT)", |_| {}).await;
    let config = Arc::new(bed.config.clone());
    let table = target::Table { config: config.clone(), probed: Arc::default() };
    let mut session = session::SqliteSession::new(config, Arc::new(table), "r", "me");
    bed.epoch = session.acquire(&[SHARD.into()], Acquire::Force).await.unwrap()[0].epoch;
    let limit = |pages: i64| {
        move |db: &mut worker::Db| {
            let open = db.open.as_ref().unwrap();
            open.connection.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |_| Ok(())).unwrap();
            Ok(())
        }
    };
    session.run(limit(1)).await.unwrap();
    bed.session = Box::new(session);
    let big = format!("\"{}\"", "x".repeat(100_000));
    let full = bed.deliver(&[(Write, &["1", "\"small\""]), (Write, &["2", &big])]).await.unwrap_err();
    assert!(
        matches!(&full, SinkError::NotApplied { retry: true, reason } if reason.contains("full")),
        "{full}"
    );
    assert_eq!(bed.sql::<i64>("SELECT count(*) + (SELECT sequence FROM oncegate_shards) FROM t"), 0);
    bed.epoch = bed.session.acquire(&[SHARD.into()], Acquire::Force).await.unwrap()[0].epoch;
    bed.deliver(&[(Write, &["1", "\"small\""])]).await.unwrap();
}

#[tokio::test]
async fn rule3_a_table_that_changed_is_no_bad_row() {
    let mut bed = Bed::new("CREATE TABLE t (id INTEGER, s TEXT)", |_| {}).await;
    bed.deliver(&[(Write, &["1", "null"])]).await.unwrap();
    bed.execute("ALTER TABLE t RENAME COLUMN s TO z");
    let changed = bed.deliver(&[(Write, &["2", "null"])]).await.unwrap_err();
    assert!(matches!(&changed, SinkError::NotApplied { retry: false, .. }), "{changed}");
    let again = bed.session.acquire(&[SHARD.into()], Acquire::Force).await;
    assert!(again.is_ok(), "the connection is the same: {again:?}");
    let mut anew = SqliteSink::new(bed.config.clone()).session("r", "me");
    anew.acquire(&[SHARD.into()], Acquire::Force).await.expect("without a probe any table that fits will do");
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
