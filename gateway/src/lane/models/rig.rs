//! A few of the product's own lanes over one sink: every state of theirs can be copied, so that all that may happen next can be tried.
//! What is tried is the product's code ([`Lane`], [`Route`], the store) from check to answer; only the sink, the source and the group
//! are the model's.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fmt,
    rc::Rc,
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use adapters::sink::{Mode, RowKind, RowOutcome, ShardId, SinkError};
use dedup_store::{Algorithm, Digest, Fingerprint, Hasher, Identity, Item, Store, StoreOptions};
use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use xxhash_rust::xxh3::Xxh3;

use super::{
    search::{Broken, Model, Next, feed},
    sink::{Attempt, Bench, Db, Fares, Meanwhile, Plant, Sent, SentRow, Wire, Word, World, outcome},
};
use crate::{
    clock::{simulated, wall_ms},
    lane::{
        FromLane, LaneHandle, ToLane, Wanted,
        judge::{Rules, Via},
        run::{DeadRecord, Flight, Lane, POSITIONS_ONLY, RELAY},
        works::{Heard, Taken, Works},
    },
    metrics::{Metrics, RouteMetrics},
    naming::{Chunk, Named},
    outcome::{Answer, Outcome},
    route::Route,
};

/// One record of a log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rec {
    pub(super) key: u8,
    pub(super) row: u8,
    /// The sink refuses it.
    pub(super) poison: bool,
    pub(super) event_ms: i64,
}

/// A record whose row key is its key.
pub(super) fn rec(key: u8) -> Rec {
    Rec { key, row: key, poison: false, event_ms: 0 }
}

/// How often each thing may go wrong.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Faults {
    /// A connection ends; what was on its way may still come.
    pub(super) cuts: u8,
    /// The sink says that it did not take a batch.
    pub(super) refusals: u8,
    /// An instance dies.
    pub(super) crashes: u8,
    /// The group gives a partition to another lane.
    pub(super) moves: u8,
    /// The sink goes back to what it was before the last batch.
    pub(super) backs: u8,
    /// A batch that was taken comes once more.
    pub(super) doubles: u8,
    /// All of these together.
    pub(super) all: u8,
}

/// A small world.
pub(super) struct Setup {
    pub(super) instances: usize,
    /// Of each instance.
    pub(super) lanes: usize,
    /// The log of each partition, and the lane that has it at first, if any.
    pub(super) partitions: Vec<(Vec<Rec>, Option<usize>)>,
    /// What is called through each lane's own shard, if it has one.
    pub(super) calls: Vec<(usize, Vec<Rec>)>,
    pub(super) rules: Rules,
    pub(super) faults: Faults,
    /// Records that wait in a lane at most.
    pub(super) queue: usize,
    /// So many records at the end of each partition come only when its shard is idle already; none said: none.
    pub(super) later: Vec<usize>,
    /// The only partition that moves, if not all do.
    pub(super) moves: Option<usize>,
    /// Facts and marks expire.
    pub(super) expires: bool,
    /// Copies may come by any partition, so that an instance reads only while it has all (`scope = "route"`).
    pub(super) whole: bool,
    pub(super) plant: Option<Plant>,
}

/// What a crash leaves of an instance's store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Left {
    All,
    /// All but what was settled last.
    Older,
    Nothing,
}

/// What happens.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Read { partition: usize },
    Call { lane: usize },
    Turn { lane: usize },
    Land { at: usize, again: bool },
    Answer { lane: usize },
    Loses { lane: usize },
    Refuses { lane: usize },
    Cut { lane: usize },
    Comes { partition: usize },
    Expire { instance: usize },
    Tick { lane: usize },
    Assign { partition: usize },
    Revoke { lane: usize, partition: usize },
    Move { partition: usize, to: usize },
    Crash { instance: usize, left: Left },
    GoBack,
}

/// What happens, and what else happens in the middle of it, before the sink is asked for the nth time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Action {
    what: What,
    meanwhile: Option<(u8, Meanwhile)>,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.what {
            What::Read { partition } => write!(f, "the next record of partition {partition} is read"),
            What::Call { lane } => write!(f, "lane {lane} is called with its next record"),
            What::Turn { lane } => write!(f, "lane {lane} takes a turn: what it has is checked and sent"),
            What::Land { at, again: false } => write!(f, "batch {at} on its way gets to the sink"),
            What::Land { at, again: true } => {
                write!(f, "batch {at} on its way gets to the sink, and will get there once more")
            }
            What::Answer { lane } => write!(f, "lane {lane} hears what became of its batch"),
            What::Loses { lane } => {
                write!(f, "lane {lane} loses its connection before it hears what became of its batch")
            }
            What::Refuses { lane } => write!(f, "the sink does not take lane {lane}'s batch now"),
            What::Cut { lane } => write!(f, "the connection of lane {lane} ends"),
            What::Comes { partition } => write!(f, "more comes to partition {partition}, which was idle"),
            What::Expire { instance } => write!(f, "instance {instance} forgets what is old enough"),
            What::Tick { lane } => write!(f, "lane {lane} has old marks expire"),
            What::Assign { partition } => write!(f, "partition {partition} is taken over by its new lane"),
            What::Revoke { lane, partition } => write!(f, "lane {lane} lets partition {partition} go"),
            What::Move { partition, to } => write!(f, "the group gives partition {partition} to lane {to}"),
            What::Crash { instance, left } => {
                let left = match left {
                    Left::All => "its store is whole",
                    Left::Older => "its store lacks what was settled last",
                    Left::Nothing => "its store is lost",
                };
                write!(f, "instance {instance} dies and starts again; {left}")
            }
            What::GoBack => write!(f, "the sink goes back to what it was before the last batch"),
        }?;
        match &self.meanwhile {
            Some((call, meanwhile)) => write!(f, "; meanwhile, at call {call} to the sink, {meanwhile}"),
            None => Ok(()),
        }
    }
}

/// A lane at rest.
pub(super) struct Resting {
    pub(super) lane: Lane,
    /// The connection on which its shards were compared stands as far as the session knows.
    level: bool,
    /// Its batch on the way.
    pub(super) flight: Option<Flight>,
    /// Callers' records: place in the log by chunk.
    asked: BTreeMap<u32, usize>,
}

pub(super) struct Instance {
    pub(super) route: Arc<Route>,
    /// What a crash leaves if it takes what was settled last.
    older: Option<Arc<Store>>,
}

