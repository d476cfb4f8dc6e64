//! Debezium's change events: envelopes, and those that `ExtractNewRecordState` has flattened. Each becomes a [`Change`] and a JSON
//! object of the row's columns, with the values that their declared types mean.
//!
//! | `op` | row | becomes |
//! | --- | --- | --- |
//! | `c` `u` | `after` | a write |
//! | `r` | `after` | a write of a snapshot |
//! | `d` | `before`, and the members of the record key | a delete, or a write with a mark |
//! | `t` `m` | none | refused: it names no row |
//! | (no payload) | the members of the record key | as `tombstones` says |

use std::collections::BTreeMap;

use base64::Engine;

use super::{
    connect::{self, Shape, Shapes},
    position::{self, Fields, Log},
    semantic::Semantic,
};
use crate::naming::json;

/// How a route reads change events. Plain data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Debezium {
    /// The events are flattened; the names of their metadata begin with this.
    pub flat: Option<String>,
    /// What the version is made of.
    pub version: Version,
    /// How snapshot rows stand beside streamed ones.
    pub snapshots: Snapshots,
    /// What a record without payload means.
    pub tombstones: Tombstones,
    /// What a delete does.
    pub deletes: Deletes,
    /// What a value does that the source did not send.
    pub unavailable: Unavailable,
    /// What stands for such a value.
    pub placeholder: String,
    /// Which tables' changes are taken.
    pub tables: Tables,
    /// Declared types of columns whose records come without a schema.
    pub types: BTreeMap<String, Semantic>,
}

impl Debezium {
    /// With the defaults of the option table.
    pub fn new(flat: bool) -> Self {
        Self {
            flat: flat.then(|| "__".to_owned()),
            version: Version::Position,
            snapshots: Snapshots::Lose,
            tombstones: if flat { Tombstones::Delete } else { Tombstones::Skip },
            deletes: Deletes::Row,
            unavailable: Unavailable::Reject,
            placeholder: "__debezium_unavailable_value".to_owned(),
            tables: Tables::Topic,
            types: BTreeMap::new(),
        }
    }
}

/// What a change's version is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// The position in the source's log.
    Position,
    /// The source's time, and the Kafka offset among changes of the same time.
    TsMs,
}

/// How snapshot rows stand beside streamed ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Snapshots {
    /// Any streamed change of the row wins.
    Lose,
    /// By position; at the same one the streamed change wins.
    ByPosition,
}

/// What a record without payload means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tombstones {
    /// Nothing: it follows a delete, for the topic's compaction.
    Skip,
    /// It deletes its row.
    Delete,
    /// It is refused.
    Reject,
}

/// What a delete does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deletes {
    /// The row goes.
    Row,
    /// The row stays, with its last values; a column may take `{ debezium = "deleted" }`.
    Mark,
}

/// What a value does that the source did not send, since the change did not touch it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unavailable {
    /// The record is refused.
    Reject,
    /// The column keeps its value; it must have a default.
    Keep,
}

/// Which tables' changes are taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Tables {
    /// The one that the topic's name ends with.
    Topic,
    /// Any.
    Any,
    /// These: `table`, `schema.table` or `database.schema.table`.
    Only(Vec<String>),
}

/// One member of a change that columns and keys may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Member {
    /// Names the change: source, table, operation, position, row.
    Position,
    /// Orders the changes of one row: digits of fixed width.
    Version,
    /// `c`, `u`, `d` or `r`.
    Op,
    /// True for a delete.
    Deleted,
    /// True for a row of a snapshot.
    Snapshot,
    /// The source's time, ms since the epoch.
    TsMs,
    /// The source's database.
    Database,
    /// The source's schema.
    Schema,
    /// The source's table (MongoDB: collection).
    Table,
    /// The connector's kind.
    Connector,
    /// The source's name, the topic prefix.
    Name,
}

