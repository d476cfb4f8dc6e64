//! A sealed slot on disk: [`Run`], its facts sorted and immutable, and the file of its filter. The bytes are
//! described in `FORMAT.md`.
//!
//! A run is a plain file of checksummed blocks rather than a database: it is written once from front to back, and
//! a fact is found by one read, at the place that a small index in memory names. Blocks are small, for a look-up
//! costs mostly what it copies and checks.

mod write;

use std::sync::atomic::{AtomicU64, Ordering};

use redb::StorageBackend;
use tracing::warn;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::{
    disk::{Disk, Fail},
    fact::{Known, Settled},
    filter::Filter,
    fingerprint::{Fingerprint, Hasher},
    rows::{self, Reader, Writer},
    table::Found,
};

use self::write::header;
pub(crate) use self::write::{write, write_filter};

const KIND: &str = "run";
const FILTER_KIND: &str = "filter";
/// The first page, before the blocks.
const HEADER_BYTES: usize = 4096;
const BLOCK_BYTES: usize = 1024;
const BLOCK_HEADER_BYTES: usize = 16;
/// The first byte of a fingerprint is the block's.
const SUFFIX_BYTES: usize = 15;
const PACKED_BYTES: usize = 5;
const ENTRY_BYTES: usize = SUFFIX_BYTES + PACKED_BYTES;
const BLOCK_ENTRIES: usize = (BLOCK_BYTES - BLOCK_HEADER_BYTES) / ENTRY_BYTES;
/// Bits of the digest that are kept; the outcome lies above.
const DIGEST_BITS: u32 = 37;
const INDEX_BYTES: usize = 4;
/// Read at once where all are read.
const READ_BLOCKS: usize = 256;
/// Written at once.
const WRITE_BYTES: usize = 1 << 20;

/// What the manifest says of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RunMeta {
    /// Last group of its facts.
    pub(crate) through: u64,
    pub(crate) keys: u64,
    pub(crate) blocks: u64,
    /// Chained checksum of all its blocks.
    pub(crate) chain: u64,
    /// Event times, ms.
    pub(crate) oldest_ms: i64,
    pub(crate) newest_ms: i64,
    /// Blocks of its filter.
    pub(crate) filter_blocks: u64,
}

impl RunMeta {
    pub(crate) fn write(&self, row: Writer) -> Writer {
        row.u64(self.through)
            .u64(self.keys)
            .u64(self.blocks)
            .u64(self.chain)
            .i64(self.oldest_ms)
            .i64(self.newest_ms)
            .u64(self.filter_blocks)
    }

    pub(crate) fn read(row: &mut Reader<'_>) -> Result<Self, String> {
        Ok(RunMeta {
            through: row.u64()?,
            keys: row.u64()?,
            blocks: row.u64()?,
            chain: row.u64()?,
            oldest_ms: row.i64()?,
            newest_ms: row.i64()?,
            filter_blocks: row.u64()?,
        })
    }
}

/// Name of a run's file.
pub(crate) fn file_name(generation: u64) -> String {
    format!("run-{generation}.facts")
}

/// Name of the file of a run's filter.
pub(crate) fn filter_name(generation: u64) -> String {
    format!("run-{generation}.filter")
}

/// A run on its way: renamed once it is whole.
fn part_name(generation: u64) -> String {
    format!("run-{generation}.part")
}

/// Names of all files that a run may have.
pub(crate) fn file_names(generation: u64) -> [String; 3] {
    [part_name(generation), file_name(generation), filter_name(generation)]
}

/// The generation in the name of a run's file, its filter's, or an unfinished one's.
pub(crate) fn generation_of(name: &str) -> Option<u64> {
    let (generation, kind) = name.strip_prefix("run-")?.split_once('.')?;
    matches!(kind, "facts" | "filter" | "part").then(|| generation.parse().ok())?
}

/// An open run.
pub(crate) struct Run {
    pub(crate) generation: u64,
    pub(crate) meta: RunMeta,
    file: Box<dyn StorageBackend>,
    path: String,
    /// First fingerprint of each block, its first 4 bytes.
    index: Vec<u32>,
    /// Keys that were looked up, because a filter said "maybe" or there was none, and are not there.
    false_positives: AtomicU64,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run")
            .field("generation", &self.generation)
            .field("meta", &self.meta)
            .finish_non_exhaustive()
    }
}

