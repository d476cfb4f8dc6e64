//! The protocol's paragraphs about owners and the sink: P3 to P6, P13.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use adapters::sink::{Acquire, Mode, Sink};
use tokio::time::{Instant, timeout};

use super::{
    door::{Topic, shard_of},
    faults::{Call, CallFault, DeliverFault},
    rig::{BASE_MS, Relay, Rig, call, counted, json, outcome, pass, plain, spawn_call, unavailable},
};
use crate::outcome::Outcome;

// ---- P3 ----------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn p3_opening_fences_and_reads_all_http_shards_also_of_lanes_no_longer_configured() {
    let rig = Rig::listed(1);
    let gate = rig.gate("a", (4, 0)).await;
    let records: Vec<String> = (0..30).map(|at| plain(&format!("k{at}"), "v")).collect();
    for record in &records {
        assert_eq!(outcome(&gate, record).await, Outcome::Written);
    }
    gate.close().await;
    let before = rig.db().shards;
    let gate = rig.gate("a", (1, 0)).await;
    for record in &records {
        assert_eq!(outcome(&gate, record).await, Outcome::Duplicate);
    }
    let after = rig.db().shards;
    assert_eq!(after.len(), 4);
    assert!(after.iter().all(|(shard, row)| row.epoch > before[shard].epoch), "{after:?}");
    // And they stay this owner's.
    pass(10_000).await;
    assert!(rig.db().shards.values().all(|row| row.heartbeat.elapsed() < Duration::from_secs(4)));
}

#[tokio::test(start_paused = true)]
async fn p3_a_second_live_owner_waits_and_takes_over_within_seconds_of_the_firsts_end() {
    let rig = Rig::listed(2);
    let first = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&first, &plain("k", "v")).await, Outcome::Written);
    let second = rig.gate("b", (1, 0));
    tokio::pin!(second);
    assert!(timeout(Duration::from_secs(60), &mut second).await.is_err(), "the first lives");
    first.crash();
    let second = timeout(Duration::from_secs(8), second).await.expect("the first is dead for 6 s");
    assert_eq!(outcome(&second, &plain("k", "v")).await, Outcome::Duplicate);
    assert_eq!(rig.table(), ["k=v"]);
}

/// The idle lane's tick began anew whenever another lane settled something: it never came, no heartbeat went out, and a second
/// instance took the shard of a living owner.
#[tokio::test(start_paused = true)]
async fn p3_an_idle_lane_lives_on_beside_a_busy_one() {
    let rig = Rig::keyed(Mode::Upsert, 3);
    let gate = rig.gate("a", (2, 0)).await;
    let busy = {
        let gate = gate.clone();
        tokio::spawn(async move {
            // One row key, so that one lane has all of it.
            for at in 0..200 {
                call(&gate, &json(&format!("k{at}"), "r", "v", 0, BASE_MS)).await;
                pass(100).await;
            }
        })
    };
    while !busy.is_finished() {
        pass(500).await;
        let db = rig.db();
        let oldest = db.shards.values().map(|row| row.heartbeat.elapsed()).max().unwrap();
        assert!(oldest < Duration::from_secs(4), "a shard's owner looks dead: {oldest:?}");
    }
    assert_eq!(rig.db().commits.len(), 200);
}

