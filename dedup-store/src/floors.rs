//! How far the route's event time has come, and what follows from it (P11): [`Clock`]. Pure; the caller says what time it is.

use std::{
    cmp::Ordering,
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// Up to where the facts of one shard are known (the checkpoint row).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checkpoint {
    /// Unit of ownership and order: a Kafka partition or an HTTP lane.
    pub shard: Arc<str>,
    /// Of the last batch settled.
    pub sequence: i64,
    /// Of the owner that wrote that batch; 0 if it is not known. With it the batch is told from one of the same number in another
    /// history of the shard (P6).
    pub epoch: i64,
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

    /// No more than this passes in one step, see [`Steps`]: what was not idle a moment ago is not idle after one step.
    fn longest_step_ms(&self) -> i64 {
        (self.idle_after_ms / 2).min(LONGEST_STEP_MS)
    }
}

const LONGEST_STEP_MS: i64 = 2_000;

/// Time as far as it was seen to pass. Idleness is counted by it: a process that was stopped, and a wall clock that was set, have seen
/// nothing of the time between.
#[derive(Clone, Default)]
struct Steps {
    passed_ms: i64,
    /// The wall clock's last word, ms.
    last_ms: Option<i64>,
    /// Its last word before it seemed to be set back, ms. Perhaps it was not, and somebody came late with an old word.
    before_ms: Option<i64>,
}

impl Steps {
    /// What will have passed at `now_ms`.
    fn at(&self, now_ms: i64, spans: &Spans) -> i64 {
        let since = self.before_ms.filter(|before_ms| now_ms >= *before_ms).or(self.last_ms);
        let step = since.map_or(0, |since_ms| now_ms.saturating_sub(since_ms));
        self.passed_ms + step.clamp(0, spans.longest_step_ms())
    }

    fn step(&mut self, now_ms: i64, spans: &Spans) -> i64 {
        self.passed_ms = self.at(now_ms, spans);
        match self.last_ms {
            // Threads that come with what the clock said to each of them a moment ago do not set it back.
            Some(last_ms) if now_ms < last_ms && last_ms - now_ms <= LONGEST_STEP_MS => {}
            Some(last_ms) if now_ms < last_ms => {
                self.before_ms = self.before_ms.max(Some(last_ms));
                self.last_ms = Some(now_ms);
            }
            _ => {
                self.before_ms = self.before_ms.filter(|before_ms| now_ms < *before_ms);
                self.last_ms = Some(now_ms);
            }
        }
        self.passed_ms
    }
}

/// When something was last heard of a shard.
#[derive(Clone, Default)]
struct Seen {
    /// By [`Steps`]; none since the store was opened. It counts as active until the first call says the time, so that a shard that is
    /// slow to come back does not find itself late.
    at_ms: Option<i64>,
    /// So many say that it has records to come ([`Clock::awaits`]).
    awaited_by: u32,
}

impl Seen {
    fn is_idle(&self, passed_ms: i64, spans: &Spans) -> bool {
        self.awaited_by == 0 && self.at_ms.is_some_and(|at_ms| passed_ms - at_ms >= spans.idle_after_ms)
    }
}

#[derive(Clone)]
struct Shard {
    checkpoint: Checkpoint,
    seen: Seen,
}

/// Checkpoints of the shards, and the watermark of the route: the minimum over the shards that are not idle. Never goes back.
#[derive(Clone)]
pub(crate) struct Clock {
    spans: Spans,
    steps: Steps,
    shards: HashMap<Arc<str>, Shard>,
    /// Shards that have no checkpoint here and are to bring records. How far they have come is not known, so the watermark stands while
    /// one of them is not idle.
    unknown: HashMap<Arc<str>, Seen>,
    /// Who awaits which.
    awaited: HashMap<u32, HashSet<Arc<str>>>,
    watermark_ms: Option<i64>,
}

