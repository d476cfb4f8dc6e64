//! Kafka to Postgres against raw binary COPY of the same distinct rows, and against staged `ON CONFLICT`.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use adapters::{
    kafka::{KafkaConfig, Membership},
    postgres::{PostgresConfig, PostgresSink},
    sink::{Encode, Mode, RowKind, Sink},
    value::Value,
};
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::SinkExt;
use oncegate::{
    door::kafka::{Relay, RelayOptions},
    gate::Gate,
    key::{KeySpec, Pointer},
    lane::Rules,
    naming::{EventTime, NamingRules},
    outcome::Outcome,
};
use oncegate_tests::{
    servers::{Kafka, Postgres, Produced},
    workload::{Change, Mode as Kind, Order, Workload, orders_table},
};
use tokio_postgres::Client;

use crate::{
    Scale,
    report::{Report, Row},
};

const ROWS_A_TRANSACTION: usize = 10_000;
const COPY_HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";

pub(crate) async fn run(scale: Scale, only: &str) -> Report {
    let records = if scale == Scale::Full { 1_000_000 } else { 300_000 };
    let mut report = Report::new("relay");
    report.rivals = vec![
        ("insert, 1 lane", "oncegate", "copy", 1.0),
        ("insert, 2 lanes", "oncegate", "copy", 0.95),
        ("upsert, 1 lane", "oncegate", "staged on conflict", 0.9),
    ];
    let postgres = Postgres::start();
    let kafka = Kafka::start();
    let until = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros())
        .expect("this era");
    let inserts = scattered(Workload::generate(Kind::Insert, 1, records, 20, until));
    let upserts = scattered(Workload::generate(Kind::Upsert, 2, records, 20, until));
    let wanted = |arm: &str| only.is_empty() || arm.contains(only);
    for (figure, kind, partitions, workload) in [
        ("insert, 1 lane", Mode::Insert, 1, &inserts),
        ("insert, 2 lanes", Mode::Insert, 2, &inserts),
        ("upsert, 1 lane", Mode::Upsert, 1, &upserts),
    ] {
        if !wanted(figure) {
            continue;
        }
        let bench = Bench { postgres: &postgres, kafka: &kafka, figure, mode: kind, partitions, workload };
        report.rows.push(bench.rival().await);
        report.rows.push(bench.oncegate().await);
        report.rows.push(bench.rival_again().await);
    }
    report
}

/// Order ids that do not ascend with time, as ids mostly are: each arrival finds its own place in the index.
pub(crate) fn scattered(mut workload: Workload) -> Workload {
    let scatter = |id: &str| {
        let number = id.bytes().fold(0_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
        });
        format!("{number:016x}")
    };
    for change in &mut workload.sent {
        match change {
            Change::Put(order) => order.order_id = scatter(&order.order_id),
            Change::Delete { order_id, .. } => *order_id = scatter(order_id),
        }
    }
    workload
}

struct Bench<'a> {
    postgres: &'a Postgres,
    kafka: &'a Kafka,
    figure: &'static str,
    mode: Mode,
    partitions: u32,
    workload: &'a Workload,
}

