//! What a route's lanes and doors share: store, sink, rules, floors, and whether verdicts may be given.

use std::{
    collections::BTreeMap,
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
};

use adapters::sink::{Life, Mark, Session, ShardId, ShardState, SinkError};
use dedup_store::{Block, Checkpoint, Hasher, Store, StoreError};
use parking_lot::{Mutex, RwLock};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::Notify,
};
use tracing::{error, info, warn};

use crate::{
    clock::{ArrivalClock, wall_ms},
    heartbeat::Beating,
    lane::Rules,
    lane::shard::{Last, Standing, standing},
    metrics::RouteMetrics,
};

/// One route at work.
pub(crate) struct Route {
    pub(crate) name: Arc<str>,
    pub(crate) store: Arc<Store>,
    pub(crate) hasher: Hasher,
    pub(crate) rules: Rules,
    pub(crate) metrics: Arc<RouteMetrics>,
    pub(crate) clock: ArrivalClock,
    /// A key was settled or released: parked records may go on.
    pub(crate) changed: Notify,
    /// How often the sink went back (P6). Held for reading while a lane settles, for writing while the store is rebuilt, so
    /// that nothing of the lost history is settled into the rebuilt store.
    pub(crate) history: RwLock<u64>,
    /// One rebuild at a time.
    rebuild: tokio::sync::Mutex<()>,
    /// What each lane sees of the sink.
    sights: RwLock<BTreeMap<u32, Sight>>,
    /// Why lanes are not ready, by lane.
    trouble: Mutex<BTreeMap<u32, String>>,
    /// The history whose marks have all been learnt; behind [`Route::history`] while a rebuild is under way, or was left half done.
    learnt: AtomicU64,
    /// The route is to end: a lane whose sink is away does not wait for it.
    pub(crate) closing: AtomicBool,
    /// The shards that had a position in the sink when the route was opened.
    pub(crate) at_opening: Mutex<Vec<ShardId>>,
    /// Event time is arrival.
    pub(crate) arrival: bool,
    /// The sink keeps marks: the store is a cache of them, and can be made again (P6).
    pub(crate) marks: bool,
    /// Admission floor of the arrival clock, ms.
    pub(crate) admission_ms: AtomicI64,
}

/// What a lane sees of the sink.
pub(crate) enum Sight {
    /// Nothing: verdicts wait (P6).
    Lost,
    /// Its shards were compared with what is known here, on this connection.
    Clear(Life),
    /// It owns nothing that could have gone back.
    Needless,
}

/// A shard of which the sink does not hold all that is known here, or cannot say so.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Behind {
    shard: ShardId,
    /// The last sequence known here.
    known: i64,
    /// The last one of these that the sink holds; none if it cannot say.
    held: Option<i64>,
}

impl Behind {
    pub(crate) fn new(known: Last, sink: &ShardState, standing: Standing) -> Self {
        let held = (standing != Standing::Forgotten).then(|| known.held(sink));
        Self { shard: sink.shard.clone(), known: known.sequence, held }
    }
}

/// The floor that callers' shards have at least, ms (P11), and where copies may come by any partition all others too: a copy may come by
/// another shard than its first record did, and that shard may have forgotten it, so what any shard of the route has forgotten they do
/// not admit.
pub(crate) async fn shared_floor_ms(session: &mut dyn Session) -> Result<i64, SinkError> {
    let states = session.shards("").await?;
    Ok(states.iter().map(|state| state.floor_ms).max().unwrap_or(i64::MIN))
}

/// A shard as it stands in the sink, also one that is not there.
async fn row_of(session: &mut dyn Session, shard: &ShardId) -> Result<ShardState, SinkError> {
    // Others' names may begin as this one does.
    let states = session.shards(shard).await?;
    Ok(states.into_iter().find(|state| state.shard == *shard).unwrap_or_else(|| ShardState::unowned(shard)))
}

/// Why facts could not be learnt.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LearnError {
    #[error(transparent)]
    Sink(#[from] SinkError),
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error(
        "mark {sequence} of shard {shard}: {fault}; the sink's oncegate_marks row is damaged: restore it, or discard the \
             route's bookkeeping"
    )]
    Mark { shard: String, sequence: i64, fault: dedup_store::BlockError },
    #[error("the store was discarded meanwhile; its facts are learnt again first")]
    Rebuilt,
}