impl Run {
    /// Opens a run that the manifest names. Its blocks are checked when they are read.
    pub(crate) fn open(
        disk: &dyn Disk,
        hasher: &Hasher,
        generation: u64,
        meta: &RunMeta,
    ) -> Result<Self, Fail> {
        let name = file_name(generation);
        let path = disk.folder().join(&name).display().to_string();
        let file = open(disk, &name, &path)?;
        let unusable = |text: String| Fail::Unusable(format!("{path}: {text}"));
        let header = read_header(&*file, hasher, KIND, &path)?;
        let content = Reader::open(&header).and_then(|mut row| {
            let found = (row.u64()?, RunMeta::read(&mut row)?);
            row.end()?;
            Ok(found)
        });
        let found = content.map_err(unusable)?;
        if found != (generation, *meta) {
            return Err(unusable(format!(
                "it is {found:?}, the manifest says {:?}: it was exchanged",
                (generation, meta)
            )));
        }
        let mut rows = vec![0; meta.blocks as usize * INDEX_BYTES + 8];
        file.read(block_at(meta.blocks), &mut rows)
            .map_err(|error| Fail::of_io(&format!("cannot read {path}"), &error))?;
        let (rows, checksum) = rows.split_at(rows.len() - 8);
        if xxh3_64(rows).to_le_bytes() != checksum {
            return Err(unusable("the checksum of its index does not fit: it is damaged".to_owned()));
        }
        let (rows, _) = rows.as_chunks::<INDEX_BYTES>();
        let index = rows.iter().map(|row| u32::from_le_bytes(*row)).collect();
        Ok(Run { generation, meta: *meta, file, path, index, false_positives: AtomicU64::new(0) })
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> u64 {
        size_of_val(&*self.index) as u64
    }

    pub(crate) fn false_positives(&self) -> u64 {
        self.false_positives.load(Ordering::Relaxed)
    }

    /// Looks a key up: one read of one block.
    pub(crate) fn find(&self, fingerprint: &Fingerprint) -> Result<Option<Found>, Fail> {
        let prefix = high(fingerprint.prefix());
        let first = position(&self.index, prefix).saturating_sub(1);
        for (number, start) in self.index.iter().enumerate().skip(first) {
            if *start > prefix {
                break;
            }
            let mut bytes = [0; BLOCK_BYTES];
            self.read(number as u64, &mut bytes)?;
            let block = self.block(number as u64, &bytes)?;
            if let Some(packed) = block.find(fingerprint) {
                let known =
                    self.known(packed).ok_or_else(|| self.damaged(number as u64, "its outcome is none"))?;
                let (through, newest_ms) = (self.meta.through, self.meta.newest_ms);
                return Ok(Some(Found { known, through, newest_ms }));
            }
        }
        self.false_positives.fetch_add(1, Ordering::Relaxed);
        Ok(None)
    }

    /// Shows all facts in order, and checks the run whole: checksums, order, counts, chain.
    pub(crate) fn read_all(&self, mut fact: impl FnMut(&Fingerprint, Known)) -> Result<(), Fail> {
        let (mut keys, mut chain, mut last) = (0, 0, None);
        let mut bytes = vec![0; READ_BLOCKS * BLOCK_BYTES];
        for number in 0..self.meta.blocks {
            let at = number as usize % READ_BLOCKS;
            if at == 0 {
                bytes.truncate((self.meta.blocks - number) as usize * BLOCK_BYTES);
                self.read(number, &mut bytes)?;
            }
            let (blocks, _) = bytes.as_chunks::<BLOCK_BYTES>();
            let block = self.block(number, &blocks[at])?;
            chain = chained(chain, block.checksum);
            for (fingerprint, packed) in block.facts() {
                if last.is_some_and(|last| last >= fingerprint) {
                    return Err(self.damaged(number, "its keys are not in order"));
                }
                let known = self.known(packed).ok_or_else(|| self.damaged(number, "its outcome is none"))?;
                fact(&fingerprint, known);
                last = Some(fingerprint);
                keys += 1;
            }
        }
        if (keys, chain) == (self.meta.keys, self.meta.chain) {
            return Ok(());
        }
        Err(Fail::Unusable(format!(
            "{}: it holds {keys} keys (chain {chain:016x}), the manifest says {} (chain {:016x})",
            self.path, self.meta.keys, self.meta.chain
        )))
    }

    /// Writes a copy of it to another disk and names it there; checks it whole, and answers with its filter.
    pub(crate) fn copy(&self, to: &dyn Disk, hasher: &Hasher) -> Result<Filter, Fail> {
        let filter = rebuild_filter(self)?;
        let (part, name) = (part_name(self.generation), file_name(self.generation));
        let failed = |error| Fail::of_io(&format!("cannot write {name}"), &error);
        let file = to.open(&part, true).map_err(failed)?;
        let content = self.meta.write(Writer::default().u64(self.generation)).seal();
        file.write(0, &header(hasher, KIND, &content)).map_err(failed)?;
        let end = block_at(self.meta.blocks) + self.meta.blocks * INDEX_BYTES as u64 + 8;
        let mut buffer = vec![0; WRITE_BYTES];
        for at in (HEADER_BYTES as u64..end).step_by(WRITE_BYTES) {
            let bytes = &mut buffer[..(end - at).min(WRITE_BYTES as u64) as usize];
            self.file
                .read(at, bytes)
                .map_err(|error| Fail::of_io(&format!("cannot read {}", self.path), &error))?;
            file.write(at, bytes).map_err(failed)?;
        }
        file.sync_data().and_then(|()| file.close()).map_err(failed)?;
        to.rename(&part, &name).and_then(|()| to.sync_folder()).map_err(failed)?;
        Ok(filter)
    }

    fn known(&self, packed: u64) -> Option<Known> {
        let settled = Settled::from_number((packed >> DIGEST_BITS) as u8)?;
        let digest = packed & ((1 << DIGEST_BITS) - 1);
        // The slot expires as one: its newest event time is how long the fact lives.
        Some(Known::new(settled, self.meta.newest_ms, digest, DIGEST_BITS))
    }

    /// Reads blocks from this one on.
    fn read(&self, number: u64, bytes: &mut [u8]) -> Result<(), Fail> {
        self.file
            .read(block_at(number), bytes)
            .map_err(|error| Fail::of_io(&format!("cannot read block {number} of {}", self.path), &error))
    }

    fn block<'a>(&self, number: u64, bytes: &'a [u8; BLOCK_BYTES]) -> Result<Block<'a>, Fail> {
        Block::read(number, bytes).map_err(|text| self.damaged(number, text))
    }

    fn damaged(&self, number: u64, text: impl std::fmt::Display) -> Fail {
        Fail::Unusable(format!("{}: block {number}: {text}: it is damaged", self.path))
    }
}

