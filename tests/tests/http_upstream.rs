//! The write proxy: one effect a key at a scripted service, the first answer byte for byte to copies, through cuts, time-outs and kills.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::StreamExt;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use oncegate_tests::{
    gateway::Gateway,
    http_client::{HttpClient, Response as Answer},
};
use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::{net::TcpListener, sync::Notify, task::JoinHandle};

const SEED: u64 = 6;

/// What the service has seen of one key.
#[derive(Clone, Debug, Default)]
struct Effects {
    /// How often a request came.
    requests: u32,
    /// How often it was applied.
    applied: u32,
    answer: Option<(u16, Bytes)>,
}

/// A service of our own. It does as the header `x-do` says, and keeps what it did by `x-case`.
#[derive(Default)]
struct Service {
    effects: Mutex<BTreeMap<String, Effects>>,
    /// By `Idempotency-Key`, if it honours that.
    honours: bool,
    by_key: Mutex<BTreeMap<Bytes, String>>,
    seen: Mutex<Vec<(Method, String, http::HeaderMap)>>,
    gate: Notify,
    number: AtomicU64,
    /// Does at random one of what else a header asks for.
    wild: Option<Mutex<StdRng>>,
}

type Out = Response<BoxBody<Bytes, std::io::Error>>;

fn whole(status: u16, body: impl Into<Bytes>) -> Out {
    let body = Full::new(body.into()).map_err(|never| match never {}).boxed();
    let mut response = Response::new(body);
    *response.status_mut() = status.try_into().expect("a status");
    response
}

impl Service {
    async fn start(self) -> (Arc<Self>, String, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}/api", listener.local_addr().expect("bound"));
        let service = Arc::new(self);
        let ours = service.clone();
        let task = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let ours = ours.clone();
                tokio::spawn(async move {
                    let answer = service_fn(|request| ours.answer(request));
                    // A cut of the script's own ends it.
                    drop(http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await);
                });
            }
        });
        (service, url, task)
    }

    fn effects(&self, case: &str) -> Effects {
        self.effects.lock().get(case).cloned().unwrap_or_default()
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Out, std::io::Error> {
        let (head, body) = request.into_parts();
        let Ok(body) = body.collect().await else { return Err(std::io::ErrorKind::UnexpectedEof.into()) };
        let body = body.to_bytes();
        let target = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
        self.seen.lock().push((head.method.clone(), target.clone(), head.headers.clone()));
        let text = |name: &str| {
            head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        if head.method == Method::GET && target.ends_with("stalls") {
            let first = futures_util::stream::iter([Ok(Frame::data(Bytes::from_static(b"begun")))]);
            let rest = futures_util::StreamExt::chain(first, futures_util::stream::pending());
            return Ok(Response::new(BodyExt::boxed(StreamBody::new(rest))));
        }
        if head.method == Method::GET {
            let pieces = (0..300).map(|_| Ok(Frame::data(Bytes::from(vec![b'g'; 10_000]))));
            return Ok(Response::new(BodyExt::boxed(StreamBody::new(futures_util::stream::iter(pieces)))));
        }
        let (case, mut what) = (text("x-case"), text("x-do"));
        let mut cut_first = false;
        if let Some(random) = &self.wild {
            let roll = random.lock().random_range(0..100);
            cut_first = roll < 4;
            what = match roll {
                4..8 => "cut",
                8..12 => "500",
                12..15 => "late",
                15..18 => "429",
                18..28 => "chunked",
                28..60 => "slow",
                _ => "",
            }
            .to_owned();
        }
        if cut_first {
            return Err(std::io::ErrorKind::ConnectionReset.into());
        }
        if what == "429" {
            let mut answer = whole(429, "busy");
            answer.headers_mut().insert("retry-after", "0".parse().expect("a value"));
            return Ok(answer);
        }
        let key = head.headers.get("idempotency-key").map(|key| Bytes::copy_from_slice(key.as_bytes()));
        let (status, answer) = {
            let mut effects = self.effects.lock();
            let effect = effects.entry(case.clone()).or_default();
            effect.requests += 1;
            let known = self.honours.then_some(key).flatten().map(|key| {
                let mut keys = self.by_key.lock();
                assert_eq!(keys.entry(key).or_insert_with(|| case.clone()), &case, "one key, two cases");
            });
            match (&effect.answer, known) {
                (Some(answer), Some(())) => answer.clone(),
                _ => {
                    effect.applied += 1;
                    // No two answers are alike: a copy that is answered anew is noticed.
                    let number = self.number.fetch_add(1, Ordering::Relaxed);
                    let mut made = format!("{{\"number\":{number},\"bytes\":{}}}", body.len()).into_bytes();
                    made.extend([0, 0xff]);
                    made.extend(vec![b'x'; (number % 3_000) as usize]);
                    let status = match what.as_str() {
                        "422" => 422,
                        "307" => 307,
                        "204" => 204,
                        _ => 201,
                    };
                    let body = if status == 204 { Bytes::new() } else { made.into() };
                    effect.answer = Some((status, body));
                    effect.answer.clone().unwrap_or_default()
                }
            }
        };
        match what.as_str() {
            "cut" => return Err(std::io::ErrorKind::ConnectionReset.into()),
            "500" => return Ok(whole(500, "trouble")),
            "401" => return Ok(whole(401, "who?")),
            "late" => tokio::time::sleep(Duration::from_millis(700)).await,
            "slow" => tokio::time::sleep(Duration::from_millis(5)).await,
            "gate" => self.gate.notified().await,
            "large" => return Ok(whole(201, vec![b'l'; 200_000])),
            "broken" => {
                let pieces = [
                    Ok(Frame::data(Bytes::from_static(b"half"))),
                    Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset)),
                ];
                let pieces = futures_util::stream::iter(pieces).then(|piece| async {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    piece
                });
                return Ok(Response::new(BodyExt::boxed(StreamBody::new(pieces))));
            }
            _ => {}
        }
        let mut answer = if what == "chunked" {
            let pieces: Vec<_> =
                answer.chunks(100).map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece)))).collect();
            Response::new(BodyExt::boxed(StreamBody::new(futures_util::stream::iter(pieces))))
        } else {
            whole(status, answer)
        };
        *answer.status_mut() = status.try_into().expect("a status");
        let fields = answer.headers_mut();
        for (name, value) in [
            ("location", "/api/things/1"),
            ("etag", "\"v1\""),
            ("set-cookie", "session=secret"),
            ("connection", "x-hop"),
            ("x-hop", "1"),
            ("x-request-id", "r1"),
        ] {
            fields.insert(name, value.parse().expect("a value"));
        }
        Ok(answer)
    }
}

