//! `oncegate store`: a look into a route's dedup store, while no gateway has it open.

use std::{path::PathBuf, process::ExitCode};

use clap::Subcommand;
use dedup_store::{Store, StoreOptions};

use super::Format;

/// What to look at.
#[derive(Subcommand, Debug)]
pub(super) enum StoreCommand {
    /// Keys, bytes, slots, floors, checkpoints.
    Stats {
        /// The route's folder inside `store.path`.
        folder: PathBuf,
        /// How to print.
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Reads everything and checks every checksum, order and count; says what is wrong and whether it can be repaired.
    Verify {
        /// The route's folder inside `store.path`.
        folder: PathBuf,
        /// How to print.
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
}

pub(super) fn run(_: &StoreCommand) -> ExitCode { ExitCode::from(2) }
