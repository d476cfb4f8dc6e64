//! The ten rules of the data path (DESIGN section 3), one test or more each.

use std::time::Duration;

use adapters::sink::{Mode, RowOutcome};
use dedup_store::{Block, Fingerprint, Hasher, Settled, Store, StoreOptions};

use super::{
    encode::POISON,
    faults::{Call, CallFault, DeliverFault},
    rig::{
        BASE_MS, Relay, Rig, call, calls, counted, identity, json, outcome, pass, plain, spawn_call,
        unavailable,
    },
    world::Db,
};
use crate::{
    lane::{MismatchPolicy, RefusedPolicy},
    outcome::{Outcome, Problem},
};

/// Every row that took effect has its key in the mark of its own batch.
fn assert_marked(db: &Db) {
    let hasher = Hasher::new(&identity());
    for effect in &db.effects {
        let mark = &db.marks[&(effect.shard.to_string(), effect.sequence)];
        let block = Block::decode(&hasher, &effect.shard, effect.sequence, mark.block.clone()).unwrap();
        let wanted = match effect.outcome {
            RowOutcome::Written => Settled::Written,
            RowOutcome::Updated => Settled::Updated,
            _ => Settled::Stale,
        };
        assert!(block.entries.iter().any(|entry| entry.settled == wanted), "{effect:?} has no mark");
    }
    let keys: usize = db
        .marks
        .iter()
        .map(|((shard, at), mark)| {
            Block::decode(&hasher, shard, *at, mark.block.clone()).unwrap().entries.len()
        })
        .sum();
    assert_eq!(keys, db.effects.len(), "one key an effect");
}

#[tokio::test(start_paused = true)]
async fn rule1_a_claim_is_never_evidence_of_delivery() {
    let rig = Rig::listed(1);
    let gate = rig.gate("a", (1, 0)).await;
    rig.delay(100, 0);
    rig.script([DeliverFault::Final]);
    let first = spawn_call(&gate, &plain("k", "v"));
    pass(50).await;
    let copy = spawn_call(&gate, &plain("k", "v"));
    let (first, copy) = (first.await.unwrap(), copy.await.unwrap());
    assert!(unavailable(&first), "{first:?}");
    assert_eq!(copy.outcome, Outcome::Written, "the first was not delivered, so this is no duplicate");
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Duplicate);
    assert_eq!(rig.table(), ["k=v"]);
}

#[tokio::test(start_paused = true)]
async fn rule2_what_is_delivered_is_recognised_again_also_by_an_empty_store() {
    let rig = Rig::listed(2);
    let gate = rig.gate("a", (2, 0)).await;
    let records: Vec<String> = (0..40).map(|at| plain(&format!("k{at}"), "v")).collect();
    for answer in calls(&gate, &records).await {
        assert_eq!(answer.outcome, Outcome::Written);
    }
    assert_marked(&rig.db());
    // The commit is in, the process dies before it hears of it, and the disk is lost.
    rig.delay(0, 10_000);
    drop(spawn_call(&gate, &plain("last", "v")));
    pass(100).await;
    gate.crash();
    let gate = rig.gate("a", (2, 0)).await;
    for record in records.iter().chain([&plain("last", "v")]) {
        assert_eq!(outcome(&gate, record).await, Outcome::Duplicate);
    }
    assert_eq!(rig.table().len(), 41);
    assert_marked(&rig.db());
}

#[tokio::test(start_paused = true)]
async fn rule3_an_unknown_batch_is_asked_about_and_never_cut_again() {
    for applied in
        [DeliverFault::UnknownApplied, DeliverFault::UnknownLater { after_ms: 300, executed: false }]
    {
        let rig = Rig::listed(3);
        let gate = rig.gate("a", (1, 0)).await;
        assert_eq!(outcome(&gate, &plain("warm", "v")).await, Outcome::Written);
        rig.script([applied]);
        rig.delay(50, 0);
        // The sink cannot be asked for a while.
        let until = tokio::time::Instant::now() + Duration::from_secs(3);
        let first = spawn_call(&gate, &plain("k", "v"));
        pass(1).await;
        rig.world.lock().down_until = Some(until);
        let other = spawn_call(&gate, &plain("other", "v"));
        pass(2_000).await;
        assert_eq!(rig.world.lock().attempts.len(), 2, "nothing is tried while a batch is unknown");
        assert!(!first.is_finished(), "unknown is not failed");
        assert_eq!(first.await.unwrap().outcome, Outcome::Written, "{applied:?}");
        assert_eq!(other.await.unwrap().outcome, Outcome::Written);
        let world = rig.world.lock();
        let tried = world.attempts.iter().filter(|batch| batch.rows.iter().any(|row| row.value.id == "k"));
        assert_eq!(tried.count(), 1, "it was in: it is not sent again");
    }
}

