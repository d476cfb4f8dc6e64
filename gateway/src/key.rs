//! What names an event: [`KeySpec`] and the bytes of a dedup key. Pure.
//!
//! A dedup key is hashed as `hasher prefix, tenant, kind, parts`. Every part is a type tag, its length and its bytes, so
//! that no two different lists of parts have the same bytes:
//!
//! | part | bytes after the tag |
//! | --- | --- |
//! | missing, null, false, true | none |
//! | number | its text as it came: `1`, `1.0` and `1e0` are three keys, and no digit is lost |
//! | string | the text after escapes, UTF-8, not normalised |
//! | array, object | their number of elements, then each as a part; members sorted by name, a name twice is refused |
//! | header, Kafka key, Kafka header, payload | the bytes as they came |
//! | position | topic, partition, offset |
//! | change event | source, database, schema, table, operation and position, then the record key |
//!
//! Changing any of this changes every fingerprint: the golden tests below must not be edited.

mod bytes;
mod pointer;

use std::{borrow::Cow, fmt};

use dedup_store::{Fingerprint, Hasher};
use xxhash_rust::xxh3::xxh3_64;

use crate::format::Member;

pub(crate) use self::bytes::Kind;
pub use self::{
    bytes::{KeyBuffer, MAX_KEY_BYTES},
    pointer::{Pointer, PointerError},
};

/// The longest `Idempotency-Key`, bytes.
pub const MAX_IDEMPOTENCY_KEY: usize = 255;

/// The most parts of one key spec.
pub const MAX_PARTS: usize = 16;

/// One source of a dedup key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Part {
    /// A value of the payload.
    Pointer(Pointer),
    /// A header: HTTP by case-insensitive name, Kafka by exact name.
    Header(String),
    /// The Kafka record key, as bytes.
    KafkaKey,
    /// The last Kafka header of that name.
    KafkaHeader(String),
    /// Topic, partition and offset. Offsets of a topic that was deleted and made again name other events: not for those.
    KafkaPosition,
    /// What a change event says of itself.
    Debezium(Member),
    /// The payload itself, byte by byte: events that really are alike are taken for copies.
    Content,
}

impl Part {
    /// It cannot be had of a record without payload.
    pub(crate) fn needs_payload(&self) -> bool {
        matches!(self, Part::Pointer(_) | Part::Debezium(_) | Part::Content)
    }
}

/// As messages name it.
impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Pointer(pointer) if pointer.steps().is_empty() => f.write_str("the payload"),
            Part::Pointer(pointer) => write!(f, "{pointer}"),
            Part::Header(name) => write!(f, "header {name:?}"),
            Part::KafkaKey => f.write_str("the Kafka key"),
            Part::KafkaHeader(name) => write!(f, "Kafka header {name:?}"),
            Part::KafkaPosition => f.write_str("the Kafka position"),
            Part::Debezium(member) => write!(f, "the change's {}", member.word()),
            Part::Content => f.write_str("the payload"),
        }
    }
}

/// What to do with a record that lacks a part, or has null in its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnMissing {
    /// It is rejected.
    #[default]
    Reject,
    /// Missing and null are values like others, and differ.
    Allow,
}

/// What the `Idempotency-Key` header of an HTTP request does. Kafka headers of that name are [`Part::KafkaHeader`]s.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IdempotencyKey {
    /// It names the record before any part does; without it the parts do.
    #[default]
    First,
    /// It names nothing.
    Ignore,
    /// It alone names the record; a request without it is rejected. There are no parts.
    Require,
}

/// How a route names its events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeySpec {
    parts: Vec<Part>,
    on_missing: OnMissing,
    idempotency_key: IdempotencyKey,
    strict: bool,
}

impl KeySpec {
    /// Of one or more parts.
    pub fn new(parts: Vec<Part>) -> Result<Self, KeySpecError> {
        if parts.is_empty() {
            return Err(KeySpecError::NoParts);
        }
        if parts.len() > MAX_PARTS {
            return Err(KeySpecError::TooManyParts(parts.len()));
        }
        if let Some(at) = parts.iter().enumerate().position(|(at, part)| parts[..at].contains(part)) {
            return Err(KeySpecError::Twice(at + 1));
        }
        if parts
            .iter()
            .any(|part| matches!(part, Part::Header(name) | Part::KafkaHeader(name) if name.is_empty()))
        {
            return Err(KeySpecError::NoName);
        }
        Ok(Self {
            parts,
            on_missing: OnMissing::Reject,
            idempotency_key: IdempotencyKey::First,
            strict: false,
        })
    }

