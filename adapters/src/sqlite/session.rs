//! The session's [`Engine`]: how a connection is made and kept, and what a transaction is.

use std::sync::Arc;

use rusqlite::{Connection, Transaction, TransactionBehavior, types::ValueRef};
use tokio::sync::oneshot;

use super::{
    SqliteConfig,
    deliver::{self, begin},
    packed::Packed,
    schema::{self, NOW_MS, OpenError},
    target::Target,
    worker::{Db, Fault, Open},
};
use crate::{
    bookkeeping::{
        Books, Cell, Param,
        file_id::FileId,
        marks::Finish,
        session::{BookSession, Engine, Work},
    },
    sink::{Batch, Pulse, RowOutcome, SinkError},
};

/// One lane's connection, on a thread of its own.
pub(crate) type SqliteSession = BookSession<Sqlite>;

/// Of one sink.
pub(crate) struct Sqlite {
    config: Arc<SqliteConfig>,
    target: Arc<dyn Target>,
}

impl SqliteSession {
    /// The bookkeeping is in the file that `config` names, the rows go to `target`.
    pub(crate) fn new(config: Arc<SqliteConfig>, target: Arc<dyn Target>, route: &str, owner: &str) -> Self {
        Self::of(Sqlite { config, target }, route, owner)
    }
}

impl Db {
    /// The connection, if it still leads to the file of that path.
    pub(crate) fn ready(&mut self, config: &SqliteConfig) -> Result<&mut Open, Fault> {
        let not_applied =
            |reason: String| Fault { error: SinkError::NotApplied { reason, retry: true }, lost: true };
        let Some(open) = &mut self.open else {
            return Err(not_applied("there is no connection: acquire the shards first".to_owned()));
        };
        match FileId::of(&config.path) {
            Ok(file) if file == open.file => Ok(open),
            Ok(_) => Err(not_applied(format!("{} is another file now", config.path.display()))),
            Err(error) => Err(not_applied(format!("{}: {error}", config.path.display()))),
        }
    }

    /// The connection, a new one if there is none or the file is another one now.
    pub(crate) fn connect(
        &mut self,
        config: &SqliteConfig,
        target: &dyn Target,
        route: &str,
    ) -> Result<&mut Open, Fault> {
        if self.ready(config).is_err() {
            self.open = None;
        }
        match &mut self.open {
            Some(open) => Ok(open),
            slot => {
                let mut connection = connect(config)?;
                let file = FileId::of(&config.path).map_err(|error| SinkError::NotApplied {
                    reason: format!("{}: {error}", config.path.display()),
                    retry: true,
                })?;
                let rows = target.open(&mut connection, route)?;
                Ok(slot.insert(Open { connection, file, rows, pulse: Pulse::begin() }))
            }
        }
    }
}

fn connect(config: &SqliteConfig) -> Result<Connection, Fault> {
    schema::open(config).map_err(|error| match error {
        OpenError::Sqlite(error) => schema::fault(&format!("opening {}", config.path.display()), &error),
        OpenError::NotDurable(why) => SinkError::NotApplied {
            reason: format!("{}: a commit would not be durable: {why}", config.path.display()),
            retry: false,
        }
        .into(),
    })
}

impl Engine for Sqlite {
    type Db = Db;
    type Rows = Packed;
    const NAME: &'static str = "sqlite";

    fn pack(&self, batch: &Batch<'_>) -> Packed {
        Packed::of(batch, self.target.whole())
    }

    fn connect(&self, db: &mut Db, route: &str, anew: bool) -> Result<(), Fault> {
        if anew {
            db.open = None;
        }
        db.connect(&self.config, &*self.target, route).map(drop)
    }

    fn transact<T>(
        &self,
        db: &mut Db,
        doing: &str,
        job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        transact(&mut db.ready(&self.config)?.connection, doing, job)
    }

    fn look<T>(
        &self,
        db: &mut Db,
        doing: &str,
        job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        match &mut db.open {
            Some(_) => self.transact(db, doing, job),
            None => transact(&mut connect(&self.config)?, doing, job),
        }
    }

    fn read<T>(
        &self,
        db: &mut Db,
        acquired: bool,
        job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if acquired || db.open.is_some() {
            return snapshot(&db.ready(&self.config)?.connection, job);
        }
        snapshot(&connect(&self.config)?, job)
    }

    fn deliver(
        &self,
        db: &mut Db,
        route: &str,
        work: &Work<Packed>,
        outcomes: oneshot::Sender<Vec<RowOutcome>>,
        finish: oneshot::Receiver<Finish>,
    ) -> Result<(), Fault> {
        deliver::run(db, &self.config, route, work, outcomes, finish)
    }

