//! Rows that may meet others: deletes, upserts, inserts that are not known to be new, and batches with bad rows.
//!
//! Operations go in waves (see `collapse`); a wave is one delete statement, then one write statement a shape. If the
//! server refuses it, the wave is halved under savepoints until the bad row stands alone: it is refused, what it stood
//! for is planned again without it, and the rest of the batch goes in.

use std::{ops::Range, sync::Arc};

use tokio_postgres::types::Type;

use super::{
    connect::{Class, classify, refusal},
    deliver::{Work, columns, complete, copy, copy_chunks, query},
    params::{self, Array},
    row::Shape,
    session::{Fault, Link, PostgresSession, StatementKey},
    statements,
};
use crate::{
    collapse::{Action, Op, Plan},
    sink::{Mode, OnRefused, RowKind, RowOutcome, SinkError},
};

/// Where the batch's rows stand: `outcomes` fills as operations are answered.
pub(super) struct Staged<'a> {
    session: &'a PostgresSession,
    link: &'a mut Link,
    work: &'a Work<'a>,
    outcomes: Vec<Option<RowOutcome>>,
    /// Refused for want of a row that it refers to, which may come later in the batch.
    orphans: Vec<usize>,
}

/// What became of a group of operations that were tried together.
enum Tried {
    /// One outcome an operation.
    Done(Vec<RowOutcome>),
    /// The server refused one of them; nothing of the group stays.
    Refused { reason: String, orphan: bool },
}

/// Operations of one plan, still to be tried.
struct Group {
    plan: Arc<Plan>,
    range: Range<usize>,
}

impl Group {
    fn whole(plan: Plan) -> Group {
        let range = 0..plan.ops().len();
        Group { plan: Arc::new(plan), range }
    }

    fn ops(&self) -> &[Op] {
        &self.plan.ops()[self.range.clone()]
    }

    /// The first `count` operations, and the others.
    fn split_at(&self, count: usize) -> (Group, Group) {
        let middle = self.range.start + count;
        let part = |range| Group { plan: Arc::clone(&self.plan), range };
        (part(self.range.start..middle), part(middle..self.range.end))
    }

    /// The operations of the first wave, and those of the later ones if there are any; `None` of an empty group.
    fn first_wave(self) -> Option<(Group, Option<Group>)> {
        let wave = self.ops().first()?.wave;
        let count = self.ops().partition_point(|op| op.wave == wave);
        if count == self.range.len() {
            return Some((self, None));
        }
        let (first, later) = self.split_at(count);
        Some((first, Some(later)))
    }
}

