//! One route's store: [`Store`]. Locks, waits and disk around [`State`], which decides.

use std::{
    fs::{self, File},
    path::Path,
    sync::Arc,
    time::Instant,
};

use crate::{
    block::Block,
    committer::{self, Held, Shared},
    copy::Snapshot,
    disk::{self, Disk, Fail, Folder},
    error::{Budget, StoreError},
    fact::Known,
    files::{self, Files, Replay},
    filter::Plane,
    fingerprint::{Fingerprint, Hasher, Identity},
    floors::{Checkpoint, Clock, Floors, Spans},
    sealer,
    slots::{SlotSizes, slot_width_ms},
    state::{Item, State, Tombstones, Verdict},
    stats::Stats,
    sync::{
        Mutex, MutexGuard,
        thread::{self, JoinHandle},
    },
    table::Found,
    tail::Standing,
};

/// Settlements on their way to disk: above the first, the committer goes at once; above the second, settling waits for it.
/// Those of tests that choose the order of threads are so small that they are reached.
const HASTE_BYTES: u64 = if cfg!(all(test, feature = "shuttle")) { 100 } else { 8 << 20 };
const WAIT_BYTES: u64 = if cfg!(all(test, feature = "shuttle")) { 200 } else { 64 << 20 };

/// So few keys are first looked up in memory, filters included, under the store's lock: mostly that decides.
const FEW: usize = 16;

/// How a route's store is kept.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// How long after an event its copies are recognised, ms.
    pub window_ms: i64,
    /// How late a new record may come, ms.
    pub lateness_ms: i64,
    /// A shard quiet for so long leaves the watermark's minimum, ms.
    pub idle_after_ms: i64,
    /// Bytes on disk; at the bound nothing new is claimed: [`StoreError::Full`].
    pub max_disk_bytes: u64,
    /// Bytes of tables and filters in memory; as above.
    pub max_memory_bytes: u64,
    /// The committer gathers settlements for so long when nobody waits, ms.
    pub commit_interval_ms: u64,
}

/// Sizes that follow from the budgets, unless a test sets them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    /// Bytes of blocks at which a slot is closed.
    pub(crate) roll_bytes: Option<u64>,
    /// Keys at which a slot is closed, and from which on it is sealed.
    pub(crate) keys: Option<(u64, u64)>,
}

impl Limits {
    fn sizes(&self, width_ms: i64, options: &StoreOptions) -> SlotSizes {
        let mut sizes = SlotSizes::new(width_ms, options.max_memory_bytes);
        if let Some(keys) = self.keys {
            (sizes.max_keys, sizes.seal_keys) = keys;
        }
        sizes
    }
}

impl StoreOptions {
    fn spans(&self) -> Spans {
        Spans {
            window_ms: self.window_ms.max(0),
            lateness_ms: self.lateness_ms.max(0),
            idle_after_ms: self.idle_after_ms.max(0),
        }
    }
}

/// Which group commit a settlement belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Ticket(pub u64);

