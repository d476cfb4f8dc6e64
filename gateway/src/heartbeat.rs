//! Heartbeats of shards whose owner is busy with the sink for long: [`Beating`].

use std::{future::Future, time::Duration};

use adapters::sink::{Session, ShardId};
use tokio::time::Instant;

/// An owner shows so often that it lives.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(2);

/// A session whose shards are shown to live while it is asked for long: learning the facts of a large route takes minutes, and another
/// instance takes the shards of one that is not heard for [`crate::lane::own::STALE_OWNER_MS`].
pub(crate) struct Beating<'a> {
    pub(crate) session: &'a mut dyn Session,
    /// Shards and their epochs.
    owned: Vec<(ShardId, i64)>,
    at: &'a mut Instant,
}

impl<'a> Beating<'a> {
    /// `at`: of the last heartbeat.
    pub(crate) fn new(session: &'a mut dyn Session, owned: Vec<(ShardId, i64)>, at: &'a mut Instant) -> Self {
        Self { session, owned, at }
    }

    /// If it is time. Best effort: what has become of the shards shows when they are acquired or written to.
    pub(crate) async fn beat(&mut self) {
        if self.owned.is_empty() || self.at.elapsed() < HEARTBEAT {
            return;
        }
        *self.at = Instant::now();
        if let Err(fault) = self.session.heartbeat(&self.owned).await {
            tracing::debug!(%fault, "a heartbeat while the sink is asked");
        }
    }

    /// Waits for something else.
    pub(crate) async fn while_waiting<T>(&mut self, wait: impl Future<Output = T>) -> T {
        tokio::pin!(wait);
        loop {
            let next = *self.at + HEARTBEAT;
            tokio::select! {
                biased;
                done = &mut wait => return done,
                () = tokio::time::sleep_until(next), if !self.owned.is_empty() => self.beat().await,
            }
        }
    }
}
