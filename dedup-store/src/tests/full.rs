//! A full disk is back-pressure that ends (P16).

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::faulty::{FaultyDisk, Survival, Trouble};
use crate::{testing::*, *};

const ROLL_BYTES: u64 = 20_000;

fn open(disk: &FaultyDisk) -> Store {
    let store = Store::open_on(Arc::new(disk.clone()), options(), limits(ROLL_BYTES)).unwrap();
    store.bind(&identity()).unwrap();
    store
}

fn full(result: Result<(), StoreError>) -> bool {
    match result {
        Ok(()) => false,
        Err(StoreError::Full { budget: Budget::FileSystem, .. }) => true,
        Err(other) => panic!("expected Full or Ok, got {other}"),
    }
}

fn until_durable(store: &Store, ticket: Ticket) {
    let end = Instant::now() + Duration::from_secs(20);
    while full(store.wait_durable(ticket)) {
        assert!(Instant::now() < end, "it does not recover: {}", store.stats(0));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn p16_a_full_disk_refuses_claims_and_keeps_settlements_until_there_is_room() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..100, 1_000);
    disk.set_room(Some(disk.used()));
    let facts =
        |from: u64| (from..from + 3_000).map(|number| fact(number, 2_000, Settled::Written)).collect();
    let ticket = store.settle(&[checkpoint("a", 2, 2_000)], &[block("a", 2, facts(1_000))], 2_000).unwrap();
    assert!(full(store.wait_durable(ticket)));
    assert!(full(store.claim(1, i64::MAX, &[item(1 << 30, 2_000)], &mut Vec::new())));
    // Lanes that were at the sink come back, and are heard.
    let ticket = store.settle(&[checkpoint("b", 1, 2_000)], &[block("b", 1, facts(5_000))], 2_000).unwrap();
    assert!(store.peek(&key(5_000)).unwrap().is_some());
    assert!(full(store.begin_effect(&key(7)).map(drop)));
    assert!(!store.effect_pending(&key(7)).unwrap(), "an effect that could not be begun is not pending");
    assert!(store.stats(0).disk_full.is_some());
    disk.set_room(None);
    until_durable(&store, ticket);
    assert_eq!(claim(&store, 1, item(1 << 30, 2_000)), Verdict::New { late: false });
    let keys = store.stats(0).keys;
    drop(store);
    let store = open(&disk);
    assert_eq!(store.stats(0).keys, keys);
    assert_eq!(store.checkpoint("a").unwrap().sequence, 2);
    assert_eq!(store.checkpoint("b").unwrap().sequence, 1);
    assert!(!store.effect_pending(&key(7)).unwrap());
}

#[test]
fn p16_expiry_makes_room_on_a_full_disk_by_itself() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    let mut settled = 0;
    // The disk fills up while time stands still.
    let room = disk.used() + 600_000;
    disk.set_room(Some(room));
    let last = loop {
        settled += 1;
        let facts =
            (settled * 1_000..settled * 1_000 + 500).map(|number| fact(number, 5_000, Settled::Written));
        let sequence = settled as i64;
        let blocks = [block("a", sequence, facts.collect())];
        let ticket = store.settle(&[checkpoint("a", sequence, 5_000)], &blocks, 5_000).unwrap();
        if full(store.wait_durable(ticket)) {
            break ticket;
        }
        assert!(settled < 1_000, "it never filled up");
    };
    assert!(disk.refused() > 0);
    assert!(full(store.claim(1, i64::MAX, &[item(1 << 30, 5_000)], &mut Vec::new())));
    assert_eq!(claim(&store, 1, item(1_000, 5_000)), Verdict::Duplicate(Settled::Written));
    // Time moves on: the shard's watermark comes in with no record, and all of it can go.
    store.settle(&[checkpoint("a", settled as i64, 90_000)], &[], 90_000).unwrap();
    let floors = store.expire(90_000).unwrap();
    assert_eq!(floors.retire_ms, 78_000);
    until_durable(&store, last);
    until_durable(&store, store.latest());
    assert_eq!(claim(&store, 1, item(1 << 30, 90_000)), Verdict::New { late: false });
    store.expire(90_001).unwrap();
    assert!(store.stats(0).disk_full.is_none());
    assert!(disk.used() < room);
    assert!(crate::disk::Disk::list(&disk).unwrap().contains(&"reserve".to_owned()), "the reserve is back");
    drop(store);
    let store = open(&disk);
    assert_eq!(store.stats(0).floor_ms, 78_000);
    assert_eq!(claim(&store, 1, item(1_000, 5_000)), Verdict::Late { floor_ms: 88_000 });
}

