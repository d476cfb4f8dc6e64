//! All routes of a process at work: admin listener, HTTP door, relays. Starts them, and brings them down in order.

use std::{
    net::SocketAddr,
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, OnceLock},
};

use adapters::sink::Sink;
use dedup_store::{Store, StoreOptions};
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::{
    admin::Admin,
    door::{HttpLimits, Submit, http::{Draining, HttpDoor, HttpOptions}},
    gate::{BuildError, Gate, LettersOf},
    lane::Rules,
    metrics::Metrics,
    naming::{Chunk, Named, NamingRules, Record},
    outcome::{Answer, Outcome, Problem},
};
#[cfg(feature = "kafka")]
use crate::door::kafka::{Relay, RelayGate, RelayOptions};

/// What a process serves.
pub struct Plan {
    /// The HTTP door's address.
    pub listen: SocketAddr,
    /// The admin listener's address.
    pub admin_listen: SocketAddr,
    /// Bounds of the HTTP door.
    pub http: HttpOptions,
    /// This instance's name in the sinks' shard rows, if it is not to be made once and kept beside the stores.
    pub instance: Option<String>,
    /// Where the stores are kept, one folder a route.
    pub store: PathBuf,
    /// The routes.
    pub routes: Vec<RoutePlan>,
}

/// What one route is made of.
pub struct RoutePlan {
    /// Its name.
    pub name: String,
    /// Where its rows go.
    pub sink: Arc<dyn Sink>,
    /// How records become names and rows.
    pub naming: NamingRules,
    /// What happens to them.
    pub rules: Rules,
    /// Lanes of the HTTP door.
    pub call_lanes: u32,
    /// Bounds of its HTTP requests.
    pub limits: HttpLimits,
    /// How its store is kept.
    pub store: StoreOptions,
    /// See [`crate::gate::GateBuilder::hash_secret`].
    pub secret: Option<[u8; 192]>,
    /// See [`crate::gate::GateBuilder::untrusted_keys`].
    pub untrusted_keys: bool,
    /// Where dead letters go, if not beside the rows.
    pub letters: Option<LettersOf>,
    /// The relay, if there is one.
    #[cfg(feature = "kafka")]
    pub relay: Option<RelayPlan>,
}

/// A route's relay.
#[cfg(feature = "kafka")]
pub struct RelayPlan {
    /// The group and what it reads.
    pub source: adapters::kafka::KafkaConfig,
    /// How it reads.
    pub options: RelayOptions,
    /// Its lanes.
    pub lanes: u32,
}

/// A route as the HTTP door sees it, also before it is ready.
struct RouteDoor {
    name: String,
    limits: HttpLimits,
    gate: OnceLock<Gate>,
    waiting: Mutex<String>,
}

impl RouteDoor {
    fn unavailable(&self) -> Problem {
        Problem::Unavailable(self.waiting.lock().clone())
    }
}

impl Submit for RouteDoor {
    fn route(&self) -> &str {
        &self.name
    }

    fn name(&self, record: &Record<'_>, chunk: &mut Chunk) {
        match self.gate.get() {
            Some(gate) => Submit::name(gate, record, chunk),
            None => chunk.records.push(Named::unwritable(record, self.unavailable())),
        }
    }

    fn arrival_us(&self) -> i64 {
        self.gate.get().map_or_else(crate::clock::wall_us, Submit::arrival_us)
    }

    fn peek(&self, chunk: &Chunk) -> Option<Vec<Answer>> {
        self.gate.get()?.peek(chunk)
    }

    async fn submit(&self, chunk: Chunk) -> Vec<Answer> {
        match self.gate.get() {
            Some(gate) => Submit::submit(gate, chunk).await,
            None => {
                let answer = |named: &Named| Answer {
                    outcome: Outcome::Unknown,
                    fingerprint: named.fingerprint,
                    first: None,
                    problem: Some(self.unavailable()),
                };
                chunk.records.iter().map(answer).collect()
            }
        }
    }

    fn not_ready(&self) -> Option<String> {
        match self.gate.get() {
            Some(gate) => gate.not_ready(),
            None => Some(self.waiting.lock().clone()),
        }
    }

    fn limits(&self) -> &HttpLimits {
        &self.limits
    }
}

#[cfg(feature = "kafka")]
impl RelayGate for Gate {
    fn route(&self) -> &str {
        Submit::route(self)
    }

