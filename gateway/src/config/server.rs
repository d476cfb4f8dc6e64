//! `[server]`, `[store]` and `[log]`.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use tracing_subscriber::EnvFilter;

use super::read::{Item, Section, days, ms, secs};
use crate::{
    door::http::{HttpOptions, ListenOptions},
    logging::LogFormat,
};

/// Listeners and their bounds.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where records come in over HTTP; none if no HTTP door is wanted.
    pub listen: Option<SocketAddr>,
    /// Health, metrics, admin API; none if it is not wanted.
    pub admin_listen: Option<SocketAddr>,
    /// Names this instance in the sinks' shard rows: the same across its restarts, different for any other. None: a
    /// name made once and kept in the store's folder.
    pub instance: Option<String>,
    /// Bounds of the HTTP door as a whole.
    pub http: HttpOptions,
    /// Bodies: defaults of the routes.
    pub bodies: Bodies,
}

/// Bounds of request bodies, after decompression.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bodies {
    /// A body that is read whole (one object, an array), bytes.
    pub max_body: u64,
    /// A body that is streamed (NDJSON), bytes.
    pub max_stream: u64,
    /// One record, bytes.
    pub max_record: u64,
    /// Records of one request.
    pub max_records: i64,
}

/// Where nothing is said.
pub(super) const BODIES: Bodies =
    Bodies { max_body: 16 << 20, max_stream: 1 << 30, max_record: 1 << 20, max_records: 1_000_000 };

/// Where and how the dedup stores are kept: one folder a route below `path`.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// The folder.
    pub path: PathBuf,
    /// Nothing is kept on disk: the sinks' marks are read back at each start.
    pub in_memory: bool,
    /// Bytes on disk of one route's store.
    pub max_disk: u64,
    /// Bytes in memory of one route's store.
    pub max_memory: u64,
    /// How long settlements are gathered when nobody waits for them.
    pub commit_interval: Duration,
}

/// Logs.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// How lines are written.
    pub format: LogFormat,
    /// In the language of `RUST_LOG`; none: that variable, else `info,tokio_postgres=warn`.
    pub levels: Option<String>,
}

/// Reads the bounds of bodies, where `defaults` apply to what is not said.
pub(super) fn bodies(section: &Section<'_, '_>, defaults: Bodies) -> Bodies {
    let bodies = Bodies {
        max_body: section.size("max_body", 1 << 10..=1 << 30, defaults.max_body),
        max_stream: section.size("max_stream", 1 << 10..=1 << 44, defaults.max_stream),
        max_record: section.size("max_record", 1 << 8..=256 << 20, defaults.max_record),
        max_records: section.count("max_records", 1..=100_000_000, defaults.max_records),
    };
    if bodies.max_record > bodies.max_body.max(bodies.max_stream) {
        section.fault(
            "`max_record` is above both `max_body` and `max_stream`",
            "lower it, or raise one of them",
        );
    }
    bodies
}

pub(super) fn server(section: Option<Section<'_, '_>>) -> Option<ServerConfig> {
    let mut config = ServerConfig {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 8080))),
        admin_listen: Some(SocketAddr::from(([127, 0, 0, 1], 9090))),
        instance: None,
        http: HttpOptions::default(),
        bodies: BODIES,
    };
    let Some(section) = section else { return Some(config) };
    let listen = section.item("listen");
    let admin = section.item("admin_listen");
    if let Some(item) = &listen {
        config.listen = address(item);
    }
    if let Some(item) = &admin {
        config.admin_listen = address(item);
    }
    if let Some(item) = admin.as_ref().or(listen.as_ref())
        && config.listen.is_some_and(|address| address.port() != 0)
        && config.listen == config.admin_listen
    {
        item.fault("`listen` and `admin_listen` are the same address", "give them different ports");
    }
    if let Some(item) = section.item("instance") {
        config.instance = item.text();
        if config.instance.as_ref().is_some_and(|name| name.is_empty() || name.len() > 200) {
            item.out_of_bounds("is no name for an instance", "1 to 200 bytes".to_owned(), "choose another");
        }
    }
    config.bodies = bodies(&section, config.bodies);
    let http = config.http;
    let listen = ListenOptions {
        max_connections: section.count("max_connections", 1..=1_000_000, http.listen.max_connections as i64)
            as usize,
        max_head: section.size("max_headers", 1 << 10..=1 << 20, http.listen.max_head as u64) as usize,
        head_timeout: section.duration("head_timeout", ms(100)..=secs(3600), http.listen.head_timeout),
        write_timeout: section.duration("write_timeout", ms(100)..=secs(3600), http.listen.write_timeout),
        drain_delay: section.duration("drain_delay", ms(0)..=secs(3600), http.listen.drain_delay),
        drain_deadline: section.duration("drain_deadline", ms(0)..=secs(3600), http.listen.drain_deadline),
        ..http.listen
    };
    config.http = HttpOptions {
        listen,
        body_idle: section.duration("body_timeout", ms(100)..=secs(3600), http.body_idle),
        request_timeout: section.duration("request_timeout", ms(100)..=days(1), http.request_timeout),
        max_requests: section.count("max_requests", 1..=10_000_000, http.max_requests as i64) as usize,
        max_bytes: section.size("max_in_flight", 1 << 20..=1 << 44, http.max_bytes),
    };
    if config.http.max_bytes < config.bodies.max_body {
        section.fault(
            "`max_in_flight` is below `max_body`: no such body could come in",
            "raise it, or lower `max_body`",
        );
    }
    section.close();
    Some(config)
}

/// A listener's address, or `"off"`.
fn address(item: &Item<'_, '_>) -> Option<SocketAddr> {
    let text = item.text()?;
    if text == "off" {
        return None;
    }
    let address = text.parse().ok();
    if address.is_none() {
        item.fault("is no address", "write IP:PORT, such as \"127.0.0.1:8080\" or \"[::]:8080\", or \"off\"");
    }
    address
}

pub(super) fn store(section: Option<Section<'_, '_>>) -> Option<StoreConfig> {
    let defaults = StoreConfig {
        path: PathBuf::from("data"),
        in_memory: false,
        max_disk: 64 << 30,
        max_memory: 4 << 30,
        commit_interval: ms(5),
    };
    let Some(section) = section else { return Some(defaults) };
    let mut path = defaults.path;
    if let Some(item) = section.item("path")
        && let Some(text) = item.text()
    {
        if text.is_empty() {
            item.fault("is empty", "name a folder");
        }
        path = text.into();
    }
    let config = StoreConfig {
        path,
        in_memory: section.flag("in_memory", defaults.in_memory),
        max_disk: section.size("max_disk", 16 << 20..=1 << 50, defaults.max_disk),
        max_memory: section.size("max_memory", 16 << 20..=1 << 44, defaults.max_memory),
        commit_interval: section.duration("commit_interval", ms(0)..=secs(10), defaults.commit_interval),
    };
    section.close();
    Some(config)
}

pub(super) fn log(section: Option<Section<'_, '_>>) -> Option<LogConfig> {
    let mut config = LogConfig { format: LogFormat::Text, levels: None };
    let Some(section) = section else { return Some(config) };
    config.format =
        section.choice("format", &[("text", LogFormat::Text), ("json", LogFormat::Json)], config.format);
    if let Some(item) = section.item("levels")
        && let Some(levels) = item.text()
    {
        if EnvFilter::builder().parse(&levels).is_err() {
            item.fault("is no list of log levels", "write it like \"info\" or \"info,oncegate=debug\"");
        }
        config.levels = Some(levels);
    }
    section.close();
    Some(config)
}
