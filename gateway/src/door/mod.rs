//! Doors: where records come in. Each turns bytes into records and hands them to a [`Submit`].

use std::{future::Future, sync::Arc, time::Duration};

use crate::{
    key::KeySpec,
    naming::{Chunk, Record},
    outcome::Answer,
};

pub mod http;
#[cfg(feature = "kafka")]
pub mod kafka;

/// What a door needs of a route. The work belongs to the lane: dropping a future of it cancels nothing half way.
pub trait Submit: Send + Sync + 'static {
    /// The route's name.
    fn route(&self) -> &str;
    /// Names one record into the chunk: exactly one [`crate::naming::Named`] more, with its problem if it has one. Pure, fast.
    fn name(&self, record: &Record<'_>, chunk: &mut Chunk);
    /// The arrival clock: the wall clock, raised to the floor (P11); microseconds since the epoch.
    fn arrival_us(&self) -> i64;
    /// Answers at once, and counts the outcomes, if every record of the chunk is a settled copy or has a problem; otherwise
    /// changes nothing. One answer per record, in order.
    fn peek(&self, chunk: &Chunk) -> Option<Vec<Answer>>;
    /// Hands the chunk to the lane. The outcomes are counted before the answers come. One answer per record, in order.
    /// The caller never has two chunks of one request in flight, so their order holds.
    fn submit(&self, chunk: Chunk) -> impl Future<Output = Vec<Answer>> + Send;
    /// None if ready, else why not: for 503 and `/readyz`.
    fn not_ready(&self) -> Option<String>;
    /// Bounds and rules for requests of this route.
    fn limits(&self) -> &HttpLimits;
}

/// Bounds and rules of one route's HTTP requests. Sizes are of the decoded body.
#[derive(Clone, Debug)]
pub struct HttpLimits {
    /// A body that is read whole (one object, an array), bytes.
    pub max_body: usize,
    /// A body that is streamed (NDJSON), bytes.
    pub max_stream: u64,
    /// One record of an array or of NDJSON, bytes.
    pub max_record: usize,
    /// Records of one request.
    pub max_records: usize,
    /// What an `Idempotency-Key` is for, and its syntax: decided before the body is read.
    pub key: KeySpec,
    /// An `Idempotency-Key` may come with several records: it names the request, and with its place each record. Otherwise 400.
    pub keyed_batches: bool,
    /// What `Authorization: Bearer` must carry; none: open.
    pub bearer: Option<Bearer>,
    /// `Retry-After` of 409 and 503.
    pub retry_after: Duration,
}

impl HttpLimits {
    /// The defaults for a route with this key spec.
    pub fn new(key: KeySpec) -> Self {
        Self {
            max_body: 16 << 20,
            max_stream: 1 << 30,
            max_record: 1 << 20,
            max_records: 1_000_000,
            key,
            keyed_batches: false,
            bearer: None,
            retry_after: Duration::from_secs(1),
        }
    }
}

/// A bearer token. Not shown by `Debug`; compared in constant time.
#[derive(Clone)]
pub struct Bearer(Arc<[u8]>);

impl Bearer {
    /// Takes the token as it must come after `Bearer `.
    pub fn new(token: &str) -> Self {
        Self(token.as_bytes().into())
    }

    /// Whether `given` is this token. Takes as long for a near miss as for a far one.
    pub fn admits(&self, given: &[u8]) -> bool {
        let differences =
            self.0.iter().zip(given).fold(0, |seen, (a, b)| std::hint::black_box(seen | (a ^ b)));
        self.0.len() == given.len() && differences == 0
    }
}

impl std::fmt::Debug for Bearer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bearer(..)")
    }
}