    fn name(&self, record: &Record<'_>, chunk: &mut Chunk) {
        Submit::name(self, record, chunk);
    }

    fn arrival_us(&self) -> i64 {
        Submit::arrival_us(self)
    }

    fn lanes(&self) -> &[crate::lane::LaneHandle] {
        self.relay_lanes()
    }
}

/// Serves `plan` until SIGTERM or Ctrl-C. Status 1 if something cannot start: everything that does not fit is printed.
pub async fn serve(plan: Plan) -> ExitCode {
    match try_serve(plan).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(faults) => {
            for fault in faults {
                error!("{fault}");
                eprintln!("oncegate: {fault}");
            }
            ExitCode::FAILURE
        }
    }
}

async fn try_serve(plan: Plan) -> Result<(), Vec<String>> {
    let metrics = Arc::new(Metrics::new());
    let draining = Draining::default();
    let owner = match plan.instance {
        Some(name) => name,
        None => instance(&plan.store).map_err(|fault| vec![fault])?,
    };
    let doors: Vec<Arc<RouteDoor>> = plan
        .routes
        .iter()
        .map(|route| {
            Arc::new(RouteDoor {
                name: route.name.clone(),
                limits: route.limits.clone(),
                gate: OnceLock::new(),
                waiting: Mutex::new("the route is starting".into()),
            })
        })
        .collect();
    let (stop, stopped) = watch::channel(false);
    let bound = |what: &str, address: SocketAddr, fault: std::io::Error| {
        vec![format!("{what} {address}: {fault}; free the port or change the address")]
    };
    let mut admin = Admin::bind(plan.admin_listen, metrics.clone(), draining.clone())
        .map_err(|fault| bound("server.admin_listen", plan.admin_listen, fault))?;
    for door in &doors {
        let door = door.clone();
        admin = admin.check(format!("route {}", door.name), move || door.not_ready());
    }
    let http = HttpDoor::bind(plan.listen, plan.http, doors.iter().cloned(), metrics.clone(), draining.clone())
        .map_err(|fault| bound("server.listen", plan.listen, fault))?;
    let relays: Arc<Relays> = Arc::default();
    let theirs = relays.clone();
    admin = admin.check("relays", move || theirs.not_ready());
    let (admin_stop, admin_stopped) = watch::channel(false);
    let admin = tokio::spawn(admin.serve(seen(admin_stopped)));
    let http = tokio::spawn(http.serve(seen(stopped)));
    info!(listen = %plan.listen, admin_listen = %plan.admin_listen, instance = owner, "serving");

    let mut starting = tokio::task::JoinSet::new();
    for (route, door) in plan.routes.into_iter().zip(doors.clone()) {
        let (owner, metrics, relays, store) = (owner.clone(), metrics.clone(), relays.clone(), plan.store.clone());
        starting.spawn(async move { start(route, &door, owner, &metrics, &store, &relays).await });
    }
    let mut signals = std::pin::pin!(signal());
    let mut faults = Vec::new();
    let ended = loop {
        tokio::select! {
            Some(started) = starting.join_next() => match started {
                Ok(Ok(())) => {}
                Ok(Err(fault)) => faults.extend(fault),
                Err(fault) => faults.push(fault.to_string()),
            },
            ended = &mut signals => break ended,
        }
        if starting.is_empty() && !faults.is_empty() {
            break Err(String::new());
        }
    };
    if let Ok(what) = &ended {
        info!("{what}: draining");
    }
    starting.abort_all();
    // The doors first, so that nothing new comes in; then lanes, which end with their last batch; the admin listener last.
    stop.send_replace(true);
    match http.await {
        Ok(drained) if drained.cut_off > 0 => warn!(requests = drained.cut_off, "cut off at the drain deadline"),
        Ok(_) => {}
        Err(fault) => faults.push(fault.to_string()),
    }
    relays.stop().await;
    for gate in doors.iter().filter_map(|door| door.gate.get()) {
        gate.close().await;
    }
    admin_stop.send_replace(true);
    drop(admin.await);
    info!("ended");
    if faults.is_empty() { Ok(()) } else { Err(faults) }
}

