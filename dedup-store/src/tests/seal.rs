//! Slots that are sealed: the same verdicts as before, from runs behind filters.

use std::{
    collections::BTreeSet,
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use tempfile::TempDir;

use super::faulty::FaultyDisk;
use crate::{disk::Disk, store::Limits, testing::*, *};

/// A slot is closed at 100 keys, and sealed if it holds 20.
const SMALL: Limits = Limits { roll_bytes: None, keys: Some((100, 20)) };

fn open(disk: &FaultyDisk) -> Store {
    let store = Store::open_on(Arc::new(disk.clone()), options(), SMALL).unwrap();
    store.bind(&identity()).unwrap();
    store
}

/// Ends the group that is pending, and one more: the slot that it begins lets the one before be sealed.
fn seal_all(store: &Store, sequence: i64, event_ms: i64) {
    settle(store, "seal", 2 * sequence, [], event_ms);
    settle(store, "seal", 2 * sequence + 1, [], event_ms);
    store.wait_sealed();
}

fn kinds(store: &Store) -> Vec<SlotKind> {
    store.stats(0).slots.iter().map(|slot| slot.kind).collect()
}

#[test]
fn a_large_slot_is_sealed_and_answers_as_before() {
    const KEYS: u64 = 100_000;
    let folder = TempDir::new().unwrap();
    let small = StoreOptions { max_disk_bytes: 20 << 20, ..options() };
    let store = Store::open(folder.path(), small.clone()).unwrap();
    store.bind(&identity()).unwrap();
    for part in 0..10 {
        settle(&store, "a", 1 + part as i64, part * KEYS / 10..(part + 1) * KEYS / 10, 1_000);
    }
    seal_all(&store, 1, 1_000);
    let stats = store.stats(0);
    assert_eq!(stats.keys, KEYS, "{stats}");
    let sealed: Vec<_> = stats.slots.iter().filter(|slot| slot.kind == SlotKind::Sealed).collect();
    assert_eq!(sealed.len(), 2, "{stats}");
    let bytes: u64 = sealed.iter().map(|slot| slot.memory_bytes).sum();
    let keys: u64 = sealed.iter().map(|slot| slot.keys).sum();
    assert!(bytes < 4 * keys, "{stats}");
    let check = |store: &Store| {
        for number in (0..KEYS).step_by(7) {
            assert!(knows(store, &fact(number, 1_000, Settled::Written)), "{number}");
        }
        let mut verdicts = Vec::new();
        let other = Item { digest: Digest((1 << 40) + 5), ..item(5, 1_000) };
        let all: Vec<_> = (0..KEYS + 50_000).map(|number| item(number, 1_000)).chain([other]).collect();
        store.claim(1, i64::MAX, &all, &mut verdicts).unwrap();
        let expected = |number: u64| match number {
            0..KEYS => Verdict::Duplicate(Settled::Written),
            _ => Verdict::New { late: false },
        };
        for (number, verdict) in (0..KEYS + 50_000).zip(&verdicts) {
            assert_eq!(*verdict, expected(number), "key {number}");
        }
        // Of the digest, a run keeps the low 37 bits.
        assert_eq!(verdicts[all.len() - 1], Verdict::Duplicate(Settled::Written));
        let other = Item { digest: Digest(6), ..item(5, 1_000) };
        assert_eq!(claim(store, 1, other), Verdict::Mismatch(Settled::Written));
        store.release_lane(1);
    };
    check(&store);
    let names: BTreeSet<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("run-") || name.starts_with("tail-"))
        .collect();
    let expected =
        ["run-1.facts", "run-1.filter", "run-2.facts", "run-2.filter", "tail-3.redb"].map(str::to_owned);
    assert_eq!(names, expected.into());
    drop(store);
    let report = verify(folder.path()).unwrap();
    assert!(report.faults.is_empty(), "{report}");
    assert_eq!(report.files.iter().map(|file| file.facts).sum::<u64>(), KEYS);
    let store = Store::open(folder.path(), small).unwrap();
    assert_eq!(store.stats(0).keys, KEYS);
    check(&store);
}

