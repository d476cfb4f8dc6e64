//! What a sink in memory holds, exactly as a Transactional sink does: shard rows, rows, marks, dead letters, in one [`Db`] that
//! is changed whole or not at all; and what stands around it: connections, attempts whose client is gone, frozen owners.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use adapters::{
    lineage::Lineage,
    sink::{
        Batch, MarkBlock, Mode, OnRefused, Pulse, RouteRow, RowKind, RowOutcome, ShardId, ShardState,
        ShardStep, SinkError,
    },
};
use bytes::Bytes;
use tokio::time::Instant;

use super::{
    encode::{POISON, RowValue},
    faults::Faults,
    invariant::{Broken, Invariant},
    trace::{note, told},
};

#[derive(Clone, Debug)]
pub(super) struct ShardRow {
    pub(super) epoch: i64,
    pub(super) sequence: i64,
    /// Epoch of the owner that set the sequence.
    pub(super) writer: i64,
    pub(super) position: Option<i64>,
    pub(super) watermark_ms: i64,
    pub(super) floor_ms: i64,
    pub(super) owner: String,
    pub(super) heartbeat: Instant,
    pub(super) partitions: Option<i64>,
    pub(super) source: Option<String>,
    pub(super) lineage: Lineage,
}

impl ShardRow {
    pub(super) fn new() -> Self {
        Self {
            epoch: 0,
            sequence: 0,
            writer: 0,
            position: None,
            watermark_ms: i64::MIN,
            floor_ms: i64::MIN,
            owner: String::new(),
            heartbeat: Instant::now(),
            partitions: None,
            source: None,
            lineage: Lineage::default(),
        }
    }

