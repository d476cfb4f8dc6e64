//! Keys, problems, and copies that are answered like the first (A and B of the list).

use super::*;
use crate::wire::{post, request};

pub(crate) fn cases() -> Vec<Case> {
    use Step::{Again, Away, Get, Send, WaitMs};
    let id1 = r#"{"id":"1"}"#;
    let draft_key = r#""8e03978e-40d5-43e8-bc93-6894a57f9324""#;
    let k255: &str = "k".repeat(255).leak();
    let k256: &str = "k".repeat(256).leak();
    vec![
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
    ]
}
