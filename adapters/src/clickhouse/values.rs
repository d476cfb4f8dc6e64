//! One value in `RowBinary`, exactly, or a fault that names the bound. Pure.

use std::{
    borrow::Cow,
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::types::Kind;
use crate::{
    decode::{self, Decimal, Fault},
    value::Value,
};

const NANOS: i128 = 1_000_000_000;
/// What ClickHouse's calendar covers: 1900-01-01 to 2299-12-31, in days and seconds since the epoch.
const DAYS: std::ops::RangeInclusive<i64> = -25_567..=120_529;
const SECONDS: std::ops::RangeInclusive<i128> = -2_208_988_800..=10_413_791_999;

/// Appends `value`. On an error `out` may hold half of it.
pub(super) fn put(kind: &Kind, value: Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    let null = matches!(value, Value::Json(json) if decode::is_null(json));
    match kind {
        Kind::Nullable(_) if null => {
            out.push(1);
            Ok(())
        }
        Kind::Nullable(inner) => {
            out.push(0);
            put(inner, value, out)
        }
        _ if null => Err("cannot be null".into()),
        Kind::Int { bits, signed } => put_int(*bits, *signed, value, out),
        Kind::Float32 => {
            out.extend_from_slice(&with_number(value, decode::single)?.to_le_bytes());
            Ok(())
        }
        Kind::Float64 => {
            out.extend_from_slice(&with_number(value, decode::double)?.to_le_bytes());
            Ok(())
        }
        Kind::Decimal { precision, scale, bytes } => {
            with_number(value, |text| put_decimal(text, *precision, *scale, *bytes, out))
        }
        Kind::Bool => {
            let value = match value {
                Value::Json(json) | Value::Text(json) => decode::boolean(json)?,
                other => return Err(needs("true or false", other)),
            };
            out.push(u8::from(value));
            Ok(())
        }
        Kind::String => put_string(value, out),
        Kind::FixedString(length) => {
            let start = out.len();
            put_bytes_of(value, out)?;
            let found = out.len() - start;
            if found == *length {
                Ok(())
            } else {
                Err(format!("has {found} bytes where {length} are needed").into())
            }
        }
        Kind::Uuid => with_text(value, |text| {
            let id = decode::uuid(text)?;
            out.extend(id[..8].iter().rev());
            out.extend(id[8..].iter().rev());
            Ok(())
        }),
        Kind::Date => {
            let days = with_text(value, decode::date)?;
            let days =
                u16::try_from(days).map_err(|_| Fault::Borrowed("outside 1970-01-01 to 2149-06-06"))?;
            out.extend_from_slice(&days.to_le_bytes());
            Ok(())
        }
        Kind::Date32 => {
            let days = with_text(value, decode::date)?;
            let inside = DAYS.contains(&days).then(|| i32::try_from(days).ok()).flatten();
            let days = inside.ok_or(Fault::Borrowed("outside 1900-01-01 to 2299-12-31"))?;
            out.extend_from_slice(&days.to_le_bytes());
            Ok(())
        }
        Kind::DateTime => {
            let nanos = nanos(value)?;
            if nanos.rem_euclid(NANOS) != 0 {
                return Err("is finer than a second; use DateTime64".into());
            }
            let seconds = u32::try_from(nanos.div_euclid(NANOS))
                .map_err(|_| Fault::Borrowed("outside 1970-01-01T00:00:00Z to 2106-02-07T06:28:15Z"))?;
            out.extend_from_slice(&seconds.to_le_bytes());
            Ok(())
        }
        Kind::DateTime64(digits) => {
            let nanos = nanos(value)?;
            let tick = 10i128.pow(9 - digits.min(&9));
            if nanos.rem_euclid(tick) != 0 {
                return Err(format!("has more than {digits} digits behind the second").into());
            }
            let inside = SECONDS.contains(&nanos.div_euclid(NANOS));
            let ticks = inside.then(|| i64::try_from(nanos.div_euclid(tick)).ok()).flatten();
            let last = if *digits == 9 { "2262-04-11" } else { "2299-12-31" };
            let ticks = ticks.ok_or_else(|| Fault::from(format!("outside 1900-01-01 to {last}")))?;
            out.extend_from_slice(&ticks.to_le_bytes());
            Ok(())
        }
        Kind::Enum { names, wide } => with_text(value, |text| {
            let number = names.iter().find(|(name, _)| name == text).map(|(_, number)| *number);
            let number = number.ok_or(Fault::Borrowed("is none of the enum's names"))?;
            let bytes = number.to_le_bytes();
            out.extend_from_slice(if *wide { &bytes } else { &bytes[..1] });
            Ok(())
        }),
        Kind::Ipv4 => with_text(value, |text| {
            let address: Ipv4Addr = text.parse().map_err(|_| Fault::Borrowed("needs an IPv4 address"))?;
            out.extend_from_slice(&u32::from(address).to_le_bytes());
            Ok(())
        }),
        Kind::Ipv6 => with_text(value, |text| {
            let address: Ipv6Addr = text.parse().map_err(|_| Fault::Borrowed("needs an IPv6 address"))?;
            out.extend_from_slice(&address.octets());
            Ok(())
        }),
        Kind::Array(inner) => {
            let items = array(value)?;
            put_length(items.len(), out);
            items.iter().enumerate().try_for_each(|(at, item)| {
                put(inner, Value::Json(item.get()), out).map_err(|fault| format!("item {at}: {fault}").into())
            })
        }
        Kind::Map(key, inner) => {
            let members = object(value)?;
            put_length(members.len(), out);
            members.iter().enumerate().try_for_each(|(at, (name, item))| {
                put(key, Value::Text(name), out)
                    .and_then(|()| put(inner, Value::Json(item.get()), out))
                    .map_err(|fault| format!("member {at}: {fault}").into())
            })
        }
        Kind::Tuple(members) => put_tuple(members, value, out),
    }
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

fn with_text<T>(value: Value<'_>, read: impl FnOnce(&str) -> Result<T, Fault>) -> Result<T, Fault> {
    match value {
        Value::Json(json) => read(decode::string(json, &mut String::new())?),
        Value::Text(text) => read(text),
        other => Err(needs("a string", other)),
    }
}

fn with_number<T>(value: Value<'_>, read: impl FnOnce(&str) -> Result<T, Fault>) -> Result<T, Fault> {
    match value {
        Value::Json(json) => read(decode::number_text(json, &mut String::new())?),
        Value::Text(text) => read(text),
        Value::Integer(integer) => read(&integer.to_string()),
        other => Err(needs("a number", other)),
    }
}

/// LEB128, as ClickHouse writes lengths.
pub(super) fn put_length(mut length: usize, out: &mut Vec<u8>) {
    while length >= 0x80 {
        out.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    out.push(length as u8);
}

fn put_bytes_of(value: Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    match value {
        Value::Json(json) => decode::append_string(json, out),
        Value::Text(text) => {
            out.extend_from_slice(text.as_bytes());
            Ok(())
        }
        Value::Bytes(bytes) => {
            out.extend_from_slice(bytes);
            Ok(())
        }
        other => Err(needs("a string", other)),
    }
}

fn put_string(value: Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    // An object or an array is kept as its text.
    if let Value::Json(json) = value
        && matches!(json.as_bytes().first(), Some(b'{' | b'['))
    {
        put_length(json.len(), out);
        out.extend_from_slice(json.as_bytes());
        return Ok(());
    }
    let mut text = Vec::new();
    match value {
        Value::Integer(integer) => text.extend_from_slice(integer.to_string().as_bytes()),
        other => put_bytes_of(other, &mut text)?,
    }
    put_length(text.len(), out);
    out.extend_from_slice(&text);
    Ok(())
}

/// Up to 256 bits, least significant first.
type Wide = [u64; 4];

/// `digits` and then `zeros` zeros as a number; none if it has more than 256 bits.
fn wide(digits: impl Iterator<Item = u8>, zeros: usize) -> Option<Wide> {
    let mut number: Wide = [0; 4];
    for digit in digits.chain(std::iter::repeat_n(0, zeros)) {
        let mut carry = u128::from(digit);
        for limb in &mut number {
            let product = u128::from(*limb) * 10 + carry;
            *limb = product as u64;
            carry = product >> 64;
        }
        if carry != 0 {
            return None;
        }
    }
    Some(number)
}

/// Bits that the number takes.
fn bits_of(number: &Wide) -> usize {
    let top = number.iter().rposition(|limb| *limb != 0);
    top.map_or(0, |at| at * 64 + 64 - number[at].leading_zeros() as usize)
}

/// In two's complement.
fn put_wide(mut number: Wide, negative: bool, bytes: usize, out: &mut Vec<u8>) {
    if negative {
        let mut carry = true;
        for limb in &mut number {
            let (sum, over) = (!*limb).overflowing_add(u64::from(carry));
            (*limb, carry) = (sum, over);
        }
    }
    out.extend(number.iter().flat_map(|limb| limb.to_le_bytes()).take(bytes));
}

fn put_int(bits: usize, signed: bool, value: Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    with_number(value, |text| {
        let decimal = Decimal::parse(text)?;
        let significant = decimal.significant();
        if significant.scale() > 0 {
            return Err("needs an integer, got a fraction".into());
        }
        let range = || {
            let name = if signed { "Int" } else { "UInt" };
            let side = if decimal.negative { "below the least" } else { "above the largest" };
            Fault::from(format!("{side} value of {name}{bits}"))
        };
        // No number of 256 bits has more digits.
        if significant.point > 78 {
            return Err(range());
        }
        let zeros = (significant.point - significant.len() as i64).max(0).unsigned_abs() as usize;
        let number = wide(significant.digits(), zeros).ok_or_else(range)?;
        let negative = decimal.negative && !significant.is_empty();
        let taken = bits_of(&number);
        let least =
            negative && taken == bits && number.iter().map(|limb| limb.count_ones()).sum::<u32>() == 1;
        let fits = match (signed, negative) {
            (true, _) => taken < bits || least,
            (false, negative) => taken <= bits && !negative,
        };
        if !fits {
            return Err(range());
        }
        put_wide(number, negative, bits / 8, out);
        Ok(())
    })
}

fn put_decimal(
    text: &str,
    precision: usize,
    scale: usize,
    bytes: usize,
    out: &mut Vec<u8>,
) -> Result<(), Fault> {
    let decimal = Decimal::parse(text)?;
    let significant = decimal.significant();
    if significant.scale() > scale as i64 {
        return Err(format!("has more than {scale} digits behind the point").into());
    }
    let before = precision - scale.min(precision);
    if significant.point > before as i64 {
        return Err(format!("has more than {before} digits before the point").into());
    }
    let zeros = significant.point + scale as i64 - significant.len() as i64;
    let zeros = if significant.is_empty() { 0 } else { zeros.max(0).unsigned_abs() as usize };
    let number = wide(significant.digits(), zeros).ok_or(Fault::Borrowed("has too many digits"))?;
    put_wide(number, decimal.negative, bytes, out);
    Ok(())
}

/// Nanoseconds since the epoch.
fn nanos(value: Value<'_>) -> Result<i128, Fault> {
    if let Value::Micros(micros) = value {
        return Ok(i128::from(micros) * 1000);
    }
    with_text(value, |text| decode::nanos(text, decode::timestamp))
}

fn array(value: Value<'_>) -> Result<Vec<&RawValue>, Fault> {
    match value {
        Value::Json(json) if json.starts_with('[') => {
            serde_json::from_str(json).map_err(|_| Fault::Borrowed("needs an array"))
        }
        other => Err(needs("an array", other)),
    }
}

/// Members in their order; no name twice.
fn object(value: Value<'_>) -> Result<Vec<(Cow<'_, str>, &RawValue)>, Fault> {
    struct Members;
    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(Cow<'de, str>, &'de RawValue)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some(name) = map.next_key::<Name<'de>>()? {
                members.push((name.0, map.next_value()?));
            }
            Ok(members)
        }
    }
    #[derive(serde::Deserialize)]
    struct Name<'a>(#[serde(borrow)] Cow<'a, str>);
    let members = match value {
        Value::Json(json) if json.starts_with('{') => serde_json::Deserializer::from_str(json)
            .deserialize_map(Members)
            .map_err(|_| Fault::Borrowed("needs an object whose names are texts"))?,
        other => return Err(needs("an object", other)),
    };
    let mut names: Vec<&str> = members.iter().map(|(name, _)| &**name).collect();
    names.sort_unstable();
    if names.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err("has a member twice".into());
    }
    Ok(members)
}

