//! The command line. Exit status: 0, 1 (failed), 2 (usage or config).

mod check;
mod drill;
mod quickstart;
mod reset;
mod serve;
mod store;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand, ValueEnum};

/// A gateway in front of sinks: writes reach it at least once, each takes effect once.
#[derive(Parser, Debug)]
#[command(name = "oncegate", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Runs an embedded example: sends itself orders with copies, crashes the writer in the middle, counts, then serves.
    Quickstart(quickstart::Quickstart),
    /// Runs all routes of a config file: HTTP doors and Kafka relays.
    Serve {
        /// The config file.
        #[arg(short, long, default_value = "oncegate.toml")]
        config: PathBuf,
    },
    /// Finds every error of a config file; with `--servers`, everything there that does not fit it.
    Check {
        /// The config file.
        #[arg(short, long, default_value = "oncegate.toml")]
        config: PathBuf,
        /// How to print.
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
        /// Asks sinks, brokers and topics too, as a start would. Joins no group and takes nothing over; a sink of the gateway's own host
        /// that a running gateway holds is said to be held.
        #[arg(long)]
        servers: bool,
    },
    /// Proves a route on your own servers: writes copies beside the real table, through kills, pauses and cut connections.
    Drill(drill::DrillArguments),
    /// Looks into a route's dedup store.
    Store {
        #[command(subcommand)]
        command: store::StoreCommand,
    },
}

/// How lists are printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Format {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// Runs the program named by the process's arguments.
pub fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(fault) => {
            // Help and version are no faults; where they cannot be printed nobody reads.
            drop(fault.print());
            return ExitCode::from(if fault.use_stderr() { 2 } else { 0 });
        }
    };
    match arguments.command {
        Command::Quickstart(quickstart) => quickstart.run(),
        Command::Serve { config } => serve::run(&config),
        Command::Check { config, format, servers } => check::run(&config, format == Format::Json, servers),
        Command::Drill(arguments) => drill::run(&arguments),
        Command::Store { command } => store::run(&command),
    }
}
