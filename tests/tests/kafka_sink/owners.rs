//! Who owns a shard: members of a consumer group, marks topics that grow, topics that are made again.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use adapters::{
    kafka::{Event, KafkaConfig, KafkaSource, Membership, Reader, TopicPartition},
    kafka_sink::KafkaSink,
    sink::{Acquire, Batch, MarkBlock, OnRefused, RowOutcome, ShardStep, Sink, SinkError},
};
use oncegate_tests::{
    eventually,
    gateway::Gateway,
    servers::{Kafka, Produced, committed},
};
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewPartitions},
    client::DefaultClientContext,
};

use crate::own::{Desk, config, payloads, place};

/// The only member of a group, which has its topic's one partition.
struct Member {
    source: KafkaSource,
    at: TopicPartition,
    seat: Arc<Membership>,
    _readers: Vec<Reader>,
}

impl Member {
    async fn join(topic: &str) -> Self {
        let kafka = Kafka::shared();
        kafka.topic(topic, 1).await;
        let seat = Arc::new(Membership::default());
        let mut config = KafkaConfig::new(&kafka.brokers(), &[topic], topic);
        config.options.insert("broker.address.family".to_owned(), "v4".to_owned());
        config.membership = Some(seat.clone());
        let source = KafkaSource::open(&config, Arc::new(|| {})).expect("the group can be joined");
        let at = eventually("an assignment", Duration::from_secs(60), async || match source.poll() {
            Some(Event::Assigned(at)) if at.len() == 1 => Ok(at[0].clone()),
            other => Err(format!("{other:?}")),
        })
        .await;
        let readers = source.take(std::slice::from_ref(&at)).expect("it can be taken");
        Self { source, at, seat, _readers: readers }
    }

    fn shard(&self) -> String {
        self.at.shard(self.source.cluster()).to_string()
    }
}

/// P14: that the group gave a shard to somebody proves nothing of when: here two instances hold the same generation, as they do when
/// one has been put out and does not know it. Whoever takes the shard over makes sure by itself that the other cannot write.
#[tokio::test(flavor = "multi_thread")]
async fn p14_a_take_over_fences_the_last_owner_also_where_the_group_would() {
    let place = place().await;
    let member = Member::join("fenced-by-both").await;
    let shard = member.shard();
    let sink = |seat: &Arc<Membership>| KafkaSink::new(config(&place)).expect("good").fenced_by(seat.clone());
    let mut first = Desk::of(&sink(&member.seat), "first", &shard).await;
    first.write_text("one").await.expect("goes in");
    let next = Desk::of(&sink(&member.seat), "second", &shard).await;
    assert!(next.state.epoch > first.state.epoch);
    assert_eq!(next.state.sequence, 1);
    let late = first.write_text("late").await;
    let theirs = next.state.epoch;
    assert!(
        matches!(&late, Err(SinkError::Fenced { owner, epoch, .. }) if owner == "second" && *epoch == theirs),
        "{late:?}"
    );
    assert_eq!(payloads(&committed(&Kafka::shared().brokers(), &place.topic)), ["one"]);
}

/// P13: a member from which the group has taken a partition, or that has left, claims it no more: another member may have it.
#[tokio::test(flavor = "multi_thread")]
async fn p13_a_member_without_the_partition_claims_nothing() {
    let place = place().await;
    let member = Member::join("taken-back").await;
    let shard: Arc<str> = member.shard().into();
    let sink = KafkaSink::new(config(&place)).expect("good").fenced_by(member.seat.clone());
    let mut desk = Desk::of(&sink, "first", &shard).await;
    desk.write_text("one").await.expect("goes in");
    member.source.give_back(std::slice::from_ref(&member.at)).expect("the group may have it");
    let mut next = Desk::new(config(&place), "second", &shard).await;
    assert!(next.state.epoch > desk.state.epoch);
    let again = desk.session.acquire(std::slice::from_ref(&shard), Acquire::Force).await;
    let taken = |result: &Result<_, SinkError>| matches!(result, Err(SinkError::NotApplied { reason, retry: true }) if reason.contains("taken") && reason.contains(&*shard));
    assert!(taken(&again), "{again:?}");
    // Nor does it ask for ever what became of its batch there: the batch is the new owner's matter, and its marks tell.
    let step = desk.step();
    let resolved = desk.session.resolve(std::slice::from_ref(&step)).await;
    assert!(
        matches!(&resolved, Err(SinkError::Fenced { shard: lost, .. }) if **lost == *shard),
        "{resolved:?}"
    );
    desk.session.acquire(&[], Acquire::Force).await.expect("a connection");
    assert_eq!(desk.session.marks_since(&shard, 0).await.expect("they can be read").len(), 1);
    // Nor does one that was never given it, or has left.
    drop(member);
    let mut stranger = sink.session("route", "third");
    let refused = stranger.acquire(std::slice::from_ref(&shard), Acquire::Force).await;
    assert!(taken(&refused), "{refused:?}");
    next.write_text("two").await.expect("the owner was not disturbed");
    let records = committed(&Kafka::shared().brokers(), &place.topic);
    let mut texts = payloads(&records);
    texts.sort_unstable();
    assert_eq!(texts, ["one", "two"]);
    // What callers write through is in no group's hands.
    stranger.acquire(&["http/0".into()], Acquire::Force).await.expect("nobody else's");
}

