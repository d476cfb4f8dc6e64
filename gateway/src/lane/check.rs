//! Check: what is known of each record, and what is to become of it (P7).

use std::collections::{BTreeMap, HashSet};

use adapters::sink::{Mode, ShardStep};
use dedup_store::{Fingerprint, Item, Settled, StoreError, Verdict};
use tokio::time::Instant;

use super::{
    judge::{Fate, LatePolicy, Rules, Via, judge, judge_unwritable},
    run::{CALL_SLOT, DeadRecord, Flight, InFlight, Lane, POSITIONS_ONLY, Parked, WaitsFor},
    shard::OwnedShard,
    works::Taken,
};
use crate::{
    clock::wall_ms,
    metrics::Stage,
    naming::Named,
    outcome::{Answer, Problem},
};

/// Whether the store is asked about a record. A caller's record that cannot be written is answered without: its key stays
/// free, so that a corrected record with the same key is new.
fn claimable(named: &Named, via: Via) -> bool {
    named.fingerprint.is_some() && (named.problem.is_none() || via == Via::Relay)
}

impl Lane {
    /// Takes up to a batch of records, asks the store, and decides each record's fate.
    pub(super) fn check(&mut self) -> Result<Option<Flight>, StoreError> {
        let started = Instant::now();
        let route = self.route.clone();
        let rules = &route.rules;
        if self.slots.is_empty() {
            self.answer_notes_without_shards();
        }
        self.unpark = false;
        let candidates = self.candidates(rules);
        let items: Vec<Item> = candidates.iter().filter_map(|record| self.item(record, rules)).collect();
        let mut verdicts = Vec::with_capacity(items.len());
        // Held over the claim: a store that is being rebuilt gives no verdicts (P6).
        let history = route.history.read();
        if *history != self.history {
            candidates.iter().rev().for_each(|record| self.queue.push_front(record.taken));
            self.recheck = true;
            return Ok(None);
        }
        // Arrival is the wall clock or F, whichever is higher, so it may lie ahead of a clock that was set back (P11).
        let unbounded = route.arrival || planted!(AheadTaken);
        let ahead_ms = if unbounded { i64::MAX } else { wall_ms().saturating_add(rules.max_ahead_ms) };
        let claimed = route.ask_store(|store| store.claim(self.id, ahead_ms, &items, &mut verdicts));
        drop(history);
        if let Err(fault) = claimed {
            if rules.pass_unchecked && !matches!(fault, StoreError::Full { .. }) {
                route.metrics.unchecked(items.len() as u64);
                verdicts = vec![Verdict::New { late: true }; items.len()];
            } else {
                candidates.iter().rev().for_each(|record| self.queue.push_front(record.taken));
                return Err(fault);
            }
        }
        let flight = self.decide(candidates, verdicts, rules);
        route.metrics.observe(Stage::Check, started.elapsed());
        Ok(flight)
    }

    /// The next records in order: parked ones first, then the queue, up to a batch.
    fn candidates(&mut self, rules: &Rules) -> Vec<InFlight> {
        let mut candidates = Vec::with_capacity(self.parked.len() + self.queue.len().min(rules.max_records));
        for parked in std::mem::take(&mut self.parked) {
            candidates.extend(self.candidate(parked.taken));
        }
        let (most, mut bytes) = (candidates.len() + rules.max_records, 0);
        while candidates.len() < most && bytes < rules.max_bytes {
            let Some(taken) = self.queue.pop_front() else { break };
            if let Some(record) = self.candidate(taken) {
                bytes += record.named().row.len();
                candidates.push(record);
            }
        }
        candidates
    }

    /// The record, unless it is not this lane's any more, or was settled before (P7.1).
    fn candidate(&mut self, taken: Taken) -> Option<InFlight> {
        let work = self.works.get(taken.work);
        let (via, chunk) = (work.via, work.chunk.clone());
        let named = &chunk.records[taken.index as usize];
        let slot = if via == Via::Call { CALL_SLOT } else { named.shard };
        if via == Via::Relay {
            let shard = self.slots.get(&slot);
            let current = shard.is_some_and(|shard| {
                self.works.is_current(taken, slot, shard.generation) || planted!(OldGenerationTaken)
            });
            let replay = shard.zip(named.position).is_some_and(|(shard, offset)| shard.is_replay(offset));
            let replay = replay && !planted!(ReplayCounted);
            if replay {
                self.route.metrics.replayed(1);
            }
            if !current || replay {
                self.works.drop_record(taken);
                return None;
            }
        }
        Some(InFlight { taken, via, slot, step: 0, chunk })
    }

