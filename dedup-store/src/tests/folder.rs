//! Stores in real folders: what comes back, and what is refused.

use std::{fs, path::Path};

use tempfile::TempDir;

use crate::{testing::*, *};

fn open(folder: &TempDir) -> Store {
    let store = Store::open(folder.path(), options()).unwrap();
    store.bind(&identity()).unwrap();
    store
}

fn refused(folder: &Path) -> String {
    match Store::open(folder, options()) {
        Err(StoreError::Unusable(text)) => text,
        other => panic!("expected Unusable, got {other:?}"),
    }
}

#[test]
fn what_was_settled_comes_back() {
    let folder = TempDir::new().unwrap();
    let store = open(&folder);
    settle(&store, "a", 1, 0..20_000, 1_000);
    settle(&store, "b", 1, 20_000..20_010, 2_000);
    store.begin_effect(&key(99_999)).unwrap();
    claim(&store, 1, item(30_000, 2_000));
    let (stats, latest) = (store.stats(0), store.latest());
    drop(store);
    let store = Store::open(folder.path(), options()).unwrap();
    assert!(store.identity().unwrap() == identity());
    assert_eq!(store.stats(0).keys, 20_010);
    assert_eq!(store.stats(0).checkpoints, stats.checkpoints);
    assert_eq!(store.checkpoint("a").unwrap(), checkpoint("a", 1, 1_000));
    assert_eq!(claim(&store, 1, item(19_999, 1_000)), Verdict::Duplicate(Settled::Written));
    assert_eq!(
        claim(&store, 1, item(30_000, 2_000)),
        Verdict::New { late: false },
        "a claim does not outlive its process"
    );
    assert!(store.effect_pending(&key(99_999)).unwrap());
    assert_eq!(store.floors(2_000), Floors { watermark_ms: Some(1_000), retire_ms: stats.floors.retire_ms });
    assert_eq!(store.latest(), latest);
}

#[test]
fn dropping_a_store_makes_its_settlements_durable() {
    let folder = TempDir::new().unwrap();
    let store = open(&folder);
    let ticket = store.settle(&[], &[block("a", 1, vec![fact(1, 0, Settled::Written)])], 0).unwrap();
    assert_eq!(store.stats(0).groups, (ticket.0, ticket.0 - 1));
    drop(store);
    assert!(open(&folder).peek(&key(1)).unwrap().is_some());
}

