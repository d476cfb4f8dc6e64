//! A route's rules, compiled against its sink's columns.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use adapters::sink::{Column, Encode, Misfit};
use dedup_store::Hasher;

use super::{
    json::MAX_DEPTH,
    members::Layout,
    rules::{ColumnSource, Constant, DigestOver, NamingRules, UnknownFields},
    time::EventTime,
};
use crate::{
    format::{Debezium, Member, Schemas},
    key::{KeyBuffer, Part, Pointer},
};

/// Names records and makes rows of them, in one pass over the payload. Cheap to share; keeps its buffers per thread.
pub struct Namer {
    pub(super) rules: NamingRules,
    pub(super) encoder: Arc<dyn Encode>,
    pub(super) hasher: Hasher,
    pub(super) layout: Layout,
    pub(super) cells: Vec<Cell>,
    /// Per part of the key spec, if it points into the payload.
    pub(super) parts: Vec<Option<Place>>,
    pub(super) event_time: Option<Place>,
    pub(super) digest: Vec<Place>,
    /// Where to look, and the canonical bytes that must stand there.
    pub(super) delete_when: Option<(Place, Vec<u8>)>,
    /// Texts that stand for a value which the source did not send; empty but for change events.
    pub(super) placeholders: Vec<String>,
    /// For formats whose schemas are registered.
    pub(super) schemas: Option<Arc<Schemas>>,
    /// A column takes the payload whole, so that nothing of it is unknown.
    pub(super) whole: bool,
    /// Tells a thread's buffers whose order of members they hold.
    pub(super) id: u64,
}

/// Without the hasher, which holds a secret.
impl fmt::Debug for Namer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Namer")
            .field("rules", &self.rules)
            .field("encoder", &self.encoder)
            .finish_non_exhaustive()
    }
}

/// Where a pointer leads: to a slot of the layout and on from there, or to the whole payload.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) pointer: Pointer,
    pub(super) slot: Option<usize>,
}

/// A column and where its value comes from.
#[derive(Debug)]
pub(super) struct Cell {
    pub(super) from: CellFrom,
    /// Takes bytes as they are.
    pub(super) binary: bool,
    /// It has a default: a record may leave it out, and its value stays.
    pub(super) has_default: bool,
    /// It is the row key, alone or with others.
    pub(super) row_key: RowKeyPart,
}

#[derive(Debug)]
pub(super) enum CellFrom {
    Place(Place),
    /// The members that nothing uses, as one JSON object.
    Unknown,
    Source(ColumnSource),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RowKeyPart {
    No,
    Alone,
    OneOfSeveral,
}

impl Namer {
    /// What of `rules` does not fit the columns that `encoder` writes.
    pub fn misfits(rules: &NamingRules, encoder: &dyn Encode) -> Vec<Misfit> {
        misfits(rules, encoder.columns())
    }

    /// Compiles `rules` against the columns that `encoder` writes, or says everything that does not fit.
    pub fn new(rules: NamingRules, encoder: Arc<dyn Encode>, hasher: Hasher) -> Result<Self, Vec<Misfit>> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let misfits = misfits(&rules, encoder.columns());
        if !misfits.is_empty() {
            return Err(misfits);
        }
        let mut layout = Layout::default();
        let cells: Vec<Cell> =
            encoder.columns().iter().map(|column| cell(column, &rules, &mut layout)).collect();
        let parts = rules.key.parts().iter().map(|part| match part {
            Part::Pointer(pointer) => Some(place(&mut layout, pointer)),
            _ => None,
        });
        let parts = parts.collect();
        let event_time = match &rules.event_time {
            EventTime::Pointer { pointer, .. } => Some(place(&mut layout, pointer)),
            EventTime::Arrival | EventTime::KafkaTimestamp | EventTime::Debezium => None,
        };
        let digest = match &rules.digest {
            DigestOver::Payload => Vec::new(),
            DigestOver::Pointers(pointers) => {
                pointers.iter().map(|pointer| place(&mut layout, pointer)).collect()
            }
        };
        let delete_when = rules.delete_when.as_ref().map(|when| {
            // `misfits` has shown that it is JSON.
            (place(&mut layout, &when.pointer), canonical(&when.equals).unwrap_or_default())
        });
        let whole = encoder.whole()
            || cells.iter().any(|cell| matches!(cell.from, CellFrom::Place(Place { slot: None, .. })));
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let placeholders = rules.format.debezium().map(Debezium::placeholders).unwrap_or_default();
        Ok(Self {
            rules,
            encoder,
            hasher,
            layout,
            cells,
            parts,
            event_time,
            digest,
            delete_when,
            placeholders,
            schemas: None,
            whole,
            id,
        })
    }

