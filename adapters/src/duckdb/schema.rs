//! The bookkeeping tables, transactions, and DuckDB's errors in the sink's words.

use duckdb::{
    Connection, ToSql,
    types::{ToSqlOutput, Value, ValueRef},
};
use parking_lot::MutexGuard;

use super::{DuckdbConfig, instance::Handle};
use crate::{
    bookkeeping::{Books, Cell, Param, worker::Fault},
    sink::SinkError,
};

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
        "id, route, shard, sequence, position, key, event_ms, kind, reason, payload, \"at\"",
    ),
    ("oncegate_tombstones", "target, row_key, version, route, event_ms"),
];

const DDL: &str = "
CREATE TABLE IF NOT EXISTS oncegate_routes (
    name VARCHAR PRIMARY KEY, route_id BLOB NOT NULL, key_spec_id BIGINT NOT NULL, algorithm BIGINT NOT NULL,
    secret BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS oncegate_shards (
    route VARCHAR, shard VARCHAR, epoch BIGINT NOT NULL, sequence BIGINT NOT NULL, position BIGINT,
    watermark_ms BIGINT NOT NULL, floor_ms BIGINT NOT NULL, owner VARCHAR NOT NULL, heartbeat_ms BIGINT NOT NULL,
    partitions BIGINT, source VARCHAR, lineage VARCHAR, PRIMARY KEY (route, shard)
);
CREATE TABLE IF NOT EXISTS oncegate_marks (
    route VARCHAR, shard VARCHAR, sequence BIGINT, epoch BIGINT NOT NULL, min_ms BIGINT NOT NULL,
    max_ms BIGINT NOT NULL, count BIGINT NOT NULL, block BLOB NOT NULL, PRIMARY KEY (route, shard, sequence)
);
CREATE SEQUENCE IF NOT EXISTS oncegate_dead_letter_ids;
CREATE TABLE IF NOT EXISTS oncegate_dead_letters (
    id BIGINT NOT NULL DEFAULT nextval('oncegate_dead_letter_ids'), route VARCHAR NOT NULL, shard VARCHAR NOT NULL,
    sequence BIGINT NOT NULL, position BIGINT, key BLOB NOT NULL, event_ms BIGINT NOT NULL, kind VARCHAR NOT NULL,
    reason VARCHAR NOT NULL, payload BLOB, \"at\" TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS oncegate_tombstones (
    target VARCHAR, row_key BLOB, version BLOB NOT NULL, route VARCHAR NOT NULL, event_ms BIGINT NOT NULL,
    PRIMARY KEY (target, row_key)
);
ALTER TABLE oncegate_shards ADD COLUMN IF NOT EXISTS lineage VARCHAR;
";

/// The sink's clock: ms since the epoch.
const NOW_MS: &str = "epoch_ms(now())";

/// All bookkeeping tables are there, the columns of later builds included.
pub(super) fn is_made(connection: &Connection) -> Result<bool, duckdb::Error> {
    let there: i64 = connection.query_row(
        "SELECT count(*) FROM duckdb_tables() WHERE database_name = current_database() AND schema_name = 'main'
         AND table_name IN ('oncegate_routes', 'oncegate_shards', 'oncegate_marks', 'oncegate_dead_letters', 'oncegate_tombstones')",
        [],
        |row| row.get(0),
    )?;
    let whole: bool = connection.query_row(
        "SELECT count(*) = 1 FROM duckdb_columns() WHERE database_name = current_database() AND schema_name = 'main'
         AND table_name = 'oncegate_shards' AND column_name = 'lineage'",
        [],
        |row| row.get(0),
    )?;
    Ok(there == TABLES.len() as i64 && whole)
}

/// Makes the bookkeeping tables that are missing.
pub(super) fn make(connection: &Connection, _writer: &MutexGuard<'_, ()>) -> Result<(), duckdb::Error> {
    connection.execute_batch(&format!("BEGIN TRANSACTION; {DDL} COMMIT;")).inspect_err(|_| {
        // There may be none, if it could not even begin.
        drop(connection.execute_batch("ROLLBACK"));
    })
}

/// A transaction of the only writer, or one that only reads; rolled back unless it is committed.
pub(super) struct Transaction<'c> {
    pub(super) connection: &'c Connection,
    open: bool,
}