/// Where a block begins; the index follows the last.
fn block_at(number: u64) -> u64 {
    HEADER_BYTES as u64 + number * BLOCK_BYTES as u64
}

/// What the index holds of a prefix.
fn high(prefix: u64) -> u32 {
    (prefix >> 32) as u32
}

/// The first of `index` that is at least `prefix`, as `partition_point` finds it. Fingerprints are spread evenly, so that it is
/// near where its share of the way says.
fn position(index: &[u32], prefix: u32) -> usize {
    let guess = ((u64::from(prefix) * index.len() as u64) >> 32) as usize;
    let (mut low, mut high, mut step) = (guess, guess, 4);
    while low > 0 && index[low - 1] >= prefix {
        low = low.saturating_sub(step);
        step *= 2;
    }
    step = 4;
    while high < index.len() && index[high] < prefix {
        high = (high + step).min(index.len());
        step *= 2;
    }
    low + index[low..high].partition_point(|first| *first < prefix)
}

/// Sorted facts that are read at once.
struct Block<'a> {
    checksum: u64,
    first: u8,
    entries: &'a [[u8; ENTRY_BYTES]],
}

impl<'a> Block<'a> {
    fn read(number: u64, bytes: &'a [u8; BLOCK_BYTES]) -> Result<Self, String> {
        let (header, rows) = bytes.split_at(BLOCK_HEADER_BYTES);
        let mut field = Reader::over(header);
        let expected = field.u64()?;
        let checksum = xxh3_64_with_seed(&bytes[8..], number);
        if checksum != expected {
            return Err(format!("its checksum is {checksum:016x}, written was {expected:016x}"));
        }
        let count = usize::from(u16::from_le_bytes(field.array()?));
        let first = field.u8()?;
        let (entries, _) = rows.as_chunks::<ENTRY_BYTES>();
        let entries = entries
            .get(..count)
            .ok_or_else(|| format!("it counts {count} keys, at most {BLOCK_ENTRIES} fit"))?;
        Ok(Block { checksum, first, entries })
    }

