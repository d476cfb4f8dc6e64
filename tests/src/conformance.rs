//! What every sink must do: one list of cases ([`conformance_cases`]), run against each [`Target`].
//!
//! All cases use one table, `id text PRIMARY KEY, version bigint NOT NULL, amount integer CHECK (amount >= 0), note text
//! DEFAULT 'none'`, and look into the bookkeeping tables by the names that all sinks share. Marks are opaque to a sink: here
//! a block spells its shard, its sequence and one letter an outcome.

pub mod clickhouse;
#[cfg(feature = "duckdb")]
pub mod duckdb;
pub mod folders;
pub mod kafka;
pub mod marks;
pub mod model;
pub mod ownership;
pub mod redis;
pub mod rows;
pub mod stream_load;
pub mod targets;
pub mod whole;

use std::{collections::BTreeMap, sync::Arc};

use adapters::{
    sink::{
        Acquire, Batch, DeadLetter, Encode, MarkBlock, Mode, OnRefused, Receipts, Row, RowKind, RowOutcome,
        Session, ShardId, ShardState, ShardStep, Sink, SinkError, Source,
    },
    value::{BadValue, Value},
};
use bytes::Bytes;

/// Runs the macro `$each` with `$target`, a semicolon, and module and function of every case.
#[macro_export]
macro_rules! conformance_cases {
    ($each:ident, $target:expr) => {
        $crate::keyed_conformance_cases!($each, $target);
        $each! {
            $target;
            rows::rows_without_row_key,
            rows::the_probe_lists_all_misfits,
        }
    };
}

/// As [`conformance_cases`], for sinks whose rows are at keys: what becomes of rows without one, and of tables that do not fit, are no
/// questions there.
#[macro_export]
macro_rules! keyed_conformance_cases {
    ($each:ident, $target:expr) => {
        $each! {
            $target;
            rows::insert_skips_what_exists,
            rows::upsert_takes_the_last_write,
            rows::upsert_if_newer_takes_the_highest_version,
            rows::a_default_applies_once_and_stays,
            rows::deletes_by_tombstone,
            rows::versioned_deletes_keep_older_writes_away,
            rows::a_versioned_delete_needs_its_version,
            rows::copies_of_a_row_key_in_one_batch,
            rows::rule10_a_bad_row_costs_one_outcome,
            rows::rule10_a_bad_copy_gives_way_to_a_good_one,
            rows::large_batches_of_every_kind,
            rows::values_are_kept_exactly,
            rows::what_cannot_be_kept_is_a_bad_value,
            rows::p10_dead_letters_come_with_their_batch,
            rows::a_refused_row_can_abort_its_batch,
            marks::marks_say_what_became_of_each_row,
            model::insert_agrees_with_the_model,
            model::upsert_agrees_with_the_model,
            model::upsert_if_newer_agrees_with_the_model,
        }
        $crate::book_conformance_cases!($each, $target);
    };
}

/// As [`conformance_cases`], for sinks that append and keep no rows: what becomes of a row that meets another, and which columns fit, are
/// no questions there.
#[macro_export]
macro_rules! appending_conformance_cases {
    ($each:ident, $target:expr) => {
        $each! {
            $target;
            rows::a_refused_row_can_abort_its_batch,
        }
        $crate::book_conformance_cases!($each, $target);
    };
}

/// As [`appending_conformance_cases`], for sinks that refuse no row that their encoder has taken: what their book must do.
#[macro_export]
macro_rules! book_conformance_cases {
    ($each:ident, $target:expr) => {
        $each! {
            $target;
            ownership::p3_acquire_raises_the_epoch_and_tells_all,
            ownership::p6_no_epoch_comes_again,
            ownership::p3_a_live_owner_is_not_disturbed,
            ownership::p3_all_shards_of_a_route_are_found,
            ownership::p1_the_first_writer_names_the_route,
            ownership::p4_the_fence_moves_only_one_step,
            ownership::p4_the_fence_holds_an_older_epoch_back,
            ownership::p4_of_two_racing_sessions_one_wins,
            ownership::p4_a_take_over_races_a_batch,
            ownership::p13_several_shards_move_together_or_not_at_all,
            ownership::p3_the_shard_row_keeps_its_source_also_in_tables_of_earlier_builds,
            ownership::p13_the_shard_row_keeps_the_partition_count_also_in_tables_of_earlier_builds,
            ownership::p5_an_applied_batch_is_found,
            ownership::p5_a_batch_proven_absent_cannot_come,
            ownership::p5_resolving_takes_no_shard_back,
            ownership::p6_nothing_reconnects_but_acquire,
            ownership::a_heartbeat_shows_a_lost_shard,
            marks::empty_batches_move_positions,
            marks::marks_come_in_order_and_in_pages,
            marks::p11_expiry_raises_the_floor_in_its_own_transaction,
            marks::p11_expiry_is_fenced,
            marks::p11_forgetting_all_takes_marks_and_floors_and_leaves_positions,
        }
    };
}

