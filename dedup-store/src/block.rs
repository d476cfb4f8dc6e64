//! The packed form of facts: [`Block`] (P2). The bytes are described in `FORMAT.md`. Pure.

use std::sync::Arc;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    fact::{Entry, Settled},
    fingerprint::{Algorithm, Digest, Fingerprint, Hasher},
};

const MAGIC: [u8; 4] = *b"OGbk";
const FORMAT_VERSION: u16 = 1;
/// Header without the shard's name.
const HEADER_BYTES: usize = 68;
const CHECKSUM_BYTES: usize = 8;
const ENTRY_BYTES: usize = 28;
const WIDE_ENTRY_BYTES: usize = 32;
const FLAG_WIDE: u8 = 1;
const DIGEST_MASK: u64 = (1 << 56) - 1;

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
        let flags = u32::from(bytes[13]) | u32::from(bytes[14]) << 8 | u32::from(bytes[15]) << 16;
        if flags & !u32::from(FLAG_WIDE) != 0 {
            return Err(BlockError::Flags { found: flags });
        }
        let mut header = Header {
            algorithm: bytes[12],
            wide: flags & u32::from(FLAG_WIDE) != 0,
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
        /// In the block: 24 bits.
        found: u32,
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fingerprint::Identity;

    fn hasher() -> Hasher {
        Hasher::new(&Identity {
            route_id: *b"0123456789abcdef",
            key_spec_id: 1,
            algorithm: Algorithm::Xxh3Secret,
            secret: std::array::from_fn(|index| index as u8),
        })
    }

    fn entries() -> Vec<Entry> {
        let entry = |byte, digest, event_ms, settled| Entry {
            fingerprint: Fingerprint([byte; 16]),
            digest: Digest(digest),
            event_ms,
            settled,
        };
        vec![
            entry(0xaa, 0x00aa_bbcc_ddee_ff01, 1_700_000_000_000, Settled::Written),
            entry(0xbb, 2, 1_700_000_000_258, Settled::DeadLettered),
        ]
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// These bytes stand in stores and sinks: do not change them, add a format version.
    #[test]
    fn p2_golden_block() {
        let block = Block::encode_as([1, 2, 3], &hasher(), "http/0", 77, entries());
        let golden = [
            "4f47626b",                         // magic
            "0100",                             // format version
            "010002000300",                     // writer
            "01",                               // algorithm
            "00",                               // flags
            "0000",                             // unused
            "1f9f6639",                         // key id
            "30313233343536373839616263646566", // route id
            "4d00000000000000",                 // sequence
            "0068e5cf8b010000",                 // min
            "0269e5cf8b010000",                 // max
            "02000000",                         // count
            "06000000",                         // shard length
            "687474702f30",                     // shard
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            "00000000",
            "01ffeeddccbbaa",
            "01",
            "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
            "02010000",
            "02000000000000",
            "05",
            "608e3c93aa2966a6", // checksum
        ];
        assert_eq!(hex(&block.bytes), golden.concat());
        assert_eq!((block.min_ms, block.max_ms), (1_700_000_000_000, 1_700_000_000_258));
        assert_eq!(block.bytes.len(), HEADER_BYTES + 6 + 2 * ENTRY_BYTES + CHECKSUM_BYTES);
    }

    #[test]
    fn p2_every_fault_has_its_error() {
        let sound = Block::encode(&hasher(), "http/0", 77, entries());
        let decode = |shard, sequence, bytes: Vec<u8>| {
            Block::decode(&hasher(), shard, sequence, bytes.into()).map(|block| block.entries)
        };
        assert_eq!(decode("http/0", 77, sound.bytes.to_vec()).unwrap(), entries());
        // A change and a checksum that covers it: only the fault itself can tell.
        let patched = |at: usize, bytes: &[u8]| {
            let mut patched = sound.bytes[..sound.bytes.len() - 8].to_vec();
            patched[at..at + bytes.len()].copy_from_slice(bytes);
            let checksum = xxh3_64(&patched);
            patched.extend_from_slice(&checksum.to_le_bytes());
            decode("http/0", 77, patched).unwrap_err()
        };
        assert!(matches!(patched(0, b"XXXX"), BlockError::Magic { .. }));
        let version = patched(4, &[9, 0, 7, 0, 8, 0, 9, 0]);
        assert!(matches!(&version, BlockError::Version { found: 9, known: 1, writer } if writer == "7.8.9"));
        assert!(version.to_string().contains("7.8.9"));
        assert!(matches!(patched(12, &[2]), BlockError::Algorithm { found: Algorithm::SipHash24, .. }));
        assert!(matches!(patched(12, &[3]), BlockError::UnknownAlgorithm { found: 3 }));
        assert!(matches!(patched(13, &[2]), BlockError::Flags { found: 2 }));
        assert!(matches!(patched(14, &[1]), BlockError::Flags { .. }));
        assert!(matches!(patched(16, &[0; 4]), BlockError::KeyId { found: 0, .. }));
        assert!(matches!(patched(20, &[0; 16]), BlockError::Route { .. }));
        assert!(matches!(patched(44, &[0xff; 8]), BlockError::Bounds { .. } | BlockError::Time { .. }));
        assert!(matches!(patched(52, &[0; 8]), BlockError::Bounds { max_ms: 0, .. }));
        assert!(matches!(patched(60, &[3]), BlockError::Length { .. }));
        assert!(matches!(patched(60, &[0xff; 8]), BlockError::Length { .. }));
        assert!(matches!(patched(HEADER_BYTES, &[0xff]), BlockError::ShardName { at: HEADER_BYTES }));
        let second = HEADER_BYTES + 6 + ENTRY_BYTES;
        assert!(matches!(
            patched(second + 16, &[3, 1]),
            BlockError::Time { index: 1, offset: 259, bound: 258 }
        ));
        assert!(matches!(patched(second + 16, &[1, 1]), BlockError::Bounds { .. }));
        assert!(matches!(patched(second + 27, &[6]), BlockError::Outcome { index: 1, found: 6 }));
        assert!(matches!(decode("http/1", 77, sound.bytes.to_vec()), Err(BlockError::Shard { .. })));
        assert!(matches!(decode("http/0", 78, sound.bytes.to_vec()), Err(BlockError::Sequence { .. })));
        let mut damaged = sound.bytes.to_vec();
        damaged[second] ^= 1;
        assert!(matches!(decode("http/0", 77, damaged), Err(BlockError::Checksum { .. })));
        assert!(matches!(decode("http/0", 77, Vec::new()), Err(BlockError::Length { found: 0, .. })));
    }

    #[test]
    fn p2_any_flipped_bit_or_lost_byte_is_an_error() {
        let sound = Block::encode(&hasher(), "http/0", 77, entries()).bytes;
        for bit in 0..sound.len() * 8 {
            let mut bytes = sound.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Block::decode(&hasher(), "http/0", 77, bytes.into()).is_err(), "bit {bit}");
        }
        for length in 0..sound.len() {
            assert!(Block::decode_any(&hasher(), sound.slice(..length)).is_err(), "{length} bytes");
        }
        let longer = [&sound[..], &[0]].concat();
        assert!(Block::decode_any(&hasher(), longer.into()).is_err());
    }

    fn any_entry() -> impl Strategy<Value = Entry> {
        let time = prop_oneof![any::<i64>(), 0i64..100_000, Just(i64::MIN), Just(i64::MAX)];
        (any::<[u8; 16]>(), 0u64..1 << 56, time, 0u8..6).prop_map(|(key, digest, event_ms, settled)| Entry {
            fingerprint: Fingerprint(key),
            digest: Digest(digest),
            event_ms,
            settled: Settled::from_number(settled).unwrap(),
        })
    }

    proptest! {
        #[test]
        fn p2_what_was_packed_is_unpacked(
            entries in prop::collection::vec(any_entry(), 0..40),
            shard in "\\PC{0,40}",
            sequence in any::<i64>(),
        ) {
            let block = Block::encode(&hasher(), &shard, sequence, entries.clone());
            let back = Block::decode(&hasher(), &shard, sequence, block.bytes.clone()).unwrap();
            prop_assert_eq!(&back.entries, &entries);
            prop_assert_eq!((back.min_ms, back.max_ms), (block.min_ms, block.max_ms));
            if let Some(first) = entries.first() {
                prop_assert!(back.min_ms <= first.event_ms && first.event_ms <= back.max_ms);
            }
        }

        #[test]
        fn p2_arbitrary_bytes_do_no_harm(
            mut bytes in prop::collection::vec(any::<u8>(), 0..400),
            start in any::<bool>(),
            seal in any::<bool>(),
            shard in 0u32..400,
            count in 0u32..16,
        ) {
            // Random bytes end at the magic: help them past the first checks.
            if start && bytes.len() >= HEADER_BYTES + CHECKSUM_BYTES {
                let sound = Block::encode(&hasher(), "", 0, Vec::new()).bytes;
                bytes[..36].copy_from_slice(&sound[..36]);
                bytes[13] &= FLAG_WIDE;
                bytes[60..64].copy_from_slice(&count.to_le_bytes());
                bytes[64..68].copy_from_slice(&shard.to_le_bytes());
                if seal {
                    let end = bytes.len() - CHECKSUM_BYTES;
                    let checksum = xxh3_64(&bytes[..end]);
                    bytes[end..].copy_from_slice(&checksum.to_le_bytes());
                }
            }
            if let Ok(block) = Block::decode_any(&hasher(), bytes.into()) {
                // It may be sound by chance; then its entries lie within its bounds.
                prop_assert!(block.entries.iter().all(|entry| (block.min_ms..=block.max_ms).contains(&entry.event_ms)));
            }
        }
    }
}
