//! When slots are closed, and what stays known once some of them have gone (P2, P12, P16).

use std::sync::Arc;

use super::faulty::{FaultyDisk, Survival, Trouble};
use crate::{disk::Disk, store::Limits, testing::*, *};

/// A slot is closed at 100 keys, and sealed if it holds 40. A tail of old facts is given up at 1,000 bytes.
const LIMITS: Limits = Limits { roll_bytes: Some(4_000), keys: Some((100, 40)) };

fn open(disk: &FaultyDisk) -> Store {
    let store = Store::open_on(Arc::new(disk.clone()), options(), LIMITS).unwrap();
    store.bind(&identity()).unwrap();
    store
}

/// Moves the watermark on and nothing else.
fn watermark(store: &Store, sequence: i64, watermark_ms: i64) {
    settle(store, "a", sequence, [], watermark_ms);
}

fn settle_facts(store: &Store, sequence: i64, facts: Vec<Entry>) {
    let ticket = store.settle(&[], &[block("a", sequence, facts)], 0).unwrap();
    store.wait_durable(ticket).unwrap();
}

/// Runs `check` on the store as it is, and opened again.
fn now_and_later(disk: &FaultyDisk, store: Store, check: impl Fn(&Store, &str)) {
    check(&store, "as it is");
    store.wait_sealed();
    check(&store, "sealed");
    check(&open(&disk.after_crash(Survival::Nothing)), "after a crash");
    drop(store);
    check(&open(disk), "opened again");
}

/// A record was refused, and its slot was kept alive by younger ones. The replay of its dead letter took
/// effect, in a slot that expired first: then a copy was answered as refused again, though its row is in the
/// sink.
#[test]
fn p2_an_effect_is_known_as_long_as_the_refusal_in_whose_place_it_is() {
    for sealed in [false, true] {
        let disk = FaultyDisk::default();
        let store = open(&disk);
        watermark(&store, 1, 1_000);
        let young =
            (100..if sealed { 150 } else { 110 }).map(|number| fact(number, 40_000, Settled::Written));
        settle_facts(&store, 2, young.chain([fact(1, 5_000, Settled::DeadLettered)]).collect());
        watermark(&store, 3, 2_000);
        settle_facts(&store, 4, vec![fact(1, 5_000, Settled::Updated)]);
        watermark(&store, 5, 3_000);
        watermark(&store, 6, 30_000);
        store.wait_sealed();
        assert_eq!(store.expire(0).unwrap().retire_ms, 18_000);
        now_and_later(&disk, store, |store, context| {
            let known = store.peek(&key(1)).unwrap().map(|known| known.settled);
            // Below the floor a tail that is read again need not bring it back: then the record is late.
            let forgotten = known.is_none() && !sealed && !["as it is", "sealed"].contains(&context);
            assert!(forgotten || known == Some(Settled::Updated), "{context}, sealed: {sealed}: {known:?}");
            assert!(knows(store, &fact(100, 40_000, Settled::Written)), "{context}");
        });
    }
}

/// A key was taken back whose slot was closed and not sealed; the tombstone was remembered for as long as
/// that one fact, but the slot stayed as long as its youngest: the key came back.
#[test]
fn p12_a_key_stays_taken_back_as_long_as_the_slot_that_holds_it() {
    for sealed in [false, true] {
        let disk = FaultyDisk::default();
        let store = open(&disk);
        watermark(&store, 1, 1_000);
        let young =
            (100..if sealed { 150 } else { 110 }).map(|number| fact(number, 40_000, Settled::Written));
        settle_facts(&store, 2, young.chain([fact(1, 5_000, Settled::Written)]).collect());
        watermark(&store, 3, 2_000);
        store.wait_sealed();
        settle_facts(&store, 4, vec![fact(1, 5_000, Settled::Forgotten)]);
        watermark(&store, 5, 3_000);
        watermark(&store, 6, 30_000);
        assert_eq!(store.expire(0).unwrap().retire_ms, 18_000);
        now_and_later(&disk, store, |store, context| {
            assert_eq!(store.peek(&key(1)).unwrap(), None, "{context}, sealed: {sealed}");
            assert_eq!(claim(store, 1, item(1, 30_000)), Verdict::New { late: false }, "{context}");
            store.release_lane(1);
        });
    }
}

