//! Front-ends tried in turn, and their redirects to back-ends.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::Full;

use super::reply::Reply;
use crate::http_client::{Answer, Place, Wire};

/// The largest answer, bytes.
const MAX_ANSWER: usize = 64 << 20;
/// A connection that was idle for longer may be about to be closed by the server.
const IDLE: Duration = Duration::from_secs(2);
/// Redirects of one request.
const MAX_HOPS: usize = 5;

/// Where the front-ends are and who asks.
#[derive(Clone)]
pub(super) struct Server {
    pub(super) fronts: Vec<Place>,
    pub(super) user: (String, String),
    pub(super) tls: Arc<rustls::ClientConfig>,
    pub(super) connect_timeout: Duration,
    pub(super) request_timeout: Duration,
}

/// Connections, made when they are needed.
pub(super) struct Client {
    server: Server,
    /// The front-end that answered last.
    front: usize,
    wires: HashMap<String, (Wire, Instant)>,
}

/// Why there is no answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Failure {
    /// Nobody has taken the request.
    Unsent(String),
    /// It may have been done.
    Unclear(String),
}

impl Failure {
    pub(super) fn text(self) -> String {
        match self {
            Self::Unsent(text) | Self::Unclear(text) => text,
        }
    }
}

/// How a front-end is asked who takes a request before the body is sent: hyper sends it without waiting for `100 Continue`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Knock {
    /// There is no body.
    No,
    /// Without body and without the request's own headers: one who takes it has an empty load without our label.
    Bare,
    /// Without body: who takes it has appended nothing.
    Named,
}

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) method: Method,
    /// Path and query.
    pub(super) path: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Bytes,
    pub(super) knock: Knock,
}

impl Client {
    pub(super) fn new(server: Server) -> Self {
        Self { server, front: 0, wires: HashMap::new() }
    }

    /// Asks the front-ends in turn until one takes the request, and follows where they send it.
    pub(super) async fn ask(&mut self, ask: &Ask) -> Result<Answer, Failure> {
        let fronts = self.server.fronts.clone();
        let mut faults = Vec::new();
        for turn in 0..fronts.len() {
            let at = (self.front + turn) % fronts.len();
            match self.through(&fronts[at], ask).await {
                Err(Failure::Unsent(fault)) => faults.push(fault),
                result => {
                    self.front = at;
                    return result;
                }
            }
        }
        Err(Failure::Unsent(faults.join("; ")))
    }

    /// Reads a page that an answer has named, without showing who asks.
    pub(super) async fn page(&mut self, url: &str) -> Option<Bytes> {
        let (place, path) = target(url, None).ok()?;
        let mut request = self.request(&place, &Method::GET, &path, &[], Bytes::new()).ok()?;
        request.headers_mut().remove(header::AUTHORIZATION);
        let answer = self.exchange(&place, request).await.ok()?;
        (answer.status == StatusCode::OK).then_some(answer.body)
    }

    async fn through(&mut self, front: &Place, ask: &Ask) -> Result<Answer, Failure> {
        let (mut place, mut path) = (front.clone(), format!("{}{}", front.path, ask.path));
        let mut whole = ask.knock == Knock::No;
        for _ in 0..=MAX_HOPS {
            let knock = [("expect".to_owned(), "100-continue".to_owned())];
            let headers = if whole || ask.knock == Knock::Named { &ask.headers[..] } else { &knock };
            let body = if whole { ask.body.clone() } else { Bytes::new() };
            let request = self.request(&place, &ask.method, &path, headers, body)?;
            let answer = match self.exchange(&place, request).await {
                Ok(answer) => answer,
                Err(Failure::Unclear(text)) if !whole => return Err(Failure::Unsent(text)),
                Err(failure) => return Err(failure),
            };
            let status = answer.status;
            if matches!(status.as_u16(), 301 | 302 | 307 | 308) {
                // Who sends on has taken nothing.
                let location = answer.headers.get(header::LOCATION).and_then(|at| at.to_str().ok());
                let from = place.authority.clone();
                (place, path) = target(location.unwrap_or_default(), Some(&place))
                    .map_err(|fault| Failure::Unsent(format!("{from}: {fault}")))?;
                whole = true;
            } else if whole {
                return Ok(answer);
            } else if !status.is_success() || Reply::read(&answer.body).is_none() {
                return Err(Failure::Unsent(format!("{}: {status} and no redirect", place.authority)));
            } else {
                // It takes loads itself.
                whole = true;
            }
        }
        Err(Failure::Unsent(format!("{}: more than {MAX_HOPS} redirects", front.authority)))
    }

