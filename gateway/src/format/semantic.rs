//! The semantic types that Debezium and Kafka Connect declare beside a value, and what the value means under each, as JSON text
//! that the sinks' encoders take. Exact, or an error; never rounded.

use std::fmt::Write;

use crate::naming::json;

/// The longest decimal, bytes; Postgres keeps 131072 digits before the point, which are 54,428 bytes.
pub(crate) const MAX_DECIMAL: usize = 1 << 16;
/// The furthest decimal point.
const MAX_SCALE: i64 = 131_072;

/// What a declared type makes of its values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Semantic {
    /// `org.apache.kafka.connect.data.Decimal`: base64 of a big-endian two's complement number, times ten to minus `scale`.
    Decimal {
        /// Digits behind the point.
        scale: i64,
    },
    /// `io.debezium.data.VariableScaleDecimal`: an object of `scale` and `value`.
    VariableScaleDecimal,
    /// Days since the epoch.
    Date,
    /// A time of day in these units since midnight.
    Time(Unit),
    /// A moment in these units since the epoch, without a zone.
    Timestamp(Unit),
    /// A moment in these units since the epoch, in UTC.
    Instant(Unit),
    /// `io.debezium.data.Json`: a string that holds JSON.
    Json,
    /// `io.debezium.data.Bits`: base64 of bits, the lowest byte first.
    Bits {
        /// How many bits count.
        length: Option<usize>,
    },
    /// Nothing has to be done: strings (UUID, enum, XML, zoned times, intervals in ISO 8601), numbers, booleans, geometries.
    AsIs,
}

/// What a number of a time counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// Milliseconds.
    Millis,
    /// Microseconds.
    Micros,
    /// Nanoseconds.
    Nanos,
}

impl Unit {
    fn per_second(self) -> i64 {
        match self {
            Unit::Millis => 1_000,
            Unit::Micros => 1_000_000,
            Unit::Nanos => 1_000_000_000,
        }
    }

    fn digits(self) -> usize {
        match self {
            Unit::Millis => 3,
            Unit::Micros => 6,
            Unit::Nanos => 9,
        }
    }
}

/// The parameters of a declared type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Parameters {
    pub(crate) scale: Option<i64>,
    pub(crate) length: Option<usize>,
}

impl Semantic {
    /// The type of that name; none if it is not known here. Says which parameter is missing.
    pub(crate) fn named(name: &str, parameters: Parameters) -> Result<Option<Self>, String> {
        Ok(Some(match name {
            "org.apache.kafka.connect.data.Decimal" => {
                let scale = parameters.scale.ok_or("a Decimal is declared without its scale")?;
                if scale.abs() > MAX_SCALE {
                    return Err(format!("a Decimal is declared with a scale beyond {MAX_SCALE}"));
                }
                Semantic::Decimal { scale }
            }
            "io.debezium.data.VariableScaleDecimal" => Semantic::VariableScaleDecimal,
            "io.debezium.time.Date" | "org.apache.kafka.connect.data.Date" => Semantic::Date,
            "io.debezium.time.Time" | "org.apache.kafka.connect.data.Time" => Semantic::Time(Unit::Millis),
            "io.debezium.time.MicroTime" => Semantic::Time(Unit::Micros),
            "io.debezium.time.NanoTime" => Semantic::Time(Unit::Nanos),
            "io.debezium.time.Timestamp" | "org.apache.kafka.connect.data.Timestamp" => {
                Semantic::Timestamp(Unit::Millis)
            }
            "io.debezium.time.MicroTimestamp" => Semantic::Timestamp(Unit::Micros),
            "io.debezium.time.NanoTimestamp" => Semantic::Timestamp(Unit::Nanos),
            "io.debezium.data.Json" => Semantic::Json,
            "io.debezium.data.Bits" => Semantic::Bits { length: parameters.length },
            "io.debezium.time.ZonedTimestamp"
            | "io.debezium.time.ZonedTime"
            | "io.debezium.time.IsoDate"
            | "io.debezium.time.IsoTime"
            | "io.debezium.time.IsoTimestamp"
            | "io.debezium.time.Year"
            | "io.debezium.time.Interval"
            | "io.debezium.time.MicroDuration"
            | "io.debezium.time.NanoDuration"
            | "io.debezium.data.Uuid"
            | "io.debezium.data.Xml"
            | "io.debezium.data.Enum"
            | "io.debezium.data.EnumSet"
            | "io.debezium.data.Ltree"
            | "io.debezium.data.TsVector"
            | "io.debezium.data.FloatVector"
            | "io.debezium.data.DoubleVector"
            | "io.debezium.data.SparseVector"
            | "io.debezium.data.geometry.Geometry"
            | "io.debezium.data.geometry.Geography"
            | "io.debezium.data.geometry.Point" => Semantic::AsIs,
            _ => return Ok(None),
        }))
    }

