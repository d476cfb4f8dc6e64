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

/// What is logged where nothing else is asked. The Postgres driver passes the server's notices on as `info`: words of triggers and
/// of the server about statements, not about the gateway, and perhaps with values of rows.
const DEFAULT_LEVELS: &str = "info,tokio_postgres=warn";

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
/// environment counts, else `info,tokio_postgres=warn`.
pub fn start(format: LogFormat, levels: Option<&str>) -> Result<(), LogError> {
    let from_environment = std::env::var(EnvFilter::DEFAULT_ENV).ok();
    let filter = parse_levels(levels_of(levels, from_environment.as_deref()))?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).try_init().map_err(|_| LogError::Started)
}

fn levels_of<'a>(configured: Option<&'a str>, from_environment: Option<&'a str>) -> &'a str {
    configured.or(from_environment.filter(|levels| !levels.is_empty())).unwrap_or(DEFAULT_LEVELS)
}

fn parse_levels(levels: &str) -> Result<EnvFilter, LogError> {
    EnvFilter::builder()
        .parse(levels)
        .map_err(|error| LogError::Levels { levels: levels.to_owned(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn levels_are_those_of_rust_log_and_bad_ones_are_named() {
        assert!(parse_levels("warn,oncegate::lane=trace").is_ok());
        let error = parse_levels("oncegate=loud").err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("oncegate=loud") && error.contains("info,oncegate=debug"), "{error}");
    }

    /// What a subscriber with these levels writes of what happens in `events`.
    fn written(levels: &str, events: impl FnOnce()) -> String {
        let lines: Arc<Mutex<Vec<u8>>> = Arc::default();
        let to = lines.clone();
        let layer = tracing_subscriber::fmt::layer().with_writer(move || Lines(to.clone()));
        let subscriber = tracing_subscriber::registry().with(parse_levels(levels).unwrap()).with(layer);
        tracing::subscriber::with_default(subscriber, events);
        String::from_utf8(lines.lock().clone()).unwrap()
    }

    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// The log of a gateway where nobody had asked for anything was full of `WARNING: there is no transaction in progress`: the
    /// driver passes each notice of the server on, at the level `info`.
    #[test]
    fn notices_of_the_database_are_logged_only_where_asked() {
        let events = || {
            tracing::info!(target: "tokio_postgres::connection", "WARNING: there is no transaction in progress");
            tracing::warn!(target: "tokio_postgres::connection", "a warning of the driver");
            tracing::info!(target: "oncegate::serve", "serving");
        };
        let unasked = written(levels_of(None, None), events);
        assert!(!unasked.contains("no transaction") && unasked.contains("serving"), "{unasked}");
        assert!(unasked.contains("a warning of the driver"), "{unasked}");
        assert!(!written(levels_of(None, Some("")), events).contains("no transaction"));
        for asked in [levels_of(None, Some("info")), levels_of(Some("info"), Some("error"))] {
            let lines = written(asked, events);
            assert!(lines.contains("no transaction") && lines.contains("serving"), "{lines}");
        }
    }
}
