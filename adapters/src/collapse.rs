//! Copies of a row key inside one batch, reduced to one operation per key: what the sink gets, and what each copy's
//! outcome is once the sink has answered. Pure.
//!
//! The rows end as if the copies had been applied one after another, in order:
//!
//! | mode | who wins | the others |
//! | --- | --- | --- |
//! | `Insert` | the first write (since the last delete) | writes are stale |
//! | `Upsert` | the last | outcomes as if applied one after another |
//! | `UpsertIfNewer` | the highest version, the first among equals | stale |
//!
//! An operation that the sink refuses is planned again without the refused row ([`Plan::among`]).

use std::ops::Range;

use crate::sink::{Mode, RowKind, RowOutcome};

/// One row of a batch, as far as collapsing must know it.
#[derive(Clone, Copy, Debug)]
pub struct Copy<'a, V> {
    /// Write or delete.
    pub kind: RowKind,
    /// Canonical row key; empty when the route names none: then nothing is a copy of anything.
    pub row_key: &'a [u8],
    /// The version, in `UpsertIfNewer`.
    pub version: Option<V>,
    /// Which columns the row leaves to their defaults. In `Upsert` a later write leaves such a column as an earlier one
    /// set it, so writes of unequal shape go to the sink one after another.
    pub shape: u64,
}

/// What the sink is asked to do with a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Insert or upsert, as the mode says.
    Write,
    /// Delete by row key.
    Delete,
    /// Delete by row key, then insert. Answered `Updated` if there was a row, else `Written`.
    Replace,
}

/// One operation: at most one per row key and wave.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Op {
    /// Index of the row that is sent.
    pub row: usize,
    /// What to do with it.
    pub action: Action,
    /// Operations of a later wave come after all of the earlier ones.
    pub wave: u32,
    members: Range<usize>,
}

/// The operations of one batch.
#[derive(Clone, Debug)]
pub struct Plan {
    mode: Mode,
    order: Vec<usize>,
    ops: Vec<Op>,
}

