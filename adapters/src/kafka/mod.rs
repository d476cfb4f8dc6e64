//! Kafka: [`KafkaSource`] reads partitions as a member of a consumer group, [`DeadLetterTopic`] keeps dead letters.
//!
//! The group's committed offsets are never the truth here: a partition is read from where its reader is told to
//! ([`KafkaSource::read_from`]), and commits only follow, for lag monitors and to prove the group's generation (P13).

use std::{fmt, sync::Arc};

use crate::sink::ShardId;

mod config;
mod context;
mod dead_letters;
mod membership;
mod probe;
mod reader;
mod source;

pub use config::{Isolation, KafkaConfig, RefusedOption};
pub(crate) use config::{client_fault, topic_fault};
pub(crate) use context::readable;
pub use context::{CommitRefusal, Event};
pub use dead_letters::DeadLetterTopic;
pub use membership::Membership;
pub(crate) use membership::Metadata;
pub use probe::{SourceNeeds, misfits};
pub use reader::{ReadFault, Reader, SourceRecord};
pub use source::{Commit, KafkaSource};

/// One partition of a topic.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TopicPartition {
    /// Topic name.
    pub topic: Arc<str>,
    /// Partition number.
    pub partition: i32,
}

impl TopicPartition {
    /// Of `topic`.
    pub fn new(topic: &str, partition: i32) -> Self {
        Self { topic: Arc::from(topic), partition }
    }

    /// The shard of this partition in the cluster with id `cluster` (P3).
    ///
    /// The topic is named, not identified: the name stays the same where the id is not known. The id is kept with the shard
    /// ([`KafkaSource::topic_ids`], `Session::keep_sources`), so that a topic that was deleted and made again is told from the old one.
    pub fn shard(&self, cluster: &str) -> ShardId {
        Arc::from(format!("kafka/{cluster}/{}/{}", self.topic, self.partition))
    }
}

/// `topic/partition`.
impl fmt::Display for TopicPartition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.partition)
    }
}

/// Why Kafka cannot be read or written. Says what to do where something can be done.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KafkaFault {
    /// The client library does not take the configuration. Trying again does not help.
    #[error("kafka configuration: {0}")]
    Configuration(String),
    /// No answer, or one that may be another the next time.
    #[error("kafka: {0}")]
    Unavailable(String),
    /// A topic of the route does not exist.
    #[error("topic {0:?} does not exist in this cluster: make it, or correct `topics`")]
    NoTopic(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p3_a_shard_names_cluster_topic_and_partition() {
        assert_eq!(
            &*TopicPartition::new("orders", 7).shard("MkU3OEVBNTcwNTJENDM2Qk"),
            "kafka/MkU3OEVBNTcwNTJENDM2Qk/orders/7"
        );
    }
}
