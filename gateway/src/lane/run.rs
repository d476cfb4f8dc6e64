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
    collections::{BTreeMap, HashSet, VecDeque},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use adapters::dead_letters::{DeadLetters, Letter};
use adapters::sink::{
    Batch, DeadLetter, MarkBlock, Mode, OnRefused, Receipts, Row, RowOutcome, Session, ShardId, ShardStep,
    SinkError, Source,
};
use dedup_store::{Block, Entry, Fingerprint, Item, Settled, StoreError, Verdict};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tracing::{error, info, warn};

use super::{
    FromLane, ToLane,
    judge::{DeadLetterPolicy, Fate, LatePolicy, RefusedPolicy, Rules, Via, judge, judge_unwritable},
    shard::OwnedShard,
    works::{Taken, Works},
};
use crate::{
    clock::wall_ms,
    metrics::Stage,
    naming::{Chunk, Named},
    outcome::{Answer, Outcome, Problem},
    route::Route,
};

/// The slot of the lane's own shard, through which callers' records go.
pub(crate) const CALL_SLOT: u32 = u32::MAX;

/// Heartbeats of idle lanes, checks of the connection, expiry: so often.
const TICK: Duration = Duration::from_millis(250);
/// A batch that only moves positions goes out so often.
const POSITIONS_ONLY: Duration = Duration::from_secs(1);
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MOST: Duration = Duration::from_secs(5);

/// One lane.
pub(crate) struct Lane {
    pub(super) id: u32,
    pub(super) route: Arc<Route>,
    pub(super) session: Box<dyn Session>,
    pub(super) inbox: mpsc::Receiver<ToLane>,
    pub(super) events: Option<mpsc::UnboundedSender<FromLane>>,
    pub(super) letters: Option<Box<dyn DeadLetters>>,
    /// The lane's own shard for callers' records, if it has one.
    pub(super) call_shard: Option<ShardId>,
    pub(super) slots: BTreeMap<u32, OwnedShard>,
    pub(super) works: Works,
    pub(super) queue: VecDeque<Taken>,
    pub(super) parked: VecDeque<Taken>,
    /// The history that the lane's shards were acquired in.
    pub(super) history: u64,
    /// It counts among the route's disconnected lanes.
    pub(super) disconnected: bool,
    /// Relay outcomes whose position is not committed yet: a record read again must not count twice.
    pub(super) tally: BTreeMap<u32, Vec<(Outcome, u64)>>,
    /// Facts without rows, for the next batch's marks.
    pub(super) notes: Vec<(Entry, oneshot::Sender<Result<(), String>>)>,
    /// The shards must be acquired again before the next verdict.
    pub(super) recheck: bool,
    /// Failures in a row.
    pub(super) failures: u32,
    pub(super) next_generation: u64,
    pub(super) heartbeat_at: Instant,
    pub(super) expired_at: Instant,
    pub(super) stopping: bool,
    positions_at: Instant,
    /// The last batch of positions was sent before the lane ends.
    last_positions: bool,
}

/// A batch on its way.
pub(super) struct Flight {
    pub(super) rows: Vec<InFlight>,
    letters: Vec<DeadRecord>,
    notes: Vec<Entry>,
    /// One a step.
    pub(super) slots: Vec<u32>,
    pub(super) steps: Vec<ShardStep>,
    known_new: bool,
}

/// One record of a batch.
#[derive(Clone)]
pub(super) struct InFlight {
    pub(super) taken: Taken,
    via: Via,
    pub(super) slot: u32,
    /// Index into the flight's steps.
    step: usize,
    chunk: Arc<Chunk>,
}

struct DeadRecord {
    record: InFlight,
    kind: &'static str,
    reason: String,
    settle: bool,
}

impl InFlight {
    pub(super) fn named(&self) -> &Named {
        &self.chunk.records[self.taken.index as usize]
    }

