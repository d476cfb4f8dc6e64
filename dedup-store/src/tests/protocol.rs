//! Rules of the protocol, over a store in memory: what holds there holds on disk, where `folder` and `crash` test the rest.

use crate::{testing::*, *};

fn store() -> Store {
    let store = Store::in_memory(options());
    store.bind(&identity()).unwrap();
    store
}

const NEW: Verdict = Verdict::New { late: false };

#[test]
fn p7_order_of_the_check() {
    let store = store();
    settle(&store, "a", 1, [1], 100_000);
    settle(&store, "a", 2, [2], 1_000);
    let floor_ms = 98_000;
    let at = |number, event_ms| Item { floor_ms, ..item(number, event_ms) };
    let mut verdicts = Vec::new();
    let items = [
        at(1, 100_000),
        Item { digest: Digest(99), ..at(1, 100_000) },
        // A hit counts at any age, also when the record itself is late or ahead.
        at(2, 0),
        at(2, 900_000),
        at(3, 98_000),
        at(3, 98_000),
        Item { digest: Digest(99), ..at(3, 0) },
        at(4, 97_999),
        Item { admit_late: true, ..at(5, 97_999) },
        at(6, 200_001),
        at(7, 200_000),
    ];
    store.claim(7, 200_000, &items, &mut verdicts).unwrap();
    assert_eq!(
        verdicts,
        [
            Verdict::Duplicate(Settled::Written),
            Verdict::Mismatch(Settled::Written),
            Verdict::Duplicate(Settled::Written),
            Verdict::Duplicate(Settled::Written),
            NEW,
            Verdict::InFlight { lane: 7, same: true },
            Verdict::InFlight { lane: 7, same: false },
            Verdict::Late { floor_ms },
            Verdict::New { late: true },
            Verdict::Ahead { limit_ms: 200_000 },
            NEW,
        ]
    );
    assert_eq!(store.stats(0).claims, 3);
}

#[test]
fn rule1_a_claim_is_no_evidence_of_delivery() {
    let store = store();
    assert_eq!(claim(&store, 1, item(1, 0)), NEW);
    assert_eq!(claim(&store, 2, item(1, 0)), Verdict::InFlight { lane: 1, same: true });
    assert_eq!(store.peek(&key(1)).unwrap(), None);
    store.release(2, &[key(1)]);
    assert_eq!(
        claim(&store, 2, item(1, 0)),
        Verdict::InFlight { lane: 1, same: true },
        "lane 2 holds nothing"
    );
    store.release(1, &[key(1)]);
    assert_eq!(claim(&store, 2, item(1, 0)), NEW);
    store.release_lane(2);
    assert_eq!(claim(&store, 3, item(1, 0)), NEW);
    settle(&store, "a", 1, [1], 0);
    assert_eq!(claim(&store, 4, item(1, 0)), Verdict::Duplicate(Settled::Written));
    assert!(knows(&store, &fact(1, 0, Settled::Written)));
    store.release_lane(3);
    assert_eq!(
        claim(&store, 4, item(1, 0)),
        Verdict::Duplicate(Settled::Written),
        "a fact is not given back"
    );
}

#[test]
fn p2_a_refusal_yields_to_a_replay_of_its_dead_letter_only() {
    for refused in [Settled::Rejected, Settled::DeadLettered] {
        let store = store();
        store.settle(&[], &[block("a", 1, vec![fact(1, 50, refused)])], 0).unwrap();
        assert_eq!(claim(&store, 1, item(1, 50)), Verdict::Duplicate(refused));
        let replay = Item { replay_dead_letter: true, digest: Digest(77), ..item(1, 50) };
        assert_eq!(claim(&store, 1, replay), NEW);
        assert_eq!(claim(&store, 2, replay), Verdict::InFlight { lane: 1, same: true });
        let late = Item { floor_ms: 51, ..replay };
        assert_eq!(claim(&store, 2, late), Verdict::InFlight { lane: 1, same: true });
        store.release_lane(1);
        assert_eq!(
            claim(&store, 2, late),
            Verdict::Late { floor_ms: 51 },
            "it may have taken effect before (P10)"
        );
        assert_eq!(claim(&store, 1, replay), NEW);
        let written = Entry { digest: Digest(77), ..fact(1, 50, Settled::Written) };
        store.settle(&[], &[block("a", 2, vec![written])], 0).unwrap();
        assert!(knows(&store, &written));
        assert_eq!(claim(&store, 1, replay), Verdict::Duplicate(Settled::Written));
        assert_eq!(store.stats(0).keys, 1);
    }
}

