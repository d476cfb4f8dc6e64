//! The rows of a batch on their way into a file, and the files themselves: appended to, cut, renamed; always with the book's write
//! lock held.

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions},
    io::{self, Seek, SeekFrom, Write},
    path::Path,
    sync::Arc,
};

use rusqlite::Connection;
use tracing::{info, warn};

use super::{
    FilesConfig,
    book::{self, Entry},
    encode, sync_folder,
};
use crate::{
    sink::{RowOutcome, SinkError},
    sqlite::{
        deliver::begin,
        packed::Packed,
        rows::Stop,
        schema,
        target::{Rows, Target},
        worker::Fault,
    },
};

/// The folder, as the sessions of a sink share it.
pub(super) struct Folder {
    pub(super) config: Arc<FilesConfig>,
    pub(super) crash: Crash,
}

/// Asked before each change of a file: tests let the process end there, as far as files are concerned.
#[derive(Clone, Default)]
pub(super) struct Crash {
    /// So many changes are left.
    #[cfg(test)]
    pub(super) left: Option<Arc<std::sync::atomic::AtomicI64>>,
}

impl Crash {
    #[cfg_attr(not(test), expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "tests have more"))]
    fn point(&self) -> io::Result<()> {
        #[cfg(test)]
        if let Some(left) = &self.left
            && left.fetch_sub(1, std::sync::atomic::Ordering::SeqCst) <= 0
        {
            return Err(io::Error::other("a crash of the test's making"));
        }
        Ok(())
    }
}

impl Target for Folder {
    fn open(&self, connection: &mut Connection, route: &str) -> Result<Box<dyn Rows>, Fault> {
        let mut parts = Parts {
            config: self.config.clone(),
            crash: self.crash.clone(),
            route: route.to_owned(),
            lines: Vec::new(),
            rows: 0,
        };
        let doing = |error: rusqlite::Error| schema::fault("looking for what a crash left", &error);
        let transaction = begin(connection)?;
        book::make(&transaction).map_err(doing)?;
        remove_leftovers(&transaction, &self.config, &self.crash)?;
        parts.due(&transaction)?;
        transaction.commit().map_err(doing)?;
        parts.publish(connection)?;
        Ok(Box::new(parts))
    }

    fn whole(&self) -> bool {
        true
    }
}

/// What one connection has in its hands.
struct Parts {
    config: Arc<FilesConfig>,
    crash: Crash,
    route: String,
    /// Of the batch at hand.
    lines: Vec<u8>,
    /// In `lines`.
    rows: u64,
}

fn not_applied(doing: &str, path: &Path, error: &io::Error) -> Fault {
    let advice = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "make room on the disk",
        io::ErrorKind::NotFound => "a file that the bookkeeping names is gone: restore the folder as a whole",
        _ => "check the folder, its disk and their permissions",
    };
    let reason = format!("{doing} {}: {error}; {advice}", path.display());
    SinkError::NotApplied { reason, retry: true }.into()
}

impl Rows for Parts {
    fn write(
        &mut self,
        _transaction: &Connection,
        packed: &Packed,
        refused: &HashMap<usize, String>,
    ) -> Result<Vec<RowOutcome>, Stop> {
        self.lines.clear();
        self.rows = 0;
        let mut one = |index: usize| match refused.get(&index) {
            Some(reason) => RowOutcome::Refused { reason: reason.clone() },
            None => match encode::put_line(packed.row(index), &mut self.lines) {
                Ok(()) => {
                    self.rows += 1;
                    RowOutcome::Written
                }
                Err(reason) => RowOutcome::Refused { reason },
            },
        };
        Ok((0..packed.len()).map(&mut one).collect())
    }

    fn keep(&mut self, transaction: &Connection) -> Result<(), Fault> {
        if self.rows == 0 {
            return Ok(());
        }
        let doing = |error: rusqlite::Error| schema::fault("listing a file", &error);
        let entry = match book::open_file(transaction, &self.route).map_err(doing)? {
            Some(entry) => entry,
            None => {
                let entry = book::begin_file(transaction, &self.route).map_err(doing)?;
                begin_part(&self.config, &entry, &self.crash)?;
                entry
            }
        };
        let path = self.config.private().join(entry.part());
        // Opened each time: a file that was taken from under us must not go on without a name.
        let opened = OpenOptions::new().write(true).open(&path);
        let mut file = opened.map_err(|error| not_applied("opening", &path, &error))?;
        cut(&file, &path, &entry, &self.crash)?;
        if let Err(error) = self.append(&mut file, entry.bytes) {
            // Room for others, if it may be had; what is left counts for nothing and is cut off by whoever comes next.
            drop(self.crash.point().and_then(|()| file.set_len(entry.bytes)));
            return Err(not_applied("appending to", &path, &error));
        }
        let grown =
            Entry { bytes: entry.bytes + self.lines.len() as u64, rows: entry.rows + self.rows, ..entry };
        book::grow(transaction, &self.config, &grown).map_err(doing)?;
        // A large batch's memory is not kept for ever.
        self.lines.clear();
        self.lines.shrink_to(16 << 20);
        self.due(transaction)
    }

    fn due(&mut self, transaction: &Connection) -> Result<(), Fault> {
        book::finish_old(transaction, &self.config, &self.route)
            .map_err(|error| schema::fault("finishing a file", &error))
    }

