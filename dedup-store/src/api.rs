use std::{path::Path, sync::Arc};

use bytes::Bytes;

/// The 128-bit keyed hash that names an event (P1). Two copies of one event have the same fingerprint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 16]);

impl std::fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// 32 hex digits.
impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A 56-bit hash of the payload: tells a copy (same digest) from a mismatch (another digest). The high byte is zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Digest(pub u64);

/// The keyed hash that makes fingerprints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Algorithm {
    /// XXH3-128 with a random 192-byte secret: for trusted producers.
    Xxh3Secret = 1,
    /// SipHash-2-4-128 keyed with the first 16 bytes of the secret: for untrusted producers.
    SipHash24 = 2,
}

/// Who a route is, wherever its facts are kept: the same on every instance and after a lost disk (P1).
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    /// Made once, never changed, a rename of the route included.
    pub route_id: [u8; 16],
    /// A hash of the key spec's meaning.
    pub key_spec_id: u64,
    /// Which keyed hash makes the fingerprints.
    pub algorithm: Algorithm,
    /// The hash secret.
    pub secret: [u8; 192],
}

/// Makes fingerprints and digests for one route. Cheap to clone.
#[derive(Clone)]
pub struct Hasher {
    // the helper decides
    _p: Arc<Identity>,
}

impl Hasher {
    /// Of `identity`.
    pub fn new(identity: &Identity) -> Self { Self { _p: Arc::new(identity.clone()) } }
    /// The bytes that every hash input starts with: recipe version, key-spec id, route id.
    pub fn prefix(&self) -> &[u8] { unimplemented!() }
    /// Fingerprint of `input` = prefix ++ tenant and dedup key bytes, as the caller laid them out.
    pub fn fingerprint(&self, _input: &[u8]) -> Fingerprint { unimplemented!() }
    /// Digest of a payload.
    pub fn digest(&self, _payload: &[u8]) -> Digest { unimplemented!() }
    /// Names secret and algorithm, in every file and block.
    pub fn key_id(&self) -> u32 { unimplemented!() }
}

/// What took effect, as stored with a key. `Forgotten` takes a key back (P12).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Settled {
    /// The key was taken back by an operator; a later record with it is new.
    Forgotten = 0,
    /// A row was made.
    Written = 1,
    /// A row was changed.
    Updated = 2,
    /// A newer row, or in `insert` mode any row, was there: nothing changed.
    Stale = 3,
    /// The sink refused the row, and the route settles refusals.
    Rejected = 4,
    /// The record went to the dead letters.
    DeadLettered = 5,
}

/// One settled key (P2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The key.
    pub fingerprint: Fingerprint,
    /// Of the record that took effect.
    pub digest: Digest,
    /// Event time, ms since the epoch.
    pub event_ms: i64,
    /// What it did.
    pub settled: Settled,
}

/// The facts of one batch for one shard, packed: the same bytes in the tail, in a sink's mark and in an export (P2).
#[derive(Clone, Debug)]
pub struct Block {
    /// Encoded, versioned, checksummed.
    pub bytes: Bytes,
    /// What the bytes say.
    pub entries: Vec<Entry>,
    /// Smallest and largest event time, ms.
    pub min_ms: i64,
    /// See `min_ms`.
    pub max_ms: i64,
}

impl Block {
    /// Packs `entries` under `shard` and `sequence`.
    pub fn encode(_hasher: &Hasher, _shard: &str, _sequence: i64, _entries: Vec<Entry>) -> Block { unimplemented!() }
    /// Unpacks and checks; the header must bear this route's id and key id, and the shard and sequence given.
    pub fn decode(_hasher: &Hasher, _shard: &str, _sequence: i64, _bytes: Bytes) -> Result<Block, BlockError> { unimplemented!() }
}

/// A block that cannot be used: says what is wrong, where, the value and the bound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// Placeholder; the helper replaces it by one variant per fault.
    #[error("block: {0}")]
    Bad(String),
}

/// Up to where the facts of one shard are known (the checkpoint row).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checkpoint {
    /// Unit of ownership and order: a Kafka partition or an HTTP lane.
    pub shard: Arc<str>,
    /// Of the last batch settled.
    pub sequence: i64,
    /// Next source position to read (Kafka); none for HTTP.
    pub position: Option<i64>,
    /// How far the shard's event time has surely come, ms.
    pub watermark_ms: i64,
    /// Facts below it are forgotten: nothing below floor + window is admitted (P11).
    pub floor_ms: i64,
}

/// One key to be checked.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    /// The key.
    pub fingerprint: Fingerprint,
    /// Of this record's payload.
    pub digest: Digest,
    /// Event time, ms.
    pub event_ms: i64,
    /// Admission floor of the item's shard, ms (the store raises it to its own floor + window).
    pub floor_ms: i64,
    /// Claim it also below the floor: the sink itself will tell a copy (`late = "verify-in-sink"`).
    pub admit_late: bool,
}

