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
//! // Any effect, once per name.
//! let send = || async { Ok::<_, std::io::Error>("sent") };
//! assert_eq!(gate.once("invoice-42", send).await?, Once::Ran("sent"));
//! assert_eq!(gate.once("invoice-42", send).await?, Once::Already);
//! gate.close().await;
//! # Ok(())
//! # }
//! ```

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use adapters::{
    dead_letters::DeadLetters,
    sink::{Acquire, Misfit, RouteRow, Session, ShardId, ShardState, Sink, SinkError},
};
use dedup_store::{
    Algorithm, Digest, Entry, Fingerprint, Identity, Settled, Store, StoreError, StoreOptions,
};
use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tracing::{error, info, warn};

use crate::{
    clock::{ArrivalClock, wall_ms},
    door::{HttpLimits, Submit},
    key::{KeySpec, effect_fingerprint},
    lane::{
        FromLane, LaneHandle, Rules, ToLane,
        judge::{Fate, MismatchPolicy, Via, judge_unwritable},
        own::STALE_OWNER_MS,
        run::Lane,
        shard::OwnedShard,
    },
    metrics::{Metrics, RouteMetrics},
    naming::{Chunk, EventTime, Named, Namer, NamingRules, Record},
    outcome::{Answer, Outcome, Problem},
    route::{LearnError, Route},
};

/// Claims of `Gate::once` belong to no lane.
const EFFECT_LANE: u32 = u32::MAX;
/// Messages in the inbox of a callers' lane; the HTTP door bounds the bytes.
const INBOX: usize = 1_024;
/// Chunks in the inbox of a relay's lane, about 1 MiB each: a few batches.
const RELAY_INBOX: usize = 16;
const MAINTENANCE: Duration = Duration::from_secs(1);

/// Why a route cannot start: everything that was found, each with its remedy.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct BuildError(pub Vec<Misfit>);

impl BuildError {
    fn one(what: impl ToString, remedy: &str) -> Self {
        Self(vec![Misfit { what: what.to_string(), remedy: remedy.into() }])
    }
}

impl From<StoreError> for BuildError {
    fn from(fault: StoreError) -> Self {
        Self::one(fault, "see the store's message")
    }
}

impl From<SinkError> for BuildError {
    fn from(fault: SinkError) -> Self {
        Self::one(fault, "check that the sink is reachable and that its user may write")
    }
}

/// Makes the keeper of a lane's dead letters, where they go to a topic or a file.
pub type LettersOf = Box<dyn Fn() -> Box<dyn DeadLetters> + Send + Sync>;

/// Gathers what a [`Gate`] is made of.
pub struct GateBuilder {
    store: Store,
    name: String,
    owner: String,
    naming: Option<NamingRules>,
    sink: Option<Arc<dyn Sink>>,
    rules: Option<Rules>,
    call_lanes: u32,
    relay_lanes: u32,
    limits: Option<HttpLimits>,
    answer_timeout: Duration,
    secret: Option<[u8; 192]>,
    untrusted_keys: bool,
    letters: Option<LettersOf>,
    metrics: Option<Arc<RouteMetrics>>,
    on_wait: Option<Box<dyn Fn(String) + Send + Sync>>,
}

impl GateBuilder {
    /// What names an event; everything else of the naming takes its defaults.
    pub fn key(mut self, key: KeySpec) -> Self {
        self.naming = Some(NamingRules::new(key));
        self
    }

    /// How records become names and rows.
    pub fn naming(mut self, rules: NamingRules) -> Self {
        self.naming = Some(rules);
        self
    }

    /// Where rows go.
    pub fn sink(mut self, sink: Arc<dyn Sink>) -> Self {
        self.sink = Some(sink);
        self
    }

