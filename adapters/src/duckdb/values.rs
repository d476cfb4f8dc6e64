//! One value, exactly, or a fault that names the bound; and its form as part of a row key or as a version. Pure.

use std::str::FromStr;

use super::types::{Kind, Unit};
use crate::{
    decode::{self, Decimal, Fault},
    value::Value,
};

/// Days that are no infinity.
const DAYS: std::ops::RangeInclusive<i64> = -2_147_483_646..=2_147_483_646;
/// Microseconds of a timestamp, from 290309-12-22 BC on; the largest number is an infinity.
const MICROS: std::ops::RangeInclusive<i128> = -9_223_372_022_400_000_000..=9_223_372_036_854_775_806;
/// Nanoseconds of a `TIMESTAMP_NS`, from 1677-09-22 on.
const NANOS: std::ops::RangeInclusive<i128> = -9_223_286_400_000_000_000..=9_223_372_036_854_775_806;

/// Appends `value`, which is there and not null. On an error `out` may hold half of it.
///
/// Numbers and times are little-endian in the width of their type; what has no fixed width begins with its length (4 bytes).
pub(super) fn put(kind: &Kind, value: Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    match kind {
        Kind::Boolean => match value {
            Value::Json(json) | Value::Text(json) => {
                out.push(u8::from(decode::boolean(json)?));
                Ok(())
            }
            other => Err(needs("true or false", other)),
        },
        Kind::Integer { bits, signed } => {
            let value = integer(value, *bits, *signed)?;
            out.extend_from_slice(&value.to_le_bytes()[..*bits as usize / 8]);
            Ok(())
        }
        Kind::Hugeint => {
            let value = integer(value, 128, true)?;
            out.extend_from_slice(&value.to_le_bytes());
            Ok(())
        }
        Kind::Uhugeint => {
            let value = integer(value, 128, false)?;
            out.extend_from_slice(&value.to_le_bytes());
            Ok(())
        }
        Kind::Float => {
            out.extend_from_slice(&with_number(value, decode::single)?.to_le_bytes());
            Ok(())
        }
        Kind::Double => {
            out.extend_from_slice(&with_number(value, decode::double)?.to_le_bytes());
            Ok(())
        }
        Kind::Decimal { width, scale } => {
            let value = with_number(value, |text| decimal(text, (*width).into(), (*scale).into()))?;
            out.extend_from_slice(&value.to_le_bytes());
            Ok(())
        }
        Kind::Varchar => put_varchar(value, out),
        Kind::Json => match value {
            Value::Json(json) => put_bytes(json.as_bytes(), out),
            other => Err(needs("a JSON value", other)),
        },
        Kind::Blob => put_long(out, |out| match value {
            Value::Bytes(bytes) => {
                out.extend_from_slice(bytes);
                Ok(())
            }
            other => with_text(other, |text| decode::bytes(text, out)),
        }),
        Kind::Date => {
            let days = with_text(value, decode::date)?;
            let days = DAYS.contains(&days).then(|| i32::try_from(days).ok()).flatten();
            let days = days.ok_or(Fault::Borrowed("is outside of what a DATE can hold"))?;
            out.extend_from_slice(&days.to_le_bytes());
            Ok(())
        }
        Kind::Time => {
            out.extend_from_slice(&with_text(value, decode::time)?.to_le_bytes());
            Ok(())
        }
        Kind::Timestamp(unit) => {
            let ticks = ticks(nanos(value, decode::local_timestamp)?, *unit)?;
            out.extend_from_slice(&ticks.to_le_bytes());
            Ok(())
        }
        Kind::TimestampTz => {
            let ticks = ticks(nanos(value, decode::timestamp)?, Unit::Micro)?;
            out.extend_from_slice(&ticks.to_le_bytes());
            Ok(())
        }
        Kind::Interval => with_text(value, |text| {
            let (months, days, micros) = interval(text)?;
            out.extend_from_slice(&months.to_le_bytes());
            out.extend_from_slice(&days.to_le_bytes());
            out.extend_from_slice(&micros.to_le_bytes());
            Ok(())
        }),
        Kind::Uuid => with_text(value, |text| {
            out.extend_from_slice(&decode::uuid(text)?);
            Ok(())
        }),
        Kind::Enum(names) => with_text(value, |text| {
            let at = names.iter().position(|name| name == text);
            let at = at.and_then(|at| u32::try_from(at).ok());
            let at = at.ok_or(Fault::Borrowed("is none of the enum's names"))?;
            out.extend_from_slice(&at.to_le_bytes());
            Ok(())
        }),
    }
}

