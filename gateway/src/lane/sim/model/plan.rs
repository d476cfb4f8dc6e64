//! All that a seed decides before a run begins, as data: what comes, when, and what befalls it. A smaller plan of the same seed keeps
//! some of it ([`Keep`]).

use std::{
    collections::BTreeSet,
    fmt::{self, Write},
};

use adapters::sink::Mode;
use rand::{Rng, SeedableRng, rngs::SmallRng};

use super::load::{Event, Kind, Source, Times, draw, draw_shared};
use crate::lane::sim::{faults::Rates, journal::Repeats, rig::BASE_MS};

/// An event and how long after the one before it is sent.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub(super) event: Event,
    pub(super) after_ms: u64,
    /// In two copies at once (callers).
    pub(super) twice: bool,
}

/// What befalls a run from outside.
#[derive(Clone, Debug)]
pub(super) struct Strike {
    pub(super) after_ms: u64,
    pub(super) what: What,
}

/// What the next start finds of the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kept {
    Nothing,
    /// Of each shard, what was settled up to some batch, by this seed.
    Some(u64),
    All,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// The process ends at once; another starts later.
    Crash { node: usize, down_ms: u64, back: Option<usize>, kept: Kept },
    /// It ends in order.
    Close { node: usize, kept: Kept },
    /// The group gives a partition to another instance, or to the same again. `zombie_ms`: the old one hears of it so much later.
    Move { partition: usize, to: usize, zombie_ms: Option<u64>, patience_ms: u64 },
    /// A process is stopped for a while, with what it has in flight.
    Freeze { node: usize, ms: u64 },
    /// Every connection ends.
    Cut,
    /// The sink is not there for a while.
    Down { ms: u64 },
    /// The sink's state now is one that it may go back to.
    Snapshot,
    /// It goes back, if possible while a batch is in and its answer on the way.
    Back { to: usize },
    /// The wall clock of the hosts is set.
    Clock { ms: i64 },
    /// Somebody writes a record, takes its key back, and writes it again after a while.
    Forget { id: usize, after_ms: u64 },
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) seed: u64,
    /// The target is one without transactions, behind the journal.
    pub(super) journal: Option<Repeats>,
    pub(super) mode: Mode,
    pub(super) keyed: bool,
    pub(super) nodes: usize,
    pub(super) call_lanes: u32,
    pub(super) relay_lanes: u32,
    pub(super) rates: Rates,
    pub(super) max_records: usize,
    pub(super) wait_ms: u64,
    pub(super) burst: usize,
    pub(super) resolve_by_force: bool,
    pub(super) times: Times,
    /// Events that come through several sources.
    pub(super) shared: Source,
    pub(super) logs: Vec<Vec<Sent>>,
    pub(super) callers: Vec<Vec<Sent>>,
    /// Whose each partition is at first.
    pub(super) owners: Vec<usize>,
    pub(super) strikes: Vec<Strike>,
    /// The only faults of the sink that happen, of those that chance brings.
    pub(super) faults: Option<BTreeSet<u32>>,
}

/// One partition is idle so long that the route goes on without it and forgets what came through it; then its owner is lost, and copies
/// of the last records before come.
fn idle(rng: &mut SmallRng, nodes: usize, logs: &mut Vec<Vec<Sent>>, strikes: &mut Vec<Strike>) {
    let mut quiet: Vec<Sent> = logs[0].iter().take(rng.random_range(2..8)).cloned().collect();
    let copies = quiet.iter().rev().take(3).cloned().collect::<Vec<_>>();
    let gap_ms = rng.random_range(64_000..80_000);
    let pauses = |at: usize| if at == 0 { gap_ms } else { 0 };
    quiet.extend(copies.into_iter().enumerate().map(|(at, sent)| Sent { after_ms: pauses(at), ..sent }));
    let steady = (0..70).map(|at| {
        let id = format!("steady-{at}");
        let event = Event::new(
            id,
            format!("steady{}", at % 3),
            format!("v{at}"),
            at,
            Kind::Good,
            BASE_MS + at * 2_000,
        );
        Sent { event, after_ms: 1_000, twice: false }
    });
    *logs = vec![quiet, steady.collect()];
    let what = match rng.random_range(0..2) {
        0 => What::Move { partition: 0, to: nodes - 1, zombie_ms: None, patience_ms: 1_000 },
        _ => What::Crash { node: 0, down_ms: 500, back: None, kept: Kept::Nothing },
    };
    strikes.truncate(2);
    strikes.retain(|strike| !matches!(strike.what, What::Move { .. }));
    strikes.push(Strike { after_ms: gap_ms - rng.random_range(2_000..6_000), what });
}

/// Chances of each thing, drawn once a run.
struct Menu([bool; 9]);

