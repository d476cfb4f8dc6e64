//! Rows a second of the SQLite sink, beside plain prepared inserts of the same rows in the same run.
//!
//! `cargo run --release -p adapters --no-default-features --features sqlite --example sqlite_rate [batches]`

mod rate;

use adapters::{
    sink::{Mode, SinkError},
    sqlite::{SqliteConfig, SqliteSink},
};
use rate::{BATCH, Clock, Rate, delivered, plain_batches};

const DDL: &str =
    "CREATE TABLE t (id TEXT PRIMARY KEY, customer INTEGER, amount REAL, state TEXT, at TEXT, note TEXT)";

fn plain(path: &std::path::Path, batches: u64, sorted: bool, ddl: &str) -> Rate {
    let mut connection = rusqlite::Connection::open(path).expect("opens");
    connection
        .execute_batch(&format!(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA cache_size = -65536; PRAGMA wal_autocheckpoint = 8192; {ddl}"
        ))
        .expect("makes the table");
    let mut rows = plain_batches(batches);
    let (start, mut rate) = (Clock::start(), Rate::default());
    for rows in &mut rows {
        if sorted {
            rows.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        }
        let transaction = connection.transaction().expect("begins");
        {
            let mut insert = transaction
                .prepare_cached("INSERT INTO t VALUES (?1, ?2, ?3, ?4, ?5, ?6)")
                .expect("prepares");
            for r in rows {
                insert.execute(rusqlite::params![r.0, r.1, r.2, r.3, r.4, r.5]).expect("inserts");
            }
        }
        transaction.commit().expect("commits");
    }
    start.add_to(&mut rate);
    rate
}

async fn sink(
    path: &std::path::Path,
    batches: u64,
    mode: Mode,
    twice: bool,
    ddl: &str,
) -> Result<Rate, SinkError> {
    let config = SqliteConfig {
        mode,
        row_key: vec!["id".to_owned()],
        version: (mode == Mode::UpsertIfNewer).then(|| "customer".to_owned()),
        create: Some(ddl.to_owned()),
        ..SqliteConfig::new(path, "t")
    };
    delivered(&SqliteSink::new(config), batches, twice).await
}

#[tokio::main]
async fn main() -> Result<(), SinkError> {
    let batches = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(50);
    let without = format!("{DDL} WITHOUT ROWID");
    for (what, ddl) in [("rowid table", DDL), ("without rowid", &without)] {
        let file = || tempfile::tempdir().expect("a folder");
        for round in 0..2 {
            let (a, b, c, d, e, f) = (file(), file(), file(), file(), file(), file());
            let rows = (batches * BATCH as u64) as f64;
            println!("{what}, round {round}                 rows/s   rows/s of processor");
            println!(
                "  plain, in order of arrival  {}",
                plain(&a.path().join("a.db"), batches, false, ddl).of(rows)
            );
            println!(
                "  plain, sorted               {}",
                plain(&b.path().join("a.db"), batches, true, ddl).of(rows)
            );
            println!(
                "  sink insert                 {}",
                sink(&c.path().join("a.db"), batches, Mode::Insert, false, ddl).await?.of(rows)
            );
            println!(
                "  sink upsert, all new        {}",
                sink(&d.path().join("a.db"), batches, Mode::Upsert, false, ddl).await?.of(rows)
            );
            println!(
                "  sink upsert, all there      {}",
                sink(&e.path().join("a.db"), batches, Mode::Upsert, true, ddl).await?.of(rows)
            );
            println!(
                "  sink if-newer, all new      {}",
                sink(&f.path().join("a.db"), batches, Mode::UpsertIfNewer, false, ddl).await?.of(rows)
            );
        }
    }
    Ok(())
}
