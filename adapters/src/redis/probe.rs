//! Start-up checks: the configuration, the server, what is at the prefix.

use std::time::Duration;

use ::redis::{Value, cmd, pipe};

use super::{
    Durability, MAX_COLUMNS, RedisConfig, Shared,
    connect::{Fault, Link},
    keys::OURS,
    reply,
    script::{Call, Script},
};
use crate::sink::{Misfit, Mode};

fn misfit(what: impl Into<String>, remedy: impl Into<String>) -> Misfit {
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
    let mut link = shared
        .connect()
        .await
        .map_err(|error| vec![misfit(error.to_string(), "check the URL, the server, and what is between")])?;
    let limit = shared.config.timeout;
    let checked = tokio::time::timeout(limit, Box::pin(check(&mut link, &shared.config))).await;
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

async fn check(link: &mut Link, config: &RedisConfig) -> Result<Vec<Misfit>, Fault> {
    let info = link.info().await?;
    // Managed servers often keep CONFIG to themselves.
    let fsync = match link.command(cmd("CONFIG").arg("GET").arg("appendfsync")).await {
        Ok(Value::Array(parts)) => reply::text(&parts, 1).ok().map(str::to_owned),
        Ok(Value::Map(pairs)) => pairs
            .first()
            .and_then(|(_, value)| Some(String::from_utf8_lossy(reply::maybe(value).ok()??).into_owned())),
        Ok(_) | Err(Fault::Server(_)) => None,
        Err(lost) => return Err(lost),
    };
    let longest = match link.command(cmd("CONFIG").arg("GET").arg("proto-max-bulk-len")).await {
        Ok(Value::Array(parts)) => reply::number(&parts, 1).ok(),
        Ok(_) | Err(Fault::Server(_)) => None,
        Err(lost) => return Err(lost),
    };
    let mut misfits = server_misfits(&info, fsync.as_deref(), config);
    // Also a batch's marks are one argument: 28 bytes a record.
    let needed = config.max_row_bytes.max(2 << 20) as u64;
    if let Some(longest) = longest.filter(|longest| longest.unsigned_abs() < needed) {
        misfits.push(misfit(
            format!("proto-max-bulk-len is {longest}, and arguments may have {needed} bytes"),
            "raise it, or lower max_row_size",
        ));
    }
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
    }
    Ok(misfits)
}

/// What `INFO` and `appendfsync` (none if it may not be read) say against the server. Pure, but for warnings.
pub(super) fn server_misfits(info: &str, fsync: Option<&str>, config: &RedisConfig) -> Vec<Misfit> {
    let of = |name: &str| reply::info(info, name).unwrap_or_default();
    let mut misfits = Vec::new();
    let version = of("redis_version");
    if version.split('.').next().and_then(|major| major.parse::<u32>().ok()).is_none_or(|major| major < 6) {
        misfits.push(misfit(
            format!("the server is Redis {version:?}, and 6.0 is the oldest that is supported"),
            "use Redis 6 or newer, or Valkey",
        ));
    }
    match of("redis_mode") {
        "sentinel" => misfits.push(misfit(
            "the URL leads to a Sentinel, which keeps no rows",
            "name the primary (or an address that follows it)",
        )),
        "cluster" => misfits.push(cluster()),
        _ if of("cluster_enabled") == "1" => misfits.push(cluster()),
        _ => {}
    }
    if of("role") != "master" {
        misfits.push(misfit(
            format!("the server's role is {:?}: it takes no writes", of("role")),
            "name the primary (or an address that follows it)",
        ));
    }
    let policy = of("maxmemory_policy");
    if policy.starts_with("allkeys") {
        misfits.push(misfit(
            format!("maxmemory-policy is {policy:?}: a mark or a row that is evicted lets a copy through"),
            "set maxmemory-policy to noeviction (or one of volatile-*: no key of Oncegate's expires)",
        ));
    }
    let have = match (of("aof_enabled"), fsync) {
        ("1", Some("always")) => Some(Durability::Always),
        ("1", Some("everysec")) => Some(Durability::EverySecond),
        ("1", None) => None,
        _ => Some(Durability::Any),
    };
    let asked = match config.durability {
        Durability::Any => "\"none\"",
        Durability::EverySecond => "\"everysec\"",
        Durability::Always => "\"always\"",
    };
    match have {
        Some(have) if have < config.durability => misfits.push(misfit(
            format!(
                "appendonly is {} and appendfsync {}, and durability = {asked} asks for more",
                if of("aof_enabled") == "1" { "yes" } else { "no" },
                fsync.map_or("cannot be read".to_owned(), |fsync| format!("{fsync:?}")),
            ),
            format!(
                "set appendonly yes and appendfsync {}, or lower durability if a crash of the server may take what was acknowledged",
                if config.durability == Durability::Always { "always" } else { "everysec (or always)" }
            ),
        )),
        None if config.durability == Durability::Always => misfits.push(misfit(
            "appendfsync may not be read, and durability = \"always\" asks for it",
            "allow CONFIG GET, or set durability = \"everysec\" and see to it yourself",
        )),
        Some(Durability::Always) => {}
        _ => tracing::warn!(
            "a crash of the Redis server's host may take acknowledged batches (appendfsync is not always): what is lost is noticed by the \
             sequences, and Kafka is read again from there"
        ),
    }
    misfits
}

fn cluster() -> Misfit {
    misfit(
        "the server is in cluster mode, where rows and marks cannot be in one script",
        "use a server without cluster mode",
    )
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
