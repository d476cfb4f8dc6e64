//! Rebalances: who owns a partition.

use std::{sync::atomic::Ordering, time::Duration};

use adapters::kafka::KafkaConfig;
use oncegate::door::kafka::{PartitionStatus, RelayOptions, Scope};
use oncegate_tests::{eventually, servers::Kafka};

use crate::rig::*;

async fn hands_over(topic: &str, config: impl Fn() -> KafkaConfig) {
    let kafka = Kafka::shared();
    kafka.topic(topic, 4).await;
    let sink = Shared::default();
    let first = instance(&sink, 2, config(), RelayOptions::default());
    let end = 120_000;
    let producing = {
        let topic = topic.to_owned();
        tokio::task::spawn_blocking(move || {
            for from in (0..end).step_by(4000) {
                Kafka::shared().produce(&topic, numbers(4, from..from + 4000));
                std::thread::sleep(Duration::from_millis(50));
            }
        })
    };
    // All partitions are read, and every member has its share.
    let settled = async |members: &[&Instance]| {
        eventually("partitions", PATIENCE, async || {
            let shares: Vec<Vec<_>> = members.iter().map(|member| member.relay.status().partitions).collect();
            let reading = |share: &Vec<PartitionStatus>| {
                share.iter().filter(|partition| partition.state == "reading").count()
            };
            let all: usize = shares.iter().map(reading).sum();
            if all == 4 && shares.iter().all(|share| reading(share) > 0) {
                Ok(())
            } else {
                Err(format!("{shares:?}"))
            }
        })
        .await;
    };
    settled(&[&first]).await;
    let second = instance(&sink, 2, config(), RelayOptions::default());
    settled(&[&first, &second]).await;
    let third = instance(&sink, 1, config(), RelayOptions::default());
    settled(&[&first, &second, &third]).await;
    first.relay.stop().await;
    settled(&[&second, &third]).await;
    third.relay.stop().await;
    settled(&[&second]).await;
    producing.await.unwrap();
    assert_whole(&kept(&sink, end as usize).await, 0..end);
    second.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_a_rebalance_hands_over_with_no_record_lost_or_doubled() {
    hands_over("moves", || config(Kafka::shared(), "moves")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_an_eager_rebalance_hands_over_too() {
    hands_over("moves-eager", || eager(config(Kafka::shared(), "moves-eager"))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_a_lane_that_does_not_let_go_is_left_behind_at_the_deadline() {
    let kafka = Kafka::shared();
    kafka.topic("stuck", 2).await;
    kafka.produce("stuck", numbers(2, 0..10_000));
    let sink = Shared::default();
    let options = RelayOptions { drain: Duration::from_secs(2), ..RelayOptions::default() };
    let first = instance(&sink, 2, config(kafka, "stuck"), options.clone());
    kept(&sink, 10_000).await;
    first.switches.hold.store(true, Ordering::Release);
    kafka.produce("stuck", numbers(2, 10_000..12_000));
    let second = instance(&sink, 2, config(kafka, "stuck"), options);
    eventually("the second takes a partition", PATIENCE, async || {
        if second.switches.records.load(Ordering::Acquire) == 1000 { Ok(()) } else { Err("not yet") }
    })
    .await;
    first.switches.hold.store(false, Ordering::Release);
    assert_whole(&kept(&sink, 12_000).await, 0..12_000);
    first.relay.stop().await;
    second.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_a_member_that_was_put_out_of_the_group_lets_go_and_joins_again() {
    let kafka = Kafka::shared();
    kafka.topic("out", 2).await;
    kafka.produce("out", numbers(2, 0..1000));
    let sink = Shared::default();
    let impatient = || {
        let mut config = config(kafka, "out");
        config.options.insert("max.poll.interval.ms".into(), "6000".into());
        config
    };
    let first = instance(&sink, 1, impatient(), RelayOptions::default());
    kept(&sink, 1000).await;
    first.switches.stall.store(true, Ordering::Release);
    kafka.produce("out", numbers(2, 1000..2000));
    let second = instance(&sink, 1, impatient(), RelayOptions::default());
    // The first stands still with a record in its hand: the second gets all partitions and writes everything.
    assert_whole(&kept(&sink, 2000).await, 0..2000);
    assert_eq!(second.switches.records.load(Ordering::Acquire), 1000);
    // Then the first goes on: what it holds is dropped, and it takes its share again.
    eventually("a share of the first", PATIENCE, async || {
        let states: Vec<_> =
            first.relay.status().partitions.iter().map(|partition| partition.state).collect();
        let new = first.switches.assigns.load(Ordering::Acquire) > 1;
        if new && states == ["reading"] { Ok(()) } else { Err(format!("{states:?}")) }
    })
    .await;
    kafka.produce("out", numbers(2, 2000..3000));
    assert_whole(&kept(&sink, 3000).await, 0..3000);
    first.relay.stop().await;
    second.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_a_second_process_with_the_same_name_fences_the_first() {
    let kafka = Kafka::shared();
    kafka.topic("named", 2).await;
    kafka.produce("named", numbers(2, 0..100));
    let sink = Shared::default();
    let named = || KafkaConfig { instance: Some("a".into()), ..config(kafka, "named") };
    let first = instance(&sink, 1, named(), RelayOptions::default());
    kept(&sink, 100).await;
    let second = instance(&sink, 1, named(), RelayOptions::default());
    let why = reason(&first.relay, "fenced").await;
    assert!(why.contains("this instance's name"), "{why}");
    kafka.produce("named", numbers(2, 100..200));
    assert_whole(&kept(&sink, 200).await, 0..200);
    second.relay.stop().await;
}

/// Copies may be in any partition: an instance reads only while it has all of them, says so otherwise, and goes on by itself.
#[tokio::test(flavor = "multi_thread")]
async fn p13_an_instance_that_must_have_all_partitions_reads_nothing_while_another_has_some() {
    let kafka = Kafka::shared();
    kafka.topic("all-or-none", 4).await;
    kafka.produce("all-or-none", numbers(4, 0..1_000));
    let sink = Shared::default();
    let options = || RelayOptions { scope: Scope::Route, ..RelayOptions::default() };
    let first = instance(&sink, 2, config(kafka, "all-or-none"), options());
    kept(&sink, 1_000).await;
    eventually("ready", PATIENCE, async || first.relay.status().not_ready().map_or(Ok(()), Err)).await;
    let second = instance(&sink, 2, config(kafka, "all-or-none"), options());
    for relay in [&first.relay, &second.relay] {
        let why = reason(relay, "2 of 4 partitions").await;
        assert!(why.contains("scope"), "{why}");
    }
    kafka.produce("all-or-none", numbers(4, 1_000..2_000));
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(sink.lock().unwrap().shards.values().map(|shard| shard.2.len()).sum::<usize>(), 1_000);
    first.relay.stop().await;
    assert_whole(&kept(&sink, 2_000).await, 0..2_000);
    eventually("ready", PATIENCE, async || second.relay.status().not_ready().map_or(Ok(()), Err)).await;
    second.relay.stop().await;
}
