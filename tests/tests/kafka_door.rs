//! The Kafka door against a real broker, with lanes of the test's own that write into memory.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a failed unwrap is the test's failure")]

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use adapters::{
    dead_letters::{DeadLetters, Letter},
    kafka::{DeadLetterTopic, Isolation, KafkaConfig},
    sink::{RowKind, ShardId},
};
use dedup_store::Digest;
use oncegate::{
    door::kafka::{Gap, PartitionStatus, Relay, RelayGate, RelayOptions, Start},
    lane::{AssignedShard, FromLane, LaneHandle, ToLane},
    naming::{Chunk, Headers, Named, Record},
};
use oncegate_tests::{
    eventually,
    servers::{Kafka, Produced},
};
use rdkafka::{
    ClientConfig, Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions},
    client::DefaultClientContext,
    producer::{BaseRecord, Producer, ThreadedProducer},
};
use tokio::sync::mpsc;

const PATIENCE: Duration = Duration::from_secs(60);

/// Names nothing: payload, key and headers are joined into the chunk's bytes.
struct Gate {
    lanes: Vec<LaneHandle>,
    switches: Arc<Switches>,
}

impl RelayGate for Gate {
    fn route(&self) -> &str {
        "orders"
    }

    fn name(&self, record: &Record<'_>, chunk: &mut Chunk) {
        let kafka = record.kafka.unwrap();
        if self.switches.stall.swap(false, Ordering::AcqRel) {
            std::thread::sleep(Duration::from_secs(9));
        }
        let from = chunk.bytes.len() as u32;
        chunk.bytes.extend_from_slice(record.payload.unwrap_or_default());
        let to = chunk.bytes.len() as u32;
        chunk.bytes.extend_from_slice(kafka.key.unwrap_or_default());
        let key = chunk.bytes.len() as u32;
        if let Headers::Pairs(pairs) = record.headers {
            for (name, value) in pairs {
                chunk.bytes.extend_from_slice(name.as_bytes());
                chunk.bytes.extend_from_slice(value.unwrap_or_default());
            }
        }
        let end = chunk.bytes.len() as u32;
        chunk.records.push(Named {
            fingerprint: None,
            digest: Digest(0),
            event_ms: kafka.timestamp_ms.unwrap_or_default(),
            kind: RowKind::Write,
            payload: record.payload.map(|_| from..to),
            row: key..end,
            row_key: to..key,
            shard: kafka.shard,
            position: Some(kafka.offset),
            problem: None,
        });
    }

    fn arrival_us(&self) -> i64 {
        1
    }

    fn lanes(&self) -> &[LaneHandle] {
        &self.lanes
    }
}

/// One record as a lane has written it.
#[derive(Clone, PartialEq, Debug)]
struct Kept {
    offset: i64,
    payload: Option<String>,
    key: String,
    headers: String,
    timestamp_ms: i64,
}

/// What all lanes write to: per shard its epoch, its position and its records.
#[derive(Default)]
struct Sink {
    shards: HashMap<ShardId, (u64, i64, Vec<Kept>)>,
    faults: Vec<String>,
}

/// One process: its lanes share these switches.
#[derive(Default)]
struct Switches {
    hold: AtomicBool,
    refuse: AtomicBool,
    /// The relay's thread stands still at the next record, for longer than `max.poll.interval.ms` of its test.
    stall: AtomicBool,
    records: AtomicU64,
    assigns: AtomicU64,
}

type Shared = Arc<std::sync::Mutex<Sink>>;

async fn lane(
    mut inbox: mpsc::Receiver<ToLane>,
    events: mpsc::UnboundedSender<FromLane>,
    sink: Shared,
    switches: Arc<Switches>,
) {
    let mut owned: BTreeMap<u32, (ShardId, u64, u64)> = BTreeMap::new();
    while let Some(message) = inbox.recv().await {
        match message {
            ToLane::Assign { shards, reply } => {
                if switches.refuse.load(Ordering::Acquire) {
                    drop(reply.send(Err("the sink is not reachable".into())));
                    continue;
                }
                switches.assigns.fetch_add(1, Ordering::AcqRel);
                let mut sink = sink.lock().unwrap();
                let answer = shards.into_iter().map(|(slot, id)| {
                    let shard = sink.shards.entry(id.clone()).or_insert((0, -1, vec![]));
                    shard.0 += 1;
                    owned.insert(slot, (id, shard.0, shard.0));
                    let position = (shard.1 >= 0).then_some(shard.1);
                    AssignedShard { slot, generation: shard.0, position }
                });
                drop(reply.send(Ok(answer.collect())));
            }
            ToLane::Revoke { slots, reply } => {
                slots.iter().for_each(|slot| drop(owned.remove(slot)));
                reply.send(()).ok();
            }
            ToLane::Relay { chunk, generations } => {
                while switches.hold.load(Ordering::Acquire) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                let mut sink = sink.lock().unwrap();
                let Sink { shards, faults } = &mut *sink;
                let mut moved = BTreeMap::new();
                for named in &chunk.records {
                    let generation = generations
                        .iter()
                        .find(|(slot, _)| *slot == named.shard)
                        .map(|(_, generation)| *generation);
                    let Some((id, epoch, current)) = owned.get(&named.shard) else { continue };
                    if generation != Some(*current) {
                        continue;
                    }
                    let shard = shards.get_mut(id).unwrap();
                    if shard.0 != *epoch {
                        continue;
                    }
                    let offset = named.position.unwrap();
                    if offset < shard.1 {
                        faults.push(format!("{id}: offset {offset} came again below {}", shard.1));
                    }
                    let text = |range: &std::ops::Range<u32>| {
                        String::from_utf8_lossy(&chunk.bytes[range.start as usize..range.end as usize])
                            .into_owned()
                    };
                    shard.1 = offset + 1;
                    shard.2.push(Kept {
                        offset,
                        payload: named.payload.as_ref().map(text),
                        key: text(&named.row_key),
                        headers: text(&named.row),
                        timestamp_ms: named.event_ms,
                    });
                    switches.records.fetch_add(1, Ordering::AcqRel);
                    moved.insert(named.shard, shard.1);
                }
                for (slot, position) in moved {
                    drop(events.send(FromLane::Progress { slot, position }));
                }
            }
            _ => {}
        }
    }
}