    pub(super) fn state(&self, shard: &str) -> ShardState {
        ShardState {
            shard: shard.into(),
            epoch: self.epoch,
            sequence: self.sequence,
            position: self.position,
            watermark_ms: self.watermark_ms,
            floor_ms: self.floor_ms,
            lineage: self.lineage.clone(),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct MarkRow {
    pub(super) epoch: i64,
    pub(super) max_ms: i64,
    pub(super) block: Bytes,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LetterRow {
    pub(super) shard: String,
    pub(super) position: Option<i64>,
    pub(super) kind: &'static str,
    pub(super) payload: String,
}

/// A row that was sent and not refused: what it did, and by which batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Effect {
    pub(super) row: RowValue,
    pub(super) outcome: RowOutcome,
    pub(super) shard: ShardId,
    pub(super) sequence: i64,
}

/// What one batch did to one shard.
#[derive(Clone, Debug)]
pub(super) struct Commit {
    pub(super) step: ShardStep,
    pub(super) block: Option<Bytes>,
}

/// All that a transaction may change.
#[derive(Clone, Debug, Default)]
pub(super) struct Db {
    pub(super) route: Option<RouteRow>,
    pub(super) shards: BTreeMap<String, ShardRow>,
    pub(super) marks: BTreeMap<(String, i64), MarkRow>,
    pub(super) keyed: BTreeMap<String, RowValue>,
    pub(super) listed: Vec<RowValue>,
    pub(super) letters: Vec<Arc<LetterRow>>,
    pub(super) effects: Vec<Arc<Effect>>,
    pub(super) commits: Vec<Arc<Commit>>,
}

#[derive(Clone, Debug)]
pub(super) struct OwnedRow {
    pub(super) kind: RowKind,
    pub(super) value: RowValue,
    pub(super) step: usize,
    pub(super) position: Option<i64>,
    pub(super) event_ms: i64,
    pub(super) payload: String,
}

/// A batch that outlives its client.
#[derive(Clone, Debug)]
pub(super) struct OwnedBatch {
    pub(super) steps: Vec<ShardStep>,
    pub(super) rows: Vec<OwnedRow>,
    pub(super) letters: Vec<LetterRow>,
    pub(super) on_refused: OnRefused,
}

impl OwnedBatch {
    pub(super) fn of(batch: &Batch<'_>) -> Self {
        let text = |payload: Option<&[u8]>| String::from_utf8(payload.unwrap_or_default().to_vec()).unwrap();
        Self {
            steps: batch.steps.to_vec(),
            rows: batch
                .rows
                .iter()
                .map(|row| OwnedRow {
                    kind: row.kind,
                    value: RowValue::parse(row.bytes),
                    step: row.source.step,
                    position: row.source.position,
                    event_ms: row.source.event_ms,
                    payload: text(row.source.payload),
                })
                .collect(),
            letters: batch
                .dead_letters
                .iter()
                .map(|letter| LetterRow {
                    shard: batch.steps[letter.source.step].shard.to_string(),
                    position: letter.source.position,
                    kind: letter.kind,
                    payload: text(letter.source.payload),
                })
                .collect(),
            on_refused: batch.on_refused,
        }
    }
}

impl Db {
    /// The fence (P4): every shard stands at sequence n - 1 under its epoch.
    fn fence(&self, steps: &[ShardStep]) -> Result<(), SinkError> {
        assert!(!steps.is_empty(), "a batch has a step");
        assert!(steps.windows(2).all(|two| two[0].shard < two[1].shard), "shards are locked in order (P4)");
        for step in steps {
            let unknown = |reason: &str| SinkError::Unknown { reason: format!("{}: {reason}", step.shard) };
            let Some(row) = self.shards.get(&*step.shard) else { return Err(unknown("gone")) };
            if row.epoch > step.epoch && !planted!(StaleEpochTaken) {
                return Err(SinkError::Fenced {
                    shard: step.shard.to_string(),
                    owner: row.owner.clone(),
                    epoch: row.epoch,
                });
            }
            let under_it = row.epoch == step.epoch || planted!(StaleEpochTaken);
            if !under_it || row.sequence != step.sequence - 1 {
                return Err(unknown("stands elsewhere"));
            }
        }
        Ok(())
    }

    fn step(&mut self, steps: &[ShardStep]) {
        for step in steps {
            let Some(row) = self.shards.get_mut(&*step.shard) else { continue };
            row.sequence = step.sequence;
            row.writer = step.epoch;
            row.position = step.position.or(row.position);
            row.watermark_ms = step.watermark_ms;
            row.heartbeat = Instant::now();
        }
    }

    /// What would become of each row now.
    pub(super) fn foretell(
        &self,
        mode: Mode,
        keyed: bool,
        batch: &OwnedBatch,
    ) -> Result<Vec<RowOutcome>, SinkError> {
        self.fence(&batch.steps)?;
        // Row keys that the batch itself has touched: the version that is there, if there is a row.
        let mut touched: BTreeMap<&str, Option<i64>> = BTreeMap::new();
        let mut outcomes = Vec::with_capacity(batch.rows.len());
        for (at, row) in batch.rows.iter().enumerate() {
            let RowValue { row: key, val, ver, .. } = &row.value;
            if val == POISON {
                let reason = String::from("check violated: val");
                if batch.on_refused == OnRefused::Abort {
                    return Err(SinkError::Refused { row: at, reason });
                }
                outcomes.push(RowOutcome::Refused { reason });
                continue;
            }
            if !keyed {
                outcomes.push(RowOutcome::Written);
                continue;
            }
            let there =
                touched.get(&**key).copied().unwrap_or_else(|| self.keyed.get(key).map(|row| row.ver));
            let outcome = match (mode, row.kind, there) {
                (_, RowKind::Delete, None) => RowOutcome::Written,
                (_, RowKind::Delete, Some(_)) => RowOutcome::Updated,
                (_, RowKind::Write, None) => RowOutcome::Written,
                (Mode::Insert, ..) => RowOutcome::Stale,
                (Mode::UpsertIfNewer, _, Some(old)) if old >= *ver => RowOutcome::Stale,
                _ => RowOutcome::Updated,
            };
            if outcome != RowOutcome::Stale {
                touched.insert(key, (row.kind == RowKind::Write).then_some(*ver));
            }
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }

    fn write(&mut self, keyed: bool, row: &OwnedRow) {
        match (keyed, row.kind) {
            (false, _) => self.listed.push(row.value.clone()),
            (true, RowKind::Write) => drop(self.keyed.insert(row.value.row.clone(), row.value.clone())),
            (true, RowKind::Delete) => drop(self.keyed.remove(&row.value.row)),
        }
    }

    /// Fence, rows, dead letters, all or nothing; the marks follow with [`Db::mark`].
    pub(super) fn apply(
        &mut self,
        mode: Mode,
        keyed: bool,
        batch: &OwnedBatch,
    ) -> Result<Vec<RowOutcome>, SinkError> {
        let outcomes = self.foretell(mode, keyed, batch)?;
        self.step(&batch.steps);
        for (row, outcome) in batch.rows.iter().zip(&outcomes) {
            let step = &batch.steps[row.step];
            if matches!(outcome, RowOutcome::Refused { .. }) {
                if batch.on_refused == OnRefused::DeadLetter {
                    self.letters.push(Arc::new(LetterRow {
                        shard: step.shard.to_string(),
                        position: row.position,
                        kind: "rejected",
                        payload: row.payload.clone(),
                    }));
                }
                continue;
            }
            if *outcome != RowOutcome::Stale {
                self.write(keyed, row);
            }
            self.effects.push(Arc::new(Effect {
                row: row.value.clone(),
                outcome: outcome.clone(),
                shard: step.shard.clone(),
                sequence: step.sequence,
            }));
        }
        self.letters.extend(batch.letters.iter().cloned().map(Arc::new));
        Ok(outcomes)
    }

    pub(super) fn mark(&mut self, steps: &[ShardStep], marks: &[MarkBlock]) {
        for (at, step) in steps.iter().enumerate() {
            let mark = marks.iter().find(|mark| mark.step == at);
            if let Some(mark) = mark {
                let row = MarkRow { epoch: step.epoch, max_ms: mark.max_ms, block: mark.block.clone() };
                let before = self.marks.insert((step.shard.to_string(), step.sequence), row);
                assert!(before.is_none(), "a mark is unique by shard and sequence (P4)");
            }
            self.commits
                .push(Arc::new(Commit { step: step.clone(), block: mark.map(|mark| mark.block.clone()) }));
        }
    }
}

/// An attempt whose client is gone.
#[derive(Clone, Debug)]
pub(super) struct Ghost {
    pub(super) batch: Arc<OwnedBatch>,
    pub(super) outcomes: Vec<RowOutcome>,
    pub(super) marks: Vec<MarkBlock>,
    pub(super) due: Instant,
    /// Its statements are done: it holds the shard rows until it ends.
    pub(super) executed: bool,
}

/// The sink and what stands around it.
pub(super) struct World {
    pub(super) mode: Mode,
    pub(super) keyed: bool,
    pub(super) db: Db,
    pub(super) faults: Faults,
    pub(super) ghosts: Vec<Ghost>,
    /// Connections that live.
    pub(super) connections: HashMap<u64, Pulse>,
    pub(super) next_connection: u64,
    /// Take-overs so far, in all histories.
    pub(super) taken: u64,
    /// No connection can be made before.
    pub(super) down_until: Option<Instant>,
    /// Owners whose process is stopped.
    pub(super) frozen: HashSet<String>,
    /// `resolve` takes the shards by force, as Postgres does, or leaves them to a newer owner, as SQLite does.
    pub(super) resolve_by_force: bool,
    /// How often the sink went back.
    pub(super) went_back: u32,
    /// Deliveries so far, as they came: whether each was applied at once.
    pub(super) attempts: Vec<Arc<OwnedBatch>>,
    /// Attempts that committed after their client was gone.
    pub(super) ghosts_applied: u32,
    pub(super) heartbeats: u32,
    /// How far the clock of the gateways' hosts is ahead of the sink's.
    pub(super) hosts_ahead_ms: i64,
    /// Marks that one call expires at most.
    pub(super) expire_most: usize,
    pub(super) judge: Judge,
    /// Rows and bookkeeping are in another sink.
    pub(super) elsewhere: bool,
    /// Batches that are in and whose answer is on its way, or was never to come.
    pub(super) answering: i64,
}

/// Looks at each commit. Off in tests that say themselves what must hold: there, what falls panics.
#[derive(Default)]
pub(super) struct Judge {
    pub(super) on: bool,
    /// Of each partition, which event each offset holds.
    pub(super) ids: Vec<Vec<String>>,
    /// None if event times are arrivals.
    pub(super) window_ms: Option<i64>,
    /// What fell first.
    pub(super) fell: Option<Broken>,
    /// Ids that had an effect or a dead letter, and dead letters by shard and offset: of the first so many.
    known: HashSet<String>,
    letters: HashSet<(String, i64)>,
    seen: (usize, usize),
    /// Up to where each shard's records were looked at.
    looked: BTreeMap<ShardId, i64>,
    /// Epoch and sequence of each shard's last batch.
    last: BTreeMap<ShardId, (i64, i64)>,
}

impl Judge {
    pub(super) fn falls(&mut self, invariant: Invariant, what: String) {
        assert!(self.on, "{invariant}: {what}");
        note(|| format!("!! {invariant}: {what}"));
        self.fell.get_or_insert(Broken { invariant, what });
    }

    /// The sink shows an older state.
    fn begin_anew(&mut self) {
        (self.seen, self.known, self.letters) = ((0, 0), HashSet::new(), HashSet::new());
        (self.looked, self.last) = (BTreeMap::new(), BTreeMap::new());
    }

    fn learn(&mut self, db: &Db) {
        for effect in &db.effects[self.seen.0.min(db.effects.len())..] {
            self.known.insert(effect.row.id.clone());
        }
        for letter in &db.letters[self.seen.1.min(db.letters.len())..] {
            self.known.extend(id_of(&letter.payload).map(str::to_owned));
            self.letters.extend(letter.position.map(|at| (letter.shard.clone(), at)));
        }
        self.seen = (db.effects.len(), db.letters.len());
    }

    fn look(&mut self, db: &Db, batch: &OwnedBatch) {
        self.learn(db);
        for step in &batch.steps {
            self.fence(db, step);
            self.prefix(step);
        }
        let Some(window_ms) = self.window_ms else { return };
        for row in batch.rows.iter().filter(|row| row.value.val != POISON) {
            let shard = &batch.steps[row.step].shard;
            let floor_ms = db.shards.get(&**shard).map_or(i64::MIN, |row| row.floor_ms);
            if floor_ms > i64::MIN && row.event_ms < floor_ms + window_ms {
                let what =
                    format!("{} of {} on {shard}, whose floor is {floor_ms}", row.value.id, row.event_ms);
                self.falls(Invariant::FloorSafe, what);
            }
        }
    }

    fn fence(&mut self, db: &Db, step: &ShardStep) {
        let last = self.last.insert(step.shard.clone(), (step.epoch, step.sequence));
        let owner = db.shards.get(&*step.shard).map(|row| row.epoch);
        let follows =
            last.is_none_or(|(epoch, sequence)| step.epoch >= epoch && step.sequence == sequence + 1);
        if !follows || owner != Some(step.epoch) {
            let what = format!(
                "{} after {last:?}, and the owner's epoch is {owner:?}",
                told(std::slice::from_ref(step))
            );
            self.falls(Invariant::FenceHolds, what);
        }
    }

    fn prefix(&mut self, step: &ShardStep) {
        let Some(position) = step.position else { return };
        let partition = step.shard.rsplit('/').next().and_then(|text| text.parse::<usize>().ok());
        let Some(ids) = partition.and_then(|partition| self.ids.get(partition)) else { return };
        let from = self.looked.insert(step.shard.clone(), position).unwrap_or(0);
        let open = (from..position).find(|&offset| {
            let known = ids.get(offset as usize).is_some_and(|id| self.known.contains(id));
            !known && !self.letters.contains(&(step.shard.to_string(), offset))
        });
        if let Some(offset) = open {
            let what =
                format!("{} passes offset {offset}, which has no outcome", told(std::slice::from_ref(step)));
            self.falls(Invariant::PositionPrefix, what);
        }
    }
}

/// The id of a record that can be read.
fn id_of(payload: &str) -> Option<&str> {
    payload.strip_prefix(r#"{"id":""#)?.split('"').next()
}

impl World {
    /// Takes a shard over; its epoch rises above `least` too.
    pub(super) fn raise(&mut self, shard: &str, owner: &str, least: i64) -> ShardState {
        self.taken += 1;
        // As by chance, and the same in each run.
        let rise = 1 + (self.taken.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44) as i64;
        let row = self.db.shards.entry(shard.to_owned()).or_insert_with(ShardRow::new);
        row.epoch = row.epoch.max(least) + rise;
        row.lineage.taken(row.sequence, row.epoch);
        row.owner = owner.to_owned();
        row.heartbeat = Instant::now();
        row.state(shard)
    }

    /// Applies a batch and its marks whole, or nothing.
    pub(super) fn commit(
        &mut self,
        batch: &OwnedBatch,
        seal: impl Fn(&[RowOutcome]) -> Vec<MarkBlock>,
    ) -> Result<Vec<RowOutcome>, SinkError> {
        let outcomes = self.db.apply(self.mode, self.keyed, batch)?;
        self.db.mark(&batch.steps, &seal(&outcomes));
        self.look(batch);
        Ok(outcomes)
    }

    fn look(&mut self, batch: &OwnedBatch) {
        if self.judge.on {
            self.judge.look(&self.db, batch);
        }
    }

    /// Ends the ghosts whose time has come.
    pub(super) fn run_ghosts(&mut self) {
        let now = Instant::now();
        let (due, later): (Vec<Ghost>, Vec<Ghost>) =
            std::mem::take(&mut self.ghosts).into_iter().partition(|ghost| ghost.due <= now);
        self.ghosts = later;
        due.into_iter().for_each(|ghost| self.commit_ghost(ghost));
    }

    fn commit_ghost(&mut self, ghost: Ghost) {
        // Rows that would fare otherwise now belong to a transaction that saw other rows: it fails instead.
        let foretold = self.db.foretell(self.mode, self.keyed, &ghost.batch);
        if foretold.is_ok_and(|outcomes| outcomes == ghost.outcomes)
            && self.db.apply(self.mode, self.keyed, &ghost.batch).is_ok()
        {
            note(|| format!("sink: a batch of before commits: {}", told(&ghost.batch.steps)));
            self.db.mark(&ghost.batch.steps, &ghost.marks);
            self.look(&ghost.batch);
            self.ghosts_applied += 1;
        }
    }

    /// Whoever takes shards waits for the transactions that hold their rows, or ends them (P5).
    pub(super) fn meet_ghosts(&mut self, shards: &[&str]) {
        self.run_ghosts();
        let holds = |ghost: &Ghost| {
            ghost.executed && ghost.batch.steps.iter().any(|step| shards.contains(&&*step.shard))
        };
        let (holding, others): (Vec<Ghost>, Vec<Ghost>) =
            std::mem::take(&mut self.ghosts).into_iter().partition(holds);
        self.ghosts = others;
        for ghost in holding {
            if self.faults.chance(500) {
                self.commit_ghost(ghost);
            }
        }
    }

    /// Fail-over to an older copy, or a restore: every connection ends.
    pub(super) fn go_back(&mut self, to: Db) {
        note(|| "sink: goes back".into());
        self.db = to;
        self.judge.begin_anew();
        self.connections.clear();
        self.ghosts.clear();
        self.went_back += 1;
    }

    pub(super) fn marks_of(&self, shard: &str) -> usize {
        self.db.marks.keys().filter(|(of, _)| of == shard).count()
    }
}
