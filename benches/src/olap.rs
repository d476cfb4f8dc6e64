//! Kafka to ClickHouse against direct inserts of the same blocks by one client; Kafka to DuckDB against the bare appender (feature
//! `duckdb`); the write proxy against a bare reverse proxy, and against an echo for copies.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use adapters::clickhouse::{ClickhouseConfig, ClickhouseSink};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use oncegate::lane::Rules;
use oncegate_tests::{
    gateway::Gateway,
    servers::{Clickhouse, Kafka, Produced},
    workload::{Change, Mode as Kind, Order, Workload},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Mutex,
};

use crate::{
    Scale,
    http::{CONNECTIONS, JSON, Served, order},
    load::{self, post},
    relay::{relayed, scattered},
    report::{Report, Row},
};

const COLUMNS: &str = "(order_id String, user_id Int64, amount Decimal(18, 4), currency String, status String, \
     updated_at DateTime64(6, 'UTC'), note String) ENGINE = MergeTree ORDER BY order_id \
     SETTINGS non_replicated_deduplication_window = 10000";

/// As the sink's page advises: each insert costs.
const LINGER_MS: u64 = 100;

pub(crate) async fn run(scale: Scale, only: &str) -> Report {
    let mut report = Report::new("olap");
    report.rivals = vec![
        ("clickhouse, 1 lane", "oncegate", "direct inserts", 0.7),
        ("clickhouse, 20 % copies", "oncegate", "direct inserts", 0.7),
        ("duckdb, 1 lane", "oncegate", "bare appender", 0.7),
        ("duckdb, 1 lane", "oncegate", "bare appender, columns", 0.7),
        ("duckdb, row key, 20 % copies", "oncegate", "bare appender", 0.7),
        ("duckdb, row key, 20 % copies", "oncegate", "bare appender, columns", 0.7),
        ("upstream, unique keys", "oncegate", "bare reverse proxy", 0.5),
        ("upstream, copies only", "oncegate", "bare hyper echo", 0.8),
    ];
    let wanted = |figure: &str| figure.contains(only);
    for (figure, copies) in [("clickhouse, 1 lane", 0), ("clickhouse, 20 % copies", 20)] {
        if wanted(figure) {
            into_clickhouse(&mut report, scale, figure, copies).await;
        }
    }
    #[cfg(feature = "duckdb")]
    for (figure, copies, keyed) in [("duckdb, 1 lane", 0, false), ("duckdb, row key, 20 % copies", 20, true)]
    {
        if wanted(figure) {
            crate::duckdb::run(&mut report, &inserts(scale, copies), figure, keyed).await;
        }
    }
    if wanted("upstream, unique keys") || wanted("upstream, copies only") {
        let time = Duration::from_secs(if scale == Scale::Full { 20 } else { 6 });
        upstream(&mut report, time).await;
    }
    report
}

fn inserts(scale: Scale, copies: u32) -> Workload {
    let records = if scale == Scale::Full { 1_000_000 } else { 300_000 };
    let until = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros();
    let until = i64::try_from(until).expect("this era");
    scattered(Workload::generate(Kind::Insert, 1, records, copies, until))
}

async fn into_clickhouse(report: &mut Report, scale: Scale, figure: &'static str, copies: u32) {
    let workload = inserts(scale, copies);
    let (kafka, clickhouse) = (Kafka::start(), Clickhouse::start());
    kafka.topic("orders", 1).await;
    let sent: Vec<Produced> = workload.sent.iter().map(|change| change.produced(1)).collect();
    let count = sent.len();
    kafka.produce("orders", sent);
    direct(&clickhouse, &workload, figure, "warm-up").await;
    report.rows.push(direct(&clickhouse, &workload, figure, "direct inserts").await);
    let table = clickhouse.table("gate", COLUMNS).await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let sink = Arc::new(sink(&clickhouse, &table, folder.path()));
    let relayed = relayed(&kafka, "orders", &["/order_id"], sink, (0, 1, LINGER_MS), None, count).await;
    report.rows.push(relayed.row(figure, holds(&clickhouse, &table, &workload).await));
    report.rows.push(direct(&clickhouse, &workload, figure, "direct inserts (again)").await);
}

fn sink(clickhouse: &Clickhouse, table: &str, folder: &std::path::Path) -> ClickhouseSink {
    let config = ClickhouseConfig::new(clickhouse.url(), table, folder.join("journal"));
    ClickhouseSink::new(config).unwrap_or_else(|misfit| panic!("{misfit}"))
}

/// Each order once.
async fn holds(clickhouse: &Clickhouse, table: &str, workload: &Workload) -> bool {
    let counts = clickhouse.query(&format!("SELECT count(), uniqExact(order_id) FROM {table}")).await;
    let orders = workload.model().len();
    counts.expect("an answer").trim() == format!("{orders}\t{orders}")
}

