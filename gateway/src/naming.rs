//! From a record's bytes to its name and its row, in one pass: [`Namer::name`]. Pure.
//!
//! The types here are the contract between doors, naming and lanes.

mod compile;
mod derive;
pub(crate) mod json;
mod members;
mod namer;
mod open;
mod row;
mod rules;
pub mod split;
mod time;

use std::ops::Range;

use adapters::sink::RowKind;
use dedup_store::{Digest, Fingerprint};

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::time::event_ms;
pub use self::{
    compile::Namer,
    rules::{ColumnSource, Constant, DeleteWhen, DigestOver, NamingRules, UnknownFields},
    time::{EventTime, TIME_BOUNDS_MS, TimeUnit},
};
use crate::outcome::Problem;

#[cfg(test)]
mod tests;

/// One incoming write, borrowed from the door.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Bytes untouched; none for a Kafka tombstone.
    pub payload: Option<&'a [u8]>,
    /// Looks a header up by name (HTTP: case-insensitive; Kafka: exact, last wins).
    pub headers: Headers<'a>,
    /// Set by the Kafka door.
    pub kafka: Option<KafkaOrigin<'a>>,
    /// When it came in, microseconds since the epoch, already raised to the floor (P11).
    pub arrival_us: i64,
    /// Whose record it is, as the door has made sure; empty without tenants. Inside every fingerprint.
    pub tenant: &'a str,
    /// Its place in an HTTP body of several records: an `Idempotency-Key` names the request, and with the place the record.
    pub index: Option<u32>,
}

impl<'a> Record<'a> {
    /// A record of nothing but its payload.
    pub fn new(payload: &'a [u8], arrival_us: i64) -> Self {
        Self {
            payload: Some(payload),
            headers: Headers::None,
            kafka: None,
            arrival_us,
            tenant: "",
            index: None,
        }
    }
}

/// A record's headers, wherever they come from.
#[derive(Clone, Copy, Debug)]
pub enum Headers<'a> {
    /// None (library).
    None,
    /// Of an HTTP request.
    Http(&'a http::HeaderMap),
    /// Of a Kafka record.
    Pairs(&'a [(&'a str, Option<&'a [u8]>)]),
}

/// Where a Kafka record comes from.
#[derive(Clone, Copy, Debug)]
pub struct KafkaOrigin<'a> {
    /// Topic name.
    pub topic: &'a str,
    /// Partition.
    pub partition: i32,
    /// Offset.
    pub offset: i64,
    /// Record key.
    pub key: Option<&'a [u8]>,
    /// Record timestamp, ms since the epoch.
    pub timestamp_ms: Option<i64>,
    /// Goes to [`Named::shard`].
    pub shard: u32,
}

/// Named records on their way to one lane; their bytes stand side by side in one buffer.
#[derive(Debug, Default)]
pub struct Chunk {
    /// Payloads, rows and row keys.
    pub bytes: Vec<u8>,
    /// In order of arrival.
    pub records: Vec<Named>,
}

impl Named {
    /// A call's record that could not even be looked at: it has its place and its outcome all the same.
    pub fn unwritable(problem: Problem, arrival_us: i64) -> Self {
        Self {
            fingerprint: None,
            digest: Digest(0),
            event_ms: arrival_us.div_euclid(1_000),
            kind: RowKind::Write,
            payload: None,
            row: 0..0,
            row_key: 0..0,
            shard: 0,
            position: None,
            problem: Some(Box::new(problem)),
        }
    }
}

impl Chunk {
    /// The bytes of one of the chunk's ranges.
    pub fn slice(&self, range: &Range<u32>) -> &[u8] {
        &self.bytes[range.start as usize..range.end as usize]
    }

    /// Appends record `at` of `other`, with its bytes.
    pub fn copy_from(&mut self, other: &Chunk, at: usize) {
        let mut named = other.records[at].clone();
        for range in
            [Some(&mut named.row), Some(&mut named.row_key), named.payload.as_mut()].into_iter().flatten()
        {
            let start = self.bytes.len() as u32;
            self.bytes.extend_from_slice(&other.bytes[range.start as usize..range.end as usize]);
            *range = start..self.bytes.len() as u32;
        }
        self.records.push(named);
    }
}

/// One record after naming. Ranges point into [`Chunk::bytes`].
#[derive(Clone, Debug)]
pub struct Named {
    /// The key, if it could be derived.
    pub fingerprint: Option<Fingerprint>,
    /// Of the payload (or of the members that count).
    pub digest: Digest,
    /// Event time, ms.
    pub event_ms: i64,
    /// Write or delete.
    pub kind: RowKind,
    /// The untouched payload; none for a tombstone.
    pub payload: Option<Range<u32>>,
    /// The row in the sink's wire form; empty if `problem` is set.
    pub row: Range<u32>,
    /// Canonical row key; empty if the route names none.
    pub row_key: Range<u32>,
    /// Index of the shard among the lane's shards as the door and the lane agreed (0 for HTTP).
    pub shard: u32,
    /// Kafka offset.
    pub position: Option<i64>,
    /// Why it cannot be written, if so.
    pub problem: Option<Box<Problem>>,
}