/// An owner that learnt many facts from the sink, at its start or after the sink had gone back, was not heard for longer than
/// `STALE_OWNER_MS`: another instance took its shards, and was not heard either while it learnt.
#[tokio::test(start_paused = true)]
async fn p3_an_owner_that_learns_for_long_lives_on() {
    let rig = Rig::listed(5);
    let first = rig.gate("a", (2, 0)).await;
    for at in 0..60 {
        assert_eq!(outcome(&first, &plain(&format!("k{at}"), "v")).await, Outcome::Written);
    }
    let lives = async |ms: u64| {
        for _ in 0..ms / 250 {
            pass(250).await;
            let db = rig.db();
            let callers = db.shards.iter().filter(|(shard, _)| shard.starts_with("http/"));
            let oldest = callers.map(|(_, row)| row.heartbeat.elapsed()).max().unwrap();
            assert!(oldest < Duration::from_secs(5), "a shard's owner looks dead: {oldest:?}");
        }
    };
    let snapshot = rig.db();
    assert_eq!(outcome(&first, &plain("last", "v")).await, Outcome::Written);
    // The sink goes back by a batch: all is learnt again.
    {
        let mut world = rig.world.lock();
        world.db = snapshot;
        world.went_back += 1;
        world.faults.page_ms = 1_000;
        world.connections.clear();
    }
    lives(60_000).await;
    assert_eq!(*first.inside().history.read(), 1, "the store was rebuilt");
    assert_eq!(outcome(&first, &plain("k1", "v")).await, Outcome::Duplicate);
    first.crash();
    let second = rig.gate("b", (2, 0));
    tokio::pin!(second);
    assert!(timeout(Duration::from_secs(10), &mut second).await.is_err(), "it learns");
    tokio::select! {
        () = lives(15_000) => {}
        _ = &mut second => panic!("it has learnt all already"),
    }
    assert_eq!(outcome(&second.await, &plain("k1", "v")).await, Outcome::Duplicate);
}

/// A stand-by took one of two callers' shards when its owner's lane was held up, kept it alive, and waited for the other one, whose
/// lane lived on: both instances were not ready for ever.
#[tokio::test(start_paused = true)]
async fn p3_callers_shards_are_taken_over_together() {
    let rig = Rig::keyed(Mode::Upsert, 6);
    let first = rig.gate("a", (2, 0)).await;
    let second = rig.gate("b", (2, 0));
    tokio::pin!(second);
    assert!(timeout(Duration::from_secs(5), &mut second).await.is_err(), "the first lives");
    rig.world.lock().db.shards.get_mut("http/0").unwrap().heartbeat -= Duration::from_secs(7);
    assert!(timeout(Duration::from_secs(60), &mut second).await.is_err(), "a shard of two is not enough");
    for at in 0..20 {
        let answer = call(&first, &json(&format!("k{at}"), &format!("r{at}"), "v", 0, BASE_MS)).await;
        assert_eq!(answer.outcome, Outcome::Written, "both lanes are at work");
    }
}

/// A relay's lane was in trouble when its last partition was taken from it. It had nothing to do any more that would have shown that
/// all was well again, and the route was not ready for ever.
#[tokio::test(start_paused = true)]
async fn a_lane_that_owns_nothing_any_more_is_in_nobodys_way() {
    let rig = Rig::listed(7);
    let relay = Relay::start(&rig, "a", (1, 1), 1).await;
    relay.push(0, &plain("k", "v"));
    relay.settled(0, 1).await;
    rig.cut();
    rig.world.lock().down_until = Some(Instant::now() + Duration::from_secs(10));
    pass(3_000).await;
    assert!(relay.gate.trouble().is_some(), "the sink is away");
    relay.door.revoke(0).await.unwrap();
    pass(30_000).await;
    assert_eq!(relay.gate.trouble(), None);
    assert_eq!(outcome(&relay.gate, &plain("l", "v")).await, Outcome::Written);
}

/// A route ends although its sink says "not now" again and again: callers hear, and a relay's records are read again.
#[tokio::test(start_paused = true)]
async fn a_gate_closes_while_the_sink_says_not_now() {
    let mut rig = Rig::listed(8);
    rig.rules.max_records = 16;
    let relay = Relay::start(&rig, "a", (1, 1), 1).await;
    rig.script((0..100_000).map(|_| DeliverFault::NotAppliedKept));
    let waits = spawn_call(&relay.gate, &plain("k", "v"));
    (0..4_000).for_each(|at| relay.push(0, &plain(&format!("k{at}"), "v")));
    pass(30_000).await;
    timeout(Duration::from_secs(60), relay.gate.close()).await.expect("it closes");
    assert!(unavailable(&waits.await.unwrap()));
    assert_eq!(rig.table(), Vec::<String>::new());
}

