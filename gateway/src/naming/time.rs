//! A record's event time. Pure.

use jiff::fmt::temporal::DateTimeParser;

use crate::key::Pointer;

/// Year 1 to the last but one day of year 9999 (so that every offset can show it), ms since the epoch.
pub const TIME_BOUNDS_MS: std::ops::RangeInclusive<i64> = -62_135_596_800_000..=253_402_207_200_999;

/// Where a record's event time comes from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum EventTime {
    /// When it came in.
    #[default]
    Arrival,
    /// The Kafka record's timestamp.
    KafkaTimestamp,
    /// The source's time of a change event.
    Debezium,
    /// A value of the payload: RFC 3339 text, or a number in `unit`.
    Pointer {
        /// Where.
        pointer: Pointer,
        /// Of numbers; without it they are refused.
        unit: Option<TimeUnit>,
    },
}

/// What a number that tells a time since the epoch counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimeUnit {
    /// `s`
    Seconds,
    /// `ms`
    Millis,
    /// `us`
    Micros,
    /// `ns`
    Nanos,
}

impl TimeUnit {
    /// From its word in the configuration.
    pub fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "s" => TimeUnit::Seconds,
            "ms" => TimeUnit::Millis,
            "us" => TimeUnit::Micros,
            "ns" => TimeUnit::Nanos,
            _ => return None,
        })
    }

    /// Power of ten that makes ms of it.
    fn to_ms(self) -> i64 {
        match self {
            TimeUnit::Seconds => 3,
            TimeUnit::Millis => 0,
            TimeUnit::Micros => -3,
            TimeUnit::Nanos => -6,
        }
    }
}

/// The time that the JSON text of a value tells, ms, rounded down. Says what is wrong, never the value.
pub(crate) fn event_ms(json: &str, unit: Option<TimeUnit>) -> Result<i64, String> {
    static PARSER: DateTimeParser = DateTimeParser::new();
    let ms = match (json.as_bytes().first(), unit) {
        (Some(b'"'), _) => floor_ms(PARSER.parse_timestamp(&json[1..json.len() - 1]).map_err(
            |_| "text that is not an RFC 3339 time; send \"2026-01-31T23:59:59.123Z\" or an offset in place of Z",
        )?),
        (Some(b'-' | b'0'..=b'9'), Some(unit)) => {
            scaled(json, unit.to_ms()).ok_or("a number outside the years 1 to 9999; check `time_unit`")?
        }
        (Some(b'-' | b'0'..=b'9'), None) => {
            return Err("a number, whose unit is not known; set `time_unit` to s, ms, us or ns".to_owned());
        }
        _ => return Err("neither a text nor a number; send an RFC 3339 time".to_owned()),
    };
    if TIME_BOUNDS_MS.contains(&ms) {
        Ok(ms)
    } else {
        Err("outside the years 1 to 9999; send a real time".to_owned())
    }
}

/// jiff rounds towards zero.
fn floor_ms(time: jiff::Timestamp) -> i64 {
    time.as_millisecond() - i64::from(time.subsec_nanosecond() % 1_000_000 < 0)
}

/// The JSON number `text` times ten to `power`, rounded down; none if it is far too big or has too many digits.
fn scaled(text: &str, power: i64) -> Option<i64> {
    let (mantissa, exponent) = match text.find(['e', 'E']) {
        Some(at) => (&text[..at], text[at + 1..].parse::<i64>().ok()?),
        None => (text, 0),
    };
    let fraction = mantissa.find('.').map_or(0, |dot| mantissa.len() - dot - 1);
    let mut digits: i128 = 0;
    for digit in mantissa.bytes().filter(u8::is_ascii_digit) {
        digits = digits.checked_mul(10)?.checked_add(i128::from(digit - b'0'))?;
    }
    if mantissa.starts_with('-') {
        digits = -digits;
    }
    let power = power.checked_add(exponent)?.checked_sub(fraction as i64)?;
    let scaled = match u32::try_from(power.unsigned_abs()).ok().and_then(|power| 10_i128.checked_pow(power)) {
        Some(factor) if power >= 0 => digits.checked_mul(factor)?,
        Some(factor) => digits.div_euclid(factor),
        None if digits == 0 || power < 0 => digits.signum().min(0),
        None => return None,
    };
    i64::try_from(scaled).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc_3339_text_is_exact_to_the_ms_and_rounded_down() {
        assert_eq!(event_ms(r#""1970-01-01T00:00:00Z""#, None), Ok(0));
        assert_eq!(event_ms(r#""2026-11-29T19:08:01.123999+02:00""#, None), Ok(1_795_972_081_123));
        assert_eq!(event_ms(r#""1969-12-31T23:59:59.9999Z""#, None), Ok(-1));
        assert_eq!(event_ms(r#""1969-12-31T23:59:59.999999999Z""#, None), Ok(-1));
        assert_eq!(event_ms(r#""9999-12-30T22:00:00.999Z""#, None), Ok(*TIME_BOUNDS_MS.end()));
        assert_eq!(event_ms(r#""2016-12-31T23:59:60Z""#, None), event_ms(r#""2016-12-31T23:59:59Z""#, None));
        assert_eq!(event_ms(r#""0001-01-01T00:00:00Z""#, None), Ok(*TIME_BOUNDS_MS.start()));
        for bad in [
            r#""2026-11-29""#,
            r#""2026-11-29T19:08:01""#,
            r#""0000-12-31T00:00:00Z""#,
            r#""""#,
            r#""1700000000""#,
        ] {
            assert!(event_ms(bad, Some(TimeUnit::Seconds)).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_need_a_unit_and_lose_no_digit() {
        assert_eq!(event_ms("1700000000", Some(TimeUnit::Seconds)), Ok(1_700_000_000_000));
        assert_eq!(event_ms("1700000000.1239", Some(TimeUnit::Seconds)), Ok(1_700_000_000_123));
        assert_eq!(event_ms("1.7000000001239E9", Some(TimeUnit::Seconds)), Ok(1_700_000_000_123));
        assert_eq!(event_ms("1700000000123999999", Some(TimeUnit::Nanos)), Ok(1_700_000_000_123));
        assert_eq!(event_ms("9007199254740993", Some(TimeUnit::Micros)), Ok(9_007_199_254_740));
        assert_eq!(event_ms("-1", Some(TimeUnit::Micros)), Ok(-1));
        assert_eq!(event_ms("1e-999999", Some(TimeUnit::Millis)), Ok(0));
        assert_eq!(event_ms("-1e-999999", Some(TimeUnit::Millis)), Ok(-1));
        assert_eq!(event_ms("0e999999", Some(TimeUnit::Millis)), Ok(0));
        assert!(event_ms("1700000000", None).unwrap_err().contains("time_unit"));
        for bad in
            ["1e999999", "1e99999999999999999999", "253402207201000", "-62135596800001", "null", "true", "{}"]
        {
            assert!(event_ms(bad, Some(TimeUnit::Millis)).is_err(), "{bad}");
        }
    }
}
