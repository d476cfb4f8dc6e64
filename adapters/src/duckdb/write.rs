//! The statements that write the rows of one batch inside its transaction, and what became of each row.
//!
//! New rows are appended to the table itself. What must meet rows that are there is appended to a temporary table, and goes from
//! there into the table by its unique index: one statement for all rows that fill the same columns.

use std::collections::{BTreeMap, HashMap};

use duckdb::{Appender, Connection, arrow::array::BinaryBuilder, types::Value};

use super::{
    arrays::{Extra, record_batch},
    errors::{self, Class},
    probe::Layout,
    refuse::Job,
    schema::{Transaction, quoted},
};
use crate::{
    bookkeeping::worker::Fault,
    collapse::{Action, Op, Plan},
    sink::{Mode, RowOutcome},
};

/// Why the rows did not go in. The transaction has ended either way.
pub(super) enum Stop {
    /// The batch as a whole failed.
    Batch(Fault),
    /// DuckDB refuses a row, for this reason; it does not say which.
    Row(String),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Batch(fault)
    }
}

/// Where rows wait until they meet those of the table.
const STAGE: &str = "oncegate_stage";

/// Rows with a key that are known to be new: appended, on the bet that none of them is there (P9).
pub(super) fn may_bet(job: &Job<'_>) -> bool {
    job.packed.known_new && job.layout.mode == Mode::Insert && !job.layout.key.is_empty()
}

/// Writes `rows` (indices into the batch, ascending). The outcomes are as long as the batch; those of other rows are none.
pub(super) fn write(
    transaction: &Transaction<'_>,
    job: &Job<'_>,
    rows: &[usize],
    bold: bool,
) -> Result<Vec<Option<RowOutcome>>, Stop> {
    let layout = job.layout;
    let plan = Plan::among(layout.mode, job.copies, rows);
    let mut outcomes = vec![None; job.packed.len()];
    let connection = transaction.connection;
    let only_writes = || plan.ops().iter().all(|op| op.action == Action::Write);
    let straight = layout.key.is_empty() || bold && may_bet(job) && only_writes();
    let answers = if plan.ops().is_empty() {
        Vec::new()
    } else if straight {
        append(connection, job, plan.ops()).map_err(|error| stop(layout, "appending rows", &error))?;
        vec![RowOutcome::Written; plan.ops().len()]
    } else {
        Staged::new(transaction, job, plan.ops())?.run()?
    };
    for (op, answer) in plan.ops().iter().zip(&answers) {
        plan.assign(op, job.copies, answer, &mut outcomes);
    }
    Ok(outcomes)
}

fn stop(layout: &Layout, doing: &str, error: &duckdb::Error) -> Stop {
    match errors::classify(error) {
        Class::Row => Stop::Row(errors::refusal(&layout.table, error)),
        _ => Stop::Batch(errors::fault(doing, error)),
    }
}

/// Straight into the table: an appender for each set of columns that rows fill.
fn append(connection: &Connection, job: &Job<'_>, ops: &[Op]) -> Result<(), duckdb::Error> {
    let layout = job.layout;
    let mut by_shape: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for op in ops {
        by_shape.entry(job.copies[op.row].shape).or_default().push(op.row);
    }
    for (shape, rows) in by_shape {
        let columns = job.shapes.columns(shape, layout);
        if columns.is_empty() {
            let mut insert =
                connection.prepare_cached(&format!("INSERT INTO {} DEFAULT VALUES", layout.target()))?;
            for _ in rows {
                insert.execute([])?;
            }
            continue;
        }
        let batch = record_batch(layout, job.packed, &rows, &columns, Vec::new())?;
        let mut appender = if layout.whole && columns.len() == layout.columns.len() {
            connection.appender_to_catalog_and_db(&layout.table, &layout.catalog, "main")?
        } else {
            let names: Vec<&str> =
                columns.iter().map(|&column| layout.columns[column].name.as_str()).collect();
            connection.appender_with_columns_to_catalog_and_db(
                &layout.table,
                &layout.catalog,
                "main",
                &names,
            )?
        };
        appender.append_record_batch(batch)?;
        Appender::flush(&mut appender)?;
    }
    Ok(())
}

/// Operations that one statement can carry: of one wave, one action and one set of columns.
struct Group {
    action: Action,
    shape: u64,
    /// Indices into the operations.
    ops: Vec<usize>,
}

struct Staged<'a, 'c> {
    connection: &'c Connection,
    job: &'a Job<'a>,
    groups: Vec<Group>,
    answers: Vec<Option<RowOutcome>>,
    /// There are tombstones for this table.
    tombstones: bool,
}

