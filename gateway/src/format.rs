//! What a topic holds, and how it is read: encodings (JSON, raw bytes, Avro, Protobuf) and Debezium's change events. Pure, but for the task that
//! fetches schemas.
//!
//! Every format ends as one JSON object, the row, from which naming takes keys, columns and times as it does from plain JSON.
//! What JSON cannot say exactly comes as a string that the sinks read exactly: decimals, bytes (base64), dates and times.

pub(crate) mod avro;
pub(crate) mod connect;
pub(crate) mod debezium;
#[cfg(feature = "kafka")]
pub mod fetch;
pub(crate) mod position;
#[cfg(feature = "protobuf")]
pub(crate) mod protobuf;
pub(crate) mod schemas;
pub(crate) mod semantic;

pub use self::{
    debezium::{Debezium, Deletes, Member, Snapshots, Tables, Tombstones, Unavailable, Version},
    schemas::Schemas,
    semantic::{Semantic, Unit},
};

/// How a route reads its records.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Format {
    /// How bytes become values.
    pub encoding: Encoding,
    /// What the values mean.
    pub content: Content,
    /// How record keys become values, where they are looked into.
    pub record_key: RecordKey,
}

impl Format {
    /// It reads nothing without a schema registry.
    pub fn needs_registry(&self) -> bool {
        self.encoding.is_registered()
    }

    /// The payload is never looked into.
    pub fn is_raw(&self) -> bool {
        self.encoding == Encoding::Raw
    }

    /// How change events are read, if that is what comes.
    pub fn debezium(&self) -> Option<&Debezium> {
        match &self.content {
            Content::Row => None,
            Content::Debezium(debezium) => Some(debezium),
        }
    }
}

/// How bytes become values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Encoding {
    /// JSON text.
    #[default]
    Json,
    /// Bytes that mean nothing here.
    Raw,
    /// Avro by a registered schema, in Confluent's wire format.
    Avro,
    /// Protobuf, likewise; with the feature `protobuf`.
    Protobuf,
}

impl Encoding {
    /// Its schemas are kept in a registry.
    pub fn is_registered(self) -> bool {
        matches!(self, Encoding::Avro | Encoding::Protobuf)
    }
}

/// How record keys become values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RecordKey {
    /// They are JSON, or mean nothing but themselves.
    #[default]
    Json,
    /// They are in the payload's encoding, in the wire format.
    Registered,
}

/// What the values mean.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Content {
    /// A row.
    #[default]
    Row,
    /// A change of a row.
    Debezium(Debezium),
}
