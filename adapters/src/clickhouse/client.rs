//! One connection to a server, and what its errors mean.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::Full;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::packing::Compression;
use crate::http_client::{Place, Wire};

/// The largest answer, bytes.
const MAX_ANSWER: usize = 64 << 20;
/// A connection that was idle for longer may be about to be closed by the server, whose own bound is 3 s at the least: a new one is made
/// rather than a request be lost with it.
const IDLE: Duration = Duration::from_secs(2);

/// Where the server is and who asks.
#[derive(Clone)]
pub(super) struct Server {
    pub(super) place: Place,
    pub(super) user: Option<(String, String)>,
    pub(super) tls: Arc<rustls::ClientConfig>,
    pub(super) connect_timeout: Duration,
    pub(super) request_timeout: Duration,
}

/// A connection, made when it is needed.
pub(super) struct Client {
    server: Server,
    wire: Option<(Wire, Instant)>,
}

/// A good answer.
pub(super) struct Answered {
    pub(super) body: Bytes,
    /// The query as ClickHouse names it.
    pub(super) query_id: Option<String>,
}

/// Why a request has no good answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Failure {
    /// It has not left this process.
    Unsent(String),
    /// ClickHouse says so.
    Server {
        /// Its number.
        code: u32,
        /// Its name, in capitals.
        name: String,
        /// All it says; may hold values.
        text: String,
    },
    /// No answer, or not one of ClickHouse's: the request may have been done.
    Unclear(String),
}

impl Failure {
    /// Without values, for logs.
    pub(super) fn plain(&self) -> String {
        match self {
            Self::Unsent(text) | Self::Unclear(text) => text.clone(),
            Self::Server { code, name, .. } => format!("ClickHouse answers {code} ({name})"),
        }
    }

    /// All that is known: for requests that bear no record's values.
    pub(super) fn full(&self) -> String {
        match self {
            Self::Server { text, .. } => text.trim().chars().take(500).collect(),
            other => other.plain(),
        }
    }
}

/// `name=value&..`, escaped.
pub(super) fn parameters<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let escaped = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let pairs = pairs.into_iter().map(|(name, value)| format!("{}={}", escaped(name), escaped(value)));
    pairs.collect::<Vec<_>>().join("&")
}

impl Client {
    pub(super) fn new(server: Server) -> Self {
        Self { server, wire: None }
    }

    /// Runs a query that changes nothing; `parameters` are those of the URL.
    pub(super) async fn query(&mut self, sql: &str, parameters: &str) -> Result<Answered, Failure> {
        self.post(parameters, Compression::None, Bytes::copy_from_slice(sql.as_bytes())).await
    }

    /// Sends one request with a body that is packed so. A connection that ended before anything was sent is replaced once.
    pub(super) async fn post(
        &mut self,
        parameters: &str,
        packed: Compression,
        body: Bytes,
    ) -> Result<Answered, Failure> {
        let kept = self.wire.is_some();
        match self.once(parameters, packed, body.clone()).await {
            Err(Failure::Unsent(_)) if kept => self.once(parameters, packed, body).await,
            result => result,
        }
    }

    async fn once(
        &mut self,
        parameters: &str,
        packed: Compression,
        body: Bytes,
    ) -> Result<Answered, Failure> {
        let request = self.request(parameters, packed, body)?;
        let server = &self.server;
        // Out of its place while a request is under way: a caller who leaves half way closes it.
        let kept = self.wire.take().filter(|(_, used)| used.elapsed() < IDLE);
        let mut wire = match kept {
            Some((wire, _)) => wire,
            None => {
                match tokio::time::timeout(server.connect_timeout, Wire::open(&server.place, &server.tls))
                    .await
                {
                    Ok(Ok(wire)) => wire,
                    Ok(Err(fault)) => {
                        return Err(Failure::Unsent(format!("{}: {fault}", server.place.authority)));
                    }
                    Err(_) => {
                        let within = server.connect_timeout;
                        return Err(Failure::Unsent(format!(
                            "{}: no connection within {within:?}",
                            server.place.authority
                        )));
                    }
                }
            }
        };
        let asked = tokio::time::timeout(server.request_timeout, wire.ask(request, MAX_ANSWER)).await;
        let answer = match asked {
            Ok(Ok(answer)) => answer,
            Ok(Err(fault)) if fault.unsent => return Err(Failure::Unsent(fault.text)),
            Ok(Err(fault)) => return Err(Failure::Unclear(format!("the connection broke: {}", fault.text))),
            Err(_) => {
                return Err(Failure::Unclear(format!("no answer within {:?}", server.request_timeout)));
            }
        };
        self.wire = Some((wire, Instant::now()));
        // The header counts whatever the status: a time-out may come as a 200 with it.
        let code = answer.headers.get("x-clickhouse-exception-code").and_then(|code| code.to_str().ok());
        let text = || String::from_utf8_lossy(&answer.body).into_owned();
        let named = code.and_then(|code| code.parse().ok()).or_else(|| code_in(&answer.body));
        match named {
            Some(code) => Err(Failure::Server { code, name: name_in(&text()), text: text() }),
            None if answer.status == StatusCode::OK => {
                let query_id = answer.headers.get("x-clickhouse-query-id").and_then(|id| id.to_str().ok());
                Ok(Answered { query_id: query_id.map(str::to_owned), body: answer.body })
            }
            None => Err(Failure::Unclear(format!("{} without a code of ClickHouse's", answer.status))),
        }
    }

