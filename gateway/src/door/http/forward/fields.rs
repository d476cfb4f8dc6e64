//! Header fields on their way through: what is of one connection only stays behind. Pure.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Version, header};

use super::{
    super::{
        head::IDEMPOTENCY_KEY,
        problem::{Kind, Trouble},
    },
    name::ForwardNaming,
};

pub(super) const FORWARDED: HeaderName = HeaderName::from_static("forwarded");
pub(super) const OUTCOME: HeaderName = HeaderName::from_static("oncegate-outcome");
pub(super) const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Of one connection (RFC 9110, 7.6.1), and of a proxy's own sign-on.
const OF_ONE_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Said of one answer, not of what it says: a copy gets its own, or none.
const OF_ONE_ANSWER: [&str; 6] =
    ["date", "set-cookie", "set-cookie2", "traceparent", "tracestate", "x-request-id"];

/// Takes out what is of one connection: the fields that are always, and those that `Connection` names.
pub(super) fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    let stays = |name: &str| OF_ONE_HOP.contains(&name) || named.iter().any(|other| other == name);
    let mut kept = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers.iter().filter(|(name, _)| !stays(name.as_str())) {
        kept.append(name, value.clone());
    }
    kept
}

/// By these and by what its key is made of the service and the gateway know a request.
const READ_BY_ALL: [&str; 4] = ["idempotency-key", "content-type", "content-encoding", "authorization"];

/// Refuses what would reach the service as something else: a body under a transfer coding that nobody undoes, and a `Connection` that takes
/// out what the request is known by.
pub(super) fn framing(headers: &HeaderMap, naming: &ForwardNaming) -> Result<(), Trouble> {
    let bad = |detail: String| Err(Trouble::new(Kind::BadRequest, detail));
    for coding in headers.get_all(header::TRANSFER_ENCODING) {
        if !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
            return bad(
                "a transfer coding other than `chunked` does not go through; send the body chunked only, and say its coding in \
                 Content-Encoding"
                    .into(),
            );
        }
    }
    for value in headers.get_all(header::CONNECTION) {
        let Ok(text) = value.to_str() else {
            return bad("Connection holds other characters than those of field names; correct it".into());
        };
        for name in text.split(',').map(str::trim) {
            let mut known_by = READ_BY_ALL.into_iter().chain(naming.reads());
            if known_by.any(|field| name.eq_ignore_ascii_case(field)) {
                return bad(format!(
                    "Connection names {name:?}, by which the service and this gateway know the request; leave it out there"
                ));
            }
        }
    }
    Ok(())
}

/// What is known of the caller's connection.
#[derive(Clone, Copy)]
pub(super) struct Caller {
    pub(super) version: Version,
    pub(super) peer: Option<SocketAddr>,
    /// Its token was for the gateway.
    pub(super) signed_on: bool,
}

/// The fields that go to the service. `key` is its `Idempotency-Key`; empty: none.
pub(super) fn to_service(headers: &HeaderMap, caller: Caller, key: &[u8]) -> HeaderMap {
    let mut out = end_to_end(headers);
    for name in [header::HOST, header::CONTENT_LENGTH, header::EXPECT, IDEMPOTENCY_KEY] {
        out.remove(name);
    }
    if caller.signed_on {
        out.remove(header::AUTHORIZATION);
    }
    if let Some(key) = HeaderValue::from_bytes(key).ok().filter(|key| !key.is_empty()) {
        out.insert(IDEMPOTENCY_KEY, key);
    }
    let version = if caller.version == Version::HTTP_10 { "1.0 oncegate" } else { "1.1 oncegate" };
    out.append(header::VIA, HeaderValue::from_static(version));
    let mut forwarded = match caller.peer {
        Some(SocketAddr::V4(peer)) => format!("for={};", peer.ip()),
        Some(SocketAddr::V6(peer)) => format!("for=\"[{}]\";", peer.ip()),
        None => String::new(),
    };
    // A host is a token, or is quoted; one with other characters is left out.
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    if let Some(host) =
        host.filter(|host| host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte)))
    {
        forwarded.push_str(&format!("host=\"{host}\";"));
    }
    forwarded.push_str("proto=http");
    if let Ok(forwarded) = HeaderValue::from_str(&forwarded) {
        out.append(FORWARDED, forwarded);
    }
    out
}

/// The fields of the first answer: framing is the gateway's own.
pub(super) fn to_caller(headers: &HeaderMap) -> HeaderMap {
    let mut out = end_to_end(headers);
    for name in [header::CONTENT_LENGTH, OUTCOME, REPLAYED] {
        out.remove(name);
    }
    out
}

/// The fields that copies get.
pub(super) fn to_keep(headers: &HeaderMap) -> Vec<(String, Bytes)> {
    to_caller(headers)
        .iter()
        .filter(|(name, _)| !OF_ONE_ANSWER.contains(&name.as_str()))
        .map(|(name, value)| (name.as_str().to_owned(), Bytes::copy_from_slice(value.as_bytes())))
        .collect()
}

