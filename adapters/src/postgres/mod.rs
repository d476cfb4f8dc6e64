//! The Postgres sink: rows and marks in one transaction ([`Guarantee::Transactional`]).
//!
//! | file | holds |
//! | --- | --- |
//! | `probe` | start-up checks: table, columns, index, settings |
//! | `encode` `numeric` `canonical` `types` `row` | values to binary rows; pure |
//! | `session` `acquire` | shards, marks, routes: everything but delivering |
//! | `deliver` `staged` | one batch, by the fastest way that is right for it |
//! | `statements` `tables` `params` `connect` | SQL texts, DDL, parameters, the connection |

mod acquire;
mod canonical;
mod connect;
mod deliver;
mod encode;
mod numeric;
mod params;
mod probe;
mod row;
mod session;
mod staged;
mod statements;
mod tables;
mod types;

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_trait::async_trait;

use self::{connect::Address, encode::Encoder, session::PostgresSession, tables::Tables};
use crate::sink::{Encode, Guarantee, Misfit, Mode, Session, Sink};

/// What the sink is asked to be.
#[derive(Clone)]
pub struct PostgresConfig {
    /// `postgres://user:password@host:5432/database?sslmode=require&sslrootcert=/path/ca.pem`, or libpq's `key=value`
    /// list. Without a password, `PGPASSWORD` from the environment is taken.
    pub url: String,
    /// `schema.table`; without schema: `public`.
    pub table: String,
    /// How a row meets the row that is there.
    pub mode: Mode,
    /// Names of the row key columns; may be empty in `Insert`.
    pub row_key: Vec<String>,
    /// Name of the version column, in `UpsertIfNewer`.
    pub version: Option<String>,
    /// Columns to fill, in this order; all that can be filled if `None`.
    pub columns: Option<Vec<String>>,
    /// Bound on making a connection.
    pub connect_timeout: Duration,
    /// Bound on one statement, on the server and (with a margin) here.
    pub statement_timeout: Duration,
    /// How long `acquire` waits for a frozen owner before it ends it.
    pub lock_timeout: Duration,
    /// Schema of the bookkeeping tables; the table's own if `None`.
    pub meta_schema: Option<String>,
}

impl PostgresConfig {
    /// Defaults for everything but where the rows go: mode `Insert`, no row key, all columns; 10 s to connect, 30 s a
    /// statement, 1 s for a lock.
    pub fn new(url: impl Into<String>, table: impl Into<String>) -> PostgresConfig {
        PostgresConfig {
            url: url.into(),
            table: table.into(),
            mode: Mode::Insert,
            row_key: Vec::new(),
            version: None,
            columns: None,
            connect_timeout: Duration::from_secs(10),
            statement_timeout: Duration::from_secs(30),
            lock_timeout: Duration::from_secs(1),
            meta_schema: None,
        }
    }
}

impl fmt::Debug for PostgresConfig {
    /// Without the url: it may hold a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("table", &self.table)
            .field("mode", &self.mode)
            .field("row_key", &self.row_key)
            .field("version", &self.version)
            .field("columns", &self.columns)
            .finish_non_exhaustive()
    }
}

/// What sink and sessions share.
struct Shared {
    config: PostgresConfig,
    address: Address,
    schema: String,
    table: String,
    tables: Tables,
    /// Set by the probe.
    probed: OnceLock<Probed>,
}

/// What the probe found.
struct Probed {
    encoder: Arc<Encoder>,
    /// `synchronous_commit` is off or local by default: raised for our transactions (P6).
    raise_commit: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.fmt(f)
    }
}

/// A table in Postgres as a sink.
#[derive(Debug)]
pub struct PostgresSink {
    shared: Arc<Shared>,
}

impl PostgresSink {
    /// Checks what can be checked without a connection; [`Sink::probe`] checks the rest.
    pub fn new(config: PostgresConfig) -> Result<PostgresSink, Misfit> {
        let misfit = |what: &str, remedy: &str| Misfit { what: what.to_owned(), remedy: remedy.to_owned() };
        let (schema, table) = config.table.split_once('.').unwrap_or(("public", &config.table));
        if schema.is_empty() || table.is_empty() {
            return Err(misfit(
                &format!("table {:?} is no table name", config.table),
                "write it as schema.table",
            ));
        }
        if config.mode != Mode::Insert && config.row_key.is_empty() {
            return Err(misfit(
                "the mode needs a row_key",
                "name the columns of the table's primary key in row_key",
            ));
        }
        match (config.mode, &config.version) {
            (Mode::UpsertIfNewer, None) => {
                return Err(misfit(
                    "mode upsert-if-newer needs a version",
                    "name the column that grows with every change",
                ));
            }
            (Mode::Insert | Mode::Upsert, Some(version)) => {
                return Err(misfit(
                    &format!("version {version:?} has no meaning in this mode"),
                    "leave it out, or use mode upsert-if-newer",
                ));
            }
            _ => {}
        }
        let (schema, table) = (schema.to_owned(), table.to_owned());
        let tables = Tables::new(&schema, &table, config.meta_schema.as_deref().unwrap_or(&schema));
        let address = Address::new(&config.url, config.connect_timeout)?;
        Ok(PostgresSink {
            shared: Arc::new(Shared { config, address, schema, table, tables, probed: OnceLock::new() }),
        })
    }
}

/// A connection of one's own to the server of `config`, made as the sink makes its own: for a look from outside (drills).
pub async fn connect(
    config: &PostgresConfig,
    application_name: &str,
) -> Result<tokio_postgres::Client, String> {
    let address = Address::new(&config.url, config.connect_timeout).map_err(|misfit| misfit.to_string())?;
    let connected = address.connect(application_name).await;
    connected.map(|(client, _pulse)| client).map_err(|error| connect::cause(&error))
}

#[async_trait]
impl Sink for PostgresSink {
    fn guarantee(&self) -> Guarantee {
        Guarantee::Transactional
    }

    fn mode(&self) -> Mode {
        self.shared.config.mode
    }

    fn row_key(&self) -> &[String] {
        &self.shared.config.row_key
    }

    fn version(&self) -> Option<&str> {
        self.shared.config.version.as_deref()
    }

    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>> {
        let found = probe::run(&self.shared).await?;
        // A later probe of the same sink keeps the first encoder: sessions may hold rows that it made.
        let probed = self.shared.probed.get_or_init(|| found);
        Ok(Arc::clone(&probed.encoder) as Arc<dyn Encode>)
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        Box::new(PostgresSession::new(Arc::clone(&self.shared), route, owner))
    }
}
