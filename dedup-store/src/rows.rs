//! Small checksummed rows, little-endian: [`Writer`] and [`Reader`], and the row that every file starts with. Pure.

use xxhash_rust::xxh3::xxh3_64;

use crate::fingerprint::{Algorithm, Hasher};

/// Version of the store's files (blocks have their own).
pub(crate) const FILE_VERSION: u32 = 2;

/// This build, as files name it.
pub(crate) const BUILD: &str = concat!("dedup-store ", env!("CARGO_PKG_VERSION"));

/// Appends fields to a row; [`Writer::seal`] ends it with its checksum.
#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn text(self, text: &str) -> Self {
        self.u32(text.len() as u32).bytes(text.as_bytes())
    }

    pub(crate) fn u8(self, value: u8) -> Self {
        self.bytes(&[value])
    }

    pub(crate) fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn i64(self, value: i64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn option(self, value: Option<i64>) -> Self {
        self.u8(u8::from(value.is_some())).i64(value.unwrap_or(0))
    }

    /// Without a checksum: of something that has its own.
    pub(crate) fn unsealed(self) -> Vec<u8> {
        self.0
    }

    pub(crate) fn seal(self) -> Vec<u8> {
        let checksum = xxh3_64(&self.0);
        self.u64(checksum).0
    }
}

/// Reads fields of a sealed row back, in order; every misfit is an error text.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Of something that has its own checksum.
    pub(crate) fn over(bytes: &'a [u8]) -> Self {
        Reader(bytes)
    }

    /// Checks the checksum.
    pub(crate) fn open(row: &'a [u8]) -> Result<Self, String> {
        let (body, checksum) = row
            .split_last_chunk::<8>()
            .ok_or_else(|| format!("row is {} bytes long, at least 8 are needed", row.len()))?;
        let (found, expected) = (xxh3_64(body), u64::from_le_bytes(*checksum));
        if found != expected {
            return Err(format!("row checksum is {found:016x}, written was {expected:016x}"));
        }
        Ok(Reader(body))
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8], String> {
        let (field, rest) = self
            .0
            .split_at_checked(len)
            .ok_or_else(|| format!("row ends {} bytes into a field of {len}", self.0.len()))?;
        self.0 = rest;
        Ok(field)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, String> {
        let len = self.u32()? as usize;
        std::str::from_utf8(self.bytes(len)?)
            .map_err(|error| format!("row holds text that is not UTF-8: {error}"))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, String> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn i64(&mut self) -> Result<i64, String> {
        self.array().map(i64::from_le_bytes)
    }

    pub(crate) fn option(&mut self) -> Result<Option<i64>, String> {
        let (some, value) = (self.u8()?, self.i64()?);
        Ok((some != 0).then_some(value))
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn end(self) -> Result<(), String> {
        if self.0.is_empty() { Ok(()) } else { Err(format!("row has {} bytes to spare", self.0.len())) }
    }
}

/// The row that says what a file is: version and build first, so that any build can say who wrote it.
pub(crate) fn about(kind: &str, hasher: Option<&Hasher>) -> Vec<u8> {
    let row = Writer::default().u32(FILE_VERSION).text(BUILD).text(kind);
    let row = match hasher {
        None => row.u8(0),
        Some(hasher) => row
            .u8(hasher.algorithm() as u8)
            .u32(hasher.key_id())
            .bytes(hasher.route_id())
            .u64(hasher.key_spec_id())
            .bytes(&hasher.test_vector()),
    };
    row.seal()
}

/// Checks an [`about`] row: version, kind, and the names and test vector of `hasher`'s route.
pub(crate) fn check_about(row: &[u8], kind: &str, hasher: Option<&Hasher>) -> Result<(), String> {
    // Of a version that is not ours only these two fields can be trusted, the checksum's place included.
    let mut start = Reader(row);
    let (version, build) = (start.u32()?, start.text().unwrap_or("(unreadable)"));
    if version != FILE_VERSION {
        return Err(format!(
            "it has format version {version}, written by build {build:?}; this build ({BUILD}) reads version \
             {FILE_VERSION}: use that build or a newer one"
        ));
    }
    let mut row = Reader::open(row)?;
    row.u32()?;
    row.text()?;
    let found = row.text()?;
    if found != kind {
        return Err(format!("it is a {found:?}, not a {kind:?}"));
    }
    let (algorithm, hasher) = match (row.u8()?, hasher) {
        (0, None) => return row.end(),
        (0, Some(_)) => return Err("it is bound to no route".to_owned()),
        (_, None) => return Err("it is bound to a route, which its manifest does not know".to_owned()),
        (algorithm, Some(hasher)) => (algorithm, hasher),
    };
    if algorithm != hasher.algorithm() as u8 {
        let found = Algorithm::from_number(algorithm)
            .map_or_else(|| format!("unknown algorithm {algorithm}"), |algorithm| format!("{algorithm:?}"));
        return Err(format!(
            "its keys were hashed with {found}, the route hashes with {:?}",
            hasher.algorithm()
        ));
    }
    let key_id = row.u32()?;
    if key_id != hasher.key_id() {
        return Err(format!(
            "it bears key id {key_id:08x}, the route has {:08x}: it was made with another hash secret",
            hasher.key_id()
        ));
    }
    if row.array::<16>()? != *hasher.route_id() || row.u64()? != hasher.key_spec_id() {
        return Err("it belongs to another route or key spec".to_owned());
    }
    if row.array::<24>()? != hasher.test_vector() {
        return Err(format!(
            "its test vector does not fit: build {build:?} and this build ({BUILD}) hash the same key differently; use \
             the build that wrote it"
        ));
    }
    row.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fingerprint::Identity;

    fn hasher(secret: u8) -> Hasher {
        let secret = std::array::from_fn(|index| secret.wrapping_add(index as u8));
        Hasher::new(&Identity { route_id: [1; 16], key_spec_id: 2, algorithm: Algorithm::Xxh3Secret, secret })
    }

    #[test]
    fn an_unknown_version_names_the_build_that_wrote_it() {
        let row = Writer::default().u32(9).text("dedup-store 7.0.1").bytes(b"whatever follows there").seal();
        let text = check_about(&row, "tail", None).unwrap_err();
        assert!(
            text.contains("version 9") && text.contains("dedup-store 7.0.1") && text.contains(BUILD),
            "{text}"
        );
    }

    #[test]
    fn a_changed_hash_or_secret_is_found_out() {
        let row = about("tail", Some(&hasher(1)));
        check_about(&row, "tail", Some(&hasher(1))).unwrap();
        assert!(check_about(&row, "tail", Some(&hasher(2))).unwrap_err().contains("key id"));
        assert!(check_about(&row, "manifest", Some(&hasher(1))).unwrap_err().contains("not a \"manifest\""));
        // Another hash function under the same names: only the vector tells.
        let mut other = row[..row.len() - 8].to_vec();
        let last = other.len() - 1;
        other[last - 2] ^= 1;
        let other = Writer(other).seal();
        assert!(check_about(&other, "tail", Some(&hasher(1))).unwrap_err().contains("test vector"));
    }

    #[test]
    fn any_flipped_bit_of_a_row_is_an_error() {
        let row = about("tail", Some(&hasher(1)));
        for bit in 0..row.len() * 8 {
            let mut bad = row.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(check_about(&bad, "tail", Some(&hasher(1))).is_err(), "bit {bit}");
            assert!(check_about(&row[..bit / 8], "tail", Some(&hasher(1))).is_err());
        }
    }
}
