//! An Avro schema, reduced to what reading needs.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::format::semantic::{Parameters, Semantic, Unit};

/// Index into [`AvroSchema::nodes`].
pub(super) type NodeId = usize;

/// A schema whose named types may refer to each other, and to themselves.
#[derive(Debug)]
pub(crate) struct AvroSchema {
    pub(super) nodes: Vec<Node>,
    pub(super) root: NodeId,
}

/// One type of it.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) kind: Kind,
    pub(super) meaning: Meaning,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Null,
    Boolean,
    Int,
    Long,
    Float,
    Double,
    Bytes,
    String,
    Fixed(usize),
    Enum(Vec<String>),
    Array(NodeId),
    Map(NodeId),
    Union(Vec<NodeId>),
    Record(Vec<(String, NodeId)>),
}

/// What values of a type mean.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Meaning {
    /// What they are.
    Plain,
    /// As Connect or a logical type declares.
    Semantic(Semantic),
    /// 16 bytes.
    Uuid,
    /// Months, days and milliseconds, 4 bytes each, the lowest first.
    Duration,
}

/// The most types of one schema.
const MAX_NODES: usize = 100_000;

impl AvroSchema {
    /// From the texts that a registry keeps: those that are referred to first.
    pub(crate) fn parse<'t>(references: impl Iterator<Item = &'t str>, text: &str) -> Result<Self, String> {
        let mut parser = Parser::default();
        for reference in references {
            parser.read(&json(reference)?, "")?;
        }
        let root = parser.read(&json(text)?, "")?;
        Ok(Self { nodes: parser.nodes, root })
    }
}

/// A schema may be a bare name, which registries keep with or without quotes.
fn json(text: &str) -> Result<Value, String> {
    if let Ok(value) = serde_json::from_str(text) {
        return Ok(value);
    }
    let bare = text.trim();
    let name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.');
    match !bare.is_empty() && bare.bytes().all(name) {
        true => Ok(Value::from(bare)),
        false => Err("the schema is not JSON, or nested deeper than 128 levels".to_owned()),
    }
}

#[derive(Default)]
struct Parser {
    nodes: Vec<Node>,
    names: HashMap<String, NodeId>,
}

impl Parser {
    fn add(&mut self, kind: Kind, meaning: Meaning) -> Result<NodeId, String> {
        if self.nodes.len() >= MAX_NODES {
            return Err(format!("the schema has more than {MAX_NODES} types"));
        }
        self.nodes.push(Node { kind, meaning });
        Ok(self.nodes.len() - 1)
    }

    /// The JSON parser has bounded how deep this goes.
    fn read(&mut self, schema: &Value, namespace: &str) -> Result<NodeId, String> {
        match schema {
            Value::String(name) => self.named(name, namespace, Meaning::Plain),
            Value::Array(branches) => {
                let branches = branches.iter().map(|branch| self.read(branch, namespace));
                let branches = branches.collect::<Result<_, _>>()?;
                self.add(Kind::Union(branches), Meaning::Plain)
            }
            Value::Object(schema) => self.object(schema, namespace),
            _ => Err("a type of the schema is neither a name, a list nor an object".to_owned()),
        }
    }

    /// A primitive type, or one that was defined before.
    fn named(&mut self, name: &str, namespace: &str, meaning: Meaning) -> Result<NodeId, String> {
        let kind = match name {
            "null" => Kind::Null,
            "boolean" => Kind::Boolean,
            "int" => Kind::Int,
            "long" => Kind::Long,
            "float" => Kind::Float,
            "double" => Kind::Double,
            "bytes" => Kind::Bytes,
            "string" => Kind::String,
            _ => {
                let full = full_name(name, namespace);
                let known = self.names.get(&full).or_else(|| self.names.get(name));
                return known
                    .copied()
                    .ok_or_else(|| format!("type {full:?} is not defined in the schema or its references"));
            }
        };
        self.add(kind, meaning)
    }

