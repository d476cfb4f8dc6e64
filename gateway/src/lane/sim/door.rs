//! A source log in memory and a door that reads it into a gate's lanes, as the Kafka door does: it obeys `Seek`, assigns again
//! what it still owns when it was fenced, and reads at least once.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use super::{invariant::Invariant, trace::note, world::World};
use crate::{
    door::Submit,
    gate::Gate,
    lane::{AssignedShard, FromLane, HandOver, ToLane, Wanted},
    naming::{Chunk, Headers, KafkaOrigin, Record},
};

/// The log, and what the group knows of it.
#[derive(Default)]
pub(super) struct Topic {
    pub(super) partitions: Vec<Vec<String>>,
    /// The group's committed offsets.
    pub(super) committed: Vec<i64>,
    /// Whom the group gave each partition.
    pub(super) owners: Vec<Option<String>>,
    /// Partitions that a lane gave up, and why.
    pub(super) stopped: BTreeMap<usize, String>,
    /// Fenced: by whom.
    pub(super) fenced: Vec<(usize, String)>,
    pub(super) seeks: u32,
    /// The partition counts that the sink had kept before, by partition.
    pub(super) before: BTreeMap<usize, i64>,
    /// Records handed to lanes, by partition.
    pub(super) read: Vec<u64>,
    /// Its id, as the door says it, and whether another one may take its place.
    pub(super) id: Option<Arc<str>>,
    pub(super) renew: bool,
    /// What was kept before, by partition.
    pub(super) sources: BTreeMap<usize, String>,
}

impl Topic {
    pub(super) fn new(partitions: usize) -> Arc<Mutex<Self>> {
        let topic = Topic {
            partitions: vec![Vec::new(); partitions],
            committed: vec![0; partitions],
            owners: vec![None; partitions],
            read: vec![0; partitions],
            ..Topic::default()
        };
        Arc::new(Mutex::new(topic))
    }
}

pub(super) fn shard_of(partition: usize) -> String {
    format!("kafka/c/t/{partition}")
}

pub(super) enum Command {
    Assign(usize),
    /// Answered once the lane holds nothing of it.
    Revoke(usize, HandOver, oneshot::Sender<()>),
    /// Reads again from an offset, for no reason that the lane knows of.
    Rewind(usize, i64),
}

/// One gate's door.
pub(super) struct Door {
    gate: Gate,
    commands: mpsc::UnboundedSender<Command>,
    task: JoinHandle<()>,
}

impl Drop for Door {
    fn drop(&mut self) {
        self.task.abort();
    }
}

enum State {
    Assigning(oneshot::Receiver<Result<Vec<AssignedShard>, String>>),
    /// Assign again after a while.
    Waiting,
    Reading,
}

struct Slot {
    partition: usize,
    lane: usize,
    generation: u64,
    next: i64,
    state: State,
}

struct Reader {
    gate: Gate,
    owner: String,
    topic: Arc<Mutex<Topic>>,
    world: Arc<Mutex<World>>,
    events: mpsc::UnboundedReceiver<FromLane>,
    slots: BTreeMap<u32, Slot>,
    next_slot: u32,
    burst: usize,
}

impl Door {
    pub(super) fn start(
        gate: &Gate,
        owner: &str,
        topic: &Arc<Mutex<Topic>>,
        world: &Arc<Mutex<World>>,
        burst: usize,
    ) -> Self {
        let (commands, mut inbox) = mpsc::unbounded_channel();
        let mut reader = Reader {
            gate: gate.clone(),
            owner: owner.into(),
            topic: topic.clone(),
            world: world.clone(),
            events: gate.take_events().expect("one door a gate"),
            slots: BTreeMap::new(),
            next_slot: 0,
            burst,
        };
        // Random runs have long pauses, in which a door that looks often costs more than all else.
        let patient = world.lock().judge.on;
        let mut idle = 0;
        let task = tokio::spawn(async move {
            loop {
                while let Ok(event) = reader.events.try_recv() {
                    reader.event(event).await;
                }
                loop {
                    match inbox.try_recv() {
                        Ok(command) => reader.command(command).await,
                        Err(mpsc::error::TryRecvError::Empty) => break,
                        Err(mpsc::error::TryRecvError::Disconnected) => return,
                    }
                }
                reader.assigned().await;
                let read = reader.read().await;
                idle = if read || !patient { 0 } else { idle + 1 };
                let pause_ms = if read { 2 } else { 20 << (idle / 16).min(3) };
                tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            }
        });
        Door { gate: gate.clone(), commands, task }
    }

