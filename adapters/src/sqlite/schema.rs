//! The bookkeeping tables, how a connection is opened, and SQLite's errors in the sink's words.

use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior, functions::FunctionFlags};

use super::{SqliteConfig, encode, worker::Fault};
use crate::sink::SinkError;

/// All bookkeeping tables with their columns, in the order of their DDL.
pub(super) const TABLES: [(&str, &str); 5] = [
    ("oncegate_routes", "name, route_id, key_spec_id, algorithm, secret"),
    (
        "oncegate_shards",
        "route, shard, epoch, sequence, position, watermark_ms, floor_ms, owner, heartbeat_ms, partitions, source, lineage",
    ),
    ("oncegate_marks", "route, shard, sequence, epoch, min_ms, max_ms, count, block"),
    (
        "oncegate_dead_letters",
        "id, route, shard, sequence, position, key, event_ms, kind, reason, payload, at",
    ),
    ("oncegate_tombstones", "target, row_key, version, route, event_ms"),
];

/// Marks keep their block last, so that expiry need not read through it.
const DDL: &str = "
CREATE TABLE IF NOT EXISTS oncegate_routes (
    name TEXT NOT NULL PRIMARY KEY, route_id BLOB NOT NULL, key_spec_id INTEGER NOT NULL,
    algorithm INTEGER NOT NULL, secret BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS oncegate_shards (
    route TEXT NOT NULL, shard TEXT NOT NULL, epoch INTEGER NOT NULL, sequence INTEGER NOT NULL, position INTEGER,
    watermark_ms INTEGER NOT NULL, floor_ms INTEGER NOT NULL, owner TEXT NOT NULL, heartbeat_ms INTEGER NOT NULL,
    partitions INTEGER, source TEXT, lineage TEXT, PRIMARY KEY (route, shard)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS oncegate_marks (
    route TEXT NOT NULL, shard TEXT NOT NULL, sequence INTEGER NOT NULL, epoch INTEGER NOT NULL,
    min_ms INTEGER NOT NULL, max_ms INTEGER NOT NULL, count INTEGER NOT NULL, block BLOB NOT NULL,
    PRIMARY KEY (route, shard, sequence)
) STRICT;
CREATE INDEX IF NOT EXISTS oncegate_marks_expiry ON oncegate_marks (route, shard, max_ms);
CREATE TABLE IF NOT EXISTS oncegate_dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT, route TEXT NOT NULL, shard TEXT NOT NULL, sequence INTEGER NOT NULL,
    position INTEGER, key BLOB NOT NULL, event_ms INTEGER NOT NULL, kind TEXT NOT NULL, reason TEXT NOT NULL,
    payload BLOB, at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
) STRICT;
CREATE TABLE IF NOT EXISTS oncegate_tombstones (
    target TEXT NOT NULL, row_key BLOB NOT NULL, version ANY, route TEXT NOT NULL, event_ms INTEGER NOT NULL,
    PRIMARY KEY (target, row_key)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS oncegate_tombstones_expiry ON oncegate_tombstones (route, target, event_ms);
";

/// The sink's clock: ms since the epoch.
pub(crate) const NOW_MS: &str = "CAST(round(unixepoch('now', 'subsec') * 1000) AS INTEGER)";

/// Pages of WAL after which a commit moves them into the file: 32 MiB at 4 KiB a page, so that a large batch does not
/// pay for it each time.
const CHECKPOINT_PAGES: i64 = 8192;

/// Why the file could not be opened as it must be.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// SQLite says so.
    Sqlite(rusqlite::Error),
    /// It opened, but a commit would not be durable.
    NotDurable(String),
}

impl From<rusqlite::Error> for OpenError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// Opens the file with durable commits, and makes the bookkeeping tables if they are missing.
pub(crate) fn open(config: &SqliteConfig) -> Result<Connection, OpenError> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(&config.path, flags)?;
    connection.busy_timeout(config.busy_timeout.max(Duration::from_millis(1)))?;
    let journal = write_ahead(&connection, config.busy_timeout)?;
    if !journal.eq_ignore_ascii_case("wal") {
        return Err(OpenError::NotDurable(format!("its journal mode stays {journal:?} where WAL is needed")));
    }
    connection.execute_batch(&format!(
        "PRAGMA synchronous = FULL; PRAGMA fullfsync = ON; PRAGMA checkpoint_fullfsync = ON; PRAGMA foreign_keys = ON;
         PRAGMA cache_size = -65536; PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES};"
    ))
    .or_else(only_rows)?;
    let synchronous: i64 = connection.query_row("PRAGMA synchronous", [], |row| row.get(0))?;
    if synchronous < 2 {
        return Err(OpenError::NotDurable(format!(
            "synchronous stays {synchronous} where 2 (FULL) is needed"
        )));
    }
    connection.set_prepared_statement_cache_capacity(64);
    connection.create_scalar_function(
        "oncegate_instant",
        1,
        FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC,
        |context| encode::instant(context.get_raw(0)),
    )?;
    let missing: i64 = connection.query_row(
        "SELECT ?1 - count(*) FROM sqlite_schema WHERE type = 'table' AND name GLOB 'oncegate_*'
         AND name IN ('oncegate_routes', 'oncegate_shards', 'oncegate_marks', 'oncegate_dead_letters', 'oncegate_tombstones')",
        [TABLES.len()],
        |row| row.get(0),
    )?;
    if missing > 0 {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        transaction.execute_batch(DDL)?;
        transaction.commit()?;
    }
    add_later_columns(&mut connection)?;
    Ok(connection)
}

