//! How fast the Kafka door polls, names and cuts chunks, with lanes that only count: `cargo run --release -p benches
//! --example kafka_door [records] [partitions] [lanes]`. Starts a Kafka of its own.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use adapters::{kafka::KafkaConfig, sink::RowKind};
use dedup_store::Digest;
use oncegate::{
    door::kafka::{Relay, RelayGate, RelayOptions},
    lane::{AssignedShard, LaneHandle, ToLane},
    naming::{Chunk, Named, Record},
};
use oncegate_tests::servers::{Kafka, Produced};
use tokio::sync::mpsc;

/// Copies the payload and hashes nothing: what is measured is the door.
struct Gate {
    lanes: Vec<LaneHandle>,
}

impl RelayGate for Gate {
    fn route(&self) -> &str {
        "bench"
    }

    fn name(&self, record: &Record<'_>, chunk: &mut Chunk) {
        let Some(kafka) = record.kafka else { return };
        let from = chunk.bytes.len() as u32;
        chunk.bytes.extend_from_slice(record.payload.unwrap_or_default());
        let to = chunk.bytes.len() as u32;
        chunk.records.push(Named {
            fingerprint: None,
            digest: Digest(0),
            event_ms: 0,
            kind: RowKind::Write,
            payload: Some(from..to),
            row: from..from,
            row_key: from..from,
            shard: kafka.shard,
            position: Some(kafka.offset),
            problem: None,
        });
    }

    fn arrival_us(&self) -> i64 {
        0
    }

    fn lanes(&self) -> &[LaneHandle] {
        &self.lanes
    }
}

/// Microseconds from the start of the measurement to the first and to the last record, and how many there were.
#[derive(Default)]
struct Count {
    records: AtomicU64,
    chunks: AtomicU64,
    first_us: AtomicI64,
}

async fn lane(mut inbox: mpsc::Receiver<ToLane>, count: Arc<Count>, started: Instant) {
    while let Some(message) = inbox.recv().await {
        match message {
            ToLane::Assign { shards, reply } => {
                let assigned = shards.into_iter().map(|wanted| AssignedShard {
                    slot: wanted.slot,
                    generation: 1,
                    position: None,
                    source: None,
                });
                reply.send(Ok(assigned.collect())).ok();
            }
            ToLane::Relay { chunk, .. } => {
                let now_us = started.elapsed().as_micros() as i64;
                count.first_us.compare_exchange(0, now_us, Ordering::Relaxed, Ordering::Relaxed).ok();
                count.chunks.fetch_add(1, Ordering::Relaxed);
                count.records.fetch_add(chunk.records.len() as u64, Ordering::Relaxed);
            }
            ToLane::Revoke { reply, .. } => {
                reply.send(()).ok();
            }
            _ => {}
        }
    }
}

#[tokio::main]
async fn main() {
    let arguments: Vec<u64> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let argument = |index: usize, default: u64| arguments.get(index).copied().unwrap_or(default);
    let (records, partitions, lanes) = (argument(0, 1_000_000), argument(1, 4) as i32, argument(2, 1));
    let kafka = Kafka::start();
    kafka.topic("bench", partitions).await;
    let payload = vec![b'x'; 200];
    kafka.produce(
        "bench",
        (0..records).map(|n| Produced {
            partition: (n % partitions as u64) as i32,
            payload: Some(payload.clone()),
            ..Produced::default()
        }),
    );
    for run in 0..5 {
        let (count, started) = (Arc::new(Count::default()), Instant::now());
        let (_events, from_lanes) = mpsc::unbounded_channel();
        let lanes = (0..lanes).map(|_| {
            let (queue, inbox) = mpsc::channel(16);
            tokio::spawn(lane(inbox, count.clone(), started));
            LaneHandle::new(queue)
        });
        let gate = Arc::new(Gate { lanes: lanes.collect() });
        let config = KafkaConfig::new(&kafka.brokers(), &["bench"], &format!("bench-{run}"));
        let relay =
            Relay::start(gate, config, RelayOptions::default(), from_lanes).expect("a thread can be made");
        while count.records.load(Ordering::Relaxed) < records {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let (all_us, first_us) =
            (started.elapsed().as_micros() as i64, count.first_us.load(Ordering::Relaxed));
        let rate = records as f64 / (all_us - first_us) as f64;
        println!(
            "run {run}: first record after {} ms, then {rate:.2} M records/s, {} records a chunk",
            first_us / 1000,
            records / count.chunks.load(Ordering::Relaxed)
        );
        relay.stop().await;
    }
}