impl<'c> Transaction<'c> {
    pub(super) fn begin(connection: &'c Connection, _writer: &MutexGuard<'_, ()>) -> Result<Self, Fault> {
        Self::of(connection, "BEGIN TRANSACTION")
    }

    /// Sees one state of the file, whoever writes beside it.
    pub(super) fn reading(connection: &'c Connection) -> Result<Self, Fault> {
        Self::of(connection, "BEGIN TRANSACTION READ ONLY")
    }

    fn of(connection: &'c Connection, begin: &str) -> Result<Self, Fault> {
        connection.execute_batch(begin).map_err(|error| fault("beginning a transaction", &error))?;
        Ok(Self { connection, open: true })
    }

    /// Never after a failed statement: DuckDB then rolls back, and calls it a success.
    pub(super) fn commit(mut self) -> Result<(), duckdb::Error> {
        self.open = false;
        self.connection.execute_batch("COMMIT")
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if self.open {
            // It fails only where no transaction is left.
            drop(self.connection.execute_batch("ROLLBACK"));
        }
    }
}

/// Waits for the other lanes that write.
pub(super) fn writer<'h>(handle: &'h Handle, config: &DuckdbConfig) -> Result<MutexGuard<'h, ()>, Fault> {
    handle.writer(config.busy_timeout).ok_or_else(|| {
        SinkError::NotApplied {
            reason: format!(
                "{}: another lane has been writing for {} ms; raise busy_timeout, or use fewer lanes",
                config.path.display(),
                config.busy_timeout.as_millis()
            ),
            retry: true,
        }
        .into()
    })
}

