//! What befalls a run from outside: crashes, hand-overs, stopped processes, lost connections, a sink that goes back, clocks that are set.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use adapters::{simulated, sink::RowOutcome};
use dedup_store::Store;
use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use tokio::time::{Instant, sleep, timeout};

use super::{
    super::{
        door::{Door, Topic},
        encode::RowValue,
        invariant::Invariant,
        rig::Rig,
        trace::note,
        world::{Db, Effect, LetterRow},
    },
    plan::{Kept, What},
    run::REST_MS,
};
use crate::{clock, gate::Gate};

/// One instance, up or down.
pub(super) struct Node {
    pub(super) name: String,
    pub(super) lanes: (u32, u32),
    pub(super) gate: Option<Gate>,
    door: Option<Door>,
}

#[derive(Clone)]
pub(super) struct Cluster {
    pub(super) rig: Rig,
    pub(super) topic: Arc<Mutex<Topic>>,
    pub(super) nodes: Arc<Mutex<Vec<Node>>>,
    pub(super) snapshots: Arc<Mutex<Vec<Db>>>,
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
        let until = Instant::now() + Duration::from_secs(600);
        let gate = loop {
            match self.rig.try_gate(&name, lanes, store()).await {
                Ok(gate) => break gate,
                Err(fault) => {
                    note(|| format!("{name} does not start: {fault}"));
                    assert!(Instant::now() < until, "{name} does not start: {fault}");
                    sleep(Duration::from_millis(100)).await;
                }
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

    fn store_of(&self, db: &Db, kept: Kept) -> impl Fn() -> Store + use<> {
        // Of a sink elsewhere nothing is known here: the store learns all from its book.
        let known: BTreeMap<String, i64> = match kept {
            Kept::Nothing => BTreeMap::new(),
            Kept::Some(seed) => {
                let mut rng = SmallRng::seed_from_u64(seed);
                db.shards
                    .iter()
                    .map(|(shard, row)| (shard.clone(), rng.random_range(0..=row.sequence)))
                    .collect()
            }
            Kept::All => db.shards.iter().map(|(shard, row)| (shard.clone(), row.sequence)).collect(),
        };
        let (rig, db) = (self.rig.clone(), db.clone());
        move || rig.older_store(&db, &known)
    }

    /// Whoever is down has nothing that could be struck.
    pub(super) async fn strike(&self, what: What) {
        note(|| format!("strike: {what:?}"));
        let up = |node: usize| self.nodes.lock()[node].gate.is_some();
        match what {
            What::Crash { node, down_ms, back, kept } if up(node) => {
                let gate = self.take_down(node);
                gate.into_iter().for_each(Gate::crash);
                self.rig.world.lock().frozen.remove(&self.name(node));
                let db = self.rig.db();
                sleep(Duration::from_millis(down_ms)).await;
                if let Some(to) = back {
                    self.go_back(to);
                }
                let store = self.store_of(&db, kept);
                self.start(node, store).await;
            }
            What::Close { node, kept } if up(node) => {
                self.rig.world.lock().frozen.remove(&self.name(node));
                if let Some(gate) = self.take_down(node)
                    && timeout(Duration::from_millis(REST_MS), gate.close()).await.is_err()
                {
                    let what = format!("{} does not close when it is told to", self.name(node));
                    self.rig.world.lock().judge.falls(Invariant::Closes, what);
                    gate.crash();
                }
                let store = self.store_of(&self.rig.db(), kept);
                self.start(node, store).await;
            }
            What::Crash { .. } | What::Close { .. } => {}
            What::Move { partition, to, zombie_ms, patience_ms } => {
                self.hand_over(partition, to, zombie_ms, patience_ms).await;
            }
            What::Freeze { node, ms } if up(node) => {
                let name = self.name(node);
                self.rig.world.lock().frozen.insert(name.clone());
                let world = self.rig.world.clone();
                tokio::spawn(async move {
                    sleep(Duration::from_millis(ms)).await;
                    world.lock().frozen.remove(&name);
                });
            }
            What::Freeze { .. } => {}
            What::Cut => self.rig.cut(),
            What::Down { ms } => {
                let mut world = self.rig.world.lock();
                world.connections.clear();
                world.down_until = Some(Instant::now() + Duration::from_millis(ms));
            }
            What::Snapshot => self.snapshots.lock().push(self.rig.db()),
            What::Back { .. } if self.snapshots.lock().is_empty() => {
                self.snapshots.lock().push(self.rig.db())
            }
            What::Back { to } => {
                for _ in 0..1_000 {
                    if self.rig.world.lock().answering > 0 {
                        break;
                    }
                    sleep(Duration::from_millis(1)).await;
                }
                self.go_back(to);
            }
            What::Clock { ms } => clock::simulated::shift(ms * 1_000),
            // The run itself does it.
            What::Forget { .. } => {}
        }
    }

    /// The sink shows an older state. Later snapshots are of a history that is gone.
    fn go_back(&self, to: usize) {
        let (mut world, mut snapshots) = (self.rig.world.lock(), self.snapshots.lock());
        if world.went_back > 0 || snapshots.is_empty() {
            return;
        }
        let to = to % snapshots.len();
        let to = snapshots.swap_remove(to);
        world.go_back(to);
    }

    /// The old owner hears of it in time, or late.
    async fn hand_over(&self, partition: usize, to: usize, zombie_ms: Option<u64>, patience_ms: u64) {
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
        let zombie_ms = zombie_ms.filter(|_| from != Some(to));
        if let Some(ms) = zombie_ms {
            assign();
            sleep(Duration::from_millis(ms)).await;
        }
        if let Some(gone) = from.and_then(revoke) {
            timeout(Duration::from_millis(patience_ms), gone).await.ok();
        }
        if zombie_ms.is_none() {
            assign();
        }
    }

    /// Of each shard, in the sink.
    pub(super) fn positions(&self) -> BTreeMap<String, i64> {
        let all: Vec<(String, Option<i64>)> = match &self.rig.journaled {
            Some(journaled) => journaled.book().positions,
            None => {
                let world = self.rig.world.lock();
                world.db.shards.iter().map(|(shard, row)| (shard.clone(), row.position)).collect()
            }
        };
        all.into_iter().filter_map(|(shard, position)| Some((shard, position?))).collect()
    }

    /// What the sink holds in the end.
    pub(super) fn db(&self) -> Db {
        let Some(journaled) = &self.rig.journaled else { return self.rig.db() };
        let (book, remote) = (journaled.book(), journaled.remote.lock());
        let kind = |kind: &str| ["rejected", "mismatch", "late"].into_iter().find(|known| *known == kind);
        let letter = |(shard, position, of, payload): simulated::Letter| {
            Arc::new(LetterRow {
                shard,
                position,
                kind: kind(&of).expect("a kind of dead letters"),
                payload: String::from_utf8_lossy(&payload).into_owned(),
            })
        };
        let effect = |row: &RowValue| {
            Arc::new(Effect { row: row.clone(), outcome: RowOutcome::Written, shard: "".into(), sequence: 0 })
        };
        Db {
            letters: book.letters.into_iter().map(letter).collect(),
            effects: remote.rows.iter().map(effect).collect(),
            listed: remote.rows.clone(),
            ..Db::default()
        }
    }

    pub(super) fn rewind_all(&self) {
        let nodes = self.nodes.lock();
        let topic = self.topic.lock();
        for (partition, owner) in topic.owners.iter().enumerate() {
            let node = nodes.iter().find(|node| Some(&node.name) == owner.as_ref());
            if let Some(door) = node.and_then(|node| node.door.as_ref()) {
                door.rewind(partition, 0);
            }
        }
    }
}
