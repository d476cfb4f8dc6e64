//! What the consumer group gives and takes.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::Context,
    time::{Duration, Instant},
};

use adapters::kafka::{Event, TopicPartition};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::{
    Gap, RelayGate,
    relay::{Assigning, AtWork, End, Leaving},
    slot::{Slot, State},
};
use crate::lane::{ToLane, Wanted};

/// How long a commit under way is waited for when partitions are given back.
const LAST_COMMIT: Duration = Duration::from_secs(2);

impl<G: RelayGate> AtWork<'_, G> {
    pub(super) fn serve_group(&mut self) -> Result<(), End> {
        loop {
            let deferred = if self.leaving.is_none() { self.deferred.pop_front() } else { None };
            let Some(event) = deferred.or_else(|| self.source.poll()) else { return Ok(()) };
            match event {
                Event::Assigned(_) | Event::Revoked { .. } if self.leaving.is_some() => {
                    self.deferred.push_back(event)
                }
                Event::Assigned(partitions) => self.assigned(&partitions)?,
                Event::Revoked { partitions, lost } => {
                    let (deadline, count) = (Instant::now() + self.drain, partitions.len());
                    info!(route = self.gate.route(), partitions = count, lost, "partitions are taken back");
                    self.leave(partitions, deadline, lost, false);
                }
                Event::Committed(commits, answer) => {
                    for commit in &commits {
                        self.committed(commit, answer.clone());
                    }
                }
                Event::Figures { connected, ends, partitions, silent } => {
                    let grown: Vec<String> = partitions
                        .iter()
                        .filter_map(|(topic, count)| self.counts.seen(topic, *count))
                        .collect();
                    if !grown.is_empty() {
                        grown.iter().for_each(|warning| warn!(route = self.gate.route(), "{warning}"));
                        let all: Vec<u32> = self.slots.keys().copied().collect();
                        self.keep_counts(&all);
                    }
                    self.trouble = (!connected).then(|| "no broker is connected".to_owned());
                    for (at, end) in ends {
                        if let Some(slot) =
                            self.numbers.get(&at).and_then(|number| self.slots.get_mut(number))
                        {
                            slot.end = Some(end);
                        }
                    }
                    for slot in self.slots.values_mut() {
                        slot.silent = silent.contains(&slot.at);
                    }
                }
                Event::TopicId { topic, id } => self.identified(topic, id),
                Event::Trouble(reason) => {
                    if self.trouble.is_none() {
                        warn!(
                            route = self.gate.route(),
                            reason, "trouble with Kafka; the client tries again"
                        );
                    }
                    self.trouble = Some(reason);
                }
                Event::Fatal { fenced: true, reason } => {
                    return Err(End::Failed(format!(
                        "fenced: another process has joined the group under this instance's name: {reason}"
                    )));
                }
                Event::Fatal { fenced: false, reason } => return Err(End::Again(reason)),
            }
        }
    }

    /// A topic has this id (P3). If it is another one than before, the topic was deleted and made again under our feet: its partitions
    /// are taken over anew, which tells whether they may be read.
    fn identified(&mut self, topic: String, id: String) {
        let id: Arc<str> = id.into();
        let before = self.ids.insert(topic.clone(), id.clone());
        if before.as_ref() == Some(&id) {
            return;
        }
        if let Some(before) = before {
            warn!(
                route = self.gate.route(),
                topic,
                before = &*before,
                now = &*id,
                "a topic was deleted and made again"
            );
        }
        let of = |slot: &Slot| *slot.at.topic == *topic && !matches!(slot.state, State::Leaving);
        let slots: Vec<u32> =
            self.slots.iter().filter(|(_, slot)| of(slot)).map(|(&number, _)| number).collect();
        for number in &slots {
            self.assignments += 1;
            if let Some(slot) = self.slots.get_mut(number) {
                // What was asked before says nothing about this topic.
                slot.assignment = self.assignments;
            }
        }
        self.acquire(&slots);
    }

    fn assigned(&mut self, partitions: &[TopicPartition]) -> Result<(), End> {
        let readers = self.source.take(partitions);
        let readers =
            readers.map_err(|fault| End::Again(format!("an assignment cannot be taken: {fault}")))?;
        let mut numbers = vec![];
        for reader in readers {
            let free = u32::try_from(self.numbers.len()).expect("a cluster has fewer partitions than 2^32");
            let number = *self.numbers.entry(reader.at().clone()).or_insert(free);
            let lane = number as usize % self.ports.len();
            self.assignments += 1;
            let shard = reader.at().shard(self.source.cluster());
            self.slots.insert(number, Slot::new(reader, shard, lane, self.assignments));
            self.ports[lane].slots.push(number);
            numbers.push(number);
        }
        info!(route = self.gate.route(), partitions = numbers.len(), "partitions are assigned");
        // Before any of them is settled.
        self.look_around(Instant::now());
        self.acquire(&numbers);
        Ok(())
    }

    /// Asks the lanes to take shards over, one request a lane.
    pub(super) fn acquire(&mut self, numbers: &[u32]) {
        for (lane, port) in self.ports.iter_mut().enumerate() {
            let mut shards = vec![];
            let mut slots = vec![];
            for &number in numbers {
                let Some(slot) = self.slots.get_mut(&number).filter(|slot| slot.lane == lane) else {
                    continue;
                };
                slot.state = State::Acquiring { again: None, reason: slot.state.reason().map(str::to_owned) };
                shards.push(Wanted {
                    slot: number,
                    shard: slot.shard.clone(),
                    source: self.ids.get(&*slot.at.topic).cloned(),
                    renew: self.options.gap == Gap::Skip,
                });
                slots.push((number, slot.assignment));
            }
            if !shards.is_empty() {
                let (reply, answer) = oneshot::channel();
                port.send(ToLane::Assign { shards, reply });
                self.assigning.push(Assigning { lane, slots, reply: answer });
            }
        }
    }

    pub(super) fn leave_for_good(&mut self) {
        let deadline = Instant::now() + self.drain;
        if let Some(leaving) = &mut self.leaving {
            leaving.last = true;
        }
        let rest: Vec<u32> = self
            .slots
            .iter()
            .filter(|(_, slot)| !matches!(slot.state, State::Leaving))
            .map(|(&number, _)| number)
            .collect();
        let partitions = rest.iter().map(|number| self.slots[number].at.clone()).collect();
        match self.leaving.take() {
            None => self.leave(partitions, deadline, false, true),
            Some(mut before) => {
                self.leave(partitions, deadline, before.lost, true);
                if let Some(leaving) = &mut self.leaving {
                    leaving.partitions.append(&mut before.partitions);
                    leaving.slots.append(&mut before.slots);
                    leaving.replies.append(&mut before.replies);
                }
            }
        }
    }

    /// Asks the lanes to let `partitions` go.
    fn leave(&mut self, partitions: Vec<TopicPartition>, deadline: Instant, lost: bool, last: bool) {
        let mut slots = vec![];
        for at in &partitions {
            let Some(&number) = self.numbers.get(at) else { continue };
            let Some(slot) = self.slots.get_mut(&number) else { continue };
            slot.state = State::Leaving;
            slots.push(number);
        }
        let mut replies = vec![];
        for (lane, port) in self.ports.iter_mut().enumerate() {
            let theirs: Vec<u32> =
                slots.iter().copied().filter(|number| self.slots[number].lane == lane).collect();
            if !theirs.is_empty() {
                replies.push(port.revoke(Some(theirs)));
            }
        }
        self.leaving =
            Some(Leaving { partitions, slots, replies, deadline, lost, last, last_commit_by: None });
    }

    /// True once the relay holds nothing any more and was to end.
    pub(super) fn finish_leaving(&mut self, now: Instant) -> bool {
        let Some(leaving) = &mut self.leaving else { return false };
        let mut cx = Context::from_waker(&self.waker);
        // A lane that has ended holds nothing.
        leaving.replies.retain_mut(|reply| Pin::new(reply).poll(&mut cx).is_pending());
        if !leaving.replies.is_empty() && now < leaving.deadline {
            return false;
        }
        // A commit that is still under way must not come after the last one.
        let slots = &self.slots;
        let commits = leaving
            .slots
            .iter()
            .any(|number| slots.get(number).is_some_and(|slot| slot.committing.is_some()));
        if commits && now < *leaving.last_commit_by.get_or_insert(now + LAST_COMMIT) {
            return false;
        }
        let late = leaving.replies.len();
        let Some(leaving) = self.leaving.take() else { return false };
        if late > 0 {
            warn!(
                route = self.gate.route(),
                lanes = late,
                "lanes did not let go in time; what they hold is abandoned"
            );
        }
        // What the lanes have settled they said before they let go.
        self.hear();
        let commits: Vec<_> =
            leaving.slots.iter().filter_map(|number| self.slots.get(number)?.commit()).collect();
        if !leaving.lost
            && !commits.is_empty()
            && let Err(fault) = self.source.commit_last(&commits)
        {
            warn!(route = self.gate.route(), %fault, "the last offsets are not committed; the sink's positions hold");
        }
        for number in &leaving.slots {
            if let Some(slot) = self.slots.remove(number) {
                let port = &mut self.ports[slot.lane];
                port.slots.retain(|other| other != number);
            }
        }
        self.regenerate();
        if leaving.last {
            return true;
        }
        if let Err(fault) = self.source.give_back(&leaving.partitions) {
            warn!(route = self.gate.route(), %fault, "partitions cannot be given back");
        }
        // The group may have had its next word ready.
        self.waker.wake_by_ref();
        false
    }

    /// This membership is over: the lanes let everything go, and nothing is committed.
    pub(super) fn abandon(&mut self) {
        self.leave_for_good();
        if let Some(leaving) = &mut self.leaving {
            leaving.lost = true;
        }
        while self.flush().is_ok() && !self.finish_leaving(Instant::now()) {
            std::thread::park_timeout(self.nap(Instant::now()));
        }
    }
}
