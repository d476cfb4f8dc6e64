//! Settled facts in the order of their arrival, with the checkpoints that they belong to: one file, [`Tail`].

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use bytes::{Bytes, BytesMut};
use redb::{ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::{
    block::Block,
    disk::{Container, Disk, Fail},
    fingerprint::{Fingerprint, Hasher},
    floors::Checkpoint,
    manifest::Sealed,
    rows::{self, Reader, Writer},
    state::{Tombstone, Tombstones},
};

const KIND: &str = "tail";
const CACHE_BYTES: usize = 32 << 20;
/// Rows fill pages of 64 KiB to the brim: redb gives a larger value a run of pages of the next power of two.
const PART_BYTES: usize = (64 << 10) - 64;

const ABOUT: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("about");
/// (group, part) -> a part of the group's blocks, each with its length before it.
const GROUPS: TableDefinition<'_, (u64, u32), &[u8]> = TableDefinition::new("groups");
const CHECKPOINTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("checkpoints");
const INTENTS: TableDefinition<'_, [u8; 16], ()> = TableDefinition::new("intents");
const STATE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("state");
/// Keys that were taken back before this tail began.
const TOMBSTONES: TableDefinition<'_, [u8; 16], &[u8]> = TableDefinition::new("tombstones");

/// All that a group commit makes durable at once.
#[derive(Default, Clone)]
pub(crate) struct Group {
    /// Its ticket.
    pub(crate) number: u64,
    /// The slot of its facts.
    pub(crate) generation: u64,
    /// It is the first of its slot, so a tail begins with it.
    pub(crate) begins: bool,
    /// Number of its facts.
    pub(crate) keys: u64,
    /// Facts, in the order in which they were settled.
    pub(crate) blocks: Vec<Bytes>,
    /// Of `blocks`.
    pub(crate) bytes: u64,
    /// Newest event time that the blocks decide over, ms.
    pub(crate) newest_ms: Option<i64>,
    /// Checkpoints that moved.
    pub(crate) checkpoints: HashMap<Arc<str>, Checkpoint>,
    /// Of the route.
    pub(crate) watermark_ms: Option<i64>,
    /// G of that watermark, ms.
    pub(crate) retire_ms: i64,
    /// Intents begun (true) or gone (false).
    pub(crate) intents: HashMap<Fingerprint, bool>,
    /// Tombstones that it made or changed, as they stand after it.
    pub(crate) tombstones: Tombstones,
}

/// What a tail says beside its blocks, as of its last group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Standing {
    pub(crate) checkpoints: HashMap<Arc<str>, Checkpoint>,
    pub(crate) intents: HashSet<Fingerprint>,
    /// Of a tail that was just opened, as of its start.
    pub(crate) tombstones: Tombstones,
    pub(crate) watermark_ms: Option<i64>,
    pub(crate) retire_ms: i64,
}

impl Default for Standing {
    fn default() -> Self {
        Standing {
            checkpoints: HashMap::new(),
            intents: HashSet::new(),
            tombstones: Tombstones::new(),
            watermark_ms: None,
            retire_ms: i64::MIN,
        }
    }
}

impl Standing {
    /// What it is once `group` is in.
    pub(crate) fn apply(&mut self, group: &Group) {
        for (shard, checkpoint) in &group.checkpoints {
            self.checkpoints.insert(Arc::clone(shard), checkpoint.clone());
        }
        for (fingerprint, begun) in &group.intents {
            if *begun {
                self.intents.insert(*fingerprint);
            } else {
                self.intents.remove(fingerprint);
            }
        }
        self.tombstones.extend(
            group.tombstones.iter().map(|(fingerprint, tombstone)| (*fingerprint, tombstone.clone())),
        );
        self.watermark_ms = self.watermark_ms.max(group.watermark_ms);
        self.retire_ms = self.retire_ms.max(group.retire_ms);
    }
}

/// Where a tail ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct End {
    group: u64,
    rows: u64,
    chain: u64,
}

