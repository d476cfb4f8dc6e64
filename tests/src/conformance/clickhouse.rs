//! ClickHouse as a target: a table and a journal for each case; what both hold as tables of one SQLite connection.

use adapters::{
    clickhouse::{ClickhouseConfig, ClickhouseSink},
    sink::{Mode, Sink},
};
use rusqlite::Connection;
use tempfile::TempDir;

use super::{Place, Shape, Target};
use crate::servers::Clickhouse;

/// ClickHouse: a table and a book for each case.
#[derive(Clone, Copy, Debug)]
pub struct Tables;

/// One table and its journal's folder.
#[derive(Debug)]
pub struct TablePlace {
    table: String,
    folder: TempDir,
}

impl Target for Tables {
    type Place = TablePlace;

    async fn place(&self, _shape: &Shape) -> TablePlace {
        let columns = "(id String, version Int64, amount Int32, note String DEFAULT 'none') ENGINE = MergeTree ORDER BY id \
                       SETTINGS non_replicated_deduplication_window = 10000";
        let table = Clickhouse::shared().table("rows", columns).await;
        TablePlace { table, folder: tempfile::tempdir().expect("a temporary folder") }
    }

    fn histories(&self) -> u64 {
        2
    }
}

impl TablePlace {
    fn config(&self) -> ClickhouseConfig {
        ClickhouseConfig::new(Clickhouse::shared().url(), &self.table, self.folder.path())
    }

    fn book(&self) -> Connection {
        let book = Connection::open(self.folder.path().join("book.db")).expect("the book opens");
        book.busy_timeout(std::time::Duration::from_secs(10)).expect("a time-out");
        book
    }
}

impl Place for TablePlace {
    fn sink(&self, shape: &Shape) -> Box<dyn Sink> {
        assert_eq!(shape.mode, Mode::Insert, "the cases of a book insert");
        Box::new(ClickhouseSink::new(self.config()).expect("a good URL"))
    }

    async fn execute(&self, sql: &str) {
        self.book().execute_batch(sql).expect("the SQL of the case is right");
    }

    async fn texts(&self, sql: &str) -> Vec<Option<String>> {
        let query = format!("SELECT id, version, amount, note FROM {} FORMAT TSV", self.table);
        let lines = Clickhouse::shared().lines(&query).await;
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
