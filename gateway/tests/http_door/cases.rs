//! The table of cases, named by their ids in the conformance list (A: idempotency, B: replays, X: framing) or, where the list has
//! none, by what they prove.

use std::io::Write as _;

use oncegate::door::{Bearer, HttpLimits};
use oncegate::key::KeySpec;
use serde_json::{Value, json};

use crate::wire::{piece, post, request};

/// What a client does, and what it must see.
pub enum Step {
    Send(Vec<u8>),
    /// Closes the client's side.
    End,
    /// Drops the connection and opens another.
    Again,
    Get(Want),
    /// The server closes without a further byte.
    Closed,
    /// Nothing comes for a while.
    Silent,
    WaitMs(u64),
    /// The sink goes away, or comes back.
    Away(bool),
    Drain,
}

/// A response.
#[derive(Default)]
pub struct Want {
    pub status: u16,
    /// `*`: any value.
    pub headers: Vec<(&'static str, &'static str)>,
    pub absent: Vec<&'static str>,
    pub json: Vec<(&'static str, Value)>,
}

impl Want {
    fn header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.push((name, value));
        self
    }

    fn absent(mut self, name: &'static str) -> Self {
        self.absent.push(name);
        self
    }

    fn json(mut self, pointer: &'static str, value: impl Into<Value>) -> Self {
        self.json.push((pointer, value.into()));
        self
    }
}

pub struct Case {
    pub id: &'static str,
    pub limits: fn(&mut HttpLimits),
    pub steps: Vec<Step>,
    /// Rows that the sink holds at the end.
    pub rows: usize,
}

fn case(id: &'static str, rows: usize, steps: Vec<Step>) -> Case {
    Case { id, limits: |_| {}, steps, rows }
}

impl Case {
    fn limits(mut self, limits: fn(&mut HttpLimits)) -> Self {
        self.limits = limits;
        self
    }
}

fn status(status: u16) -> Want {
    Want { status, ..Want::default() }
}

/// A first write.
fn written() -> Want {
    status(201)
        .header("oncegate-outcome", "written")
        .absent("idempotent-replayed")
        .json("/outcome", "written")
}

/// A copy of it.
fn replayed() -> Want {
    status(201)
        .header("oncegate-outcome", "duplicate")
        .header("idempotent-replayed", "true")
        .json("/outcome", "written")
}

fn problem(code: u16, slug: &'static str) -> Want {
    status(code)
        .header("content-type", "application/problem+json")
        .json("/type", format!("{}{slug}", oncegate::door::http::PROBLEM_BASE))
}

fn retry(code: u16, slug: &'static str) -> Want {
    problem(code, slug).header("retry-after", "1").json("/retry_after_ms", 1000)
}