    /// Appends what `value` (JSON text, not null) means, as JSON text.
    pub(crate) fn convert(&self, value: &str, out: &mut String) -> Result<(), String> {
        match self {
            Semantic::AsIs => out.push_str(value),
            Semantic::Decimal { scale } => decimal(&bytes(value)?, *scale, out)?,
            Semantic::VariableScaleDecimal => {
                let members = json::members(value).map_err(|_| needs("an object of scale and value"))?;
                let get =
                    |name: &str| members.iter().find(|(member, _)| member == name).map(|(_, value)| *value);
                let scale = integer(get("scale").ok_or("a VariableScaleDecimal has no scale")?)?;
                decimal(&bytes(get("value").ok_or("a VariableScaleDecimal has no value")?)?, scale, out)?;
            }
            Semantic::Date => date(integer(value)?, out)?,
            Semantic::Time(unit) => time(integer(value)?, *unit, out),
            Semantic::Timestamp(unit) => timestamp(integer(value)?, *unit, "", out),
            Semantic::Instant(unit) => timestamp(integer(value)?, *unit, "Z", out),
            Semantic::Json => {
                if !value.starts_with('"') {
                    return Err(needs("a string that holds JSON"));
                }
                let text = json::text(value)?;
                let inner: &serde_json::value::RawValue = serde_json::from_str(&text)
                    .map_err(|_| "a value that is declared as JSON is not valid JSON".to_owned())?;
                out.push_str(inner.get());
            }
            Semantic::Bits { length } => {
                if matches!(value, "true" | "false") {
                    out.push_str(value);
                    return Ok(());
                }
                let bytes = bytes(value)?;
                let length = length.unwrap_or(bytes.len() * 8);
                let bit = |at: usize| bytes.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1);
                if (length..bytes.len() * 8).any(bit) {
                    return Err(format!("a bit is set beyond the declared length of {length}"));
                }
                if length > MAX_DECIMAL * 8 {
                    return Err(format!("bits are declared with a length above {}", MAX_DECIMAL * 8));
                }
                out.push('"');
                (0..length).rev().for_each(|at| out.push(if bit(at) { '1' } else { '0' }));
                out.push('"');
            }
        }
        Ok(())
    }
}

fn needs(what: &str) -> String {
    format!("a value does not fit its declared type, which needs {what}; check the producer's converter")
}

/// The bytes of a base64 string.
fn bytes(value: &str) -> Result<Vec<u8>, String> {
    if !value.starts_with('"') {
        return Err(needs("base64 in a string"));
    }
    let text = json::text(value)?;
    if text.len() > MAX_DECIMAL * 2 {
        return Err(format!("a number has more than {MAX_DECIMAL} bytes"));
    }
    let mut out = Vec::new();
    if text.starts_with('\\') {
        return Err(needs("base64 in a string"));
    }
    adapters::decode::bytes(&text, &mut out).map_err(|_| needs("base64 in a string"))?;
    Ok(out)
}

/// An integer of 64 bits, as a number or in a string.
fn integer(value: &str) -> Result<i64, String> {
    let text = if value.starts_with('"') { json::text(value)? } else { value.into() };
    text.parse().map_err(|_| needs("an integer of 64 bits"))
}

/// Appends, as a JSON string, the decimal number whose unscaled value is `bytes`, big-endian two's complement.
pub(crate) fn decimal(bytes: &[u8], scale: i64, out: &mut String) -> Result<(), String> {
    if bytes.is_empty() {
        return Err(needs("a number of one byte or more"));
    }
    if bytes.len() > MAX_DECIMAL {
        return Err(format!("a number has {} bytes, more than {MAX_DECIMAL}", bytes.len()));
    }
    if scale.abs() > MAX_SCALE {
        return Err(format!("a number's scale is beyond {MAX_SCALE}"));
    }
    let negative = bytes[0] & 0x80 != 0;
    let digits = digits(bytes, negative);
    out.push('"');
    if negative {
        out.push('-');
    }
    match usize::try_from(scale) {
        Ok(0) => out.push_str(&digits),
        Ok(scale) => {
            let padded = format!("{digits:0>width$}", width = scale + 1);
            let (whole, fraction) = padded.split_at(padded.len() - scale);
            out.push_str(whole);
            out.push('.');
            out.push_str(fraction);
        }
        Err(_) => {
            out.push_str(&digits);
            if digits != "0" {
                out.extend(std::iter::repeat_n('0', scale.unsigned_abs() as usize));
            }
        }
    }
    out.push('"');
    Ok(())
}

