//! One connection to the sink in memory.

use std::{collections::HashMap, sync::Arc, time::Duration};

use adapters::sink::{
    Acquire, Batch, Life, Mark, MarkBlock, Pulse, Receipts, Resolution, RouteRow, RowOutcome, Session,
    ShardId, ShardState, ShardStep, SinkError,
};
use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use crate::clock::{simulated, wall_ms};

use super::{
    encode::RowValue,
    faults::{Call, CallFault, DeliverFault},
    invariant::Invariant,
    trace::{note, told},
    world::{Ghost, OwnedBatch, World},
};

/// Marks in a page: few, so that paging is met.
const PAGE: usize = 2;

pub(super) struct FakeSession {
    world: Arc<Mutex<World>>,
    owner: String,
    connection: Option<u64>,
    /// Epochs that our own `resolve` may have set without hearing of it.
    raised: HashMap<ShardId, i64>,
    /// A batch of which nobody knows whether it is in.
    unknown: Option<Vec<ShardStep>>,
}

fn again(reason: &str) -> SinkError {
    SinkError::NotApplied { reason: reason.into(), retry: true }
}

fn unknown(reason: &str) -> SinkError {
    SinkError::Unknown { reason: reason.into() }
}

/// A delivery whose future is dropped half way may go on in the backend.
struct Sent {
    world: Arc<Mutex<World>>,
    ghost: Option<Ghost>,
}

impl Drop for Sent {
    fn drop(&mut self) {
        if let Some(ghost) = self.ghost.take() {
            let mut world = self.world.lock();
            let rate = world.faults.rates.ghost;
            if world.faults.chance(rate) {
                world.ghosts.push(ghost);
            }
        }
    }
}

impl FakeSession {
    pub(super) fn new(world: Arc<Mutex<World>>, owner: &str) -> Self {
        Self { world, owner: owner.into(), connection: None, raised: HashMap::new(), unknown: None }
    }

