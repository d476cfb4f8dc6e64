//! What the live tests share: real servers, the real gateway as a child process, a proxy that cuts and holds, workloads
//! with a model of the table that they must end in.

pub mod child;
pub mod conformance;
pub mod gateway;
pub mod http_client;
pub mod proxy;
pub mod route;
pub mod servers;
pub mod workload;

use std::{
    fmt,
    net::TcpListener,
    time::{Duration, Instant},
};

/// A loopback port that was free a moment ago.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    listener.local_addr().expect("a bound socket has an address").port()
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
