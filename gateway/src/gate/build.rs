//! From a store, a sink and a route's rules to a [`Gate`] at work: [`GateBuilder`].

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use adapters::{
    dead_letters::DeadLetters,
    sink::{Acquire, Guarantee, Misfit, RouteRow, Session, ShardId, ShardState, Sink, SinkError},
};
use dedup_store::{Algorithm, Identity, Store, StoreError};
use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::{sync::mpsc, time::Instant};
use tracing::{error, info, warn};

use super::{Gate, Inner, blocking};
use crate::{
    clock::{AtStart, Clocks, wall_ms},
    door::HttpLimits,
    format::Schemas,
    heartbeat::Beating,
    key::KeySpec,
    lane::{LaneHandle, Rules, own::STALE_OWNER_MS, run::Lane, shard::OwnedShard},
    metrics::{Metrics, RouteMetrics},
    naming::{EventTime, Namer, NamingRules},
    route::{LearnError, Route, Sight, shared_floor_ms},
};

/// Messages in the inbox of a callers' lane; the HTTP door bounds the bytes.
const INBOX: usize = 1_024;
/// Chunks in the inbox of a relay's lane, about 1 MiB each: a few batches.
const RELAY_INBOX: usize = 16;
/// The sink was well when it was probed: so long it may be away afterwards until the route is open.
const OPENING_PATIENCE: Duration = Duration::from_secs(60);
const OPENING_RETRY: Duration = Duration::from_millis(500);
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

/// Why a route is not open yet.
enum Unopened {
    /// The sink, which was well when it was probed, is away for the moment.
    Passing(String),
    /// Trying again does not help.
    Refused(BuildError),
}

impl From<BuildError> for Unopened {
    fn from(error: BuildError) -> Self {
        Self::Refused(error)
    }
}

impl From<SinkError> for Unopened {
    fn from(fault: SinkError) -> Self {
        match fault {
            SinkError::NotApplied { retry: true, .. }
            | SinkError::Unknown { .. }
            | SinkError::Fenced { .. } => Self::Passing(fault.to_string()),
            SinkError::NotApplied { retry: false, .. }
            | SinkError::Refused { .. }
            | SinkError::Held { .. } => Self::Refused(fault.into()),
        }
    }
}

impl From<LearnError> for Unopened {
    fn from(fault: LearnError) -> Self {
        match fault {
            LearnError::Sink(fault) => fault.into(),
            LearnError::Rebuilt => Self::Passing(fault.to_string()),
            LearnError::Store(_) | LearnError::Mark { .. } => {
                Self::Refused(BuildError::one(fault, "facts have to be learnt before any verdict"))
            }
        }
    }
}

/// How long an opening is tried again: a broker or a server may fail over just then.
struct Patience<'a> {
    until: Instant,
    told: Option<&'a (dyn Fn(String) + Send + Sync)>,
}

