//! What every test stands on: a sink in memory, gates over it, records.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use adapters::sink::{Mode, RouteRow, Sink};
use dedup_store::{Algorithm, Block, Checkpoint, Hasher, Identity, Store, StoreOptions};
use parking_lot::Mutex;

use super::{
    door::{Door, Topic, shard_of},
    faults::{Call, CallFault, DeliverFault, Faults},
    journal::JournaledSink,
    sink::FakeSink,
    world::{Db, Judge, World},
};
use crate::{
    clock::simulated,
    door::Submit,
    gate::{BuildError, Gate, GateBuilder, LettersOf},
    key::{KeySpec, Pointer},
    lane::Rules,
    naming::{EventTime, NamingRules, Record, TimeUnit, UnknownFields},
    outcome::{Answer, Outcome, Problem},
};

/// Where the simulated wall clock starts, ms.
pub(super) const BASE_MS: i64 = 1_800_000_000_000;
const SECRET: [u8; 192] = [7; 192];

/// A sink and the settings of the gates over it.
#[derive(Clone)]
pub(super) struct Rig {
    pub(super) world: Arc<Mutex<World>>,
    pub(super) sink: FakeSink,
    /// In its place, a target behind the journal.
    pub(super) journaled: Option<JournaledSink>,
    pub(super) rules: Rules,
    pub(super) arrival: bool,
    pub(super) wait: Duration,
}

fn key() -> KeySpec {
    KeySpec::pointers(["/id"]).unwrap()
}

pub(super) fn route_row() -> RouteRow {
    RouteRow {
        route_id: vec![3; 16],
        key_spec_id: key().id() as i64,
        algorithm: Algorithm::Xxh3Secret as i16,
        secret: SECRET.to_vec(),
    }
}

pub(super) fn identity() -> Identity {
    Identity { route_id: [3; 16], key_spec_id: key().id(), algorithm: Algorithm::Xxh3Secret, secret: SECRET }
}

impl Rig {
    /// A table with a row key; `insert` without one: [`Rig::listed`].
    pub(super) fn keyed(mode: Mode, seed: u64) -> Self {
        Self::new(mode, true, seed)
    }

    /// `insert` without row key.
    pub(super) fn listed(seed: u64) -> Self {
        Self::new(Mode::Insert, false, seed)
    }

    pub(super) fn new(mode: Mode, keyed: bool, seed: u64) -> Self {
        if std::env::var_os("RUST_LOG").is_some() {
            let filter = tracing_subscriber::EnvFilter::from_default_env();
            tracing_subscriber::fmt().with_env_filter(filter).without_time().try_init().ok();
        }
        simulated::start(BASE_MS * 1_000, seed);
        let world = World {
            mode,
            keyed,
            db: Db { route: Some(route_row()), ..Db::default() },
            faults: Faults::new(seed),
            ghosts: Vec::new(),
            connections: Default::default(),
            next_connection: 0,
            taken: 0,
            down_until: None,
            frozen: Default::default(),
            resolve_by_force: false,
            went_back: 0,
            attempts: Vec::new(),
            ghosts_applied: 0,
            heartbeats: 0,
            hosts_ahead_ms: 0,
            expire_most: usize::MAX,
            judge: Judge::default(),
            elsewhere: false,
            answering: 0,
        };
        let world = Arc::new(Mutex::new(world));
        let row_key = if keyed { vec!["row".to_owned()] } else { Vec::new() };
        let sink = FakeSink { world: world.clone(), mode, row_key };
        let rules =
            Rules { lateness_ms: 3_600_000, window_ms: 86_400_000, max_records: 64, ..Rules::default() };
        Self { world, sink, journaled: None, rules, arrival: false, wait: Duration::from_secs(30) }
    }

    pub(super) fn options(&self) -> StoreOptions {
        StoreOptions {
            window_ms: self.rules.window_ms,
            lateness_ms: self.rules.lateness_ms,
            idle_after_ms: 30_000,
            max_disk_bytes: u64::MAX,
            max_memory_bytes: 1 << 30,
            commit_interval_ms: 1,
        }
    }

    pub(super) fn memory(&self) -> Store {
        Store::in_memory(self.options())
    }

