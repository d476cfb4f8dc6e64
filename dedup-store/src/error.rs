//! What can go wrong with a store: [`StoreError`].

use std::path::PathBuf;

use crate::{block::BlockError, disk::Fail};

/// Which budget is used up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Budget {
    /// [`StoreOptions::max_disk_bytes`](crate::StoreOptions::max_disk_bytes).
    Disk,
    /// [`StoreOptions::max_memory_bytes`](crate::StoreOptions::max_memory_bytes).
    Memory,
    /// The file system itself has no room left.
    FileSystem,
}

impl std::fmt::Display for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Budget::Disk => "disk budget (max_disk_bytes)",
            Budget::Memory => "memory budget (max_memory_bytes)",
            Budget::FileSystem => "file system",
        })
    }
}

/// What went wrong with the store. Any IO error but a full disk is fail-stop: afterwards every call answers `Stopped`.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another process (or store) holds the folder.
    #[error("store {folder} is in use by process {holder}: stop it, or give this route a folder of its own")]
    Locked {
        /// The store's folder.
        folder: PathBuf,
        /// Process id, as the holder wrote it.
        holder: String,
    },
    /// An earlier IO error stopped the store; reopen it to recover.
    #[error("store is stopped since: {first}; mend the cause and open it again")]
    Stopped {
        /// The first error's text.
        first: String,
    },
    /// Something new was to be claimed and a budget is used up; copies are answered still. Room comes with expiry, but event time
    /// moves on only with new records: raise the budget, or shorten the window.
    #[error(
        "store is full: {budget} has {bound} bytes, {used} are used; copies are answered, but nothing new is \
         taken, so event time stands still and expiry may make no room: raise the bound or shorten the window"
    )]
    Full {
        /// Which one.
        budget: Budget,
        /// Bytes.
        used: u64,
        /// Bytes.
        bound: u64,
    },
    /// Written by another build, or damaged, or of another route: the text names what, where and what to do.
    #[error("{0}")]
    Unusable(String),
    /// A fact that cannot be taken: it is of another route, or damaged.
    #[error("cannot settle: {0}")]
    Block(#[from] BlockError),
    /// [`Store::bind`](crate::Store::bind) comes before facts.
    #[error("store is not bound to a route yet: call bind first")]
    Unbound,
    /// IO.
    #[error("store: {0}")]
    Io(String),
}

impl From<Fail> for StoreError {
    fn from(fail: Fail) -> Self {
        match fail {
            Fail::Unusable(text) => StoreError::Unusable(text),
            Fail::Full(text) | Fail::Io(text) => StoreError::Io(text),
        }
    }
}
