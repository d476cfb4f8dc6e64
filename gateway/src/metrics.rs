//! Metrics: what is counted, its names, and the text that `/metrics` answers.
//!
//! Lanes and doors hold a [`RouteMetrics`]: every counter behind it is one atomic, resolved once per route. No keys in labels.

use std::{
    fmt::{self, Write as _},
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use adapters::sink::SinkError;
use dedup_store::Stats;
use parking_lot::Mutex;
use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

use crate::outcome::Outcome;

/// Content type of [`Format::OpenMetrics`].
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type of [`Format::Text`].
const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";
/// The value of a time that is not known yet.
const NEVER: i64 = i64::MIN;

type Seconds = Gauge<f64, AtomicU64>;

/// One step of the data path (DESIGN section 3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Bytes in: from the request's head to the end of its body.
    Receive,
    /// Keys, event times and rows derived.
    Name,
    /// Claims in the store.
    Check,
    /// The sink's write.
    Deliver,
    /// Settled, durably.
    Settle,
    /// From the request's head to its answer, at the door.
    Answer,
}

impl Stage {
    /// All, in the order of the data path.
    pub const ALL: [Stage; 6] =
        [Stage::Receive, Stage::Name, Stage::Check, Stage::Deliver, Stage::Settle, Stage::Answer];

    /// Its label.
    pub fn word(self) -> &'static str {
        match self {
            Stage::Receive => "receive",
            Stage::Name => "name",
            Stage::Check => "check",
            Stage::Deliver => "deliver",
            Stage::Settle => "settle",
            Stage::Answer => "answer",
        }
    }
}

/// How `/metrics` is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// OpenMetrics 1.0, ends with `# EOF`.
    OpenMetrics,
    /// Prometheus text 0.0.4.
    Text,
}

