//! Lanes of the test's own that write into memory, and a relay in front of them.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use adapters::{
    kafka::KafkaConfig,
    sink::{RowKind, ShardId},
};
use dedup_store::Digest;
use oncegate::{
    door::kafka::{Relay, RelayGate, RelayOptions},
    lane::{AssignedShard, FromLane, LaneHandle, ToLane, Wanted},
    naming::{Chunk, Headers, Named, Record},
};
use oncegate_tests::{
    eventually,
    servers::{Kafka, Produced},
};
use tokio::sync::mpsc;

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Names nothing: payload, key and headers are joined into the chunk's bytes.
pub(crate) struct Gate {
    pub(crate) lanes: Vec<LaneHandle>,
    pub(crate) switches: Arc<Switches>,
}

impl RelayGate for Gate {
    fn route(&self) -> &str {
        "orders"
    }

    fn name(&self, record: &Record<'_>, chunk: &mut Chunk) {
        let kafka = record.kafka.unwrap();
        self.switches.named.lock().unwrap().push((kafka.partition, kafka.timestamp_ms.unwrap_or_default()));
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
        // Later than all that the tests produce.
        4_000_000_000_000_000
    }

    fn awaits(&self, shards: &[ShardId]) {
        *self.switches.awaited.lock().unwrap() = shards.to_vec();
    }

    fn lanes(&self) -> &[LaneHandle] {
        &self.lanes
    }
}

/// One record as a lane has written it.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Kept {
    pub(crate) offset: i64,
    pub(crate) payload: Option<String>,
    pub(crate) key: String,
    pub(crate) headers: String,
    pub(crate) timestamp_ms: i64,
}

/// What all lanes write to: per shard its epoch, its position and its records.
#[derive(Default)]
pub(crate) struct Sink {
    pub(crate) shards: HashMap<ShardId, (u64, i64, Vec<Kept>)>,
    pub(crate) faults: Vec<String>,
    pub(crate) sources: HashMap<ShardId, Option<String>>,
}

/// One process: its lanes share these switches.
#[derive(Default)]
pub(crate) struct Switches {
    pub(crate) hold: AtomicBool,
    pub(crate) refuse: AtomicBool,
    /// The relay's thread stands still at the next record, for longer than `max.poll.interval.ms` of its test.
    pub(crate) stall: AtomicBool,
    pub(crate) records: AtomicU64,
    pub(crate) assigns: AtomicU64,
    /// The shards that are said to have more to come.
    pub(crate) awaited: std::sync::Mutex<Vec<ShardId>>,
    /// Partition and timestamp of every record, as they were read.
    pub(crate) named: std::sync::Mutex<Vec<(i32, i64)>>,
}

pub(crate) type Shared = Arc<std::sync::Mutex<Sink>>;

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
                let Sink { shards: rows, sources, .. } = &mut *sink;
                let answer = shards.into_iter().map(|Wanted { slot, shard: id, source, renew }| {
                    let shard = rows.entry(id.clone()).or_insert((0, -1, vec![]));
                    shard.0 += 1;
                    owned.insert(slot, (id.clone(), shard.0, shard.0));
                    let before = sources.entry(id).or_default();
                    let kept = before.clone();
                    if kept.is_none() || (renew && kept.as_deref() != source.as_deref()) {
                        shard.1 = if kept.is_none() { shard.1 } else { -1 };
                        *before = source.map(|source| source.to_string());
                    }
                    let position = (shard.1 >= 0).then_some(shard.1);
                    AssignedShard { slot, generation: shard.0, position, source: kept }
                });
                drop(reply.send(Ok(answer.collect())));
            }
            ToLane::Revoke { slots, reply, .. } => {
                owned.retain(|slot, _| slots.as_ref().is_some_and(|slots| !slots.contains(slot)));
                reply.send(()).ok();
            }
            ToLane::Relay { chunk, generations } => {
                while switches.hold.load(Ordering::Acquire) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                let mut sink = sink.lock().unwrap();
                let Sink { shards, faults, .. } = &mut *sink;
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
pub(crate) struct Instance {
    pub(crate) relay: Relay,
    pub(crate) switches: Arc<Switches>,
    pub(crate) events: mpsc::UnboundedSender<FromLane>,
}

pub(crate) fn instance(sink: &Shared, lanes: usize, config: KafkaConfig, options: RelayOptions) -> Instance {
    if std::env::var_os("RUST_LOG").is_some() {
        // Already started by another test of this process.
        oncegate::logging::start(oncegate::logging::LogFormat::Text, None).ok();
    }
    let switches = Arc::new(Switches::default());
    let (events, from_lanes) = mpsc::unbounded_channel();
    let lanes = (0..lanes).map(|_| {
        let (queue, inbox) = mpsc::channel(4);
        tokio::spawn(lane(inbox, events.clone(), sink.clone(), switches.clone()));
        LaneHandle::new(queue)
    });
    let gate = Arc::new(Gate { lanes: lanes.collect(), switches: switches.clone() });
    let relay = Relay::start(gate, config, options, from_lanes).unwrap();
    Instance { relay, switches, events }
}

pub(crate) fn config(kafka: &Kafka, topic: &str) -> KafkaConfig {
    let mut config = KafkaConfig::new(&kafka.brokers(), &[topic], &format!("group-{topic}"));
    config.options.insert("broker.address.family".into(), "v4".into());
    config
}

pub(crate) fn eager(mut config: KafkaConfig) -> KafkaConfig {
    config.options.insert("partition.assignment.strategy".into(), "range".into());
    config
}

pub(crate) fn numbers(partitions: i32, range: std::ops::Range<i64>) -> impl Iterator<Item = Produced> {
    range.map(move |n| Produced {
        partition: (n % i64::from(partitions)) as i32,
        payload: Some(n.to_string().into_bytes()),
        ..Produced::default()
    })
}

/// Waits until `count` records are in the sink, and returns them by partition, having checked that none came twice.
pub(crate) async fn kept(sink: &Shared, count: usize) -> BTreeMap<String, Vec<Kept>> {
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
pub(crate) fn assert_whole(kept: &BTreeMap<String, Vec<Kept>>, range: std::ops::Range<i64>) {
    let mut all = vec![];
    for (shard, records) in kept {
        assert!(records.windows(2).all(|pair| pair[0].offset < pair[1].offset), "{shard} is out of order");
        all.extend(records.iter().map(|kept| kept.payload.as_deref().unwrap().parse::<i64>().unwrap()));
    }
    all.sort_unstable();
    assert!(all.into_iter().eq(range), "records are missing or doubled");
}

pub(crate) async fn committed(kafka: &Kafka, topic: &str, partitions: i32, expected: Vec<i64>) {
    eventually("committed offsets", PATIENCE, async || {
        let found = kafka.committed(topic, partitions, &format!("group-{topic}"));
        if found == expected { Ok(()) } else { Err(format!("{found:?}, not {expected:?}")) }
    })
    .await;
}

pub(crate) async fn reason(relay: &Relay, wanted: &str) -> String {
    eventually("a reason", PATIENCE, async || match relay.status().not_ready() {
        Some(reason) if reason.contains(wanted) => Ok(reason),
        other => Err(format!("{other:?}")),
    })
    .await
}