/// Remembers one route's keys. All methods take `&self`; lanes call from several threads.
///
/// After any IO error but a full disk every call answers [`StoreError::Stopped`]. Dropping the store makes durable what was
/// settled, as far as it can.
pub struct Store {
    options: StoreOptions,
    shared: Arc<Shared>,
    disk: Option<Arc<dyn Disk>>,
    /// The committer and the sealer.
    threads: Vec<JoinHandle<()>>,
    /// Held while the store is open.
    _lock: Option<File>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Store {
    /// Opens or makes the store in `folder`; takes an exclusive lock; loads the filters of the sealed slots
    /// and replays the tails of the others.
    pub fn open(folder: &Path, options: StoreOptions) -> Result<Self, StoreError> {
        fs::create_dir_all(folder)
            .map_err(|error| StoreError::Io(format!("cannot make folder {}: {error}", folder.display())))?;
        let lock = disk::lock(folder)?;
        let mut store = Self::open_on(Arc::new(Folder::new(folder)), options, Limits::default())?;
        store._lock = Some(lock);
        Ok(store)
    }

    /// [`Store::open`] on any disk, without its lock.
    pub(crate) fn open_on(
        disk: Arc<dyn Disk>,
        options: StoreOptions,
        limits: Limits,
    ) -> Result<Self, StoreError> {
        let width_ms = slot_width_ms(options.window_ms, options.lateness_ms);
        let roll_bytes = limits.roll_bytes.unwrap_or_else(|| files::roll_bytes(options.max_disk_bytes));
        let mut files = Files::open(Arc::clone(&disk), width_ms, roll_bytes)?;
        let sizes = limits.sizes(files.manifest().width_ms, &options);
        let mut state = State::new(options.spans(), sizes, files.open_tail().max(1));
        let standing = files.standing();
        let floor_ms = files.manifest().floor_ms.max(standing.retire_ms);
        let checkpoints = standing.checkpoints.values().cloned().collect();
        let clock = Clock::restore(options.spans(), checkpoints, standing.watermark_ms);
        state.restore(clock, floor_ms, standing.intents.clone());
        load_runs(&files, &mut state)?;
        let mut learner = Learner { state, group: 0, last_tail: files.open_tail(), found: Vec::new() };
        files.replay(&mut learner)?;
        let mut held = Held::new(learner.state, files.last_group(), roll_bytes);
        held.retire_ms = floor_ms;
        held.bound =
            files.manifest().identity.as_ref().map(|identity| (identity.clone(), Hasher::new(identity)));
        held.resume(&files);
        let shared = Arc::new(Shared::new(held, Some(files), options.commit_interval_ms));
        let mut store = Store {
            options,
            shared: Arc::clone(&shared),
            disk: Some(Arc::clone(&disk)),
            threads: Vec::new(),
            _lock: None,
        };
        store.start("committer", {
            let shared = Arc::clone(&shared);
            move || committer::run(&shared)
        })?;
        store.start("sealer", move || sealer::run(&shared, &*disk))?;
        Ok(store)
    }

    fn start(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), StoreError> {
        let thread = thread::Builder::new()
            .name(format!("store-{name}"))
            .spawn(run)
            .map_err(|error| StoreError::Io(format!("cannot start the {name}: {error}")))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Keeps nothing on disk (tests, instances without a durable disk in front of a `Transactional` sink).
    pub fn in_memory(options: StoreOptions) -> Self {
        let width_ms = slot_width_ms(options.window_ms, options.lateness_ms);
        let state = State::new(options.spans(), SlotSizes::new(width_ms, options.max_memory_bytes), 1);
        let shared = Shared::new(Held::new(state, 0, u64::MAX), None, options.commit_interval_ms);
        Store { options, shared: Arc::new(shared), disk: None, threads: Vec::new(), _lock: None }
    }

    /// A second store that holds what this one holds now, claims included, and keeps nothing on disk: for models, which try many
    /// futures of one present. None for a store on disk.
    pub fn twin(&self) -> Option<Self> {
        if self.shared.files.is_some() {
            return None;
        }
        let shared = Shared::new(self.shared.held.lock().twin(), None, self.options.commit_interval_ms);
        Some(Store {
            options: self.options.clone(),
            shared: Arc::new(shared),
            disk: None,
            threads: Vec::new(),
            _lock: None,
        })
    }

    /// The identity that the store was bound to, if any.
    pub fn identity(&self) -> Option<Identity> {
        self.shared.held.lock().bound.as_ref().map(|(identity, _)| identity.clone())
    }

    /// Binds the store to its route, durably; refuses another identity than the one it holds.
    pub fn bind(&self, identity: &Identity) -> Result<Hasher, StoreError> {
        let mut files = self.shared.files.as_ref().map(Mutex::lock);
        let mut held = self.shared.held.lock();
        held.check()?;
        match &held.bound {
            Some((bound, hasher)) if bound == identity => Ok(hasher.clone()),
            Some((bound, _)) => Err(StoreError::Unusable(differs(bound, identity))),
            None => {
                if let Some(files) = &mut files {
                    files.bind(identity).map_err(|fail| self.shared.failed(&mut held, fail))?;
                    held.measure(files);
                }
                let hasher = Hasher::new(identity);
                held.bound = Some((identity.clone(), hasher.clone()));
                Ok(hasher)
            }
        }
    }

    /// Checks `items` in order and claims what is new for `lane`; one verdict an item, appended to `verdicts`.
    /// `ahead_ms`: the latest event time that may be new. On an error nothing was claimed, and
    /// `verdicts` is as it was. A store without room answers what needs no claim; `Full` says that an item is new.
    ///
    /// | known of the key | verdict |
    /// | --- | --- |
    /// | settled, at any age | `Duplicate` or `Mismatch` |
    /// | claimed, perhaps earlier in `items` | `InFlight` |
    /// | nothing, below the floor | `Late`, or `New { late: true }` with [`Item::admit_late`] |
    /// | nothing, above `ahead_ms` | `Ahead` |
    /// | nothing | `New`, and claimed |
    pub fn claim(
        &self,
        lane: u32,
        ahead_ms: i64,
        items: &[Item],
        verdicts: &mut Vec<Verdict>,
    ) -> Result<(), StoreError> {
        let keys = || items.iter().map(|item| item.fingerprint).collect();
        let must = |held: &Held| {
            items.len() > FEW || items.iter().any(|item| held.state.must_ask_for(&item.fingerprint))
        };
        let (mut held, found) = self.ask_closed(self.shared.held.lock(), must, keys)?;
        match held.check_room(&self.options) {
            Ok(()) => held.state.claim(lane, ahead_ms, items, &found, verdicts),
            Err(full) if !held.state.claim_nothing(ahead_ms, items, &found, verdicts) => return Err(full),
            Err(_) => {}
        }
        Ok(())
    }

    /// Looks keys up in the closed slots, if they `must` be asked, without the lock, for that may read the
    /// disk: until nothing has changed there meanwhile. Answers with the lock, and with what was found; with
    /// nothing if there was nothing to ask.
    fn ask_closed<'a>(
        &'a self,
        mut held: MutexGuard<'a, Held>,
        must: impl Fn(&Held) -> bool,
        keys: impl FnOnce() -> Vec<Fingerprint>,
    ) -> Result<(MutexGuard<'a, Held>, Vec<Option<Found>>), StoreError> {
        held.check()?;
        let mut found = Vec::new();
        if held.state.all_slots().closed().is_empty() || !must(&held) {
            return Ok((held, found));
        }
        let keys = keys();
        loop {
            let closed = Arc::clone(held.state.all_slots().closed());
            let asked = MutexGuard::unlocked(&mut held, || closed.find_all(&keys, &mut found));
            asked.map_err(|fail| self.shared.failed(&mut held, fail))?;
            held.check()?;
            if Arc::ptr_eq(&closed, held.state.all_slots().closed()) {
                return Ok((held, found));
            }
            // The last to hold it drops it: not under the lock.
            MutexGuard::unlocked(&mut held, || drop(closed));
        }
    }

    /// Whether [`Store::claim`] may read the disk now, or [`Store::settle`] wait for it: an asynchronous caller lets
    /// its other tasks go on elsewhere then.
    pub fn may_wait(&self) -> bool {
        let held = self.shared.held.lock();
        let slots = held.state.all_slots();
        held.pending.bytes >= WAIT_BYTES || slots.unsealed() > 0 || slots.closed().runs().next().is_some()
    }

    /// What is settled under a key, without claiming: the door's fast path for duplicates. May read one block.
    pub fn peek(&self, fingerprint: &Fingerprint) -> Result<Option<Known>, StoreError> {
        let held = self.shared.held.lock();
        held.check()?;
        if let Some(known) = held.state.peek_in_memory(fingerprint) {
            return Ok(known);
        }
        let (held, found) = self.ask_closed(held, |_| true, || vec![*fingerprint])?;
        Ok(held.state.peek(fingerprint, found.first().copied().flatten()))
    }

    /// [`Store::peek`] without the disk: none if memory does not say whether, or as what, the key is settled.
    pub fn peek_in_memory(&self, fingerprint: &Fingerprint) -> Result<Option<Option<Known>>, StoreError> {
        let held = self.shared.held.lock();
        held.check()?;
        Ok(held.state.peek_in_memory(fingerprint))
    }

    /// Whether a key is claimed by some lane and not yet settled or released.
    pub fn in_flight(&self, fingerprint: &Fingerprint) -> bool {
        self.shared.held.lock().state.in_flight(fingerprint)
    }

    /// The batch took effect: its facts replace the claims, and `checkpoints` move on, in one group commit.
    /// Blocks are taken in the order given; a key that is known already keeps its fact, but for a refusal, which yields to an
    /// effect (P2). A checkpoint that lies behind the known one moves only watermark and floor, and those only up. Also for
    /// facts learnt from marks. Never refused for lack of room, but it waits for the disk while 64 MiB are on their way there.
    pub fn settle(
        &self,
        checkpoints: &[Checkpoint],
        blocks: &[Block],
        now_ms: i64,
    ) -> Result<Ticket, StoreError> {
        let mut held = self.shared.held.lock();
        self.shared.wait_below(&mut held, WAIT_BYTES);
        self.shared.wait_for_sealing(&mut held);
        let must = |held: &Held| blocks.iter().any(|block| held.state.must_ask(block));
        let keys = || blocks.iter().flat_map(|block| &block.entries).map(|entry| entry.fingerprint).collect();
        let (mut held, found) = self.ask_closed(held, must, keys)?;
        let held = &mut *held;
        let (_, hasher) = held.bound.as_ref().ok_or(StoreError::Unbound)?;
        blocks.iter().try_for_each(|block| block.check_identity(hasher))?;
        let durable = self.shared.files.is_some();
        let mut found = (!found.is_empty()).then_some(&*found);
        for block in blocks {
            let gone = &mut held.pending.intents;
            let (of_block, rest) = found.map(|found| found.split_at(block.entries.len())).unzip();
            found = rest;
            let learnt = held.state.learn(block, held.pending.number, of_block, |intent| {
                gone.insert(*intent, false);
            });
            let newest_ms = learnt.map_err(|fail| self.shared.failed(held, fail))?;
            held.pending.keys += block.entries.len() as u64;
            if durable {
                held.pending.tombstones.extend(held.state.tombstones_of(block));
                held.pending.blocks.push(block.bytes.clone());
                held.pending.bytes += block.bytes.len() as u64;
                held.pending.newest_ms = held.pending.newest_ms.max(newest_ms);
            }
        }
        for checkpoint in checkpoints {
            let stands = held.state.settle_checkpoint(checkpoint, now_ms);
            held.pending.checkpoints.insert(Arc::clone(&stands.shard), stands);
        }
        held.advance(now_ms);
        let ticket = held.queue(durable);
        if held.pending.bytes >= HASTE_BYTES {
            held.wanted = held.wanted.max(ticket.0);
        }
        self.shared.work.notify_one();
        Ok(ticket)
    }

    /// Gives claims of `lane` back: their writes surely did not take effect.
    pub fn release(&self, lane: u32, fingerprints: &[Fingerprint]) {
        let mut held = self.shared.held.lock();
        fingerprints.iter().for_each(|fingerprint| held.state.release(lane, fingerprint));
    }

    /// Gives all claims of `lane` back.
    pub fn release_lane(&self, lane: u32) {
        self.shared.held.lock().state.release_lane(lane);
    }

    /// The group of the last settlement: once it is durable, so is every fact that a verdict so far has spoken of.
    pub fn latest(&self) -> Ticket {
        self.shared.held.lock().latest()
    }

    /// Waits until the group of `ticket` is on disk; the committer then does not wait for company. `Full` says that the disk
    /// has no room now: the settlement is kept, and gets there once room is made, so ask again.
    pub fn wait_durable(&self, ticket: Ticket) -> Result<(), StoreError> {
        let mut held = self.shared.held.lock();
        let ticket = ticket.min(held.latest());
        loop {
            held.check()?;
            if held.durable >= ticket.0 {
                return Ok(());
            }
            held.check_disk()?;
            held.wanted = held.wanted.max(ticket.0);
            self.shared.work.notify_one();
            self.shared.done.wait(&mut held);
        }
    }

    /// The last known checkpoint of a shard.
    pub fn checkpoint(&self, shard: &str) -> Option<Checkpoint> {
        self.shared.held.lock().state.checkpoint(shard).cloned()
    }

    /// The last known checkpoints of all shards, ordered by shard.
    pub fn checkpoints(&self) -> Vec<Checkpoint> {
        self.shared.held.lock().state.checkpoints()
    }

    /// Drops every fact, floor and checkpoint (P6: the sink went back); durable when it returns. The identity stays, and so do
    /// begun effects, which no sink can prove, and claims: their batches may be on their way.
    pub fn discard(&self) -> Result<(), StoreError> {
        let mut files = self.shared.files.as_ref().map(Mutex::lock);
        let mut held = self.shared.held.lock();
        held.check()?;
        let mut gone = Vec::new();
        if let Some(files) = &mut files {
            // Effects that were begun or ended since the last group are in no file yet, and are no facts: they stay as they are.
            let intents = held.state.intents().clone();
            gone = files.discard(intents).map_err(|fail| self.shared.failed(&mut held, fail))?;
            files.skip_to(held.pending.number);
            held.measure(files);
        }
        let old = Arc::clone(held.state.all_slots().closed());
        held.discard();
        drop((held, files));
        drop(old);
        self.shared.done.notify_all();
        self.remove(&gone)
    }

    /// Removes files that count no more. What is left of them is removed at the next open.
    fn remove(&self, names: &[String]) -> Result<(), StoreError> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let removed = files::remove(&**disk, names);
        let mut held = self.shared.held.lock();
        held.room_made |= !names.is_empty();
        self.shared.seal.notify_one();
        removed.map_err(|fail| self.shared.failed(&mut held, fail))
    }

