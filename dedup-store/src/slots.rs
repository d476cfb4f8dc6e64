//! All facts of a route, by slots: [`Slots`], with the closed ones in [`Closed`].
//!
//! Facts are added to the open slot, whatever their event times. When it is full, or the watermark has come a
//! slot's width further, it is closed; then it is sealed in the background. A probe looks at the open slot's
//! table, at the tables of the slots that are closed and not sealed, and at the filters of the sealed ones,
//! all side by side; only where a filter says "maybe" is a run read. A slot is retired once its newest fact
//! lies below the floor: no fact is looked at.
//!
//! A key may lie in several slots (an effect takes the place of a refusal, P2): the newest slot counts.

use std::sync::Arc;

use crate::{
    disk::Fail,
    fact::Entry,
    filter::{self, COLUMNS, Plane},
    fingerprint::Fingerprint,
    plan::{Pace, Plan},
    run::Run,
    store::StoreOptions,
    table::{self, Found, Table},
};

/// How many slots the usual span of facts (window + lateness) is cut into.
const SLOTS_PER_SPAN: i64 = 12;
const MIN_WIDTH_MS: i64 = 1_000;
/// The part of the memory budget that the open slot's table may take: there may be two more that are being
/// sealed.
const TABLES_PER_BUDGET: u64 = 6;
const MIN_SLOT_KEYS: u64 = 1 << 12;
/// With fewer keys a slot stays as it is: its table is small, and its tail soon read.
const SEAL_KEYS: u64 = 1 << 15;
/// A table with room for so many keys takes long to make and longer to grow.
const LARGE_KEYS: u64 = 1 << 18;

/// How far the watermark comes within a slot, for a route with this window and lateness. Chosen once, when
/// the store is made.
pub(crate) fn slot_width_ms(window_ms: i64, lateness_ms: i64) -> i64 {
    (window_ms.max(0).saturating_add(lateness_ms.max(0)) / SLOTS_PER_SPAN).max(MIN_WIDTH_MS)
}

/// Keys at which a slot is closed of which so many come within its width: at most a fifth less, so that its table is well filled.
pub(crate) fn full_keys_for(keys: u64) -> Option<u64> {
    let wanted = (keys.saturating_mul(4) / 5).max(1);
    std::iter::successors(Some(MIN_SLOT_KEYS / 8 * 7), |full| full.checked_mul(2))
        .find(|full| *full >= wanted)
}

/// How large slots get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotSizes {
    pub(crate) width_ms: i64,
    /// The memory budget.
    pub(crate) max_bytes: u64,
    /// A slot is closed at so many keys.
    pub(crate) max_keys: u64,
    /// A closed slot with so many keys is sealed.
    pub(crate) seal_keys: u64,
}

impl SlotSizes {
    pub(crate) fn new(width_ms: i64, max_bytes: u64) -> Self {
        let max_keys = table::keys_within(max_bytes / TABLES_PER_BUDGET).max(MIN_SLOT_KEYS);
        // Within a small budget small slots are sealed too: a dozen of tables must not take it up.
        let seal_keys = SEAL_KEYS.min(max_keys / 4);
        SlotSizes { width_ms: width_ms.max(1), max_bytes, max_keys, seal_keys }
    }
}

/// A plane of filters and the runs of its columns.
#[derive(Clone)]
struct Layer {
    plane: Arc<Plane>,
    runs: [Option<Arc<Run>>; COLUMNS],
    /// Columns that are asked.
    live: u16,
}

impl Layer {
    fn new(plane: Arc<Plane>) -> Self {
        Layer { plane, runs: Default::default(), live: 0 }
    }
}

/// A plane and which of its columns are not empty: asked, being filled, or retired and not cleared yet.
#[derive(Clone)]
struct Columns {
    plane: Arc<Plane>,
    used: u16,
}

impl Columns {
    fn free_column(&self) -> Option<usize> {
        let free = (!self.used).trailing_zeros() as usize;
        (free < COLUMNS).then_some(free)
    }

    fn take(&mut self) -> Option<Place> {
        let column = self.free_column()?;
        self.used |= 1 << column;
        Some(Place { plane: Arc::clone(&self.plane), column })
    }
}

