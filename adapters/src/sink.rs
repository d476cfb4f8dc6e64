//! The seam to a target: [`Sink`] (what it is, what it promises) and [`Session`] (one connection, owned by one lane).

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use async_trait::async_trait;
use bytes::Bytes;

use crate::{
    lineage::Lineage,
    value::{BadValue, Value},
};

/// Names a shard: `http/0`, or `kafka/<cluster id>/<topic id>/<partition>` (P3).
pub type ShardId = Arc<str>;

/// What a sink does with a repeat (DESIGN section 5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Guarantee {
    /// A mark is written in the same transaction as the rows.
    Transactional,
}

/// How a row meets the row that is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Skip if it exists.
    Insert,
    /// The last write wins.
    Upsert,
    /// The highest version wins; an older one is stale.
    UpsertIfNewer,
}

/// One column of the target table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Column {
    /// As the sink knows it.
    pub name: String,
    /// As the sink names it: `bigint`, `timestamp with time zone`, ...
    pub type_name: String,
    /// It may be null.
    pub nullable: bool,
    /// It has a default (or is generated): a record may leave it out.
    pub has_default: bool,
}

/// Write or delete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowKind {
    /// Insert or upsert, as the mode says.
    Write,
    /// A tombstone: only row key (and version) are set.
    Delete,
}

/// Turns a record's values into one row in the sink's own wire form. Pure: no IO, no clock.
pub trait Encode: Send + Sync + fmt::Debug {
    /// The columns, in the order in which `values` come.
    fn columns(&self) -> &[Column];
    /// Appends one row to `row`, and its row key (canonical bytes: equal keys have equal bytes) to `row_key`;
    /// the row key is empty when the route names none. On an error both buffers are as they were.
    /// With `RowKind::Delete` only row key and version columns are read.
    fn encode(
        &self,
        kind: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue>;
    /// The row is the record itself: all its members are part of it, whether or not they are columns.
    fn whole(&self) -> bool {
        false
    }
    /// Rows carry the headers of [`Original`].
    fn headers(&self) -> bool {
        false
    }
    /// As [`Encode::encode`], which takes no look at `original` unless the sink has use for it.
    fn encode_whole(
        &self,
        kind: RowKind,
        values: &[Value<'_>],
        _original: &Original<'_>,
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        self.encode(kind, values, row, row_key)
    }
}

/// What each [`Encode::encode`] promises whatever its table: as many values as columns, and on an error both buffers as they were.
pub(crate) fn encode_whole_row(
    columns: &[Column],
    values: &[Value<'_>],
    row: &mut Vec<u8>,
    row_key: &mut Vec<u8>,
    encode: impl FnOnce(&mut Vec<u8>, &mut Vec<u8>) -> Result<(), BadValue>,
) -> Result<(), BadValue> {
    if values.len() != columns.len() {
        return Err(BadValue {
            column: String::new(),
            column_type: String::new(),
            reason: format!("{} values for {} columns", values.len(), columns.len()),
        });
    }
    let (row_length, key_length) = (row.len(), row_key.len());
    let result = encode(row, row_key);
    if result.is_err() {
        row.truncate(row_length);
        row_key.truncate(key_length);
    }
    result
}

impl Column {
    /// Why a value does not fit here.
    pub(crate) fn bad(&self, reason: impl Into<String>) -> BadValue {
        BadValue { column: self.name.clone(), column_type: self.type_name.clone(), reason: reason.into() }
    }
}

/// What a record brought along beside its payload.
#[derive(Clone, Copy, Debug, Default)]
pub struct Original<'a> {
    /// Kafka record key.
    pub key: Option<&'a [u8]>,
    /// Kafka record headers in order, if [`Encode::headers`] asked for them.
    pub headers: &'a [(&'a str, Option<&'a [u8]>)],
    /// Kafka record timestamp, ms since the epoch.
    pub timestamp_ms: Option<i64>,
    /// Event time, ms since the epoch, or the arrival if it has none.
    pub event_ms: i64,
    /// Kafka partition.
    pub partition: Option<i32>,
}

/// One encoded row of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// Write or delete.
    pub kind: RowKind,
    /// As [`Encode::encode`] made it.
    pub bytes: &'a [u8],
    /// As [`Encode::encode`] made it; empty without row key.
    pub row_key: &'a [u8],
    /// What a dead letter of this row would say, if the sink must make one.
    pub source: Source<'a>,
}

/// Where a record came from, and its untouched bytes: for dead letters.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Index into [`Batch::steps`].
    pub step: usize,
    /// Kafka offset.
    pub position: Option<i64>,
    /// The fingerprint, 16 bytes; empty when the record could not be named.
    pub key: &'a [u8],
    /// The payload as it came; none for a Kafka tombstone.
    pub payload: Option<&'a [u8]>,
    /// Event time, ms since the epoch, or the arrival if it has none.
    pub event_ms: i64,
}

