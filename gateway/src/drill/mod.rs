//! A drill ([`run`]): this program's own gateway, as a child process, writes a seeded workload with copies into a shadow beside the
//! user's own table, is killed, paused and cut off meanwhile, and then the shadow is compared with what callers were told.
//!
//! | file | holds |
//! | --- | --- |
//! | `shape` `values` | records that fit the route and the table, and the rows that they must become; pure |
//! | `schedule` | which fault comes when, from the seed; pure |
//! | `ledger` | what was sent and answered, and the comparison; pure |
//! | `settings` | the child's configuration, from the user's; pure |
//! | `callers` `child` `proxy` | the load, the gateway, the connections that are cut |
//! | `shadow` | the table beside the real one: made, read back, taken away |
//! | `report` | what was found |

mod callers;
mod child;
mod ledger;
mod proxy;
mod report;
mod schedule;
mod settings;
mod shadow;
mod shape;
mod values;

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use adapters::sink::Column;
use indicatif::ProgressBar;
use parking_lot::Mutex;
use rand::Rng;
use tokio::{sync::watch, task::JoinSet};

pub use self::report::Report;
use self::{
    callers::Load,
    child::{Child, free_ports},
    ledger::Comparison,
    proxy::Proxy,
    schedule::{Fault, Schedule},
    settings::Place,
    shadow::{Shadow, Survey},
    shape::{Asked, Shape},
    values::Kind,
};
use crate::{
    config::{self, Config},
    format::Encoding,
    key::Pointer,
    naming::{ColumnSource, EventTime},
    serve::{Seat, sink_of},
};

/// The environment variable that bears the sink's address through the proxy.
const ADDRESS: &str = "ONCEGATE_DRILL_ADDRESS";
/// A connection that no piece passes for so long is not there to be cut.
const CUT_PATIENCE: Duration = Duration::from_secs(5);
/// Copies that are sent after the last fault.
const SWEEP: u64 = 2_000;
/// A shorter window may pass in the middle of a drill.
const MIN_WINDOW_MS: i64 = 60_000;

/// What is asked of a drill.
#[derive(Clone, Debug)]
pub struct Drill {
    /// The text of the config file.
    pub text: String,
    /// The route; none: the only one.
    pub route: Option<String>,
    /// When it ends.
    pub until: Until,
    /// Says all that is chance, but for time.
    pub seed: u64,
    /// Requests a second.
    pub rate: u32,
    /// Copies among a hundred requests.
    pub copies: u32,
    /// A record with placeholders.
    pub template: Option<String>,
    /// Also where the sink looks like production.
    pub yes: bool,
    /// Deletes a row behind the gateway's back: shows that the comparison sees it.
    pub lose_a_row: bool,
}

/// When a drill ends.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Until {
    /// After so many kills.
    Kills(u64),
    /// After so long.
    Time(Duration),
}

/// Why there is no report.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Stop {
    /// The file, the route or the options do not allow it.
    #[error("{0}")]
    Refused(String),
    /// Something that is needed failed.
    #[error("{0}")]
    Failed(String),
}

