//! How far partitions are apart in event time (P11).

use std::{sync::atomic::Ordering, time::Duration};

use adapters::kafka::KafkaConfig;
use oncegate::door::kafka::RelayOptions;
use oncegate_tests::{
    eventually,
    servers::{Kafka, Produced},
};
use rdkafka::{
    ClientConfig,
    producer::{BaseProducer, BaseRecord, Producer},
};

use crate::rig::*;

const HOUR_MS: i64 = 3_600_000;
const BASE_MS: i64 = 1_700_000_000_000;

async fn awaited(instance: &Instance, wanted: usize) {
    eventually("what is awaited", PATIENCE, async || {
        let awaited = instance.switches.awaited.lock().unwrap().clone();
        if awaited.len() == wanted { Ok(()) } else { Err(format!("{awaited:?}, not {wanted}")) }
    })
    .await;
}

/// A partition that had been read to its end counted as idle while its broker was cut off: what came there meanwhile was late.
#[tokio::test(flavor = "multi_thread")]
async fn p11_a_partition_is_awaited_while_its_broker_is_not_heard() {
    let kafka = Kafka::start();
    kafka.topic("silent", 2).await;
    kafka.produce("silent", numbers(2, 0..10));
    let sink = Shared::default();
    let often = KafkaConfig { figures_every: Duration::from_millis(500), ..config(&kafka, "silent") };
    let instance = instance(&sink, 1, often, RelayOptions::default());
    kept(&sink, 10).await;
    awaited(&instance, 0).await;
    // It answers no more, and its connections stand.
    kafka.freeze();
    awaited(&instance, 2).await;
    kafka.thaw();
    awaited(&instance, 0).await;
    kafka.produce("silent", numbers(2, 10..20));
    kept(&sink, 20).await;
    instance.relay.stop().await;
}

/// A partition at its end whose lane took no more was not looked at: what came into it meanwhile was not awaited, and was late.
#[tokio::test(flavor = "multi_thread")]
async fn p11_a_partition_is_awaited_while_its_lane_takes_no_more() {
    let kafka = Kafka::shared();
    kafka.topic("not-looked-at", 2).await;
    kafka.produce("not-looked-at", numbers(2, 0..10));
    let sink = Shared::default();
    let options = RelayOptions { chunk_records: 100, ..RelayOptions::default() };
    let instance = instance(&sink, 1, config(kafka, "not-looked-at"), options);
    kept(&sink, 10).await;
    awaited(&instance, 0).await;
    let one = |partition| Produced { partition, payload: Some(b"10".to_vec()), ..Produced::default() };
    instance.switches.hold.store(true, Ordering::Release);
    kafka.produce("not-looked-at", (0..5_000).map(|_| one(1)));
    awaited(&instance, 1).await;
    kafka.produce("not-looked-at", [one(0)]);
    awaited(&instance, 2).await;
    instance.switches.hold.store(false, Ordering::Release);
    kept(&sink, 5_011).await;
    awaited(&instance, 0).await;
    instance.relay.stop().await;
}

/// A partition is idle once all of it is read and settled, also where its log ends in the markers of transactions; not while its
/// records wait.
#[tokio::test(flavor = "multi_thread")]
async fn p11_a_partition_is_awaited_until_it_is_read_to_its_end_and_settled() {
    let kafka = Kafka::shared();
    kafka.topic("awaited", 2).await;
    kafka.produce("awaited", numbers(2, 0..1000));
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", kafka.brokers()).set("broker.address.family", "v4");
    let producer: BaseProducer = client.set("transactional.id", "awaited").create().unwrap();
    producer.init_transactions(PATIENCE).unwrap();
    for (commit, payload) in [(true, "1000"), (false, "aborted")] {
        producer.begin_transaction().unwrap();
        let record = BaseRecord::<(), str>::to("awaited").partition(0).payload(payload);
        producer.send(record).map_err(|(error, _)| error).unwrap();
        if commit {
            producer.commit_transaction(PATIENCE).unwrap();
        } else {
            producer.flush(PATIENCE).unwrap();
            producer.abort_transaction(PATIENCE).unwrap();
        }
    }
    let sink = Shared::default();
    let instance = instance(&sink, 1, config(kafka, "awaited"), RelayOptions::default());
    kept(&sink, 1001).await;
    let settle = async |wanted| awaited(&instance, wanted).await;
    settle(0).await;
    // The lane takes nothing: one partition has more, and is awaited for as long as that lasts.
    instance.switches.hold.store(true, Ordering::Release);
    kafka.produce(
        "awaited",
        [Produced { partition: 1, payload: Some(b"1001".to_vec()), ..Produced::default() }],
    );
    settle(1).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    settle(1).await;
    instance.switches.hold.store(false, Ordering::Release);
    kept(&sink, 1002).await;
    settle(0).await;
    instance.relay.stop().await;
}

/// Two partitions of an old topic, one of which covers in a few records what the other takes many for: the first one waits.
#[tokio::test(flavor = "multi_thread")]
async fn p11_a_partition_far_ahead_waits_for_the_slowest_and_all_is_read() {
    let kafka = Kafka::shared();
    kafka.topic("drift", 2).await;
    let (sparse, dense, hours) = (3_000, 60_000, 3_000);
    let record = |partition, n: i64, of: i64| Produced {
        partition,
        payload: Some(vec![b'x'; 200]),
        timestamp_ms: Some(BASE_MS + n * hours * HOUR_MS / of),
        ..Produced::default()
    };
    kafka.produce("drift", (0..sparse).map(|n| record(0, n, sparse)));
    kafka.produce("drift", (0..dense).map(|n| record(1, n, dense)));
    let sink = Shared::default();
    let drift = 20 * HOUR_MS;
    let options =
        RelayOptions { max_drift: Duration::from_millis(drift.cast_unsigned()), ..RelayOptions::default() };
    let instance = instance(&sink, 2, config(kafka, "drift"), options);
    eventually("all records", PATIENCE, async || {
        match sink.lock().unwrap().shards.values().map(|shard| shard.2.len() as i64).sum::<i64>() {
            all if all == sparse + dense => Ok(()),
            other => Err(other),
        }
    })
    .await;
    let waited = instance.relay.status().drifts;
    assert!(waited > 10, "a partition waited {waited} times");
    let named = instance.switches.named.lock().unwrap().clone();
    let mut come = [None::<i64>; 2];
    let mut furthest = 0;
    for (partition, timestamp_ms) in named {
        let other = come[1 - partition as usize];
        let mine = come[partition as usize];
        // Until the other one has brought its first record nobody knows how far it is. A record that is the first past the limit is
        // read, none after it.
        if let (Some(mine), Some(other)) = (mine, other)
            && other < BASE_MS + (hours - 1) * HOUR_MS
        {
            furthest = furthest.max(mine - other);
            // What was read at one go before the other's first record came.
            let before = 1024 * HOUR_MS;
            assert!(
                mine - other <= drift + HOUR_MS || mine <= BASE_MS + before,
                "{partition} is read at {timestamp_ms}, {} h ahead",
                (mine - other) / HOUR_MS
            );
        }
        come[partition as usize] = Some(timestamp_ms);
    }
    println!("{} h ahead at most, {waited} waits", furthest / HOUR_MS);
    instance.relay.stop().await;
}
