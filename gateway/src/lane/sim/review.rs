//! What a review found in the lanes, each fault once.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    door::shard_of,
    faults::DeliverFault,
    rig::{BASE_MS, Relay, Rig, counted, outcome, pass, plain},
};
use crate::{
    clock::simulated,
    gate::{Once, reset_floor},
    outcome::Outcome,
};

/// While the sink was away, a lane emptied its inbox at each try: the relay read on, and memory grew, until it came back.
#[tokio::test(start_paused = true)]
async fn in_an_outage_a_relay_reads_no_more_than_a_lane_at_work_would_hold() {
    let mut rig = Rig::listed(1);
    rig.rules.max_records = 16;
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    relay.push(0, &plain("k0", "v"));
    relay.settled(0, 1).await;
    rig.cut();
    rig.world.lock().down_until = Some(Instant::now() + Duration::from_secs(600));
    let records = 4_000;
    (1..records).for_each(|at| relay.push(0, &plain(&format!("k{at}"), "v")));
    pass(60_000).await;
    let early = relay.topic.lock().read[0];
    pass(500_000).await;
    let late = relay.topic.lock().read[0];
    assert!(early > 1, "the outage is not noticed by the door: {early}");
    assert_eq!(early, late, "the lane and its inbox are full");
    // Two batches, the inbox's 16 chunks of 8, and what the door and the lane have in hand.
    assert!(late <= 2 * 16 + 20 * 8, "{late} of {records}");
    pass(60_000).await;
    relay.settled(0, records).await;
    let mut table = rig.table();
    table.sort();
    table.dedup();
    assert_eq!((table.len() as i64, rig.table().len() as i64), (records, records), "each once");
}

/// A lane that was not ready took no more in than two batches, and the word that its partition was taken back stood behind them in its
/// inbox. A sink that refuses what the group has taken back (Kafka's) kept such a lane out for ever.
#[tokio::test(start_paused = true)]
async fn p13_a_hand_over_is_heard_behind_a_full_inbox_while_the_sink_is_away() {
    let mut rig = Rig::listed(1);
    rig.rules.max_records = 16;
    let relay = Relay::start(&rig, "a", (0, 1), 2).await;
    for partition in 0..2 {
        relay.push(partition, &plain(&format!("k{partition}"), "v"));
        relay.settled(partition, 1).await;
    }
    rig.cut();
    rig.world.lock().down_until = Some(Instant::now() + Duration::from_secs(600));
    (0..4_000).for_each(|at| relay.push(0, &plain(&format!("more{at}"), "v")));
    pass(60_000).await;
    let read = relay.topic.lock().read[0];
    assert!(read < 1_000, "the inbox is full: {read} were read");
    let gone = relay.door.revoke(0);
    tokio::time::timeout(Duration::from_secs(5), gone).await.expect("the lane lets go at once").unwrap();
    // The other partition goes on, and nothing of the one that is gone is written.
    pass(600_000).await;
    relay.push(1, &plain("last", "v"));
    relay.settled(1, 2).await;
    assert_eq!(rig.table(), ["k0=v", "k1=v", "last=v"]);
}

/// Another lane found that the sink had gone back while this one's batch was on its way. The batch was put back after its shard
/// had been rewound, and its old offsets took the position past records that the sink had lost.
#[tokio::test(start_paused = true)]
async fn p6_a_batch_put_back_after_a_rewind_does_not_move_the_position_past_what_was_lost() {
    let rig = Rig::listed(2);
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    for partition in 0..2 {
        relay.push(partition, &plain(&format!("kept{partition}"), "v"));
        relay.settled(partition, 1).await;
    }
    let snapshot = rig.db();
    for partition in 0..2 {
        relay.push(partition, &plain(&format!("lost{partition}"), "v"));
        relay.settled(partition, 2).await;
    }
    // Lane 1's batch goes in at once, and its answer takes a while.
    rig.delay(0, 3_000);
    relay.push(1, &plain("slow", "v"));
    pass(200).await;
    assert_eq!(relay.position(1), Some(3));
    {
        let mut world = rig.world.lock();
        world.db = snapshot;
        world.went_back += 1;
    }
    // Lane 0 loses its connection and finds it out; lane 1 keeps its own and hears that its batch is in.
    rig.script([DeliverFault::NotAppliedLost]);
    relay.push(0, &plain("next", "v"));
    relay.settled(0, 3).await;
    relay.settled(1, 3).await;
    pass(3_000).await;
    let mut table = rig.table();
    table.sort();
    assert_eq!(table, ["kept0=v", "kept1=v", "lost0=v", "lost1=v", "next=v", "slow=v"]);
    assert_eq!(rig.db().shards[&shard_of(1)].position, Some(3));
}

