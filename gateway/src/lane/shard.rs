//! A shard as the lane that owns it sees it: epoch, sequence, and how far its records have outcomes. Pure.

use std::collections::BTreeSet;

use adapters::{
    lineage::Lineage,
    sink::{ShardId, ShardState, ShardStep},
};
use dedup_store::Checkpoint;

/// One owned shard.
#[derive(Clone, Debug)]
#[cfg_attr(test, derive(PartialEq, Eq, Hash))]
pub(crate) struct OwnedShard {
    pub(crate) id: ShardId,
    pub(crate) epoch: i64,
    /// When it was adopted; `epoch` may have been raised since, and all between are this owner's.
    adopted: i64,
    /// The last batch settled.
    pub(crate) last: Last,
    /// The position that the sink holds.
    pub(crate) position: Option<i64>,
    pub(crate) watermark_ms: i64,
    /// Facts below it are forgotten (P11).
    pub(crate) floor_ms: i64,
    /// Counts up at each seek: records of older generations are not this shard's any more.
    pub(crate) generation: u64,
    /// Offset after the last record that was taken up; its batch gives each record before it an outcome, but for the parked.
    taken: Option<i64>,
    /// Offsets that were taken up and have no outcome yet: they wait for another record's, or go again with the next batch. The
    /// position stops at the first (rule 8).
    parked: BTreeSet<i64>,
}

/// How a shard's state in the sink relates to what its owner (or the store) knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Standing {
    /// The same batch was the last.
    Level,
    /// The sink holds batches that are not known here: learn their marks.
    SinkAhead,
    /// The sink went back (P6).
    Regressed,
    /// So many owners have written since that the sink cannot say whether it holds what is known here.
    Forgotten,
}

impl Standing {
    /// What is known here may not be so in the sink: it is to be learnt anew.
    pub(crate) fn is_lost(self) -> bool {
        matches!(self, Standing::Regressed | Standing::Forgotten)
    }
}

/// The last batch of a shard that is known here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(test, derive(Hash))]
pub(crate) struct Last {
    pub(crate) sequence: i64,
    /// Of the owner that wrote it; 0 if it is not known.
    pub(crate) epoch: i64,
}

impl From<&Checkpoint> for Last {
    fn from(&Checkpoint { sequence, epoch, .. }: &Checkpoint) -> Self {
        Self { sequence, epoch }
    }
}

impl Last {
    /// The one of `sequence`, in the history that `lineage` is of.
    pub(crate) fn of(lineage: &Lineage, sequence: i64) -> Self {
        Self { sequence, epoch: lineage.writer(sequence).unwrap_or(0) }
    }

    /// Up to where the sink holds what is known here: to this batch, or not so far (P6). Another batch may bear its number.
    pub(crate) fn held(&self, sink: &ShardState) -> i64 {
        let Last { sequence, epoch } = *self;
        if sink.sequence < sequence {
            return sink.sequence;
        }
        if epoch == 0 || sink.lineage.has(sequence, epoch) {
            return sequence;
        }
        sink.lineage.before_writer(sequence).unwrap_or(0)
    }
}

/// Compares the last batch known here with the sink's.
pub(crate) fn standing(known: Last, sink: &ShardState) -> Standing {
    if known.held(sink) < known.sequence {
        let forgotten = sink.sequence >= known.sequence && sink.lineage.has_forgotten(known.sequence);
        if forgotten { Standing::Forgotten } else { Standing::Regressed }
    } else if sink.sequence > known.sequence {
        Standing::SinkAhead
    } else {
        Standing::Level
    }
}

impl OwnedShard {
    pub(crate) fn new(state: &ShardState) -> Self {
        Self {
            id: state.shard.clone(),
            epoch: state.epoch,
            adopted: state.epoch,
            last: Last::of(&state.lineage, state.sequence),
            position: state.position,
            watermark_ms: state.watermark_ms,
            floor_ms: state.floor_ms,
            generation: 0,
            taken: None,
            parked: BTreeSet::new(),
        }
    }

    /// Nobody else has written to it, as the sink says.
    pub(crate) fn alone_wrote(&self, state: &ShardState) -> bool {
        let ours = |writer| writer == self.last.epoch || (self.adopted..=self.epoch).contains(&writer);
        state.lineage.writer(state.sequence).is_none_or(ours)
    }

