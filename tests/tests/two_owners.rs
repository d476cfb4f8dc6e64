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
    let _alone = oncegate_tests::alone().await;
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
    let _alone = oncegate_tests::alone().await;
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
    let _alone = oncegate_tests::alone().await;
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

/// Two gateways on one topic: the second one only relays, as every instance but one has to.
fn two_relays(kafka: &Kafka, postgres: &Postgres, name: &str, groups: [&str; 2]) -> [Gateway; 2] {
    let route = OrdersRoute::new("orders", Mode::Upsert, &postgres.url(name));
    let config = |route: &OrdersRoute, group| route.clone().relay(&kafka.brokers(), name, group).toml();
    let second = route.clone().options("lanes = { http = 0, relay = 2 }");
    [Gateway::new(&config(&route, groups[0])), Gateway::new(&config(&second, groups[1]))]
}

#[tokio::test(flavor = "multi_thread")]
async fn p4_two_relays_of_two_groups_fence_each_other_and_write_everything_once() {
    let _alone = oncegate_tests::alone().await;
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    let table =
        postgres.database("two_groups", &(orders_table("orders") + ";" + &effects_of("orders"))).await;
    kafka.topic("two_groups", 2).await;
    let workload = Workload::generate(Mode::Upsert, 44, 40_000, 20, now_us());
    let [mut first, mut second] = two_relays(kafka, postgres, "two_groups", ["one", "two"]);
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

#[tokio::test(flavor = "multi_thread")]
async fn p13_two_instances_of_one_group_share_the_partitions_and_hand_them_over() {
    let _alone = oncegate_tests::alone().await;
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    let table = postgres.database("one_group", &(orders_table("orders") + ";" + &effects_of("orders"))).await;
    kafka.topic("one_group", 4).await;
    let workload = Workload::generate(Mode::Upsert, 45, 60_000, 20, now_us());
    let [mut first, mut second] = two_relays(kafka, postgres, "one_group", ["one_group", "one_group"]);
    first.start().await;
    let mut slices = workload.sent.chunks(500);
    let mut produce = || {
        let slice = slices.next().expect("the second instance gets its share before all is produced");
        kafka.produce("one_group", slice.iter().map(|change| change.produced(4)));
    };
    (0..10).for_each(|_| produce());
    // Twice: partitions go to the second one, and back.
    for round in 0..2 {
        second.start().await;
        while written(&second).await == 0.0 {
            produce();
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        if round == 0 {
            assert!(second.terminate().await.success());
            produce();
        }
    }
    (0..10).for_each(|_| produce());
    let sent = workload.sent[..workload.sent.len() - slices.map(<[Change]>::len).sum::<usize>()].to_vec();
    await_table(&table, "orders", &Workload { sent, ..workload }.model(), PATIENCE).await;
    assert_each_effect_once(&table, "orders").await;
    assert!(written(&first).await > 0.0);
}

/// Rows that this gateway has made since it was started.
async fn written(gateway: &Gateway) -> f64 {
    gateway.metric("oncegate_records_total", &["outcome=\"written\""]).await.unwrap_or(0.0)
}
