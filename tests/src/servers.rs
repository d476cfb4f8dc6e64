//! Real servers on loopback, in temporary folders, stopped by their own pid: [`Postgres`], [`Kafka`], [`Redis`] and the engine of
//! [`Clickhouse`] (behind a front of ours); and stand-ins for a schema [`Registry`] and for StarRocks and Doris ([`StreamLoad`]).

mod clickhouse;
mod committed;
mod kafka;
mod postgres;
mod redis;
mod registry;
pub mod stream_load;

pub use clickhouse::Clickhouse;
pub use committed::{Committed, committed};
pub use kafka::{Kafka, Produced};
pub use postgres::Postgres;
pub use redis::{Hashes, Redis};
pub use registry::Registry;
pub use stream_load::StreamLoad;
