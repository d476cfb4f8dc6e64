//! Bytes on the wire (X of the list).

use serde_json::json;

use super::*;
use crate::wire::{piece, post, request};

pub(crate) fn cases() -> Vec<Case> {
    use Step::{Again, Away, Closed, Drain, End, Get, Send, Silent, WaitMs};
    let id1 = r#"{"id":"1"}"#;
    vec![
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
                Get(problem(400, "bad-request").header("connection", "close")),
                Closed,
            ],
        ),
        case(
            "X06",
            0,
            vec![
                Send(post(&[("transfer-encoding", "gzip")], id1)),
                Get(problem(400, "bad-request").header("connection", "close")),
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
                Get(problem(431, "head-too-large").header("connection", "close")),
                Closed,
            ],
        ),
        case(
            "not-http",
            0,
            vec![
                Send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n".to_vec()),
                Get(problem(400, "bad-request")),
                Closed,
            ],
        ),
    ]
}