/// Two instances of a relay could not run at once: each wanted callers' shards that it had no use for.
#[tokio::test(start_paused = true)]
async fn p3_two_instances_share_the_partitions_of_a_route() {
    let rig = Rig::listed(4);
    let first = Relay::start(&rig, "a", (0, 1), 2).await;
    let gate = timeout(Duration::from_secs(5), rig.gate("b", (0, 1))).await.expect("nothing to wait for");
    let second = Relay::join(&rig, "b", gate, &first.topic);
    first.door.revoke(1).await.unwrap();
    second.take(1);
    first.push(0, &plain("k", "v"));
    first.push(1, &plain("l", "v"));
    first.settled(0, 1).await;
    second.settled(1, 1).await;
    assert_eq!(counted(&first.gate), [("written", 1)].into());
    assert_eq!(counted(&second.gate), [("written", 1)].into());
}

// ---- P4 ----------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn p4_a_fenced_batch_writes_nothing_and_its_shard_is_left_to_the_new_owner() {
    let rig = Rig::listed(5);
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    relay.push(0, &plain("k", "v"));
    relay.settled(0, 1).await;
    let mut other = rig.sink.session("r", "b");
    other.acquire(&[shard_of(0).as_str().into()], Acquire::Force).await.unwrap();
    relay.topic.lock().owners[0] = Some("b".into());
    relay.push(0, &plain("l", "v"));
    pass(3_000).await;
    assert_eq!(rig.table(), ["k=v"]);
    assert_eq!(relay.topic.lock().fenced, [(0, "b".to_owned())]);
    assert_eq!(rig.db().shards[&shard_of(0)].owner, "b", "and it is not taken back");
    assert_eq!(counted(&relay.gate), [("written", 1)].into());
}

#[tokio::test(start_paused = true)]
async fn p4_the_fence_moves_one_step_a_batch_under_one_epoch() {
    let rig = Rig::listed(6);
    let gate = rig.gate("a", (1, 0)).await;
    for at in 0..20 {
        if at % 5 == 4 {
            rig.cut();
        }
        while outcome(&gate, &plain(&format!("k{at}"), "v")).await == Outcome::Unknown {
            pass(50).await;
        }
    }
    let db = rig.db();
    let sequences: Vec<i64> = db.commits.iter().map(|commit| commit.step.sequence).collect();
    assert_eq!(sequences, (1..=20).collect::<Vec<_>>());
    assert!(db.commits.windows(2).all(|two| two[0].step.epoch <= two[1].step.epoch));
    assert_eq!(db.shards["http/0"].sequence, 20);
}

#[tokio::test(start_paused = true)]
async fn p4_a_fenced_call_lane_answers_and_takes_its_shard_again_only_when_it_is_free() {
    let rig = Rig::listed(7);
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Written);
    let mut other = rig.sink.session("r", "b");
    let epoch = other.acquire(&["http/0".into()], Acquire::Force).await.unwrap()[0].epoch;
    let answer = call(&gate, &plain("l", "v")).await;
    assert!(unavailable(&answer), "{answer:?}");
    // The other lives for a while, then falls silent.
    for _ in 0..10 {
        pass(1_000).await;
        other.heartbeat(&[("http/0".into(), epoch)]).await.expect("it is still the other's");
        assert!(unavailable(&call(&gate, &plain("l", "v")).await));
    }
    pass(10_000).await;
    assert_eq!(outcome(&gate, &plain("l", "v")).await, Outcome::Written);
    assert_eq!(rig.table(), ["k=v", "l=v"]);
}

// ---- P5 ----------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn p5_an_attempt_whose_client_is_gone_applies_once_or_never() {
    let mut ghosts = 0;
    for seed in 0..60 {
        let rig = Rig::listed(seed);
        rig.world.lock().resolve_by_force = seed % 2 == 0;
        let gate = rig.gate("a", (1, 0)).await;
        let (after_ms, executed) = (seed * 7, seed % 3 == 0);
        rig.script([DeliverFault::UnknownLater { after_ms, executed }]);
        rig.world.lock().faults.rates.slow_ms = 100;
        assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Written);
        pass(5_000).await;
        rig.world.lock().run_ghosts();
        assert_eq!(rig.table(), ["k=v"], "seed {seed}");
        ghosts += rig.world.lock().ghosts_applied;
        gate.crash();
    }
    assert!((5..55).contains(&ghosts), "both interleavings are met: {ghosts} of 60");
}