#[tokio::test(start_paused = true)]
async fn rule3_an_unknown_batch_that_is_surely_not_in_goes_again() {
    let rig = Rig::listed(4);
    let gate = rig.gate("a", (1, 0)).await;
    rig.script([DeliverFault::UnknownLost, DeliverFault::UnknownLost]);
    rig.fail(Call::Resolve, CallFault::After);
    rig.fail(Call::Resolve, CallFault::Before);
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Written);
    assert_eq!(rig.world.lock().attempts.len(), 3);
    assert_eq!(rig.table(), ["k=v"]);
}

#[tokio::test(start_paused = true)]
async fn rule4_a_caller_that_goes_away_cancels_nothing() {
    let rig = Rig::listed(5);
    let gate = rig.gate("a", (1, 0)).await;
    rig.delay(500, 0);
    let first = spawn_call(&gate, &plain("k", "v"));
    pass(100).await;
    first.abort();
    pass(1_000).await;
    assert_eq!(rig.table(), ["k=v"]);
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Duplicate);
    assert_eq!(counted(&gate), [("duplicate", 1), ("written", 1)].into());
}

#[tokio::test(start_paused = true)]
async fn rule5_a_record_without_an_outcome_is_unknown_and_settles_nothing() {
    let rig = Rig::listed(6);
    let gate = rig.gate("a", (1, 0)).await;
    rig.script([DeliverFault::Silent]);
    let answer = call(&gate, &plain("k", "v")).await;
    assert_eq!((answer.outcome, answer.problem), (Outcome::Unknown, Some(Problem::OutcomeUnknown)));
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Written);
    assert_eq!(rig.table(), ["k=v"]);
}

/// A relay's position was already past the records that the sink said nothing about: they would have been lost without a word.
#[tokio::test(start_paused = true)]
async fn rule5_a_relay_stops_where_the_sink_is_silent() {
    let rig = Rig::listed(7);
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    rig.script([DeliverFault::Silent]);
    relay.push(0, &plain("k", "v"));
    pass(3_000).await;
    assert!(relay.topic.lock().stopped[&0].contains("did not say"), "{:?}", relay.topic.lock().stopped);
}

#[tokio::test(start_paused = true)]
async fn rule6_a_duplicate_is_told_only_once_the_mark_is_committed() {
    let rig = Rig::listed(8);
    let relay = Relay::start(&rig, "a", (1, 1), 1).await;
    rig.delay(400, 400);
    let first = spawn_call(&relay.gate, &plain("k", "v"));
    pass(100).await;
    let copy = spawn_call(&relay.gate, &plain("k", "v"));
    relay.push(0, &plain("k", "v"));
    pass(200).await;
    assert!(!copy.is_finished() && counted(&relay.gate).is_empty(), "nothing is committed yet");
    assert_eq!(copy.await.unwrap().outcome, Outcome::Duplicate);
    assert_eq!(rig.world.lock().marks_of("http/0"), 1);
    assert_eq!(first.await.unwrap().outcome, Outcome::Written);
    relay.settled(0, 1).await;
    assert_eq!(counted(&relay.gate), [("duplicate", 2), ("written", 1)].into());
    assert_eq!(rig.table(), ["k=v"]);
}

