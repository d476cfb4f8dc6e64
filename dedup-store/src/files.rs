//! The files of one store and their order of publication (P16): [`Files`]. One thread at a time.
//!
//! A file counts only once the manifest names it, and is unlinked only once the manifest does not: new tail
//! or run synced, folder synced, manifest committed, old tail unlinked. Whatever the manifest does not name
//! is removed at open.

use std::{
    collections::{BTreeMap, HashSet},
    io::ErrorKind,
    sync::Arc,
};

use tracing::warn;

use crate::{
    block::Block,
    disk::{self, Disk, Fail},
    filter::Filter,
    fingerprint::{Fingerprint, Hasher, Identity},
    manifest::{Manifest, Part},
    run::{self, Run, RunMeta},
    state::Tombstones,
    tail::{self, Group, Lost, Standing, Tail, Visitor},
};

/// Given back to the file system when it is full, so that expiry can commit.
pub(crate) const RESERVE_NAME: &str = "reserve";
const RESERVE_BYTES: usize = 1 << 20;
/// A slot is closed at a part of the disk budget, so that expiry can drop files before the budget is used up.
const ROLLS_PER_BUDGET: u64 = 16;
const MIN_ROLL_BYTES: u64 = 256 << 10;
const MAX_ROLL_BYTES: u64 = 2 << 30;

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
    /// As of the last durable group; after [`Files::replay`].
    standing: Standing,
    last_group: u64,
    /// A tail whose facts are all old is given up at a quarter of it.
    roll_bytes: u64,
    /// Bytes of each part's files.
    sizes: BTreeMap<u64, u64>,
    reserve: bool,
}

/// Bytes of blocks at which a slot is closed, within this disk budget.
pub(crate) fn roll_bytes(max_disk_bytes: u64) -> u64 {
    (max_disk_bytes / ROLLS_PER_BUDGET).clamp(MIN_ROLL_BYTES, MAX_ROLL_BYTES)
}

