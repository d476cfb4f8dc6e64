//! Replays the seeds of `fuzz/seeds`, and changes them at random for a while: what `./test.sh` runs of fuzzing.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use rand::{Rng, SeedableRng, rngs::SmallRng, seq::IndexedRandom};

use super::{run, targets};

/// For each target; `ONCEGATE_FUZZ_MS` names another time.
const PATIENCE: Duration = Duration::from_millis(700);

fn seeds(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|fault| panic!("{}: {fault}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(&path).expect("a seed"))).collect()
}

/// Some bytes of it are others now, or gone, or there twice, or another seed's.
fn changed(seeds: &[(PathBuf, Vec<u8>)], rng: &mut SmallRng) -> Vec<u8> {
    const TELLING: [&[u8]; 14] = [
        b"\"",
        b"\\",
        b"{",
        b"]",
        b"-",
        b"e9",
        b"0",
        b"\xff",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\n",
        b"\\ud800",
        b"99999999999999999999",
        b".",
    ];
    let mut bytes = seeds.choose(rng).map(|(_, bytes)| bytes.clone()).unwrap_or_default();
    for _ in 0..rng.random_range(1..6) {
        let at = rng.random_range(0..=bytes.len());
        let most = bytes.len().min(at + rng.random_range(1..41));
        let end = rng.random_range(at..=most);
        match rng.random_range(0..6) {
            0 => drop(bytes.splice(at..end, std::iter::empty())),
            1 => {
                let twice = bytes[at..end].to_vec();
                bytes.splice(at..at, twice);
            }
            2 => {
                let telling = TELLING.choose(rng).expect("there are some").to_vec();
                bytes.splice(at..end.min(at + 1), telling);
            }
            3 => {
                let other = &seeds.choose(rng).expect("there are some").1;
                let from = rng.random_range(0..=other.len());
                bytes.splice(at..end, other[from..].iter().copied().take(60));
            }
            4 => bytes.truncate(at.max(1)),
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << rng.random_range(0..8);
                }
            }
        }
    }
    bytes.truncate(1 << 14);
    bytes
}

#[test]
fn fuzz_seeds_and_what_becomes_of_them_are_read_or_refused() {
    let asked = std::env::var("ONCEGATE_FUZZ_MS").ok().and_then(|ms| ms.parse().ok());
    let patience = asked.map_or(PATIENCE, Duration::from_millis);
    for (name, _) in targets() {
        let seeds = seeds(name);
        assert!(!seeds.is_empty(), "{name} has no seeds");
        for (path, bytes) in &seeds {
            let read = std::panic::catch_unwind(|| run(name, bytes));
            assert!(read.is_ok(), "{}", path.display());
        }
        let (mut rng, begun, mut count) = (SmallRng::seed_from_u64(1), Instant::now(), 0);
        while begun.elapsed() < patience {
            let bytes = changed(&seeds, &mut rng);
            let read = std::panic::catch_unwind(|| run(name, &bytes));
            assert!(read.is_ok(), "{name} fails on {:?}", bytes.escape_ascii().to_string());
            count += 1;
        }
        println!("{name}: {} seeds, {count} changed ones", seeds.len());
    }
}
