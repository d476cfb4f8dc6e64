//! How far the route's event time has come, and what follows from it (P11): [`Clock`]. Pure; the caller says what time it is.

use std::{cmp::Ordering, collections::HashMap, sync::Arc};

/// Up to where the facts of one shard are known (the checkpoint row).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checkpoint {
    /// Unit of ownership and order: a Kafka partition or an HTTP lane.
    pub shard: Arc<str>,
    /// Of the last batch settled.
    pub sequence: i64,
    /// Next source position to read (Kafka); none for HTTP.
    pub position: Option<i64>,
    /// How far the shard's event time has surely come, ms.
    pub watermark_ms: i64,
    /// Facts below it are forgotten: nothing below floor + window is admitted (P11).
    pub floor_ms: i64,
}

/// Floors of the whole route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Floors {
    /// Minimum over the shards that are not idle, ms; none before the first settlement.
    pub watermark_ms: Option<i64>,
    /// Retirement floor G = W - lateness - window of the last durable checkpoint: facts below it may be forgotten, ms;
    /// `i64::MIN` before the first.
    pub retire_ms: i64,
}

/// The spans that floors are made of, ms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spans {
    pub(crate) window_ms: i64,
    pub(crate) lateness_ms: i64,
    pub(crate) idle_after_ms: i64,
}

impl Spans {
    /// G of a watermark.
    pub(crate) fn retire_ms(&self, watermark_ms: i64) -> i64 {
        watermark_ms.saturating_sub(self.lateness_ms).saturating_sub(self.window_ms)
    }

    /// What may be new once facts below `floor_ms` are forgotten.
    pub(crate) fn admit_ms(&self, floor_ms: i64) -> i64 {
        if floor_ms == i64::MIN { floor_ms } else { floor_ms.saturating_add(self.window_ms) }
    }
}

struct Shard {
    checkpoint: Checkpoint,
    /// When it was last settled, ms; none since the store was opened. It counts as active until the first call says the
    /// time, so that a shard that is slow to come back does not find itself late.
    seen_ms: Option<i64>,
}

/// Checkpoints of the shards, and the watermark of the route: the minimum over the shards that are not idle. Never goes back.
#[derive(Default)]
pub(crate) struct Clock {
    shards: HashMap<Arc<str>, Shard>,
    watermark_ms: Option<i64>,
}

impl Clock {
    pub(crate) fn restore(checkpoints: Vec<Checkpoint>, watermark_ms: Option<i64>) -> Self {
        let shards = checkpoints
            .into_iter()
            .map(|checkpoint| (Arc::clone(&checkpoint.shard), Shard { checkpoint, seen_ms: None }))
            .collect();
        Clock { shards, watermark_ms }
    }

    pub(crate) fn watermark_ms(&self) -> Option<i64> {
        self.watermark_ms
    }

    pub(crate) fn checkpoint(&self, shard: &str) -> Option<&Checkpoint> {
        Some(&self.shards.get(shard)?.checkpoint)
    }

    pub(crate) fn checkpoints(&self) -> impl Iterator<Item = &Checkpoint> {
        self.shards.values().map(|shard| &shard.checkpoint)
    }

    /// Takes a checkpoint over. One that lies behind the known one is ignored but for its watermark and floor, which only rise.
    /// Answers with the checkpoint as it now stands.
    pub(crate) fn settle(&mut self, given: &Checkpoint, now_ms: i64) -> &Checkpoint {
        let shard = self
            .shards
            .entry(Arc::clone(&given.shard))
            .or_insert_with(|| Shard { checkpoint: given.clone(), seen_ms: None });
        shard.seen_ms = Some(shard.seen_ms.map_or(now_ms, |seen| seen.max(now_ms)));
        let known = &mut shard.checkpoint;
        match given.sequence.cmp(&known.sequence) {
            Ordering::Greater => (known.sequence, known.position) = (given.sequence, given.position),
            Ordering::Equal => known.position = known.position.max(given.position),
            Ordering::Less => {}
        }
        known.watermark_ms = known.watermark_ms.max(given.watermark_ms);
        known.floor_ms = known.floor_ms.max(given.floor_ms);
        known
    }

    /// The watermark at `now_ms`. All shards idle: it holds.
    pub(crate) fn advance(&mut self, now_ms: i64, spans: &Spans) -> Option<i64> {
        for shard in self.shards.values_mut() {
            shard.seen_ms.get_or_insert(now_ms);
        }
        self.watermark_ms = self.at(now_ms, spans);
        self.watermark_ms
    }

    /// [`Clock::advance`] without moving.
    pub(crate) fn at(&self, now_ms: i64, spans: &Spans) -> Option<i64> {
        let active = self.shards.values().filter(|shard| {
            shard.seen_ms.is_none_or(|seen| now_ms.saturating_sub(seen) < spans.idle_after_ms)
        });
        self.watermark_ms.max(active.map(|shard| shard.checkpoint.watermark_ms).min())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPANS: Spans = Spans { window_ms: 1_000, lateness_ms: 100, idle_after_ms: 50 };

    fn checkpoint(shard: &str, sequence: i64, watermark_ms: i64) -> Checkpoint {
        Checkpoint { shard: shard.into(), sequence, position: None, watermark_ms, floor_ms: i64::MIN }
    }

    #[test]
    fn p11_watermark_is_the_minimum_of_active_shards_and_never_goes_back() {
        let mut clock = Clock::default();
        assert_eq!(clock.advance(0, &SPANS), None);
        clock.settle(&checkpoint("a", 1, 500), 0);
        assert_eq!(clock.advance(0, &SPANS), Some(500));
        clock.settle(&checkpoint("b", 1, 300), 10);
        assert_eq!(clock.advance(10, &SPANS), Some(500));
        clock.settle(&checkpoint("a", 2, 900), 20);
        assert_eq!(clock.advance(20, &SPANS), Some(500), "b is at 300");
        assert_eq!(clock.advance(60, &SPANS), Some(900), "b is idle");
        assert_eq!(clock.advance(500, &SPANS), Some(900), "all are idle");
    }

    #[test]
    fn p11_restored_shards_are_active_until_they_prove_idle() {
        let mut clock = Clock::restore(vec![checkpoint("a", 1, 500), checkpoint("b", 1, 300)], Some(300));
        clock.settle(&checkpoint("a", 2, 900), 1_000_000);
        assert_eq!(clock.advance(1_000_000, &SPANS), Some(300));
        clock.settle(&checkpoint("a", 3, 950), 1_000_050);
        assert_eq!(clock.advance(1_000_050, &SPANS), Some(950));
    }

    #[test]
    fn a_checkpoint_behind_the_known_one_moves_neither_sequence_nor_position() {
        let mut clock = Clock::default();
        clock.settle(&Checkpoint { position: Some(70), ..checkpoint("a", 7, 10) }, 0);
        let known =
            clock.settle(&Checkpoint { position: Some(90), floor_ms: 5, ..checkpoint("a", 6, 20) }, 0);
        assert_eq!(
            (known.sequence, known.position, known.watermark_ms, known.floor_ms),
            (7, Some(70), 20, 5)
        );
    }
}
