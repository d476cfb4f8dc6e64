//! `oncegate drill`: faults against a user's own route and servers, beside the real table.

use std::{
    fs,
    io::{self, IsTerminal, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{Format, check};
use crate::drill::{self, Drill, Stop, Until};

/// What to drill, and for how long.
#[derive(Args, Debug)]
pub(super) struct DrillArguments {
    /// The config file.
    #[arg(short, long, default_value = "oncegate.toml")]
    config: PathBuf,
    /// The route; may be left out if the file has one.
    #[arg(long)]
    route: Option<String>,
    /// Ends after so many minutes.
    #[arg(long, conflicts_with = "kills", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    minutes: Option<u64>,
    /// Ends after so many kills; every other fault is one.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    kills: u64,
    /// Seed of records and faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Requests a second.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// Copies among a hundred requests.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=90))]
    copies: u32,
    /// A file with one record, in which {n} (a number of its row), {version} and {time} (RFC 3339) are filled in.
    #[arg(long)]
    template: Option<PathBuf>,
    /// Also where the sink looks like production: it is on another host, or has rows.
    #[arg(long)]
    yes: bool,
    /// How to print what was found.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Deletes a row of the shadow behind the gateway's back before the comparison, which must find it.
    #[arg(long, hide = true)]
    lose_a_row: bool,
}

/// Runs the command: exit status 1 if something was lost, doubled or wrong, or the drill failed; 2 if file, route or options are not
/// good, or the sink looks like production.
pub(super) fn run(arguments: &DrillArguments) -> ExitCode {
    let Some(config) = check::load(&arguments.config) else { return ExitCode::from(2) };
    let read =
        |path: &PathBuf| fs::read_to_string(path).map_err(|fault| format!("{}: {fault}", path.display()));
    let text = read(&arguments.config);
    let template = arguments.template.as_ref().map(read).transpose();
    let (text, template) = match (text, template) {
        (Ok(text), Ok(template)) => (text, template),
        (Err(fault), _) | (_, Err(fault)) => {
            eprintln!("oncegate: {fault}");
            return ExitCode::from(2);
        }
    };
    let until = match arguments.minutes {
        Some(minutes) => Until::Time(Duration::from_secs(minutes * 60)),
        None => Until::Kills(arguments.kills),
    };
    let drill = Drill {
        text,
        route: arguments.route.clone(),
        until,
        seed: arguments.seed,
        rate: arguments.rate,
        copies: arguments.copies,
        template,
        yes: arguments.yes,
        lose_a_row: arguments.lose_a_row,
    };
    let bar = progress();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(drill::run(&drill, &config, &bar)),
        Err(fault) => Err(Stop::Failed(format!("the runtime cannot be started: {fault}"))),
    };
    bar.finish_and_clear();
    let report = match ended {
        Ok(report) => report,
        Err(stop) => {
            eprintln!("oncegate: {stop}");
            return if matches!(stop, Stop::Refused(_)) { ExitCode::from(2) } else { ExitCode::FAILURE };
        }
    };
    let mut out = io::stdout().lock();
    // A reader that went away (`| head`) changes nothing of what was found.
    match arguments.format {
        Format::Text => write!(out, "{report}").ok(),
        Format::Json => writeln!(out, "{}", report.json()).ok(),
    };
    if report.held() && report.left().is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn progress() -> ProgressBar {
    let terminal = io::stderr().is_terminal();
    let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template("  {bar:40} {pos}/{len}  {elapsed}  {msg}");
    let bar = ProgressBar::with_draw_target(Some(1), target)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
