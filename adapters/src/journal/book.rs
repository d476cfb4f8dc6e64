//! The transactions of a batch in the book: journal, settle.

use rusqlite::{Connection, OptionalExtension, params};

use super::entry::{self, Entry};
use crate::{
    bookkeeping::{
        marks::write_finish,
        shards::{fence, missed, shard_row},
        worker::Fault,
    },
    lineage::Lineage,
    sink::{ShardState, ShardStep, SinkError},
    sqlite::{
        deliver::{begin, commit},
        schema,
    },
};

/// P4 without moving: the shard stands before this step, under its epoch.
pub(super) fn stands(
    transaction: &rusqlite::Transaction<'_>,
    route: &str,
    step: &ShardStep,
) -> Result<(), Fault> {
    match shard_row(transaction, route, &step.shard)? {
        Some(row) if row.epoch == step.epoch && row.sequence == step.sequence.saturating_sub(1) => Ok(()),
        _ => Err(missed(transaction, route, step)?),
    }
}

/// All of them stand, and nothing of them is open.
pub(super) fn stand(
    transaction: &rusqlite::Transaction<'_>,
    route: &str,
    steps: &[ShardStep],
) -> Result<(), Fault> {
    let doing = |error: rusqlite::Error| schema::fault("looking into the journal", &error);
    for step in steps {
        stands(transaction, route, step)?;
        if let Some(open) = entry::open_entry(transaction, route, &step.shard).map_err(doing)? {
            return Err(Fault {
                error: SinkError::NotApplied {
                    reason: format!(
                        "an earlier batch of shard {} is open in the journal (entry {open}): acquire the shard",
                        step.shard
                    ),
                    retry: true,
                },
                lost: true,
            });
        }
    }
    Ok(())
}

pub(super) fn name_of(connection: &mut Connection) -> Result<Vec<u8>, Fault> {
    entry::book(connection).map_err(|error| schema::fault("reading the book's name", &error))
}

/// The batch as a whole, durable, before anything of it is sent.
pub(super) fn journal(
    connection: &mut Connection,
    route: &str,
    mut batch: Entry,
    name: &[u8],
    bound: u64,
) -> Result<Entry, Fault> {
    let doing = |error: rusqlite::Error| schema::fault("journaling a batch", &error);
    let transaction = begin(connection)?;
    stand(&transaction, route, &batch.steps)?;
    if entry::book(&transaction).map_err(doing)? != name {
        let reason = "the book is another one now: acquire the shards again".to_owned();
        return Err(Fault { error: SinkError::NotApplied { reason, retry: true }, lost: true });
    }
    let (taken, bytes) = (entry::taken(&transaction).map_err(doing)?, batch.bytes());
    if taken.saturating_add(bytes) > bound {
        let reason = format!(
            "the journal is full: {taken} bytes of open batches and {bytes} more pass journal_max_size = {bound}; {}",
            if bytes > bound {
                "raise it, or lower the route's batch.max_bytes"
            } else {
                "it goes on as they are settled"
            }
        );
        return Err(SinkError::NotApplied { reason, retry: bytes <= bound }.into());
    }
    batch.first_ms = entry::now(&transaction).map_err(doing)?;
    batch.id = entry::insert(&transaction, route, &batch).map_err(doing)?;
    commit(transaction)?;
    Ok(batch)
}

pub(super) fn remove(transaction: &rusqlite::Transaction<'_>, id: i64) -> Result<(), Fault> {
    match entry::remove(transaction, id) {
        Ok(true) => Ok(()),
        Ok(false) => {
            Err(SinkError::Unknown { reason: format!("journal entry {id} is gone: it was settled") }.into())
        }
        Err(error) => Err(schema::fault("taking a batch out of the journal", &error)),
    }
}

/// Runs a transaction that no sync waits for: one that goes with the machine's power, and not with the process. The next that is synced
/// takes it along.
pub(super) fn unsynced<T>(
    connection: &mut Connection,
    job: impl FnOnce(&mut Connection) -> Result<T, Fault>,
) -> Result<T, Fault> {
    let set = |connection: &Connection, level: &str| {
        connection
            .execute_batch(&format!("PRAGMA synchronous = {level}"))
            .map_err(|error| Fault { lost: true, ..schema::fault("setting how commits are synced", &error) })
    };
    set(connection, "NORMAL")?;
    let done = job(connection);
    set(connection, "FULL")?;
    done
}

