//! One value as JSON that both databases read exactly, or a fault that names the bound. Pure.

use std::{
    borrow::Cow,
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use jiff::{SignedDuration, civil};
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::types::Kind;
use crate::{
    decode::{self, Decimal, Fault},
    value::Value,
};

/// Levels of a JSON column's value.
const DEEPEST: usize = 64;
/// 0000-01-01 and 9999-12-31T23:59:59.999999, microseconds since the epoch.
const MICROS: std::ops::RangeInclusive<i64> = -62_167_219_200_000_000..=253_402_300_799_999_999;

/// Appends `value`. On an error `out` may hold half of it.
pub(super) fn put(kind: &Kind, value: Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    match kind {
        Kind::Bool => {
            let word = match value {
                Value::Json(json) | Value::Text(json) => decode::boolean(json)?,
                other => return Err(needs("true or false", other)),
            };
            out.extend_from_slice(if word { b"true" } else { b"false" });
            Ok(())
        }
        Kind::Int(low, high) => {
            let number = with_number(value, |text| integer(text, *low, *high))?;
            out.extend_from_slice(format!("\"{number}\"").as_bytes());
            Ok(())
        }
        Kind::Float => put_float(with_number(value, decode::single)?, out),
        Kind::Double => put_float(with_number(value, decode::double)?, out),
        Kind::Decimal { precision, scale } => {
            with_number(value, |text| put_decimal(text, *precision, *scale, out))
        }
        Kind::Text(most) => put_text(value, *most, out),
        Kind::Binary(most) => put_hex(value, *most, out),
        Kind::Date => {
            let text = with_text(value, |text| {
                let days = decode::date(text)?;
                let inside = MICROS.contains(&days.saturating_mul(86_400_000_000)) && text.len() == 10;
                if inside { Ok(text.to_owned()) } else { Err("outside 0000-01-01 to 9999-12-31".into()) }
            })?;
            out.extend_from_slice(format!("\"{text}\"").as_bytes());
            Ok(())
        }
        Kind::DateTime(digits) => put_time(value, *digits, out),
        Kind::Ipv4 => with_text(value, |text| {
            let address: Ipv4Addr = text.parse().map_err(|_| Fault::Borrowed("needs an IPv4 address"))?;
            out.extend_from_slice(format!("\"{address}\"").as_bytes());
            Ok(())
        }),
        Kind::Ipv6 => with_text(value, |text| {
            let address: Ipv6Addr = text.parse().map_err(|_| Fault::Borrowed("needs an IPv6 address"))?;
            out.extend_from_slice(format!("\"{address}\"").as_bytes());
            Ok(())
        }),
        Kind::Json => match value {
            Value::Json(json) if matches!(json.as_bytes().first(), Some(b'{' | b'[')) => {
                put_json(json, DEEPEST, out)
            }
            other => Err(needs("an object or an array", other)),
        },
        Kind::Array(inner) => {
            let items = array(value)?;
            out.push(b'[');
            for (at, item) in items.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                put_inside(inner, Value::Json(item.get()), out)
                    .map_err(|fault| Fault::from(format!("item {at}: {fault}")))?;
            }
            out.push(b']');
            Ok(())
        }
        Kind::Map(key, inner) => {
            let members = object(value)?;
            out.push(b'{');
            for (at, (name, item)) in members.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                let within = |fault: Fault| Fault::from(format!("member {at}: {fault}"));
                let start = out.len();
                put(key, Value::Text(name), out).map_err(within)?;
                // Names of JSON members are texts.
                if out.get(start) != Some(&b'"') {
                    let plain = out.split_off(start);
                    out.push(b'"');
                    out.extend_from_slice(&plain);
                    out.push(b'"');
                }
                out.push(b':');
                put_inside(inner, Value::Json(item.get()), out).map_err(within)?;
            }
            out.push(b'}');
            Ok(())
        }
        Kind::Struct(members) => put_struct(members, value, out),
    }
}

