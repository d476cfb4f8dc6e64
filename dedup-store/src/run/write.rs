//! Writes runs and their filters.

use redb::StorageBackend;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::{
    BLOCK_BYTES, BLOCK_ENTRIES, BLOCK_HEADER_BYTES, DIGEST_BITS, ENTRY_BYTES, FILTER_KIND, HEADER_BYTES,
    KIND, PACKED_BYTES, RunMeta, SUFFIX_BYTES, WRITE_BYTES, chained, file_name, filter_name, high, part_name,
};
use crate::{
    disk::{Disk, Fail},
    filter::Filter,
    fingerprint::{Fingerprint, Hasher},
    rows::{self, Writer},
    table::{Fact, Table},
};

/// Facts that are sorted at once: bounds the memory that sealing takes.
const SORT_KEYS: usize = 1 << 20;

pub(super) fn header(hasher: &Hasher, kind: &str, content: &[u8]) -> Vec<u8> {
    let about = rows::about(kind, Some(hasher));
    let page = Writer::default().u32(about.len() as u32).bytes(&about);
    let mut page = page.u32(content.len() as u32).bytes(content).unsealed();
    page.resize(HEADER_BYTES, 0);
    page
}

/// Writes the facts of a closed table as a run with this many blocks of filter, syncs it and names it;
/// answers with what the manifest is to say, and the filter. `go_on` is asked now and then; if it says no,
/// nothing is answered, and what is left of the file is removed at the next open.
pub(crate) fn write(
    disk: &dyn Disk,
    hasher: &Hasher,
    table: &Table,
    filter_blocks: u64,
    go_on: &dyn Fn() -> bool,
) -> Result<Option<(RunMeta, Filter)>, Fail> {
    let (part, name) = (part_name(table.generation), file_name(table.generation));
    let failed = |error| Fail::of_io(&format!("cannot write {name}"), &error);
    disk.remove(&part).map_err(failed)?;
    let file = disk.open(&part, true).map_err(failed)?;
    let mut pages = Pages { file: &*file, at: HEADER_BYTES as u64, buffer: Vec::with_capacity(WRITE_BYTES) };
    let mut filter = Filter::new(filter_blocks);
    let (mut chain, mut index) = (0, Vec::new());
    let mut block = BlockWriter::default();
    // By ranges of the first bits, so that only a part of the facts is copied at a time.
    let range_bits = (table.keys() / SORT_KEYS).next_power_of_two().ilog2();
    let mut facts: Vec<Fact> = Vec::with_capacity((table.keys() >> range_bits) + table.keys() / 64);
    for range in 0..1u64 << range_bits {
        if !go_on() {
            return Ok(None);
        }
        facts.clear();
        let of_range =
            |fact: &&Fact| fact.fingerprint.prefix().checked_shr(64 - range_bits).unwrap_or(0) == range;
        facts.extend(table.facts().filter(of_range));
        facts.sort_unstable_by_key(|fact| u128::from_be_bytes(fact.fingerprint.0));
        for fact in &facts {
            filter.insert(&fact.fingerprint);
            if !block.takes(&fact.fingerprint) {
                let (first, checksum) = block.finish(&mut pages, index.len() as u64).map_err(failed)?;
                index.push(first);
                chain = chained(chain, checksum);
            }
            block.push(fact);
        }
    }
    if block.count > 0 {
        let (first, checksum) = block.finish(&mut pages, index.len() as u64).map_err(failed)?;
        index.push(first);
        chain = chained(chain, checksum);
    }
    let rows: Vec<u8> = index.iter().flat_map(|first: &u64| high(*first).to_le_bytes()).collect();
    pages.put(&rows).and_then(|()| pages.put(&xxh3_64(&rows).to_le_bytes())).map_err(failed)?;
    pages.flush().map_err(failed)?;
    let meta = RunMeta {
        through: table.through,
        keys: table.keys() as u64,
        blocks: index.len() as u64,
        chain,
        oldest_ms: table.oldest_ms,
        newest_ms: table.newest_ms,
        filter_blocks,
    };
    let content = meta.write(Writer::default().u64(table.generation)).seal();
    file.write(0, &header(hasher, KIND, &content)).map_err(failed)?;
    file.sync_data().and_then(|()| file.close()).map_err(failed)?;
    drop(file);
    disk.rename(&part, &name).and_then(|()| disk.sync_folder()).map_err(failed)?;
    Ok(Some((meta, filter)))
}

