//! What a store knows, in memory, and every decision over it: [`State`]. Pure: no IO, no clock.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use hashbrown::HashTable;

use crate::{
    block::Block,
    disk::Fail,
    fact::{Entry, Known, Settled},
    fingerprint::{Digest, Fingerprint},
    floors::{Checkpoint, Clock, Floors, Spans},
    slots::{Closed, SlotSizes, Slots},
    table::{Found, bits},
};

/// One key to be checked.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    /// The key.
    pub fingerprint: Fingerprint,
    /// Of this record's payload.
    pub digest: Digest,
    /// Event time, ms.
    pub event_ms: i64,
    /// Admission floor of the item's shard, ms (the store raises it to its own floor + window).
    pub floor_ms: i64,
    /// Claim it also below the floor: the sink itself will tell a copy (`late = "verify-in-sink"`).
    pub admit_late: bool,
    /// It comes from the dead letters: a key that is settled as refused is no hit for it (P2). All else is checked as ever.
    pub replay_dead_letter: bool,
}

/// What is known of a key, in the order of P7.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Not known; now claimed by the caller. `late` only with [`Item::admit_late`].
    New {
        /// It lies below the admission floor.
        late: bool,
    },
    /// Settled before with the same digest.
    Duplicate(Settled),
    /// Settled before with another digest.
    Mismatch(Settled),
    /// Claimed and not yet settled, by `lane` (perhaps earlier in this very batch).
    InFlight {
        /// Who holds the claim.
        lane: u32,
        /// Whether the claimed record has the same digest.
        same: bool,
    },
    /// A miss below the floor: never new.
    Late {
        /// The floor that it fell below, ms.
        floor_ms: i64,
    },
    /// A miss further ahead than the limit.
    Ahead {
        /// The limit, ms.
        limit_ms: i64,
    },
}

/// A key that a lane has taken and not yet settled.
#[derive(Clone, Copy)]
struct Claim {
    fingerprint: Fingerprint,
    /// Digest in the low 56 bits; the top bit says that no fact was there when it was claimed.
    packed: u64,
    lane: u32,
}

const NO_FACT: u64 = 1 << 63;

/// Keys whose place in the open table is touched before they are looked at.
const FEW: usize = 32;

/// A key that was taken back (P12), so that an older block of a shard that says so, learnt again, does not bring it back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Tombstone {
    /// Who says so, and since which batch.
    pub(crate) by: Vec<(Arc<str>, i64)>,
    /// A shard has settled the key again after it had taken it back: another's word of the same, learnt later, is older.
    pub(crate) settled_again: bool,
    pub(crate) event_ms: i64,
    /// Slots that were closed before this group hold the key in vain.
    pub(crate) erased: u64,
}

/// The keys that were taken back.
pub(crate) type Tombstones = HashMap<Fingerprint, Tombstone>;

impl Tombstone {
    fn sequence(&self, shard: &str) -> Option<i64> {
        self.by.iter().find(|(by, _)| &**by == shard).map(|(_, sequence)| *sequence)
    }
}

/// All that is known of one route.
#[derive(Clone)]
pub(crate) struct State {
    spans: Spans,
    slots: Slots,
    claims: HashTable<Claim>,
    tombstones: Tombstones,
    clock: Clock,
    /// Facts below it are forgotten (the G of a durable checkpoint), ms.
    floor_ms: i64,
    /// Effects begun and neither settled nor given back.
    intents: HashSet<Fingerprint>,
}

impl State {
    /// `generation`: number of the first slot.
    pub(crate) fn new(spans: Spans, sizes: SlotSizes, generation: u64) -> Self {
        State {
            spans,
            slots: Slots::new(sizes, generation),
            claims: HashTable::new(),
            tombstones: HashMap::new(),
            clock: Clock::new(spans),
            floor_ms: i64::MIN,
            intents: HashSet::new(),
        }
    }

    /// The state of a store that has only these (its facts follow by [`State::learn`]).
    pub(crate) fn restore(&mut self, clock: Clock, floor_ms: i64, intents: HashSet<Fingerprint>) {
        (self.clock, self.floor_ms, self.intents) = (clock, floor_ms, intents);
    }