    fn request(
        &self,
        parameters: &str,
        packed: Compression,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, Failure> {
        let place = &self.server.place;
        let mut request =
            Request::post(format!("{}/?{parameters}", place.path)).header(header::HOST, &place.authority);
        if let Some((user, password)) = &self.server.user {
            request = request.header("X-ClickHouse-User", user).header("X-ClickHouse-Key", password);
        }
        if let Some(encoding) = packed.encoding() {
            request = request.header(header::CONTENT_ENCODING, encoding);
        }
        request.body(Full::new(body)).map_err(|fault| Failure::Unsent(fault.to_string()))
    }
}

/// The code of an error text, at its beginning or behind a result that was cut off.
fn code_in(body: &[u8]) -> Option<u32> {
    let body = String::from_utf8_lossy(body);
    let tail = match body.strip_prefix("Code: ") {
        Some(rest) => rest,
        None => body
            .split_once("__exception__")
            .and_then(|(_, tail)| tail.split_once("Code: "))
            .map(|(_, rest)| rest)?,
    };
    tail.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok()
}

/// `(UNKNOWN_TABLE)`, the last of its kind; a text of ClickHouse's that holds no value.
fn name_in(text: &str) -> String {
    text.rmatch_indices('(')
        .filter_map(|(at, _)| text[at + 1..].split_once(')').map(|(name, _)| name))
        .find(|name| {
            name.len() > 3
                && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
        })
        .unwrap_or("unnamed")
        .to_owned()
}

/// What an error code says of an insert of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Meaning {
    /// Thrown before the block is written: nothing is in. It may go in later.
    NotYet,
    /// The same, and trying again does not help before something is changed.
    Refused,
    /// It may have been thrown behind the commit, or while an earlier attempt is at it.
    Unknown,
}

/// Only what is thrown while the query is parsed, admitted or read, or the block is checked, counts as nothing in. All others, those of
/// later versions too, are unknown: the same block goes again under its token.
pub(super) fn meaning(code: u32) -> Meaning {
    match code {
        // TOO_MANY_SIMULTANEOUS_QUERIES, NOT_ENOUGH_SPACE, TOO_MANY_PARTS, QUOTA_EXCEEDED. Not TABLE_IS_READ_ONLY (242): some versions
        // answer with it when Keeper is lost behind the commit, with the part in.
        202 | 243 | 252 | 201 => Meaning::NotYet,
        // The block cannot be read: CANNOT_PARSE_TEXT, .. INCORRECT_DATA, CANNOT_READ_ALL_DATA, ..
        6 | 25 | 26 | 27 | 33 | 38 | 41 | 70 | 72 | 117 | 128 | 131 | 349 => Meaning::Refused,
        // The query does not fit the table: NO_SUCH_COLUMN_IN_TABLE, .. UNKNOWN_TABLE, SYNTAX_ERROR, VIOLATED_CONSTRAINT, ..
        16 | 36 | 42 | 43 | 44 | 46 | 47 | 48 | 53 | 60 | 62 | 73 | 81 | 115 | 469 => Meaning::Refused,
        // Nobody may: READONLY, UNKNOWN_USER, WRONG_PASSWORD, REQUIRED_PASSWORD, SETTING_CONSTRAINT_VIOLATION, ACCESS_DENIED,
        // AUTHENTICATION_FAILED
        164 | 192 | 193 | 194 | 452 | 497 | 516 => Meaning::Refused,
        _ => Meaning::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_read_from_texts_without_their_values() {
        let text = "Code: 60. DB::Exception: Table d.secret(VALUE) does not exist. (UNKNOWN_TABLE) (version 26.5.1.1 (official build))";
        assert_eq!((code_in(text.as_bytes()), name_in(text).as_str()), (Some(60), "UNKNOWN_TABLE"));
        let late = "1\n__exception__\r\nabcdef\r\nCode: 241. DB::Exception: .. (MEMORY_LIMIT_EXCEEDED)";
        assert_eq!(code_in(late.as_bytes()), Some(241));
        assert_eq!(
            (code_in(b"1\n2\n"), code_in(b"the Code: 5"), name_in("no").as_str()),
            (None, None, "unnamed")
        );
        let failure = Failure::Server { code: 60, name: name_in(text), text: text.to_owned() };
        assert_eq!(failure.plain(), "ClickHouse answers 60 (UNKNOWN_TABLE)");
    }

    #[test]
    fn p15_what_may_come_behind_a_commit_is_unknown() {
        // TIMEOUT_EXCEEDED, SOCKET_TIMEOUT, NETWORK_ERROR, MEMORY_LIMIT_EXCEEDED, UNKNOWN_STATUS_OF_INSERT, KEEPER_EXCEPTION,
        // QUERY_WITH_SAME_ID_IS_ALREADY_RUNNING, QUERY_WAS_CANCELLED, TABLE_IS_READ_ONLY, and one that nobody knows
        for code in [242, 159, 209, 210, 241, 319, 999, 216, 394, 123_456] {
            assert_eq!(meaning(code), Meaning::Unknown, "{code}");
        }
        assert_eq!((meaning(252), meaning(60)), (Meaning::NotYet, Meaning::Refused));
    }

    #[test]
    fn parameters_are_escaped() {
        assert_eq!(
            parameters([("query", "INSERT INTO `a`"), ("b", "1")]),
            "query=INSERT%20INTO%20%60a%60&b=1"
        );
    }
}