fn keyed(key: &'static str) -> Vec<u8> {
    post(&[("idempotency-key", key)], r#"{"pad":"x"}"#)
}

fn strict(limits: &mut HttpLimits) {
    limits.key = KeySpec::idempotency_key().strict(true);
}

fn required(limits: &mut HttpLimits) {
    limits.key = KeySpec::idempotency_key();
}

fn bearer(limits: &mut HttpLimits) {
    limits.bearer = Some(Bearer::new("t0ken"));
}

fn small(limits: &mut HttpLimits) {
    limits.max_body = 1_000;
    limits.max_stream = 4_000;
    limits.max_record = 500;
    limits.max_records = 20;
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

fn chunked(pieces: &[&str]) -> Vec<u8> {
    let mut out = post(&[("transfer-encoding", "chunked")], "");
    for bytes in pieces {
        out.extend(piece(bytes));
    }
    out.extend_from_slice(b"0\r\n\r\n");
    out
}

/// All cases.
pub fn cases() -> Vec<Case> {
    use Step::{Again, Away, Closed, Drain, End, Get, Send, Silent, WaitMs};
    let id1 = r#"{"id":"1"}"#;
    let draft_key = r#""8e03978e-40d5-43e8-bc93-6894a57f9324""#;
    let k255: &str = "k".repeat(255).leak();
    let k256: &str = "k".repeat(256).leak();
    let lines = |count: usize| -> String { (0..count).map(|id| format!("{{\"id\":{id}}}\n")).collect() };
    vec![
        // Idempotency
        case("A01", 1, vec![Send(keyed(draft_key)), Get(written().header("idempotency-key", draft_key))])
            .limits(required),
        case(
            "A03",
            1,
            vec![
                Send(keyed("\"k\"")),
                Get(written()),
                Send(post(&[("idempotency-key", "\"k\"")], r#"{"pad":"y"}"#)),
                Get(problem(422, "key-mismatch")
                    .header("oncegate-outcome", "mismatch")
                    .json("/state", "completed")
                    .json("/idempotency_key", "\"k\"")),
            ],
        )
        .limits(required),
        case(
            "A05",
            1,
            vec![Send(keyed(draft_key)), Get(written()), Again, Send(keyed(draft_key)), Get(replayed())],
        )
        .limits(required),
        case(
            "key-missing",
            0,
            vec![
                Send(post(&[], id1)),
                Get(problem(400, "key-missing")),
                Send(post(&[], "{}")),
                Get(problem(400, "key-missing")),
            ],
        )
        .limits(required),
        case("A09", 1, vec![Send(keyed("abc")), Get(written()), Send(keyed("\"abc\"")), Get(replayed())])
            .limits(required),
        case("A11", 0, vec![Send(keyed("\"foo")), Get(problem(400, "key-invalid"))]).limits(strict),
        case(
            "A13",
            1,
            vec![
                Send(keyed(r#""foo \"bar\"""#)),
                Get(written()),
                Send(keyed(r#"foo "bar""#)),
                Get(replayed()),
            ],
        )
        .limits(required),
        case("A15", 0, vec![Send(keyed("\"foo \\")), Get(problem(400, "key-invalid"))]).limits(strict),
        case(
            "A17",
            1,
            vec![Send(keyed("   \"foo\"  ")), Get(written()), Send(keyed("foo")), Get(replayed())],
        )
        .limits(required),
        case(
            "A19",
            1,
            vec![Send(keyed(k255)), Get(written()), Send(keyed(k256)), Get(problem(400, "key-invalid"))],
        )
        .limits(required),
        case(
            "A21",
            3,
            vec![
                Send(keyed("a%0d%0aSET x")),
                Get(written()),
                Send(keyed("orders:*")),
                Get(written()),
                Send(keyed("../others")),
                Get(written()),
                Send(keyed("a%0d%0aSET x")),
                Get(replayed()),
            ],
        )
        .limits(required),
        case(
            "A23",
            2,
            vec![
                Send(keyed("k")),
                Get(written().json("/route", "orders")),
                Send(request("POST /v1/others HTTP/1.1", &[("idempotency-key", "k")], r#"{"pad":"x"}"#)),
                Get(written().json("/route", "others")),
            ],
        )
        .limits(required),
        case(
            "A25",
            0,
            vec![
                Send(request("GET /v1/orders HTTP/1.1", &[("idempotency-key", "k")], "")),
                Get(problem(405, "method-not-allowed").header("allow", "POST")),
            ],
        ),
        case(
            "A27",
            1,
            vec![
                Send(post(&[("idempotency-key", "k")], "{\"pad\":")),
                Get(problem(400, "bad-record")),
                Send(keyed("k")),
                Get(written()),
            ],
        )
        .limits(required),
        case(
            "A29",
            1,
            vec![
                Send(post(&[], r#"{"id":1,"do":"refuse-once"}"#)),
                Get(retry(503, "unavailable")),
                Send(post(&[], r#"{"id":1,"do":"refuse-once"}"#)),
                Get(written()),
            ],
        ),
        case(
            "A31",
            0,
            vec![
                Send(post(&[], r#"{"id":1,"do":"unknown"}"#)),
                Get(retry(503, "outcome-unknown").json("/state", "unknown")),
            ],
        ),
        case(
            "A37",
            0,
            vec![
                Away(true),
                Send(post(&[], id1)),
                Get(retry(503, "unavailable").json("/detail", "the sink is away")),
            ],
        ),
        case(
            "A39",
            0,
            vec![
                Send(post(&[], r#"{"id":1,"do":"in-flight"}"#)),
                Get(retry(409, "in-flight")
                    .json("/state", "in_flight")
                    .header("oncegate-outcome", "unknown")),
            ],
        ),
        case(
            "key-twice",
            0,
            vec![
                Send(post(&[("idempotency-key", "a"), ("idempotency-key", "b")], id1)),
                Get(problem(400, "key-invalid")),
            ],
        ),
        // Replays
        case(
            "B05",
            1,
            vec![
                Send(chunked(&["{\"id\"", ":\"1\"}"])),
                Get(written().absent("transfer-encoding")),
                Send(post(&[("content-encoding", "gzip")], gzip(id1.as_bytes()))),
                Get(replayed().absent("content-encoding").absent("transfer-encoding")),
            ],
        ),
        case("B09", 1, vec![Send(post(&[], id1)), Get(written()), Send(post(&[], id1)), Get(replayed())]),
        case(
            "B11",
            1,
            vec![
                Send(post(&[], r#"{"id":1,"do":"slow"}"#)),
                WaitMs(100),
                Again,
                WaitMs(500),
                Send(post(&[], r#"{"id":1,"do":"slow"}"#)),
                Get(replayed()),
            ],
        ),
        case(
            "replay-of-an-update",
            1,
            vec![
                Send(post(&[], r#"{"id":1,"do":"update"}"#)),
                Get(status(201).header("oncegate-outcome", "updated").json("/outcome", "updated")),
                Send(post(&[], r#"{"id":1,"do":"update"}"#)),
                Get(status(201).header("oncegate-outcome", "duplicate").json("/outcome", "updated")),
            ],
        ),
        case(
            "replay-of-a-stale-record",
            0,
            vec![
                Send(post(&[], r#"{"id":1,"do":"stale"}"#)),
                Get(status(200).header("oncegate-outcome", "stale").json("/outcome", "stale")),
                Send(post(&[], r#"{"id":1,"do":"stale"}"#)),
                Get(status(200).header("idempotent-replayed", "true").json("/outcome", "stale")),
            ],
        ),
        case(
            "replay-of-a-refusal",
            0,
            vec![
                Send(post(&[], r#"{"id":1,"do":"settle-refusal"}"#)),
                Get(problem(422, "refused")),
                Send(post(&[], r#"{"id":1,"do":"settle-refusal"}"#)),
                Get(problem(422, "refused").header("idempotent-replayed", "true")),
            ],
        ),
        case(
            "refused",
            0,
            vec![
                Send(post(&[], r#"{"id":1,"do":"refuse"}"#)),
                Get(problem(422, "refused").json("/detail", "check constraint c")),
            ],
        ),
        case(
            "late",
            0,
            vec![
                Send(post(&[], r#"{"id":1,"do":"late"}"#)),
                Get(problem(422, "late").header("oncegate-outcome", "late")),
            ],
        ),
        case("ahead", 0, vec![Send(post(&[], r#"{"id":1,"do":"ahead"}"#)), Get(problem(422, "ahead"))]),
        case(
            "dead-letter",
            0,
            vec![
                Send(post(&[], r#"{"id":1,"do":"dead-letter"}"#)),
                Get(problem(422, "dead-lettered").header("oncegate-outcome", "dead_lettered")),
            ],
        ),
        case(
            "rule5-silence",
            0,
            vec![Send(post(&[], r#"{"id":1,"do":"silent"}"#)), Get(retry(503, "outcome-unknown"))],
        ),
        // Several records
        case(
            "array",
            2,
            vec![
                Send(post(&[], r#" [{"id":1},{"id":2},{"id":1}]"#)),
                Get(status(200)
                    .json("/outcomes/0/index", 0)
                    .json("/outcomes/0/outcome", "written")
                    .json("/outcomes/2/outcome", "duplicate")
                    .json("/counts", json!({"written": 2, "duplicate": 1}))),
            ],
        ),
        case(
            "array-empty",
            0,
            vec![Send(post(&[], "[ ]")), Get(status(200).json("", json!({"outcomes": [], "counts": {}})))],
        ),
        case(
            "array-malformed",
            0,
            vec![
                Send(post(&[], r#"[{"id":1},{"id":2}"#)),
                Get(problem(400, "bad-record")),
                Send(post(&[], r#"[{"id":1} {"id":2}]"#)),
                Get(problem(400, "bad-record")),
            ],
        ),
        case(
            "array-mixed",
            1,
            vec![
                Send(post(&[], r#"[{"id":1},7,{"id":3,"do":"refuse"},{"id":4,"do":"stale"}]"#)),
                Get(status(207)
                    .json("/outcomes/1/outcome", "rejected")
                    .json("/outcomes/1/title", "The record is not what the route takes")
                    .json("/outcomes/2/detail", "check constraint c")
                    .json("/outcomes/3/outcome", "stale")
                    .json("/counts", json!({"written": 1, "rejected": 2, "stale": 1}))),
            ],
        ),
        case(
            "array-rule5-silence",
            1,
            vec![
                Send(post(&[], r#"[{"id":1},{"id":2,"do":"silent"},{"id":3}]"#)),
                Get(status(207).json("/counts", json!({"written": 1, "unknown": 2}))),
            ],
        ),
        case(
            "array-record-too-long",
            2,
            vec![
                Send(post(&[], format!(r#"[{{"id":1}},{{"id":2,"pad":"{}"}},{{"id":3}}]"#, "x".repeat(600)))),
                Get(status(207).json("/outcomes/1/outcome", "rejected").json("/counts/written", 2)),
            ],
        )
        .limits(small),
        case(
            "array-too-many",
            0,
            vec![
                Send(post(&[], format!("[{}]", ["{\"id\":1}"; 21].join(",")))),
                Get(problem(413, "body-too-large")),
            ],
        )
        .limits(small),
        case(
            "array-with-a-key",
            0,
            vec![Send(post(&[("idempotency-key", "k")], r#"[{"id":1}]"#)), Get(problem(400, "key-invalid"))],
        ),
        case(
            "array-with-a-key-where-the-route-says-how",
            2,
            vec![
                Send(post(&[("idempotency-key", "k")], r#"[{"pad":"a"},{"pad":"b"}]"#)),
                Get(status(200).json("/counts/written", 2).header("idempotency-key", "k")),
                Send(post(&[("idempotency-key", "k")], r#"[{"pad":"a"},{"pad":"b"}]"#)),
                Get(status(200).json("/counts/duplicate", 2)),
            ],
        )
        .limits(|limits| {
            required(limits);
            limits.keyed_batches = true;
        }),
        case(
            "ndjson",
            3,
            vec![
                Send(post(
                    &[("content-type", "application/x-ndjson; charset=utf-8")],
                    "{\"id\":1}\r\n\n{\"id\":2}\n{\"id\":1}\n{\"id\":3}",
                )),
                Get(status(200)
                    .json("/outcomes/3/index", 3)
                    .json("/counts", json!({"written": 3, "duplicate": 1}))),
            ],
        ),
        case(
            "ndjson-empty",
            0,
            vec![
                Send(post(&[("content-type", "application/jsonl")], "")),
                Get(status(200).json("/outcomes", json!([]))),
                Send(post(&[("content-type", "application/jsonl")], "\n \n")),
                Get(status(200).json("/outcomes", json!([]))),
            ],
        ),
        case(
            "ndjson-bad-line",
            2,
            vec![
                Send(post(&[("content-type", "application/jsonl")], "{\"id\":1}\n{\"id\":\n{\"id\":3}\n")),
                Get(status(207).json("/outcomes/1/outcome", "rejected").json("/counts/written", 2)),
            ],
        ),
        case(
            "ndjson-with-a-key",
            0,
            vec![
                Send(post(&[("content-type", "application/jsonl"), ("idempotency-key", "k")], id1)),
                Get(problem(400, "key-invalid")),
            ],
        ),
        case(
            "ndjson-too-many",
            0,
            vec![
                Send(post(&[("content-type", "application/jsonl")], lines(21))),
                Get(problem(413, "body-too-large").json("/not_submitted_from", 0)),
            ],
        )
        .limits(small),
        case(
            "ndjson-as-many-as-may-be",
            20,
            vec![
                Send(post(&[("content-type", "application/jsonl")], lines(20))),
                Get(status(200).json("/counts/written", 20)),
            ],
        )
        .limits(small),
        case(
            "ndjson-gzip-and-zstd",
            100,
            vec![
                Send(post(
                    &[("content-type", "application/x-ndjson"), ("content-encoding", "gzip")],
                    gzip(lines(100).as_bytes()),
                )),
                Get(status(200).json("/counts/written", 100)),
                Send(post(
                    &[("content-type", "application/x-ndjson"), ("content-encoding", "zstd")],
                    zstd(lines(100).as_bytes()),
                )),
                Get(status(200).json("/counts/duplicate", 100)),
            ],
        ),
        // Framing
        case(
            "X01",
            1,
            vec![
                Send(post(&[("content-length", "100")], id1)),
                End,
                Get(problem(400, "body-incomplete").header("connection", "close")),
                Closed,
                Again,
                Send(post(&[], id1)),
                Get(written()),
            ],
        ),
        case(
            "X01-gone",
            1,
            vec![
                Send(post(&[("content-length", "11")], id1)),
                Again,
                WaitMs(100),
                Send(post(&[], id1)),
                Get(written()),
            ],
        ),
        case(
            "X02",
            1,
            vec![
                Send(post(&[("transfer-encoding", "chunked")], "")),
                Send(piece(id1)),
                End,
                Get(problem(400, "body-incomplete")),
                Closed,
                Again,
                Send(post(&[], id1)),
                Get(written()),
            ],
        ),
        case(
            "X02-gone",
            0,
            vec![
                Send(post(&[("transfer-encoding", "chunked")], "")),
                Send(piece(id1)),
                WaitMs(50),
                Again,
                WaitMs(100),
            ],
        ),
        case(
            "X02-ndjson",
            0,
            vec![
                Send(post(&[("content-type", "application/jsonl"), ("transfer-encoding", "chunked")], "")),
                Send(piece("{\"id\":1}\n{\"id\":2}")),
                End,
                Get(problem(400, "body-incomplete").json("/outcomes", json!([]))),
            ],
        ),
        case(
            "X02-array",
            0,
            vec![
                Send(post(&[("transfer-encoding", "chunked")], "")),
                Send(piece("[{\"id\":1}]")),
                End,
                Get(problem(400, "body-incomplete")),
            ],
        ),
        case(
            "X02-gzip",
            0,
            vec![
                Send(post(&[("content-encoding", "gzip"), ("transfer-encoding", "chunked")], "")),
                Send(piece(gzip(id1.as_bytes()))),
                End,
                Get(problem(400, "body-incomplete")),
            ],
        ),
        case(
            "gzip-cut",
            0,
            vec![
                Send(post(&[("content-encoding", "gzip")], &gzip(id1.as_bytes())[..20])),
                Get(problem(400, "body-undecodable")),
            ],
        ),
        case(
            "gzip-of-plain-text",
            0,
            vec![Send(post(&[("content-encoding", "gzip")], id1)), Get(problem(400, "body-undecodable"))],
        ),
        case(
            "zstd-cut",
            0,
            vec![
                {
                    let whole = zstd(id1.as_bytes());
                    Send(post(&[("content-encoding", "zstd")], &whole[..whole.len() - 2]))
                },
                Get(problem(400, "body-undecodable")),
            ],
        ),
        case(
            "bad-chunk",
            0,
            vec![
                Send(post(&[("transfer-encoding", "chunked")], "")),
                Send(b"zz\r\n{}\r\n0\r\n\r\n".to_vec()),
                Get(problem(400, "body-incomplete")),
                Closed,
            ],
        ),
        case(
            "X04",
            1,
            vec![
                Send(post(
                    &[("transfer-encoding", "chunked"), ("content-length", "4")],
                    [piece(id1), b"0\r\n\r\n".to_vec(), post(&[], r#"{"id":"smuggled"}"#)].concat(),
                )),
                Get(written()),
                Closed,
            ],
        ),
        case(
            "X05",
            0,
            vec![
                Send(post(&[("content-length", "10"), ("content-length", "4")], id1)),
                Get(status(400).header("connection", "close")),
                Closed,
            ],
        ),
        case(
            "X06",
            0,
            vec![
                Send(post(&[("transfer-encoding", "gzip")], id1)),
                Get(status(400).header("connection", "close")),
                Closed,
            ],
        ),
        case(
            "X07",
            0,
            vec![
                Send(post(&[("content-length", "1001"), ("expect", "100-continue")], "")),
                Get(problem(413, "body-too-large").header("connection", "close")),
                Closed,
            ],
        )
        .limits(small),
        case(
            "X08",
            0,
            vec![
                Send(post(&[("transfer-encoding", "chunked")], "")),
                Send(piece("x".repeat(800))),
                Silent,
                Send(piece("x".repeat(800))),
                Get(problem(413, "body-too-large")),
                Closed,
            ],
        )
        .limits(small),
        case(
            "X08-ndjson",
            0,
            vec![
                Send(post(&[("content-type", "application/jsonl"), ("transfer-encoding", "chunked")], "")),
                Send(piece("{\"id\":1}\n")),
                Send(piece("x".repeat(4_000))),
                Get(problem(413, "body-too-large").json("/not_submitted_from", 0)),
                Closed,
            ],
        )
        .limits(small),
        case(
            "X09",
            1,
            vec![
                Send(post(&[("expect", "100-continue"), ("content-length", "10")], "")),
                Get(status(100)),
                Send(id1.into()),
                Get(written()),
            ],
        ),
        case(
            "X09-sent-without-waiting",
            1,
            vec![Send(post(&[("expect", "100-continue")], id1)), Get(status(100)), Get(written())],
        ),
        case(
            "X10-token",
            0,
            vec![
                Send(post(&[("expect", "100-continue"), ("content-length", "10")], "")),
                Get(problem(401, "unauthorized").header("connection", "close")),
                Closed,
            ],
        )
        .limits(bearer),
        case(
            "X10-key",
            0,
            vec![
                Send(post(
                    &[("expect", "100-continue"), ("content-length", "10"), ("idempotency-key", "\"x")],
                    "",
                )),
                Get(problem(400, "key-invalid")),
                Closed,
            ],
        )
        .limits(strict),
        case(
            "X10-type",
            0,
            vec![
                Send(post(
                    &[("expect", "100-continue"), ("content-length", "10"), ("content-type", "text/csv")],
                    "",
                )),
                Get(problem(415, "unsupported-media-type")),
                Closed,
            ],
        ),
        case(
            "X10-away",
            0,
            vec![
                Away(true),
                Send(post(&[("expect", "100-continue"), ("content-length", "10")], "")),
                Get(retry(503, "unavailable")),
                Closed,
            ],
        ),
        case("X11", 0, vec![Send(post(&[("expect", "foo")], id1)), Get(problem(417, "expectation-failed"))]),
        case(
            "X12",
            1,
            vec![
                Send(request(
                    "POST /v1/orders HTTP/1.0",
                    &[("expect", "100-continue"), ("content-length", "10")],
                    id1,
                )),
                Get(written()),
                Closed,
            ],
        ),
        case(
            "X12-keep-alive",
            2,
            vec![
                Send(request("POST /v1/orders HTTP/1.0", &[("connection", "keep-alive")], id1)),
                Get(written().header("connection", "keep-alive")),
                Send(request("POST /v1/orders HTTP/1.0", &[], r#"{"id":2}"#)),
                Get(written()),
                Closed,
            ],
        ),
        case(
            "X13",
            0,
            vec![
                Send(post(&[("content-encoding", "br")], id1)),
                Get(problem(415, "unsupported-encoding").header("accept-encoding", "gzip, zstd, identity")),
            ],
        ),
        case(
            "X14",
            0,
            vec![
                Send(post(&[("content-type", "text/plain")], id1)),
                Get(problem(415, "unsupported-media-type").header("accept", "*")),
            ],
        ),
        case("X14-no-type", 1, vec![Send(request("POST /v1/orders HTTP/1.1", &[], id1)), Get(written())]),
        case(
            "X15",
            0,
            vec![
                Send(post(&[("content-encoding", "gzip")], gzip(&vec![b' '; 500_000]))),
                Get(problem(413, "body-too-large")),
            ],
        )
        .limits(small),
        case(
            "X15-zstd",
            0,
            vec![
                Send(post(&[("content-encoding", "zstd")], zstd(&vec![b' '; 500_000]))),
                Get(problem(413, "body-too-large")),
            ],
        )
        .limits(small),
        case(
            "X16",
            0,
            vec![
                Send(post(&[("content-length", "8000000")], "x".repeat(8_000_000))),
                Get(problem(413, "body-too-large").header("connection", "close")),
                Closed,
            ],
        )
        .limits(small),
        case(
            "X16-keeps-a-small-one",
            1,
            vec![
                Send(post(&[("content-type", "text/plain")], "x".repeat(30_000))),
                Get(problem(415, "unsupported-media-type").absent("connection")),
                Send(post(&[], id1)),
                Get(written()),
            ],
        ),
        case(
            "X18",
            2,
            vec![
                Send(
                    [
                        post(&[], r#"{"id":1,"do":"slow"}"#),
                        post(&[], r#"{"id":2,"do":"update"}"#),
                        post(&[], "7"),
                    ]
                    .concat(),
                ),
                Get(written()),
                Get(status(201).json("/outcome", "updated")),
                Get(problem(400, "bad-record")),
            ],
        ),
        case(
            "X19",
            1,
            vec![
                Send(post(&[], id1)),
                Get(problem(401, "unauthorized").header("www-authenticate", "*")),
                Send(post(&[("authorization", "Bearer wrong")], id1)),
                Get(problem(401, "unauthorized")),
                Send(post(&[("authorization", "Bearer t0ken")], id1)),
                Get(written()),
            ],
        )
        .limits(bearer),
        case(
            "X20",
            0,
            vec![
                Send(post(&[("content-length", "10")], "")),
                WaitMs(50),
                Away(true),
                Drain,
                WaitMs(50),
                Send(id1.into()),
                Get(status(201).header("connection", "close")),
                Closed,
            ],
        )
        .rows(1),
        case(
            "X20-refused",
            0,
            vec![
                Away(true),
                Drain,
                Send(post(&[], id1)),
                Get(retry(503, "unavailable").header("connection", "close")),
                Closed,
            ],
        ),
        case(
            "unknown-route",
            0,
            vec![
                Send(request("POST /v1/nothing HTTP/1.1", &[], id1)),
                Get(problem(404, "unknown-route")),
                Send(request("POST /v1/orders/ HTTP/1.1", &[], id1)),
                Get(problem(404, "unknown-route")),
                Send(request("GET / HTTP/1.1", &[], "")),
                Get(problem(404, "unknown-route")),
            ],
        ),
        case(
            "no-body",
            0,
            vec![
                Send(b"POST /v1/orders HTTP/1.1\r\nhost: x\r\n\r\n".to_vec()),
                Get(problem(400, "bad-record")),
            ],
        ),
        case(
            "head-too-large",
            0,
            vec![
                Send(post(&[("x-long", &*"x".repeat(40_000).leak())], id1)),
                Get(status(431).header("connection", "close")),
                Closed,
            ],
        ),
        case(
            "not-http",
            0,
            vec![
                Send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n".to_vec()),
                Get(status(400)),
                Closed,
            ],
        ),
    ]
}

impl Case {
    fn rows(mut self, rows: usize) -> Self {
        self.rows = rows;
        self
    }
}