fn put_tuple(members: &[(Option<String>, Kind)], value: Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    let named = members.iter().all(|(name, _)| name.is_some());
    if let (true, Value::Json(json)) = (named, value)
        && json.starts_with('{')
    {
        let given = object(value)?;
        let known = |name: &str| members.iter().any(|(known, _)| known.as_deref() == Some(name));
        if given.iter().any(|(name, _)| !known(name)) {
            return Err("has a member that the tuple has not".into());
        }
        return members.iter().try_for_each(|(name, kind)| {
            let name = name.as_deref().unwrap_or_default();
            let item = given.iter().find(|(given, _)| given == name);
            let (_, item) = item.ok_or_else(|| Fault::from(format!("lacks the tuple's member {name:?}")))?;
            put(kind, Value::Json(item.get()), out)
                .map_err(|fault| format!("member {name:?}: {fault}").into())
        });
    }
    let items = array(value)?;
    if items.len() != members.len() {
        return Err(format!("has {} items where the tuple has {}", items.len(), members.len()).into());
    }
    items.iter().zip(members).enumerate().try_for_each(|(at, (item, (_, kind)))| {
        put(kind, Value::Json(item.get()), out).map_err(|fault| format!("item {at}: {fault}").into())
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clickhouse::types::parse;

    fn bytes(kind: &str, json: &str) -> Result<Vec<u8>, String> {
        let mut out = Vec::new();
        put(&parse(kind).unwrap(), Value::Json(json), &mut out)
            .map(|()| out)
            .map_err(|fault| fault.to_string())
    }

    #[test]
    fn integers_keep_every_bit_and_name_their_bound() {
        assert_eq!(bytes("UInt8", "255"), Ok(vec![255]));
        assert_eq!(bytes("Int8", "-128"), Ok(vec![128]));
        assert_eq!(bytes("Int16", "\"-2.0\""), Ok(vec![254, 255]));
        assert_eq!(bytes("UInt64", "18446744073709551615"), Ok(vec![255; 8]));
        assert_eq!(bytes("Int256", "-1"), Ok(vec![255; 32]));
        let most = "115792089237316195423570985008687907853269984665640564039457584007913129639935";
        assert_eq!(bytes("UInt256", most), Ok(vec![255; 32]));
        assert_eq!(bytes("UInt8", "-0"), Ok(vec![0]));
        for (kind, json, says) in [
            ("UInt8", "256", "above the largest value of UInt8"),
            ("UInt8", "-1", "below the least value of UInt8"),
            ("Int8", "128", "above"),
            ("Int8", "-129", "below"),
            ("Int64", "9223372036854775808", "above"),
            (
                "UInt256",
                "115792089237316195423570985008687907853269984665640564039457584007913129639936",
                "above",
            ),
            ("UInt256", "1e99", "above"),
            ("Int32", "1.5", "fraction"),
            ("Int32", "true", "needs a number"),
            ("Int32", "null", "cannot be null"),
        ] {
            assert!(bytes(kind, json).unwrap_err().contains(says), "{kind} {json}");
        }
    }

    #[test]
    fn decimals_times_and_the_rest_are_exact_or_refused() {
        assert_eq!(bytes("Decimal(9, 2)", "-1.5"), Ok((-150i32).to_le_bytes().to_vec()));
        assert_eq!(bytes("Decimal(18, 4)", "1e3"), Ok(10_000_000i64.to_le_bytes().to_vec()));
        assert_eq!(bytes("Decimal(76, 0)", "0"), Ok(vec![0; 32]));
        assert!(bytes("Decimal(9, 2)", "1.555").unwrap_err().contains("more than 2 digits behind"));
        assert!(bytes("Decimal(9, 2)", "10000000").unwrap_err().contains("more than 7 digits before"));
        assert_eq!(
            bytes("DateTime64(9)", "\"1970-01-01T00:00:01.123456789Z\""),
            Ok(1_123_456_789i64.to_le_bytes().to_vec())
        );
        assert_eq!(
            bytes("DateTime64(3)", "\"1969-12-31T23:59:59.5+00:00\""),
            Ok((-500i64).to_le_bytes().to_vec())
        );
        assert!(
            bytes("DateTime64(3)", "\"1970-01-01T00:00:00.0001Z\"")
                .unwrap_err()
                .contains("more than 3 digits")
        );
        assert!(
            bytes("DateTime64(9)", "\"1970-01-01T00:00:00.0000000001Z\"").unwrap_err().contains("nanosecond")
        );
        assert!(bytes("DateTime64(9)", "\"2299-01-01T00:00:00Z\"").unwrap_err().contains("2262"));
        assert!(bytes("DateTime", "\"1970-01-01T00:00:00.5Z\"").unwrap_err().contains("finer than a second"));
        assert!(bytes("DateTime", "\"2107-01-01T00:00:00Z\"").unwrap_err().contains("2106"));
        assert!(bytes("DateTime", "\"2020-01-01T00:00:00\"").unwrap_err().contains("offset"));
        assert!(bytes("Date", "\"1969-12-31\"").unwrap_err().contains("1970-01-01"));
        assert!(bytes("Date32", "\"1899-12-31\"").unwrap_err().contains("1900-01-01"));
        assert_eq!(bytes("String", "\"\\u00e9\\u0000\""), Ok(vec![3, 0xc3, 0xa9, 0]));
        assert_eq!(bytes("String", "{\"a\": 1.50}"), Ok(b"\x0b{\"a\": 1.50}".to_vec()));
        assert!(bytes("String", "5").is_err() && bytes("String", "\"\\ud800\"").is_err());
        assert!(bytes("FixedString(3)", "\"ab\"").unwrap_err().contains("2 bytes where 3"));
        assert!(bytes("Enum8('a' = 1)", "\"b\"").is_err());
        assert_eq!(bytes("Array(UInt8)", "[1, 2]"), Ok(vec![2, 1, 2]));
        assert_eq!(
            bytes("Array(UInt8)", "[1, 256]").unwrap_err(),
            "item 1: above the largest value of UInt8"
        );
        assert_eq!(
            bytes("Map(UInt8, Nullable(UInt8))", "{\"7\": null, \"8\": 9}"),
            Ok(vec![2, 7, 1, 8, 0, 9])
        );
        assert!(bytes("Map(String, UInt8)", "{\"a\":1,\"\\u0061\":2}").unwrap_err().contains("twice"));
        assert_eq!(bytes("Tuple(a UInt8, b UInt8)", "{\"b\":2,\"a\":1}"), Ok(vec![1, 2]));
        assert!(
            bytes("Tuple(a UInt8)", "{\"a\":1,\"c\":2}").is_err() && bytes("Tuple(a UInt8)", "{}").is_err()
        );
        assert!(bytes("Tuple(UInt8, UInt8)", "[1]").unwrap_err().contains("1 items where the tuple has 2"));
    }

    #[test]
    fn lengths_are_leb128() {
        let mut out = Vec::new();
        for length in [0, 127, 128, 300] {
            put_length(length, &mut out);
        }
        assert_eq!(out, [0, 127, 0x80, 1, 0xac, 2]);
    }

    proptest! {
        #[test]
        fn every_integer_is_twos_complement(value: i128) {
            prop_assert_eq!(bytes("Int128", &value.to_string()), Ok(value.to_le_bytes().to_vec()));
            let sign = if value < 0 { 255 } else { 0 };
            let wide = [&value.to_le_bytes()[..], &[sign; 16]].concat();
            prop_assert_eq!(bytes("Int256", &value.to_string()), Ok(wide));
        }

        #[test]
        fn no_text_panics(json in "[\\[\\]{}\",:0-9a-z.\\-]{0,24}") {
            for kind in ["Int256", "Decimal(20, 3)", "DateTime64(9)", "Map(Int8, String)", "Tuple(a Int8)", "IPv6", "Array(Date)"] {
                drop(bytes(kind, &json));
                drop(put(&parse(kind).unwrap(), Value::Text(&json), &mut Vec::new()));
            }
        }
    }
}
