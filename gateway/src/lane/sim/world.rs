//! What a sink in memory holds, exactly as a Transactional sink does: shard rows, rows, marks, dead letters, in one [`Db`] that
//! is changed whole or not at all; and what stands around it: connections, attempts whose client is gone, frozen owners.

use std::collections::{BTreeMap, HashMap, HashSet};

use adapters::sink::{
    Batch, MarkBlock, Mode, OnRefused, Pulse, RouteRow, RowKind, RowOutcome, ShardState, ShardStep, SinkError,
};
use bytes::Bytes;
use tokio::time::Instant;

use super::{
    encode::{POISON, RowValue},
    faults::Faults,
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
    pub(super) shard: String,
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
    pub(super) letters: Vec<LetterRow>,
    pub(super) effects: Vec<Effect>,
    pub(super) commits: Vec<Commit>,
}

#[derive(Clone, Debug)]
pub(super) struct OwnedRow {
    pub(super) kind: RowKind,
    pub(super) value: RowValue,
    pub(super) step: usize,
    pub(super) position: Option<i64>,
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
    /// The fence (P4): every shard moves from sequence n - 1 to n under its epoch, or nothing happens.
    fn fence(&mut self, steps: &[ShardStep]) -> Result<(), SinkError> {
        assert!(!steps.is_empty(), "a batch has a step");
        assert!(steps.windows(2).all(|two| two[0].shard < two[1].shard), "shards are locked in order (P4)");
        for step in steps {
            let unknown = |reason: &str| SinkError::Unknown { reason: format!("{}: {reason}", step.shard) };
            let Some(row) = self.shards.get_mut(&*step.shard) else { return Err(unknown("gone")) };
            if row.epoch > step.epoch {
                return Err(SinkError::Fenced {
                    shard: step.shard.to_string(),
                    owner: row.owner.clone(),
                    epoch: row.epoch,
                });
            }
            if row.epoch != step.epoch || row.sequence != step.sequence - 1 {
                return Err(unknown("stands elsewhere"));
            }
            row.sequence = step.sequence;
            row.writer = step.epoch;
            row.position = step.position.or(row.position);
            row.watermark_ms = step.watermark_ms;
            row.heartbeat = Instant::now();
        }
        Ok(())
    }

    fn write(&mut self, mode: Mode, keyed: bool, row: &OwnedRow) -> RowOutcome {
        let RowValue { row: key, val, ver, .. } = &row.value;
        if val == POISON {
            return RowOutcome::Refused { reason: "check violated: val".into() };
        }
        if !keyed {
            self.listed.push(row.value.clone());
            return RowOutcome::Written;
        }
        let there = self.keyed.get(key);
        let outcome = match (mode, row.kind, there) {
            (_, RowKind::Delete, None) => RowOutcome::Written,
            (_, RowKind::Delete, Some(_)) => {
                self.keyed.remove(key);
                return RowOutcome::Updated;
            }
            (_, RowKind::Write, None) => RowOutcome::Written,
            (Mode::Insert, ..) => return RowOutcome::Stale,
            (Mode::UpsertIfNewer, _, Some(old)) if old.ver >= *ver => return RowOutcome::Stale,
            _ => RowOutcome::Updated,
        };
        if row.kind == RowKind::Write {
            self.keyed.insert(key.clone(), row.value.clone());
        }
        outcome
    }

    /// Fence, rows, dead letters; the marks follow with [`Db::mark`].
    pub(super) fn apply(
        &mut self,
        mode: Mode,
        keyed: bool,
        batch: &OwnedBatch,
    ) -> Result<Vec<RowOutcome>, SinkError> {
        self.fence(&batch.steps)?;
        let mut outcomes = Vec::with_capacity(batch.rows.len());
        for (at, row) in batch.rows.iter().enumerate() {
            let outcome = self.write(mode, keyed, row);
            let step = &batch.steps[row.step];
            match &outcome {
                RowOutcome::Refused { reason } => match batch.on_refused {
                    OnRefused::Abort => {
                        return Err(SinkError::Refused { row: at, reason: reason.clone() });
                    }
                    OnRefused::DeadLetter => self.letters.push(LetterRow {
                        shard: step.shard.to_string(),
                        position: row.position,
                        kind: "rejected",
                        payload: row.payload.clone(),
                    }),
                    OnRefused::Report => {}
                },
                _ => self.effects.push(Effect {
                    row: row.value.clone(),
                    outcome: outcome.clone(),
                    shard: step.shard.to_string(),
                    sequence: step.sequence,
                }),
            }
            outcomes.push(outcome);
        }
        self.letters.extend(batch.letters.iter().cloned());
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
            self.commits.push(Commit { step: step.clone(), block: mark.map(|mark| mark.block.clone()) });
        }
    }

    /// Takes a shard over; its epoch rises above `least` too.
    pub(super) fn raise(&mut self, shard: &str, owner: &str, least: i64) -> ShardState {
        let row = self.shards.entry(shard.to_owned()).or_insert_with(ShardRow::new);
        row.epoch = row.epoch.max(least) + 1;
        row.owner = owner.to_owned();
        row.heartbeat = Instant::now();
        row.state(shard)
    }
}

/// An attempt whose client is gone.
#[derive(Clone, Debug)]
pub(super) struct Ghost {
    pub(super) batch: OwnedBatch,
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
    /// No connection can be made before.
    pub(super) down_until: Option<Instant>,
    /// Owners whose process is stopped.
    pub(super) frozen: HashSet<String>,
    /// `resolve` takes the shards by force, as Postgres does, or leaves them to a newer owner, as SQLite does.
    pub(super) resolve_by_force: bool,
    /// How often the sink went back.
    pub(super) went_back: u32,
    /// Deliveries so far, as they came: whether each was applied at once.
    pub(super) attempts: Vec<OwnedBatch>,
    /// Attempts that committed after their client was gone.
    pub(super) ghosts_applied: u32,
    pub(super) heartbeats: u32,
    /// How far the clock of the gateways' hosts is ahead of the sink's.
    pub(super) hosts_ahead_ms: i64,
    /// Marks that one call expires at most.
    pub(super) expire_most: usize,
}

impl World {
    /// Applies a batch and its marks whole, or nothing.
    pub(super) fn commit(
        &mut self,
        batch: &OwnedBatch,
        seal: impl Fn(&[RowOutcome]) -> Vec<MarkBlock>,
    ) -> Result<Vec<RowOutcome>, SinkError> {
        let mut db = self.db.clone();
        let outcomes = db.apply(self.mode, self.keyed, batch)?;
        db.mark(&batch.steps, &seal(&outcomes));
        self.db = db;
        Ok(outcomes)
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
        let mut db = self.db.clone();
        // Rows that would fare otherwise now belong to a transaction that saw other rows: it fails instead.
        if let Ok(outcomes) = db.apply(self.mode, self.keyed, &ghost.batch)
            && outcomes == ghost.outcomes
        {
            db.mark(&ghost.batch.steps, &ghost.marks);
            self.db = db;
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
        self.db = to;
        self.connections.clear();
        self.ghosts.clear();
        self.went_back += 1;
    }

    pub(super) fn marks_of(&self, shard: &str) -> usize {
        self.db.marks.keys().filter(|(of, _)| of == shard).count()
    }
}
