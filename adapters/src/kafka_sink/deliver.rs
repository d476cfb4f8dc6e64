//! One batch, one transaction: marks, rows, dead letters, offsets, commit.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use rdkafka::{Offset, TopicPartitionList};

use super::{
    desk::{Desk, Place, not_applied},
    encode::Sent,
    line::{Keys, Kind, Line, State},
    topics,
    writer::{Broken, Writer},
};
use crate::{
    dead_letters::{Letter, hex},
    kafka::Metadata,
    sink::{Batch, OnRefused, Row, RowKind, RowOutcome, ShardStep, SinkError, Source},
};

/// What stands around a record in a request, and room for what compression adds.
const AROUND: usize = 512;

/// A batch, owned, so that it can go to the session's thread.
pub(super) struct Work {
    steps: Vec<ShardStep>,
    /// Per step, its mark.
    marks: Vec<Option<(Keys, Bytes)>>,
    bytes: Vec<u8>,
    rows: Vec<PackedRow>,
    letters: Vec<OwnedLetter>,
}

struct PackedRow {
    /// Its place in the batch.
    index: usize,
    row: Range<usize>,
    value: Option<Range<usize>>,
    /// The fingerprint in hex digits, if headers are added.
    key: String,
}

struct OwnedLetter {
    key: String,
    headers: Vec<(&'static str, String)>,
    payload: Option<Vec<u8>>,
}

/// What became of an attempt.
pub(super) enum Delivered {
    /// The batch is in.
    In,
    /// It is not: these rows are refused, and the rest may go again.
    Refused(Vec<(usize, String)>),
}

/// The rows' outcomes as far as they are known before they are sent: a topic has no rows to meet, so each is written or refused.
pub(super) fn refusals(batch: &Batch<'_>, place: &Place) -> Vec<RowOutcome> {
    batch
        .rows
        .iter()
        .map(|row| refusal(row, place).map_or(RowOutcome::Written, |reason| RowOutcome::Refused { reason }))
        .collect()
}

fn refusal(row: &Row<'_>, place: &Place) -> Option<String> {
    let (limits, config) = (&place.limits, &place.config);
    let Some(sent) = Sent::read(row.bytes) else {
        return Some("the row was not made by this sink".to_owned());
    };
    let size = sent.size() + value_of(row).map_or(0, <[u8]>::len) + AROUND;
    if size > limits.max_bytes {
        return Some(format!(
            "the record has about {size} bytes, and topic {:?} takes {} (max.message.bytes)",
            config.topic, limits.max_bytes
        ));
    }
    if sent.key.is_none() && limits.compacted {
        return Some(format!("the record has no key, and topic {:?} is compacted", config.topic));
    }
    if sent.key.is_none() && row.kind == RowKind::Delete && config.mode != crate::sink::Mode::Insert {
        return Some("a tombstone without a key deletes nothing".to_owned());
    }
    let (Some(timestamp_ms), Some((before, after))) = (sent.timestamp_ms, limits.timestamps) else {
        return None;
    };
    let now_ms = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |now| now.as_millis() as i64);
    if timestamp_ms < 0
        || now_ms.saturating_sub(timestamp_ms) > before
        || timestamp_ms.saturating_sub(now_ms) > after
    {
        return Some(format!(
            "the record's timestamp is {timestamp_ms}, and topic {:?} takes {before} ms behind and {after} ms ahead of the broker's \
             clock (message.timestamp.before.max.ms, message.timestamp.after.max.ms)",
            config.topic
        ));
    }
    None
}

/// A delete is a record without value.
fn value_of<'a>(row: &Row<'a>) -> Option<&'a [u8]> {
    row.source.payload.filter(|_| row.kind == RowKind::Write)
}

impl Work {
    pub(super) fn of(batch: &Batch<'_>, outcomes: &[RowOutcome], place: &Place) -> Self {
        let mut marks = vec![None; batch.steps.len()];
        for mark in (batch.seal)(outcomes) {
            if let Some(slot) = marks.get_mut(mark.step) {
                let count = i64::try_from(mark.count).unwrap_or(i64::MAX);
                *slot = Some((Keys { count, min_ms: mark.min_ms, max_ms: mark.max_ms }, mark.block));
            }
        }
        let mut bytes = Vec::with_capacity(
            batch.rows.iter().map(|row| row.bytes.len() + row.source.payload.map_or(0, <[u8]>::len)).sum(),
        );
        let mut append = |part: &[u8]| {
            let start = bytes.len();
            bytes.extend_from_slice(part);
            start..bytes.len()
        };
        let mut rows = Vec::with_capacity(batch.rows.len());
        let mut letters: Vec<OwnedLetter> = batch
            .dead_letters
            .iter()
            .map(|letter| {
                OwnedLetter::of(&place.route, batch.steps, &letter.source, letter.kind, &letter.reason)
            })
            .collect();
        for (index, (row, outcome)) in batch.rows.iter().zip(outcomes).enumerate() {
            if let RowOutcome::Refused { reason } = outcome {
                if batch.on_refused == OnRefused::DeadLetter {
                    letters.push(OwnedLetter::of(&place.route, batch.steps, &row.source, "rejected", reason));
                }
                continue;
            }
            let key = if place.config.add_headers { hex(row.source.key) } else { String::new() };
            rows.push(PackedRow {
                index,
                row: append(row.bytes),
                value: value_of(row).map(&mut append),
                key,
            });
        }
        Self { steps: batch.steps.to_vec(), marks, bytes, rows, letters }
    }
}

