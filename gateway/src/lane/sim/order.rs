//! Check and order: P7, P8, P10, P11.

use std::{sync::Arc, time::Duration};

use adapters::{
    dead_letters::{DeadLetterFault, DeadLetters, Letter},
    sink::Mode,
};
use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::time::timeout;

use super::{
    door::shard_of,
    encode::POISON,
    faults::DeliverFault,
    rig::{BASE_MS, Relay, Rig, call, calls, counted, json, outcome, pass, plain, spawn_call, unavailable},
};
use crate::{
    lane::{DeadLetterPolicy, LatePolicy},
    outcome::{Outcome, Problem},
};

const HOUR_MS: i64 = 3_600_000;
const DAY_MS: i64 = 24 * HOUR_MS;

fn at(id: &str, t: i64) -> String {
    json(id, id, "v", 0, t)
}

// ---- P7 ----------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn p7_first_a_record_below_the_settled_position_is_skipped_without_a_second_outcome() {
    let rig = Rig::listed(1);
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    (0..5).for_each(|at| relay.push(0, &plain(&format!("k{at}"), "v")));
    relay.settled(0, 5).await;
    // The door reads again what it read, as after a rebalance that came to nothing.
    relay.door.rewind(0, 0);
    relay.push(0, &plain("l", "v"));
    relay.settled(0, 6).await;
    assert_eq!(counted(&relay.gate), [("written", 6)].into());
    assert_eq!(relay.gate.metrics().replayed_so_far(), 5);
}

#[tokio::test(start_paused = true)]
async fn p7_second_a_hit_counts_at_any_age_before_floor_and_ahead() {
    let rig = Rig::listed(2);
    let gate = rig.gate("a", (1, 0)).await;
    let old = at("old", BASE_MS - 3 * HOUR_MS);
    assert_eq!(outcome(&gate, &old).await, Outcome::Written);
    assert_eq!(outcome(&gate, &at("new", BASE_MS)).await, Outcome::Written);
    assert_eq!(
        outcome(&gate, &at("late", BASE_MS - 3 * HOUR_MS)).await,
        Outcome::Late,
        "the floor has passed"
    );
    assert_eq!(outcome(&gate, &old).await, Outcome::Duplicate);
    assert_eq!(outcome(&gate, &json("old", "old", "w", 0, BASE_MS - 3 * HOUR_MS)).await, Outcome::Mismatch);
    assert_eq!(outcome(&gate, &json("old", "old", "w", 0, BASE_MS + 9 * HOUR_MS)).await, Outcome::Mismatch);
}

#[tokio::test(start_paused = true)]
async fn p7_third_a_late_miss_is_never_new_and_fourth_one_too_far_ahead_is_rejected() {
    let mut rig = Rig::listed(3);
    rig.rules.late_relay = LatePolicy::DeadLetter;
    let relay = Relay::start(&rig, "a", (1, 1), 1).await;
    assert_eq!(outcome(&relay.gate, &at("new", BASE_MS)).await, Outcome::Written);
    let late = call(&relay.gate, &at("late", BASE_MS - 2 * HOUR_MS)).await;
    assert!(matches!(late.problem, Some(Problem::Late(_))), "{late:?}");
    let ahead = call(&relay.gate, &at("ahead", BASE_MS + HOUR_MS)).await;
    assert_eq!(ahead.outcome, Outcome::Rejected);
    assert!(matches!(ahead.problem, Some(Problem::Ahead(_))), "{ahead:?}");
    relay.push(0, &at("r", BASE_MS));
    relay.settled(0, 1).await;
    relay.push(0, &at("rl", BASE_MS - 2 * HOUR_MS));
    relay.push(0, &at("ra", BASE_MS + HOUR_MS));
    relay.settled(0, 3).await;
    let letters: Vec<_> = rig.db().letters.iter().map(|letter| (letter.position, letter.kind)).collect();
    assert_eq!(letters, [(Some(1), "late"), (Some(2), "rejected")]);
    assert_eq!(rig.table(), ["new=v", "r=v"]);
}