    fn request(
        &self,
        place: &Place,
        method: &Method,
        path: &str,
        headers: &[(String, String)],
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, Failure> {
        let (user, password) = &self.server.user;
        let mut request =
            Request::builder().method(method).uri(path).header(header::HOST, &place.authority).header(
                header::AUTHORIZATION,
                format!("Basic {}", STANDARD.encode(format!("{user}:{password}"))),
            );
        for (name, value) in headers {
            request = request.header(name.as_str(), value.as_bytes());
        }
        request.body(Full::new(body)).map_err(|fault| Failure::Unsent(fault.to_string()))
    }

    /// A connection that ended before anything was sent is replaced once.
    async fn exchange(&mut self, place: &Place, request: Request<Full<Bytes>>) -> Result<Answer, Failure> {
        let name = format!("{}{}", if place.tls { "s:" } else { "" }, place.authority);
        self.wires.retain(|_, (_, used)| used.elapsed() < IDLE);
        // Out of its place while a request is under way: a caller who leaves half way closes it.
        let kept = self.wires.remove(&name);
        if let Some((wire, _)) = kept {
            match self.over(place, &name, wire, request.clone()).await {
                Err(Failure::Unsent(_)) => {}
                result => return result,
            }
        }
        let within = self.server.connect_timeout;
        let unsent = |text: String| Failure::Unsent(format!("{}: {text}", place.authority));
        let wire = match tokio::time::timeout(within, Wire::open(place, &self.server.tls)).await {
            Ok(opened) => opened.map_err(unsent)?,
            Err(_) => return Err(unsent(format!("no connection within {within:?}"))),
        };
        self.over(place, &name, wire, request).await
    }

    async fn over(
        &mut self,
        place: &Place,
        name: &str,
        mut wire: Wire,
        request: Request<Full<Bytes>>,
    ) -> Result<Answer, Failure> {
        let within = self.server.request_timeout;
        let at = &place.authority;
        match tokio::time::timeout(within, wire.ask(request, MAX_ANSWER)).await {
            Ok(Ok(answer)) => {
                let closes = answer
                    .headers
                    .get(header::CONNECTION)
                    .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"close"));
                if !closes {
                    self.wires.insert(name.to_owned(), (wire, Instant::now()));
                }
                Ok(answer)
            }
            Ok(Err(fault)) if fault.unsent => Err(Failure::Unsent(format!("{at}: {}", fault.text))),
            Ok(Err(fault)) => Err(Failure::Unclear(format!("{at}: the connection broke: {}", fault.text))),
            Err(_) => Err(Failure::Unclear(format!("{at}: no answer within {within:?}"))),
        }
    }
}

/// Where a redirect leads: node, path and query. Credentials inside of it are left out: ours go along.
fn target(location: &str, from: Option<&Place>) -> Result<(Place, String), String> {
    let bad = || "a redirect to nowhere that can be followed: only http and https are".to_owned();
    let uri: Uri = location.parse().map_err(|_| bad())?;
    let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str).to_owned();
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return match from {
            Some(place) if location.starts_with('/') => Ok((place.clone(), path)),
            _ => Err(bad()),
        };
    };
    let place = Place::parse(&format!("{scheme}://{authority}"), "a node").map_err(|_| bad())?;
    if from.is_some_and(|from| from.tls) && !place.tls {
        return Err(format!(
            "a redirect from https to http ({}), which would show the password; have the back-ends speak TLS too",
            place.authority
        ));
    }
    Ok((place, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_go_to_http_only_and_never_leave_tls() {
        let (place, path) =
            target("http://u:p%40@be1:8040/api/d/t/_stream_load?a=1", None).expect("it is good");
        assert_eq!(
            (place.authority.as_str(), path.as_str()),
            ("be1:8040", "/api/d/t/_stream_load?a=1"),
            "without the password"
        );
        let secure = Place::parse("https://fe:8030", "x").expect("it is good");
        assert!(target("https://be:1/x", Some(&secure)).is_ok());
        assert_eq!(
            target("/x?b", Some(&secure)).map(|(place, path)| (place.port, path)),
            Ok((8030, "/x?b".to_owned()))
        );
        for (location, from) in [
            ("ftp://be/x", None),
            ("", Some(&secure)),
            ("file:///etc", None),
            ("/x", None),
            ("http://be/x", Some(&secure)),
        ] {
            assert!(target(location, from).is_err(), "{location}");
        }
    }
}
