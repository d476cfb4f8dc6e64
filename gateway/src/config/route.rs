//! `[routes.NAME]`.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use adapters::sink::Mode;
use dedup_store::StoreOptions;

use super::{
    format::RegistryAt,
    naming,
    read::{Item, Section, days, ms, nearest, secs},
    relay::{self, RelayConfig},
    server::{self, Bodies, ServerConfig, StoreConfig},
    sink::SinkConfig,
};
use crate::{
    door::{Bearer, HttpLimits},
    key::KeySpec,
    lane::{DeadLetterPolicy, LatePolicy, MismatchPolicy, RefusedPolicy, Rules},
    naming::{EventTime, NamingRules},
};

/// One route: what names its records, where they go, and what becomes of those that do not.
#[derive(Clone, Debug)]
pub struct RouteConfig {
    /// Its name in the file and in URLs.
    pub name: String,
    /// Name of its sink.
    pub sink: String,
    /// How records become names and rows; with the sink's row key.
    pub naming: NamingRules,
    /// What lanes do; `key_within_row_key` is left to the gate.
    pub rules: Rules,
    /// A shard quiet for so long leaves the watermark's minimum.
    pub idle_after: Duration,
    /// Where a relay's bad records go; [`Rules::dead_letters`] says the same in the lanes' words.
    pub dead_letters: DeadLettersTo,
    /// How many lanes.
    pub lanes: Lanes,
    /// Bounds of HTTP requests.
    pub http: HttpLimits,
    /// A caller waits so long for an outcome before it is told that it is unknown.
    pub answer_timeout: Duration,
    /// Producers may choose keys with bad intent: SipHash names them.
    pub untrusted_keys: bool,
    /// The hash secret; none: made once and kept in the sink.
    pub hash_secret: Option<HashSecret>,
    /// `gap = "skip"`: a relay reads on behind records that are gone, and counts them.
    pub skip_gaps: bool,
    /// `scope = "route"`: copies may be in any partition, so a relay reads only while it has all of them.
    pub whole_topics: bool,
    /// Where the schemas of the records are, if they are registered.
    pub registry: Option<RegistryAt>,
    /// There if the route is a relay as well as an HTTP door.
    pub relay: Option<RelayConfig>,
}

impl RouteConfig {
    /// For the route's dedup store.
    pub fn store(&self, store: &StoreConfig) -> StoreOptions {
        StoreOptions {
            window_ms: self.rules.window_ms,
            lateness_ms: self.rules.lateness_ms,
            idle_after_ms: whole_ms(self.idle_after),
            max_disk_bytes: store.max_disk,
            max_memory_bytes: store.max_memory,
            commit_interval_ms: store.commit_interval.as_millis() as u64,
        }
    }
}

/// How many lanes a route has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lanes {
    /// For callers.
    pub http: u32,
    /// For the relay; none: as many as partitions or cores, whichever is less.
    pub relay: Option<u32>,
}

/// Where records go that a relay cannot write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeadLettersTo {
    /// Beside the rows, in the batch's transaction.
    Sink,
    /// To a topic of the relay's cluster.
    Topic(String),
    /// To a file.
    File(PathBuf),
    /// Nowhere: the relay stops at the record.
    Stop,
}

/// 192 bytes that key the hash; not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct HashSecret(pub [u8; 192]);

impl std::fmt::Debug for HashSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HashSecret(..)")
    }
}

/// What a route must know of its sink.
pub(super) struct SinkView {
    mode: Mode,
    row_key: Vec<String>,
    keeps_rows: bool,
    takes_json_only: bool,
    /// Records and bytes of one batch at most.
    most: (i64, u64),
}

impl SinkView {
    pub(super) fn of(sink: &SinkConfig) -> Self {
        Self {
            mode: sink.mode,
            row_key: sink.row_key.clone(),
            keeps_rows: sink.keeps_rows(),
            takes_json_only: matches!(sink.target, super::sink::Target::Files(_)),
            most: sink.most_of_batch(),
        }
    }
}

/// The longest window.
pub(super) const MAX_WINDOW: Duration = days(366);

