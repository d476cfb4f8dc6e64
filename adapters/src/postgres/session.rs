//! One lane's connection: shards, marks, routes. Delivering stands in `deliver`.

use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use tokio_postgres::{Client, Row as Answer, Statement, types::Type};

use super::{
    Shared,
    acquire::{STATE, state},
    connect::{Class, application_name, cause, classify, refusal},
    deliver::Pace,
    tables::Tables,
};
use crate::{
    lineage::applied,
    sink::{
        Acquire, Batch, Life, Mark, Pulse, Receipts, Resolution, RouteRow, Session, ShardId, ShardState,
        ShardStep, SinkError,
    },
};

/// Marks deleted by one `expire_marks`.
const EXPIRE_AT_ONCE: i64 = 500;
/// A page of `marks_since`, bytes.
const PAGE_BYTES: i64 = 16 << 20;
/// And marks.
const PAGE_MARKS: i64 = 4096;
/// All marks of a route are deleted within so long.
const FORGET: Duration = Duration::from_secs(3_600);

/// A connection, and what is prepared on it.
pub(super) struct Link {
    pub(super) client: Client,
    pub(super) statements: HashMap<StatementKey, Statement>,
    /// Some shard was acquired on it: only then is it a connection to deliver on (P6).
    pub(super) acquired: bool,
    /// Ends with the connection's task, or with this.
    pub(super) pulse: Pulse,
}

/// Names a prepared statement: which one, for which shape, for several shards or one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum StatementKey {
    Fence { several: bool },
    Whole { shape: Option<u64>, several: bool, known_new: bool },
    Marks,
    DeadLetters,
    Copy { shape: u64 },
    Write { shape: u64 },
    Delete,
    Tombstones,
}

/// Prepared statements on one connection; beyond it all are dropped and prepared anew.
const MAX_STATEMENTS: usize = 256;

impl Link {
    /// The statement `key`, prepared on first use with the text and parameter types that `make` gives.
    pub(super) async fn prepared(
        &mut self,
        key: StatementKey,
        make: impl FnOnce() -> (String, Vec<Type>),
    ) -> Result<Statement, tokio_postgres::Error> {
        if let Some(statement) = self.statements.get(&key) {
            return Ok(statement.clone());
        }
        if self.statements.len() >= MAX_STATEMENTS {
            self.statements.clear();
        }
        let (text, types) = make();
        let statement = self.client.prepare_typed(&text, &types).await?;
        self.statements.insert(key, statement.clone());
        Ok(statement)
    }
}

/// See the module.
pub(super) struct PostgresSession {
    pub(super) shared: Arc<Shared>,
    pub(super) route: String,
    pub(super) owner: String,
    application_name: String,
    /// Taken out while a call works on it: a call that is dropped half way, or fails in doubt, takes the connection with it.
    pub(super) link: Option<Link>,
    pub(super) pace: Pace,
    /// Epochs that our own `resolve` may have set without hearing of it.
    pub(super) raised: HashMap<ShardId, i64>,
}

impl PostgresSession {
    pub(super) fn new(shared: Arc<Shared>, route: &str, owner: &str) -> PostgresSession {
        PostgresSession {
            shared,
            route: route.to_owned(),
            owner: owner.to_owned(),
            application_name: application_name(route, owner),
            link: None,
            pace: Pace::default(),
            raised: HashMap::new(),
        }
    }

    /// Takes the connection, or makes one.
    pub(super) async fn connect(&mut self) -> Result<Link, SinkError> {
        match self.link.take() {
            Some(link) if !link.client.is_closed() => Ok(link),
            _ => self.connect_anew().await,
        }
    }

    async fn connect_anew(&self) -> Result<Link, SinkError> {
        // The driver bounds each address of a host by the same time; this bounds them all, and the log-in.
        let limit = self.shared.config.connect_timeout * 2;
        let (client, pulse) =
            tokio::time::timeout(limit, self.shared.address.connect(&self.application_name))
                .await
                .map_err(|_| {
                    again(format!("connecting to Postgres took more than {} ms", limit.as_millis()))
                })?
                .map_err(|error| {
                    let retry = error.as_db_error().is_none_or(|server| {
                        // Wrong password, no such user or database: trying again does not help.
                        !matches!(server.code().code().get(..2), Some("28" | "3D"))
                    });
                    SinkError::NotApplied {
                        reason: format!("cannot connect to Postgres: {}", cause(&error)),
                        retry,
                    }
                })?;
        Ok(Link { client, statements: HashMap::new(), acquired: false, pulse })
    }

