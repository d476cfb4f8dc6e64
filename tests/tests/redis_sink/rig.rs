//! One server of a test's own, and sessions on it.

use std::{sync::Arc, time::Duration};

use adapters::{
    redis::{RedisConfig, RedisSink},
    sink::{
        Acquire, Encode, Mode, OnRefused, Receipts, RowOutcome, Session, ShardId, ShardState, ShardStep,
        Sink, SinkError,
    },
};
use oncegate_tests::{
    conformance::{Encoded, Parcel, ROUTE, Record, SHARD, Shape, deliver, redis::RedisPlace},
    servers::Redis,
};

/// A server that syncs before each reply, whose scripts count as long after 100 ms.
pub(crate) fn server() -> Redis {
    Redis::start("busy-reply-threshold 100")
}

/// As the cases of all sinks have it, on database 1 of `redis`.
pub(crate) async fn config(redis: &Redis, mode: Mode) -> RedisConfig {
    let config = RedisPlace::new().await.config(&Shape::new(mode));
    RedisConfig { url: redis.url(1), ..config }
}

/// A session that owns [`SHARD`].
pub(crate) struct Owner {
    pub(crate) session: Box<dyn Session>,
    pub(crate) encoder: Arc<dyn Encode>,
    pub(crate) state: ShardState,
}

impl Owner {
    pub(crate) async fn new(config: RedisConfig) -> Self {
        Self::named(config, "first").await
    }

    pub(crate) async fn named(config: RedisConfig, name: &str) -> Self {
        Self::of_route(config, ROUTE, name).await
    }

    pub(crate) async fn of_route(config: RedisConfig, route: &str, name: &str) -> Self {
        let sink = RedisSink::new(config).expect("a good configuration");
        let encoder = sink.probe().await.unwrap_or_else(|misfits| panic!("{misfits:?}"));
        let session = sink.session(route, name);
        let state = ShardState::unowned(&SHARD.into());
        let mut owner = Self { session, encoder, state };
        owner.acquire().await.expect("the shard can be had");
        owner
    }

    pub(crate) async fn acquire(&mut self) -> Result<(), SinkError> {
        let mut states = self.session.acquire(&[SHARD.into()], Acquire::Force).await?;
        self.state = states.remove(0);
        Ok(())
    }

    /// The next step.
    pub(crate) fn step(&self) -> ShardStep {
        let sequence = self.state.sequence + 1;
        let watermark_ms = sequence * 100;
        ShardStep { shard: SHARD.into(), epoch: self.state.epoch, sequence, position: None, watermark_ms }
    }

    /// One try of the next step.
    pub(crate) async fn attempt(&mut self, records: &[Record]) -> Result<Vec<RowOutcome>, SinkError> {
        let steps = [self.step()];
        let rows = Encoded::of(&*self.encoder, records);
        let parcel = Parcel {
            rows: &rows,
            steps: &steps,
            dead_letters: &[],
            on_refused: OnRefused::DeadLetter,
            known_new: false,
            marks: true,
        };
        let Receipts { rows } = deliver(&mut *self.session, &parcel).await?;
        self.state.sequence += 1;
        Ok(rows)
    }

    /// The shard and its epoch.
    pub(crate) fn owned(&self) -> Vec<(ShardId, i64)> {
        vec![(SHARD.into(), self.state.epoch)]
    }
}

/// What the server holds: all keys of database 1 but what changes by looking at it.
pub(crate) fn everything(redis: &Redis) -> Vec<String> {
    let mut connection = redis.connect(1);
    let mut keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(&mut connection).expect("keys");
    keys.sort();
    let mut all = Vec::new();
    for key in keys {
        let name = String::from_utf8_lossy(&key).into_owned();
        if name.contains("}:shard:") {
            let row: std::collections::BTreeMap<String, String> =
                redis::cmd("HGETALL").arg(&key).query(&mut connection).expect("a shard");
            let kept: Vec<_> = row
                .into_iter()
                .filter(|(field, _)| !["epoch", "heartbeat_ms", "lineage"].contains(&field.as_str()))
                .collect();
            all.push(format!("{name} {kept:?}"));
            continue;
        }
        let dump: redis::Value = redis::cmd("DUMP").arg(&key).query(&mut connection).expect("a key");
        all.push(format!("{name} {dump:?}"));
    }
    all
}

/// Shorter than the servers' troubles.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(700);
