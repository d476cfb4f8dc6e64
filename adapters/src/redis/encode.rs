//! A record's values to one row, and what the scripts need of it. Pure.
//!
//! A row is how many fields it sets and how many it removes (2 bytes each), where its version stands (4 bytes) and how long it is
//! (4 bytes); then, as MessagePack texts, name and value of each field that is set, and the name of each that is removed.
//! A row key is the whole key in Redis: the prefix, and the row key columns' texts with a colon between them. Where there are several,
//! their own colons and percent signs are written `%3A` and `%25`, so that different row keys never make one key.

use std::sync::Arc;

use super::{Kind, RedisConfig, pack};
use crate::{
    decode,
    sink::{Column, Encode, Mode, RowKind, encode_whole_row},
    value::{BadValue, Value},
};

/// What the configuration says of rows.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) prefix: String,
    pub(super) mode: Mode,
    pub(super) columns: Vec<Column>,
    pub(super) kinds: Vec<Kind>,
    /// Indices of the row key's columns, in its order.
    pub(super) key: Vec<usize>,
    pub(super) version: Option<usize>,
}

impl Layout {
    /// Names that are no columns are left out: the checks have refused them.
    pub(super) fn of(config: &RedisConfig) -> Self {
        let at = |name: &String| config.columns.iter().position(|(column, _)| column == name);
        let key: Vec<usize> = config.row_key.iter().filter_map(at).collect();
        let version = config.version.as_ref().and_then(at);
        let column = |(index, (name, kind)): (usize, &(String, Kind))| {
            let needed = key.contains(&index) || version == Some(index);
            Column {
                name: name.clone(),
                type_name: kind.name().to_owned(),
                nullable: !needed,
                has_default: !needed,
            }
        };
        Self {
            prefix: config.prefix.clone(),
            mode: config.mode,
            columns: config.columns.iter().enumerate().map(column).collect(),
            kinds: config.columns.iter().map(|(_, kind)| *kind).collect(),
            key,
            version,
        }
    }
}

/// Makes rows.
#[derive(Debug)]
pub(super) struct Encoder {
    layout: Arc<Layout>,
}

/// Bytes before a row's fields.
pub(super) const HEAD: usize = 12;

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
        let start = row.len();
        row.resize(start + HEAD, 0);
        let (mut set, mut removed) = (0u16, Vec::new());
        // Start and end of the values that key and version are made of.
        let mut spans = vec![(0, 0); layout.columns.len()];
        for (index, &value) in values.iter().enumerate() {
            let (in_key, is_version) = (layout.key.contains(&index), layout.version == Some(index));
            if kind == RowKind::Delete && !in_key && !is_version {
                continue;
            }
            let absent = match value {
                Value::Missing => true,
                Value::Json(json) => decode::is_null(json),
                _ => false,
            };
            if absent && (in_key || is_version) {
                let what = if in_key { "the row key" } else { "the version" };
                return Err(
                    self.bad(index, format!("is missing or null, and is {what}, which needs a value"))
                );
            }
            if value == Value::Missing {
                continue;
            }
            if absent {
                removed.push(index);
                continue;
            }
            pack::text(layout.columns[index].name.as_bytes(), row);
            let mut write = |out: &mut Vec<u8>| layout.kinds[index].put(value, is_version, out);
            spans[index] = pack::text_of(&mut write, row).map_err(|fault| self.bad(index, fault))?;
            set += 1;
        }
        for &index in &removed {
            pack::text(layout.columns[index].name.as_bytes(), row);
        }
        row_key.extend_from_slice(layout.prefix.as_bytes());
        for (place, &index) in layout.key.iter().enumerate() {
            let (from, to) = spans[index];
            if place > 0 {
                row_key.push(b':');
            }
            match layout.key.len() {
                1 => row_key.extend_from_slice(&row[from..to]),
                _ => escape(&row[from..to], row_key),
            }
        }
        let version = layout.version.map_or((0, 0), |index| spans[index]);
        let (at, length) = (version.0.saturating_sub(start) as u32, (version.1 - version.0) as u32);
        let head = &mut row[start..start + HEAD];
        head[..2].copy_from_slice(&set.to_le_bytes());
        head[2..4].copy_from_slice(&(removed.len() as u16).to_le_bytes());
        head[4..8].copy_from_slice(&at.to_le_bytes());
        head[8..].copy_from_slice(&length.to_le_bytes());
        Ok(())
    }
}

fn escape(part: &[u8], key: &mut Vec<u8>) {
    for &byte in part {
        match byte {
            b':' => key.extend_from_slice(b"%3A"),
            b'%' => key.extend_from_slice(b"%25"),
            byte => key.push(byte),
        }
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

/// An encoded row, read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a> {
    pub(super) set: u16,
    pub(super) removed: u16,
    /// Empty without versions.
    pub(super) version: &'a [u8],
    /// Names and values, as the scripts take them.
    pub(super) packed: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Rows come from [`Encoder`] only; of anything else this is none.
    pub(super) fn read(row: &'a [u8]) -> Option<Self> {
        let short = |at: usize| Some(u16::from_le_bytes(row.get(at..at + 2)?.try_into().ok()?));
        let long = |at: usize| Some(u32::from_le_bytes(row.get(at..at + 4)?.try_into().ok()?) as usize);
        let (at, length) = (long(4)?, long(8)?);
        Some(Self {
            set: short(0)?,
            removed: short(2)?,
            version: row.get(at..at.checked_add(length)?)?,
            packed: row.get(HEAD..)?,
        })
    }

    /// The field with the longest value.
    pub(super) fn longest(&self) -> Option<&'a str> {
        let mut rest = self.packed;
        let mut longest = (0, None);
        for _ in 0..self.set {
            let name = pack::take(&mut rest)?;
            let value = pack::take(&mut rest)?;
            if value.len() >= longest.0 {
                longest = (value.len(), std::str::from_utf8(name).ok());
            }
        }
        longest.1
    }
}
