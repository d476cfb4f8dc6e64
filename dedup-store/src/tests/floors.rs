//! P11 as a whole: a gateway in front of a sink that keeps marks, with wrong watermarks, crashes, lost stores and expiry in any
//! order. Whatever the watermarks say, no key takes effect twice; a wrong one only makes records late.

use std::{collections::HashMap, sync::Arc};

use proptest::prelude::*;

use super::faulty::{FaultyDisk, Survival};
use crate::{store::Limits, testing::*, *};

const SHARDS: [&str; 2] = ["a", "b"];

#[derive(Clone, Debug)]
enum Step {
    /// A copy of a key comes to a shard, `spread` ms after the key's event time; with `lose` the process dies before it settles.
    Come { shard: usize, key: u64, spread: i64, wait: bool, lose: bool },
    /// A shard's source claims to have come so far.
    Watermark { shard: usize, at: i64 },
    /// Time passes, and all that lies below the floor is forgotten, in store and sink.
    Expire { pass: i64 },
    /// The process dies; of what was not synced some is left.
    Crash { seed: u64 },
    /// The disk is lost.
    Lose,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..2usize, 0..24u64, 0..10_000i64, any::<bool>(), prop::bool::weighted(0.1))
            .prop_map(|(shard, key, spread, wait, lose)| Step::Come { shard, key, spread, wait, lose }),
        2 => (0..2usize, 0..80_000i64).prop_map(|(shard, at)| Step::Watermark { shard, at }),
        2 => (0..4_000i64).prop_map(|pass| Step::Expire { pass }),
        1 => any::<u64>().prop_map(|seed| Step::Crash { seed }),
        1 => Just(Step::Lose),
    ];
    prop::collection::vec(step, 1..80)
}

/// What a sink keeps of a shard, always durable.
#[derive(Clone)]
struct ShardRow {
    sequence: i64,
    watermark_ms: i64,
    floor_ms: i64,
    marks: Vec<Block>,
}

struct World {
    disk: FaultyDisk,
    store: Store,
    sink: HashMap<&'static str, ShardRow>,
    effects: HashMap<u64, u32>,
    now_ms: i64,
    /// Highest watermark that the route ever had: below it, less the lateness, a record may be late.
    route_ms: i64,
    retire_ms: i64,
}

/// Slots are closed after a few facts, and sealed in the background at once.
fn open(disk: &FaultyDisk) -> Store {
    let limits = Limits { roll_bytes: Some(500), keys: Some((6, 2)) };
    let store = Store::open_on(Arc::new(disk.clone()), options(), limits).unwrap();
    store.bind(&identity()).unwrap();
    store
}

/// Event time of a key.
fn time_of(key: u64) -> i64 {
    key as i64 * 2_500
}

impl World {
    fn new() -> Self {
        let disk = FaultyDisk::default();
        let row = ShardRow { sequence: 0, watermark_ms: 0, floor_ms: i64::MIN, marks: Vec::new() };
        World {
            store: open(&disk),
            disk,
            sink: SHARDS.iter().map(|shard| (*shard, row.clone())).collect(),
            effects: HashMap::new(),
            now_ms: 0,
            route_ms: i64::MIN,
            retire_ms: i64::MIN,
        }
    }

    fn checkpoint(&self, shard: &'static str) -> Checkpoint {
        let row = &self.sink[shard];
        Checkpoint {
            shard: shard.into(),
            sequence: row.sequence,
            epoch: 0,
            position: None,
            watermark_ms: row.watermark_ms,
            floor_ms: row.floor_ms,
        }
    }

    fn come(
        &mut self,
        shard: &'static str,
        number: u64,
        event_ms: i64,
        lose: bool,
    ) -> Result<Option<Ticket>, TestCaseError> {
        let options = options();
        let row = &self.sink[shard];
        let shard_floor = if row.floor_ms == i64::MIN { i64::MIN } else { row.floor_ms + options.window_ms };
        let floor_ms = (row.watermark_ms - options.lateness_ms).max(shard_floor);
        match claim(&self.store, 1, Item { floor_ms, ..item(number, event_ms) }) {
            Verdict::New { late } => prop_assert!(!late),
            Verdict::Late { .. } => {
                let watermark_ms = row.watermark_ms.max(self.route_ms);
                prop_assert!(
                    event_ms < watermark_ms - options.lateness_ms,
                    "late within the lateness: {}",
                    event_ms
                );
                return Ok(None);
            }
            Verdict::Duplicate(_) => {
                prop_assert!(self.effects.contains_key(&number), "a duplicate of nothing");
                return Ok(None);
            }
            other => return Err(TestCaseError::fail(format!("{other:?}"))),
        }
        // The batch takes effect in the sink, with its mark.
        let effects = self.effects.entry(number).or_default();
        *effects += 1;
        prop_assert_eq!(*effects, 1, "key {} took effect twice", number);
        let row = self.sink.get_mut(shard).unwrap();
        row.sequence += 1;
        let mark = block(shard, row.sequence, vec![fact(number, event_ms, Settled::Written)]);
        row.marks.push(mark.clone());
        if lose {
            return Ok(None);
        }
        Ok(Some(self.store.settle(&[self.checkpoint(shard)], &[mark], self.now_ms).unwrap()))
    }

