//! The shadow: a table beside the real one, which the drill makes, reads back and takes away ([`Shadow`]).

#[cfg(feature = "clickhouse")]
mod clickhouse;
mod files;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
mod sqlite;

use std::time::Duration;

use adapters::sink::Column;

use super::{
    shape::{Compared, Row},
    values::Kind,
};
use crate::config::{SinkConfig, Target};

/// Ends the shadow's name.
const SUFFIX: &str = "_oncegate_drill";

/// What is there before the drill.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Survey {
    /// Where it is, for people: `table public.orders at db.example:5432`.
    pub(crate) place: String,
    /// On this host only.
    pub(crate) local: bool,
    /// The real table has rows.
    pub(crate) has_rows: bool,
    /// What a drill makes.
    pub(crate) makes: Vec<String>,
}

/// What became of what a drill has made.
#[derive(Default)]
pub(crate) struct Cleaned {
    /// What is gone.
    pub(crate) gone: Vec<String>,
    /// What could not be taken away, and why.
    pub(crate) left: Vec<String>,
    /// What is not quite as before.
    pub(crate) notes: Vec<String>,
}

/// How a connection to the sink goes through the proxy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Through {
    /// Of the server.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// The key of the sink's section that holds its address.
    pub(crate) key: &'static str,
}

/// A table that a drill has, or may make.
pub(crate) enum Shadow {
    #[cfg(feature = "clickhouse")]
    Clickhouse(Box<clickhouse::ClickhouseShadow>),
    Files(files::FilesShadow),
    #[cfg(feature = "postgres")]
    Postgres(postgres::PostgresShadow),
    #[cfg(feature = "redis")]
    Redis(Box<redis::RedisShadow>),
    Sqlite(sqlite::SqliteShadow),
}

impl Shadow {
    /// For this sink; says why not, if a drill cannot be made with it.
    pub(crate) fn of(sink: &SinkConfig, route: String) -> Result<Shadow, String> {
        match &sink.target {
            #[cfg(feature = "postgres")]
            Target::Postgres { .. } => {
                let config = sink.postgres().ok_or("not a Postgres sink")?;
                Ok(Shadow::Postgres(postgres::PostgresShadow::new(config, route)))
            }
            #[cfg(not(feature = "postgres"))]
            Target::Postgres { .. } => {
                Err("this build leaves Postgres out; build with the feature `postgres`".into())
            }
            Target::Sqlite { .. } => {
                let config = sink.sqlite().ok_or("not a SQLite sink")?;
                Ok(Shadow::Sqlite(sqlite::SqliteShadow::new(config, route)))
            }
            #[cfg(feature = "clickhouse")]
            Target::Clickhouse(_) => {
                let config = sink.clickhouse().ok_or("not a ClickHouse sink")?;
                Ok(Shadow::Clickhouse(Box::new(clickhouse::ClickhouseShadow::new(config))))
            }
            #[cfg(feature = "redis")]
            Target::Redis(config) => {
                Ok(Shadow::Redis(Box::new(redis::RedisShadow::new((**config).clone(), route))))
            }
            Target::Files(config) => Ok(Shadow::Files(files::FilesShadow::new(config))),
            #[allow(unreachable_patterns, reason = "a build may have no further types")]
            _ => Err(format!(
                "sink {:?} is of a type that cannot be drilled yet; postgres, sqlite, files, clickhouse and redis can",
                sink.name
            )),
        }
    }

    /// What a record's value may be for a column.
    pub(crate) fn kind(&self, column: &Column) -> Option<Kind> {
        match self {
            #[cfg(feature = "clickhouse")]
            Shadow::Clickhouse(_) => Kind::clickhouse(&column.type_name),
            #[cfg(feature = "postgres")]
            Shadow::Postgres(_) => Kind::postgres(&column.type_name),
            #[cfg(feature = "redis")]
            Shadow::Redis(_) => Kind::redis(&column.type_name),
            Shadow::Files(_) => None,
            Shadow::Sqlite(_) => Some(Kind::sqlite(&column.type_name)),
        }
    }

    /// Keys and values of the sink's section that point it at the shadow.
    pub(crate) fn target(&self) -> Vec<(&'static str, String)> {
        match self {
            #[cfg(feature = "clickhouse")]
            Shadow::Clickhouse(shadow) => vec![("table", shadow.table())],
            // What is acknowledged is to be seen soon.
            Shadow::Files(shadow) => {
                vec![("folder", shadow.folder()), ("roll_after", "1s".to_owned())]
            }
            #[cfg(feature = "postgres")]
            Shadow::Postgres(shadow) => vec![("table", shadow.table())],
            #[cfg(feature = "redis")]
            Shadow::Redis(shadow) => vec![("prefix", shadow.prefix())],
            Shadow::Sqlite(shadow) => vec![("table", shadow.table())],
        }
    }

    /// A row is the record itself, and its only column.
    pub(crate) fn whole_record(&self) -> bool {
        matches!(self, Shadow::Files(_))
    }

