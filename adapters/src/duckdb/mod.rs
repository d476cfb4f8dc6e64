//! The DuckDB sink: `Transactional`, in one file, beside the rows it writes.
//!
//! | file | holds |
//! | --- | --- |
//! | `instance.rs` | the one database instance of a file that this process has |
//! | `schema.rs` `errors.rs` | bookkeeping tables and transactions; DuckDB's errors in the sink's words |
//! | `probe.rs` | start-up checks; how the target table looks ([`probe::Layout`]) |
//! | `types.rs` `values.rs` `encode.rs` | a record's values to one row |
//! | `rows.rs` `arrays.rs` | the rows of a batch, and the same as columns |
//! | `session.rs` | the session's [`crate::bookkeeping::session::Engine`] |
//! | `deliver.rs` `write.rs` `refuse.rs` | one batch, one transaction; its statements; which rows DuckDB refuses |
//!
//! One process at a time has a DuckDB file, and in it this sink has one writer at a time, as SQLite has: transactions of several
//! lanes wait for each other instead of meeting in a conflict. DuckDB has no savepoints, and an error ends the transaction: so
//! rows that it refuses are looked for in transactions that are rolled back, and the batch then goes without them.

mod arrays;
mod deliver;
mod encode;
mod errors;
mod instance;
mod probe;
mod refuse;
mod rows;
mod schema;
mod session;
#[cfg(test)]
mod tests;
mod types;
mod values;
mod write;

use std::{path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;

use crate::sink::{Encode, Guarantee, Misfit, Mode, Session, Sink};

/// What names a DuckDB target and how its rows are written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DuckdbConfig {
    /// The database file. Made if it is missing. Not `:memory:`: rows and marks must outlive the process.
    pub path: PathBuf,
    /// The table's name in the schema `main`, as DuckDB keeps it.
    pub table: String,
    /// How a row meets the row that is there.
    pub mode: Mode,
    /// The row key's columns; may be empty in `insert` mode.
    pub row_key: Vec<String>,
    /// The version column of `upsert-if-newer`.
    pub version: Option<String>,
    /// The columns that records fill, in this order; all that can be written if none.
    pub columns: Option<Vec<String>>,
    /// DDL to run if the table is missing.
    pub create: Option<String>,
    /// How long to wait for another lane that writes to the file.
    pub busy_timeout: Duration,
}

impl DuckdbConfig {
    /// `table` in the file `path`, in `insert` mode without row key, waiting up to 5 s for another lane.
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

/// A table of a DuckDB file as a sink.
#[derive(Clone, Debug)]
pub struct DuckdbSink {
    config: Arc<DuckdbConfig>,
    /// As the last probe saw the table: sessions refuse to write to another one.
    probed: Probed,
}

/// What probe and sessions share.
type Probed = Arc<Mutex<Option<Arc<probe::Layout>>>>;

impl DuckdbSink {
    /// Does not open the file yet: `probe` does.
    pub fn new(config: DuckdbConfig) -> Self {
        Self { config: Arc::new(config), probed: Arc::default() }
    }
}

#[async_trait]
impl Sink for DuckdbSink {
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
                    what: format!("the check of the DuckDB file did not end: {ended}"),
                    remedy: "report this as a bug".to_owned(),
                }])
            })?;
        let layout = Arc::new(layout);
        *self.probed.lock() = Some(layout.clone());
        Ok(Arc::new(encode::Encoder::new(layout)))
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        Box::new(session::session(self.config.clone(), self.probed.clone(), route, owner))
    }
}

/// A connection to a DuckDB file beside the sinks of this process: for looks from outside. While a sink has the file open, a plain
/// [`duckdb::Connection::open`] in the same process would be a second database over it, and would damage it.
pub struct FileConnection {
    connection: duckdb::Connection,
    /// Ends after its connection.
    _handle: instance::Handle,
}

impl FileConnection {
    /// Of the file at `path`, which is made if it is missing. Blocks.
    pub fn open(path: &std::path::Path) -> Result<Self, duckdb::Error> {
        let handle = instance::Handle::open(path).map_err(instance::OpenError::into_duckdb)?;
        let connection = handle.connect()?;
        Ok(Self { connection, _handle: handle })
    }
}

impl std::ops::Deref for FileConnection {
    type Target = duckdb::Connection;

    fn deref(&self) -> &duckdb::Connection {
        &self.connection
    }
}

impl std::fmt::Debug for FileConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FileConnection").field(&self.connection).finish()
    }
}
