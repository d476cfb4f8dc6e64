//! Kafka as a target: a topic for each case, its marks topic, and what a reader of committed records finds in both, as tables.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use adapters::{
    kafka_sink::{KafkaSink, KafkaSinkConfig},
    sink::Sink,
};
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
};
use rusqlite::{Connection, params};

use super::{Place, Shape, Target, whole::Whole};
use crate::servers::{Kafka, committed};

/// Kafka: a topic for each case, in the broker of the test binary.
#[derive(Clone, Copy, Debug)]
pub struct Topics;

/// A topic, and the topic of its marks.
#[derive(Debug)]
pub struct TopicPlace {
    /// Records go here.
    pub topic: String,
    /// Marks go here.
    pub marks: String,
    /// Dead letters go here.
    pub letters: String,
}

/// The topic takes no larger records, and a row that the case's table would refuse is made larger.
const MAX_BYTES: usize = 20_000;

/// Makes a topic with these settings.
pub async fn make_topic(name: &str, partitions: i32, settings: &[(&str, &str)]) {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", Kafka::shared().brokers()).set("broker.address.family", "v4");
    let admin: AdminClient<DefaultClientContext> = config.create().expect("a client can be made");
    let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
    let topic = settings.iter().fold(topic, |topic, (key, value)| topic.set(key, value));
    let made = admin.create_topics([&topic], &AdminOptions::new()).await.expect("Kafka answers");
    made.into_iter().for_each(|result| drop(result.expect("a topic of that name does not exist yet")));
    crate::eventually("a new topic", Duration::from_secs(20), async || {
        let metadata =
            admin.inner().fetch_metadata(Some(name), Duration::from_secs(2)).map_err(|e| e.to_string())?;
        let led = metadata.topics().first().is_some_and(|topic| {
            topic.partitions().len() == partitions as usize
                && topic.partitions().iter().all(|partition| partition.leader() >= 0)
        });
        if led { Ok(()) } else { Err("it has no leaders yet".to_owned()) }
    })
    .await;
}

impl Target for Topics {
    type Place = TopicPlace;

    async fn place(&self, _shape: &Shape) -> TopicPlace {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let place = TopicPlace {
            topic: format!("rows-{number}"),
            marks: format!("marks-{number}"),
            letters: format!("letters-{number}"),
        };
        make_topic(&place.topic, 3, &[("max.message.bytes", &MAX_BYTES.to_string())]).await;
        place
    }

    fn histories(&self) -> u64 {
        2
    }
}

impl TopicPlace {
    /// For a sink on this place.
    pub fn config(&self, shape: &Shape) -> KafkaSinkConfig {
        KafkaSinkConfig {
            mode: shape.mode,
            row_key: shape.row_key(),
            marks_topic: Some(self.marks.clone()),
            marks_partitions: 3,
            dead_letters_topic: Some(self.letters.clone()),
            options: [("broker.address.family".to_owned(), "v4".to_owned())].into(),
            ..KafkaSinkConfig::new(&Kafka::shared().brokers(), &self.topic)
        }
    }

    /// Everything as tables of the shape that SQL sinks keep.
    fn tables(&self) -> Connection {
        let brokers = Kafka::shared().brokers();
        let tables = Connection::open_in_memory().expect("memory");
        tables
            .execute_batch(
                "CREATE TABLE rows (id text, version bigint, amount integer, note text);
                 CREATE TABLE oncegate_shards (route text, shard text, epoch bigint, sequence bigint, position bigint,
                     watermark_ms bigint, floor_ms bigint, source text, owner text, PRIMARY KEY (route, shard));
                 CREATE TABLE oncegate_marks (route text, shard text, sequence bigint, max_ms bigint, count bigint);
                 CREATE TABLE oncegate_dead_letters (id integer PRIMARY KEY, route text, shard text, position bigint,
                     key text, event_ms bigint, kind text, reason text, payload blob);",
            )
            .expect("the tables can be made");
        let run = |sql: &str, values: &[&dyn rusqlite::ToSql]| {
            tables.execute(sql, values).expect("the tables take it");
        };
        for record in committed(&brokers, &self.topic) {
            let Some(payload) = &record.payload else {
                run("DELETE FROM rows WHERE id = ?1", &[&record.key()]);
                continue;
            };
            let row: serde_json::Value = serde_json::from_slice(payload).expect("a row of the case");
            run(
                "INSERT INTO rows VALUES (?1, ?2, ?3, ?4)",
                params![
                    row["id"].as_str(),
                    row["version"].as_i64(),
                    row["amount"].as_i64(),
                    row["note"].as_str()
                ],
            );
        }
        for line in committed(&brokers, &self.marks) {
            fold(&tables, &line);
        }
        let known = rdkafka::consumer::Consumer::fetch_metadata(
            &ClientConfig::new()
                .set("bootstrap.servers", &brokers)
                .create::<rdkafka::consumer::BaseConsumer>()
                .expect("a client can be made"),
            None,
            Duration::from_secs(10),
        )
        .expect("Kafka answers");
        if known.topics().iter().any(|topic| topic.name() == self.letters) {
            for letter in committed(&brokers, &self.letters) {
                let header = |name: &str| letter.header(name).map(str::to_owned);
                let number = |name: &str| letter.header(name).and_then(|text| text.parse::<i64>().ok());
                run(
                    "INSERT INTO oncegate_dead_letters (route, shard, position, key, event_ms, kind, reason, payload)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                    params![
                        header("oncegate-route"),
                        header("oncegate-shard"),
                        number("oncegate-position"),
                        letter.key(),
                        number("oncegate-event-ms"),
                        header("oncegate-kind"),
                        header("oncegate-reason"),
                        letter.payload
                    ],
                );
            }
        }
        tables
    }
}

