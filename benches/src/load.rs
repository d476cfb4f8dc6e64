//! A lean HTTP/1.1 load: connections that send one prepared request after another. Cheaper than an HTTP client, so that on two
//! cores it is the server that is measured.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// What came back.
pub(crate) struct Load {
    pub(crate) requests: u64,
    pub(crate) took: Duration,
    /// Answers whose status was not 2xx.
    pub(crate) failed: u64,
    /// Answers that bore `idempotent-replayed: true`.
    pub(crate) replayed: u64,
}

impl Load {
    pub(crate) fn rate(&self) -> f64 {
        self.requests as f64 / self.took.as_secs_f64()
    }
}

/// Sends what `request(n)` gives for n = 0, 1, .. over `connections`, for `time`.
pub(crate) async fn run(
    server: SocketAddr,
    connections: usize,
    time: Duration,
    request: impl Fn(u64) -> Option<Vec<u8>> + Send + Sync + 'static,
) -> Load {
    let request = Arc::new(request);
    let next = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let deadline = started + time;
    let mut tasks = Vec::new();
    for _ in 0..connections {
        let (request, next) = (request.clone(), next.clone());
        tasks.push(tokio::spawn(async move {
            let mut stream = TcpStream::connect(server).await.expect("the server listens");
            stream.set_nodelay(true).expect("a TCP socket");
            let (mut buffer, mut done, mut failed, mut replayed) = (Vec::with_capacity(16 << 10), 0, 0, 0);
            while Instant::now() < deadline {
                let Some(bytes) = request(next.fetch_add(1, Ordering::Relaxed)) else { break };
                stream.write_all(&bytes).await.expect("the server takes requests");
                let answer = answer(&mut stream, &mut buffer).await;
                done += 1;
                failed += u64::from(!answer.0);
                replayed += u64::from(answer.1);
            }
            (done, failed, replayed)
        }));
    }
    let mut load = Load { requests: 0, took: Duration::ZERO, failed: 0, replayed: 0 };
    for task in tasks {
        let (done, failed, replayed) = task.await.expect("the load works");
        load.requests += done;
        load.failed += failed;
        load.replayed += replayed;
    }
    load.took = started.elapsed();
    load
}

/// Reads one answer; whether its status was 2xx, and whether it was a replay.
async fn answer(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> (bool, bool) {
    buffer.clear();
    loop {
        let read = stream.read_buf(buffer).await.expect("the server answers");
        assert!(read > 0, "the server closed: {}", String::from_utf8_lossy(buffer));
        let Some(head) = buffer.windows(4).position(|end| end == b"\r\n\r\n") else { continue };
        let text = std::str::from_utf8(&buffer[..head]).expect("a head is text");
        let header = |name: &str| {
            text.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name).then(|| value.trim())
            })
        };
        let length: usize = header("content-length").and_then(|value| value.parse().ok()).unwrap_or_default();
        let (ok, replayed) =
            (text.as_bytes().get(9) == Some(&b'2'), header("idempotent-replayed") == Some("true"));
        let whole = head + 4 + length;
        while buffer.len() < whole {
            assert!(stream.read_buf(buffer).await.expect("the server answers") > 0, "a body was cut short");
        }
        return (ok, replayed);
    }
}

/// A POST of `body`.
pub(crate) fn post(path: &str, content_type: &str, body: &str) -> Vec<u8> {
    format!("POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        .into_bytes()
}
