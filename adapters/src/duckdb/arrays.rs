//! Encoded rows as columns, which is how DuckDB takes them in without reading any text for what it has a number for.
//!
//! Integers of 128 bits and enums have no column of their own on this way: they go as text, which DuckDB turns into them a column
//! at a time.

use std::sync::Arc;

use duckdb::{
    Error,
    arrow::{
        array::{
            ArrayRef, BinaryBuilder, BooleanBuilder, Date32Builder, Decimal128Builder,
            FixedSizeBinaryBuilder, Float32Builder, Float64Builder, Int8Builder, Int16Builder, Int32Builder,
            Int64Builder, IntervalMonthDayNanoBuilder, StringBuilder, Time64MicrosecondBuilder,
            TimestampMicrosecondBuilder, TimestampMillisecondBuilder, TimestampNanosecondBuilder,
            TimestampSecondBuilder, UInt8Builder, UInt16Builder, UInt32Builder, UInt64Builder,
        },
        datatypes::{DataType, Field, IntervalMonthDayNanoType, IntervalUnit, Schema, TimeUnit},
        error::ArrowError,
        record_batch::RecordBatch,
    },
};

use super::{
    probe::Layout,
    rows::{Packed, Parts, has},
    types::{Kind, Unit},
    values,
};

/// Columns beside those of the table.
pub(super) enum Extra {
    Integers(&'static str, Vec<i64>),
    Blobs(&'static str, BinaryBuilder),
}

/// `rows` of the batch with the columns `chosen` (indices into the layout's), behind `extras` of the same length. A column that a row
/// does not have is null.
pub(super) fn record_batch(
    layout: &Layout,
    packed: &Packed,
    rows: &[usize],
    chosen: &[usize],
    extras: Vec<Extra>,
) -> Result<RecordBatch, duckdb::Error> {
    let mut builders: Vec<Option<Builder>> = (0..layout.columns.len()).map(|_| None).collect();
    for &column in chosen {
        builders[column] = Some(Builder::new(&layout.kinds[column], rows.len()).map_err(failed)?);
    }
    for &row in rows {
        let Parts { present, nulls, mut values, .. } = packed.parts(layout, row);
        for (column, (builder, kind)) in builders.iter_mut().zip(&layout.kinds).enumerate() {
            let there = has(present, column) && !has(nulls, column);
            let content = there.then(|| {
                let (content, length) = values::take(kind, values);
                values = values.get(length..).unwrap_or_default();
                content
            });
            if let Some(builder) = builder {
                builder.append(kind, content).map_err(failed)?;
            }
        }
    }
    let (mut fields, mut arrays) = (Vec::new(), Vec::new());
    for extra in extras {
        match extra {
            Extra::Integers(name, values) => {
                let mut builder = Int64Builder::with_capacity(values.len());
                builder.append_slice(&values);
                fields.push(Field::new(name, DataType::Int64, false));
                arrays.push(Arc::new(builder.finish()) as ArrayRef);
            }
            Extra::Blobs(name, mut builder) => {
                fields.push(Field::new(name, DataType::Binary, true));
                arrays.push(Arc::new(builder.finish()) as ArrayRef);
            }
        }
    }
    for &column in chosen {
        if let Some(builder) = builders[column].take() {
            fields.push(field(&layout.columns[column].name, &layout.kinds[column]));
            arrays.push(builder.finish());
        }
    }
    RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).map_err(failed)
}

fn failed(error: ArrowError) -> duckdb::Error {
    Error::ToSqlConversionFailure(Box::new(error))
}

fn field(name: &str, kind: &Kind) -> Field {
    let of = |data_type| Field::new(name, data_type, true);
    match kind {
        Kind::Boolean => of(DataType::Boolean),
        Kind::Integer { bits, signed } => of(match (bits, signed) {
            (8, true) => DataType::Int8,
            (16, true) => DataType::Int16,
            (32, true) => DataType::Int32,
            (8, false) => DataType::UInt8,
            (16, false) => DataType::UInt16,
            (32, false) => DataType::UInt32,
            (_, false) => DataType::UInt64,
            (_, true) => DataType::Int64,
        }),
        Kind::Float => of(DataType::Float32),
        Kind::Double => of(DataType::Float64),
        Kind::Decimal { width, scale } => of(DataType::Decimal128(*width, scale.cast_signed())),
        Kind::Hugeint | Kind::Uhugeint | Kind::Varchar | Kind::Json | Kind::Enum(_) => of(DataType::Utf8),
        Kind::Blob => of(DataType::Binary),
        Kind::Date => of(DataType::Date32),
        Kind::Time => of(DataType::Time64(TimeUnit::Microsecond)),
        Kind::Timestamp(unit) => of(DataType::Timestamp(
            match unit {
                Unit::Second => TimeUnit::Second,
                Unit::Milli => TimeUnit::Millisecond,
                Unit::Micro => TimeUnit::Microsecond,
                Unit::Nano => TimeUnit::Nanosecond,
            },
            None,
        )),
        Kind::TimestampTz => of(DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))),
        Kind::Interval => of(DataType::Interval(IntervalUnit::MonthDayNano)),
        Kind::Uuid => of(DataType::FixedSizeBinary(16)).with_metadata(
            [("ARROW:extension:name".to_owned(), "arrow.uuid".to_owned())].into_iter().collect(),
        ),
    }
}

