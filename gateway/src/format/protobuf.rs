//! Protobuf by the schema that its writer has registered: text of `.proto` files, and the message's place in it. Pure.

use std::{collections::HashMap, path::Path};

use base64::Engine;
use prost_reflect::{DescriptorPool, DynamicMessage, Kind, MapKey, MessageDescriptor, ReflectMessage, Value};
use protox::file::{ChainFileResolver, File, FileResolver, GoogleFileResolver};

use super::{connect::push_name, semantic};

/// The file that the registered text becomes; no import can have this name.
const ROOT: &str = "<registered>";
/// The deepest nesting of messages in a schema, and so the longest list of message indexes.
const MAX_INDEXES: u64 = 64;

/// What Confluent's serializers know without a reference.
const BUILT_IN: [(&str, &str); 2] = [
    (
        "confluent/type/decimal.proto",
        "syntax = \"proto3\"; package confluent.type;
         message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }",
    ),
    (
        "confluent/meta.proto",
        "syntax = \"proto3\"; package confluent; import \"google/protobuf/descriptor.proto\";
         message Meta { string doc = 1; map<string, string> params = 2; repeated string tags = 3; }
         extend google.protobuf.FileOptions { Meta file_meta = 1088; }
         extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
         extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
         extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
         extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }",
    ),
];

/// A file of messages, with those that it imports.
#[derive(Debug)]
pub(crate) struct ProtobufSchema(DescriptorPool);

struct Texts(HashMap<String, String>);

impl FileResolver for Texts {
    fn resolve_path(&self, _: &Path) -> Option<String> {
        None
    }

    fn open_file(&self, name: &str) -> Result<File, protox::Error> {
        match self.0.get(name) {
            Some(text) => File::from_source(name, text),
            None => Err(protox::Error::file_not_found(name)),
        }
    }
}

impl ProtobufSchema {
    /// From the texts that a registry keeps, each reference under the name that it is imported by.
    pub(crate) fn parse(references: &[(String, String)], text: &str) -> Result<Self, String> {
        let built_in = BUILT_IN.map(|(name, text)| (name.to_owned(), text.to_owned()));
        let mut texts: HashMap<String, String> = built_in.into_iter().collect();
        texts.extend(references.iter().cloned());
        texts.insert(ROOT.to_owned(), text.to_owned());
        let mut resolver = ChainFileResolver::new();
        resolver.add(Texts(texts));
        resolver.add(GoogleFileResolver::new());
        let mut compiler = protox::Compiler::with_file_resolver(resolver);
        compiler.include_imports(true);
        let compiled = compiler.open_file(ROOT).map(|compiler| compiler.descriptor_pool());
        compiled.map(Self).map_err(|fault| format!("it is no Protobuf schema: {fault}"))
    }

    /// Appends the message that `bytes`, behind its indexes, hold as JSON text. Errors name fields, never values.
    pub(crate) fn read(&self, bytes: &[u8], out: &mut String) -> Result<(), String> {
        let (descriptor, bytes) = self.message(bytes)?;
        let name = descriptor.full_name().to_owned();
        let message = DynamicMessage::decode(descriptor, bytes).map_err(|fault| {
            format!("message {name}: {fault}; the payload was not written with this schema, or it is damaged")
        })?;
        write(&message, out)
    }

    /// The message that the indexes lead to, and what stands behind them.
    fn message<'b>(&self, bytes: &'b [u8]) -> Result<(MessageDescriptor, &'b [u8]), String> {
        let mut rest = bytes;
        let count = zigzag(&mut rest)?;
        if count > MAX_INDEXES {
            return Err(format!(
                "{count} message indexes are announced, more than {MAX_INDEXES}; the payload is damaged"
            ));
        }
        let file = self.0.get_file_by_name(ROOT).ok_or("the schema has no file")?;
        let mut messages: Vec<MessageDescriptor> = file.messages().collect();
        let mut found = None;
        for level in 0..count.max(1) {
            // The first message alone is written as no index at all.
            let index = if count == 0 { 0 } else { zigzag(&mut rest)? };
            let message = usize::try_from(index).ok().and_then(|index| messages.get(index).cloned());
            let message = message.ok_or_else(|| {
                format!(
                    "message index {index} at level {} leads nowhere, for the schema has {} messages there; the payload is damaged",
                    level + 1,
                    messages.len()
                )
            })?;
            messages = message.child_messages().filter(|child| !child.is_map_entry()).collect();
            found = Some(message);
        }
        found.map(|message| (message, rest)).ok_or_else(|| "the schema has no message".to_owned())
    }
}

/// A number of variable length, zigzag; negative ones are refused.
fn zigzag(bytes: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0u64;
    for shift in (0..63).step_by(7) {
        let Some((byte, rest)) = bytes.split_first() else {
            return Err("it ends within its message indexes; it is damaged".to_owned());
        };
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return match value & 1 {
                0 => Ok(value >> 1),
                _ => Err("a message index is negative; the payload is damaged".to_owned()),
            };
        }
    }
    Err("a message index has more than 63 bits; the payload is damaged".to_owned())
}

