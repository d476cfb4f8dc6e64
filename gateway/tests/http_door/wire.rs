//! A client of raw bytes.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// Nothing takes longer than this in a test, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!("{error} in {:?} of {}", String::from_utf8_lossy(&self.body), self.status)
        })
    }
}

pub(crate) struct Wire {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Wire {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self { stream: TcpStream::connect(address).await.unwrap(), buffer: Vec::new() }
    }

    /// Sends; the server may have closed already.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> bool {
        tokio::time::timeout(PATIENCE, self.stream.write_all(bytes))
            .await
            .expect("the server takes nothing")
            .is_ok()
    }

    /// Closes our side.
    pub(crate) async fn end(&mut self) {
        // The server may have gone first.
        let _gone: Result<(), _> = self.stream.shutdown().await;
    }

    /// The next response, 1xx too; none once the server has closed.
    pub(crate) async fn response(&mut self) -> Option<Response> {
        let read = async {
            let head = loop {
                if let Some(at) = find(&self.buffer, b"\r\n\r\n") {
                    break at + 4;
                }
                if !self.more().await {
                    assert!(
                        self.buffer.is_empty(),
                        "half a head: {:?}",
                        String::from_utf8_lossy(&self.buffer)
                    );
                    return None;
                }
            };
            // Not always UTF-8: a key is echoed as it came.
            let bytes: Vec<u8> = self.buffer.drain(..head).collect();
            let text = String::from_utf8_lossy(&bytes);
            let mut lines = text.trim_end().split("\r\n");
            let line = lines.next().unwrap();
            assert!(line.starts_with("HTTP/1.1 ") || line.starts_with("HTTP/1.0 "), "{line}");
            let status = line[9..12].parse().expect("a status");
            let headers: Vec<(String, String)> = lines
                .map(|line| line.split_once(':').unwrap_or_else(|| panic!("header {line:?}")))
                .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
                .collect();
            let mut response = Response { status, headers, body: Vec::new() };
            if status >= 200 {
                assert!(response.header("transfer-encoding").is_none(), "answers have a length");
                let length: usize = response.header("content-length").expect("a length").parse().unwrap();
                while self.buffer.len() < length {
                    assert!(self.more().await, "the answer broke off");
                }
                response.body = self.buffer.drain(..length).collect();
            }
            Some(response)
        };
        tokio::time::timeout(PATIENCE, read).await.expect("no answer: hangs")
    }

    async fn more(&mut self) -> bool {
        self.stream.read_buf(&mut self.buffer).await.unwrap_or(0) > 0
    }

    /// Whether the server closes without a further byte.
    pub(crate) async fn closed(&mut self) -> bool {
        self.response().await.is_none()
    }

    /// Whether nothing comes for a while.
    pub(crate) async fn silent(&mut self, span: Duration) -> bool {
        self.buffer.is_empty() && tokio::time::timeout(span, self.more()).await.is_err()
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// A request; without `content-length` or `transfer-encoding` among the headers it gets the length of its body.
pub(crate) fn request(line: &str, headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let mut out = format!("{line}\r\nhost: test\r\n");
    let mut framed = false;
    for (name, value) in headers {
        framed |= matches!(*name, "content-length" | "transfer-encoding");
        out += &format!("{name}: {value}\r\n");
    }
    if !framed && (!body.is_empty() || line.starts_with("POST")) {
        out += &format!("content-length: {}\r\n", body.len());
    }
    let mut out = (out + "\r\n").into_bytes();
    out.extend_from_slice(body);
    out
}

/// `POST /v1/orders` of JSON.
pub(crate) fn post(headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Vec<u8> {
    let mut all = headers.to_vec();
    if !headers.iter().any(|(name, _)| *name == "content-type") {
        all.push(("content-type", "application/json"));
    }
    request("POST /v1/orders HTTP/1.1", &all, body)
}

/// One piece of a chunked body.
pub(crate) fn piece(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    let mut out = format!("{:x}\r\n", bytes.len()).into_bytes();
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
    out
}
