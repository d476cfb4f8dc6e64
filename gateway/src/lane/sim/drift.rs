//! Shards whose event times are far apart (P11).

use super::{
    door::Topic,
    faults::DeliverFault,
    rig::{BASE_MS, Relay, Rig, counted, json, outcome, pass, spawn_call},
};
use crate::outcome::Outcome;

const HOUR_MS: i64 = 3_600_000;

fn at(id: &str, t: i64) -> String {
    json(id, id, "v", 0, t)
}

fn rig(seed: u64) -> Rig {
    let mut rig = Rig::listed(seed);
    (rig.rules.lateness_ms, rig.rules.window_ms) = (10_000, 60_000);
    rig
}

/// One instance was hours behind with its partition when it died. The one that took over had forgotten long ago what lay so far back,
/// and put all that came to the dead letters as late, though the sink still held every fact of that partition.
#[tokio::test(start_paused = true)]
async fn p11_a_shard_that_lags_is_taken_over_by_an_owner_far_ahead_and_none_of_it_is_late() {
    let rig = rig(31);
    let topic = Topic::new(2);
    let slow = Relay::join(&rig, "slow", rig.gate("slow", (0, 1)).await, &topic);
    let fast = Relay::join(&rig, "fast", rig.gate("fast", (0, 1)).await, &topic);
    slow.take(1);
    fast.take(0);
    let old = BASE_MS - 5 * HOUR_MS;
    for record in 0..3 {
        slow.push(1, &at(&format!("old{record}"), old + record));
    }
    slow.settled(1, 3).await;
    slow.crash();
    // Hours of event time go by at the other one, and are forgotten there.
    for minute in 0..=300 {
        fast.push(0, &at(&format!("new{minute}"), old + minute * 60_000));
    }
    fast.settled(0, 301).await;
    pass(60_000).await;

    fast.take(1);
    for record in 0..6 {
        fast.push(1, &at(&format!("old{record}"), old + record));
    }
    fast.push(0, &at("new300", BASE_MS));
    fast.push(0, &at("newer", BASE_MS));
    fast.settled(1, 9).await;
    fast.settled(0, 303).await;
    let mut table = rig.table();
    table.sort();
    let rows = table.len();
    table.dedup();
    assert_eq!((table.len(), rows), (301 + 1 + 6, 301 + 1 + 6), "each once");
    let counted = counted(&fast.gate);
    assert_eq!(counted.get("duplicate"), Some(&4), "{counted:?}");
    assert_eq!(counted.get("dead_lettered"), None, "{counted:?}");
    // What its own owner would have called late is late here too.
    fast.push(1, &at("too late", old - 10_001));
    fast.settled(1, 10).await;
    assert_eq!(super::rig::counted(&fast.gate).get("dead_lettered"), Some(&1));
}

/// A partition was half a minute behind when its owner died. Whoever took it over discarded its whole store and learnt it again, though
/// it had forgotten nothing that the partition needs.
#[tokio::test(start_paused = true)]
async fn p11_a_shard_that_is_a_little_behind_is_taken_over_without_a_rebuild_and_none_of_it_is_late() {
    let rig = rig(35);
    let topic = Topic::new(2);
    let slow = Relay::join(&rig, "slow", rig.gate("slow", (0, 1)).await, &topic);
    let fast = Relay::join(&rig, "fast", rig.gate("fast", (0, 1)).await, &topic);
    slow.take(1);
    fast.take(0);
    slow.push(1, &at("slow", BASE_MS - 30_000));
    slow.settled(1, 1).await;
    slow.crash();
    for record in 0..=50 {
        fast.push(0, &at(&format!("new{record}"), BASE_MS - 50_000 + record * 1_000));
        fast.settled(0, 1 + record).await;
    }
    pass(60_000).await;
    fast.take(1);
    fast.push(1, &at("slow", BASE_MS - 30_000));
    fast.push(1, &at("within its own lateness", BASE_MS - 39_000));
    fast.push(1, &at("too late", BASE_MS - 40_001));
    fast.settled(1, 4).await;
    let counted = counted(&fast.gate);
    assert_eq!((counted.get("duplicate"), counted.get("dead_lettered")), (Some(&1), Some(&1)), "{counted:?}");
    assert_eq!(*fast.gate.inside().history.read(), 0, "the store was discarded");
}

/// A partition whose records take long to come holds the floor back; one that has none does not.
#[tokio::test(start_paused = true)]
async fn p11_a_partition_with_a_backlog_is_never_idle_and_one_without_is() {
    let rig = rig(32);
    let relay = Relay::start(&rig, "a", (0, 1), 2).await;
    let old = BASE_MS - 5 * HOUR_MS;
    relay.push(0, &at("a", old));
    relay.push(1, &at("b", old));
    relay.settled(1, 1).await;
    relay.gate.awaits(&[super::door::shard_of(1).as_str().into()]);
    for minute in 1..=300 {
        relay.push(0, &at(&format!("a{minute}"), old + minute * 60_000));
        pass(1_000).await;
    }
    relay.push(1, &at("b late", old + 1));
    relay.settled(1, 2).await;
    assert_eq!(counted(&relay.gate).get("dead_lettered"), None);
    // Now nothing is to come, and the others go on.
    relay.gate.awaits(&[]);
    for record in 1..=100 {
        relay.push(0, &at(&format!("later{record}"), BASE_MS + record * 2_500));
        pass(1_000).await;
    }
    let now = BASE_MS + 250_000;
    relay.push(1, &at("b later", now - 30_000));
    relay.settled(1, 3).await;
    assert_eq!(counted(&relay.gate).get("dead_lettered"), Some(&1), "forgotten meanwhile");
    relay.push(1, &at("b in time", now - 9_000));
    relay.settled(1, 4).await;
    assert_eq!(counted(&relay.gate).get("dead_lettered"), Some(&1), "within the lateness of the others");
}