/// Bytes that a value of `kind` takes at the front of `bytes`, which [`put`] made, and those that are its content.
pub(super) fn take<'a>(kind: &Kind, bytes: &'a [u8]) -> (&'a [u8], usize) {
    let fixed = |length: usize| (bytes.get(..length).unwrap_or_default(), length);
    match kind {
        Kind::Boolean => fixed(1),
        Kind::Integer { bits, .. } => fixed(*bits as usize / 8),
        Kind::Float | Kind::Date | Kind::Enum(_) => fixed(4),
        Kind::Double | Kind::Time | Kind::Timestamp(_) | Kind::TimestampTz => fixed(8),
        Kind::Hugeint | Kind::Uhugeint | Kind::Decimal { .. } | Kind::Interval | Kind::Uuid => fixed(16),
        Kind::Varchar | Kind::Json | Kind::Blob => {
            let length = bytes.get(..4).and_then(|four| four.try_into().ok()).map_or(0, u32::from_le_bytes);
            let content = bytes.get(4..4 + length as usize).unwrap_or_default();
            (content, 4 + content.len())
        }
    }
}

/// Appends the canonical form of a value's content: equal for DuckDB, equal here, and in DuckDB's order.
pub(super) fn put_ordered(kind: &Kind, content: &[u8], out: &mut Vec<u8>) {
    let reversed = |out: &mut Vec<u8>| out.extend(content.iter().rev());
    match kind {
        Kind::Boolean | Kind::Uuid => out.extend_from_slice(content),
        Kind::Integer { signed: false, .. } | Kind::Uhugeint | Kind::Enum(_) => reversed(out),
        Kind::Integer { .. }
        | Kind::Hugeint
        | Kind::Decimal { .. }
        | Kind::Date
        | Kind::Time
        | Kind::Timestamp(_)
        | Kind::TimestampTz => {
            let at = out.len();
            reversed(out);
            if let Some(first) = out.get_mut(at) {
                *first ^= 0x80;
            }
        }
        Kind::Float => {
            let value = content.try_into().map_or(0.0, f32::from_le_bytes);
            put_float(value.into(), out);
        }
        Kind::Double => put_float(content.try_into().map_or(0.0, f64::from_le_bytes), out),
        Kind::Varchar | Kind::Json | Kind::Blob | Kind::Interval => {
            for &byte in content {
                out.push(byte);
                if byte == 0 {
                    out.push(0xff);
                }
            }
            out.extend_from_slice(&[0, 0]);
        }
    }
}

/// `-0.0` and `0.0` are one value, and NaN is above all others.
fn put_float(value: f64, out: &mut Vec<u8>) {
    let value = if value.is_nan() { f64::NAN.abs() } else { value + 0.0 };
    let bits = value.to_bits();
    let ordered = if bits >> 63 == 1 { !bits } else { bits | 1 << 63 };
    out.extend_from_slice(&ordered.to_be_bytes());
}

fn needs(what: &str, value: Value<'_>) -> Fault {
    let got = match value {
        Value::Json(json) => decode::kind_of(json),
        Value::Text(_) => "a text",
        Value::Bytes(_) => "bytes",
        Value::Integer(_) => "an integer",
        Value::Micros(_) => "a time",
        Value::Missing => "nothing",
    };
    format!("needs {what}, got {got}").into()
}