/// A kind of sink under test.
#[expect(async_fn_in_trait, reason = "the cases run on the thread that awaits them")]
pub trait Target {
    /// Where one case works.
    type Place: Place;
    /// Makes an empty table, and bookkeeping of its own.
    async fn place(&self, shape: &Shape) -> Self::Place;
    /// How many random histories the model test runs.
    fn histories(&self) -> u64;
    /// Whether a column takes a value that others could not keep.
    fn takes(&self, column: &str, json: &str) -> bool {
        let _ = (column, json);
        false
    }
}

/// One table and the sinks on it.
#[expect(async_fn_in_trait, reason = "the cases run on the thread that awaits them")]
pub trait Place {
    /// A sink as another instance would make it.
    fn sink(&self, shape: &Shape) -> Box<dyn Sink>;
    /// Runs a statement.
    async fn execute(&self, sql: &str);
    /// The first column of the rows, as text.
    async fn texts(&self, sql: &str) -> Vec<Option<String>>;
}

/// How the sink is configured.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The mode; `UpsertIfNewer` has `version` as its version.
    pub mode: Mode,
    /// `id` is the row key (else there is none).
    pub keyed: bool,
    /// The table's name.
    pub table: &'static str,
    /// The columns to fill; all if none.
    pub columns: Option<Vec<String>>,
}

impl Shape {
    /// The table `rows`, keyed.
    pub fn new(mode: Mode) -> Self {
        Self { mode, keyed: true, table: "rows", columns: None }
    }

    /// Names of the row key columns.
    pub fn row_key(&self) -> Vec<String> {
        if self.keyed { vec!["id".to_owned()] } else { Vec::new() }
    }

    /// Name of the version column.
    pub fn version(&self) -> Option<String> {
        (self.mode == Mode::UpsertIfNewer).then(|| "version".to_owned())
    }
}

/// The table of all cases, in SQL that every sink takes.
pub const DDL: &str = "CREATE TABLE rows (id text PRIMARY KEY, version bigint NOT NULL, \
                       amount integer CHECK (amount >= 0), note text DEFAULT 'none')";

/// One record of a case.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// Write or delete.
    pub kind: RowKind,
    /// The row key.
    pub id: String,
    /// The version.
    pub version: i64,
    /// Below zero: the table refuses the row.
    pub amount: i64,
    /// The default applies if none.
    pub note: Option<String>,
}

/// A write without note.
pub fn write(id: &str, version: i64, amount: i64) -> Record {
    Record { kind: RowKind::Write, id: id.to_owned(), version, amount, note: None }
}

/// A tombstone.
pub fn delete(id: &str, version: i64) -> Record {
    Record { kind: RowKind::Delete, id: id.to_owned(), version, amount: 0, note: None }
}

impl Record {
    /// With a note.
    pub fn note(mut self, note: &str) -> Self {
        self.note = Some(note.to_owned());
        self
    }

    fn values(&self) -> [Vec<u8>; 4] {
        let json = |text: &str| serde_json::to_vec(text).expect("text is JSON");
        [
            json(&self.id),
            self.version.to_string().into_bytes(),
            self.amount.to_string().into_bytes(),
            self.note.as_deref().map(json).unwrap_or_default(),
        ]
    }
}

/// Rows as the sink's encoder made them.
#[derive(Clone, Debug, Default)]
pub struct Encoded(Vec<(RowKind, Vec<u8>, Vec<u8>)>);

