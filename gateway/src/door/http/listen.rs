//! Sockets: accept, one task per connection, bounds, and the drain at the end. Shared by the HTTP door and the admin listener.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use hyper::{
    body::{Body, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{Instant, sleep},
};
use tracing::{debug, warn};

use super::stream::Patient;

/// Bounds of a listener's connections.
#[derive(Clone, Debug)]
pub struct ListenOptions {
    /// Open connections; further ones wait in the backlog.
    pub max_connections: usize,
    /// Bytes of a request's head; above 431.
    pub max_head: usize,
    /// A request's head must be complete so long after the last answer; also how long an idle connection is kept.
    pub head_timeout: Duration,
    /// A client that takes nothing of an answer for so long is cut off.
    pub write_timeout: Duration,
    /// A closed connection takes and drops what still comes for so long, so that an early answer is not lost to a reset.
    pub linger: Duration,
    /// After the shutdown signal new requests are still served for so long (readiness is false, answers close the connection).
    pub drain_delay: Duration,
    /// After that, requests in flight have so long to finish.
    pub drain_deadline: Duration,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self {
            max_connections: 10_000,
            max_head: 16 << 10,
            head_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(30),
            linger: Duration::from_secs(2),
            drain_delay: Duration::ZERO,
            drain_deadline: Duration::from_secs(30),
        }
    }
}

/// Where a request came from: among its extensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Answers requests.
pub(crate) trait Handle: Send + Sync + 'static {
    /// What its answers are made of.
    type Body: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static;
    /// One request. The future may be dropped when the connection is cut off.
    fn handle(&self, request: Request<Incoming>) -> impl Future<Output = Response<Self::Body>> + Send;
    /// A connection was opened (+1) or closed (-1).
    fn connections(&self, _change: i64) {}
}

/// Whether the process is going down; shared by all listeners and `/readyz`.
#[derive(Clone, Debug, Default)]
pub struct Draining(Arc<AtomicBool>);

impl Draining {
    /// From now on `/readyz` says no, and answers close their connections.
    pub fn begin(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// It has begun.
    pub fn begun(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// How a listener ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drained {
    /// Connections that were cut off at the deadline with a request in flight.
    pub cut_off: usize,
}

/// Binds with `SO_REUSEADDR` and a deep backlog.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(4096)
}

/// Serves until `shutdown`, then drains.
pub(crate) async fn serve<H: Handle>(
    listener: TcpListener,
    handler: Arc<H>,
    options: &ListenOptions,
    draining: &Draining,
    shutdown: impl Future<Output = ()>,
) -> Drained {
    let (stop, stopping) = watch::channel(false);
    let room = Arc::new(Semaphore::new(options.max_connections));
    let mut connections = JoinSet::new();
    let mut until = None;
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown, if until.is_none() => {
                draining.begin();
                until = Some(Instant::now() + options.drain_delay);
            }
            () = tokio::time::sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => break,
            Some(ended) = connections.join_next() => report(ended),
            (stream, permit) = accept(&listener, &room) => {
                let task = connection(stream, handler.clone(), options.clone(), draining.clone(), stopping.clone());
                connections.spawn(async move {
                    task.await;
                    drop(permit);
                });
            }
        }
    }
    drop(listener);
    // Idle connections close at once, others after the answer that is on its way.
    stop.send_replace(true);
    let finish = async {
        while let Some(ended) = connections.join_next().await {
            report(ended);
        }
    };
    let in_time = tokio::time::timeout(options.drain_deadline, finish).await.is_ok();
    let cut_off = if in_time { 0 } else { connections.len() };
    if cut_off > 0 {
        warn!(
            cut_off,
            "drain deadline is over: connections are cut off; their records keep their outcome, a retry finds it"
        );
        connections.shutdown().await;
    }
    Drained { cut_off }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!("a connection's task panicked: this is a fault of the gateway, please report it");
    }
}

async fn accept(
    listener: &TcpListener,
    room: &Arc<Semaphore>,
) -> (TcpStream, Option<tokio::sync::OwnedSemaphorePermit>) {
    // The semaphore is never closed.
    let permit = room.clone().acquire_owned().await.ok();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (stream, permit),
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                warn!(%error, "cannot accept connections; trying again");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// The connection broke before it was accepted; the listener is well.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Counts an open connection.
struct Open<H: Handle>(Arc<H>);

impl<H: Handle> Open<H> {
    fn new(handler: Arc<H>) -> Self {
        handler.connections(1);
        Self(handler)
    }
}

impl<H: Handle> Drop for Open<H> {
    fn drop(&mut self) {
        self.0.connections(-1);
    }
}

async fn connection<H: Handle>(
    stream: TcpStream,
    handler: Arc<H>,
    options: ListenOptions,
    draining: Draining,
    mut stopping: watch::Receiver<bool>,
) {
    let open = Open::new(handler);
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "TCP_NODELAY");
    }
    let handler = &open.0;
    let draining = &draining;
    let peer = stream.peer_addr().ok().map(Peer);
    let service = service_fn(|mut request: Request<Incoming>| async move {
        if let Some(peer) = peer {
            request.extensions_mut().insert(peer);
        }
        let mut response = handler.handle(request).await;
        if draining.begun() {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        Ok::<_, Infallible>(response)
    });
    let mut served = std::pin::pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(options.head_timeout)
            .max_header_size(options.max_head)
            // A client may close its side after the request; and a request goes on when its client is gone.
            .half_close(true)
            .serve_connection(TokioIo::new(Patient::new(stream, &options)), service)
    );
    let ended = tokio::select! {
        biased;
        ended = served.as_mut() => ended,
        _ = async { stopping.wait_for(|stop| *stop).await.is_ok() } => {
            served.as_mut().graceful_shutdown();
            served.as_mut().await
        }
    };
    if let Err(error) = ended {
        debug!(%error, "connection ended");
    }
}
