//! One batch into the sink, by the fastest way that is right for it:
//!
//! 1. **whole**: a small insert batch is one statement: fence, rows and marks together, on the bet that every row is new;
//! 2. **straight**: rows known to be new are copied into the table itself, sorted by row key, under a savepoint (P9);
//! 3. **staged**: everything else, and what the first two could not do: see `staged`.
//!
//! All three begin with the fence (P4) and end with the marks. A bet that is lost costs one round trip and leaves nothing;
//! the next batches then do not bet.

use std::{
    pin::Pin,
    sync::atomic::{AtomicBool, Ordering},
};

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::{SinkExt, future::join};
use tokio_postgres::{Client, CopyInSink, Statement, error::SqlState, types::Type};

use super::{
    connect::{Class, cause, classify, refusal},
    encode::Encoder,
    params::{self, Array, Raw},
    row::{Encoded, Shape},
    session::{Fault, Link, PostgresSession, StatementKey, again, bounded, late, not_applied, roll_back},
    staged::Staged,
    statements,
};
use crate::{
    collapse::{Action, Copy, Op, Plan},
    sink::{Batch, DeadLetter, MarkBlock, Mode, OnRefused, Receipts, RowOutcome, ShardStep, SinkError},
};

/// Rows that still go as one statement.
const WHOLE_ROWS: usize = 256;
/// Batches that do not bet after a bet that was lost.
const CAREFUL_BATCHES: u32 = 8;
/// Bytes of one COPY message.
const CHUNK: usize = 128 << 10;

/// How boldly the session delivers.
#[derive(Debug, Default)]
pub(super) struct Pace {
    careful: u32,
}

impl Pace {
    fn bold(&self) -> bool {
        self.careful == 0
    }

    fn lost(&mut self) {
        self.careful = CAREFUL_BATCHES;
    }

    fn next(&mut self) {
        self.careful = self.careful.saturating_sub(1);
    }
}

/// A batch with its rows read and its plan made.
pub(super) struct Work<'a> {
    pub(super) batch: &'a Batch<'a>,
    pub(super) encoder: &'a Encoder,
    pub(super) mode: Mode,
    pub(super) rows: Vec<Encoded<'a>>,
    pub(super) copies: Vec<Copy<'a, &'a [u8]>>,
    pub(super) plan: Plan,
}

