//! Names of the bookkeeping keys. The route is a hash tag: all of a route's keys but the rows are in one slot. Pure.

/// What all bookkeeping keys begin with.
pub(super) const OURS: &str = "oncegate:";

/// The keys of one route and one prefix of rows.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    route: String,
    /// Tombstones belong to the rows, whatever route they come by.
    pub(super) tombstones: String,
    /// Row keys of this route's tombstones by event time.
    pub(super) tombstone_times: String,
}

impl Keys {
    pub(super) fn new(route: &str, prefix: &str) -> Self {
        Self {
            route: format!("{OURS}{{{route}}}:"),
            tombstones: format!("{OURS}tombstones:{prefix}"),
            tombstone_times: format!("{OURS}{{{route}}}:tombstones:{prefix}"),
        }
    }

    /// A hash: the route's identity.
    pub(super) fn route(&self) -> String {
        format!("{}route", self.route)
    }

    /// A set: the ids of the route's shards.
    pub(super) fn shards(&self) -> String {
        format!("{}shards", self.route)
    }

    /// A stream.
    pub(super) fn dead_letters(&self) -> String {
        format!("{}dead_letters", self.route)
    }

    /// What the keys of shards begin with.
    pub(super) fn shard_prefix(&self) -> String {
        format!("{}shard:", self.route)
    }

    /// A hash: how the shard stands.
    pub(super) fn shard(&self, shard: &str) -> String {
        format!("{}shard:{shard}", self.route)
    }

    /// A hash: sequence to block.
    pub(super) fn marks(&self, shard: &str) -> String {
        format!("{}marks:{shard}", self.route)
    }

    /// All keys of a shard: how it stands, marks, their sequences, their newest keys' times.
    pub(super) fn all_of(&self, shard: &str) -> [String; 4] {
        let of = |what: &str| format!("{}{what}:{shard}", self.route);
        [self.shard(shard), self.marks(shard), of("marks_by_sequence"), of("marks_by_time")]
    }
}
