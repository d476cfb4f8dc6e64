//! For simulations: the journal before a target in memory, on the thread that asks, so that a run can be repeated.

use std::{cell::Cell, path::Path, sync::Arc};

use async_trait::async_trait;
use rusqlite::Connection;

use crate::{
    journal::{Cut, Identity, JournalConfig, JournalSession, Part, Remote, Sent, Tried},
    sink::{Batch, RowOutcome, Session, SinkError},
};

/// What is planted in the journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// A batch of unknown outcome is taken out of the journal.
    EntryGoneWhileUnknown,
    /// What is sent again has another token.
    TokenChanged,
    /// A batch is sent before it is in the journal.
    SentBeforeJournaled,
    /// A batch that is driven again is settled without its marks.
    MarksLeftOut,
    /// A part that is not in counts as in.
    PartSkipped,
}

thread_local! {
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    static HERE: Cell<bool> = const { Cell::new(false) };
}

/// From now on, on this thread.
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

pub(crate) fn is_planted(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Books are asked on this thread, and not on one of their own.
pub(crate) fn here() -> bool {
    HERE.get()
}

/// What became of one part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply {
    /// It is in.
    In,
    /// It is not, and cannot come any more.
    Out,
    /// Nobody says.
    Unknown,
}

/// A target: takes each part whole or not at all, and drops what it has seen before.
#[async_trait]
pub trait Target: Send {
    /// What becomes of each row, and the rows of each part.
    fn cut(&self, batch: &Batch<'_>) -> (Vec<RowOutcome>, Vec<Vec<usize>>);
    /// Whether it can be reached.
    fn reachable(&self) -> bool;
    /// How many tokens it has taken so far.
    fn taken(&self) -> u64;
    /// One part; its rows, one a line, are as they were encoded.
    async fn send(&mut self, token: &str, body: &[u8]) -> Reply;
    /// Whether a part that was first sent when so many tokens had been taken is surely known.
    fn knows_repeats(&self, taken_before: u64) -> bool;
    /// Whether it has a part, if it can say.
    fn holds(&self, token: &str) -> Option<bool>;
}

struct Behind(Box<dyn Target>);

#[async_trait]
impl Remote for Behind {
    async fn target(&mut self) -> Result<Identity, String> {
        if !self.0.reachable() {
            return Err("the target is away".into());
        }
        Ok(Identity { name: "simulated".into(), id: "1".into() })
    }

    async fn cut(&mut self, batch: &Batch<'_>) -> Result<Cut, SinkError> {
        let (outcomes, parts) = self.0.cut(batch);
        Ok(Cut { outcomes, parts })
    }

    fn statement(&self) -> String {
        "INSERT".into()
    }

    fn body(&mut self, batch: &Batch<'_>, rows: &[usize], _token: &str) -> Result<Vec<u8>, String> {
        let rows = rows.iter().filter_map(|&row| batch.rows.get(row));
        Ok(rows.flat_map(|row| [row.bytes, b"\n"].concat()).collect())
    }

    async fn blocks(&mut self) -> Result<Option<String>, String> {
        if !self.0.reachable() {
            return Err("the target is away".into());
        }
        Ok(Some(self.0.taken().to_string()))
    }

    async fn send(&mut self, _statement: &str, part: &Part) -> Sent {
        match self.0.send(&part.token, &part.body).await {
            Reply::In => Sent::In,
            Reply::Out => Sent::Out { reason: "the target did not take it".into(), retry: true },
            Reply::Unknown => Sent::Unknown { reason: "no reply".into() },
        }
    }

    async fn knows_repeats(&mut self, tried: Tried) -> Result<Result<(), String>, String> {
        let before = tried.blocks.and_then(|blocks| blocks.parse().ok()).unwrap_or(0);
        Ok(if self.0.knows_repeats(before) { Ok(()) } else { Err("half of the window has passed".into()) })
    }

    async fn holds(&mut self, part: &Part) -> Result<Option<bool>, String> {
        if !self.0.reachable() {
            return Err("the target is away".into());
        }
        Ok(self.0.holds(&part.token))
    }
}

fn config(folder: &Path) -> JournalConfig {
    JournalConfig::new(folder)
}

/// Makes the book in `folder` if it is missing. From now on this thread asks all books itself.
pub fn probe(folder: &Path) -> Result<(), String> {
    HERE.set(true);
    config(folder).probe().map(drop).map_err(|misfit| misfit.to_string())
}

/// One lane's session of the book in `folder`.
pub fn session(folder: &Path, target: Box<dyn Target>, route: &str, owner: &str) -> Box<dyn Session> {
    Box::new(JournalSession::new(Arc::new(config(folder)), Box::new(Behind(target)), route, owner))
}

/// Shard, position, kind and payload of a dead letter.
pub type Letter = (String, Option<i64>, String, Vec<u8>);

/// What a book holds of a route's ends.
#[derive(Clone, Debug, Default)]
pub struct Book {
    /// Shard and position.
    pub positions: Vec<(String, Option<i64>)>,
    /// In the order in which they came.
    pub letters: Vec<Letter>,
    /// Batches whose outcome is not settled.
    pub open: i64,
}

/// Reads the book in `folder`.
pub fn read(folder: &Path) -> Result<Book, String> {
    let read = || -> rusqlite::Result<Book> {
        let book = Connection::open(config(folder).book().path)?;
        let positions = book
            .prepare("SELECT shard, position FROM oncegate_shards ORDER BY shard")?
            .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<rusqlite::Result<_>>()?;
        let letters = book
            .prepare(
                "SELECT shard, position, kind, coalesce(payload, '') FROM oncegate_dead_letters ORDER BY id",
            )?
            .query_map([], |row| {
                Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get_ref(3)?.as_bytes()?.to_vec()))
            })?
            .collect::<rusqlite::Result<_>>()?;
        let open = book.query_row("SELECT count(*) FROM oncegate_journal", [], |row| row.get(0))?;
        Ok(Book { positions, letters, open })
    };
    read().map_err(|error| error.to_string())
}