    fn find(&self, fingerprint: &Fingerprint) -> Option<u64> {
        if fingerprint.0[0] != self.first {
            return None;
        }
        let at =
            self.entries.binary_search_by(|entry| entry[..SUFFIX_BYTES].cmp(&fingerprint.0[1..])).ok()?;
        Some(packed(&self.entries[at]))
    }

    fn facts(&self) -> impl Iterator<Item = (Fingerprint, u64)> {
        self.entries.iter().map(|entry| {
            let mut fingerprint = [self.first; 16];
            fingerprint[1..].copy_from_slice(&entry[..SUFFIX_BYTES]);
            (Fingerprint(fingerprint), packed(entry))
        })
    }
}

/// One block of a run, as it is and with its checksum mended.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz_page(bytes: &[u8]) {
    let mut page = [0; BLOCK_BYTES];
    let taken = bytes.len().min(BLOCK_BYTES);
    page[..taken].copy_from_slice(&bytes[..taken]);
    let mut mended = page;
    let checksum = xxh3_64_with_seed(&mended[8..], 3);
    mended[..8].copy_from_slice(&checksum.to_le_bytes());
    for page in [page, mended] {
        let Ok(block) = Block::read(3, &page) else { continue };
        for (fingerprint, packed) in block.facts() {
            // Of facts that are not in order some are not found.
            assert!(block.find(&fingerprint).is_none_or(|found| found >> 40 == 0 && packed >> 40 == 0));
        }
    }
}

fn packed(entry: &[u8; ENTRY_BYTES]) -> u64 {
    let mut packed = [0; 8];
    packed[..PACKED_BYTES].copy_from_slice(&entry[SUFFIX_BYTES..]);
    u64::from_le_bytes(packed)
}

fn chained(chain: u64, checksum: u64) -> u64 {
    xxh3_64_with_seed(&checksum.to_le_bytes(), chain)
}

fn open(disk: &dyn Disk, name: &str, path: &str) -> Result<Box<dyn StorageBackend>, Fail> {
    disk.open(name, false).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Fail::Unusable(format!("{path} is missing: it was removed or renamed"))
        }
        _ => Fail::of_io(&format!("cannot open {path}"), &error),
    })
}

/// The first page of a file of this kind: who wrote it, then a row of its own, which is answered.
fn read_header(file: &dyn StorageBackend, hasher: &Hasher, kind: &str, path: &str) -> Result<Vec<u8>, Fail> {
    let mut page = [0; HEADER_BYTES];
    file.read(0, &mut page).map_err(|error| Fail::of_io(&format!("cannot read {path}"), &error))?;
    let mut page = Reader::over(&page);
    let mut rows = || -> Result<Vec<u8>, String> {
        let mut row = || page.u32().and_then(|len| page.bytes(len as usize));
        rows::check_about(row()?, kind, Some(hasher))?;
        Ok(row()?.to_vec())
    };
    rows().map_err(|text| Fail::Unusable(format!("{path}: {text}")))
}

/// Reads a run's filter; none if it is missing or not sound, which is logged. An IO error is one.
pub(crate) fn load_filter(disk: &dyn Disk, hasher: &Hasher, run: &Run) -> Result<Option<Filter>, Fail> {
    match read_filter(disk, hasher, run) {
        Ok(filter) => Ok(Some(filter)),
        Err(Fail::Unusable(text)) => {
            warn!(text, "a filter is not usable: its run is read instead until the filter is built again");
            Ok(None)
        }
        Err(other) => Err(other),
    }
}

