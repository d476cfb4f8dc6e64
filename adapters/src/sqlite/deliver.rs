//! One batch, one transaction: fence, rows, dead letters, marks, COMMIT.
//!
//! The worker's thread writes the rows and hands their outcomes over; the session seals the marks and hands them back; the
//! thread writes them and commits. If the session is gone by then, the transaction rolls back.

use std::{borrow::Cow, collections::HashMap};

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use tokio::sync::oneshot;

use super::{
    SqliteConfig,
    packed::Packed,
    rows::Stop,
    schema::{self, NOW_MS},
    worker::{Db, Fault, FileId, Open},
};
use crate::sink::{Batch, OnRefused, RowOutcome, ShardStep, SinkError};

/// What the thread needs before the outcomes are known.
pub(super) struct Work {
    pub(super) steps: Vec<ShardStep>,
    pub(super) rows: Packed,
}

/// What it needs once they are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Finish {
    pub(crate) dead_letters: Vec<OwnedDeadLetter>,
    pub(crate) marks: Vec<OwnedMark>,
}

/// A dead letter on its way to its table.
#[derive(Clone, Debug)]
pub(crate) struct OwnedDeadLetter {
    pub(crate) step: usize,
    pub(crate) position: Option<i64>,
    pub(crate) key: Vec<u8>,
    pub(crate) event_ms: i64,
    pub(crate) kind: Cow<'static, str>,
    pub(crate) reason: String,
    pub(crate) payload: Option<Vec<u8>>,
}

/// A mark on its way to its table.
#[derive(Clone, Debug)]
pub(crate) struct OwnedMark {
    pub(crate) step: usize,
    pub(crate) min_ms: i64,
    pub(crate) max_ms: i64,
    pub(crate) count: i64,
    pub(crate) block: Bytes,
}

impl Finish {
    /// Dead letters of the batch, then those of refused rows if the batch wants them; and the marks.
    pub(crate) fn of(batch: &Batch<'_>, outcomes: &[RowOutcome]) -> Self {
        let mut dead_letters: Vec<OwnedDeadLetter> = batch
            .dead_letters
            .iter()
            .map(|letter| OwnedDeadLetter::of(&letter.source, letter.kind, letter.reason.clone()))
            .collect();
        if batch.on_refused == OnRefused::DeadLetter {
            dead_letters.extend(batch.rows.iter().zip(outcomes).filter_map(|(row, outcome)| match outcome {
                RowOutcome::Refused { reason } => {
                    Some(OwnedDeadLetter::of(&row.source, "rejected", reason.clone()))
                }
                _ => None,
            }));
        }
        let marks = (batch.seal)(outcomes)
            .into_iter()
            .map(|mark| OwnedMark {
                step: mark.step,
                min_ms: mark.min_ms,
                max_ms: mark.max_ms,
                count: i64::try_from(mark.count).unwrap_or(i64::MAX),
                block: mark.block,
            })
            .collect();
        Self { dead_letters, marks }
    }
}

impl OwnedDeadLetter {
    fn of(source: &crate::sink::Source<'_>, kind: &'static str, reason: String) -> Self {
        Self {
            step: source.step,
            position: source.position,
            key: source.key.to_vec(),
            event_ms: source.event_ms,
            kind: kind.into(),
            reason,
            payload: source.payload.map(<[u8]>::to_vec),
        }
    }
}

/// Runs on the worker's thread.
pub(super) fn run(
    db: &mut Db,
    config: &SqliteConfig,
    route: &str,
    work: &Work,
    outcomes: oneshot::Sender<Vec<RowOutcome>>,
    finish: oneshot::Receiver<Finish>,
) -> Result<(), Fault> {
    let open = db.ready(config)?;
    let Open { connection, file, rows, .. } = open;
    let mut refused = HashMap::new();
    let transaction = loop {
        let transaction = begin(&mut *connection)?;
        fence(&transaction, route, &work.steps)?;
        match rows.write(&transaction, &work.rows, &refused) {
            Ok(written) => {
                if outcomes.send(written).is_err() {
                    return Err(abandoned());
                }
                break transaction;
            }
            Err(Stop::Batch(fault)) => return Err(fault),
            Err(Stop::RolledBack(row, reason)) => {
                refused.insert(row, reason);
            }
        }
    };
    let finish = finish.blocking_recv().map_err(|_| abandoned())?;
    write_finish(&transaction, route, &work.steps, &finish)
        .map_err(|error| schema::fault("writing marks and dead letters", &error))?;
    rows.keep(&transaction)?;
    commit(transaction)?;
    rows.committed(connection);
    match FileId::of(&config.path) {
        Ok(now) if now == *file => Ok(()),
        _ => Err(Fault {
            error: SinkError::Unknown {
                reason: format!(
                    "{} was put in place of another file during the commit",
                    config.path.display()
                ),
            },
            lost: true,
        }),
    }
}

fn abandoned() -> Fault {
    SinkError::NotApplied { reason: "the caller left before the batch was sealed".to_owned(), retry: true }
        .into()
}

/// Waits for the write lock up to the busy time-out.
pub(crate) fn begin(connection: &mut Connection) -> Result<Transaction<'_>, Fault> {
    connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(|error| schema::fault("beginning a transaction", &error))
}

