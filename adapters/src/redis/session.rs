//! One lane's connection: shards, marks, routes. Delivering stands in `deliver`.

use std::{collections::HashMap, sync::Arc};

use ::redis::{Value, cmd};
use async_trait::async_trait;
use bytes::Bytes;

use super::{
    Shared,
    connect::{Fault, Link, again},
    keys::Keys,
    reply::{self, Names},
    script::{Call, Script},
};
use crate::{
    lineage::{Lineage, applied, epoch_rise},
    sink::{
        Acquire, Batch, Life, Mark, Receipts, Resolution, RouteRow, Session, ShardId, ShardState, ShardStep,
        SinkError,
    },
};

/// Bytes of blocks in one page of marks.
const PAGE_BYTES: usize = 16 << 20;
/// And marks.
const PAGE_MARKS: usize = 4096;
/// Marks that one call of `expire_marks` deletes at most.
const EXPIRE_AT_ONCE: usize = 256;
/// And tombstones.
const BURY_AT_ONCE: usize = 5000;

/// See the module.
pub(super) struct RedisSession {
    pub(super) shared: Arc<Shared>,
    pub(super) route: String,
    pub(super) owner: String,
    pub(super) keys: Keys,
    /// Taken out while a call works on it: a call that is dropped half way, or fails in doubt, takes the connection with it.
    pub(super) link: Option<Link>,
    /// Of the last connection.
    identity: String,
    /// The highest sequence of each shard seen on this connection: one that is lower later shows a server that went back behind it.
    pub(super) seen: HashMap<ShardId, i64>,
    /// Epochs that our own `resolve` may have set without hearing of it.
    raised: HashMap<ShardId, i64>,
}

/// That a question could not be asked says nothing about the batch that it is about.
fn still_unknown(error: SinkError) -> SinkError {
    match error {
        SinkError::NotApplied { reason, .. } => SinkError::Unknown { reason },
        error => error,
    }
}

impl RedisSession {
    pub(super) fn new(shared: Arc<Shared>, route: &str, owner: &str) -> Self {
        let keys = Keys::new(route, &shared.config.prefix);
        Self {
            shared,
            route: route.to_owned(),
            owner: owner.to_owned(),
            keys,
            link: None,
            identity: String::new(),
            seen: HashMap::new(),
            raised: HashMap::new(),
        }
    }

    /// Takes the connection, or makes one, to a server that fits.
    async fn connect(&mut self) -> Result<Link, SinkError> {
        if let Some(link) = self.link.take().filter(Link::stands) {
            return Ok(link);
        }
        self.seen.clear();
        let (link, server) = self.shared.connect().await?;
        let identity = server.identity();
        if !self.identity.is_empty() && self.identity != identity {
            tracing::info!(
                route = %self.route,
                "the Redis server is another one, or another run of it: its sequences say whether it went back"
            );
        }
        self.identity = identity;
        server.fits(&self.shared.config)?;
        Ok(link)
    }

    /// The connection that shards were acquired on.
    pub(super) fn acquired(&mut self) -> Result<Link, SinkError> {
        match self.link.take() {
            Some(link) if link.acquired && link.stands() => Ok(link),
            _ => Err(again("no connection to Redis: acquire the shards first")),
        }
    }

    /// Runs a script that changes nothing, or is safe to repeat; what `read` makes of its reply. The connection is given up where the
    /// answer is in doubt, or the server must be looked at anew.
    async fn run<T>(
        &mut self,
        mut link: Link,
        script: Script,
        call: &Call,
        names: &Names<'_>,
        read: impl FnOnce(&Value) -> Result<T, Fault>,
    ) -> Result<T, SinkError> {
        let reply = match link.run(script, call, self.shared.config.timeout).await {
            Ok(reply) => reply,
            Err(fault) => {
                let keep = matches!(fault, Fault::Server(_));
                let error = fault.not_applied();
                if keep && stays(&error) {
                    self.link = Some(link);
                }
                return Err(error);
            }
        };
        if let Some(error) = refusal_of(&reply, names).map_err(Fault::not_applied)? {
            if stays(&error) {
                self.link = Some(link);
            }
            return Err(error);
        }
        let done = read(&reply).map_err(Fault::not_applied)?;
        self.link = Some(link);
        Ok(done)
    }