    /// The route's name (default `library`).
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Names this instance in the sink's shard rows. The same across restarts of one instance, different for any other.
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = owner.into();
        self
    }

    /// The route's rules; `mode` and `key_within_row_key` are set from the sink and the key.
    pub fn rules(mut self, rules: Rules) -> Self {
        self.rules = Some(rules);
        self
    }

    /// Lanes for callers (default 1) and for the relay (default 0). A route with relay lanes may do without callers': then
    /// several instances can share its partitions, while the callers' shards belong to one instance at a time (P3).
    pub fn lanes(mut self, call: u32, relay: u32) -> Self {
        self.call_lanes = if relay == 0 { call.max(1) } else { call };
        self.relay_lanes = relay;
        self
    }

    /// Bounds of HTTP requests.
    pub fn limits(mut self, limits: HttpLimits) -> Self {
        self.limits = Some(limits);
        self
    }

    /// How long a caller waits for an outcome before it is told that it is unknown (default 30 s).
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    /// The hash secret, where it is not to be made by the first instance and kept in the sink.
    pub fn hash_secret(mut self, secret: [u8; 192]) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Producers may choose keys with bad intent: SipHash names them.
    pub fn untrusted_keys(mut self, untrusted: bool) -> Self {
        self.untrusted_keys = untrusted;
        self
    }

    /// Where dead letters go, if not beside the rows.
    pub fn dead_letters(mut self, letters: LettersOf) -> Self {
        self.letters = Some(letters);
        self
    }

    /// Where outcomes are counted (default: a registry of its own).
    pub fn metrics(mut self, metrics: Arc<RouteMetrics>) -> Self {
        self.metrics = Some(metrics);
        self
    }

    /// Told what the start waits for (another owner that still lives).
    pub fn on_wait(mut self, told: impl Fn(String) + Send + Sync + 'static) -> Self {
        self.on_wait = Some(Box::new(told));
        self
    }

    /// Starts the route: probes the sink, agrees on the route's identity, takes the callers' shards over, learns the facts
    /// that the sink's marks hold and the store does not, and sets the lanes going (P1, P3, P6).
    pub async fn build(self) -> Result<Gate, BuildError> {
        let missing = |what: &str| BuildError::one(format!("{what} is missing"), "give it to the builder");
        let sink = self.sink.clone().ok_or_else(|| missing("a sink"))?;
        let mut naming = self.naming.clone().ok_or_else(|| missing("a key spec"))?;
        let key = naming.key.clone();
        let encoder = sink.probe().await.map_err(BuildError)?;
        let mut session = sink.session(&self.name, &self.owner);
        session.acquire(&[], Acquire::Force).await?;
        let identity = self.identity(&mut *session, naming.key.id()).await?;
        let hasher = self.store.bind(&identity)?;
        naming.row_key = sink.row_key().to_vec();
        let arrival = naming.event_time == EventTime::Arrival;
        let namer = Namer::new(naming, encoder, hasher.clone()).map_err(BuildError)?;
        let mut rules = self.rules.clone().unwrap_or_default();
        rules.mode = sink.mode();
        rules.key_within_row_key = !sink.row_key().is_empty() && namer.key_within_row_key(sink.row_key());
        let metrics = self.metrics.clone().unwrap_or_else(|| Metrics::new().route(&self.name));
        let route = Arc::new(Route::new(
            self.name.as_str().into(),
            Arc::new(self.store),
            hasher,
            rules,
            metrics,
            ArrivalClock::new(),
            arrival,
        ));
        let opening = Opening { route: &route, on_wait: self.on_wait.as_deref() };
        let (own, others) = opening.open(&mut *session, self.call_lanes).await?;
        drop(session);
        let (events, events_of_lanes) = mpsc::unbounded_channel();
        let mut handles = Vec::new();
        let mut tasks = Vec::new();
        let mut others = Some(others);
        for id in 0..self.call_lanes + self.relay_lanes {
            let relay = id >= self.call_lanes;
            let (queue, inbox) = mpsc::channel(if relay { RELAY_INBOX } else { INBOX });
            let shard = own.get(id as usize).map(OwnedShard::new);
            let events = relay.then(|| events.clone());
            let letters = self.letters.as_ref().map(|letters| letters());
            let session = sink.session(&self.name, &self.owner);
            let others = others.take().into_iter().flatten().map(|state| OwnedShard::new(&state)).collect();
            let lane = Lane::new(id, route.clone(), session, inbox, events, letters, shard, others);
            handles.push(LaneHandle { queue });
            tasks.push(tokio::spawn(watched(route.clone(), id, lane.run())));
        }
        let relay_lanes = handles.split_off(self.call_lanes as usize);
        tasks.push(tokio::spawn(maintain(Arc::downgrade(&route))));
        info!(route = %route.name, lanes = self.call_lanes, relay_lanes = self.relay_lanes, "route started");
        Ok(Gate(Arc::new(Inner {
            namer,
            route,
            lanes: handles,
            relay_lanes,
            events: Mutex::new(Some(events_of_lanes)),
            tasks: Mutex::new(tasks),
            limits: self.limits.unwrap_or_else(|| HttpLimits::new(key)),
            answer_timeout: self.answer_timeout,
        })))
    }

    /// The identity that the sink keeps (first writer wins), checked against what was asked for (P1).
    async fn identity(&self, session: &mut dyn Session, key_spec_id: u64) -> Result<Identity, BuildError> {
        let algorithm = if self.untrusted_keys { Algorithm::SipHash24 } else { Algorithm::Xxh3Secret };
        let proposed = match self.store.identity() {
            Some(identity) => identity,
            None => Identity {
                route_id: rand::random(),
                key_spec_id,
                algorithm,
                secret: self.secret.unwrap_or_else(|| {
                    let mut secret = [0; 192];
                    rand::fill(&mut secret[..]);
                    secret
                }),
            },
        };
        let row = session
            .register_route(&RouteRow {
                route_id: proposed.route_id.to_vec(),
                key_spec_id: proposed.key_spec_id as i64,
                algorithm: proposed.algorithm as i16,
                secret: proposed.secret.to_vec(),
            })
            .await?;
        let damaged =
            || BuildError::one("the route's row in oncegate_routes is damaged", "restore it from a backup");
        let kept = Identity {
            route_id: row.route_id.as_slice().try_into().map_err(|_| damaged())?,
            key_spec_id: row.key_spec_id as u64,
            algorithm: match row.algorithm {
                1 => Algorithm::Xxh3Secret,
                2 => Algorithm::SipHash24,
                _ => return Err(damaged()),
            },
            secret: row.secret.as_slice().try_into().map_err(|_| damaged())?,
        };
        let differs = |what: &str, remedy: &str| {
            Err(BuildError::one(
                format!("route {:?}: {what} differs from the one that its facts were made with", self.name),
                remedy,
            ))
        };
        if kept.key_spec_id != key_spec_id {
            return differs(
                "the key spec",
                "put the old key spec back, or give the route a new name: under another key spec no copy of an earlier record \
                 would be recognised",
            );
        }
        if kept.algorithm != algorithm {
            return differs("untrusted_keys", "put the old value back, or give the route a new name");
        }
        if self.secret.is_some_and(|secret| secret != kept.secret) {
            return differs("hash_secret", "put the old secret back, or give the route a new name");
        }
        Ok(kept)
    }
}

