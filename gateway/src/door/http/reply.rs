//! Responses: receipts, outcome lists, problems. Bytes are written by hand where a request's speed hangs on it.

use std::borrow::Cow;

use bytes::Bytes;
use dedup_store::Fingerprint;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Serialize;

use super::{
    head::{ACCEPT, ACCEPT_ENCODING, IDEMPOTENCY_KEY},
    problem::{Kind, Trouble, Verdict},
};
use crate::outcome::{Answer, Outcome, Problem};

/// What a response is.
pub(super) type Reply = Response<Full<Bytes>>;

/// Absolute, as RFC 9457 recommends, in a domain that nobody can own.
pub const PROBLEM_BASE: &str = "https://oncegate.example/problems/";

const OUTCOME: HeaderName = HeaderName::from_static("oncegate-outcome");
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

/// What a problem body says of the request besides the problem.
#[derive(Clone, Copy, Default)]
pub(super) struct About<'a> {
    pub(super) route: Option<&'a str>,
    pub(super) request: Option<&'a HeaderMap>,
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) outcome: Option<Outcome>,
    pub(super) retry_after_ms: u64,
}

#[derive(Serialize)]
struct ProblemBody<'a> {
    #[serde(rename = "type")]
    uri: String,
    title: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    idempotency_key: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
}

/// The body of a problem; inside an entry of an outcome list it has no status.
pub(super) fn problem_body(trouble: &Trouble, about: About<'_>, whole: bool) -> Vec<u8> {
    let (status, slug, title) = trouble.kind.parts();
    let body = ProblemBody {
        uri: format!("{PROBLEM_BASE}{slug}"),
        title,
        status: whole.then_some(status.as_u16()),
        detail: &trouble.detail,
        route: about.route,
        key: about.fingerprint.map(|fingerprint| fingerprint.to_string()),
        outcome: about.outcome.map(Outcome::word),
        idempotency_key: about.request.and_then(super::head::echoed_key),
        state: trouble.kind.state(),
        retry_after_ms: trouble.kind.retry().then_some(about.retry_after_ms),
    };
    serde_json::to_vec(&body).unwrap_or_default()
}

/// A problem as the whole answer.
pub(super) fn problem(trouble: &Trouble, about: About<'_>) -> Reply {
    let body = problem_body(trouble, about, true);
    problem_with(trouble.kind, body, about)
}

/// Headers of a problem around `body`.
fn problem_with(kind: Kind, body: Vec<u8>, about: About<'_>) -> Reply {
    let mut reply = Response::new(Full::from(body));
    *reply.status_mut() = kind.status();
    let headers = reply.headers_mut();
    headers.insert(header::CONTENT_TYPE, PROBLEM_JSON);
    headers.insert(header::CONTENT_LANGUAGE, HeaderValue::from_static("en"));
    match kind {
        Kind::Unauthorized => {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"oncegate\""));
        }
        Kind::MethodNotAllowed => {
            headers.insert(header::ALLOW, HeaderValue::from_static("POST"));
        }
        Kind::UnsupportedMediaType => {
            headers.insert(header::ACCEPT, ACCEPT);
        }
        Kind::UnsupportedEncoding => {
            headers.insert(header::ACCEPT_ENCODING, ACCEPT_ENCODING);
        }
        kind if kind.retry() => {
            let seconds = about.retry_after_ms.div_ceil(1000).max(1);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        _ => {}
    }
    if let Some(outcome) = about.outcome {
        headers.insert(OUTCOME, HeaderValue::from_static(outcome.word()));
    }
    echo_key(headers, about.request);
    reply
}

/// The answer to a request of one record.
pub(super) fn one(route: &str, answer: &Answer, request: &HeaderMap, retry_after_ms: u64) -> Reply {
    match Verdict::of(answer) {
        Verdict::Receipt { status, first, replayed } => {
            let mut body = Vec::with_capacity(96 + route.len());
            body.extend_from_slice(b"{\"route\":");
            push_string(&mut body, route);
            if let Some(fingerprint) = answer.fingerprint {
                body.extend_from_slice(b",\"key\":\"");
                push_hex(&mut body, &fingerprint.0);
                body.push(b'"');
            }
            body.extend_from_slice(b",\"outcome\":\"");
            body.extend_from_slice(first.word().as_bytes());
            body.extend_from_slice(b"\"}");
            let mut reply = Response::new(Full::from(body));
            *reply.status_mut() = status;
            let headers = reply.headers_mut();
            headers.insert(header::CONTENT_TYPE, JSON);
            headers.insert(OUTCOME, HeaderValue::from_static(answer.outcome.word()));
            if replayed {
                headers.insert(REPLAYED, HeaderValue::from_static("true"));
            }
            echo_key(headers, Some(request));
            reply
        }
        Verdict::Trouble(trouble) => {
            let mut reply = problem(
                &trouble,
                About {
                    route: Some(route),
                    request: Some(request),
                    fingerprint: answer.fingerprint,
                    outcome: Some(answer.outcome),
                    retry_after_ms,
                },
            );
            if answer.outcome == Outcome::Duplicate {
                reply.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
            }
            reply
        }
    }
}

