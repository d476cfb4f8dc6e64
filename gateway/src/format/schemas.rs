//! The registered schemas that a route has met: a cache that answers at once. What is not there yet is asked for, and the door waits
//! with the record until it is: naming never waits, and no record is refused because a registry does not answer.

use std::{collections::HashMap, sync::Arc};

use adapters::schema::{Schema, SchemaKind};
use parking_lot::RwLock;
use tokio::sync::mpsc;

use super::{Encoding, avro::AvroSchema};

/// A schema, ready to read with.
#[derive(Debug)]
pub(crate) enum Parsed {
    Avro(AvroSchema),
    #[cfg(feature = "protobuf")]
    Protobuf(super::protobuf::ProtobufSchema),
}

impl Parsed {
    /// Reads what the registry gave, if it is in the route's encoding.
    pub(crate) fn new(schema: &Schema, encoding: Encoding) -> Result<Self, String> {
        let references = schema.references.iter().map(|(_, text)| text.as_str());
        match (schema.kind, encoding) {
            (SchemaKind::Avro, Encoding::Avro) => {
                AvroSchema::parse(references, &schema.text).map(Parsed::Avro)
            }
            #[cfg(feature = "protobuf")]
            (SchemaKind::Protobuf, Encoding::Protobuf) => {
                super::protobuf::ProtobufSchema::parse(&schema.references, &schema.text).map(Parsed::Protobuf)
            }
            (kind, _) => Err(format!(
                "it is a schema in {}, and the route's format is {encoding:?}; set the format to what the topic holds",
                match kind {
                    SchemaKind::Avro => "Avro",
                    SchemaKind::Protobuf => "Protobuf",
                    SchemaKind::Json => "JSON Schema",
                }
            )),
        }
    }

    /// Appends the value that `bytes`, which stand behind the schema's id, hold as JSON text.
    pub(crate) fn read(
        &self,
        bytes: &[u8],
        kept: &dyn Fn(&str) -> bool,
        out: &mut String,
    ) -> Result<(), String> {
        match self {
            Parsed::Avro(schema) => schema.read(bytes, kept, out),
            #[cfg(feature = "protobuf")]
            Parsed::Protobuf(schema) => schema.read(bytes, out),
        }
    }
}

/// What is known of a schema.
#[derive(Clone, Debug)]
pub(crate) enum Look {
    /// It is here.
    Here(Arc<Parsed>),
    /// It was asked for; why it is not here.
    NotYet(String),
    /// There is none that can be read with.
    Never(String),
}

/// Beyond so many unknown ids they are forgotten: only damaged records have them.
const MAX_NEVER: usize = 10_000;

/// The schemas of one route.
#[derive(Debug)]
pub struct Schemas {
    encoding: Encoding,
    known: RwLock<HashMap<u32, Look>>,
    wanted: mpsc::UnboundedSender<u32>,
}

impl Schemas {
    /// None yet. The ids that are asked for come out of the other end.
    pub fn new(encoding: Encoding) -> (Self, mpsc::UnboundedReceiver<u32>) {
        let (wanted, asked) = mpsc::unbounded_channel();
        (Self { encoding, known: RwLock::default(), wanted }, asked)
    }

    /// What is known of schema `id`; asks for it the first time.
    pub(crate) fn look(&self, id: u32) -> Look {
        if let Some(look) = self.known.read().get(&id) {
            return look.clone();
        }
        let mut known = self.known.write();
        if let Some(look) = known.get(&id) {
            return look.clone();
        }
        let look = Look::NotYet(format!("schema {id} is being fetched from the schema registry"));
        known.insert(id, look.clone());
        // Nobody fetches any more only when the route has ended.
        self.wanted.send(id).unwrap_or_default();
        look
    }

    /// The registry has answered.
    pub fn found(&self, id: u32, schema: &Schema) {
        let look = match Parsed::new(schema, self.encoding) {
            Ok(parsed) => Look::Here(Arc::new(parsed)),
            Err(fault) => Look::Never(format!("schema {id} cannot be read with: {fault}")),
        };
        self.known.write().insert(id, look);
    }

