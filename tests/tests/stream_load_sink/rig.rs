//! One table and one session on it.

use std::{sync::Arc, time::Duration};

use adapters::{
    sink::{
        Acquire, Batch, Encode, MarkBlock, Mode, OnRefused, Resolution, Row, RowKind, RowOutcome, Session,
        ShardState, ShardStep, Sink, SinkError, Source,
    },
    stream_load::{Dialect, StreamLoadConfig, StreamLoadSink},
    value::{BadValue, Value},
};
use oncegate_tests::{
    conformance,
    servers::{
        StreamLoad,
        stream_load::{Model, StandIn, TableSpec},
    },
};
use rusqlite::Connection;
use tempfile::TempDir;

/// Columns and their JSON texts; the others are missing.
pub(crate) type Fields<'a> = &'a [(&'a str, &'a str)];

pub(crate) const BOTH: [Dialect; 2] = [Dialect::StarRocks, Dialect::Doris];

/// A key, a version, a text with a default.
pub(crate) fn rows_of(model: Model, sequence: bool) -> TableSpec {
    TableSpec {
        columns: vec![
            ("id", "bigint", "NOT NULL"),
            ("v", "bigint", "NOT NULL DEFAULT \"0\""),
            ("note", "varchar(60)", "NULL DEFAULT \"none\""),
            ("must", "int", if model == Model::Keyed { "NOT NULL" } else { "NULL" }),
        ],
        model,
        key: 1,
        sequence: sequence.then_some("v"),
    }
}

/// In the mode that the table is for.
pub(crate) fn keyed(mode: Mode) -> impl Fn(&mut StreamLoadConfig) {
    move |config| {
        config.mode = mode;
        config.row_key = vec!["id".to_owned()];
        config.version = (mode == Mode::UpsertIfNewer).then(|| "v".to_owned());
    }
}

pub(crate) struct Rig {
    pub(crate) server: Arc<StreamLoad>,
    pub(crate) table: String,
    _folder: TempDir,
    pub(crate) config: StreamLoadConfig,
    pub(crate) encoder: Arc<dyn Encode>,
    pub(crate) session: Box<dyn Session>,
    pub(crate) state: ShardState,
    route: String,
}

impl Rig {
    /// With a server of its own.
    pub(crate) async fn new(
        dialect: Dialect,
        spec: &TableSpec,
        change: impl Fn(&mut StreamLoadConfig),
    ) -> Self {
        let server = Arc::new(StreamLoad::start(dialect));
        let table = server.table(spec);
        Self::on(server, table, "orders", change).await
    }

    /// A table to insert into.
    pub(crate) async fn plain(dialect: Dialect, change: impl Fn(&mut StreamLoadConfig)) -> Self {
        Self::new(dialect, &rows_of(Model::Duplicate, false), change).await
    }

    pub(crate) async fn on(
        server: Arc<StreamLoad>,
        table: String,
        route: &str,
        change: impl Fn(&mut StreamLoadConfig),
    ) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut config =
            StreamLoadConfig::new(server.dialect(), server.url(), &table, folder.path().join("journal"));
        config.request_timeout = Duration::from_secs(1);
        change(&mut config);
        let sink = StreamLoadSink::new(config.clone()).expect("a good URL");
        let encoder = sink.probe().await.expect("the table fits");
        let mut session = sink.session(route, "me");
        let states = session.acquire(&["http/0".into()], Acquire::Force).await.expect("the shard can be had");
        let state = states.into_iter().next().expect("one shard");
        Self { server, table, _folder: folder, config, encoder, session, state, route: route.to_owned() }
    }

    pub(crate) fn stand_in(&self) -> &StandIn {
        self.server.stand_in().expect("the caller has looked")
    }

    /// As after a restart.
    pub(crate) async fn again(&mut self) -> Result<(), SinkError> {
        let sink = StreamLoadSink::new(self.config.clone()).expect("a good URL");
        self.encoder = sink.probe().await.expect("the table fits");
        self.session = sink.session(&self.route, "me");
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
        self.deliver_kinds(&rows, OnRefused::DeadLetter).await
    }

    pub(crate) async fn deliver_kinds(
        &mut self,
        rows: &[(RowKind, Fields<'_>)],
        on_refused: OnRefused,
    ) -> Result<Vec<RowOutcome>, SinkError> {
        let encoded: Vec<_> = rows
            .iter()
            .map(|(kind, fields)| (*kind, self.encode(*kind, fields).expect("a good record")))
            .collect();
        let source = |at: usize| Source {
            step: 0,
            position: i64::try_from(at).ok(),
            key: b"0123456789abcdef",
            payload: Some(b"{}"),
            event_ms: 5,
        };
        let rows: Vec<Row<'_>> = encoded
            .iter()
            .enumerate()
            .map(|(at, (kind, (bytes, row_key)))| Row { kind: *kind, bytes, row_key, source: source(at) })
            .collect();
        let steps = [self.step()];
        let seal = |outcomes: &[RowOutcome]| {
            let block = conformance::block(&steps[0], outcomes);
            vec![MarkBlock { step: 0, min_ms: 1, max_ms: 2, count: outcomes.len(), block }]
        };
        let batch =
            Batch { steps: &steps, rows: &rows, dead_letters: &[], on_refused, known_new: true, seal: &seal };
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

    /// Asks as long as nobody can say.
    pub(crate) async fn resolve_patiently(&mut self) -> Resolution {
        for _ in 0..100 {
            match self.resolve().await {
                Ok(resolution) => return resolution,
                Err(SinkError::Unknown { .. }) => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(other) => panic!("{other}"),
            }
        }
        panic!("it stays unknown")
    }

    /// Until it is in.
    pub(crate) async fn deliver_patiently(&mut self, rows: &[(RowKind, Fields<'_>)]) {
        for _ in 0..100 {
            match self.deliver_kinds(rows, OnRefused::Report).await {
                Ok(_) => return,
                Err(SinkError::NotApplied { retry: true, .. }) => {}
                Err(SinkError::Unknown { .. }) => match self.resolve_patiently().await {
                    Resolution::Applied(_) => return,
                    Resolution::NotApplied => {}
                },
                Err(other) => panic!("{other}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("it does not go in")
    }

    pub(crate) fn ids(&self) -> Vec<String> {
        self.server.rows(&self.table, &["id"])
    }

    pub(crate) fn book(&self) -> Connection {
        let book = Connection::open(self.config.journal.folder.join("book.db")).expect("the book opens");
        book.busy_timeout(Duration::from_secs(5)).expect("a time-out");
        book
    }
}