/// The slots that take no more facts. Never changed, but replaced as a whole, so that it is read without the
/// store's lock: who sees the same one before and after has missed nothing.
#[derive(Clone, Default)]
pub(crate) struct Closed {
    /// Not sealed (yet), oldest first.
    tables: Vec<Arc<Table>>,
    layers: Vec<Layer>,
    /// Sealed, with no filter.
    bare: Vec<Arc<Run>>,
}

impl Closed {
    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.layers.is_empty() && self.bare.is_empty()
    }

    /// Whether tables and filters say that the key is not there.
    #[inline]
    pub(crate) fn surely_lacks(&self, key: &Fingerprint) -> bool {
        self.bare.is_empty()
            && self.layers.iter().all(|layer| layer.plane.probe(key) & layer.live == 0)
            && self.tables.iter().all(|table| table.find(key).is_none())
    }

    pub(crate) fn find(&self, key: &Fingerprint) -> Result<Option<Found>, Fail> {
        let mut found = Vec::with_capacity(1);
        self.find_all(std::slice::from_ref(key), &mut found)?;
        Ok(found[0])
    }

    /// What the closed slots know of each key, in place of what `found` held. Slot by slot rather than key by
    /// key, so that the cache misses of many keys overlap; runs in the order of their files.
    pub(crate) fn find_all(&self, keys: &[Fingerprint], found: &mut Vec<Option<Found>>) -> Result<(), Fail> {
        found.clear();
        found.resize(keys.len(), None);
        for table in self.tables.iter().rev() {
            for (found, key) in found.iter_mut().zip(keys) {
                if found.is_none() {
                    *found = table.find(key);
                }
            }
        }
        let mut maybe: Vec<(u32, &Run)> = Vec::new();
        for layer in &self.layers {
            for (at, key) in keys.iter().enumerate() {
                let mut columns = layer.plane.probe(key) & layer.live;
                while columns != 0 {
                    maybe.extend(
                        layer.runs[columns.trailing_zeros() as usize].as_deref().map(|run| (at as u32, run)),
                    );
                    columns &= columns - 1;
                }
            }
        }
        maybe.extend(self.bare.iter().flat_map(|run| (0..keys.len() as u32).map(move |at| (at, &**run))));
        maybe.sort_unstable_by_key(|(at, run)| (run.generation, keys[*at as usize].prefix()));
        for (at, run) in maybe.into_iter().rev() {
            let found = &mut found[at as usize];
            if found.is_none_or(|found| found.through < run.meta.through)
                && let Some(older) = run.find(&keys[at as usize])?
            {
                *found = Some(older);
            }
        }
        Ok(())
    }

    pub(crate) fn tables(&self) -> &[Arc<Table>] {
        &self.tables
    }

    pub(crate) fn runs(&self) -> impl Iterator<Item = &Arc<Run>> {
        self.layers.iter().flat_map(|layer| layer.runs.iter().flatten()).chain(&self.bare)
    }

    fn keys(&self) -> u64 {
        let tables: u64 = self.tables.iter().map(|table| table.keys() as u64).sum();
        tables + self.runs().map(|run| run.meta.keys).sum::<u64>()
    }

    /// Without the planes.
    fn bytes(&self) -> u64 {
        let tables: u64 = self.tables.iter().map(|table| table.bytes() as u64).sum();
        tables + self.runs().map(|run| run.bytes()).sum::<u64>()
    }
}

/// Where the filter of a slot that is being sealed goes.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) plane: Arc<Plane>,
    pub(crate) column: usize,
}

/// What the sealer has to do next.
pub(crate) enum Work {
    /// A closed slot waits to be sealed.
    Seal(Arc<Table>),
    /// A run has no filter.
    Filter(Arc<Run>),
    /// A retired slot's column is to be emptied.
    Clear(Place),
}

/// Where a slot's facts are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotKind {
    /// In a table, and more are added.
    Open,
    /// In a table.
    Closed,
    /// In a run behind a filter.
    Sealed,
}