#[test]
fn p16_memory_and_tails_are_bounded_whatever_the_lateness() {
    let disk = FaultyDisk::default();
    let options = StoreOptions { lateness_ms: 1 << 40, ..options() };
    let store = Store::open_on(Arc::new(disk.clone()), options, SMALL).unwrap();
    store.bind(&identity()).unwrap();
    for sequence in 1..60 {
        let first = sequence as u64 * 50;
        settle(&store, "a", sequence, first..first + 50, sequence * 1_000_000);
    }
    store.wait_sealed();
    let kinds = kinds(&store);
    assert!(kinds.iter().filter(|kind| **kind == SlotKind::Sealed).count() >= 28, "{kinds:?}");
    assert!(kinds.iter().filter(|kind| **kind != SlotKind::Sealed).count() <= 1, "{kinds:?}");
    let tails = disk.list().unwrap().iter().filter(|name| name.starts_with("tail-")).count();
    assert_eq!(tails, 1);
    assert!((50..3_000).all(|number| store.peek(&key(number)).unwrap().is_some()));
}

#[test]
fn p16_catching_up_from_marks_builds_runs() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    // All at once, as a shard that was taken over is learnt; some of it twice.
    let marks: Vec<_> = (0..100u64)
        .map(|number| number * 25)
        .map(|first| {
            let facts = (first..first + 30).map(|number| fact(number, 3_000, Settled::Written)).collect();
            block("a", first as i64, facts)
        })
        .collect();
    for mark in marks {
        let ticket = store.settle(&[], &[mark], 0).unwrap();
        store.wait_durable(ticket).unwrap();
    }
    seal_all(&store, 1, 3_000);
    let stats = store.stats(0);
    assert_eq!(stats.keys, 2_505, "each key once: {stats}");
    assert!(stats.slots.iter().filter(|slot| slot.kind == SlotKind::Sealed).count() > 15, "{stats}");
    drop(store);
    let store = open(&disk);
    assert_eq!(store.stats(0).keys, 2_505);
}

#[test]
fn p2_and_p12_hold_for_keys_of_sealed_slots() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    let refused = (0..150).map(|number| fact(number, 5_000, Settled::DeadLettered)).collect();
    store.settle(&[checkpoint("a", 1, 5_000)], &[block("a", 1, refused)], 5_000).unwrap();
    seal_all(&store, 1, 5_000);
    assert_eq!(kinds(&store), [SlotKind::Sealed]);
    // A replay of the first one's dead letter takes effect; the second is taken back; the third is taken back
    // and settled again.
    let replay = Item { replay_dead_letter: true, ..item(0, 4_000) };
    assert_eq!(claim(&store, 1, item(0, 4_000)), Verdict::Duplicate(Settled::DeadLettered));
    assert_eq!(claim(&store, 1, replay), Verdict::New { late: false });
    let forgotten = |number| fact(number, 4_000, Settled::Forgotten);
    let facts = vec![fact(0, 4_000, Settled::Updated), forgotten(1), forgotten(2)];
    store.settle(&[checkpoint("a", 2, 5_000)], &[block("a", 2, facts)], 5_000).unwrap();
    let again = vec![fact(2, 4_000, Settled::Written)];
    store.settle(&[checkpoint("a", 3, 5_000)], &[block("a", 3, again)], 5_000).unwrap();
    let check = |store: &Store, context: &str| {
        assert_eq!(store.peek(&key(0)).unwrap().unwrap().settled, Settled::Updated, "{context}");
        assert_eq!(store.peek(&key(1)).unwrap(), None, "{context}");
        assert_eq!(store.peek(&key(2)).unwrap().unwrap().settled, Settled::Written, "{context}");
        assert_eq!(store.peek(&key(3)).unwrap().unwrap().settled, Settled::DeadLettered, "{context}");
        assert_eq!(claim(store, 1, item(1, 5_000)), Verdict::New { late: false }, "{context}");
        store.release_lane(1);
    };
    check(&store, "open slot");
    // The mark that first held them is learnt once more.
    let old = (0..5).map(|number| fact(number, 5_000, Settled::DeadLettered)).collect();
    store.settle(&[], &[block("a", 1, old)], 5_000).unwrap();
    check(&store, "learnt again");
    drop(store);
    let store = open(&disk);
    check(&store, "opened again");
    // Their slot is closed, and sealed.
    settle(&store, "a", 4, 1_000..1_120, 6_000);
    seal_all(&store, 2, 6_000);
    assert_eq!(kinds(&store).iter().filter(|kind| **kind == SlotKind::Sealed).count(), 2);
    check(&store, "sealed");
    drop(store);
    let store = open(&disk);
    check(&store, "sealed and opened again");
    settle(&store, "a", 5, 2_000..2_120, 7_000);
    seal_all(&store, 3, 7_000);
    drop(store);
    check(&open(&disk), "their tails are gone");
}

