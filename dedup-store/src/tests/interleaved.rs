//! Threads of the store in orders that shuttle chooses: lanes on the same keys, the committer, the sealer, expiry, a disk that
//! fails or is full, a discard, the end of the store. Only with the feature `shuttle`:
//!
//! `cargo test -p dedup-store --features shuttle interleaved`
//!
//! More of them: `ONCEGATE_INTERLEAVINGS=20000` for each scenario and scheduler, others by `ONCEGATE_INTERLEAVINGS_SEED=2`; best
//! with `--release`. A failure prints its schedule; `ONCEGATE_INTERLEAVING=<schedule>` and the scenario's name run that one again.
//!
//! What must hold: a key is new for one lane at a time, and never again once it took effect; a lane is told of a copy only when
//! the fact is known, and after [`Store::wait_durable`] a crash does not lose it (rule 6); whoever waits is woken (a lost
//! wake-up shows as a deadlock); an error stops all, and loses nothing that was acknowledged.
//!
//! That it bites was tried with faults planted into the store, one at a time; the number of orders until the first scenario failed:
//!
//! | planted | found by | after |
//! | --- | --- | --- |
//! | the closed slots are not asked again after they changed meanwhile | sealing and expiry | 5 |
//! | a group counts as durable before it is committed | a full disk; lanes on the same keys | 4; 27 |
//! | a commit wakes one of those who wait | lanes on the same keys | 1 |
//! | an error met by a look-up wakes nobody | an error while others wait | 301 |
//! | a table goes before its run is there | sealing and expiry | 2 |
//! | a release takes claims of others, too | sealing and expiry; lanes on the same keys | 1; 57 |
//! | a group that did not fit is dropped | a full disk | 2 |
//! | the end of the store does not wake the sealer | each | 1 |
//!
//! Not seen: weak memory (the cells of filters are plain atomics here, too), and what happens within one call of redb's.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex as Plain,
        atomic::{AtomicU64, Ordering},
    },
};

use shuttle::{
    Config, Runner,
    rand::{Rng, thread_rng},
    scheduler::{PctScheduler, RandomScheduler, Scheduler},
    thread,
};

use super::faulty::{FaultyDisk, Survival, Trouble};
use crate::{store::Limits, testing::*, *};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect(name))
}

/// Runs a scenario in many orders: any at all, and those with few preemptions, which find most faults soonest.
fn explore(scenario: fn()) {
    let mut config = Config::new();
    // redb's frames are large.
    config.stack_size = 1 << 20;
    config.silence_warnings = true;
    if let Ok(schedule) = std::env::var("ONCEGATE_INTERLEAVING") {
        return shuttle::replay(scenario, &schedule);
    }
    let runs = number("ONCEGATE_INTERLEAVINGS", 250) as usize;
    let seed = number("ONCEGATE_INTERLEAVINGS_SEED", 1);
    let schedulers: [Box<dyn Scheduler + Send>; 3] = [
        Box::new(RandomScheduler::new_from_seed(seed, runs)),
        Box::new(PctScheduler::new_from_seed(seed, 2, runs / 2)),
        Box::new(PctScheduler::new_from_seed(seed, 4, runs / 2)),
    ];
    let ran = Ran(Arc::default());
    for scheduler in schedulers {
        let count = Arc::clone(&ran.0);
        Runner::new(scheduler, config.clone()).run(move || {
            count.fetch_add(1, Ordering::Relaxed);
            scenario();
        });
    }
}

/// Says how many orders were run, at a failure too.
struct Ran(Arc<AtomicU64>);

impl Drop for Ran {
    fn drop(&mut self) {
        println!("{} interleavings", self.0.load(Ordering::Relaxed));
    }
}

/// What the outside knows.
#[derive(Default)]
struct Ledger {
    /// Who was told that a key is new, and has neither settled nor released it.
    holders: BTreeMap<u64, u32>,
    /// Keys that took effect.
    effects: BTreeSet<u64>,
    /// Keys whose facts were said to be durable.
    acknowledged: BTreeSet<u64>,
    /// What a crash at some time left, and the keys that must be in it.
    crashed: Option<(FaultyDisk, BTreeSet<u64>)>,
    sequence: i64,
    /// Facts may be gone.
    discarded: bool,
}

#[derive(Clone)]
struct World {
    disk: FaultyDisk,
    store: Arc<Store>,
    ledger: Arc<Plain<Ledger>>,
}