    /// Retires slots below the floor of the last durable checkpoint, unlinks tails that hold nothing else, and says the floors.
    /// Call it about once a second. On a full disk this is what makes room.
    pub fn expire(&self, now_ms: i64) -> Result<Floors, StoreError> {
        let mut files = self.shared.files.as_ref().map(Mutex::lock);
        let mut held = self.shared.held.lock();
        held.check()?;
        if held.advance(now_ms) {
            held.queue(files.is_some());
            self.shared.work.notify_one();
        }
        let pressed = held.disk_full.is_some();
        // With no room for a group, the floor alone is made durable, in the manifest.
        let floor_ms = if pressed { held.pending.retire_ms.max(held.retire_ms) } else { held.retire_ms };
        let mut gone = Vec::new();
        if let Some(files) = &mut files {
            drop(held);
            let forgot = files.forget(floor_ms, pressed);
            held = self.shared.held.lock();
            // Also after an error: the tail may be another one.
            held.measure(files);
            gone = forgot.map_err(|fail| self.shared.failed(&mut held, fail))?;
        }
        held.retire_ms = held.retire_ms.max(floor_ms);
        let old = held.state.expire(floor_ms);
        let floors = held.state.floors(now_ms, held.retire_ms);
        drop((held, files));
        // A retired slot's memory and files are large to give back: not under a lock.
        drop(old);
        self.shared.work.notify_one();
        self.shared.seal.notify_one();
        self.remove(&gone)?;
        Ok(floors)
    }