/// Keys and bytes of one slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotStats {
    /// Its number, as in the name of its tail or run.
    pub number: u64,
    /// Where its facts are.
    pub kind: SlotKind,
    /// Oldest and newest event time, ms; none without facts.
    pub event_ms: Option<(i64, i64)>,
    /// Keys in it.
    pub keys: u64,
    /// Bytes of its table, or of its share of the filters and its index.
    pub memory_bytes: u64,
    /// Bits of its filter; 0 without one.
    pub filter_bits: u64,
    /// Reads of its run that found nothing, since the store was opened: its filter was wrong, or not there
    /// yet.
    pub false_positives: u64,
}

/// All facts of a route.
#[derive(Clone)]
pub(crate) struct Slots {
    sizes: SlotSizes,
    pub(crate) open: Table,
    /// The watermark when the open slot began.
    began_ms: Option<i64>,
    /// Keys at which the open slot is closed.
    full_keys: u64,
    /// All planes, also those of which no column is asked.
    planes: Vec<Columns>,
    /// The next slot's table, if it was made beforehand.
    spare: Option<Table>,
    pace: Pace,
    closed: Arc<Closed>,
}

impl Slots {
    pub(crate) fn new(sizes: SlotSizes, generation: u64) -> Self {
        Slots {
            sizes,
            open: Table::new(generation, 0),
            began_ms: None,
            full_keys: sizes.max_keys,
            planes: Vec::new(),
            spare: None,
            pace: Pace::default(),
            closed: Arc::default(),
        }
    }

    /// What will be needed when the window is full; none before a slot was closed.
    pub(crate) fn plan(&self, options: &StoreOptions) -> Option<Plan> {
        Plan::new(&self.pace, &self.sizes, options)
    }

    pub(crate) fn sizes(&self) -> &SlotSizes {
        &self.sizes
    }

    pub(crate) fn closed(&self) -> &Arc<Closed> {
        &self.closed
    }

    /// Replaces the closed slots; answers with the old ones, which are large to drop: do it without a lock.
    fn change(&mut self, change: impl FnOnce(&mut Closed)) -> Arc<Closed> {
        let mut closed = Closed::clone(&self.closed);
        change(&mut closed);
        std::mem::replace(&mut self.closed, Arc::new(closed))
    }

    /// Whether the open slot is to be closed, if the next group brings as many keys as one of `group_keys`.
    pub(crate) fn is_due(&mut self, watermark_ms: Option<i64>, group_keys: u64) -> bool {
        let keys = self.open.keys() as u64;
        let began_ms = match (self.began_ms, watermark_ms) {
            (Some(began_ms), _) => began_ms,
            // Of a slot that began before the store was opened the oldest event tells it, or each opening
            // would make it longer.
            (None, Some(watermark_ms)) => *self.began_ms.insert(watermark_ms.min(self.open.oldest_ms)),
            (None, None) => i64::MAX,
        };
        let passed = watermark_ms.is_some_and(|now| now.saturating_sub(began_ms) >= self.sizes.width_ms);
        // A large table is not moved to a larger place: whoever settled then would wait for that.
        let room = self.open.room() as u64;
        let full_keys = if room >= LARGE_KEYS { room.min(self.full_keys) } else { self.full_keys };
        // A slot is half full at least, however large a group may be, or each group would be a slot of its
        // own from then on.
        keys > 0 && (passed || keys + group_keys.min(full_keys / 2) > full_keys)
    }

    /// Keys that the table of the next slot is to have room for, if it is large: to be made beforehand, without the lock, and
    /// handed over by [`Slots::prepare`].
    pub(crate) fn wants_spare(&self, watermark_ms: Option<i64>) -> Option<usize> {
        let keys = self.room_for_next(watermark_ms) as u64;
        let there = self.spare.as_ref().map_or(0, Table::room) as u64;
        (keys >= LARGE_KEYS && there < keys).then_some(keys as usize)
    }

    /// Answers with the one that there was.
    pub(crate) fn prepare(&mut self, spare: Table) -> Option<Table> {
        self.spare.replace(spare)
    }

    /// Keys that the next slot's table begins with room for, were the open one closed now.
    fn room_for_next(&self, watermark_ms: Option<i64>) -> usize {
        let keys = self.open.keys() as u64;
        let full_keys = self.next_full_keys(keys, watermark_ms);
        // A slot that was full long before its time is followed by a larger one.
        let expected =
            if self.passed_ms(watermark_ms) < self.early_ms() { keys.saturating_mul(2) } else { keys };
        expected.min(full_keys).min(self.room_keys()) as usize
    }

