//! DuckDB as a target: a file for each case, looked into beside the sink, in its process.

use adapters::{
    duckdb::{DuckdbConfig, DuckdbSink, FileConnection},
    sink::Sink,
};
use tempfile::TempDir;

use super::{DDL, Place, Shape, Target};

/// DuckDB: a file for each case.
#[derive(Clone, Copy, Debug)]
pub struct Duckdb;

/// A file in a folder of its own.
#[derive(Debug)]
pub struct DuckdbPlace {
    // Before `folder`: the file is closed first.
    connection: FileConnection,
    folder: TempDir,
}

impl Target for Duckdb {
    type Place = DuckdbPlace;

    async fn place(&self, _shape: &Shape) -> DuckdbPlace {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let connection = FileConnection::open(&folder.path().join("rows.db")).expect("the file opens");
        let place = DuckdbPlace { connection, folder };
        place.execute(DDL).await;
        place
    }

    fn histories(&self) -> u64 {
        6
    }

    fn takes(&self, _column: &str, json: &str) -> bool {
        // A text may hold any character.
        json.contains("\\u0000")
    }
}

impl Place for DuckdbPlace {
    fn sink(&self, shape: &Shape) -> Box<dyn Sink> {
        Box::new(DuckdbSink::new(DuckdbConfig {
            mode: shape.mode,
            row_key: shape.row_key(),
            version: shape.version(),
            columns: shape.columns.clone(),
            ..DuckdbConfig::new(self.folder.path().join("rows.db"), shape.table)
        }))
    }

    async fn execute(&self, sql: &str) {
        self.connection.execute_batch(sql).expect("the SQL of the case is right");
    }

    async fn texts(&self, sql: &str) -> Vec<Option<String>> {
        let mut query = self.connection.prepare(sql).expect("the SQL of the case is right");
        let rows = query.query_map([], |row| row.get(0)).expect("the query runs");
        rows.collect::<Result<_, _>>().expect("one text a row")
    }
}
