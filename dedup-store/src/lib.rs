//! Remembers which keys took effect, within a window, across crashes.
//!
//! One [`Store`] per route. It knows no sink, no HTTP and no Kafka: it is handed fingerprints and says
//! what is known of them ([`Store::claim`]), and is told what took effect ([`Store::settle`]).
//! All calls are synchronous; time is passed in by the caller.
//!
//! ```
//! use dedup_store::*;
//!
//! # fn main() -> Result<(), StoreError> {
//! let store = Store::in_memory(StoreOptions {
//!     window_ms: 3_600_000,
//!     lateness_ms: 60_000,
//!     idle_after_ms: 30_000,
//!     max_disk_bytes: 1 << 30,
//!     max_memory_bytes: 1 << 30,
//!     commit_interval_ms: 5,
//! });
//! let secret = std::array::from_fn(|index| index as u8); // random in earnest
//! let identity = Identity { route_id: [1; 16], key_spec_id: 7, algorithm: Algorithm::Xxh3Secret, secret };
//! let hasher = store.bind(&identity)?;
//!
//! let fingerprint = hasher.fingerprint(&[hasher.prefix(), b"order-1"].concat());
//! let digest = hasher.digest(b"{\"order\": 1}");
//! let event_ms = 1_700_000_000_000;
//! let item = Item { fingerprint, digest, event_ms, floor_ms: i64::MIN, admit_late: false, replay_dead_letter: false };
//!
//! // Lane 0 takes the key, writes the record, and says that it took effect.
//! let mut verdicts = Vec::new();
//! store.claim(0, event_ms + 60_000, &[item], &mut verdicts)?;
//! assert_eq!(verdicts, [Verdict::New { late: false }]);
//! let entry = Entry { fingerprint, digest, event_ms, settled: Settled::Written };
//! let block = Block::encode(&hasher, "http/0", 1, vec![entry]);
//! let checkpoint = Checkpoint {
//!     shard: "http/0".into(),
//!     sequence: 1,
//!     epoch: 1,
//!     position: None,
//!     watermark_ms: event_ms,
//!     floor_ms: i64::MIN,
//! };
//! let ticket = store.settle(&[checkpoint], &[block], event_ms)?;
//! store.wait_durable(ticket)?;
//!
//! // A copy is told.
//! verdicts.clear();
//! store.claim(1, event_ms + 60_000, &[item], &mut verdicts)?;
//! assert_eq!(verdicts, [Verdict::Duplicate(Settled::Written)]);
//! # Ok(())
//! # }
//! ```
//!
//! # Inside
//!
//! - Facts are added to the open slot: in memory an exact table, on disk packed blocks in its tail, in the order in which they were
//!   settled, each group together with the checkpoints that it belongs to (`FORMAT.md`). One thread commits what was settled
//!   since the last time, at once.
//! - A slot is closed when it is full, or when the watermark has come a twelfth of window + lateness further. If it is large it is
//!   sealed by another thread: written as a sorted run behind a Bloom filter; then its table and tail go.
//! - A probe looks at the open slot's table, at those of slots that are not sealed, and at the filters of the sealed ones, which lie bit
//!   by bit side by side: what that costs does not grow with their number. Where a filter says "maybe", one block of a run is read.
//! - Opening loads the filters and replays the tails: the state is that of one checkpoint and all groups up to it.
//! - [`Store::expire`] drops the slots whose newest event lies below the retirement floor of the last durable checkpoint: one commit of the
//!   manifest and an unlink; no fact is read.
//!
//! A slot holds what arrived in one stretch of time, not one span of event time: so there is one table, one tail, one run, and late or
//! early records need no slots of their own. What it costs: a fact may stay as long as the newest one in its slot.
//!
//! # Why a key takes effect once, whatever the watermarks say
//!
//! Let `floor` be the store's floor: facts below it may be forgotten, those at or above it are held. It only rises, also across
//! crashes: it is the G of a durable checkpoint, and a tail is unlinked only after the manifest holds the floor that let it go.
//! Copies of an event lie at most a window apart. A key is new only if no slot holds it and its event time is at least
//! `floor + window`. Had a copy of it taken effect before, that fact's time would be at least `floor`, so it would be held, and be
//! found: a contradiction. A watermark that is wrong raises `floor` too far, and makes records late; never new.
//!
//! A shard that moves to another store takes its floor along, in [`Checkpoint::floor_ms`] and [`Item::floor_ms`]: the owner that
//! expires marks raises the shard's floor in the same transaction. The new owner has learnt all marks, so what it does not hold lies
//! below that floor, and the same argument holds with the higher of the two floors.
//!
//! # When the disk fails or is full
//!
//! An IO error stops the store: every call answers [`StoreError::Stopped`] until it is opened again. A full disk or a used-up budget
//! is back-pressure: what would have to be claimed answers [`StoreError::Full`], copies are answered, what was claimed can still be settled, and
//! expiry makes room. Since event time moves on only with new records, that may take a higher budget or a shorter window.

mod block;
mod committer;
mod copy;
mod disk;
mod error;
mod fact;
mod files;
mod filter;
mod fingerprint;
mod floors;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod manifest;
mod plan;
mod rows;
mod run;
mod sealer;
mod slots;
mod state;
mod stats;
mod store;
mod sync;
mod table;
mod tail;
#[cfg(test)]
#[cfg_attr(feature = "shuttle", allow(dead_code))]
mod testing;
#[cfg(test)]
mod tests;
mod verify;

pub use block::{Block, BlockError};
pub use copy::{export, import};
pub use error::{Budget, StoreError};
pub use fact::{Entry, Known, Settled};
pub use files::FileStats;
pub use fingerprint::{Algorithm, Digest, Fingerprint, Hasher, Identity, RECIPE_VERSION};
pub use floors::{Checkpoint, Floors};
pub use plan::Plan;
pub use slots::{SlotKind, SlotStats};
pub use state::{Item, Verdict};
pub use stats::Stats;
pub use store::{Store, StoreOptions, Ticket};
pub use verify::{Fault, FileReport, Remedy, Report, verify};
