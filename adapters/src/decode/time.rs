//! Dates, times of day and moments, exact to the microsecond.

use super::Fault;

const DAY: i64 = 86_400_000_000;

/// Reads numbers and marks from the front of a text.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take(&mut self, mark: u8) -> bool {
        let there = self.0.first() == Some(&mark);
        if there {
            self.0 = &self.0[1..];
        }
        there
    }

    /// Exactly two digits.
    fn two(&mut self) -> Option<i64> {
        match self.0 {
            [a @ b'0'..=b'9', b @ b'0'..=b'9', rest @ ..] => {
                self.0 = rest;
                Some(i64::from((a - b'0') * 10 + (b - b'0')))
            }
            _ => None,
        }
    }

    fn digits(&mut self) -> &[u8] {
        let count = self.0.iter().take_while(|digit| digit.is_ascii_digit()).count();
        let (digits, rest) = self.0.split_at(count);
        self.0 = rest;
        digits
    }
}

const BAD_DATE: Fault = Fault::Borrowed("needs a date, YYYY-MM-DD");
const BAD_TIME: Fault = Fault::Borrowed("needs a time of day, HH:MM:SS with up to six decimals");

/// Days since 1970-01-01 of `YYYY-MM-DD`. Years of more than four digits need a sign, as ISO 8601 says; year 0 is 1 BC.
pub fn date(text: &str) -> Result<i64, Fault> {
    let mut reader = Reader(text.as_bytes());
    let days = read_date(&mut reader)?;
    if reader.0.is_empty() { Ok(days) } else { Err(BAD_DATE) }
}

fn read_date(reader: &mut Reader<'_>) -> Result<i64, Fault> {
    let negative = reader.take(b'-');
    let signed = negative || reader.take(b'+');
    let digits = reader.digits();
    if !(digits.len() == 4 || signed && (4..=7).contains(&digits.len())) {
        return Err(BAD_DATE);
    }
    let year = digits.iter().fold(0, |year, digit| year * 10 + i64::from(digit - b'0'));
    let year = if negative { -year } else { year };
    let month = reader.take(b'-').then(|| reader.two()).flatten().ok_or(BAD_DATE)?;
    let day = reader.take(b'-').then(|| reader.two()).flatten().ok_or(BAD_DATE)?;
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let length = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 => 28 + i64::from(leap),
        _ => return Err("is not a date: the month is not in 1 to 12".into()),
    };
    if !(1..=length).contains(&day) {
        return Err("is not a date: no such day in that month".into());
    }
    Ok(days_from_civil(year, month, day))
}

/// Proleptic Gregorian, counted in eras of 400 years that begin in March.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// Microseconds since midnight of `HH:MM[:SS[.ffffff]]`; `24:00:00` is the end of the day.
pub fn time(text: &str) -> Result<i64, Fault> {
    let mut reader = Reader(text.as_bytes());
    let micros = read_time(&mut reader)?;
    match (reader.0.is_empty(), micros) {
        (true, ..=DAY) => Ok(micros),
        (true, _) => Err("is past 24:00:00".into()),
        (false, _) => Err(BAD_TIME),
    }
}

fn read_time(reader: &mut Reader<'_>) -> Result<i64, Fault> {
    let hour = reader.two().ok_or(BAD_TIME)?;
    let minute = reader.take(b':').then(|| reader.two()).flatten().ok_or(BAD_TIME)?;
    let second = if reader.take(b':') { reader.two().ok_or(BAD_TIME)? } else { 0 };
    if hour > 24 || minute > 59 || second > 59 {
        return Err(
            "is not a time: above 24 hours, 59 minutes or 59 seconds (leap seconds cannot be kept)".into()
        );
    }
    let mut micros = ((hour * 60 + minute) * 60 + second) * 1_000_000;
    if reader.take(b'.') || reader.take(b',') {
        let digits = reader.digits();
        if digits.is_empty() {
            return Err(BAD_TIME);
        }
        let (kept, lost) = digits.split_at(digits.len().min(6));
        if lost.iter().any(|digit| *digit != b'0') {
            return Err("is finer than a microsecond".into());
        }
        let fraction = kept.iter().fold(0, |sum, digit| sum * 10 + i64::from(digit - b'0'));
        micros += fraction * 10i64.pow(6 - kept.len() as u32);
    }
    Ok(micros)
}

const TOO_FAR: Fault = Fault::Borrowed("is further from 1970 than 292,000 years");

/// A date and time of day as written, and its offset.
struct Moment {
    local: i64,
    offset: Option<i64>,
}