/// Decimal digits of the magnitude.
fn digits(bytes: &[u8], negative: bool) -> String {
    // Magnitude in 32-bit limbs, most significant first.
    let mut magnitude: Vec<u8> = bytes.iter().map(|byte| if negative { !byte } else { *byte }).collect();
    if negative {
        for byte in magnitude.iter_mut().rev() {
            let (sum, carry) = byte.overflowing_add(1);
            *byte = sum;
            if !carry {
                break;
            }
        }
        // The least number of its length: its magnitude needs one bit more.
        if magnitude.iter().all(|byte| *byte == 0) {
            magnitude.insert(0, 1);
        }
    }
    let first = magnitude.len() % 4;
    let mut limbs: Vec<u32> = Vec::with_capacity(magnitude.len() / 4 + 1);
    let big = |chunk: &[u8]| chunk.iter().fold(0u32, |limb, byte| limb << 8 | u32::from(*byte));
    if first > 0 {
        limbs.push(big(&magnitude[..first]));
    }
    limbs.extend(magnitude[first..].chunks_exact(4).map(big));
    const BILLION: u64 = 1_000_000_000;
    let mut groups: Vec<u32> = Vec::new();
    let mut start = limbs.iter().take_while(|limb| **limb == 0).count();
    while start < limbs.len() {
        let mut rest = 0u64;
        for limb in &mut limbs[start..] {
            let value = rest << 32 | u64::from(*limb);
            // A remainder is below a billion, so the quotient has 32 bits.
            *limb = (value / BILLION) as u32;
            rest = value % BILLION;
        }
        groups.push(rest as u32);
        start += limbs[start..].iter().take_while(|limb| **limb == 0).count();
    }
    let mut text = String::with_capacity(groups.len() * 9 + 1);
    let mut groups = groups.iter().rev();
    write!(text, "{}", groups.next().unwrap_or(&0)).unwrap_or_default();
    groups.for_each(|group| write!(text, "{group:09}").unwrap_or_default());
    text
}

/// Appends the date so many days after 1970-01-01; the ends of the range stand for infinity, as Debezium writes it.
fn date(days: i64, out: &mut String) -> Result<(), String> {
    match i32::try_from(days) {
        Ok(i32::MAX) => out.push_str("\"infinity\""),
        Ok(i32::MIN) => out.push_str("\"-infinity\""),
        Ok(_) => {
            out.push('"');
            civil(days, out);
            out.push('"');
        }
        Err(_) => return Err(needs("days within 32 bits")),
    }
    Ok(())
}

/// Appends year, month and day.
fn civil(days: i64, out: &mut String) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let sign = match year {
        ..0 => "-",
        0..=9999 => "",
        _ => "+",
    };
    write!(out, "{sign}{:04}-{month:02}-{day:02}", year.abs()).unwrap_or_default();
}

/// Appends a time of day. MySQL's `TIME` may be negative or beyond a day: it is written all the same, for text columns.
fn time(count: i64, unit: Unit, out: &mut String) {
    let sign = if count < 0 { "-" } else { "" };
    let (count, per_second) = (count.unsigned_abs(), unit.per_second().unsigned_abs());
    let (seconds, fraction) = (count / per_second, count % per_second);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    write!(out, "\"{sign}{hours:02}:{minutes:02}:{:02}", seconds % 60).unwrap_or_default();
    decimals(fraction, unit, out);
    out.push('"');
}

fn decimals(fraction: u64, unit: Unit, out: &mut String) {
    if fraction > 0 {
        let text = format!("{fraction:0width$}", width = unit.digits());
        out.push('.');
        out.push_str(text.trim_end_matches('0'));
    }
}

/// What Debezium's Postgres connector sends for `infinity` and `-infinity`.
const INFINITY: [(i64, &str); 2] =
    [(9_223_372_036_825_200_000, "\"infinity\""), (-9_223_372_036_832_400_000, "\"-infinity\"")];

