//! Writes the rows of one batch inside its transaction, one prepared statement a row, and says what became of each.
//!
//! A statement that fails undoes itself and leaves the transaction as it was (`OR ABORT` outranks what the table's
//! constraints say), so a bad row needs no savepoint. Only a trigger's `RAISE(ROLLBACK)` ends the transaction: the
//! batch is then begun again without that row.

use std::collections::HashMap;

use rusqlite::{
    CachedStatement, Connection, ErrorCode, ffi,
    types::{ToSqlOutput, ValueRef},
};

use super::{
    encode,
    packed::{Packed, has, value_of},
    probe::Layout,
    schema::{self, quoted},
    worker::Fault,
};
use crate::sink::{Mode, RowKind, RowOutcome};

/// Why the rows did not go in.
pub(crate) enum Stop {
    /// The batch as a whole failed.
    Batch(Fault),
    /// This row ended the transaction: begin again and refuse it.
    RolledBack(usize, String),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Batch(fault)
    }
}

/// Writes all rows but those in `refused`, which get the outcome given there.
pub(super) fn write(
    connection: &Connection,
    layout: &Layout,
    route: &str,
    packed: &Packed,
    refused: &HashMap<usize, String>,
) -> Result<Vec<RowOutcome>, Stop> {
    let mut writer = Writer::new(connection, layout, route)?;
    let mut outcomes = vec![RowOutcome::Stale; packed.len()];
    for index in packed.order(layout) {
        outcomes[index] = match refused.get(&index) {
            Some(reason) => RowOutcome::Refused { reason: reason.clone() },
            None => writer.one(packed, index)?,
        };
    }
    Ok(outcomes)
}

/// The statements of one batch.
struct Writer<'c> {
    connection: &'c Connection,
    layout: &'c Layout,
    route: &'c str,
    shapes: Shapes<'c>,
    delete: Option<Prepared<'c>>,
    /// Only with versions.
    tombstones: Option<Tombstones<'c>>,
}

/// A statement with its text, to tell a bad row from a changed table.
struct Prepared<'c> {
    statement: CachedStatement<'c>,
    sql: String,
}

impl<'c> Prepared<'c> {
    fn new(connection: &'c Connection, sql: String) -> Result<Self, Fault> {
        let statement = connection
            .prepare_cached(&sql)
            .map_err(|error| schema::fault("preparing a statement", &error))?;
        Ok(Self { statement, sql })
    }

    fn bind(&mut self, index: usize, value: ValueRef<'_>) -> rusqlite::Result<()> {
        self.statement.raw_bind_parameter(index, ToSqlOutput::Borrowed(value))
    }

    /// Rows changed.
    fn run(&mut self) -> rusqlite::Result<usize> {
        self.statement.raw_execute()
    }
}

/// Rows that fill the same columns share their statements.
#[derive(Default)]
struct Shapes<'c> {
    known: Vec<Shape<'c>>,
    by_bitmap: HashMap<Vec<u8>, usize>,
    last: usize,
}

struct Shape<'c> {
    bitmap: Vec<u8>,
    present: Vec<usize>,
    insert: Prepared<'c>,
    /// Made when a row is met.
    upsert: Option<Prepared<'c>>,
}

/// A batch may use so many shapes before they are prepared anew.
const SHAPES: usize = 48;

impl<'c> Shapes<'c> {
    fn of(
        &mut self,
        connection: &'c Connection,
        layout: &Layout,
        bitmap: &[u8],
    ) -> Result<&mut Shape<'c>, Fault> {
        let known = match self.known.get(self.last) {
            Some(last) if last.bitmap == bitmap => Some(self.last),
            _ => self.by_bitmap.get(bitmap).copied(),
        };
        self.last = match known {
            Some(index) => index,
            None => {
                if self.known.len() >= SHAPES {
                    self.known.clear();
                    self.by_bitmap.clear();
                }
                let present: Vec<usize> =
                    (0..layout.columns.len()).filter(|&column| has(bitmap, column)).collect();
                let insert = Prepared::new(connection, insert_sql(layout, &present))?;
                self.by_bitmap.insert(bitmap.to_vec(), self.known.len());
                self.known.push(Shape { bitmap: bitmap.to_vec(), present, insert, upsert: None });
                self.known.len() - 1
            }
        };
        Ok(&mut self.known[self.last])
    }
}

