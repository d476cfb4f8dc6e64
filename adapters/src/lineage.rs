//! Which owners wrote a shard's batches: what tells the sink's history from one that it has lost (P3, P6). Pure, but for
//! [`epoch_rise`].

use std::fmt;

use crate::sink::{ShardState, ShardStep, SinkError};

/// An epoch rises by this much at most. Numbers of Redis scripts are exact up to 2^53: enough for a thousand million owners.
const WIDEST_RISE: i64 = 1 << 24;

/// For each owner that wrote batches of a shard its epoch, and the sequence after which it began; the newest last.
///
/// A sequence alone does not name a batch: a sink that goes back is written on by somebody, and comes to the same number. Epochs do not
/// come again ([`epoch_above`]), so that a batch is the one that is known if the same owner wrote it.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Lineage(Vec<Reign>);

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Reign {
    /// Its first batch is the next one.
    after: i64,
    epoch: i64,
}

impl Lineage {
    /// Owners that it remembers. Whoever was away while more than these wrote learns all of the route's marks again.
    pub(crate) const MOST: usize = 32;

    /// The shard stands at `sequence`, and is taken over under `epoch`. Owners that wrote nothing are not remembered.
    pub fn taken(&mut self, sequence: i64, epoch: i64) {
        self.0.retain(|reign| reign.after < sequence);
        self.0.push(Reign { after: sequence, epoch });
        let surplus = self.0.len().saturating_sub(Self::MOST);
        self.0.drain(..surplus);
    }

    /// The batch of `sequence` is in, under `epoch`, although the shard has another owner by now: an earlier one had kept it.
    pub fn written(&mut self, sequence: i64, epoch: i64) {
        let newest = self.0.last().map(|reign| reign.epoch);
        self.taken(sequence - 1, epoch);
        if let Some(newest) = newest.filter(|newest| *newest != epoch) {
            self.taken(sequence, newest);
        }
    }

    /// The epoch under which the batch of `sequence` was written; none if that is not remembered.
    pub fn writer(&self, sequence: i64) -> Option<i64> {
        self.reign(sequence).map(|reign| reign.epoch)
    }

    /// Whether the batch of `sequence` is the one that was written under `epoch`. Of one that is not remembered it is not said.
    pub fn has(&self, sequence: i64, epoch: i64) -> bool {
        self.writer(sequence) == Some(epoch)
    }

    /// The batch of `sequence` is older than what is remembered: nothing tells whether it is the one that is known.
    pub fn has_forgotten(&self, sequence: i64) -> bool {
        sequence > 0 && self.0.first().is_some_and(|reign| reign.after >= sequence)
    }

    /// The last sequence before the owner that wrote the batch of `sequence`.
    pub fn before_writer(&self, sequence: i64) -> Option<i64> {
        self.reign(sequence).map(|reign| reign.after)
    }

    fn reign(&self, sequence: i64) -> Option<&Reign> {
        self.0.iter().rev().find(|reign| reign.after < sequence)
    }

    /// What [`fmt::Display`] wrote; what cannot be read is not remembered.
    pub fn read(text: &str) -> Self {
        let reign = |word: &str| {
            let (after, epoch) = word.split_once(':')?;
            Some(Reign { after: after.parse().ok()?, epoch: epoch.parse().ok()? })
        };
        Self(text.split_ascii_whitespace().filter_map(reign).collect())
    }
}

/// As shard rows hold it: `after:epoch`, the oldest first, a space between two.
impl fmt::Display for Lineage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Reign { after, epoch }) in self.0.iter().enumerate() {
            write!(f, "{}{after}:{epoch}", if at > 0 { " " } else { "" })?;
        }
        Ok(())
    }
}

/// How far the next owner's epoch lies above the one before. By chance: two histories that part at one epoch do not come to the same
/// ones again, whatever the clocks say (of some eight million pairs one would).
pub fn epoch_rise() -> i64 {
    #[cfg(feature = "simulation")]
    if crate::simulated::here() {
        return 1;
    }
    rand::random_range(1..=WIDEST_RISE)
}

