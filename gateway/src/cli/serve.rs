//! `oncegate serve`.

use std::{path::Path, process::ExitCode};

use super::check;
use crate::{logging, serve::serve};

/// Serves the file at `path` until SIGTERM or Ctrl-C: exit status 2 if the file is not good, 1 if something cannot start.
pub(super) fn run(path: &Path) -> ExitCode {
    let Some(config) = check::load(path) else { return ExitCode::from(2) };
    if let Err(fault) = logging::start(config.log.format, config.log.levels.as_deref()) {
        eprintln!("oncegate: {fault}");
        return ExitCode::from(2);
    }
    match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(serve(config)),
        Err(fault) => {
            eprintln!("oncegate: the runtime cannot be started: {fault}");
            ExitCode::FAILURE
        }
    }
}