impl Format {
    /// Decides by the request's `Accept` header: OpenMetrics where it is asked for, text otherwise.
    pub fn of_accept(accept: Option<&str>) -> Self {
        let asked = accept.is_some_and(|accept| {
            accept.split(',').any(|range| {
                let mut parts = range.split(';').map(str::trim);
                let media = parts.next().unwrap_or_default();
                let refused = parts.any(|part| matches!(part, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"));
                media.eq_ignore_ascii_case("application/openmetrics-text") && !refused
            })
        });
        if asked { Format::OpenMetrics } else { Format::Text }
    }

    /// The response's content type.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => OPENMETRICS,
            Format::Text => PLAIN,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct RouteLabel {
    route: Arc<str>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct RecordLabels {
    route: Arc<str>,
    outcome: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct StageLabels {
    route: Arc<str>,
    stage: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct KindLabels {
    route: Arc<str>,
    kind: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct TopicLabels {
    route: Arc<str>,
    topic: String,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct PartitionLabels {
    route: Arc<str>,
    topic: String,
    partition: i32,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct StatusLabels {
    status: u16,
}

/// A histogram of seconds: 10 us to about 80 s.
fn seconds_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.000_01, 2.0, 24))
}

/// A histogram of counts: 1 to 32768.
fn counts_histogram() -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, 16))
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;
type Hook = Box<dyn Fn() + Send + Sync>;

/// All metrics of the process. Shared by `Arc`.
pub struct Metrics {
    registry: Registry,
    records: Family<RecordLabels, Counter>,
    stages: Histograms<StageLabels>,
    batch_records: Histograms<RouteLabel>,
    sink_errors: Family<KindLabels, Counter>,
    replayed: Family<RouteLabel, Counter>,
    unchecked: Family<RouteLabel, Counter>,
    in_flight: Family<RouteLabel, Gauge>,
    lag: Family<PartitionLabels, Gauge>,
    partitions: Family<TopicLabels, Gauge>,
    partitions_before: Family<TopicLabels, Gauge>,
    watermark: Family<RouteLabel, Seconds>,
    watermark_behind: Family<RouteLabel, Seconds>,
    store_keys: Family<RouteLabel, Gauge>,
    store_disk: Family<RouteLabel, Gauge>,
    store_memory: Family<RouteLabel, Gauge>,
    store_planned_memory: Family<RouteLabel, Gauge>,
    store_planned_disk: Family<RouteLabel, Gauge>,
    door: DoorMetrics,
    routes: Mutex<Vec<Arc<RouteMetrics>>>,
    hooks: Mutex<Vec<Hook>>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// An empty set: routes are added by [`Metrics::route`].
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("oncegate");
        let r = &mut registry;
        let seconds: fn() -> Histogram = seconds_histogram;
        let counts: fn() -> Histogram = counts_histogram;

        let build = Family::<BuildLabels, Gauge>::default();
        build.get_or_create(&BuildLabels { version: env!("CARGO_PKG_VERSION") }).set(1);
        r.register("build_info", "Which build runs", build);

        let metrics = Self {
            records: family(r, "records", "Records by outcome, each counted once, before its answer is sent"),
            stages: {
                let stages = Histograms::new_with_constructor(seconds);
                let help =
                    "Time a batch (deliver, check, settle) or a request (receive, name, answer) spends";
                r.register_with_unit("stage_duration", help, Unit::Seconds, stages.clone());
                stages
            },
            batch_records: {
                let sizes = Histograms::new_with_constructor(counts);
                r.register("batch_records", "Records in a batch", sizes.clone());
                sizes
            },
            sink_errors: family(r, "sink_errors", "Errors of the sink by kind"),
            replayed: family(
                r,
                "replayed_records",
                "Source records below their shard's position: skipped, no outcome",
            ),
            unchecked: family(
                r,
                "unchecked_records",
                "Records passed without a check while the store was away",
            ),
            in_flight: family(r, "in_flight_records", "Records that were submitted and have no outcome yet"),
            lag: family(r, "lag_records", "Records of the source's partition that are not settled yet"),
            partitions: family(r, "topic_partitions", "Partitions of the source's topic"),
            partitions_before: family(
                r,
                "topic_partitions_before",
                "Partitions that the topic had before; only there if that was another number",
            ),
            watermark: {
                let family = Family::<RouteLabel, Seconds>::default();
                let help = "How far event time has surely come, since the epoch";
                r.register_with_unit("watermark_timestamp", help, Unit::Seconds, family.clone());
                family
            },
            watermark_behind: {
                let family = Family::<RouteLabel, Seconds>::default();
                let help = "How far the watermark is behind the wall clock";
                r.register_with_unit("watermark_behind", help, Unit::Seconds, family.clone());
                family
            },
            store_keys: family(r, "store_keys", "Keys that the store holds"),
            store_disk: bytes_family(r, "store_disk", "Size of the store on disk"),
            store_memory: bytes_family(r, "store_memory", "Size of the store's tables and filters in memory"),
            store_planned_memory: bytes_family(
                r,
                "store_planned_memory",
                "Memory that the store will need when its window is full, at the pace of the last slots",
            ),
            store_planned_disk: bytes_family(
                r,
                "store_planned_disk",
                "Disk that the store will need when its window is full, at the pace of the last slots",
            ),
            door: DoorMetrics::register(r),
            routes: Mutex::default(),
            hooks: Mutex::default(),
            registry: Registry::default(),
        };
        Self { registry, ..metrics }
    }

    /// The counters of one route; the same ones on every call with the same name.
    pub fn route(&self, name: &str) -> Arc<RouteMetrics> {
        let mut routes = self.routes.lock();
        if let Some(known) = routes.iter().find(|route| &*route.label.route == name) {
            return known.clone();
        }
        let route: Arc<str> = name.into();
        let label = RouteLabel { route: route.clone() };
        let of_kind = |kind| self.sink_errors.get_or_create_owned(&KindLabels { route: route.clone(), kind });
        let made = Arc::new(RouteMetrics {
            records: Outcome::ALL.map(|outcome| {
                self.records
                    .get_or_create_owned(&RecordLabels { route: route.clone(), outcome: outcome.word() })
            }),
            stages: Stage::ALL.map(|stage| {
                self.stages.get_or_create_owned(&StageLabels { route: route.clone(), stage: stage.word() })
            }),
            batch_records: self.batch_records.get_or_create_owned(&label),
            sink_errors: SinkErrorKind::ALL.map(|kind| of_kind(kind.word())),
            replayed: self.replayed.get_or_create_owned(&label),
            unchecked: self.unchecked.get_or_create_owned(&label),
            in_flight: self.in_flight.get_or_create_owned(&label),
            store_keys: self.store_keys.get_or_create_owned(&label),
            store_disk: self.store_disk.get_or_create_owned(&label),
            store_memory: self.store_memory.get_or_create_owned(&label),
            store_planned_memory: self.store_planned_memory.get_or_create_owned(&label),
            store_planned_disk: self.store_planned_disk.get_or_create_owned(&label),
            watermark_ms: AtomicI64::new(NEVER),
            lag: self.lag.clone(),
            partitions: self.partitions.clone(),
            partitions_before: self.partitions_before.clone(),
            label,
        });
        routes.push(made.clone());
        made
    }

    /// The counters of the HTTP door.
    pub fn door(&self) -> &DoorMetrics {
        &self.door
    }

    /// Runs before each rendering: for figures that are read rather than counted (store sizes).
    pub fn on_scrape(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.hooks.lock().push(Box::new(hook));
    }

    /// The text of `/metrics`. `now_ms` is the wall clock, ms since the epoch.
    pub fn render(&self, format: Format, now_ms: i64) -> String {
        self.hooks.lock().iter().for_each(|hook| hook());
        for route in self.routes.lock().iter() {
            let watermark_ms = route.watermark_ms.load(Ordering::Relaxed);
            if watermark_ms != NEVER {
                let behind_ms = now_ms.saturating_sub(watermark_ms);
                self.watermark.get_or_create(&route.label).set(watermark_ms as f64 / 1e3);
                self.watermark_behind.get_or_create(&route.label).set(behind_ms as f64 / 1e3);
            }
        }
        let mut out = String::with_capacity(16 << 10);
        let written = text::encode(&mut out, &self.registry);
        debug_assert!(written.is_ok(), "a String takes every write");
        match format {
            Format::OpenMetrics => out,
            Format::Text => to_plain_text(&out),
        }
    }
}

/// Makes and registers a family of integers.
fn family<L, M>(registry: &mut Registry, name: &str, help: &str) -> Family<L, M>
where
    Family<L, M>: prometheus_client::registry::Metric + Clone + Default,
{
    let family = Family::<L, M>::default();
    registry.register(name, help, family.clone());
    family
}

/// The same with the unit `bytes`.
fn bytes_family(registry: &mut Registry, name: &str, help: &str) -> Family<RouteLabel, Gauge> {
    let family = Family::<RouteLabel, Gauge>::default();
    registry.register_with_unit(name, help, Unit::Bytes, family.clone());
    family
}

/// OpenMetrics names a counter without `_total` in its `# TYPE` line and ends with `# EOF`; text 0.0.4 knows neither, nor units.
fn to_plain_text(openmetrics: &str) -> String {
    let mut out = String::with_capacity(openmetrics.len() + 256);
    let mut lines = openmetrics.lines().peekable();
    while let Some(line) = lines.next() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        let counter = |line: &str| line.strip_prefix("# TYPE ")?.strip_suffix(" counter").map(str::to_owned);
        let written = if let Some(name) = counter(line) {
            writeln!(out, "# TYPE {name}_total counter")
        } else if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap_or((help, ""));
            let suffix = if lines.peek().is_some_and(|next| counter(next).is_some()) { "_total" } else { "" };
            writeln!(out, "# HELP {name}{suffix} {help}")
        } else {
            writeln!(out, "{line}")
        };
        debug_assert!(written.is_ok(), "a String takes every write");
    }
    out
}

/// Kinds of [`SinkError`], as labels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SinkErrorKind {
    NotApplied,
    Refused,
    Unknown,
    Fenced,
    Held,
    Regressed,
}

