//! Real servers on loopback, in temporary folders, stopped by their own pid: [`Postgres`] and [`Kafka`].

mod kafka;
mod postgres;

pub use kafka::{Kafka, Produced};
pub use postgres::Postgres;
