use std::{
    collections::BTreeMap,
    ops::Deref,
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rdkafka::{
    Offset, TopicPartitionList,
    config::FromClientConfigAndContext,
    consumer::{BaseConsumer, CommitMode, Consumer, RebalanceProtocol},
    error::{KafkaError, KafkaResult},
};

use super::{
    Event, KafkaConfig, KafkaFault, Reader, TopicPartition,
    context::{Context, event, readable, refusal, refuses},
};

/// How long one question to a broker may take.
const ANSWER: Duration = Duration::from_secs(5);
/// Events that one poll of the client library may swallow before the next one is looked at.
const POLLS: usize = 16;
/// How long a commit under way is waited for when the group is left, and then the group's answer.
const GOODBYE: Duration = Duration::from_secs(2);
/// How long topics' ids are waited for.
const IDS: Duration = Duration::from_millis(500);
const START: &str = "oncegate start=";

/// A member of a consumer group. Not for several threads at once: one owner polls and answers.
pub struct KafkaSource {
    pub(super) consumer: Member,
    pub(super) config: KafkaConfig,
    cluster: String,
    topics: Vec<(String, usize)>,
    ids: BTreeMap<String, String>,
    wake: Arc<dyn Fn() + Send + Sync>,
    committer: Option<Committer>,
}

/// The client library's member of the group.
pub(super) struct Member(Option<Arc<BaseConsumer<Context>>>);

/// Sends commits and waits for their answers: the client library's own callback never comes for a commit that is sent without
/// waiting.
struct Committer {
    queue: mpsc::Sender<Vec<Commit>>,
    thread: JoinHandle<()>,
}

impl std::fmt::Debug for KafkaSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaSource")
            .field("cluster", &self.cluster)
            .field("topics", &self.topics)
            .finish_non_exhaustive()
    }
}

/// An offset to commit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Commit {
    /// Of which partition.
    pub at: TopicPartition,
    /// The next offset to read.
    pub position: i64,
    /// Comes back with the answer.
    pub tag: u64,
    /// Where the partition was first read from, while the sink may still have no position of its own: kept with the commit.
    pub start: Option<i64>,
}

impl KafkaSource {
    /// Connects, looks the cluster and the topics up, and joins the group. `wake` is called, from any thread, when there may be
    /// something to poll. Blocks for some seconds at most.
    pub fn open(config: &KafkaConfig, wake: Arc<dyn Fn() + Send + Sync>) -> Result<Self, KafkaFault> {
        let (probe, topics) = looked_up(config)?;
        let cluster = probe.client().fetch_cluster_id(ANSWER);
        let cluster = cluster
            .ok_or_else(|| KafkaFault::Unavailable("the brokers do not tell the cluster's id".to_owned()))?;
        let ids = topic_ids(&probe, topics.len());
        drop(probe);

        let client = config.client(topics.iter().map(|(_, partitions)| partitions).sum());
        let consumer = BaseConsumer::from_config_and_context(&client, Context::new(config));
        let mut consumer = consumer.map_err(|error| KafkaFault::from(&error))?;
        let waker = wake.clone();
        consumer.set_nonempty_callback(move || waker());
        let consumer = Arc::new(consumer);
        let committer = Some(committer(consumer.clone(), wake.clone())?);
        let source = Self {
            consumer: Member(Some(consumer)),
            config: config.clone(),
            cluster,
            topics,
            ids,
            wake,
            committer,
        };
        let names: Vec<&str> = source.topics.iter().map(|(topic, _)| topic.as_str()).collect();
        if let Some(membership) = &config.membership {
            membership.joined(&config.group);
        }
        source.consumer.subscribe(&names).map_err(|error| KafkaFault::from(&error))?;
        Ok(source)
    }

    /// The cluster's id.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// The topics, each with its number of partitions when the source was opened.
    pub fn topics(&self) -> &[(String, usize)] {
        &self.topics
    }

    /// The topics' ids when the source was opened; later ones come as [`Event::TopicId`]. A cluster before 2.8 has none.
    pub fn topic_ids(&self) -> &BTreeMap<String, String> {
        &self.ids
    }

    /// Serves the group; never waits. To be called often (at least once in `max.poll.interval.ms`), until it says nothing.
    pub fn poll(&self) -> Option<Event> {
        if let Some(membership) = &self.config.membership {
            membership.refresh(&self.consumer);
        }
        let context = self.consumer.client().context();
        for _ in 0..POLLS {
            if let Some(event) = context.pop() {
                return Some(event);
            }
            match self.consumer.poll(Duration::ZERO) {
                None => {}
                Some(Err(error)) => context.push(event(&error)),
                // Every partition has a queue of its own before it is read: a record here would be a record lost.
                Some(Ok(_)) => context.push(Event::Fatal {
                    fenced: false,
                    reason: "a record came outside of its partition's queue".to_owned(),
                }),
            }
        }
        context.pop()
    }