    /// Callers write through it, and no source.
    pub(crate) fn is_callers(&self) -> bool {
        self.id.starts_with("http/")
    }

    /// The sink's word after a new acquire; everything taken from the source since is forgotten.
    pub(crate) fn adopt(&mut self, state: &ShardState) {
        (self.epoch, self.adopted) = (state.epoch, state.epoch);
        self.last = Last::of(&state.lineage, state.sequence);
        self.position = state.position;
        self.watermark_ms = state.watermark_ms;
        self.floor_ms = state.floor_ms;
    }

    /// The source is read again from the sink's position.
    pub(crate) fn rewind(&mut self, generation: u64) {
        self.generation = generation;
        self.taken = None;
        self.parked.clear();
    }

    /// Below what nothing new is admitted: max(W - lateness, floor + window) (P11).
    pub(crate) fn admission_ms(&self, lateness_ms: i64, window_ms: i64) -> i64 {
        let by_watermark = self.watermark_ms.saturating_sub(lateness_ms);
        let by_floor = if self.floor_ms == i64::MIN || planted!(FloorNotHonoured) {
            i64::MIN
        } else {
            self.floor_ms.saturating_add(window_ms)
        };
        by_watermark.max(by_floor)
    }

    /// Whether a store that has forgotten what lies below `forgotten_ms` would make records late that the shard itself admits: it went
    /// on while another owner had the shard. A shard without a batch is judged as its route is.
    pub(crate) fn lags_behind(&self, forgotten_ms: i64, lateness_ms: i64, window_ms: i64) -> bool {
        self.watermark_ms > i64::MIN
            && forgotten_ms > i64::MIN
            && self.admission_ms(lateness_ms, window_ms) < forgotten_ms.saturating_add(window_ms)
    }

    /// A record at or below the settled position was settled before: no second outcome (P7.1).
    pub(crate) fn is_replay(&self, offset: i64) -> bool {
        self.position.is_some_and(|position| offset < position)
    }

    /// `offset` is taken up: the batch being built gives it its outcome, unless it is parked.
    pub(crate) fn take(&mut self, offset: i64) {
        self.taken = Some(self.taken.map_or(offset + 1, |taken| taken.max(offset + 1)));
        if !self.parked.is_empty() {
            self.parked.remove(&offset);
        }
    }

    /// `offset` was looked at and has no outcome yet.
    pub(crate) fn park(&mut self, offset: i64) {
        self.taken = Some(self.taken.map_or(offset + 1, |taken| taken.max(offset + 1)));
        self.parked.insert(offset);
    }

    #[cfg(test)]
    pub(crate) fn forget_parked(&mut self) {
        self.parked.clear();
    }

    /// Whether a record before `offset` has no outcome yet.
    pub(crate) fn waits_before(&self, offset: i64) -> bool {
        self.parked.first().is_some_and(|&parked| parked < offset)
    }

    /// Next offset to read once everything finished is durable: the contiguous prefix.
    pub(crate) fn prefix(&self) -> Option<i64> {
        let parked = self.parked.first().copied().filter(|_| !planted!(PositionPastParked));
        let prefix = match (parked, self.taken) {
            (Some(parked), Some(taken)) => Some(parked.min(taken)),
            (parked, taken) => parked.or(taken),
        };
        match (prefix, self.position) {
            (Some(prefix), Some(position)) => Some(prefix.max(position)),
            (prefix, position) => prefix.or(position),
        }
    }

    /// The step of the next batch.
    pub(crate) fn step(&self, seen_ms: Option<i64>) -> ShardStep {
        ShardStep {
            shard: self.id.clone(),
            epoch: self.epoch,
            sequence: self.last.sequence + 1,
            position: self.prefix(),
            watermark_ms: seen_ms.map_or(self.watermark_ms, |seen| seen.max(self.watermark_ms)),
        }
    }

    /// The batch of `step` is in.
    pub(crate) fn advance(&mut self, step: &ShardStep) {
        self.last = Last { sequence: step.sequence, epoch: step.epoch };
        self.position = step.position;
        self.watermark_ms = step.watermark_ms;
    }

