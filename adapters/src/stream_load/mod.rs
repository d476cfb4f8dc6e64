//! The StarRocks and Doris sinks, over HTTP: exactly once by the journal and the label of a Stream Load.
//!
//! | file | holds |
//! | --- | --- |
//! | `probe.rs` | start-up checks; how the table looks ([`layout::Layout`]) |
//! | `ddl.rs` | a table read from its `CREATE TABLE` |
//! | `layout.rs` | the table as sessions use it; the headers of a load |
//! | `types.rs` | the two databases' types, read from their names |
//! | `encode.rs` `values.rs` | a record's values to a row in JSON. Pure |
//! | `client.rs` | front-ends in turn, redirects to back-ends |
//! | `reply.rs` | what the answers and label states say. Pure |
//! | `load.rs` | the requests: one load, the two phases of one, the state of a label |
//! | `remote.rs` | [`crate::journal`]'s target: labels, their retention, rows that are refused |
//!
//! What commits a batch, and what becomes of one whose reply is lost, is told in [`crate::journal`]. To the database it is left to take no
//! second load under a label that it knows. A batch is one load, so all of it is in or none.
//!
//! Bodies are JSON, for what CSV cannot say without doubt: null beside an empty text, separators inside of values, nested types. All
//! that a double would round (integers, decimals) goes as a text, which both databases read by the column's type; bytes go as hexadecimal
//! digits. A literal default is filled in here, so that all rows of a load have the same columns; columns whose default is computed are
//! left to the table.

mod client;
mod ddl;
mod encode;
mod layout;
mod load;
mod probe;
mod remote;
mod reply;
mod types;
mod values;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;

use crate::{
    http_client::{Place, shown, trust},
    journal::{Hold, JournalConfig, JournalSession},
    sink::{Encode, Guarantee, Misfit, Mode, Session, Sink},
};

/// Bytes of one batch at most, as records come: both databases bound a JSON body at 100 MB.
pub const MAX_BYTES: u64 = 32 << 20;

/// Whose Stream Load it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dialect {
    /// StarRocks, 3.2 or later.
    StarRocks,
    /// Apache Doris, 2.0 or later.
    Doris,
}

impl Dialect {
    /// For messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::StarRocks => "StarRocks",
            Self::Doris => "Doris",
        }
    }
}

/// What names a table and how its rows are written.
#[derive(Clone, PartialEq, Eq)]
pub struct StreamLoadConfig {
    /// Whose it is.
    pub dialect: Dialect,
    /// Front-ends, `http://host:8030` or `https://..`: tried in turn.
    pub urls: Vec<String>,
    /// User and password; those of the first URL that has some, or `root` without one, if none.
    pub user: Option<(String, String)>,
    /// `database.table`.
    pub table: String,
    /// How a row meets the row that is there.
    pub mode: Mode,
    /// The row key's columns, in `Upsert` and `UpsertIfNewer`.
    pub row_key: Vec<String>,
    /// The version column, in `UpsertIfNewer`.
    pub version: Option<String>,
    /// Each load is prepared, its counts are looked at, and then it is committed.
    pub two_phase: bool,
    /// How long the front-ends keep a label; as they say, or as they do by default, if none.
    pub label_keep: Option<Duration>,
    /// Bound on making a connection.
    pub connect_timeout: Duration,
    /// Bound on one request, and on a load at the server.
    pub request_timeout: Duration,
    /// Where the journal is.
    pub journal: JournalConfig,
}

impl fmt::Debug for StreamLoadConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamLoadConfig")
            .field("dialect", &self.dialect)
            .field("urls", &self.urls.iter().map(|url| shown(url)).collect::<Vec<_>>())
            .field("table", &self.table)
            .field("mode", &self.mode)
            .field("row_key", &self.row_key)
            .field("version", &self.version)
            .field("two_phase", &self.two_phase)
            .field("label_keep", &self.label_keep)
            .field("connect_timeout", &self.connect_timeout)
            .field("request_timeout", &self.request_timeout)
            .field("journal", &self.journal)
            .finish_non_exhaustive()
    }
}