/// One sink and one route; the book is below the gateway's own folder as long as the test lives.
struct Rig {
    gateway: Gateway,
    service: Arc<Service>,
    task: JoinHandle<()>,
    _books: tempfile::TempDir,
}

impl Rig {
    async fn start(service: Service, sink: &str, route: &str) -> Self {
        let (service, url, task) = service.start().await;
        let books = tempfile::tempdir().expect("a folder");
        let timeout = if sink.contains("request_timeout") { "" } else { "request_timeout = \"400ms\"\n" };
        let toml = format!(
            "[sinks.pay]\ntype = \"http\"\nurl = \"{url}\"\nanswers = {:?}\n{timeout}{sink}\n\
             [routes.pay]\nsink = \"pay\"\nwait = \"300ms\"\n{route}\n",
            books.path().display().to_string()
        );
        let mut gateway = Gateway::new(&toml);
        gateway.start().await;
        Self { gateway, service, task, _books: books }
    }

    fn client(&self) -> HttpClient {
        HttpClient::new(self.gateway.listen())
    }
}

async fn post(client: &mut HttpClient, case: &str, what: &str, body: &str) -> Answer {
    let key = format!("key-{case}");
    let headers = [("idempotency-key", key.as_str()), ("x-case", case), ("x-do", what)];
    client.post("/v1/pay/things?a=b%20c", &headers, body.to_owned()).await.expect("the gateway answers")
}

fn problem(answer: &Answer) -> String {
    assert_eq!(answer.header("content-type"), "application/problem+json", "{}", answer.text());
    let json = answer.json();
    assert_eq!(json["status"], answer.status, "{json}");
    json["type"].as_str().and_then(|uri| uri.rsplit('/').next()).unwrap_or_default().to_owned()
}

const BY_KEY: &str = "idempotency_key = \"require\"";

