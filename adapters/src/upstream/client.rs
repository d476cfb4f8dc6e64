//! One request to the service and its answer. What is not surely unsent counts as sent.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use parking_lot::Mutex;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Sleep, timeout},
};

use crate::http_client::{NoAnswer, Place, Wire, shown, trust};

/// How long a connection may take to be ready again.
const REUSE: Duration = Duration::from_millis(20);

/// Where the service is and how long it may take.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpstreamConfig {
    /// `http://host:port/base` or `https://..`, without user and password.
    pub url: String,
    /// Bound on making a connection.
    pub connect_timeout: Duration,
    /// Bound on one request, from its first byte to the end of its answer.
    pub timeout: Duration,
    /// A connection idle for longer is not used again: less than the service keeps it.
    pub keep_alive: Duration,
    /// A larger body of an answer is not taken.
    pub max_answer: usize,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct UpstreamAnswer {
    /// Status code.
    pub status: StatusCode,
    /// Header fields as they came.
    pub headers: HeaderMap,
    /// Body; none if it was larger than `max_answer`.
    pub body: Option<Bytes>,
}

/// What became of a request.
#[derive(Debug)]
pub enum Sent {
    /// The service answered.
    Answer(UpstreamAnswer),
    /// Nothing of it has left this process.
    NotSent(String),
    /// It may have been applied.
    Unknown {
        /// Why there is no answer, without values.
        reason: String,
        /// The time was over.
        late: bool,
    },
}

/// The service.
pub struct Upstream {
    config: UpstreamConfig,
    place: Place,
    tls: Arc<rustls::ClientConfig>,
    idle: Mutex<Vec<(Wire, Instant)>>,
}

impl Upstream {
    /// Of this config, or what is wrong with its URL. Connects to nothing.
    pub fn new(config: UpstreamConfig) -> Result<Self, String> {
        let place = Place::parse(&config.url, "an HTTP service")?;
        if place.user.is_some() {
            return Err(format!(
                "{:?} has a user or password, which callers send themselves; leave them out",
                shown(&config.url)
            ));
        }
        Ok(Self { place, tls: trust()?, idle: Mutex::default(), config })
    }

    /// Sends one request and takes its whole answer. `target` is path and query behind the URL's own path; `headers` without `Host`.
    pub async fn send(&self, method: Method, target: &str, headers: HeaderMap, body: Bytes) -> Sent {
        let until = tokio::time::Instant::now() + self.config.connect_timeout + self.config.timeout;
        let (mut wire, response) = match self.ask(method, target, headers, body).await {
            Ok(asked) => asked,
            Err(sent) => return sent,
        };
        let (head, body) = response.into_parts();
        let body = tokio::time::timeout_at(until, Limited::new(body, self.config.max_answer).collect()).await;
        let body = match body {
            Err(_) => return self.late(),
            Ok(Ok(body)) => Some(body.to_bytes()),
            Ok(Err(fault)) if fault.is::<LengthLimitError>() => None,
            Ok(Err(_)) => {
                let reason = format!("it answered {}, and its body broke off", head.status.as_u16());
                return Sent::Unknown { reason, late: false };
            }
        };
        // An answer may come before the request is out: then the connection is of no more use.
        if body.is_some() && timeout(REUSE, wire.usable()).await == Ok(true) {
            self.idle.lock().push((wire, Instant::now()));
        }
        Sent::Answer(UpstreamAnswer { status: head.status, headers: head.headers, body })
    }

    /// Sends a request that changes nothing, and hands its answer on as it comes. An answer that stands still for the request's time-out is
    /// cut. `place` is held until it is through.
    pub async fn pass(
        &self,
        method: Method,
        target: &str,
        headers: HeaderMap,
        body: Bytes,
        place: OwnedSemaphorePermit,
    ) -> Result<Response<Passing>, Sent> {
        let (wire, response) = self.ask(method, target, headers, body).await?;
        let idle = self.config.timeout;
        let patience = Box::pin(tokio::time::sleep(idle));
        Ok(response.map(|body| Passing { body, patience, idle, _wire: wire, _place: place }))
    }

    async fn ask(
        &self,
        method: Method,
        target: &str,
        mut headers: HeaderMap,
        body: Bytes,
    ) -> Result<(Wire, Response<Incoming>), Sent> {
        let not_sent = |fault: &dyn std::fmt::Display| Sent::NotSent(fault.to_string());
        let host = HeaderValue::from_str(&self.place.authority).map_err(|fault| not_sent(&fault))?;
        headers.insert(header::HOST, host);
        if !method.is_safe() {
            // An empty body would bear no length otherwise, and some services want one.
            headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        }
        let mut request = Request::builder().method(method).uri(format!("{}{target}", self.place.path));
        if let Some(theirs) = request.headers_mut() {
            *theirs = headers;
        }
        let request = request.body(Full::new(body)).map_err(|fault| not_sent(&fault))?;
        loop {
            let (mut wire, used) = match self.kept() {
                Some(wire) => (wire, true),
                None => (self.connect().await?, false),
            };
            match timeout(self.config.timeout, wire.begin(request.clone())).await {
                Ok(Ok(response)) => return Ok((wire, response)),
                // It was closed while it lay idle, and took nothing.
                Ok(Err(NoAnswer { unsent: true, .. })) if used => {}
                Ok(Err(NoAnswer { unsent: true, text })) => return Err(Sent::NotSent(text)),
                Ok(Err(NoAnswer { unsent: false, text })) => {
                    return Err(Sent::Unknown { reason: format!("no answer came: {text}"), late: false });
                }
                Err(_) => return Err(self.late()),
            }
        }
    }

    fn late(&self) -> Sent {
        Sent::Unknown {
            reason: format!("no whole answer came within {} ms", self.config.timeout.as_millis()),
            late: true,
        }
    }

    /// The connection used last that still may be used.
    fn kept(&self) -> Option<Wire> {
        let mut idle = self.idle.lock();
        idle.retain(|(wire, since)| since.elapsed() < self.config.keep_alive && wire.is_open());
        idle.pop().map(|(wire, _)| wire)
    }

    async fn connect(&self) -> Result<Wire, Sent> {
        let opened = timeout(self.config.connect_timeout, Wire::open(&self.place, &self.tls)).await;
        let opened = opened.map_err(|_| {
            Sent::NotSent(format!("no connection within {} ms", self.config.connect_timeout.as_millis()))
        });
        opened?.map_err(Sent::NotSent)
    }
}

/// A body on its way through; its connection ends with it.
pub struct Passing {
    body: Incoming,
    /// Ends the wait for the next frame.
    patience: Pin<Box<Sleep>>,
    idle: Duration,
    _wire: Wire,
    /// Held for as long as the body is on its way.
    _place: OwnedSemaphorePermit,
}

/// Why a body did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum Cut {
    /// The connection broke.
    #[error(transparent)]
    Broken(#[from] hyper::Error),
    /// Nothing came for so long.
    #[error("the upstream's answer stood still for {} ms", .0.as_millis())]
    Stalled(Duration),
}

impl Body for Passing {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let this = self.get_mut();
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(frame) => {
                // Whoever reads slowly is bounded elsewhere: this is about the service.
                this.patience.as_mut().reset(tokio::time::Instant::now() + this.idle);
                Poll::Ready(frame.map(|frame| frame.map_err(Cut::from)))
            }
            Poll::Pending => this.patience.as_mut().poll(cx).map(|()| Some(Err(Cut::Stalled(this.idle)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
