//! Redis as a target: a database for each case, and its keys as tables.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use adapters::{
    redis::{Kind, RedisConfig, RedisSink},
    sink::{Column, Encode, Guarantee, Misfit, Mode, RowKind, Session, Sink},
    value::{BadValue, Value},
};
use async_trait::async_trait;
use redis::cmd;
use rusqlite::{Connection, params};

use super::{Place, Shape, Target};
use crate::servers::Redis;

/// Redis: a database for each case, on the server of the test binary.
#[derive(Clone, Copy, Debug)]
pub struct Databases;

/// One database.
#[derive(Clone, Copy, Debug)]
pub struct RedisPlace {
    /// Its number.
    pub database: u32,
}

/// A row that the case's table would refuse is made larger than this.
const MAX_ROW_BYTES: usize = 20_000;

impl Target for Databases {
    type Place = RedisPlace;

    async fn place(&self, _shape: &Shape) -> RedisPlace {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        RedisPlace { database: COUNT.fetch_add(1, Ordering::Relaxed) }
    }

    fn histories(&self) -> u64 {
        4
    }

    fn takes(&self, column: &str, json: &str) -> bool {
        // Texts are bytes, and null takes a field away.
        json.contains("u0000") || (column == "version" && json == "null")
    }
}

impl RedisPlace {
    /// A place of its own.
    pub async fn new() -> Self {
        Databases.place(&Shape::new(Mode::Insert)).await
    }

    /// For a sink on this place.
    pub fn config(&self, shape: &Shape) -> RedisConfig {
        let columns =
            [("id", Kind::Text), ("version", Kind::Integer), ("amount", Kind::Integer), ("note", Kind::Text)];
        RedisConfig {
            columns: columns.map(|(name, kind)| (name.to_owned(), kind)).to_vec(),
            mode: shape.mode,
            row_key: shape.row_key(),
            version: shape.version(),
            max_row_bytes: MAX_ROW_BYTES,
            ..RedisConfig::new(Redis::shared().url(self.database), format!("{}:", shape.table))
        }
    }

    fn connect(&self) -> redis::Connection {
        Redis::shared().connect(self.database)
    }

    /// The keys as tables of the shape that SQL sinks keep, read as the documentation tells them.
    fn tables(&self) -> Connection {
        let tables = Connection::open_in_memory().expect("memory");
        tables
            .execute_batch(
                "CREATE TABLE rows (id text, version bigint, amount integer, note text);
                 CREATE TABLE oncegate_shards (route text, shard text, epoch bigint, sequence bigint, position bigint,
                     watermark_ms bigint, floor_ms bigint, source text, owner text, PRIMARY KEY (route, shard));
                 CREATE TABLE oncegate_marks (route text, shard text, sequence bigint, max_ms bigint, count bigint);
                 CREATE TABLE oncegate_dead_letters (id integer PRIMARY KEY, route text, shard text, position bigint,
                     key blob, event_ms bigint, kind text, reason text, payload blob);",
            )
            .expect("the tables can be made");
        let run = |sql: &str, values: &[&dyn rusqlite::ToSql]| {
            tables.execute(sql, values).expect("the tables take it");
        };
        for (key, row) in Redis::shared().hashes(self.database, "rows:") {
            let of = |name: &str| row.get(name).cloned();
            assert_eq!(of("id").map(|id| format!("rows:{id}")), Some(key));
            // The table's default of the cases.
            let note = of("note").or_else(|| Some("none".to_owned()));
            run(
                "INSERT INTO rows VALUES (?1, ?2, ?3, ?4)",
                params![of("id"), of("version"), of("amount"), note],
            );
        }
        let mut connection = self.connect();
        let sets: Vec<String> = cmd("KEYS").arg("oncegate:*:shards").query(&mut connection).expect("keys");
        for set in sets {
            let base = set.strip_suffix("shards").expect("it was asked for");
            let route =
                base.strip_prefix("oncegate:{").and_then(|rest| rest.strip_suffix("}:")).expect("a route");
            let shards: Vec<String> = cmd("SMEMBERS").arg(&set).query(&mut connection).expect("shards");
            for shard in shards {
                let row: BTreeMap<String, String> = cmd("HGETALL")
                    .arg(format!("{base}shard:{shard}"))
                    .query(&mut connection)
                    .expect("a shard");
                let of = |name: &str| row.get(name).cloned();
                run(
                    "INSERT INTO oncegate_shards VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                    params![
                        route,
                        shard,
                        of("epoch"),
                        of("sequence"),
                        of("position"),
                        of("watermark_ms"),
                        of("floor_ms"),
                        of("source"),
                        of("owner")
                    ],
                );
                let marks: BTreeMap<String, redis::Value> =
                    cmd("HGETALL").arg(format!("{base}marks:{shard}")).query(&mut connection).expect("marks");
                let about = marks.iter().filter_map(|(field, value)| {
                    let redis::Value::BulkString(value) = value else { return None };
                    Some((field.strip_suffix("/about")?, String::from_utf8_lossy(value).into_owned()))
                });
                for (sequence, about) in about {
                    assert!(marks.contains_key(sequence), "a mark has a block");
                    let [_, _, max_ms, count] = about.split(' ').collect::<Vec<_>>()[..] else {
                        panic!("a mark of four numbers: {about}")
                    };
                    run(
                        "INSERT INTO oncegate_marks VALUES (?1, ?2, ?3, ?4, ?5)",
                        params![route, shard, sequence, max_ms, count],
                    );
                }
            }
            let letters: Vec<(String, BTreeMap<String, redis::Value>)> = cmd("XRANGE")
                .arg(format!("{base}dead_letters"))
                .arg("-")
                .arg("+")
                .query(&mut connection)
                .expect("dead letters");
            for (_, letter) in letters {
                let bytes = |name: &str| match letter.get(name) {
                    Some(redis::Value::BulkString(bytes)) => Some(bytes.clone()),
                    _ => None,
                };
                let text = |name: &str| bytes(name).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
                let key = text("key").unwrap_or_default();
                let key: Vec<u8> = (0..key.len() / 2)
                    .map(|at| u8::from_str_radix(&key[2 * at..2 * at + 2], 16).expect("hex digits"))
                    .collect();
                run(
                    "INSERT INTO oncegate_dead_letters (route, shard, position, key, event_ms, kind, reason, payload)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                    params![
                        route,
                        text("shard"),
                        text("position"),
                        key,
                        text("event_ms"),
                        text("kind"),
                        text("reason"),
                        bytes("payload")
                    ],
                );
            }
        }
        tables
    }
}

