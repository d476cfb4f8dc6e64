//! A proxy in front of an HTTP server that cuts requests at chosen points: [`HttpProxy`].

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// How late a request arrives that was given up.
const LATE: Duration = Duration::from_millis(300);

/// Where an insert is cut. The client's connection is closed in each case, by the proxy but for [`Cut::Held`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// Nothing of it has reached the server.
    Request,
    /// All but its last byte has; the server's connection is closed too.
    InsideRequest,
    /// The server has done it; its answer does not go back.
    Answer,
    /// The same, and the connection stands until the client gives it up.
    Held,
    /// Nothing of it has reached the server; the proxy itself answers with an empty 200.
    Empty,
    /// The client is gone at once; the whole request reaches the server a while later.
    Late,
}

#[derive(Default)]
struct Shared {
    cuts: Mutex<Vec<Cut>>,
    inserts: AtomicU64,
    /// Those that came since someone asked for it.
    kept: Mutex<Option<Vec<Vec<u8>>>>,
    hides_encoding: AtomicBool,
}

/// A proxy on loopback in front of one server. Dropping it closes everything.
pub struct HttpProxy {
    port: u16,
    server_port: u16,
    shared: Arc<Shared>,
    /// Counts up when all connections are to be closed.
    closed: watch::Sender<u64>,
    acceptor: Mutex<Option<JoinHandle<()>>>,
}

impl HttpProxy {
    /// Listens on a free port and forwards to the one given.
    pub async fn start(server_port: u16) -> Self {
        let proxy = Self {
            port: crate::free_port(),
            server_port,
            shared: Arc::default(),
            closed: watch::Sender::new(0),
            acceptor: Mutex::default(),
        };
        proxy.listen();
        proxy
    }

    fn listen(&self) {
        // With the option that lets a port be taken again at once.
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.set_reuseaddr(true).expect("a fresh socket takes the option");
        socket.bind(([127, 0, 0, 1], self.port).into()).expect("the port is ours");
        let listener = socket.listen(64).expect("a bound socket listens");
        let (server_port, shared, closed) = (self.server_port, self.shared.clone(), self.closed.subscribe());
        let acceptor = tokio::spawn(accept(listener, server_port, shared, closed));
        *self.acceptor.lock().expect("no panic") = Some(acceptor);
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Requests with an INSERT that have come so far.
    pub fn inserts(&self) -> u64 {
        self.shared.inserts.load(Ordering::Relaxed)
    }

    /// The next `count` of them are cut so.
    pub fn cut_inserts(&self, count: usize, cut: Cut) {
        self.shared.cuts.lock().expect("no panic").extend(vec![cut; count]);
    }

    /// From now on inserts are kept for [`HttpProxy::kept`].
    pub fn keep_inserts(&self) {
        *self.shared.kept.lock().expect("no panic") = Some(Vec::new());
    }

    /// Head and body of each insert that has come since.
    pub fn kept(&self) -> Vec<(String, Vec<u8>)> {
        let kept = self.shared.kept.lock().expect("no panic").clone().unwrap_or_default();
        let apart = |request: Vec<u8>| {
            let end = end_of_head(&request)?;
            Some((String::from_utf8_lossy(&request[..end]).to_ascii_lowercase(), request[end + 4..].to_vec()))
        };
        kept.into_iter().filter_map(apart).collect()
    }

    /// As proxies that do not know how a body is packed: the server is not told.
    pub fn hide_encoding(&self) {
        self.shared.hides_encoding.store(true, Ordering::Relaxed);
    }

    /// No connection can be made any more, and those that there are end; or it is as before.
    pub fn refuse(&self, refusing: bool) {
        if !refusing {
            return self.listen();
        }
        if let Some(acceptor) = self.acceptor.lock().expect("no panic").take() {
            acceptor.abort();
        }
        self.closed.send_modify(|count| *count += 1);
    }
}

impl Drop for HttpProxy {
    fn drop(&mut self) {
        self.refuse(true);
    }
}

async fn accept(listener: TcpListener, port: u16, shared: Arc<Shared>, closed: watch::Receiver<u64>) {
    while let Ok((client, _)) = listener.accept().await {
        let (shared, mut closed) = (shared.clone(), closed.clone());
        closed.mark_unchanged();
        tokio::spawn(async move {
            tokio::select! {
                () = serve(client, port, &shared) => {}
                _ = closed.changed() => {}
            }
        });
    }
}

/// Both ends of one connection, one request after the other.
async fn serve(mut client: TcpStream, port: u16, shared: &Shared) {
    drop(client.set_nodelay(true));
    let mut server: Option<TcpStream> = None;
    while let Some(mut request) = message(&mut client).await {
        let name = b"content-encoding:";
        if shared.hides_encoding.load(Ordering::Relaxed)
            && let Some(end) = end_of_head(&request)
            && let Some(at) = request[..end].windows(name.len()).position(|text| text == name)
        {
            request[at] = b'x';
        }
        let head = String::from_utf8_lossy(&request[..request.len().min(300)]);
        let mut cut = None;
        if head.contains("query=INSERT") {
            shared.inserts.fetch_add(1, Ordering::Relaxed);
            if let Some(kept) = &mut *shared.kept.lock().expect("no panic") {
                kept.push(request.clone());
            }
            let mut cuts = shared.cuts.lock().expect("no panic");
            cut = if cuts.is_empty() { None } else { Some(cuts.remove(0)) };
        }
        if cut == Some(Cut::Request) {
            return;
        }
        if cut == Some(Cut::Empty) {
            drop(client.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await);
            continue;
        }
        if server.is_none() {
            server = TcpStream::connect(("127.0.0.1", port)).await.ok();
        }
        let Some(mut to) = server.take() else { return };
        drop(to.set_nodelay(true));
        if cut == Some(Cut::Late) {
            tokio::spawn(async move {
                tokio::time::sleep(LATE).await;
                if to.write_all(&request).await.is_ok() {
                    message(&mut to).await;
                }
            });
            return;
        }
        let sent = if cut == Some(Cut::InsideRequest) { &request[..request.len() - 1] } else { &request[..] };
        if to.write_all(sent).await.is_err() || cut == Some(Cut::InsideRequest) {
            return;
        }
        let Some(answer) = message(&mut to).await else { return };
        if cut == Some(Cut::Held) {
            drop(client.read(&mut [0]).await);
            return;
        }
        if cut == Some(Cut::Answer) || client.write_all(&answer).await.is_err() {
            return;
        }
        server = Some(to);
    }
}

fn end_of_head(message: &[u8]) -> Option<usize> {
    message.windows(4).position(|four| four == b"\r\n\r\n")
}

/// A whole message with a head and as many bytes as it says, or in chunks.
async fn message(from: &mut TcpStream) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut piece = vec![0; 1 << 16];
    loop {
        if let Some(end) = end_of_head(&bytes) {
            let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length:"))
                .and_then(|length| length.trim().parse::<usize>().ok());
            let whole = match length {
                Some(length) => bytes.len() >= end + 4 + length,
                None if head.contains("transfer-encoding: chunked") => bytes.ends_with(b"0\r\n\r\n"),
                None => true,
            };
            if whole {
                return Some(bytes);
            }
        }
        match from.read(&mut piece).await {
            Ok(count) if count > 0 => bytes.extend_from_slice(&piece[..count]),
            _ => return None,
        }
    }
}