/// A caller's record was with a sink that did not answer. The relay went on, the callers' shard counted as idle meanwhile, and the
/// record, which was not applied, was late when it was tried again.
#[tokio::test(start_paused = true)]
async fn p11_a_callers_record_at_the_sink_for_longer_than_idle_after_is_not_late() {
    let rig = rig(35);
    let relay = Relay::start(&rig, "a", (1, 1), 1).await;
    let old = BASE_MS - HOUR_MS;
    assert_eq!(outcome(&relay.gate, &at("first", old)).await, Outcome::Written);
    relay.push(0, &at("r", old));
    relay.settled(0, 1).await;
    rig.delay(90_000, 0);
    rig.script([DeliverFault::NotAppliedKept]);
    let waits = spawn_call(&relay.gate, &at("slow", old));
    pass(100).await;
    for second in 1..=85 {
        relay.push(0, &at(&format!("r{second}"), old + second * 30_000));
        pass(1_000).await;
    }
    relay.settled(0, 86).await;
    pass(20_000).await;
    drop(waits);
    assert_eq!(outcome(&relay.gate, &at("slow", old)).await, Outcome::Duplicate, "it was written");
    // Once it has its outcome it holds nobody up.
    for second in 1..=60 {
        relay.push(0, &at(&format!("s{second}"), BASE_MS + second * 1_000));
        pass(1_000).await;
    }
    assert_eq!(outcome(&relay.gate, &at("late", old)).await, Outcome::Late);
}

/// Another instance took the callers' shard while its owner was stopped, and lived on. The owner's lane waited for it with nothing at
/// hand, and held the watermark of the route for as long.
#[tokio::test(start_paused = true)]
async fn p11_a_callers_lane_that_waits_for_another_owner_holds_nobody_up() {
    let rig = rig(36);
    let relay = Relay::start(&rig, "a", (1, 1), 1).await;
    let old = BASE_MS - HOUR_MS;
    assert_eq!(outcome(&relay.gate, &at("first", old)).await, Outcome::Written);
    {
        let mut world = rig.world.lock();
        let row = world.db.shards.get_mut("http/0").unwrap();
        (row.owner, row.epoch) = ("b".into(), row.epoch + 1);
    }
    drop(spawn_call(&relay.gate, &at("second", old)));
    for second in 1..=300 {
        rig.world.lock().db.shards.get_mut("http/0").unwrap().heartbeat = tokio::time::Instant::now();
        relay.push(0, &at(&format!("r{second}"), old + second * 10_000));
        pass(1_000).await;
    }
    relay.settled(0, 300).await;
    let watermark = relay.gate.inside().store.floors(crate::clock::wall_ms()).watermark_ms;
    assert_eq!(watermark, Some(old + 300 * 10_000));
}

/// A topic was deleted and made again: its shard begins anew, and knows what came through the old one.
#[tokio::test(start_paused = true)]
async fn p3_a_renewed_shard_begins_at_the_start_and_keeps_its_facts() {
    let rig = rig(34);
    let relay = Relay::join(&rig, "a", rig.gate("a", (0, 1)).await, &Topic::new(1));
    relay.topic.lock().id = Some("old".into());
    relay.take(0);
    for record in 0..5 {
        relay.push(0, &at(&format!("k{record}"), BASE_MS));
    }
    relay.settled(0, 5).await;
    drop(relay.door.revoke(0));
    pass(100).await;
    {
        let mut topic = relay.topic.lock();
        (topic.partitions[0], topic.committed[0]) = (Vec::new(), 0);
        (topic.id, topic.renew) = (Some("new".into()), true);
    }
    for record in 3..9 {
        relay.push(0, &at(&format!("k{record}"), BASE_MS));
    }
    relay.take(0);
    relay.settled(0, 6).await;
    assert_eq!(relay.topic.lock().sources.get(&0).map(String::as_str), Some("old"));
    assert_eq!(rig.db().shards[&super::door::shard_of(0)].source.as_deref(), Some("new"));
    assert_eq!(rig.table().len(), 9);
    assert_eq!(counted(&relay.gate).get("duplicate"), Some(&2));
}

/// A producer's clock is years ahead: its records are refused, and nothing else is late because of them.
#[tokio::test(start_paused = true)]
async fn p11_a_timestamp_far_in_the_future_moves_no_floor() {
    let rig = rig(33);
    let relay = Relay::start(&rig, "a", (0, 1), 1).await;
    relay.push(0, &at("now", BASE_MS));
    relay.push(0, &at("far", BASE_MS + 300_000 + 60_000));
    relay.push(0, &at("farther", BASE_MS + 50 * 365 * 24 * HOUR_MS));
    relay.push(0, &at("earlier", BASE_MS - 9_000));
    relay.settled(0, 4).await;
    let counted = counted(&relay.gate);
    assert_eq!((counted.get("written"), counted.get("dead_lettered")), (Some(&2), Some(&2)), "{counted:?}");
    let row = &rig.db().shards[&super::door::shard_of(0)];
    assert_eq!(row.watermark_ms, BASE_MS);
}