    fn row(&self) -> Row<'_> {
        let named = self.named();
        Row {
            kind: named.kind,
            bytes: self.chunk.slice(&named.row),
            row_key: self.chunk.slice(&named.row_key),
            source: self.source(),
        }
    }

    fn source(&self) -> Source<'_> {
        let named = self.named();
        Source {
            step: self.step,
            position: named.position,
            key: named.fingerprint.as_ref().map_or(&[], |fingerprint| &fingerprint.0),
            payload: named.payload.as_ref().map(|range| self.chunk.slice(range)),
            event_ms: named.event_ms,
        }
    }

    fn entry(&self, settled: Settled) -> Option<Entry> {
        let named = self.named();
        Some(Entry {
            fingerprint: named.fingerprint?,
            digest: named.digest,
            event_ms: named.event_ms,
            settled,
        })
    }
}

/// Whether the store is asked about a record. A caller's record that cannot be written is answered without: its key stays
/// free, so that a corrected record with the same key is new.
fn claimable(named: &Named, via: Via) -> bool {
    named.fingerprint.is_some() && (named.problem.is_none() || via == Via::Relay)
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
        route.disconnected.fetch_add(1, Ordering::AcqRel);
        Self {
            id,
            route,
            session,
            inbox,
            events,
            letters,
            call_shard,
            slots: own.into_iter().chain(cared).collect(),
            works: Works::default(),
            queue: VecDeque::new(),
            parked: VecDeque::new(),
            history,
            disconnected: true,
            tally: BTreeMap::new(),
            notes: Vec::new(),
            recheck: true,
            failures: 0,
            next_generation: 0,
            heartbeat_at: now,
            expired_at: now,
            stopping: false,
            positions_at: now,
            last_positions: false,
        }
    }

    /// Runs until the inbox is closed and everything in it has its outcome.
    pub(crate) async fn run(mut self) {
        while self.gather().await {
            if !self.ready().await {
                continue;
            }
            match self.check() {
                Ok(Some(flight)) => self.deliver(flight).await,
                Ok(None) => {}
                Err(fault) => self.store_fault(&fault).await,
            }
        }
        self.mark_disconnected(false);
        self.route.store.release_lane(self.id);
        info!(route = %self.route.name, lane = self.id, "lane ended");
    }

    // ---- gather ---------------------------------------------------------------------------------------------------------

    /// Waits until there is something to check, doing what is due meanwhile. False when the lane is to end.
    async fn gather(&mut self) -> bool {
        let route = self.route.clone();
        let most = route.rules.max_records * 2;
        loop {
            while self.queue.len() < most && !self.stopping {
                match self.inbox.try_recv() {
                    Ok(message) => self.take_in(message).await,
                    Err(mpsc::error::TryRecvError::Empty) => break,
                    Err(mpsc::error::TryRecvError::Disconnected) => self.stopping = true,
                }
            }
            // Registered before the parked keys are looked at, so that no settlement in between is missed.
            let changed = route.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            self.expire_waits();
            if !self.queue.is_empty() || !self.notes.is_empty() || self.parked_can_go() {
                return true;
            }
            if self.stopping {
                if self.parked.is_empty() {
                    // The last positions go out with a batch of their own.
                    let moved = self.positions_moved() && self.session.connected();
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
                message = self.inbox.recv() => match message {
                    Some(message) => {
                        self.take_in(message).await;
                        self.linger().await;
                    }
                    None => self.stopping = true,
                },
                () = &mut changed => {}
                () = tokio::time::sleep(TICK) => {
                    self.tick().await;
                    if self.positions_moved() && self.positions_at.elapsed() >= POSITIONS_ONLY {
                        return true;
                    }
                }
            }
        }
    }

    /// Under lag a fuller batch is worth a few ms.
    async fn linger(&mut self) {
        let (most, linger_ms) = (self.route.rules.max_records, self.route.rules.linger_ms);
        let until = tokio::time::Instant::now() + Duration::from_millis(linger_ms);
        while linger_ms > 0 && self.queue.len() < most {
            match tokio::time::timeout_at(until, self.inbox.recv()).await {
                Ok(Some(message)) => self.take_in(message).await,
                Ok(None) => {
                    self.stopping = true;
                    return;
                }
                Err(_) => return,
            }
        }
    }

    async fn take_in(&mut self, message: ToLane) {
        match message {
            ToLane::Assign { shards, reply } => {
                let answer = self.assign(shards).await;
                drop(reply.send(answer));
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
            ToLane::Revoke { slots, reply } => {
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
            self.queue.extend((0..records).map(|index| Taken { work, index }));
        }
    }

    fn positions_moved(&self) -> bool {
        self.slots.iter().any(|(&slot, shard)| slot != CALL_SLOT && shard.prefix() > shard.position)
    }

    /// Whether a parked record's key came free or was settled.
    fn parked_can_go(&self) -> bool {
        self.parked.iter().any(|&taken| {
            let key = self.works.named(taken).fingerprint;
            key.is_none_or(|fingerprint| !self.route.store.in_flight(&fingerprint))
        })
    }

    // ---- check ----------------------------------------------------------------------------------------------------------

    /// Takes up to a batch of records, asks the store, and decides each record's fate.
    fn check(&mut self) -> Result<Option<Flight>, StoreError> {
        let started = Instant::now();
        let route = self.route.clone();
        let rules = &route.rules;
        let candidates = self.candidates(rules);
        let items: Vec<Item> = candidates.iter().filter_map(|record| self.item(record, rules)).collect();
        let mut verdicts = Vec::with_capacity(items.len());
        if let Err(fault) =
            route.store.claim(self.id, wall_ms().saturating_add(rules.max_ahead_ms), &items, &mut verdicts)
        {
            if rules.pass_unchecked && !matches!(fault, StoreError::Full { .. }) {
                route.metrics.unchecked(items.len() as u64);
                verdicts = vec![Verdict::New { late: true }; items.len()];
            } else {
                candidates.iter().rev().for_each(|record| self.queue.push_front(record.taken));
                return Err(fault);
            }
        }
        let flight = self.decide(candidates, verdicts, rules);
        route.metrics.observe(Stage::Check, started.elapsed());
        Ok(flight)
    }

    /// The next records in order: parked ones first, then the queue, up to a batch.
    fn candidates(&mut self, rules: &Rules) -> Vec<InFlight> {
        let mut candidates = Vec::with_capacity(self.parked.len() + self.queue.len().min(rules.max_records));
        for taken in std::mem::take(&mut self.parked) {
            candidates.extend(self.candidate(taken));
        }
        let (most, mut bytes) = (candidates.len() + rules.max_records, 0);
        while candidates.len() < most && bytes < rules.max_bytes {
            let Some(taken) = self.queue.pop_front() else { break };
            if let Some(record) = self.candidate(taken) {
                bytes += record.named().row.len();
                candidates.push(record);
            }
        }
        candidates
    }

    /// The record, unless it is not this lane's any more, or was settled before (P7.1).
    fn candidate(&mut self, taken: Taken) -> Option<InFlight> {
        let work = self.works.get(taken.work);
        let (via, chunk) = (work.via, work.chunk.clone());
        let named = &chunk.records[taken.index as usize];
        let slot = if via == Via::Call { CALL_SLOT } else { named.shard };
        if via == Via::Relay {
            let shard = self.slots.get(&slot);
            let current = shard.is_some_and(|shard| self.works.is_current(taken, slot, shard.generation));
            let replay = shard.zip(named.position).is_some_and(|(shard, offset)| shard.is_replay(offset));
            if replay {
                self.route.metrics.replayed(1);
            }
            if !current || replay {
                self.works.drop_record(taken);
                return None;
            }
        }
        Some(InFlight { taken, via, slot, step: 0, chunk })
    }

    fn item(&self, record: &InFlight, rules: &Rules) -> Option<Item> {
        let named = record.named();
        if !claimable(named, record.via) {
            return None;
        }
        let floor = |shard: &OwnedShard| shard.admission_ms(rules.lateness_ms, rules.window_ms);
        Some(Item {
            fingerprint: named.fingerprint?,
            digest: named.digest,
            event_ms: named.event_ms,
            floor_ms: self.slots.get(&record.slot).map_or(i64::MIN, floor),
            admit_late: rules.late(record.via) == LatePolicy::VerifyInSink,
            replay_dead_letter: false,
        })
    }

    /// Fates to a batch: answers what has its outcome, parks what must wait, and steps each shard that moves.
    fn decide(&mut self, candidates: Vec<InFlight>, verdicts: Vec<Verdict>, rules: &Rules) -> Option<Flight> {
        let mut flight = Flight {
            rows: Vec::with_capacity(candidates.len()),
            letters: Vec::new(),
            notes: self.notes.iter().map(|(entry, _)| *entry).collect(),
            slots: Vec::new(),
            steps: Vec::new(),
            known_new: rules.mode == Mode::Insert && rules.key_within_row_key,
        };
        let mut verdicts = verdicts.into_iter();
        let mut released: Vec<Fingerprint> = Vec::new();
        let mut stopped: BTreeMap<u32, String> = BTreeMap::new();
        // P7: a parked record parks later records of its row key too, or they would overtake it.
        let mut blocked: HashSet<Box<[u8]>> = HashSet::new();
        for record in candidates {
            let named = record.named();
            let verdict = if claimable(named, record.via) { verdicts.next() } else { None };
            let claimed = matches!(verdict, Some(Verdict::New { .. }));
            if stopped.contains_key(&record.slot) {
                released.extend(named.fingerprint.filter(|_| claimed));
                self.works.drop_record(record.taken);
                continue;
            }
            let mut fate = match (verdict, named.problem.as_deref()) {
                (None | Some(Verdict::New { .. }), Some(problem)) => {
                    judge_unwritable(problem, record.via, rules)
                }
                (Some(verdict), _) => judge(verdict, named, record.via, rules),
                (None, None) => {
                    judge_unwritable(&Problem::KeyMissing("the record has no key".into()), record.via, rules)
                }
            };
            let row_key = record.chunk.slice(&named.row_key);
            if !blocked.is_empty() && matches!(fate, Fate::Deliver { .. }) && blocked.contains(row_key) {
                released.extend(named.fingerprint);
                fate = Fate::Park;
            }
            if let (Some(offset), Some(shard)) = (named.position, self.slots.get_mut(&record.slot)) {
                match fate {
                    Fate::Park => {
                        shard.take(offset);
                        shard.park(offset);
                    }
                    Fate::Stop(_) => shard.give_back(offset),
                    _ => shard.take(offset),
                }
            }
            match fate {
                Fate::Deliver { late } => {
                    flight.known_new &= !late;
                    flight.rows.push(record);
                }
                Fate::Answer { outcome, first, problem } => {
                    let answer = Answer { outcome, fingerprint: named.fingerprint, first, problem };
                    self.finish(&record, answer);
                }
                Fate::DeadLetter { kind, reason, settle } => {
                    if claimed && !settle {
                        released.extend(named.fingerprint);
                    }
                    flight.letters.push(DeadRecord { record, kind, reason, settle: settle && claimed });
                }
                Fate::Park => {
                    if rules.mode != Mode::Insert && !row_key.is_empty() {
                        blocked.insert(row_key.into());
                    }
                    self.parked.push_back(record.taken);
                }
                Fate::Stop(reason) => {
                    released.extend(named.fingerprint.filter(|_| claimed));
                    self.works.drop_record(record.taken);
                    stopped.insert(record.slot, reason);
                }
            }
        }
        if !released.is_empty() {
            self.route.store.release(self.id, &released);
            self.route.changed.notify_waiters();
        }
        for (slot, reason) in stopped {
            self.stop_slot(slot, &reason);
        }
        self.step(&mut flight).then_some(flight)
    }

    /// Gives the flight its steps; false if there is nothing to send.
    fn step(&mut self, flight: &mut Flight) -> bool {
        let mut latest: BTreeMap<u32, Option<i64>> = BTreeMap::new();
        for record in &flight.rows {
            let seen = latest.entry(record.slot).or_default();
            *seen = (*seen).max(Some(record.named().event_ms));
        }
        for letter in &flight.letters {
            latest.entry(letter.record.slot).or_default();
        }
        if !flight.notes.is_empty()
            && let Some(&slot) = self.slots.keys().next_back()
        {
            latest.entry(slot).or_default();
        }
        if latest.is_empty() && self.positions_at.elapsed() < POSITIONS_ONLY {
            return false;
        }
        for (&slot, shard) in &self.slots {
            if slot != CALL_SLOT && shard.prefix() > shard.position {
                latest.entry(slot).or_default();
            }
        }
        let mut steps: Vec<(u32, ShardStep)> = latest
            .into_iter()
            .filter_map(|(slot, seen)| Some((slot, self.slots.get(&slot)?.step(seen))))
            .collect();
        // In the order of their ids, so that all owners lock shard rows in one order (P4).
        steps.sort_by(|a, b| a.1.shard.cmp(&b.1.shard));
        (flight.slots, flight.steps) = steps.into_iter().unzip();
        let step_of = |slot: u32| flight.slots.iter().position(|&s| s == slot).unwrap_or_default();
        let records =
            flight.rows.iter_mut().chain(flight.letters.iter_mut().map(|letter| &mut letter.record));
        for record in records {
            record.step = step_of(record.slot);
        }
        !flight.steps.is_empty()
    }

    // ---- deliver ----------------------------------------------------------------------------------------------------------

    /// Brings the batch to its end: in, or surely not in.
    async fn deliver(&mut self, mut flight: Flight) {
        let started = Instant::now();
        if let Err(reason) = self.write_external_letters(&flight).await {
            self.route.set_trouble(self.id, Some(reason));
            self.put_back(flight);
            self.pause().await;
            return;
        }
        let (result, blocks) = self.attempt(&flight).await;
        self.route.metrics.observe(Stage::Deliver, started.elapsed());
        let fault = match result {
            Ok(receipts) => {
                self.failures = 0;
                return self.settle(flight, &receipts, blocks);
            }
            Err(fault) => fault,
        };
        self.route.metrics.sink_error(&fault);
        warn!(route = %self.route.name, lane = self.id, "{fault}");
        match fault {
            SinkError::Unknown { .. } => match self.resolve(&mut flight).await {
                Some((receipts, blocks)) => self.settle(flight, &receipts, blocks),
                // Surely not in: only now may the batch be cut again (rule 3, P13).
                None => self.put_back(flight),
            },
            SinkError::Fenced { shard, owner, epoch } => {
                // Each earlier attempt was resolved before this one, and this one's fence failed: nothing is in (P4).
                self.fenced(&shard, &owner, epoch);
                self.put_back(flight);
            }
            SinkError::Refused { row, reason } => {
                let found = flight.rows.get(row).map(|record| (record.slot, record.named().position));
                self.put_back(flight);
                if let Some((slot, offset)) = found {
                    let at = offset.map_or_else(String::new, |offset| format!(" at offset {offset}"));
                    self.stop_slot(
                        slot,
                        &format!("the sink refused the record{at}: {reason}; dead_letters = \"stop\""),
                    );
                }
            }
            SinkError::NotApplied { retry: true, .. } => {
                self.put_back(flight);
                self.pause().await;
            }
            SinkError::NotApplied { retry: false, reason } | SinkError::Held { owner: reason, .. } => {
                self.route.set_trouble(self.id, Some(format!("the sink does not take the batch: {reason}")));
                self.put_back(flight);
                self.answer_unavailable(&reason);
                self.pause().await;
                self.recheck = true;
            }
        }
    }

    /// Waits longer after each failure in a row, with jitter so that lanes do not march in step.
    async fn pause(&mut self) {
        let most = RETRY_FIRST.saturating_mul(1 << self.failures.min(16)).min(RETRY_MOST);
        self.failures += 1;
        tokio::time::sleep(most.mul_f64(rand::random_range(0.5..1.0))).await;
    }

    /// One attempt: the batch as it is, and the facts that its marks hold.
    async fn attempt(&mut self, flight: &Flight) -> (Result<Receipts, SinkError>, Vec<Block>) {
        let rules = &self.route.rules;
        let relay = flight.slots.iter().any(|&slot| slot != CALL_SLOT);
        let on_refused = match (relay, rules.dead_letters) {
            (false, _) => OnRefused::Report,
            (true, DeadLetterPolicy::Stop) => OnRefused::Abort,
            (true, DeadLetterPolicy::Sink | DeadLetterPolicy::External) => OnRefused::DeadLetter,
        };
        let settle_refused = match (relay, rules.refused) {
            (true, _) => Some(Settled::DeadLettered),
            (false, RefusedPolicy::Settle) => Some(Settled::Rejected),
            (false, RefusedPolicy::Free) => None,
        };
        let hasher = &self.route.hasher;
        let sealed: Mutex<Vec<Block>> = Mutex::new(Vec::new());
        let seal = |outcomes: &[RowOutcome]| {
            let mut entries: Vec<Vec<Entry>> = vec![Vec::new(); flight.steps.len()];
            for (record, outcome) in flight.rows.iter().zip(outcomes) {
                let settled = match outcome {
                    RowOutcome::Written => Some(Settled::Written),
                    RowOutcome::Updated => Some(Settled::Updated),
                    RowOutcome::Stale => Some(Settled::Stale),
                    RowOutcome::Refused { .. } => settle_refused,
                };
                entries[record.step].extend(settled.and_then(|settled| record.entry(settled)));
            }
            for letter in flight.letters.iter().filter(|letter| letter.settle) {
                entries[letter.record.step].extend(letter.record.entry(Settled::DeadLettered));
            }
            if let Some(last) = entries.last_mut() {
                last.extend(&flight.notes);
            }
            let blocks: Vec<(usize, Block)> = entries
                .into_iter()
                .enumerate()
                .filter(|(_, entries)| !entries.is_empty())
                .map(|(step, entries)| {
                    let ShardStep { shard, sequence, .. } = &flight.steps[step];
                    (step, Block::encode(hasher, shard, *sequence, entries))
                })
                .collect();
            let marks = blocks
                .iter()
                .map(|(step, block)| MarkBlock {
                    step: *step,
                    min_ms: block.min_ms,
                    max_ms: block.max_ms,
                    count: block.entries.len(),
                    block: block.bytes.clone(),
                })
                .collect();
            *sealed.lock() = blocks.into_iter().map(|(_, block)| block).collect();
            marks
        };
        let rows: Vec<Row<'_>> = flight.rows.iter().map(InFlight::row).collect();
        let letters: Vec<DeadLetter<'_>> = flight
            .letters
            .iter()
            .filter(|_| rules.dead_letters != DeadLetterPolicy::External)
            .map(|letter| DeadLetter {
                source: letter.record.source(),
                kind: letter.kind,
                reason: letter.reason.clone(),
            })
            .collect();
        let batch = Batch {
            steps: &flight.steps,
            rows: &rows,
            dead_letters: &letters,
            on_refused,
            known_new: flight.known_new,
            seal: &seal,
        };
        self.route.metrics.batch(rows.len());
        let result = self.session.deliver(&batch).await;
        (result, sealed.into_inner())
    }

    /// Dead letters for a topic or a file are durable before their batch is tried (P10).
    async fn write_external_letters(&mut self, flight: &Flight) -> Result<(), String> {
        let Some(target) = &mut self.letters else { return Ok(()) };
        if flight.letters.is_empty() {
            return Ok(());
        }
        let letters: Vec<Letter<'_>> = flight
            .letters
            .iter()
            .map(|letter| letter_of(&self.route.name, &flight.steps[letter.record.step], letter))
            .collect();
        target.write(&letters).await.map_err(|fault| format!("dead letters cannot be kept: {fault}"))
    }

    // ---- settle, answer -------------------------------------------------------------------------------------------------

    /// The batch is in: facts to the store, answers to callers, positions to the Kafka door.
    pub(super) fn settle(&mut self, flight: Flight, receipts: &Receipts, blocks: Vec<Block>) {
        let started = Instant::now();
        let route = self.route.clone();
        let history = route.history.read();
        if *history != self.history {
            // The sink went back meanwhile (P6): whether the batch is in its new history is learnt from its marks.
            drop(history);
            self.recheck = true;
            return self.put_back(flight);
        }
        for (slot, step) in flight.slots.iter().zip(&flight.steps) {
            if let Some(shard) = self.slots.get_mut(slot) {
                shard.advance(step);
            }
        }
        let checkpoints: Vec<_> =
            flight.slots.iter().filter_map(|slot| self.slots.get(slot).map(OwnedShard::checkpoint)).collect();
        if let Err(fault) = route.store.settle(&checkpoints, &blocks, wall_ms()) {
            // The mark in the sink holds the facts (rule 6); the store answers nothing any more until it is reopened.
            error!(route = %route.name, lane = self.id, "{fault}");
        }
        drop(history);
        route.metrics.observe(Stage::Settle, started.elapsed());
        let answering = Instant::now();
        let relay_refusal = flight.slots.iter().any(|&slot| slot != CALL_SLOT);
        let settles = relay_refusal || route.rules.refused == RefusedPolicy::Settle;
        let mut freed: Vec<Fingerprint> = Vec::new();
        let outcomes = receipts.rows.iter().map(Some).chain(std::iter::repeat(None));
        for (record, outcome) in flight.rows.iter().zip(outcomes) {
            let (outcome, problem) = match outcome {
                Some(RowOutcome::Written) => (Outcome::Written, None),
                Some(RowOutcome::Updated) => (Outcome::Updated, None),
                Some(RowOutcome::Stale) => (Outcome::Stale, None),
                Some(RowOutcome::Refused { reason }) => {
                    if !settles {
                        freed.extend(record.named().fingerprint);
                    }
                    let outcome = if relay_refusal { Outcome::DeadLettered } else { Outcome::Rejected };
                    (outcome, Some(Problem::Refused(reason.clone())))
                }
                // Silence is not success (rule 5).
                None => {
                    freed.extend(record.named().fingerprint);
                    (Outcome::Unknown, Some(Problem::OutcomeUnknown))
                }
            };
            let answer = Answer { outcome, fingerprint: record.named().fingerprint, first: None, problem };
            self.finish(record, answer);
        }
        for letter in &flight.letters {
            let fingerprint = letter.record.named().fingerprint;
            let answer = Answer { outcome: Outcome::DeadLettered, fingerprint, first: None, problem: None };
            self.finish(&letter.record, answer);
        }
        if !freed.is_empty() {
            route.store.release(self.id, &freed);
        }
        // Notes are taken in order and only at the end, so the flight's are the first.
        for (_, reply) in self.notes.drain(..flight.notes.len()) {
            drop(reply.send(Ok(())));
        }
        self.positions_settled(&flight.slots);
        route.changed.notify_waiters();
        route.metrics.observe(Stage::Answer, answering.elapsed());
    }

    /// Positions are in the sink: what they cover is counted, and the group's offsets may follow.
    fn positions_settled(&mut self, slots: &[u32]) {
        self.positions_at = Instant::now();
        for slot in slots {
            for (outcome, records) in self.tally.remove(slot).into_iter().flatten() {
                self.route.metrics.count(outcome, records);
            }
            if let (Some(events), Some(shard)) = (&self.events, self.slots.get(slot)) {
                self.route.metrics.watermark(shard.watermark_ms);
                if let Some(position) = shard.position {
                    drop(events.send(FromLane::Progress { slot: *slot, position }));
                }
            }
        }
    }

    /// The record has its outcome: counted once, then told.
    fn finish(&mut self, record: &InFlight, answer: Answer) {
        match record.via {
            Via::Call => {
                self.route.metrics.count(answer.outcome, 1);
                self.works.answer(record.taken, answer);
            }
            Via::Relay => {
                let tally = self.tally.entry(record.slot).or_default();
                match tally.iter_mut().find(|(outcome, _)| *outcome == answer.outcome) {
                    Some((_, records)) => *records += 1,
                    None => tally.push((answer.outcome, 1)),
                }
                self.works.drop_record(record.taken);
            }
        }
    }

    /// Nothing of the batch is in the sink: its claims are given back and its records queue up again, in order.
    pub(super) fn put_back(&mut self, flight: Flight) {
        let mut records: Vec<InFlight> =
            flight.rows.into_iter().chain(flight.letters.into_iter().map(|letter| letter.record)).collect();
        let keys: Vec<Fingerprint> = records.iter().filter_map(|record| record.named().fingerprint).collect();
        self.route.store.release(self.id, &keys);
        // Stable: callers' records, which have no position, keep their order.
        records.sort_by_key(|record| (record.slot, record.named().position));
        for record in records.iter().rev() {
            if let (Some(offset), Some(shard)) = (record.named().position, self.slots.get_mut(&record.slot)) {
                shard.give_back(offset);
            }
            self.queue.push_front(record.taken);
        }
        self.route.changed.notify_waiters();
    }

    /// Copies that waited for `wait` are told that the first is still in flight.
    fn expire_waits(&mut self) {
        let wait = Duration::from_millis(self.route.rules.wait_ms);
        let works = &self.works;
        let over = |taken: &Taken| {
            let work = works.get(taken.work);
            work.via == Via::Call && work.received.elapsed() >= wait
        };
        if self.parked.iter().any(over) {
            let (over, waiting): (Vec<Taken>, Vec<Taken>) = self.parked.iter().copied().partition(over);
            self.parked = waiting.into();
            self.answer_all(over, &Problem::InFlight);
        }
    }

    fn answer_parked(&mut self) {
        let parked: Vec<Taken> = std::mem::take(&mut self.parked).into();
        let (calls, relayed): (Vec<Taken>, Vec<Taken>) =
            parked.into_iter().partition(|taken| self.works.get(taken.work).via == Via::Call);
        relayed.into_iter().for_each(|taken| self.works.drop_record(taken));
        self.answer_all(calls, &Problem::InFlight);
    }

    /// Callers whose records were not tried hear why; a relay's records wait.
    pub(super) fn answer_unavailable(&mut self, reason: &str) {
        let waiting = self.parked.drain(..).chain(self.queue.drain(..)).collect::<Vec<_>>();
        let (calls, relayed): (Vec<Taken>, Vec<Taken>) =
            waiting.into_iter().partition(|taken| self.works.get(taken.work).via == Via::Call);
        self.queue = relayed.into();
        self.answer_all(calls, &Problem::Unavailable(reason.into()));
        for (_, reply) in self.notes.drain(..) {
            drop(reply.send(Err(reason.into())));
        }
    }

    fn answer_all(&mut self, calls: Vec<Taken>, problem: &Problem) {
        self.route.metrics.count(Outcome::Unknown, calls.len() as u64);
        for taken in calls {
            let fingerprint = self.works.named(taken).fingerprint;
            let answer = Answer {
                outcome: Outcome::Unknown,
                fingerprint,
                first: None,
                problem: Some(problem.clone()),
            };
            self.works.answer(taken, answer);
        }
    }

    /// The store gives no verdicts: full (room comes with expiry), or stopped for good (rule 7).
    async fn store_fault(&mut self, fault: &StoreError) {
        let reason = fault.to_string();
        self.route.set_trouble(self.id, Some(reason.clone()));
        self.answer_unavailable(&reason);
        self.recheck = true;
        self.pause().await;
    }
}

fn letter_of<'a>(route: &'a str, step: &'a ShardStep, letter: &'a DeadRecord) -> Letter<'a> {
    let source = letter.record.source();
    Letter {
        route,
        shard: &step.shard,
        position: source.position,
        kind: letter.kind,
        reason: &letter.reason,
        key: source.key,
        event_ms: source.event_ms,
        payload: source.payload,
    }
}