#[tokio::test(start_paused = true)]
async fn rule7_a_store_without_verdicts_stops_callers_and_relay_and_nothing_passes_unchecked() {
    let rig = Rig::listed(9);
    let full = Store::in_memory(StoreOptions { max_memory_bytes: 1, ..rig.options() });
    full.bind(&identity()).unwrap();
    let gate = rig.try_gate("a", (1, 1), full).await.unwrap();
    let relay = Relay::over(&rig, "a", gate, 1).await;
    assert_eq!(outcome(&relay.gate, &plain("warm", "v")).await, Outcome::Written, "an empty store has room");
    relay.push(0, &plain("r", "v"));
    let answer = call(&relay.gate, &plain("k", "v")).await;
    assert!(
        matches!(&answer.problem, Some(Problem::Unavailable(reason)) if reason.contains("max_memory_bytes")),
        "{answer:?}"
    );
    pass(5_000).await;
    assert_eq!(rig.table(), ["warm=v"]);
    assert_eq!(relay.position(0), None, "the relay waits");
    assert!(relay.gate.trouble().unwrap().contains("full"));
}

/// A store in a folder of its own.
struct OnDisk(tempfile::TempDir);

impl OnDisk {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn open(&self, rig: &Rig) -> Store {
        Store::open(&self.0.path().join("store"), rig.options()).unwrap()
    }

    /// The folder is not there when the store wants to write a file: an IO error, and after it everything is in its place again.
    fn stop(&self, store: &Store) {
        let (here, away) = (self.0.path().join("store"), self.0.path().join("away"));
        std::fs::rename(&here, &away).unwrap();
        let stopped = store.discard().unwrap_err();
        std::fs::rename(&away, &here).unwrap();
        assert!(store.peek(&Fingerprint([0; 16])).is_err(), "stopped for good: {stopped}");
    }
}

/// Only a full store was tried, which still answers copies. One that an IO error has stopped answers nothing at all.
#[tokio::test(start_paused = true)]
async fn rule7_a_store_stopped_by_an_io_error_gives_no_verdict_and_nothing_is_lost() {
    let rig = Rig::listed(16);
    let disk = OnDisk::new();
    let gate = rig.try_gate("a", (1, 1), disk.open(&rig)).await.unwrap();
    let relay = Relay::over(&rig, "a", gate, 1).await;
    assert_eq!(outcome(&relay.gate, &plain("k", "v")).await, Outcome::Written);
    relay.push(0, &plain("r0", "v"));
    relay.settled(0, 1).await;
    disk.stop(relay.gate.store());
    relay.push(0, &plain("r1", "v"));
    for _ in 0..3 {
        for record in [plain("k", "v"), plain("l", "v")] {
            let answer = call(&relay.gate, &record).await;
            assert!(
                matches!(&answer.problem, Some(Problem::Unavailable(reason)) if reason.contains("stopped")),
                "no verdict, of copies neither: {answer:?}"
            );
        }
        pass(5_000).await;
    }
    assert_eq!(
        (rig.table(), relay.position(0)),
        (vec!["k=v".to_owned(), "r0=v".to_owned()], Some(1)),
        "all wait"
    );
    assert!(relay.gate.trouble().unwrap().contains("stopped"), "{:?}", relay.gate.trouble());
    assert_eq!(relay.gate.metrics().unchecked_so_far(), 0);
    // Opened again, after a restart.
    let topic = relay.crash();
    pass(100).await;
    let relay = Relay::resume(&rig, "a", (1, 1), &topic, disk.open(&rig)).await;
    relay.settled(0, 2).await;
    assert_eq!(outcome(&relay.gate, &plain("k", "v")).await, Outcome::Duplicate);
    assert_eq!(outcome(&relay.gate, &plain("l", "v")).await, Outcome::Written);
    assert_eq!(rig.table(), ["k=v", "r0=v", "r1=v", "l=v"]);
}

#[tokio::test(start_paused = true)]
async fn rule7_what_passes_a_stopped_store_is_counted_and_its_marks_are_kept() {
    let mut rig = Rig::keyed(Mode::Insert, 17);
    rig.rules.pass_unchecked = true;
    let disk = OnDisk::new();
    let gate = rig.try_gate("a", (1, 1), disk.open(&rig)).await.unwrap();
    let relay = Relay::over(&rig, "a", gate, 1).await;
    assert_eq!(outcome(&relay.gate, &plain("k", "v")).await, Outcome::Written);
    assert_eq!(relay.gate.metrics().unchecked_so_far(), 0);
    disk.stop(relay.gate.store());
    relay.push(0, &plain("r", "v"));
    relay.settled(0, 1).await;
    assert_eq!(outcome(&relay.gate, &plain("l", "v")).await, Outcome::Written);
    assert_eq!(outcome(&relay.gate, &plain("k", "v")).await, Outcome::Stale, "the row key tells the copy");
    assert_eq!(relay.gate.metrics().unchecked_so_far(), 3);
    let topic = relay.crash();
    pass(100).await;
    let relay = Relay::resume(&rig, "a", (1, 1), &topic, disk.open(&rig)).await;
    for key in ["k", "l", "r"] {
        assert_eq!(outcome(&relay.gate, &plain(key, "v")).await, Outcome::Duplicate, "{key}");
    }
    assert_eq!(relay.gate.metrics().unchecked_so_far(), 0);
    assert_eq!(rig.table(), ["k=v", "l=v", "r=v"]);
}