    /// Waits until the replicas have what was written, if that is asked for.
    pub(super) async fn replicated(&self, link: &mut Link) -> Result<(), String> {
        let wanted = self.shared.config.wait_replicas;
        if wanted == 0 {
            return Ok(());
        }
        let limit = self.shared.config.timeout;
        let mut wait = cmd("WAIT");
        wait.arg(wanted).arg(limit.as_millis().to_string());
        // The server answers within its limit; this is for one that does not.
        let asked = tokio::time::timeout(limit * 2, link.command(&wait)).await;
        match asked {
            Ok(Ok(Value::Int(have))) if have >= i64::from(wanted) => Ok(()),
            Ok(Ok(Value::Int(have))) => {
                Err(format!("{have} of {wanted} replicas have it after {} ms", limit.as_millis()))
            }
            Ok(Ok(_)) => Err("WAIT was answered by something else than a number".to_owned()),
            Ok(Err(fault)) => Err(match fault {
                Fault::Server(error) => reply::text_of(&error),
                Fault::Lost(reason) => reason,
            }),
            Err(_) => Err("WAIT was not answered".to_owned()),
        }
    }

    /// Takes shards over. With `held` only those that no other owner took since; the marks of those sequences come with them.
    async fn take(
        &mut self,
        shards: &[ShardId],
        how: &Acquire,
        held: Option<&[ShardStep]>,
    ) -> Result<(Vec<ShardState>, Vec<Option<Bytes>>), SinkError> {
        let mut link = self.connect().await?;
        let mut call = Call::default();
        call.key(self.keys.shards());
        let stale = match how {
            Acquire::Force => String::new(),
            Acquire::IfFree { stale_after_ms } => stale_after_ms.to_string(),
        };
        call.number(shards.len()).arg(self.owner.as_str()).arg(stale);
        let rise = epoch_rise();
        call.arg(if held.is_some() { "resolve" } else { "" }).number(rise).number(Lineage::MOST);
        for (index, shard) in shards.iter().enumerate() {
            let step = held.and_then(|steps| steps.get(index));
            let epoch = step.map_or(0, |step| step.epoch);
            let ours = self.raised.get(shard).copied().unwrap_or(epoch).max(epoch);
            call.key(self.keys.shard(shard)).key(self.keys.marks(shard));
            call.arg(&**shard).number(epoch).number(ours).number(step.map_or(0, |step| step.sequence));
            if held.is_some() {
                // What it may raise to without our hearing of it.
                self.raised.insert(shard.clone(), ours + rise);
            }
        }
        link.acquired = false;
        let names = |index: usize| shards.get(index).map_or("?", |shard| shard).to_owned();
        let taken = self
            .run(link, Script::Take, &call, &names, |reply| {
                let rows = reply::list(reply)?.iter().skip(1);
                let mut taken = (Vec::new(), Vec::new());
                for (row, shard) in rows.zip(shards) {
                    let row = reply::list(row)?;
                    taken.0.push(state(row, shard.clone())?);
                    let block = row.get(6).map(reply::maybe).transpose()?.flatten();
                    taken.1.push(block.map(Bytes::copy_from_slice));
                }
                Ok(taken)
            })
            .await?;
        // On no other connection than this one.
        let mut link = self.link.take().ok_or_else(|| again("the connection ended"))?;
        if taken.0.len() != shards.len() {
            return Err(again("the server took over fewer shards than asked; report this as a bug"));
        }
        // Also of what an earlier connection wrote: replicas get all in order.
        self.replicated(&mut link).await.map_err(again)?;
        link.acquired = true;
        self.link = Some(link);
        for state in &taken.0 {
            self.seen.insert(state.shard.clone(), state.sequence);
        }
        Ok(taken)
    }

