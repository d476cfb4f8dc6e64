//! The text of every statement on the delivery path. Rows come as whole columns (`unnest`), never as one parameter a value.

use super::{
    encode::Encoder,
    row::Shape,
    tables::{Tables, quote},
};
use crate::sink::Mode;

/// The fence (P4) as common table expressions that end with `fence`: parameters 1 to 6 are route, shards, epochs,
/// sequences, positions, watermarks. Several shards are locked in order first.
fn fence(tables: &Tables, several: bool) -> String {
    let shards = &tables.shards;
    let (locked, ordered) = if several {
        (
            format!(
                "locked AS MATERIALIZED (SELECT shard FROM {shards} WHERE route = $1 AND shard = ANY($2) ORDER BY shard FOR UPDATE), "
            ),
            " AND s.shard IN (SELECT shard FROM locked)",
        )
    } else {
        (String::new(), "")
    };
    format!(
        "{locked}fence AS (UPDATE {shards} AS s SET sequence = f.sequence, sequence_epoch = f.epoch, \
         position = coalesce(f.position, s.position), watermark_ms = f.watermark_ms, heartbeat = clock_timestamp() \
         FROM unnest($2, $3, $4, $5, $6) AS f(shard, epoch, sequence, position, watermark_ms) \
         WHERE s.route = $1 AND s.shard = f.shard AND s.epoch = f.epoch AND s.sequence = f.sequence - 1{ordered} RETURNING 1)"
    )
}

/// The fence alone; answers how many shards moved.
pub(super) fn fence_only(tables: &Tables, several: bool) -> String {
    format!("WITH {} SELECT count(*) FROM fence", fence(tables, several))
}

/// A whole batch of mode `insert` in one statement, for the case that every row is new: parameters 1 to 6 as [`fence`],
/// 7 to 13 as [`marks`], then (if there are rows) their number and their columns. Anything else than that case is an
/// error, so that nothing of it stays.
pub(super) struct Whole {
    /// Of all rows; none if there are none.
    pub(super) shape: Option<Shape>,
    /// Several shards move.
    pub(super) several: bool,
    /// A row that is there is not worth a look beforehand: it violates the unique index.
    pub(super) known_new: bool,
    /// Raise `synchronous_commit`.
    pub(super) raise_commit: bool,
}

impl Whole {
    pub(super) fn text(&self, tables: &Tables, encoder: &Encoder) -> String {
        let mut text = format!("WITH {}, ", fence(tables, self.several));
        if let Some(shape) = self.shape {
            let columns = Columns::new(encoder, shape);
            let parameters: Vec<String> =
                (15..15 + columns.indices.len()).map(|at| format!("${at}")).collect();
            let conflict =
                if self.known_new { String::new() } else { on_conflict(Mode::Insert, encoder, &columns) };
            text.push_str(&format!(
                "fresh AS (INSERT INTO {} AS t ({names}) SELECT {} FROM unnest({}) AS r({names}) \
                 WHERE (SELECT count(*) FROM fence) = cardinality($2){conflict} RETURNING 1), ",
                tables.target,
                columns.prefixed("r."),
                parameters.join(", "),
                names = columns.names(),
            ));
        }
        text.push_str(&format!(
            "mark AS (INSERT INTO {} (route, shard, sequence, epoch, min_ms, max_ms, count, block) \
             SELECT $1, m.* FROM unnest($7, $8, $9, $10, $11, $12, $13) AS m \
             WHERE (SELECT count(*) FROM fence) = cardinality($2) RETURNING 1) \
             SELECT 1 / ((SELECT count(*) FROM fence) = cardinality($2){})::int",
            tables.marks,
            if self.shape.is_some() { " AND (SELECT count(*) FROM fresh) = $14" } else { "" },
        ));
        if self.raise_commit {
            text.push_str(", set_config('synchronous_commit', 'on', true)");
        }
        text
    }
}

/// The marks: route, then shards, sequences, epochs, least and greatest times, counts, blocks.
pub(super) fn marks(tables: &Tables) -> String {
    format!(
        "INSERT INTO {} (route, shard, sequence, epoch, min_ms, max_ms, count, block) \
         SELECT $1, m.* FROM unnest($2, $3, $4, $5, $6, $7, $8) AS m",
        tables.marks
    )
}

/// Dead letters: route, then shards, positions, keys, kinds, reasons, payloads, event times.
pub(super) fn dead_letters(tables: &Tables) -> String {
    format!(
        "INSERT INTO {} (route, shard, position, key, kind, reason, payload, event_ms) \
         SELECT $1, d.* FROM unnest($2, $3, $4, $5, $6, $7, $8) AS d",
        tables.dead_letters
    )
}

