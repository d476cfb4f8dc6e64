//! The journey of a record through a lane: check, deliver, settle, answer.
//!
//! ```text
//! gather   inbox -> queue                                        waits here, and only here, when there is nothing to do
//! check    queue + parked -> verdicts -> fates                   store.claim, judge
//! deliver  rows, dead letters, steps -> receipts                 the sink; Unknown is asked about until it is known
//! settle   receipts -> facts and checkpoints                     store.settle
//! answer   outcome to the caller, position to the Kafka door
//! ```
//!
//! One batch is in flight at a time. A lane never waits for another lane while it holds claims (P7).

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use adapters::{
    dead_letters::DeadLetters,
    sink::{Life, Row, Session, ShardId, ShardStep, Source},
};
use dedup_store::{Entry, Settled, Store};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tracing::info;

use super::{
    FromLane, ToLane,
    judge::Via,
    shard::OwnedShard,
    works::{Taken, Works},
};
use crate::{
    clock::wall_ms,
    metrics::Stage,
    naming::{Chunk, Named},
    outcome::Outcome,
    route::{Route, Sight},
};

/// Who awaits a relay's shards in the store; a lane awaits its own shard under its number.
pub(crate) const RELAY: u32 = u32::MAX;

/// The slot of the lane's own shard, through which callers' records go.
pub(crate) const CALL_SLOT: u32 = u32::MAX;

/// Heartbeats of idle lanes, checks of the connection, expiry: so often.
const TICK: Duration = Duration::from_millis(250);
/// A batch that only moves positions goes out so often.
pub(super) const POSITIONS_ONLY: Duration = Duration::from_secs(1);

/// One lane.
pub(crate) struct Lane {
    pub(super) id: u32,
    pub(super) route: Arc<Route>,
    pub(super) session: Box<dyn Session>,
    pub(super) inbox: mpsc::Receiver<ToLane>,
    pub(super) hand_overs: Arc<AtomicUsize>,
    pub(super) events: Option<mpsc::UnboundedSender<FromLane>>,
    pub(super) letters: Option<Box<dyn DeadLetters>>,
    /// The lane's own shard for callers' records, if it has one.
    pub(super) call_shard: Option<ShardId>,
    pub(super) slots: BTreeMap<u32, OwnedShard>,
    pub(super) works: Works,
    pub(super) queue: VecDeque<Taken>,
    /// In order, and all older than what is queued.
    pub(super) parked: VecDeque<Parked>,
    /// A record that others waited for is gone: the parked are looked at again.
    pub(super) unpark: bool,
    /// Counts the records that were queued.
    pub(super) queued: u64,
    /// The history that the lane's shards were acquired in.
    pub(super) history: u64,
    /// Of the connection on which the lane's shards were acquired and compared.
    pub(super) life: Life,
    /// Relay outcomes, by offset, whose position is not committed yet: a record read again must not count twice.
    pub(super) tally: BTreeMap<u32, Vec<(i64, Outcome)>>,
    /// Facts without rows, for the next batch's marks.
    pub(super) notes: Vec<Note>,
    /// The shards must be acquired again before the next verdict.
    pub(super) recheck: bool,
    /// Failures in a row.
    pub(super) failures: u32,
    pub(super) next_generation: u64,
    pub(super) heartbeat_at: Instant,
    pub(super) expired_at: Instant,
    pub(super) stopping: bool,
    pub(super) tick_at: Instant,
    pub(super) positions_at: Instant,
    /// The lane ends without knowing what became of a batch.
    pub(super) unresolved: bool,
    /// The last batch of positions was sent before the lane ends.
    pub(super) last_positions: bool,
    /// It was said that the lane has callers' records at hand.
    pub(super) busy: bool,
    /// Another owner has the lane's own shard.
    pub(super) held_elsewhere: bool,
    /// When the route was first seen to end.
    pub(super) closing_since: Option<Instant>,
    /// The lane ends with records that its sink does not take now.
    pub(super) gives_up: bool,
}

/// A lane holds the bytes of so many full batches before it takes no more in.
const QUEUED_BATCHES: usize = 2;