/// What was kept, as fields again.
pub(super) fn kept(head: &[(String, Bytes)]) -> HeaderMap {
    let mut out = HeaderMap::with_capacity(head.len());
    for (name, value) in head {
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(value))
        {
            out.append(name, value);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    fn shown(map: &HeaderMap) -> Vec<String> {
        let mut shown: Vec<String> =
            map.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        shown.sort();
        shown
    }

    const CALLER: Caller = Caller { version: Version::HTTP_11, peer: None, signed_on: false };

    /// `Transfer-Encoding: gzip, chunked` came to the service as plain bytes that were none; `Connection: x-account` took the account out
    /// that the key was made of.
    #[test]
    fn what_would_reach_the_service_as_something_else_is_refused() {
        let naming = ForwardNaming {
            key: crate::key::KeySpec::pointers(["/id"]).unwrap(),
            digest: crate::naming::DigestOver::Payload,
            tenant: vec!["x-account".into()],
        };
        for (name, value, fits) in [
            ("transfer-encoding", "chunked", true),
            ("transfer-encoding", "Chunked", true),
            ("transfer-encoding", "gzip, chunked", false),
            ("transfer-encoding", "gzip", false),
            ("connection", "close", true),
            ("connection", "keep-alive, x-private", true),
            ("connection", "close, X-Account", false),
            ("connection", "idempotency-key", false),
            ("connection", "Content-Type", false),
        ] {
            assert_eq!(framing(&fields(&[(name, value)]), &naming).is_ok(), fits, "{name}: {value}");
        }
        let mut obscure = HeaderMap::new();
        obscure.insert(header::CONNECTION, HeaderValue::from_bytes(b"x-\xe4").unwrap());
        assert!(framing(&obscure, &naming).is_err());
    }

    #[test]
    fn x17_fields_of_one_connection_stay_behind() {
        let headers = fields(&[
            ("connection", "close, X-Foo"),
            ("connection", "x-bar"),
            ("x-foo", "1"),
            ("x-bar", "1"),
            ("x-baz", "1"),
            ("x-baz", "2"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("te", "trailers"),
            ("trailer", "x"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("proxy-authorization", "Basic x"),
        ]);
        assert_eq!(shown(&end_to_end(&headers)), ["x-baz: 1", "x-baz: 2"]);
    }

    #[test]
    fn the_service_sees_its_own_host_the_key_and_who_came_before() {
        let headers = fields(&[
            ("host", "gate:8080"),
            ("content-length", "5"),
            ("expect", "100-continue"),
            ("idempotency-key", "abc"),
            ("authorization", "Bearer x"),
            ("via", "1.1 front"),
            ("forwarded", "for=10.0.0.1"),
        ]);
        let caller = Caller { peer: Some(([127, 0, 0, 1], 5).into()), ..CALLER };
        assert_eq!(
            shown(&to_service(&headers, caller, b"\"k\"")),
            [
                "authorization: Bearer x",
                "forwarded: for=10.0.0.1",
                "forwarded: for=127.0.0.1;host=\"gate:8080\";proto=http",
                "idempotency-key: \"k\"",
                "via: 1.1 front",
                "via: 1.1 oncegate",
            ]
        );
        let caller =
            Caller { version: Version::HTTP_10, peer: Some("[::1]:5".parse().unwrap()), signed_on: true };
        let odd = fields(&[("host", "a\"b"), ("authorization", "Bearer x")]);
        assert_eq!(
            shown(&to_service(&odd, caller, b"")),
            ["forwarded: for=\"[::1]\";proto=http", "via: 1.0 oncegate"]
        );
    }

    #[test]
    fn b01_b03_b05_b13_copies_get_what_the_answer_says_and_nothing_of_the_one_exchange() {
        let headers = fields(&[
            ("location", "/a"),
            ("etag", "\"1\""),
            ("link", "<a>"),
            ("link", "<b>"),
            ("content-type", "text/plain"),
            ("content-encoding", "gzip"),
            ("content-length", "5"),
            ("transfer-encoding", "chunked"),
            ("connection", "x-hop"),
            ("x-hop", "1"),
            ("date", "now"),
            ("set-cookie", "a=b"),
            ("traceparent", "00-.."),
            ("x-request-id", "1"),
            ("idempotent-replayed", "true"),
        ]);
        let copy = kept(&to_keep(&headers));
        assert_eq!(
            shown(&copy),
            [
                "content-encoding: gzip",
                "content-type: text/plain",
                "etag: \"1\"",
                "link: <a>",
                "link: <b>",
                "location: /a"
            ]
        );
        let first = to_caller(&headers);
        assert!(first.contains_key("set-cookie") && first.contains_key("date"));
        assert!(!first.contains_key("content-length") && !first.contains_key(REPLAYED));
    }
}
