//! Damaged files: named, never believed, and no panic.

use std::{fs, path::Path};

use tempfile::TempDir;

use crate::{testing::*, *};

/// A closed store of two tails.
fn store_in(folder: &Path) {
    let small = StoreOptions { max_disk_bytes: 1, ..options() };
    let store = Store::open(folder, small).unwrap();
    store.bind(&identity()).unwrap();
    for sequence in 1..=4 {
        let first = sequence as u64 * 10_000;
        settle(&store, "a", sequence, first..first + 4_000, 1_000);
    }
    assert_eq!(store.stats(0).files.len(), 2);
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn verify_counts_a_sound_store() {
    let folder = TempDir::new().unwrap();
    store_in(folder.path());
    let report = verify(folder.path()).unwrap();
    assert!(report.faults.is_empty() && report.sound(), "{report}");
    let files: Vec<_> = report.files.iter().map(|file| (&*file.file, file.blocks, file.facts)).collect();
    assert_eq!(files, [("manifest.redb", 0, 0), ("tail-1.redb", 3, 12_000), ("tail-2.redb", 1, 4_000)]);
    assert_eq!(report.route, Some((Fingerprint(identity().route_id).to_string(), hasher().key_id())));
    assert!(report.to_string().ends_with("sound\n"), "{report}");
    Store::open(folder.path(), options()).unwrap();
}

#[test]
fn verify_needs_a_closed_store() {
    let folder = TempDir::new().unwrap();
    let _store = Store::open(folder.path(), options()).unwrap();
    assert!(matches!(verify(folder.path()), Err(StoreError::Locked { .. })));
    assert!(matches!(verify(&folder.path().join("none")), Err(StoreError::Unusable(_))));
}

#[test]
fn verify_lists_all_that_is_wrong() {
    let folder = TempDir::new().unwrap();
    store_in(folder.path());
    fs::remove_file(folder.path().join("tail-1.redb")).unwrap();
    fs::write(folder.path().join("tail-2.redb"), b"not a database").unwrap();
    fs::write(folder.path().join("tail-9.redb"), b"left over").unwrap();
    fs::write(folder.path().join("stranger"), b"").unwrap();
    let report = verify(folder.path()).unwrap();
    assert!(!report.sound());
    let text = report.to_string();
    for part in [
        "tail-1.redb is missing",
        "tail-2.redb",
        "tail-9.redb is not in the manifest",
        "stranger",
        "NOT SOUND",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(report.faults.len(), 4, "{text}");
}

#[test]
fn an_older_copy_of_a_sealed_tail_is_found_out() {
    let folder = TempDir::new().unwrap();
    let old = TempDir::new().unwrap();
    let small = StoreOptions { max_disk_bytes: 1, ..options() };
    let store = Store::open(folder.path(), small.clone()).unwrap();
    store.bind(&identity()).unwrap();
    settle(&store, "a", 1, 0..4_000, 1_000);
    drop(store);
    copy(folder.path(), old.path());
    let store = Store::open(folder.path(), small).unwrap();
    for sequence in 2..=4 {
        let first = sequence as u64 * 10_000;
        settle(&store, "a", sequence, first..first + 4_000, 1_000);
    }
    drop(store);
    fs::copy(old.path().join("tail-1.redb"), folder.path().join("tail-1.redb")).unwrap();
    let error = Store::open(folder.path(), options()).unwrap_err().to_string();
    assert!(error.contains("tail-1.redb") && error.contains("exchanged"), "{error}");
    assert!(verify(folder.path()).unwrap().to_string().contains("exchanged"));
}

#[test]
fn a_tail_of_another_route_is_found_out() {
    let (ours, theirs) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    store_in(ours.path());
    let other = Identity { secret: [3; 192], ..identity() };
    Store::open(theirs.path(), options()).unwrap().bind(&other).unwrap();
    fs::copy(theirs.path().join("tail-1.redb"), ours.path().join("tail-1.redb")).unwrap();
    let error = Store::open(ours.path(), options()).unwrap_err().to_string();
    assert!(error.contains("tail-1.redb") && error.contains("key id"), "{error}");
}

/// A byte is changed at many places of each file: it is refused, or it was a byte that nothing is read from. Then all is as it
/// was. A fact is never lost or made up in silence.
#[test]
fn a_changed_byte_is_found_out_or_changes_nothing() {
    let sound = TempDir::new().unwrap();
    store_in(sound.path());
    for name in ["manifest.redb", "tail-1.redb", "tail-2.redb"] {
        let length = fs::metadata(sound.path().join(name)).unwrap().len() as usize;
        let (mut refused, mut same) = (0, 0);
        let step = (length / 24) | 1;
        for at in (0..1_000).step_by(97).chain((1_000..length).step_by(step)) {
            let folder = TempDir::new().unwrap();
            copy(sound.path(), folder.path());
            let path = folder.path().join(name);
            let mut bytes = fs::read(&path).unwrap();
            bytes[at] ^= 0x41;
            fs::write(&path, bytes).unwrap();
            let report = verify(folder.path()).unwrap();
            match Store::open(folder.path(), options()) {
                Err(StoreError::Unusable(text)) => {
                    assert!(text.contains(name), "byte {at} of {name}: {text}");
                    assert!(!report.sound(), "byte {at} of {name}: verify saw nothing, open said {text}");
                    refused += 1;
                }
                Err(other) => panic!("byte {at} of {name}: {other}"),
                Ok(store) => {
                    assert!(report.sound(), "byte {at} of {name}: {report}");
                    assert_eq!(store.stats(0).keys, 16_000, "byte {at} of {name}");
                    assert_eq!(
                        store.checkpoint("a").unwrap(),
                        checkpoint("a", 4, 1_000),
                        "byte {at} of {name}"
                    );
                    assert!(store.identity().unwrap() == identity());
                    for number in [10_000, 13_999, 40_000, 43_999] {
                        assert!(knows(&store, &fact(number, 1_000, Settled::Written)));
                    }
                    same += 1;
                }
            }
        }
        assert!(refused > 0, "{name}: {refused} refused, {same} same");
    }
}
