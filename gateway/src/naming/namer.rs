//! [`Namer::name`]: the journey of one record from bytes to name and row.

use std::{borrow::Cow, cell::RefCell};

use adapters::{
    sink::{Original, RowKind},
    value::Value,
};
use dedup_store::Digest;

use super::{
    Chunk, Headers, KafkaOrigin, Named, Record,
    compile::{Namer, Place},
    json,
    members::{self, Found, Order},
    open::{Given, Opened, text},
};
use crate::{
    format::{connect::Shapes, debezium::Change},
    outcome::Problem,
};

/// Buffers of one thread, empty between records.
#[derive(Default)]
struct Scratch {
    /// Whose order of members `order` is.
    namer: u64,
    order: Order,
    slots: Vec<Option<&'static str>>,
    values: Vec<Value<'static>>,
    key: Vec<u8>,
    row_key: Vec<u8>,
    extra: String,
    /// The row of a format that is not plain JSON.
    text: String,
    shapes: Shapes,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// What is to be seen of a record.
#[derive(Clone, Copy)]
pub(super) struct Sight<'r> {
    pub(super) record: &'r Record<'r>,
    pub(super) payload: Payload<'r>,
    slots: &'r [Option<&'r str>],
    pub(super) unknown: &'r [(Cow<'r, str>, &'r str)],
    /// Of a change event.
    pub(super) change: Option<&'r Change>,
    /// The change deletes its row.
    pub(super) deletes: bool,
    /// The record key as JSON text, out of its envelope, where the format has read it.
    pub(super) key: Option<&'r str>,
}

