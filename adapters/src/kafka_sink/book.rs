//! Reads the marks topic into a [`Ledger`], one for all sessions of a route in this process.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use rdkafka::{
    ClientContext, Message, Offset, TopicPartitionList,
    config::{FromClientConfigAndContext, RDKafkaLogLevel},
    consumer::{BaseConsumer, Consumer, ConsumerContext},
    error::KafkaError,
    message::{BorrowedMessage, Headers},
};

use super::{
    KafkaSinkConfig,
    config::ANSWER,
    ledger::{Folded, Ledger},
    line::{Kind, Line},
    topics,
};
use crate::sink::{Mark, ShardId, SinkError};

/// Bytes of blocks in one page of marks.
const PAGE_BYTES: usize = 16 << 20;

/// An open transaction that holds decided lines back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Holder {
    /// Its transactional id; empty if its first record is no line of this route.
    pub(super) writer: String,
    /// The shard of its first line.
    pub(super) shard: ShardId,
    /// A session of this process writes under that id.
    pub(super) live: bool,
    partition: i32,
    stable: i64,
    end: i64,
}

impl Holder {
    /// It was waited for long enough.
    pub(super) fn fault(&self, topic: &str) -> SinkError {
        let Self { writer, partition, stable, end, .. } = self;
        SinkError::NotApplied {
            reason: format!(
                "marks partition {partition} of topic {topic:?} is decided up to offset {stable}, and its log ends at {end}: an open \
                 transaction of transactional id {writer:?} holds it back; it ends at its time-out, or as soon as its shard has \
                 another owner"
            ),
            retry: true,
        }
    }
}

/// See the module.
pub(super) struct Book {
    config: Arc<KafkaSinkConfig>,
    route: Arc<str>,
    topic: String,
    open: Option<Open>,
    pub(super) ledger: Ledger,
    /// Per partition, the first offset that is not folded yet.
    next: Vec<i64>,
    /// Transactional ids that sessions of this process write under.
    pub(super) live: HashSet<String>,
}

struct Open {
    /// Sees what is decided.
    decided: Reader,
    /// Sees all: where the log ends, and whose transaction is open.
    all: Reader,
}

type Reader = BaseConsumer<Quiet>;

/// What the client library has to say comes back from its calls too.
struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!(target: "librdkafka", "{facility}: {message}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "librdkafka", "{error}: {reason}");
    }
}

impl ConsumerContext for Quiet {}

fn asking(what: &str, error: &KafkaError) -> SinkError {
    SinkError::NotApplied { reason: format!("{what}: {error}"), retry: true }
}

impl Book {
    pub(super) fn new(config: Arc<KafkaSinkConfig>, route: &str) -> Self {
        let topic = config.marks_of(route);
        Self {
            config,
            route: route.into(),
            topic,
            open: None,
            ledger: Ledger::default(),
            next: Vec::new(),
            live: HashSet::new(),
        }
    }

    /// Connects, makes the topic if it is missing, and checks that it keeps marks for long enough.
    fn open(&mut self) -> Result<&Open, SinkError> {
        if self.open.is_none() {
            topics::marks_topic(&self.config, &self.topic).map_err(|misfits| SinkError::NotApplied {
                reason: misfits.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
                retry: misfits.iter().all(|misfit| misfit.what.contains(topics::NO_ANSWER)),
            })?;
            let reader = |isolation| Reader::from_config_and_context(&self.config.reader(isolation), Quiet);
            let make = || {
                Ok::<_, KafkaError>(Open {
                    decided: reader("read_committed")?,
                    all: reader("read_uncommitted")?,
                })
            };
            let open = make().map_err(|error| asking("a reader of marks cannot be made", &error))?;
            let count = topics::partitions(&open.all, &self.topic)
                .map_err(|error| asking("asking for the marks topic", &error))?;
            if self.next.is_empty() {
                self.next = vec![0; count];
            } else if self.next.len() != count {
                return Err(SinkError::NotApplied {
                    reason: format!(
                        "the marks topic {:?} had {} partitions and has {count}: instances that count differently look for shards in \
                         different places; restart all instances of the route together",
                        self.topic,
                        self.next.len()
                    ),
                    retry: true,
                });
            }
            self.open = Some(open);
        }
        match &self.open {
            Some(open) => Ok(open),
            None => {
                Err(SinkError::NotApplied { reason: "the marks topic is not open".to_owned(), retry: true })
            }
        }
    }

