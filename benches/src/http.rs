//! The HTTP door: single writes against `pgbench`, copies against a bare hyper echo, NDJSON up to `deliver` and into SQLite.

use std::{
    convert::Infallible,
    net::SocketAddr,
    path::PathBuf,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use adapters::{
    sink::{
        Acquire, Batch, Column, Encode, Guarantee, Life, Mark, Misfit, Mode, Pulse, Receipts, Resolution,
        RouteRow, RowKind, RowOutcome, Session, ShardId, ShardState, ShardStep, Sink, SinkError,
    },
    value::{BadValue, Value},
};
use async_trait::async_trait;
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use oncegate::{
    door::http::{Draining, HttpDoor, HttpOptions},
    gate::Gate,
    key::KeySpec,
    metrics::Metrics,
};
use oncegate_tests::{gateway::Gateway, servers::Postgres};
use tokio::net::TcpListener;

use crate::{
    Scale,
    load::{self, post},
    report::{Report, Row},
};

pub(crate) const CONNECTIONS: usize = 64;
pub(crate) const JSON: &str = "application/json";
const TABLE: &str = "(order_id text PRIMARY KEY, user_id bigint NOT NULL, amount numeric NOT NULL, currency text NOT NULL, note text NOT NULL)";
const NDJSON_RECORDS: u64 = 1_000;

pub(crate) async fn run(scale: Scale, only: &str) -> Report {
    let time = Duration::from_secs(if scale == Scale::Full { 20 } else { 6 });
    let mut report = Report::new("http");
    report.rivals = vec![
        ("single writes", "oncegate", "pgbench, 32 clients", 3.0),
        ("copies only", "oncegate", "bare hyper echo", 0.75),
        ("ndjson of 1,000 into sqlite", "oncegate", "sqlite's own rate", 0.9),
    ];
    let wanted = |figure: &str| only.is_empty() || figure.contains(only);
    if wanted("single writes") || wanted("copies only") {
        against_postgres(&mut report, time).await;
    }
    if wanted("ndjson") {
        ndjson(&mut report, time).await;
    }
    report
}

async fn against_postgres(report: &mut Report, time: Duration) {
    let postgres = Postgres::start();
    let client =
        postgres.database("bench", &format!("CREATE TABLE orders {TABLE}; CREATE TABLE rival {TABLE}")).await;
    report.rows.push(pgbench(&postgres, &client, time).await);
    let mut gateway = Gateway::new(&format!(
        "[sinks.orders]\ntype = \"postgres\"\nurl = \"{}\"\ntable = \"public.orders\"\nmode = \"insert\"\nrow_key = [\"order_id\"]\n\
         [routes.orders]\nkey = [\"/order_id\"]\nwindow = \"24h\"\nsink = \"orders\"\n[log]\nlevels = \"warn\"\n",
        postgres.url("bench")
    ));
    gateway.start().await;
    // Warm, and the copies of the second figure.
    let known = 1_000;
    let first = load::run(gateway.listen(), CONNECTIONS, time, move |n| {
        (n < known).then(|| post("/v1/orders", JSON, &order(n)))
    })
    .await;
    let written = load::run(gateway.listen(), CONNECTIONS, time, |n| {
        Some(post("/v1/orders", JSON, &order(10_000 + n)))
    })
    .await;
    let rows: i64 = client.query_one("SELECT count(*) FROM orders", &[]).await.expect("a count").get(0);
    report.rows.push(Row {
        figure: "single writes",
        arm: "oncegate",
        value: written.rate(),
        unit: "requests/s",
        correct: written.failed + first.failed + written.replayed == 0
            && rows as u64 == known + written.requests,
        note: format!("{CONNECTIONS} connections, {} rows", written.requests),
    });
    report.rows.push(echo(time).await);
    let copies = load::run(gateway.listen(), CONNECTIONS, time, move |n| {
        Some(post("/v1/orders", JSON, &order(n % known)))
    })
    .await;
    report.rows.push(Row {
        figure: "copies only",
        arm: "oncegate",
        value: copies.rate(),
        unit: "requests/s",
        correct: copies.failed == 0 && copies.replayed == copies.requests,
        note: format!("{CONNECTIONS} connections"),
    });
}

pub(crate) fn order(n: u64) -> String {
    let id = n.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
    format!(
        r#"{{"order_id":"{id:016x}","user_id":{n},"amount":"{}.50","currency":"EUR","note":"a note of some thirty characters"}}"#,
        n % 1000
    )
}

/// Single-row inserts and commits, the usual way.
async fn pgbench(postgres: &Postgres, client: &tokio_postgres::Client, time: Duration) -> Row {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = folder.path().join("insert.sql");
    std::fs::write(
        &script,
        "\\set a random(1, 4000000000000000000)\nINSERT INTO rival VALUES (to_hex(:a::bigint), 1, 5.50, 'EUR', 'a note of some thirty characters');\n",
    )
    .expect("a script");
    let program = PathBuf::from("/usr/lib/postgresql/15/bin/pgbench");
    let program = if program.exists() { program } else { PathBuf::from("pgbench") };
    let seconds = time.as_secs().to_string();
    let port = postgres.port().to_string();
    let output = tokio::task::spawn_blocking(move || {
        Command::new(program)
            .args([
                "-h",
                "127.0.0.1",
                "-p",
                &port,
                "-U",
                "postgres",
                "-n",
                "-M",
                "prepared",
                "-c",
                "32",
                "-j",
                "2",
                "-T",
                &seconds,
            ])
            .arg("-f")
            .arg(&script)
            .arg("bench")
            .output()
    })
    .await
    .expect("pgbench ran")
    .expect("pgbench is installed");
    let text = String::from_utf8_lossy(&output.stdout);
    let rate =
        text.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse::<f64>().ok());
    if rate.is_none() {
        eprintln!("{text}{}", String::from_utf8_lossy(&output.stderr));
    }
    let rows: i64 = client.query_one("SELECT count(*) FROM rival", &[]).await.expect("a count").get(0);
    Row {
        figure: "single writes",
        arm: "pgbench, 32 clients",
        value: rate.unwrap_or_default(),
        unit: "requests/s",
        correct: rate.is_some() && rows > 0,
        note: "single-row inserts, prepared".into(),
    }
}

