//! Ownership, marks and floors of one lane: [`Session`] over the worker's thread.

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, Transaction, params};
use tokio::sync::oneshot;

use super::{
    SqliteConfig,
    deliver::{self, Finish, Work, begin, shard_row},
    packed::Packed,
    schema::{self, NOW_MS, OpenError},
    target::Target,
    worker::{Db, Fault, FileId, Open, Worker},
};
use crate::sink::{
    Acquire, Batch, Life, Mark, OnRefused, Pulse, Receipts, Resolution, RouteRow, RowOutcome, Session,
    ShardId, ShardState, ShardStep, SinkError,
};

/// Bytes of blocks in one page of marks.
const PAGE_BYTES: usize = 16 << 20;
/// Marks that one call of `expire_marks` deletes at most.
const EXPIRE_MARKS: i64 = 256;

/// One lane's connection, on a thread of its own.
pub(crate) struct SqliteSession {
    config: Arc<SqliteConfig>,
    target: Arc<dyn Target>,
    route: Arc<str>,
    owner: Arc<str>,
    worker: Option<Worker>,
    connected: bool,
    life: Life,
    /// Epochs that our own `resolve` may have set without hearing of it.
    raised: Arc<Mutex<HashMap<ShardId, i64>>>,
}

impl SqliteSession {
    /// The bookkeeping is in the file that `config` names, the rows go to `target`.
    pub(crate) fn new(config: Arc<SqliteConfig>, target: Arc<dyn Target>, route: &str, owner: &str) -> Self {
        Self {
            config,
            target,
            route: route.into(),
            owner: owner.into(),
            worker: None,
            connected: false,
            life: Life::over(),
            raised: Arc::default(),
        }
    }

