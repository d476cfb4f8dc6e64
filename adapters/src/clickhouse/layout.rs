//! The table as sessions use it.

use super::types::Kind;
use crate::sink::Column;

/// As the probe saw the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub(super) database: String,
    pub(super) table: String,
    /// Those that records fill, in the order in which they are sent.
    pub(super) columns: Vec<Column>,
    pub(super) kinds: Vec<Kind>,
    /// The row key's columns, by index.
    pub(super) key: Vec<usize>,
    pub(super) version: Option<usize>,
    /// What decides a row's partition, unless the table has one only.
    pub(super) partition: Option<Partition>,
    /// The column that says that a row is a tombstone.
    pub(super) deleted: Option<String>,
    /// The column that holds the token.
    pub(super) batch: Option<String>,
    /// URL parameters of an insert, but for its token.
    pub(super) statement: String,
    /// Of the statement and the types: rows bear it, so that none is sent that was made for another table.
    pub(super) tag: u32,
    pub(super) window: Window,
    /// Other copies of the table may be behind.
    pub(super) replicated: bool,
    /// A row that came in stays as it came: no merge replaces or drops it, no other copy may have it.
    pub(super) plain: bool,
    /// Rows go on to other tables: an error may come once they are in this one.
    pub(super) views: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Partition {
    /// Those that it is computed from, by index.
    pub(super) columns: Vec<usize>,
    /// As the table says it.
    pub(super) expression: String,
    /// Names and types of `columns`.
    pub(super) structure: String,
}

/// How long tokens are remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Window {
    /// So many blocks.
    pub(super) blocks: i64,
    /// And so long.
    pub(super) ms: Option<i64>,
}

/// `name` as an identifier.
pub(super) fn quoted(name: &str) -> String {
    format!("`{}`", name.replace('\\', "\\\\").replace('`', "\\`"))
}

/// `text` as a string.
pub(super) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"))
}