impl OwnedLetter {
    fn of(route: &str, steps: &[ShardStep], source: &Source<'_>, kind: &'static str, reason: &str) -> Self {
        let shard = steps.get(source.step).map_or("", |step| &*step.shard);
        let letter = Letter {
            route,
            shard,
            position: source.position,
            kind,
            reason,
            key: source.key,
            event_ms: source.event_ms,
            payload: source.payload,
        };
        let mut headers = vec![("oncegate-route", route.to_owned()), ("oncegate-shard", shard.to_owned())];
        headers.extend(source.position.map(|position| ("oncegate-position", position.to_string())));
        headers.push(("oncegate-kind", kind.to_owned()));
        headers.push(("oncegate-reason", reason.to_owned()));
        headers.push(("oncegate-event-ms", source.event_ms.to_string()));
        Self { key: letter.key_hex(), headers, payload: source.payload.map(<[u8]>::to_vec) }
    }
}

impl Desk {
    pub(super) fn deliver(&mut self, work: &Work) -> Result<Delivered, SinkError> {
        self.fence(&work.steps)?;
        if !work.letters.is_empty() && !self.letters {
            let topic = self.place.config.letters_of(&self.place.route);
            topics::letters_topic(&self.place.config, &topic).map_err(|misfits| {
                not_applied(misfits.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
            })?;
            self.letters = true;
        }
        let offsets = self.offsets(&work.steps).map_err(|broken| self.refused(broken))?;
        let lines = self.lines(work);
        let writer = self.ready()?;
        let done = transact(&self.place, writer, &lines, work, offsets.as_ref());
        match done {
            Ok(()) => {
                for (_, line, _) in lines {
                    if let Some(owned) = self.owned.get_mut(&line.shard) {
                        (owned.state, owned.moved) = (line.state, true);
                        owned.written = std::time::Instant::now();
                    }
                }
                Ok(Delivered::In)
            }
            Err(Broken::Refused(rows)) => self.tell_apart(work, rows),
            Err(broken) => Err(self.refused(broken)),
        }
    }

    /// P4: each shard moves from sequence n - 1 to n under our epoch, or nothing happens. That nobody else can have moved it is what
    /// taking it over made sure of.
    fn fence(&mut self, steps: &[ShardStep]) -> Result<(), SinkError> {
        if steps.is_empty() {
            return Err(SinkError::NotApplied {
                reason: "a batch without a shard step cannot be fenced".to_owned(),
                retry: false,
            });
        }
        for ShardStep { shard, epoch, sequence, .. } in steps {
            let Some(owned) = self.owned.get(shard) else {
                self.ready()?;
                return Err(not_applied(format!(
                    "shard {shard} is not ours on this connection: acquire it first"
                )));
            };
            if let Some((owner, epoch)) = &owned.lost {
                return Err(SinkError::Fenced {
                    shard: shard.to_string(),
                    owner: owner.clone(),
                    epoch: *epoch,
                });
            }
            let state = &owned.state;
            if state.epoch > *epoch {
                return Err(super::desk::fenced_by(shard, state));
            }
            let fault = if state.epoch == *epoch && state.sequence + 1 == *sequence {
                continue;
            } else if state.epoch == *epoch && state.sequence >= *sequence {
                let reason = format!(
                    "shard {shard} is at sequence {} already: an earlier attempt may be in",
                    state.sequence
                );
                SinkError::Unknown { reason }
            } else {
                not_applied(format!(
                    "the marks topic went back: shard {shard} is at epoch {}, sequence {}; expected epoch {epoch}, sequence {}",
                    state.epoch,
                    state.sequence,
                    sequence.saturating_sub(1)
                ))
            };
            self.writer = None;
            return Err(fault);
        }
        self.ready().map(drop)
    }

    /// The source's offsets, and the generation under which its partitions are ours: of shards that their group fences.
    fn offsets(&self, steps: &[ShardStep]) -> Result<Option<(TopicPartitionList, Arc<Metadata>)>, Broken> {
        let fenced =
            |step: &&ShardStep| self.owned.get(&step.shard).is_some_and(|owned| owned.state.group.is_some());
        let mut found: Option<(TopicPartitionList, Arc<Metadata>)> = None;
        for step in steps.iter().filter(fenced) {
            let metadata = self.place.membership.as_ref().and_then(|membership| membership.of(&step.shard));
            let Some(metadata) = metadata else {
                return Err(Broken::Generation(format!(
                    "the consumer group has taken shard {} back",
                    step.shard
                )));
            };
            // A shard that has brought nothing yet has no offset to commit. Its take-over fences our transactional id.
            let Some(position) = step.position else { continue };
            let (list, _) = found.get_or_insert_with(|| (TopicPartitionList::new(), metadata));
            let mut parts = step.shard.rsplitn(3, '/');
            let (partition, topic) = (parts.next().and_then(|number| number.parse().ok()), parts.next());
            let (Some(partition), Some(topic)) = (partition, topic) else {
                let reason = format!("shard {} does not name a partition", step.shard);
                return Err(Broken::Aborted(reason));
            };
            list.add_partition_offset(topic, partition, Offset::Offset(position)).map_err(|error| {
                Broken::Aborted(format!("offset {position} of shard {}: {error}", step.shard))
            })?;
        }
        Ok(found)
    }

    fn lines(&self, work: &Work) -> Vec<(i32, Line, Option<Bytes>)> {
        let line = |(step, mark): (&ShardStep, &Option<(Keys, Bytes)>)| {
            let owned = self.owned.get(&step.shard)?;
            let state = State {
                sequence: step.sequence,
                position: step.position.or(owned.state.position),
                watermark_ms: step.watermark_ms,
                ..owned.state.clone()
            };
            let mut line = Line::new(Kind::Mark, &step.shard, state);
            let block = mark.as_ref().map(|(keys, block)| {
                line.keys = *keys;
                block.clone()
            });
            Some((owned.home, line, block))
        };
        work.steps.iter().zip(&work.marks).filter_map(line).collect()
    }

    /// A request that was refused holds several records: each goes alone, in a transaction that is aborted, to see which are at
    /// fault.
    fn tell_apart(&mut self, work: &Work, suspects: Vec<(usize, String)>) -> Result<Delivered, SinkError> {
        let mut refused = Vec::new();
        for (index, reason) in suspects {
            let Some(row) = work.rows.iter().find(|row| row.index == index) else { continue };
            let writer = self.ready()?;
            let alone = writer
                .begin()
                .and_then(|()| send(&self.place, writer, work, row))
                .and_then(|()| writer.delivered());
            match alone {
                Ok(()) => match writer.abort(Broken::Aborted(String::new())) {
                    Broken::Aborted(_) => {}
                    broken => return Err(self.refused(broken)),
                },
                Err(Broken::Refused(_)) => refused.push((index, reason)),
                Err(broken) => return Err(self.refused(broken)),
            }
        }
        if refused.is_empty() {
            return Err(not_applied(
                "the broker refused a request, and takes each of its records alone".to_owned(),
            ));
        }
        Ok(Delivered::Refused(refused))
    }
}

/// Marks first: an open transaction must show where the next owner looks. Offsets last: a generation that is accepted means that the
/// marks are in the log.
fn transact(
    place: &Place,
    writer: &Writer,
    lines: &[(i32, Line, Option<Bytes>)],
    work: &Work,
    offsets: Option<&(TopicPartitionList, Arc<Metadata>)>,
) -> Result<(), Broken> {
    writer.begin()?;
    for (home, line, block) in lines {
        writer.line(&place.route, &place.marks, *home, line, block.as_deref())?;
    }
    for row in &work.rows {
        send(place, writer, work, row)?;
    }
    if !work.letters.is_empty() {
        let topic = place.config.letters_of(&place.route);
        for OwnedLetter { key, headers, payload } in &work.letters {
            writer.letter(&topic, key, headers, payload.as_deref())?;
        }
    }
    writer.delivered()?;
    if let Some((list, metadata)) = offsets {
        writer.offsets(list, metadata)?;
    }
    writer.commit()
}

fn send(place: &Place, writer: &Writer, work: &Work, row: &PackedRow) -> Result<(), Broken> {
    let Some(sent) = Sent::read(&work.bytes[row.row.clone()]) else {
        return Err(
            writer.abort(Broken::Refused(vec![(row.index, "the row was not made by this sink".to_owned())]))
        );
    };
    if let (Some(partition), Some(count)) = (sent.partition, place.limits.partitions)
        && partition >= count
    {
        return Err(writer.abort(Broken::Aborted(format!(
            "a record of partition {partition} came, and topic {:?} has {count} partitions: give it more and restart, or set \
             partition = \"key\"",
            place.config.topic
        ))));
    }
    let added = [("oncegate-key", row.key.as_str()), ("oncegate-outcome", "written")];
    let added = if place.config.add_headers { &added[..] } else { &[] };
    writer.row(
        &place.config.topic,
        row.index,
        &sent,
        added,
        row.value.clone().map(|range| &work.bytes[range]),
    )
}