    fn worker(&mut self) -> Result<&Worker, SinkError> {
        match &mut self.worker {
            Some(worker) => Ok(worker),
            slot => Worker::start(&self.route).map(|worker| &*slot.insert(worker)).map_err(|error| {
                SinkError::NotApplied { reason: format!("no thread could be started: {error}"), retry: true }
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
        job: impl FnOnce(&mut Db) -> Result<T, Fault> + Send + 'static,
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
}

impl Db {
    /// The connection, if it still leads to the file of that path.
    pub(crate) fn ready(&mut self, config: &SqliteConfig) -> Result<&mut Open, Fault> {
        let not_applied =
            |reason: String| Fault { error: SinkError::NotApplied { reason, retry: true }, lost: true };
        let Some(open) = &mut self.open else {
            return Err(not_applied("there is no connection: acquire the shards first".to_owned()));
        };
        match FileId::of(&config.path) {
            Ok(file) if file == open.file => Ok(open),
            Ok(_) => Err(not_applied(format!("{} is another file now", config.path.display()))),
            Err(error) => Err(not_applied(format!("{}: {error}", config.path.display()))),
        }
    }

    /// The connection, a new one if there is none or the file is another one now.
    pub(crate) fn connect(
        &mut self,
        config: &SqliteConfig,
        target: &dyn Target,
        route: &str,
    ) -> Result<&mut Open, Fault> {
        if self.ready(config).is_err() {
            self.open = None;
        }
        match &mut self.open {
            Some(open) => Ok(open),
            slot => {
                let mut connection = connect(config)?;
                let file = FileId::of(&config.path).map_err(|error| SinkError::NotApplied {
                    reason: format!("{}: {error}", config.path.display()),
                    retry: true,
                })?;
                let rows = target.open(&mut connection, route)?;
                Ok(slot.insert(Open { connection, file, rows, pulse: Pulse::begin() }))
            }
        }
    }

    /// Runs `look` on the connection, or, before the first `acquire`, on one for this call only.
    fn look<T>(
        &mut self,
        config: &SqliteConfig,
        look: impl FnOnce(&mut Connection) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        match &mut self.open {
            Some(_) => look(&mut self.ready(config)?.connection),
            None => look(&mut connect(config)?),
        }
    }
}

fn connect(config: &SqliteConfig) -> Result<Connection, Fault> {
    schema::open(config).map_err(|error| match error {
        OpenError::Sqlite(error) => schema::fault(&format!("opening {}", config.path.display()), &error),
        OpenError::NotDurable(why) => SinkError::NotApplied {
            reason: format!("{}: a commit would not be durable: {why}", config.path.display()),
            retry: false,
        }
        .into(),
    })
}

#[async_trait]
impl Session for SqliteSession {
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        let (config, route, proposed) = (self.config.clone(), self.route.clone(), proposed.clone());
        self.run(move |db| {
            db.look(&config, |connection| {
                let transaction = begin(connection)?;
                let row = register(&transaction, &route, &proposed)
                    .map_err(|error| schema::fault("registering the route", &error))?;
                end(transaction, "registering the route")?;
                Ok(row)
            })
        })
        .await
    }

    async fn acquire(&mut self, shards: &[ShardId], how: Acquire) -> Result<Vec<ShardState>, SinkError> {
        let (config, target) = (self.config.clone(), self.target.clone());
        let (route, owner, shards) = (self.route.clone(), self.owner.clone(), shards.to_vec());
        self.run(move |db| {
            let open = db.connect(&config, &*target, &route)?;
            let transaction = begin(&mut open.connection)?;
            let states = acquire(&transaction, &route, &owner, &shards, &how)?;
            end(transaction, "acquiring shards")?;
            Ok(states)
        })
        .await
    }

    async fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        let (config, route, prefix) = (self.config.clone(), self.route.clone(), prefix.to_owned());
        self.run(move |db| {
            db.look(&config, |connection| {
                shards(connection, &route, &prefix)
                    .map_err(|error| schema::fault("listing the route's shards", &error))
            })
        })
        .await
    }

    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        let work = Work { steps: batch.steps.to_vec(), rows: Packed::of(batch, self.target.whole()) };
        let (config, route) = (self.config.clone(), self.route.clone());
        let (outcomes, written) = oneshot::channel();
        let (finish, sealed) = oneshot::channel();
        let reply = self.worker()?.run(move |db| deliver::run(db, &config, &route, &work, outcomes, sealed));
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
        let (config, target) = (self.config.clone(), self.target.clone());
        let (route, owner, steps) = (self.route.clone(), self.owner.clone(), steps.to_vec());
        let raised = self.raised.clone();
        self.run(move |db| {
            db.open = None;
            let open = db.connect(&config, &*target, &route)?;
            let transaction = begin(&mut open.connection)?;
            let found = resolve(&transaction, &route, &owner, &steps, &raised)?;
            end(transaction, "resolving a batch")?;
            raised.lock().clear();
            Ok(found)
        })
        .await
    }

    async fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        let (config, route, shard) = (self.config.clone(), self.route.clone(), shard.clone());
        self.run(move |db| {
            let open = db.ready(&config)?;
            marks_since(&open.connection, &route, &shard, sequence)
                .map_err(|error| schema::fault("reading marks", &error))
        })
        .await
    }

    async fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError> {
        let (config, route, owned) = (self.config.clone(), self.route.clone(), owned.to_vec());
        self.run(move |db| {
            let open = db.ready(&config)?;
            let transaction = begin(&mut open.connection)?;
            let gone = expire(&transaction, &route, &owned, floor_ms)?;
            if !owned.is_empty() {
                open.rows
                    .expire(&transaction, floor_ms)
                    .map_err(|error| schema::fault("expiring marks", &error))?;
            }
            end(transaction, "expiring marks")?;
            Ok(gone)
        })
        .await
    }