impl Books for Transaction<'_> {
    fn now_ms(&self) -> &'static str {
        NOW_MS
    }

    fn run(&self, doing: &str, sql: &str, params: &[Param<'_>]) -> Result<usize, Fault> {
        self.connection
            .prepare_cached(sql)
            .and_then(|mut statement| statement.execute(duckdb::params_from_iter(params)))
            .map_err(|error| fault(doing, &error))
    }

    fn query(
        &self,
        doing: &str,
        sql: &str,
        params: &[Param<'_>],
        each: &mut dyn FnMut(Vec<Cell>) -> bool,
    ) -> Result<(), Fault> {
        let mut run = || {
            let mut statement = self.connection.prepare_cached(sql)?;
            let mut rows = statement.query(duckdb::params_from_iter(params))?;
            let columns = rows.as_ref().map_or(0, |statement| statement.column_count());
            while let Some(row) = rows.next()? {
                let cells = (0..columns)
                    .map(|column| row.get::<_, Value>(column).map(cell))
                    .collect::<Result<_, _>>()?;
                if !each(cells) {
                    break;
                }
            }
            Ok(())
        };
        run().map_err(|error: duckdb::Error| fault(doing, &error))
    }
}

impl ToSql for Param<'_> {
    fn to_sql(&self) -> duckdb::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match *self {
            Param::Null => ValueRef::Null,
            Param::Integer(value) => ValueRef::BigInt(value),
            Param::Text(text) => ValueRef::Text(text.as_bytes()),
            Param::Blob(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

fn cell(value: Value) -> Cell {
    match value {
        Value::BigInt(value) => Cell::Integer(value),
        Value::Int(value) => Cell::Integer(value.into()),
        Value::Boolean(value) => Cell::Integer(value.into()),
        Value::Text(text) => Cell::Text(text),
        Value::Blob(bytes) => Cell::Blob(bytes),
        _ => Cell::Null,
    }
}

/// `name` as an SQL identifier.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// What kind of failure an error is. DuckDB tells it by the first words of its text alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    /// A row breaks a rule of the table, or an expression of it fails on a value.
    Row,
    /// It may go better the next time.
    Again,
    /// Memory or disk ran out.
    Full,
    /// The file, its lock or its permissions.
    Io,
    /// DuckDB gives the instance up.
    Fatal,
    /// The table or its columns are not what they were.
    Schema,
    Other,
}

pub(super) fn classify(error: &duckdb::Error) -> Class {
    let text = text(error);
    let has = |part: &str| text.contains(part);
    let begins = |part: &str| text.strip_prefix("Failed to append: ").unwrap_or(&text).starts_with(part);
    // Such a text quotes values: nothing in it is looked for.
    let of_a_row = ["Constraint Error", "Conversion Error", "Out of Range Error", "Invalid Input Error"];
    if of_a_row.iter().any(|front| begins(front)) {
        Class::Row
    } else if begins("FATAL") || begins("INTERNAL") {
        Class::Fatal
    } else if begins("IO Error") || begins("Permission Error") {
        if has("No space left") || has("full") { Class::Full } else { Class::Io }
    } else if begins("Out of Memory Error") {
        Class::Full
    } else if begins("TransactionContext Error") {
        Class::Again
    } else if begins("Catalog Error") || begins("Binder Error") || begins("Parser Error") {
        Class::Schema
    } else if broken_rule(&text).is_some() {
        Class::Row
    } else if has("has been invalidated") {
        Class::Fatal
    } else if has("onflict on ") {
        Class::Again
    } else {
        Class::Other
    }
}

/// Which rule of the table the text says was broken; it quotes no value.
fn broken_rule(text: &str) -> Option<String> {
    let behind = |part: &str| text.find(part).map(|at| text[at..].trim_end_matches('.').to_owned());
    // Both name the table, and a column or an expression.
    if let Some(rule) = behind("NOT NULL constraint failed").or_else(|| behind("CHECK constraint failed")) {
        return Some(rule);
    }
    let says = |part: &str| text.contains(part);
    // The texts of these quote the key.
    if says("still referenced") {
        Some("a foreign key of another table refers to the row".to_owned())
    } else if says("foreign key constraint") {
        Some("a foreign key refers to a row that is not there".to_owned())
    } else if says("violates primary key constraint") {
        Some("another row has this primary key".to_owned())
    } else if says("violates unique constraint") || says("duplicate key") || says("Duplicate key") {
        Some("another row has this key of a PRIMARY KEY or UNIQUE constraint".to_owned())
    } else {
        None
    }
}

/// Why DuckDB refused a row, without its values.
pub(super) fn refusal(table: &str, error: &duckdb::Error) -> String {
    match broken_rule(&text(error)) {
        Some(rule) => format!("{rule} (table {table:?})"),
        None => {
            format!("an expression of table {table:?} (a default, a check or an index) fails on its values")
        }
    }
}

/// An error from outside COMMIT: nothing of the transaction can come any more, for a DuckDB file has no server that might still be
/// at it.
pub(super) fn fault(doing: &str, error: &duckdb::Error) -> Fault {
    let class = classify(error);
    let (retry, lost, advice) = match class {
        Class::Again => (true, false, "it is tried again"),
        Class::Full => (true, false, "make room on the disk or in memory"),
        Class::Io => (true, true, "check the file, its folder and their permissions"),
        Class::Fatal => (true, true, "the file is opened again"),
        Class::Row | Class::Schema | Class::Other => {
            (false, false, "check the table and the oncegate_* tables against the start-up checks")
        }
    };
    // What is wrong with a row is said with its values.
    let what = match class {
        Class::Row => broken_rule(&text(error)).unwrap_or_else(|| "an expression fails".to_owned()),
        _ => text(error),
    };
    Fault { error: SinkError::NotApplied { reason: format!("{doing}: {what}; {advice}"), retry }, lost }
}

/// The error in one line, as DuckDB says it.
pub(super) fn text(error: &duckdb::Error) -> String {
    let text = match error {
        duckdb::Error::DuckDBFailure(_, Some(message)) => message.clone(),
        other => other.to_string(),
    };
    text.lines().next().unwrap_or_default().to_owned()
}