/// A server of the bench in a process of its own, as the gateway is.
pub(crate) struct Served {
    child: std::process::Child,
    pub(crate) address: SocketAddr,
}

impl Served {
    /// Runs this program with `arguments`; it says its address.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program has a file"))
            .args(arguments)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("a pipe");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line)
            .expect("the server says its address");
        Self { child, address: line.trim().parse().expect("an address") }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).expect("the server ends");
    }
}

async fn echo(time: Duration) -> Row {
    let echo = Served::start(&["echo"]);
    let load =
        load::run(echo.address, CONNECTIONS, time, |n| Some(post("/v1/orders", JSON, &order(n % 1_000))))
            .await;
    Row {
        figure: "copies only",
        arm: "bare hyper echo",
        value: load.rate(),
        unit: "requests/s",
        correct: load.failed == 0,
        note: format!("{CONNECTIONS} connections"),
    }
}

/// The echo's own process.
pub(crate) async fn serve_echo() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    println!("{}", listener.local_addr().expect("an address"));
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        stream.set_nodelay(true).expect("a TCP socket");
        tokio::spawn(async move {
            let service = service_fn(|request: hyper::Request<Incoming>| async {
                let body = request.into_body().collect().await.expect("a whole body").to_bytes();
                Ok::<_, Infallible>(hyper::Response::new(Full::new(body)))
            });
            hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await
                .ok();
        });
    }
}

fn ndjson_body(request: u64) -> Vec<u8> {
    let lines: Vec<String> = (0..NDJSON_RECORDS).map(|at| order(request * NDJSON_RECORDS + at)).collect();
    post("/v1/orders", "application/x-ndjson", &(lines.join("\n") + "\n"))
}

