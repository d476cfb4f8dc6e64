//! Facts and their packed form: [`Entry`], [`Block`] (P2). The bytes are described in `FORMAT.md`. Pure.

use std::sync::Arc;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use crate::fingerprint::{Algorithm, Digest, Fingerprint, Hasher};

const MAGIC: [u8; 4] = *b"OGbk";
const FORMAT_VERSION: u16 = 1;
/// Header without the shard's name.
const HEADER_BYTES: usize = 68;
const CHECKSUM_BYTES: usize = 8;
const ENTRY_BYTES: usize = 28;
const WIDE_ENTRY_BYTES: usize = 32;
const FLAG_WIDE: u8 = 1;
const DIGEST_MASK: u64 = (1 << 56) - 1;

/// What took effect, as stored with a key. `Forgotten` takes a key back (P12).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Settled {
    /// The key was taken back by an operator; a later record with it is new.
    Forgotten = 0,
    /// A row was made.
    Written = 1,
    /// A row was changed.
    Updated = 2,
    /// A newer row, or in `insert` mode any row, was there: nothing changed.
    Stale = 3,
    /// The sink refused the row, and the route settles refusals.
    Rejected = 4,
    /// The record went to the dead letters.
    DeadLettered = 5,
}

impl Settled {
    /// The outcome of a number found in a block; none if this build does not know it.
    pub fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Settled::Forgotten,
            1 => Settled::Written,
            2 => Settled::Updated,
            3 => Settled::Stale,
            4 => Settled::Rejected,
            5 => Settled::DeadLettered,
            _ => return None,
        })
    }

    /// The record was kept out of the sink's table: a replay of its dead letter may still take effect (P2).
    pub fn refused(self) -> bool {
        matches!(self, Settled::Rejected | Settled::DeadLettered)
    }
}

/// One settled key (P2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The key.
    pub fingerprint: Fingerprint,
    /// Of the record that took effect.
    pub digest: Digest,
    /// Event time, ms since the epoch.
    pub event_ms: i64,
    /// What it did.
    pub settled: Settled,
}

/// The facts of one batch for one shard, packed: the same bytes in the tail, in a sink's mark and in an export (P2).
#[derive(Clone, Debug)]
pub struct Block {
    /// Encoded, versioned, checksummed.
    pub bytes: Bytes,
    /// What the bytes say.
    pub entries: Vec<Entry>,
    /// Smallest and largest event time, ms; both 0 in a block without entries.
    pub min_ms: i64,
    /// See `min_ms`.
    pub max_ms: i64,
    /// Whose facts these are.
    pub shard: Arc<str>,
    /// Of the batch in its shard.
    pub sequence: i64,
}

impl Block {
    /// Packs `entries` under `shard` and `sequence`, in the order given. Of a digest the low 56 bits are kept.
    pub fn encode(hasher: &Hasher, shard: &str, sequence: i64, entries: Vec<Entry>) -> Block {
        Self::encode_as(writer_version(), hasher, shard, sequence, entries)
    }

