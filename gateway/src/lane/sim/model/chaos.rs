//! What befalls a run from outside: crashes, hand-overs, stopped processes, lost connections, a sink that goes back.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use dedup_store::Store;
use parking_lot::Mutex;
use rand::{Rng, rngs::SmallRng};
use tokio::time::{Instant, sleep, timeout};

use super::super::{
    door::{Door, Topic},
    rig::Rig,
    world::Db,
};
use crate::gate::Gate;

/// One instance, up or down.
pub(super) struct Node {
    pub(super) name: String,
    pub(super) lanes: (u32, u32),
    pub(super) gate: Option<Gate>,
    door: Option<Door>,
}

/// What the next start finds of the store.
#[derive(Clone, Copy, Debug)]
enum Kept {
    Nothing,
    /// Of each shard, what was settled up to some batch.
    Some,
    All,
}

/// Chances of each thing, drawn once a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Menu {
    pub(super) crash: bool,
    pub(super) close: bool,
    pub(super) moves: bool,
    pub(super) freeze: bool,
    pub(super) cut: bool,
    pub(super) down: bool,
    pub(super) back: bool,
}

impl Menu {
    pub(super) fn draw(rng: &mut SmallRng) -> Self {
        let mut likely = |percent: u32| rng.random_range(0..100) < percent;
        Menu {
            crash: likely(40),
            close: likely(25),
            moves: likely(50),
            freeze: likely(30),
            cut: likely(40),
            down: likely(30),
            back: likely(30),
        }
    }

    /// Every record is judged in one process from start to end, so that outcomes can be counted.
    pub(super) fn countable(&self) -> bool {
        !(self.crash || self.close || self.freeze || self.back)
    }
}

#[derive(Clone)]
pub(super) struct Cluster {
    pub(super) rig: Rig,
    pub(super) topic: Arc<Mutex<Topic>>,
    pub(super) nodes: Arc<Mutex<Vec<Node>>>,
    pub(super) burst: usize,
}

impl Cluster {
    pub(super) fn add(&self, name: &str, lanes: (u32, u32)) {
        self.nodes.lock().push(Node { name: name.into(), lanes, gate: None, door: None });
    }

    pub(super) fn gate(&self, node: usize) -> Option<Gate> {
        self.nodes.lock()[node].gate.clone()
    }

    fn name(&self, node: usize) -> String {
        self.nodes.lock()[node].name.clone()
    }

