//! Types as `CREATE TABLE` says them. Pure.

use super::Dialect;

/// A type whose values this sink can write without loss.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Bool,
    /// Bounds, and the name for messages.
    Int(i128, i128),
    Float,
    Double,
    Decimal {
        precision: usize,
        scale: usize,
    },
    /// Bytes at most.
    Text(usize),
    /// Bytes at most; goes as hexadecimal digits.
    Binary(usize),
    Date,
    /// Digits behind the second.
    DateTime(u32),
    Ipv4,
    Ipv6,
    Json,
    Array(Box<Kind>),
    Map(Box<Kind>, Box<Kind>),
    Struct(Vec<(String, Kind)>),
}

/// What a column without a written length takes.
fn longest(dialect: Dialect) -> usize {
    match dialect {
        Dialect::StarRocks => 65_533,
        Dialect::Doris => 1 << 20,
    }
}

/// Reads the name of a type. The error says which part of it is not known.
pub(super) fn parse(dialect: Dialect, text: &str) -> Result<Kind, String> {
    let mut reader = Reader { dialect, text, at: 0, depth: 0 };
    let kind = reader.kind()?;
    if reader.rest().trim().is_empty() { Ok(kind) } else { Err(reader.bad()) }
}

struct Reader<'a> {
    dialect: Dialect,
    text: &'a str,
    at: usize,
    depth: usize,
}

