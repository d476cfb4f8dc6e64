//! What the lanes say.

use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

use adapters::kafka::TopicPartition;
use tokio::sync::oneshot;
use tracing::{error, info, warn};

use super::{
    RelayGate,
    place::source,
    relay::{AtWork, End, RETRY, gone},
    slot::{Slot, State, Then},
};
use crate::lane::{AssignedShard, FromLane, ToLane};

impl<G: RelayGate> AtWork<'_, G> {
    pub(super) fn serve_lanes(&mut self) -> Result<(), End> {
        self.hear();
        let mut answers = vec![];
        let mut cx = Context::from_waker(&self.waker);
        self.assigning.retain_mut(|assigning| match Pin::new(&mut assigning.reply).poll(&mut cx) {
            Poll::Pending => true,
            Poll::Ready(answer) => {
                answers.push((assigning.lane, std::mem::take(&mut assigning.slots), answer));
                false
            }
        });
        for (lane, slots, answer) in answers {
            // What the lane said before this answer was about an earlier assignment.
            self.hear();
            self.acquired(&slots, answer.map_err(|_| gone(lane))?);
            let numbers: Vec<u32> = slots.into_iter().map(|(number, _)| number).collect();
            self.keep_counts(&numbers);
        }
        let mut before = vec![];
        let mut cx = Context::from_waker(&self.waker);
        self.counting.retain_mut(|reply| match Pin::new(reply).poll(&mut cx) {
            Poll::Pending => true,
            Poll::Ready(kept) => {
                before.extend(kept.into_iter().flatten());
                false
            }
        });
        for (number, count) in before {
            let Some(slot) = self.slots.get(&number) else { continue };
            if let Some(warning) = self.counts.kept(&slot.at.topic, count) {
                warn!(route = self.gate.route(), "{warning}");
            }
        }
        let now = Instant::now();
        let due =
            |slot: &Slot| matches!(slot.state, State::Acquiring { again: Some(again), .. } if again <= now);
        let again: Vec<u32> =
            self.slots.iter().filter(|(_, slot)| due(slot)).map(|(&number, _)| number).collect();
        if !again.is_empty() {
            self.acquire(&again);
        }
        Ok(())
    }

    /// Has the lanes keep how many partitions the topics of these slots have, and say what was kept before (P13).
    pub(super) fn keep_counts(&mut self, numbers: &[u32]) {
        for (lane, port) in self.ports.iter_mut().enumerate() {
            let owned = numbers.iter().filter_map(|number| {
                let slot = self.slots.get(number).filter(|slot| slot.lane == lane)?;
                let left =
                    matches!(slot.state, State::Acquiring { .. } | State::Stopped { .. } | State::Leaving);
                if left { None } else { Some((*number, self.counts.of(&slot.at.topic)?)) }
            });
            let counts: Vec<(u32, i64)> = owned.collect();
            if !counts.is_empty() {
                let (reply, answer) = oneshot::channel();
                port.send(ToLane::Partitions { counts, reply });
                self.counting.push(answer);
            }
        }
    }

    fn acquired(&mut self, slots: &[(u32, u64)], answer: Result<Vec<AssignedShard>, String>) {
        let now = Instant::now();
        let (mut early, mut strangers) = (vec![], vec![]);
        let answer = answer
            .map(|shards| shards.into_iter().map(|shard| (shard.slot, shard)).collect::<HashMap<_, _>>());
        for (number, assignment) in slots {
            let Some(slot) = self.slots.get_mut(number).filter(|slot| slot.assignment == *assignment) else {
                continue;
            };
            if !matches!(slot.state, State::Acquiring { .. }) {
                continue;
            }
            let shard = match &answer {
                Ok(shards) => shards.get(number).ok_or("the lane did not say where to read on"),
                Err(reason) => Err(reason.as_str()),
            };
            match shard {
                Ok(shard) => {
                    let id = self.ids.get(&*slot.at.topic);
                    match id.and_then(|id| source(&slot.at, shard, id, self.options.gap)) {
                        Some(Err(reason)) => {
                            strangers.push((*number, slot.at.clone(), reason));
                            continue;
                        }
                        Some(Ok(warning)) => warn!(route = self.gate.route(), "{warning}"),
                        None => {}
                    }
                    slot.generation = shard.generation;
                    slot.offsets.proven = false;
                    // The sink may have gone back.
                    slot.offsets.durable = slot.offsets.durable.and(shard.position);
                    slot.state = State::Placing { position: shard.position, at: now, reason: None };
                    early.append(&mut slot.early);
                }
                Err(reason) => {
                    if slot.state.reason() != Some(reason) {
                        warn!(route = self.gate.route(), partition = %slot.at, reason, "the shard cannot be acquired yet");
                    }
                    slot.state =
                        State::Acquiring { again: Some(now + RETRY), reason: Some(reason.to_owned()) };
                    slot.early.clear();
                }
            }
        }
        for (number, at, reason) in strangers {
            self.stop(number, &at, reason);
        }
        self.regenerate();
        for event in early {
            self.heard(event);
        }
    }

    /// Takes in what the lanes have said so far.
    pub(super) fn hear(&mut self) {
        let waker = self.waker.clone();
        let mut cx = Context::from_waker(&waker);
        while let Poll::Ready(Some(event)) = self.events.poll_recv(&mut cx) {
            self.heard(event);
        }
    }

    fn heard(&mut self, event: FromLane) {
        let (FromLane::Progress { slot: number, .. }
        | FromLane::Seek { slot: number, .. }
        | FromLane::Fenced { slot: number, .. }
        | FromLane::Stopped { slot: number, .. }) = event;
        let Some(slot) = self.slots.get_mut(&number) else { return };
        match slot.state {
            // The answer to `Assign` comes another way, and may be overtaken. Progress before it is of an earlier assignment.
            State::Acquiring { .. } => {
                if !matches!(event, FromLane::Progress { .. }) {
                    slot.early.push(event);
                }
                return;
            }
            State::Leaving | State::Stopped { .. } => {
                if let FromLane::Progress { position, .. } = event {
                    slot.offsets.durable = Some(position);
                }
                return;
            }
            State::Placing { .. } | State::Proving { .. } | State::Reading => {}
        }
        match event {
            FromLane::Progress { position, .. } => slot.offsets.durable = Some(position),
            FromLane::Seek { generation, position, .. } => {
                if generation > slot.generation {
                    info!(route = self.gate.route(), partition = %slot.at, position, "a partition is read again");
                    slot.generation = generation;
                    slot.offsets.seek(position);
                    slot.state = State::Placing { position, at: Instant::now(), reason: None };
                    self.regenerate();
                }
            }
            // Of an earlier assignment, or membership.
            FromLane::Fenced { generation, .. } | FromLane::Stopped { generation, .. }
                if generation < slot.generation => {}
            FromLane::Fenced { reason, .. } => {
                // A partition that was not placed yet has nothing to commit: a commit would take the place of what is recorded
                // with the last one (where `start = "latest"` began). It is acquired again, and proven when it is placed.
                let known =
                    slot.offsets.durable.or(slot.offsets.committed).or((slot.next > 0).then_some(slot.next));
                let Some(position) = known else {
                    warn!(route = self.gate.route(), partition = %slot.at, reason, "fenced before it was placed");
                    return self.acquire(&[number]);
                };
                warn!(route = self.gate.route(), partition = %slot.at, reason, "fenced; asking the group who owns the partition");
                let now = Instant::now();
                let again = now + slot.truce(now);
                slot.state = State::Proving { position, then: Then::Acquire, again, refused: Some(reason) };
            }
            FromLane::Stopped { reason, .. } => {
                let at = slot.at.clone();
                self.stop(number, &at, reason);
            }
        }
    }

    /// Reads the partition no more until the next assignment.
    pub(super) fn stop(&mut self, number: u32, at: &TopicPartition, reason: String) {
        error!(route = self.gate.route(), partition = %at, reason, "a partition is not read any more");
        if let Err(fault) = self.source.pause(std::slice::from_ref(at)) {
            warn!(route = self.gate.route(), partition = %at, %fault, "a stopped partition cannot be paused");
        }
        if let Some(slot) = self.slots.get_mut(&number) {
            slot.state = State::Stopped { reason };
        }
    }

    /// The next chunks bear the slots' present generations.
    pub(super) fn regenerate(&mut self) {
        for port in &mut self.ports {
            let slots = &self.slots;
            port.generations = port.slots.iter().map(|number| (*number, slots[number].generation)).collect();
        }
    }
}
