//! A record's values to one row. Pure.
//!
//! A row is: the layout's tag (4 bytes); the version (16 bytes), if there is one; the length (4 bytes) and the bytes of what decides its partition; the row as
//! `RowBinaryWithDefaults`, of which the token, if the table has a column for it, is still to come.

use std::sync::Arc;

use super::{layout::Layout, types::Kind, values};
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
        if kind == RowKind::Delete && layout.deleted.is_none() {
            return Err(BadValue {
                column: String::new(),
                column_type: "a row".to_owned(),
                reason: "the table has no place for a delete; use ReplacingMergeTree(version, is_deleted) with mode = \
                         \"upsert-if-newer\""
                    .to_owned(),
            });
        }
        let partition = layout.partition.as_ref().map_or(&[][..], |partition| &partition.columns);
        let mut spans = Vec::with_capacity(values.len());
        let mut sent = Vec::new();
        for (index, &value) in values.iter().enumerate() {
            let in_key = layout.key.contains(&index);
            let is_version = layout.version == Some(index);
            let needed = match (in_key, is_version, partition.contains(&index)) {
                (true, ..) => Some("the row key"),
                (_, true, _) => Some("the version"),
                (.., true) => Some("the partition key"),
                _ => None,
            };
            if kind == RowKind::Delete && !in_key && !is_version {
                sent.push(1);
                spans.push(sent.len()..sent.len());
                continue;
            }
            let column = &layout.columns[index];
            if value == Value::Missing {
                if let Some(what) = needed {
                    return Err(
                        self.bad(index, format!("is missing, and is part of {what}, which needs a value"))
                    );
                }
                if !column.has_default && !column.nullable {
                    return Err(self.bad(index, "is needed: the column has no default"));
                }
                // Its default, or null.
                sent.push(1);
                spans.push(sent.len()..sent.len());
                continue;
            }
            if matches!(value, Value::Json(json) if decode::is_null(json))
                && let Some(what) = needed
            {
                return Err(self.bad(index, format!("is null, and is part of {what}, which needs a value")));
            }
            sent.push(0);
            let start = sent.len();
            values::put(&layout.kinds[index], value, &mut sent).map_err(|fault| self.bad(index, fault))?;
            spans.push(start..sent.len());
        }
        row.extend_from_slice(&layout.tag.to_le_bytes());
        if let Some(version) = layout.version {
            let number = version_of(&layout.kinds[version], &sent[spans[version].clone()]);
            row.extend_from_slice(&number.to_le_bytes());
        }
        let length: usize = partition.iter().map(|&index| spans[index].len()).sum();
        let length =
            u32::try_from(length).map_err(|_| self.bad(partition[0], "is too long for a partition key"))?;
        row.extend_from_slice(&length.to_le_bytes());
        for &index in partition {
            row.extend_from_slice(&sent[spans[index].clone()]);
        }
        for &index in &layout.key {
            row_key.extend_from_slice(&sent[spans[index].clone()]);
        }
        row.extend_from_slice(&sent);
        if layout.deleted.is_some() {
            row.extend_from_slice(&[0, u8::from(kind == RowKind::Delete)]);
        }
        Ok(())
    }
}

/// The version's bytes as a number that is ordered as ClickHouse orders it.
fn version_of(kind: &Kind, bytes: &[u8]) -> i128 {
    let signed = matches!(kind, Kind::Int { signed: true, .. } | Kind::DateTime64(_) | Kind::Date32);
    let fill = if signed && bytes.last().is_some_and(|top| top & 0x80 != 0) { 0xff } else { 0 };
    let mut number = [fill; 16];
    let length = bytes.len().min(16);
    number[..length].copy_from_slice(&bytes[..length]);
    i128::from_le_bytes(number)
}

/// A row taken apart again.
pub(super) struct Taken<'a> {
    pub(super) version: Option<i128>,
    /// What decides the partition.
    pub(super) partition: &'a [u8],
    /// What is sent.
    pub(super) sent: &'a [u8],
}

/// As the encoder made it; none if it was made for another table.
pub(super) fn take<'a>(layout: &Layout, row: &'a [u8]) -> Option<Taken<'a>> {
    let (tag, row) = row.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*tag) != layout.tag {
        return None;
    }
    let (version, row) = match layout.version {
        Some(_) => {
            let (version, rest) = row.split_first_chunk::<16>()?;
            (Some(i128::from_le_bytes(*version)), rest)
        }
        None => (None, row),
    };
    let (length, rest) = row.split_first_chunk::<4>()?;
    let (partition, sent) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    Some(Taken { version, partition, sent })
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
