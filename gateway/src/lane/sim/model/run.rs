//! One run: build, load, strike, wait until all is quiet, compare.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use adapters::sink::{Mode, RowOutcome};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use tokio::time::sleep;

use super::{
    chaos::{Cluster, Menu},
    load::{Event, Expected, Kind, Source, Times, draw, draw_shared},
};
use crate::{
    lane::sim::{
        door::{Topic, shard_of},
        faults::Rates,
        rig::{Rig, call, counted},
        world::{Db, World},
    },
    outcome::Outcome,
};

/// What the runs of this process have met, so that a change which keeps them from meeting it is seen.
#[derive(Debug)]
pub(super) struct Met {
    went_back: AtomicU64,
    ghosts_applied: AtomicU64,
    fenced: AtomicU64,
    seeks: AtomicU64,
    late: AtomicU64,
    dead_letters: AtomicU64,
    floors_raised: AtomicU64,
    tried_again: AtomicU64,
}

pub(super) static MET: Met = Met {
    went_back: AtomicU64::new(0),
    ghosts_applied: AtomicU64::new(0),
    fenced: AtomicU64::new(0),
    seeks: AtomicU64::new(0),
    late: AtomicU64::new(0),
    dead_letters: AtomicU64::new(0),
    floors_raised: AtomicU64::new(0),
    tried_again: AtomicU64::new(0),
};

impl Met {
    fn all(&self) -> [&AtomicU64; 8] {
        let Met { went_back, ghosts_applied, fenced, seeks, late, dead_letters, floors_raised, tried_again } =
            self;
        [went_back, ghosts_applied, fenced, seeks, late, dead_letters, floors_raised, tried_again]
    }

    /// Everything was met.
    pub(super) fn whole(&self) -> bool {
        self.all().iter().all(|count| count.load(Ordering::Relaxed) > 0)
    }

    fn note(&self, cluster: &Cluster) {
        let (world, topic) = (cluster.rig.world.lock(), cluster.topic.lock());
        let letters = &world.db.letters;
        let raised = world.db.shards.values().filter(|row| row.floor_ms > i64::MIN).count();
        let seen = [
            u64::from(world.went_back),
            u64::from(world.ghosts_applied),
            topic.fenced.len() as u64,
            u64::from(topic.seeks),
            letters.iter().filter(|letter| letter.kind == "late").count() as u64,
            letters.len() as u64,
            raised as u64,
            world.attempts.len().saturating_sub(world.db.commits.len()) as u64,
        ];
        for (count, seen) in self.all().into_iter().zip(seen) {
            count.fetch_add(seen, Ordering::Relaxed);
        }
    }
}

/// How long the run may take to come to rest once nothing is struck any more, ms.
const REST_MS: u64 = 300_000;

struct Plan {
    mode: Mode,
    keyed: bool,
    nodes: usize,
    call_lanes: u32,
    relay_lanes: u32,
    rates: Rates,
    menu: Menu,
    strikes: usize,
    times: Times,
    /// Events that come through several sources.
    shared: Source,
    logs: Vec<Source>,
    callers: Vec<Source>,
}

impl Plan {
    fn draw(rng: &mut SmallRng) -> Self {
        let (mode, keyed) =
            [(Mode::Insert, false), (Mode::Insert, true), (Mode::Upsert, true), (Mode::UpsertIfNewer, true)]
                [rng.random_range(0..4)];
        let nodes = rng.random_range(1..=2);
        let partitions = rng.random_range(1..=4);
        let times =
            [Times::Near, Times::Near, Times::Near, Times::Arrival, Times::Far][rng.random_range(0..5)];
        // Where facts expire, another record with the same key is new some day.
        let bad = times != Times::Far && rng.random_range(0..3) > 0;
        let rows = [1, 3, 12][rng.random_range(0..3)];
        // Copies of one event meet in one shard, unless one instance has them all.
        let shared = if nodes == 1 { draw_shared(rng, 40, partitions, rows) } else { Vec::new() };
        let logs = (0..partitions).map(|at| {
            let records = rng.random_range(0..50);
            draw(rng, &format!("p{at}"), records, rows, &shared, bad, times)
        });
        let logs = logs.collect();
        let callers = (0..rng.random_range(0..=3)).map(|at| {
            let records = rng.random_range(0..15);
            draw(rng, &format!("c{at}"), records, rows, &shared, bad, times)
        });
        let callers = callers.collect();
        Self {
            mode,
            keyed,
            nodes,
            call_lanes: rng.random_range(1..=2),
            relay_lanes: rng.random_range(1..=3),
            rates: Rates {
                deliver: [0, 50, 200, 400][rng.random_range(0..4)],
                call: [0, 30, 150][rng.random_range(0..3)],
                slow_ms: [0, 3, 40][rng.random_range(0..3)],
                ghost: 600,
            },
            menu: Menu::draw(rng),
            strikes: rng.random_range(0..12),
            times,
            shared,
            logs,
            callers,
        }
    }
}