/// The store was made anew because of another lane's shard while this lane's batch was in and its answer on the way. The batch's records
/// were not read again, for the sink's position was past them, and were never counted. Found by the simulation (`one_outcome`).
#[tokio::test(start_paused = true)]
async fn p6_records_of_a_batch_that_a_rebuild_crossed_are_counted_once() {
    let rig = Rig::listed(2);
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    for partition in 0..2 {
        relay.push(partition, &plain(&format!("kept{partition}"), "v"));
        relay.settled(partition, 1).await;
    }
    // Lane 1's batch goes in at once, and its answer takes a while.
    rig.delay(0, 3_000);
    relay.push(1, &plain("slow", "v"));
    pass(200).await;
    assert_eq!(relay.position(1), Some(2));
    let snapshot = rig.db();
    relay.push(0, &plain("lost", "v"));
    relay.settled(0, 2).await;
    {
        let mut world = rig.world.lock();
        world.db = snapshot;
        world.went_back += 1;
    }
    // Lane 0 finds out, and makes the store anew; of lane 1 nothing was lost.
    rig.script([DeliverFault::NotAppliedLost]);
    relay.push(0, &plain("next", "v"));
    relay.settled(0, 3).await;
    pass(5_000).await;
    assert_eq!(rig.table(), ["kept0=v", "kept1=v", "slow=v", "lost=v", "next=v"]);
    // What was lost took effect once more, and counts once more.
    assert_eq!(counted(&relay.gate), BTreeMap::from([("written", 6)]));
}

/// A call expires a bounded number of marks, and there was one call in 30 s: marks were made faster than they expired.
#[tokio::test(start_paused = true)]
async fn p11_expiry_goes_on_at_each_tick_while_there_is_something_to_expire() {
    let mut rig = Rig::listed(3);
    (rig.rules.lateness_ms, rig.rules.window_ms, rig.arrival) = (10_000, 60_000, true);
    rig.world.lock().expire_most = 2;
    let gate = rig.gate("a", (1, 0)).await;
    for at in 0..40 {
        assert_eq!(outcome(&gate, &plain(&format!("k{at}"), "v")).await, Outcome::Written);
    }
    assert_eq!(rig.world.lock().marks_of("http/0"), 40);
    pass(200_000).await;
    assert_eq!(outcome(&gate, &plain("later", "v")).await, Outcome::Written);
    pass(60_000).await;
    assert!(rig.world.lock().marks_of("http/0") <= 2, "{} left", rig.world.lock().marks_of("http/0"));
}

/// Arrival does not fall below the admission floor; a clock set back made every record lie ahead of it, and all were rejected.
#[tokio::test(start_paused = true)]
async fn p11_a_route_by_arrival_writes_on_when_the_clock_is_set_back() {
    let mut rig = Rig::listed(4);
    (rig.rules.lateness_ms, rig.rules.max_ahead_ms, rig.arrival) = (10_000, 60_000, true);
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Written);
    simulated::shift(-600_000_000);
    assert_eq!(outcome(&gate, &plain("l", "v")).await, Outcome::Written);
    assert_eq!(outcome(&gate, &plain("l", "v")).await, Outcome::Duplicate);
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Duplicate);
}

/// A gateway came up with a clock that was years ahead: its first record took the watermark there, and what had been written that
/// morning was forgotten and taken again.
#[tokio::test(start_paused = true)]
async fn p11_a_route_by_arrival_does_not_open_with_a_clock_that_is_ahead() {
    const DAY_MS: i64 = 86_400_000;
    let mut rig = Rig::listed(8);
    (rig.rules.lateness_ms, rig.arrival) = (0, true);
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Written);
    gate.close().await;
    let open = async |ahead_ms: i64, sink_too: bool| {
        simulated::shift(ahead_ms * 1_000);
        rig.world.lock().hosts_ahead_ms += if sink_too { 0 } else { ahead_ms };
        rig.try_gate("a", (1, 0), rig.memory()).await
    };
    // The sink's clock is another one, and knows better.
    let refused = open(2 * DAY_MS, false).await.unwrap_err().to_string();
    assert!(refused.contains("2 d ahead of the sink's") && refused.contains("max_clock_skew"), "{refused}");
    // It is the same one, and only the pause is strange.
    rig.world.lock().hosts_ahead_ms = 0;
    let refused = open(30 * DAY_MS, true).await.unwrap_err().to_string();
    assert!(refused.contains("32 d past") && refused.contains("store reset-floor --route r"), "{refused}");
    // The clock is set: nothing has been forgotten.
    let gate = open(-32 * DAY_MS, true).await.unwrap();
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Duplicate);
    gate.close().await;
    // Away for a week, and later back by a clock that is behind.
    let gate = open(7 * DAY_MS, true).await.unwrap();
    assert_eq!(outcome(&gate, &plain("l", "v")).await, Outcome::Written);
    gate.close().await;
    let gate = open(-3 * DAY_MS, true).await.unwrap();
    assert_eq!(outcome(&gate, &plain("l", "v")).await, Outcome::Duplicate);
    assert_eq!(outcome(&gate, &plain("m", "v")).await, Outcome::Written);
    assert_eq!(rig.table(), ["k=v", "l=v", "m=v"]);
}