    /// Reads records by the schemas of this cache.
    pub fn with_schemas(mut self, schemas: Option<Arc<Schemas>>) -> Self {
        self.schemas = schemas;
        self
    }

    /// Whether a part of the key or a column comes from a header, or rows carry the headers.
    pub fn reads_headers(&self) -> bool {
        let part = |part: &Part| matches!(part, Part::Header(_) | Part::KafkaHeader(_));
        let cell = |cell: &Cell| {
            matches!(cell.from, CellFrom::Source(ColumnSource::Header(_) | ColumnSource::KafkaHeader(_)))
        };
        self.encoder.headers() || self.rules.key.parts().iter().any(part) || self.cells.iter().any(cell)
    }

    /// The dedup key is a function of the row key (P9): each of its parts is the source of a row key column. Records that
    /// an `Idempotency-Key` names are left out of this: at worst they meet a row that is there, and the sink falls back.
    pub fn key_within_row_key(&self, row_key: &[String]) -> bool {
        let sources: Vec<&CellFrom> = (self.encoder.columns().iter().zip(&self.cells))
            .filter(|(column, _)| row_key.contains(&column.name))
            .map(|(_, cell)| &cell.from)
            .collect();
        let within = |part: &Part| {
            sources.iter().any(|from| match (part, from) {
                (Part::Pointer(pointer), CellFrom::Place(place)) => place.pointer == *pointer,
                (Part::Header(part), CellFrom::Source(ColumnSource::Header(column))) => {
                    part.eq_ignore_ascii_case(column)
                }
                (Part::KafkaHeader(part), CellFrom::Source(ColumnSource::KafkaHeader(column))) => {
                    part == column
                }
                (Part::KafkaKey, CellFrom::Source(ColumnSource::KafkaKey)) => true,
                _ => false,
            })
        };
        !self.parts.is_empty() && self.rules.key.parts().iter().all(within)
    }

    /// The rules it was made of.
    pub fn rules(&self) -> &NamingRules {
        &self.rules
    }
}

fn cell(column: &Column, rules: &NamingRules, layout: &mut Layout) -> Cell {
    let from = match (rules.columns.get(&column.name), &rules.unknown_fields) {
        (None, UnknownFields::Column(name)) if *name == column.name => CellFrom::Unknown,
        (None, _) if rules.format.is_raw() => CellFrom::Source(ColumnSource::Default),
        (None, _) if rules.format.debezium().is_some() && rules.version.as_ref() == Some(&column.name) => {
            CellFrom::Source(ColumnSource::Debezium(Member::Version))
        }
        (None, _) => CellFrom::Place(place(layout, &Pointer::member(&column.name))),
        (Some(ColumnSource::Pointer(pointer)), _) => CellFrom::Place(place(layout, pointer)),
        (Some(source), _) => CellFrom::Source(source.clone()),
    };
    let row_key = match rules.row_key.contains(&column.name) {
        false => RowKeyPart::No,
        true if rules.row_key.len() == 1 => RowKeyPart::Alone,
        true => RowKeyPart::OneOfSeveral,
    };
    Cell { from, binary: is_binary(&column.type_name), has_default: column.has_default, row_key }
}

fn place(layout: &mut Layout, pointer: &Pointer) -> Place {
    Place { pointer: pointer.clone(), slot: pointer.steps().first().map(|name| layout.slot(name)) }
}

fn is_binary(type_name: &str) -> bool {
    let name = type_name.to_ascii_lowercase();
    ["bytea", "blob", "binary"].iter().any(|word| name.contains(word))
}

/// The canonical bytes of a JSON text; none if it is not JSON.
pub(super) fn canonical(json: &str) -> Option<Vec<u8>> {
    let value: &serde_json::value::RawValue = serde_json::from_str(json).ok()?;
    let mut bytes = Vec::new();
    KeyBuffer::new(&mut bytes).json(value.get()).ok()?;
    Some(bytes)
}

