//! How long a shard that moves to another instance writes nothing, when its marks hold many live keys: real gateways from Kafka to
//! Kafka, which join, leave and die under a steady load of new records and copies of old ones.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use oncegate_tests::{
    gateway::Gateway,
    servers::{Kafka, Produced},
};
use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    message::Headers,
    producer::{BaseProducer, BaseRecord, Producer},
};

use crate::{
    Scale,
    report::{Report, Row},
};

const PARTITIONS: i32 = 12;
/// Records a second while shards move; every fifth is a copy of one of all before.
const LOAD: u64 = 2_000;
/// A move is over when nothing was claimed for so long, and all that was claimed writes.
const CALM: Duration = Duration::from_secs(4);
/// The goal of the issue, ms.
const GOAL_MS: f64 = 10_000.0;

pub(crate) async fn run(scale: Scale, keys: Option<u64>) -> Report {
    let keys = keys.unwrap_or(if scale == Scale::Full { 10_000_000 } else { 1_000_000 });
    let kafka = Kafka::start();
    for topic in ["in", "out"] {
        kafka.topic(topic, PARTITIONS).await;
    }
    let brokers = kafka.brokers();
    let began = Instant::now();
    kafka.produce("in", (0..keys).map(record));
    eprintln!("{keys} records produced in {:.1?}", began.elapsed());
    let began = Instant::now();
    let mut first = Gateway::new(&config(&brokers));
    first.start().await;
    counted(&first, keys).await;
    eprintln!("{keys} records written in {:.1?}", began.elapsed());

    let mut report = Report::new("rebalance");
    let lines = Lines::follow(&brokers);
    let load = Load::start(&brokers, keys);
    tokio::time::sleep(Duration::from_secs(2)).await;

    // One more instance: half of the shards move to it.
    let mut second = Gateway::new(&config(&brokers));
    let at = Instant::now();
    second.spawn();
    report.rows.extend(moved(&lines, &second, at, "a second instance joins", keys).await);

    // The first one goes in good order: its half moves.
    let at = Instant::now();
    let ended = first.terminate().await;
    eprintln!("the first instance ended in {:.1?}: {ended}", at.elapsed());
    report.rows.extend(moved(&lines, &second, at, "the first leaves", keys).await);

    // One that is killed while another runs: its half moves.
    let mut third = Gateway::new(&config(&brokers));
    let at = Instant::now();
    third.spawn();
    report.rows.extend(moved(&lines, &third, at, "a third joins", keys).await);
    let at = Instant::now();
    second.kill();
    report.rows.extend(moved(&lines, &third, at, "the second is killed", keys).await);

    // The only one dies, and one with an empty store takes all.
    let mut fourth = Gateway::new(&config(&brokers));
    let at = Instant::now();
    third.kill();
    fourth.spawn();
    report.rows.extend(moved(&lines, &fourth, at, "the only one dies, a new one starts", keys).await);

    let (events, sent) = load.end();
    read_to_the_end(&kafka).await;
    let fault = check(&kafka, events);
    lines.end();
    if let Err(fault) = &fault {
        eprintln!("{fault}");
    }
    for row in &mut report.rows {
        row.correct &= fault.is_ok();
    }
    report.rows.push(Row {
        figure: "each event once",
        arm: "oncegate",
        value: events as f64,
        unit: "events",
        correct: fault.is_ok(),
        note: format!("of {} records", keys + sent),
    });
    report
}

/// Event `n`: its copies come in the same partition.
fn record(n: u64) -> Produced {
    Produced {
        partition: partition(n),
        payload: Some(format!("{{\"id\":{n}}}").into_bytes()),
        ..Produced::default()
    }
}

fn partition(n: u64) -> i32 {
    (n % PARTITIONS.unsigned_abs() as u64) as i32
}

fn config(brokers: &str) -> String {
    format!(
        "[sinks.out]\ntype = \"kafka\"\nbrokers = \"{brokers}\"\ntopic = \"out\"\nmarks_topic = \"marks\"\n\
         marks_partitions = {PARTITIONS}\noptions = {{ \"broker.address.family\" = \"v4\" }}\n\n\
         [routes.out]\nsink = \"out\"\nkey = \"/id\"\nevent_time = {{ kafka = \"timestamp\" }}\nwindow = \"24h\"\n\
         lateness = \"1h\"\nlanes = {{ http = 0, relay = 2 }}\n\n\
         [routes.out.kafka]\nbrokers = \"{brokers}\"\ntopics = [\"in\"]\ngroup = \"out\"\n"
    )
}