impl SinkErrorKind {
    const ALL: [SinkErrorKind; 6] =
        [Self::NotApplied, Self::Refused, Self::Unknown, Self::Fenced, Self::Held, Self::Regressed];

    fn word(self) -> &'static str {
        match self {
            Self::NotApplied => "not_applied",
            Self::Refused => "refused",
            Self::Unknown => "unknown",
            Self::Fenced => "fenced",
            Self::Held => "held",
            Self::Regressed => "regressed",
        }
    }
}

/// The counters of one route. Cheap: atomics, and one short lock per observed duration.
pub struct RouteMetrics {
    label: RouteLabel,
    records: [Counter; Outcome::ALL.len()],
    stages: [Histogram; Stage::ALL.len()],
    batch_records: Histogram,
    sink_errors: [Counter; SinkErrorKind::ALL.len()],
    replayed: Counter,
    unchecked: Counter,
    in_flight: Gauge,
    store_keys: Gauge,
    store_disk: Gauge,
    store_memory: Gauge,
    store_planned_memory: Gauge,
    store_planned_disk: Gauge,
    watermark_ms: AtomicI64,
    lag: Family<PartitionLabels, Gauge>,
    partitions: Family<TopicLabels, Gauge>,
    partitions_before: Family<TopicLabels, Gauge>,
}