/// Slots of a few keys, so that they are closed and sealed.
const SMALL: Limits = Limits { roll_bytes: Some(2_000), keys: Some((12, 3)) };
const LARGE: Limits = Limits { roll_bytes: None, keys: None };

fn open(disk: &FaultyDisk, limits: Limits) -> Store {
    let store = Store::open_on(Arc::new(disk.clone()), options(), limits).unwrap();
    store.bind(&identity()).unwrap();
    store
}

fn any(from: u64, to: u64) -> u64 {
    thread_rng().gen_range(from..to)
}

fn full(result: &Result<(), StoreError>) -> bool {
    matches!(result, Err(StoreError::Full { .. }))
}

impl World {
    fn new(limits: Limits) -> Self {
        let disk = FaultyDisk::default();
        World { store: Arc::new(open(&disk, limits)), disk, ledger: Arc::default() }
    }

    fn ledger<T>(&self, act: impl FnOnce(&mut Ledger) -> T) -> T {
        act(&mut self.ledger.lock().unwrap())
    }

    fn sequence(&self) -> i64 {
        self.ledger(|ledger| {
            ledger.sequence += 1;
            ledger.sequence
        })
    }

    /// Claims keys and checks what it is told; answers with those that are new.
    fn claim(&self, lane: u32, keys: &[u64]) -> Result<Vec<u64>, StoreError> {
        let items: Vec<Item> = keys.iter().map(|key| item(*key, event_ms(*key))).collect();
        let mut verdicts = Vec::new();
        self.store.claim(lane, i64::MAX, &items, &mut verdicts)?;
        let (mut new, mut copies) = (Vec::new(), BTreeSet::new());
        self.ledger(|ledger| {
            for (&key, verdict) in keys.iter().zip(&verdicts) {
                match verdict {
                    Verdict::New { late: false } => {
                        let holder = ledger.holders.insert(key, lane);
                        assert_eq!(holder, None, "key {key} is new for two lanes");
                        let again = ledger.effects.contains(&key) && !ledger.discarded;
                        assert!(!again, "key {key} is new after it took effect");
                        new.push(key);
                    }
                    Verdict::Duplicate(Settled::Written) => {
                        assert!(ledger.effects.contains(&key), "key {key} is a copy of nothing");
                        copies.insert(key);
                    }
                    Verdict::InFlight { .. } => {}
                    Verdict::Late { floor_ms } => assert!(event_ms(key) < *floor_ms),
                    other => panic!("{other:?} for key {key}"),
                }
            }
        });
        if !copies.is_empty() {
            self.wait(self.store.latest(), copies)?;
        }
        Ok(new)
    }

    /// Waits until a group is durable, with the facts of these keys; sometimes the power goes there.
    fn wait(&self, ticket: Ticket, keys: BTreeSet<u64>) -> Result<(), StoreError> {
        self.store.wait_durable(ticket)?;
        self.ledger(|ledger| {
            ledger.acknowledged.extend(keys);
            if ledger.crashed.is_none() || any(0, 3) == 0 {
                let disk = self.disk.after_crash(Survival::Nothing);
                ledger.crashed = Some((disk, ledger.acknowledged.clone()));
            }
        });
        Ok(())
    }

    /// Of keys that others hold it takes none.
    fn release(&self, lane: u32, keys: &[u64]) {
        self.ledger(|ledger| ledger.holders.retain(|key, holder| *holder != lane || !keys.contains(key)));
        let fingerprints: Vec<_> = keys.iter().map(|number| key(*number)).collect();
        self.store.release(lane, &fingerprints);
    }

    /// They take effect, and that is settled.
    fn settle(&self, keys: &[u64]) -> Result<Ticket, StoreError> {
        self.ledger(|ledger| {
            for key in keys {
                let held = ledger.holders.remove(key).is_some();
                assert!(
                    held && (ledger.effects.insert(*key) || ledger.discarded),
                    "key {key} took effect twice"
                );
            }
        });
        let facts = keys.iter().map(|key| fact(*key, event_ms(*key), Settled::Written)).collect();
        self.store.settle(&[], &[block("a", self.sequence(), facts)], 0)
    }

    /// One lane: claims, then releases or settles, and waits now and then.
    fn lane(&self, lane: u32, batches: u64, mut keys: impl FnMut() -> Vec<u64>) -> Result<(), StoreError> {
        for _ in 0..batches {
            let keys = keys();
            let new = self.claim(lane, &keys)?;
            if any(0, 4) == 0 {
                self.release(lane, &keys);
                continue;
            }
            let ticket = self.settle(&new)?;
            if any(0, 2) == 0 {
                self.wait(ticket, new.into_iter().collect())?;
            }
        }
        Ok(())
    }

