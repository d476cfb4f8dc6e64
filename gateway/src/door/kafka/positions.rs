//! Where partitions are read from, and the offsets that follow.

use std::time::{Duration, Instant};

use adapters::kafka::{Commit, CommitRefusal, KafkaFault, TopicPartition};
use tracing::warn;

use super::{
    RelayGate,
    place::{Placement, Start, place},
    relay::{AtWork, RETRY},
    slot::{COMMIT_PATIENCE, State, Then},
};

/// Before a commit that met a rebalance is sent again.
const REBALANCE_RETRY: Duration = Duration::from_millis(200);

/// The one that is due for longest: one that fails takes seconds and is due again soon, and must not keep the others out.
fn longest_due<T>(waiting: impl Iterator<Item = (Instant, u32, T)>, now: Instant) -> Option<(u32, T)> {
    let due = waiting.filter(|(at, ..)| *at <= now).min_by_key(|(at, number, _)| (*at, *number));
    due.map(|(_, number, what)| (number, what))
}

impl<G: RelayGate> AtWork<'_, G> {
    /// Places at most one partition: it may block for some seconds, and the group has to be served in between.
    pub(super) fn place_one(&mut self) {
        let now = Instant::now();
        let waiting = self.slots.iter().filter_map(|(&number, slot)| match &slot.state {
            State::Placing { position, at, .. } => Some((*at, number, *position)),
            State::Proving { position, again, .. } => Some((*again, number, Some(*position))),
            _ => None,
        });
        let Some((number, position)) = longest_due(waiting, now) else { return };
        if let State::Proving { then, .. } = self.slots[&number].state {
            self.prove(number, position.unwrap_or_default(), then);
        } else if let (Err(fault), Some(slot)) = (self.place(number, position), self.slots.get_mut(&number)) {
            let reason = format!("{}: {fault}", slot.at);
            if slot.state.reason() != Some(&reason) {
                warn!(route = self.gate.route(), reason, "a partition cannot be placed yet");
            }
            slot.state = State::Placing { position, at: Instant::now() + RETRY, reason: Some(reason) };
        }
        // There may be more to place.
        self.waker.wake_by_ref();
    }

    fn place(&mut self, number: u32, position: Option<i64>) -> Result<(), KafkaFault> {
        let at = self.slots[&number].at.clone();
        let mut log = self.source.log_range(&at)?;
        let start = match self.options.start {
            Start::Latest => self.source.recorded_start(&at)?.or(position.is_none().then_some(log.1)),
            Start::Earliest | Start::Time(_) => None,
        };
        let wanted = match (position, self.options.start) {
            (Some(position), _) => position,
            (None, Start::Earliest) => log.0,
            (None, Start::Latest) => start.unwrap_or(log.1),
            (None, Start::Time(time_ms)) => self.source.offset_at(&at, time_ms)?.unwrap_or(log.1),
        };
        if wanted > log.1 {
            // Under read committed the range ends at the first open transaction.
            log.1 = log.1.max(self.source.log_end(&at)?);
        }
        let from = match place(&at, wanted, log, self.options.gap) {
            Placement::Read(from) => from,
            Placement::Skip { from, to } => {
                // Placed anew before a record came, it comes by here again.
                let known = self.slots[&number].skipped_to;
                if to > known {
                    warn!(route = self.gate.route(), partition = %at, from, to, "offsets are gone and passed over");
                    self.skipped = self.skipped.saturating_add_signed(to - from.max(known));
                }
                if let Some(slot) = self.slots.get_mut(&number) {
                    slot.skipped_to = known.max(to);
                }
                to
            }
            Placement::Stop(reason) => {
                self.stop(number, &at, reason);
                return Ok(());
            }
        };
        let Some(slot) = self.slots.get_mut(&number) else { return Ok(()) };
        slot.next = from;
        slot.from = from;
        slot.ended = false;
        slot.start = start;
        slot.end = Some(log.1);
        // Where the fetcher has ended a seek fails: then it is started anew, in the next attempt.
        let placed = if slot.out_of_range {
            let owned: Vec<(TopicPartition, i64)> =
                self.slots.values().map(|slot| (slot.at.clone(), slot.next)).collect();
            self.source.restart(&at, &owned)
        } else {
            self.source.read_from(&at, from)
        };
        let Some(slot) = self.slots.get_mut(&number) else { return Ok(()) };
        slot.out_of_range = placed.is_err();
        placed?;
        if slot.offsets.proven {
            slot.state = State::Reading;
        } else {
            self.prove(number, from, Then::Read);
        }
        Ok(())
    }

    /// Commits the position under the group's generation: an answer proves that we own the partition (P13).
    fn prove(&mut self, number: u32, position: i64, then: Then) {
        let Some(slot) = self.slots.get_mut(&number) else { return };
        let commit = slot.commit_of(position);
        let now = Instant::now();
        slot.committing = Some(now);
        let refused = slot.state.reason().map(str::to_owned);
        slot.state = State::Proving { position, then, again: now + COMMIT_PATIENCE, refused };
        self.source.commit(vec![commit]);
    }

    /// Sends what the group's offsets have to follow to.
    pub(super) fn commit(&mut self) {
        let now = Instant::now();
        let mut commits = vec![];
        for slot in self.slots.values_mut().filter(|slot| !slot.awaits_commit(now)) {
            if let Some(commit) = slot.commit() {
                slot.committing = Some(now);
                commits.push(commit);
            }
        }
        if !commits.is_empty() {
            self.source.commit(commits);
        }
    }

    /// Takes in the group's answer to a commit.
    pub(super) fn committed(&mut self, commit: &Commit, answer: Result<(), CommitRefusal>) {
        let Commit { at, position, tag, .. } = commit;
        let Some(&number) = self.numbers.get(at) else { return };
        // An answer to an earlier assignment proves nothing about this one.
        let Some(slot) = self.slots.get_mut(&number).filter(|slot| slot.assignment == *tag) else { return };
        let position = *position;
        slot.committing = None;
        let proving = match slot.state {
            State::Proving { position: asked, then, .. } if asked == position => Some(then),
            _ => None,
        };
        let prove = |then: Then, after: Duration, refused: Option<String>| State::Proving {
            position,
            then,
            again: Instant::now() + after,
            refused,
        };
        match (answer, proving) {
            (Ok(()), Some(then)) => {
                slot.offsets.committed = Some(position);
                match then {
                    Then::Read => {
                        slot.offsets.proven = true;
                        slot.state = State::Reading;
                    }
                    Then::Acquire => self.acquire(&[number]),
                }
            }
            (Ok(()), None) => slot.offsets.committed = Some(position),
            (Err(CommitRefusal::Fenced(reason)), _) => {
                if !matches!(slot.state, State::Leaving | State::Stopped { .. }) {
                    self.stop(number, at, format!("{at}: fenced by the consumer group: {reason}"));
                }
            }
            (Err(CommitRefusal::OldGeneration(reason)), proving) => {
                // Put out of the group, or only overtaken by a rebalance: nothing is read until that is known. If we are out, the
                // group's word that the partition is lost comes soon.
                let reason = format!("{at}: the consumer group does not confirm this member: {reason}");
                if let Some(then) = proving.or(matches!(slot.state, State::Reading).then_some(Then::Read)) {
                    warn!(route = self.gate.route(), reason, "not reading until the group confirms");
                    slot.state = prove(then, REBALANCE_RETRY, Some(reason));
                }
            }
            (Err(CommitRefusal::Rebalancing), Some(then)) => slot.state = prove(then, REBALANCE_RETRY, None),
            (Err(CommitRefusal::Rebalancing), None) => {}
            (Err(CommitRefusal::Other(reason)), proving) => {
                warn!(route = self.gate.route(), partition = %at, reason, "offsets are not committed");
                if let Some(then) = proving {
                    slot.state =
                        prove(then, RETRY, Some(format!("{at}: offsets cannot be committed: {reason}")));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two partitions without a leader, of which each try takes 5 s and which are due again after 1 s, were tried in turn, and the
    /// others behind them were never placed.
    #[test]
    fn partitions_that_cannot_be_placed_keep_no_other_one_out() {
        let mut now = Instant::now();
        let mut waiting: Vec<(Instant, u32, ())> = (0..5).map(|number| (now, number, ())).collect();
        let mut tried = vec![];
        while tried.len() < 9 {
            let Some((number, ())) = longest_due(waiting.iter().copied(), now) else {
                now += RETRY;
                continue;
            };
            tried.push(number);
            if number < 2 {
                now += Duration::from_secs(5);
                waiting
                    .iter_mut()
                    .filter(|(_, other, ())| *other == number)
                    .for_each(|each| each.0 = now + RETRY);
            } else {
                waiting.retain(|(_, other, ())| *other != number);
            }
        }
        assert_eq!(tried, [0, 1, 2, 3, 4, 0, 1, 0, 1]);
    }
}