/// The door's view of a partition in one lane.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Reading {
    pub(super) lane: usize,
    generation: u64,
    next: i64,
}

/// The source and its group.
#[derive(Clone, Hash, Debug)]
pub(super) struct Group {
    /// Whom it gave each partition.
    pub(super) owners: Vec<Option<usize>>,
    /// Who reads each partition: a lane that was not told yet does, too.
    pub(super) readings: Vec<Vec<Reading>>,
    pub(super) committed: Vec<i64>,
    /// Whether the records have come that come later.
    come: Vec<bool>,
    /// By callers' log: records called so far, and outcomes told by place.
    pub(super) called: Vec<usize>,
    pub(super) told: BTreeMap<(usize, usize), Outcome>,
    /// Outcomes counted of relays' records.
    pub(super) counted: u64,
    /// Some lane said that the sink went back.
    pub(super) reported: bool,
    /// Offsets were committed that the sink does not have any more, and whoever committed them knows of them still.
    pub(super) to_report: bool,
    pub(super) stopped: bool,
    /// Partitions that moved before their first batch: nothing says how far they have come, and they are judged as their route is.
    moved_unbegun: Vec<bool>,
    /// A crash or a hand-over may have taken counts along.
    pub(super) uncounted: bool,
}

/// All of it.
pub(super) struct State {
    pub(super) world: World,
    pub(super) group: Group,
    pub(super) instances: Vec<Rc<Instance>>,
    pub(super) lanes: Vec<Rc<Resting>>,
    left: Faults,
}

impl Clone for State {
    fn clone(&self) -> Self {
        Self {
            world: self.world.clone(),
            group: self.group.clone(),
            instances: self.instances.clone(),
            lanes: self.lanes.clone(),
            left: self.left,
        }
    }
}

/// By the models' wall clock, which stands still but for what lanes wait.
pub(super) const NOW_MS: i64 = 1_000_000_000;

fn now_ms() -> i64 {
    block_on(async { wall_ms() })
}

thread_local! {
    static METRICS: RefCell<Option<Arc<RouteMetrics>>> = const { RefCell::new(None) };
    static RUNTIME: tokio::runtime::Runtime = {
        let paused = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        paused.block_on(async { simulated::start(NOW_MS * 1_000, 1) });
        paused
    };
}

fn metrics() -> Arc<RouteMetrics> {
    METRICS.with_borrow_mut(|metrics| metrics.get_or_insert_with(|| Metrics::new().route("model")).clone())
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    RUNTIME.with(|runtime| runtime.block_on(future))
}

fn hasher() -> (Identity, Hasher) {
    let identity =
        Identity { route_id: [3; 16], key_spec_id: 1, algorithm: Algorithm::Xxh3Secret, secret: [9; 192] };
    let hasher = Hasher::new(&identity);
    (identity, hasher)
}

pub(super) fn key_of(key: u8) -> Fingerprint {
    Fingerprint([key; 16])
}

fn shard_of(partition: usize) -> ShardId {
    format!("kafka/c/t/{partition}").into()
}

fn chunk_of(rec: &Rec, place: usize, shard: u32, position: Option<i64>) -> Chunk {
    let row = SentRow::bytes(rec.key, rec.row, rec.poison, place as u8);
    Chunk {
        bytes: row.to_vec(),
        records: vec![Named {
            fingerprint: Some(key_of(rec.key)),
            digest: Digest(u64::from(rec.key)),
            event_ms: rec.event_ms,
            kind: RowKind::Write,
            payload: Some(0..4),
            row: 0..4,
            row_key: 1..2,
            shard,
            position,
            problem: None,
        }],
    }
}

fn again(flight: &Flight) -> Flight {
    Flight {
        rows: flight.rows.clone(),
        letters: flight
            .letters
            .iter()
            .map(|letter| DeadRecord {
                record: letter.record.clone(),
                kind: letter.kind,
                reason: letter.reason.clone(),
                settle: letter.settle,
            })
            .collect(),
        notes: Vec::new(),
        slots: flight.slots.clone(),
        steps: flight.steps.clone(),
        known_new: flight.known_new,
    }
}

/// The same lane once more, over `route` and `bench`.
fn twin(
    of: &Resting,
    route: &Arc<Route>,
    bench: &Arc<Mutex<Bench>>,
) -> (Lane, mpsc::UnboundedReceiver<FromLane>, Heard) {
    let (events, heard) = mpsc::unbounded_channel();
    let (works, answers) = of.lane.works.twin();
    let lane = Lane {
        id: of.lane.id,
        route: route.clone(),
        session: Box::new(Wire(bench.clone())),
        inbox: mpsc::channel(1).1,
        hand_overs: Arc::new(AtomicUsize::new(0)),
        events: of.lane.events.is_some().then_some(events),
        letters: None,
        call_shard: of.lane.call_shard.clone(),
        slots: of.lane.slots.clone(),
        works,
        queue: of.lane.queue.clone(),
        parked: of.lane.parked.clone(),
        unpark: of.lane.unpark,
        queued: of.lane.queued,
        history: of.lane.history,
        life: adapters::sink::Life::over(),
        tally: of.lane.tally.clone(),
        notes: Vec::new(),
        recheck: of.lane.recheck,
        failures: 0,
        next_generation: of.lane.next_generation,
        heartbeat_at: Instant::now(),
        expired_at: Instant::now(),
        stopping: false,
        tick_at: Instant::now(),
        positions_at: Instant::now() - POSITIONS_ONLY,
        unresolved: of.lane.unresolved,
        last_positions: of.lane.last_positions,
        busy: of.lane.busy,
        held_elsewhere: of.lane.held_elsewhere,
        closing_since: None,
        gives_up: of.lane.gives_up,
    };
    (lane, heard, answers)
}

/// One action of one lane, under way.
struct Doing {
    route: Arc<Route>,
    lane: Lane,
    bench: Arc<Mutex<Bench>>,
    events: mpsc::UnboundedReceiver<FromLane>,
    answers: Heard,
    asked: BTreeMap<u32, usize>,
    flight: Option<Flight>,
    counted: u64,
    regressed: u64,
    before: Arc<Route>,
}

fn counted(metrics: &RouteMetrics) -> u64 {
    Outcome::ALL.into_iter().map(|outcome| metrics.counted(outcome)).sum()
}

impl Setup {
    fn later(&self, partition: usize) -> usize {
        self.later.get(partition).copied().unwrap_or(0)
    }

