//! A record's values to one row, and back to what SQLite binds. Pure.
//!
//! A row is a bitmap of the columns that are present, then one tagged value for each of them:
//! `0` null · `1` integer, 8 bytes · `2` double, 8 bytes · `3` text, length (4 bytes) and bytes · `4` blob, the same.
//! A row key is, per column, a tag and bytes that sort as SQLite's index sorts them, so that a batch in row key order
//! meets the index in its order.

use std::{cmp::Ordering, sync::Arc};

use rusqlite::types::ValueRef;

use super::probe::{Collation, Kind, Layout};
use crate::{
    decode::{self, Fault},
    sink::{Column, Encode, RowKind, encode_whole_row},
    value::{BadValue, Value},
};

const NULL: u8 = 0;
const INTEGER: u8 = 1;
const REAL: u8 = 2;
const TEXT: u8 = 3;
const BLOB: u8 = 4;

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

    /// Appends a column's value; false if its default applies.
    fn column(&self, index: usize, value: Value<'_>, row: &mut Vec<u8>) -> Result<bool, BadValue> {
        let column = &self.layout.columns[index];
        let null = match value {
            Value::Missing if column.has_default => return Ok(false),
            Value::Missing => true,
            Value::Json(json) => decode::is_null(json),
            _ => false,
        };
        if null {
            if !column.nullable {
                let missing = value == Value::Missing;
                return Err(self.bad(
                    index,
                    if missing {
                        "is needed: the column is not null and has no default"
                    } else {
                        "cannot be null"
                    },
                ));
            }
            row.push(NULL);
            return Ok(true);
        }
        put(self.layout.kinds[index], value, row).map_err(|fault| self.bad(index, fault))?;
        Ok(true)
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
        row.resize(start + layout.bitmap_bytes(), 0);
        let mut key_values = KeySpans::default();
        for (index, &value) in values.iter().enumerate() {
            let in_key = layout.key.iter().any(|key| key.column == index);
            let is_version = layout.version == Some(index);
            if kind == RowKind::Delete && !in_key && !is_version {
                continue;
            }
            let at = row.len();
            let present = self.column(index, value, row)?;
            if present {
                row[start + index / 8] |= 1 << (index % 8);
            }
            if (in_key || is_version) && (!present || row[at] == NULL) {
                let what = if in_key { "the row key" } else { "the version" };
                return Err(
                    self.bad(index, format!("is missing or null, and is {what}, which needs a value"))
                );
            }
            if in_key {
                key_values.push(index, at);
            }
        }
        if kind == RowKind::Delete && layout.key.is_empty() {
            return Err(BadValue {
                column: String::new(),
                column_type: String::new(),
                reason: "a tombstone deletes by row key, and the sink names none; set row_key".to_owned(),
            });
        }
        for key in &layout.key {
            let at = key_values.at(key.column);
            let (value, _) = take(&row[at..]);
            put_key(value, key.collation, row_key);
        }
        Ok(())
    }
}

/// Where the key columns' values stand in the row.
#[derive(Default)]
struct KeySpans {
    few: [(usize, usize); 4],
    used: usize,
    more: Vec<(usize, usize)>,
}

impl KeySpans {
    fn push(&mut self, column: usize, at: usize) {
        match self.few.get_mut(self.used) {
            Some(slot) => *slot = (column, at),
            None => self.more.push((column, at)),
        }
        self.used += 1;
    }

