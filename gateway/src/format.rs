//! What a topic holds, and how it is read: encodings (JSON, raw bytes) and Debezium's change events. Pure.
//!
//! Every format ends as one JSON object, the row, from which naming takes keys, columns and times as it does from plain JSON.
//! What JSON cannot say exactly comes as a string that the sinks read exactly: decimals, bytes (base64), dates and times.

pub(crate) mod connect;
pub(crate) mod debezium;
pub(crate) mod position;
pub(crate) mod semantic;

pub use self::{
    debezium::{Debezium, Deletes, Member, Snapshots, Tables, Tombstones, Unavailable, Version},
    semantic::{Semantic, Unit},
};

/// How a route reads its records.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Format {
    /// How bytes become values.
    pub encoding: Encoding,
    /// What the values mean.
    pub content: Content,
}

impl Format {
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