/// A clock that had been ahead for an hour left a watermark two years off: by it arrival stood still, nothing expired any more, and
/// there was no way back but to delete rows of the bookkeeping by hand.
#[tokio::test(start_paused = true)]
async fn p11_reset_floor_is_the_way_out_of_a_watermark_that_a_wrong_clock_has_set() {
    const TWO_YEARS_US: i64 = 730 * 86_400_000_000;
    let mut rig = Rig::listed(9);
    (rig.rules.lateness_ms, rig.arrival) = (0, true);
    simulated::shift(TWO_YEARS_US);
    let relay = Relay::start(&rig, "a", (1, 1), 1).await;
    assert_eq!(outcome(&relay.gate, &plain("k", "v")).await, Outcome::Written);
    relay.push(0, &plain("r", "v"));
    relay.settled(0, 1).await;
    simulated::shift(-TWO_YEARS_US);
    let known: BTreeMap<String, i64> =
        rig.db().shards.iter().map(|(shard, row)| (shard.clone(), row.sequence)).collect();
    let store = rig.older_store(&rig.db(), &known);
    assert_eq!(store.checkpoints().len(), 2, "it knows it all");
    let sink = || Arc::new(rig.sink.clone());
    let busy = reset_floor(sink(), "r", Some(&store), true).await.unwrap_err().to_string();
    assert!(busy.contains("held by a") && busy.contains("stop every gateway"), "{busy}");
    relay.gate.close().await;
    let before = rig.db();
    let looked = reset_floor(sink(), "r", Some(&store), false).await.unwrap();
    assert_eq!((looked.marks, looked.shards.len()), (None, 2));
    assert_eq!(rig.db().marks.len(), before.marks.len(), "without the word nothing is discarded");
    let reset = reset_floor(sink(), "r", Some(&store), true).await.unwrap();
    assert_eq!(reset.marks, Some(2));
    assert!(reset.shards.iter().all(|state| state.watermark_ms > BASE_MS + 1_000_000_000));
    pass(7_000).await;
    let topic = relay.topic.clone();
    let relay = Relay::resume(&rig, "a", (1, 1), &topic, store).await;
    assert_eq!(outcome(&relay.gate, &plain("k", "v")).await, Outcome::Written, "what was known is discarded");
    relay.push(0, &plain("s", "v"));
    relay.settled(0, 2).await;
    assert_eq!(rig.table(), ["k=v", "r=v", "k=v", "s=v"], "and the relay reads on where it was");
    let db = rig.db();
    assert!(db.shards.values().all(|row| (BASE_MS..BASE_MS + 100_000).contains(&row.watermark_ms)), "{db:?}");
}

/// Only records moved the watermark: a route that runs effects and writes nothing never forgot one.
#[tokio::test(start_paused = true)]
async fn p11_effects_alone_take_time_forward() {
    let mut rig = Rig::listed(5);
    (rig.rules.lateness_ms, rig.rules.window_ms, rig.arrival) = (10_000, 60_000, true);
    let gate = rig.gate("a", (1, 0)).await;
    let run = async |name: &str| gate.once(name, || async { Ok::<u32, std::io::Error>(7) }).await.unwrap();
    assert_eq!(run("first").await, Once::Ran(7));
    assert_eq!(run("first").await, Once::Already);
    for at in 0..20 {
        pass(30_000).await;
        assert_eq!(run(&format!("e{at}")).await, Once::Ran(7));
    }
    assert!(rig.db().shards["http/0"].watermark_ms >= BASE_MS + 600_000);
    pass(5_000).await;
    assert_eq!(run("first").await, Once::Ran(7), "its window is over");
}

/// A batch of two shards was in, its answer was lost, and one of the shards was another owner's by then. The marks of that one were
/// not asked for, so its row counted as a dead letter, though it stood in the table and no letter was kept.
#[tokio::test(start_paused = true)]
async fn p5_rows_of_a_shard_that_was_handed_over_while_unknown_count_as_what_became_of_them() {
    let rig = Rig::listed(7);
    let relay = Relay::start(&rig, "a", (0, 1), 2).await;
    // The batch goes in at once, and the connection is cut before its answer.
    rig.delay(0, 1_000);
    relay.push(0, &plain("k", "v"));
    relay.push(1, &plain("l", "v"));
    pass(200).await;
    let mut table = rig.table();
    table.sort();
    assert_eq!(table, ["k=v", "l=v"], "in, in one batch, and not answered yet");
    assert_eq!(rig.db().commits.len(), 2, "a step of each shard");
    rig.world.lock().raise(&shard_of(0), "b", 0);
    relay.topic.lock().owners[0] = Some("b".into());
    rig.cut();
    rig.delay(0, 0);
    relay.settled(1, 1).await;
    pass(2_000).await;
    assert_eq!(counted(&relay.gate), [("written", 2)].into());
    assert!(rig.db().letters.is_empty());
}
