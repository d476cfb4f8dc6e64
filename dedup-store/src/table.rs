//! The facts in memory, by slots of event time: [`Slots`]. Pure.
//!
//! A key may lie in any slot (opaque keys), so a probe looks at every one, newest first. Expiry drops whole slots.

use hashbrown::HashTable;

use crate::{
    fact::{Entry, Settled},
    fingerprint::{Digest, Fingerprint},
};

/// Slots that get a table of their own: the usual dozen, and as many again for shards that lag behind or run ahead.
/// Event times that find no room share the sparse slot, so that strange times cost room, never a probe each.
const MAX_SLOTS: usize = 32;

/// How many slots the usual span of facts (window + lateness) is cut into.
const SLOTS_PER_SPAN: i64 = 12;

const MIN_WIDTH_MS: i64 = 1_000;

/// Width of a slot for a route with this window and lateness. Chosen once, when the store is made.
pub(crate) fn slot_width_ms(window_ms: i64, lateness_ms: i64) -> i64 {
    (window_ms.max(0).saturating_add(lateness_ms.max(0)) / SLOTS_PER_SPAN).max(MIN_WIDTH_MS)
}

/// The hash that tables use: the fingerprint's own bits.
#[inline]
pub(crate) fn bits(fingerprint: &Fingerprint) -> u64 {
    let mut low = [0; 8];
    low.copy_from_slice(&fingerprint.0[..8]);
    u64::from_le_bytes(low)
}

/// The most bytes that a table takes for a key it has room for: it is filled to 7/8 and its size is a power of two.
const RESERVED_KEY_BYTES: u64 = 2 * (size_of::<Fact>() as u64 + 1) * 8 / 7 + 1;

#[derive(Clone, Copy)]
struct Fact {
    fingerprint: Fingerprint,
    event_ms: i64,
    /// Digest in the low 56 bits, outcome above.
    packed: u64,
}

impl Fact {
    fn new(entry: &Entry) -> Self {
        Fact {
            fingerprint: entry.fingerprint,
            event_ms: entry.event_ms,
            packed: entry.digest.0 | (u64::from(entry.settled as u8) << 56),
        }
    }

    fn found(&self) -> Found {
        Found { event_ms: self.event_ms, packed: self.packed }
    }
}

/// What is known under a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) event_ms: i64,
    packed: u64,
}

impl Found {
    pub(crate) fn digest(&self) -> Digest {
        Digest(self.packed & ((1 << 56) - 1))
    }

    pub(crate) fn settled(&self) -> Settled {
        // Packed from a `Settled` in `Fact::new`; a number that is none cannot come out.
        Settled::from_number((self.packed >> 56) as u8).unwrap_or(Settled::Written)
    }
}

/// What holds the facts of one slot: the seam for slots that are sealed to disk behind a filter. An open one answers
/// exactly, from memory.
enum Holding {
    Open(HashTable<Fact>),
}

impl Holding {
    #[inline]
    fn find(&self, fingerprint: &Fingerprint) -> Option<&Fact> {
        let Holding::Open(table) = self;
        table.find(bits(fingerprint), |fact| fact.fingerprint == *fingerprint)
    }

    fn insert(&mut self, fact: Fact) {
        let Holding::Open(table) = self;
        table.insert_unique(bits(&fact.fingerprint), fact, |fact| bits(&fact.fingerprint));
    }

    fn remove(&mut self, fingerprint: &Fingerprint) -> Option<Fact> {
        let Holding::Open(table) = self;
        let entry = table.find_entry(bits(fingerprint), |fact| fact.fingerprint == *fingerprint).ok()?;
        Some(entry.remove().0)
    }

    fn keys(&self) -> usize {
        let Holding::Open(table) = self;
        table.len()
    }

    fn bytes(&self) -> usize {
        let Holding::Open(table) = self;
        table.allocation_size()
    }
}

struct Slot {
    /// Covers event times `[number * width, (number + 1) * width)`.
    number: i64,
    facts: Holding,
}

impl Slot {
    fn new(number: i64, keys: usize) -> Self {
        Slot { number, facts: Holding::Open(HashTable::with_capacity(keys)) }
    }
}

