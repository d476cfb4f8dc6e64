//! A TCP proxy on loopback between the gateway and its sink: [`Proxy`] closes connections at a chosen point. It knows no
//! protocol: a piece is what one read from the gateway gives.

use std::{net::SocketAddr, sync::Arc};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinSet,
};

use super::schedule::CutAt;

/// Catches one connection, once.
struct Trap {
    at: CutAt,
    pieces: u32,
    sprung: oneshot::Sender<()>,
}

/// Dropping it closes everything.
pub(crate) struct Proxy {
    address: SocketAddr,
    trap: Arc<Mutex<Option<Trap>>>,
    acceptor: tokio::task::JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port of loopback, and forwards to `host:port`.
    pub(crate) async fn start(host: String, port: u16) -> Result<Self, String> {
        let listener = TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.map_err(|fault| format!("no port on loopback is free: {fault}"))?;
        let address = listener.local_addr().map_err(|fault| fault.to_string())?;
        let trap: Arc<Mutex<Option<Trap>>> = Arc::default();
        let shared = trap.clone();
        let acceptor = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                let (host, shared) = (host.clone(), shared.clone());
                connections.spawn(async move {
                    if let Ok(server) = TcpStream::connect((host.as_str(), port)).await {
                        forward(client, server, &shared).await;
                    }
                });
            }
        });
        Ok(Self { address, trap, acceptor })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Catches the next connection that has passed `pieces` more pieces. The receiver hears of it when it has happened.
    pub(crate) fn trap(&self, at: CutAt, pieces: u32) -> oneshot::Receiver<()> {
        let (sprung, receiver) = oneshot::channel();
        *self.trap.lock() = Some(Trap { at, pieces, sprung });
        receiver
    }

    /// A trap that has caught nothing yet is taken away.
    pub(crate) fn disarm(&self) {
        self.trap.lock().take();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

/// Whether the piece that has come is the one that is caught.
fn sprung(trap: &Mutex<Option<Trap>>) -> Option<Trap> {
    let mut trap = trap.lock();
    match trap.as_mut() {
        Some(waiting) if waiting.pieces > 0 => {
            waiting.pieces -= 1;
            None
        }
        _ => trap.take(),
    }
}

/// Ends when either side has closed, or a trap has sprung; both sides are closed then.
async fn forward(mut client: TcpStream, mut server: TcpStream, trap: &Mutex<Option<Trap>>) {
    // Without it the proxy is only slower.
    client.set_nodelay(true).and(server.set_nodelay(true)).ok();
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let up = async {
        let mut piece = vec![0; 64 * 1024];
        loop {
            let length = match from_client.read(&mut piece).await {
                Ok(0) | Err(_) => return,
                Ok(length) => length,
            };
            let caught = sprung(trap);
            let passes = match &caught {
                Some(trap) if trap.at == CutAt::Before => 0,
                Some(trap) if trap.at == CutAt::Inside => length / 2,
                _ => length,
            };
            let passed = to_server.write_all(&piece[..passes]).await;
            if let Some(trap) = caught {
                // What has passed arrives, though its answer is not read any more.
                to_server.shutdown().await.ok();
                // Nobody may wait for it any more.
                trap.sprung.send(()).ok();
                return;
            }
            if passed.is_err() {
                return;
            }
        }
    };
    let down = async { tokio::io::copy(&mut from_server, &mut to_client).await };
    tokio::select! {
        () = up => {}
        // However the server closed, the client hears of it.
        _ = down => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that answers every piece with its length, and tells what it got in all.
    async fn server() -> (u16, Arc<Mutex<Vec<u8>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let got: Arc<Mutex<Vec<u8>>> = Arc::default();
        let all = got.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let all = all.clone();
                tokio::spawn(async move {
                    let mut piece = [0; 64];
                    while let Ok(length @ 1..) = stream.read(&mut piece).await {
                        all.lock().extend_from_slice(&piece[..length]);
                        if stream.write_all(&[length as u8]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        (port, got)
    }

    #[tokio::test]
    async fn a_connection_is_cut_before_inside_and_after_a_request() {
        for (at, passes) in [(CutAt::Before, 0), (CutAt::Inside, 5), (CutAt::After, 10)] {
            let (port, got) = server().await;
            let proxy = Proxy::start("127.0.0.1".to_owned(), port).await.unwrap();
            let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
            let mut answer = [0; 1];
            stream.write_all(b"hello").await.unwrap();
            stream.read_exact(&mut answer).await.unwrap();
            assert_eq!(answer, [5]);
            let sprung = proxy.trap(at, 1);
            stream.write_all(b"again").await.unwrap();
            stream.read_exact(&mut answer).await.unwrap();
            stream.write_all(b"0123456789").await.unwrap();
            sprung.await.unwrap();
            assert!(!matches!(stream.read(&mut answer).await, Ok(1..)), "{at:?}: an answer came back");
            // The next connection works.
            let mut stream = TcpStream::connect(proxy.address()).await.unwrap();
            stream.write_all(b"x").await.unwrap();
            stream.read_exact(&mut answer).await.unwrap();
            for _ in 0..100 {
                if got.lock().len() >= 11 + passes {
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            assert_eq!(got.lock().len(), 11 + passes, "{at:?}");
        }
    }
}