/// Room for any number of bytes more: each time the store ends in Full or done, loses nothing, and recovers.
#[test]
fn p16_the_disk_may_fill_up_anywhere() {
    for more in (0..400_000).step_by(9_973) {
        let disk = FaultyDisk::default();
        let store = open(&disk);
        settle(&store, "a", 1, 0..100, 1_000);
        disk.set_room(Some(disk.used() + more));
        let mut was_full = false;
        let mut last = Ticket(0);
        let mut retire_ms = i64::MIN;
        for sequence in 2..8 {
            let at = sequence * 5_000;
            let facts = (at..at + 400).map(|number| fact(number as u64, at, Settled::Written)).collect();
            let blocks = [block("a", sequence, facts)];
            last = store.settle(&[checkpoint("a", sequence, at)], &blocks, at).unwrap();
            was_full |= full(store.wait_durable(last));
            let floors = store.expire(at);
            if let Ok(floors) = &floors {
                assert!(floors.retire_ms >= retire_ms);
                retire_ms = floors.retire_ms;
            }
            was_full |= full(floors.map(drop));
        }
        if !was_full {
            continue;
        }
        if more % 2 == 0 {
            // It is killed while full: what was acknowledged is there, and what was forgotten is not admitted.
            let store = open(&disk.after_crash(Survival::Nothing));
            assert!(store.checkpoint("a").unwrap().sequence >= 1);
            let stats = store.stats(0);
            assert!(stats.floors.retire_ms >= retire_ms, "{} after {retire_ms}", stats.floors.retire_ms);
            assert!(stats.floor_ms > 1_000 || store.peek(&key(50)).unwrap().is_some());
        } else {
            disk.set_room(None);
            until_durable(&store, last);
            drop(store);
            let store = open(&disk);
            assert_eq!(store.checkpoint("a").unwrap().sequence, 7);
            let floor_ms = store.stats(0).floor_ms;
            for at in (2..8).map(|round| round * 5_000).filter(|at| *at >= floor_ms) {
                assert!(store.peek(&key(at as u64 + 399)).unwrap().is_some());
            }
        }
    }
}

/// A group that failed and was in nevertheless counts for its tail: or the tail would go while the group is still needed.
#[test]
fn p16_a_tail_stays_for_a_group_that_got_in_when_the_disk_was_full() {
    for later in 1..16 {
        let disk = FaultyDisk::default();
        let store = Store::open_on(Arc::new(disk.clone()), options(), limits(1)).unwrap();
        store.bind(&identity()).unwrap();
        disk.trouble_at(disk.operations() + later, Trouble::NoRoom);
        let facts = [(1, 1, 30_000), (2, 2, 5_000), (3, 3, 30_000)];
        for (number, sequence, at) in facts {
            let blocks = [block("a", sequence, vec![fact(number, at, Settled::Written)])];
            let ticket = store.settle(&[checkpoint("a", sequence, 30_000)], &blocks, 0).unwrap();
            while full(store.wait_durable(ticket)) {
                full(store.expire(0).map(drop));
            }
        }
        assert_eq!(store.expire(0).unwrap().retire_ms, 18_000);
        drop(store);
        let store = open(&disk);
        for (number, _, at) in facts {
            assert_eq!(
                store.peek(&key(number)).unwrap().is_some(),
                at >= 18_000,
                "key {number}, no room at {later}"
            );
        }
    }
}

#[test]
fn p16_a_store_opens_on_a_full_disk() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..3_000, 1_000);
    disk.set_room(Some(disk.used()));
    // It dies while full, with a repair to be done.
    let crashed = disk.after_crash(Survival::Everything);
    crashed.set_room(Some(crashed.used()));
    let store = open(&crashed);
    assert_eq!(store.stats(0).keys, 3_000);
    // Without a byte of room, and the reserve used up, it is the disk that is to blame.
    drop(store);
    crashed.set_room(Some(0));
    match Store::open_on(Arc::new(crashed.clone()), options(), limits(ROLL_BYTES)) {
        Ok(store) => assert_eq!(store.stats(0).keys, 3_000),
        Err(StoreError::Io(text)) => assert!(text.contains("storage space"), "{text}"),
        Err(other) => panic!("{other}"),
    }
    crashed.set_room(None);
    assert_eq!(open(&crashed).stats(0).keys, 3_000);
}
