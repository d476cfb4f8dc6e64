//! The models' environment: a sink with its rows, marks and shard rows; what is on its way to it; and one connection, [`Wire`],
//! through which the product's lanes ask it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use adapters::{
    lineage::Lineage,
    sink::{
        Acquire, Batch, Life, Mark, OnRefused, Pulse, Receipts, Resolution, RouteRow, RowOutcome, Session,
        ShardId, ShardState, ShardStep, SinkError,
    },
};
use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;

use super::search::Broken;

/// A mutation: the model has to find each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Plant {
    /// The fence takes a stale epoch.
    StaleEpoch,
    /// The fence takes any sequence.
    AnySequence,
    /// An unknown commit is said to have failed, and the connection is kept.
    UnknownAsFailed,
    /// Rows without their mark.
    NoMark,
    /// Marks are not read when a shard is taken over.
    NothingLearnt,
    /// A connection that ended with the sink's history is not seen to have ended.
    OldConnection,
    /// A batch's position is one too far.
    PositionAhead,
    /// What was read before a seek counts as read after it.
    OldReading,
    /// Who takes a shard over is not kept in its lineage.
    LineageNotKept,
    /// A shard is taken without raising its epoch.
    SameEpoch,
    /// A lane gives its claims back while its batch is on its way.
    ClaimsDropped,
    /// A lane keeps its claims on a batch that was not taken.
    ClaimsKept,
    /// A parked record does not hold its partition's position.
    ParkedPassed,
    /// Records that go again go in another order.
    AgainReversed,
    /// A refused row is said to be written.
    RefusedAsWritten,
    /// A partition's floor is its own, though copies may come by any.
    OwnFloorOnly,
    /// Marks expire, and their shard's row does not say so.
    FloorNotKept,
    /// Who takes a shard over is not told its floor.
    FloorNotTold,
    /// All marks expire at once.
    MarksTooEarly,
    /// The watermark that is kept with a shard runs ahead of what came.
    WatermarkAhead,
    /// A shard that lags behind what its new owner has forgotten is taken as it is.
    LagIgnored,
}

/// A row on its way.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct SentRow {
    /// Its key's number.
    pub(super) key: u8,
    /// Its row key's.
    pub(super) row: u8,
    pub(super) poison: bool,
    pub(super) step: usize,
    /// Its place in its log.
    pub(super) place: i64,
}

impl SentRow {
    /// A row is its key, its row key, whether the sink refuses it, and its place.
    pub(super) fn bytes(key: u8, row: u8, poison: bool, place: u8) -> [u8; 4] {
        [key, row, u8::from(poison), place]
    }

    fn read(bytes: &[u8], step: usize) -> Self {
        let &[key, row, poison, place] = bytes else { panic!("a row has four bytes: {bytes:?}") };
        Self { key, row, poison: poison == 1, step, place: i64::from(place) }
    }
}

/// A batch as it was sent.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Sent {
    pub(super) steps: Vec<Step>,
    pub(super) rows: Vec<SentRow>,
    /// Keys that go to the dead letters with it.
    pub(super) letters: Vec<u8>,
    dead_letters_refused: bool,
    /// By step.
    pub(super) marks: Vec<(usize, Bytes, i64)>,
}

/// [`ShardStep`], to be told from others.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Step {
    pub(super) shard: ShardId,
    pub(super) epoch: i64,
    pub(super) sequence: i64,
    position: Option<i64>,
    watermark_ms: i64,
}

