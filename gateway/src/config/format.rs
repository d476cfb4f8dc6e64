//! `[routes.NAME.format]`.

use std::collections::BTreeMap;

use super::read::{Item, Section};
use crate::format::{
    Content, Debezium, Deletes, Encoding, Format, Semantic, Snapshots, Tables, Tombstones, Unavailable,
    Version, semantic::Parameters,
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Json,
    Raw,
    Debezium,
    Flat,
}

pub(super) fn format(section: &Section<'_, '_>, has_relay: bool) -> Format {
    let Some(section) = section.section("format") else { return Format::default() };
    let kind = section.required("type", "\"debezium\"").and_then(|item| {
        let kinds = [
            ("json", Kind::Json),
            ("raw", Kind::Raw),
            ("debezium", Kind::Debezium),
            ("debezium-flat", Kind::Flat),
        ];
        let kind = item.choice(&kinds)?;
        if kind == Kind::Raw && !has_relay {
            item.fault(
                "comes from Kafka, but the route has no relay",
                "add [routes.NAME.kafka], or use \"json\", which the HTTP door takes",
            );
        }
        Some(kind)
    });
    let format = match kind {
        None => Format::default(),
        Some(Kind::Json) => Format::default(),
        Some(Kind::Raw) => Format { encoding: Encoding::Raw, content: Content::Row },
        Some(kind) => {
            let content = Content::Debezium(debezium(&section, kind == Kind::Flat));
            Format { encoding: Encoding::Json, content }
        }
    };
    section.close();
    format
}

fn debezium(section: &Section<'_, '_>, flat: bool) -> Debezium {
    let mut debezium = Debezium::new(flat);
    if flat && let Some(prefix) = section.text("prefix") {
        debezium.flat = Some(prefix);
    }
    debezium.version = section.choice(
        "version",
        &[("position", Version::Position), ("ts_ms", Version::TsMs)],
        debezium.version,
    );
    debezium.snapshots = section.choice(
        "snapshots",
        &[("lose", Snapshots::Lose), ("by-position", Snapshots::ByPosition)],
        debezium.snapshots,
    );
    debezium.tombstones = section.choice(
        "tombstones",
        &[("skip", Tombstones::Skip), ("delete", Tombstones::Delete), ("reject", Tombstones::Reject)],
        debezium.tombstones,
    );
    debezium.deletes =
        section.choice("deletes", &[("row", Deletes::Row), ("mark", Deletes::Mark)], debezium.deletes);
    debezium.unavailable = section.choice(
        "unavailable",
        &[("reject", Unavailable::Reject), ("keep", Unavailable::Keep)],
        debezium.unavailable,
    );
    if let Some(placeholder) = section.text("placeholder") {
        debezium.placeholder = placeholder;
    }
    if let Some(item) = section.item("tables") {
        debezium.tables = match item.value.as_str() {
            Some("topic") => Tables::Topic,
            Some("any") => Tables::Any,
            _ => Tables::Only(item.texts()),
        };
    }
    if let Some(types) = section.section("types") {
        debezium.types = types
            .items()
            .filter_map(|(name, item)| Some((name, semantic(&item)?)))
            .collect::<BTreeMap<_, _>>();
    }
    debezium
}

/// `"io.debezium.time.Date"`, or `{ name = "..Decimal", scale = 2 }`.
fn semantic(item: &Item<'_, '_>) -> Option<Semantic> {
    const FORMS: &str = "a declared type such as \"io.debezium.time.MicroTimestamp\"";
    let mut parameters = Parameters::default();
    let name = if item.value.is_table() {
        let section = item.section()?;
        parameters.scale = section.item("scale").and_then(|item| item.integer(-131_072..=131_072));
        parameters.length =
            section.item("length").and_then(|item| item.integer(1..=524_288)).map(|length| length as usize);
        let name = section
            .required("name", "\"org.apache.kafka.connect.data.Decimal\"")
            .and_then(|item| item.text());
        section.close();
        name?
    } else {
        item.text_as(FORMS)?
    };
    match Semantic::named(&name, parameters) {
        Ok(Some(semantic)) => Some(semantic),
        Ok(None) => {
            item.fault(
                "is no declared type that is known here",
                format!("write {FORMS}, as docs/cdc.md lists them"),
            );
            None
        }
        Err(fault) => {
            item.fault(fault, "write { name = \"org.apache.kafka.connect.data.Decimal\", scale = 2 }");
            None
        }
    }
}