    /// Connects anew at the next look.
    pub(super) fn close(&mut self) {
        self.open = None;
    }

    /// The partition that holds a shard's lines: where it has some, else that of its own number.
    pub(super) fn home(&mut self, shard: &str) -> Result<i32, SinkError> {
        self.open()?;
        if let Some(known) = self.ledger.shard(shard) {
            return Ok(known.home);
        }
        let count = self.next.len().max(1) as u64;
        let number = shard.rsplit('/').next().and_then(|last| last.parse::<u64>().ok());
        let spread = || shard.bytes().fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        Ok((number.unwrap_or_else(spread) % count) as i32)
    }

    /// All partitions.
    pub(super) fn all(&mut self) -> Result<Vec<i32>, SinkError> {
        self.open()?;
        Ok((0..self.next.len() as i32).collect())
    }

    /// Where the logs of `partitions` end now, decided or not (P14).
    pub(super) fn ends(&mut self, partitions: &[i32]) -> Result<Vec<(i32, i64)>, SinkError> {
        let result = self.ends_of(partitions, true);
        self.closed_by(result)
    }

    /// Folds what is decided now.
    pub(super) fn glance(&mut self, partitions: &[i32]) -> Result<(), SinkError> {
        let result = self.ends_of(partitions, false).and_then(|ends| self.fold(ends.into_iter().collect()));
        self.closed_by(result)
    }

    /// Folds up to `ends`, if all is decided up to there; else says what holds it back.
    pub(super) fn advance(&mut self, ends: &[(i32, i64)]) -> Result<Option<Holder>, SinkError> {
        let result = self.advance_to(ends);
        self.closed_by(result)
    }

    /// After a fault all is connected anew.
    fn closed_by<T>(&mut self, result: Result<T, SinkError>) -> Result<T, SinkError> {
        if result.is_err() {
            self.close();
        }
        result
    }

    fn ends_of(&mut self, partitions: &[i32], very: bool) -> Result<Vec<(i32, i64)>, SinkError> {
        self.open()?;
        let mut ends = Vec::with_capacity(partitions.len());
        for &partition in partitions {
            let (low, end) = self.range(partition, very)?;
            if very && self.next[partition as usize] > end {
                // The log is shorter than it was: made again, or restored.
                tracing::warn!(
                    topic = self.topic,
                    partition,
                    end,
                    "the marks topic went back; it is read from its beginning"
                );
                (self.ledger, self.next) = (Ledger::default(), vec![0; self.next.len()]);
                return self.ends_of(&(0..self.next.len() as i32).collect::<Vec<_>>(), very);
            }
            if self.next[partition as usize] < low {
                self.next[partition as usize] = low;
            }
            if low > 0 {
                self.ledger.cut(partition, low);
            }
            ends.push((partition, end));
        }
        Ok(ends)
    }

    fn advance_to(&mut self, ends: &[(i32, i64)]) -> Result<Option<Holder>, SinkError> {
        self.open()?;
        for &(partition, end) in ends {
            if self.next.get(partition as usize).is_none_or(|next| *next >= end) {
                continue;
            }
            let (_, stable) = self.range(partition, false)?;
            if stable < end {
                let (writer, shard) =
                    self.holder(partition, stable)?.unwrap_or_else(|| (String::new(), "".into()));
                let live = self.live.contains(&writer);
                return Ok(Some(Holder { writer, shard, live, partition, stable, end }));
            }
        }
        self.fold(ends.iter().copied().collect())?;
        Ok(None)
    }

