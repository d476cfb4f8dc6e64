//! Statement parameters in binary, built without going through values: whole columns as arrays.

use bytes::{BufMut, BytesMut};
use tokio_postgres::types::{IsNull, Kind, ToSql, Type, to_sql_checked};

/// A parameter whose bytes are ready. Its `Debug` shows only its size: the driver logs parameters, and payloads are private.
pub(super) struct Raw(Vec<u8>);

impl std::fmt::Debug for Raw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({} bytes)", self.0.len())
    }
}

impl ToSql for Raw {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.put_slice(&self.0);
        Ok(IsNull::No)
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

/// The type of this oid, as far as a parameter must know it.
pub(super) fn type_of(oid: u32) -> Type {
    Type::from_oid(oid).unwrap_or_else(|| Type::new(format!("oid {oid}"), oid, Kind::Simple, String::new()))
}

/// A one-dimensional array parameter.
pub(super) struct Array {
    bytes: Vec<u8>,
    count: i32,
    nulls: bool,
    element: u32,
}

const ARRAY_HEADER: usize = 20;

impl Array {
    /// Of elements of the type `element`.
    pub(super) fn new(element: u32) -> Array {
        Array { bytes: vec![0; ARRAY_HEADER], count: 0, nulls: false, element }
    }

    /// Of one of the driver's types.
    pub(super) fn of(element: &Type) -> Array {
        Self::new(element.oid())
    }

    /// Takes a field as a tuple has it: length in front, -1 for null.
    pub(super) fn field(&mut self, field: &[u8]) {
        self.nulls |= field.first().is_some_and(|first| first & 0x80 != 0);
        self.bytes.extend_from_slice(field);
        self.count += 1;
    }

    /// Takes a value's bytes.
    pub(super) fn value(&mut self, value: &[u8]) {
        self.bytes.put_i32(value.len() as i32);
        self.bytes.put_slice(value);
        self.count += 1;
    }

    /// Takes a value's bytes, or null.
    pub(super) fn option(&mut self, value: Option<&[u8]>) {
        match value {
            Some(value) => self.value(value),
            None => self.field(&(-1i32).to_be_bytes()),
        }
    }

    /// The parameter.
    pub(super) fn finish(mut self) -> Raw {
        let dimensions = i32::from(self.count > 0);
        self.bytes[0..4].copy_from_slice(&dimensions.to_be_bytes());
        self.bytes[4..8].copy_from_slice(&i32::from(self.nulls).to_be_bytes());
        self.bytes[8..12].copy_from_slice(&self.element.to_be_bytes());
        self.bytes[12..16].copy_from_slice(&self.count.to_be_bytes());
        self.bytes[16..20].copy_from_slice(&1i32.to_be_bytes());
        if dimensions == 0 {
            self.bytes.truncate(12);
        }
        Raw(self.bytes)
    }
}

/// A `text[]`.
pub(super) fn texts<'a>(values: impl IntoIterator<Item = &'a str>) -> Raw {
    let mut array = Array::of(&Type::TEXT);
    values.into_iter().for_each(|value| array.value(value.as_bytes()));
    array.finish()
}

/// A `bigint[]`.
pub(super) fn integers(values: impl IntoIterator<Item = i64>) -> Raw {
    optional_integers(values.into_iter().map(Some))
}

/// A `bigint[]` with nulls.
pub(super) fn optional_integers(values: impl IntoIterator<Item = Option<i64>>) -> Raw {
    let mut array = Array::of(&Type::INT8);
    values
        .into_iter()
        .for_each(|value| array.option(value.map(i64::to_be_bytes).as_ref().map(<[u8; 8]>::as_slice)));
    array.finish()
}

/// An `integer[]`.
pub(super) fn small_integers(values: impl IntoIterator<Item = i32>) -> Raw {
    let mut array = Array::of(&Type::INT4);
    values.into_iter().for_each(|value| array.value(&value.to_be_bytes()));
    array.finish()
}

/// A `bytea[]` with nulls.
pub(super) fn optional_bytes<'a>(values: impl IntoIterator<Item = Option<&'a [u8]>>) -> Raw {
    let mut array = Array::of(&Type::BYTEA);
    values.into_iter().for_each(|value| array.option(value));
    array.finish()
}

/// A `text`.
pub(super) fn text(value: &str) -> Raw {
    Raw(value.as_bytes().to_vec())
}

/// A `bigint`.
pub(super) fn integer(value: i64) -> Raw {
    Raw(value.to_be_bytes().to_vec())
}