    fn encode_as(
        writer: [u16; 3],
        hasher: &Hasher,
        shard: &str,
        sequence: i64,
        entries: Vec<Entry>,
    ) -> Block {
        let min_ms = entries.iter().map(|entry| entry.event_ms).min().unwrap_or(0);
        let max_ms = entries.iter().map(|entry| entry.event_ms).max().unwrap_or(0);
        let wide = max_ms.wrapping_sub(min_ms) as u64 > u64::from(u32::MAX);
        let width = if wide { WIDE_ENTRY_BYTES } else { ENTRY_BYTES };
        let mut bytes =
            Vec::with_capacity(HEADER_BYTES + shard.len() + entries.len() * width + CHECKSUM_BYTES);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        writer.iter().for_each(|part| bytes.extend_from_slice(&part.to_le_bytes()));
        bytes.push(hasher.algorithm() as u8);
        bytes.push(if wide { FLAG_WIDE } else { 0 });
        bytes.extend_from_slice(&[0; 2]);
        bytes.extend_from_slice(&hasher.key_id().to_le_bytes());
        bytes.extend_from_slice(hasher.route_id());
        bytes.extend_from_slice(&sequence.to_le_bytes());
        bytes.extend_from_slice(&min_ms.to_le_bytes());
        bytes.extend_from_slice(&max_ms.to_le_bytes());
        bytes.extend_from_slice(&(entries.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(shard.len() as u32).to_le_bytes());
        bytes.extend_from_slice(shard.as_bytes());
        for entry in &entries {
            let offset = entry.event_ms.wrapping_sub(min_ms) as u64;
            bytes.extend_from_slice(&entry.fingerprint.0);
            if wide {
                bytes.extend_from_slice(&offset.to_le_bytes());
            } else {
                bytes.extend_from_slice(&(offset as u32).to_le_bytes());
            }
            let tail = (entry.digest.0 & DIGEST_MASK) | (u64::from(entry.settled as u8) << 56);
            bytes.extend_from_slice(&tail.to_le_bytes());
        }
        let checksum = xxh3_64(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        Block { bytes: bytes.into(), entries, min_ms, max_ms, shard: shard.into(), sequence }
    }

    /// Unpacks and checks; the header must bear this route's id and key id, and the shard and sequence given.
    pub fn decode(hasher: &Hasher, shard: &str, sequence: i64, bytes: Bytes) -> Result<Block, BlockError> {
        let block = Self::decode_any(hasher, bytes)?;
        if &*block.shard != shard {
            return Err(BlockError::Shard { found: block.shard.to_string(), expected: shard.to_owned() });
        }
        if block.sequence != sequence {
            return Err(BlockError::Sequence { found: block.sequence, expected: sequence });
        }
        Ok(block)
    }

    /// As [`Block::decode`], of whatever shard and sequence the header says.
    pub fn decode_any(hasher: &Hasher, bytes: Bytes) -> Result<Block, BlockError> {
        let header = Header::read(&bytes)?;
        let (found, expected) = (xxh3_64(&bytes[..header.end]), read_u64(&bytes, header.end));
        if found != expected {
            return Err(BlockError::Checksum { found, expected });
        }
        header.check_identity(hasher)?;
        let shard = std::str::from_utf8(&bytes[HEADER_BYTES..header.start])
            .map_err(|error| BlockError::ShardName { at: HEADER_BYTES + error.valid_up_to() })?;
        let span = header.max_ms.wrapping_sub(header.min_ms) as u64;
        let mut entries = Vec::with_capacity(header.count as usize);
        let mut reached = (u64::MAX, 0);
        for (index, row) in bytes[header.start..header.end].chunks_exact(header.width()).enumerate() {
            let offset = if header.wide { read_u64(row, 16) } else { u64::from(read_u32(row, 16)) };
            if offset > span {
                return Err(BlockError::Time { index, offset, bound: span });
            }
            reached = (reached.0.min(offset), reached.1.max(offset));
            let tail = read_u64(row, row.len() - 8);
            let number = (tail >> 56) as u8;
            let settled = Settled::from_number(number).ok_or(BlockError::Outcome { index, found: number })?;
            entries.push(Entry {
                fingerprint: Fingerprint(read_array(row, 0)),
                digest: Digest(tail & DIGEST_MASK),
                event_ms: header.min_ms.wrapping_add(offset as i64),
                settled,
            });
        }
        if !entries.is_empty() && reached != (0, span) {
            return Err(BlockError::Bounds { min_ms: header.min_ms, max_ms: header.max_ms });
        }
        Ok(Block {
            min_ms: header.min_ms,
            max_ms: header.max_ms,
            shard: shard.into(),
            sequence: header.sequence,
            entries,
            bytes,
        })
    }

    /// That the bytes bear the names of `hasher`'s route. Reads the header only.
    pub(crate) fn check_identity(&self, hasher: &Hasher) -> Result<(), BlockError> {
        Header::read(&self.bytes)?.check_identity(hasher)
    }
}

struct Header {
    algorithm: u8,
    wide: bool,
    key_id: u32,
    route_id: [u8; 16],
    sequence: i64,
    min_ms: i64,
    max_ms: i64,
    count: u32,
    /// Where entries start and end.
    start: usize,
    end: usize,
}

impl Header {
    fn width(&self) -> usize {
        if self.wide { WIDE_ENTRY_BYTES } else { ENTRY_BYTES }
    }

    fn read(bytes: &[u8]) -> Result<Header, BlockError> {
        let shortest = HEADER_BYTES + CHECKSUM_BYTES;
        if bytes.len() < shortest {
            return Err(BlockError::Length { found: bytes.len(), expected: shortest as u64 });
        }
        let magic: [u8; 4] = read_array(bytes, 0);
        if magic != MAGIC {
            return Err(BlockError::Magic { found: magic });
        }
        let version = u16::from_le_bytes(read_array(bytes, 4));
        if version != FORMAT_VERSION {
            let part = |at| u16::from_le_bytes(read_array(bytes, at));
            return Err(BlockError::Version {
                found: version,
                known: FORMAT_VERSION,
                writer: format!("{}.{}.{}", part(6), part(8), part(10)),
            });
        }
        let flags = bytes[13];
        if flags & !FLAG_WIDE != 0 {
            return Err(BlockError::Flags { found: flags });
        }
        let mut header = Header {
            algorithm: bytes[12],
            wide: flags & FLAG_WIDE != 0,
            key_id: read_u32(bytes, 16),
            route_id: read_array(bytes, 20),
            sequence: read_u64(bytes, 36) as i64,
            min_ms: read_u64(bytes, 44) as i64,
            max_ms: read_u64(bytes, 52) as i64,
            count: read_u32(bytes, 60),
            start: 0,
            end: 0,
        };
        let start = HEADER_BYTES as u64 + u64::from(read_u32(bytes, 64));
        let end = start + u64::from(header.count) * header.width() as u64;
        let expected = end + CHECKSUM_BYTES as u64;
        if bytes.len() as u64 != expected {
            return Err(BlockError::Length { found: bytes.len(), expected });
        }
        if header.min_ms > header.max_ms {
            return Err(BlockError::Bounds { min_ms: header.min_ms, max_ms: header.max_ms });
        }
        (header.start, header.end) = (start as usize, end as usize);
        Ok(header)
    }

    fn check_identity(&self, hasher: &Hasher) -> Result<(), BlockError> {
        if self.algorithm != hasher.algorithm() as u8 {
            return Err(match Algorithm::from_number(self.algorithm) {
                Some(found) => BlockError::Algorithm { found, expected: hasher.algorithm() },
                None => BlockError::UnknownAlgorithm { found: self.algorithm },
            });
        }
        if self.key_id != hasher.key_id() {
            return Err(BlockError::KeyId { found: self.key_id, expected: hasher.key_id() });
        }
        if self.route_id != *hasher.route_id() {
            return Err(BlockError::Route {
                found: Fingerprint(self.route_id).to_string(),
                expected: Fingerprint(*hasher.route_id()).to_string(),
            });
        }
        Ok(())
    }
}

fn read_array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

fn read_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(read_array(bytes, at))
}

fn read_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(read_array(bytes, at))
}

