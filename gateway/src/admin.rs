//! The admin listener: `/livez`, `/readyz`, `/healthz`, `/metrics`.

use std::{
    fmt::Write as _,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::net::TcpListener;

use crate::{
    door::http::{
        Drained, Draining, ListenOptions,
        listen::{self, Handle},
    },
    metrics::{Format, Metrics},
};

type Check = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// The admin listener, bound to its address.
pub struct Admin {
    listener: TcpListener,
    state: State,
}

struct State {
    metrics: Arc<Metrics>,
    draining: Draining,
    checks: Vec<(String, Check)>,
}

impl Admin {
    /// Binds. Must be called inside a tokio runtime. `draining` is shared with the doors.
    pub fn bind(address: SocketAddr, metrics: Arc<Metrics>, draining: Draining) -> io::Result<Self> {
        Ok(Self { listener: listen::bind(address)?, state: State { metrics, draining, checks: Vec::new() } })
    }

    /// Adds something that must be ready: `check` answers with the reason why it is not. For a route: its
    /// [`crate::door::Submit::not_ready`].
    pub fn check(
        mut self,
        name: impl Into<String>,
        check: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        self.state.checks.push((name.into(), Box::new(check)));
        self
    }

    /// Where it listens.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `shutdown`: give it a later one than the doors', so that `/readyz` tells of their drain.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> Drained {
        let options = ListenOptions {
            max_connections: 256,
            linger: Duration::from_millis(200),
            drain_deadline: Duration::from_secs(2),
            ..ListenOptions::default()
        };
        let draining = self.state.draining.clone();
        listen::serve(self.listener, Arc::new(self.state), &options, &draining, shutdown).await
    }
}

impl Handle for State {
    type Body = Full<Bytes>;

    async fn handle(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n".to_owned());
            refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            return refused;
        }
        let verbose = request.uri().query().is_some_and(|query| {
            query.split('&').any(|part| part == "verbose" || part.starts_with("verbose="))
        });
        match request.uri().path() {
            "/livez" => text(StatusCode::OK, "ok\n".to_owned()),
            "/readyz" | "/healthz" => self.ready(verbose),
            "/metrics" => {
                let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
                let format = Format::of_accept(accept);
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let now_ms = i64::try_from(now.as_millis()).unwrap_or(i64::MAX);
                let mut reply = text(StatusCode::OK, self.metrics.render(format, now_ms));
                let content_type = HeaderValue::from_static(format.content_type());
                reply.headers_mut().insert(header::CONTENT_TYPE, content_type);
                reply
            }
            _ => text(StatusCode::NOT_FOUND, "try /livez, /readyz?verbose or /metrics\n".to_owned()),
        }
    }
}

impl State {
    /// 200 if all checks pass. What fails is listed always, what passes with `verbose`.
    fn ready(&self, verbose: bool) -> Response<Full<Bytes>> {
        let drain = self.draining.begun().then(|| "the gateway is going down".to_owned());
        let checks = self.checks.iter().map(|(name, check)| (name.as_str(), check()));
        let mut lines = String::new();
        let mut ready = true;
        for (name, reason) in std::iter::once(("serving", drain)).chain(checks) {
            let written = match &reason {
                Some(reason) => writeln!(lines, "[-]{name} not ready: {reason}"),
                None if verbose => writeln!(lines, "[+]{name} ok"),
                None => Ok(()),
            };
            debug_assert!(written.is_ok(), "a String takes every write");
            ready &= reason.is_none();
        }
        match (ready, verbose) {
            (true, false) => text(StatusCode::OK, "ok\n".to_owned()),
            (true, true) => text(StatusCode::OK, lines + "readyz check passed\n"),
            (false, _) => text(StatusCode::SERVICE_UNAVAILABLE, lines + "readyz check failed\n"),
        }
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
