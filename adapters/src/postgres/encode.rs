//! From a record's values to one binary row: [`Encoder`]. Pure; no allocation for the common types.
//!
//! | column | takes |
//! | --- | --- |
//! | `smallint` `integer` `bigint` | a JSON number that is an integer in any form, or a string that holds one |
//! | `real` `double precision` | a number that the type prints back with the same digits, see [`decode::double`] |
//! | `numeric` | a number, or a string that holds one (also `NaN`, `Infinity`); digits are never rounded |
//! | `text` `varchar` `char` | a string without NUL, within the column's length |
//! | `boolean` | `true`, `false` |
//! | `bytea` | a string: base64, or `\x` and hexadecimal digits |
//! | `uuid` `date` `time` `timestamp` `timestamptz` `inet`, enums | a string; times as in RFC 3339, no finer than the column keeps |
//! | `json` `jsonb` | any JSON, as it stands |
//! | arrays | JSON arrays, rectangular if nested |
//!
//! A member that is missing leaves the column to its default, or to null if it has none.

use std::net::IpAddr;

use super::{
    canonical, numeric,
    row::{self, Shape},
    types::Kind,
};
use crate::{
    decode::{self, Fault},
    sink::{Column, Encode, RowKind, encode_whole_row},
    value::{BadValue, Value},
};

/// Canonical bytes of a version are bounded, since tombstones keep them.
const MAX_VERSION: usize = 4096;

/// One column as the encoder needs it.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) column: Column,
    pub(super) kind: Kind,
    /// Of the base type, and of its array type: for statements' parameters.
    pub(super) array_oid: u32,
    pub(super) element_oid: u32,
    /// Name of the base type without bounds, for temporary tables.
    pub(super) base_type: String,
}

/// Makes rows for one table and one list of columns.
#[derive(Debug)]
pub(super) struct Encoder {
    columns: Vec<Column>,
    targets: Vec<Target>,
    /// Per column: its bit in the shape, if it has a default.
    default_bit: Vec<Option<u32>>,
    /// Indices of the row key columns, in the route's order.
    row_key: Vec<usize>,
    version: Option<usize>,
}

impl Encoder {
    /// `row_key` and `version` index `targets`; at most 64 targets have defaults.
    pub(super) fn new(targets: Vec<Target>, row_key: Vec<usize>, version: Option<usize>) -> Encoder {
        let mut bit = 0;
        let default_bit = targets
            .iter()
            .map(|target| {
                target.column.has_default.then(|| {
                    bit += 1;
                    bit - 1
                })
            })
            .collect();
        let columns = targets.iter().map(|target| target.column.clone()).collect();
        Encoder { columns, targets, default_bit, row_key, version }
    }

    pub(super) fn targets(&self) -> &[Target] {
        &self.targets
    }

    pub(super) fn row_key(&self) -> &[usize] {
        &self.row_key
    }

    pub(super) fn version(&self) -> Option<usize> {
        self.version
    }

    /// Indices of the columns that a write of `shape` holds.
    pub(super) fn present(&self, shape: Shape) -> Vec<usize> {
        (0..self.targets.len())
            .filter(|&index| self.default_bit[index].is_none_or(|bit| shape & (1 << bit) == 0))
            .collect()
    }

    fn bad(&self, index: usize, fault: Fault) -> BadValue {
        self.columns[index].bad(fault)
    }

