//! What is decided by a request's head, before its body is read: method, token, media type, coding, size, key.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName, HeaderValue, Method, Version, header, request::Parts};

use super::problem::{Kind, Trouble};
use crate::{door::HttpLimits, key::IdempotencyKey, naming::split::Body as Shape};

/// The header's name.
pub(super) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Media types that are taken, as `Accept` of a 415 says them.
pub(super) const ACCEPT: HeaderValue =
    HeaderValue::from_static("application/json, application/x-ndjson, application/jsonl");
/// Content codings that are taken.
pub(super) const ACCEPT_ENCODING: HeaderValue = HeaderValue::from_static("gzip, zstd, identity");

/// How the body is coded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Coding {
    Identity,
    Gzip,
    Zstd,
}

/// How to read the body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    /// `Some(Ndjson)` by content type; otherwise the body's first byte tells an array from an object.
    pub(super) lines: bool,
    pub(super) coding: Coding,
    /// Bytes on the wire, if the client says.
    pub(super) length: Option<u64>,
    /// An `Idempotency-Key` came.
    pub(super) keyed: bool,
}

/// Decides how to read the body, or why not to. In this order: method, token, expectation, media type, coding, key, size.
pub(super) fn plan(head: &Parts, limits: &HttpLimits) -> Result<Plan, Trouble> {
    if head.method != Method::POST {
        return Err(Trouble::new(Kind::MethodNotAllowed, format!("{} is not POST", head.method)));
    }
    authorize(&head.headers, limits)?;
    expectation(head)?;
    let lines = media_type(&head.headers)? == Shape::Ndjson;
    let coding = coding(&head.headers)?;
    let keyed = keyed(&head.headers, limits)?;
    if keyed && lines && !limits.keyed_batches {
        return Err(one_record_per_key());
    }
    let length = content_length(&head.headers)?;
    let limit = if lines { limits.max_stream } else { limits.max_body as u64 };
    match length {
        Some(length) if length > limit => Err(too_large(limit)),
        length => Ok(Plan { lines, coding, length, keyed }),
    }
}

pub(super) fn expectation(head: &Parts) -> Result<(), Trouble> {
    let Some(expect) = head.headers.get(header::EXPECT) else { return Ok(()) };
    let known = expect.as_bytes().eq_ignore_ascii_case(b"100-continue");
    if !known && head.version >= Version::HTTP_11 {
        return Err(Trouble::new(Kind::ExpectationFailed, "only 100-continue can be expected"));
    }
    Ok(())
}

/// An `Idempotency-Key` names one record, unless the route says that it names a request.
pub(super) fn one_record_per_key() -> Trouble {
    Trouble::new(
        Kind::KeyInvalid,
        "an Idempotency-Key names one record, and this request holds several: send them one by one, or without the header",
    )
}

pub(super) fn too_large(limit: u64) -> Trouble {
    Trouble::new(
        Kind::BodyTooLarge,
        format!("the body has more than {limit} bytes; send it in smaller parts"),
    )
}

pub(super) fn authorize(headers: &HeaderMap, limits: &HttpLimits) -> Result<(), Trouble> {
    let Some(bearer) = &limits.bearer else { return Ok(()) };
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let given = match (values.next(), values.next()) {
        (Some(value), None) => value.as_bytes().split_at_checked(7),
        _ => None,
    };
    match given {
        Some((scheme, token))
            if scheme.eq_ignore_ascii_case(b"bearer ") && bearer.admits(token.trim_ascii()) =>
        {
            Ok(())
        }
        Some(_) => Err(Trouble::new(
            Kind::Unauthorized,
            "the Authorization header does not carry this route's token",
        )),
        None => Err(Trouble::new(Kind::Unauthorized, "send one header Authorization: Bearer <token>")),
    }
}

