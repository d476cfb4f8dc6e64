//! What the runs of this process have met, so that a change which keeps them from meeting it is seen.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;

use super::{chaos::Cluster, plan::Plan};

/// See the module.
#[derive(Debug)]
pub(super) struct Met {
    went_back: AtomicU64,
    ghosts_applied: AtomicU64,
    fenced: AtomicU64,
    seeks: AtomicU64,
    late: AtomicU64,
    dead_letters: AtomicU64,
    floors_raised: AtomicU64,
    tried_again: AtomicU64,
    /// Processes that were ended at once, by what the sink is.
    pub(super) crashes: Mutex<BTreeMap<&'static str, u64>>,
    pub(super) batches: AtomicU64,
}

pub(super) static MET: Met = Met {
    went_back: AtomicU64::new(0),
    ghosts_applied: AtomicU64::new(0),
    fenced: AtomicU64::new(0),
    seeks: AtomicU64::new(0),
    late: AtomicU64::new(0),
    dead_letters: AtomicU64::new(0),
    floors_raised: AtomicU64::new(0),
    tried_again: AtomicU64::new(0),
    crashes: Mutex::new(BTreeMap::new()),
    batches: AtomicU64::new(0),
};

impl Met {
    fn all(&self) -> [&AtomicU64; 8] {
        let Met {
            went_back,
            ghosts_applied,
            fenced,
            seeks,
            late,
            dead_letters,
            floors_raised,
            tried_again,
            ..
        } = self;
        [went_back, ghosts_applied, fenced, seeks, late, dead_letters, floors_raised, tried_again]
    }

    /// Everything was met.
    pub(super) fn whole(&self) -> bool {
        self.all().iter().all(|count| count.load(Ordering::Relaxed) > 0)
    }

    pub(super) fn note(&self, cluster: &Cluster, plan: &Plan) {
        *self.crashes.lock().entry(plan.kind()).or_default() += plan.crashes();
        let (world, topic) = (cluster.rig.world.lock(), cluster.topic.lock());
        self.batches.fetch_add(world.attempts.len() as u64, Ordering::Relaxed);
        let letters = &world.db.letters;
        let raised = world.db.shards.values().filter(|row| row.floor_ms > i64::MIN).count();
        let seen = [
            u64::from(world.went_back),
            u64::from(world.ghosts_applied),
            topic.fenced.len() as u64,
            u64::from(topic.seeks),
            letters.iter().filter(|letter| letter.kind == "late").count() as u64,
            letters.len() as u64,
            raised as u64,
            world.attempts.len().saturating_sub(world.db.commits.len()) as u64,
        ];
        for (count, seen) in self.all().into_iter().zip(seen) {
            count.fetch_add(seen, Ordering::Relaxed);
        }
    }
}
