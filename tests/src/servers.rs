//! Real servers on loopback, in temporary folders, stopped by their own pid: [`Postgres`] and [`Kafka`]; and a stand-in for
//! a schema [`Registry`].

mod committed;
mod kafka;
mod postgres;
mod registry;

pub use committed::{Committed, committed};
pub use kafka::{Kafka, Produced};
pub use postgres::Postgres;
pub use registry::Registry;
