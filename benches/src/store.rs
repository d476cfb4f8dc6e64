//! The dedup store beside what others would use in its place. Every arm is durable: a batch of 10,000 16-byte fingerprints, a tenth
//! of them copies of live keys, is answered once it is on disk.
//!
//! `cargo run --release -p benches --features fjall,rocksdb -- store --scale full`

use std::{
    fs,
    io::{BufRead, BufReader, BufWriter, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use dedup_store::{
    Algorithm, Block, Checkpoint, Digest, Entry, Fingerprint, Hasher, Identity, Item, Settled, Store,
    StoreOptions, Ticket, Verdict,
};
use redb::TableDefinition;
use serde_json::{Value, json};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

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

fn item_at(number: u64, event_ms: i64) -> Item {
    Item {
        fingerprint: fingerprint(number),
        digest: Digest(number & 0xffff_ffff),
        event_ms,
        floor_ms: i64::MIN,
        admit_late: false,
        replay_dead_letter: false,
    }
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

fn identity() -> Identity {
    Identity {
        route_id: *b"bench-route-0001",
        key_spec_id: 1,
        algorithm: Algorithm::Xxh3Secret,
        secret: [7; 192],
    }
}

fn options(memory_bytes: u64) -> StoreOptions {
    StoreOptions {
        window_ms: WINDOW_MS,
        lateness_ms: 0,
        idle_after_ms: 30_000,
        max_disk_bytes: 1 << 40,
        max_memory_bytes: memory_bytes,
        commit_interval_ms: 5,
    }
}

/// Our arm: claims, settles, and waits for the batch before.
struct Ours {
    store: Arc<Store>,
    hasher: Hasher,
    live: u64,
    next: u64,
    batches: i64,
    last: Option<Ticket>,
    verdicts: Vec<Verdict>,
    wrong: u64,
    longest_check: Duration,
    longest_settle: Duration,
}

impl Ours {
    fn new(store: Arc<Store>, live: u64) -> Self {
        let hasher = store.bind(&identity()).expect("the store is bound");
        Ours {
            store,
            hasher,
            live,
            next: 0,
            batches: 0,
            last: None,
            verdicts: Vec::new(),
            wrong: 0,
            longest_check: Duration::ZERO,
            longest_settle: Duration::ZERO,
        }
    }

    fn event_ms(&self, number: u64) -> i64 {
        (number as i128 * i128::from(WINDOW_MS) / i128::from(self.live)) as i64
    }

    fn step(&mut self) {
        let numbers = batch(self.next, self.live);
        let item = |&number: &u64| item_at(number, self.event_ms(number));
        let items: Vec<Item> = numbers.iter().map(item).collect();
        self.verdicts.clear();
        let start = Instant::now();
        self.store.claim(0, i64::MAX, &items, &mut self.verdicts).expect("the store has room");
        self.longest_check = self.longest_check.max(start.elapsed());
        let mut entries = Vec::with_capacity(items.len());
        for ((item, verdict), number) in items.iter().zip(&self.verdicts).zip(&numbers) {
            match verdict {
                Verdict::New { late: false } if *number >= self.next => entries.push(Entry {
                    fingerprint: item.fingerprint,
                    digest: item.digest,
                    event_ms: item.event_ms,
                    settled: Settled::Written,
                }),
                Verdict::Duplicate(Settled::Written) if *number < self.next => {}
                // The oldest live keys may just have expired.
                Verdict::Late { .. } if *number < self.next => {}
                _ => self.wrong += 1,
            }
        }
        self.next += entries.len() as u64;
        self.batches += 1;
        let watermark_ms = self.event_ms(self.next);
        let block = Block::encode(&self.hasher, "http/0", self.batches, entries);
        let checkpoint = Checkpoint {
            shard: "http/0".into(),
            sequence: self.batches,
            position: None,
            watermark_ms,
            floor_ms: i64::MIN,
        };
        let start = Instant::now();
        let ticket = self.store.settle(&[checkpoint], &[block], watermark_ms).expect("it settles");
        self.longest_settle = self.longest_settle.max(start.elapsed());
        if let Some(last) = self.last.replace(ticket) {
            self.store.wait_durable(last).expect("it is durable");
        }
    }

    /// Runs for a time, or so many records; answers with records a second.
    fn run(&mut self, time: Duration, records: u64) -> f64 {
        let start = Instant::now();
        let mut done = 0;
        while done < records && start.elapsed() < time {
            self.step();
            done += BATCH;
        }
        if let Some(last) = self.last {
            self.store.wait_durable(last).expect("it is durable");
        }
        done as f64 / start.elapsed().as_secs_f64()
    }
}

/// The other process: fills a store, measures, says what it found, and waits to be killed.
pub(crate) fn fill(folder: &Path, keys: u64, memory_bytes: u64) {
    let store = Arc::new(Store::open(folder, options(memory_bytes)).expect("the store opens"));
    let mut ours = Ours::new(Arc::clone(&store), keys);
    let over = Arc::new(AtomicBool::new(false));
    let expiry = std::thread::spawn({
        let (store, over) = (Arc::clone(&store), Arc::clone(&over));
        move || {
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(200));
                store.expire(0).expect("it expires");
            }
        }
    });
    // Past the window by a tenth, so that slots have expired.
    let part = (keys / 12).max(BATCH);
    let written = io_bytes();
    while ours.next < keys + keys / 10 {
        let rate = ours.run(Duration::MAX, part);
        println!("{}", json!({ "keys": ours.next, "rate": rate }));
    }
    let written = (io_bytes() - written) as f64 / ours.next as f64;
    (ours.longest_check, ours.longest_settle) = (Duration::ZERO, Duration::ZERO);
    let steady = ours.run(Duration::from_secs(30), keys / 4);
    let stats = store.stats(0);
    let one = one_by_one(&ours);
    over.store(true, Ordering::Relaxed);
    expiry.join().expect("expiry goes on");
    let probes = stats.slots.iter().map(|slot| slot.false_positives).sum::<u64>();
    println!(
        "{}",
        json!({
            "done": true, "steady": steady, "next": ours.next, "wrong": ours.wrong,
            "keys": stats.keys, "slots": stats.slots.len(),
            "memory_per_key": stats.memory_bytes as f64 / stats.keys as f64,
            "rss_per_key": rss_bytes() as f64 / stats.keys as f64,
            "disk_per_key": stats.disk_bytes as f64 / stats.keys as f64,
            "written_per_key": written,
            "longest_check_ms": ours.longest_check.as_secs_f64() * 1e3,
            "longest_settle_ms": ours.longest_settle.as_secs_f64() * 1e3,
            "false_positives": probes as f64 / ours.next as f64,
            "claim_new_ns": one.0, "claim_duplicate_ns": one.1,
        })
    );
    std::thread::sleep(Duration::from_secs(3_600));
}

/// Nanoseconds of a claim of one new key, and of one that is in memory, not waiting for the disk.
fn one_by_one(ours: &Ours) -> (f64, f64) {
    const CALLS: u64 = 200_000;
    let item = |number: u64| item_at(number, ours.event_ms(ours.next));
    let mut verdicts = Vec::with_capacity(1);
    let mut time = |items: &[Item]| {
        let start = Instant::now();
        for item in items {
            verdicts.clear();
            ours.store.claim(1, i64::MAX, std::slice::from_ref(item), &mut verdicts).expect("it has room");
        }
        start.elapsed().as_nanos() as f64 / items.len() as f64
    };
    let new: Vec<Item> = (0..CALLS).map(|number| item((1 << 60) + number)).collect();
    let new_ns = time(&new);
    ours.store.release_lane(1);
    let recent: Vec<Item> = (0..CALLS).map(|number| item(ours.next - 1 - number % BATCH)).collect();
    (new_ns, time(&recent))
}

fn io_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/io").unwrap_or_default();
    field(&text, "write_bytes:")
}

