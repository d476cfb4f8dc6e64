//! Remembers which keys took effect, within a window, across crashes.
//!
//! One [`Store`] per route. It knows no sink, no HTTP and no Kafka: it is handed fingerprints and says
//! what is known of them ([`Store::claim`]), and is told what took effect ([`Store::settle`]).
//! All calls are synchronous; time is passed in by the caller.

mod block;
mod committer;
mod disk;
mod error;
mod files;
mod fingerprint;
mod floors;
mod manifest;
mod rows;
mod state;
mod stats;
mod store;
mod table;
mod tail;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod verify;

pub use block::{Block, BlockError, Entry, Settled};
pub use error::{Budget, StoreError};
pub use files::TailStats;
pub use fingerprint::{Algorithm, Digest, Fingerprint, Hasher, Identity, RECIPE_VERSION};
pub use floors::{Checkpoint, Floors};
pub use state::{Item, Verdict};
pub use stats::Stats;
pub use store::{Store, StoreOptions, Ticket};
pub use table::SlotStats;
pub use verify::{Fault, FileReport, Remedy, Report, verify};