/// A tail of old facts was given up in the middle of a slot. From then on slots and tails were numbered
/// apart, and the run of the next slot took the place of the tail with the rest of this one: after a restart
/// those keys were new once more.
#[test]
fn p16_no_fact_is_lost_once_a_tail_was_given_up() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    watermark(&store, 1, 30_000);
    settle(&store, "a", 2, 0..35, 1_000);
    assert_eq!(store.expire(0).unwrap().retire_ms, 18_000);
    assert!(!disk.list().unwrap().contains(&"tail-1.redb".to_owned()), "the tail was not given up");
    settle(&store, "a", 3, 100..105, 30_000);
    watermark(&store, 4, 31_500);
    settle(&store, "a", 5, 200..260, 31_500);
    watermark(&store, 6, 33_000);
    watermark(&store, 7, 33_000);
    store.wait_sealed();
    assert!(store.stats(0).slots.iter().any(|slot| slot.kind == SlotKind::Sealed));
    now_and_later(&disk, store, |store, context| {
        for number in (100..105).chain(200..260) {
            assert!(store.peek(&key(number)).unwrap().is_some(), "{context}: key {number}");
        }
        let numbers: Vec<_> = store.stats(0).slots.iter().map(|slot| slot.number).collect();
        assert_eq!(numbers, [2, 3], "{context}");
    });
}

/// The same while the disk is full: the tail was given up when the last group of a closed slot was on its
/// way, which then went into the tail of the next slot.
#[test]
fn p16_no_fact_is_lost_once_a_tail_was_given_up_on_a_full_disk() {
    for (last, large) in [(3, false), (60, true)] {
        // The committer tries again after a while: it must not come first.
        let met = (0..200).any(|_| gives_up_on_a_full_disk(last, large));
        assert!(met, "the tail was not given up in time");
    }
}

/// Says whether the tail was given up before the group was in.
fn gives_up_on_a_full_disk(last: u64, large: bool) -> bool {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    watermark(&store, 1, 30_000);
    settle(&store, "a", 2, 0..35, 1_000);
    disk.trouble_at(disk.operations() + 1, Trouble::NoRoom);
    let facts = (100..100 + last).map(|number| fact(number, 31_500, Settled::Written)).collect();
    let ticket = store.settle(&[checkpoint("a", 3, 31_500)], &[block("a", 3, facts)], 0).unwrap();
    assert!(matches!(store.wait_durable(ticket), Err(StoreError::Full { .. })), "it fits");
    assert_eq!(store.expire(0).unwrap().retire_ms, 19_500);
    let crashed = open(&disk.after_crash(Survival::Nothing));
    if crashed.checkpoint("a").unwrap().sequence != 2
        || disk.list().unwrap().contains(&"tail-1.redb".to_owned())
    {
        return false;
    }
    assert_eq!(crashed.peek(&key(100)).unwrap(), None, "a fact before its checkpoint");
    while store.wait_durable(ticket).is_err() {}
    settle(&store, "a", 4, 200..260, 31_500);
    watermark(&store, 5, 33_000);
    watermark(&store, 6, 33_000);
    store.wait_sealed();
    let sealed = store.stats(0).slots.iter().filter(|slot| slot.kind == SlotKind::Sealed).count();
    assert_eq!(sealed, 1 + usize::from(large));
    now_and_later(&disk, store, |store, context| {
        for number in (100..100 + last).chain(200..260) {
            assert!(store.peek(&key(number)).unwrap().is_some(), "{context}: key {number}");
        }
    });
    true
}

/// The same where the new tail is there and the old one cannot be given up for lack of room.
#[test]
fn p16_no_fact_is_lost_where_a_tail_is_given_up_in_two_steps() {
    let mut refused = 0;
    // The slot goes on, or is closed at once.
    for (operation, at) in (1..60).flat_map(|operation| [(operation, 30_000), (operation, 31_500)]) {
        let disk = FaultyDisk::default();
        let store = open(&disk);
        watermark(&store, 1, 30_000);
        settle(&store, "a", 2, 0..35, 1_000);
        disk.trouble_at(disk.operations() + operation, Trouble::NoRoom);
        refused += u64::from(store.expire(0).is_err());
        settle(&store, "a", 3, 100..105, at);
        watermark(&store, 4, 31_500);
        settle(&store, "a", 5, 200..260, 31_500);
        watermark(&store, 6, 33_000);
        watermark(&store, 7, 33_000);
        now_and_later(&disk, store, |store, context| {
            for number in (100..105).chain(200..260) {
                assert!(
                    store.peek(&key(number)).unwrap().is_some(),
                    "{operation} at {at}, {context}: key {number}"
                );
            }
        });
    }
    assert!(refused > 10, "{refused}");
}

