//! What sinks that keep their bookkeeping in a database file of their own have in common: shard rows, marks and dead letters, the
//! thread that owns a connection, and the session over it. Which database it is, an [`session::Engine`] knows.
//!
//! | file | holds |
//! | --- | --- |
//! | `shards.rs` | ownership and the fence (P3 to P5) |
//! | `marks.rs` | marks, dead letters, floors (P10, P11) |
//! | `worker.rs` | the thread that owns a session's connection |
//! | `file_id.rs` | which file a path leads to |
//! | `session.rs` | [`crate::sink::Session`] |

pub(crate) mod file_id;
pub(crate) mod marks;
pub(crate) mod session;
pub(crate) mod shards;
pub(crate) mod worker;

use worker::Fault;

/// Runs statements on the bookkeeping tables: a connection, or a transaction on it. Parameters are numbered: `?1`, `?2`.
pub(crate) trait Books {
    /// The sink's clock as an SQL expression: ms since the epoch.
    fn now_ms(&self) -> &'static str;
    /// Runs one statement; answers with how many rows it touched. `doing` is what a fault says was being done.
    fn run(&self, doing: &str, sql: &str, params: &[Param<'_>]) -> Result<usize, Fault>;
    /// Runs one query; `each` takes its rows until it answers false.
    fn query(
        &self,
        doing: &str,
        sql: &str,
        params: &[Param<'_>],
        each: &mut dyn FnMut(Vec<Cell>) -> bool,
    ) -> Result<(), Fault>;
}

/// The first row of a query.
pub(crate) fn first(
    books: &dyn Books,
    doing: &str,
    sql: &str,
    params: &[Param<'_>],
) -> Result<Option<Vec<Cell>>, Fault> {
    let mut found = None;
    books.query(doing, sql, params, &mut |row| {
        found = Some(row);
        false
    })?;
    Ok(found)
}

/// A value on its way to a statement.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Param<'a> {
    Null,
    Integer(i64),
    Text(&'a str),
    Blob(&'a [u8]),
}

impl From<i64> for Param<'_> {
    fn from(value: i64) -> Self {
        Self::Integer(value)
    }
}

impl<'a> From<&'a str> for Param<'a> {
    fn from(value: &'a str) -> Self {
        Self::Text(value)
    }
}

impl<'a> From<&'a [u8]> for Param<'a> {
    fn from(value: &'a [u8]) -> Self {
        Self::Blob(value)
    }
}

impl<'a, T: Into<Param<'a>>> From<Option<T>> for Param<'a> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// A value of a bookkeeping table.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) enum Cell {
    #[default]
    Null,
    Integer(i64),
    Text(String),
    Blob(Vec<u8>),
}

/// One row, read column by column. The start-up checks have seen that the tables have the types which are read here; what is of
/// another type after all reads as null, zero or empty.
pub(crate) struct Cells(std::vec::IntoIter<Cell>);

impl Cells {
    pub(crate) fn of(row: Vec<Cell>) -> Self {
        Self(row.into_iter())
    }

    pub(crate) fn optional(&mut self) -> Option<i64> {
        match self.0.next() {
            Some(Cell::Integer(value)) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn integer(&mut self) -> i64 {
        self.optional().unwrap_or_default()
    }

    pub(crate) fn optional_text(&mut self) -> Option<String> {
        match self.0.next() {
            Some(Cell::Text(value)) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn text(&mut self) -> String {
        self.optional_text().unwrap_or_default()
    }

    pub(crate) fn blob(&mut self) -> Vec<u8> {
        match self.0.next() {
            Some(Cell::Blob(value)) => value,
            _ => Vec::new(),
        }
    }
}
