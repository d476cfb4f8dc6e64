//! What a column takes, a value for it from a number, and how two forms of one value are told to be alike. Pure.

use adapters::decode;
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::Value;

/// What a column takes, as far as values can be made up for it and compared.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Bool,
    /// So many bits, signed.
    Int(u32),
    /// So many bits.
    #[cfg(feature = "clickhouse")]
    Unsigned(u32),
    /// Digits in all, and behind the point.
    Decimal(u32, u32),
    /// Of double precision; else single.
    Float(bool),
    /// Characters at most; trailing spaces do not count.
    Text(Option<usize>, bool),
    Uuid,
    Bytes,
    Date,
    /// Of the day.
    Time,
    /// Digits of a second that are kept.
    Timestamp(u32),
    Json,
}

impl Kind {
    /// From the name of a type in Postgres, as `format_type` says it.
    #[cfg(feature = "postgres")]
    pub(crate) fn postgres(type_name: &str) -> Option<Kind> {
        let (base, bounds) = bounded(type_name);
        let first = bounds.first().copied();
        Some(match base.as_str() {
            "boolean" => Kind::Bool,
            "smallint" => Kind::Int(16),
            "integer" => Kind::Int(32),
            "bigint" => Kind::Int(64),
            "numeric" => match bounds.as_slice() {
                [digits, scale] if *scale >= 0 && scale <= digits => {
                    Kind::Decimal(*digits as u32, *scale as u32)
                }
                [] => Kind::Decimal(18, 4),
                _ => return None,
            },
            "real" => Kind::Float(false),
            "double precision" => Kind::Float(true),
            "text" | "citext" => Kind::Text(None, false),
            "character varying" => Kind::Text(first.map(|length| length as usize), false),
            "character" => Kind::Text(Some(first.unwrap_or(1) as usize), true),
            "uuid" => Kind::Uuid,
            "bytea" => Kind::Bytes,
            "date" => Kind::Date,
            "time without time zone" if bounds.is_empty() => Kind::Time,
            "timestamp without time zone" | "timestamp with time zone" => {
                Kind::Timestamp(first.unwrap_or(6) as u32)
            }
            "json" | "jsonb" => Kind::Json,
            _ => return None,
        })
    }

    /// From the name of a type in ClickHouse.
    #[cfg(feature = "clickhouse")]
    pub(crate) fn clickhouse(type_name: &str) -> Option<Kind> {
        for wrapper in ["LowCardinality(", "Nullable("] {
            if let Some(inner) = type_name.strip_prefix(wrapper) {
                return Kind::clickhouse(inner.strip_suffix(')')?);
            }
        }
        let (name, bounds) = type_name.split_once('(').unwrap_or((type_name, ""));
        let bounds: Vec<u32> =
            bounds.trim_end_matches(')').split(',').filter_map(|bound| bound.trim().parse().ok()).collect();
        Some(match (name, bounds.as_slice()) {
            ("Bool", _) => Kind::Bool,
            ("Int8", _) => Kind::Int(8),
            ("Int16", _) => Kind::Int(16),
            ("Int32", _) => Kind::Int(32),
            ("Int64", _) => Kind::Int(64),
            ("UInt8", _) => Kind::Unsigned(8),
            ("UInt16", _) => Kind::Unsigned(16),
            ("UInt32", _) => Kind::Unsigned(32),
            ("UInt64", _) => Kind::Unsigned(64),
            ("Float32", _) => Kind::Float(false),
            ("Float64", _) => Kind::Float(true),
            ("Decimal", [digits, scale]) if scale <= digits => Kind::Decimal(*digits, *scale),
            ("String", _) => Kind::Text(None, false),
            ("UUID", _) => Kind::Uuid,
            ("Date" | "Date32", _) => Kind::Date,
            ("DateTime", _) => Kind::Timestamp(0),
            ("DateTime64", [digits, ..]) => Kind::Timestamp((*digits).min(6)),
            _ => return None,
        })
    }

    /// From the name of a field's type in Redis.
    #[cfg(feature = "redis")]
    pub(crate) fn redis(type_name: &str) -> Option<Kind> {
        Some(match type_name {
            "text" => Kind::Text(None, false),
            "integer" => Kind::Int(64),
            "number" => Kind::Decimal(18, 4),
            "boolean" => Kind::Bool,
            "timestamp" => Kind::Timestamp(6),
            "uuid" => Kind::Uuid,
            "json" => Kind::Json,
            "binary" => Kind::Bytes,
            _ => return None,
        })
    }

