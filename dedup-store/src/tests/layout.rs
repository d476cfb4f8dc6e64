//! A run as a plain file beside the same facts in redb: in packed blocks of a page, and in one row each. How long they take to
//! build, their bytes, and how long a look-up of hits in sorted order takes, from the page cache.
//!
//! `ONCEGATE_LAYOUT_KEYS=10000000 cargo test --release -p dedup-store -- --ignored --nocapture flat_run_beside_redb`

use std::{path::Path, time::Instant};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use redb::{Builder, Database, ReadableDatabase, TableDefinition};
use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    Digest, Entry, Fingerprint, Settled,
    disk::{Disk, Folder},
    filter,
    run::{self, Run},
    table::Table,
    testing::hasher,
};

const ENTRY_BYTES: usize = 20;
/// With a checksum of 8 bytes before them they fill a page of redb's, its own header of a leaf aside.
const BLOCK_ENTRIES: usize = 202;
/// redb's cache of pages while keys are looked up; the flat file has none, and an index of 8 bytes a block.
const CACHES: [usize; 2] = [1 << 20, 1 << 30];
const BLOCKS: TableDefinition<'_, [u8; 16], &[u8]> = TableDefinition::new("blocks");
const ROWS: TableDefinition<'_, [u8; 16], [u8; 5]> = TableDefinition::new("rows");

fn fingerprint(number: u64) -> Fingerprint {
    Fingerprint(xxhash_rust::xxh3::xxh3_128(&number.to_le_bytes()).to_be_bytes())
}

fn table_of(keys: u64) -> Table {
    let mut table = Table::new(1, keys as usize);
    for number in 0..keys {
        table.insert_absent(&Entry {
            fingerprint: fingerprint(number),
            digest: Digest(number),
            event_ms: number as i64,
            settled: Settled::Written,
        });
    }
    table.through = 1;
    table
}

/// Sorted by fingerprint, each with its digest's low bytes.
fn sorted(table: &Table) -> Vec<([u8; 16], [u8; 5])> {
    let low = |digest: u64| std::array::from_fn(|at| (digest >> (8 * at)) as u8);
    let mut facts: Vec<_> = table.facts().map(|fact| (fact.fingerprint.0, low(fact.digest()))).collect();
    facts.sort_unstable();
    facts
}

/// Durable, then closed.
fn build_blocks(path: &Path, table: &Table) {
    let db = Database::create(path).unwrap();
    let txn = db.begin_write().unwrap();
    {
        let mut rows = txn.open_table(BLOCKS).unwrap();
        let facts = sorted(table);
        // As in a run, a block has one first byte.
        let facts = facts.chunk_by(|a, b| a.0[0] == b.0[0]).flat_map(|same| same.chunks(BLOCK_ENTRIES));
        for facts in facts {
            let mut block = vec![0; 8];
            for (fingerprint, digest) in facts {
                block.extend_from_slice(&fingerprint[1..]);
                block.extend_from_slice(digest);
            }
            let checksum = xxh3_64(&block[8..]).to_le_bytes();
            block[..8].copy_from_slice(&checksum);
            rows.insert(facts[0].0, &*block).unwrap();
        }
    }
    txn.commit().unwrap();
    db.close().unwrap();
}

fn find_in_blocks(rows: &redb::ReadOnlyTable<[u8; 16], &'static [u8]>, key: &Fingerprint) -> bool {
    let Some(found) = rows.range(..=key.0).unwrap().next_back() else { return false };
    let (first, block) = found.unwrap();
    let (checksum, entries) = block.value().split_at(8);
    // redb does not check pages that it reads.
    assert_eq!(xxh3_64(entries).to_le_bytes(), checksum);
    let (entries, _) = entries.as_chunks::<ENTRY_BYTES>();
    first.value()[0] == key.0[0] && entries.binary_search_by(|entry| entry[..15].cmp(&key.0[1..])).is_ok()
}

fn build_rows(path: &Path, table: &Table) {
    let db = Database::create(path).unwrap();
    let txn = db.begin_write().unwrap();
    {
        let mut rows = txn.open_table(ROWS).unwrap();
        for (fingerprint, digest) in sorted(table) {
            rows.insert(fingerprint, digest).unwrap();
        }
    }
    txn.commit().unwrap();
    db.close().unwrap();
}