/// One open tail file.
#[derive(Debug)]
pub(crate) struct Tail {
    pub(crate) generation: u64,
    container: Container,
    end: End,
    /// Bytes of its blocks.
    pub(crate) bytes: u64,
    pub(crate) newest_ms: Option<i64>,
}

/// Name of a tail's file.
pub(crate) fn file_name(generation: u64) -> String {
    format!("tail-{generation}.redb")
}

/// The generation in a tail's file name.
pub(crate) fn generation_of(name: &str) -> Option<u64> {
    name.strip_prefix("tail-")?.strip_suffix(".redb")?.parse().ok()
}

impl Tail {
    /// Makes a tail that starts with `standing`, after `group`. Its file counts once the manifest names it.
    pub(crate) fn make(
        disk: &dyn Disk,
        hasher: &Hasher,
        generation: u64,
        group: u64,
        standing: &Standing,
    ) -> Result<Self, Fail> {
        let name = file_name(generation);
        // One of a publication that was cut off.
        disk.remove(&name).map_err(|error| Fail::of_io(&format!("cannot remove {name}"), &error))?;
        let container = Container::open(disk, &name, true, CACHE_BYTES)?;
        let end = End { group, ..End::default() };
        let fill = |txn: &WriteTransaction| -> Result<(), redb::Error> {
            txn.open_table(ABOUT)?.insert("about", &*rows::about(KIND, Some(hasher)))?;
            txn.open_table(GROUPS)?;
            let mut checkpoints = txn.open_table(CHECKPOINTS)?;
            for checkpoint in standing.checkpoints.values() {
                checkpoints.insert(&*checkpoint.shard, &*checkpoint_row(checkpoint))?;
            }
            let mut intents = txn.open_table(INTENTS)?;
            for intent in &standing.intents {
                intents.insert(intent.0, ())?;
            }
            let mut taken_back = txn.open_table(TOMBSTONES)?;
            for (fingerprint, tombstone) in &standing.tombstones {
                taken_back.insert(fingerprint.0, &*tombstone_row(tombstone))?;
            }
            txn.open_table(STATE)?
                .insert("state", &*state_row(&end, standing.watermark_ms, standing.retire_ms))?;
            Ok(())
        };
        write(&container, fill)?;
        disk.sync_folder()
            .map_err(|error| Fail::of_io(&format!("cannot sync the folder of {name}"), &error))?;
        Ok(Tail { generation, container, end, bytes: 0, newest_ms: None })
    }

    /// Opens a tail that the manifest names. Its blocks are yet to be replayed.
    pub(crate) fn open(disk: &dyn Disk, hasher: &Hasher, generation: u64) -> Result<(Self, Standing), Fail> {
        let container = Container::open(disk, &file_name(generation), false, CACHE_BYTES)?;
        let (end, standing) = read_standing(&container, hasher)?;
        Ok((Tail { generation, container, end, bytes: 0, newest_ms: None }, standing))
    }

    /// That it ends where the manifest says; after [`Tail::replay`].
    pub(crate) fn check_sealed(&self, sealed: &Sealed) -> Result<(), Fail> {
        if self.sealed() == *sealed {
            return Ok(());
        }
        Err(self.container.unusable(format_args!(
            "it ends with group {} (chain {:016x}), the manifest says group {} (chain {:016x}): it went back or was \
             exchanged",
            self.end.group, self.end.chain, sealed.group, sealed.chain
        )))
    }

    /// Opens the file again after its database was given up; [`Tail::group`] then says what was committed.
    pub(crate) fn reopen(disk: &dyn Disk, hasher: &Hasher, lost: &Lost) -> Result<Self, Fail> {
        let container = Container::open(disk, &file_name(lost.generation), false, CACHE_BYTES)?;
        let (end, _) = read_standing(&container, hasher)?;
        Ok(Tail { generation: lost.generation, container, end, bytes: lost.bytes, newest_ms: lost.newest_ms })
    }

    /// Gives the database up after an error: redb serves nothing more from it.
    pub(crate) fn give_up(self) -> Lost {
        Lost { generation: self.generation, bytes: self.bytes, newest_ms: self.newest_ms }
    }

