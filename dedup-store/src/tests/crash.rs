//! The power goes at every single change on disk: what comes back is a whole prefix of what was settled, and holds all that
//! was acknowledged (P11, P16).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use super::faulty::{FaultyDisk, Survival, Trouble};
use crate::{store::Limits, testing::*, *};

const KEYS: u64 = 40;
const ROUNDS: i64 = 9;
/// Slots are closed after a round, by the watermark, and sealed if they hold the keys of one.
const LIMITS: Limits = Limits { roll_bytes: Some(4_000), keys: Some((1_000, KEYS)) };

/// What the outside knows of a run.
#[derive(Clone, Debug)]
struct Ledger {
    /// Last acknowledged sequence of the shard, since the last discard.
    acknowledged: i64,
    /// Settled, perhaps not acknowledged.
    tried: i64,
    /// Event time of each round.
    times: BTreeMap<i64, i64>,
    retire_ms: i64,
    /// Changes on disk until the store was closed: those that follow nobody waits for.
    waited: u64,
    intents: BTreeSet<u64>,
    /// A discard was tried, perhaps not acknowledged, after this state.
    before_discard: Option<Box<Ledger>>,
}

impl Default for Ledger {
    fn default() -> Self {
        Ledger {
            acknowledged: 0,
            tried: 0,
            times: BTreeMap::new(),
            retire_ms: i64::MIN,
            waited: 0,
            intents: BTreeSet::new(),
            before_discard: None,
        }
    }
}

fn open(disk: &FaultyDisk) -> Result<Store, StoreError> {
    let store = Store::open_on(Arc::new(disk.clone()), options(), LIMITS)?;
    store.bind(&identity())?;
    Ok(store)
}

fn keys_of(sequence: i64) -> std::ops::Range<u64> {
    (sequence as u64 * KEYS)..(sequence as u64 * KEYS + KEYS)
}