fn rss_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    field(&text, "VmRSS:") * 1024
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

pub(crate) fn run(scale: Scale, arm: &str, keys: Option<u64>, plot: Option<&Path>) -> Report {
    let mut curves = Curves::new();
    let mut report = Report::new("store");
    let keys = keys.unwrap_or(if scale == Scale::Full { 100_000_000 } else { 3_000_000 });
    if "oncegate".contains(arm) {
        ours(&mut report, keys, &mut curves);
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

fn ours(report: &mut Report, keys: u64, curves: &mut Curves) {
    let folder = tempfile::tempdir().expect("a folder");
    // For tables of a twelfth of the keys and more, and filters.
    let memory_bytes = (keys * 40).max(256 << 20);
    let mut child = Command::new(std::env::current_exe().expect("a path"))
        .args(["store-fill", "--folder"])
        .arg(folder.path())
        .args(["--keys", &keys.to_string(), "--memory-bytes", &memory_bytes.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut points = Vec::new();
    let done = loop {
        let line = lines.next().expect("it goes on to its end").expect("it speaks");
        let line: Value = serde_json::from_str(&line).expect("JSON");
        if line["done"] == true {
            break line;
        }
        let of = |name: &str| line[name].as_f64().unwrap_or(0.0);
        eprintln!("oncegate: {} keys, {:.0} keys/s", of("keys"), of("rate"));
        points.push((of("keys").min(keys as f64), of("rate")));
    };
    curves.push(("oncegate", points));
    child.kill().and_then(|()| child.wait()).expect("it dies");
    let of = |name: &str| done[name].as_f64().unwrap_or(f64::NAN);
    let next = done["next"].as_u64().unwrap_or(0);
    let start = Instant::now();
    let store = Arc::new(Store::open(folder.path(), options(memory_bytes)).expect("it opens again"));
    let ours = Ours::new(Arc::clone(&store), keys);
    let mut verdicts = Vec::new();
    let item = |number: u64| item_at(number, ours.event_ms(number));
    store.claim(0, i64::MAX, &[item(next - 1)], &mut verdicts).expect("a verdict");
    let restart = start.elapsed().as_secs_f64();
    let live: Vec<Item> =
        (0..20_000).map(|at| item(next - 1 - xxh3_64(&u64::to_le_bytes(at)) % (keys - keys / 100))).collect();
    store.claim(0, i64::MAX, &live, &mut verdicts).expect("verdicts");
    let sound = verdicts.iter().all(|verdict| *verdict == Verdict::Duplicate(Settled::Written));
    let right = done["wrong"] == 0 && sound;
    let note = format!("{keys} live keys in {} slots, 10 % copies", done["slots"]);
    report.rows.push(row("check-and-settle", "oncegate", of("steady"), "keys/s", right, note));
    let each = [
        ("memory a key", "memory_per_key", "bytes", "goal 6, with the open slot"),
        ("resident memory a key", "rss_per_key", "bytes", ""),
        ("disk a key", "disk_per_key", "bytes", "goal 24"),
        ("written a key", "written_per_key", "bytes", "goal 48: 3 times a fingerprint"),
        ("longest check of 10,000 keys", "longest_check_ms", "ms", "while slots are sealed and expire"),
        (
            "longest settle of 10,000 keys",
            "longest_settle_ms",
            "ms",
            "with waits for the disk and for sealing",
        ),
        ("claim of one new key", "claim_new_ns", "ns", "goal 300"),
        ("claim of one copy in memory", "claim_duplicate_ns", "ns", "goal 150"),
        ("needless reads", "false_positives", "a key", ""),
    ];
    for (figure, name, unit, note) in each {
        let note = format!("{:.4}; {note}", of(name));
        report.rows.push(row(figure, "oncegate", of(name), unit, right, note));
    }
    let note = format!("{restart:.2} s to the first verdict; goal 2 s");
    report.rows.push(row("restart after kill -9", "oncegate", restart, "s", sound, note));
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
        db.write_opt(&write, &durable).expect("durable");
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