/// P4: each shard moves from sequence n - 1 to n under our epoch, or nothing happens.
pub(crate) fn fence(transaction: &Transaction<'_>, route: &str, steps: &[ShardStep]) -> Result<(), Fault> {
    if steps.is_empty() {
        return Err(SinkError::NotApplied {
            reason: "a batch without a shard step cannot be fenced".to_owned(),
            retry: false,
        }
        .into());
    }
    let doing = |error: &rusqlite::Error| schema::fault("moving the fence", error);
    let mut update = transaction
        .prepare_cached(&format!(
            "UPDATE oncegate_shards SET sequence = ?4, position = coalesce(?5, position), watermark_ms = ?6, heartbeat_ms = {NOW_MS}
             WHERE route = ?1 AND shard = ?2 AND epoch = ?3 AND sequence = ?4 - 1"
        ))
        .map_err(|error| doing(&error))?;
    for step in steps {
        let moved = update
            .execute(params![
                route,
                &*step.shard,
                step.epoch,
                step.sequence,
                step.position,
                step.watermark_ms
            ])
            .map_err(|error| doing(&error))?;
        if moved != 1 {
            return Err(missed(transaction, route, step).unwrap_or_else(|error| doing(&error)));
        }
    }
    Ok(())
}

/// Why the fence did not move. A shard that stands at our sequence or above is `Unknown`: an earlier attempt may be in.
/// One that stands below has lost what it had: the file went back (P6).
pub(crate) fn missed(
    transaction: &Transaction<'_>,
    route: &str,
    step: &ShardStep,
) -> rusqlite::Result<Fault> {
    let ShardStep { shard, epoch, sequence, .. } = step;
    let went_back = |at: String| Fault {
        error: SinkError::NotApplied {
            reason: format!(
                "the file went back: shard {shard} is {at}; expected epoch {epoch}, sequence {}",
                sequence.saturating_sub(1)
            ),
            retry: true,
        },
        lost: true,
    };
    Ok(match shard_row(transaction, route, shard)? {
        Some(row) if row.epoch > *epoch => row.fenced(shard).into(),
        Some(row) if row.epoch == *epoch && row.sequence >= *sequence => Fault {
            error: SinkError::Unknown {
                reason: format!(
                    "shard {shard} is at sequence {} already: an earlier attempt may be in",
                    row.sequence
                ),
            },
            lost: true,
        },
        Some(row) => went_back(format!("at epoch {}, sequence {}", row.epoch, row.sequence)),
        None => went_back("gone".to_owned()),
    })
}

/// Who holds a shard, and how far it is.
pub(crate) struct ShardRow {
    pub(crate) epoch: i64,
    pub(crate) sequence: i64,
    pub(super) owner: String,
    /// Age of the heartbeat, ms.
    pub(super) seen_ms: i64,
}

impl ShardRow {
    pub(crate) fn fenced(self, shard: &str) -> SinkError {
        SinkError::Fenced { shard: shard.to_owned(), owner: self.owner, epoch: self.epoch }
    }
}

pub(crate) fn shard_row(
    connection: &Connection,
    route: &str,
    shard: &str,
) -> rusqlite::Result<Option<ShardRow>> {
    connection
        .prepare_cached(&format!(
            "SELECT epoch, sequence, owner, {NOW_MS} - heartbeat_ms FROM oncegate_shards WHERE route = ?1 AND shard = ?2"
        ))?
        .query_row([route, shard], |row| {
            Ok(ShardRow { epoch: row.get(0)?, sequence: row.get(1)?, owner: row.get(2)?, seen_ms: row.get(3)? })
        })
        .optional()
}

pub(crate) fn write_finish(
    transaction: &Transaction<'_>,
    route: &str,
    steps: &[ShardStep],
    finish: &Finish,
) -> rusqlite::Result<()> {
    let step =
        |index: usize| steps.get(index).ok_or(rusqlite::Error::InvalidParameterCount(index, steps.len()));
    let mut letter = transaction.prepare_cached(
        "INSERT INTO oncegate_dead_letters
         (route, shard, sequence, position, key, event_ms, kind, reason, payload)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
    )?;
    for dead in &finish.dead_letters {
        let step = step(dead.step)?;
        letter.execute(params![
            route,
            &*step.shard,
            step.sequence,
            dead.position,
            dead.key,
            dead.event_ms,
            dead.kind,
            dead.reason,
            dead.payload
        ])?;
    }
    let mut insert = transaction.prepare_cached(
        "INSERT INTO oncegate_marks (route, shard, sequence, epoch, min_ms, max_ms, count, block)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?;
    for mark in &finish.marks {
        let step = step(mark.step)?;
        insert.execute(params![
            route,
            &*step.shard,
            step.sequence,
            step.epoch,
            mark.min_ms,
            mark.max_ms,
            mark.count,
            &*mark.block
        ])?;
    }
    Ok(())
}

/// A lock or a constraint leaves the transaction open: it is rolled back, and nothing is in. Any other error may have come
/// after the log was written, so that only a look after reopening says.
pub(crate) fn commit(transaction: Transaction<'_>) -> Result<(), Fault> {
    use rusqlite::ErrorCode::{ConstraintViolation, DatabaseBusy, DatabaseLocked};
    transaction.commit().map_err(|error| match error.sqlite_error_code() {
        Some(DatabaseBusy | DatabaseLocked | ConstraintViolation) => schema::fault("committing", &error),
        _ => Fault {
            error: SinkError::Unknown { reason: format!("committing: {}", schema::text(&error)) },
            lost: true,
        },
    })
}
