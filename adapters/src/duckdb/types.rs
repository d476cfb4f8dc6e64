//! Column types, as `duckdb_columns()` writes them.

/// What a column takes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Boolean,
    /// 8 to 64 bits.
    Integer {
        bits: u32,
        signed: bool,
    },
    Hugeint,
    Uhugeint,
    Float,
    Double,
    Decimal {
        width: u8,
        scale: u8,
    },
    Varchar,
    Json,
    Blob,
    Date,
    Time,
    Timestamp(Unit),
    TimestampTz,
    Interval,
    Uuid,
    /// Its names, in their order.
    Enum(Vec<String>),
}

/// Of a `TIMESTAMP`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unit {
    Second,
    Milli,
    Micro,
    Nano,
}

impl Unit {
    /// In nanoseconds.
    pub(super) fn nanos(self) -> i128 {
        match self {
            Self::Second => 1_000_000_000,
            Self::Milli => 1_000_000,
            Self::Micro => 1000,
            Self::Nano => 1,
        }
    }
}

/// The types that rows can have, for a misfit to name.
pub(super) const KNOWN: &str = "BOOLEAN, all integers, FLOAT, DOUBLE, DECIMAL, VARCHAR, JSON, BLOB, DATE, TIME, \
    TIMESTAMP (also _S, _MS, _NS and WITH TIME ZONE), INTERVAL, UUID or ENUM";

impl Kind {
    /// None if rows cannot have such a column.
    pub(super) fn of(declared: &str) -> Option<Self> {
        let integer = |bits, signed| Some(Self::Integer { bits, signed });
        match declared {
            "BOOLEAN" => Some(Self::Boolean),
            "TINYINT" => integer(8, true),
            "SMALLINT" => integer(16, true),
            "INTEGER" => integer(32, true),
            "BIGINT" => integer(64, true),
            "UTINYINT" => integer(8, false),
            "USMALLINT" => integer(16, false),
            "UINTEGER" => integer(32, false),
            "UBIGINT" => integer(64, false),
            "HUGEINT" => Some(Self::Hugeint),
            "UHUGEINT" => Some(Self::Uhugeint),
            "FLOAT" => Some(Self::Float),
            "DOUBLE" => Some(Self::Double),
            "VARCHAR" => Some(Self::Varchar),
            "JSON" => Some(Self::Json),
            "BLOB" => Some(Self::Blob),
            "DATE" => Some(Self::Date),
            "TIME" => Some(Self::Time),
            "TIMESTAMP_S" => Some(Self::Timestamp(Unit::Second)),
            "TIMESTAMP_MS" => Some(Self::Timestamp(Unit::Milli)),
            "TIMESTAMP" => Some(Self::Timestamp(Unit::Micro)),
            "TIMESTAMP_NS" => Some(Self::Timestamp(Unit::Nano)),
            "TIMESTAMP WITH TIME ZONE" => Some(Self::TimestampTz),
            "INTERVAL" => Some(Self::Interval),
            "UUID" => Some(Self::Uuid),
            // An array or a list of these ends in a bracket.
            _ => match declared.strip_suffix(')')?.split_once('(')? {
                ("DECIMAL", inside) => {
                    let (width, scale) = inside.split_once(',')?;
                    Some(Self::Decimal {
                        width: width.trim().parse().ok()?,
                        scale: scale.trim().parse().ok()?,
                    })
                }
                ("ENUM", inside) => names(inside).map(Self::Enum),
                _ => None,
            },
        }
    }

    /// Values of it have one order, and equal values one form.
    pub(super) fn is_ordered(&self) -> bool {
        !matches!(self, Self::Interval | Self::Json)
    }
}

/// `'a', 'b''c'`
fn names(list: &str) -> Option<Vec<String>> {
    let (mut names, mut rest) = (Vec::new(), list.trim());
    loop {
        let mut name = String::new();
        rest = rest.strip_prefix('\'')?;
        loop {
            let (part, behind) = rest.split_once('\'')?;
            name.push_str(part);
            match behind.strip_prefix('\'') {
                Some(more) => {
                    name.push('\'');
                    rest = more;
                }
                None => {
                    rest = behind.trim_start();
                    break;
                }
            }
        }
        names.push(name);
        if rest.is_empty() {
            return Some(names);
        }
        rest = rest.strip_prefix(',')?.trim_start();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_as_the_catalog_writes_them() {
        assert_eq!(Kind::of("DECIMAL(38,10)"), Some(Kind::Decimal { width: 38, scale: 10 }));
        assert_eq!(Kind::of("UTINYINT"), Some(Kind::Integer { bits: 8, signed: false }));
        let names = |all: &[&str]| Some(Kind::Enum(all.iter().map(|&name| name.to_owned()).collect()));
        assert_eq!(Kind::of("ENUM('sad', 'it''s', ', ''')"), names(&["sad", "it's", ", '"]));
        for other in [
            "INTEGER[]",
            "DECIMAL(4,1)[3]",
            "STRUCT(a INTEGER)",
            "MAP(INTEGER, VARCHAR)",
            "ENUM('a')[]",
            "BIT",
            "ENUM(",
        ] {
            assert_eq!(Kind::of(other), None, "{other}");
        }
    }
}