/// Everything that does not fit together.
fn misfits(rules: &NamingRules, columns: &[Column]) -> Vec<Misfit> {
    let mut misfits = Vec::new();
    let mut misfit = |what: String, remedy: &str| misfits.push(Misfit { what, remedy: remedy.to_owned() });
    let there = |name: &str| columns.iter().find(|column| column.name == name);
    for (name, source) in &rules.columns {
        match there(name) {
            None => misfit(
                format!("columns: the table has no column {name:?}"),
                "correct its name or leave it out",
            ),
            Some(column) if *source == ColumnSource::Default && !column.nullable && !column.has_default => {
                misfit(
                    format!(
                        "columns: column {name:?} is set to its default, but it has none and is not null"
                    ),
                    "name a source for it",
                )
            }
            Some(_) => {}
        }
        if let ColumnSource::Constant(Constant::Json(text)) = source
            && canonical(text).is_none()
        {
            misfit(format!("columns: the constant of column {name:?} is not JSON"), "write it as JSON");
        }
    }
    for name in &rules.row_key {
        if there(name).is_none() {
            misfit(format!("row_key: the table has no column {name:?}"), "correct its name");
        }
        if rules.columns.get(name) == Some(&ColumnSource::Default) {
            misfit(format!("columns: row key column {name:?} has no source"), "name a source for it");
        }
    }
    if let UnknownFields::Column(name) = &rules.unknown_fields {
        if there(name).is_none() {
            misfit(
                format!("unknown_fields: the table has no column {name:?}"),
                "add it as a JSON column, or name another",
            );
        } else if rules.columns.contains_key(name) {
            misfit(
                format!("unknown_fields: column {name:?} has a source already"),
                "name another column, or drop the source",
            );
        }
    }
    if let Some(when) = &rules.delete_when
        && canonical(&when.equals).is_none()
    {
        misfit(
            "delete_when: the value to compare with is not JSON".to_owned(),
            "write it as JSON, such as true",
        );
    }
    misfits_of_format(rules, columns, &mut misfit);
    if !(1..=MAX_DEPTH).contains(&rules.max_depth) {
        misfit(
            format!("max_depth: {} is not within 1 to {MAX_DEPTH}", rules.max_depth),
            "set it within the bounds",
        );
    }
    misfits
}

/// What does not fit the route's format.
fn misfits_of_format(rules: &NamingRules, columns: &[Column], misfit: &mut impl FnMut(String, &str)) {
    let source = |name: &String| rules.columns.get(name);
    if rules.format.is_raw() {
        let pointers = |part: &Part| matches!(part, Part::Pointer(pointer) if !pointer.steps().is_empty());
        if let Some(part) = rules.key.parts().iter().find(|part| pointers(part)) {
            misfit(
                format!("key: {part} points into the payload, which the format \"raw\" never looks into"),
                "name the record by { kafka = \"key\" }, a header, or { content = true }",
            );
        }
        for (name, from) in &rules.columns {
            if matches!(from, ColumnSource::Pointer(pointer) if !pointer.steps().is_empty()) {
                misfit(
                    format!(
                        "columns: column {name:?} points into the payload, which the format \"raw\" never looks into"
                    ),
                    "give it the whole payload (\"\"), the Kafka key or a header",
                );
            }
        }
        for column in columns.iter().filter(|column| source(&column.name).is_none()) {
            if rules.row_key.contains(&column.name) || !(column.nullable || column.has_default) {
                misfit(
                    format!(
                        "columns: column {:?} needs a source: the format \"raw\" has no members",
                        column.name
                    ),
                    "give it the whole payload (\"\"), the Kafka key or a header",
                );
            }
        }
    }
    if rules.format.debezium().is_none() {
        return;
    }
    for column in columns {
        let version = match source(&column.name) {
            Some(from) => *from == ColumnSource::Debezium(Member::Version),
            None => rules.version.as_ref() == Some(&column.name),
        };
        if version && !holds_versions(&column.type_name) {
            misfit(
                format!(
                    "columns: column {:?} ({}) cannot hold a change's version, up to 71 digits",
                    column.name, column.type_name
                ),
                "make it numeric without bounds, or text (in Postgres: text COLLATE \"C\"), or name another source for it",
            );
        }
    }
}

/// Text, or a number of 71 digits.
fn holds_versions(type_name: &str) -> bool {
    let name = type_name.to_ascii_lowercase();
    let bound = || name.split(['(', ',', ')']).nth(1).and_then(|digits| digits.trim().parse::<u32>().ok());
    match name.split(['(', ' ']).next() {
        Some("text" | "clob") => true,
        Some("numeric" | "decimal") => bound().is_none_or(|digits| digits >= 71),
        Some("varchar" | "character" | "char" | "nvarchar") => bound().is_none_or(|length| length >= 71),
        _ => false,
    }
}