/// Keys and bytes of one slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotStats {
    /// First event time of the slot, ms; none for the sparse slot, which takes any.
    pub start_ms: Option<i64>,
    /// Keys in it.
    pub keys: u64,
    /// Bytes of its table.
    pub bytes: u64,
}

/// All facts of a route.
pub(crate) struct Slots {
    width_ms: i64,
    /// The memory budget.
    max_bytes: u64,
    /// Ascending by number, at most [`MAX_SLOTS`].
    slots: Vec<Slot>,
    /// Event times that found no slot of their own.
    sparse: Holding,
    /// The sparse slot was last swept for a floor in this slot.
    swept: i64,
}

impl Slots {
    pub(crate) fn new(width_ms: i64, max_bytes: u64) -> Self {
        let sparse = Holding::Open(HashTable::new());
        Slots { width_ms: width_ms.max(1), max_bytes, slots: Vec::new(), sparse, swept: i64::MIN }
    }

    pub(crate) fn width_ms(&self) -> i64 {
        self.width_ms
    }

    pub(crate) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    pub(crate) fn find(&self, fingerprint: &Fingerprint) -> Option<Found> {
        let newest_first = self.slots.iter().rev().map(|slot| &slot.facts);
        newest_first.chain([&self.sparse]).find_map(|facts| facts.find(fingerprint)).map(Fact::found)
    }

