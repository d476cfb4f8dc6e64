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

/// All rows that DuckDB refuses. `together`: they are known to depend on each other, whatever the table says.
pub(super) fn find(
    connection: &Connection,
    writer: &MutexGuard<'_, ()>,
    job: &Job<'_>,
    together: bool,
) -> Result<Refused, Fault> {
    let attempt = |rows: &[usize]| attempt(connection, writer, job, rows);
    search(&attempt, job.packed.len(), job.layout.apart && !together)
}

/// The rows that `attempt` refuses, and why; it says why it does not take some of them, or none if it takes them all.
fn search(
    attempt: &impl Fn(&[usize]) -> Result<Option<String>, Fault>,
    rows: usize,
    apart: bool,
) -> Result<Refused, Fault> {
    let all: Vec<usize> = (0..rows).collect();
    let mut refused = Refused::new();
    if apart {
        halve(attempt, &all, &mut refused)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Of what an attempt with `bad` groups refuses: any set that holds one of them whole.
    fn refused(bad: &[&[usize]], apart: bool) -> Vec<usize> {
        let attempt = |rows: &[usize]| {
            let holds = bad.iter().any(|group| group.iter().all(|row| rows.contains(row)));
            Ok(holds.then(|| "no".to_owned()))
        };
        search(&attempt, 20, apart).unwrap().into_keys().collect()
    }

    #[test]
    fn rule10_rows_that_are_refused_by_themselves_are_found_either_way() {
        for bad in [vec![], vec![0], vec![19], vec![3, 4, 12]] {
            let groups: Vec<&[usize]> = bad.chunks(1).collect();
            assert_eq!((refused(&groups, true), refused(&groups, false)), (bad.clone(), bad));
        }
    }

    #[test]
    fn rule10_of_rows_that_are_refused_only_together_the_last_is_refused() {
        assert_eq!(refused(&[&[3, 15]], true), [0; 0], "halving does not see it");
        assert_eq!(refused(&[&[3, 15]], false), [15]);
        assert_eq!(refused(&[&[3, 15], &[0, 1, 2], &[7]], false), [2, 7, 15]);
    }
}