#[test]
fn p12_a_forgotten_key_is_new_again_and_a_catch_up_does_not_bring_it_back() {
    let store = store();
    settle(&store, "a", 1, [1, 2], 100);
    let forget = block("a", 2, vec![fact(1, 100, Settled::Forgotten)]);
    store.settle(&[checkpoint("a", 2, 100)], &[forget], 0).unwrap();
    // The marks are read again from the start.
    settle(&store, "a", 1, [1, 2], 100);
    assert_eq!(store.peek(&key(1)).unwrap(), None);
    assert_eq!(claim(&store, 1, item(2, 100)), Verdict::Duplicate(Settled::Written));
    assert_eq!(claim(&store, 1, item(1, 100)), NEW);
    settle(&store, "a", 3, [1], 100);
    assert_eq!(claim(&store, 1, item(1, 100)), Verdict::Duplicate(Settled::Written));
}

/// Every shard of a route takes a key back, for any of them may have settled it. Their marks are learnt shard by shard, so that
/// one shard's word comes after what another has settled since.
#[test]
fn p12_the_order_in_which_shards_are_learnt_does_not_matter() {
    let forget = |shard: &str, sequence| block(shard, sequence, vec![fact(1, 100, Settled::Forgotten)]);
    let written = |shard: &str, sequence| block(shard, sequence, vec![fact(1, 100, Settled::Written)]);
    // `a` settled the key, both took it back, and `b` settled it again.
    let shards = [vec![written("a", 1), forget("a", 2)], vec![forget("b", 1), written("b", 2)]];
    for order in [[0, 1], [1, 0]] {
        let store = store();
        for _ in 0..2 {
            for &at in &order {
                store.settle(&[], &shards[at], 0).unwrap();
            }
            assert_eq!(claim(&store, 1, item(1, 100)), Verdict::Duplicate(Settled::Written), "{order:?}");
        }
        // Taken back once more, by both.
        for shard in ["a", "b"] {
            store.settle(&[], &[forget(shard, 3)], 0).unwrap();
        }
        for &at in &order {
            store.settle(&[], &shards[at], 0).unwrap();
        }
        assert_eq!(claim(&store, 1, item(1, 100)), NEW, "{order:?}");
    }
}

#[test]
fn p12_forgetting_leaves_a_record_in_flight_alone() {
    let store = store();
    assert_eq!(claim(&store, 1, item(1, 100)), NEW);
    store.settle(&[], &[block("a", 1, vec![fact(1, 100, Settled::Forgotten)])], 0).unwrap();
    assert_eq!(claim(&store, 2, item(1, 100)), Verdict::InFlight { lane: 1, same: true });
}

#[test]
fn p11_the_store_admits_nothing_below_its_own_floor_and_the_window() {
    let store = store();
    settle(&store, "a", 1, [1], 1_000);
    // The watermark has come a slot's width further: what follows is another slot.
    settle(&store, "a", 2, [4], 2_000);
    settle(&store, "a", 3, [2], 50_000);
    let floors = store.expire(50_000).unwrap();
    // G = 50,000 - 2,000 - 10,000.
    assert_eq!(floors, Floors { watermark_ms: Some(50_000), retire_ms: 38_000 });
    assert_eq!(store.floors(50_000), floors);
    // The slots that are over held facts up to 2,000.
    assert_eq!((store.stats(0).floor_ms, store.forgets_ms(50_000)), (2_001, 2_001));
    assert_eq!(
        claim(&store, 1, item(1, 1_000)),
        Verdict::Late { floor_ms: 12_001 },
        "forgotten, so never new"
    );
    assert_eq!(claim(&store, 1, item(3, 12_000)), Verdict::Late { floor_ms: 12_001 });
    assert_eq!(
        claim(&store, 1, Item { floor_ms: 49_000, ..item(3, 48_999) }),
        Verdict::Late { floor_ms: 49_000 }
    );
    assert_eq!(claim(&store, 1, item(3, 12_001)), NEW);
    assert_eq!(claim(&store, 1, item(2, 50_000)), Verdict::Duplicate(Settled::Written));
}

