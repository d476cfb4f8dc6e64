use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rdkafka::{ClientConfig, config::RDKafkaLogLevel};

use super::{KafkaFault, Membership};

/// Which records of transactions are seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Isolation {
    /// Only those of committed transactions.
    #[default]
    ReadCommitted,
    /// All, also of aborted transactions.
    ReadUncommitted,
}

/// A consumer group and what it reads.
#[derive(Clone, Debug)]
pub struct KafkaConfig {
    /// `host:port`, comma-separated.
    pub brokers: String,
    /// Topic names; no patterns.
    pub topics: Vec<String>,
    /// The consumer group.
    pub group: String,
    /// This instance's fixed name in the group (static membership): unique among the running instances, the same after a restart.
    pub instance: Option<String>,
    /// See [`Isolation`].
    pub isolation: Isolation,
    /// Bytes of records fetched ahead, over all partitions; each partition may hold 1 MiB in any case.
    pub prefetch_bytes: u64,
    /// How often the client library says its figures; well below the time after which a partition counts as idle.
    pub figures_every: Duration,
    /// Options of librdkafka by name, passed on as they are; see [`KafkaConfig::check`] for what is refused.
    pub options: BTreeMap<String, String>,
    /// Told which partitions the group gave us, for a sink that fences by it.
    pub membership: Option<Arc<Membership>>,
}

/// An option that cannot be taken.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{name:?}: {reason}")]
pub struct RefusedOption {
    /// Its name.
    pub name: String,
    /// Why, and what to use.
    pub reason: String,
}

/// Options that would break what a relay promises, or that have a setting of their own.
const REFUSED: [(&str, &str); 19] = [
    ("allow.auto.create.topics", "a relay makes no topics: make the topic first"),
    ("auto.commit.enable", "offsets follow the sink; they are never committed by a timer"),
    ("auto.offset.reset", "a relay never jumps silently; use `start` and `gap`"),
    ("bootstrap.servers", "use `brokers`"),
    ("check.crcs", "what arrives damaged is never taken for a record"),
    ("consume.callback.max.messages", "it has no meaning here"),
    ("enable.auto.commit", "offsets follow the sink; they are never committed by a timer"),
    ("enable.auto.offset.store", "offsets follow the sink; they are never stored by reading"),
    (
        "enable.partition.eof",
        "the relay needs it, to tell an idle partition from one whose records do not come",
    ),
    ("group.id", "use `group`"),
    ("group.instance.id", "use `instance`"),
    ("isolation.level", "use `isolation`"),
    ("log.queue", "it has no meaning here"),
    ("metadata.broker.list", "use `brokers`"),
    ("offset.store.method", "positions are kept by the sink"),
    ("offset.store.path", "positions are kept by the sink"),
    ("plugin.library.paths", "code from outside is not loaded into the relay"),
    ("statistics.interval.ms", "the relay reads the figures: lag, ends, and the number of partitions"),
    ("topic.blacklist", "name the topics in `topics`"),
];

const SESSION: &str = "session.timeout.ms";
const HEARTBEAT: &str = "heartbeat.interval.ms";
/// A killed process is replaced after 6 s, not after the default of 45 s.
const DEFAULT_SESSION_MS: u64 = 6000;
const SESSION_MS: std::ops::RangeInclusive<u64> = 500..=600_000;
const DEBUG: &str = "debug";
const METADATA: &str = "metadata";
const MAX_POLL_INTERVAL: &str = "max.poll.interval.ms";
const DEFAULT_MAX_POLL_INTERVAL_MS: u64 = 300_000;
/// The client library's default.
const FETCH_WAIT: Duration = Duration::from_millis(500);
const SILENCE_MARGIN: Duration = Duration::from_millis(500);
const LONGEST_SILENCE: Duration = Duration::from_secs(3);
const MIN_PREFETCH_KIB: u64 = 1024;

