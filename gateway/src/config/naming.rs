//! The options of a route that say how its records become names and rows.

use std::collections::BTreeMap;

use toml::de::DeValue;

use super::{
    format::{self, RegistryAt},
    json_text,
    read::{Item, Section},
};
use crate::{
    format::Member,
    key::{IdempotencyKey, KeySpec, OnMissing, Part, Pointer},
    naming::{
        ColumnSource, Constant, DeleteWhen, DigestOver, EventTime, NamingRules, TimeUnit, UnknownFields,
    },
};

pub(super) fn naming(
    section: &Section<'_, '_>,
    has_relay: bool,
    row_key: Vec<String>,
) -> Option<(NamingRules, Option<RegistryAt>)> {
    let (format, registry) = format::format(section, has_relay);
    let cdc = format.debezium().is_some();
    let key = key(section, has_relay, cdc);
    let event_time = event_time(section, has_relay, cdc);
    let digest = digest(section);
    let columns = columns(section, has_relay, cdc);
    let unknown_item = section.item("unknown_fields");
    let unknown_fields = unknown_item.as_ref().and_then(unknown_fields).unwrap_or_default();
    if let (Some(item), UnknownFields::Column(name)) = (&unknown_item, &unknown_fields)
        && columns.contains_key(name)
    {
        item.fault(
            format!("column {name:?} has a source already"),
            "name another column, or drop the source",
        );
    }
    for name in &row_key {
        if columns.get(name) == Some(&ColumnSource::Default)
            && let Some(item) = section.item("columns")
        {
            item.fault(format!("row key column {name:?} is left to its default"), "name a source for it");
        }
    }
    let delete_when = section.item("delete_when").and_then(|item| delete_when(&item));
    let max_depth = section.count("max_depth", 1..=128, 128) as usize;
    let rules = NamingRules {
        format,
        event_time: event_time?,
        digest,
        columns,
        unknown_fields,
        delete_when,
        row_key,
        max_depth,
        ..NamingRules::new(key?)
    };
    Some((rules, registry))
}

pub(super) fn digest(section: &Section<'_, '_>) -> DigestOver {
    match section.item("digest") {
        Some(item) if item.value.as_str() == Some("payload") => DigestOver::Payload,
        Some(item) => DigestOver::Pointers(item.list().iter().filter_map(pointer).collect()),
        None => DigestOver::Payload,
    }
}

const PART_FORMS: &str = "\"/pointer\", { header = \"NAME\" }, { kafka = \"key\" }, { kafka = \"position\" }, \
                          { kafka_header = \"NAME\" }, { debezium = \"position\" } or { content = true }";

pub(super) fn key(section: &Section<'_, '_>, has_relay: bool, cdc: bool) -> Option<KeySpec> {
    let key = section.item("key");
    let policy_item = section.item("idempotency_key");
    let policy = policy_item.as_ref().and_then(|item| {
        item.choice(&[
            ("first", IdempotencyKey::First),
            ("ignore", IdempotencyKey::Ignore),
            ("require", IdempotencyKey::Require),
        ])
    });
    let strict = section.flag("strict_idempotency_key", false);
    let on_missing = section.choice(
        "on_missing",
        &[("reject", OnMissing::Reject), ("allow", OnMissing::Allow)],
        OnMissing::Reject,
    );
    let spec = match (key, policy) {
        (None, Some(IdempotencyKey::Require)) => {
            if let (Some(item), true) = (&policy_item, has_relay) {
                item.fault(
                    "makes the Idempotency-Key header the only name, but records of Kafka have none",
                    "name key parts, such as key = [\"/id\"], with idempotency_key = \"first\"",
                );
            }
            KeySpec::idempotency_key()
        }
        (None, policy) if cdc => {
            let spec = KeySpec::new(vec![Part::Debezium(Member::Position)]);
            spec.and_then(|spec| spec.with_idempotency_key(policy.unwrap_or_default())).ok()?
        }
        (None, _) => {
            section.fault(
                "`key` is missing: nothing names a record",
                "add key = [\"/id\"], or idempotency_key = \"require\"",
            );
            return None;
        }
        (Some(item), Some(IdempotencyKey::Require)) => {
            item.fault(
                "is never used: idempotency_key = \"require\" makes the header the only name",
                "remove it, or set idempotency_key = \"first\"",
            );
            return None;
        }
        (Some(item), policy) => {
            let items = item.list();
            let parts: Vec<Part> = items.iter().filter_map(|item| part(item, has_relay, cdc)).collect();
            if parts.len() < items.len() {
                return None;
            }
            let spec =
                KeySpec::new(parts).and_then(|spec| spec.with_idempotency_key(policy.unwrap_or_default()));
            match spec {
                Ok(spec) => spec,
                Err(fault) => {
                    item.fault(fault, format!("a part is {PART_FORMS}"));
                    return None;
                }
            }
        }
    };
    Some(spec.on_missing(on_missing).strict(strict))
}