    fn write(&self, values: &[Value<'_>], row: &mut Vec<u8>, row_key: &mut Vec<u8>) -> Result<(), BadValue> {
        let mut shape: Shape = 0;
        let mut fields = self.targets.len();
        for (value, bit) in values.iter().zip(&self.default_bit) {
            if let (Value::Missing, Some(bit)) = (value, bit) {
                shape |= 1 << bit;
                fields -= 1;
            }
        }
        if fields == 0 {
            let columns: Vec<&str> = self.columns.iter().map(|column| column.name.as_str()).collect();
            return Err(BadValue {
                column: columns.join(", "),
                column_type: "any".into(),
                reason: "the record has none of the columns".into(),
            });
        }
        let start = row::begin(row, RowKind::Write, shape, fields);
        for (index, value) in values.iter().enumerate() {
            if matches!(value, Value::Missing) && self.default_bit[index].is_some() {
                if self.row_key.contains(&index) || self.version == Some(index) {
                    return Err(
                        self.bad(index, "is needed: it belongs to the row key or is the version".into())
                    );
                }
                continue;
            }
            self.field(index, value, row)?;
        }
        row::end_tuple(row, start);
        if self.row_key.is_empty() && self.version.is_none() {
            return Ok(());
        }
        // The tuple is walked once more only where it is needed.
        let tuple_end = row.len();
        let tuple_start = start + 5 + if shape == 0 { 0 } else { 8 } + 2;
        for &index in &self.row_key {
            let span = self.span(&row[tuple_start..tuple_end], shape, index);
            canonical::append(&self.targets[index].kind, &row[tuple_start..][span], row_key);
        }
        if let Some(index) = self.version {
            let span = self.span(&row[tuple_start..tuple_end], shape, index);
            let span = tuple_start + span.start..tuple_start + span.end;
            self.append_version(index, span, row)?;
        }
        Ok(())
    }

    /// Where the bytes of column `index` lie in a tuple of `shape`.
    fn span(&self, fields: &[u8], shape: Shape, index: usize) -> std::ops::Range<usize> {
        let mut at = 0;
        for before in 0..=index {
            if self.default_bit[before].is_some_and(|bit| shape & (1 << bit) != 0) {
                continue;
            }
            let length = fields.get(at..at + 4).map_or(0, |length| {
                i32::from_be_bytes([length[0], length[1], length[2], length[3]]).max(0) as usize
            });
            if before == index {
                return at + 4..at + 4 + length;
            }
            at += 4 + length;
        }
        0..0
    }

    fn append_version(
        &self,
        index: usize,
        span: std::ops::Range<usize>,
        row: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        let mut version = Vec::with_capacity(span.len() + 8);
        canonical::append(&self.targets[index].kind, &row[span], &mut version);
        if version.len() > MAX_VERSION {
            return Err(self.bad(index, format!("a version has at most {MAX_VERSION} bytes").into()));
        }
        row.extend_from_slice(&version);
        Ok(())
    }

    fn delete(&self, values: &[Value<'_>], row: &mut Vec<u8>, row_key: &mut Vec<u8>) -> Result<(), BadValue> {
        if self.row_key.is_empty() {
            return Err(BadValue {
                column: String::new(),
                column_type: String::new(),
                reason: "a delete needs a row_key, and the route names none".into(),
            });
        }
        let start =
            row::begin(row, RowKind::Delete, 0, self.row_key.len() + usize::from(self.version.is_some()));
        for &index in &self.row_key {
            let at = row.len() + 4;
            self.field(index, &values[index], row)?;
            canonical::append(&self.targets[index].kind, &row[at..], row_key);
        }
        let at = row.len() + 4;
        if let Some(index) = self.version {
            self.field(index, &values[index], row)?;
        }
        row::end_tuple(row, start);
        match self.version {
            Some(index) => self.append_version(index, at..row.len(), row),
            None => Ok(()),
        }
    }

    /// Appends one field with its length.
    fn field(&self, index: usize, value: &Value<'_>, row: &mut Vec<u8>) -> Result<(), BadValue> {
        let target = &self.targets[index];
        let at = row.len();
        row.extend_from_slice(&[0; 4]);
        let null = match value {
            Value::Missing => true,
            Value::Json(json) => decode::is_null(json),
            _ => false,
        };
        if null {
            let needed = self.row_key.contains(&index) || self.version == Some(index);
            if !target.column.nullable || needed {
                return Err(self.bad(
                    index,
                    match (needed, value) {
                        (true, _) => "is needed: it belongs to the row key or is the version",
                        (false, Value::Missing) => "is needed: the column is not null and has no default",
                        (false, _) => "cannot be null",
                    }
                    .into(),
                ));
            }
            row[at..].copy_from_slice(&(-1i32).to_be_bytes());
            return Ok(());
        }
        append_value(&target.kind, value, row).map_err(|fault| self.bad(index, fault))?;
        let length = i32::try_from(row.len() - at - 4).map_err(|_| self.bad(index, TOO_LARGE.into()))?;
        row[at..at + 4].copy_from_slice(&length.to_be_bytes());
        Ok(())
    }
}

const TOO_LARGE: &str = "has more than 2147483647 bytes";

impl Encode for Encoder {
    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn encode(
        &self,
        kind: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        encode_whole_row(&self.columns, values, row, row_key, |row, row_key| match kind {
            RowKind::Write => self.write(values, row, row_key),
            RowKind::Delete => self.delete(values, row, row_key),
        })
    }
}

/// Appends the field of a value that is not null, without its length.
fn append_value(kind: &Kind, value: &Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    match *value {
        Value::Missing => Err("is missing".into()),
        Value::Json(json) => append_json(kind, json, out),
        Value::Text(text) => match kind {
            Kind::Json | Kind::Jsonb => {
                let json =
                    serde_json::to_string(text).map_err(|_| Fault::Borrowed("cannot be written as JSON"))?;
                append_json(kind, &json, out)
            }
            Kind::Array(..) => Err("needs a JSON array, got text".into()),
            _ => append_text(kind, text, out),
        },
        Value::Bytes(bytes) => match kind {
            Kind::Bytea => {
                out.extend_from_slice(bytes);
                Ok(())
            }
            _ => {
                let text = std::str::from_utf8(bytes)
                    .map_err(|_| Fault::Borrowed("needs text, got bytes that are not UTF-8"))?;
                append_value(kind, &Value::Text(text), out)
            }
        },
        Value::Integer(value) => match kind {
            Kind::Int8 => {
                out.extend_from_slice(&value.to_be_bytes());
                Ok(())
            }
            Kind::Json | Kind::Jsonb => append_json(kind, &value.to_string(), out),
            Kind::Array(..) => Err("needs a JSON array, got an integer".into()),
            _ => append_text(kind, &value.to_string(), out),
        },
        Value::Micros(micros) => append_micros(kind, micros, out),
    }
}

/// A time from outside JSON: a time column keeps it, a `bigint` gets the microseconds, text gets RFC 3339.
fn append_micros(kind: &Kind, micros: i64, out: &mut Vec<u8>) -> Result<(), Fault> {
    match kind {
        Kind::TimestampTz(digits) | Kind::Timestamp(digits) => append_timestamp(micros, *digits, out),
        Kind::Int8 => {
            out.extend_from_slice(&micros.to_be_bytes());
            Ok(())
        }
        Kind::Text(_) | Kind::Json | Kind::Jsonb => {
            let time = jiff::Timestamp::from_microsecond(micros)
                .map_err(|_| Fault::Borrowed("is a time outside the years -9999 to 9999"))?;
            append_value(kind, &Value::Text(&time.to_string()), out)
        }
        _ => Err("cannot hold a time; use timestamptz, timestamp, bigint (microseconds) or text".into()),
    }
}

fn append_json(kind: &Kind, json: &str, out: &mut Vec<u8>) -> Result<(), Fault> {
    let mut scratch = String::new();
    match kind {
        Kind::Bool => {
            out.push(u8::from(decode::boolean(json)?));
            Ok(())
        }
        Kind::Int2 | Kind::Int4 | Kind::Int8 | Kind::Float4 | Kind::Float8 | Kind::Numeric(_) => {
            append_text(kind, decode::number_text(json, &mut scratch)?, out)
        }
        Kind::Json | Kind::Jsonb => {
            check_escapes(json)?;
            if *kind == Kind::Jsonb {
                out.push(1);
            }
            out.extend_from_slice(json.as_bytes());
            Ok(())
        }
        Kind::Array(element, oid) => append_array(element, *oid, json, out),
        Kind::Text(limit) => match plain_string(json) {
            Some(text) => append_characters(text, *limit, out),
            None => append_escaped(json, *limit, out),
        },
        _ => append_text(kind, decode::string(json, &mut scratch)?, out),
    }
}

/// The server cannot keep `\u0000` or a lone surrogate.
fn check_escapes(json: &str) -> Result<(), Fault> {
    if !json.as_bytes().contains(&b'\\') {
        return Ok(());
    }
    let mut scratch = String::new();
    let mut rest = json;
    while let Some(at) = rest.find('"') {
        let inside = &rest.as_bytes()[at + 1..];
        let mut length = 0;
        while inside.get(length).is_some_and(|byte| *byte != b'"') {
            length += if inside[length] == b'\\' { 2 } else { 1 };
        }
        let end = (at + length + 2).min(rest.len());
        let text = rest.get(at..end).ok_or(Fault::Borrowed("holds an invalid escape"))?;
        if decode::string(text, &mut scratch)?.contains('\0') {
            return Err("holds \\u0000, which Postgres cannot keep".into());
        }
        rest = rest.get(end..).unwrap_or("");
    }
    Ok(())
}

/// Appends the field of a text that stands for a value of `kind`.
fn append_text(kind: &Kind, text: &str, out: &mut Vec<u8>) -> Result<(), Fault> {
    match kind {
        Kind::Bool => out.push(u8::from(decode::boolean(text)?)),
        Kind::Int2 => {
            let value = decode::integer(text, i16::MIN.into(), i16::MAX.into())?;
            out.extend_from_slice(&(value as i16).to_be_bytes());
        }
        Kind::Int4 => {
            let value = decode::integer(text, i32::MIN.into(), i32::MAX.into())?;
            out.extend_from_slice(&(value as i32).to_be_bytes());
        }
        Kind::Int8 => out.extend_from_slice(&decode::integer(text, i64::MIN, i64::MAX)?.to_be_bytes()),
        Kind::Float4 => out.extend_from_slice(&decode::single(text)?.to_be_bytes()),
        Kind::Float8 => out.extend_from_slice(&decode::double(text)?.to_be_bytes()),
        Kind::Numeric(bounds) => numeric::append(text, *bounds, out)?,
        Kind::Text(limit) => append_string(text, *limit, out)?,
        Kind::Char(None) => append_string(text, None, out)?,
        Kind::Char(limit) => append_string(text.trim_end_matches(' '), *limit, out)?,
        Kind::Enum(labels) => {
            if !labels.iter().any(|label| label == text) {
                return Err(format!("is none of the enum's labels: {}", labels.join(", ")).into());
            }
            out.extend_from_slice(text.as_bytes());
        }
        Kind::Uuid => out.extend_from_slice(&decode::uuid(text)?),
        Kind::Bytea => decode::bytes(text, out)?,
        Kind::Date => append_date(text, out)?,
        Kind::Time(digits) => {
            let micros = decode::time(text)?;
            check_digits(micros, *digits)?;
            out.extend_from_slice(&micros.to_be_bytes());
        }
        Kind::Timestamp(digits) => match infinity(text) {
            Some(far) => out.extend_from_slice(&far.to_be_bytes()),
            None => append_timestamp(decode::local_timestamp(text)?, *digits, out)?,
        },
        Kind::TimestampTz(digits) => match infinity(text) {
            Some(far) => out.extend_from_slice(&far.to_be_bytes()),
            None => append_timestamp(decode::timestamp(text)?, *digits, out)?,
        },
        Kind::Inet => append_inet(text, out)?,
        Kind::Json | Kind::Jsonb | Kind::Array(..) => append_json(kind, text, out)?,
    }
    Ok(())
}

const HOLDS_NUL: &str = "holds a NUL character, which Postgres cannot keep";

fn append_string(text: &str, limit: Option<usize>, out: &mut Vec<u8>) -> Result<(), Fault> {
    if text.as_bytes().contains(&0) {
        return Err(HOLDS_NUL.into());
    }
    append_characters(text, limit, out)
}

/// A JSON string with escapes.
fn append_escaped(json: &str, limit: Option<usize>, out: &mut Vec<u8>) -> Result<(), Fault> {
    let start = out.len();
    decode::append_string(json, out)?;
    let text = &out[start..];
    if text.contains(&0) {
        return Err(HOLDS_NUL.into());
    }
    // Each character has one byte that does not go on from another.
    let characters = || text.iter().filter(|byte| **byte & 0xc0 != 0x80).count();
    match limit {
        Some(limit) if text.len() > limit && characters() > limit => {
            Err(format!("has more than {limit} characters").into())
        }
        _ => Ok(()),
    }
}

/// What stands between the quotes, if it stands for itself: no escape, no NUL.
fn plain_string(json: &str) -> Option<&str> {
    let inner = json.strip_prefix('"')?.strip_suffix('"')?;
    // Without a way out of the loop it becomes a few wide instructions.
    let special = inner.bytes().fold(false, |special, byte| special | (byte == b'\\') | (byte == 0));
    (!special).then_some(inner)
}

fn append_characters(text: &str, limit: Option<usize>, out: &mut Vec<u8>) -> Result<(), Fault> {
    if let Some(limit) = limit
        && text.len() > limit
        && text.chars().count() > limit
    {
        return Err(format!("has more than {limit} characters").into());
    }
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

fn infinity(text: &str) -> Option<i64> {
    match text {
        "infinity" => Some(i64::MAX),
        "-infinity" => Some(i64::MIN),
        _ => None,
    }
}

/// 2000-01-01 in days and microseconds since 1970-01-01: where the server counts from.
const EPOCH_DAYS: i64 = 10_957;
const EPOCH_MICROS: i64 = EPOCH_DAYS * 86_400_000_000;

fn append_date(text: &str, out: &mut Vec<u8>) -> Result<(), Fault> {
    // 4713-11-24 BC to 5874897-12-31, counted from 2000.
    const RANGE: std::ops::RangeInclusive<i64> = -2_451_545..=2_145_031_948;
    let days = match infinity(text) {
        Some(i64::MAX) => i64::from(i32::MAX),
        Some(_) => i64::from(i32::MIN),
        None => {
            let days = decode::date(text)? - EPOCH_DAYS;
            if !RANGE.contains(&days) {
                return Err("is outside -4713-11-24 to 5874897-12-31".into());
            }
            days
        }
    };
    out.extend_from_slice(&(days as i32).to_be_bytes());
    Ok(())
}

fn append_timestamp(micros: i64, digits: u32, out: &mut Vec<u8>) -> Result<(), Fault> {
    // 4713-11-24 BC to 294276-12-31, counted from 2000.
    const RANGE: std::ops::Range<i64> = -211_813_488_000_000_000..9_223_371_331_200_000_000;
    check_digits(micros, digits)?;
    match micros.checked_sub(EPOCH_MICROS).filter(|micros| RANGE.contains(micros)) {
        Some(micros) => {
            out.extend_from_slice(&micros.to_be_bytes());
            Ok(())
        }
        None => Err("is outside -4713-11-24 to 294276-12-31".into()),
    }
}

/// A column of `time(3)` would round: refuse what it cannot keep.
fn check_digits(micros: i64, digits: u32) -> Result<(), Fault> {
    if digits < 6 && micros % 10i64.pow(6 - digits) != 0 {
        return Err(format!("has more than {digits} digits behind the second").into());
    }
    Ok(())
}

fn append_inet(text: &str, out: &mut Vec<u8>) -> Result<(), Fault> {
    let bad = || Fault::Borrowed("needs an IP address, with or without /bits");
    let (address, bits) = match text.split_once('/') {
        Some((address, bits)) => (address, Some(bits.parse::<u8>().map_err(|_| bad())?)),
        None => (text, None),
    };
    let (family, full, octets) = match address.parse::<IpAddr>().map_err(|_| bad())? {
        IpAddr::V4(address) => (2, 32, address.octets().to_vec()),
        IpAddr::V6(address) => (3, 128, address.octets().to_vec()),
    };
    let bits = bits.unwrap_or(full);
    if bits > full {
        return Err(format!("has more than {full} bits in its mask").into());
    }
    out.extend_from_slice(&[family, bits, 0, octets.len() as u8]);
    out.extend_from_slice(&octets);
    Ok(())
}

/// Dimensions that the server allows.
const MAX_DIMENSIONS: usize = 6;

fn append_array(element: &Kind, oid: u32, json: &str, out: &mut Vec<u8>) -> Result<(), Fault> {
    let mut shape = ArrayShape { sizes: Vec::new(), nulls: false, depth: None };
    let mut elements = Vec::new();
    shape.append(element, json, 0, &mut elements)?;
    if shape.sizes.contains(&0) {
        if shape.sizes.len() > 1 {
            return Err("has an empty array inside another, which Postgres cannot keep".into());
        }
        shape.sizes.clear();
    }
    out.extend_from_slice(&(shape.sizes.len() as i32).to_be_bytes());
    out.extend_from_slice(&i32::from(shape.nulls).to_be_bytes());
    out.extend_from_slice(&oid.to_be_bytes());
    for size in &shape.sizes {
        let size = i32::try_from(*size).map_err(|_| Fault::Borrowed("has too many elements"))?;
        out.extend_from_slice(&size.to_be_bytes());
        out.extend_from_slice(&1i32.to_be_bytes());
    }
    out.extend_from_slice(&elements);
    Ok(())
}

struct ArrayShape {
    /// Elements per dimension, from the outside in.
    sizes: Vec<usize>,
    nulls: bool,
    /// How deep the elements stand, once one is seen.
    depth: Option<usize>,
}

impl ArrayShape {
    fn append(&mut self, kind: &Kind, json: &str, depth: usize, out: &mut Vec<u8>) -> Result<(), Fault> {
        if !json.starts_with('[') {
            return Err(format!("needs an array, got {}", decode::kind_of(json)).into());
        }
        if depth == MAX_DIMENSIONS {
            return Err(format!("has more than {MAX_DIMENSIONS} dimensions").into());
        }
        let items: Vec<&serde_json::value::RawValue> =
            serde_json::from_str(json).map_err(|_| Fault::Borrowed("is not a valid JSON array"))?;
        match self.sizes.get(depth) {
            None => self.sizes.push(items.len()),
            Some(size) if *size != items.len() => return Err("has inner arrays of unequal length".into()),
            Some(_) => {}
        }
        // An element of a json array may itself be an array: such a column has one dimension here.
        let nests = !matches!(kind, Kind::Json | Kind::Jsonb);
        for item in items {
            let item = item.get();
            if nests && item.starts_with('[') {
                if self.depth.is_some_and(|elements| elements <= depth) {
                    return Err("mixes arrays and plain elements".into());
                }
                self.append(kind, item, depth + 1, out)?;
                continue;
            }
            if *self.depth.get_or_insert(depth) != depth || self.sizes.len() > depth + 1 {
                return Err("mixes arrays and plain elements".into());
            }
            if decode::is_null(item) {
                self.nulls = true;
                out.extend_from_slice(&(-1i32).to_be_bytes());
                continue;
            }
            let at = out.len();
            out.extend_from_slice(&[0; 4]);
            append_json(kind, item, out)?;
            let length = i32::try_from(out.len() - at - 4).map_err(|_| Fault::Borrowed(TOO_LARGE))?;
            out[at..at + 4].copy_from_slice(&length.to_be_bytes());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
