//! The session's [`Engine`]: how a connection is made and kept.

use std::sync::Arc;

use duckdb::Connection;
use tokio::sync::oneshot;

use super::{
    DuckdbConfig, Probed, deliver,
    deliver::Pace,
    errors::{self, Class},
    instance::{Handle, OpenError},
    probe::{self, Layout},
    rows::Packed,
    schema::{self, Transaction},
};
use crate::{
    bookkeeping::{
        Books,
        file_id::FileId,
        marks::Finish,
        session::{BookSession, Engine, Work},
        worker::{Fault, Owned},
    },
    sink::{Batch, Life, Pulse, RowOutcome, SinkError},
};

/// Tombstones that one call of `expire_marks` deletes at most.
const EXPIRE_TOMBSTONES: i64 = 10_000;

/// A session for one lane of `route`.
pub(super) fn session(
    config: Arc<DuckdbConfig>,
    probed: Probed,
    route: &str,
    owner: &str,
) -> BookSession<Duckdb> {
    BookSession::of(Duckdb { config, probed }, route, owner)
}

/// Of one sink.
pub(super) struct Duckdb {
    pub(super) config: Arc<DuckdbConfig>,
    probed: Probed,
}

/// What the worker's thread owns.
#[derive(Default)]
pub(super) struct Db {
    pub(super) open: Option<Open>,
}

/// A connection that `acquire` made. Its parts end in this order.
pub(super) struct Open {
    pub(super) connection: Connection,
    pub(super) handle: Handle,
    pub(super) layout: Arc<Layout>,
    pub(super) pace: Pace,
    /// Ends with the connection.
    pulse: Pulse,
}

impl Owned for Db {
    fn life(&self) -> Option<Life> {
        self.open.as_ref().map(|open| open.pulse.life())
    }

    fn lose(&mut self) {
        self.open = None;
    }
}

impl Db {
    /// The connection, if it still leads to the file of that path.
    pub(super) fn ready(&mut self, config: &DuckdbConfig) -> Result<&mut Open, Fault> {
        let not_applied =
            |reason: String| Fault { error: SinkError::NotApplied { reason, retry: true }, lost: true };
        let path = config.path.display();
        let Some(open) = &mut self.open else {
            return Err(not_applied("there is no connection: acquire the shards first".to_owned()));
        };
        if open.handle.is_broken() {
            return Err(not_applied(format!("{path}: DuckDB has failed and is opened again")));
        }
        match FileId::of(&config.path) {
            Ok(file) if file == open.handle.file() => Ok(open),
            Ok(_) => Err(not_applied(format!("{path} is another file now"))),
            Err(error) => Err(not_applied(format!("{path}: {error}"))),
        }
    }
}

/// The file, with the bookkeeping tables in it.
pub(super) fn open(config: &DuckdbConfig) -> Result<(Connection, Handle), Fault> {
    let path = config.path.display();
    let handle = Handle::open(&config.path).map_err(|error| match error {
        OpenError::Duckdb(error) => errors::fault(&format!("opening {path}"), &error),
        OpenError::Io(error) => {
            SinkError::NotApplied { reason: format!("opening {path}: {error}"), retry: true }.into()
        }
        OpenError::Broken => SinkError::NotApplied {
            reason: format!("{path}: DuckDB has failed, and other lanes have yet to let go of it"),
            retry: true,
        }
        .into(),
    })?;
    let made = (|| {
        let connection =
            handle.connect().map_err(|error| errors::fault(&format!("connecting to {path}"), &error))?;
        let failed = |error| errors::fault("making the bookkeeping tables", &error);
        // A look waits for nobody once they are there.
        if !schema::is_made(&connection).map_err(failed)? {
            schema::make(&connection, &schema::writer(&handle, config)?).map_err(failed)?;
        }
        Ok(connection)
    })();
    made.map(|connection| (connection, handle))
}