    /// How many records of a partition are there.
    fn there(&self, group: &Group, partition: usize) -> usize {
        let all = self.partitions[partition].0.len();
        if group.come[partition] { all } else { all - self.later(partition) }
    }

    fn instance_of(&self, lane: usize) -> usize {
        lane / self.lanes
    }

    fn lanes_of(&self, instance: usize) -> std::ops::Range<usize> {
        instance * self.lanes..(instance + 1) * self.lanes
    }

    pub(super) fn keys(&self) -> Vec<u8> {
        let logs = self.partitions.iter().map(|(log, _)| log).chain(self.calls.iter().map(|(_, log)| log));
        let mut keys: Vec<u8> = logs.flatten().map(|rec| rec.key).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    fn options(&self) -> StoreOptions {
        StoreOptions {
            window_ms: self.rules.window_ms,
            lateness_ms: self.rules.lateness_ms,
            // What is awaited is not idle.
            idle_after_ms: 0,
            max_disk_bytes: 1 << 30,
            max_memory_bytes: 1 << 30,
            commit_interval_ms: 1,
        }
    }

    fn open(&self, store: Option<Store>) -> Arc<Route> {
        let (identity, hasher) = hasher();
        let store = store.unwrap_or_else(|| Store::in_memory(self.options()));
        store.bind(&identity).expect("one identity");
        // Without marks nothing could be learnt again, and a shard is taken as it is.
        let marks = self.plant != Some(Plant::LagIgnored);
        let copies_anywhere = self.whole && self.plant != Some(Plant::OwnFloorOnly);
        let (store, rules) = (Arc::new(store), Rules { copies_anywhere, ..self.rules.clone() });
        Arc::new(Route::new("model".into(), store, hasher, rules, metrics(), false, marks))
    }

    /// A lane that was just started.
    fn start(&self, route: &Arc<Route>, number: usize) -> Resting {
        let relay = !self.calls.iter().any(|(lane, _)| *lane == number);
        let (events, _) = mpsc::unbounded_channel();
        let bench = Arc::new(Mutex::new(self.bench(
            World {
                db: Arc::default(),
                older: None,
                alive: vec![false; self.instances * self.lanes],
                attempts: Vec::new(),
                went_back: false,
                broken: None,
            },
            number,
            None,
        )));
        let mut lane = block_on(async {
            let handle = LaneHandle::new(mpsc::channel(1).0);
            Lane::new(
                number as u32,
                route.clone(),
                Box::new(Wire(bench)),
                mpsc::channel(1).1,
                handle.hand_overs(),
                relay.then_some(events),
                None,
                None,
                Vec::new(),
            )
        });
        lane.call_shard = (!relay).then(|| format!("http/{number}").into());
        Resting { lane, level: false, flight: None, asked: BTreeMap::new() }
    }

    fn bench(&self, world: World, lane: usize, meanwhile: Option<(u8, Meanwhile)>) -> Bench {
        let pulse = world.alive[lane].then(adapters::sink::Pulse::begin);
        Bench { world, lane, plant: self.plant, pulse, meanwhile, calls: 0, word: Word::Never, sent: None }
    }

    /// Begins an action of one lane.
    fn begin(&self, state: &mut State, lane: usize, meanwhile: Option<(u8, Meanwhile)>) -> Doing {
        let resting = &state.lanes[lane];
        let before = state.instances[self.instance_of(lane)].route.clone();
        let route = Arc::new(before.twin());
        let bench = Arc::new(Mutex::new(self.bench(state.world.clone(), lane, meanwhile)));
        // As the door says: these shards have records to come.
        let instance = self.lanes_of(self.instance_of(lane));
        let more: Vec<ShardId> = (0..self.partitions.len())
            .filter(|&partition| state.group.owners[partition].is_some_and(|owner| instance.contains(&owner)))
            .filter(|&partition| {
                state.group.committed[partition] < self.there(&state.group, partition) as i64
            })
            .map(shard_of)
            .collect();
        block_on(async { route.store.awaits(RELAY, &more, wall_ms()) });
        // In the runtime, whose clock stands still.
        let (mut twin, events, answers) = block_on(async { twin(resting, &route, &bench) });
        if resting.level {
            twin.life = twin.session.life();
        }
        Doing {
            counted: counted(&route.metrics),
            regressed: route.metrics.regressed_so_far(),
            route,
            lane: twin,
            bench,
            events,
            answers,
            asked: resting.asked.clone(),
            flight: resting.flight.as_ref().map(again),
            before,
        }
    }

    /// Ends it: what came of it is the next state's. Answers with how often the sink was asked.
    fn end(&self, state: &mut State, number: usize, mut doing: Doing) -> u8 {
        let mut bench = doing.bench.lock();
        bench.see();
        state.world = bench.world.clone();
        let calls = bench.calls;
        drop(bench);
        let relay = doing.lane.events.is_some();
        if relay {
            let counted = counted(&doing.route.metrics) - doing.counted;
            state.group.counted += counted;
        }
        state.group.reported |= doing.route.metrics.regressed_so_far() > doing.regressed;
        while let Ok(event) = doing.events.try_recv() {
            self.hear(state, number, event);
        }
        let log = self.calls.iter().position(|(lane, _)| *lane == number);
        for (chunk, mut answers) in doing.answers {
            let Some(place) = doing.asked.get(&chunk).copied() else { continue };
            if let (Ok(answers), Some(log)) = (answers.try_recv(), log) {
                doing.asked.remove(&chunk);
                self.told(state, log, place, &answers);
            }
        }
        let instance = self.instance_of(number);
        let settled = doing.route.store.latest() != doing.before.store.latest();
        let older = if *doing.route.history.read() != *doing.before.history.read() {
            // That a store was discarded is durable at once.
            None
        } else if settled {
            doing.before.store.twin().map(Arc::new)
        } else {
            state.instances[instance].older.clone()
        };
        let level = doing.lane.life.stands();
        state.instances[instance] = Rc::new(Instance { route: doing.route, older });
        state.lanes[number] =
            Rc::new(Resting { lane: doing.lane, level, flight: doing.flight, asked: doing.asked });
        calls
    }

    /// A caller hears.
    fn told(&self, state: &mut State, log: usize, place: usize, answers: &[Answer]) {
        let [answer] = answers else {
            let what = format!("a call of one record has {} answers", answers.len());
            return state.world.breaks("one_outcome", what);
        };
        let before = state.group.told.insert((log, place), answer.outcome);
        let key = self.calls[log].1[place].key;
        if before.is_some() {
            state.world.breaks("one_outcome", format!("call {place} was answered twice"));
        }
        let effects = state.world.db.effects(key);
        let took = matches!(answer.outcome, Outcome::Written | Outcome::Duplicate);
        if took && effects == 0 && !state.world.went_back {
            let what = format!("key {key} was answered as {}, and is not there", answer.outcome.word());
            state.world.breaks("nothing_lost", what);
        }
    }

    /// What a lane tells its door.
    fn hear(&self, state: &mut State, lane: usize, event: FromLane) {
        let group = &mut state.group;
        match event {
            FromLane::Progress { slot, position } => {
                // A member that was left out of the group commits nothing.
                if group.owners[slot as usize] == Some(lane) {
                    group.committed[slot as usize] = position;
                }
            }
            FromLane::Seek { slot, generation, position } => {
                for reading in group.readings[slot as usize].iter_mut().filter(|reading| reading.lane == lane)
                {
                    (reading.generation, reading.next) = (generation, position.unwrap_or(0));
                }
                if group.owners[slot as usize] == Some(lane) {
                    group.committed[slot as usize] = position.unwrap_or(0);
                }
            }
            FromLane::Fenced { slot, .. } => {
                group.readings[slot as usize].retain(|reading| reading.lane != lane);
            }
            FromLane::Stopped { slot, .. } => {
                group.readings[slot as usize].retain(|reading| reading.lane != lane);
                group.stopped = true;
            }
        }
    }

    /// What is in a lane when its turn comes, and whether it has one.
    fn has_turn(&self, state: &State, lane: usize) -> bool {
        let resting = &state.lanes[lane];
        let lane = &resting.lane;
        let owns = !lane.slots.is_empty() || lane.call_shard.is_some();
        let disconnected = !resting.level || !state.world.alive[lane.id as usize] || lane.recheck;
        let route = &state.instances[self.instance_of(lane.id as usize)].route;
        let current = *route.history.read() == lane.history;
        resting.flight.is_none()
            && (lane.has_work(&route.store) || lane.positions_moved() || (owns && (disconnected || !current)))
    }

    fn turn(&self, state: &mut State, lane: usize, meanwhile: Option<(u8, Meanwhile)>) -> u8 {
        let mut doing = self.begin(state, lane, meanwhile);
        let flight = block_on(async {
            if !doing.lane.ready(false).await {
                return None;
            }
            self.before_verdicts(&mut doing);
            let mut flight = doing.lane.check().expect("the store has room");
            if self.plant == Some(Plant::ParkedPassed) {
                pass_parked(&mut doing.lane, flight.as_mut());
            }
            if let Some(flight) = &flight {
                // The batch as it is sent, its marks included.
                assert!(doing.lane.deliver(again(flight)).now_or_never().is_none(), "nobody answers yet");
            }
            flight
        });
        if let Some(flight) = flight {
            let sent = doing.bench.lock().sent.take().expect("a flight is sent");
            self.check_recut(&mut doing, &sent);
            doing.bench.lock().world.attempts.push(Attempt { lane, sent, fares: Fares::OnItsWay });
            if self.plant == Some(Plant::ClaimsDropped) {
                doing.route.store.release_lane(lane as u32);
            }
            self.check_late(&mut doing, &flight, &state.group.moved_unbegun);
            doing.flight = Some(flight);
        }
        self.end(state, lane, doing)
    }

    /// P6: the store is not ahead of the sink where verdicts are given.
    fn before_verdicts(&self, doing: &mut Doing) {
        if self.plant == Some(Plant::OldReading) {
            doing.lane.works.forget_generations();
        }
        if doing.lane.queue.is_empty() && doing.lane.parked.is_empty() {
            return;
        }
        let mut bench = doing.bench.lock();
        for checkpoint in doing.route.store.checkpoints() {
            let sink = bench.world.db.shards.get(&checkpoint.shard).map_or(0, |row| row.sequence);
            if checkpoint.sequence > sink {
                let what = format!(
                    "{} is at {} in the store and at {sink} in the sink when a verdict is given",
                    checkpoint.shard, checkpoint.sequence
                );
                bench.world.breaks("store_not_ahead", what);
            }
        }
        for key in self.keys() {
            let known = doing.route.store.peek(&key_of(key)).expect("it is in memory");
            if known.is_some() && !bench.world.db.decided(key) {
                let what =
                    format!("key {key} is settled in the store and not in the sink when a verdict is given");
                bench.world.breaks("store_not_ahead", what);
            }
        }
    }

    /// P11: a record of a shard that is not idle and has not moved before its first batch, and not older than what came before it in its shard by more than the lateness, is
    /// not late, whoever owns the shard and whatever other shards do.
    fn check_late(&self, doing: &mut Doing, flight: &Flight, moved_unbegun: &[bool]) {
        for letter in flight.letters.iter().filter(|letter| letter.kind == "late") {
            let named = letter.record.named();
            let (partition, place) = (named.shard as usize, named.position.unwrap_or(0) as usize);
            let log = &self.partitions[partition].0;
            let latest_ms = now_ms() + self.rules.max_ahead_ms;
            let before =
                log[..place].iter().map(|rec| rec.event_ms).filter(|event_ms| *event_ms <= latest_ms);
            let in_time = before.max().is_none_or(|seen| named.event_ms >= seen - self.rules.lateness_ms);
            if in_time && !moved_unbegun[partition] && place < log.len() - self.later(partition) {
                let what = format!("record {place} of partition {partition} is in time, and refused as late");
                doing.bench.lock().world.breaks("in_time_not_late", what);
            }
        }
    }

    /// P5: while an unknown batch may still come, none of its records go again.
    fn check_recut(&self, doing: &mut Doing, sent: &Sent) {
        let mut bench = doing.bench.lock();
        if !bench.world.passes(sent) {
            // Another owner has the shard: it is this batch that gets nowhere.
            return;
        }
        let same = |attempt: &&Attempt| {
            let rows = &attempt.sent.rows;
            rows.iter().any(|row| !row.poison && sent.rows.iter().any(|other| other.key == row.key))
        };
        let adrift = bench.world.attempts.iter().filter(same).find(|attempt| bench.world.could_land(attempt));
        if let Some(adrift) = adrift {
            let what = format!("lane {}'s batch may still come when its records are sent again", adrift.lane);
            bench.world.breaks("unknown_never_recut", what);
        }
    }

    fn answer(&self, state: &mut State, lane: usize, word: Word, meanwhile: Option<(u8, Meanwhile)>) -> u8 {
        let mut doing = self.begin(state, lane, meanwhile);
        doing.bench.lock().word = word;
        let flight = doing.flight.take().expect("a batch is on its way");
        let keys: Vec<Named> = flight.records().map(|record| record.named().clone()).collect();
        let not_taken = matches!(&doing.bench.lock().word, Word::Fault(SinkError::NotApplied { .. }));
        block_on(doing.lane.deliver(flight));
        if self.plant == Some(Plant::AgainReversed) && not_taken {
            doing.lane.queue.make_contiguous().reverse();
        }
        if self.plant == Some(Plant::ClaimsKept) && not_taken {
            let item = |named: &Named| Item {
                fingerprint: named.fingerprint.expect("it has a key"),
                digest: named.digest,
                event_ms: named.event_ms,
                floor_ms: i64::MIN,
                admit_late: true,
                replay_dead_letter: false,
            };
            let items: Vec<Item> = keys.iter().map(item).collect();
            doing.route.store.claim(lane as u32, i64::MAX, &items, &mut Vec::new()).expect("there is room");
        }
        self.end(state, lane, doing)
    }

    /// The attempt that a lane waits for.
    fn attempt(world: &World, lane: usize) -> Option<usize> {
        world.attempts.iter().position(|attempt| attempt.lane == lane && attempt.fares != Fares::Adrift)
    }

    fn assign(&self, state: &mut State, partition: usize, meanwhile: Option<(u8, Meanwhile)>) -> u8 {
        let lane = state.group.owners[partition].expect("the group gave it to a lane");
        let mut doing = self.begin(state, lane, meanwhile);
        let wanted =
            Wanted { slot: partition as u32, shard: shard_of(partition), source: None, renew: false };
        let assigned = block_on(doing.lane.assign(vec![wanted]));
        let calls = self.end(state, lane, doing);
        if let Ok(assigned) = assigned {
            let assigned = &assigned[0];
            let (generation, next) = (assigned.generation, assigned.position.unwrap_or(0));
            // The door commits where it begins: that proves the group's generation (P13).
            state.group.committed[partition] = next;
            let readings = &mut state.group.readings[partition];
            readings.retain(|reading| reading.lane != lane);
            readings.push(Reading { lane, generation, next });
        }
        calls
    }

    fn read(&self, state: &mut State, partition: usize, lane: usize) {
        let mut doing = self.begin(state, lane, None);
        let reading = state.group.readings[partition]
            .iter_mut()
            .find(|reading| reading.lane == lane)
            .expect("it reads");
        let rec = &self.partitions[partition].0[reading.next as usize];
        let place = reading.next as usize;
        let chunk = chunk_of(rec, place, partition as u32, Some(reading.next));
        let generations = Arc::from([(partition as u32, reading.generation)]);
        reading.next += 1;
        doing.lane.take_in_offline(ToLane::Relay { chunk, generations });
        self.end(state, lane, doing);
    }

    fn call(&self, state: &mut State, log: usize) {
        let (lane, records) = &self.calls[log];
        let mut doing = self.begin(state, *lane, None);
        let place = state.group.called[log];
        state.group.called[log] += 1;
        let (reply, answers) = oneshot::channel();
        let chunk = chunk_of(&records[place], place, 0, None);
        let before = doing.lane.queue.len();
        doing.lane.take_in_offline(ToLane::Submit { chunk, reply });
        let work = doing.lane.queue[before].work;
        doing.asked.insert(work, place);
        doing.answers.push((work, answers));
        self.end(state, *lane, doing);
    }

    fn revoke(&self, state: &mut State, lane: usize, partition: usize) {
        let mut doing = self.begin(state, lane, None);
        let (reply, _answer) = oneshot::channel();
        let hand_over = LaneHandle::new(mpsc::channel(1).0).hand_over();
        doing.lane.take_in_offline(ToLane::Revoke { slots: Some(vec![partition as u32]), hand_over, reply });
        state.group.readings[partition].retain(|reading| reading.lane != lane);
        self.end(state, lane, doing);
    }

    fn crash(&self, state: &mut State, instance: usize, left: Left) {
        let old = &state.instances[instance];
        let store = match left {
            Left::All => old.route.store.twin(),
            Left::Older => old.older.as_ref().and_then(|store| store.twin()),
            Left::Nothing => None,
        };
        for lane in self.lanes_of(instance) {
            if let Some(store) = &store {
                store.release_lane(lane as u32);
            }
        }
        let route = self.open(store);
        for lane in self.lanes_of(instance) {
            state.lanes[lane] = Rc::new(self.start(&route, lane));
            state.world.cut(lane);
            // What was on its way may still come.
            state.world.attempts.retain_mut(|attempt| {
                let mine = attempt.lane == lane;
                let comes = matches!(attempt.fares, Fares::OnItsWay | Fares::Adrift);
                if mine {
                    attempt.fares = Fares::Adrift;
                }
                !mine || comes
            });
            for readings in &mut state.group.readings {
                readings.retain(|reading| reading.lane != lane);
            }
        }
        state.instances[instance] = Rc::new(Instance { route, older: None });
    }

    fn go_back(&self, state: &mut State) {
        state.world.go_back(self.plant);
    }
}

/// Each step's position passes what is parked.
fn pass_parked(lane: &mut Lane, flight: Option<&mut Flight>) {
    let Some(flight) = flight else { return };
    for (slot, step) in flight.slots.iter().zip(&mut flight.steps) {
        if let Some(shard) = lane.slots.get_mut(slot) {
            shard.forget_parked();
            step.position = shard.prefix();
        }
    }
}

/// What a fault costs.
fn spend(left: &Faults, one: impl Fn(&mut Faults) -> &mut u8) -> Option<Faults> {
    let mut left = *left;
    let of_kind = one(&mut left);
    *of_kind = of_kind.checked_sub(1)?;
    left.all = left.all.checked_sub(1)?;
    Some(left)
}

impl Setup {
    /// All that may follow one action that asks the sink: as it is, and with one thing going wrong at each of its calls.
    fn asking(
        &self,
        state: &State,
        what: What,
        expected: bool,
        into: &mut Vec<Next<Self>>,
        act: impl Fn(&mut State, Option<(u8, Meanwhile)>) -> u8,
    ) {
        let mut next = state.clone();
        let calls = act(&mut next, None);
        into.push(Next { action: Action { what, meanwhile: None }, state: next, expected });
        for call in 0..calls {
            let mut with = |meanwhile: Meanwhile, left: Faults| {
                let mut next = state.clone();
                next.left = left;
                let meanwhile = Some((call, meanwhile));
                act(&mut next, meanwhile);
                into.push(Next { action: Action { what, meanwhile }, state: next, expected: false });
            };
            if let Some(left) = spend(&state.left, |left| &mut left.cuts) {
                with(Meanwhile::Cut, left);
                with(Meanwhile::CutAfter, left);
            }
            for (at, attempt) in state.world.attempts.iter().enumerate() {
                if attempt.fares == Fares::Adrift && call > 0 {
                    with(Meanwhile::Lands(at), state.left);
                }
            }
            if call > 0
                && state.world.older.is_some()
                && let Some(left) = spend(&state.left, |left| &mut left.backs)
            {
                with(Meanwhile::GoesBack, left);
            }
        }
    }