impl Reader<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn bad(&self) -> String {
        format!("the type {:?} is not understood from byte {} on", self.text, self.at)
    }

    fn take(&mut self, mark: char) -> bool {
        self.at += self.rest().len() - self.rest().trim_start().len();
        let there = self.rest().starts_with(mark);
        self.at += if there { mark.len_utf8() } else { 0 };
        there
    }

    fn expect(&mut self, mark: char) -> Result<(), String> {
        if self.take(mark) { Ok(()) } else { Err(self.bad()) }
    }

    fn word(&mut self) -> Result<String, String> {
        if self.take('`') {
            let end = self.rest().find('`').ok_or_else(|| self.bad())?;
            let word = self.rest()[..end].to_owned();
            self.at += end + 1;
            return Ok(word);
        }
        let length = self
            .rest()
            .chars()
            .take_while(|mark| mark.is_alphanumeric() || *mark == '_')
            .map(char::len_utf8)
            .sum();
        if length == 0 {
            return Err(self.bad());
        }
        let word = self.rest()[..length].to_owned();
        self.at += length;
        Ok(word)
    }

    fn numbers(&mut self) -> Result<Vec<usize>, String> {
        let mut numbers = Vec::new();
        if !self.take('(') {
            return Ok(numbers);
        }
        loop {
            let word = self.word()?;
            numbers.push(word.parse().map_err(|_| self.bad())?);
            if !self.take(',') {
                break;
            }
        }
        self.expect(')')?;
        Ok(numbers)
    }

    fn inner(&mut self) -> Result<Kind, String> {
        self.depth += 1;
        if self.depth > 16 {
            return Err("the type is nested deeper than 16 levels".to_owned());
        }
        let kind = self.kind()?;
        self.depth -= 1;
        if let Kind::Binary(_) | Kind::Json = kind {
            return Err("bytes and JSON inside of another type are not written without loss".to_owned());
        }
        Ok(kind)
    }

    fn kind(&mut self) -> Result<Kind, String> {
        let name = self.word()?.to_ascii_lowercase();
        let doris = self.dialect == Dialect::Doris;
        if matches!(name.as_str(), "array" | "map" | "struct") {
            self.expect('<')?;
            let kind = match name.as_str() {
                "array" => Kind::Array(Box::new(self.inner()?)),
                "map" => {
                    let key = self.inner()?;
                    self.expect(',')?;
                    Kind::Map(Box::new(key), Box::new(self.inner()?))
                }
                _ => {
                    let mut members = Vec::new();
                    loop {
                        let name = self.word()?;
                        self.take(':');
                        members.push((name, self.inner()?));
                        if !self.take(',') {
                            break;
                        }
                    }
                    Kind::Struct(members)
                }
            };
            self.expect('>')?;
            return Ok(kind);
        }
        let numbers = self.numbers()?;
        let int = |bits: u32| Kind::Int(-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1);
        Ok(match name.as_str() {
            "boolean" | "bool" => Kind::Bool,
            // How both show BOOLEAN where they speak MySQL's language.
            "tinyint" if numbers == [1] => Kind::Bool,
            "tinyint" => int(8),
            "smallint" => int(16),
            "int" | "integer" => int(32),
            "bigint" => int(64),
            "largeint" => Kind::Int(i128::MIN, i128::MAX),
            "float" => Kind::Float,
            "double" => Kind::Double,
            "decimal" | "decimalv2" | "decimalv3" | "decimal32" | "decimal64" | "decimal128"
            | "decimal256" => match numbers[..] {
                [precision, scale] if (1..=76).contains(&precision) && scale <= precision => {
                    Kind::Decimal { precision, scale }
                }
                [precision] if (1..=76).contains(&precision) => Kind::Decimal { precision, scale: 0 },
                _ => return Err(self.bad()),
            },
            "char" => Kind::Text(numbers.first().copied().unwrap_or(1)),
            "varchar" => Kind::Text(numbers.first().copied().unwrap_or_else(|| longest(self.dialect))),
            "string" | "text" => Kind::Text(longest(self.dialect)),
            "binary" | "varbinary" if !doris => {
                Kind::Binary(numbers.first().copied().unwrap_or_else(|| longest(self.dialect)))
            }
            "date" | "datev2" => Kind::Date,
            "datetime" | "datetimev2" => {
                let digits = numbers.first().copied().unwrap_or(if doris { 0 } else { 6 });
                Kind::DateTime(
                    u32::try_from(digits).ok().filter(|digits| *digits <= 6).ok_or_else(|| self.bad())?,
                )
            }
            "json" | "jsonb" => Kind::Json,
            "ipv4" if doris => Kind::Ipv4,
            "ipv6" if doris => Kind::Ipv6,
            "variant" => {
                return Err("VARIANT changes the types of what it holds; use JSON or STRING".to_owned());
            }
            other => return Err(format!("the type {other} is not known to this build")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_from_their_names() {
        use Dialect::{Doris, StarRocks};
        let bigint = Kind::Int(i64::MIN.into(), i64::MAX.into());
        for (dialect, text, kind) in [
            (StarRocks, "bigint(20)", bigint.clone()),
            (StarRocks, "largeint(40)", Kind::Int(i128::MIN, i128::MAX)),
            (Doris, "boolean", Kind::Bool),
            (Doris, "DECIMAL(38, 9)", Kind::Decimal { precision: 38, scale: 9 }),
            (Doris, "decimalv3(9,2)", Kind::Decimal { precision: 9, scale: 2 }),
            (StarRocks, "varchar(65533)", Kind::Text(65_533)),
            (Doris, "text", Kind::Text(1 << 20)),
            (StarRocks, "varbinary", Kind::Binary(65_533)),
            (StarRocks, "datetime", Kind::DateTime(6)),
            (Doris, "datetime", Kind::DateTime(0)),
            (Doris, "datetimev2(3)", Kind::DateTime(3)),
            (Doris, "ipv6", Kind::Ipv6),
            (
                StarRocks,
                "array<array<int(11)>>",
                Kind::Array(Box::new(Kind::Array(Box::new(Kind::Int(i32::MIN.into(), i32::MAX.into()))))),
            ),
            (
                Doris,
                "struct<a:varchar(5), `b c`: map<text,bigint>>",
                Kind::Struct(vec![
                    ("a".into(), Kind::Text(5)),
                    ("b c".into(), Kind::Map(Box::new(Kind::Text(1 << 20)), Box::new(bigint.clone()))),
                ]),
            ),
            (StarRocks, "struct<a bigint(20)>", Kind::Struct(vec![("a".into(), bigint)])),
        ] {
            assert_eq!(parse(dialect, text), Ok(kind), "{text}");
        }
        for text in [
            "",
            "bitmap",
            "hll",
            "decimal(77,1)",
            "array<json>",
            "array<int",
            "int)",
            "variant",
            "datetime(7)",
        ] {
            assert!(parse(Doris, text).is_err(), "{text}");
        }
        assert!(parse(Doris, "varbinary").is_err() && parse(StarRocks, "ipv4").is_err());
        assert!(parse(StarRocks, &("array<".repeat(40) + "int" + &">".repeat(40))).is_err());
    }
}
