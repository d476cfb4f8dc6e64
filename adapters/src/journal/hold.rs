//! One process a book: a frozen process that wakes up must not send what another one has settled and the target has forgotten.

use std::{
    collections::HashMap,
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
    sync::{Arc, LazyLock, Weak},
};

use parking_lot::Mutex;

use crate::sink::Misfit;

/// The folder is this process's until the last of these is dropped, or the process ends.
#[derive(Debug)]
pub(crate) struct Hold {
    _file: File,
    /// Routes of which what was left open has been settled: for as long as a session lives that knows it.
    pub(super) settled: tokio::sync::Mutex<HashMap<String, Weak<()>>>,
}

/// Those of this process, whose sinks and sessions share them.
static HELD: LazyLock<Mutex<HashMap<PathBuf, Weak<Hold>>>> = LazyLock::new(Mutex::default);

impl Hold {
    /// Makes the folder if it is missing.
    pub(crate) fn take(folder: &Path) -> Result<Arc<Self>, Misfit> {
        let refused = |error: std::io::Error| Misfit {
            what: format!("the journal's folder {} cannot be used: {error}", folder.display()),
            remedy: "name a folder on a local disk that this process may write to".to_owned(),
        };
        fs::create_dir_all(folder).map_err(refused)?;
        let name = folder.canonicalize().map_err(refused)?;
        let mut held = HELD.lock();
        if let Some(hold) = held.get(&name).and_then(Weak::upgrade) {
            return Ok(hold);
        }
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(name.join("lock"))
            .map_err(refused)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Misfit {
                what: format!("the journal's folder {} is held by another process", folder.display()),
                remedy:
                    "end that process (a frozen one too), or give this one a folder and a route of its own"
                        .to_owned(),
            },
            TryLockError::Error(error) => refused(error),
        })?;
        let hold = Arc::new(Self { _file: file, settled: tokio::sync::Mutex::default() });
        held.retain(|_, hold| hold.strong_count() > 0);
        held.insert(name, Arc::downgrade(&hold));
        Ok(hold)
    }
}
