//! ClickHouse's types, as the names in `system.columns` say them. Pure.

/// A type whose values this sink can write without loss.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Int {
        bits: usize,
        signed: bool,
    },
    Float32,
    Float64,
    /// Digits in all, digits behind the point, bytes.
    Decimal {
        precision: usize,
        scale: usize,
        bytes: usize,
    },
    Bool,
    String,
    FixedString(usize),
    Uuid,
    Date,
    Date32,
    DateTime,
    /// Digits behind the second.
    DateTime64(u32),
    /// Names and numbers; of one or two bytes.
    Enum {
        names: Vec<(String, i16)>,
        wide: bool,
    },
    Ipv4,
    Ipv6,
    Nullable(Box<Kind>),
    Array(Box<Kind>),
    Map(Box<Kind>, Box<Kind>),
    /// With names, if it has them.
    Tuple(Vec<(Option<String>, Kind)>),
}

/// Reads the name of a type. The error says which part of it is not known.
pub(super) fn parse(text: &str) -> Result<Kind, String> {
    let mut reader = Reader { text, at: 0 };
    let kind = reader.kind()?;
    if reader.at == text.len() { Ok(kind) } else { Err(reader.bad()) }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn bad(&self) -> String {
        format!("the type {:?} is not understood from byte {} on", self.text, self.at)
    }

    fn space(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn take(&mut self, mark: char) -> bool {
        self.space();
        let there = self.rest().starts_with(mark);
        self.at += if there { mark.len_utf8() } else { 0 };
        there
    }

    fn expect(&mut self, mark: char) -> Result<(), String> {
        if self.take(mark) { Ok(()) } else { Err(self.bad()) }
    }

    fn word(&mut self) -> Result<String, String> {
        self.space();
        if self.rest().starts_with('`') {
            return self.quoted('`');
        }
        let length =
            self.rest().bytes().take_while(|byte| byte.is_ascii_alphanumeric() || *byte == b'_').count();
        if length == 0 {
            return Err(self.bad());
        }
        let word = self.rest()[..length].to_owned();
        self.at += length;
        Ok(word)
    }

    fn quoted(&mut self, quote: char) -> Result<String, String> {
        self.expect(quote)?;
        let mut text = String::new();
        loop {
            let Some(next) = self.rest().chars().next() else { return Err(self.bad()) };
            self.at += next.len_utf8();
            if next == quote {
                if self.rest().starts_with(quote) {
                    self.at += quote.len_utf8();
                    text.push(quote);
                    continue;
                }
                return Ok(text);
            }
            if next != '\\' {
                text.push(next);
                continue;
            }
            let Some(escaped) = self.rest().chars().next() else { return Err(self.bad()) };
            self.at += escaped.len_utf8();
            text.push(match escaped {
                'n' => '\n',
                't' => '\t',
                'r' => '\r',
                '0' => '\0',
                'b' => '\u{8}',
                'f' => '\u{c}',
                other => other,
            });
        }
    }

    fn number<T: std::str::FromStr>(&mut self) -> Result<T, String> {
        self.space();
        let length = self.rest().bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'-').count();
        let number = self.rest()[..length].parse().map_err(|_| self.bad())?;
        self.at += length;
        Ok(number)
    }

    fn inner(&mut self) -> Result<Box<Kind>, String> {
        self.expect('(')?;
        let kind = self.kind()?;
        self.expect(')')?;
        Ok(Box::new(kind))
    }

    fn kind(&mut self) -> Result<Kind, String> {
        let name = self.word()?;
        let int = |signed, bits: &str| bits.parse().ok().map(|bits| Kind::Int { bits, signed });
        Ok(match name.as_str() {
            "Float32" => Kind::Float32,
            "Float64" => Kind::Float64,
            "Bool" => Kind::Bool,
            "String" => Kind::String,
            "UUID" => Kind::Uuid,
            "Date" => Kind::Date,
            "Date32" => Kind::Date32,
            "IPv4" => Kind::Ipv4,
            "IPv6" => Kind::Ipv6,
            "Int8" | "Int16" | "Int32" | "Int64" | "Int128" | "Int256" => {
                int(true, &name[3..]).ok_or_else(|| self.bad())?
            }
            "UInt8" | "UInt16" | "UInt32" | "UInt64" | "UInt128" | "UInt256" => {
                int(false, &name[4..]).ok_or_else(|| self.bad())?
            }
            "FixedString" => {
                self.expect('(')?;
                let length = self.number()?;
                self.expect(')')?;
                Kind::FixedString(length)
            }
            "Decimal" => {
                self.expect('(')?;
                let precision = self.number()?;
                self.expect(',')?;
                let scale = self.number()?;
                self.expect(')')?;
                let bytes = match precision {
                    1..=9 => 4,
                    10..=18 => 8,
                    19..=38 => 16,
                    39..=76 => 32,
                    _ => return Err(self.bad()),
                };
                Kind::Decimal { precision, scale, bytes }
            }
            "DateTime" => {
                if self.take('(') {
                    self.quoted('\'')?;
                    self.expect(')')?;
                }
                Kind::DateTime
            }
            "DateTime64" => {
                self.expect('(')?;
                let digits = self.number()?;
                if self.take(',') {
                    self.space();
                    self.quoted('\'')?;
                }
                self.expect(')')?;
                if digits > 9 {
                    return Err(self.bad());
                }
                Kind::DateTime64(digits)
            }
            "Enum8" | "Enum16" => {
                self.expect('(')?;
                let mut names = Vec::new();
                loop {
                    self.space();
                    let name = self.quoted('\'')?;
                    self.expect('=')?;
                    names.push((name, self.number()?));
                    if !self.take(',') {
                        break;
                    }
                }
                self.expect(')')?;
                Kind::Enum { names, wide: name == "Enum16" }
            }
            "Nullable" => Kind::Nullable(self.inner()?),
            // It is written as the type inside.
            "LowCardinality" => *self.inner()?,
            "Array" => Kind::Array(self.inner()?),
            "Map" => {
                self.expect('(')?;
                let key = self.kind()?;
                self.expect(',')?;
                let value = self.kind()?;
                self.expect(')')?;
                Kind::Map(Box::new(key), Box::new(value))
            }
            "Tuple" => {
                self.expect('(')?;
                let mut members = Vec::new();
                loop {
                    members.push(self.member()?);
                    if !self.take(',') {
                        break;
                    }
                }
                self.expect(')')?;
                Kind::Tuple(members)
            }
            "JSON" | "Object" | "Variant" | "Dynamic" => {
                return Err(format!(
                    "the type {name} keeps numbers as doubles, and is not written without loss; use a String column"
                ));
            }
            other => return Err(format!("the type {other} is not known to this build")),
        })
    }

    /// `name Type` or `Type`.
    fn member(&mut self) -> Result<(Option<String>, Kind), String> {
        let start = self.at;
        let word = self.word()?;
        self.space();
        if matches!(self.rest().chars().next(), Some('(' | ',' | ')') | None) {
            self.at = start;
            return Ok((None, self.kind()?));
        }
        Ok((Some(word), self.kind()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_from_their_names() {
        let int = |bits, signed| Kind::Int { bits, signed };
        for (text, kind) in [
            ("UInt256", int(256, false)),
            ("Int8", int(8, true)),
            ("Decimal(38, 10)", Kind::Decimal { precision: 38, scale: 10, bytes: 16 }),
            ("DateTime('Europe/Berlin')", Kind::DateTime),
            ("DateTime64(9, 'UTC')", Kind::DateTime64(9)),
            ("DateTime64(3)", Kind::DateTime64(3)),
            ("LowCardinality(Nullable(String))", Kind::Nullable(Box::new(Kind::String))),
            ("FixedString(16)", Kind::FixedString(16)),
            (
                "Enum8('a' = 1, 'it\\'s' = -2)",
                Kind::Enum { names: vec![("a".into(), 1), ("it's".into(), -2)], wide: false },
            ),
            (
                "Map(LowCardinality(String), Array(Nullable(Int64)))",
                Kind::Map(
                    Box::new(Kind::String),
                    Box::new(Kind::Array(Box::new(Kind::Nullable(Box::new(int(64, true)))))),
                ),
            ),
            ("Tuple(Int8, String)", Kind::Tuple(vec![(None, int(8, true)), (None, Kind::String)])),
            (
                "Tuple(a Int8, `b c` Tuple(String))",
                Kind::Tuple(vec![
                    (Some("a".into()), int(8, true)),
                    (Some("b c".into()), Kind::Tuple(vec![(None, Kind::String)])),
                ]),
            ),
        ] {
            assert_eq!(parse(text), Ok(kind), "{text}");
        }
        for text in [
            "",
            "Int7",
            "Decimal(77, 1)",
            "Array(Int8",
            "Int8)",
            "AggregateFunction(sum, Int8)",
            "JSON",
            "Enum8()",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse("Array(JSON)").unwrap_err().contains("use a String column"));
    }
}