    /// Closes the open slot after this group and opens the next.
    pub(crate) fn close(&mut self, through: u64, generation: u64, watermark_ms: Option<i64>) -> Arc<Closed> {
        let keys = self.open.keys() as u64;
        let room = self.room_for_next(watermark_ms);
        self.full_keys = self.next_full_keys(keys, watermark_ms);
        let mut next = match self.spare.take() {
            Some(spare) if spare.room() >= room => spare,
            _ => Table::new(generation, room),
        };
        next.generation = generation;
        let mut open = std::mem::replace(&mut self.open, next);
        open.through = through;
        if let (Some(began_ms), Some(watermark_ms)) = (self.began_ms, watermark_ms) {
            self.pace.add(keys, watermark_ms.saturating_sub(began_ms));
        }
        self.began_ms = watermark_ms;
        self.change(|closed| closed.tables.push(Arc::new(open)))
    }

    /// Keys at which the next slot is closed: a table is fullest just below a power of two, so that a slot is
    /// as long as fits one, but about a twelfth of the span. Slots that were full long before their time are
    /// made larger.
    fn next_full_keys(&self, keys: u64, watermark_ms: Option<i64>) -> u64 {
        let passed_ms = self.passed_ms(watermark_ms);
        let full = if passed_ms >= self.sizes.width_ms {
            full_keys_for(keys)
        } else if passed_ms >= self.early_ms() {
            Some(self.full_keys)
        } else {
            Some(self.full_keys.saturating_mul(2))
        };
        full.map_or(self.sizes.max_keys, |full| full.min(self.sizes.max_keys))
    }

    /// How far the watermark has come since the open slot began.
    fn passed_ms(&self, watermark_ms: Option<i64>) -> i64 {
        let began_ms = self.began_ms.or(watermark_ms).unwrap_or(0);
        watermark_ms.unwrap_or(began_ms).saturating_sub(began_ms)
    }

    /// A slot that is full sooner is too small.
    fn early_ms(&self) -> i64 {
        self.sizes.width_ms / 4 * 3
    }

    /// How many keys' room may be taken at once: half of what the budget leaves, for room that is only
    /// reserved must not make the store full.
    fn room_keys(&self) -> u64 {
        table::keys_within(self.sizes.max_bytes.saturating_sub(self.bytes()) / 2)
    }

    /// A slot that was sealed before the store was opened; its filter's place, if the filter is there.
    pub(crate) fn add_run(&mut self, run: Arc<Run>, place: Option<&Place>) {
        self.change(|closed| closed.put(run, place));
    }

    /// A column for a filter of so many keys: its blocks, and the place if a plane has one.
    pub(crate) fn place(&mut self, keys: u64) -> (u64, Option<Place>) {
        let suits =
            |plane: &&Columns| filter::suits(plane.plane.blocks(), keys) && plane.free_column().is_some();
        // The one that wastes least.
        let blocks = self.planes.iter().filter(suits).map(|plane| plane.plane.blocks()).min();
        match blocks {
            Some(blocks) => (blocks, self.place_in(blocks)),
            None => (filter::blocks_for(keys), None),
        }
    }

    /// A column in a plane of this size.
    pub(crate) fn place_in(&mut self, blocks: u64) -> Option<Place> {
        self.planes.iter_mut().filter(|plane| plane.plane.blocks() == blocks).find_map(Columns::take)
    }

    /// Adds an empty plane, and takes its first column.
    pub(crate) fn add_plane(&mut self, plane: Arc<Plane>) -> Place {
        self.planes.push(Columns { plane: Arc::clone(&plane), used: 1 });
        Place { plane, column: 0 }
    }

    /// The run takes the place of its table, and its filter is asked from now on.
    pub(crate) fn seal(&mut self, run: Arc<Run>, place: &Place) -> Arc<Closed> {
        self.change(|closed| {
            closed.tables.retain(|table| table.generation != run.generation);
            closed.bare.retain(|bare| bare.generation != run.generation);
            closed.put(run, Some(place));
        })
    }