    /// These and no other shards have records to come that were not settled yet, as far as `who` knows: until it says otherwise they
    /// are not idle, and hold the watermark where they stand (where nothing of a shard is known, where it is).
    pub fn awaits(&self, who: u32, shards: &[Arc<str>], now_ms: i64) {
        self.shared.held.lock().state.awaits(who, shards, now_ms);
    }

    /// The floors, without retiring anything.
    pub fn floors(&self, now_ms: i64) -> Floors {
        let held = self.shared.held.lock();
        held.state.floors(now_ms, held.retire_ms)
    }

    /// Below what facts are forgotten, or will be with the next group commit, ms: what lies a window above it and more may be new.
    /// `i64::MIN` for nothing. Not above [`Floors::retire_ms`], for a slot is forgotten as a whole.
    pub fn forgets_ms(&self, now_ms: i64) -> i64 {
        let held = self.shared.held.lock();
        let coming_ms = held.state.retire_ms(held.state.floors(now_ms, i64::MIN).watermark_ms);
        held.state.forgets(held.retire_ms.max(held.pending.retire_ms).max(coming_ms))
    }

    /// An intent to run an effect that no sink can prove: durable when it returns (`Gate::once`).
    /// False if one was there already: that one's outcome is unknown.
    pub fn begin_effect(&self, fingerprint: &Fingerprint) -> Result<bool, StoreError> {
        let Some(ticket) = self.change_intent(fingerprint, true)? else { return Ok(false) };
        if let Err(error) = self.wait_durable(ticket) {
            // The caller will not run it.
            if !matches!(error, StoreError::Stopped { .. }) {
                self.change_intent(fingerprint, false)?;
            }
            return Err(error);
        }
        Ok(true)
    }