/// Opening a route: all its callers' shards, also those of lanes that are not configured any more, are fenced and read before
/// any verdict (P3).
struct Opening<'a> {
    route: &'a Route,
    on_wait: Option<&'a (dyn Fn(String) + Send + Sync)>,
}

impl Opening<'_> {
    async fn open(
        &self,
        session: &mut dyn Session,
        lanes: u32,
    ) -> Result<(Vec<ShardState>, Vec<ShardState>), BuildError> {
        let mut wanted: Vec<ShardId> = (0..lanes).map(call_shard).collect();
        // An instance that takes no calls leaves the callers' shards to the one that does.
        let callers = if lanes > 0 { session.shards("http/").await? } else { Vec::new() };
        for state in callers {
            if !wanted.contains(&state.shard) {
                wanted.push(state.shard);
            }
        }
        let mut states = Vec::with_capacity(wanted.len());
        for shard in &wanted {
            states.push(self.take(session, shard).await?);
        }
        let history = *self.route.history.read();
        if let Some(behind) = self.route.behind(session).await.map_err(learnt)? {
            self.route.report(&behind);
            self.route.rebuild(session, history, wall_ms()).await.map_err(learnt)?;
        }
        for state in &states {
            let known = self.route.known_sequence(&state.shard);
            self.route.catch_up(session, state, known, wall_ms()).await.map_err(learnt)?;
        }
        // A key that came through a relay must be known to callers too.
        for ShardState { shard, .. } in session.shards("").await? {
            if !wanted.contains(&shard) {
                self.route.learn_marks_of(session, &shard, wall_ms()).await.map_err(learnt)?;
            }
        }
        // A copy may come by another shard than its first record did, and that shard may have forgotten it: what any shard of the
        // route has forgotten is not admitted by callers' shards (P11).
        let floor_ms = session.shards("").await?.iter().map(|state| state.floor_ms).max();
        for state in &mut states {
            state.floor_ms = state.floor_ms.max(floor_ms.unwrap_or(i64::MIN));
        }
        let others = states.split_off(lanes as usize);
        Ok((states, others))
    }

    async fn take(&self, session: &mut dyn Session, shard: &ShardId) -> Result<ShardState, BuildError> {
        loop {
            let how = Acquire::IfFree { stale_after_ms: STALE_OWNER_MS };
            match session.acquire(std::slice::from_ref(shard), how).await {
                Ok(mut states) => match states.pop() {
                    Some(state) => return Ok(state),
                    None => {
                        return Err(BuildError::one(
                            format!("the sink did not answer for shard {shard}"),
                            "report it",
                        ));
                    }
                },
                Err(fault @ SinkError::Held { .. }) => {
                    if let Some(told) = self.on_wait {
                        told(format!("waiting for the other owner to end: {fault}"));
                    }
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                Err(fault) => return Err(fault.into()),
            }
        }
    }
}