impl StreamLoadConfig {
    /// `table` behind `url` in `insert` mode, with the journal in `folder`; one phase; requests take up to 60 s.
    pub fn new(
        dialect: Dialect,
        url: impl Into<String>,
        table: impl Into<String>,
        folder: impl Into<std::path::PathBuf>,
    ) -> Self {
        Self {
            dialect,
            urls: vec![url.into()],
            user: None,
            table: table.into(),
            mode: Mode::Insert,
            row_key: Vec::new(),
            version: None,
            two_phase: false,
            label_keep: None,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(60),
            journal: JournalConfig::new(folder),
        }
    }

    /// Database and table.
    fn names(&self) -> (&str, &str) {
        self.table.split_once('.').unwrap_or(("", &self.table))
    }
}

/// A table of StarRocks or Doris as a sink.
#[derive(Clone)]
pub struct StreamLoadSink {
    config: Arc<StreamLoadConfig>,
    server: client::Server,
    /// As the last probe saw the table.
    probed: Probed,
    /// The journal's folder, once it was probed.
    hold: Arc<Mutex<Option<Arc<Hold>>>>,
}

impl fmt::Debug for StreamLoadSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamLoadSink").field("config", &self.config).finish_non_exhaustive()
    }
}

/// What probe and sessions share.
type Probed = Arc<Mutex<Option<Arc<layout::Layout>>>>;

impl StreamLoadSink {
    /// Checks URLs and table name; connects to nothing yet: `probe` does.
    pub fn new(config: StreamLoadConfig) -> Result<Self, Misfit> {
        let bad = |what: String| Misfit { what, remedy: "correct the sink's url".to_owned() };
        let named = format!("a {} front-end", config.dialect.name());
        let fronts = config.urls.iter().map(|url| Place::parse(url, &named));
        let fronts: Vec<Place> = fronts.collect::<Result<_, _>>().map_err(bad)?;
        if fronts.is_empty() {
            return Err(bad("no url is given".to_owned()));
        }
        let (database, table) = config.names();
        let plain =
            |name: &str| !name.is_empty() && !name.contains(['/', '?', '#', '`', '.', '%', '\n', ' ', '"']);
        if !(plain(database) && plain(table)) {
            return Err(Misfit {
                what: format!("table {:?} is not DATABASE.TABLE", config.table),
                remedy: "write table = \"DATABASE.TABLE\"".to_owned(),
            });
        }
        let own = fronts.iter().find_map(|front| front.user.clone());
        let user = config.user.clone().or(own).unwrap_or_else(|| ("root".to_owned(), String::new()));
        let server = client::Server {
            fronts,
            user,
            tls: trust().map_err(bad)?,
            connect_timeout: config.connect_timeout,
            request_timeout: config.request_timeout,
        };
        Ok(Self { config: Arc::new(config), server, probed: Arc::default(), hold: Arc::default() })
    }

    fn loader(&self) -> load::Loader {
        load::Loader::new(&self.config, client::Client::new(self.server.clone()))
    }
}

#[async_trait]
impl Sink for StreamLoadSink {
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
        let probed = probe::probe(&self.config, &mut self.loader()).await;
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
        let remote = remote::Table::new(self.config.clone(), self.loader(), self.probed.clone());
        Box::new(JournalSession::new(Arc::new(self.config.journal.clone()), Box::new(remote), route, owner))
    }
}

/// An answer, a type, a table.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Some(reply) = reply::Reply::read(bytes) {
        let said = [reply.is_good(), reply.is_late(), reply.exists(), reply.refuses_rows(), reply.may_pass()];
        drop((said, reply.differs(3), reply.related(), reply.plain()));
    }
    for dialect in [Dialect::StarRocks, Dialect::Doris] {
        load::rows(dialect, bytes);
        if let Ok(text) = std::str::from_utf8(bytes) {
            drop(types::parse(dialect, text));
        }
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        drop(ddl::parse(text));
    }
}
