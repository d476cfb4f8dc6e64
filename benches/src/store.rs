//! The dedup store beside what others would use in its place. Every arm is durable: a batch of 10,000 16-byte fingerprints, a tenth
//! of them copies of live keys, is answered once it is on disk.
//!
//! `cargo run --release -p benches --features fjall,rocksdb -- store --scale full`

use std::{
    fs,
    io::{BufReader, BufWriter, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use dedup_store::Fingerprint;
use redb::TableDefinition;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

mod ours;

use crate::{
    Scale,
    plot::{Curves, svg},
    report::{Report, Row},
};

const BATCH: u64 = 10_000;
/// One record in so many is a copy.
const COPY_EVERY: u64 = 10;
/// Twelve slots of an hour.
const WINDOW_MS: i64 = 12 * 3_600_000;
/// The rivals are given so long; what they reach is said.
const RIVAL_TIME: Duration = Duration::from_secs(40);

fn fingerprint(number: u64) -> Fingerprint {
    Fingerprint(xxh3_128(&number.to_le_bytes()).to_be_bytes())
}

/// Numbers of the records of a batch: new ones from `first` on, and copies of the `live` before.
fn batch(first: u64, live: u64) -> Vec<u64> {
    let mut new = first;
    (0..BATCH)
        .map(|at| {
            if at % COPY_EVERY == COPY_EVERY - 1 && first > 0 {
                first - 1 - xxh3_64(&(first + at).to_le_bytes()) % live.min(first)
            } else {
                new += 1;
                new - 1
            }
        })
        .collect()
}

pub(crate) use ours::{Fill, fill};

pub(crate) fn run(
    scale: Scale,
    arm: &str,
    keys: Option<u64>,
    memory_bytes: Option<u64>,
    plot: Option<&Path>,
) -> Report {
    let mut curves = Curves::new();
    let mut report = Report::new("store");
    let keys = keys.unwrap_or(if scale == Scale::Full { 100_000_000 } else { 3_000_000 });
    for (name, lanes, huge_pages) in
        [("oncegate", 1, false), ("oncegate 2 lanes", 2, false), ("oncegate huge pages", 1, true)]
    {
        if name.contains(arm) {
            let fill = Fill { keys, lanes, memory_bytes: memory_bytes.unwrap_or((keys * 40).max(256 << 20)) };
            ours::measure(&mut report, name, &fill, huge_pages, &mut curves);
        }
    }
    if "redb-rows".contains(arm) {
        redb_rows(&mut report, keys, &mut curves);
    }
    #[cfg(feature = "fjall")]
    if "fjall".contains(arm) {
        lsm(&mut report, keys, &mut curves);
    }
    #[cfg(feature = "rocksdb")]
    if "rocksdb".contains(arm) {
        rocksdb(&mut report, keys, &mut curves);
    }
    if "redis".contains(arm) {
        redis(&mut report, keys, &mut curves);
    }
    for (rival, goal) in [("redb-rows", 50.0), ("fjall", 10.0), ("rocksdb", 10.0), ("redis", 20.0)] {
        report.rivals.push(("check-and-settle", "oncegate", rival, goal));
    }
    if let Some(path) = plot {
        let title = "Durable check-and-settle, 10 % copies, batches of 10,000";
        fs::write(path, svg(title, &curves)).expect("the chart is written");
    }
    report
}

fn row(
    figure: &'static str,
    arm: &'static str,
    value: f64,
    unit: &'static str,
    correct: bool,
    note: String,
) -> Row {
    Row { figure, arm, value, unit, correct, note }
}

/// Checks and settles batches as long as time lasts; `take` answers with how many were new.
fn rival(
    report: &mut Report,
    arm: &'static str,
    keys: u64,
    curves: &mut Curves,
    mut take: impl FnMut(&[[u8; 16]]) -> u64,
) {
    let mut points = Vec::new();
    let (mut next, mut wrong, mut rate) = (0, 0, 0.0);
    let start = Instant::now();
    while next < keys && start.elapsed() < RIVAL_TIME {
        let part = Instant::now();
        let from = next;
        let mut records = 0;
        // The last part is what counts: these fall as they grow.
        while part.elapsed() < RIVAL_TIME / 8 && next < keys {
            let numbers = batch(next, keys);
            let new = numbers.iter().filter(|number| **number >= next).count() as u64;
            let rows: Vec<[u8; 16]> = numbers.iter().map(|number| fingerprint(*number).0).collect();
            wrong += u64::from(take(&rows) != new);
            next += new;
            records += BATCH;
        }
        rate = records as f64 / part.elapsed().as_secs_f64();
        eprintln!("{arm}: {from} to {next} keys, {rate:.0} keys/s");
        points.push((next as f64, rate));
    }
    let note = format!("at {next} keys, which it reached in {:.0} s", start.elapsed().as_secs_f64());
    curves.push((arm, points));
    report.rows.push(row("check-and-settle", arm, rate, "keys/s", wrong == 0, note));
}

fn redb_rows(report: &mut Report, keys: u64, curves: &mut Curves) {
    const ROWS: TableDefinition<'_, [u8; 16], u64> = TableDefinition::new("rows");
    let folder = tempfile::tempdir().expect("a folder");
    let db = redb::Database::create(folder.path().join("rows.redb")).expect("a database");
    rival(report, "redb-rows", keys, curves, |rows| {
        let txn = db.begin_write().expect("a transaction");
        let mut new = 0;
        {
            let mut table = txn.open_table(ROWS).expect("a table");
            for row in rows {
                new += u64::from(table.insert(*row, 1).expect("a row").is_none());
            }
        }
        txn.commit().expect("durable");
        new
    });
}

#[cfg(feature = "fjall")]
fn lsm(report: &mut Report, keys: u64, curves: &mut Curves) {
    let folder = tempfile::tempdir().expect("a folder");
    let db = fjall::Database::builder(folder.path()).open().expect("a database");
    let rows = db.keyspace("rows", fjall::KeyspaceCreateOptions::default).expect("a keyspace");
    rival(report, "fjall", keys, curves, |batch| {
        let mut write = db.batch();
        let mut new = 0;
        for row in batch {
            if rows.get(row).expect("a look").is_none() {
                write.insert(&rows, row, []);
                new += 1;
            }
        }
        write.commit().expect("a commit");
        db.persist(fjall::PersistMode::SyncAll).expect("durable");
        new
    });
}

/// A look at all keys of a batch at once, behind a Bloom filter of 10 bits a key; then one write with a synced log.
#[cfg(feature = "rocksdb")]
fn rocksdb(report: &mut Report, keys: u64, curves: &mut Curves) {
    use rocksdb::{BlockBasedOptions, Cache, DB, Options, WriteBatch, WriteOptions};

    let folder = tempfile::tempdir().expect("a folder");
    let mut blocks = BlockBasedOptions::default();
    blocks.set_bloom_filter(10.0, false);
    // Filters and blocks may take what our arm may.
    blocks.set_block_cache(&Cache::new_lru_cache(((keys * 40).max(256 << 20)) as usize));
    let mut options = Options::default();
    options.create_if_missing(true);
    options.set_block_based_table_factory(&blocks);
    options.increase_parallelism(2);
    options.set_max_background_jobs(2);
    let db = DB::open(&options, folder.path()).expect("a database");
    let mut durable = WriteOptions::default();
    durable.set_sync(true);
    rival(report, "rocksdb", keys, curves, |batch| {
        let mut write = WriteBatch::default();
        let mut new = 0;
        for (row, known) in batch.iter().zip(db.multi_get(batch)) {
            if known.expect("a look").is_none() {
                write.put(row, []);
                new += 1;
            }
        }
        db.write_opt(write, &durable).expect("durable");
        new
    });
}

/// Stops its server when it is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// `SET NX EX`, pipelined by 1,000, with an fsync for each.
fn redis(report: &mut Report, keys: u64, curves: &mut Curves) {
    let folder = tempfile::tempdir().expect("a folder");
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let server = Command::new("redis-server")
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"])
        .args(["--appendfsync", "always", "--dir"])
        .arg(folder.path())
        .stdout(Stdio::null())
        .spawn();
    let Ok(server) = server else {
        eprintln!("redis: no redis-server is installed here; the arm is left out");
        return;
    };
    let _server = Server(server);
    let until = Instant::now() + Duration::from_secs(10);
    let stream = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < until, "redis does not come up: {error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let mut answers = BufReader::new(stream.try_clone().expect("a stream"));
    let mut asks = BufWriter::with_capacity(1 << 20, stream);
    rival(report, "redis", keys, curves, |batch| {
        let mut new = 0;
        for part in batch.chunks(1_000) {
            for row in part {
                asks.write_all(b"*6\r\n$3\r\nSET\r\n$16\r\n").expect("sent");
                asks.write_all(row).expect("sent");
                asks.write_all(b"\r\n$1\r\n1\r\n$2\r\nNX\r\n$2\r\nEX\r\n$5\r\n43200\r\n").expect("sent");
            }
            asks.flush().expect("sent");
            for _ in part {
                // "+OK\r\n" or "$-1\r\n".
                let mut answer = [0; 5];
                answers.read_exact(&mut answer).expect("an answer");
                new += u64::from(answer == *b"+OK\r\n");
            }
        }
        new
    });
}
