//! What names a request, and what tells a copy of it from another one. Pure.

use dedup_store::{Digest, Fingerprint, Hasher};
use http::{HeaderMap, Method, header};

use super::super::{
    head::IDEMPOTENCY_KEY,
    problem::{Kind, Trouble},
};
use crate::{
    key::{IdempotencyKey, KeyBuffer, KeySpec, Kind as Named, MAX_KEY_BYTES, OnMissing, Part, Pointer},
    naming::{DigestOver, json},
};

/// How a route names its requests.
#[derive(Clone, Debug)]
pub struct ForwardNaming {
    /// The key.
    pub key: KeySpec,
    /// What must be alike in two copies, beside method and target.
    pub digest: DigestOver,
    /// Headers that are part of every key: whose key it is.
    pub tenant: Vec<String>,
}

impl ForwardNaming {
    /// Namings with the same id name every request alike.
    pub(super) fn id(&self) -> u64 {
        let mut meaning = self.key.id().to_be_bytes().to_vec();
        let mut add = |text: &str| {
            meaning.extend_from_slice(&(text.len() as u32).to_be_bytes());
            meaning.extend_from_slice(text.as_bytes());
        };
        self.tenant.iter().for_each(|name| add(&name.to_ascii_lowercase()));
        if let DigestOver::Pointers(pointers) = &self.digest {
            // A copy would be told from its first by other members, and pass for another request.
            add("digest");
            pointers.iter().for_each(|pointer| add(&pointer.to_string()));
        }
        if meaning.len() == 8 { self.key.id() } else { xxhash_rust::xxh3::xxh3_64(&meaning) }
    }
}

impl ForwardNaming {
    /// The header fields that are part of a key.
    pub(super) fn reads(&self) -> impl Iterator<Item = &str> {
        let parts = self.key.parts().iter().filter_map(|part| match part {
            Part::Header(name) => Some(&**name),
            _ => None,
        });
        self.tenant.iter().map(|name| &**name).chain(parts)
    }
}

/// A request to be named.
pub(super) struct Asked<'r> {
    pub(super) method: &'r Method,
    /// Path and query behind the route.
    pub(super) target: &'r str,
    pub(super) headers: &'r HeaderMap,
    pub(super) body: &'r [u8],
}

/// Its key and digest.
pub(super) fn name(
    naming: &ForwardNaming,
    hasher: &Hasher,
    asked: &Asked<'_>,
) -> Result<(Fingerprint, Digest), Trouble> {
    let mut key = Vec::new();
    let tenant = tenant(naming, asked.headers)?;
    let explicit = explicit(&naming.key, asked.headers)?;
    let by_parts =
        explicit.is_none() && naming.key.parts().iter().any(|part| matches!(part, Part::Pointer(_)));
    let pointed = by_parts || matches!(naming.digest, DigestOver::Pointers(_));
    let body = if pointed { read(asked)? } else { "" };
    match explicit {
        Some(explicit) => {
            KeyBuffer::begin(&mut key, hasher.prefix(), &tenant, Named::Explicit).explicit(&explicit, None)
        }
        None => {
            let mut buffer = KeyBuffer::begin(&mut key, hasher.prefix(), &tenant, Named::Parts);
            for (at, part) in naming.key.parts().iter().enumerate() {
                append(&mut buffer, &naming.key, at, part, asked, body)?;
            }
        }
    }
    let mut content = Vec::new();
    let mut buffer = KeyBuffer::new(&mut content);
    buffer.header(asked.method.as_str().as_bytes());
    buffer.header(asked.target.as_bytes());
    match &naming.digest {
        DigestOver::Payload => buffer.content(asked.body),
        DigestOver::Pointers(pointers) => {
            for pointer in pointers {
                let bad = |fault| {
                    Trouble::new(
                        Kind::BadRecord,
                        format!("{}, which the digest covers: {fault}", json::at(pointer)),
                    )
                };
                match json::descend(body, pointer.steps()).map_err(bad)? {
                    Some(value) => buffer.json(value).map_err(bad)?,
                    None => buffer.missing(),
                }
            }
        }
    }
    Ok((hasher.fingerprint(&key), hasher.digest(&content)))
}

/// Whose key it is.
fn tenant(naming: &ForwardNaming, headers: &HeaderMap) -> Result<String, Trouble> {
    let mut tenant = String::new();
    for name in &naming.tenant {
        let value = one(headers, name)?.ok_or_else(|| {
            let detail = format!("header {name:?}, which is part of every key, is missing; send it");
            // Not a missing key, which may be let through (`keyless = "pass"`).
            Trouble::new(Kind::KeyInvalid, detail)
        })?;
        // In hexadecimal digits any bytes are text, and a length tells where they end.
        let digits: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        tenant.push_str(&format!("{}:{digits}", digits.len()));
    }
    Ok(tenant)
}

