//! `[sinks.NAME]` with `type = "clickhouse"`.

use adapters::{
    clickhouse::{ClickhouseConfig, ClickhouseSink, Compression},
    journal::JournalConfig,
};

use super::read::{Item, Section, ms, secs};

/// But for table, mode, row key and version, which all sinks have.
pub(super) fn clickhouse(section: &Section<'_, '_>) -> Option<ClickhouseConfig> {
    let url = section.required("url", "\"http://HOST:8123\"").map(Item::secret);
    let text = url.as_ref().and_then(Item::text);
    let user = section.text("user");
    let password_item = section.item("password").map(Item::secret);
    let password = password_item.as_ref().and_then(Item::text);
    if let (None, Some(item)) = (&user, &password_item) {
        item.fault("is of no user", "add user = \"NAME\"");
    }
    let folder = section.required("journal", "\"FOLDER\"").and_then(|item| {
        let folder = item.text()?;
        if folder.is_empty() {
            item.fault("is empty", "name a folder on a local disk, for this sink alone");
        }
        Some(folder)
    });
    let defaults = ClickhouseConfig::new(
        text.clone().unwrap_or_default(),
        String::new(),
        folder.clone().unwrap_or_default(),
    );
    let busy_timeout = section.duration("busy_timeout", ms(0)..=secs(600), defaults.journal.busy_timeout);
    let max_bytes = section.size("journal_max_size", (1 << 20)..=(1 << 40), defaults.journal.max_bytes);
    let config = ClickhouseConfig {
        user: user.map(|user| (user, password.unwrap_or_default())),
        batch_column: section.text("batch_column"),
        compression: section.choice(
            "compression",
            &[("zstd", Compression::Zstd), ("none", Compression::None)],
            defaults.compression,
        ),
        accept_views: section.choice("views", &[("refuse", false), ("accept", true)], false),
        connect_timeout: section.duration("connect_timeout", ms(100)..=secs(600), defaults.connect_timeout),
        request_timeout: section.duration("request_timeout", secs(1)..=secs(3600), defaults.request_timeout),
        journal: JournalConfig { max_bytes, busy_timeout, ..defaults.journal.clone() },
        ..defaults
    };
    if let (Some(item), Some(_)) = (&url, &text)
        && let Err(misfit) = ClickhouseSink::new(config.clone())
    {
        item.fault(misfit.what, misfit.remedy);
    }
    text.and(folder).map(|_| config)
}
