//! What tests share: a route, facts for it, and options that hold still.

use std::sync::{Arc, LazyLock};

use crate::{
    Algorithm, Block, Checkpoint, Digest, Entry, Fingerprint, Hasher, Identity, Item, Settled, Store,
    StoreOptions, Verdict, store::Limits,
};

pub(crate) fn identity() -> Identity {
    Identity {
        route_id: *b"route-0123456789",
        key_spec_id: 11,
        algorithm: Algorithm::Xxh3Secret,
        secret: std::array::from_fn(|index| (index * 3 + 5) as u8),
    }
}

pub(crate) fn hasher() -> Hasher {
    static HASHER: LazyLock<Hasher> = LazyLock::new(|| Hasher::new(&identity()));
    HASHER.clone()
}

/// Window 10 s, lateness 2 s, idle after 5 s; the committer waits to be asked.
pub(crate) fn options() -> StoreOptions {
    StoreOptions {
        window_ms: 10_000,
        lateness_ms: 2_000,
        idle_after_ms: 5_000,
        max_disk_bytes: 1 << 30,
        max_memory_bytes: 1 << 30,
        commit_interval_ms: 3_600_000,
    }
}

pub(crate) fn key(number: u64) -> Fingerprint {
    let hasher = hasher();
    hasher.fingerprint(&[hasher.prefix(), &number.to_le_bytes()].concat())
}

pub(crate) fn fact(number: u64, event_ms: i64, settled: Settled) -> Entry {
    Entry { fingerprint: key(number), digest: Digest(number), event_ms, settled }
}

pub(crate) fn item(number: u64, event_ms: i64) -> Item {
    Item {
        fingerprint: key(number),
        digest: Digest(number),
        event_ms,
        floor_ms: i64::MIN,
        admit_late: false,
        replay_dead_letter: false,
    }
}

pub(crate) fn block(shard: &str, sequence: i64, entries: Vec<Entry>) -> Block {
    Block::encode(&hasher(), shard, sequence, entries)
}

pub(crate) fn checkpoint(shard: &str, sequence: i64, watermark_ms: i64) -> Checkpoint {
    Checkpoint {
        shard: Arc::from(shard),
        sequence,
        epoch: sequence + 1_000,
        position: Some(sequence * 10),
        watermark_ms,
        floor_ms: i64::MIN,
    }
}

/// The verdict of one item, claimed for `lane`.
pub(crate) fn claim(store: &Store, lane: u32, item: Item) -> Verdict {
    let mut verdicts = Vec::new();
    store.claim(lane, i64::MAX, &[item], &mut verdicts).unwrap();
    assert_eq!(verdicts.len(), 1);
    verdicts[0]
}

/// Settles `Written` facts of one shard durably.
pub(crate) fn settle(
    store: &Store,
    shard: &str,
    sequence: i64,
    keys: impl IntoIterator<Item = u64>,
    event_ms: i64,
) {
    let facts = keys.into_iter().map(|number| fact(number, event_ms, Settled::Written)).collect();
    let blocks = [block(shard, sequence, facts)];
    let ticket = store.settle(&[checkpoint(shard, sequence, event_ms)], &blocks, event_ms).unwrap();
    store.wait_durable(ticket).unwrap();
}

/// Whether the store holds this very fact.
pub(crate) fn knows(store: &Store, fact: &Entry) -> bool {
    store.peek(&fact.fingerprint).unwrap().is_some_and(|known| {
        known.settled == fact.settled && known.same(fact.digest) && known.event_ms >= fact.event_ms
    })
}

/// Slots are closed at so many bytes, and with room for few keys.
pub(crate) fn limits(roll_bytes: u64) -> Limits {
    Limits { roll_bytes: Some(roll_bytes), keys: None }
}