impl Bench<'_> {
    fn database(&self, arm: &str) -> String {
        format!("{}_{arm}", self.figure.replace([' ', ','], "_"))
    }

    async fn rival(&self) -> Row {
        self.rival_named("copy", "staged on conflict", "a").await
    }

    /// The rival a second time: its own spread.
    async fn rival_again(&self) -> Row {
        self.rival_named("copy (again)", "staged on conflict (again)", "b").await
    }

    async fn rival_named(&self, copy: &'static str, staged: &'static str, run: &str) -> Row {
        let database = self.database(&format!("rival_{run}"));
        let client = self.postgres.database(&database, &orders_table("orders")).await;
        let sink = self.sink(&database);
        let encoder = sink.probe().await.expect("the table fits");
        // As in the relay: first copies only for COPY; for the upsert all changes that are not copies.
        let mut known = std::collections::HashSet::new();
        let distinct: Vec<&Change> = self
            .workload
            .sent
            .iter()
            .filter(|change| known.insert((change.order_id(), change.updated_us())))
            .collect();
        let rows = distinct.len();
        let mut parts: Vec<Vec<Vec<Bytes>>> = vec![Vec::new(); self.partitions as usize];
        for (at, part) in parts.iter_mut().enumerate() {
            let own: Vec<&Change> = distinct
                .iter()
                .copied()
                .filter(|change| {
                    change.produced(self.partitions).partition == i32::try_from(at).expect("few")
                })
                .collect();
            for chunk in own.chunks(ROWS_A_TRANSACTION) {
                part.push(encode(&*encoder, chunk));
            }
        }
        let started = Instant::now();
        let mut tasks = Vec::new();
        for part in parts {
            let client = self.postgres.connect(&database).await.expect("Postgres answers");
            let mode = self.mode;
            tasks.push(tokio::spawn(async move {
                for chunk in part {
                    match mode {
                        Mode::Insert => copy_into(&client, "orders", chunk).await,
                        _ => staged_upsert(&client, chunk).await,
                    }
                }
            }));
        }
        for task in tasks {
            task.await.expect("the rival works");
        }
        let took = started.elapsed();
        let correct = self.check(&client).await;
        Row {
            figure: self.figure,
            arm: if self.mode == Mode::Insert { copy } else { staged },
            value: rows as f64 / took.as_secs_f64(),
            unit: "rows/s",
            correct,
            note: format!("{rows} rows in {took:.1?}"),
        }
    }

    async fn oncegate(&self) -> Row {
        let database = self.database("gate");
        let client = self.postgres.database(&database, &orders_table("orders")).await;
        let topic = self.database("topic");
        self.kafka.topic(&topic, i32::try_from(self.partitions).expect("few")).await;
        let records: Vec<Produced> =
            self.workload.sent.iter().map(|change| change.produced(self.partitions)).collect();
        let count = records.len();
        self.kafka.produce(&topic, records);
        let keys: &[&str] =
            if self.mode == Mode::Insert { &["/order_id"] } else { &["/order_id", "/updated_at"] };
        let sink = Arc::new(self.sink(&database));
        let relayed = relayed(self.kafka, &topic, keys, sink, (1, self.partitions, 0), None, count).await;
        let correct = self.check(&client).await;
        relayed.row(self.figure, correct)
    }

    fn sink(&self, database: &str) -> PostgresSink {
        let config = PostgresConfig {
            mode: self.mode,
            row_key: vec!["order_id".into()],
            ..PostgresConfig::new(self.postgres.url(database), "public.orders")
        };
        PostgresSink::new(config).unwrap_or_else(|misfit| panic!("{misfit}"))
    }

    async fn check(&self, client: &Client) -> bool {
        let model = self.workload.model();
        let table =
            oncegate_tests::workload::table_rows(client, "orders").await.expect("the table can be read");
        let differences = oncegate_tests::workload::differences(&model, &table);
        differences.iter().take(5).for_each(|difference| eprintln!("{difference}"));
        differences.is_empty()
    }
}

/// What a relay did.
pub(crate) struct Relayed {
    rate: f64,
    note: String,
}

impl Relayed {
    pub(crate) fn row(self, figure: &'static str, correct: bool) -> Row {
        Row { figure, arm: "oncegate", value: self.rate, unit: "records/s", correct, note: self.note }
    }
}

/// Relays `count` records of the topic `source` into `sink`, through a store of its own.
pub(crate) async fn relayed(
    kafka: &Kafka,
    source: &str,
    keys: &[&str],
    sink: Arc<dyn Sink>,
    (callers, lanes, linger_ms): (u32, u32, u64),
    membership: Option<Arc<Membership>>,
    count: usize,
) -> Relayed {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let hour = 3_600_000;
    let store = dedup_store::Store::open(
        folder.path(),
        dedup_store::StoreOptions {
            window_ms: 24 * hour,
            lateness_ms: hour,
            idle_after_ms: 30_000,
            max_disk_bytes: 1 << 40,
            max_memory_bytes: 1 << 34,
            commit_interval_ms: 200,
        },
    )
    .expect("a store");
    let mut naming = NamingRules::new(KeySpec::pointers(keys.iter().copied()).expect("a key spec"));
    naming.event_time =
        EventTime::Pointer { pointer: Pointer::parse("/updated_at").expect("a pointer"), unit: None };
    let metrics = oncegate::metrics::Metrics::new();
    let gate = Gate::builder(store)
        .name("orders")
        .metrics(metrics.route("orders"))
        .naming(naming)
        .sink(sink)
        .rules(Rules { lateness_ms: hour, linger_ms, ..Rules::default() })
        .lanes(callers, lanes)
        .build()
        .await
        .unwrap_or_else(|fault| panic!("{fault}"));
    let started = Instant::now();
    let mut config = KafkaConfig::new(&kafka.brokers(), &[source], "bench");
    config.membership = membership;
    let events = gate.take_events().expect("given out once");
    let relay =
        Relay::start(Arc::new(gate.clone()), config, RelayOptions::default(), events).expect("a relay");
    let counted = until_counted(&gate, count).await;
    let took = started.elapsed();
    let (rate, tail) = rate_of_work(&counted);
    relay.stop().await;
    gate.close().await;
    print_stages(&metrics);
    let note = format!(
        "{count} records in {took:.1?} from the start of the relay, the last {tail} counted when their positions went out"
    );
    Relayed { rate, note }
}