/// The batch that this session has just driven is in. Without a sync of its own: where the power takes this back, the entry is there again,
/// of which nothing is lost; whoever comes next drives it again before anything is learnt or answered, and the target knows its tokens.
pub(super) fn settle_own(connection: &mut Connection, route: &str, batch: &Entry) -> Result<(), Fault> {
    unsynced(connection, |connection| {
        let transaction = begin(connection)?;
        fence(&transaction, route, &batch.steps)?;
        write_finish(&transaction, route, &batch.steps, &batch.finish)?;
        remove(&transaction, batch.id)?;
        commit(transaction)
    })
}

/// As the entry says, whoever owns the shards by now; nothing if another has done it.
pub(super) fn settle(
    connection: &mut Connection,
    route: &str,
    batch: &Entry,
    applied: bool,
) -> Result<(), Fault> {
    let doing = |error: rusqlite::Error| schema::fault("settling a batch", &error);
    let transaction = begin(connection)?;
    if !entry::remove(&transaction, batch.id).map_err(doing)? {
        return Ok(());
    }
    if applied {
        for step in &batch.steps {
            let moved = transaction
                .execute(
                    "UPDATE oncegate_shards SET sequence = ?3, position = coalesce(?4, position), watermark_ms = ?5
                     WHERE route = ?1 AND shard = ?2 AND sequence = ?3 - 1",
                    params![route, &*step.shard, step.sequence, step.position, step.watermark_ms],
                )
                .map_err(doing)?;
            if moved != 1 {
                let reason = format!(
                    "{}: its shard is not at sequence {}: the book was changed from outside",
                    batch.name(route),
                    step.sequence.saturating_sub(1)
                );
                return Err(SinkError::Unknown { reason }.into());
            }
            keep_writer(&transaction, route, step)?;
        }
        if !planted!(MarksLeftOut) {
            write_finish(&transaction, route, &batch.steps, &batch.finish)?;
        }
    } else {
        // The same records may come again in the same batch, and the target may know its token.
        entry::rename(&transaction).map_err(doing)?;
    }
    commit(transaction)
}

/// A shard that was taken over since the batch was journaled says that it is of the owner that did so.
fn keep_writer(transaction: &rusqlite::Transaction<'_>, route: &str, step: &ShardStep) -> Result<(), Fault> {
    let doing = |error: rusqlite::Error| schema::fault("settling a batch", &error);
    let of = params![route, &*step.shard];
    let query = "SELECT lineage FROM oncegate_shards WHERE route = ?1 AND shard = ?2";
    let kept: Option<String> = transaction.query_row(query, of, |row| row.get(0)).map_err(doing)?;
    let mut lineage = Lineage::read(&kept.unwrap_or_default());
    if lineage.has(step.sequence, step.epoch) {
        return Ok(());
    }
    lineage.written(step.sequence, step.epoch);
    let update = "UPDATE oncegate_shards SET lineage = ?3 WHERE route = ?1 AND shard = ?2";
    let params = params![route, &*step.shard, lineage.to_string()];
    transaction.execute(update, params).map(drop).map_err(doing)
}

/// The shard as it stands after a batch was settled; `Fenced` if another has taken it since.
pub(super) fn stand_now(
    connection: &Connection,
    route: &str,
    state: &ShardState,
) -> Result<ShardState, Fault> {
    let now = connection
        .query_row(
            "SELECT sequence, position, watermark_ms, floor_ms, lineage FROM oncegate_shards
             WHERE route = ?1 AND shard = ?2 AND epoch = ?3",
            params![route, &*state.shard, state.epoch],
            |row| {
                Ok(ShardState {
                    shard: state.shard.clone(),
                    epoch: state.epoch,
                    sequence: row.get(0)?,
                    position: row.get(1)?,
                    watermark_ms: row.get(2)?,
                    floor_ms: row.get(3)?,
                    lineage: Lineage::read(&row.get::<_, Option<String>>(4)?.unwrap_or_default()),
                })
            },
        )
        .optional()
        .map_err(|error| schema::fault("reading a shard", &error))?;
    if let Some(now) = now {
        return Ok(now);
    }
    Err(match shard_row(connection, route, &state.shard)? {
        Some(row) => row.fenced(&state.shard),
        None => SinkError::NotApplied {
            reason: format!("shard {} is gone from the book", state.shard),
            retry: true,
        },
    }
    .into())
}
