//! Group commit: one thread takes what was settled since the last time, and makes it durable at once.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tracing::{error, warn};

use crate::{
    disk::Fail,
    error::{Budget, StoreError},
    files::{Files, TailStats},
    fingerprint::{Hasher, Identity},
    state::State,
    store::Ticket,
    tail::Group,
};

/// How long the committer waits for room on a full disk before it tries again.
const RETRY: Duration = Duration::from_millis(200);

/// What a store and its committer share. Locks are taken in this order: files, held.
pub(crate) struct Shared {
    pub(crate) held: Mutex<Held>,
    /// Something is to be committed, or the store closes.
    pub(crate) work: Condvar,
    /// Something was committed, or cannot be.
    pub(crate) done: Condvar,
    /// None for a store in memory.
    pub(crate) files: Option<Mutex<Files>>,
    interval: Duration,
}

/// What the lock of a store holds.
pub(crate) struct Held {
    pub(crate) state: State,
    pub(crate) bound: Option<(Identity, Hasher)>,
    /// What the next group will be; to be committed if `since` says so.
    pub(crate) pending: Group,
    pub(crate) since: Option<Instant>,
    /// The group that the committer is at.
    in_hand: Option<Arc<Group>>,
    /// Last durable group.
    pub(crate) durable: u64,
    /// G of the last durable checkpoint, ms.
    pub(crate) retire_ms: i64,
    /// Somebody waits for this group.
    pub(crate) wanted: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) tails: Vec<TailStats>,
    /// The file system has no room, says this error.
    pub(crate) disk_full: Option<String>,
    /// First error that stopped the store.
    pub(crate) stopped: Option<String>,
    pub(crate) closing: bool,
}

impl Shared {
    pub(crate) fn new(held: Held, files: Option<Files>, commit_interval_ms: u64) -> Self {
        Shared {
            held: Mutex::new(held),
            work: Condvar::new(),
            done: Condvar::new(),
            files: files.map(Mutex::new),
            interval: Duration::from_millis(commit_interval_ms),
        }
    }

    /// Waits until less than `bytes` are on their way to disk: whoever settles faster than the disk writes is held back. A full
    /// disk holds nobody back here, since then nothing new is claimed.
    pub(crate) fn wait_below(&self, held: &mut MutexGuard<'_, Held>, bytes: u64) {
        while held.pending.bytes >= bytes && held.stopped.is_none() && held.disk_full.is_none() {
            held.wanted = held.wanted.max(held.pending.number);
            self.work.notify_one();
            self.done.wait(held);
        }
    }
}

impl Held {
    pub(crate) fn new(state: State, last_group: u64) -> Self {
        Held {
            state,
            bound: None,
            pending: Group { number: last_group + 1, retire_ms: i64::MIN, ..Group::default() },
            since: None,
            in_hand: None,
            durable: last_group,
            retire_ms: i64::MIN,
            wanted: 0,
            disk_bytes: 0,
            tails: Vec::new(),
            disk_full: None,
            stopped: None,
            closing: false,
        }
    }

