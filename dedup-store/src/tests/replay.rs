//! What is read back is what was known: refusals, replays, keys taken back and facts learnt twice included (P2, P12).

use std::sync::Arc;

use proptest::prelude::*;

use super::faulty::{FaultyDisk, Survival};
use crate::{store::Limits, testing::*, *};

const SHARDS: [&str; 2] = ["a", "b"];

/// Batches of (shard, steps back in sequence, facts), durable or not. All copies of a key have its event time.
type Batches = Vec<(usize, i64, Vec<(u64, u8)>, bool)>;

fn event_ms(number: u64) -> i64 {
    number as i64 * 2_500
}

fn batches() -> impl Strategy<Value = Batches> {
    let fact = (0..12u64, 0..6u8);
    prop::collection::vec((0..2usize, 0..3i64, prop::collection::vec(fact, 0..6), any::<bool>()), 1..30)
}

fn known(store: &Store) -> Vec<Option<Settled>> {
    let known = |number| store.peek(&key(number)).unwrap().map(|known| known.settled);
    (0..12).map(known).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Slots are closed after a few facts, and sealed at once, or not at all.
    #[test]
    fn p12_replay_gives_the_facts_that_were_known(
        batches in batches(),
        expire in any::<bool>(),
        seal in any::<bool>(),
    ) {
        let disk = FaultyDisk::default();
        let limits = Limits { roll_bytes: Some(600), keys: seal.then_some((8, 1)) };
        let open = |disk: &FaultyDisk| {
            let store = Store::open_on(Arc::new(disk.clone()), options(), limits).unwrap();
            store.bind(&identity()).unwrap();
            store
        };
        let store = open(&disk);
        let mut sequences = [3, 3];
        let mut durable = known(&store);
        for (shard, back, facts, wait) in batches {
            sequences[shard] += 1;
            let sequence = sequences[shard] - back;
            let entry = |(number, settled): &(u64, u8)| {
                fact(*number, event_ms(*number), Settled::from_number(*settled).unwrap())
            };
            let facts = [block(SHARDS[shard], sequence, facts.iter().map(entry).collect())];
            let newest = facts[0].max_ms;
            let ticket = store.settle(&[checkpoint(SHARDS[shard], sequence, newest)], &facts, 0).unwrap();
            if wait {
                store.wait_durable(ticket).unwrap();
                if expire {
                    store.expire(0).unwrap();
                }
                store.wait_sealed();
                durable = known(&store);
            }
        }
        let crashed = open(&disk.after_crash(Survival::Nothing));
        let floor_ms = crashed.stats(0).floor_ms;
        let above = |known: Vec<Option<Settled>>| -> Vec<_> {
            (0..).zip(known).filter(|(number, _)| event_ms(*number) >= floor_ms).collect()
        };
        prop_assert_eq!(above(known(&crashed)), above(durable));
    }
}
