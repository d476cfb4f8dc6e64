//! The outside world: [`sink::Sink`] with one module per target, and the Kafka source.
//!
//! Nothing here knows the dedup store or a route's rules: rows come in encoded, marks come in packed.

#[macro_use]
mod planted;

#[cfg(any(feature = "duckdb", feature = "sqlite"))]
mod bookkeeping;
#[cfg(feature = "clickhouse")]
pub mod clickhouse;
pub mod collapse;
pub mod dead_letters;
pub mod decode;
#[cfg(feature = "duckdb")]
pub mod duckdb;
#[cfg(feature = "sqlite")]
pub mod files;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "http-client")]
mod http_client;
#[cfg(feature = "journal")]
#[cfg_attr(
    not(any(feature = "clickhouse", feature = "simulation", feature = "stream-load")),
    allow(dead_code, unused_imports, reason = "an upstream's book takes the hold of a folder alone")
)]
pub mod journal;
#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "kafka")]
pub mod kafka_sink;
pub mod lineage;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "registry")]
pub mod registry;
pub mod schema;
#[cfg(feature = "simulation")]
pub mod simulated;
pub mod sink;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(feature = "stream-load")]
pub mod stream_load;
#[cfg(feature = "upstream")]
pub mod upstream;
pub mod value;