    fn plain(
        &self,
        state: &State,
        what: What,
        expected: bool,
        into: &mut Vec<Next<Self>>,
        act: impl FnOnce(&mut State),
    ) {
        let mut next = state.clone();
        act(&mut next);
        into.push(Next { action: Action { what, meanwhile: None }, state: next, expected });
    }

    fn steps_of_sources(&self, state: &State, into: &mut Vec<Next<Self>>) {
        let has_all = |lane: usize| {
            let instance = self.lanes_of(self.instance_of(lane));
            let has =
                |readings: &Vec<Reading>| readings.iter().any(|reading| instance.contains(&reading.lane));
            state.group.readings.iter().all(has)
        };
        for (partition, readings) in state.group.readings.iter().enumerate() {
            for reading in readings.iter().filter(|reading| !self.whole || has_all(reading.lane)) {
                let resting = &state.lanes[reading.lane];
                let room = resting.lane.queue.len() < self.queue;
                if room && (reading.next as usize) < self.there(&state.group, partition) {
                    let what = What::Read { partition };
                    self.plain(state, what, true, into, |next| self.read(next, partition, reading.lane));
                }
            }
            let Some(owner) = state.group.owners[partition] else { continue };
            let mine = readings.iter().any(|reading| reading.lane == owner);
            let instance = self.lanes_of(self.instance_of(owner));
            let held = readings.iter().any(|reading| instance.contains(&reading.lane));
            if !mine && !held && state.lanes[owner].flight.is_none() && !state.group.stopped {
                self.asking(state, What::Assign { partition }, true, into, |next, meanwhile| {
                    self.assign(next, partition, meanwhile)
                });
            }
            for reading in readings.iter().filter(|reading| reading.lane != owner) {
                if state.lanes[reading.lane].flight.is_none() {
                    let lane = reading.lane;
                    self.plain(state, What::Revoke { lane, partition }, true, into, |next| {
                        self.revoke(next, lane, partition)
                    });
                }
            }
        }
        for partition in 0..self.partitions.len() {
            let read = state.group.committed[partition] >= self.there(&state.group, partition) as i64;
            if read && !state.group.come[partition] {
                self.plain(state, What::Comes { partition }, true, into, |next| {
                    next.group.come[partition] = true
                });
            }
        }
        for (log, (lane, records)) in self.calls.iter().enumerate() {
            if state.group.called[log] < records.len() && state.lanes[*lane].lane.queue.len() < self.queue {
                self.plain(state, What::Call { lane: *lane }, true, into, |next| self.call(next, log));
            }
        }
    }