    /// Drops all but the intents, for what they began may still have happened, and the claims, for their
    /// batches may be on their way to the sink: whoever holds them settles them or gives them back. Who is not idle is still known.
    /// `generation`: of the slot that comes next.
    pub(crate) fn discard(&mut self, generation: u64) {
        let (intents, claims) = (std::mem::take(&mut self.intents), std::mem::take(&mut self.claims));
        let mut clock = std::mem::replace(&mut self.clock, Clock::new(self.spans));
        clock.discard();
        *self = State { intents, claims, clock, ..State::new(self.spans, *self.slots.sizes(), generation) };
    }

    /// One verdict an item, in order, appended to `verdicts`. `closed`: what the closed slots know of each;
    /// nothing if there are none.
    pub(crate) fn claim(
        &mut self,
        lane: u32,
        ahead_ms: i64,
        items: &[Item],
        closed: &[Option<Found>],
        verdicts: &mut Vec<Verdict>,
    ) {
        let admit_ms = self.spans.admit_ms(self.floor_ms);
        self.claims.reserve(items.len(), |claim| bits(&claim.fingerprint));
        verdicts.reserve(items.len());
        for (number, few) in items.chunks(FEW).enumerate() {
            self.slots.open.touch(few.iter().map(|item| &item.fingerprint));
            for (at, item) in few.iter().enumerate() {
                let known = self.known(&item.fingerprint, closed.get(number * FEW + at).copied().flatten());
                verdicts.push(self.claim_one(lane, ahead_ms, admit_ms, item, known));
            }
        }
    }

    /// [`State::claim`] for a store without room: takes no memory for claims. If an item would have to be claimed it answers
    /// false, and `verdicts` stays as it was.
    pub(crate) fn claim_nothing(
        &mut self,
        ahead_ms: i64,
        items: &[Item],
        closed: &[Option<Found>],
        verdicts: &mut Vec<Verdict>,
    ) -> bool {
        let admit_ms = self.spans.admit_ms(self.floor_ms);
        let before = verdicts.len();
        verdicts.extend(items.iter().enumerate().map_while(|(at, item)| {
            let known = self.known(&item.fingerprint, closed.get(at).copied().flatten());
            self.judge(ahead_ms, admit_ms, item, known).err()
        }));
        let all = verdicts.len() - before == items.len();
        if !all {
            verdicts.truncate(before);
        }
        all
    }

    /// What is known of a key of which the closed slots know this.
    #[inline]
    fn known(&self, fingerprint: &Fingerprint, closed: Option<Found>) -> Option<Known> {
        self.found(fingerprint, closed).map(|found| found.known)
    }

    #[inline]
    fn found(&self, fingerprint: &Fingerprint, closed: Option<Found>) -> Option<Found> {
        let erased = |found: &Found| {
            !self.tombstones.is_empty()
                && self.tombstones.get(fingerprint).is_some_and(|tombstone| found.through < tombstone.erased)
        };
        self.slots.open.find(fingerprint).or_else(|| closed.filter(|found| !erased(found)))
    }

    #[inline]
    fn claim_one(
        &mut self,
        lane: u32,
        ahead_ms: i64,
        admit_ms: i64,
        item: &Item,
        known: Option<Known>,
    ) -> Verdict {
        let late = match self.judge(ahead_ms, admit_ms, item, known) {
            Ok(late) => late,
            Err(verdict) => return verdict,
        };
        let packed = item.digest.0 | if known.is_none() { NO_FACT } else { 0 };
        let claim = Claim { fingerprint: item.fingerprint, packed, lane };
        self.claims.insert_unique(bits(&item.fingerprint), claim, |claim| bits(&claim.fingerprint));
        Verdict::New { late }
    }