    /// Whether a closed table is still one of the slots.
    pub(crate) fn holds_table(&self, table: &Arc<Table>) -> bool {
        self.closed.tables.iter().any(|held| Arc::ptr_eq(held, table))
    }

    /// Whether a run is still one of the slots.
    pub(crate) fn holds(&self, run: &Arc<Run>) -> bool {
        self.closed.runs().any(|held| Arc::ptr_eq(held, run))
    }

    /// The column is empty again, or nothing was put into it. Answers with a plane that is not needed any more, which
    /// is large to drop: do it without a lock.
    pub(crate) fn free(&mut self, place: &Place) -> Option<Arc<Plane>> {
        let at = self.planes.iter().position(|plane| Arc::ptr_eq(&plane.plane, &place.plane))?;
        self.planes[at].used &= !(1 << place.column);
        (self.planes[at].used == 0).then(|| self.planes.swap_remove(at).plane)
    }

    /// What is to be done; tables only up to the last durable group, and only those whose tail takes no more.
    pub(crate) fn work(&self, durable: u64, open_tail: u64) -> Option<Work> {
        let sealable = |table: &&Arc<Table>| {
            self.is_large(table) && table.through <= durable && table.generation < open_tail
        };
        if let Some(table) = self.closed.tables.iter().find(sealable) {
            return Some(Work::Seal(Arc::clone(table)));
        }
        if let Some(run) = self.closed.bare.first() {
            return Some(Work::Filter(Arc::clone(run)));
        }
        self.planes.iter().find_map(|Columns { plane, used }| {
            // One that is being filled is filled by who asks this.
            let retired = used & !self.closed.live(plane);
            let place = Place { plane: Arc::clone(plane), column: retired.trailing_zeros() as usize };
            (retired != 0).then_some(Work::Clear(place))
        })
    }

    fn is_large(&self, table: &Table) -> bool {
        table.keys() as u64 >= self.sizes.seal_keys
    }

    /// Closed slots that wait to be sealed.
    pub(crate) fn unsealed(&self) -> usize {
        self.closed.tables.iter().filter(|table| self.is_large(table)).count()
    }

    /// The newest event of the slots whose facts all lie below `floor_ms`.
    pub(crate) fn newest_below(&self, floor_ms: i64) -> Option<i64> {
        let open = (self.open.keys() > 0).then_some(self.open.newest_ms);
        let tables = self.closed.tables.iter().map(|table| table.newest_ms);
        let runs = self.closed.runs().map(|run| run.meta.newest_ms);
        open.into_iter().chain(tables).chain(runs).filter(|newest_ms| *newest_ms < floor_ms).max()
    }

    /// Drops the slots whose facts all lie below `floor_ms`. Their columns are no longer asked, and cleared
    /// later.
    pub(crate) fn retire(&mut self, floor_ms: i64) -> Option<Arc<Closed>> {
        if self.open.keys() > 0 && self.open.newest_ms < floor_ms {
            self.open = Table::new(self.open.generation, 0);
        }
        let gone = |newest_ms: i64| newest_ms < floor_ms;
        let any = self.closed.tables.iter().any(|table| gone(table.newest_ms))
            || self.closed.runs().any(|run| gone(run.meta.newest_ms));
        any.then(|| {
            self.change(|closed| {
                closed.tables.retain(|table| !gone(table.newest_ms));
                closed.bare.retain(|run| !gone(run.meta.newest_ms));
                for layer in &mut closed.layers {
                    for (column, run) in layer.runs.iter_mut().enumerate() {
                        if run.as_ref().is_some_and(|run| gone(run.meta.newest_ms)) {
                            *run = None;
                            layer.live &= !(1 << column);
                        }
                    }
                }
                closed.layers.retain(|layer| layer.live != 0);
            })
        })
    }

    pub(crate) fn keys(&self) -> u64 {
        self.open.keys() as u64 + self.closed.keys()
    }

    pub(crate) fn bytes(&self) -> u64 {
        let planes: u64 = self.planes.iter().map(|plane| plane.plane.bytes()).sum();
        let spare = self.spare.as_ref().map_or(0, |spare| spare.bytes() as u64);
        spare + self.open.bytes() as u64 + planes + self.closed.bytes()
    }

