//! The rows of a batch, owned, and the order in which they are written.

use std::ops::Range;

use rusqlite::types::ValueRef;

use super::{encode, probe::Layout};
use crate::sink::{Batch, Row, RowKind};

/// The rows of a batch, owned, so that they can go to the worker's thread.
pub(crate) struct Packed {
    bytes: Vec<u8>,
    pub(crate) rows: Vec<PackedRow>,
}

pub(crate) struct PackedRow {
    pub(crate) kind: RowKind,
    row: Range<usize>,
    key: Range<usize>,
    pub(super) event_ms: i64,
}

impl Packed {
    /// With `whole` a row is the record's payload as it came.
    pub(super) fn of(batch: &Batch<'_>, whole: bool) -> Self {
        fn bytes_of<'a>(row: &Row<'a>, whole: bool) -> &'a [u8] {
            if whole { row.source.payload.unwrap_or_default() } else { row.bytes }
        }
        let size = batch.rows.iter().map(|row| bytes_of(row, whole).len() + row.row_key.len()).sum();
        let mut bytes = Vec::with_capacity(size);
        let mut append = |part: &[u8]| {
            let start = bytes.len();
            bytes.extend_from_slice(part);
            start..bytes.len()
        };
        let rows = batch
            .rows
            .iter()
            .map(|row| PackedRow {
                kind: row.kind,
                row: append(bytes_of(row, whole)),
                key: append(row.row_key),
                event_ms: row.source.event_ms,
            })
            .collect();
        Self { bytes, rows }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn key(&self, index: usize) -> &[u8] {
        &self.bytes[self.rows[index].key.clone()]
    }

    pub(crate) fn row(&self, index: usize) -> &[u8] {
        &self.bytes[self.rows[index].row.clone()]
    }

    /// Length of what all row keys begin with.
    fn common_prefix(&self) -> usize {
        let Some(first) = self.rows.first().map(|row| &self.bytes[row.key.clone()]) else { return 0 };
        (1..self.rows.len()).fold(first.len(), |common, index| {
            let same = first.iter().zip(self.key(index)).take(common).take_while(|(a, b)| a == b);
            same.count()
        })
    }

    /// By row key, and copies of one row key in order of arrival; in `UpsertIfNewer` the highest version first, so that the
    /// other copies meet it and are stale. In order of arrival altogether where there is no row key or rows refer to others.
    pub(super) fn order(&self, layout: &Layout) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        if layout.key.is_empty() || !layout.sorted {
            return order;
        }
        // Eight bytes behind what all keys begin with decide most comparisons without following a pointer.
        let common = self.common_prefix();
        let mut keyed: Vec<(u64, usize)> =
            order.iter().map(|&index| (eight_bytes(&self.key(index)[common..]), index)).collect();
        keyed.sort_unstable_by(|(a, left), (b, right)| {
            a.cmp(b).then_with(|| self.key(*left).cmp(self.key(*right))).then(left.cmp(right))
        });
        for (slot, (_, index)) in order.iter_mut().zip(keyed) {
            *slot = index;
        }
        if let Some(version) = layout.version {
            for copies in order.chunk_by_mut(|&a, &b| self.key(a) == self.key(b)) {
                if copies.len() > 1 {
                    let of = |index: usize| value_of(layout, self.row(index), version);
                    copies.sort_by(|&a, &b| {
                        encode::compare_versions(layout.kinds[version], of(b), of(a)).then(a.cmp(&b))
                    });
                }
            }
        }
        order
    }
}

fn eight_bytes(key: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let length = key.len().min(8);
    bytes[..length].copy_from_slice(&key[..length]);
    u64::from_be_bytes(bytes)
}

/// Whether the column is present in an encoded row.
pub(super) fn has(row: &[u8], column: usize) -> bool {
    row.get(column / 8).is_some_and(|byte| byte >> (column % 8) & 1 == 1)
}

/// A column's value in an encoded row.
pub(super) fn value_of<'a>(layout: &Layout, row: &'a [u8], column: usize) -> ValueRef<'a> {
    let mut at = layout.bitmap_bytes();
    for other in 0..column {
        if has(row, other) {
            at += encode::take(&row[at..]).1;
        }
    }
    if has(row, column) { encode::take(&row[at..]).0 } else { ValueRef::Null }
}
