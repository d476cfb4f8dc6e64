//! The configuration: [`load`] turns the text of a file into a [`Config`], or into everything that is wrong with it.
//!
//! Pure: variables are looked up through a function, no file and no address is touched. What comes out is in the units and
//! types that the parts of the gateway take.

#[cfg(feature = "clickhouse")]
mod clickhouse;
mod error;
mod format;
mod forward;
#[cfg(feature = "kafka")]
mod kafka_sink;
mod naming;
mod read;
#[cfg(feature = "redis")]
mod redis_sink;
mod relay;
mod route;
mod server;
mod sink;
#[cfg(feature = "stream-load")]
mod stream_load;
mod units;

use std::{collections::BTreeMap, ops::Range};

use toml::de::{DeTable, DeValue};

use crate::door::http::forward::ForwardConfig;

pub use self::{
    error::{ConfigError, Secret},
    format::RegistryAt,
    relay::{Isolation, RelayConfig, StartAt},
    route::{DeadLettersTo, HashSecret, Lanes, RouteConfig},
    server::{Bodies, LogConfig, ServerConfig, StoreConfig},
    sink::{SinkConfig, Target},
};
use self::{
    read::{Reader, Section},
    route::SinkView,
};

/// A whole file, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Listeners and their bounds.
    pub server: ServerConfig,
    /// Where and how the dedup stores are kept.
    pub store: StoreConfig,
    /// By name; HTTP services are in their routes.
    pub sinks: BTreeMap<String, SinkConfig>,
    /// By name; with `forwards` at least one. Each route's sink is among the sinks.
    pub routes: BTreeMap<String, RouteConfig>,
    /// Routes to HTTP services, by name.
    pub forwards: BTreeMap<String, ForwardConfig>,
    /// Logs.
    pub log: LogConfig,
}

/// The largest file, bytes.
pub const MAX_FILE_BYTES: usize = 4 << 20;

/// Reads a config file. `lookup` gives the value of an environment variable. On an error the list holds everything that is
/// wrong, in the order of the file.
pub fn load(text: &str, lookup: impl Fn(&str) -> Option<String>) -> Result<Config, Vec<ConfigError>> {
    let reader = Reader::new(text, &lookup);
    if text.len() > MAX_FILE_BYTES {
        let what = format!("the file has {} bytes, more than {MAX_FILE_BYTES}", text.len());
        reader.note(&(0..0), "", None, what, None, "this is not a config file of oncegate");
        return Err(reader.errors());
    }
    let (document, faults) = DeTable::parse_recoverable(text);
    for fault in &faults {
        let span = fault.span().unwrap_or(0..0);
        reader.note(&span, "", None, format!("not TOML: {}", fault.message()), None, "mend the line");
    }
    let config = whole(&reader, document.get_ref(), document.span());
    match (reader.errors(), config) {
        (errors, Some(config)) if errors.is_empty() => Ok(config),
        (errors, _) => Err(errors),
    }
}

fn whole(reader: &Reader<'_>, document: &DeTable<'_>, span: Range<usize>) -> Option<Config> {
    let root = Section::new(reader, String::new(), span, document);
    let server = server::server(root.section("server"));
    let store = server::store(root.section("store"));
    let log = server::log(root.section("log"));

    let (mut sinks, mut upstreams) = (BTreeMap::new(), BTreeMap::new());
    let mut views: BTreeMap<String, Option<SinkView>> = BTreeMap::new();
    for (name, section) in named(&root, "sinks") {
        if forward::is_upstream(&section) {
            upstreams.insert(name, forward::upstream(section));
            continue;
        }
        let sink = sink::sink(name.clone(), section);
        views.insert(name.clone(), sink.as_ref().map(SinkView::of));
        if let Some(sink) = sink {
            sinks.insert(name, sink);
        }
    }
    let (mut routes, mut forwards) = (BTreeMap::new(), BTreeMap::new());
    let sections = named(&root, "routes");
    if sections.is_empty() {
        root.fault("the file has no route", "add a section [routes.NAME] with a key and a sink");
    }
    let mut relays = Vec::new();
    for (name, section) in sections {
        let sink = section.item("sink").and_then(|item| item.value.as_str());
        if let Some(upstream) = sink.and_then(|sink| upstreams.get(sink)) {
            if let Some(route) = forward::route(name.clone(), section, upstream.as_ref(), server.as_ref()) {
                forwards.insert(name, route);
            }
            continue;
        }
        let relay = section.item("kafka");
        if let Some(route) = route::route(name.clone(), section, &views, server.as_ref()) {
            relays.extend(relay.zip(route.relay.clone()));
            routes.insert(name, route);
        }
    }
    relay::together(&relays);
    root.close();
    Some(Config { server: server?, store: store?, sinks, routes, forwards, log: log? })
}

/// The tables of `[key.NAME]`, whose names are fit for URLs, folders and labels.
fn named<'r, 't>(root: &Section<'r, 't>, key: &'static str) -> Vec<(String, Section<'r, 't>)> {
    let mut sections = Vec::new();
    let Some(table) = root.section(key) else { return sections };
    for (name, item) in table.items() {
        let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if !first
            || name.len() > 64
            || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
        {
            item.fault(
                format!("{name:?} is no name"),
                "use 1 to 64 letters, digits, `_` and `-`, the first a letter or digit",
            );
        }
        if let Some(section) = item.section() {
            sections.push((name, section));
        }
    }
    sections
}

/// The JSON text of a scalar TOML value; none for dates, lists and tables.
fn json_text(value: &DeValue<'_>) -> Option<String> {
    Some(match value {
        DeValue::String(text) => serde_json::Value::from(text.as_ref()).to_string(),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix()).ok()?.to_string(),
        DeValue::Float(number) => {
            let text = number.as_str().trim_start_matches('+').to_owned();
            serde_json::from_str::<&serde_json::value::RawValue>(&text).ok()?;
            text
        }
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => return None,
    })
}

#[cfg(test)]
mod tests;