/// Adds the columns that files of earlier builds lack; a table of that name which is not ours is left to the start-up checks.
fn add_later_columns(connection: &mut Connection) -> rusqlite::Result<()> {
    let lacks = |connection: &Connection, column: &str| {
        connection.query_row(
            "SELECT count(*) = 2 FROM pragma_table_info('oncegate_shards') WHERE name IN ('heartbeat_ms', 'epoch', ?1)",
            [column],
            |row| row.get::<_, bool>(0),
        )
    };
    for (column, kind) in [("partitions", "INTEGER"), ("source", "TEXT"), ("lineage", "TEXT")] {
        if lacks(connection, column)? {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            if lacks(&transaction, column)? {
                transaction
                    .execute_batch(&format!("ALTER TABLE oncegate_shards ADD COLUMN {column} {kind}"))?;
            }
            transaction.commit()?;
        }
    }
    Ok(())
}

/// Turns the write-ahead log on. A new file is changed under a lock that SQLite does not wait for, so this waits.
fn write_ahead(connection: &Connection, patience: Duration) -> rusqlite::Result<String> {
    let deadline = Instant::now() + patience;
    loop {
        match connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)) {
            Err(error) if is_busy(&error) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}

fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// `PRAGMA x = y` answers with a row on some settings, which `execute_batch` may report as an error.
fn only_rows(error: rusqlite::Error) -> Result<(), rusqlite::Error> {
    match error {
        rusqlite::Error::ExecuteReturnedResults => Ok(()),
        other => Err(other),
    }
}

/// `name` as an SQL identifier.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// An error from outside COMMIT: nothing of the transaction can come any more, for a SQLite file has no other server
/// that might still be at it.
pub(crate) fn fault(doing: &str, error: &rusqlite::Error) -> Fault {
    let code = error.sqlite_error_code();
    let (retry, lost, advice) = match code {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            (true, false, "another connection holds the file's write lock; end it if it is stuck")
        }
        Some(ErrorCode::DiskFull) => (true, false, "make room on the disk (or raise max_page_count)"),
        Some(ErrorCode::OutOfMemory | ErrorCode::OperationInterrupted) => (true, true, "it is tried again"),
        Some(
            ErrorCode::SystemIoFailure
            | ErrorCode::CannotOpen
            | ErrorCode::FileLockingProtocolFailed
            | ErrorCode::PermissionDenied
            | ErrorCode::ReadOnly
            | ErrorCode::AuthorizationForStatementDenied,
        ) => (true, true, "check the file, its folder and their permissions"),
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            (false, true, "the file is damaged: restore it")
        }
        _ => (false, false, "check the table and the oncegate_* tables against the start-up checks"),
    };
    Fault {
        error: SinkError::NotApplied { reason: format!("{doing}: {}; {advice}", text(error)), retry },
        lost,
    }
}

/// The error in one line, with SQLite's own name of it.
pub(crate) fn text(error: &rusqlite::Error) -> String {
    match error {
        rusqlite::Error::SqliteFailure(failure, Some(message)) => {
            format!("{message} (SQLite code {})", failure.extended_code)
        }
        rusqlite::Error::SqliteFailure(failure, None) => failure.to_string(),
        other => other.to_string(),
    }
}