impl Menu {
    fn draw(rng: &mut SmallRng) -> Self {
        Self([40, 25, 50, 30, 40, 30, 30, 15, 15].map(|percent| rng.random_range(0..100) < percent))
    }

    fn strike(&self, rng: &mut SmallRng, nodes: usize, partitions: usize, number: usize) -> Option<What> {
        let on: Vec<usize> = (0..self.0.len()).filter(|at| self.0[*at]).collect();
        if on.is_empty() {
            return None;
        }
        let node = rng.random_range(0..nodes);
        let kept =
            |rng: &mut SmallRng| [Kept::Nothing, Kept::Some(rng.random()), Kept::All][rng.random_range(0..3)];
        let goes_back = self.0[6];
        Some(match on[rng.random_range(0..on.len())] {
            0 => What::Crash {
                node,
                down_ms: rng.random_range(0..1_500),
                back: (goes_back && rng.random_range(0..3) == 0).then(|| rng.random_range(0..8)),
                kept: kept(rng),
            },
            1 => What::Close { node, kept: [Kept::Nothing, Kept::All][rng.random_range(0..2)] },
            2 => What::Move {
                partition: rng.random_range(0..partitions),
                to: rng.random_range(0..nodes),
                zombie_ms: (rng.random_range(0..3) == 0).then(|| rng.random_range(0..2_000)),
                patience_ms: rng.random_range(0..3_000),
            },
            3 => What::Freeze { node, ms: rng.random_range(100..9_000) },
            4 => What::Cut,
            5 => What::Down { ms: rng.random_range(10..5_000) },
            6 if rng.random_range(0..3) == 0 => What::Snapshot,
            6 => What::Back { to: rng.random_range(0..8) },
            7 => What::Clock { ms: rng.random_range(-30_000..30_000) },
            _ => What::Forget { id: number, after_ms: rng.random_range(0..3_000) },
        })
    }
}

impl Plan {
    pub(super) fn draw(seed: u64) -> Self {
        let rng = &mut SmallRng::seed_from_u64(seed);
        let (mode, keyed) =
            [(Mode::Insert, false), (Mode::Insert, true), (Mode::Upsert, true), (Mode::UpsertIfNewer, true)]
                [rng.random_range(0..4)];
        let repeats = [
            Repeats::Tokens { window: 1_000, asked: false },
            Repeats::Tokens { window: 12, asked: true },
            Repeats::Forwarded,
            Repeats::Keyed,
        ];
        let journal = seed.is_multiple_of(16).then(|| repeats[rng.random_range(0..4)]);
        let (mode, keyed) = if journal.is_some() { (Mode::Insert, false) } else { (mode, keyed) };
        // Few rows, the same events everywhere, a slow sink: records wait for each other.
        let contended = rng.random_range(0..8) == 0 && journal.is_none();
        let (mode, keyed) = if contended { (Mode::Upsert, true) } else { (mode, keyed) };
        // Whoever has the book's folder is the only one.
        let nodes = if contended || journal.is_some() { 1 } else { rng.random_range(1..=2) };
        let partitions = rng.random_range(1..=4);
        let times =
            [Times::Near, Times::Near, Times::Near, Times::Arrival, Times::Far][rng.random_range(0..5)];
        // The book's clock is the system's.
        let times = if journal.is_some() { Times::Near } else { times };
        // Where facts expire, another record with the same key is new some day.
        let bad = times != Times::Far && rng.random_range(0..3) > 0;
        let rows = if contended { 1 } else { [1, 3, 12][rng.random_range(0..3)] };
        // Copies of one event meet in one shard, unless one instance has them all.
        let shared = if nodes == 1 { draw_shared(rng, 40, partitions, rows) } else { Vec::new() };
        let far = times == Times::Far;
        let (pace, strikes_ms) =
            if far { (6_000, 10_000) } else { (200, [1_200, 4_000][rng.random_range(0..2)]) };
        let timed = |rng: &mut SmallRng, source: Source, one_in: u32, pace: u64| -> Vec<Sent> {
            let sent = |event| {
                let waits = rng.random_range(0..one_in) == 0;
                let after_ms = if waits { rng.random_range(0..pace) } else { 0 };
                Sent { event, after_ms, twice: rng.random_range(0..5) == 0 }
            };
            source.into_iter().map(sent).collect()
        };
        let logs: Vec<Vec<Sent>> = (0..partitions)
            .map(|at| {
                let records = rng.random_range(0..50);
                let source = draw(rng, &format!("p{at}"), records, rows, &shared, bad, times);
                let mut sent = timed(rng, source, 3, pace);
                // Long idle, so that the route goes on without it and forgets.
                if far && rng.random_range(0..3) == 0 && !sent.is_empty() {
                    let at = rng.random_range(0..sent.len());
                    sent[at].after_ms = rng.random_range(30_000..80_000);
                }
                sent
            })
            .collect();
        let callers = (0..rng.random_range(0..=3))
            .map(|at| {
                let records = rng.random_range(0..15);
                let source = draw(rng, &format!("c{at}"), records, rows, &shared, bad, times);
                timed(rng, source, 2, 150)
            })
            .collect();
        let (mut logs, menu) = (logs, Menu::draw(rng));
        let mut strikes: Vec<Strike> = (0..rng.random_range(0..12))
            .filter_map(|number| {
                let what = menu.strike(rng, nodes, partitions, number)?;
                if journal.is_some() && matches!(what, What::Back { .. } | What::Snapshot) {
                    return None;
                }
                Some(Strike { after_ms: rng.random_range(0..strikes_ms), what })
            })
            .collect();
        if far && rng.random_range(0..3) == 0 {
            idle(rng, nodes, &mut logs, &mut strikes);
        }
        let partitions = logs.len();
        Self {
            seed,
            journal,
            mode,
            keyed,
            nodes,
            call_lanes: rng.random_range(1..=2),
            relay_lanes: if contended { 3 } else { rng.random_range(1..=3) },
            rates: Rates {
                deliver: [0, 50, 200, 400][rng.random_range(0..4)],
                call: [0, 30, 150][rng.random_range(0..3)],
                slow_ms: if contended { 40 } else { [0, 3, 40][rng.random_range(0..3)] },
                late_answer: [(0, 0), (0, 0), (4, 3_000)][rng.random_range(0..3)],
                ghost: 600,
            },
            max_records: [1, 3, 8, 64][rng.random_range(0..4)],
            wait_ms: [50, 5_000][rng.random_range(0..2)],
            burst: [1, 4, 40][rng.random_range(0..3)],
            resolve_by_force: rng.random(),
            times,
            shared,
            logs,
            callers,
            owners: (0..partitions).map(|_| rng.random_range(0..nodes)).collect(),
            strikes,
            faults: None,
        }
    }

