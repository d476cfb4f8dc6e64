//! What names a Kafka target and how its records are made.

use std::{collections::BTreeMap, time::Duration};

use rdkafka::ClientConfig;

use crate::{
    kafka::{RefusedOption, client_fault, topic_fault},
    sink::Mode,
};

/// How long one question to a broker may take.
pub(super) const ANSWER: Duration = Duration::from_secs(5);

/// Where a record's key comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyFrom {
    /// As it came; none if it did not come from Kafka.
    Source,
    /// The row key.
    RowKey,
    /// No key.
    None,
}

/// Where a record's headers come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadersFrom {
    /// As they came; none if it did not come from Kafka.
    Source,
    /// No headers.
    None,
}

/// How a record's partition is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PartitionFrom {
    /// The number it came from; by the key if it did not come from Kafka.
    Source,
    /// By the key, as Java producers do; spread if there is none.
    Key,
}

/// Where a record's timestamp comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimestampFrom {
    /// As it came; the time of writing if it did not come from Kafka.
    Source,
    /// Its event time.
    Event,
    /// The time of writing.
    Now,
}

/// A topic as a target.
#[derive(Clone, PartialEq, Eq)]
pub struct KafkaSinkConfig {
    /// `host:port`, comma-separated.
    pub brokers: String,
    /// The topic that records are appended to. It must exist.
    pub topic: String,
    /// `Insert` or `Upsert`.
    pub mode: Mode,
    /// The row key's members; needed for `Upsert` and for [`KeyFrom::RowKey`].
    pub row_key: Vec<String>,
    /// Holds marks and ownership; `oncegate-marks-<route>` if none. Made if it is missing.
    pub marks_topic: Option<String>,
    /// How many partitions it gets when it is made.
    pub marks_partitions: i32,
    /// Holds dead letters; `oncegate-dead-letters-<route>` if none. Made when the first one is written, if it is missing.
    pub dead_letters_topic: Option<String>,
    /// Replicas of the topics that are made; the broker's default if none.
    pub replication: Option<i32>,
    /// An open transaction is aborted by the broker after so long.
    pub transaction_timeout: Duration,
    /// How long marks have to be kept: the route's window and lateness.
    pub keep: Duration,
    /// See [`KeyFrom`].
    pub key: KeyFrom,
    /// See [`HeadersFrom`].
    pub headers: HeadersFrom,
    /// See [`PartitionFrom`].
    pub partition: PartitionFrom,
    /// See [`TimestampFrom`].
    pub timestamp: TimestampFrom,
    /// Adds the headers `oncegate-key` (the fingerprint in hex digits) and `oncegate-outcome`.
    pub add_headers: bool,
    /// Options of librdkafka by name, passed on as they are; see [`KafkaSinkConfig::check`] for what is refused.
    pub options: BTreeMap<String, String>,
}

