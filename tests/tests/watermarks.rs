//! Event time of a relay's partitions (P11): old topics are replayed in their own time, a wrong clock moves nothing, and a partition
//! without records holds nobody back.

use std::time::{Duration, Instant};

use oncegate_tests::{
    eventually,
    gateway::Gateway,
    servers::{Kafka, Postgres, Produced},
};

const HOUR_MS: i64 = 3_600_000;
const PATIENCE: Duration = Duration::from_secs(60);

fn now_ms() -> i64 {
    jiff::Timestamp::now().as_millisecond()
}

fn record(partition: i32, id: &str, at_ms: i64) -> Produced {
    let payload = format!(r#"{{"id":"{id}","at":{at_ms}}}"#).into_bytes();
    Produced { partition, key: Some(id.as_bytes().to_vec()), payload: Some(payload), ..Produced::default() }
}

fn config(url: &str, brokers: &str, topics: &str, options: &str) -> String {
    format!(
        "[sinks.t]\ntype = \"postgres\"\nurl = \"{url}\"\ntable = \"public.t\"\n\n\
         [routes.t]\nsink = \"t\"\nkey = \"/id\"\nevent_time = \"/at\"\ntime_unit = \"ms\"\nwindow = \"1h\"\nlateness = \"1m\"\n\
         idle_after = \"1s\"\nmax_ahead = \"1m\"\n{options}\n\n\
         [routes.t.kafka]\nbrokers = \"{brokers}\"\ntopics = [{topics}]\ngroup = \"{}\"\nmax_drift = \"2h\"\n",
        topics.replace(['"', ',', ' '], "")
    )
}

/// No unique index: only the marks tell copies.
const TABLE: &str = "CREATE TABLE t (id text NOT NULL, at bigint NOT NULL)";

async fn rows(table: &tokio_postgres::Client, wanted: i64) {
    let query = "SELECT count(*), count(DISTINCT id), (SELECT count(*) FROM oncegate_dead_letters) FROM t";
    eventually("rows", PATIENCE, async || {
        let row = table.query_one(query, &[]).await.map_err(|fault| fault.to_string())?;
        let [all, distinct, letters] = [0, 1, 2].map(|column| row.get::<_, i64>(column));
        assert_eq!(all, distinct, "rows came twice");
        if all == wanted { Ok(()) } else { Err(format!("{all} of {wanted}, {letters} dead letters")) }
    })
    .await;
}

async fn letters(table: &tokio_postgres::Client) -> Vec<(String, String)> {
    let query = "SELECT kind, convert_from(payload, 'UTF8') FROM oncegate_dead_letters ORDER BY 2";
    let rows = table.query(query, &[]).await.expect("the dead letters can be read");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn p11_an_old_topic_is_replayed_in_its_own_time_and_a_wrong_clock_moves_no_floor() {
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    let table = postgres.database("replay", TABLE).await;
    kafka.topic("replay", 3).await;
    let now = now_ms();
    let old = now - 72 * HOUR_MS;
    // Partition 0 holds the last hour, partition 1 three days, partition 2 nothing.
    kafka.produce("replay", (0..2_000).map(|n| record(0, &format!("new-{n}"), now - HOUR_MS + n * 1_700)));
    let dense = 20_000;
    let at = |n: i64| old + n * 71 * HOUR_MS / dense;
    let copies = (0..dense).flat_map(|n| {
        let first = record(1, &format!("old-{n}"), at(n));
        // A copy of every fifth comes a little later.
        let copy = (n % 5 == 0 && n >= 40).then(|| record(1, &format!("old-{}", n - 40), at(n - 40)));
        std::iter::once(first).chain(copy)
    });
    kafka.produce("replay", copies);
    let url = postgres.url("replay");
    let mut gateway =
        Gateway::new(&config(&url, &kafka.brokers(), "\"replay\"", "lanes = { http = 0, relay = 2 }"));
    gateway.start().await;
    rows(&table, dense + 2_000).await;
    assert_eq!(letters(&table).await, []);

    // Clocks that are wrong: refused and kept, and what comes after them is not late.
    let ahead = now_ms() + 120_000;
    kafka.produce("replay", [record(0, "ahead", ahead), record(0, "year 9999", 253_402_300_799_000)]);
    kafka.produce("replay", (0..10).map(|n| record(0, &format!("then-{n}"), now_ms() - 30_000 + n)));
    rows(&table, dense + 2_010).await;
    let found = letters(&table).await;
    let kinds: Vec<&str> = found.iter().map(|(kind, _)| kind.as_str()).collect();
    assert_eq!(kinds, ["rejected", "rejected"], "{found:?}");
    let row = table
        .query_one("SELECT max(watermark_ms) FROM oncegate_shards", &[])
        .await
        .expect("the shards can be read");
    assert!(row.get::<_, i64>(0) <= now_ms(), "the watermark is ahead of now");

    // Partition 1 has been idle for longer than `idle_after`; it comes back with records of now.
    tokio::time::sleep(Duration::from_secs(3)).await;
    kafka.produce("replay", (0..10).map(|n| record(0, &format!("on-{n}"), now_ms())));
    rows(&table, dense + 2_020).await;
    kafka.produce("replay", (0..10).map(|n| record(1, &format!("back-{n}"), now_ms() - 20_000)));
    kafka.produce("replay", (0..10).map(|n| record(2, &format!("first-{n}"), now_ms() - 20_000)));
    rows(&table, dense + 2_040).await;
    assert_eq!(letters(&table).await.len(), 2);
}

/// A partition whose rows are held up at the sink for much longer than `idle_after` is not idle: the other one goes on by days, and
/// nothing of the first is late.
#[tokio::test(flavor = "multi_thread")]
async fn p11_a_partition_held_up_for_longer_than_idle_after_is_not_late_when_it_goes_on() {
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    let table = postgres.database("held_up", TABLE).await;
    kafka.topic("held-up", 2).await;
    let old = now_ms() - 72 * HOUR_MS;
    for partition in 0..2 {
        kafka.produce("held-up", (0..5).map(|n| record(partition, &format!("{partition}-{n}"), old + n)));
    }
    let url = postgres.url("held_up");
    // Nothing waits for another partition here but the floor.
    let text = config(&url, &kafka.brokers(), "\"held-up\"", "lanes = { http = 0, relay = 2 }")
        .replace("max_drift = \"2h\"", "max_drift = \"100d\"");
    let mut gateway = Gateway::new(&text);
    gateway.start().await;
    rows(&table, 10).await;
    // Somebody else's transaction holds the row of partition 1's shard.
    let mut other = postgres.connect("held_up").await.expect("Postgres answers");
    let holding = other.transaction().await.expect("a transaction begins");
    let held = holding
        .execute("SELECT 1 FROM oncegate_shards WHERE shard LIKE '%/held-up/1' FOR UPDATE", &[])
        .await
        .expect("the row can be locked");
    assert_eq!(held, 1);
    kafka.produce("held-up", (5..10).map(|n| record(1, &format!("1-{n}"), old + 10 * n)));
    let until = Instant::now() + Duration::from_secs(6);
    let mut hour = 0;
    while Instant::now() < until {
        hour += 1;
        kafka.produce("held-up", [record(0, &format!("hour-{hour}"), old + hour * HOUR_MS)]);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    rows(&table, 10 + hour).await;
    holding.rollback().await.expect("the row is let go");
    rows(&table, 10 + hour + 5).await;
    assert_eq!(letters(&table).await, []);
}

/// An instance that is days ahead takes a topic over that another one left far behind.
#[tokio::test(flavor = "multi_thread")]
async fn p11_a_partition_taken_over_far_behind_is_not_late_and_its_copies_are_known() {
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    let table = postgres.database("far_behind", TABLE).await;
    for topic in ["slow", "fast"] {
        kafka.topic(topic, 1).await;
    }
    let old = now_ms() - 72 * HOUR_MS;
    kafka.produce("slow", (0..10).map(|n| record(0, &format!("slow-{n}"), old + n)));
    kafka
        .produce("fast", (0..1_000).map(|n| record(0, &format!("fast-{n}"), old + n * 71 * HOUR_MS / 1_000)));
    let config = |topics| {
        let lanes = "lanes = { http = 0, relay = 2 }";
        config(&postgres.url("far_behind"), &kafka.brokers(), topics, lanes)
    };
    let mut slow = Gateway::new(&config("\"slow\""));
    let mut fast = Gateway::new(&config("\"fast\""));
    slow.start().await;
    rows(&table, 10).await;
    slow.kill();
    fast.start().await;
    rows(&table, 1_010).await;
    // What lies more than window and lateness back is forgotten.
    eventually("expiry", PATIENCE, async || {
        match fast.metric("oncegate_watermark_timestamp_seconds", &[]).await {
            Some(floor) if floor * 1000.0 > (old + 60 * HOUR_MS) as f64 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    fast.configure(&config("\"slow\", \"fast\""));
    kafka.produce("slow", (0..20).map(|n| record(0, &format!("slow-{n}"), old + n)));
    kafka.produce(
        "fast",
        (990..1_010).map(|n| record(0, &format!("fast-{n}"), old + n * 71 * HOUR_MS / 1_000)),
    );
    assert!(fast.terminate().await.success());
    fast.start().await;
    rows(&table, 1_010 + 10 + 10).await;
    assert_eq!(letters(&table).await, []);
    fast.logged(&["lags behind what this instance has forgotten"], PATIENCE).await;
}