/// The epoch of the next owner, see [`epoch_rise`].
pub fn epoch_above(epoch: i64) -> i64 {
    epoch.saturating_add(epoch_rise())
}

/// Whether the batch of `steps` is in, as the rows of its shards say after they were taken over. It is in with all of its shards, or not
/// at all.
pub fn applied(steps: &[ShardStep], states: &[ShardState]) -> Result<bool, SinkError> {
    let is_in = |(step, state): &(&ShardStep, &ShardState)| {
        state.sequence >= step.sequence && state.lineage.has(step.sequence, step.epoch)
    };
    let moved = steps.iter().zip(states).filter(is_in).count();
    if moved > 0 && moved < steps.len() {
        let reason = format!(
            "{moved} of {} shards of one batch have moved: the sink's bookkeeping was changed from outside",
            steps.len()
        );
        return Err(SinkError::Unknown { reason });
    }
    Ok(moved > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Lineage {
        Lineage::read(text)
    }

    #[test]
    fn p6_a_batch_of_the_same_number_by_another_owner_is_another_batch() {
        let mut lost = Lineage::default();
        lost.taken(0, 5);
        lost.taken(2, 9);
        let mut stands = lost.clone();
        // It went back to 3; the owner of epoch 9 had written 4 and 5 by then.
        stands.taken(3, 12);
        assert_eq!((lost.writer(5), stands.writer(5)), (Some(9), Some(12)));
        assert!(stands.has(3, 9) && !stands.has(4, 9) && stands.has(4, 12));
        assert_eq!(stands.before_writer(5), Some(3));
        assert_eq!((stands.writer(1), stands.writer(2), stands.writer(0)), (Some(5), Some(5), None));
    }

    #[test]
    fn owners_that_wrote_nothing_are_not_remembered() {
        let mut lineage = of("0:3 7:8");
        lineage.taken(7, 11);
        lineage.taken(7, 14);
        assert_eq!(lineage.to_string(), "0:3 7:14");
        lineage.taken(4, 20);
        assert_eq!(lineage.to_string(), "0:3 4:20", "what lies above is of a history that is lost");
    }

    #[test]
    fn the_oldest_owners_are_forgotten() {
        let mut lineage = Lineage::default();
        for number in 0..40 {
            lineage.taken(number * 10, 100 + number);
        }
        assert_eq!(lineage.0.len(), Lineage::MOST);
        assert_eq!(lineage.writer(80), None, "nobody says");
        assert!(lineage.has_forgotten(80) && !lineage.has_forgotten(81) && !lineage.has_forgotten(0));
        assert_eq!(lineage.writer(81), Some(108));
    }

    #[test]
    fn a_batch_that_an_earlier_owner_had_kept_is_its_own() {
        let mut lineage = of("0:3 5:8");
        lineage.written(6, 3);
        assert_eq!(lineage.to_string(), "0:3 5:3 6:8");
        let mut same = of("0:3");
        same.written(1, 3);
        assert_eq!(same.to_string(), "0:3");
    }

    /// These texts are in shard rows: what they say must not change.
    #[test]
    fn a_lineage_is_read_as_it_was_written() {
        let lineage = of("0:3 7:16777219");
        assert_eq!(lineage.to_string(), "0:3 7:16777219");
        assert_eq!(
            lineage,
            Lineage(vec![Reign { after: 0, epoch: 3 }, Reign { after: 7, epoch: 16_777_219 }])
        );
        for (text, left) in [("", ""), ("x", ""), ("1:2 :3 4:", "1:2"), ("1:2  5:6", "1:2 5:6")] {
            assert_eq!(of(text).to_string(), left, "{text:?}");
        }
    }

    #[test]
    fn epochs_rise_by_chance() {
        let rises: Vec<i64> = (0..64).map(|_| epoch_above(1_000) - 1_000).collect();
        assert!(rises.iter().all(|rise| (1..=WIDEST_RISE).contains(rise)), "{rises:?}");
        assert!(rises.iter().any(|rise| *rise != rises[0]), "{rises:?}");
        assert!(epoch_above(i64::MAX) == i64::MAX);
    }
}