/// Without the options' values.
impl std::fmt::Debug for KafkaSinkConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaSinkConfig")
            .field("brokers", &self.brokers)
            .field("topic", &self.topic)
            .field("mode", &self.mode)
            .field("row_key", &self.row_key)
            .field("marks_topic", &self.marks_topic)
            .field("options", &self.options.keys().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

/// Options that would break what the sink promises, or that have a setting of their own.
const REFUSED: [(&str, &str); 21] = [
    ("acks", "a batch is acknowledged by all in-sync replicas"),
    ("allow.auto.create.topics", "topics are made with the settings that they need, or not at all"),
    ("auto.offset.reset", "marks are read from where they are needed"),
    ("bootstrap.servers", "use `brokers`"),
    ("client.rack", "marks are read from the leader: only it knows where they end"),
    ("delivery.report.only.error", "each record's delivery is waited for"),
    ("delivery.timeout.ms", "use `transaction_timeout`"),
    ("enable.auto.commit", "offsets go into the batch's transaction"),
    ("enable.gapless.guarantee", "it would end the producer at the first refused record"),
    ("enable.idempotence", "it is always on"),
    ("enable.partition.eof", "it has no meaning here"),
    ("group.id", "the sink is in no group"),
    ("isolation.level", "marks are read as their take-over needs it"),
    ("log.queue", "it has no meaning here"),
    ("message.timeout.ms", "use `transaction_timeout`"),
    ("metadata.broker.list", "use `brokers`"),
    ("plugin.library.paths", "code from outside is not loaded"),
    ("queuing.strategy", "the order of records is kept"),
    ("request.required.acks", "a batch is acknowledged by all in-sync replicas"),
    ("transaction.timeout.ms", "use `transaction_timeout`"),
    ("transactional.id", "it is made of route, instance and lane, so that a next owner can fence it"),
];

/// How to connect and who we are: for every client. The rest is for the producer.
const CONNECTS: [&str; 8] =
    ["security.", "sasl.", "ssl.", "socket.", "broker.", "client.", "enable.ssl", "reconnect."];

impl KafkaSinkConfig {
    /// Appends to `topic` of the cluster at `brokers`, records as they came, all else as by default.
    pub fn new(brokers: &str, topic: &str) -> Self {
        Self {
            brokers: brokers.to_owned(),
            topic: topic.to_owned(),
            mode: Mode::Insert,
            row_key: Vec::new(),
            marks_topic: None,
            marks_partitions: 12,
            dead_letters_topic: None,
            replication: None,
            transaction_timeout: Duration::from_secs(30),
            keep: Duration::from_secs(25 * 3600),
            key: KeyFrom::Source,
            headers: HeadersFrom::Source,
            partition: PartitionFrom::Source,
            timestamp: TimestampFrom::Source,
            add_headers: false,
            options: BTreeMap::new(),
        }
    }

    /// Everything that cannot be taken, without asking a broker.
    pub fn check(&self) -> Vec<RefusedOption> {
        let mut faults = vec![];
        let mut refuse =
            |name: &str, reason: String| faults.push(RefusedOption { name: name.to_owned(), reason });
        if self.brokers.trim().is_empty() {
            refuse("brokers", "is empty: give host:port, several separated by commas".to_owned());
        }
        let topics = [
            ("topic", Some(&self.topic)),
            ("marks_topic", self.marks_topic.as_ref()),
            ("dead_letters_topic", self.dead_letters_topic.as_ref()),
        ];
        for (at, (name, topic)) in topics.iter().enumerate() {
            let Some(topic) = topic else { continue };
            if let Some(reason) = topic_fault(topic) {
                refuse(name, format!("{topic:?} {reason}"));
            }
            if let Some((other, _)) = topics[..at].iter().find(|(_, other)| *other == Some(topic)) {
                refuse(name, format!("{topic:?} is `{other}` too: their records must not be mixed"));
            }
        }
        for (name, value) in &self.options {
            if let Ok(at) = REFUSED.binary_search_by_key(&name.as_str(), |(name, _)| name) {
                refuse(name, format!("is not passed on: {}", REFUSED[at].1));
            } else if let Err(fault) = ClientConfig::new().set(name, value).create_native_config() {
                refuse(name, client_fault(&fault));
            }
        }
        if faults.is_empty()
            && let Err(fault) = self.producer(&Limits::default()).create_native_config()
        {
            faults.push(RefusedOption { name: "options".to_owned(), reason: client_fault(&fault) });
        }
        faults
    }

    /// A client that only asks questions.
    pub(super) fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &self.brokers)
            .set("client.id", "oncegate-sink")
            .set("allow.auto.create.topics", "false")
            .set("reconnect.backoff.max.ms", "2000");
        for (name, value) in &self.options {
            if CONNECTS.iter().any(|prefix| name.starts_with(prefix)) {
                config.set(name, value);
            }
        }
        config
    }

    /// Reads the marks topic. In no group: the name is one that the client library asks for.
    pub(super) fn reader(&self, isolation: &str) -> ClientConfig {
        let mut config = self.client();
        config
            .set("group.id", "oncegate-marks")
            .set("isolation.level", isolation)
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("enable.partition.eof", "true")
            .set("auto.offset.reset", "earliest")
            .set("check.crcs", "true")
            // At the end of the log the answer is wanted, not what may come.
            .set("fetch.wait.max.ms", "5")
            .set("fetch.error.backoff.ms", "50")
            .set("fetch.queue.backoff.ms", "5")
            .set("queued.max.messages.kbytes", "65536");
        config
    }

    /// An idempotent producer whose records are durable, or reported, within the transaction time-out.
    pub(super) fn producer(&self, limits: &Limits) -> ClientConfig {
        let mut config = self.client();
        let timeout = self.transaction_timeout.as_millis().to_string();
        config
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("message.timeout.ms", &timeout)
            .set("message.max.bytes", "100000000")
            .set("batch.size", limits.batch_bytes().to_string())
            .set("queue.buffering.max.messages", "1000000")
            // As Java producers: the same key goes to the same partition.
            .set("partitioner", "murmur2_random")
            .set("linger.ms", "2");
        for (name, value) in &self.options {
            config.set(name, value);
        }
        config
    }

    /// The producer of batches.
    pub(super) fn transactional(&self, limits: &Limits, id: &str) -> ClientConfig {
        let mut config = self.producer(limits);
        config
            .set("transactional.id", id)
            .set("transaction.timeout.ms", self.transaction_timeout.as_millis().to_string());
        config
    }

    /// The marks topic of `route`.
    pub(super) fn marks_of(&self, route: &str) -> String {
        self.marks_topic.clone().unwrap_or_else(|| format!("oncegate-marks-{route}"))
    }

    /// The dead-letter topic of `route`.
    pub(super) fn letters_of(&self, route: &str) -> String {
        self.dead_letters_topic.clone().unwrap_or_else(|| format!("oncegate-dead-letters-{route}"))
    }
}

