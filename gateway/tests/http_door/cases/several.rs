//! Arrays and NDJSON.

use serde_json::json;

use super::*;
use crate::wire::post;

pub(crate) fn cases() -> Vec<Case> {
    use Step::{Get, Send};
    let id1 = r#"{"id":"1"}"#;
    let lines = |count: usize| -> String { (0..count).map(|id| format!("{{\"id\":{id}}}\n")).collect() };
    vec![
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
    ]
}