/// A key was taken back in a group that was not durable yet, when a tail was given up: the new tail began
/// with its tombstone. The power went, and with it the group. The record came again, took effect, and was
/// dropped as older than that tombstone: its copy took effect too.
#[test]
fn p12_a_tombstone_is_not_durable_before_its_group() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    watermark(&store, 1, 30_000);
    settle(&store, "a", 2, 0..35, 1_000);
    let gone = [block("a", 3, vec![fact(1_000, 30_000, Settled::Forgotten)])];
    store.settle(&[checkpoint("a", 3, 30_000)], &gone, 0).unwrap();
    store.expire(0).unwrap();
    assert!(disk.list().unwrap().contains(&"tail-2.redb".to_owned()), "no tail was given up");
    let crashed = disk.after_crash(Survival::Nothing);
    let store = open(&crashed);
    assert_eq!(store.checkpoint("a").unwrap().sequence, 2);
    assert_eq!(claim(&store, 1, item(1_000, 30_000)), Verdict::New { late: false });
    settle(&store, "a", 3, [1_000], 30_000);
    now_and_later(&crashed, store, |store, context| {
        assert!(knows(store, &fact(1_000, 30_000, Settled::Written)), "{context}");
    });
}

/// A tombstone that is durable is carried on by the tail that takes the place of one that was given up.
#[test]
fn p12_a_tombstone_outlives_the_tail_that_was_given_up() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, [1_000], 30_000);
    watermark(&store, 2, 31_500);
    settle_facts(&store, 3, vec![fact(1_000, 30_000, Settled::Forgotten)]);
    for sequence in 4..20 {
        settle(&store, "a", sequence, sequence as u64 * 50..sequence as u64 * 50 + 45, 30_000);
    }
    now_and_later(&disk, store, |store, context| {
        assert_eq!(store.peek(&key(1_000)).unwrap(), None, "{context}");
        assert!(knows(store, &fact(200, 30_000, Settled::Written)), "{context}");
    });
}

/// After one group of more keys than fit into a slot each later group, of one key, was a slot with a tail and
/// a manifest of its own.
#[test]
fn a_large_group_does_not_make_each_later_one_a_slot() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..400, 1_000);
    for sequence in 2..102 {
        settle(&store, "a", sequence, [1_000 + sequence as u64], 1_000);
    }
    let slots = store.stats(0).slots.len();
    assert!(slots <= 4, "{slots} slots");
}

/// Each opening began the slot's time anew, so that of a store that was opened often no slot was closed, and
/// nothing expired.
#[test]
fn p11_slots_expire_however_often_the_store_is_opened() {
    let disk = FaultyDisk::default();
    for sequence in 1..=60 {
        // The width of a slot is 1,000 ms.
        let store = Store::open_on(Arc::new(disk.clone()), options(), Limits::default()).unwrap();
        store.bind(&identity()).unwrap();
        settle(&store, "a", sequence, [sequence as u64], sequence * 600);
        store.expire(0).unwrap();
    }
    // 12,000 ms hold 20 keys, and a slot 2 or 3.
    let tails: Vec<_> = disk.list().unwrap().into_iter().filter(|name| name.starts_with("tail-")).collect();
    assert!((7..=13).contains(&tails.len()) && !tails.contains(&"tail-1.redb".to_owned()), "{tails:?}");
}

/// The slots of a small budget held fewer keys than were worth a run: none was sealed, and the tables took up
/// the budget.
#[test]
fn p16_a_small_budget_holds_more_keys_than_tables_of_it() {
    const KEYS: u64 = 80_000;
    let small = StoreOptions { max_memory_bytes: 2 << 20, ..options() };
    let store = Store::open_on(Arc::new(FaultyDisk::default()), small, Limits::default()).unwrap();
    store.bind(&identity()).unwrap();
    for sequence in 0..KEYS / 1_000 {
        let keys = sequence * 1_000..(sequence + 1) * 1_000;
        let items: Vec<_> = keys.clone().map(|number| item(number, 1_000)).collect();
        store.claim(1, i64::MAX, &items, &mut Vec::new()).unwrap();
        settle(&store, "a", sequence as i64, keys, 1_000);
    }
    let stats = store.stats(0);
    assert_eq!(stats.keys, KEYS, "{stats}");
    assert!(stats.memory_bytes < 2 << 20, "{stats}");
}

/// A discard begins a new tail, and the slot with it, whatever was on its way.
#[test]
fn p6_after_a_discard_slots_and_tails_go_on_together() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..100, 1_000);
    // The slot is closed, and the next one's tail not there yet.
    store.discard().unwrap();
    settle(&store, "a", 1, 300..350, 1_000);
    watermark(&store, 2, 2_500);
    settle(&store, "a", 3, 400..450, 2_500);
    watermark(&store, 4, 4_000);
    watermark(&store, 5, 4_000);
    now_and_later(&disk, store, |store, context| {
        let stats = store.stats(0);
        assert_eq!(stats.keys, 100, "{context}: {stats}");
        assert!((0..100).all(|number| store.peek(&key(number)).unwrap().is_none()), "{context}");
        let files: Vec<_> = stats.files.iter().map(|file| file.file.as_str()).collect();
        if ["sealed", "opened again"].contains(&context) {
            assert_eq!(files, ["run-2.facts", "run-3.facts", "tail-4.redb"], "{context}");
        }
    });
}

