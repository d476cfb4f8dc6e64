//! Our arm.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use dedup_store::{
    Algorithm, Block, Checkpoint, Digest, Entry, Hasher, Identity, Item, Settled, Store, StoreOptions,
    Ticket, Verdict,
};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::{BATCH, WINDOW_MS, batch, fingerprint, row};
use crate::{plot::Curves, report::Report};

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
        // Its clock is the event time: no lane is idle.
        idle_after_ms: i64::MAX,
        max_disk_bytes: 1 << 40,
        max_memory_bytes: memory_bytes,
        commit_interval_ms: 5,
    }
}

fn checkpoint(lane: u32, sequence: i64, watermark_ms: i64) -> Checkpoint {
    Checkpoint {
        shard: format!("http/{lane}").into(),
        sequence,
        epoch: 1,
        position: None,
        watermark_ms,
        floor_ms: i64::MIN,
    }
}

/// Our arm: claims, settles, and waits for the batch before.
struct Ours {
    lane: u32,
    lanes: u64,
    store: Arc<Store>,
    hasher: Hasher,
    live: u64,
    next: u64,
    batches: i64,
    last: Option<Ticket>,
    verdicts: Vec<Verdict>,
    wrong: u64,
    checks: Vec<Duration>,
    settles: Vec<Duration>,
}

impl Ours {
    fn new(store: Arc<Store>, lane: u32, fill: &Fill) -> Self {
        let hasher = store.bind(&identity()).expect("the store is bound");
        // All lanes are there before one of them moves the watermark on.
        store.settle(&[checkpoint(lane, 0, 0)], &[], 0).expect("it settles");
        Ours {
            lane,
            lanes: u64::from(fill.lanes),
            store,
            hasher,
            live: fill.keys / u64::from(fill.lanes),
            next: 0,
            batches: 0,
            last: None,
            verdicts: Vec::new(),
            wrong: 0,
            checks: Vec::new(),
            settles: Vec::new(),
        }
    }

    fn event_ms(&self, number: u64) -> i64 {
        (number as i128 * i128::from(WINDOW_MS) / i128::from(self.live)) as i64
    }

    /// Each lane has numbers of its own.
    fn item(&self, number: u64) -> Item {
        item_at(number * self.lanes + u64::from(self.lane), self.event_ms(number))
    }

    fn step(&mut self) {
        let numbers = batch(self.next, self.live);
        let items: Vec<Item> = numbers.iter().map(|number| self.item(*number)).collect();
        self.verdicts.clear();
        let start = Instant::now();
        self.store.claim(self.lane, i64::MAX, &items, &mut self.verdicts).expect("the store has room");
        self.checks.push(start.elapsed());
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
        let checkpoint = checkpoint(self.lane, self.batches, watermark_ms);
        let block = Block::encode(&self.hasher, &checkpoint.shard, self.batches, entries);
        let start = Instant::now();
        let ticket = self.store.settle(&[checkpoint], &[block], watermark_ms).expect("it settles");
        self.settles.push(start.elapsed());
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

/// What the other process fills a store with.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Fill {
    /// Live keys.
    #[arg(long)]
    pub(crate) keys: u64,
    /// Threads that check and settle.
    #[arg(long)]
    pub(crate) lanes: u32,
    /// Of tables and filters.
    #[arg(long)]
    pub(crate) memory_bytes: u64,
}

/// All lanes at once; answers with records a second.
fn run_all(lanes: &mut [Ours], time: Duration, records: u64) -> f64 {
    std::thread::scope(|scope| {
        let running: Vec<_> =
            lanes.iter_mut().map(|lane| scope.spawn(move || lane.run(time, records))).collect();
        running.into_iter().map(|lane| lane.join().expect("no panic")).sum()
    })
}

/// The other process: fills a store, measures, says what it found, and waits to be killed.
pub(crate) fn fill(folder: &Path, fill: &Fill) {
    let store = Arc::new(Store::open(folder, options(fill.memory_bytes)).expect("the store opens"));
    let mut lanes: Vec<Ours> =
        (0..fill.lanes).map(|lane| Ours::new(Arc::clone(&store), lane, fill)).collect();
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
    let of_lane = fill.keys / u64::from(fill.lanes);
    let part = (of_lane / 12).max(BATCH);
    let written = io_bytes();
    while lanes[0].next < of_lane + of_lane / 10 {
        let rate = run_all(&mut lanes, Duration::MAX, part);
        let keys: u64 = lanes.iter().map(|lane| lane.next).sum();
        println!("{}", json!({ "keys": keys, "rate": rate }));
    }
    let all: u64 = lanes.iter().map(|lane| lane.next).sum();
    let written = (io_bytes() - written) as f64 / all as f64;
    for lane in &mut lanes {
        (lane.checks, lane.settles) = (Vec::new(), Vec::new());
    }
    let steady = run_all(&mut lanes, Duration::from_secs(30), of_lane / 4);
    let stats = store.stats(0);
    let one = one_by_one(&lanes[0]);
    over.store(true, Ordering::Relaxed);
    expiry.join().expect("expiry goes on");
    let probes = stats.slots.iter().map(|slot| slot.false_positives).sum::<u64>();
    let checks = sorted(lanes.iter().flat_map(|lane| &lane.checks));
    let settles = sorted(lanes.iter().flat_map(|lane| &lane.settles));
    let all: u64 = lanes.iter().map(|lane| lane.next).sum();
    println!(
        "{}",
        json!({
            "done": true, "steady": steady, "next": lanes[0].next,
            "wrong": lanes.iter().map(|lane| lane.wrong).sum::<u64>(),
            "keys": stats.keys, "slots": stats.slots.len(),
            "memory_per_key": stats.memory_bytes as f64 / stats.keys as f64,
            "planned_per_key": stats.plan.map(|plan| plan.memory_bytes as f64 / plan.keys as f64),
            "rss_per_key": rss_bytes() as f64 / stats.keys as f64,
            "disk_per_key": stats.disk_bytes as f64 / stats.keys as f64,
            "written_per_key": written,
            "usual_check_ms": checks[checks.len() / 2],
            "slow_check_ms": checks[checks.len() * 99 / 100],
            "longest_check_ms": checks[checks.len() - 1],
            "usual_settle_ms": settles[settles.len() / 2],
            "longest_settle_ms": settles[settles.len() - 1],
            "false_positives": probes as f64 / all as f64,
            "claim_new_ns": one.0, "claim_duplicate_ns": one.1,
        })
    );
    std::thread::sleep(Duration::from_secs(3_600));
}

/// In ms.
fn sorted<'a>(times: impl Iterator<Item = &'a Duration>) -> Vec<f64> {
    let mut times: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
    times.sort_by(f64::total_cmp);
    times
}