    /// Everything above what the store knows is learnt from the marks.
    fn catch_up(&mut self, disk: FaultyDisk) {
        self.store = open(&disk);
        self.disk = disk;
        for shard in SHARDS {
            let known = self.store.checkpoint(shard).map_or(0, |checkpoint| checkpoint.sequence);
            let marks: Vec<_> =
                self.sink[shard].marks.iter().filter(|mark| mark.sequence > known).cloned().collect();
            self.store.settle(&[self.checkpoint(shard)], &marks, self.now_ms).unwrap();
        }
    }

    fn expire(&mut self) -> Result<(), TestCaseError> {
        let floors = self.store.expire(self.now_ms).unwrap();
        prop_assert!(floors.retire_ms >= self.retire_ms, "floors went back");
        self.retire_ms = floors.retire_ms;
        for row in self.sink.values_mut() {
            row.marks.retain(|mark| mark.max_ms >= floors.retire_ms);
            row.floor_ms = row.floor_ms.max(floors.retire_ms);
        }
        Ok(())
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Come { shard, key, spread, wait, lose } => {
                let ticket = self.come(SHARDS[shard], key, time_of(key) + spread, lose)?;
                if let Some(ticket) = ticket.filter(|_| wait) {
                    self.store.wait_durable(ticket).unwrap();
                }
                if lose {
                    self.catch_up(self.disk.after_crash(Survival::Nothing));
                }
            }
            Step::Watermark { shard, at } => {
                let row = self.sink.get_mut(SHARDS[shard]).unwrap();
                row.watermark_ms = row.watermark_ms.max(at);
                self.store.settle(&[self.checkpoint(SHARDS[shard])], &[], self.now_ms).unwrap();
            }
            Step::Expire { pass } => {
                self.now_ms += pass;
                self.expire()?;
            }
            Step::Crash { seed } => self.catch_up(self.disk.after_crash(Survival::Some(seed))),
            Step::Lose => {
                self.retire_ms = i64::MIN;
                self.catch_up(FaultyDisk::default());
            }
        }
        if let Some(watermark_ms) = self.store.floors(self.now_ms).watermark_ms {
            self.route_ms = self.route_ms.max(watermark_ms);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn p11_no_key_takes_effect_twice_and_none_in_time_is_late(steps in steps()) {
        let mut world = World::new();
        for step in steps {
            world.step(step)?;
        }
        // All of it comes once more, to both shards.
        for shard in SHARDS {
            for key in 0..24 {
                world.come(shard, key, time_of(key), false)?;
            }
        }
    }
}

/// A shard that was away while the others went on: what it brings below the route's floor is late, never new.
#[test]
fn p11_a_shard_that_wakes_up_late_admits_nothing_that_was_forgotten() {
    let mut world = World::new();
    world.come("a", 0, time_of(0), false).unwrap();
    for shard in SHARDS {
        world.step(Step::Watermark { shard: 0, at: 60_000 }).unwrap();
        world.now_ms += 6_000;
        world.store.settle(&[], &[], world.now_ms).unwrap();
        world.store.wait_durable(world.store.latest()).unwrap();
        world.expire().unwrap();
        assert!(world.sink[shard].marks.is_empty());
    }
    assert_eq!(world.store.stats(0).keys, 0);
    let late = claim(&world.store, 2, item(0, time_of(0)));
    assert!(matches!(late, Verdict::Late { .. }), "{late:?}");
}

/// After a restart an effect was begun before anything was settled. Its group knew of no watermark and no floor yet, and was
/// written as if there were none: a crash then took both back, and a key that was forgotten below the floor was new again. Found by
/// a crash at every change of random scenarios.
#[test]
fn p11_a_group_that_knows_no_watermark_takes_no_floor_back() {
    let disk = FaultyDisk::default();
    let store = open(&disk);
    settle(&store, "a", 1, 0..20, 0);
    settle(&store, "a", 2, [], 46_000);
    drop(store);
    let store = open(&disk);
    assert_eq!(store.stats(0).floor_ms, 34_000);
    assert!(store.begin_effect(&key(1 << 40)).unwrap());
    store.wait_sealed();
    let crashed = disk.after_crash(Survival::Nothing);
    for store in [open(&crashed), store] {
        let stats = store.stats(0);
        assert_eq!((stats.floor_ms, stats.floors.retire_ms), (34_000, 34_000));
        assert_eq!(stats.floors.watermark_ms, Some(46_000));
        // Its slot may still be there: then it is known at any age.
        let verdict = claim(&store, 1, item(7, 0));
        assert!(
            [Verdict::Late { floor_ms: 44_000 }, Verdict::Duplicate(Settled::Written)].contains(&verdict),
            "{verdict:?}"
        );
    }
}