    /// Of a column that was pushed: the encoder pushes every key column or fails before.
    fn at(&self, column: usize) -> usize {
        let few = &self.few[..self.used.min(self.few.len())];
        few.iter().chain(&self.more).find(|(known, _)| *known == column).map_or(0, |(_, at)| *at)
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

/// Appends one value that is there and is not null.
fn put(kind: Kind, value: Value<'_>, row: &mut Vec<u8>) -> Result<(), Fault> {
    let mut scratch = String::new();
    match (kind, value) {
        (_, Value::Missing) => row.push(NULL),
        (Kind::Json { numeric }, Value::Json(json)) => put_json(json, numeric, row)?,
        (Kind::Json { .. }, _) => return Err("needs a JSON value".into()),
        (Kind::Blob, Value::Bytes(bytes)) => put_bytes(BLOB, bytes, row)?,
        (Kind::Any, Value::Bytes(bytes)) => put_bytes(BLOB, bytes, row)?,
        (Kind::Any, Value::Json(json)) => put_any(json, &mut scratch, row)?,
        (Kind::Any, Value::Text(text)) => put_text(text, row)?,
        (Kind::Boolean, Value::Json(json)) => put_integer(decode::boolean(json)?.into(), row),
        (Kind::Integer | Kind::Numeric | Kind::Any, Value::Integer(value)) => put_integer(value, row),
        (Kind::Integer | Kind::Numeric | Kind::Real, Value::Json(json)) => {
            put_number(kind, decode::number_text(json, &mut scratch)?, row)?;
        }
        (Kind::Real, Value::Integer(value)) => put_number(kind, &value.to_string(), row)?,
        (Kind::Text, Value::Integer(value)) => put_text(&value.to_string(), row)?,
        (Kind::Text | Kind::Timestamp | Kind::Any, Value::Micros(micros)) => {
            put_text(&rfc3339(micros)?, row)?
        }
        (_, Value::Json(json)) => put_parsed(kind, decode::string(json, &mut scratch)?, row)?,
        (_, Value::Text(text)) => put_parsed(kind, text, row)?,
        (_, Value::Bytes(bytes)) => {
            let text = std::str::from_utf8(bytes)
                .map_err(|bad| Fault::from(format!("is not UTF-8 from byte {} on", bad.valid_up_to())))?;
            put_parsed(kind, text, row)?;
        }
        (_, Value::Integer(_)) => return Err("cannot take an integer".into()),
        (_, Value::Micros(_)) => return Err("cannot take a time; use a TIMESTAMP or TEXT column".into()),
    }
    Ok(())
}

/// Text from a header, a key or a JSON string, as the kind reads it.
fn put_parsed(kind: Kind, text: &str, row: &mut Vec<u8>) -> Result<(), Fault> {
    match kind {
        Kind::Integer | Kind::Numeric | Kind::Real => put_number(kind, text, row),
        Kind::Boolean => {
            put_integer(decode::boolean(text)?.into(), row);
            Ok(())
        }
        Kind::Date => decode::date(text).and_then(|_| put_text(text, row)),
        Kind::Time => time_of_day(text).and_then(|()| put_text(text, row)),
        Kind::Timestamp => Instant::parse(text).and_then(|_| put_text(text, row)),
        Kind::Uuid => put_text(&hyphenated(decode::uuid(text)?), row),
        Kind::Blob => {
            row.push(BLOB);
            let at = row.len();
            row.extend_from_slice(&[0; 4]);
            decode::bytes(text, row)?;
            let length = length(row.len() - at - 4)?;
            row[at..at + 4].copy_from_slice(&length);
            Ok(())
        }
        Kind::Text | Kind::Any | Kind::Json { .. } => put_text(text, row),
    }
}

fn put_number(kind: Kind, text: &str, row: &mut Vec<u8>) -> Result<(), Fault> {
    match kind {
        Kind::Real => put_real(decode::double(text)?, row),
        Kind::Numeric => match decode::integer(text, i64::MIN, i64::MAX) {
            Ok(value) => {
                put_integer(value, row);
                Ok(())
            }
            Err(_) => put_real(decode::double(text)?, row),
        },
        _ => {
            put_integer(decode::integer(text, i64::MIN, i64::MAX)?, row);
            Ok(())
        }
    }
}

/// Raw JSON text. A column declared `JSON` has numeric affinity: a bare number would be turned into one, so it is only
/// taken if that loses nothing.
fn put_json(json: &str, numeric: bool, row: &mut Vec<u8>) -> Result<(), Fault> {
    if numeric && matches!(json.as_bytes().first(), Some(b'-' | b'0'..=b'9')) {
        return put_number(Kind::Numeric, json, row);
    }
    put_text(json, row)
}

/// A column without type keeps what it gets: an integer, a double or a text.
fn put_any(json: &str, scratch: &mut String, row: &mut Vec<u8>) -> Result<(), Fault> {
    match json.as_bytes().first() {
        Some(b'"') => put_text(decode::string(json, scratch)?, row),
        Some(b'-' | b'0'..=b'9') if json.bytes().any(|byte| matches!(byte, b'.' | b'e' | b'E')) => {
            put_real(decode::double(json)?, row)
        }
        Some(b'-' | b'0'..=b'9') => {
            put_integer(decode::integer(json, i64::MIN, i64::MAX)?, row);
            Ok(())
        }
        _ => Err(format!("needs a string or a number, got {}", decode::kind_of(json)).into()),
    }
}

fn put_integer(value: i64, row: &mut Vec<u8>) {
    row.push(INTEGER);
    row.extend_from_slice(&value.to_le_bytes());
}

fn put_real(value: f64, row: &mut Vec<u8>) -> Result<(), Fault> {
    if value.is_nan() {
        return Err("is NaN, which SQLite would keep as null".into());
    }
    row.push(REAL);
    row.extend_from_slice(&value.to_le_bytes());
    Ok(())
}

fn put_text(text: &str, row: &mut Vec<u8>) -> Result<(), Fault> {
    if text.as_bytes().contains(&0) {
        return Err(
            "holds a NUL character, at which SQLite's functions would cut it; use a BLOB column".into()
        );
    }
    put_bytes(TEXT, text.as_bytes(), row)
}

fn put_bytes(tag: u8, bytes: &[u8], row: &mut Vec<u8>) -> Result<(), Fault> {
    row.push(tag);
    row.extend_from_slice(&length(bytes.len())?);
    row.extend_from_slice(bytes);
    Ok(())
}

/// SQLite's own bound is below it (1,000,000,000 bytes): it refuses the row then.
fn length(bytes: usize) -> Result<[u8; 4], Fault> {
    u32::try_from(bytes).map(u32::to_le_bytes).map_err(|_| "is longer than 4294967295 bytes".into())
}

/// The value at the front of `bytes`, and its length there.
///
/// Rows come from [`Encoder`] only; anything else reads as null.
pub(super) fn take(bytes: &[u8]) -> (ValueRef<'_>, usize) {
    let eight = || -> [u8; 8] { bytes.get(1..9).and_then(|eight| eight.try_into().ok()).unwrap_or_default() };
    let long = || -> &[u8] {
        let length = bytes.get(1..5).and_then(|four| four.try_into().ok()).map_or(0, u32::from_le_bytes);
        bytes.get(5..5 + length as usize).unwrap_or_default()
    };
    match bytes.first() {
        Some(&INTEGER) => (ValueRef::Integer(i64::from_le_bytes(eight())), 9),
        Some(&REAL) => (ValueRef::Real(f64::from_le_bytes(eight())), 9),
        Some(&TEXT) => (ValueRef::Text(long()), 5 + long().len()),
        Some(&BLOB) => (ValueRef::Blob(long()), 5 + long().len()),
        _ => (ValueRef::Null, 1),
    }
}

/// Appends the canonical form of one key column: equal for SQLite, equal here (`1` and `1.0`, and what the collation calls
/// equal), and in SQLite's order as far as that is cheap.
fn put_key(value: ValueRef<'_>, collation: Collation, key: &mut Vec<u8>) {
    match value {
        ValueRef::Null => key.push(NULL),
        ValueRef::Integer(value) => put_key_integer(value, key),
        ValueRef::Real(value) => match exact_integer(value) {
            Some(value) => put_key_integer(value, key),
            None => {
                key.push(REAL);
                let bits = value.to_bits();
                let ordered = if bits >> 63 == 1 { !bits } else { bits | 1 << 63 };
                key.extend_from_slice(&ordered.to_be_bytes());
            }
        },
        ValueRef::Text(text) => {
            key.push(TEXT);
            match collation {
                Collation::Binary => key.extend_from_slice(text),
                Collation::NoCase => key.extend(text.iter().map(u8::to_ascii_lowercase)),
                Collation::RTrim => {
                    let end = text.iter().rposition(|byte| *byte != b' ').map_or(0, |at| at + 1);
                    key.extend_from_slice(&text[..end]);
                }
            }
            key.push(0);
        }
        ValueRef::Blob(blob) => {
            key.push(BLOB);
            for &byte in blob {
                key.push(byte);
                if byte == 0 {
                    key.push(0xff);
                }
            }
            key.extend_from_slice(&[0, 0]);
        }
    }
}

fn put_key_integer(value: i64, key: &mut Vec<u8>) {
    key.push(INTEGER);
    key.extend_from_slice(&(value as u64 ^ 1 << 63).to_be_bytes());
}

/// The integer that a double is, if it is one.
fn exact_integer(value: f64) -> Option<i64> {
    const EDGE: f64 = 9_223_372_036_854_775_808.0;
    (value.fract() == 0.0 && (-EDGE..EDGE).contains(&value)).then_some(value as i64)
}

/// Which of two versions is higher, as SQLite compares them (binary collation; times by their instant).
pub(super) fn compare_versions(kind: Kind, a: ValueRef<'_>, b: ValueRef<'_>) -> Ordering {
    match (a, b) {
        (ValueRef::Integer(a), ValueRef::Integer(b)) => a.cmp(&b),
        (ValueRef::Real(a), ValueRef::Real(b)) => a.partial_cmp(&b).unwrap_or(Ordering::Equal),
        (ValueRef::Integer(a), ValueRef::Real(b)) => integer_with_real(a, b),
        (ValueRef::Real(a), ValueRef::Integer(b)) => integer_with_real(b, a).reverse(),
        (ValueRef::Text(a), ValueRef::Text(b)) if kind == Kind::Timestamp => {
            let instant = |text| std::str::from_utf8(text).ok().and_then(|text| Instant::parse(text).ok());
            instant(a).cmp(&instant(b))
        }
        (ValueRef::Text(a), ValueRef::Text(b)) | (ValueRef::Blob(a), ValueRef::Blob(b)) => a.cmp(b),
        (a, b) => rank(a).cmp(&rank(b)),
    }
}

fn integer_with_real(integer: i64, real: f64) -> Ordering {
    match exact_integer(real.trunc()) {
        Some(whole) => {
            integer.cmp(&whole).then_with(|| 0.0.partial_cmp(&real.fract()).unwrap_or(Ordering::Equal))
        }
        None if real > 0.0 => Ordering::Less,
        None => Ordering::Greater,
    }
}

fn rank(value: ValueRef<'_>) -> u8 {
    match value {
        ValueRef::Null => 0,
        ValueRef::Integer(_) | ValueRef::Real(_) => 1,
        ValueRef::Text(_) => 2,
        ValueRef::Blob(_) => 3,
    }
}

/// A point in time, to any number of decimals. A time without offset is UTC, as SQLite's own functions take it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Instant {
    micros: i64,
    /// Decimals behind the sixth, without zeros at the end.
    finer: String,
}

impl Instant {
    fn parse(text: &str) -> Result<Self, Fault> {
        let (coarse, finer) = split_fraction(text);
        let micros = decode::timestamp(&coarse)
            .or_else(|fault| decode::local_timestamp(&coarse).map_err(|_| fault))?;
        Ok(Self { micros, finer: finer.trim_end_matches('0').to_owned() })
    }