enum Builder {
    Boolean(BooleanBuilder),
    I8(Int8Builder),
    I16(Int16Builder),
    I32(Int32Builder),
    I64(Int64Builder),
    U8(UInt8Builder),
    U16(UInt16Builder),
    U32(UInt32Builder),
    U64(UInt64Builder),
    Float(Float32Builder),
    Double(Float64Builder),
    Decimal(Decimal128Builder),
    Text(StringBuilder),
    Bytes(BinaryBuilder),
    Date(Date32Builder),
    Time(Time64MicrosecondBuilder),
    Seconds(TimestampSecondBuilder),
    Millis(TimestampMillisecondBuilder),
    Micros(TimestampMicrosecondBuilder),
    Nanos(TimestampNanosecondBuilder),
    Interval(IntervalMonthDayNanoBuilder),
    Uuid(FixedSizeBinaryBuilder),
}

/// The bytes as an array; what is too short reads as zero.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().unwrap_or([0; N])
}

impl Builder {
    fn new(kind: &Kind, rows: usize) -> Result<Self, ArrowError> {
        Ok(match kind {
            Kind::Boolean => Self::Boolean(BooleanBuilder::with_capacity(rows)),
            Kind::Integer { bits, signed } => match (bits, signed) {
                (8, true) => Self::I8(Int8Builder::with_capacity(rows)),
                (16, true) => Self::I16(Int16Builder::with_capacity(rows)),
                (32, true) => Self::I32(Int32Builder::with_capacity(rows)),
                (8, false) => Self::U8(UInt8Builder::with_capacity(rows)),
                (16, false) => Self::U16(UInt16Builder::with_capacity(rows)),
                (32, false) => Self::U32(UInt32Builder::with_capacity(rows)),
                (_, false) => Self::U64(UInt64Builder::with_capacity(rows)),
                (_, true) => Self::I64(Int64Builder::with_capacity(rows)),
            },
            Kind::Float => Self::Float(Float32Builder::with_capacity(rows)),
            Kind::Double => Self::Double(Float64Builder::with_capacity(rows)),
            Kind::Decimal { width, scale } => Self::Decimal(
                Decimal128Builder::with_capacity(rows)
                    .with_precision_and_scale(*width, scale.cast_signed())?,
            ),
            Kind::Hugeint | Kind::Uhugeint | Kind::Varchar | Kind::Json | Kind::Enum(_) => {
                Self::Text(StringBuilder::with_capacity(rows, rows * 16))
            }
            Kind::Blob => Self::Bytes(BinaryBuilder::with_capacity(rows, rows * 16)),
            Kind::Date => Self::Date(Date32Builder::with_capacity(rows)),
            Kind::Time => Self::Time(Time64MicrosecondBuilder::with_capacity(rows)),
            Kind::Timestamp(Unit::Second) => Self::Seconds(TimestampSecondBuilder::with_capacity(rows)),
            Kind::Timestamp(Unit::Milli) => Self::Millis(TimestampMillisecondBuilder::with_capacity(rows)),
            Kind::Timestamp(Unit::Micro) => Self::Micros(TimestampMicrosecondBuilder::with_capacity(rows)),
            Kind::Timestamp(Unit::Nano) => Self::Nanos(TimestampNanosecondBuilder::with_capacity(rows)),
            Kind::TimestampTz => {
                Self::Micros(TimestampMicrosecondBuilder::with_capacity(rows).with_timezone("UTC"))
            }
            Kind::Interval => Self::Interval(IntervalMonthDayNanoBuilder::with_capacity(rows)),
            Kind::Uuid => Self::Uuid(FixedSizeBinaryBuilder::with_capacity(rows, 16)),
        })
    }

