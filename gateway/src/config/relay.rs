//! `[routes.NAME.kafka]`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use toml::de::DeValue;

use super::read::{Item, Section, days, ms, secs};
use crate::naming::TIME_BOUNDS_MS;

/// A relay: which topics are read, as which member of which group.
#[derive(Clone)]
pub struct RelayConfig {
    /// `host:port`, comma-separated.
    pub brokers: String,
    /// Topic names.
    pub topics: Vec<String>,
    /// The consumer group.
    pub group: String,
    /// This instance's fixed name in the group (static membership).
    pub instance: Option<String>,
    /// Which records of transactions are seen.
    pub isolation: Isolation,
    /// Where to begin when the sink has no position yet.
    pub start: StartAt,
    /// Bytes of records fetched ahead.
    pub prefetch: u64,
    /// How long a revoked partition may be drained.
    pub drain: Duration,
    /// How often the group's offsets follow.
    pub commit_every: Duration,
    /// How far a partition's event time may be ahead of the slowest one's; none: the route's window.
    pub max_drift: Option<Duration>,
    /// Options of librdkafka by name; may hold passwords.
    pub options: BTreeMap<String, String>,
}

/// Without the options' values.
impl std::fmt::Debug for RelayConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RelayConfig")
            .field("brokers", &self.brokers)
            .field("topics", &self.topics)
            .field("group", &self.group)
            .field("instance", &self.instance)
            .field("isolation", &self.isolation)
            .field("start", &self.start)
            .field("options", &self.options.keys().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

/// Which records of transactions are seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isolation {
    /// Only those of committed transactions.
    ReadCommitted,
    /// All, also of aborted transactions.
    ReadUncommitted,
}

/// Where a relay without a position begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StartAt {
    /// At the first record of the log.
    Earliest,
    /// After the last record that is there.
    Latest,
    /// At the first record that is not older, ms since the epoch.
    Time(i64),
}

#[cfg(feature = "kafka")]
impl RelayConfig {
    /// For the Kafka source; `idle_after` as the route says.
    pub fn kafka(&self, idle_after: Duration) -> adapters::kafka::KafkaConfig {
        adapters::kafka::KafkaConfig {
            brokers: self.brokers.clone(),
            topics: self.topics.clone(),
            group: self.group.clone(),
            instance: self.instance.clone(),
            isolation: match self.isolation {
                Isolation::ReadCommitted => adapters::kafka::Isolation::ReadCommitted,
                Isolation::ReadUncommitted => adapters::kafka::Isolation::ReadUncommitted,
            },
            prefetch_bytes: self.prefetch,
            // A broker that is cut off is noticed before its partitions count as idle.
            figures_every: (idle_after / 3).clamp(Duration::from_millis(500), Duration::from_secs(5)),
            options: self.options.clone(),
            membership: None,
        }
    }

    /// For the Kafka door; `skip_gaps`, `scope`, `window_ms` and `needs` as the route says.
    pub fn relay(
        &self,
        skip_gaps: bool,
        scope: crate::door::kafka::Scope,
        window_ms: i64,
        needs: adapters::kafka::SourceNeeds,
    ) -> crate::door::kafka::RelayOptions {
        use crate::door::kafka::{Gap, RelayOptions, Start};
        RelayOptions {
            start: match self.start {
                StartAt::Earliest => Start::Earliest,
                StartAt::Latest => Start::Latest,
                StartAt::Time(ms) => Start::Time(ms),
            },
            gap: if skip_gaps { Gap::Skip } else { Gap::Stop },
            scope,
            drain: self.drain,
            commit_every: self.commit_every,
            max_drift: self.max_drift.unwrap_or(Duration::from_millis(window_ms.max(0).cast_unsigned())),
            needs,
            ..RelayOptions::default()
        }
    }
}