/// The canonical `Idempotency-Key`, if it names the request.
fn explicit(spec: &KeySpec, headers: &HeaderMap) -> Result<Option<Vec<u8>>, Trouble> {
    if spec.explicit() == IdempotencyKey::Ignore {
        return Ok(None);
    }
    match one(headers, IDEMPOTENCY_KEY.as_str())? {
        Some(value) => {
            let key = spec.canonical_idempotency_key(value);
            key.map(|key| Some(key.into_owned())).map_err(|detail| Trouble::new(Kind::KeyInvalid, detail))
        }
        None if spec.explicit() == IdempotencyKey::Require => Err(Trouble::new(
            Kind::KeyMissing,
            "this route asks for an Idempotency-Key header; send one with each request",
        )),
        None => Ok(None),
    }
}

fn one<'h>(headers: &'h HeaderMap, name: &str) -> Result<Option<&'h [u8]>, Trouble> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(_), Some(_)) => Err(Trouble::new(
            Kind::KeyInvalid,
            format!("header {name:?} is sent more than once; send it once"),
        )),
        (value, _) => Ok(value.map(http::HeaderValue::as_bytes)),
    }
}

/// The body as JSON.
fn read<'r>(asked: &Asked<'r>) -> Result<&'r str, Trouble> {
    let coded = |value: &http::HeaderValue| !value.as_bytes().eq_ignore_ascii_case(b"identity");
    if asked.headers.get_all(header::CONTENT_ENCODING).iter().any(coded) {
        let detail = "the route reads its key from the body; send it without Content-Encoding";
        return Err(Trouble::new(Kind::UnsupportedEncoding, detail));
    }
    let bad = |fault: String| {
        Trouble::new(Kind::BadRecord, format!("the route reads its key from the body: {fault}"))
    };
    let text = std::str::from_utf8(asked.body)
        .map_err(|fault| bad(format!("not UTF-8 at byte {}; send JSON as UTF-8", fault.valid_up_to())))?;
    let text = json::whole(text).map_err(bad)?;
    json::check(text, json::MAX_DEPTH).map_err(bad)?;
    Ok(text)
}

/// Appends part number `at` of the key.
fn append(
    buffer: &mut KeyBuffer<'_>,
    spec: &KeySpec,
    at: usize,
    part: &Part,
    asked: &Asked<'_>,
    body: &str,
) -> Result<(), Trouble> {
    let invalid = |fault: String| {
        Trouble::new(Kind::KeyInvalid, format!("part {} of the key, {part}: {fault}", at + 1))
    };
    let bounded = |length: usize| match length > MAX_KEY_BYTES {
        true => Err(invalid(format!(
            "it has {length} bytes, more than {MAX_KEY_BYTES}; name the request by something shorter"
        ))),
        false => Ok(()),
    };
    let found = |pointer: &Pointer| json::descend(body, pointer.steps()).map_err(invalid);
    let missing = match part {
        Part::Pointer(pointer) => match found(pointer)? {
            None => Some("missing"),
            Some("null") => Some("null"),
            Some(value) => {
                bounded(value.len())?;
                buffer.json(value).map_err(invalid)?;
                None
            }
        },
        Part::Header(name) => match one(asked.headers, name)? {
            None => Some("missing"),
            Some(value) => {
                bounded(value.len())?;
                buffer.header(value);
                None
            }
        },
        Part::Content => {
            buffer.content(asked.body);
            None
        }
        // Of records of Kafka: the configuration refuses them here.
        Part::KafkaKey | Part::KafkaHeader(_) | Part::KafkaPosition | Part::Debezium(_) => Some("missing"),
    };
    match (missing, spec.missing()) {
        (None, _) => Ok(()),
        (Some("null"), OnMissing::Allow) => {
            buffer.null();
            Ok(())
        }
        (Some(_), OnMissing::Allow) => {
            buffer.missing();
            Ok(())
        }
        (Some(word), OnMissing::Reject) => Err(Trouble::new(
            Kind::KeyMissing,
            format!("part {} of the key, {part} is {word}; send it, or an Idempotency-Key", at + 1),
        )),
    }
}

#[cfg(test)]
mod tests {
    use dedup_store::{Algorithm, Identity};

    use super::*;

    fn hasher() -> Hasher {
        let algorithm = Algorithm::SipHash24;
        Hasher::new(&Identity { route_id: [1; 16], key_spec_id: 2, algorithm, secret: [3; 192] })
    }

    fn naming(key: KeySpec) -> ForwardNaming {
        ForwardNaming { key, digest: DigestOver::Payload, tenant: Vec::new() }
    }

