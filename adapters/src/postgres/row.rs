//! One encoded row: a short header, the binary tuple as COPY takes it, and the version's canonical bytes.
//!
//! ```text
//! flags u8 | tuple length u32 | [shape u64] | tuple: field count i16, fields (length i32, bytes) | [version]
//! ```
//! A write's fields are the columns that the record has (those of its shape); a delete's are the row key columns in the
//! route's order, then the version column if the mode has one.

use bytes::Buf;

use crate::sink::RowKind;

const DELETE: u8 = 1;
const SHAPE: u8 = 2;
const HEADER: usize = 5;

/// Which columns a row leaves to their defaults: bit n for the n-th column that has one.
pub(super) type Shape = u64;

/// Starts a row in `out`; answers where it starts.
pub(super) fn begin(out: &mut Vec<u8>, kind: RowKind, shape: Shape, fields: usize) -> usize {
    let start = out.len();
    let delete = if kind == RowKind::Delete { DELETE } else { 0 };
    out.push(delete | if shape == 0 { 0 } else { SHAPE });
    out.extend_from_slice(&[0; 4]);
    if shape != 0 {
        out.extend_from_slice(&shape.to_be_bytes());
    }
    out.extend_from_slice(&(fields as i16).to_be_bytes());
    start
}

/// Ends the tuple of the row that starts at `start`; what follows in `out` is its version.
pub(super) fn end_tuple(out: &mut [u8], start: usize) {
    let shape = if out[start] & SHAPE == 0 { 0 } else { 8 };
    let length = (out.len() - start - HEADER - shape) as u32;
    out[start + 1..start + HEADER].copy_from_slice(&length.to_be_bytes());
}

/// A row, read back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Encoded<'a> {
    pub(super) shape: Shape,
    /// Field count and fields.
    pub(super) tuple: &'a [u8],
    /// Canonical; empty if the mode has none.
    pub(super) version: &'a [u8],
}

impl<'a> Encoded<'a> {
    /// Reads what [`begin`] and [`end_tuple`] made; `None` if it is something else.
    pub(super) fn read(row: &'a [u8]) -> Option<Encoded<'a>> {
        let (&flags, mut rest) = row.split_first()?;
        let length = rest.try_get_u32().ok()? as usize;
        let shape = if flags & SHAPE == 0 { 0 } else { rest.try_get_u64().ok()? };
        let (tuple, version) = rest.split_at_checked(length)?;
        (tuple.len() >= 2).then_some(Encoded { shape, tuple, version })
    }

    /// Its fields, each with its length in front (-1 and no bytes for null).
    pub(super) fn fields(&self) -> Fields<'a> {
        Fields(&self.tuple[2..])
    }
}

/// See [`Encoded::fields`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let length = i32::from_be_bytes(*self.0.first_chunk::<4>()?);
        let (field, rest) = self.0.split_at_checked(4 + usize::try_from(length).unwrap_or(0))?;
        self.0 = rest;
        Some(field)
    }
}
