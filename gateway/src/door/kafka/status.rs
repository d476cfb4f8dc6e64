//! How a relay stands: for `/readyz`, metrics and logs.

use adapters::{kafka::TopicPartition, sink::ShardId};

/// What the relay is about.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Phase {
    /// Not in touch with the brokers yet.
    #[default]
    Connecting,
    /// A member of its group.
    Running,
    /// Draining what it holds.
    Leaving,
    /// Ended; with the reason if it was not asked to.
    Ended(Option<String>),
}

/// A relay at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RelayStatus {
    /// See [`Phase`].
    pub phase: Phase,
    /// What does not work at the moment.
    pub trouble: Option<String>,
    /// The partitions that the group gave us.
    pub partitions: Vec<PartitionStatus>,
    /// The topics.
    pub topics: Vec<TopicStatus>,
    /// What of topics and group did not fit when the relay joined, each with its remedy.
    pub misfits: Vec<String>,
    /// Records read since the start, those read again included.
    pub records: u64,
    /// Offsets passed over because they were gone (`gap = "skip"`).
    pub skipped: u64,
    /// Times that a lane took no more and its partitions had to wait.
    pub waits: u64,
    /// Times that a partition whose event time was far ahead had to wait for the others.
    pub drifts: u64,
}

/// One topic of a relay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TopicStatus {
    /// Its name.
    pub topic: String,
    /// Its partitions, as last seen.
    pub partitions: i64,
    /// How many it had before, if that has changed since the sink was last told (P13).
    pub before: Option<i64>,
}

/// One partition of a relay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PartitionStatus {
    /// Which.
    pub at: TopicPartition,
    /// Its shard.
    pub shard: ShardId,
    /// `acquiring`, `placing`, `proving`, `reading`, `waiting` (for others), `stopped` or `leaving`.
    pub state: &'static str,
    /// Why it does not read.
    pub reason: Option<String>,
    /// Everything below has its outcome, durably.
    pub position: Option<i64>,
    /// Next offset to read.
    pub next: i64,
    /// One past the last record that can be read, as of the last fetches.
    pub end: Option<i64>,
}

impl PartitionStatus {
    /// Records between the end of the log and the position.
    pub fn lag(&self) -> Option<i64> {
        Some((self.end? - self.position.unwrap_or(self.next)).max(0))
    }
}

impl RelayStatus {
    /// None if ready, else why not: for `/readyz`.
    pub fn not_ready(&self) -> Option<String> {
        match &self.phase {
            Phase::Connecting => {
                return Some(self.trouble.clone().unwrap_or_else(|| "connecting to Kafka".to_owned()));
            }
            Phase::Ended(reason) => {
                return Some(reason.clone().unwrap_or_else(|| "the relay has stopped".to_owned()));
            }
            Phase::Leaving => return Some("the relay is stopping".to_owned()),
            Phase::Running => {}
        }
        let stuck = self.partitions.iter().find(|partition| partition.reason.is_some());
        stuck.map(|partition| partition.reason.clone().unwrap_or_default()).or_else(|| self.trouble.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partition(reason: Option<&str>) -> PartitionStatus {
        PartitionStatus {
            at: TopicPartition::new("t", 0),
            shard: "kafka/c/t/0".into(),
            state: "reading",
            reason: reason.map(str::to_owned),
            position: Some(7),
            next: 9,
            end: Some(10),
        }
    }

    #[test]
    fn a_stopped_partition_makes_the_relay_not_ready() {
        let running = RelayStatus { phase: Phase::Running, ..RelayStatus::default() };
        assert_eq!(running.not_ready(), None);
        let reading = RelayStatus { partitions: vec![partition(None)], ..running.clone() };
        assert_eq!(reading.not_ready(), None);
        let stopped = RelayStatus { partitions: vec![partition(None), partition(Some("gap"))], ..running };
        assert_eq!(stopped.not_ready().as_deref(), Some("gap"));
        assert!(RelayStatus::default().not_ready().is_some());
    }

    #[test]
    fn lag_counts_from_the_durable_position() {
        assert_eq!(partition(None).lag(), Some(3));
        assert_eq!(PartitionStatus { position: None, ..partition(None) }.lag(), Some(1));
        assert_eq!(PartitionStatus { end: None, ..partition(None) }.lag(), None);
    }
}