#[tokio::test(start_paused = true)]
async fn p7_two_lanes_two_keys_in_opposite_order_under_load_neither_block_nor_lose_order() {
    for seed in 0..8 {
        let rig = Rig::keyed(Mode::Upsert, seed);
        let relay = Relay::start(&rig, "a", (0, 2), 2).await;
        {
            let mut world = rig.world.lock();
            world.faults.rates.slow_ms = 30;
            world.faults.rates.deliver = 100;
        }
        // Both partitions bring the same events, pairwise in opposite order, and rows of their own between them.
        for n in 0..60 {
            let (a, b) = (plain(&format!("a{n}"), "v"), plain(&format!("b{n}"), "v"));
            for (partition, two) in [(0, [&a, &b]), (1, [&b, &a])] {
                for (which, record) in two.into_iter().enumerate() {
                    relay.push(partition, record);
                    let (id, val) = (format!("p{partition}-{n}-{which}"), format!("{:03}", n * 2 + which));
                    relay.push(partition, &json(&id, &format!("row{partition}"), &val, 0, BASE_MS));
                }
            }
            pass(5).await;
        }
        relay.settled(0, 240).await;
        relay.settled(1, 240).await;
        let db = rig.db();
        assert_eq!(db.effects.len(), 120 + 240, "each key once");
        for partition in 0..2 {
            let row = format!("row{partition}");
            let order: Vec<_> = db.effects.iter().filter(|e| e.row.row == row).map(|e| &e.row.val).collect();
            assert!(order.is_sorted(), "{order:?}");
        }
    }
}

/// The lane span for ever, and on one thread nobody else ran: a record that had given its own key back to wait for an earlier
/// one of its row was looked at again at once, because its key was free.
#[tokio::test(start_paused = true)]
async fn p7_a_record_parked_behind_its_row_waits_without_spinning() {
    let rig = Rig::keyed(Mode::Upsert, 4);
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    rig.delay(2_000, 0);
    relay.push(1, &json("k", "x", "v", 0, BASE_MS));
    pass(100).await;
    // `k` is in flight in the other lane; what follows on its row waits, with copies of that.
    relay.push(0, &json("k", "x", "v", 0, BASE_MS));
    relay.push(0, &json("l", "x", "w", 0, BASE_MS));
    relay.push(0, &json("l", "x", "w", 0, BASE_MS));
    relay.push(0, &json("other", "y", "v", 0, BASE_MS));
    pass(1_000).await;
    assert_eq!(rig.table(), ["y=v"], "other rows go on");
    relay.settled(0, 4).await;
    relay.settled(1, 1).await;
    assert_eq!(rig.table(), ["x=w", "y=v"]);
    assert_eq!(counted(&relay.gate), [("duplicate", 2), ("updated", 1), ("written", 2)].into());
}

/// A batch that went again came after the parked records that it came before: their rows went back in time.
#[tokio::test(start_paused = true)]
async fn p8_a_batch_that_goes_again_stays_before_what_was_parked_behind_it() {
    let rig = Rig::keyed(Mode::Upsert, 5);
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    // Lane 1 takes `k` and gives it back: its delivery fails and its partition is revoked.
    rig.delay(1_000, 0);
    rig.script([DeliverFault::NotAppliedKept]);
    relay.push(1, &json("k", "x", "v2", 0, BASE_MS));
    pass(100).await;
    rig.delay(1_200, 0);
    rig.script([DeliverFault::NotAppliedKept]);
    relay.push(0, &json("first", "x", "v1", 0, BASE_MS));
    relay.push(0, &json("k", "x", "v2", 0, BASE_MS));
    pass(50).await;
    relay.door.revoke(1);
    relay.settled(0, 2).await;
    assert_eq!(rig.table(), ["x=v2"], "the later record of the row is the last");
}