/// `INSERT` of the present columns; a row that is there by its row key is left alone. Other unique indexes refuse the row.
fn insert_sql(layout: &Layout, present: &[usize]) -> String {
    let table = quoted(&layout.table);
    if present.is_empty() {
        return format!("INSERT OR ABORT INTO {table} DEFAULT VALUES");
    }
    let names: Vec<String> = present.iter().map(|&column| quoted(&layout.columns[column].name)).collect();
    let values: Vec<String> = (1..=present.len()).map(|index| format!("?{index}")).collect();
    let conflict = if layout.key.is_empty() {
        String::new()
    } else {
        format!(" ON CONFLICT ({}) DO NOTHING", key_list(layout))
    };
    format!("INSERT OR ABORT INTO {table} ({}) VALUES ({}){conflict}", names.join(", "), values.join(", "))
}

/// `INSERT` that changes the row that is there: the present columns only, and only by a higher version if there is one.
fn upsert_sql(layout: &Layout, present: &[usize]) -> String {
    let table = quoted(&layout.table);
    let names: Vec<String> = present.iter().map(|&column| quoted(&layout.columns[column].name)).collect();
    let values: Vec<String> = (1..=present.len()).map(|index| format!("?{index}")).collect();
    let mut sets: Vec<String> = present
        .iter()
        .filter(|&&column| layout.key.iter().all(|key| key.column != column))
        .map(|&column| quoted(&layout.columns[column].name))
        .map(|name| format!("{name} = excluded.{name}"))
        .collect();
    if sets.is_empty() {
        // Nothing to change, but the row was met.
        sets.extend(
            layout
                .key
                .first()
                .map(|key| quoted(&layout.columns[key.column].name))
                .map(|name| format!("{name} = {name}")),
        );
    }
    let guard = match layout.version {
        Some(version) => {
            let name = quoted(&layout.columns[version].name);
            let there = format!("{table}.{name}");
            format!(
                " WHERE {there} IS NULL OR {} > {}",
                comparable(layout, version, &format!("excluded.{name}")),
                comparable(layout, version, &there)
            )
        }
        None => String::new(),
    };
    format!(
        "INSERT OR ABORT INTO {table} ({}) VALUES ({}) ON CONFLICT ({}) DO UPDATE SET {}{guard}",
        names.join(", "),
        values.join(", "),
        key_list(layout),
        sets.join(", ")
    )
}

fn delete_sql(layout: &Layout) -> String {
    let guard = match layout.version {
        Some(version) => {
            let there = quoted(&layout.columns[version].name);
            let given = format!("?{}", layout.key.len() + 1);
            format!(
                " AND ({there} IS NULL OR {} > {})",
                comparable(layout, version, &given),
                comparable(layout, version, &there)
            )
        }
        None => String::new(),
    };
    format!("DELETE FROM {} WHERE {}{guard}", quoted(&layout.table), key_equals(layout))
}

fn key_list(layout: &Layout) -> String {
    layout.key.iter().map(|key| key.sql.as_str()).collect::<Vec<_>>().join(", ")
}

fn key_equals(layout: &Layout) -> String {
    let parts: Vec<String> =
        layout.key.iter().enumerate().map(|(index, key)| format!("{} = ?{}", key.sql, index + 1)).collect();
    parts.join(" AND ")
}

/// A version as it is compared: times by their instant, text byte by byte.
fn comparable(layout: &Layout, version: usize, sql: &str) -> String {
    if layout.kinds[version] == super::probe::Kind::Timestamp {
        format!("oncegate_instant({sql})")
    } else {
        format!("{sql} COLLATE BINARY")
    }
}

impl<'c> Writer<'c> {
    fn new(connection: &'c Connection, layout: &'c Layout, route: &'c str) -> Result<Self, Fault> {
        let tombstones = match layout.version {
            Some(version) => Some(Tombstones::new(connection, layout, version)?),
            None => None,
        };
        Ok(Self { connection, layout, route, shapes: Shapes::default(), delete: None, tombstones })
    }

    fn one(&mut self, packed: &Packed, index: usize) -> Result<RowOutcome, Stop> {
        let row = packed.row(index);
        let result = match packed.rows[index].kind {
            RowKind::Write => self.write(row, packed.key(index)),
            RowKind::Delete => self.delete(row, packed.key(index), packed.rows[index].event_ms),
        };
        match result {
            Ok(outcome) => Ok(outcome),
            Err(RowError::Batch(fault)) => Err(Stop::Batch(fault)),
            Err(RowError::Sqlite(error, sql)) => {
                let reason = match refusal(self.connection, &self.layout.table, &error, &sql) {
                    Some(reason) => reason,
                    None => return Err(Stop::Batch(schema::fault("writing rows", &error))),
                };
                if self.connection.is_autocommit() {
                    return Err(Stop::RolledBack(index, reason));
                }
                Ok(RowOutcome::Refused { reason })
            }
        }
    }

