//! All routes of a process at work: admin listener, HTTP door, relays. Starts them, and brings them down in order.

use std::{
    net::SocketAddr,
    path::Path,
    process::ExitCode,
    sync::{Arc, OnceLock},
};

use adapters::{
    dead_letters::DeadLetterFile,
    files::FilesSink,
    sink::{Misfit, Sink},
    sqlite::SqliteSink,
};
use dedup_store::Store;
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{error, info, warn};

#[cfg(feature = "kafka")]
use crate::door::kafka::{Relay, RelayGate, Scope};
use crate::{
    admin::Admin,
    config::{Config, DeadLettersTo, RouteConfig, SinkConfig, StoreConfig, Target},
    door::{
        HttpLimits, Submit,
        http::{Draining, HttpDoor, forward::Forward},
    },
    gate::{BuildError, Gate, LettersOf},
    metrics::Metrics,
    naming::{Chunk, Named, Record},
    outcome::{Answer, Problem},
};

/// A route as the HTTP door sees it, also before it is ready.
struct RouteDoor {
    name: String,
    limits: HttpLimits,
    gate: OnceLock<Gate>,
    waiting: Mutex<String>,
}

impl RouteDoor {
    fn starting(route: &RouteConfig) -> Arc<Self> {
        Arc::new(Self {
            name: route.name.clone(),
            limits: route.http.clone(),
            gate: OnceLock::new(),
            waiting: Mutex::new("the route is starting".into()),
        })
    }

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
            None => chunk.records.push(Named::unwritable(self.unavailable(), record.arrival_us)),
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
                let answer = |named: &Named| Answer::unknown(named.fingerprint, self.unavailable());
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

    fn reads_headers(&self) -> bool {
        self.names_by_headers()
    }

    fn unreadable_yet(&self, record: &Record<'_>) -> Option<String> {
        Gate::unreadable_yet(self, record)
    }

    fn arrival_us(&self) -> i64 {
        Submit::arrival_us(self)
    }

    fn lanes(&self) -> &[crate::lane::LaneHandle] {
        self.relay_lanes()
    }

    fn awaits(&self, shards: &[adapters::sink::ShardId]) {
        Gate::awaits(self, shards);
    }
}