/// What the target topic takes, as the probe found it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Limits {
    /// Its `max.message.bytes`.
    pub(super) max_bytes: usize,
    /// It is compacted: a record without a key is refused.
    pub(super) compacted: bool,
    /// How many partitions it has; none if not known.
    pub(super) partitions: Option<i32>,
    /// Timestamps may be so far behind and ahead of the broker's clock, ms; none where it sets them itself.
    pub(super) timestamps: Option<(i64, i64)>,
}

impl Default for Limits {
    /// As brokers come.
    fn default() -> Self {
        Self { max_bytes: 1_048_588, compacted: false, partitions: None, timestamps: None }
    }
}

impl Limits {
    /// Several records go in one request: it may be as large as one record may be.
    fn batch_bytes(&self) -> usize {
        self.max_bytes.saturating_sub(OVERHEAD).clamp(1, 1_000_000)
    }
}

/// What stands around the records of a request.
const OVERHEAD: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    fn config(options: &[(&str, &str)]) -> KafkaSinkConfig {
        let options = options.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        KafkaSinkConfig { options, ..KafkaSinkConfig::new("127.0.0.1:9092", "orders") }
    }

    #[test]
    fn options_that_break_the_guarantee_are_refused_by_name() {
        assert!(REFUSED.is_sorted());
        for (name, _) in REFUSED {
            let faults = config(&[(name, "x")]).check();
            assert!(faults.len() == 1 && faults[0].name == name, "{name}: {faults:?}");
        }
    }

    /// P14: a replica nearby tells an end of the log that is behind the leader's, and marks would be missed.
    #[test]
    fn p14_a_rack_is_refused_for_the_end_of_the_marks_is_asked_of_the_leader() {
        let faults = config(&[("client.rack", "a"), ("client.id", "b")]).check();
        let [fault] = &faults[..] else { panic!("one fault, but: {faults:?}") };
        assert!(fault.name == "client.rack" && fault.reason.contains("leader"), "{fault:?}");
    }

    #[test]
    fn other_options_reach_the_clients_they_are_for() {
        let config =
            config(&[("compression.type", "lz4"), ("security.protocol", "plaintext"), ("linger.ms", "9")]);
        assert_eq!(config.check(), []);
        let producer = config.transactional(&Limits::default(), "t");
        assert_eq!((producer.get("linger.ms"), producer.get("compression.type")), (Some("9"), Some("lz4")));
        assert_eq!(config.reader("read_committed").get("linger.ms"), None);
        assert_eq!(config.client().get("security.protocol"), Some("plaintext"));
    }

    #[test]
    fn topics_must_be_names_and_not_the_same() {
        let mut same = config(&[]);
        same.marks_topic = Some("orders".to_owned());
        same.dead_letters_topic = Some("a/b".to_owned());
        let names: Vec<String> = same.check().into_iter().map(|fault| fault.name).collect();
        assert_eq!(names, ["marks_topic", "dead_letters_topic"]);
    }
}
