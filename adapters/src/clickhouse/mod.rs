//! The ClickHouse sink, over HTTP: a table of the MergeTree family, exactly once by the journal and `insert_deduplication_token`.
//!
//! | file | holds |
//! | --- | --- |
//! | `probe.rs` | start-up checks; how the table looks ([`layout::Layout`]) |
//! | `layout.rs` | the table as sessions use it: statement, encoder's plan, window |
//! | `types.rs` | ClickHouse's types, read from their names |
//! | `encode.rs` `values.rs` | a record's values to a row in `RowBinaryWithDefaults`. Pure |
//! | `client.rs` | one connection; ClickHouse's errors by their codes |
//! | `packing.rs` | compressed bodies |
//! | `remote.rs` | [`crate::journal`]'s target: parts of one partition, tokens, the window |
//!
//! What commits a batch, and what becomes of one whose reply is lost, is told in [`crate::journal`]. To ClickHouse it is left to drop a
//! block whose token it knows. One insert is one block of one partition: the engine itself says which partition each row belongs to, the
//! batch is divided by that, and the insert bears settings under which the engine refuses a block of two.

mod client;
mod encode;
mod layout;
mod packing;
mod probe;
mod remote;
mod types;
mod values;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;

pub use packing::Compression;

use crate::{
    http_client::{Place, shown, trust},
    journal::{Hold, JournalConfig, JournalSession},
    sink::{Encode, Guarantee, Misfit, Mode, Session, Sink},
};

/// What names a table and how its rows are written.
#[derive(Clone, PartialEq, Eq)]
pub struct ClickhouseConfig {
    /// `http://host:8123` or `https://host:8443`.
    pub url: String,
    /// User and password; those of the URL, or ClickHouse's `default`, if none.
    pub user: Option<(String, String)>,
    /// `database.table`, or `table` in the database `default`.
    pub table: String,
    /// `Insert` or `UpsertIfNewer`.
    pub mode: Mode,
    /// The row key's columns, in `UpsertIfNewer`.
    pub row_key: Vec<String>,
    /// The version column, in `UpsertIfNewer`.
    pub version: Option<String>,
    /// A String column that is filled with the token of each row's insert, so that the table can be asked what it has.
    pub batch_column: Option<String>,
    /// How the bodies of inserts travel and are kept.
    pub compression: Compression,
    /// Tables with dependent materialized views are taken too.
    pub accept_views: bool,
    /// Bound on making a connection.
    pub connect_timeout: Duration,
    /// Bound on one request.
    pub request_timeout: Duration,
    /// Where the journal is.
    pub journal: JournalConfig,
}

impl fmt::Debug for ClickhouseConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClickhouseConfig")
            .field("url", &shown(&self.url))
            .field("table", &self.table)
            .field("mode", &self.mode)
            .field("row_key", &self.row_key)
            .field("version", &self.version)
            .field("batch_column", &self.batch_column)
            .field("compression", &self.compression)
            .field("accept_views", &self.accept_views)
            .field("connect_timeout", &self.connect_timeout)
            .field("request_timeout", &self.request_timeout)
            .field("journal", &self.journal)
            .finish_non_exhaustive()
    }
}

impl ClickhouseConfig {
    /// `table` behind `url` in `insert` mode, with the journal in `folder`; requests take up to 60 s.
    pub fn new(
        url: impl Into<String>,
        table: impl Into<String>,
        folder: impl Into<std::path::PathBuf>,
    ) -> Self {
        Self {
            url: url.into(),
            user: None,
            table: table.into(),
            mode: Mode::Insert,
            row_key: Vec::new(),
            version: None,
            batch_column: None,
            compression: Compression::default(),
            accept_views: false,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(60),
            journal: JournalConfig::new(folder),
        }
    }

    /// Database and table.
    fn names(&self) -> (&str, &str) {
        self.table.split_once('.').unwrap_or(("default", &self.table))
    }
}

/// A table of ClickHouse as a sink.
#[derive(Clone)]
pub struct ClickhouseSink {
    config: Arc<ClickhouseConfig>,
    server: client::Server,
    /// As the last probe saw the table.
    probed: Probed,
    /// The journal's folder, once it was probed.
    hold: Arc<Mutex<Option<Arc<Hold>>>>,
}

impl fmt::Debug for ClickhouseSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClickhouseSink").field("config", &self.config).finish_non_exhaustive()
    }
}

/// What probe and sessions share.
type Probed = Arc<Mutex<Option<Arc<layout::Layout>>>>;

impl ClickhouseSink {
    /// Checks the URL; connects to nothing yet: `probe` does.
    pub fn new(config: ClickhouseConfig) -> Result<Self, Misfit> {
        let bad = |what: String| Misfit { what, remedy: "correct the sink's url".to_owned() };
        let place = Place::parse(&config.url, "a ClickHouse server").map_err(bad)?;
        let user = config.user.clone().or_else(|| place.user.clone());
        let server = client::Server {
            user,
            place,
            tls: trust().map_err(bad)?,
            connect_timeout: config.connect_timeout,
            request_timeout: config.request_timeout,
        };
        Ok(Self { config: Arc::new(config), server, probed: Arc::default(), hold: Arc::default() })
    }
}

/// Runs one query at the server of `config` and answers with its text: for a look from outside (drills).
pub async fn ask(config: &ClickhouseConfig, sql: &str) -> Result<String, String> {
    let sink = ClickhouseSink::new(config.clone()).map_err(|misfit| misfit.to_string())?;
    let answered = client::Client::new(sink.server).query(sql, "").await;
    let answered = answered.map_err(|failure| failure.full())?;
    Ok(String::from_utf8_lossy(&answered.body).into_owned())
}

#[async_trait]
impl Sink for ClickhouseSink {
    fn guarantee(&self) -> Guarantee {
        Guarantee::Transactional
    }

    fn is_local(&self) -> bool {
        true
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
        let journal = self.config.journal.clone();
        let held = tokio::task::spawn_blocking(move || journal.probe()).await.unwrap_or_else(|ended| {
            Err(Misfit {
                what: format!("the check of the journal's folder did not end: {ended}"),
                remedy: "report this as a bug".to_owned(),
            })
        });
        let probed = probe::probe(&self.config, &mut client::Client::new(self.server.clone())).await;
        let layout = match (held, probed) {
            (Ok(hold), Ok(layout)) => {
                *self.hold.lock() = Some(hold);
                Arc::new(layout)
            }
            (held, probed) => {
                return Err(held.err().into_iter().chain(probed.err().into_iter().flatten()).collect());
            }
        };
        *self.probed.lock() = Some(layout.clone());
        Ok(Arc::new(encode::Encoder::new(layout)))
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        let client = client::Client::new(self.server.clone());
        let remote = remote::Table::new(self.config.clone(), client, self.probed.clone());
        Box::new(JournalSession::new(Arc::new(self.config.journal.clone()), Box::new(remote), route, owner))
    }
}

/// The name of a type; how far partitions have come, before and now.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    drop(types::parse(text));
    let [before, now] =
        crate::fuzzing::parts(bytes).map(|part| std::str::from_utf8(part.unwrap_or_default()));
    if let (Ok(before), Ok(now)) = (before, now) {
        for each in [false, true] {
            remote::since(before, now, each);
        }
    }
}
