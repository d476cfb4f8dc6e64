//! Time, memory, connections and the drain.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use oncegate::door::http::{HttpOptions, ListenOptions};

use crate::{
    by_id,
    rig::Rig,
    wire::{Wire, piece, post, request},
};

const MS: Duration = Duration::from_millis(1);

#[tokio::test(flavor = "multi_thread")]
async fn ndjson_is_submitted_in_bounded_pieces_and_answered_in_order() {
    let rig = Rig::start(by_id(), HttpOptions::default());
    let mut wire = Wire::connect(rig.address).await;
    wire.send(&post(&[("content-type", "application/x-ndjson"), ("transfer-encoding", "chunked")], "")).await;
    const RECORDS: usize = 50_000;
    let mut sent = String::new();
    for id in 0..RECORDS {
        sent += &format!("{{\"id\":{},\"pad\":\"{}\"}}\n", id % 40_000, id % 40_000);
        if sent.len() > 60_000 {
            wire.send(&piece(&sent)).await;
            sent.clear();
        }
    }
    wire.send(&[piece(&sent), b"0\r\n\r\n".to_vec()].concat()).await;
    let answer = wire.response().await.unwrap();
    let json = answer.json();
    assert_eq!(
        (json["counts"]["written"].as_u64(), json["counts"]["duplicate"].as_u64()),
        (Some(40_000), Some(10_000))
    );
    let outcomes = json["outcomes"].as_array().unwrap();
    assert_eq!(outcomes.len(), RECORDS);
    for (at, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome["index"], at);
        assert_eq!(outcome["outcome"], if at < 40_000 { "written" } else { "duplicate" });
    }
    // Rows came in order, and no piece was much above the bound.
    let written = rig.orders.lane.written.lock();
    assert!(
        written.iter().enumerate().all(|(id, row)| row.starts_with(format!("{{\"id\":{id},").as_bytes()))
    );
    assert!(rig.orders.lane.biggest.load(Ordering::Relaxed) <= 15_000, "a piece is bounded");
}

#[tokio::test(flavor = "multi_thread")]
async fn ndjson_that_breaks_off_keeps_the_outcomes_of_what_was_submitted() {
    let rig = Rig::start(by_id(), HttpOptions::default());
    let mut wire = Wire::connect(rig.address).await;
    wire.send(&post(&[("content-type", "application/jsonl"), ("transfer-encoding", "chunked")], "")).await;
    let lines: String = (0..1_000).map(|id| format!("{{\"id\":{id}}}\n")).collect();
    wire.send(&piece(&lines)).await;
    while rig.rows() < 1_000 {
        tokio::time::sleep(MS).await;
    }
    wire.send(&piece("{\"id\":\"whole\"}\n{\"id\":\"half")).await;
    wire.end().await;
    let answer = wire.response().await.unwrap();
    let json = answer.json();
    assert_eq!(answer.status, 400);
    assert_eq!((&json["not_submitted_from"], &json["counts"]["written"]), (&1_000.into(), &1_000.into()));
    assert_eq!(rig.rows(), 1_000, "neither the last whole line nor the half one was written");
}

#[tokio::test]
async fn a_body_that_stops_coming_is_408() {
    let options = HttpOptions { body_idle: 100 * MS, ..HttpOptions::default() };
    let rig = Rig::start(by_id(), options);
    for content_type in ["application/json", "application/jsonl"] {
        let mut wire = Wire::connect(rig.address).await;
        wire.send(&post(&[("content-type", content_type), ("content-length", "100")], "{\"id\":")).await;
        let answer = wire.response().await.unwrap();
        assert_eq!((answer.status, answer.header("connection")), (408, Some("close")), "{content_type}");
        assert!(wire.closed().await);
    }
    assert_eq!(rig.rows(), 0);
}

#[tokio::test]
async fn a_body_that_trickles_is_408_when_the_whole_takes_too_long() {
    let options = HttpOptions { body_idle: 1_000 * MS, request_timeout: 250 * MS, ..HttpOptions::default() };
    let rig = Rig::start(by_id(), options);
    let mut wire = Wire::connect(rig.address).await;
    wire.send(&post(&[("content-length", "1000")], "{\"id\":")).await;
    let started = Instant::now();
    while started.elapsed() < 200 * MS {
        wire.send(b" ").await;
        tokio::time::sleep(20 * MS).await;
    }
    assert_eq!(wire.response().await.unwrap().status, 408);
    assert!(started.elapsed() < 900 * MS);
}