/// A fact without a row, and who waits until the marks hold it.
pub(super) type Note = (Entry, oneshot::Sender<Result<(), String>>);

/// A record that waits, holding no claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Parked {
    pub(super) taken: Taken,
    pub(super) on: WaitsFor,
}

/// What a parked record waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WaitsFor {
    /// Its key, which is in flight.
    Key,
    /// A record that was parked before it: its row key must not be overtaken, nor its position be passed. It goes when that goes.
    Earlier,
}

/// A batch on its way.
pub(super) struct Flight {
    pub(super) rows: Vec<InFlight>,
    pub(super) letters: Vec<DeadRecord>,
    pub(super) notes: Vec<Note>,
    /// One a step.
    pub(super) slots: Vec<u32>,
    pub(super) steps: Vec<ShardStep>,
    pub(super) known_new: bool,
}

impl Flight {
    /// Every record of the batch.
    pub(super) fn records(&self) -> impl Iterator<Item = &InFlight> {
        self.rows.iter().chain(self.letters.iter().map(|letter| &letter.record))
    }

    /// Whether it carries a relay's records. A lane carries either a relay's or callers', never both.
    pub(super) fn relays(&self) -> bool {
        self.records().any(|record| record.via == Via::Relay)
    }
}

/// One record of a batch.
#[derive(Clone)]
pub(super) struct InFlight {
    pub(super) taken: Taken,
    pub(super) via: Via,
    pub(super) slot: u32,
    /// Index into the flight's steps.
    pub(super) step: usize,
    pub(super) chunk: Arc<Chunk>,
}

/// A record that goes to the dead letters with its batch.
pub(super) struct DeadRecord {
    pub(super) record: InFlight,
    pub(super) kind: &'static str,
    pub(super) reason: String,
    /// Its key is settled with it.
    pub(super) settle: bool,
}

impl InFlight {
    pub(super) fn named(&self) -> &Named {
        &self.chunk.records[self.taken.index as usize]
    }

    pub(super) fn row(&self) -> Row<'_> {
        let named = self.named();
        Row {
            kind: named.kind,
            bytes: self.chunk.slice(&named.row),
            row_key: self.chunk.slice(&named.row_key),
            source: self.source(),
        }
    }

    pub(super) fn source(&self) -> Source<'_> {
        let named = self.named();
        Source {
            step: self.step,
            position: named.position,
            key: named.fingerprint.as_ref().map_or(&[], |fingerprint| &fingerprint.0),
            payload: named.payload.as_ref().map(|range| self.chunk.slice(range)),
            event_ms: named.event_ms,
        }
    }

    pub(super) fn entry(&self, settled: Settled) -> Option<Entry> {
        let named = self.named();
        Some(Entry {
            fingerprint: named.fingerprint?,
            digest: named.digest,
            event_ms: named.event_ms,
            settled,
        })
    }
}