fn echo_key(headers: &mut HeaderMap, request: Option<&HeaderMap>) {
    if let Some(key) = request.and_then(|request| request.get(IDEMPOTENCY_KEY)) {
        headers.insert(IDEMPOTENCY_KEY, key.clone());
    }
}

/// The outcomes of a request of several records, as they come in.
#[derive(Debug)]
pub(super) struct Outcomes {
    /// `{"index":0,..},{..}`.
    list: Vec<u8>,
    counts: [u64; Outcome::ALL.len()],
    next: u64,
    /// Every record took effect, or is a copy of one that did.
    all_well: bool,
}

impl Outcomes {
    pub(super) fn new() -> Self {
        Self { list: Vec::new(), counts: [0; Outcome::ALL.len()], next: 0, all_well: true }
    }

    /// Adds one chunk's answers; of `expected` records the ones without an answer are unknown (rule 5).
    pub(super) fn add(&mut self, answers: &[Answer], expected: usize) {
        for answer in answers.iter().take(expected) {
            self.push(answer);
        }
        for _ in answers.len()..expected {
            self.push(&Answer {
                outcome: Outcome::Unknown,
                fingerprint: None,
                first: None,
                problem: Some(Problem::OutcomeUnknown),
            });
        }
    }

    fn push(&mut self, answer: &Answer) {
        let list = &mut self.list;
        if self.next > 0 {
            list.push(b',');
        }
        list.extend_from_slice(b"{\"index\":");
        push_decimal(list, self.next);
        list.extend_from_slice(b",\"outcome\":\"");
        list.extend_from_slice(answer.outcome.word().as_bytes());
        list.push(b'"');
        if let Some(fingerprint) = answer.fingerprint {
            list.extend_from_slice(b",\"key\":\"");
            push_hex(list, &fingerprint.0);
            list.push(b'"');
        }
        match Verdict::of(answer) {
            Verdict::Receipt { first, .. } => {
                self.all_well &= matches!(first, Outcome::Written | Outcome::Updated);
            }
            Verdict::Trouble(trouble) => {
                self.all_well = false;
                // The members of the problem follow those of the entry in one object.
                let body = problem_body(&trouble, About::default(), false);
                list.push(b',');
                list.extend_from_slice(&body[1..body.len() - 1]);
            }
        }
        list.push(b'}');
        self.counts[answer.outcome as usize] += 1;
        self.next += 1;
    }

    /// The answer once all records have their outcome: 200, or 207 if one was not written, updated or a duplicate.
    pub(super) fn into_reply(self, about: About<'_>) -> Reply {
        let status = if self.all_well { StatusCode::OK } else { StatusCode::MULTI_STATUS };
        let mut body = Vec::with_capacity(self.list.len() + 160);
        body.push(b'{');
        self.members(&mut body);
        body.push(b'}');
        let mut reply = Response::new(Full::from(body));
        *reply.status_mut() = status;
        reply.headers_mut().insert(header::CONTENT_TYPE, JSON);
        echo_key(reply.headers_mut(), about.request);
        reply
    }

    /// The answer when the body broke off after some records were submitted: the problem, and what became of those.
    pub(super) fn into_problem(self, trouble: &Trouble, about: About<'_>) -> Reply {
        let mut body = problem_body(trouble, about, true);
        body.pop();
        body.extend_from_slice(b",\"not_submitted_from\":");
        push_decimal(&mut body, self.next);
        body.push(b',');
        self.members(&mut body);
        body.push(b'}');
        problem_with(trouble.kind, body, about)
    }

    fn members(&self, body: &mut Vec<u8>) {
        body.extend_from_slice(b"\"outcomes\":[");
        body.extend_from_slice(&self.list);
        body.extend_from_slice(b"],\"counts\":{");
        let mut first = true;
        for (outcome, count) in Outcome::ALL.iter().zip(self.counts).filter(|(_, count)| *count > 0) {
            if !std::mem::take(&mut first) {
                body.push(b',');
            }
            push_string(body, outcome.word());
            body.push(b':');
            push_decimal(body, count);
        }
        body.push(b'}');
    }
}

