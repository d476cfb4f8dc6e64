//! The thread that a session works on: the client library's calls block. Jobs run one after the other.

use std::{sync::mpsc, thread};

use tokio::sync::oneshot;

use super::desk::Desk;
use crate::sink::{Life, SinkError};

type Job = Box<dyn FnOnce(&mut Desk) + Send>;

/// Handle of the thread; dropping it ends the thread once its last job is done.
pub(super) struct Worker {
    jobs: mpsc::Sender<Job>,
}

/// A job's answer on its way, and what there is of a connection after it: nothing comes if the thread has ended.
pub(super) type Reply<T> = oneshot::Receiver<(Result<T, SinkError>, Option<Life>)>;

impl Worker {
    /// Starts the thread.
    pub(super) fn start(mut desk: Desk) -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        thread::Builder::new().name(format!("kafka sink {}", desk.place.route)).spawn(move || {
            while let Ok(job) = queue.recv() {
                job(&mut desk);
            }
        })?;
        Ok(Self { jobs })
    }

    /// Queues `job`.
    pub(super) fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Desk) -> Result<T, SinkError> + Send + 'static,
    ) -> Reply<T> {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(move |desk: &mut Desk| {
            let result = job(desk);
            // The caller may have gone; the next job then finds what this one left.
            drop(reply.send((result, desk.life())));
        });
        // If the thread has ended, the reply's sender is dropped with the job, and the caller sees that.
        drop(self.jobs.send(job));
        answer
    }
}
