//! Exactly once into a target without transactions that drops a batch it has seen before (P15): a **book** beside the gateway and a
//! **journal** in it.
//!
//! | file | holds |
//! | --- | --- |
//! | `entry.rs` | what the journal keeps of a batch, its tables, its checksum |
//! | `book.rs` | the transactions of a batch: journal, settle |
//! | `session.rs` | [`crate::sink::Session`]: journal, drive, settle |
//! | `hold.rs` | one process a book |
//!
//! # What commits a batch
//! The book is a SQLite file with the same tables as the SQLite sink's: routes, shards, marks, dead letters. A batch is two
//! transactions of it, with the sending between them:
//!
//! 1. **journal**: the fence is looked at, and the whole batch goes in: its parts byte for byte as they will be sent, each with its
//!    token; steps, marks, dead letters; the statement with all settings. From here on the batch is never cut again.
//! 2. **drive**: each part is sent.
//! 3. **settle**: the fence moves, marks and dead letters are written, the entry goes. This COMMIT is what settles the batch. No sync waits
//!    for it: it outlives the process, and where the machine's power takes it back, the entry is there again, and is driven and settled anew
//!    before anything is learnt or answered. The next commit that is synced, that of the next batch or a heartbeat, takes it along.
//!
//! If the target surely has nothing of it, the entry goes instead, and the batch is `NotApplied`. In every other case it stays, and whoever
//! asks next (`resolve`, or the next `acquire` of one of its shards, be it years and crashes later) drives the same bytes with the same
//! tokens, and settles it. While an entry is open none of its shards moves, so it may be settled whoever owns them by then.
//!
//! # Tokens
//! A token names the book (a random number of its own), the route, the shards and their sequences, the part, and the content. So no two
//! routes and no two books share one, and a book that was restored from an older state cannot have new rows dropped for old ones.
//!
//! The target forgets tokens. Past half of its window nothing is sent again before it was asked whether it is there ([`Remote::holds`]);
//! if it cannot be asked, the lane stops, with a reason, until someone has looked ([`entry::Entry::verdict`]).

mod book;
mod entry;
mod hold;
mod session;
#[cfg(test)]
mod tests;

use std::{path::PathBuf, time::Duration};

use async_trait::async_trait;

pub(crate) use entry::Part;
pub(crate) use hold::Hold;
pub(crate) use session::JournalSession;

use crate::{
    sink::{Batch, Misfit, RowOutcome, SinkError},
    sqlite::{
        SqliteConfig,
        schema::{self, OpenError},
    },
};

/// Where the book is and how large its journal may be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JournalConfig {
    /// A folder on a local disk, made if it is missing; one process at a time.
    pub folder: PathBuf,
    /// Bound on what all open batches take together; beyond it lanes wait.
    pub max_bytes: u64,
    /// How long to wait for another writer of the book.
    pub busy_timeout: Duration,
}

impl JournalConfig {
    /// In `folder`, up to 1 GiB, waiting up to 5 s for another writer.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), max_bytes: 1 << 30, busy_timeout: Duration::from_secs(5) }
    }

    pub(crate) fn book(&self) -> SqliteConfig {
        SqliteConfig {
            busy_timeout: self.busy_timeout,
            ..SqliteConfig::new(self.folder.join("book.db"), "oncegate_journal")
        }
    }

    /// The folder is there and ours, and the book opens. Blocking.
    pub(crate) fn probe(&self) -> Result<std::sync::Arc<Hold>, Misfit> {
        let hold = Hold::take(&self.folder)?;
        let path = self.book().path;
        let unusable = |what: String| Misfit {
            what: format!("the journal's book {} cannot be used: {what}", path.display()),
            remedy: "restore the folder as a whole; or, if it is new, remove it".to_owned(),
        };
        let opened = schema::open(&self.book()).map_err(|error| match error {
            OpenError::Sqlite(error) => unusable(schema::text(&error)),
            OpenError::NotDurable(why) => unusable(format!("a commit would not be durable: {why}")),
        })?;
        entry::make(&opened).map_err(|error| unusable(schema::text(&error)))?;
        Ok(hold)
    }
}

