//! The book: which keys were begun, and which answer each got. One thread owns the connection; what is asked while it commits goes
//! into the next commit together.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use tokio::sync::oneshot;

use crate::{
    journal::Hold,
    sink::Misfit,
    sqlite::{
        SqliteConfig,
        schema::{self, OpenError},
    },
};

/// `status` is null while the key is begun and not answered; `body` is null with a status if it was too large to keep. The body is last,
/// so that nothing reads through it.
const DDL: &str = "
CREATE TABLE IF NOT EXISTS oncegate_upstream (
    id INTEGER PRIMARY KEY CHECK (id = 1), route TEXT NOT NULL, key_spec_id INTEGER NOT NULL, route_id BLOB NOT NULL, secret BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS oncegate_answers (
    name BLOB NOT NULL PRIMARY KEY, digest INTEGER NOT NULL, until_ms INTEGER NOT NULL, sent_key BLOB NOT NULL,
    status INTEGER, head BLOB, bytes INTEGER NOT NULL, body BLOB
) STRICT;
CREATE INDEX IF NOT EXISTS oncegate_answers_expiry ON oncegate_answers (until_ms);
";

/// What a key takes beside its answer, about.
const KEY_BYTES: u64 = 256;
/// Jobs of one commit at most.
const TOGETHER: usize = 512;
/// Expired keys that one commit takes out at most.
const EXPIRE: i64 = 1_000;

/// Where a route's book is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BookConfig {
    /// A folder on a local disk, made if it is missing; one process at a time.
    pub folder: PathBuf,
    /// Bound on what keys and answers take together; beyond it no key is begun.
    pub max_bytes: u64,
    /// The route's name: a book is of one route.
    pub route: String,
    /// Of the route's key spec: a book is of one.
    pub key_spec_id: u64,
}

/// What the names of the book's keys are hashed with; made once.
#[derive(Clone)]
pub struct NameSecret {
    /// Names the book.
    pub route_id: [u8; 16],
    /// Keys the hash.
    pub secret: [u8; 192],
}

/// A key that is to be begun.
#[derive(Clone, Debug)]
pub struct Begin {
    /// Its fingerprint.
    pub name: [u8; 16],
    /// Of the request.
    pub digest: u64,
    /// Now, ms since the epoch.
    pub now_ms: i64,
    /// When the key is forgotten.
    pub until_ms: i64,
    /// The `Idempotency-Key` that goes to the service; may be empty.
    pub sent_key: Bytes,
}

/// What the book has of a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Found {
    /// Nothing: it is begun now, durably.
    New,
    /// It was begun and has no answer.
    Begun {
        /// Of the request that began it.
        digest: u64,
        /// That went to the service with it.
        sent_key: Bytes,
    },
    /// It has its answer.
    Answered(Arc<Kept>),
    /// Nothing, and there is no room: nothing was begun.
    Full,
}

/// An answer as it is kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kept {
    /// Of the request.
    pub digest: u64,
    /// When it is forgotten, ms since the epoch.
    pub until_ms: i64,
    /// Status code.
    pub status: u16,
    /// Header fields, in order.
    pub head: Vec<(String, Bytes)>,
    /// None if it was too large to keep.
    pub body: Option<Bytes>,
}

enum Op {
    Begin(Begin),
    Settle(Begin, Arc<Kept>),
    Free([u8; 16]),
}

struct Job {
    op: Op,
    reply: oneshot::Sender<Result<Found, String>>,
}

/// The book of one route. Dropping it ends its thread once its last job is done.
pub struct Book {
    jobs: mpsc::Sender<Job>,
    secret: NameSecret,
    broken: Arc<Mutex<Option<String>>>,
}

