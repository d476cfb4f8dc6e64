//! Write proxy before any HTTP service: `/v1/{route}/..` goes through once a key, and copies get the first answer.
//!
//! A request's journey: what its head decides, its body, [`name`], the book (`adapters::upstream`), the service, [`rules`], the book
//! again, the answer; a copy that comes soon has its answer from [`recent`]. [`fields`] says which header fields go through. What is between the book and the book is owned by a task of its
//! own: a caller that goes away cancels nothing half way.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use adapters::upstream::{
    Begin, Book, BookConfig, Found, Kept, NameSecret, Passing, Sent, Upstream, UpstreamAnswer, UpstreamConfig,
};
use bytes::Bytes;
use dedup_store::{Algorithm, Fingerprint, Hasher, Identity};
use http::{HeaderMap, HeaderValue, Method, Response, Uri, header, request::Parts};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use tokio::{
    sync::{Semaphore, oneshot},
    time::{Instant, timeout, timeout_at},
};
use tracing::{debug, warn};

use self::{
    fields::{Caller, OUTCOME, REPLAYED},
    live::Live,
    name::{Asked, name},
    recent::Recent,
    rules::{After, Next, after, next},
};
pub use self::{
    name::ForwardNaming,
    rules::{AnswerRules, OnUnknown, ServerErrors},
};
use super::{
    InFlight, Out, Shared,
    body::{Body, Patience},
    head::{Coding, IDEMPOTENCY_KEY, authorize, content_length, expectation, too_large},
    listen::Peer,
    problem::{Kind, Trouble},
    reply::{self, About, Reply},
};
use crate::{
    door::{HttpLimits, Submit},
    key::IdempotencyKey,
    metrics::{Metrics, RouteMetrics, Stage},
    outcome::Outcome,
};

mod fields;
mod live;
mod name;
mod recent;
mod rules;

/// Between two attempts; doubled each time, up to [`BACKOFF_MOST`].
const BACKOFF: Duration = Duration::from_millis(100);
const BACKOFF_MOST: Duration = Duration::from_secs(5);

/// One route to an HTTP service.
#[derive(Clone, Debug)]
pub struct ForwardConfig {
    /// Its name in URLs.
    pub name: String,
    /// The service.
    pub upstream: UpstreamConfig,
    /// The folder of its book.
    pub book: std::path::PathBuf,
    /// What keys and answers may take on disk, bytes.
    pub max_bytes: u64,
    /// What names a request.
    pub naming: ForwardNaming,
    /// What answers mean.
    pub rules: AnswerRules,
    /// A request without a key goes through as if the gateway were not there; else it is refused.
    pub pass_keyless: bool,
    /// A request without `Idempotency-Key` gets one, made from its key.
    pub make_key: bool,
    /// Requests at the service at a time; above 429.
    pub max_concurrent: usize,
    /// How long copies are recognised.
    pub window: Duration,
    /// How long a copy in flight is waited for.
    pub wait: Duration,
    /// Of bodies, tokens and `Retry-After`.
    pub limits: HttpLimits,
}

/// One route to an HTTP service, at work.
pub struct Forward {
    config: ForwardConfig,
    hasher: Hasher,
    book: Book,
    upstream: Upstream,
    live: Arc<Live>,
    recent: Recent,
    room: Arc<Semaphore>,
    metrics: Arc<RouteMetrics>,
}

/// A request that has its key.
struct Job {
    name: Fingerprint,
    begin: Begin,
    method: Method,
    target: String,
    headers: HeaderMap,
    caller: Caller,
    body: Bytes,
}

/// An answer and what it is counted as.
struct Done {
    reply: Reply,
    outcome: Outcome,
}

/// The route in the path of `/v1/{route}` or `/v1/{route}/..`.
pub(super) fn route_of(uri: &Uri) -> Option<&str> {
    uri.path().strip_prefix("/v1/")?.split('/').next()
}

/// Whether a service that decodes before it looks at segments, or cuts parameters off them, could be led out of its path.
fn leads_upwards(path: &str) -> bool {
    let mut plain = path.to_ascii_lowercase();
    for (code, character) in [("%2e", "."), ("%2f", "/"), ("%5c", "\\"), ("%3b", ";")] {
        plain = plain.replace(code, character);
    }
    plain.split(['/', '\\']).any(|segment| matches!(segment.split(';').next(), Some("." | "..")))
}

