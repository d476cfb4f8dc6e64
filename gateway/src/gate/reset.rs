//! The way out of floors that a wrong clock has set: [`reset_floor`].

use std::{sync::Arc, time::Duration};

use adapters::sink::{Acquire, Misfit, ShardId, ShardState, Sink, SinkError};
use dedup_store::Store;
use tokio::time::Instant;

use super::BuildError;
use crate::lane::own::STALE_OWNER_MS;

/// An owner that has just ended looks alive for as long as this.
const PATIENCE: Duration = Duration::from_millis(STALE_OWNER_MS as u64 + 4_000);

/// What [`reset_floor`] found, and what it has discarded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reset {
    /// The route's shards as they stood before.
    pub shards: Vec<ShardState>,
    /// Marks that are gone; none if nothing was to be discarded.
    pub marks: Option<u64>,
}

/// Discards all that a route knows: marks, watermarks and floors in the sink, and `store` (identity and begun effects stay). Rows,
/// sequences and source positions stay. Afterwards a copy of a record that took effect before is new to the route; only a row key
/// can still tell it. With `discard` false it changes nothing and only says what there is.
///
/// For a route by arrival whose watermark was set by a clock that was ahead, or that was away for longer than `max_clock_jump`.
/// The route must not be at work: a live owner of one of its shards is an error, after some seconds.
pub async fn reset_floor(
    sink: Arc<dyn Sink>,
    route: &str,
    store: Option<&Store>,
    discard: bool,
) -> Result<Reset, BuildError> {
    sink.probe().await.map_err(BuildError)?;
    let owner = format!("reset-floor/{}/{:08x}", std::process::id(), rand::random::<u32>());
    let mut session = sink.session(route, &owner);
    session.acquire(&[], Acquire::Force).await?;
    let shards = session.shards("").await?;
    if !discard {
        return Ok(Reset { shards, marks: None });
    }
    let ids: Vec<ShardId> = shards.iter().map(|state| state.shard.clone()).collect();
    let until = Instant::now() + PATIENCE;
    let taken = loop {
        match session.acquire(&ids, Acquire::IfFree { stale_after_ms: STALE_OWNER_MS }).await {
            Ok(states) => break states,
            Err(SinkError::Held { shard, owner, .. }) if Instant::now() >= until => {
                return Err(BuildError(vec![Misfit {
                    what: format!("route {route:?}: shard {shard} is held by {owner}, which is at work"),
                    remedy: "stop every gateway that runs the route, then try again".into(),
                }]));
            }
            Err(SinkError::Held { .. }) => tokio::time::sleep(Duration::from_millis(500)).await,
            Err(fault) => return Err(fault.into()),
        }
    };
    let owned: Vec<(ShardId, i64)> = taken.into_iter().map(|state| (state.shard, state.epoch)).collect();
    let marks = session.forget_all(&owned).await?;
    // The sink first: should this process end here, the store's floors hold, and the next try discards them.
    if let Some(store) = store.filter(|store| store.identity().is_some()) {
        store.discard()?;
    }
    Ok(Reset { shards, marks: Some(marks) })
}
