//! The column types that the encoder knows, and how each is found in Postgres's catalog.

/// How a column's values are written in binary.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Bool,
    Int2,
    Int4,
    Int8,
    Float4,
    Float8,
    /// Total digits and digits behind the point, if the column bounds them.
    Numeric(Option<(i64, i64)>),
    /// Characters at most, if bounded.
    Text(Option<usize>),
    /// Trailing spaces do not count; padded to so many characters by the server, if bounded.
    Char(Option<usize>),
    Uuid,
    Bytea,
    Date,
    /// Digits of a second that are kept.
    Time(u32),
    Timestamp(u32),
    TimestampTz(u32),
    Json,
    Jsonb,
    Inet,
    /// Its labels.
    Enum(Vec<String>),
    /// Element kind and element type's oid.
    Array(Box<Kind>, u32),
}

impl Kind {
    /// The kind of the base type `name` (as `pg_type.typname`, in `pg_catalog` unless an extension's) under `typmod`.
    pub(super) fn scalar(name: &str, typmod: i32) -> Option<Kind> {
        let length = usize::try_from(typmod - 4).ok();
        let seconds = u32::try_from(typmod).unwrap_or(6).min(6);
        Some(match name {
            "bool" => Kind::Bool,
            "int2" => Kind::Int2,
            "int4" => Kind::Int4,
            "int8" => Kind::Int8,
            "float4" => Kind::Float4,
            "float8" => Kind::Float8,
            "numeric" => Kind::Numeric((typmod >= 4).then(|| numeric_bounds(typmod))),
            "text" | "citext" => Kind::Text(None),
            "varchar" => Kind::Text(length),
            "bpchar" => Kind::Char(length),
            "uuid" => Kind::Uuid,
            "bytea" => Kind::Bytea,
            "date" => Kind::Date,
            "time" => Kind::Time(seconds),
            "timestamp" => Kind::Timestamp(seconds),
            "timestamptz" => Kind::TimestampTz(seconds),
            "json" => Kind::Json,
            "jsonb" => Kind::Jsonb,
            "inet" => Kind::Inet,
            _ => return None,
        })
    }

    /// Equal values have equal canonical bytes, so it can stand in a row key.
    pub(super) fn can_be_row_key(&self) -> bool {
        !matches!(self, Kind::Float4 | Kind::Float8 | Kind::Json | Kind::Jsonb | Kind::Inet | Kind::Array(..))
    }

    /// Canonical bytes sort as the server sorts the values, so it can be a version. Text only under collation `C`.
    pub(super) fn can_be_version(&self) -> bool {
        matches!(
            self,
            Kind::Int2
                | Kind::Int4
                | Kind::Int8
                | Kind::Float4
                | Kind::Float8
                | Kind::Numeric(_)
                | Kind::Text(_)
                | Kind::Uuid
                | Kind::Date
                | Kind::Time(_)
                | Kind::Timestamp(_)
                | Kind::TimestampTz(_)
        )
    }

    /// `unnest` would take it apart.
    pub(super) fn is_array(&self) -> bool {
        matches!(self, Kind::Array(..))
    }
}

/// Precision and scale; the scale is a signed 11-bit number.
fn numeric_bounds(typmod: i32) -> (i64, i64) {
    let packed = typmod - 4;
    (i64::from((packed >> 16) & 0xffff), i64::from(((packed & 0x7ff) ^ 1024) - 1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_modifiers_are_read_as_the_server_writes_them() {
        assert_eq!(Kind::scalar("numeric", (10 << 16 | 2) + 4), Some(Kind::Numeric(Some((10, 2)))));
        assert_eq!(Kind::scalar("numeric", (2 << 16 | (0x7ff & -3)) + 4), Some(Kind::Numeric(Some((2, -3)))));
        assert_eq!(Kind::scalar("numeric", -1), Some(Kind::Numeric(None)));
        assert_eq!(Kind::scalar("varchar", 14), Some(Kind::Text(Some(10))));
        assert_eq!(Kind::scalar("bpchar", -1), Some(Kind::Char(None)));
        assert_eq!(Kind::scalar("timestamptz", 3), Some(Kind::TimestampTz(3)));
        assert_eq!(Kind::scalar("timestamptz", -1), Some(Kind::TimestampTz(6)));
        assert_eq!(Kind::scalar("money", -1), None);
    }
}