/// Nanoseconds of a claim of one new key, and of one that is in memory, not waiting for the disk.
fn one_by_one(ours: &Ours) -> (f64, f64) {
    const CALLS: u64 = 200_000;
    let item = |number: u64| Item { event_ms: ours.event_ms(ours.next), ..ours.item(number) };
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

pub(super) fn measure(
    report: &mut Report,
    arm: &'static str,
    fill: &Fill,
    huge_pages: bool,
    curves: &mut Curves,
) {
    let keys = fill.keys;
    let folder = tempfile::tempdir().expect("a folder");
    let mut child = Command::new(std::env::current_exe().expect("a path"));
    if huge_pages {
        // glibc asks the system for huge pages then.
        child.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
    }
    let mut child = child
        .args(["store-fill", "--folder"])
        .arg(folder.path())
        .args(["--keys", &keys.to_string(), "--lanes", &fill.lanes.to_string()])
        .args(["--memory-bytes", &fill.memory_bytes.to_string()])
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
        eprintln!("{arm}: {} keys, {:.0} keys/s", of("keys"), of("rate"));
        points.push((of("keys").min(keys as f64), of("rate")));
    };
    curves.push((arm, points));
    child.kill().and_then(|()| child.wait()).expect("it dies");
    let of = |name: &str| done[name].as_f64().unwrap_or(f64::NAN);
    let next = done["next"].as_u64().unwrap_or(0);
    let start = Instant::now();
    let store = Arc::new(Store::open(folder.path(), options(fill.memory_bytes)).expect("it opens again"));
    let ours = Ours::new(Arc::clone(&store), 0, fill);
    let mut verdicts = Vec::new();
    store.claim(0, i64::MAX, &[ours.item(next - 1)], &mut verdicts).expect("a verdict");
    let restart = start.elapsed().as_secs_f64();
    let within = ours.live - ours.live / 100;
    let live: Vec<Item> =
        (0..20_000).map(|at| ours.item(next - 1 - xxh3_64(&u64::to_le_bytes(at)) % within)).collect();
    store.claim(0, i64::MAX, &live, &mut verdicts).expect("verdicts");
    let sound = verdicts.iter().all(|verdict| *verdict == Verdict::Duplicate(Settled::Written));
    let right = done["wrong"] == 0 && sound;
    let note = format!("{keys} live keys in {} slots, 10 % copies", done["slots"]);
    report.rows.push(row("check-and-settle", arm, of("steady"), "keys/s", right, note));
    let each = [
        ("memory a key", "memory_per_key", "bytes", "goal 6, with the open slot"),
        ("resident memory a key", "rss_per_key", "bytes", ""),
        ("disk a key", "disk_per_key", "bytes", "goal 24"),
        ("written a key", "written_per_key", "bytes", "goal 48: 3 times a fingerprint"),
        ("planned memory a key", "planned_per_key", "bytes", "what the store expects at this pace"),
        ("usual check of 10,000 keys", "usual_check_ms", "ms", "median"),
        ("99 % of checks within", "slow_check_ms", "ms", ""),
        ("longest check of 10,000 keys", "longest_check_ms", "ms", "while slots are sealed and expire"),
        ("usual settle of 10,000 keys", "usual_settle_ms", "ms", "median"),
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
        report.rows.push(row(figure, arm, of(name), unit, right, note));
    }
    let note = format!("{restart:.2} s to the first verdict; goal 2 s");
    report.rows.push(row("restart after kill -9", arm, restart, "s", sound, note));
}