impl<'a> Work<'a> {
    fn new(batch: &'a Batch<'a>, encoder: &'a Encoder, mode: Mode) -> Result<Work<'a>, SinkError> {
        let mut rows = Vec::with_capacity(batch.rows.len());
        let mut copies = Vec::with_capacity(batch.rows.len());
        for (index, row) in batch.rows.iter().enumerate() {
            let encoded = Encoded::read(row.bytes).ok_or_else(|| SinkError::NotApplied {
                reason: format!("row {index} of the batch was not made by this sink's encoder"),
                retry: false,
            })?;
            copies.push(Copy {
                kind: row.kind,
                row_key: row.row_key,
                version: (!encoded.version.is_empty()).then_some(encoded.version),
                shape: encoded.shape,
            });
            rows.push(encoded);
        }
        let plan = Plan::new(mode, &copies);
        Ok(Work { batch, encoder, mode, rows, copies, plan })
    }

    /// Every operation is a plain insert that needs no answer of its own.
    fn inserts_only(&self) -> bool {
        self.mode == Mode::Insert && self.plan.ops().iter().all(|op| op.action == Action::Write)
    }

    /// The one shape of all operations, if there is just one.
    fn one_shape(&self) -> Option<Shape> {
        let mut shapes = self.plan.ops().iter().map(|op| self.rows[op.row].shape);
        let first = shapes.next()?;
        shapes.all(|shape| shape == first).then_some(first)
    }

    /// Outcomes if every operation made a row.
    fn all_written(&self) -> Vec<RowOutcome> {
        let mut outcomes = vec![None; self.rows.len()];
        for op in self.plan.ops() {
            self.plan.assign(op, &self.copies, &RowOutcome::Written, &mut outcomes);
        }
        complete(outcomes)
    }
}

/// Every row is a member of one operation, so every row has an outcome.
pub(super) fn complete(outcomes: Vec<Option<RowOutcome>>) -> Vec<RowOutcome> {
    outcomes
        .into_iter()
        .map(|outcome| outcome.expect("every row of a batch belongs to an operation that was answered"))
        .collect()
}

impl PostgresSession {
    pub(super) async fn deliver_batch(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        let mut link = self.acquired()?;
        let Some(probed) = self.shared.probed.get() else {
            self.link = Some(link);
            return Err(SinkError::NotApplied { reason: "the sink was not probed".into(), retry: false });
        };
        let encoder = std::sync::Arc::clone(&probed.encoder);
        let work = match Work::new(batch, &encoder, self.shared.config.mode) {
            Ok(work) => work,
            Err(error) => {
                self.link = Some(link);
                return Err(error);
            }
        };
        // Set before the first byte that can commit the batch leaves.
        let committing = AtomicBool::new(false);
        let mut pace = std::mem::take(&mut self.pace);
        // Bisection takes many statements, each bounded by the server; this bounds silence, not work.
        let limit = self.limit() * 4;
        let result = bounded(limit, self.attempt(&mut link, &work, &mut pace, &committing)).await;
        self.pace = pace;
        let in_doubt = committing.load(Ordering::Relaxed);
        match result {
            Ok(rows) => {
                self.link = Some(link);
                Ok(Receipts { rows })
            }
            Err(Fault::Database(error)) => match classify(&error) {
                Class::Lost if in_doubt => Err(SinkError::Unknown { reason: cause(&error) }),
                Class::Lost => Err(not_applied(&error)),
                // The server undid the transaction before it said so.
                Class::Again
                    if error.code() == Some(&SqlState::FEATURE_NOT_SUPPORTED) || stale_statement(&error) =>
                {
                    link.statements.clear();
                    self.link = roll_back(link).await;
                    Err(not_applied(&error))
                }
                _ => {
                    self.link = roll_back(link).await;
                    Err(not_applied(&error))
                }
            },
            Err(Fault::Sink(error)) => {
                // A sink that went back must be compared anew before any verdict (P6): give the connection up.
                if !matches!(&error, SinkError::NotApplied { .. } | SinkError::Unknown { .. }) {
                    self.link = roll_back(link).await;
                }
                Err(error)
            }
            Err(Fault::Late(limit)) if in_doubt => Err(SinkError::Unknown { reason: late(limit) }),
            Err(Fault::Late(limit)) => Err(again(late(limit))),
        }
    }

    /// Delivers `work`; what it leaves behind on an error is an open transaction at most.
    async fn attempt(
        &self,
        link: &mut Link,
        work: &Work<'_>,
        pace: &mut Pace,
        committing: &AtomicBool,
    ) -> Result<Vec<RowOutcome>, Fault> {
        let bold = pace.bold();
        pace.next();
        if bold
            && work.inserts_only()
            && work.plan.ops().len() <= WHOLE_ROWS
            && work.batch.dead_letters.is_empty()
            && self.can_be_whole(work)
        {
            match self.whole(link, work, committing).await? {
                Some(outcomes) => return Ok(outcomes),
                None => pace.lost(),
            }
            committing.store(false, Ordering::Relaxed);
        }
        let several = work.batch.steps.len() > 1;
        let fence = self.prepare_fence(link, several).await?;
        let straight = pace.bold()
            && !work.rows.is_empty()
            && work.inserts_only()
            && (work.batch.known_new || work.encoder.row_key().is_empty());
        if straight {
            // Nothing can be prepared while COPY is under way.
            let copies = self.prepare_copies(link, work).await?;
            let marks = self.prepare_marks(link).await?;
            self.open(&link.client, &fence, work.batch.steps).await?;
            if let Some(outcomes) = self.straight(&link.client, work, copies, &marks).await? {
                self.close(link, work, &outcomes, true, committing).await?;
                return Ok(outcomes);
            }
            pace.lost();
        } else {
            self.open(&link.client, &fence, work.batch.steps).await?;
        }
        let outcomes = Staged::new(self, link, work).run().await?;
        self.close(link, work, &outcomes, false, committing).await?;
        Ok(outcomes)
    }