    /// Appends a value's content, or null.
    fn append(&mut self, kind: &Kind, content: Option<&[u8]>) -> Result<(), ArrowError> {
        match self {
            Self::Boolean(to) => to.append_option(content.map(|bytes| bytes.first() == Some(&1))),
            Self::I8(to) => to.append_option(content.map(|bytes| i8::from_le_bytes(array(bytes)))),
            Self::I16(to) => to.append_option(content.map(|bytes| i16::from_le_bytes(array(bytes)))),
            Self::I32(to) => to.append_option(content.map(|bytes| i32::from_le_bytes(array(bytes)))),
            Self::I64(to) => to.append_option(content.map(|bytes| i64::from_le_bytes(array(bytes)))),
            Self::U8(to) => to.append_option(content.map(|bytes| u8::from_le_bytes(array(bytes)))),
            Self::U16(to) => to.append_option(content.map(|bytes| u16::from_le_bytes(array(bytes)))),
            Self::U32(to) => to.append_option(content.map(|bytes| u32::from_le_bytes(array(bytes)))),
            Self::U64(to) => to.append_option(content.map(|bytes| u64::from_le_bytes(array(bytes)))),
            Self::Float(to) => to.append_option(content.map(|bytes| f32::from_le_bytes(array(bytes)))),
            Self::Double(to) => to.append_option(content.map(|bytes| f64::from_le_bytes(array(bytes)))),
            Self::Decimal(to) => to.append_option(content.map(|bytes| i128::from_le_bytes(array(bytes)))),
            Self::Date(to) => to.append_option(content.map(|bytes| i32::from_le_bytes(array(bytes)))),
            Self::Time(to) => to.append_option(content.map(|bytes| i64::from_le_bytes(array(bytes)))),
            Self::Seconds(to) => to.append_option(content.map(|bytes| i64::from_le_bytes(array(bytes)))),
            Self::Millis(to) => to.append_option(content.map(|bytes| i64::from_le_bytes(array(bytes)))),
            Self::Micros(to) => to.append_option(content.map(|bytes| i64::from_le_bytes(array(bytes)))),
            Self::Nanos(to) => to.append_option(content.map(|bytes| i64::from_le_bytes(array(bytes)))),
            Self::Bytes(to) => to.append_option(content),
            Self::Uuid(to) => match content {
                Some(bytes) => to.append_value(array::<16>(bytes))?,
                None => to.append_null(),
            },
            Self::Interval(to) => to.append_option(content.map(|bytes| {
                let bytes: [u8; 16] = array(bytes);
                IntervalMonthDayNanoType::make_value(
                    i32::from_le_bytes(array(&bytes[..4])),
                    i32::from_le_bytes(array(&bytes[4..8])),
                    i64::from_le_bytes(array(&bytes[8..])) * 1000,
                )
            })),
            Self::Text(to) => match (kind, content) {
                (_, None) => to.append_null(),
                (Kind::Hugeint, Some(bytes)) => {
                    to.append_value(i128::from_le_bytes(array(bytes)).to_string());
                }
                (Kind::Uhugeint, Some(bytes)) => {
                    to.append_value(u128::from_le_bytes(array(bytes)).to_string());
                }
                (Kind::Enum(names), Some(bytes)) => {
                    let at = u32::from_le_bytes(array(bytes)) as usize;
                    to.append_option(names.get(at));
                }
                (_, Some(bytes)) => {
                    let text = std::str::from_utf8(bytes)
                        .map_err(|error| ArrowError::InvalidArgumentError(error.to_string()))?;
                    to.append_value(text);
                }
            },
        }
        Ok(())
    }

    fn finish(self) -> ArrayRef {
        match self {
            Self::Boolean(mut of) => Arc::new(of.finish()),
            Self::I8(mut of) => Arc::new(of.finish()),
            Self::I16(mut of) => Arc::new(of.finish()),
            Self::I32(mut of) => Arc::new(of.finish()),
            Self::I64(mut of) => Arc::new(of.finish()),
            Self::U8(mut of) => Arc::new(of.finish()),
            Self::U16(mut of) => Arc::new(of.finish()),
            Self::U32(mut of) => Arc::new(of.finish()),
            Self::U64(mut of) => Arc::new(of.finish()),
            Self::Float(mut of) => Arc::new(of.finish()),
            Self::Double(mut of) => Arc::new(of.finish()),
            Self::Decimal(mut of) => Arc::new(of.finish()),
            Self::Text(mut of) => Arc::new(of.finish()),
            Self::Bytes(mut of) => Arc::new(of.finish()),
            Self::Date(mut of) => Arc::new(of.finish()),
            Self::Time(mut of) => Arc::new(of.finish()),
            Self::Seconds(mut of) => Arc::new(of.finish()),
            Self::Millis(mut of) => Arc::new(of.finish()),
            Self::Micros(mut of) => Arc::new(of.finish()),
            Self::Nanos(mut of) => Arc::new(of.finish()),
            Self::Interval(mut of) => Arc::new(of.finish()),
            Self::Uuid(mut of) => Arc::new(of.finish()),
        }
    }
}