    /// Whether an item is to be claimed, and is late then; or else its verdict. The order is P7's: what is settled counts at any
    /// age, and a floor only decides over what is not known.
    #[inline]
    fn judge(
        &self,
        ahead_ms: i64,
        admit_ms: i64,
        item: &Item,
        known: Option<Known>,
    ) -> Result<bool, Verdict> {
        if let Some(known) = known {
            let settled = known.settled;
            if !(item.replay_dead_letter && settled.refused()) {
                return Err(if known.same(item.digest) {
                    Verdict::Duplicate(settled)
                } else {
                    Verdict::Mismatch(settled)
                });
            }
        }
        let key = bits(&item.fingerprint);
        if let Some(claim) = self.claims.find(key, |claim| claim.fingerprint == item.fingerprint) {
            return Err(Verdict::InFlight {
                lane: claim.lane,
                same: claim.packed & !NO_FACT == item.digest.0,
            });
        }
        let floor_ms = item.floor_ms.max(admit_ms);
        let late = item.event_ms < floor_ms;
        if late && !item.admit_late {
            return Err(Verdict::Late { floor_ms });
        }
        if item.event_ms > ahead_ms {
            return Err(Verdict::Ahead { limit_ms: ahead_ms });
        }
        Ok(late)
    }

    pub(crate) fn peek(&self, fingerprint: &Fingerprint, closed: Option<Found>) -> Option<Known> {
        self.known(fingerprint, closed)
    }

    /// Gives a claim back, if `lane` holds it.
    pub(crate) fn release(&mut self, lane: u32, fingerprint: &Fingerprint) {
        let held = |claim: &Claim| claim.fingerprint == *fingerprint && claim.lane == lane;
        if let Ok(claim) = self.claims.find_entry(bits(fingerprint), held) {
            claim.remove();
        }
    }

    pub(crate) fn release_lane(&mut self, lane: u32) {
        self.claims.retain(|claim| claim.lane != lane);
    }

    /// What is known of a key, if the open slot or the filters say it; none if the closed slots must be asked.
    pub(crate) fn peek_in_memory(&self, fingerprint: &Fingerprint) -> Option<Option<Known>> {
        match self.slots.open.find(fingerprint) {
            Some(found) => Some(Some(found.known)),
            None => self.slots.closed().surely_lacks(fingerprint).then_some(None),
        }
    }

    /// Whether memory alone does not say what is known of a key.
    #[inline]
    pub(crate) fn must_ask_for(&self, fingerprint: &Fingerprint) -> bool {
        self.slots.open.find(fingerprint).is_none() && !self.slots.closed().surely_lacks(fingerprint)
    }

    /// Whether the closed slots must be asked before this block is learnt: of a key that was claimed as
    /// unknown nothing is there, for whoever learns a key frees its claim.
    pub(crate) fn must_ask(&self, block: &Block) -> bool {
        !self.slots.closed().is_empty() && !block.entries.iter().all(|entry| self.surely_absent(entry))
    }

    fn surely_absent(&self, entry: &Entry) -> bool {
        let claim =
            self.claims.find(bits(&entry.fingerprint), |claim| claim.fingerprint == entry.fingerprint);
        entry.settled != Settled::Forgotten && claim.is_some_and(|claim| claim.packed & NO_FACT != 0)
    }