impl Member {
    /// The words of the configuration.
    pub const WORDS: [(&'static str, Member); 11] = [
        ("position", Member::Position),
        ("version", Member::Version),
        ("op", Member::Op),
        ("deleted", Member::Deleted),
        ("snapshot", Member::Snapshot),
        ("ts_ms", Member::TsMs),
        ("database", Member::Database),
        ("schema", Member::Schema),
        ("table", Member::Table),
        ("connector", Member::Connector),
        ("name", Member::Name),
    ];

    /// Its word.
    pub fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, member)| *member == self).map_or("position", |(word, _)| word)
    }
}

/// What a change event says of itself, apart from the row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Change {
    pub(crate) op: Op,
    pub(crate) snapshot: bool,
    /// Digits, or why there are none.
    pub(crate) version: Result<String, String>,
    /// What names it among the changes of its row and table, or why nothing does.
    pub(crate) position: Result<String, String>,
    pub(crate) ts_ms: Option<i64>,
    pub(crate) database: Option<String>,
    pub(crate) schema: Option<String>,
    pub(crate) table: Option<String>,
    pub(crate) connector: Option<String>,
    pub(crate) name: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Op {
    Create,
    Update,
    Delete,
    Read,
}

impl Op {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Op::Create => "c",
            Op::Update => "u",
            Op::Delete => "d",
            Op::Read => "r",
        }
    }

    fn parse(word: &str) -> Result<Self, String> {
        Ok(match word {
            "c" => Op::Create,
            "u" => Op::Update,
            "d" => Op::Delete,
            "r" => Op::Read,
            "t" => {
                return Err("op \"t\" truncates a whole table, which is no change of a row: truncate the target by hand if it is \
                            meant, or set skipped.operations=t at the connector"
                    .to_owned());
            }
            "m" => {
                return Err("op \"m\" is a message of the source's log, not a change of a row; exclude it at the connector \
                            (message.prefix.exclude.list)"
                    .to_owned());
            }
            other => {
                return Err(format!(
                    "op {} is none of c, u, d, r; set type to what the topic holds",
                    json::shown(other)
                ));
            }
        })
    }
}

/// Where the record was read, as far as decoding asks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'r> {
    pub(crate) topic: Option<&'r str>,
    pub(crate) offset: Option<i64>,
}

/// The members of a record key, decoded.
#[derive(Clone, Debug, Default)]
pub(crate) struct Key {
    /// The key as one JSON text (an object for a row key of columns).
    pub(crate) text: String,
}

impl Debezium {
    /// The record key's value: out of its envelope, with its declared types read. None where it is not JSON.
    pub(crate) fn key(&self, text: &str, shapes: &mut Shapes) -> Result<Option<Key>, String> {
        if !text.starts_with(['{', '"']) || json::whole(text).is_err() {
            return Ok(None);
        }
        let (schema, value) = connect::unwrap(text).map_err(|fault| format!("the record key: {fault}"))?;
        let mut out = Key::default();
        match schema {
            Some(schema) => shapes.of(schema)?.write(value, &|_| false, &mut out.text)?,
            None => self.write_row(&Shape::Plain, value, &|_| false, &mut out.text)?,
        }
        json::check(&out.text, json::MAX_DEPTH)?;
        Ok(Some(out))
    }

    /// Reads an event: appends the row as a JSON object to `row`. None if the value is null, as a tombstone's is.
    pub(crate) fn change(
        &self,
        payload: &str,
        key: Option<&Key>,
        origin: Origin<'_>,
        kept: &dyn Fn(&str) -> bool,
        shapes: &mut Shapes,
        row: &mut String,
    ) -> Result<Option<Change>, String> {
        let (schema, value) = connect::unwrap(payload)?;
        if value == "null" {
            return Ok(None);
        }
        let shape = schema.map(|schema| shapes.of(schema)).transpose()?;
        let plain = Shape::Plain;
        let shape = shape.as_deref().unwrap_or(&plain);
        if !value.starts_with('{') {
            return Err("the payload is no JSON object; set type to what the topic holds".to_owned());
        }
        let (change, after, from) = match &self.flat {
            None => self.envelope(value, origin)?,
            Some(prefix) => self.flattened(value, prefix, origin)?,
        };
        self.admits(&change, origin)?;
        let of_row = from.map_or(shape, |from| shape.field(from));
        let filled = key.map(|key| key.text.as_str()).filter(|key| key.starts_with('{'));
        self.merge(of_row, after, filled, change.op == Op::Delete, kept, row)?;
        Ok(Some(change))
    }

