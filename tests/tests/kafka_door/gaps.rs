//! Records that are gone before they were read.

use std::{sync::atomic::Ordering, time::Duration};

use adapters::kafka::KafkaConfig;
use oncegate::door::kafka::{Gap, RelayOptions};
use oncegate_tests::{
    eventually,
    servers::{Kafka, Produced},
};
use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions, NewPartitions},
    client::DefaultClientContext,
    producer::{BaseProducer, BaseRecord, Producer},
};

use crate::rig::*;

/// Deletes the records of partition 0 below `offset`.
async fn delete_below(kafka: &Kafka, topic: &str, offset: i64) {
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", kafka.brokers()).set("broker.address.family", "v4");
    let admin: AdminClient<DefaultClientContext> = client.create().unwrap();
    let mut below = TopicPartitionList::new();
    below.add_partition_offset(topic, 0, Offset::Offset(offset)).unwrap();
    admin.delete_records(&below, &AdminOptions::new()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_a_gap_stops_the_partition_and_is_named_or_is_skipped_and_counted() {
    let kafka = Kafka::shared();
    kafka.topic("gap", 2).await;
    kafka.produce("gap", numbers(2, 0..1000));
    let sink = Shared::default();
    let before = instance(&sink, 1, config(kafka, "gap"), RelayOptions::default());
    kept(&sink, 1000).await;
    before.relay.stop().await;
    kafka.produce("gap", numbers(2, 1000..2000));
    delete_below(kafka, "gap", 750).await;

    let stopping = instance(&sink, 1, config(kafka, "gap"), RelayOptions::default());
    let why = reason(&stopping.relay, "gone").await;
    assert!(why.contains("gap/0") && why.contains("500 to 749") && why.contains("250 offsets"), "{why}");
    // The other partition is read.
    kept(&sink, 1500).await;
    stopping.relay.stop().await;

    let skipping =
        instance(&sink, 1, config(kafka, "gap"), RelayOptions { gap: Gap::Skip, ..RelayOptions::default() });
    kept(&sink, 1750).await;
    eventually("a count", PATIENCE, async || match skipping.relay.status().skipped {
        250 => Ok(()),
        other => Err(other),
    })
    .await;
    skipping.relay.stop().await;

    // The topic is made again: the sink's position lies beyond its end.
    sink.lock().unwrap().shards.values_mut().for_each(|shard| shard.1 = 5000);
    let ahead =
        instance(&sink, 1, config(kafka, "gap"), RelayOptions { gap: Gap::Skip, ..RelayOptions::default() });
    let why = reason(&ahead.relay, "beyond").await;
    assert!(why.contains("5000") && why.contains("1000"), "{why}");
    ahead.relay.stop().await;
}

async fn overtaken(topic: &str, config: KafkaConfig) {
    let kafka = Kafka::shared();
    kafka.topic(topic, 2).await;
    let payload = "x".repeat(10_000);
    let big = |n: i64| Produced {
        partition: (n % 2) as i32,
        payload: Some(payload.clone().into_bytes()),
        ..Produced::default()
    };
    kafka.produce(topic, (0..2000).map(big));
    let sink = Shared::default();
    let mut config = config;
    config.prefetch_bytes = 1 << 20;
    let options = RelayOptions { gap: Gap::Skip, chunk_bytes: 64 << 10, ..RelayOptions::default() };
    let instance = instance(&sink, 1, config, options);
    instance.switches.hold.store(true, Ordering::Release);
    eventually("back-pressure", PATIENCE, async || {
        if instance.relay.status().waits > 0 { Ok(()) } else { Err("none") }
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    delete_below(kafka, topic, 990).await;
    instance.switches.hold.store(false, Ordering::Release);
    eventually("the rest", PATIENCE, async || {
        let sink = sink.lock().unwrap();
        let at: Vec<i64> = sink.shards.values().map(|shard| shard.1).collect();
        if at == [1000, 1000] { Ok(()) } else { Err(format!("{at:?}")) }
    })
    .await;
    let found: usize = sink.lock().unwrap().shards.values().map(|shard| shard.2.len()).sum();
    assert!(found < 2000, "nothing was skipped: the test does not reach what it is for");
    // The relay says so a little later than the sink has the rest.
    eventually("every record is found or counted", PATIENCE, async || {
        match found as u64 + instance.relay.status().skipped {
            2000 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    instance.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_records_that_go_while_the_relay_lags_are_a_gap_too() {
    overtaken("overtaken", config(Kafka::shared(), "overtaken")).await;
    overtaken("overtaken-eager", eager(config(Kafka::shared(), "overtaken-eager"))).await;
}

/// The topic is deleted and made again, and has more records than the old one had: no offset tells it from the old one, only its id.
async fn made_again(topic: &str, config: KafkaConfig, running: bool) {
    let kafka = Kafka::shared();
    kafka.topic(topic, 2).await;
    kafka.produce(topic, numbers(2, 0..1000));
    let sink = Shared::default();
    let before = instance(&sink, 1, config.clone(), RelayOptions::default());
    kept(&sink, 1000).await;
    committed(kafka, topic, 2, vec![500, 500]).await;
    let stopping = if running {
        before
    } else {
        before.relay.stop().await;
        kafka.make_again(topic, 2).await;
        kafka.produce(topic, numbers(2, 1000..5000));
        instance(&sink, 1, config.clone(), RelayOptions::default())
    };
    if running {
        kafka.make_again(topic, 2).await;
        kafka.produce(topic, numbers(2, 1000..5000));
    }
    let why = reason(&stopping.relay, "made again").await;
    assert!(why.contains(topic) && why.contains("its id was") && why.contains("position (500)"), "{why}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    kept(&sink, 1000).await;
    stopping.relay.stop().await;

    // Told to go on, it reads the new one whole; and from then on that one is the topic.
    let skip = RelayOptions { gap: Gap::Skip, ..RelayOptions::default() };
    let skipping = instance(&sink, 1, config.clone(), skip);
    eventually("the new topic", PATIENCE, async || {
        let found: usize = sink.lock().unwrap().shards.values().map(|shard| shard.2.len()).sum();
        if found == 5000 { Ok(()) } else { Err(found) }
    })
    .await;
    skipping.relay.stop().await;
    kafka.produce(topic, numbers(2, 5000..5100));
    let after = instance(&sink, 1, config, RelayOptions::default());
    eventually("the rest", PATIENCE, async || {
        let found: usize = sink.lock().unwrap().shards.values().map(|shard| shard.2.len()).sum();
        if found == 5100 { Ok(()) } else { Err(found) }
    })
    .await;
    after.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p3_a_topic_made_again_while_the_relay_is_away_is_never_taken_for_the_old_one() {
    made_again("again-away", config(Kafka::shared(), "again-away"), false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p3_a_topic_made_again_while_the_relay_runs_is_never_taken_for_the_old_one() {
    made_again("again-running", config(Kafka::shared(), "again-running"), true).await;
}

/// A topic that grows while its relay runs is noticed by the relay, which reads the new partitions too.
#[tokio::test(flavor = "multi_thread")]
async fn p13_a_topic_that_grows_is_noticed_while_the_relay_runs() {
    let kafka = Kafka::shared();
    kafka.topic("grows", 2).await;
    kafka.produce("grows", numbers(2, 0..100));
    let sink = Shared::default();
    let mut config = config(kafka, "grows");
    config.options.insert("topic.metadata.refresh.interval.ms".to_owned(), "1000".to_owned());
    let instance = instance(&sink, 1, config, RelayOptions::default());
    kept(&sink, 100).await;
    let counts = || {
        let topics = instance.relay.status().topics;
        topics.iter().map(|topic| (topic.partitions, topic.before)).collect::<Vec<_>>()
    };
    let shown = async |wanted: (i64, Option<i64>)| {
        eventually("the count", PATIENCE, async || {
            let counts = counts();
            if counts == [wanted] { Ok(()) } else { Err(format!("{counts:?}")) }
        })
        .await;
    };
    shown((2, None)).await;
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", kafka.brokers()).set("broker.address.family", "v4");
    let admin: AdminClient<DefaultClientContext> = client.create().unwrap();
    let made =
        admin.create_partitions(&[NewPartitions::new("grows", 5)], &AdminOptions::new()).await.unwrap();
    assert!(made.iter().all(Result::is_ok), "{made:?}");
    shown((5, Some(2))).await;
    // A producer of its own, which does not remember the old count.
    let producer: BaseProducer = client.create().unwrap();
    for partition in 0..5 {
        let record = BaseRecord::<(), str>::to("grows").partition(partition).payload("new");
        producer.send(record).map_err(|(error, _)| error).unwrap();
    }
    producer.flush(PATIENCE).unwrap();
    kept(&sink, 105).await;
    instance.relay.stop().await;
}