/// Tries again while the disk is full, as a gateway does: with expiry in between.
fn patient<T>(store: &Store, mut call: impl FnMut() -> Result<T, StoreError>) -> Result<T, StoreError> {
    for _ in 0..1_000 {
        match call() {
            Err(StoreError::Full { .. }) => {
                if let Err(error) = store.expire(0)
                    && !matches!(error, StoreError::Full { .. })
                {
                    return Err(error);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
            done => return done,
        }
    }
    panic!("the disk stays full: {}", store.stats(0));
}

fn round(store: &Store, ledger: &mut Ledger, sequence: i64, at: i64) -> Result<(), StoreError> {
    let facts = keys_of(sequence).map(|number| fact(number, at, Settled::Written)).collect();
    ledger.tried = sequence;
    ledger.times.insert(sequence, at);
    let ticket = store.settle(&[checkpoint("a", sequence, at)], &[block("a", sequence, facts)], at)?;
    patient(store, || store.wait_durable(ticket))?;
    ledger.acknowledged = sequence;
    // The sealer is done before anything else is begun: so a run is the same each time.
    store.wait_sealed();
    let floors = patient(store, || store.expire(at))?;
    assert!(floors.retire_ms >= ledger.retire_ms, "floors went back");
    ledger.retire_ms = floors.retire_ms;
    Ok(())
}

/// Opens, settles, rolls, expires, discards, begins effects; ends at the first error.
fn scenario(disk: &FaultyDisk, ledger: &mut Ledger) -> Result<(), StoreError> {
    let store = open(disk)?;
    for sequence in 1..=ROUNDS {
        round(&store, ledger, sequence, sequence * 4_000)?;
        if sequence == 2 {
            patient(&store, || store.begin_effect(&key(1 << 40)))?;
            ledger.intents.insert(1 << 40);
        }
    }
    drop(store);
    let store = open(disk)?;
    store.wait_sealed();
    store.peek(&key(0))?;
    check(&store, ledger, "closed and opened");
    let before = ledger.clone();
    *ledger = Ledger {
        intents: before.intents.clone(),
        before_discard: Some(Box::new(before)),
        ..Ledger::default()
    };
    patient(&store, || store.discard())?;
    ledger.before_discard = None;
    for sequence in 1..=2 {
        round(&store, ledger, sequence, sequence * 3_000)?;
    }
    drop(store);
    let store = open(disk)?;
    round(&store, ledger, 3, 10_000)?;
    ledger.waited = disk.operations();
    Ok(())
}

/// The reopened store against the ledger. Panics with `context` if it is no state that may be.
fn check(store: &Store, ledger: &Ledger, context: &str) {
    let sequence = store.checkpoint("a").map_or(0, |checkpoint| checkpoint.sequence);
    if let Some(before) = &ledger.before_discard
        && sequence != 0
    {
        return check(store, before, context);
    }
    assert!(
        (ledger.acknowledged..=ledger.tried).contains(&sequence),
        "{context}: at {sequence}, acknowledged {}, tried {}",
        ledger.acknowledged,
        ledger.tried
    );
    let stats = store.stats(0);
    if ledger.acknowledged > 0 {
        assert!(stats.floors.retire_ms >= ledger.retire_ms, "{context}: floors went back");
    }
    for (round, at) in &ledger.times {
        for number in keys_of(*round) {
            let found = store.peek(&key(number)).unwrap();
            if *round > sequence {
                assert_eq!(found, None, "{context}: key of round {round} at {sequence}");
            } else if *at >= stats.floor_ms {
                let held = knows(store, &fact(number, *at, Settled::Written));
                assert!(held, "{context}: round {round} at {sequence}: {found:?}");
            } else {
                let verdict = claim(store, 1, item(number, *at));
                let known = matches!(verdict, Verdict::Duplicate(_) | Verdict::Late { .. });
                assert!(known, "{context}: {verdict:?} for a key of round {round}");
            }
        }
    }
    for intent in &ledger.intents {
        assert!(store.effect_pending(&key(*intent)).unwrap(), "{context}: an intent is lost");
    }
}

/// Opens what a crash left, checks it, works on, and opens once more.
fn recover(disk: &FaultyDisk, ledger: &Ledger, context: &str) {
    let store = open(disk).unwrap_or_else(|error| panic!("{context}: {error}"));
    check(&store, ledger, context);
    let sequence = store.checkpoint("a").map_or(0, |checkpoint| checkpoint.sequence);
    let mut after = ledger.clone();
    if let Some(before) = &ledger.before_discard
        && sequence != 0
    {
        after = (**before).clone();
    }
    after.before_discard = None;
    after.times.retain(|round, _| *round <= sequence);
    round(&store, &mut after, sequence + 1, 50_000).unwrap_or_else(|error| panic!("{context}: {error}"));
    drop(store);
    let store = open(disk).unwrap_or_else(|error| panic!("{context}: {error}"));
    check(&store, &after, context);
}

/// Changes on disk of a run without trouble, and those of them that were waited for.
fn operations() -> (u64, u64) {
    let disk = FaultyDisk::default();
    let mut ledger = Ledger::default();
    scenario(&disk, &mut ledger).unwrap();
    assert_eq!((ledger.acknowledged, ledger.tried), (3, 3));
    (disk.operations(), ledger.waited)
}

#[test]
fn p16_a_crash_at_every_change_leaves_a_prefix_that_holds_all_acknowledged() {
    let (operations, waited) = operations();
    let mut cuts = 0;
    for at in 1..=operations {
        let disk = FaultyDisk::default();
        disk.trouble_at(at, Trouble::Cut);
        let mut ledger = Ledger::default();
        let ended = scenario(&disk, &mut ledger);
        assert!(ended.is_err() || at > waited, "cut {at} of {operations} went unnoticed");
        for survival in [Survival::Nothing, Survival::Everything, Survival::Some(at)] {
            let context = format!("cut at {at} of {operations}, {survival:?}");
            recover(&disk.after_crash(survival), &ledger, &context);
            cuts += 1;
        }
        // The power goes again while the store recovers.
        let disk = disk.after_crash(Survival::Some(at + 1));
        disk.trouble_at(1 + at * 7 % 60, Trouble::Cut);
        let _again = open(&disk).map(drop);
        recover(&disk.after_crash(Survival::Some(at)), &ledger, &format!("second cut after {at}"));
        cuts += 1;
    }
    println!("{cuts} crashes at {operations} changes on disk");
    assert!(cuts >= 5_000, "{cuts} crashes");
}

#[test]
fn rule7_an_io_error_stops_the_store_for_good() {
    let (operations, _) = operations();
    for at in 1..=operations {
        let disk = FaultyDisk::default();
        disk.trouble_at(at, Trouble::Glitch);
        let mut ledger = Ledger::default();
        if let Err(error) = scenario(&disk, &mut ledger) {
            let named = matches!(&error, StoreError::Stopped { first } | StoreError::Io(first) if first.contains("a glitch"));
            assert!(named, "error at {at}: {error}");
        }
        // Whatever it was, nothing acknowledged is lost once it is opened again.
        recover(&disk, &ledger, &format!("glitch at {at} of {operations}"));
    }
}

/// A full disk is met once, at every change: claims wait, nothing is lost, and the run goes on to its end.
#[test]
fn p16_a_full_disk_at_every_change_is_got_over() {
    let (operations, _) = operations();
    let mut met = 0;
    for at in 1..=operations {
        let disk = FaultyDisk::default();
        disk.trouble_at(at, Trouble::NoRoom);
        let mut ledger = Ledger::default();
        match scenario(&disk, &mut ledger) {
            Ok(()) => met += disk.refused(),
            // Nothing is open yet that could wait.
            Err(StoreError::Full { .. }) => {}
            Err(StoreError::Io(text)) if text.contains("storage") => {}
            Err(error) => panic!("no room at {at}: {error}"),
        }
        let crashed = disk.after_crash(Survival::Nothing);
        recover(&disk, &ledger, &format!("no room at {at} of {operations}"));
        recover(&crashed, &ledger, &format!("no room, then a crash, at {at}"));
        // The power goes while it is being got over.
        let disk = FaultyDisk::default();
        disk.trouble_at(at, Trouble::NoRoom);
        disk.trouble_at(at + 1 + at % 9, Trouble::Cut);
        let mut ledger = Ledger::default();
        let _ended = scenario(&disk, &mut ledger);
        for survival in [Survival::Nothing, Survival::Everything] {
            let context = format!("no room at {at}, cut soon after, {survival:?}");
            recover(&disk.after_crash(survival), &ledger, &context);
        }
    }
    assert!(met > operations / 2, "{met} of {operations}");
}

#[test]
fn rule7_every_call_of_a_stopped_store_names_the_first_error() {
    let disk = FaultyDisk::default();
    let store = open(&disk).unwrap();
    settle(&store, "a", 1, [1], 0);
    disk.trouble_at(disk.operations() + 1, Trouble::Glitch);
    let ticket = store.settle(&[checkpoint("a", 2, 0)], &[], 0).unwrap();
    let stopped = |result: Result<(), StoreError>| match result {
        Err(StoreError::Stopped { first }) => {
            assert!(first.contains("a glitch") && first.contains("tail-1"), "{first}")
        }
        other => panic!("expected Stopped, got {other:?}"),
    };
    stopped(store.wait_durable(ticket));
    stopped(store.claim(1, 0, &[item(2, 0)], &mut Vec::new()));
    stopped(store.peek(&key(1)).map(drop));
    stopped(store.settle(&[], &[], 0).map(drop));
    stopped(store.expire(0).map(drop));
    stopped(store.discard());
    stopped(store.bind(&identity()).map(drop));
    stopped(store.begin_effect(&key(1)).map(drop));
    stopped(store.effect_pending(&key(1)).map(drop));
    stopped(store.cancel_effect(&key(1)));
    assert!(store.stats(0).stopped.unwrap().contains("a glitch"));
    drop(store);
    let store = open(&disk).unwrap();
    assert_eq!(store.checkpoint("a").unwrap().sequence, 1);
}
