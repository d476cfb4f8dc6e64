//! The bookkeeping tables: their names and their DDL.

/// Quotes an identifier.
pub(super) fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Quoted names of every table that a sink touches.
#[derive(Clone, Debug)]
pub(super) struct Tables {
    /// Where rows go.
    pub(super) target: String,
    /// As tombstones and identities name it.
    pub(super) target_name: String,
    pub(super) routes: String,
    pub(super) shards: String,
    pub(super) marks: String,
    pub(super) dead_letters: String,
    pub(super) tombstones: String,
    pub(super) targets: String,
    schema: String,
}

impl Tables {
    pub(super) fn new(schema: &str, table: &str, meta_schema: &str) -> Tables {
        let meta = |name: &str| format!("{}.{name}", quote(meta_schema));
        Tables {
            target: format!("{}.{}", quote(schema), quote(table)),
            target_name: format!("{schema}.{table}"),
            routes: meta("oncegate_routes"),
            shards: meta("oncegate_shards"),
            marks: meta("oncegate_marks"),
            dead_letters: meta("oncegate_dead_letters"),
            tombstones: meta("oncegate_tombstones"),
            targets: meta("oncegate_targets"),
            schema: meta_schema.to_owned(),
        }
    }

    /// Name of the schema of the bookkeeping tables.
    pub(super) fn meta_schema(&self) -> &str {
        &self.schema
    }

    /// All bookkeeping tables, unquoted and without schema.
    pub(super) const BOOKKEEPING: [&'static str; 6] = [
        "oncegate_routes",
        "oncegate_shards",
        "oncegate_marks",
        "oncegate_dead_letters",
        "oncegate_tombstones",
        "oncegate_targets",
    ];

    /// Makes whatever of them is missing, the columns of later builds included.
    ///
    /// Shard names sort bytewise, so that every statement locks them in the same order. Blocks of marks are packed
    /// already: `EXTERNAL` keeps the server from trying again. `sequence_epoch` is kept for earlier builds, which read it: `lineage` says more. Rows of shards change with every batch: the fill factor
    /// leaves room for that on their page.
    pub(super) fn ddl(&self) -> String {
        let Tables { routes, shards, marks, dead_letters, tombstones, targets, .. } = self;
        format!(
            r#"CREATE TABLE IF NOT EXISTS {routes} (
  name text PRIMARY KEY, route_id bytea NOT NULL, key_spec_id bigint NOT NULL, algorithm smallint NOT NULL, secret bytea NOT NULL);
CREATE TABLE IF NOT EXISTS {shards} (
  route text COLLATE "C" NOT NULL, shard text COLLATE "C" NOT NULL, epoch bigint NOT NULL, sequence bigint NOT NULL,
  sequence_epoch bigint NOT NULL, position bigint, watermark_ms bigint NOT NULL, floor_ms bigint NOT NULL, owner text NOT NULL,
  heartbeat timestamptz NOT NULL, partitions bigint, source text, lineage text, PRIMARY KEY (route, shard)) WITH (fillfactor = 40);
ALTER TABLE {shards} ADD COLUMN IF NOT EXISTS partitions bigint;
ALTER TABLE {shards} ADD COLUMN IF NOT EXISTS source text;
ALTER TABLE {shards} ADD COLUMN IF NOT EXISTS lineage text;
CREATE TABLE IF NOT EXISTS {marks} (
  route text COLLATE "C" NOT NULL, shard text COLLATE "C" NOT NULL, sequence bigint NOT NULL, epoch bigint NOT NULL,
  min_ms bigint NOT NULL, max_ms bigint NOT NULL, count integer NOT NULL, block bytea NOT NULL, UNIQUE (route, shard, sequence));
ALTER TABLE {marks} ALTER COLUMN block SET STORAGE EXTERNAL;
CREATE INDEX IF NOT EXISTS oncegate_marks_expiry ON {marks} (route, shard, max_ms);
CREATE TABLE IF NOT EXISTS {dead_letters} (
  id bigserial PRIMARY KEY, route text NOT NULL, shard text NOT NULL, position bigint, key bytea NOT NULL, kind text NOT NULL,
  reason text NOT NULL, payload bytea, event_ms bigint NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE IF NOT EXISTS {tombstones} (
  target text COLLATE "C" NOT NULL, row_key bytea NOT NULL, version bytea NOT NULL, route text COLLATE "C" NOT NULL,
  event_ms bigint NOT NULL, PRIMARY KEY (target, row_key));
CREATE INDEX IF NOT EXISTS oncegate_tombstones_expiry ON {tombstones} (route, event_ms);
CREATE TABLE IF NOT EXISTS {targets} (target text COLLATE "C" PRIMARY KEY, identity bigint NOT NULL);"#
        )
    }
}