    /// Every record is judged in one process from start to end, so that outcomes can be counted.
    pub(super) fn countable(&self) -> bool {
        let ends = |strike: &Strike| match strike.what {
            What::Crash { .. } | What::Close { .. } | What::Freeze { .. } | What::Back { .. } => true,
            What::Move { .. } => self.nodes > 1,
            _ => false,
        };
        !self.strikes.iter().any(ends)
    }

    pub(super) fn moves(&self) -> bool {
        self.strikes.iter().any(|strike| matches!(strike.what, What::Move { .. }))
    }

    /// What the sink is, and its mode.
    pub(super) fn kind(&self) -> &'static str {
        match (self.journal, self.mode, self.keyed) {
            (Some(Repeats::Tokens { asked: false, .. }), ..) => "journal, tokens",
            (Some(Repeats::Tokens { asked: true, .. }), ..) => "journal, few tokens",
            (Some(Repeats::Forwarded), ..) => "journal, row by row",
            (Some(Repeats::Keyed), ..) => "journal, by key",
            (None, Mode::Insert, false) => "transactions, insert",
            (None, Mode::Insert, true) => "transactions, insert with row keys",
            (None, Mode::Upsert, _) => "transactions, upsert",
            (None, Mode::UpsertIfNewer, _) => "transactions, upsert-if-newer",
        }
    }

    /// All that `kind` may say.
    pub(super) const KINDS: [&'static str; 8] = [
        "transactions, insert",
        "transactions, insert with row keys",
        "transactions, upsert",
        "transactions, upsert-if-newer",
        "journal, tokens",
        "journal, few tokens",
        "journal, row by row",
        "journal, by key",
    ];

    pub(super) fn crashes(&self) -> u64 {
        self.strikes.iter().filter(|strike| matches!(strike.what, What::Crash { .. })).count() as u64
    }

    /// What of it can be left out, list by list.
    fn lists(&self) -> Vec<(String, Vec<bool>)> {
        let named = |name: char, sources: &[Vec<Sent>]| -> Vec<(String, Vec<bool>)> {
            let list = |(at, source): (usize, &Vec<Sent>)| (format!("{name}{at}"), vec![true; source.len()]);
            sources.iter().enumerate().map(list).collect()
        };
        let mut lists = vec![("strikes".to_owned(), vec![true; self.strikes.len()])];
        lists.extend(named('p', &self.logs));
        lists.extend(named('c', &self.callers));
        lists
    }
}

/// What is kept of a seed's plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Keep {
    /// Of each list, which of its parts.
    pub(super) lists: Vec<(String, Vec<bool>)>,
    /// Faults of the sink, by number; all if none are named.
    pub(super) faults: Option<BTreeSet<u32>>,
    /// Calls take no time.
    pub(super) quick: bool,
    /// One lane of each kind.
    pub(super) one_lane: bool,
}