/// P12: a key that is taken back is noted in each shard, also in one that has brought nothing yet and so has no offset. Such a note was
/// refused again and again, and whoever waited for it waited for ever.
#[tokio::test(flavor = "multi_thread")]
async fn p12_a_shard_without_an_offset_takes_a_note() {
    let place = place().await;
    let member = Member::join("no-offset").await;
    let shard: Arc<str> = member.shard().into();
    let sink = KafkaSink::new(config(&place)).expect("good").fenced_by(member.seat.clone());
    let mut desk = Desk::of(&sink, "first", &shard).await;
    let steps = [ShardStep { position: None, ..desk.step() }];
    let seal = |_: &[RowOutcome]| {
        vec![MarkBlock { step: 0, min_ms: 1, max_ms: 1, count: 1, block: "a note".into() }]
    };
    let batch = Batch {
        steps: &steps,
        rows: &[],
        dead_letters: &[],
        on_refused: OnRefused::DeadLetter,
        known_new: true,
        seal: &seal,
    };
    desk.session.deliver(&batch).await.expect("it goes in");
    let marks = desk.session.marks_since(&shard, 0).await.expect("they can be read");
    assert_eq!((marks.len(), &*marks[0].block), (1, b"a note".as_slice()));
    desk.state.sequence += 1;
    desk.write_text("one").await.expect("and so does the first record");
}

/// Instances that count the marks topic's partitions differently look for shards in different places: one that sees it grow says so.
#[tokio::test(flavor = "multi_thread")]
async fn p14_a_marks_topic_that_has_grown_is_refused() {
    let kafka = Kafka::start();
    kafka.topic("rows", 1).await;
    let mut config = adapters::kafka_sink::KafkaSinkConfig::new(&kafka.brokers(), "rows");
    config.marks_topic = Some("marks".to_owned());
    config.marks_partitions = 3;
    config.options.insert("broker.address.family".to_owned(), "v4".to_owned());
    let mut desk = Desk::new(config, "first", "http/0").await;
    desk.write_text("one").await.expect("goes in");
    let owned = [(desk.state.shard.clone(), desk.state.epoch)];
    // A batch shows as much as a heartbeat: only the next one asks.
    desk.session.heartbeat(&owned).await.expect("it is ours");
    kafka.kill();
    desk.session.heartbeat(&owned).await.expect_err("there is no broker");
    kafka.run();
    let mut client = ClientConfig::new();
    client.set("bootstrap.servers", kafka.brokers()).set("broker.address.family", "v4");
    let admin: AdminClient<DefaultClientContext> = client.create().expect("a client can be made");
    let more =
        admin.create_partitions(&[NewPartitions::new("marks", 5)], &AdminOptions::new()).await.expect("made");
    assert!(more.iter().all(Result::is_ok), "{more:?}");
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        match desk.session.acquire(&["http/0".into()], Acquire::Force).await {
            Err(SinkError::NotApplied { reason, .. }) if reason.contains("had 3 partitions and has 5") => {
                break;
            }
            Err(_) if Instant::now() < until => tokio::time::sleep(Duration::from_millis(200)).await,
            other => panic!("{other:?}"),
        }
    }
}

/// P3: the new topic has more records than the old one had, so that no offset tells it from the old one, only its id.
#[tokio::test(flavor = "multi_thread")]
async fn p3_a_topic_made_again_is_told_from_the_old_one_with_a_kafka_sink_too() {
    let kafka = Kafka::shared();
    for topic in ["again", "again-out"] {
        kafka.topic(topic, 2).await;
    }
    let records = |range: std::ops::Range<i32>| {
        range.map(|n| Produced {
            partition: n % 2,
            payload: Some(format!("{{\"id\":{n}}}").into_bytes()),
            ..Produced::default()
        })
    };
    let brokers = kafka.brokers();
    let config = |gap: &str| {
        format!(
            "[sinks.again]\ntype = \"kafka\"\nbrokers = \"{brokers}\"\ntopic = \"again-out\"\nmarks_partitions = 2\n\
             options = {{ \"broker.address.family\" = \"v4\" }}\n\n\
             [routes.again]\nsink = \"again\"\nkey = \"/id\"\nevent_time = {{ kafka = \"timestamp\" }}\nwindow = \"24h\"\n\
             lateness = \"1h\"\nlanes = {{ http = 0, relay = 1 }}\ngap = \"{gap}\"\n\n\
             [routes.again.kafka]\nbrokers = \"{brokers}\"\ntopics = [\"again\"]\ngroup = \"again\"\n"
        )
    };
    let written = async |count: usize| {
        eventually("records in the sink", Duration::from_secs(60), async || {
            let found = committed(&brokers, "again-out");
            let mut ids: Vec<i64> = payloads(&found)
                .into_iter()
                .map(|text| text[6..text.len() - 1].parse().expect("a record of the case"))
                .collect();
            ids.sort_unstable();
            if ids.len() == count { Ok(ids) } else { Err(format!("{} of {count}", ids.len())) }
        })
        .await
    };
    let mut gateway = Gateway::new(&config("stop"));
    gateway.start().await;
    kafka.produce("again", records(0..1_000));
    written(1_000).await;
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
    kafka.make_again("again", 2).await;
    // The first 200 of them came through the old one too.
    kafka.produce("again", records(800..5_000));
    gateway.spawn();
    let said = gateway.logged(&["made again", "its id was", "again/"], Duration::from_secs(60)).await;
    assert!(said.contains("position (500)"), "{said}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    written(1_000).await;
    gateway.kill();

    // Told to go on, it reads the new one whole, and knows what came through the old one; from then on the new one is the topic.
    gateway.configure(&config("skip"));
    gateway.start().await;
    assert_eq!(written(5_000).await, (0..5_000).collect::<Vec<_>>());
    gateway.kill();
    gateway.configure(&config("stop"));
    kafka.produce("again", records(4_900..5_100));
    gateway.start().await;
    assert_eq!(written(5_100).await, (0..5_100).collect::<Vec<_>>());
}
