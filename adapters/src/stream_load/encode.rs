//! A record's values to one row. Pure.
//!
//! A row is: the layout's tag (4 bytes); the version (16 bytes), if there is one; the row as a JSON object in one line.

use std::sync::Arc;

use super::{
    layout::{Layout, member},
    types::Kind,
    values,
};
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

    fn bad(&self, index: usize, reason: impl Into<String>) -> BadValue {
        self.layout.columns[index].bad(reason)
    }

    fn try_encode(
        &self,
        kind: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        let layout = &*self.layout;
        if kind == RowKind::Delete && layout.deletes.is_none() {
            return Err(BadValue {
                column: String::new(),
                column_type: "a row".to_owned(),
                reason: match layout.version {
                    Some(_) => {
                        "StarRocks does not delete under a condition; use mode = \"upsert\", or a column that says that a row is gone"
                    }
                    None => "rows that are only appended are not deleted; use mode = \"upsert\" and a table with a primary or unique key",
                }
                .to_owned(),
            });
        }
        row.extend_from_slice(&layout.tag.to_le_bytes());
        if let Some(at) = layout.version {
            let number =
                values::version(&layout.kinds[at], values[at]).map_err(|fault| self.bad(at, fault))?;
            row.extend_from_slice(&number.to_le_bytes());
        }
        row.push(b'{');
        for (index, &value) in values.iter().enumerate() {
            let (column, kind_of) = (&layout.columns[index], &layout.kinds[index]);
            if index > 0 {
                row.push(b',');
            }
            values::put_string(&member(&column.name, kind_of), row);
            row.push(b':');
            let (in_key, is_version) = (layout.key.contains(&index), layout.version == Some(index));
            let start = row.len();
            if kind == RowKind::Delete && !in_key && !is_version {
                // Not looked at; but null would be refused where the column does not take it.
                match &layout.defaults[index] {
                    _ if column.nullable => row.extend_from_slice(b"null"),
                    Some(default) => row.extend_from_slice(default),
                    None => row.extend_from_slice(filler(kind_of)),
                }
                continue;
            }
            let null = matches!(value, Value::Json(json) if decode::is_null(json));
            if (value == Value::Missing || null) && (in_key || is_version) {
                let what = if in_key { "the row key" } else { "the version" };
                let how = if null { "null" } else { "missing" };
                return Err(self.bad(index, format!("is {how}, and is part of {what}, which needs a value")));
            }
            match (value, &layout.defaults[index]) {
                (Value::Missing, Some(default)) => row.extend_from_slice(default),
                (Value::Missing, None) if column.nullable => row.extend_from_slice(b"null"),
                (Value::Missing, None) => {
                    return Err(self.bad(index, "is needed: the column has no default"));
                }
                _ if null && column.nullable => row.extend_from_slice(b"null"),
                _ if null => return Err(self.bad(index, "cannot be null")),
                _ => values::put(kind_of, value, row).map_err(|fault| self.bad(index, fault))?,
            }
            if in_key {
                row_key.extend_from_slice(&row[start..]);
            }
        }
        if let Some(sign) = layout.deletes {
            row.extend_from_slice(format!(",\"{sign}\":{}", u8::from(kind == RowKind::Delete)).as_bytes());
        }
        row.push(b'}');
        Ok(())
    }
}

/// Something of the type.
fn filler(kind: &Kind) -> &'static [u8] {
    match kind {
        Kind::Bool => b"false",
        Kind::Int(..) | Kind::Decimal { .. } => b"\"0\"",
        Kind::Float | Kind::Double => b"0",
        Kind::Text(_) | Kind::Binary(_) => b"\"\"",
        Kind::Date => b"\"1970-01-01\"",
        Kind::DateTime(_) => b"\"1970-01-01 00:00:00\"",
        Kind::Ipv4 => b"\"0.0.0.0\"",
        Kind::Ipv6 => b"\"::\"",
        Kind::Array(_) => b"[]",
        Kind::Json | Kind::Map(..) | Kind::Struct(_) => b"{}",
    }
}

/// A row taken apart again.
pub(super) struct Taken<'a> {
    pub(super) version: Option<i128>,
    /// What is sent.
    pub(super) sent: &'a [u8],
}

/// As the encoder made it; none if it was made for another table.
pub(super) fn take<'a>(layout: &Layout, row: &'a [u8]) -> Option<Taken<'a>> {
    let (tag, row) = row.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*tag) != layout.tag {
        return None;
    }
    let (version, sent) = match layout.version {
        Some(_) => {
            let (version, rest) = row.split_first_chunk::<16>()?;
            (Some(i128::from_le_bytes(*version)), rest)
        }
        None => (None, row),
    };
    Some(Taken { version, sent })
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