/// Items of nested types may be null.
fn put_inside(kind: &Kind, value: Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    if matches!(value, Value::Json(json) if decode::is_null(json)) {
        out.extend_from_slice(b"null");
        return Ok(());
    }
    put(kind, value, out)
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

/// The integer that `text` means, whatever its form (`5`, `5.0`, `5e0`).
pub(super) fn integer(text: &str, low: i128, high: i128) -> Result<i128, Fault> {
    let decimal = Decimal::parse(text)?;
    let significant = decimal.significant();
    if significant.scale() > 0 {
        return Err("needs an integer, got a fraction".into());
    }
    let range =
        || Fault::from(if decimal.negative { format!("below {low}") } else { format!("above {high}") });
    if significant.point > 39 {
        return Err(range());
    }
    let zeros = (significant.point - significant.len() as i64).max(0).unsigned_abs() as usize;
    let digits = significant.digits().chain(std::iter::repeat_n(0, zeros));
    // Downwards, as there is one more below zero than above.
    let least = digits
        .into_iter()
        .try_fold(0i128, |number, digit| number.checked_mul(10)?.checked_sub(i128::from(digit)))
        .ok_or_else(range)?;
    let number = if decimal.negative { Some(least) } else { least.checked_neg() };
    number.filter(|number| (low..=high).contains(number)).ok_or_else(range)
}

fn put_float(value: impl fmt::Debug + Into<f64> + Copy, out: &mut Vec<u8>) -> Result<(), Fault> {
    if !value.into().is_finite() {
        return Err("is not finite, which the database does not keep".into());
    }
    // The shortest text that is this value.
    out.extend_from_slice(format!("{value:?}").as_bytes());
    Ok(())
}

fn put_decimal(text: &str, precision: usize, scale: usize, out: &mut Vec<u8>) -> Result<(), Fault> {
    let decimal = Decimal::parse(text)?;
    let significant = decimal.significant();
    if significant.scale() > scale as i64 {
        return Err(format!("has more than {scale} digits behind the point").into());
    }
    let before = precision - scale.min(precision);
    if significant.point > before as i64 {
        return Err(format!("has more than {before} digits before the point").into());
    }
    out.push(b'"');
    if decimal.negative && !significant.is_empty() {
        out.push(b'-');
    }
    let mut digits = significant.digits();
    let mut next = |out: &mut Vec<u8>| out.push(b'0' + digits.next().unwrap_or(0));
    if significant.point <= 0 {
        out.push(b'0');
    }
    for _ in 0..significant.point {
        next(out);
    }
    if significant.scale() > 0 {
        out.push(b'.');
        out.extend(std::iter::repeat_n(b'0', significant.point.min(0).unsigned_abs() as usize));
        for _ in significant.point.max(0)..significant.len() as i64 {
            next(out);
        }
    }
    out.push(b'"');
    Ok(())
}

pub(super) fn put_string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    let mut rest = text;
    while let Some(at) = rest.find(|mark: char| mark < ' ' || mark == '"' || mark == '\\') {
        out.extend_from_slice(&rest.as_bytes()[..at]);
        match rest.as_bytes()[at] {
            mark @ (b'"' | b'\\') => out.extend_from_slice(&[b'\\', mark]),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            other => out.extend_from_slice(format!("\\u{other:04x}").as_bytes()),
        }
        rest = &rest[at + 1..];
    }
    out.extend_from_slice(rest.as_bytes());
    out.push(b'"');
}

fn put_text(value: Value<'_>, most: usize, out: &mut Vec<u8>) -> Result<(), Fault> {
    let text: Cow<'_, str> = match value {
        // An object or an array is kept as its text.
        Value::Json(json) if matches!(json.as_bytes().first(), Some(b'{' | b'[')) => json.into(),
        Value::Json(json) => decode::string(json, &mut String::new())?.to_owned().into(),
        Value::Text(text) => text.into(),
        Value::Bytes(bytes) => std::str::from_utf8(bytes)
            .map_err(|_| Fault::Borrowed("is not UTF-8, which a text column needs"))?
            .into(),
        Value::Integer(integer) => integer.to_string().into(),
        other => return Err(needs("a string", other)),
    };
    if text.len() > most {
        return Err(format!("has {} bytes, and the column takes {most}", text.len()).into());
    }
    put_string(&text, out);
    Ok(())
}

/// Bytes of a text: base64, or `\x` and hexadecimal digits, as elsewhere.
fn put_hex(value: Value<'_>, most: usize, out: &mut Vec<u8>) -> Result<(), Fault> {
    let mut bytes = Vec::new();
    match value {
        Value::Bytes(raw) => bytes.extend_from_slice(raw),
        other => with_text(other, |text| decode::bytes(text, &mut bytes))?,
    }
    if bytes.len() > most {
        return Err(format!("has {} bytes, and the column takes {most}", bytes.len()).into());
    }
    out.push(b'"');
    for byte in bytes {
        out.extend_from_slice(format!("{byte:02X}").as_bytes());
    }
    out.push(b'"');
    Ok(())
}

