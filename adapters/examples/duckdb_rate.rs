//! Rows a second of the DuckDB sink, beside the bare appender with the same rows and commits in the same run.
//!
//! `cargo run --release -p adapters --no-default-features --features duckdb --example duckdb_rate [batches]`

use std::{sync::Arc, time::Instant};

use adapters::{
    duckdb::{DuckdbConfig, DuckdbSink, FileConnection},
    sink::{Acquire, Batch, MarkBlock, Mode, Row, RowKind, RowOutcome, ShardStep, Sink, SinkError, Source},
    value::Value,
};
use bytes::Bytes;

const BATCH: usize = 10_000;
const KEYED: &str = "CREATE TABLE t (id VARCHAR PRIMARY KEY, customer BIGINT, amount DOUBLE, state VARCHAR, \"at\" VARCHAR, note VARCHAR)";

/// One record's values as JSON text.
fn record(n: u64) -> [String; 6] {
    let mixed = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    [
        format!("\"order-{mixed:016x}\""),
        format!("{}", n % 100_000),
        format!("{}.25", n % 1000),
        "\"shipped\"".to_owned(),
        format!("\"2024-01-01T00:00:{:02}.{:06}Z\"", n % 60, n % 1_000_000),
        format!("\"a note of some forty characters, {:08}\"", n % 99_999_999),
    ]
}

/// Wall and processor time of the whole process.
#[derive(Clone, Copy)]
struct Clock {
    wall: Instant,
    cpu: f64,
}

/// Rows a second of wall time, and of processor time (which a busy machine does not distort as much).
#[derive(Clone, Copy, Default)]
struct Rate {
    wall: f64,
    cpu: f64,
}

impl Clock {
    fn start() -> Self {
        Self { wall: Instant::now(), cpu: cpu_seconds() }
    }

    fn add_to(self, rate: &mut Rate) {
        rate.wall += self.wall.elapsed().as_secs_f64();
        rate.cpu += cpu_seconds() - self.cpu;
    }
}

/// User and system time of all threads, in ticks of 10 ms.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

impl Rate {
    fn of(self, rows: f64) -> String {
        format!("{:9.0} {:9.0}", rows / self.wall, rows / self.cpu)
    }
}

type Plain = (String, i64, f64, String, String, String);

/// One appender and one commit a batch.
fn appender(path: &std::path::Path, batches: u64, ddl: &str) -> Rate {
    let connection = FileConnection::open(path).expect("opens");
    connection.execute_batch(ddl).expect("makes the table");
    let rows: Vec<Vec<Plain>> = (0..batches)
        .map(|batch| {
            (0..BATCH as u64)
                .map(|n| {
                    let r = record(batch * BATCH as u64 + n);
                    let text = |s: &String| s.trim_matches('"').to_owned();
                    (
                        text(&r[0]),
                        r[1].parse().expect("integer"),
                        r[2].parse().expect("double"),
                        text(&r[3]),
                        text(&r[4]),
                        text(&r[5]),
                    )
                })
                .collect()
        })
        .collect();
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
    let sink = DuckdbSink::new(config);
    let encoder = sink.probe().await.expect("fits");
    let mut session = sink.session("r", "me");
    let state = session.acquire(&["s".into()], Acquire::Force).await?;
    let records: Vec<[String; 6]> = (0..batches * BATCH as u64).map(record).collect();
    let mut delivering = Rate::default();
    let mut sequence = 0;
    for round in 0..if twice { 2 } else { 1 } {
        if round == 1 {
            delivering = Rate::default();
        }
        for batch in records.chunks(BATCH) {
            let (mut bytes, mut keys) = (Vec::new(), Vec::new());
            let mut ends = Vec::with_capacity(BATCH);
            for record in batch {
                let values = record.each_ref().map(|json| Value::Json(json));
                encoder.encode(RowKind::Write, &values, &mut bytes, &mut keys).expect("encodes");
                ends.push((bytes.len(), keys.len()));
            }
            let source = Source { step: 0, position: None, key: &[], payload: None, event_ms: 0 };
            let mut at = (0, 0);
            let rows: Vec<Row<'_>> = ends
                .iter()
                .map(|&end| {
                    let row = Row {
                        kind: RowKind::Write,
                        bytes: &bytes[at.0..end.0],
                        row_key: &keys[at.1..end.1],
                        source,
                    };
                    at = end;
                    row
                })
                .collect();
            sequence += 1;
            let steps = [ShardStep {
                shard: Arc::from("s"),
                epoch: state[0].epoch,
                sequence,
                position: None,
                watermark_ms: 0,
            }];
            let block = Bytes::from(vec![7; 28 * BATCH]);
            let seal = move |outcomes: &[RowOutcome]| {
                vec![MarkBlock { step: 0, min_ms: 0, max_ms: 0, count: outcomes.len(), block: block.clone() }]
            };
            let start = Clock::start();
            session
                .deliver(&Batch {
                    steps: &steps,
                    rows: &rows,
                    dead_letters: &[],
                    on_refused: adapters::sink::OnRefused::Report,
                    known_new: true,
                    seal: &seal,
                })
                .await?;
            start.add_to(&mut delivering);
        }
    }
    Ok(delivering)
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
