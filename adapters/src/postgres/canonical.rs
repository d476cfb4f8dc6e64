//! Canonical bytes of row keys and versions, made from a value's binary field: equal values have equal bytes, and bytes
//! sort as the values do (text as under collation `C`).
//!
//! **Do not change:** tombstones keep these bytes in the sink.

use super::types::Kind;

/// Appends the canonical bytes of `field` (without its length), a value of `kind`, that another value may follow.
pub(super) fn append(kind: &Kind, field: &[u8], out: &mut Vec<u8>) {
    match kind {
        Kind::Int2
        | Kind::Int4
        | Kind::Int8
        | Kind::Date
        | Kind::Time(_)
        | Kind::Timestamp(_)
        | Kind::TimestampTz(_) => {
            out.extend_from_slice(&((signed(field) as u64) ^ (1 << 63)).to_be_bytes());
        }
        Kind::Bool | Kind::Uuid => out.extend_from_slice(field),
        Kind::Char(_) => append_text(field.trim_ascii_end_spaces(), out),
        Kind::Text(_) | Kind::Enum(_) => append_text(field, out),
        Kind::Bytea => append_bytes(field, out),
        Kind::Numeric(_) => append_numeric(field, out),
        Kind::Float4 => {
            append_double(field.try_into().map_or(0.0, |bits| f64::from(f32::from_be_bytes(bits))), out)
        }
        Kind::Float8 => append_double(field.try_into().map_or(0.0, f64::from_be_bytes), out),
        // Never in a row key or a version (`Kind::can_be_row_key`, `Kind::can_be_version`).
        Kind::Json | Kind::Jsonb | Kind::Inet | Kind::Array(..) => append_bytes(field, out),
    }
}

trait TrimSpaces {
    fn trim_ascii_end_spaces(&self) -> &[u8];
}

impl TrimSpaces for [u8] {
    /// Only spaces: that is what the server ignores in `char(n)`.
    fn trim_ascii_end_spaces(&self) -> &[u8] {
        let kept = self.iter().rposition(|byte| *byte != b' ').map_or(0, |at| at + 1);
        &self[..kept]
    }
}

fn signed(field: &[u8]) -> i64 {
    let mut bytes = [if field.first().is_some_and(|first| first & 0x80 != 0) { 0xff } else { 0 }; 8];
    let length = field.len().min(8);
    bytes[8 - length..].copy_from_slice(&field[..length]);
    i64::from_be_bytes(bytes)
}

/// Text holds no zero byte, so one ends it.
fn append_text(text: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(text);
    out.push(0);
}

fn append_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    for &byte in bytes {
        out.push(byte);
        if byte == 0 {
            out.push(0xff);
        }
    }
    out.extend_from_slice(&[0, 0]);
}

/// NaN last, both zeros alike, as the server compares them.
fn append_double(value: f64, out: &mut Vec<u8>) {
    let value = if value == 0.0 { 0.0 } else { value };
    let bits = if value.is_nan() { f64::NAN.to_bits() & !(1 << 63) } else { value.to_bits() };
    let sorted = if bits >> 63 == 0 { bits | 1 << 63 } else { !bits };
    out.extend_from_slice(&sorted.to_be_bytes());
}

/// Class (-infinity, negative, zero, positive, infinity, NaN), then weight and base-10,000 digits, inverted if negative.
fn append_numeric(field: &[u8], out: &mut Vec<u8>) {
    let word = |at: usize| field.get(at..at + 2).map_or(0, |pair| u16::from_be_bytes([pair[0], pair[1]]));
    let (count, weight, sign) = (usize::from(word(0)), word(2), word(4));
    let class = match sign {
        0xF000 => 0,
        0xD000 => 4,
        0xC000 => 5,
        _ if count == 0 => 2,
        0x4000 => 1,
        _ => 3,
    };
    out.push(class);
    if class != 1 && class != 3 {
        return;
    }
    let start = out.len();
    out.extend_from_slice(&(weight ^ 0x8000).to_be_bytes());
    for index in 0..count {
        out.extend_from_slice(&(word(8 + 2 * index) + 1).to_be_bytes());
    }
    out.extend_from_slice(&[0, 0]);
    if class == 1 {
        out[start..].iter_mut().for_each(|byte| *byte = !*byte);
    }
}
