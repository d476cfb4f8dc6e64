//! What the rows of a session go into, in the transaction of its bookkeeping: a table of the same file, or what another sink keeps
//! beside it ([`crate::files`]).

use std::{collections::HashMap, sync::Arc};

use rusqlite::{Connection, params};

use super::{
    Probed, SqliteConfig,
    packed::Packed,
    probe::Layout,
    rows::{self, Stop},
    worker::Fault,
};
use crate::sink::{RowOutcome, SinkError};

/// Tombstones that one call of `expire_marks` deletes at most.
const EXPIRE_TOMBSTONES: i64 = 10_000;

/// Shared by the sessions of a sink.
pub(crate) trait Target: Send + Sync {
    /// On a new connection, before anything is acquired.
    fn open(&self, connection: &mut Connection, route: &str) -> Result<Box<dyn Rows>, Fault>;
    /// Rows are the payloads as they came, instead of what the encoder made.
    fn whole(&self) -> bool {
        false
    }
}

/// Of one connection. Called with the file's write lock held, but for [`Rows::committed`].
pub(crate) trait Rows: Send {
    /// What becomes of each row, behind the fence; those in `refused` are left out. The rows need not be durable yet.
    fn write(
        &mut self,
        transaction: &Connection,
        packed: &Packed,
        refused: &HashMap<usize, String>,
    ) -> Result<Vec<RowOutcome>, Stop>;
    /// The batch is to be committed next: after this the commit alone decides about what `write` took.
    fn keep(&mut self, _transaction: &Connection) -> Result<(), Fault> {
        Ok(())
    }
    /// An owner shows that it lives: what time brings about.
    fn due(&mut self, _transaction: &Connection) -> Result<(), Fault> {
        Ok(())
    }
    /// What there is for old keys beside the marks, in the transaction that expires these.
    fn expire(&mut self, _transaction: &Connection, _floor_ms: i64) -> rusqlite::Result<()> {
        Ok(())
    }
    /// The transaction is in. What is left to do cannot undo it.
    fn committed(&mut self, _connection: &mut Connection) {}
}

/// A table of the file itself.
pub(super) struct Table {
    pub(super) config: Arc<SqliteConfig>,
    pub(super) probed: Probed,
}

impl Target for Table {
    fn open(&self, connection: &mut Connection, route: &str) -> Result<Box<dyn Rows>, Fault> {
        let layout = layout(connection, &self.config, &self.probed)?;
        Ok(Box::new(TableRows { layout, route: route.to_owned() }))
    }
}

struct TableRows {
    layout: Arc<Layout>,
    route: String,
}

impl Rows for TableRows {
    fn write(
        &mut self,
        transaction: &Connection,
        packed: &Packed,
        refused: &HashMap<usize, String>,
    ) -> Result<Vec<RowOutcome>, Stop> {
        rows::write(transaction, &self.layout, &self.route, packed, refused)
    }

    fn expire(&mut self, transaction: &Connection, floor_ms: i64) -> rusqlite::Result<()> {
        transaction
            .execute(
                "DELETE FROM oncegate_tombstones WHERE target = ?2 AND row_key IN (SELECT row_key FROM oncegate_tombstones
                 WHERE route = ?1 AND target = ?2 AND event_ms < ?3 LIMIT ?4)",
                params![self.route, self.layout.table, floor_ms, EXPIRE_TOMBSTONES],
            )
            .map(drop)
    }
}

/// The table must be as the probe saw it: rows were encoded for that.
fn layout(connection: &Connection, config: &SqliteConfig, probed: &Probed) -> Result<Arc<Layout>, Fault> {
    let changed = |reason: String| SinkError::NotApplied { reason, retry: false };
    let now = Layout::read(connection, config).map_err(|misfits| {
        let all: Vec<String> = misfits.iter().map(ToString::to_string).collect();
        changed(format!("the table does not fit: {}", all.join("; ")))
    })?;
    match &*probed.lock() {
        Some(layout) if **layout == now => Ok(layout.clone()),
        Some(_) => Err(changed(format!(
            "table {:?} has changed since the start-up checks; restart to read it again",
            config.table
        ))
        .into()),
        None => Ok(Arc::new(now)),
    }
}
