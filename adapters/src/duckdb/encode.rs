//! A record's values to one row. Pure.
//!
//! A row is its version in canonical form behind its length (4 bytes; nothing without version), a bitmap of the columns that are
//! present, a bitmap of those that are null, and then the value of each column that is present and not null
//! ([`values::put`]). A row key is the canonical form of its columns, one behind the other.

use std::sync::Arc;

use super::{probe::Layout, values};
use crate::{
    decode,
    sink::{Column, Encode, RowKind, encode_whole_row},
    value::{BadValue, Value},
};

/// Makes rows for one table.
#[derive(Debug)]
pub(super) struct Encoder {
    layout: Arc<Layout>,
}

impl Encoder {
    pub(super) fn new(layout: Arc<Layout>) -> Self {
        Self { layout }
    }

    fn try_encode(
        &self,
        kind: RowKind,
        given: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        let layout = &*self.layout;
        if kind == RowKind::Delete && layout.key.is_empty() {
            return Err(BadValue {
                column: String::new(),
                column_type: String::new(),
                reason: "a tombstone deletes by row key, and the sink names none; set row_key".to_owned(),
            });
        }
        if let Some(version) = layout.version {
            let at = row.len();
            row.extend_from_slice(&[0; 4]);
            self.canonical(version, "the version", given[version], row)?;
            // A value is shorter than 2 GiB, and so is its canonical form than 4 GiB.
            let length = u32::try_from(row.len() - at - 4)
                .map_err(|_| layout.columns[version].bad("is too long for a version"))?;
            row[at..at + 4].copy_from_slice(&length.to_le_bytes());
        }
        for &column in &layout.key {
            self.canonical(column, "the row key", given[column], row_key)?;
        }
        let start = row.len();
        let bitmap = layout.bitmap_bytes();
        row.resize(start + 2 * bitmap, 0);
        for (index, &value) in given.iter().enumerate() {
            let needed = layout.key.contains(&index) || layout.version == Some(index);
            if kind == RowKind::Delete && !needed {
                continue;
            }
            let column = &layout.columns[index];
            let missing = value == Value::Missing;
            if missing && column.has_default {
                continue;
            }
            row[start + index / 8] |= 1 << (index % 8);
            if missing || matches!(value, Value::Json(json) if decode::is_null(json)) {
                if !column.nullable {
                    return Err(column.bad(if missing {
                        "is needed: the column is not null and has no default"
                    } else {
                        "cannot be null"
                    }));
                }
                row[start + bitmap + index / 8] |= 1 << (index % 8);
                continue;
            }
            values::put(&layout.kinds[index], value, row).map_err(|fault| column.bad(fault))?;
        }
        Ok(())
    }

    /// Appends the canonical form of a value that must be there.
    fn canonical(
        &self,
        index: usize,
        what: &str,
        value: Value<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        let (column, kind) = (&self.layout.columns[index], &self.layout.kinds[index]);
        if value == Value::Missing || matches!(value, Value::Json(json) if decode::is_null(json)) {
            return Err(column.bad(format!("is missing or null, and is {what}, which needs a value")));
        }
        let mut plain = Vec::new();
        values::put(kind, value, &mut plain).map_err(|fault| column.bad(fault))?;
        values::put_ordered(kind, values::take(kind, &plain).0, out);
        Ok(())
    }
}

impl Encode for Encoder {
    fn columns(&self) -> &[Column] {
        &self.layout.columns
    }

    fn encode(
        &self,
        kind: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        let try_encode =
            |row: &mut Vec<u8>, row_key: &mut Vec<u8>| self.try_encode(kind, values, row, row_key);
        encode_whole_row(self.columns(), values, row, row_key, try_encode)
    }
}