async fn ndjson(report: &mut Report, time: Duration) {
    // The requests are made before the clock starts; the load then only writes and reads.
    let count = if time > Duration::from_secs(10) { 4_000 } else { 1_500 };
    let bodies: Arc<Vec<Vec<u8>>> = Arc::new((0..count).map(ndjson_body).collect());
    let metrics = Arc::new(Metrics::new());
    let gate = Gate::builder(oncegate::gate::memory_store())
        .name("orders")
        .key(KeySpec::pointers(["/order_id"]).expect("a key spec"))
        .sink(Arc::new(Nowhere::default()))
        .metrics(metrics.route("orders"))
        .build()
        .await
        .unwrap_or_else(|fault| panic!("{fault}"));
    let door = HttpDoor::bind(
        SocketAddr::from(([127, 0, 0, 1], 0)),
        HttpOptions::default(),
        [Arc::new(gate.clone())],
        metrics,
        Draining::default(),
    )
    .expect("a free port");
    let address = door.local_addr().expect("an address");
    tokio::spawn(door.serve(std::future::pending()));
    report
        .rows
        .push(ndjson_load("ndjson of 1,000 up to deliver", "oncegate", address, bodies.clone(), true).await);
    gate.close().await;

    let folder = tempfile::tempdir().expect("a temporary folder");
    let rate = sqlite_rate(&folder.path().join("rival.db"), count.min(400) * NDJSON_RECORDS);
    report.rows.push(Row {
        figure: "ndjson of 1,000 into sqlite",
        arm: "sqlite's own rate",
        value: rate,
        unit: "records/s",
        correct: true,
        note: "prepared inserts, 10,000 a transaction, synchronous = FULL".into(),
    });
    let mut gateway = Gateway::new(&format!(
        "[sinks.orders]\ntype = \"sqlite\"\npath = \"{}\"\ntable = \"orders\"\nmode = \"insert\"\nrow_key = [\"order_id\"]\n\
         create = \"CREATE TABLE orders (order_id TEXT NOT NULL PRIMARY KEY, user_id INTEGER, amount TEXT, currency TEXT, note TEXT)\"\n\
         [routes.orders]\nkey = [\"/order_id\"]\nwindow = \"24h\"\nsink = \"orders\"\n[log]\nlevels = \"warn\"\n",
        folder.path().join("orders.db").display()
    ));
    gateway.start().await;
    let sent: Arc<Vec<Vec<u8>>> = Arc::new(bodies.iter().take(400).cloned().collect());
    let requests = sent.len() as u64;
    let mut row = ndjson_load("ndjson of 1,000 into sqlite", "oncegate", gateway.listen(), sent, true).await;
    let counted = adapters::sqlite::count_distinct(&folder.path().join("orders.db"), "orders", "order_id")
        .expect("a count");
    row.correct &= counted == (requests * NDJSON_RECORDS, requests * NDJSON_RECORDS);
    report.rows.push(row);
}

async fn ndjson_load(
    figure: &'static str,
    arm: &'static str,
    address: SocketAddr,
    bodies: Arc<Vec<Vec<u8>>>,
    all: bool,
) -> Row {
    let started = Instant::now();
    let requests = bodies.len() as u64;
    let load =
        load::run(address, 8, Duration::from_secs(120), move |n| bodies.get(n as usize).cloned()).await;
    let records = load.requests * NDJSON_RECORDS;
    Row {
        figure,
        arm,
        value: records as f64 / started.elapsed().as_secs_f64(),
        unit: "records/s",
        correct: load.failed == 0 && (!all || load.requests == requests),
        note: format!("{records} records, 8 connections"),
    }
}

