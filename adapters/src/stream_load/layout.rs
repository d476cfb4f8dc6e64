//! The table as sessions use it, and the headers of a load.

use super::{Dialect, types::Kind};
use crate::sink::Column;

/// As the probe saw the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub(super) dialect: Dialect,
    /// Those that records fill, in the order in which they are sent.
    pub(super) columns: Vec<Column>,
    pub(super) kinds: Vec<Kind>,
    /// What a row that leaves a column out gets, as JSON.
    pub(super) defaults: Vec<Option<Vec<u8>>>,
    /// The row key's columns, by index.
    pub(super) key: Vec<usize>,
    pub(super) version: Option<usize>,
    /// Rows can be deleted: the member that says so.
    pub(super) deletes: Option<&'static str>,
    /// The headers of a load ([`statement`]).
    pub(super) statement: String,
    /// Of the statement and the types: rows bear it, so that none is sent that was made for another table.
    pub(super) tag: u32,
    pub(super) keep: Keep,
}

/// How long labels are remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Keep {
    /// From a load's end on, ms.
    pub(super) ms: i64,
    /// And so many loads of the database.
    pub(super) loads: i64,
}

/// The member that says that a row is a delete.
pub(super) fn delete_sign(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::StarRocks => "__op",
        Dialect::Doris => "__oncegate_delete",
    }
}

/// The name under which a column's value is sent.
pub(super) fn member(name: &str, kind: &Kind) -> String {
    if let Kind::Binary(_) = kind { format!("__hex_{name}") } else { name.to_owned() }
}

/// A load's headers but for its label, as they are kept with a batch: one a line.
pub(super) fn statement(headers: &[(&str, String)]) -> String {
    headers.iter().map(|(name, value)| format!("{name}: {value}\n")).collect()
}

/// Taken apart again.
pub(super) fn headers(statement: &str) -> Vec<(String, String)> {
    let pairs = statement.lines().filter_map(|line| line.split_once(": "));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}
