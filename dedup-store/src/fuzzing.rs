//! The store's parsers, as fuzzing calls them. What a checksum guards is tried with that checksum mended as well, or nothing would get
//! behind it.

use std::sync::LazyLock;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    Algorithm, Block, Hasher, Identity, filter::Filter, fingerprint::Fingerprint, manifest::Manifest, rows,
    run, tail,
};

/// Name, and what reads the bytes. Panics if something does not hold.
pub type Target = (&'static str, fn(&[u8]));

/// All of this crate.
pub const TARGETS: [Target; 4] =
    [("store_block", block), ("store_rows", row), ("store_filter", filter), ("store_page", run::fuzz_page)];

fn hasher() -> &'static Hasher {
    static HASHER: LazyLock<Hasher> = LazyLock::new(|| {
        Hasher::new(&Identity {
            route_id: *b"route-0123456789",
            key_spec_id: 11,
            algorithm: Algorithm::Xxh3Secret,
            secret: std::array::from_fn(|index| (index * 3 + 5) as u8),
        })
    });
    &HASHER
}

fn sealed(bytes: &[u8]) -> Vec<u8> {
    [bytes, &xxh3_64(bytes).to_le_bytes()].concat()
}

/// A block, as it stands in the tail, in a sink's mark and in an export.
fn block(bytes: &[u8]) {
    let plain = Block::decode_any(hasher(), Bytes::copy_from_slice(bytes));
    let mut ours = bytes.to_vec();
    if let Some(names) = ours.get_mut(12..36) {
        names[0] = hasher().algorithm() as u8;
        names[4..8].copy_from_slice(&hasher().key_id().to_le_bytes());
        names[8..24].copy_from_slice(hasher().route_id());
    }
    for block in [plain, Block::decode_any(hasher(), sealed(&ours).into())].into_iter().flatten() {
        let again = Block::encode(hasher(), &block.shard, block.sequence, block.entries.clone());
        let again =
            Block::decode(hasher(), &block.shard, block.sequence, again.bytes).expect("its own bytes");
        assert_eq!(again.entries, block.entries);
        assert!(block.entries.is_empty() || (again.min_ms, again.max_ms) == (block.min_ms, block.max_ms));
    }
}

/// Rows of the store's files; the first byte says of which kind.
fn row(bytes: &[u8]) {
    let Some((kind, row)) = bytes.split_first() else { return };
    for row in [row.to_vec(), sealed(row)] {
        match kind % 4 {
            0 => drop(tail::read_checkpoint(&row)),
            1 => drop(tail::read_tombstone(&row)),
            2 => {
                if let Ok(manifest) = Manifest::decode(&row) {
                    assert!(Manifest::decode(&manifest.encode()).is_ok_and(|again| again == manifest));
                }
            }
            _ => drop(rows::check_about(&row, "tail", Some(hasher()))),
        }
    }
}

fn filter(bytes: &[u8]) {
    let Some(mut filter) = Filter::from_bytes(bytes) else { return };
    assert_eq!(filter.to_bytes(), bytes);
    let key = Fingerprint(std::array::from_fn(|at| bytes[at]));
    filter.insert(&key);
    assert!(filter.may_hold(&key));
}