#[tokio::test(start_paused = true)]
async fn p7_copies_in_a_batch_wait_for_the_first_and_the_next_is_tried_if_it_is_refused() {
    let rig = Rig::keyed(Mode::Upsert, 6);
    let gate = rig.gate("a", (1, 0)).await;
    let records = [plain("k", POISON), plain("k", POISON), plain("k", "v"), plain("k", "v")];
    let answers: Vec<Outcome> = calls(&gate, &records).await.iter().map(|answer| answer.outcome).collect();
    assert_eq!(answers, [Outcome::Rejected, Outcome::Rejected, Outcome::Written, Outcome::Duplicate]);
}

#[tokio::test(start_paused = true)]
async fn p7_a_copy_of_a_record_in_flight_hears_that_after_wait_also_while_the_first_is_unknown() {
    let mut rig = Rig::listed(7);
    rig.rules.wait_ms = 500;
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &plain("warm", "v")).await, Outcome::Written);
    for unknown in [false, true] {
        let id = format!("k{unknown}");
        rig.delay(3_000, 0);
        if unknown {
            rig.script([DeliverFault::UnknownApplied]);
        }
        let first = spawn_call(&gate, &plain(&id, "v"));
        pass(100).await;
        let started = tokio::time::Instant::now();
        // The same content, and another: nobody knows yet which of the two is settled.
        let (copy, other) = (plain(&id, "v"), plain(&id, "w"));
        let (copy, other) = tokio::join!(call(&gate, &copy), call(&gate, &other));
        assert_eq!(started.elapsed(), Duration::from_millis(500));
        for answer in [copy, other] {
            assert_eq!((answer.outcome, answer.problem), (Outcome::Unknown, Some(Problem::InFlight)));
        }
        assert_eq!(first.await.unwrap().outcome, Outcome::Written);
        pass(1_000).await;
        assert_eq!(call(&gate, &plain(&id, "w")).await.problem, Some(Problem::Mismatch));
    }
}

#[tokio::test(start_paused = true)]
async fn p7_revoke_drops_what_is_parked_and_the_next_owner_reads_it_again() {
    let rig = Rig::listed(8);
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    rig.delay(2_000, 0);
    relay.push(1, &plain("k", "v"));
    pass(100).await;
    relay.push(0, &plain("k", "v"));
    relay.push(0, &plain("l", "v"));
    pass(1_200).await;
    assert_eq!(relay.position(0), Some(0), "it waits for `k`");
    timeout(Duration::from_millis(300), relay.door.revoke(0)).await.expect("at once").unwrap();
    relay.take(0);
    relay.settled(0, 2).await;
    assert_eq!(rig.table().len(), 2);
}

/// Parked records were taken in without end while another lane held their keys.
#[tokio::test(start_paused = true)]
async fn p7_parked_records_are_bounded_and_then_the_partition_is_read_no_further() {
    let mut rig = Rig::listed(9);
    rig.rules.max_records = 8;
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    rig.delay(20_000, 0);
    relay.push(1, &plain("k", "v"));
    pass(100).await;
    for _ in 0..40_000 {
        relay.push(0, &plain("k", "v"));
    }
    pass(15_000).await;
    let read = relay.topic.lock().read[0];
    assert!(read < 20_000, "the lane's inbox is full long before: {read}");
    relay.settled(1, 1).await;
    relay.settled(0, 40_000).await;
    assert_eq!(counted(&relay.gate), [("duplicate", 40_000), ("written", 1)].into());
}