async fn counted(gateway: &Gateway, count: u64) {
    let mut seen = (Instant::now(), 0);
    loop {
        let now = gateway.metric("oncegate_records_total", &[]).await.unwrap_or_default() as u64;
        if now >= count {
            return;
        }
        if now > seen.1 {
            seen = (Instant::now(), now);
        }
        assert!(
            seen.0.elapsed() < Duration::from_secs(60),
            "stuck at {now} of {count}\n{}",
            gateway.log_tail(40)
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Waits until `owner` has taken shards over and each of them has written a record; answers with how long that took since `at`.
async fn moved(lines: &Lines, owner: &Gateway, at: Instant, figure: &'static str, keys: u64) -> Vec<Row> {
    let deadline = Instant::now() + Duration::from_secs(180);
    let name = owner.name();
    let (claims, writes, before) = loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (claims, writes, before) = lines.since(&name, at);
        let calm = claims.values().max().is_some_and(|last| last.elapsed() >= CALM);
        if calm && claims.keys().all(|shard| writes.contains_key(shard)) {
            break (claims, writes, before);
        }
        assert!(
            Instant::now() < deadline,
            "{figure}: of {} shards {} write\n{}",
            claims.len(),
            writes.len(),
            owner.log_tail(40)
        );
    };
    let moved: Vec<(Instant, Instant)> =
        claims.iter().map(|(shard, claimed)| (*claimed, writes[shard])).collect();
    let since = |instant: Instant| instant.saturating_duration_since(at).as_secs_f64() * 1e3;
    let first = moved.iter().map(|(_, wrote)| *wrote).min().unwrap_or(at);
    let last = moved.iter().map(|(_, wrote)| *wrote).max().unwrap_or(at);
    let pause = writes
        .iter()
        .filter_map(|(shard, wrote)| Some(wrote.saturating_duration_since(*before.get(shard)?)))
        .max()
        .unwrap_or_default()
        .as_secs_f64()
        * 1e3;
    let claimed = moved.iter().map(|(claimed, _)| *claimed).min().unwrap_or(at);
    let longest = moved
        .iter()
        .map(|(claimed, wrote)| wrote.saturating_duration_since(*claimed))
        .max()
        .unwrap_or_default();
    let live = keys * moved.len() as u64 / PARTITIONS.unsigned_abs() as u64;
    let note = format!(
        "{} shards with {live} live keys; claimed after {:.0} ms, the longest from claim to write {:.0} ms",
        moved.len(),
        since(claimed),
        longest.as_secs_f64() * 1e3
    );
    if pause >= GOAL_MS {
        eprintln!("{figure}: {} said:\n{}", owner.name(), owner.log_tail(60));
    }
    let row = |arm, value: f64, note| Row { figure, arm, value, unit: "ms", correct: true, note };
    vec![
        row("to the first record", since(first), note),
        row("to the first of every shard", since(last), String::new()),
        row("longest pause of a shard", pause, "goal: below 10,000".to_owned()),
    ]
}

fn client(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("broker.address.family", "v4");
    config
}

fn reader(brokers: &str, topic: &str, from: Offset) -> BaseConsumer {
    let consumer: BaseConsumer = client(brokers)
        .set("group.id", "reader")
        .set("isolation.level", "read_committed")
        .set("enable.auto.commit", "false")
        .set("fetch.wait.max.ms", "5")
        .set("enable.partition.eof", "true")
        .create()
        .expect("a consumer");
    let mut list = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        list.add_partition_offset(topic, partition, from).expect("an offset");
    }
    consumer.assign(&list).expect("all partitions");
    consumer
}

/// A committed line of the marks topic, as soon as it can be read.
struct Line {
    at: Instant,
    owner: String,
    shard: String,
    /// A take-over; else a batch with records that were written.
    claim: bool,
}

/// By shard.
type Times = BTreeMap<String, Instant>;

/// All that the marks topic says from now on.
struct Lines {
    seen: Arc<Mutex<Vec<Line>>>,
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Lines {
    fn follow(brokers: &str) -> Self {
        let consumer = reader(brokers, "marks", Offset::End);
        let (seen, over) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (lines, ends) = (seen.clone(), over.clone());
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::Acquire) {
                let Some(Ok(message)) = consumer.poll(Duration::from_millis(20)) else { continue };
                let at = Instant::now();
                let Some(headers) = message.headers() else { continue };
                let header = |name: &str| {
                    headers
                        .iter()
                        .find(|header| header.key == name)
                        .map(|header| String::from_utf8_lossy(header.value.unwrap_or_default()).into_owned())
                };
                let kind = header("kind").unwrap_or_default();
                if kind == "claim" || (kind == "mark" && header("count").is_some()) {
                    lines.lock().expect("no panic").push(Line {
                        at,
                        owner: header("owner").unwrap_or_default(),
                        shard: String::from_utf8_lossy(message.key().unwrap_or_default()).into_owned(),
                        claim: kind == "claim",
                    });
                }
            }
        });
        Self { seen, over, thread }
    }

    /// When `owner` claimed shards since `at`, when each of these first wrote after that, and when another owner last did before.
    fn since(&self, owner: &str, at: Instant) -> (Times, Times, Times) {
        let (mut claims, mut writes, mut before) = (Times::new(), Times::new(), Times::new());
        let mut holders: BTreeMap<&str, &str> = BTreeMap::new();
        for line in self.seen.lock().expect("no panic").iter() {
            let holder = if line.claim { holders.insert(&line.shard, &line.owner) } else { None };
            if line.owner != owner {
                if !line.claim {
                    before.insert(line.shard.clone(), line.at);
                }
            } else if line.claim {
                // One that it has already, and takes anew, has not moved.
                if line.at >= at && holder != Some(owner) {
                    claims.entry(line.shard.clone()).or_insert(line.at);
                }
            } else if claims.contains_key(&line.shard) {
                writes.entry(line.shard.clone()).or_insert(line.at);
            }
        }
        (claims, writes, before)
    }

    fn end(self) {
        self.over.store(true, Ordering::Release);
        self.thread.join().expect("no panic");
    }
}

