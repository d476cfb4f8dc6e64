//! A disk in memory that forgets what was not synced, fails where it is told to, and can be full.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    io::{self, ErrorKind},
    path::Path,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use redb::StorageBackend;
use xxhash_rust::xxh3::Xxh3;

use crate::disk::Disk;

const SECTOR: usize = 512;
const PAGE: usize = 4096;

/// What happens at the operation that is counted down to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Trouble {
    /// The power goes: it may have happened or not, and nothing happens after it.
    Cut,
    /// It fails, this once.
    Glitch,
    /// There is no room for it, this once.
    NoRoom,
}

/// A file's bytes, in pages that copies share.
#[derive(Default, Clone)]
struct Bytes {
    /// None: zeros.
    pages: Vec<Option<Arc<[u8; PAGE]>>>,
    len: usize,
}

impl Bytes {
    fn resize(&mut self, len: usize) {
        if len < self.len && !len.is_multiple_of(PAGE) {
            // What is cut off is zeros if the file grows again.
            self.put_within(len, &[0; PAGE][len % PAGE..]);
        }
        self.pages.resize(len.div_ceil(PAGE), None);
        self.len = len;
    }

    fn put(&mut self, at: usize, data: &[u8]) {
        if self.len < at + data.len() {
            self.resize(at + data.len());
        }
        self.put_within(at, data);
    }

    fn put_within(&mut self, mut at: usize, mut data: &[u8]) {
        while !data.is_empty() {
            let (here, rest) = data.split_at(data.len().min(PAGE - at % PAGE));
            let page = self.pages[at / PAGE].get_or_insert_with(|| Arc::new([0; PAGE]));
            Arc::make_mut(page)[at % PAGE..][..here.len()].copy_from_slice(here);
            (at, data) = (at + here.len(), rest);
        }
    }

    fn get(&self, mut at: usize, mut out: &mut [u8]) -> io::Result<()> {
        if at + out.len() > self.len {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        while !out.is_empty() {
            let length = out.len().min(PAGE - at % PAGE);
            let (here, rest) = out.split_at_mut(length);
            match &self.pages[at / PAGE] {
                Some(page) => here.copy_from_slice(&page[at % PAGE..][..length]),
                None => here.fill(0),
            }
            (at, out) = (at + length, rest);
        }
        Ok(())
    }
}

#[derive(Clone)]
enum Change {
    Write(usize, Arc<[u8]>),
    Length(usize),
}

#[derive(Clone)]
enum NameChange {
    Make(String, u64),
    Rename(String, String),
    Remove(String),
}

#[derive(Default, Clone)]
struct Content {
    live: Bytes,
    durable: Bytes,
    unsynced: Vec<Change>,
}

/// A change that the disk is at.
enum Doing<'a> {
    Name(&'a NameChange),
    File(u64, &'a Change),
    Sync,
}

/// Is handed the disk as it would be if the power went now.
type Watcher = Box<dyn FnMut(FaultyDisk) + Send>;

#[derive(Default)]
struct Inner {
    contents: HashMap<u64, Content>,
    names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    unsynced_names: Vec<NameChange>,
    operations: u64,
    trouble: Vec<(u64, Trouble)>,
    dead: bool,
    /// Bytes that fit.
    room: Option<u64>,
    /// Reads of each file, by its name when it was opened.
    reads: BTreeMap<String, u64>,
    refused: u64,
    /// Changes of files whose names start so wait.
    stalled: Option<String>,
    stalls_reads: bool,
    waiting: bool,
    /// Run reads until one fails.
    read_glitch: Option<u64>,
    watcher: Option<Watcher>,
}

/// What is left of unsynced changes after a crash.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Survival {
    Nothing,
    Everything,
    /// Each change for itself, writes also in part, by this seed.
    Some(u64),
}

#[derive(Clone, Default)]
pub(crate) struct FaultyDisk(Arc<Mutex<Inner>>);

impl fmt::Debug for FaultyDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultyDisk")
    }
}

impl FaultyDisk {
    /// Changes so far: writes, lengths, syncs, names.
    pub(crate) fn operations(&self) -> u64 {
        self.0.lock().operations
    }

    /// The `operation`th change from the start meets `trouble`.
    pub(crate) fn trouble_at(&self, operation: u64, trouble: Trouble) {
        self.0.lock().trouble.push((operation, trouble));
    }

    /// No trouble is to come any more.
    #[cfg(feature = "shuttle")]
    pub(crate) fn calm(&self) {
        let mut inner = self.0.lock();
        inner.trouble.clear();
        inner.read_glitch = None;
    }

    /// Of the reads of runs, one after so many fails.
    #[cfg(feature = "shuttle")]
    pub(crate) fn glitch_at_run_read(&self, reads: u64) {
        self.0.lock().read_glitch = Some(reads);
    }

