//! Kafka as a target: a topic for each case, its marks topic, and what a reader of committed records finds in both, as tables.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use adapters::{
    kafka_sink::{KafkaSink, KafkaSinkConfig},
    sink::{
        Acquire, Batch, Column, Encode, Guarantee, Life, Mark, Misfit, Mode, Original, Receipts, Resolution,
        RouteRow, Row, RowKind, Session, ShardId, ShardState, ShardStep, Sink, SinkError, Source,
    },
    value::{BadValue, Value},
};
use async_trait::async_trait;
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
};
use rusqlite::{Connection, params};

use super::{Place, Shape, Target};
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
        Box::new(Whole(KafkaSink::new(self.config(shape)).expect("a good configuration")))
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

/// The sink, taking the cases' rows: each becomes the payload that it would have come with.
#[derive(Debug)]
struct Whole(KafkaSink);

#[derive(Debug)]
struct WholeEncoder(Arc<dyn Encode>, Vec<Column>);

struct WholeSession(Box<dyn Session>);

#[async_trait]
impl Sink for Whole {
    fn guarantee(&self) -> Guarantee {
        self.0.guarantee()
    }

    fn mode(&self) -> Mode {
        self.0.mode()
    }

    fn row_key(&self) -> &[String] {
        self.0.row_key()
    }

    fn version(&self) -> Option<&str> {
        self.0.version()
    }

    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>> {
        let column = |name: &str| Column {
            name: name.to_owned(),
            type_name: "json".to_owned(),
            nullable: true,
            has_default: true,
        };
        let columns = ["id", "version", "amount", "note"].map(column).to_vec();
        Ok(Arc::new(WholeEncoder(self.0.probe().await?, columns)))
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        Box::new(WholeSession(self.0.session(route, owner)))
    }
}

impl Encode for WholeEncoder {
    fn columns(&self) -> &[Column] {
        &self.1
    }

    fn encode(
        &self,
        kind: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        let mut record = BTreeMap::new();
        for (column, value) in self.1.iter().zip(values) {
            if let Value::Json(json) = value {
                let json: serde_json::Value = serde_json::from_str(json).expect("a value of the case");
                record.insert(column.name.as_str(), json);
            }
        }
        record.entry("note").or_insert_with(|| "none".into());
        if record["amount"].as_i64().is_some_and(|amount| amount < 0) {
            record.insert("pad", "x".repeat(MAX_BYTES).into());
        }
        let key = record["id"].as_str().unwrap_or_default().to_owned();
        let original = Original { key: Some(key.as_bytes()), ..Original::default() };
        let mut inner = Vec::new();
        let columns = self.0.columns().len();
        self.0.encode_whole(kind, &values[..columns], &original, &mut inner, row_key)?;
        row.extend_from_slice(&(inner.len() as u32).to_le_bytes());
        row.extend_from_slice(&inner);
        row.extend_from_slice(&serde_json::to_vec(&record).expect("JSON"));
        Ok(())
    }
}

#[async_trait]
impl Session for WholeSession {
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        self.0.register_route(proposed).await
    }

    async fn acquire(&mut self, shards: &[ShardId], how: Acquire) -> Result<Vec<ShardState>, SinkError> {
        self.0.acquire(shards, how).await
    }

    async fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        self.0.shards(prefix).await
    }

    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        let rows: Vec<Row<'_>> = batch
            .rows
            .iter()
            .map(|row| {
                let (length, rest) = row.bytes.split_first_chunk::<4>().expect("a row of the case");
                let (bytes, payload) = rest.split_at(u32::from_le_bytes(*length) as usize);
                Row { bytes, source: Source { payload: Some(payload), ..row.source }, ..*row }
            })
            .collect();
        let Batch { steps, dead_letters, on_refused, known_new, seal, .. } = *batch;
        self.0.deliver(&Batch { steps, rows: &rows, dead_letters, on_refused, known_new, seal }).await
    }

    async fn resolve(&mut self, steps: &[ShardStep]) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        self.0.resolve(steps).await
    }

    async fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        self.0.marks_since(shard, sequence).await
    }

    async fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError> {
        self.0.expire_marks(owned, floor_ms).await
    }

    async fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        self.0.heartbeat(owned).await
    }

    async fn forget_all(&mut self, owned: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        self.0.forget_all(owned).await
    }

    async fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError> {
        self.0.keep_partitions(counts).await
    }

    async fn keep_sources(
        &mut self,
        sources: &[(ShardId, i64, String)],
        renew: bool,
    ) -> Result<Vec<Option<String>>, SinkError> {
        self.0.keep_sources(sources, renew).await
    }

    async fn now_ms(&mut self) -> Result<i64, SinkError> {
        self.0.now_ms().await
    }

    fn connected(&self) -> bool {
        self.0.connected()
    }

    fn life(&self) -> Life {
        self.0.life()
    }
}
