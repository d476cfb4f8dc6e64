//! The store beside a plain map: claims of several lanes, settlements, releases, facts from marks,
//! watermarks, expiry, sealing, restarts and crashes, in any order. Whatever is asked, both say the same.

use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;

use super::faulty::{FaultyDisk, Survival};
use crate::{store::Limits, testing::*, *};

const KEYS: u64 = 40;

#[derive(Clone, Debug)]
enum Step {
    /// Lane `0..3` claims keys, some with another payload.
    Claim(u32, Vec<(u64, bool)>),
    /// The lane settles what it holds, with this outcome.
    Settle(u32, u8),
    Release(u32),
    /// A mark of another owner is learnt.
    Learn(Vec<(u64, u8)>),
    /// Keys are taken back.
    Forget(Vec<u64>),
    Watermark(i64),
    Expire,
    Seal,
    Restart,
    /// Only what was settled is left.
    Crash(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let claims = prop::collection::vec((0..KEYS, prop::bool::weighted(0.1)), 1..12);
    let step = prop_oneof![
        8 => (0..3u32, claims).prop_map(|(lane, keys)| Step::Claim(lane, keys)),
        6 => (0..3u32, 1..6u8).prop_map(|(lane, settled)| Step::Settle(lane, settled)),
        2 => (0..3u32).prop_map(Step::Release),
        2 => prop::collection::vec((0..KEYS, 1..6u8), 1..8).prop_map(Step::Learn),
        1 => prop::collection::vec(0..KEYS, 1..4).prop_map(Step::Forget),
        2 => (0..60_000i64).prop_map(Step::Watermark),
        2 => Just(Step::Expire),
        2 => Just(Step::Seal),
        1 => Just(Step::Restart),
        1 => any::<u64>().prop_map(Step::Crash),
    ];
    prop::collection::vec(step, 1..120)
}

fn event_ms(number: u64) -> i64 {
    number as i64 * 1_500
}

fn digest(number: u64, other: bool) -> Digest {
    Digest(number + if other { 1_000 } else { 0 })
}

#[derive(Default)]
struct Model {
    facts: BTreeMap<u64, (Settled, Digest)>,
    claims: BTreeMap<u64, (u32, Digest)>,
    watermark_ms: Option<i64>,
    sequence: i64,
}

struct World {
    disk: FaultyDisk,
    store: Store,
    model: Model,
}

fn open(disk: &FaultyDisk) -> Store {
    let limits = Limits { roll_bytes: Some(1_000), keys: Some((15, 3)) };
    let store = Store::open_on(Arc::new(disk.clone()), options(), limits).unwrap();
    store.bind(&identity()).unwrap();
    store
}

impl World {
    fn claim(&mut self, lane: u32, keys: &[(u64, bool)]) -> Result<(), TestCaseError> {
        let items: Vec<Item> = keys
            .iter()
            .map(|&(number, other)| Item { digest: digest(number, other), ..item(number, event_ms(number)) })
            .collect();
        let mut verdicts = Vec::new();
        self.store.claim(lane, i64::MAX, &items, &mut verdicts).unwrap();
        let floor_ms = self.store.stats(0).floor_ms;
        let admit_ms = if floor_ms == i64::MIN { floor_ms } else { floor_ms + options().window_ms };
        for (&(number, other), verdict) in keys.iter().zip(&verdicts) {
            let digest = digest(number, other);
            // Below the floor a fact may be forgotten, slot by slot.
            let forgotten = event_ms(number) < floor_ms && matches!(verdict, Verdict::Late { .. });
            let expected = match (self.model.facts.get(&number), self.model.claims.get(&number)) {
                (Some((settled, known)), _) if !forgotten && *known == digest => Verdict::Duplicate(*settled),
                (Some((settled, _)), _) if !forgotten => Verdict::Mismatch(*settled),
                (_, Some((lane, known))) => Verdict::InFlight { lane: *lane, same: *known == digest },
                _ if event_ms(number) < admit_ms => Verdict::Late { floor_ms: admit_ms },
                _ => Verdict::New { late: false },
            };
            prop_assert_eq!(*verdict, expected, "key {}", number);
            if expected == (Verdict::New { late: false }) {
                self.model.claims.insert(number, (lane, digest));
            }
        }
        Ok(())
    }

