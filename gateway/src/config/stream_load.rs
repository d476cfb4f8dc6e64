//! `[sinks.NAME]` with `type = "starrocks"` or `"doris"`.

use adapters::{
    journal::JournalConfig,
    stream_load::{Dialect, StreamLoadConfig, StreamLoadSink},
};

use super::read::{Item, Section, ms, secs};

/// But for table, mode, row key and version, which all sinks have.
pub(super) fn stream_load(section: &Section<'_, '_>, dialect: Dialect) -> Option<StreamLoadConfig> {
    let several = section.item("urls").map(Item::secret);
    let urls: Vec<String> = match &several {
        Some(item) => {
            if section.item("url").is_some() {
                item.fault("stands beside url", "write one of them");
            }
            item.texts()
        }
        None => {
            let url = section.required("url", "\"http://HOST:8030\"").map(Item::secret);
            url.as_ref().and_then(Item::text).into_iter().collect()
        }
    };
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
    let defaults =
        StreamLoadConfig::new(dialect, String::new(), String::new(), folder.clone().unwrap_or_default());
    let busy_timeout = section.duration("busy_timeout", ms(0)..=secs(600), defaults.journal.busy_timeout);
    let max_bytes = section.size("journal_max_size", (1 << 20)..=(1 << 40), defaults.journal.max_bytes);
    let label_keep = section
        .item("label_keep")
        .map(|_| section.duration("label_keep", secs(600)..=secs(30 * 24 * 3600), secs(12 * 3600)));
    let config = StreamLoadConfig {
        urls,
        user: user.map(|user| (user, password.unwrap_or_default())),
        two_phase: section.choice("load", &[("one-phase", false), ("two-phase", true)], false),
        label_keep,
        connect_timeout: section.duration("connect_timeout", ms(100)..=secs(600), defaults.connect_timeout),
        request_timeout: section.duration("request_timeout", secs(1)..=secs(3600), defaults.request_timeout),
        journal: JournalConfig { max_bytes, busy_timeout, ..defaults.journal.clone() },
        ..defaults
    };
    let table = section.item("table").and_then(|item| item.text());
    if let (false, Some(table)) = (config.urls.is_empty(), table)
        && let Err(misfit) = StreamLoadSink::new(StreamLoadConfig { table, ..config.clone() })
    {
        section.fault(misfit.what, misfit.remedy);
    }
    (!config.urls.is_empty()).then_some(())?;
    folder.map(|_| config)
}
