//! The files of one store and their order of publication (P16): [`Files`]. One thread at a time.
//!
//! A file counts only once the manifest names it, and is unlinked only once the manifest does not: new tail synced, folder
//! synced, manifest committed, old tail unlinked. Whatever the manifest does not name is removed at open.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use tracing::warn;

use crate::{
    block::Block,
    disk::{self, Disk, Fail},
    fingerprint::{Fingerprint, Hasher, Identity},
    manifest::Manifest,
    tail::{self, Group, Lost, Standing, Tail, Visitor},
};

/// Given back to the file system when it is full, so that expiry can commit.
pub(crate) const RESERVE_NAME: &str = "reserve";
const RESERVE_BYTES: usize = 1 << 20;
/// A tail is rolled at a part of the disk budget, so that expiry can drop files before the budget is used up.
const ROLLS_PER_BUDGET: u64 = 16;
const MIN_ROLL_BYTES: u64 = 256 << 10;
const MAX_ROLL_BYTES: u64 = 128 << 20;

enum Current {
    /// The store is not bound yet.
    Unbound,
    Open(Tail),
    /// An error closed it; the file is opened again before it is used.
    Lost(Lost),
}

/// See the module.
pub(crate) struct Files {
    disk: Arc<dyn Disk>,
    manifest: Manifest,
    hasher: Option<Hasher>,
    current: Current,
    /// As of the last durable group.
    standing: Standing,
    last_group: u64,
    roll_bytes: u64,
    /// Bytes of each tail's file.
    sizes: BTreeMap<u64, u64>,
    reserve: bool,
}

/// Bytes of blocks at which a tail is rolled, within this disk budget.
pub(crate) fn roll_bytes(max_disk_bytes: u64) -> u64 {
    (max_disk_bytes / ROLLS_PER_BUDGET).clamp(MIN_ROLL_BYTES, MAX_ROLL_BYTES)
}

/// One tail file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TailStats {
    /// Its name in the store's folder.
    pub file: String,
    /// Bytes that it takes up.
    pub bytes: u64,
    /// Nothing is added to it any more.
    pub sealed: bool,
    /// Newest event time in it, ms: it goes once the retirement floor is above. None without facts.
    pub newest_ms: Option<i64>,
}

impl Files {
    /// Opens the files in `disk`, or makes them. Facts follow by [`Files::replay`]. On a full disk the reserve is given back.
    pub(crate) fn open(disk: Arc<dyn Disk>, width_ms: i64, roll_bytes: u64) -> Result<Self, Fail> {
        match Self::open_once(Arc::clone(&disk), width_ms, roll_bytes) {
            Err(Fail::Full(text)) => {
                warn!(text, "the disk is full: the reserve is given back");
                disk.remove(RESERVE_NAME).map_err(|error| Fail::of_io("cannot free the reserve", &error))?;
                Self::open_once(disk, width_ms, roll_bytes)
            }
            done => done,
        }
    }

