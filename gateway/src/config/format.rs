//! `[routes.NAME.format]`.

use std::{collections::BTreeMap, time::Duration};

use super::{
    error::Secret,
    read::{Item, Section, ms, secs},
};
use crate::format::{
    Content, Debezium, Deletes, Encoding, Format, RecordKey, Semantic, Snapshots, Tables, Tombstones,
    Unavailable, Version, semantic::Parameters,
};

/// Where a route's schemas are.
#[derive(Clone, Debug)]
pub struct RegistryAt {
    /// Tried in turn; they may hold a password.
    pub urls: Vec<Secret>,
    /// User and password of basic authentication.
    pub user: Option<(String, Secret)>,
    /// Bound on one request.
    pub timeout: Duration,
}

#[cfg(feature = "kafka")]
impl RegistryAt {
    /// For the client.
    pub fn client(&self) -> adapters::registry::RegistryConfig {
        let user = self.user.as_ref().map(|(user, password)| (user.clone(), password.expose().to_owned()));
        let urls = self.urls.iter().map(|url| url.expose().to_owned()).collect();
        adapters::registry::RegistryConfig { urls, user, timeout: self.timeout }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Row(Encoding),
    Debezium,
    Flat,
}

pub(super) fn format(section: &Section<'_, '_>, has_relay: bool) -> (Format, Option<RegistryAt>) {
    let Some(section) = section.section("format") else { return (Format::default(), None) };
    let type_item = section.required("type", "\"debezium\"");
    let kinds = [
        ("json", Kind::Row(Encoding::Json)),
        ("raw", Kind::Row(Encoding::Raw)),
        ("avro", Kind::Row(Encoding::Avro)),
        ("protobuf", Kind::Row(Encoding::Protobuf)),
        ("debezium", Kind::Debezium),
        ("debezium-flat", Kind::Flat),
    ];
    let kind = type_item.as_ref().and_then(|item| item.choice(&kinds));
    if let (Some(item), Some(Kind::Row(Encoding::Protobuf)), false) =
        (&type_item, kind, cfg!(feature = "protobuf"))
    {
        item.fault("is not in this build", "build with the feature `protobuf`, or use \"avro\"");
    }
    let mut encoding_item = type_item.clone();
    let (encoding, content) = match kind {
        None => (Encoding::Json, Content::Row),
        Some(Kind::Row(encoding)) => (encoding, Content::Row),
        Some(kind) => {
            let content = Content::Debezium(debezium(&section, kind == Kind::Flat));
            let item = section.item("encoding");
            let encodings = [("json", Encoding::Json), ("avro", Encoding::Avro)];
            let encoding = item.as_ref().and_then(|item| item.choice(&encodings)).unwrap_or_default();
            encoding_item = item;
            (encoding, content)
        }
    };
    if let (Some(item), false) = (&encoding_item, has_relay || encoding == Encoding::Json) {
        item.fault(
            "comes from Kafka, but the route has no relay",
            "add [routes.NAME.kafka], or use JSON, which the HTTP door takes",
        );
    }
    let mut format = Format { encoding, content, record_key: RecordKey::Json };
    let mut registry = None;
    if encoding.is_registered() {
        registry = section
            .required("registry", "{ url = \"http://127.0.0.1:8081\" }")
            .and_then(|item| registry_at(&item));
        let default = if format.debezium().is_some() { RecordKey::Registered } else { RecordKey::Json };
        let choices = [("registry", RecordKey::Registered), ("json", RecordKey::Json)];
        format.record_key = section.choice("record_key", &choices, default);
    }
    section.close();
    (format, registry)
}

fn registry_at(item: &Item<'_, '_>) -> Option<RegistryAt> {
    let section = item.section()?;
    let mut urls = Vec::new();
    for item in section.required("url", "\"http://127.0.0.1:8081\"")?.secret().list() {
        let url = item.text()?;
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            item.fault("is no URL of a schema registry", "write http://host:port or https://host/path");
        }
        urls.push(Secret::new(url));
    }
    let user_item = section.item("user");
    let password_item = section.item("password").map(Item::secret);
    let user = user_item.as_ref().and_then(Item::text);
    let password = password_item.as_ref().and_then(Item::text);
    if let (Some(item), None) = (&user_item, &password_item) {
        item.fault("has no password beside it", "add password, such as password = \"${REGISTRY_PASSWORD}\"");
    }
    if let (None, Some(item)) = (&user_item, &password_item) {
        item.fault("has no user beside it", "add user");
    }
    let timeout = section.duration("timeout", ms(100)..=secs(300), secs(5));
    section.close();
    Some(RegistryAt { urls, user: user.zip(password.map(Secret::new)), timeout })
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