    /// Answers [`Event::Assigned`]: one paused reader for each.
    pub fn take(&self, partitions: &[TopicPartition]) -> Result<Vec<Reader>, KafkaFault> {
        let mut readers = Vec::with_capacity(partitions.len());
        for at in partitions {
            let queue = self.consumer.split_partition_queue(&at.topic, at.partition);
            let mut queue = queue.ok_or_else(|| KafkaFault::Unavailable(format!("{at} cannot be read")))?;
            let wake = self.wake.clone();
            queue.set_nonempty_callback(move || wake());
            readers.push(Reader { at: at.clone(), queue });
        }
        self.pause(partitions)?;
        // Any offset will do that needs no look-up: nothing is fetched while paused, and reading begins with a seek.
        let assignment = offsets(partitions.iter().map(|at| (at, Offset::Offset(0))))?;
        self.assign(&assignment)?;
        if let Some(membership) = &self.config.membership {
            membership.take(&self.consumer, &self.cluster, partitions);
        }
        Ok(readers)
    }

    /// Answers [`Event::Revoked`]. Commits under way are waited for by the client library before the group goes on.
    pub fn give_back(&self, partitions: &[TopicPartition]) -> Result<(), KafkaFault> {
        if let Some(membership) = &self.config.membership {
            membership.give_back(partitions);
        }
        let done = match self.consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => self.consumer.incremental_unassign(&list(partitions)),
            RebalanceProtocol::Eager | RebalanceProtocol::None => self.consumer.unassign(),
        };
        done.map_err(|error| KafkaFault::from(&error))
    }

    /// Reads `reader`'s partition from `position` on: what was fetched before is dropped, the next record is at or after it.
    pub fn read_from(&self, at: &TopicPartition, position: i64) -> Result<(), KafkaFault> {
        let seek = self.consumer.seek(&at.topic, at.partition, Offset::Offset(position), ANSWER);
        let resumed = seek.and_then(|()| self.consumer.resume(&list(std::slice::from_ref(at))));
        resumed.map_err(|error| KafkaFault::from(&error))
    }

    /// Stops fetching; what was fetched is dropped and comes again.
    pub fn pause(&self, partitions: &[TopicPartition]) -> Result<(), KafkaFault> {
        self.consumer.pause(&list(partitions)).map_err(|error| KafkaFault::from(&error))
    }

    /// Places `at` anew after [`super::ReadFault::OutOfRange`]. `owned` holds all our partitions (with `at`), each with the next
    /// offset to read.
    pub fn restart(&self, at: &TopicPartition, owned: &[(TopicPartition, i64)]) -> Result<(), KafkaFault> {
        let offset = |(at, next): &(TopicPartition, i64)| (at.clone(), Offset::Offset(*next));
        let all: Vec<(TopicPartition, Offset)> = owned.iter().map(offset).collect();
        match self.consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => {
                let one = all.iter().filter(|(other, _)| other == at).map(|(at, offset)| (at, *offset));
                let assignment = offsets(one)?;
                let removed = self.consumer.incremental_unassign(&list(std::slice::from_ref(at)));
                removed.map_err(|error| KafkaFault::from(&error))?;
                self.assign(&assignment)
            }
            RebalanceProtocol::Eager | RebalanceProtocol::None => {
                self.assign(&offsets(all.iter().map(|(at, offset)| (at, *offset)))?)
            }
        }
    }

    /// Sends a commit under the group's generation; its answer comes as [`Event::Committed`].
    pub fn commit(&self, commits: Vec<Commit>) {
        if let Some(committer) = &self.committer {
            // The thread ends only after this sender is gone.
            committer.queue.send(commits).ok();
        }
    }

    /// The last commit before partitions are given back or the group is left: both wait until it is through, and nobody hears of
    /// its answer.
    pub fn commit_last(&self, commits: &[Commit]) -> Result<(), KafkaFault> {
        let list = commit_list(commits).map_err(|error| KafkaFault::from(&error))?;
        self.consumer.commit(&list, CommitMode::Async).map_err(|error| KafkaFault::from(&error))
    }

    /// The first offset in the log, and the one after the last that can be read. Blocks for some seconds at most.
    pub fn log_range(&self, at: &TopicPartition) -> Result<(i64, i64), KafkaFault> {
        let range = self.consumer.fetch_watermarks(&at.topic, at.partition, ANSWER);
        range.map_err(|error| KafkaFault::from(&error))
    }

    /// The log's very end, also past open transactions. Blocks for some seconds at most.
    pub fn log_end(&self, at: &TopicPartition) -> Result<i64, KafkaFault> {
        let mut config = self.config.probe();
        config.set("isolation.level", "read_uncommitted");
        let probe: BaseConsumer = config.create().map_err(|error| KafkaFault::from(&error))?;
        let range = probe.fetch_watermarks(&at.topic, at.partition, ANSWER);
        range.map(|(_, end)| end).map_err(|error| KafkaFault::from(&error))
    }

    /// The first offset whose record is not older than `time_ms`; none if all are. Blocks for some seconds at most.
    pub fn offset_at(&self, at: &TopicPartition, time_ms: i64) -> Result<Option<i64>, KafkaFault> {
        let found = self.consumer.offsets_for_times(offsets([(at, Offset::Offset(time_ms))])?, ANSWER);
        let found = found.map_err(|error| KafkaFault::from(&error))?;
        let element = element(&found, at)?;
        element.error().map_err(|error| KafkaFault::from(&error))?;
        Ok(match element.offset() {
            Offset::Offset(offset) => Some(offset),
            _ => None,
        })
    }

    /// The start that was kept with the group's last commit ([`Commit::start`]). Blocks for some seconds at most.
    pub fn recorded_start(&self, at: &TopicPartition) -> Result<Option<i64>, KafkaFault> {
        let asked = list(std::slice::from_ref(at));
        let found =
            self.consumer.committed_offsets(asked, ANSWER).map_err(|error| KafkaFault::from(&error))?;
        let element = element(&found, at)?;
        element.error().map_err(|error| KafkaFault::from(&error))?;
        let metadata = readable(|| element.metadata().to_owned()).unwrap_or_default();
        Ok(metadata.strip_prefix(START).and_then(|start| start.parse().ok()))
    }

    fn assign(&self, assignment: &TopicPartitionList) -> Result<(), KafkaFault> {
        let done = match self.consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => self.consumer.incremental_assign(assignment),
            RebalanceProtocol::Eager | RebalanceProtocol::None => self.consumer.assign(assignment),
        };
        done.map_err(|error| KafkaFault::from(&error))
    }
}