    /// Takes the facts of a block, in this group, over and frees their claims and intents, in the block's
    /// order. Facts below the floor are forgotten at once, unless they take the place of one that is there
    /// still. `closed`: what the closed slots know of each, if they were asked. Answers with the newest event
    /// time that this block decides over, for the tail that holds it; none if it decides nothing. `freed` is
    /// told the intents that are gone.
    pub(crate) fn learn(
        &mut self,
        block: &Block,
        group: u64,
        closed: Option<&[Option<Found>]>,
        mut freed: impl FnMut(&Fingerprint),
    ) -> Result<Option<i64>, Fail> {
        let mut newest: Option<i64> = None;
        for (at, entry) in block.entries.iter().enumerate() {
            if at % FEW == 0 {
                let few = &block.entries[at..block.entries.len().min(at + FEW)];
                self.slots.open.touch(few.iter().map(|entry| &entry.fingerprint));
            }
            let key = bits(&entry.fingerprint);
            if entry.settled == Settled::Forgotten {
                let found = self.ask(entry, at, closed)?;
                newest = newest.max(Some(self.take_back(block, group, entry, found)));
                continue;
            }
            newest = newest.max(Some(entry.event_ms));
            if !self.intents.is_empty() && self.intents.remove(&entry.fingerprint) {
                freed(&entry.fingerprint);
            }
            let claim = self.claims.find_entry(key, |claim| claim.fingerprint == entry.fingerprint);
            let surely_absent = claim.is_ok_and(|claim| claim.remove().0.packed & NO_FACT != 0);
            if self.taken_back(block, &entry.fingerprint) {
                continue;
            }
            let old = if surely_absent { None } else { self.ask(entry, at, closed)? };
            match old {
                None if entry.event_ms < self.floor_ms => {}
                None => self.slots.open.insert_absent(entry),
                // An effect takes the place of a refusal (P2), also below the floor: the refusal's slot may
                // outlive it.
                Some(old) if old.known.settled.refused() && !entry.settled.refused() => {
                    newest = newest.max(Some(old.newest_ms));
                    let event_ms = entry.event_ms.max(old.known.event_ms);
                    self.slots.replace(&Entry { event_ms, ..*entry }, &old);
                }
                // A fact that was learnt twice stays as it is.
                Some(_) => {}
            }
        }
        Ok(newest)
    }

    /// What is known of the `at`th entry of a block.
    fn ask(&self, entry: &Entry, at: usize, closed: Option<&[Option<Found>]>) -> Result<Option<Found>, Fail> {
        let found = match closed {
            Some(found) => found.get(at).copied().flatten(),
            None => self.slots.closed().find(&entry.fingerprint)?,
        };
        Ok(self.found(&entry.fingerprint, found))
    }

    /// Takes a key back of which this is known; answers with how long that must be remembered.
    fn take_back(&mut self, block: &Block, group: u64, entry: &Entry, found: Option<Found>) -> i64 {
        let tombstone = self.tombstones.entry(entry.fingerprint).or_insert_with(|| Tombstone {
            by: Vec::new(),
            settled_again: false,
            event_ms: entry.event_ms,
            erased: 0,
        });
        match tombstone.by.iter_mut().find(|(by, _)| *by == block.shard) {
            Some((_, sequence)) if *sequence >= block.sequence => return tombstone.event_ms,
            // Taken back once more, whatever came between.
            Some((_, sequence)) => (*sequence, tombstone.settled_again) = (block.sequence, false),
            None => tombstone.by.push((Arc::clone(&block.shard), block.sequence)),
        }
        tombstone.event_ms = tombstone.event_ms.max(entry.event_ms);
        if !tombstone.settled_again {
            tombstone.erased = group;
            self.slots.open.remove(&entry.fingerprint);
            if let Some(found) = found {
                // As long-lived as the slot of the fact that it takes away, whatever time the operator gave
                // it.
                tombstone.event_ms = tombstone.event_ms.max(found.newest_ms);
            }
        }
        tombstone.event_ms
    }

    fn taken_back(&mut self, block: &Block, fingerprint: &Fingerprint) -> bool {
        if self.tombstones.is_empty() {
            return false;
        }
        let Some(tombstone) = self.tombstones.get_mut(fingerprint) else { return false };
        match tombstone.sequence(&block.shard) {
            Some(sequence) if sequence >= block.sequence => true,
            since => {
                tombstone.settled_again |= since.is_some();
                false
            }
        }
    }

    /// Moves a shard's checkpoint on; answers with it as it now stands.
    pub(crate) fn settle_checkpoint(&mut self, checkpoint: &Checkpoint, now_ms: i64) -> Checkpoint {
        self.clock.settle(checkpoint, now_ms).clone()
    }

    /// These shards are not idle, as far as `who` knows.
    pub(crate) fn awaits(&mut self, who: u32, shards: &[Arc<str>], now_ms: i64) {
        self.clock.awaits(who, shards, now_ms);
    }