/// How a batch fares.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum Fares {
    /// On its way; the lane waits.
    OnItsWay,
    /// It is in; the lane does not know yet.
    In,
    /// Its fence held it off; the lane does not know yet.
    HeldOff { by_owner: bool },
    /// The sink went back, and with it whoever carried it; the lane does not know yet.
    Gone,
    /// Nobody waits for it any more, and it may still come.
    Adrift,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Attempt {
    pub(super) lane: usize,
    pub(super) sent: Sent,
    pub(super) fares: Fares,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct ShardRow {
    pub(super) epoch: i64,
    pub(super) sequence: i64,
    /// Epoch of the owner that set the sequence.
    writer: i64,
    pub(super) position: Option<i64>,
    pub(super) watermark_ms: i64,
    pub(super) floor_ms: i64,
    owner: usize,
    lineage: Lineage,
}

impl ShardRow {
    /// What whoever asks is told.
    fn told(&self, shard: &ShardId, plant: Option<Plant>) -> ShardState {
        ShardState {
            shard: shard.clone(),
            epoch: self.epoch,
            sequence: self.sequence,
            position: self.position,
            watermark_ms: self.watermark_ms,
            floor_ms: if plant == Some(Plant::FloorNotTold) { i64::MIN } else { self.floor_ms },
            lineage: self.lineage.clone(),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct MarkRow {
    epoch: i64,
    max_ms: i64,
    block: Bytes,
    keys: Vec<u8>,
}

/// One that took effect.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Effect {
    pub(super) key: u8,
    pub(super) shard: ShardId,
    pub(super) place: i64,
}

/// What a transaction changes.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Db {
    pub(super) shards: BTreeMap<ShardId, ShardRow>,
    marks: BTreeMap<(ShardId, i64), MarkRow>,
    /// By row key, in order.
    pub(super) rows: BTreeMap<u8, Vec<Effect>>,
    /// Times each key went to the dead letters.
    pub(super) letters: BTreeMap<u8, u32>,
    /// Keys whose marks have expired.
    expired: BTreeSet<u8>,
}

impl Db {
    /// How often a key took effect.
    pub(super) fn effects(&self, key: u8) -> usize {
        self.rows.values().flatten().filter(|effect| effect.key == key).count()
    }

    /// Whether a key has its outcome here.
    pub(super) fn decided(&self, key: u8) -> bool {
        self.effects(key) > 0 || self.letters.contains_key(&key)
    }
}

/// All that stands around the lanes.
#[derive(Clone, Hash, Debug)]
pub(super) struct World {
    pub(super) db: Arc<Db>,
    /// What the sink may go back to.
    pub(super) older: Option<Arc<Db>>,
    /// Whether each lane's connection stands.
    pub(super) alive: Vec<bool>,
    pub(super) attempts: Vec<Attempt>,
    pub(super) went_back: bool,
    pub(super) broken: Option<Broken>,
}

impl World {
    pub(super) fn breaks(&mut self, invariant: &'static str, what: String) {
        self.broken.get_or_insert(Broken { invariant, what });
    }

    fn holds_off(&self, sent: &Sent, plant: Option<Plant>) -> Option<Fares> {
        sent.steps.iter().find_map(|step| {
            let Some(row) = self.db.shards.get(&step.shard) else {
                return Some(Fares::HeldOff { by_owner: false });
            };
            let epoch = row.epoch == step.epoch || plant == Some(Plant::StaleEpoch);
            let sequence = row.sequence == step.sequence - 1 || plant == Some(Plant::AnySequence);
            (!epoch || !sequence).then_some(Fares::HeldOff { by_owner: row.epoch > step.epoch })
        })
    }

    /// A batch reaches the sink: its fence (P4), then rows, letters, marks, all or nothing.
    pub(super) fn land(&mut self, at: usize, plant: Option<Plant>) {
        let attempt = self.attempts[at].clone();
        let held_off = self.holds_off(&attempt.sent, plant);
        let waits = attempt.fares == Fares::OnItsWay;
        if waits {
            self.attempts[at].fares = held_off.clone().unwrap_or(Fares::In);
        } else {
            self.attempts.remove(at);
        }
        if held_off.is_some() {
            return;
        }
        self.older = Some(self.db.clone());
        let sent = &attempt.sent;
        for step in &sent.steps {
            let row = &self.db.shards[&step.shard];
            if row.epoch != step.epoch {
                let what = format!("{} took a batch of epoch {} under {}", step.shard, step.epoch, row.epoch);
                self.breaks("fenced_writes_nothing", what);
            }
        }
        let mut breaks = Vec::new();
        let db = Arc::make_mut(&mut self.db);
        for (number, step) in sent.steps.iter().enumerate() {
            let row = db.shards.get_mut(&step.shard).expect("the fence saw it");
            (row.sequence, row.writer) = (step.sequence, step.epoch);
            row.position = step.position.or(row.position);
            row.watermark_ms = step.watermark_ms;
            let mark = sent.marks.iter().find(|(step, ..)| *step == number);
            if let Some((_, block, max_ms)) = mark.filter(|_| plant != Some(Plant::NoMark)) {
                let keys = sent.rows.iter().filter(|row| row.step == number).map(|row| row.key).collect();
                let mark = MarkRow { epoch: step.epoch, max_ms: *max_ms, block: block.clone(), keys };
                db.marks.insert((step.shard.clone(), step.sequence), mark);
            }
        }
        for row in &sent.rows {
            if row.poison {
                if sent.dead_letters_refused {
                    *db.letters.entry(row.key).or_default() += 1;
                }
                continue;
            }
            let shard = sent.steps[row.step].shard.clone();
            let before = db.effects(row.key);
            let effects = db.rows.entry(row.row).or_default();
            if before > 0 && db.expired.contains(&row.key) {
                breaks.push((
                    "forgotten_not_admitted",
                    format!("key {} was forgotten, and taken for new", row.key),
                ));
            } else if before > 0 {
                breaks.push(("once", format!("key {} took effect a second time", row.key)));
            }
            if effects.iter().any(|effect| effect.shard == shard && effect.place > row.place) {
                breaks.push(("order_in_key", format!("{} overtook {} of {shard}", effects.len(), row.place)));
            }
            effects.push(Effect { key: row.key, shard, place: row.place });
        }
        for key in &sent.letters {
            *db.letters.entry(*key).or_default() += 1;
        }
        for (key, times) in &db.letters {
            if *times > 1 {
                breaks.push(("once", format!("key {key} went to the dead letters twice")));
            }
        }
        breaks.into_iter().for_each(|(invariant, what)| self.breaks(invariant, what));
    }

    /// Whether a batch would get in now.
    pub(super) fn passes(&self, sent: &Sent) -> bool {
        self.holds_off(sent, None).is_none()
    }

    /// Whether a batch that nobody waits for could still get in.
    pub(super) fn could_land(&self, attempt: &Attempt) -> bool {
        attempt.fares == Fares::Adrift && self.passes(&attempt.sent)
    }

    /// A connection ends. What was on its way may still come.
    pub(super) fn cut(&mut self, lane: usize) {
        self.alive[lane] = false;
    }

    /// Fail-over to an older copy: all connections end, and what came by them.
    pub(super) fn go_back(&mut self, plant: Option<Plant>) {
        let Some(older) = self.older.take() else { return };
        self.db = older;
        self.went_back = true;
        if plant != Some(Plant::OldConnection) {
            self.alive.fill(false);
        }
        self.attempts.retain(|attempt| attempt.fares != Fares::Adrift);
        for attempt in &mut self.attempts {
            attempt.fares = Fares::Gone;
        }
    }

    /// Whoever takes shards ends the transactions that hold their rows.
    fn raise(&mut self, shard: &ShardId, lane: usize, least: i64, plant: Option<Plant>) -> ShardState {
        let db = Arc::make_mut(&mut self.db);
        let row = db.shards.entry(shard.clone()).or_insert(ShardRow {
            epoch: 0,
            sequence: 0,
            writer: 0,
            position: None,
            watermark_ms: i64::MIN,
            floor_ms: i64::MIN,
            owner: lane,
            lineage: Lineage::default(),
        });
        if plant != Some(Plant::SameEpoch) || row.epoch == 0 {
            // None comes again after the sink went back, and those of its new history are the lower ones.
            let rise = if self.went_back { 1 } else { 1_000 };
            row.epoch = row.epoch.max(least) + rise;
        }
        row.owner = lane;
        if plant != Some(Plant::LineageNotKept) || row.lineage == Lineage::default() {
            row.lineage.taken(row.sequence, row.epoch);
        }
        row.told(shard, plant)
    }
}

/// What happens while a lane asks its sink several things in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Meanwhile {
    /// The connection ends before the call reaches the sink.
    Cut,
    /// The sink has done it, and the connection ends before the answer comes.
    CutAfter,
    /// A batch that is on its way gets there first.
    Lands(usize),
    /// The sink goes back.
    GoesBack,
}

impl fmt::Display for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Meanwhile::Cut => write!(f, "the connection ends before it"),
            Meanwhile::CutAfter => write!(f, "the connection ends after it, before its answer"),
            Meanwhile::Lands(at) => write!(f, "batch {at} on its way gets to the sink before it"),
            Meanwhile::GoesBack => write!(f, "the sink goes back before it"),
        }
    }
}