impl fmt::Debug for RouteMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RouteMetrics").field("route", &self.label.route).finish_non_exhaustive()
    }
}

impl RouteMetrics {
    /// `n` records got `outcome`. Call it before their answers are sent or their offsets committed.
    pub fn count(&self, outcome: Outcome, n: u64) {
        self.records[outcome as usize].inc_by(n);
    }

    /// How many records got `outcome` so far.
    pub fn counted(&self, outcome: Outcome) -> u64 {
        self.records[outcome as usize].get()
    }

    /// A batch or a request spent `duration` in `stage`.
    pub fn observe(&self, stage: Stage, duration: Duration) {
        self.stages[stage as usize].observe(duration.as_secs_f64());
    }

    /// A batch of `records` goes to the sink.
    pub fn batch(&self, records: usize) {
        self.batch_records.observe(records as f64);
    }

    /// The sink answered with `error`.
    pub fn sink_error(&self, error: &SinkError) {
        let kind = match error {
            SinkError::NotApplied { .. } => SinkErrorKind::NotApplied,
            SinkError::Refused { .. } => SinkErrorKind::Refused,
            SinkError::Unknown { .. } => SinkErrorKind::Unknown,
            SinkError::Fenced { .. } => SinkErrorKind::Fenced,
            SinkError::Held { .. } => SinkErrorKind::Held,
        };
        self.sink_errors[kind as usize].inc();
    }

    /// The sink went back behind the store (P6).
    pub fn sink_regressed(&self) {
        self.sink_errors[SinkErrorKind::Regressed as usize].inc();
    }

    #[cfg(test)]
    pub(crate) fn regressed_so_far(&self) -> u64 {
        self.sink_errors[SinkErrorKind::Regressed as usize].get()
    }

    /// `n` source records lay below their shard's position and were skipped (P7).
    pub fn replayed(&self, n: u64) {
        self.replayed.inc_by(n);
    }

    #[cfg(test)]
    pub(crate) fn replayed_so_far(&self) -> u64 {
        self.replayed.get()
    }

    /// `n` records passed without a check while the store was away (rule 7).
    pub fn unchecked(&self, n: u64) {
        self.unchecked.inc_by(n);
    }

    #[cfg(test)]
    pub(crate) fn unchecked_so_far(&self) -> u64 {
        self.unchecked.get()
    }

    /// `n` records were submitted (negative: got their outcome).
    pub fn in_flight(&self, n: i64) {
        self.in_flight.inc_by(n);
    }

    /// Event time has come so far, ms since the epoch.
    pub fn watermark(&self, watermark_ms: i64) {
        self.watermark_ms.store(watermark_ms, Ordering::Relaxed);
    }

    /// Sizes of the store, and what it will need.
    pub fn store(&self, stats: &Stats) {
        let clamp = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        self.store_keys.set(clamp(stats.keys));
        self.store_disk.set(clamp(stats.disk_bytes));
        self.store_memory.set(clamp(stats.memory_bytes));
        if let Some(plan) = &stats.plan {
            self.store_planned_memory.set(clamp(plan.memory_bytes));
            self.store_planned_disk.set(clamp(plan.disk_bytes));
        }
    }

    /// `records` of a partition are not settled yet.
    pub fn lag(&self, topic: &str, partition: i32, records: i64) {
        self.lag.get_or_create(&self.partition(topic, partition)).set(records);
    }

