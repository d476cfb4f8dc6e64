//! The facts of one slot in memory, exact: [`Table`]. Pure.
//!
//! A slot holds the facts that arrived in one stretch of time, whatever their event times: those of one tail,
//! and later of one run. It expires as a whole, once its newest event time has passed.

use hashbrown::HashTable;

use crate::{
    fact::{Entry, Known, Settled},
    fingerprint::Fingerprint,
};

/// The hash that tables use: the fingerprint's own bits.
#[inline]
pub(crate) fn bits(fingerprint: &Fingerprint) -> u64 {
    let mut low = [0; 8];
    low.copy_from_slice(&fingerprint.0[..8]);
    u64::from_le_bytes(low)
}

/// Bytes that a table takes for each of its buckets.
const BUCKET_BYTES: u64 = size_of::<Fact>() as u64 + 1;

/// The most keys that a table of at most `bytes` holds: tables are filled to 7/8, and their size is a power
/// of two.
pub(crate) fn keys_within(bytes: u64) -> u64 {
    let buckets = (bytes / BUCKET_BYTES).max(16);
    (1 << buckets.ilog2()) / 8 * 7
}

/// Bytes of a table with room for so many keys.
pub(crate) fn bytes_for(keys: u64) -> u64 {
    (keys.saturating_mul(8) / 7).next_power_of_two().max(16) * BUCKET_BYTES
}

/// A settled key, packed.
#[derive(Clone, Copy)]
pub(crate) struct Fact {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) event_ms: i64,
    /// Digest in the low 56 bits, outcome above.
    packed: u64,
}

const DIGEST_BITS: u32 = 56;

impl Fact {
    fn new(entry: &Entry) -> Self {
        Fact {
            fingerprint: entry.fingerprint,
            event_ms: entry.event_ms,
            packed: entry.digest.0 | (u64::from(entry.settled as u8) << DIGEST_BITS),
        }
    }

    pub(crate) fn settled(&self) -> Settled {
        // Packed from a `Settled` in `Fact::new`; a number that is none cannot come out.
        Settled::from_number((self.packed >> DIGEST_BITS) as u8).unwrap_or(Settled::Written)
    }

    /// The low 56 bits.
    pub(crate) fn digest(&self) -> u64 {
        self.packed & ((1 << DIGEST_BITS) - 1)
    }
}

/// What was found under a key, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) known: Known,
    /// Last group of the slot that it lies in; the greatest number for the open one.
    pub(crate) through: u64,
    /// Newest event time of that slot, ms: so long the fact is found.
    pub(crate) newest_ms: i64,
}

/// The facts of one slot.
#[derive(Clone)]
pub(crate) struct Table {
    facts: HashTable<Fact>,
    /// Number of the slot, and of its tail or run.
    pub(crate) generation: u64,
    /// Last group of its facts, once it is closed.
    pub(crate) through: u64,
    /// Event times, ms; the greatest and the least number without facts.
    pub(crate) oldest_ms: i64,
    pub(crate) newest_ms: i64,
}

impl Table {
    /// An empty, open one, with room for `keys`.
    pub(crate) fn new(generation: u64, keys: usize) -> Self {
        let facts = HashTable::with_capacity(keys);
        Table { facts, generation, through: u64::MAX, oldest_ms: i64::MAX, newest_ms: i64::MIN }
    }

    #[inline]
    pub(crate) fn find(&self, fingerprint: &Fingerprint) -> Option<Found> {
        let fact = self.facts.find(bits(fingerprint), |fact| fact.fingerprint == *fingerprint)?;
        Some(self.found(fact))
    }

    /// Brings the keys' places near, all at once: one by one, in the midst of other work, each would be a cache miss of
    /// its own.
    #[inline]
    pub(crate) fn touch<'a>(&self, keys: impl Iterator<Item = &'a Fingerprint>) {
        let there = |key: &&Fingerprint| {
            self.facts.find(bits(key), |fact| fact.fingerprint.0[15] == key.0[15]).is_some()
        };
        std::hint::black_box(keys.filter(there).count());
    }

    fn found(&self, fact: &Fact) -> Found {
        Found {
            known: Known::new(fact.settled(), fact.event_ms, fact.digest(), DIGEST_BITS),
            through: self.through,
            newest_ms: self.newest_ms,
        }
    }

    /// Adds a key that is surely not there.
    pub(crate) fn insert_absent(&mut self, entry: &Entry) {
        let fact = Fact::new(entry);
        self.facts.insert_unique(bits(&fact.fingerprint), fact, |fact| bits(&fact.fingerprint));
        self.oldest_ms = self.oldest_ms.min(entry.event_ms);
        self.newest_ms = self.newest_ms.max(entry.event_ms);
    }

    pub(crate) fn remove(&mut self, fingerprint: &Fingerprint) -> Option<Found> {
        let entry = self.facts.find_entry(bits(fingerprint), |fact| fact.fingerprint == *fingerprint).ok()?;
        let fact = entry.remove().0;
        Some(self.found(&fact))
    }

    pub(crate) fn facts(&self) -> impl Iterator<Item = &Fact> {
        self.facts.iter()
    }

    pub(crate) fn keys(&self) -> usize {
        self.facts.len()
    }

    /// Keys that it may hold without being moved to a larger place.
    pub(crate) fn room(&self) -> usize {
        self.facts.capacity()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.facts.allocation_size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{fact, key};

    #[test]
    fn a_table_of_so_many_keys_stays_within_its_bytes() {
        for bytes in [1 << 16, 100_000, 1 << 20, 5_000_000] {
            let keys = keys_within(bytes);
            let table = Table::new(1, keys as usize);
            assert!(table.bytes() as u64 <= bytes + 1_024, "{keys} keys take {} of {bytes}", table.bytes());
            assert!(table.bytes() as u64 > bytes / 3, "{keys} keys take only {} of {bytes}", table.bytes());
        }
    }

    #[test]
    fn what_was_put_in_comes_out() {
        let mut table = Table::new(1, 0);
        for number in 0..1_000 {
            table.insert_absent(&fact(number, number as i64 * 10, Settled::Stale));
        }
        assert_eq!((table.oldest_ms, table.newest_ms, table.keys()), (0, 9_990, 1_000));
        let found = table.find(&key(7)).unwrap();
        assert_eq!((found.known.settled, found.known.event_ms), (Settled::Stale, 70));
        assert!(found.known.same(fact(7, 0, Settled::Stale).digest));
        assert!(!found.known.same(fact(8, 0, Settled::Stale).digest));
        assert_eq!(table.remove(&key(7)), Some(found));
        assert_eq!((table.find(&key(7)), table.remove(&key(1_000))), (None, None));
    }
}
