//! One route's store: [`Store`]. Locks, waits and disk around [`State`], which decides.

use std::path::Path;

use parking_lot::Mutex;

use crate::{
    block::{Block, Entry},
    error::{Budget, StoreError},
    fingerprint::{Fingerprint, Hasher, Identity},
    floors::{Checkpoint, Floors, Spans},
    state::{Item, State, Verdict},
    table::slot_width_ms,
};

/// How a route's store is kept.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// How long after an event its copies are recognised, ms.
    pub window_ms: i64,
    /// How late a new record may come, ms.
    pub lateness_ms: i64,
    /// A shard quiet for so long leaves the watermark's minimum, ms.
    pub idle_after_ms: i64,
    /// Bytes on disk; at the bound claims are refused with [`StoreError::Full`].
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
pub struct Store {
    options: StoreOptions,
    inner: Mutex<Inner>,
}

struct Inner {
    state: State,
    bound: Option<(Identity, Hasher)>,
    /// G of the last durable checkpoint, ms.
    retire_ms: i64,
}

impl Store {
    /// Opens or makes the store in `folder`; takes an exclusive lock; replays the tail.
    pub fn open(folder: &Path, _options: StoreOptions) -> Result<Self, StoreError> {
        Err(StoreError::Unusable(format!(
            "store {}: this build keeps stores in memory only",
            folder.display()
        )))
    }

    /// Keeps nothing on disk (tests, instances without a durable disk in front of a `Transactional` sink).
    pub fn in_memory(options: StoreOptions) -> Self {
        let state = State::new(options.spans(), slot_width_ms(options.window_ms, options.lateness_ms));
        Store { options, inner: Mutex::new(Inner { state, bound: None, retire_ms: i64::MIN }) }
    }

    /// The identity that the store was bound to, if any.
    pub fn identity(&self) -> Option<Identity> {
        self.inner.lock().bound.as_ref().map(|(identity, _)| identity.clone())
    }

    /// Binds the store to its route; refuses another identity than the one it holds.
    pub fn bind(&self, identity: &Identity) -> Result<Hasher, StoreError> {
        let mut inner = self.inner.lock();
        match &inner.bound {
            Some((bound, hasher)) if bound == identity => Ok(hasher.clone()),
            Some((bound, _)) => Err(StoreError::Unusable(differs(bound, identity))),
            None => {
                let hasher = Hasher::new(identity);
                inner.bound = Some((identity.clone(), hasher.clone()));
                Ok(hasher)
            }
        }
    }

    /// Checks `items` in order and claims what is new for `lane`; one verdict an item, appended to `verdicts`.
    /// `ahead_ms`: the latest event time that may be new. On an error nothing was claimed.
    pub fn claim(
        &self,
        lane: u32,
        ahead_ms: i64,
        items: &[Item],
        verdicts: &mut Vec<Verdict>,
    ) -> Result<(), StoreError> {
        let mut inner = self.inner.lock();
        let used = inner.state.bytes();
        if used >= self.options.max_memory_bytes {
            return Err(StoreError::Full {
                budget: Budget::Memory,
                used,
                bound: self.options.max_memory_bytes,
            });
        }
        inner.state.claim(lane, ahead_ms, items, verdicts);
        Ok(())
    }

    /// What is settled under a key, without claiming: the door's fast path for duplicates.
    pub fn peek(&self, fingerprint: &Fingerprint) -> Result<Option<Entry>, StoreError> {
        Ok(self.inner.lock().state.peek(fingerprint))
    }

    /// Whether a key is claimed by some lane and not yet settled or released.
    pub fn in_flight(&self, fingerprint: &Fingerprint) -> bool {
        self.inner.lock().state.in_flight(fingerprint)
    }

    /// The batch took effect: its facts replace the claims, and `checkpoints` move on, in one group commit.
    /// Blocks are taken in the order given; a key that is known already keeps its fact.
    pub fn settle(
        &self,
        checkpoints: &[Checkpoint],
        blocks: &[Block],
        now_ms: i64,
    ) -> Result<Ticket, StoreError> {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let (_, hasher) = inner.bound.as_ref().ok_or(StoreError::Unbound)?;
        blocks.iter().try_for_each(|block| block.check_identity(hasher))?;
        for block in blocks {
            inner.state.learn(block, |_| {});
        }
        for checkpoint in checkpoints {
            inner.state.settle_checkpoint(checkpoint, now_ms);
        }
        let watermark_ms = inner.state.advance(now_ms);
        inner.retire_ms = inner.retire_ms.max(inner.state.retire_ms(watermark_ms));
        Ok(Ticket(0))
    }

    /// Gives claims of `lane` back: their writes surely did not take effect.
    pub fn release(&self, lane: u32, fingerprints: &[Fingerprint]) {
        let mut inner = self.inner.lock();
        fingerprints.iter().for_each(|fingerprint| inner.state.release(lane, fingerprint));
    }

    /// Gives all claims of `lane` back.
    pub fn release_lane(&self, lane: u32) {
        self.inner.lock().state.release_lane(lane);
    }

    /// Waits until the group of `ticket` is on disk.
    pub fn wait_durable(&self, _ticket: Ticket) -> Result<(), StoreError> {
        Ok(())
    }

    /// The last known checkpoint of a shard.
    pub fn checkpoint(&self, shard: &str) -> Option<Checkpoint> {
        self.inner.lock().state.checkpoint(shard).cloned()
    }

    /// Drops every fact, claim, floor and checkpoint (P6: the sink went back); durable when it returns.
    pub fn discard(&self) -> Result<(), StoreError> {
        let mut inner = self.inner.lock();
        inner.state.discard();
        inner.retire_ms = i64::MIN;
        Ok(())
    }

    /// Retires slots below the floor of the last durable checkpoint, and says the floors.
    pub fn expire(&self, now_ms: i64) -> Result<Floors, StoreError> {
        let mut inner = self.inner.lock();
        let watermark_ms = inner.state.advance(now_ms);
        inner.retire_ms = inner.retire_ms.max(inner.state.retire_ms(watermark_ms));
        let retire_ms = inner.retire_ms;
        inner.state.expire(retire_ms);
        Ok(inner.state.floors(now_ms, retire_ms))
    }

    /// The floors, without retiring anything.
    pub fn floors(&self, now_ms: i64) -> Floors {
        let inner = self.inner.lock();
        inner.state.floors(now_ms, inner.retire_ms)
    }

    /// An intent to run an effect that no sink can prove: durable when it returns (`Gate::once`).
    /// False if one was there already.
    pub fn begin_effect(&self, fingerprint: &Fingerprint) -> Result<bool, StoreError> {
        Ok(self.inner.lock().state.intents_mut().insert(*fingerprint))
    }

    /// Whether an effect was begun and neither settled nor given back: its outcome is unknown.
    pub fn effect_pending(&self, fingerprint: &Fingerprint) -> Result<bool, StoreError> {
        Ok(self.inner.lock().state.intents().contains(fingerprint))
    }

    /// The effect surely did not happen; durable when it returns.
    pub fn cancel_effect(&self, fingerprint: &Fingerprint) -> Result<(), StoreError> {
        self.inner.lock().state.intents_mut().remove(fingerprint);
        Ok(())
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
