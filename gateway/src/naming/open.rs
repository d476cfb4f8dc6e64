//! From a record's bytes to the JSON object that naming looks at, as the route's format says.

use super::{Record, compile::Namer};
use crate::{
    format::{
        Encoding, RecordKey,
        connect::Shapes,
        debezium::{Change, Key, Op, Origin, Tombstones},
        schemas::{Look, head},
    },
    outcome::Problem,
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
    ) -> Result<Opened<'r>, Problem> {
        let format = &self.rules.format;
        let kept = |value: &str| self.placeholders.iter().any(|text| text == value);
        let of_key = record.kafka.and_then(|kafka| kafka.key);
        let mut decoded_key = String::new();
        let of_key = match (format.record_key, of_key) {
            (RecordKey::Registered, Some(key)) => {
                self.decode("the record key", key, &|_| false, &mut decoded_key)?;
                Some(decoded_key.as_str())
            }
            (RecordKey::Json, Some(key)) => std::str::from_utf8(key).ok(),
            (_, None) => None,
        };
        let Some(debezium) = format.debezium() else {
            let key =
                (format.record_key == RecordKey::Registered).then(|| of_key.map(str::to_owned)).flatten();
            let payload = match (record.payload, format.encoding) {
                (None, _) => Given::Tombstone,
                (Some(payload), Encoding::Raw) => Given::Raw(payload),
                (Some(payload), Encoding::Json) => Given::Text(payload),
                (Some(payload), Encoding::Avro | Encoding::Protobuf) => {
                    self.decode("the payload", payload, &kept, row)?;
                    Given::Row
                }
            };
            return Ok(Opened { payload, change: None, key: key.map(|text| Key { text }) });
        };
        let bad = Problem::BadRecord;
        let key = of_key.map(|key| debezium.key(key, shapes)).transpose().map_err(bad)?.flatten();
        let mut decoded = String::new();
        let event = match (record.payload, format.encoding.is_registered()) {
            (None, _) => None,
            (Some(payload), false) => Some(text(payload).map_err(bad)?),
            (Some(payload), true) => {
                self.decode("the payload", payload, &kept, &mut decoded)?;
                Some(decoded.as_str())
            }
        };
        let origin = Origin {
            topic: record.kafka.map(|kafka| kafka.topic),
            offset: record.kafka.map(|kafka| kafka.offset),
        };
        let change = event.map(|event| debezium.change(event, key.as_ref(), origin, &kept, shapes, row));
        let change = change.transpose().map_err(bad)?.flatten();
        let payload = match (&change, debezium.tombstones) {
            (Some(_), _) => Given::Row,
            (None, Tombstones::Skip) => Given::Passed,
            (None, Tombstones::Delete) => Given::Tombstone,
            (None, Tombstones::Reject) => {
                return Err(bad("the record has no payload, and tombstones = \"reject\"; set it to \"skip\" or \"delete\", or \
                                tombstones.on.delete=false at the connector"
                    .to_owned()));
            }
        };
        Ok(Opened { payload, change, key })
    }

    /// Appends what `bytes`, in the wire format, hold.
    fn decode(
        &self,
        what: &str,
        bytes: &[u8],
        kept: &dyn Fn(&str) -> bool,
        out: &mut String,
    ) -> Result<(), Problem> {
        let bad = |fault: String| Problem::BadRecord(format!("{what}: {fault}"));
        let (id, bytes) = head(bytes).map_err(bad)?;
        match self.schemas.as_ref().map(|schemas| schemas.look(id)) {
            Some(Look::Here(schema)) => schema.read(bytes, kept, out).map_err(bad),
            Some(Look::Never(fault)) => Err(bad(fault)),
            Some(Look::NotYet(reason)) => Err(Problem::Unavailable(reason)),
            None => Err(Problem::Unavailable("the route has no schema registry".to_owned())),
        }
    }

    /// Why the record cannot be read yet: a schema that it names is not here. It was asked for; look again soon. A record that can
    /// be read, or never will, waits for nothing.
    pub fn unreadable_yet(&self, record: &Record<'_>) -> Option<String> {
        let schemas = self.schemas.as_ref()?;
        let format = &self.rules.format;
        let key =
            record.kafka.and_then(|kafka| kafka.key).filter(|_| format.record_key == RecordKey::Registered);
        let payload = record.payload.filter(|_| format.encoding.is_registered());
        // Both are asked for at once.
        let waits = [key, payload].map(|bytes| match schemas.look(head(bytes?).ok()?.0) {
            Look::NotYet(reason) => Some(reason),
            Look::Here(_) | Look::Never(_) => None,
        });
        waits.into_iter().flatten().next()
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
