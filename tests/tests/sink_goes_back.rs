//! Postgres is restored from a base backup while the store is ahead of it (P6): the gateway notices on its next
//! connection, before any verdict, rebuilds, and reads the source again.

use std::time::{Duration, Instant};

use oncegate_tests::{
    gateway::Gateway,
    http_client::HttpClient,
    route::OrdersRoute,
    servers::{Kafka, Postgres},
    workload::{
        Change, Mode, Workload, assert_each_effect_once, assert_table_equals, await_table, effects_of,
        now_us, orders_table,
    },
};

const PATIENCE: Duration = Duration::from_secs(90);

async fn relay(running: bool) {
    let kafka = Kafka::shared();
    let mut postgres = Postgres::start();
    let topic = format!("goes_back_{running}");
    kafka.topic(&topic, 3).await;
    let modes = [("upserts", Mode::Upsert), ("newest", Mode::UpsertIfNewer)];
    let ddl: Vec<String> =
        modes.iter().map(|(name, _)| orders_table(name) + ";" + &effects_of(name)).collect();
    drop(postgres.database("orders", &ddl.join(";")).await);
    let mut config = String::new();
    let mut workloads = vec![];
    for (name, mode) in modes {
        let topic = format!("{topic}_{name}");
        kafka.topic(&topic, 3).await;
        let route =
            OrdersRoute::new(name, mode, &postgres.url("orders")).relay(&kafka.brokers(), &topic, &topic);
        config += &route.as_instance("one").toml();
        workloads.push((topic, name, Workload::generate(mode, 51, 60_000, 20, now_us())));
    }
    let mut gateway = Gateway::new(&config);
    gateway.start().await;
    for (from, until) in [(0, 20_000), (20_000, 40_000), (40_000, 60_000)] {
        for (topic, _, workload) in &workloads {
            kafka.produce(topic, workload.sent[from..until].iter().map(|change| change.produced(3)));
        }
        if from > 0 && !running {
            // What was produced meanwhile is read only after the restore.
            gateway.start().await;
        }
        let client = postgres.connect("orders").await.expect("Postgres runs");
        for (_, name, workload) in &workloads {
            let model = Workload { sent: workload.sent[..until].to_vec(), ..workload.clone() }.model();
            await_table(&client, name, &model, PATIENCE).await;
            assert_each_effect_once(&client, name).await;
        }
        match from {
            0 => {
                postgres.base_backup("early");
                if !running {
                    assert!(gateway.terminate().await.success());
                }
            }
            20_000 => {
                if !running {
                    gateway.kill();
                }
                postgres.restore("early");
            }
            _ => {}
        }
    }
    gateway.logged(&["went back"], PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p6_a_running_relay_reads_again_what_a_restored_sink_has_lost() {
    let _alone = oncegate_tests::alone().await;
    relay(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p6_a_relay_started_after_the_restore_reads_again_what_the_sink_has_lost() {
    let _alone = oncegate_tests::alone().await;
    relay(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn p6_http_reports_the_lost_range_and_takes_it_again_as_new() {
    let _alone = oncegate_tests::alone().await;
    let mut postgres = Postgres::start();
    let ddl = orders_table("orders").replace(" PRIMARY KEY", " NOT NULL");
    drop(postgres.database("orders", &ddl).await);
    let route = OrdersRoute::new("orders", Mode::Insert, &postgres.url("orders")).without_row_key();
    let mut gateway = Gateway::new(&route.toml());
    gateway.start().await;
    let workload = Workload::generate(Mode::Insert, 52, 200, 0, now_us());
    let mut client = HttpClient::new(gateway.listen());
    let mut send = async |change: &Change| {
        let Change::Put(order) = change else { panic!("inserts have no tombstones") };
        let deadline = Instant::now() + PATIENCE;
        let done = client.post_until_acknowledged("/v1/orders", &[], order.json(), deadline).await;
        assert_eq!(done.response.status, 201, "{}", done.response.text());
        done.response.header("idempotent-replayed") == "true"
    };
    for (at, change) in workload.sent.iter().enumerate() {
        assert!(!send(change).await, "{at}");
        if at == 99 {
            postgres.base_backup("early");
        }
    }
    postgres.restore("early");
    // The store knew all of them: the verdict has to wait until the sink was asked again.
    for (at, change) in workload.sent.iter().enumerate().rev() {
        assert_eq!(send(change).await, at < 100, "{at}");
    }
    let line = gateway.logged(&["went back", "http/0", "send them again"], PATIENCE).await;
    println!("{line}");
    let client = postgres.connect("orders").await.expect("Postgres runs");
    assert_table_equals(&client, "orders", &workload.model()).await;
}
