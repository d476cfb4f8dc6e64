//! The one database instance of a file that this process has.
//!
//! DuckDB keeps other processes out by a lock on the file, which does not keep out the process that has it: two instances over one
//! file would each write as if they were alone. So all connections of this process come from here.
//!
//! Nothing else may open the file: closing it anywhere in this process gives the lock away.

use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use duckdb::{Config, Connection};
use parking_lot::{Mutex, MutexGuard};

use crate::bookkeeping::file_id::FileId;

/// Instances that have users.
static INSTANCES: LazyLock<Mutex<HashMap<FileId, Entry>>> = LazyLock::new(Mutex::default);

struct Entry {
    instance: Arc<Instance>,
    users: usize,
}

struct Instance {
    /// Connections are made from it; it is not used otherwise. None once it was closed.
    root: Mutex<Option<Connection>>,
    /// Held by who writes.
    writer: Mutex<()>,
    /// DuckDB has given the instance up.
    broken: AtomicBool,
}

/// One user of the instance. Its connections must be dropped before it.
pub(super) struct Handle {
    instance: Arc<Instance>,
    file: FileId,
}

/// Why there is no instance.
#[derive(Debug)]
pub(super) enum OpenError {
    /// DuckDB says so.
    Duckdb(duckdb::Error),
    /// The system says so.
    Io(io::Error),
    /// The instance that there is has failed, and somebody still uses it.
    Broken,
}

impl OpenError {
    /// For those who know DuckDB's errors.
    pub(super) fn into_duckdb(self) -> duckdb::Error {
        let text = match self {
            Self::Duckdb(error) => return error,
            Self::Io(error) => format!("IO Error: {error}"),
            Self::Broken => "DuckDB has failed, and others have yet to let go of the file".to_owned(),
        };
        duckdb::Error::ToSqlConversionFailure(text.into())
    }
}

impl From<duckdb::Error> for OpenError {
    fn from(error: duckdb::Error) -> Self {
        Self::Duckdb(error)
    }
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Handle {
    /// Of the file that has this path now; it is made if it is missing.
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        // Also held while an instance is closed: its file is not opened again before that is done.
        let mut instances = INSTANCES.lock();
        let known = match FileId::of(path) {
            Ok(file) => Some(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error.into()),
        };
        if let Some(file) = known
            && let Some(entry) = instances.get_mut(&file)
        {
            if entry.instance.broken.load(Ordering::Acquire) {
                return Err(OpenError::Broken);
            }
            entry.users += 1;
            return Ok(Self { instance: entry.instance.clone(), file });
        }
        // Nothing is fetched from elsewhere because a statement names it.
        let config = Config::default().with("autoinstall_known_extensions", "false")?;
        let root = Connection::open_with_flags(path, config)?;
        if known.is_none() {
            sync_folder(path)?;
        }
        let file = FileId::of(path)?;
        let instance = Arc::new(Instance {
            root: Mutex::new(Some(root)),
            writer: Mutex::new(()),
            broken: AtomicBool::new(false),
        });
        instances.insert(file, Entry { instance: instance.clone(), users: 1 });
        Ok(Self { instance, file })
    }

    /// Which file it is.
    pub(super) fn file(&self) -> FileId {
        self.file
    }

    /// A new connection.
    pub(super) fn connect(&self) -> Result<Connection, duckdb::Error> {
        let root = self.instance.root.lock();
        root.as_ref().expect("an instance that has a user is not closed").try_clone()
    }

    /// Waits until nobody else writes; none if that takes longer than `patience`.
    pub(super) fn writer(&self, patience: Duration) -> Option<MutexGuard<'_, ()>> {
        self.instance.writer.try_lock_for(patience)
    }

    /// DuckDB has given the instance up: it is opened again once all have let go of it.
    pub(super) fn is_broken(&self) -> bool {
        self.instance.broken.load(Ordering::Acquire)
    }

    /// See [`Handle::is_broken`].
    pub(super) fn mark_broken(&self) {
        self.instance.broken.store(true, Ordering::Release);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut instances = INSTANCES.lock();
        let Some(entry) = instances.get_mut(&self.file) else { return };
        entry.users -= 1;
        if entry.users == 0 {
            drop(self.instance.root.lock().take());
            instances.remove(&self.file);
        }
    }
}

#[cfg(test)]
pub(super) fn is_open(file: FileId) -> bool {
    INSTANCES.lock().contains_key(&file)
}

/// A new file stays after a power cut.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    std::fs::File::open(folder)?.sync_all()
}
