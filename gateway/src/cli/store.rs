//! `oncegate store`: a look into routes' dedup stores, while no gateway has them open.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Args, Subcommand};
use dedup_store::{Report, SlotKind, Stats, Store, export, import, verify};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::{
    Format, check,
    reset::{self, ResetFloor},
};
use crate::{clock::wall_ms, config::Config};

/// What to look at.
#[derive(Subcommand, Debug)]
pub(super) enum StoreCommand {
    /// Keys, bytes, slots, floors, checkpoints.
    Stats(Look),
    /// Reads everything and checks every checksum, order and count; says what is wrong and whether it can be repaired.
    Verify(Look),
    /// Discards all that a route knows, in its sink and its store: the way out of a watermark that a wrong clock has set.
    ResetFloor(ResetFloor),
    /// Writes a compact, checked copy of a route's store to a new folder.
    Export {
        #[command(flatten)]
        at: One,
        /// The new folder. It will hold the hash secret.
        #[arg(long)]
        to: PathBuf,
    },
    /// Puts an exported store where the route's is looked for; nothing may be there.
    Import {
        #[command(flatten)]
        at: One,
        /// The folder of the export, or of another closed store.
        #[arg(long)]
        from: PathBuf,
    },
}

/// Which store.
#[derive(Args, Debug)]
pub(super) struct One {
    /// The config file.
    #[arg(short, long, default_value = "oncegate.toml")]
    config: PathBuf,
    /// The route.
    #[arg(long)]
    route: String,
}

