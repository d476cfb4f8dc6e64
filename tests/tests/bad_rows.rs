//! Bad records among good ones: one outcome each, the rest written, the batch's mark intact (rule 10).

use std::time::Duration;

use oncegate_tests::{
    gateway::Gateway,
    http_client::HttpClient,
    route::OrdersRoute,
    servers::{Kafka, Postgres, Produced},
    workload::{
        Change, Mode, Order, Workload, assert_each_effect_once, assert_table_equals, await_table, effects_of,
        now_us, orders_table,
    },
};

const PATIENCE: Duration = Duration::from_secs(60);

/// One refusal comes at once, one only at the end of the transaction, where no row is named any more.
fn table(name: &str) -> String {
    let checks = ", CHECK (currency <> 'XXX'), \
                  FOREIGN KEY (currency) REFERENCES currencies DEFERRABLE INITIALLY DEFERRED)";
    let table = orders_table(name);
    let columns = table.strip_suffix(')').expect("a table ends with its columns");
    format!(
        "CREATE TABLE currencies (code text PRIMARY KEY); \
         INSERT INTO currencies VALUES ('EUR'), ('USD'), ('CHF'), ('JPY'), ('XXX'); {columns}{checks}"
    )
}

/// One of each kind of bad record, made of a good one. Each has a key of its own where it has a key.
fn spoil(order: &Order, kind: usize) -> Vec<u8> {
    let json = order.json();
    let user_id = format!("\"user_id\":{}", order.user_id);
    let spoilt = match kind {
        0 => json.replace(r#""currency":"EUR""#, r#""currency":"XXX""#),
        1 => json.replace(&user_id, "\"user_id\":\"many\""),
        2 => json.replace(&user_id, "\"user_id\":9223372036854775808"),
        3 => json.replace(&user_id, "\"user_id\":null"),
        4 => json.replace(&user_id, "\"user_id\":1,\"user_id\":1"),
        5 => json.replace(&user_id, "\"user_id\":1,\"colour\":\"red\""),
        6 => json[..json.len() / 2].to_owned(),
        7 => json.replace(&user_id, "\"user_id\":1.5"),
        8 => json.replace("\"order_id\"", "\"id\""),
        9 => json.replace(&order.amount, "\"NULL\""),
        10 => json.replace(r#""note":""#, r#""note":"\u0000"#),
        11 => json.replace(r#""currency":"EUR""#, r#""currency":"YYY""#),
        _ => return [json.as_bytes(), b"\xff\xfe"].concat(),
    };
    assert_ne!(spoilt, json, "kind {kind}");
    spoilt.into_bytes()
}

const KINDS: usize = 13;
const REFUSED_BY_SINK: [usize; 2] = [0, 11];

fn order(change: &Change) -> &Order {
    match change {
        Change::Put(order) => order,
        Change::Delete { .. } => panic!("there are no tombstones here"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule10_a_bad_record_of_a_relay_costs_one_outcome() {
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    let client = postgres.database("bad_relay", &(table("orders") + ";" + &effects_of("orders"))).await;
    let workload = Workload::generate(Mode::Upsert, 61, 8000, 20, now_us());
    let model = workload.model();
    let (mut bad, mut refused_first) = (0_i64, 0_i64);
    let mut records = vec![];
    for (at, change) in workload.sent.iter().enumerate() {
        let good = change.produced(2);
        if at % 50 != 7 {
            records.push(good);
            continue;
        }
        // The same row, spoilt, just before or just after the good one: the bad one must not take the good one with it.
        let kind = at / 50 % KINDS;
        let spoilt = Order {
            updated_us: change.updated_us() - 1_000_000 * (1 + bad),
            currency: "EUR",
            ..order(change).clone()
        };
        let spoilt = Produced { payload: Some(spoil(&spoilt, kind)), ..good.clone() };
        let first = at / 50 % 2 == 0;
        records.extend(if first { [spoilt, good] } else { [good, spoilt] });
        bad += 1;
        refused_first += i64::from(first && REFUSED_BY_SINK.contains(&kind));
    }
    let total = records.len();
    for topic in ["bad", "bad_again"] {
        kafka.topic(topic, 2).await;
        kafka.produce(topic, records.clone());
    }
    let route = OrdersRoute::new("orders", Mode::Upsert, &postgres.url("bad_relay"))
        .options("batch = { max_records = 50 }");
    let mut gateway = Gateway::new(&route.clone().relay(&kafka.brokers(), "bad", "a").toml());
    gateway.start().await;
    await_table(&client, "orders", &model, PATIENCE).await;
    all_read(kafka, "bad", "a", &gateway).await;
    assert_each_effect_once(&client, "orders").await;

    let counted = async |outcome: &str| {
        let label = format!("outcome=\"{outcome}\"");
        gateway
            .metric("oncegate_records_total", &["route=\"orders\"", &label])
            .await
            .expect("metrics are there") as usize
    };
    // A row that the sink would refuse never gets there if the next one of its row key is in the same batch.
    let letters = counted("dead_lettered").await as i64;
    assert!((bad - refused_first..=bad).contains(&letters), "{letters} of {bad}");
    let took_effect = (counted("written").await + counted("updated").await) as i64;
    assert_eq!(took_effect, i64::try_from(workload.distinct).unwrap_or(0) + bad - letters);
    assert_eq!(counted("duplicate").await, workload.sent.len() - workload.distinct);
    let all = gateway.metric("oncegate_records_total", &["route=\"orders\""]).await;
    assert_eq!(all.map(|all| all as usize), Some(total), "each record has one outcome");
    let kept: i64 = client
        .query_one("SELECT count(*) FROM oncegate_dead_letters", &[])
        .await
        .expect("dead letters")
        .get(0);
    assert_eq!(kept, letters);

    // The marks of the batches with bad rows are whole: all good records are copies to an empty store.
    gateway.kill();
    gateway.delete_store();
    gateway.configure(&route.relay(&kafka.brokers(), "bad_again", "b").toml());
    gateway.start().await;
    all_read(kafka, "bad_again", "b", &gateway).await;
    assert_table_equals(&client, "orders", &model).await;
    assert_each_effect_once(&client, "orders").await;
}

async fn all_read(kafka: &Kafka, topic: &str, group: &str, gateway: &Gateway) {
    oncegate_tests::eventually("committed offsets at the end", PATIENCE, async || {
        let (committed, ends) = (kafka.committed(topic, 2, group), kafka.ends(topic, 2));
        if committed == ends {
            Ok(())
        } else {
            Err(format!("{committed:?} of {ends:?}\n{}", gateway.log_tail(10)))
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule10_a_bad_record_of_a_request_costs_one_outcome() {
    let postgres = Postgres::shared();
    let client = postgres.database("bad_http", &table("orders")).await;
    let mut gateway =
        Gateway::new(&OrdersRoute::new("orders", Mode::Insert, &postgres.url("bad_http")).toml());
    gateway.start().await;
    let workload = Workload::generate(Mode::Insert, 62, 200, 0, now_us());
    let mut lines: Vec<(bool, Vec<u8>)> = vec![];
    for (at, change) in workload.sent.iter().enumerate() {
        if at % 8 == 3 {
            let spoilt = Order { order_id: format!("bad-{at}"), currency: "EUR", ..order(change).clone() };
            lines.push((false, spoil(&spoilt, at / 8 % KINDS)));
        }
        lines.push((true, order(change).json().into_bytes()));
    }
    let mut http = HttpClient::new(gateway.listen());
    let body = lines.iter().map(|(_, line)| &line[..]).collect::<Vec<_>>().join(&b'\n');
    for (run, good) in ["written", "duplicate"].into_iter().enumerate() {
        let headers = [("content-type", "application/x-ndjson")];
        let answer = http.post("/v1/orders", &headers, body.clone()).await.expect("the gateway runs");
        assert_eq!(answer.status, 207, "{}", answer.text());
        let json = answer.json();
        let outcomes = json["outcomes"].as_array().expect("outcomes");
        assert_eq!(outcomes.len(), lines.len());
        for (place, (outcome, (is_good, line))) in outcomes.iter().zip(&lines).enumerate() {
            let expected = if *is_good { good } else { "rejected" };
            let line = String::from_utf8_lossy(line);
            assert_eq!(
                (&outcome["index"], outcome["outcome"].as_str()),
                (&place.into(), Some(expected)),
                "run {run}: {line}: {outcome}"
            );
        }
        assert_table_equals(&client, "orders", &workload.model()).await;
        gateway.kill();
        gateway.delete_store();
        gateway.start().await;
    }
    for kind in 0..KINDS {
        let spoilt =
            Order { order_id: format!("alone-{kind}"), currency: "EUR", ..order(&workload.sent[0]).clone() };
        let answer = http.post("/v1/orders", &[], spoil(&spoilt, kind)).await.expect("the gateway runs");
        let expected = if REFUSED_BY_SINK.contains(&kind) { 422 } else { 400 };
        assert_eq!(
            (answer.status, answer.header("content-type")),
            (expected, "application/problem+json"),
            "kind {kind}: {}",
            answer.text()
        );
    }
    assert_table_equals(&client, "orders", &workload.model()).await;
}
