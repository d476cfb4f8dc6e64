//! Start-up checks: the configuration, the server, what is at the prefix.

use std::time::Duration;

use ::redis::{Value, cmd, pipe};

use super::{
    MAX_COLUMNS, RedisConfig, Shared,
    connect::{Fault, Link},
    keys::OURS,
    reply,
    script::{Call, Script},
    server::Server,
};
use crate::sink::{Misfit, Mode};

pub(super) fn misfit(what: impl Into<String>, remedy: impl Into<String>) -> Misfit {
    Misfit { what: what.into(), remedy: remedy.into() }
}

/// What does not fit together, whatever the server is.
pub(super) fn config_misfits(config: &RedisConfig) -> Vec<Misfit> {
    let mut misfits = Vec::new();
    let prefix = config.prefix.as_str();
    if prefix.is_empty() {
        misfits.push(misfit("the prefix is empty: rows could be anywhere", "name one, such as \"orders:\""));
    } else if prefix.starts_with(OURS) || OURS.starts_with(prefix) {
        misfits.push(misfit(
            format!("the prefix {prefix:?} could meet Oncegate's own keys, which begin with {OURS:?}"),
            "choose another",
        ));
    }
    if config.columns.is_empty() || config.columns.len() > MAX_COLUMNS {
        misfits.push(misfit(
            format!("{} columns are named, of 1 to {MAX_COLUMNS}", config.columns.len()),
            "name the fields of a row, each with what its values are",
        ));
    }
    let kind = |name: &str| config.columns.iter().find(|(column, _)| column == name).map(|(_, kind)| *kind);
    let names = || config.columns.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
    if config.row_key.is_empty() {
        misfits.push(misfit(
            "no row key is named, and a row in Redis is at a key",
            "add row_key = [\"COLUMN\"]",
        ));
    }
    for name in &config.row_key {
        match kind(name) {
            None => misfits.push(misfit(
                format!("row key column {name:?} is none of the columns ({})", names()),
                "correct its name, or add it to columns",
            )),
            Some(kind) if !kind.is_canonical() => misfits.push(misfit(
                format!(
                    "row key column {name:?} is {:?}: equal values may be written differently",
                    kind.name()
                ),
                "make it \"text\", \"integer\", \"boolean\", \"uuid\" or \"binary\"",
            )),
            Some(_) => {}
        }
    }
    match (&config.version, config.mode) {
        (None, Mode::UpsertIfNewer) => misfits.push(misfit(
            "no version column is named, and this mode compares it",
            "add version = \"COLUMN\"",
        )),
        (Some(name), Mode::UpsertIfNewer) => match kind(name) {
            None => misfits.push(misfit(
                format!("version column {name:?} is none of the columns ({})", names()),
                "correct its name, or add it to columns",
            )),
            Some(kind) if !kind.has_order() => misfits.push(misfit(
                format!("version column {name:?} is {:?}, which has no order here", kind.name()),
                "make it \"integer\", \"timestamp\" or \"text\" (compared byte by byte)",
            )),
            Some(_) => {}
        },
        _ => {}
    }
    misfits
}

/// All start-up checks.
pub(super) async fn probe(shared: &Shared) -> Result<(), Vec<Misfit>> {
    let (mut link, server) = shared
        .connect()
        .await
        .map_err(|error| vec![misfit(error.to_string(), "check the URL, the server, and what is between")])?;
    let limit = shared.config.timeout;
    let checked = tokio::time::timeout(limit, Box::pin(check(&mut link, &server, &shared.config))).await;
    let misfits = match checked {
        Ok(Ok(misfits)) => misfits,
        Ok(Err(fault)) => {
            vec![misfit(fault.not_applied().to_string(), "check the server and what its user may do")]
        }
        Err(_) => vec![misfit(
            format!("the checks of the Redis server took more than {} ms", limit.as_millis()),
            "check the server's load, or raise timeout",
        )],
    };
    if misfits.is_empty() { Ok(()) } else { Err(misfits) }
}

async fn check(link: &mut Link, server: &Server, config: &RedisConfig) -> Result<Vec<Misfit>, Fault> {
    let mut misfits = server.misfits(config);
    if misfits.is_empty() {
        let mut call = Call::default();
        call.key(format!("{OURS}probe")).key(format!("{}oncegate-probe", config.prefix));
        let forbidden = link.run(Script::Probe, &call, Duration::MAX).await?;
        let commands: Vec<String> = reply::list(&forbidden)?
            .iter()
            .filter_map(|part| Some(String::from_utf8_lossy(reply::maybe(part).ok()??).into_owned()))
            .collect();
        if !commands.is_empty() {
            misfits.push(misfit(
                format!("the user may not run: {}", commands.join(", ")),
                format!("allow it: ACL SETUSER <user> ~{OURS}* ~{}* +@all -@dangerous +info", config.prefix),
            ));
        }
        misfits.extend(other_types(link, config).await?);
        if !server.syncs_always() {
            tracing::warn!(
                "a crash of the Redis server's host may take acknowledged batches (appendfsync is not always, or no-appendfsync-on-rewrite \
                 is yes): what is lost is noticed by the sequences, and Kafka is read again from there"
            );
        }
    }
    Ok(misfits)
}

/// Keys at the prefix that are no hashes, among those that a short look finds.
async fn other_types(link: &mut Link, config: &RedisConfig) -> Result<Option<Misfit>, Fault> {
    const LOOKS: usize = 10;
    let pattern: String = config
        .prefix
        .chars()
        .flat_map(|c| if "*?[]\\^".contains(c) { vec!['\\', c] } else { vec![c] })
        .chain(['*'])
        .collect();
    let mut cursor = "0".to_owned();
    for _ in 0..LOOKS {
        let mut scan = cmd("SCAN");
        scan.arg(&cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(1000);
        let found = link.command(&scan).await?;
        let parts = reply::list(&found)?;
        cursor = reply::text(parts, 0)?.to_owned();
        let mut types = pipe();
        for key in reply::list(parts.get(1).unwrap_or(&Value::Nil))? {
            types.cmd("TYPE").arg(reply::maybe(key)?.unwrap_or_default());
        }
        let kinds = if types.is_empty() { Vec::new() } else { link.commands(&types).await? };
        if let Some(kind) = kinds.into_iter().find(|kind| kind != "hash" && kind != "none") {
            return Ok(Some(misfit(
                format!(
                    "there is a {kind} among the keys that begin with {:?}, and rows are hashes",
                    config.prefix
                ),
                "choose another prefix, or move it away",
            )));
        }
        if cursor == "0" {
            break;
        }
    }
    Ok(None)
}