/// The decoder has bounded how deep this goes (100 levels).
fn write(message: &DynamicMessage, out: &mut String) -> Result<(), String> {
    let descriptor = message.descriptor();
    let name = descriptor.full_name();
    if let Some(unknown) = message.unknown_fields().next() {
        return Err(format!(
            "message {name} holds field number {}, which its schema does not have; the payload was not written with this \
             schema, or it is damaged",
            unknown.number()
        ));
    }
    if name.starts_with("google.protobuf.") {
        // Well-known types have a form of their own in JSON, such as RFC 3339 for times.
        let text =
            serde_json::to_string(message).map_err(|_| format!("message {name} has no form in JSON"))?;
        out.push_str(&text);
        return Ok(());
    }
    if name == "confluent.type.Decimal" {
        let field = |name: &str| message.get_field_by_name(name).map(|value| value.into_owned());
        let (Some(Value::Bytes(value)), Some(Value::I32(scale))) = (field("value"), field("scale")) else {
            return Err(format!("message {name} is another one than Confluent's"));
        };
        let value: &[u8] = if value.is_empty() { &[0] } else { &value };
        return semantic::decimal(value, scale.into(), out);
    }
    out.push('{');
    let mut first = true;
    for field in descriptor.fields() {
        // Those without presence have their default.
        if field.supports_presence() && !message.has_field(&field) {
            continue;
        }
        if !std::mem::take(&mut first) {
            out.push(',');
        }
        push_name(field.name(), out);
        let value = message.get_field(&field);
        value_of(&value, &field.kind(), out).map_err(|fault| format!("field {}: {fault}", field.name()))?;
    }
    out.push('}');
    Ok(())
}

fn value_of(value: &Value, kind: &Kind, out: &mut String) -> Result<(), String> {
    match value {
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::I32(value) => out.push_str(&value.to_string()),
        Value::I64(value) => out.push_str(&value.to_string()),
        Value::U32(value) => out.push_str(&value.to_string()),
        Value::U64(value) => out.push_str(&value.to_string()),
        Value::F32(value) => float(f64::from(*value), serde_json::to_string(value).ok(), out),
        Value::F64(value) => float(*value, serde_json::to_string(value).ok(), out),
        Value::String(value) => out.push_str(&serde_json::Value::from(value.as_str()).to_string()),
        Value::Bytes(value) => {
            out.push('"');
            base64::engine::general_purpose::STANDARD.encode_string(value, out);
            out.push('"');
        }
        Value::EnumNumber(number) => {
            let name =
                kind.as_enum().and_then(|of| of.get_value(*number)).map(|value| value.name().to_owned());
            match name {
                Some(name) => out.push_str(&serde_json::Value::from(name).to_string()),
                None => out.push_str(&number.to_string()),
            }
        }
        Value::Message(message) => write(message, out)?,
        Value::List(values) => {
            out.push('[');
            for (at, value) in values.iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                value_of(value, kind, out)?;
            }
            out.push(']');
        }
        Value::Map(entries) => {
            let of = kind.as_message().map(|entry| entry.map_entry_value_field().kind());
            let of = of.ok_or("a map has no entry type")?;
            let mut entries: Vec<(String, &Value)> =
                entries.iter().map(|(key, value)| (key_text(key), value)).collect();
            // Each time in the same order.
            entries.sort_unstable_by(|a, b| a.0.cmp(&b.0));
            out.push('{');
            for (at, (key, value)) in entries.into_iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                push_name(&key, out);
                value_of(value, &of, out)?;
            }
            out.push('}');
        }
    }
    Ok(())
}

fn key_text(key: &MapKey) -> String {
    match key {
        MapKey::Bool(key) => key.to_string(),
        MapKey::I32(key) => key.to_string(),
        MapKey::I64(key) => key.to_string(),
        MapKey::U32(key) => key.to_string(),
        MapKey::U64(key) => key.to_string(),
        MapKey::String(key) => key.clone(),
    }
}

