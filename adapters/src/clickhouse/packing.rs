//! How the bodies of inserts are packed: said by the statement that is kept with a batch, so that what another build or configuration has
//! journaled is sent as it was packed.

use std::io;

/// How bodies travel and are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Compression {
    /// As they are.
    None,
    /// As a zstd frame with a checksum.
    #[default]
    Zstd,
}

/// Before the parameters of a statement whose bodies are packed. A space is in no parameter, so that a build that does not know it cannot
/// send them as if they were not.
const ZSTD: &str = "zstd ";
/// The quickest that still halves rows: the engine waits meanwhile.
const LEVEL: i32 = 1;

impl Compression {
    /// A statement with `parameters`.
    pub(super) fn statement(self, parameters: &str) -> String {
        match self {
            Self::None => parameters.to_owned(),
            Self::Zstd => format!("{ZSTD}{parameters}"),
        }
    }

    /// How the bodies of a statement are packed, and its parameters.
    pub(super) fn of(statement: &str) -> (Self, &str) {
        match statement.strip_prefix(ZSTD) {
            Some(parameters) => (Self::Zstd, parameters),
            None => (Self::None, statement),
        }
    }

    /// `Content-Encoding`.
    pub(super) fn encoding(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Zstd => Some("zstd"),
        }
    }
}

/// Packs one body after the other.
#[derive(Default)]
pub(super) struct Packer {
    zstd: Option<zstd::bulk::Compressor<'static>>,
}

impl Packer {
    pub(super) fn pack(&mut self, how: Compression, body: Vec<u8>) -> io::Result<Vec<u8>> {
        match how {
            Compression::None => Ok(body),
            Compression::Zstd => {
                let zstd = match &mut self.zstd {
                    Some(zstd) => zstd,
                    slot => {
                        let mut zstd = zstd::bulk::Compressor::new(LEVEL)?;
                        zstd.include_checksum(true)?;
                        slot.insert(zstd)
                    }
                };
                zstd.compress(&body)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_says_how_its_bodies_are_packed() {
        for (how, golden) in
            [(Compression::None, "query=a%20b&c=1"), (Compression::Zstd, "zstd query=a%20b&c=1")]
        {
            assert_eq!(how.statement("query=a%20b&c=1"), golden);
            assert_eq!(Compression::of(golden), (how, "query=a%20b&c=1"));
        }
    }

    #[test]
    fn what_was_packed_is_the_same_unpacked() {
        let body: Vec<u8> = (0..100_000_u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        let mut packer = Packer::default();
        assert_eq!(packer.pack(Compression::None, body.clone()).unwrap(), body);
        for body in [body, Vec::new(), vec![0]] {
            let packed = packer.pack(Compression::Zstd, body.clone()).unwrap();
            assert_eq!(zstd::bulk::decompress(&packed, body.len()).unwrap(), body);
        }
    }
}
