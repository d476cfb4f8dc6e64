//! Which rows of a batch DuckDB refuses: found in transactions that are rolled back, for an error ends the whole transaction.

use std::collections::BTreeMap;

use duckdb::Connection;
use parking_lot::MutexGuard;

use super::{
    probe::Layout,
    rows::{Packed, Shapes},
    schema::Transaction,
    write::{self, Stop},
};
use crate::{bookkeeping::worker::Fault, collapse::Copy, sink::RowOutcome};

/// The rows of one batch, and how they are written.
pub(super) struct Job<'a> {
    pub(super) layout: &'a Layout,
    pub(super) route: &'a str,
    pub(super) packed: &'a Packed,
    pub(super) copies: &'a [Copy<'a, &'a [u8]>],
    pub(super) shapes: &'a Shapes<'a>,
}

/// Rows that are refused, with why.
pub(super) type Refused = BTreeMap<usize, String>;

impl Job<'_> {
    /// Indices of the rows that are not refused, in order of arrival.
    pub(super) fn all_but(&self, refused: &Refused) -> Vec<usize> {
        (0..self.packed.len()).filter(|index| !refused.contains_key(index)).collect()
    }
}

/// Gives the refused rows their outcome beside those that were written.
pub(super) fn complete(written: Vec<Option<RowOutcome>>, refused: &Refused) -> Vec<RowOutcome> {
    written
        .into_iter()
        .enumerate()
        .map(|(index, outcome)| match refused.get(&index) {
            Some(reason) => RowOutcome::Refused { reason: reason.clone() },
            None => outcome.expect("every row that is not refused belongs to an operation that was answered"),
        })
        .collect()
}

/// All rows that DuckDB refuses.
pub(super) fn find(
    connection: &Connection,
    writer: &MutexGuard<'_, ()>,
    job: &Job<'_>,
) -> Result<Refused, Fault> {
    let attempt = |rows: &[usize]| attempt(connection, writer, job, rows);
    let all: Vec<usize> = (0..job.packed.len()).collect();
    let mut refused = Refused::new();
    if job.layout.apart {
        halve(&attempt, &all, &mut refused)?;
        return Ok(refused);
    }
    // A row may be refused because of another one of the batch, the earlier of which goes in: so each is tried behind all that come before it.
    let mut good: Vec<usize> = Vec::new();
    let mut rest: &[usize] = &all;
    while !rest.is_empty() {
        if attempt(&[&good[..], rest].concat())?.is_none() {
            return Ok(refused);
        }
        // Of what begins with `rest`, `fits` rows go in and `fails` do not.
        let (mut fits, mut fails) = (0, rest.len());
        let mut why = None;
        while fits + 1 < fails || why.is_none() {
            let middle = if fits + 1 < fails { fits.midpoint(fails) } else { fails };
            match attempt(&[&good[..], &rest[..middle]].concat())? {
                None if middle == fails => break,
                None => fits = middle,
                Some(reason) => (fails, why) = (middle, Some(reason)),
            }
        }
        good.extend_from_slice(&rest[..fits]);
        if let Some(reason) = why {
            refused.insert(rest[fits], reason);
        }
        rest = &rest[fits + 1..];
    }
    Ok(refused)
}

/// Rows that have nothing to do with each other.
fn halve(
    attempt: &impl Fn(&[usize]) -> Result<Option<String>, Fault>,
    rows: &[usize],
    refused: &mut Refused,
) -> Result<(), Fault> {
    match (attempt(rows)?, rows) {
        (None, _) | (Some(_), []) => Ok(()),
        (Some(reason), [row]) => {
            refused.insert(*row, reason);
            Ok(())
        }
        (Some(_), _) => {
            let (left, right) = rows.split_at(rows.len() / 2);
            halve(attempt, left, refused)?;
            halve(attempt, right, refused)
        }
    }
}

/// Why DuckDB refuses one of `rows`; none if it takes them. Nothing of it stays.
fn attempt(
    connection: &Connection,
    writer: &MutexGuard<'_, ()>,
    job: &Job<'_>,
    rows: &[usize],
) -> Result<Option<String>, Fault> {
    let transaction = Transaction::begin(connection, writer)?;
    match write::write(&transaction, job, rows, false) {
        Ok(_) => Ok(None),
        Err(Stop::Row(reason)) => Ok(Some(reason)),
        Err(Stop::Batch(fault)) => Err(fault),
    }
}
