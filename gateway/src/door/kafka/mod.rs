//! The Kafka door: a relay reads the partitions that its consumer group gives it, names the records and hands them to the lanes.
//!
//! One thread per relay polls, names and serves the group; lanes answer it by messages. A partition goes through these states:
//!
//! | state | waits for | then |
//! | --- | --- | --- |
//! | acquiring | the lane: fence, facts, the sink's position | placing |
//! | placing | the log's range, and the start if the sink has no position | proving (or stopped: a gap) |
//! | proving | a commit under the group's generation (P13) | reading (or stopped: a zombie) |
//! | reading | records; the lane may send it back to placing | |
//! | waiting | partitions whose event time is far behind | reading |
//! | stopped | the next assignment | |
//! | leaving | the lane to let go, until a deadline | given back |
//!
//! Back-pressure: a lane whose queue is full is read no further. Its partitions' prefetched records stay where they are, bounded by
//! the client library; nothing is dropped and fetched again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use adapters::{
    kafka::{KafkaConfig, SourceNeeds},
    sink::ShardId,
};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use crate::{
    lane::{FromLane, LaneHandle},
    naming::{Chunk, Record},
};

mod align;
mod answers;
mod counts;
mod group;
mod place;
mod port;
mod positions;
mod relay;
mod slot;
mod status;

pub use place::{Gap, Start};
pub use status::{PartitionStatus, Phase, RelayStatus, TopicStatus};

/// What the door needs of a route.
pub trait RelayGate: Send + Sync + 'static {
    /// The route's name.
    fn route(&self) -> &str;
    /// Names one record into the chunk: exactly one [`crate::naming::Named`] more, with its problem if it has one. Pure, fast.
    fn name(&self, record: &Record<'_>, chunk: &mut Chunk);
    /// Whether naming looks at headers: if not, they are not read.
    fn reads_headers(&self) -> bool {
        true
    }
    /// Why the record cannot be named yet: what its format needs is being fetched. It is then read again a little later, in order.
    fn unreadable_yet(&self, _record: &Record<'_>) -> Option<String> {
        None
    }
    /// The arrival clock: the wall clock, raised to the floor (P11); microseconds since the epoch.
    fn arrival_us(&self) -> i64;
    /// The lanes, always the same ones; a partition keeps its lane.
    fn lanes(&self) -> &[LaneHandle];
    /// These and no other shards of the relay have records to come that were not settled yet: they are not idle (P11), until this is
    /// said anew.
    fn awaits(&self, shards: &[ShardId]) {
        let _ = shards;
    }
}

/// Where the copies of an event may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Scope {
    /// In the partition of the first one: partitions may be shared out among instances, and facts follow them.
    #[default]
    Partition,
    /// In any partition of the route's topics: an instance reads only while it has all of them, and what is known of all of them.
    Route,
}

/// How a relay reads.
#[derive(Clone, Debug)]
pub struct RelayOptions {
    /// Where to begin when the sink has no position yet.
    pub start: Start,
    /// What to do when records that were not read yet are gone.
    pub gap: Gap,
    /// Where the copies of an event may be.
    pub scope: Scope,
    /// How long a revoked partition may be drained; at most half of `max.poll.interval.ms` counts.
    pub drain: Duration,
    /// How often the group's offsets follow.
    pub commit_every: Duration,
    /// How far a partition's event time may be ahead of the slowest one's that has more to read.
    pub max_drift: Duration,
    /// What the route asks of its topics: what does not fit is logged when the relay starts, and shown in its status.
    pub needs: SourceNeeds,
    /// Records of a chunk, at most.
    pub chunk_records: usize,
    /// Bytes of a chunk, at most (and one record).
    pub chunk_bytes: usize,
}

impl Default for RelayOptions {
    fn default() -> Self {
        Self {
            start: Start::Earliest,
            gap: Gap::Stop,
            scope: Scope::Partition,
            drain: Duration::from_secs(20),
            commit_every: Duration::from_secs(1),
            max_drift: Duration::from_secs(86_400),
            needs: SourceNeeds::default(),
            chunk_records: 4096,
            chunk_bytes: 1 << 20,
        }
    }
}

/// A relay at work. Dropping it stops the relay without waiting.
#[derive(Debug)]
pub struct Relay {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
    done: Option<oneshot::Receiver<()>>,
}

/// Between the relay's thread and its handle.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    status: Mutex<RelayStatus>,
}

impl Relay {
    /// Starts the relay's thread. It connects by itself, and tries again while the brokers cannot be reached. `events` is what
    /// the lanes of `gate` send for this relay.
    pub fn start<G: RelayGate>(
        gate: Arc<G>,
        config: KafkaConfig,
        options: RelayOptions,
        events: mpsc::UnboundedReceiver<FromLane>,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (finished, done) = oneshot::channel();
        let theirs = shared.clone();
        let thread =
            std::thread::Builder::new().name(format!("relay {}", gate.route())).spawn(move || {
                relay::main(&*gate, &config, &options, events, &theirs);
                // Nobody may be waiting.
                drop(finished);
            })?;
        Ok(Self { shared, thread, done: Some(done) })
    }

    /// How the relay stands.
    pub fn status(&self) -> RelayStatus {
        self.shared.status.lock().clone()
    }

    /// Asks the relay to stop: partitions are drained, offsets committed, the group left.
    pub fn begin_stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.thread.thread().unpark();
    }

    /// Stops the relay and waits until it has left the group. The lanes must still be running.
    pub async fn stop(mut self) {
        self.begin_stop();
        if let Some(done) = self.done.take() {
            // Never sent: it ends when the thread does.
            drop(done.await);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.begin_stop();
    }
}
