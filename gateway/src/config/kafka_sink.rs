//! `[sinks.NAME]` with `type = "kafka"`.

use std::collections::BTreeMap;

use adapters::{
    kafka_sink::{HeadersFrom, KafkaSinkConfig, KeyFrom, PartitionFrom, TimestampFrom},
    sink::Mode,
};
use toml::de::DeValue;

use super::{
    read::{Item, Section, ms, secs},
    relay::gather,
};

/// What is left to a route: how long marks are kept.
pub(super) fn kafka(section: &Section<'_, '_>) -> Option<KafkaSinkConfig> {
    let brokers = section.required("brokers", "\"HOST:9092\"").and_then(|item| match item.value {
        DeValue::Array(_) => Some(item.texts().join(",")),
        _ => item.text(),
    });
    let topic = section.required("topic", "\"NAME\"").and_then(|item| item.text());
    let marks_topic = section.text("marks_topic");
    let marks_partitions = section.count("marks_partitions", 1..=10_000, 12) as i32;
    let dead_letters_topic = section.text("dead_letters_topic");
    let replication =
        section.item("replication").and_then(|item| item.integer(1..=32)).map(|count| count as i32);
    let transaction_timeout = section.duration("transaction_timeout", secs(1)..=secs(900), secs(30));
    let keys = [("source", KeyFrom::Source), ("row_key", KeyFrom::RowKey), ("none", KeyFrom::None)];
    let key = section.item("key").and_then(|item| item.choice(&keys));
    let headers = [("source", HeadersFrom::Source), ("none", HeadersFrom::None)];
    let headers = section.choice("headers", &headers, HeadersFrom::Source);
    let partitions = [("source", PartitionFrom::Source), ("key", PartitionFrom::Key)];
    let partition = section.choice("partition", &partitions, PartitionFrom::Source);
    let timestamps =
        [("source", TimestampFrom::Source), ("event", TimestampFrom::Event), ("now", TimestampFrom::Now)];
    let timestamp = section.choice("timestamp", &timestamps, TimestampFrom::Source);
    let add_headers = section.flag("add_headers", false);
    if let Some(item) = section.item("transactions")
        && item.flag() == Some(false)
    {
        item.fault(
            "a Kafka sink without transactions is not in this build: it could not keep a copy out in a crash",
            "remove it",
        );
    }
    let mut options = BTreeMap::new();
    if let Some(section) = section.section("options") {
        section.secret();
        gather(&section, "", &mut options);
    }
    Some(KafkaSinkConfig {
        marks_topic,
        marks_partitions,
        dead_letters_topic,
        replication,
        transaction_timeout: transaction_timeout.max(ms(1)),
        key: key.unwrap_or(KeyFrom::Source),
        headers,
        partition,
        timestamp,
        add_headers,
        options,
        ..KafkaSinkConfig::new(&brokers?, &topic?)
    })
}

/// What mode and row key make of it.
pub(super) fn fit(
    section: &Section<'_, '_>,
    mode_item: Option<&Item<'_, '_>>,
    mode: Mode,
    row_key: &[String],
    config: &mut KafkaSinkConfig,
) {
    (config.mode, config.row_key) = (mode, row_key.to_vec());
    let key = section.item("key");
    match mode {
        Mode::UpsertIfNewer => {
            if let Some(item) = mode_item {
                item.fault(
                    "compares versions with the row that is there, and a topic has no rows",
                    "set mode = \"upsert\", and leave the comparison to who reads the topic",
                );
            }
        }
        // Who reads a topic of upserts, and compaction, tell rows by the key.
        Mode::Upsert if key.is_none() => config.key = KeyFrom::RowKey,
        Mode::Upsert | Mode::Insert => {}
    }
    if let (Some(item), Mode::Upsert, KeyFrom::None) = (&key, mode, config.key) {
        item.fault(
            "a record without a key changes no row, and mode \"upsert\" writes what does",
            "set it to \"row_key\" or \"source\"",
        );
    }
    if let (Some(item), KeyFrom::RowKey, true) = (&key, config.key, row_key.is_empty()) {
        item.fault("is the row key, and the sink names none", "add row_key = [\"MEMBER\"]");
    }
    for fault in config.check() {
        let key = format!("{}.{}", section.path, fault.name);
        section.reader.note(&section.span, &key, None, fault.reason, None, "correct or remove it");
    }
}
