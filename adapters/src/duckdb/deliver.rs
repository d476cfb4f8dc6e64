//! One batch, one transaction: fence, rows, dead letters, marks, COMMIT.
//!
//! The worker's thread writes the rows and hands their outcomes over; the session seals the marks and hands them back; the
//! thread writes them and commits. If the session is gone by then, the transaction rolls back.
//!
//! Rows that are known to be new are appended, on the bet that they break no constraint (P9). A bet that is lost ends the transaction:
//! the batch begins again, and the next batches do not bet.

use std::collections::BTreeMap;

use tokio::sync::oneshot;

use super::{
    DuckdbConfig, errors,
    refuse::{self, Job},
    rows::{Packed, Shapes},
    schema::{self, Transaction},
    session::Open,
    write::{self, Stop},
};
use crate::{
    bookkeeping::{
        file_id::FileId,
        marks::{Finish, write_finish},
        session::{Work, abandoned},
        shards::fence,
        worker::Fault,
    },
    sink::{RowOutcome, ShardId, ShardStep, SinkError},
};

/// Batches that do not bet after a bet that was lost.
const CAREFUL_BATCHES: u32 = 8;
/// A batch is begun again so often before it is given back: after a lost bet, after a search for rows that are refused by themselves,
/// and after one for rows that are refused because of each other.
const TRIES: u32 = 4;
/// A batch that was given back so often, though DuckDB was well, is not said to go in the next time.
const GIVEN_BACK: u32 = 3;

/// How boldly the session delivers.
#[derive(Debug, Default)]
pub(super) struct Pace {
    careful: u32,
    /// The batch that was given back last, by its first step, and how often.
    given_back: Option<(ShardId, i64, u32)>,
}

impl Pace {
    /// A batch goes back that DuckDB refuses as a whole; true if it may go in the next time.
    fn give_back(&mut self, steps: &[ShardStep]) -> bool {
        let Some(first) = steps.first() else { return false };
        let before = match self.given_back.take() {
            Some((shard, sequence, times)) if shard == first.shard && sequence == first.sequence => times,
            _ => 0,
        };
        self.given_back = Some((first.shard.clone(), first.sequence, before + 1));
        before + 1 < GIVEN_BACK
    }
}

/// Runs on the worker's thread.
pub(super) fn run(
    open: &mut Open,
    config: &DuckdbConfig,
    route: &str,
    work: &Work<Packed>,
    outcomes: oneshot::Sender<Vec<RowOutcome>>,
    finish: oneshot::Receiver<Finish>,
) -> Result<(), Fault> {
    let Open { connection, handle, layout, pace, .. } = open;
    let connection = &*connection;
    let mut shapes = Shapes::default();
    let copies = work.rows.copies(layout, &mut shapes);
    let job = Job { layout, route, packed: &work.rows, copies: &copies, shapes: &shapes };
    let mut bold = pace.careful == 0 && write::may_bet(&job);
    pace.careful = pace.careful.saturating_sub(1);
    let mut refused = BTreeMap::new();
    let writer = schema::writer(handle, config)?;
    let (mut tries, mut searched) = (0, false);
    let (transaction, written) = loop {
        tries += 1;
        let transaction = Transaction::begin(connection, &writer)?;
        fence(&transaction, route, &work.steps)?;
        match write::write(&transaction, &job, &job.all_but(&refused), bold) {
            Ok(written) => break (transaction, written),
            Err(Stop::Batch(fault)) => return Err(fault),
            Err(Stop::Row(reason)) if tries >= TRIES => {
                return Err(SinkError::NotApplied {
                    reason: format!("DuckDB refuses a row, and not when asked again: {reason}"),
                    retry: pace.give_back(&work.steps),
                }
                .into());
            }
            Err(Stop::Row(_)) if bold => {
                bold = false;
                pace.careful = CAREFUL_BATCHES;
            }
            Err(Stop::Row(_)) => {
                drop(transaction);
                refused = refuse::find(connection, &writer, &job, searched)?;
                searched = true;
            }
        }
    };
    let written = refuse::complete(written, &refused);
    if outcomes.send(written).is_err() {
        return Err(abandoned());
    }
    let finish = finish.blocking_recv().map_err(|_| abandoned())?;
    write_finish(&transaction, route, &work.steps, &finish)?;
    match commit(transaction) {
        Ok(()) => pace.given_back = None,
        Err(Uncommitted::Refused(why)) => {
            return Err(SinkError::NotApplied {
                reason: format!("committing: {why}"),
                retry: pace.give_back(&work.steps),
            }
            .into());
        }
        Err(Uncommitted::InDoubt(why)) => {
            // What it has left in the log, only a new look into the file says.
            handle.mark_broken();
            let error = SinkError::Unknown { reason: format!("committing: {why}") };
            return Err(Fault { error, lost: true });
        }
    }
    match FileId::of(&config.path) {
        Ok(now) if now == handle.file() => Ok(()),
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

/// Why there was no commit, in DuckDB's words.
enum Uncommitted {
    /// Because of what others have written, or of a constraint: nothing is left of it.
    Refused(String),
    /// It may have come after the log was written, so that only a look after reopening says.
    InDoubt(String),
}

fn commit(transaction: Transaction<'_>) -> Result<(), Uncommitted> {
    transaction.commit().map_err(|error| {
        let why = errors::shown(&error);
        if errors::refuses_commit(&error) { Uncommitted::Refused(why) } else { Uncommitted::InDoubt(why) }
    })
}