/// A lane that has nothing to write lets positions go out once a second. A batch takes far less.
const SILENCE: Duration = Duration::from_millis(500);

/// Waits until `count` records are counted; answers with when how many were.
async fn until_counted(gate: &Gate, count: usize) -> Vec<(Instant, u64)> {
    let until = Instant::now() + Duration::from_secs(300);
    let mut counted: Vec<(Instant, u64)> = Vec::new();
    while counted.last().is_none_or(|&(_, records)| records < count as u64) {
        let now: u64 = Outcome::ALL.iter().map(|&outcome| gate.metrics().counted(outcome)).sum();
        if now > counted.last().map_or(0, |&(_, records)| records) {
            counted.push((Instant::now(), now));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(Instant::now() < until, "stuck at {now} of {count}");
    }
    counted
}

/// Where the gateway's time went, if `BENCH_STAGES` asks for it.
fn print_stages(metrics: &oncegate::metrics::Metrics) {
    if std::env::var_os("BENCH_STAGES").is_some() {
        let text = metrics.render(oncegate::metrics::Format::Text, 0);
        text.lines()
            .filter(|line| line.contains("_sum{") || line.contains("_count{"))
            .for_each(|line| eprintln!("{line}"));
    }
}

/// The rate of the work itself, and how many records were counted after it. Joining the group takes as long as it takes, once: the
/// clock starts with the first records that are counted. The last copies of all are counted with their positions, which go out a
/// second after the last row: the clock stops before that silence.
fn rate_of_work(counted: &[(Instant, u64)]) -> (f64, u64) {
    let silent = |pair: &[(Instant, u64)]| pair[1].0.duration_since(pair[0].0) >= SILENCE;
    let records = counted[counted.len() - 1].1;
    // A longer rest is no tail: its time counts.
    let end = counted.windows(2).rposition(silent).filter(|&at| (records - counted[at].1) * 20 < records);
    let ((from, first), (until, last)) = (counted[0], counted[end.unwrap_or(counted.len() - 1)]);
    ((last - first) as f64 / until.duration_since(from).as_secs_f64(), records - last)
}

/// An order in the sink's own wire form.
fn encode_order(encoder: &dyn Encode, order: &Order, row: &mut Vec<u8>) {
    let json = order.json();
    let members: std::collections::BTreeMap<&str, &serde_json::value::RawValue> =
        serde_json::from_str(&json).expect("an order is an object");
    let values: Vec<Value<'_>> =
        encoder.columns().iter().map(|column| Value::Json(members[column.name.as_str()].get())).collect();
    encoder.encode(RowKind::Write, &values, row, &mut Vec::new()).expect("an order fits");
}

/// Rows in the wire form of binary COPY, in messages of about 64 KiB.
fn encode(encoder: &dyn Encode, changes: &[&Change]) -> Vec<Bytes> {
    let mut messages = Vec::new();
    let mut buffer = BytesMut::from(COPY_HEADER);
    let mut row = Vec::new();
    for change in changes {
        let Change::Put(order) = change else { continue };
        row.clear();
        encode_order(encoder, order, &mut row);
        // Flags and length come before the tuple; an order has every column, so there is no shape.
        let length = u32::from_be_bytes(row[1..5].try_into().expect("four bytes")) as usize;
        buffer.put_slice(&row[5..5 + length]);
        if buffer.len() > 64 << 10 {
            messages.push(buffer.split().freeze());
        }
    }
    buffer.put_i16(-1);
    messages.push(buffer.freeze());
    messages
}

async fn copy_into(client: &Client, table: &str, chunk: Vec<Bytes>) {
    let copy = client
        .copy_in(&format!(
            "COPY {table} (order_id, user_id, amount, currency, status, updated_at, note) FROM STDIN BINARY"
        ))
        .await
        .expect("COPY starts");
    let mut copy = std::pin::pin!(copy);
    for message in chunk {
        copy.feed(message).await.expect("COPY takes its rows");
    }
    copy.finish().await.expect("COPY ends");
}

async fn staged_upsert(client: &Client, chunk: Vec<Bytes>) {
    client
        .batch_execute("BEGIN; CREATE TEMP TABLE staged (LIKE orders, place bigserial) ON COMMIT DROP")
        .await
        .expect("a staged table");
    copy_into(client, "staged", chunk).await;
    client
        .batch_execute(
            "INSERT INTO orders SELECT DISTINCT ON (order_id) order_id, user_id, amount, currency, status, updated_at, note \
             FROM staged ORDER BY order_id, place DESC ON CONFLICT (order_id) DO UPDATE SET user_id = excluded.user_id, \
             amount = excluded.amount, currency = excluded.currency, status = excluded.status, \
             updated_at = excluded.updated_at, note = excluded.note; COMMIT",
        )
        .await
        .expect("the upsert works");
}
