//! Ownership, marks and floors of one lane: [`Session`] over the worker's thread.

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{
    Books,
    marks::{self, Finish},
    shards,
    worker::{Fault, Owned, Worker},
};
use crate::sink::{
    Acquire, Batch, Life, Mark, OnRefused, Receipts, Resolution, RouteRow, RowOutcome, Session, ShardId,
    ShardState, ShardStep, SinkError,
};

/// One kind of database, with what names the file and the rows. Its methods run on the worker's thread.
pub(crate) trait Engine: Send + Sync + 'static {
    /// What the thread owns.
    type Db: Owned;
    /// A batch's rows, owned, so that they can go to the thread.
    type Rows: Send + 'static;
    /// In the thread's name.
    const NAME: &'static str;

    /// A batch's rows for [`Engine::deliver`]. Runs where the session is called.
    fn pack(&self, batch: &Batch<'_>) -> Self::Rows;
    /// Makes a connection if there is none or it leads elsewhere by now; with `anew` in any case.
    fn connect(&self, db: &mut Self::Db, route: &str, anew: bool) -> Result<(), Fault>;
    /// Runs `job` in a transaction that is safe to run again, on the connection that `connect` made.
    fn transact<T>(
        &self,
        db: &mut Self::Db,
        doing: &str,
        job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
    ) -> Result<T, Fault>;
    /// As `transact`, before the first `connect` on a connection for this call only.
    fn look<T>(
        &self,
        db: &mut Self::Db,
        doing: &str,
        job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
    ) -> Result<T, Fault>;
    /// Runs `job`, which only reads, over one state of the file, without waiting for who writes: on the connection that `connect` made,
    /// or, unless it must be `acquired`, before the first `connect` on one for this call only.
    fn read<T>(
        &self,
        db: &mut Self::Db,
        acquired: bool,
        job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
    ) -> Result<T, Fault>;
    /// One batch, one transaction. Hands the outcomes over once the rows are written, and commits with what comes back for them;
    /// if nothing does, it rolls back.
    fn deliver(
        &self,
        db: &mut Self::Db,
        route: &str,
        work: &Work<Self::Rows>,
        outcomes: oneshot::Sender<Vec<RowOutcome>>,
        finish: oneshot::Receiver<Finish>,
    ) -> Result<(), Fault>;
    /// As `transact`, and what time brings about for the rows.
    fn heartbeat(
        &self,
        db: &mut Self::Db,
        _route: &str,
        job: impl FnOnce(&dyn Books) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.transact(db, "touching the heartbeat", job)
    }
    /// As `transact`, and what there is for old keys beside the marks.
    fn expire(
        &self,
        db: &mut Self::Db,
        route: &str,
        floor_ms: i64,
        job: impl FnOnce(&dyn Books) -> Result<u64, Fault>,
    ) -> Result<u64, Fault>;
}

/// What the thread needs before the outcomes are known.
pub(crate) struct Work<R> {
    pub(crate) steps: Vec<ShardStep>,
    pub(crate) rows: R,
}

/// The caller is gone: nobody could hear of a commit.
pub(crate) fn abandoned() -> Fault {
    SinkError::NotApplied { reason: "the caller left before the batch was sealed".to_owned(), retry: true }
        .into()
}

/// One lane's connection, on a thread of its own.
pub(crate) struct BookSession<E: Engine> {
    pub(crate) engine: Arc<E>,
    route: Arc<str>,
    owner: Arc<str>,
    worker: Option<Worker<E::Db>>,
    connected: bool,
    life: Life,
    /// Epochs that our own `resolve` may have set without hearing of it.
    raised: Arc<Mutex<HashMap<ShardId, i64>>>,
}

impl<E: Engine> BookSession<E> {
    pub(crate) fn of(engine: E, route: &str, owner: &str) -> Self {
        Self {
            engine: Arc::new(engine),
            route: route.into(),
            owner: owner.into(),
            worker: None,
            connected: false,
            life: Life::over(),
            raised: Arc::default(),
        }
    }

    fn worker(&mut self) -> Result<&Worker<E::Db>, SinkError> {
        match &mut self.worker {
            Some(worker) => Ok(worker),
            slot => Worker::start(format!("{} {}", E::NAME, self.route))
                .map(|worker| &*slot.insert(worker))
                .map_err(|error| SinkError::NotApplied {
                    reason: format!("no thread could be started: {error}"),
                    retry: true,
                }),
        }
    }

    /// A job has ended, with that of the connection.
    fn left_with(&mut self, life: Option<Life>) {
        self.connected = life.is_some();
        self.life = life.unwrap_or_else(Life::over);
    }

    /// Runs `job` on the thread. `connected` is false while it runs, so that a caller who leaves half way must acquire
    /// again; that waits for the job, for the thread does one thing after the other.
    pub(crate) async fn run<T: Send + 'static>(
        &mut self,
        job: impl FnOnce(&mut E::Db) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, SinkError> {
        let reply = self.worker()?.run(job);
        self.connected = false;
        match reply.await {
            Ok((result, life)) => {
                self.left_with(life);
                result
            }
            Err(_) => {
                self.worker = None;
                Err(SinkError::NotApplied { reason: "the session's thread ended".to_owned(), retry: true })
            }
        }
    }

