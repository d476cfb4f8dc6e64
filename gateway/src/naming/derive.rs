//! What is derived from one record: its name, time, digest and kind.

use adapters::sink::RowKind;
use dedup_store::{Digest, Fingerprint};

use super::{
    Headers,
    compile::{Namer, Place},
    json,
    namer::{Payload, Sight},
    rules::DigestOver,
    time::{self, EventTime},
};
use crate::{
    format::{
        Deletes, Member,
        debezium::{Change, Op},
    },
    key::{IdempotencyKey, KeyBuffer, KeySpec, Kind, MAX_KEY_BYTES, OnMissing, Part},
    outcome::Problem,
};

const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// A header's value: `Ok(None)` missing, `Ok(Some(None))` there without value. Sent twice over HTTP, it has none to rely on.
pub(super) fn header<'r>(headers: Headers<'r>, name: &str) -> Result<Option<Option<&'r [u8]>>, String> {
    match headers {
        Headers::None => Ok(None),
        Headers::Pairs(pairs) => Ok(pairs.iter().rev().find(|pair| pair.0 == name).map(|pair| pair.1)),
        Headers::Http(map) => {
            let mut values = map.get_all(name).iter();
            match (values.next(), values.next()) {
                (Some(_), Some(_)) => Err(format!("header {name:?} is sent more than once; send it once")),
                (value, _) => Ok(value.map(|value| Some(value.as_bytes()))),
            }
        }
    }
}

/// A Kafka header's value, as [`header`] gives it.
pub(super) fn kafka_header<'r>(sight: &Sight<'r>, name: &str) -> Option<Option<&'r [u8]>> {
    match sight.record.headers {
        pairs @ Headers::Pairs(_) => header(pairs, name).unwrap_or_default(),
        Headers::None | Headers::Http(_) => None,
    }
}

impl Namer {
    /// The fingerprint; none if the payload that the key needs could not be read. Leaves the key's bytes in `key`.
    pub(super) fn fingerprint(
        &self,
        sight: Sight<'_>,
        key: &mut Vec<u8>,
    ) -> Result<Option<Fingerprint>, Problem> {
        let spec = &self.rules.key;
        let (prefix, tenant) = (self.hasher.prefix(), sight.record.tenant);
        if let (Headers::Http(_), IdempotencyKey::First | IdempotencyKey::Require) =
            (sight.record.headers, spec.explicit())
        {
            let value = header(sight.record.headers, IDEMPOTENCY_KEY).map_err(Problem::KeyInvalid)?;
            if let Some(value) = value.flatten() {
                let canonical = spec.canonical_idempotency_key(value).map_err(Problem::KeyInvalid)?;
                KeyBuffer::begin(key, prefix, tenant, Kind::Explicit)
                    .explicit(&canonical, sight.record.index);
                return Ok(Some(self.hasher.fingerprint(key)));
            }
        }
        if spec.explicit() == IdempotencyKey::Require {
            let fault = "the record has no Idempotency-Key header, which this route requires; send one with each request";
            return Err(Problem::KeyMissing(fault.to_owned()));
        }
        match sight.payload {
            Payload::Tombstone if spec.parts().iter().any(Part::needs_payload) => {
                let Some(kafka) = sight.record.kafka else {
                    let fault = "a record without payload has no key on this route; send a payload";
                    return Err(Problem::KeyMissing(fault.to_owned()));
                };
                KeyBuffer::begin(key, prefix, tenant, Kind::TombstonePosition).position(
                    kafka.topic,
                    kafka.partition,
                    kafka.offset,
                );
            }
            payload => {
                let kind = if payload == Payload::Tombstone { Kind::TombstoneParts } else { Kind::Parts };
                let mut buffer = KeyBuffer::begin(key, prefix, tenant, kind);
                for (at, (part, place)) in spec.parts().iter().zip(&self.parts).enumerate() {
                    if matches!(
                        (part, payload),
                        (Part::Pointer(_) | Part::Debezium(_), Payload::Unreadable(_))
                    ) {
                        return Ok(None);
                    }
                    append(&mut buffer, spec, at, place.as_ref(), &sight)?;
                }
            }
        }
        Ok(Some(self.hasher.fingerprint(key)))
    }

