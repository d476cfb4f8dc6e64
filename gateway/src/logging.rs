//! Logs: `tracing` to standard error, levels as in `RUST_LOG`, as text or as JSON lines. Never payloads, never keys.

use std::io::IsTerminal as _;

use tracing_subscriber::{EnvFilter, Layer as _, layer::SubscriberExt as _, util::SubscriberInitExt as _};

/// How log lines are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line, for log collectors.
    Json,
}

/// What is logged where nothing else is asked.
const DEFAULT_LEVELS: &str = "info";

/// Why logs cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The levels do not parse.
    #[error("log levels {levels:?}: {reason}; write them like \"info\" or \"info,oncegate=debug\"")]
    Levels {
        /// As given.
        levels: String,
        /// What is wrong with them.
        reason: String,
    },
    /// The process logs already.
    #[error("logs are already started in this process")]
    Started,
}

/// Starts logging for the whole process. `levels` is in the language of `RUST_LOG`; without it the variable `RUST_LOG` of the
/// environment counts, else `info`.
pub fn start(format: LogFormat, levels: Option<&str>) -> Result<(), LogError> {
    let from_environment = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|levels| !levels.is_empty());
    let levels = levels.or(from_environment.as_deref()).unwrap_or(DEFAULT_LEVELS);
    let filter = parse_levels(levels)?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).try_init().map_err(|_| LogError::Started)
}

fn parse_levels(levels: &str) -> Result<EnvFilter, LogError> {
    EnvFilter::builder()
        .parse(levels)
        .map_err(|error| LogError::Levels { levels: levels.to_owned(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_those_of_rust_log_and_bad_ones_are_named() {
        assert!(parse_levels("warn,oncegate::lane=trace").is_ok());
        let error = parse_levels("oncegate=loud").err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("oncegate=loud") && error.contains("info,oncegate=debug"), "{error}");
    }
}
