//! Random workloads, and what a table must hold after one.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use adapters::sink::Mode;
use rand::{Rng, rngs::SmallRng};

use super::super::{
    encode::{BAD, POISON},
    rig::{BASE_MS, json},
};

/// What a record is made to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Good,
    /// The sink refuses its row.
    Poison,
    /// It does not encode.
    Bad,
    /// It has no name.
    Garbage,
    /// Too far ahead.
    Ahead,
    /// Older than anything: late, unless nothing has set the watermark yet.
    Late,
}

#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) id: String,
    pub(super) row: String,
    pub(super) val: String,
    pub(super) ver: i64,
    pub(super) kind: Kind,
    pub(super) payload: String,
}

impl Event {
    pub(super) fn new(id: String, row: String, val: String, ver: i64, kind: Kind, t: i64) -> Self {
        let val = match kind {
            Kind::Poison => POISON.to_owned(),
            Kind::Bad => BAD.to_owned(),
            _ => val,
        };
        let t = match kind {
            Kind::Ahead => BASE_MS + 36_000_000,
            Kind::Late => BASE_MS - 30 * 86_400_000,
            _ => t,
        };
        let payload = match kind {
            Kind::Garbage => format!("{{{id}"),
            _ => json(&id, &row, &val, ver, t),
        };
        Self { id, row, val, ver, kind, payload }
    }
}

/// How the event times of a run lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Times {
    /// Well within the window, with some too old and some too far ahead.
    Near,
    /// Records have none: their arrival counts.
    Arrival,
    /// They go on from record to record, many windows far, so that facts expire: a copy may be late, and so may be what comes
    /// through a shard that lags behind. Nothing may take effect twice for that.
    Far,
}

/// One source: a partition, or a caller that sends one event after the other.
pub(super) type Source = Vec<Event>;

/// Draws one source. `shared` events may come through any source.
pub(super) fn draw(
    rng: &mut SmallRng,
    name: &str,
    records: usize,
    rows: usize,
    shared: &[Event],
    bad: bool,
    times: Times,
) -> Source {
    let mut source: Source = Vec::with_capacity(records);
    for at in 0..records {
        let dice = rng.random_range(0..100);
        let own: Vec<&Event> =
            source.iter().filter(|event| event.id.starts_with(name) && event.kind != Kind::Garbage).collect();
        if dice < 30 && !own.is_empty() {
            let copy = own[rng.random_range(0..own.len())].clone();
            source.push(copy);
            continue;
        }
        if dice < 55 && !shared.is_empty() {
            // About the same one everywhere at about the same time.
            let near = (at + rng.random_range(0..3)).min(shared.len() - 1);
            source.push(shared[near].clone());
            continue;
        }
        let t = match times {
            Times::Far => BASE_MS + at as i64 * 2_000 + rng.random_range(-1_000..1_000),
            Times::Near | Times::Arrival => BASE_MS + rng.random_range(-1_000..60_000),
        };
        let ver = rng.random_range(0..20);
        let val = format!("v{at}");
        if dice < 60 && !own.is_empty() && bad {
            // Same key, other content. Only of events that can be known by then: not of those that settle nothing.
            let other = own[rng.random_range(0..own.len())].clone();
            if matches!(other.kind, Kind::Good | Kind::Poison | Kind::Bad) {
                source.push(Event::new(other.id, other.row, val, ver, Kind::Good, t));
                continue;
            }
        }
        let kind = match rng.random_range(0..100) {
            0..4 if bad => Kind::Poison,
            4..7 if bad => Kind::Bad,
            7..9 if bad => Kind::Garbage,
            9..11 if bad && times == Times::Near => Kind::Ahead,
            11..13 if bad && times == Times::Near => Kind::Late,
            _ => Kind::Good,
        };
        let row = match kind {
            Kind::Late => format!("{name}late{at}"),
            _ => format!("{name}r{}", rng.random_range(0..rows)),
        };
        source.push(Event::new(format!("{name}-{at}"), row, val, ver, kind, t));
    }
    source
}