    /// [`Engine::transact`] on the thread, with the route's name.
    async fn transact<T: Send + 'static>(
        &mut self,
        doing: &'static str,
        job: impl FnOnce(&dyn Books, &str) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, SinkError> {
        let (engine, route) = (self.engine.clone(), self.route.clone());
        self.run(move |db| engine.transact(db, doing, |books| job(books, &route))).await
    }

    /// [`Engine::read`] on the thread, with the route's name.
    async fn read<T: Send + 'static>(
        &mut self,
        acquired: bool,
        job: impl FnOnce(&dyn Books, &str) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, SinkError> {
        let (engine, route) = (self.engine.clone(), self.route.clone());
        self.run(move |db| engine.read(db, acquired, |books| job(books, &route))).await
    }
}

#[async_trait]
impl<E: Engine> Session for BookSession<E> {
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        let (engine, route, proposed) = (self.engine.clone(), self.route.clone(), proposed.clone());
        self.run(move |db| {
            engine.look(db, "registering the route", |books| shards::register(books, &route, &proposed))
        })
        .await
    }

    async fn acquire(&mut self, shards: &[ShardId], how: Acquire) -> Result<Vec<ShardState>, SinkError> {
        let (engine, route, owner) = (self.engine.clone(), self.route.clone(), self.owner.clone());
        let shards = shards.to_vec();
        self.run(move |db| {
            engine.connect(db, &route, false)?;
            engine.transact(db, "acquiring shards", |books| {
                shards::acquire(books, &route, &owner, &shards, &how)
            })
        })
        .await
    }

    async fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        let prefix = prefix.to_owned();
        self.read(false, move |books, route| shards::shards(books, route, &prefix)).await
    }

    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        let work = Work { steps: batch.steps.to_vec(), rows: self.engine.pack(batch) };
        let (engine, route) = (self.engine.clone(), self.route.clone());
        let (outcomes, written) = oneshot::channel();
        let (finish, sealed) = oneshot::channel();
        let reply = self.worker()?.run(move |db| engine.deliver(db, &route, &work, outcomes, sealed));
        self.connected = false;
        // Nothing comes if the batch failed before its rows were in: the reply says how.
        let rows = written.await.unwrap_or_default();
        let aborting = match batch.on_refused {
            OnRefused::Abort => rows.iter().enumerate().find_map(|(row, outcome)| match outcome {
                RowOutcome::Refused { reason } => Some(SinkError::Refused { row, reason: reason.clone() }),
                _ => None,
            }),
            OnRefused::Report | OnRefused::DeadLetter => None,
        };
        if rows.len() == batch.rows.len() && aborting.is_none() {
            // A thread that has ended says so by its reply too.
            drop(finish.send(Finish::of(batch, &rows)));
        } else {
            drop(finish);
        }
        match reply.await {
            Ok((result, life)) => {
                self.left_with(life);
                // Without its finish the transaction was rolled back.
                aborting.map_or(result, Err).map(|()| Receipts { rows })
            }
            Err(_) => {
                self.worker = None;
                Err(SinkError::Unknown { reason: "the session's thread ended".to_owned() })
            }
        }
    }

    async fn resolve(&mut self, steps: &[ShardStep]) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        let (engine, route, owner) = (self.engine.clone(), self.route.clone(), self.owner.clone());
        let (steps, raised) = (steps.to_vec(), self.raised.clone());
        self.run(move |db| {
            engine.connect(db, &route, true)?;
            let found = engine.transact(db, "resolving a batch", |books| {
                shards::resolve(books, &route, &owner, &steps, &raised)
            })?;
            raised.lock().clear();
            Ok(found)
        })
        .await
    }

    async fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        let shard = shard.clone();
        self.read(true, move |books, route| marks::marks_since(books, route, &shard, sequence)).await
    }

    async fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError> {
        let (engine, route, owned) = (self.engine.clone(), self.route.clone(), owned.to_vec());
        self.run(move |db| {
            if owned.is_empty() {
                return Ok(0);
            }
            engine.expire(db, &route, floor_ms, |books| marks::expire(books, &route, &owned, floor_ms))
        })
        .await
    }

    async fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        let (engine, route, owned) = (self.engine.clone(), self.route.clone(), owned.to_vec());
        self.run(move |db| engine.heartbeat(db, &route, |books| shards::heartbeat(books, &route, &owned)))
            .await
    }

    async fn forget_all(&mut self, owned: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        let owned = owned.to_vec();
        self.transact("forgetting marks", move |books, route| marks::forget_all(books, route, &owned)).await
    }

    async fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError> {
        let counts = counts.to_vec();
        self.transact("keeping the number of partitions", move |books, route| {
            counts.iter().map(|count| shards::keep_partitions(books, route, count)).collect()
        })
        .await
    }

    async fn keep_sources(
        &mut self,
        sources: &[(ShardId, i64, String)],
        renew: bool,
    ) -> Result<Vec<Option<String>>, SinkError> {
        let sources = sources.to_vec();
        self.transact("keeping the source", move |books, route| {
            sources.iter().map(|source| shards::keep_source(books, route, source, renew)).collect()
        })
        .await
    }

    async fn now_ms(&mut self) -> Result<i64, SinkError> {
        self.read(false, |books, _| marks::now_ms(books)).await
    }

    fn connected(&self) -> bool {
        self.connected
    }

    fn life(&self) -> Life {
        self.life.clone()
    }
}
