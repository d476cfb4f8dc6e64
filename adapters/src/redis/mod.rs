//! The Redis sink: `Transactional` on one primary, since a script runs alone and its effects are logged and replicated as one.
//!
//! | file | holds |
//! | --- | --- |
//! | `types.rs` | what a column's values are, and how each is written |
//! | `encode.rs` | a record's values to one row |
//! | `address.rs` `connect.rs` | the URL; a connection, and what its end means |
//! | `reply.rs` | replies and errors of the server in the sink's words |
//! | `keys.rs` | names of the bookkeeping keys |
//! | `script.rs` `lua/` | the scripts: each checks all that can fail before it writes |
//! | `server.rs` | what a server says of itself, and what of it does not fit: with each connection |
//! | `probe.rs` | start-up checks |
//! | `session.rs` | [`crate::sink::Session`]: ownership, marks, floors |
//! | `deliver.rs` `pack.rs` | one batch, one script, and its arguments |
//! | `look.rs` | a look from outside, for drills |
//!
//! A row is a hash, at the prefix and the row key. A script cannot come back to ask what to mark, and marks hold the rows' outcomes: so a
//! batch says which outcomes it expects, and the script writes only if they are those; else it answers with what they are, and the
//! batch is sealed and sent anew.

mod address;
mod connect;
mod deliver;
mod encode;
mod keys;
mod look;
mod pack;
mod probe;
mod reply;
mod script;
mod server;
mod session;
#[cfg(test)]
mod tests;
mod types;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;

pub use self::{
    look::{Look, bookkeeping},
    types::{KINDS, Kind},
};
use crate::sink::{Encode, Guarantee, Misfit, Mode, Session, Sink};

/// Rows of one batch at most: while its script runs, the server does nothing else.
pub const MAX_ROWS: usize = 50_000;
/// Bytes of one batch at most: a server takes no more than a gigabyte from a client at once.
pub const MAX_BYTES: u64 = 256 << 20;
/// Columns of a row at most.
pub const MAX_COLUMNS: usize = 1_000;

/// What of the server's crash safety is asked for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Durability {
    /// Whatever there is.
    Any,
    /// An append-only file, synced every second: a crash of its host may take the last second.
    EverySecond,
    /// An append-only file, synced before each reply.
    Always,
}

/// What names a Redis target and how its rows are written.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisConfig {
    /// `redis://[[user]:password@]host[:port][/database]`, or `rediss://` for TLS.
    pub url: String,
    /// A row is at the key that this and its row key make.
    pub prefix: String,
    /// The columns, which are the fields of a row, and what their values are.
    pub columns: Vec<(String, Kind)>,
    /// How a row meets the row that is there.
    pub mode: Mode,
    /// The row key's columns.
    pub row_key: Vec<String>,
    /// The version column of `upsert-if-newer`.
    pub version: Option<String>,
    /// What the server must be configured for.
    pub durability: Durability,
    /// Replicas that must have a batch before it counts as written.
    pub wait_replicas: u32,
    /// Bound on making a connection.
    pub connect_timeout: Duration,
    /// Bound on one call.
    pub timeout: Duration,
    /// The largest row, bytes of its fields' names and values.
    pub max_row_bytes: usize,
}

impl RedisConfig {
    /// Hashes at `prefix` on the server at `url`, in `insert` mode, without columns yet.
    pub fn new(url: impl Into<String>, prefix: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            prefix: prefix.into(),
            columns: Vec::new(),
            mode: Mode::Insert,
            row_key: Vec::new(),
            version: None,
            durability: Durability::EverySecond,
            wait_replicas: 0,
            connect_timeout: Duration::from_secs(10),
            timeout: Duration::from_secs(30),
            max_row_bytes: 8 << 20,
        }
    }
}

/// Without the password.
impl std::fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisConfig")
            .field("prefix", &self.prefix)
            .field("columns", &self.columns)
            .field("mode", &self.mode)
            .field("row_key", &self.row_key)
            .finish_non_exhaustive()
    }
}

/// Hashes of a Redis server as a sink.
#[derive(Clone, Debug)]
pub struct RedisSink {
    shared: Arc<Shared>,
}

/// What sink and sessions share.
#[derive(Debug)]
struct Shared {
    config: RedisConfig,
    layout: Arc<encode::Layout>,
    address: address::Address,
}

impl RedisSink {
    /// Checks the configuration; connects to nothing.
    pub fn new(config: RedisConfig) -> Result<Self, Vec<Misfit>> {
        let mut misfits = probe::config_misfits(&config);
        match (address::Address::parse(&config.url), misfits.is_empty()) {
            (Ok(address), true) => {
                let layout = Arc::new(encode::Layout::of(&config));
                Ok(Self { shared: Arc::new(Shared { config, layout, address }) })
            }
            (Err(misfit), _) => {
                misfits.insert(0, misfit);
                Err(misfits)
            }
            (Ok(_), false) => Err(misfits),
        }
    }
}

#[async_trait]
impl Sink for RedisSink {
    fn guarantee(&self) -> Guarantee {
        Guarantee::Transactional
    }

    fn mode(&self) -> Mode {
        self.shared.config.mode
    }

    fn row_key(&self) -> &[String] {
        &self.shared.config.row_key
    }

    fn version(&self) -> Option<&str> {
        self.shared.config.version.as_deref()
    }

    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>> {
        probe::probe(&self.shared).await?;
        Ok(Arc::new(encode::Encoder::new(self.shared.layout.clone())))
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        Box::new(session::RedisSession::new(self.shared.clone(), route, owner))
    }
}

/// What a server says of itself, and of an error.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    reply::info(text, "role");
    reply::classify(text);
    reply::bare(text);
}

#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz_address(url: &str) {
    drop(address::Address::parse(url));
}