/// Events that may come through any source, on rows that a partition has events of its own for.
pub(super) fn draw_shared(rng: &mut SmallRng, count: usize, partitions: usize, rows: usize) -> Source {
    (0..count)
        .map(|at| {
            let t = BASE_MS + rng.random_range(-1_000..60_000);
            let row = format!("p{}r{}", rng.random_range(0..partitions), rng.random_range(0..rows));
            Event::new(format!("x-{at}"), row, format!("v{at}"), 1, Kind::Good, t)
        })
        .collect()
}

/// What must hold in the end.
#[derive(Default, Debug)]
pub(super) struct Expected {
    /// Ids that must have had exactly one effect.
    pub(super) effects: BTreeSet<String>,
    /// Ids that may have had one.
    pub(super) perhaps: BTreeSet<String>,
    /// Dead letters: partition and offset to kind.
    pub(super) letters: BTreeMap<(usize, i64), &'static str>,
    /// The same, of records that may be late.
    pub(super) letters_perhaps: BTreeSet<(usize, i64)>,
    /// Row key to the value it must end with.
    pub(super) rows: BTreeMap<String, String>,
    /// Any good record may be late.
    pub(super) lenient: bool,
}

impl Expected {
    /// Of a partition, whose order is known.
    pub(super) fn partition(&mut self, mode: Mode, partition: usize, log: &[Event]) {
        let mut first: HashMap<&str, &Event> = HashMap::new();
        let mut rows: BTreeMap<&str, &Event> = BTreeMap::new();
        for (offset, event) in log.iter().enumerate() {
            let at = (partition, offset as i64);
            match (event.kind, first.get(&*event.id)) {
                (Kind::Garbage | Kind::Ahead, _) => {
                    self.letters.insert(at, "rejected");
                }
                (Kind::Late, _) => {
                    self.perhaps.insert(event.id.clone());
                    self.letters_perhaps.insert(at);
                }
                (Kind::Good, _) if self.lenient => {
                    self.perhaps.insert(event.id.clone());
                    self.letters_perhaps.insert(at);
                }
                (_, Some(known)) => {
                    if known.payload != event.payload {
                        self.letters.insert(at, "mismatch");
                    }
                }
                (Kind::Poison | Kind::Bad, None) => {
                    first.insert(&event.id, event);
                    self.letters.insert(at, "rejected");
                }
                (Kind::Good, None) => {
                    first.insert(&event.id, event);
                    self.good(mode, event, &mut rows);
                }
            }
        }
        self.keep(mode, &rows);
    }

    /// Of a caller that sends each event until it hears of its outcome: refused keys stay free.
    pub(super) fn caller(&mut self, mode: Mode, events: &[Event], ordered: bool) {
        let mut first: HashMap<&str, &Event> = HashMap::new();
        let mut rows: BTreeMap<&str, &Event> = BTreeMap::new();
        for event in events {
            match event.kind {
                Kind::Late => drop(self.perhaps.insert(event.id.clone())),
                Kind::Good if self.lenient => drop(self.perhaps.insert(event.id.clone())),
                Kind::Good if !first.contains_key(&*event.id) => {
                    first.insert(&event.id, event);
                    self.good(mode, event, &mut rows);
                }
                _ => {}
            }
        }
        if ordered {
            self.keep(mode, &rows);
        }
    }

    fn good<'a>(&mut self, mode: Mode, event: &'a Event, rows: &mut BTreeMap<&'a str, &'a Event>) {
        self.effects.insert(event.id.clone());
        let wins = match (mode, rows.get(&*event.row)) {
            (_, None) | (Mode::Upsert, _) => true,
            (Mode::UpsertIfNewer, Some(old)) => event.ver > old.ver,
            (Mode::Insert, Some(_)) => false,
        };
        if wins {
            rows.insert(&event.row, event);
        }
    }

    fn keep(&mut self, mode: Mode, rows: &BTreeMap<&str, &Event>) {
        // `insert` promises no order (P8).
        if mode != Mode::Insert {
            self.rows.extend(rows.iter().map(|(row, event)| ((*row).to_owned(), event.val.clone())));
        }
    }

    /// Rows that events of several sources meet on end as it comes.
    pub(super) fn leave_open(&mut self, shared: &[Event]) {
        shared.iter().for_each(|event| drop(self.rows.remove(&event.row)));
    }
}