    /// What the crash left, and then what the store leaves when it ends.
    fn end(self, floor_of: impl Fn(&Store) -> i64) {
        let World { disk, store, ledger } = self;
        drop(store);
        disk.calm();
        let mut ledger = ledger.lock().unwrap();
        let crashed = ledger.crashed.take();
        let all = ledger.effects.clone();
        drop(ledger);
        for (disk, keys) in crashed.into_iter().chain([(disk, all)]) {
            let store = open(&disk, SMALL);
            let floor_ms = floor_of(&store);
            for number in keys.into_iter().filter(|number| event_ms(*number) >= floor_ms) {
                let known = store.peek(&key(number)).unwrap();
                assert!(known.is_some(), "key {number} is lost");
            }
        }
    }
}

fn event_ms(key: u64) -> i64 {
    10_000 + (key as i64 % 16) * 500
}

fn some_of(keys: std::ops::Range<u64>) -> Vec<u64> {
    let mut some: Vec<u64> = (0..any(1, 4)).map(|_| any(keys.start, keys.end)).collect();
    some.sort_unstable();
    some.dedup();
    some
}

fn threads<const N: usize>(run: [Box<dyn FnOnce() + Send>; N]) {
    let threads = run.map(thread::spawn);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn boxed(run: impl FnOnce() + Send + 'static) -> Box<dyn FnOnce() + Send> {
    Box::new(run)
}

/// Three lanes on five keys; the store ends while the committer is at some group.
#[test]
fn interleaved_lanes_on_the_same_keys() {
    explore(|| {
        let world = World::new(LARGE);
        let lanes = [1, 2, 3].map(|lane| {
            let world = world.clone();
            boxed(move || world.lane(lane, 3, || some_of(0..5)).unwrap())
        });
        threads(lanes);
        world.end(|_| i64::MIN);
    });
}

/// Keys are asked for while their slots are closed, sealed, and expire, and their columns are used again.
#[test]
fn interleaved_sealing_and_expiry_under_checks() {
    explore(|| {
        let world = World::new(SMALL);
        let first: Vec<u64> = (0..8).collect();
        let claimed = world.claim(9, &first).unwrap();
        let ticket = world.settle(&claimed).unwrap();
        world.wait(ticket, claimed.into_iter().collect()).unwrap();
        let (one, two, clock, asks) = (world.clone(), world.clone(), world.clone(), world.clone());
        threads([
            boxed(move || one.lane(1, 4, || some_of(0..24)).unwrap()),
            boxed(move || two.lane(2, 3, || (16 + any(0, 3) * 16..).take(6).collect()).unwrap()),
            boxed(move || {
                // Past the window of the first slots.
                for watermark_ms in [11_000, 21_500, 26_000] {
                    let sequence = clock.sequence();
                    clock.store.settle(&[checkpoint("clock", sequence, watermark_ms)], &[], 0).unwrap();
                    clock.store.wait_durable(clock.store.latest()).unwrap();
                    clock.store.expire(0).unwrap();
                }
            }),
            boxed(move || {
                for number in 0..8 {
                    let known = asks.store.peek(&key(number)).unwrap();
                    let floor_ms = asks.store.stats(0).floor_ms;
                    assert!(known.is_some() || event_ms(number) < floor_ms, "key {number} is not found");
                }
            }),
        ]);
        world.end(|store| store.stats(0).floor_ms);
    });
}

/// Lanes that wait for nothing settle faster than slots are sealed: they are held back, and go on.
#[test]
fn interleaved_settling_faster_than_sealing() {
    explore(|| {
        let world = World::new(SMALL);
        let lanes = [0, 1].map(|lane| {
            let world = world.clone();
            boxed(move || {
                for batch in 0..8 {
                    let from = 100 * u64::from(lane) + batch * 10;
                    let new = world.claim(lane, &(from..from + 5).collect::<Vec<_>>()).unwrap();
                    world.settle(&new).unwrap();
                }
            })
        });
        threads(lanes);
        world.end(|_| i64::MIN);
    });
}

/// The disk fails once: all who wait hear of it, and what was acknowledged is there when it is opened again.
#[test]
fn interleaved_an_error_while_others_wait() {
    explore(|| {
        let world = World::new(SMALL);
        if any(0, 2) == 0 {
            world.disk.trouble_at(world.disk.operations() + any(1, 80), Trouble::Glitch);
        } else {
            world.disk.glitch_at_run_read(any(0, 3));
        }
        let lanes = [1, 2, 3].map(|lane| {
            let world = world.clone();
            boxed(move || {
                let ended = world.lane(lane, 5, || some_of(0..24));
                let stopped =
                    matches!(&ended, Err(StoreError::Stopped { first }) if first.contains("a glitch"));
                assert!(ended.is_ok() || stopped, "{ended:?}");
                if stopped {
                    assert!(matches!(
                        world.store.wait_durable(Ticket(u64::MAX)),
                        Err(StoreError::Stopped { .. })
                    ));
                }
            })
        });
        threads(lanes);
        // Lanes ended amid their batches: only what was acknowledged counts.
        world.ledger(|ledger| ledger.effects = ledger.acknowledged.clone());
        world.end(|_| i64::MIN);
    });
}

/// The disk is full a few times: whoever waits is told, and what was settled gets there.
#[test]
fn interleaved_a_full_disk_while_others_wait() {
    explore(|| {
        let world = World::new(SMALL);
        for _ in 0..any(1, 4) {
            world.disk.trouble_at(world.disk.operations() + any(1, 80), Trouble::NoRoom);
        }
        let lanes = [1, 2, 3].map(|lane| {
            let world = world.clone();
            boxed(move || {
                for _ in 0..3 {
                    let patient = |call: &dyn Fn() -> Result<(), StoreError>| {
                        loop {
                            let done = call();
                            if !full(&done) {
                                return done.unwrap();
                            }
                            let expired = world.store.expire(0).map(drop);
                            assert!(expired.is_ok() || full(&expired), "{expired:?}");
                            thread::yield_now();
                        }
                    };
                    let new = Plain::new(Vec::new());
                    patient(&|| {
                        let claimed = world.claim(lane, &some_of(0..24))?;
                        new.lock().unwrap().extend(claimed);
                        Ok(())
                    });
                    let new = new.into_inner().unwrap();
                    let ticket = world.settle(&new).unwrap();
                    patient(&|| world.wait(ticket, new.iter().copied().collect()));
                }
            })
        });
        threads(lanes);
        world.end(|_| i64::MIN);
    });
}

/// The sink went back while lanes are at work: claims stay with their lanes, and what is settled later is there.
#[test]
fn interleaved_a_discard_under_lanes() {
    explore(|| {
        let world = World::new(SMALL);
        let [one, two, discards] = std::array::from_fn(|_| world.clone());
        threads([
            boxed(move || one.lane(1, 4, || some_of(0..12)).unwrap()),
            boxed(move || two.lane(2, 4, || some_of(0..12)).unwrap()),
            boxed(move || {
                discards.ledger(|ledger| ledger.discarded = true);
                discards.store.discard().unwrap();
            }),
        ]);
        world.ledger(|ledger| {
            ledger.effects.clear();
            ledger.crashed = None;
        });
        let new = world.claim(3, &[100, 101]).unwrap();
        let ticket = world.settle(&new).unwrap();
        world.wait(ticket, new.into_iter().collect()).unwrap();
        world.ledger(|ledger| ledger.crashed.as_mut().unwrap().1.retain(|key| *key >= 100));
        world.end(|_| i64::MIN);
    });
}

/// An effect that no sink can prove is begun by one caller only, and is durable before that one hears of it.
#[test]
fn interleaved_effects_that_are_begun_at_once() {
    explore(|| {
        let world = World::new(LARGE);
        let begun = Arc::new(Plain::new(0));
        let callers = [0; 3].map(|_| {
            let (world, begun) = (world.clone(), Arc::clone(&begun));
            boxed(move || {
                if world.store.begin_effect(&key(1)).unwrap() {
                    let mut begun = begun.lock().unwrap();
                    *begun += 1;
                    assert_eq!(*begun, 1, "two run it");
                    let crashed = world.disk.after_crash(Survival::Nothing);
                    drop(begun);
                    let store = open(&crashed, LARGE);
                    assert!(store.effect_pending(&key(1)).unwrap(), "a crash forgets that it began");
                }
            })
        });
        threads(callers);
        assert_eq!(*begun.lock().unwrap(), 1);
        assert!(world.store.effect_pending(&key(1)).unwrap());
        world.store.cancel_effect(&key(1)).unwrap();
        assert!(world.store.begin_effect(&key(1)).unwrap());
        world.end(|_| i64::MIN);
    });
}
