//! A second process on the same shards fences the first: nothing is written twice, whatever the first was doing when it
//! froze, and the first says who took over.

use std::time::{Duration, Instant};

use oncegate_tests::{
    gateway::Gateway,
    http_client::HttpClient,
    proxy::{Action, Point, Proxy},
    route::OrdersRoute,
    servers::{Kafka, Postgres},
    workload::{
        Change, Mode, Order, Workload, assert_each_effect_once, assert_table_equals, await_table, effects_of,
        now_us, orders_table,
    },
};

const PATIENCE: Duration = Duration::from_secs(60);
/// A frozen owner is replaced within so much: its heartbeat or its group session has to run out first.
const TAKE_OVER: Duration = Duration::from_secs(20);

fn orders(seed: u64, count: usize) -> (Workload, Vec<Order>) {
    let workload = Workload::generate(Mode::Insert, seed, count, 0, now_us());
    let order = |change: &Change| match change {
        Change::Put(order) => order.clone(),
        Change::Delete { .. } => panic!("inserts have no tombstones"),
    };
    let orders = workload.sent.iter().map(order).collect();
    (workload, orders)
}

/// Sends all; answers with how many were replayed.
async fn send(gateway: &Gateway, orders: &[Order]) -> usize {
    let (mut client, mut replayed) = (HttpClient::new(gateway.listen()), 0);
    for order in orders {
        let done =
            client.post_until_acknowledged("/v1/orders", &[], order.json(), Instant::now() + PATIENCE).await;
        assert_eq!(done.response.status, 201, "{}", done.response.text());
        replayed += usize::from(done.response.header("idempotent-replayed") == "true");
    }
    replayed
}

