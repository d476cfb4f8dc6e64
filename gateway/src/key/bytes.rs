//! The bytes of a dedup key. Do not change: every fingerprint ever kept would mean something else.

use crate::naming::json;

/// The longest dedup key, bytes: of one part's JSON text, and of all parts together.
pub const MAX_KEY_BYTES: usize = 65_536;

/// What stands behind a name, so that names of different kinds never meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Kind {
    /// The parts of the key spec.
    Parts = 1,
    /// An `Idempotency-Key`, with the record's place in a body of several.
    Explicit = 2,
    /// Where a tombstone stood, for key specs that need a payload.
    TombstonePosition = 3,
    /// The parts of the key spec, of a tombstone: the event that deletes is not the one that wrote.
    TombstoneParts = 4,
    /// An effect of the library (`Gate::once`).
    Effect = 5,
}

#[repr(u8)]
#[derive(Clone, Copy)]
enum Tag {
    Missing = 0x00,
    Null = 0x01,
    False = 0x02,
    True = 0x03,
    Number = 0x04,
    String = 0x05,
    Array = 0x06,
    Object = 0x07,
    Header = 0x10,
    KafkaKey = 0x11,
    KafkaHeader = 0x12,
    Position = 0x13,
    Content = 0x14,
    Explicit = 0x15,
    Index = 0x16,
    Effect = 0x17,
    Texts = 0x18,
}

/// Writes the parts of one dedup key, each with its type and length, behind what is in the buffer.
#[derive(Debug)]
pub struct KeyBuffer<'b> {
    out: &'b mut Vec<u8>,
}

impl<'b> KeyBuffer<'b> {
    /// Appends to `out`.
    pub fn new(out: &'b mut Vec<u8>) -> Self {
        Self { out }
    }

    /// What every dedup key starts with.
    pub(crate) fn begin(out: &'b mut Vec<u8>, prefix: &[u8], tenant: &str, kind: Kind) -> Self {
        out.clear();
        out.extend_from_slice(prefix);
        out.extend_from_slice(&(tenant.len() as u32).to_be_bytes());
        out.extend_from_slice(tenant.as_bytes());
        out.push(kind as u8);
        Self { out }
    }

    /// A part that the record does not have.
    pub fn missing(&mut self) {
        self.tagged(Tag::Missing, b"");
    }

    /// Null: of JSON, or a Kafka key or header without value.
    pub fn null(&mut self) {
        self.tagged(Tag::Null, b"");
    }

    /// A JSON value, from its text (valid JSON). On an error the buffer holds half a part.
    pub fn json(&mut self, text: &str) -> Result<(), String> {
        self.value(text, json::MAX_DEPTH)
    }

    fn value(&mut self, text: &str, depth: usize) -> Result<(), String> {
        if depth == 0 {
            return Err(format!("values are nested deeper than {} levels; flatten them", json::MAX_DEPTH));
        }
        match text.as_bytes().first() {
            Some(b'"') => {
                let content = json::text(text)?;
                self.tagged(Tag::String, content.as_bytes());
            }
            Some(b'n') => self.null(),
            Some(b't') => self.tagged(Tag::True, b""),
            Some(b'f') => self.tagged(Tag::False, b""),
            Some(b'[') => {
                let elements = json::elements(text)?;
                self.tag(Tag::Array, elements.len());
                for element in elements {
                    self.value(element, depth - 1)?;
                }
            }
            Some(b'{') => {
                let mut members = json::members(text)?;
                members.sort_unstable_by(|a, b| a.0.cmp(&b.0));
                self.tag(Tag::Object, members.len());
                for (name, value) in members {
                    self.tagged(Tag::String, name.as_bytes());
                    self.value(value, depth - 1)?;
                }
            }
            _ => self.tagged(Tag::Number, text.as_bytes()),
        }
        Ok(())
    }

    pub(crate) fn header(&mut self, value: &[u8]) {
        self.tagged(Tag::Header, value);
    }

    pub(crate) fn kafka_key(&mut self, value: &[u8]) {
        self.tagged(Tag::KafkaKey, value);
    }

    pub(crate) fn kafka_header(&mut self, value: &[u8]) {
        self.tagged(Tag::KafkaHeader, value);
    }

    pub(crate) fn position(&mut self, topic: &str, partition: i32, offset: i64) {
        self.tag(Tag::Position, topic.len() + 12);
        self.out.extend_from_slice(&partition.to_be_bytes());
        self.out.extend_from_slice(&offset.to_be_bytes());
        self.out.extend_from_slice(topic.as_bytes());
    }

    /// Several texts as one part.
    pub(crate) fn texts(&mut self, texts: &[Option<&str>]) {
        self.tag(Tag::Texts, texts.len());
        for text in texts {
            match text {
                Some(text) => self.tagged(Tag::String, text.as_bytes()),
                None => self.missing(),
            }
        }
    }

    pub(crate) fn content(&mut self, payload: &[u8]) {
        self.tagged(Tag::Content, payload);
    }

    pub(crate) fn explicit(&mut self, key: &[u8], index: Option<u32>) {
        self.tagged(Tag::Explicit, key);
        if let Some(index) = index {
            self.tagged(Tag::Index, &index.to_be_bytes());
        }
    }

    pub(crate) fn effect(&mut self, name: &str) {
        self.tagged(Tag::Effect, name.as_bytes());
    }

    fn tag(&mut self, tag: Tag, length: usize) {
        self.out.push(tag as u8);
        // Payloads are far below 4 GiB: a chunk addresses its bytes with 32 bits.
        self.out.extend_from_slice(&(length as u32).to_be_bytes());
    }

    fn tagged(&mut self, tag: Tag, bytes: &[u8]) {
        self.tag(tag, bytes.len());
        self.out.extend_from_slice(bytes);
    }
}