    /// Whether an effect was begun and neither settled nor given back: its outcome is unknown.
    pub fn effect_pending(&self, fingerprint: &Fingerprint) -> Result<bool, StoreError> {
        let held = self.shared.held.lock();
        held.check()?;
        Ok(held.state.intents().contains(fingerprint))
    }

    /// The effect surely did not happen; durable when it returns.
    pub fn cancel_effect(&self, fingerprint: &Fingerprint) -> Result<(), StoreError> {
        match self.change_intent(fingerprint, false)? {
            Some(ticket) => self.wait_durable(ticket),
            None => Ok(()),
        }
    }

    /// Begins or ends an intent; none if that changes nothing.
    fn change_intent(&self, fingerprint: &Fingerprint, begun: bool) -> Result<Option<Ticket>, StoreError> {
        let mut held = self.shared.held.lock();
        held.check()?;
        if held.bound.is_none() {
            return Err(StoreError::Unbound);
        }
        let intents = held.state.intents_mut();
        let changed = if begun { intents.insert(*fingerprint) } else { intents.remove(fingerprint) };
        if !changed {
            return Ok(None);
        }
        held.pending.intents.insert(*fingerprint, begun);
        let ticket = held.queue(self.shared.files.is_some());
        self.shared.work.notify_one();
        Ok(Some(ticket))
    }