/// One file of facts: a tail, or a run with its filter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileStats {
    /// Its name in the store's folder.
    pub file: String,
    /// Bytes that it takes up.
    pub bytes: u64,
    /// Nothing is added to it any more.
    pub closed: bool,
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
                if let Some(name) = names.iter().find(|name| generation_of(name).is_some()) {
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
        for (generation, part) in &manifest.parts {
            let name = part.file_name(*generation);
            if !names.contains(&name) {
                return Err(Fail::Unusable(format!(
                    "store {folder} lacks {name}, which its manifest names: it was removed. Restore it, or delete the \
                     folder; a Transactional sink rebuilds the store from its marks"
                )));
            }
        }
        for name in &names {
            match generation_of(name) {
                Some(generation) if !manifest.names(generation, name) => {
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
        if let (Some(hasher), Some(generation)) = (&files.hasher, files.manifest.parts.keys().next_back()) {
            let (tail, standing) = Tail::open(&*files.disk, hasher, *generation)?;
            files.last_group = tail.group();
            (files.current, files.standing) = (Current::Open(tail), standing);
        }
        files.keep_reserve()?;
        Ok(files)
    }

    /// Opens the runs, oldest first, each with its filter if that is sound.
    pub(crate) fn runs(&self, mut run: impl FnMut(Run, Option<Filter>)) -> Result<(), Fail> {
        let Some(hasher) = &self.hasher else { return Ok(()) };
        for (generation, part) in &self.manifest.parts {
            if let Part::Run(meta) = part {
                let opened = Run::open(&*self.disk, hasher, *generation, meta)?;
                let filter = run::load_filter(&*self.disk, hasher, &opened)?;
                run(opened, filter);
            }
        }
        Ok(())
    }

    /// Shows all tails to `reader`, oldest first.
    pub(crate) fn replay(&mut self, reader: &mut dyn Replay) -> Result<(), Fail> {
        let (Some(hasher), Current::Open(newest)) = (&self.hasher, &mut self.current) else { return Ok(()) };
        for (generation, part) in &self.manifest.parts {
            match part {
                Part::Run(_) => {}
                Part::Tail(sealed) => {
                    let (mut tail, standing) = Tail::open(&*self.disk, hasher, *generation)?;
                    reader.begin(*generation, standing.tombstones);
                    tail.replay(hasher, &mut Learner(reader))?;
                    // Told when it was sealed: facts that it takes away may be gone since.
                    tail.newest_ms = sealed.newest_ms;
                    tail.check_sealed(sealed)?;
                    tail.close()?;
                    reader.end(sealed.group);
                }
                Part::Open => {
                    reader.begin(*generation, self.standing.tombstones.clone());
                    newest.replay(hasher, &mut Learner(reader))?;
                    self.standing.tombstones = reader.tombstones();
                }
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

    /// Bytes of tails, runs and filters.
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.values().sum()
    }

    /// Bytes of the newest tail's blocks.
    pub(crate) fn tail_bytes(&self) -> u64 {
        match &self.current {
            Current::Open(tail) => tail.bytes,
            _ => 0,
        }
    }

    /// Number of the newest tail; 0 before the first bind.
    pub(crate) fn open_tail(&self) -> u64 {
        self.manifest.parts.keys().next_back().copied().unwrap_or(0)
    }

    pub(crate) fn stats(&self) -> Vec<FileStats> {
        let newest = match &self.current {
            Current::Open(tail) => tail.newest_ms,
            Current::Lost(lost) => lost.newest_ms,
            Current::Unbound => None,
        };
        let parts = self.manifest.parts.iter();
        parts
            .map(|(generation, part)| FileStats {
                file: part.file_name(*generation),
                bytes: self.sizes.get(generation).copied().unwrap_or(0),
                closed: *part != Part::Open,
                newest_ms: part.newest_ms().unwrap_or(newest),
            })
            .collect()
    }

    /// Gives the store its identity and first tail.
    pub(crate) fn bind(&mut self, identity: &Identity) -> Result<(), Fail> {
        let hasher = Hasher::new(identity);
        let tail = Tail::make(&*self.disk, &hasher, 1, self.last_group, &self.standing)?;
        let mut manifest = self.manifest.clone();
        manifest.identity = Some(identity.clone());
        manifest.parts.insert(tail.generation, Part::Open);
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
        if self.newest()?.group() >= group.number {
            // An earlier attempt failed, and is in nevertheless.
            self.newest()?.took(group);
        } else {
            if group.begins && self.open_tail() < group.generation {
                self.roll(group.generation)?;
            }
            let committed = match &mut self.current {
                Current::Open(tail) => tail.commit(group, &self.standing),
                _ => Err(Fail::Io("the tail is not open".to_owned())),
            };
            if let Err(fail) = committed {
                self.lose();
                return Err(fail);
            }
        }
        self.last_group = group.number;
        self.standing.apply(group);
        self.measure()
    }

    /// Drops the parts whose facts all lie below `floor_ms`; answers with the files to be removed, which
    /// nothing needs any more. `pressed`: the file system is full, so the floor is made durable here and the
    /// reserve is given back first. A newest tail without any other fact is closed, so that it goes as well:
    /// then [`Files::open_tail`] has moved on.
    pub(crate) fn forget(&mut self, floor_ms: i64, pressed: bool) -> Result<Vec<String>, Fail> {
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
            self.roll(self.open_tail() + 1)?;
        }
        let old = |part: &Part| {
            part.newest_ms().is_some_and(|newest| newest.is_none_or(|newest| newest < floor_ms))
        };
        let raises = floor_ms > self.manifest.floor_ms.max(self.standing.retire_ms);
        let mut gone = Vec::new();
        if self.manifest.parts.values().any(old) || pressed && raises {
            let mut manifest = self.manifest.clone();
            manifest.floor_ms = manifest.floor_ms.max(floor_ms);
            manifest.parts.retain(|_, part| !old(part));
            gone = self.replace(manifest)?;
        }
        // Not before the parts that hold their keys in vain are gone.
        self.standing.tombstones.retain(|_, tombstone| tombstone.event_ms >= floor_ms);
        Ok(gone)
    }

    /// The run of a slot takes the place of its tail; answers with the files to be removed.
    pub(crate) fn publish(&mut self, generation: u64, meta: RunMeta) -> Result<Vec<String>, Fail> {
        let mut manifest = self.manifest.clone();
        manifest.parts.insert(generation, Part::Run(meta));
        self.replace(manifest)
    }

    /// Makes a manifest that names fewer files durable; answers with those that it names no more.
    fn replace(&mut self, manifest: Manifest) -> Result<Vec<String>, Fail> {
        manifest.replace(&*self.disk)?;
        let old = std::mem::replace(&mut self.manifest, manifest);
        let mut gone = Vec::new();
        for (generation, part) in old.parts {
            if self.manifest.parts.get(&generation) != Some(&part) {
                gone.extend(part.file_names(generation));
            }
        }
        self.sizes.retain(|generation, _| self.manifest.parts.contains_key(generation));
        self.measure_all()?;
        Ok(gone)
    }

    /// Drops all but the identity; these intents stay.
    pub(crate) fn discard(&mut self, intents: HashSet<Fingerprint>) -> Result<Vec<String>, Fail> {
        let Some(hasher) = &self.hasher else { return Ok(Vec::new()) };
        let generation = self.open_tail() + 1;
        let standing = Standing { intents, ..Standing::default() };
        let tail = Tail::make(&*self.disk, hasher, generation, self.last_group, &standing)?;
        let mut manifest = self.manifest.clone();
        manifest.floor_ms = i64::MIN;
        manifest.parts = BTreeMap::from([(generation, Part::Open)]);
        let gone = self.replace(manifest)?;
        (self.standing, self.current) = (standing, Current::Open(tail));
        Ok(gone)
    }

    /// The discarded group's number is used up.
    pub(crate) fn skip_to(&mut self, group: u64) {
        self.last_group = self.last_group.max(group);
    }

    /// Closes the current tail and goes on in a new one, which starts with all that stands.
    fn roll(&mut self, generation: u64) -> Result<(), Fail> {
        let (Some(hasher), Current::Open(old)) = (&self.hasher, &self.current) else { return Ok(()) };
        let fresh = Tail::make(&*self.disk, hasher, generation, self.last_group, &self.standing)?;
        let mut manifest = self.manifest.clone();
        manifest.parts.insert(old.generation, Part::Tail(old.sealed()));
        manifest.parts.insert(generation, Part::Open);
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

    fn newest(&mut self) -> Result<&mut Tail, Fail> {
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

    fn measure(&mut self) -> Result<(), Fail> {
        let Some((generation, part)) = self.manifest.parts.iter().next_back() else { return Ok(()) };
        let bytes = measured(&*self.disk, *generation, part)?;
        self.sizes.insert(*generation, bytes);
        Ok(())
    }

    fn measure_all(&mut self) -> Result<(), Fail> {
        for (generation, part) in &self.manifest.parts {
            let bytes = measured(&*self.disk, *generation, part)?;
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

/// The generation in the name of a tail, a run or a filter.
pub(crate) fn generation_of(name: &str) -> Option<u64> {
    tail::generation_of(name).or_else(|| run::generation_of(name))
}

fn measured(disk: &dyn Disk, generation: u64, part: &Part) -> Result<u64, Fail> {
    let mut bytes = 0;
    for name in part.file_names(generation) {
        bytes += match disk.bytes(&name) {
            // A filter may be missing.
            Err(error) if error.kind() == ErrorKind::NotFound => 0,
            other => other.map_err(|error| Fail::of_io(&format!("cannot measure {name}"), &error))?,
        };
    }
    Ok(bytes)
}

/// Removes files that the manifest names no more.
pub(crate) fn remove(disk: &dyn Disk, names: &[String]) -> Result<(), Fail> {
    for name in names {
        disk.remove(name).map_err(|error| Fail::of_io(&format!("cannot remove {name}"), &error))?;
    }
    if names.is_empty() {
        return Ok(());
    }
    disk.sync_folder().map_err(|error| Fail::of_io("cannot sync the store's folder", &error))
}

impl Part {
    /// Name of the file with its facts.
    pub(crate) fn file_name(&self, generation: u64) -> String {
        match self {
            Part::Open | Part::Tail(_) => tail::file_name(generation),
            Part::Run(_) => run::file_name(generation),
        }
    }

    /// Names of all its files.
    fn file_names(&self, generation: u64) -> Vec<String> {
        let filter = matches!(self, Part::Run(_)).then(|| run::filter_name(generation));
        [self.file_name(generation)].into_iter().chain(filter).collect()
    }

    /// Newest event time in it, ms: none within without facts. None for the open one, which does not know
    /// yet.
    fn newest_ms(&self) -> Option<Option<i64>> {
        match self {
            Part::Open => None,
            Part::Tail(sealed) => Some(sealed.newest_ms),
            Part::Run(meta) => Some(Some(meta.newest_ms)),
        }
    }
}

impl Manifest {
    /// Whether a file of this generation counts.
    pub(crate) fn names(&self, generation: u64, name: &str) -> bool {
        self.parts
            .get(&generation)
            .is_some_and(|part| part.file_names(generation).iter().any(|counts| counts == name))
    }
}

/// Sees the tails at open.
pub(crate) trait Replay {
    /// A tail follows, at whose start these keys were taken back.
    fn begin(&mut self, generation: u64, tombstones: Tombstones);
    /// Answers with the newest event time that the block decides over, ms.
    fn block(&mut self, group: u64, block: &Block) -> Result<Option<i64>, Fail>;
    /// Nothing is added to the tail any more; its last group.
    fn end(&mut self, group: u64);
    /// The keys that are taken back by now.
    fn tombstones(&self) -> Tombstones;
}

/// Hands blocks on; the first fault ends it.
struct Learner<'a>(&'a mut dyn Replay);

impl Visitor for Learner<'_> {
    fn block(&mut self, group: u64, _index: usize, block: &Block) -> Result<Option<i64>, Fail> {
        self.0.block(group, block)
    }

    fn fault(&mut self, fault: Fail) -> Result<(), Fail> {
        Err(fault)
    }
}