#[tokio::test]
async fn a_lane_that_takes_too_long_is_an_unknown_outcome_and_its_row_still_comes() {
    let rig = Rig::start(by_id(), HttpOptions { request_timeout: 100 * MS, ..HttpOptions::default() });
    for (content_type, body) in [
        ("application/json", r#"{"id":1,"do":"slow"}"#),
        ("application/json", r#"[{"id":2,"do":"slow"}]"#),
        ("application/jsonl", r#"{"id":3,"do":"slow"}"#),
    ] {
        let before = rig.rows();
        let mut wire = Wire::connect(rig.address).await;
        wire.send(&post(&[("content-type", content_type)], body)).await;
        let answer = wire.response().await.unwrap();
        assert!(String::from_utf8_lossy(&answer.body).contains("/problems/outcome-unknown"), "{answer:?}");
        while rig.rows() == before {
            tokio::time::sleep(10 * MS).await;
        }
    }
}

#[tokio::test]
async fn a_head_that_stops_coming_is_cut_off() {
    let listen = ListenOptions { head_timeout: 100 * MS, ..ListenOptions::default() };
    let rig = Rig::start(by_id(), HttpOptions { listen, ..HttpOptions::default() });
    let mut wire = Wire::connect(rig.address).await;
    let started = Instant::now();
    wire.send(b"POST /v1/orders HTTP/1.1\r\nhost: x\r\nx-slow: ").await;
    assert!(wire.closed().await && started.elapsed() < 2_000 * MS);
}

#[tokio::test]
async fn requests_and_bytes_above_the_bounds_are_429() {
    let options = HttpOptions { max_requests: 1, max_bytes: 1_000, ..HttpOptions::default() };
    let rig = Rig::start(by_id(), options);
    let mut first = Wire::connect(rig.address).await;
    first.send(&post(&[], r#"{"id":1,"do":"slow"}"#)).await;
    tokio::time::sleep(100 * MS).await;
    let mut second = Wire::connect(rig.address).await;
    second.send(&post(&[], r#"{"id":2}"#)).await;
    let answer = second.response().await.unwrap();
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("1")));
    assert_eq!(first.response().await.unwrap().status, 201);
    second.send(&post(&[("content-length", "1001")], "")).await;
    assert_eq!(second.response().await.unwrap().status, 429, "declared");
    let mut third = Wire::connect(rig.address).await;
    third.send(&post(&[("transfer-encoding", "chunked")], piece("x".repeat(1_001)))).await;
    assert_eq!(third.response().await.unwrap().status, 429, "grown");
}

#[tokio::test]
async fn connections_above_the_bound_wait() {
    let listen = ListenOptions { max_connections: 1, ..ListenOptions::default() };
    let rig = Rig::start(by_id(), HttpOptions { listen, ..HttpOptions::default() });
    let mut first = Wire::connect(rig.address).await;
    first.send(&post(&[], r#"{"id":1}"#)).await;
    assert_eq!(first.response().await.unwrap().status, 201);
    let mut second = Wire::connect(rig.address).await;
    second.send(&post(&[], r#"{"id":2}"#)).await;
    assert!(second.silent(100 * MS).await);
    drop(first);
    assert_eq!(second.response().await.unwrap().status, 201);
}

#[tokio::test]
async fn a_drain_lets_requests_finish_and_closes_idle_connections() {
    let mut rig = Rig::start(by_id(), HttpOptions::default());
    let mut busy = Wire::connect(rig.address).await;
    let mut idle = Wire::connect(rig.address).await;
    idle.send(&post(&[], r#"{"id":0}"#)).await;
    assert_eq!(idle.response().await.unwrap().status, 201);
    busy.send(&post(&[], r#"{"id":1,"do":"slow"}"#)).await;
    tokio::time::sleep(50 * MS).await;
    rig.stop();
    assert!(idle.closed().await);
    let answer = busy.response().await.unwrap();
    assert_eq!((answer.status, answer.header("connection")), (201, Some("close")));
    assert!(busy.closed().await);
    drop((busy, idle));
    assert_eq!(rig.drained().await.cut_off, 0);
}

#[tokio::test]
async fn new_requests_are_served_during_the_drain_delay() {
    let listen = ListenOptions { drain_delay: 300 * MS, ..ListenOptions::default() };
    let mut rig = Rig::start(by_id(), HttpOptions { listen, ..HttpOptions::default() });
    rig.stop();
    while !rig.draining.begun() {
        tokio::time::sleep(MS).await;
    }
    let mut wire = Wire::connect(rig.address).await;
    wire.send(&post(&[], r#"{"id":1}"#)).await;
    let answer = wire.response().await.unwrap();
    assert_eq!((answer.status, answer.header("connection")), (201, Some("close")));
    let address = rig.address;
    drop(wire);
    rig.drained().await;
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_drain_has_a_deadline() {
    let listen = ListenOptions { drain_deadline: 100 * MS, ..ListenOptions::default() };
    let mut rig = Rig::start(by_id(), HttpOptions { listen, ..HttpOptions::default() });
    let mut wire = Wire::connect(rig.address).await;
    wire.send(&post(&[], r#"{"id":1,"do":"slow"}"#)).await;
    tokio::time::sleep(50 * MS).await;
    rig.stop();
    let orders = rig.orders.clone();
    assert_eq!(rig.drained().await.cut_off, 1);
    tokio::time::sleep(400 * MS).await;
    assert_eq!(orders.lane.written.lock().len(), 1, "the lane finished all the same");
}

#[tokio::test]
async fn a_client_that_still_sends_sees_the_early_answer() {
    let mut limits = by_id();
    limits.max_stream = 1 << 20;
    let rig = Rig::start(limits, HttpOptions::default());
    for length in [("content-length", "6000000"), ("transfer-encoding", "chunked")] {
        let mut wire = Wire::connect(rig.address).await;
        wire.send(&post(&[("content-type", "application/jsonl"), length], "")).await;
        let body = vec![b'x'; 6_000_000];
        let body = if length.1 == "chunked" { piece(body) } else { body };
        assert!(wire.send(&body).await, "the server takes what is sent");
        assert_eq!(wire.response().await.unwrap().status, 413);
        assert!(wire.closed().await);
    }
}

#[tokio::test]
async fn a_pipeline_behind_a_closing_answer_is_not_served() {
    let rig = Rig::start(by_id(), HttpOptions::default());
    let mut wire = Wire::connect(rig.address).await;
    let closing = request("POST /v1/orders HTTP/1.1", &[("connection", "close")], r#"{"id":1}"#);
    wire.send(&[closing, post(&[], r#"{"id":2}"#)].concat()).await;
    assert_eq!(wire.response().await.unwrap().status, 201);
    assert!(wire.closed().await);
    assert_eq!(rig.rows(), 1);
}
