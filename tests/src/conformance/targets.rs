//! The sinks under test, and the tables they work on.

use std::sync::atomic::{AtomicU32, Ordering};

use adapters::{
    postgres::{PostgresConfig, PostgresSink},
    sink::Sink,
    sqlite::{SqliteConfig, SqliteSink},
};
use tempfile::TempDir;
use tokio_postgres::Client;

use super::{DDL, Place, Shape, Target};
use crate::servers::Postgres;

/// SQLite: a file for each case.
#[derive(Clone, Copy, Debug)]
pub struct Sqlite;

/// A file in a folder of its own.
#[derive(Debug)]
pub struct SqlitePlace {
    folder: TempDir,
}

impl Target for Sqlite {
    type Place = SqlitePlace;

    async fn place(&self, _shape: &Shape) -> SqlitePlace {
        let place = SqlitePlace { folder: tempfile::tempdir().expect("a temporary folder") };
        place.execute(DDL).await;
        place
    }

    fn histories(&self) -> u64 {
        12
    }
}

impl SqlitePlace {
    fn config(&self, shape: &Shape) -> SqliteConfig {
        SqliteConfig {
            mode: shape.mode,
            row_key: shape.row_key(),
            version: shape.version(),
            columns: shape.columns.clone(),
            ..SqliteConfig::new(self.folder.path().join("rows.db"), shape.table)
        }
    }

    fn open(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(self.folder.path().join("rows.db")).expect("the file opens")
    }
}

impl Place for SqlitePlace {
    fn sink(&self, shape: &Shape) -> Box<dyn Sink> {
        Box::new(SqliteSink::new(self.config(shape)))
    }

    async fn execute(&self, sql: &str) {
        self.open().execute_batch(sql).expect("the SQL of the case is right");
    }

    async fn texts(&self, sql: &str) -> Vec<Option<String>> {
        let connection = self.open();
        let mut query = connection.prepare(sql).expect("the SQL of the case is right");
        let rows = query.query_map([], |row| row.get(0)).expect("the query runs");
        rows.collect::<Result<_, _>>().expect("one text a row")
    }
}

/// Postgres: a database for each case, in the cluster of the test binary.
#[derive(Clone, Copy, Debug)]
pub struct Live;

/// A database and a connection to it.
pub struct PostgresPlace {
    url: String,
    client: Client,
}

impl Target for Live {
    type Place = PostgresPlace;

    async fn place(&self, _shape: &Shape) -> PostgresPlace {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("conformance_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let postgres = Postgres::shared();
        let client = postgres.database(&name, DDL).await;
        PostgresPlace { url: postgres.url(&name), client }
    }

    fn histories(&self) -> u64 {
        4
    }
}

impl Place for PostgresPlace {
    fn sink(&self, shape: &Shape) -> Box<dyn Sink> {
        let mut config = PostgresConfig::new(&self.url, shape.table);
        config.mode = shape.mode;
        config.row_key = shape.row_key();
        config.version = shape.version();
        config.columns = shape.columns.clone();
        Box::new(PostgresSink::new(config).expect("a good configuration"))
    }

    async fn execute(&self, sql: &str) {
        self.client.batch_execute(sql).await.expect("the SQL of the case is right");
    }

    async fn texts(&self, sql: &str) -> Vec<Option<String>> {
        let rows = self.client.query(sql, &[]).await.expect("the query runs");
        rows.iter().map(|row| row.get(0)).collect()
    }
}