impl Book {
    /// Takes the folder and opens the book, or says what does not fit. Blocking. `fresh` is used if the book is new.
    pub fn open(config: &BookConfig, fresh: NameSecret) -> Result<Self, Misfit> {
        let hold = Hold::take(&config.folder)?;
        let path = config.folder.join("book.db");
        let (mut connection, secret) = open(&path, config, fresh)?;
        let size: f64 = connection
            .query_row("SELECT total(bytes) FROM oncegate_answers", [], |row| row.get(0))
            .map_err(|fault| unusable(&path, &schema::text(&fault)))?;
        let broken = Arc::<Mutex<Option<String>>>::default();
        let (jobs, queue) = mpsc::channel::<Job>();
        let (theirs, max_bytes) = (broken.clone(), config.max_bytes);
        let worker = move || {
            let _hold = hold;
            let mut size = size as u64;
            while let Ok(first) = queue.recv() {
                let mut jobs = vec![first];
                jobs.extend(queue.try_iter().take(TOGETHER - 1));
                // A commit that failed may or may not be on the disk: nothing more is said from here on.
                let known = theirs.lock().clone();
                let done = match known {
                    Some(fault) => Err(fault),
                    None => together(&mut connection, &jobs, &mut size, max_bytes).map_err(|fault| {
                        let text = schema::text(&fault);
                        tracing::error!("the book of answers has failed, and the route stops: {text}; mend the disk and start again");
                        theirs.lock().get_or_insert(text).clone()
                    }),
                };
                let mut found = done.map(Vec::into_iter);
                for job in jobs {
                    let answer = match &mut found {
                        Ok(found) => found.next().ok_or_else(|| "the book gave no answer".to_owned()),
                        Err(fault) => Err(format!(
                            "the book of answers has failed: {fault}; mend the disk and start again"
                        )),
                    };
                    // The caller may have gone; the book says the same to whoever asks next.
                    drop(job.reply.send(answer));
                }
            }
        };
        thread::Builder::new()
            .name("answers".to_owned())
            .spawn(worker)
            .map_err(|fault| unusable(&path, &fault.to_string()))?;
        Ok(Self { jobs, secret, broken })
    }

    /// What names are hashed with.
    pub fn secret(&self) -> &NameSecret {
        &self.secret
    }

    /// Why it says nothing more, if so.
    pub fn broken(&self) -> Option<String> {
        self.broken.lock().clone()
    }

    /// Looks the key up, and begins it if it is not known. What was begun is durable when this is ready.
    pub async fn begin(&self, begin: Begin) -> Result<Found, String> {
        self.run(Op::Begin(begin)).await
    }

    /// The key has this answer now, durably.
    pub async fn settle(&self, begin: Begin, kept: Arc<Kept>) -> Result<(), String> {
        self.run(Op::Settle(begin, kept)).await.map(drop)
    }

    /// The key was surely not applied: it is not known any more, durably.
    pub async fn free(&self, name: [u8; 16]) -> Result<(), String> {
        self.run(Op::Free(name)).await.map(drop)
    }

