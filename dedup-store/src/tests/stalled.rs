//! A slot is being sealed, and something else happens.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::faulty::{FaultyDisk, Survival, Trouble};
use crate::{disk::Disk, store::Limits, testing::*, *};

const SMALL: Limits = Limits { roll_bytes: None, keys: Some((100, 20)) };

fn open(disk: &FaultyDisk) -> Store {
    let store = Store::open_on(Arc::new(disk.clone()), options(), SMALL).unwrap();
    store.bind(&identity()).unwrap();
    store
}

fn wait_until(what: &str, is: impl Fn() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} never came");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn runs(disk: &FaultyDisk) -> Vec<String> {
    disk.list().unwrap().into_iter().filter(|name| name.starts_with("run-")).collect()
}

/// A store whose first slot, of keys 0 to 99 at 1,000 ms, is being written as a run.
fn sealing(disk: &FaultyDisk) -> Store {
    let store = open(disk);
    disk.stall(Some("run-"));
    settle(&store, "a", 1, 0..100, 1_000);
    settle(&store, "a", 2, [], 1_000);
    wait_until("the sealer", || disk.waiting());
    store
}

#[test]
fn p11_a_slot_that_expires_while_it_is_sealed_leaves_nothing() {
    let disk = FaultyDisk::default();
    let store = sealing(&disk);
    settle(&store, "a", 3, [500], 40_000);
    settle(&store, "a", 4, [], 40_000);
    assert_eq!(store.expire(0).unwrap().retire_ms, 28_000);
    disk.stall(None);
    store.wait_sealed();
    assert_eq!((runs(&disk), store.stats(0).keys), (Vec::new(), 1));
    drop(store);
    let store = open(&disk);
    assert_eq!(store.peek(&key(5)).unwrap(), None);
    assert!(knows(&store, &fact(500, 40_000, Settled::Written)));
}

#[test]
fn p6_a_slot_that_is_discarded_while_it_is_sealed_leaves_nothing() {
    let disk = FaultyDisk::default();
    let store = sealing(&disk);
    store.discard().unwrap();
    settle(&store, "a", 1, 300..310, 2_000);
    disk.stall(None);
    store.wait_sealed();
    let check = |store: &Store| {
        assert_eq!((runs(&disk), store.stats(0).keys), (Vec::new(), 10));
        assert_eq!(store.peek(&key(5)).unwrap(), None);
        assert!(knows(store, &fact(305, 2_000, Settled::Written)));
    };
    check(&store);
    drop(store);
    check(&open(&disk));
}

#[test]
fn p16_a_store_that_is_closed_while_a_slot_is_sealed_keeps_all() {
    let disk = FaultyDisk::default();
    let store = sealing(&disk);
    let ticket = store.settle(&[], &[block("a", 3, vec![fact(700, 1_000, Settled::Written)])], 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(store));
        std::thread::sleep(Duration::from_millis(20));
        disk.stall(None);
    });
    for disk in [disk.after_crash(Survival::Nothing), disk] {
        let store = open(&disk);
        assert!(store.latest() >= ticket);
        assert!((0..100).chain([700]).all(|number| store.peek(&key(number)).unwrap().is_some()));
        store.wait_sealed();
        assert_eq!(runs(&disk), ["run-1.facts", "run-1.filter"]);
    }
}

/// Settling waits while three slots wait to be sealed, and goes on when one is, or when there is no hope.
#[test]
fn p16_settling_waits_for_sealing_and_hears_of_its_end() {
    for error in [false, true] {
        let disk = FaultyDisk::default();
        let store = sealing(&disk);
        let settled = std::thread::scope(|scope| {
            let lane = scope.spawn(|| -> Result<(), StoreError> {
                for sequence in 3..20u64 {
                    let keys = sequence * 1_000..sequence * 1_000 + 100;
                    let facts = keys.map(|number| fact(number, 1_000, Settled::Written)).collect();
                    let ticket = store.settle(&[], &[block("a", sequence as i64, facts)], 0)?;
                    store.wait_durable(ticket)?;
                }
                Ok(())
            });
            let closed = || store.stats(0).slots.iter().filter(|slot| slot.kind == SlotKind::Closed).count();
            wait_until("the third closed slot", || closed() >= 3);
            std::thread::sleep(Duration::from_millis(30));
            assert!(!lane.is_finished() && closed() == 3, "it does not wait");
            assert_eq!(claim(&store, 1, item(5, 1_000)), Verdict::Duplicate(Settled::Written));
            if error {
                disk.trouble_at(disk.operations() + 1, Trouble::Glitch);
            }
            disk.stall(None);
            lane.join().unwrap()
        });
        assert_eq!(settled.is_err(), error, "{settled:?}");
        assert_eq!(store.stats(0).stopped.is_some_and(|text| text.contains("run-1.facts")), error);
        drop(store);
        let store = open(&disk);
        assert!((0..100).all(|number| store.peek(&key(number)).unwrap().is_some()));
    }
}