impl Place for RedisPlace {
    fn sink(&self, shape: &Shape) -> Box<dyn Sink> {
        let config = self.config(shape);
        let mut loose = config.clone();
        for (name, kind) in &mut loose.columns {
            if name == "amount" {
                *kind = Kind::Number;
            }
        }
        let sink = |config| RedisSink::new(config).expect("a good configuration");
        Box::new(Checked { sink: sink(config), loose: sink(loose) })
    }

    async fn execute(&self, sql: &str) {
        let field = sql.strip_prefix("ALTER TABLE oncegate_shards DROP COLUMN ").expect("no other statement");
        let mut connection = self.connect();
        let shards: Vec<String> =
            cmd("KEYS").arg("oncegate:*:shard:*").query(&mut connection).expect("shards");
        for shard in shards {
            cmd("HDEL").arg(shard).arg(field).query::<()>(&mut connection).expect("a hash");
        }
    }

    async fn texts(&self, sql: &str) -> Vec<Option<String>> {
        let tables = self.tables();
        let mut query = tables.prepare(sql).expect("the SQL of the case is right");
        let rows = query.query_map([], |row| row.get(0)).expect("the query runs");
        rows.collect::<Result<_, _>>().expect("one text a row")
    }
}

/// Redis has no constraints: what the table of the cases would refuse becomes a row that is too large.
#[derive(Debug)]
struct Checked {
    sink: RedisSink,
    loose: RedisSink,
}

#[derive(Debug)]
struct CheckedEncoder {
    encoder: Arc<dyn Encode>,
    loose: Arc<dyn Encode>,
}

#[async_trait]
impl Sink for Checked {
    fn guarantee(&self) -> Guarantee {
        self.sink.guarantee()
    }

    fn mode(&self) -> Mode {
        self.sink.mode()
    }

    fn row_key(&self) -> &[String] {
        self.sink.row_key()
    }

    fn version(&self) -> Option<&str> {
        self.sink.version()
    }

    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>> {
        let (encoder, loose) = (self.sink.probe().await?, self.loose.probe().await?);
        Ok(Arc::new(CheckedEncoder { encoder, loose }))
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        self.sink.session(route, owner)
    }
}

impl Encode for CheckedEncoder {
    fn columns(&self) -> &[Column] {
        self.encoder.columns()
    }

    fn encode(
        &self,
        kind: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        let Some(Value::Json(amount)) = values.get(2).filter(|value| match value {
            Value::Json(text) => text.starts_with('-'),
            _ => false,
        }) else {
            return self.encoder.encode(kind, values, row, row_key);
        };
        let long = format!("{amount}.{}", "0".repeat(MAX_ROW_BYTES));
        let mut values = values.to_vec();
        values[2] = Value::Json(&long);
        self.loose.encode(kind, &values, row, row_key)
    }
}
