//! The values of one row, column by column, before the sink's encoder.

use adapters::{sink::RowKind, value::Value};
use serde_json::value::RawValue;

use super::{
    compile::{Cell, CellFrom, Namer, Place, RowKeyPart},
    derive::{header, kafka_header},
    json,
    namer::{Payload, Sight},
    rules::{ColumnSource, Constant, UnknownFields},
};
use crate::format::{Member, Unavailable, debezium::Op};

impl Namer {
    /// Refuses members that nothing uses, drops them, or gathers them in `extra`, as the route says.
    pub(super) fn gather_unknown(
        &self,
        sight: Sight<'_>,
        kind: RowKind,
        extra: &mut String,
    ) -> Result<(), String> {
        extra.clear();
        match &self.rules.unknown_fields {
            UnknownFields::Reject => match sight.unknown.first() {
                Some((name, _)) if !self.whole => Err(format!(
                    "member {} has no column; leave it out, add a column, or set unknown_fields",
                    json::shown(name)
                )),
                _ => Ok(()),
            },
            UnknownFields::Column(_) if kind == RowKind::Write => {
                extra.push('{');
                for (name, value) in sight.unknown {
                    if extra.len() > 1 {
                        extra.push(',');
                    }
                    extra.push_str(&serde_json::Value::from(name.as_ref()).to_string());
                    extra.push(':');
                    self.sound(value, 1).map_err(|fault| format!("member {}: {fault}", json::shown(name)))?;
                    extra.push_str(value);
                }
                extra.push('}');
                Ok(())
            }
            UnknownFields::Column(_) | UnknownFields::Ignore => Ok(()),
        }
    }

    /// One value a column, in the encoder's order.
    pub(super) fn values<'r>(
        &'r self,
        sight: Sight<'r>,
        extra: &'r str,
        values: &mut Vec<Value<'r>>,
    ) -> Result<(), String> {
        for (at, cell) in self.cells.iter().enumerate() {
            let value = match &cell.from {
                CellFrom::Place(place) => self.placed(sight, cell, place),
                CellFrom::Unknown if extra.is_empty() => Ok(Value::Missing),
                CellFrom::Unknown => Ok(Value::Json(extra)),
                CellFrom::Source(source) => sourced(sight, cell, source),
            };
            let name = || &self.encoder.columns()[at].name;
            values.push(value.map_err(|fault| format!("column {:?}: {fault}", name()))?);
        }
        Ok(())
    }

    fn placed<'r>(&self, sight: Sight<'r>, cell: &Cell, place: &Place) -> Result<Value<'r>, String> {
        if sight.payload == Payload::Tombstone {
            return from_kafka_key(sight, cell, place);
        }
        if let Payload::Raw(bytes) = sight.payload {
            return Ok(outside(bytes, cell));
        }
        let Some(value) = sight.at(place)? else { return Ok(Value::Missing) };
        if self.placeholders.iter().any(|text| text == value) {
            return self.unavailable(cell, place);
        }
        self.sound(value, place.pointer.steps().len())
            .map_err(|fault| format!("{}: {fault}", json::at(&place.pointer)))?;
        Ok(Value::Json(value))
    }

    /// The source did not send the value, since the change did not touch it.
    fn unavailable(&self, cell: &Cell, place: &Place) -> Result<Value<'static>, String> {
        match self.rules.format.debezium().map(|format| format.unavailable) {
            Some(Unavailable::Keep) if cell.has_default => Ok(Value::Missing),
            Some(Unavailable::Keep) => Err(format!(
                "{} was not sent, since the change did not touch it, and the column has no default to be left alone by; \
                 give it one, or have the source send it (REPLICA IDENTITY FULL)",
                json::at(&place.pointer)
            )),
            _ => Err(format!(
                "{} was not sent, since the change did not touch it; have the source send it (REPLICA IDENTITY FULL), or set \
                 unavailable = \"keep\"",
                json::at(&place.pointer)
            )),
        }
    }

    /// Refuses repeated members and nesting beyond the route's depth in a value that lies `level` levels deep.
    fn sound(&self, value: &str, level: usize) -> Result<(), String> {
        json::check(value, self.rules.max_depth.saturating_sub(level))
    }
}