/// One process of the gateway, as far as the door is concerned.
struct Instance {
    relay: Relay,
    switches: Arc<Switches>,
    events: mpsc::UnboundedSender<FromLane>,
}

fn instance(sink: &Shared, lanes: usize, config: KafkaConfig, options: RelayOptions) -> Instance {
    if std::env::var_os("RUST_LOG").is_some() {
        // Already started by another test of this process.
        oncegate::logging::start(oncegate::logging::LogFormat::Text, None).ok();
    }
    let switches = Arc::new(Switches::default());
    let (events, from_lanes) = mpsc::unbounded_channel();
    let lanes = (0..lanes).map(|_| {
        let (queue, inbox) = mpsc::channel(4);
        tokio::spawn(lane(inbox, events.clone(), sink.clone(), switches.clone()));
        LaneHandle { queue }
    });
    let gate = Arc::new(Gate { lanes: lanes.collect(), switches: switches.clone() });
    let relay = Relay::start(gate, config, options, from_lanes).unwrap();
    Instance { relay, switches, events }
}

fn config(kafka: &Kafka, topic: &str) -> KafkaConfig {
    let mut config = KafkaConfig::new(&kafka.brokers(), &[topic], &format!("group-{topic}"));
    config.options.insert("broker.address.family".into(), "v4".into());
    config
}

fn eager(mut config: KafkaConfig) -> KafkaConfig {
    config.options.insert("partition.assignment.strategy".into(), "range".into());
    config
}

fn numbers(partitions: i32, range: std::ops::Range<i64>) -> impl Iterator<Item = Produced> {
    range.map(move |n| Produced {
        partition: (n % i64::from(partitions)) as i32,
        payload: Some(n.to_string().into_bytes()),
        ..Produced::default()
    })
}

/// Waits until `count` records are in the sink, and returns them by partition, having checked that none came twice.
async fn kept(sink: &Shared, count: usize) -> BTreeMap<String, Vec<Kept>> {
    eventually("records in the sink", PATIENCE, async || {
        let sink = sink.lock().unwrap();
        assert_eq!(sink.faults, [] as [String; 0]);
        let found: usize = sink.shards.values().map(|shard| shard.2.len()).sum();
        assert!(found <= count, "{found} records, more than {count}");
        if found == count {
            Ok(sink.shards.iter().map(|(id, shard)| (id.to_string(), shard.2.clone())).collect())
        } else {
            let stands: Vec<String> =
                sink.shards.iter().map(|(id, shard)| format!("{id} at {}", shard.1)).collect();
            Err(format!("{found} of {count}: {stands:?}"))
        }
    })
    .await
}

/// Every number of `range` once, in order in its partition.
fn assert_whole(kept: &BTreeMap<String, Vec<Kept>>, range: std::ops::Range<i64>) {
    let mut all = vec![];
    for (shard, records) in kept {
        assert!(records.windows(2).all(|pair| pair[0].offset < pair[1].offset), "{shard} is out of order");
        all.extend(records.iter().map(|kept| kept.payload.as_deref().unwrap().parse::<i64>().unwrap()));
    }
    all.sort_unstable();
    assert!(all.into_iter().eq(range), "records are missing or doubled");
}

async fn committed(kafka: &Kafka, topic: &str, partitions: i32, expected: Vec<i64>) {
    eventually("committed offsets", PATIENCE, async || {
        let found = kafka.committed(topic, partitions, &format!("group-{topic}"));
        if found == expected { Ok(()) } else { Err(format!("{found:?}, not {expected:?}")) }
    })
    .await;
}

async fn reason(relay: &Relay, wanted: &str) -> String {
    eventually("a reason", PATIENCE, async || match relay.status().not_ready() {
        Some(reason) if reason.contains(wanted) => Ok(reason),
        other => Err(format!("{other:?}")),
    })
    .await
}

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
        let fenced = FromLane::Fenced { slot: 0, owner: "nobody".into(), reason: "the test".into() };
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
    let gate = Arc::new(Gate { lanes: vec![LaneHandle { queue }], switches: Arc::default() });
    let relay = Relay::start(gate, config(kafka, "seek"), RelayOptions::default(), from_lanes).unwrap();
    let (mut generation, mut next, mut rewinds) = (1, 0, vec![30_000, 10_000, 1, 0]);
    while next < 50_000 {
        match tokio::time::timeout(PATIENCE, inbox.recv()).await.expect("records come").unwrap() {
            ToLane::Assign { shards, reply } => {
                let shard = AssignedShard { slot: shards[0].0, generation, position: None };
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
    let skipped = instance.relay.status().skipped;
    let found: usize = sink.lock().unwrap().shards.values().map(|shard| shard.2.len()).sum();
    assert!(skipped > 0, "nothing was skipped: the test does not reach what it is for");
    assert_eq!(found as u64 + skipped, 2000);
    instance.relay.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_records_that_go_while_the_relay_lags_are_a_gap_too() {
    overtaken("overtaken", config(Kafka::shared(), "overtaken")).await;
    overtaken("overtaken-eager", eager(config(Kafka::shared(), "overtaken-eager"))).await;
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
async fn a_broker_that_dies_and_returns_costs_nothing_but_time() {
    let mut kafka = Kafka::start();
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