    /// Moves the watermark on; answers with it.
    pub(crate) fn advance(&mut self, now_ms: i64) -> Option<i64> {
        self.clock.advance(now_ms)
    }

    /// G of a watermark.
    pub(crate) fn retire_ms(&self, watermark_ms: Option<i64>) -> i64 {
        watermark_ms.map_or(i64::MIN, |watermark_ms| self.spans.retire_ms(watermark_ms))
    }

    /// Forgets the slots that lie below `retire_ms`. The floor rises to what they held and no further: what is still known may still
    /// be admitted. Answers with what is to be dropped without a lock.
    pub(crate) fn expire(&mut self, retire_ms: i64) -> Option<Arc<Closed>> {
        self.floor_ms = self.forgets(retire_ms);
        let floor_ms = self.floor_ms;
        self.tombstones.retain(|_, tombstone| tombstone.event_ms >= floor_ms);
        self.slots.retire(retire_ms)
    }

    /// The floor once the slots below `retire_ms` are forgotten.
    pub(crate) fn forgets(&self, retire_ms: i64) -> i64 {
        let newest_ms = self.slots.newest_below(retire_ms);
        self.floor_ms.max(newest_ms.map_or(i64::MIN, |newest_ms| newest_ms.saturating_add(1)))
    }

    pub(crate) fn tombstones(&self) -> &Tombstones {
        &self.tombstones
    }

    /// Those of a block's keys.
    pub(crate) fn tombstones_of(&self, block: &Block) -> impl Iterator<Item = (Fingerprint, Tombstone)> {
        let entries = if self.tombstones.is_empty() { &[][..] } else { &block.entries };
        entries
            .iter()
            .filter_map(|entry| Some((entry.fingerprint, self.tombstones.get(&entry.fingerprint)?.clone())))
    }

    /// At open: a tail follows, at whose start these keys were taken back.
    pub(crate) fn begin_tail(&mut self, generation: u64, tombstones: Tombstones) {
        self.slots.open.generation = generation;
        self.tombstones = tombstones;
    }

    pub(crate) fn watermark_ms(&self) -> Option<i64> {
        self.clock.watermark_ms()
    }

    pub(crate) fn all_slots(&self) -> &Slots {
        &self.slots
    }

    pub(crate) fn all_slots_mut(&mut self) -> &mut Slots {
        &mut self.slots
    }

    pub(crate) fn floor_ms(&self) -> i64 {
        self.floor_ms
    }

    pub(crate) fn floors(&self, now_ms: i64, retire_ms: i64) -> Floors {
        Floors { watermark_ms: self.clock.at(now_ms), retire_ms }
    }

    pub(crate) fn checkpoint(&self, shard: &str) -> Option<&Checkpoint> {
        self.clock.checkpoint(shard)
    }

    pub(crate) fn checkpoints(&self) -> Vec<Checkpoint> {
        let mut all: Vec<_> = self.clock.checkpoints().cloned().collect();
        all.sort_by(|a, b| a.shard.cmp(&b.shard));
        all
    }

    pub(crate) fn intents(&self) -> &HashSet<Fingerprint> {
        &self.intents
    }

    pub(crate) fn intents_mut(&mut self) -> &mut HashSet<Fingerprint> {
        &mut self.intents
    }

    /// Whether a key is claimed and not yet settled.
    pub(crate) fn in_flight(&self, fingerprint: &Fingerprint) -> bool {
        self.claims.find(bits(fingerprint), |claim| claim.fingerprint == *fingerprint).is_some()
    }

    pub(crate) fn claims(&self) -> u64 {
        self.claims.len() as u64
    }

    pub(crate) fn keys(&self) -> u64 {
        self.slots.keys()
    }

    pub(crate) fn width_ms(&self) -> i64 {
        self.slots.sizes().width_ms
    }

    /// Bytes of facts and claims.
    pub(crate) fn bytes(&self) -> u64 {
        self.slots.bytes() + self.claims.allocation_size() as u64
    }
}
