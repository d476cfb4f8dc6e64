//! A target without transactions, in memory, behind the product's own journal: it drops what it has seen before, by its token or by the
//! row's id, for so long; loses replies; takes late what nobody waits for any more; is away.

use std::{
    collections::{BTreeSet, HashSet, VecDeque},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use adapters::{
    simulated::{self, Reply, Target},
    sink::{Acquire, Batch, Encode, Guarantee, Misfit, Mode, RouteRow, RowOutcome, Session, Sink},
};
use async_trait::async_trait;
use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::SmallRng};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use super::{
    encode::{FakeEncode, POISON, RowValue},
    trace::note,
    world::World,
};

/// How it tells a repeat.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Repeats {
    /// It keeps so many tokens, a part of a batch each (`BatchToken`); `asked`: it also says what it holds.
    Tokens { window: usize, asked: bool },
    /// Each row is sent by itself, under a key that the target keeps for ever (`Forwarded`).
    Forwarded,
    /// Each row replaces the one with its id (`Keyed`).
    Keyed,
}

/// What is there.
pub(super) struct Remote {
    repeats: Repeats,
    tokens: VecDeque<String>,
    parts: HashSet<String>,
    taken: u64,
    pub(super) rows: Vec<RowValue>,
    ids: HashSet<String>,
    /// On their way though nobody waits: when they come, token and body.
    late: Vec<(Instant, String, Vec<u8>)>,
    rng: SmallRng,
    /// Chance of a fault in a thousand sends, and longest delay, ms.
    pub(super) rates: (u32, u64),
    pub(super) fired: u32,
    pub(super) only: Option<BTreeSet<u32>>,
    pub(super) sent: u64,
    pub(super) repeated: u64,
    /// The rest of the world: frozen owners, whether it is away.
    pub(super) world: Arc<Mutex<World>>,
}

impl Remote {
    pub(super) fn new(repeats: Repeats, seed: u64, rates: (u32, u64), world: Arc<Mutex<World>>) -> Self {
        Self {
            repeats,
            tokens: VecDeque::new(),
            parts: HashSet::new(),
            taken: 0,
            rows: Vec::new(),
            ids: HashSet::new(),
            late: Vec::new(),
            rng: SmallRng::seed_from_u64(seed),
            rates,
            fired: 0,
            only: None,
            sent: 0,
            repeated: 0,
            world,
        }
    }

    fn is_away(&self) -> bool {
        self.world.lock().down_until.is_some_and(|until| Instant::now() < until)
    }

    fn take(&mut self, token: &str, body: &[u8]) {
        if self.repeats != Repeats::Keyed && self.tokens.iter().any(|known| known == token) {
            self.repeated += 1;
            return;
        }
        let text = std::str::from_utf8(body).unwrap();
        for row in text.lines().map(|line| RowValue::parse(line.as_bytes())) {
            if self.ids.insert(row.id.clone()) || self.repeats != Repeats::Keyed {
                self.rows.push(row);
            } else {
                self.repeated += 1;
            }
        }
        self.taken += 1;
        self.parts.insert(token.into());
        self.tokens.push_back(token.into());
        if let Repeats::Tokens { window, .. } = self.repeats {
            while self.tokens.len() > window {
                self.tokens.pop_front();
            }
        }
    }

    fn take_late(&mut self) {
        let now = Instant::now();
        let (due, later) = std::mem::take(&mut self.late).into_iter().partition(|(at, ..)| *at <= now);
        self.late = later;
        let due: Vec<(Instant, String, Vec<u8>)> = due;
        for (_, token, body) in due {
            note(|| "target: a request of before comes".into());
            self.take(&token, &body);
        }
    }

    fn fault(&mut self) -> Option<u32> {
        if self.rates.0 == 0 || self.rng.random_range(0..1_000) >= self.rates.0 {
            return None;
        }
        let (number, fault) = (self.fired, self.rng.random_range(0..4));
        self.fired += 1;
        self.only.as_ref().is_none_or(|only| only.contains(&number)).then_some(fault)
    }

    /// A target that forgets soon is asked; then nothing may come after the answer.
    fn may_be_late(&self) -> bool {
        !matches!(self.repeats, Repeats::Tokens { asked: true, .. })
    }
}

/// One lane's way to it.
struct Line {
    remote: Arc<Mutex<Remote>>,
    owner: String,
}

/// A request whose process is gone may come nevertheless.
struct OnTheWay<'a> {
    remote: &'a Mutex<Remote>,
    part: Option<(&'a str, &'a [u8])>,
}

impl Drop for OnTheWay<'_> {
    fn drop(&mut self) {
        if let Some((token, body)) = self.part {
            let mut remote = self.remote.lock();
            if remote.rng.random_range(0..2) == 0 {
                remote.take(token, body);
            }
        }
    }
}

