//! Group commit: one thread takes what was settled since the last time, and makes it durable at once.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tracing::{error, warn};

use crate::{
    disk::Fail,
    error::{Budget, StoreError},
    files::{FileStats, Files},
    fingerprint::{Hasher, Identity},
    slots::Closed,
    state::State,
    store::Ticket,
    sync::{Condvar, Mutex, MutexGuard, thread},
    table::Table,
    tail::Group,
};

/// Closed slots that may wait to be sealed.
const MAX_UNSEALED: usize = 2;
/// How long the committer waits for room on a full disk before it tries again.
pub(crate) const RETRY: Duration = Duration::from_millis(200);

/// What a store and its committer share. Locks are taken in this order: files, held.
pub(crate) struct Shared {
    pub(crate) held: Mutex<Held>,
    /// Something is to be committed, or the store closes.
    pub(crate) work: Condvar,
    /// Something was committed or sealed, or cannot be.
    pub(crate) done: Condvar,
    /// There may be something to seal, or the store closes.
    pub(crate) seal: Condvar,
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
    pub(crate) files: Vec<FileStats>,
    /// Number of the newest tail.
    pub(crate) open_tail: u64,
    /// Bytes of blocks since the open slot began, and at which it is closed.
    slot_bytes: (u64, u64),
    /// Keys of the largest group so far: the next one may bring as many.
    group_keys: u64,
    /// The sealer is at work.
    pub(crate) sealing: bool,
    /// Sealing found no room on the file system.
    pub(crate) seal_full: bool,
    /// Files were removed since the sealer last looked.
    pub(crate) room_made: bool,
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
            seal: Condvar::new(),
            files: files.map(Mutex::new),
            interval: Duration::from_millis(commit_interval_ms),
        }
    }

    /// Latches an error, if it is one to stop for, and wakes whoever waits for what may never come now.
    pub(crate) fn failed(&self, held: &mut Held, fail: Fail) -> StoreError {
        let error = held.failed(fail);
        self.wake();
        error
    }

    fn wake(&self) {
        for waiting in [&self.work, &self.done, &self.seal] {
            waiting.notify_all();
        }
    }

    /// Waits while too many closed slots wait to be sealed: their tables are memory.
    pub(crate) fn wait_for_sealing(&self, held: &mut MutexGuard<'_, Held>) {
        while self.files.is_some()
            && held.state.all_slots().unsealed() > MAX_UNSEALED
            && !(held.stopped.is_some() || held.disk_full.is_some() || held.seal_full)
        {
            held.wanted = held.wanted.max(held.pending.number);
            self.work.notify_one();
            self.done.wait(held);
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
    /// `roll_bytes`: of blocks, at which a slot is closed.
    pub(crate) fn new(state: State, last_group: u64, roll_bytes: u64) -> Self {
        Held {
            bound: None,
            pending: Group {
                number: last_group + 1,
                generation: state.all_slots().open.generation,
                retire_ms: i64::MIN,
                ..Group::default()
            },
            state,
            since: None,
            in_hand: None,
            durable: last_group,
            retire_ms: i64::MIN,
            wanted: 0,
            disk_bytes: 0,
            files: Vec::new(),
            open_tail: 0,
            slot_bytes: (0, roll_bytes),
            group_keys: 0,
            sealing: false,
            seal_full: false,
            room_made: false,
            disk_full: None,
            stopped: None,
            closing: false,
        }
    }

    /// Of a store in memory.
    pub(crate) fn twin(&self) -> Self {
        Held {
            bound: self.bound.clone(),
            pending: self.pending.clone(),
            retire_ms: self.retire_ms,
            slot_bytes: self.slot_bytes,
            group_keys: self.group_keys,
            ..Held::new(self.state.clone(), self.durable, self.slot_bytes.1)
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

    /// Latches an error, if it is one to stop for; [`Shared::failed`] also tells those who wait.
    fn failed(&mut self, fail: Fail) -> StoreError {
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

    /// Whether the open slot is to be closed with what is pending: also if all its blocks hold known keys, or its tail would grow
    /// and grow.
    fn slot_is_due(&mut self) -> bool {
        let bytes = self.slot_bytes.0 + self.pending.bytes;
        let full = bytes > 0 && bytes >= self.slot_bytes.1;
        let group_keys = self.group_keys.max(self.pending.keys);
        let watermark_ms = self.state.watermark_ms();
        let slots = self.state.all_slots_mut();
        slots.is_due(watermark_ms, group_keys) || full
    }

    /// Takes what is pending out, and starts the next group; with it the next slot, if this one is due. Then
    /// the next group is due too, though empty: it begins the slot's tail. Answers also with what is to be dropped
    /// without the lock.
    pub(crate) fn take(&mut self) -> (Group, Option<Arc<Closed>>) {
        let due = self.slot_is_due();
        self.since = None;
        let next = Group {
            number: self.pending.number + 1,
            generation: self.pending.generation,
            watermark_ms: self.pending.watermark_ms,
            retire_ms: self.pending.retire_ms,
            ..Group::default()
        };
        let group = std::mem::replace(&mut self.pending, next);
        self.slot_bytes.0 += group.bytes;
        self.group_keys = self.group_keys.max(group.keys);
        if !due {
            return (group, None);
        }
        let watermark_ms = self.state.watermark_ms();
        let slots = self.state.all_slots_mut();
        let generation = slots.open.generation + 1;
        let old = if slots.open.keys() > 0 {
            Some(slots.close(group.number, generation, watermark_ms))
        } else {
            slots.open.generation = generation;
            None
        };
        self.pending.generation = generation;
        self.pending.begins = true;
        self.since = Some(Instant::now());
        self.slot_bytes.0 = 0;
        (group, old)
    }

    /// Everything but identity and intents is gone, durably.
    pub(crate) fn discard(&mut self) {
        // The new tail's, or in memory the next.
        let next = self.state.all_slots().open.generation + 1;
        let generation = if self.open_tail > 0 { self.open_tail } else { next };
        self.state.discard(generation);
        (self.in_hand, self.disk_full) = (None, None);
        // What was pending is gone, too, and closes no slot.
        (self.pending.bytes, self.slot_bytes.0) = (0, 0);
        self.durable = self.take().0.number;
        self.pending.generation = generation;
        (self.pending.watermark_ms, self.pending.retire_ms, self.retire_ms) = (None, i64::MIN, i64::MIN);
    }

    /// Goes on where the newest tail, of so many bytes, ends.
    pub(crate) fn resume(&mut self, files: &Files) {
        self.slot_bytes.0 = files.tail_bytes();
        self.measure(files);
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.state.bytes() + self.pending.bytes + self.in_hand.as_ref().map_or(0, |group| group.bytes)
    }

    /// Takes over what the files have come to. A slot whose tail was given up goes on under the number of the
    /// next one, so that its run takes the place of the tail that holds its facts.
    pub(crate) fn measure(&mut self, files: &Files) {
        (self.disk_bytes, self.files, self.open_tail) = (files.bytes(), files.stats(), files.open_tail());
        // The last group of the slot before may be yet to come, and goes into the newest tail.
        let least = self.open_tail + u64::from(self.pending.begins);
        let number = &mut self.state.all_slots_mut().open.generation;
        *number = (*number).max(least);
        self.pending.generation = *number;
    }
}

/// Stops the store if a thread of its own panics: nobody may wait for it then.
pub(crate) struct StopOnPanic<'a>(pub(crate) &'a Shared, pub(crate) &'static str);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.held.lock().stopped.get_or_insert_with(|| format!("the {} panicked", self.1));
            self.0.wake();
        }
    }
}

/// The committer's loop; ends when the store closes or stops.
pub(crate) fn run(shared: &Shared) {
    let Some(files) = &shared.files else { return };
    let _stop = StopOnPanic(shared, "committer");
    while await_work(shared) {
        let mut files = files.lock();
        let (group, old) = next_group(shared);
        drop(old);
        let Some(group) = group else {
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
            Err(fail) => drop(shared.failed(&mut held, fail)),
        }
        drop(held);
        shared.done.notify_all();
        shared.seal.notify_one();
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

/// The group that could not be committed yet, or else what is pending; and what is to be dropped without the
/// lock.
fn next_group(shared: &Shared) -> (Option<Arc<Group>>, Option<Arc<Closed>>) {
    let mut held = shared.held.lock();
    let mut dropped = None;
    let keys = held.state.all_slots().open.keys();
    if held.in_hand.is_none() && held.since.is_some() && keys > 0 && held.slot_is_due() {
        let watermark_ms = held.state.watermark_ms();
        if let Some(keys) = held.state.all_slots().wants_spare(watermark_ms) {
            let spare = MutexGuard::unlocked(&mut held, || Table::new(0, keys));
            let old = held.state.all_slots_mut().prepare(spare);
            MutexGuard::unlocked(&mut held, || drop(old));
        }
    }
    if held.in_hand.is_none() && held.since.is_some() {
        let (group, old) = held.take();
        (held.in_hand, dropped) = (Some(Arc::new(group)), old);
    }
    (held.in_hand.clone(), dropped)
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::{floors::Spans, slots::SlotSizes};

    /// A lane waited for the disk when a look-up of another met a damaged run and stopped the store: nobody
    /// woke the lane, and since the committer had ended, nobody ever would have.
    #[test]
    fn rule7_whoever_waits_hears_of_an_error_that_another_met() {
        let spans = Spans { window_ms: 0, lateness_ms: 0, idle_after_ms: 0 };
        let state = State::new(spans, SlotSizes::new(1, 1 << 20), 1);
        let shared = Arc::new(Shared::new(Held::new(state, 0, 0), None, 0));
        shared.held.lock().pending.bytes = 1;
        let (says, heard) = std::sync::mpsc::channel();
        let waits = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let mut held = shared.held.lock();
                says.send(()).unwrap();
                shared.wait_below(&mut held, 1);
                says.send(()).unwrap();
            }
        });
        heard.recv().unwrap();
        // The lock is free only once the other waits.
        drop(shared.failed(&mut shared.held.lock(), Fail::Unusable("a run is damaged".to_owned())));
        heard.recv_timeout(Duration::from_secs(10)).expect("it goes on waiting");
        waits.join().unwrap();
    }
}