fn part(item: &Item<'_, '_>, has_relay: bool, cdc: bool) -> Option<Part> {
    if !item.value.is_table() {
        return pointer(item).map(Part::Pointer);
    }
    let section = item.section()?;
    if let Some(later) = section.item("cloudevent") {
        later.fault("is not in this build", format!("use {PART_FORMS}"));
        return None;
    }
    let mut parts: Vec<Part> = Vec::new();
    parts.extend(section.text("header").map(Part::Header));
    parts.extend(section.text("kafka_header").map(Part::KafkaHeader));
    if let Some(item) = section.item("kafka") {
        parts.extend(item.choice(&[("key", true), ("position", false)]).map(|key| match key {
            true => Part::KafkaKey,
            false => Part::KafkaPosition,
        }));
    }
    parts.extend(member(&section, cdc).map(Part::Debezium));
    if section.flag("content", false) {
        parts.push(Part::Content);
    }
    section.close();
    let from_kafka =
        matches!(parts.first(), Some(Part::KafkaHeader(_) | Part::KafkaKey | Part::KafkaPosition));
    if from_kafka && !has_relay {
        item.fault(
            "comes from Kafka, but the route has no relay",
            "add [routes.NAME.kafka], or name another part",
        );
    }
    if parts.len() != 1 {
        item.fault("is no part of a key", format!("a part is one of {PART_FORMS}"));
        return None;
    }
    parts.pop()
}

/// `debezium = "position"` and its siblings.
fn member(section: &Section<'_, '_>, cdc: bool) -> Option<Member> {
    let item = section.item("debezium")?;
    if !cdc {
        item.fault(
            "comes from a change event, but the route's format has none",
            "add [routes.NAME.format] with type = \"debezium\" or \"debezium-flat\"",
        );
    }
    item.choice(&Member::WORDS)
}

pub(super) fn pointer(item: &Item<'_, '_>) -> Option<Pointer> {
    let text = item.text_as("a JSON pointer such as \"/id\"")?;
    match Pointer::parse(&text) {
        Ok(pointer) => Some(pointer),
        Err(fault) => {
            item.fault(
                format!("is not a JSON pointer: {}", fault.reason),
                "write it as \"/member\" or \"/outer/inner\"",
            );
            None
        }
    }
}

fn event_time(section: &Section<'_, '_>, has_relay: bool, cdc: bool) -> Option<EventTime> {
    let units = [
        ("s", TimeUnit::Seconds),
        ("ms", TimeUnit::Millis),
        ("us", TimeUnit::Micros),
        ("ns", TimeUnit::Nanos),
    ];
    let unit_item = section.item("time_unit");
    let unit = unit_item.as_ref().and_then(|item| item.choice(&units));
    let event_time = match section.item("event_time") {
        None => EventTime::Arrival,
        Some(item) if item.value.is_table() => {
            let inner = item.section()?;
            if let Some(source) = inner.item("debezium") {
                if !cdc {
                    source.fault(
                        "comes from a change event, but the route's format has none",
                        "add [routes.NAME.format] with type = \"debezium\" or \"debezium-flat\"",
                    );
                }
                if let Some(unit) = &unit_item {
                    unit.fault("counts for numbers in the payload only", "remove it");
                }
                source.choice(&[("ts_ms", ())])?;
                inner.close();
                return Some(EventTime::Debezium);
            }
            let source =
                inner.required("kafka", "\"timestamp\"").and_then(|item| item.choice(&[("timestamp", ())]));
            inner.close();
            if !has_relay {
                item.fault(
                    "comes from Kafka, but the route has no relay",
                    "add [routes.NAME.kafka], or name another time",
                );
            }
            source.map(|()| EventTime::KafkaTimestamp)?
        }
        Some(item) => {
            let text = item.text_as("\"arrival\", a JSON pointer or { kafka = \"timestamp\" }")?;
            if text == "arrival" {
                EventTime::Arrival
            } else if text.starts_with('/') {
                EventTime::Pointer { pointer: pointer(&item)?, unit }
            } else {
                item.fault(
                    "is no event time",
                    "write \"arrival\", \"/pointer\" or { kafka = \"timestamp\" }",
                );
                return None;
            }
        }
    };
    if let (Some(item), EventTime::Arrival | EventTime::KafkaTimestamp) = (&unit_item, &event_time) {
        item.fault("counts for numbers in the payload only", "remove it, or set event_time to a pointer");
    }
    Some(event_time)
}

fn columns(section: &Section<'_, '_>, has_relay: bool, cdc: bool) -> BTreeMap<String, ColumnSource> {
    let Some(table) = section.section("columns") else { return BTreeMap::new() };
    table.items().filter_map(|(name, item)| Some((name, column(&item, has_relay, cdc)?))).collect()
}