/// Makes the shadow, drills, compares, and takes the shadow away, however it ends.
pub async fn run(asked: &Drill, config: &Config, bar: &ProgressBar) -> Result<Report, Stop> {
    let begun = Instant::now();
    let name = route(asked.route.as_deref(), config)?;
    let sink = &config.sinks[&config.routes[&name].sink];
    let random = rand::rng().random::<u32>();
    let kept: String = name.chars().take(40).collect();
    let shadow_route = format!("{kept}-drill-{random:08x}");
    let refused = |fault: String| Stop::Refused(format!("route {name:?}: {fault}"));
    let mut shadow = Shadow::of(sink, shadow_route.clone()).map_err(refused)?;
    let survey =
        shadow.survey().await.map_err(|fault| Stop::Failed(format!("sink {:?}: {fault}", sink.name)))?;
    if !asked.yes {
        safe(&survey).map_err(refused)?;
    }
    // Whoever may read the user's own file, nobody else reads its copy.
    let mut folder = tempfile::Builder::new();
    #[cfg(unix)]
    folder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
    let folder = folder.prefix("oncegate-drill-").tempdir();
    let folder = folder.map_err(|fault| Stop::Failed(format!("no temporary folder: {fault}")))?;
    let mut report = Report {
        route: name.clone(),
        sink: format!("{} ({})", sink.name, survey.place),
        seed: asked.seed,
        ..Report::default()
    };
    let stage =
        Stage { asked, config, name: &name, shadow_route: &shadow_route, folder: folder.path().into() };
    let (stop, stopped) = watch::channel(false);
    let mut result = None;
    {
        let mut play = std::pin::pin!(stage.play(&mut shadow, &mut report, bar, stopped));
        // The first signal ends the load, and what was sent is compared; the second one leaves that out.
        for _ in 0..2 {
            tokio::select! {
                ended = &mut play => {
                    result = Some(ended);
                    break;
                }
                // Without signals a drill goes on to its end.
                Ok(()) = signal() => drop(stop.send_replace(true)),
            }
        }
    }
    bar.set_message("cleaning up");
    let cleaned = shadow.clean().await;
    (report.cleaned, report.left) = (cleaned.gone, cleaned.left);
    report.notes.extend(cleaned.notes);
    let path = folder.path().to_owned();
    match folder.close() {
        Ok(()) => report.cleaned.push("the temporary folder".to_owned()),
        Err(fault) => report.left.push(format!("{}: {fault}", path.display())),
    }
    report.took = begun.elapsed();
    let with_left = |fault: String| match report.left.as_slice() {
        [] => fault,
        left => format!("{fault}\nnot taken away: {}", left.join("\nnot taken away: ")),
    };
    match result {
        Some(Ok(())) => Ok(report),
        Some(Err(Stop::Refused(fault))) => Err(Stop::Refused(with_left(format!("route {name:?}: {fault}")))),
        Some(Err(Stop::Failed(fault))) => Err(Stop::Failed(with_left(format!("route {name:?}: {fault}")))),
        None => Err(Stop::Failed(with_left("interrupted; nothing was compared".to_owned()))),
    }
}

/// The route that is meant, if it can be drilled.
fn route(asked: Option<&str>, config: &Config) -> Result<String, Stop> {
    let known = || {
        let names: Vec<&str> =
            config.routes.keys().chain(config.forwards.keys()).map(String::as_str).collect();
        names.join(", ")
    };
    let name = match asked {
        Some(name) => name.to_owned(),
        None if config.routes.len() + config.forwards.len() == 1 => {
            config.routes.keys().chain(config.forwards.keys()).next().cloned().unwrap_or_default()
        }
        None => return Err(Stop::Refused(format!("name one route with --route: the file has {}", known()))),
    };
    let refused = |what: &str| Err(Stop::Refused(format!("route {name:?} cannot be drilled: {what}")));
    if config.forwards.contains_key(&name) {
        return refused("an HTTP service has no shadow, and what requests do to it cannot be read back");
    }
    let Some(route) = config.routes.get(&name) else {
        return Err(Stop::Refused(format!("no route {name:?}; the file has {}", known())));
    };
    if route.naming.format.encoding != Encoding::Json || route.naming.format.debezium().is_some() {
        return refused("a drill makes JSON records; the route's `format` is another");
    }
    if matches!(route.naming.event_time, EventTime::KafkaTimestamp | EventTime::Debezium) {
        return refused("its event time is Kafka's, and a drill sends its records over HTTP");
    }
    if route.rules.window_ms < MIN_WINDOW_MS {
        return refused("its window is shorter than 60s, which a drill may outlast");
    }
    Ok(name)
}

/// Refuses what looks like production.
fn safe(survey: &Survey) -> Result<(), String> {
    let mut why = Vec::new();
    if !survey.local {
        why.push("it is not on this host");
    }
    if survey.has_rows {
        why.push("it has rows");
    }
    if why.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{} looks like production: {}. A drill does not touch its rows; it makes, and takes away again: {}. Say --yes to do that",
        survey.place,
        why.join(", and "),
        survey.makes.join("; ")
    ))
}

/// All that a drill is played on.
struct Stage<'a> {
    asked: &'a Drill,
    config: &'a Config,
    name: &'a str,
    shadow_route: &'a str,
    folder: PathBuf,
}