impl Lane {
    /// `own`: the shard of callers' records. `others`: shards whose lanes are not configured any more: they stay fenced, and their
    /// marks expire, in this lane's care.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        id: u32,
        route: Arc<Route>,
        session: Box<dyn Session>,
        inbox: mpsc::Receiver<ToLane>,
        hand_overs: Arc<AtomicUsize>,
        events: Option<mpsc::UnboundedSender<FromLane>>,
        letters: Option<Box<dyn DeadLetters>>,
        own: Option<OwnedShard>,
        others: Vec<OwnedShard>,
    ) -> Self {
        let now = Instant::now();
        let call_shard = own.as_ref().map(|shard| shard.id.clone());
        let own = own.map(|shard| (CALL_SLOT, shard));
        let cared = others.into_iter().enumerate().map(|(at, shard)| (CALL_SLOT - 1 - at as u32, shard));
        let history = *route.history.read();
        route.sees(id, Sight::Lost);
        Self {
            id,
            route,
            session,
            inbox,
            hand_overs,
            events,
            letters,
            call_shard,
            slots: own.into_iter().chain(cared).collect(),
            works: Works::default(),
            queue: VecDeque::new(),
            parked: VecDeque::new(),
            unpark: false,
            queued: 0,
            history,
            life: Life::over(),
            tally: BTreeMap::new(),
            notes: Vec::new(),
            recheck: true,
            failures: 0,
            next_generation: 0,
            heartbeat_at: now,
            expired_at: now,
            stopping: false,
            tick_at: now + TICK,
            positions_at: now,
            unresolved: false,
            last_positions: false,
            busy: false,
            held_elsewhere: false,
            closing_since: None,
            gives_up: false,
        }
    }

    /// Runs until the inbox is closed and everything in it has its outcome.
    pub(crate) async fn run(mut self) {
        while self.gathered().await {
            self.set_busy(true);
            if self.gives_up || !self.ready(false).await {
                // It is to end, and the sink is not there: callers have heard, and a relay's records are read again.
                break;
            }
            self.set_busy(true);
            match self.check() {
                Ok(Some(flight)) => self.deliver(flight).await,
                Ok(None) => {}
                Err(fault) => self.store_fault(&fault).await,
            }
        }
        self.set_busy(false);
        self.route.sees(self.id, Sight::Needless);
        if !self.unresolved {
            self.route.store.release_lane(self.id);
        }
        info!(route = %self.route.name, lane = self.id, "lane ended");
    }

    pub(super) fn has_records(&self) -> bool {
        !self.queue.is_empty() || !self.parked.is_empty()
    }

    /// Callers' records that are at hand have no outcome yet, however long that takes: their shard is not idle (P11).
    pub(super) fn set_busy(&mut self, busy: bool) {
        let Some(shard) = self.call_shard.as_ref().filter(|_| busy != self.busy) else { return };
        self.busy = busy;
        let shards = if busy { std::slice::from_ref(shard) } else { &[] };
        self.route.store.awaits(self.id, shards, wall_ms());
    }

    // ---- gather ---------------------------------------------------------------------------------------------------------

    /// [`Lane::gather`], timed: how long a relay's lane had nothing to do.
    async fn gathered(&mut self) -> bool {
        let started = Instant::now();
        let more = self.gather().await;
        if self.events.is_some() {
            self.route.metrics.observe(Stage::Receive, started.elapsed());
        }
        more
    }

    /// Waits until there is something to check, doing what is due meanwhile. False when the lane is to end.
    async fn gather(&mut self) -> bool {
        let route = self.route.clone();
        loop {
            #[cfg(test)]
            crate::clock::simulated::turns();
            while self.takes_more() && !self.stopping {
                match self.inbox.try_recv() {
                    Ok(message) => self.take_in(message).await,
                    Err(mpsc::error::TryRecvError::Empty) => break,
                    Err(mpsc::error::TryRecvError::Disconnected) => self.stopping = true,
                }
            }
            // Here and not only when idle: a busy lane expires its marks too, and one that others wake lives on.
            if Instant::now() >= self.tick_at {
                self.tick_at = Instant::now() + TICK;
                self.set_busy(self.has_records());
                self.tick().await;
            }
            // Registered before the parked keys are looked at, so that no settlement in between is missed.
            let changed = route.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            self.expire_waits();
            let lingers = self.lingers_until();
            let store = &self.route.store;
            if (lingers.is_none() || self.parked_can_go(store)) && self.has_work(store) {
                return true;
            }
            if self.positions_moved() && self.positions_at.elapsed() >= POSITIONS_ONLY {
                return true;
            }
            if self.stopping {
                if self.parked.is_empty() {
                    // The last positions go out with a batch of their own.
                    let moved = self.positions_moved() && self.connected();
                    self.positions_at = Instant::now() - POSITIONS_ONLY;
                    if moved && !self.last_positions {
                        self.last_positions = true;
                        return true;
                    }
                    return false;
                }
                self.answer_parked();
                continue;
            }
            tokio::select! {
                biased;
                message = self.inbox.recv(), if self.takes_more() => match message {
                    Some(message) => self.take_in(message).await,
                    None => self.stopping = true,
                },
                () = &mut changed => {}
                () = tokio::time::sleep_until(lingers.map_or(self.tick_at, |until| until.min(self.tick_at))) => {}
            }
        }
    }

    /// Whether there is room for more than what is queued: in records, and in bytes, since records may be large. A hand-over does
    /// not wait for room.
    fn takes_more(&self) -> bool {
        let rules = &self.route.rules;
        self.queue.is_empty()
            || self.hands_over()
            || (self.queue.len() < rules.max_records && self.works.bytes() < QUEUED_BATCHES * rules.max_bytes)
    }

    /// Whether a hand-over is behind what is in the inbox.
    pub(super) fn hands_over(&self) -> bool {
        self.hand_overs.load(Ordering::Acquire) > 0
    }

    /// How long the records at hand wait for more, so that sinks to which each batch costs get full ones: the oldest of them no longer than
    /// the route's rules say.
    fn lingers_until(&self) -> Option<Instant> {
        let linger_ms = self.route.rules.linger_ms;
        if linger_ms == 0
            || self.stopping
            || self.hands_over()
            || !self.notes.is_empty()
            || !self.takes_more()
        {
            return None;
        }
        let oldest = self.works.get(self.queue.front()?.work).received;
        let until = oldest + Duration::from_millis(linger_ms);
        (until > Instant::now()).then_some(until)
    }

    async fn take_in(&mut self, message: ToLane) {
        match message {
            ToLane::Assign { shards, reply } => {
                let answer = self.assign(shards).await;
                drop(reply.send(answer));
            }
            ToLane::Partitions { counts, reply } => {
                if let Some(before) = self.keep_partitions(counts).await {
                    drop(reply.send(before));
                }
            }
            other => self.take_in_offline(other),
        }
    }

    /// What needs no sink: callers hear in any case, and hand-overs are not held up.
    pub(super) fn take_in_offline(&mut self, message: ToLane) {
        let received = Instant::now();
        let (work, records) = match message {
            ToLane::Submit { chunk, reply } => {
                let records = chunk.records.len() as u32;
                (self.works.submit(chunk, reply, received), records)
            }
            ToLane::Relay { chunk, generations } => {
                let records = chunk.records.len() as u32;
                (self.works.relay(chunk, generations, received), records)
            }
            ToLane::Assign { reply, .. } => {
                drop(reply.send(Err("the sink is not reachable".into())));
                return;
            }
            // The next assignment says it again.
            ToLane::Partitions { .. } => return,
            ToLane::Revoke { slots, hand_over, reply } => {
                drop(hand_over);
                let all =
                    || self.slots.iter().filter(|(_, shard)| !shard.is_callers()).map(|(slot, _)| *slot);
                let slots = slots.unwrap_or_else(|| all().collect());
                slots.into_iter().for_each(|slot| self.drop_slot(slot));
                // Nobody waits any more if the door's deadline is over.
                reply.send(()).ok();
                return;
            }
            ToLane::Note { entry, reply } => {
                self.notes.push((entry, reply));
                return;
            }
            ToLane::Stop => {
                self.inbox.close();
                return;
            }
        };
        if let Some(work) = work {
            let first = self.queued;
            self.queued += u64::from(records);
            let taken = |index| Taken { work, index, order: first + u64::from(index) };
            self.queue.extend((0..records).map(taken));
        }
    }

    pub(super) fn positions_moved(&self) -> bool {
        self.slots.iter().any(|(&slot, shard)| slot != CALL_SLOT && shard.prefix() > shard.position)
    }

    /// Whether there is something to check, as far as this store knows.
    pub(super) fn has_work(&self, store: &Store) -> bool {
        let room = self.parked.len() < self.route.rules.max_records * 2;
        (!self.queue.is_empty() && room) || !self.notes.is_empty() || self.parked_can_go(store)
    }

    /// Whether a parked record's key came free or was settled. Those that wait for an earlier record go when that goes: if
    /// they were looked at for their own key, the lane would spin over them.
    fn parked_can_go(&self, store: &Store) -> bool {
        let free = |parked: &Parked| {
            let key = self.works.named(parked.taken).fingerprint;
            parked.on == WaitsFor::Key && key.is_none_or(|fingerprint| !store.in_flight(&fingerprint))
        };
        !self.parked.is_empty() && (self.unpark || self.parked.iter().any(free))
    }
}