    /// From a declared type of SQLite, by the rules of the sink.
    pub(crate) fn sqlite(declared: &str) -> Kind {
        let upper = declared.trim().to_ascii_uppercase();
        let base = upper.split('(').next().unwrap_or_default().trim_end();
        let has = |part: &str| upper.contains(part);
        match base {
            _ if base.starts_with("JSON") => Kind::Json,
            "BOOLEAN" | "BOOL" => Kind::Bool,
            "DATE" => Kind::Date,
            "TIME" => Kind::Time,
            "DATETIME" => Kind::Timestamp(6),
            "UUID" => Kind::Uuid,
            "ANY" | "" => Kind::Text(None, false),
            _ if has("INT") => Kind::Int(64),
            _ if has("CHAR") || has("CLOB") || has("TEXT") => Kind::Text(None, false),
            _ if base.starts_with("TIMESTAMP") => Kind::Timestamp(6),
            _ if has("BLOB") => Kind::Bytes,
            _ if has("REAL") || has("FLOA") || has("DOUB") => Kind::Float(true),
            _ => Kind::Int(32),
        }
    }

    /// So many numbers have values of their own.
    pub(crate) fn capacity(&self) -> u64 {
        match self {
            Kind::Bool => 2,
            Kind::Int(bits) => 1 << (bits - 1).min(62),
            #[cfg(feature = "clickhouse")]
            Kind::Unsigned(bits) => 1 << (*bits).min(62),
            Kind::Decimal(digits, _) => 10u64.saturating_pow(*digits),
            Kind::Float(true) => 1 << 52,
            Kind::Float(false) => 1 << 22,
            Kind::Text(Some(length), _) => 36u64.saturating_pow((*length).min(64) as u32),
            // To the year 2136: some keep no later ones.
            Kind::Date => 50_000,
            Kind::Time => 86_400_000_000,
            Kind::Text(None, _) | Kind::Uuid | Kind::Bytes | Kind::Timestamp(_) | Kind::Json => u64::MAX,
        }
    }

    /// The value of `number`: different numbers have different values within [`Kind::capacity`], and a larger one has a larger
    /// value, as far as the kind has an order. Texts are filled up with `filler`.
    pub(crate) fn value(&self, number: u64, filler: &str) -> Value {
        let within = number % self.capacity();
        match self {
            Kind::Bool => Value::from(within == 1),
            Kind::Int(_) => Value::from(within),
            #[cfg(feature = "clickhouse")]
            Kind::Unsigned(_) => Value::from(within),
            Kind::Decimal(digits, scale) => Value::from(decimal(within, *digits, *scale)),
            Kind::Float(_) => Value::from(within as f64),
            Kind::Text(length, _) => {
                let length = length.unwrap_or(usize::MAX);
                let named = format!("drill-{number:012}{filler}");
                // An order is kept as long as the number has its zeros in front.
                Value::from(if length >= named.chars().count() {
                    named
                } else if length >= 12 {
                    format!("{number:012}")
                } else {
                    base36(within, length)
                })
            }
            Kind::Uuid => {
                let text = format!("{number:032x}");
                Value::from(format!(
                    "{}-{}-{}-{}-{}",
                    &text[..8],
                    &text[8..12],
                    &text[12..16],
                    &text[16..20],
                    &text[20..]
                ))
            }
            Kind::Bytes => Value::from(STANDARD.encode(format!("{number:012}{filler}"))),
            Kind::Date => Value::from(day(within)),
            Kind::Time => {
                let seconds = within / 1_000_000;
                Value::from(format!(
                    "{:02}:{:02}:{:02}.{:06}",
                    seconds / 3600,
                    seconds / 60 % 60,
                    seconds % 60,
                    within % 1_000_000
                ))
            }
            Kind::Timestamp(_) => {
                Value::from(moment(((number % 100_000_000_000) as i64 + 1_600_000_000) * 1_000_000, 0))
            }
            Kind::Json => serde_json::json!({ "n": number, "text": filler, "list": [true, null, "é"] }),
        }
    }

    /// As [`Kind::value`], with the values of neighbours far apart, and negative ones.
    pub(crate) fn spread(&self, number: u64, filler: &str) -> Value {
        const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
        match self {
            Kind::Int(bits) => {
                let unused = 64 - (*bits).clamp(1, 64);
                Value::from((number.wrapping_mul(ODD) << unused).cast_signed() >> unused)
            }
            #[cfg(feature = "clickhouse")]
            Kind::Unsigned(bits) => {
                let unused = 64 - (*bits).clamp(1, 64);
                Value::from((number.wrapping_mul(ODD) << unused) >> unused)
            }
            Kind::Bool => Value::from(number.wrapping_mul(ODD) >> 63 == 1),
            Kind::Float(_) => Value::from((number % (1 << 21)) as f64 + 0.5),
            _ => self.value(number, filler),
        }
    }