    /// At each change from now on, `watcher` is told what the power would leave if it went there.
    pub(crate) fn watch(&self, watcher: Watcher) {
        self.0.lock().watcher = Some(watcher);
    }

    /// Tells disks of different content apart.
    pub(crate) fn content_hash(&self) -> u128 {
        let inner = self.0.lock();
        let mut hash = Xxh3::new();
        for (name, id) in &inner.names {
            let bytes = &inner.contents[id].live;
            hash.update(name.as_bytes());
            hash.update(&bytes.len.to_le_bytes());
            for (at, page) in bytes.pages.iter().enumerate() {
                if let Some(page) = page {
                    hash.update(&at.to_le_bytes());
                    hash.update(&**page);
                }
            }
        }
        hash.digest128()
    }

    /// Writes that were refused for lack of room.
    pub(crate) fn refused(&self) -> u64 {
        self.0.lock().refused
    }

    /// Reads of files whose names start so.
    pub(crate) fn reads(&self, start: &str) -> u64 {
        let inner = self.0.lock();
        inner.reads.iter().filter(|(name, _)| name.starts_with(start)).map(|(_, reads)| reads).sum()
    }

    /// Changes of files whose names start so wait from now on, until this is told otherwise.
    pub(crate) fn stall(&self, start: Option<&str>) {
        let mut inner = self.0.lock();
        (inner.stalled, inner.stalls_reads, inner.waiting) = (start.map(str::to_owned), false, false);
    }

    /// As [`FaultyDisk::stall`], and reads too.
    pub(crate) fn stall_reads(&self, start: &str) {
        self.stall(Some(start));
        self.0.lock().stalls_reads = true;
    }

    /// Whether a change waits.
    pub(crate) fn waiting(&self) -> bool {
        self.0.lock().waiting
    }

    fn wait(&self, name: &str) {
        // Not for ever, or a test that fails would not end.
        for _ in 0..10_000 {
            let mut inner = self.0.lock();
            match &inner.stalled {
                Some(start) if name.starts_with(start) => inner.waiting = true,
                _ => return,
            }
            drop(inner);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn set_room(&self, room: Option<u64>) {
        self.0.lock().room = room;
    }

    pub(crate) fn used(&self) -> u64 {
        self.0.lock().used()
    }

    /// What a crash now leaves, as a new disk.
    pub(crate) fn after_crash(&self, survival: Survival) -> FaultyDisk {
        let inner = self.0.lock();
        let mut random = SmallRng::seed_from_u64(if let Survival::Some(seed) = survival { seed } else { 0 });
        let mut survives = || match survival {
            Survival::Nothing => false,
            Survival::Everything => true,
            Survival::Some(_) => random.random(),
        };
        let mut names = inner.durable_names.clone();
        for change in &inner.unsynced_names {
            if survives() {
                change.apply(&mut names);
            }
        }
        let mut contents = HashMap::new();
        let mut ids: Vec<_> = inner.contents.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            let content = &inner.contents[&id];
            let mut bytes = content.durable.clone();
            for change in &content.unsynced {
                match change {
                    Change::Length(length) if survives() => bytes.resize(*length),
                    Change::Length(_) => {}
                    Change::Write(at, data) => {
                        let whole = survives();
                        for (index, sector) in data.chunks(SECTOR).enumerate() {
                            if whole || (matches!(survival, Survival::Some(_)) && survives()) {
                                bytes.put(at + index * SECTOR, sector);
                            }
                        }
                    }
                }
            }
            contents.insert(id, Content { live: bytes.clone(), durable: bytes, unsynced: Vec::new() });
        }
        FaultyDisk(Arc::new(Mutex::new(Inner {
            contents,
            durable_names: names.clone(),
            names,
            ..Inner::default()
        })))
    }
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<String, u64>) {
        match self {
            NameChange::Make(name, id) => drop(names.insert(name.clone(), *id)),
            NameChange::Rename(from, to) => {
                if let Some(id) = names.remove(from) {
                    names.insert(to.clone(), id);
                }
            }
            NameChange::Remove(name) => drop(names.remove(name)),
        }
    }
}

impl Inner {
    fn used(&self) -> u64 {
        self.names.values().map(|id| self.contents[id].live.len as u64).sum()
    }

