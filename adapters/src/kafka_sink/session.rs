//! [`Session`] over the worker's thread.

use async_trait::async_trait;

use super::{
    deliver::{Delivered, Work, refusals},
    desk::{Desk, Place},
    worker::{Reply, Worker},
};
use crate::sink::{
    Acquire, Batch, Life, Mark, OnRefused, Receipts, Resolution, RouteRow, RowOutcome, Session, ShardId,
    ShardState, ShardStep, SinkError,
};

/// One lane's connection.
pub(super) struct KafkaSession {
    place: Place,
    worker: Option<Worker>,
    connected: bool,
    life: Life,
}

impl KafkaSession {
    pub(super) fn new(place: Place) -> Self {
        Self { place, worker: None, connected: false, life: Life::over() }
    }

    fn worker(&mut self) -> Result<&Worker, SinkError> {
        match &mut self.worker {
            Some(worker) => Ok(worker),
            slot => {
                let started = Worker::start(Desk::new(self.place.clone()));
                started.map(|worker| &*slot.insert(worker)).map_err(|error| SinkError::NotApplied {
                    reason: format!("no thread could be started: {error}"),
                    retry: true,
                })
            }
        }
    }

    /// Runs `job` on the thread. `connected` is false while it runs, so that a caller who leaves half way must acquire
    /// again; that waits for the job, for the thread does one thing after the other.
    async fn run<T: Send + 'static>(
        &mut self,
        job: impl FnOnce(&mut Desk) -> Result<T, SinkError> + Send + 'static,
    ) -> Result<T, SinkError> {
        let reply: Reply<T> = self.worker()?.run(job);
        self.connected = false;
        match reply.await {
            Ok((result, life)) => {
                self.connected = life.is_some();
                self.life = life.unwrap_or_else(Life::over);
                result
            }
            Err(_) => {
                self.worker = None;
                // What it was doing is not known, and may have been a commit.
                Err(SinkError::Unknown { reason: "the session's thread ended".to_owned() })
            }
        }
    }
}

#[async_trait]
impl Session for KafkaSession {
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        let proposed = proposed.clone();
        self.run(move |desk| desk.register_route(&proposed)).await
    }

    async fn acquire(&mut self, shards: &[ShardId], how: Acquire) -> Result<Vec<ShardState>, SinkError> {
        let shards = shards.to_vec();
        self.run(move |desk| desk.acquire(&shards, &how)).await
    }

    async fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        let prefix = prefix.to_owned();
        self.run(move |desk| desk.shards(&prefix)).await
    }

    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        let mut rows = refusals(batch, &self.place);
        loop {
            if batch.on_refused == OnRefused::Abort
                && let Some((row, reason)) =
                    rows.iter().enumerate().find_map(|(row, outcome)| match outcome {
                        RowOutcome::Refused { reason } => Some((row, reason.clone())),
                        _ => None,
                    })
            {
                return Err(SinkError::Refused { row, reason });
            }
            let work = Work::of(batch, &rows, &self.place);
            match self.run(move |desk| desk.deliver(&work)).await? {
                Delivered::In => return Ok(Receipts { rows }),
                Delivered::Refused(refused) => {
                    for (row, reason) in refused {
                        if let Some(outcome) = rows.get_mut(row) {
                            *outcome = RowOutcome::Refused { reason };
                        }
                    }
                }
            }
        }
    }

    async fn resolve(&mut self, steps: &[ShardStep]) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        let steps = steps.to_vec();
        self.run(move |desk| desk.resolve(&steps)).await
    }

    async fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        let shard = shard.clone();
        self.run(move |desk| desk.marks_since(&shard, sequence)).await
    }

    async fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError> {
        let owned = owned.to_vec();
        self.run(move |desk| desk.expire_marks(&owned, floor_ms)).await
    }

    async fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        let owned = owned.to_vec();
        self.run(move |desk| desk.heartbeat(&owned)).await
    }

    async fn forget_all(&mut self, owned: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        let owned = owned.to_vec();
        self.run(move |desk| desk.forget_all(&owned)).await
    }

    async fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError> {
        let counts = counts.to_vec();
        self.run(move |desk| desk.keep_partitions(&counts)).await
    }

    async fn keep_sources(
        &mut self,
        sources: &[(ShardId, i64, String)],
        renew: bool,
    ) -> Result<Vec<Option<String>>, SinkError> {
        let sources = sources.to_vec();
        self.run(move |desk| desk.keep_sources(&sources, renew)).await
    }

    async fn now_ms(&mut self) -> Result<i64, SinkError> {
        self.run(Desk::now_ms).await
    }

    fn connected(&self) -> bool {
        self.connected
    }

    fn life(&self) -> Life {
        self.life.clone()
    }
}