#[tokio::test(start_paused = true)]
async fn rule8_positions_cover_only_what_has_its_outcome() {
    let rig = Rig::listed(10);
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    // Lane 1 holds the key for a while.
    rig.delay(3_000, 0);
    relay.push(1, &plain("k", "v"));
    pass(100).await;
    relay.push(0, &plain("before", "v"));
    relay.push(0, &plain("k", "v"));
    relay.push(0, &plain("after", "v"));
    pass(1_500).await;
    assert!(rig.table().contains(&"after=v".to_owned()), "a parked record holds nobody up");
    assert_eq!(relay.position(0), Some(1), "and the position stops at it");
    assert_eq!(relay.topic.lock().committed[0], 1);
    relay.settled(0, 3).await;
    relay.settled(1, 1).await;
    assert_eq!(counted(&relay.gate), [("duplicate", 1), ("written", 3)].into());
}

/// An outcome that a relay's record had while its position was held back was counted at once, and again when the partition was read
/// again from there: more outcomes than records.
#[tokio::test(start_paused = true)]
async fn rule8_a_relays_outcome_is_counted_with_its_position_and_not_before() {
    for goes_back in [false, true] {
        let rig = Rig::listed(15);
        let relay = Relay::start(&rig, "a", (0, 2), 2).await;
        relay.push(0, &plain("warm", "v"));
        relay.settled(0, 1).await;
        let snapshot = rig.db();
        // Lane 1 holds the key for a while; the copy of a settled record behind it has its outcome at once.
        rig.delay(3_000, 0);
        relay.push(1, &plain("k", "v"));
        pass(100).await;
        relay.push(0, &plain("k", "v"));
        relay.push(0, &plain("warm", "v"));
        pass(1_000).await;
        assert_eq!(relay.position(0), Some(1), "held back");
        assert_eq!(
            counted(&relay.gate),
            [("written", 1)].into(),
            "what may be read again has not counted yet"
        );
        if goes_back {
            rig.world.lock().go_back(snapshot);
        } else {
            relay.door.revoke(0).await.unwrap();
            relay.take(0);
        }
        relay.settled(0, 3).await;
        relay.settled(1, 1).await;
        pass(3_000).await;
        assert_eq!(counted(&relay.gate), [("duplicate", 2), ("written", 2)].into(), "four records");
        assert_eq!(rig.table().len(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn rule8_a_crash_between_commit_and_answer_reads_on_from_the_sinks_position() {
    let rig = Rig::listed(11);
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    rig.delay(0, 10_000);
    relay.push(0, &plain("k", "v"));
    pass(200).await;
    assert_eq!(relay.topic.lock().committed[0], 0, "the group's offset follows only what the lane knows");
    let topic = relay.crash();
    let relay = Relay::resume(&rig, "a", (0, 1), &topic, rig.memory()).await;
    relay.push(0, &plain("l", "v"));
    relay.settled(0, 2).await;
    assert_eq!(rig.table(), ["k=v", "l=v"]);
    assert_eq!(counted(&relay.gate), [("written", 1)].into(), "the first is not read again");
}

#[tokio::test(start_paused = true)]
async fn rule9_a_duplicate_never_makes_a_key_live_longer() {
    let mut rig = Rig::listed(12);
    rig.rules.mismatch = MismatchPolicy::Ignore;
    let gate = rig.gate("a", (1, 0)).await;
    let first = call(&gate, &json("k", "k", "v", 0, BASE_MS)).await;
    for later in 1..20 {
        let copy = json("k", "k", "v", 0, BASE_MS + later * 10_000);
        assert_eq!(outcome(&gate, &copy).await, Outcome::Duplicate);
    }
    let known = gate.store().peek(&first.fingerprint.unwrap()).unwrap().unwrap();
    assert_eq!(known.event_ms, BASE_MS);
    assert_eq!(rig.world.lock().marks_of("http/0"), 1, "and duplicates leave no mark");
}

#[tokio::test(start_paused = true)]
async fn rule10_a_bad_record_costs_one_outcome_and_not_its_batch() {
    let rig = Rig::keyed(Mode::Upsert, 13);
    let relay = Relay::start(&rig, "a", (1, 1), 1).await;
    let mut records: Vec<String> = (0..10).map(|at| plain(&format!("k{at}"), "v")).collect();
    records[3] = plain("k3", POISON);
    records[5] = plain("k5", "bad");
    records[7] = "{nothing".into();
    // The same row key twice, once refused: the other goes in.
    records.push(json("k10", "k3", "w", 0, BASE_MS));
    let answers: Vec<Outcome> =
        calls(&relay.gate, &records).await.iter().map(|answer| answer.outcome).collect();
    let bad = |at: &usize| matches!(at, 3 | 5 | 7);
    for (at, outcome) in answers.iter().enumerate() {
        assert_eq!(*outcome, if bad(&at) { Outcome::Rejected } else { Outcome::Written }, "{at}");
    }
    assert_eq!(rig.table().len(), 8);
    assert_marked(&rig.db());

    for record in &records {
        relay.push(0, &record.replace("\"k", "\"r"));
    }
    relay.settled(0, 11).await;
    assert_eq!(rig.table().len(), 16);
    let letters: Vec<_> = rig.db().letters.iter().map(|letter| (letter.position, letter.kind)).collect();
    assert_eq!(letters.len(), 3, "{letters:?}");
    for position in [3, 5, 7] {
        assert!(letters.contains(&(Some(position), "rejected")), "{letters:?}");
    }
    assert_eq!(counted(&relay.gate), [("dead_lettered", 3), ("rejected", 3), ("written", 16)].into());
}

#[tokio::test(start_paused = true)]
async fn rule10_a_refusal_is_settled_where_the_route_says_so() {
    let mut rig = Rig::keyed(Mode::Upsert, 14);
    rig.rules.refused = RefusedPolicy::Settle;
    let gate = rig.gate("a", (1, 0)).await;
    let first = call(&gate, &plain("k", POISON)).await;
    assert!(matches!(first.problem, Some(Problem::Refused(_))), "{first:?}");
    let copy = call(&gate, &plain("k", POISON)).await;
    assert_eq!((copy.outcome, copy.first), (Outcome::Duplicate, Some(Settled::Rejected)));
}

/// Sinks to which each batch costs get full ones: what is at hand waits for more, also what came while the lane was at work, and the oldest of
/// it no longer than told.
#[tokio::test(start_paused = true)]
async fn records_linger_for_a_fuller_batch_and_no_longer_than_told() {
    let mut rig = Rig::listed(41);
    rig.rules.linger_ms = 100;
    rig.rules.max_records = 4;
    let gate = rig.gate("a", (1, 0)).await;
    let sizes = || rig.world.lock().attempts.iter().map(|batch| batch.rows.len()).collect::<Vec<_>>();
    let send = |id: &str| drop(spawn_call(&gate, &plain(id, "v")));
    for id in ["a", "b", "c"] {
        send(id);
        pass(40).await;
    }
    assert_eq!((sizes(), rig.table().len()), (vec![3], 3), "100 ms after the first, whoever came since");
    rig.delay(50, 0);
    ["d", "e", "f", "g"].into_iter().for_each(send);
    pass(10).await;
    assert_eq!(sizes(), [3, 4], "a full one waits for nobody");
    ["h", "i"].into_iter().for_each(send);
    pass(80).await;
    assert_eq!((sizes(), rig.table().len()), (vec![3, 4], 7));
    ["j", "k"].into_iter().for_each(send);
    pass(5).await;
    assert_eq!((sizes(), rig.table().len()), (vec![3, 4, 4], 11));
    send("l");
    pass(95).await;
    assert_eq!(sizes().len(), 3);
    pass(10).await;
    assert_eq!((sizes(), rig.table().len()), (vec![3, 4, 4, 1], 12));
}
