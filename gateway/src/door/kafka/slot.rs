//! One partition that the group gave us.

use std::time::{Duration, Instant};

use adapters::{
    kafka::{Commit, Reader, TopicPartition},
    sink::ShardId,
};

use super::align::Come;
use crate::{clock::jitter, lane::FromLane};

/// A commit without an answer counts as lost after so long.
pub(super) const COMMIT_PATIENCE: Duration = Duration::from_secs(10);

/// A partition whose lane takes what comes is looked at more often than that.
const LOOKED_AT: Duration = Duration::from_secs(2);

pub(super) enum State {
    /// The lane is asked to take the shard over; again at `again` if it could not.
    Acquiring { again: Option<Instant>, reason: Option<String> },
    /// To be read from `position`, or from the route's start. Not before `at` (a broker did not answer).
    Placing { position: Option<i64>, at: Instant, reason: Option<String> },
    /// A commit of `position` is under way that proves the group's generation; sent again at `again`.
    Proving { position: i64, then: Then, again: Instant, refused: Option<String> },
    /// Records come.
    Reading,
    /// For good, until the next assignment.
    Stopped { reason: String },
    /// Revoked.
    Leaving,
}

/// What a proved generation is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// Read on.
    Read,
    /// The lane was fenced though the partition is ours: take the shard over again.
    Acquire,
}

impl State {
    /// For status, logs and metrics.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Acquiring { .. } => "acquiring",
            Self::Placing { .. } => "placing",
            Self::Proving { .. } => "proving",
            Self::Reading => "reading",
            Self::Stopped { .. } => "stopped",
            Self::Leaving => "leaving",
        }
    }

    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Self::Acquiring { reason, .. } | Self::Placing { reason, .. } => reason.as_deref(),
            Self::Stopped { reason } => Some(reason),
            Self::Proving { refused, .. } => refused.as_deref(),
            Self::Reading | Self::Leaving => None,
        }
    }
}

/// How far the group's offset is, and has to go.
#[derive(Default)]
pub(super) struct Offsets {
    /// The group's generation was proved since the lane took the shard over.
    pub(super) proven: bool,
    /// Everything below has its outcome, durably.
    pub(super) durable: Option<i64>,
    /// The group's offset.
    pub(super) committed: Option<i64>,
}

impl Offsets {
    /// The lane reads again from the sink's position: everything below that has its outcome, and nothing else that was said before
    /// counts.
    pub(super) fn seek(&mut self, position: Option<i64>) {
        self.durable = position;
    }

    /// What the group's offset has to follow to, if anything.
    pub(super) fn due(&self) -> Option<i64> {
        let position = self.durable.filter(|_| self.proven)?;
        (self.committed != Some(position)).then_some(position)
    }
}

pub(super) struct Slot {
    pub(super) at: TopicPartition,
    pub(super) shard: ShardId,
    pub(super) lane: usize,
    pub(super) reader: Reader,
    pub(super) state: State,
    /// Tells this assignment from an earlier one of the same partition.
    pub(super) assignment: u64,
    /// As the lane counts them.
    pub(super) generation: u64,
    /// The log refused our offset: the fetcher has to be started anew.
    pub(super) out_of_range: bool,
    /// Next offset to read.
    pub(super) next: i64,
    /// Where it was placed.
    pub(super) from: i64,
    /// Offsets below it that are gone are counted.
    pub(super) skipped_to: i64,
    /// All that could be read has been, when the broker last said so.
    pub(super) ended: bool,
    /// When there was last nothing to take from it.
    pub(super) dry_at: Option<Instant>,
    /// Its broker has not been heard of late: nobody knows what came since.
    pub(super) silent: bool,
    /// The latest event time that was read, ms; none before the first record.
    pub(super) come_ms: Option<i64>,
    /// It is far ahead of others, and is not read until they have followed.
    pub(super) waits: bool,
    pub(super) offsets: Offsets,
    /// When the last commit was sent, while it has no answer.
    pub(super) committing: Option<Instant>,
    /// Where a `latest` start began; kept with the group's offset.
    pub(super) start: Option<i64>,
    /// One past the last record that can be read.
    pub(super) end: Option<i64>,
    /// What the lane said while its answer to `Assign` was not here yet.
    pub(super) early: Vec<FromLane>,
    /// Fences in a row, and the last one.
    fences: (u32, Option<Instant>),
}

