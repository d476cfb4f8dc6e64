//! The SQLite sink: `Transactional`, in one file, beside the rows it writes.
//!
//! | file | holds |
//! | --- | --- |
//! | `schema.rs` | bookkeeping tables, opening a connection |
//! | `probe.rs` | start-up checks; how the target table looks ([`probe::Layout`]) |
//! | `encode.rs` | a record's values to one row |
//! | `worker.rs` | the thread that owns a session's connection |
//! | `session.rs` | [`crate::sink::Session`]: ownership, marks, floors |
//! | `deliver.rs` | one batch, one transaction |
//! | `target.rs` | what the rows go into: the table, or what another sink keeps beside its bookkeeping |
//! | `packed.rs` `rows.rs` | the rows of a batch, their order, and the statements that write them |
//!
//! SQLite has one writer at a time: `BEGIN IMMEDIATE` waits for it up to the busy time-out, then the batch is `NotApplied`.
//! A frozen writer (SIGSTOP inside a transaction) cannot be ended by SQL: `acquire` waits for it, and nothing is written twice.

pub(crate) mod deliver;
mod encode;
pub(crate) mod packed;
mod probe;
pub(crate) mod rows;
pub(crate) mod schema;
pub(crate) mod session;
pub(crate) mod target;
#[cfg(test)]
mod tests;
pub(crate) mod worker;

use std::{path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;

use crate::sink::{Encode, Guarantee, Misfit, Mode, Session, Sink};

/// What names a SQLite target and how its rows are written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SqliteConfig {
    /// The database file. Made if it is missing. Not `:memory:`: two connections must see the same rows.
    pub path: PathBuf,
    /// The table's name, as SQLite keeps it, without a schema.
    pub table: String,
    /// How a row meets the row that is there.
    pub mode: Mode,
    /// The row key's columns; may be empty in `insert` mode.
    pub row_key: Vec<String>,
    /// The version column of `upsert-if-newer`.
    pub version: Option<String>,
    /// The columns that records fill, in this order; all that can be written if none.
    pub columns: Option<Vec<String>>,
    /// DDL to run if the table is missing (quickstart).
    pub create: Option<String>,
    /// How long to wait for another writer of the file.
    pub busy_timeout: Duration,
}

impl SqliteConfig {
    /// `table` in the file `path`, in `insert` mode without row key, waiting up to 5 s for another writer.
    pub fn new(path: impl Into<PathBuf>, table: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            table: table.into(),
            mode: Mode::Insert,
            row_key: Vec::new(),
            version: None,
            columns: None,
            create: None,
            busy_timeout: Duration::from_secs(5),
        }
    }
}

/// A table of a SQLite file as a sink.
#[derive(Clone, Debug)]
pub struct SqliteSink {
    config: Arc<SqliteConfig>,
    /// As the last probe saw the table: sessions refuse to write to another one.
    probed: Probed,
}

/// What probe and sessions share.
type Probed = Arc<Mutex<Option<Arc<probe::Layout>>>>;

impl SqliteSink {
    /// Does not open the file yet: `probe` does.
    pub fn new(config: SqliteConfig) -> Self {
        Self { config: Arc::new(config), probed: Arc::default() }
    }
}

#[async_trait]
impl Sink for SqliteSink {
    fn guarantee(&self) -> Guarantee {
        Guarantee::Transactional
    }

    fn mode(&self) -> Mode {
        self.config.mode
    }

    fn row_key(&self) -> &[String] {
        &self.config.row_key
    }

    fn version(&self) -> Option<&str> {
        self.config.version.as_deref()
    }

    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>> {
        let config = self.config.clone();
        let layout =
            tokio::task::spawn_blocking(move || probe::probe(&config)).await.unwrap_or_else(|ended| {
                Err(vec![Misfit {
                    what: format!("the check of the SQLite file did not end: {ended}"),
                    remedy: "report this as a bug".to_owned(),
                }])
            })?;
        let layout = Arc::new(layout);
        *self.probed.lock() = Some(layout.clone());
        Ok(Arc::new(encode::Encoder::new(layout)))
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        let table = target::Table { config: self.config.clone(), probed: self.probed.clone() };
        Box::new(session::SqliteSession::new(self.config.clone(), Arc::new(table), route, owner))
    }
}

/// How many rows a table has, and how many distinct values a column: for a look from outside (quickstart).
pub fn count_distinct(
    path: &std::path::Path,
    table: &str,
    column: &str,
) -> Result<(u64, u64), rusqlite::Error> {
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    let query = format!("SELECT count(*), count(DISTINCT {}) FROM {}", quoted(column), quoted(table));
    let connection = rusqlite::Connection::open(path)?;
    connection.query_row(&query, [], |row| Ok((row.get(0)?, row.get(1)?)))
}