/// Leaves the group. Readers must be gone before. Takes some seconds at most: what the brokers have not confirmed by then is waited for
/// by a thread in the background.
impl Drop for KafkaSource {
    fn drop(&mut self) {
        if let Some(membership) = &self.config.membership {
            membership.left();
        }
        self.consumer.client().context().close();
        let Some(Committer { queue, thread }) = self.committer.take() else { return };
        drop(queue);
        if within(GOODBYE, || thread.is_finished()) && thread.join().is_err() {
            tracing::error!("the committer's thread has panicked");
        }
    }
}

impl Deref for Member {
    type Target = Arc<BaseConsumer<Context>>;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref().expect("taken by drop and by nothing else")
    }
}

/// The library may wait for ever for brokers that are dead. It does so on a thread of its own.
impl Drop for Member {
    fn drop(&mut self) {
        let Some(consumer) = self.0.take() else { return };
        let leaving =
            std::thread::Builder::new().name("kafka leaves".to_owned()).spawn(move || drop(consumer));
        match leaving {
            Ok(thread) if within(GOODBYE, || thread.is_finished()) => drop(thread.join()),
            Ok(_) => tracing::warn!("the group does not answer; it is left in the background"),
            // The consumer went with the closure.
            Err(error) => tracing::debug!(%error, "no thread to leave the group with"),
        }
    }
}

/// Whether `done` came true within `time`.
fn within(time: Duration, done: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + time;
    while !done() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    done()
}

fn committer(
    consumer: Arc<BaseConsumer<Context>>,
    wake: Arc<dyn Fn() + Send + Sync>,
) -> Result<Committer, KafkaFault> {
    let (queue, commits) = mpsc::channel::<Vec<Commit>>();
    let thread = std::thread::Builder::new().name("kafka commits".to_owned()).spawn(move || {
        for commits in commits {
            let done = commit_list(&commits).and_then(|list| consumer.commit(&list, CommitMode::Sync));
            let answer = done.map_err(|error| refusal(&error));
            consumer.client().context().push(Event::Committed(commits, answer));
            wake();
        }
    });
    let thread =
        thread.map_err(|error| KafkaFault::Unavailable(format!("no thread for commits: {error}")))?;
    Ok(Committer { queue, thread })
}