pub(super) fn route(
    name: String,
    section: Section<'_, '_>,
    sinks: &BTreeMap<String, Option<SinkView>>,
    server: Option<&ServerConfig>,
) -> Option<RouteConfig> {
    let sink_item = section.required("sink", "\"NAME\", one of the [sinks.NAME]");
    let sink = sink_item.as_ref().and_then(Item::text);
    let view = sink.as_ref().and_then(|sink| sinks.get(sink));
    if let (Some(item), Some(sink), None) = (&sink_item, &sink, view) {
        let remedy = match nearest(sink, sinks.keys().map(String::as_str)) {
            Some(guess) => format!("did you mean {guess:?}?"),
            None => format!("add [sinks.{sink}]"),
        };
        item.fault("is no sink of this file", remedy);
    }
    let view = view.and_then(Option::as_ref);

    let relay_section = section.section("kafka");
    let has_relay = relay_section.is_some();
    let relay = relay_section.and_then(relay::relay);
    let row_key = view.map(|view| view.row_key.clone()).unwrap_or_default();
    let (naming, registry) = naming::naming(&section, has_relay, row_key)
        .map_or((None, None), |(naming, registry)| (Some(naming), registry));

    if let (Some(naming), Some(view)) = (&naming, view)
        && view.takes_json_only
        && naming.format.encoding != crate::format::Encoding::Json
    {
        section.fault(
            "`format` is not JSON, and its sink writes records as they came into files of JSON lines",
            "choose another sink, or send JSON",
        );
    }

    let rules = rules(&section, naming.as_ref().map(|naming| &naming.event_time), view);
    let (dead_letters, policy) = dead_letters(&section, has_relay);
    let lanes = lanes(&section, has_relay);
    let idle_after = section.duration("idle_after", secs(1)..=days(7), secs(30));
    let untrusted_keys = section.flag("untrusted_keys", false);
    let hash_secret = section.item("hash_secret").and_then(|item| hash_secret(&item.secret()));
    not_yet(&section);
    let (gap, scope) = (section.item("gap"), section.item("scope"));
    if !has_relay {
        for item in gap.iter().chain(&scope) {
            item.fault("counts for relays only", "remove it, or add [routes.NAME.kafka]");
        }
    }
    let whole_topics =
        scope.and_then(|item| item.choice(&[("partition", false), ("route", true)])).unwrap_or(false);
    let skip_gaps = gap.and_then(|item| item.choice(&[("stop", false), ("skip", true)])).unwrap_or(false);
    let http = http(&section, naming.as_ref().map(|naming| &naming.key), server.map(|server| server.bodies));
    section.close();
    let (limits, answer_timeout) = http?;
    Some(RouteConfig {
        name,
        sink: sink?,
        naming: naming?,
        rules: Rules { dead_letters: policy, copies_anywhere: whole_topics, ..rules },
        idle_after,
        dead_letters,
        lanes,
        http: limits,
        answer_timeout,
        untrusted_keys,
        hash_secret,
        skip_gaps,
        whole_topics,
        relay,
        registry,
    })
}

