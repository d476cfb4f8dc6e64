//! Takes a closed store to another place: [`export`] writes a compact copy of it, all slots sealed;
//! [`import`] puts such a copy, or any closed store, where a gateway will open it. Both are checked whole on
//! the way.

use std::{
    fs::{self, File},
    io,
    path::Path,
    sync::Arc,
};

use crate::{
    disk::{self, Disk, Fail, Folder},
    error::StoreError,
    files,
    filter::blocks_for,
    fingerprint::{Hasher, Identity},
    manifest::{self, Manifest, Part},
    run::{self, Run, RunMeta},
    store::{Store, StoreOptions},
    table::Table,
    tail::{Standing, Tail},
    verify::verify,
};

/// What a copy is made of.
pub(crate) struct Snapshot {
    pub(crate) identity: Identity,
    pub(crate) hasher: Hasher,
    pub(crate) width_ms: i64,
    pub(crate) floor_ms: i64,
    pub(crate) last_group: u64,
    pub(crate) standing: Standing,
    /// Slots that are not sealed.
    pub(crate) tables: Vec<Arc<Table>>,
    pub(crate) runs: Vec<Arc<Run>>,
    /// Number of the slot that comes next.
    pub(crate) next: u64,
}

/// Writes a copy of the store in `folder` to the empty folder `to`: a store itself, with all slots sealed, as
/// `FORMAT.md` says. The copy holds the hash secret: keep it as private as the store. `progress` is told how
/// many keys are done, of how many. The store must not be open elsewhere.
pub fn export(
    folder: &Path,
    options: StoreOptions,
    to: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, StoreError> {
    if !folder.is_dir() {
        return Err(StoreError::Unusable(format!("{} is no folder: there is no store", folder.display())));
    }
    let store = Store::open(folder, options)?;
    let snapshot = store.snapshot()?;
    empty_folder(to)?;
    let _lock = disk::lock(to)?;
    Ok(write(&snapshot, &Folder::new(to), progress)?)
}

fn write(snapshot: &Snapshot, to: &dyn Disk, progress: &mut dyn FnMut(u64, u64)) -> Result<u64, Fail> {
    let Snapshot { hasher, tables, runs, .. } = snapshot;
    let of_tables: u64 = tables.iter().map(|table| table.keys() as u64).sum();
    let keys = of_tables + runs.iter().map(|run| run.meta.keys).sum::<u64>();
    let mut manifest = Manifest::new(snapshot.width_ms);
    (manifest.identity, manifest.floor_ms) = (Some(snapshot.identity.clone()), snapshot.floor_ms);
    let mut done = 0;
    let mut publish = |generation: u64, meta: RunMeta| {
        manifest.parts.insert(generation, Part::Run(meta));
        done += meta.keys;
        progress(done, keys);
    };
    for table in tables.iter().filter(|table| table.keys() > 0) {
        let blocks = blocks_for(table.keys() as u64);
        // Nobody calls it off.
        if let Some((meta, filter)) = run::write(to, hasher, table, blocks, &|| true)? {
            run::write_filter(to, hasher, table.generation, &filter)?;
            publish(table.generation, meta);
        }
    }
    for run in runs {
        let filter = run.copy(to, hasher)?;
        run::write_filter(to, hasher, run.generation, &filter)?;
        publish(run.generation, run.meta);
    }
    Tail::make(to, hasher, snapshot.next, snapshot.last_group, &snapshot.standing)?.close()?;
    manifest.parts.insert(snapshot.next, Part::Open);
    manifest.make(to)?;
    Ok(keys)
}

/// Puts the closed store in `from` to the empty folder `to`, after it was found to be sound. `progress` is
/// told how many bytes are done, of how many. An error leaves no store in `to`.
pub fn import(from: &Path, to: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<u64, StoreError> {
    let report = verify(from)?;
    if !report.sound() || report.route.is_none() {
        return Err(StoreError::Unusable(format!("what is to be imported is not sound:\n{report}")));
    }
    let _from = disk::lock(from)?;
    empty_folder(to)?;
    let _to = disk::lock(to)?;
    let failed = |what: &Path, error: &io::Error| -> StoreError {
        Fail::of_io(&format!("cannot copy {}", what.display()), error).into()
    };
    let mut names = Folder::new(from).list().map_err(|error| failed(from, &error))?;
    names.retain(|name| files::generation_of(name).is_some());
    // The manifest comes last, and under its own name once it is whole.
    names.sort();
    let size = |name: &str| fs::metadata(from.join(name)).map(|metadata| metadata.len());
    let all: u64 = names.iter().map(|name| size(name).unwrap_or(0)).sum();
    let mut done = 0;
    for name in &names {
        copy_file(&from.join(name), &to.join(name)).map_err(|error| failed(&from.join(name), &error))?;
        done += size(name).unwrap_or(0);
        progress(done, all);
    }
    let target = Folder::new(to);
    copy_file(&from.join(manifest::NAME), &to.join(manifest::NEW_NAME))
        .and_then(|()| target.sync_folder())
        .and_then(|()| target.rename(manifest::NEW_NAME, manifest::NAME))
        .and_then(|()| target.sync_folder())
        .map_err(|error| failed(&from.join(manifest::NAME), &error))?;
    Ok(all)
}

fn copy_file(from: &Path, to: &Path) -> io::Result<()> {
    fs::copy(from, to)?;
    File::open(to)?.sync_all()
}

/// Makes the folder, or makes sure that it is empty.
fn empty_folder(folder: &Path) -> Result<(), StoreError> {
    let failed =
        |error: io::Error| StoreError::Io(format!("cannot use folder {}: {error}", folder.display()));
    fs::create_dir_all(folder).map_err(failed)?;
    match fs::read_dir(folder).map_err(failed)?.next() {
        None => Ok(()),
        Some(_) => Err(StoreError::Unusable(format!(
            "{} is not empty: name a new folder, or remove what is in it",
            folder.display()
        ))),
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::{testing::*, *};

    fn store_in(folder: &Path) {
        let small = StoreOptions { max_disk_bytes: 20 << 20, ..options() };
        let store = Store::open(folder, small).unwrap();
        store.bind(&identity()).unwrap();
        settle(&store, "a", 1, 0..60_000, 10_000);
        settle(&store, "b", 7, 60_000..60_100, 40_000);
        let forgotten = vec![fact(5, 10_000, Settled::Forgotten)];
        store.settle(&[checkpoint("a", 2, 41_000)], &[block("a", 2, forgotten)], 0).unwrap();
        store.begin_effect(&key(1 << 40)).unwrap();
        store.wait_sealed();
        let kinds: Vec<_> = store.stats(0).slots.iter().map(|slot| slot.kind).collect();
        assert_eq!(kinds, [SlotKind::Sealed, SlotKind::Closed]);
    }

    fn check(folder: &Path) {
        assert!(verify(folder).unwrap().faults.is_empty());
        let store = Store::open(folder, options()).unwrap();
        store.bind(&identity()).unwrap();
        for number in (0..60_000).step_by(11).filter(|number| *number != 5) {
            assert!(knows(&store, &fact(number, 10_000, Settled::Written)), "{number}");
        }
        assert!((60_000..60_100).all(|number| knows(&store, &fact(number, 40_000, Settled::Written))));
        assert!((60_100..61_000).all(|number| store.peek(&key(number)).unwrap().is_none()));
        assert_eq!(store.peek(&key(5)).unwrap(), None, "it was taken back");
        assert_eq!(store.checkpoint("a").unwrap(), checkpoint("a", 2, 41_000));
        assert_eq!(store.checkpoint("b").unwrap(), checkpoint("b", 7, 40_000));
        assert!(store.effect_pending(&key(1 << 40)).unwrap());
        settle(&store, "a", 3, [99_999], 42_000);
        assert!(store.peek(&key(99_999)).unwrap().is_some());
    }

    #[test]
    fn a_copy_is_a_store_that_says_the_same() {
        let (from, copy, again) = (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
        store_in(from.path());
        let mut told = Vec::new();
        let keys =
            export(from.path(), options(), copy.path(), &mut |done, all| told.push((done, all))).unwrap();
        assert_eq!(told.last(), Some(&(keys, keys)));
        assert!(keys >= 60_100);
        let (first, second) = (again.path().join("first"), again.path().join("second"));
        import(copy.path(), &first, &mut |_, _| {}).unwrap();
        // Any closed store can be imported.
        import(from.path(), &second, &mut |_, _| {}).unwrap();
        check(from.path());
        check(copy.path());
        check(&first);
        check(&second);
    }

    #[test]
    fn what_is_not_sound_or_not_empty_is_refused() {
        let (from, to) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        store_in(from.path());
        fs::write(to.path().join("mine"), b"").unwrap();
        let error = export(from.path(), options(), to.path(), &mut |_, _| {}).unwrap_err();
        assert!(error.to_string().contains("is not empty"), "{error}");
        let error = import(from.path(), to.path(), &mut |_, _| {}).unwrap_err();
        assert!(error.to_string().contains("is not empty"), "{error}");
        fs::remove_file(to.path().join("mine")).unwrap();
        let name = from.path().join("run-1.facts");
        let mut bytes = fs::read(&name).unwrap();
        bytes[9_000] ^= 1;
        fs::write(name, bytes).unwrap();
        let error = import(from.path(), to.path(), &mut |_, _| {}).unwrap_err();
        assert!(error.to_string().contains("run-1.facts: block"), "{error}");
        let error = export(from.path(), options(), to.path(), &mut |_, _| {}).unwrap_err();
        assert!(error.to_string().contains("run-1.facts: block"), "{error}");
        assert!(!to.path().join("manifest.redb").exists());
        let nothing = from.path().join("nothing");
        assert!(export(&nothing, options(), to.path(), &mut |_, _| {}).is_err() && !nothing.exists());
        assert!(import(&nothing, to.path(), &mut |_, _| {}).is_err() && !nothing.exists());
    }
}
