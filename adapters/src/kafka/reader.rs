use rdkafka::{
    Message,
    consumer::base_consumer::PartitionQueue,
    error::{KafkaError, RDKafkaErrorCode},
    message::{BorrowedMessage, Headers},
};

use super::{
    TopicPartition,
    context::{Context, describe, readable},
};

/// One partition that the group gave us, on its way into the relay. Paused until [`super::KafkaSource::read_from`].
pub struct Reader {
    pub(super) at: TopicPartition,
    pub(super) queue: PartitionQueue<Context>,
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Reader").field(&self.at).finish()
    }
}

/// Why the next record does not come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReadFault {
    /// All that can be read has been; said once each time.
    End,
    /// The position is outside of the log: reading has ended until the partition is placed anew ([`super::KafkaSource::restart`]).
    OutOfRange,
    /// Tried again by the client library itself.
    Trouble(String),
}

impl Reader {
    /// Which partition.
    pub fn at(&self) -> &TopicPartition {
        &self.at
    }

    /// The next record that is here already; never waits.
    pub fn next(&self) -> Option<Result<SourceRecord<'_>, ReadFault>> {
        Some(match self.queue.poll(std::time::Duration::ZERO)? {
            Ok(message) => Ok(SourceRecord { message }),
            Err(KafkaError::PartitionEOF(_)) => Err(ReadFault::End),
            Err(error) => Err(match error.rdkafka_error_code() {
                Some(RDKafkaErrorCode::AutoOffsetReset | RDKafkaErrorCode::OffsetOutOfRange) => {
                    ReadFault::OutOfRange
                }
                Some(code) => ReadFault::Trouble(describe(code)),
                None => ReadFault::Trouble(error.to_string()),
            }),
        })
    }
}

/// A record as the client library holds it: nothing is copied.
pub struct SourceRecord<'a> {
    message: BorrowedMessage<'a>,
}

impl SourceRecord<'_> {
    /// Its offset.
    pub fn offset(&self) -> i64 {
        self.message.offset()
    }

    /// Its key.
    pub fn key(&self) -> Option<&[u8]> {
        self.message.key()
    }

    /// Its payload; none for a tombstone.
    pub fn payload(&self) -> Option<&[u8]> {
        self.message.payload()
    }

    /// Its timestamp, ms since the epoch.
    pub fn timestamp_ms(&self) -> Option<i64> {
        self.message.timestamp().to_millis()
    }

    /// Its headers in order, into `pairs`. A header whose name is not UTF-8 is left out: no setting can name it.
    pub fn headers<'s>(&'s self, pairs: &mut Vec<(&'s str, Option<&'s [u8]>)>) {
        let Some(headers) = self.message.headers() else { return };
        for index in 0..headers.count() {
            if let Some(Some(header)) = readable(|| headers.try_get(index)) {
                pairs.push((header.key, header.value));
            }
        }
    }
}
