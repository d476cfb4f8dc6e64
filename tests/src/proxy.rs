//! A TCP proxy between gateway and Postgres that knows where a transaction stands: [`Proxy`] cuts or holds a connection
//! at a chosen point of the protocol.

pub mod http;
mod wire;

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{oneshot, watch},
    task::JoinHandle,
};

use wire::{Backend, Frontend, Seen};

/// Where on its way a connection is caught.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Point {
    /// Some rows of a COPY have reached the server, the rest has not.
    InsideCopy,
    /// The commit has left the gateway and has not reached the server.
    CommitArriving,
    /// The commit has reached the server; its reply, whenever it comes, does not go back.
    CommitSent,
    /// The server has committed; its reply does not go back.
    CommitDone,
}

/// What happens to the connection that was caught.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Both sides are closed.
    Cut,
    /// Nothing passes any more, either way, until [`Proxy::release`].
    Hold,
}

struct Trap {
    point: Point,
    action: Action,
    sprung: oneshot::Sender<()>,
}

#[derive(Default)]
struct Shared {
    traps: Mutex<Vec<Trap>>,
    commits: AtomicU64,
    connections: AtomicU64,
}

#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Controls {
    /// A connection of an older generation is closed.
    generation: u64,
    /// A held connection goes on when it counts up.
    released: u64,
    frozen: bool,
    refusing: bool,
    delay: Duration,
}

/// A proxy on loopback in front of one server. Dropping it closes everything.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    controls: watch::Sender<Controls>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port and forwards to the Postgres on `server_port`.
    pub async fn start(server_port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let shared = Arc::new(Shared::default());
        let controls = watch::Sender::new(Controls::default());
        let acceptor = tokio::spawn(accept(listener, server_port, shared.clone(), controls.clone()));
        Self { port, shared, controls, acceptor }
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Commits that have been forwarded so far.
    pub fn commits(&self) -> u64 {
        self.shared.commits.load(Ordering::Relaxed)
    }

    /// Connections that have been made so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Closes all connections.
    pub fn cut_all(&self) {
        self.controls.send_modify(|controls| controls.generation += 1);
    }

    /// Closes all connections and every new one at once, or stops doing so.
    pub fn refuse(&self, refusing: bool) {
        self.controls.send_modify(|controls| {
            controls.refusing = refusing;
            controls.generation += u64::from(refusing);
        });
    }

    /// Stops all traffic, both ways, without closing anything; or lets it go on.
    pub fn freeze(&self, frozen: bool) {
        self.controls.send_modify(|controls| controls.frozen = frozen);
    }

    /// Delays every piece of traffic, both ways.
    pub fn delay(&self, delay: Duration) {
        self.controls.send_modify(|controls| controls.delay = delay);
    }

    /// Lets connections that a trap holds go on.
    pub fn release(&self) {
        self.controls.send_modify(|controls| controls.released += 1);
    }

    /// Catches the next connection that comes to `point`, once. The receiver hears of it when it has happened.
    pub fn trap(&self, point: Point, action: Action) -> oneshot::Receiver<()> {
        let (sprung, receiver) = oneshot::channel();
        self.shared.traps().push(Trap { point, action, sprung });
        receiver
    }

    /// Traps that have not caught anything yet are taken away.
    pub fn disarm(&self) {
        self.shared.traps().clear();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
        self.cut_all();
    }
}

impl Shared {
    fn traps(&self) -> MutexGuard<'_, Vec<Trap>> {
        self.traps.lock().expect("nobody panics while holding it")
    }

    fn spring(&self, points: &[Point]) -> Option<Trap> {
        let mut traps = self.traps();
        let found = traps.iter().position(|trap| points.contains(&trap.point))?;
        Some(traps.remove(found))
    }
}

async fn accept(
    listener: TcpListener,
    server_port: u16,
    shared: Arc<Shared>,
    controls: watch::Sender<Controls>,
) {
    while let Ok((client, _)) = listener.accept().await {
        if controls.borrow().refusing {
            continue;
        }
        shared.connections.fetch_add(1, Ordering::Relaxed);
        let (shared, controls) = (shared.clone(), controls.subscribe());
        tokio::spawn(async move {
            let address = SocketAddr::from(([127, 0, 0, 1], server_port));
            if let Ok(server) = TcpStream::connect(address).await {
                forward(client, server, &shared, controls).await;
            }
        });
    }
}

