//! `[sinks.NAME]` with `type = "redis"`.

use adapters::{
    redis::{Durability, KINDS, Kind, RedisConfig, RedisSink},
    sink::Mode,
};

use super::read::{Item, Section, ms, secs};

/// What is left to [`fit`]: mode, row key and version.
pub(super) fn redis(section: &Section<'_, '_>) -> Option<RedisConfig> {
    let url = section.required("url", "\"redis://HOST:6379/0\"").map(Item::secret);
    let url = url.as_ref().and_then(Item::text);
    let prefix = section.required("prefix", "\"NAME:\"").and_then(|item| item.text());
    let columns = section.section("columns");
    if columns.is_none() {
        section.fault(
            "`columns` is missing: Redis does not know the fields of a row",
            format!("add columns = {{ NAME = \"TYPE\" }}; a type is one of {}", Kind::names()),
        );
    }
    // Each of them is looked at, also where one is wrong.
    let columns: Option<Vec<_>> = columns.and_then(|columns| {
        let columns: Vec<_> =
            columns.items().map(|(name, item)| Some((name, item.choice(&KINDS)?))).collect();
        columns.into_iter().collect()
    });
    let asked =
        [("always", Durability::Always), ("everysec", Durability::EverySecond), ("none", Durability::Any)];
    let durability = section.choice("durability", &asked, Durability::EverySecond);
    let wait_replicas = section.count("wait_replicas", 0..=100, 0);
    let connect_timeout = section.duration("connect_timeout", ms(100)..=secs(600), secs(10));
    let timeout = section.duration("timeout", ms(100)..=secs(3600), secs(30));
    let max_row_bytes = section.size("max_row_size", 1 << 10..=256 << 20, 8 << 20);
    Some(RedisConfig {
        columns: columns?,
        durability,
        wait_replicas: u32::try_from(wait_replicas).unwrap_or_default(),
        connect_timeout,
        timeout,
        max_row_bytes: usize::try_from(max_row_bytes).unwrap_or(usize::MAX),
        ..RedisConfig::new(url?, prefix?)
    })
}

/// What mode, row key and version make of it.
pub(super) fn fit(
    section: &Section<'_, '_>,
    mode: Mode,
    row_key: &[String],
    version: Option<&String>,
    config: &mut RedisConfig,
) {
    (config.mode, config.row_key, config.version) = (mode, row_key.to_vec(), version.cloned());
    // What is missing has been said.
    if row_key.is_empty() || (mode == Mode::UpsertIfNewer && version.is_none()) {
        return;
    }
    if let Err(misfits) = RedisSink::new(config.clone()) {
        for misfit in misfits {
            section.fault(misfit.what, misfit.remedy);
        }
    }
}