    /// The change, the text of its row, and the member that it was in.
    fn envelope<'a>(
        &self,
        value: &'a str,
        origin: Origin<'_>,
    ) -> Result<(Change, Row<'a>, Option<&'static str>), String> {
        let members = json::members(value)?;
        let get = |name: &str| {
            members
                .iter()
                .find(|(member, _)| member == name)
                .map(|(_, value)| *value)
                .filter(|v| *v != "null")
        };
        let op = get("op").filter(|op| op.starts_with('"')).ok_or(
            "member \"op\" is missing: this is no Debezium envelope; set type = \"debezium-flat\" if ExtractNewRecordState \
             flattens it, or \"json\"",
        )?;
        let source = get("source").filter(|source| source.starts_with('{'));
        let source = source.ok_or("member \"source\" is missing: this is no Debezium envelope")?;
        let fields = Fields(json::members(source)?);
        let change = self.describe(Op::parse(&json::text(op)?)?, &fields, origin)?;
        let side = if change.op == Op::Delete { "before" } else { "after" };
        let row = match get(side) {
            Some(row) => row,
            None if change.op == Op::Delete => "{}",
            None if get("updateDescription").is_some() => {
                return Err("member \"after\" is null: the event holds only what was changed; set \
                            capture.mode=change_streams_update_full at the connector"
                    .to_owned());
            }
            None => {
                return Err(format!(
                    "member {side:?} is missing: a change without its row cannot be written"
                ));
            }
        };
        // MongoDB's documents come as strings that hold JSON.
        let row = match row.starts_with('"') {
            false => Row::Borrowed(row),
            true => {
                let document = json::text(row)?;
                Row::Owned(json::whole(&document)?.to_owned())
            }
        };
        Ok((change, row, Some(side)))
    }

    fn flattened<'a>(
        &self,
        value: &'a str,
        prefix: &str,
        origin: Origin<'_>,
    ) -> Result<(Change, Row<'a>, Option<&'static str>), String> {
        let (mut exact, mut loose) = (Vec::new(), Vec::new());
        let (mut op, mut deleted, mut others) = (None, None, 0);
        let mut row = String::with_capacity(value.len());
        row.push('{');
        for (name, value) in json::members(value)? {
            match name.strip_prefix(prefix) {
                Some("op") => op = Some(value).filter(|value| value.starts_with('"')),
                Some("deleted") => deleted = Some(matches!(value, "true" | "\"true\"")),
                Some(meta) if meta.starts_with("source_") => {
                    exact.push((meta["source_".len()..].to_owned().into(), value));
                }
                Some(meta) if SOURCE.contains(&meta) => loose.push((meta.to_owned().into(), value)),
                Some(meta) if is_envelope(meta) => {}
                _ => {
                    if others > 0 {
                        row.push(',');
                    }
                    others += 1;
                    connect::push_name(&name, &mut row);
                    row.push_str(value);
                }
            }
        }
        exact.append(&mut loose);
        let fields = Fields(exact);
        row.push('}');
        let op = match (op, deleted) {
            (_, Some(true)) => Op::Delete,
            (Some(op), _) => Op::parse(&json::text(op)?)?,
            (None, _) => Op::Update,
        };
        Ok((self.describe(op, &fields, origin)?, Row::Owned(row), None))
    }

    fn describe(&self, op: Op, fields: &Fields<'_>, origin: Origin<'_>) -> Result<Change, String> {
        let owned = |name: &str| fields.text(name).map(|text| text.into_owned());
        let snapshot = op == Op::Read
            || fields.text("snapshot").is_some_and(|word| !matches!(word.as_ref(), "false" | ""));
        let log = Log::of(fields);
        let position = match log {
            Some(log) => log.position(fields),
            None => source_itself(fields),
        };
        let version = match (self.version, log) {
            (Version::Position, Some(_)) => position.clone(),
            (Version::Position, None) => Err(match fields.text("connector") {
                Some(connector) => format!(
                    "positions of connector {} have no order known here; set version = \"ts_ms\"",
                    json::shown(&connector)
                ),
                None => "nothing in the record tells its position: keep the source's members (for ExtractNewRecordState \
                         add.fields=op,table,connector,lsn or source.file,source.pos,source.row and the like), or set version = \"ts_ms\""
                    .to_owned(),
            }),
            (Version::TsMs, _) => position::source_ns(fields)
                .map(|ns| format!("{ns:020}{:020}", origin.offset.unwrap_or_default().max(0))),
        };
        let version = version.map(|digits| match (self.snapshots, snapshot) {
            // No zero in front, so that the number has as many digits as the text.
            (Snapshots::Lose, snapshot) => format!("{}{digits}", if snapshot { 1 } else { 2 }),
            (Snapshots::ByPosition, snapshot) => format!("1{digits}{}", u8::from(!snapshot)),
        });
        let ts_ms = position::source_ns(fields).ok().and_then(|ns| i64::try_from(ns / 1_000_000).ok());
        Ok(Change {
            op,
            snapshot,
            version,
            position,
            ts_ms,
            database: owned("db"),
            schema: owned("schema"),
            table: owned("table").or_else(|| owned("collection")),
            connector: owned("connector"),
            name: owned("name"),
        })
    }

    /// Refuses changes of tables that are not this route's.
    fn admits(&self, change: &Change, origin: Origin<'_>) -> Result<(), String> {
        let Some(table) = &change.table else { return Ok(()) };
        let parts: Vec<&str> = [change.database.as_deref(), change.schema.as_deref(), Some(table)]
            .into_iter()
            .flatten()
            .filter(|part| !part.is_empty())
            .collect();
        let name = parts.join(".");
        let told = match (&self.tables, origin.topic) {
            (Tables::Any, _) | (Tables::Topic, None) => return Ok(()),
            (Tables::Topic, Some(topic)) => {
                // Debezium puts `_` for what a topic's name cannot hold.
                let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
                let wanted: String = table.chars().map(|c| if legal(c) { c } else { '_' }).collect();
                let rest = topic.strip_suffix(wanted.as_str());
                if rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.')) {
                    return Ok(());
                }
                format!("topic {topic:?} does not end with its name")
            }
            (Tables::Only(tables), _) => {
                let admitted = |wanted: &String| {
                    name == *wanted
                        || name.strip_suffix(wanted.as_str()).is_some_and(|rest| rest.ends_with('.'))
                };
                if tables.iter().any(admitted) {
                    return Ok(());
                }
                "it is not among `tables`".to_owned()
            }
        };
        Err(format!(
            "the change is of table {}, but {told}; read it with a route of its own, or name it in tables (\"any\" takes all)",
            json::shown(&name)
        ))
    }

    /// Appends the row: its members, and those of the key that it lacks; a delete takes the key's first.
    fn merge(
        &self,
        shape: &Shape,
        row: Row<'_>,
        key: Option<&str>,
        delete: bool,
        kept: &dyn Fn(&str) -> bool,
        out: &mut String,
    ) -> Result<(), String> {
        let row = match &row {
            Row::Borrowed(text) => text,
            Row::Owned(text) => text.as_str(),
        };
        if !row.starts_with('{') {
            return Err("the row is no JSON object; set type to what the topic holds".to_owned());
        }
        let members = json::members(row)?;
        let of_key = key.map(json::members).transpose()?.unwrap_or_default();
        let lacks = |name: &str| match members.iter().find(|(member, _)| member == name) {
            None => true,
            Some((_, value)) => delete && *value == "null",
        };
        let added: Vec<_> = of_key.iter().filter(|(name, _)| lacks(name)).collect();
        out.push('{');
        let mut first = true;
        let mut comma = |out: &mut String| match std::mem::take(&mut first) {
            true => {}
            false => out.push(','),
        };
        for (name, value) in &members {
            if added.iter().any(|(of_key, _)| of_key == name) {
                continue;
            }
            comma(out);
            connect::push_name(name, out);
            let declared = self.types.get(name.as_ref()).filter(|_| *shape == Shape::Plain);
            let written = match declared {
                Some(semantic) if *value != "null" && !kept(value) => semantic.convert(value, out),
                _ => shape.field(name).write(value, kept, out),
            };
            written.map_err(|fault| format!("member {}: {fault}", json::shown(name)))?;
        }
        for (name, value) in added {
            comma(out);
            connect::push_name(name, out);
            out.push_str(value);
        }
        out.push('}');
        Ok(())
    }

    /// Appends an object without a schema, with the types that the route declares.
    fn write_row(
        &self,
        shape: &Shape,
        value: &str,
        kept: &dyn Fn(&str) -> bool,
        out: &mut String,
    ) -> Result<(), String> {
        match value.starts_with('{') {
            true => self.merge(shape, Row::Borrowed(value), None, false, kept, out),
            false => {
                out.push_str(value);
                Ok(())
            }
        }
    }

    /// The JSON texts that stand for a value that the source did not send.
    pub(crate) fn placeholders(&self) -> Vec<String> {
        let base64 = |bytes: &[u8]| base64::engine::general_purpose::STANDARD.encode(bytes);
        let text = serde_json::Value::from(self.placeholder.as_str()).to_string();
        let numbers: Vec<String> =
            self.placeholder.bytes().map(|byte| byte.cast_signed().to_string()).collect();
        let mut all = vec![
            format!("\"{}\"", base64(self.placeholder.as_bytes())),
            format!("[{text}]"),
            format!("[{}]", numbers.join(",")),
            format!("{{{text}:{text}}}"),
            text,
        ];
        if self.placeholder == "__debezium_unavailable_value" {
            // The name-based UUID of these bytes, which stands in arrays of UUIDs.
            all.push("[\"b68a35a7-17ad-35b3-af2a-ae46edb4545a\"]".to_owned());
        }
        all
    }
}

