//! What a session's thread owns: the connection, with which file it leads to and what the rows go into.

use rusqlite::Connection;

use super::target::Rows;
pub(crate) use crate::bookkeeping::worker::Fault;
use crate::{
    bookkeeping::{file_id::FileId, worker::Owned},
    sink::{Life, Pulse},
};

/// What a job sees: the connection, if there is one.
#[derive(Default)]
pub(crate) struct Db {
    pub(super) open: Option<Open>,
}

impl Owned for Db {
    fn life(&self) -> Option<Life> {
        self.open.as_ref().map(|open| open.pulse.life())
    }

    fn lose(&mut self) {
        self.open = None;
    }
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