    async fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        let (config, route, owned) = (self.config.clone(), self.route.clone(), owned.to_vec());
        self.run(move |db| {
            let open = db.ready(&config)?;
            let transaction = begin(&mut open.connection)?;
            let sql = format!(
                "UPDATE oncegate_shards SET heartbeat_ms = {NOW_MS} WHERE route = ?1 AND shard = ?2 AND epoch = ?3"
            );
            for (shard, epoch) in &owned {
                let touched = transaction
                    .prepare_cached(&sql)
                    .and_then(|mut update| update.execute(params![&*route, &**shard, epoch]))
                    .map_err(|error| schema::fault("touching the heartbeat", &error))?;
                still_ours(&transaction, &route, shard, *epoch, touched)?;
            }
            open.rows.due(&transaction)?;
            end(transaction, "touching the heartbeat")?;
            open.rows.committed(&mut open.connection);
            Ok(())
        })
        .await
    }

    async fn forget_all(&mut self, owned: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        let (config, route, owned) = (self.config.clone(), self.route.clone(), owned.to_vec());
        self.run(move |db| {
            let open = db.ready(&config)?;
            let transaction = begin(&mut open.connection)?;
            let gone = forget_all(&transaction, &route, &owned)?;
            end(transaction, "forgetting marks")?;
            Ok(gone)
        })
        .await
    }

    async fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError> {
        let (config, route, counts) = (self.config.clone(), self.route.clone(), counts.to_vec());
        self.run(move |db| {
            let open = db.ready(&config)?;
            let transaction = begin(&mut open.connection)?;
            let before = counts
                .iter()
                .map(|(shard, epoch, count)| keep_partitions(&transaction, &route, shard, *epoch, *count))
                .collect::<rusqlite::Result<_>>()
                .map_err(|error| schema::fault("keeping the number of partitions", &error))?;
            end(transaction, "keeping the number of partitions")?;
            Ok(before)
        })
        .await
    }

    async fn keep_sources(
        &mut self,
        sources: &[(ShardId, i64, String)],
        renew: bool,
    ) -> Result<Vec<Option<String>>, SinkError> {
        let (config, route, sources) = (self.config.clone(), self.route.clone(), sources.to_vec());
        self.run(move |db| {
            let open = db.ready(&config)?;
            let transaction = begin(&mut open.connection)?;
            let before = sources
                .iter()
                .map(|(shard, epoch, source)| keep_source(&transaction, &route, shard, *epoch, source, renew))
                .collect::<rusqlite::Result<_>>()
                .map_err(|error| schema::fault("keeping the source", &error))?;
            end(transaction, "keeping the source")?;
            Ok(before)
        })
        .await
    }

    async fn now_ms(&mut self) -> Result<i64, SinkError> {
        let config = self.config.clone();
        self.run(move |db| {
            db.look(&config, |connection| {
                connection
                    .query_row(&format!("SELECT {NOW_MS}"), [], |row| row.get(0))
                    .map_err(|error| schema::fault("asking for the time", &error))
            })
        })
        .await
    }

    fn connected(&self) -> bool {
        self.connected
    }

    fn life(&self) -> Life {
        self.life.clone()
    }
}

/// Commits what may safely be done again: a failed commit counts as not applied, on a new connection.
fn end(transaction: Transaction<'_>, doing: &str) -> Result<(), Fault> {
    transaction.commit().map_err(|error| Fault {
        error: SinkError::NotApplied { reason: format!("{doing}: {}", schema::text(&error)), retry: true },
        lost: true,
    })
}

fn register(transaction: &Transaction<'_>, route: &str, proposed: &RouteRow) -> rusqlite::Result<RouteRow> {
    transaction.execute(
        "INSERT INTO oncegate_routes (name, route_id, key_spec_id, algorithm, secret) VALUES (?1, ?2, ?3, ?4, ?5)
         ON CONFLICT (name) DO NOTHING",
        params![route, proposed.route_id, proposed.key_spec_id, proposed.algorithm, proposed.secret],
    )?;
    transaction.query_row(
        "SELECT route_id, key_spec_id, algorithm, secret FROM oncegate_routes WHERE name = ?1",
        [route],
        |row| {
            Ok(RouteRow {
                route_id: row.get(0)?,
                key_spec_id: row.get(1)?,
                algorithm: row.get(2)?,
                secret: row.get(3)?,
            })
        },
    )
}