fn moment(text: &str) -> Result<Moment, Fault> {
    const BAD: Fault =
        Fault::Borrowed("needs a date and time as in RFC 3339: YYYY-MM-DDTHH:MM:SS.ffffff+HH:MM");
    let mut reader = Reader(text.as_bytes());
    let days = read_date(&mut reader)?;
    if !(reader.take(b'T') || reader.take(b't') || reader.take(b' ')) {
        return Err(BAD);
    }
    let micros = read_time(&mut reader)?;
    if micros >= DAY {
        return Err("is not a time: above 23 hours".into());
    }
    let offset = if reader.take(b'Z') || reader.take(b'z') {
        Some(0)
    } else {
        let negative = reader.take(b'-');
        if negative || reader.take(b'+') {
            let hour = reader.two().ok_or(BAD)?;
            let minute = match reader.0 {
                [] => 0,
                _ => {
                    reader.take(b':');
                    reader.two().ok_or(BAD)?
                }
            };
            if hour > 23 || minute > 59 {
                return Err("has an offset above 23:59".into());
            }
            let offset = (hour * 60 + minute) * 60_000_000;
            Some(if negative { -offset } else { offset })
        } else {
            None
        }
    };
    if !reader.0.is_empty() {
        return Err(BAD);
    }
    // A day inside the bounds, so that the offset cannot overflow either.
    let local = days.checked_mul(DAY).filter(|local| local.abs() < i64::MAX - 2 * DAY).ok_or(TOO_FAR)?;
    Ok(Moment { local: local + micros, offset })
}

/// Microseconds since the epoch of an RFC 3339 time; its offset is needed.
pub fn timestamp(text: &str) -> Result<i64, Fault> {
    let Moment { local, offset } = moment(text)?;
    match offset {
        Some(offset) => Ok(local - offset),
        None => Err("needs an offset: Z or +HH:MM".into()),
    }
}

/// Microseconds since 1970-01-01T00:00:00 of a date and time without offset (`Z` is taken and means the same).
pub fn local_timestamp(text: &str) -> Result<i64, Fault> {
    match moment(text)? {
        Moment { local, offset: None | Some(0) } => Ok(local),
        Moment { .. } => {
            Err("has an offset, which the column cannot keep; send it in UTC or use a column with time zone"
                .into())
        }
    }
}

/// Nanoseconds since the epoch of a time of which `read` takes up to six decimals: digits behind these are taken out, and added
/// again.
pub fn nanos(text: &str, read: impl Fn(&str) -> Result<i64, Fault>) -> Result<i128, Fault> {
    let whole = |text: &str| read(text).map(|micros| i128::from(micros) * 1000);
    let Some(point) = text.find('.') else { return whole(text) };
    let digits = text[point + 1..].bytes().take_while(u8::is_ascii_digit).count();
    if digits <= 6 {
        return whole(text);
    }
    let (head, rest) = text.split_at(point + 7);
    let (fine, tail) = rest.split_at(digits - 6);
    if fine.len() > 3 && fine[3..].bytes().any(|digit| digit != b'0') {
        return Err("is finer than a nanosecond".into());
    }
    let fine = format!("{fine:0<3}");
    let fine: i128 = fine[..3].parse().map_err(|_| Fault::Borrowed("needs a time"))?;
    Ok(whole(&format!("{head}{tail}"))? + fine)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn times_are_exact_to_the_microsecond() {
        assert_eq!(timestamp("1970-01-01T00:00:00Z"), Ok(0));
        assert_eq!(timestamp("2024-02-29T23:59:59.123456+02:00"), Ok(1_709_243_999_123_456));
        assert_eq!(timestamp("2024-02-29 23:59:59.123456000+0200"), Ok(1_709_243_999_123_456));
        assert_eq!(timestamp("1969-12-31T23:59:59.5Z"), Ok(-500_000));
        assert_eq!(timestamp("2024-01-01T00:00:00.0000001Z").unwrap_err(), "is finer than a microsecond");
        for text in [
            "2024-01-01T00:00:00",
            "2024-01-01T23:59:60Z",
            "2023-02-29T00:00:00Z",
            "2024-01-01",
            "2024-13-01T00:00:00Z",
            "24-01-01T00:00:00Z",
            "2024-01-01T24:00:00Z",
            "+9999999-12-31T00:00:00Z",
            "-9999999-12-31T00:00:00-23:59",
        ] {
            assert!(timestamp(text).is_err(), "{text}");
        }
        assert_eq!(local_timestamp("1970-01-02T00:00:00"), Ok(DAY));
        assert!(local_timestamp("1970-01-02T00:00:00+01:00").is_err());
        assert_eq!(
            (date("2000-01-01"), date("-4713-11-24"), date("+5874897-12-31")),
            (Ok(10957), Ok(-2_440_588), Ok(2_145_042_905))
        );
        assert_eq!((time("24:00:00"), time("12:30")), (Ok(DAY), Ok(45_000_000_000)));
        assert!(time("24:00:01").is_err() && time("25:00").is_err() && time("12:60").is_err());
    }

    proptest! {
        #[test]
        fn dates_agree_with_jiff(days in -4_371_000i32..2_932_896) {
            let epoch = jiff::civil::date(1970, 1, 1);
            let day = epoch.checked_add(jiff::Span::new().days(days)).unwrap();
            let text = if day.year() < 0 { format!("-{:06}-{:02}-{:02}", -day.year(), day.month(), day.day()) } else { day.to_string() };
            prop_assert_eq!(date(&text), Ok(i64::from(days)));
        }
    }
}