/// A payload after the pass.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Payload<'r> {
    /// There is none.
    Tombstone,
    /// It is not what the route takes; that has been said.
    Unreadable(&'r [u8]),
    /// Bytes that are not looked into.
    Raw(&'r [u8]),
    /// A JSON object.
    Object(&'r str),
}

impl<'r> Sight<'r> {
    /// The JSON text at `place`; none if there is nothing, or no payload to look at.
    pub(super) fn at(&self, place: &Place) -> Result<Option<&'r str>, String> {
        let Payload::Object(payload) = self.payload else { return Ok(None) };
        match (place.slot, place.pointer.steps()) {
            (Some(slot), [_, rest @ ..]) => match self.slots[slot] {
                Some(value) if !rest.is_empty() => json::descend(value, rest),
                value => Ok(value),
            },
            _ => Ok(Some(payload)),
        }
    }
}

impl Namer {
    /// Appends `record` to `chunk`, named and encoded. A record that cannot be written has its problem, and its fingerprint
    /// if the key could be derived all the same.
    pub fn name(&self, record: &Record<'_>, chunk: &mut Chunk) {
        SCRATCH.with_borrow_mut(|scratch| self.name_with(record, chunk, scratch));
    }

    fn name_with(&self, record: &Record<'_>, chunk: &mut Chunk, scratch: &mut Scratch) {
        if scratch.namer != self.id {
            scratch.namer = self.id;
            scratch.order = Order::new(self.layout.len());
        }
        let mut problem = None;
        let mut found = Found { slots: std::mem::take(&mut scratch.slots), unknown: Vec::new() };
        let mut row_text = std::mem::take(&mut scratch.text);
        row_text.clear();
        let opened = self.open(record, &mut scratch.shapes, &mut row_text).unwrap_or_else(|fault| {
            problem = Some(fault);
            Opened::unreadable()
        });
        let json = match opened.payload {
            Given::Text(payload) => Some(text(payload)),
            Given::Row => Some(Ok(row_text.as_str())),
            Given::Tombstone | Given::Passed | Given::Raw(_) => None,
        };
        let json = json.map(|json| json.and_then(|text| self.read(text, &mut scratch.order, &mut found)));
        let payload = match (json, &opened.payload) {
            (Some(Ok(text)), _) => Payload::Object(text),
            (Some(Err(fault)), _) => {
                problem = Some(Problem::BadRecord(fault));
                Payload::Unreadable(record.payload.unwrap_or_default())
            }
            (None, Given::Raw(payload)) => Payload::Raw(payload),
            (None, Given::Passed) => {
                problem.get_or_insert(Problem::Passed);
                Payload::Unreadable(record.payload.unwrap_or_default())
            }
            (None, _) => Payload::Tombstone,
        };
        let sight = Sight {
            record,
            payload,
            slots: &found.slots,
            unknown: &found.unknown,
            change: opened.change.as_ref(),
            deletes: opened.deletes(),
            key: opened.key.as_ref().map(|key| key.text.as_str()),
        };

        let fingerprint = match self.fingerprint(sight, &mut scratch.key) {
            _ if problem == Some(Problem::Passed) => None,
            Ok(fingerprint) => fingerprint,
            Err(fault) => {
                problem.get_or_insert(fault);
                None
            }
        };
        let mut bad = |fault| {
            problem.get_or_insert(Problem::BadRecord(fault));
        };
        let event_ms = self.event_ms(sight).unwrap_or_else(|fault| {
            bad(fault);
            record.arrival_us.div_euclid(1000)
        });
        let digest = self.digest(sight, &mut scratch.key).unwrap_or_else(|fault| {
            bad(fault);
            Digest(0)
        });
        let kind = self.kind(sight, &mut scratch.key).unwrap_or_else(|fault| {
            bad(fault);
            RowKind::Write
        });

        let start = chunk.bytes.len();
        chunk.bytes.extend_from_slice(record.payload.unwrap_or_default());
        let row_start = chunk.bytes.len();
        scratch.row_key.clear();
        if problem.is_none() {
            let mut values: Vec<Value<'_>> = std::mem::take(&mut scratch.values);
            let mut extra = std::mem::take(&mut scratch.extra);
            let encoded = self.gather_unknown(sight, kind, &mut extra).and_then(|()| {
                self.values(sight, &extra, &mut values)?;
                let (row, row_key) = (&mut chunk.bytes, &mut scratch.row_key);
                let original = original(record, event_ms);
                let encoded = self.encoder.encode_whole(kind, &values, &original, row, row_key);
                encoded.map_err(|bad| bad.to_string())
            });
            scratch.values = emptied(values);
            scratch.extra = extra;
            problem = encoded.err().map(Problem::BadRecord);
        }
        let row_end = chunk.bytes.len();
        chunk.bytes.extend_from_slice(&scratch.row_key);
        let mut ends = [start, row_start, row_end, chunk.bytes.len()];
        if u32::try_from(ends[3]).is_err() {
            chunk.bytes.truncate(start);
            ends = [start; 4];
            problem = Some(Problem::BadRecord("one chunk is above 4 GiB; send less at once".to_owned()));
        }
        let [start, row_start, row_end, end] = ends.map(|at| at as u32);
        chunk.records.push(Named {
            fingerprint,
            digest,
            event_ms,
            kind,
            payload: record.payload.map(|_| start..row_start),
            row: row_start..row_end,
            row_key: row_end..end,
            shard: record.kafka.map_or(0, |kafka| kafka.shard),
            position: record.kafka.map(|kafka| kafka.offset),
            problem: problem.map(Box::new),
        });
        scratch.slots = emptied(found.slots);
        scratch.text = row_text;
    }

    /// The text, with its members found.
    fn read<'a>(&self, text: &'a str, order: &mut Order, found: &mut Found<'a>) -> Result<&'a str, String> {
        members::read(text, &self.layout, order, found)?;
        Ok(text)
    }
}

/// What the record brought along beside its payload.
fn original<'a>(record: &'a Record<'_>, event_ms: i64) -> Original<'a> {
    let headers = match record.headers {
        Headers::Pairs(pairs) => pairs,
        Headers::None | Headers::Http(_) => &[],
    };
    match record.kafka {
        Some(KafkaOrigin { key, timestamp_ms, partition, .. }) => {
            Original { key, headers, timestamp_ms, event_ms, partition: Some(partition) }
        }
        None => Original { headers, event_ms, ..Original::default() },
    }
}

/// The same vector for other lifetimes: its memory is used again.
fn emptied<A, B>(mut vector: Vec<A>) -> Vec<B> {
    vector.clear();
    vector.into_iter().map(|_| unreachable!("the vector is empty")).collect()
}