#[tokio::test(flavor = "multi_thread")]
async fn copies_get_the_first_answer_byte_for_byte() {
    let mut rig = Rig::start(Service::default(), "", BY_KEY).await;
    let mut client = rig.client();
    for (what, status) in [("", 201), ("422", 422), ("307", 307), ("204", 204), ("chunked", 201)] {
        let case = format!("case{what}");
        let first = post(&mut client, &case, what, "{\"a\":1}").await;
        assert_eq!((first.status, first.header("idempotent-replayed")), (status, ""), "{what}");
        assert_eq!(first.header("oncegate-outcome"), "written");
        assert_eq!((first.header("set-cookie"), first.header("x-hop")), ("session=secret", ""));
        for start in 0..2 {
            let copy = post(&mut client, &case, what, "{\"a\":1}").await;
            assert_eq!((copy.status, copy.header("idempotent-replayed")), (status, "true"), "{what} {start}");
            assert_eq!(copy.body, first.body, "{what}");
            for name in ["location", "etag", "content-length", "content-type"] {
                // A chunked first answer has a length by now, as the copy has.
                assert_eq!(copy.header(name), first.header(name), "{what} {name}");
            }
            assert_eq!((copy.header("set-cookie"), copy.header("x-request-id")), ("", ""), "b01 and b13");
            assert_eq!(copy.header("oncegate-outcome"), "duplicate");
            if start == 0 {
                rig.gateway.kill();
                rig.gateway.start().await;
            }
        }
        assert_eq!(rig.service.effects(&case).requests, 1, "{what}");
        let other = post(&mut client, &case, what, "{\"a\":2}").await;
        assert_eq!((other.status, problem(&other).as_str()), (422, "key-mismatch"));
        assert_eq!(rig.service.effects(&case).requests, 1, "{what}");
    }
    assert_eq!(rig.gateway.metric("oncegate_records_total", &["outcome=\"mismatch\""]).await, Some(1.0));
    let missing = client.post("/v1/pay/x", &[], "{}").await.expect("an answer");
    assert_eq!((missing.status, problem(&missing).as_str()), (400, "key-missing"));
    assert!(rig.gateway.terminate().await.success(), "{}", rig.gateway.log_tail(20));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_go_through_as_they_came_without_what_is_of_one_connection() {
    let rig = Rig::start(Service::default(), "", BY_KEY).await;
    let mut client = rig.client();
    let headers = [
        ("idempotency-key", "bare-key"),
        ("connection", "x-private"),
        ("x-private", "1"),
        ("x-kept", "2"),
        ("te", "trailers"),
        ("content-type", "text/weird"),
    ];
    let answer = client.post("/v1/pay/a%2Fb//c?d=%20&e", &headers, "\u{0}body").await.expect("an answer");
    assert_eq!(answer.status, 201, "{}", answer.text());
    let got = client.get("/v1/pay/large?x=1").await.expect("an answer");
    assert_eq!((got.status, got.body.len(), got.header("idempotent-replayed")), (200, 3_000_000, ""));
    let seen = rig.service.seen.lock().clone();
    let (method, target, fields) = &seen[0];
    assert_eq!((method, target.as_str()), (&Method::POST, "/api/a%2Fb//c?d=%20&e"));
    let field = |name: &str| fields.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    assert_eq!(
        (field("idempotency-key"), field("x-kept"), field("content-type")),
        ("bare-key", "2", "text/weird")
    );
    assert_eq!((field("x-private"), field("te"), field("connection")), ("", "", ""));
    assert_eq!((field("via"), field("content-length")), ("1.1 oncegate", "5"));
    assert!(field("forwarded").starts_with("for=127.0.0.1;host=\"127.0.0.1:"), "{}", field("forwarded"));
    assert_ne!(field("host"), rig.gateway.listen().to_string());
    assert_eq!((&seen[1].0, seen[1].1.as_str()), (&Method::GET, "/api/large?x=1"));
    for (path, status) in [("/v1/pay/../x", 400), ("/v1/other/x", 404)] {
        assert_eq!(
            client.post(path, &[("idempotency-key", "p")], "{}").await.expect("an answer").status,
            status
        );
    }
}

/// A service that hung after its head held a connection of the gateway for ever, and no bound counted it: enough of them, and nothing was
/// accepted any more.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_stands_still_is_cut_and_holds_its_place_until_then() {
    let rig = Rig::start(Service::default(), "max_concurrent = 2\nrequest_timeout = \"4s\"", BY_KEY).await;
    let stalled = (0..2).map(|_| {
        let mut client = rig.client();
        tokio::spawn(async move { client.get("/v1/pay/stalls").await.is_err() })
    });
    let stalled: Vec<_> = stalled.collect();
    let begun = std::time::Instant::now();
    let mut client = rig.client();
    while rig.service.seen.lock().len() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(10), "the service was not asked");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let full = client.get("/v1/pay/large").await.expect("an answer");
    assert_eq!(full.status, 429);
    assert_eq!(problem(&full), "too-many-requests");
    for cut in stalled {
        let cut = tokio::time::timeout(Duration::from_secs(20), cut).await.expect("it is cut");
        assert!(cut.expect("it ran"), "half an answer is no answer");
    }
    assert_eq!(client.get("/v1/pay/large").await.expect("an answer").status, 200, "the places are free");
}

