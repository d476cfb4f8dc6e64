use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerGroupMetadata};

use super::{TopicPartition, context::Context};
use crate::sink::ShardId;

/// The generation may have moved under partitions that stayed: looked up again so often.
const EVERY: Duration = Duration::from_millis(100);

/// What a relay's place in its consumer group proves, shard by shard: shared with the sink that fences by it (KIP-447).
///
/// A shard's metadata is that of a moment at which the shard was surely ours. Once the group gives the shard to another member it has
/// moved on to a later generation, and the broker takes no offsets, and so no transaction, under the old one.
#[derive(Debug, Default)]
pub struct Membership(Mutex<Held>);

#[derive(Default)]
struct Held {
    group: Option<Arc<str>>,
    at: HashMap<TopicPartition, ShardId>,
    /// Which of those are ours under which metadata.
    shards: HashMap<ShardId, Arc<Metadata>>,
    looked: Option<Instant>,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held")
            .field("group", &self.group)
            .field("shards", &self.at.len())
            .finish_non_exhaustive()
    }
}

/// A generation of the group as one of its members.
pub(crate) struct Metadata(pub(crate) ConsumerGroupMetadata);

impl std::fmt::Debug for Metadata {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metadata(..)")
    }
}

impl Membership {
    /// The group, once its relay has joined it.
    pub fn group(&self) -> Option<Arc<str>> {
        self.0.lock().group.clone()
    }

    /// The generation under which `shard` is ours; none if it is not.
    pub(crate) fn of(&self, shard: &str) -> Option<Arc<Metadata>> {
        self.0.lock().shards.get(shard).cloned()
    }

    /// The relay has joined `group`.
    pub(super) fn joined(&self, group: &str) {
        *self.0.lock() = Held { group: Some(group.into()), ..Held::default() };
    }

    /// The group gave us `partitions` of the cluster with id `cluster`.
    pub(super) fn take(
        &self,
        consumer: &BaseConsumer<Context>,
        cluster: &str,
        partitions: &[TopicPartition],
    ) {
        let mut held = self.0.lock();
        held.at.extend(partitions.iter().map(|at| (at.clone(), at.shard(cluster))));
        held.look(consumer);
    }

    /// The group takes `partitions` back: from here on nothing of theirs is written by us.
    pub(super) fn give_back(&self, partitions: &[TopicPartition]) {
        let mut held = self.0.lock();
        for at in partitions {
            if let Some(shard) = held.at.remove(at) {
                held.shards.remove(&shard);
            }
        }
    }

    /// The relay leaves the group.
    pub(super) fn left(&self) {
        *self.0.lock() = Held::default();
    }

    /// To be called often: looks the generation up where that is due.
    pub(super) fn refresh(&self, consumer: &BaseConsumer<Context>) {
        let mut held = self.0.lock();
        if !held.at.is_empty() && held.looked.is_none_or(|looked| looked.elapsed() >= EVERY) {
            held.look(consumer);
        }
    }
}

impl Held {
    /// Called by the thread that answers rebalances, and by no other: while it looks, no partition can be given to another member,
    /// unless we were put out of the group.
    fn look(&mut self, consumer: &BaseConsumer<Context>) {
        self.looked = Some(Instant::now());
        let Some(metadata) = consumer.group_metadata() else { return };
        // Asked after the metadata. A member that was put out has metadata without a generation, which a broker takes from anybody:
        // its assignment counts as lost from then on, until this thread has answered.
        if consumer.assignment_lost() {
            self.shards.clear();
            return;
        }
        let metadata = Arc::new(Metadata(metadata));
        self.shards = self.at.values().map(|shard| (shard.clone(), metadata.clone())).collect();
    }
}