    /// A JSON value as [`Kind::normal`] has it; none if it cannot be told what the sink makes of it.
    pub(crate) fn expected(&self, value: &Value) -> Option<String> {
        match (self, value) {
            (Kind::Json, value) => Some(value.to_string()),
            (Kind::Bytes, Value::String(text)) => {
                let mut bytes = Vec::new();
                decode::bytes(text, &mut bytes).ok()?;
                Some(hex(&bytes))
            }
            (_, Value::String(text)) => Some(self.normal(text)),
            (Kind::Decimal(..), Value::Number(number)) => {
                let text = number.to_string();
                (!text.contains(['e', 'E'])).then(|| self.normal(&text))
            }
            (_, Value::Number(_) | Value::Bool(_)) => Some(self.normal(&value.to_string())),
            _ => None,
        }
    }

    /// The one form of a value's text: equal values have equal ones. What is no value of the kind stays as it is.
    pub(crate) fn normal(&self, text: &str) -> String {
        let own = || text.to_owned();
        match self {
            Kind::Bool => match text {
                "t" | "1" => "true".to_owned(),
                "f" | "0" => "false".to_owned(),
                _ => own(),
            },
            #[cfg(feature = "clickhouse")]
            Kind::Unsigned(_) => text.parse::<i128>().map_or_else(|_| own(), |number| number.to_string()),
            Kind::Int(_) => text.parse::<i128>().map_or_else(|_| own(), |number| number.to_string()),
            Kind::Decimal(..) => match text.split_once('.') {
                Some((whole, fraction)) if fraction.bytes().all(|digit| digit.is_ascii_digit()) => {
                    let fraction = fraction.trim_end_matches('0');
                    if fraction.is_empty() { whole.to_owned() } else { format!("{whole}.{fraction}") }
                }
                _ => own(),
            },
            Kind::Float(true) => text.parse::<f64>().map_or_else(|_| own(), |number| format!("{number:?}")),
            Kind::Float(false) => text.parse::<f32>().map_or_else(|_| own(), |number| format!("{number:?}")),
            Kind::Text(_, true) => text.trim_end_matches(' ').to_owned(),
            Kind::Text(_, false) => own(),
            Kind::Uuid => text.to_ascii_lowercase(),
            Kind::Bytes => text.strip_prefix("\\x").unwrap_or(text).to_ascii_lowercase(),
            Kind::Date => decode::date(text).map_or_else(|_| own(), |days| format!("day {days}")),
            Kind::Time => decode::time(text).map_or_else(|_| own(), |micros| format!("{micros} us")),
            // Some show digits of a second that are always 0.
            Kind::Timestamp(_) => decode::timestamp(text)
                .or_else(|_| decode::local_timestamp(text))
                .map_or_else(|_| own(), |micros| moment(micros, 6)),
            Kind::Json => {
                serde_json::from_str::<Value>(text).map_or_else(|_| own(), |value| value.to_string())
            }
        }
    }
}

