//! What a run must end with.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering,
    time::Duration,
};

use adapters::sink::{Mode, RowOutcome};
use tokio::time::sleep;

use super::{
    chaos::Cluster,
    load::{Event, Expected, Kind},
    met::MET,
    plan::{Plan, Sent},
    run::Callers,
};
use crate::lane::sim::{
    door::shard_of,
    invariant::{Broken, Invariant, broken},
    rig::counted,
    world::Db,
};

/// Of records that somebody takes back on purpose there may be two effects.
fn taken_back(id: &str) -> bool {
    id.starts_with("f-")
}

/// Nothing is claimed any more; and what is read again, for no reason that a lane knows of, changes nothing.
pub(super) async fn at_rest(cluster: &Cluster, plan: &Plan) -> Result<(), Broken> {
    if plan.countable() {
        cluster.rewind_all();
        sleep(Duration::from_millis(1_500)).await;
    }
    for _ in 0..100 {
        let claims = |node| cluster.gate(node).map_or(0, |gate| gate.store().stats(0).claims);
        if (0..plan.nodes).all(|node| claims(node) == 0) {
            return Ok(());
        }
        sleep(Duration::from_millis(100)).await;
    }
    broken(Invariant::ClaimsEnd, "keys are claimed though nothing is at work any more")
}

/// What took effect through a partition did so in the partition's order, row key by row key (P8).
fn in_order(logs: &[Vec<Event>], db: &Db) -> Result<(), Broken> {
    for (partition, log) in logs.iter().enumerate() {
        let shard = shard_of(partition);
        let late = db.letters.iter().filter(|letter| letter.kind == "late" && letter.shard == shard);
        // A later copy may be in time for whoever has forgotten less by then: it is that one's turn.
        let late: BTreeSet<i64> = late.filter_map(|letter| letter.position).collect();
        let mut last: BTreeMap<&str, usize> = BTreeMap::new();
        for effect in db.effects.iter().filter(|effect| *effect.shard == *shard) {
            let is_it =
                |(at, event): (usize, &Event)| event.id == effect.row.id && !late.contains(&(at as i64));
            let at = log.iter().enumerate().position(is_it).unwrap_or_default();
            let before = last.insert(&effect.row.row, at);
            if let Some(before) = before.filter(|before| *before > at) {
                let what = format!("partition {partition}: {at} took effect on its row after {before}");
                return broken(Invariant::OrderInKey, what);
            }
        }
    }
    Ok(())
}

