//! A settled key: [`Entry`], and what became of it: [`Settled`] (P2). Pure.

use crate::fingerprint::{Digest, Fingerprint};

/// What took effect, as stored with a key. `Forgotten` takes a key back (P12).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Settled {
    /// The key was taken back by an operator; a later record with it is new. It is written to the shard that the key's fact is
    /// of: the order of sequences in one shard is what says that the fact came first.
    Forgotten = 0,
    /// A row was made.
    Written = 1,
    /// A row was changed.
    Updated = 2,
    /// A newer row, or in `insert` mode any row, was there: nothing changed.
    Stale = 3,
    /// The sink refused the row, and the route settles refusals.
    Rejected = 4,
    /// The record went to the dead letters.
    DeadLettered = 5,
}

impl Settled {
    /// The outcome of a number found in a block; none if this build does not know it.
    pub fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Settled::Forgotten,
            1 => Settled::Written,
            2 => Settled::Updated,
            3 => Settled::Stale,
            4 => Settled::Rejected,
            5 => Settled::DeadLettered,
            _ => return None,
        })
    }

    /// The record was kept out of the sink's table: a replay of its dead letter may still take effect (P2).
    pub fn refused(self) -> bool {
        matches!(self, Settled::Rejected | Settled::DeadLettered)
    }
}

/// One settled key (P2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The key.
    pub fingerprint: Fingerprint,
    /// Of the record that took effect.
    pub digest: Digest,
    /// Event time, ms since the epoch.
    pub event_ms: i64,
    /// What it did.
    pub settled: Settled,
}

/// What is known of a settled key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Known {
    /// What its record did.
    pub settled: Settled,
    /// Event time, ms since the epoch; of a key in a closed slot the newest one of that slot.
    pub event_ms: i64,
    digest: u64,
    digest_bits: u32,
}

impl Known {
    /// `digest`: the low `bits` of it.
    pub(crate) fn new(settled: Settled, event_ms: i64, digest: u64, bits: u32) -> Self {
        Known { settled, event_ms, digest, digest_bits: bits }
    }

    /// Whether a record with this payload digest is a copy. Tells another payload from it but for one case in
    /// 2^56, or in 2^37 once the key's slot is sealed.
    pub fn same(&self, digest: Digest) -> bool {
        (digest.0 ^ self.digest) & ((1 << self.digest_bits) - 1) == 0
    }
}