impl Encoded {
    /// Of good records.
    pub fn of(encoder: &dyn Encode, records: &[Record]) -> Self {
        let encode = |record: &Record| {
            let texts = record.values();
            let value = |text: &'_ [u8]| -> Option<String> {
                (!text.is_empty()).then(|| String::from_utf8_lossy(text).into_owned())
            };
            let texts: Vec<Option<String>> = texts.iter().map(|text| value(text)).collect();
            let values: Vec<Value<'_>> =
                texts.iter().map(|text| text.as_deref().map_or(Value::Missing, Value::Json)).collect();
            encode(encoder, record.kind, &values).expect("a good record")
        };
        Self(
            records
                .iter()
                .map(|record| {
                    let (row, key) = encode(record);
                    (record.kind, row, key)
                })
                .collect(),
        )
    }
}

/// Encodes one row: its bytes and its row key.
pub fn encode(
    encoder: &dyn Encode,
    kind: RowKind,
    values: &[Value<'_>],
) -> Result<(Vec<u8>, Vec<u8>), BadValue> {
    let (mut row, mut key) = (Vec::new(), Vec::new());
    encoder.encode(kind, values, &mut row, &mut key)?;
    Ok((row, key))
}

/// What goes with the rows of a batch.
pub struct Parcel<'a> {
    /// The rows; they all belong to step 0.
    pub rows: &'a Encoded,
    /// The shards' steps.
    pub steps: &'a [ShardStep],
    /// As in [`Batch`].
    pub dead_letters: &'a [DeadLetter<'a>],
    /// As in [`Batch`].
    pub on_refused: OnRefused,
    /// As in [`Batch`].
    pub known_new: bool,
    /// Keep marks, one a step.
    pub marks: bool,
}

/// What a case's block says.
pub fn block(step: &ShardStep, outcomes: &[RowOutcome]) -> Bytes {
    let letters: String = outcomes
        .iter()
        .map(|outcome| match outcome {
            RowOutcome::Written => 'w',
            RowOutcome::Updated => 'u',
            RowOutcome::Stale => 's',
            RowOutcome::Refused { .. } => 'r',
        })
        .collect();
    format!("{} {} {letters}", step.shard, step.sequence).into()
}

/// A record's origin, for dead letters.
pub fn source(step: usize, payload: Option<&[u8]>) -> Source<'_> {
    Source { step, position: Some(77), key: b"0123456789abcdef", payload, event_ms: 1000 }
}

/// Delivers `parcel` on `session`.
pub async fn deliver(session: &mut dyn Session, parcel: &Parcel<'_>) -> Result<Receipts, SinkError> {
    let rows: Vec<Row<'_>> = parcel
        .rows
        .0
        .iter()
        .map(|(kind, bytes, row_key)| Row {
            kind: *kind,
            bytes,
            row_key,
            source: source(0, Some(b"{\"payload\": 1}")),
        })
        .collect();
    let seal = |outcomes: &[RowOutcome]| -> Vec<MarkBlock> {
        if !parcel.marks {
            return Vec::new();
        }
        let mark = |(index, step): (usize, &ShardStep)| MarkBlock {
            step: index,
            min_ms: step.watermark_ms - 10,
            max_ms: step.watermark_ms,
            count: outcomes.len(),
            block: block(step, outcomes),
        };
        parcel.steps.iter().enumerate().map(mark).collect()
    };
    let batch = Batch {
        steps: parcel.steps,
        rows: &rows,
        dead_letters: parcel.dead_letters,
        on_refused: parcel.on_refused,
        known_new: parcel.known_new,
        seal: &seal,
    };
    session.deliver(&batch).await
}

/// A place, and one session on it that owns some shards.
pub struct Bed<P> {
    /// The table.
    pub place: Arc<P>,
    /// How its sink is configured.
    pub shape: Shape,
    /// Of that sink.
    pub encoder: Arc<dyn Encode>,
    /// Owns `shards`.
    pub session: Box<dyn Session>,
    /// As the session knows them, kept up to date.
    pub shards: Vec<ShardState>,
}

/// The route of all cases.
pub const ROUTE: &str = "route";
/// The shard of most cases.
pub const SHARD: &str = "http/0";

impl<P: Place> Bed<P> {
    /// A new place, with one shard owned by `first`.
    pub async fn new<T: Target<Place = P>>(target: &T, mode: Mode) -> Self {
        Self::shaped(target, Shape::new(mode)).await
    }

    /// As [`Bed::new`].
    pub async fn shaped<T: Target<Place = P>>(target: &T, shape: Shape) -> Self {
        let place = Arc::new(target.place(&shape).await);
        Self::on(place, shape, "first", &[SHARD]).await
    }

