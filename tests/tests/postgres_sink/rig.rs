//! One sink, one session and a connection that looks on.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use adapters::{
    postgres::{PostgresConfig, PostgresSink},
    sink::{
        Acquire, Batch, DeadLetter, Encode, MarkBlock, OnRefused, Row, RowKind, RowOutcome, Session,
        ShardStep, Sink, SinkError, Source,
    },
    value::{BadValue, Value},
};
use oncegate_tests::servers::Postgres;
use serde_json::value::RawValue;
use tokio_postgres::Client;

pub(crate) const SHARD: &str = "http/0";

/// A sink at work on a database of its own.
pub(crate) struct Rig {
    pub(crate) client: Client,
    pub(crate) database: String,
    pub(crate) config: PostgresConfig,
    pub(crate) sink: PostgresSink,
    pub(crate) encoder: Arc<dyn Encode>,
    pub(crate) session: Box<dyn Session>,
    pub(crate) epoch: i64,
    pub(crate) sequence: i64,
    pub(crate) options: Options,
}

/// How the next batches are made.
pub(crate) struct Options {
    pub(crate) known_new: bool,
    pub(crate) on_refused: OnRefused,
}

/// Makes a database on the shared server.
pub(crate) async fn database(ddl: &str) -> (Client, String) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("sink_{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let client = Postgres::shared().database(&name, ddl).await;
    (client, name)
}

pub(crate) fn config(database: &str) -> PostgresConfig {
    let mut config = PostgresConfig::new(Postgres::shared().url(database), "public.t");
    config.statement_timeout = Duration::from_secs(20);
    config.lock_timeout = Duration::from_millis(200);
    config
}

impl Rig {
    /// A table `t` made by `ddl`, probed and acquired.
    pub(crate) async fn new(ddl: &str, configure: impl FnOnce(&mut PostgresConfig)) -> Rig {
        let (client, database) = database(ddl).await;
        let mut config = config(&database);
        configure(&mut config);
        let sink = PostgresSink::new(config.clone()).expect("the configuration is right");
        let encoder = sink.probe().await.unwrap_or_else(|misfits| panic!("misfits: {misfits:#?}"));
        let mut session = sink.session("orders", "test/1");
        let states = session.acquire(&[SHARD.into()], Acquire::Force).await.expect("the shard is free");
        Rig {
            client,
            database,
            config,
            sink,
            encoder,
            session,
            epoch: states[0].epoch,
            sequence: states[0].sequence,
            options: Options { known_new: false, on_refused: OnRefused::Report },
        }
    }

    pub(crate) async fn acquire(&mut self) -> i64 {
        let states = self.session.acquire(&[SHARD.into()], Acquire::Force).await.expect("the shard is free");
        (self.epoch, self.sequence) = (states[0].epoch, states[0].sequence);
        self.sequence
    }

    pub(crate) fn step(&self) -> ShardStep {
        ShardStep {
            shard: SHARD.into(),
            epoch: self.epoch,
            sequence: self.sequence + 1,
            position: None,
            watermark_ms: 1000 + self.sequence,
        }
    }

    /// Delivers `records`: JSON objects; one that begins with `-` is a delete.
    pub(crate) async fn try_deliver(&mut self, records: &[&str]) -> Result<Vec<RowOutcome>, SinkError> {
        let rows = Rows::new(&*self.encoder, records).expect("the records fit their columns");
        self.deliver_rows(&rows, &[]).await
    }