/// Microseconds a key of sets of hits, each sorted: the median of the sets.
fn look_up(sets: &[Vec<Fingerprint>], mut find: impl FnMut(&Fingerprint) -> bool) -> f64 {
    let mut times: Vec<f64> = sets
        .iter()
        .map(|set| {
            let start = Instant::now();
            assert!(set.iter().all(&mut find), "a key is not found");
            start.elapsed().as_secs_f64() * 1e6 / set.len() as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn compare(keys: u64, hits: u64) {
    let folder = TempDir::new().unwrap();
    let disk = Folder::new(folder.path());
    let table = table_of(keys);
    let mut random = SmallRng::seed_from_u64(5);
    let sets: Vec<Vec<Fingerprint>> = (0..9)
        .map(|_| {
            let mut set: Vec<_> = (0..hits).map(|_| fingerprint(random.random_range(0..keys))).collect();
            set.sort_unstable_by_key(|key| key.0);
            set
        })
        .collect();
    let strangers: Vec<_> = (keys..keys + hits).map(fingerprint).collect();
    let say = |arm: &str, built: f64, opened: f64, names: &[&str], each: f64| {
        let bytes: u64 = names.iter().map(|name| disk.bytes(name).unwrap()).sum();
        println!(
            "{arm:<25} built in {built:.2} s, {:.2} bytes a key, opened in {:.2} ms, a hit in {each:.2} us",
            bytes as f64 / keys as f64,
            opened * 1e3
        );
    };
    println!("{keys} keys, sets of {hits} hits in order");

    let start = Instant::now();
    let (meta, _) =
        run::write(&disk, &hasher(), &table, filter::blocks_for(keys), &|| true).unwrap().unwrap();
    let built = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let run = Run::open(&disk, &hasher(), 1, &meta).unwrap();
    let opened = start.elapsed().as_secs_f64();
    let each = look_up(&sets, |key| run.find(key).unwrap().is_some());
    assert!(strangers.iter().all(|key| run.find(key).unwrap().is_none()));
    say("flat", built, opened, &[&run::file_name(1)], each);

    let path = folder.path().join("blocks.redb");
    let start = Instant::now();
    build_blocks(&path, &table);
    let built = start.elapsed().as_secs_f64();
    for cache in CACHES {
        let start = Instant::now();
        let db = Builder::new().set_cache_size(cache).open_read_only(&path).unwrap();
        let rows = db.begin_read().unwrap().open_table(BLOCKS).unwrap();
        let opened = start.elapsed().as_secs_f64();
        let each = look_up(&sets, |key| find_in_blocks(&rows, key));
        assert!(!strangers.iter().any(|key| find_in_blocks(&rows, key)));
        let arm = format!("redb blocks, {} MiB", cache >> 20);
        say(&arm, built, opened, &["blocks.redb"], each);
    }

    let path = folder.path().join("rows.redb");
    let start = Instant::now();
    build_rows(&path, &table);
    let built = start.elapsed().as_secs_f64();
    for cache in CACHES {
        let start = Instant::now();
        let db = Builder::new().set_cache_size(cache).open_read_only(&path).unwrap();
        let rows = db.begin_read().unwrap().open_table(ROWS).unwrap();
        let opened = start.elapsed().as_secs_f64();
        let each = look_up(&sets, |key| rows.get(key.0).unwrap().is_some());
        assert!(strangers.iter().all(|key| rows.get(key.0).unwrap().is_none()));
        let arm = format!("redb rows, {} MiB", cache >> 20);
        say(&arm, built, opened, &["rows.redb"], each);
    }
}

#[test]
fn runs_flat_and_in_redb_hold_the_same_keys() {
    compare(20_000, 500);
}

#[test]
#[ignore = "a measurement: see the module"]
fn flat_run_beside_redb() {
    let keys = std::env::var("ONCEGATE_LAYOUT_KEYS").map_or(10_000_000, |text| text.parse().unwrap());
    compare(keys, 10_000);
}