    pub(super) fn event_ms(&self, sight: Sight<'_>) -> Result<i64, String> {
        let record = sight.record;
        let arrival = record.arrival_us.div_euclid(1000);
        match (&self.rules.event_time, &self.event_time, sight.payload) {
            (EventTime::Pointer { pointer, unit }, Some(place), Payload::Object(_)) => {
                let value = sight.at(place)?.ok_or_else(|| {
                    format!(
                        "event time {} is missing; send it, or set event_time = \"arrival\"",
                        json::at(pointer)
                    )
                })?;
                time::event_ms(value, *unit)
                    .map_err(|fault| format!("event time {} is {fault}", json::at(pointer)))
            }
            (EventTime::KafkaTimestamp, ..) => match record.kafka {
                None => Ok(arrival),
                Some(kafka) => {
                    kafka.timestamp_ms.filter(|ms| time::TIME_BOUNDS_MS.contains(ms)).ok_or_else(|| {
                        "the Kafka record has no timestamp; set event_time to something else".to_owned()
                    })
                }
            },
            (EventTime::Debezium, _, Payload::Object(_)) => {
                let told = sight.change.and_then(|change| change.ts_ms);
                told.filter(|ms| time::TIME_BOUNDS_MS.contains(ms)).ok_or_else(|| {
                    "the source's time is missing: keep source.ts_ms (add.fields of ExtractNewRecordState), or set \
                     event_time = \"arrival\""
                        .to_owned()
                })
            }
            (EventTime::Pointer { .. } | EventTime::Debezium, _, Payload::Tombstone) => {
                Ok(record.kafka.and_then(|kafka| kafka.timestamp_ms).unwrap_or(arrival))
            }
            _ => Ok(arrival),
        }
    }

    pub(super) fn digest(&self, sight: Sight<'_>, buffer: &mut Vec<u8>) -> Result<Digest, String> {
        match (sight.payload, &self.rules.digest) {
            (Payload::Tombstone, _) => Ok(self.hasher.digest(b"")),
            (Payload::Unreadable(payload) | Payload::Raw(payload), _) => Ok(self.hasher.digest(payload)),
            // Copies of a change differ in what the connector says of itself: the row counts.
            (Payload::Object(row), DigestOver::Payload) => Ok(self.hasher.digest(match sight.change {
                Some(_) => row.as_bytes(),
                None => sight.record.payload.unwrap_or_default(),
            })),
            (Payload::Object(_), DigestOver::Pointers(_)) => {
                buffer.clear();
                let mut parts = KeyBuffer::new(buffer);
                for place in &self.digest {
                    match sight.at(place)? {
                        Some(value) => parts.json(value).map_err(|fault| {
                            format!("{}, which the digest covers: {fault}", json::at(&place.pointer))
                        })?,
                        None => parts.missing(),
                    }
                }
                Ok(self.hasher.digest(buffer))
            }
        }
    }

    pub(super) fn kind(&self, sight: Sight<'_>, buffer: &mut Vec<u8>) -> Result<RowKind, String> {
        if sight.payload == Payload::Tombstone {
            return Ok(RowKind::Delete);
        }
        if sight.deletes && self.rules.format.debezium().is_some_and(|format| format.deletes == Deletes::Row)
        {
            return Ok(RowKind::Delete);
        }
        let Some((place, equals)) = &self.delete_when else { return Ok(RowKind::Write) };
        let Some(value) = sight.at(place)? else { return Ok(RowKind::Write) };
        buffer.clear();
        KeyBuffer::new(buffer).json(value)?;
        Ok(if buffer == equals { RowKind::Delete } else { RowKind::Write })
    }
}

/// Appends what a change event says of itself.
fn change_part(
    buffer: &mut KeyBuffer<'_>,
    member: Member,
    sight: &Sight<'_>,
) -> Result<Option<bool>, String> {
    let Some(change) = sight.change else { return Ok(None) };
    if member != Member::Position {
        let text = member_json(change, member)?;
        return text.map(|text| buffer.json(&text).map(|()| true)).transpose();
    }
    let kafka = sight.record.kafka;
    // A copy comes in the same topic again; where the table is not told, nothing else tells it.
    let place = change.table.as_deref().or(kafka.map(|kafka| kafka.topic));
    buffer.texts(&[
        change.name.as_deref(),
        change.database.as_deref(),
        change.schema.as_deref(),
        place,
        Some(change.op.word()),
        Some(change.position.as_deref().map_err(Clone::clone)?),
    ]);
    // Several rows may be changed at one position.
    match (sight.key, kafka.and_then(|kafka| kafka.key), sight.payload) {
        (Some(key), ..) => buffer.json(key)?,
        (None, Some(key), _) => buffer.kafka_key(key),
        (None, None, Payload::Object(row)) => buffer.json(row)?,
        (None, None, _) => buffer.missing(),
    }
    Ok(Some(true))
}

