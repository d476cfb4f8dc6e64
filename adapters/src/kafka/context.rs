use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rdkafka::{
    ClientContext, Statistics, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer, ConsumerContext},
    error::{KafkaError, RDKafkaErrorCode},
    types::RDKafkaRespErr,
};

use super::{Commit, KafkaConfig, TopicPartition};

/// What the group, the brokers and the client library have to say.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The group gave us these: answer with [`super::KafkaSource::take`].
    Assigned(Vec<TopicPartition>),
    /// The group takes these back, and waits: answer with [`super::KafkaSource::give_back`]; until then nothing more is read.
    Revoked {
        /// Which.
        partitions: Vec<TopicPartition>,
        /// Another member may own them already (we were put out of the group): nothing may be committed.
        lost: bool,
    },
    /// What was given to [`super::KafkaSource::commit`] has its answer.
    Committed(Vec<Commit>, Result<(), CommitRefusal>),
    /// Every few seconds.
    Figures {
        /// At least one broker is connected.
        connected: bool,
        /// The ends of the partitions that we read, as of the last fetches: what is at or past them cannot be read yet.
        ends: Vec<(TopicPartition, i64)>,
        /// How many partitions each topic has, as last looked up (every 5 min by default).
        partitions: Vec<(String, usize)>,
        /// Partitions that we read and whose broker is not known, or has not answered of late: what their ends are nobody knows.
        silent: Vec<TopicPartition>,
    },
    /// A topic has this id: said when it is first looked up, and when it was deleted and made again.
    TopicId {
        /// Its name.
        topic: String,
        /// Its id.
        id: String,
    },
    /// Something does not work at the moment; the client library tries again by itself.
    Trouble(String),
    /// The member cannot go on.
    Fatal {
        /// Another process joined with our static name (P13: we are the zombie).
        fenced: bool,
        /// What happened.
        reason: String,
    },
}

/// Why a commit was not taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CommitRefusal {
    /// Another process has joined the group under our static name.
    Fenced(String),
    /// The commit bore a generation that the group has left behind (P13): it has put us out, or a rebalance overtook the commit.
    OldGeneration(String),
    /// A rebalance is under way.
    Rebalancing,
    /// Anything else; may work later.
    Other(String),
}

/// Gathers what happens inside the client library's calls, as [`Event`]s.
pub(super) struct Context {
    events: Mutex<VecDeque<Event>>,
    closing: AtomicBool,
    /// All that the client library says is passed on, and not only its errors.
    debugs: bool,
    /// A broker that did not answer for so long is not heard.
    silence: Duration,
    /// The last error in the client library's words.
    said: Mutex<Option<(RDKafkaErrorCode, String)>>,
}

impl Context {
    pub(super) fn new(config: &KafkaConfig) -> Self {
        Self {
            events: Mutex::new(VecDeque::new()),
            closing: AtomicBool::new(false),
            debugs: config.debugs(),
            silence: config.silence(),
            said: Mutex::new(None),
        }
    }

    pub(super) fn pop(&self) -> Option<Event> {
        self.events().pop_front()
    }

    pub(super) fn push(&self, event: Event) {
        self.events().push_back(event);
    }

    /// The last error that was told, and its code.
    pub(super) fn said(&self) -> Option<(RDKafkaErrorCode, String)> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on rebalances are answered here: the consumer is about to leave.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
    }

    fn events(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        match level {
            RDKafkaLogLevel::Emerg
            | RDKafkaLogLevel::Alert
            | RDKafkaLogLevel::Critical
            | RDKafkaLogLevel::Error => {
                tracing::error!(target: "librdkafka", "{facility}: {message}");
            }
            RDKafkaLogLevel::Warning if self.debugs => {
                tracing::warn!(target: "librdkafka", "{facility}: {message}");
            }
            RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info if self.debugs => {
                tracing::info!(target: "librdkafka", "{facility}: {message}");
            }
            _ => {
                if let Some((topic, id)) = topic_id(message) {
                    self.push(Event::TopicId { topic: topic.to_owned(), id: id.to_owned() });
                }
                tracing::debug!(target: "librdkafka", "{facility}: {message}");
            }
        }
    }

    fn stats(&self, statistics: Statistics) {
        // A broker is asked for more all the time. One that is cut off counts as connected for long.
        let answers = |id: i32| {
            let of = statistics.brokers.values().find(|broker| broker.nodeid == id && id >= 0);
            of.is_some_and(|broker| {
                broker.state == "UP"
                    && u128::try_from(broker.rxidle).is_ok_and(|us| us < self.silence.as_micros())
            })
        };
        let (mut ends, mut silent) = (vec![], vec![]);
        for topic in statistics.topics.values() {
            for partition in topic.partitions.values() {
                if partition.desired && !answers(partition.broker) {
                    silent.push(TopicPartition::new(&topic.topic, partition.partition));
                }
                // The last stable offset where only committed transactions are seen, else the same as the high watermark.
                let end = if partition.ls_offset >= 0 { partition.ls_offset } else { partition.hi_offset };
                if partition.desired && end >= 0 {
                    ends.push((TopicPartition::new(&topic.topic, partition.partition), end));
                }
            }
        }
        let connected = statistics.brokers.values().any(|broker| broker.state == "UP");
        // The one below zero is the library's own.
        let count = |topic: &rdkafka::statistics::Topic| {
            topic.partitions.keys().filter(|number| **number >= 0).count()
        };
        let partitions =
            statistics.topics.values().map(|topic| (topic.topic.clone(), count(topic))).collect();
        self.push(Event::Figures { connected, ends, partitions, silent });
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if let Some(code) = error.rdkafka_error_code() {
            let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
            // Of what follows from a refusal the refusal is the cause.
            let cause = said.as_ref().is_some_and(|(before, _)| {
                refuses(*before) && !refuses(code) || code == RDKafkaErrorCode::AllBrokersDown
            });
            if !cause {
                *said = Some((code, reason.to_owned()));
            }
        }
        // Comes again as the answer of the poll, which makes an event of it; the reason is only here.
        tracing::debug!(target: "librdkafka", "{reason}");
    }
}