/// The end of a run, held against its workload.
pub(super) async fn compare(
    cluster: &Cluster,
    plan: &Plan,
    shared: &Callers,
    went_back: bool,
) -> Result<(), Broken> {
    let events = |sent: &Vec<Sent>| sent.iter().map(|sent| sent.event.clone()).collect::<Vec<Event>>();
    let logs: Vec<Vec<Event>> = plan.logs.iter().map(events).collect();
    let callers: Vec<Vec<Event>> = plan.callers.iter().map(events).collect();
    let gates: Vec<_> = (0..plan.nodes).filter_map(|node| cluster.gate(node)).collect();
    for gate in &gates {
        if tokio::time::timeout(Duration::from_secs(60), gate.close()).await.is_err() {
            return broken(Invariant::Closes, "a gate does not close");
        }
    }
    let mut expected = Expected { lenient: shared.lenient, ..Expected::default() };
    for (partition, log) in logs.iter().enumerate() {
        expected.partition(plan.mode, partition, log);
    }
    for events in &callers {
        expected.caller(plan.mode, events, !went_back);
    }
    expected.leave_open(&plan.shared);
    if let Some(fell) = cluster.rig.world.lock().judge.fell.take() {
        return Err(fell);
    }
    let db = cluster.db();

    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    db.effects
        .iter()
        .filter(|effect| !taken_back(&effect.row.id))
        .for_each(|effect| *seen.entry(&effect.row.id).or_default() += 1);
    if let Some((id, times)) = seen.iter().find(|(_, times)| **times > 1) {
        let of: Vec<_> = db.effects.iter().filter(|effect| effect.row.id == *id).collect();
        return broken(Invariant::Once, format!("{id} took effect {times} times: {of:?}"));
    }
    if let Some(id) = expected.effects.iter().find(|id| !seen.contains_key(id.as_str())) {
        return broken(Invariant::NothingLost, format!("{id} never took effect"));
    }
    let allowed = |id: &str| expected.effects.contains(id) || expected.perhaps.contains(id);
    if let Some(id) = seen.keys().find(|id| !allowed(id)) {
        return broken(Invariant::NothingMadeUp, format!("{id} took effect and should not"));
    }
    if !plan.keyed && db.listed.len() != db.effects.len() {
        return broken(
            Invariant::RowsEndRight,
            format!("{} rows for {} effects", db.listed.len(), db.effects.len()),
        );
    }
    for (row, val) in &expected.rows {
        if db.keyed.get(row).map(|row| &row.val) != Some(val) {
            return broken(
                Invariant::RowsEndRight,
                format!("row {row} is {:?}, should end with {val}", db.keyed.get(row)),
            );
        }
    }
    if plan.mode != Mode::Insert {
        in_order(&logs, &db)?;
    }
    if plan.mode == Mode::Insert && plan.keyed {
        let written: BTreeSet<_> =
            db.effects.iter().filter(|e| e.outcome == RowOutcome::Written).map(|e| &e.row.row).collect();
        let rows = db.effects.iter().filter(|e| e.outcome == RowOutcome::Written).count();
        if written.len() != rows || rows != db.keyed.len() {
            return broken(Invariant::Once, "a row was inserted twice");
        }
    }

    let mut letters: BTreeMap<(usize, i64), &str> = BTreeMap::new();
    for letter in &db.letters {
        let partition = letter.shard.rsplit('/').next().and_then(|text| text.parse().ok());
        let at = (partition.unwrap_or(usize::MAX), letter.position.unwrap_or(-1));
        if letters.insert(at, letter.kind).is_some() {
            return broken(Invariant::LetterKept, format!("two dead letters of {at:?}"));
        }
        let perhaps = letter.kind == "late" && expected.letters_perhaps.contains(&at);
        if !perhaps && expected.letters.get(&at) != Some(&letter.kind) {
            return broken(
                Invariant::LetterKept,
                format!("dead letter {at:?} {} should not be: {}", letter.kind, letter.payload),
            );
        }
    }
    if let Some(at) = expected.letters.keys().find(|at| !letters.contains_key(at)) {
        return broken(Invariant::LetterKept, format!("no dead letter of {at:?}"));
    }
    for (partition, log) in logs.iter().enumerate() {
        let may_be_late =
            |event: &Event| event.kind == Kind::Late || shared.lenient && event.kind == Kind::Good;
        for (offset, event) in log.iter().enumerate().filter(|(_, event)| may_be_late(event)) {
            let dead = letters.contains_key(&(partition, offset as i64));
            let first = log.iter().position(|other| other.id == event.id) == Some(offset);
            if first && !dead && !seen.contains_key(&*event.id) {
                return broken(
                    Invariant::NothingLost,
                    format!("late {} is neither in the table nor a dead letter", event.id),
                );
            }
        }
    }

    MET.note(cluster, plan);
    if plan.countable() {
        let mut all: BTreeMap<&str, u64> = BTreeMap::new();
        for gate in &gates {
            counted(gate).into_iter().for_each(|(word, count)| *all.entry(word).or_default() += count);
        }
        let relayed: usize = logs.iter().map(Vec::len).sum();
        let records = relayed as u64 + shared.submitted.load(Ordering::Relaxed);
        if all.values().sum::<u64>() != records {
            return broken(Invariant::OneOutcome, format!("{records} records, counted {all:?}"));
        }
        let dead = all.get("dead_lettered").copied().unwrap_or(0);
        // Read again by the next owner, a dead letter beyond the position counts as a duplicate of itself.
        let missing = letters.len() as u64 - dead.min(letters.len() as u64);
        if dead > letters.len() as u64 || (missing > 0 && !plan.moves()) {
            return broken(Invariant::OneOutcome, format!("{} dead letters, counted {dead}", letters.len()));
        }
    }
    Ok(())
}