/// Runs one seed; the text says what is wrong.
pub(super) fn seed(seed: u64) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .map_err(|fault| fault.to_string())?;
    let result = runtime.block_on(run(seed));
    drop(runtime);
    result
}

struct Callers {
    busy: AtomicUsize,
    submitted: AtomicU64,
    /// Good records may be late.
    lenient: bool,
}

/// Sends `events` in order, each until its outcome is known; some in two copies at once.
async fn caller(
    cluster: Cluster,
    events: Source,
    mut rng: SmallRng,
    shared: Arc<Callers>,
) -> Result<(), String> {
    for event in &events {
        if rng.random_range(0..2) == 0 {
            sleep(Duration::from_millis(rng.random_range(0..150))).await;
        }
        loop {
            let Some(gate) = cluster.gate(0) else {
                sleep(Duration::from_millis(20)).await;
                continue;
            };
            shared.submitted.fetch_add(1, Ordering::Relaxed);
            let twice = rng.random_range(0..5) == 0;
            let second = async {
                if twice {
                    shared.submitted.fetch_add(1, Ordering::Relaxed);
                    call(&gate, &event.payload).await;
                }
            };
            let (answer, ()) = tokio::join!(call(&gate, &event.payload), second);
            drop(gate);
            check_answer(event, answer.outcome, shared.lenient)?;
            if answer.outcome != Outcome::Unknown {
                break;
            }
            sleep(Duration::from_millis(rng.random_range(1..200))).await;
        }
    }
    shared.busy.fetch_sub(1, Ordering::Relaxed);
    Ok(())
}

fn check_answer(event: &Event, outcome: Outcome, lenient: bool) -> Result<(), String> {
    use Outcome::{Duplicate, Late, Mismatch, Rejected, Stale, Unknown, Updated, Written};
    let fits = match event.kind {
        Kind::Good if lenient && outcome == Late => true,
        Kind::Good => matches!(outcome, Written | Updated | Stale | Duplicate | Mismatch | Unknown),
        Kind::Poison => matches!(outcome, Rejected | Mismatch | Unknown),
        Kind::Bad | Kind::Garbage => matches!(outcome, Rejected | Unknown),
        Kind::Ahead => matches!(outcome, Rejected | Unknown),
        Kind::Late => matches!(outcome, Late | Written | Updated | Stale | Duplicate | Unknown),
    };
    if fits { Ok(()) } else { Err(format!("{:?} record {} was answered {outcome:?}", event.kind, event.id)) }
}