/// Starts one route: its store, its gate, its relay.
async fn start(
    route: RoutePlan,
    door: &Arc<RouteDoor>,
    owner: String,
    metrics: &Arc<Metrics>,
    stores: &std::path::Path,
    relays: &Relays,
) -> Result<(), Vec<String>> {
    let named = |fault: &dyn std::fmt::Display| format!("route {:?}: {fault}", route.name);
    let folder = stores.join(&route.name);
    let options = route.store.clone();
    let opened = tokio::task::spawn_blocking(move || Store::open(&folder, options)).await;
    let store = match opened {
        Ok(Ok(store)) => store,
        Ok(Err(fault)) => return Err(vec![named(&fault)]),
        Err(fault) => return Err(vec![named(&fault)]),
    };
    #[cfg(feature = "kafka")]
    let relay_lanes = route.relay.as_ref().map_or(0, |relay| relay.lanes);
    #[cfg(not(feature = "kafka"))]
    let relay_lanes = 0;
    let waiting = door.clone();
    let mut builder = Gate::builder(store)
        .name(&route.name)
        .owner(owner)
        .naming(route.naming)
        .sink(route.sink)
        .rules(route.rules)
        .lanes(route.call_lanes, relay_lanes)
        .limits(route.limits)
        .untrusted_keys(route.untrusted_keys)
        .metrics(metrics.route(&route.name))
        .on_wait(move |reason| {
            let mut waiting = waiting.waiting.lock();
            if *waiting != reason {
                warn!("{reason}");
                *waiting = reason;
            }
        });
    if let Some(secret) = route.secret {
        builder = builder.hash_secret(secret);
    }
    if let Some(letters) = route.letters {
        builder = builder.dead_letters(letters);
    }
    let gate = match builder.build().await {
        Ok(gate) => gate,
        Err(BuildError(misfits)) => return Err(misfits.iter().map(|misfit| named(misfit)).collect()),
    };
    #[cfg(feature = "kafka")]
    if let Some(relay) = route.relay
        && let Some(events) = gate.take_events()
    {
        let started = Relay::start(Arc::new(gate.clone()), relay.source, relay.options, events);
        relays.add(started.map_err(|fault| vec![named(&fault)])?);
    }
    #[cfg(not(feature = "kafka"))]
    let _ = relays;
    door.gate.set(gate).ok();
    Ok(())
}

/// The relays at work.
#[derive(Default)]
struct Relays {
    #[cfg(feature = "kafka")]
    running: Mutex<Vec<Relay>>,
}

impl Relays {
    #[cfg(feature = "kafka")]
    fn add(&self, relay: Relay) {
        self.running.lock().push(relay);
    }

    fn not_ready(&self) -> Option<String> {
        #[cfg(feature = "kafka")]
        return self.running.lock().iter().find_map(|relay| relay.status().not_ready());
        #[cfg(not(feature = "kafka"))]
        None
    }

    async fn stop(&self) {
        #[cfg(feature = "kafka")]
        {
            let running = std::mem::take(&mut *self.running.lock());
            running.iter().for_each(Relay::begin_stop);
            for relay in running {
                relay.stop().await;
            }
        }
    }
}

/// This instance's name: made once, kept beside the stores, whose locks make sure that no two processes bear it.
fn instance(stores: &std::path::Path) -> Result<String, String> {
    let path = stores.join("instance");
    let named = |fault: std::io::Error| format!("{}: {fault}; store.path must be a folder that can be written", path.display());
    match std::fs::read_to_string(&path) {
        Ok(name) if !name.trim().is_empty() => return Ok(name.trim().to_owned()),
        Ok(_) => {}
        Err(fault) if fault.kind() == std::io::ErrorKind::NotFound => {}
        Err(fault) => return Err(named(fault)),
    }
    std::fs::create_dir_all(stores).map_err(named)?;
    let name = format!("oncegate-{:08x}", rand::random::<u32>());
    std::fs::write(&path, &name).map_err(named)?;
    Ok(name)
}

async fn seen(mut flag: watch::Receiver<bool>) {
    // An error means that the sender is gone, which is the end too.
    drop(flag.wait_for(|stop| *stop).await);
}

/// The signal that ends the process.
async fn signal() -> Result<&'static str, String> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).map_err(|fault| fault.to_string())?;
    tokio::select! {
        _ = terminate.recv() => Ok("SIGTERM"),
        ended = tokio::signal::ctrl_c() => ended.map(|()| "interrupted").map_err(|fault| fault.to_string()),
    }
}
