//! The locks, waits and threads of the store: parking_lot's and the standard library's. The crate's own tests, with the feature
//! `shuttle`, put those of shuttle in their place, which runs one thread at a time and chooses which (`tests/interleaved.rs`).

#[cfg(test)]
#[cfg(feature = "shuttle")]
mod chosen;

#[cfg(all(test, feature = "shuttle"))]
pub(crate) use chosen::{Condvar, Mutex, MutexGuard, thread};
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use std::thread;
