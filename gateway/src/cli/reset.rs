//! `oncegate store reset-floor`: discards what a route knows, where a wrong clock has set its floors.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use dedup_store::Store;

use super::check;
use crate::{
    clock::shown,
    config::Config,
    gate::{BuildError, Reset, reset_floor},
    serve::{Seat, sink_of},
};

/// Which route, and whether to do it.
#[derive(Args, Debug)]
pub(super) struct ResetFloor {
    /// The config file.
    #[arg(short, long, default_value = "oncegate.toml")]
    config: PathBuf,
    /// The route.
    #[arg(long)]
    route: String,
    /// Discards. Without this the command only says what there is.
    #[arg(long)]
    discard_facts: bool,
}

/// Runs the command: exit status 1 if it could not be done, 2 if the file or the route is not good.
pub(super) fn run(asked: &ResetFloor) -> ExitCode {
    let Some(config) = check::load(&asked.config) else { return ExitCode::from(2) };
    if !config.routes.contains_key(&asked.route) {
        let known: Vec<&str> = config.routes.keys().map(String::as_str).collect();
        eprintln!("oncegate: no route of that name; the file has {}", known.join(", "));
        return ExitCode::from(2);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(|fault| format!("the runtime cannot be started: {fault}"));
    match done.and_then(|runtime| runtime.block_on(reset(&config, &asked.route, asked.discard_facts))) {
        Ok(reset) => {
            print!("{}", told(&asked.route, &reset));
            ExitCode::SUCCESS
        }
        Err(fault) => {
            eprintln!("oncegate: route {:?}: {fault}", asked.route);
            ExitCode::FAILURE
        }
    }
}

async fn reset(config: &Config, route: &str, discard: bool) -> Result<Reset, String> {
    let folder = config.store.path.join(route);
    let options = config.routes[route].store(&config.store);
    // Held open all the while: a gateway that uses the folder is at work.
    let store = if config.store.in_memory || !folder.is_dir() {
        None
    } else {
        Some(Store::open(&folder, options).map_err(|fault| fault.to_string())?)
    };
    let route_config = &config.routes[route];
    let sink = sink_of(&config.sinks[&route_config.sink], route_config, &Seat::default())?;
    reset_floor(sink, route, store.as_ref(), discard).await.map_err(|fault: BuildError| fault.to_string())
}

fn told(route: &str, reset: &Reset) -> String {
    let mut text = String::new();
    let known = |ms: i64| if ms == i64::MIN { "none".to_owned() } else { shown(ms) };
    for state in &reset.shards {
        text += &format!(
            "shard {}: watermark {}, floor {}, sequence {}\n",
            state.shard,
            known(state.watermark_ms),
            known(state.floor_ms),
            state.sequence
        );
    }
    text += &match reset.marks {
        Some(marks) => format!(
            "route {route}: discarded {marks} marks, all watermarks and floors, and this instance's store. A copy of a record that \
             was written before now is new; only the table's row key can tell it. Positions of relays stay. Other instances of the \
             route: run this there too, before they start.\n"
        ),
        None => format!(
            "route {route}: nothing was changed. With --discard-facts all marks, watermarks and floors are discarded, and this \
             instance's store: a copy of a record that was written before is then new. Stop the route's gateways first.\n"
        ),
    };
    text
}