#[tokio::test(start_paused = true)]
async fn p5_the_answer_is_given_only_after_the_epoch_was_raised() {
    let rig = Rig::listed(8);
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &plain("warm", "v")).await, Outcome::Written);
    let before = rig.db().shards["http/0"].epoch;
    rig.script([DeliverFault::UnknownApplied]);
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Written);
    assert!(rig.db().shards["http/0"].epoch > before);
}

/// The lane asked for ever: a sink that leaves the shard to its new owner never answers `Applied` or `NotApplied`.
#[tokio::test(start_paused = true)]
async fn p5_an_unknown_batch_whose_shard_was_taken_over_is_learnt_from_its_marks() {
    for applied in [DeliverFault::UnknownApplied, DeliverFault::UnknownLost] {
        let rig = Rig::listed(9);
        let relay = Relay::start(&rig, "a", (0, 2), 2).await;
        relay.push(0, &plain("warm", "v"));
        relay.settled(0, 1).await;
        rig.script([applied]);
        rig.delay(50, 0);
        relay.push(0, &plain("k", "v"));
        pass(30).await;
        rig.world.lock().down_until = Some(tokio::time::Instant::now() + Duration::from_secs(2));
        pass(500).await;
        {
            let mut world = rig.world.lock();
            world.raise(&shard_of(0), "b", 0);
        }
        relay.topic.lock().owners[0] = Some("b".into());
        // A copy through another partition of this process must neither be delivered twice nor lost.
        relay.push(1, &plain("k", "v"));
        relay.settled(1, 1).await;
        assert_eq!(rig.table(), ["warm=v", "k=v"], "{applied:?}");
        assert_eq!(relay.topic.lock().fenced.len(), 1);
    }
}

/// A revoke during an unknown batch gave its keys back at once: a copy through another partition then took effect a second time
/// when the batch turned out to be in.
#[tokio::test(start_paused = true)]
async fn p5_keys_of_an_unknown_batch_stay_claimed_when_its_partition_is_revoked() {
    let rig = Rig::listed(10);
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    rig.script([DeliverFault::UnknownLater { after_ms: 4_000, executed: true }]);
    rig.delay(50, 0);
    relay.push(0, &plain("k", "v"));
    pass(30).await;
    rig.world.lock().down_until = Some(tokio::time::Instant::now() + Duration::from_secs(2));
    pass(300).await;
    relay.door.revoke(0).await.unwrap();
    relay.push(1, &plain("k", "v"));
    relay.settled(1, 1).await;
    pass(5_000).await;
    rig.world.lock().run_ghosts();
    assert_eq!(rig.table(), ["k=v"]);
}

// ---- P6 ----------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn p6_a_store_that_is_behind_catches_up_from_the_marks_before_any_verdict() {
    let rig = Rig::listed(11);
    let relay = Relay::start(&rig, "a", (2, 1), 1).await;
    for at in 0..12 {
        assert_eq!(outcome(&relay.gate, &plain(&format!("k{at}"), "v")).await, Outcome::Written);
        relay.push(0, &plain(&format!("r{at}"), "v"));
        relay.settled(0, at + 1).await;
    }
    let topic = relay.crash();
    let db = rig.db();
    for known in [0, 3, 100] {
        let known: BTreeMap<String, i64> =
            db.shards.iter().map(|(shard, row)| (shard.clone(), row.sequence.min(known))).collect();
        let store = rig.older_store(&db, &known);
        let relay = Relay::resume(&rig, "a", (2, 1), &topic, store).await;
        for at in 0..12 {
            assert_eq!(outcome(&relay.gate, &plain(&format!("k{at}"), "v")).await, Outcome::Duplicate);
            assert_eq!(outcome(&relay.gate, &plain(&format!("r{at}"), "v")).await, Outcome::Duplicate);
        }
        relay.crash();
    }
    assert_eq!(rig.table().len(), 24);
}

