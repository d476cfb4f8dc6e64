//! The thread that owns a session's connection. Jobs run one after the other; the database never blocks the runtime.

use std::{sync::mpsc, thread};

use tokio::sync::oneshot;

use crate::sink::{Life, SinkError};

/// What the thread owns: a connection, if there is one.
pub(crate) trait Owned: Default + Send + 'static {
    /// Of the connection that there is.
    fn life(&self) -> Option<Life>;
    /// It is of no more use.
    fn lose(&mut self);
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

type Job<D> = Box<dyn FnOnce(&mut D) + Send>;

/// Handle of the thread; dropping it ends the thread once its last job is done.
pub(super) struct Worker<D> {
    jobs: Jobs<D>,
}

enum Jobs<D> {
    Thread(mpsc::Sender<Job<D>>),
    /// A simulation has no threads beside its own. Not for jobs that wait for their session.
    #[cfg(feature = "simulation")]
    Here(parking_lot::Mutex<D>),
}

/// A job's answer on its way: nothing comes if the thread has ended.
pub(super) type Reply<T> = oneshot::Receiver<(Result<T, SinkError>, Option<Life>)>;

impl<D: Owned> Worker<D> {
    /// Starts the thread.
    pub(super) fn start(name: String) -> std::io::Result<Self> {
        #[cfg(feature = "simulation")]
        if crate::simulated::here() {
            return Ok(Self { jobs: Jobs::Here(parking_lot::Mutex::default()) });
        }
        let (jobs, queue) = mpsc::channel::<Job<D>>();
        thread::Builder::new().name(name).spawn(move || {
            let mut db = D::default();
            while let Ok(job) = queue.recv() {
                job(&mut db);
            }
        })?;
        Ok(Self { jobs: Jobs::Thread(jobs) })
    }

    /// Queues `job`. The reply says too whether there still is a connection.
    pub(super) fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut D) -> Result<T, Fault> + Send + 'static,
    ) -> Reply<T> {
        let (reply, answer) = oneshot::channel();
        let job: Job<D> = Box::new(move |db: &mut D| {
            let result = job(db).map_err(|fault| {
                if fault.lost {
                    db.lose();
                }
                fault.error
            });
            // The caller may have gone; the next job then finds what this one left.
            drop(reply.send((result, db.life())));
        });
        // If the thread has ended, the reply's sender is dropped with the job, and the caller sees that.
        match &self.jobs {
            Jobs::Thread(jobs) => drop(jobs.send(job)),
            #[cfg(feature = "simulation")]
            Jobs::Here(db) => job(&mut db.lock()),
        }
        answer
    }
}