    /// The connection that shards were acquired on.
    pub(super) fn acquired(&mut self) -> Result<Link, SinkError> {
        match self.link.take() {
            Some(link) if link.acquired && !link.client.is_closed() => Ok(link),
            _ => Err(again("no connection to Postgres: acquire the shards first")),
        }
    }

    /// Bounds a call on the server by the statement time-out and a margin; what it leaves is closed.
    pub(super) fn limit(&self) -> Duration {
        self.shared.config.statement_timeout + Duration::from_secs(5)
    }

    /// Puts the connection back if it still is good after a call that changed nothing or is safe to repeat.
    async fn settle<T>(&mut self, link: Link, result: Result<T, Fault>) -> Result<T, SinkError> {
        match result {
            Ok(done) => {
                self.link = Some(link);
                Ok(done)
            }
            Err(Fault::Sink(error)) => {
                self.link = roll_back(link).await;
                Err(error)
            }
            Err(Fault::Database(error)) => {
                if classify(&error) != Class::Lost {
                    self.link = roll_back(link).await;
                }
                Err(not_applied(&error))
            }
            Err(Fault::Late(limit)) => Err(again(late(limit))),
        }
    }

    /// Why the fence did not move every step of `steps`: the first shard that another owner took, or that stands elsewhere.
    pub(super) async fn why_not_moved(
        &self,
        client: &Client,
        steps: &[ShardStep],
    ) -> Result<SinkError, tokio_postgres::Error> {
        let query = format!(
            "SELECT shard, epoch, sequence, owner FROM {} WHERE route = $1 AND shard = ANY($2)",
            self.shared.tables.shards
        );
        let names: Vec<&str> = steps.iter().map(|step| &*step.shard).collect();
        let rows = client.query(&query, &[&self.route, &names]).await?;
        let find = |step: &ShardStep| rows.iter().find(|row| row.get::<_, &str>(0) == &*step.shard);
        for step in steps {
            if let Some(row) = find(step)
                && row.get::<_, i64>(1) != step.epoch
            {
                return Ok(SinkError::Fenced {
                    shard: step.shard.to_string(),
                    owner: row.get(3),
                    epoch: row.get(1),
                });
            }
        }
        for step in steps {
            let sequence = find(step).map(|row| row.get::<_, i64>(2));
            match sequence {
                Some(sequence) if sequence == step.sequence - 1 => {}
                Some(sequence) if sequence >= step.sequence => {
                    return Ok(SinkError::Unknown {
                        reason: format!(
                            "shard {} is at sequence {sequence} already: an earlier attempt may have landed",
                            step.shard
                        ),
                    });
                }
                _ => {
                    let at = sequence.map_or("gone".to_owned(), |sequence| format!("at sequence {sequence}"));
                    return Ok(again(format!(
                        "the sink went back: shard {} is {at}, expected {}",
                        step.shard,
                        step.sequence - 1
                    )));
                }
            }
        }
        Ok(again("the shard rows changed while they were looked at"))
    }

    /// Opens a transaction: nothing is set for the session, so that poolers work.
    pub(super) fn begin(&self) -> String {
        let timeout = self.shared.config.statement_timeout.as_millis();
        let raise = if self.raises_commit() { "; SET LOCAL synchronous_commit = on" } else { "" };
        format!(
            "BEGIN; SET LOCAL statement_timeout = {timeout}; SET LOCAL idle_in_transaction_session_timeout = {timeout}{raise}"
        )
    }

    pub(super) fn raises_commit(&self) -> bool {
        self.shared.probed.get().is_none_or(|probed| probed.raise_commit)
    }

    fn page_query(&self) -> String {
        format!(
            "SELECT sequence, block FROM (SELECT sequence, block, row_number() OVER (ORDER BY sequence) AS place, \
             sum(octet_length(block)) OVER (ORDER BY sequence) AS total FROM (SELECT sequence, block FROM {} \
             WHERE route = $1 AND shard = $2 AND sequence > $3 ORDER BY sequence LIMIT {PAGE_MARKS}) AS m) AS p \
             WHERE place = 1 OR total <= {PAGE_BYTES} ORDER BY sequence",
            self.shared.tables.marks
        )
    }