    /// Rows of one shape whose columns can travel as arrays.
    fn can_be_whole(&self, work: &Work<'_>) -> bool {
        work.plan.ops().is_empty()
            || work.one_shape().is_some_and(|shape| {
                work.encoder
                    .present(shape)
                    .iter()
                    .all(|&index| !work.encoder.targets()[index].kind.is_array())
            })
    }

    /// Fence, rows and marks in one statement. `None` if the bet was lost: then nothing of it stays.
    async fn whole(
        &self,
        link: &mut Link,
        work: &Work<'_>,
        committing: &AtomicBool,
    ) -> Result<Option<Vec<RowOutcome>>, Fault> {
        let steps = work.batch.steps;
        let (several, known_new) = (steps.len() > 1, work.batch.known_new);
        let shape = work.one_shape();
        let present = shape.map_or_else(Vec::new, |shape| work.encoder.present(shape));
        let statement = link
            .prepared(StatementKey::Whole { shape, several, known_new }, || {
                let whole =
                    statements::Whole { shape, several, known_new, raise_commit: self.raises_commit() };
                let text = whole.text(&self.shared.tables, work.encoder);
                let mut types = vec![Type::TEXT, Type::TEXT_ARRAY];
                types.extend([Type::INT8_ARRAY, Type::INT8_ARRAY, Type::INT8_ARRAY, Type::INT8_ARRAY]);
                types.extend(mark_types());
                if shape.is_some() {
                    types.push(Type::INT8);
                    types.extend(
                        present.iter().map(|&index| params::type_of(work.encoder.targets()[index].array_oid)),
                    );
                }
                (text, types)
            })
            .await?;
        let outcomes = work.all_written();
        let marks = (work.batch.seal)(&outcomes);
        let mut parameters = self.fence_parameters(steps);
        parameters.extend(mark_parameters(steps, &marks)?);
        if shape.is_some() {
            parameters.push(params::integer(work.plan.ops().len() as i64));
            parameters.extend(columns(work, work.plan.ops(), &present));
        }
        committing.store(true, Ordering::Relaxed);
        let answer =
            bounded(self.limit(), async { Ok(query(&link.client, &statement, &parameters).await?) }).await;
        match answer {
            Ok(_) => Ok(Some(outcomes)),
            Err(Fault::Database(error)) if classify(&error) == Class::Row => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    async fn prepare_fence(
        &self,
        link: &mut Link,
        several: bool,
    ) -> Result<Statement, tokio_postgres::Error> {
        link.prepared(StatementKey::Fence { several }, || {
            let mut types = vec![Type::TEXT, Type::TEXT_ARRAY];
            types.extend([Type::INT8_ARRAY, Type::INT8_ARRAY, Type::INT8_ARRAY, Type::INT8_ARRAY]);
            (statements::fence_only(&self.shared.tables, several), types)
        })
        .await
    }

    fn fence_parameters(&self, steps: &[ShardStep]) -> Vec<Raw> {
        vec![
            params::text(&self.route),
            params::texts(steps.iter().map(|step| &*step.shard)),
            params::integers(steps.iter().map(|step| step.epoch)),
            params::integers(steps.iter().map(|step| step.sequence)),
            params::optional_integers(steps.iter().map(|step| step.position)),
            params::integers(steps.iter().map(|step| step.watermark_ms)),
        ]
    }

    /// Opens the transaction, moves the shards and sets the savepoint, in one round trip.
    ///
    /// Constraints are checked at once, so that a deferred one cannot fail at COMMIT with no row named (P9).
    async fn open(&self, client: &Client, fence: &Statement, steps: &[ShardStep]) -> Result<(), Fault> {
        let begin = format!("{}; SET CONSTRAINTS ALL IMMEDIATE", self.begin());
        let parameters = self.fence_parameters(steps);
        let (begun, (fenced, saved)) = join(
            client.batch_execute(&begin),
            join(query(client, fence, &parameters), client.batch_execute("SAVEPOINT oncegate_rows")),
        )
        .await;
        begun?;
        let rows = fenced?;
        saved?;
        let moved: i64 = rows.first().map_or(0, |row| row.get(0));
        if moved != steps.len() as i64 {
            client.batch_execute("ROLLBACK").await?;
            return Err(Fault::Sink(self.why_not_moved(client, steps).await?));
        }
        Ok(())
    }

    async fn prepare_copies(
        &self,
        link: &mut Link,
        work: &Work<'_>,
    ) -> Result<Vec<(Statement, Vec<Bytes>, u64)>, Fault> {
        let mut shapes: Vec<Shape> = work.plan.ops().iter().map(|op| work.rows[op.row].shape).collect();
        shapes.sort_unstable();
        shapes.dedup();
        let mut copies = Vec::with_capacity(shapes.len());
        for shape in shapes {
            let statement = link
                .prepared(StatementKey::Copy { shape }, || {
                    (statements::copy(&self.shared.tables, work.encoder, shape), Vec::new())
                })
                .await?;
            let ops = work.plan.ops().iter().filter(|op| work.rows[op.row].shape == shape);
            let mut count = 0;
            let chunks = copy_chunks(ops.map(|op| {
                count += 1;
                [work.rows[op.row].tuple]
            }));
            copies.push((statement, chunks, count));
        }
        Ok(copies)
    }

    /// Copies the rows into the table itself, and writes the marks behind them. `None` if a row was refused or dropped: then
    /// none of it stays.
    async fn straight(
        &self,
        client: &Client,
        work: &Work<'_>,
        mut copies: Vec<(Statement, Vec<Bytes>, u64)>,
        marks: &Statement,
    ) -> Result<Option<Vec<RowOutcome>>, Fault> {
        let outcomes = work.all_written();
        let last = copies.pop();
        for (statement, chunks, count) in copies {
            if !all_copied(client, copy(client, &statement, chunks).await, count).await? {
                return Ok(None);
            }
        }
        let (mut copied, mut marked) = (Ok(0), Ok(()));
        let mut expected = 0;
        if let Some((statement, chunks, count)) = last {
            expected = count;
            match begin_copy(client, &statement, chunks).await {
                Err(error) => copied = Err(error),
                Ok(mut copying) => {
                    // Sealed while the server still works on the rows; it goes on to the marks without a round trip.
                    let parameters = self.marks_parameters(work.batch, &outcomes)?;
                    let marking = async {
                        match &parameters {
                            Some(parameters) => query(client, marks, parameters).await.map(drop),
                            None => Ok(()),
                        }
                    };
                    (copied, marked) = join(copying.as_mut().finish(), marking).await;
                }
            }
        }
        if !all_copied(client, copied, expected).await? {
            return Ok(None);
        }
        marked.map_err(not_kept)?;
        Ok(Some(outcomes))
    }

    async fn prepare_marks(&self, link: &mut Link) -> Result<Statement, tokio_postgres::Error> {
        link.prepared(StatementKey::Marks, || {
            let mut types = vec![Type::TEXT];
            types.extend(mark_types());
            (statements::marks(&self.shared.tables), types)
        })
        .await
    }

    /// Seals the marks; `None` if there are none.
    fn marks_parameters(
        &self,
        batch: &Batch<'_>,
        outcomes: &[RowOutcome],
    ) -> Result<Option<Vec<Raw>>, Fault> {
        let marks = (batch.seal)(outcomes);
        if marks.is_empty() {
            return Ok(None);
        }
        let mut parameters = vec![params::text(&self.route)];
        parameters.extend(mark_parameters(batch.steps, &marks)?);
        Ok(Some(parameters))
    }

    /// Marks (unless they are `marked`), dead letters and COMMIT, in one round trip.
    async fn close(
        &self,
        link: &mut Link,
        work: &Work<'_>,
        outcomes: &[RowOutcome],
        marked: bool,
        committing: &AtomicBool,
    ) -> Result<(), Fault> {
        let Batch { steps, rows, dead_letters, on_refused, .. } = work.batch;
        let refused = rows.iter().zip(outcomes).filter_map(|(row, outcome)| match outcome {
            RowOutcome::Refused { reason } if *on_refused == OnRefused::DeadLetter => {
                Some(DeadLetter { source: row.source, kind: "rejected", reason: reason.clone() })
            }
            _ => None,
        });
        let letters: Vec<DeadLetter<'_>> = dead_letters.iter().cloned().chain(refused).collect();
        let mut writes = Vec::new();
        if !marked && let Some(parameters) = self.marks_parameters(work.batch, outcomes)? {
            writes.push((self.prepare_marks(link).await?, parameters));
        }
        if !letters.is_empty() {
            let statement = link
                .prepared(StatementKey::DeadLetters, || {
                    let (texts, bytes, integers) = (Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY);
                    let types = vec![
                        Type::TEXT,
                        texts.clone(),
                        integers.clone(),
                        bytes.clone(),
                        texts.clone(),
                        texts,
                        bytes,
                        integers,
                    ];
                    (statements::dead_letters(&self.shared.tables), types)
                })
                .await?;
            writes.push((statement, self.dead_letter_parameters(steps, &letters)?));
        }
        // The statements that come before COMMIT, so that a failed one makes COMMIT a rollback.
        let client = &link.client;
        let writing = futures_util::future::join_all(
            writes.iter().map(|(statement, parameters)| query(client, statement, parameters)),
        );
        committing.store(true, Ordering::Relaxed);
        let (written, committed) = join(writing, client.batch_execute("COMMIT")).await;
        for written in written {
            // A lost connection leaves COMMIT in doubt.
            written.map_err(not_kept)?;
        }
        committed?;
        Ok(())
    }

    fn dead_letter_parameters(
        &self,
        steps: &[ShardStep],
        letters: &[DeadLetter<'_>],
    ) -> Result<Vec<Raw>, Fault> {
        let mut shards = Vec::with_capacity(letters.len());
        for letter in letters {
            shards.push(&*step(steps, letter.source.step)?.shard);
        }
        let reasons: Vec<String> =
            letters.iter().map(|letter| letter.reason.replace('\0', "\u{fffd}")).collect();
        Ok(vec![
            params::text(&self.route),
            params::texts(shards),
            params::optional_integers(letters.iter().map(|letter| letter.source.position)),
            params::optional_bytes(letters.iter().map(|letter| Some(letter.source.key))),
            params::texts(letters.iter().map(|letter| letter.kind)),
            params::texts(reasons.iter().map(String::as_str)),
            params::optional_bytes(letters.iter().map(|letter| letter.source.payload)),
            params::integers(letters.iter().map(|letter| letter.source.event_ms)),
        ])
    }
}

/// The marks or dead letters were not written. A server that answers has undone the transaction.
fn not_kept(error: tokio_postgres::Error) -> Fault {
    match classify(&error) {
        Class::Row => Fault::Sink(SinkError::NotApplied {
            reason: format!("the marks or dead letters cannot be kept: {}", refusal(&error)),
            retry: false,
        }),
        _ => error.into(),
    }
}

/// Whether COPY took all of its `count` rows. If not, everything since the savepoint is undone, marks included.
async fn all_copied(
    client: &Client,
    copied: Result<u64, tokio_postgres::Error>,
    count: u64,
) -> Result<bool, Fault> {
    match copied {
        Ok(copied) if copied == count => return Ok(true),
        // A trigger dropped some.
        Ok(_) => {}
        Err(error) if classify(&error) == Class::Row => {}
        Err(error) => return Err(error.into()),
    }
    client.batch_execute("ROLLBACK TO SAVEPOINT oncegate_rows").await?;
    Ok(false)
}

/// The server does not know the statement any more (a pooler gave us another server connection).
fn stale_statement(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::INVALID_SQL_STATEMENT_NAME)
}

fn step(steps: &[ShardStep], index: usize) -> Result<&ShardStep, Fault> {
    steps.get(index).ok_or_else(|| {
        Fault::Sink(SinkError::NotApplied { reason: format!("the batch has no step {index}"), retry: false })
    })
}

/// Runs a prepared statement with parameters that are ready.
pub(super) async fn query(
    client: &Client,
    statement: &Statement,
    parameters: &[Raw],
) -> Result<Vec<tokio_postgres::Row>, tokio_postgres::Error> {
    use futures_util::TryStreamExt;
    client.query_raw(statement, parameters).await?.try_collect().await
}

fn mark_types() -> [Type; 7] {
    [
        Type::TEXT_ARRAY,
        Type::INT8_ARRAY,
        Type::INT8_ARRAY,
        Type::INT8_ARRAY,
        Type::INT8_ARRAY,
        Type::INT4_ARRAY,
        Type::BYTEA_ARRAY,
    ]
}

fn mark_parameters(steps: &[ShardStep], marks: &[MarkBlock]) -> Result<Vec<Raw>, Fault> {
    let mut of = Vec::with_capacity(marks.len());
    for mark in marks {
        of.push(step(steps, mark.step)?);
    }
    let counts = marks.iter().map(|mark| i32::try_from(mark.count).unwrap_or(i32::MAX));
    Ok(vec![
        params::texts(of.iter().map(|step| &*step.shard)),
        params::integers(of.iter().map(|step| step.sequence)),
        params::integers(of.iter().map(|step| step.epoch)),
        params::integers(marks.iter().map(|mark| mark.min_ms)),
        params::integers(marks.iter().map(|mark| mark.max_ms)),
        params::small_integers(counts),
        params::optional_bytes(marks.iter().map(|mark| Some(&*mark.block))),
    ])
}

/// The rows of `ops`, one array a column; they all have the columns `present`.
pub(super) fn columns(work: &Work<'_>, ops: &[Op], present: &[usize]) -> Vec<Raw> {
    let mut arrays: Vec<Array> =
        present.iter().map(|&index| Array::new(work.encoder.targets()[index].element_oid)).collect();
    for op in ops {
        for (array, field) in arrays.iter_mut().zip(work.rows[op.row].fields()) {
            array.field(field);
        }
    }
    arrays.into_iter().map(Array::finish).collect()
}

/// What binary COPY data begins with: signature, no flags, no extension.
const COPY_HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";

/// Binary COPY data of `rows`, each given in parts.
pub(super) fn copy_chunks<'a, const N: usize>(rows: impl Iterator<Item = [&'a [u8]; N]>) -> Vec<Bytes> {
    let mut chunks = Vec::new();
    let mut chunk = BytesMut::with_capacity(CHUNK + 4096);
    chunk.put_slice(COPY_HEADER);
    for row in rows {
        for part in row {
            chunk.put_slice(part);
        }
        if chunk.len() >= CHUNK {
            chunks.push(std::mem::replace(&mut chunk, BytesMut::with_capacity(CHUNK + 4096)).freeze());
        }
    }
    chunk.put_i16(-1);
    chunks.push(chunk.freeze());
    chunks
}

/// Sends data that is ready whole.
pub(super) async fn copy(
    client: &Client,
    statement: &Statement,
    chunks: Vec<Bytes>,
) -> Result<u64, tokio_postgres::Error> {
    begin_copy(client, statement, chunks).await?.as_mut().finish().await
}

/// Sends the data, but not yet its end: nothing is waited for between its first and last byte but the socket (P5).
async fn begin_copy(
    client: &Client,
    statement: &Statement,
    chunks: Vec<Bytes>,
) -> Result<Pin<Box<CopyInSink<Bytes>>>, tokio_postgres::Error> {
    let mut sink = Box::pin(client.copy_in::<_, Bytes>(statement).await?);
    for chunk in chunks {
        if sink.feed(chunk).await.is_err() {
            // The connection is gone, or the server gave up: its answer says which.
            break;
        }
    }
    Ok(sink)
}