impl<'a> Staged<'a> {
    pub(super) fn new(session: &'a PostgresSession, link: &'a mut Link, work: &'a Work<'a>) -> Staged<'a> {
        let outcomes = vec![None; work.rows.len()];
        Staged { session, link, work, outcomes, orphans: Vec::new() }
    }

    /// Applies every operation; one outcome a row.
    pub(super) async fn run(mut self) -> Result<Vec<RowOutcome>, Fault> {
        let work = self.work;
        self.plan(work.plan.clone()).await?;
        // A row may refer to one that stood behind it when the batch was halved.
        for row in std::mem::take(&mut self.orphans) {
            let plan = Plan::among(work.mode, &work.copies, &[row]);
            self.plan(plan).await?;
        }
        let outcomes = complete(self.outcomes);
        if work.batch.on_refused == OnRefused::Abort {
            let refused = outcomes.iter().enumerate().find_map(|(row, outcome)| match outcome {
                RowOutcome::Refused { reason } => Some(SinkError::Refused { row, reason: reason.clone() }),
                _ => None,
            });
            if let Some(error) = refused {
                return Err(Fault::Sink(error));
            }
        }
        Ok(outcomes)
    }

    /// Applies `plan`: wave after wave, each whole, then in halves. What a refused row stood for comes right after it,
    /// before the later waves of its row key. The groups still to come are kept in a list: a row key may have as many
    /// refused copies as the batch has rows, too many for a call inside a call each.
    async fn plan(&mut self, plan: Plan) -> Result<(), Fault> {
        let mut waiting = vec![Group::whole(plan)];
        while let Some(group) = waiting.pop() {
            let Some((group, later)) = group.first_wave() else { continue };
            waiting.extend(later);
            let ops = group.ops();
            match self.attempt(ops).await? {
                Tried::Done(outcomes) => {
                    for (op, outcome) in ops.iter().zip(&outcomes) {
                        group.plan.assign(op, &self.work.copies, outcome, &mut self.outcomes);
                    }
                }
                Tried::Refused { reason, orphan } => match ops {
                    [op] => {
                        let rest = self.refuse(&group.plan, op, reason, orphan)?;
                        waiting.extend(rest.map(Group::whole));
                    }
                    _ => {
                        let (front, back) = group.split_at(ops.len() / 2);
                        waiting.push(back);
                        waiting.push(front);
                    }
                },
            }
        }
        Ok(())
    }

    /// The row of `op` is bad. Answers the plan of the other copies that it stood for, to be tried without it.
    fn refuse(&mut self, plan: &Plan, op: &Op, reason: String, orphan: bool) -> Result<Option<Plan>, Fault> {
        let mut members: Vec<usize> = plan.members(op).to_vec();
        let may_come_later = orphan && members.len() == 1 && self.outcomes[op.row].is_none();
        if may_come_later {
            self.orphans.push(op.row);
        } else if self.work.batch.on_refused == OnRefused::Abort {
            return Err(Fault::Sink(SinkError::Refused { row: op.row, reason }));
        }
        self.outcomes[op.row] = Some(RowOutcome::Refused { reason });
        members.retain(|&row| row != op.row);
        let rest = (!members.is_empty()).then(|| Plan::among(self.work.mode, &self.work.copies, &members));
        Ok(rest)
    }

    /// Applies `ops` together under a savepoint.
    async fn attempt(&mut self, ops: &[Op]) -> Result<Tried, Fault> {
        self.link.client.batch_execute("SAVEPOINT oncegate_group").await?;
        let refused = match self.apply(ops).await {
            Ok(Some(outcomes)) => {
                self.link.client.batch_execute("RELEASE SAVEPOINT oncegate_group").await?;
                return Ok(Tried::Done(outcomes));
            }
            // A trigger dropped a row and nothing names it. One alone is named by that.
            Ok(None) => Tried::Refused { reason: "a trigger dropped the row".into(), orphan: false },
            Err(Fault::Database(error)) if classify(&error) == Class::Row => {
                let orphan = error.code() == Some(&tokio_postgres::error::SqlState::FOREIGN_KEY_VIOLATION);
                Tried::Refused { reason: refusal(&error), orphan }
            }
            Err(fault) => return Err(fault),
        };
        self.link
            .client
            .batch_execute("ROLLBACK TO SAVEPOINT oncegate_group; RELEASE SAVEPOINT oncegate_group")
            .await?;
        Ok(refused)
    }

    /// One outcome an operation; `None` if rows were dropped and it is not known which.
    async fn apply(&mut self, ops: &[Op]) -> Result<Option<Vec<RowOutcome>>, Fault> {
        let mut outcomes = vec![RowOutcome::Stale; ops.len()];
        let deletes: Vec<usize> = (0..ops.len()).filter(|&at| ops[at].action != Action::Write).collect();
        if !deletes.is_empty() {
            self.delete(ops, &deletes, &mut outcomes).await?;
        }
        let mut writes: Vec<(Shape, usize)> = (0..ops.len())
            .filter(|&at| ops[at].action != Action::Delete)
            .map(|at| (self.work.rows[ops[at].row].shape, at))
            .collect();
        writes.sort_by_key(|(shape, _)| *shape);
        for group in writes.chunk_by(|(left, _), (right, _)| left == right) {
            let shape = group[0].0;
            let places: Vec<usize> = group.iter().map(|(_, at)| *at).collect();
            if !self.write(ops, shape, &places, &mut outcomes).await? {
                return Ok(None);
            }
        }
        Ok(Some(outcomes))
    }

    /// Writes the operations at `places`, all of one shape. Answers false if rows were dropped and it is not known which.
    async fn write(
        &mut self,
        ops: &[Op],
        shape: Shape,
        places: &[usize],
        outcomes: &mut [RowOutcome],
    ) -> Result<bool, Fault> {
        let work = self.work;
        let present = work.encoder.present(shape);
        let staged = present.iter().any(|&index| work.encoder.targets()[index].kind.is_array());
        let chosen: Vec<Op> = places.iter().map(|&at| ops[at].clone()).collect();
        let rows = if staged {
            self.write_staged(shape, &chosen).await?
        } else {
            self.write_unnested(shape, &present, &chosen).await?
        };
        let Some(row) = rows.first() else { return Ok(false) };
        if work.encoder.row_key().is_empty() {
            for &at in places {
                outcomes[at] = RowOutcome::Written;
            }
            return Ok(row.get::<_, i64>(0) == places.len() as i64);
        }
        for (column, outcome) in [(0, RowOutcome::Written), (1, RowOutcome::Updated)] {
            for ord in row.get::<_, Vec<i32>>(column) {
                let at = places[ord as usize];
                // A replace has its outcome from the delete before.
                if ops[at].action == Action::Write {
                    outcomes[at] = outcome.clone();
                }
            }
        }
        Ok(true)
    }

    async fn write_unnested(
        &mut self,
        shape: Shape,
        present: &[usize],
        ops: &[Op],
    ) -> Result<Vec<tokio_postgres::Row>, Fault> {
        let (work, tables) = (self.work, &self.session.shared.tables);
        let statement = self
            .link
            .prepared(StatementKey::Write { shape }, || {
                let mut types = vec![Type::INT4_ARRAY, Type::BYTEA_ARRAY, Type::BYTEA_ARRAY];
                types.extend(
                    present.iter().map(|&index| params::type_of(work.encoder.targets()[index].array_oid)),
                );
                (statements::write(tables, work.encoder, work.mode, shape, false), types)
            })
            .await?;
        let mut parameters = vec![params::small_integers(0..ops.len() as i32)];
        let newer = work.mode == Mode::UpsertIfNewer;
        let keys = |op: &Op| newer.then_some(work.copies[op.row].row_key);
        let versions = |op: &Op| newer.then_some(work.rows[op.row].version);
        parameters.push(params::optional_bytes(ops.iter().map(keys)));
        parameters.push(params::optional_bytes(ops.iter().map(versions)));
        parameters.extend(columns(work, ops, present));
        Ok(query(&self.link.client, &statement, &parameters).await?)
    }

    /// Rows with array columns: `unnest` would take those apart, so they go through a temporary table.
    async fn write_staged(&mut self, shape: Shape, ops: &[Op]) -> Result<Vec<tokio_postgres::Row>, Fault> {
        let (work, client) = (self.work, &self.link.client);
        client.batch_execute(&statements::make_stage(work.encoder, shape)).await?;
        let statement = client.prepare(&statements::copy_stage(work.encoder, shape)).await?;
        let fields = (work.encoder.present(shape).len() + 3) as i16;
        let mut fronts = Vec::with_capacity(ops.len());
        for (ord, op) in ops.iter().enumerate() {
            let mut front = Vec::new();
            front.extend_from_slice(&fields.to_be_bytes());
            front.extend_from_slice(&4i32.to_be_bytes());
            front.extend_from_slice(&(ord as i32).to_be_bytes());
            for bytes in [work.copies[op.row].row_key, work.rows[op.row].version] {
                front.extend_from_slice(&(bytes.len() as i32).to_be_bytes());
                front.extend_from_slice(bytes);
            }
            fronts.push(front);
        }
        let rows =
            fronts.iter().zip(ops).map(|(front, op)| [front.as_slice(), &work.rows[op.row].tuple[2..]]);
        copy(client, &statement, copy_chunks(rows)).await?;
        let text = statements::write(&self.session.shared.tables, work.encoder, work.mode, shape, true);
        Ok(client.query_typed(&text, &[]).await?)
    }

    /// Deletes the rows of the operations at `places`, and keeps tombstones where the mode has versions.
    async fn delete(
        &mut self,
        ops: &[Op],
        places: &[usize],
        outcomes: &mut [RowOutcome],
    ) -> Result<(), Fault> {
        let (work, session) = (self.work, self.session);
        let keys = self.key_arrays(ops, places);
        let key_types = |encoder: &super::encode::Encoder| -> Vec<Type> {
            let indices = encoder.row_key().iter().copied();
            indices.map(|index| params::type_of(encoder.targets()[index].array_oid)).collect()
        };
        let statement = self
            .link
            .prepared(StatementKey::Delete, || {
                let mut types = vec![Type::INT4_ARRAY];
                types.extend(key_types(work.encoder));
                types.extend(
                    work.encoder
                        .version()
                        .map(|index| params::type_of(work.encoder.targets()[index].array_oid)),
                );
                (statements::delete(&session.shared.tables, work.encoder), types)
            })
            .await?;
        let ordinals = || params::small_integers(0..places.len() as i32);
        let mut parameters = vec![ordinals()];
        parameters.extend(keys.into_iter().map(Array::finish));
        let rows = query(&self.link.client, &statement, &parameters).await?;
        let found: Vec<i32> = rows.first().map_or_else(Vec::new, |row| row.get(0));
        if work.mode != Mode::UpsertIfNewer {
            for &at in places {
                outcomes[at] = RowOutcome::Written;
            }
            for ord in found {
                outcomes[places[ord as usize]] = RowOutcome::Updated;
            }
            return Ok(());
        }
        let statement = self
            .link
            .prepared(StatementKey::Tombstones, || {
                let mut types = vec![
                    Type::INT4_ARRAY,
                    Type::BYTEA_ARRAY,
                    Type::BYTEA_ARRAY,
                    Type::INT8_ARRAY,
                    Type::TEXT,
                ];
                types.extend(key_types(work.encoder));
                (statements::tombstones(&session.shared.tables, work.encoder), types)
            })
            .await?;
        let row = |at: &usize| ops[*at].row;
        let mut parameters = vec![
            ordinals(),
            params::optional_bytes(places.iter().map(|at| Some(work.copies[row(at)].row_key))),
            params::optional_bytes(places.iter().map(|at| Some(work.rows[row(at)].version))),
            params::integers(places.iter().map(|at| work.batch.rows[row(at)].source.event_ms)),
            params::text(&session.route),
        ];
        let mut keys = self.key_arrays(ops, places);
        keys.truncate(work.encoder.row_key().len());
        parameters.extend(keys.into_iter().map(Array::finish));
        let rows = query(&self.link.client, &statement, &parameters).await?;
        let kept: Vec<i32> = rows.first().map_or_else(Vec::new, |row| row.get(0));
        for ord in kept {
            outcomes[places[ord as usize]] = RowOutcome::Written;
        }
        for ord in found {
            outcomes[places[ord as usize]] = RowOutcome::Updated;
        }
        Ok(())
    }

    /// Row key columns (and the version column behind them) of the operations at `places`.
    fn key_arrays(&self, ops: &[Op], places: &[usize]) -> Vec<Array> {
        let encoder = self.work.encoder;
        let indices: Vec<usize> = encoder.row_key().iter().copied().chain(encoder.version()).collect();
        let mut arrays: Vec<Array> =
            indices.iter().map(|&index| Array::new(encoder.targets()[index].element_oid)).collect();
        for &at in places {
            let op = &ops[at];
            let encoded = &self.work.rows[op.row];
            if self.work.batch.rows[op.row].kind == RowKind::Delete {
                for (array, field) in arrays.iter_mut().zip(encoded.fields()) {
                    array.field(field);
                }
                continue;
            }
            // A replace sends a write: its row key stands among the columns.
            let present = encoder.present(encoded.shape);
            let fields: Vec<&[u8]> = encoded.fields().collect();
            for (array, index) in arrays.iter_mut().zip(&indices) {
                if let Some(field) =
                    present.iter().position(|column| column == index).and_then(|place| fields.get(place))
                {
                    array.field(field);
                }
            }
        }
        arrays
    }
}