/// What is known of a key, in the order of P7.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Not known; now claimed by the caller. `late` only with [`Item::admit_late`].
    New {
        /// It lies below the admission floor.
        late: bool,
    },
    /// Settled before with the same digest.
    Duplicate(Settled),
    /// Settled before with another digest.
    Mismatch(Settled),
    /// Claimed and not yet settled, by `lane` (perhaps earlier in this very batch).
    InFlight {
        /// Who holds the claim.
        lane: u32,
        /// Whether the claimed record has the same digest.
        same: bool,
    },
    /// A miss below the floor: never new.
    Late {
        /// The floor that it fell below, ms.
        floor_ms: i64,
    },
    /// A miss further ahead than the limit.
    Ahead {
        /// The limit, ms.
        limit_ms: i64,
    },
}

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

/// What went wrong with the store. Any IO error is fail-stop: afterwards every call answers `Stopped`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another process (or store) holds the folder.
    #[error("placeholder")]
    Locked,
    /// An earlier IO error stopped the store; reopen it to recover.
    #[error("placeholder")]
    Stopped,
    /// A budget is used up; room comes with expiry, or raise the budget.
    #[error("placeholder")]
    Full,
    /// Written by another build, or damaged, or of another route: the text names what, where and what to do.
    #[error("placeholder")]
    Unusable(String),
    /// IO.
    #[error("placeholder")]
    Io(String),
}

/// Which group commit a settlement belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Ticket(pub u64);

/// Floors of the whole route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Floors {
    /// Minimum over the shards that are not idle, ms; none before the first settlement.
    pub watermark_ms: Option<i64>,
    /// Retirement floor G = W - lateness - window of the last durable checkpoint: facts below it may be forgotten, ms.
    pub retire_ms: i64,
}

/// Remembers one route's keys. All methods take `&self`; lanes call from several threads.
pub struct Store {}

impl Store {
    /// Opens or makes the store in `folder`; takes an exclusive lock; replays the tail.
    pub fn open(_folder: &Path, _options: StoreOptions) -> Result<Self, StoreError> { unimplemented!() }
    /// Keeps nothing on disk (tests, instances without a durable disk in front of a `Transactional` sink).
    pub fn in_memory(_options: StoreOptions) -> Self { unimplemented!() }
    /// The identity that the store was bound to, if any.
    pub fn identity(&self) -> Option<Identity> { unimplemented!() }
    /// Binds the store to its route; refuses another identity than the one it holds.
    pub fn bind(&self, _identity: &Identity) -> Result<Hasher, StoreError> { unimplemented!() }
    /// Checks `items` in order and claims what is new for `lane`; one verdict an item, appended to `verdicts`.
    /// `ahead_ms`: the latest event time that may be new.
    pub fn claim(&self, _lane: u32, _ahead_ms: i64, _items: &[Item], _verdicts: &mut Vec<Verdict>) -> Result<(), StoreError> { unimplemented!() }
    /// What is settled under a key, without claiming: the door's fast path for duplicates.
    pub fn peek(&self, _fingerprint: &Fingerprint) -> Result<Option<Entry>, StoreError> { unimplemented!() }
    /// The batch took effect: its facts replace the claims, and `checkpoints` move on, in one group commit.
    pub fn settle(&self, _checkpoints: &[Checkpoint], _blocks: &[Block], _now_ms: i64) -> Result<Ticket, StoreError> { unimplemented!() }
    /// Gives claims of `lane` back: their writes surely did not take effect.
    pub fn release(&self, _lane: u32, _fingerprints: &[Fingerprint]) { unimplemented!() }
    /// Gives all claims of `lane` back.
    pub fn release_lane(&self, _lane: u32) { unimplemented!() }
    /// Waits until the group of `ticket` is on disk.
    pub fn wait_durable(&self, _ticket: Ticket) -> Result<(), StoreError> { unimplemented!() }
    /// The last known checkpoint of a shard.
    pub fn checkpoint(&self, _shard: &str) -> Option<Checkpoint> { unimplemented!() }
    /// Drops every fact, claim, floor and checkpoint (P6: the sink went back); durable when it returns.
    pub fn discard(&self) -> Result<(), StoreError> { unimplemented!() }
    /// Retires slots below the floor of the last durable checkpoint, and says the floors.
    pub fn expire(&self, _now_ms: i64) -> Result<Floors, StoreError> { unimplemented!() }
    /// The floors, without retiring anything.
    pub fn floors(&self, _now_ms: i64) -> Floors { unimplemented!() }
    /// An intent to run an effect that no sink can prove: durable when it returns (`Gate::once`).
    pub fn begin_effect(&self, _fingerprint: &Fingerprint) -> Result<bool, StoreError> { unimplemented!() }
    /// Whether an effect was begun and neither settled nor given back: its outcome is unknown.
    pub fn effect_pending(&self, _fingerprint: &Fingerprint) -> Result<bool, StoreError> { unimplemented!() }
    /// The effect surely did not happen; durable when it returns.
    pub fn cancel_effect(&self, _fingerprint: &Fingerprint) -> Result<(), StoreError> { unimplemented!() }
}
