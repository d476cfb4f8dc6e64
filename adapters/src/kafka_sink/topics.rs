//! Start-up checks: the topics, how they are set, and what the broker allows. Blocks: not for the runtime's threads.

use std::{collections::BTreeMap, time::Duration};

use rdkafka::{
    admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication},
    client::DefaultClientContext,
    consumer::{BaseConsumer, Consumer, ConsumerContext},
    error::{KafkaError, KafkaResult, RDKafkaErrorCode},
    metadata::Metadata,
};

use super::{
    KafkaSinkConfig,
    config::{ANSWER, Limits},
};
use crate::{kafka::client_fault, sink::Misfit};

/// In the text of a misfit that may be gone at the next try.
pub(super) const NO_ANSWER: &str = "no answer from the brokers";
/// A marks topic that we make keeps its lines for so long beyond the window: the time for which all instances may be down.
const DOWNTIME: Duration = Duration::from_secs(7 * 86_400);
/// The least that a marks topic must keep beyond the window.
const MARGIN: Duration = Duration::from_secs(3_600);
/// How long a topic that was just made may take to show.
const APPEARS: Duration = Duration::from_secs(15);

struct Asked {
    admin: AdminClient<DefaultClientContext>,
    runtime: tokio::runtime::Runtime,
}

fn no_answer(what: &str, fault: &dyn std::fmt::Display) -> Misfit {
    Misfit {
        what: format!("{what}: {NO_ANSWER}: {fault}"),
        remedy: "check `brokers` and that they run".to_owned(),
    }
}

impl Asked {
    fn new(config: &KafkaSinkConfig) -> Result<Self, Misfit> {
        let admin = config.client().create().map_err(|error| Misfit {
            what: format!("options: {}", client_fault(&error)),
            remedy: "correct the option".to_owned(),
        })?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .map_err(|error| no_answer("starting the checks", &error))?;
        Ok(Self { admin, runtime })
    }

    /// Metadata of one topic, and of the brokers.
    fn metadata(&self, topic: &str) -> Result<Metadata, Misfit> {
        let metadata = self.admin.inner().fetch_metadata(Some(topic), ANSWER);
        metadata.map_err(|error| no_answer(&format!("topic {topic:?}"), &error))
    }

    /// Settings by name; none if they may not be asked for. A broker that is slow to answer leaves nothing unchecked.
    fn settings(&self, resource: ResourceSpecifier<'_>) -> Result<Option<BTreeMap<String, String>>, Misfit> {
        let options = AdminOptions::new().request_timeout(Some(ANSWER));
        let asked = self.runtime.block_on(self.admin.describe_configs([&resource], &options));
        let asked = asked.map_err(|error| no_answer("settings of the topic or broker", &error))?;
        match asked.into_iter().next() {
            Some(Ok(found)) => {
                let known = found.entries.into_iter().filter_map(|entry| Some((entry.name, entry.value?)));
                Ok(Some(known.collect()))
            }
            Some(Err(RDKafkaErrorCode::RequestTimedOut | RDKafkaErrorCode::OperationTimedOut)) => {
                Err(no_answer("settings of the topic or broker", &"the time was over"))
            }
            Some(Err(_)) | None => Ok(None),
        }
    }