/// How a batch goes to the target: so many parts, each of which is taken whole or not at all.
#[derive(Debug, Default)]
pub(crate) struct Cut {
    /// One a row of the batch, as they will be once all parts are in.
    pub(crate) outcomes: Vec<RowOutcome>,
    /// Indices of the rows of each part, in the order in which they are sent.
    pub(crate) parts: Vec<Vec<usize>>,
}

/// What became of one attempt to send a part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Sent {
    /// It is in, by this attempt or by an earlier one.
    In,
    /// This attempt has put nothing in, and cannot any more.
    Out {
        /// Without values.
        reason: String,
        /// It may go in if it is tried again.
        retry: bool,
    },
    /// The target refuses rows of it, whenever it is sent: no attempt has put anything in, and none can. The next [`Remote::cut`] of the same
    /// rows says which.
    #[cfg_attr(
        not(feature = "stream-load"),
        expect(dead_code, reason = "others find such rows before they send")
    )]
    Refused {
        /// Without values.
        reason: String,
    },
    /// It is in, and not as it was sent: nobody sends it again, or settles it, before someone has looked.
    #[cfg_attr(
        not(feature = "stream-load"),
        expect(dead_code, reason = "others take all of a part or nothing")
    )]
    Doubt {
        /// Without values.
        reason: String,
    },
    /// It may be in, or may still come.
    Unknown {
        /// Without values.
        reason: String,
    },
}

/// How long ago a batch was first tried.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Tried {
    /// By the book's clock, ms.
    pub(crate) age_ms: i64,
    /// [`Remote::blocks`] before the first attempt.
    pub(crate) blocks: Option<String>,
}

/// Which target it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    /// Where the configuration says.
    pub(crate) name: String,
    /// Another one if it is another target under that name.
    pub(crate) id: String,
}

impl std::fmt::Display for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.name, self.id)
    }
}

/// A target as the journal needs it: one connection, used by one lane. It makes its connections itself: the book is what says what is in.
#[async_trait]
pub(crate) trait Remote: Send {
    /// The page of the book that tells what to do with an entry that nobody can decide.
    fn page(&self) -> &'static str {
        "docs/clickhouse.md"
    }
    /// Asks which target stands there now.
    async fn target(&mut self) -> Result<Identity, String>;
    /// Divides a batch into parts and says what becomes of each row. Nothing is in the target afterwards.
    async fn cut(&mut self, batch: &Batch<'_>) -> Result<Cut, SinkError>;
    /// How the parts are sent: names the target and holds every setting that counts. Kept with the batch.
    fn statement(&self) -> String;
    /// The bytes of one part, as they are kept and sent, however often: the statement says how they are packed.
    fn body(&mut self, batch: &Batch<'_>, rows: &[usize], token: &str) -> Result<Vec<u8>, String>;
    /// What the target has taken so far, if it says, in words of its own: two of them tell how many tokens were kept in between, at most. May
    /// be some seconds old.
    async fn blocks(&mut self) -> Result<Option<String>, String>;
    /// Sends one part under its token.
    async fn send(&mut self, statement: &str, part: &Part) -> Sent;
    /// Sends one part that an earlier attempt may have put in.
    async fn send_again(&mut self, statement: &str, part: &Part) -> Sent {
        self.send(statement, part).await
    }
    /// Whether a repeat is surely known for one: no more than half of the window has passed. Else why not.
    async fn knows_repeats(&mut self, tried: Tried) -> Result<Result<(), String>, String>;
    /// Whether the target has the part, if its rows say so; none if they do not.
    async fn holds(&mut self, part: &Part) -> Result<Option<bool>, String>;
}

/// An entry whose texts, bytes and numbers are taken from these bytes: what was kept comes back, and what was changed is found out.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    entry::fuzz(bytes);
}
