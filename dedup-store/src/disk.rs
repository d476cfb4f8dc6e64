//! The edge to the file system: [`Disk`] is all that the store asks of it, so that tests can stand in for it and fail it.

use std::{
    fmt,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, ErrorKind, Read, Write},
    ops::Bound,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;
use redb::{BackendError, Builder, Database, StorageBackend, backends::FileBackend};

use crate::error::StoreError;

/// Held by an open store; holds its process id.
const LOCK_NAME: &str = "lock";

/// A folder of files.
pub(crate) trait Disk: fmt::Debug + Send + Sync {
    /// The folder, for messages.
    fn folder(&self) -> &Path;
    /// Names of the files.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Opens a file, or makes an empty one if `make` says so.
    fn open(&self, name: &str, make: bool) -> io::Result<Box<dyn StorageBackend>>;
    /// Renames a file; durable after `sync_folder`.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file; durable after `sync_folder`. One that is not there counts as removed.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes the folder's names durable.
    fn sync_folder(&self) -> io::Result<()>;
    /// Bytes that a file takes up.
    fn bytes(&self, name: &str) -> io::Result<u64>;
}

/// A real folder.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
}

impl Folder {
    pub(crate) fn new(path: &Path) -> Self {
        Folder { path: path.to_owned() }
    }
}

impl Disk for Folder {
    fn folder(&self) -> &Path {
        &self.path
    }

    fn list(&self) -> io::Result<Vec<String>> {
        fs::read_dir(&self.path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn open(&self, name: &str, make: bool) -> io::Result<Box<dyn StorageBackend>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(make)
            .truncate(false)
            .open(self.path.join(name))?;
        let backend = FileBackend::new(file).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Box::new(backend))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn sync_folder(&self) -> io::Result<()> {
        if cfg!(unix) { File::open(&self.path)?.sync_all() } else { Ok(()) }
    }

    fn bytes(&self, name: &str) -> io::Result<u64> {
        let metadata = fs::metadata(self.path.join(name))?;
        // Files are sparse: what counts is what was written.
        #[cfg(unix)]
        let bytes = std::os::unix::fs::MetadataExt::blocks(&metadata) * 512;
        #[cfg(not(unix))]
        let bytes = metadata.len();
        Ok(bytes)
    }
}

/// Takes the folder's exclusive lock; it is held until the file is dropped.
pub(crate) fn lock(folder: &Path) -> Result<File, StoreError> {
    let path = folder.join(LOCK_NAME);
    let failed = |error: io::Error| StoreError::Io(format!("cannot lock {}: {error}", path.display()));
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let read = file.read_to_string(&mut holder);
            let holder = match holder.trim() {
                pid if read.is_ok() && !pid.is_empty() => pid.to_owned(),
                _ => "(unknown)".to_owned(),
            };
            return Err(StoreError::Locked { folder: folder.to_owned(), holder });
        }
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(failed)?;
    Ok(file)
}

/// Whether a name is the lock's.
pub(crate) fn is_lock(name: &str) -> bool {
    name == LOCK_NAME
}

/// What a disk operation came to when it failed.
#[derive(Debug, Clone)]
pub(crate) enum Fail {
    /// No room; nothing is lost, and it may be tried again.
    Full(String),
    /// Fail-stop.
    Io(String),
    /// The file is not what it should be.
    Unusable(String),
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fail::Full(text) | Fail::Io(text) | Fail::Unusable(text) => f.write_str(text),
        }
    }
}

impl Fail {
    pub(crate) fn of_io(what: &str, error: &io::Error) -> Self {
        let text = format!("{what}: {error}");
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Fail::Full(text),
            ErrorKind::UnexpectedEof => Fail::Unusable(format!("{text}: the file was cut")),
            _ => Fail::Io(text),
        }
    }
}

/// A redb database on a [`Disk`]. Remembers the first IO error below redb, which redb itself reports once and then hides.
pub(crate) struct Container {
    pub(crate) name: String,
    pub(crate) db: Database,
    first: Arc<Mutex<Option<io::Error>>>,
    path: PathBuf,
}

impl fmt::Debug for Container {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Container").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Container {
    /// Opens `name`, checking every page; makes it first if `make` says so.
    pub(crate) fn open(disk: &dyn Disk, name: &str, make: bool, cache_bytes: usize) -> Result<Self, Fail> {
        let path = disk.folder().join(name);
        let backend = disk.open(name, make).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                Fail::Unusable(format!("{} is missing: it was removed or renamed", path.display()))
            }
            _ => Fail::of_io(&format!("cannot open {}", path.display()), &error),
        })?;
        let first = Arc::new(Mutex::new(None));
        let empty =
            backend.len().map_err(|error| Fail::of_io(&format!("cannot read {}", path.display()), &error))?
                == 0;
        if empty && !make {
            return Err(Fail::Unusable(format!("{} is empty: it was cut", path.display())));
        }
        let watched = Watched { backend, first: Arc::clone(&first) };
        let opened = Builder::new()
            .set_cache_size(cache_bytes)
            .set_check_integrity_on_open(!empty)
            .create_with_backend(watched);
        match opened {
            Ok(db) => Ok(Container { name: name.to_owned(), db, first, path }),
            Err(error) => Err(explain(&path, &first, error.into())),
        }
    }

    /// What an error of this database's means.
    pub(crate) fn fail(&self, error: impl Into<redb::Error>) -> Fail {
        explain(&self.path, &self.first, error.into())
    }

    pub(crate) fn unusable(&self, what: impl fmt::Display) -> Fail {
        Fail::Unusable(format!("{}: {what}", self.path.display()))
    }

    /// Closes it cleanly, so that the next open needs no repair.
    pub(crate) fn close(self) -> Result<(), Fail> {
        let Container { db, first, path, .. } = self;
        db.close().map_err(|error| explain(&path, &first, error.into()))
    }
}

fn explain(path: &Path, first: &Mutex<Option<io::Error>>, error: redb::Error) -> Fail {
    let what = format!("cannot use {}", path.display());
    if let Some(first) = &*first.lock() {
        return Fail::of_io(&what, first);
    }
    match error {
        redb::Error::Io(error) if error.kind() == ErrorKind::InvalidData => {
            Fail::Unusable(format!("{} is damaged, or no redb database: {error}", path.display()))
        }
        redb::Error::Io(error) => Fail::of_io(&what, &error),
        redb::Error::PreviousIo => Fail::Io(format!("{what}: an earlier IO error")),
        other => Fail::Unusable(format!("{} is damaged: {other}", path.display())),
    }
}

/// Passes all on, and keeps the first IO error.
struct Watched {
    backend: Box<dyn StorageBackend>,
    first: Arc<Mutex<Option<io::Error>>>,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.backend.fmt(f)
    }
}

impl Watched {
    fn watch<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|error| {
            let copy = match error.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::new(error.kind(), error.to_string()),
            };
            self.first.lock().get_or_insert(copy);
        })
    }
}

impl StorageBackend for Watched {
    fn len(&self) -> io::Result<u64> {
        self.watch(self.backend.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.watch(self.backend.read(offset, out))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.watch(self.backend.set_len(len))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.watch(self.backend.sync_data())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.watch(self.backend.write(offset, data))
    }

    fn close(&self) -> io::Result<()> {
        self.backend.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.backend.try_lock_range(start, end)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.backend.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.backend.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.backend.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.backend.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.backend.query_lock_range(start, end)
    }
}