    fn heartbeat(
        &self,
        db: &mut Db,
        _route: &str,
        job: impl FnOnce(&dyn Books) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let Open { connection, rows, .. } = db.ready(&self.config)?;
        let transaction = begin(&mut *connection)?;
        job(&transaction)?;
        rows.due(&transaction)?;
        end(transaction, "touching the heartbeat")?;
        rows.committed(connection);
        Ok(())
    }

    fn expire(
        &self,
        db: &mut Db,
        _route: &str,
        floor_ms: i64,
        job: impl FnOnce(&dyn Books) -> Result<u64, Fault>,
    ) -> Result<u64, Fault> {
        let Open { connection, rows, .. } = db.ready(&self.config)?;
        let doing = "expiring marks";
        transact_with(connection, doing, |transaction| {
            let gone = job(transaction)?;
            rows.expire(transaction, floor_ms).map_err(|error| schema::fault(doing, &error))?;
            Ok(gone)
        })
    }
}

fn transact<T>(
    connection: &mut Connection,
    doing: &str,
    job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
) -> Result<T, Fault> {
    transact_with(connection, doing, |transaction| job(transaction))
}

fn transact_with<T>(
    connection: &mut Connection,
    doing: &str,
    job: impl FnOnce(&Transaction<'_>) -> Result<T, Fault>,
) -> Result<T, Fault> {
    let transaction = begin(connection)?;
    let answer = job(&transaction)?;
    end(transaction, doing)?;
    Ok(answer)
}

/// Runs `job`, which only reads, over one state of the file; a writer does not keep it waiting.
fn snapshot<T>(
    connection: &Connection,
    job: impl FnOnce(&dyn Books) -> Result<T, Fault>,
) -> Result<T, Fault> {
    let transaction = Transaction::new_unchecked(connection, TransactionBehavior::Deferred)
        .map_err(|error| schema::fault("beginning to read", &error))?;
    job(&transaction)
}

/// Commits what may safely be done again: a failed commit counts as not applied, on a new connection.
fn end(transaction: Transaction<'_>, doing: &str) -> Result<(), Fault> {
    transaction.commit().map_err(|error| Fault {
        error: SinkError::NotApplied { reason: format!("{doing}: {}", schema::text(&error)), retry: true },
        lost: true,
    })
}

impl Books for Transaction<'_> {
    fn now_ms(&self) -> &'static str {
        NOW_MS
    }

    fn run(&self, doing: &str, sql: &str, params: &[Param<'_>]) -> Result<usize, Fault> {
        Connection::run(self, doing, sql, params)
    }

    fn query(
        &self,
        doing: &str,
        sql: &str,
        params: &[Param<'_>],
        each: &mut dyn FnMut(Vec<Cell>) -> bool,
    ) -> Result<(), Fault> {
        Connection::query(self, doing, sql, params, each)
    }
}

impl Books for Connection {
    fn now_ms(&self) -> &'static str {
        NOW_MS
    }

    fn run(&self, doing: &str, sql: &str, params: &[Param<'_>]) -> Result<usize, Fault> {
        self.prepare_cached(sql)
            .and_then(|mut statement| statement.execute(rusqlite::params_from_iter(params)))
            .map_err(|error| schema::fault(doing, &error))
    }

    fn query(
        &self,
        doing: &str,
        sql: &str,
        params: &[Param<'_>],
        each: &mut dyn FnMut(Vec<Cell>) -> bool,
    ) -> Result<(), Fault> {
        let mut run = || {
            let mut statement = self.prepare_cached(sql)?;
            let columns = statement.column_count();
            let mut rows = statement.query(rusqlite::params_from_iter(params))?;
            while let Some(row) = rows.next()? {
                let cells = (0..columns)
                    .map(|column| row.get_ref(column).map(cell))
                    .collect::<rusqlite::Result<_>>()?;
                if !each(cells) {
                    break;
                }
            }
            Ok(())
        };
        run().map_err(|error: rusqlite::Error| schema::fault(doing, &error))
    }
}

impl rusqlite::ToSql for Param<'_> {
    fn to_sql(&self) -> rusqlite::Result<rusqlite::types::ToSqlOutput<'_>> {
        Ok(rusqlite::types::ToSqlOutput::Borrowed(match *self {
            Param::Null => ValueRef::Null,
            Param::Integer(value) => ValueRef::Integer(value),
            Param::Text(text) => ValueRef::Text(text.as_bytes()),
            Param::Blob(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

fn cell(value: ValueRef<'_>) -> Cell {
    match value {
        ValueRef::Integer(value) => Cell::Integer(value),
        ValueRef::Text(text) => Cell::Text(String::from_utf8_lossy(text).into_owned()),
        ValueRef::Blob(bytes) => Cell::Blob(bytes.to_vec()),
        ValueRef::Null | ValueRef::Real(_) => Cell::Null,
    }
}
