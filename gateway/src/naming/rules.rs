//! What a route says of its records: [`NamingRules`]. Plain data.

use std::collections::BTreeMap;

use crate::{
    format::{Format, Member},
    key::{KeySpec, Pointer},
    naming::{json::MAX_DEPTH, time::EventTime},
};

/// How records of a route become names and rows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamingRules {
    /// What the records are.
    pub format: Format,
    /// Names the event.
    pub key: KeySpec,
    /// When it happened.
    pub event_time: EventTime,
    /// What must be alike in two copies.
    pub digest: DigestOver,
    /// Columns that do not take the top-level member of their name.
    pub columns: BTreeMap<String, ColumnSource>,
    /// Members that nothing uses.
    pub unknown_fields: UnknownFields,
    /// Which payloads delete.
    pub delete_when: Option<DeleteWhen>,
    /// Columns that name the row, as the sink has them: tombstones take them from the Kafka key.
    pub row_key: Vec<String>,
    /// The sink's version column: change events give it their version, unless `columns` says otherwise.
    pub version: Option<String>,
    /// Deepest nesting of a payload, 1 to 128; the payload itself is level 1.
    pub max_depth: usize,
}

impl NamingRules {
    /// With the defaults of the option table.
    pub fn new(key: KeySpec) -> Self {
        Self {
            format: Format::default(),
            key,
            event_time: EventTime::Arrival,
            digest: DigestOver::Payload,
            columns: BTreeMap::new(),
            unknown_fields: UnknownFields::Reject,
            delete_when: None,
            row_key: Vec::new(),
            version: None,
            max_depth: MAX_DEPTH,
        }
    }
}

/// What the payload digest covers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum DigestOver {
    /// Every byte of the payload.
    #[default]
    Payload,
    /// These values: white space, the order of members and other members do not count.
    Pointers(Vec<Pointer>),
}

/// Where a column's value comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ColumnSource {
    /// A value of the payload; the empty pointer is the whole payload.
    Pointer(Pointer),
    /// A header, by case-insensitive name over HTTP.
    Header(String),
    /// The Kafka record key: bytes for a binary column, else text.
    KafkaKey,
    /// The last Kafka header of that name.
    KafkaHeader(String),
    /// The Kafka record's timestamp.
    KafkaTimestamp,
    /// The Kafka topic's name.
    Topic,
    /// The Kafka partition's number.
    Partition,
    /// The Kafka offset.
    Offset,
    /// When the record came in.
    Arrival,
    /// The same for every record.
    Constant(Constant),
    /// What a change event says of itself.
    Debezium(Member),
    /// Nothing: the column's own default applies.
    Default,
}

/// A value from the configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Constant {
    /// Text, of which the column's type makes what it can.
    Text(String),
    /// An integer.
    Integer(i64),
    /// JSON text: `true`, `1.50`.
    Json(String),
}

/// What becomes of top-level members that no column, key, time, digest or `delete_when` uses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum UnknownFields {
    /// The record is rejected: nothing is dropped silently.
    #[default]
    Reject,
    /// They are dropped.
    Ignore,
    /// They go to this JSON column, as one object.
    Column(String),
}

/// A payload that deletes its row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeleteWhen {
    /// Where to look.
    pub pointer: Pointer,
    /// The JSON text that must stand there: `true`, `"d"`. Compared by value, numbers by their text.
    pub equals: String,
}