impl Patience<'_> {
    /// Returns when it is time to try again.
    async fn after(&self, fault: Unopened) -> Result<(), BuildError> {
        match fault {
            Unopened::Refused(error) => Err(error),
            Unopened::Passing(reason) if Instant::now() >= self.until => {
                Err(BuildError::one(reason, "check that the sink is reachable and that its user may write"))
            }
            Unopened::Passing(reason) => {
                if let Some(told) = self.told {
                    told(reason);
                }
                tokio::time::sleep(OPENING_RETRY).await;
                Ok(())
            }
        }
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
    schemas: Option<Arc<Schemas>>,
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

    /// The schemas of a format that has registered ones.
    pub fn schemas(mut self, schemas: Arc<Schemas>) -> Self {
        self.schemas = Some(schemas);
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
        let told = self.on_wait.as_deref();
        let patience = Patience { until: Instant::now() + OPENING_PATIENCE, told };
        let identity = loop {
            match self.identity(&mut *session, naming.key.id()).await {
                Ok(identity) => break identity,
                Err(fault) => patience.after(fault).await?,
            }
        };
        let hasher = self.store.bind(&identity)?;
        naming.row_key = sink.row_key().to_vec();
        naming.version = sink.version().map(str::to_owned);
        let arrival = naming.event_time == EventTime::Arrival;
        if naming.format.needs_registry() && self.schemas.is_none() {
            return Err(missing("a schema registry"));
        }
        let namer = Namer::new(naming, encoder, hasher.clone()).map_err(BuildError)?;
        let namer = namer.with_schemas(self.schemas.clone());
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
            arrival,
            sink.guarantee() == Guarantee::Transactional,
        ));
        let opening = Opening { route: &route, on_wait: told };
        let patience = Patience { until: Instant::now() + OPENING_PATIENCE, told };
        let (own, others) = loop {
            match opening.open(&mut *session, self.call_lanes).await {
                Ok(shards) => break shards,
                Err(fault) => patience.after(fault).await?,
            }
        };
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
            let handle = LaneHandle::new(queue);
            let (route, hand_overs) = (route.clone(), handle.hand_overs());
            let lane =
                Lane::new(id, route.clone(), session, inbox, hand_overs, events, letters, shard, others);
            handles.push(handle);
            tasks.push(tokio::spawn(watched(route, id, lane.run())));
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
    async fn identity(&self, session: &mut dyn Session, key_spec_id: u64) -> Result<Identity, Unopened> {
        let algorithm = if self.untrusted_keys { Algorithm::SipHash24 } else { Algorithm::Xxh3Secret };
        session.acquire(&[], Acquire::Force).await?;
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
                _ => return Err(damaged().into()),
            },
            secret: row.secret.as_slice().try_into().map_err(|_| damaged())?,
        };
        let differs = |what: &str, remedy: &str| {
            let what =
                format!("route {:?}: {what} differs from the one that its facts were made with", self.name);
            Err(BuildError::one(what, remedy).into())
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
    ) -> Result<(Vec<ShardState>, Vec<ShardState>), Unopened> {
        session.acquire(&[], Acquire::Force).await?;
        let mut wanted: Vec<ShardId> = (0..lanes).map(call_shard).collect();
        // An instance that takes no calls leaves the callers' shards to the one that does.
        let callers = if lanes > 0 { session.shards("http/").await? } else { Vec::new() };
        for state in callers {
            if !wanted.contains(&state.shard) {
                wanted.push(state.shard);
            }
        }
        let mut states = self.take(session, &wanted).await?;
        let mut beat_at = Instant::now();
        if self.route.arrival {
            self.check_clock(session).await?;
        }
        let history = *self.route.history.read();
        let behind = self.route.behind(session).await?;
        let mut beating = beating(session, &states, &mut beat_at);
        if let Some(behind) = behind {
            self.route.went_back(&mut beating, &behind, history).await?;
        }
        let history = *self.route.history.read();
        for state in &states {
            let known = self.route.known(&state.shard);
            self.route.catch_up(&mut beating, state, known, history).await?;
        }
        // A key that came through a relay must be known to callers too.
        let all = beating.session.shards("").await?;
        let placed = all.iter().filter(|state| state.position.is_some());
        *self.route.at_opening.lock() = placed.map(|state| state.shard.clone()).collect();
        for state in all {
            if !wanted.contains(&state.shard) && !planted!(OthersNotLearnt) {
                self.route.learn_marks_at(&mut beating, &state).await?;
            }
        }
        // Read again, after the marks: one that expired before it was learnt has raised its floor since the shards were listed.
        let floor_ms = shared_floor_ms(session).await?;
        states.iter_mut().for_each(|state| state.floor_ms = state.floor_ms.max(floor_ms));
        let others = states.split_off(lanes as usize);
        Ok((states, others))
    }

    /// A clock that is wrong and ahead is found out before the first record takes the route's watermark there (P11).
    async fn check_clock(&self, session: &mut dyn Session) -> Result<(), Unopened> {
        let route = self.route;
        let known = route.store.checkpoints().into_iter().map(|checkpoint| checkpoint.watermark_ms);
        let kept = session.shards("").await?.into_iter().map(|state| state.watermark_ms);
        let watermark_ms = known.chain(kept).max().filter(|watermark| *watermark > i64::MIN);
        let clocks = Clocks { sink_ms: session.now_ms().await?, host_ms: wall_ms(), watermark_ms };
        let Rules { window_ms, max_clock_skew_ms, max_clock_jump_ms, .. } = route.rules;
        match clocks.at_start(&route.name, window_ms, max_clock_skew_ms, max_clock_jump_ms) {
            AtStart::Good => Ok(()),
            AtStart::Warn(warning) => {
                warn!(route = %route.name, "{warning}");
                Ok(())
            }
            AtStart::Refuse { what, remedy } => Err(BuildError(vec![Misfit { what, remedy }]).into()),
        }
    }

    /// All or none: who held one of them while it waits for another could wait for ever for one that waits for its own.
    async fn take(&self, session: &mut dyn Session, shards: &[ShardId]) -> Result<Vec<ShardState>, Unopened> {
        if shards.is_empty() {
            return Ok(Vec::new());
        }
        loop {
            let how = Acquire::IfFree { stale_after_ms: STALE_OWNER_MS };
            let waits = match session.acquire(shards, how).await {
                Ok(states) if states.len() == shards.len() => return Ok(states),
                Ok(states) => {
                    let what = format!("the sink answered for {} of {} shards", states.len(), shards.len());
                    return Err(BuildError::one(what, "report it").into());
                }
                Err(SinkError::Held { shard, owner, .. }) => {
                    format!("waiting for the other owner to end: shard {shard} is held by {owner}")
                }
                // The other owner died while it was looked at.
                Err(SinkError::NotApplied { retry: true, reason }) if session.connected() => {
                    format!("taking the callers' shards over again: {reason}")
                }
                Err(fault) => return Err(fault.into()),
            };
            if let Some(told) = self.on_wait {
                told(waits);
            }
            tokio::time::sleep(OPENING_RETRY).await;
        }
    }
}