/// A run that did not fit on the disk was left there, half written, and took up the room that the tail waited
/// for.
#[test]
fn p16_a_run_that_does_not_fit_gives_its_room_back() {
    // In the facts, in the filter, in the manifest.
    for operation in [1, 2, 4, 8, 10, 13] {
        let disk = FaultyDisk::default();
        let store = sealing(&disk);
        disk.trouble_at(disk.operations() + operation, Trouble::NoRoom);
        // Nothing else fits from then on.
        disk.stall(None);
        wait_until("the refusal", || disk.refused() > 0);
        disk.set_room(Some(0));
        wait_until("the end of the attempt", || runs(&disk).is_empty());
        assert_eq!(store.stats(0).stopped, None, "{operation}");
        assert_eq!(claim(&store, 1, item(5, 1_000)), Verdict::Duplicate(Settled::Written));
        disk.set_room(None);
        store.wait_sealed();
        assert_eq!(runs(&disk), ["run-1.facts", "run-1.filter"], "{operation}");
        assert!((0..100).all(|number| store.peek(&key(number)).unwrap().is_some()));
    }
}

/// A filter was built again for a run that expired meanwhile: its file was left, and counted by nobody.
#[test]
fn a_filter_of_a_run_that_expires_meanwhile_is_not_left() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..100, 1_000);
    settle(&store, "a", 2, [500], 40_000);
    settle(&store, "a", 3, [], 40_000);
    store.wait_sealed();
    drop(store);
    disk.remove("run-1.filter").unwrap();
    disk.stall(Some("run-1.filter"));
    let store = open(&disk);
    wait_until("the filter", || disk.waiting());
    assert_eq!(store.expire(0).unwrap().retire_ms, 28_000);
    disk.stall(None);
    store.wait_sealed();
    assert_eq!((runs(&disk), store.stats(0).keys), (Vec::new(), 1));
}

/// Keys are asked for and claimed while their slot is sealed, expires and its column is used again.
#[test]
fn a_key_is_found_at_every_step_of_sealing() {
    let disk = FaultyDisk::default();
    let store = sealing(&disk);
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| {
            for number in (0..100).cycle().take(3_000) {
                assert!(knows(&store, &fact(number, 1_000, Settled::Written)), "{number}");
            }
        });
        std::thread::sleep(Duration::from_millis(5));
        disk.stall(None);
        asks.join().unwrap();
    });
    store.wait_sealed();
    assert!(knows(&store, &fact(5, 1_000, Settled::Written)));
}

/// A lane asks for keys, and while a run is read for it another lane settles one of them, and that one's slot
/// is closed: it is then in none of the slots that were asked, nor in the open one.
#[test]
fn p7_a_key_whose_slot_is_closed_while_others_are_asked_is_found() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..100, 1_000);
    settle(&store, "a", 2, [], 1_000);
    store.wait_sealed();
    disk.stall_reads("run-1.facts");
    let verdicts = std::thread::scope(|scope| {
        let lane = scope.spawn(|| {
            let mut verdicts = Vec::new();
            store.claim(1, i64::MAX, &[item(5, 1_000), item(700, 1_000)], &mut verdicts).unwrap();
            verdicts
        });
        wait_until("the lane", || disk.waiting());
        settle(&store, "a", 3, 700..710, 1_000);
        settle(&store, "a", 4, [], 3_000);
        disk.stall(None);
        lane.join().unwrap()
    });
    assert_eq!(verdicts, [Verdict::Duplicate(Settled::Written); 2]);
    let closed = store.stats(0).slots.iter().filter(|slot| slot.kind == SlotKind::Closed).count();
    assert_eq!(closed, 1, "the slot was not closed");
}

/// A run that did not fit was written again, all of it, at every commit. It is tried ever more rarely; but at once when expiry has
/// made room.
#[test]
fn p16_a_run_that_does_not_fit_is_tried_ever_more_rarely_and_at_once_when_there_is_room() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..100, 1_000);
    settle(&store, "a", 2, [], 1_000);
    store.wait_sealed();
    disk.stall(Some("run-2"));
    settle(&store, "a", 3, 200..300, 2_000);
    settle(&store, "a", 4, [], 2_000);
    wait_until("the sealer", || disk.waiting());
    // Enough for the tail, not for the run's hundred blocks.
    disk.set_room(Some(disk.used() + 80_000));
    disk.stall(None);
    let start = Instant::now();
    let mut sequence = 5;
    while start.elapsed() < Duration::from_millis(3_300) {
        // Each of these wakes the sealer.
        settle(&store, "a", sequence, [], 2_000);
        sequence += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
    // At 0, 0.2, 0.6, 1.4 and 3 s; the next is at 6.2 s.
    let attempts = disk.refused();
    assert!((2..=6).contains(&attempts), "{attempts} attempts, {sequence} commits");
    settle(&store, "a", sequence, [], 13_500);
    disk.set_room(None);
    let start = Instant::now();
    assert_eq!(store.expire(0).unwrap().retire_ms, 1_500);
    wait_until("the run", || runs(&disk).contains(&"run-2.filter".to_owned()));
    assert!(start.elapsed() < Duration::from_millis(1_500), "{:?}", start.elapsed());
    store.wait_sealed();
    assert!((200..300).all(|number| store.peek(&key(number)).unwrap().is_some()));
}