    fn builder(&self, owner: &str, lanes: (u32, u32), store: Store) -> GateBuilder {
        let event_time =
            EventTime::Pointer { pointer: Pointer::parse("/t").unwrap(), unit: Some(TimeUnit::Millis) };
        let naming = NamingRules {
            event_time: if self.arrival { EventTime::Arrival } else { event_time },
            unknown_fields: UnknownFields::Ignore,
            ..NamingRules::new(key())
        };
        Gate::builder(store)
            .naming(naming)
            .sink(match &self.journaled {
                Some(journaled) => Arc::new(journaled.clone()),
                None => Arc::new(self.sink.clone()) as Arc<dyn Sink>,
            })
            .name("r")
            .owner(owner)
            .rules(self.rules.clone())
            .lanes(lanes.0, lanes.1)
            .hash_secret(SECRET)
            .answer_timeout(self.wait)
    }

    pub(super) async fn try_gate(
        &self,
        owner: &str,
        lanes: (u32, u32),
        store: Store,
    ) -> Result<Gate, BuildError> {
        self.builder(owner, lanes, store).build().await
    }

    /// A gate whose dead letters go elsewhere.
    pub(super) async fn gate_with_letters(&self, owner: &str, lanes: (u32, u32), letters: LettersOf) -> Gate {
        self.builder(owner, lanes, self.memory()).dead_letters(letters).build().await.unwrap()
    }

    /// A gate of owner `owner` with an empty store.
    pub(super) async fn gate(&self, owner: &str, lanes: (u32, u32)) -> Gate {
        self.try_gate(owner, lanes, self.memory()).await.unwrap()
    }

    pub(super) fn script(&self, faults: impl IntoIterator<Item = DeliverFault>) {
        self.world.lock().faults.script.extend(faults);
    }

    pub(super) fn fail(&self, call: Call, fault: CallFault) {
        self.world.lock().faults.calls.push_back((call, fault));
    }

    /// The next delivery takes so long before and after it applies, ms.
    pub(super) fn delay(&self, before: u64, after: u64) {
        self.world.lock().faults.delays.push_back((before, after));
    }

    pub(super) fn db(&self) -> Db {
        self.world.lock().db.clone()
    }

    /// The values in the table: of a list in order, else by row key.
    pub(super) fn table(&self) -> Vec<String> {
        let world = self.world.lock();
        let rows: Box<dyn Iterator<Item = _>> =
            if world.keyed { Box::new(world.db.keyed.values()) } else { Box::new(world.db.listed.iter()) };
        rows.map(|row| format!("{}={}", row.row, row.val)).collect()
    }

    /// Every connection of every owner ends.
    pub(super) fn cut(&self) {
        self.world.lock().connections.clear();
    }

    /// A store that knows of each shard what `db` held up to the sequence given, as one does that commits lazily and crashes.
    pub(super) fn older_store(&self, db: &Db, known: &BTreeMap<String, i64>) -> Store {
        let store = self.memory();
        let hasher: Hasher = store.bind(&identity()).unwrap();
        for commit in &db.commits {
            let step = &commit.step;
            if known.get(&*step.shard).is_none_or(|known| step.sequence > *known) {
                continue;
            }
            let checkpoint = Checkpoint {
                shard: step.shard.clone(),
                sequence: step.sequence,
                epoch: step.epoch,
                position: step.position,
                watermark_ms: step.watermark_ms,
                floor_ms: i64::MIN,
            };
            let block = commit
                .block
                .iter()
                .map(|block| Block::decode(&hasher, &step.shard, step.sequence, block.clone()).unwrap());
            store.settle(&[checkpoint], &block.collect::<Vec<_>>(), BASE_MS).unwrap();
        }
        store
    }
}