    /// Runs `what` of the script for owners over shards, epochs and a value each.
    async fn owned<T>(
        &mut self,
        what: &str,
        owned: &[(ShardId, i64, String)],
        floor_ms: i64,
        read: impl FnOnce(&[Value]) -> Result<T, Fault>,
    ) -> Result<T, SinkError> {
        let link = self.acquired()?;
        let mut call = Call::default();
        call.key(self.keys.tombstones.as_str()).key(self.keys.tombstone_times.as_str());
        call.arg(what).number(owned.len()).arg(self.owner.as_str()).number(floor_ms).number(EXPIRE_AT_ONCE);
        for (shard, epoch, value) in owned {
            for key in self.keys.all_of(shard) {
                call.key(key);
            }
            let seen = self.seen.get(shard).copied().unwrap_or(i64::MIN);
            call.number(epoch).number(seen).arg(value.as_str());
        }
        call.arg(self.route.as_str()).number(BURY_AT_ONCE);
        let names = |index: usize| owned.get(index).map_or("?", |(shard, ..)| shard).to_owned();
        self.run(link, Script::Owned, &call, &names, |reply| read(reply::list(reply)?)).await
    }
}

/// Whether the connection may be used on after this error.
pub(super) fn stays(error: &SinkError) -> bool {
    match error {
        SinkError::Fenced { .. } | SinkError::Held { .. } | SinkError::Refused { .. } => true,
        SinkError::Unknown { .. } => false,
        // A server that went back or is no primary is looked at anew before any verdict.
        SinkError::NotApplied { reason, .. } => {
            let anew = ["the server went back", "READONLY", "MASTERDOWN", "LOADING"];
            !anew.iter().any(|word| reason.starts_with(word))
        }
    }
}

/// What a script says in place of its work.
pub(super) fn refusal_of(reply: &Value, names: &Names<'_>) -> Result<Option<SinkError>, Fault> {
    match reply {
        Value::Array(parts) if matches!(parts.first(), Some(Value::BulkString(_))) => {
            reply::refusal(parts, names)
        }
        _ => Ok(None),
    }
}

/// How a shard stands: epoch, sequence, position, watermark, floor, lineage.
fn state(row: &[Value], shard: ShardId) -> Result<ShardState, Fault> {
    Ok(ShardState {
        shard,
        epoch: reply::number(row, 0)?,
        sequence: reply::number(row, 1)?,
        position: reply::maybe_number(row, 2)?,
        watermark_ms: reply::number(row, 3)?,
        floor_ms: reply::number(row, 4)?,
        lineage: lineage(row.get(5))?,
    })
}

/// None is kept of a shard that was last taken over by an earlier build.
fn lineage(cell: Option<&Value>) -> Result<Lineage, Fault> {
    let text = cell.map(reply::maybe).transpose()?.flatten().unwrap_or_default();
    Ok(Lineage::read(&String::from_utf8_lossy(text)))
}

/// With an empty value each.
fn bare(owned: &[(ShardId, i64)]) -> Vec<(ShardId, i64, String)> {
    owned.iter().map(|(shard, epoch)| (shard.clone(), *epoch, String::new())).collect()
}

/// How many went.
fn gone(parts: &[Value]) -> Result<u64, Fault> {
    reply::number(parts, 1).map(i64::unsigned_abs)
}

