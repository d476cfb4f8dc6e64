//! Kafka to a DuckDB file, against the bare appender with the same rows and as many in a transaction: row by row, as it is documented,
//! and by columns that stand ready.

use std::{path::Path, sync::Arc, time::Instant};

use adapters::{
    duckdb::{DuckdbConfig, DuckdbSink, FileConnection},
    sink::Mode,
};
use duckdb::{
    Appender,
    arrow::{
        array::{ArrayRef, Decimal128Array, Int64Array, RecordBatch, StringArray, TimestampMicrosecondArray},
        datatypes::{DataType, Field, Schema, TimeUnit},
    },
    params,
    types::{Decimal, TimeUnit as Unit, Value},
};
use oncegate::lane::Rules;
use oncegate_tests::{
    servers::{Kafka, Produced},
    workload::{Change, Order, Workload},
};

use crate::{
    relay::relayed,
    report::{Report, Row},
};

const WIDTH: u8 = 18;
const SCALE: u8 = 4;

/// The table, with `key` behind its first column.
fn table(key: &str) -> String {
    format!(
        "CREATE TABLE orders (order_id VARCHAR{key}, user_id BIGINT NOT NULL, amount DECIMAL({WIDTH}, {SCALE}) NOT NULL, \
         currency VARCHAR NOT NULL, status VARCHAR NOT NULL, updated_at TIMESTAMPTZ NOT NULL, note VARCHAR NOT NULL)"
    )
}

/// Each rival before and after the relay.
pub(crate) async fn run(report: &mut Report, workload: &Workload, figure: &'static str, keyed: bool) {
    let ddl = table(if keyed { " PRIMARY KEY" } else { "" });
    let kafka = Kafka::start();
    kafka.topic("orders", 1).await;
    let sent: Vec<Produced> = workload.sent.iter().map(|change| change.produced(1)).collect();
    let count = sent.len();
    kafka.produce("orders", sent);
    appender(&ddl, workload, figure, "warm-up", columns);
    report.rows.push(appender(&ddl, workload, figure, "bare appender", rows));
    report.rows.push(appender(&ddl, workload, figure, "bare appender, columns", columns));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("orders.db");
    let config = DuckdbConfig {
        mode: Mode::Insert,
        row_key: if keyed { vec!["order_id".to_owned()] } else { Vec::new() },
        create: Some(ddl.clone()),
        ..DuckdbConfig::new(&file, "orders")
    };
    let sink = Arc::new(DuckdbSink::new(config));
    let relayed = relayed(&kafka, "orders", &["/order_id"], sink, (0, 1, 0), None, count).await;
    report.rows.push(relayed.row(figure, holds(&file, workload)));
    report.rows.push(appender(&ddl, workload, figure, "bare appender (again)", rows));
    report.rows.push(appender(&ddl, workload, figure, "bare appender, columns (again)", columns));
}

/// Each order once, with its own values.
fn holds(file: &Path, workload: &Workload) -> bool {
    let connection = FileConnection::open(file).expect("the file opens");
    let sums = "SELECT count(*), count(DISTINCT order_id), sum(user_id)::VARCHAR, sum(amount)::VARCHAR, sum(epoch_us(updated_at))::VARCHAR FROM orders";
    let found: (i64, i64, String, String, String) = connection
        .query_row(sums, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?)))
        .expect("the table can be read");
    let model = workload.model();
    let sum = |of: &dyn Fn(&Order) -> i128| model.values().map(of).sum::<i128>();
    let amount = sum(&|order| amount(order));
    let unit = 10_i128.pow(SCALE.into());
    let count = i64::try_from(model.len()).expect("few");
    let expected = (
        count,
        count,
        sum(&|order| order.user_id.into()).to_string(),
        format!("{}.{:04}", amount / unit, amount % unit),
        sum(&|order| order.updated_us.into()).to_string(),
    );
    if found != expected {
        eprintln!("{found:?}, expected {expected:?}");
    }
    found == expected
}