/// One line of the marks topic, as its documentation tells it: written anew here, so that the sink's own reading is checked by it.
fn fold(tables: &Connection, line: &crate::servers::Committed) {
    let text = |name: &str| line.header(name).unwrap_or_default().to_owned();
    let number = |name: &str| line.header(name).and_then(|text| text.parse::<i64>().ok());
    let (route, shard, kind) = (text("route"), line.key().to_owned(), text("kind"));
    let run =
        |sql: &str, values: &[&dyn rusqlite::ToSql]| tables.execute(sql, values).expect("the tables take it");
    let epoch: i64 = tables
        .query_row(
            "SELECT epoch FROM oncegate_shards WHERE route = ?1 AND shard = ?2",
            [&route, &shard],
            |row| row.get(0),
        )
        .unwrap_or(0);
    let theirs = number("epoch").unwrap_or(0);
    match kind.as_str() {
        "claim" if number("after") == Some(epoch) => {
            run(
                "INSERT INTO oncegate_shards VALUES (?1, ?2, ?3, 0, NULL, ?5, ?5, NULL, ?4)
                 ON CONFLICT DO UPDATE SET epoch = ?3, owner = ?4",
                params![route, shard, theirs, text("owner"), i64::MIN],
            );
        }
        "mark" | "beat" | "forget" | "renew" if theirs != epoch => {
            assert_ne!(kind, "mark", "a batch of an earlier owner is in: {line:?}");
        }
        "mark" => {
            let moved = run(
                "UPDATE oncegate_shards SET sequence = ?3, position = coalesce(?4, position), watermark_ms = ?5
                 WHERE route = ?1 AND shard = ?2 AND sequence = ?3 - 1",
                params![route, shard, number("sequence"), number("position"), number("watermark-ms")],
            );
            assert_eq!(moved, 1, "a step was passed over or done twice: {line:?}");
            if let Some(count) = number("count") {
                run(
                    "INSERT INTO oncegate_marks VALUES (?1, ?2, ?3, ?4, ?5)",
                    params![route, shard, number("sequence"), number("max-ms"), count],
                );
            }
        }
        "renew" => {
            run(
                "UPDATE oncegate_shards SET source = ?3, position = NULL WHERE route = ?1 AND shard = ?2 AND source <> ?3",
                params![route, shard, text("source")],
            );
        }
        "beat" | "forget" => {
            run(
                "UPDATE oncegate_shards SET source = coalesce(source, ?3) WHERE route = ?1 AND shard = ?2",
                params![route, shard, line.header("source")],
            );
            let floor = number("floor-ms");
            let forget = kind == "forget";
            run(
                "UPDATE oncegate_shards SET floor_ms = max(floor_ms, ?3) WHERE route = ?1 AND shard = ?2",
                params![route, shard, floor],
            );
            run(
                "DELETE FROM oncegate_marks WHERE route = ?1 AND shard = ?2 AND (?4 OR max_ms < ?3)",
                params![route, shard, floor, forget],
            );
        }
        _ => {}
    }
}

impl Place for TopicPlace {
    fn sink(&self, shape: &Shape) -> Box<dyn Sink> {
        let sink = KafkaSink::new(self.config(shape)).expect("a good configuration");
        // Spaces mean nothing, and are too many.
        Box::new(Whole::new(sink, |payload| payload.resize(payload.len() + MAX_BYTES, b' ')))
    }

    async fn execute(&self, _sql: &str) {
        // There are no tables to change.
    }

    async fn texts(&self, sql: &str) -> Vec<Option<String>> {
        let tables = self.tables();
        let mut query = tables.prepare(sql).expect("the SQL of the case is right");
        let rows = query.query_map([], |row| row.get(0)).expect("the query runs");
        rows.collect::<Result<_, _>>().expect("one text a row")
    }
}