impl Route {
    pub(crate) fn new(
        name: Arc<str>,
        store: Arc<Store>,
        hasher: Hasher,
        rules: Rules,
        metrics: Arc<RouteMetrics>,
        arrival: bool,
        marks: bool,
    ) -> Self {
        Self {
            name,
            store,
            hasher,
            rules,
            metrics,
            clock: ArrivalClock::new(),
            changed: Notify::new(),
            history: RwLock::new(0),
            rebuild: tokio::sync::Mutex::new(()),
            sights: RwLock::new(BTreeMap::new()),
            trouble: Mutex::new(BTreeMap::new()),
            learnt: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            at_opening: Mutex::new(Vec::new()),
            arrival,
            marks,
            admission_ms: AtomicI64::new(i64::MIN),
        }
    }

    /// The same once more, with a store of its own that knows as much; nobody sees the sink.
    #[cfg(test)]
    pub(crate) fn twin(&self) -> Self {
        let store = self.store.twin().expect("the stores of models keep nothing on disk");
        let twin = Self::new(
            self.name.clone(),
            Arc::new(store),
            self.hasher.clone(),
            self.rules.clone(),
            self.metrics.clone(),
            self.arrival,
            self.marks,
        );
        *twin.history.write() = *self.history.read();
        twin.learnt.store(self.learnt.load(Ordering::Acquire), Ordering::Release);
        twin
    }

    #[cfg(test)]
    pub(crate) fn learnt_history(&self) -> u64 {
        self.learnt.load(Ordering::Acquire)
    }

    /// The reason why a lane is not ready, or that it is.
    pub(crate) fn set_trouble(&self, lane: u32, reason: Option<String>) {
        let mut trouble = self.trouble.lock();
        match reason {
            Some(reason) => {
                if trouble.get(&lane) != Some(&reason) {
                    warn!(route = %self.name, lane, "{reason}");
                    trouble.insert(lane, reason);
                }
            }
            None => {
                if trouble.remove(&lane).is_some() {
                    info!(route = %self.name, lane, "ready again");
                }
            }
        }
    }

