//! Settle and answer: facts to the store, outcomes to callers, positions to the Kafka door.

use std::{collections::BTreeSet, time::Duration};

use adapters::sink::{Receipts, RowOutcome};
use dedup_store::{Block, Fingerprint, StoreError};
use tokio::time::Instant;
use tracing::error;

use super::{
    FromLane,
    judge::{RefusedPolicy, Via},
    run::{CALL_SLOT, Flight, InFlight, Lane, Parked},
    shard::OwnedShard,
    works::Taken,
};
use crate::{
    clock::wall_ms,
    metrics::Stage,
    outcome::{Answer, Outcome, Problem},
};

impl Lane {
    /// The batch is in: facts to the store, answers to callers, positions to the Kafka door.
    pub(super) async fn settle(&mut self, flight: Flight, receipts: &Receipts, blocks: Vec<Block>) {
        let started = Instant::now();
        let route = self.route.clone();
        if *route.history.read() != self.history {
            // The sink went back meanwhile (P6): whether the batch is in its new history is learnt from its marks, and until
            // then its keys stay claimed.
            self.recheck = true;
            // If it is, its records are not read again, and have had their outcome.
            self.tally_relayed(&flight, receipts);
            if !self.ready(true).await {
                return self.leave_unknown(flight);
            }
            return self.put_back(flight);
        }
        let history = route.history.read();
        if *history != self.history {
            drop(history);
            self.recheck = true;
            self.tally_relayed(&flight, receipts);
            return self.put_back(flight);
        }
        for (slot, step) in flight.slots.iter().zip(&flight.steps) {
            if let Some(shard) = self.slots.get_mut(slot) {
                shard.advance(step);
            }
        }
        let checkpoints: Vec<_> =
            flight.slots.iter().filter_map(|slot| self.slots.get(slot).map(OwnedShard::checkpoint)).collect();
        if let Err(fault) = route.ask_store(|store| store.settle(&checkpoints, &blocks, wall_ms())) {
            // The mark in the sink holds the facts (rule 6); the store answers nothing any more until it is reopened.
            error!(route = %route.name, lane = self.id, "{fault}");
        }
        drop(history);
        route.metrics.observe(Stage::Settle, started.elapsed());
        let answering = Instant::now();
        let relay_refusal = flight.relays();
        let settles = relay_refusal || route.rules.refused == RefusedPolicy::Settle;
        let mut freed: Vec<Fingerprint> = Vec::new();
        let mut silent: BTreeSet<u32> = BTreeSet::new();
        let outcomes = receipts.rows.iter().map(Some).chain(std::iter::repeat(None));
        for (record, outcome) in flight.rows.iter().zip(outcomes) {
            let (outcome, problem) = match outcome {
                Some(RowOutcome::Written) => (Outcome::Written, None),
                Some(RowOutcome::Updated) => (Outcome::Updated, None),
                Some(RowOutcome::Stale) => (Outcome::Stale, None),
                Some(RowOutcome::Refused { reason }) => {
                    if !settles && !planted!(RefusedKeyKept) {
                        freed.extend(record.named().fingerprint);
                    }
                    let outcome = if relay_refusal { Outcome::DeadLettered } else { Outcome::Rejected };
                    (outcome, Some(Problem::Refused(reason.clone())))
                }
                // Silence is not success (rule 5).
                None => {
                    freed.extend(record.named().fingerprint);
                    silent.insert(record.slot);
                    (Outcome::Unknown, Some(Problem::OutcomeUnknown))
                }
            };
            let answer = Answer { outcome, fingerprint: record.named().fingerprint, first: None, problem };
            self.finish(record, answer);
        }
        for letter in &flight.letters {
            let fingerprint = letter.record.named().fingerprint;
            let answer = Answer { outcome: Outcome::DeadLettered, fingerprint, first: None, problem: None };
            self.finish(&letter.record, answer);
        }
        if !freed.is_empty() {
            route.store.release(self.id, &freed);
        }
        self.positions_settled(&flight);
        for (_, reply) in flight.notes {
            drop(reply.send(Ok(())));
        }
        // Whatever stood in the way of this batch (a place for its dead letters) does so no more.
        route.set_trouble(self.id, None);
        for slot in silent.into_iter().filter(|slot| *slot != CALL_SLOT) {
            self.stop_slot(slot, "the sink took a batch and did not say what became of each record of it");
        }
        route.changed.notify_waiters();
        route.metrics.observe(Stage::Answer, answering.elapsed());
    }

