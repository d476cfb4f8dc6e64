//! Files as a target: a folder for each case, and all that is committed in it as tables.

use std::{
    fs,
    path::{Path, PathBuf},
};

use adapters::{
    files::{FilesConfig, FilesSink},
    sink::Sink,
};
use rusqlite::Connection;
use tempfile::TempDir;

use super::{Place, Shape, Target, whole::Whole};

/// Files: a folder for each case.
#[derive(Clone, Copy, Debug)]
pub struct Folders;

/// One folder.
#[derive(Debug)]
pub struct FolderPlace {
    folder: TempDir,
}

impl Target for Folders {
    type Place = FolderPlace;

    async fn place(&self, _shape: &Shape) -> FolderPlace {
        FolderPlace { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    fn histories(&self) -> u64 {
        2
    }
}

/// The lines of the finished files in `folder`, in the order of their names. Each must end in a line end.
pub fn finished_lines(folder: &Path) -> Vec<String> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .expect("the folder can be read")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "ndjson"))
        .collect();
    paths.sort();
    let text = |path: &PathBuf| fs::read_to_string(path).expect("a file of the folder");
    paths.iter().flat_map(|path| lines(&text(path))).collect()
}

fn lines(text: &str) -> Vec<String> {
    assert!(text.is_empty() || text.ends_with('\n'), "a torn line: {:?}", text.lines().last());
    text.lines().map(str::to_owned).collect()
}

/// Opens the bookkeeping of `folder`.
pub fn book(folder: &Path) -> Connection {
    let book = Connection::open(folder.join(".oncegate/book.db")).expect("the book opens");
    book.busy_timeout(std::time::Duration::from_secs(10)).expect("a time-out");
    book
}

/// The lines of `folder` that count, in finished files and in those that are not finished yet.
pub fn committed_lines(folder: &Path) -> Vec<String> {
    let mut all = finished_lines(folder);
    let book = book(folder);
    let mut open = book
        .prepare("SELECT name, bytes FROM oncegate_files WHERE state <> 'published' ORDER BY id")
        .expect("the list of files");
    let parts = open.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, usize>(1)?)));
    for part in parts.expect("the list of files") {
        let (name, bytes) = part.expect("a file");
        let text = fs::read(folder.join(format!(".oncegate/{name}.part"))).expect("a part");
        all.extend(lines(std::str::from_utf8(&text[..bytes]).expect("UTF-8")));
    }
    all
}

impl FolderPlace {
    /// The bookkeeping, with the rows as a table beside it.
    fn tables(&self) -> Connection {
        let folder = self.folder.path();
        let tables = book(folder);
        tables
            .execute_batch("CREATE TEMP TABLE rows (id text, version bigint, amount integer, note text)")
            .expect("a table");
        for line in committed_lines(folder) {
            tables
                .execute(
                    "INSERT INTO rows SELECT ?1 ->> 'id', ?1 ->> 'version', ?1 ->> 'amount', ?1 ->> 'note'",
                    [&line],
                )
                .expect("a row of the case");
        }
        tables
    }
}

impl Place for FolderPlace {
    fn sink(&self, shape: &Shape) -> Box<dyn Sink> {
        let config = FilesConfig { mode: shape.mode, roll_rows: 3, ..FilesConfig::new(self.folder.path()) };
        Box::new(Whole::new(FilesSink::new(config), |payload| payload.push(b'}')))
    }

    async fn execute(&self, sql: &str) {
        book(self.folder.path()).execute_batch(sql).expect("the SQL of the case is right");
    }

    async fn texts(&self, sql: &str) -> Vec<Option<String>> {
        let tables = self.tables();
        let mut query = tables.prepare(sql).expect("the SQL of the case is right");
        let rows = query.query_map([], |row| row.get(0)).expect("the query runs");
        rows.collect::<Result<_, _>>().expect("one text a row")
    }
}