// ---- P8 ----------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn p8_callers_rows_keep_their_order_over_lanes_and_failures() {
    for seed in 0..10 {
        let rig = Rig::keyed(Mode::Upsert, seed);
        let gate = rig.gate("a", (3, 0)).await;
        {
            let mut world = rig.world.lock();
            (world.faults.rates.deliver, world.faults.rates.slow_ms) = (300, 10);
        }
        let records: Vec<String> = (0..60)
            .map(|n| json(&format!("k{n}"), &format!("r{}", n % 4), &format!("{n:02}"), 0, BASE_MS))
            .collect();
        for chunk in records.chunks(12) {
            let mut answers = calls(&gate, chunk).await;
            // What was not tried is sent again, from the first such record on, as a client does that keeps order.
            while let Some(first) = answers.iter().position(unavailable) {
                pass(100).await;
                answers = calls(&gate, &chunk[first..]).await;
            }
        }
        let db = rig.db();
        for row in 0..4 {
            let last = db.keyed[&format!("r{row}")].val.clone();
            assert_eq!(last, format!("{:02}", 56 + row), "seed {seed}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn p8_insert_keeps_the_first_of_a_row_and_calls_the_others_stale() {
    let rig = Rig::keyed(Mode::Insert, 10);
    let gate = rig.gate("a", (1, 0)).await;
    let records: Vec<String> =
        (0..3).map(|n| json(&format!("k{n}"), "r", &format!("v{n}"), 0, BASE_MS)).collect();
    let answers: Vec<Outcome> = calls(&gate, &records).await.iter().map(|answer| answer.outcome).collect();
    assert_eq!(answers, [Outcome::Written, Outcome::Stale, Outcome::Stale]);
    assert_eq!(outcome(&gate, &json("k3", "r", "v3", 0, BASE_MS)).await, Outcome::Stale);
    assert_eq!(outcome(&gate, &records[1]).await, Outcome::Duplicate);
    assert_eq!(rig.table(), ["r=v0"]);
}

// ---- P10 ---------------------------------------------------------------------------------------------------------------------

#[derive(Clone, Default)]
struct Kept {
    letters: Arc<Mutex<Vec<i64>>>,
    failures: Arc<Mutex<u32>>,
}

#[async_trait]
impl DeadLetters for Kept {
    async fn write(&mut self, letters: &[Letter<'_>]) -> Result<(), DeadLetterFault> {
        let mut failures = self.failures.lock();
        if *failures > 0 {
            *failures -= 1;
            return Err(DeadLetterFault { target: "test".into(), reason: "full".into() });
        }
        self.letters.lock().extend(letters.iter().filter_map(|letter| letter.position));
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn p10_a_dead_letter_kept_elsewhere_is_durable_before_its_position_passes() {
    let mut rig = Rig::listed(11);
    rig.rules.dead_letters = DeadLetterPolicy::External;
    let kept = Kept { failures: Arc::new(Mutex::new(5)), ..Kept::default() };
    let keeper = kept.clone();
    let gate = rig.gate_with_letters("a", (0, 1), Box::new(move || Box::new(keeper.clone()))).await;
    let relay = Relay::over(&rig, "a", gate, 1).await;
    relay.push(0, &plain("k", "v"));
    relay.push(0, "{nothing");
    pass(100).await;
    assert!(kept.letters.lock().is_empty());
    assert_eq!(relay.position(0), None, "the position waits for the letter");
    relay.settled(0, 2).await;
    assert_eq!(*kept.letters.lock(), [1]);
    assert_eq!(rig.table(), ["k=v"]);
    assert!(rig.db().letters.is_empty());
}

/// A place for dead letters that failed once left the route not ready for good: its HTTP door answered 503 until some connection
/// broke.
#[tokio::test(start_paused = true)]
async fn p10_a_route_is_ready_again_once_its_dead_letters_are_kept() {
    let mut rig = Rig::listed(14);
    rig.rules.dead_letters = DeadLetterPolicy::External;
    let kept = Kept { failures: Arc::new(Mutex::new(5)), ..Kept::default() };
    let keeper = kept.clone();
    let gate = rig.gate_with_letters("a", (0, 1), Box::new(move || Box::new(keeper.clone()))).await;
    let relay = Relay::over(&rig, "a", gate, 1).await;
    relay.push(0, "{nothing");
    pass(100).await;
    assert!(relay.gate.trouble().is_some_and(|reason| reason.contains("dead letters")));
    relay.settled(0, 1).await;
    assert_eq!(relay.gate.trouble(), None);
}

#[tokio::test(start_paused = true)]
async fn p10_a_dead_letter_beside_the_rows_goes_in_with_its_batch_or_not_at_all() {
    for fault in [DeliverFault::UnknownLost, DeliverFault::UnknownApplied, DeliverFault::NotAppliedKept] {
        let rig = Rig::listed(12);
        let relay = Relay::start(&rig, "a", (0, 1), 1).await;
        rig.script([fault]);
        relay.push(0, &plain("k", "v"));
        relay.push(0, "{nothing");
        relay.push(0, &plain("p", POISON));
        relay.settled(0, 3).await;
        assert_eq!(rig.table(), ["k=v"]);
        let letters: Vec<_> = rig.db().letters.iter().map(|letter| letter.position).collect();
        assert_eq!(letters.len(), 2, "{fault:?}: {letters:?}");
        assert_eq!(counted(&relay.gate), [("dead_lettered", 2), ("written", 1)].into(), "{fault:?}");
    }
}

/// A letter that settles no key was written while a parked record held the position before it: read again after a crash, it was
/// written again.
#[tokio::test(start_paused = true)]
async fn p10_a_dead_letter_waits_behind_a_parked_record() {
    let rig = Rig::listed(13);
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    rig.delay(3_000, 0);
    relay.push(1, &plain("k", "v"));
    pass(100).await;
    relay.push(0, &plain("k", "v"));
    relay.push(0, "{nothing");
    relay.push(0, &plain("l", "v"));
    pass(1_500).await;
    assert_eq!(rig.table(), ["l=v"]);
    assert!(rig.db().letters.is_empty());
    let topic = relay.crash();
    let relay = Relay::resume(&rig, "a", (0, 2), &topic, rig.memory()).await;
    relay.settled(0, 3).await;
    assert_eq!(rig.db().letters.len(), 1);
}

/// The good records before a bad one were counted to another shard's step, or to none, and were lost to everyone.
#[tokio::test(start_paused = true)]
async fn p10_a_relay_that_stops_at_a_bad_record_writes_what_came_before_it() {
    for bad in ["{nothing".to_owned(), plain("p", POISON)] {
        let mut rig = Rig::listed(14);
        rig.rules.dead_letters = DeadLetterPolicy::Stop;
        let relay = Relay::start(&rig, "a", (0, 1), 2).await;
        let own = plain("p", POISON) == bad;
        if own {
            // The sink finds it: what is in the same batch waits until the record is mended.
            relay.push(0, &plain("k", "v"));
            relay.settled(0, 1).await;
        } else {
            relay.push(0, &plain("k", "v"));
        }
        relay.push(0, &bad);
        relay.push(0, &plain("after", "v"));
        relay.push(1, &plain("other", "v"));
        relay.settled(1, 1).await;
        pass(2_000).await;
        let mut table = rig.table();
        table.sort();
        assert_eq!(table, ["k=v", "other=v"], "{bad}");
        assert_eq!(relay.position(0), Some(1), "{bad}");
        assert!(relay.topic.lock().stopped.contains_key(&0), "{bad}");
        assert_eq!(counted(&relay.gate), [("written", 2)].into(), "{bad}");
    }
}

// ---- P11 ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn p11_marks_expire_and_a_shard_that_moves_to_an_empty_store_admits_nothing_of_what_was_forgotten() {
    let rig = Rig::listed(15);
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    relay.push(0, &at("old", BASE_MS));
    relay.settled(0, 1).await;
    // Days go by.
    for day in 1..=4 {
        crate::clock::simulated::shift(DAY_MS * 1_000);
        relay.push(0, &at(&format!("day{day}"), BASE_MS + day * DAY_MS));
        relay.settled(0, day + 1).await;
        pass(40_000).await;
    }
    let floor_ms = rig.db().shards[&shard_of(0)].floor_ms;
    assert!(floor_ms > BASE_MS, "the floor rose: {floor_ms}");
    assert!(rig.world.lock().marks_of(&shard_of(0)) < 5, "and marks below it are gone");
    // The new owner starts with nothing, and its watermark is taken back as far as it could be.
    let topic = relay.crash();
    rig.world.lock().db.shards.get_mut(&shard_of(0)).unwrap().watermark_ms = i64::MIN;
    let relay = Relay::resume(&rig, "b", (0, 1), &topic, rig.memory()).await;
    relay.push(0, &at("old", BASE_MS));
    relay.push(0, &at("day4", BASE_MS + 4 * DAY_MS));
    relay.settled(0, 7).await;
    assert_eq!(rig.table().len(), 5, "nothing took effect twice");
    assert_eq!(rig.db().letters.iter().map(|letter| letter.kind).collect::<Vec<_>>(), ["late"]);
}

/// A busy lane's marks never expired: the work that is due came only when the lane was idle.
#[tokio::test(start_paused = true)]
async fn p11_marks_expire_while_the_lane_is_busy() {
    let rig = Rig::listed(16);
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &at("old", BASE_MS)).await, Outcome::Written);
    crate::clock::simulated::shift(3 * DAY_MS * 1_000);
    for n in 0..450 {
        assert_eq!(outcome(&gate, &at(&format!("k{n}"), BASE_MS + 3 * DAY_MS)).await, Outcome::Written);
        pass(100).await;
    }
    assert!(rig.db().shards["http/0"].floor_ms > BASE_MS);
    assert!(!rig.db().marks.contains_key(&("http/0".to_owned(), 1)));
}

/// With the arrival clock a record was late when another one had been written between its arrival and its turn.
#[tokio::test(start_paused = true)]
async fn p11_arrival_is_raised_to_the_floor_while_a_record_waits_for_its_turn() {
    let mut rig = Rig::keyed(Mode::Upsert, 17);
    (rig.arrival, rig.rules.lateness_ms) = (true, 0);
    let gate = rig.gate("a", (1, 0)).await;
    let mut waiting = Vec::new();
    for n in 0..30 {
        rig.delay(20, 0);
        if n % 7 == 3 {
            rig.script([DeliverFault::NotAppliedKept]);
        }
        let records: Vec<String> =
            (0..3).map(|m| plain(&format!("k{n}-{m}"), if m == 0 { POISON } else { "v" })).collect();
        let copy = plain(&format!("k{n}-0"), "v");
        let gate = gate.clone();
        waiting.push(tokio::spawn(async move { calls(&gate, &[records, vec![copy]].concat()).await }));
        pass(5).await;
    }
    for answers in waiting {
        let outcomes: Vec<Outcome> = answers.await.unwrap().iter().map(|answer| answer.outcome).collect();
        assert_eq!(outcomes, [Outcome::Rejected, Outcome::Written, Outcome::Written, Outcome::Written]);
    }
}

/// A record that waited for its key was late once later ones had moved the watermark on.
#[tokio::test(start_paused = true)]
async fn p11_the_watermark_does_not_pass_a_parked_record() {
    let mut rig = Rig::listed(18);
    rig.rules.lateness_ms = 1_000;
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    rig.delay(2_000, 0);
    rig.script([DeliverFault::NotAppliedKept]);
    relay.push(1, &at("k", BASE_MS));
    pass(100).await;
    relay.push(0, &at("k", BASE_MS));
    relay.push(0, &at("later", BASE_MS + 60_000));
    pass(500).await;
    assert_eq!(rig.table(), ["later=v"]);
    relay.door.revoke(1);
    relay.settled(0, 2).await;
    assert_eq!(rig.table(), ["later=v", "k=v"]);
    assert!(rig.db().letters.is_empty());
}

#[tokio::test(start_paused = true)]
async fn p11_verify_in_sink_lets_the_row_key_tell_a_late_copy() {
    let mut rig = Rig::keyed(Mode::Insert, 19);
    rig.rules.late_call = LatePolicy::VerifyInSink;
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &at("new", BASE_MS)).await, Outcome::Written);
    assert_eq!(outcome(&gate, &at("late", BASE_MS - 2 * HOUR_MS)).await, Outcome::Written);
    assert_eq!(outcome(&gate, &json("late2", "late", "w", 0, BASE_MS - 2 * HOUR_MS)).await, Outcome::Stale);
    assert_eq!(rig.table(), ["late=v", "new=v"]);
}