impl<'a, 'c> Staged<'a, 'c> {
    /// Puts the operations' rows into the temporary table.
    fn new(transaction: &Transaction<'c>, job: &'a Job<'a>, ops: &[Op]) -> Result<Self, Stop> {
        let connection = transaction.connection;
        // Deletes first, so that what they make room for can be written.
        let rank = |action| match action {
            Action::Delete => 0,
            Action::Replace => 1,
            Action::Write => 2,
        };
        let mut sorted: BTreeMap<(u32, u8, u64), Group> = BTreeMap::new();
        for (index, op) in ops.iter().enumerate() {
            let shape = if op.action == Action::Delete { 0 } else { job.copies[op.row].shape };
            sorted
                .entry((op.wave, rank(op.action), shape))
                .or_insert_with(|| Group { action: op.action, shape, ops: Vec::new() })
                .ops
                .push(index);
        }
        let groups: Vec<Group> = sorted.into_values().collect();
        let mut group_of = vec![0i64; ops.len()];
        for (number, group) in groups.iter().enumerate() {
            for &op in &group.ops {
                group_of[op] = number as i64;
            }
        }
        let staged = Self { connection, job, groups, answers: vec![None; ops.len()], tombstones: false };
        staged.stage(ops, group_of).map_err(|error| errors::fault("staging rows", &error))?;
        Ok(staged)
    }