    /// Why the route cannot give verdicts now, if so.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble.lock().values().next().cloned()
    }

    /// What lane `lane` sees of the sink from now on.
    pub(crate) fn sees(&self, lane: u32, sight: Sight) {
        self.sights.write().insert(lane, sight);
    }

    /// Whether verdicts may be given: every lane sees its sink, and its connection stands at this moment. A lane takes note of its
    /// connection's end when it comes to it; by then a door would have given answers that a restored sink does not bear out (P6).
    pub(crate) fn verdicts_open(&self) -> bool {
        self.sights.read().values().all(|sight| match sight {
            Sight::Lost => false,
            Sight::Clear(life) => life.stands(),
            Sight::Needless => true,
        })
    }

    /// The last batch of a shard that the store knows.
    pub(crate) fn known(&self, shard: &str) -> Last {
        self.store.checkpoint(shard).map(|checkpoint| Last::from(&checkpoint)).unwrap_or_default()
    }

    /// The shards whose state in the sink lies behind what is known here (P6), if any. A lane that compared its own shards alone
    /// would answer with facts that other lanes' shards have lost.
    pub(crate) async fn behind(&self, session: &mut dyn Session) -> Result<Option<Vec<Behind>>, LearnError> {
        // What is known is read first: whatever settles meanwhile moves the sink further.
        let known = self.store.checkpoints();
        let states = session.shards("").await?;
        let behind = known.into_iter().filter_map(|checkpoint| {
            let known = Last::from(&checkpoint);
            let state = states.iter().find(|state| state.shard == checkpoint.shard);
            let gone = || ShardState::unowned(&checkpoint.shard);
            let state = state.cloned().unwrap_or_else(gone);
            let standing = standing(known, &state);
            standing.is_lost().then(|| Behind::new(known, &state, standing))
        });
        let behind: Vec<Behind> = behind.collect();
        Ok((!behind.is_empty() && !planted!(StoreAheadTaken)).then_some(behind))
    }

    /// Says what the sink has lost.
    fn report(&self, behind: &[Behind]) {
        if behind.iter().any(|behind| behind.held.is_some()) {
            self.metrics.sink_regressed();
        }
        for Behind { shard, known, held } in behind {
            match held {
                Some(held) => error!(route = %self.name, %shard, known, held,
                    "the sink went back: batches {} to {known} of the shard are lost there; a relay reads them again, callers of \
                     the HTTP door have to send them again", held + 1),
                None => warn!(route = %self.name, %shard, known,
                    "so many owners have written to the shard since that the sink cannot say whether it holds what is known here: \
                     everything is learnt anew"),
            }
        }
    }

    /// Settles what the sink knows, if the history is still the one that was in force when it was compared with the store: else the
    /// store would know a checkpoint without the facts below it, or facts that the sink has lost.
    fn settle_learnt(&self, seen: u64, checkpoint: Checkpoint, blocks: &[Block]) -> Result<(), LearnError> {
        let history = self.history.read();
        if *history != seen {
            return Err(LearnError::Rebuilt);
        }
        self.ask_store(|store| store.settle(&[checkpoint], blocks, wall_ms()))?;
        Ok(())
    }

    /// Learns the facts of `state`'s shard above `from` out of the sink's marks; answers with how many. `seen`: the history in which
    /// `from` was read. `state` was read before the marks, on the same connection.
    async fn learn_marks(
        &self,
        beating: &mut Beating<'_>,
        state: &ShardState,
        from: i64,
        seen: u64,
    ) -> Result<u64, LearnError> {
        let shard = &state.shard;
        let mut at = from;
        let mut facts = 0;
        loop {
            let marks = beating.session.marks_since(shard, at).await?;
            let Some(last) = marks.last() else { return Ok(facts) };
            at = last.sequence;
            let last = if at <= state.sequence {
                Last::of(&state.lineage, at)
            } else {
                // Somebody writes on meanwhile. Read after the marks, the row knows who.
                Last::of(&row_of(beating.session, shard).await?.lineage, at)
            };
            let mut blocks =
                marks.iter().map(|mark| self.unpack(shard, mark)).collect::<Result<Vec<_>, _>>()?;
            if planted!(MarkSkipped) {
                blocks.pop();
            }
            facts += blocks.iter().map(|block| block.entries.len() as u64).sum::<u64>();
            let checkpoint = Checkpoint {
                shard: shard.clone(),
                sequence: last.sequence,
                epoch: last.epoch,
                position: None,
                watermark_ms: i64::MIN,
                floor_ms: i64::MIN,
            };
            self.settle_learnt(seen, checkpoint, &blocks)?;
            beating.beat().await;
        }
    }

    /// Learns the marks of a shard that is not owned here.
    pub(crate) async fn learn_marks_of(
        &self,
        beating: &mut Beating<'_>,
        shard: &ShardId,
    ) -> Result<(), LearnError> {
        let state = row_of(beating.session, shard).await?;
        self.learn_marks_at(beating, &state).await
    }

    /// The same, its row having been read on this connection.
    pub(crate) async fn learn_marks_at(
        &self,
        beating: &mut Beating<'_>,
        state: &ShardState,
    ) -> Result<(), LearnError> {
        let seen = *self.history.read();
        let known = self.known(&state.shard);
        let standing = standing(known, state);
        if standing.is_lost() {
            self.went_back(beating, &[Behind::new(known, state, standing)], seen).await?;
        } else {
            self.learn_marks(beating, state, known.sequence, seen).await?;
        }
        Ok(())
    }

    /// Learns what `state`'s shard settled above `from`, and its checkpoint.
    async fn learn(
        &self,
        beating: &mut Beating<'_>,
        state: &ShardState,
        from: i64,
        seen: u64,
    ) -> Result<u64, LearnError> {
        let facts = self.learn_marks(beating, state, from, seen).await?;
        let Last { sequence, epoch } = Last::of(&state.lineage, state.sequence);
        let checkpoint = Checkpoint {
            shard: state.shard.clone(),
            sequence,
            epoch,
            position: state.position,
            watermark_ms: state.watermark_ms,
            floor_ms: state.floor_ms,
        };
        self.settle_learnt(seen, checkpoint, &[])?;
        Ok(facts)
    }

    /// Asks the store. Where it may read the disk or wait for it, the runtime's other tasks go on on another thread meanwhile.
    pub(crate) fn ask_store<T>(&self, ask: impl FnOnce(&Store) -> T) -> T {
        let others_may_go_on =
            Handle::try_current().is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread);
        if others_may_go_on && self.store.may_wait() {
            tokio::task::block_in_place(|| ask(&self.store))
        } else {
            ask(&self.store)
        }
    }

    /// A mark's block, checked.
    pub(crate) fn unpack(&self, shard: &ShardId, mark: &Mark) -> Result<Block, LearnError> {
        Block::decode(&self.hasher, shard, mark.sequence, mark.block.clone())
            .map_err(|fault| LearnError::Mark { shard: shard.to_string(), sequence: mark.sequence, fault })
    }

    /// The sink went back (P6), or a shard comes that is behind what the store has forgotten (P11): forget everything, floors included,
    /// and learn it again from all of the route's marks.
    /// `seen` is the caller's view of [`Route::history`]: if another lane rebuilt meanwhile, nothing is left to do. Answers with
    /// the history that is now in force.
    pub(crate) async fn rebuild(&self, beating: &mut Beating<'_>, seen: u64) -> Result<u64, LearnError> {
        let _one = beating.while_waiting(self.rebuild.lock()).await;
        if *self.history.read() == seen {
            let mut history = self.history.write();
            self.ask_store(Store::discard)?;
            *history += 1;
        }
        self.learn_all(beating).await
    }

    /// [`Route::rebuild`], having said of which shards the sink does not hold what was known.
    pub(crate) async fn went_back(
        &self,
        beating: &mut Beating<'_>,
        behind: &[Behind],
        seen: u64,
    ) -> Result<u64, LearnError> {
        self.report(behind);
        self.rebuild(beating, seen).await
    }

    /// Waits for a rebuild that is under way, and ends one that was left half done. Answers with the history in force.
    pub(crate) async fn complete(&self, beating: &mut Beating<'_>) -> Result<u64, LearnError> {
        if planted!(RebuildNotAwaited) {
            return Ok(*self.history.read());
        }
        let _one = beating.while_waiting(self.rebuild.lock()).await;
        self.learn_all(beating).await
    }

    async fn learn_all(&self, beating: &mut Beating<'_>) -> Result<u64, LearnError> {
        let history = *self.history.read();
        if self.learnt.load(Ordering::Acquire) == history {
            return Ok(history);
        }
        let mut facts = 0;
        // Only marks are read here: a shard's owner adopts its row when it acquires it again.
        for state in beating.session.shards("").await? {
            facts += self.learn_marks(beating, &state, 0, history).await?;
        }
        self.learnt.store(history, Ordering::Release);
        warn!(route = %self.name, facts, "the store was discarded and rebuilt from the sink's marks");
        Ok(history)
    }

    /// Brings the store level with one acquired shard; says how the two stood. `seen`: the history, read before `known` was.
    pub(crate) async fn catch_up(
        &self,
        beating: &mut Beating<'_>,
        state: &ShardState,
        known: Last,
        seen: u64,
    ) -> Result<Standing, LearnError> {
        let standing = match standing(known, state) {
            Standing::Regressed if planted!(StoreAheadTaken) => Standing::Level,
            standing => standing,
        };
        match standing {
            Standing::Level => {
                // A store without a checkpoint has none of the facts, whatever the caller knows.
                if self.store.checkpoint(&state.shard).is_none() {
                    self.learn(beating, state, 0, seen).await?;
                }
            }
            Standing::SinkAhead => {
                let facts = self.learn(beating, state, known.sequence, seen).await?;
                info!(route = %self.name, shard = %state.shard, from = known.sequence, to = state.sequence, facts,
                      "learnt facts from the sink's marks");
            }
            Standing::Regressed | Standing::Forgotten => {}
        }
        Ok(standing)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use adapters::sink::Mode;
    use dedup_store::{Algorithm, Digest, Entry, Fingerprint, Identity, Settled, SlotKind, StoreOptions};
    use tempfile::TempDir;

    use super::*;
    use crate::metrics::Metrics;

    fn key(number: u64) -> Fingerprint {
        Fingerprint(xxhash_rust::xxh3::xxh3_128(&number.to_le_bytes()).to_be_bytes())
    }

    /// A route over a store with keys 0 to 4,999 in a run on disk, and key 9,999 in memory.
    fn route(folder: &TempDir) -> Route {
        let options = StoreOptions {
            window_ms: 3_600_000,
            lateness_ms: 0,
            idle_after_ms: 30_000,
            max_disk_bytes: 1 << 30,
            max_memory_bytes: 1 << 20,
            commit_interval_ms: 1,
        };
        let store = Store::open(folder.path(), options).unwrap();
        let identity = Identity {
            route_id: [3; 16],
            key_spec_id: 1,
            algorithm: Algorithm::Xxh3Secret,
            secret: [9; 192],
        };
        let hasher = store.bind(&identity).unwrap();
        let settle = |sequence: i64, keys: std::ops::Range<u64>| {
            let fact = |number| Entry {
                fingerprint: key(number),
                digest: Digest(number),
                event_ms: 1_000,
                settled: Settled::Written,
            };
            let block = Block::encode(&hasher, "a", sequence, keys.map(fact).collect());
            let ticket = store.settle(&[], &[block], 0).unwrap();
            store.wait_durable(ticket).unwrap();
        };
        settle(1, 0..5_000);
        settle(2, 9_999..10_000);
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while !store.stats(0).slots.iter().any(|slot| slot.kind == SlotKind::Sealed) {
            assert!(std::time::Instant::now() < end, "nothing is sealed: {}", store.stats(0));
            std::thread::sleep(Duration::from_millis(2));
        }
        let rules = Rules { mode: Mode::Insert, ..Rules::default() };
        let metrics = Metrics::new().route("r");
        Route::new("r".into(), Arc::new(store), hasher, rules, metrics, false, true)
    }

    /// A lane that had asked the sink before another lane discarded the store settled its answer afterwards: the store knew the
    /// checkpoint and not the facts below it, and after a crash, before all was learnt again, never learnt them.
    #[test]
    fn p6_what_was_asked_before_a_discard_is_not_settled_after_it() {
        let folder = TempDir::new().unwrap();
        let route = route(&folder);
        let checkpoint = |sequence| Checkpoint {
            shard: "a".into(),
            sequence,
            epoch: 0,
            position: None,
            watermark_ms: 1_000,
            floor_ms: i64::MIN,
        };
        let seen = *route.history.read();
        route.settle_learnt(seen, checkpoint(3), &[]).unwrap();
        {
            let mut history = route.history.write();
            route.store.discard().unwrap();
            *history += 1;
        }
        assert!(matches!(route.settle_learnt(seen, checkpoint(4), &[]), Err(LearnError::Rebuilt)));
        assert_eq!(route.store.checkpoint("a"), None);
        route.settle_learnt(seen + 1, checkpoint(5), &[]).unwrap();
        assert_eq!(route.known("a").sequence, 5);
    }

    /// One worker, and a store that waits until another task has run.
    #[test]
    fn others_go_on_while_the_store_waits() {
        let folder = TempDir::new().unwrap();
        let route = Arc::new(route(&folder));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let (says, heard) = mpsc::channel();
        let (asks, asked) = mpsc::channel();
        let waits = runtime.spawn(async move {
            route.ask_store(|store| {
                asks.send(()).unwrap();
                // Nobody but the other task says it.
                heard.recv_timeout(Duration::from_secs(20)).expect("the other task does not run");
                store.peek(&key(7)).unwrap()
            })
        });
        asked.recv_timeout(Duration::from_secs(20)).unwrap();
        runtime.spawn(async move { says.send(()).unwrap() });
        let known = runtime.block_on(waits).unwrap();
        assert_eq!(known.map(|known| known.settled), Some(Settled::Written));
    }

    #[test]
    fn a_store_is_asked_on_any_runtime_and_on_none() {
        let folder = TempDir::new().unwrap();
        let route = route(&folder);
        assert_eq!(route.store.peek_in_memory(&key(7)).unwrap(), None, "it is on disk");
        assert!(route.store.peek_in_memory(&key(9_999)).unwrap().is_some_and(|known| known.is_some()));
        let known = || route.ask_store(|store| store.peek(&key(7)).unwrap().is_some());
        assert!(known());
        let one = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert!(one.block_on(async { known() }));
        let many = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        assert!(many.block_on(async { known() }));
    }
}