    fn make(&self, topic: &NewTopic<'_>) -> Result<(), String> {
        let options = AdminOptions::new().operation_timeout(Some(APPEARS));
        let made = self.runtime.block_on(self.admin.create_topics([topic], &options));
        match made.map(|mut results| results.pop()) {
            Ok(Some(Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)))) => Ok(()),
            Ok(Some(Err((_, code)))) => Err(code.to_string()),
            Ok(None) => Err("no answer".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Partitions and replicas of a topic; none if there is no such topic.
fn shape(metadata: &Metadata, topic: &str) -> Option<(usize, usize)> {
    let found = metadata.topics().iter().find(|found| found.name() == topic)?;
    let partitions = found.partitions();
    let replicas = partitions.iter().map(|partition| partition.replicas().len()).min()?;
    let led = partitions.iter().all(|partition| partition.leader() >= 0);
    (found.error().is_none() && led).then_some((partitions.len(), replicas))
}

/// How many partitions a topic has.
pub(super) fn partitions<C: ConsumerContext>(consumer: &BaseConsumer<C>, topic: &str) -> KafkaResult<usize> {
    let metadata = consumer.fetch_metadata(Some(topic), ANSWER)?;
    shape(&metadata, topic)
        .map(|(partitions, _)| partitions)
        .ok_or(KafkaError::MetadataFetch(RDKafkaErrorCode::UnknownTopicOrPartition))
}

/// The target topic: that it exists, and what it takes. And that the broker allows the transactions' time-out.
pub(super) fn target(config: &KafkaSinkConfig) -> Result<Limits, Vec<Misfit>> {
    let asked = Asked::new(config).map_err(|misfit| vec![misfit])?;
    let topic = &config.topic;
    let metadata = asked.metadata(topic).map_err(|misfit| vec![misfit])?;
    let mut misfits = Vec::new();
    let mut limits = Limits::default();
    match shape(&metadata, topic) {
        None => misfits.push(Misfit {
            what: format!(
                "topic {topic:?} does not exist in this cluster, or has partitions without a leader"
            ),
            remedy: "make it, or correct `topic`".to_owned(),
        }),
        Some((partitions, _)) => limits.partitions = i32::try_from(partitions).ok(),
    }
    if let Some(settings) = asked.settings(ResourceSpecifier::Topic(topic)).map_err(|misfit| vec![misfit])? {
        let number = |name: &str| settings.get(name).and_then(|value| value.parse::<i64>().ok());
        if let Some(bytes) = number("max.message.bytes") {
            limits.max_bytes = usize::try_from(bytes).unwrap_or_default();
        }
        limits.compacted = settings.get("cleanup.policy").is_some_and(|policy| policy.contains("compact"));
        let own_time = settings.get("message.timestamp.type").is_some_and(|kind| kind == "LogAppendTime");
        let bound = |name| number(name).unwrap_or(i64::MAX);
        limits.timestamps = (!own_time)
            .then(|| (bound("message.timestamp.before.max.ms"), bound("message.timestamp.after.max.ms")));
    }
    if limits.compacted && config.key == super::KeyFrom::None {
        misfits.push(Misfit {
            what: format!("topic {topic:?} is compacted, and key = \"none\" writes records without a key"),
            remedy: "set key = \"source\" or \"row_key\", or cleanup.policy=delete for the topic".to_owned(),
        });
    }
    // Whoever answered first has no number until all are known: asked for by that, no broker says anything.
    let broker = metadata.brokers().iter().map(|broker| broker.id()).find(|id| *id >= 0);
    let settings = match broker {
        Some(id) => asked.settings(ResourceSpecifier::Broker(id)).map_err(|misfit| vec![misfit])?,
        None => None,
    };
    let most = settings.and_then(|settings| settings.get("transaction.max.timeout.ms")?.parse::<u128>().ok());
    if let Some(most) = most.filter(|most| config.transaction_timeout.as_millis() > *most) {
        misfits.push(Misfit {
            what: format!(
                "transaction_timeout is {} ms, and the brokers allow {most} ms (transaction.max.timeout.ms)",
                config.transaction_timeout.as_millis()
            ),
            remedy: format!("set transaction_timeout to {most} ms at most, or raise the brokers' setting"),
        });
    }
    if misfits.is_empty() { Ok(limits) } else { Err(misfits) }
}

/// The marks topic: makes it if it is missing, and checks that no line that is needed goes, and none is merged.
pub(super) fn marks_topic(config: &KafkaSinkConfig, topic: &str) -> Result<(), Vec<Misfit>> {
    let asked = Asked::new(config).map_err(|misfit| vec![misfit])?;
    let metadata = asked.metadata(topic).map_err(|misfit| vec![misfit])?;
    let least = (config.keep + MARGIN).as_millis();
    let Some((_, replicas)) = shape(&metadata, topic) else {
        let retention = (config.keep + DOWNTIME).as_millis().to_string();
        let replication = TopicReplication::Fixed(config.replication.unwrap_or(-1));
        let new = NewTopic::new(topic, config.marks_partitions, replication)
            .set("cleanup.policy", "delete")
            .set("retention.ms", &retention)
            .set("retention.bytes", "-1")
            .set("message.timestamp.type", "LogAppendTime");
        asked.make(&new).map_err(|fault| {
            vec![Misfit {
                what: format!("the marks topic {topic:?} does not exist and cannot be made: {fault}"),
                remedy: format!(
                    "make it with {} partitions, cleanup.policy=delete, retention.ms={retention}, retention.bytes=-1, \
                     message.timestamp.type=LogAppendTime, and as many replicas as the target topic",
                    config.marks_partitions
                ),
            }]
        })?;
        return appears(&asked, topic).map_err(|misfit| vec![misfit]);
    };
    let mut misfits = Vec::new();
    let mut misfit = |what: String, remedy: String| misfits.push(Misfit { what, remedy });
    let alter = |setting: &str| format!("kafka-configs.sh --alter --topic {topic} --add-config {setting}");
    if let Some(settings) = asked.settings(ResourceSpecifier::Topic(topic)).map_err(|misfit| vec![misfit])? {
        let number = |name: &str| settings.get(name).and_then(|value| value.parse::<i64>().ok());
        if let Some(policy) = settings.get("cleanup.policy").filter(|policy| *policy != "delete") {
            misfit(
                format!(
                    "the marks topic {topic:?} has cleanup.policy={policy}: compaction keeps one mark a shard"
                ),
                alter("cleanup.policy=delete"),
            );
        }
        if let Some(ms) =
            number("retention.ms").filter(|ms| *ms >= 0 && u128::try_from(*ms).unwrap_or(0) < least)
        {
            misfit(
                format!(
                    "the marks topic {topic:?} has retention.ms={ms}, and window and lateness of the route need {least} at least: \
                     copies of records whose marks are gone would be written again"
                ),
                alter(&format!("retention.ms={}", (config.keep + DOWNTIME).as_millis())),
            );
        }
        if let Some(bytes) = number("retention.bytes").filter(|bytes| *bytes >= 0) {
            misfit(
                format!(
                    "the marks topic {topic:?} has retention.bytes={bytes}: marks may go before their time"
                ),
                alter("retention.bytes=-1"),
            );
        }
    }
    if let Ok(target) = asked.metadata(&config.topic)
        && let Some((_, of_rows)) = shape(&target, &config.topic)
        && replicas < of_rows
    {
        misfit(
            format!("the marks topic {topic:?} has {replicas} replicas, and the target topic {of_rows}"),
            format!("give it {of_rows}: a lost mark lets copies through"),
        );
    }
    if misfits.is_empty() { Ok(()) } else { Err(misfits) }
}

/// The dead-letter topic: makes it if it is missing, to be kept for ever.
pub(super) fn letters_topic(config: &KafkaSinkConfig, topic: &str) -> Result<(), Vec<Misfit>> {
    let asked = Asked::new(config).map_err(|misfit| vec![misfit])?;
    let metadata = asked.metadata(topic).map_err(|misfit| vec![misfit])?;
    if shape(&metadata, topic).is_some() {
        return Ok(());
    }
    let replication = TopicReplication::Fixed(config.replication.unwrap_or(-1));
    let new = NewTopic::new(topic, 1, replication).set("cleanup.policy", "delete").set("retention.ms", "-1");
    asked.make(&new).map_err(|fault| {
        vec![Misfit {
            what: format!("the dead-letter topic {topic:?} does not exist and cannot be made: {fault}"),
            remedy: "make it, with retention.ms=-1 if letters are to stay".to_owned(),
        }]
    })?;
    appears(&asked, topic).map_err(|misfit| vec![misfit])
}

fn appears(asked: &Asked, topic: &str) -> Result<(), Misfit> {
    let until = std::time::Instant::now() + APPEARS;
    while shape(&asked.metadata(topic)?, topic).is_none() {
        if std::time::Instant::now() > until {
            return Err(no_answer(&format!("topic {topic:?}"), &"it was made and does not show"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