impl KafkaConfig {
    /// Reads `topics` of the cluster at `brokers` as a member of `group`, all else as by default.
    pub fn new(brokers: &str, topics: &[&str], group: &str) -> Self {
        Self {
            brokers: brokers.to_owned(),
            topics: topics.iter().map(|&topic| topic.to_owned()).collect(),
            group: group.to_owned(),
            instance: None,
            isolation: Isolation::ReadCommitted,
            prefetch_bytes: 64 << 20,
            figures_every: Duration::from_secs(5),
            options: BTreeMap::new(),
            membership: None,
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
        if self.group.is_empty() {
            refuse("group", "is empty: name the consumer group".to_owned());
        }
        if self.topics.is_empty() {
            refuse("topics", "is empty: name at least one topic".to_owned());
        }
        for (index, topic) in self.topics.iter().enumerate() {
            if let Some(reason) = topic_fault(topic) {
                refuse("topics", format!("{topic:?} {reason}"));
            }
            if self.topics[..index].contains(topic) {
                refuse("topics", format!("{topic:?} is named twice"));
            }
        }
        for (name, value) in &self.options {
            if let Ok(at) = REFUSED.binary_search_by_key(&name.as_str(), |(name, _)| name) {
                refuse(name, format!("is not passed on: {}", REFUSED[at].1));
            } else if let Some(reason) = needs_tls(name, value) {
                refuse(name, reason);
            } else if let Err(fault) = ClientConfig::new().set(name, value).create_native_config() {
                refuse(name, client_fault(&fault));
            }
        }
        if let Some((name, reason)) = self.session_fault() {
            faults.push(RefusedOption { name: name.to_owned(), reason });
        }
        if faults.is_empty()
            && let Err(fault) = self.client(1).create_native_config()
        {
            faults.push(RefusedOption { name: "options".to_owned(), reason: client_fault(&fault) });
        }
        faults
    }

    /// Times of the group's session with which no member could stay, or none would ever be missed.
    fn session_fault(&self) -> Option<(&'static str, String)> {
        let given = |name: &str| self.options.get(name).and_then(|value| value.trim().parse::<u64>().ok());
        let session = given(SESSION);
        if let Some(session) = session.filter(|ms| !SESSION_MS.contains(ms)) {
            return Some((
                SESSION,
                format!(
                    "is {session}, and must be from {} to {} ms: below, a short pause puts the member out; above, a dead one holds its \
                     partitions for too long",
                    SESSION_MS.start(),
                    SESSION_MS.end()
                ),
            ));
        }
        let (heartbeat, session) = (given(HEARTBEAT)?, session.unwrap_or(DEFAULT_SESSION_MS));
        (heartbeat.saturating_mul(2) > session).then(|| {
            (HEARTBEAT, format!("is {heartbeat}, and must be at most half of {SESSION} ({session}): one lost heartbeat would put the member out"))
        })
    }

    /// A member that does not poll for so long is put out of the group.
    pub fn max_poll_interval(&self) -> Duration {
        let given = self.options.get(MAX_POLL_INTERVAL).and_then(|value| value.trim().parse().ok());
        Duration::from_millis(given.unwrap_or(DEFAULT_MAX_POLL_INTERVAL_MS))
    }

    /// A broker that is asked for more answers well within this, if only that there is none.
    pub(super) fn silence(&self) -> Duration {
        let given =
            ["fetch.wait.max.ms", "fetch.max.wait.ms"].iter().find_map(|name| self.options.get(*name));
        let wait =
            given.and_then(|value| value.trim().parse().ok()).map_or(FETCH_WAIT, Duration::from_millis);
        (wait + SILENCE_MARGIN).max(self.figures_every.min(LONGEST_SILENCE))
    }

    /// The group member that reads `partitions` partitions in all.
    pub(super) fn client(&self, partitions: usize) -> ClientConfig {
        let mut config = self.probe();
        let kib = (self.prefetch_bytes >> 10) / partitions.max(1) as u64;
        config
            .set("group.id", &self.group)
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "error")
            // A partition that has been read to its end is told from one whose records do not come.
            .set("enable.partition.eof", "true")
            .set("max.poll.interval.ms", DEFAULT_MAX_POLL_INTERVAL_MS.to_string())
            .set("queued.max.messages.kbytes", kib.clamp(MIN_PREFETCH_KIB, 2_097_151).to_string())
            // Asked again soon after the queue has drained a little: the default of a second starves a fast reader.
            .set("fetch.queue.backoff.ms", "10")
            .set("check.crcs", "true")
            .set("statistics.interval.ms", self.figures_every.as_millis().max(1).to_string());
        if self.options.get("group.protocol").is_none_or(|protocol| protocol == "classic") {
            config
                .set(SESSION, DEFAULT_SESSION_MS.to_string())
                .set(HEARTBEAT, "2000")
                .set("partition.assignment.strategy", "cooperative-sticky");
        }
        if let Some(instance) = &self.instance {
            config.set("group.instance.id", instance);
        }
        for (name, value) in self.options.iter().filter(|(name, _)| *name != DEBUG) {
            config.set(name, value);
        }
        config
    }