/// A record that goes to the dead letters in the batch's own transaction (P10).
#[derive(Clone, Debug)]
pub struct DeadLetter<'a> {
    /// Where it came from.
    pub source: Source<'a>,
    /// One of `rejected`, `mismatch`, `late`.
    pub kind: &'static str,
    /// What is wrong, where, the bound, what to do.
    pub reason: String,
}

/// One shard's step in a batch: the fence moves it from `sequence - 1` to `sequence` under `epoch` (P4).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShardStep {
    /// Which shard.
    pub shard: ShardId,
    /// Under which ownership.
    pub epoch: i64,
    /// This batch's number in the shard.
    pub sequence: i64,
    /// Next source position to read once this batch is in (Kafka).
    pub position: Option<i64>,
    /// Event time has surely come so far, ms.
    pub watermark_ms: i64,
}

/// The packed keys of one shard of a batch, opaque here.
#[derive(Clone, Debug)]
pub struct MarkBlock {
    /// Index into [`Batch::steps`].
    pub step: usize,
    /// Smallest event time in the block, ms.
    pub min_ms: i64,
    /// Largest event time in the block, ms.
    pub max_ms: i64,
    /// Keys in the block.
    pub count: usize,
    /// The bytes.
    pub block: Bytes,
}

/// What became of one row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RowOutcome {
    /// A row was made (or a delete found none).
    Written,
    /// A row was changed (or deleted).
    Updated,
    /// A row that wins was there: nothing changed.
    Stale,
    /// The sink refused this row; the rest of the batch went in.
    Refused {
        /// Classified error, constraint and column, without values.
        reason: String,
    },
}

/// Packs the marks once the outcomes are known, one block per shard that has keys to keep. Called by the session inside
/// the transaction, perhaps more than once for a batch.
pub type SealMarks<'a> = dyn Fn(&[RowOutcome]) -> Vec<MarkBlock> + Send + Sync + 'a;

/// What happens to a batch when the sink refuses one of its rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnRefused {
    /// The row is left out and reported; the rest goes in.
    Report,
    /// As `Report`, and the row goes to the dead letters in the same transaction.
    DeadLetter,
    /// Nothing goes in: [`SinkError::Refused`].
    Abort,
}

/// One write to a sink: rows in order, the shards' steps, marks. Never re-cut once its outcome is unknown.
pub struct Batch<'a> {
    /// Sorted by shard; at least one.
    pub steps: &'a [ShardStep],
    /// In order of arrival per row key.
    pub rows: &'a [Row<'a>],
    /// Go to the dead letters in the same transaction.
    pub dead_letters: &'a [DeadLetter<'a>],
    /// What happens when the sink refuses a row.
    pub on_refused: OnRefused,
    /// The store has proved every row new and the dedup key is a function of the row key: straight in (P9).
    pub known_new: bool,
    /// See [`SealMarks`].
    pub seal: &'a SealMarks<'a>,
}

/// One outcome per row of the batch, in its order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Receipts {
    /// As long as [`Batch::rows`].
    pub rows: Vec<RowOutcome>,
}

/// What the sink knows of one shard (P3).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShardState {
    /// Which shard.
    pub shard: ShardId,
    /// The epoch that `acquire` gave us.
    pub epoch: i64,
    /// Of the last batch applied; 0 before the first.
    pub sequence: i64,
    /// Next source position to read.
    pub position: Option<i64>,
    /// Event time had come so far, ms; `i64::MIN` before the first batch.
    pub watermark_ms: i64,
    /// Marks whose newest key is below it are gone, ms; `i64::MIN` if none are.
    pub floor_ms: i64,
    /// Who wrote its batches.
    pub lineage: Lineage,
}