/// Microseconds since the epoch as RFC 3339 in UTC, with so many digits of a second.
pub(crate) fn moment(micros: i64, digits: u32) -> String {
    let Ok(time) = jiff::Timestamp::from_microsecond(micros) else { return format!("{micros} us") };
    let precision = digits as usize;
    format!("{time:.precision$}")
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `number(a,b) rest`: the name without its bounds, and the bounds.
#[cfg(feature = "postgres")]
fn bounded(type_name: &str) -> (String, Vec<i64>) {
    let Some((front, rest)) = type_name.split_once('(') else { return (type_name.to_owned(), Vec::new()) };
    let Some((bounds, back)) = rest.split_once(')') else { return (type_name.to_owned(), Vec::new()) };
    let bounds = bounds.split(',').filter_map(|bound| bound.trim().parse().ok()).collect();
    (format!("{front}{back}"), bounds)
}

/// So large numbers that they differ before the point, if there is room.
fn decimal(number: u64, digits: u32, scale: u32) -> String {
    let whole = digits - scale;
    if scale == 0 {
        return number.to_string();
    }
    if whole >= 9 {
        return format!("{number}.{:0>1$}", 5, scale as usize);
    }
    let unit = 10u128.pow(scale.min(30));
    let (integer, fraction) = (u128::from(number) / unit, u128::from(number) % unit);
    format!("{integer}.{fraction:0>width$}", width = scale as usize)
}

fn base36(mut number: u64, length: usize) -> String {
    let mut digits = vec![b'0'; length.max(1)];
    for digit in digits.iter_mut().rev() {
        *digit = b"0123456789abcdefghijklmnopqrstuvwxyz"[(number % 36) as usize];
        number /= 36;
    }
    digits.iter().map(|digit| char::from(*digit)).collect()
}

fn day(number: u64) -> String {
    let days = i32::try_from(number).unwrap_or(0);
    let epoch = jiff::civil::date(2000, 1, 1);
    epoch.checked_add(jiff::Span::new().days(days)).unwrap_or(epoch).to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn kinds() -> Vec<Kind> {
        let mut kinds = vec![
            Kind::Bool,
            Kind::Int(16),
            Kind::Int(32),
            Kind::Int(64),
            Kind::Decimal(10, 2),
            Kind::Decimal(18, 4),
            Kind::Decimal(5, 0),
            Kind::Float(false),
            Kind::Float(true),
            Kind::Uuid,
            Kind::Bytes,
            Kind::Date,
            Kind::Time,
            Kind::Timestamp(0),
            Kind::Timestamp(6),
            Kind::Json,
        ];
        kinds.extend([None, Some(3), Some(12), Some(40)].map(|length| Kind::Text(length, false)));
        kinds
    }

    #[test]
    fn different_numbers_have_different_values_within_a_kinds_capacity() {
        for kind in kinds() {
            let count = kind.capacity().min(2_000);
            for make in [Kind::value, Kind::spread] {
                if kind == Kind::Bool {
                    continue;
                }
                let values: HashSet<Option<String>> =
                    (0..count).map(|number| kind.expected(&make(&kind, number, "é\"\n"))).collect();
                assert_eq!(values.len() as u64, count, "{kind:?}");
                assert!(!values.contains(&None), "{kind:?}");
            }
        }
    }

    #[test]
    fn texts_keep_within_their_length() {
        for length in 1..60 {
            let value = Kind::Text(Some(length), false).value(123_456, " with a long filler");
            assert!(value.as_str().unwrap().chars().count() <= length, "{value}");
        }
    }

    #[test]
    fn forms_of_one_value_are_alike() {
        let stamp = Kind::Timestamp(6);
        assert_eq!(stamp.normal("2026-11-30 14:42:52.5+00"), stamp.normal("2026-11-30T14:42:52.500Z"));
        assert_eq!(stamp.normal("2026-11-30 14:42:52.5"), stamp.normal("2026-11-30T14:42:52.5Z"));
        assert_eq!(Kind::Decimal(9, 2).normal("12.50"), "12.5");
        assert_eq!(Kind::Decimal(9, 2).normal("12.00"), "12");
        assert_eq!(Kind::Decimal(9, 2).normal("1200"), "1200");
        assert_eq!(Kind::Text(Some(9), true).normal("ab   "), "ab");
        assert_eq!(Kind::Bytes.expected(&Value::from("AP8=")).as_deref(), Some("00ff"));
        assert_eq!(Kind::Bytes.normal("\\x00ff"), "00ff");
        assert_eq!(Kind::Bool.normal("1"), Kind::Bool.expected(&Value::from(true)).unwrap());
        assert_eq!(Kind::Json.normal("{\"b\": 1, \"a\":2}"), r#"{"a":2,"b":1}"#);
        assert_ne!(Kind::Int(64).normal("12"), Kind::Int(64).normal("13"));
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn types_are_known_by_their_names() {
        assert_eq!(Kind::postgres("numeric(10,2)"), Some(Kind::Decimal(10, 2)));
        assert_eq!(Kind::postgres("timestamp(3) with time zone"), Some(Kind::Timestamp(3)));
        assert_eq!(Kind::postgres("character varying(20)"), Some(Kind::Text(Some(20), false)));
        assert_eq!(Kind::postgres("character(2)"), Some(Kind::Text(Some(2), true)));
        assert_eq!(Kind::postgres("mood"), None);
        assert_eq!(Kind::postgres("numeric(2,-3)"), None);
        #[cfg(feature = "clickhouse")]
        {
            let nested = "LowCardinality(Nullable(String))";
            assert_eq!(Kind::clickhouse(nested), Some(Kind::Text(None, false)));
            assert_eq!(Kind::clickhouse("DateTime64(3, 'UTC')"), Some(Kind::Timestamp(3)));
            assert_eq!(Kind::clickhouse("DateTime('Europe/Zurich')"), Some(Kind::Timestamp(0)));
            assert_eq!(Kind::clickhouse("Decimal(18, 2)"), Some(Kind::Decimal(18, 2)));
            assert_eq!(Kind::clickhouse("Array(String)"), None);
        }
        assert_eq!(Kind::sqlite("VARCHAR(20)"), Kind::Text(None, false));
        assert_eq!(Kind::sqlite("DECIMAL(10,2)"), Kind::Int(32));
        assert_eq!(Kind::sqlite("BIGINT"), Kind::Int(64));
    }
}