    /// Number of the last group.
    pub(crate) fn group(&self) -> u64 {
        self.end.group
    }

    /// What the manifest keeps of it once nothing is added any more.
    pub(crate) fn sealed(&self) -> Sealed {
        Sealed { group: self.end.group, chain: self.end.chain, newest_ms: self.newest_ms }
    }

    pub(crate) fn close(self) -> Result<(), Fail> {
        self.container.close()
    }

    /// Makes a group durable, on top of what stands: watermark and floor never go back, whatever the group knows of them. After
    /// an error the tail must be given up; whether the group is in shows when it is reopened.
    pub(crate) fn commit(&mut self, group: &Group, standing: &Standing) -> Result<(), Fail> {
        let watermark_ms = standing.watermark_ms.max(group.watermark_ms);
        let retire_ms = standing.retire_ms.max(group.retire_ms);
        let mut end = End { group: group.number, ..self.end };
        let fill = |txn: &WriteTransaction| -> Result<(), redb::Error> {
            let mut table = txn.open_table(GROUPS)?;
            let mut parts = 0;
            each_part(&group.blocks, |part| {
                end.chain = xxh3_64_with_seed(part, end.chain);
                end.rows += 1;
                parts += 1;
                table.insert((group.number, parts - 1), part).map(drop)
            })?;
            let mut checkpoints = txn.open_table(CHECKPOINTS)?;
            for checkpoint in group.checkpoints.values() {
                checkpoints.insert(&*checkpoint.shard, &*checkpoint_row(checkpoint))?;
            }
            if !group.intents.is_empty() {
                let mut intents = txn.open_table(INTENTS)?;
                for (intent, begun) in &group.intents {
                    if *begun {
                        intents.insert(intent.0, ())?
                    } else {
                        intents.remove(intent.0)?
                    };
                }
            }
            txn.open_table(STATE)?.insert("state", &*state_row(&end, watermark_ms, retire_ms))?;
            Ok(())
        };
        write(&self.container, fill)?;
        self.end = end;
        self.took(group);
        Ok(())
    }

    /// The group is in.
    pub(crate) fn took(&mut self, group: &Group) {
        self.bytes += group.bytes;
        self.newest_ms = self.newest_ms.max(group.newest_ms);
    }

    /// Shows every block to `visitor` and checks the file whole.
    pub(crate) fn replay(&mut self, hasher: &Hasher, visitor: &mut dyn Visitor) -> Result<(), Fail> {
        let container = &self.container;
        let txn = container.db.begin_read().map_err(|error| container.fail(error))?;
        let table = txn.open_table(GROUPS).map_err(|error| container.fail(error))?;
        let mut found = End { group: self.end.group, ..End::default() };
        let mut current: Option<(u64, u32, BytesMut)> = None;
        let (mut bytes, mut newest_ms) = (0, None);
        let mut cut = |group: u64, stream: Bytes, visitor: &mut dyn Visitor| -> Result<(), Fail> {
            for (index, block) in blocks_of(stream).enumerate() {
                bytes += block.as_ref().map_or(0, |block| block.len() as u64);
                let block = block
                    .and_then(|bytes| Block::decode_any(hasher, bytes).map_err(|error| error.to_string()));
                match block {
                    Ok(block) => newest_ms = newest_ms.max(visitor.block(group, index, &block)?),
                    Err(text) => {
                        visitor.fault(
                            container.unusable(format_args!("group {group}, block {index}: {text}")),
                        )?;
                    }
                }
            }
            Ok(())
        };
        for row in table.iter().map_err(|error| container.fail(error))? {
            let (key, part) = row.map_err(|error| container.fail(error))?;
            let ((group, part_number), part) = (key.value(), part.value());
            found.chain = xxh3_64_with_seed(part, found.chain);
            found.rows += 1;
            match &mut current {
                Some((number, parts, stream)) if *number == group && *parts + 1 == part_number => {
                    *parts += 1;
                    stream.extend_from_slice(part);
                }
                _ => {
                    if part_number != 0 {
                        visitor.fault(container.unusable(format_args!(
                            "group {group} has a part {part_number} without the one before: a row is missing"
                        )))?;
                    }
                    if let Some((number, _, stream)) = current.replace((group, part_number, part.into())) {
                        cut(number, stream.freeze(), visitor)?;
                    }
                }
            }
        }
        if let Some((number, _, stream)) = current.take() {
            cut(number, stream.freeze(), visitor)?;
        }
        if found != self.end {
            visitor.fault(container.unusable(format_args!(
                "it holds {} rows (chain {:016x}), its last group counts {} (chain {:016x}): rows are missing or changed",
                found.rows, found.chain, self.end.rows, self.end.chain
            )))?;
        }
        (self.bytes, self.newest_ms) = (bytes, newest_ms);
        Ok(())
    }
}