    /// Of values of the payload: `KeySpec::pointers(["/user_id", "/kind"])`.
    pub fn pointers<'a>(pointers: impl IntoIterator<Item = &'a str>) -> Result<Self, KeySpecError> {
        Self::new(
            pointers
                .into_iter()
                .map(|text| Ok(Part::Pointer(Pointer::parse(text)?)))
                .collect::<Result<_, PointerError>>()?,
        )
    }

    /// Of the request's `Idempotency-Key` alone.
    pub fn idempotency_key() -> Self {
        let (on_missing, idempotency_key) = (OnMissing::Reject, IdempotencyKey::Require);
        Self { parts: Vec::new(), on_missing, idempotency_key, strict: false }
    }

    /// What to do when a part is missing or null.
    pub fn on_missing(mut self, policy: OnMissing) -> Self {
        self.on_missing = policy;
        self
    }

    /// Whether an `Idempotency-Key` comes before the parts. `Require` drops them.
    pub fn with_idempotency_key(mut self, policy: IdempotencyKey) -> Result<Self, KeySpecError> {
        match policy {
            IdempotencyKey::Require => self.parts.clear(),
            _ if self.parts.is_empty() => return Err(KeySpecError::NoParts),
            _ => {}
        }
        self.idempotency_key = policy;
        Ok(self)
    }

    /// Refuses an `Idempotency-Key` that is not a quoted string (RFC 9651), as the draft demands. Else the bare value counts
    /// too: most clients send that.
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Sources, in order.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The policy for missing parts.
    pub fn missing(&self) -> OnMissing {
        self.on_missing
    }

    /// The policy for `Idempotency-Key`.
    pub fn explicit(&self) -> IdempotencyKey {
        self.idempotency_key
    }

    /// A hash of what the names mean (P1): specs with the same id name every record alike. Policies that only decide which
    /// records are taken are not in it.
    pub fn id(&self) -> u64 {
        let mut meaning = b"oncegate key spec 1".to_vec();
        meaning.push(u8::from(self.idempotency_key != IdempotencyKey::Ignore));
        for part in &self.parts {
            let (tag, name) = match part {
                Part::Pointer(pointer) => (1, pointer.as_str().to_owned()),
                Part::Header(name) => (2, name.to_ascii_lowercase()),
                Part::KafkaKey => (3, String::new()),
                Part::KafkaHeader(name) => (4, name.clone()),
                Part::KafkaPosition => (5, String::new()),
                Part::Content => (6, String::new()),
                Part::Debezium(member) => (7, member.word().to_owned()),
            };
            meaning.push(tag);
            meaning.extend_from_slice(&(name.len() as u32).to_be_bytes());
            meaning.extend_from_slice(name.as_bytes());
        }
        xxh3_64(&meaning)
    }

    /// The canonical `Idempotency-Key`: the content of a quoted string, else the value as it came. Says what is wrong and
    /// what to do, never the value.
    pub(crate) fn canonical_idempotency_key<'v>(&self, value: &'v [u8]) -> Result<Cow<'v, [u8]>, String> {
        let value = value.trim_ascii();
        let key = match unquote(value) {
            Some(content) => Cow::Owned(content),
            None if self.strict => {
                return Err("Idempotency-Key is not a quoted string (RFC 9651); send \"..\" with the quotes"
                    .to_owned());
            }
            None => Cow::Borrowed(value),
        };
        match key.len() {
            0 => Err("Idempotency-Key is empty; send 1 to 255 bytes".to_owned()),
            length if length > MAX_IDEMPOTENCY_KEY => Err(format!(
                "Idempotency-Key has {length} bytes, more than {MAX_IDEMPOTENCY_KEY}; send a shorter one, such as a UUID"
            )),
            _ => Ok(key),
        }
    }
}

/// The content of an RFC 9651 string that is the whole of `value`.
fn unquote(value: &[u8]) -> Option<Vec<u8>> {
    let inner = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let mut content = Vec::with_capacity(inner.len());
    let mut bytes = inner.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => content.push(*bytes.next().filter(|escaped| matches!(escaped, b'"' | b'\\'))?),
            0x20..=0x21 | 0x23..=0x7e => content.push(*byte),
            _ => return None,
        }
    }
    Some(content)
}

/// A key spec that names nothing, or twice the same.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KeySpecError {
    /// Neither parts nor a required `Idempotency-Key`.
    #[error("a key needs at least one part; name one, or require the Idempotency-Key header")]
    NoParts,
    /// Above [`MAX_PARTS`].
    #[error("a key has {0} parts, more than {MAX_PARTS}; name fewer")]
    TooManyParts(usize),
    /// The part of that number (from 1) is there before.
    #[error("part {0} of the key is there already; name each once")]
    Twice(usize),
    /// A header without name.
    #[error("a header of the key has an empty name; name it")]
    NoName,
    /// See there.
    #[error(transparent)]
    Pointer(#[from] PointerError),
}

/// Names an effect of the library (`Gate::once`): it never meets the name of a record.
pub fn effect_fingerprint(hasher: &Hasher, tenant: &str, name: &str) -> Fingerprint {
    let mut key = Vec::new();
    KeyBuffer::begin(&mut key, hasher.prefix(), tenant, Kind::Effect).effect(name);
    hasher.fingerprint(&key)
}

/// A fingerprint as the door shows it, and back: 32 hex digits.
pub fn parse_fingerprint(text: &str) -> Option<Fingerprint> {
    if text.len() != 32 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    Some(Fingerprint(u128::from_str_radix(text, 16).ok()?.to_be_bytes()))
}

#[cfg(test)]
mod tests;
