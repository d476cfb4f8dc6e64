//! Callers that send numbered events over HTTP, some of them again, each until it is acknowledged.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::task::JoinHandle;

use crate::http_client::HttpClient;

const CALLERS: usize = 6;
/// The first one sends so many events at once.
const ARRAY: usize = 20;
/// One in so many is a copy.
const COPY_EVERY: usize = 5;
const PATIENCE: Duration = Duration::from_secs(300);
/// Kills that fit into it with ease.
const KILLS: usize = 50;

/// Several at work.
pub struct Callers {
    over: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<BTreeSet<usize>>>,
}

impl Callers {
    /// They send `payload` of each number to `path`.
    pub fn start(address: SocketAddr, path: &'static str, payload: fn(usize) -> String) -> Self {
        let (next, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let deadline = Instant::now() + crate::for_kills(PATIENCE, KILLS);
        let caller = |number: usize| {
            let (next, over, mut client) = (next.clone(), over.clone(), HttpClient::new(address));
            let take = if number == 0 { ARRAY } else { 1 };
            tokio::spawn(async move {
                let mut random = StdRng::seed_from_u64(number as u64);
                let mut sent = BTreeSet::new();
                while !over.load(Ordering::Relaxed) {
                    let from = next.fetch_add(take, Ordering::Relaxed);
                    let copy = from > ARRAY && random.random_range(0..COPY_EVERY) == 0;
                    let from = if copy { random.random_range(0..from - ARRAY) } else { from };
                    let payloads: Vec<String> = (from..from + take).map(payload).collect();
                    send(&mut client, path, &payloads, deadline).await;
                    sent.extend(from..from + take);
                }
                sent
            })
        };
        let tasks = (0..CALLERS).map(caller).collect();
        Self { over, tasks }
    }

    /// Has them end; answers with the numbers that were acknowledged.
    pub async fn end(self) -> BTreeSet<usize> {
        self.over.store(true, Ordering::Relaxed);
        let mut all = BTreeSet::new();
        for task in self.tasks {
            all.extend(task.await.expect("no caller gave up"));
        }
        all
    }
}

/// Sends until each record is written or a duplicate.
async fn send(client: &mut HttpClient, path: &str, payloads: &[String], deadline: Instant) {
    let body = match payloads {
        [one] => one.clone(),
        several => format!("[{}]", several.join(",")),
    };
    loop {
        let done = client.post_until_acknowledged(path, &[], body.clone(), deadline).await;
        match done.response.status {
            200 | 201 => return,
            207 => tokio::time::sleep(Duration::from_millis(50)).await,
            status => panic!("{status}: {}", done.response.text()),
        }
        assert!(Instant::now() < deadline, "{}", done.response.text());
    }
}