/// Whether an `Idempotency-Key` came, as the route's key spec wants it.
fn keyed(headers: &HeaderMap, limits: &HttpLimits) -> Result<bool, Trouble> {
    let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
    let (value, second) = (values.next(), values.next());
    match (value, limits.key.explicit()) {
        (_, IdempotencyKey::Ignore) | (None, IdempotencyKey::First) => Ok(false),
        (None, IdempotencyKey::Require) => Err(Trouble::new(
            Kind::KeyMissing,
            "this route asks for an Idempotency-Key header; send one with each request",
        )),
        (Some(_), _) if second.is_some() => {
            Err(Trouble::new(Kind::KeyInvalid, "Idempotency-Key came twice; send one"))
        }
        (Some(value), _) => match limits.key.canonical_idempotency_key(value.as_bytes()) {
            Ok(_) => Ok(true),
            Err(detail) => Err(Trouble::new(Kind::KeyInvalid, detail)),
        },
    }
}

/// By content type; without one the body counts as JSON.
fn media_type(headers: &HeaderMap) -> Result<Shape, Trouble> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(Shape::Object) };
    let text = value.to_str().unwrap_or_default();
    // The common case costs one comparison.
    if text == "application/json" {
        return Ok(Shape::Object);
    }
    let mut parts = text.split(';');
    let media = parts.next().unwrap_or_default().trim().to_ascii_lowercase();
    let shape = match media.as_str() {
        "application/json" => Shape::Object,
        "application/x-ndjson"
        | "application/ndjson"
        | "application/jsonl"
        | "application/x-jsonlines"
        | "application/jsonlines" => Shape::Ndjson,
        _ => {
            let detail =
                "send application/json (one object or an array) or application/x-ndjson (one object a line)";
            return Err(Trouble::new(Kind::UnsupportedMediaType, detail));
        }
    };
    let charset = parts
        .filter_map(|part| part.trim().split_once('='))
        .find(|(name, _)| name.eq_ignore_ascii_case("charset"));
    match charset.map(|(_, value)| value.trim_matches('"')) {
        Some(charset) if !charset.eq_ignore_ascii_case("utf-8") && !charset.eq_ignore_ascii_case("utf8") => {
            Err(Trouble::new(Kind::UnsupportedMediaType, "only the charset utf-8 is supported"))
        }
        _ => Ok(shape),
    }
}

fn coding(headers: &HeaderMap) -> Result<Coding, Trouble> {
    let mut coding = Coding::Identity;
    for value in headers.get_all(header::CONTENT_ENCODING) {
        for name in value.to_str().unwrap_or("?").split(',').map(str::trim) {
            let next = match name.to_ascii_lowercase().as_str() {
                "" | "identity" => continue,
                "gzip" | "x-gzip" => Coding::Gzip,
                "zstd" => Coding::Zstd,
                _ => {
                    return Err(Trouble::new(
                        Kind::UnsupportedEncoding,
                        "send gzip, zstd or no Content-Encoding",
                    ));
                }
            };
            if coding != Coding::Identity {
                return Err(Trouble::new(
                    Kind::UnsupportedEncoding,
                    "only one content coding can be undone; send one",
                ));
            }
            coding = next;
        }
    }
    Ok(coding)
}

/// hyper has refused malformed and contradicting lengths before.
pub(super) fn content_length(headers: &HeaderMap) -> Result<Option<u64>, Trouble> {
    let Some(value) = headers.get(header::CONTENT_LENGTH) else { return Ok(None) };
    let parsed = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    parsed
        .map(Some)
        .ok_or_else(|| Trouble::new(Kind::BodyIncomplete, "Content-Length is not a number of bytes"))
}

/// The route of a path `/v1/{route}`.
pub(super) fn route_of(path: &str) -> Option<&str> {
    path.strip_prefix("/v1/")
}

