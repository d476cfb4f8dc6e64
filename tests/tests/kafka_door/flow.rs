//! Reading again, back-pressure, a broker that goes away.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use adapters::kafka::KafkaConfig;
use oncegate::{
    door::kafka::{Relay, RelayOptions},
    lane::{AssignedShard, FromLane, LaneHandle, ToLane},
};
use oncegate_tests::{
    eventually,
    servers::{Kafka, Produced},
};
use tokio::sync::mpsc;

use crate::rig::*;

async fn seeks_back(topic: &str, config: KafkaConfig) {
    let kafka = Kafka::shared();
    kafka.topic(topic, 2).await;
    kafka.produce(topic, numbers(2, 0..10_000));
    let sink = Shared::default();
    let instance = instance(&sink, 1, config, RelayOptions::default());
    kept(&sink, 10_000).await;
    for (round, back) in [4000, 100, 0, 4999].into_iter().enumerate() {
        // The sink goes back in one partition while records come in both.
        let shard = eventually("a shard", PATIENCE, async || {
            instance.relay.status().partitions.first().map(|partition| partition.shard.clone()).ok_or("none")
        })
        .await;
        {
            let mut sink = sink.lock().unwrap();
            let shard = sink.shards.get_mut(&shard).unwrap();
            shard.2.retain(|kept| kept.offset < back);
            (shard.0, shard.1) = (shard.0 + 1, if back == 0 { -1 } else { back });
        }
        // The fake lane learns of it as the real one does: it is asked to take the shard over again.
        let fenced = FromLane::Fenced {
            slot: 0,
            generation: u64::MAX,
            owner: "nobody".into(),
            reason: "the test".into(),
        };
        instance.events.send(fenced).unwrap();
        let end = 10_000 + 1000 * (round as i64 + 1);
        kafka.produce(topic, numbers(2, end - 1000..end));
        assert_whole(&kept(&sink, end as usize).await, 0..end);
    }
    instance.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_fenced_though_assigned_is_acquired_and_read_again_from_the_sinks_position() {
    seeks_back("back", config(Kafka::shared(), "back")).await;
    seeks_back("back-eager", eager(config(Kafka::shared(), "back-eager"))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seek_of_the_lane_drops_what_was_fetched_and_reads_again() {
    let kafka = Kafka::shared();
    kafka.topic("seek", 1).await;
    kafka.produce("seek", numbers(1, 0..50_000));
    // A lane of the test's own that rewinds in the middle of the stream, by the message, not by acquiring.
    let (queue, mut inbox) = mpsc::channel(4);
    let (events, from_lanes) = mpsc::unbounded_channel();
    let gate = Arc::new(Gate { lanes: vec![LaneHandle::new(queue)], switches: Arc::default() });
    let relay = Relay::start(gate, config(kafka, "seek"), RelayOptions::default(), from_lanes).unwrap();
    let (mut generation, mut next, mut rewinds) = (1, 0, vec![30_000, 10_000, 1, 0]);
    while next < 50_000 {
        match tokio::time::timeout(PATIENCE, inbox.recv()).await.expect("records come").unwrap() {
            ToLane::Assign { shards, reply } => {
                let shard = AssignedShard { slot: shards[0].slot, generation, position: None, source: None };
                reply.send(Ok(vec![shard])).unwrap();
            }
            ToLane::Relay { chunk, generations } => {
                assert!(generations[0].1 <= generation);
                if generations[0].1 < generation {
                    continue;
                }
                for named in &chunk.records {
                    assert_eq!(named.position, Some(next));
                    next += 1;
                }
                if next > 40_000 - 5000 && rewinds.last().is_some() {
                    let to: i64 = rewinds.pop().unwrap();
                    (generation, next) = (generation + 1, to);
                    let position = (to > 0).then_some(to);
                    events.send(FromLane::Seek { slot: 0, generation, position }).unwrap();
                }
            }
            // What an earlier membership had: nothing.
            ToLane::Partitions { .. } | ToLane::Revoke { slots: None, .. } => {}
            _ => panic!("another message"),
        }
    }
    assert_eq!((generation, rewinds.len()), (5, 0));
    drop(inbox);
    reason(&relay, "lane 0 has ended").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn back_pressure_bounds_what_is_read_and_keeps_the_membership() {
    let kafka = Kafka::shared();
    kafka.topic("slow", 2).await;
    let payload = "x".repeat(1000);
    let big = |n: i64| Produced {
        partition: (n % 2) as i32,
        payload: Some(payload.clone().into_bytes()),
        ..Produced::default()
    };
    kafka.produce("slow", (0..60_000).map(big));
    let sink = Shared::default();
    let mut config = config(kafka, "slow");
    config.options.insert("max.poll.interval.ms".into(), "6000".into());
    let options = RelayOptions { chunk_bytes: 64 << 10, ..RelayOptions::default() };
    let instance = instance(&sink, 1, config, options);
    eventually("the first records", PATIENCE, async || {
        if instance.switches.records.load(Ordering::Acquire) > 0 { Ok(()) } else { Err("none") }
    })
    .await;
    instance.switches.hold.store(true, Ordering::Release);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = instance.relay.status();
    tokio::time::sleep(Duration::from_secs(8)).await;
    let after = instance.relay.status();
    // The queue of four chunks, one in the lane's hands, one waiting for room: nothing more is read, however long it takes.
    assert_eq!(before.records, after.records);
    let held = after.records - instance.switches.records.load(Ordering::Acquire);
    assert!(held <= 6 * 66, "{held} records of 1000 bytes wait");
    assert!(after.waits > 0);
    assert_eq!(after.not_ready(), None);
    instance.switches.hold.store(false, Ordering::Release);
    kept(&sink, 60_000).await;
    assert_eq!(instance.switches.assigns.load(Ordering::Acquire), 1, "the membership was lost");
    instance.relay.stop().await;
}

/// The end is a regression test: the client library now and then never closes while all brokers are dead, and a relay that was stopped
/// then hung for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_dies_and_returns_costs_nothing_but_time() {
    let kafka = Kafka::start();
    kafka.topic("mortal", 2).await;
    kafka.produce("mortal", numbers(2, 0..10_000));
    let sink = Shared::default();
    let instance = instance(&sink, 1, config(&kafka, "mortal"), RelayOptions::default());
    kept(&sink, 10_000).await;
    kafka.kill();
    reason(&instance.relay, "").await;
    kafka.run();
    kafka.produce("mortal", numbers(2, 10_000..20_000));
    assert_whole(&kept(&sink, 20_000).await, 0..20_000);
    kafka.kill();
    let stopped = Instant::now();
    instance.relay.stop().await;
    assert!(stopped.elapsed() < Duration::from_secs(20), "{:?}", stopped.elapsed());
}