/// Members of `source` that a flattened record may keep under their bare names.
const SOURCE: [&str; 38] = [
    "version",
    "connector",
    "name",
    "snapshot",
    "db",
    "schema",
    "table",
    "collection",
    "sequence",
    "txId",
    "lsn",
    "xmin",
    "server_id",
    "gtid",
    "file",
    "pos",
    "row",
    "thread",
    "query",
    "commit_lsn",
    "change_lsn",
    "event_serial_no",
    "scn",
    "commit_scn",
    "rs_id",
    "ssn",
    "lcr_position",
    "redo_thread",
    "user_name",
    "row_id",
    "start_scn",
    "start_ts_ms",
    "redo_sql",
    "ord",
    "rs",
    "wallTime",
    "lsid",
    "txnNumber",
];

/// Members of the envelope that say nothing of the source.
fn is_envelope(name: &str) -> bool {
    matches!(name, "ts_ms" | "ts_us" | "ts_ns" | "transaction") || name.starts_with("transaction_")
}

/// Names a change of a source whose log is not known here: all that its source says, but for what may differ between copies.
fn source_itself(fields: &Fields<'_>) -> Result<String, String> {
    let mut members: Vec<(&str, &str)> =
        fields.0.iter().map(|(name, value)| (name.as_ref(), *value)).collect();
    members.retain(|(name, _)| !matches!(*name, "version" | "ts_ms" | "ts_us" | "ts_ns" | "snapshot"));
    if members.iter().all(|(name, _)| matches!(*name, "connector" | "name" | "db" | "schema" | "table")) {
        return Err("nothing in the record tells its position in the source's log: keep the source's members (add.fields of \
                    ExtractNewRecordState), or name other parts of the key"
            .to_owned());
    }
    members.sort_unstable();
    Ok(members.iter().map(|(name, value)| format!("{}:{name}{}:{value}", name.len(), value.len())).collect())
}

enum Row<'a> {
    Borrowed(&'a str),
    Owned(String),
}