    /// The partition went to another instance: its lag is theirs to tell.
    pub fn forget_lag(&self, topic: &str, partition: i32) {
        self.lag.remove(&self.partition(topic, partition));
    }

    /// A topic has so many partitions, and had `before`, if that was another number.
    pub fn partitions(&self, topic: &str, now: i64, before: Option<i64>) {
        let labels = TopicLabels { route: self.label.route.clone(), topic: topic.to_owned() };
        self.partitions.get_or_create(&labels).set(now);
        if let Some(before) = before {
            self.partitions_before.get_or_create(&labels).set(before);
        }
    }

    fn partition(&self, topic: &str, partition: i32) -> PartitionLabels {
        PartitionLabels { route: self.label.route.clone(), topic: topic.to_owned(), partition }
    }
}

/// The counters of the HTTP door as a whole.
#[derive(Debug)]
pub struct DoorMetrics {
    /// Open connections.
    pub connections: Gauge,
    /// Requests that have no answer yet.
    pub requests: Gauge,
    /// Body bytes held for requests that have no answer yet.
    pub body_bytes: Gauge,
    responses: Family<StatusLabels, Counter>,
    /// The statuses of the fast path.
    common: [(u16, Counter); 3],
}

impl DoorMetrics {
    fn register(registry: &mut Registry) -> Self {
        let (connections, requests, body_bytes) = (Gauge::default(), Gauge::default(), Gauge::default());
        registry.register("http_connections", "Open connections of the HTTP door", connections.clone());
        registry.register("http_in_flight_requests", "Requests without an answer yet", requests.clone());
        let help = "Body bytes held for requests without an answer yet";
        registry.register_with_unit("http_in_flight_body", help, Unit::Bytes, body_bytes.clone());
        let responses: Family<StatusLabels, Counter> =
            family(registry, "http_responses", "Responses of the HTTP door by status");
        let common =
            [200, 201, 207].map(|status| (status, responses.get_or_create_owned(&StatusLabels { status })));
        Self { connections, requests, body_bytes, responses, common }
    }

    /// A response with `status` goes out.
    pub fn response(&self, status: http::StatusCode) {
        let status = status.as_u16();
        match self.common.iter().find(|(common, _)| *common == status) {
            Some((_, counter)) => counter.inc(),
            None => self.responses.get_or_create(&StatusLabels { status }).inc(),
        };
    }
}

#[cfg(test)]
mod tests {
    use dedup_store::StoreOptions;

    use super::*;

    #[test]
    fn outcomes_and_stages_index_their_arrays_in_order() {
        assert!(Outcome::ALL.iter().enumerate().all(|(at, outcome)| *outcome as usize == at));
        assert!(Stage::ALL.iter().enumerate().all(|(at, stage)| *stage as usize == at));
        assert!(SinkErrorKind::ALL.iter().enumerate().all(|(at, kind)| *kind as usize == at));
    }

    #[test]
    fn every_outcome_of_a_route_is_there_from_the_start_and_counts() {
        let metrics = Metrics::new();
        let route = metrics.route("orders");
        route.count(Outcome::Written, 3);
        metrics.route("orders").count(Outcome::Written, 1);
        let text = metrics.render(Format::OpenMetrics, 0);
        assert!(text.contains("oncegate_records_total{route=\"orders\",outcome=\"written\"} 4\n"), "{text}");
        assert!(text.contains("oncegate_records_total{route=\"orders\",outcome=\"unknown\"} 0\n"), "{text}");
        assert_eq!(route.counted(Outcome::Written), 4);
    }

    #[test]
    fn openmetrics_ends_with_eof_and_names_counters_without_total() {
        let metrics = Metrics::new();
        metrics.route("r").observe(Stage::Deliver, Duration::from_millis(3));
        let text = metrics.render(Format::OpenMetrics, 0);
        assert!(text.ends_with("# EOF\n"));
        assert!(text.contains("# TYPE oncegate_records counter\n"));
        assert!(
            text.contains("oncegate_stage_duration_seconds_count{route=\"r\",stage=\"deliver\"} 1"),
            "{text}"
        );
        assert!(text.contains("oncegate_build_info{version="), "{text}");
    }