    /// Oldest first.
    pub(crate) fn stats(&self) -> Vec<SlotStats> {
        let of_table = |table: &Table, kind| SlotStats {
            number: table.generation,
            kind,
            event_ms: (table.keys() > 0).then_some((table.oldest_ms, table.newest_ms)),
            keys: table.keys() as u64,
            memory_bytes: table.bytes() as u64,
            filter_bits: 0,
            false_positives: 0,
        };
        let of_run = |run: &Run, plane: Option<&Plane>| SlotStats {
            number: run.generation,
            kind: SlotKind::Sealed,
            event_ms: Some((run.meta.oldest_ms, run.meta.newest_ms)),
            keys: run.meta.keys,
            memory_bytes: run.bytes() + plane.map_or(0, |plane| plane.bytes() / COLUMNS as u64),
            filter_bits: plane.map_or(0, |plane| plane.bytes() / COLUMNS as u64 * 8),
            false_positives: run.false_positives(),
        };
        let tables = self.closed.tables.iter().map(|table| of_table(table, SlotKind::Closed));
        let sealed = self
            .closed
            .layers
            .iter()
            .flat_map(|layer| layer.runs.iter().flatten().map(|run| of_run(run, Some(&layer.plane))));
        let bare = self.closed.bare.iter().map(|run| of_run(run, None));
        let open = (self.open.keys() > 0).then(|| of_table(&self.open, SlotKind::Open));
        let mut all: Vec<_> = tables.chain(sealed).chain(bare).chain(open).collect();
        all.sort_by_key(|slot| slot.number);
        all
    }

    /// A key that is settled again: the open slot has it from now on, and stays as long as the slot that has
    /// had it so far, or what was known before would be found again.
    pub(crate) fn replace(&mut self, entry: &Entry, old: &Found) {
        self.open.remove(&entry.fingerprint);
        self.open.insert_absent(entry);
        self.open.newest_ms = self.open.newest_ms.max(old.newest_ms);
    }
}

impl Closed {
    fn put(&mut self, run: Arc<Run>, place: Option<&Place>) {
        let Some(place) = place else { return self.bare.push(run) };
        let known = self.layers.iter().position(|layer| Arc::ptr_eq(&layer.plane, &place.plane));
        let at = known.unwrap_or_else(|| {
            self.layers.push(Layer::new(Arc::clone(&place.plane)));
            self.layers.len() - 1
        });
        self.layers[at].live |= 1 << place.column;
        self.layers[at].runs[place.column] = Some(run);
    }

    /// The columns of a plane that are asked.
    fn live(&self, plane: &Arc<Plane>) -> u16 {
        let layer = self.layers.iter().find(|layer| Arc::ptr_eq(&layer.plane, plane));
        layer.map_or(0, |layer| layer.live)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Digest, Entry, Settled, testing::key};

    /// Where the memory budget was no bound, slots that were closed because their table had no room left were never followed by
    /// larger ones: 10^8 keys were in 250 slots in place of 15, and each check asked 16 planes.
    #[test]
    fn slots_grow_until_they_are_as_long_as_they_should_be() {
        const WIDTH_MS: i64 = 1_000_000;
        const EACH: i64 = 1_000;
        let mut slots = Slots::new(SlotSizes::new(WIDTH_MS, 1 << 32), 1);
        let mut keys_of = Vec::new();
        // Of a key a millisecond.
        for now_ms in (0..4_500_000).step_by(EACH as usize) {
            if slots.is_due(Some(now_ms), EACH as u64) {
                keys_of.push(slots.open.keys());
                drop(slots.close(now_ms as u64, now_ms as u64 + 1, Some(now_ms)));
            }
            for number in now_ms..now_ms + EACH {
                slots.open.insert_absent(&Entry {
                    fingerprint: key(number as u64),
                    digest: Digest(0),
                    event_ms: number,
                    settled: Settled::Written,
                });
            }
        }
        assert!(keys_of[0] < 500_000, "{keys_of:?}");
        assert!(keys_of[2..].iter().all(|keys| (800_000..=1_000_000).contains(keys)), "{keys_of:?}");
    }
}