fn rules(section: &Section<'_, '_>, event_time: Option<&EventTime>, view: Option<&SinkView>) -> Rules {
    let window = section.duration("window", secs(1)..=MAX_WINDOW, days(1));
    let lateness_item = section.item("lateness");
    let arrival = event_time == Some(&EventTime::Arrival);
    let lateness = match (&lateness_item, arrival) {
        (Some(item), true) => {
            item.fault(
                "has no meaning where the arrival is the event time: nothing comes late",
                "remove it, or set event_time",
            );
            Duration::ZERO
        }
        (None, true) => Duration::ZERO,
        (Some(item), false) => {
            let lateness = item.duration(Duration::ZERO..=MAX_WINDOW).unwrap_or_default();
            if lateness > window {
                let bound = format!("at most the window, {}", super::units::show_duration(window));
                item.out_of_bounds("is longer than the window", bound, "lower it, or widen the window");
            }
            lateness
        }
        (None, false) => secs(3600).min(window),
    };
    let late_item = section.item("late");
    let late = late_item.as_ref().and_then(|item| {
        item.choice(&[
            ("reject", LatePolicy::Reject),
            ("dead-letter", LatePolicy::DeadLetter),
            ("verify-in-sink", LatePolicy::VerifyInSink),
        ])
    });
    if let (Some(item), Some(LatePolicy::VerifyInSink), Some(view)) = (&late_item, late, view) {
        if !view.keeps_rows {
            item.fault(
                "does not fit a topic or a folder of files, which has no rows to look into",
                "choose another",
            );
        } else if view.row_key.is_empty() {
            item.fault(
                "needs a row key: the sink tells a copy by it",
                "add row_key to the sink, or choose another",
            );
        } else if view.mode == Mode::Upsert {
            item.fault(
                "does not fit mode \"upsert\": an old copy would overwrite a newer row",
                "set mode = \"upsert-if-newer\" or \"insert\", or choose another",
            );
        }
    }
    let batch = batch(section, view.map_or(super::sink::MOST_OF_BATCH, |view| view.most));
    let clock = |key, default| {
        let Some(item) = section.item(key) else { return default };
        if !arrival && event_time.is_some() {
            item.fault("counts only where the arrival is the event time", "remove it");
        }
        item.duration(secs(1)..=days(3660)).unwrap_or(default)
    };
    Rules {
        mode: view.map_or(Mode::Insert, |view| view.mode),
        mismatch: section.choice(
            "mismatch",
            &[("reject", MismatchPolicy::Reject), ("ignore", MismatchPolicy::Ignore)],
            MismatchPolicy::Reject,
        ),
        late_call: late.unwrap_or(LatePolicy::Reject),
        late_relay: late.unwrap_or(LatePolicy::DeadLetter),
        refused: section.choice(
            "refused",
            &[("free", RefusedPolicy::Free), ("settle", RefusedPolicy::Settle)],
            RefusedPolicy::Free,
        ),
        pass_unchecked: section.choice("when_store_unavailable", &[("refuse", false), ("pass", true)], false),
        max_records: batch.max_records,
        max_bytes: batch.max_bytes,
        linger_ms: batch.linger_ms,
        wait_ms: section.duration("wait", ms(0)..=secs(300), secs(5)).as_millis() as u64,
        lateness_ms: whole_ms(lateness),
        window_ms: whole_ms(window),
        max_ahead_ms: whole_ms(section.duration("max_ahead", ms(0)..=days(3660), secs(300))),
        max_clock_skew_ms: whole_ms(clock("max_clock_skew", secs(300))),
        max_clock_jump_ms: whole_ms(clock("max_clock_jump", days(30))),
        ..Rules::default()
    }
}

/// As [`Rules`] has it.
struct Batch {
    max_records: usize,
    max_bytes: usize,
    linger_ms: u64,
}

fn batch(section: &Section<'_, '_>, (records, bytes): (i64, u64)) -> Batch {
    let mut batch = Batch { max_records: 20_000, max_bytes: 16 << 20, linger_ms: 0 };
    if let Some(section) = section.section("batch") {
        batch.max_records = section.count("max_records", 1..=records, 20_000) as usize;
        batch.max_bytes = section.size("max_bytes", 1 << 10..=bytes, 16 << 20) as usize;
        batch.linger_ms = section.duration("linger", ms(0)..=secs(60), ms(0)).as_millis() as u64;
        section.close();
    }
    batch
}

fn dead_letters(section: &Section<'_, '_>, has_relay: bool) -> (DeadLettersTo, DeadLetterPolicy) {
    let to = section
        .item("dead_letters")
        .and_then(|item| dead_letters_to(&item, has_relay))
        .unwrap_or(DeadLettersTo::Sink);
    let policy = match to {
        DeadLettersTo::Sink => DeadLetterPolicy::Sink,
        DeadLettersTo::Topic(_) | DeadLettersTo::File(_) => DeadLetterPolicy::External,
        DeadLettersTo::Stop => DeadLetterPolicy::Stop,
    };
    (to, policy)
}

fn dead_letters_to(item: &Item<'_, '_>, has_relay: bool) -> Option<DeadLettersTo> {
    const FORMS: &str = "\"sink\", { topic = \"NAME\" }, { file = \"PATH\" } or \"stop\"";
    if !item.value.is_table() {
        if item.value.as_str() == Some("store") {
            item.fault("is not in this build: both its sinks have transactions", format!("choose {FORMS}"));
            return None;
        }
        return match item.text_as(FORMS)?.as_str() {
            "sink" => Some(DeadLettersTo::Sink),
            "stop" => Some(DeadLettersTo::Stop),
            _ => {
                item.out_of_bounds("is none of the choices", FORMS.to_owned(), "choose one of them");
                None
            }
        };
    }
    let section = item.section()?;
    let topic = section.text("topic");
    let file = section.text("file");
    let to = match (topic, file) {
        (Some(topic), None) if !topic.is_empty() => {
            if !has_relay {
                item.fault(
                    "names a topic, but the route has no brokers",
                    "add [routes.NAME.kafka], or choose another",
                );
            }
            Some(DeadLettersTo::Topic(topic))
        }
        (None, Some(file)) if !file.is_empty() => Some(DeadLettersTo::File(file.into())),
        _ => {
            item.fault("names neither one topic nor one file", format!("choose {FORMS}"));
            None
        }
    };
    section.close();
    to
}