    fn steps_of_lane(&self, state: &State, lane: usize, into: &mut Vec<Next<Self>>) {
        if self.has_turn(state, lane) {
            self.asking(state, What::Turn { lane }, true, into, |next, meanwhile| {
                self.turn(next, lane, meanwhile)
            });
        }
        let Some(at) = Self::attempt(&state.world, lane) else { return };
        let attempt = &state.world.attempts[at];
        let alive = state.world.alive[lane];
        if alive && attempt.fares != Fares::OnItsWay {
            let word = match &attempt.fares {
                Fares::In => Some(Word::Receipts(attempt.sent.rows.iter().map(said(self.plant)).collect())),
                Fares::HeldOff { by_owner: true } => {
                    let step = attempt.sent.steps.iter().find(|step| {
                        state.world.db.shards.get(&step.shard).is_some_and(|row| row.epoch > step.epoch)
                    });
                    step.map(|step| {
                        let (shard, epoch) = (step.shard.to_string(), step.epoch + 1);
                        Word::Fault(SinkError::Fenced { shard, owner: "another".into(), epoch })
                    })
                }
                _ => None,
            };
            if let Some(word) = word {
                self.asking(state, What::Answer { lane }, true, into, |next, meanwhile| {
                    next.world.attempts.remove(at);
                    self.answer(next, lane, word.clone(), meanwhile)
                });
                // The rest costs a fault.
            } else {
                self.loses(state, lane, at, state.left, true, into);
            }
        }
        let left = spend(&state.left, |left| &mut left.cuts);
        match left {
            // Its connection is gone already, and it will see.
            _ if !alive => self.loses(state, lane, at, state.left, true, into),
            Some(left) => self.loses(state, lane, at, left, false, into),
            None => {}
        }
        if alive
            && attempt.fares == Fares::OnItsWay
            && let Some(left) = spend(&state.left, |left| &mut left.refusals)
        {
            self.plain(state, What::Refuses { lane }, false, into, |next| {
                next.left = left;
                next.world.attempts.remove(at);
                let fault = SinkError::NotApplied { reason: "not now".into(), retry: true };
                self.answer(next, lane, Word::Fault(fault), None);
            });
        }
    }