impl ConsumerContext for Context {
    /// Only takes note: the assignment changes when the owner of the source answers, so that partitions can be drained while the
    /// member goes on polling. The library waits for the answer, and reads nothing meanwhile.
    fn rebalance(&self, consumer: &BaseConsumer<Self>, what: RDKafkaRespErr, list: &mut TopicPartitionList) {
        if self.closing.load(Ordering::Acquire) {
            if let Err(error) = consumer.unassign() {
                tracing::debug!(%error, "unassign while leaving the group");
            }
            return;
        }
        let partitions = partitions(list);
        self.push(match what {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => Event::Assigned(partitions),
            _ => Event::Revoked { partitions, lost: consumer.assignment_lost() },
        });
    }
}

/// A topic and its id, where the client library's words hold them: it has no other way to say them that is safe to call. Brokers
/// before 2.8 have no ids.
fn topic_id(message: &str) -> Option<(&str, &str)> {
    let (before, ids) = message.split_once(" changed id from ")?;
    let topic = before.rsplit(' ').next().filter(|topic| !topic.is_empty())?;
    let id = ids.split_once(" to ")?.1.trim();
    (id.len() == 22 && id.bytes().any(|byte| byte != b'A')).then_some((topic, id))
}

pub(super) fn partitions(list: &TopicPartitionList) -> Vec<TopicPartition> {
    list.elements().iter().map(|element| TopicPartition::new(element.topic(), element.partition())).collect()
}

/// What a poll's error means.
pub(super) fn event(error: &KafkaError) -> Event {
    match error {
        KafkaError::MessageConsumptionFatal(code) => {
            Event::Fatal { fenced: is_fenced(*code), reason: describe(*code) }
        }
        other => match other.rdkafka_error_code() {
            Some(code) if is_fenced(code) => Event::Fatal { fenced: true, reason: describe(code) },
            Some(code) => Event::Trouble(describe(code)),
            None => Event::Trouble(other.to_string()),
        },
    }
}

/// The broker, or the way to it, does not want us: it is the configuration.
pub(super) fn refuses(code: RDKafkaErrorCode) -> bool {
    matches!(code, RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SSL)
}

fn is_fenced(code: RDKafkaErrorCode) -> bool {
    matches!(code, RDKafkaErrorCode::Fenced | RDKafkaErrorCode::FencedInstanceId)
}

pub(super) fn describe(code: RDKafkaErrorCode) -> String {
    code.to_string()
}

/// What the answer to a commit means.
pub(super) fn refusal(error: &KafkaError) -> CommitRefusal {
    use RDKafkaErrorCode as Code;
    match error.rdkafka_error_code() {
        Some(code) if is_fenced(code) => CommitRefusal::Fenced(describe(code)),
        Some(
            code @ (Code::IllegalGeneration
            | Code::UnknownMemberId
            | Code::AssignmentLost
            | Code::FencedMemberEpoch
            | Code::StaleMemberEpoch),
        ) => CommitRefusal::OldGeneration(describe(code)),
        Some(Code::RebalanceInProgress) => CommitRefusal::Rebalancing,
        Some(code) => CommitRefusal::Other(describe(code)),
        None => CommitRefusal::Other(error.to_string()),
    }
}

/// The wrapper panics over text that is not UTF-8 and that others have written: none then.
pub(crate) fn readable<T>(read: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(read)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p13_a_refused_generation_is_told_from_trouble() {
        let answer = |code| refusal(&KafkaError::ConsumerCommit(code));
        for code in [RDKafkaErrorCode::IllegalGeneration, RDKafkaErrorCode::UnknownMemberId] {
            assert!(matches!(answer(code), CommitRefusal::OldGeneration(_)), "{code:?}");
        }
        assert!(matches!(answer(RDKafkaErrorCode::FencedInstanceId), CommitRefusal::Fenced(_)));
        assert_eq!(answer(RDKafkaErrorCode::RebalanceInProgress), CommitRefusal::Rebalancing);
        assert!(matches!(answer(RDKafkaErrorCode::NotCoordinator), CommitRefusal::Other(_)));
    }

    #[test]
    fn p3_a_topics_id_is_taken_from_the_client_librarys_words() {
        let said = |words: &str| topic_id(words).map(|(topic, id)| (topic.to_owned(), id.to_owned()));
        assert_eq!(
            said(
                "[thrd:main]: Topic a.b-c_1 changed id from AAAAAAAAAAAAAAAAAAAAAA to 0rVpXLGzQGuBWnT9ywyI0g"
            ),
            Some(("a.b-c_1".to_owned(), "0rVpXLGzQGuBWnT9ywyI0g".to_owned()))
        );
        assert_eq!(said("Topic t changed id from 0rVpXLGzQGuBWnT9ywyI0g to AAAAAAAAAAAAAAAAAAAAAA"), None);
        assert_eq!(said("Topic t [3] Leader 1 Epoch 0"), None);
        assert_eq!(said("Topic t changed id from x to y"), None);
    }

    #[test]
    fn a_fenced_static_name_is_fatal() {
        let error = KafkaError::MessageConsumptionFatal(RDKafkaErrorCode::FencedInstanceId);
        assert!(matches!(event(&error), Event::Fatal { fenced: true, .. }));
        assert!(matches!(
            event(&KafkaError::MessageConsumption(RDKafkaErrorCode::AllBrokersDown)),
            Event::Trouble(_)
        ));
    }
}