    /// Whether somebody asked for what the client library says.
    pub(super) fn debugs(&self) -> bool {
        self.options.contains_key(DEBUG)
    }

    /// A client that only asks questions; no member of the group.
    pub(super) fn probe(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        // The client library says a topic's id nowhere but there (`Context::log`).
        let debug = self.options.get(DEBUG).map_or(METADATA.to_owned(), |own| format!("{own},{METADATA}"));
        config.set_log_level(RDKafkaLogLevel::Debug).set(DEBUG, debug);
        config
            .set("bootstrap.servers", &self.brokers)
            .set("client.id", "oncegate")
            // A broker that returns is seen soon.
            .set("reconnect.backoff.max.ms", "2000");
        config.set(
            "isolation.level",
            match self.isolation {
                Isolation::ReadCommitted => "read_committed",
                Isolation::ReadUncommitted => "read_uncommitted",
            },
        );
        for (name, value) in &self.options {
            // How to connect and who we are; what concerns the group needs a `group.id`.
            let connects =
                ["security.", "sasl.", "ssl.", "socket.", "broker.", "client.", "enable.ssl", "reconnect."];
            if connects.iter().any(|prefix| name.starts_with(prefix)) {
                config.set(name, value);
            }
        }
        config
    }
}

/// Whether an option asks for what only OpenSSL brings, in a build without it; no value but names of protocols is shown.
fn needs_tls(name: &str, value: &str) -> Option<String> {
    if cfg!(feature = "kafka-tls") {
        return None;
    }
    let value = value.trim().to_ascii_uppercase();
    let asks = match name {
        "security.protocol" => value == "SSL" || value == "SASL_SSL",
        "sasl.mechanism" | "sasl.mechanisms" => value.starts_with("SCRAM-") || value == "OAUTHBEARER",
        other => other.starts_with("ssl.") || other.starts_with("enable.ssl"),
    };
    asks.then(|| {
        "needs TLS, which this build leaves out (SCRAM comes with it): build with the feature `kafka-tls` (needs OpenSSL's headers)".to_owned()
    })
}

pub(crate) fn topic_fault(topic: &str) -> Option<&'static str> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    match topic {
        "" => Some("is empty"),
        pattern if pattern.starts_with('^') => Some("is a pattern: name each topic"),
        "." | ".." => Some("is no topic name"),
        long if long.len() > 249 => Some("is longer than 249 characters"),
        other if !other.bytes().all(legal) => {
            Some("holds other characters than letters, digits, `.`, `_` and `-`")
        }
        _ => None,
    }
}

/// The library's words for a configuration that it does not take, without the value (it may be a password).
pub(crate) fn client_fault(fault: &rdkafka::error::KafkaError) -> String {
    match fault {
        rdkafka::error::KafkaError::ClientConfig(_, reason, name, value) => {
            let reason =
                if value.is_empty() { reason.clone() } else { reason.replace(value.as_str(), "***") };
            if name.is_empty() { reason } else { format!("{name}: {reason}") }
        }
        other => other.to_string(),
    }
}