/// Straight into the table (P9).
pub(super) fn copy(tables: &Tables, encoder: &Encoder, shape: Shape) -> String {
    let columns = Columns::new(encoder, shape);
    format!("COPY {} ({}) FROM STDIN (FORMAT binary)", tables.target, columns.names())
}

/// The temporary table for rows that cannot travel as parameters.
pub(super) const STAGE: &str = "pg_temp.oncegate_stage";

/// Makes [`STAGE`], or empties it.
pub(super) fn make_stage(encoder: &Encoder, shape: Shape) -> String {
    let columns: Vec<String> = Columns::new(encoder, shape)
        .indices
        .iter()
        .map(|&index| {
            let target = &encoder.targets()[index];
            format!(", {} {}", quote(&target.column.name), target.base_type)
        })
        .collect();
    format!(
        "DROP TABLE IF EXISTS {STAGE}; CREATE TEMPORARY TABLE oncegate_stage \
         (oncegate_ord integer, oncegate_key bytea, oncegate_version bytea{}) ON COMMIT DROP",
        columns.concat()
    )
}

/// Fills [`STAGE`].
pub(super) fn copy_stage(encoder: &Encoder, shape: Shape) -> String {
    let columns = Columns::new(encoder, shape);
    format!(
        "COPY {STAGE} (oncegate_ord, oncegate_key, oncegate_version, {}) FROM STDIN (FORMAT binary)",
        columns.names()
    )
}

/// Writes rows as the mode says. Parameters (or the stage's columns): ordinals, canonical keys, canonical versions, the
/// columns. Answers with the ordinals of rows that were made, and of rows that were changed; those in neither lost.
/// Without row key: with the number of rows that were made.
pub(super) fn write(tables: &Tables, encoder: &Encoder, mode: Mode, shape: Shape, staged: bool) -> String {
    let columns = Columns::new(encoder, shape);
    let source = if staged {
        format!("SELECT * FROM {STAGE}")
    } else {
        let parameters: Vec<String> = (1..=3 + columns.indices.len()).map(|at| format!("${at}")).collect();
        format!(
            "SELECT * FROM unnest({}) AS u(oncegate_ord, oncegate_key, oncegate_version, {})",
            parameters.join(", "),
            columns.names()
        )
    };
    let open = if mode == Mode::UpsertIfNewer {
        format!(
            " WHERE NOT EXISTS (SELECT FROM {} AS b WHERE b.target = {} AND b.row_key = s.oncegate_key \
             AND b.version >= s.oncegate_version)",
            tables.tombstones,
            literal(&tables.target_name)
        )
    } else {
        String::new()
    };
    let insert = format!(
        "WITH s AS MATERIALIZED ({source}), w AS (INSERT INTO {} AS t ({}) SELECT {} FROM s{open}{}",
        tables.target,
        columns.names(),
        columns.prefixed("s."),
        on_conflict(mode, encoder, &columns),
    );
    if encoder.row_key().is_empty() {
        return format!("{insert} RETURNING 1) SELECT count(*) FROM w");
    }
    let keys: Vec<String> =
        encoder.row_key().iter().map(|&index| quote(&encoder.targets()[index].column.name)).collect();
    let returned: Vec<String> =
        keys.iter().enumerate().map(|(at, key)| format!("t.{key} AS oncegate_k{at}")).collect();
    let matched: Vec<String> =
        keys.iter().enumerate().map(|(at, key)| format!("w.oncegate_k{at} = s.{key}")).collect();
    format!(
        "{insert} RETURNING {}, t.xmax = 0 AS oncegate_fresh) \
         SELECT coalesce(array_agg(s.oncegate_ord) FILTER (WHERE w.oncegate_fresh), '{{}}'), \
         coalesce(array_agg(s.oncegate_ord) FILTER (WHERE NOT w.oncegate_fresh), '{{}}') FROM w JOIN s ON {}",
        returned.join(", "),
        matched.join(" AND "),
    )
}

/// Deletes by row key. Parameters: ordinals, the row key columns, then the version column if the mode has one.
/// Answers with the ordinals that found a row.
pub(super) fn delete(tables: &Tables, encoder: &Encoder) -> String {
    let keys = KeyColumns::new(encoder);
    let newer = keys
        .version
        .as_ref()
        .map_or(String::new(), |version| format!(" AND (t.{version} IS NULL OR t.{version} < s.{version})"));
    format!(
        "WITH s AS MATERIALIZED (SELECT * FROM unnest({}) AS u(oncegate_ord, {})), \
         d AS (DELETE FROM {} AS t USING s WHERE {}{newer} RETURNING s.oncegate_ord) \
         SELECT coalesce(array_agg(oncegate_ord), '{{}}') FROM d",
        keys.parameters(1),
        keys.names.join(", "),
        tables.target,
        keys.matched,
    )
}

