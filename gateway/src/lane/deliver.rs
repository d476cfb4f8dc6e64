//! Deliver: one batch, brought to its end: in the sink, or surely not in it.

use std::{sync::atomic::Ordering, time::Duration};

use adapters::{
    dead_letters::Letter,
    sink::{Batch, DeadLetter, MarkBlock, OnRefused, Receipts, Row, RowOutcome, ShardStep, SinkError},
};
use dedup_store::{Block, Entry, Settled};
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::warn;

use super::{
    judge::{DeadLetterPolicy, RefusedPolicy},
    own::{LAST_PATIENCE, Resolved},
    run::{DeadRecord, Flight, InFlight, Lane},
};
use crate::{clock::jitter, metrics::Stage};

const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MOST: Duration = Duration::from_secs(5);

impl Lane {
    /// Brings the batch to its end: in, or surely not in.
    pub(super) async fn deliver(&mut self, flight: Flight) {
        let started = Instant::now();
        if let Err(reason) = self.write_external_letters(&flight).await {
            self.route.set_trouble(self.id, Some(reason));
            self.put_back(flight);
            self.pause().await;
            return;
        }
        let (result, blocks) = self.attempt(&flight).await;
        self.route.metrics.observe(Stage::Deliver, started.elapsed());
        let fault = match result {
            Ok(receipts) => {
                self.failures = 0;
                return self.settle(flight, &receipts, blocks).await;
            }
            Err(fault) => fault,
        };
        self.route.metrics.sink_error(&fault);
        warn!(route = %self.route.name, lane = self.id, "{fault}");
        match fault {
            SinkError::Unknown { .. } if planted!(RecutAfterUnknown) => self.put_back(flight),
            SinkError::Unknown { .. } if planted!(UnknownTakenAsApplied) => {
                let rows = vec![RowOutcome::Written; flight.rows.len()];
                self.settle(flight, &Receipts { rows }, blocks).await;
            }
            SinkError::Unknown { .. } => match self.resolve(&flight).await {
                Resolved::Applied(receipts, blocks) => self.settle(flight, &receipts, blocks).await,
                // Surely not in: only now may the batch be cut again (rule 3, P13).
                Resolved::NotApplied => self.put_back(flight),
                Resolved::Unresolved => self.leave_unknown(flight),
            },
            SinkError::Fenced { shard, owner, epoch } => {
                // Each earlier attempt was resolved before this one, and this one's fence failed: nothing is in (P4).
                self.fenced(&shard, &owner, epoch);
                self.put_back(flight);
            }
            SinkError::Refused { row, reason } => {
                let found = flight.rows.get(row).map(|record| (record.slot, record.named().position));
                self.put_back(flight);
                if let Some((slot, offset)) = found {
                    let at = offset.map_or_else(String::new, |offset| format!(" at offset {offset}"));
                    self.stop_slot(
                        slot,
                        &format!("the sink refused the record{at}: {reason}; dead_letters = \"stop\""),
                    );
                }
            }
            SinkError::NotApplied { retry: true, reason } => {
                self.put_back(flight);
                self.pause().await;
                if self.route.closing.load(Ordering::Acquire)
                    && self.closing_since.get_or_insert_with(Instant::now).elapsed() >= LAST_PATIENCE
                {
                    // Callers hear, and a relay's records are read again.
                    self.answer_unavailable(&reason);
                    self.gives_up = true;
                }
            }
            SinkError::NotApplied { retry: false, reason } | SinkError::Held { owner: reason, .. } => {
                self.route.set_trouble(self.id, Some(format!("the sink does not take the batch: {reason}")));
                self.put_back(flight);
                self.answer_unavailable(&reason);
                self.pause().await;
                self.recheck = true;
            }
        }
    }

    /// Waits longer after each failure in a row, with jitter so that lanes do not march in step.
    pub(super) async fn pause(&mut self) {
        let most = RETRY_FIRST.saturating_mul(1 << self.failures.min(16)).min(RETRY_MOST);
        self.failures += 1;
        tokio::time::sleep(most.mul_f64(jitter())).await;
    }