/// The request's key as problems echo it.
pub(super) fn echoed_key(headers: &HeaderMap) -> Option<Cow<'_, str>> {
    headers.get(IDEMPOTENCY_KEY).map(|value| String::from_utf8_lossy(value.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{door::Bearer, key::KeySpec};

    fn limits() -> HttpLimits {
        HttpLimits::new(KeySpec::pointers(["/id"]).unwrap())
    }

    fn decide(headers: &[(&str, &str)], limits: &HttpLimits) -> Result<Plan, Kind> {
        let mut request = http::Request::post("/v1/r");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        plan(&request.body(()).unwrap().into_parts().0, limits).map_err(|trouble| trouble.kind)
    }

    #[test]
    fn content_type_decides_the_shape_and_tolerates_parameters() {
        let limits = limits();
        for (content_type, lines) in [
            ("application/json", Some(false)),
            ("Application/JSON; charset=\"UTF-8\"; x=y", Some(false)),
            ("application/x-ndjson; charset=utf-8", Some(true)),
            ("application/jsonl", Some(true)),
            ("application/json; charset=latin1", None),
            ("text/plain", None),
            ("application/cloudevents+json", None),
            ("", None),
        ] {
            let plan = decide(&[("content-type", content_type)], &limits);
            assert_eq!(plan.map(|plan| plan.lines).ok(), lines, "{content_type}");
        }
        assert_eq!(decide(&[], &limits).map(|plan| plan.lines), Ok(false));
    }

    #[test]
    fn one_coding_is_taken() {
        let limits = limits();
        for (encoding, coding) in [
            ("gzip", Ok(Coding::Gzip)),
            ("X-GZIP", Ok(Coding::Gzip)),
            ("identity, zstd", Ok(Coding::Zstd)),
            ("br", Err(Kind::UnsupportedEncoding)),
            ("gzip, gzip", Err(Kind::UnsupportedEncoding)),
        ] {
            let plan = decide(&[("content-encoding", encoding)], &limits);
            assert_eq!(plan.map(|plan| plan.coding), coding, "{encoding}");
        }
    }

    #[test]
    fn the_token_is_asked_before_anything_else_is_said() {
        let limits = HttpLimits { bearer: Some(Bearer::new("s3cret")), ..limits() };
        let with = |value| decide(&[("authorization", value), ("content-type", "text/plain")], &limits);
        assert_eq!(with("Bearer s3cret"), Err(Kind::UnsupportedMediaType));
        assert_eq!(with("bearer s3cret"), Err(Kind::UnsupportedMediaType));
        for wrong in ["Bearer s3cre", "Bearer s3crets", "Basic s3cret", "", "Bearer", "Bearer "] {
            assert_eq!(with(wrong), Err(Kind::Unauthorized), "{wrong}");
        }
        assert_eq!(decide(&[], &limits), Err(Kind::Unauthorized));
    }

    #[test]
    fn a_key_for_several_records_is_refused_unless_the_route_says_how() {
        let headers = [("content-type", "application/jsonl"), ("idempotency-key", "k")];
        assert_eq!(decide(&headers, &limits()), Err(Kind::KeyInvalid));
        let limits = HttpLimits { keyed_batches: true, ..limits() };
        assert!(decide(&headers, &limits).is_ok_and(|plan| plan.keyed));
    }

    #[test]
    fn the_key_spec_decides_about_the_key_before_the_body() {
        fn key(value: &str) -> [(&str, &str); 1] {
            [("idempotency-key", value)]
        }
        let long = "k".repeat(256);
        assert_eq!(decide(&key(&long), &limits()), Err(Kind::KeyInvalid));
        assert_eq!(
            decide(&[("idempotency-key", "a"), ("idempotency-key", "b")], &limits()),
            Err(Kind::KeyInvalid)
        );
        assert!(decide(&key("bare"), &limits()).is_ok_and(|plan| plan.keyed));
        let strict = HttpLimits::new(KeySpec::idempotency_key().strict(true));
        assert_eq!(decide(&[], &strict), Err(Kind::KeyMissing));
        assert_eq!(decide(&key("bare"), &strict), Err(Kind::KeyInvalid));
        assert!(decide(&key("\"quoted\""), &strict).is_ok_and(|plan| plan.keyed));
        let spec = KeySpec::pointers(["/id"]).unwrap().with_idempotency_key(IdempotencyKey::Ignore).unwrap();
        assert!(decide(&key(&long), &HttpLimits::new(spec)).is_ok_and(|plan| !plan.keyed));
    }
}