    /// Counts a change; says whether it may happen. The one at which the power goes may have happened.
    fn step(&mut self, doing: &Doing<'_>) -> io::Result<()> {
        if self.dead {
            return Err(io::Error::other("the power is off"));
        }
        self.operations += 1;
        if let Some(mut watcher) = self.watcher.take() {
            let mut fork = Inner {
                contents: self.contents.clone(),
                names: self.names.clone(),
                durable_names: self.durable_names.clone(),
                unsynced_names: self.unsynced_names.clone(),
                dead: true,
                ..Inner::default()
            };
            fork.undecided(doing);
            watcher(FaultyDisk(Arc::new(Mutex::new(fork))));
            self.watcher = Some(watcher);
        }
        let trouble = self.trouble.iter().find(|(at, _)| *at == self.operations);
        match trouble.map(|(_, trouble)| *trouble) {
            Some(Trouble::Cut) => {
                self.dead = true;
                self.undecided(doing);
                Err(io::Error::other("the power went"))
            }
            Some(Trouble::Glitch) => Err(io::Error::other("a glitch")),
            Some(Trouble::NoRoom) => {
                self.refused += 1;
                Err(ErrorKind::StorageFull.into())
            }
            None => {
                self.undecided(doing);
                Ok(())
            }
        }
    }

    fn undecided(&mut self, doing: &Doing<'_>) {
        match doing {
            Doing::Name(change) => self.unsynced_names.push(NameChange::clone(change)),
            Doing::File(id, change) => {
                self.contents.get_mut(id).unwrap().unsynced.push(Change::clone(change));
            }
            Doing::Sync => {}
        }
    }

    fn grow(&mut self, id: u64, length: usize) -> io::Result<()> {
        let more = length.saturating_sub(self.contents[&id].live.len) as u64;
        if more > 0 && self.room.is_some_and(|room| self.used() + more > room) {
            self.refused += 1;
            return Err(ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    fn name(&mut self, change: NameChange) -> io::Result<()> {
        self.step(&Doing::Name(&change))?;
        change.apply(&mut self.names);
        Ok(())
    }
}

impl Disk for FaultyDisk {
    fn folder(&self) -> &Path {
        Path::new("/faulty")
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.0.lock().names.keys().cloned().collect())
    }

    fn open(&self, name: &str, make: bool) -> io::Result<Box<dyn StorageBackend>> {
        if make {
            self.wait(name);
        }
        let mut inner = self.0.lock();
        let id = match inner.names.get(name) {
            Some(id) => *id,
            None if make => {
                let id = inner.contents.len() as u64;
                inner.contents.insert(id, Content::default());
                inner.name(NameChange::Make(name.to_owned(), id))?;
                id
            }
            None => return Err(ErrorKind::NotFound.into()),
        };
        Ok(Box::new(FaultyFile { disk: self.clone(), id, name: name.to_owned() }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.lock().name(NameChange::Rename(from.to_owned(), to.to_owned()))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut inner = self.0.lock();
        if !inner.names.contains_key(name) {
            return Ok(());
        }
        inner.name(NameChange::Remove(name.to_owned()))
    }

    fn sync_folder(&self) -> io::Result<()> {
        let mut inner = self.0.lock();
        inner.step(&Doing::Sync)?;
        inner.durable_names = inner.names.clone();
        inner.unsynced_names.clear();
        Ok(())
    }

    fn bytes(&self, name: &str) -> io::Result<u64> {
        let inner = self.0.lock();
        let id = inner.names.get(name).ok_or(ErrorKind::NotFound)?;
        Ok(inner.contents[id].live.len as u64)
    }
}

#[derive(Debug)]
struct FaultyFile {
    disk: FaultyDisk,
    id: u64,
    name: String,
}

impl FaultyFile {
    fn change(&self, change: Change, length: usize) -> io::Result<()> {
        self.disk.wait(&self.name);
        let mut inner = self.disk.0.lock();
        inner.grow(self.id, length)?;
        inner.step(&Doing::File(self.id, &change))?;
        let content = inner.contents.get_mut(&self.id).unwrap();
        match change {
            Change::Write(at, data) => content.live.put(at, &data),
            Change::Length(length) => content.live.resize(length),
        }
        Ok(())
    }
}

impl StorageBackend for FaultyFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.0.lock().contents[&self.id].live.len as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if self.disk.0.lock().stalls_reads {
            self.disk.wait(&self.name);
        }
        let mut inner = self.disk.0.lock();
        *inner.reads.entry(self.name.clone()).or_default() += 1;
        if self.name.starts_with("run-")
            && let Some(left) = &mut inner.read_glitch
        {
            if *left == 0 {
                inner.read_glitch = None;
                return Err(io::Error::other("a glitch"));
            }
            *left -= 1;
        }
        inner.contents[&self.id].live.get(offset as usize, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(Change::Length(len as usize), len as usize)
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut inner = self.disk.0.lock();
        inner.step(&Doing::Sync)?;
        let content = inner.contents.get_mut(&self.id).unwrap();
        content.durable = content.live.clone();
        content.unsynced.clear();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(Change::Write(offset as usize, data.into()), offset as usize + data.len())
    }
}