fn push_decimal(out: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

fn push_hex(out: &mut Vec<u8>, bytes: &[u8; 16]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = [0; 32];
    for (pair, byte) in text.chunks_exact_mut(2).zip(bytes) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
    out.extend_from_slice(&text);
}

fn push_string(out: &mut Vec<u8>, text: &str) {
    let plain = text.bytes().all(|byte| (0x20..0x7f).contains(&byte) && byte != b'"' && byte != b'\\');
    if plain {
        out.push(b'"');
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
    } else {
        out.extend_from_slice(&serde_json::to_vec(text).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use dedup_store::Settled;
    use http_body_util::BodyExt as _;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn body(reply: Reply) -> Value {
        let bytes = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(reply.into_body().collect())
            .unwrap()
            .to_bytes();
        serde_json::from_slice(&bytes).unwrap()
    }

    fn answer(outcome: Outcome, first: Option<Settled>, problem: Option<Problem>) -> Answer {
        Answer { outcome, fingerprint: Some(Fingerprint([0xa0; 16])), first, problem }
    }

    #[test]
    fn a_receipt_is_a_function_of_route_key_and_first_outcome() {
        let headers = HeaderMap::new();
        let first = one("orders", &answer(Outcome::Written, None, None), &headers, 0);
        let copy = one("orders", &answer(Outcome::Duplicate, Some(Settled::Written), None), &headers, 0);
        assert_eq!((first.status(), copy.status()), (StatusCode::CREATED, StatusCode::CREATED));
        assert_eq!(first.headers()["oncegate-outcome"], "written");
        assert_eq!(copy.headers()["oncegate-outcome"], "duplicate");
        assert!(!first.headers().contains_key("idempotent-replayed"));
        assert_eq!(copy.headers()["idempotent-replayed"], "true");
        let (first, copy) = (body(first), body(copy));
        assert_eq!(first, json!({"route": "orders", "key": "a0".repeat(16), "outcome": "written"}));
        assert_eq!(first, copy);
    }

    #[test]
    fn outcomes_are_listed_by_index_and_counted() {
        let mut outcomes = Outcomes::new();
        outcomes.add(
            &[answer(Outcome::Written, None, None), answer(Outcome::Duplicate, Some(Settled::Written), None)],
            2,
        );
        let reply = outcomes.into_reply(About::default());
        assert_eq!(reply.status(), StatusCode::OK);
        let key = "a0".repeat(16);
        assert_eq!(
            body(reply),
            json!({"outcomes": [{"index": 0, "outcome": "written", "key": key}, {"index": 1, "outcome": "duplicate", "key": key}],
                   "counts": {"written": 1, "duplicate": 1}})
        );
    }

    #[test]
    fn a_record_without_effect_makes_it_207_and_carries_its_problem() {
        let mut outcomes = Outcomes::new();
        outcomes.add(&[answer(Outcome::Rejected, None, Some(Problem::BadRecord("at /id: \"x\"".into())))], 2);
        let reply = outcomes.into_reply(About::default());
        assert_eq!(reply.status(), StatusCode::MULTI_STATUS);
        let body = body(reply);
        assert_eq!(body["outcomes"][0]["type"], format!("{PROBLEM_BASE}bad-record"));
        assert_eq!(body["outcomes"][0]["detail"], "at /id: \"x\"");
        assert_eq!(body["outcomes"][1]["outcome"], "unknown", "rule 5: silence is not success");
        assert_eq!(body["counts"], json!({"rejected": 1, "unknown": 1}));
    }

    #[test]
    fn a_broken_body_tells_what_was_submitted_and_where_it_stopped() {
        let mut outcomes = Outcomes::new();
        outcomes.add(&[answer(Outcome::Written, None, None)], 1);
        let trouble = Trouble::new(Kind::BodyIncomplete, "gone");
        let body = body(outcomes.into_problem(&trouble, About { route: Some("r"), ..About::default() }));
        assert_eq!(body["status"], 400);
        assert_eq!(body["not_submitted_from"], 1);
        assert_eq!(body["outcomes"][0]["outcome"], "written");
    }

    proptest! {
        #[test]
        fn numbers_and_strings_are_written_as_serde_does(number: u64, text: String) {
            let mut out = Vec::new();
            push_decimal(&mut out, number);
            prop_assert_eq!(String::from_utf8(out).unwrap(), number.to_string());
            let mut out = Vec::new();
            push_string(&mut out, &text);
            prop_assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        }
    }
}