    fn open_once(disk: Arc<dyn Disk>, width_ms: i64, roll_bytes: u64) -> Result<Self, Fail> {
        let folder = disk.folder().display().to_string();
        let names = disk.list().map_err(|error| Fail::of_io(&format!("cannot list {folder}"), &error))?;
        let mut manifest = match Manifest::load(&*disk, &names)? {
            Some(manifest) => manifest,
            None => {
                if let Some(name) = names.iter().find(|name| tail::generation_of(name).is_some()) {
                    return Err(Fail::Unusable(format!(
                        "store {folder} has {name} but no manifest.redb: it was removed. Restore it, or delete the folder; \
                         a Transactional sink rebuilds the store from its marks"
                    )));
                }
                let manifest = Manifest::new(width_ms);
                manifest.make(&*disk)?;
                manifest
            }
        };
        for generation in manifest.tails.keys() {
            let name = tail::file_name(*generation);
            if !names.contains(&name) {
                return Err(Fail::Unusable(format!(
                    "store {folder} lacks {name}, which its manifest names: it was removed. Restore it, or delete the \
                     folder; a Transactional sink rebuilds the store from its marks"
                )));
            }
        }
        for name in &names {
            match tail::generation_of(name) {
                Some(generation) if !manifest.tails.contains_key(&generation) => {
                    disk.remove(name).map_err(|error| {
                        Fail::of_io(&format!("cannot remove {name}, which is of no use"), &error)
                    })?
                }
                Some(_) => {}
                None if Manifest::is_named(name) || disk::is_lock(name) || name == RESERVE_NAME => {}
                None => {
                    warn!(folder, name, "a file in the store's folder is not the store's; it is left alone")
                }
            }
        }
        manifest.fence += 1;
        let mut files = Files {
            hasher: manifest.hasher(),
            disk,
            manifest,
            current: Current::Unbound,
            standing: Standing::default(),
            last_group: 0,
            roll_bytes,
            sizes: BTreeMap::new(),
            reserve: names.iter().any(|name| name == RESERVE_NAME),
        };
        files.manifest.replace(&*files.disk)?;
        if let (Some(hasher), Some(generation)) = (&files.hasher, files.manifest.tails.keys().next_back()) {
            let (tail, standing) = Tail::open(&*files.disk, hasher, *generation)?;
            files.last_group = tail.group();
            (files.current, files.standing) = (Current::Open(tail), standing);
        }
        files.keep_reserve()?;
        Ok(files)
    }

    /// Gives all blocks to `learn`, oldest first.
    pub(crate) fn replay(&mut self, learn: impl FnMut(&Block) -> Option<i64>) -> Result<(), Fail> {
        let mut learner = Learner(learn);
        let (Some(hasher), Current::Open(newest)) = (&self.hasher, &mut self.current) else { return Ok(()) };
        for (generation, sealed) in &self.manifest.tails {
            match sealed {
                Some(sealed) => {
                    let (mut tail, _) = Tail::open(&*self.disk, hasher, *generation)?;
                    tail.replay(hasher, &mut learner)?;
                    // Told when it was sealed: facts that it takes away may be gone since.
                    tail.newest_ms = sealed.newest_ms;
                    tail.check_sealed(sealed)?;
                    tail.close()?;
                }
                None => newest.replay(hasher, &mut learner)?,
            }
        }
        self.measure_all()
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(crate) fn standing(&self) -> &Standing {
        &self.standing
    }

    pub(crate) fn last_group(&self) -> u64 {
        self.last_group
    }

    /// Bytes of the tails' files.
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.values().sum()
    }

    pub(crate) fn tails(&self) -> Vec<TailStats> {
        let newest = match &self.current {
            Current::Open(tail) => tail.newest_ms,
            Current::Lost(lost) => lost.newest_ms,
            Current::Unbound => None,
        };
        let tails = self.manifest.tails.iter();
        tails
            .map(|(generation, sealed)| TailStats {
                file: tail::file_name(*generation),
                bytes: self.sizes.get(generation).copied().unwrap_or(0),
                sealed: sealed.is_some(),
                newest_ms: sealed.map_or(newest, |sealed| sealed.newest_ms),
            })
            .collect()
    }

    /// Gives the store its identity and first tail.
    pub(crate) fn bind(&mut self, identity: &Identity) -> Result<(), Fail> {
        let hasher = Hasher::new(identity);
        let tail = Tail::make(&*self.disk, &hasher, 1, self.last_group, &self.standing)?;
        let mut manifest = self.manifest.clone();
        manifest.identity = Some(identity.clone());
        manifest.tails.insert(tail.generation, None);
        manifest.replace(&*self.disk)?;
        (self.manifest, self.hasher, self.current) = (manifest, Some(hasher), Current::Open(tail));
        self.measure_all()
    }