#[test]
fn p11_expiry_reads_nothing_and_removes_runs_and_filters() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    for sequence in 1..=5 {
        let first = sequence as u64 * 1_000;
        settle(&store, "a", sequence, first..first + 200, sequence * 4_000);
    }
    seal_all(&store, 1, 20_000);
    let runs = || disk.list().unwrap().iter().filter(|name| name.starts_with("run-")).count();
    assert_eq!((runs(), store.stats(0).keys), (10, 1_000));
    settle(&store, "a", 6, [1], 26_000);
    settle(&store, "seal", 4, [], 26_000);
    let reads = disk.reads("run-");
    // G = 26,000 - 12,000: the slots of 4,000, 8,000 and 12,000 are over.
    assert_eq!(store.expire(26_000).unwrap().retire_ms, 14_000);
    assert_eq!(disk.reads("run-"), reads);
    assert_eq!((runs(), store.stats(0).keys), (4, 401));
    assert_eq!(claim(&store, 1, item(1_000, 4_000)), Verdict::Late { floor_ms: 22_001 });
    assert!(knows(&store, &fact(5_000, 20_000, Settled::Written)));
    // Their columns are emptied, and used again.
    store.wait_sealed();
    for sequence in 7..=30 {
        let first = sequence as u64 * 1_000;
        settle(&store, "a", sequence, first..first + 200, sequence * 4_000);
        store.expire(sequence * 4_000).unwrap();
        store.wait_sealed();
        assert!(knows(&store, &fact(first, sequence * 4_000, Settled::Written)));
        assert_eq!(claim(&store, 1, item(first + 500, sequence * 4_000)), Verdict::New { late: false });
    }
    let stats = store.stats(0);
    let filters: u64 = stats.slots.iter().map(|slot| slot.filter_bits).sum();
    assert!(stats.slots.len() <= 6 && filters <= 6 * 200 * 40, "{stats}");
    drop(store);
    assert!(open(&disk).stats(0).slots.len() <= 6);
}

#[test]
fn a_filter_that_is_missing_or_damaged_is_built_again() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..300, 1_000);
    settle(&store, "a", 2, 1_000..1_300, 1_000);
    seal_all(&store, 1, 1_000);
    assert_eq!(kinds(&store), [SlotKind::Sealed; 2]);
    drop(store);
    disk.remove("run-1.filter").unwrap();
    let file = disk.open("run-2.filter", false).unwrap();
    file.write(5_000, &[0x55; 40]).unwrap();
    let store = open(&disk);
    let check = |store: &Store| {
        assert!((0..300).chain(1_000..1_300).all(|number| store.peek(&key(number)).unwrap().is_some()));
        assert!((300..1_000).all(|number| store.peek(&key(number)).unwrap().is_none()));
    };
    check(&store);
    store.wait_sealed();
    let stats = store.stats(0);
    assert!(stats.slots.iter().all(|slot| slot.filter_bits > 0), "{stats}");
    check(&store);
    drop(store);
    let reads = disk.reads("run-1.facts");
    let store = open(&disk);
    store.wait_sealed();
    assert!(disk.reads("run-1.facts") < reads + 4, "the filter is loaded, not built");
    check(&store);
}