fn acquire(
    transaction: &Transaction<'_>,
    route: &str,
    owner: &str,
    shards: &[ShardId],
    how: &Acquire,
) -> Result<Vec<ShardState>, Fault> {
    let doing = |error: rusqlite::Error| schema::fault("acquiring shards", &error);
    if let Acquire::IfFree { stale_after_ms } = *how {
        for shard in shards {
            match shard_row(transaction, route, shard).map_err(doing)? {
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
    shards.iter().map(|shard| raise(transaction, route, owner, shard, 0).map_err(doing)).collect()
}

/// Takes the shard over: its epoch rises by one, from `least` at least.
fn raise(
    transaction: &Transaction<'_>,
    route: &str,
    owner: &str,
    shard: &ShardId,
    least: i64,
) -> rusqlite::Result<ShardState> {
    transaction
        .prepare_cached(&format!(
            "INSERT INTO oncegate_shards
             (route, shard, epoch, sequence, position, watermark_ms, floor_ms, owner, heartbeat_ms)
             VALUES (?1, ?2, ?4 + 1, 0, NULL, {min}, {min}, ?3, {NOW_MS})
             ON CONFLICT (route, shard) DO UPDATE
             SET epoch = max(epoch, ?4) + 1, owner = excluded.owner, heartbeat_ms = excluded.heartbeat_ms
             RETURNING epoch, sequence, position, watermark_ms, floor_ms",
            min = "-9223372036854775807 - 1"
        ))?
        .query_row(params![route, &**shard, owner, least], |row| {
            Ok(ShardState {
                shard: shard.clone(),
                epoch: row.get(0)?,
                sequence: row.get(1)?,
                position: row.get(2)?,
                watermark_ms: row.get(3)?,
                floor_ms: row.get(4)?,
            })
        })
}

fn shards(connection: &Connection, route: &str, prefix: &str) -> rusqlite::Result<Vec<ShardState>> {
    connection
        .prepare_cached(
            "SELECT shard, epoch, sequence, position, watermark_ms, floor_ms FROM oncegate_shards
             WHERE route = ?1 AND shard >= ?2 AND substr(shard, 1, length(?2)) = ?2 ORDER BY shard",
        )?
        .query_map([route, prefix], |row| {
            Ok(ShardState {
                shard: row.get::<_, String>(0)?.into(),
                epoch: row.get(1)?,
                sequence: row.get(2)?,
                position: row.get(3)?,
                watermark_ms: row.get(4)?,
                floor_ms: row.get(5)?,
            })
        })?
        .collect()
}

/// P5: raises the epochs, then looks. A shard that another owner took stays with it.
fn resolve(
    transaction: &Transaction<'_>,
    route: &str,
    owner: &str,
    steps: &[ShardStep],
    raised: &Mutex<HashMap<ShardId, i64>>,
) -> Result<(Resolution, Vec<ShardState>), Fault> {
    let doing = |error: rusqlite::Error| schema::fault("resolving a batch", &error);
    let mut states = Vec::with_capacity(steps.len());
    for step in steps {
        let ours = raised.lock().get(&step.shard).copied().unwrap_or(step.epoch).max(step.epoch);
        if let Some(row) = shard_row(transaction, route, &step.shard).map_err(doing)?
            && row.epoch > ours
        {
            return Err(row.fenced(&step.shard).into());
        }
        let state = raise(transaction, route, owner, &step.shard, step.epoch).map_err(doing)?;
        raised.lock().insert(step.shard.clone(), state.epoch);
        states.push(state);
    }
    let applied = steps.iter().zip(&states).filter(|(step, state)| state.sequence >= step.sequence).count();
    if applied == 0 {
        return Ok((Resolution::NotApplied, states));
    }
    if applied < steps.len() {
        let reason = format!(
            "{applied} of {} shards of one batch have moved: oncegate_shards was changed by hand",
            steps.len()
        );
        return Err(SinkError::Unknown { reason }.into());
    }
    let mut marks = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let block = transaction
            .query_row(
                "SELECT block FROM oncegate_marks WHERE route = ?1 AND shard = ?2 AND sequence = ?3",
                params![route, &*step.shard, step.sequence],
                |row| row.get::<_, Vec<u8>>(0),
            )
            .optional()
            .map_err(doing)?;
        marks.extend(block.map(|block| (index, Mark { sequence: step.sequence, block: Bytes::from(block) })));
    }
    Ok((Resolution::Applied(marks), states))
}

fn marks_since(
    connection: &Connection,
    route: &str,
    shard: &str,
    sequence: i64,
) -> rusqlite::Result<Vec<Mark>> {
    let mut query = connection.prepare_cached(
        "SELECT sequence, block FROM oncegate_marks WHERE route = ?1 AND shard = ?2 AND sequence > ?3 ORDER BY sequence",
    )?;
    let mut rows = query.query(params![route, shard, sequence])?;
    let (mut page, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.next()? {
        let block = Bytes::from(row.get::<_, Vec<u8>>(1)?);
        bytes += block.len();
        if bytes > PAGE_BYTES && !page.is_empty() {
            break;
        }
        page.push(Mark { sequence: row.get(0)?, block });
    }
    Ok(page)
}

/// P11: the floor rises in the transaction that deletes.
fn expire(
    transaction: &Transaction<'_>,
    route: &str,
    owned: &[(ShardId, i64)],
    floor_ms: i64,
) -> Result<u64, Fault> {
    let doing = |error: rusqlite::Error| schema::fault("expiring marks", &error);
    let mut gone = 0i64;
    for (shard, epoch) in owned {
        let touched = transaction
            .execute(
                "UPDATE oncegate_shards SET floor_ms = max(floor_ms, ?4) WHERE route = ?1 AND shard = ?2 AND epoch = ?3",
                params![route, &**shard, epoch, floor_ms],
            )
            .map_err(doing)?;
        still_ours(transaction, route, shard, *epoch, touched)?;
        let deleted = transaction
            .execute(
                "DELETE FROM oncegate_marks WHERE rowid IN (SELECT rowid FROM oncegate_marks
                 WHERE route = ?1 AND shard = ?2 AND max_ms < ?3 ORDER BY max_ms LIMIT ?4)",
                params![route, &**shard, floor_ms, EXPIRE_MARKS - gone],
            )
            .map_err(doing)?;
        gone += deleted as i64;
    }
    Ok(gone.unsigned_abs())
}

fn keep_partitions(
    transaction: &Transaction<'_>,
    route: &str,
    shard: &str,
    epoch: i64,
    count: i64,
) -> rusqlite::Result<Option<i64>> {
    let of = "WHERE route = ?1 AND shard = ?2 AND epoch = ?3";
    let before = transaction
        .query_row(
            &format!("SELECT partitions FROM oncegate_shards {of}"),
            params![route, shard, epoch],
            |row| row.get(0),
        )
        .optional()?
        .flatten();
    if before != Some(count) {
        let update = format!("UPDATE oncegate_shards SET partitions = ?4 {of}");
        transaction.execute(&update, params![route, shard, epoch, count])?;
    }
    Ok(before)
}

fn keep_source(
    transaction: &Transaction<'_>,
    route: &str,
    shard: &str,
    epoch: i64,
    source: &str,
    renew: bool,
) -> rusqlite::Result<Option<String>> {
    let of = "WHERE route = ?1 AND shard = ?2 AND epoch = ?3";
    let before: Option<String> = transaction
        .query_row(&format!("SELECT source FROM oncegate_shards {of}"), params![route, shard, epoch], |row| {
            row.get(0)
        })
        .optional()?
        .flatten();
    let what = match &before {
        None => "source = ?4",
        Some(before) if renew && before != source => "source = ?4, position = NULL",
        Some(_) => return Ok(before),
    };
    let update = format!("UPDATE oncegate_shards SET {what} {of}");
    transaction.execute(&update, params![route, shard, epoch, source])?;
    Ok(before)
}

fn forget_all(transaction: &Transaction<'_>, route: &str, owned: &[(ShardId, i64)]) -> Result<u64, Fault> {
    let doing = |error: rusqlite::Error| schema::fault("forgetting marks", &error);
    let mut gone = 0;
    for (shard, epoch) in owned {
        let touched = transaction
            .execute(
                "UPDATE oncegate_shards SET watermark_ms = ?4, floor_ms = ?4 WHERE route = ?1 AND shard = ?2 AND epoch = ?3",
                params![route, &**shard, epoch, i64::MIN],
            )
            .map_err(doing)?;
        still_ours(transaction, route, shard, *epoch, touched)?;
        let delete = "DELETE FROM oncegate_marks WHERE route = ?1 AND shard = ?2";
        gone += transaction.execute(delete, params![route, &**shard]).map_err(doing)? as u64;
    }
    Ok(gone)
}

/// `touched` rows were found under our epoch: none means that another owner has the shard.
fn still_ours(
    transaction: &Transaction<'_>,
    route: &str,
    shard: &str,
    epoch: i64,
    touched: usize,
) -> Result<(), Fault> {
    if touched == 1 {
        return Ok(());
    }
    let row =
        shard_row(transaction, route, shard).map_err(|error| schema::fault("reading a shard", &error))?;
    Err(match row {
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
