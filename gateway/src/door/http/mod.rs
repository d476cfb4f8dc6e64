//! The HTTP door: `POST /v1/{route}` with one JSON object, a JSON array, or NDJSON.
//!
//! A request's journey: [`head`] decides what can be decided before the body is read, [`body`] reads it, the route names
//! and submits its records ([`several`] for more than one), [`reply`] answers. [`listen`] keeps the sockets.

use std::{collections::HashMap, io, net::SocketAddr, sync::Arc, time::Duration};

use adapters::upstream::Passing;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, header, request::Parts};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use tokio::{
    net::TcpListener,
    time::{Instant, timeout_at},
};
use tracing::debug;

use self::{
    body::{Body, Patience},
    forward::Forward,
    head::{Plan, one_record_per_key, plan, route_of},
    problem::{Kind, Trouble},
    reply::{About, Reply},
    several::Several,
};
use crate::{
    door::Submit,
    metrics::{DoorMetrics, Metrics, RouteMetrics, Stage},
    naming::{Chunk, Headers, Record, split::Body as Shape},
};

mod body;
pub mod forward;
mod head;
pub(crate) mod listen;
pub mod problem;
mod reply;
mod several;
mod stream;

pub use listen::{Drained, Draining, ListenOptions};
pub use reply::PROBLEM_BASE;

/// An early answer reads so much of a small body first, so that the connection can be kept.
const DISCARD: u64 = 64 << 10;

/// Bounds of the door as a whole. A route's own are its [`crate::door::HttpLimits`].
#[derive(Clone, Debug)]
pub struct HttpOptions {
    /// Of its connections.
    pub listen: ListenOptions,
    /// Nothing of a body came for so long: 408.
    pub body_idle: Duration,
    /// A request must have its answer within this time.
    pub request_timeout: Duration,
    /// Requests in flight; above 429.
    pub max_requests: usize,
    /// Body bytes held for requests in flight; above 429.
    pub max_bytes: u64,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            listen: ListenOptions::default(),
            body_idle: Duration::from_secs(20),
            request_timeout: Duration::from_secs(300),
            max_requests: 20_000,
            max_bytes: 1 << 30,
        }
    }
}

/// The HTTP door, bound to its address.
pub struct HttpDoor<S> {
    listener: TcpListener,
    shared: Shared<S>,
}

struct Shared<S> {
    options: HttpOptions,
    routes: HashMap<String, (Arc<S>, Arc<RouteMetrics>)>,
    forwards: HashMap<String, Arc<Forward>>,
    metrics: Arc<Metrics>,
    draining: Draining,
}

impl<S: Submit> HttpDoor<S> {
    /// Binds. Must be called inside a tokio runtime. `draining` is shared with the admin listener.
    pub fn bind(
        address: SocketAddr,
        options: HttpOptions,
        routes: impl IntoIterator<Item = Arc<S>>,
        metrics: Arc<Metrics>,
        draining: Draining,
    ) -> io::Result<Self> {
        let listener = listen::bind(address)?;
        let routes = routes
            .into_iter()
            .map(|route| (route.route().to_owned(), (route.clone(), metrics.route(route.route()))))
            .collect();
        let forwards = HashMap::new();
        Ok(Self { listener, shared: Shared { options, routes, forwards, metrics, draining } })
    }

    /// Serves these routes too.
    pub fn with_forwards(mut self, forwards: impl IntoIterator<Item = Arc<Forward>>) -> Self {
        let named = forwards.into_iter().map(|forward| (forward.name().to_owned(), forward));
        self.shared.forwards.extend(named);
        self
    }

    /// Where it listens.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `shutdown` is ready; then says not ready, serves on for the drain delay, stops accepting, lets
    /// requests in flight finish, and cuts off what is left at the deadline.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> Drained {
        let options = self.shared.options.listen.clone();
        let draining = self.shared.draining.clone();
        listen::serve(self.listener, Arc::new(self.shared), &options, &draining, shutdown).await
    }
}

/// What an answer is made of: bytes, or the body of another answer on its way through.
type Out = Response<Either<Full<Bytes>, Passing>>;

impl<S: Submit> listen::Handle for Shared<S> {
    type Body = Either<Full<Bytes>, Passing>;

