//! Marks and dead letters of a batch, and the floors below which marks go.

use std::borrow::Cow;

use bytes::Bytes;

use super::{Books, Cells, first, shards::still_ours, worker::Fault};
use crate::sink::{Batch, Mark, OnRefused, RowOutcome, ShardId, ShardStep, SinkError};

/// Bytes of blocks in one page of marks.
const PAGE_BYTES: i64 = 16 << 20;
/// Marks in one page at most.
const PAGE_MARKS: i64 = 4096;
/// Marks that one call of `expire` deletes at most.
const EXPIRE_MARKS: i64 = 256;

/// What goes into the bookkeeping tables once the rows' outcomes are known.
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

pub(crate) fn write_finish(
    books: &dyn Books,
    route: &str,
    steps: &[ShardStep],
    finish: &Finish,
) -> Result<(), Fault> {
    let doing = "writing marks and dead letters";
    let step = |index: usize| {
        steps.get(index).ok_or_else(|| SinkError::NotApplied {
            reason: format!("{doing}: step {index} of a batch with {}", steps.len()),
            retry: false,
        })
    };
    for dead in &finish.dead_letters {
        let step = step(dead.step)?;
        books.run(
            doing,
            "INSERT INTO oncegate_dead_letters
             (route, shard, sequence, position, key, event_ms, kind, reason, payload)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            &[
                route.into(),
                (&*step.shard).into(),
                step.sequence.into(),
                dead.position.into(),
                dead.key.as_slice().into(),
                dead.event_ms.into(),
                (&*dead.kind).into(),
                dead.reason.as_str().into(),
                dead.payload.as_deref().into(),
            ],
        )?;
    }
    for mark in &finish.marks {
        let step = step(mark.step)?;
        books.run(
            doing,
            "INSERT INTO oncegate_marks (route, shard, sequence, epoch, min_ms, max_ms, count, block)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            &[
                route.into(),
                (&*step.shard).into(),
                step.sequence.into(),
                step.epoch.into(),
                mark.min_ms.into(),
                mark.max_ms.into(),
                mark.count.into(),
                (&*mark.block).into(),
            ],
        )?;
    }
    Ok(())
}

pub(super) fn marks_since(
    books: &dyn Books,
    route: &str,
    shard: &str,
    sequence: i64,
) -> Result<Vec<Mark>, Fault> {
    let doing = "reading marks";
    // Some databases make the whole answer before they give its first row: so the page's end is found before its blocks are asked for.
    let (mut until, mut bytes) = (None, 0);
    books.query(
        doing,
        "SELECT sequence, octet_length(block) FROM oncegate_marks WHERE route = ?1 AND shard = ?2 AND sequence > ?3
         ORDER BY sequence LIMIT ?4",
        &[route.into(), shard.into(), sequence.into(), PAGE_MARKS.into()],
        &mut |row| {
            let mut row = Cells::of(row);
            let (sequence, length) = (row.integer(), row.integer());
            bytes += length;
            let fits = bytes <= PAGE_BYTES || until.is_none();
            if fits {
                until = Some(sequence);
            }
            fits
        },
    )?;
    let Some(until) = until else { return Ok(Vec::new()) };
    let mut page = Vec::new();
    books.query(
        doing,
        "SELECT sequence, block FROM oncegate_marks WHERE route = ?1 AND shard = ?2 AND sequence > ?3 AND sequence <= ?4
         ORDER BY sequence",
        &[route.into(), shard.into(), sequence.into(), until.into()],
        &mut |row| {
            let mut row = Cells::of(row);
            page.push(Mark { sequence: row.integer(), block: Bytes::from(row.blob()) });
            true
        },
    )?;
    Ok(page)
}

pub(super) fn expire(
    books: &dyn Books,
    route: &str,
    owned: &[(ShardId, i64)],
    floor_ms: i64,
) -> Result<u64, Fault> {
    let doing = "expiring marks";
    let mut gone = 0i64;
    for (shard, epoch) in owned {
        let touched = books.run(
            doing,
            "UPDATE oncegate_shards SET floor_ms = CASE WHEN floor_ms > ?4 THEN floor_ms ELSE ?4 END
             WHERE route = ?1 AND shard = ?2 AND epoch = ?3",
            &[route.into(), (&**shard).into(), (*epoch).into(), floor_ms.into()],
        )?;
        still_ours(books, route, shard, *epoch, touched)?;
        let deleted = books.run(
            doing,
            "DELETE FROM oncegate_marks WHERE rowid IN (SELECT rowid FROM oncegate_marks
             WHERE route = ?1 AND shard = ?2 AND max_ms < ?3 ORDER BY max_ms LIMIT ?4)",
            &[route.into(), (&**shard).into(), floor_ms.into(), (EXPIRE_MARKS - gone).into()],
        )?;
        gone += deleted as i64;
    }
    Ok(gone.unsigned_abs())
}

pub(super) fn forget_all(books: &dyn Books, route: &str, owned: &[(ShardId, i64)]) -> Result<u64, Fault> {
    let doing = "forgetting marks";
    let mut gone = 0;
    for (shard, epoch) in owned {
        let touched = books.run(
            doing,
            "UPDATE oncegate_shards SET watermark_ms = ?4, floor_ms = ?4 WHERE route = ?1 AND shard = ?2 AND epoch = ?3",
            &[route.into(), (&**shard).into(), (*epoch).into(), i64::MIN.into()],
        )?;
        still_ours(books, route, shard, *epoch, touched)?;
        let delete = "DELETE FROM oncegate_marks WHERE route = ?1 AND shard = ?2";
        gone += books.run(doing, delete, &[route.into(), (&**shard).into()])? as u64;
    }
    Ok(gone)
}

/// The sink's clock, ms since the epoch.
pub(super) fn now_ms(books: &dyn Books) -> Result<i64, Fault> {
    let row = first(books, "asking for the time", &format!("SELECT {}", books.now_ms()), &[])?;
    Ok(row.map_or(0, |row| Cells::of(row).integer()))
}