#[test]
fn the_committer_does_not_wait_for_ever() {
    let folder = TempDir::new().unwrap();
    let store = Store::open(folder.path(), StoreOptions { commit_interval_ms: 1, ..options() }).unwrap();
    store.bind(&identity()).unwrap();
    let ticket = store.settle(&[checkpoint("a", 1, 0)], &[], 0).unwrap();
    while store.stats(0).groups.1 < ticket.0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_folder_is_held_by_one_store_which_the_error_names() {
    let folder = TempDir::new().unwrap();
    let store = open(&folder);
    match Store::open(folder.path(), options()) {
        Err(StoreError::Locked { holder, .. }) => assert_eq!(holder, std::process::id().to_string()),
        other => panic!("expected Locked, got {other:?}"),
    }
    drop(store);
    open(&folder);
}

#[test]
fn another_identity_is_refused() {
    let folder = TempDir::new().unwrap();
    drop(open(&folder));
    let store = Store::open(folder.path(), options()).unwrap();
    for (other, name) in [
        (Identity { route_id: [0; 16], ..identity() }, "route id"),
        (Identity { key_spec_id: 12, ..identity() }, "key-spec id"),
        (Identity { algorithm: Algorithm::SipHash24, ..identity() }, "algorithm"),
        (Identity { secret: [0; 192], ..identity() }, "key id"),
    ] {
        let error = store.bind(&other).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
    store.bind(&identity()).unwrap();
}

#[test]
fn p6_discard_is_durable() {
    let folder = TempDir::new().unwrap();
    let store = open(&folder);
    settle(&store, "a", 5, [1], 50_000);
    store.begin_effect(&key(7)).unwrap();
    store.expire(50_000).unwrap();
    store
        .settle(&[checkpoint("a", 6, 60_000)], &[block("a", 6, vec![fact(2, 0, Settled::Written)])], 0)
        .unwrap();
    store.discard().unwrap();
    settle(&store, "a", 1, [3], 1_000);
    drop(store);
    let store = open(&folder);
    assert_eq!(store.checkpoint("a").unwrap().sequence, 1);
    assert_eq!(store.stats(0).keys, 1);
    assert_eq!(store.stats(0).floor_ms, store.floors(0).retire_ms);
    assert_eq!(store.floors(0).watermark_ms, Some(1_000));
    assert!(store.effect_pending(&key(7)).unwrap());
    assert_eq!(store.stats(0).files.len(), 1);
}

#[test]
fn a_tail_removed_behind_our_back_is_named() {
    let folder = TempDir::new().unwrap();
    let store = open(&folder);
    settle(&store, "a", 1, [1], 0);
    drop(store);
    fs::remove_file(folder.path().join("tail-1.redb")).unwrap();
    assert!(refused(folder.path()).contains("tail-1.redb"));
}

#[test]
fn a_manifest_removed_behind_our_back_is_named() {
    let folder = TempDir::new().unwrap();
    drop(open(&folder));
    fs::remove_file(folder.path().join("manifest.redb")).unwrap();
    assert!(refused(folder.path()).contains("manifest.redb"));
}

#[test]
fn files_that_the_manifest_does_not_name_are_removed_and_strangers_are_left() {
    let folder = TempDir::new().unwrap();
    let store = open(&folder);
    settle(&store, "a", 1, [1], 0);
    drop(store);
    fs::write(folder.path().join("tail-2.redb"), b"half-made").unwrap();
    fs::write(folder.path().join("manifest.new"), b"half-made").unwrap();
    fs::write(folder.path().join("notes.txt"), b"mine").unwrap();
    let store = open(&folder);
    assert!(store.peek(&key(1)).unwrap().is_some());
    assert!(!folder.path().join("tail-2.redb").exists() && !folder.path().join("manifest.new").exists());
    assert!(folder.path().join("notes.txt").exists());
}

#[test]
fn files_that_are_cut_or_none_of_ours_are_refused() {
    for name in ["tail-1.redb", "manifest.redb"] {
        for length in [0, 1, 100, 5_000, 60_000] {
            let folder = TempDir::new().unwrap();
            let store = open(&folder);
            settle(&store, "a", 1, 0..5_000, 0);
            drop(store);
            let path = folder.path().join(name);
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
            let text = refused(folder.path());
            assert!(text.contains(name), "{length}: {text}");
        }
        let folder = TempDir::new().unwrap();
        drop(open(&folder));
        fs::write(folder.path().join(name), vec![0x55; 100_000]).unwrap();
        assert!(refused(folder.path()).contains(name));
    }
}

#[test]
fn tails_roll_and_expiry_unlinks_them() {
    let folder = TempDir::new().unwrap();
    let small = StoreOptions { max_disk_bytes: 16 * (300 << 10), ..options() };
    let store = Store::open(folder.path(), small.clone()).unwrap();
    store.bind(&identity()).unwrap();
    let mut full = false;
    for round in 0..40 {
        let at = 1_000 * round;
        settle(&store, "a", round + 1, (round as u64 * 5_000)..(round as u64 * 5_000 + 5_000), at);
        let refused = store.claim(1, i64::MAX, &[item(1 << 30, at)], &mut Vec::new());
        store.release_lane(1);
        full |= matches!(refused, Err(StoreError::Full { budget: Budget::Disk, .. }));
    }
    assert!(full);
    let before = store.stats(0);
    assert!(before.files.len() > 10, "{before}");
    store.expire(39_000).unwrap();
    let after = store.stats(0);
    // G = 27,000: of 40 s of facts 13 s are left, and a tail that reaches below.
    assert!(after.files.len() <= before.files.len() / 2, "{after}");
    assert!(after.disk_bytes < before.disk_bytes / 2);
    assert_eq!(claim(&store, 1, item(1 << 30, 39_000)), Verdict::New { late: false });
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.retain(|name| name.starts_with("tail-"));
    assert_eq!(names.len(), after.files.len());
    drop(store);
    let store = Store::open(folder.path(), small).unwrap();
    assert_eq!(store.stats(0).floor_ms, 27_000);
    assert_eq!(claim(&store, 1, item(5_000 * 39, 39_000)), Verdict::Duplicate(Settled::Written));
    assert_eq!(claim(&store, 1, item(5_000 * 27, 27_000)), Verdict::Duplicate(Settled::Written));
    assert_eq!(claim(&store, 1, item(5_000 * 20, 20_000)), Verdict::Late { floor_ms: 37_000 });
    // When nothing comes any more the last facts go as well.
    store.settle(&[checkpoint("a", 41, 100_000)], &[], 100_000).unwrap();
    store.wait_durable(store.latest()).unwrap();
    store.expire(100_000).unwrap();
    assert_eq!((store.stats(0).keys, store.stats(0).files.len()), (0, 1));
}

#[test]
fn p11_only_the_floor_of_a_durable_checkpoint_retires() {
    let folder = TempDir::new().unwrap();
    let store = open(&folder);
    settle(&store, "a", 1, [1], 1_000);
    let ticket = store.settle(&[checkpoint("a", 2, 50_000)], &[], 50_000).unwrap();
    let durable = store.floors(50_000).retire_ms;
    assert_eq!(store.expire(50_000).unwrap(), Floors { watermark_ms: Some(50_000), retire_ms: durable });
    assert!(store.peek(&key(1)).unwrap().is_some());
    store.wait_durable(ticket).unwrap();
    assert_eq!(store.expire(50_000).unwrap().retire_ms, 38_000);
    assert!(store.peek(&key(1)).unwrap().is_none());
}

#[test]
fn a_changed_window_moves_no_slot() {
    let folder = TempDir::new().unwrap();
    let store = open(&folder);
    settle(&store, "a", 1, [1], 1_000);
    drop(store);
    let store = Store::open(folder.path(), StoreOptions { window_ms: 10_000_000, ..options() }).unwrap();
    assert_eq!(store.stats(0).slot_width_ms, 1_000);
    assert!(store.peek(&key(1)).unwrap().is_some());
}

#[test]
fn lanes_on_several_threads_claim_each_key_once() {
    let folder = TempDir::new().unwrap();
    let store = Store::open(folder.path(), StoreOptions { commit_interval_ms: 1, ..options() }).unwrap();
    store.bind(&identity()).unwrap();
    let news: usize = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..4u32)
            .map(|lane| {
                let store = &store;
                scope.spawn(move || {
                    let mut news = 0;
                    for round in 0..50u64 {
                        let items: Vec<_> =
                            (round * 20..round * 20 + 40).map(|number| item(number, 0)).collect();
                        let mut verdicts = Vec::new();
                        store.claim(lane, i64::MAX, &items, &mut verdicts).unwrap();
                        let new = |(verdict, item): (&Verdict, &Item)| {
                            matches!(verdict, Verdict::New { .. }).then_some(Entry {
                                fingerprint: item.fingerprint,
                                digest: item.digest,
                                event_ms: 0,
                                settled: Settled::Written,
                            })
                        };
                        let facts: Vec<_> = verdicts.iter().zip(&items).filter_map(new).collect();
                        news += facts.len();
                        let shard = format!("http/{lane}");
                        let sequence = round as i64 + 1;
                        let blocks = [block(&shard, sequence, facts)];
                        let ticket = store.settle(&[checkpoint(&shard, sequence, 0)], &blocks, 0).unwrap();
                        if round % 7 == 0 {
                            store.wait_durable(ticket).unwrap();
                        }
                    }
                    news
                })
            })
            .collect();
        lanes.into_iter().map(|lane| lane.join().unwrap()).sum()
    });
    assert_eq!(news, 49 * 20 + 40);
    assert_eq!((store.stats(0).keys, store.stats(0).claims), (1_020, 0));
}
