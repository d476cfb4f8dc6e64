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
    /// Shards that have no checkpoint here and are to bring records, and when that was last said, ms; none until the first call says
    /// the time. How far they have come is not known, so the watermark stands while there is one.
    awaited: HashMap<Arc<str>, Option<i64>>,
    watermark_ms: Option<i64>,
}

impl Clock {
    pub(crate) fn restore(checkpoints: Vec<Checkpoint>, watermark_ms: Option<i64>) -> Self {
        let shards = checkpoints
            .into_iter()
            .map(|checkpoint| (Arc::clone(&checkpoint.shard), Shard { checkpoint, seen_ms: None }))
            .collect();
        Clock { shards, awaited: HashMap::new(), watermark_ms }
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

    /// `shard` has records to come that were not settled yet: it is not idle at `now_ms`, however long ago it was settled.
    pub(crate) fn awaits(&mut self, shard: &Arc<str>, now_ms: i64) {
        match self.shards.get_mut(shard) {
            Some(shard) => shard.seen_ms = Some(shard.seen_ms.map_or(now_ms, |seen| seen.max(now_ms))),
            None => {
                let seen = self.awaited.entry(Arc::clone(shard)).or_default();
                *seen = (*seen).max(Some(now_ms));
            }
        }
    }

    /// Forgets how far anything has come, and nothing of who is not idle: those are awaited.
    pub(crate) fn discard(&mut self) {
        self.awaited.extend(self.shards.drain().map(|(name, shard)| (name, shard.seen_ms)));
        self.watermark_ms = None;
    }

    /// Takes a checkpoint over. One that lies behind the known one is ignored but for its watermark and floor, which only rise.
    /// Answers with the checkpoint as it now stands.
    pub(crate) fn settle(&mut self, given: &Checkpoint, now_ms: i64) -> &Checkpoint {
        let shard = self
            .shards
            .entry(Arc::clone(&given.shard))
            .or_insert_with(|| Shard { checkpoint: given.clone(), seen_ms: None });
        self.awaited.remove(&given.shard);
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
        for seen in self.shards.values_mut().map(|shard| &mut shard.seen_ms).chain(self.awaited.values_mut())
        {
            seen.get_or_insert(now_ms);
        }
        self.watermark_ms = self.at(now_ms, spans);
        self.watermark_ms
    }

    /// [`Clock::advance`] without moving.
    pub(crate) fn at(&self, now_ms: i64, spans: &Spans) -> Option<i64> {
        let recent =
            |seen: Option<i64>| seen.is_none_or(|seen| now_ms.saturating_sub(seen) < spans.idle_after_ms);
        if self.awaited.values().any(|&seen| recent(seen)) {
            return self.watermark_ms;
        }
        let active = self.shards.values().filter(|shard| recent(shard.seen_ms));
        self.watermark_ms.max(active.map(|shard| shard.checkpoint.watermark_ms).min())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    /// A partition whose broker was away for longer than `idle_after` counted as idle; the others went on, and its whole backlog was
    /// late when it came.
    #[test]
    fn p11_a_shard_with_records_to_come_is_not_idle_however_long_they_take() {
        let mut clock = Clock::default();
        clock.settle(&checkpoint("a", 1, 500), 0);
        clock.settle(&checkpoint("b", 1, 300), 0);
        for now_ms in 1..1_000 {
            clock.settle(&checkpoint("a", 1 + now_ms, 500 + now_ms), now_ms);
            clock.awaits(&"b".into(), now_ms);
            assert_eq!(clock.advance(now_ms, &SPANS), Some(300));
        }
        assert_eq!(clock.advance(1_048, &SPANS), Some(300));
        assert_eq!(clock.advance(1_049, &SPANS), Some(300), "both are idle: nothing moves");
        clock.settle(&checkpoint("a", 2_000, 1_600), 1_050);
        assert_eq!(clock.advance(1_050, &SPANS), Some(1_600), "b has nothing to come any more");
    }

    proptest! {
        /// Whatever the shards do, the watermark passes no shard that has settled, or has records to come, within `idle_after`.
        #[test]
        fn p11_the_watermark_passes_no_shard_that_is_not_idle(
            steps in prop::collection::vec((0..4_usize, 0..3_u8, 0..2_000_i64, 0..30_i64), 1..200)
        ) {
            let names: Vec<Arc<str>> = ["a", "b", "c", "d"].map(Arc::from).to_vec();
            let mut clock = Clock::default();
            let mut seen: HashMap<usize, (i64, i64)> = HashMap::new();
            let (mut now_ms, mut before) = (0, None);
            for (number, (shard, what, time, pass)) in steps.into_iter().enumerate() {
                now_ms += pass;
                let known = seen.get(&shard).map_or(i64::MIN, |(_, watermark)| *watermark);
                match what {
                    0 => {
                        clock.awaits(&names[shard], now_ms);
                        seen.insert(shard, (now_ms, known));
                    }
                    1 => {
                        let watermark = known.max(time);
                        clock.settle(&checkpoint(&names[shard], number as i64 + 1, watermark), now_ms);
                        seen.insert(shard, (now_ms, watermark));
                    }
                    _ => {}
                }
                let after = clock.advance(now_ms, &SPANS);
                prop_assert!(after >= before, "it went back");
                if after > before {
                    for (last, watermark) in seen.values() {
                        prop_assert!(now_ms - last >= SPANS.idle_after_ms || after <= Some(*watermark));
                    }
                }
                before = after;
            }
        }
    }

    /// The first partition of a replayed topic that was settled set the watermark before the others had brought a record.
    #[test]
    fn p11_the_watermark_stands_while_a_shard_is_awaited_that_never_settled() {
        let mut clock = Clock::default();
        clock.awaits(&"b".into(), 0);
        clock.settle(&checkpoint("a", 1, 500), 1);
        assert_eq!(clock.advance(1, &SPANS), None);
        clock.awaits(&"b".into(), 40);
        assert_eq!(clock.advance(80, &SPANS), None);
        clock.settle(&checkpoint("b", 1, 100), 81);
        clock.settle(&checkpoint("a", 2, 600), 81);
        assert_eq!(clock.advance(81, &SPANS), Some(100));
        let mut clock = Clock::default();
        clock.awaits(&"b".into(), 0);
        clock.settle(&checkpoint("a", 1, 500), 49);
        assert_eq!(clock.advance(49, &SPANS), None);
        assert_eq!(clock.advance(50, &SPANS), Some(500), "nothing came of it");
    }

    /// A store was discarded because a partition far behind came; another lane settled its own shard before the marks of that partition
    /// were learnt again: the watermark was the other shard's, and the backlog was late.
    #[test]
    fn p11_a_discarded_clock_awaits_the_shards_that_were_not_idle() {
        let mut clock = Clock::default();
        clock.settle(&checkpoint("a", 1, 500), 0);
        clock.settle(&checkpoint("b", 1, 300), 1);
        clock.awaits(&"c".into(), 2);
        assert_eq!(clock.advance(2, &SPANS), None, "c is awaited");
        clock.discard();
        clock.settle(&checkpoint("a", 1, 500), 3);
        assert_eq!(clock.advance(3, &SPANS), None, "b and c are awaited");
        clock.settle(&checkpoint("b", 1, i64::MIN), 4);
        assert_eq!(clock.advance(4, &SPANS), None, "c is awaited");
        assert_eq!(clock.advance(52, &SPANS), Some(i64::MIN), "b is not idle yet");

        let mut clock = Clock::restore(vec![checkpoint("a", 1, 500), checkpoint("b", 1, 300)], Some(300));
        clock.discard();
        clock.settle(&checkpoint("a", 1, 500), 1_000);
        assert_eq!(clock.advance(1_000, &SPANS), None, "b was not idle as far as is known");
        assert_eq!(clock.advance(1_050, &SPANS), None, "all are idle");
        clock.settle(&checkpoint("a", 2, 600), 1_051);
        assert_eq!(clock.advance(1_051, &SPANS), Some(600));
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