    /// All that it holds and stands for.
    pub(crate) fn snapshot(&self) -> Result<Snapshot, StoreError> {
        let held = self.shared.held.lock();
        held.check()?;
        let (identity, hasher) = held.bound.clone().ok_or(StoreError::Unbound)?;
        let slots = held.state.all_slots();
        let last_group = held.latest().0;
        let mut open = slots.open.clone();
        open.through = last_group;
        let checkpoints = held.state.checkpoints().into_iter();
        Ok(Snapshot {
            identity,
            hasher,
            width_ms: held.state.width_ms(),
            floor_ms: held.state.floor_ms(),
            last_group,
            standing: Standing {
                checkpoints: checkpoints
                    .map(|checkpoint| (Arc::clone(&checkpoint.shard), checkpoint))
                    .collect(),
                intents: held.state.intents().clone(),
                watermark_ms: held.state.watermark_ms(),
                retire_ms: held.retire_ms,
                tombstones: held.state.tombstones().clone(),
            },
            next: slots.open.generation.max(held.open_tail) + 1,
            runs: slots.closed().runs().cloned().collect(),
            tables: slots.closed().tables().iter().cloned().chain([Arc::new(open)]).collect(),
        })
    }

    /// Waits until nothing is left to be sealed, filtered or cleared.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn wait_sealed(&self) {
        let mut held = self.shared.held.lock();
        while held.stopped.is_none()
            && (held.sealing || held.state.all_slots().work(held.durable, held.open_tail).is_some())
        {
            self.shared.seal.notify_one();
            self.shared.done.wait_for(&mut held, std::time::Duration::from_millis(1));
        }
    }

    /// What the store holds now.
    pub fn stats(&self, now_ms: i64) -> Stats {
        let held = self.shared.held.lock();
        Stats {
            keys: held.state.keys(),
            claims: held.state.claims(),
            effects_pending: held.state.intents().len() as u64,
            slot_width_ms: held.state.width_ms(),
            plan: held.state.all_slots().plan(&self.options),
            slots: held.state.all_slots().stats(),
            memory_bytes: held.memory_bytes(),
            disk_bytes: held.disk_bytes,
            files: held.files.clone(),
            floors: held.state.floors(now_ms, held.retire_ms),
            floor_ms: held.state.floor_ms(),
            checkpoints: held.state.checkpoints(),
            groups: (held.latest().0, held.durable),
            disk_full: held.disk_full.clone(),
            stopped: held.stopped.clone(),
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.held.lock().closing = true;
        self.shared.work.notify_all();
        self.shared.seal.notify_all();
        for thread in self.threads.drain(..) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                tracing::error!(name, "a thread of the store panicked");
            }
        }
    }
}

