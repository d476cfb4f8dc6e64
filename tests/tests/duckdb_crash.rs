//! Relays and HTTP into one DuckDB file, in all modes, through kills of the gateway: the tables equal their models, row for row, the marks
//! hold each event once, and the dead letters are the bad records.

#![cfg(feature = "duckdb")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use adapters::duckdb::FileConnection;
use oncegate_tests::{
    callers::Callers,
    eventually,
    gateway::Gateway,
    route::OrdersRoute,
    servers::{Kafka, Produced},
    workload::{Mode, Order, Workload, now_us, rfc3339},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

const PARTITIONS: u32 = 4;
const COPIES: u32 = 20;
const SEED: u64 = 41;
/// After so many records comes one that a check of the table refuses.
const BAD_EVERY: usize = 2000;

/// The route with a DuckDB sink in place of its own.
fn toml(route: &OrdersRoute, file: &Path) -> String {
    let (name, text) = (&route.name, route.toml());
    let columns = "order_id VARCHAR PRIMARY KEY, user_id BIGINT NOT NULL, amount DECIMAL(12, 4) CHECK (amount >= 0), \
         currency VARCHAR NOT NULL, status VARCHAR NOT NULL, updated_at TIMESTAMPTZ NOT NULL, note VARCHAR NOT NULL";
    let sink = format!(
        "type = \"duckdb\"\npath = \"{}\"\nbusy_timeout = \"30s\"\ncreate = \"CREATE TABLE {name} ({columns})\"\ntable = \"{name}\"",
        file.display()
    );
    let changed = text
        .replace("type = \"postgres\"", &sink)
        .replace(&format!("table = \"public.{name}\"\n"), "")
        .replace("url = \"\"\n", "");
    assert!(!changed.contains("public."), "{changed}");
    changed
}

/// What the table must hold, a text for each row.
fn expected(orders: &BTreeMap<String, Order>) -> Vec<String> {
    let row = |order: &Order| {
        format!(
            "{}|{}|{}|{}|{}|{}|{}",
            order.order_id,
            order.user_id,
            order.amount,
            order.currency,
            order.status,
            order.updated_us,
            order.note
        )
    };
    orders.values().map(row).collect()
}

/// What a file holds that no process has open.
struct Found {
    connection: FileConnection,
}

impl Found {
    fn in_file(file: &Path) -> Self {
        Self { connection: FileConnection::open(file).expect("the file opens") }
    }

    fn rows(&self, table: &str) -> Vec<String> {
        let query = format!(
            "SELECT concat_ws('|', order_id, user_id, amount, currency, status, epoch_us(updated_at), note) FROM {table} ORDER BY order_id"
        );
        let mut query = self.connection.prepare(&query).expect("the table is there");
        let rows = query.query_map([], |row| row.get(0)).expect("the table can be read");
        rows.map(|row| row.expect("a row")).collect()
    }

    fn number(&self, query: &str) -> i64 {
        self.connection.query_row(query, [], |row| row.get(0)).expect("a number")
    }
}

/// One mode's topic, and what it must end in.
struct Course {
    name: &'static str,
    sent: Vec<Produced>,
    distinct: usize,
    bad: usize,
    expected: Vec<String>,
}

impl Course {
    fn new(name: &'static str, mode: Mode, seed: u64, records: usize) -> Self {
        let workload = Workload::generate(mode, seed, records, COPIES, now_us());
        let expected = expected(&workload.model());
        let (mut sent, mut bad) = (Vec::new(), 0);
        for (n, change) in workload.sent.iter().enumerate() {
            sent.push(change.produced(PARTITIONS));
            if n % BAD_EVERY == BAD_EVERY / 2 {
                let at = change.updated_us();
                let order = Order {
                    order_id: format!("bad-{n}"),
                    user_id: 1,
                    amount: "-1.0000".to_owned(),
                    currency: "EUR",
                    status: "new",
                    updated_us: at,
                    note: String::new(),
                };
                sent.push(Produced {
                    partition: (bad % PARTITIONS).cast_signed(),
                    key: Some(order.order_id.clone().into_bytes()),
                    payload: Some(order.json().into_bytes()),
                    headers: vec![("updated_at", rfc3339(at))],
                    timestamp_ms: Some(at.div_euclid(1000)),
                });
                bad += 1;
            }
        }
        Self { name, sent, distinct: workload.distinct, bad: bad as usize, expected }
    }

    fn check(&self, found: &Found) {
        let name = self.name;
        let rows = found.rows(name);
        let wrong: Vec<_> =
            rows.iter().zip(&self.expected).filter(|(row, expected)| row != expected).take(3).collect();
        assert!(rows == self.expected, "{name}: {} rows of {}: {wrong:#?}", rows.len(), self.expected.len());
        let marked =
            found.number(&format!("SELECT sum(count)::BIGINT FROM oncegate_marks WHERE route = '{name}'"));
        assert_eq!(marked, (self.distinct + self.bad) as i64, "{name}: each event once");
        for what in ["count(*)", "count(DISTINCT (shard, position))"] {
            let letters =
                found.number(&format!("SELECT {what} FROM oncegate_dead_letters WHERE route = '{name}'"));
            assert_eq!(letters, self.bad as i64, "{name}: {what} of the dead letters");
        }
    }
}

async fn read(kafka: &Kafka, courses: &[Course], patience: Duration) {
    for course in courses {
        eventually("all records are read", patience, async || {
            let ends = kafka.ends(course.name, PARTITIONS.cast_signed());
            let committed = kafka.committed(course.name, PARTITIONS.cast_signed(), course.name);
            if ends == committed {
                Ok(())
            } else {
                Err(format!("{}: {committed:?} of {ends:?}", course.name))
            }
        })
        .await;
    }
}

/// Relays of all modes at once into one file, `records` each, through `kills`.
async fn relays(names: [&'static str; 3], records: usize, kills: usize) {
    // A busy machine starves the broker, and that is not what is tested.
    let patience = Duration::from_secs(240 + records as u64 / 200);
    let kafka = Kafka::shared();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file: PathBuf = folder.path().join("orders.db");
    let (mut courses, mut config) = (Vec::new(), String::new());
    for (seed, (name, mode)) in
        (SEED..).zip(names.into_iter().zip([Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer]))
    {
        kafka.topic(name, PARTITIONS.cast_signed()).await;
        courses.push(Course::new(name, mode, seed, records));
        let route = OrdersRoute::new(name, mode, "").relay(&kafka.brokers(), name, name).as_instance("one");
        config += &toml(&route, &file);
    }
    let mut gateway = Gateway::new(&config);
    gateway.start().await;
    let (mut random, begun) = (StdRng::seed_from_u64(SEED), Instant::now());
    for round in 0..kills {
        for course in &courses {
            let part = course.sent.len() * round / kills..course.sent.len() * (round + 1) / kills;
            kafka.produce(course.name, course.sent[part].to_vec());
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(50..700))).await;
        gateway.kill();
        gateway.spawn();
        // Some are killed again while they start.
        if round % 5 != 4 {
            gateway.ready(patience / 4).await;
        }
    }
    gateway.ready(patience / 4).await;
    read(kafka, &courses, patience).await;
    println!("{kills} kills, all of {} records after {:?}", 3 * records, begun.elapsed());
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
    let found = Found::in_file(&file);
    courses.iter().for_each(|course| course.check(&found));
    drop(found);
    // An empty store learns from the marks; the topics are not read again.
    gateway.delete_store();
    gateway.start().await;
    for course in &courses {
        kafka.produce(
            course.name,
            course.sent[..records / 10]
                .iter()
                .filter(|sent| !sent.key.as_ref().is_some_and(|key| key.starts_with(b"bad-")))
                .cloned()
                .collect::<Vec<_>>(),
        );
    }
    read(kafka, &courses, patience).await;
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
    let found = Found::in_file(&file);
    courses.iter().for_each(|course| course.check(&found));
}

#[tokio::test(flavor = "multi_thread")]
async fn relays_into_duckdb_end_in_their_models_through_kills() {
    relays(["duck_inserted", "duck_upserted", "duck_newest"], 12_000, 8).await;
}

/// The long run: see docs/duckdb.md for its command.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes"]
async fn relays_into_duckdb_end_in_their_models_through_fifty_kills() {
    relays(["duck_inserted_long", "duck_upserted_long", "duck_newest_long"], 300_000, 50).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_into_duckdb_has_each_acknowledged_record_once_through_kills() {
    const KILLS: usize = 8;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("events.db");
    // Nothing but the marks keeps copies out.
    let config = format!(
        "[sinks.out]\ntype = \"duckdb\"\npath = \"{}\"\ntable = \"events\"\n\
         create = \"CREATE TABLE events (id VARCHAR, amount DECIMAL(12, 2))\"\n\
         [routes.events]\nsink = \"out\"\nkey = \"/id\"\nlanes = {{ http = 2 }}\n",
        file.display()
    );
    let payload = |n: usize| format!("{{\"id\":\"k{n:07}\",\"amount\":{n}.50}}");
    let mut gateway = Gateway::new(&config);
    gateway.start().await;
    let callers = Callers::start(gateway.listen(), "/v1/events", payload);
    let mut random = StdRng::seed_from_u64(12);
    gateway.goes_through(KILLS, 50..600, &mut random).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let acknowledged = callers.end().await;
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
    let mut model: Vec<String> = acknowledged.into_iter().map(|n| format!("k{n:07} {n}.50")).collect();
    model.sort();
    println!("{KILLS} kills, {} keys acknowledged", model.len());
    assert!(model.len() > 200, "only {} keys", model.len());
    let found = Found::in_file(&file);
    let mut query =
        found.connection.prepare("SELECT id || ' ' || amount FROM events ORDER BY id").expect("a table");
    let rows: Vec<String> =
        query.query_map([], |row| row.get(0)).expect("rows").map(|row| row.expect("a row")).collect();
    assert!(rows == model, "{} rows, {} acknowledged", rows.len(), model.len());
}
