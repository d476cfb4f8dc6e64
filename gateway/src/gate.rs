//! One route at work: [`Gate`]. Doors and library calls go through it alike.
//!
//! ```
//! use std::sync::Arc;
//!
//! use adapters::{sink::Mode, sqlite::{SqliteConfig, SqliteSink}};
//! use oncegate::{gate::{Gate, Once, memory_store}, key::KeySpec, naming::Record, outcome::Outcome};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let sink = SqliteSink::new(SqliteConfig {
//!     create: Some("CREATE TABLE orders (id TEXT NOT NULL PRIMARY KEY, amount INTEGER NOT NULL)".into()),
//!     row_key: vec!["id".into()],
//!     ..SqliteConfig::new(folder.path().join("orders.db"), "orders")
//! });
//! let gate = Gate::builder(memory_store()).key(KeySpec::pointers(["/id"])?).sink(Arc::new(sink)).build().await?;
//!
//! // A record, and a copy of it.
//! let record = Record::new(br#"{"id":"a1","amount":5}"#, 0);
//! assert_eq!(gate.submit(record).await?, Outcome::Written);
//! assert_eq!(gate.submit(record).await?, Outcome::Duplicate);
//!
//! // Any effect, once per name (across crashes only with a store on disk, `Store::open`).
//! let send = || async { Ok::<_, std::io::Error>("sent") };
//! assert_eq!(gate.once("invoice-42", send).await?, Once::Ran("sent"));
//! assert_eq!(gate.once("invoice-42", send).await?, Once::Already);
//! gate.close().await;
//! # Ok(())
//! # }
//! ```

mod build;
mod once;
mod reset;

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use dedup_store::{Fingerprint, Known, Store, StoreOptions};
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tracing::warn;

pub use self::{
    build::{BuildError, GateBuilder, LettersOf},
    once::{Once, OnceError},
    reset::{Reset, reset_floor},
};
use crate::{
    clock::wall_ms,
    door::{HttpLimits, Submit},
    lane::{
        FromLane, LaneHandle, ToLane,
        judge::{Fate, MismatchPolicy, Via, judge_unwritable},
        run::RELAY,
    },
    metrics::RouteMetrics,
    naming::{Chunk, Named, Namer, Record},
    outcome::{Answer, Outcome, Problem},
    route::Route,
};

struct Inner {
    namer: Namer,
    route: Arc<Route>,
    lanes: Vec<LaneHandle>,
    relay_lanes: Vec<LaneHandle>,
    events: Mutex<Option<mpsc::UnboundedReceiver<FromLane>>>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    limits: HttpLimits,
    answer_timeout: Duration,
}

/// One route at work. Cheap to clone. See the [module](self) for an example.
#[derive(Clone)]
pub struct Gate(Arc<Inner>);

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Gate").field(&self.0.route.name).finish()
    }
}

/// A store that keeps nothing on disk: what it knows is learnt from the sink's marks.
pub fn memory_store() -> Store {
    Store::in_memory(StoreOptions {
        window_ms: 86_400_000,
        lateness_ms: 0,
        idle_after_ms: 30_000,
        max_disk_bytes: u64::MAX,
        max_memory_bytes: 4 << 30,
        commit_interval_ms: 200,
    })
}

