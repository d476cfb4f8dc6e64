//! A relay into SQLite, in `insert` and in `upsert` mode, through kills of the gateway: the table equals the model, row for row,
//! and the dead letters are the bad records.

use std::{collections::BTreeMap, time::Duration};

use oncegate_tests::{
    gateway::Gateway,
    servers::{Kafka, Produced},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use rusqlite::Connection;

const RECORDS: usize = 60_000;
const PARTITIONS: i32 = 2;
/// Without `ONCEGATE_KILLS`.
const KILLS: usize = 10;
/// One record in so many is a copy of an earlier one, or bad.
const COPY_EVERY: usize = 5;
const BAD_EVERY: usize = 500;

/// What was sent, and the table that it must end in.
struct Course {
    topic: &'static str,
    sent: Vec<Produced>,
    model: BTreeMap<String, i64>,
    bad: usize,
}

impl Course {
    /// Each event sets one order's amount. In `insert` mode an order has one event; in `upsert` mode it has several, and the
    /// last one in its partition wins.
    fn new(topic: &'static str, upsert: bool, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let (mut sent, mut events, mut model, mut bad) =
            (Vec::new(), Vec::<Produced>::new(), BTreeMap::new(), 0);
        for n in 0..RECORDS {
            if n % COPY_EVERY == COPY_EVERY - 1 && !events.is_empty() {
                sent.push(events[random.random_range(0..events.len())].clone());
                continue;
            }
            let order = if upsert { random.random_range(0..RECORDS / 8) } else { n };
            let amount = i64::try_from(n).expect("small") * 3;
            let is_bad = n % BAD_EVERY == 7;
            let amount_text = if is_bad { "\"many\"".to_owned() } else { amount.to_string() };
            let payload = format!(r#"{{"event":"e{n}","order_id":"o{order:07}","amount":{amount_text}}}"#);
            let event = Produced {
                partition: i32::try_from(order).expect("small") % PARTITIONS,
                key: Some(format!("o{order:07}").into_bytes()),
                payload: Some(payload.into_bytes()),
                ..Produced::default()
            };
            if is_bad {
                bad += 1;
            } else {
                model.insert(format!("o{order:07}"), amount);
                events.push(event.clone());
            }
            sent.push(event);
        }
        Self { topic, sent, model, bad }
    }

    fn table(database: &std::path::Path, topic: &str) -> BTreeMap<String, i64> {
        let connection = Connection::open(database).expect("the database opens");
        connection.busy_timeout(Duration::from_secs(10)).expect("a time-out");
        let Ok(mut query) = connection.prepare(&format!("SELECT order_id, amount FROM {topic}")) else {
            return BTreeMap::new();
        };
        let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).expect("the table can be read");
        rows.map(|row| row.expect("a row")).collect()
    }
}

fn config(folder: &std::path::Path, brokers: &str) -> String {
    let route = |topic: &str, mode: &str, key: &str| {
        format!(
            "[sinks.{topic}]\ntype = \"sqlite\"\npath = \"{}\"\ntable = \"{topic}\"\nmode = \"{mode}\"\nrow_key = [\"order_id\"]\n\
             create = \"CREATE TABLE {topic} (order_id TEXT NOT NULL PRIMARY KEY, amount INTEGER NOT NULL, event TEXT)\"\n\
             [routes.{topic}]\nkey = [\"{key}\"]\nevent_time = {{ kafka = \"timestamp\" }}\nwindow = \"24h\"\nsink = \"{topic}\"\n\
             [routes.{topic}.kafka]\nbrokers = \"{brokers}\"\ntopics = [\"{topic}\"]\ngroup = \"{topic}\"\ninstance = \"one\"\n",
            folder.join(format!("{topic}.db")).display()
        )
    };
    route("lite_inserts", "insert", "/order_id") + &route("lite_upserts", "upsert", "/event")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_into_sqlite_ends_in_its_model_through_kills() {
    let kafka = Kafka::shared();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let courses = [Course::new("lite_inserts", false, 5), Course::new("lite_upserts", true, 6)];
    for course in &courses {
        kafka.topic(course.topic, PARTITIONS).await;
    }
    let mut gateway = Gateway::new(&config(folder.path(), &kafka.brokers()));
    gateway.start().await;
    let mut random = StdRng::seed_from_u64(7);
    let kills = oncegate_tests::kills(KILLS);
    for round in 0..kills {
        for course in &courses {
            let part = RECORDS * round / kills..RECORDS * (round + 1) / kills;
            kafka.produce(course.topic, course.sent[part].to_vec());
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(100..600))).await;
        gateway.kill();
        gateway.spawn();
        gateway.ready(Duration::from_secs(60)).await;
    }
    for course in &courses {
        let database = folder.path().join(format!("{}.db", course.topic));
        oncegate_tests::eventually("the table equals the model", Duration::from_secs(120), async || {
            let table = Course::table(&database, course.topic);
            if table == course.model {
                return Ok(());
            }
            let wrong =
                course.model.iter().filter(|(order, amount)| table.get(*order) != Some(amount)).count();
            Err(format!(
                "{}: {} rows of {}, {wrong} wrong or missing",
                course.topic,
                table.len(),
                course.model.len()
            ))
        })
        .await;
        let connection = Connection::open(&database).expect("the database opens");
        let letters: usize = connection
            .query_row("SELECT count(DISTINCT shard || position) FROM oncegate_dead_letters", [], |row| {
                row.get(0)
            })
            .expect("the dead letters can be counted");
        let all: usize = connection
            .query_row("SELECT count(*) FROM oncegate_dead_letters", [], |row| row.get(0))
            .expect("the dead letters can be counted");
        assert_eq!(
            (letters, all),
            (course.bad, course.bad),
            "{}: one dead letter for each bad record",
            course.topic
        );
    }
}
