//! Shard rows and the route's row: who owns a shard, how far it is, and the fence.

use std::collections::HashMap;

use bytes::Bytes;
use parking_lot::Mutex;

use super::{Books, Cells, first, worker::Fault};
use crate::{
    lineage::{Lineage, applied, epoch_above},
    sink::{Acquire, Mark, Resolution, RouteRow, ShardId, ShardState, ShardStep, SinkError},
};

/// P4: each shard moves from sequence n - 1 to n under our epoch, or nothing happens.
pub(crate) fn fence(books: &dyn Books, route: &str, steps: &[ShardStep]) -> Result<(), Fault> {
    if steps.is_empty() {
        return Err(SinkError::NotApplied {
            reason: "a batch without a shard step cannot be fenced".to_owned(),
            retry: false,
        }
        .into());
    }
    let update = format!(
        "UPDATE oncegate_shards SET sequence = ?4, position = coalesce(?5, position), watermark_ms = ?6, heartbeat_ms = {}
         WHERE route = ?1 AND shard = ?2 AND epoch = ?3 AND sequence = ?4 - 1",
        books.now_ms()
    );
    for step in steps {
        let moved = books.run(
            "moving the fence",
            &update,
            &[
                route.into(),
                (&*step.shard).into(),
                step.epoch.into(),
                step.sequence.into(),
                step.position.into(),
                step.watermark_ms.into(),
            ],
        )?;
        if moved != 1 {
            return Err(missed(books, route, step)?);
        }
    }
    Ok(())
}