    #[test]
    fn plain_text_names_counters_as_their_samples_and_has_no_eof() {
        let metrics = Metrics::new();
        metrics.route("r").count(Outcome::Stale, 1);
        let text = metrics.render(Format::Text, 0);
        assert!(text.contains("# HELP oncegate_records_total "), "{text}");
        assert!(text.contains("# TYPE oncegate_records_total counter\n"), "{text}");
        assert!(text.contains("# TYPE oncegate_build_info gauge\n"), "{text}");
        assert!(!text.contains("# EOF") && !text.contains("# UNIT"), "{text}");
    }

    #[test]
    fn watermark_and_its_distance_from_now_are_rendered_once_known() {
        let metrics = Metrics::new();
        let route = metrics.route("r");
        assert!(!metrics.render(Format::Text, 9_000).contains("oncegate_watermark_behind_seconds{"));
        route.watermark(5_000);
        let text = metrics.render(Format::Text, 9_500);
        assert!(text.contains("oncegate_watermark_timestamp_seconds{route=\"r\"} 5.0\n"), "{text}");
        assert!(text.contains("oncegate_watermark_behind_seconds{route=\"r\"} 4.5\n"), "{text}");
    }

    #[test]
    fn p13_a_changed_partition_count_is_shown() {
        let metrics = Metrics::new();
        let route = metrics.route("r");
        route.partitions("t", 6, None);
        assert!(!metrics.render(Format::Text, 0).contains("oncegate_topic_partitions_before{"));
        route.partitions("t", 6, Some(3));
        let text = metrics.render(Format::Text, 0);
        for sample in ["oncegate_topic_partitions", "oncegate_topic_partitions_before"] {
            let value = if sample.ends_with("before") { 3 } else { 6 };
            assert!(text.contains(&format!("{sample}{{route=\"r\",topic=\"t\"}} {value}\n")), "{text}");
        }
    }

    #[test]
    fn lag_of_a_partition_is_forgotten_when_it_is_given_up() {
        let metrics = Metrics::new();
        let route = metrics.route("r");
        route.lag("t", 2, 17);
        let sample = "oncegate_lag_records{route=\"r\",topic=\"t\",partition=\"2\"} 17\n";
        assert!(metrics.render(Format::Text, 0).contains(sample));
        route.forget_lag("t", 2);
        assert!(!metrics.render(Format::Text, 0).contains("oncegate_lag_records{"));
    }

    #[test]
    fn sink_errors_are_counted_by_kind() {
        let metrics = Metrics::new();
        let route = metrics.route("r");
        route.sink_error(&SinkError::Unknown { reason: "x".into() });
        route.sink_regressed();
        let text = metrics.render(Format::Text, 0);
        assert!(text.contains("oncegate_sink_errors_total{route=\"r\",kind=\"unknown\"} 1\n"), "{text}");
        assert!(text.contains("oncegate_sink_errors_total{route=\"r\",kind=\"regressed\"} 1\n"), "{text}");
    }

    #[test]
    fn hooks_run_before_each_rendering() {
        let metrics = Metrics::new();
        let route = metrics.route("r");
        let store = dedup_store::Store::in_memory(StoreOptions {
            window_ms: 0,
            lateness_ms: 0,
            idle_after_ms: 0,
            max_disk_bytes: 0,
            max_memory_bytes: 0,
            commit_interval_ms: 0,
        });
        let stats = Stats { keys: 7, disk_bytes: 100, ..store.stats(0) };
        metrics.on_scrape(move || route.store(&stats));
        let text = metrics.render(Format::Text, 0);
        assert!(text.contains("oncegate_store_keys{route=\"r\"} 7\n"), "{text}");
        assert!(text.contains("oncegate_store_disk_bytes{route=\"r\"} 100\n"), "{text}");
    }

    #[test]
    fn accept_decides_the_format() {
        for (accept, format) in [
            (None, Format::Text),
            (Some("*/*"), Format::Text),
            (Some("text/plain;version=0.0.4"), Format::Text),
            (Some("application/openmetrics-text; version=1.0.0,text/plain;q=0.5"), Format::OpenMetrics),
            (Some("text/plain, application/openmetrics-text;q=0"), Format::Text),
        ] {
            assert_eq!(Format::of_accept(accept), format, "{accept:?}");
        }
    }
}