/// How a delivery ends.
#[derive(Clone, Debug)]
pub(super) enum Word {
    /// It is only looked at; nobody answers.
    Never,
    Receipts(Vec<RowOutcome>),
    Fault(SinkError),
}

/// The world as one lane meets it, for as long as one action takes.
pub(super) struct Bench {
    pub(super) world: World,
    pub(super) lane: usize,
    pub(super) plant: Option<Plant>,
    pub(super) pulse: Option<Pulse>,
    pub(super) meanwhile: Option<(u8, Meanwhile)>,
    /// Calls so far.
    pub(super) calls: u8,
    pub(super) word: Word,
    /// The batch that was sent.
    pub(super) sent: Option<Sent>,
}

impl Bench {
    /// A connection's end is seen.
    pub(super) fn see(&mut self) {
        if !self.world.alive[self.lane] {
            self.pulse = None;
        }
    }

    fn lose(&mut self) {
        self.world.cut(self.lane);
        self.see();
    }
}

/// A lane's session with the sink.
pub(super) struct Wire(pub(super) Arc<Mutex<Bench>>);

fn again(reason: &str) -> SinkError {
    SinkError::NotApplied { reason: reason.into(), retry: true }
}

/// No action asks so often.
const MOST_CALLS: u8 = 200;

impl Wire {
    /// One call, with what happens meanwhile.
    fn call<T>(
        &self,
        connects: bool,
        ask: impl FnOnce(&mut Bench) -> Result<T, SinkError>,
    ) -> Result<T, SinkError> {
        let mut bench = self.0.lock();
        let number = bench.calls;
        bench.calls += 1;
        assert!(number < MOST_CALLS, "it asks for ever");
        let meanwhile = bench.meanwhile.filter(|(at, _)| *at == number).map(|(_, what)| what);
        let plant = bench.plant;
        match meanwhile {
            Some(Meanwhile::Cut) => {
                bench.lose();
                return Err(again("the connection ended"));
            }
            Some(Meanwhile::Lands(at)) => bench.world.land(at, plant),
            Some(Meanwhile::GoesBack) => {
                bench.world.go_back(plant);
                bench.see();
                if bench.pulse.is_none() {
                    return Err(again("the connection ended"));
                }
            }
            Some(Meanwhile::CutAfter) | None => {}
        }
        if bench.pulse.is_none() {
            if !connects {
                return Err(again("there is no connection"));
            }
            let lane = bench.lane;
            bench.world.alive[lane] = true;
            bench.pulse = Some(Pulse::begin());
        }
        let done = ask(&mut bench);
        if meanwhile == Some(Meanwhile::CutAfter) {
            bench.lose();
            return Err(again("the connection ended before the answer"));
        }
        done
    }

