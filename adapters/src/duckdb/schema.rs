//! The bookkeeping tables, and transactions.

use duckdb::{
    Connection, ToSql,
    types::{ToSqlOutput, Value, ValueRef},
};
use parking_lot::MutexGuard;

use super::{DuckdbConfig, errors::fault, instance::Handle};
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
";

/// The sink's clock: ms since the epoch.
const NOW_MS: &str = "epoch_ms(now())";

/// Columns that files of earlier builds lack.
const LATER: [(&str, &str); 3] = [("partitions", "BIGINT"), ("source", "VARCHAR"), ("lineage", "VARCHAR")];

/// All bookkeeping tables are there, with all their columns. A table of that name which is not ours is left to the start-up checks.
pub(super) fn is_made(connection: &Connection) -> Result<bool, duckdb::Error> {
    let there: i64 = connection.query_row(
        "SELECT count(*) FROM duckdb_tables() WHERE database_name = current_database() AND schema_name = 'main'
         AND table_name IN ('oncegate_routes', 'oncegate_shards', 'oncegate_marks', 'oncegate_dead_letters', 'oncegate_tombstones')",
        [],
        |row| row.get(0),
    )?;
    Ok(there == TABLES.len() as i64 && lacking(connection)?.is_empty())
}

/// Of [`LATER`], what our table of shards lacks.
fn lacking(connection: &Connection) -> Result<Vec<(&'static str, &'static str)>, duckdb::Error> {
    let columns: Vec<String> = connection
        .prepare(
            "SELECT column_name FROM duckdb_columns() WHERE database_name = current_database() AND schema_name = 'main'
             AND table_name = 'oncegate_shards'",
        )?
        .query_map([], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    let has = |name: &str| columns.iter().any(|column| column == name);
    let ours = has("heartbeat_ms") && has("epoch");
    Ok(LATER.into_iter().filter(|(column, _)| ours && !has(column)).collect())
}

/// Makes the bookkeeping tables, and the columns of them, that are missing.
pub(super) fn make(connection: &Connection, _writer: &MutexGuard<'_, ()>) -> Result<(), duckdb::Error> {
    let whole = |sql: &str| {
        connection.execute_batch(&format!("BEGIN TRANSACTION; {sql} COMMIT;")).inspect_err(|_| {
            // There may be none, if it could not even begin.
            drop(connection.execute_batch("ROLLBACK"));
        })
    };
    whole(DDL)?;
    for (column, kind) in lacking(connection)? {
        whole(&format!("ALTER TABLE oncegate_shards ADD COLUMN {column} {kind};"))?;
    }
    Ok(())
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
