//! Several records in one request. NDJSON is named and submitted in pieces while the body still comes in; an array is
//! named whole before its first record is submitted, so a malformed one writes nothing.
//!
//! One piece is in flight at a time, so the order of a request's records holds; the next one gathers meanwhile.

use std::{pin::Pin, sync::Arc, time::Instant};

use bytes::Bytes;
use http::HeaderMap;

use super::{
    body::Body,
    problem::{Kind, Trouble},
    reply::{About, Outcomes, Reply},
};
use crate::{
    door::Submit,
    metrics::{RouteMetrics, Stage},
    naming::{
        Chunk, Headers, Named, Record,
        split::{ArraySplitter, LineSplitter, SplitError},
    },
    outcome::{Answer, Problem},
};

/// A piece goes to the lane from so many records or bytes on, once no other is in flight.
const PIECE_RECORDS: usize = 1_000;
const PIECE_BYTES: usize = 1 << 20;
/// A piece that gathers while another is in flight stops the reading at so many records or bytes.
const MOST_RECORDS: usize = 10_000;
const MOST_BYTES: usize = 4 << 20;
/// What one streamed request may hold at once: a piece in flight, one that gathers, and their bodies.
pub(super) const STREAM_BYTES: u64 = 2 * MOST_BYTES as u64;

/// A request of several records on its way.
pub(super) struct Several<'a, S> {
    pub(super) route: &'a Arc<S>,
    pub(super) metrics: &'a RouteMetrics,
    pub(super) request: &'a HeaderMap,
    pub(super) started: Instant,
    pub(super) deadline: tokio::time::Instant,
    pub(super) about: About<'a>,
}

/// A piece at the lane.
struct InFlight<'a> {
    records: usize,
    answers: Pin<Box<dyn Future<Output = Vec<Answer>> + Send + 'a>>,
}

/// What becomes of the pieces, in order.
struct Pieces<'a, S> {
    route: &'a Arc<S>,
    in_flight: Option<InFlight<'a>>,
    outcomes: Outcomes,
}

impl<'a, S: Submit> Pieces<'a, S> {
    /// Sends a piece. Only when none is in flight.
    fn send(&mut self, chunk: Chunk) {
        debug_assert!(self.in_flight.is_none(), "one piece of a request at a time");
        let records = chunk.records.len();
        match self.route.peek(&chunk) {
            Some(answers) => self.outcomes.add(&answers, records),
            None => {
                let answers = Box::pin(self.route.submit(chunk));
                self.in_flight = Some(InFlight { records, answers });
            }
        }
    }

    /// Waits for the piece in flight; for ever if there is none. Dropping the future loses nothing.
    async fn answered(&mut self) {
        let Some(in_flight) = &mut self.in_flight else { return std::future::pending().await };
        let answers = in_flight.answers.as_mut().await;
        let records = in_flight.records;
        self.in_flight = None;
        self.outcomes.add(&answers, records);
    }

    async fn finish(&mut self, deadline: tokio::time::Instant) {
        if self.in_flight.is_some() && tokio::time::timeout_at(deadline, self.answered()).await.is_err() {
            // The lane goes on with it; here its outcome is unknown.
            let records = self.in_flight.take().map_or(0, |in_flight| in_flight.records);
            self.outcomes.add(&[], records);
        }
    }
}