#[tokio::test(flavor = "multi_thread")]
async fn a31_what_may_have_been_applied_is_never_sent_again() {
    let mut rig = Rig::start(Service::default(), "", BY_KEY).await;
    let mut client = rig.client();
    for (what, status, slug) in [
        ("500", 502, "upstream-outcome-unknown"),
        ("cut", 502, "upstream-outcome-unknown"),
        ("broken", 502, "upstream-outcome-unknown"),
        ("late", 504, "upstream-timeout"),
    ] {
        let first = post(&mut client, what, what, "{}").await;
        assert_eq!((first.status, problem(&first).as_str()), (status, slug), "{what}");
        assert_eq!((first.json()["state"].as_str(), first.header("retry-after")), (Some("unknown"), ""));
        for start in 0..2 {
            let copy = post(&mut client, what, "", "{}").await;
            assert_eq!((copy.status, problem(&copy).as_str()), (502, "upstream-outcome-unknown"), "{what}");
            if start == 0 {
                rig.gateway.kill();
                rig.gateway.start().await;
            }
        }
        assert_eq!(rig.service.effects(what).requests, 1, "{what}");
    }
    // A kill while the service is at work.
    let gone = {
        let mut client = rig.client();
        tokio::spawn(async move {
            let headers = [("idempotency-key", "killed"), ("x-case", "killed"), ("x-do", "gate")];
            client.post("/v1/pay/x", &headers, "{}").await.is_err()
        })
    };
    while rig.service.effects("killed").requests == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    rig.gateway.kill();
    rig.service.gate.notify_waiters();
    assert!(gone.await.expect("it ended"));
    rig.gateway.start().await;
    let headers = [("idempotency-key", "killed"), ("x-case", "killed")];
    let copy = client.post("/v1/pay/x", &headers, "{}").await.expect("an answer");
    assert_eq!((copy.status, problem(&copy).as_str()), (502, "upstream-outcome-unknown"));
    assert_eq!(rig.service.effects("killed").requests, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a29_what_was_surely_not_applied_leaves_its_key_free() {
    let rig = Rig::start(Service::default(), "server_errors = \"retry\"", BY_KEY).await;
    let mut client = rig.client();
    for (what, status) in [("429", 429), ("401", 401), ("500", 500)] {
        let first = post(&mut client, what, what, "{}").await;
        assert_eq!((first.status, first.header("oncegate-outcome")), (status, "rejected"), "{what}");
        let next = post(&mut client, what, "", "{\"mended\":true}").await;
        assert_eq!((next.status, next.header("idempotent-replayed")), (201, ""), "{what}");
        assert_eq!(
            post(&mut client, what, "", "{\"mended\":true}").await.header("idempotent-replayed"),
            "true"
        );
    }
    // The service is gone, and comes back.
    rig.task.abort();
    while !rig.task.is_finished() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let address = rig.gateway.listen();
    let mut fresh = HttpClient::new(address);
    let answer = loop {
        // The connection kept from before may still be served.
        let answer = post(&mut fresh, &format!("down{}", rand::rng().random::<u32>()), "cut", "{}").await;
        if answer.status != 502 {
            break answer;
        }
    };
    assert_eq!((answer.status, problem(&answer).as_str()), (503, "unavailable"));
    assert!(answer.text().contains("nothing was sent"), "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_in_flight_waits_and_a_caller_that_goes_away_cancels_nothing() {
    let (service, url, _task) = Service::default().start().await;
    let books = tempfile::tempdir().expect("a folder");
    let mut gateway = Gateway::new(&format!(
        "[sinks.pay]\ntype = \"http\"\nurl = \"{url}\"\nanswers = {:?}\n[routes.pay]\nsink = \"pay\"\nwait = \"300ms\"\n{BY_KEY}\n",
        books.path().display().to_string()
    ));
    gateway.start().await;
    let listen = gateway.listen();
    let first = tokio::spawn(async move {
        let mut client = HttpClient::new(listen).with_patience(Duration::from_millis(500));
        let headers = [("idempotency-key", "key-slow"), ("x-case", "slow"), ("x-do", "gate")];
        client.post("/v1/pay/things?a=b%20c", &headers, "{}").await.is_err()
    });
    while service.effects("slow").requests == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut client = HttpClient::new(listen);
    let asked = Instant::now();
    let copy = post(&mut client, "slow", "", "{}").await;
    assert_eq!((copy.status, problem(&copy).as_str()), (409, "in-flight"));
    assert!(!copy.header("retry-after").is_empty() && asked.elapsed() >= Duration::from_millis(300));
    assert!(first.await.expect("it ended"), "its caller has gone");
    let waits = tokio::spawn(async move { post(&mut HttpClient::new(listen), "slow", "", "{}").await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    service.gate.notify_one();
    let copy = waits.await.expect("it ended");
    assert_eq!((copy.status, copy.header("idempotent-replayed")), (201, "true"), "{}", copy.text());
    assert_eq!(service.effects("slow").requests, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_too_large_to_keep_is_refused_to_all_alike() {
    let rig = Rig::start(Service::default(), "stored_answer_max = \"100KiB\"", BY_KEY).await;
    let mut client = rig.client();
    let first = post(&mut client, "large", "large", "{}").await;
    assert_eq!((first.status, problem(&first).as_str()), (410, "answer-not-kept"));
    assert_eq!(first.json()["state"], "completed");
    let copy = post(&mut client, "large", "large", "{}").await;
    assert_eq!((copy.status, &copy.body, copy.header("idempotent-replayed")), (410, &first.body, "true"));
    assert_eq!(rig.service.effects("large").requests, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_come_from_the_body_where_the_caller_gives_none() {
    let route = "key = \"/id\"\nkeyless = \"pass\"\n[routes.pay.http]\nbearer = \"0123456789abcdef\"\n";
    let rig = Rig::start(Service::default(), "make_key = true", route).await;
    let mut client = rig.client();
    let token = ("authorization", "Bearer 0123456789abcdef");
    let headers = [token, ("x-case", "id")];
    let first = client.post("/v1/pay", &headers, "{\"id\":1}").await.expect("an answer");
    let copy = client.post("/v1/pay", &headers, "{\"id\":1}").await.expect("an answer");
    assert_eq!((first.status, copy.header("idempotent-replayed")), (201, "true"));
    assert_eq!(copy.body, first.body);
    let seen = rig.service.seen.lock().clone();
    let made =
        seen[0].2.get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default().to_owned();
    assert!(made.len() == 34 && made.starts_with('"'), "{made}");
    assert!(!seen[0].2.contains_key("authorization"), "the gateway's token stays here");
    // Without a key: as if the gateway were not there.
    for _ in 0..2 {
        let answer = client.post("/v1/pay", &[token, ("x-case", "none")], "{}").await.expect("an answer");
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, ""));
    }
    assert_eq!((rig.service.effects("id").requests, rig.service.effects("none").requests), (1, 2));
    assert_eq!(client.get("/v1/pay").await.expect("an answer").status, 401);
}

/// Without `ONCEGATE_KILLS`.
const KILLS: usize = 25;

/// What one caller was told of a key.
#[derive(Clone, Debug)]
struct Told {
    case: String,
    status: u16,
    location: String,
    body: Bytes,
    problem: bool,
}

/// Callers that send keys and copies of keys, while the gateway is killed at random moments.
async fn drill(honours: bool, kills: usize) -> (BTreeMap<String, Vec<Told>>, Arc<Service>) {
    let wild = Some(Mutex::new(StdRng::seed_from_u64(SEED)));
    let sink = if honours { "on_unknown = \"retry\"\nattempts = 2" } else { "" };
    let mut rig = Rig::start(Service { honours, wild, ..Service::default() }, sink, BY_KEY).await;
    let (over, next) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let callers: Vec<_> = (0..6)
        .map(|caller| {
            let (over, next, listen) = (over.clone(), next.clone(), rig.gateway.listen());
            tokio::spawn(async move {
                let mut random = StdRng::seed_from_u64(SEED + caller);
                let mut client = HttpClient::new(listen);
                let mut told = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    let newest = next.load(Ordering::Relaxed);
                    let number = if newest > 0 && random.random_bool(0.4) {
                        random.random_range(newest.saturating_sub(50)..newest)
                    } else {
                        next.fetch_add(1, Ordering::Relaxed)
                    };
                    let case = format!("n{number}");
                    let quoted = format!("\"key-{case}\"");
                    // Some write it with quotes, some without.
                    let key =
                        if random.random_bool(0.5) { quoted.as_str() } else { quoted.trim_matches('"') };
                    let headers = [("idempotency-key", key), ("x-case", case.as_str())];
                    let Ok(answer) = client.post("/v1/pay/n", &headers, "{}").await else {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        continue;
                    };
                    let problem = answer.header("content-type") == "application/problem+json";
                    let location = answer.header("location").to_owned();
                    told.push(Told { case, status: answer.status, location, body: answer.body, problem });
                }
                told
            })
        })
        .collect();
    let mut random = StdRng::seed_from_u64(SEED);
    rig.gateway.goes_through(kills, 50..400, &mut random).await;
    over.store(true, Ordering::Relaxed);
    let mut all = BTreeMap::<String, Vec<Told>>::new();
    for caller in callers {
        for told in caller.await.expect("a caller") {
            all.entry(told.case.clone()).or_default().push(told);
        }
    }
    // Each key once more, until there is no more to be learnt of it.
    let mut client = rig.client();
    let deadline = Instant::now() + oncegate_tests::for_kills(Duration::from_secs(60), KILLS);
    for number in 0..next.load(Ordering::Relaxed) {
        let case = format!("n{number}");
        let key = format!("key-{case}");
        loop {
            let headers = [("idempotency-key", key.as_str()), ("x-case", case.as_str())];
            let answer = client.post("/v1/pay/n", &headers, "{}").await.expect("the gateway runs");
            let problem = answer.header("content-type") == "application/problem+json";
            assert!(Instant::now() < deadline, "{case}: {}", answer.text());
            if matches!(answer.status, 429 | 409 | 503) {
                continue;
            }
            let location = answer.header("location").to_owned();
            let told =
                Told { case: case.clone(), status: answer.status, location, body: answer.body, problem };
            all.entry(case).or_default().push(told);
            break;
        }
    }
    assert!(rig.gateway.terminate().await.success(), "{}", rig.gateway.log_tail(20));
    (all, rig.service)
}

/// Every answer to one key is the same bytes; how many keys have one.
fn check(all: &BTreeMap<String, Vec<Told>>, service: &Service) -> usize {
    let mut answered = 0;
    for (case, told) in all {
        let effects = service.effects(case);
        let answers: Vec<&Told> = told.iter().filter(|told| !told.problem && told.status != 429).collect();
        let Some(first) = answers.first() else { continue };
        answered += 1;
        assert!(effects.applied >= 1, "{case}: answered and not applied: {told:?}");
        for answer in &answers {
            assert_eq!(
                (answer.status, &answer.location, &answer.body),
                (first.status, &first.location, &first.body),
                "{case}"
            );
        }
        assert_eq!(Some((first.status, first.body.clone())), effects.answer, "{case}");
        // Once answered, no caller was told later that nothing is known.
        let last = told.last().expect("there is one");
        assert!(!last.problem, "{case}: the answer was lost: {told:?}");
    }
    answered
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_gives_each_key_one_effect_at_most_through_kills() {
    let (all, service) = drill(false, oncegate_tests::kills(KILLS)).await;
    let answered = check(&all, &service);
    let unknown = all.values().filter(|told| told.last().is_some_and(|last| last.status == 502)).count();
    println!("stop: {} keys, {answered} answered, {unknown} unknown", all.len());
    assert!(answered > 200 && unknown > 10, "{answered} answered, {unknown} unknown");
    for (case, effects) in service.effects.lock().iter() {
        assert!(effects.requests <= 1, "{case} went out {} times", effects.requests);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_gives_each_key_one_effect_through_kills_where_the_service_honours_keys() {
    let (all, service) = drill(true, oncegate_tests::kills(KILLS)).await;
    let answered = check(&all, &service);
    println!("retry: {} keys, {answered} answered", all.len());
    assert_eq!(answered, all.len(), "every key has its answer in the end");
    assert!(answered > 100, "{answered}");
    let again = service.effects.lock().values().filter(|effects| effects.requests > 1).count();
    assert!(again > 10, "only {again} keys were sent again");
    for (case, effects) in service.effects.lock().iter() {
        assert_eq!(effects.applied, 1, "{case}");
    }
}