/// Reads a run's filter and says what is wrong with it.
pub(crate) fn read_filter(disk: &dyn Disk, hasher: &Hasher, run: &Run) -> Result<Filter, Fail> {
    let name = filter_name(run.generation);
    let path = disk.folder().join(&name).display().to_string();
    let file = open(disk, &name, &path)?;
    let unusable = |text: String| Fail::Unusable(format!("{path}: {text}"));
    let header = read_header(&*file, hasher, FILTER_KIND, &path)?;
    let content = Reader::open(&header).and_then(|mut row| {
        let found = (row.u64()?, row.u64()?, row.u64()?);
        row.end()?;
        Ok(found)
    });
    let (generation, blocks, checksum) = content.map_err(unusable)?;
    if (generation, blocks) != (run.generation, run.meta.filter_blocks) {
        return Err(unusable(format!(
            "it is for run {generation} with {blocks} blocks, wanted is run {} with {}",
            run.generation, run.meta.filter_blocks
        )));
    }
    let mut bytes = vec![0; blocks as usize * 64];
    file.read(HEADER_BYTES as u64, &mut bytes)
        .map_err(|error| Fail::of_io(&format!("cannot read {path}"), &error))?;
    if xxh3_64(&bytes) != checksum {
        return Err(unusable("its checksum does not fit: it is damaged".to_owned()));
    }
    Filter::from_bytes(&bytes).ok_or_else(|| unusable("it has no blocks".to_owned()))
}

