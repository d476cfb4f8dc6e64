//! Rows a second of the DuckDB sink, beside the bare appender with the same rows and commits in the same run.
//!
//! `cargo run --release -p adapters --no-default-features --features duckdb --example duckdb_rate [batches]`

mod rate;

use adapters::{
    duckdb::{DuckdbConfig, DuckdbSink, FileConnection},
    sink::{Mode, SinkError},
};
use rate::{BATCH, Clock, Rate, delivered, plain_batches};

const KEYED: &str = "CREATE TABLE t (id VARCHAR PRIMARY KEY, customer BIGINT, amount DOUBLE, state VARCHAR, \"at\" VARCHAR, note VARCHAR)";

/// One appender and one commit a batch.
fn appender(path: &std::path::Path, batches: u64, ddl: &str) -> Rate {
    let connection = FileConnection::open(path).expect("opens");
    connection.execute_batch(ddl).expect("makes the table");
    let rows = plain_batches(batches);
    let (start, mut rate) = (Clock::start(), Rate::default());
    for rows in &rows {
        connection.execute_batch("BEGIN").expect("begins");
        {
            let mut appender = connection.appender("t").expect("an appender");
            for r in rows {
                appender.append_row(duckdb::params![r.0, r.1, r.2, r.3, r.4, r.5]).expect("appends");
            }
            appender.flush().expect("flushes");
        }
        connection.execute_batch("COMMIT").expect("commits");
    }
    start.add_to(&mut rate);
    rate
}

async fn sink(
    path: &std::path::Path,
    batches: u64,
    mode: Mode,
    keyed: bool,
    twice: bool,
    ddl: &str,
) -> Result<Rate, SinkError> {
    let config = DuckdbConfig {
        mode,
        row_key: if keyed { vec!["id".to_owned()] } else { Vec::new() },
        version: (mode == Mode::UpsertIfNewer).then(|| "customer".to_owned()),
        create: Some(ddl.to_owned()),
        ..DuckdbConfig::new(path, "t")
    };
    delivered(&DuckdbSink::new(config), batches, twice).await
}

#[tokio::main]
async fn main() -> Result<(), SinkError> {
    let batches = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(50);
    let bare = KEYED.replace(" PRIMARY KEY", "");
    let file = || tempfile::tempdir().expect("a folder");
    for round in 0..2 {
        let rows = (batches * BATCH as u64) as f64;
        println!("round {round}                          rows/s   rows/s of processor");
        for (what, ddl) in [("no key", bare.as_str()), ("key", KEYED)] {
            let folder = file();
            println!(
                "  appender, {what:<8}          {}",
                appender(&folder.path().join("a.db"), batches, ddl).of(rows)
            );
        }
        for (what, mode, ddl, keyed, twice) in [
            ("insert, no key", Mode::Insert, bare.as_str(), false, false),
            ("insert, key", Mode::Insert, KEYED, true, false),
            ("upsert, all new", Mode::Upsert, KEYED, true, false),
            ("upsert, all there", Mode::Upsert, KEYED, true, true),
            ("if-newer, all new", Mode::UpsertIfNewer, KEYED, true, false),
        ] {
            let folder = file();
            let rate = sink(&folder.path().join("a.db"), batches, mode, keyed, twice, ddl).await?;
            println!("  sink {what:<18}     {}", rate.of(rows));
        }
    }
    Ok(())
}