fn call_shard(lane: u32) -> ShardId {
    format!("http/{lane}").into()
}

fn learnt(fault: LearnError) -> BuildError {
    BuildError::one(fault, "facts have to be learnt before any verdict")
}

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

/// What [`Gate::once`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Once<T> {
    /// The effect ran now, and gave this.
    Ran(T),
    /// The effect took place before, within the window.
    Already,
}

/// Why [`Gate::once`] cannot say that the effect took place.
#[derive(Debug, thiserror::Error)]
pub enum OnceError<E> {
    /// The effect failed, and by that says that nothing happened: the key is free again.
    #[error("the effect failed: {0}")]
    Effect(E),
    /// An earlier run began the effect and did not end it (a crash, a dropped future): ask the target whether it happened, then
    /// call [`Gate::resolve_once`].
    #[error(
        "an earlier run began the effect and its end is unknown; find out whether it happened, then say so with resolve_once"
    )]
    Unknown,
    /// Another call runs the effect now.
    #[error("the effect is running in another call; try again later")]
    InFlight,
    /// The store or the sink is not available. If the effect ran, it counts as unknown.
    #[error("{0}")]
    Unavailable(String),
}

impl Gate {
    /// Starts with the store; see [`GateBuilder`].
    pub fn builder(store: Store) -> GateBuilder {
        GateBuilder {
            store,
            name: "library".into(),
            owner: format!("{}/{:08x}", std::process::id(), rand::random::<u32>()),
            naming: None,
            sink: None,
            rules: None,
            call_lanes: 1,
            relay_lanes: 0,
            limits: None,
            answer_timeout: Duration::from_secs(30),
            secret: None,
            untrusted_keys: false,
            letters: None,
            metrics: None,
            on_wait: None,
        }
    }