    async fn handle(&self, request: Request<Incoming>) -> Out {
        let (head, incoming) = request.into_parts();
        let door = self.metrics.door();
        let reply = match InFlight::request(door, self.options.max_requests) {
            Some(in_flight) => match forward::route_of(&head.uri).and_then(|name| self.forwards.get(name)) {
                Some(forward) => Box::pin(forward.request(self, &head, incoming, in_flight)).await,
                None => self.request(&head, incoming, in_flight).await.map(Either::Left),
            },
            None => {
                let detail = format!("{} requests are in flight", self.options.max_requests);
                self.refuse(&Trouble::new(Kind::TooManyRequests, detail), &head, incoming, About::default())
                    .await
                    .map(Either::Left)
            }
        };
        door.response(reply.status());
        reply
    }

    fn connections(&self, change: i64) {
        self.metrics.door().connections.inc_by(change);
    }
}

impl<S: Submit> Shared<S> {
    async fn request(&self, head: &Parts, incoming: Incoming, mut in_flight: InFlight<'_>) -> Reply {
        let started = std::time::Instant::now();
        let Some((route, metrics)) = route_of(head.uri.path()).and_then(|name| self.routes.get(name)) else {
            let trouble = Trouble::new(Kind::UnknownRoute, "records are written by POST /v1/{route}");
            return self.refuse(&trouble, head, incoming, About::default()).await;
        };
        let about = self.about(route, &head.headers);
        let plan = plan(head, route.limits()).and_then(|plan| {
            let stream = if plan.lines { several::STREAM_BYTES } else { u64::MAX };
            in_flight.hold(plan.length.unwrap_or(0).min(stream), self.options.max_bytes)?;
            match route.not_ready() {
                Some(reason) => Err(Trouble::new(Kind::Unavailable, reason)),
                None => Ok(plan),
            }
        });
        let plan = match plan {
            Ok(plan) => plan,
            Err(trouble) => return self.refuse(&trouble, head, incoming, about).await,
        };
        let patience = Patience {
            idle: self.options.body_idle,
            until: Instant::from_std(started) + self.options.request_timeout,
        };
        let limits = route.limits();
        let limit = if plan.lines { limits.max_stream } else { limits.max_body as u64 };
        let mut body = Body::new(incoming, plan.coding, plan.length, limit, patience);
        let several =
            || Several { route, metrics, request: &head.headers, started, deadline: patience.until, about };
        let mut reply = if plan.lines {
            Box::pin(several().lines(&mut body)).await
        } else {
            match self.collect(&mut body, plan, &mut in_flight).await {
                Err(trouble) => self.early(&trouble, about),
                Ok(bytes) => {
                    metrics.observe(Stage::Receive, started.elapsed());
                    if Shape::sniff(&bytes) != Some(Shape::Array) {
                        self.one(route, metrics, &head.headers, &bytes, patience.until).await
                    } else if plan.keyed && !limits.keyed_batches {
                        reply::problem(&one_record_per_key(), about)
                    } else {
                        drop(body);
                        Box::pin(several().array(bytes)).await
                    }
                }
            }
        };
        if reply.status().is_client_error() && plan.lines {
            close(&mut reply);
        }
        metrics.observe(Stage::Answer, started.elapsed());
        reply
    }

    /// One object: named, answered at once if it is a copy, submitted otherwise.
    async fn one(
        &self,
        route: &Arc<S>,
        metrics: &RouteMetrics,
        headers: &HeaderMap,
        payload: &Bytes,
        deadline: Instant,
    ) -> Reply {
        let naming = std::time::Instant::now();
        let mut chunk = Chunk::default();
        let record = Record { headers: Headers::Http(headers), ..Record::new(payload, route.arrival_us()) };
        route.name(&record, &mut chunk);
        metrics.observe(Stage::Name, naming.elapsed());
        let answers = match route.peek(&chunk) {
            Some(answers) => answers,
            None => timeout_at(deadline, route.submit(chunk)).await.unwrap_or_default(),
        };
        let about = self.about(route, headers);
        match answers.first() {
            Some(answer) => reply::one(route.route(), answer, headers, about.retry_after_ms),
            // Silence is not success (rule 5).
            None => reply::problem(&(&crate::outcome::Problem::OutcomeUnknown).into(), about),
        }
    }