    fn write(&mut self, row: &[u8], key: &[u8]) -> Result<RowOutcome, RowError> {
        let layout = self.layout;
        let mut buried = false;
        if let (Some(tombstones), Some(version)) = (&mut self.tombstones, layout.version)
            && tombstones.any
        {
            match tombstones.wins(&layout.table, key, value_of(layout, row, version))? {
                Some(true) => return Ok(RowOutcome::Stale),
                Some(false) => buried = true,
                None => {}
            }
        }
        let shape = self.shapes.of(self.connection, layout, &row[..layout.bitmap_bytes()])?;
        let outcome = shape.write(self.connection, layout, row)?;
        if buried
            && outcome != RowOutcome::Stale
            && let Some(tombstones) = &mut self.tombstones
        {
            tombstones.remove(&layout.table, key)?;
        }
        Ok(outcome)
    }

    fn delete(&mut self, row: &[u8], key: &[u8], event_ms: i64) -> Result<RowOutcome, RowError> {
        let layout = self.layout;
        let delete = match &mut self.delete {
            Some(delete) => delete,
            slot => slot.insert(Prepared::new(self.connection, delete_sql(layout))?),
        };
        let version = layout.version.map(|version| value_of(layout, row, version));
        if let (Some(tombstones), Some(version)) = (&mut self.tombstones, version)
            && tombstones.any
            && tombstones.wins(&layout.table, key, version)? == Some(true)
        {
            return Ok(RowOutcome::Stale);
        }
        let bound = (|| {
            for (index, key) in layout.key.iter().enumerate() {
                delete.bind(index + 1, value_of(layout, row, key.column))?;
            }
            if let Some(version) = version {
                delete.bind(layout.key.len() + 1, version)?;
            }
            delete.run()
        })();
        let deleted = bound.map_err(|error| RowError::Sqlite(error, delete.sql.clone()))? > 0;
        let (Some(tombstones), Some(version)) = (&mut self.tombstones, version) else {
            return Ok(if deleted { RowOutcome::Updated } else { RowOutcome::Written });
        };
        if !deleted && tombstones.row_is_there(layout, row)? {
            return Ok(RowOutcome::Stale);
        }
        tombstones.put(&layout.table, key, version, self.route, event_ms)?;
        Ok(if deleted { RowOutcome::Updated } else { RowOutcome::Written })
    }
}

impl<'c> Shape<'c> {
    fn bind(
        prepared: &mut Prepared<'c>,
        present: usize,
        bitmap_bytes: usize,
        row: &[u8],
    ) -> rusqlite::Result<()> {
        let mut at = bitmap_bytes;
        for index in 1..=present {
            let (value, length) = encode::take(&row[at..]);
            prepared.bind(index, value)?;
            at += length;
        }
        Ok(())
    }

    fn write(
        &mut self,
        connection: &'c Connection,
        layout: &Layout,
        row: &[u8],
    ) -> Result<RowOutcome, RowError> {
        let (present, bitmap) = (self.present.len(), self.bitmap.len());
        let made = Self::bind(&mut self.insert, present, bitmap, row).and_then(|()| self.insert.run());
        if made.map_err(|error| RowError::Sqlite(error, self.insert.sql.clone()))? > 0 {
            return Ok(RowOutcome::Written);
        }
        if layout.mode == Mode::Insert {
            return Ok(RowOutcome::Stale);
        }
        let upsert = match &mut self.upsert {
            Some(upsert) => upsert,
            slot => slot.insert(Prepared::new(connection, upsert_sql(layout, &self.present))?),
        };
        let changed = Self::bind(upsert, present, bitmap, row).and_then(|()| upsert.run());
        // Without a version an upsert changes nothing only where a trigger suppresses it.
        Ok(if changed.map_err(|error| RowError::Sqlite(error, upsert.sql.clone()))? > 0 {
            RowOutcome::Updated
        } else {
            RowOutcome::Stale
        })
    }
}

enum RowError {
    Batch(Fault),
    Sqlite(rusqlite::Error, String),
}

impl From<Fault> for RowError {
    fn from(fault: Fault) -> Self {
        Self::Batch(fault)
    }
}

/// Versions of deleted rows: an older write that comes later stays away.
struct Tombstones<'c> {
    /// There are some for this table.
    any: bool,
    wins: Prepared<'c>,
    put: Prepared<'c>,
    remove: Prepared<'c>,
    there: Prepared<'c>,
}