    fn stage(&self, ops: &[Op], group_of: Vec<i64>) -> Result<(), duckdb::Error> {
        let Job { layout, packed, .. } = self.job;
        let rows: Vec<usize> = ops.iter().map(|op| op.row).collect();
        let all: Vec<usize> = (0..layout.columns.len()).collect();
        let mut extras = vec![
            Extra::Integers("oncegate_op", (0..ops.len() as i64).collect()),
            Extra::Integers("oncegate_group", group_of),
        ];
        let mut beside = "0::BIGINT AS oncegate_op, 0::BIGINT AS oncegate_group".to_owned();
        if layout.version.is_some() {
            beside +=
                ", 0::BIGINT AS oncegate_event_ms, ''::BLOB AS oncegate_key, ''::BLOB AS oncegate_version";
            let blobs = |of: &dyn Fn(usize) -> &'a [u8]| {
                let mut builder = BinaryBuilder::new();
                rows.iter().for_each(|&row| builder.append_value(of(row)));
                builder
            };
            extras.push(Extra::Integers(
                "oncegate_event_ms",
                rows.iter().map(|&row| packed.event_ms(row)).collect(),
            ));
            extras.push(Extra::Blobs("oncegate_key", blobs(&|row| packed.key(row))));
            extras.push(Extra::Blobs("oncegate_version", blobs(&|row| packed.parts(layout, row).version)));
        }
        // As a query makes it, it has the columns' types and none of their constraints.
        self.connection.execute_batch(&format!(
            "CREATE OR REPLACE TEMP TABLE {STAGE} AS SELECT {beside}, {} FROM {} LIMIT 0",
            layout.names(&all),
            layout.target()
        ))?;
        let batch = record_batch(layout, packed, &rows, &all, extras)?;
        let mut appender = self.connection.appender_to_catalog_and_db(STAGE, "temp", "main")?;
        appender.append_record_batch(batch)?;
        appender.flush()
    }

    fn run(mut self) -> Result<Vec<RowOutcome>, Stop> {
        let layout = self.job.layout;
        let doing = "writing rows";
        self.groups().map_err(|error| stop(layout, doing, &error))?;
        self.connection
            .execute_batch(&format!("DROP TABLE temp.{STAGE}"))
            .map_err(|error| errors::fault(doing, &error))?;
        Ok(self
            .answers
            .into_iter()
            .map(|answer| answer.expect("every operation belongs to a group that was run"))
            .collect())
    }

    fn groups(&mut self) -> Result<(), duckdb::Error> {
        if self.job.layout.version.is_some() {
            self.meet_tombstones()?;
        }
        for number in 0..self.groups.len() {
            if self.open(number).next().is_none() {
                continue;
            }
            match self.groups[number].action {
                Action::Delete => self.delete(number)?,
                Action::Replace => self.replace(number)?,
                Action::Write => self.write(number)?,
            }
        }
        Ok(())
    }

    /// The group's operations that have no answer yet.
    fn open(&self, number: usize) -> impl Iterator<Item = usize> + '_ {
        self.groups[number].ops.iter().copied().filter(|&op| self.answers[op].is_none())
    }

    /// Operations that meet a tombstone of their version or a higher one are stale.
    fn meet_tombstones(&mut self) -> Result<(), duckdb::Error> {
        let target = self.job.layout.table.as_str();
        self.tombstones = self
            .connection
            .prepare_cached("SELECT EXISTS (SELECT 1 FROM oncegate_tombstones WHERE target = ?1)")?
            .query_row([target], |row| row.get(0))?;
        if self.tombstones {
            let stale = self.numbers(
                &format!(
                    "DELETE FROM {STAGE} AS s USING oncegate_tombstones AS d
                     WHERE d.target = ?1 AND d.row_key = s.oncegate_key AND d.version >= s.oncegate_version
                     RETURNING oncegate_op"
                ),
                &[&target],
            )?;
            self.answer(stale, &RowOutcome::Stale);
        }
        Ok(())
    }

    fn answer(&mut self, ops: impl IntoIterator<Item = usize>, outcome: &RowOutcome) {
        for op in ops {
            self.answers[op] = Some(outcome.clone());
        }
    }

    fn answer_rest(&mut self, number: usize, outcome: &RowOutcome) {
        let rest: Vec<usize> = self.open(number).collect();
        self.answer(rest, outcome);
    }

    /// The first column of each row, a number of an operation.
    fn numbers(&self, sql: &str, params: &[&dyn duckdb::ToSql]) -> Result<Vec<usize>, duckdb::Error> {
        self.connection
            .prepare(sql)?
            .query_map(params, |row| row.get::<_, i64>(0))?
            .map(|number| number.map(|number| usize::try_from(number).unwrap_or_default()))
            .collect()
    }

    /// Which of the group's operations a statement that returns [`Layout::key_texts`] has touched.
    fn touched(&self, number: usize, sql: &str) -> Result<Vec<usize>, duckdb::Error> {
        let parts = self.job.layout.key.len();
        let texts = |row: &duckdb::Row<'_>, from: usize| {
            (from..from + parts).map(|at| row.get::<_, Value>(at).map(text)).collect::<Result<Vec<_>, _>>()
        };
        let keys: Vec<Vec<Vec<u8>>> =
            self.connection.prepare(sql)?.query_map([], |row| texts(row, 0))?.collect::<Result<_, _>>()?;
        let open: Vec<usize> = self.open(number).collect();
        if keys.is_empty() || keys.len() == open.len() {
            return Ok(if keys.is_empty() { Vec::new() } else { open });
        }
        let layout = self.job.layout;
        let by_key: HashMap<Vec<Vec<u8>>, i64> = self
            .connection
            .prepare(&format!(
                "SELECT oncegate_op, {} FROM {STAGE} WHERE oncegate_group = {number}",
                layout.key_texts("")
            ))?
            .query_map([], |row| Ok((texts(row, 1)?, row.get(0)?)))?
            .collect::<Result<_, _>>()?;
        Ok(keys
            .iter()
            .filter_map(|key| by_key.get(key))
            .map(|&op| usize::try_from(op).unwrap_or_default())
            .collect())
    }

    /// The group's operations that have no answer yet, as a condition on the temporary table.
    fn those_open(&self, number: usize) -> String {
        let open: Vec<usize> = self.open(number).collect();
        let all = format!("oncegate_group = {number}");
        if open.len() == self.groups[number].ops.len() {
            return all;
        }
        let list: Vec<String> = open.iter().map(ToString::to_string).collect();
        format!("{all} AND oncegate_op IN ({})", list.join(", "))
    }

    /// `INSERT .. SELECT` of the group's open operations.
    fn insert(&self, number: usize) -> String {
        let layout = self.job.layout;
        let names = layout.names(&self.job.shapes.columns(self.groups[number].shape, layout));
        format!(
            "INSERT INTO {} AS target ({names}) SELECT {names} FROM {STAGE} WHERE {}",
            layout.target(),
            self.those_open(number)
        )
    }

    fn write(&mut self, number: usize) -> Result<(), duckdb::Error> {
        let layout = self.job.layout;
        let (conflict, keys) =
            (format!("ON CONFLICT ({})", layout.names(&layout.key)), layout.key_texts("target."));
        let made =
            self.touched(number, &format!("{} {conflict} DO NOTHING RETURNING {keys}", self.insert(number)))?;
        self.answer(made, &RowOutcome::Written);
        if layout.mode != Mode::Insert && self.open(number).next().is_some() {
            let shape = self.job.shapes.columns(self.groups[number].shape, layout);
            let sets: Vec<String> = shape
                .iter()
                .filter(|column| !layout.key.contains(column))
                .map(|&column| quoted(&layout.columns[column].name))
                .map(|name| format!("{name} = excluded.{name}"))
                .collect();
            match layout.version {
                // Nothing to change, but the row was met.
                None if sets.is_empty() => {}
                None => {
                    let update =
                        format!("{} {conflict} DO UPDATE SET {}", self.insert(number), sets.join(", "));
                    self.connection.execute(&update, [])?;
                }
                Some(version) => {
                    let name = quoted(&layout.columns[version].name);
                    let changed = self.touched(
                        number,
                        &format!(
                            "{} {conflict} DO UPDATE SET {}
                             WHERE target.{name} IS NULL OR excluded.{name} > target.{name} RETURNING {keys}",
                            self.insert(number),
                            sets.join(", ")
                        ),
                    )?;
                    self.answer(changed, &RowOutcome::Updated);
                }
            }
        }
        let rest = if layout.mode == Mode::Upsert { RowOutcome::Updated } else { RowOutcome::Stale };
        self.answer_rest(number, &rest);
        if self.tombstones {
            self.connection.execute(
                &format!(
                    "DELETE FROM oncegate_tombstones AS d USING {STAGE} AS s
                     WHERE d.target = ?1 AND d.row_key = s.oncegate_key AND s.oncegate_group = {number}"
                ),
                [&layout.table],
            )?;
        }
        Ok(())
    }

    /// Operations of the group whose row is there; with a version those whose row is older, apart from the others.
    fn met(&self, number: usize) -> Result<(Vec<usize>, Vec<usize>), duckdb::Error> {
        let layout = self.job.layout;
        let found: Vec<(i64, bool)> = self
            .connection
            .prepare(&format!(
                "SELECT s.oncegate_op, {} FROM {STAGE} AS s JOIN {} AS target ON {} WHERE s.oncegate_group = {number}",
                layout.newer(),
                layout.target(),
                layout.same_key()
            ))?
            .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<Result<_, _>>()?;
        let (older, newer): (Vec<_>, Vec<_>) = found.into_iter().partition(|(_, older)| *older);
        let ops = |found: Vec<(i64, bool)>| {
            found.into_iter().map(|(op, _)| usize::try_from(op).unwrap_or_default()).collect()
        };
        Ok((ops(older), ops(newer)))
    }

    fn remove(&self, number: usize) -> Result<(), duckdb::Error> {
        let layout = self.job.layout;
        self.connection
            .execute(
                &format!(
                    "DELETE FROM {} AS target USING {STAGE} AS s
                     WHERE s.oncegate_group = {number} AND {} AND {}",
                    layout.target(),
                    layout.same_key(),
                    layout.newer()
                ),
                [],
            )
            .map(drop)
    }

    fn delete(&mut self, number: usize) -> Result<(), duckdb::Error> {
        let layout = self.job.layout;
        let (gone, newer) = self.met(number)?;
        if !gone.is_empty() {
            self.remove(number)?;
        }
        self.answer(newer, &RowOutcome::Stale);
        if layout.version.is_some() && self.open(number).next().is_some() {
            self.connection.execute(
                &format!(
                    "INSERT INTO oncegate_tombstones (target, row_key, version, route, event_ms)
                     SELECT ?1, oncegate_key, oncegate_version, ?2, oncegate_event_ms FROM {STAGE} WHERE {}
                     ON CONFLICT (target, row_key) DO UPDATE
                     SET version = excluded.version, route = excluded.route, event_ms = excluded.event_ms",
                    self.those_open(number)
                ),
                [&layout.table, self.job.route],
            )?;
        }
        self.answer(gone, &RowOutcome::Updated);
        self.answer_rest(number, &RowOutcome::Written);
        Ok(())
    }

    /// Delete, then write: what the row leaves out has its default again.
    fn replace(&mut self, number: usize) -> Result<(), duckdb::Error> {
        let (gone, _) = self.met(number)?;
        if !gone.is_empty() {
            self.remove(number)?;
        }
        self.connection.execute(&self.insert(number), [])?;
        self.answer(gone, &RowOutcome::Updated);
        self.answer_rest(number, &RowOutcome::Written);
        Ok(())
    }
}

/// A text may hold anything, and is compared as it is.
fn text(value: Value) -> Vec<u8> {
    match value {
        Value::Text(text) => text.into_bytes(),
        Value::Blob(bytes) => bytes,
        _ => Vec::new(),
    }
}