/// Text from a JSON string, a header or a key.
fn with_text<T>(value: Value<'_>, read: impl FnOnce(&str) -> Result<T, Fault>) -> Result<T, Fault> {
    match value {
        Value::Json(json) => read(decode::string(json, &mut String::new())?),
        Value::Text(text) => read(text),
        Value::Bytes(bytes) => read(utf8(bytes)?),
        other => Err(needs("a string", other)),
    }
}

fn with_number<T>(value: Value<'_>, read: impl FnOnce(&str) -> Result<T, Fault>) -> Result<T, Fault> {
    match value {
        Value::Json(json) => read(decode::number_text(json, &mut String::new())?),
        Value::Text(text) => read(text),
        Value::Bytes(bytes) => read(utf8(bytes)?),
        Value::Integer(integer) => read(&integer.to_string()),
        other => Err(needs("a number", other)),
    }
}

fn utf8(bytes: &[u8]) -> Result<&str, Fault> {
    std::str::from_utf8(bytes)
        .map_err(|bad| Fault::from(format!("is not UTF-8 from byte {} on", bad.valid_up_to())))
}

fn put_varchar(value: Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    match value {
        Value::Json(json) => put_long(out, |out| decode::append_string(json, out)),
        Value::Integer(integer) => put_bytes(integer.to_string().as_bytes(), out),
        Value::Micros(micros) => {
            let time = jiff::Timestamp::from_microsecond(micros)
                .map_err(|_| Fault::Borrowed("is a time outside of the years -9999 to 9999"))?;
            put_bytes(format!("{time:.6}").as_bytes(), out)
        }
        other => with_text(other, |text| put_bytes(text.as_bytes(), out)),
    }
}

fn put_bytes(bytes: &[u8], out: &mut Vec<u8>) -> Result<(), Fault> {
    put_long(out, |out| {
        out.extend_from_slice(bytes);
        Ok(())
    })
}

/// What `write` appends, behind its length.
fn put_long(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> Result<(), Fault>) -> Result<(), Fault> {
    let at = out.len();
    out.extend_from_slice(&[0; 4]);
    write(out)?;
    let length = out.len() - at - 4;
    // Arrays of them count their bytes in 32 bits with a sign.
    match u32::try_from(length) {
        Ok(length) if length <= 1 << 30 => {
            out[at..at + 4].copy_from_slice(&length.to_le_bytes());
            Ok(())
        }
        _ => Err("is longer than 1 GiB".into()),
    }
}

/// The integer, whatever its form, in two's complement of 128 bits.
fn integer(value: Value<'_>, bits: u32, signed: bool) -> Result<u128, Fault> {
    with_number(value, |text| {
        if bits <= 64 && signed {
            let low = i64::MIN >> (64 - bits);
            return decode::integer(text, low, !low).map(|value| i128::from(value) as u128);
        }
        let decimal = Decimal::parse(text)?;
        let significant = decimal.significant();
        if significant.scale() > 0 {
            return Err("needs an integer, got a fraction".into());
        }
        let negative = decimal.negative && !significant.is_empty();
        let most = if bits == 128 { u128::MAX } else { (1 << bits) - 1 };
        let (low, high) = if signed { (1u128 << (bits - 1), most >> 1) } else { (0, most) };
        let out = || {
            Fault::from(match (negative, low) {
                (true, 0) => "below 0".to_owned(),
                (true, low) => format!("below -{low}"),
                (false, _) => format!("above {high}"),
            })
        };
        let magnitude = shifted(&decimal, 0).ok_or_else(out)?;
        if magnitude > if negative { low } else { high } {
            return Err(out());
        }
        Ok(if negative { magnitude.wrapping_neg() } else { magnitude })
    })
}