    /// Whether the batch of `steps` is in: atomic, so one step proves all.
    async fn landed(
        &self,
        client: &Client,
        steps: &[ShardStep],
        states: &[ShardState],
    ) -> Result<Resolution, Fault> {
        if !applied(steps, states).map_err(Fault::Sink)? {
            return Ok(Resolution::NotApplied);
        }
        let query = format!(
            "SELECT block FROM {} WHERE route = $1 AND shard = $2 AND sequence = $3",
            self.shared.tables.marks
        );
        let mut marks = Vec::new();
        for (index, step) in steps.iter().enumerate() {
            let row = client.query_opt(&query, &[&self.route, &&*step.shard, &step.sequence]).await?;
            let mark =
                |row: Answer| Mark { sequence: step.sequence, block: Bytes::copy_from_slice(row.get(0)) };
            marks.extend(row.map(|row| (index, mark(row))));
        }
        Ok(Resolution::Applied(marks))
    }
}

/// What stopped a call.
pub(super) enum Fault {
    Database(tokio_postgres::Error),
    Sink(SinkError),
    /// No answer within so long.
    Late(Duration),
}

impl From<tokio_postgres::Error> for Fault {
    fn from(error: tokio_postgres::Error) -> Self {
        Fault::Database(error)
    }
}

/// Bounds `work`.
pub(super) async fn bounded<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Fault>>,
) -> Result<T, Fault> {
    tokio::time::timeout(limit, work).await.unwrap_or(Err(Fault::Late(limit)))
}

pub(super) fn late(limit: Duration) -> String {
    format!("Postgres did not answer within {} ms", limit.as_millis())
}

/// Nothing happened, and trying again may help.
pub(super) fn again(reason: impl Into<String>) -> SinkError {
    SinkError::NotApplied { reason: reason.into(), retry: true }
}

/// Nothing happened.
pub(super) fn not_applied(error: &tokio_postgres::Error) -> SinkError {
    let class = classify(error);
    let reason = if class == Class::Row { refusal(error) } else { cause(error) };
    SinkError::NotApplied { reason, retry: matches!(class, Class::Again | Class::Lost) }
}

/// That a question could not be asked says nothing about the batch that it is about.
fn still_unknown(error: SinkError) -> SinkError {
    match error {
        SinkError::NotApplied { reason, .. } => SinkError::Unknown { reason },
        error => error,
    }
}

/// Ends the transaction, if there is one; a connection that cannot even do that is given up.
pub(super) async fn roll_back(link: Link) -> Option<Link> {
    let limit = Duration::from_secs(5);
    match tokio::time::timeout(limit, link.client.batch_execute("ROLLBACK")).await {
        Ok(Ok(())) => Some(link),
        _ => None,
    }
}

/// Touches the heartbeat of `owned` shards under their epochs, locking their rows in order; fails with `Fenced` if one is lost.
async fn touch(client: &Client, tables: &Tables, route: &str, owned: &[(ShardId, i64)]) -> Result<(), Fault> {
    let shards = &tables.shards;
    let text = format!(
        "WITH locked AS MATERIALIZED (SELECT shard FROM {shards} WHERE route = $1 AND shard = ANY($2) ORDER BY shard FOR UPDATE) \
         UPDATE {shards} AS s SET heartbeat = clock_timestamp() FROM unnest($2::text[], $3::bigint[]) AS f(shard, epoch) \
         WHERE s.route = $1 AND s.shard = f.shard AND s.epoch = f.epoch AND s.shard IN (SELECT shard FROM locked)"
    );
    let names: Vec<&str> = owned.iter().map(|(shard, _)| &**shard).collect();
    let epochs: Vec<i64> = owned.iter().map(|(_, epoch)| *epoch).collect();
    if client.execute(&text, &[&route, &names, &epochs]).await? == owned.len() as u64 {
        return Ok(());
    }
    let query = format!("SELECT shard, owner, epoch FROM {shards} WHERE route = $1 AND shard = ANY($2)");
    let rows = client.query(&query, &[&route, &names]).await?;
    for (shard, epoch) in owned {
        match rows.iter().find(|row| row.get::<_, &str>(0) == &**shard) {
            Some(row) if row.get::<_, i64>(2) == *epoch => {}
            Some(row) => {
                return Err(Fault::Sink(SinkError::Fenced {
                    shard: shard.to_string(),
                    owner: row.get(1),
                    epoch: row.get(2),
                }));
            }
            None => {
                return Err(Fault::Sink(again(format!(
                    "the sink went back: it does not know shard {shard}"
                ))));
            }
        }
    }
    Err(Fault::Sink(again("the shard rows changed while they were looked at")))
}

