//! Taking shards over, and ending a frozen owner that holds them (P3, P5).

use std::{collections::HashMap, future::Future};

use tokio_postgres::{
    Client, Row as Answer,
    types::{ToSql, Type},
};

use super::{
    connect::application_prefix,
    params,
    session::{Fault, Link, PostgresSession, again, bounded, late, not_applied, roll_back},
};
use crate::{
    lineage::{Lineage, epoch_rise},
    sink::{Acquire, ShardId, ShardState, SinkError},
};

/// How often `acquire` ends blockers before it gives up.
const ACQUIRE_ROUNDS: u32 = 5;

impl PostgresSession {
    /// Raises the epochs of `shards` on `link`, ending whoever of our route blocks it for longer than the lock time-out.
    /// With `held` epochs, only from those: whoever has raised one since is not disturbed.
    async fn take_over(
        &mut self,
        link: &mut Link,
        shards: &[ShardId],
        how: &Acquire,
        held: Option<&[i64]>,
    ) -> Result<Vec<ShardState>, Fault> {
        let client = &link.client;
        if let Some(held) = held {
            // Before anything is locked: the new owner's connection must not be ended for our sake.
            self.still_held(client, shards, held).await?;
        }
        if let Acquire::IfFree { stale_after_ms } = how
            && let Some(held) = self.held(client, shards, *stale_after_ms).await?
        {
            // Nor a living owner's, whose batch may have the row locked for long.
            return Err(Fault::Sink(held));
        }
        client.batch_execute(&self.begin()).await?;
        let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).await?.get(0);
        let free = match how {
            Acquire::Force => String::new(),
            Acquire::IfFree { .. } => " WHERE s.owner = excluded.owner \
                 OR s.heartbeat <= excluded.heartbeat - $4 * interval '1 millisecond'"
                .to_owned(),
        };
        let text = format!(
            "INSERT INTO {} AS s (route, shard, epoch, sequence, sequence_epoch, position, watermark_ms, floor_ms, owner, heartbeat) \
             SELECT $1, u.shard, $5, 0, 0, NULL, {min}, {min}, $3, clock_timestamp() + 0 * $4 * interval '1 millisecond' \
             FROM unnest($2) AS u(shard) ORDER BY u.shard COLLATE \"C\" \
             ON CONFLICT (route, shard) DO UPDATE SET epoch = s.epoch + excluded.epoch, owner = excluded.owner, heartbeat = excluded.heartbeat{free} \
             RETURNING {STATE}",
            self.shared.tables.shards,
            min = "'-9223372036854775808'::bigint",
        );
        let stale_after = match how {
            Acquire::Force => 0,
            Acquire::IfFree { stale_after_ms } => *stale_after_ms,
        };
        let names = params::texts(shards.iter().map(|shard| &**shard));
        let rise = epoch_rise();
        let (route, owner, stale_after, by) = (
            params::text(&self.route),
            params::text(&self.owner),
            params::integer(stale_after),
            params::integer(rise),
        );
        let parameters: [(&(dyn ToSql + Sync), Type); 5] = [
            (&route, Type::TEXT),
            (&names, Type::TEXT_ARRAY),
            (&owner, Type::TEXT),
            (&stale_after, Type::INT8),
            (&by, Type::INT8),
        ];
        let raising = client.query_typed(&text, &parameters);
        let rows = self.ending_blockers(pid, raising).await?;
        if rows.len() < shards.len() {
            client.batch_execute("ROLLBACK").await?;
            let held = self.held(client, shards, stale_after_of(how)).await?;
            return Err(Fault::Sink(
                held.unwrap_or_else(|| again("a shard was held a moment ago and is free now")),
            ));
        }
        let mut states: HashMap<String, ShardState> =
            rows.iter().map(state).map(|state| (state.shard.to_string(), state)).collect();
        if let Some(held) = held {
            let lost = shards.iter().zip(held).any(|(shard, held)| {
                states.get(&**shard).is_some_and(|state| state.epoch - rise > self.ours(shard, *held))
            });
            if lost {
                client.batch_execute("ROLLBACK").await?;
                self.still_held(client, shards, held).await?;
                return Err(Fault::Sink(again("the shard rows changed while they were looked at")));
            }
            self.raised.extend(states.values().map(|state| (state.shard.clone(), state.epoch)));
        }
        for state in states.values_mut() {
            state.lineage.taken(state.sequence, state.epoch);
        }
        self.keep_lineages(client, states.values()).await?;
        client.batch_execute("COMMIT").await?;
        link.acquired = true;
        shards
            .iter()
            .map(|shard| {
                states
                    .remove(&**shard)
                    .ok_or_else(|| Fault::Sink(again(format!("shard {shard} was asked for twice"))))
            })
            .collect()
    }

    /// In the transaction that has raised the epochs.
    async fn keep_lineages(
        &self,
        client: &Client,
        states: impl Iterator<Item = &ShardState>,
    ) -> Result<(), tokio_postgres::Error> {
        let (shards, lineages): (Vec<&str>, Vec<String>) =
            states.map(|state| (&*state.shard, state.lineage.to_string())).unzip();
        let update = format!(
            "UPDATE {} AS s SET lineage = l.lineage FROM unnest($2::text[], $3::text[]) AS l(shard, lineage) \
             WHERE s.route = $1 AND s.shard = l.shard",
            self.shared.tables.shards
        );
        client.execute(&update, &[&self.route, &shards, &lineages]).await.map(drop)
    }

    /// Acquires on the connection there is, or a new one; `held` as in [`Self::take_over`].
    pub(super) async fn acquire_from(
        &mut self,
        shards: &[ShardId],
        how: &Acquire,
        held: Option<&[i64]>,
    ) -> Result<Vec<ShardState>, SinkError> {
        let mut link = self.connect().await?;
        // Bounded inside, by rounds of the lock time-out and by the statement time-out.
        let limit = self.limit()
            + self.shared.config.lock_timeout * (ACQUIRE_ROUNDS + 1)
            + self.shared.config.connect_timeout;
        match bounded(limit, self.take_over(&mut link, shards, how, held)).await {
            Ok(states) => {
                self.link = Some(link);
                Ok(states)
            }
            Err(Fault::Sink(error)) => {
                if matches!(error, SinkError::Held { .. } | SinkError::Fenced { .. }) {
                    self.link = roll_back(link).await;
                }
                Err(error)
            }
            // An epoch that was raised without our knowing harms nobody: the next acquire raises it again.
            Err(Fault::Database(error)) => Err(not_applied(&error)),
            Err(Fault::Late(limit)) => Err(again(late(limit))),
        }
    }

    /// Waits for `raising`; each time the lock time-out passes, ends the route's connections that block backend `pid` (P5).
    async fn ending_blockers(
        &self,
        pid: i32,
        raising: impl Future<Output = Result<Vec<Answer>, tokio_postgres::Error>>,
    ) -> Result<Vec<Answer>, Fault> {
        let patience = self.shared.config.lock_timeout;
        let mut raising = std::pin::pin!(raising);
        for _ in 0..ACQUIRE_ROUNDS {
            if let Ok(rows) = tokio::time::timeout(patience, &mut raising).await {
                return Ok(rows?);
            }
            let others = self.end_blockers(pid).await?;
            if let Some(others) = others {
                tracing::warn!(route = %self.route, blockers = %others, "the shards are locked by connections that are not this route's");
            }
        }
        match tokio::time::timeout(patience, &mut raising).await {
            Ok(rows) => Ok(rows?),
            Err(_) => Err(Fault::Sink(again(
                "the shard rows are locked by a connection that is not this route's; see pg_stat_activity and pg_blocking_pids",
            ))),
        }
    }

    /// Answers with the blockers that are not ours to end.
    async fn end_blockers(&self, pid: i32) -> Result<Option<String>, Fault> {
        let (other, _pulse) = self.shared.address.connect("oncegate/take-over").await?;
        let query = "SELECT b.pid, starts_with(a.application_name, $2), \
                     CASE WHEN starts_with(a.application_name, $2) THEN pg_terminate_backend(b.pid) ELSE false END \
                     FROM unnest(pg_blocking_pids($1)) AS b(pid) JOIN pg_stat_activity a ON a.pid = b.pid";
        let rows = other.query(query, &[&pid, &application_prefix(&self.route)]).await?;
        let mut others = Vec::new();
        for row in rows {
            let blocker: i32 = row.get(0);
            if row.get(1) {
                tracing::warn!(route = %self.route, pid = blocker, "ended a connection of an earlier owner that held the shards");
            } else {
                others.push(blocker.to_string());
            }
        }
        Ok((!others.is_empty()).then(|| others.join(", ")))
    }

    /// Who else holds one of `shards` and was heard since.
    async fn held(
        &self,
        client: &Client,
        shards: &[ShardId],
        stale_after_ms: i64,
    ) -> Result<Option<SinkError>, Fault> {
        let query = format!(
            "SELECT shard, owner, (extract(epoch FROM clock_timestamp() - heartbeat) * 1000)::bigint FROM {} \
             WHERE route = $1 AND shard = ANY($2) AND owner <> $3 ORDER BY heartbeat DESC LIMIT 1",
            self.shared.tables.shards
        );
        let names: Vec<&str> = shards.iter().map(|shard| &**shard).collect();
        let row = client.query_opt(&query, &[&self.route, &names, &self.owner]).await?;
        let young = row.filter(|row| row.get::<_, i64>(2) < stale_after_ms);
        Ok(young.map(|row| SinkError::Held { shard: row.get(0), owner: row.get(1), seen_ms: row.get(2) }))
    }

    /// The highest epoch of `shard` that this session knows to be its own.
    fn ours(&self, shard: &ShardId, held: i64) -> i64 {
        self.raised.get(shard).copied().unwrap_or(held).max(held)
    }

    /// Fails with `Fenced` if another owner has taken one of `shards` since this session held it under the epoch given.
    async fn still_held(&self, client: &Client, shards: &[ShardId], held: &[i64]) -> Result<(), Fault> {
        let query =
            format!("SELECT owner, epoch FROM {} WHERE route = $1 AND shard = $2", self.shared.tables.shards);
        for (shard, held) in shards.iter().zip(held) {
            let row = client.query_opt(&query, &[&self.route, &&**shard]).await?;
            if let Some(row) = row.filter(|row| row.get::<_, i64>(1) > self.ours(shard, *held)) {
                return Err(Fault::Sink(SinkError::Fenced {
                    shard: shard.to_string(),
                    owner: row.get(0),
                    epoch: row.get(1),
                }));
            }
        }
        Ok(())
    }
}

fn stale_after_of(how: &Acquire) -> i64 {
    match how {
        Acquire::Force => 0,
        Acquire::IfFree { stale_after_ms } => *stale_after_ms,
    }
}

/// The columns of a [`ShardState`], of a shard row `s`.
pub(super) const STATE: &str =
    "s.shard, s.epoch, s.sequence, s.position, s.watermark_ms, s.floor_ms, s.lineage";

pub(super) fn state(row: &Answer) -> ShardState {
    ShardState {
        shard: row.get::<_, &str>(0).into(),
        epoch: row.get(1),
        sequence: row.get(2),
        position: row.get(3),
        watermark_ms: row.get(4),
        floor_ms: row.get(5),
        lineage: row.get::<_, Option<&str>>(6).map(Lineage::read).unwrap_or_default(),
    }
}
