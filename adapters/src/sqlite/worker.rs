//! The thread that owns a session's connection. Jobs run one after the other; SQLite never blocks the runtime.

use std::{sync::mpsc, thread};

use rusqlite::Connection;
use tokio::sync::oneshot;

use super::target::Rows;
use crate::sink::{Life, Pulse, SinkError};

/// What a job sees: the connection, if there is one.
#[derive(Default)]
pub(crate) struct Db {
    pub(super) open: Option<Open>,
}

/// A connection that `acquire` made.
pub(crate) struct Open {
    pub(crate) connection: Connection,
    /// Which file it is, so that a file put in its place is noticed.
    pub(super) file: FileId,
    /// What the rows go into.
    pub(super) rows: Box<dyn Rows>,
    /// Ends with the connection.
    pub(super) pulse: Pulse,
}

/// Device and inode of the file (nothing where the system has none).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FileId(Option<(u64, u64)>);

impl FileId {
    /// Of the file that now has this path.
    pub(super) fn of(path: &std::path::Path) -> std::io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            Ok(Self(Some((meta.dev(), meta.ino()))))
        }
        #[cfg(not(unix))]
        {
            drop(meta);
            Ok(Self(None))
        }
    }
}

/// A failed job.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) error: SinkError,
    /// The connection is of no more use.
    pub(crate) lost: bool,
}

impl From<SinkError> for Fault {
    fn from(error: SinkError) -> Self {
        Self { error, lost: false }
    }
}

type Job = Box<dyn FnOnce(&mut Db) + Send>;

/// Handle of the thread; dropping it ends the thread once its last job is done.
pub(super) struct Worker {
    jobs: mpsc::Sender<Job>,
}

/// A job's answer on its way: nothing comes if the thread has ended.
pub(super) type Reply<T> = oneshot::Receiver<(Result<T, SinkError>, Option<Life>)>;

impl Worker {
    /// Starts the thread.
    pub(super) fn start(name: &str) -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        thread::Builder::new().name(format!("sqlite {name}")).spawn(move || {
            let mut db = Db::default();
            while let Ok(job) = queue.recv() {
                job(&mut db);
            }
        })?;
        Ok(Self { jobs })
    }

    /// Queues `job`. The reply says too whether there still is a connection.
    pub(super) fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Db) -> Result<T, Fault> + Send + 'static,
    ) -> Reply<T> {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(move |db: &mut Db| {
            let result = job(db).map_err(|fault| {
                if fault.lost {
                    db.open = None;
                }
                fault.error
            });
            // The caller may have gone; the next job then finds what this one left.
            drop(reply.send((result, db.open.as_ref().map(|open| open.pulse.life()))));
        });
        // If the thread has ended, the reply's sender is dropped with the job, and the caller sees that.
        drop(self.jobs.send(job));
        answer
    }
}