    /// What is done from time to time.
    fn steps_of_time(&self, state: &State, into: &mut Vec<Next<Self>>) {
        let now_ms = now_ms();
        for instance in (0..self.instances).filter(|_| self.expires) {
            let lane = instance * self.lanes;
            let store = &state.instances[instance].route.store;
            let retire_ms = store.floors(now_ms).retire_ms;
            if store.forgets_ms(now_ms) > store.stats(now_ms).floor_ms {
                self.plain(state, What::Expire { instance }, true, into, |next| {
                    let doing = self.begin(next, lane, None);
                    block_on(async { doing.route.store.expire(wall_ms()) }).expect("a store in memory");
                    self.end(next, lane, doing);
                });
            }
            let at_work = |lane: &usize| {
                let resting = &state.lanes[*lane];
                let some_old = resting.lane.slots.values().any(|shard| shard.floor_ms < retire_ms);
                let level = resting.level && !resting.lane.recheck && state.world.alive[*lane];
                some_old && level && resting.flight.is_none()
            };
            for lane in self.lanes_of(instance).filter(at_work) {
                self.asking(state, What::Tick { lane }, true, into, |next, meanwhile| {
                    let mut doing = self.begin(next, lane, meanwhile);
                    block_on(async {
                        // Long ago.
                        doing.lane.expired_at = Instant::now() - Duration::from_secs(60);
                        doing.lane.tick().await;
                    });
                    self.end(next, lane, doing)
                });
            }
        }
    }