#[tokio::test(start_paused = true)]
async fn p6_a_sink_that_went_back_is_noticed_before_any_verdict_and_read_again_from_its_positions() {
    let rig = Rig::keyed(Mode::Upsert, 12);
    let relay = Relay::start(&rig, "a", (1, 1), 1).await;
    let mut snapshot = None;
    for at in 0..4 {
        relay.push(0, &json(&format!("k{at}"), "r", &format!("v{at}"), 0, BASE_MS));
        relay.settled(0, at + 1).await;
        assert_eq!(outcome(&relay.gate, &plain(&format!("c{at}"), "v")).await, Outcome::Written);
        if at == 1 {
            snapshot = Some(rig.db());
        }
    }
    rig.world.lock().go_back(snapshot.unwrap());
    pass(1_500).await;
    assert!(relay.topic.lock().seeks >= 1, "the source is read again from the sink's position");
    relay.settled(0, 4).await;
    assert_eq!(outcome(&relay.gate, &plain("c1", "v")).await, Outcome::Duplicate, "still there");
    assert_eq!(outcome(&relay.gate, &plain("c2", "v")).await, Outcome::Written, "lost, and sent again");
    assert_eq!(rig.table(), ["c0=v", "c1=v", "c2=v", "r=v3"]);
}

/// A lane compared only its own shards: the first to reconnect answered with facts that another lane's shard had lost, and a
/// relay's record was passed over as a copy of a record that no table held any more.
#[tokio::test(start_paused = true)]
async fn p6_the_first_lane_to_reconnect_sees_what_other_lanes_have_lost() {
    let rig = Rig::listed(13);
    let relay = Relay::start(&rig, "a", (1, 1), 1).await;
    relay.push(0, &plain("warm", "v"));
    relay.settled(0, 1).await;
    let snapshot = rig.db();
    assert_eq!(outcome(&relay.gate, &plain("k", "v")).await, Outcome::Written);
    rig.world.lock().go_back(snapshot);
    // One chunk: the new record takes the position past the copy before the callers' lane comes to look at its own shard.
    relay.push(0, &plain("k", "v"));
    relay.push(0, &plain("new", "v"));
    relay.settled(0, 3).await;
    pass(2_000).await;
    let mut table = rig.table();
    table.sort();
    assert_eq!(table, ["k=v", "new=v", "warm=v"], "the relay's copy is the only one left");
}

/// A lane looks after its connection four times a second, and the door asked the lanes. In between it answered copies from the
/// store: the sink had ended every connection to be restored, the row was gone, and its producer heard `duplicate` and forgot it.
#[tokio::test(start_paused = true)]
async fn p6_the_door_answers_no_copy_from_the_moment_a_connection_ends() {
    for lanes in [1, 3] {
        let rig = Rig::listed(24);
        let gate = rig.gate("a", (lanes, 0)).await;
        let snapshot = rig.db();
        for key in ["k", "l", "m"] {
            assert_eq!(outcome(&gate, &plain(key, "v")).await, Outcome::Written);
        }
        assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Duplicate);
        rig.world.lock().go_back(snapshot);
        // At once: no lane has had a turn.
        let answer = call(&gate, &plain("k", "v")).await;
        assert_ne!(answer.outcome, Outcome::Duplicate, "{lanes} lanes: the row is in no table");
        pass(1_000).await;
        for key in ["k", "l", "m"] {
            assert_ne!(outcome(&gate, &plain(key, "v")).await, Outcome::Unknown);
        }
        let mut table = rig.table();
        table.sort();
        assert_eq!(table, ["k=v", "l=v", "m=v"]);
    }
}

/// Partitions were assigned while the connection broke: the lane's next call made a new one, on which only their shards were looked
/// at, and what its other shards had lost went unnoticed.
#[tokio::test(start_paused = true)]
async fn p6_a_connection_made_by_an_assignment_is_compared_whole() {
    let rig = Rig::listed(25);
    let gate = rig.gate("a", (0, 1)).await;
    let relay = Relay::join(&rig, "a", gate, &Topic::new(2));
    relay.take(0);
    relay.push(0, &plain("warm", "v"));
    relay.settled(0, 1).await;
    let snapshot = rig.db();
    relay.push(0, &plain("k", "v"));
    relay.settled(0, 2).await;
    rig.world.lock().faults.rates.slow_ms = 400;
    relay.take(1);
    pass(30).await;
    assert!(!rig.db().shards.contains_key(&shard_of(1)), "the assignment is on its way");
    rig.world.lock().go_back(snapshot);
    rig.world.lock().faults.rates.slow_ms = 0;
    pass(2_000).await;
    assert_eq!(rig.table(), ["warm=v", "k=v"], "what partition 0 had lost is read again");
}