    /// Makes a group durable. `Full` leaves it undecided: given again, it is applied once.
    pub(crate) fn commit(&mut self, group: &Group) -> Result<(), Fail> {
        if self.last_group >= group.number {
            return Ok(());
        }
        self.reopen()?;
        if self.open_tail()?.group() >= group.number {
            // An earlier attempt failed, and is in nevertheless.
            self.open_tail()?.took(group);
        } else {
            if self.open_tail()?.bytes >= self.roll_bytes {
                self.roll()?;
            }
            if let Err(fail) = self.open_tail()?.commit(group) {
                self.lose();
                return Err(fail);
            }
        }
        self.last_group = group.number;
        self.standing.apply(group);
        self.measure()
    }

    /// Drops the tails whose facts all lie below `floor_ms`. `pressed`: the file system is full, so the floor is made durable
    /// here and the reserve is given back first.
    pub(crate) fn forget(&mut self, floor_ms: i64, pressed: bool) -> Result<(), Fail> {
        if pressed {
            self.free_reserve()?;
        } else if !self.reserve {
            self.keep_reserve()?;
        }
        self.reopen()?;
        if let Current::Open(tail) = &self.current
            && tail.bytes >= self.roll_bytes / 4
            && tail.newest_ms.is_some_and(|newest| newest < floor_ms)
        {
            self.roll()?;
        }
        let gone: Vec<u64> = self
            .manifest
            .tails
            .iter()
            .filter(|(_, sealed)| {
                sealed.is_some_and(|sealed| sealed.newest_ms.is_none_or(|newest| newest < floor_ms))
            })
            .map(|(generation, _)| *generation)
            .collect();
        let raises = floor_ms > self.manifest.floor_ms.max(self.standing.retire_ms);
        if gone.is_empty() && !(pressed && raises) {
            return Ok(());
        }
        let mut manifest = self.manifest.clone();
        manifest.floor_ms = manifest.floor_ms.max(floor_ms);
        manifest.tails.retain(|generation, _| !gone.contains(generation));
        manifest.replace(&*self.disk)?;
        self.manifest = manifest;
        self.unlink(&gone)
    }

    /// Drops all but the identity; these intents stay.
    pub(crate) fn discard(&mut self, intents: HashSet<Fingerprint>) -> Result<(), Fail> {
        let Some(hasher) = &self.hasher else { return Ok(()) };
        let gone: Vec<u64> = self.manifest.tails.keys().copied().collect();
        let generation = gone.last().map_or(1, |last| last + 1);
        let standing = Standing { intents, ..Standing::default() };
        let tail = Tail::make(&*self.disk, hasher, generation, self.last_group, &standing)?;
        let mut manifest = self.manifest.clone();
        manifest.floor_ms = i64::MIN;
        manifest.tails = BTreeMap::from([(generation, None)]);
        manifest.replace(&*self.disk)?;
        (self.manifest, self.standing, self.current) = (manifest, standing, Current::Open(tail));
        self.unlink(&gone)
    }

    /// The discarded group's number is used up.
    pub(crate) fn skip_to(&mut self, group: u64) {
        self.last_group = self.last_group.max(group);
    }

    /// Seals the current tail and goes on in a new one, which starts with all that stands.
    fn roll(&mut self) -> Result<(), Fail> {
        let (Some(hasher), Current::Open(old)) = (&self.hasher, &self.current) else { return Ok(()) };
        let generation = old.generation + 1;
        let fresh = Tail::make(&*self.disk, hasher, generation, self.last_group, &self.standing)?;
        let mut manifest = self.manifest.clone();
        manifest.tails.insert(old.generation, Some(old.sealed()));
        manifest.tails.insert(generation, None);
        manifest.replace(&*self.disk)?;
        self.manifest = manifest;
        if let Current::Open(old) = std::mem::replace(&mut self.current, Current::Open(fresh)) {
            match old.close() {
                // All of it is committed; the next open mends what the close left undone.
                Ok(()) | Err(Fail::Full(_)) => {}
                Err(other) => return Err(other),
            }
        }
        self.measure_all()
    }