/// `text` is the shortest that gives a finite value back.
fn float(value: f64, text: Option<String>, out: &mut String) {
    match text {
        Some(text) if value.is_finite() => out.push_str(&text),
        _ if value.is_nan() => out.push_str("\"NaN\""),
        _ => out.push_str(if value > 0.0 { "\"Infinity\"" } else { "\"-Infinity\"" }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ORDER: &str = r#"syntax = "proto3"; package shop;
        import "confluent/meta.proto"; import "confluent/type/decimal.proto"; import "google/protobuf/timestamp.proto";
        import "other.proto";
        message Order {
            int64 id = 1 [(confluent.field_meta).doc = "the order"];
            optional string note = 2;
            bytes raw = 3;
            repeated sint32 points = 4;
            map<string, double> rates = 5;
            confluent.type.Decimal amount = 6;
            google.protobuf.Timestamp at = 7;
            Kind kind = 8;
            uint64 big = 9;
            other.Part part = 10;
            float ratio = 11;
            message Line { string text = 1; message Deep { bool yes = 1; } }
        }
        enum Kind { NONE = 0; SOME = 1; }
        message Second { Second next = 1; }"#;
    const OTHER: &str = r#"syntax = "proto3"; package other; message Part { string name = 1; }"#;

    fn schema() -> ProtobufSchema {
        let references = [("other.proto".to_owned(), OTHER.to_owned())];
        ProtobufSchema::parse(&references, ORDER).unwrap_or_else(|fault| panic!("{fault}"))
    }

    fn read(bytes: &[u8]) -> Result<String, String> {
        let mut out = String::new();
        schema().read(bytes, &mut out).map(|()| out)
    }

    #[test]
    fn fields_are_read_exactly() {
        // Written by hand: tag, then value.
        let bytes = [
            &[0][..],
            &[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
            &[0x12, 0x03, b'a', 0xc3, 0xa9],
            &[0x1a, 0x02, 0x00, 0xff],
            &[0x22, 0x02, 0x01, 0x04],
            &[0x2a, 0x0c, 0x0a, 0x01, b'z', 0x11, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f],
            &[0x2a, 0x0c, 0x0a, 0x01, b'a', 0x11, 0, 0, 0, 0, 0, 0, 0xf8, 0x7f],
            &[0x32, 0x06, 0x0a, 0x02, 0xcf, 0xc7, 0x18, 0x02],
            &[0x3a, 0x04, 0x08, 0x01, 0x10, 0x01],
            &[0x40, 0x01],
            &[0x48, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
            &[0x52, 0x03, 0x0a, 0x01, b'p'],
            &[0x5d, 0xcd, 0xcc, 0xcc, 0x3d],
        ]
        .concat();
        assert_eq!(
            read(&bytes).as_deref(),
            Ok(concat!(
                r#"{"id":9223372036854775807,"note":"aé","raw":"AP8=","points":[-1,2],"rates":{"a":"NaN","z":1.5},"#,
                r#""amount":"-123.45","at":"1970-01-01T00:00:01.000000001Z","kind":"SOME","big":18446744073709551615,"#,
                r#""part":{"name":"p"},"ratio":0.1}"#
            ))
        );
        // What has presence and is not there is missing; what has none has its default.
        assert_eq!(
            read(&[0]).as_deref(),
            Ok(r#"{"id":0,"raw":"","points":[],"rates":{},"kind":"NONE","big":0,"ratio":0.0}"#)
        );
    }

    #[test]
    fn indexes_lead_to_the_message() {
        assert_eq!(read(&[2, 2]).as_deref(), Ok("{}"));
        // Order, Line, Deep: its map entries do not count.
        assert_eq!(read(&[6, 0, 0, 0, 0x08, 1]).as_deref(), Ok(r#"{"yes":true}"#));
        for (bytes, says) in [
            (&[][..], "ends within"),
            (&[2], "ends within"),
            (&[2, 4], "index 2 at level 1"),
            (&[4, 0, 2], "index 1 at level 2"),
            (&[1], "negative"),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], "more than 63 bits"),
            (&[0xfe, 0xff, 0xff, 0xff, 0x0f], "more than 64"),
        ] {
            let said = read(bytes).unwrap_err();
            assert!(said.contains(says), "{bytes:?}: {said}");
        }
    }

    #[test]
    fn what_does_not_fit_the_schema_is_refused() {
        for (bytes, says) in [
            (&[0, 0x78, 1][..], "field number 15"),
            (&[0, 0x52, 2, 0x10, 1], "part: message other.Part holds field number 2"),
            (&[0, 0x12, 0xff, 0xff, 0xff, 0xff, 0x0f], "shop.Order"),
            (&[0, 0x12, 2, 0xff, 0xfe], "shop.Order"),
            (&[0, 0x0d, 1], "damaged"),
        ] {
            let said = read(bytes).unwrap_err();
            assert!(said.contains(says), "{bytes:?}: {said}");
        }
        // Second within Second, deeper than any stack.
        let mut deep = Vec::new();
        for _ in 0..20_000 {
            let mut outer = vec![0x0a];
            let mut length = deep.len();
            while length > 0x7f {
                outer.push((length & 0x7f) as u8 | 0x80);
                length >>= 7;
            }
            outer.push(length as u8);
            outer.extend_from_slice(&deep);
            deep = outer;
        }
        let said = read(&[&[2, 2][..], &deep].concat()).unwrap_err();
        assert!(said.contains("shop.Second"), "{said}");
        assert!(ProtobufSchema::parse(&[], ORDER).unwrap_err().contains("other.proto"));
        assert!(ProtobufSchema::parse(&[], "message {").unwrap_err().contains("no Protobuf schema"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(json) = read(&[&[0][..], &bytes].concat()) {
                prop_assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{}", json);
            }
        }
    }
}