#[tokio::test(start_paused = true)]
async fn p6_floors_are_discarded_too() {
    let rig = Rig::listed(14);
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &json("k", "k", "v", 0, BASE_MS - 100_000_000)).await, Outcome::Written);
    let snapshot = rig.db();
    assert_eq!(outcome(&gate, &plain("l", "v")).await, Outcome::Written);
    let old = json("m", "m", "v", 0, BASE_MS - 50_000_000);
    assert_eq!(outcome(&gate, &old).await, Outcome::Late, "below the watermark minus lateness");
    rig.world.lock().go_back(snapshot);
    pass(1_000).await;
    assert_eq!(outcome(&gate, &old).await, Outcome::Written, "that watermark belongs to the lost history");
}

#[tokio::test(start_paused = true)]
async fn p6_verdicts_wait_while_there_is_no_connection() {
    let rig = Rig::listed(15);
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Written);
    {
        let mut world = rig.world.lock();
        world.connections.clear();
        world.down_until = Some(tokio::time::Instant::now() + Duration::from_secs(5));
    }
    pass(300).await;
    for record in [plain("k", "v"), plain("new", "v")] {
        let answer = call(&gate, &record).await;
        assert!(unavailable(&answer), "no verdict, not even `duplicate`: {answer:?}");
    }
    pass(8_000).await;
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Duplicate);
    assert_eq!(outcome(&gate, &plain("new", "v")).await, Outcome::Written);
}

/// A broker or server failed over just when a route opened: the process ended with an error, though it had found the sink well.
#[tokio::test(start_paused = true)]
async fn a_route_opens_although_the_sink_fails_over_meanwhile() {
    for failures in 1..8 {
        let rig = Rig::listed(200 + failures);
        let first = rig.gate("a", (2, 0)).await;
        for at in 0..10 {
            assert_eq!(outcome(&first, &plain(&format!("k{at}"), "v")).await, Outcome::Written);
        }
        first.crash();
        for at in 0..failures {
            rig.fail(Call::Look, if at % 2 == 0 { CallFault::Before } else { CallFault::After });
        }
        rig.world.lock().down_until = Some(Instant::now() + Duration::from_secs(20));
        let second = timeout(Duration::from_secs(60), rig.gate("b", (2, 0))).await.expect("it opens");
        for at in 0..10 {
            assert_eq!(outcome(&second, &plain(&format!("k{at}"), "v")).await, Outcome::Duplicate);
        }
    }
    // For ever it does not wait.
    let rig = Rig::listed(210);
    rig.world.lock().down_until = Some(Instant::now() + Duration::from_secs(3_600));
    let refused = timeout(Duration::from_secs(90), rig.try_gate("a", (1, 0), rig.memory())).await;
    let Err(refused) = refused.expect("it gives up") else { panic!("the sink is away") };
    let refused = refused.to_string();
    assert!(refused.contains("not reachable") && refused.contains("check that"), "{refused}");
}

/// A rebuild that failed half way was taken for done: the facts of the shards not yet learnt were missing, and their copies took
/// effect again. And a lane that came by while another rebuilt did not wait for it.
#[tokio::test(start_paused = true)]
async fn p6_a_rebuild_is_whole_before_anyone_gives_a_verdict() {
    for failures in 0..12 {
        let rig = Rig::listed(100 + failures);
        let relay = Relay::start(&rig, "a", (2, 2), 2).await;
        let records: Vec<String> = (0..10).map(|at| plain(&format!("k{at}"), "v")).collect();
        for record in &records {
            assert_eq!(outcome(&relay.gate, record).await, Outcome::Written);
        }
        relay.push(1, &plain("r", "v"));
        relay.settled(1, 1).await;
        let snapshot = rig.db();
        assert_eq!(outcome(&relay.gate, &plain("lost", "v")).await, Outcome::Written);
        relay.push(0, &plain("warm", "v"));
        relay.settled(0, 1).await;
        {
            let mut world = rig.world.lock();
            world.go_back(snapshot);
            world.faults.rates.slow_ms = 300;
        }
        for at in 0..failures {
            let fault = if at % 2 == 0 { CallFault::Before } else { CallFault::After };
            rig.fail(Call::Look, fault);
        }
        // Copies of everything, through every door, while the rebuild is under way.
        for record in records.iter().chain([&plain("r", "v")]) {
            relay.push(0, record);
            relay.push(1, record);
        }
        for record in &records {
            while outcome(&relay.gate, record).await == Outcome::Unknown {
                pass(20).await;
            }
        }
        relay.settled(0, 12).await;
        relay.settled(1, 12).await;
        let mut table = rig.table();
        table.sort();
        table.dedup();
        assert_eq!(table.len(), rig.table().len(), "nothing is in twice: {:?}", rig.table());
    }
}