    /// Another instance on the same table, which takes `shards`.
    pub async fn rival(&self, owner: &str, shards: &[&str]) -> Self {
        Self::on(self.place.clone(), self.shape.clone(), owner, shards).await
    }

    async fn on(place: Arc<P>, shape: Shape, owner: &str, shards: &[&str]) -> Self {
        let sink = place.sink(&shape);
        let encoder = sink.probe().await.expect("the table fits");
        let session = sink.session(ROUTE, owner);
        let mut bed = Self { place, shape, encoder, session, shards: Vec::new() };
        bed.acquire(shards).await;
        bed
    }

    /// Takes `shards`, whoever has them.
    pub async fn acquire(&mut self, shards: &[&str]) {
        let shards: Vec<ShardId> = shards.iter().map(|shard| ShardId::from(*shard)).collect();
        self.shards = self.session.acquire(&shards, Acquire::Force).await.expect("the shards can be had");
    }

    /// The next step of every shard; watermarks are 100 times the sequence.
    pub fn steps(&self) -> Vec<ShardStep> {
        let step = |state: &ShardState| ShardStep {
            shard: state.shard.clone(),
            epoch: state.epoch,
            sequence: state.sequence + 1,
            position: None,
            watermark_ms: (state.sequence + 1) * 100,
        };
        self.shards.iter().map(step).collect()
    }

    /// The shards and their epochs.
    pub fn owned(&self) -> Vec<(ShardId, i64)> {
        self.shards.iter().map(|state| (state.shard.clone(), state.epoch)).collect()
    }

    /// Notes that a batch with `steps` is in.
    pub fn advance(&mut self, steps: &[ShardStep]) {
        for state in &mut self.shards {
            if let Some(step) = steps.iter().find(|step| step.shard == state.shard) {
                state.sequence = step.sequence;
                state.watermark_ms = step.watermark_ms;
            }
        }
    }

    /// Delivers `records` with marks; the refused ones are reported.
    pub async fn deliver(&mut self, records: &[Record]) -> Result<Vec<RowOutcome>, SinkError> {
        let steps = self.steps();
        self.deliver_at(&steps, records).await
    }

    /// The same, with steps of the caller's making.
    pub async fn deliver_at(
        &mut self,
        steps: &[ShardStep],
        records: &[Record],
    ) -> Result<Vec<RowOutcome>, SinkError> {
        let rows = Encoded::of(&*self.encoder, records);
        let parcel = Parcel {
            rows: &rows,
            steps,
            dead_letters: &[],
            on_refused: OnRefused::Report,
            known_new: self.shape.mode == Mode::Insert,
            marks: true,
        };
        let receipts = deliver(&mut *self.session, &parcel).await?;
        self.advance(steps);
        Ok(receipts.rows)
    }

    /// The table: id to (version, amount, note).
    pub async fn table(&self) -> BTreeMap<String, (i64, i64, String)> {
        let column = async |name: &str| {
            let sql = format!("SELECT CAST({name} AS text) FROM rows ORDER BY id, version, amount");
            self.place.texts(&sql).await.into_iter().map(Option::unwrap_or_default).collect::<Vec<_>>()
        };
        let (ids, versions, amounts, notes) =
            (column("id").await, column("version").await, column("amount").await, column("note").await);
        let number = |text: &String| text.parse().expect("an integer column");
        let rest = versions.iter().map(number).zip(amounts.iter().map(number)).zip(notes);
        ids.into_iter().zip(rest.map(|((version, amount), note)| (version, amount, note))).collect()
    }

    /// One number.
    pub async fn number(&self, sql: &str) -> i64 {
        self.text(sql).await.parse().expect("a number")
    }

    /// One text.
    pub async fn text(&self, sql: &str) -> String {
        self.place.texts(sql).await.into_iter().next().flatten().expect("one row with a value")
    }

    /// Sequence of [`SHARD`] in the sink.
    pub async fn sequence(&self) -> i64 {
        self.number(&format!("SELECT CAST(sequence AS text) FROM oncegate_shards WHERE shard = '{SHARD}'"))
            .await
    }
}

/// The letters of outcomes, as in [`block`].
pub fn letters(outcomes: &[RowOutcome]) -> String {
    let step = ShardStep { shard: "".into(), epoch: 0, sequence: 0, position: None, watermark_ms: 0 };
    String::from_utf8_lossy(&block(&step, outcomes)).trim_start_matches(" 0 ").to_owned()
}