fn sqlite_rate(path: &std::path::Path, records: u64) -> f64 {
    let mut database = rusqlite::Connection::open(path).expect("a database");
    database
        .execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; \
             CREATE TABLE orders (order_id TEXT NOT NULL PRIMARY KEY, user_id INTEGER, amount TEXT, currency TEXT, note TEXT)",
        )
        .expect("a table");
    let rows: Vec<(String, u64, String)> = (0..records)
        .map(|n| {
            let order: serde_json::Value = serde_json::from_str(&order(n)).expect("JSON");
            (
                order["order_id"].as_str().expect("text").into(),
                n,
                order["amount"].as_str().expect("text").into(),
            )
        })
        .collect();
    let started = Instant::now();
    for chunk in rows.chunks(10_000) {
        let transaction = database.transaction().expect("a transaction");
        {
            let mut insert = transaction
                .prepare_cached(
                    "INSERT INTO orders VALUES (?1, ?2, ?3, 'EUR', 'a note of some thirty characters')",
                )
                .expect("SQL");
            for (id, user, amount) in chunk {
                insert.execute(rusqlite::params![id, user, amount]).expect("an insert");
            }
        }
        transaction.commit().expect("a commit");
    }
    records as f64 / started.elapsed().as_secs_f64()
}

/// A sink that takes everything and keeps nothing: what comes up to `deliver` is measured.
#[derive(Debug, Default)]
struct Nowhere {
    columns: Option<Arc<Columns>>,
}

#[derive(Debug)]
struct Columns(Vec<Column>);

impl Encode for Columns {
    fn columns(&self) -> &[Column] {
        &self.0
    }

    /// Each value's JSON text: about what a real encoder writes.
    fn encode(
        &self,
        _: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        for (at, value) in values.iter().enumerate() {
            if let Value::Json(text) = value {
                row.extend_from_slice(&(text.len() as u32).to_be_bytes());
                row.extend_from_slice(text.as_bytes());
                if at == 0 {
                    row_key.extend_from_slice(text.as_bytes());
                }
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Sink for Nowhere {
    fn guarantee(&self) -> Guarantee {
        Guarantee::Transactional
    }
    fn mode(&self) -> Mode {
        Mode::Insert
    }
    fn row_key(&self) -> &[String] {
        &[]
    }
    fn version(&self) -> Option<&str> {
        None
    }
    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>> {
        let column = |name: &str| Column {
            name: name.into(),
            type_name: "text".into(),
            nullable: true,
            has_default: false,
        };
        Ok(self.columns.clone().unwrap_or_else(|| {
            Arc::new(Columns(["order_id", "user_id", "amount", "currency", "note"].map(column).into()))
        }))
    }
    fn session(&self, _: &str, _: &str) -> Box<dyn Session> {
        Box::new(NowhereSession(Pulse::begin()))
    }
}

struct NowhereSession(Pulse);

#[async_trait]
impl Session for NowhereSession {
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        Ok(proposed.clone())
    }
    async fn acquire(&mut self, shards: &[ShardId], _: Acquire) -> Result<Vec<ShardState>, SinkError> {
        let state = |shard: &ShardId| ShardState { epoch: 1, ..ShardState::unowned(shard) };
        Ok(shards.iter().map(state).collect())
    }
    async fn shards(&mut self, _: &str) -> Result<Vec<ShardState>, SinkError> {
        Ok(Vec::new())
    }
    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        let rows = vec![RowOutcome::Written; batch.rows.len()];
        std::hint::black_box((batch.seal)(&rows));
        Ok(Receipts { rows })
    }
    async fn resolve(&mut self, _: &[ShardStep]) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        Ok((Resolution::NotApplied, Vec::new()))
    }
    async fn marks_since(&mut self, _: &ShardId, _: i64) -> Result<Vec<Mark>, SinkError> {
        Ok(Vec::new())
    }
    async fn expire_marks(&mut self, _: &[(ShardId, i64)], _: i64) -> Result<u64, SinkError> {
        Ok(0)
    }
    async fn heartbeat(&mut self, _: &[(ShardId, i64)]) -> Result<(), SinkError> {
        Ok(())
    }
    async fn forget_all(&mut self, _: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        Ok(0)
    }
    async fn keep_partitions(&mut self, _: &[(ShardId, i64, i64)]) -> Result<Vec<Option<i64>>, SinkError> {
        Ok(Vec::new())
    }
    async fn now_ms(&mut self) -> Result<i64, SinkError> {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Ok(since.map_or(0, |since| since.as_millis() as i64))
    }
    fn connected(&self) -> bool {
        true
    }
    fn life(&self) -> Life {
        self.0.life()
    }
}
