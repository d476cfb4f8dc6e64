//! HTTP and a relay into ClickHouse through kills of the gateway, kills of the engine, and connections cut before, inside and after
//! inserts: the table holds each acknowledged record once, and nothing else.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use oncegate_tests::{
    callers::Callers,
    gateway::Gateway,
    http_client::HttpClient,
    proxy::http::{Cut, HttpProxy},
    servers::{Clickhouse, Kafka, Produced},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// One record in so many is a copy of an earlier one, or bad.
const COPY_EVERY: usize = 5;
const BAD_EVERY: usize = 500;

/// A batch of any size falls into four partitions.
const TABLE: &str = "(id String, n UInt64, amount Decimal(18, 2), note String DEFAULT 'none', batch String) ENGINE = MergeTree PARTITION BY n % 4 \
     ORDER BY id SETTINGS non_replicated_deduplication_window = 10000";

fn sink(url: &str, table: &str, journal: &Path) -> String {
    format!(
        "[sinks.ch]\ntype = \"clickhouse\"\nurl = \"{url}\"\ntable = \"{table}\"\njournal = \"{}\"\nrequest_timeout = \"5s\"\n\
         batch_column = \"batch\"\n",
        journal.display()
    )
}

fn payload(n: usize) -> String {
    format!("{{\"id\":\"k{n:07}\",\"n\":{n},\"amount\":{n}.50}}")
}

/// Lets inserts break from time to time until it is dropped.
struct Cutter {
    over: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
}