impl Keep {
    pub(super) fn all(plan: &Plan) -> Self {
        Self { lists: plan.lists(), faults: None, quick: false, one_lane: false }
    }

    pub(super) fn apply(&self, plan: &Plan) -> Plan {
        fn keep<T: Clone>(list: &[T], kept: Option<&Vec<bool>>) -> Vec<T> {
            let kept = |at: usize| kept.is_none_or(|kept| kept.get(at).copied().unwrap_or(false));
            list.iter().enumerate().filter(|(at, _)| kept(*at)).map(|(_, part)| part.clone()).collect()
        }
        let list = |name: &str| self.lists.iter().find(|(of, _)| of == name).map(|(_, kept)| kept);
        let mut small = plan.clone();
        small.strikes = keep(&plan.strikes, list("strikes"));
        for (at, log) in plan.logs.iter().enumerate() {
            small.logs[at] = keep(log, list(&format!("p{at}")));
        }
        for (at, caller) in plan.callers.iter().enumerate() {
            small.callers[at] = keep(caller, list(&format!("c{at}")));
        }
        small.faults = self.faults.clone();
        if self.quick {
            small.rates.slow_ms = 0;
        }
        if self.one_lane {
            (small.call_lanes, small.relay_lanes) = (1, 1);
        }
        small
    }

    /// Reads what [`Keep`] is shown as; lists that are not named are kept whole.
    pub(super) fn parse(text: &str, plan: &Plan) -> Self {
        let mut keep = Self::all(plan);
        for part in text.split_whitespace() {
            let numbers = |text: &str| -> BTreeSet<usize> {
                text.split(',')
                    .filter(|number| !number.is_empty())
                    .map(|number| number.parse().unwrap())
                    .collect()
            };
            match part.split_once('=') {
                None if part == "quick" => keep.quick = true,
                None if part == "one-lane" => keep.one_lane = true,
                Some(("faults", text)) => {
                    keep.faults = Some(numbers(text).into_iter().map(|number| number as u32).collect());
                }
                Some((name, text)) => {
                    let (_, kept) =
                        keep.lists.iter_mut().find(|(of, _)| of == name).expect("a list of the plan");
                    let named = numbers(text);
                    kept.iter_mut().enumerate().for_each(|(at, kept)| *kept = named.contains(&at));
                }
                None => panic!("ONCEGATE_KEEP: {part}?"),
            }
        }
        keep
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers =
            |numbers: Vec<usize>| numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let mut text = String::new();
        for (name, kept) in self.lists.iter().filter(|(_, kept)| kept.contains(&false)) {
            let kept = kept.iter().enumerate().filter(|(_, kept)| **kept).map(|(at, _)| at);
            write!(text, "{name}={} ", numbers(kept.collect()))?;
        }
        if let Some(faults) = &self.faults {
            write!(text, "faults={} ", numbers(faults.iter().map(|&number| number as usize).collect()))?;
        }
        for (word, on) in [("quick ", self.quick), ("one-lane ", self.one_lane)] {
            text.push_str(if on { word } else { "" });
        }
        f.write_str(text.trim_end())
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { mode, keyed, nodes, call_lanes, relay_lanes, rates, max_records, times, .. } = self;
        if let Some(repeats) = self.journal {
            writeln!(f, "a target behind the journal: {repeats:?}")?;
        }
        writeln!(
            f,
            "{mode:?}{}, {nodes} instance(s) of {call_lanes} + {relay_lanes} lanes, batches of {max_records}, times {times:?}, wait {} ms",
            if *keyed { " with row keys" } else { "" },
            self.wait_ms
        )?;
        writeln!(f, "{rates:?}, the only ones of them: {:?}", self.faults)?;
        let events = |sent: &Sent| {
            let Event { id, row, val, ver, kind, .. } = &sent.event;
            let twice = if sent.twice { " twice" } else { "" };
            format!("    +{} ms{twice} {id}: {row}={val} v{ver} {kind:?}\n", sent.after_ms)
        };
        for (at, log) in self.logs.iter().enumerate() {
            writeln!(f, "  partition {at}, of node{}: {} records", self.owners[at], log.len())?;
            f.write_str(&log.iter().map(events).collect::<String>())?;
        }
        for (at, caller) in self.callers.iter().enumerate() {
            writeln!(f, "  caller {at}: {} records", caller.len())?;
            f.write_str(&caller.iter().map(events).collect::<String>())?;
        }
        for Strike { after_ms, what } in &self.strikes {
            writeln!(f, "  +{after_ms} ms {what:?}")?;
        }
        Ok(())
    }
}