    pub(crate) async fn deliver_rows(
        &mut self,
        rows: &Rows,
        dead_letters: &[DeadLetter<'_>],
    ) -> Result<Vec<RowOutcome>, SinkError> {
        let steps = [self.step()];
        let rows = rows.rows();
        let seal = seal(&steps);
        let batch = Batch {
            steps: &steps,
            rows: &rows,
            dead_letters,
            on_refused: self.options.on_refused,
            known_new: self.options.known_new,
            seal: &seal,
        };
        let receipts = self.session.deliver(&batch).await?;
        self.sequence += 1;
        // The mark of the batch tells the same outcomes as the receipts.
        let query = "SELECT block FROM oncegate_marks WHERE shard = $1 AND sequence = $2";
        if !receipts.rows.is_empty() {
            let mark: Vec<u8> = self.client.query_one(query, &[&SHARD, &self.sequence]).await.unwrap().get(0);
            assert_eq!(String::from_utf8(mark).unwrap(), letters(&receipts.rows));
        }
        Ok(receipts.rows)
    }

    /// The outcomes as letters: `W`ritten, `U`pdated, `S`tale, `R`efused.
    pub(crate) async fn deliver(&mut self, records: &[&str]) -> String {
        letters(&self.try_deliver(records).await.unwrap_or_else(|error| panic!("{error}")))
    }

    /// The table as JSON rows in the order of their text.
    pub(crate) async fn table(&self) -> Vec<String> {
        let query = "SELECT to_jsonb(t)::text FROM t ORDER BY to_jsonb(t)::text";
        self.client.query(query, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
    }

    pub(crate) async fn count(&self, from: &str) -> i64 {
        self.client.query_one(&format!("SELECT count(*) FROM {from}"), &[]).await.unwrap().get(0)
    }
}

/// One mark whose block spells the outcomes.
pub(crate) fn seal(steps: &[ShardStep]) -> impl Fn(&[RowOutcome]) -> Vec<MarkBlock> + Send + Sync + use<> {
    let count = steps.len();
    move |outcomes| {
        if outcomes.is_empty() {
            return Vec::new();
        }
        (0..count)
            .map(|step| MarkBlock {
                step,
                min_ms: 500,
                max_ms: 1000,
                count: outcomes.len(),
                block: letters(outcomes).into(),
            })
            .collect()
    }
}

pub(crate) fn letters(outcomes: &[RowOutcome]) -> String {
    let letter = |outcome: &RowOutcome| match outcome {
        RowOutcome::Written => 'W',
        RowOutcome::Updated => 'U',
        RowOutcome::Stale => 'S',
        RowOutcome::Refused { .. } => 'R',
    };
    outcomes.iter().map(letter).collect()
}

/// Encoded records.
#[derive(Default)]
pub(crate) struct Rows {
    rows: Vec<(RowKind, Vec<u8>, Vec<u8>, String)>,
}

impl Rows {
    pub(crate) fn new(encoder: &dyn Encode, records: &[&str]) -> Result<Rows, BadValue> {
        let mut rows = Rows::default();
        for record in records {
            rows.push(encoder, record)?;
        }
        Ok(rows)
    }

    pub(crate) fn push(&mut self, encoder: &dyn Encode, record: &str) -> Result<(), BadValue> {
        let (kind, json) = match record.strip_prefix('-') {
            Some(json) => (RowKind::Delete, json),
            None => (RowKind::Write, record),
        };
        let members: BTreeMap<String, &RawValue> =
            serde_json::from_str(json).expect("the test's JSON is right");
        let values: Vec<Value<'_>> = encoder
            .columns()
            .iter()
            .map(|column| members.get(&column.name).map_or(Value::Missing, |json| Value::Json(json.get())))
            .collect();
        let (mut row, mut key) = (Vec::new(), Vec::new());
        encoder.encode(kind, &values, &mut row, &mut key)?;
        self.rows.push((kind, row, key, json.to_owned()));
        Ok(())
    }

    pub(crate) fn rows(&self) -> Vec<Row<'_>> {
        self.rows
            .iter()
            .enumerate()
            .map(|(index, (kind, bytes, row_key, payload))| Row {
                kind: *kind,
                bytes,
                row_key,
                source: Source {
                    step: 0,
                    position: Some(index as i64),
                    key: b"0123456789abcdef",
                    payload: Some(payload.as_bytes()),
                    event_ms: 700 + index as i64,
                },
            })
            .collect()
    }
}