impl Cutter {
    fn start(proxy: Arc<HttpProxy>, every_ms: std::ops::Range<u64>) -> Self {
        let cutter = Self { over: Arc::default(), count: Arc::default() };
        let (over, count) = (cutter.over.clone(), cutter.count.clone());
        tokio::spawn(async move {
            let mut random = StdRng::seed_from_u64(17);
            let mut last = 0;
            while !over.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(random.random_range(every_ms.clone()))).await;
                let cuts = [Cut::Request, Cut::InsideRequest, Cut::Answer, Cut::Late];
                // Some get through, also while a gateway starts and drives one batch alone.
                if proxy.inserts() < last + 4 {
                    continue;
                }
                last = proxy.inserts();
                proxy.cut_inserts(random.random_range(1..3), cuts[random.random_range(0..cuts.len())]);
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        cutter
    }
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Kills in turn, at random points: the engine once in so many times.
async fn goes_through(
    gateway: &mut Gateway,
    server: &Clickhouse,
    journal: &Path,
    (kills, engine_every): (usize, usize),
    random: &mut StdRng,
) {
    for kill in 0..kills {
        tokio::time::sleep(Duration::from_millis(random.random_range(100..700))).await;
        if kill % engine_every == engine_every - 1 {
            server.kill();
            tokio::time::sleep(Duration::from_millis(random.random_range(0..300))).await;
            tokio::task::block_in_place(|| server.run());
        } else {
            gateway.kill();
            gateway.spawn();
            ready_or_decided(gateway, journal).await;
        }
    }
    ready_or_decided(gateway, journal).await;
}

/// Waits until the gateway is ready. An engine that is killed between a token and its rows keeps the token alone: then it does as an operator
/// does (docs/clickhouse.md). Nobody else takes rows out of the table here, so that the part which the reason names is out.
async fn ready_or_decided(gateway: &mut Gateway, journal: &Path) {
    let until = tokio::time::Instant::now() + Duration::from_secs(90);
    let mut client = HttpClient::new(gateway.admin());
    loop {
        let answer = client.get("/readyz?verbose").await;
        if answer.as_ref().is_ok_and(|answer| answer.status == 200) {
            return;
        }
        let said = answer.map_or_else(|error| error.to_string(), |answer| answer.text());
        assert!(tokio::time::Instant::now() < until, "{said}\n{}", gateway.log_tail(40));
        let Some(reason) = said.lines().find(|line| line.contains("kept its token without its rows")) else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let number = |before: &str| -> i64 {
            let rest = reason.split(before).nth(1).expect("the reason says which");
            rest.split(|c: char| !c.is_ascii_digit())
                .next()
                .and_then(|digits| digits.parse().ok())
                .expect("a number")
        };
        let (entry, part) = (number("journal entry "), number("has part "));
        println!("entry {entry}, part {part}: out");
        gateway.kill();
        let book = rusqlite::Connection::open(journal.join("book.db")).expect("the book opens");
        let say = "UPDATE oncegate_journal_parts SET verdict = 'out' WHERE entry = ?1 AND part = ?2";
        assert_eq!(book.execute(say, [entry, part - 1]).expect("it can be said"), 1);
        gateway.spawn();
    }
}

/// The table, once it has as many rows as the model; and a while later.
async fn equals(server: &Clickhouse, table: &str, model: &BTreeMap<String, usize>) {
    oncegate_tests::eventually("all rows in the table", Duration::from_secs(120), async || {
        let count = server.query(&format!("SELECT count() FROM {table} FORMAT TSV")).await?;
        if count.trim().parse::<usize>().is_ok_and(|count| count >= model.len()) {
            Ok(())
        } else {
            Err(format!("{} rows of {}", count.trim(), model.len()))
        }
    })
    .await;
    // What would come twice, or late, would come now.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let lines =
        server.lines(&format!("SELECT id, n, amount, note FROM {table} ORDER BY id FORMAT TSV")).await;
    // Of one token: the engine took an insert twice. Of two: the gateway sent a record twice.
    let twice =
        format!("SELECT uniqExact(batch), count(), n % 4 FROM {table} GROUP BY id, n HAVING count() > 1");
    let twice = format!("SELECT * , count() FROM ({twice}) GROUP BY ALL FORMAT TSV");
    let twice = server.lines(&twice).await;
    assert!(twice.is_empty(), "tokens, rows, partition, and how many records so: {twice:?}");
    let doubles = lines.windows(2).filter(|pair| pair[0] == pair[1]).count();
    assert_eq!((lines.len(), doubles), (model.len(), 0), "rows, and those that are there twice");
    let expected: Vec<String> = model.iter().map(|(id, n)| format!("{id}\t{n}\t{n}.5\tnone")).collect();
    assert!(lines == expected, "the table does not equal the model");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_acknowledged_record_is_one_row_of_clickhouse_through_kills_of_both() {
    let server = Clickhouse::start();
    let table = server.table("http", TABLE).await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let proxy = Arc::new(HttpProxy::start(server.port()).await);
    let route = "[routes.events]\nsink = \"ch\"\nkey = \"/id\"\nlanes = { http = 2 }\n";
    let sink = sink(&server.url_through(proxy.port()), &table, &folder.path().join("journal"));
    let mut gateway = Gateway::new(&(sink + route));
    gateway.start().await;
    let cutter = Cutter::start(proxy.clone(), 100..600);

    let callers = Callers::start(gateway.listen(), "/v1/events", payload);
    let mut random = StdRng::seed_from_u64(11);
    let kills = oncegate_tests::kills(10);
    goes_through(&mut gateway, &server, &folder.path().join("journal"), (kills, 5), &mut random).await;
    let cuts = cutter.count.load(Ordering::Relaxed);
    drop(cutter);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let acknowledged = callers.end().await;
    let model: BTreeMap<String, usize> = acknowledged.into_iter().map(|n| (format!("k{n:07}"), n)).collect();
    println!("{kills} kills, {cuts} cuts, {} inserts, {} keys acknowledged", proxy.inserts(), model.len());
    assert!(model.len() > 100, "only {} keys", model.len());
    equals(&server, &table, &model).await;
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
}

async fn relay(topic: &'static str, records: usize, kills: usize, engine_every: usize) {
    let (kafka, server) = (Kafka::shared(), Clickhouse::start());
    kafka.topic(topic, 2).await;
    let table = server.table("relay", TABLE).await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let journal = folder.path().join("journal");
    let proxy = Arc::new(HttpProxy::start(server.port()).await);
    let route = format!(
        "[routes.{topic}]\nkey = \"/id\"\nevent_time = {{ kafka = \"timestamp\" }}\nsink = \"ch\"\nbatch = {{ max_records = 2000 }}\n\
         [routes.{topic}.kafka]\nbrokers = \"{}\"\ntopics = [\"{topic}\"]\ngroup = \"{topic}\"\ninstance = \"one\"\n",
        kafka.brokers()
    );
    let mut gateway = Gateway::new(&(sink(&server.url_through(proxy.port()), &table, &journal) + &route));
    gateway.start().await;
    let cutter = Cutter::start(proxy.clone(), 100..600);
    let mut random = StdRng::seed_from_u64(7);
    let (mut model, mut bad) = (BTreeMap::new(), 0);
    for round in 0..kills {
        let part = records * round / kills..records * (round + 1) / kills;
        let produced = part.map(|n| {
            // A copy comes in the other partition as well.
            let copy = n % COPY_EVERY == COPY_EVERY - 1;
            let n = if copy { n - 1 - random.random_range(0..3) } else { n };
            let payload = if n % BAD_EVERY == 7 { "{\"no\":\"id\"}".to_owned() } else { payload(n) };
            if n % BAD_EVERY == 7 {
                bad += 1;
            } else {
                model.insert(format!("k{n:07}"), n);
            }
            let partition = random.random_range(0..2);
            Produced { partition, payload: Some(payload.into_bytes()), ..Produced::default() }
        });
        kafka.produce(topic, produced.collect::<Vec<_>>());
        let every = if round % engine_every == engine_every - 1 { 1 } else { 2 };
        goes_through(&mut gateway, &server, &journal, (1, every), &mut random).await;
    }
    let cuts = cutter.count.load(Ordering::Relaxed);
    drop(cutter);
    equals(&server, &table, &model).await;
    println!("{kills} kills, {cuts} cuts, {} inserts, {} rows", proxy.inserts(), model.len());
    let book = rusqlite::Connection::open(journal.join("book.db")).expect("the book opens");
    let letters: usize = book
        .query_row("SELECT count(*) FROM oncegate_dead_letters", [], |row| row.get(0))
        .expect("the dead letters can be counted");
    assert_eq!(letters, bad, "one dead letter for each bad record");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_into_clickhouse_ends_in_its_model_through_kills_of_both() {
    relay("to_clickhouse", 30_000, oncegate_tests::kills(16), 6).await;
}

/// `cargo test -p oncegate-tests --test clickhouse_crash -- --ignored` with all its records and kills.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: the command stands above"]
async fn three_hundred_thousand_records_go_into_clickhouse_through_fifty_kills() {
    relay("to_clickhouse_at_length", 300_000, 60, 6).await;
}
