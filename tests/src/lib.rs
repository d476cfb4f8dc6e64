//! What the live tests share: real servers, the real gateway as a child process, a proxy that cuts and holds, workloads
//! with a model of the table that they must end in.

pub mod callers;
pub mod child;
pub mod conformance;
pub mod fleet;
pub mod gateway;
pub mod http_client;
pub mod plot;
pub mod proxy;
pub mod redis_proxy;
pub mod route;
pub mod servers;
pub mod workload;

use std::{
    fmt,
    net::TcpListener,
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};

use tokio::sync::{Mutex, MutexGuard};

/// A loopback port that was free a moment ago, another one at each call. Below the ports that the system gives to outgoing
/// connections: a client that calls a gateway while it is down must not come to sit on the gateway's own port.
pub fn free_port() -> u16 {
    const PORTS: std::ops::Range<u16> = 15_000..32_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test binaries that run side by side start at places far apart.
    let start = (std::process::id() as u16).wrapping_mul(997);
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + start.wrapping_add(step) % (PORTS.end - PORTS.start);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A number of the environment, for runs at length.
pub fn setting(name: &str, otherwise: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(otherwise)
}

/// `kill -9`s of one test: `ONCEGATE_KILLS` for runs at length (`tests/kills.sh`).
pub fn kills(otherwise: usize) -> usize {
    setting("ONCEGATE_KILLS", otherwise)
}

/// `patience` with `otherwise` kills, as much longer as there are more of them.
pub fn for_kills(patience: Duration, otherwise: usize) -> Duration {
    patience.mul_f64((kills(otherwise) as f64 / otherwise as f64).max(1.0))
}

/// Waits until no other test of this binary that asks for it runs: for tests whose times would not hold beside another.
pub async fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::const_new(());
    ALONE.lock().await
}

/// Asks `ready` every 20 ms until it answers with a value; panics with its last complaint once `patience` is over.
pub async fn eventually<T, E: fmt::Display>(
    what: &str,
    patience: Duration,
    mut ready: impl AsyncFnMut() -> Result<T, E>,
) -> T {
    let deadline = Instant::now() + patience;
    loop {
        match ready().await {
            Ok(value) => return value,
            Err(complaint) if Instant::now() > deadline => {
                panic!("{what}: not within {patience:?}: {complaint}")
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}
