//! What a column's values are, and how each is written: Redis keeps texts. Pure.

use jiff::{SignedDuration, civil::DateTime};

use crate::{
    decode::{self, Decimal, Fault},
    value::Value,
};

/// What the values of a column are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Characters, as they are.
    Text,
    /// An integer of 64 bits, in digits.
    Integer,
    /// A decimal number, digit by digit as it was given.
    Number,
    /// `true` or `false`.
    Boolean,
    /// A moment in RFC 3339, as it was given; a version in UTC with nine decimals.
    Timestamp,
    /// A UUID, in small letters with hyphens.
    Uuid,
    /// Any JSON, as it was given.
    Json,
    /// Bytes: base64, or `\x` and hexadecimal digits, in the record.
    Binary,
}

/// All kinds with the names that the configuration has for them.
pub const KINDS: [(&str, Kind); 8] = [
    ("text", Kind::Text),
    ("integer", Kind::Integer),
    ("number", Kind::Number),
    ("boolean", Kind::Boolean),
    ("timestamp", Kind::Timestamp),
    ("uuid", Kind::Uuid),
    ("json", Kind::Json),
    ("binary", Kind::Binary),
];

impl Kind {
    /// As the configuration has it.
    pub fn name(self) -> &'static str {
        KINDS.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }

    /// The kinds, for messages.
    pub fn names() -> String {
        KINDS.map(|(name, _)| format!("{name:?}")).join(", ")
    }

    /// Equal values are written alike, so that a key can be made of them.
    pub(super) fn is_canonical(self) -> bool {
        matches!(self, Kind::Text | Kind::Integer | Kind::Boolean | Kind::Uuid | Kind::Binary)
    }

    /// Versions of it can be compared.
    pub(super) fn has_order(self) -> bool {
        matches!(self, Kind::Text | Kind::Integer | Kind::Timestamp)
    }

    /// Appends a value that is there and is not null. On a fault `out` may hold half of it.
    pub(super) fn put(self, value: Value<'_>, as_version: bool, out: &mut Vec<u8>) -> Result<(), Fault> {
        let mut scratch = String::new();
        match (self, value) {
            (Kind::Json, Value::Json(json)) => out.extend_from_slice(json.as_bytes()),
            (Kind::Json, _) => return Err("needs a JSON value".into()),
            (Kind::Binary, Value::Bytes(bytes)) => out.extend_from_slice(bytes),
            (Kind::Boolean, Value::Json(json)) => put_boolean(json, out)?,
            (Kind::Integer | Kind::Number | Kind::Text, Value::Integer(value)) => {
                out.extend_from_slice(value.to_string().as_bytes());
            }
            (Kind::Integer | Kind::Number, Value::Json(json)) => {
                self.put_text(decode::number_text(json, &mut scratch)?, as_version, out)?;
            }
            (Kind::Text | Kind::Timestamp, Value::Micros(micros)) => {
                let moment = SignedDuration::from_micros(micros);
                out.extend_from_slice(utc(moment, as_version)?.as_bytes());
            }
            (_, Value::Json(json)) => {
                self.put_text(decode::string(json, &mut scratch)?, as_version, out)?;
            }
            (_, Value::Text(text)) => self.put_text(text, as_version, out)?,
            (_, Value::Bytes(bytes)) => {
                let text = std::str::from_utf8(bytes)
                    .map_err(|bad| Fault::from(format!("is not UTF-8 from byte {} on", bad.valid_up_to())))?;
                self.put_text(text, as_version, out)?;
            }
            (_, Value::Integer(_)) => return Err("cannot take an integer".into()),
            (_, Value::Micros(_)) => {
                return Err("cannot take a time; make it \"timestamp\" or \"text\"".into());
            }
            (_, Value::Missing) => return Err("is missing".into()),
        }
        Ok(())
    }

    /// Text from a header, a key, a JSON number or a JSON string.
    fn put_text(self, text: &str, as_version: bool, out: &mut Vec<u8>) -> Result<(), Fault> {
        match self {
            Kind::Text | Kind::Json => out.extend_from_slice(text.as_bytes()),
            Kind::Integer => {
                let value = decode::integer(text, i64::MIN, i64::MAX)?;
                out.extend_from_slice(value.to_string().as_bytes());
            }
            Kind::Number => {
                Decimal::parse(text)?;
                out.extend_from_slice(text.as_bytes());
            }
            Kind::Boolean => put_boolean(text, out)?,
            Kind::Timestamp => {
                let moment = moment(text)?;
                let utc = as_version.then(|| utc(moment, true)).transpose()?;
                out.extend_from_slice(utc.as_deref().unwrap_or(text).as_bytes());
            }
            Kind::Uuid => {
                let id = decode::uuid(text)?;
                for (index, byte) in id.into_iter().enumerate() {
                    if matches!(index, 4 | 6 | 8 | 10) {
                        out.push(b'-');
                    }
                    out.extend_from_slice(format!("{byte:02x}").as_bytes());
                }
            }
            Kind::Binary => decode::bytes(text, out)?,
        }
        Ok(())
    }
}

const TOO_FAR: Fault = Fault::Borrowed("is outside of the years 0 to 9999");

fn put_boolean(text: &str, out: &mut Vec<u8>) -> Result<(), Fault> {
    out.extend_from_slice(if decode::boolean(text)? { b"true" } else { b"false" });
    Ok(())
}

/// Time since 1970-01-01T00:00:00Z.
fn moment(text: &str) -> Result<SignedDuration, Fault> {
    let fraction = text.find('.').map(|at| {
        let digits = text[at + 1..].bytes().take_while(u8::is_ascii_digit).count();
        (at, &text[at + 1..at + 1 + digits])
    });
    let Some((at, digits)) = fraction else {
        return decode::timestamp(text).map(SignedDuration::from_micros);
    };
    // The seconds are read without what is behind them.
    let whole = [&text[..at], &text[at + 1 + digits.len()..]].concat();
    let seconds = decode::timestamp(&whole).map(SignedDuration::from_micros)?;
    let (kept, lost) = digits.split_at(digits.len().min(9));
    if kept.is_empty() {
        return Err("has no digits behind the point of its seconds".into());
    }
    if lost.bytes().any(|digit| digit != b'0') {
        return Err("is finer than a nanosecond".into());
    }
    let nanos = kept.bytes().chain(std::iter::repeat(b'0')).take(9);
    let nanos = nanos.fold(0, |nanos, digit| nanos * 10 + i64::from(digit - b'0'));
    Ok(seconds + SignedDuration::from_nanos(nanos))
}

/// In UTC; `fixed` with nine decimals and a year of four digits: such texts are in the order of their moments.
fn utc(moment: SignedDuration, fixed: bool) -> Result<String, Fault> {
    const EPOCH: DateTime = DateTime::constant(1970, 1, 1, 0, 0, 0, 0);
    let time = EPOCH.checked_add(moment).map_err(|_| TOO_FAR)?;
    if time.year() < 0 {
        return Err(TOO_FAR);
    }
    Ok(if fixed { format!("{time:.9}Z") } else { format!("{time}Z") })
}