/// What closed slots know of many blocks is asked for at once; each block gets its own part of the answers.
#[test]
fn p2_each_block_of_a_settlement_is_told_what_is_known_of_its_own_keys() {
    let store = open(&FaultyDisk::default());
    settle(&store, "a", 1, 0..100, 1_000);
    watermark(&store, 2, 1_000);
    store.wait_sealed();
    let of = |keys: std::ops::Range<u64>| keys.map(|number| fact(number, 1_000, Settled::Written)).collect();
    let blocks = [block("a", 3, of(0..3)), block("a", 4, of(500..505)), block("a", 5, of(98..101))];
    store.settle(&[], &blocks, 0).unwrap();
    assert!((0..101).chain(500..505).all(|number| store.peek(&key(number)).unwrap().is_some()));
    assert_eq!(store.stats(0).keys, 106);
}

/// A column that was retired is emptied, and the plane goes with its last one.
#[test]
fn p11_columns_of_slots_that_are_over_are_empty_when_they_are_used_again() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    for sequence in 1..=60 {
        let keys = sequence as u64 * 1_000..sequence as u64 * 1_000 + 100;
        settle(&store, "a", sequence, keys, sequence * 2_000);
        store.expire(0).unwrap();
        store.wait_sealed();
    }
    let reads = disk.reads("run-");
    let gone = (1..40).flat_map(|sequence| sequence * 1_000..sequence * 1_000 + 100);
    assert!(gone.clone().all(|number| store.peek(&key(number)).unwrap().is_none()));
    let reads = disk.reads("run-") - reads;
    assert!(reads < 100, "{reads} reads for {} keys that are gone", gone.count());
    watermark(&store, 61, 1_000_000);
    watermark(&store, 62, 1_000_000);
    store.expire(0).unwrap();
    store.wait_sealed();
    let stats = store.stats(0);
    assert_eq!(stats.keys, 0, "{stats}");
    assert!(stats.memory_bytes < 6_000, "{stats}");
}

/// Keys that come so fast that the window will not fit are told of before the store is full, at the pace of the event times.
#[test]
fn p16_a_budget_that_will_not_hold_the_window_is_said_ahead() {
    let store = Store::in_memory(StoreOptions { max_memory_bytes: 1 << 20, ..options() });
    store.bind(&identity()).unwrap();
    assert_eq!(store.stats(0).plan, None);
    let width_ms = store.stats(0).slot_width_ms;
    for slot in 0..4 {
        let at_ms = 1_000_000 + slot * width_ms;
        settle(&store, "a", slot + 1, slot as u64 * 1_000..(slot as u64 + 1) * 1_000, at_ms);
    }
    let stats = store.stats(0);
    let plan = stats.plan.expect("slots were closed");
    let per_s = 1_000.0 / (width_ms as f64 / 1e3);
    assert!((plan.keys_per_s / per_s - 1.0).abs() < 0.4, "{plan}, expected {per_s}");
    assert!(stats.to_string().contains("plan            at "), "{stats}");
    assert_eq!(plan.fits(), plan.memory_bytes <= 1 << 20, "{plan}");
}

/// Blocks of keys that are all known made the open slot no larger, so that it was never closed, and its tail grew and grew.
#[test]
fn p16_blocks_of_known_keys_close_a_slot_by_their_bytes() {
    let disk = FaultyDisk::default();
    let store = Store::open_on(Arc::new(disk.clone()), options(), limits(5_000)).unwrap();
    store.bind(&identity()).unwrap();
    for sequence in 1..=100 {
        settle(&store, "a", sequence, 0..50, 1_000);
    }
    let check = |store: &Store| {
        let stats = store.stats(0);
        assert_eq!((stats.keys, stats.slots.len()), (50, 1), "{stats}");
        assert!(stats.files.len() > 20, "{stats}");
        assert!(knows(store, &fact(49, 1_000, Settled::Written)));
    };
    check(&store);
    drop(store);
    let store = Store::open_on(Arc::new(disk), options(), limits(5_000)).unwrap();
    check(&store);
    // They go as ever.
    settle(&store, "a", 101, [500], 40_000);
    settle(&store, "a", 102, [], 40_000);
    store.expire(0).unwrap();
    store.expire(0).unwrap();
    let stats = store.stats(0);
    assert!(stats.files.len() <= 2 && stats.keys == 1, "{stats}");
}