    fn item(&self, record: &InFlight, rules: &Rules) -> Option<Item> {
        let named = record.named();
        if !claimable(named, record.via) {
            return None;
        }
        let floor = |shard: &OwnedShard| shard.admission_ms(rules.lateness_ms, rules.window_ms);
        let floor_ms = self.slots.get(&record.slot).map_or(i64::MIN, floor);
        // Arrival = max(wall clock, F) (P11): F may have moved on while the record waited for its turn.
        let event_ms = if self.route.arrival { named.event_ms.max(floor_ms) } else { named.event_ms };
        Some(Item {
            fingerprint: named.fingerprint?,
            digest: named.digest,
            event_ms,
            floor_ms,
            admit_late: rules.late(record.via) == LatePolicy::VerifyInSink || planted!(LateIsNew),
            replay_dead_letter: false,
        })
    }

    /// Fates to a batch: answers what has its outcome, parks what must wait, and steps each shard that moves.
    fn decide(&mut self, candidates: Vec<InFlight>, verdicts: Vec<Verdict>, rules: &Rules) -> Option<Flight> {
        let mut flight = Flight {
            rows: Vec::with_capacity(candidates.len()),
            letters: Vec::new(),
            notes: std::mem::take(&mut self.notes),
            slots: Vec::new(),
            steps: Vec::new(),
            known_new: rules.mode == Mode::Insert && rules.key_within_row_key,
        };
        let mut verdicts = verdicts.into_iter();
        let mut released: Vec<Fingerprint> = Vec::new();
        let mut stopped: BTreeMap<u32, String> = BTreeMap::new();
        // P7: a parked record parks later records of its row key too, or they would overtake it.
        let mut blocked: HashSet<Box<[u8]>> = HashSet::new();
        // Keys of such records: copies of them wait for the same earlier record.
        let mut yielded: HashSet<Fingerprint> = HashSet::new();
        // The relay stops at a record of these slots, once what came before it is in.
        let mut deferred: BTreeMap<u32, Vec<Taken>> = BTreeMap::new();
        for record in candidates {
            let named = record.named();
            let verdict = if claimable(named, record.via) { verdicts.next() } else { None };
            let claimed = matches!(verdict, Some(Verdict::New { .. }));
            if stopped.contains_key(&record.slot) {
                released.extend(named.fingerprint.filter(|_| claimed));
                self.works.drop_record(record.taken);
                continue;
            }
            if let Some(later) = deferred.get_mut(&record.slot) {
                released.extend(named.fingerprint.filter(|_| claimed));
                if let (Some(offset), Some(shard)) = (named.position, self.slots.get_mut(&record.slot)) {
                    shard.park(offset);
                }
                later.push(record.taken);
                continue;
            }
            let mut fate = match (verdict, named.problem.as_deref()) {
                (None | Some(Verdict::New { .. }), Some(problem)) => {
                    judge_unwritable(problem, record.via, rules)
                }
                (Some(verdict), _) => judge(verdict, named, record.via, rules),
                (None, None) => {
                    judge_unwritable(&Problem::KeyMissing("the record has no key".into()), record.via, rules)
                }
            };
            let row_key = record.chunk.slice(&named.row_key);
            let mut waits_for = WaitsFor::Key;
            match &fate {
                Fate::Deliver { .. } if !blocked.is_empty() && blocked.contains(row_key) => {
                    released.extend(named.fingerprint);
                    yielded.extend(named.fingerprint);
                    (fate, waits_for) = (Fate::Park, WaitsFor::Earlier);
                }
                Fate::Park if named.fingerprint.is_some_and(|key| yielded.contains(&key)) => {
                    waits_for = WaitsFor::Earlier;
                }
                // A letter that settles no key and lies beyond the position would be written again if it were read again.
                Fate::DeadLetter { settle, .. }
                    if !(*settle && claimed)
                        && self.waits_before(&record)
                        && !planted!(LetterBeyondPosition) =>
                {
                    released.extend(named.fingerprint.filter(|_| claimed));
                    (fate, waits_for) = (Fate::Park, WaitsFor::Earlier);
                }
                _ => {}
            }
            if let (Some(offset), Some(shard)) = (named.position, self.slots.get_mut(&record.slot)) {
                match fate {
                    Fate::Park | Fate::Stop(_) => shard.park(offset),
                    _ => shard.take(offset),
                }
            }
            match fate {
                Fate::Deliver { late } => {
                    flight.known_new &= !late;
                    flight.rows.push(record);
                }
                Fate::Answer { outcome, first, problem } => {
                    let answer = Answer { outcome, fingerprint: named.fingerprint, first, problem };
                    self.finish(&record, answer);
                }
                Fate::DeadLetter { kind, reason, settle } => {
                    if claimed && !settle {
                        released.extend(named.fingerprint);
                    }
                    flight.letters.push(DeadRecord { record, kind, reason, settle: settle && claimed });
                }
                Fate::Park => {
                    if rules.mode != Mode::Insert && !row_key.is_empty() && !planted!(RowOvertaken) {
                        blocked.insert(row_key.into());
                    }
                    self.parked.push_back(Parked { taken: record.taken, on: waits_for });
                }
                Fate::Stop(reason) => {
                    released.extend(named.fingerprint.filter(|_| claimed));
                    if flight.records().any(|other| other.slot == record.slot) {
                        deferred.insert(record.slot, vec![record.taken]);
                    } else {
                        self.works.drop_record(record.taken);
                        stopped.insert(record.slot, reason);
                    }
                }
            }
        }
        if !released.is_empty() {
            self.route.store.release(self.id, &released);
            self.route.changed.notify_waiters();
        }
        for (slot, reason) in stopped {
            self.stop_slot(slot, &reason);
        }
        let mut again: Vec<Taken> = deferred.into_values().flatten().collect();
        again.sort_unstable_by_key(|taken| taken.order);
        again.into_iter().rev().for_each(|taken| self.queue.push_front(taken));
        if self.step(&mut flight) {
            return Some(flight);
        }
        self.notes = flight.notes;
        None
    }