async fn run(seed: u64) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let plan = Plan::draw(&mut rng);
    let mut rig = Rig::new(plan.mode, plan.keyed, seed);
    rig.rules.max_records = [1, 3, 8, 64][rng.random_range(0..4)];
    rig.rules.wait_ms = [50, 5_000][rng.random_range(0..2)];
    match plan.times {
        Times::Near => {}
        Times::Arrival => (rig.arrival, rig.rules.lateness_ms) = (true, 0),
        Times::Far => (rig.rules.window_ms, rig.rules.lateness_ms) = (10_000, 3_000),
    }
    rig.world.lock().resolve_by_force = rng.random();
    rig.world.lock().faults.rates = plan.rates;
    let topic = Topic::new(plan.logs.len());
    let burst = [1, 4, 40][rng.random_range(0..3)];
    let cluster = Cluster { rig: rig.clone(), topic: topic.clone(), nodes: Arc::default(), burst };
    for node in 0..plan.nodes {
        let calls = if node == 0 { plan.call_lanes } else { 0 };
        cluster.add(&format!("node{node}"), (calls, plan.relay_lanes));
    }
    for owner in &mut topic.lock().owners {
        *owner = Some(format!("node{}", rng.random_range(0..plan.nodes)));
    }
    for node in 0..plan.nodes {
        let fresh = rig.clone();
        cluster.start(node, move || fresh.memory()).await;
    }

    // The load.
    let lenient = plan.times == Times::Far;
    let shared = Arc::new(Callers { busy: AtomicUsize::new(0), submitted: AtomicU64::new(0), lenient });
    let mut tasks = Vec::new();
    let mut send = |events: &Source, rng: &mut SmallRng| {
        shared.busy.fetch_add(1, Ordering::Relaxed);
        let rng = SmallRng::seed_from_u64(rng.random());
        tasks.push(tokio::spawn(caller(cluster.clone(), events.clone(), rng, shared.clone())));
    };
    plan.callers.iter().for_each(|events| send(events, &mut rng));
    let pace = if lenient { 6_000 } else { 200 };
    let writers: Vec<_> = plan
        .logs
        .iter()
        .enumerate()
        .map(|(partition, log)| {
            let (topic, log, mut rng) = (topic.clone(), log.clone(), SmallRng::seed_from_u64(rng.random()));
            tokio::spawn(async move {
                for event in log {
                    if rng.random_range(0..3) == 0 {
                        sleep(Duration::from_millis(rng.random_range(0..pace))).await;
                    }
                    topic.lock().partitions[partition].push(event.payload);
                }
            })
        })
        .collect();

    // The strikes.
    let mut snapshots = Vec::new();
    for _ in 0..plan.strikes {
        sleep(Duration::from_millis(rng.random_range(0..1_200))).await;
        cluster.strike(plan.menu, &mut rng, &mut snapshots).await;
    }
    for writer in writers {
        writer.await.map_err(|fault| fault.to_string())?;
    }

    // Peace.
    {
        let mut world = rig.world.lock();
        world.faults.rates = Rates { slow_ms: 1, ..Rates::default() };
        world.frozen.clear();
        world.down_until = None;
    }
    finish(&mut tasks).await?;
    let went_back = rig.world.lock().went_back > 0;
    if went_back {
        // What callers had was lost with the sink's state: once that is reported, they send it again.
        sleep(Duration::from_secs(1)).await;
        let mut again = Vec::new();
        for events in &plan.callers {
            shared.busy.fetch_add(1, Ordering::Relaxed);
            let rng = SmallRng::seed_from_u64(rng.random());
            again.push(tokio::spawn(caller(cluster.clone(), events.clone(), rng, shared.clone())));
        }
        finish(&mut again).await?;
    }
    rest(&cluster, &plan).await?;
    compare(&cluster, &plan, &shared, went_back).await
}

async fn finish(tasks: &mut Vec<tokio::task::JoinHandle<Result<(), String>>>) -> Result<(), String> {
    for task in tasks.drain(..) {
        match tokio::time::timeout(Duration::from_millis(REST_MS), task).await {
            Ok(Ok(result)) => result?,
            Ok(Err(fault)) => return Err(fault.to_string()),
            Err(_) => return Err("a caller never hears of an outcome".into()),
        }
    }
    Ok(())
}

/// Waits until every partition's position is at its end in the sink.
async fn rest(cluster: &Cluster, plan: &Plan) -> Result<(), String> {
    let behind = |world: &World| {
        plan.logs.iter().enumerate().find_map(|(partition, log)| {
            let position =
                world.db.shards.get(&shard_of(partition)).and_then(|row| row.position).unwrap_or(0);
            (position != log.len() as i64).then_some((partition, position, log.len()))
        })
    };
    for _ in 0..REST_MS / 100 {
        if behind(&cluster.rig.world.lock()).is_none() {
            return Ok(());
        }
        sleep(Duration::from_millis(100)).await;
    }
    let (partition, position, end) = behind(&cluster.rig.world.lock()).unwrap_or_default();
    Err(format!(
        "partition {partition} stays at {position} of {end}; stopped: {:?}, trouble: {:?}",
        cluster.topic.lock().stopped,
        cluster.nodes.lock().iter().filter_map(|node| node.gate.as_ref()?.trouble()).collect::<Vec<_>>()
    ))
}

/// What took effect through a partition did so in the partition's order, row key by row key (P8).
fn in_order(logs: &[Source], db: &Db) -> Result<(), String> {
    for (partition, log) in logs.iter().enumerate() {
        let mut last: BTreeMap<&str, usize> = BTreeMap::new();
        for effect in db.effects.iter().filter(|effect| effect.shard == shard_of(partition)) {
            let at = log.iter().position(|event| event.id == effect.row.id).unwrap_or_default();
            let before = last.insert(&effect.row.row, at);
            if let Some(before) = before.filter(|before| *before > at) {
                return Err(format!("partition {partition}: {at} took effect on its row after {before}"));
            }
        }
    }
    Ok(())
}