/// This build's version, as blocks name it.
fn writer_version() -> [u16; 3] {
    let part = |text: &str| text.parse().unwrap_or(0);
    [
        part(env!("CARGO_PKG_VERSION_MAJOR")),
        part(env!("CARGO_PKG_VERSION_MINOR")),
        part(env!("CARGO_PKG_VERSION_PATCH")),
    ]
}

/// A block that cannot be used: says what is wrong, where, the value and the bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// Cut short, or with bytes to spare.
    #[error("block is {found} bytes long, its header asks for {expected}: it was cut or damaged")]
    Length {
        /// Bytes.
        found: usize,
        /// Bytes.
        expected: u64,
    },
    /// Not a block at all.
    #[error("block starts with {found:02x?}, not with \"OGbk\": these bytes are no block")]
    Magic {
        /// First four bytes.
        found: [u8; 4],
    },
    /// Of a format that this build does not read.
    #[error(
        "block has format version {found}, written by build {writer}; this build reads version {known}: use that build or a newer one"
    )]
    Version {
        /// In the block.
        found: u16,
        /// Of this build.
        known: u16,
        /// Version of the build that wrote it.
        writer: String,
    },
    /// The bytes are not those that were written.
    #[error("block checksum is {found:016x}, written was {expected:016x}: it is damaged")]
    Checksum {
        /// Of the bytes.
        found: u64,
        /// In the block.
        expected: u64,
    },
    /// Flags that this format version does not have.
    #[error("block has flags {found:#04x}, known is only {FLAG_WIDE:#04x}: it is damaged")]
    Flags {
        /// In the block.
        found: u8,
    },
    /// Hashed with the route's other algorithm.
    #[error(
        "block was hashed with {found:?}, the route hashes with {expected:?}: it belongs to another route or an older setting"
    )]
    Algorithm {
        /// In the block.
        found: Algorithm,
        /// Of the route.
        expected: Algorithm,
    },
    /// Hashed with an algorithm that this build does not know.
    #[error("block was hashed with algorithm {found}, which this build does not know: use a newer build")]
    UnknownAlgorithm {
        /// In the block.
        found: u8,
    },
    /// Hashed with another secret.
    #[error(
        "block bears key id {found:08x}, the route has {expected:08x}: it was made with another hash secret"
    )]
    KeyId {
        /// In the block.
        found: u32,
        /// Of the route.
        expected: u32,
    },
    /// Of another route.
    #[error("block belongs to route {found}, not to {expected}")]
    Route {
        /// Route id, hex.
        found: String,
        /// Route id, hex.
        expected: String,
    },
    /// Of another shard.
    #[error("block belongs to shard {found:?}, not to {expected:?}")]
    Shard {
        /// In the block.
        found: String,
        /// As asked.
        expected: String,
    },
    /// Of another batch.
    #[error("block has sequence {found}, not {expected}")]
    Sequence {
        /// In the block.
        found: i64,
        /// As asked.
        expected: i64,
    },
    /// The shard's name is not UTF-8.
    #[error("block's shard name is not UTF-8 at byte {at}: it is damaged")]
    ShardName {
        /// Byte of the block.
        at: usize,
    },
    /// An entry's time lies outside the header's.
    #[error(
        "block entry {index} lies {offset} ms after the block's first, at most {bound} ms are possible: it is damaged"
    )]
    Time {
        /// Of the entry.
        index: usize,
        /// ms.
        offset: u64,
        /// ms.
        bound: u64,
    },
    /// The header's times are not those of the entries.
    #[error(
        "block says that its times reach from {min_ms} to {max_ms} ms, its entries do not: it is damaged"
    )]
    Bounds {
        /// In the header, ms.
        min_ms: i64,
        /// In the header, ms.
        max_ms: i64,
    },
    /// An outcome that this format version does not have.
    #[error("block entry {index} has outcome {found}, known are 0 to 5: it is damaged")]
    Outcome {
        /// Of the entry.
        index: usize,
        /// In the block.
        found: u8,
    },
}