/// A partition that was taken over from a dead owner seconds behind, and one that was quiet when its instance was started again, made the
/// whole store be discarded and learnt again, though nothing that they needed was forgotten.
#[test]
fn p11_a_store_that_has_dropped_nothing_has_forgotten_nothing() {
    let store = store();
    settle(&store, "a", 1, [1], 49_500);
    settle(&store, "a", 2, [2], 50_500);
    assert_eq!(store.expire(50_500).unwrap().retire_ms, 38_500);
    assert_eq!(store.forgets_ms(50_500), i64::MIN);
    assert_eq!(claim(&store, 1, item(3, 40_000)), NEW, "its own lateness is the shard's to judge");
    // What will be dropped counts before it is.
    settle(&store, "a", 3, [4], 70_000);
    assert_eq!(store.stats(0).floor_ms, i64::MIN);
    assert_eq!(store.forgets_ms(70_000), 50_501);
}

#[test]
fn p11_facts_below_the_floor_are_dropped_on_load() {
    let store = store();
    settle(&store, "a", 1, [1], 1_000);
    settle(&store, "a", 2, [4], 2_000);
    settle(&store, "a", 3, [7], 50_000);
    store.expire(50_000).unwrap();
    assert_eq!(store.stats(0).floor_ms, 2_001);
    assert_eq!(claim(&store, 1, Item { admit_late: true, ..item(2, 2_000) }), Verdict::New { late: true });
    settle(&store, "b", 1, [2, 3], 2_000);
    settle(&store, "b", 2, [5], 2_001);
    assert_eq!(store.stats(0).keys, 2);
    assert_eq!(store.stats(0).claims, 0);
}

#[test]
fn rule9_a_duplicate_does_not_extend_a_keys_life() {
    let store = store();
    settle(&store, "a", 1, [1], 1_000);
    settle(&store, "a", 2, [1], 50_000);
    assert_eq!(store.peek(&key(1)).unwrap().unwrap().event_ms, 1_000);
    store.expire(50_000).unwrap();
    assert_eq!(store.stats(0).keys, 0);
}

#[test]
fn p6_discard_drops_facts_floors_and_checkpoints_and_keeps_claims() {
    let store = store();
    settle(&store, "a", 5, [1], 50_000);
    store.expire(50_000).unwrap();
    claim(&store, 1, item(2, 50_000));
    store.discard().unwrap();
    assert_eq!(store.checkpoint("a"), None);
    assert_eq!(store.floors(0), Floors { watermark_ms: None, retire_ms: i64::MIN });
    let in_flight = claim(&store, 2, item(2, 50_000));
    assert!(
        matches!(in_flight, Verdict::InFlight { lane: 1, .. }),
        "its batch may be on its way: {in_flight:?}"
    );
    store.release(1, &[key(2)]);
    assert_eq!(claim(&store, 1, item(2, 0)), NEW);
    assert_eq!(claim(&store, 1, item(1, 0)), NEW);
    assert!(store.identity().is_some());
    settle(&store, "a", 1, [1], 0);
    assert_eq!(store.checkpoint("a").unwrap().sequence, 1);
}

