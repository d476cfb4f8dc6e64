//! `oncegate check`: prints every error of a config file.

use std::{
    fs,
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use adapters::sink::Misfit;
use serde::Serialize;

use crate::{
    config::{self, Config, ConfigError},
    serve::{Unfit, unfit},
};

/// Reads and checks the file at `path`, and prints every error to standard error: `file:line:column: key: message`. None if
/// there was one.
pub(super) fn load(path: &Path) -> Option<Config> {
    match read(path) {
        Ok(config) => Some(config),
        Err(errors) => {
            // Where errors cannot be printed nobody reads; the exit status says the same.
            print(path, &errors, false, &mut io::stderr().lock()).ok();
            None
        }
    }
}

/// Runs the command: exit status 0 if the file is good, 2 if not; 1 if the file is, but not the servers that were asked. What is wrong goes
/// to standard output.
pub(super) fn run(path: &Path, json: bool, servers: bool) -> ExitCode {
    let mut out = io::stdout().lock();
    let (printed, status) = match read(path) {
        Ok(config) => {
            let misfits = if servers { asked(&config) } else { Vec::new() };
            if misfits.is_empty() {
                let (routes, sinks) = (config.routes.len() + config.forwards.len(), config.sinks.len());
                let good = format!("{}: good: routes {routes}, sinks {sinks}", path.display());
                (if json { Ok(()) } else { writeln!(out, "{good}") }, ExitCode::SUCCESS)
            } else {
                (print_misfits(&misfits, json, &mut out), ExitCode::FAILURE)
            }
        }
        Err(errors) => (print(path, &errors, json, &mut out), ExitCode::from(2)),
    };
    // A reader that went away (`| head`) is no fault of the file.
    printed.ok();
    status
}

/// What the servers of all routes do not fit.
fn asked(config: &Config) -> Vec<Unfit> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    match runtime {
        Ok(runtime) => runtime.block_on(unfit(config)),
        Err(fault) => {
            let misfit = Misfit {
                what: format!("the runtime cannot be started: {fault}"),
                remedy: "give the process more threads".to_owned(),
            };
            vec![Unfit { route: String::new(), misfit }]
        }
    }
}

fn print_misfits(misfits: &[Unfit], json: bool, out: &mut impl Write) -> io::Result<()> {
    for Unfit { route, misfit } in misfits {
        if json {
            let Misfit { what, remedy } = misfit;
            writeln!(out, "{}", serde_json::json!({ "route": route, "what": what, "remedy": remedy }))?;
        } else {
            writeln!(out, "route {route:?}: {misfit}")?;
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<Config, Vec<ConfigError>> {
    let text = fs::read(path).map_err(|fault| unreadable(format!("cannot be read: {fault}")))?;
    let text = String::from_utf8(text)
        .map_err(|fault| unreadable(format!("is not UTF-8 at byte {}", fault.utf8_error().valid_up_to())))?;
    config::load(&text, |name| std::env::var(name).ok())
}

fn unreadable(what: String) -> Vec<ConfigError> {
    let remedy = "name a config file with -c".to_owned();
    vec![ConfigError { line: 1, column: 1, key: String::new(), what, value: None, bound: None, remedy }]
}

/// One error as a JSON line.
#[derive(Serialize)]
struct Line<'a> {
    file: String,
    line: usize,
    column: usize,
    key: &'a str,
    what: &'a str,
    value: Option<&'a str>,
    bound: Option<&'a str>,
    remedy: &'a str,
}

fn print(path: &Path, errors: &[ConfigError], json: bool, out: &mut impl Write) -> io::Result<()> {
    let file = path.display();
    for error in errors {
        if json {
            let line = Line {
                file: file.to_string(),
                line: error.line,
                column: error.column,
                key: &error.key,
                what: &error.what,
                value: error.value.as_deref(),
                bound: error.bound.as_deref(),
                remedy: &error.remedy,
            };
            writeln!(out, "{}", serde_json::to_string(&line)?)?;
        } else {
            writeln!(out, "{file}:{}:{}: {error}", error.line, error.column)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_printed_with_their_places_or_as_json_lines() {
        let errors = config::load("[server]\nlisten = 5\n", |_| None).unwrap_err();
        let printed = |json| {
            let mut out = Vec::new();
            print(Path::new("a.toml"), &errors, json, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let text = printed(false);
        assert!(text.starts_with("a.toml:1:1: the file has no route"), "{text}");
        assert!(
            text.contains("\na.toml:2:10: server.listen: is an integer, not a string (value: 5); "),
            "{text}"
        );
        let lines: Vec<serde_json::Value> =
            printed(true).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), errors.len());
        assert_eq!((&lines[1]["line"], &lines[1]["key"]), (&2.into(), &"server.listen".into()));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let errors = read(Path::new("/nowhere/oncegate.toml")).unwrap_err();
        assert!(errors[0].what.starts_with("cannot be read"), "{errors:?}");
    }
}