/// A tombstone's column: the member of a Kafka key that is a JSON object; else the whole key, for the only row key column.
fn from_kafka_key<'r>(sight: Sight<'r>, cell: &Cell, place: &Place) -> Result<Value<'r>, String> {
    let Some(key) = sight.record.kafka.and_then(|kafka| kafka.key) else { return Ok(Value::Missing) };
    let quoted = match (sight.key, key.first()) {
        (Some(text), _) => Some(text),
        (None, Some(b'{' | b'"')) => serde_json::from_slice::<&RawValue>(key).ok().map(RawValue::get),
        _ => None,
    };
    match (quoted, cell.row_key) {
        (Some(object), _) if object.starts_with('{') => {
            Ok(json::descend(object, place.pointer.steps())?.map_or(Value::Missing, Value::Json))
        }
        (Some(text), RowKeyPart::Alone) => Ok(Value::Json(text)),
        (None, RowKeyPart::Alone) => Ok(outside(key, cell)),
        _ => Ok(Value::Missing),
    }
}

fn sourced<'r>(sight: Sight<'r>, cell: &Cell, source: &'r ColumnSource) -> Result<Value<'r>, String> {
    let record = sight.record;
    let bytes = |value: Option<Option<&'r [u8]>>| match value {
        None => Value::Missing,
        Some(None) => Value::Json("null"),
        Some(Some(value)) => outside(value, cell),
    };
    Ok(match source {
        ColumnSource::Header(name) => bytes(header(record.headers, name)?),
        ColumnSource::KafkaHeader(name) => bytes(kafka_header(&sight, name)),
        ColumnSource::KafkaKey => bytes(record.kafka.map(|kafka| kafka.key)),
        ColumnSource::KafkaTimestamp => match record.kafka.and_then(|kafka| kafka.timestamp_ms) {
            Some(ms) => {
                Value::Micros(ms.checked_mul(1000).ok_or("the Kafka timestamp is beyond the year 9999")?)
            }
            None => Value::Missing,
        },
        ColumnSource::Topic => record.kafka.map_or(Value::Missing, |kafka| Value::Text(kafka.topic)),
        ColumnSource::Partition => {
            record.kafka.map_or(Value::Missing, |kafka| Value::Integer(kafka.partition.into()))
        }
        ColumnSource::Offset => record.kafka.map_or(Value::Missing, |kafka| Value::Integer(kafka.offset)),
        ColumnSource::Arrival => Value::Micros(record.arrival_us),
        ColumnSource::Constant(Constant::Text(text)) => Value::Text(text),
        ColumnSource::Constant(Constant::Integer(number)) => Value::Integer(*number),
        ColumnSource::Constant(Constant::Json(text)) => Value::Json(text),
        ColumnSource::Debezium(member) => match (sight.change, member) {
            (None, _) => Value::Missing,
            (Some(change), Member::Version) => Value::Text(change.version.as_deref().map_err(Clone::clone)?),
            (Some(change), Member::Position) => {
                Value::Text(change.position.as_deref().map_err(Clone::clone)?)
            }
            (Some(change), Member::Op) => Value::Text(change.op.word()),
            (Some(change), Member::Deleted) => truth(change.op == Op::Delete),
            (Some(change), Member::Snapshot) => truth(change.snapshot),
            (Some(change), Member::TsMs) => match change.ts_ms {
                Some(ms) => {
                    Value::Micros(ms.checked_mul(1000).ok_or("the source's time is beyond the year 9999")?)
                }
                None => Value::Json("null"),
            },
            (Some(change), Member::Database) => told(&change.database),
            (Some(change), Member::Schema) => told(&change.schema),
            (Some(change), Member::Table) => told(&change.table),
            (Some(change), Member::Connector) => told(&change.connector),
            (Some(change), Member::Name) => told(&change.name),
        },
        // Pointers are places.
        ColumnSource::Default | ColumnSource::Pointer(_) => Value::Missing,
    })
}

fn truth(value: bool) -> Value<'static> {
    Value::Json(if value { "true" } else { "false" })
}

fn told(text: &Option<String>) -> Value<'_> {
    text.as_deref().map_or(Value::Json("null"), Value::Text)
}

/// Bytes from outside JSON: text where they are text, unless the column takes bytes.
fn outside<'r>(bytes: &'r [u8], cell: &Cell) -> Value<'r> {
    match std::str::from_utf8(bytes) {
        Ok(text) if !cell.binary => Value::Text(text),
        _ => Value::Bytes(bytes),
    }
}
