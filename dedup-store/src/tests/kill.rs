//! The process is killed, on a real file system: what it said was settled is there.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use tempfile::TempDir;

use crate::{store::Limits, testing::*, *};

const FOLDER: &str = "DEDUP_STORE_KILL_FOLDER";
const KEYS: u64 = 50;
/// Slots are closed after a few batches, and sealed.
const LIMITS: Limits = Limits { roll_bytes: Some(20_000), keys: Some((400, 100)) };

fn open(folder: &Path) -> Store {
    let disk = std::sync::Arc::new(crate::disk::Folder::new(folder));
    let store = Store::open_on(disk, options(), LIMITS).unwrap();
    store.bind(&identity()).unwrap();
    store
}

fn last_sequence(store: &Store) -> i64 {
    store.checkpoint("a").map_or(0, |checkpoint| checkpoint.sequence)
}

fn keys_of(sequence: i64) -> std::ops::Range<u64> {
    sequence as u64 * KEYS..(sequence as u64 + 1) * KEYS
}

/// The other process: settles batch after batch and says so, until it is killed.
#[test]
#[ignore = "only in the process that is to be killed"]
fn settles_until_it_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let store = open(Path::new(&folder));
    for sequence in last_sequence(&store) + 1.. {
        settle(&store, "a", sequence, keys_of(sequence), 1_000 + sequence % 10);
        writeln!(std::io::stderr(), "settled {sequence}").unwrap();
    }
}

#[test]
fn p16_what_was_settled_is_there_after_two_hundred_kills() {
    let folder = TempDir::new().unwrap();
    let mut random = SmallRng::seed_from_u64(11);
    let mut settled = 0;
    for kill in 0..200 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::kill::settles_until_it_is_killed", "--ignored", "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stderr.take().unwrap());
        let reader = std::thread::spawn(move || {
            let numbers = said.lines().map_while(Result::ok);
            numbers.filter_map(|line| line.strip_prefix("settled ")?.parse::<i64>().ok()).last()
        });
        std::thread::sleep(Duration::from_millis(random.random_range(5..90)));
        child.kill().unwrap();
        child.wait().unwrap();
        settled = reader.join().unwrap().unwrap_or(settled);
        let store = open(folder.path());
        let sequence = last_sequence(&store);
        assert!(sequence >= settled, "kill {kill}: at {sequence}, {settled} was said to be settled");
        let from = (sequence - 40).max(1);
        for number in (from..=sequence).flat_map(keys_of).chain(keys_of(1 + kill % sequence.max(1)).take(5)) {
            let held = number >= (sequence as u64 + 1) * KEYS || store.peek(&key(number)).unwrap().is_some();
            assert!(held, "kill {kill}: key {number} at {sequence}");
        }
        assert!(
            keys_of(sequence + 1).all(|number| store.peek(&key(number)).unwrap().is_none()),
            "kill {kill}"
        );
    }
    let store = open(folder.path());
    let stats = store.stats(0);
    assert_eq!(stats.keys, last_sequence(&store) as u64 * KEYS, "every key once, over {settled} batches");
    assert!(stats.slots.iter().any(|slot| slot.kind == SlotKind::Sealed), "{stats}");
    assert!(verify_all(folder.path(), store), "sound");
}

fn verify_all(folder: &Path, store: Store) -> bool {
    drop(store);
    verify(folder).unwrap().sound()
}