#[test]
fn a_full_memory_refuses_claims_and_not_settlements_and_recovers_by_expiry() {
    let store = Store::in_memory(StoreOptions { max_memory_bytes: 100_000, ..options() });
    store.bind(&identity()).unwrap();
    settle(&store, "a", 1, 0..5_000, 1_000);
    let error = store.claim(1, i64::MAX, &[item(9_999, 1_000)], &mut Vec::new()).unwrap_err();
    assert!(matches!(error, StoreError::Full { budget: Budget::Memory, bound: 100_000, .. }), "{error}");
    assert!(
        error.to_string().contains("max_memory_bytes") && error.to_string().contains("100000"),
        "{error}"
    );
    settle(&store, "a", 2, [], 50_000);
    store.expire(50_000).unwrap();
    assert_eq!(claim(&store, 1, item(9_999, 50_000)), NEW);
}

/// A store that had come to its bound refused whole batches unseen: callers who only sent copies again were kept waiting, and as
/// event time moves on only with new records, for good.
#[test]
fn p7_a_full_store_answers_what_needs_no_claim_and_claims_nothing_else() {
    let store = Store::in_memory(StoreOptions { max_memory_bytes: 100_000, ..options() });
    store.bind(&identity()).unwrap();
    assert_eq!(claim(&store, 3, item(7_777, 1_000)), NEW);
    settle(&store, "a", 1, 0..5_000, 1_000);
    let memory_bytes = store.stats(0).memory_bytes;
    let known = [
        item(1, 1_000),
        Item { digest: Digest(0), ..item(2, 1_000) },
        item(7_777, 1_000),
        Item { floor_ms: 5_000, ..item(8_000, 4_000) },
        item(8_001, 60_001),
    ];
    let answers = [
        Verdict::Duplicate(Settled::Written),
        Verdict::Mismatch(Settled::Written),
        Verdict::InFlight { lane: 3, same: true },
        Verdict::Late { floor_ms: 5_000 },
        Verdict::Ahead { limit_ms: 60_000 },
    ];
    let mut verdicts = vec![NEW];
    store.claim(1, 60_000, &known, &mut verdicts).unwrap();
    assert_eq!(verdicts[0], NEW);
    assert_eq!(verdicts[1..], answers);
    store.claim(1, 60_000, &[], &mut verdicts).unwrap();
    // One new item, wherever it stands, and late ones that the sink is to tell: all of the batch is refused.
    for place in 0..=known.len() {
        for new in [item(9_999, 1_000), Item { floor_ms: 5_000, admit_late: true, ..item(9_999, 1_000) }] {
            let mut batch = known.to_vec();
            batch.insert(place, new);
            let error = store.claim(1, 60_000, &batch, &mut verdicts).unwrap_err();
            assert!(matches!(error, StoreError::Full { budget: Budget::Memory, .. }), "{error}");
            assert_eq!(verdicts.len(), 1 + answers.len(), "verdicts are as they were");
            assert!(!store.in_flight(&key(9_999)), "nothing was claimed");
        }
    }
    assert_eq!((store.stats(0).claims, store.stats(0).memory_bytes), (1, memory_bytes));
}

#[test]
fn facts_of_another_route_are_refused() {
    let store = Store::in_memory(options());
    let facts = [block("a", 1, vec![fact(1, 0, Settled::Written)])];
    assert!(matches!(store.settle(&[], &facts, 0), Err(StoreError::Unbound)));
    store.bind(&Identity { secret: [9; 192], ..identity() }).unwrap();
    let error = store.settle(&[], &facts, 0).unwrap_err();
    assert!(matches!(error, StoreError::Block(BlockError::KeyId { .. })), "{error}");
    assert_eq!(store.stats(0).keys, 0);
}

#[test]
fn effects_are_pending_until_settled_or_given_back() {
    let store = store();
    assert!(!store.effect_pending(&key(1)).unwrap());
    assert!(store.begin_effect(&key(1)).unwrap());
    assert!(!store.begin_effect(&key(1)).unwrap());
    assert!(store.effect_pending(&key(1)).unwrap());
    settle(&store, "a", 1, [1], 0);
    assert!(!store.effect_pending(&key(1)).unwrap());
    assert!(store.begin_effect(&key(2)).unwrap());
    store.cancel_effect(&key(2)).unwrap();
    assert!(!store.effect_pending(&key(2)).unwrap());
}
