//! One run: build, load, strike, wait until all is quiet, compare.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::{
    chaos::Cluster,
    ends,
    load::{Event, Kind, Times},
    plan::{Plan, Sent, What},
};
use crate::{
    lane::sim::{
        door::{Topic, shard_of},
        faults::Rates,
        invariant::{Broken, Invariant, broken},
        journal::{JournaledSink, Remote},
        rig::{BASE_MS, Rig, call, json, route_row},
        trace::note,
    },
    outcome::Outcome,
};

/// How long the run may take to come to rest once nothing is struck any more, ms.
pub(super) const REST_MS: u64 = 300_000;
/// How long all of it may take, ms: what waits for ever without its own bound ends there, and not with the machine's patience.
const RUN_MS: u64 = 1_800_000;

/// Runs a plan on a runtime of its own, on this thread.
pub(super) fn plan(plan: &Plan) -> (Result<(), Broken>, u32) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let mut faults = 0;
    let result = runtime.block_on(async {
        let over = timeout(Duration::from_millis(RUN_MS), run(plan, &mut faults)).await;
        over.unwrap_or_else(|_| broken(Invariant::ComesToRest, "the run is not over after half an hour"))
    });
    drop(runtime);
    (result, faults)
}

pub(super) struct Callers {
    pub(super) submitted: AtomicU64,
    busy: AtomicUsize,
    /// Good records may be late.
    pub(super) lenient: bool,
}