    /// So long after the last answer all of the shadow can be read.
    pub(crate) fn seen_after(&self) -> Duration {
        match self {
            // The age of a file, and the heartbeat that looks at it.
            Shadow::Files(_) => Duration::from_secs(6),
            _ => Duration::ZERO,
        }
    }

    /// How its connections can be cut; none if there are none, or the address is not one host and port.
    pub(crate) fn through(&self) -> Option<Through> {
        match self {
            #[cfg(feature = "clickhouse")]
            Shadow::Clickhouse(shadow) => shadow.through(),
            #[cfg(feature = "postgres")]
            Shadow::Postgres(shadow) => shadow.through(),
            #[cfg(feature = "redis")]
            Shadow::Redis(shadow) => shadow.through(),
            Shadow::Files(_) | Shadow::Sqlite(_) => None,
        }
    }

    /// The sink's address with the proxy's port in it.
    pub(crate) fn address_through(&self, port: u16) -> Option<String> {
        match self {
            #[cfg(feature = "clickhouse")]
            Shadow::Clickhouse(shadow) => shadow.url_through(port),
            #[cfg(feature = "postgres")]
            Shadow::Postgres(shadow) => shadow.url_through(port),
            #[cfg(feature = "redis")]
            Shadow::Redis(shadow) => shadow.url_through(port),
            Shadow::Files(_) | Shadow::Sqlite(_) => {
                let _ = port;
                None
            }
        }
    }

    /// Looks at what is there; changes nothing.
    pub(crate) async fn survey(&mut self) -> Result<Survey, String> {
        match self {
            #[cfg(feature = "clickhouse")]
            Shadow::Clickhouse(shadow) => shadow.survey().await,
            #[cfg(feature = "postgres")]
            Shadow::Postgres(shadow) => shadow.survey().await,
            #[cfg(feature = "redis")]
            Shadow::Redis(shadow) => shadow.survey().await,
            Shadow::Files(shadow) => shadow.survey(),
            Shadow::Sqlite(shadow) => shadow.survey(),
        }
    }

    /// Makes it.
    pub(crate) async fn make(&mut self) -> Result<(), String> {
        match self {
            #[cfg(feature = "clickhouse")]
            Shadow::Clickhouse(shadow) => shadow.make().await,
            #[cfg(feature = "postgres")]
            Shadow::Postgres(shadow) => shadow.make().await,
            #[cfg(feature = "redis")]
            Shadow::Redis(shadow) => {
                shadow.make();
                Ok(())
            }
            Shadow::Files(shadow) => shadow.make(),
            Shadow::Sqlite(shadow) => shadow.make(),
        }
    }

    /// Gives each row's values of `columns` to `each`.
    pub(crate) async fn read(
        &self,
        columns: &[Compared],
        each: &mut (dyn FnMut(Row) -> Result<(), String> + Send),
    ) -> Result<(), String> {
        let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
        match self {
            #[cfg(feature = "clickhouse")]
            Shadow::Clickhouse(shadow) => shadow.read(columns, each).await,
            #[cfg(feature = "postgres")]
            Shadow::Postgres(shadow) => shadow.read(&names, each).await,
            #[cfg(feature = "redis")]
            Shadow::Redis(shadow) => shadow.read(columns, each).await,
            Shadow::Files(shadow) => shadow.read(each),
            Shadow::Sqlite(shadow) => shadow.read(&names, each),
        }
    }

    /// Deletes a row behind the gateway's back, so that the comparison has something to find.
    pub(crate) async fn lose_a_row(&self) -> Result<(), String> {
        match self {
            #[cfg(feature = "clickhouse")]
            Shadow::Clickhouse(_) => Err("a sink of type \"clickhouse\" keeps its rows".to_owned()),
            #[cfg(feature = "postgres")]
            Shadow::Postgres(shadow) => shadow.lose_a_row().await,
            #[cfg(feature = "redis")]
            Shadow::Redis(shadow) => shadow.lose_a_row().await,
            Shadow::Files(shadow) => shadow.lose_a_row(),
            Shadow::Sqlite(shadow) => shadow.lose_a_row(),
        }
    }

    /// Takes away what the drill has made, step by step.
    pub(crate) async fn clean(&mut self) -> Cleaned {
        match self {
            #[cfg(feature = "clickhouse")]
            Shadow::Clickhouse(shadow) => shadow.clean().await,
            #[cfg(feature = "postgres")]
            Shadow::Postgres(shadow) => shadow.clean().await,
            #[cfg(feature = "redis")]
            Shadow::Redis(shadow) => shadow.clean().await,
            Shadow::Files(shadow) => shadow.clean(),
            Shadow::Sqlite(shadow) => shadow.clean(),
        }
    }
}

/// An address of this host only.
#[cfg(any(feature = "clickhouse", feature = "postgres", feature = "redis"))]
fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}
