//! The schema that Kafka Connect's JSON converter sends with each record (`{"schema":..,"payload":..}`), reduced to what has to be
//! done with the values: most of a row stays as it is.

use std::{borrow::Cow, collections::HashMap, sync::Arc};

use super::semantic::{Parameters, Semantic};
use crate::naming::json::{self, MAX_DEPTH};

/// What has to be done with a value.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Shape {
    /// Nothing in it has a declared type of its own.
    Plain,
    /// It has.
    Semantic(Semantic),
    /// An object some of whose members have.
    Struct(HashMap<String, Shape>),
    /// An array whose elements have.
    Array(Box<Shape>),
    /// An object whose values have.
    Map(Box<Shape>),
}

impl Shape {
    /// From the text of a Connect schema.
    pub(crate) fn parse(schema: &str) -> Result<Self, String> {
        Self::read(schema, MAX_DEPTH).map_err(|fault| format!("the record's schema: {fault}"))
    }

    fn read(schema: &str, depth: usize) -> Result<Self, String> {
        let deeper = depth
            .checked_sub(1)
            .ok_or_else(|| format!("it is nested deeper than {MAX_DEPTH} levels; flatten it"))?;
        if !schema.starts_with('{') {
            return Ok(Shape::Plain);
        }
        let members = json::members(schema)?;
        let get = |name: &str| members.iter().find(|(member, _)| member == name).map(|(_, value)| *value);
        let text = |name: &str| get(name).filter(|value| value.starts_with('"')).map(json::text).transpose();
        if let Some(name) = text("name")?
            && let Some(semantic) = Semantic::named(&name, parameters(get("parameters"))?)?
        {
            return Ok(if semantic == Semantic::AsIs { Shape::Plain } else { Shape::Semantic(semantic) });
        }
        Ok(match text("type")?.as_deref() {
            Some("struct") => {
                let mut fields = HashMap::new();
                for field in get("fields").map(json::elements).transpose()?.unwrap_or_default() {
                    let shape = Self::read(field, deeper)?;
                    let name = json::members(field)?
                        .into_iter()
                        .find(|(member, value)| member == "field" && value.starts_with('"'))
                        .map(|(_, value)| json::text(value).map(Cow::into_owned))
                        .ok_or("a field of a struct has no name")??;
                    if shape != Shape::Plain {
                        fields.insert(name, shape);
                    }
                }
                if fields.is_empty() { Shape::Plain } else { Shape::Struct(fields) }
            }
            Some("array") => within(get("items"), deeper)?.map_or(Shape::Plain, |of| Shape::Array(of.into())),
            Some("map") => within(get("values"), deeper)?.map_or(Shape::Plain, |of| Shape::Map(of.into())),
            _ => Shape::Plain,
        })
    }

    /// What has to be done with member `name`.
    pub(crate) fn field(&self, name: &str) -> &Shape {
        match self {
            Shape::Struct(fields) => fields.get(name).unwrap_or(&Shape::Plain),
            _ => &Shape::Plain,
        }
    }

    /// Appends `value` with its declared types read. What `kept` knows stays as it is.
    pub(crate) fn write(
        &self,
        value: &str,
        kept: &dyn Fn(&str) -> bool,
        out: &mut String,
    ) -> Result<(), String> {
        if *self == Shape::Plain || value == "null" || kept(value) {
            out.push_str(value);
            return Ok(());
        }
        match self {
            Shape::Plain => out.push_str(value),
            Shape::Semantic(semantic) => semantic.convert(value, out)?,
            Shape::Array(of) => {
                out.push('[');
                for (at, element) in json::elements(value)?.into_iter().enumerate() {
                    if at > 0 {
                        out.push(',');
                    }
                    of.write(element, kept, out)?;
                }
                out.push(']');
            }
            Shape::Struct(_) | Shape::Map(_) => {
                if !value.starts_with('{') {
                    return Err(
                        "a value is no object, as its schema declares; check the producer's converter".into(),
                    );
                }
                out.push('{');
                for (at, (name, value)) in json::members(value)?.into_iter().enumerate() {
                    if at > 0 {
                        out.push(',');
                    }
                    push_name(&name, out);
                    let of = if let Shape::Map(of) = self { of } else { self.field(&name) };
                    of.write(value, kept, out).map_err(|fault| format!("{}: {fault}", json::shown(&name)))?;
                }
                out.push('}');
            }
        }
        Ok(())
    }
}

fn within(schema: Option<&str>, depth: usize) -> Result<Option<Shape>, String> {
    Ok(schema.map(|schema| Shape::read(schema, depth)).transpose()?.filter(|shape| *shape != Shape::Plain))
}

fn parameters(json: Option<&str>) -> Result<Parameters, String> {
    let mut parameters = Parameters::default();
    let Some(json) = json.filter(|json| json.starts_with('{')) else { return Ok(parameters) };
    for (name, value) in json::members(json)? {
        let text = if value.starts_with('"') { json::text(value)? } else { value.into() };
        match name.as_ref() {
            "scale" => parameters.scale = Some(text.parse().map_err(|_| "a scale is no whole number")?),
            "length" => parameters.length = Some(text.parse().map_err(|_| "a length is no whole number")?),
            _ => {}
        }
    }
    Ok(parameters)
}

/// Appends a member's name and the colon.
pub(crate) fn push_name(name: &str, out: &mut String) {
    out.push_str(&serde_json::Value::from(name).to_string());
    out.push(':');
}

/// Schemas of one thread: each comes with thousands of records, byte for byte the same.
#[derive(Debug, Default)]
pub(crate) struct Shapes(HashMap<Box<str>, Arc<Shape>>);

/// Beyond so many the memory is begun anew.
const MAX_SHAPES: usize = 64;

impl Shapes {
    /// The shape that `schema` declares.
    pub(crate) fn of(&mut self, schema: &str) -> Result<Arc<Shape>, String> {
        if let Some(shape) = self.0.get(schema) {
            return Ok(shape.clone());
        }
        let shape = Arc::new(Shape::parse(schema)?);
        if self.0.len() >= MAX_SHAPES {
            self.0.clear();
        }
        self.0.insert(schema.into(), shape.clone());
        Ok(shape)
    }
}

/// A record of Connect's JSON converter taken apart: its schema, if it has one, and its value. What has not both members, and no
/// others, is the value itself.
pub(crate) fn unwrap(text: &str) -> Result<(Option<&str>, &str), String> {
    let text = json::whole(text)?;
    if !text.starts_with('{') {
        return Ok((None, text));
    }
    let members = json::members(text)?;
    let get = |name: &str| members.iter().find(|(member, _)| member == name).map(|(_, value)| *value);
    match (members.len(), get("schema"), get("payload")) {
        (2, Some(schema), Some(payload)) if schema.starts_with('{') => Ok((Some(schema), payload)),
        (2, Some("null"), Some(payload)) => Ok((None, payload)),
        _ => Ok((None, text)),
    }
}
