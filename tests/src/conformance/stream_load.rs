//! StarRocks and Doris as targets: a table and a journal for each case; what both hold as tables of one SQLite connection.

use adapters::{
    sink::{Mode, Sink},
    stream_load::{Dialect, StreamLoadConfig, StreamLoadSink},
};
use rusqlite::Connection;
use tempfile::TempDir;

use super::{Place, Shape, Target};
use crate::servers::{
    StreamLoad,
    stream_load::{Model, TableSpec},
};

/// A table and a book for each case.
#[derive(Clone, Copy, Debug)]
pub struct Loads(pub Dialect);

/// One table and its journal's folder.
#[derive(Debug)]
pub struct LoadPlace {
    dialect: Dialect,
    table: String,
    folder: TempDir,
}

impl Target for Loads {
    type Place = LoadPlace;

    async fn place(&self, _shape: &Shape) -> LoadPlace {
        let table = StreamLoad::shared(self.0).table(&TableSpec {
            columns: vec![
                ("id", "varchar(100)", "NOT NULL"),
                ("version", "bigint", "NULL"),
                ("amount", "int", "NULL"),
                ("note", "varchar(1000)", "NULL DEFAULT \"none\""),
            ],
            model: Model::Duplicate,
            key: 1,
            sequence: None,
        });
        LoadPlace { dialect: self.0, table, folder: tempfile::tempdir().expect("a temporary folder") }
    }

    fn histories(&self) -> u64 {
        2
    }
}

impl LoadPlace {
    fn book(&self) -> Connection {
        let book = Connection::open(self.folder.path().join("book.db")).expect("the book opens");
        book.busy_timeout(std::time::Duration::from_secs(10)).expect("a time-out");
        book
    }
}

impl Place for LoadPlace {
    fn sink(&self, shape: &Shape) -> Box<dyn Sink> {
        assert_eq!(shape.mode, Mode::Insert, "the cases of a book insert");
        let url = StreamLoad::shared(self.dialect).url();
        let config = StreamLoadConfig::new(self.dialect, url, &self.table, self.folder.path());
        Box::new(StreamLoadSink::new(config).expect("a good URL"))
    }

    async fn execute(&self, sql: &str) {
        self.book().execute_batch(sql).expect("the SQL of the case is right");
    }

    async fn texts(&self, sql: &str) -> Vec<Option<String>> {
        let lines = StreamLoad::shared(self.dialect).rows(&self.table, &["id", "version", "amount", "note"]);
        let book = self.book();
        book.execute_batch("CREATE TEMP TABLE rows (id text, version bigint, amount integer, note text)")
            .expect("a table");
        for line in lines {
            let row: Vec<&str> = line.split('\t').collect();
            book.execute("INSERT INTO rows VALUES (?1, ?2, ?3, ?4)", rusqlite::params_from_iter(row))
                .expect("a row of the case");
        }
        let mut query = book.prepare(sql).expect("the SQL of the case is right");
        let rows = query.query_map([], |row| row.get(0)).expect("the query runs");
        rows.collect::<Result<_, _>>().expect("one text a row")
    }
}
