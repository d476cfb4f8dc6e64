//! From a record's bytes to the JSON object that naming looks at, as the route's format says.

use super::{Record, compile::Namer};
use crate::format::{
    connect::Shapes,
    debezium::{Change, Key, Op, Origin, Tombstones},
};

/// A record whose format was read.
pub(super) struct Opened<'r> {
    pub(super) payload: Given<'r>,
    /// Of a change event.
    pub(super) change: Option<Change>,
    /// The record key, out of its envelope.
    pub(super) key: Option<Key>,
}

/// What naming is to look at.
pub(super) enum Given<'r> {
    /// There is no payload: the row goes.
    Tombstone,
    /// There is none, and it means nothing.
    Passed,
    /// Bytes that are not looked into.
    Raw(&'r [u8]),
    /// The payload itself, which should be JSON.
    Text(&'r [u8]),
    /// The row that was written for it.
    Row,
}

impl Namer {
    /// Reads `record` as the format says; appends the row to `row` if it is not the payload itself.
    pub(super) fn open<'r>(
        &self,
        record: &Record<'r>,
        shapes: &mut Shapes,
        row: &mut String,
    ) -> Result<Opened<'r>, String> {
        let plain = |payload| Ok(Opened { payload, change: None, key: None });
        let Some(debezium) = self.rules.format.debezium() else {
            return plain(match record.payload {
                None => Given::Tombstone,
                Some(payload) if self.rules.format.is_raw() => Given::Raw(payload),
                Some(payload) => Given::Text(payload),
            });
        };
        let key = record.kafka.and_then(|kafka| kafka.key);
        let key = key.map(|key| debezium.key(key, shapes)).transpose()?.flatten();
        let change = match record.payload {
            None => None,
            Some(payload) => {
                let text = text(payload)?;
                let kept = |value: &str| self.placeholders.iter().any(|text| text == value);
                let origin = Origin {
                    topic: record.kafka.map(|kafka| kafka.topic),
                    offset: record.kafka.map(|kafka| kafka.offset),
                };
                debezium.change(text, key.as_ref(), origin, &kept, shapes, row)?
            }
        };
        let payload = match (&change, debezium.tombstones) {
            (Some(_), _) => Given::Row,
            (None, Tombstones::Skip) => Given::Passed,
            (None, Tombstones::Delete) => Given::Tombstone,
            (None, Tombstones::Reject) => {
                return Err("the record has no payload, and tombstones = \"reject\"; set it to \"skip\" or \"delete\", or \
                            tombstones.on.delete=false at the connector"
                    .to_owned());
            }
        };
        Ok(Opened { payload, change, key })
    }
}

impl Opened<'_> {
    /// Of a record that could not be read.
    pub(super) fn unreadable() -> Self {
        Self { payload: Given::Passed, change: None, key: None }
    }

    /// The change deletes its row.
    pub(super) fn deletes(&self) -> bool {
        self.change.as_ref().is_some_and(|change| change.op == Op::Delete)
    }
}

/// The payload as text.
pub(super) fn text(payload: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(payload)
        .map_err(|error| format!("not UTF-8 at byte {}; send JSON as UTF-8", error.valid_up_to()))
}
