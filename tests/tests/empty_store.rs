//! The store folder is deleted between runs, and all records are sent again: nothing is doubled.

use std::time::{Duration, Instant};

use oncegate_tests::{
    gateway::Gateway,
    http_client::HttpClient,
    route::OrdersRoute,
    servers::{Kafka, Postgres},
    workload::{Change, Mode, Workload, assert_table_equals, await_table, now_us, orders_table},
};

fn unguarded_table(name: &str) -> String {
    orders_table(name).replace(" PRIMARY KEY", " NOT NULL")
}

#[tokio::test(flavor = "multi_thread")]
async fn http_records_sent_again_after_a_lost_store_are_copies() {
    let postgres = Postgres::shared();
    let table = postgres.database("empty_store_http", &unguarded_table("orders")).await;
    let route = OrdersRoute::new("orders", Mode::Insert, &postgres.url("empty_store_http")).without_row_key();
    let mut gateway = Gateway::new(&route.toml());
    let workload = Workload::generate(Mode::Insert, 31, 3000, 20, now_us());
    let model = workload.model();
    let lines = |changes: &[Change]| -> String {
        let json = changes.iter().map(|change| match change {
            Change::Put(order) => order.json() + "\n",
            Change::Delete { .. } => panic!("inserts have no tombstones"),
        });
        json.collect()
    };
    let deadline = Instant::now() + Duration::from_secs(120);
    for (run, killed) in [(0, false), (1, true), (2, false)] {
        gateway.start().await;
        let mut client = HttpClient::new(gateway.listen());
        for changes in workload.sent.chunks(500) {
            let headers = [("content-type", "application/x-ndjson")];
            let done = client.post_until_acknowledged("/v1/orders", &headers, lines(changes), deadline).await;
            assert_eq!(done.response.status, 200, "{}", done.response.text());
            let counts = &done.response.json()["counts"];
            let (written, duplicate) =
                (counts["written"].as_u64().unwrap_or(0), counts["duplicate"].as_u64().unwrap_or(0));
            assert_eq!(written + duplicate, 500, "{counts}");
            assert!(run == 0 || written == 0, "run {run}: {counts}");
        }
        assert_table_equals(&table, "orders", &model).await;
        if killed {
            gateway.kill();
        } else {
            assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
        }
        gateway.delete_store();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_read_again_from_the_start_after_a_lost_store_changes_nothing() {
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    let table = postgres.database("empty_store_relay", &unguarded_table("orders")).await;
    let url = postgres.url("empty_store_relay");
    let workload = Workload::generate(Mode::Insert, 32, 20_000, 20, now_us());
    let model = workload.model();
    kafka.topic("empty_store", 4).await;
    // The second topic holds the same records at other positions: only their keys tell that they are copies.
    kafka.topic("empty_store_again", 4).await;
    for topic in ["empty_store", "empty_store_again"] {
        kafka.produce(topic, workload.sent.iter().map(|change| change.produced(4)));
    }
    let route = OrdersRoute::new("orders", Mode::Insert, &url).without_row_key();
    let mut gateway = Gateway::new(&route.clone().relay(&kafka.brokers(), "empty_store", "a").toml());
    gateway.start().await;
    await_table(&table, "orders", &model, Duration::from_secs(60)).await;
    for (topic, group) in [("empty_store", "b"), ("empty_store_again", "c")] {
        assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
        gateway.delete_store();
        gateway.configure(&route.clone().relay(&kafka.brokers(), topic, group).toml());
        gateway.start().await;
        oncegate_tests::eventually("the whole topic read again", Duration::from_secs(60), async || {
            let (committed, ends) = (kafka.committed(topic, 4, group), kafka.ends(topic, 4));
            if committed == ends {
                Ok(())
            } else {
                Err(format!("{committed:?} of {ends:?}\n{}", gateway.log_tail(10)))
            }
        })
        .await;
        assert_table_equals(&table, "orders", &model).await;
    }
}