    /// First offset of a partition's log, and its end: the very end, or that of what is decided.
    fn range(&self, partition: i32, very: bool) -> Result<(i64, i64), SinkError> {
        let Some(open) = &self.open else { return Ok((0, 0)) };
        let consumer = if very { &open.all } else { &open.decided };
        consumer
            .fetch_watermarks(&self.topic, partition, ANSWER)
            .map_err(|error| asking(&format!("asking for the end of marks partition {partition}"), &error))
    }

    /// Whose transaction begins at `stable`, where decided lines end. None if it has been decided meanwhile.
    fn holder(&self, partition: i32, stable: i64) -> Result<Option<(String, ShardId)>, SinkError> {
        let Some(open) = &self.open else { return Ok(None) };
        assign(&open.all, &self.topic, [(partition, stable)])?;
        let until = Instant::now() + ANSWER;
        while Instant::now() < until {
            match open.all.poll(Duration::from_millis(50)) {
                Some(Ok(message)) if message.offset() < stable => {}
                Some(Ok(message)) => {
                    let line = line_of(&self.route, &message);
                    let writer = line.as_ref().map(|line| line.state.writer.clone()).unwrap_or_default();
                    return Ok(Some((writer, line.map_or_else(|| "".into(), |line| line.shard))));
                }
                Some(Err(KafkaError::PartitionEOF(_))) => return Ok(None),
                Some(Err(error)) => return Err(asking("reading an open transaction's marks", &error)),
                None => {}
            }
        }
        Ok(None)
    }