    /// A stopped process does nothing until it goes on.
    async fn alive(&self) {
        while self.world.lock().frozen.contains(&self.owner) {
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Rule 3: of an unknown batch it is asked before anything else is done with its shards.
    fn asked_first(&mut self, shards: &[&ShardId], doing: &str) {
        if let Some(steps) = &self.unknown
            && steps.iter().any(|step| shards.contains(&&step.shard))
        {
            let what = format!("{} {doing} while it is not known whether {} is in", self.owner, told(steps));
            self.unknown = None;
            self.world.lock().judge.falls(Invariant::UnknownNeverRecut, what);
        }
    }

    fn lose(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.world.lock().connections.remove(&connection);
        }
    }

    fn connect(&mut self) -> Result<(), SinkError> {
        if self.connected() {
            return Ok(());
        }
        let mut world = self.world.lock();
        if world.down_until.is_some_and(|until| Instant::now() < until) {
            return Err(again("the sink is not reachable"));
        }
        world.next_connection += 1;
        let connection = world.next_connection;
        world.connections.insert(connection, Pulse::begin());
        self.connection = Some(connection);
        Ok(())
    }

    /// Waits as long as the call takes; an error if it fails before it does anything.
    async fn begin(&mut self, call: Call) -> Result<CallFault, SinkError> {
        simulated::turns();
        self.alive().await;
        let (fault, delay) = self.world.lock().faults.call(call);
        if delay > 0 {
            sleep(Duration::from_millis(delay)).await;
            self.alive().await;
        }
        if fault == CallFault::Before {
            self.lose();
            return Err(again("the connection broke"));
        }
        self.world.lock().run_ghosts();
        Ok(fault)
    }

    fn end<T>(&mut self, fault: CallFault, done: T) -> Result<T, SinkError> {
        if fault == CallFault::After {
            self.lose();
            return Err(again("the connection broke after the call was sent"));
        }
        Ok(done)
    }

    fn need_connection(&mut self) -> Result<(), SinkError> {
        if self.connected() { Ok(()) } else { Err(again("there is no connection: acquire first")) }
    }

    fn held(&self, shards: &[ShardId], stale_after_ms: i64) -> Option<SinkError> {
        let world = self.world.lock();
        shards.iter().find_map(|shard| {
            let row = world.db.shards.get(&**shard)?;
            let seen_ms = row.heartbeat.elapsed().as_millis() as i64;
            (row.owner != self.owner && seen_ms < stale_after_ms).then(|| SinkError::Held {
                shard: shard.to_string(),
                owner: row.owner.clone(),
                seen_ms,
            })
        })
    }

    /// Takes the steps' shards, or leaves them to a newer owner, as the sink does.
    fn take_for_resolve(&mut self, steps: &[ShardStep]) -> Result<Vec<ShardState>, SinkError> {
        let mut world = self.world.lock();
        let shards: Vec<&str> = steps.iter().map(|step| &*step.shard).collect();
        world.meet_ghosts(&shards);
        for step in steps {
            let ours = self.raised.get(&step.shard).copied().unwrap_or(step.epoch).max(step.epoch);
            if !world.resolve_by_force
                && let Some(row) = world.db.shards.get(&*step.shard)
                && row.epoch > ours
            {
                return Err(SinkError::Fenced {
                    shard: step.shard.to_string(),
                    owner: row.owner.clone(),
                    epoch: row.epoch,
                });
            }
        }
        if planted!(LookInsteadOfAcquire) {
            let look = |step: &ShardStep| Some(world.db.shards.get(&*step.shard)?.state(&step.shard));
            return Ok(steps.iter().filter_map(look).collect());
        }
        let mut states = Vec::new();
        for step in steps {
            let state = world.raise(&step.shard, &self.owner, step.epoch);
            self.raised.insert(step.shard.clone(), state.epoch);
            states.push(state);
        }
        Ok(states)
    }

    async fn attempt(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        self.alive().await;
        self.need_connection()?;
        let owned = Arc::new(OwnedBatch::of(batch));
        let (fault, before, after) = {
            let mut world = self.world.lock();
            world.attempts.push(owned.clone());
            world.faults.deliver()
        };
        // As the rows would fare now: what a ghost of this attempt would leave behind.
        let foretold = {
            let world = self.world.lock();
            world.db.foretell(world.mode, world.keyed, &owned).ok()
        };
        let ghost = |after_ms: u64, executed: bool| {
            let outcomes = foretold.clone()?;
            let marks: Vec<MarkBlock> = (batch.seal)(&outcomes);
            let due = Instant::now() + Duration::from_millis(after_ms);
            Some(Ghost { batch: owned.clone(), outcomes, marks, due, executed })
        };
        let abandoned = ghost(before + after, before > after);
        let mut sent = Sent { world: self.world.clone(), ghost: abandoned };
        if before > 0 {
            sleep(Duration::from_millis(before)).await;
        }
        self.alive().await;
        sent.ghost = None;
        self.world.lock().run_ghosts();
        if !self.connected() {
            // The connection was cut while the batch was on its way: nobody knows.
            return Err(unknown("the connection ended"));
        }
        let applied: Result<Vec<RowOutcome>, SinkError> = match fault {
            DeliverFault::NotAppliedKept => return Err(again("a deadlock")),
            DeliverFault::Final => {
                return Err(SinkError::NotApplied { reason: "no such column".into(), retry: false });
            }
            DeliverFault::NotAppliedLost => {
                self.lose();
                return Err(again("the connection could not be used"));
            }
            DeliverFault::UnknownLost => {
                self.lose();
                return Err(unknown("the connection broke"));
            }
            DeliverFault::UnknownLater { after_ms, executed } => {
                let ghost = ghost(after_ms, executed);
                self.world.lock().ghosts.extend(ghost);
                self.lose();
                return Err(unknown("the connection broke during the commit"));
            }
            DeliverFault::Silent => {
                (batch.seal)(&[]);
                let nothing = OwnedBatch { rows: Vec::new(), letters: Vec::new(), ..(*owned).clone() };
                self.world.lock().commit(&nothing, |_| Vec::new()).map(|_| Vec::new())
            }
            DeliverFault::None | DeliverFault::UnknownApplied => {
                self.world.lock().commit(&owned, |outcomes| (batch.seal)(outcomes))
            }
        };
        if let Err(SinkError::Unknown { .. }) = applied {
            self.lose();
        }
        let rows = applied?;
        if fault == DeliverFault::UnknownApplied {
            self.lose();
            return Err(unknown("the connection broke after the commit"));
        }
        // A connection that ends meanwhile may have carried the answer over before.
        let answered = after > 0 && self.world.lock().faults.chance(500);
        self.world.lock().answering += 1;
        if after > 0 {
            sleep(Duration::from_millis(after)).await;
        }
        self.world.lock().answering -= 1;
        self.alive().await;
        if !answered && !self.connected() {
            return Err(unknown("the connection ended before the answer"));
        }
        Ok(Receipts { rows })
    }

    fn owned<T>(
        &mut self,
        owned: &[(ShardId, i64)],
        each: impl Fn(&mut World, &str) -> T,
    ) -> Result<Vec<T>, SinkError> {
        let mut world = self.world.lock();
        for (shard, epoch) in owned {
            match world.db.shards.get(&**shard) {
                Some(row) if row.epoch == *epoch => {}
                Some(row) if row.epoch > *epoch => {
                    return Err(SinkError::Fenced {
                        shard: shard.to_string(),
                        owner: row.owner.clone(),
                        epoch: row.epoch,
                    });
                }
                _ => {
                    drop(world);
                    self.lose();
                    return Err(again("the sink went back"));
                }
            }
        }
        Ok(owned.iter().map(|(shard, _)| each(&mut world, shard)).collect())
    }
}

#[async_trait]
impl Session for FakeSession {
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        let fault = self.begin(Call::Look).await?;
        let row = self.world.lock().db.route.get_or_insert_with(|| proposed.clone()).clone();
        self.end(fault, row)
    }