/// Path and query behind the route, for the service. Segments that lead upwards are refused: they could leave the service's own path.
fn target(uri: &Uri) -> Result<String, Trouble> {
    let rest = uri.path().strip_prefix("/v1/").unwrap_or_default();
    let path = rest.find('/').map_or("/", |at| &rest[at..]);
    if leads_upwards(path) {
        return Err(Trouble::new(
            Kind::BadRequest,
            "the path has a segment `.` or `..`; send the path that it means",
        ));
    }
    Ok(match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    })
}

impl Forward {
    /// Opens the route's book. Blocking; asks the service nothing.
    pub fn open(config: ForwardConfig, metrics: &Metrics) -> Result<Self, String> {
        let book = BookConfig {
            folder: config.book.clone(),
            max_bytes: config.max_bytes,
            route: config.name.clone(),
            key_spec_id: config.naming.id(),
        };
        let mut fresh = NameSecret { route_id: rand::random(), secret: [0; 192] };
        rand::Rng::fill(&mut rand::rng(), &mut fresh.secret[..]);
        let book = Book::open(&book, fresh).map_err(|misfit| misfit.to_string())?;
        let NameSecret { route_id, secret } = book.secret().clone();
        let hasher = Hasher::new(&Identity {
            route_id,
            key_spec_id: config.naming.id(),
            // Callers may choose keys with bad intent.
            algorithm: Algorithm::SipHash24,
            secret,
        });
        Ok(Self {
            upstream: Upstream::new(config.upstream.clone())?,
            hasher,
            book,
            live: Arc::default(),
            recent: Recent::default(),
            room: Arc::new(Semaphore::new(config.max_concurrent)),
            metrics: metrics.route(&config.name),
            config,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// None if ready, else why not.
    pub fn not_ready(&self) -> Option<String> {
        self.book.broken().map(|fault| {
            format!("the book of answers has failed: {fault}; mend the disk and start the gateway again")
        })
    }

    /// Waits until nothing is on its way to the service, for so long at most. What then is has an unknown outcome.
    pub async fn close(&self, patience: Duration) {
        let all = u32::try_from(self.config.max_concurrent).unwrap_or(u32::MAX);
        if timeout(patience, self.room.acquire_many(all)).await.is_err() {
            warn!(route = self.name(), "ended with requests at the upstream: their outcome is unknown");
        }
    }

    /// One request of a caller.
    pub(super) async fn request<S: Submit>(
        self: &Arc<Self>,
        door: &Shared<S>,
        head: &Parts,
        incoming: Incoming,
        mut in_flight: InFlight<'_>,
    ) -> Out {
        let started = Instant::now();
        let about = self.about(&head.headers);
        let planned = self.plan(head).and_then(|(target, length)| {
            in_flight.hold(length.unwrap_or(0), door.options.max_bytes)?;
            Ok((target, length))
        });
        let (target, length) = match planned {
            Ok(planned) => planned,
            Err(trouble) => {
                let mut refused = door.refuse(&trouble, head, incoming, about).await;
                if trouble.kind == Kind::MethodNotAllowed {
                    let allow = HeaderValue::from_static("GET, HEAD, OPTIONS, POST, PUT, PATCH, DELETE");
                    refused.headers_mut().insert(header::ALLOW, allow);
                }
                return refused.map(Either::Left);
            }
        };
        let until = started + door.options.request_timeout;
        let patience = Patience { idle: door.options.body_idle, until };
        let mut body =
            Body::new(incoming, Coding::Identity, length, self.config.limits.max_body as u64, patience);
        let mut kept = 0;
        let collected = body.collect(|bytes| {
            kept += bytes as u64;
            in_flight.hold(kept.max(length.unwrap_or(0)), door.options.max_bytes)
        });
        let body = match collected.await {
            Ok(body) => body,
            Err(trouble) => return door.early(&trouble, about).map(Either::Left),
        };
        self.metrics.observe(Stage::Receive, started.elapsed());
        let caller = Caller {
            version: head.version,
            peer: head.extensions.get::<Peer>().map(|peer| peer.0),
            signed_on: self.config.limits.bearer.is_some(),
        };
        if head.method.is_safe() {
            return self.pass(head, &target, caller, body).await;
        }
        let asked = Asked { method: &head.method, target: &target, headers: &head.headers, body: &body };
        let done = match name(&self.config.naming, &self.hasher, &asked) {
            Err(trouble) if trouble.kind == Kind::KeyMissing && self.config.pass_keyless => {
                return self.pass(head, &target, caller, body).await;
            }
            Err(trouble) => Done { reply: reply::problem(&trouble, about), outcome: Outcome::Rejected },
            Ok((name, digest)) if let Some(done) = self.known(name, digest.0, &head.headers) => done,
            Ok((name, digest)) => {
                let begin = Begin {
                    name: name.0,
                    digest: digest.0,
                    now_ms: 0,
                    until_ms: 0,
                    sent_key: self.sent_key(name, &head.headers),
                };
                let (method, headers) = (head.method.clone(), head.headers.clone());
                self.spawned(Job { name, begin, method, target, headers, caller, body }, until).await
            }
        };
        let mut reply = done.reply;
        reply.headers_mut().insert(OUTCOME, HeaderValue::from_static(done.outcome.word()));
        self.metrics.observe(Stage::Answer, started.elapsed());
        reply.map(Either::Left)
    }

    fn about<'a>(&'a self, request: &'a HeaderMap) -> About<'a> {
        let retry_after = self.config.limits.retry_after;
        About {
            route: Some(self.name()),
            request: Some(request),
            retry_after_ms: u64::try_from(retry_after.as_millis()).unwrap_or(u64::MAX),
            ..About::default()
        }
    }

    /// What the head decides: token, method, expectation, path, size.
    fn plan(&self, head: &Parts) -> Result<(String, Option<u64>), Trouble> {
        authorize(&head.headers, &self.config.limits)?;
        if ![
            Method::GET,
            Method::HEAD,
            Method::OPTIONS,
            Method::POST,
            Method::PUT,
            Method::PATCH,
            Method::DELETE,
        ]
        .contains(&head.method)
        {
            let detail = format!("{} does not go through", head.method);
            return Err(Trouble::new(Kind::MethodNotAllowed, detail));
        }
        expectation(head)?;
        fields::framing(&head.headers, &self.config.naming)?;
        let target = target(&head.uri)?;
        let length = content_length(&head.headers)?;
        let limit = self.config.limits.max_body as u64;
        match (length, self.not_ready()) {
            (Some(length), _) if length > limit => Err(too_large(limit)),
            (_, Some(reason)) => Err(Trouble::new(Kind::Unavailable, reason)),
            (length, None) => Ok((target, length)),
        }
    }

    /// The `Idempotency-Key` that goes to the service: the caller's where it names the request, else one made from the key if the route
    /// says so.
    fn sent_key(&self, name: Fingerprint, headers: &HeaderMap) -> Bytes {
        let theirs = headers.get(IDEMPOTENCY_KEY).map(|value| Bytes::copy_from_slice(value.as_bytes()));
        let names = self.config.naming.key.explicit() != IdempotencyKey::Ignore;
        let make = self.config.make_key || self.config.rules.on_unknown == OnUnknown::Retry;
        match theirs {
            Some(theirs) if names || !make => theirs,
            _ if make => format!("\"{name}\"").into(),
            _ => Bytes::new(),
        }
    }

    /// Straight through, without a key.
    async fn pass(&self, head: &Parts, target: &str, caller: Caller, body: Bytes) -> Out {
        let Ok(place) = self.room.clone().try_acquire_owned() else {
            return reply::problem(&self.no_room(), self.about(&head.headers)).map(Either::Left);
        };
        let theirs = head.headers.get(IDEMPOTENCY_KEY).map_or(&b""[..], |value| value.as_bytes());
        let headers = fields::to_service(&head.headers, caller, theirs);
        let passed = self.upstream.pass(head.method.clone(), target, headers, body, place).await;
        let trouble = match passed {
            // Nobody asked for it: `Upgrade` stays behind.
            Ok(response) if response.status().is_informational() => {
                self.unknown(&format!("it answered {}", response.status().as_u16()), false)
            }
            Ok(response) => return through(response),
            Err(Sent::NotSent(reason)) => not_sent(&reason),
            Err(Sent::Unknown { reason, late }) => self.unknown(&reason, late),
            Err(Sent::Answer(answer)) => {
                self.unknown(&format!("it answered {}", answer.status.as_u16()), false)
            }
        };
        reply::problem(&trouble, self.about(&head.headers)).map(Either::Left)
    }

    /// What a copy of a request that was answered lately gets.
    fn known(&self, name: Fingerprint, digest: u64, request: &HeaderMap) -> Option<Done> {
        let kept = self.recent.find(name, now_ms())?;
        let done = match next(Found::Answered(kept), digest, &Bytes::new(), &self.config.rules) {
            Next::Replay(kept) => self.replay(name, request, &kept),
            _ => self.mismatch(name, request),
        };
        self.metrics.count(done.outcome, 1);
        Some(done)
    }

    /// Does the job in a task of its own, and waits for its answer.
    async fn spawned(self: &Arc<Self>, job: Job, until: Instant) -> Done {
        let request = job.headers.clone();
        let name = job.name;
        let (reply, answer) = oneshot::channel();
        let forward = self.clone();
        tokio::spawn(async move {
            let done = Box::pin(forward.job(job)).await;
            forward.metrics.count(done.outcome, 1);
            // The caller may have gone; a copy finds the answer in the book.
            drop(reply.send(done));
        });
        match timeout_at(until, answer).await {
            Ok(Ok(done)) => done,
            // Silence is not success (rule 5).
            _ => self.problem(
                &Trouble::new(Kind::InFlight, "it is still on its way; send it again with the same key"),
                name,
                &request,
                Outcome::Unknown,
            ),
        }
    }

    fn problem(&self, trouble: &Trouble, name: Fingerprint, request: &HeaderMap, outcome: Outcome) -> Done {
        let about = About { fingerprint: Some(name), outcome: Some(outcome), ..self.about(request) };
        Done { reply: reply::problem(trouble, about), outcome }
    }

    /// From the key to its answer.
    async fn job(&self, mut job: Job) -> Done {
        let until = Instant::now() + self.config.wait;
        let guard = loop {
            let mut first = match Live::enter(&self.live, job.name) {
                Ok(guard) => break guard,
                Err(first) => first,
            };
            // Its sender only ever goes.
            let ended = timeout_at(until, async { while first.changed().await.is_ok() {} }).await;
            if ended.is_err() {
                let trouble = Trouble::new(
                    Kind::InFlight,
                    "a request with this key is at the upstream; send it again with the same key",
                );
                return self.problem(&trouble, job.name, &job.headers, Outcome::Unknown);
            }
        };
        // What is at the service holds its place until its outcome is in the book.
        let Ok(_place) = self.room.try_acquire() else {
            return self.problem(&self.no_room(), job.name, &job.headers, Outcome::Unknown);
        };
        job.begin.now_ms = now_ms();
        job.begin.until_ms = job
            .begin
            .now_ms
            .saturating_add(i64::try_from(self.config.window.as_millis()).unwrap_or(i64::MAX));
        let found = match self.book.begin(job.begin.clone()).await {
            Ok(found) => found,
            Err(fault) => {
                return self.problem(
                    &Trouble::new(Kind::Unavailable, fault),
                    job.name,
                    &job.headers,
                    Outcome::Unknown,
                );
            }
        };
        let problem = |kind, detail: &str, outcome| {
            self.problem(&Trouble::new(kind, detail), job.name, &job.headers, outcome)
        };
        let done = match next(found, job.begin.digest, &job.begin.sent_key, &self.config.rules) {
            Next::Send { sent_key, open } => {
                job.begin.sent_key = sent_key;
                self.send(&job, open).await
            }
            Next::Replay(kept) => {
                let done = self.replay(job.name, &job.headers, &kept);
                self.recent.keep(job.name, kept);
                done
            }
            Next::Mismatch => self.mismatch(job.name, &job.headers),
            Next::Stopped => {
                let trouble = lost("an earlier attempt was sent and no answer is known", false);
                self.problem(&trouble, job.name, &job.headers, Outcome::Unknown)
            }
            Next::Full => problem(
                Kind::Unavailable,
                "the book of answers is full; wait until answers expire, raise answers_max_size, or lower window",
                Outcome::Unknown,
            ),
        };
        drop(guard);
        done
    }

    /// Sends the request until its outcome is known, or as often as the rules say.
    async fn send(&self, job: &Job, mut open: bool) -> Done {
        let rules = &self.config.rules;
        let headers = fields::to_service(&job.headers, job.caller, &job.begin.sent_key);
        let most = if rules.on_unknown == OnUnknown::Retry { rules.attempts } else { 1 };
        let mut backoff = BACKOFF;
        for attempt in 1.. {
            let sending = std::time::Instant::now();
            let sent =
                self.upstream.send(job.method.clone(), &job.target, headers.clone(), job.body.clone()).await;
            self.metrics.observe(Stage::Deliver, sending.elapsed());
            let (reason, late) = match after(sent, open, rules) {
                After::Keep(answer) => return self.keep(job, answer).await,
                After::Free(answer) => {
                    return match self.book.free(job.begin.name).await {
                        Ok(()) => self.given(job, answer, Outcome::Rejected),
                        Err(fault) => self.problem(
                            &self.unknown(&fault, false),
                            job.name,
                            &job.headers,
                            Outcome::Unknown,
                        ),
                    };
                }
                After::Pass(answer) => return self.given(job, answer, Outcome::Unknown),
                After::NotSent(reason) => {
                    let trouble = match self.book.free(job.begin.name).await {
                        Ok(()) => not_sent(&reason),
                        Err(fault) => self.unknown(&fault, false),
                    };
                    return self.problem(&trouble, job.name, &job.headers, Outcome::Unknown);
                }
                After::Unknown { reason, late } => (reason, late),
            };
            debug!(route = self.name(), attempt, reason, "the upstream's answer is unknown");
            if attempt >= most {
                return self.problem(&self.unknown(&reason, late), job.name, &job.headers, Outcome::Unknown);
            }
            open = true;
            tokio::time::sleep(backoff.mul_f64(rand::random_range(0.5..1.0))).await;
            backoff = (backoff * 2).min(BACKOFF_MOST);
        }
        self.problem(&self.unknown("it was not sent", false), job.name, &job.headers, Outcome::Unknown)
    }

    /// The answer is durable before anybody has it.
    async fn keep(&self, job: &Job, answer: UpstreamAnswer) -> Done {
        let kept = Kept {
            digest: job.begin.digest,
            until_ms: job.begin.until_ms,
            status: answer.status.as_u16(),
            head: fields::to_keep(&answer.headers),
            body: answer.body.clone(),
        };
        let settling = std::time::Instant::now();
        let kept = Arc::new(kept);
        if let Err(fault) = self.book.settle(job.begin.clone(), kept.clone()).await {
            return self.problem(&self.unknown(&fault, false), job.name, &job.headers, Outcome::Unknown);
        }
        self.metrics.observe(Stage::Settle, settling.elapsed());
        self.recent.keep(job.name, kept);
        if answer.body.is_none() {
            return self.not_kept(job.name, &job.headers, answer.status.as_u16(), Outcome::Written);
        }
        self.given(job, answer, Outcome::Written)
    }

    /// The service's answer as its first caller gets it.
    fn given(&self, job: &Job, answer: UpstreamAnswer, outcome: Outcome) -> Done {
        let Some(body) = answer.body else {
            let detail = format!(
                "the upstream answered {} with a body above stored_answer_max, {} bytes; raise it to see what it says",
                answer.status.as_u16(),
                self.config.upstream.max_answer
            );
            let trouble = Trouble::new(Kind::AnswerNotKept, detail);
            return self.problem(&trouble, job.name, &job.headers, outcome);
        };
        let mut reply = Response::new(Full::new(body));
        *reply.status_mut() = answer.status;
        *reply.headers_mut() = fields::to_caller(&answer.headers);
        Done { reply, outcome }
    }

    /// The first answer once more.
    fn replay(&self, name: Fingerprint, request: &HeaderMap, kept: &Kept) -> Done {
        let status = http::StatusCode::from_u16(kept.status).unwrap_or(http::StatusCode::BAD_GATEWAY);
        let mut done = match &kept.body {
            None => self.not_kept(name, request, kept.status, Outcome::Duplicate),
            Some(body) => {
                let mut reply = Response::new(Full::new(body.clone()));
                *reply.status_mut() = status;
                *reply.headers_mut() = fields::kept(&kept.head);
                Done { reply, outcome: Outcome::Duplicate }
            }
        };
        done.reply.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
        done
    }

    fn mismatch(&self, name: Fingerprint, request: &HeaderMap) -> Done {
        let detail = "this key came with another method, path or body; use a new key for a new request";
        self.problem(&Trouble::new(Kind::KeyMismatch, detail), name, request, Outcome::Mismatch)
    }

    fn not_kept(&self, name: Fingerprint, request: &HeaderMap, status: u16, outcome: Outcome) -> Done {
        let detail = format!(
            "the upstream answered {status} with a body above stored_answer_max, {} bytes: it took the request, and its answer is given to \
             nobody; ask it for what it made, and raise stored_answer_max",
            self.config.upstream.max_answer
        );
        let about = About { fingerprint: Some(name), ..self.about(request) };
        Done { reply: reply::problem(&Trouble::new(Kind::AnswerNotKept, detail), about), outcome }
    }

    fn no_room(&self) -> Trouble {
        let detail = format!("{} requests are at the upstream", self.config.max_concurrent);
        Trouble::new(Kind::TooManyRequests, detail)
    }

    /// What a caller is told of a key without outcome.
    fn unknown(&self, reason: &str, late: bool) -> Trouble {
        if self.config.rules.on_unknown == OnUnknown::Retry {
            let detail = format!(
                "the upstream: {reason}; send it again with the same key: it goes to the upstream under the same Idempotency-Key"
            );
            return Trouble::new(Kind::OutcomeUnknown, detail);
        }
        lost(reason, late)
    }
}

/// Nothing is sent again.
fn lost(reason: &str, late: bool) -> Trouble {
    let kind = if late { Kind::UpstreamTimeout } else { Kind::UpstreamUnknown };
    let detail = format!(
        "the upstream: {reason}; it may or may not have applied the request, which is not sent again under this key. Ask the upstream; if \
         it did not, send the request with a new key"
    );
    Trouble::new(kind, detail)
}

fn not_sent(reason: &str) -> Trouble {
    Trouble::new(
        Kind::Unavailable,
        format!(
            "the upstream cannot be reached: {reason}; nothing was sent, send it again with the same key"
        ),
    )
}

/// An answer on its way through.
fn through(response: Response<Passing>) -> Out {
    let (mut head, body) = response.into_parts();
    let length = head.headers.get(header::CONTENT_LENGTH).cloned();
    head.headers = fields::to_caller(&head.headers);
    // It goes through as it is framed; HEAD has a length and no body.
    if let Some(length) = length {
        head.headers.insert(header::CONTENT_LENGTH, length);
    }
    Response::from_parts(head, Either::Right(body))
}

/// Ms since the epoch.
fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_route_is_the_first_segment_and_the_rest_goes_through() {
        let uri = |text: &str| text.parse::<Uri>().unwrap();
        for (path, route, rest) in [
            ("/v1/pay", "pay", "/"),
            ("/v1/pay/", "pay", "/"),
            ("/v1/pay?a=1", "pay", "/?a=1"),
            ("/v1/pay/a%2Fb//c?d=e&f", "pay", "/a%2Fb//c?d=e&f"),
            ("/v1/pay/...", "pay", "/..."),
        ] {
            assert_eq!(route_of(&uri(path)), Some(route), "{path}");
            assert_eq!(target(&uri(path)).unwrap(), rest, "{path}");
        }
        assert_eq!(route_of(&uri("/v2/pay")), None);
        let coded = ["/v1/pay/..%2fadmin", "/v1/pay/..%5Cadmin", "/v1/pay/..;a=b/x", "/v1/pay/.%2e%3b/x"];
        for upwards in ["/v1/pay/../x", "/v1/pay/a/%2e%2E", "/v1/pay/./x"].into_iter().chain(coded) {
            assert_eq!(target(&uri(upwards)).unwrap_err().kind, Kind::BadRequest, "{upwards}");
        }
    }
}