/// Sees what a tail holds.
pub(crate) trait Visitor {
    /// A sound block: the `index`th of its group. Answers with the newest event time that it decides over, ms.
    fn block(&mut self, group: u64, index: usize, block: &Block) -> Result<Option<i64>, Fail>;
    /// Something unsound. An error ends the replay.
    fn fault(&mut self, fault: Fail) -> Result<(), Fail>;
}

/// A tail whose database was given up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lost {
    generation: u64,
    bytes: u64,
    pub(crate) newest_ms: Option<i64>,
}

fn write(
    container: &Container,
    fill: impl FnOnce(&WriteTransaction) -> Result<(), redb::Error>,
) -> Result<(), Fail> {
    let txn = container.db.begin_write().map_err(|error| container.fail(error))?;
    fill(&txn).map_err(|error| container.fail(error))?;
    txn.commit().map_err(|error| container.fail(error))
}

/// Cuts the blocks of a group, each with its length before it, into rows.
fn each_part<E>(blocks: &[Bytes], mut row: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
    let mut part = Vec::with_capacity(PART_BYTES.min(blocks.iter().map(|block| block.len() + 4).sum()));
    for block in blocks {
        let length = (block.len() as u32).to_le_bytes();
        for mut bytes in [&length[..], block] {
            while !bytes.is_empty() {
                let (fits, rest) = bytes.split_at(bytes.len().min(PART_BYTES - part.len()));
                part.extend_from_slice(fits);
                bytes = rest;
                if part.len() == PART_BYTES {
                    row(&part)?;
                    part.clear();
                }
            }
        }
    }
    if part.is_empty() { Ok(()) } else { row(&part) }
}

/// The blocks in a group's joined rows.
fn blocks_of(mut stream: Bytes) -> impl Iterator<Item = Result<Bytes, String>> {
    std::iter::from_fn(move || {
        let (length, rest) = match stream.split_first_chunk::<4>() {
            Some((length, rest)) => (u32::from_le_bytes(*length) as usize, rest.len()),
            None if stream.is_empty() => return None,
            None => {
                let spare = stream.len();
                stream.clear();
                return Some(Err(format!("{spare} bytes are left over: the group was cut")));
            }
        };
        if length > rest {
            stream.clear();
            return Some(Err(format!(
                "it should be {length} bytes long, {rest} are left: the group was cut"
            )));
        }
        let mut block = stream.split_to(4 + length);
        Some(Ok(block.split_off(4)))
    })
}

fn checkpoint_row(checkpoint: &Checkpoint) -> Vec<u8> {
    Writer::default()
        .text(&checkpoint.shard)
        .i64(checkpoint.sequence)
        .option(checkpoint.position)
        .i64(checkpoint.watermark_ms)
        .i64(checkpoint.floor_ms)
        .i64(checkpoint.epoch)
        .seal()
}

pub(crate) fn read_checkpoint(row: &[u8]) -> Result<Checkpoint, String> {
    let mut row = Reader::open(row)?;
    let mut checkpoint = Checkpoint {
        shard: row.text()?.into(),
        sequence: row.i64()?,
        epoch: 0,
        position: row.option()?,
        watermark_ms: row.i64()?,
        floor_ms: row.i64()?,
    };
    // Earlier builds did not keep it.
    if !row.is_at_end() {
        checkpoint.epoch = row.i64()?;
    }
    row.end()?;
    Ok(checkpoint)
}