    /// Folds decided lines up to the given ends.
    fn fold(&mut self, mut behind: BTreeMap<i32, i64>) -> Result<(), SinkError> {
        let Some(open) = &self.open else { return Ok(()) };
        behind.retain(|&at, end| self.next.get(at as usize).is_some_and(|next| *next < *end));
        if behind.is_empty() {
            return Ok(());
        }
        assign(&open.decided, &self.topic, behind.keys().map(|&at| (at, self.next[at as usize])))?;
        let mut quiet = Instant::now();
        while !behind.is_empty() {
            match open.decided.poll(Duration::from_millis(50)) {
                Some(Ok(message)) => {
                    quiet = Instant::now();
                    let (partition, offset) = (message.partition(), message.offset());
                    let Some(next) = self.next.get_mut(partition as usize).filter(|next| offset >= **next)
                    else {
                        continue;
                    };
                    *next = offset + 1;
                    if let Some(line) = line_of(&self.route, &message) {
                        let time_ms = message.timestamp().to_millis().unwrap_or_default();
                        let value = message.payload().unwrap_or_default();
                        if self.ledger.fold(partition, offset, time_ms, &line, value) == Folded::Stray {
                            tracing::error!(
                                route = &*self.route,
                                shard = &*line.shard,
                                epoch = line.state.epoch,
                                sequence = line.state.sequence,
                                writer = line.state.writer,
                                "a batch is in the sink that its fence should have kept out: please report this"
                            );
                        }
                    }
                    if behind.get(&partition).is_some_and(|end| offset + 1 >= *end) {
                        behind.remove(&partition);
                    }
                }
                // Everything below the end that was asked for is decided, so it has been read: what is left are control records.
                Some(Err(KafkaError::PartitionEOF(partition))) => {
                    if let Some(end) = behind.remove(&partition) {
                        let next = &mut self.next[partition as usize];
                        *next = (*next).max(end);
                    }
                }
                Some(Err(error)) => return Err(asking("reading marks", &error)),
                None if quiet.elapsed() > ANSWER * 2 => {
                    return Err(SinkError::NotApplied {
                        reason: format!("marks of topic {:?} do not come", self.topic),
                        retry: true,
                    });
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Marks of `shard` above `sequence`, as the ledger knows them: about 16 MiB, and one mark at least.
    pub(super) fn marks(&mut self, shard: &str, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        let Some(known) = self.ledger.shard(shard) else { return Ok(Vec::new()) };
        let (Some(from), Some(last)) = (known.above(sequence), known.marks.back()) else {
            return Ok(Vec::new());
        };
        let (home, from, last, floor_ms) = (known.home, from.offset, last.sequence, known.state.floor_ms);
        self.open()?;
        let Some(open) = &self.open else { return Ok(Vec::new()) };
        assign(&open.decided, &self.topic, [(home, from)])?;
        let (mut page, mut bytes, mut parts) = (Vec::new(), 0, Parts::default());
        let mut quiet = Instant::now();
        let result = loop {
            match open.decided.poll(Duration::from_millis(50)) {
                Some(Ok(message)) => {
                    quiet = Instant::now();
                    let Some(line) = line_of(&self.route, &message).filter(|line| &*line.shard == shard)
                    else {
                        continue;
                    };
                    let Some(block) = parts.take(&line, message.payload().unwrap_or_default()) else {
                        continue;
                    };
                    let at = line.state.sequence;
                    if at > sequence && line.keys.count > 0 && line.keys.max_ms >= floor_ms {
                        bytes += block.len();
                        if bytes > PAGE_BYTES && !page.is_empty() {
                            break Ok(page);
                        }
                        page.push(Mark { sequence: at, block });
                    }
                    if at >= last {
                        break Ok(page);
                    }
                }
                Some(Err(KafkaError::PartitionEOF(_))) => break Ok(page),
                Some(Err(error)) => break Err(asking("reading marks", &error)),
                None if quiet.elapsed() > ANSWER * 2 => {
                    break Err(SinkError::NotApplied {
                        reason: format!("marks of topic {:?} do not come", self.topic),
                        retry: true,
                    });
                }
                None => {}
            }
        };
        if result.is_err() {
            self.close();
        }
        result
    }
}

/// Puts the parts of a block together.
#[derive(Default)]
struct Parts {
    sequence: i64,
    bytes: Vec<u8>,
    next: usize,
}

impl Parts {
    /// The block, if `line` is its last part.
    fn take(&mut self, line: &Line, value: &[u8]) -> Option<Bytes> {
        if line.part == 0 || line.state.sequence != self.sequence {
            (self.sequence, self.next) = (line.state.sequence, 0);
            self.bytes.clear();
        }
        if line.part != self.next {
            return None;
        }
        match line.kind {
            Kind::Part => {
                self.bytes.extend_from_slice(value);
                self.next += 1;
                None
            }
            Kind::Mark if line.part == 0 => Some(Bytes::copy_from_slice(value)),
            Kind::Mark => {
                self.bytes.extend_from_slice(value);
                Some(std::mem::take(&mut self.bytes).into())
            }
            _ => None,
        }
    }
}

/// The line that a record is, if it is one of `route`.
fn line_of(route: &str, message: &BorrowedMessage<'_>) -> Option<Line> {
    let headers = message.headers()?;
    // A name that is not UTF-8 is nobody's header here.
    let pairs = (0..headers.count()).filter_map(|index| {
        let header = crate::kafka::readable(|| headers.try_get(index))??;
        Some((header.key, header.value.unwrap_or_default()))
    });
    Line::read(route, message.key(), pairs)
}

fn assign(
    consumer: &Reader,
    topic: &str,
    places: impl IntoIterator<Item = (i32, i64)>,
) -> Result<(), SinkError> {
    let mut list = TopicPartitionList::new();
    let add = || {
        for (partition, offset) in places {
            list.add_partition_offset(topic, partition, Offset::Offset(offset))?;
        }
        // What is still queued of the places before is dropped with the assignment.
        consumer.unassign()?;
        consumer.assign(&list)
    };
    add().map_err(|error| asking("reading the marks topic", &error))
}