impl Held {
    fn check_room(&self, options: &StoreOptions) -> Result<(), StoreError> {
        self.check_disk()?;
        let budgets = [
            (Budget::Memory, self.memory_bytes(), options.max_memory_bytes),
            (Budget::Disk, self.disk_bytes + self.pending.bytes, options.max_disk_bytes),
        ];
        match budgets.into_iter().find(|(_, used, bound)| *used > 0 && used >= bound) {
            Some((budget, used, bound)) => Err(StoreError::Full { budget, used, bound }),
            None => Ok(()),
        }
    }

    /// Marks what is pending as to be committed; answers with its ticket. A store in memory is done at once.
    fn queue(&mut self, durable: bool) -> Ticket {
        let ticket = Ticket(self.pending.number);
        if durable {
            self.since.get_or_insert_with(Instant::now);
        } else {
            drop(self.take());
            self.since = None;
            self.durable = ticket.0;
            self.retire_ms = self.retire_ms.max(self.pending.retire_ms);
        }
        ticket
    }
}

/// Loads the filters of the sealed slots, side by side.
fn load_runs(files: &Files, state: &mut State) -> Result<(), Fail> {
    let slots = state.all_slots_mut();
    files.runs(|run, filter| {
        let place = filter.map(|filter| {
            let blocks = filter.blocks();
            let place =
                slots.place_in(blocks).unwrap_or_else(|| slots.add_plane(Arc::new(Plane::new(blocks))));
            place.plane.add(place.column, &filter);
            place
        });
        slots.add_run(Arc::new(run), place.as_ref());
    })
}

/// Learns what the tails hold.
struct Learner {
    state: State,
    group: u64,
    last_tail: u64,
    found: Vec<Option<Found>>,
}

impl Replay for Learner {
    fn begin(&mut self, generation: u64, tombstones: Tombstones) {
        self.state.begin_tail(generation, tombstones);
    }

    fn block(&mut self, group: u64, block: &Block) -> Result<Option<i64>, Fail> {
        self.group = group;
        let closed = self.state.all_slots().closed();
        let mut asked = None;
        if !closed.is_empty() {
            let keys: Vec<_> = block.entries.iter().map(|entry| entry.fingerprint).collect();
            closed.find_all(&keys, &mut self.found)?;
            asked = Some(&*self.found);
        }
        self.state.learn(block, group, asked, |_| {})
    }

    fn end(&mut self, group: u64) {
        let slots = self.state.all_slots_mut();
        if slots.open.keys() > 0 {
            // When the next one began is not known.
            drop(slots.close(group, self.last_tail, None));
        }
    }

    fn tombstones(&self) -> Tombstones {
        self.state.tombstones().clone()
    }
}

/// Which part of the identity differs, and what to do. The secrets stay unsaid.
fn differs(bound: &Identity, given: &Identity) -> String {
    let hex = |id: &[u8; 16]| Fingerprint(*id).to_string();
    let (what, bound, given) = if bound.route_id != given.route_id {
        ("route id", hex(&bound.route_id), hex(&given.route_id))
    } else if bound.key_spec_id != given.key_spec_id {
        ("key-spec id", format!("{:016x}", bound.key_spec_id), format!("{:016x}", given.key_spec_id))
    } else if bound.algorithm != given.algorithm {
        ("algorithm", format!("{:?}", bound.algorithm), format!("{:?}", given.algorithm))
    } else {
        let key_id = |identity: &Identity| format!("{:08x}", Hasher::new(identity).key_id());
        ("hash secret (key id)", key_id(bound), key_id(given))
    };
    format!(
        "store holds keys of another identity: its {what} is {bound}, the route's is {given}; \
         restore the route's setting, or give the route a store folder of its own"
    )
}