#[tokio::test(flavor = "multi_thread")]
async fn p3_a_second_http_owner_waits_for_a_live_one_and_says_whom_it_waits_for() {
    let postgres = Postgres::shared();
    let table = postgres.database("two_http_waits", &orders_table("orders")).await;
    let config = OrdersRoute::new("orders", Mode::Insert, &postgres.url("two_http_waits")).toml();
    let (workload, orders) = orders(41, 200);
    let [mut first, mut second] = [Gateway::new(&config), Gateway::new(&config)];
    first.start().await;
    send(&first, &orders[..100]).await;
    second.spawn();
    second.logged(&["waiting", "http/0", "held by", &first.name()], PATIENCE).await;
    // As long as the first lives, however long that is, the second takes nothing.
    let until = Instant::now() + Duration::from_secs(8);
    while Instant::now() < until {
        let ready = HttpClient::new(second.admin()).get("/readyz").await;
        assert!(ready.is_err() || ready.is_ok_and(|ready| ready.status == 503));
        assert_eq!(send(&first, &orders[..1]).await, 1);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(first.terminate().await.success());
    second.ready(TAKE_OVER).await;
    assert_eq!(send(&second, &orders).await, 100);
    assert_table_equals(&table, "orders", &workload.model()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p5_a_frozen_http_owner_is_replaced_and_writes_nothing_when_it_goes_on() {
    let postgres = Postgres::shared();
    // No unique index: a double would be a second row.
    let ddl = orders_table("orders").replace(" PRIMARY KEY", " NOT NULL");
    let points = [None, Some(Point::CommitArriving), Some(Point::CommitSent), Some(Point::CommitDone)];
    for (number, point) in points.into_iter().enumerate() {
        let database = format!("two_http_{number}");
        let table = postgres.database(&database, &ddl).await;
        let proxy = Proxy::start(postgres.port()).await;
        let config = |url: &str| OrdersRoute::new("orders", Mode::Insert, url).without_row_key().toml();
        let mut first = Gateway::new(&config(&postgres.url_through(proxy.port(), &database)));
        let mut second = Gateway::new(&config(&postgres.url(&database)));
        let (workload, orders) = orders(42, 100);
        first.start().await;
        send(&first, &orders[..50]).await;

        // One record is on its way when the first owner freezes.
        let sprung = point.map(|point| proxy.trap(point, Action::Hold));
        let (mut client, body) = (HttpClient::new(first.listen()).with_patience(PATIENCE), orders[50].json());
        let pending =
            sprung.is_some().then(|| tokio::spawn(async move { client.post("/v1/orders", &[], body).await }));
        if let Some(sprung) = sprung {
            tokio::time::timeout(PATIENCE, sprung).await.expect("the commit passes").expect("the proxy runs");
        }
        first.freeze();
        let frozen = Instant::now();
        second.spawn();
        second.ready(TAKE_OVER).await;
        println!("{point:?}: taken over after {:?}", frozen.elapsed());

        let replayed = send(&second, &orders).await;
        first.thaw();
        proxy.release();
        first.logged(&["fenced", "now belongs to", &second.name()], PATIENCE).await;
        // The first owner takes no more decisions.
        let refused = HttpClient::new(first.listen()).post("/v1/orders", &[], orders[99].json()).await;
        assert_eq!(refused.expect("the first runs").status, 503);
        let mut written_by_first = false;
        if let Some(pending) = pending
            && let Ok(answer) = pending.await.expect("the client runs")
        {
            println!("{point:?}: the frozen owner's caller was told {} {}", answer.status, answer.text());
            written_by_first = answer.status == 201 && answer.header("idempotent-replayed").is_empty();
        }
        // Exactly one of the two wrote the record on its way; the other did not say so.
        assert!(
            replayed == 50 + usize::from(written_by_first)
                || (replayed == 51 && point != Some(Point::CommitArriving))
        );
        assert_table_equals(&table, "orders", &workload.model()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_a_frozen_relay_is_replaced_and_writes_nothing_when_it_goes_on() {
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    for point in [Point::InsideCopy, Point::CommitArriving, Point::CommitSent, Point::CommitDone] {
        let name = format!("frozen_{point:?}").to_ascii_lowercase();
        let table = postgres.database(&name, &(orders_table("orders") + ";" + &effects_of("orders"))).await;
        let proxy = Proxy::start(postgres.port()).await;
        kafka.topic(&name, 2).await;
        let workload = Workload::generate(Mode::Insert, 43, 60_000, 20, now_us());
        let (early, late) = workload.sent.split_at(50_000);
        kafka.produce(&name, early.iter().map(|change| change.produced(2)));
        let config = |url: &str, instance| {
            let route = OrdersRoute::new("orders", Mode::Insert, url);
            route.relay(&kafka.brokers(), &name, &name).as_instance(instance).toml()
        };
        let mut first = Gateway::new(&config(&postgres.url_through(proxy.port(), &name), "first"));
        let mut second = Gateway::new(&config(&postgres.url(&name), "second"));
        let sprung = proxy.trap(point, Action::Hold);
        first.spawn();
        tokio::time::timeout(PATIENCE, sprung).await.expect("the point is reached").expect("the proxy runs");
        first.freeze();
        let frozen = Instant::now();

        // The second has to come to the end of the topic while the first still holds its half-done batch.
        second.spawn();
        let model = Workload { sent: early.to_vec(), ..workload.clone() }.model();
        await_table(&table, "orders", &model, TAKE_OVER + TAKE_OVER).await;
        println!("{point:?}: taken over, and the topic done, after {:?}", frozen.elapsed());

        first.thaw();
        proxy.release();
        kafka.produce(&name, late.iter().map(|change| change.produced(2)));
        await_table(&table, "orders", &workload.model(), PATIENCE).await;
        assert_each_effect_once(&table, "orders").await;
        first.logged(&["fenced"], PATIENCE).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn p4_two_relays_of_two_groups_fence_each_other_and_write_everything_once() {
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    let table =
        postgres.database("two_groups", &(orders_table("orders") + ";" + &effects_of("orders"))).await;
    kafka.topic("two_groups", 2).await;
    let workload = Workload::generate(Mode::Upsert, 44, 40_000, 20, now_us());
    let config = |group| {
        let route = OrdersRoute::new("orders", Mode::Upsert, &postgres.url("two_groups"));
        route.relay(&kafka.brokers(), "two_groups", group).toml()
    };
    let [mut first, mut second] = ["one", "two"].map(|group| Gateway::new(&config(group)));
    let (early, late) = workload.sent.split_at(20_000);
    kafka.produce("two_groups", early.iter().map(|change| change.produced(2)));
    first.start().await;
    second.spawn();
    let fenced = first.logged(&["fenced", "now belongs to", &second.name()], PATIENCE).await;
    println!("{fenced}");
    kafka.produce("two_groups", late.iter().map(|change| change.produced(2)));
    await_table(&table, "orders", &workload.model(), PATIENCE).await;
    assert_each_effect_once(&table, "orders").await;
}