struct Pages<'a> {
    file: &'a dyn StorageBackend,
    at: u64,
    buffer: Vec<u8>,
}

impl Pages<'_> {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= WRITE_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.write(self.at, &self.buffer)?;
        self.at += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

/// The block that is being filled.
struct BlockWriter {
    bytes: [u8; BLOCK_BYTES],
    count: usize,
    prefix: u64,
}

impl Default for BlockWriter {
    fn default() -> Self {
        BlockWriter { bytes: [0; BLOCK_BYTES], count: 0, prefix: 0 }
    }
}

impl BlockWriter {
    /// Whether the key fits into this block; every key does into an empty one.
    fn takes(&self, fingerprint: &Fingerprint) -> bool {
        self.count == 0 || (self.count < BLOCK_ENTRIES && (self.prefix >> 56) as u8 == fingerprint.0[0])
    }

    fn push(&mut self, fact: &Fact) {
        if self.count == 0 {
            self.prefix = fact.fingerprint.prefix();
        }
        let at = BLOCK_HEADER_BYTES + self.count * ENTRY_BYTES;
        let digest = fact.digest() & ((1 << DIGEST_BITS) - 1);
        let packed = digest | (fact.settled() as u64) << DIGEST_BITS;
        let (suffix, rest) = self.bytes[at..at + ENTRY_BYTES].split_at_mut(SUFFIX_BYTES);
        suffix.copy_from_slice(&fact.fingerprint.0[1..]);
        rest.copy_from_slice(&packed.to_le_bytes()[..PACKED_BYTES]);
        self.count += 1;
    }

    /// Writes the block out and empties it; answers with its first prefix and its checksum.
    fn finish(&mut self, pages: &mut Pages<'_>, number: u64) -> std::io::Result<(u64, u64)> {
        let first = self.prefix;
        self.bytes[8..10].copy_from_slice(&(self.count as u16).to_le_bytes());
        self.bytes[10] = (first >> 56) as u8;
        let checksum = xxh3_64_with_seed(&self.bytes[8..], number);
        self.bytes[..8].copy_from_slice(&checksum.to_le_bytes());
        pages.put(&self.bytes)?;
        *self = Self::default();
        Ok((first, checksum))
    }
}

/// Writes a filter's file. It is disposable: whatever is wrong with it, [`load_filter`] finds out.
pub(crate) fn write_filter(
    disk: &dyn Disk,
    hasher: &Hasher,
    generation: u64,
    filter: &Filter,
) -> Result<(), Fail> {
    let name = filter_name(generation);
    let failed = |error| Fail::of_io(&format!("cannot write {name}"), &error);
    disk.remove(&name).map_err(failed)?;
    let file = disk.open(&name, true).map_err(failed)?;
    let bytes = filter.to_bytes();
    let content = Writer::default().u64(generation).u64(filter.blocks()).u64(xxh3_64(&bytes)).seal();
    file.write(0, &header(hasher, FILTER_KIND, &content)).map_err(failed)?;
    for (number, part) in bytes.chunks(WRITE_BYTES).enumerate() {
        file.write((HEADER_BYTES + number * WRITE_BYTES) as u64, part).map_err(failed)?;
    }
    file.sync_data().and_then(|()| file.close()).map_err(failed)?;
    disk.sync_folder().map_err(failed)
}