    /// The registry has answered that there is none.
    pub fn unknown(&self, id: u32, reason: &str) {
        let mut known = self.known.write();
        if known.values().filter(|look| matches!(look, Look::Never(_))).count() >= MAX_NEVER {
            known.retain(|_, look| !matches!(look, Look::Never(_)));
        }
        let fault = format!("{reason}; the record is damaged, or was written with another registry");
        known.insert(id, Look::Never(fault));
    }

    /// It may be asked for again: a registry learns.
    pub fn forget_unknown(&self, id: u32) {
        let mut known = self.known.write();
        if matches!(known.get(&id), Some(Look::Never(_))) {
            known.remove(&id);
        }
    }

    /// The registry does not answer.
    pub fn trouble(&self, id: u32, reason: &str) {
        self.known.write().insert(id, Look::NotYet(reason.to_owned()));
    }
}

/// Takes the head of Confluent's wire format off: magic byte 0, then the schema's id, 4 bytes, the highest first.
pub(crate) fn head(bytes: &[u8]) -> Result<(u32, &[u8]), String> {
    match bytes {
        [0, a, b, c, d, rest @ ..] => Ok((u32::from_be_bytes([*a, *b, *c, *d]), rest)),
        [0, ..] => Err(format!("it has {} bytes, less than the 5 of the wire format's head; it is damaged", bytes.len())),
        [] => Err("it is empty, and the wire format's head has 5 bytes".to_owned()),
        _ => Err("it does not begin with the wire format's magic byte 0; set the format to what the topic holds, or have the \
                  producer use the schema registry's serializer"
            .to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn avro(text: &str) -> Schema {
        Schema { kind: SchemaKind::Avro, text: text.into(), references: vec![] }
    }

    #[test]
    fn a_schema_is_asked_for_once_and_waited_for_until_the_registry_answers() {
        let (schemas, mut asked) = Schemas::new(Encoding::Avro);
        for _ in 0..3 {
            assert!(matches!(schemas.look(7), Look::NotYet(_)));
        }
        assert_eq!(asked.try_recv(), Ok(7));
        assert!(asked.try_recv().is_err());
        schemas.trouble(7, "connection refused");
        let Look::NotYet(reason) = schemas.look(7) else { panic!() };
        assert_eq!(reason, "connection refused");
        schemas.found(7, &avro("\"long\""));
        let Look::Here(parsed) = schemas.look(7) else { panic!() };
        let mut out = String::new();
        parsed.read(&[2], &|_| false, &mut out).unwrap();
        assert_eq!(out, "1");
        assert!(asked.try_recv().is_err());
    }

    #[test]
    fn an_unknown_id_is_refused_and_may_become_known_later() {
        let (schemas, mut asked) = Schemas::new(Encoding::Avro);
        schemas.look(8);
        schemas.unknown(8, "the schema registry knows no schema 8");
        let Look::Never(reason) = schemas.look(8) else { panic!() };
        assert!(reason.contains("schema 8") && reason.contains("damaged"), "{reason}");
        schemas.forget_unknown(8);
        assert!(matches!(schemas.look(8), Look::NotYet(_)));
        assert_eq!([asked.try_recv(), asked.try_recv()], [Ok(8), Ok(8)]);
        schemas.found(8, &Schema { kind: SchemaKind::Json, ..avro("{}") });
        assert!(matches!(schemas.look(8), Look::Never(reason) if reason.contains("JSON Schema")));
        schemas.found(9, &avro("{"));
        assert!(matches!(schemas.look(9), Look::Never(reason) if reason.contains("not JSON")));
        for id in 0..MAX_NEVER as u32 + 10 {
            schemas.unknown(id, "no");
        }
        assert!(schemas.known.read().len() <= MAX_NEVER);
    }

    #[test]
    fn heads_are_checked() {
        assert_eq!(head(&[0, 0, 0, 1, 2, 9]), Ok((258, &[9][..])));
        assert_eq!(head(&[0, 0xff, 0xff, 0xff, 0xff]), Ok((u32::MAX, &[][..])));
        assert!(head(b"").unwrap_err().contains("empty"));
        assert!(head(&[0, 1, 2]).unwrap_err().contains("3 bytes"));
        assert!(head(b"{\"id\":1}").unwrap_err().contains("magic byte 0"));
    }
}
