//! The producers: one for batches, in transactions, and one for lines that need none. Blocks: lives on the session's thread.

use std::{
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

use rdkafka::{
    ClientContext, Message, TopicPartitionList,
    config::{FromClientConfigAndContext, RDKafkaLogLevel},
    error::{KafkaError, RDKafkaError, RDKafkaErrorCode},
    message::{DeliveryResult, Header, OwnedHeaders},
    producer::{BaseProducer, BaseRecord, Producer, ProducerContext},
};

use super::{
    KafkaSinkConfig,
    config::{ANSWER, Limits},
    encode::Sent,
    line::{Kind, Line, PART_BYTES},
};
use crate::{kafka::Metadata, sink::Pulse};

/// Between two looks at what was delivered.
const LOOK_AGAIN: Duration = Duration::from_micros(250);
/// How long a broker may take to say that an earlier transaction of the id is over.
const INIT: Duration = Duration::from_secs(20);
/// A record that has no index of its own among those of a batch.
const UNNUMBERED: usize = usize::MAX;

/// Gathers what became of records.
#[derive(Default)]
pub(super) struct Reports {
    failed: Mutex<Vec<(usize, KafkaError)>>,
    /// The largest timestamp that a broker gave a record.
    time_ms: Mutex<Option<i64>>,
}

impl ClientContext for Reports {
    /// Being fenced, and losing brokers, is said in the sink's own words.
    fn log(&self, _: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!(target: "librdkafka", "{facility}: {message}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "librdkafka", "{error}: {reason}");
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl ProducerContext for Reports {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, index: usize) {
        match result {
            Ok(message) => {
                if index == UNNUMBERED {
                    let mut time = locked(&self.time_ms);
                    *time = (*time).max(message.timestamp().to_millis());
                }
            }
            Err((error, _)) => locked(&self.failed).push((index, error.clone())),
        }
    }
}

/// Why a transaction did not commit.
#[derive(Debug)]
pub(super) enum Broken {
    /// It was aborted, or can be nothing else any more; the producer can go on.
    Aborted(String),
    /// Records were refused for good, by index; it was aborted.
    Refused(Vec<(usize, String)>),
    /// The group's generation has moved on; it was aborted.
    Generation(String),
    /// Nothing of it can commit; the producer is of no more use.
    Dead {
        reason: String,
        /// Somebody else has taken the transactional id over.
        fenced: bool,
    },
    /// It may have been committed; the producer is of no more use.
    Unknown(String),
}

/// The producer of one session's batches.
pub(super) struct Writer {
    producer: Arc<BaseProducer<Reports>>,
    timeout: Duration,
    /// Ends with the producer.
    pub(super) pulse: Pulse,
}

/// The code of a transactional error, and what it leaves behind.
fn transactional(error: &KafkaError) -> Option<&RDKafkaError> {
    match error {
        KafkaError::Transaction(error) => Some(error),
        _ => None,
    }
}

fn is_fenced(error: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    let code = transactional(error).map(RDKafkaError::code).or(error.rdkafka_error_code());
    matches!(
        code,
        Some(
            Code::Fenced | Code::InvalidProducerEpoch | Code::ProducerFenced | Code::InvalidProducerIdMapping
        )
    )
}

fn is_generation(error: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    let code = transactional(error).map(RDKafkaError::code).or(error.rdkafka_error_code());
    matches!(
        code,
        Some(
            Code::IllegalGeneration
                | Code::UnknownMemberId
                | Code::FencedInstanceId
                | Code::FencedMemberEpoch
                | Code::StaleMemberEpoch
                | Code::RebalanceInProgress
        )
    )
}

/// The record itself is at fault: it will be refused again.
fn is_for_good(error: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(
        error.rdkafka_error_code(),
        Some(
            Code::MessageSizeTooLarge
                | Code::InvalidMessageSize
                | Code::InvalidTimestamp
                | Code::InvalidRecord
                | Code::InvalidMessage
                | Code::UnknownPartition
        )
    )
}

/// Ends whatever transaction is open under `id`, and whoever writes under it: what it had not committed never will be.
pub(super) fn fence(config: &KafkaSinkConfig, id: &str) -> Result<(), KafkaError> {
    Writer::new(config, &Limits::default(), id).map(drop)
}

impl Writer {
    /// Takes the transactional id over.
    pub(super) fn new(config: &KafkaSinkConfig, limits: &Limits, id: &str) -> Result<Self, KafkaError> {
        let client = config.transactional(limits, id);
        let producer = BaseProducer::from_config_and_context(&client, Reports::default())?;
        let until = Instant::now() + INIT;
        loop {
            match producer.init_transactions(INIT) {
                Ok(()) => break,
                Err(error) => {
                    let again = transactional(&error).is_some_and(RDKafkaError::is_retriable);
                    if !again || Instant::now() > until {
                        return Err(error);
                    }
                }
            }
        }
        let producer = Arc::new(producer);
        Ok(Self { producer, timeout: config.transaction_timeout, pulse: Pulse::begin() })
    }

    /// The cluster's id, if it tells one.
    pub(super) fn cluster(&self) -> Option<String> {
        self.producer.client().fetch_cluster_id(ANSWER)
    }

    pub(super) fn begin(&self) -> Result<(), Broken> {
        locked(&self.producer.context().failed).clear();
        self.producer.begin_transaction().map_err(|error| Broken::Dead {
            reason: format!("beginning a transaction: {error}"),
            fenced: is_fenced(&error) || self.is_dead_by_fence(),
        })
    }

    /// The client library has met a fatal error, and it is that of a fenced producer.
    fn is_dead_by_fence(&self) -> bool {
        matches!(
            self.producer.client().fatal_error(),
            Some((
                RDKafkaErrorCode::Fenced
                    | RDKafkaErrorCode::InvalidProducerEpoch
                    | RDKafkaErrorCode::ProducerFenced,
                _
            ))
        )
    }

    fn send(&self, mut record: BaseRecord<'_, [u8], [u8], usize>) -> Result<(), Broken> {
        loop {
            match self.producer.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), again)) => {
                    record = again;
                    rest(&self.producer);
                }
                Err((error, record)) => {
                    let index = record.delivery_opaque;
                    return Err(if is_for_good(&error) && index != UNNUMBERED {
                        self.abort(Broken::Refused(vec![(index, error.to_string())]))
                    } else {
                        self.broken("sending a record", &error)
                    });
                }
            }
        }
    }

    /// A line of the marks topic, with its block; in parts where it is large.
    pub(super) fn line(
        &self,
        route: &str,
        topic: &str,
        partition: i32,
        line: &Line,
        block: Option<&[u8]>,
    ) -> Result<(), Broken> {
        for (line, value) in parts(line, block) {
            self.send(record_of(route, topic, partition, &line, value))?;
        }
        Ok(())
    }

    /// A row, number `index` of its batch.
    pub(super) fn row(
        &self,
        topic: &str,
        index: usize,
        sent: &Sent<'_>,
        added: &[(&str, &str)],
        value: Option<&[u8]>,
    ) -> Result<(), Broken> {
        let mut record: BaseRecord<'_, [u8], [u8], usize> = BaseRecord::with_opaque_to(topic, index);
        record.key = sent.key;
        record.payload = value;
        record.partition = sent.partition;
        record.timestamp = sent.timestamp_ms;
        let mut all = sent.headers().peekable();
        if all.peek().is_some() || !added.is_empty() {
            let headers =
                all.fold(OwnedHeaders::new(), |headers, (key, value)| headers.insert(Header { key, value }));
            let headers = added.iter().fold(headers, |headers, (key, value)| {
                headers.insert(Header { key, value: Some(value.as_bytes()) })
            });
            record = record.headers(headers);
        }
        self.send(record)
    }

    /// A dead letter.
    pub(super) fn letter(
        &self,
        topic: &str,
        key: &str,
        headers: &[(&str, String)],
        value: Option<&[u8]>,
    ) -> Result<(), Broken> {
        let headers = headers.iter().fold(OwnedHeaders::new(), |headers, (key, value)| {
            headers.insert(Header { key, value: Some(value.as_bytes()) })
        });
        let mut record: BaseRecord<'_, [u8], [u8], usize> =
            BaseRecord::with_opaque_to(topic, UNNUMBERED).headers(headers);
        record.key = (!key.is_empty()).then_some(key.as_bytes());
        record.payload = value;
        self.send(record)
    }

    /// Waits until every record has its report.
    pub(super) fn delivered(&self) -> Result<(), Broken> {
        wait(&self.producer);
        let failed = std::mem::take(&mut *locked(&self.producer.context().failed));
        let Some((_, first)) = failed.first() else { return Ok(()) };
        let refused: Vec<(usize, String)> = failed
            .iter()
            .filter(|(index, error)| *index != UNNUMBERED && is_for_good(error))
            .map(|(index, error)| (*index, error.to_string()))
            .collect();
        if refused.is_empty() {
            return Err(self.broken("writing records", first));
        }
        Err(self.abort(Broken::Refused(refused)))
    }

    /// The source's offsets, in the open transaction, under the group's generation (P13, P14).
    pub(super) fn offsets(&self, list: &TopicPartitionList, metadata: &Arc<Metadata>) -> Result<(), Broken> {
        let until = Instant::now() + self.timeout;
        loop {
            let Err(error) = self.send_offsets(list, metadata)? else { return Ok(()) };
            let again = transactional(&error).is_some_and(RDKafkaError::is_retriable);
            if again && Instant::now() < until {
                continue;
            }
            return Err(if is_generation(&error) {
                self.abort(Broken::Generation(format!(
                    "the consumer group's generation has moved on: {error}"
                )))
            } else {
                self.broken("offsets of the consumer group", &error)
            });
        }
    }

    /// On a thread of its own: when the group's coordinator moves to another broker just then, the client library may never come back
    /// from this call, whatever its time-out. The producer is left behind with it: nothing was committed, and the transactional id is
    /// taken anew.
    fn send_offsets(
        &self,
        list: &TopicPartitionList,
        metadata: &Arc<Metadata>,
    ) -> Result<Result<(), KafkaError>, Broken> {
        let (producer, list, metadata, timeout) =
            (self.producer.clone(), list.clone(), metadata.clone(), self.timeout);
        let (says, heard) = mpsc::channel();
        let call = move || drop(says.send(producer.send_offsets_to_transaction(&list, &metadata.0, timeout)));
        let thread = std::thread::Builder::new().name("kafka offsets".to_owned()).spawn(call);
        if let Err(fault) = thread {
            return Err(self.abort(Broken::Aborted(format!("no thread for a call to the brokers: {fault}"))));
        }
        heard.recv_timeout(timeout + Duration::from_secs(5)).map_err(|_| Broken::Dead {
            reason: "the brokers do not take the offsets of the consumer group".to_owned(),
            fenced: false,
        })
    }

    /// Commits. All records must have been delivered.
    pub(super) fn commit(&self) -> Result<(), Broken> {
        let until = Instant::now() + self.timeout + Duration::from_secs(5);
        loop {
            let Err(error) = self.producer.commit_transaction(self.timeout) else { return Ok(()) };
            let found = transactional(&error);
            if found.is_some_and(RDKafkaError::is_retriable) && Instant::now() < until {
                continue;
            }
            if found.is_some_and(RDKafkaError::txn_requires_abort) {
                // A transaction that was committed cannot be aborted: if it can, it was not.
                return Err(match self.abort(Broken::Aborted(format!("committing: {error}"))) {
                    Broken::Aborted(reason) => Broken::Aborted(reason),
                    _ => Broken::Unknown(format!("committing: {error}")),
                });
            }
            return Err(Broken::Unknown(format!("committing: {error}")));
        }
    }

    /// Aborts, and says what `broken` has become: if the abort fails, the producer is dead.
    pub(super) fn abort(&self, broken: Broken) -> Broken {
        let aborted = self.producer.abort_transaction(self.timeout.min(Duration::from_secs(10)));
        wait(&self.producer);
        locked(&self.producer.context().failed).clear();
        match aborted {
            Ok(()) => broken,
            Err(error) => Broken::Dead {
                reason: format!("{}; aborting: {error}", broken.reason()),
                fenced: is_fenced(&error) || self.is_dead_by_fence(),
            },
        }
    }

    /// Before the commit: nothing of the transaction can be in.
    fn broken(&self, doing: &str, error: &KafkaError) -> Broken {
        let reason = format!("{doing}: {error}");
        if is_fenced(error) || self.is_dead_by_fence() {
            return Broken::Dead { reason, fenced: true };
        }
        if transactional(error).is_some_and(RDKafkaError::is_fatal)
            || self.producer.client().fatal_error().is_some()
        {
            return Broken::Dead { reason, fenced: false };
        }
        self.abort(Broken::Aborted(reason))
    }
}