#[async_trait]
impl Session for RedisSession {
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        let link = self.connect().await?;
        let mut call = Call::default();
        call.key(self.keys.route()).arg(proposed.route_id.as_slice()).number(proposed.key_spec_id);
        call.number(proposed.algorithm).arg(proposed.secret.as_slice());
        self.run(link, Script::Route, &call, &|_| String::new(), |reply| {
            let row = reply::list(reply::list(reply)?.get(1).unwrap_or(&Value::Nil))?;
            Ok(RouteRow {
                route_id: reply::bytes(row, 0)?.to_vec(),
                key_spec_id: reply::number(row, 1)?,
                algorithm: reply::number(row, 2)?.try_into().unwrap_or(i16::MAX),
                secret: reply::bytes(row, 3)?.to_vec(),
            })
        })
        .await
    }

    async fn acquire(&mut self, shards: &[ShardId], how: Acquire) -> Result<Vec<ShardState>, SinkError> {
        self.take(shards, &how, None).await.map(|(states, _)| states)
    }

    async fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        let link = self.connect().await?;
        let mut call = Call::default();
        call.key(self.keys.shards()).arg(self.keys.shard_prefix()).arg(prefix);
        let mut states = self
            .run(link, Script::Shards, &call, &|_| String::new(), |reply| {
                let row = |row: &Value| {
                    let row = reply::list(row)?;
                    state(row, reply::text(row, 6)?.into())
                };
                reply::list(reply)?.iter().map(row).collect::<Result<Vec<_>, _>>()
            })
            .await?;
        states.sort_by(|a, b| a.shard.cmp(&b.shard));
        Ok(states)
    }

    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        self.deliver_batch(batch).await
    }

    async fn resolve(&mut self, steps: &[ShardStep]) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        // The old connection may still have the batch on its way: it must neither be used nor waited for.
        self.link = None;
        let shards: Vec<ShardId> = steps.iter().map(|step| step.shard.clone()).collect();
        let (states, blocks) =
            self.take(&shards, &Acquire::Force, Some(steps)).await.map_err(still_unknown)?;
        self.raised.clear();
        if !applied(steps, &states)? {
            return Ok((Resolution::NotApplied, states));
        }
        let mark = |((index, step), block): ((usize, &ShardStep), Option<Bytes>)| {
            Some((index, Mark { sequence: step.sequence, block: block? }))
        };
        let marks = steps.iter().enumerate().zip(blocks).filter_map(mark).collect();
        Ok((Resolution::Applied(marks), states))
    }

    async fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        let link = self.acquired()?;
        let [_, marks, by_sequence, _] = self.keys.all_of(shard);
        let mut call = Call::default();
        call.key(marks).key(by_sequence).number(sequence).number(PAGE_BYTES).number(PAGE_MARKS);
        self.run(link, Script::Marks, &call, &|_| String::new(), |reply| {
            let mark = |pair: &[Value]| {
                Ok(Mark {
                    sequence: reply::number(pair, 0)?,
                    block: Bytes::copy_from_slice(reply::bytes(pair, 1)?),
                })
            };
            reply::list(reply)?.chunks(2).map(mark).collect()
        })
        .await
    }

    async fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError> {
        self.owned("expire", &bare(owned), floor_ms, gone).await
    }

    async fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        self.owned("heartbeat", &bare(owned), 0, gone).await.map(drop)
    }

    async fn forget_all(&mut self, owned: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        self.owned("forget", &bare(owned), 0, gone).await
    }

    async fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError> {
        let counts: Vec<_> =
            counts.iter().map(|(shard, epoch, count)| (shard.clone(), *epoch, count.to_string())).collect();
        let read = |parts: &[Value]| (1..=counts.len()).map(|at| reply::maybe_number(parts, at)).collect();
        match counts.is_empty() {
            true => Ok(Vec::new()),
            false => self.owned("partitions", &counts, 0, read).await,
        }
    }

    async fn keep_sources(
        &mut self,
        sources: &[(ShardId, i64, String)],
        renew: bool,
    ) -> Result<Vec<Option<String>>, SinkError> {
        let read = |parts: &[Value]| {
            let source = |part: &Value| {
                Ok(reply::maybe(part)?.map(|bytes| String::from_utf8_lossy(bytes).into_owned()))
            };
            parts.iter().skip(1).map(source).collect()
        };
        match sources.is_empty() {
            true => Ok(Vec::new()),
            false => self.owned(if renew { "renew" } else { "source" }, sources, 0, read).await,
        }
    }

    async fn now_ms(&mut self) -> Result<i64, SinkError> {
        let mut link = self.connect().await?;
        let asked = tokio::time::timeout(self.shared.config.timeout, link.command(&cmd("TIME"))).await;
        let time = asked.map_err(|_| again("Redis did not say the time"))?.map_err(Fault::not_applied)?;
        let parts = reply::list(&time).map_err(Fault::not_applied)?;
        let part = |at| reply::number(parts, at).map_err(Fault::not_applied);
        let now = part(0)?.saturating_mul(1000).saturating_add(part(1)? / 1000);
        self.link = Some(link);
        Ok(now)
    }

    fn connected(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.acquired && link.stands())
    }

    fn life(&self) -> Life {
        self.link.as_ref().filter(|link| link.acquired).map_or_else(Life::over, Link::life)
    }
}