impl Gate {
    /// Writes one record once; its arrival time is set here. `Ok` if it (or an earlier copy of it) has taken effect or was found to be stale.
    ///
    /// # Cancel safety
    /// The record belongs to the lane as soon as this is polled: dropping the future cancels nothing half way.
    pub async fn submit(&self, record: Record<'_>) -> Result<Outcome, Problem> {
        let mut chunk = Chunk::default();
        let arrival_us = self.arrival_us();
        let until = tokio::time::Instant::now() + self.0.answer_timeout;
        while let Some(reason) = self.0.namer.unreadable_yet(&record) {
            if tokio::time::Instant::now() >= until {
                return Err(Problem::Unavailable(reason));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.0.namer.name(&Record { arrival_us, ..record }, &mut chunk);
        let answers = match self.peek(&chunk) {
            Some(answers) => answers,
            None => Submit::submit(self, chunk).await,
        };
        match answers.into_iter().next() {
            Some(Answer { problem: Some(problem), .. }) => Err(problem),
            Some(answer) => Ok(answer.outcome),
            None => Err(Problem::OutcomeUnknown),
        }
    }

    #[cfg(test)]
    pub(crate) fn inside(&self) -> &Route {
        &self.0.route
    }

    /// Ends the route: everything submitted gets its outcome, lanes end, the store is durable.
    pub async fn close(&self) {
        self.0.route.closing.store(true, Ordering::Release);
        for lane in self.0.lanes.iter().chain(&self.0.relay_lanes) {
            // A lane that has ended already needs no telling.
            drop(lane.queue.send(ToLane::Stop).await);
        }
        let tasks = std::mem::take(&mut *self.0.tasks.lock());
        let lanes = self.0.lanes.len() + self.0.relay_lanes.len();
        for (at, task) in tasks.into_iter().enumerate() {
            if at >= lanes {
                task.abort();
            }
            if let Err(fault) = task.await
                && !fault.is_cancelled()
            {
                warn!(route = %self.0.route.name, "a lane failed: {fault}");
            }
        }
        if let Err(fault) = self.durable(|store| store.wait_durable(store.settle(&[], &[], wall_ms())?)).await
        {
            warn!(route = %self.0.route.name, "{fault}");
        }
    }

    /// The route's store, for figures.
    pub fn store(&self) -> &Store {
        &self.0.route.store
    }

    /// Where the route's outcomes are counted.
    pub fn metrics(&self) -> &Arc<RouteMetrics> {
        &self.0.route.metrics
    }

    /// Whether a part of the key or a column comes from a header.
    #[cfg(feature = "kafka")]
    pub(crate) fn names_by_headers(&self) -> bool {
        self.0.namer.reads_headers()
    }

    /// Why a record cannot be read yet, see [`Namer::unreadable_yet`].
    #[cfg(feature = "kafka")]
    pub(crate) fn unreadable_yet(&self, record: &Record<'_>) -> Option<String> {
        self.0.namer.unreadable_yet(record)
    }

    /// The relay's lanes.
    pub fn relay_lanes(&self) -> &[LaneHandle] {
        &self.0.relay_lanes
    }

    /// These and no other shards of the relay have records to come that were not settled yet (P11), until it says otherwise.
    pub fn awaits(&self, shards: &[adapters::sink::ShardId]) {
        self.0.route.store.awaits(RELAY, shards, wall_ms());
    }

    /// What lanes tell the Kafka door; given out once.
    pub fn take_events(&self) -> Option<mpsc::UnboundedReceiver<FromLane>> {
        self.0.events.lock().take()
    }

    /// The chunk, cut into one for each lane, with the places of the records.
    fn split(&self, chunk: Chunk) -> Vec<(usize, Chunk, Vec<usize>)> {
        let lanes = self.0.lanes.len();
        if lanes <= 1 {
            return vec![(0, chunk, Vec::new())];
        }
        let insert = self.0.route.rules.mode == adapters::sink::Mode::Insert;
        let mut cut: Vec<(Chunk, Vec<usize>)> = (0..lanes).map(|_| Default::default()).collect();
        for (at, named) in chunk.records.iter().enumerate() {
            // Rows of one row key stay in one lane, so that their order holds (P8).
            let by = match (&named.fingerprint, chunk.slice(&named.row_key)) {
                (Some(fingerprint), row_key) if insert || row_key.is_empty() => fingerprint.0[0] as usize,
                (_, row_key) => xxhash_rust::xxh3::xxh3_64(row_key) as usize,
            };
            let (to, places) = &mut cut[by % lanes];
            to.copy_from(&chunk, at);
            places.push(at);
        }
        let filled = cut.into_iter().enumerate().filter(|(_, (chunk, _))| !chunk.records.is_empty());
        filled.map(|(lane, (chunk, places))| (lane, chunk, places)).collect()
    }

    /// Sends one lane its chunk and waits for the answers.
    async fn ask(&self, lane: usize, chunk: Chunk) -> Vec<Answer> {
        let inner = &self.0;
        let keys: Vec<Option<Fingerprint>> = chunk.records.iter().map(|named| named.fingerprint).collect();
        let answer_all = |problem: &Problem, count: bool| {
            if count {
                inner.route.metrics.count(Outcome::Unknown, keys.len() as u64);
            }
            keys.iter().map(|&key| Answer::unknown(key, problem.clone())).collect()
        };
        let Some(handle) = inner.lanes.get(lane) else {
            return answer_all(
                &Problem::Unavailable("this instance takes no calls for the route (lanes.http = 0)".into()),
                true,
            );
        };
        // A copy of a record in flight waits no longer than `wait`; the record itself may take its time.
        let copy = matches!(keys[..], [Some(key)] if inner.route.store.in_flight(&key));
        let wait = Duration::from_millis(inner.route.rules.wait_ms);
        let patience = if copy { wait.min(inner.answer_timeout) } else { inner.answer_timeout };
        let until = tokio::time::Instant::now() + patience;
        let (reply, answers) = oneshot::channel();
        let sent = handle.queue.send(ToLane::Submit { chunk, reply });
        match tokio::time::timeout_at(until, sent).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return answer_all(&Problem::Unavailable("the route has ended".into()), true),
            Err(_) => return answer_all(&Problem::Unavailable("the route is busy".into()), true),
        }
        match tokio::time::timeout_at(until, answers).await {
            Ok(Ok(answers)) => answers,
            Ok(Err(_)) => answer_all(&Problem::Unavailable("the route has ended".into()), true),
            // The record stays with its lane, which counts its outcome.
            Err(_) if copy => answer_all(&Problem::InFlight, false),
            Err(_) => answer_all(&Problem::OutcomeUnknown, false),
        }
    }
}

/// Counts records in flight for as long as their caller waits, however the wait ends.
struct InFlight<'a>(&'a Route, i64);