    fn committed(&mut self, connection: &mut Connection) {
        if let Err(fault) = self.publish(connection) {
            warn!(route = %self.route, "a finished file is not in the folder yet; it is tried again: {}", fault.error);
        }
    }
}

impl Parts {
    fn append(&self, file: &mut File, at: u64) -> io::Result<()> {
        file.seek(SeekFrom::Start(at))?;
        // In two pieces, so that a test can tear a line.
        let (first, second) = self.lines.split_at(self.lines.len() / 2);
        self.crash.point()?;
        file.write_all(first)?;
        self.crash.point()?;
        file.write_all(second)?;
        self.crash.point()?;
        file.sync_data()?;
        // Before the commit.
        self.crash.point()
    }

    /// Brings finished files into the folder. May be done again as often as one likes.
    fn publish(&mut self, connection: &mut Connection) -> Result<(), Fault> {
        let doing = |error: rusqlite::Error| schema::fault("publishing a file", &error);
        if book::finished(connection, &self.route).map_err(doing)?.is_empty() {
            return Ok(());
        }
        let transaction = begin(connection)?;
        // Another session may have done it in between.
        let entries = book::finished(&transaction, &self.route).map_err(doing)?;
        for entry in &entries {
            move_part(&self.config, entry, &self.crash)?;
            book::published(&transaction, entry.id).map_err(doing)?;
        }
        for folder in [self.config.folder.clone(), self.config.private()] {
            self.crash
                .point()
                .and_then(|()| sync_folder(&folder))
                .map_err(|error| not_applied("syncing", &folder, &error))?;
        }
        self.crash.point().map_err(|error| not_applied("noting", &self.config.folder, &error))?;
        transaction.commit().map_err(doing)
    }
}

/// A new part. One of that name can only be of a transaction that was not committed.
fn begin_part(config: &FilesConfig, entry: &Entry, crash: &Crash) -> Result<(), Fault> {
    let private = config.private();
    let path = private.join(entry.part());
    crash.point().and_then(|()| File::create(&path)).map_err(|error| not_applied("making", &path, &error))?;
    crash
        .point()
        .and_then(|()| sync_folder(&private))
        .map_err(|error| not_applied("syncing", &private, &error))
}

/// Cuts off what does not count.
fn cut(file: &File, path: &Path, entry: &Entry, crash: &Crash) -> Result<(), Fault> {
    let length = file.metadata().map_err(|error| not_applied("looking at", path, &error))?.len();
    if length < entry.bytes {
        return Err(SinkError::NotApplied {
            reason: format!(
                "{} has {length} bytes where {} are committed: it was changed from outside; restore the folder as a whole",
                path.display(),
                entry.bytes
            ),
            retry: false,
        }
        .into());
    }
    if length > entry.bytes {
        info!(
            "{}: the last {} bytes are of a batch that was not committed; they are cut off",
            path.display(),
            length - entry.bytes
        );
        crash
            .point()
            .and_then(|()| file.set_len(entry.bytes))
            .map_err(|error| not_applied("cutting", path, &error))?;
    }
    Ok(())
}

/// From our own folder into the readers', whole and durable.
fn move_part(config: &FilesConfig, entry: &Entry, crash: &Crash) -> Result<(), Fault> {
    let (part, name) = (config.private().join(entry.part()), config.folder.join(&entry.name));
    let file = match OpenOptions::new().write(true).open(&part) {
        Ok(file) => file,
        // An earlier attempt moved it, and was ended before it could say so.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if fs::symlink_metadata(&name).is_err() {
                warn!(
                    "{} is finished and not there: a reader has taken it away, or someone did",
                    name.display()
                );
            }
            return Ok(());
        }
        Err(error) => return Err(not_applied("opening", &part, &error)),
    };
    cut(&file, &part, entry, crash)?;
    crash.point().and_then(|()| file.sync_all()).map_err(|error| not_applied("syncing", &part, &error))?;
    if fs::symlink_metadata(&name).is_ok() {
        return Err(SinkError::NotApplied {
            reason: format!(
                "{} is there already, and not from here; move it away: nothing is written over",
                name.display()
            ),
            retry: true,
        }
        .into());
    }
    crash
        .point()
        .and_then(|()| fs::rename(&part, &name))
        .map_err(|error| not_applied("renaming", &part, &error))
}

/// Removes parts that the book does not have: their transaction was not committed.
fn remove_leftovers(transaction: &Connection, config: &FilesConfig, crash: &Crash) -> Result<(), Fault> {
    let private = config.private();
    let failed = |error: io::Error| not_applied("looking into", &private, &error);
    for file in fs::read_dir(&private).map_err(failed)? {
        let file = file.map_err(failed)?;
        let name = file.file_name();
        let Some(name) = name.to_str().filter(|name| name.ends_with(".ndjson.part")) else { continue };
        let counts = book::has_part(transaction, name)
            .map_err(|error| schema::fault("looking for what a crash left", &error))?;
        if !counts {
            info!("{} is of a batch that was not committed; it is removed", file.path().display());
            crash
                .point()
                .and_then(|()| fs::remove_file(file.path()))
                .map_err(|error| not_applied("removing", &file.path(), &error))?;
        }
    }
    Ok(())
}