impl<'c> Tombstones<'c> {
    fn new(connection: &'c Connection, layout: &Layout, version: usize) -> Result<Self, Fault> {
        let any = connection
            .query_row(
                "SELECT EXISTS (SELECT 1 FROM oncegate_tombstones WHERE target = ?1)",
                [&layout.table],
                |row| row.get(0),
            )
            .map_err(|error| schema::fault("looking for tombstones", &error))?;
        Ok(Self {
            any,
            wins: Prepared::new(
                connection,
                format!(
                    "SELECT {} >= {} FROM oncegate_tombstones WHERE target = ?1 AND row_key = ?2",
                    comparable(layout, version, "version"),
                    comparable(layout, version, "?3")
                ),
            )?,
            put: Prepared::new(
                connection,
                "INSERT INTO oncegate_tombstones (target, row_key, version, route, event_ms) VALUES (?1, ?2, ?3, ?4, ?5)
                 ON CONFLICT (target, row_key) DO UPDATE
                 SET version = excluded.version, route = excluded.route, event_ms = excluded.event_ms"
                    .to_owned(),
            )?,
            remove: Prepared::new(
                connection,
                "DELETE FROM oncegate_tombstones WHERE target = ?1 AND row_key = ?2".to_owned(),
            )?,
            there: Prepared::new(
                connection,
                format!("SELECT 1 FROM {} WHERE {}", quoted(&layout.table), key_equals(layout)),
            )?,
        })
    }

    /// Whether the tombstone's version is as high or higher; none if there is no tombstone.
    fn wins(&mut self, table: &str, key: &[u8], version: ValueRef<'_>) -> Result<Option<bool>, RowError> {
        let Prepared { statement, sql } = &mut self.wins;
        let mut look = || {
            statement.raw_bind_parameter(1, table)?;
            statement.raw_bind_parameter(2, key)?;
            statement.raw_bind_parameter(3, ToSqlOutput::Borrowed(version))?;
            let mut rows = statement.raw_query();
            rows.next()?
                .map(|row| row.get::<_, Option<bool>>(0).map(|wins| wins.unwrap_or(false)))
                .transpose()
        };
        look().map_err(|error| RowError::Sqlite(error, sql.clone()))
    }

    fn put(
        &mut self,
        table: &str,
        key: &[u8],
        version: ValueRef<'_>,
        route: &str,
        event_ms: i64,
    ) -> Result<(), RowError> {
        self.any = true;
        let text = |text| ValueRef::Text(str::as_bytes(text));
        let put = &mut self.put;
        let values = [text(table), ValueRef::Blob(key), version, text(route), ValueRef::Integer(event_ms)];
        let mut run = || {
            for (index, value) in values.into_iter().enumerate() {
                put.bind(index + 1, value)?;
            }
            put.run()
        };
        run().map(|_| ()).map_err(|error| bookkeeping(&error))
    }

    fn remove(&mut self, table: &str, key: &[u8]) -> Result<(), RowError> {
        let remove = &mut self.remove;
        let mut run = || {
            remove.bind(1, ValueRef::Text(table.as_bytes()))?;
            remove.bind(2, ValueRef::Blob(key))?;
            remove.run()
        };
        run().map(|_| ()).map_err(|error| bookkeeping(&error))
    }

    fn row_is_there(&mut self, layout: &Layout, row: &[u8]) -> Result<bool, RowError> {
        let there = &mut self.there;
        let mut look = || {
            for (index, key) in layout.key.iter().enumerate() {
                there.bind(index + 1, value_of(layout, row, key.column))?;
            }
            Ok(there.statement.raw_query().next()?.is_some())
        };
        look().map_err(|error| bookkeeping(&error))
    }
}

/// A failure that no row is to blame for.
fn bookkeeping(error: &rusqlite::Error) -> RowError {
    RowError::Batch(schema::fault("writing tombstones", error))
}

/// Why SQLite refused a row, without its values; none if the row is not to blame.
fn refusal(connection: &Connection, table: &str, error: &rusqlite::Error, sql: &str) -> Option<String> {
    let rusqlite::Error::SqliteFailure(failure, message) = error else { return None };
    let message = message.as_deref().unwrap_or_default();
    match failure.code {
        // What a trigger says may quote the row.
        ErrorCode::ConstraintViolation if failure.extended_code == ffi::SQLITE_CONSTRAINT_TRIGGER => {
            Some(format!("a trigger of table {table:?} refused the row"))
        }
        ErrorCode::ConstraintViolation => Some(format!("{message} (table {table:?})")),
        ErrorCode::TypeMismatch => Some(format!("a value's type does not fit its column (table {table:?})")),
        ErrorCode::TooBig => {
            Some(format!("the row or one of its values is longer than SQLite's limit (table {table:?})"))
        }
        // Also what a changed table gives: then the statement cannot even be prepared any more.
        ErrorCode::Unknown
            if failure.extended_code == ffi::SQLITE_ERROR && connection.prepare(sql).is_ok() =>
        {
            let known = ["malformed JSON", "integer overflow", encode::NOT_A_TIME];
            let what =
                known.into_iter().find(|known| message.contains(known)).unwrap_or("the statement fails");
            Some(format!("{what} (an expression, trigger or check of table {table:?})"))
        }
        _ => None,
    }
}