fn lanes(section: &Section<'_, '_>, has_relay: bool) -> Lanes {
    let mut lanes = Lanes { http: 1, relay: None };
    let Some(item) = section.item("lanes") else { return lanes };
    if item.value.is_table() {
        if let Some(section) = item.section() {
            // None: this instance only relays, and leaves the callers' shards to another.
            lanes.http = section.count("http", i64::from(!has_relay)..=256, 1) as u32;
            let relay = section.item("relay");
            if let (Some(item), false) = (&relay, has_relay) {
                item.fault("counts for relays only", "remove it, or add [routes.NAME.kafka]");
            }
            lanes.relay = relay.and_then(|item| item.integer(1..=256)).map(|lanes| lanes as u32);
            section.close();
        }
    } else if let Some(count) = item.integer(1..=256) {
        lanes = Lanes { http: count as u32, relay: Some(count as u32) };
    }
    lanes
}

/// Options whose other values a later release brings.
fn not_yet(section: &Section<'_, '_>) {
    for (key, now, later) in
        [("marks", "packed", &["indexed"][..]), ("key_change", "refuse", &["dual", "fresh"][..])]
    {
        let Some(item) = section.item(key) else { continue };
        if let Some(word) = item.value.as_str().filter(|word| later.contains(word)) {
            item.fault(format!("{word:?} is not in this build"), format!("use {now:?}, the default"));
        } else {
            item.choice(&[(now, ())]);
        }
    }
}

pub(super) fn http(
    section: &Section<'_, '_>,
    key: Option<&KeySpec>,
    defaults: Option<Bodies>,
) -> Option<(HttpLimits, Duration)> {
    let defaults = defaults.unwrap_or(server::BODIES);
    let http = section.section("http");
    let bodies = http.as_ref().map_or(defaults, |http| server::bodies(http, defaults));
    let mut keyed_batches = false;
    let mut bearer = None;
    let (mut retry_after, mut answer_timeout) = (secs(1), secs(30));
    if let Some(http) = http {
        keyed_batches = http.flag("keyed_batches", false);
        if let Some(item) = http.item("bearer").map(Item::secret)
            && let Some(token) = item.text()
        {
            if token.len() < 16 || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
                item.out_of_bounds(
                    "is no token",
                    "16 or more visible ASCII characters".to_owned(),
                    "make a longer one",
                );
            }
            bearer = Some(Bearer::new(&token));
        }
        retry_after = http.duration("retry_after", secs(1)..=secs(3600), retry_after);
        answer_timeout = http.duration("answer_timeout", ms(100)..=secs(3600), answer_timeout);
        http.close();
    }
    let limits = HttpLimits {
        max_body: bodies.max_body as usize,
        max_stream: bodies.max_stream,
        max_record: bodies.max_record as usize,
        max_records: bodies.max_records as usize,
        keyed_batches,
        bearer,
        retry_after,
        ..HttpLimits::new(key?.clone())
    };
    Some((limits, answer_timeout))
}

fn hash_secret(item: &Item<'_, '_>) -> Option<HashSecret> {
    let text = item.text()?;
    let mut secret = [0; 192];
    let digits = text.as_bytes();
    if digits.len() != 384 || !digits.iter().all(u8::is_ascii_hexdigit) {
        item.out_of_bounds(
            "is no hash secret",
            "384 hex digits".to_owned(),
            "make one with `openssl rand -hex 192`",
        );
        return None;
    }
    for (byte, pair) in secret.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let nibble = |digit: u8| (digit as char).to_digit(16).unwrap_or(0) as u8;
        *byte = nibble(pair[0]) << 4 | nibble(pair[1]);
    }
    Some(HashSecret(secret))
}

/// Durations of the file are whole ms, and far below the bound.
fn whole_ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