    pub(super) fn assign(&self, partition: usize) {
        self.commands.send(Command::Assign(partition)).ok();
    }

    pub(super) fn rewind(&self, partition: usize, offset: i64) {
        self.commands.send(Command::Rewind(partition, offset)).ok();
    }

    pub(super) fn revoke(&self, partition: usize) -> oneshot::Receiver<()> {
        let (done, gone) = oneshot::channel();
        let lanes = self.gate.relay_lanes();
        let hand_over = lanes[partition % lanes.len()].hand_over();
        self.commands.send(Command::Revoke(partition, hand_over, done)).ok();
        gone
    }
}

impl Reader {
    async fn send(&self, lane: usize, message: ToLane) {
        // A lane that has ended takes nothing: its gate is closed or crashed.
        self.gate.relay_lanes()[lane].queue.send(message).await.ok();
    }

    async fn assign(&mut self, partition: usize) {
        let number = self.next_slot;
        self.next_slot += 1;
        let lane = partition % self.gate.relay_lanes().len();
        let (reply, answer) = oneshot::channel();
        let (source, renew) = {
            let topic = self.topic.lock();
            (topic.id.clone(), topic.renew)
        };
        let shard = shard_of(partition).as_str().into();
        let shards = vec![Wanted { slot: number, shard, source, renew }];
        self.send(lane, ToLane::Assign { shards, reply }).await;
        let slot = Slot { partition, lane, generation: 0, next: 0, state: State::Assigning(answer) };
        self.slots.insert(number, slot);
    }

    async fn command(&mut self, command: Command) {
        match command {
            Command::Assign(partition) => self.assign(partition).await,
            Command::Rewind(partition, offset) => {
                let slots = self.slots.values_mut().filter(|slot| slot.partition == partition);
                slots.for_each(|slot| slot.next = offset);
            }
            Command::Revoke(partition, hand_over, done) => {
                let numbers: Vec<u32> = self
                    .slots
                    .iter()
                    .filter(|(_, slot)| slot.partition == partition)
                    .map(|(n, _)| *n)
                    .collect();
                let lane = partition % self.gate.relay_lanes().len();
                numbers.iter().for_each(|number| drop(self.slots.remove(number)));
                let (reply, answer) = oneshot::channel();
                self.send(lane, ToLane::Revoke { slots: Some(numbers), hand_over, reply }).await;
                tokio::spawn(async move {
                    answer.await.ok();
                    done.send(()).ok();
                });
            }
        }
    }

    async fn assigned(&mut self) {
        let mut again = Vec::new();
        let mut counted = Vec::new();
        for (number, slot) in &mut self.slots {
            match &mut slot.state {
                State::Assigning(answer) => match answer.try_recv() {
                    Ok(Ok(assigned)) => {
                        slot.generation = slot.generation.max(assigned[0].generation);
                        if slot.generation == assigned[0].generation {
                            slot.next = assigned[0].position.unwrap_or(0);
                        }
                        slot.state = State::Reading;
                        if let Some(before) = &assigned[0].source {
                            self.topic.lock().sources.insert(slot.partition, before.clone());
                        }
                        counted.push((*number, slot.partition, slot.lane));
                    }
                    Ok(Err(_)) | Err(oneshot::error::TryRecvError::Closed) => slot.state = State::Waiting,
                    Err(oneshot::error::TryRecvError::Empty) => {}
                },
                State::Waiting => again.push((*number, slot.partition)),
                State::Reading => {}
            }
        }
        for (number, partition, lane) in counted {
            let (reply, answer) = oneshot::channel();
            let count = self.topic.lock().partitions.len() as i64;
            self.send(lane, ToLane::Partitions { counts: vec![(number, count)], reply }).await;
            let topic = self.topic.clone();
            tokio::spawn(async move {
                for (_, before) in answer.await.into_iter().flatten() {
                    topic.lock().before.insert(partition, before);
                }
            });
        }
        for (number, partition) in again {
            self.slots.remove(&number);
            self.assign(partition).await;
        }
    }