/// New events and copies of old ones, at a steady rate, in all partitions.
struct Load {
    over: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    thread: JoinHandle<u64>,
}

impl Load {
    fn start(brokers: &str, mut events: u64) -> Self {
        let producer: BaseProducer = client(brokers)
            .set("linger.ms", "5")
            .set("enable.idempotence", "true")
            .create()
            .expect("a producer");
        let (over, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ends, count) = (over.clone(), sent.clone());
        let thread = std::thread::spawn(move || {
            let (began, mut scatter) = (Instant::now(), 1_u64);
            while !ends.load(Ordering::Acquire) {
                let due = (began.elapsed().as_secs_f64() * LOAD as f64) as u64;
                while count.load(Ordering::Relaxed) < due {
                    let sent = count.fetch_add(1, Ordering::Relaxed);
                    scatter = scatter
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let n = if sent % 5 == 4 {
                        (scatter >> 20) % events
                    } else {
                        events += 1;
                        events - 1
                    };
                    let payload = format!("{{\"id\":{n}}}");
                    let record: BaseRecord<'_, (), str> =
                        BaseRecord::to("in").partition(partition(n)).payload(&payload);
                    producer.send(record).map_err(|(error, _)| error).expect("the queue is not full");
                }
                producer.poll(Duration::from_millis(2));
            }
            producer.flush(Duration::from_secs(60)).expect("Kafka takes the records");
            events
        });
        Self { over, sent, thread }
    }

    /// How many events there are in all, and how many records were sent here.
    fn end(self) -> (u64, u64) {
        self.over.store(true, Ordering::Release);
        let events = self.thread.join().expect("no panic");
        (events, self.sent.load(Ordering::Relaxed))
    }
}

async fn read_to_the_end(kafka: &Kafka) {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let (ends, committed) = (kafka.ends("in", PARTITIONS), kafka.committed("in", PARTITIONS, "out"));
        if ends == committed {
            return;
        }
        assert!(Instant::now() < deadline, "{committed:?} of {ends:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Each of `events` events once, in the partition that it came through.
fn check(kafka: &Kafka, events: u64) -> Result<(), String> {
    let consumer = reader(&kafka.brokers(), "out", Offset::Beginning);
    let mut seen = vec![false; events as usize];
    let (mut lost, mut open) = (events, (0..PARTITIONS).collect::<BTreeSet<_>>());
    while !open.is_empty() {
        let message = match consumer.poll(Duration::from_secs(20)) {
            Some(Ok(message)) => message,
            Some(Err(rdkafka::error::KafkaError::PartitionEOF(partition))) => {
                open.remove(&partition);
                continue;
            }
            other => return Err(format!("the written records cannot be read: {:?}", other.map(|_| ()))),
        };
        let payload = message.payload().unwrap_or_default();
        let n = std::str::from_utf8(payload)
            .ok()
            .and_then(|text| text.strip_prefix("{\"id\":")?.strip_suffix('}')?.parse::<u64>().ok())
            .filter(|n| *n < events && message.partition() == partition(*n))
            .ok_or_else(|| format!("not sent so: {:?}", String::from_utf8_lossy(payload)))?;
        if std::mem::replace(&mut seen[n as usize], true) {
            return Err(format!("event {n} was written twice"));
        }
        lost -= 1;
    }
    if lost == 0 { Ok(()) } else { Err(format!("{lost} of {events} events are lost")) }
}
