//! One batch, one transaction: fence, rows, dead letters, marks, COMMIT.
//!
//! The worker's thread writes the rows and hands their outcomes over; the session seals the marks and hands them back; the
//! thread writes them and commits. If the session is gone by then, the transaction rolls back.

use std::collections::HashMap;

use rusqlite::{Connection, Transaction, TransactionBehavior};
use tokio::sync::oneshot;

use super::{
    SqliteConfig,
    packed::Packed,
    rows::Stop,
    schema,
    worker::{Db, Fault, Open},
};
use crate::{
    bookkeeping::{
        file_id::FileId,
        marks::{Finish, write_finish},
        session::{Work, abandoned},
        shards::fence,
    },
    sink::{RowOutcome, SinkError},
};

/// Runs on the worker's thread.
pub(super) fn run(
    db: &mut Db,
    config: &SqliteConfig,
    route: &str,
    work: &Work<Packed>,
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
    write_finish(&transaction, route, &work.steps, &finish)?;
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

/// Waits for the write lock up to the busy time-out.
pub(crate) fn begin(connection: &mut Connection) -> Result<Transaction<'_>, Fault> {
    connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(|error| schema::fault("beginning a transaction", &error))
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