#[async_trait]
impl Target for Line {
    fn cut(&self, batch: &Batch<'_>) -> (Vec<RowOutcome>, Vec<Vec<usize>>) {
        let refused = |bytes: &[u8]| RowValue::parse(bytes).val == POISON;
        let outcome = |bytes: &[u8]| match refused(bytes) {
            true => RowOutcome::Refused { reason: "check violated: val".into() },
            false => RowOutcome::Written,
        };
        let good: Vec<usize> = (0..batch.rows.len()).filter(|&at| !refused(batch.rows[at].bytes)).collect();
        let parts = match self.remote.lock().repeats {
            _ if good.is_empty() => Vec::new(),
            Repeats::Forwarded => good.iter().map(|&at| vec![at]).collect(),
            Repeats::Keyed => vec![good],
            // As a table's partitions.
            Repeats::Tokens { .. } => {
                let (one, other): (Vec<usize>, Vec<usize>) = good.iter().partition(|&&at| at % 3 == 0);
                [one, other].into_iter().filter(|part| !part.is_empty()).collect()
            }
        };
        (batch.rows.iter().map(|row| outcome(row.bytes)).collect(), parts)
    }

    fn reachable(&self) -> bool {
        !self.remote.lock().is_away()
    }

    fn taken(&self) -> u64 {
        self.remote.lock().taken
    }

    async fn send(&mut self, token: &str, body: &[u8]) -> Reply {
        let (fault, before, after) = {
            let mut remote = self.remote.lock();
            remote.take_late();
            remote.sent += 1;
            let slow_ms = remote.rates.1;
            let mut delay = || if slow_ms == 0 { 0 } else { remote.rng.random_range(0..=slow_ms) };
            let (before, after) = (delay(), delay());
            (remote.fault(), before, after)
        };
        note(|| {
            format!(
                "{} -> target: {} rows, {fault:?}",
                self.owner,
                body.iter().filter(|b| **b == b'\n').count()
            )
        });
        let world = self.remote.lock().world.clone();
        let mut way = OnTheWay { remote: &self.remote, part: Some((token, body)) };
        sleep(Duration::from_millis(before)).await;
        while world.lock().frozen.contains(&self.owner) {
            sleep(Duration::from_millis(10)).await;
        }
        way.part = None;
        {
            let mut remote = self.remote.lock();
            remote.take_late();
            if remote.is_away() {
                return Reply::Out;
            }
            match fault {
                Some(0) => return Reply::Out,
                Some(1) => return Reply::Unknown,
                Some(2) if remote.may_be_late() => {
                    let due = Instant::now() + Duration::from_millis(remote.rng.random_range(1..3_000));
                    remote.late.push((due, token.into(), body.to_vec()));
                    return Reply::Unknown;
                }
                _ => remote.take(token, body),
            }
        }
        sleep(Duration::from_millis(after)).await;
        if fault.is_some() { Reply::Unknown } else { Reply::In }
    }

    fn knows_repeats(&self, taken_before: u64) -> bool {
        let remote = self.remote.lock();
        match remote.repeats {
            Repeats::Tokens { window, .. } => (remote.taken - taken_before) as usize <= window / 2,
            Repeats::Forwarded | Repeats::Keyed => true,
        }
    }

    fn holds(&self, token: &str) -> Option<bool> {
        let remote = self.remote.lock();
        matches!(remote.repeats, Repeats::Tokens { asked: true, .. }).then(|| remote.parts.contains(token))
    }
}

/// As gates see it. The book is in a folder of its own, in memory where the system has such.
#[derive(Clone)]
pub(super) struct JournaledSink {
    pub(super) remote: Arc<Mutex<Remote>>,
    folder: Arc<TempDir>,
}

impl JournaledSink {
    pub(super) fn new(remote: Remote) -> Self {
        let fast = Path::new("/dev/shm");
        let folder = if fast.is_dir() { TempDir::new_in(fast) } else { TempDir::new() };
        Self { remote: Arc::new(Mutex::new(remote)), folder: Arc::new(folder.expect("a folder")) }
    }

    /// So that the names of keys do not differ from run to run.
    pub(super) async fn register(&self, row: &RouteRow) {
        simulated::probe(&self.folder()).expect("the book");
        let mut session = self.session("r", "nobody");
        session.acquire(&[], Acquire::Force).await.expect("the book");
        session.register_route(row).await.expect("the book");
    }

    pub(super) fn folder(&self) -> PathBuf {
        self.folder.path().join("journal")
    }

    pub(super) fn book(&self) -> simulated::Book {
        simulated::read(&self.folder()).expect("the book")
    }
}

impl std::fmt::Debug for JournaledSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JournaledSink")
    }
}

#[async_trait]
impl Sink for JournaledSink {
    fn guarantee(&self) -> Guarantee {
        Guarantee::Transactional
    }

    fn mode(&self) -> Mode {
        Mode::Insert
    }

    fn row_key(&self) -> &[String] {
        &[]
    }

    fn version(&self) -> Option<&str> {
        None
    }

    fn is_local(&self) -> bool {
        true
    }

    async fn probe(&self) -> Result<Arc<dyn Encode>, Vec<Misfit>> {
        simulated::probe(&self.folder()).expect("the book");
        Ok(Arc::new(FakeEncode { keyed: false }))
    }

    fn session(&self, route: &str, owner: &str) -> Box<dyn Session> {
        let line = Line { remote: self.remote.clone(), owner: owner.into() };
        simulated::session(&self.folder(), Box::new(line), route, owner)
    }
}
