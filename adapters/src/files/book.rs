//! The list of files in the bookkeeping.

use rusqlite::{Connection, OptionalExtension, params};

use super::FilesConfig;
use crate::sqlite::schema::NOW_MS;

/// States: `open` (one a route; the next rows go there), `finished` (no more rows; not yet in the folder), `published`.
const DDL: &str = "
CREATE TABLE IF NOT EXISTS oncegate_files (
    id INTEGER PRIMARY KEY AUTOINCREMENT, route TEXT NOT NULL, name TEXT NOT NULL UNIQUE, state TEXT NOT NULL,
    bytes INTEGER NOT NULL, rows INTEGER NOT NULL, made_ms INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS oncegate_files_open ON oncegate_files (route) WHERE state = 'open';
CREATE INDEX IF NOT EXISTS oncegate_files_finished ON oncegate_files (route) WHERE state = 'finished';
";

/// A file as the book has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) id: i64,
    /// In the folder, once it is published.
    pub(super) name: String,
    /// So many of its bytes count.
    pub(super) bytes: u64,
    /// And so many rows.
    pub(super) rows: u64,
}

impl Entry {
    /// As long as it is not finished.
    pub(super) fn part(&self) -> String {
        part_of(&self.name)
    }
}

/// What a file is called until it is published.
pub(super) fn part_of(name: &str) -> String {
    format!("{name}.part")
}

fn entry(row: &rusqlite::Row<'_>) -> rusqlite::Result<Entry> {
    let count = |value: i64| value.max(0).unsigned_abs();
    Ok(Entry { id: row.get(0)?, name: row.get(1)?, bytes: count(row.get(2)?), rows: count(row.get(3)?) })
}

/// Makes the table if it is missing.
pub(super) fn make(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(DDL)
}

/// The route's open file.
pub(super) fn open_file(connection: &Connection, route: &str) -> rusqlite::Result<Option<Entry>> {
    connection
        .prepare_cached(
            "SELECT id, name, bytes, rows FROM oncegate_files WHERE route = ?1 AND state = 'open'",
        )?
        .query_row([route], entry)
        .optional()
}

/// A new open file. Numbers are never used again, so that names sort by age; the route is in the name as far as it can be.
pub(super) fn begin_file(connection: &Connection, route: &str) -> rusqlite::Result<Entry> {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '_' };
    let stem: String = route.chars().map(plain).take(100).collect();
    connection
        .prepare_cached(&format!(
            "INSERT INTO oncegate_files (route, name, state, bytes, rows, made_ms)
             VALUES (?1, ?2 || '-' || printf('%012d', 1 + coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'oncegate_files'), 0))
                     || '.ndjson', 'open', 0, 0, {NOW_MS})
             RETURNING id, name, bytes, rows"
        ))?
        .query_row(params![route, stem], entry)
}

/// So much of it counts now; finished if that is enough for one file.
pub(super) fn grow(connection: &Connection, config: &FilesConfig, grown: &Entry) -> rusqlite::Result<()> {
    let full = grown.bytes >= config.roll_bytes || grown.rows >= config.roll_rows;
    connection
        .prepare_cached("UPDATE oncegate_files SET bytes = ?2, rows = ?3, state = ?4 WHERE id = ?1")?
        .execute(params![
            grown.id,
            i64::try_from(grown.bytes).unwrap_or(i64::MAX),
            i64::try_from(grown.rows).unwrap_or(i64::MAX),
            if full { "finished" } else { "open" }
        ])
        .map(drop)
}

/// Finishes the route's open file if it is old enough (or from the future: the clock was set back).
pub(super) fn finish_old(connection: &Connection, config: &FilesConfig, route: &str) -> rusqlite::Result<()> {
    connection
        .prepare_cached(&format!(
            "UPDATE oncegate_files SET state = 'finished'
             WHERE route = ?1 AND state = 'open' AND rows > 0 AND abs({NOW_MS} - made_ms) >= ?2"
        ))?
        .execute(params![route, i64::try_from(config.roll_after.as_millis()).unwrap_or(i64::MAX)])
        .map(drop)
}

/// Finished files of the route that are not known to be in the folder, oldest first.
pub(super) fn finished(connection: &Connection, route: &str) -> rusqlite::Result<Vec<Entry>> {
    connection
        .prepare_cached(
            "SELECT id, name, bytes, rows FROM oncegate_files WHERE route = ?1 AND state = 'finished' ORDER BY id",
        )?
        .query_map([route], entry)?
        .collect()
}

/// The file is in the folder.
pub(super) fn published(connection: &Connection, id: i64) -> rusqlite::Result<()> {
    connection
        .prepare_cached("UPDATE oncegate_files SET state = 'published' WHERE id = ?1")?
        .execute([id])
        .map(drop)
}

/// Whether a part of this name may hold rows that count.
pub(super) fn has_part(connection: &Connection, part: &str) -> rusqlite::Result<bool> {
    connection
        .prepare_cached(
            "SELECT count(*) FROM oncegate_files WHERE name || '.part' = ?1 AND state <> 'published'",
        )?
        .query_row([part], |row| row.get(0))
}

/// Whether a file of this name in the folder is one of ours.
pub(super) fn knows(connection: &Connection, name: &str) -> rusqlite::Result<bool> {
    connection
        .prepare_cached("SELECT count(*) FROM oncegate_files WHERE name = ?1")?
        .query_row([name], |row| row.get(0))
}

/// Forgets the published files that are not in the folder any more: who read them took them away.
pub(super) fn forget_taken(connection: &Connection, is_there: impl Fn(&str) -> bool) -> rusqlite::Result<()> {
    let names: Vec<(i64, String)> = connection
        .prepare("SELECT id, name FROM oncegate_files WHERE state = 'published'")?
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_, _>>()?;
    let mut delete = connection.prepare("DELETE FROM oncegate_files WHERE id = ?1")?;
    for (id, name) in names {
        if !is_there(&name) {
            delete.execute([id])?;
        }
    }
    Ok(())
}
