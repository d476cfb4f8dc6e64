//! Callers that send events and copies over HTTP, each until it is answered: [`Load`].

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use adapters::sink::Mode;
use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};
use tokio::net::TcpStream;

use super::{
    ledger::{Ledger, Told},
    shape::{Numbers, Shape},
};
use crate::clock::wall_us;

/// Callers at once.
const CALLERS: u64 = 16;
/// One request, with its answer.
const PATIENCE: Duration = Duration::from_secs(15);
/// For a last answer once the load is over.
const GRACE: Duration = Duration::from_secs(60);
/// Rows of one caller whose versions are still to come.
const OPEN_ROWS: usize = 8;

/// What is sent, and where.
pub(crate) struct Load {
    pub(crate) ledger: Mutex<Ledger>,
    pub(crate) shape: Shape,
    pub(crate) mode: Mode,
    /// Of the door, and its path.
    pub(crate) door: (SocketAddr, String),
    pub(crate) bearer: String,
    pub(crate) seed: u64,
    /// Requests a second of all callers.
    pub(crate) rate: u32,
    /// Of a hundred requests.
    pub(crate) copies: u32,
    /// Copies are of events that are younger.
    pub(crate) copy_age: Duration,
    pub(crate) state: State,
}

/// How far a load has come.
#[derive(Default)]
pub(crate) struct State {
    over: AtomicBool,
    /// Why the last request had to be sent again.
    complaint: Mutex<String>,
}

/// Why callers stopped before their time.
pub(crate) type Stopped = String;

impl Load {
    /// No new event from now on.
    pub(crate) fn end(&self) {
        self.state.over.store(true, Ordering::Relaxed);
    }

    /// Why the last request had to be sent again.
    pub(crate) fn complaint(&self) -> String {
        self.state.complaint.lock().clone()
    }

