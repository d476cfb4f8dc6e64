//! A sink that takes records whole, under the cases' rows: each becomes the payload that it would have come with.

use std::{collections::BTreeMap, sync::Arc};

use adapters::{
    sink::{
        Acquire, Batch, Column, Encode, Guarantee, Life, Mark, Misfit, Mode, Original, Receipts, Resolution,
        RouteRow, Row, RowKind, Session, ShardId, ShardState, ShardStep, Sink, SinkError, Source,
    },
    value::{BadValue, Value},
};
use async_trait::async_trait;

/// Makes a payload one that the sink refuses.
type Spoil = fn(&mut Vec<u8>);

/// The sink, taking the cases' rows.
#[derive(Debug)]
pub struct Whole {
    sink: Box<dyn Sink>,
    spoil: Spoil,
}

impl Whole {
    /// What the table of the cases would refuse is spoiled.
    pub fn new(sink: impl Sink + 'static, spoil: Spoil) -> Self {
        Self { sink: Box::new(sink), spoil }
    }
}

#[derive(Debug)]
struct WholeEncoder(Arc<dyn Encode>, Vec<Column>, Spoil);

struct WholeSession(Box<dyn Session>);

#[async_trait]
impl Sink for Whole {
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
        let column = |name: &str| Column {
            name: name.to_owned(),
            type_name: "json".to_owned(),
            nullable: true,
            has_default: true,
        };
        let columns = ["id", "version", "amount", "note"].map(column).to_vec();
        Ok(Arc::new(WholeEncoder(self.sink.probe().await?, columns, self.spoil)))
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        Box::new(WholeSession(self.sink.session(route, owner)))
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
        let mut payload = serde_json::to_vec(&record).expect("JSON");
        if record["amount"].as_i64().is_some_and(|amount| amount < 0) {
            (self.2)(&mut payload);
        }
        let key = record["id"].as_str().unwrap_or_default().to_owned();
        let original = Original { key: Some(key.as_bytes()), ..Original::default() };
        let mut inner = Vec::new();
        let columns = self.0.columns().len();
        self.0.encode_whole(kind, &values[..columns], &original, &mut inner, row_key)?;
        row.extend_from_slice(&(inner.len() as u32).to_le_bytes());
        row.extend_from_slice(&inner);
        row.extend_from_slice(&payload);
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