#[async_trait]
impl Session for PostgresSession {
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        let link = self.connect().await?;
        let result = bounded(self.limit(), async {
            let routes = &self.shared.tables.routes;
            let insert = format!(
                "INSERT INTO {routes} (name, route_id, key_spec_id, algorithm, secret) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING"
            );
            let RouteRow { route_id, key_spec_id, algorithm, secret } = proposed;
            link.client.execute(&insert, &[&self.route, route_id, key_spec_id, algorithm, secret]).await?;
            let query = format!("SELECT route_id, key_spec_id, algorithm, secret FROM {routes} WHERE name = $1");
            let row = link.client.query_one(&query, &[&self.route]).await?;
            Ok(RouteRow { route_id: row.get(0), key_spec_id: row.get(1), algorithm: row.get(2), secret: row.get(3) })
        })
        .await;
        self.settle(link, result).await
    }

    async fn acquire(&mut self, shards: &[ShardId], how: Acquire) -> Result<Vec<ShardState>, SinkError> {
        self.acquire_from(shards, &how, None).await
    }

    async fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        let link = self.connect().await?;
        let query = format!(
            "SELECT {STATE} FROM {} AS s WHERE s.route = $1 AND starts_with(s.shard, $2) ORDER BY s.shard",
            self.shared.tables.shards
        );
        let result = bounded(self.limit(), async {
            let rows = link.client.query(&query, &[&self.route, &prefix]).await?;
            Ok(rows.iter().map(state).collect())
        })
        .await;
        self.settle(link, result).await
    }

    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        self.deliver_batch(batch).await
    }

    async fn resolve(&mut self, steps: &[ShardStep]) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        // The old connection may still be working on the batch: it must neither be used nor waited for.
        self.link = None;
        let shards: Vec<ShardId> = steps.iter().map(|step| step.shard.clone()).collect();
        let held: Vec<i64> = steps.iter().map(|step| step.epoch).collect();
        let states = self.acquire_from(&shards, &Acquire::Force, Some(&held)).await.map_err(still_unknown)?;
        let link = self.acquired().map_err(still_unknown)?;
        let look = self.landed(&link.client, steps, &states);
        // Still unknown if the look fails: the caller asks again.
        match bounded(self.limit(), look).await {
            Ok(resolution) => {
                self.link = Some(link);
                self.raised.clear();
                Ok((resolution, states))
            }
            Err(Fault::Sink(error)) => Err(still_unknown(error)),
            Err(Fault::Database(error)) => Err(SinkError::Unknown { reason: cause(&error) }),
            Err(Fault::Late(limit)) => Err(SinkError::Unknown { reason: late(limit) }),
        }
    }

    async fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        let link = self.acquired()?;
        let query = self.page_query();
        let result = bounded(self.limit(), async {
            let rows = link.client.query(&query, &[&self.route, &&**shard, &sequence]).await?;
            Ok(rows
                .iter()
                .map(|row| Mark { sequence: row.get(0), block: Bytes::copy_from_slice(row.get(1)) })
                .collect())
        })
        .await;
        self.settle(link, result).await
    }

    async fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError> {
        let link = self.acquired()?;
        let result = bounded(self.limit(), async {
            let client = &link.client;
            let Tables { marks, shards, tombstones, .. } = &self.shared.tables;
            let names: Vec<&str> = owned.iter().map(|(shard, _)| &**shard).collect();
            client.batch_execute(&self.begin()).await?;
            touch(client, &self.shared.tables, &self.route, owned).await?;
            let raise =
                format!("UPDATE {shards} SET floor_ms = $3 WHERE route = $1 AND shard = ANY($2) AND floor_ms < $3");
            client.execute(&raise, &[&self.route, &names, &floor_ms]).await?;
            let delete = format!(
                "DELETE FROM {marks} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {marks} WHERE route = $1 AND shard = ANY($2) \
                 AND max_ms < $3 LIMIT {EXPIRE_AT_ONCE}))"
            );
            let gone = client.execute(&delete, &[&self.route, &names, &floor_ms]).await?;
            let bury = format!(
                "DELETE FROM {tombstones} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {tombstones} WHERE route = $1 \
                 AND event_ms < $2 LIMIT {EXPIRE_AT_ONCE}))"
            );
            client.execute(&bury, &[&self.route, &floor_ms]).await?;
            client.batch_execute("COMMIT").await?;
            Ok(gone)
        })
        .await;
        self.settle(link, result).await
    }

    async fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        let link = self.acquired()?;
        let result =
            bounded(self.limit(), touch(&link.client, &self.shared.tables, &self.route, owned)).await;
        self.settle(link, result).await
    }

    async fn forget_all(&mut self, owned: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        let link = self.acquired()?;
        let result = bounded(FORGET, async {
            let client = &link.client;
            let Tables { marks, shards, .. } = &self.shared.tables;
            let names: Vec<&str> = owned.iter().map(|(shard, _)| &**shard).collect();
            client.batch_execute(&format!("{}; SET LOCAL statement_timeout = 0", self.begin())).await?;
            touch(client, &self.shared.tables, &self.route, owned).await?;
            let lower = format!(
                "UPDATE {shards} SET watermark_ms = $3, floor_ms = $3 WHERE route = $1 AND shard = ANY($2)"
            );
            client.execute(&lower, &[&self.route, &names, &i64::MIN]).await?;
            let delete = format!("DELETE FROM {marks} WHERE route = $1 AND shard = ANY($2)");
            let gone = client.execute(&delete, &[&self.route, &names]).await?;
            client.batch_execute("COMMIT").await?;
            Ok(gone)
        })
        .await;
        self.settle(link, result).await
    }

    async fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError> {
        let link = self.acquired()?;
        let result = bounded(self.limit(), async {
            let shards = &self.shared.tables.shards;
            let text = format!(
                "WITH asked AS MATERIALIZED (SELECT * FROM unnest($2::text[], $3::bigint[], $4::bigint[]) AS f(shard, epoch, count)), \
                 before AS MATERIALIZED (SELECT s.shard, s.partitions FROM {shards} s JOIN asked f ON s.shard = f.shard AND \
                 s.epoch = f.epoch WHERE s.route = $1), \
                 kept AS (UPDATE {shards} AS s SET partitions = f.count FROM asked f WHERE s.route = $1 AND s.shard = f.shard AND \
                 s.epoch = f.epoch AND s.partitions IS DISTINCT FROM f.count) \
                 SELECT shard, partitions FROM before"
            );
            let names: Vec<&str> = counts.iter().map(|(shard, ..)| &**shard).collect();
            let epochs: Vec<i64> = counts.iter().map(|(_, epoch, _)| *epoch).collect();
            let numbers: Vec<i64> = counts.iter().map(|(.., count)| *count).collect();
            let rows = link.client.query(&text, &[&self.route, &names, &epochs, &numbers]).await?;
            let before: HashMap<&str, Option<i64>> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
            Ok(names.iter().map(|name| before.get(name).copied().flatten()).collect())
        })
        .await;
        self.settle(link, result).await
    }

    async fn keep_sources(
        &mut self,
        sources: &[(ShardId, i64, String)],
        renew: bool,
    ) -> Result<Vec<Option<String>>, SinkError> {
        let link = self.acquired()?;
        let result = bounded(self.limit(), async {
            let shards = &self.shared.tables.shards;
            let text = format!(
                "WITH asked AS MATERIALIZED (SELECT * FROM unnest($2::text[], $3::bigint[], $4::text[]) AS f(shard, epoch, source)), \
                 before AS MATERIALIZED (SELECT s.shard, s.source FROM {shards} s JOIN asked f ON s.shard = f.shard AND \
                 s.epoch = f.epoch WHERE s.route = $1), \
                 kept AS (UPDATE {shards} AS s SET source = f.source, position = CASE WHEN s.source IS NULL THEN s.position END \
                 FROM asked f WHERE s.route = $1 AND s.shard = f.shard AND s.epoch = f.epoch AND \
                 (s.source IS NULL OR ($5 AND s.source <> f.source))) \
                 SELECT shard, source FROM before"
            );
            let names: Vec<&str> = sources.iter().map(|(shard, ..)| &**shard).collect();
            let epochs: Vec<i64> = sources.iter().map(|(_, epoch, _)| *epoch).collect();
            let ids: Vec<&str> = sources.iter().map(|(.., source)| source.as_str()).collect();
            let rows = link.client.query(&text, &[&self.route, &names, &epochs, &ids, &renew]).await?;
            let before: HashMap<&str, Option<String>> =
                rows.iter().map(|row| (row.get(0), row.get(1))).collect();
            Ok(names.iter().map(|name| before.get(name).cloned().flatten()).collect())
        })
        .await;
        self.settle(link, result).await
    }

    async fn now_ms(&mut self) -> Result<i64, SinkError> {
        let link = self.connect().await?;
        let query = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
        let result =
            bounded(self.limit(), async { Ok(link.client.query_one(query, &[]).await?.get(0)) }).await;
        self.settle(link, result).await
    }

    fn connected(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.acquired && !link.client.is_closed())
    }

    fn life(&self) -> Life {
        self.link.as_ref().filter(|link| link.acquired).map_or_else(Life::over, |link| link.pulse.life())
    }
}