    fn object(&mut self, schema: &Map<String, Value>, namespace: &str) -> Result<NodeId, String> {
        let kind = schema.get("type").ok_or("a type of the schema has no \"type\"")?;
        let Value::String(kind) = kind else {
            // `{"type": {"type": "long"}}`: the inner one counts.
            return self.read(kind, namespace);
        };
        let text = |name: &str| schema.get(name).and_then(Value::as_str);
        if !matches!(kind.as_str(), "record" | "error" | "enum" | "fixed") {
            return match kind.as_str() {
                "array" => {
                    let items =
                        self.read(schema.get("items").ok_or("an array has no \"items\"")?, namespace)?;
                    self.add(Kind::Array(items), Meaning::Plain)
                }
                "map" => {
                    let values =
                        self.read(schema.get("values").ok_or("a map has no \"values\"")?, namespace)?;
                    self.add(Kind::Map(values), Meaning::Plain)
                }
                name => {
                    let meaning = meaning(schema, name)?;
                    self.named(name, namespace, meaning)
                }
            };
        }
        let name = text("name").ok_or_else(|| format!("a {kind} has no name"))?;
        let own = text("namespace").unwrap_or(namespace);
        let full = full_name(name, own);
        let inner = full.rsplit_once('.').map_or("", |(space, _)| space).to_owned();
        let node = match kind.as_str() {
            "fixed" => {
                let size = schema.get("size").and_then(Value::as_u64).ok_or("a fixed has no \"size\"")?;
                let size = usize::try_from(size).map_err(|_| "a fixed is too large")?;
                self.add(Kind::Fixed(size), meaning(schema, "fixed")?)?
            }
            "enum" => {
                let symbols =
                    schema.get("symbols").and_then(Value::as_array).ok_or("an enum has no \"symbols\"")?;
                let symbols = symbols.iter().map(|symbol| symbol.as_str().map(str::to_owned));
                let symbols = symbols.collect::<Option<_>>().ok_or("a symbol of an enum is no string")?;
                self.add(Kind::Enum(symbols), Meaning::Plain)?
            }
            _ => self.add(Kind::Record(Vec::new()), meaning(schema, "record")?)?,
        };
        // Known before its fields are read: they may hold it.
        if self.names.insert(full.clone(), node).is_some() {
            return Err(format!("type {full:?} is defined twice"));
        }
        if matches!(kind.as_str(), "record" | "error") {
            let fields =
                schema.get("fields").and_then(Value::as_array).ok_or("a record has no \"fields\"")?;
            let mut read: Vec<(String, NodeId)> = Vec::with_capacity(fields.len());
            for field in fields {
                let name =
                    field.get("name").and_then(Value::as_str).ok_or("a field of a record has no name")?;
                if read.iter().any(|(known, _)| known == name) {
                    return Err(format!("record {full:?} has two fields {name:?}"));
                }
                let of = field.get("type").ok_or_else(|| format!("field {name:?} has no \"type\""))?;
                read.push((name.to_owned(), self.read(of, &inner)?));
            }
            self.nodes[node].kind = Kind::Record(read);
        }
        Ok(node)
    }
}

fn full_name(name: &str, namespace: &str) -> String {
    match name.contains('.') || namespace.is_empty() {
        true => name.to_owned(),
        false => format!("{namespace}.{name}"),
    }
}

/// Connect's declared type outranks Avro's logical type: it says more.
fn meaning(schema: &Map<String, Value>, kind: &str) -> Result<Meaning, String> {
    let connect = schema.get("connect.parameters");
    let number = |name: &str| {
        let of_connect = connect.and_then(|parameters| parameters.get(name));
        let value = of_connect.or_else(|| schema.get(name))?;
        value.as_i64().or_else(|| value.as_str()?.parse().ok())
    };
    let parameters = Parameters {
        scale: number("scale"),
        length: number("length").and_then(|length| usize::try_from(length).ok()),
    };
    if let Some(name) = schema.get("connect.name").and_then(Value::as_str)
        && let Some(semantic) = Semantic::named(name, parameters)?
    {
        return Ok(if semantic == Semantic::AsIs { Meaning::Plain } else { Meaning::Semantic(semantic) });
    }
    let logical = schema.get("logicalType").and_then(Value::as_str).unwrap_or_default();
    Ok(match (logical, kind) {
        // Without a scale it is 0.
        ("decimal", "bytes" | "fixed") => Meaning::Semantic(
            Semantic::named(
                "org.apache.kafka.connect.data.Decimal",
                Parameters { scale: Some(parameters.scale.unwrap_or(0)), length: None },
            )?
            .unwrap_or(Semantic::AsIs),
        ),
        ("date", "int") => Meaning::Semantic(Semantic::Date),
        ("time-millis", "int") => Meaning::Semantic(Semantic::Time(Unit::Millis)),
        ("time-micros", "long") => Meaning::Semantic(Semantic::Time(Unit::Micros)),
        ("timestamp-millis", "long") => Meaning::Semantic(Semantic::Instant(Unit::Millis)),
        ("timestamp-micros", "long") => Meaning::Semantic(Semantic::Instant(Unit::Micros)),
        ("timestamp-nanos", "long") => Meaning::Semantic(Semantic::Instant(Unit::Nanos)),
        ("local-timestamp-millis", "long") => Meaning::Semantic(Semantic::Timestamp(Unit::Millis)),
        ("local-timestamp-micros", "long") => Meaning::Semantic(Semantic::Timestamp(Unit::Micros)),
        ("local-timestamp-nanos", "long") => Meaning::Semantic(Semantic::Timestamp(Unit::Nanos)),
        ("uuid", "fixed") if schema.get("size").and_then(Value::as_u64) == Some(16) => Meaning::Uuid,
        ("duration", "fixed") if schema.get("size").and_then(Value::as_u64) == Some(12) => Meaning::Duration,
        // Unknown ones are ignored, as Avro's specification says.
        _ => Meaning::Plain,
    })
}
