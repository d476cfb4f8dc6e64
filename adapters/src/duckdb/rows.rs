//! The rows of a batch, owned, and how they are read.

use std::ops::Range;

use super::probe::Layout;
use crate::{
    collapse::Copy,
    sink::{Batch, RowKind},
};

/// The rows of a batch, owned, so that they can go to the worker's thread.
pub(super) struct Packed {
    bytes: Vec<u8>,
    rows: Vec<PackedRow>,
    /// The store has proved them new, and the dedup key is a function of the row key (P9).
    pub(super) known_new: bool,
}

struct PackedRow {
    kind: RowKind,
    row: Range<usize>,
    key: Range<usize>,
    event_ms: i64,
}

/// One row, read as far as its values.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    /// Canonical; empty without version.
    pub(super) version: &'a [u8],
    pub(super) present: &'a [u8],
    pub(super) nulls: &'a [u8],
    pub(super) values: &'a [u8],
}

impl Packed {
    pub(super) fn of(batch: &Batch<'_>) -> Self {
        let size = batch.rows.iter().map(|row| row.bytes.len() + row.row_key.len()).sum();
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
                row: append(row.bytes),
                key: append(row.row_key),
                event_ms: row.source.event_ms,
            })
            .collect();
        Self { bytes, rows, known_new: batch.known_new }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn key(&self, index: usize) -> &[u8] {
        &self.bytes[self.rows[index].key.clone()]
    }

    pub(super) fn event_ms(&self, index: usize) -> i64 {
        self.rows[index].event_ms
    }

    /// Rows come from the encoder only; what does not reads as a row without columns.
    pub(super) fn parts(&self, layout: &Layout, index: usize) -> Parts<'_> {
        let row = &self.bytes[self.rows[index].row.clone()];
        let read = || {
            let (version, row) = if layout.version.is_some() {
                let (length, row) = row.split_first_chunk::<4>()?;
                row.split_at_checked(u32::from_le_bytes(*length) as usize)?
            } else {
                (&row[..0], row)
            };
            let (present, row) = row.split_at_checked(layout.bitmap_bytes())?;
            let (nulls, values) = row.split_at_checked(layout.bitmap_bytes())?;
            Some(Parts { version, present, nulls, values })
        };
        read().unwrap_or(Parts { version: &[], present: &[], nulls: &[], values: &[] })
    }

    /// What [`crate::collapse`] must know of each row. Two rows have one shape if they fill the same columns.
    pub(super) fn copies<'a>(&'a self, layout: &Layout, shapes: &mut Shapes<'a>) -> Vec<Copy<'a, &'a [u8]>> {
        (0..self.len())
            .map(|index| {
                let parts = self.parts(layout, index);
                Copy {
                    kind: self.rows[index].kind,
                    row_key: self.key(index),
                    version: layout.version.map(|_| parts.version),
                    shape: shapes.of(parts.present),
                }
            })
            .collect()
    }
}

/// The sets of columns that a batch's rows fill, numbered.
#[derive(Default)]
pub(super) struct Shapes<'a>(Vec<&'a [u8]>);

impl<'a> Shapes<'a> {
    fn of(&mut self, present: &'a [u8]) -> u64 {
        let known = self.0.iter().rposition(|shape| *shape == present);
        let at = known.unwrap_or_else(|| {
            self.0.push(present);
            self.0.len() - 1
        });
        at as u64
    }

    /// Indices of the columns that the shape has.
    pub(super) fn columns(&self, shape: u64, layout: &Layout) -> Vec<usize> {
        let present = usize::try_from(shape).ok().and_then(|at| self.0.get(at)).copied().unwrap_or_default();
        (0..layout.columns.len()).filter(|&column| has(present, column)).collect()
    }
}

/// Whether the bit of `column` is set.
pub(super) fn has(bitmap: &[u8], column: usize) -> bool {
    bitmap.get(column / 8).is_some_and(|byte| byte >> (column % 8) & 1 == 1)
}