/// One client, one connection, one block after another, each as large as a full batch of the relay.
async fn direct(
    clickhouse: &Clickhouse,
    workload: &Workload,
    figure: &'static str,
    arm: &'static str,
) -> Row {
    let table = clickhouse.table("direct", COLUMNS).await;
    let mut known = std::collections::HashSet::new();
    let distinct: Vec<&Order> = workload
        .sent
        .iter()
        .filter(|change| known.insert(change.order_id()))
        .filter_map(|change| if let Change::Put(order) = change { Some(order) } else { None })
        .collect();
    let rows = distinct.len();
    let block = |orders: &[&Order]| {
        let mut bytes = Vec::new();
        orders.iter().for_each(|order| row_binary(order, &mut bytes));
        Bytes::from(bytes)
    };
    let blocks: Vec<Bytes> = distinct.chunks(Rules::default().max_records).map(block).collect();
    let sql = format!("INSERT INTO {table} FORMAT RowBinary");
    let query: String = sql.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let stream = TcpStream::connect(("127.0.0.1", clickhouse.port())).await.expect("the engine listens");
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("a connection");
    tokio::spawn(connection);
    let started = Instant::now();
    for block in blocks {
        let request = Request::post(format!("/?query={query}")).header("host", "bench");
        sender.ready().await.expect("the engine keeps the connection");
        let answer =
            sender.send_request(request.body(Full::new(block)).expect("a request")).await.expect("an answer");
        let status = answer.status();
        let body = answer.into_body().collect().await.expect("a whole answer").to_bytes();
        assert!(status.is_success(), "{}", String::from_utf8_lossy(&body));
    }
    let took = started.elapsed();
    Row {
        figure,
        arm,
        value: rows as f64 / took.as_secs_f64(),
        unit: "rows/s",
        correct: holds(clickhouse, &table, workload).await,
        note: format!("{rows} rows in {took:.1?}"),
    }
}

/// An order as RowBinary has it, in the order of [`COLUMNS`].
fn row_binary(order: &Order, row: &mut Vec<u8>) {
    let text = |text: &str, row: &mut Vec<u8>| {
        let mut length = text.len();
        while length >= 128 {
            row.push((length % 128) as u8 | 128);
            length /= 128;
        }
        row.push(length as u8);
        row.extend_from_slice(text.as_bytes());
    };
    let (whole, part) = order.amount.split_once('.').unwrap_or((&order.amount, ""));
    let amount: i64 = format!("{whole}{part:0<4}").parse().expect("a decimal with four places at most");
    text(&order.order_id, row);
    row.extend_from_slice(&order.user_id.to_le_bytes());
    row.extend_from_slice(&amount.to_le_bytes());
    text(order.currency, row);
    text(order.status, row);
    row.extend_from_slice(&order.updated_us.to_le_bytes());
    text(&order.note, row);
}

/// A service that answers with what it got, behind the gateway and behind a bare proxy.
async fn upstream(report: &mut Report, time: Duration) {
    let service = Served::start(&["echo"]);
    let to = service.address.to_string();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut gateway = Gateway::new(&format!(
        "[sinks.orders]\ntype = \"http\"\nurl = \"http://{to}\"\nanswers = \"{}\"\n\
         [routes.orders]\nkey = [\"/order_id\"]\nwindow = \"24h\"\nsink = \"orders\"\n[log]\nlevels = \"warn\"\n",
        folder.path().join("answers").display()
    ));
    gateway.start().await;
    let through = |figure: &'static str, arm: &'static str, load: &load::Load, correct: bool| Row {
        figure,
        arm,
        value: load.rate(),
        unit: "requests/s",
        correct: load.failed == 0 && correct,
        note: format!("{CONNECTIONS} connections, {} requests", load.requests),
    };
    let request = |n: u64| Some(post("/v1/orders", JSON, &order(n)));
    let known = 1_000;
    load::run(gateway.listen(), CONNECTIONS, time, move |n| request(n).filter(|_| n < known)).await;
    let proxy = Served::start(&["proxy", "--to", &to]);
    let bare = load::run(proxy.address, CONNECTIONS, time, request).await;
    report.rows.push(through("upstream, unique keys", "bare reverse proxy", &bare, true));
    let unique = load::run(gateway.listen(), CONNECTIONS, time, move |n| request(10_000 + n)).await;
    report.rows.push(through("upstream, unique keys", "oncegate", &unique, unique.replayed == 0));
    let bare = load::run(proxy.address, CONNECTIONS, time, request).await;
    report.rows.push(through("upstream, unique keys", "bare reverse proxy (again)", &bare, true));
    let echo = load::run(service.address, CONNECTIONS, time, move |n| request(n % known)).await;
    report.rows.push(through("upstream, copies only", "bare hyper echo", &echo, true));
    let copies = load::run(gateway.listen(), CONNECTIONS, time, move |n| request(n % known)).await;
    let all = copies.replayed == copies.requests;
    report.rows.push(through("upstream, copies only", "oncegate", &copies, all));
}

/// The bare reverse proxy's own process: each connection has one of its own to the service, bodies go through as they come.
pub(crate) async fn serve_proxy(to: SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    println!("{}", listener.local_addr().expect("an address"));
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        stream.set_nodelay(true).expect("a TCP socket");
        tokio::spawn(async move {
            let upstream = TcpStream::connect(to).await.expect("the service listens");
            upstream.set_nodelay(true).expect("a TCP socket");
            let (sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(upstream)).await.expect("a connection");
            tokio::spawn(connection);
            let sender = Arc::new(Mutex::new(sender));
            let forward = service_fn(move |request: Request<Incoming>| {
                let sender = sender.clone();
                async move { sender.lock().await.send_request(request).await }
            });
            hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), forward)
                .await
                .ok();
        });
    }
}