// ---- P13 ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn p13_a_revoke_leaves_no_batch_half_done_and_the_next_owner_reads_on() {
    for (before, after) in [(0, 0), (500, 0), (0, 500), (500, 500)] {
        let rig = Rig::listed(16);
        let first = Relay::start(&rig, "a", (0, 1), 1).await;
        let gate = rig.gate("b", (0, 1)).await;
        let second = Relay::join(&rig, "b", gate, &first.topic);
        rig.delay(before, after);
        (0..20).for_each(|at| first.push(0, &plain(&format!("k{at}"), "v")));
        pass(200).await;
        let gone = first.door.revoke(0);
        timeout(Duration::from_millis(300), gone).await.ok();
        second.take(0);
        second.settled(0, 20).await;
        assert_eq!(rig.table().len(), 20, "{before} {after}");
        pass(2_000).await;
        assert_eq!(rig.table().len(), 20);
    }
}

#[tokio::test(start_paused = true)]
async fn p13_a_batch_of_several_shards_loses_the_foreign_ones_records_and_goes_again() {
    let rig = Rig::listed(17);
    let relay = Relay::start(&rig, "a", (0, 1), 2).await;
    rig.world.lock().raise(&shard_of(0), "b", 0);
    relay.topic.lock().owners[0] = Some("b".into());
    relay.push(0, &plain("k", "v"));
    relay.push(1, &plain("l", "v"));
    relay.settled(1, 1).await;
    assert_eq!(rig.table(), ["l=v"]);
    assert_eq!(relay.topic.lock().fenced, [(0, "b".to_owned())]);
    assert_eq!(counted(&relay.gate), [("written", 1)].into());
}

#[tokio::test(start_paused = true)]
async fn p13_fenced_while_still_assigned_the_shard_is_taken_again() {
    let rig = Rig::listed(18);
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    rig.world.lock().raise(&shard_of(0), "b", 0);
    relay.push(0, &plain("k", "v"));
    relay.settled(0, 1).await;
    assert_eq!(rig.table(), ["k=v"]);
    assert_eq!(rig.db().shards[&shard_of(0)].owner, "a");
}

#[tokio::test(start_paused = true)]
async fn p13_batches_of_duplicates_alone_advance_the_position_within_about_a_second() {
    let rig = Rig::listed(19);
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    relay.push(0, &plain("k", "v"));
    relay.settled(0, 1).await;
    (0..50).for_each(|_| relay.push(0, &plain("k", "v")));
    pass(1_500).await;
    assert_eq!(relay.position(0), Some(51));
    assert_eq!(relay.topic.lock().committed[0], 51);
    assert!(rig.db().commits.len() <= 4, "not a batch a record: {}", rig.db().commits.len());
}

/// A batch that was put back took the position back with it for good: what had its outcome behind it was never covered again
/// until another record came.
#[tokio::test(start_paused = true)]
async fn p13_a_batch_that_went_again_covers_what_was_answered_behind_it() {
    let rig = Rig::listed(20);
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    relay.push(0, &plain("k", "v"));
    relay.settled(0, 1).await;
    rig.script([DeliverFault::NotAppliedKept]);
    relay.push(0, &plain("l", "v"));
    relay.push(0, &plain("k", "v"));
    relay.settled(0, 3).await;
    assert_eq!(counted(&relay.gate), [("duplicate", 1), ("written", 2)].into());
}

