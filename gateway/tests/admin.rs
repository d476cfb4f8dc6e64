//! The admin listener over real sockets.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oncegate::{admin::Admin, door::http::Draining, metrics::Metrics, outcome::Outcome};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::oneshot,
};

struct Rig {
    address: std::net::SocketAddr,
    metrics: Arc<Metrics>,
    draining: Draining,
    away: Arc<AtomicBool>,
    _stop: oneshot::Sender<()>,
}

fn start() -> Rig {
    let (metrics, draining) = (Arc::new(Metrics::new()), Draining::default());
    let away = Arc::new(AtomicBool::new(false));
    let seen = away.clone();
    let admin = Admin::bind("127.0.0.1:0".parse().unwrap(), metrics.clone(), draining.clone())
        .unwrap()
        .check("route orders", move || seen.load(Ordering::Relaxed).then(|| "the sink is away".to_owned()));
    let address = admin.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    tokio::spawn(admin.serve(async move {
        let _told: Result<(), _> = stopped.await;
    }));
    Rig { address, metrics, draining, away, _stop: stop }
}

impl Rig {
    /// Status, head, body.
    async fn get(&self, line: &str, accept: &str) -> (u16, String, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{accept}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = tokio::time::timeout(Duration::from_secs(5), stream.read_to_string(&mut answer)).await;
        read.expect("no answer: hangs").unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), head.to_ascii_lowercase(), body.to_owned())
    }
}

#[tokio::test]
async fn j01_a_healthy_gateway_is_live_and_ready() {
    let rig = start();
    for path in ["/livez", "/readyz", "/healthz"] {
        let (status, _, body) = rig.get(&format!("GET {path}"), "").await;
        assert_eq!((status, body.as_str()), (200, "ok\n"), "{path}");
    }
    let (status, _, body) = rig.get("GET /readyz?verbose", "").await;
    assert_eq!((status, body.as_str()), (200, "[+]serving ok\n[+]route orders ok\nreadyz check passed\n"));
}

#[tokio::test]
async fn readyz_says_which_route_is_not_ready_and_why_while_livez_stays() {
    let rig = start();
    rig.away.store(true, Ordering::Relaxed);
    let (status, _, body) = rig.get("GET /readyz?verbose=1", "").await;
    assert_eq!(status, 503);
    assert_eq!(body, "[+]serving ok\n[-]route orders not ready: the sink is away\nreadyz check failed\n");
    assert_eq!(rig.get("GET /livez", "").await.0, 200);
}

#[tokio::test]
async fn j03_readyz_fails_as_soon_as_the_drain_begins() {
    let rig = start();
    rig.draining.begin();
    let (status, _, body) = rig.get("GET /readyz", "").await;
    assert_eq!(status, 503);
    assert!(body.contains("serving not ready: the gateway is going down"), "{body}");
    assert_eq!(rig.get("GET /livez", "").await.0, 200);
}

#[tokio::test]
async fn j05_metrics_come_as_openmetrics_or_text_as_asked() {
    let rig = start();
    rig.metrics.route("orders").count(Outcome::Written, 2);
    let (status, head, body) =
        rig.get("GET /metrics", "accept: application/openmetrics-text;version=1.0.0,*/*;q=0.1\r\n").await;
    assert_eq!(status, 200);
    assert!(
        head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
        "{head}"
    );
    assert!(body.ends_with("# EOF\n"));
    assert!(body.contains("oncegate_records_total{route=\"orders\",outcome=\"written\"} 2\n"), "{body}");
    let (_, head, body) = rig.get("GET /metrics", "").await;
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    assert!(!body.contains("# EOF"));
}

#[tokio::test]
async fn other_paths_and_methods_are_refused() {
    let rig = start();
    assert_eq!(rig.get("GET /nothing", "").await.0, 404);
    let (status, head, _) = rig.get("POST /readyz", "").await;
    assert!(status == 405 && head.contains("allow: get, head"), "{head}");
}