impl Clock {
    pub(crate) fn new(spans: Spans) -> Self {
        Self::restore(spans, Vec::new(), None)
    }

    pub(crate) fn restore(spans: Spans, checkpoints: Vec<Checkpoint>, watermark_ms: Option<i64>) -> Self {
        let shards = checkpoints
            .into_iter()
            .map(|checkpoint| (Arc::clone(&checkpoint.shard), Shard { checkpoint, seen: Seen::default() }))
            .collect();
        Clock {
            spans,
            steps: Steps::default(),
            shards,
            unknown: HashMap::new(),
            awaited: HashMap::new(),
            watermark_ms,
        }
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

    /// From now on, and until `who` says otherwise, these and no other shards have records to come as far as `who` knows: they are not
    /// idle, however long ago they were settled.
    pub(crate) fn awaits(&mut self, who: u32, shards: &[Arc<str>], now_ms: i64) {
        let now_ms = self.steps.step(now_ms, &self.spans);
        let next: HashSet<Arc<str>> = shards.iter().cloned().collect();
        let before = self.awaited.remove(&who).unwrap_or_default();
        for shard in next.difference(&before) {
            self.seen(shard).awaited_by += 1;
        }
        for shard in before.difference(&next) {
            let seen = self.seen(shard);
            seen.awaited_by -= 1;
            seen.at_ms = Some(now_ms);
        }
        if !next.is_empty() {
            self.awaited.insert(who, next);
        }
    }

    fn seen(&mut self, shard: &Arc<str>) -> &mut Seen {
        match self.shards.get_mut(shard) {
            Some(shard) => &mut shard.seen,
            None => self.unknown.entry(Arc::clone(shard)).or_default(),
        }
    }

    /// Forgets how far anything has come, and nothing of who is not idle.
    pub(crate) fn discard(&mut self) {
        self.unknown.extend(self.shards.drain().map(|(name, shard)| (name, shard.seen)));
        self.watermark_ms = None;
    }

    /// Takes a checkpoint over. One that lies behind the known one is ignored but for its watermark and floor, which only rise.
    /// Answers with the checkpoint as it now stands.
    pub(crate) fn settle(&mut self, given: &Checkpoint, now_ms: i64) -> &Checkpoint {
        let now_ms = self.steps.step(now_ms, &self.spans);
        let unknown = &mut self.unknown;
        let shard = self.shards.entry(Arc::clone(&given.shard)).or_insert_with(|| Shard {
            checkpoint: given.clone(),
            seen: unknown.remove(&given.shard).unwrap_or_default(),
        });
        shard.seen.at_ms = Some(now_ms);
        let known = &mut shard.checkpoint;
        match given.sequence.cmp(&known.sequence) {
            Ordering::Greater => {
                (known.sequence, known.epoch, known.position) = (given.sequence, given.epoch, given.position);
            }
            Ordering::Equal => {
                known.position = known.position.max(given.position);
                if known.epoch == 0 {
                    known.epoch = given.epoch;
                }
            }
            Ordering::Less => {}
        }
        known.watermark_ms = known.watermark_ms.max(given.watermark_ms);
        known.floor_ms = known.floor_ms.max(given.floor_ms);
        known
    }

    /// The watermark at `now_ms`. All shards idle: it holds.
    pub(crate) fn advance(&mut self, now_ms: i64) -> Option<i64> {
        let passed_ms = self.steps.step(now_ms, &self.spans);
        let known = self.shards.values_mut().map(|shard| &mut shard.seen);
        for seen in known.chain(self.unknown.values_mut()) {
            seen.at_ms.get_or_insert(passed_ms);
        }
        self.watermark_ms = self.at(now_ms);
        self.watermark_ms
    }

    /// [`Clock::advance`] without moving.
    pub(crate) fn at(&self, now_ms: i64) -> Option<i64> {
        let passed_ms = self.steps.at(now_ms, &self.spans);
        if self.unknown.values().any(|seen| !seen.is_idle(passed_ms, &self.spans)) {
            return self.watermark_ms;
        }
        let active = self.shards.values().filter(|shard| !shard.seen.is_idle(passed_ms, &self.spans));
        self.watermark_ms.max(active.map(|shard| shard.checkpoint.watermark_ms).min())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPANS: Spans = Spans { window_ms: 1_000, lateness_ms: 100, idle_after_ms: 50 };

    fn checkpoint(shard: &str, sequence: i64, watermark_ms: i64) -> Checkpoint {
        Checkpoint {
            shard: shard.into(),
            sequence,
            epoch: 0,
            position: None,
            watermark_ms,
            floor_ms: i64::MIN,
        }
    }

    /// Time is seen to pass; the watermark at the end.
    fn pass(clock: &mut Clock, from_ms: i64, to_ms: i64) -> Option<i64> {
        (from_ms..=to_ms).map(|now_ms| clock.advance(now_ms)).last().flatten()
    }

    #[test]
    fn p11_watermark_is_the_minimum_of_active_shards_and_never_goes_back() {
        let mut clock = Clock::new(SPANS);
        assert_eq!(clock.advance(0), None);
        clock.settle(&checkpoint("a", 1, 500), 0);
        assert_eq!(clock.advance(0), Some(500));
        clock.settle(&checkpoint("b", 1, 300), 10);
        assert_eq!(clock.advance(10), Some(500));
        clock.settle(&checkpoint("a", 2, 900), 20);
        assert_eq!(clock.advance(20), Some(500), "b is at 300");
        assert_eq!(pass(&mut clock, 20, 60), Some(900), "b is idle");
        assert_eq!(clock.advance(500), Some(900), "all are idle");
    }

    #[test]
    fn p11_restored_shards_are_active_until_they_prove_idle() {
        let mut clock =
            Clock::restore(SPANS, vec![checkpoint("a", 1, 500), checkpoint("b", 1, 300)], Some(300));
        clock.settle(&checkpoint("a", 2, 900), 1_000_000);
        assert_eq!(clock.advance(1_000_000), Some(300));
        assert_eq!(pass(&mut clock, 1_000_000, 1_000_049), Some(300));
        clock.settle(&checkpoint("a", 3, 950), 1_000_049);
        assert_eq!(clock.advance(1_000_050), Some(950));
    }

    /// A partition whose broker was away for longer than `idle_after` counted as idle; the others went on, and its whole backlog was
    /// late when it came.
    #[test]
    fn p11_a_shard_with_records_to_come_is_not_idle_however_long_they_take() {
        let mut clock = Clock::new(SPANS);
        clock.settle(&checkpoint("a", 1, 500), 0);
        clock.settle(&checkpoint("b", 1, 300), 0);
        clock.awaits(1, &["b".into()], 0);
        for now_ms in 1..1_000 {
            clock.settle(&checkpoint("a", 1 + now_ms, 500 + now_ms), now_ms);
            assert_eq!(clock.advance(now_ms), Some(300));
        }
        clock.awaits(1, &[], 1_000);
        for now_ms in 1_000..1_050 {
            clock.settle(&checkpoint("a", 1 + now_ms, 500 + now_ms), now_ms);
            assert_eq!(clock.advance(now_ms), Some(300), "b has nothing to come since 1,000");
        }
        clock.settle(&checkpoint("a", 2_000, 1_600), 1_050);
        assert_eq!(clock.advance(1_050), Some(1_600));
    }

    /// A process was stopped, or its clock was set, for longer than `idle_after`. The first batch that was settled afterwards was of the
    /// only shard that counted as active: what the others had read and not settled was late.
    #[test]
    fn p11_time_that_nobody_saw_pass_makes_no_shard_idle() {
        for jump in [1_000_000, -1_000_000] {
            let mut clock = Clock::new(SPANS);
            clock.settle(&checkpoint("a", 1, 500), 0);
            clock.settle(&checkpoint("b", 1, 300), 0);
            clock.settle(&checkpoint("a", 2, 900), jump);
            assert_eq!(clock.advance(jump), Some(300), "b was heard a step ago");
            assert_eq!(pass(&mut clock, jump, jump + 24), Some(300));
            clock.settle(&checkpoint("a", 3, 900), jump + 24);
            assert_eq!(
                pass(&mut clock, jump + 25, jump + 50),
                Some(900),
                "b is idle, whatever the clock says"
            );
        }
    }

    /// Lanes read the clock, then wait for each other: times come in any order.
    #[test]
    fn time_passes_once_however_many_tell_it() {
        let mut clock = Clock::new(SPANS);
        for round in 0..1_000 {
            clock.settle(&checkpoint("b", 1, 300), 10);
            clock.settle(&checkpoint("a", 1 + round, 900), 10 - round % 3);
        }
        clock.settle(&checkpoint("a", 2_000, 900), 30);
        assert_eq!(clock.advance(30), Some(300));
    }

    /// A lane learnt facts for a minute and told the time of its beginning with each page, while others told the time of now: time ran
    /// many times too fast.
    #[test]
    fn p11_old_words_of_the_clock_between_new_ones_make_no_time_pass() {
        let spans = Spans { idle_after_ms: 30_000, ..SPANS };
        let mut clock = Clock::new(spans);
        for now_ms in (0..=60_000).step_by(1_000) {
            clock.settle(&checkpoint("a", now_ms, 900), now_ms);
            clock.settle(&checkpoint("b", now_ms, 300), now_ms);
        }
        for page in 1..=100 {
            clock.settle(&checkpoint("x", page, 2_000), 0);
            assert_eq!(clock.advance(60_000 + page), Some(300));
        }
        clock.settle(&checkpoint("a", 70_000, 1_600), 60_101);
        assert_eq!(clock.advance(60_101), Some(300), "a tenth of a second has passed");
    }

    proptest! {
        /// Whatever the shards do, the watermark passes no shard that is awaited, or was settled or awaited within `idle_after` as time
        /// was seen to pass.
        #[test]
        fn p11_the_watermark_passes_no_shard_that_is_not_idle(
            steps in prop::collection::vec((0..4_usize, 0..4_u8, 0..2_000_i64, 0..20_i64), 1..200)
        ) {
            let names: Vec<Arc<str>> = ["a", "b", "c", "d"].map(Arc::from).to_vec();
            let mut clock = Clock::new(SPANS);
            let mut seen: HashMap<usize, (i64, i64)> = HashMap::new();
            let mut awaited: [HashSet<usize>; 2] = Default::default();
            let (mut passed, mut wall, mut before) = (0, 0, None);
            for (number, (shard, what, time, pass)) in steps.into_iter().enumerate() {
                // The wall clock is set now and then, forth or back.
                let (seen_to_pass, steps) = match time % 97 {
                    0 => (SPANS.longest_step_ms(), 100_000),
                    1 => (0, -100_000),
                    _ => (pass, pass),
                };
                passed += seen_to_pass;
                wall += steps;
                let known = seen.get(&shard).map_or(i64::MIN, |(_, watermark)| *watermark);
                match what {
                    0 | 1 => {
                        let who = usize::from(what);
                        let gone = std::mem::take(&mut awaited[who]);
                        awaited[who] = if time % 3 == 0 { HashSet::new() } else { HashSet::from([shard, number % 4]) };
                        for shard in gone.union(&awaited[who]) {
                            seen.entry(*shard).or_insert((passed, i64::MIN)).0 = passed;
                        }
                        let shards: Vec<Arc<str>> = awaited[who].iter().map(|&shard| names[shard].clone()).collect();
                        clock.awaits(who as u32, &shards, wall);
                    }
                    2 => {
                        let watermark = known.max(time);
                        clock.settle(&checkpoint(&names[shard], number as i64 + 1, watermark), wall);
                        seen.insert(shard, (passed, watermark));
                    }
                    _ => {}
                }
                let after = clock.advance(wall);
                prop_assert!(after >= before, "it went back");
                if after > before {
                    for (shard, (last, watermark)) in &seen {
                        let idle = passed - last >= SPANS.idle_after_ms && !awaited.iter().any(|set| set.contains(shard));
                        prop_assert!(idle || after <= Some(*watermark), "{shard} is at {watermark}");
                    }
                }
                before = after;
            }
        }
    }

    /// The first partition of a replayed topic that was settled set the watermark before the others had brought a record.
    #[test]
    fn p11_the_watermark_stands_while_a_shard_is_awaited_that_never_settled() {
        let mut clock = Clock::new(SPANS);
        clock.awaits(1, &["b".into()], 0);
        clock.settle(&checkpoint("a", 1, 500), 1);
        assert_eq!(clock.advance(1), None);
        assert_eq!(clock.advance(80), None);
        clock.settle(&checkpoint("b", 1, 100), 81);
        clock.settle(&checkpoint("a", 2, 600), 81);
        assert_eq!(clock.advance(81), Some(100));
        let mut clock = Clock::new(SPANS);
        clock.awaits(1, &["b".into()], 0);
        clock.awaits(1, &[], 0);
        assert_eq!(pass(&mut clock, 0, 49), None);
        clock.settle(&checkpoint("a", 1, 500), 49);
        assert_eq!(clock.advance(49), None);
        assert_eq!(clock.advance(50), Some(500), "nothing came of it");
    }

    /// A store was discarded because a partition far behind came; another lane settled its own shard before the marks of that partition
    /// were learnt again: the watermark was the other shard's, and the backlog was late.
    #[test]
    fn p11_a_discarded_clock_awaits_the_shards_that_were_not_idle() {
        let mut clock = Clock::new(SPANS);
        clock.settle(&checkpoint("a", 1, 500), 0);
        clock.settle(&checkpoint("b", 1, 300), 1);
        clock.awaits(1, &["c".into()], 2);
        assert_eq!(clock.advance(2), None, "c is awaited");
        clock.discard();
        clock.settle(&checkpoint("a", 1, 500), 3);
        assert_eq!(clock.advance(3), None, "b and c are awaited");
        clock.settle(&checkpoint("b", 1, i64::MIN), 4);
        assert_eq!(clock.advance(4), None, "c is awaited");
        clock.awaits(1, &[], 4);
        assert_eq!(pass(&mut clock, 4, 53), None, "c was awaited a moment ago");
        clock.settle(&checkpoint("b", 1, i64::MIN), 54);
        assert_eq!(clock.advance(54), Some(i64::MIN), "b is at its start");

        let mut clock =
            Clock::restore(SPANS, vec![checkpoint("a", 1, 500), checkpoint("b", 1, 300)], Some(300));
        clock.discard();
        clock.settle(&checkpoint("a", 1, 500), 1_000);
        assert_eq!(clock.advance(1_000), None, "b was not idle as far as is known");
        assert_eq!(pass(&mut clock, 1_000, 1_050), None, "all are idle");
        clock.settle(&checkpoint("a", 2, 600), 1_051);
        assert_eq!(clock.advance(1_051), Some(600));
    }

    #[test]
    fn a_checkpoint_behind_the_known_one_moves_neither_sequence_nor_position() {
        let mut clock = Clock::new(SPANS);
        clock.settle(&Checkpoint { position: Some(70), ..checkpoint("a", 7, 10) }, 0);
        let known =
            clock.settle(&Checkpoint { position: Some(90), floor_ms: 5, ..checkpoint("a", 6, 20) }, 0);
        assert_eq!(
            (known.sequence, known.position, known.watermark_ms, known.floor_ms),
            (7, Some(70), 20, 5)
        );
    }
}