impl From<&rdkafka::error::KafkaError> for KafkaFault {
    fn from(fault: &rdkafka::error::KafkaError) -> Self {
        use rdkafka::error::KafkaError;
        match fault {
            KafkaError::ClientConfig(..) | KafkaError::ClientCreation(_) => {
                Self::Configuration(client_fault(fault))
            }
            other => Self::Unavailable(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(options: &[(&str, &str)]) -> KafkaConfig {
        let options = options.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        KafkaConfig { options, ..KafkaConfig::new("127.0.0.1:9092", &["orders"], "g") }
    }

    fn names(config: &KafkaConfig) -> Vec<String> {
        config.check().into_iter().map(|fault| fault.name).collect()
    }

    #[test]
    fn options_that_break_the_guarantee_are_refused_by_name() {
        assert!(REFUSED.is_sorted());
        for (name, _) in REFUSED {
            assert_eq!(names(&config(&[(name, "x")])), [name]);
        }
    }

    #[test]
    fn what_needs_tls_names_the_feature_that_brings_it_and_shows_no_secret() {
        for (name, value) in [
            ("security.protocol", "SASL_SSL"),
            ("security.protocol", "ssl"),
            ("sasl.mechanisms", "SCRAM-SHA-512"),
            ("ssl.key.password", "hunter2"),
            ("ssl.ca.location", "/etc/ca.pem"),
        ] {
            let faults = config(&[(name, value)]).check();
            if cfg!(feature = "kafka-tls") {
                assert!(faults.iter().all(|fault| !fault.reason.contains("kafka-tls")), "{faults:?}");
            } else {
                assert_eq!(faults.len(), 1, "{faults:?}");
                assert_eq!(faults[0].name, name);
                assert!(faults[0].reason.contains("feature `kafka-tls`"), "{faults:?}");
            }
            assert!(!format!("{faults:?}").contains("hunter2"), "{faults:?}");
        }
        let plain = [
            ("security.protocol", "SASL_PLAINTEXT"),
            ("sasl.mechanisms", "PLAIN"),
            ("sasl.username", "u"),
            ("sasl.password", "p"),
        ];
        assert_eq!(config(&plain).check(), []);
    }

    #[test]
    fn a_session_that_cannot_work_is_refused() {
        for (name, value) in [
            ("session.timeout.ms", "100"),
            ("session.timeout.ms", "3600000"),
            ("heartbeat.interval.ms", "5000"),
        ] {
            assert_eq!(names(&config(&[(name, value)])), [name], "{value}");
        }
        assert_eq!(config(&[("session.timeout.ms", "12000"), ("heartbeat.interval.ms", "6000")]).check(), []);
    }

    #[test]
    fn other_options_are_passed_on() {
        let config = config(&[
            ("fetch.wait.max.ms", "7"),
            ("security.protocol", "plaintext"),
            ("max.poll.interval.ms", "60000"),
        ]);
        assert_eq!(config.check(), []);
        assert_eq!(config.client(4).get("fetch.wait.max.ms"), Some("7"));
        assert_eq!(config.probe().get("security.protocol"), Some("plaintext"));
        assert_eq!(config.max_poll_interval(), Duration::from_secs(60));
        assert_eq!(config.client(4).get("isolation.level"), Some("read_committed"));
    }

    #[test]
    fn an_unknown_option_or_a_value_out_of_bounds_is_named() {
        let faults =
            config(&[("no.such.option", "1"), ("fetch.wait.max.ms", "x"), ("session.timeout.ms", "-4")])
                .check();
        let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
        assert_eq!(faults.len(), 3, "{faults:?}");
        assert!(faults[0].starts_with("\"fetch.wait.max.ms\""), "{faults:?}");
        assert!(faults[1].starts_with("\"no.such.option\""), "{faults:?}");
        assert!(faults[2].contains("session.timeout.ms"), "{faults:?}");
    }

    #[test]
    fn a_wrong_value_is_not_repeated_in_the_error() {
        let faults = config(&[("fetch.wait.max.ms", "hunter2")]).check();
        assert!(!faults[0].to_string().contains("hunter2"), "{faults:?}");
    }

    #[test]
    fn topics_are_named_not_matched() {
        let check = |topics: &[&str]| KafkaConfig::new("b:1", topics, "g").check().len();
        assert_eq!(check(&["orders", "a.b_c-9"]), 0);
        assert_eq!(check(&[]), 1);
        assert_eq!(check(&["^orders.*", "a/b", "", "..", "orders", "orders"]), 5);
        assert_eq!(check(&["x".repeat(250).as_str()]), 1);
    }

    #[test]
    fn prefetch_is_shared_by_the_partitions_and_has_a_least_size() {
        let kib =
            |partitions| config(&[]).client(partitions).get("queued.max.messages.kbytes").map(str::to_owned);
        assert_eq!(kib(4).as_deref(), Some("16384"));
        assert_eq!(kib(1000).as_deref(), Some("1024"));
    }

    #[test]
    fn the_newer_group_protocol_takes_no_classic_settings() {
        let config = config(&[("group.protocol", "consumer")]);
        assert_eq!(config.check(), []);
        assert_eq!(config.client(1).get("session.timeout.ms"), None);
    }
}
