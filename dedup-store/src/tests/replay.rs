//! What is read back is what was known: refusals, replays, keys taken back and facts learnt twice included (P2, P12).

use std::sync::Arc;

use proptest::prelude::*;

use super::faulty::{FaultyDisk, Survival};
use crate::{testing::*, *};

const SHARDS: [&str; 2] = ["a", "b"];

/// Batches of (shard, steps back in sequence, facts), durable or not. All copies of a key have its event time.
type Batches = Vec<(usize, i64, Vec<(u64, u8)>, bool)>;

fn batches() -> impl Strategy<Value = Batches> {
    let fact = (0..12u64, 0..6u8);
    prop::collection::vec((0..2usize, 0..3i64, prop::collection::vec(fact, 0..6), any::<bool>()), 1..30)
}

fn known(store: &Store) -> Vec<Option<Entry>> {
    (0..12).map(|number| store.peek(&key(number)).unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn p12_replay_gives_the_facts_that_were_known(batches in batches(), expire in any::<bool>()) {
        let disk = FaultyDisk::default();
        let open = |disk: &FaultyDisk| {
            let store = Store::open_on(Arc::new(disk.clone()), options(), 600).unwrap();
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
                fact(*number, *number as i64 * 2_500, Settled::from_number(*settled).unwrap())
            };
            let facts = [block(SHARDS[shard], sequence, facts.iter().map(entry).collect())];
            let newest = facts[0].max_ms;
            let ticket = store.settle(&[checkpoint(SHARDS[shard], sequence, newest)], &facts, 0).unwrap();
            if wait {
                store.wait_durable(ticket).unwrap();
                if expire {
                    store.expire(0).unwrap();
                }
                durable = known(&store);
            }
        }
        let crashed = open(&disk.after_crash(Survival::Nothing));
        let floor_ms = crashed.stats(0).floor_ms;
        let above = |known: Vec<Option<Entry>>| -> Vec<_> {
            known.into_iter().map(|entry| entry.filter(|entry| entry.event_ms >= floor_ms)).collect()
        };
        prop_assert_eq!(above(known(&crashed)), above(durable));
    }
}
