//! Prints how fast one thread claims and settles batches of 10,000 keys, in memory and on disk.
//!
//! `cargo run --release -p dedup-store --example claim_rate [keys]`

use std::{error::Error, time::Instant};

use dedup_store::{
    Algorithm, Block, Checkpoint, Digest, Entry, Fingerprint, Hasher, Identity, Item, Settled, Store,
    StoreOptions, Verdict,
};

const BATCH: usize = 10_000;
const SPAN_MS: i64 = 12 * 60_000;

fn options() -> StoreOptions {
    StoreOptions {
        window_ms: SPAN_MS,
        lateness_ms: 0,
        idle_after_ms: 60_000,
        max_disk_bytes: 64 << 30,
        max_memory_bytes: 64 << 30,
        commit_interval_ms: 5,
    }
}

fn identity() -> Identity {
    Identity {
        route_id: [1; 16],
        key_spec_id: 2,
        algorithm: Algorithm::Xxh3Secret,
        secret: std::array::from_fn(|index| index as u8),
    }
}

/// Keys whose event times are spread over `slots` slots.
fn items(hasher: &Hasher, keys: usize, slots: i64) -> Vec<Item> {
    let mut input = hasher.prefix().to_vec();
    let prefix = input.len();
    (0..keys as u64)
        .map(|number| {
            input.truncate(prefix);
            input.extend_from_slice(&number.to_le_bytes());
            Item {
                fingerprint: hasher.fingerprint(&input),
                digest: Digest(number),
                event_ms: number as i64 % slots * (SPAN_MS / 12),
                floor_ms: i64::MIN,
                admit_late: false,
                replay_dead_letter: false,
            }
        })
        .collect()
}

fn entry(item: &Item) -> Entry {
    Entry {
        fingerprint: item.fingerprint,
        digest: item.digest,
        event_ms: item.event_ms,
        settled: Settled::Written,
    }
}

struct Times {
    claim: f64,
    settle: f64,
    again: f64,
    total: f64,
}

fn run(store: &Store, keys: usize, slots: i64) -> Result<Times, Box<dyn Error>> {
    let hasher = store.bind(&identity())?;
    let items = items(&hasher, keys, slots);
    let (mut claim, mut settle, mut again) = (0.0, 0.0, 0.0);
    let mut verdicts = Vec::with_capacity(BATCH);
    let start = Instant::now();
    for (sequence, batch) in items.chunks(BATCH).enumerate() {
        verdicts.clear();
        let at = Instant::now();
        store.claim(1, i64::MAX, batch, &mut verdicts)?;
        claim += at.elapsed().as_secs_f64();
        if verdicts.iter().any(|verdict| !matches!(verdict, Verdict::New { .. })) {
            return Err("a new key was not new".into());
        }
        let block = Block::encode(&hasher, "a", sequence as i64, batch.iter().map(entry).collect());
        let checkpoint = Checkpoint {
            shard: "a".into(),
            sequence: sequence as i64,
            epoch: 1,
            position: None,
            watermark_ms: 0,
            floor_ms: i64::MIN,
        };
        let at = Instant::now();
        store.settle(&[checkpoint], &[block], 0)?;
        settle += at.elapsed().as_secs_f64();
    }
    store.wait_durable(store.latest())?;
    let total = start.elapsed().as_secs_f64();
    for batch in items.chunks(BATCH) {
        verdicts.clear();
        let at = Instant::now();
        store.claim(1, i64::MAX, batch, &mut verdicts)?;
        again += at.elapsed().as_secs_f64();
        if verdicts.iter().any(|verdict| *verdict != Verdict::Duplicate(Settled::Written)) {
            return Err("a known key was not a duplicate".into());
        }
    }
    Ok(Times { claim, settle, again, total })
}

fn hash_rate() {
    let hasher = Hasher::new(&identity());
    let payload = [7; 200];
    let mut input = hasher.prefix().to_vec();
    let prefix = input.len();
    input.extend_from_slice(&[0; 40]);
    let (rounds, mut sum) = (5_000_000u64, 0u64);
    let start = Instant::now();
    for number in 0..rounds {
        input[prefix..prefix + 8].copy_from_slice(&number.to_le_bytes());
        let Fingerprint(bytes) = hasher.fingerprint(&input);
        sum = sum.wrapping_add(u64::from(bytes[0])).wrapping_add(hasher.digest(&payload).0);
    }
    let nanos = start.elapsed().as_nanos() as f64 / rounds as f64;
    println!("name and digest (40-byte key, 200-byte payload): {nanos:.0} ns ({sum:x})");
}

fn main() -> Result<(), Box<dyn Error>> {
    let keys: usize = std::env::args().nth(1).map_or(Ok(1_000_000), |keys| keys.parse())?;
    hash_rate();
    println!("{keys} keys in batches of {BATCH}; million keys a second");
    println!("store      slots   claim new   settle   claim known   claim + pack + settle until durable");
    let folder = std::env::temp_dir().join(format!("claim-rate-{}", std::process::id()));
    for slots in [1, 12] {
        for on_disk in [false, true] {
            let store = if on_disk { Store::open(&folder, options())? } else { Store::in_memory(options()) };
            let times = run(&store, keys, slots)?;
            let rate = |seconds: f64| keys as f64 / seconds / 1e6;
            println!(
                "{:<10} {slots:>5} {:>11.2} {:>8.2} {:>13.2} {:>20.2}",
                if on_disk { "on disk" } else { "in memory" },
                rate(times.claim),
                rate(times.settle),
                rate(times.again),
                rate(times.total),
            );
            drop(store);
            if on_disk {
                let at = Instant::now();
                let store = Store::open(&folder, options())?;
                let found = store.stats(0).keys;
                println!("           opened again with {found} keys in {:.2} s", at.elapsed().as_secs_f64());
                drop(store);
                std::fs::remove_dir_all(&folder)?;
            }
        }
    }
    Ok(())
}
