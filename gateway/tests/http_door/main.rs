//! The HTTP door over real sockets, in front of a scripted route.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod bounds;
mod cases;
mod fuzz;
mod rig;
mod wire;

use std::{sync::atomic::Ordering, time::Duration};

use oncegate::{
    door::{HttpLimits, http::HttpOptions},
    key::KeySpec,
    outcome::Outcome,
};

use crate::{
    cases::{Case, Step, Want, cases},
    rig::Rig,
    wire::{Response, Wire},
};

/// Limits of a route that is named by `/id`.
fn by_id() -> HttpLimits {
    HttpLimits::new(KeySpec::pointers(["/id"]).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_case_of_the_table() {
    let mut failures = Vec::new();
    for case in cases() {
        let id = case.id;
        let run = tokio::spawn(run(case));
        if let Err(error) = run.await {
            let text = error.into_panic();
            let text = text.downcast_ref::<String>().cloned().unwrap_or_default();
            failures.push(format!("{id}: {text}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

async fn run(case: Case) {
    let mut limits = by_id();
    (case.limits)(&mut limits);
    let mut options = HttpOptions::default();
    options.listen.drain_delay = Duration::from_secs(5);
    let mut rig = Rig::start(limits, options);
    let mut wire = Wire::connect(rig.address).await;
    for (at, step) in case.steps.into_iter().enumerate() {
        match step {
            Step::Send(bytes) => {
                wire.send(&bytes).await;
            }
            Step::End => wire.end().await,
            Step::Again => wire = Wire::connect(rig.address).await,
            Step::Get(want) => {
                let response =
                    wire.response().await.unwrap_or_else(|| panic!("step {at}: closed without an answer"));
                check(at, &response, &want);
            }
            Step::Closed => assert!(wire.closed().await, "step {at}: still open"),
            Step::Silent => {
                assert!(wire.silent(Duration::from_millis(50)).await, "step {at}: something came")
            }
            Step::WaitMs(span) => tokio::time::sleep(Duration::from_millis(span)).await,
            Step::Away(away) => rig.orders.lane.away.store(away, Ordering::Relaxed),
            Step::Drain => {
                rig.stop();
                while !rig.draining.begun() {
                    tokio::task::yield_now().await;
                }
            }
        }
    }
    assert_eq!(rig.rows(), case.rows, "rows in the sink");
    let door = rig.metrics.door();
    for _ in 0..200 {
        if door.requests.get() == 0 && door.body_bytes.get() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{} requests and {} bytes are held for ever", door.requests.get(), door.body_bytes.get());
}

fn check(at: usize, response: &Response, want: &Want) {
    let body = String::from_utf8_lossy(&response.body);
    assert_eq!(response.status, want.status, "step {at}: {response:?} {body}");
    for (name, value) in &want.headers {
        let got =
            response.header(name).unwrap_or_else(|| panic!("step {at}: no header {name}: {response:?}"));
        assert!(*value == "*" || got == *value, "step {at}: {name} is {got:?}, not {value:?}");
    }
    for name in &want.absent {
        assert_eq!(response.header(name), None, "step {at}: header {name}");
    }
    for (pointer, value) in &want.json {
        assert_eq!(response.json().pointer(pointer), Some(value), "step {at}: {pointer} of {body}");
    }
    well_formed(response);
}

/// X21, and what else holds of every final answer with a body.
pub(crate) fn well_formed(response: &Response) {
    if response.status < 200 {
        return;
    }
    assert!(response.header("date").is_some(), "{response:?}");
    let json = response.json();
    if response.status >= 400 {
        assert_eq!(response.header("content-type"), Some("application/problem+json"), "{response:?}");
        assert_eq!(json["status"], response.status, "X21");
        assert!(json["type"].as_str().is_some_and(|uri| uri.starts_with("https://")), "X21: {json}");
        assert!(json["title"].is_string() && json["detail"].is_string(), "X21: {json}");
    } else {
        assert_eq!(response.header("content-type"), Some("application/json"), "{response:?}");
        assert!(json["outcome"].is_string() || json["outcomes"].is_array(), "{json}");
    }
}

#[tokio::test]
async fn a_copy_has_the_same_status_and_bytes_as_the_first() {
    let rig = Rig::start(by_id(), HttpOptions::default());
    let mut wire = Wire::connect(rig.address).await;
    let mut answers = Vec::new();
    for _ in 0..3 {
        wire.send(&wire::post(&[], r#"{"id":"one","pad":"\u00e9"}"#)).await;
        answers.push(wire.response().await.unwrap());
    }
    assert!(answers.iter().all(|answer| (answer.status, &answer.body) == (201, &answers[0].body)));
    assert_eq!(rig.rows(), 1);
}

#[tokio::test]
async fn every_record_is_counted_once_before_its_answer_is_seen() {
    let rig = Rig::start(by_id(), HttpOptions::default());
    let mut wire = Wire::connect(rig.address).await;
    let counts = || {
        let route = rig.metrics.route("orders");
        Outcome::ALL.map(|outcome| route.counted(outcome))
    };
    wire.send(&wire::post(&[], r#"[{"id":1},{"id":1},{"id":2,"do":"refuse"},7,{"id":3,"do":"late"}]"#)).await;
    wire.response().await.unwrap();
    // written, updated, duplicate, mismatch, stale, late, rejected, dead_lettered, unknown
    assert_eq!(counts(), [1, 0, 1, 0, 0, 1, 2, 0, 0]);
    wire.send(&wire::post(&[], r#"{"id":1}"#)).await;
    wire.response().await.unwrap();
    wire.send(&wire::post(&[], r#"{"id":1,"pad":"other"}"#)).await;
    wire.response().await.unwrap();
    assert_eq!(counts(), [1, 0, 2, 1, 0, 1, 2, 0, 0]);
}