impl<'a, S: Submit> Several<'a, S> {
    /// NDJSON, streamed.
    pub(super) async fn lines(&self, body: &mut Body) -> Reply {
        let limits = self.route.limits();
        let mut splitter = LineSplitter::new(limits.max_record);
        let mut pieces = Pieces { route: self.route, in_flight: None, outcomes: Outcomes::new() };
        let mut gathering = Chunk::default();
        let mut seen = 0;
        let mut complete = false;
        let trouble = loop {
            let ready = gathering.records.len() >= PIECE_RECORDS || gathering.bytes.len() >= PIECE_BYTES;
            if pieces.in_flight.is_none() && (ready || complete) && !gathering.records.is_empty() {
                pieces.send(std::mem::take(&mut gathering));
                continue;
            }
            if complete {
                break None;
            }
            let full = gathering.records.len() >= MOST_RECORDS || gathering.bytes.len() >= MOST_BYTES;
            if full {
                body.pause();
            }
            let read = tokio::select! {
                () = pieces.answered(), if pieces.in_flight.is_some() => continue,
                read = body.next(), if !full => read,
                () = tokio::time::sleep_until(self.deadline) => break Some(took_too_long()),
            };
            match read {
                Ok(Some(bytes)) => splitter.push(&bytes),
                Ok(None) => {
                    splitter.finish();
                    complete = true;
                    self.metrics.observe(Stage::Receive, self.started.elapsed());
                }
                Err(trouble) => break Some(trouble),
            }
            let naming = Instant::now();
            let arrival_us = self.route.arrival_us();
            let mut most = false;
            while let Some(record) = splitter.next_record() {
                most = seen == limits.max_records;
                if most {
                    break;
                }
                self.name(record, seen, arrival_us, &mut gathering);
                seen += 1;
            }
            self.metrics.observe(Stage::Name, naming.elapsed());
            if most {
                break Some(too_many(limits.max_records));
            }
        };
        pieces.finish(self.deadline).await;
        match trouble {
            None => pieces.outcomes.into_reply(self.about),
            Some(trouble) => pieces.outcomes.into_problem(&trouble, self.about),
        }
    }

    /// A JSON array whose body is complete.
    pub(super) async fn array(&self, body: Bytes) -> Reply {
        let started = Instant::now();
        let named = self.name_array(&body);
        drop(body);
        self.metrics.observe(Stage::Name, started.elapsed());
        let chunks = match named {
            Ok(chunks) => chunks,
            Err(trouble) => return super::reply::problem(&trouble, self.about),
        };
        let mut pieces = Pieces { route: self.route, in_flight: None, outcomes: Outcomes::new() };
        for chunk in chunks {
            if tokio::time::Instant::now() >= self.deadline {
                return pieces.outcomes.into_problem(&took_too_long(), self.about);
            }
            pieces.send(chunk);
            pieces.finish(self.deadline).await;
        }
        pieces.outcomes.into_reply(self.about)
    }

    fn name_array(&self, body: &[u8]) -> Result<Vec<Chunk>, Trouble> {
        let limits = self.route.limits();
        let mut splitter = ArraySplitter::new(limits.max_record);
        splitter.push(body);
        splitter.finish();
        let arrival_us = self.route.arrival_us();
        let mut done = Vec::new();
        let mut gathering = Chunk::default();
        let mut seen = 0;
        while let Some(record) = splitter.next_record() {
            match record {
                Err(error) if error.fatal() => {
                    return Err(Trouble::new(Kind::BadRecord, format!("{error}; nothing was written")));
                }
                _ if seen == limits.max_records => return Err(too_many(limits.max_records)),
                record => self.name(record, seen, arrival_us, &mut gathering),
            }
            seen += 1;
            if gathering.records.len() >= MOST_RECORDS || gathering.bytes.len() >= MOST_BYTES {
                done.push(std::mem::take(&mut gathering));
            }
        }
        if !gathering.records.is_empty() {
            done.push(gathering);
        }
        Ok(done)
    }

    fn name(&self, record: Result<&[u8], SplitError>, index: usize, arrival_us: i64, chunk: &mut Chunk) {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        match record {
            Ok(payload) => {
                let record = Record {
                    headers: Headers::Http(self.request),
                    index: Some(index),
                    ..Record::new(payload, arrival_us)
                };
                self.route.name(&record, chunk);
            }
            Err(error) => {
                chunk.records.push(Named::unwritable(Problem::BadRecord(error.to_string()), arrival_us))
            }
        }
    }
}

fn too_many(limit: usize) -> Trouble {
    Trouble::new(
        Kind::BodyTooLarge,
        format!("the request has more than {limit} records; send them in several requests"),
    )
}

fn took_too_long() -> Trouble {
    Trouble::new(Kind::RequestTimeout, "the whole request took too long; send it in smaller parts")
}