const COLUMN_FORMS: &str = "\"/pointer\", \"arrival\", \"default\", { header = \"NAME\" }, { kafka = \"key\" (or \
                            \"timestamp\", \"topic\", \"partition\", \"offset\") }, { kafka_header = \"NAME\" }, { debezium = \"op\" } \
                            (or \"version\", \"position\", \"ts_ms\", ...) or { constant = VALUE }";

fn column(item: &Item<'_, '_>, has_relay: bool, cdc: bool) -> Option<ColumnSource> {
    if !item.value.is_table() {
        let text = item.text_as("a source")?;
        return match text.as_str() {
            "arrival" => Some(ColumnSource::Arrival),
            "default" => Some(ColumnSource::Default),
            "" => pointer(item).map(ColumnSource::Pointer),
            text if text.starts_with('/') => pointer(item).map(ColumnSource::Pointer),
            _ => {
                item.fault("is no source of a column", format!("a source is {COLUMN_FORMS}"));
                None
            }
        };
    }
    let section = item.section()?;
    let mut sources: Vec<ColumnSource> = Vec::new();
    sources.extend(section.text("header").map(ColumnSource::Header));
    let kafka_header = section.text("kafka_header");
    let kafka = section.item("kafka").and_then(|item| {
        #[derive(Clone, Copy)]
        enum Field {
            Key,
            Timestamp,
            Topic,
            Partition,
            Offset,
        }
        let fields = [
            ("key", Field::Key),
            ("timestamp", Field::Timestamp),
            ("topic", Field::Topic),
            ("partition", Field::Partition),
            ("offset", Field::Offset),
        ];
        Some(match item.choice(&fields)? {
            Field::Key => ColumnSource::KafkaKey,
            Field::Timestamp => ColumnSource::KafkaTimestamp,
            Field::Topic => ColumnSource::Topic,
            Field::Partition => ColumnSource::Partition,
            Field::Offset => ColumnSource::Offset,
        })
    });
    if (kafka.is_some() || kafka_header.is_some()) && !has_relay {
        item.fault(
            "comes from Kafka, but the route has no relay",
            "add [routes.NAME.kafka], or name another source",
        );
    }
    sources.extend(kafka);
    sources.extend(kafka_header.map(ColumnSource::KafkaHeader));
    sources.extend(member(&section, cdc).map(ColumnSource::Debezium));
    if let Some(item) = section.item("constant") {
        sources.push(ColumnSource::Constant(constant(&item)?));
    }
    section.close();
    if sources.len() != 1 {
        item.fault("is no source of a column", format!("a source is one of {COLUMN_FORMS}"));
        return None;
    }
    sources.pop()
}

fn constant(item: &Item<'_, '_>) -> Option<Constant> {
    match item.value {
        DeValue::String(_) => item.text().map(Constant::Text),
        DeValue::Integer(_) => item.integer(i64::MIN..=i64::MAX).map(Constant::Integer),
        DeValue::Datetime(time) => Some(Constant::Text(time.to_string())),
        other => {
            let text = json_text(other);
            if text.is_none() {
                item.fault("is no constant", "write a string, a number, true, false or a time");
            }
            text.map(Constant::Json)
        }
    }
}

fn unknown_fields(item: &Item<'_, '_>) -> Option<UnknownFields> {
    const FORMS: &str = "\"reject\", \"ignore\" or { column = \"NAME\" }";
    if item.value.is_table() {
        let section = item.section()?;
        let column = section.required("column", "\"NAME\"").and_then(|item| item.text());
        section.close();
        return column.map(UnknownFields::Column);
    }
    match item.text_as(FORMS)?.as_str() {
        "reject" => Some(UnknownFields::Reject),
        "ignore" => Some(UnknownFields::Ignore),
        _ => {
            item.out_of_bounds("is none of the choices", FORMS.to_owned(), "choose one of them");
            None
        }
    }
}

/// `"/pointer"` (deletes where it is true) or `{ pointer = "/pointer", equals = VALUE }`.
fn delete_when(item: &Item<'_, '_>) -> Option<DeleteWhen> {
    if !item.value.is_table() {
        return pointer(item).map(|pointer| DeleteWhen { pointer, equals: "true".to_owned() });
    }
    let section = item.section()?;
    let pointer = section.required("pointer", "\"/deleted\"").and_then(|item| pointer(&item));
    let equals = match section.item("equals") {
        None => Some("true".to_owned()),
        Some(item) => match item.value {
            DeValue::String(_) => item.text().map(|text| serde_json::Value::from(text).to_string()),
            other => {
                let text = json_text(other);
                if text.is_none() {
                    item.fault("cannot be compared with", "write a string, a number, true or false");
                }
                text
            }
        },
    };
    section.close();
    Some(DeleteWhen { pointer: pointer?, equals: equals? })
}