    /// Starts the instance; tries until it is up.
    pub(super) async fn start(&self, node: usize, store: impl Fn() -> Store) {
        let (name, lanes) = {
            let nodes = self.nodes.lock();
            (nodes[node].name.clone(), nodes[node].lanes)
        };
        let gate = loop {
            match self.rig.try_gate(&name, lanes, store()).await {
                Ok(gate) => break gate,
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
        };
        let door = Door::start(&gate, &name, &self.topic, &self.rig.world, self.burst);
        for (partition, owner) in self.topic.lock().owners.iter().enumerate() {
            if owner.as_ref() == Some(&name) {
                door.assign(partition);
            }
        }
        let mut nodes = self.nodes.lock();
        (nodes[node].gate, nodes[node].door) = (Some(gate), Some(door));
    }

    fn take_down(&self, node: usize) -> Option<Gate> {
        let mut nodes = self.nodes.lock();
        nodes[node].door = None;
        nodes[node].gate.take()
    }

    fn store_of(&self, db: &Db, kept: Kept, rng: &mut SmallRng) -> impl Fn() -> Store + use<> {
        let mut some = || -> BTreeMap<String, i64> {
            db.shards.iter().map(|(shard, row)| (shard.clone(), rng.random_range(0..=row.sequence))).collect()
        };
        let known = match kept {
            Kept::Nothing => BTreeMap::new(),
            Kept::Some => some(),
            Kept::All => db.shards.iter().map(|(shard, row)| (shard.clone(), row.sequence)).collect(),
        };
        let (rig, db) = (self.rig.clone(), db.clone());
        move || rig.older_store(&db, &known)
    }

    /// Does one thing from the menu.
    pub(super) async fn strike(&self, menu: Menu, rng: &mut SmallRng, snapshots: &mut Vec<Db>) {
        let count = self.nodes.lock().len();
        let node = rng.random_range(0..count);
        let up = self.nodes.lock()[node].gate.is_some();
        let on = [menu.crash, menu.close, menu.moves, menu.freeze, menu.cut, menu.down, menu.back];
        let choices: Vec<usize> = (0..on.len()).filter(|at| on[*at]).collect();
        if choices.is_empty() {
            return;
        }
        match choices[rng.random_range(0..choices.len())] {
            0 if up => {
                let gate = self.take_down(node);
                gate.into_iter().for_each(Gate::crash);
                self.rig.world.lock().frozen.remove(&self.name(node));
                let db = self.rig.db();
                sleep(Duration::from_millis(rng.random_range(0..1_500))).await;
                if menu.back && rng.random_range(0..3) == 0 {
                    self.go_back(rng, snapshots);
                }
                let kept = [Kept::Nothing, Kept::Some, Kept::All][rng.random_range(0..3)];
                let store = self.store_of(&db, kept, rng);
                self.start(node, store).await;
            }
            1 if up => {
                let name = self.name(node);
                self.rig.world.lock().frozen.remove(&name);
                if let Some(gate) = self.take_down(node) {
                    gate.close().await;
                }
                let db = self.rig.db();
                let kept = [Kept::Nothing, Kept::All][rng.random_range(0..2)];
                let store = self.store_of(&db, kept, rng);
                self.start(node, store).await;
            }
            2 => {
                let partition = rng.random_range(0..self.topic.lock().partitions.len());
                let to = rng.random_range(0..count);
                self.hand_over(partition, to, rng).await;
            }
            3 if up => {
                let name = self.name(node);
                self.rig.world.lock().frozen.insert(name.clone());
                let world = self.rig.world.clone();
                let until = rng.random_range(100..9_000);
                tokio::spawn(async move {
                    sleep(Duration::from_millis(until)).await;
                    world.lock().frozen.remove(&name);
                });
            }
            4 => self.rig.cut(),
            5 => {
                let mut world = self.rig.world.lock();
                world.connections.clear();
                world.down_until = Some(Instant::now() + Duration::from_millis(rng.random_range(10..5_000)));
            }
            6 => {
                if snapshots.is_empty() || rng.random_range(0..3) == 0 {
                    snapshots.push(self.rig.db());
                } else {
                    self.go_back(rng, snapshots);
                }
            }
            _ => {}
        }
    }

    /// The sink shows an older state. Later snapshots are of a history that is gone.
    fn go_back(&self, rng: &mut SmallRng, snapshots: &mut Vec<Db>) {
        let mut world = self.rig.world.lock();
        if world.went_back > 0 || snapshots.is_empty() {
            return;
        }
        let to = snapshots.swap_remove(rng.random_range(0..snapshots.len()));
        world.go_back(to);
    }

    /// The group gives a partition to another instance, or to the same again; the old one hears of it in time, or late.
    async fn hand_over(&self, partition: usize, to: usize, rng: &mut SmallRng) {
        let from = {
            let owner = self.topic.lock().owners[partition].clone();
            self.nodes.lock().iter().position(|node| Some(&node.name) == owner.as_ref())
        };
        self.topic.lock().owners[partition] = Some(self.name(to));
        let revoke = |node: usize| self.nodes.lock()[node].door.as_ref().map(|door| door.revoke(partition));
        let assign = || {
            if let Some(door) = &self.nodes.lock()[to].door {
                door.assign(partition);
            }
        };
        let zombie = from != Some(to) && rng.random_range(0..3) == 0;
        if zombie {
            assign();
            sleep(Duration::from_millis(rng.random_range(0..2_000))).await;
        }
        if let Some(gone) = from.and_then(revoke) {
            timeout(Duration::from_millis(rng.random_range(0..3_000)), gone).await.ok();
        }
        if !zombie {
            assign();
        }
    }
}