    fn named(
        naming: &ForwardNaming,
        target: &str,
        headers: &[(&'static str, &str)],
        body: &str,
    ) -> Result<(Fingerprint, Digest), Kind> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        let asked = Asked { method: &Method::POST, target, headers: &map, body: body.as_bytes() };
        name(naming, &hasher(), &asked).map_err(|trouble| trouble.kind)
    }

    #[test]
    fn a09_a13_a17_a_key_is_the_same_however_it_is_written() {
        let naming = naming(KeySpec::idempotency_key());
        let key = |value: &str| named(&naming, "/", &[("idempotency-key", value)], "").map(|named| named.0);
        assert_eq!(key("abc"), key("\"abc\""));
        assert_eq!(key(" \"foo \\\"bar\\\"\" "), key("foo \"bar\""));
        assert_ne!(key("abc"), key("ABC"));
        assert_eq!(key(&"k".repeat(256)), Err(Kind::KeyInvalid));
        assert!(key(&"k".repeat(255)).is_ok());
        assert_eq!(named(&naming, "/", &[], ""), Err(Kind::KeyMissing));
        assert_eq!(
            named(&naming, "/", &[("idempotency-key", "a"), ("idempotency-key", "a")], ""),
            Err(Kind::KeyInvalid)
        );
    }

    #[test]
    fn a_copy_has_the_same_method_target_and_body_and_any_headers() {
        let naming = naming(KeySpec::idempotency_key());
        let key = ("idempotency-key", "k");
        let first = named(&naming, "/a?b=1", &[key], "{}").unwrap();
        assert_eq!(named(&naming, "/a?b=1", &[key, ("traceparent", "x")], "{}").unwrap(), first);
        for (target, body) in [("/a?b=2", "{}"), ("/a", "{}"), ("/a?b=1", "{ }"), ("/a?b=1", "")] {
            let other = named(&naming, target, &[key], body).unwrap();
            assert_eq!(other.0, first.0);
            assert_ne!(other.1, first.1, "{target} {body}");
        }
        let mut map = HeaderMap::new();
        map.insert("idempotency-key", "k".parse().unwrap());
        let put = Asked { method: &Method::PUT, target: "/a?b=1", headers: &map, body: b"{}" };
        assert_ne!(name(&naming, &hasher(), &put).unwrap().1, first.1);
    }

    #[test]
    fn parts_name_a_request_that_brings_no_key() {
        let by_id = naming(KeySpec::pointers(["/id"]).unwrap());
        let key = |body: &str| named(&by_id, "/", &[], body).map(|named| named.0);
        assert_eq!(key(r#"{"id":1,"a":1}"#), key(r#"{ "a":2, "id":1 }"#));
        assert_ne!(key(r#"{"id":1}"#), key(r#"{"id":"1"}"#));
        assert_eq!(key(r#"{"id":null}"#), Err(Kind::KeyMissing));
        assert_eq!(key("{"), Err(Kind::BadRecord));
        assert_eq!(key(r#"{"id":1,"id":2}"#), Err(Kind::BadRecord));
        let coded = [("content-encoding", "gzip")];
        assert_eq!(named(&by_id, "/", &coded, "{}"), Err(Kind::UnsupportedEncoding));
        // A request that is named by its header is not looked into.
        assert!(named(&by_id, "/", &[("idempotency-key", "k")], "\u{1}").is_ok());
    }

    #[test]
    fn a_digest_over_pointers_leaves_out_what_changes() {
        let pointers = DigestOver::Pointers(vec![Pointer::parse("/amount").unwrap()]);
        let naming = ForwardNaming { digest: pointers, ..naming(KeySpec::pointers(["/id"]).unwrap()) };
        let digest = |body: &str| named(&naming, "/", &[], body).unwrap().1;
        assert_eq!(digest(r#"{"id":1,"amount":5,"at":1}"#), digest(r#"{"id":1,"amount":5,"at":2}"#));
        assert_ne!(digest(r#"{"id":1,"amount":5}"#), digest(r#"{"id":1,"amount":6}"#));
        assert_ne!(digest(r#"{"id":1,"amount":null}"#), digest(r#"{"id":1}"#));
    }

    #[test]
    fn n16_a_tenant_keeps_the_keys_of_two_callers_apart() {
        let with_tenant =
            ForwardNaming { tenant: vec!["Authorization".into()], ..naming(KeySpec::idempotency_key()) };
        let key = |who: &str| {
            named(&with_tenant, "/", &[("idempotency-key", "k"), ("authorization", who)], "").unwrap().0
        };
        assert_ne!(key("a"), key("b"));
        assert_eq!(key("a"), key("a"));
        assert_eq!(named(&with_tenant, "/", &[("idempotency-key", "k")], ""), Err(Kind::KeyInvalid));
        assert_ne!(with_tenant.id(), naming(KeySpec::idempotency_key()).id());
        let digest = DigestOver::Pointers(vec![Pointer::parse("/amount").unwrap()]);
        let by_member = ForwardNaming { digest, ..naming(KeySpec::idempotency_key()) };
        assert_ne!(by_member.id(), naming(KeySpec::idempotency_key()).id());
    }
}