    /// Positions are in the sink: what they cover is counted, and the group's offsets may follow.
    fn positions_settled(&mut self, flight: &Flight) {
        self.positions_at = Instant::now();
        for (slot, step) in flight.slots.iter().zip(&flight.steps) {
            self.count_covered(*slot, step.position);
            if let (Some(events), Some(shard)) = (&self.events, self.slots.get(slot))
                && let Some(position) = shard.position
            {
                drop(events.send(FromLane::Progress { slot: *slot, position }));
            }
        }
        // Of shards that were handed over, the next owner counts what it reads again.
        self.tally.retain(|slot, _| self.slots.contains_key(slot));
    }

    /// The outcomes that a relay's records had lie below the sink's position: none of them is read again.
    pub(super) fn count_covered(&mut self, slot: u32, position: Option<i64>) {
        let mut counts = [0; Outcome::ALL.len()];
        if let Some(tally) = self.tally.get_mut(&slot) {
            tally.retain(|(offset, outcome)| {
                let covered = position.is_some_and(|position| *offset < position);
                if covered {
                    counts[*outcome as usize] += 1;
                }
                !covered
            });
        }
        for (outcome, records) in Outcome::ALL.into_iter().zip(counts).filter(|(_, records)| *records > 0) {
            self.route.metrics.count(outcome, records);
        }
    }

    /// What a relay's records of a batch come to, if the sink turns out to have it: counted when their shards are adopted.
    fn tally_relayed(&mut self, flight: &Flight, receipts: &Receipts) {
        let rows = flight.rows.iter().zip(&receipts.rows).map(|(record, outcome)| {
            let outcome = match outcome {
                RowOutcome::Written => Outcome::Written,
                RowOutcome::Updated => Outcome::Updated,
                RowOutcome::Stale => Outcome::Stale,
                RowOutcome::Refused { .. } => Outcome::DeadLettered,
            };
            (record, outcome)
        });
        let letters = flight.letters.iter().map(|letter| (&letter.record, Outcome::DeadLettered));
        for (record, outcome) in rows.chain(letters).filter(|(record, _)| record.via == Via::Relay) {
            if let Some(offset) = record.named().position {
                self.tally.entry(record.slot).or_default().push((offset, outcome));
            }
        }
    }

    /// The record has its outcome: counted once, then told.
    pub(super) fn finish(&mut self, record: &InFlight, answer: Answer) {
        match record.via {
            Via::Call => {
                self.route.metrics.count(answer.outcome, 1);
                self.works.answer(record.taken, answer);
            }
            Via::Relay => {
                if let Some(offset) = record.named().position {
                    self.tally.entry(record.slot).or_default().push((offset, answer.outcome));
                }
                self.works.drop_record(record.taken);
            }
        }
    }

    /// Nothing of the batch is in the sink: its claims are given back and its records queue up again, in order, and with them the
    /// parked ones: were those to stay ahead, they would overtake what they came after (P8).
    pub(super) fn put_back(&mut self, flight: Flight) {
        let keys: Vec<Fingerprint> =
            flight.records().filter_map(|record| record.named().fingerprint).collect();
        if !planted!(ClaimsKeptAfterFailure) {
            self.route.store.release(self.id, &keys);
        }
        let mut again: Vec<Taken> = self.parked.drain(..).map(|parked| parked.taken).collect();
        for record in flight.records() {
            // Records of a shard that is read again meanwhile are dropped when their turn comes, and must not hold its position.
            if let (Some(offset), Some(shard)) = (record.named().position, self.slots.get_mut(&record.slot))
                && (self.works.is_current(record.taken, record.slot, shard.generation)
                    || planted!(StaleBatchHoldsPosition))
            {
                shard.park(offset);
            }
            again.push(record.taken);
        }
        if !planted!(BatchBehindParked) {
            again.sort_unstable_by_key(|taken| taken.order);
        }
        again.into_iter().rev().for_each(|taken| self.queue.push_front(taken));
        self.notes.splice(..0, flight.notes);
        self.route.changed.notify_waiters();
    }

