//! One route's store: [`Store`]. Locks, waits and disk around [`State`], which decides.

use std::{
    fs::{self, File},
    path::Path,
    sync::Arc,
    thread::JoinHandle,
    time::Instant,
};

use parking_lot::Mutex;

use crate::{
    block::Block,
    committer::{self, Held, Shared},
    disk::{self, Disk, Folder},
    error::{Budget, StoreError},
    fact::Entry,
    files::{self, Files},
    fingerprint::{Fingerprint, Hasher, Identity},
    floors::{Checkpoint, Clock, Floors, Spans},
    state::{Item, State, Verdict},
    stats::Stats,
    table::slot_width_ms,
};

/// Settlements on their way to disk: above the first, the committer goes at once; above the second, settling waits for it.
const HASTE_BYTES: u64 = 8 << 20;
const WAIT_BYTES: u64 = 64 << 20;

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
    /// Bytes of the tables in memory; as above.
    pub max_memory_bytes: u64,
    /// The committer gathers settlements for so long when nobody waits, ms.
    pub commit_interval_ms: u64,
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
    committer: Option<JoinHandle<()>>,
    /// Held while the store is open.
    _lock: Option<File>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Store {
    /// Opens or makes the store in `folder`; takes an exclusive lock; replays the tail.
    pub fn open(folder: &Path, options: StoreOptions) -> Result<Self, StoreError> {
        fs::create_dir_all(folder)
            .map_err(|error| StoreError::Io(format!("cannot make folder {}: {error}", folder.display())))?;
        let lock = disk::lock(folder)?;
        let roll_bytes = files::roll_bytes(options.max_disk_bytes);
        let mut store = Self::open_on(Arc::new(Folder::new(folder)), options, roll_bytes)?;
        store._lock = Some(lock);
        Ok(store)
    }

    /// [`Store::open`] on any disk, without its lock; a tail is rolled at `roll_bytes`.
    pub(crate) fn open_on(
        disk: Arc<dyn Disk>,
        options: StoreOptions,
        roll_bytes: u64,
    ) -> Result<Self, StoreError> {
        let width_ms = slot_width_ms(options.window_ms, options.lateness_ms);
        let mut files = Files::open(disk, width_ms, roll_bytes)?;
        let mut state = State::new(options.spans(), files.manifest().width_ms, options.max_memory_bytes);
        let standing = files.standing();
        let floor_ms = files.manifest().floor_ms.max(standing.retire_ms);
        let clock = Clock::restore(standing.checkpoints.values().cloned().collect(), standing.watermark_ms);
        state.restore(clock, floor_ms, standing.intents.clone());
        files.replay(|block| state.learn(block, |_| {}))?;
        let mut held = Held::new(state, files.last_group());
        held.retire_ms = floor_ms;
        held.bound =
            files.manifest().identity.as_ref().map(|identity| (identity.clone(), Hasher::new(identity)));
        held.measure(&files);
        let shared = Arc::new(Shared::new(held, Some(files), options.commit_interval_ms));
        let committer = std::thread::Builder::new()
            .name("store-committer".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || committer::run(&shared)
            })
            .map_err(|error| StoreError::Io(format!("cannot start the committer: {error}")))?;
        Ok(Store { options, shared, committer: Some(committer), _lock: None })
    }

    /// Keeps nothing on disk (tests, instances without a durable disk in front of a `Transactional` sink).
    pub fn in_memory(options: StoreOptions) -> Self {
        let width_ms = slot_width_ms(options.window_ms, options.lateness_ms);
        let state = State::new(options.spans(), width_ms, options.max_memory_bytes);
        let shared = Shared::new(Held::new(state, 0), None, options.commit_interval_ms);
        Store { options, shared: Arc::new(shared), committer: None, _lock: None }
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
                    files.bind(identity).map_err(|fail| held.failed(fail))?;
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
        let mut held = self.shared.held.lock();
        held.check()?;
        match held.check_room(&self.options) {
            Ok(()) => held.state.claim(lane, ahead_ms, items, verdicts),
            Err(full) if !held.state.claim_nothing(ahead_ms, items, verdicts) => return Err(full),
            Err(_) => {}
        }
        Ok(())
    }

    /// What is settled under a key, without claiming: the door's fast path for duplicates.
    pub fn peek(&self, fingerprint: &Fingerprint) -> Result<Option<Entry>, StoreError> {
        let held = self.shared.held.lock();
        held.check()?;
        Ok(held.state.peek(fingerprint))
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
        held.check()?;
        let held = &mut *held;
        let (_, hasher) = held.bound.as_ref().ok_or(StoreError::Unbound)?;
        blocks.iter().try_for_each(|block| block.check_identity(hasher))?;
        let durable = self.shared.files.is_some();
        for block in blocks {
            let gone = &mut held.pending.intents;
            let newest_ms = held.state.learn(block, |intent| {
                gone.insert(*intent, false);
            });
            if durable {
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
        if let Some(files) = &mut files {
            // Effects that were begun or ended since the last group are in no file yet, and are no facts: they stay as they are.
            let intents = held.state.intents().clone();
            files.discard(intents).map_err(|fail| held.failed(fail))?;
            files.skip_to(held.pending.number);
            held.measure(files);
        }
        held.discard();
        self.shared.done.notify_all();
        Ok(())
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
        if let Some(files) = &mut files {
            drop(held);
            let forgot = files.forget(floor_ms, pressed);
            held = self.shared.held.lock();
            match forgot {
                Ok(()) => held.measure(files),
                Err(fail) => return Err(held.failed(fail)),
            }
        }
        held.retire_ms = held.retire_ms.max(floor_ms);
        held.state.expire(floor_ms);
        self.shared.work.notify_one();
        Ok(held.state.floors(now_ms, held.retire_ms))
    }

    /// The floors, without retiring anything.
    pub fn floors(&self, now_ms: i64) -> Floors {
        let held = self.shared.held.lock();
        held.state.floors(now_ms, held.retire_ms)
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

    /// What the store holds now.
    pub fn stats(&self, now_ms: i64) -> Stats {
        let held = self.shared.held.lock();
        Stats {
            keys: held.state.keys(),
            claims: held.state.claims(),
            effects_pending: held.state.intents().len() as u64,
            slot_width_ms: held.state.width_ms(),
            slots: held.state.slots(),
            memory_bytes: held.memory_bytes(),
            disk_bytes: held.disk_bytes,
            tails: held.tails.clone(),
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
        if let Some(committer) = self.committer.take()
            && committer.join().is_err()
        {
            tracing::error!("the store's committer panicked");
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
            self.take();
            self.durable = ticket.0;
            self.retire_ms = self.retire_ms.max(self.pending.retire_ms);
        }
        ticket
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
