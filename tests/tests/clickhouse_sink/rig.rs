//! One table and one session on it.

use std::sync::Arc;

use adapters::{
    clickhouse::{ClickhouseConfig, ClickhouseSink},
    sink::{
        Acquire, Batch, Encode, MarkBlock, OnRefused, Resolution, Row, RowKind, RowOutcome, Session,
        ShardState, ShardStep, Sink, SinkError, Source,
    },
    value::{BadValue, Value},
};
use oncegate_tests::{conformance, servers::Clickhouse};
use rusqlite::Connection;
use tempfile::TempDir;

/// Columns and their JSON texts; the others are missing.
pub(crate) type Fields<'a> = &'a [(&'a str, &'a str)];

pub(crate) struct Rig {
    pub(crate) server: &'static Clickhouse,
    pub(crate) table: String,
    _folder: TempDir,
    pub(crate) config: ClickhouseConfig,
    pub(crate) encoder: Arc<dyn Encode>,
    pub(crate) session: Box<dyn Session>,
    pub(crate) state: ShardState,
    /// No row that is delivered can be there already.
    pub(crate) known_new: bool,
}

impl Rig {
    pub(crate) async fn new(columns: &str, change: impl FnOnce(&mut ClickhouseConfig)) -> Self {
        let server = Clickhouse::shared();
        let table = server.table("t", columns).await;
        Self::on(server, table, "orders", change).await
    }

    pub(crate) async fn on(
        server: &'static Clickhouse,
        table: String,
        route: &str,
        change: impl FnOnce(&mut ClickhouseConfig),
    ) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut config = ClickhouseConfig::new(server.url(), &table, folder.path().join("journal"));
        change(&mut config);
        let sink = ClickhouseSink::new(config.clone()).expect("a good URL");
        let encoder = sink.probe().await.expect("the table fits");
        let mut session = sink.session(route, "me");
        let states = session.acquire(&["http/0".into()], Acquire::Force).await.expect("the shard can be had");
        let state = states.into_iter().next().expect("one shard");
        Self { server, table, _folder: folder, config, encoder, session, state, known_new: true }
    }

    /// As after a restart.
    pub(crate) async fn again(&mut self) -> Result<(), SinkError> {
        let sink = ClickhouseSink::new(self.config.clone()).expect("a good URL");
        self.encoder = sink.probe().await.expect("the table fits");
        self.session = sink.session("orders", "me");
        self.state = self.session.acquire(&["http/0".into()], Acquire::Force).await?.remove(0);
        Ok(())
    }

    pub(crate) fn encode(&self, kind: RowKind, fields: Fields<'_>) -> Result<(Vec<u8>, Vec<u8>), BadValue> {
        let value = |name: &str| {
            let given = fields.iter().find(|(field, _)| *field == name);
            given.map_or(Value::Missing, |(_, json)| Value::Json(json))
        };
        let values: Vec<Value<'_>> =
            self.encoder.columns().iter().map(|column| value(&column.name)).collect();
        conformance::encode(&*self.encoder, kind, &values)
    }

    fn step(&self) -> ShardStep {
        ShardStep {
            shard: self.state.shard.clone(),
            epoch: self.state.epoch,
            sequence: self.state.sequence + 1,
            position: None,
            watermark_ms: 100,
        }
    }

    pub(crate) async fn deliver(&mut self, rows: &[Fields<'_>]) -> Result<Vec<RowOutcome>, SinkError> {
        let rows: Vec<_> = rows.iter().map(|fields| (RowKind::Write, *fields)).collect();
        self.deliver_kinds(&rows).await
    }

    pub(crate) async fn deliver_kinds(
        &mut self,
        rows: &[(RowKind, Fields<'_>)],
    ) -> Result<Vec<RowOutcome>, SinkError> {
        let encoded: Vec<_> = rows
            .iter()
            .map(|(kind, fields)| (*kind, self.encode(*kind, fields).expect("a good record")))
            .collect();
        let source =
            Source { step: 0, position: None, key: b"0123456789abcdef", payload: Some(b"{}"), event_ms: 5 };
        let rows: Vec<Row<'_>> = encoded
            .iter()
            .map(|(kind, (bytes, row_key))| Row { kind: *kind, bytes, row_key, source })
            .collect();
        let steps = [self.step()];
        let seal = |outcomes: &[RowOutcome]| {
            let block = conformance::block(&steps[0], outcomes);
            vec![MarkBlock { step: 0, min_ms: 1, max_ms: 2, count: outcomes.len(), block }]
        };
        let batch = Batch {
            steps: &steps,
            rows: &rows,
            dead_letters: &[],
            on_refused: OnRefused::Report,
            known_new: self.known_new,
            seal: &seal,
        };
        let receipts = self.session.deliver(&batch).await?;
        self.state.sequence += 1;
        Ok(receipts.rows)
    }

    pub(crate) async fn resolve(&mut self) -> Result<Resolution, SinkError> {
        let steps = [self.step()];
        let (resolution, states) = self.session.resolve(&steps).await?;
        self.state = states.into_iter().next().expect("one shard");
        Ok(resolution)
    }

    pub(crate) async fn count(&self) -> i64 {
        self.server.number(&format!("SELECT count() FROM {}", self.table)).await
    }

    pub(crate) async fn lines(&self, what: &str) -> Vec<String> {
        self.server.lines(&format!("SELECT {what} FROM {} FORMAT TSVRaw", self.table)).await
    }

    pub(crate) fn book(&self) -> Connection {
        let book = Connection::open(self.config.journal.folder.join("book.db")).expect("the book opens");
        book.busy_timeout(std::time::Duration::from_secs(5)).expect("a time-out");
        book
    }
}