/// The table must be as the probe saw it: rows were encoded for that.
fn layout(connection: &Connection, config: &DuckdbConfig, probed: &Probed) -> Result<Arc<Layout>, Fault> {
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

impl Engine for Duckdb {
    type Db = Db;
    type Rows = Packed;
    const NAME: &'static str = "duckdb";

    fn pack(&self, batch: &Batch<'_>) -> Packed {
        Packed::of(batch)
    }

    fn connect(&self, db: &mut Db, _route: &str, anew: bool) -> Result<(), Fault> {
        if anew || db.ready(&self.config).is_err() {
            db.open = None;
        }
        if db.open.is_none() {
            let (connection, handle) = open(&self.config)?;
            let layout = layout(&connection, &self.config, &self.probed)?;
            db.open = Some(Open { connection, handle, layout, pace: Pace::default(), pulse: Pulse::begin() });
        }
        Ok(())
    }

    fn transact<T>(
        &self,
        db: &mut Db,
        doing: &str,
        job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let open = db.ready(&self.config)?;
        transact(&open.connection, &open.handle, &self.config, doing, |transaction| job(transaction))
    }

    fn look<T>(
        &self,
        db: &mut Db,
        doing: &str,
        job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if db.open.is_some() {
            return self.transact(db, doing, job);
        }
        let (connection, handle) = open(&self.config)?;
        let answer = transact(&connection, &handle, &self.config, doing, |transaction| job(transaction));
        drop(connection);
        drop(handle);
        answer
    }

    fn read<T>(
        &self,
        db: &mut Db,
        acquired: bool,
        job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if acquired || db.open.is_some() {
            let open = db.ready(&self.config)?;
            return read(&open.connection, &open.handle, job);
        }
        let (connection, handle) = open(&self.config)?;
        let answer = read(&connection, &handle, job);
        drop(connection);
        drop(handle);
        answer
    }

    fn deliver(
        &self,
        db: &mut Db,
        route: &str,
        work: &Work<Packed>,
        outcomes: oneshot::Sender<Vec<RowOutcome>>,
        finish: oneshot::Receiver<Finish>,
    ) -> Result<(), Fault> {
        let open = db.ready(&self.config)?;
        let delivered = deliver::run(open, &self.config, route, work, outcomes, finish);
        if let Err(Fault { lost: true, .. }) = &delivered {
            notice(&open.connection, &open.handle);
        }
        delivered
    }

    fn expire(
        &self,
        db: &mut Db,
        route: &str,
        floor_ms: i64,
        job: impl FnOnce(&dyn Books) -> Result<u64, Fault>,
    ) -> Result<u64, Fault> {
        let open = db.ready(&self.config)?;
        let (doing, table) = ("expiring marks", open.layout.table.as_str());
        transact(&open.connection, &open.handle, &self.config, doing, |transaction| {
            let gone = job(transaction)?;
            transaction.run(
                doing,
                "DELETE FROM oncegate_tombstones WHERE rowid IN (SELECT rowid FROM oncegate_tombstones
                 WHERE route = ?1 AND target = ?2 AND event_ms < ?3 LIMIT ?4)",
                &[route.into(), table.into(), floor_ms.into(), EXPIRE_TOMBSTONES.into()],
            )?;
            Ok(gone)
        })
    }
}

/// What may safely be done again: a failed commit counts as not applied, on a new connection.
fn transact<T>(
    connection: &Connection,
    handle: &Handle,
    config: &DuckdbConfig,
    doing: &str,
    job: impl FnOnce(&Transaction<'_>) -> Result<T, Fault>,
) -> Result<T, Fault> {
    let run = || {
        let writer = schema::writer(handle, config)?;
        let transaction = Transaction::begin(connection, &writer)?;
        let answer = job(&transaction)?;
        transaction.commit().map_err(|error| Fault {
            error: SinkError::NotApplied {
                reason: format!("{doing}: {}", errors::shown(&error)),
                retry: true,
            },
            lost: true,
        })?;
        Ok(answer)
    };
    run().inspect_err(|fault: &Fault| {
        if fault.lost {
            notice(connection, handle);
        }
    })
}

/// Runs `job`, which only reads.
fn read<T>(
    connection: &Connection,
    handle: &Handle,
    job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
) -> Result<T, Fault> {
    Transaction::reading(connection).and_then(|transaction| job(&transaction)).inspect_err(|fault| {
        if fault.lost {
            notice(connection, handle);
        }
    })
}

/// Whether DuckDB still answers: an instance that it has given up fails every statement.
pub(super) fn notice(connection: &Connection, handle: &Handle) {
    if let Err(error) = connection.execute_batch("SELECT 1")
        && errors::classify(&error) == Class::Fatal
    {
        handle.mark_broken();
    }
}

/// The start-up checks, over a connection of their own.
pub(super) fn looked_at<T>(
    config: &DuckdbConfig,
    look: impl FnOnce(&Connection) -> T,
) -> Result<T, OpenError> {
    let handle = Handle::open(&config.path)?;
    let connection = handle.connect()?;
    let writer = handle.writer(config.busy_timeout.max(probe::PATIENCE)).ok_or(OpenError::Broken)?;
    if !schema::is_made(&connection)? {
        schema::make(&connection, &writer)?;
    }
    let found = look(&connection);
    drop(connection);
    drop(writer);
    Ok(found)
}