#[test]
fn a_damaged_run_stops_the_store_and_is_named() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..600, 1_000);
    seal_all(&store, 1, 1_000);
    let file = disk.open("run-1.facts", false).unwrap();
    let mut byte = [0];
    file.read(4_096 + 100, &mut byte).unwrap();
    file.write(4_096 + 100, &[byte[0] ^ 1]).unwrap();
    let errors: BTreeSet<String> =
        (0..600).filter_map(|number| store.peek(&key(number)).err()).map(|error| error.to_string()).collect();
    let text = errors.iter().next().expect("a key of that block was asked for");
    assert!(text.contains("run-1.facts: block 0") && text.contains("damaged"), "{text}");
    assert!(matches!(store.claim(1, 0, &[item(9_999, 0)], &mut Vec::new()), Err(StoreError::Stopped { .. })));
}

/// Lanes claim the same keys while slots are sealed, expire, and filters move under them.
#[test]
fn each_key_is_new_to_one_lane_only_while_slots_are_sealed() {
    const KEYS: u64 = 30_000;
    let disk = FaultyDisk::default();
    let limits = Limits { roll_bytes: None, keys: Some((400, 50)) };
    let store = Store::open_on(Arc::new(disk), options(), limits).unwrap();
    store.bind(&identity()).unwrap();
    let (effects, sequence) = (AtomicU64::new(0), AtomicU64::new(0));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..4u32)
            .map(|lane| {
                let (store, effects, sequence) = (&store, &effects, &sequence);
                scope.spawn(move || {
                    for part in 0..KEYS / 50 {
                        let items: Vec<_> =
                            (part * 50..part * 50 + 50).map(|number| item(number, 1_000)).collect();
                        let mut verdicts = Vec::new();
                        store.claim(lane, i64::MAX, &items, &mut verdicts).unwrap();
                        let new = (part * 50..)
                            .zip(&verdicts)
                            .filter(|(_, verdict)| **verdict == Verdict::New { late: false });
                        let facts: Vec<_> =
                            new.map(|(number, _)| fact(number, 1_000, Settled::Written)).collect();
                        effects.fetch_add(facts.len() as u64, Ordering::Relaxed);
                        let sequence = sequence.fetch_add(1, Ordering::Relaxed) as i64;
                        let ticket = store.settle(&[], &[block("a", sequence, facts)], 0).unwrap();
                        if part % 8 == 0 {
                            store.wait_durable(ticket).unwrap();
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                store.expire(0).unwrap();
                std::thread::yield_now();
            }
        });
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!((effects.load(Ordering::Relaxed), store.stats(0).keys), (KEYS, KEYS));
    assert!(kinds(&store).iter().filter(|kind| **kind == SlotKind::Sealed).count() > 40);
}

/// What the open slot or the filters tell needs no disk; where they cannot tell, memory alone says so.
#[test]
fn p7_memory_tells_of_open_and_of_unknown_keys_without_a_read() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..100, 1_000);
    seal_all(&store, 1, 1_000);
    settle(&store, "a", 2, 500..505, 1_000);
    let before = disk.reads("run-");
    let open_key = store.peek_in_memory(&key(502)).unwrap().expect("it is in memory");
    assert_eq!(open_key.map(|known| known.settled), Some(Settled::Written));
    let strangers =
        (1_000..1_100).filter(|number| store.peek_in_memory(&key(*number)).unwrap() == Some(None));
    assert!(strangers.count() > 95, "filters are wrong too often");
    assert!((0..100).all(|number| store.peek_in_memory(&key(number)).unwrap().is_none()));
    assert_eq!(disk.reads("run-"), before);
    assert!((0..100).all(|number| store.peek(&key(number)).unwrap().is_some()));
    assert!(disk.reads("run-") > before);
}
