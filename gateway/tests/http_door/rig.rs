//! A door on a real socket in front of a scripted route: real names, a lane that does what the record's `do` member says.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use adapters::{
    sink::{Column, Encode, RowKind},
    value::{BadValue, Value},
};
use dedup_store::{Algorithm, Digest, Fingerprint, Hasher, Identity, Settled};
use oncegate::{
    door::{
        HttpLimits, Submit,
        http::{Draining, HttpDoor, HttpOptions},
    },
    metrics::{Metrics, RouteMetrics},
    naming::{Chunk, Namer, NamingRules, Record},
    outcome::{Answer, Outcome, Problem},
};
use parking_lot::Mutex;
use tokio::{sync::oneshot, task::JoinHandle};

/// Columns `id`, `do`, `pad`; a row is the text of `do`.
#[derive(Debug)]
struct DoColumn([Column; 3]);

impl Encode for DoColumn {
    fn columns(&self) -> &[Column] {
        &self.0
    }

    fn encode(
        &self,
        _kind: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        _row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        match values[1] {
            Value::Json(text) => row.extend_from_slice(text.trim_matches('"').as_bytes()),
            _ => row.extend_from_slice(b"write"),
        }
        Ok(())
    }
}

/// What the scripted lane knows.
#[derive(Default)]
pub(crate) struct Lane {
    settled: Mutex<HashMap<Fingerprint, (Digest, Settled)>>,
    /// Payloads that the sink took, in order.
    pub(crate) written: Mutex<Vec<Vec<u8>>>,
    /// Records that were submitted.
    pub(crate) submitted: AtomicUsize,
    /// The biggest chunk, records.
    pub(crate) biggest: AtomicUsize,
    /// The route is not ready.
    pub(crate) away: AtomicBool,
    refused_once: AtomicBool,
}

pub(crate) struct Route {
    name: String,
    namer: Namer,
    limits: HttpLimits,
    metrics: Arc<RouteMetrics>,
    pub(crate) lane: Arc<Lane>,
}

impl Route {
    fn new(name: &str, limits: HttpLimits, metrics: &Metrics) -> Self {
        let key_spec_id = limits.key.id();
        let mut route_id = [0; 16];
        route_id[..name.len()].copy_from_slice(name.as_bytes());
        let identity = Identity { route_id, key_spec_id, algorithm: Algorithm::Xxh3Secret, secret: [7; 192] };
        let columns = ["id", "do", "pad"].map(|name| Column {
            name: name.into(),
            type_name: "text".into(),
            nullable: true,
            has_default: true,
        });
        let rules = NamingRules::new(limits.key.clone());
        let namer = Namer::new(rules, Arc::new(DoColumn(columns)), Hasher::new(&identity)).unwrap();
        Self { name: name.into(), namer, limits, metrics: metrics.route(name), lane: Arc::default() }
    }
}

impl Submit for Route {
    fn route(&self) -> &str {
        &self.name
    }

    fn name(&self, record: &Record<'_>, chunk: &mut Chunk) {
        self.namer.name(record, chunk);
    }

    fn arrival_us(&self) -> i64 {
        1_760_000_000_000_000
    }

    fn peek(&self, chunk: &Chunk) -> Option<Vec<Answer>> {
        let settled = self.lane.settled.lock();
        let answer = |named: &oncegate::naming::Named| match (&named.problem, &named.fingerprint) {
            (Some(problem), _) => Some(rejected(named.fingerprint, (**problem).clone())),
            (None, Some(fingerprint)) => {
                settled.get(fingerprint).map(|known| copy(*fingerprint, named.digest, *known))
            }
            (None, None) => None,
        };
        let answers: Option<Vec<_>> = chunk.records.iter().map(answer).collect();
        answers.inspect(|answers| answers.iter().for_each(|answer| self.metrics.count(answer.outcome, 1)))
    }

    async fn submit(&self, chunk: Chunk) -> Vec<Answer> {
        let (lane, metrics) = (self.lane.clone(), self.metrics.clone());
        // The work belongs to the lane: it goes on when the caller is dropped.
        tokio::spawn(async move { lane.batch(chunk, &metrics).await }).await.unwrap()
    }

    fn not_ready(&self) -> Option<String> {
        self.lane.away.load(Ordering::Relaxed).then(|| "the sink is away".to_owned())
    }

    fn limits(&self) -> &HttpLimits {
        &self.limits
    }
}