fn commit_list(commits: &[Commit]) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::with_capacity(commits.len());
    for commit in commits {
        let mut element = list.add_partition(&commit.at.topic, commit.at.partition);
        element.set_offset(Offset::Offset(commit.position))?;
        if let Some(start) = commit.start {
            element.set_metadata(format!("{START}{start}"));
        }
    }
    Ok(list)
}

/// A broker that does not answer has often said why, to those who poll.
fn explain(probe: &BaseConsumer<Context>, fault: KafkaFault) -> KafkaFault {
    if !matches!(fault, KafkaFault::Unavailable(_)) {
        return fault;
    }
    for _ in 0..20 {
        drop(probe.poll(Duration::from_millis(5)));
    }
    match probe.client().context().said() {
        Some((code, reason)) if refuses(code) => KafkaFault::Unavailable(format!(
            "a broker refuses the connection: {reason}; check `security.protocol`, `sasl.mechanisms`, `sasl.username` and \
             `sasl.password` among the options, and that the listener is the one for clients"
        )),
        Some((_, reason)) => KafkaFault::Unavailable(format!("{fault}: {reason}").replacen("kafka: ", "", 1)),
        None => fault,
    }
}

/// The ids of the topics that were looked up with `probe`: it says them when it is polled. Not waited for long: old brokers have none.
fn topic_ids(probe: &BaseConsumer<Context>, topics: usize) -> BTreeMap<String, String> {
    let (mut ids, deadline) = (BTreeMap::new(), Instant::now() + IDS);
    while ids.len() < topics && Instant::now() < deadline {
        // Nothing is subscribed: there is nothing else to come.
        drop(probe.poll(Duration::from_millis(5)));
        while let Some(event) = probe.client().context().pop() {
            if let Event::TopicId { topic, id } = event {
                ids.insert(topic, id);
            }
        }
    }
    ids
}

/// A client in no group, and the topics, each with its number of partitions.
#[allow(clippy::type_complexity)]
pub(super) fn looked_up(
    config: &KafkaConfig,
) -> Result<(BaseConsumer<Context>, Vec<(String, usize)>), KafkaFault> {
    if let Some(fault) = config.check().first() {
        return Err(KafkaFault::Configuration(fault.to_string()));
    }
    let probe = BaseConsumer::from_config_and_context(&config.probe(), Context::new(config));
    let probe: BaseConsumer<Context> = probe.map_err(|error| KafkaFault::from(&error))?;
    let topics = config.topics.iter().map(|topic| Ok((topic.clone(), count_partitions(&probe, topic)?)));
    let topics = topics.collect::<Result<Vec<_>, KafkaFault>>().map_err(|fault| explain(&probe, fault))?;
    Ok((probe, topics))
}

fn count_partitions(probe: &BaseConsumer<Context>, topic: &str) -> Result<usize, KafkaFault> {
    let metadata = probe.fetch_metadata(Some(topic), ANSWER).map_err(|error| KafkaFault::from(&error))?;
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    let partitions = found.map_or(0, |found| found.partitions().len());
    match found.and_then(rdkafka::metadata::MetadataTopic::error) {
        None if partitions > 0 => Ok(partitions),
        None => Err(KafkaFault::NoTopic(topic.to_owned())),
        Some(rdkafka::types::RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART) => {
            Err(KafkaFault::NoTopic(topic.to_owned()))
        }
        Some(error) => {
            let code = rdkafka::error::RDKafkaErrorCode::from(error);
            Err(KafkaFault::Unavailable(format!("topic {topic:?}: {code}")))
        }
    }
}

fn list(partitions: &[TopicPartition]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for at in partitions {
        list.add_partition(&at.topic, at.partition);
    }
    list
}

fn offsets<'a>(
    partitions: impl IntoIterator<Item = (&'a TopicPartition, Offset)>,
) -> Result<TopicPartitionList, KafkaFault> {
    let mut list = TopicPartitionList::new();
    for (at, offset) in partitions {
        let added: KafkaResult<()> = list.add_partition_offset(&at.topic, at.partition, offset);
        added.map_err(|error| KafkaFault::from(&error))?;
    }
    Ok(list)
}

fn element<'a>(
    list: &'a TopicPartitionList,
    at: &TopicPartition,
) -> Result<rdkafka::topic_partition_list::TopicPartitionListElem<'a>, KafkaFault> {
    let found = list.find_partition(&at.topic, at.partition);
    found
        .ok_or_else(|| KafkaFault::from(&KafkaError::Canceled))
        .map_err(|_| KafkaFault::Unavailable(format!("no answer for {at}")))
}
