//! What is read, and from where.

use std::{
    collections::BTreeMap,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use adapters::{
    dead_letters::{DeadLetters, Letter},
    kafka::{DeadLetterTopic, Isolation, KafkaConfig},
};
use oncegate::door::kafka::{RelayOptions, Start};
use oncegate_tests::{
    eventually,
    servers::{Kafka, Produced},
};
use rdkafka::{
    ClientConfig,
    producer::{BaseRecord, Producer, ThreadedProducer},
};

use crate::rig::*;

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_read_once_in_order_and_the_groups_offsets_follow() {
    let kafka = Kafka::shared();
    kafka.topic("whole", 5).await;
    kafka.produce("whole", numbers(5, 0..20_000));
    let sink = Shared::default();
    let patient = |mut config: KafkaConfig| {
        config.options.insert("session.timeout.ms".into(), "45000".into());
        config
    };
    let first = instance(&sink, 2, patient(config(kafka, "whole")), RelayOptions::default());
    assert_whole(&kept(&sink, 20_000).await, 0..20_000);
    committed(kafka, "whole", 5, vec![4000; 5]).await;
    let status = eventually("no lag", PATIENCE, async || {
        let status = first.relay.status();
        let level = status.partitions.iter().all(|partition| partition.lag() == Some(0));
        if level { Ok(status) } else { Err(format!("{status:?}")) }
    })
    .await;
    assert_eq!((status.not_ready(), status.records, status.partitions.len()), (None, 20_000, 5));
    first.relay.stop().await;

    // Another process goes on from the sink's positions, at once: the first one has left the group.
    kafka.produce("whole", numbers(5, 20_000..21_000));
    let started = Instant::now();
    let second = instance(&sink, 1, eager(config(kafka, "whole")), RelayOptions::default());
    assert_whole(&kept(&sink, 21_000).await, 0..21_000);
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    second.relay.stop().await;
    committed(kafka, "whole", 5, vec![4200; 5]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tombstones_headers_keys_and_timestamps_arrive() {
    let kafka = Kafka::shared();
    kafka.topic("parts", 1).await;
    let full = Produced {
        key: Some(b"k1".to_vec()),
        payload: Some(b"{}".to_vec()),
        headers: vec![("a", "1".into()), ("b", "2".into()), ("a", "3".into())],
        timestamp_ms: Some(1_700_000_000_123),
        ..Produced::default()
    };
    let tombstone = Produced { key: Some(b"k2".to_vec()), ..Produced::default() };
    let empty = Produced { payload: Some(vec![]), ..Produced::default() };
    kafka.produce("parts", [full, tombstone, empty]);
    let sink = Shared::default();
    let instance = instance(&sink, 1, config(kafka, "parts"), RelayOptions::default());
    let kept = kept(&sink, 3).await.into_values().next().unwrap();
    assert_eq!(
        kept[0],
        Kept {
            offset: 0,
            payload: Some("{}".into()),
            key: "k1".into(),
            headers: "a1b2a3".into(),
            timestamp_ms: 1_700_000_000_123
        }
    );
    assert_eq!(
        (kept[1].payload.as_deref(), kept[1].key.as_str(), kept[1].headers.as_str()),
        (None, "k2", "")
    );
    assert_eq!((kept[2].payload.as_deref(), kept[2].key.as_str()), (Some(""), ""));
    instance.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sink_that_is_away_at_the_assignment_is_waited_for() {
    let kafka = Kafka::shared();
    kafka.topic("away", 1).await;
    kafka.produce("away", numbers(1, 0..100));
    let sink = Shared::default();
    let instance = instance(&sink, 1, config(kafka, "away"), RelayOptions::default());
    instance.switches.refuse.store(true, Ordering::Release);
    reason(&instance.relay, "the sink is not reachable").await;
    instance.switches.refuse.store(false, Ordering::Release);
    assert_whole(&kept(&sink, 100).await, 0..100);
    instance.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_transactions_are_not_seen_unless_asked() {
    let kafka = Kafka::shared();
    kafka.topic("transactions", 1).await;
    let mut client = ClientConfig::new();
    client
        .set("bootstrap.servers", kafka.brokers())
        .set("transactional.id", "t")
        .set("broker.address.family", "v4");
    let producer: ThreadedProducer<_> = client.create::<ThreadedProducer<_>>().unwrap();
    producer.init_transactions(PATIENCE).unwrap();
    for (round, commit) in [true, false, true, false].into_iter().enumerate() {
        producer.begin_transaction().unwrap();
        for n in 0..10 {
            let payload = format!("{round}/{n}/{commit}");
            let record: BaseRecord<'_, [u8], str> = BaseRecord::to("transactions").payload(payload.as_str());
            producer.send(record).map_err(|(error, _)| error).unwrap();
        }
        // What an abort finds unsent it would only forget: no record of it would be in the log.
        producer.flush(PATIENCE).unwrap();
        if commit { producer.commit_transaction(PATIENCE) } else { producer.abort_transaction(PATIENCE) }
            .unwrap();
    }
    let sink = Shared::default();
    let committed_only = instance(&sink, 1, config(kafka, "transactions"), RelayOptions::default());
    let records = kept(&sink, 20).await.into_values().next().unwrap();
    assert!(records.iter().all(|kept| kept.payload.as_deref().unwrap().ends_with("true")));
    committed_only.relay.stop().await;
    // A restart behind the markers: the position lies inside the log.
    let again = instance(&sink, 1, config(kafka, "transactions"), RelayOptions::default());
    eventually("reading again", PATIENCE, async || again.relay.status().not_ready().map_or(Ok(()), Err))
        .await;
    again.relay.stop().await;

    let sink = Shared::default();
    let mut all = config(kafka, "transactions");
    (all.isolation, all.group) = (Isolation::ReadUncommitted, "all".into());
    let all = instance(&sink, 1, all, RelayOptions::default());
    kept(&sink, 40).await;
    all.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_inside_an_open_transaction_is_waited_for() {
    let kafka = Kafka::shared();
    kafka.topic("open", 1).await;
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", kafka.brokers()).set("transactional.id", "open");
    client.set("broker.address.family", "v4");
    let producer: ThreadedProducer<_> = client.create::<ThreadedProducer<_>>().unwrap();
    producer.init_transactions(PATIENCE).unwrap();
    producer.begin_transaction().unwrap();
    let produce = |range: std::ops::Range<i32>| {
        for n in range {
            let payload = n.to_string();
            let record: BaseRecord<'_, [u8], str> = BaseRecord::to("open").payload(payload.as_str());
            producer.send(record).map_err(|(error, _)| error).unwrap();
        }
        producer.flush(PATIENCE).unwrap();
    };
    produce(0..10);
    let sink = Shared::default();
    let mut all = config(kafka, "open");
    all.isolation = Isolation::ReadUncommitted;
    let all = instance(&sink, 1, all, RelayOptions::default());
    kept(&sink, 10).await;
    all.relay.stop().await;
    // Read committed sees a log that ends before the transaction: its position lies past that end, and is no gap.
    let committed_only = instance(&sink, 1, config(kafka, "open"), RelayOptions::default());
    eventually("reading", PATIENCE, async || {
        let status = committed_only.relay.status();
        let states: Vec<_> = status.partitions.iter().map(|partition| partition.state).collect();
        if states == ["reading"] { Ok(()) } else { Err(format!("{status:?}")) }
    })
    .await;
    produce(10..20);
    producer.commit_transaction(PATIENCE).unwrap();
    assert_whole(&kept(&sink, 20).await, 0..20);
    committed_only.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_latest_start_is_kept_until_the_sink_has_a_position() {
    let kafka = Kafka::shared();
    kafka.topic("latest", 1).await;
    kafka.produce("latest", numbers(1, 0..100));
    let sink = Shared::default();
    let options = RelayOptions { start: Start::Latest, ..RelayOptions::default() };
    let first = instance(&sink, 1, config(kafka, "latest"), options.clone());
    eventually("reading", PATIENCE, async || {
        let states: Vec<_> =
            first.relay.status().partitions.iter().map(|partition| partition.state).collect();
        if states == ["reading"] { Ok(()) } else { Err(format!("{states:?}")) }
    })
    .await;
    first.relay.stop().await;
    // Between two runs, before anything was written: these must not be passed over.
    kafka.produce("latest", numbers(1, 100..150));
    let second = instance(&sink, 1, config(kafka, "latest"), options);
    assert_whole(&kept(&sink, 50).await, 100..150);
    second.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_by_time_begins_at_the_first_record_that_is_not_older() {
    let kafka = Kafka::shared();
    kafka.topic("time", 1).await;
    let timed = numbers(1, 0..100)
        .enumerate()
        .map(|(n, produced)| Produced { timestamp_ms: Some(1000 + n as i64), ..produced });
    kafka.produce("time", timed);
    let sink = Shared::default();
    let options = RelayOptions { start: Start::Time(1040), ..RelayOptions::default() };
    let instance = instance(&sink, 1, config(kafka, "time"), options);
    assert_whole(&kept(&sink, 60).await, 40..100);
    instance.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_topic_is_named_and_waited_for() {
    let kafka = Kafka::shared();
    let sink = Shared::default();
    let instance = instance(&sink, 1, config(kafka, "not-yet"), RelayOptions::default());
    let why = reason(&instance.relay, "does not exist").await;
    assert!(why.contains("not-yet"), "{why}");
    kafka.topic("not-yet", 1).await;
    kafka.produce("not-yet", numbers(1, 0..10));
    kept(&sink, 10).await;
    instance.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p10_dead_letters_to_a_topic_are_there_when_the_write_answers() {
    let kafka = Kafka::shared();
    kafka.topic("dead", 1).await;
    let options = BTreeMap::from([("broker.address.family".to_owned(), "v4".to_owned())]);
    let mut topic = DeadLetterTopic::new(&kafka.brokers(), "dead", &options).unwrap();
    let letter = |position, payload| Letter {
        route: "orders",
        shard: "kafka/c/orders/0",
        position: Some(position),
        kind: "rejected",
        reason: "column \"n\" (integer): above 2147483647",
        key: &[0xab; 16],
        event_ms: 5,
        payload,
    };
    let letters: Vec<_> =
        (0..500).map(|n| letter(n, Some(b"\xff\x00".as_slice()))).chain([letter(500, None)]).collect();
    topic.write(&letters[..1]).await.unwrap();
    let mut fastest = Duration::MAX;
    for letters in letters[1..].chunks(50) {
        let started = Instant::now();
        topic.write(letters).await.unwrap();
        fastest = fastest.min(started.elapsed());
    }
    assert!(fastest < Duration::from_millis(90), "{fastest:?}: a flush polls in steps of 100 ms");
    let found = kafka.read_all("dead", 0);
    assert_eq!(found.len(), 501);
    assert_eq!((found[7].as_deref(), found[500].as_deref()), (Some(b"\xff\x00".as_slice()), None));

    let short = BTreeMap::from([("message.timeout.ms".to_owned(), "1500".to_owned())]);
    let mut nowhere = DeadLetterTopic::new(&kafka.brokers(), "no-such-topic", &short).unwrap();
    let fault = nowhere.write(&letters[..1]).await.unwrap_err();
    assert!(fault.to_string().contains("no-such-topic"), "{fault}");
}