/// What the two directions of one connection tell each other.
#[derive(Default)]
struct Link {
    backend: Mutex<Backend>,
    /// Nothing goes back to the client any more.
    muted: watch::Sender<bool>,
    /// Commits that the server has answered.
    answered: watch::Sender<u64>,
}

async fn forward(client: TcpStream, server: TcpStream, shared: &Shared, controls: watch::Receiver<Controls>) {
    let nodelay = client.set_nodelay(true).and(server.set_nodelay(true));
    nodelay.expect("a connected socket takes the option");
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let link = Link::default();
    let generation = controls.borrow().generation;
    let mut cut = controls.clone();
    tokio::select! {
        () = upstream(from_client, to_server, shared, &link, controls.clone()) => {}
        () = downstream(from_server, to_client, &link, controls) => {}
        _ = cut.wait_for(|controls| controls.generation != generation) => {}
    }
}

/// Client to server. Ends when the connection is to be closed.
async fn upstream(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &Shared,
    link: &Link,
    mut controls: watch::Receiver<Controls>,
) {
    let mut frontend = Frontend::default();
    let mut chunk = vec![0; 64 * 1024];
    loop {
        while let Some((message, seen)) = frontend.next(|| link.backend().in_transaction()) {
            pass(&mut controls).await;
            let caught = match seen {
                Seen::Ssl => {
                    link.backend().expect_single_byte();
                    None
                }
                Seen::CopyData => shared.spring(&[Point::InsideCopy]),
                Seen::Commit => {
                    shared.commits.fetch_add(1, Ordering::Relaxed);
                    shared.spring(&[Point::CommitArriving, Point::CommitSent, Point::CommitDone])
                }
                Seen::Other => None,
            };
            let Some(trap) = caught else {
                if to.write_all(&message).await.is_err() {
                    return;
                }
                continue;
            };
            let mut rest = message;
            // A batch that is copied in one message is still caught in the middle.
            let before = match trap.point {
                Point::InsideCopy => rest.split_to(rest.len() / 2),
                Point::CommitArriving => rest.split_to(0),
                Point::CommitSent | Point::CommitDone => rest.split_to(rest.len()),
            };
            link.muted.send_replace(true);
            let mut answered = link.answered.subscribe();
            answered.mark_unchanged();
            if to.write_all(&before).await.is_err() {
                return;
            }
            if trap.point == Point::CommitDone && answered.changed().await.is_err() {
                return;
            }
            let released = controls.borrow().released;
            trap.sprung.send(()).ok();
            if trap.action == Action::Cut
                || controls.wait_for(|controls| controls.released != released).await.is_err()
            {
                return;
            }
            link.muted.send_replace(false);
            if to.write_all(&rest).await.is_err() {
                return;
            }
        }
        match from.read(&mut chunk).await {
            Ok(0) | Err(_) => return,
            Ok(length) => frontend.extend(&chunk[..length]),
        }
    }
}

/// Server to client. Ends when the connection is to be closed.
async fn downstream(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    link: &Link,
    mut controls: watch::Receiver<Controls>,
) {
    let mut muted = link.muted.subscribe();
    let mut chunk = vec![0; 64 * 1024];
    let mut kept = vec![];
    loop {
        let length = tokio::select! {
            read = from.read(&mut chunk) => match read {
                Ok(0) | Err(_) => break,
                Ok(length) => length,
            },
            // What came while nothing may go back goes back now.
            _ = muted.wait_for(|muted| !muted), if !kept.is_empty() => 0,
        };
        kept.extend_from_slice(&chunk[..length]);
        if link.backend().observe(&chunk[..length]) {
            link.answered.send_modify(|answered| *answered += 1);
        }
        pass(&mut controls).await;
        if !*link.muted.borrow() {
            if to.write_all(&kept).await.is_err() {
                return;
            }
            kept.clear();
        }
    }
    // The server has closed while the connection is held: the client does not hear of it before the release.
    if muted.wait_for(|muted| !muted).await.is_ok() {
        to.write_all(&kept).await.ok();
    }
}

impl Link {
    fn backend(&self) -> MutexGuard<'_, Backend> {
        self.backend.lock().expect("nobody panics while holding it")
    }
}

/// Waits out freeze and delay.
async fn pass(controls: &mut watch::Receiver<Controls>) {
    let Ok(now) = controls.wait_for(|controls| !controls.frozen).await.map(|controls| *controls) else {
        return;
    };
    if !now.delay.is_zero() {
        tokio::time::sleep(now.delay).await;
    }
}

#[cfg(test)]
mod tests;