    /// One attempt: the batch as it is, and the facts that its marks hold.
    async fn attempt(&mut self, flight: &Flight) -> (Result<Receipts, SinkError>, Vec<Block>) {
        let rules = &self.route.rules;
        let relay = flight.relays();
        let on_refused = match (relay, rules.dead_letters) {
            (false, _) => OnRefused::Report,
            (true, DeadLetterPolicy::Stop) => OnRefused::Abort,
            (true, DeadLetterPolicy::Sink | DeadLetterPolicy::External) => OnRefused::DeadLetter,
        };
        let settle_refused = match (relay, rules.refused) {
            (true, _) => Some(Settled::DeadLettered),
            (false, RefusedPolicy::Settle) => Some(Settled::Rejected),
            (false, RefusedPolicy::Free) => None,
        };
        let hasher = &self.route.hasher;
        let sealed: Mutex<Vec<Block>> = Mutex::new(Vec::new());
        let seal = |outcomes: &[RowOutcome]| {
            let mut entries: Vec<Vec<Entry>> = vec![Vec::new(); flight.steps.len()];
            for (record, outcome) in flight.rows.iter().zip(outcomes) {
                let settled = match outcome {
                    RowOutcome::Written => Some(Settled::Written),
                    RowOutcome::Updated => Some(Settled::Updated),
                    RowOutcome::Stale => Some(Settled::Stale),
                    RowOutcome::Refused { .. } => settle_refused,
                };
                entries[record.step].extend(settled.and_then(|settled| record.entry(settled)));
            }
            for letter in flight.letters.iter().filter(|letter| letter.settle) {
                entries[letter.record.step].extend(letter.record.entry(Settled::DeadLettered));
            }
            for (note, _) in &flight.notes {
                match (note.settled, entries.last_mut()) {
                    (Settled::Forgotten, _) => entries.iter_mut().for_each(|entries| entries.push(*note)),
                    (_, Some(last)) => last.push(*note),
                    (_, None) => {}
                }
            }
            if planted!(MarkLeftOut) {
                for entries in &mut entries {
                    entries.pop();
                }
            }
            let blocks: Vec<(usize, Block)> = entries
                .into_iter()
                .enumerate()
                .filter(|(_, entries)| !entries.is_empty())
                .map(|(step, entries)| {
                    let ShardStep { shard, sequence, .. } = &flight.steps[step];
                    (step, Block::encode(hasher, shard, *sequence, entries))
                })
                .collect();
            let kept = |block: &Block| {
                !planted!(ForgetNotMarked)
                    || block.entries.iter().all(|entry| entry.settled != Settled::Forgotten)
            };
            let marks = blocks
                .iter()
                .filter(|(_, block)| kept(block))
                .map(|(step, block)| MarkBlock {
                    step: *step,
                    min_ms: block.min_ms,
                    max_ms: block.max_ms,
                    count: block.entries.len(),
                    block: block.bytes.clone(),
                })
                .collect();
            *sealed.lock() = blocks.into_iter().map(|(_, block)| block).collect();
            marks
        };
        let rows: Vec<Row<'_>> = flight.rows.iter().map(InFlight::row).collect();
        let letters: Vec<DeadLetter<'_>> = flight
            .letters
            .iter()
            .filter(|_| rules.dead_letters != DeadLetterPolicy::External && !planted!(LetterLeftOut))
            .map(|letter| DeadLetter {
                source: letter.record.source(),
                kind: letter.kind,
                reason: letter.reason.clone(),
            })
            .collect();
        let batch = Batch {
            steps: &flight.steps,
            rows: &rows,
            dead_letters: &letters,
            on_refused,
            known_new: flight.known_new,
            seal: &seal,
        };
        self.route.metrics.batch(rows.len());
        let result = self.session.deliver(&batch).await;
        let sealed = sealed.into_inner();
        if planted!(MarkBeforeWrite) {
            drop(self.route.store.settle(&[], &sealed, crate::clock::wall_ms()));
        }
        (result, sealed)
    }

    /// Dead letters for a topic or a file are durable before their batch is tried (P10).
    async fn write_external_letters(&mut self, flight: &Flight) -> Result<(), String> {
        let Some(target) = &mut self.letters else { return Ok(()) };
        if flight.letters.is_empty() {
            return Ok(());
        }
        let letters: Vec<Letter<'_>> = flight
            .letters
            .iter()
            .map(|letter| letter_of(&self.route.name, &flight.steps[letter.record.step], letter))
            .collect();
        target.write(&letters).await.map_err(|fault| format!("dead letters cannot be kept: {fault}"))
    }
}

fn letter_of<'a>(route: &'a str, step: &'a ShardStep, letter: &'a DeadRecord) -> Letter<'a> {
    let source = letter.record.source();
    Letter {
        route,
        shard: &step.shard,
        position: source.position,
        kind: letter.kind,
        reason: &letter.reason,
        key: source.key,
        event_ms: source.event_ms,
        payload: source.payload,
    }
}