/// Builds a run's filter again from its facts.
pub(crate) fn rebuild_filter(run: &Run) -> Result<Filter, Fail> {
    let mut filter = Filter::new(run.meta.filter_blocks);
    run.read_all(|fingerprint, _| filter.insert(fingerprint))?;
    Ok(filter)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        filter::blocks_for,
        table::Table,
        testing::{fact, hasher, key},
        tests::faulty::FaultyDisk,
    };

    fn table(keys: u64) -> Table {
        let mut table = Table::new(3, 0);
        for number in 0..keys {
            table.insert_absent(&fact(
                number,
                number as i64,
                Settled::from_number(1 + (number % 5) as u8).unwrap(),
            ));
        }
        table.through = 9;
        table
    }

    fn run_of(disk: &FaultyDisk, table: &Table) -> (Run, Filter) {
        let blocks = blocks_for(table.keys() as u64);
        let (meta, filter) = write(disk, &hasher(), table, blocks, &|| true).unwrap().unwrap();
        (Run::open(disk, &hasher(), 3, &meta).unwrap(), filter)
    }

    #[test]
    fn every_fact_is_found_again_and_no_other() {
        for keys in [1, 2, 49, 50, 51, 101, 5_000, 60_000] {
            let disk = FaultyDisk::default();
            let (run, filter) = run_of(&disk, &table(keys));
            assert_eq!((run.meta.keys, run.meta.oldest_ms, run.meta.newest_ms), (keys, 0, keys as i64 - 1));
            for number in 0..keys {
                let found = run.find(&key(number)).unwrap().unwrap();
                assert_eq!(found.known.settled, Settled::from_number(1 + (number % 5) as u8).unwrap());
                assert!(found.known.same(fact(number, 0, Settled::Written).digest));
                assert!(!found.known.same(fact(number + 1, 0, Settled::Written).digest));
                assert_eq!((found.known.event_ms, found.through), (keys as i64 - 1, 9));
                assert!(filter.may_hold(&key(number)));
            }
            assert_eq!(run.false_positives(), 0);
            assert!((keys..keys + 1_000).all(|number| run.find(&key(number)).unwrap().is_none()));
            assert_eq!(run.false_positives(), 1_000);
            let mut seen = 0;
            run.read_all(|_, _| seen += 1).unwrap();
            assert_eq!(seen, keys);
            assert!(rebuild_filter(&run).unwrap() == filter);
        }
    }

    /// These bytes stand in stores and exports: do not change them, add a format version. The header holds the build's version, and
    /// is left out.
    #[test]
    fn golden_bytes_of_a_run_and_its_filter() {
        let disk = FaultyDisk::default();
        let (_, filter) = run_of(&disk, &table(60));
        write_filter(&disk, &hasher(), 3, &filter).unwrap();
        let bytes_of = |name: &str, from: u64| {
            let file = disk.open(name, false).unwrap();
            let mut bytes = vec![0; (file.len().unwrap() - from) as usize];
            file.read(from, &mut bytes).unwrap();
            bytes
        };
        let blocks = bytes_of(&file_name(3), 4_096);
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(
            hex(&blocks[..36]),
            "0376bc3a94db42080100090000000000636f034afe49c70f264c300e0cfff53800000040"
        );
        assert_eq!(xxh3_64(&blocks), 2279547858227408773, "{} bytes", blocks.len());
        let filter = bytes_of(&filter_name(3), 4_096);
        assert_eq!(xxh3_64(&filter), 2014053069633609694, "{} bytes", filter.len());
    }

    proptest! {
        #[test]
        fn a_position_is_that_of_a_search(
            mut index in prop::collection::vec(any::<u32>(), 0..300),
            more in prop::collection::vec(0..50_u32, 0..300),
            prefixes in prop::collection::vec(any::<u32>(), 1..20),
        ) {
            // Crowded in places, too.
            index.extend(more);
            index.sort_unstable();
            let met: Vec<u32> = index.iter().step_by(7).copied().collect();
            for prefix in prefixes.into_iter().chain(met).chain([0, 1, 25, u32::MAX]) {
                let expected = index.partition_point(|first| *first < prefix);
                prop_assert_eq!(position(&index, prefix), expected);
            }
        }
    }

    /// Keys with equal first bytes may fill more than a block, whatever the hash does.
    #[test]
    fn keys_that_share_their_prefix_are_found_in_every_block() {
        let mut table = Table::new(3, 0);
        let of = |number: u64| {
            let mut entry = fact(number, 0, Settled::Written);
            entry.fingerprint.0[..8].fill(7);
            entry
        };
        (0..1_000).for_each(|number| table.insert_absent(&of(number)));
        table.insert_absent(&fact(5_000, 0, Settled::Written));
        let disk = FaultyDisk::default();
        let (run, _) = run_of(&disk, &table);
        assert!((0..1_000).all(|number| run.find(&of(number).fingerprint).unwrap().is_some()));
        assert!((1_000..2_000).all(|number| run.find(&of(number).fingerprint).unwrap().is_none()));
        assert!(run.find(&key(5_000)).unwrap().is_some());
    }

    #[test]
    fn any_flipped_byte_is_found_out() {
        let disk = FaultyDisk::default();
        let (run, filter) = run_of(&disk, &table(700));
        write_filter(&disk, &hasher(), 3, &filter).unwrap();
        assert!(load_filter(&disk, &hasher(), &run).unwrap().unwrap() == filter);
        let rows_end = 8 + rows::about(FILTER_KIND, Some(&hasher())).len() as u64 + 32;
        for (name, step) in [(file_name(3), 7), (filter_name(3), 11)] {
            let rows_end = if name == file_name(3) { rows_end - 3 + 40 } else { rows_end };
            let file = disk.open(&name, false).unwrap();
            let length = file.len().unwrap();
            for at in (0..length).step_by(step) {
                let mut byte = [0];
                file.read(at, &mut byte).unwrap();
                file.write(at, &[byte[0] ^ 0x10]).unwrap();
                if name == filter_name(3) {
                    // Beyond the rows the header page is padding.
                    let loaded = load_filter(&disk, &hasher(), &run).unwrap();
                    assert!(loaded.is_none() || loaded == Some(filter.clone()), "byte {at}");
                    assert!(loaded.is_none() || (rows_end..4_096).contains(&at), "byte {at}");
                } else {
                    let sound = Run::open(&disk, &hasher(), 3, &run.meta)
                        .and_then(|run| run.read_all(|_, _| {}))
                        .is_ok();
                    assert!(!sound || (rows_end..4_096).contains(&at), "byte {at}");
                }
                file.write(at, &byte).unwrap();
            }
            file.set_len(length - 1).unwrap();
            if name == filter_name(3) {
                assert!(load_filter(&disk, &hasher(), &run).unwrap().is_none());
            } else {
                let cut = Run::open(&disk, &hasher(), 3, &run.meta).unwrap_err();
                assert!(cut.to_string().contains("cut"), "{cut}");
            }
        }
        disk.remove(&filter_name(3)).unwrap();
        assert!(load_filter(&disk, &hasher(), &run).unwrap().is_none());
    }

    #[test]
    fn sealing_that_is_called_off_leaves_no_run() {
        let disk = FaultyDisk::default();
        assert!(write(&disk, &hasher(), &table(10), 1, &|| false).unwrap().is_none());
        assert_eq!(disk.list().unwrap(), [part_name(3)]);
    }

    #[test]
    fn names_tell_their_generation() {
        for name in [file_name(12), filter_name(12), part_name(12)] {
            assert_eq!(generation_of(&name), Some(12), "{name}");
        }
        for name in ["run-.facts", "run-1.txt", "run-1", "tail-1.redb", "run-x.part"] {
            assert_eq!(generation_of(name), None, "{name}");
        }
    }
}