/// A record.
pub(super) fn json(id: &str, row: &str, val: &str, ver: i64, t: i64) -> String {
    format!(r#"{{"id":"{id}","row":"{row}","val":"{val}","ver":{ver},"t":{t}}}"#)
}

/// A record of now whose row key is its id.
pub(super) fn plain(id: &str, val: &str) -> String {
    json(id, id, val, 0, BASE_MS)
}

/// One call, by the door's way: fast path first.
pub(super) async fn call(gate: &Gate, payload: &str) -> Answer {
    let mut chunk = crate::naming::Chunk::default();
    let arrival_us = gate.arrival_us();
    Submit::name(gate, &Record::new(payload.as_bytes(), arrival_us), &mut chunk);
    let answers = match gate.peek(&chunk) {
        Some(answers) => answers,
        None => Submit::submit(gate, chunk).await,
    };
    answers.into_iter().next().expect("one answer a record")
}

/// Several records in one call.
pub(super) async fn calls(gate: &Gate, payloads: &[String]) -> Vec<Answer> {
    let mut chunk = crate::naming::Chunk::default();
    for payload in payloads {
        Submit::name(gate, &Record::new(payload.as_bytes(), gate.arrival_us()), &mut chunk);
    }
    Submit::submit(gate, chunk).await
}

pub(super) async fn outcome(gate: &Gate, payload: &str) -> Outcome {
    call(gate, payload).await.outcome
}

/// A call in a task of its own.
pub(super) fn spawn_call(gate: &Gate, payload: &str) -> tokio::task::JoinHandle<Answer> {
    let (gate, payload) = (gate.clone(), payload.to_owned());
    tokio::spawn(async move { call(&gate, &payload).await })
}

pub(super) fn unavailable(answer: &Answer) -> bool {
    matches!(answer.problem, Some(Problem::Unavailable(_) | Problem::OutcomeUnknown))
}

pub(super) async fn pass(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

/// All outcomes that a gate has counted.
pub(super) fn counted(gate: &Gate) -> BTreeMap<&'static str, u64> {
    let all = Outcome::ALL.map(|outcome| (outcome.word(), gate.metrics().counted(outcome)));
    all.into_iter().filter(|(_, count)| *count > 0).collect()
}

/// A gate with a source log of its own.
pub(super) struct Relay {
    pub(super) gate: Gate,
    pub(super) topic: Arc<Mutex<Topic>>,
    pub(super) door: Door,
    world: Arc<Mutex<World>>,
    owner: String,
}

impl Relay {
    /// All partitions are this instance's.
    pub(super) async fn start(rig: &Rig, owner: &str, lanes: (u32, u32), partitions: usize) -> Self {
        let gate = rig.gate(owner, lanes).await;
        Self::over(rig, owner, gate, partitions).await
    }

    pub(super) async fn over(rig: &Rig, owner: &str, gate: Gate, partitions: usize) -> Self {
        let relay = Self::join(rig, owner, gate, &Topic::new(partitions));
        for partition in 0..partitions {
            relay.take(partition);
        }
        pass(100).await;
        relay
    }

    /// Nothing is this instance's yet.
    pub(super) fn join(rig: &Rig, owner: &str, gate: Gate, topic: &Arc<Mutex<Topic>>) -> Self {
        let door = Door::start(&gate, owner, topic, &rig.world, 8);
        Self { gate, topic: topic.clone(), door, world: rig.world.clone(), owner: owner.into() }
    }

    /// Takes up after a crash what it owned.
    pub(super) async fn resume(
        rig: &Rig,
        owner: &str,
        lanes: (u32, u32),
        topic: &Arc<Mutex<Topic>>,
        store: Store,
    ) -> Self {
        let gate = rig.try_gate(owner, lanes, store).await.unwrap();
        let relay = Self::join(rig, owner, gate, topic);
        let partitions = topic.lock().partitions.len();
        (0..partitions).for_each(|partition| relay.take(partition));
        pass(100).await;
        relay
    }

    /// The group gives it a partition.
    pub(super) fn take(&self, partition: usize) {
        self.topic.lock().owners[partition] = Some(self.owner.clone());
        self.door.assign(partition);
    }

    pub(super) fn push(&self, partition: usize, payload: &str) {
        self.topic.lock().partitions[partition].push(payload.into());
    }

    pub(super) fn crash(self) -> Arc<Mutex<Topic>> {
        self.gate.crash();
        self.topic
    }

    /// The sink's position.
    pub(super) fn position(&self, partition: usize) -> Option<i64> {
        self.world.lock().db.shards.get(&shard_of(partition)).and_then(|row| row.position)
    }

    /// Waits until the sink's position and the group's offset are there.
    pub(super) async fn settled(&self, partition: usize, position: i64) {
        for _ in 0..600 {
            let committed = self.topic.lock().committed[partition];
            if self.position(partition) == Some(position) && committed == position {
                return;
            }
            pass(100).await;
        }
        panic!("partition {partition} is at {:?} and not at {position}", self.position(partition));
    }
}