/// Which stores, and how to print.
#[derive(Args, Debug)]
pub(super) struct Look {
    /// The config file.
    #[arg(short, long, default_value = "oncegate.toml")]
    config: PathBuf,
    /// Only this route's store.
    #[arg(long)]
    route: Option<String>,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// Runs the command: exit status 1 if a store cannot be read or is not sound, 2 if the file or the route is not good.
pub(super) fn run(command: &StoreCommand) -> ExitCode {
    let look = match command {
        StoreCommand::Stats(look) | StoreCommand::Verify(look) => look,
        StoreCommand::Export { at, to } => return copied(at, "exported to", to, true),
        StoreCommand::Import { at, from } => return copied(at, "imported from", from, false),
        StoreCommand::ResetFloor(asked) => return reset::run(asked),
    };
    let Some(config) = check::load(&look.config) else { return ExitCode::from(2) };
    let routes: Vec<&String> =
        config.routes.keys().filter(|name| look.route.as_ref().is_none_or(|only| only == *name)).collect();
    if routes.is_empty() {
        let known: Vec<&str> = config.routes.keys().map(String::as_str).collect();
        eprintln!("oncegate: no route of that name; the file has {}", known.join(", "));
        return ExitCode::from(2);
    }
    let mut sound = true;
    for route in routes {
        let folder = config.store.path.join(route);
        let done = match command {
            StoreCommand::Stats(_) => stats(&config, route, &folder).map(|stats| {
                print(look.format, &stats, stats_json(route, &stats));
                true
            }),
            // Verify: the others are done above.
            _ => verified(&folder).map(|report| {
                print(look.format, &report, report_json(route, &report));
                report.sound()
            }),
        };
        sound &= done.unwrap_or_else(|fault| {
            eprintln!("oncegate: route {route:?}: {fault}");
            false
        });
    }
    if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn stats(config: &Config, route: &str, folder: &Path) -> Result<Stats, String> {
    if !folder.is_dir() {
        return Err(format!("{} is no folder: there is no store yet", folder.display()));
    }
    let options = config.routes[route].store(&config.store);
    let bar = busy("opening the store");
    let store = Store::open(folder, options).map_err(|fault| fault.to_string())?;
    bar.finish_and_clear();
    Ok(store.stats(wall_ms()))
}

/// Takes a route's store to another folder, or from there.
fn copied(at: &One, what: &str, other: &Path, out: bool) -> ExitCode {
    let Some(config) = check::load(&at.config) else { return ExitCode::from(2) };
    let Some(route) = config.routes.get(&at.route) else {
        let known: Vec<&str> = config.routes.keys().map(String::as_str).collect();
        eprintln!("oncegate: no route {:?}; the file has {}", at.route, known.join(", "));
        return ExitCode::from(2);
    };
    let folder = config.store.path.join(&at.route);
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{bar:40} {percent} % {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut progress = |done, all| {
        bar.set_length(all);
        bar.set_position(done);
    };
    let done = if out {
        export(&folder, route.store(&config.store), other, &mut progress).map(|keys| format!("{keys} keys"))
    } else {
        import(other, &folder, &mut progress).map(|bytes| format!("{bytes} bytes"))
    };
    bar.finish_and_clear();
    match done {
        Ok(amount) => {
            println!("route {:?}: {amount} {what} {}", at.route, other.display());
            ExitCode::SUCCESS
        }
        Err(fault) => {
            eprintln!("oncegate: route {:?}: {fault}", at.route);
            ExitCode::FAILURE
        }
    }
}

fn verified(folder: &Path) -> Result<Report, String> {
    let bar = busy("reading the store");
    let report = verify(folder).map_err(|fault| fault.to_string());
    bar.finish_and_clear();
    report
}

/// Shows that something goes on, where a terminal is attached.
fn busy(what: &'static str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(what);
    let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

fn print(format: Format, text: &dyn std::fmt::Display, json: serde_json::Value) {
    let mut out = io::stdout().lock();
    // A reader that went away (`| head`) is no fault of the store.
    match format {
        Format::Text => write!(out, "{text}").ok(),
        Format::Json => writeln!(out, "{json}").ok(),
    };
}

fn stats_json(route: &str, stats: &Stats) -> serde_json::Value {
    json!({
        "route": route,
        "keys": stats.keys,
        "effects_pending": stats.effects_pending,
        "memory_bytes": stats.memory_bytes,
        "disk_bytes": stats.disk_bytes,
        "watermark_ms": stats.floors.watermark_ms,
        "floor_ms": known(stats.floor_ms),
        "slot_width_ms": stats.slot_width_ms,
        "plan": stats.plan.map(|plan| json!({
            "keys_per_s": plan.keys_per_s, "keys": plan.keys, "memory_bytes": plan.memory_bytes,
            "disk_bytes": plan.disk_bytes, "max_memory_bytes": plan.max_memory_bytes,
            "max_disk_bytes": plan.max_disk_bytes, "window_fits_ms": plan.window_fits_ms,
        })),
        "slots": stats.slots.iter().map(|slot| json!({
            "number": slot.number,
            "kind": match slot.kind {
                SlotKind::Open => "open",
                SlotKind::Closed => "closed",
                SlotKind::Sealed => "sealed",
            },
            "oldest_ms": slot.event_ms.map(|(oldest, _)| oldest),
            "newest_ms": slot.event_ms.map(|(_, newest)| newest),
            "keys": slot.keys,
            "memory_bytes": slot.memory_bytes,
            "filter_bits": slot.filter_bits,
            "false_positives": slot.false_positives,
        })).collect::<Vec<_>>(),
        "files": stats.files.iter().map(|file| json!({
            "file": file.file, "bytes": file.bytes, "closed": file.closed, "newest_ms": file.newest_ms,
        })).collect::<Vec<_>>(),
        "shards": stats.checkpoints.iter().map(|checkpoint| json!({
            "shard": &*checkpoint.shard, "sequence": checkpoint.sequence, "position": checkpoint.position,
            "watermark_ms": known(checkpoint.watermark_ms), "floor_ms": known(checkpoint.floor_ms),
        })).collect::<Vec<_>>(),
    })
}

fn known(ms: i64) -> Option<i64> {
    (ms != i64::MIN).then_some(ms)
}

fn report_json(route: &str, report: &Report) -> serde_json::Value {
    json!({
        "route": route,
        "sound": report.sound(),
        "files": report.files.iter().map(|file| json!({
            "file": file.file, "bytes": file.bytes, "blocks": file.blocks, "facts": file.facts,
        })).collect::<Vec<_>>(),
        "faults": report.faults.iter().map(|fault| json!({
            "what": fault.what, "remedy": fault.remedy.to_string(),
        })).collect::<Vec<_>>(),
    })
}