    fn open_tail(&mut self) -> Result<&mut Tail, Fail> {
        match &mut self.current {
            Current::Open(tail) => Ok(tail),
            _ => Err(Fail::Io("the tail is not open".to_owned())),
        }
    }

    fn lose(&mut self) {
        self.current = match std::mem::replace(&mut self.current, Current::Unbound) {
            Current::Open(tail) => Current::Lost(tail.give_up()),
            other => other,
        };
    }

    fn reopen(&mut self) -> Result<(), Fail> {
        if let (Current::Lost(lost), Some(hasher)) = (&self.current, &self.hasher) {
            self.current = Current::Open(Tail::reopen(&*self.disk, hasher, lost)?);
        }
        Ok(())
    }

    fn unlink(&mut self, generations: &[u64]) -> Result<(), Fail> {
        for generation in generations {
            let name = tail::file_name(*generation);
            self.disk.remove(&name).map_err(|error| Fail::of_io(&format!("cannot remove {name}"), &error))?;
            self.sizes.remove(generation);
        }
        self.disk.sync_folder().map_err(|error| Fail::of_io("cannot sync the store's folder", &error))?;
        self.measure_all()
    }

    fn measure(&mut self) -> Result<(), Fail> {
        let Some(generation) = self.manifest.tails.keys().next_back() else { return Ok(()) };
        let name = tail::file_name(*generation);
        let bytes =
            self.disk.bytes(&name).map_err(|error| Fail::of_io(&format!("cannot measure {name}"), &error))?;
        self.sizes.insert(*generation, bytes);
        Ok(())
    }

    fn measure_all(&mut self) -> Result<(), Fail> {
        for generation in self.manifest.tails.keys() {
            let name = tail::file_name(*generation);
            let bytes = self
                .disk
                .bytes(&name)
                .map_err(|error| Fail::of_io(&format!("cannot measure {name}"), &error))?;
            self.sizes.insert(*generation, bytes);
        }
        Ok(())
    }

    fn free_reserve(&mut self) -> Result<(), Fail> {
        if self.reserve {
            self.reserve = false;
            self.disk.remove(RESERVE_NAME).map_err(|error| Fail::of_io("cannot free the reserve", &error))?;
        }
        Ok(())
    }

    /// Makes the reserve unless it is there. Without room for it the store goes on, and tries again at the next expiry.
    fn keep_reserve(&mut self) -> Result<(), Fail> {
        let disk = &self.disk;
        let make = || -> std::io::Result<()> {
            if disk.list()?.iter().any(|name| name == RESERVE_NAME)
                && disk.bytes(RESERVE_NAME)? >= RESERVE_BYTES as u64
            {
                return Ok(());
            }
            let file = disk.open(RESERVE_NAME, true)?;
            file.write(0, &vec![0xa5; RESERVE_BYTES])?;
            file.sync_data()?;
            file.close()?;
            disk.sync_folder()
        };
        match make().map_err(|error| Fail::of_io("cannot make the reserve", &error)) {
            Ok(()) => self.reserve = true,
            Err(Fail::Full(text)) => {
                warn!(text, "no room for the reserve file");
                self.reserve = true;
                self.free_reserve()?;
            }
            Err(other) => return Err(other),
        }
        Ok(())
    }
}

/// Hands blocks on; the first fault ends it.
struct Learner<F>(F);

impl<F: FnMut(&Block) -> Option<i64>> Visitor for Learner<F> {
    fn block(&mut self, _group: u64, _index: usize, block: &Block) -> Option<i64> {
        (self.0)(block)
    }

    fn fault(&mut self, fault: Fail) -> Result<(), Fail> {
        Err(fault)
    }
}
