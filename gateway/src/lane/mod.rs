//! A lane: one loop that turns a route's records into batches, one batch in flight at a time.

mod check;
mod deliver;
pub(crate) mod judge;
#[cfg(test)]
mod models;
pub(crate) mod own;
pub(crate) mod run;
mod settle;
pub(crate) mod shard;
#[cfg(test)]
mod sim;
pub(crate) mod works;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use adapters::sink::ShardId;
use dedup_store::Entry;
use tokio::sync::{mpsc, oneshot};

pub use self::judge::{DeadLetterPolicy, LatePolicy, MismatchPolicy, RefusedPolicy, Rules};
use crate::{naming::Chunk, outcome::Answer};

/// What doors send to a lane.
pub enum ToLane {
    /// Records of the HTTP door or the library; answered once each has its outcome (or `wait` has passed for it).
    Submit {
        /// The records.
        chunk: Chunk,
        /// One answer a record, in order.
        reply: oneshot::Sender<Vec<Answer>>,
    },
    /// Records of the Kafka door. `Named::shard` indexes the relay's slots given by `Assign`; positions ascend per slot.
    Relay {
        /// The records.
        chunk: Chunk,
        /// The slots' generations when the chunk was cut: records of an older generation are dropped.
        generations: Arc<[(u32, u64)]>,
    },
    /// Partitions were assigned: fence them, learn their facts, and say where to read on.
    Assign {
        /// Which.
        shards: Vec<Wanted>,
        /// Per shard, where to read on: the sink's position, or none if it has none yet.
        reply: oneshot::Sender<Result<Vec<AssignedShard>, String>>,
    },
    /// Partitions were revoked: finish or abandon what is in flight, drop what is parked or queued, forget the slots.
    Revoke {
        /// Slot numbers; none: all that a relay's earlier membership had.
        slots: Option<Vec<u32>>,
        /// Begun before the message was sent.
        hand_over: HandOver,
        /// Answered once the lane holds nothing of them.
        reply: oneshot::Sender<()>,
    },
    /// Keep with the shards of these slots how many partitions their topics have (P13).
    Partitions {
        /// Slot numbers and counts.
        counts: Vec<(u32, i64)>,
        /// The counts that were kept before, of the shards that had one; dropped if the sink cannot be asked now.
        reply: oneshot::Sender<Vec<(u32, i64)>>,
    },
    /// A fact without a row, for the sink's marks: a key taken back (P12), or an effect that happened outside (`Gate::once`).
    Note {
        /// The fact.
        entry: Entry,
        /// Answered once the marks hold it.
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// Finish what is in the inbox, then end.
    Stop,
}

/// A shard to be taken over.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Chosen by the door, unique in the relay.
    pub slot: u32,
    /// Which shard.
    pub shard: ShardId,
    /// Which source it is now (a topic's id), if that is known: kept with the shard.
    pub source: Option<Arc<str>>,
    /// If another source was kept: the shard is this one's from now on, and begins at its start (P3).
    pub renew: bool,
}

/// A shard that the lane now owns.
#[derive(Clone, Debug)]
pub struct AssignedShard {
    /// As given.
    pub slot: u32,
    /// Counts up whenever the lane asks the door to read again from another position.
    pub generation: u64,
    /// The sink's position; none if the shard was renewed.
    pub position: Option<i64>,
    /// The source that was kept with the shard before.
    pub source: Option<String>,
}

/// What a lane tells the Kafka door.
#[derive(Clone, Debug)]
pub enum FromLane {
    /// Everything below `position` has its outcome, durably: the group's offset may follow.
    Progress {
        /// Which partition.
        slot: u32,
        /// Next offset to read.
        position: i64,
    },
    /// Read again from `position` (sink went back, batch abandoned): chunks of older generations are dropped.
    Seek {
        /// Which partition.
        slot: u32,
        /// As in [`AssignedShard`].
        generation: u64,
        /// Where to; none: the route's start.
        position: Option<i64>,
    },
    /// Another owner has taken the shard over. If the group still assigns it here, assign it again; else leave it (P13).
    Fenced {
        /// Which partition.
        slot: u32,
        /// As in [`AssignedShard`].
        generation: u64,
        /// The new owner.
        owner: String,
        /// For the log and `/readyz`.
        reason: String,
    },
    /// The lane gave the shard up (the route says stop): do not read it any more.
    Stopped {
        /// Which partition.
        slot: u32,
        /// As in [`AssignedShard`].
        generation: u64,
        /// For the log and `/readyz`.
        reason: String,
    },
}

/// A lane as doors see it.
#[derive(Clone)]
pub struct LaneHandle {
    /// Bounded: a full queue is back-pressure.
    pub queue: mpsc::Sender<ToLane>,
    hand_overs: Arc<AtomicUsize>,
}

impl LaneHandle {
    /// The lane whose inbox `queue` fills.
    pub fn new(queue: mpsc::Sender<ToLane>) -> Self {
        Self { queue, hand_overs: Arc::default() }
    }

    /// To be begun before [`ToLane::Revoke`] is sent.
    pub fn hand_over(&self) -> HandOver {
        self.hand_overs.fetch_add(1, Ordering::AcqRel);
        HandOver(self.hand_overs.clone())
    }

    /// How many hand-overs the lane has not come to yet.
    pub(crate) fn hand_overs(&self) -> Arc<AtomicUsize> {
        self.hand_overs.clone()
    }
}

/// A hand-over on its way. Until the lane has come to it, it takes in what comes before it, however much is queued: a lane that is
/// not ready may be waiting for just this (a sink refuses partitions that the group has taken back).
pub struct HandOver(Arc<AtomicUsize>);

impl Drop for HandOver {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