    async fn event(&mut self, event: FromLane) {
        match event {
            FromLane::Progress { slot, position } => {
                let Some(slot) = self.slots.get(&slot) else { return };
                note(|| format!("{}: offset {position} of {} may be committed", self.owner, slot.partition));
                let mut world = self.world.lock();
                if world.went_back == 0 && !world.elsewhere {
                    let shard = shard_of(slot.partition);
                    let durable = world.db.shards.get(&shard).and_then(|row| row.position);
                    if durable < Some(position) {
                        let what = format!("{shard} at {durable:?} in the sink, {position} committed");
                        world.judge.falls(Invariant::OffsetFollows, what);
                    }
                }
                drop(world);
                let committed = &mut self.topic.lock().committed[slot.partition];
                *committed = (*committed).max(position);
            }
            FromLane::Seek { slot, generation, position } => {
                self.topic.lock().seeks += 1;
                if let Some(slot) = self.slots.get_mut(&slot) {
                    assert!(generation > slot.generation, "generations count up");
                    note(|| format!("{}: {} is read again from {position:?}", self.owner, slot.partition));
                    slot.generation = generation;
                    slot.next = position.unwrap_or(0);
                }
            }
            FromLane::Fenced { slot, owner, .. } => {
                let Some(slot) = self.slots.remove(&slot) else { return };
                let mine = {
                    let mut topic = self.topic.lock();
                    topic.fenced.push((slot.partition, owner));
                    topic.owners[slot.partition].as_ref() == Some(&self.owner)
                };
                if mine {
                    self.assign(slot.partition).await;
                }
            }
            FromLane::Stopped { slot, reason, .. } => {
                if let Some(slot) = self.slots.remove(&slot) {
                    self.topic.lock().stopped.insert(slot.partition, reason);
                }
            }
        }
    }

    /// One chunk a lane; whether anything was read.
    async fn read(&mut self) -> bool {
        let mut any = false;
        for lane in 0..self.gate.relay_lanes().len() {
            let mut chunk = Chunk::default();
            let mut generations = Vec::new();
            for (&number, slot) in self.slots.iter_mut().filter(|(_, slot)| slot.lane == lane) {
                if !matches!(slot.state, State::Reading) {
                    continue;
                }
                generations.push((number, slot.generation));
                let mut topic = self.topic.lock();
                let topic = &mut *topic;
                let log = &topic.partitions[slot.partition];
                for offset in (slot.next..log.len() as i64).take(self.burst) {
                    let record = Record {
                        payload: Some(log[offset as usize].as_bytes()),
                        headers: Headers::None,
                        kafka: Some(KafkaOrigin {
                            topic: "t",
                            partition: slot.partition as i32,
                            offset,
                            key: None,
                            timestamp_ms: None,
                            shard: number,
                        }),
                        arrival_us: self.gate.arrival_us(),
                        tenant: "",
                        index: None,
                    };
                    Submit::name(&self.gate, &record, &mut chunk);
                    slot.next = offset + 1;
                    topic.read[slot.partition] += 1;
                }
            }
            if !chunk.records.is_empty() {
                any = true;
                self.send(lane, ToLane::Relay { chunk, generations: generations.into() }).await;
            }
        }
        any
    }
}