impl ShardState {
    /// Of a shard that nobody has owned yet.
    pub fn unowned(shard: &ShardId) -> Self {
        Self {
            shard: shard.clone(),
            epoch: 0,
            sequence: 0,
            position: None,
            watermark_ms: i64::MIN,
            floor_ms: i64::MIN,
            lineage: Lineage::default(),
        }
    }
}

/// One mark as the sink kept it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mark {
    /// Sequence of its batch in the shard.
    pub sequence: i64,
    /// The packed keys.
    pub block: Bytes,
}

/// Whether an unknown batch is in the sink. After this answer the old attempt can no longer apply (P5).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Resolution {
    /// It is in; one mark list entry per step that kept a mark: (index of the step, mark).
    Applied(Vec<(usize, Mark)>),
    /// It is not, and can no longer come.
    NotApplied,
}

/// Who a route is, as the sink keeps it (first writer wins): opaque bytes of the gateway's choosing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RouteRow {
    /// 16 bytes.
    pub route_id: Vec<u8>,
    /// Hash of the key spec's meaning.
    pub key_spec_id: i64,
    /// Algorithm number of the keyed hash.
    pub algorithm: i16,
    /// 192 bytes.
    pub secret: Vec<u8>,
}

/// What failed, and what it leaves behind.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SinkError {
    /// Nothing of the batch is in the sink, and nothing of it can still come. May be tried again.
    #[error("not applied: {reason}")]
    NotApplied {
        /// What happened and what to do.
        reason: String,
        /// Trying again may help (else it is the configuration or the schema).
        retry: bool,
    },
    /// A row was refused and [`OnRefused::Abort`] was asked: nothing of the batch is in the sink.
    #[error("row {row} refused: {reason}")]
    Refused {
        /// Index into [`Batch::rows`].
        row: usize,
        /// Classified error, constraint and column, without values.
        reason: String,
    },
    /// The batch may be in the sink, or may still come: only [`Session::resolve`] says.
    #[error("outcome unknown: {reason}")]
    Unknown {
        /// What happened.
        reason: String,
    },
    /// Another owner has taken a shard over: stop working on it.
    #[error("fenced: shard {shard} now belongs to {owner} (epoch {epoch})")]
    Fenced {
        /// Which shard.
        shard: String,
        /// The new owner's name.
        owner: String,
        /// Its epoch.
        epoch: i64,
    },
    /// A live owner holds the shard and `Acquire::IfFree` was asked.
    #[error("shard {shard} is held by {owner}, last seen {seen_ms} ms ago")]
    Held {
        /// Which shard.
        shard: String,
        /// Its owner's name.
        owner: String,
        /// Age of its heartbeat, ms.
        seen_ms: i64,
    },
}

/// How to take a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acquire {
    /// Whoever holds it: the caller knows that it may (a Kafka assignment, our own earlier run, a re-acquire).
    Force,
    /// Only if no other owner's heartbeat is younger than this many ms.
    IfFree {
        /// Age that counts as dead, ms.
        stale_after_ms: i64,
    },
}

/// A start-up check that failed: what does not fit, and what to do (often the DDL to run).
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what}; {remedy}")]
pub struct Misfit {
    /// What is wrong: names, values, bounds.
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

/// Whether one connection still stands, as also those may ask who do not own it. Once it has ended it never stands again: a new
/// connection has a new one.
#[derive(Clone, Debug)]
pub struct Life(Arc<AtomicBool>);

impl Life {
    /// Of no connection.
    pub fn over() -> Self {
        Self(Arc::new(AtomicBool::new(false)))
    }

