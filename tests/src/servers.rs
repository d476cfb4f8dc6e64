//! Real servers on loopback, in temporary folders, stopped by their own pid: [`Postgres`] and [`Kafka`].

mod committed;
mod kafka;
mod postgres;

pub use committed::{Committed, committed};
pub use kafka::{Kafka, Produced};
pub use postgres::Postgres;
