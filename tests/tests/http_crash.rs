//! HTTP through crashes: every acknowledged key is in the table once, nothing else is, and copies get the same answer.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use oncegate_tests::{
    for_kills,
    gateway::Gateway,
    http_client::HttpClient,
    kills,
    route::OrdersRoute,
    servers::Postgres,
    workload::{Change, Mode, Order, Workload, assert_table_equals, now_us, orders_table},
};
use rand::{SeedableRng, rngs::StdRng};

const CLIENTS: usize = 8;
/// Without `ONCEGATE_KILLS`.
const KILLS: usize = 50;
const SEED: u64 = 11;
/// Two of the clients send arrays of so many records.
const ARRAY: usize = 20;

/// One acknowledged record.
#[derive(Clone, Debug)]
struct Receipt {
    sent: Instant,
    acknowledged: Instant,
    replayed: bool,
    /// Status and body of the answer to one record; of a record in an array, its key alone.
    answer: (u16, String),
}

type Receipts = BTreeMap<String, Vec<Receipt>>;

fn order(change: &Change) -> &Order {
    match change {
        Change::Put(order) => order,
        Change::Delete { .. } => panic!("inserts have no tombstones"),
    }
}

async fn send_one(client: &mut HttpClient, order: &Order, deadline: Instant) -> Receipt {
    let sent = Instant::now();
    let done = client.post_until_acknowledged("/v1/orders", &[], order.json(), deadline).await;
    let response = done.response;
    assert_eq!(response.status, 201, "{}", response.text());
    let replayed = response.header("idempotent-replayed") == "true";
    let outcome = response.header("oncegate-outcome");
    assert_eq!(outcome, if replayed { "duplicate" } else { "written" });
    Receipt { sent, acknowledged: Instant::now(), replayed, answer: (201, response.text()) }
}

/// Sends an array until each of its records is written or a duplicate; 207 with an unknown or a copy in flight is no decision.
async fn send_array(client: &mut HttpClient, orders: &[&Order], deadline: Instant) -> Vec<Receipt> {
    let body = format!("[{}]", orders.iter().map(|order| order.json()).collect::<Vec<_>>().join(","));
    let sent = Instant::now();
    let mut replayed = vec![true; orders.len()];
    loop {
        let done = client.post_until_acknowledged("/v1/orders", &[], body.clone(), deadline).await;
        let answer = done.response.json();
        let outcomes = answer["outcomes"].as_array().unwrap_or_else(|| panic!("no outcomes: {answer}"));
        assert_eq!(outcomes.len(), orders.len());
        let mut open = 0;
        for (place, outcome) in outcomes.iter().enumerate() {
            assert_eq!(outcome["index"], place);
            match outcome["outcome"].as_str() {
                Some("written") => replayed[place] = false,
                Some("duplicate") => {}
                Some("unknown") => open += 1,
                _ => panic!("{answer}"),
            }
        }
        assert_eq!(done.response.status, if open > 0 { 207 } else { 200 }, "{answer}");
        if open == 0 {
            let key =
                |place: usize| outcomes[place]["key"].as_str().expect("every outcome has a key").to_owned();
            let receipt = |place| Receipt {
                sent,
                acknowledged: Instant::now(),
                replayed: replayed[place],
                answer: (200, key(place)),
            };
            return (0..orders.len()).map(receipt).collect();
        }
        assert!(Instant::now() < deadline, "{answer}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn check(order_id: &str, receipts: &[Receipt]) {
    let first = receipts.iter().filter(|receipt| !receipt.replayed).count();
    assert!(first <= 1, "{order_id} was answered as written {first} times: {receipts:?}");
    for receipt in receipts {
        let before = receipts.iter().any(|other| other.acknowledged < receipt.sent);
        assert!(!before || receipt.replayed, "{order_id}: a copy was answered as new: {receipts:?}");
    }
    let mut answers =
        receipts.iter().filter(|receipt| receipt.answer.0 == 201).map(|receipt| &receipt.answer);
    if let Some(answer) = answers.next() {
        assert!(
            answers.all(|other| other == answer),
            "{order_id}: copies were answered differently: {receipts:?}"
        );
        let key = receipts.iter().find(|receipt| receipt.answer.0 == 200);
        assert!(key.is_none_or(|receipt| answer.1.contains(&receipt.answer.1)), "{order_id}: {receipts:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_acknowledged_key_is_in_the_table_once_through_fifty_kills() {
    let postgres = Postgres::shared();
    // No unique index and no row key: only Oncegate keeps copies out, and a double would be a second row.
    let ddl = orders_table("orders").replace(" PRIMARY KEY", " NOT NULL");
    let table = postgres.database("http_crash", &ddl).await;
    let route = OrdersRoute::new("orders", Mode::Insert, &postgres.url("http_crash")).without_row_key();
    let mut gateway = Gateway::new(&route.toml());
    gateway.start().await;

    let workload = Arc::new(Workload::generate(Mode::Insert, SEED, 400_000, 30, now_us()));
    let (next, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let kills = kills(KILLS);
    let deadline = Instant::now() + for_kills(Duration::from_secs(400), KILLS);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (workload, next, over) = (workload.clone(), next.clone(), over.clone());
            let mut client = HttpClient::new(gateway.listen());
            let take = if number < 2 { ARRAY } else { 1 };
            tokio::spawn(async move {
                let mut receipts = Vec::<(String, Receipt)>::new();
                while !over.load(Ordering::Relaxed) {
                    // A fast machine reaches the end: then everything comes again, as copies.
                    let from = next.fetch_add(take, Ordering::Relaxed) % workload.sent.len();
                    let to = (from + take).min(workload.sent.len());
                    let orders: Vec<&Order> = workload.sent[from..to].iter().map(order).collect();
                    let sent = match orders[..] {
                        [order] => vec![send_one(&mut client, order, deadline).await],
                        _ => send_array(&mut client, &orders, deadline).await,
                    };
                    receipts.extend(orders.iter().map(|order| order.order_id.clone()).zip(sent));
                }
                receipts
            })
        })
        .collect();

    let mut random = StdRng::seed_from_u64(SEED);
    gateway.goes_through(kills, 100..900, &mut random).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    over.store(true, Ordering::Relaxed);

    let mut all = Receipts::new();
    for client in clients {
        for (order_id, receipt) in client.await.expect("no client gave up") {
            all.entry(order_id).or_default().push(receipt);
        }
    }
    all.iter().for_each(|(order_id, receipts)| check(order_id, receipts));
    let records: usize = all.values().map(Vec::len).sum();
    println!("seed {SEED}: {kills} kills, {records} records acknowledged, {} keys", all.len());
    assert!(records > 1000, "only {records} records were acknowledged");
    let mut model = workload.model();
    model.retain(|order_id, _| all.contains_key(order_id));
    assert_eq!(model.len(), all.len());
    assert_table_equals(&table, "orders", &model).await;

    // All over again: the answers are the same, and nothing changes.
    let mut client = HttpClient::new(gateway.listen());
    for (order_id, receipts) in all.iter().step_by(all.len() / 500 + 1) {
        let again = send_one(&mut client, &model[order_id], deadline).await;
        assert!(again.replayed, "{order_id}");
        check(order_id, &[receipts.clone(), vec![again]].concat());
    }
    let mismatch = Order { amount: "0.1".into(), ..model.values().next().expect("there are rows").clone() };
    let answer = client.post("/v1/orders", &[], mismatch.json()).await.expect("the gateway runs");
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (422, "application/problem+json"),
        "{}",
        answer.text()
    );
    assert_table_equals(&table, "orders", &model).await;
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
}
