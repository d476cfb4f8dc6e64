//! What a server says of itself, and what of it does not fit: looked at with each connection, since a failover may bring another one.

use std::collections::HashMap;

use ::redis::{Value, cmd};

use super::{
    Durability, RedisConfig,
    connect::{Fault, Link, again},
    probe::misfit,
    reply::{self, Class, classify, text_of},
};
use crate::sink::{Misfit, SinkError};

/// `INFO`, and those settings that matter here.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) info: String,
    /// Without those that the user may not read.
    pub(super) settings: HashMap<String, String>,
}

impl Server {
    /// Asks the server, bounded by the caller.
    pub(super) async fn ask(link: &mut Link) -> Result<Self, Fault> {
        let info = link.info().await?;
        let mut settings = HashMap::new();
        // Version 6 takes one name a call, which may be a pattern.
        for names in ["*appendfsync*", "proto-max-bulk-len"] {
            match link.command(cmd("CONFIG").arg("GET").arg(names)).await {
                Ok(Value::Array(parts)) => {
                    settings.extend(parts.chunks_exact(2).filter_map(|pair| setting(&pair[0], &pair[1])));
                }
                Ok(Value::Map(pairs)) => {
                    settings.extend(pairs.iter().filter_map(|(name, value)| setting(name, value)));
                }
                // Managed servers often keep CONFIG to themselves.
                Err(Fault::Server(error))
                    if !matches!(classify(&text_of(&error)), Class::Refused { retry: true, .. }) => {}
                Ok(_) => {}
                Err(fault) => return Err(fault),
            }
        }
        Ok(Self { info, settings })
    }

    /// Of the process, and of its history: another one after a restart or a failover.
    pub(super) fn identity(&self) -> String {
        format!("{}/{}", self.of("run_id"), self.of("master_replid"))
    }

    /// Refuses what does not fit, before anything is asked of it. It may be put right, or the address lead to another server: so trying
    /// again may help.
    pub(super) fn fits(&self, config: &RedisConfig) -> Result<(), SinkError> {
        let misfits: Vec<String> = self.misfits(config).iter().map(ToString::to_string).collect();
        match misfits.is_empty() {
            true => Ok(()),
            false => Err(again(format!("the Redis server does not fit: {}", misfits.join("; ")))),
        }
    }

    /// Whether nothing that it has answered can be lost by a crash of its host, as far as its settings may be read.
    pub(super) fn syncs_always(&self) -> bool {
        self.durability() == Some(Durability::Always) && !self.pauses_syncs()
    }

    /// What it has against the configuration. Pure.
    pub(super) fn misfits(&self, config: &RedisConfig) -> Vec<Misfit> {
        let mut misfits = Vec::new();
        let version = self.of("redis_version");
        let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_none_or(|major| major < 6) {
            misfits.push(misfit(
                format!("the server is Redis {version:?}, and 6.0 is the oldest that is supported"),
                "use Redis 6 or newer, or Valkey",
            ));
        }
        match self.of("redis_mode") {
            "sentinel" => misfits.push(misfit(
                "the URL leads to a Sentinel, which keeps no rows",
                "name the primary (or an address that follows it)",
            )),
            "cluster" => misfits.push(cluster()),
            _ if self.of("cluster_enabled") == "1" => misfits.push(cluster()),
            _ => {}
        }
        let role = self.of("role");
        if role != "master" {
            misfits.push(misfit(
                format!("the server's role is {role:?}: it takes no writes"),
                "name the primary (or an address that follows it), or wait for a failover to end",
            ));
        }
        let policy = self.of("maxmemory_policy");
        if policy.starts_with("allkeys") {
            misfits.push(misfit(
                format!(
                    "maxmemory-policy is {policy:?}: a mark or a row that is evicted lets a copy through"
                ),
                "set maxmemory-policy to noeviction (or one of volatile-*: no key of Oncegate's expires)",
            ));
        }
        misfits.extend(self.weak(config.durability));
        // Also a batch's marks are one argument: 28 bytes a record.
        let needed = config.max_row_bytes.max(2 << 20) as u64;
        let longest = self.setting("proto-max-bulk-len").and_then(|longest| longest.parse::<u64>().ok());
        if let Some(longest) = longest.filter(|&longest| longest < needed) {
            misfits.push(misfit(
                format!("proto-max-bulk-len is {longest}, and arguments may have {needed} bytes"),
                "raise it, or lower max_row_size",
            ));
        }
        misfits
    }

    /// How its crash safety falls short of what is asked for.
    fn weak(&self, wanted: Durability) -> Option<Misfit> {
        let asked = match wanted {
            Durability::Any => "\"none\"",
            Durability::EverySecond => "\"everysec\"",
            Durability::Always => "\"always\"",
        };
        match self.durability() {
            Some(have) if have < wanted => Some(misfit(
                format!(
                    "appendonly is {} and appendfsync {}, and durability = {asked} asks for more",
                    if self.of("aof_enabled") == "1" { "yes" } else { "no" },
                    self.setting("appendfsync")
                        .map_or("cannot be read".to_owned(), |fsync| format!("{fsync:?}")),
                ),
                format!(
                    "set appendonly yes and appendfsync {}, or lower durability if a crash of the server may take what was acknowledged",
                    if wanted == Durability::Always { "always" } else { "everysec (or always)" }
                ),
            )),
            None if wanted == Durability::Always => Some(misfit(
                "appendfsync may not be read, and durability = \"always\" asks for it",
                "allow CONFIG GET, or set durability = \"everysec\" and see to it yourself",
            )),
            _ if wanted == Durability::Always && self.pauses_syncs() => Some(misfit(
                "no-appendfsync-on-rewrite is yes: nothing is synced while the server writes a snapshot or its append-only file anew, and \
                 durability = \"always\" asks for more",
                "set no-appendfsync-on-rewrite no, or lower durability if a crash of the server may take what was acknowledged",
            )),
            _ => None,
        }
    }

    /// None where `appendfsync` may not be read.
    fn durability(&self) -> Option<Durability> {
        match (self.of("aof_enabled"), self.setting("appendfsync")) {
            ("1", Some("always")) => Some(Durability::Always),
            ("1", Some("everysec")) => Some(Durability::EverySecond),
            ("1", None) => None,
            _ => Some(Durability::Any),
        }
    }

    /// Whatever `appendfsync` says, a server of this setting syncs nothing while a child process of it writes to the disk.
    fn pauses_syncs(&self) -> bool {
        self.setting("no-appendfsync-on-rewrite") == Some("yes")
    }

    fn of(&self, name: &str) -> &str {
        reply::info(&self.info, name).unwrap_or_default()
    }

    fn setting(&self, name: &str) -> Option<&str> {
        self.settings.get(name).map(String::as_str)
    }
}

fn setting(name: &Value, value: &Value) -> Option<(String, String)> {
    let text = |part| Some(String::from_utf8_lossy(reply::maybe(part).ok()??).into_owned());
    Some((text(name)?, text(value)?))
}

fn cluster() -> Misfit {
    misfit(
        "the server is in cluster mode, where rows and marks cannot be in one script",
        "use a server without cluster mode",
    )
}