    /// A few events, each twice, before any fault: does the table take them at all?
    pub(crate) async fn trial(self: &Arc<Self>) -> Result<(), Stopped> {
        let mut caller = Caller::new(self.clone(), CALLERS);
        let deadline = Instant::now() + Duration::from_secs(60);
        for _ in 0..3 {
            let numbers = self.open(&mut self.new_row(1));
            for attempt in 0..2 {
                match caller.send(&numbers, deadline).await? {
                    Some((Told::Effect | Told::Copy, _)) => {}
                    Some((Told::No, said)) => {
                        return Err(format!("the gateway does not take the drill's record: {said}"));
                    }
                    None => {
                        return Err(format!(
                            "no answer to the first records ({attempt}): {}",
                            self.complaint()
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends until [`Load::end`], and then until each event has its answer.
    pub(crate) async fn run(self: Arc<Self>) -> Result<(), Stopped> {
        let mut callers = tokio::task::JoinSet::new();
        for number in 0..CALLERS {
            let caller = Caller::new(self.clone(), number);
            callers.spawn(caller.run());
        }
        while let Some(ended) = callers.join_next().await {
            ended.map_err(|fault| fault.to_string())??;
        }
        Ok(())
    }

    /// Copies of events from all of the drill, after its last fault.
    pub(crate) async fn sweep(self: &Arc<Self>, most: u64) -> Result<(), Stopped> {
        let numbers: Vec<Numbers> = {
            let ledger = self.ledger.lock();
            let step = (ledger.events() / most.max(1)).max(1) as usize;
            let oldest_us = wall_us() - self.copy_age.as_micros() as i64;
            let all = (1..=ledger.events()).step_by(step).filter(|event| ledger.is_settled(*event));
            all.map(|event| ledger.numbers(event)).filter(|numbers| numbers.time_us > oldest_us).collect()
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut callers = tokio::task::JoinSet::new();
        for (at, share) in numbers.chunks(numbers.len().div_ceil(CALLERS as usize).max(1)).enumerate() {
            let (mut caller, share) = (Caller::new(self.clone(), at as u64), share.to_vec());
            callers.spawn(async move {
                for numbers in share {
                    caller.load.ledger.lock().copies += 1;
                    if caller.send(&numbers, deadline).await?.is_none() {
                        caller.load.ledger.lock().silent(numbers.event);
                    }
                }
                Ok::<(), Stopped>(())
            });
        }
        while let Some(ended) = callers.join_next().await {
            ended.map_err(|fault| fault.to_string())??;
        }
        Ok(())
    }

    /// Writes the next version of a row down.
    fn open(&self, row: &mut OpenRow) -> Numbers {
        let numbers = self.ledger.lock().open(row.row, row.version, wall_us(), row.after_us);
        row.version += 1;
        row.after_us = numbers.time_us + self.shape.time_step_us();
        numbers
    }

    /// A new row with so many versions.
    fn new_row(&self, versions: u64) -> OpenRow {
        let row = self.ledger.lock().new_row();
        OpenRow { row, version: 1, versions, after_us: i64::MIN, written_down: Vec::new() }
    }
}

/// A row with versions that are still to come.
struct OpenRow {
    row: u64,
    /// The next one, and how many there will be.
    version: u64,
    versions: u64,
    /// The next one's event time at least.
    after_us: i64,
    /// Those that are written down already, in the order in which they will be sent.
    written_down: Vec<Numbers>,
}

/// One at work, over one connection at a time.
struct Caller {
    load: Arc<Load>,
    random: StdRng,
    sender: Option<SendRequest<Full<Bytes>>>,
    open: Vec<OpenRow>,
}

enum Answer {
    Outcome {
        word: String,
        said: String,
    },
    /// To be sent again; whether it may have taken effect.
    Again {
        uncertain: bool,
        said: String,
    },
    /// No record will ever get an answer.
    Hopeless(String),
}

impl Caller {
    fn new(load: Arc<Load>, number: u64) -> Self {
        let random = StdRng::seed_from_u64(load.seed ^ (number + 1) << 32);
        Self { load, random, sender: None, open: Vec::new() }
    }

    async fn run(mut self) -> Result<(), Stopped> {
        let pause = Duration::from_secs(1).mul_f64(CALLERS as f64 / f64::from(self.load.rate.max(1)));
        let mut due = tokio::time::Instant::now();
        while !self.load.state.over.load(Ordering::Relaxed) {
            tokio::time::sleep_until(due).await;
            // What was not sent during an outage is not made up for.
            due = (due + pause).max(tokio::time::Instant::now() - pause);
            let copy = self.random.random_range(0..100) < self.load.copies;
            if copy && let Some(numbers) = self.earlier() {
                self.load.ledger.lock().copies += 1;
                self.send_on(&numbers).await?;
            } else if let Some(numbers) = self.next() {
                self.send_on(&numbers).await?;
            }
        }
        // Each event that is written down is sent.
        for row in std::mem::take(&mut self.open) {
            for numbers in row.written_down {
                self.send_on(&numbers).await?;
            }
        }
        Ok(())
    }

    /// Some event of anybody's, rather a recent one, perhaps still on its way.
    fn earlier(&mut self) -> Option<Numbers> {
        let ledger = self.load.ledger.lock();
        let events = ledger.events();
        let recent = if self.random.random_bool(0.7) { 200.min(events) } else { events };
        if recent == 0 {
            return None;
        }
        let numbers = ledger.numbers(events - self.random.random_range(0..recent));
        let oldest_us = wall_us() - self.load.copy_age.as_micros() as i64;
        (numbers.time_us > oldest_us).then_some(numbers)
    }

    /// A new row's first event, or the next of a row that is open.
    fn next(&mut self) -> Option<Numbers> {
        let versions = self.load.shape.versions();
        let room = self.load.ledger.lock().rows() < self.load.shape.rows_at_most();
        if room && (self.open.is_empty() || self.open.len() < OPEN_ROWS && self.random.random_bool(0.4)) {
            let mut row = self.load.new_row(self.random.random_range(1..=versions));
            if self.load.mode == Mode::UpsertIfNewer {
                // They come in any order, so all have their event times first.
                row.written_down = (0..row.versions).map(|_| self.load.open(&mut row)).collect();
                row.written_down.shuffle(&mut self.random);
            }
            self.open.push(row);
        }
        if self.open.is_empty() {
            return None;
        }
        let at = self.random.random_range(0..self.open.len());
        let row = &mut self.open[at];
        // A copy must not come before its row's earlier versions: where the last one wins, each is written down when it is sent.
        let numbers = row.written_down.pop().unwrap_or_else(|| self.load.open(row));
        if row.written_down.is_empty() && row.version > row.versions {
            self.open.swap_remove(at);
        }
        Some(numbers)
    }

    /// Sends until there is an answer, or the drill has been over for too long.
    async fn send_on(&mut self, numbers: &Numbers) -> Result<(), Stopped> {
        loop {
            let over = self.load.state.over.load(Ordering::Relaxed);
            let deadline = Instant::now() + if over { GRACE } else { Duration::from_secs(1) };
            match self.send(numbers, deadline).await? {
                None if !over => {}
                _ => return Ok(()),
            }
        }
    }

    /// Sends until there is an answer, or the deadline is over.
    async fn send(
        &mut self,
        numbers: &Numbers,
        deadline: Instant,
    ) -> Result<Option<(Told, String)>, Stopped> {
        let mut attempts = 0;
        loop {
            if attempts > 0 {
                if Instant::now() > deadline {
                    return Ok(None);
                }
                self.load.ledger.lock().repeated += 1;
            }
            attempts += 1;
            self.load.ledger.lock().requests += 1;
            match self.attempt(numbers).await {
                Answer::Outcome { word, said } => {
                    let told = self.load.ledger.lock().answered(numbers.event, &word);
                    return Ok(Some((told, said)));
                }
                Answer::Again { uncertain, said } => {
                    if uncertain {
                        self.load.ledger.lock().unanswered(numbers.event);
                    }
                    *self.load.state.complaint.lock() = said;
                    tokio::time::sleep(Duration::from_millis(10 * attempts.min(10))).await;
                }
                Answer::Hopeless(said) => return Err(said),
            }
        }
    }

    async fn attempt(&mut self, numbers: &Numbers) -> Answer {
        let mut sender = match self.sender.take() {
            Some(sender) if !sender.is_closed() => sender,
            _ => match connect(self.load.door.0).await {
                Ok(sender) => sender,
                Err(said) => return Answer::Again { uncertain: false, said },
            },
        };
        let made = self.load.shape.record(numbers);
        let mut request = Request::post(&self.load.door.1)
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::AUTHORIZATION, format!("Bearer {}", self.load.bearer));
        for (name, value) in &made.headers {
            request = request.header(name, value);
        }
        let request = match request.body(Full::new(Bytes::from(made.payload))) {
            Ok(request) => request,
            Err(fault) => return Answer::Hopeless(format!("the request cannot be made: {fault}")),
        };
        let answered = tokio::time::timeout(PATIENCE, async {
            let answer = sender.send_request(request).await.map_err(|fault| fault.to_string())?;
            let (head, body) = answer.into_parts();
            let body = body.collect().await.map_err(|fault| fault.to_string())?.to_bytes();
            Ok::<_, String>((head, body))
        });
        let (head, body) = match answered.await {
            Ok(Ok(answer)) => answer,
            Ok(Err(said)) => return Answer::Again { uncertain: true, said },
            Err(_) => {
                return Answer::Again {
                    uncertain: true,
                    said: format!("no answer in {} s", PATIENCE.as_secs()),
                };
            }
        };
        self.sender = Some(sender);
        let status = head.status.as_u16();
        let said =
            || format!("{status}: {}", String::from_utf8_lossy(&body).chars().take(600).collect::<String>());
        let word = head.headers.get("oncegate-outcome").and_then(|word| word.to_str().ok());
        match (status, word) {
            (408 | 409 | 429 | 503, _) => Answer::Again { uncertain: status != 429, said: said() },
            (400.., Some("duplicate")) => {
                Answer::Outcome { word: "duplicate of a refusal".to_owned(), said: said() }
            }
            (_, Some(word)) => Answer::Outcome { word: word.to_owned(), said: said() },
            (400 | 422, None) => Answer::Outcome { word: "rejected".to_owned(), said: said() },
            _ => Answer::Hopeless(format!("the gateway answered {}", said())),
        }
    }
}

async fn connect(address: SocketAddr) -> Result<SendRequest<Full<Bytes>>, String> {
    let stream = TcpStream::connect(address).await.map_err(|fault| fault.to_string())?;
    stream.set_nodelay(true).map_err(|fault| fault.to_string())?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|fault| fault.to_string())?;
    // Its end is seen by the sender.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}