    fn settle(&mut self, facts: Vec<(u64, Settled, Digest)>) {
        self.model.sequence += 1;
        let entries = facts
            .iter()
            .map(|&(number, settled, digest)| Entry { digest, ..fact(number, event_ms(number), settled) })
            .collect();
        let watermark_ms = self.model.watermark_ms.unwrap_or(0);
        let floor_ms = self.store.stats(0).floor_ms;
        let blocks = [block("a", self.model.sequence, entries)];
        let ticket =
            self.store.settle(&[checkpoint("a", self.model.sequence, watermark_ms)], &blocks, 0).unwrap();
        self.store.wait_durable(ticket).unwrap();
        for (number, settled, digest) in facts {
            if settled == Settled::Forgotten {
                self.model.facts.remove(&number);
                continue;
            }
            self.model.claims.remove(&number);
            match self.model.facts.get_mut(&number) {
                Some(known) if known.0.refused() && !settled.refused() => *known = (settled, digest),
                None if event_ms(number) >= floor_ms => {
                    self.model.facts.insert(number, (settled, digest));
                }
                _ => {}
            }
        }
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Claim(lane, keys) => self.claim(lane, &keys)?,
            Step::Settle(lane, settled) => {
                let settled = Settled::from_number(settled).unwrap();
                let held: Vec<_> = self
                    .model
                    .claims
                    .iter()
                    .filter(|(_, (owner, _))| *owner == lane)
                    .map(|(number, (_, digest))| (*number, settled, *digest))
                    .collect();
                self.settle(held);
            }
            Step::Release(lane) => {
                self.store.release_lane(lane);
                self.model.claims.retain(|_, (owner, _)| *owner != lane);
            }
            Step::Learn(facts) => {
                let of = |(number, settled)| {
                    (number, Settled::from_number(settled).unwrap(), digest(number, false))
                };
                self.settle(facts.into_iter().map(of).collect());
            }
            Step::Forget(keys) => {
                let of = |number| (number, Settled::Forgotten, digest(number, false));
                self.settle(keys.into_iter().map(of).collect());
            }
            Step::Watermark(at) => {
                self.model.watermark_ms = self.model.watermark_ms.max(Some(at));
                self.settle(Vec::new());
            }
            Step::Expire => drop(self.store.expire(0).unwrap()),
            Step::Seal => self.store.wait_sealed(),
            Step::Restart => {
                let disk = self.disk.clone();
                self.reopen(disk);
            }
            Step::Crash(seed) => {
                // All that was settled was waited for.
                let disk = self.disk.after_crash(Survival::Some(seed));
                self.reopen(disk);
            }
        }
        let stats = self.store.stats(0);
        prop_assert_eq!(stats.claims, self.model.claims.len() as u64);
        let floor_ms = stats.floor_ms;
        for number in (0..KEYS).filter(|number| event_ms(*number) >= floor_ms) {
            let known = self.store.peek(&key(number)).unwrap();
            let expected = self.model.facts.get(&number);
            prop_assert_eq!(known.map(|known| known.settled), expected.map(|(settled, _)| *settled));
            prop_assert!(known.is_none_or(|known| known.same(expected.unwrap().1)));
        }
        Ok(())
    }

    fn reopen(&mut self, disk: FaultyDisk) {
        // The old one must not write to it meanwhile.
        self.store = Store::in_memory(options());
        (self.store, self.disk) = (open(&disk), disk);
        self.model.claims.clear();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn p7_and_p16_the_store_says_what_a_plain_map_says(steps in steps()) {
        let disk = FaultyDisk::default();
        let mut world = World { store: open(&disk), disk, model: Model::default() };
        for step in steps {
            world.step(step)?;
        }
    }
}