/// Why the fence did not move. A shard that stands at our sequence or above is `Unknown`: an earlier attempt may be in.
/// One that stands below has lost what it had: the file went back (P6).
pub(crate) fn missed(books: &dyn Books, route: &str, step: &ShardStep) -> Result<Fault, Fault> {
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
    Ok(match shard_row(books, route, shard)? {
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
    owner: String,
    /// Age of the heartbeat, ms.
    seen_ms: i64,
}

impl ShardRow {
    pub(crate) fn fenced(self, shard: &str) -> SinkError {
        SinkError::Fenced { shard: shard.to_owned(), owner: self.owner, epoch: self.epoch }
    }
}

pub(crate) fn shard_row(books: &dyn Books, route: &str, shard: &str) -> Result<Option<ShardRow>, Fault> {
    let query = format!(
        "SELECT epoch, sequence, owner, {} - heartbeat_ms FROM oncegate_shards WHERE route = ?1 AND shard = ?2",
        books.now_ms()
    );
    Ok(first(books, "reading a shard", &query, &[route.into(), shard.into()])?.map(|row| {
        let mut row = Cells::of(row);
        ShardRow { epoch: row.integer(), sequence: row.integer(), owner: row.text(), seen_ms: row.integer() }
    }))
}

/// `touched` rows were found under our epoch: none means that another owner has the shard.
pub(super) fn still_ours(
    books: &dyn Books,
    route: &str,
    shard: &str,
    epoch: i64,
    touched: usize,
) -> Result<(), Fault> {
    if touched == 1 {
        return Ok(());
    }
    Err(match shard_row(books, route, shard)? {
        Some(row) if row.epoch > epoch => row.fenced(shard).into(),
        _ => Fault {
            error: SinkError::NotApplied {
                reason: format!(
                    "shard {shard} is not at epoch {epoch}: the file went back; acquire it again"
                ),
                retry: true,
            },
            lost: true,
        },
    })
}

pub(super) fn register(books: &dyn Books, route: &str, proposed: &RouteRow) -> Result<RouteRow, Fault> {
    let doing = "registering the route";
    books.run(
        doing,
        "INSERT INTO oncegate_routes (name, route_id, key_spec_id, algorithm, secret) VALUES (?1, ?2, ?3, ?4, ?5)
         ON CONFLICT (name) DO NOTHING",
        &[
            route.into(),
            proposed.route_id.as_slice().into(),
            proposed.key_spec_id.into(),
            i64::from(proposed.algorithm).into(),
            proposed.secret.as_slice().into(),
        ],
    )?;
    let query = "SELECT route_id, key_spec_id, algorithm, secret FROM oncegate_routes WHERE name = ?1";
    let row = first(books, doing, query, &[route.into()])?.ok_or_else(|| SinkError::NotApplied {
        reason: format!("{doing}: its row in oncegate_routes is gone again"),
        retry: true,
    })?;
    let mut row = Cells::of(row);
    Ok(RouteRow {
        route_id: row.blob(),
        key_spec_id: row.integer(),
        algorithm: i16::try_from(row.integer()).map_err(|_| SinkError::NotApplied {
            reason: format!("{doing}: oncegate_routes names an algorithm that this build does not know"),
            retry: false,
        })?,
        secret: row.blob(),
    })
}

pub(super) fn acquire(
    books: &dyn Books,
    route: &str,
    owner: &str,
    shards: &[ShardId],
    how: &Acquire,
) -> Result<Vec<ShardState>, Fault> {
    if let Acquire::IfFree { stale_after_ms } = *how {
        for shard in shards {
            match shard_row(books, route, shard)? {
                Some(row) if row.owner != owner && row.seen_ms < stale_after_ms => {
                    return Err(SinkError::Held {
                        shard: shard.to_string(),
                        owner: row.owner,
                        seen_ms: row.seen_ms,
                    }
                    .into());
                }
                _ => {}
            }
        }
    }
    shards.iter().map(|shard| raise(books, route, owner, shard, 0)).collect()
}

/// Takes the shard over: its epoch rises, from `least` at least.
fn raise(
    books: &dyn Books,
    route: &str,
    owner: &str,
    shard: &ShardId,
    least: i64,
) -> Result<ShardState, Fault> {
    let doing = "acquiring shards";
    let query = format!("SELECT {STATE} FROM oncegate_shards WHERE route = ?1 AND shard = ?2");
    let known = first(books, doing, &query, &[route.into(), (&**shard).into()])?.map(state);
    let text = match known {
        Some(_) => format!(
            "UPDATE oncegate_shards SET epoch = ?3, lineage = ?4, owner = ?5, heartbeat_ms = {}
             WHERE route = ?1 AND shard = ?2",
            books.now_ms()
        ),
        // Written out: the smallest integer has no literal of its own.
        None => format!(
            "INSERT INTO oncegate_shards
             (route, shard, epoch, lineage, owner, sequence, position, watermark_ms, floor_ms, heartbeat_ms)
             VALUES (?1, ?2, ?3, ?4, ?5, 0, NULL, {min}, {min}, {now})",
            min = "-9223372036854775807 - 1",
            now = books.now_ms()
        ),
    };
    let mut state = known.unwrap_or_else(|| ShardState::unowned(shard));
    state.epoch = epoch_above(state.epoch.max(least));
    state.lineage.taken(state.sequence, state.epoch);
    let lineage = state.lineage.to_string();
    let params = [route.into(), (&**shard).into(), state.epoch.into(), lineage.as_str().into(), owner.into()];
    books.run(doing, &text, &params)?;
    Ok(state)
}

/// The columns of a [`ShardState`].
const STATE: &str = "shard, epoch, sequence, position, watermark_ms, floor_ms, lineage";

fn state(row: Vec<super::Cell>) -> ShardState {
    let mut row = Cells::of(row);
    ShardState {
        shard: row.text().into(),
        epoch: row.integer(),
        sequence: row.integer(),
        position: row.optional(),
        watermark_ms: row.integer(),
        floor_ms: row.integer(),
        lineage: Lineage::read(&row.text()),
    }
}

pub(super) fn shards(books: &dyn Books, route: &str, prefix: &str) -> Result<Vec<ShardState>, Fault> {
    let query = format!(
        "SELECT {STATE} FROM oncegate_shards
         WHERE route = ?1 AND shard >= ?2 AND substr(shard, 1, length(?2)) = ?2 ORDER BY shard"
    );
    let mut states = Vec::new();
    books.query("listing the route's shards", &query, &[route.into(), prefix.into()], &mut |row| {
        states.push(state(row));
        true
    })?;
    Ok(states)
}

/// P5: raises the epochs, then looks. A shard that another owner took stays with it.
pub(super) fn resolve(
    books: &dyn Books,
    route: &str,
    owner: &str,
    steps: &[ShardStep],
    raised: &Mutex<HashMap<ShardId, i64>>,
) -> Result<(Resolution, Vec<ShardState>), Fault> {
    let mut states = Vec::with_capacity(steps.len());
    for step in steps {
        let ours = raised.lock().get(&step.shard).copied().unwrap_or(step.epoch).max(step.epoch);
        if let Some(row) = shard_row(books, route, &step.shard)?
            && row.epoch > ours
        {
            return Err(row.fenced(&step.shard).into());
        }
        let state = raise(books, route, owner, &step.shard, step.epoch)?;
        raised.lock().insert(step.shard.clone(), state.epoch);
        states.push(state);
    }
    if !applied(steps, &states)? {
        return Ok((Resolution::NotApplied, states));
    }
    let mut marks = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let row = first(
            books,
            "resolving a batch",
            "SELECT block FROM oncegate_marks WHERE route = ?1 AND shard = ?2 AND sequence = ?3",
            &[route.into(), (&*step.shard).into(), step.sequence.into()],
        )?;
        marks.extend(
            row.map(|row| {
                (index, Mark { sequence: step.sequence, block: Bytes::from(Cells::of(row).blob()) })
            }),
        );
    }
    Ok((Resolution::Applied(marks), states))
}

pub(super) fn heartbeat(books: &dyn Books, route: &str, owned: &[(ShardId, i64)]) -> Result<(), Fault> {
    let update = format!(
        "UPDATE oncegate_shards SET heartbeat_ms = {} WHERE route = ?1 AND shard = ?2 AND epoch = ?3",
        books.now_ms()
    );
    for (shard, epoch) in owned {
        let touched = books.run(
            "touching the heartbeat",
            &update,
            &[route.into(), (&**shard).into(), (*epoch).into()],
        )?;
        still_ours(books, route, shard, *epoch, touched)?;
    }
    Ok(())
}

/// Of a shard under an epoch of ours.
const OURS: &str = "WHERE route = ?1 AND shard = ?2 AND epoch = ?3";

pub(super) fn keep_partitions(
    books: &dyn Books,
    route: &str,
    (shard, epoch, count): &(ShardId, i64, i64),
) -> Result<Option<i64>, Fault> {
    let doing = "keeping the number of partitions";
    let params = [route.into(), (&**shard).into(), (*epoch).into(), (*count).into()];
    let query = format!("SELECT partitions FROM oncegate_shards {OURS}");
    let before = first(books, doing, &query, &params[..3])?.and_then(|row| Cells::of(row).optional());
    if before != Some(*count) {
        books.run(doing, &format!("UPDATE oncegate_shards SET partitions = ?4 {OURS}"), &params)?;
    }
    Ok(before)
}

pub(super) fn keep_source(
    books: &dyn Books,
    route: &str,
    (shard, epoch, source): &(ShardId, i64, String),
    renew: bool,
) -> Result<Option<String>, Fault> {
    let doing = "keeping the source";
    let params = [route.into(), (&**shard).into(), (*epoch).into(), source.as_str().into()];
    let query = format!("SELECT source FROM oncegate_shards {OURS}");
    let before = first(books, doing, &query, &params[..3])?.and_then(|row| Cells::of(row).optional_text());
    let what = match &before {
        None => "source = ?4",
        Some(before) if renew && before != source => "source = ?4, position = NULL",
        Some(_) => return Ok(before),
    };
    books.run(doing, &format!("UPDATE oncegate_shards SET {what} {OURS}"), &params)?;
    Ok(before)
}