impl Stage<'_> {
    async fn play(
        &self,
        shadow: &mut Shadow,
        report: &mut Report,
        bar: &ProgressBar,
        stop: watch::Receiver<bool>,
    ) -> Result<(), Stop> {
        let failed = Stop::Failed;
        let asked = self.asked;
        let mut proxy = None;
        let mut variables = Vec::new();
        let mut key = None;
        match shadow.through() {
            Some(through) => {
                let started = Proxy::start(through.host, through.port).await.map_err(failed)?;
                let address = shadow.address_through(started.address().port());
                variables.extend(address.map(|address| (ADDRESS.to_owned(), address)));
                key = Some(through.key);
                proxy = Some(started);
            }
            None => report.notes.push(
                "connections to the sink were not cut: it has none, or its address is not one host and port"
                    .to_owned(),
            ),
        }
        let [listen, admin] = free_ports().map_err(failed)?;
        let bearer: String = (0..32).map(|_| char::from(rand::rng().random_range(b'a'..=b'z'))).collect();
        let target = shadow.target();
        let variable = format!("${{{ADDRESS}}}");
        let text = settings::shadow(
            &asked.text,
            &Place {
                route: self.name,
                shadow_route: self.shadow_route,
                sink: &self.config.routes[self.name].sink,
                target: &target,
                address: key.map(|key| (key, variable.as_str())),
                folder: &self.folder,
                listen,
                admin,
                bearer: &bearer,
            },
        )
        .map_err(failed)?;
        let lookup = |name: &str| {
            let own = variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
            own.or_else(|| std::env::var(name).ok())
        };
        let config = config::load(&text, lookup).map_err(|faults| {
            let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
            Stop::Refused(format!("cannot be drilled over HTTP: {}", faults.join("\n")))
        })?;
        let file = self.folder.join("oncegate.toml");
        std::fs::write(&file, text).map_err(|fault| failed(format!("{}: {fault}", file.display())))?;

        bar.set_message("making the shadow");
        shadow.make().await.map_err(failed)?;
        let shape = self.shape(shadow, &config).await?;
        report.compared = shape.columns().iter().map(|column| column.name.clone()).collect();
        let route = &config.routes[self.shadow_route];
        let window = Duration::from_millis(route.rules.window_ms.unsigned_abs());
        let load = Arc::new(Load {
            ledger: Mutex::default(),
            shape,
            mode: config.sinks[&route.sink].mode,
            door: (listen, format!("/v1/{}", self.shadow_route)),
            bearer,
            seed: asked.seed,
            rate: asked.rate,
            copies: asked.copies,
            copy_age: window / 3,
            state: callers::State::default(),
        });
        let mut child = Child::new(&self.folder, admin, variables);
        child.spawn().map_err(failed)?;
        child.ready().await.map_err(failed)?;
        load.trial().await.map_err(|fault| {
            Stop::Refused(format!(
                "{fault}\nIf a constraint, a foreign key or a rule of the table is in the way, give a record that it takes with \
                 --template"
            ))
        })?;

        let begun = Instant::now();
        let mut callers = JoinSet::new();
        callers.spawn(load.clone().run());
        let on = Struck { child: &mut child, proxy: proxy.as_ref(), load: &load, callers: &mut callers };
        let struck = self.strike(on, report, bar, stop.clone()).await;
        report.interrupted = *stop.borrow();
        load.end();
        struck.map_err(failed)?;
        bar.set_message("waiting for the last answers");
        child.ready().await.map_err(failed)?;
        while let Some(ended) = callers.join_next().await {
            ended.map_err(|fault| failed(fault.to_string()))?.map_err(failed)?;
        }
        bar.set_message("sending copies of all");
        load.sweep(SWEEP).await.map_err(failed)?;
        tokio::time::sleep(shadow.seen_after()).await;
        if let Some(how) = child.ended() {
            load.ledger.lock().died(how);
        } else if !child.terminate().await.map_err(failed)? {
            report.notes.push("the gateway did not end by itself within 40 s of SIGTERM".to_owned());
        }
        drop(proxy);
        report.notes.push(format!("{:.1} s under faults", begun.elapsed().as_secs_f64()));

        bar.set_message("comparing");
        if asked.lose_a_row {
            shadow.lose_a_row().await.map_err(failed)?;
        }
        let ledger = std::mem::take(&mut *load.ledger.lock());
        let mut comparison = Comparison::new(&ledger, &load.shape, load.mode).map_err(failed)?;
        let columns = load.shape.columns();
        shadow.read(columns, &mut |row| comparison.found(&row)).await.map_err(failed)?;
        (report.violations, report.rows_found) = comparison.finish().map_err(failed)?;
        report.rows = ledger.rows_sent();
        report.events = ledger.events();
        report.acknowledged = ledger.settled();
        report.refused = ledger.refused();
        report.requests = ledger.requests;
        report.copies = ledger.copies;
        report.repeated = ledger.repeated;
        report.outcomes = ledger.outcomes.clone();
        Ok(())
    }

    /// Records and rows that fit the shadow.
    async fn shape(&self, shadow: &Shadow, config: &Config) -> Result<Shape, Stop> {
        let route = &config.routes[self.shadow_route];
        let sink = &config.sinks[&route.sink];
        let built = sink_of(sink, route, &Seat::default()).map_err(Stop::Failed)?;
        let encoder = built.probe().await.map_err(|misfits| {
            let misfits: Vec<String> = misfits.iter().map(ToString::to_string).collect();
            Stop::Refused(format!("the table does not fit the route: {}", misfits.join("\n")))
        })?;
        let mut columns: Vec<(Column, Option<Kind>)> =
            encoder.columns().iter().map(|column| (column.clone(), shadow.kind(column))).collect();
        let mut naming = route.naming.clone();
        if shadow.whole_record() {
            let (name, type_name) = ("record".to_owned(), "JSON".to_owned());
            naming.columns.insert(name.clone(), ColumnSource::Pointer(whole()?));
            let column = Column { name, type_name, nullable: false, has_default: false };
            columns.push((column, Some(Kind::Json)));
        }
        let asked = Asked {
            naming: &naming,
            mode: sink.mode,
            row_key: &sink.row_key,
            version: sink.version.as_deref(),
            columns,
            template: self.asked.template.as_deref(),
            seed: self.asked.seed,
        };
        let mut shape = Shape::of(&asked).map_err(Stop::Refused)?;
        shape.without_unset().map_err(Stop::Refused)?;
        Ok(shape)
    }

    /// One fault after the other, until it is enough.
    async fn strike(
        &self,
        on: Struck<'_>,
        report: &mut Report,
        bar: &ProgressBar,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), String> {
        let Struck { child, proxy, load, callers } = on;
        let begun = Instant::now();
        let mut kills = 0;
        for step in Schedule::new(self.asked.seed, proxy.is_some()) {
            let (done, length) = match self.asked.until {
                Until::Kills(most) => (kills, most),
                Until::Time(time) => (begun.elapsed().as_secs(), time.as_secs().max(1)),
            };
            bar.set_length(length);
            bar.set_position(done);
            bar.set_message(format!("{kills} kills, {} events", load.ledger.lock().events()));
            if done >= length {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(step.peace_ms)) => {}
                _ = stop.wait_for(|stop| *stop) => break,
                Some(ended) = callers.join_next() => {
                    ended.map_err(|fault| fault.to_string())??;
                    return Err("the callers ended before their time".to_owned());
                }
            }
            self.alive(child, load).await?;
            let struck = match step.fault {
                Fault::Kill { empty_store, away_ms, until_ready } => {
                    kills += 1;
                    child.kill();
                    if empty_store {
                        child.empty_store()?;
                    }
                    tokio::time::sleep(Duration::from_millis(away_ms)).await;
                    child.spawn()?;
                    if until_ready {
                        child.ready().await?;
                    }
                    true
                }
                Fault::Pause { ms } => {
                    child.signal("STOP")?;
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    child.signal("CONT")?;
                    true
                }
                Fault::Cut { at, pieces } => match proxy {
                    Some(proxy) => {
                        let sprung = tokio::time::timeout(CUT_PATIENCE, proxy.trap(at, pieces)).await;
                        proxy.disarm();
                        sprung.is_ok_and(|sprung| sprung.is_ok())
                    }
                    None => false,
                },
            };
            let counted = report.faults.entry(step.fault.word()).or_default();
            counted.0 += 1;
            counted.1 += u64::from(struck);
        }
        // The last fault too is followed by records.
        self.alive(child, load).await?;
        child.ready().await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
        Ok(())
    }

    /// A gateway that ended by itself is written down, and started again.
    async fn alive(&self, child: &mut Child, load: &Load) -> Result<(), String> {
        let Some(how) = child.ended() else { return Ok(()) };
        load.ledger.lock().died(how);
        child.spawn()?;
        child.ready().await
    }
}

/// Points at the record itself.
fn whole() -> Result<Pointer, Stop> {
    Pointer::parse("").map_err(|fault| Stop::Failed(fault.to_string()))
}

/// What faults strike, and what goes on meanwhile.
struct Struck<'a> {
    child: &'a mut Child,
    proxy: Option<&'a Proxy>,
    load: &'a Load,
    callers: &'a mut JoinSet<Result<(), String>>,
}

/// Until somebody asks this process to end.
async fn signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    // Of a terminal that is closed, or a connection that breaks.
    let mut hangup = signal(SignalKind::hangup())?;
    let mut quit = signal(SignalKind::quit())?;
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = hangup.recv() => Ok(()),
        _ = quit.recv() => Ok(()),
        ended = tokio::signal::ctrl_c() => ended,
    }
}