/// Without a zone, as the column keeps it.
fn put_time(value: Value<'_>, digits: u32, out: &mut Vec<u8>) -> Result<(), Fault> {
    let micros = match value {
        Value::Micros(micros) => micros,
        other => with_text(other, decode::local_timestamp)?,
    };
    if micros.rem_euclid(10i64.pow(6 - digits.min(6))) != 0 {
        return Err(format!("has more than {digits} digits behind the second").into());
    }
    if !MICROS.contains(&micros) {
        return Err("outside 0000-01-01 to 9999-12-31".into());
    }
    let time = civil::date(1970, 1, 1)
        .at(0, 0, 0, 0)
        .checked_add(SignedDuration::from_micros(micros))
        .map_err(|_| Fault::Borrowed("outside 0000-01-01 to 9999-12-31"))?;
    let fine = micros.rem_euclid(1_000_000);
    let whole = time.strftime("%Y-%m-%d %H:%M:%S");
    let text = if fine == 0 { format!("\"{whole}\"") } else { format!("\"{whole}.{fine:06}\"") };
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

/// A version's order: of integers, days and microseconds.
pub(super) fn version(kind: &Kind, value: Value<'_>) -> Result<i128, Fault> {
    match kind {
        Kind::Int(low, high) => with_number(value, |text| integer(text, *low, *high)),
        Kind::Date => with_text(value, decode::date).map(i128::from),
        Kind::DateTime(_) => match value {
            Value::Micros(micros) => Ok(micros.into()),
            other => with_text(other, decode::local_timestamp).map(i128::from),
        },
        _ => Err("is no version".into()),
    }
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

fn put_struct(members: &[(String, Kind)], value: Value<'_>, out: &mut Vec<u8>) -> Result<(), Fault> {
    let given = object(value)?;
    if given.iter().any(|(name, _)| !members.iter().any(|(known, _)| known == name)) {
        return Err("has a member that the struct has not".into());
    }
    out.push(b'{');
    for (at, (name, kind)) in members.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        put_string(name, out);
        out.push(b':');
        let item = given.iter().find(|(given, _)| given == name);
        let (_, item) = item.ok_or_else(|| Fault::from(format!("lacks the struct's member {name:?}")))?;
        put_inside(kind, Value::Json(item.get()), out)
            .map_err(|fault| Fault::from(format!("member {name:?}: {fault}")))?;
    }
    out.push(b'}');
    Ok(())
}

/// Again as JSON, in one line. Both databases keep integers of 64 bits and doubles.
fn put_json(json: &str, deeper: usize, out: &mut Vec<u8>) -> Result<(), Fault> {
    let Some(deeper) = deeper.checked_sub(1) else {
        return Err(format!("is nested deeper than {DEEPEST} levels").into());
    };
    match json.as_bytes().first() {
        Some(b'{') => {
            out.push(b'{');
            for (at, (name, item)) in object(Value::Json(json))?.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                put_string(name, out);
                out.push(b':');
                put_json(item.get(), deeper, out)?;
            }
            out.push(b'}');
        }
        Some(b'[') => {
            out.push(b'[');
            for (at, item) in array(Value::Json(json))?.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                put_json(item.get(), deeper, out)?;
            }
            out.push(b']');
        }
        Some(b'"') => put_string(decode::string(json, &mut String::new())?, out),
        Some(b'-' | b'0'..=b'9') => {
            let whole = !json.contains(['.', 'e', 'E']);
            if whole {
                integer(json, i64::MIN.into(), i64::MAX.into())?;
            } else {
                decode::double(json)?;
            }
            out.extend_from_slice(json.as_bytes());
        }
        _ => out.extend_from_slice(json.as_bytes()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stream_load::{Dialect, types::parse};

    fn text(kind: &str, json: &str) -> Result<String, String> {
        let mut out = Vec::new();
        let dialect = if kind.starts_with("varbinary") { Dialect::StarRocks } else { Dialect::Doris };
        put(&parse(dialect, kind).expect("a type"), Value::Json(json), &mut out)
            .map(|()| String::from_utf8(out).expect("JSON is UTF-8"))
            .map_err(|fault| fault.to_string())
    }

    #[test]
    fn values_are_exact_or_name_their_bound() {
        for (kind, json, out) in [
            ("tinyint", "-128", "\"-128\""),
            ("bigint", "9223372036854775807", "\"9223372036854775807\""),
            (
                "largeint",
                "-170141183460469231731687303715884105728",
                "\"-170141183460469231731687303715884105728\"",
            ),
            ("int", "\"5.0\"", "\"5\""),
            ("decimal(9,2)", "-1.50", "\"-1.5\""),
            ("decimal(9,3)", "0.005", "\"0.005\""),
            ("decimal(38,0)", "1e37", "\"10000000000000000000000000000000000000\""),
            ("decimal(5,2)", "-0.00", "\"0\""),
            ("double", "0.30000000000000004", "0.30000000000000004"),
            ("float", "0.1", "0.1"),
            ("boolean", "true", "true"),
            ("varchar(9)", "\"a\\\"\\n\\u00e9\"", "\"a\\\"\\né\""),
            ("string", "{\"a\": 1.50}", "\"{\\\"a\\\": 1.50}\""),
            ("varbinary(4)", "\"\\\\x00ff\"", "\"00FF\""),
            ("date", "\"9999-12-31\"", "\"9999-12-31\""),
            ("datetime(6)", "\"2024-02-29T12:00:00.123456Z\"", "\"2024-02-29 12:00:00.123456\""),
            ("datetime", "\"1969-12-31 23:59:59\"", "\"1969-12-31 23:59:59\""),
            ("datetime(6)", "\"9999-12-31T23:59:59.999999\"", "\"9999-12-31 23:59:59.999999\""),
            ("array<bigint>", "[1, null]", "[\"1\",null]"),
            ("map<int,decimal(9,1)>", "{\"7\": 1.5}", "{\"7\":\"1.5\"}"),
            ("struct<a:int,b:array<text>>", "{\"b\":[\"x\"],\"a\":1}", "{\"a\":\"1\",\"b\":[\"x\"]}"),
            ("json", "{\"a\":\n[1, 1.5, true, null, \"x\"]}", "{\"a\":[1,1.5,true,null,\"x\"]}"),
        ] {
            assert_eq!(text(kind, json), Ok(out.to_owned()), "{kind} {json}");
        }
        for (kind, json, says) in [
            ("tinyint", "128", "above 127"),
            ("largeint", "1e39", "above"),
            ("bigint", "1.5", "fraction"),
            ("decimal(9,2)", "1.555", "more than 2 digits behind"),
            ("decimal(9,2)", "1e7", "more than 7 digits before"),
            ("double", "\"NaN\"", "not finite"),
            ("double", "9007199254740993", "more digits"),
            ("varchar(2)", "\"\u{e9}\u{e9}\"", "has 4 bytes, and the column takes 2"),
            ("date", "\"2023-02-29\"", "no such day"),
            ("date", "\"+10000-01-01\"", "outside"),
            ("datetime", "\"2024-01-01T00:00:00.5\"", "more than 0 digits"),
            ("datetime", "\"2024-01-01T00:00:00+01:00\"", "offset"),
            ("json", "{\"a\":9223372036854775808}", "above"),
            ("json", "[0.12345678901234567890]", "more digits"),
            ("json", "{\"a\":1,\"\\u0061\":2}", "twice"),
            ("json", "5", "needs an object or an array"),
            ("array<tinyint>", "[1,300]", "item 1: above 127"),
            ("struct<a:int>", "{}", "lacks"),
            ("ipv4", "\"1.2.3\"", "IPv4"),
            ("varbinary(1)", "\"\\\\x0001\"", "has 2 bytes"),
        ] {
            let fault = text(kind, json).expect_err(kind);
            assert!(fault.contains(says), "{kind} {json}: {fault}");
        }
        let deep = "[".repeat(80) + &"]".repeat(80);
        assert!(text("json", &deep).expect_err("too deep").contains("deeper"));
    }

    proptest! {
        #[test]
        fn every_integer_keeps_its_digits(value: i128) {
            prop_assert_eq!(text("largeint", &value.to_string()), Ok(format!("\"{value}\"")));
        }

        #[test]
        fn every_text_comes_back(value: String) {
            prop_assume!(value.len() < 1000);
            let json = serde_json::to_string(&value).expect("a text");
            let out = text("string", &json).expect("it fits");
            prop_assert_eq!(serde_json::from_str::<String>(&out).expect("JSON"), value);
        }

        #[test]
        fn every_decimal_keeps_its_value(whole in 0u64..1_000_000_000, fraction in 0u64..1_000_000, negative: bool) {
            let sign = if negative { "-" } else { "" };
            let out = text("decimal(20,6)", &format!("{sign}{whole}.{fraction:06}")).expect("it fits");
            let back = out.trim_matches('"');
            let (units, rest) = back.split_once('.').unwrap_or((back, ""));
            prop_assert_eq!(units.trim_start_matches('-').parse::<u64>().expect("digits"), whole);
            prop_assert_eq!(format!("{rest:0<6}").parse::<u64>().expect("digits"), fraction);
            prop_assert_eq!(back.starts_with('-'), negative && (whole, fraction) != (0, 0));
        }

        #[test]
        fn no_text_panics(json in "[\\[\\]{}\",:0-9a-z.\\-]{0,24}") {
            for kind in ["largeint", "decimal(20,3)", "datetime(6)", "map<int,text>", "struct<a:int>", "ipv6", "json", "array<date>"] {
                let kind = parse(Dialect::Doris, kind).expect("a type");
                drop(put(&kind, Value::Json(&json), &mut Vec::new()));
                drop(put(&kind, Value::Text(&json), &mut Vec::new()));
            }
        }
    }
}
