//! The files sink: `Transactional`. Rows go, each as the JSON it came as, into files of one JSON text a line (NDJSON) in one folder.
//!
//! | file | holds |
//! | --- | --- |
//! | `probe.rs` | start-up checks |
//! | `encode.rs` | what a row may be, and a payload as a line. Pure |
//! | `book.rs` | the list of files in the bookkeeping: which are open, finished, published |
//! | `parts.rs` | the rows of a batch on their way into a file; the files themselves |
//!
//! # What commits a batch
//! Below the folder there is one of ours, `.oncegate`, with a SQLite file (`book.db`) and the files that are not finished yet. The book
//! holds the same tables as the SQLite sink's file, and one more, `oncegate_files`, which says of each file how many of its bytes count.
//! A batch is one transaction of the book: fence; its rows are appended to the route's open file behind the bytes that count, and
//! synced; marks, dead letters, positions; the new number of bytes; COMMIT. The COMMIT is the one atomic act: before it the appended
//! bytes count for nothing and the next writer cuts them off; after it they are durable, with all that belongs to them. A log of lines
//! beside the data files would have had to bring its own fence, checksums and compaction to do the same.
//!
//! A file that is large, long or old enough is marked as finished by such a transaction. Only then is it cut to the bytes that count,
//! synced and renamed into the folder, which is synced too. That is done again until the book says that it was done, by whoever opens
//! the book next: the rename can be late, but never early, and never wrong. So a reader of the folder sees only files that do not
//! change any more, of rows that are committed.
//!
//! # Several processes
//! Everything is done with the book's write lock held: appending, cutting, renaming. A process that was frozen and wakes either still
//! has the lock, and nobody took over meanwhile, or must get it first, and then its fence fails before it touches a file (P4).

mod book;
mod encode;
mod parts;
mod probe;
#[cfg(test)]
mod tests;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;

use crate::{
    sink::{Encode, Guarantee, Misfit, Mode, Session, Sink},
    sqlite::{SqliteConfig, session::SqliteSession},
};

/// What names a folder and how files are made in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FilesConfig {
    /// Must exist, on a local disk.
    pub folder: PathBuf,
    /// Only `Insert` fits.
    pub mode: Mode,
    /// A file of so many bytes is finished.
    pub roll_bytes: u64,
    /// A file of so many rows is finished.
    pub roll_rows: u64,
    /// A file so old is finished.
    pub roll_after: Duration,
    /// How long to wait for another writer of the folder.
    pub busy_timeout: Duration,
}

impl FilesConfig {
    /// In `folder`: files of up to 128 MiB, a million rows, a minute (a batch is never divided); waits up to 5 s for another writer.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            mode: Mode::Insert,
            roll_bytes: 128 << 20,
            roll_rows: 1_000_000,
            roll_after: Duration::from_secs(60),
            busy_timeout: Duration::from_secs(5),
        }
    }

    /// What is not for readers.
    fn private(&self) -> PathBuf {
        self.folder.join(".oncegate")
    }

    fn book(&self) -> SqliteConfig {
        SqliteConfig {
            busy_timeout: self.busy_timeout,
            ..SqliteConfig::new(self.private().join("book.db"), "oncegate_files")
        }
    }
}

/// A folder as a sink.
#[derive(Clone, Debug)]
pub struct FilesSink {
    config: Arc<FilesConfig>,
}

impl FilesSink {
    /// Does not look at the folder yet: `probe` does.
    pub fn new(config: FilesConfig) -> Self {
        Self { config: Arc::new(config) }
    }
}

#[async_trait]
impl Sink for FilesSink {
    fn guarantee(&self) -> Guarantee {
        Guarantee::Transactional
    }

    fn mode(&self) -> Mode {
        self.config.mode
    }

    fn row_key(&self) -> &[String] {
        &[]
    }

    fn version(&self) -> Option<&str> {
        None
    }

    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>> {
        let config = self.config.clone();
        tokio::task::spawn_blocking(move || probe::probe(&config)).await.unwrap_or_else(|ended| {
            Err(vec![Misfit {
                what: format!("the check of the folder did not end: {ended}"),
                remedy: "report this as a bug".to_owned(),
            }])
        })?;
        Ok(Arc::new(encode::Encoder))
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        let target = parts::Folder { config: self.config.clone(), crash: parts::Crash::default() };
        Box::new(SqliteSession::new(Arc::new(self.config.book()), Arc::new(target), route, owner))
    }
}

/// Makes what was done in a folder (files made, renamed, removed) durable.
fn sync_folder(path: &Path) -> std::io::Result<()> {
    std::fs::File::open(path)?.sync_all()
}