    async fn run(&self, op: Op) -> Result<Found, String> {
        let (reply, answer) = oneshot::channel();
        let ended = || "the book of answers has ended".to_owned();
        self.jobs.send(Job { op, reply }).map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

fn unusable(path: &Path, what: &str) -> Misfit {
    Misfit {
        what: format!("the book of answers {} cannot be used: {what}", path.display()),
        remedy: "restore the folder as a whole; or, if it is new, remove it".to_owned(),
    }
}

fn open(path: &Path, config: &BookConfig, fresh: NameSecret) -> Result<(Connection, NameSecret), Misfit> {
    let bad = |fault: rusqlite::Error| unusable(path, &schema::text(&fault));
    let sqlite =
        SqliteConfig { busy_timeout: Duration::from_secs(5), ..SqliteConfig::new(path, "oncegate_answers") };
    let mut connection = schema::open(&sqlite).map_err(|fault| match fault {
        OpenError::Sqlite(fault) => bad(fault),
        OpenError::NotDurable(why) => unusable(path, &format!("a commit would not be durable: {why}")),
    })?;
    connection.execute_batch(DDL).map_err(bad)?;
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(bad)?;
    tx.execute(
        "INSERT INTO oncegate_upstream (id, route, key_spec_id, route_id, secret) VALUES (1, ?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING",
        params![config.route, config.key_spec_id.cast_signed(), fresh.route_id, fresh.secret],
    )
    .map_err(bad)?;
    let (route, spec, route_id, secret) = tx
        .query_row("SELECT route, key_spec_id, route_id, secret FROM oncegate_upstream", [], |row| {
            Ok((
                row.get::<_, String>(0)?,
                row.get::<_, i64>(1)?,
                row.get::<_, [u8; 16]>(2)?,
                row.get::<_, [u8; 192]>(3)?,
            ))
        })
        .map_err(bad)?;
    tx.commit().map_err(bad)?;
    if route != config.route || spec.cast_unsigned() != config.key_spec_id {
        return Err(Misfit {
            what: format!(
                "the book of answers {} was made for route {route:?} with {} key, and would not know its keys again",
                path.display(),
                if route == config.route { "another" } else { "its" }
            ),
            remedy: "set the route's name, `key`, `idempotency_key` and `scope` as they were, or give the route a new name".to_owned(),
        });
    }
    Ok((connection, NameSecret { route_id, secret }))
}

/// One commit.
fn together(
    connection: &mut Connection,
    jobs: &[Job],
    size: &mut u64,
    max_bytes: u64,
) -> rusqlite::Result<Vec<Found>> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut now_size = *size;
    if let Some(now_ms) = jobs.iter().find_map(|job| match &job.op {
        Op::Begin(begin) => Some(begin.now_ms),
        _ => None,
    }) {
        expire(&tx, now_ms, &mut now_size)?;
    }
    let found = jobs
        .iter()
        .map(|job| match &job.op {
            Op::Begin(key) => begin(&tx, key, &mut now_size, max_bytes),
            Op::Settle(key, kept) => settle(&tx, key, kept, &mut now_size).map(|()| Found::New),
            Op::Free(name) => remove(&tx, name, &mut now_size).map(|()| Found::New),
        })
        .collect::<rusqlite::Result<Vec<_>>>()?;
    tx.commit()?;
    *size = now_size;
    Ok(found)
}

fn expire(tx: &Transaction<'_>, now_ms: i64, size: &mut u64) -> rusqlite::Result<()> {
    let mut gone = tx.prepare_cached(
        "DELETE FROM oncegate_answers WHERE rowid IN (SELECT rowid FROM oncegate_answers WHERE until_ms <= ?1 LIMIT ?2) RETURNING bytes",
    )?;
    for bytes in gone.query_map([now_ms, EXPIRE], |row| row.get::<_, i64>(0))? {
        *size = size.saturating_sub(bytes?.unsigned_abs());
    }
    Ok(())
}

fn begin(tx: &Transaction<'_>, key: &Begin, size: &mut u64, max_bytes: u64) -> rusqlite::Result<Found> {
    let known = tx
        .prepare_cached(
            "SELECT digest, until_ms, sent_key, status, head, body FROM oncegate_answers WHERE name = ?1",
        )?
        .query_row([key.name], |row| {
            let digest = row.get::<_, i64>(0)?.cast_unsigned();
            let until_ms: i64 = row.get(1)?;
            let found = match row.get::<_, Option<u16>>(3)? {
                None => Found::Begun { digest, sent_key: row.get::<_, Vec<u8>>(2)?.into() },
                Some(status) => {
                    let head = unpack(row.get::<_, Vec<u8>>(4)?).ok_or_else(|| {
                        rusqlite::Error::FromSqlConversionFailure(
                            4,
                            rusqlite::types::Type::Blob,
                            "the head of a kept answer is broken".into(),
                        )
                    })?;
                    let body = row.get::<_, Option<Vec<u8>>>(5)?.map(Bytes::from);
                    Found::Answered(Arc::new(Kept { digest, until_ms, status, head, body }))
                }
            };
            Ok((until_ms, found))
        })
        .optional()?;
    match known {
        Some((until_ms, found)) if until_ms > key.now_ms => return Ok(found),
        Some(_) => remove(tx, &key.name, size)?,
        None => {}
    }
    let bytes = KEY_BYTES + key.sent_key.len() as u64;
    if size.saturating_add(bytes) > max_bytes {
        return Ok(Found::Full);
    }
    tx.prepare_cached(
        "INSERT INTO oncegate_answers (name, digest, until_ms, sent_key, bytes) VALUES (?1, ?2, ?3, ?4, ?5)",
    )?
    .execute(params![
        key.name,
        key.digest.cast_signed(),
        key.until_ms,
        &key.sent_key[..],
        bytes.cast_signed()
    ])?;
    *size += bytes;
    Ok(Found::New)
}

fn settle(tx: &Transaction<'_>, key: &Begin, kept: &Kept, size: &mut u64) -> rusqlite::Result<()> {
    let head = pack(&kept.head);
    let body = kept.body.as_ref().map_or(0, Bytes::len);
    let bytes = KEY_BYTES + (key.sent_key.len() + head.len() + body) as u64;
    let begun: Option<i64> = tx
        .prepare_cached("SELECT bytes FROM oncegate_answers WHERE name = ?1")?
        .query_row([key.name], |row| row.get(0))
        .optional()?;
    // In place, so that the index stays as it is. It may have expired while it was on its way: it is known again.
    tx.prepare_cached(
        "INSERT INTO oncegate_answers (name, digest, until_ms, sent_key, status, head, bytes, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
         ON CONFLICT (name) DO UPDATE SET digest = excluded.digest, until_ms = excluded.until_ms, sent_key = excluded.sent_key,
             status = excluded.status, head = excluded.head, bytes = excluded.bytes, body = excluded.body",
    )?
    .execute(params![
        key.name,
        kept.digest.cast_signed(),
        kept.until_ms,
        &key.sent_key[..],
        kept.status,
        head,
        bytes.cast_signed(),
        kept.body.as_deref()
    ])?;
    *size = size.saturating_sub(begun.unwrap_or(0).unsigned_abs()) + bytes;
    Ok(())
}

fn remove(tx: &Transaction<'_>, name: &[u8; 16], size: &mut u64) -> rusqlite::Result<()> {
    let bytes: Option<i64> = tx
        .prepare_cached("DELETE FROM oncegate_answers WHERE name = ?1 RETURNING bytes")?
        .query_row([name], |row| row.get(0))
        .optional()?;
    *size = size.saturating_sub(bytes.unwrap_or(0).unsigned_abs());
    Ok(())
}

/// Names and values, each behind its length.
pub(super) fn pack(head: &[(String, Bytes)]) -> Vec<u8> {
    let mut out = Vec::new();
    for part in head.iter().flat_map(|(name, value)| [name.as_bytes(), value]) {
        // A head is far below 4 GiB: the client bounds it.
        out.extend_from_slice(&(part.len() as u32).to_be_bytes());
        out.extend_from_slice(part);
    }
    out
}

pub(super) fn unpack(packed: Vec<u8>) -> Option<Vec<(String, Bytes)>> {
    let mut rest = Bytes::from(packed);
    let mut part = || -> Option<Option<Bytes>> {
        if rest.is_empty() {
            return Some(None);
        }
        let length = u32::from_be_bytes(rest.get(..4)?.try_into().ok()?) as usize;
        if rest.len() - 4 < length {
            return None;
        }
        let part = rest.split_to(4 + length).slice(4..);
        Some(Some(part))
    };
    let mut head = Vec::new();
    while let Some(name) = part()? {
        head.push((String::from_utf8(name.to_vec()).ok()?, part()??));
    }
    Some(head)
}