pub(super) fn relay(section: Section<'_, '_>) -> Option<RelayConfig> {
    if !cfg!(feature = "kafka") {
        section.fault("this build leaves Kafka out", "build with the feature `kafka`");
    }
    let brokers = section.required("brokers", "\"HOST:9092\"").and_then(|item| match item.value {
        DeValue::Array(_) => Some(item.texts().join(",")),
        _ => item.text(),
    });
    let topics = section.required("topics", "[\"NAME\"]").map(|item| item.texts());
    let group = section.required("group", "\"NAME\"").and_then(|item| item.text());
    let instance = section.text("instance");
    let isolations =
        [("read_committed", Isolation::ReadCommitted), ("read_uncommitted", Isolation::ReadUncommitted)];
    let isolation = section.choice("isolation", &isolations, Isolation::ReadCommitted);
    let start = section.item("start").and_then(|item| start(&item)).unwrap_or(StartAt::Earliest);
    let prefetch = section.size("prefetch", 1 << 20..=16 << 30, 64 << 20);
    let drain = section.duration("drain", ms(0)..=secs(3600), secs(20));
    let commit_every = section.duration("commit_every", ms(10)..=secs(600), secs(1));
    let max_drift = section.item("max_drift").and_then(|item| item.duration(secs(1)..=days(366)));
    let session_timeout = section.item("session_timeout").and_then(|item| item.duration(ms(100)..=days(1)));
    let mut options = BTreeMap::new();
    if let Some(section) = section.section("options") {
        section.secret();
        gather(&section, "", &mut options);
    }
    if let Some(timeout) = session_timeout {
        // The group's protocol wants a heartbeat well within the time-out.
        let timeout = timeout.as_millis();
        options.entry("session.timeout.ms".to_owned()).or_insert_with(|| timeout.to_string());
        options.entry("heartbeat.interval.ms".to_owned()).or_insert_with(|| (timeout / 3).max(1).to_string());
    }
    let config = RelayConfig {
        brokers: brokers?,
        topics: topics?,
        group: group?,
        instance,
        isolation,
        start,
        prefetch,
        drain,
        commit_every,
        max_drift,
        options,
    };
    #[cfg(feature = "kafka")]
    for fault in config.kafka(secs(30)).check() {
        let key = format!("{}.{}", section.path, fault.name);
        section.reader.note(&section.span, &key, None, fault.reason, None, "correct or remove it");
    }
    section.close();
    Some(config)
}

/// Notes relays of one file that would take each other's place in a group.
pub(super) fn together(relays: &[(Item<'_, '_>, RelayConfig)]) {
    for (at, one) in relays.iter().enumerate() {
        for other in &relays[..at] {
            let (first, second) =
                if one.0.span.start < other.0.span.start { (one, other) } else { (other, one) };
            let ((first, a), (second, b)) = (first, second);
            if a.group != b.group || !one_cluster(&a.brokers, &b.brokers) {
                continue;
            }
            let group = format!("group {:?} on the same cluster as {}", b.group, first.path);
            if let Some(instance) = b.instance.as_ref().filter(|_| a.instance == b.instance) {
                second.fault(
                    format!(
                        "has instance {instance:?} in {group}: they would be one member, and each fence the other"
                    ),
                    "give each relay a `group` of its own",
                );
            } else if let Some(topic) = b.topics.iter().find(|topic| a.topics.contains(topic)) {
                second.fault(
                    format!(
                        "reads topic {topic:?} in {group}: each would get only a part of its partitions, and not the other's"
                    ),
                    "give each relay a `group` of its own",
                );
            }
        }
    }
}

/// Whether two lists of brokers name a broker in common. Lists that share none may still lead to one cluster: that cannot be told
/// from here.
fn one_cluster(a: &str, b: &str) -> bool {
    let brokers = |list: &str| -> BTreeSet<String> {
        let named = list.split(',').map(str::trim).filter(|broker| !broker.is_empty());
        let plain = |broker: &str| {
            let address = broker.rsplit("://").next().unwrap_or(broker).to_ascii_lowercase();
            let port = address.rsplit(':').next().is_some_and(|port| port.parse::<u16>().is_ok());
            if port { address } else { format!("{address}:9092") }
        };
        named.map(plain).collect()
    };
    !brokers(a).is_disjoint(&brokers(b))
}

/// Options by their dotted names, whether quoted or not.
pub(super) fn gather(section: &Section<'_, '_>, prefix: &str, options: &mut BTreeMap<String, String>) {
    for (key, item) in section.items() {
        let name = format!("{prefix}{key}");
        let value = match item.value {
            DeValue::Table(_) => {
                if let Some(inner) = item.section() {
                    inner.secret();
                    gather(&inner, &format!("{name}."), options);
                }
                continue;
            }
            DeValue::Boolean(flag) => Some(flag.to_string()),
            DeValue::Integer(_) => item.integer(i64::MIN..=i64::MAX).map(|number| number.to_string()),
            _ => item.text_as("a string, a whole number, true or false"),
        };
        if let Some(value) = value {
            options.insert(name, value);
        }
    }
}

fn start(item: &Item<'_, '_>) -> Option<StartAt> {
    let text = match item.value {
        DeValue::Datetime(time) => time.to_string(),
        _ => item.text_as("\"earliest\", \"latest\" or a time")?,
    };
    match text.as_str() {
        "earliest" => return Some(StartAt::Earliest),
        "latest" => return Some(StartAt::Latest),
        _ => {}
    }
    let time = text.parse::<jiff::Timestamp>().ok().map(|time| time.as_millisecond());
    let time = time.filter(|ms| TIME_BOUNDS_MS.contains(ms) && *ms >= 0);
    if time.is_none() {
        item.fault(
            "is neither \"earliest\" nor \"latest\" nor a time since 1970",
            "write a time as \"2026-01-31T00:00:00Z\"",
        );
    }
    time.map(StartAt::Time)
}
