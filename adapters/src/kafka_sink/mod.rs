//! The Kafka sink: `Transactional`. One transaction a batch holds its records, one mark a shard, its dead letters and, where the
//! shards are partitions of the same cluster, the source's offsets.
//!
//! | file | holds |
//! | --- | --- |
//! | `config.rs` | what names the target, how its records are made |
//! | `topics.rs` | start-up checks, and the topics that are made |
//! | `encode.rs` | a record as it came, as a row; row keys |
//! | `line.rs` `ledger.rs` | one line of the marks topic, and what all lines add up to: who owns a shard, where its marks are |
//! | `book.rs` | reads the marks topic into the ledger |
//! | `writer.rs` | the producers |
//! | `worker.rs` | the thread that a session works on |
//! | `session.rs` `desk.rs` | [`crate::sink::Session`]: marks, floors, heartbeats |
//! | `take.rs` | taking shards over |
//! | `deliver.rs` | one batch, one transaction |
//!
//! # The fence
//! A log has no conditional write, so a batch is kept out in another way: whoever takes a shard over makes sure *first* that no earlier
//! owner can commit: its transactional id, which each line names, is taken over by `init_transactions`. That the shard was given by a
//! consumer group proves nothing, for whoever takes it may itself have been put out since. (Batches of a group's shards carry offsets
//! under its generation as well (KIP-447): a member that was put out commits none.) Then the log is read to the end that it has now, waiting for what is open (P14), and a claim is written, in a transaction of the new owner's own: if that commits,
//! nobody has taken its id over. Of two claims that raise the same epoch the first in the log holds; the other finds that out by
//! reading on, fences the winner, and claims again.
//!
//! Marks are sent first in each transaction, so that an open transaction always shows in the marks partition of its shards; offsets are
//! sent once all records are in, so that a generation that was accepted means marks that are in the log.

mod book;
mod config;
mod deliver;
mod desk;
mod encode;
mod ledger;
mod line;
mod session;
mod take;
mod topics;
mod worker;
mod writer;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use async_trait::async_trait;
use parking_lot::Mutex;

pub use self::config::{HeadersFrom, KafkaSinkConfig, KeyFrom, PartitionFrom, TimestampFrom};
use self::{book::Book, config::Limits};
use crate::{
    kafka::Membership,
    sink::{Encode, Guarantee, Misfit, Mode, Session, Sink},
};

/// A topic as a sink.
#[derive(Clone)]
pub struct KafkaSink {
    config: Arc<KafkaSinkConfig>,
    membership: Option<Arc<Membership>>,
    shared: Arc<Shared>,
}

/// What the sessions of a sink share.
#[derive(Default)]
struct Shared {
    /// As the last probe saw the target.
    limits: Mutex<Limits>,
    /// One a route.
    books: Mutex<HashMap<String, Arc<Mutex<Book>>>>,
    sessions: AtomicU32,
}

impl std::fmt::Debug for KafkaSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaSink").field("config", &self.config).finish_non_exhaustive()
    }
}

impl KafkaSink {
    /// Does not connect yet: `probe` does. Refuses what [`KafkaSinkConfig::check`] names.
    pub fn new(config: KafkaSinkConfig) -> Result<Self, Misfit> {
        match config.check().into_iter().next() {
            Some(fault) => {
                Err(Misfit { what: fault.to_string(), remedy: "correct it in the sink's section".to_owned() })
            }
            None => Ok(Self { config: Arc::new(config), membership: None, shared: Arc::default() }),
        }
    }

    /// Shards that `membership` holds are fenced by their consumer group, and their offsets go into the batch's transaction. For a
    /// relay that reads from the sink's own cluster.
    pub fn fenced_by(mut self, membership: Arc<Membership>) -> Self {
        self.membership = Some(membership);
        self
    }
}

#[async_trait]
impl Sink for KafkaSink {
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
        None
    }

    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>> {
        let config = self.config.clone();
        if config.mode == Mode::UpsertIfNewer {
            return Err(vec![Misfit {
                what: "mode upsert-if-newer compares versions with the row that is there, and a topic has no rows".to_owned(),
                remedy: "use mode = \"upsert\" and leave the comparison to who reads the topic".to_owned(),
            }]);
        }
        let limits =
            tokio::task::spawn_blocking(move || topics::target(&config)).await.unwrap_or_else(|ended| {
                Err(vec![Misfit {
                    what: format!("the check of the topic did not end: {ended}"),
                    remedy: "report this as a bug".to_owned(),
                }])
            })?;
        *self.shared.limits.lock() = limits;
        Ok(Arc::new(encode::Encoder::new(&self.config)))
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        // The same from one start to the next: lanes are made in order.
        let number = self.shared.sessions.fetch_add(1, Ordering::Relaxed);
        let book = {
            let mut books = self.shared.books.lock();
            let book = books
                .entry(route.to_owned())
                .or_insert_with(|| Arc::new(Mutex::new(Book::new(self.config.clone(), route))));
            book.clone()
        };
        let place = desk::Place {
            config: self.config.clone(),
            route: route.into(),
            owner: owner.into(),
            id: format!("oncegate/{route}/{owner}/{number}"),
            marks: self.config.marks_of(route).into(),
            limits: *self.shared.limits.lock(),
            book,
            membership: self.membership.clone(),
        };
        Box::new(session::KafkaSession::new(place))
    }
}

/// A record of the marks topic: its key, its value, and a header a line; and a row as sessions take it.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let [headers, key, value] = crate::fuzzing::parts(bytes);
    let lines = headers.unwrap_or_default().split(|byte| *byte == b'\n');
    let pairs: Vec<(&str, &[u8])> = lines
        .filter_map(|line| {
            let at = line.iter().position(|byte| *byte == b':')?;
            Some((std::str::from_utf8(&line[..at]).ok()?, &line[at + 1..]))
        })
        .collect();
    if let Some(line) = line::Line::read("orders", key, pairs.iter().copied()) {
        let spelled = line.headers("orders");
        let spelled = spelled.iter().map(|(name, value)| (*name, value.as_bytes()));
        let again =
            line::Line::read("orders", Some(line.shard.as_bytes()), spelled).expect("its own headers");
        assert_eq!((again.kind, &again.shard, &again.state), (line.kind, &line.shard, &line.state));
    }
    if let Some(row) = line::route_row(value.unwrap_or_default()) {
        assert_eq!(line::route_bytes(&row), value.unwrap_or_default());
    }
    if let Some(sent) = encode::Sent::read(bytes) {
        sent.size();
    }
}