impl Plan {
    /// Plans all of `copies`.
    pub fn new<V: Ord>(mode: Mode, copies: &[Copy<'_, V>]) -> Plan {
        Self::build(mode, copies, (0..copies.len()).collect())
    }

    /// Plans only the copies whose indices are in `among` (ascending).
    pub fn among<V: Ord>(mode: Mode, copies: &[Copy<'_, V>], among: &[usize]) -> Plan {
        Self::build(mode, copies, among.to_vec())
    }

    fn build<V: Ord>(mode: Mode, copies: &[Copy<'_, V>], mut order: Vec<usize>) -> Plan {
        let keyed = order.iter().any(|&index| !copies[index].row_key.is_empty());
        if keyed {
            sort_by_row_key(copies, &mut order);
        }
        let mut ops = Vec::with_capacity(order.len());
        let mut start = 0;
        while start < order.len() {
            let key = copies[order[start]].row_key;
            let mut end = start + 1;
            while end < order.len() && !key.is_empty() && copies[order[end]].row_key == key {
                end += 1;
            }
            reduce(mode, copies, &order, start..end, &mut ops);
            start = end;
        }
        if ops.iter().any(|op| op.wave > 0) {
            ops.sort_by_key(|op| op.wave);
        }
        Plan { mode, order, ops }
    }

    /// The operations: by wave, then by row key (in order of arrival without row keys).
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// Indices of the rows that `op` stands for, in order of arrival.
    pub fn members(&self, op: &Op) -> &[usize] {
        &self.order[op.members.clone()]
    }

    /// No row is a copy of another: every operation stands for one row.
    pub fn is_plain(&self) -> bool {
        self.ops.len() == self.order.len()
    }

    /// Gives every row that `op` stands for its outcome, now that the sink has said what became of `op`.
    /// Not for `Refused`: there the refused row keeps its outcome, and the rest is planned again.
    pub fn assign<V>(
        &self,
        op: &Op,
        copies: &[Copy<'_, V>],
        outcome: &RowOutcome,
        outcomes: &mut [Option<RowOutcome>],
    ) {
        let members = self.members(op);
        if members.len() == 1 || self.mode == Mode::UpsertIfNewer {
            for &index in members {
                outcomes[index] = Some(if index == op.row { outcome.clone() } else { RowOutcome::Stale });
            }
            return;
        }
        // An upsert answered `Stale` was suppressed by the sink (a trigger): nothing of it took effect.
        if self.mode == Mode::Upsert && *outcome == RowOutcome::Stale {
            for &index in members {
                outcomes[index] = Some(RowOutcome::Stale);
            }
            return;
        }
        let mut exists = *outcome != RowOutcome::Written;
        for &index in members {
            outcomes[index] = Some(match (copies[index].kind, exists) {
                (RowKind::Write, true) if self.mode == Mode::Insert => RowOutcome::Stale,
                (_, true) => RowOutcome::Updated,
                (_, false) => RowOutcome::Written,
            });
            exists = copies[index].kind == RowKind::Write;
        }
    }
}

/// Stable by index. The first eight bytes decide most comparisons without following a pointer.
fn sort_by_row_key<V>(copies: &[Copy<'_, V>], order: &mut [usize]) {
    let mut keyed: Vec<(u64, usize)> =
        order.iter().map(|&index| (prefix(copies[index].row_key), index)).collect();
    keyed.sort_unstable_by(|(a, left), (b, right)| {
        a.cmp(b).then_with(|| copies[*left].row_key.cmp(copies[*right].row_key)).then(left.cmp(right))
    });
    for (slot, (_, index)) in order.iter_mut().zip(keyed) {
        *slot = index;
    }
}

fn prefix(key: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let length = key.len().min(8);
    bytes[..length].copy_from_slice(&key[..length]);
    u64::from_be_bytes(bytes)
}

/// Reduces the copies of one row key, `order[members]`, to operations.
fn reduce<V: Ord>(
    mode: Mode,
    copies: &[Copy<'_, V>],
    order: &[usize],
    members: Range<usize>,
    ops: &mut Vec<Op>,
) {
    let rows = &order[members.clone()];
    let action = |index: usize| match copies[index].kind {
        RowKind::Write => Action::Write,
        RowKind::Delete => Action::Delete,
    };
    if rows.len() == 1 {
        ops.push(Op { row: rows[0], action: action(rows[0]), wave: 0, members });
        return;
    }
    if mode == Mode::UpsertIfNewer {
        let mut winner = rows[0];
        for &index in &rows[1..] {
            if copies[index].version > copies[winner].version {
                winner = index;
            }
        }
        ops.push(Op { row: winner, action: action(winner), wave: 0, members });
        return;
    }
    let deleted = rows.iter().rposition(|&index| copies[index].kind == RowKind::Delete);
    let first_write = deleted.map_or(0, |at| at + 1);
    if first_write == rows.len() {
        ops.push(Op { row: rows[rows.len() - 1], action: Action::Delete, wave: 0, members });
        return;
    }
    let leading = if deleted.is_some() { Action::Replace } else { Action::Write };
    if mode == Mode::Insert {
        ops.push(Op { row: rows[first_write], action: leading, wave: 0, members });
        return;
    }
    let (mut start, mut wave, mut action) = (members.start, 0, leading);
    for at in first_write + 1..=rows.len() {
        let ends = at == rows.len() || copies[rows[at]].shape != copies[rows[at - 1]].shape;
        if ends {
            let end = members.start + at;
            ops.push(Op { row: rows[at - 1], action, wave, members: start..end });
            (start, wave, action) = (end, wave + 1, Action::Write);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn write(key: &[u8], version: i64) -> Copy<'_, i64> {
        Copy { kind: RowKind::Write, row_key: key, version: Some(version), shape: 0 }
    }

    fn delete(key: &[u8], version: i64) -> Copy<'_, i64> {
        Copy { kind: RowKind::Delete, ..write(key, version) }
    }

    fn all(mode: Mode, copies: &[Copy<'_, i64>], answer: RowOutcome) -> Vec<RowOutcome> {
        let plan = Plan::new(mode, copies);
        let mut outcomes = vec![None; copies.len()];
        for op in plan.ops() {
            plan.assign(op, copies, &answer, &mut outcomes);
        }
        outcomes.into_iter().map(Option::unwrap).collect()
    }

    #[test]
    fn rows_without_row_key_are_never_copies() {
        let copies = [write(b"", 1), write(b"", 1)];
        let plan = Plan::new(Mode::Insert, &copies);
        assert!(plan.is_plain());
        assert_eq!(plan.ops().iter().map(|op| op.row).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn insert_keeps_the_first_and_calls_the_others_stale() {
        let copies = [write(b"b", 1), write(b"a", 1), write(b"b", 2)];
        let plan = Plan::new(Mode::Insert, &copies);
        assert_eq!(plan.ops().iter().map(|op| op.row).collect::<Vec<_>>(), [1, 0], "by row key");
        use RowOutcome::{Stale, Written};
        assert_eq!(all(Mode::Insert, &copies, Written), [Written, Written, Stale]);
        assert_eq!(all(Mode::Insert, &copies, Stale), [Stale, Stale, Stale]);
    }

    #[test]
    fn upsert_keeps_the_last_and_the_first_gets_the_sinks_outcome() {
        let copies = [write(b"a", 1), write(b"a", 2), write(b"a", 3)];
        let plan = Plan::new(Mode::Upsert, &copies);
        assert_eq!((plan.ops().len(), plan.ops()[0].row), (1, 2));
        use RowOutcome::{Updated, Written};
        assert_eq!(all(Mode::Upsert, &copies, Written), [Written, Updated, Updated]);
        assert_eq!(all(Mode::Upsert, &copies, Updated), [Updated, Updated, Updated]);
    }

    #[test]
    fn the_highest_version_wins_and_the_first_among_equals() {
        let copies = [write(b"a", 2), write(b"a", 5), delete(b"a", 5), write(b"a", 4)];
        let plan = Plan::new(Mode::UpsertIfNewer, &copies);
        assert_eq!((plan.ops()[0].row, plan.ops()[0].action), (1, Action::Write));
        use RowOutcome::{Stale, Updated};
        assert_eq!(all(Mode::UpsertIfNewer, &copies, Updated), [Stale, Updated, Stale, Stale]);
    }

    #[test]
    fn a_delete_after_a_write_is_a_delete_and_before_it_a_replace() {
        use RowOutcome::{Updated, Written};
        let copies = [write(b"a", 1), delete(b"a", 2)];
        assert_eq!(Plan::new(Mode::Upsert, &copies).ops()[0].action, Action::Delete);
        assert_eq!(all(Mode::Upsert, &copies, Written), [Written, Updated]);
        let copies = [delete(b"a", 1), write(b"a", 2)];
        assert_eq!(Plan::new(Mode::Upsert, &copies).ops()[0].action, Action::Replace);
        assert_eq!(all(Mode::Upsert, &copies, Updated), [Updated, Written]);
        assert_eq!(all(Mode::Insert, &copies, Written), [Written, Written]);
    }

    #[test]
    fn upserts_of_unequal_shape_go_one_after_another() {
        let other = Copy { shape: 1, ..write(b"a", 1) };
        let copies = [write(b"a", 1), other, other, write(b"b", 1)];
        let plan = Plan::new(Mode::Upsert, &copies);
        let ops: Vec<_> = plan.ops().iter().map(|op| (op.wave, op.row, plan.members(op).to_vec())).collect();
        assert_eq!(ops, [(0, 0, vec![0]), (0, 3, vec![3]), (1, 2, vec![1, 2])]);
    }

    #[test]
    fn a_refused_winner_gives_way_to_the_next() {
        let copies = [write(b"a", 1), write(b"a", 2), write(b"a", 3)];
        assert_eq!(Plan::among(Mode::Insert, &copies, &[1, 2]).ops()[0].row, 1);
        assert_eq!(Plan::among(Mode::Upsert, &copies, &[0, 1]).ops()[0].row, 1);
    }

    /// A table: row key to (content, version).
    type Table = BTreeMap<u8, (usize, i64)>;

    fn apply(mode: Mode, table: &mut Table, key: u8, action: Action, content: usize) -> RowOutcome {
        let there = table.get(&key).copied();
        match (action, mode, there) {
            (Action::Delete, _, None) => RowOutcome::Written,
            (Action::Delete, _, Some(_)) => {
                table.remove(&key);
                RowOutcome::Updated
            }
            (Action::Write, Mode::Insert, Some(_)) => RowOutcome::Stale,
            (_, _, there) => {
                table.insert(key, (content, 0));
                if there.is_some() { RowOutcome::Updated } else { RowOutcome::Written }
            }
        }
    }

    proptest! {
        /// Against a table that takes the copies one after another.
        #[test]
        fn collapsed_equals_one_after_another(
            rows in proptest::collection::vec((0u8..4, proptest::bool::weighted(0.3)), 0..30),
            before in proptest::collection::btree_map(0u8..4, Just((999usize, 0i64)), 0..4),
            upsert in proptest::bool::ANY,
        ) {
            let mode = if upsert { Mode::Upsert } else { Mode::Insert };
            let keys: Vec<[u8; 1]> = rows.iter().map(|(key, _)| [*key]).collect();
            let copies: Vec<Copy<'_, i64>> = rows.iter().zip(&keys)
                .map(|((_, gone), key)| if *gone { delete(key, 0) } else { write(key, 0) }).collect();

            let mut expected_table = before.clone();
            let expected: Vec<RowOutcome> = rows.iter().enumerate().map(|(index, (key, gone))| {
                let action = if *gone { Action::Delete } else { Action::Write };
                apply(mode, &mut expected_table, *key, action, index)
            }).collect();

            let mut table = before;
            let plan = Plan::new(mode, &copies);
            let mut outcomes = vec![None; copies.len()];
            for op in plan.ops() {
                let answer = apply(mode, &mut table, rows[op.row].0, op.action, op.row);
                plan.assign(op, &copies, &answer, &mut outcomes);
            }
            prop_assert_eq!(table, expected_table);
            let outcomes: Vec<RowOutcome> = outcomes.into_iter().map(Option::unwrap).collect();
            prop_assert_eq!(outcomes, expected);
        }
    }
}