    async fn collect(
        &self,
        body: &mut Body,
        plan: Plan,
        in_flight: &mut InFlight<'_>,
    ) -> Result<Bytes, Trouble> {
        let promised = plan.length.unwrap_or(0);
        let max = self.options.max_bytes;
        let mut kept = 0;
        body.collect(|bytes| {
            kept += bytes as u64;
            in_flight.hold(kept.max(promised), max)
        })
        .await
    }

    /// Answers before the body was read. A small body that is on its way is dropped first; otherwise the connection closes.
    async fn refuse(&self, trouble: &Trouble, head: &Parts, incoming: Incoming, about: About<'_>) -> Reply {
        let mut reply = reply::problem(trouble, self.with_retry(about));
        debug!(status = reply.status().as_u16(), detail = trouble.detail, "refused by its head");
        let length = head
            .headers
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        let comes = !hyper::body::Body::is_end_stream(&incoming);
        if comes
            && !head.headers.contains_key(header::EXPECT)
            && length.is_some_and(|length| length <= DISCARD)
        {
            let patience =
                Patience { idle: Duration::from_secs(1), until: Instant::now() + Duration::from_secs(2) };
            let mut body = Body::new(incoming, head::Coding::Identity, length, DISCARD, patience);
            if body.discard().await {
                return reply;
            }
            close(&mut reply);
        } else if comes {
            close(&mut reply);
        }
        reply
    }

    /// Answers while the body is being read.
    fn early(&self, trouble: &Trouble, about: About<'_>) -> Reply {
        let mut reply = reply::problem(trouble, about);
        close(&mut reply);
        reply
    }

    fn about<'a>(&self, route: &'a Arc<S>, request: &'a HeaderMap) -> About<'a> {
        let retry_after = route.limits().retry_after;
        About {
            route: Some(route.route()),
            request: Some(request),
            retry_after_ms: u64::try_from(retry_after.as_millis()).unwrap_or(u64::MAX),
            ..About::default()
        }
    }

    fn with_retry<'a>(&self, about: About<'a>) -> About<'a> {
        About { retry_after_ms: about.retry_after_ms.max(1000), ..about }
    }
}

fn close(reply: &mut Reply) {
    reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
}

/// A request in flight and the body bytes held for it. Given back when dropped.
struct InFlight<'a> {
    door: &'a DoorMetrics,
    bytes: u64,
}

impl<'a> InFlight<'a> {
    fn request(door: &'a DoorMetrics, max: usize) -> Option<Self> {
        // `inc` answers with the value before.
        let in_flight = Self { door, bytes: 0 };
        let before = door.requests.inc();
        (before < i64::try_from(max).unwrap_or(i64::MAX)).then_some(in_flight)
    }

    /// Holds `bytes` in all.
    fn hold(&mut self, bytes: u64, max: u64) -> Result<(), Trouble> {
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            return Ok(());
        }
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let before = self.door.body_bytes.inc_by(signed(more));
        if before.saturating_add(signed(more)) > signed(max) {
            self.door.body_bytes.dec_by(signed(more));
            return Err(Trouble::new(Kind::TooManyRequests, format!("{max} bytes of bodies are in flight")));
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.door.requests.dec();
        self.door.body_bytes.dec_by(i64::try_from(self.bytes).unwrap_or(i64::MAX));
    }
}

/// Headers of a request, a line each: how its body is to be read, or why not.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz_head(bytes: &[u8]) {
    let mut request = Request::post("/v1/orders");
    for line in bytes.split(|byte| *byte == b'\n') {
        let at = line.iter().position(|byte| *byte == b':').unwrap_or(line.len());
        let (name, value) = (&line[..at], line.get(at + 1..).unwrap_or_default());
        let name = header::HeaderName::from_bytes(name);
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(value.trim_ascii())) {
            request = request.header(name, value);
        }
    }
    let Ok(request) = request.body(()) else { return };
    let (parts, ()) = request.into_parts();
    let key = crate::key::KeySpec::idempotency_key();
    for key in [key.clone(), key.strict(true)] {
        let mut limits = crate::door::HttpLimits::new(key);
        limits.bearer = Some(crate::door::Bearer::new("token"));
        for keyed_batches in [false, true] {
            limits.keyed_batches = keyed_batches;
            drop(head::plan(&parts, &limits));
        }
    }
    head::echoed_key(&parts.headers);
}
