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
    DuckdbConfig,
    refuse::{self, Job},
    rows::{Packed, Shapes},
    schema::{self, Class, Transaction},
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
    sink::{RowOutcome, SinkError},
};

/// Batches that do not bet after a bet that was lost.
const CAREFUL_BATCHES: u32 = 8;
/// A batch is begun again so often before it is given back.
const TRIES: u32 = 4;

/// How boldly the session delivers.
#[derive(Debug, Default)]
pub(super) struct Pace {
    careful: u32,
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
    let mut tries = 0;
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
                    retry: true,
                }
                .into());
            }
            Err(Stop::Row(_)) if bold => {
                bold = false;
                pace.careful = CAREFUL_BATCHES;
            }
            Err(Stop::Row(_)) => {
                drop(transaction);
                refused = refuse::find(connection, &writer, &job)?;
            }
        }
    };
    let written = refuse::complete(written, &refused);
    if outcomes.send(written).is_err() {
        return Err(abandoned());
    }
    let finish = finish.blocking_recv().map_err(|_| abandoned())?;
    write_finish(&transaction, route, &work.steps, &finish)?;
    commit(transaction).inspect_err(|fault| {
        // What it has left in the log, only a new look into the file says.
        if fault.lost {
            handle.mark_broken();
        }
    })?;
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

/// A commit that DuckDB refuses because of what others have written, or of a constraint, leaves nothing. Any other error may have
/// come after the log was written, so that only a look after reopening says.
fn commit(transaction: Transaction<'_>) -> Result<(), Fault> {
    transaction.commit().map_err(|error| {
        let text = schema::text(&error);
        let refused = schema::classify(&error) == Class::Again
            && ["constraint violation", "onflict", "onstraint"].iter().any(|part| text.contains(part));
        if refused {
            let reason =
                "committing: the rows meet what was committed before; they are tried again".to_owned();
            return SinkError::NotApplied { reason, retry: true }.into();
        }
        Fault { error: SinkError::Unknown { reason: format!("committing: {text}") }, lost: true }
    })
}