/// In units of the last place.
fn amount(order: &Order) -> i128 {
    let (whole, part) = order.amount.split_once('.').unwrap_or((&order.amount, ""));
    format!("{whole}{part:0<4}").parse().expect("a decimal with four places at most")
}

/// What stands ready before the clock starts, and how it goes in.
type Way = fn(&[&Order]) -> Box<dyn Fn(&mut Appender<'_>)>;

/// One connection, one transaction and one appender after another, each as large as a full batch of the relay.
fn appender(ddl: &str, workload: &Workload, figure: &'static str, arm: &'static str, way: Way) -> Row {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("orders.db");
    let connection = FileConnection::open(&file).expect("the file opens");
    connection.execute_batch(ddl).expect("a table");
    let mut known = std::collections::HashSet::new();
    let distinct: Vec<&Order> = workload
        .sent
        .iter()
        .filter(|change| known.insert(change.order_id()))
        .filter_map(|change| if let Change::Put(order) = change { Some(order) } else { None })
        .collect();
    let count = distinct.len();
    let ready: Vec<_> = distinct.chunks(Rules::default().max_records).map(way).collect();
    let started = Instant::now();
    for append in ready {
        connection.execute_batch("BEGIN TRANSACTION").expect("a transaction begins");
        let mut appender = connection.appender("orders").expect("an appender");
        append(&mut appender);
        appender.flush().expect("the rows go in");
        drop(appender);
        connection.execute_batch("COMMIT").expect("a transaction commits");
    }
    let took = started.elapsed();
    drop(connection);
    Row {
        figure,
        arm,
        value: count as f64 / took.as_secs_f64(),
        unit: "rows/s",
        correct: holds(&file, workload),
        note: format!("{count} rows in {took:.1?}"),
    }
}

fn rows(orders: &[&Order]) -> Box<dyn Fn(&mut Appender<'_>)> {
    let ready: Vec<_> = orders
        .iter()
        .map(|order| {
            let amount = Decimal::new(WIDTH, SCALE, amount(order)).expect("it fits");
            let at = Value::Timestamp(Unit::Microsecond, order.updated_us);
            (
                order.order_id.clone(),
                order.user_id,
                Value::Decimal(amount),
                order.currency,
                order.status,
                at,
                order.note.clone(),
            )
        })
        .collect();
    Box::new(move |appender| {
        for (id, user, amount, currency, status, at, note) in &ready {
            appender
                .append_row(params![id, user, amount, currency, status, at, note])
                .expect("a row goes in");
        }
    })
}

fn columns(orders: &[&Order]) -> Box<dyn Fn(&mut Appender<'_>)> {
    let texts = |of: fn(&Order) -> &str| {
        Arc::new(orders.iter().map(|order| Some(of(order))).collect::<StringArray>()) as ArrayRef
    };
    let amounts = Decimal128Array::from_iter_values(orders.iter().map(|order| amount(order)))
        .with_precision_and_scale(WIDTH, SCALE.cast_signed())
        .expect("it fits");
    let times = TimestampMicrosecondArray::from_iter_values(orders.iter().map(|order| order.updated_us));
    let field = |name: &str, data_type: DataType| Field::new(name, data_type, false);
    let schema = Schema::new(vec![
        field("order_id", DataType::Utf8),
        field("user_id", DataType::Int64),
        field("amount", DataType::Decimal128(WIDTH, SCALE.cast_signed())),
        field("currency", DataType::Utf8),
        field("status", DataType::Utf8),
        field("updated_at", DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))),
        field("note", DataType::Utf8),
    ]);
    let arrays = vec![
        texts(|order| &order.order_id),
        Arc::new(Int64Array::from_iter_values(orders.iter().map(|order| order.user_id))) as ArrayRef,
        Arc::new(amounts),
        texts(|order| order.currency),
        texts(|order| order.status),
        Arc::new(times.with_timezone("UTC")),
        texts(|order| &order.note),
    ];
    let batch = RecordBatch::try_new(Arc::new(schema), arrays).expect("columns of one length");
    Box::new(move |appender| appender.append_record_batch(batch.clone()).expect("the rows go in"))
}