#[tokio::test(start_paused = true)]
async fn p13_an_assigned_partition_is_read_from_the_sinks_position() {
    let rig = Rig::listed(21);
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    (0..5).for_each(|at| relay.push(0, &plain(&format!("k{at}"), "v")));
    relay.settled(0, 5).await;
    relay.topic.lock().committed[0] = 2;
    let topic = relay.crash();
    let relay = Relay::resume(&rig, "b", (0, 1), &topic, rig.memory()).await;
    relay.push(0, &plain("l", "v"));
    relay.settled(0, 6).await;
    assert_eq!(counted(&relay.gate), [("written", 1)].into());
}

/// Another number of partitions went unnoticed from one start to the next: the shard rows did not say how many there had been.
#[tokio::test(start_paused = true)]
async fn p13_the_sink_says_how_many_partitions_the_topic_had() {
    let rig = Rig::listed(26);
    let relay = Relay::start(&rig, "a", (0, 2), 2).await;
    relay.push(0, &plain("k", "v"));
    relay.settled(0, 1).await;
    assert!(relay.topic.lock().before.is_empty(), "nothing was kept before");
    let topic = relay.crash();
    let resume = || Relay::resume(&rig, "a", (0, 2), &topic, rig.memory());
    let relay = resume().await;
    pass(100).await;
    assert_eq!(topic.lock().before, [(0, 2), (1, 2)].into());
    relay.crash();
    {
        let mut topic = topic.lock();
        topic.partitions.push(Vec::new());
        topic.committed.push(0);
        topic.owners.push(None);
        topic.read.push(0);
    }
    for before in [2, 3] {
        let relay = resume().await;
        pass(100).await;
        let kept = topic.lock().before.clone();
        assert_eq!((kept.get(&0), kept.get(&1)), (Some(&before), Some(&before)), "then it is kept anew");
        relay.crash();
    }
}

// ---- ends --------------------------------------------------------------------------------------------------------------------

/// A lane that was to end while its sink was away span for ever, and the gate never closed.
#[tokio::test(start_paused = true)]
async fn a_gate_closes_while_the_sink_is_away() {
    for unknown in [false, true] {
        let rig = Rig::listed(22);
        let relay = Relay::start(&rig, "a", (1, 1), 1).await;
        if unknown {
            rig.delay(100, 0);
            rig.script([DeliverFault::UnknownLost, DeliverFault::UnknownLost]);
        }
        relay.push(0, &plain("k", "v"));
        let waiting = spawn_call(&relay.gate, &plain("c", "v"));
        pass(20).await;
        {
            let mut world = rig.world.lock();
            world.connections.clear();
            world.down_until = Some(tokio::time::Instant::now() + Duration::from_secs(3_600));
        }
        pass(500).await;
        timeout(Duration::from_secs(30), relay.gate.close()).await.expect("it closes");
        assert_ne!(waiting.await.unwrap().outcome, Outcome::Duplicate);
    }
}

/// The inbox of a relay's lane was full, so that the word to stop never came in.
#[tokio::test(start_paused = true)]
async fn a_gate_closes_while_the_sink_is_away_and_a_backlog_waits() {
    let mut rig = Rig::listed(24);
    rig.rules.max_records = 16;
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    relay.push(0, &plain("k0", "v"));
    relay.settled(0, 1).await;
    rig.cut();
    rig.world.lock().down_until = Some(tokio::time::Instant::now() + Duration::from_secs(3_600));
    (1..4_000).for_each(|at| relay.push(0, &plain(&format!("k{at}"), "v")));
    pass(60_000).await;
    timeout(Duration::from_secs(30), relay.gate.close()).await.expect("it closes");
}

/// Everything that was submitted has its answer before a gate has closed.
#[tokio::test(start_paused = true)]
async fn a_gate_that_closes_answers_everyone() {
    let rig = Rig::listed(23);
    let gate = rig.gate("a", (2, 0)).await;
    rig.world.lock().faults.rates.slow_ms = 50;
    let answered = Arc::new(AtomicU32::new(0));
    for at in 0..40 {
        let (gate, answered) = (gate.clone(), answered.clone());
        tokio::spawn(async move {
            call(&gate, &plain(&format!("k{at}"), "v")).await;
            answered.fetch_add(1, Ordering::Relaxed);
        });
    }
    pass(10).await;
    gate.close().await;
    pass(1).await;
    assert_eq!(answered.load(Ordering::Relaxed), 40);
    assert_eq!(rig.table().len(), 40);
}