impl Lane {
    async fn batch(&self, chunk: Chunk, metrics: &RouteMetrics) -> Vec<Answer> {
        self.submitted.fetch_add(chunk.records.len(), Ordering::Relaxed);
        self.biggest.fetch_max(chunk.records.len(), Ordering::Relaxed);
        let mut answers = Vec::new();
        for named in &chunk.records {
            let range = |range: &std::ops::Range<u32>| range.start as usize..range.end as usize;
            let payload =
                named.payload.as_ref().map(|payload| &chunk.bytes[range(payload)]).unwrap_or_default();
            let what = String::from_utf8_lossy(&chunk.bytes[range(&named.row)]).into_owned();
            let answer = match (&named.problem, named.fingerprint) {
                (Some(problem), fingerprint) => rejected(fingerprint, (**problem).clone()),
                (None, None) => panic!("a record has neither name nor problem"),
                (None, Some(fingerprint)) => {
                    match self.one(fingerprint, named.digest, payload, &what).await {
                        Some(answer) => answer,
                        None => break,
                    }
                }
            };
            metrics.count(answer.outcome, 1);
            answers.push(answer);
        }
        answers
    }

    async fn one(
        &self,
        fingerprint: Fingerprint,
        digest: Digest,
        payload: &[u8],
        what: &str,
    ) -> Option<Answer> {
        if let Some(known) = self.settled.lock().get(&fingerprint) {
            return Some(copy(fingerprint, digest, *known));
        }
        let fails = |outcome, problem| {
            Some(Answer { outcome, fingerprint: Some(fingerprint), first: None, problem: Some(problem) })
        };
        let settled = match what {
            "update" => Settled::Updated,
            "stale" => Settled::Stale,
            "dead-letter" => Settled::DeadLettered,
            "settle-refusal" => Settled::Rejected,
            "refuse" => return fails(Outcome::Rejected, Problem::Refused("check constraint c".into())),
            "late" => return fails(Outcome::Late, Problem::Late("below the floor".into())),
            "ahead" => return fails(Outcome::Rejected, Problem::Ahead("above 5m".into())),
            "in-flight" => return fails(Outcome::Unknown, Problem::InFlight),
            "unknown" => return fails(Outcome::Unknown, Problem::OutcomeUnknown),
            "refuse-once" if !self.refused_once.swap(true, Ordering::Relaxed) => {
                return fails(Outcome::Unknown, Problem::Unavailable("connection refused".into()));
            }
            "silent" => return None,
            "slow" => {
                tokio::time::sleep(Duration::from_millis(300)).await;
                Settled::Written
            }
            _ => Settled::Written,
        };
        if matches!(settled, Settled::Written | Settled::Updated) {
            self.written.lock().push(payload.to_vec());
        }
        self.settled.lock().insert(fingerprint, (digest, settled));
        let outcome = oncegate::outcome::settled_outcome(settled);
        Some(Answer { outcome, fingerprint: Some(fingerprint), first: None, problem: None })
    }
}

fn rejected(fingerprint: Option<Fingerprint>, problem: Problem) -> Answer {
    Answer { outcome: Outcome::Rejected, fingerprint, first: None, problem: Some(problem) }
}

fn copy(fingerprint: Fingerprint, digest: Digest, (known, settled): (Digest, Settled)) -> Answer {
    let alike = digest == known;
    Answer {
        outcome: if alike { Outcome::Duplicate } else { Outcome::Mismatch },
        fingerprint: Some(fingerprint),
        first: Some(settled),
        problem: (!alike).then_some(Problem::Mismatch),
    }
}

/// A door with the routes `orders` and `others`.
pub(crate) struct Rig {
    pub(crate) address: SocketAddr,
    pub(crate) orders: Arc<Route>,
    pub(crate) others: Arc<Route>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) draining: Draining,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<oncegate::door::http::Drained>,
}

impl Rig {
    pub(crate) fn start(limits: HttpLimits, options: HttpOptions) -> Self {
        let metrics = Arc::new(Metrics::new());
        let orders = Arc::new(Route::new("orders", limits.clone(), &metrics));
        let others = Arc::new(Route::new("others", limits, &metrics));
        let draining = Draining::default();
        let routes = [orders.clone(), others.clone()];
        let loopback = "127.0.0.1:0".parse().unwrap();
        let door = HttpDoor::bind(loopback, options, routes, metrics.clone(), draining.clone()).unwrap();
        let address = door.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(door.serve(async move {
            // A dropped sender stops the door too.
            let _told: Result<(), _> = stopped.await;
        }));
        Self { address, orders, others, metrics, draining, stop: Some(stop), serving }
    }

    /// The shutdown signal.
    pub(crate) fn stop(&mut self) {
        drop(self.stop.take());
    }

    pub(crate) async fn drained(self) -> oncegate::door::http::Drained {
        drop(self.stop);
        self.serving.await.unwrap()
    }

    /// Rows that the sinks hold.
    pub(crate) fn rows(&self) -> usize {
        self.orders.lane.written.lock().len() + self.others.lane.written.lock().len()
    }
}