async fn compare(cluster: &Cluster, plan: &Plan, shared: &Callers, went_back: bool) -> Result<(), String> {
    let gates: Vec<_> = (0..plan.nodes).filter_map(|node| cluster.gate(node)).collect();
    for gate in &gates {
        if tokio::time::timeout(Duration::from_secs(60), gate.close()).await.is_err() {
            return Err("a gate does not close".into());
        }
    }
    let mut expected = Expected { lenient: shared.lenient, ..Expected::default() };
    for (partition, log) in plan.logs.iter().enumerate() {
        expected.partition(plan.mode, partition, log);
    }
    for events in &plan.callers {
        expected.caller(plan.mode, events, !went_back);
    }
    expected.leave_open(&plan.shared);
    let db = cluster.rig.db();

    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    db.effects.iter().for_each(|effect| *seen.entry(&effect.row.id).or_default() += 1);
    if let Some((id, times)) = seen.iter().find(|(_, times)| **times > 1) {
        let of: Vec<_> = db.effects.iter().filter(|effect| effect.row.id == *id).collect();
        return Err(format!("{id} took effect {times} times: {of:?}"));
    }
    if let Some(id) = expected.effects.iter().find(|id| !seen.contains_key(id.as_str())) {
        return Err(format!("{id} never took effect"));
    }
    let allowed = |id: &str| expected.effects.contains(id) || expected.perhaps.contains(id);
    if let Some(id) = seen.keys().find(|id| !allowed(id)) {
        return Err(format!("{id} took effect and should not"));
    }
    if !plan.keyed && db.listed.len() != seen.len() {
        return Err(format!("{} rows for {} effects", db.listed.len(), seen.len()));
    }
    for (row, val) in &expected.rows {
        if db.keyed.get(row).map(|row| &row.val) != Some(val) {
            return Err(format!("row {row} is {:?}, should end with {val}", db.keyed.get(row)));
        }
    }
    if plan.mode != Mode::Insert {
        in_order(&plan.logs, &db)?;
    }
    if plan.mode == Mode::Insert && plan.keyed {
        let written: BTreeSet<_> =
            db.effects.iter().filter(|e| e.outcome == RowOutcome::Written).map(|e| &e.row.row).collect();
        let rows = db.effects.iter().filter(|e| e.outcome == RowOutcome::Written).count();
        if written.len() != rows || rows != db.keyed.len() {
            return Err("a row was inserted twice".into());
        }
    }

    let mut letters: BTreeMap<(usize, i64), &str> = BTreeMap::new();
    for letter in &db.letters {
        let partition = letter.shard.rsplit('/').next().and_then(|text| text.parse().ok());
        let at = (partition.unwrap_or(usize::MAX), letter.position.unwrap_or(-1));
        if letters.insert(at, letter.kind).is_some() {
            return Err(format!("two dead letters of {at:?}"));
        }
        let perhaps = letter.kind == "late" && expected.letters_perhaps.contains(&at);
        if !perhaps && expected.letters.get(&at) != Some(&letter.kind) {
            return Err(format!("dead letter {at:?} {} should not be: {}", letter.kind, letter.payload));
        }
    }
    if let Some(at) = expected.letters.keys().find(|at| !letters.contains_key(at)) {
        return Err(format!("no dead letter of {at:?}"));
    }
    for (partition, log) in plan.logs.iter().enumerate() {
        let may_be_late =
            |event: &Event| event.kind == Kind::Late || shared.lenient && event.kind == Kind::Good;
        for (offset, event) in log.iter().enumerate().filter(|(_, event)| may_be_late(event)) {
            let dead = letters.contains_key(&(partition, offset as i64));
            let first = log.iter().position(|other| other.id == event.id) == Some(offset);
            if first && !dead && !seen.contains_key(&*event.id) {
                return Err(format!("late {} is neither in the table nor a dead letter", event.id));
            }
        }
    }

    MET.note(cluster);
    if plan.menu.countable() && !(plan.menu.moves && plan.nodes > 1) {
        let mut all: BTreeMap<&str, u64> = BTreeMap::new();
        for gate in &gates {
            counted(gate).into_iter().for_each(|(word, count)| *all.entry(word).or_default() += count);
        }
        let relayed: usize = plan.logs.iter().map(Vec::len).sum();
        let records = relayed as u64 + shared.submitted.load(Ordering::Relaxed);
        if all.values().sum::<u64>() != records {
            return Err(format!("{records} records, counted {all:?}"));
        }
        let dead = all.get("dead_lettered").copied().unwrap_or(0);
        // Read again by the next owner, a dead letter beyond the position counts as a duplicate of itself.
        let missing = letters.len() as u64 - dead.min(letters.len() as u64);
        if dead > letters.len() as u64 || (missing > 0 && !plan.menu.moves) {
            return Err(format!("{} dead letters, counted {dead}", letters.len()));
        }
    }
    Ok(())
}
