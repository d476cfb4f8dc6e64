//! Callers of the HTTP door, with a topic as the sink: acknowledged once, through kills, frozen owners and brokers that are away.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use oncegate_tests::{
    gateway::Gateway,
    http_client::HttpClient,
    servers::{Kafka, committed},
};

const PATIENCE: Duration = Duration::from_secs(60);
/// A frozen owner is replaced within so much: its heartbeat has to run out, and its open transaction is ended.
const TAKE_OVER: Duration = Duration::from_secs(25);

fn config(kafka: &Kafka, name: &str) -> String {
    format!(
        "[sinks.{name}]\ntype = \"kafka\"\nbrokers = \"{}\"\ntopic = \"{name}\"\nmarks_partitions = 2\n\
         options = {{ \"broker.address.family\" = \"v4\" }}\n\n[routes.{name}]\nsink = \"{name}\"\nkey = \"/id\"\n",
        kafka.brokers()
    )
}

/// Sends the records with these numbers; answers with how many were replayed.
async fn send(gateway: &Gateway, route: &str, numbers: std::ops::Range<u32>) -> usize {
    let (mut client, mut replayed) = (HttpClient::new(gateway.listen()), 0);
    for number in numbers {
        let body = format!("{{\"id\":\"r{number}\",\"amount\":{number}}}");
        let path = format!("/v1/{route}");
        let done = client.post_until_acknowledged(&path, &[], body, Instant::now() + PATIENCE).await;
        assert_eq!(done.response.status, 201, "{}", done.response.text());
        replayed += usize::from(done.response.header("idempotent-replayed") == "true");
    }
    replayed
}

/// How often each payload is in the topic.
fn counts(kafka: &Kafka, topic: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for record in committed(&kafka.brokers(), topic) {
        let payload = String::from_utf8(record.payload.expect("no tombstones")).expect("JSON");
        *counts.entry(payload).or_default() += 1;
    }
    counts
}

fn assert_once(kafka: &Kafka, topic: &str, records: u32) {
    let counts = counts(kafka, topic);
    assert_eq!(counts.len(), records as usize);
    assert!(counts.values().all(|count| *count == 1), "{counts:?}");
    assert!(counts.contains_key("{\"id\":\"r0\",\"amount\":0}"), "as they came");
}

#[tokio::test(flavor = "multi_thread")]
async fn http_to_kafka_acknowledged_records_are_there_once_through_kills() {
    let kafka = Kafka::shared();
    kafka.topic("calls", 2).await;
    let mut gateway = Gateway::new(&config(kafka, "calls"));
    gateway.start().await;
    for round in 0..4 {
        // Half of them are copies.
        let (from, to) = (round * 50, round * 50 + 100);
        let killed = tokio::select! {
            _ = send(&gateway, "calls", from..to) => false,
            () = tokio::time::sleep(Duration::from_millis(u64::from(100 + round * 130))) => true,
        };
        gateway.kill();
        if round == 2 {
            gateway.delete_store();
        }
        gateway.start().await;
        if killed {
            send(&gateway, "calls", from..to).await;
        }
    }
    assert_eq!(send(&gateway, "calls", 0..250).await, 250, "all are copies now");
    assert_once(kafka, "calls", 250);
}

#[tokio::test(flavor = "multi_thread")]
async fn p5_a_frozen_http_owner_into_kafka_is_replaced_and_writes_nothing_when_it_goes_on() {
    let kafka = Kafka::shared();
    kafka.topic("frozen", 2).await;
    let config = config(kafka, "frozen");
    let [mut first, mut second] = [Gateway::new(&config), Gateway::new(&config)];
    first.start().await;
    send(&first, "frozen", 0..50).await;
    second.spawn();
    second.logged(&["waiting", "http/0", "held by", &first.name()], PATIENCE).await;
    let busy = tokio::select! {
        _ = send(&first, "frozen", 50..5_000) => false,
        () = tokio::time::sleep(Duration::from_millis(700)) => true,
    };
    assert!(busy);
    first.freeze();
    let began = Instant::now();
    second.ready(TAKE_OVER).await;
    println!("replaced after {:?}", began.elapsed());
    send(&second, "frozen", 0..300).await;
    first.thaw();
    first.logged(&["fenced", &second.name()], PATIENCE).await;
    assert_eq!(send(&second, "frozen", 0..300).await, 300);
    let counts = counts(kafka, "frozen");
    assert!(counts.values().all(|count| *count == 1), "{counts:?}");
}

/// P6: nobody can tell what a cluster that cannot be asked will hold when it can: copies are answered once it was asked.
#[tokio::test(flavor = "multi_thread")]
async fn p6_verdicts_wait_while_the_brokers_are_away() {
    let kafka = Kafka::start();
    kafka.topic("away", 1).await;
    let mut gateway = Gateway::new(&config(&kafka, "away"));
    gateway.start().await;
    send(&gateway, "away", 0..20).await;
    kafka.kill();
    let mut client = HttpClient::new(gateway.listen());
    oncegate_tests::eventually("copies are not answered any more", Duration::from_secs(30), async || {
        let body = "{\"id\":\"r0\",\"amount\":0}".to_owned();
        let answer = client.post("/v1/away", &[], body).await.map_err(|fault| fault.to_string())?;
        if answer.status == 503 { Ok(()) } else { Err(answer.status.to_string()) }
    })
    .await;
    kafka.run();
    gateway.ready(PATIENCE).await;
    assert_eq!(send(&gateway, "away", 0..20).await, 20, "all are copies");
    send(&gateway, "away", 20..40).await;
    assert_once(&kafka, "away", 40);
}
