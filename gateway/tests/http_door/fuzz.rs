//! Random and mutated bytes on the socket: no panic, no hang, every answer well-formed, and nothing written that was not whole.

use std::{net::SocketAddr, sync::OnceLock, time::Duration};

use oncegate::door::http::{HttpOptions, ListenOptions};
use proptest::prelude::*;
use tokio::runtime::Runtime;

use crate::{
    by_id,
    rig::Rig,
    well_formed,
    wire::{Wire, piece, post, request},
};

/// One door for all rounds: a fault of one round would show in the next.
fn door() -> &'static (Runtime, SocketAddr) {
    static DOOR: OnceLock<(Runtime, SocketAddr)> = OnceLock::new();
    DOOR.get_or_init(|| {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let short = Duration::from_millis(300);
        let listen = ListenOptions { head_timeout: short, linger: short, ..ListenOptions::default() };
        let options =
            HttpOptions { listen, body_idle: short, request_timeout: 2 * short, ..HttpOptions::default() };
        let rig = {
            let _inside = runtime.enter();
            Rig::start(by_id(), options)
        };
        let address = rig.address;
        // It serves until the process ends.
        std::mem::forget(rig);
        (runtime, address)
    })
}

/// Sends bytes in pieces, closes, and reads answers until the server closes.
fn round(pieces: &[Vec<u8>]) {
    let (runtime, address) = door();
    runtime.block_on(async {
        let mut wire = Wire::connect(*address).await;
        for bytes in pieces {
            if !wire.send(bytes).await {
                break;
            }
            tokio::task::yield_now().await;
        }
        wire.end().await;
        let mut answers = 0;
        while let Some(answer) = wire.response().await {
            well_formed(&answer);
            answers += 1;
            assert!(answers < 100, "more answers than requests");
        }
        // The door lives on.
        let mut wire = Wire::connect(*address).await;
        wire.send(&post(&[("connection", "close")], r#"{"id":"alive"}"#)).await;
        assert_eq!(wire.response().await.unwrap().status, 201);
    });
}

fn whole_request() -> impl Strategy<Value = Vec<u8>> {
    let body = prop_oneof![
        Just(br#"{"id":1}"#.to_vec()),
        Just(br#"[{"id":1},{"id":2}]"#.to_vec()),
        Just(b"{\"id\":1}\n{\"id\":2}\n".to_vec()),
        prop::collection::vec(any::<u8>(), 0..200),
        "[\\[\\]{}\",:a-e0-9\\\\ ]{0,80}".prop_map(String::into_bytes),
    ];
    let types = prop::sample::select(vec![
        "application/json",
        "application/jsonl",
        "text/plain",
        "application/json;;=\"",
    ]);
    let codings = prop::sample::select(vec!["identity", "identity", "gzip", "zstd", "gzip,zstd"]);
    let keys = prop::sample::select(vec!["", "k", "\"k\"", "\"k"]);
    (body, types, codings, keys, 0..4).prop_map(|(body, content_type, coding, key, framing)| {
        let mut headers = vec![("content-type", content_type), ("content-encoding", coding)];
        if !key.is_empty() {
            headers.push(("idempotency-key", key));
        }
        match framing {
            0 => {
                headers.push(("transfer-encoding", "chunked"));
                let mut out = post(&headers, "");
                for bytes in body.chunks(7) {
                    out.extend(piece(bytes));
                }
                out.extend_from_slice(b"0\r\n\r\n");
                out
            }
            1 => {
                headers.push(("expect", "100-continue"));
                post(&headers, body)
            }
            2 => request("POST /v1/orders HTTP/1.0", &headers, body),
            _ => post(&headers, body),
        }
    })
}

fn config() -> ProptestConfig {
    // `PROPTEST_CASES` makes a long run.
    ProptestConfig {
        failure_persistence: None,
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(96),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2_000)) {
        round(&[bytes]);
    }

    #[test]
    fn whole_requests_cut_anywhere(requests in prop::collection::vec(whole_request(), 1..4), cut in any::<prop::sample::Index>()) {
        let bytes = requests.concat();
        let (head, tail) = bytes.split_at(cut.index(bytes.len()));
        round(&[head.to_vec(), tail.to_vec()]);
        round(&[head.to_vec()]);
    }

    #[test]
    fn mutated_requests(
        request in whole_request(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3), 1..6),
    ) {
        let mut bytes = request;
        for (at, byte, edit) in edits {
            let at = at.index(bytes.len().max(1)).min(bytes.len().saturating_sub(1));
            match edit {
                0 if !bytes.is_empty() => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ if !bytes.is_empty() => { bytes.remove(at); }
                _ => {}
            }
        }
        round(&[bytes]);
    }
}