    /// What the store is to know of it.
    pub(crate) fn checkpoint(&self) -> Checkpoint {
        Checkpoint {
            shard: self.id.clone(),
            sequence: self.last.sequence,
            epoch: self.last.epoch,
            position: self.position,
            watermark_ms: self.watermark_ms,
            floor_ms: self.floor_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard() -> OwnedShard {
        OwnedShard::new(&ShardState {
            shard: "kafka/c/t/0".into(),
            epoch: 1,
            sequence: 4,
            position: Some(100),
            watermark_ms: 1_000,
            floor_ms: i64::MIN,
            lineage: Lineage::default(),
        })
    }

    #[test]
    fn rule8_the_position_covers_the_contiguous_prefix_only() {
        let mut shard = shard();
        for offset in 100..105 {
            shard.take(offset);
        }
        shard.park(102);
        shard.park(104);
        assert_eq!(shard.prefix(), Some(102), "102 has no outcome yet");
        shard.take(104);
        assert_eq!(shard.prefix(), Some(102));
        shard.take(102);
        assert_eq!(shard.prefix(), Some(105));
        shard.park(103);
        assert_eq!(shard.prefix(), Some(103), "its batch is cut again");
        shard.take(103);
        assert_eq!(shard.prefix(), Some(105), "104 had its outcome all the while");
    }

    #[test]
    fn gaps_in_offsets_do_not_hold_the_prefix_back() {
        let mut shard = shard();
        shard.take(107); // compacted and transactional topics skip offsets
        assert_eq!(shard.prefix(), Some(108));
    }

    #[test]
    fn p7_a_record_below_the_settled_position_is_a_replay() {
        assert!(shard().is_replay(99));
        assert!(!shard().is_replay(100));
    }

    #[test]
    fn p11_admission_is_the_higher_of_watermark_and_forgotten_floor() {
        let mut shard = shard();
        assert_eq!(shard.admission_ms(100, 500), 900);
        shard.floor_ms = 800;
        assert_eq!(shard.admission_ms(100, 500), 1_300);
    }

    #[test]
    fn p11_a_shard_lags_behind_a_store_that_has_forgotten_more_than_it_admits() {
        let mut shard = shard();
        assert!(!shard.lags_behind(i64::MIN, 100, 500), "nothing is forgotten");
        assert!(!shard.lags_behind(400, 100, 500), "900 and more are admitted either way");
        assert!(shard.lags_behind(401, 100, 500));
        shard.floor_ms = 401;
        assert!(!shard.lags_behind(401, 100, 500), "its own floor says the same");
        shard.watermark_ms = i64::MIN;
        shard.floor_ms = i64::MIN;
        assert!(!shard.lags_behind(401, 100, 500), "it has no batch");
    }

    fn sink(sequence: i64, lineage: &str) -> ShardState {
        ShardState { sequence, lineage: Lineage::read(lineage), ..ShardState::unowned(&"s".into()) }
    }

    #[test]
    fn p6_a_lower_sequence_in_the_sink_is_a_regression() {
        let known = |sequence, epoch| Last { sequence, epoch };
        for epoch in [0, 7] {
            assert_eq!(standing(known(4, epoch), &sink(4, "0:7")), Standing::Level);
            assert_eq!(standing(known(4, epoch), &sink(6, "0:7 5:9")), Standing::SinkAhead);
            assert_eq!(standing(known(4, epoch), &sink(3, "0:7")), Standing::Regressed);
        }
        assert_eq!(standing(known(0, 0), &sink(0, "")), Standing::Level);
    }

    /// The sink went back from 4 to 2. Before this instance looked, another one wrote 3 and 4: the numbers agreed, and this one kept
    /// facts that the sink had lost. Had the shard come back to it, a lost record would have been taken for a copy.
    #[test]
    fn p6_another_owners_batch_of_the_same_number_is_a_regression() {
        let known = Last { sequence: 4, epoch: 7 };
        for (sequence, lineage, held) in [(4, "0:7 2:9", 2), (9, "0:7 2:9", 2), (4, "0:3 1:9", 1), (4, "", 0)]
        {
            let sink = sink(sequence, lineage);
            assert_eq!(
                (standing(known, &sink), known.held(&sink)),
                (Standing::Regressed, held),
                "{lineage:?}"
            );
        }
        assert_eq!(standing(known, &sink(40, "30:8")), Standing::Forgotten, "nobody says who wrote it");
    }

    #[test]
    fn a_rewind_forgets_what_was_taken() {
        let mut shard = shard();
        shard.take(100);
        shard.park(100);
        shard.take(101);
        shard.rewind(1);
        assert_eq!(shard.prefix(), Some(100));
        assert_eq!(shard.generation, 1);
    }
}
