//! Effects and facts that have no row: [`Gate::once`], [`Gate::forget`].

use std::sync::Arc;

use dedup_store::{Digest, Entry, Fingerprint, Settled, Store, StoreError};
use tokio::sync::oneshot;

use super::{Gate, blocking};
use crate::{
    clock::wall_ms,
    door::Submit,
    key::effect_fingerprint,
    lane::{LaneHandle, ToLane},
    route::Route,
};

/// Claims of `Gate::once` belong to no lane.
const EFFECT_LANE: u32 = u32::MAX;

/// What [`Gate::once`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Once<T> {
    /// The effect ran now, and gave this.
    Ran(T),
    /// The effect took place before, within the window.
    Already,
}

/// Why [`Gate::once`] cannot say that the effect took place.
#[derive(Debug, thiserror::Error)]
pub enum OnceError<E> {
    /// The effect failed, and by that says that nothing happened: the key is free again.
    #[error("the effect failed: {0}")]
    Effect(E),
    /// An earlier run began the effect and did not end it (a crash, a dropped future): ask the target whether it happened, then
    /// call [`Gate::resolve_once`].
    #[error(
        "an earlier run began the effect and its end is unknown; find out whether it happened, then say so with resolve_once"
    )]
    Unknown,
    /// Another call runs the effect now.
    #[error("the effect is running in another call; try again later")]
    InFlight,
    /// The store or the sink is not available. If the effect ran, it counts as unknown.
    #[error("{0}")]
    Unavailable(String),
}

impl Gate {
    /// Runs `effect` once per name and window, also across crashes. If the process ends between the effect's end and the moment
    /// it is recorded, the next call answers [`OnceError::Unknown`] rather than guess. That needs a store on disk
    /// ([`Store::open`]): one in memory does not remember after a crash that an effect was begun, and it may run again.
    ///
    /// # Cancel safety
    /// Dropping the future while the effect runs leaves its end unknown, as a crash does.
    pub async fn once<T, E, F>(&self, name: &str, effect: impl FnOnce() -> F) -> Result<Once<T>, OnceError<E>>
    where
        F: Future<Output = Result<T, E>>,
    {
        let inner = &self.0;
        let store = &inner.route.store;
        let fingerprint = effect_fingerprint(&inner.route.hasher, "", name);
        if let Some(reason) = self.not_ready() {
            return Err(OnceError::Unavailable(reason));
        }
        let unavailable = |fault: StoreError| OnceError::Unavailable(fault.to_string());
        let now_ms = wall_ms();
        let item = dedup_store::Item {
            fingerprint,
            digest: Digest(0),
            event_ms: now_ms,
            floor_ms: i64::MIN,
            admit_late: true,
            replay_dead_letter: false,
        };
        let mut verdicts = Vec::with_capacity(1);
        store.claim(EFFECT_LANE, i64::MAX, &[item], &mut verdicts).map_err(unavailable)?;
        match verdicts.first() {
            Some(dedup_store::Verdict::New { .. }) => {}
            Some(dedup_store::Verdict::Duplicate(_) | dedup_store::Verdict::Mismatch(_)) => {
                return Ok(Once::Already);
            }
            _ => return Err(OnceError::InFlight),
        }
        let claim = Claim { route: inner.route.clone(), fingerprint };
        if store.effect_pending(&fingerprint).map_err(unavailable)? {
            return Err(OnceError::Unknown);
        }
        self.durable(move |store| store.begin_effect(&fingerprint).map(drop))
            .await
            .map_err(OnceError::Unavailable)?;
        match effect().await {
            Ok(value) => {
                self.happened(fingerprint, now_ms).await.map_err(OnceError::Unavailable)?;
                drop(claim);
                Ok(Once::Ran(value))
            }
            Err(fault) => {
                let cancelled = self.durable(move |store| store.cancel_effect(&fingerprint)).await;
                drop(claim);
                cancelled.map_err(OnceError::Unavailable)?;
                Err(OnceError::Effect(fault))
            }
        }
    }

    /// Says what became of an effect whose end is unknown.
    pub async fn resolve_once(&self, name: &str, happened: bool) -> Result<(), String> {
        let fingerprint = effect_fingerprint(&self.0.route.hasher, "", name);
        if happened {
            self.happened(fingerprint, wall_ms()).await
        } else {
            self.durable(move |store| store.cancel_effect(&fingerprint)).await
        }
    }

    /// Takes a key back (P12): a later record with it is new, also for whoever learns it from the marks. Every shard of this
    /// instance says so, for any of them may have settled it; one that another instance holds has to be told there.
    pub async fn forget(&self, fingerprint: Fingerprint) -> Result<(), String> {
        let lanes = self.0.lanes.iter().chain(&self.0.relay_lanes);
        let noted = lanes.map(|lane| Self::note(lane, fingerprint, Settled::Forgotten, wall_ms()));
        futures_util::future::join_all(noted).await.into_iter().collect()
    }

    /// An effect took place: the callers' lane keeps that, or without one any lane that owns a shard.
    async fn happened(&self, fingerprint: Fingerprint, event_ms: i64) -> Result<(), String> {
        let relays = self.0.relay_lanes.iter().filter(|_| self.0.lanes.is_empty());
        let mut last = "the route has no lane".to_owned();
        for lane in self.0.lanes.first().into_iter().chain(relays) {
            match Self::note(lane, fingerprint, Settled::Written, event_ms).await {
                Ok(()) => return Ok(()),
                Err(reason) => last = reason,
            }
        }
        Err(last)
    }

    async fn note(
        lane: &LaneHandle,
        fingerprint: Fingerprint,
        settled: Settled,
        event_ms: i64,
    ) -> Result<(), String> {
        let entry = Entry { fingerprint, digest: Digest(0), event_ms, settled };
        let (reply, answer) = oneshot::channel();
        let ended = || "the route has ended".to_owned();
        lane.queue.send(ToLane::Note { entry, reply }).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    pub(super) async fn durable(
        &self,
        work: impl FnOnce(&Store) -> Result<(), StoreError> + Send + 'static,
    ) -> Result<(), String> {
        let store = self.0.route.store.clone();
        blocking(move || work(&store)).await?.map_err(|fault| fault.to_string())
    }

    /// Why a lane is not ready, if so.
    #[cfg(test)]
    pub(crate) fn trouble(&self) -> Option<String> {
        self.0.route.trouble()
    }

    /// Ends the route as a crash would: nothing in flight is brought to an end.
    #[cfg(test)]
    pub(crate) fn crash(self) {
        for task in self.0.tasks.lock().drain(..) {
            task.abort();
        }
    }
}

/// Gives the claim of `Gate::once` back, whichever way it ends; a settled key has none any more.
struct Claim {
    route: Arc<Route>,
    fingerprint: Fingerprint,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.route.store.release(EFFECT_LANE, &[self.fingerprint]);
        self.route.changed.notify_waiters();
    }
}