/// Sends `events` in order, each until its outcome is known; some in two copies at once.
async fn caller(
    cluster: Cluster,
    events: Vec<Sent>,
    mut rng: SmallRng,
    shared: Arc<Callers>,
) -> Result<(), Broken> {
    for Sent { event, after_ms, twice } in &events {
        sleep(Duration::from_millis(*after_ms)).await;
        loop {
            let Some(gate) = cluster.gate(0) else {
                sleep(Duration::from_millis(20)).await;
                continue;
            };
            shared.submitted.fetch_add(1, Ordering::Relaxed);
            let second = async {
                if *twice {
                    shared.submitted.fetch_add(1, Ordering::Relaxed);
                    call(&gate, &event.payload).await;
                }
            };
            let (answer, ()) = tokio::join!(call(&gate, &event.payload), second);
            drop(gate);
            note(|| format!("caller: {} is {:?}", event.id, answer.outcome));
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

fn check_answer(event: &Event, outcome: Outcome, lenient: bool) -> Result<(), Broken> {
    use Outcome::{Duplicate, Late, Mismatch, Rejected, Stale, Unknown, Updated, Written};
    let fits = match event.kind {
        Kind::Good if lenient && outcome == Late => true,
        Kind::Good => matches!(outcome, Written | Updated | Stale | Duplicate | Mismatch | Unknown),
        Kind::Poison => matches!(outcome, Rejected | Mismatch | Unknown),
        Kind::Bad | Kind::Garbage => matches!(outcome, Rejected | Unknown),
        Kind::Ahead => matches!(outcome, Rejected | Unknown),
        Kind::Late => matches!(outcome, Late | Written | Updated | Stale | Duplicate | Unknown),
    };
    if fits {
        return Ok(());
    }
    broken(Invariant::RightAnswer, format!("{:?} record {} was answered {outcome:?}", event.kind, event.id))
}

/// Writes a record, takes its key back, and writes it again (P12).
async fn forgetter(cluster: Cluster, id: usize, after_ms: u64, shared: Arc<Callers>) -> Result<(), Broken> {
    let id = format!("f-{id}");
    let payload = json(&id, &id, "v", 1, BASE_MS);
    let once = async || loop {
        let Some(gate) = cluster.gate(0) else {
            sleep(Duration::from_millis(20)).await;
            continue;
        };
        shared.submitted.fetch_add(1, Ordering::Relaxed);
        return call(&gate, &payload).await;
    };
    let patient = async || {
        let mut unsure = false;
        loop {
            let answer = once().await;
            if answer.outcome != Outcome::Unknown {
                return (answer, unsure);
            }
            unsure = true;
            sleep(Duration::from_millis(50)).await;
        }
    };
    let (first, _) = patient().await;
    let Some(key) = first.fingerprint else { return Ok(()) };
    loop {
        if let Some(gate) = cluster.gate(0)
            && gate.forget(key).await.is_ok()
        {
            break;
        }
        sleep(Duration::from_millis(50)).await;
    }
    note(|| format!("{id}: its key is taken back"));
    sleep(Duration::from_millis(after_ms)).await;
    let (again, unsure) = patient().await;
    note(|| format!("{id}: again: {:?}", again.outcome));
    let went_back = cluster.rig.world.lock().went_back > 0;
    shared.busy.fetch_sub(1, Ordering::Relaxed);
    if again.outcome == Outcome::Duplicate && !unsure && !went_back {
        return broken(Invariant::ForgottenIsNew, format!("{id} was taken back, and is a duplicate"));
    }
    Ok(())
}

async fn run(plan: &Plan, faults: &mut u32) -> Result<(), Broken> {
    let mut rig = Rig::new(plan.mode, plan.keyed, plan.seed);
    (rig.rules.max_records, rig.rules.wait_ms) = (plan.max_records, plan.wait_ms);
    match plan.times {
        Times::Near => {}
        Times::Arrival => (rig.arrival, rig.rules.lateness_ms) = (true, 0),
        Times::Far => (rig.rules.window_ms, rig.rules.lateness_ms) = (10_000, 3_000),
    }
    let ids = |log: &Vec<Sent>| log.iter().map(|sent| sent.event.id.clone()).collect();
    {
        let mut world = rig.world.lock();
        world.resolve_by_force = plan.resolve_by_force;
        (world.faults.rates, world.faults.only) = (plan.rates, plan.faults.clone());
        world.judge.on = true;
        world.judge.ids = plan.logs.iter().map(ids).collect();
        world.judge.window_ms = (!rig.arrival).then_some(rig.rules.window_ms);
    }
    if let Some(repeats) = plan.journal {
        let rates = (plan.rates.deliver, plan.rates.slow_ms);
        let mut remote = Remote::new(repeats, plan.seed, rates, rig.world.clone());
        remote.only = plan.faults.clone();
        let journaled = JournaledSink::new(remote);
        journaled.register(&route_row()).await;
        rig.journaled = Some(journaled);
        rig.world.lock().elsewhere = true;
    }
    let topic = Topic::new(plan.logs.len());
    let cluster = Cluster {
        rig: rig.clone(),
        topic: topic.clone(),
        nodes: Arc::default(),
        snapshots: Arc::default(),
        burst: plan.burst,
    };
    for node in 0..plan.nodes {
        let calls = if node == 0 { plan.call_lanes } else { 0 };
        cluster.add(&format!("node{node}"), (calls, plan.relay_lanes));
    }
    for (partition, owner) in plan.owners.iter().enumerate() {
        topic.lock().owners[partition] = Some(format!("node{owner}"));
    }
    for node in 0..plan.nodes {
        let fresh = rig.clone();
        cluster.start(node, move || fresh.memory()).await;
    }

    // The load.
    let lenient = plan.times == Times::Far;
    let shared = Arc::new(Callers { busy: AtomicUsize::new(0), submitted: AtomicU64::new(0), lenient });
    let send = |turn: u64| -> Vec<JoinHandle<_>> {
        let task = |(at, events): (usize, &Vec<Sent>)| {
            shared.busy.fetch_add(1, Ordering::Relaxed);
            let rng = SmallRng::seed_from_u64(plan.seed ^ (at as u64 + 1) << 32 ^ turn << 48);
            tokio::spawn(caller(cluster.clone(), events.clone(), rng, shared.clone()))
        };
        plan.callers.iter().enumerate().map(task).collect()
    };
    let mut tasks = send(0);
    let write = |(partition, log): (usize, &Vec<Sent>)| {
        let (topic, log) = (topic.clone(), log.clone());
        tokio::spawn(async move {
            for Sent { event, after_ms, .. } in log {
                if after_ms > 0 {
                    sleep(Duration::from_millis(after_ms)).await;
                }
                topic.lock().partitions[partition].push(event.payload);
            }
        })
    };
    let writers: Vec<_> = plan.logs.iter().enumerate().map(write).collect();

    // The strikes.
    for strike in &plan.strikes {
        sleep(Duration::from_millis(strike.after_ms)).await;
        if let What::Forget { id, after_ms } = strike.what
            && !lenient
        {
            shared.busy.fetch_add(1, Ordering::Relaxed);
            tasks.push(tokio::spawn(forgetter(cluster.clone(), id, after_ms, shared.clone())));
        }
        cluster.strike(strike.what).await;
    }
    for writer in writers {
        writer.await.ok();
    }

    // Peace.
    note(|| "peace".into());
    {
        let mut world = rig.world.lock();
        world.faults.rates = Rates { slow_ms: 1, ..Rates::default() };
        world.frozen.clear();
        world.down_until = None;
        *faults = world.faults.fired;
    }
    if let Some(journaled) = &rig.journaled {
        let mut remote = journaled.remote.lock();
        (*faults, remote.rates) = (remote.fired, (0, 1));
    }
    finish(tasks).await?;
    let went_back = rig.world.lock().went_back > 0;
    if went_back {
        // What callers had was lost with the sink's state: once that is reported, they send it again.
        sleep(Duration::from_secs(1)).await;
        finish(send(1)).await?;
    }
    rest(&cluster, plan).await?;
    ends::at_rest(&cluster, plan).await?;
    ends::compare(&cluster, plan, &shared, went_back).await
}

async fn finish(tasks: Vec<JoinHandle<Result<(), Broken>>>) -> Result<(), Broken> {
    for task in tasks {
        match timeout(Duration::from_millis(REST_MS), task).await {
            Ok(Ok(result)) => result?,
            Ok(Err(fault)) => return broken(Invariant::NoPanic, fault.to_string()),
            Err(_) => return broken(Invariant::Answered, "a caller never hears of an outcome"),
        }
    }
    Ok(())
}

/// Waits until every partition's position is at its end in the sink.
async fn rest(cluster: &Cluster, plan: &Plan) -> Result<(), Broken> {
    let behind = || {
        let positions = cluster.positions();
        plan.logs.iter().enumerate().find_map(|(partition, log)| {
            let position = positions.get(&shard_of(partition)).copied().unwrap_or(0);
            (position != log.len() as i64).then_some((partition, position, log.len()))
        })
    };
    for _ in 0..REST_MS / 100 {
        if behind().is_none() {
            return Ok(());
        }
        if let Some(fell) = cluster.rig.world.lock().judge.fell.take() {
            return Err(fell);
        }
        sleep(Duration::from_millis(100)).await;
    }
    let (partition, position, end) = behind().unwrap_or_default();
    let what = format!(
        "partition {partition} stays at {position} of {end}; stopped: {:?}, trouble: {:?}",
        cluster.topic.lock().stopped,
        cluster.nodes.lock().iter().filter_map(|node| node.gate.as_ref()?.trouble()).collect::<Vec<_>>()
    );
    broken(Invariant::ComesToRest, what)
}