    /// [`Slots::find`] for many keys, appended to `found`: slot by slot rather than key by key, so that the cache misses of many
    /// keys overlap.
    pub(crate) fn find_all<'a>(
        &self,
        keys: impl ExactSizeIterator<Item = &'a Fingerprint> + Clone,
        found: &mut Vec<Option<Found>>,
    ) {
        let first = found.len();
        found.resize(first + keys.len(), None);
        let newest_first = self.slots.iter().rev().map(|slot| &slot.facts);
        for facts in newest_first.chain([&self.sparse]).filter(|facts| facts.keys() > 0) {
            for (found, key) in found[first..].iter_mut().zip(keys.clone()) {
                if found.is_none() {
                    *found = facts.find(key).map(Fact::found);
                }
            }
        }
    }

    /// Adds a key that is surely not there.
    pub(crate) fn insert_absent(&mut self, entry: &Entry) {
        let number = entry.event_ms.div_euclid(self.width_ms);
        // Most facts are of the newest slots.
        let index = match self.slots.iter().rposition(|slot| slot.number <= number) {
            Some(index) if self.slots[index].number == number => Some(index),
            before if self.slots.len() < MAX_SLOTS => {
                let index = before.map_or(0, |index| index + 1);
                let keys = self.expected_keys(number, index);
                self.slots.insert(index, Slot::new(number, keys));
                Some(index)
            }
            _ => None,
        };
        let facts = match index {
            Some(index) => &mut self.slots[index].facts,
            None => &mut self.sparse,
        };
        facts.insert(Fact::new(entry));
    }

    /// How many keys a new slot is to have room for at once: as many as the slot before it holds, so that steady traffic never
    /// rehashes a large table under the store's lock. At most half of what the budget leaves goes into it: room that is only
    /// reserved must not make the store full. Strange event times, without a neighbour, get none.
    fn expected_keys(&self, number: i64, index: usize) -> usize {
        let left = self.max_bytes.saturating_sub(self.bytes()) / 2 / RESERVED_KEY_BYTES;
        // The slot just before may have hardly begun, when event times run ahead: the one before that is full.
        let before =
            self.slots[..index].iter().rev().take_while(|slot| number.saturating_sub(slot.number) <= 2);
        let keys = before.map(|slot| slot.facts.keys()).max().unwrap_or(0);
        keys.min(usize::try_from(left).unwrap_or(usize::MAX))
    }

    /// Adds a key unless it is there. A fact that was learnt twice stays as it is; an effect takes the place of a refusal (P2).
    pub(crate) fn insert(&mut self, entry: &Entry) {
        match self.find(&entry.fingerprint) {
            None => self.insert_absent(entry),
            Some(old) if old.settled().refused() && !entry.settled.refused() => {
                self.remove(&entry.fingerprint);
                self.insert_absent(&Entry { event_ms: entry.event_ms.max(old.event_ms), ..*entry });
            }
            Some(_) => {}
        }
    }

    pub(crate) fn remove(&mut self, fingerprint: &Fingerprint) -> Option<Found> {
        let newest_first = self.slots.iter_mut().rev().map(|slot| &mut slot.facts);
        let mut all = newest_first.chain([&mut self.sparse]);
        all.find_map(|facts| facts.remove(fingerprint)).map(|fact| fact.found())
    }

    /// Drops the slots that end at or below `floor_ms`; answers with the number of keys that went.
    pub(crate) fn retire(&mut self, floor_ms: i64) -> u64 {
        let before = self.keys();
        let floor_slot = floor_ms.div_euclid(self.width_ms);
        self.slots.retain(|slot| slot.number >= floor_slot);
        // The sparse slot is swept key by key, once a slot's width: it is small but for strange event times.
        if floor_slot > self.swept {
            self.swept = floor_slot;
            let Holding::Open(table) = &mut self.sparse;
            table.retain(|fact| fact.event_ms >= floor_ms);
            table.shrink_to_fit(|fact| bits(&fact.fingerprint));
        }
        before - self.keys()
    }

    pub(crate) fn keys(&self) -> u64 {
        (self.slots.iter().map(|slot| slot.facts.keys()).sum::<usize>() + self.sparse.keys()) as u64
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.slots.iter().map(|slot| slot.facts.bytes()).sum::<usize>() + self.sparse.bytes()) as u64
    }

    pub(crate) fn stats(&self) -> Vec<SlotStats> {
        let stats = |start_ms, facts: &Holding| SlotStats {
            start_ms,
            keys: facts.keys() as u64,
            bytes: facts.bytes() as u64,
        };
        let own =
            self.slots.iter().map(|slot| stats(Some(slot.number.saturating_mul(self.width_ms)), &slot.facts));
        let sparse = (self.sparse.keys() > 0).then(|| stats(None, &self.sparse));
        own.chain(sparse).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(key: u64, event_ms: i64, settled: Settled) -> Entry {
        let mut fingerprint = [0; 16];
        fingerprint[..8].copy_from_slice(&(key.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes());
        fingerprint[8..].copy_from_slice(&key.to_le_bytes());
        Entry { fingerprint: Fingerprint(fingerprint), digest: Digest(key & 0xff), event_ms, settled }
    }

    #[test]
    fn width_is_a_twelfth_and_at_least_a_second() {
        assert_eq!(slot_width_ms(12 * 3_600_000, 0), 3_600_000);
        assert_eq!(slot_width_ms(5, 5), 1_000);
        assert_eq!(slot_width_ms(-1, -1), 1_000);
        assert_eq!(slot_width_ms(i64::MAX, i64::MAX), i64::MAX / 12);
    }

    #[test]
    fn strange_event_times_make_a_bounded_number_of_tables() {
        let mut slots = Slots::new(1_000, u64::MAX);
        for key in 0..10_000 {
            slots.insert(&entry(key, key as i64 * 1_000_000 - 5_000_000_000, Settled::Written));
        }
        slots.insert(&entry(10_000, i64::MIN, Settled::Written));
        slots.insert(&entry(10_001, i64::MAX, Settled::Written));
        assert_eq!(slots.stats().len(), MAX_SLOTS + 1);
        assert_eq!(slots.keys(), 10_002);
        assert!((0..10_002).all(|key| slots.find(&entry(key, 0, Settled::Written).fingerprint).is_some()));
        slots.retire(i64::MAX);
        assert_eq!((slots.keys(), slots.stats().len()), (1, 1));
    }

    #[test]
    fn p2_an_effect_takes_the_place_of_a_refusal_and_of_nothing_else() {
        let mut slots = Slots::new(1_000, u64::MAX);
        let get = |slots: &Slots| slots.find(&entry(1, 0, Settled::Written).fingerprint).unwrap();
        slots.insert(&entry(1, 5_000, Settled::DeadLettered));
        slots.insert(&entry(1, 4_000, Settled::Rejected));
        assert_eq!((get(&slots).settled(), get(&slots).event_ms), (Settled::DeadLettered, 5_000));
        slots.insert(&entry(1, 4_000, Settled::Written));
        assert_eq!((get(&slots).settled(), get(&slots).event_ms), (Settled::Written, 5_000));
        slots.insert(&entry(1, 9_000, Settled::Updated));
        slots.insert(&entry(1, 9_000, Settled::DeadLettered));
        assert_eq!((get(&slots).settled(), get(&slots).event_ms), (Settled::Written, 5_000));
        assert_eq!(slots.keys(), 1);
    }

    /// A route with 100 000 keys a slot grew each slot's table from nothing, and at every doubling all lanes waited for the lock.
    #[test]
    fn steady_traffic_reserves_a_slot_once_and_never_rehashes_it() {
        const KEYS: u64 = 20_000;
        let mut slots = Slots::new(1_000, 1 << 30);
        let put = |slots: &mut Slots, keys: std::ops::Range<u64>, second: i64| {
            keys.for_each(|key| slots.insert(&entry(key, second * 1_000, Settled::Written)));
            slots.stats().last().unwrap().bytes
        };
        let grown = put(&mut slots, 0..KEYS, 0);
        // One record runs ahead of its time.
        put(&mut slots, KEYS..KEYS + 1, 1);
        for second in 1..6 {
            let first = second as u64 * KEYS + 1;
            let reserved = put(&mut slots, first..first + 1, second);
            assert_eq!(reserved, grown, "slot {second} is as large as the one before from its first key on");
            assert_eq!(
                put(&mut slots, first + 1..first + KEYS - 1, second),
                reserved,
                "slot {second} rehashed"
            );
        }
        let before = slots.bytes();
        put(&mut slots, 1_000_000..1_000_001, 1_000);
        assert!(slots.bytes() - before < 1_000, "a strange event time reserves nothing");
    }

    /// A reservation filled the memory budget up, and the store refused what its tables had room for.
    #[test]
    fn a_reservation_takes_at_most_half_of_what_the_budget_leaves() {
        let mut full = Slots::new(1_000, u64::MAX);
        (0..20_000).for_each(|key| full.insert(&entry(key, 0, Settled::Written)));
        let used = full.bytes();
        for left in (0..3 * used).step_by(used as usize / 7) {
            let mut slots = Slots::new(1_000, used + left);
            (0..20_000).for_each(|key| slots.insert(&entry(key, 0, Settled::Written)));
            slots.insert(&entry(20_000, 1_000, Settled::Written));
            let reserved = slots.bytes() - used;
            assert!(reserved <= (left / 2).max(1_000), "{reserved} bytes reserved of {left}");
            assert!(reserved > left / 16 || reserved == used || left < 16_000, "{reserved} of {left}");
        }
    }

    proptest! {
        /// Against a plain map: what was put in is found until its slot has wholly passed, and not longer than a slot.
        #[test]
        fn p11_retiring_drops_whole_slots_only_below_the_floor(
            times in prop::collection::vec(-200_000i64..200_000, 1..300),
            floors in prop::collection::vec(-220_000i64..220_000, 1..6),
        ) {
            let mut slots = Slots::new(1_000, u64::MAX);
            for (key, event_ms) in times.iter().enumerate() {
                slots.insert(&entry(key as u64, *event_ms, Settled::Written));
            }
            let mut highest = i64::MIN;
            for floor in floors {
                slots.retire(floor);
                highest = highest.max(floor);
                let keys: Vec<_> = (0..times.len() as u64).map(|key| entry(key, 0, Settled::Written).fingerprint).collect();
                let mut found = vec![None];
                slots.find_all(keys.iter(), &mut found);
                for (key, found) in found[1..].iter().enumerate() {
                    prop_assert_eq!(*found, slots.find(&keys[key]));
                    if times[key] >= highest {
                        prop_assert_eq!(found.unwrap().event_ms, times[key]);
                    }
                    if times[key] < highest - 1_000 {
                        prop_assert_eq!(*found, None);
                    }
                }
            }
        }
    }
}