/// The digits of `decimal` with `scale` of them behind the point, as a number without sign; none beyond 128 bits. Its scale must not
/// be above `scale`.
fn shifted(decimal: &Decimal<'_>, scale: i64) -> Option<u128> {
    let significant = decimal.significant();
    if significant.is_empty() {
        return Some(0);
    }
    let zeros = significant.point + scale - significant.len() as i64;
    // No number of 128 bits has more digits.
    if significant.point + scale > 39 || zeros < 0 {
        return None;
    }
    let ten = |value: u128, digit: u8| value.checked_mul(10)?.checked_add(digit.into());
    let value = significant.digits().try_fold(0u128, ten)?;
    (0..zeros).try_fold(value, |value, _| ten(value, 0))
}

/// Scaled by `scale` digits.
fn decimal(text: &str, width: i64, scale: i64) -> Result<i128, Fault> {
    let decimal = Decimal::parse(text)?;
    let significant = decimal.significant();
    if significant.scale() > scale {
        return Err(format!("has more than {scale} digits behind the point").into());
    }
    let before = width - scale;
    let beyond = || Fault::from(format!("has more than {before} digits before the point"));
    if significant.point > before {
        return Err(beyond());
    }
    let value = shifted(&decimal, scale).and_then(|value| i128::try_from(value).ok()).ok_or_else(beyond)?;
    Ok(if decimal.negative { -value } else { value })
}

/// Nanoseconds since the epoch, as `read` takes the text.
fn nanos(value: Value<'_>, read: impl Fn(&str) -> Result<i64, Fault>) -> Result<i128, Fault> {
    match value {
        Value::Micros(micros) => Ok(i128::from(micros) * 1000),
        other => with_text(other, |text| decode::nanos(text, read)),
    }
}

fn ticks(nanos: i128, unit: Unit) -> Result<i64, Fault> {
    if nanos.rem_euclid(unit.nanos()) != 0 {
        let unit = match unit {
            Unit::Second => "second",
            Unit::Milli => "millisecond",
            Unit::Micro => "microsecond",
            Unit::Nano => "nanosecond",
        };
        return Err(format!("is finer than a {unit}").into());
    }
    let inside = match unit {
        Unit::Nano => NANOS.contains(&nanos),
        _ => MICROS.contains(&(nanos.div_euclid(1000))),
    };
    let ticks = i64::try_from(nanos.div_euclid(unit.nanos())).ok().filter(|_| inside);
    ticks.ok_or_else(|| match unit {
        Unit::Nano => "is outside of 1677-09-22 to 2262-04-11".into(),
        _ => "is outside of what a TIMESTAMP can hold".into(),
    })
}

/// Months, days and microseconds of an ISO 8601 duration: `P1Y2M3DT4H5M6.5S`.
fn interval(text: &str) -> Result<(i32, i32, i64), Fault> {
    const BAD: Fault = Fault::Borrowed("needs a duration as ISO 8601 writes it: P1Y2M3DT4H5M6.5S");
    if !text.trim_start_matches(['-', '+']).starts_with(['P', 'p']) {
        return Err(BAD);
    }
    let span = jiff::Span::from_str(text).map_err(|_| BAD)?;
    let months = i64::from(span.get_years()) * 12 + i64::from(span.get_months());
    let days = i64::from(span.get_weeks()) * 7 + i64::from(span.get_days());
    let nanos = [
        (i128::from(span.get_hours()), 3_600_000_000_000),
        (i128::from(span.get_minutes()), 60_000_000_000),
        (i128::from(span.get_seconds()), 1_000_000_000),
        (i128::from(span.get_milliseconds()), 1_000_000),
        (i128::from(span.get_microseconds()), 1000),
        (i128::from(span.get_nanoseconds()), 1),
    ];
    let nanos: i128 = nanos.iter().map(|(count, unit)| count * unit).sum();
    if nanos % 1000 != 0 {
        return Err("is finer than a microsecond".into());
    }
    // On their way they are nanoseconds in 64 bits.
    let nanos = i64::try_from(nanos).map_err(|_| Fault::Borrowed("has a time part above 292 years"))?;
    let whole = |count: i64| i32::try_from(count).map_err(|_| Fault::Borrowed("is too long"));
    Ok((whole(months)?, whole(days)?, nanos / 1000))
}
