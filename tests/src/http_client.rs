//! A small HTTP client that sends again until it is answered: [`HttpClient`].

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Why there is no answer.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

impl Response {
    /// A header as text; empty if it is not there.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {}", self.text()))
    }
}

/// An acknowledged record.
#[derive(Clone, Debug)]
pub struct Acknowledged {
    /// The final answer.
    pub response: Response,
    /// How often it was sent, the last time included.
    pub attempts: u32,
}

/// One keep-alive connection, made again after every failure.
#[derive(Debug)]
pub struct HttpClient {
    address: SocketAddr,
    sender: Option<SendRequest<Full<Bytes>>>,
    patience: Duration,
}

impl HttpClient {
    /// To `address`; connects when it is needed.
    pub fn new(address: SocketAddr) -> Self {
        Self { address, sender: None, patience: Duration::from_secs(10) }
    }

    /// Gives one request no longer than this.
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// `GET path`.
    pub async fn get(&mut self, path: &str) -> Result<Response, Failure> {
        self.send(Method::GET, path, &[], Bytes::new()).await
    }

    /// `POST path` of JSON; a header in `headers` replaces the content type.
    pub async fn post(
        &mut self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<Response, Failure> {
        self.send(Method::POST, path, headers, body.into()).await
    }

    /// Posts again and again, as a careful producer does, until the gateway has taken a decision: any answer but 409, 429
    /// and 5xx. Panics once `deadline` is over.
    pub async fn post_until_acknowledged(
        &mut self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
        deadline: Instant,
    ) -> Acknowledged {
        let body = body.into();
        let mut attempts = 0;
        loop {
            attempts += 1;
            let answer = self.send(Method::POST, path, headers, body.clone()).await;
            let complaint = match answer {
                Ok(response) if !matches!(response.status, 409 | 429 | 500..) => {
                    return Acknowledged { response, attempts };
                }
                Ok(response) => format!("{} {}", response.status, response.text()),
                Err(error) => error.to_string(),
            };
            assert!(
                Instant::now() < deadline,
                "{path}: not acknowledged after {attempts} attempts: {complaint}"
            );
            tokio::time::sleep(Duration::from_millis(5 * u64::from(attempts.min(20)))).await;
        }
    }

    async fn send(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Response, Failure> {
        let answer = tokio::time::timeout(self.patience, self.exchange(method, path, headers, body)).await;
        let answer = answer.unwrap_or_else(|_| Err(format!("no answer within {:?}", self.patience).into()));
        if answer.is_err() {
            self.sender = None;
        }
        answer
    }

    async fn exchange(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Response, Failure> {
        let mut request =
            Request::builder().method(method).uri(path).header("host", self.address.to_string());
        if !body.is_empty() && !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
            request = request.header("content-type", "application/json");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body))?;
        let (parts, body) = self.connected().await?.send_request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Response { status: parts.status.as_u16(), headers: parts.headers, body })
    }

    async fn connected(&mut self) -> Result<&mut SendRequest<Full<Bytes>>, Failure> {
        if let Some(mut sender) = self.sender.take()
            && sender.ready().await.is_ok()
        {
            return Ok(self.sender.insert(sender));
        }
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        sender.ready().await?;
        Ok(self.sender.insert(sender))
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    #[tokio::test]
    async fn a_post_is_sent_again_until_it_is_acknowledged() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answers = [
            "",
            "HTTP/1.1 503 x\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 422 x\r\nk: v\r\ncontent-length: 2\r\n\r\n{}",
        ];
        tokio::spawn(async move {
            for answer in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 1000];
                assert!(stream.read(&mut request).await.unwrap() > 0);
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        let deadline = Instant::now() + Duration::from_secs(10);
        let done = HttpClient::new(address).post_until_acknowledged("/v1/x", &[], "{}", deadline).await;
        assert_eq!((done.attempts, done.response.status, done.response.header("k")), (3, 422, "v"));
        assert_eq!(done.response.json(), serde_json::json!({}));
    }
}