impl Broken {
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Aborted(reason)
            | Self::Generation(reason)
            | Self::Unknown(reason)
            | Self::Dead { reason, .. } => reason.clone(),
            Self::Refused(rows) => rows.first().map(|(_, reason)| reason.clone()).unwrap_or_default(),
        }
    }
}

/// Until nothing is on its way: `flush` would look every 100 ms only. It ends, for each record has a time-out.
fn wait(producer: &BaseProducer<Reports>) {
    while producer.in_flight_count() > 0 {
        rest(producer);
    }
}

/// Hears what is there, and sleeps: a `poll` that is given so short a time keeps the processor busy for all of it, and the broker may
/// need that.
fn rest(producer: &BaseProducer<Reports>) {
    producer.poll(Duration::ZERO);
    if producer.in_flight_count() > 0 {
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Writes lines that count only if the ledger takes them, without a transaction.
pub(super) struct Plain(BaseProducer<Reports>);

impl Plain {
    pub(super) fn new(config: &KafkaSinkConfig) -> Result<Self, KafkaError> {
        let mut client = config.producer(&Limits::default());
        // Whoever waits for a line is to hear soon that it cannot be written.
        client.set("message.timeout.ms", ANSWER.as_millis().to_string());
        Ok(Self(BaseProducer::from_config_and_context(&client, Reports::default())?))
    }

    /// Writes `lines`, each with its partition and value; answers with the broker's time. On an error some may have been written.
    pub(super) fn write(
        &self,
        route: &str,
        topic: &str,
        lines: &[(i32, Line, Option<Vec<u8>>)],
    ) -> Result<i64, KafkaError> {
        let context = self.0.context();
        locked(&context.failed).clear();
        *locked(&context.time_ms) = None;
        for (partition, line, value) in lines {
            let record = record_of(route, topic, *partition, line, value.as_deref());
            self.0.send(record).map_err(|(error, _)| error)?;
        }
        wait(&self.0);
        match locked(&context.failed).pop() {
            Some((_, error)) => Err(error),
            None => Ok(locked(&context.time_ms).unwrap_or_default()),
        }
    }
}

/// The parts that a line with this block goes in: the last one is the line itself.
fn parts<'a>(line: &Line, block: Option<&'a [u8]>) -> Vec<(Line, Option<&'a [u8]>)> {
    let Some(block) = block.filter(|block| block.len() > PART_BYTES) else {
        return vec![(line.clone(), block)];
    };
    let chunks: Vec<&[u8]> = block.chunks(PART_BYTES).collect();
    let last = chunks.len() - 1;
    let part = |(at, chunk)| {
        let kind = if at == last { line.kind } else { Kind::Part };
        (Line { kind, part: at, ..line.clone() }, Some(chunk))
    };
    chunks.into_iter().enumerate().map(part).collect()
}

fn record_of<'a>(
    route: &str,
    topic: &'a str,
    partition: i32,
    line: &'a Line,
    value: Option<&'a [u8]>,
) -> BaseRecord<'a, [u8], [u8], usize> {
    let headers = line.headers(route).into_iter().fold(OwnedHeaders::new(), |headers, (key, value)| {
        headers.insert(Header { key, value: Some(value.as_bytes()) })
    });
    let mut record = BaseRecord::with_opaque_to(topic, UNNUMBERED).partition(partition).headers(headers);
    record.key = Some(line.shard.as_bytes());
    record.payload = value;
    record
}