impl<'a> InFlight<'a> {
    fn new(route: &'a Route, records: usize) -> Self {
        let records = i64::try_from(records).unwrap_or(i64::MAX);
        route.metrics.in_flight(records);
        Self(route, records)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.metrics.in_flight(-self.1);
    }
}

impl Gate {
    /// The answer to a record that needs no lane: it cannot be written, or is a copy of what is settled.
    fn answer_known(&self, named: &Named, known: Option<Known>) -> Option<Answer> {
        let rules = &self.0.route.rules;
        let (outcome, first, problem) = match (&named.problem, known) {
            (Some(problem), _) => match judge_unwritable(problem, Via::Call, rules) {
                Fate::Answer { outcome, first, problem } => (outcome, first, problem),
                _ => return None,
            },
            (None, Some(known)) if known.same(named.digest) || rules.mismatch == MismatchPolicy::Ignore => {
                (Outcome::Duplicate, Some(known.settled), None)
            }
            (None, Some(known)) => (Outcome::Mismatch, Some(known.settled), Some(Problem::Mismatch)),
            (None, None) => return None,
        };
        Some(Answer { outcome, fingerprint: named.fingerprint, first, problem })
    }
}

impl Submit for Gate {
    fn route(&self) -> &str {
        &self.0.route.name
    }

    fn name(&self, record: &Record<'_>, chunk: &mut Chunk) {
        self.0.namer.name(record, chunk);
    }

    fn arrival_us(&self) -> i64 {
        self.0.route.clock.arrival_us(self.0.route.admission_ms.load(Ordering::Relaxed))
    }

    fn peek(&self, chunk: &Chunk) -> Option<Vec<Answer>> {
        let route = &self.0.route;
        let mut answers = Vec::with_capacity(chunk.records.len());
        // A record that cannot be written has no key that counts.
        let key = |named: &Named| named.fingerprint.filter(|_| named.problem.is_none());
        for named in &chunk.records {
            let known = match key(named) {
                // Where memory does not tell, the rest is looked up where reading holds nobody up.
                Some(fingerprint) => match route.store.peek_in_memory(&fingerprint).ok()? {
                    Some(known) => known,
                    None => break,
                },
                None => None,
            };
            answers.push(self.answer_known(named, known)?);
        }
        let rest = &chunk.records[answers.len()..];
        if !rest.is_empty() {
            let more: Option<Vec<Answer>> = route.ask_store(|store| {
                let look = |named: &Named| {
                    let known = key(named).map(|fingerprint| store.peek(&fingerprint)).transpose().ok()?;
                    self.answer_known(named, known.flatten())
                };
                rest.iter().map(look).collect()
            });
            answers.extend(more?);
        }
        let looked = chunk.records.iter().any(|named| named.problem.is_none());
        // Verdicts wait while a lane has no connection (P6). Asked last: a connection that stands now stood over all of the look.
        if looked && !route.verdicts_open() {
            return None;
        }
        for answer in &answers {
            route.metrics.count(answer.outcome, 1);
        }
        Some(answers)
    }

    async fn submit(&self, chunk: Chunk) -> Vec<Answer> {
        let records = chunk.records.len();
        let _gauge = InFlight::new(&self.0.route, records);
        let mut cut = self.split(chunk);
        match cut.pop() {
            Some((lane, chunk, places)) if cut.is_empty() && places.is_empty() => self.ask(lane, chunk).await,
            last => {
                let parts = cut.into_iter().chain(last);
                let asked =
                    parts.map(|(lane, chunk, places)| async move { (self.ask(lane, chunk).await, places) });
                // Silence is not success (rule 5): a place that no lane answers for stays unknown.
                let mut answers = vec![Answer::unknown(None, Problem::OutcomeUnknown); records];
                for (given, places) in futures_util::future::join_all(asked).await {
                    for (place, answer) in places.into_iter().zip(given) {
                        answers[place] = answer;
                    }
                }
                answers
            }
        }
    }

    fn not_ready(&self) -> Option<String> {
        self.0.route.trouble()
    }

    fn limits(&self) -> &HttpLimits {
        &self.0.limits
    }
}

/// Runs what may wait for a disk. A simulated run has no threads beside its own, so that it can be repeated.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    if cfg!(test) {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await.map_err(|fault| fault.to_string())
}
