//! [`Namer::name`]: the journey of one record from bytes to name and row.

use std::{borrow::Cow, cell::RefCell};

use adapters::{sink::RowKind, value::Value};
use dedup_store::Digest;

use super::{
    Chunk, Named, Record,
    compile::{Namer, Place},
    json,
    members::{self, Found, Order},
};
use crate::outcome::Problem;

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
}

/// A payload after the pass.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Payload<'r> {
    /// There is none.
    Tombstone,
    /// It is not what the route takes; that has been said.
    Unreadable(&'r [u8]),
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
        let payload = match record.payload {
            None => Payload::Tombstone,
            Some(payload) => match self.read(payload, &mut scratch.order, &mut found) {
                Ok(text) => Payload::Object(text),
                Err(fault) => {
                    problem = Some(Problem::BadRecord(fault));
                    Payload::Unreadable(payload)
                }
            },
        };
        let sight = Sight { record, payload, slots: &found.slots, unknown: &found.unknown };

        let fingerprint = match self.fingerprint(sight, &mut scratch.key) {
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
                self.encoder.encode(kind, &values, row, row_key).map_err(|bad| bad.to_string())
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
    }

    /// The payload as text, with its members found.
    fn read<'a>(
        &self,
        payload: &'a [u8],
        order: &mut Order,
        found: &mut Found<'a>,
    ) -> Result<&'a str, String> {
        let text = std::str::from_utf8(payload)
            .map_err(|error| format!("not UTF-8 at byte {}; send JSON as UTF-8", error.valid_up_to()))?;
        members::read(text, &self.layout, order, found)?;
        Ok(text)
    }
}

/// The same vector for other lifetimes: its memory is used again.
fn emptied<A, B>(mut vector: Vec<A>) -> Vec<B> {
    vector.clear();
    vector.into_iter().map(|_| unreachable!("the vector is empty")).collect()
}