/// A fence that comes within so long after another one is one of a row.
const IN_A_ROW: Duration = Duration::from_secs(10);
/// Doubled with each fence of a row but the first, up to [`LONGEST_TRUCE`].
const FIRST_TRUCE: Duration = Duration::from_millis(500);
const LONGEST_TRUCE: Duration = Duration::from_secs(8);

impl Slot {
    pub(super) fn new(reader: Reader, shard: ShardId, lane: usize, assignment: u64) -> Self {
        Self {
            at: reader.at().clone(),
            shard,
            lane,
            reader,
            state: State::Acquiring { again: None, reason: None },
            assignment,
            generation: 0,
            out_of_range: false,
            next: 0,
            from: 0,
            skipped_to: 0,
            ended: false,
            dry_at: None,
            silent: false,
            come_ms: None,
            waits: false,
            offsets: Offsets::default(),
            committing: None,
            start: None,
            end: None,
            early: vec![],
            fences: (0, None),
        }
    }

    /// How long to leave a partition to the owner that has fenced it. Two that take it from each other as soon as they can bring nothing in.
    pub(super) fn truce(&mut self, now: Instant) -> Duration {
        let (count, last) = &mut self.fences;
        *count = if last.is_some_and(|last| now.saturating_duration_since(last) < IN_A_ROW) {
            *count + 1
        } else {
            0
        };
        *last = Some(now);
        match *count {
            0 => Duration::ZERO,
            count => FIRST_TRUCE.saturating_mul(1 << count.min(5)).min(LONGEST_TRUCE).mul_f64(jitter()),
        }
    }

    /// Whether it may have records, read or not, that have no outcome yet: then it is not idle (P11). Also if it is stopped: what
    /// comes after it is mended must not be late because it was stopped.
    pub(super) fn has_more(&self, now: Instant) -> bool {
        match self.state {
            State::Leaving => false,
            State::Reading => {
                !self.ended
                    || self.silent
                    || self.dry_at.is_none_or(|at| now.saturating_duration_since(at) > LOOKED_AT)
                    || self.waits
                    || self.offsets.durable.map_or(self.from, |to| to.max(self.from)) < self.next
            }
            _ => true,
        }
    }

    /// For alignment.
    pub(super) fn come(&self, now: Instant) -> Come {
        let goes_on = self.has_more(now) && !matches!(self.state, State::Stopped { .. });
        Come { to_ms: self.come_ms, goes_on }
    }

    /// For status, logs and metrics.
    pub(super) fn word(&self) -> &'static str {
        match self.state {
            State::Reading if self.waits => "waiting",
            _ => self.state.word(),
        }
    }

    /// Whether an answer to a commit may still come.
    pub(super) fn awaits_commit(&self, now: Instant) -> bool {
        self.committing.is_some_and(|sent| now < sent + COMMIT_PATIENCE)
    }

    pub(super) fn commit_of(&self, position: i64) -> Commit {
        Commit { at: self.at.clone(), position, tag: self.assignment, start: self.start }
    }

    /// What the group's offset has to follow to, if anything.
    pub(super) fn commit(&self) -> Option<Commit> {
        self.offsets.due().map(|position| self.commit_of(position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch whose commit was unknown turned out to be in the sink when its lane learnt the sink's marks after another lane's rebuild:
    /// the partition was read on from behind it, and the group's offset stayed before it until the next record came, perhaps for ever.
    #[test]
    fn the_groups_offset_follows_to_where_a_partition_is_read_again() {
        let mut offsets = Offsets { proven: true, durable: Some(3), committed: Some(3) };
        offsets.seek(Some(7));
        assert_eq!(offsets.due(), Some(7), "the sink has all below");
        offsets.committed = Some(7);
        assert_eq!(offsets.due(), None);
        offsets.seek(Some(5));
        assert_eq!(offsets.due(), Some(5), "the sink went back");
        offsets.seek(None);
        assert_eq!(offsets.due(), None, "it has no position");
    }
}