    /// A lane that owns no shard can keep no fact. There is none of its own to take back either.
    fn answer_notes_without_shards(&mut self) {
        for (entry, reply) in self.notes.drain(..) {
            let forgotten = entry.settled == Settled::Forgotten;
            let answer =
                if forgotten { Ok(()) } else { Err("this lane owns no shard now; try again".into()) };
            drop(reply.send(answer));
        }
    }

    /// Whether the record's position is held back by one before it.
    fn waits_before(&self, record: &InFlight) -> bool {
        let shard = self.slots.get(&record.slot);
        shard.zip(record.named().position).is_some_and(|(shard, offset)| shard.waits_before(offset))
    }

    /// Gives the flight its steps; false if there is nothing to send.
    fn step(&mut self, flight: &mut Flight) -> bool {
        let mut latest: BTreeMap<u32, Option<i64>> = BTreeMap::new();
        for record in &flight.rows {
            let seen = latest.entry(record.slot).or_default();
            *seen = (*seen).max(Some(record.named().event_ms));
        }
        // A parked record came in time: the floor must not pass it while it waits.
        for parked in &self.parked {
            let named = self.works.named(parked.taken);
            let slot =
                if self.works.get(parked.taken.work).via == Via::Call { CALL_SLOT } else { named.shard };
            if let Some(Some(seen)) = latest.get_mut(&slot) {
                *seen = (*seen).min(named.event_ms.saturating_add(self.route.rules.lateness_ms));
            }
        }
        for letter in &flight.letters {
            latest.entry(letter.record.slot).or_default();
        }
        // A partition that has brought nothing yet holds no fact, and has no position to move with.
        let begun = |slot: &u32, shard: &OwnedShard| *slot == CALL_SLOT || shard.prefix().is_some();
        let any_begun = self.slots.iter().any(|(slot, shard)| begun(slot, shard));
        let for_notes =
            self.slots.iter().filter(|(slot, shard)| !any_begun || begun(slot, shard)).map(|(&slot, _)| slot);
        if !flight.notes.is_empty()
            && let Some(slot) = for_notes.clone().next_back()
        {
            let seen = latest.entry(slot).or_default();
            // Effects take time forward as records do, or a route of effects alone would never forget.
            if self.route.arrival {
                let effects = flight
                    .notes
                    .iter()
                    .map(|(note, _)| note)
                    .filter(|note| note.settled != Settled::Forgotten);
                *seen = (*seen).max(effects.map(|note| note.event_ms).max());
            }
        }
        // A key is taken back in every shard, for any of them may hold its fact (P12).
        if flight.notes.iter().any(|(note, _)| note.settled == Settled::Forgotten) {
            for_notes.for_each(|slot| {
                latest.entry(slot).or_default();
            });
        }
        if latest.is_empty() && self.positions_at.elapsed() < POSITIONS_ONLY {
            return false;
        }
        for (&slot, shard) in &self.slots {
            if slot != CALL_SLOT && shard.prefix() > shard.position {
                latest.entry(slot).or_default();
            }
        }
        let mut steps: Vec<(u32, ShardStep)> = latest
            .into_iter()
            .filter_map(|(slot, seen)| Some((slot, self.slots.get(&slot)?.step(seen))))
            .collect();
        // In the order of their ids, so that all owners lock shard rows in one order (P4).
        steps.sort_by(|a, b| a.1.shard.cmp(&b.1.shard));
        (flight.slots, flight.steps) = steps.into_iter().unzip();
        if planted!(OffsetBeforePosition) {
            for (&slot, step) in flight.slots.iter().zip(&flight.steps) {
                let position = step.position.unwrap_or_default();
                self.events
                    .iter()
                    .for_each(|events| drop(events.send(super::FromLane::Progress { slot, position })));
            }
        }
        let step_of = |slot: u32| flight.slots.iter().position(|&s| s == slot).unwrap_or_default();
        let records =
            flight.rows.iter_mut().chain(flight.letters.iter_mut().map(|letter| &mut letter.record));
        for record in records {
            record.step = step_of(record.slot);
        }
        !flight.steps.is_empty()
    }
}