fn tombstone_row(tombstone: &Tombstone) -> Vec<u8> {
    let row = Writer::default()
        .u8(u8::from(tombstone.settled_again))
        .i64(tombstone.event_ms)
        .u64(tombstone.erased)
        .u32(tombstone.by.len() as u32);
    tombstone.by.iter().fold(row, |row, (shard, sequence)| row.text(shard).i64(*sequence)).seal()
}

pub(crate) fn read_tombstone(row: &[u8]) -> Result<Tombstone, String> {
    let mut row = Reader::open(row)?;
    let mut tombstone =
        Tombstone { settled_again: row.u8()? != 0, event_ms: row.i64()?, erased: row.u64()?, by: Vec::new() };
    for _ in 0..row.u32()? {
        tombstone.by.push((row.text()?.into(), row.i64()?));
    }
    row.end()?;
    Ok(tombstone)
}

fn state_row(end: &End, watermark_ms: Option<i64>, retire_ms: i64) -> Vec<u8> {
    Writer::default().u64(end.group).u64(end.rows).u64(end.chain).option(watermark_ms).i64(retire_ms).seal()
}

fn read_standing(container: &Container, hasher: &Hasher) -> Result<(End, Standing), Fail> {
    let txn = container.db.begin_read().map_err(|error| container.fail(error))?;
    let row = |table: TableDefinition<'_, &str, &[u8]>, name: &str| -> Result<Vec<u8>, Fail> {
        let table = txn.open_table(table).map_err(|error| container.fail(error))?;
        let row = table.get(name).map_err(|error| container.fail(error))?;
        Ok(row
            .ok_or_else(|| container.unusable(format_args!("its row {name:?} is missing")))?
            .value()
            .to_vec())
    };
    rows::check_about(&row(ABOUT, "about")?, KIND, Some(hasher)).map_err(|text| container.unusable(text))?;
    let state = row(STATE, "state")?;
    let read_state = || -> Result<(End, Standing), String> {
        let mut row = Reader::open(&state)?;
        let end = End { group: row.u64()?, rows: row.u64()?, chain: row.u64()? };
        let standing = Standing { watermark_ms: row.option()?, retire_ms: row.i64()?, ..Standing::default() };
        row.end()?;
        Ok((end, standing))
    };
    let (end, mut standing) =
        read_state().map_err(|text| container.unusable(format_args!("row \"state\": {text}")))?;
    let checkpoints = txn.open_table(CHECKPOINTS).map_err(|error| container.fail(error))?;
    for row in checkpoints.iter().map_err(|error| container.fail(error))? {
        let (shard, row) = row.map_err(|error| container.fail(error))?;
        let checkpoint = read_checkpoint(row.value()).map_err(|text| {
            container.unusable(format_args!("checkpoint of shard {:?}: {text}", shard.value()))
        })?;
        standing.checkpoints.insert(Arc::clone(&checkpoint.shard), checkpoint);
    }
    let intents = txn.open_table(INTENTS).map_err(|error| container.fail(error))?;
    for row in intents.iter().map_err(|error| container.fail(error))? {
        let (intent, _) = row.map_err(|error| container.fail(error))?;
        standing.intents.insert(Fingerprint(intent.value()));
    }
    let tombstones = txn.open_table(TOMBSTONES).map_err(|error| container.fail(error))?;
    for row in tombstones.iter().map_err(|error| container.fail(error))? {
        let (fingerprint, row) = row.map_err(|error| container.fail(error))?;
        let fingerprint = Fingerprint(fingerprint.value());
        let tombstone = read_tombstone(row.value())
            .map_err(|text| container.unusable(format_args!("tombstone of {fingerprint}: {text}")))?;
        standing.tombstones.insert(fingerprint, tombstone);
    }
    Ok((end, standing))
}