    async fn acquire(&mut self, shards: &[ShardId], how: Acquire) -> Result<Vec<ShardState>, SinkError> {
        self.asked_first(&shards.iter().collect::<Vec<_>>(), "acquires");
        let fault = self.begin(Call::Acquire).await?;
        self.connect()?;
        if let Acquire::IfFree { stale_after_ms } = how
            && let Some(held) = self.held(shards, stale_after_ms)
        {
            return Err(held);
        }
        let states = {
            let mut world = self.world.lock();
            let names: Vec<&str> = shards.iter().map(|shard| &**shard).collect();
            world.meet_ghosts(&names);
            shards.iter().map(|shard| world.raise(shard, &self.owner, 0)).collect::<Vec<_>>()
        };
        for state in &states {
            note(|| {
                let ShardState { shard, epoch, sequence, position, .. } = state;
                format!("{} owns {shard} e{epoch} s{sequence} @{position:?}", self.owner)
            });
        }
        self.end(fault, states)
    }

    async fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        let fault = self.begin(Call::Look).await?;
        let all = self
            .world
            .lock()
            .db
            .shards
            .iter()
            .filter(|(shard, _)| shard.starts_with(prefix))
            .map(|(shard, row)| row.state(shard))
            .collect();
        self.end(fault, all)
    }

    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        self.asked_first(&batch.steps.iter().map(|step| &step.shard).collect::<Vec<_>>(), "delivers");
        let rows = || batch.rows.iter().map(|row| RowValue::parse(row.bytes).id).collect::<Vec<_>>();
        note(|| format!("{} -> sink: {}: {}", self.owner, told(batch.steps), rows().join(" ")));
        let done = self.attempt(batch).await;
        if let Err(SinkError::Unknown { .. }) = done {
            self.unknown = Some(batch.steps.to_vec());
        }
        note(|| match &done {
            Ok(_) => format!("{} <- sink: {}: applied", self.owner, told(batch.steps)),
            Err(fault) => format!("{} <- sink: {}: {fault}", self.owner, told(batch.steps)),
        });
        done
    }

    async fn resolve(&mut self, steps: &[ShardStep]) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        self.lose();
        let fault = self.begin(Call::Resolve).await?;
        self.connect()?;
        let states = match self.take_for_resolve(steps) {
            // Of a shard that is another's now nothing of it can come any more: it is asked about the rest.
            Err(SinkError::Fenced { shard, owner, epoch }) => {
                let rest = self.unknown.iter_mut().flatten();
                let rest = rest.filter(|step| *step.shard != *shard).map(|step| step.clone()).collect();
                self.unknown = Some(rest);
                return Err(SinkError::Fenced { shard, owner, epoch });
            }
            taken => taken?,
        };
        self.end(fault, ())?;
        self.raised.clear();
        self.unknown = None;
        let world = self.world.lock();
        let mut marks = Vec::new();
        let mut applied = 0;
        for (at, (step, state)) in steps.iter().zip(&states).enumerate() {
            let mark = world
                .db
                .marks
                .get(&(step.shard.to_string(), step.sequence))
                .filter(|mark| mark.epoch == step.epoch);
            marks.extend(mark.map(|mark| (at, Mark { sequence: step.sequence, block: mark.block.clone() })));
            let writer = world.db.shards.get(&*step.shard).map(|row| row.writer);
            let last = state.sequence == step.sequence && writer == Some(step.epoch);
            applied += usize::from(last || mark.is_some());
        }
        note(|| format!("{} asks the sink about {}: {applied} of its steps are in", self.owner, told(steps)));
        let resolution = if applied == 0 { Resolution::NotApplied } else { Resolution::Applied(marks) };
        Ok((resolution, states))
    }

    async fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        let fault = self.begin(Call::Look).await?;
        self.need_connection()?;
        let page_ms = self.world.lock().faults.page_ms;
        if page_ms > 0 {
            sleep(Duration::from_millis(page_ms)).await;
        }
        let page = self
            .world
            .lock()
            .db
            .marks
            .iter()
            .filter(|((of, at), _)| **of == **shard && *at > sequence)
            .map(|((_, at), mark)| Mark { sequence: *at, block: mark.block.clone() })
            .take(PAGE)
            .collect();
        self.end(fault, page)
    }

    async fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError> {
        let fault = self.begin(Call::Keep).await?;
        self.need_connection()?;
        let gone = self.owned(owned, |world, shard| {
            let before = world.db.marks.len();
            let mut room = world.expire_most;
            world.db.marks.retain(|(of, _), mark| {
                let over = of == shard && mark.max_ms < floor_ms && room > 0;
                room -= usize::from(over);
                !over
            });
            if let Some(row) = world.db.shards.get_mut(shard).filter(|_| !planted!(FloorNotRaised)) {
                row.floor_ms = row.floor_ms.max(floor_ms);
            }
            (before - world.db.marks.len()) as u64
        })?;
        note(|| format!("{}: marks below {floor_ms} expire: {gone:?}", self.owner));
        self.end(fault, gone.into_iter().sum())
    }

    async fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        let fault = self.begin(Call::Keep).await?;
        self.need_connection()?;
        self.owned(owned, |world, shard| {
            if let Some(row) = world.db.shards.get_mut(shard) {
                row.heartbeat = Instant::now();
            }
            world.heartbeats += 1;
        })?;
        self.end(fault, ())
    }

    async fn forget_all(&mut self, owned: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        let fault = self.begin(Call::Keep).await?;
        self.need_connection()?;
        let gone = self.owned(owned, |world, shard| {
            let before = world.db.marks.len();
            world.db.marks.retain(|(of, _), _| of != shard);
            if let Some(row) = world.db.shards.get_mut(shard) {
                (row.watermark_ms, row.floor_ms) = (i64::MIN, i64::MIN);
            }
            (before - world.db.marks.len()) as u64
        })?;
        self.end(fault, gone.into_iter().sum())
    }

    async fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError> {
        let fault = self.begin(Call::Keep).await?;
        self.need_connection()?;
        let keep = |(shard, epoch, count): &(ShardId, i64, i64)| {
            let mut world = self.world.lock();
            let row = world.db.shards.get_mut(&**shard).filter(|row| row.epoch == *epoch)?;
            row.partitions.replace(*count)
        };
        let before = counts.iter().map(keep).collect();
        self.end(fault, before)
    }

    async fn keep_sources(
        &mut self,
        sources: &[(ShardId, i64, String)],
        renew: bool,
    ) -> Result<Vec<Option<String>>, SinkError> {
        let fault = self.begin(Call::Keep).await?;
        self.need_connection()?;
        let keep = |(shard, epoch, source): &(ShardId, i64, String)| {
            let mut world = self.world.lock();
            let row = world.db.shards.get_mut(&**shard).filter(|row| row.epoch == *epoch)?;
            let before = row.source.clone();
            if before.is_none() || (renew && before.as_ref() != Some(source)) {
                row.source = Some(source.clone());
                row.position = row.position.filter(|_| before.is_none());
            }
            before
        };
        let before = sources.iter().map(keep).collect();
        self.end(fault, before)
    }

    async fn now_ms(&mut self) -> Result<i64, SinkError> {
        let fault = self.begin(Call::Look).await?;
        let now_ms = wall_ms() - self.world.lock().hosts_ahead_ms;
        self.end(fault, now_ms)
    }

    fn connected(&self) -> bool {
        self.connection.is_some_and(|connection| self.world.lock().connections.contains_key(&connection))
    }

    fn life(&self) -> Life {
        let world = self.world.lock();
        let pulse = self.connection.and_then(|connection| world.connections.get(&connection));
        pulse.map_or_else(Life::over, Pulse::life)
    }
}