/// The session, the shards that were taken shown to live.
fn beating<'a>(session: &'a mut dyn Session, states: &[ShardState], at: &'a mut Instant) -> Beating<'a> {
    let owned = states.iter().map(|state| (state.shard.clone(), state.epoch)).collect();
    Beating::new(session, owned, at)
}

fn call_shard(lane: u32) -> ShardId {
    format!("http/{lane}").into()
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
            schemas: None,
            metrics: None,
            on_wait: None,
        }
    }
}

/// Runs a lane. Should it ever panic, the route says that it is not ready: its shards' facts and marks are sound, and another
/// process (or the next start of this one) takes over.
async fn watched(route: Arc<Route>, lane: u32, run: impl Future<Output = ()>) {
    if AssertUnwindSafe(run).catch_unwind().await.is_err() {
        error!(route = %route.name, lane, "the lane panicked: this is a fault of Oncegate, please report it");
        route.sees(lane, Sight::Lost);
        // What it had at hand is judged by its shard's own watermark, in the next process.
        route.store.awaits(lane, &[], wall_ms());
        route.set_trouble(lane, Some("a lane of the route failed; restart the process".into()));
    }
}

/// Retires slots, follows the floors, and shows figures, once a second, until the route ends.
async fn maintain(route: std::sync::Weak<Route>) {
    let mut fits = true;
    loop {
        tokio::time::sleep(MAINTENANCE).await;
        let Some(route) = route.upgrade() else { return };
        let window_ms = route.rules.window_ms;
        let store = route.store.clone();
        let now_ms = wall_ms();
        let looked = blocking(move || (store.expire(now_ms), store.stats(now_ms))).await;
        let Ok((floors, stats)) = looked else { continue };
        route.metrics.store(&stats);
        if let Some(plan) = stats.plan
            && plan.fits() != fits
        {
            fits = plan.fits();
            if fits {
                info!(route = %route.name, "the store's budgets suffice again: {plan}");
            } else {
                warn!(route = %route.name, "the store's budgets will not suffice: {plan}");
            }
        }
        let Ok(floors) = floors else { continue };
        if let Some(watermark_ms) = floors.watermark_ms {
            route.metrics.watermark(watermark_ms);
        }
        if floors.retire_ms > i64::MIN {
            route.admission_ms.store(floors.retire_ms.saturating_add(window_ms), Ordering::Relaxed);
        }
    }
}