    /// Fail-stop.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        match &self.stopped {
            Some(first) => Err(StoreError::Stopped { first: first.clone() }),
            None => Ok(()),
        }
    }

    pub(crate) fn check_disk(&self) -> Result<(), StoreError> {
        match &self.disk_full {
            Some(_) => Err(StoreError::Full {
                budget: Budget::FileSystem,
                used: self.disk_bytes,
                bound: self.disk_bytes,
            }),
            None => Ok(()),
        }
    }

    /// Latches an error, if it is one to stop for.
    pub(crate) fn failed(&mut self, fail: Fail) -> StoreError {
        match fail {
            Fail::Full(text) => {
                warn!(text, "the disk is full");
                StoreError::Full { budget: Budget::FileSystem, used: self.disk_bytes, bound: self.disk_bytes }
            }
            Fail::Io(text) | Fail::Unusable(text) => {
                error!(text, "the store stops");
                self.stopped = Some(text.clone());
                StoreError::Stopped { first: text }
            }
        }
    }

    /// Moves the watermark on; says whether G rose.
    pub(crate) fn advance(&mut self, now_ms: i64) -> bool {
        let watermark_ms = self.state.advance(now_ms);
        let retire_ms = self.state.retire_ms(watermark_ms).max(self.pending.retire_ms).max(self.retire_ms);
        let rose = retire_ms > self.pending.retire_ms;
        (self.pending.watermark_ms, self.pending.retire_ms) = (watermark_ms, retire_ms);
        rose
    }

    pub(crate) fn latest(&self) -> Ticket {
        Ticket(self.pending.number - u64::from(self.since.is_none()))
    }

    /// Takes what is pending out, and starts the next group.
    pub(crate) fn take(&mut self) -> Group {
        self.since = None;
        let next = Group {
            number: self.pending.number + 1,
            watermark_ms: self.pending.watermark_ms,
            retire_ms: self.pending.retire_ms,
            ..Group::default()
        };
        std::mem::replace(&mut self.pending, next)
    }

    /// Everything but identity and intents is gone, durably.
    pub(crate) fn discard(&mut self) {
        self.state.discard();
        (self.in_hand, self.disk_full) = (None, None);
        self.durable = self.take().number;
        (self.pending.watermark_ms, self.pending.retire_ms, self.retire_ms) = (None, i64::MIN, i64::MIN);
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.state.bytes() + self.pending.bytes + self.in_hand.as_ref().map_or(0, |group| group.bytes)
    }

    pub(crate) fn measure(&mut self, files: &Files) {
        (self.disk_bytes, self.tails) = (files.bytes(), files.tails());
    }
}

/// Stops the store if the committer panics: nobody may wait for it then.
struct StopOnPanic<'a>(&'a Shared);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.held.lock().stopped.get_or_insert_with(|| "the committer panicked".to_owned());
            self.0.done.notify_all();
        }
    }
}

/// The committer's loop; ends when the store closes or stops.
pub(crate) fn run(shared: &Shared) {
    let Some(files) = &shared.files else { return };
    let _stop = StopOnPanic(shared);
    while await_work(shared) {
        let mut files = files.lock();
        let Some(group) = next_group(shared) else {
            shared.held.lock().disk_full = None;
            continue;
        };
        let committed = files.commit(&group);
        let mut held = shared.held.lock();
        match committed {
            Ok(()) => {
                held.in_hand = None;
                held.durable = group.number;
                held.retire_ms = held.retire_ms.max(group.retire_ms);
                held.disk_full = None;
                held.measure(&files);
            }
            Err(Fail::Full(text)) => {
                if held.disk_full.is_none() {
                    warn!(text, "the disk is full: claims are refused until there is room");
                }
                held.disk_full = Some(text);
            }
            Err(fail) => drop(held.failed(fail)),
        }
        shared.done.notify_all();
    }
}

/// Waits until there is a group to commit; false at the end.
fn await_work(shared: &Shared) -> bool {
    let mut held = shared.held.lock();
    let mut waited = false;
    loop {
        if held.stopped.is_some() {
            return false;
        }
        if held.disk_full.is_some() {
            if held.closing {
                return false;
            }
            if waited {
                return true;
            }
            shared.work.wait_for(&mut held, RETRY);
            waited = true;
            continue;
        }
        match held.since {
            None if held.closing => return false,
            None => shared.work.wait(&mut held),
            Some(since) => {
                let due = since + shared.interval;
                if held.closing || held.wanted >= held.pending.number || Instant::now() >= due {
                    return true;
                }
                shared.work.wait_until(&mut held, due);
            }
        }
    }
}

/// The group that could not be committed yet, or else what is pending.
fn next_group(shared: &Shared) -> Option<Arc<Group>> {
    let mut held = shared.held.lock();
    if held.in_hand.is_none() && held.since.is_some() {
        held.in_hand = Some(Arc::new(held.take()));
    }
    held.in_hand.clone()
}
