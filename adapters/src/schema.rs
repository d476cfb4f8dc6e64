//! A registered schema, wherever it comes from.

/// What a schema is written in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SchemaKind {
    /// `AVRO`, also where the registry says nothing.
    Avro,
    /// `PROTOBUF`.
    Protobuf,
    /// `JSON`.
    Json,
}

/// A schema and those that it refers to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Schema {
    /// What it is written in.
    pub kind: SchemaKind,
    /// As the registry keeps it.
    pub text: String,
    /// Name and text of each reference; what refers comes after what it refers to.
    pub references: Vec<(String, String)>,
}