    /// Nobody who holds the connection has seen it end.
    pub fn stands(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Held by all that a connection is made of: the first that is dropped ends the [`Life`] that it gave out.
#[derive(Clone, Debug)]
pub struct Pulse(Arc<AtomicBool>);

impl Pulse {
    /// Of a connection that was just made.
    pub fn begin() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }

    /// What others are told by.
    pub fn life(&self) -> Life {
        Life(self.0.clone())
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A target: what it is and what it promises. Cheap to share; does no work itself.
#[async_trait]
pub trait Sink: Send + Sync + fmt::Debug {
    /// What it does with a repeat.
    fn guarantee(&self) -> Guarantee;
    /// The mode of its rows.
    fn mode(&self) -> Mode;
    /// Names of the row key columns; empty if none.
    fn row_key(&self) -> &[String];
    /// The name of the version column, in `UpsertIfNewer`.
    fn version(&self) -> Option<&str>;
    /// Its bookkeeping is on this host and no other instance sees it: one instance has all of a route.
    fn is_local(&self) -> bool {
        false
    }
    /// Start-up checks: connects, makes the bookkeeping tables if they are missing, reads the table's columns, and
    /// answers with an encoder for `columns` (all of the table's columns if `None`), or with everything that does not fit.
    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>>;
    /// A session for one lane of `route`. `owner` names this instance in the shard rows. Does not connect yet:
    /// the first `acquire` does.
    fn session(&self, route: &str, owner: &str) -> Box<dyn Session>;
}

/// One connection to the sink, owned by one lane. After any error that lost the connection the next `acquire` makes a new one;
/// nothing else reconnects, since a new connection may show an older sink (P6).
#[async_trait]
pub trait Session: Send {
    /// Registers the route, first writer wins: answers with the row that is there afterwards.
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError>;
    /// Makes a new connection if there is none. Takes `shards` over, each under a higher epoch that no history of the sink
    /// has had, and says what the sink knows of them, in the order given. Ends a frozen owner that blocks it (P5).
    async fn acquire(&mut self, shards: &[ShardId], how: Acquire) -> Result<Vec<ShardState>, SinkError>;
    /// The route's shards whose ids start with `prefix`, ordered by id, as they stand; takes none of them.
    async fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError>;
    /// Writes one batch whole: fence, rows, dead letters, marks, in one transaction.
    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError>;
    /// After `Unknown`: a new connection, higher epochs, then looks. Answers with the shards' states as re-acquired.
    /// `Fenced` if another owner has taken one of the shards meanwhile: it stays with that owner, and nothing was raised; the
    /// other steps can be asked about without it, for a batch is in with all of its shards or not at all.
    async fn resolve(&mut self, steps: &[ShardStep]) -> Result<(Resolution, Vec<ShardState>), SinkError>;
    /// Marks of `shard` above `sequence`, ascending, a page of about 16 MiB at most; empty when there are no more.
    async fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError>;
    /// Deletes marks of the shards whose newest key is below `floor_ms`, and raises the shard rows' floor, in one fenced
    /// transaction (P11). Bounded work a call; answers how many went, and more than 0 while more may be left.
    async fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError>;
    /// Shows that the owner lives: touches the heartbeat of the shards under their epochs. `Fenced` if one is lost.
    async fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError>;
    /// Forgets all that the shards' marks hold, in one fenced transaction: the marks go, and the rows' watermark and floor are those
    /// of shards without a batch. Sequences and positions stay. Answers with how many marks went.
    async fn forget_all(&mut self, owned: &[(ShardId, i64)]) -> Result<u64, SinkError>;
    /// Keeps with each shard how many partitions its source has: shard, epoch, count. Answers, in this order, with what was kept
    /// before. A shard that is not under its epoch any more is left as it is, and has no answer.
    async fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError>;
    /// Keeps with each shard which source it is (a topic's id): shard, epoch, source. Where none is kept, the given one is; where
    /// another is kept, it stays, or with `renew` the given one takes its place and the position is forgotten. Answers, in this order,
    /// with what was kept before. A shard that is not under its epoch any more is left as it is, and has no answer. A sink that cannot
    /// keep it never has one: there a source that was made again is not told from the one before.
    async fn keep_sources(
        &mut self,
        sources: &[(ShardId, i64, String)],
        renew: bool,
    ) -> Result<Vec<Option<String>>, SinkError> {
        let _ = renew;
        Ok(vec![None; sources.len()])
    }
    /// The sink's clock, ms since the epoch.
    async fn now_ms(&mut self) -> Result<i64, SinkError>;
    /// False once the connection has ended: verdicts wait until the next `acquire` (P6).
    fn connected(&self) -> bool;
    /// Of the connection that there is. It ends without anybody asking the session, as soon as the connection's end is seen: verdicts
    /// are also given where the session is not at hand (P6).
    fn life(&self) -> Life;
}