    /// The lane does not hear what became of its batch.
    fn loses(
        &self,
        state: &State,
        lane: usize,
        at: usize,
        left: Faults,
        expected: bool,
        into: &mut Vec<Next<Self>>,
    ) {
        let mut lost = state.clone();
        lost.left = left;
        if lost.world.attempts[at].fares == Fares::OnItsWay {
            lost.world.attempts[at].fares = Fares::Adrift;
        } else {
            lost.world.attempts.remove(at);
        }
        if self.plant != Some(Plant::UnknownAsFailed) {
            lost.world.cut(lane);
        }
        let reason = "the connection ended".to_owned();
        let fault = match self.plant {
            Some(Plant::UnknownAsFailed) => SinkError::NotApplied { reason, retry: true },
            _ => SinkError::Unknown { reason },
        };
        let from = into.len();
        self.asking(&lost, What::Loses { lane }, expected, into, |next, meanwhile| {
            self.answer(next, lane, Word::Fault(fault.clone()), meanwhile)
        });
        // A lane asks until it hears.
        into[from..].iter_mut().for_each(|next| next.expected &= expected);
    }

    fn steps_of_sink(&self, state: &State, into: &mut Vec<Next<Self>>) {
        for (at, attempt) in state.world.attempts.iter().enumerate() {
            let on_its_way = matches!(attempt.fares, Fares::OnItsWay | Fares::Adrift);
            if !on_its_way {
                continue;
            }
            let expected = attempt.fares == Fares::OnItsWay;
            let what = What::Land { at, again: false };
            self.plain(state, what, expected, into, |next| next.world.land(at, self.plant));
            if let Some(left) = spend(&state.left, |left| &mut left.doubles) {
                self.plain(state, What::Land { at, again: true }, false, into, |next| {
                    next.left = left;
                    let double = Attempt { fares: Fares::Adrift, ..next.world.attempts[at].clone() };
                    next.world.land(at, self.plant);
                    next.world.attempts.push(double);
                });
            }
        }
        if state.world.older.is_some()
            && let Some(left) = spend(&state.left, |left| &mut left.backs)
        {
            self.plain(state, What::GoBack, false, into, |next| {
                next.left = left;
                self.go_back(next);
            });
        }
    }

    fn steps_of_faults(&self, state: &State, into: &mut Vec<Next<Self>>) {
        if let Some(left) = spend(&state.left, |left| &mut left.cuts) {
            for lane in 0..state.lanes.len() {
                // One whose batch is on its way: see `loses`.
                if state.world.alive[lane] && state.lanes[lane].flight.is_none() {
                    self.plain(state, What::Cut { lane }, false, into, |next| {
                        next.left = left;
                        next.world.cut(lane);
                    });
                }
            }
        }
        if let Some(left) = spend(&state.left, |left| &mut left.crashes) {
            for instance in 0..self.instances {
                for stays in [Left::All, Left::Older, Left::Nothing] {
                    if stays == Left::Older && state.instances[instance].older.is_none() {
                        continue;
                    }
                    let what = What::Crash { instance, left: stays };
                    self.plain(state, what, false, into, |next| {
                        next.left = left;
                        self.crash(next, instance, stays);
                    });
                }
            }
        }
        if let Some(left) = spend(&state.left, |left| &mut left.moves) {
            for (partition, owner) in state.group.owners.iter().enumerate() {
                if self.moves.is_some_and(|moves| moves != partition) {
                    continue;
                }
                for to in (0..state.lanes.len()).filter(|to| Some(*to) != *owner) {
                    if self.calls.iter().any(|(lane, _)| *lane == to) {
                        continue;
                    }
                    self.plain(state, What::Move { partition, to }, false, into, |next| {
                        next.left = left;
                        next.group.owners[partition] = Some(to);
                        let row = next.world.db.shards.get(&shard_of(partition));
                        next.group.moved_unbegun[partition] |= row.is_none_or(|row| row.sequence == 0);
                    });
                }
            }
        }
    }

    /// Where each record of a partition has its outcome, as far as the sink is.
    fn undecided_before(&self, db: &Db, partition: usize, position: i64) -> Option<usize> {
        let log = &self.partitions[partition].0;
        (0..log.len().min(position.max(0) as usize)).find(|&at| !db.decided(log[at].key))
    }
}

/// What a sink says of each row.
fn said(plant: Option<Plant>) -> impl Fn(&SentRow) -> RowOutcome {
    move |row| if plant == Some(Plant::RefusedAsWritten) { RowOutcome::Written } else { outcome(row) }
}

impl Model for Setup {
    type State = State;
    type Action = Action;

    fn initial(&self) -> State {
        let lanes = self.instances * self.lanes;
        let routes: Vec<Arc<Route>> = (0..self.instances).map(|_| self.open(None)).collect();
        let resting = (0..lanes).map(|lane| Rc::new(self.start(&routes[self.instance_of(lane)], lane)));
        let mut state = State {
            lanes: resting.collect(),
            instances: routes.into_iter().map(|route| Rc::new(Instance { route, older: None })).collect(),
            world: World {
                db: Arc::default(),
                older: None,
                alive: vec![false; lanes],
                attempts: Vec::new(),
                went_back: false,
                broken: None,
            },
            group: Group {
                owners: self.partitions.iter().map(|(_, owner)| *owner).collect(),
                readings: vec![Vec::new(); self.partitions.len()],
                committed: vec![0; self.partitions.len()],
                come: (0..self.partitions.len()).map(|partition| self.later(partition) == 0).collect(),
                called: vec![0; self.calls.len()],
                told: BTreeMap::new(),
                counted: 0,
                reported: false,
                to_report: false,
                stopped: false,
                moved_unbegun: vec![false; self.partitions.len()],
                uncounted: false,
            },
            left: self.faults,
        };
        for partition in
            (0..self.partitions.len()).filter(|&partition| self.partitions[partition].1.is_some())
        {
            self.assign(&mut state, partition, None);
        }
        for (lane, _) in &self.calls {
            self.turn(&mut state, *lane, None);
        }
        state
    }