/// Serves what `config` says until SIGTERM or Ctrl-C. Status 1 if something cannot start: everything that does not fit is printed.
pub async fn serve(config: Config) -> ExitCode {
    match try_serve(config).await {
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

async fn try_serve(config: Config) -> Result<(), Vec<String>> {
    let metrics = Arc::new(Metrics::new());
    let draining = Draining::default();
    let owner = match &config.server.instance {
        Some(name) => name.clone(),
        None => instance(&config.store.path).map_err(|fault| vec![fault])?,
    };
    let doors: Vec<Arc<RouteDoor>> = config.routes.values().map(RouteDoor::starting).collect();
    let forwards = forwards(&config, &metrics).await?;
    let relays: Arc<Relays> = Arc::default();
    let shown = relays.clone();
    metrics.on_scrape(move || shown.show());
    let (stop, stopped) = watch::channel(false);
    let (admin_stop, admin_stopped) = watch::channel(false);
    let bound = |what: &str, address: SocketAddr, fault: std::io::Error| {
        vec![format!("server.{what} = {address}: {fault}; free the port or change the address")]
    };
    let mut listeners = tokio::task::JoinSet::new();
    // Before the admin listener, which says ready: a route to an HTTP service has nothing else to wait for.
    if let Some(address) = config.server.listen {
        let http = config.server.http.clone();
        let http = HttpDoor::bind(address, http, doors.iter().cloned(), metrics.clone(), draining.clone());
        let http = http.map_err(|fault| bound("listen", address, fault))?;
        listeners.spawn(http.with_forwards(forwards.iter().cloned()).serve(seen(stopped)));
    }
    let admin = match config.server.admin_listen {
        Some(address) => {
            let admin = Admin::bind(address, metrics.clone(), draining.clone());
            let mut admin = admin.map_err(|fault| bound("admin_listen", address, fault))?;
            for door in &doors {
                let door = door.clone();
                admin = admin.check(format!("route {}", door.name), move || door.not_ready());
            }
            for forward in &forwards {
                let theirs = forward.clone();
                admin = admin.check(format!("route {}", forward.name()), move || theirs.not_ready());
            }
            let theirs = relays.clone();
            Some(tokio::spawn(admin.check("relays", move || theirs.not_ready()).serve(seen(admin_stopped))))
        }
        None => None,
    };
    info!(listen = ?config.server.listen, admin_listen = ?config.server.admin_listen, instance = owner, "serving");

    let mut starting = tokio::task::JoinSet::new();
    for (route, door) in config.routes.into_values().zip(doors.clone()) {
        let (owner, metrics, relays, store) =
            (owner.clone(), metrics.clone(), relays.clone(), config.store.clone());
        let sink = config.sinks[&route.sink].clone();
        starting.spawn(async move { start(route, sink, &door, owner, &metrics, &store, &relays).await });
    }
    let mut signals = std::pin::pin!(signal());
    let mut faults: Vec<String> = Vec::new();
    loop {
        tokio::select! {
            Some(started) = starting.join_next() => match started {
                Ok(Ok(())) => {}
                Ok(Err(theirs)) => faults.extend(theirs),
                Err(fault) => faults.push(fault.to_string()),
            },
            ended = &mut signals => {
                match ended {
                    Ok(what) => info!("{what}: draining"),
                    Err(fault) => faults.push(fault),
                }
                break;
            }
        }
        // Each route has said what does not fit; a route that waits for another owner is not waited for.
        if !faults.is_empty() {
            while let Some(Ok(Err(theirs))) = starting.try_join_next() {
                faults.extend(theirs);
            }
            break;
        }
    }
    starting.abort_all();
    // The doors first, so that nothing new comes in; then the relays, whose lanes must still work; the admin listener last.
    draining.begin();
    stop.send_replace(true);
    while let Some(drained) = listeners.join_next().await {
        match drained {
            Ok(drained) if drained.cut_off > 0 => {
                warn!(requests = drained.cut_off, "cut off at the drain deadline")
            }
            Ok(_) => {}
            Err(fault) => faults.push(fault.to_string()),
        }
    }
    for forward in &forwards {
        forward.close(config.server.http.listen.drain_deadline).await;
    }
    relays.stop().await;
    for gate in doors.iter().filter_map(|door| door.gate.get()) {
        gate.close().await;
    }
    admin_stop.send_replace(true);
    if let Some(admin) = admin {
        // It serves no records: however it ended, nothing is lost.
        drop(admin.await);
    }
    info!("ended");
    if faults.is_empty() { Ok(()) } else { Err(faults) }
}

/// Opens the books of the routes to HTTP services.
async fn forwards(config: &Config, metrics: &Arc<Metrics>) -> Result<Vec<Arc<Forward>>, Vec<String>> {
    let (mut opened, mut faults) = (Vec::new(), Vec::new());
    for forward in config.forwards.values().cloned() {
        let (name, metrics) = (forward.name.clone(), metrics.clone());
        match tokio::task::spawn_blocking(move || Forward::open(forward, &metrics)).await {
            Ok(Ok(forward)) => opened.push(Arc::new(forward)),
            Ok(Err(fault)) => faults.push(format!("route {name:?}: {fault}")),
            Err(fault) => faults.push(format!("route {name:?}: {fault}")),
        }
    }
    if faults.is_empty() { Ok(opened) } else { Err(faults) }
}

/// Starts one route: its store, its gate, its relay.
async fn start(
    route: RouteConfig,
    sink: SinkConfig,
    door: &Arc<RouteDoor>,
    owner: String,
    metrics: &Arc<Metrics>,
    stores: &StoreConfig,
    relays: &Relays,
) -> Result<(), Vec<String>> {
    let named = |fault: &dyn std::fmt::Display| format!("route {:?}: {fault}", route.name);
    let (folder, options) = (stores.path.join(&route.name), route.store(stores));
    let in_memory = stores.in_memory;
    let opened = tokio::task::spawn_blocking(move || {
        if in_memory { Ok(Store::in_memory(options)) } else { Store::open(&folder, options) }
    });
    let store = opened.await.map_err(|fault| vec![named(&fault)])?.map_err(|fault| vec![named(&fault)])?;
    let seat = Seat::default();
    let sink = sink_of(&sink, &route, &seat).map_err(|fault| vec![named(&fault)])?;
    #[cfg(feature = "kafka")]
    let scope = if route.whole_topics || sink.is_local() { Scope::Route } else { Scope::Partition };
    let waiting = door.clone();
    let mut builder = Gate::builder(store)
        .name(&route.name)
        .owner(owner)
        .naming(route.naming.clone())
        .sink(sink)
        .rules(route.rules.clone())
        .lanes(route.lanes.http, relay_lanes(&route))
        .limits(route.http.clone())
        .answer_timeout(route.answer_timeout)
        .untrusted_keys(route.untrusted_keys)
        .metrics(metrics.route(&route.name))
        .on_wait(move |reason| {
            let mut waiting = waiting.waiting.lock();
            if *waiting != reason {
                warn!("{reason}");
                *waiting = reason;
            }
        });
    if let Some(secret) = &route.hash_secret {
        builder = builder.hash_secret(secret.0);
    }
    #[cfg(feature = "kafka")]
    if let Some(registry) = &route.registry {
        let encoding = route.naming.format.encoding;
        let schemas = crate::format::fetch::schemas(encoding, registry.client(), &route.name);
        builder = builder.schemas(schemas.map_err(|fault| vec![named(&fault)])?);
    }
    if let Some(letters) = letters_of(&route).map_err(|fault| vec![named(&fault)])? {
        builder = builder.dead_letters(letters);
    }
    let gate = match builder.build().await {
        Ok(gate) => gate,
        Err(BuildError(misfits)) => return Err(misfits.iter().map(|misfit| named(misfit)).collect()),
    };
    #[cfg(feature = "kafka")]
    if let (Some(relay), Some(events)) = (&route.relay, gate.take_events()) {
        let started = Relay::start(
            Arc::new(gate.clone()),
            adapters::kafka::KafkaConfig { membership: Some(seat), ..relay.kafka(route.idle_after) },
            relay.relay(route.skip_gaps, scope, route.rules.window_ms, needs(&route)),
            events,
        );
        relays.add(started.map_err(|fault| vec![named(&fault)])?, metrics.route(&route.name));
    }
    #[cfg(not(feature = "kafka"))]
    let _ = (relays, seat);
    door.gate.set(gate).ok();
    Ok(())
}

/// What does not fit, and which route's start would say so.
pub(crate) struct Unfit {
    pub(crate) route: String,
    pub(crate) misfit: Misfit,
}

/// Asks the servers of every route what a start would ask them, and takes nothing over.
pub(crate) async fn unfit(config: &Config) -> Vec<Unfit> {
    let mut all = Vec::new();
    for route in config.routes.values() {
        let mut add = |misfits: Vec<Misfit>| {
            all.extend(misfits.into_iter().map(|misfit| Unfit { route: route.name.clone(), misfit }));
        };
        let cannot = |what: String| vec![Misfit { what, remedy: "correct it in the config file".to_owned() }];
        match sink_of(&config.sinks[&route.sink], route, &Seat::default()) {
            Ok(sink) => match sink.probe().await {
                Ok(encoder) => add(naming_misfits(route, &*sink, encoder)),
                Err(misfits) => add(misfits),
            },
            Err(what) => add(cannot(what)),
        }
        #[cfg(feature = "kafka")]
        if let Some(relay) = &route.relay {
            let (source, needs) = (relay.kafka(route.idle_after), needs(route));
            let asked = tokio::task::spawn_blocking(move || adapters::kafka::misfits(&source, needs)).await;
            match asked {
                Ok(Ok(misfits)) => add(misfits),
                Ok(Err(fault)) => add(cannot(fault.to_string())),
                Err(fault) => add(cannot(fault.to_string())),
            }
        }
    }
    all
}

/// What of the route's naming does not fit the columns of its sink.
fn naming_misfits(
    route: &RouteConfig,
    sink: &dyn Sink,
    encoder: Arc<dyn adapters::sink::Encode>,
) -> Vec<Misfit> {
    let mut naming = route.naming.clone();
    naming.row_key = sink.row_key().to_vec();
    naming.version = sink.version().map(str::to_owned);
    crate::naming::Namer::misfits(&naming, &*encoder)
}

/// What the route asks of its topics.
#[cfg(feature = "kafka")]
fn needs(route: &RouteConfig) -> adapters::kafka::SourceNeeds {
    let timestamps = matches!(route.naming.event_time, crate::naming::EventTime::KafkaTimestamp);
    adapters::kafka::SourceNeeds {
        keep_ms: route.rules.window_ms.saturating_add(route.rules.lateness_ms),
        timestamps,
    }
}

/// As many relay lanes as are asked for, else one a core; a lane without partitions costs nothing.
fn relay_lanes(route: &RouteConfig) -> u32 {
    let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    route.relay.as_ref().map_or(0, |_| route.lanes.relay.unwrap_or_else(cores))
}

/// A relay's place in its consumer group, for a sink that fences by it.
#[cfg(feature = "kafka")]
pub(crate) type Seat = Arc<adapters::kafka::Membership>;
#[cfg(not(feature = "kafka"))]
pub(crate) type Seat = ();

pub(crate) fn sink_of(
    config: &SinkConfig,
    route: &RouteConfig,
    seat: &Seat,
) -> Result<Arc<dyn Sink>, String> {
    #[cfg(not(feature = "kafka"))]
    let _ = (route, seat);
    match &config.target {
        Target::Sqlite { .. } => {
            let config = config.sqlite().ok_or("not a SQLite sink")?;
            Ok(Arc::new(SqliteSink::new(config)))
        }
        #[cfg(feature = "duckdb")]
        Target::Duckdb { .. } => {
            let config = config.duckdb().ok_or("not a DuckDB sink")?;
            Ok(Arc::new(adapters::duckdb::DuckdbSink::new(config)))
        }
        Target::Files(config) => Ok(Arc::new(FilesSink::new(config.clone()))),
        #[cfg(feature = "clickhouse")]
        Target::Clickhouse(_) => {
            let config = config.clickhouse().ok_or("not a ClickHouse sink")?;
            let sink =
                adapters::clickhouse::ClickhouseSink::new(config).map_err(|misfit| misfit.to_string())?;
            Ok(Arc::new(sink))
        }
        #[cfg(feature = "stream-load")]
        Target::StreamLoad(_) => {
            let config = config.stream_load().ok_or("no StarRocks or Doris sink")?;
            let sink =
                adapters::stream_load::StreamLoadSink::new(config).map_err(|misfit| misfit.to_string())?;
            Ok(Arc::new(sink))
        }
        #[cfg(feature = "postgres")]
        Target::Postgres { .. } => {
            let config = config.postgres().ok_or("not a Postgres sink")?;
            let sink = adapters::postgres::PostgresSink::new(config).map_err(|misfit| misfit.to_string())?;
            Ok(Arc::new(sink))
        }
        #[cfg(feature = "kafka")]
        Target::Kafka(_) => {
            let config = config.kafka(&route.rules).ok_or("not a Kafka sink")?;
            let sink = adapters::kafka_sink::KafkaSink::new(config).map_err(|misfit| misfit.to_string())?;
            Ok(Arc::new(sink.fenced_by(seat.clone())))
        }
        #[cfg(feature = "redis")]
        Target::Redis(config) => {
            let all =
                |misfits: Vec<Misfit>| misfits.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            Ok(Arc::new(adapters::redis::RedisSink::new((**config).clone()).map_err(all)?))
        }
        #[cfg(not(feature = "postgres"))]
        Target::Postgres { .. } => {
            Err("this build leaves Postgres out; build with the feature `postgres`".into())
        }
    }
}

/// The keeper of a route's dead letters, if they do not go beside the rows.
fn letters_of(route: &RouteConfig) -> Result<Option<LettersOf>, String> {
    match &route.dead_letters {
        DeadLettersTo::Sink | DeadLettersTo::Stop => Ok(None),
        DeadLettersTo::File(path) => {
            let file = DeadLetterFile::open(path).map_err(|fault| fault.to_string())?;
            Ok(Some(Box::new(move || Box::new(file.clone()))))
        }
        #[cfg(feature = "kafka")]
        DeadLettersTo::Topic(topic) => {
            let relay = route.relay.as_ref().ok_or("dead letters go to a topic, but there is no relay")?;
            let letters = adapters::kafka::DeadLetterTopic::new(&relay.brokers, topic, &relay.options)
                .map_err(|fault| fault.to_string())?;
            Ok(Some(Box::new(move || Box::new(letters.clone()))))
        }
        #[cfg(not(feature = "kafka"))]
        DeadLettersTo::Topic(_) => Err("this build leaves Kafka out; build with the feature `kafka`".into()),
    }
}

/// The relays at work.
#[derive(Default)]
struct Relays {
    #[cfg(feature = "kafka")]
    running: Mutex<Vec<(Relay, Arc<crate::metrics::RouteMetrics>)>>,
}

impl Relays {
    #[cfg(feature = "kafka")]
    fn add(&self, relay: Relay, metrics: Arc<crate::metrics::RouteMetrics>) {
        self.running.lock().push((relay, metrics));
    }

    /// Brings the lag of each partition to the metrics.
    fn show(&self) {
        #[cfg(feature = "kafka")]
        for (relay, metrics) in self.running.lock().iter() {
            let status = relay.status();
            for topic in &status.topics {
                metrics.partitions(&topic.topic, topic.partitions, topic.before);
            }
            for partition in status.partitions {
                if let Some(lag) = partition.lag() {
                    metrics.lag(&partition.at.topic, partition.at.partition, lag);
                }
            }
        }
    }

    fn not_ready(&self) -> Option<String> {
        #[cfg(feature = "kafka")]
        return self.running.lock().iter().find_map(|(relay, _)| relay.status().not_ready());
        #[cfg(not(feature = "kafka"))]
        None
    }

    async fn stop(&self) {
        #[cfg(feature = "kafka")]
        {
            let running = std::mem::take(&mut *self.running.lock());
            running.iter().for_each(|(relay, _)| relay.begin_stop());
            for (relay, _) in running {
                relay.stop().await;
            }
        }
    }
}

/// This instance's name: made once, kept beside the stores, whose locks make sure that no two processes bear it.
fn instance(stores: &Path) -> Result<String, String> {
    let path = stores.join("instance");
    let named = |fault: std::io::Error| {
        format!("{}: {fault}; store.path must be a folder that can be written", path.display())
    };
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