/// A member of a change event as JSON text; none if the source does not tell it.
pub(super) fn member_json(change: &Change, member: Member) -> Result<Option<String>, String> {
    let text = |text: Option<&str>| text.map(|text| serde_json::Value::from(text).to_string());
    Ok(match member {
        Member::Position => text(Some(change.position.as_deref().map_err(Clone::clone)?)),
        Member::Version => text(Some(change.version.as_deref().map_err(Clone::clone)?)),
        Member::Op => text(Some(change.op.word())),
        Member::Deleted => Some((change.op == Op::Delete).to_string()),
        Member::Snapshot => Some(change.snapshot.to_string()),
        Member::TsMs => change.ts_ms.map(|ms| ms.to_string()),
        Member::Database => text(change.database.as_deref()),
        Member::Schema => text(change.schema.as_deref()),
        Member::Table => text(change.table.as_deref()),
        Member::Connector => text(change.connector.as_deref()),
        Member::Name => text(change.name.as_deref()),
    })
}

/// Appends part number `at` of the key.
fn append(
    buffer: &mut KeyBuffer<'_>,
    spec: &KeySpec,
    at: usize,
    place: Option<&Place>,
    sight: &Sight<'_>,
) -> Result<(), Problem> {
    let part = &spec.parts()[at];
    let record = sight.record;
    let length = |length: usize| match length > MAX_KEY_BYTES {
        true => Err(format!(
            "it has {length} bytes, more than {MAX_KEY_BYTES}; name the event by something shorter"
        )),
        false => Ok(()),
    };
    // Missing: `Ok(None)`; null: `Ok(Some(false))`; anything else: `Ok(Some(true))`.
    let there = |value: Option<Option<&[u8]>>, write: &mut dyn FnMut(&[u8])| match value {
        None => Ok(None),
        Some(None) => Ok(Some(false)),
        Some(Some(bytes)) => length(bytes.len()).map(|()| {
            write(bytes);
            Some(true)
        }),
    };
    let appended = match (part, place) {
        (Part::Pointer(_), Some(place)) => match sight.at(place) {
            Ok(None) => Ok(None),
            Ok(Some("null")) => Ok(Some(false)),
            Ok(Some(value)) => length(value.len()).and_then(|()| buffer.json(value)).map(|()| Some(true)),
            Err(fault) => Err(fault),
        },
        (Part::Pointer(_), None) => Ok(None),
        (Part::Header(name), _) => {
            header(record.headers, name).and_then(|value| there(value, &mut |bytes| buffer.header(bytes)))
        }
        (Part::KafkaHeader(name), _) => {
            there(kafka_header(sight, name), &mut |bytes| buffer.kafka_header(bytes))
        }
        (Part::KafkaKey, _) => {
            there(record.kafka.map(|kafka| kafka.key), &mut |bytes| buffer.kafka_key(bytes))
        }
        (Part::KafkaPosition, _) => Ok(record.kafka.map(|kafka| {
            buffer.position(kafka.topic, kafka.partition, kafka.offset);
            true
        })),
        (Part::Debezium(member), _) => change_part(buffer, *member, sight),
        (Part::Content, _) => Ok(record.payload.map(|payload| {
            buffer.content(payload);
            true
        })),
    };
    let place = || format!("part {} of the key, {part}", at + 1);
    match appended {
        Ok(Some(true)) => Ok(()),
        Ok(missing) if spec.missing() == OnMissing::Allow => {
            if missing.is_some() {
                buffer.null()
            } else {
                buffer.missing()
            }
            Ok(())
        }
        Ok(missing) => {
            let word = if missing.is_some() { "null" } else { "missing" };
            Err(Problem::KeyMissing(format!("{} is {word}; send it, or set on_missing = \"allow\"", place())))
        }
        Err(fault) => Err(Problem::KeyInvalid(format!("{}: {fault}", place()))),
    }
}