fn timestamp(count: i64, unit: Unit, zone: &str, out: &mut String) {
    if let Some((_, word)) = INFINITY.iter().find(|(infinity, _)| *infinity == count)
        && unit != Unit::Nanos
    {
        out.push_str(word);
        return;
    }
    let seconds = count.div_euclid(unit.per_second());
    let fraction = count.rem_euclid(unit.per_second()).unsigned_abs();
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    out.push('"');
    civil(days, out);
    write!(out, "T{:02}:{:02}:{:02}", of_day / 3600, of_day / 60 % 60, of_day % 60).unwrap_or_default();
    decimals(fraction, unit, out);
    out.push_str(zone);
    out.push('"');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn convert(semantic: Semantic, value: &str) -> Result<String, String> {
        let mut out = String::new();
        semantic.convert(value, &mut out).map(|()| out)
    }

    fn named(name: &str) -> Semantic {
        let parameters = Parameters { scale: Some(2), length: Some(12) };
        Semantic::named(name, parameters).unwrap().unwrap_or_else(|| panic!("{name} is not known"))
    }

    #[test]
    fn decimals_are_exact() {
        let decimal = |base64: &str, scale| convert(Semantic::Decimal { scale }, &format!("\"{base64}\""));
        assert_eq!(decimal("AA==", 0).as_deref(), Ok("\"0\""));
        assert_eq!(decimal("AA==", 2).as_deref(), Ok("\"0.00\""));
        assert_eq!(decimal("MDk=", 2).as_deref(), Ok("\"123.45\""));
        assert_eq!(decimal("/w==", 3).as_deref(), Ok("\"-0.001\""));
        assert_eq!(decimal("gA==", 0).as_deref(), Ok("\"-128\""));
        assert_eq!(decimal("gAAAAAAAAAA=", 0).as_deref(), Ok("\"-9223372036854775808\""));
        assert_eq!(decimal("AP//////////", 0).as_deref(), Ok("\"18446744073709551615\""));
        assert_eq!(decimal("MDk=", -3).as_deref(), Ok("\"12345000\""));
        let variable = r#"{"scale":4,"value":"MDk="}"#;
        assert_eq!(convert(Semantic::VariableScaleDecimal, variable).as_deref(), Ok("\"1.2345\""));
        for bad in ["\"\"", "\"MDk\u{1}\"", "12.5", "\"\\\\x3039\"", "{}"] {
            let said = convert(Semantic::Decimal { scale: 2 }, bad).unwrap_err();
            assert!(said.contains("needs"), "{bad}: {said}");
        }
        assert!(
            convert(Semantic::VariableScaleDecimal, r#"{"value":"MDk="}"#).unwrap_err().contains("scale")
        );
        assert!(
            convert(Semantic::VariableScaleDecimal, r#"{"scale":2147483647,"value":"MDk="}"#)
                .unwrap_err()
                .contains("131072")
        );
        assert!(Semantic::named("org.apache.kafka.connect.data.Decimal", Parameters::default()).is_err());
    }

    #[test]
    fn times_and_dates_are_exact_to_the_nanosecond() {
        for (name, value, expected) in [
            ("io.debezium.time.Date", "19782", "\"2024-02-29\""),
            ("io.debezium.time.Date", "-719529", "\"-0001-12-31\""),
            ("io.debezium.time.Date", "2932897", "\"+10000-01-01\""),
            ("io.debezium.time.Date", "2147483647", "\"infinity\""),
            ("io.debezium.time.Date", "-2147483648", "\"-infinity\""),
            ("org.apache.kafka.connect.data.Date", "0", "\"1970-01-01\""),
            ("io.debezium.time.Time", "45296789", "\"12:34:56.789\""),
            ("io.debezium.time.MicroTime", "45296000001", "\"12:34:56.000001\""),
            ("io.debezium.time.MicroTime", "-3600000000", "\"-01:00:00\""),
            ("io.debezium.time.MicroTime", "3020399000000", "\"838:59:59\""),
            ("io.debezium.time.NanoTime", "1", "\"00:00:00.000000001\""),
            ("io.debezium.time.Timestamp", "-1", "\"1969-12-31T23:59:59.999\""),
            ("io.debezium.time.MicroTimestamp", "1709251199123456", "\"2024-02-29T23:59:59.123456\""),
            ("io.debezium.time.MicroTimestamp", "-9223372036832400000", "\"-infinity\""),
            ("io.debezium.time.NanoTimestamp", "1000000001", "\"1970-01-01T00:00:01.000000001\""),
            ("io.debezium.time.ZonedTimestamp", "\"2024-02-29T23:59:59Z\"", "\"2024-02-29T23:59:59Z\""),
            ("io.debezium.time.Year", "2024", "2024"),
            ("io.debezium.time.MicroDuration", "86400000000", "86400000000"),
            ("io.debezium.time.Interval", "\"P1Y2M3DT4H5M6.78S\"", "\"P1Y2M3DT4H5M6.78S\""),
            ("io.debezium.data.Json", r#""{\"a\": 1.50}""#, r#"{"a": 1.50}"#),
            ("io.debezium.data.Bits", "\"BQg=\"", "\"100000000101\""),
            ("io.debezium.data.Uuid", "\"u\"", "\"u\""),
            ("io.debezium.data.FloatVector", "[1.5,2]", "[1.5,2]"),
        ] {
            assert_eq!(convert(named(name), value).as_deref(), Ok(expected), "{name} {value}");
        }
        for (name, bad) in [
            ("io.debezium.time.Date", "2147483648"),
            ("io.debezium.time.MicroTimestamp", "1.5"),
            ("io.debezium.time.MicroTimestamp", "\"2024-01-01\""),
            ("io.debezium.time.MicroTimestamp", "9223372036854775808"),
            ("io.debezium.data.Json", "\"{\""),
            ("io.debezium.data.Json", "{}"),
            ("io.debezium.data.Bits", "\"//8=\""),
        ] {
            assert!(convert(named(name), bad).is_err(), "{name} {bad}");
        }
        assert_eq!(Semantic::named("io.debezium.data.Unheard", Parameters::default()), Ok(None));
    }

    proptest! {
        #[test]
        fn any_decimal_comes_back(value: i128, scale in 0..40usize, more in 0..3usize) {
            // Sign bytes in front change nothing.
            let mut bytes = vec![if value < 0 { 0xff } else { 0 }; more];
            bytes.extend_from_slice(&value.to_be_bytes());
            let mut out = String::new();
            decimal(&bytes, scale as i64, &mut out).unwrap();
            let text = out.trim_matches('"');
            let point = text.find('.');
            prop_assert_eq!(point.map_or(0, |at| text.len() - at - 1), scale);
            prop_assert_eq!(text.replace('.', "").parse::<i128>().unwrap(), value);
        }

        #[test]
        fn any_timestamp_is_read_back_by_the_sinks(micros in -210_000_000_000_000_000..9_000_000_000_000_000_000i64) {
            let text = convert(Semantic::Timestamp(Unit::Micros), &micros.to_string()).unwrap();
            prop_assert_eq!(adapters::decode::local_timestamp(text.trim_matches('"')), Ok(micros));
            let text = convert(Semantic::Instant(Unit::Micros), &micros.to_string()).unwrap();
            prop_assert_eq!(adapters::decode::timestamp(text.trim_matches('"')), Ok(micros));
        }

        #[test]
        fn any_date_is_read_back_by_the_sinks(days in -2_000_000..2_000_000_000i64) {
            let text = convert(Semantic::Date, &days.to_string()).unwrap();
            prop_assert_eq!(adapters::decode::date(text.trim_matches('"')), Ok(days));
        }

        #[test]
        fn any_time_of_day_is_read_back_by_the_sinks(micros in 0..86_400_000_000i64) {
            let text = convert(Semantic::Time(Unit::Micros), &micros.to_string()).unwrap();
            prop_assert_eq!(adapters::decode::time(text.trim_matches('"')), Ok(micros));
        }

        #[test]
        fn nothing_panics(value in "\\PC{0,24}", number: i64) {
            for semantic in [
                Semantic::Decimal { scale: 3 }, Semantic::VariableScaleDecimal, Semantic::Date, Semantic::Time(Unit::Nanos),
                Semantic::Timestamp(Unit::Millis), Semantic::Instant(Unit::Nanos), Semantic::Json, Semantic::Bits { length: None },
            ] {
                let quoted = serde_json::Value::from(value.as_str()).to_string();
                drop(convert(semantic.clone(), &quoted));
                drop(convert(semantic, &number.to_string()));
            }
        }
    }
}