    /// The lane ends before it is known whether the batch is in: callers hear that, and its keys stay claimed.
    pub(super) fn leave_unknown(&mut self, flight: Flight) {
        self.unresolved = true;
        let (calls, relayed): (Vec<&InFlight>, Vec<&InFlight>) =
            flight.records().partition(|record| record.via == Via::Call);
        relayed.into_iter().for_each(|record| self.works.drop_record(record.taken));
        self.answer_all(calls.into_iter().map(|record| record.taken).collect(), &Problem::OutcomeUnknown);
        self.notes.splice(..0, flight.notes);
        self.answer_unavailable("the route ends, and the sink does not say what became of a batch");
    }

    /// Copies that waited for `wait` are told that the first is still in flight.
    pub(super) fn expire_waits(&mut self) {
        let wait = Duration::from_millis(self.route.rules.wait_ms);
        let works = &self.works;
        let over = |parked: &Parked| {
            let work = works.get(parked.taken.work);
            work.via == Via::Call && work.received.elapsed() >= wait
        };
        if self.parked.iter().any(over) {
            let (over, waiting): (Vec<Parked>, Vec<Parked>) = self.parked.iter().copied().partition(over);
            self.parked = waiting.into();
            self.unpark = true;
            self.answer_all(over.into_iter().map(|parked| parked.taken).collect(), &Problem::InFlight);
        }
    }

    /// The lane ends: nobody waits any more for what others hold. A relay's records are read again, and with them all that it has read
    /// behind them, which would else overtake them (P8).
    pub(super) fn answer_parked(&mut self) {
        let (calls, relayed) =
            self.take_calls(|lane| lane.parked.drain(..).map(|parked| parked.taken).collect());
        self.answer_all(calls, &Problem::InFlight);
        if !relayed.is_empty() {
            let (calls, behind) = self.take_calls(|lane| lane.queue.drain(..).collect());
            self.queue = calls.into();
            behind.into_iter().for_each(|taken| self.works.drop_record(taken));
        }
        relayed.into_iter().for_each(|taken| self.works.drop_record(taken));
    }

    /// Callers whose records were not tried hear why; a relay's records wait.
    pub(super) fn answer_unavailable(&mut self, reason: &str) {
        let (calls, relayed) = self.take_calls(|lane| {
            let parked = lane.parked.drain(..).map(|parked| parked.taken);
            parked.chain(lane.queue.drain(..)).collect()
        });
        self.queue = relayed.into();
        self.answer_all(calls, &Problem::Unavailable(reason.into()));
        for (_, reply) in self.notes.drain(..) {
            drop(reply.send(Err(reason.into())));
        }
    }

    /// Callers' records and a relay's, of those taken out.
    fn take_calls(&mut self, take: impl Fn(&mut Self) -> Vec<Taken>) -> (Vec<Taken>, Vec<Taken>) {
        let taken = take(self);
        taken.into_iter().partition(|taken| self.works.get(taken.work).via == Via::Call)
    }

    fn answer_all(&mut self, calls: Vec<Taken>, problem: &Problem) {
        self.route.metrics.count(Outcome::Unknown, calls.len() as u64);
        for taken in calls {
            let answer = Answer::unknown(self.works.named(taken).fingerprint, problem.clone());
            self.works.answer(taken, answer);
        }
    }

    /// The store gives no verdicts: full (room comes with expiry), or stopped for good (rule 7).
    pub(super) async fn store_fault(&mut self, fault: &StoreError) {
        let reason = fault.to_string();
        self.route.set_trouble(self.id, Some(reason.clone()));
        self.answer_unavailable(&reason);
        self.recheck = true;
        self.pause().await;
    }
}