    /// Writes one record once; its arrival time is set here. `Ok` if it (or an earlier copy of it) has taken effect or was found to be stale.
    ///
    /// # Cancel safety
    /// The record belongs to the lane as soon as this is polled: dropping the future cancels nothing half way.
    pub async fn submit(&self, record: Record<'_>) -> Result<Outcome, Problem> {
        let mut chunk = Chunk::default();
        let arrival_us = self.arrival_us();
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

    /// Runs `effect` once per name and window, also across crashes. If the process ends between the effect's end and the moment
    /// it is recorded, the next call answers [`OnceError::Unknown`] rather than guess.
    ///
    /// # Cancel safety
    /// Dropping the future while the effect runs leaves its end unknown, as a crash does.
    pub async fn once<T, E, F>(&self, name: &str, effect: impl FnOnce() -> F) -> Result<Once<T>, OnceError<E>>
    where
        F: Future<Output = Result<T, E>>,
    {
        let inner = &self.0;
        let store = &inner.route.store;
        let fingerprint = effect_fingerprint(&inner.route.hasher, "", name);
        if let Some(reason) = self.not_ready() {
            return Err(OnceError::Unavailable(reason));
        }
        let unavailable = |fault: StoreError| OnceError::Unavailable(fault.to_string());
        let now_ms = wall_ms();
        let item = dedup_store::Item {
            fingerprint,
            digest: Digest(0),
            event_ms: now_ms,
            floor_ms: i64::MIN,
            admit_late: true,
            replay_dead_letter: false,
        };
        let mut verdicts = Vec::with_capacity(1);
        store.claim(EFFECT_LANE, i64::MAX, &[item], &mut verdicts).map_err(unavailable)?;
        match verdicts.first() {
            Some(dedup_store::Verdict::New { .. }) => {}
            Some(dedup_store::Verdict::Duplicate(_) | dedup_store::Verdict::Mismatch(_)) => {
                return Ok(Once::Already);
            }
            _ => return Err(OnceError::InFlight),
        }
        let claim = Claim { route: inner.route.clone(), fingerprint };
        if store.effect_pending(&fingerprint).map_err(unavailable)? {
            return Err(OnceError::Unknown);
        }
        self.durable(move |store| store.begin_effect(&fingerprint).map(drop))
            .await
            .map_err(OnceError::Unavailable)?;
        match effect().await {
            Ok(value) => {
                self.happened(fingerprint, now_ms).await.map_err(OnceError::Unavailable)?;
                drop(claim);
                Ok(Once::Ran(value))
            }
            Err(fault) => {
                let cancelled = self.durable(move |store| store.cancel_effect(&fingerprint)).await;
                drop(claim);
                cancelled.map_err(OnceError::Unavailable)?;
                Err(OnceError::Effect(fault))
            }
        }
    }

    /// Says what became of an effect whose end is unknown.
    pub async fn resolve_once(&self, name: &str, happened: bool) -> Result<(), String> {
        let fingerprint = effect_fingerprint(&self.0.route.hasher, "", name);
        if happened {
            self.happened(fingerprint, wall_ms()).await
        } else {
            self.durable(move |store| store.cancel_effect(&fingerprint)).await
        }
    }

    /// Takes a key back (P12): a later record with it is new, also for whoever learns it from the marks. Every shard of this
    /// instance says so, for any of them may have settled it; one that another instance holds has to be told there.
    pub async fn forget(&self, fingerprint: Fingerprint) -> Result<(), String> {
        let lanes = self.0.lanes.iter().chain(&self.0.relay_lanes);
        let noted = lanes.map(|lane| Self::note(lane, fingerprint, Settled::Forgotten, wall_ms()));
        futures_util::future::join_all(noted).await.into_iter().collect()
    }

    /// An effect took place: the callers' lane keeps that, or without one any lane that owns a shard.
    async fn happened(&self, fingerprint: Fingerprint, event_ms: i64) -> Result<(), String> {
        let relays = self.0.relay_lanes.iter().filter(|_| self.0.lanes.is_empty());
        let mut last = "the route has no lane".to_owned();
        for lane in self.0.lanes.first().into_iter().chain(relays) {
            match Self::note(lane, fingerprint, Settled::Written, event_ms).await {
                Ok(()) => return Ok(()),
                Err(reason) => last = reason,
            }
        }
        Err(last)
    }

    async fn note(
        lane: &LaneHandle,
        fingerprint: Fingerprint,
        settled: Settled,
        event_ms: i64,
    ) -> Result<(), String> {
        let entry = Entry { fingerprint, digest: Digest(0), event_ms, settled };
        let (reply, answer) = oneshot::channel();
        let ended = || "the route has ended".to_owned();
        lane.queue.send(ToLane::Note { entry, reply }).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    async fn durable(
        &self,
        work: impl FnOnce(&Store) -> Result<(), StoreError> + Send + 'static,
    ) -> Result<(), String> {
        let store = self.0.route.store.clone();
        blocking(move || work(&store)).await?.map_err(|fault| fault.to_string())
    }

    /// Why a lane is not ready, if so.
    #[cfg(test)]
    pub(crate) fn trouble(&self) -> Option<String> {
        self.0.route.trouble()
    }

    /// Ends the route as a crash would: nothing in flight is brought to an end.
    #[cfg(test)]
    pub(crate) fn crash(self) {
        for task in self.0.tasks.lock().drain(..) {
            task.abort();
        }
    }

    /// Ends the route: everything submitted gets its outcome, lanes end, the store is durable.
    pub async fn close(&self) {
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

    /// The relay's lanes.
    pub fn relay_lanes(&self) -> &[LaneHandle] {
        &self.0.relay_lanes
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
            let answer = |&fingerprint| Answer {
                outcome: Outcome::Unknown,
                fingerprint,
                first: None,
                problem: Some(problem.clone()),
            };
            keys.iter().map(answer).collect()
        };
        let Some(handle) = inner.lanes.get(lane) else {
            return answer_all(&Problem::Unavailable("the route takes no calls here".into()), true);
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

/// Gives the claim of `Gate::once` back, whichever way it ends; a settled key has none any more.
struct Claim {
    route: Arc<Route>,
    fingerprint: Fingerprint,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.route.store.release(EFFECT_LANE, &[self.fingerprint]);
        self.route.changed.notify_waiters();
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
        for named in &chunk.records {
            let (outcome, first, problem) = match (&named.problem, named.fingerprint) {
                (Some(problem), _) => match judge_unwritable(problem, Via::Call, &route.rules) {
                    Fate::Answer { outcome, first, problem } => (outcome, first, problem),
                    _ => return None,
                },
                (None, Some(fingerprint)) => {
                    // Verdicts wait while a lane has no connection (P6).
                    let known = if route.verdicts_open() {
                        route.store.peek(&fingerprint).ok()??
                    } else {
                        return None;
                    };
                    if known.digest == named.digest || route.rules.mismatch == MismatchPolicy::Ignore {
                        (Outcome::Duplicate, Some(known.settled), None)
                    } else {
                        (Outcome::Mismatch, Some(known.settled), Some(Problem::Mismatch))
                    }
                }
                (None, None) => return None,
            };
            answers.push(Answer { outcome, fingerprint: named.fingerprint, first, problem });
        }
        for answer in &answers {
            route.metrics.count(answer.outcome, 1);
        }
        Some(answers)
    }

    async fn submit(&self, chunk: Chunk) -> Vec<Answer> {
        let records = chunk.records.len();
        if self.0.lanes.is_empty() {
            let problem =
                Problem::Unavailable("this instance takes no calls for the route (lanes.http = 0)".into());
            self.0.route.metrics.count(Outcome::Unknown, records as u64);
            let answer = |named: &Named| Answer {
                outcome: Outcome::Unknown,
                fingerprint: named.fingerprint,
                first: None,
                problem: Some(problem.clone()),
            };
            return chunk.records.iter().map(answer).collect();
        }
        let _gauge = InFlight::new(&self.0.route, records);
        let mut cut = self.split(chunk);
        match cut.pop() {
            Some((lane, chunk, places)) if cut.is_empty() && places.is_empty() => self.ask(lane, chunk).await,
            last => {
                let parts = cut.into_iter().chain(last);
                let asked =
                    parts.map(|(lane, chunk, places)| async move { (self.ask(lane, chunk).await, places) });
                // Silence is not success (rule 5): a place that no lane answers for stays unknown.
                let unknown = Answer {
                    outcome: Outcome::Unknown,
                    fingerprint: None,
                    first: None,
                    problem: Some(Problem::OutcomeUnknown),
                };
                let mut answers = vec![unknown; records];
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

/// Runs a lane. Should it ever panic, the route says that it is not ready: its shards' facts and marks are sound, and another
/// process (or the next start of this one) takes over.
async fn watched(route: Arc<Route>, lane: u32, run: impl Future<Output = ()>) {
    if AssertUnwindSafe(run).catch_unwind().await.is_err() {
        error!(route = %route.name, lane, "the lane panicked: this is a fault of Oncegate, please report it");
        route.disconnected.fetch_add(1, Ordering::AcqRel);
        route.set_trouble(lane, Some("a lane of the route failed; restart the process".into()));
    }
}

/// Retires slots, follows the floors, and shows figures, once a second, until the route ends.
async fn maintain(route: std::sync::Weak<Route>) {
    loop {
        tokio::time::sleep(MAINTENANCE).await;
        let Some(route) = route.upgrade() else { return };
        let window_ms = route.rules.window_ms;
        let store = route.store.clone();
        let now_ms = wall_ms();
        let looked = blocking(move || (store.expire(now_ms), store.stats(now_ms))).await;
        let Ok((floors, stats)) = looked else { continue };
        route.metrics.store(stats.keys, stats.disk_bytes, stats.memory_bytes);
        let Ok(floors) = floors else { continue };
        if let Some(watermark_ms) = floors.watermark_ms {
            route.metrics.watermark(watermark_ms);
        }
        if floors.retire_ms > i64::MIN {
            route.admission_ms.store(floors.retire_ms.saturating_add(window_ms), Ordering::Relaxed);
        }
    }
}

/// Runs what may wait for a disk. A simulated run has no threads beside its own, so that it can be repeated.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    if cfg!(test) {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await.map_err(|fault| fault.to_string())
}