    fn next(&self, state: &State) -> Vec<Next<Self>> {
        let mut into = Vec::new();
        self.steps_of_sources(state, &mut into);
        for lane in 0..state.lanes.len() {
            self.steps_of_lane(state, lane, &mut into);
        }
        self.steps_of_time(state, &mut into);
        self.steps_of_sink(state, &mut into);
        self.steps_of_faults(state, &mut into);
        into
    }

    fn digest(&self, state: &State, into: &mut Xxh3) {
        feed(into, &state.world);
        feed(into, &state.group);
        feed(into, &state.left);
        let keys = self.keys();
        for instance in &state.instances {
            self.digest_store(&instance.route.store, &keys, into);
            feed(into, &*instance.route.history.read());
            feed(into, &instance.route.learnt_history());
            if state.left.crashes > 0 {
                feed(into, &instance.older.is_some());
                if let Some(older) = &instance.older {
                    self.digest_store(older, &keys, into);
                }
            }
        }
        for resting in &state.lanes {
            digest_lane(resting, into);
        }
    }

    fn broken(&self, state: &State) -> Option<Broken> {
        if let Some(broken) = &state.world.broken {
            return Some(broken.clone());
        }
        let broken = |invariant, what| Some(Broken { invariant, what });
        for partition in 0..self.partitions.len() {
            let position = state.world.db.shards.get(&shard_of(partition)).and_then(|row| row.position);
            let undecided = self.undecided_before(&state.world.db, partition, position.unwrap_or(0));
            if let Some(at) = undecided {
                let what = format!(
                    "the sink's position of partition {partition} is {}, and record {at} has no outcome",
                    position.unwrap_or(0)
                );
                return broken("position_prefix", what);
            }
            let committed = state.group.committed[partition];
            let undecided = self.undecided_before(&state.world.db, partition, committed);
            if let Some(at) = undecided.filter(|_| !state.world.went_back) {
                let what = format!(
                    "the group's offset of partition {partition} is {committed}, and record {at} is not there"
                );
                return broken("nothing_lost", what);
            }
        }
        let records: usize = self.partitions.iter().map(|(log, _)| log.len()).sum();
        if !state.world.went_back && state.group.counted > records as u64 {
            let what = format!("{} outcomes of {records} records", state.group.counted);
            return broken("one_outcome", what);
        }
        None
    }

    fn is_done(&self, state: &State) -> bool {
        let read = self.partitions.iter().enumerate().all(|(partition, (log, _))| {
            let end = log.len() as i64;
            let position = state.world.db.shards.get(&shard_of(partition)).and_then(|row| row.position);
            position.unwrap_or(0) >= end
                && state.group.committed[partition] >= end
                && log.iter().all(|rec| state.world.db.decided(rec.key))
        });
        let called = self.calls.iter().enumerate().all(|(log, (_, records))| {
            (0..records.len()).all(|place| state.group.told.contains_key(&(log, place)))
        });
        // Claims that nobody settles or gives back hold their keys for ever.
        let claims = state.instances.iter().any(|instance| instance.route.store.stats(0).claims > 0);
        let flights = state.lanes.iter().any(|resting| resting.flight.is_some());
        read && called && (flights || !claims)
    }
}

impl Setup {
    fn digest_store(&self, store: &Store, keys: &[u8], into: &mut Xxh3) {
        for key in keys {
            let known = store.peek(&key_of(*key)).expect("it is in memory");
            let known = known.map(|known| (known.settled as u8, known.event_ms));
            feed(into, &(known, store.in_flight(&key_of(*key))));
        }
        for checkpoint in store.checkpoints() {
            feed(into, &checkpoint.shard);
            feed(into, &(checkpoint.sequence, checkpoint.epoch, checkpoint.position));
            feed(into, &(checkpoint.watermark_ms, checkpoint.floor_ms));
        }
        let now_ms = now_ms();
        if self.expires {
            let stats = store.stats(now_ms);
            feed(into, &(stats.floor_ms, store.forgets_ms(now_ms)));
            stats.slots.iter().for_each(|slot| feed(into, &(slot.event_ms, slot.keys)));
        }
        let floors = store.floors(now_ms);
        feed(into, &(floors.watermark_ms, floors.retire_ms));
    }
}

fn digest_taken(
    works: &Works,
    taken: Taken,
    slots: &BTreeMap<u32, crate::lane::shard::OwnedShard>,
    into: &mut Xxh3,
) {
    let work = works.get(taken.work);
    let named = works.named(taken);
    let generation = slots.get(&named.shard).map_or(0, |shard| shard.generation);
    let current = work.via == Via::Call || works.is_current(taken, named.shard, generation);
    feed(into, &(work.chunk.slice(&named.row), named.shard, named.position, current));
}

fn digest_lane(resting: &Resting, into: &mut Xxh3) {
    let Resting { lane, level, flight, asked: _ } = resting;
    feed(into, &lane.slots);
    feed(into, &(lane.queue.len(), lane.parked.len(), lane.unpark, lane.history, lane.recheck, *level));
    feed(into, &(lane.next_generation, lane.held_elsewhere, lane.unresolved));
    for taken in &lane.queue {
        digest_taken(&lane.works, *taken, &lane.slots, into);
    }
    for parked in &lane.parked {
        digest_taken(&lane.works, parked.taken, &lane.slots, into);
        feed(into, &(parked.on == crate::lane::run::WaitsFor::Key));
    }
    feed(into, &lane.tally);
    feed(into, &flight.is_some());
    if let Some(flight) = flight {
        for record in flight.records() {
            digest_taken(&lane.works, record.taken, &lane.slots, into);
        }
        feed(into, &flight.slots);
        feed(into, &flight.rows.len());
    }
}

/// Rules of most models.
pub(super) fn rules(max_records: usize) -> Rules {
    Rules {
        mode: Mode::Upsert,
        max_records,
        lateness_ms: 1_000_000,
        window_ms: 1_000_000,
        max_ahead_ms: 1_000_000_000,
        ..Rules::default()
    }
}
