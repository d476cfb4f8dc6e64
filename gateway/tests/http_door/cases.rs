//! The table of cases, named by their ids in the conformance list (A: idempotency, B: replays, X: framing) or, where the list has
//! none, by what they prove.

use std::io::Write as _;

use oncegate::door::{Bearer, HttpLimits};
use oncegate::key::KeySpec;
use serde_json::Value;

use crate::wire::{piece, post};

mod framing;
mod idempotency;
mod several;

/// What a client does, and what it must see.
pub(crate) enum Step {
    Send(Vec<u8>),
    /// Closes the client's side.
    End,
    /// Drops the connection and opens another.
    Again,
    Get(Want),
    /// The server closes without a further byte.
    Closed,
    /// Nothing comes for a while.
    Silent,
    WaitMs(u64),
    /// The sink goes away, or comes back.
    Away(bool),
    Drain,
}

/// A response.
#[derive(Default)]
pub(crate) struct Want {
    pub(crate) status: u16,
    /// `*`: any value.
    pub(crate) headers: Vec<(&'static str, &'static str)>,
    pub(crate) absent: Vec<&'static str>,
    pub(crate) json: Vec<(&'static str, Value)>,
}

impl Want {
    fn header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.push((name, value));
        self
    }

    fn absent(mut self, name: &'static str) -> Self {
        self.absent.push(name);
        self
    }

    fn json(mut self, pointer: &'static str, value: impl Into<Value>) -> Self {
        self.json.push((pointer, value.into()));
        self
    }
}

pub(crate) struct Case {
    pub(crate) id: &'static str,
    pub(crate) limits: fn(&mut HttpLimits),
    pub(crate) steps: Vec<Step>,
    /// Rows that the sink holds at the end.
    pub(crate) rows: usize,
}

fn case(id: &'static str, rows: usize, steps: Vec<Step>) -> Case {
    Case { id, limits: |_| {}, steps, rows }
}

impl Case {
    fn limits(mut self, limits: fn(&mut HttpLimits)) -> Self {
        self.limits = limits;
        self
    }
}

fn status(status: u16) -> Want {
    Want { status, ..Want::default() }
}

/// A first write.
fn written() -> Want {
    status(201)
        .header("oncegate-outcome", "written")
        .absent("idempotent-replayed")
        .json("/outcome", "written")
}

/// A copy of it.
fn replayed() -> Want {
    status(201)
        .header("oncegate-outcome", "duplicate")
        .header("idempotent-replayed", "true")
        .json("/outcome", "written")
}

fn problem(code: u16, slug: &'static str) -> Want {
    status(code)
        .header("content-type", "application/problem+json")
        .json("/type", format!("{}{slug}", oncegate::door::http::PROBLEM_BASE))
}

fn retry(code: u16, slug: &'static str) -> Want {
    problem(code, slug).header("retry-after", "1").json("/retry_after_ms", 1000)
}

fn keyed(key: &'static str) -> Vec<u8> {
    post(&[("idempotency-key", key)], r#"{"pad":"x"}"#)
}

fn strict(limits: &mut HttpLimits) {
    limits.key = KeySpec::idempotency_key().strict(true);
}

fn required(limits: &mut HttpLimits) {
    limits.key = KeySpec::idempotency_key();
}

fn bearer(limits: &mut HttpLimits) {
    limits.bearer = Some(Bearer::new("t0ken"));
}

fn small(limits: &mut HttpLimits) {
    limits.max_body = 1_000;
    limits.max_stream = 4_000;
    limits.max_record = 500;
    limits.max_records = 20;
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

fn chunked(pieces: &[&str]) -> Vec<u8> {
    let mut out = post(&[("transfer-encoding", "chunked")], "");
    for bytes in pieces {
        out.extend(piece(bytes));
    }
    out.extend_from_slice(b"0\r\n\r\n");
    out
}

/// All cases.
pub(crate) fn cases() -> Vec<Case> {
    [idempotency::cases(), several::cases(), framing::cases()].into_iter().flatten().collect()
}

impl Case {
    fn rows(mut self, rows: usize) -> Self {
        self.rows = rows;
        self
    }
}