    fn owned(bench: &Bench, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        for (shard, epoch) in owned {
            match bench.world.db.shards.get(shard) {
                Some(row) if row.epoch == *epoch => {}
                Some(row) if row.epoch > *epoch => return Err(fenced(shard, row)),
                _ => return Err(again("the sink went back")),
            }
        }
        Ok(())
    }
}

fn fenced(shard: &ShardId, row: &ShardRow) -> SinkError {
    SinkError::Fenced { shard: shard.to_string(), owner: row.owner.to_string(), epoch: row.epoch }
}

#[async_trait]
impl Session for Wire {
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        Ok(proposed.clone())
    }

    async fn acquire(&mut self, shards: &[ShardId], _how: Acquire) -> Result<Vec<ShardState>, SinkError> {
        self.call(true, |bench| {
            let (lane, plant) = (bench.lane, bench.plant);
            Ok(shards.iter().map(|shard| bench.world.raise(shard, lane, 0, plant)).collect())
        })
    }

    async fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        self.call(false, |bench| {
            let shards = bench.world.db.shards.iter().filter(|(shard, _)| shard.starts_with(prefix));
            Ok(shards.map(|(shard, row)| row.told(shard, bench.plant)).collect())
        })
    }

    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        let word = {
            let mut bench = self.0.lock();
            let rows: Vec<SentRow> =
                batch.rows.iter().map(|row| SentRow::read(row.bytes, row.source.step)).collect();
            let outcomes: Vec<RowOutcome> = rows.iter().map(outcome).collect();
            let marks = (batch.seal)(&outcomes);
            let ahead = i64::from(bench.plant == Some(Plant::PositionAhead));
            let far = if bench.plant == Some(Plant::WatermarkAhead) { 10_000 } else { 0 };
            let step = |step: &ShardStep| Step {
                shard: step.shard.clone(),
                epoch: step.epoch,
                sequence: step.sequence,
                position: step.position.map(|position| position + ahead),
                watermark_ms: step.watermark_ms.saturating_add(far),
            };
            bench.sent = Some(Sent {
                steps: batch.steps.iter().map(step).collect(),
                letters: batch
                    .dead_letters
                    .iter()
                    .map(|letter| SentRow::read(letter.source.payload.unwrap_or_default(), 0).key)
                    .collect(),
                dead_letters_refused: batch.on_refused == OnRefused::DeadLetter,
                marks: marks.into_iter().map(|mark| (mark.step, mark.block, mark.max_ms)).collect(),
                rows,
            });
            bench.word.clone()
        };
        match word {
            Word::Never => std::future::pending().await,
            Word::Receipts(rows) => Ok(Receipts { rows }),
            Word::Fault(fault) => {
                if matches!(fault, SinkError::Unknown { .. }) {
                    self.0.lock().lose();
                }
                Err(fault)
            }
        }
    }

    async fn resolve(&mut self, steps: &[ShardStep]) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        self.0.lock().lose();
        self.call(true, |bench| {
            let (lane, plant) = (bench.lane, bench.plant);
            for step in steps {
                let row = bench.world.db.shards.get(&step.shard);
                // Raised by a `resolve` of this lane whose answer was lost: it is its own still.
                if let Some(row) = row.filter(|row| row.epoch > step.epoch && row.owner != lane) {
                    return Err(fenced(&step.shard, row));
                }
            }
            let raise = |step: &ShardStep| bench.world.raise(&step.shard, lane, step.epoch, plant);
            let states: Vec<ShardState> = steps.iter().map(raise).collect();
            let db = &bench.world.db;
            let (mut marks, mut applied) = (Vec::new(), false);
            for (at, step) in steps.iter().enumerate() {
                let mark = db.marks.get(&(step.shard.clone(), step.sequence));
                let mark = mark.filter(|mark| mark.epoch == step.epoch);
                marks.extend(
                    mark.map(|mark| (at, Mark { sequence: step.sequence, block: mark.block.clone() })),
                );
                let row = &db.shards[&step.shard];
                applied |= mark.is_some() || (row.sequence == step.sequence && row.writer == step.epoch);
            }
            Ok((if applied { Resolution::Applied(marks) } else { Resolution::NotApplied }, states))
        })
    }

    async fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        self.call(false, |bench| {
            if bench.plant == Some(Plant::NothingLearnt) {
                return Ok(Vec::new());
            }
            let marks = bench.world.db.marks.iter();
            let of_shard = marks.filter(|((of, at), _)| of == shard && *at > sequence);
            // A page holds one mark, so that pages are met.
            let mark = |((_, at), mark): (&(ShardId, i64), &MarkRow)| Mark {
                sequence: *at,
                block: mark.block.clone(),
            };
            Ok(of_shard.map(mark).take(1).collect())
        })
    }

    async fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError> {
        self.call(false, |bench| {
            Self::owned(bench, owned)?;
            let plant = bench.plant;
            let marks_below = if plant == Some(Plant::MarksTooEarly) { i64::MAX } else { floor_ms };
            let db = Arc::make_mut(&mut bench.world.db);
            let before = db.marks.len();
            for (shard, _) in owned {
                let expired = &mut db.expired;
                db.marks.retain(|(of, _), mark| {
                    let stays = of != shard || mark.max_ms >= marks_below;
                    if !stays {
                        expired.extend(&mark.keys);
                    }
                    stays
                });
                if let Some(row) = db.shards.get_mut(shard).filter(|_| plant != Some(Plant::FloorNotKept)) {
                    row.floor_ms = row.floor_ms.max(floor_ms);
                }
            }
            Ok((before - db.marks.len()) as u64)
        })
    }

    async fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        self.call(false, |bench| Self::owned(bench, owned))
    }

    async fn forget_all(&mut self, _owned: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        Err(again("no model forgets"))
    }

    async fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError> {
        Ok(vec![None; counts.len()])
    }

    async fn now_ms(&mut self) -> Result<i64, SinkError> {
        Ok(crate::clock::wall_ms())
    }

    fn connected(&self) -> bool {
        self.0.lock().pulse.is_some()
    }

    fn life(&self) -> Life {
        self.0.lock().pulse.as_ref().map_or_else(Life::over, Pulse::life)
    }
}

/// What becomes of a row.
pub(super) fn outcome(row: &SentRow) -> RowOutcome {
    if row.poison { RowOutcome::Refused { reason: "poison".into() } } else { RowOutcome::Written }
}