    /// Sorts as the instants do.
    fn sortable(&self) -> String {
        format!("{:020}.{}", (self.micros as u64) ^ 1 << 63, self.finer)
    }
}

fn time_of_day(text: &str) -> Result<(), Fault> {
    decode::time(&split_fraction(text).0).map(|_| ())
}

/// Takes the decimals behind the sixth out of the text.
fn split_fraction(text: &str) -> (std::borrow::Cow<'_, str>, &str) {
    let Some(point) = text.find('.') else { return (text.into(), "") };
    let digits = text[point + 1..].bytes().take_while(u8::is_ascii_digit).count();
    if digits <= 6 {
        return (text.into(), "");
    }
    let (cut, end) = (point + 7, point + 1 + digits);
    (format!("{}{}", &text[..cut], &text[end..]).into(), &text[cut..end])
}

/// The SQL function `oncegate_instant`: a sortable form of a time, null of null, an error of anything else.
pub(super) fn instant(value: ValueRef<'_>) -> rusqlite::Result<Option<String>> {
    if value == ValueRef::Null {
        return Ok(None);
    }
    let text = value.as_str().map_err(|_| not_a_time())?;
    Instant::parse(text).map(|instant| Some(instant.sortable())).map_err(|_| not_a_time())
}

/// What `oncegate_instant` says of a version that is no time.
pub(super) const NOT_A_TIME: &str = "the version that is there is not a time as RFC 3339 writes it";

fn not_a_time() -> rusqlite::Error {
    rusqlite::Error::UserFunctionError(NOT_A_TIME.into())
}

fn rfc3339(micros: i64) -> Result<String, Fault> {
    jiff::Timestamp::from_microsecond(micros)
        .map(|time| format!("{time:.6}"))
        .map_err(|_| "is a time outside of the years -9999 to 9999".into())
}

fn hyphenated(uuid: [u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        for nibble in [byte >> 4, byte & 15] {
            text.extend(char::from_digit(nibble.into(), 16));
        }
    }
    text
}
