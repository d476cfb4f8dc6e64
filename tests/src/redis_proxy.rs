//! A TCP proxy between gateway and Redis that knows which command writes a batch: [`RedisProxy`].

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::BytesMut;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch},
    task::JoinHandle,
};

/// What happens to the next command that writes a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Snag {
    /// The connection is cut before it reaches the server.
    Before,
    /// The connection is cut when half of it has reached the server.
    Half,
    /// The connection is cut as soon as it has reached the server, whether or not the server is done.
    After,
    /// The server answers, and the connection is cut before the answer passes.
    Reply,
    /// It reaches the server so much later.
    Held(Duration),
    /// The answer passes so much later.
    Late(Duration),
}

#[derive(Default)]
struct Shared {
    snag: Option<(Snag, oneshot::Sender<()>)>,
    writes: u64,
}

/// A proxy on loopback in front of one server. Dropping it closes everything.
pub struct RedisProxy {
    port: u16,
    shared: Arc<Mutex<Shared>>,
    generation: watch::Sender<u64>,
    acceptor: JoinHandle<()>,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().expect("no panic while it is held")
}

impl RedisProxy {
    /// Listens on a free port and forwards to the Redis on `server_port`.
    pub async fn start(server_port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let (shared, generation) = (Arc::<Mutex<Shared>>::default(), watch::Sender::new(0));
        let (theirs, ends) = (shared.clone(), generation.subscribe());
        let acceptor = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (shared, mut ends) = (theirs.clone(), ends.clone());
                ends.mark_unchanged();
                tokio::spawn(async move {
                    let server = SocketAddr::from(([127, 0, 0, 1], server_port));
                    let Ok(server) = TcpStream::connect(server).await else { return };
                    // Else each small reply would wait for 40 ms.
                    if client.set_nodelay(true).is_err() || server.set_nodelay(true).is_err() {
                        return;
                    }
                    tokio::select! {
                        _ = ends.changed() => {}
                        () = forward(client, server, &shared) => {}
                    }
                });
            }
        });
        Self { port, shared, generation, acceptor }
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Closes all connections.
    pub fn cut_all(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }

    /// Batches that were on their way to the server so far, also those that did not reach it.
    pub fn writes(&self) -> u64 {
        lock(&self.shared).writes
    }

    /// Lays a snag for the next batch, in place of one that nothing has met. The receiver hears of it when it has happened.
    pub fn snag(&self, snag: Snag) -> oneshot::Receiver<()> {
        let (sprung, receiver) = oneshot::channel();
        lock(&self.shared).snag = Some((snag, sprung));
        receiver
    }
}

impl Drop for RedisProxy {
    fn drop(&mut self) {
        self.acceptor.abort();
        self.cut_all();
    }
}

/// The length of the first command of `bytes`, if it is whole: `*COUNT`, then `$LENGTH` and bytes for each part.
fn whole(bytes: &[u8]) -> Option<usize> {
    let line = |at: usize| -> Option<(usize, usize)> {
        let end = at + bytes.get(at..)?.windows(2).position(|pair| pair == b"\r\n")?;
        Some((std::str::from_utf8(bytes.get(at + 1..end)?).ok()?.parse().ok()?, end + 2))
    };
    let (count, mut at) = line(0)?;
    for _ in 0..count {
        let (length, start) = line(at)?;
        at = start + length + 2;
    }
    (at <= bytes.len()).then_some(at)
}

/// Whether a command writes a batch: only that script has this argument.
fn writes(command: &[u8]) -> bool {
    let has = |part: &[u8]| command.windows(part.len()).any(|window| window == part);
    command.get(..32).is_some_and(|head| head.windows(7).any(|window| window == b"EVALSHA"))
        && has(b"\r\n$5\r\nwrite\r\n")
}

async fn forward(mut client: TcpStream, mut server: TcpStream, shared: &Mutex<Shared>) {
    let (mut from_client, mut from_server) = (BytesMut::new(), BytesMut::new());
    // Of the answer to a command on its way.
    let mut awaited: Option<(Snag, oneshot::Sender<()>)> = None;
    loop {
        while let Some(length) = whole(&from_client) {
            let command = from_client.split_to(length);
            let snag = if writes(&command) {
                let mut shared = lock(shared);
                shared.writes += 1;
                shared.snag.take()
            } else {
                None
            };
            let snag = match snag {
                Some((Snag::Held(delay), sprung)) => {
                    let _heard = sprung.send(());
                    tokio::time::sleep(delay).await;
                    None
                }
                snag => snag,
            };
            let passes = match &snag {
                Some((Snag::Before, _)) => 0,
                Some((Snag::Half, _)) => length / 2,
                _ => length,
            };
            if server.write_all(&command[..passes]).await.is_err() {
                return;
            }
            match snag {
                Some((Snag::Before | Snag::Half | Snag::After, sprung)) => {
                    // The test may not wait for it.
                    let _heard = sprung.send(());
                    return;
                }
                Some(answer) => awaited = Some(answer),
                None => {}
            }
        }
        tokio::select! {
            read = client.read_buf(&mut from_client) => if !read.is_ok_and(|bytes| bytes > 0) { return },
            read = server.read_buf(&mut from_server) => {
                if !read.is_ok_and(|bytes| bytes > 0) {
                    return;
                }
                if let Some((snag, sprung)) = awaited.take() {
                    let _heard = sprung.send(());
                    match snag {
                        Snag::Late(delay) => tokio::time::sleep(delay).await,
                        _ => return,
                    }
                }
                if client.write_all(&from_server.split()).await.is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_cut_out_of_the_stream_and_batches_told() {
        let one = b"*2\r\n$4\r\nECHO\r\n$2\r\n\r\n\r\n".as_slice();
        assert_eq!(whole(one), Some(one.len()));
        assert_eq!(whole(&[one, one].concat()), Some(one.len()));
        assert!((0..one.len()).all(|length| whole(&one[..length]).is_none()));
        assert!(!writes(one));
        let batch = b"*4\r\n$7\r\nEVALSHA\r\n$1\r\nx\r\n$1\r\n0\r\n$5\r\nwrite\r\n".as_slice();
        assert_eq!(whole(batch), Some(batch.len()));
        assert!(writes(batch));
        assert!(!writes(
            &batch.iter().map(|byte| if *byte == b'w' { b'W' } else { *byte }).collect::<Vec<_>>()
        ));
    }
}