/// Keeps tombstones of deletes that no newer row outlived; to be run after [`delete`]. Parameters: ordinals, canonical
/// keys, canonical versions, event times, route, then the row key columns. Answers with the ordinals kept.
pub(super) fn tombstones(tables: &Tables, encoder: &Encoder) -> String {
    let keys = KeyColumns::new(encoder);
    let count = encoder.row_key().len();
    let parameters: Vec<String> = (6..6 + count).map(|at| format!("${at}")).collect();
    format!(
        "WITH s AS MATERIALIZED (SELECT * FROM unnest($1, $2, $3, $4, {}) \
         AS u(oncegate_ord, oncegate_key, oncegate_version, oncegate_ms, {})), \
         b AS (INSERT INTO {} AS b (target, row_key, version, route, event_ms) \
         SELECT {}, s.oncegate_key, s.oncegate_version, $5, s.oncegate_ms FROM s \
         WHERE NOT EXISTS (SELECT FROM {} AS t WHERE {}) \
         ON CONFLICT (target, row_key) DO UPDATE SET version = excluded.version, route = excluded.route, \
         event_ms = greatest(b.event_ms, excluded.event_ms) WHERE excluded.version > b.version RETURNING b.row_key) \
         SELECT coalesce(array_agg(s.oncegate_ord), '{{}}') FROM b JOIN s ON s.oncegate_key = b.row_key",
        parameters.join(", "),
        keys.names[..count].join(", "),
        tables.tombstones,
        literal(&tables.target_name),
        tables.target,
        keys.matched,
    )
}

/// The row key columns, and the version behind them.
struct KeyColumns {
    names: Vec<String>,
    version: Option<String>,
    matched: String,
}

impl KeyColumns {
    fn new(encoder: &Encoder) -> KeyColumns {
        let name = |index: usize| quote(&encoder.targets()[index].column.name);
        let mut names: Vec<String> = encoder.row_key().iter().map(|&index| name(index)).collect();
        let matched: Vec<String> = names.iter().map(|key| format!("t.{key} = s.{key}")).collect();
        let version = encoder.version().map(name);
        names.extend(version.clone());
        KeyColumns { names, version, matched: matched.join(" AND ") }
    }

    fn parameters(&self, before: usize) -> String {
        let parameters: Vec<String> = (1..=before + self.names.len()).map(|at| format!("${at}")).collect();
        parameters.join(", ")
    }
}

/// The columns of a shape.
struct Columns {
    indices: Vec<usize>,
    quoted: Vec<String>,
}

impl Columns {
    fn new(encoder: &Encoder, shape: Shape) -> Columns {
        let indices = encoder.present(shape);
        let quoted = indices.iter().map(|&index| quote(&encoder.targets()[index].column.name)).collect();
        Columns { indices, quoted }
    }

    fn names(&self) -> String {
        self.quoted.join(", ")
    }

    fn prefixed(&self, prefix: &str) -> String {
        let names: Vec<String> = self.quoted.iter().map(|name| format!("{prefix}{name}")).collect();
        names.join(", ")
    }
}

/// What happens to a row whose row key is there. A column that the record leaves to its default stays as it is.
fn on_conflict(mode: Mode, encoder: &Encoder, columns: &Columns) -> String {
    if encoder.row_key().is_empty() {
        return String::new();
    }
    let name = |index: usize| quote(&encoder.targets()[index].column.name);
    let keys: Vec<String> = encoder.row_key().iter().map(|&index| name(index)).collect();
    let keys = keys.join(", ");
    if mode == Mode::Insert {
        return format!(" ON CONFLICT ({keys}) DO NOTHING");
    }
    let mut set: Vec<String> = columns
        .indices
        .iter()
        .filter(|index| !encoder.row_key().contains(index))
        .map(|&index| format!("{0} = excluded.{0}", name(index)))
        .collect();
    if set.is_empty() {
        set.push(format!("{0} = excluded.{0}", name(encoder.row_key()[0])));
    }
    let newer = match (mode, encoder.version()) {
        (Mode::UpsertIfNewer, Some(version)) => {
            let version = name(version);
            format!(" WHERE t.{version} IS NULL OR excluded.{version} > t.{version}")
        }
        _ => String::new(),
    };
    format!(" ON CONFLICT ({keys}) DO UPDATE SET {}{newer}", set.join(", "))
}

/// Quotes a text constant.
fn literal(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('\'', "''");
    format!("E'{escaped}'")
}
