//! Names: [`Fingerprint`] of a key, [`Digest`] of a payload, and the keyed [`Hasher`] that makes both (P1). Pure.

use std::{fmt, sync::Arc};

use siphasher::sip128::SipHasher24;
use xxhash_rust::xxh3::xxh3_128_with_secret;

/// Version of the recipe that lays out hash inputs. It is the first byte of every input: another recipe, other names.
pub const RECIPE_VERSION: u8 = 1;

/// Bytes of the prefix: recipe version 1, key-spec id 8, route id 16.
const PREFIX_BYTES: usize = 25;

const DIGEST_MASK: u64 = (1 << 56) - 1;

/// The 128-bit keyed hash that names an event (P1). Two copies of one event have the same fingerprint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 16]);

impl Fingerprint {
    /// The first 8 bytes as a number: in the order of fingerprints.
    #[inline]
    pub(crate) fn prefix(&self) -> u64 {
        let mut first = [0; 8];
        first.copy_from_slice(&self.0[..8]);
        u64::from_be_bytes(first)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// 32 hex digits.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A 56-bit hash of the payload: tells a copy (same digest) from a mismatch (another digest). The high byte is zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Digest(pub u64);

/// The keyed hash that makes fingerprints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Algorithm {
    /// XXH3-128 with a random 192-byte secret: for trusted producers.
    Xxh3Secret = 1,
    /// SipHash-2-4-128 keyed with the first 16 bytes of the secret: for untrusted producers.
    SipHash24 = 2,
}

impl Algorithm {
    /// The algorithm of a number found in a file, block or sink; none if no build so far knows it.
    pub fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Algorithm::Xxh3Secret),
            2 => Some(Algorithm::SipHash24),
            _ => None,
        }
    }
}

/// Who a route is, wherever its facts are kept: the same on every instance and after a lost disk (P1).
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    /// Made once, never changed, a rename of the route included.
    pub route_id: [u8; 16],
    /// A hash of the key spec's meaning.
    pub key_spec_id: u64,
    /// Which keyed hash makes the fingerprints.
    pub algorithm: Algorithm,
    /// The hash secret.
    pub secret: [u8; 192],
}

/// Leaves the secret out.
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("route_id", &Fingerprint(self.route_id))
            .field("key_spec_id", &format_args!("{:016x}", self.key_spec_id))
            .field("algorithm", &self.algorithm)
            .finish_non_exhaustive()
    }
}

/// Makes fingerprints and digests for one route. Cheap to clone.
#[derive(Clone)]
pub struct Hasher {
    keys: Arc<Keys>,
}

struct Keys {
    route_id: [u8; 16],
    key_spec_id: u64,
    algorithm: Algorithm,
    key_id: u32,
    prefix: [u8; PREFIX_BYTES],
    fingerprint_secret: [u8; 192],
    digest_secret: [u8; 192],
    fingerprint_sip: SipHasher24,
    digest_sip: SipHasher24,
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hasher")
            .field("key_id", &format_args!("{:08x}", self.keys.key_id))
            .finish_non_exhaustive()
    }
}

impl Hasher {
    /// Of `identity`.
    pub fn new(identity: &Identity) -> Self {
        let mut prefix = [0; PREFIX_BYTES];
        prefix[0] = RECIPE_VERSION;
        prefix[1..9].copy_from_slice(&identity.key_spec_id.to_le_bytes());
        prefix[9..].copy_from_slice(&identity.route_id);
        let digest_secret = derive_digest_secret(&identity.secret);
        Hasher {
            keys: Arc::new(Keys {
                route_id: identity.route_id,
                key_spec_id: identity.key_spec_id,
                algorithm: identity.algorithm,
                key_id: key_id(identity.algorithm, &identity.secret),
                prefix,
                fingerprint_secret: identity.secret,
                digest_secret,
                fingerprint_sip: sip(&identity.secret),
                digest_sip: sip(&digest_secret),
            }),
        }
    }

    /// The bytes that every hash input starts with: recipe version, key-spec id, route id.
    pub fn prefix(&self) -> &[u8] {
        &self.keys.prefix
    }

    /// Fingerprint of `input` = prefix ++ tenant and dedup key bytes, as the caller laid them out.
    #[inline]
    pub fn fingerprint(&self, input: &[u8]) -> Fingerprint {
        Fingerprint(match self.keys.algorithm {
            Algorithm::Xxh3Secret => xxh3_128_with_secret(input, &self.keys.fingerprint_secret).to_be_bytes(),
            Algorithm::SipHash24 => self.keys.fingerprint_sip.hash(input).as_bytes(),
        })
    }

    /// Digest of a payload.
    #[inline]
    pub fn digest(&self, payload: &[u8]) -> Digest {
        let hash = match self.keys.algorithm {
            Algorithm::Xxh3Secret => xxh3_128_with_secret(payload, &self.keys.digest_secret) as u64,
            Algorithm::SipHash24 => self.keys.digest_sip.hash(payload).as_u64().0,
        };
        Digest(hash & DIGEST_MASK)
    }

    /// Names secret and algorithm, in every file and block.
    pub fn key_id(&self) -> u32 {
        self.keys.key_id
    }

    /// Of the route.
    pub fn route_id(&self) -> &[u8; 16] {
        &self.keys.route_id
    }

    /// Of the route's key spec.
    pub fn key_spec_id(&self) -> u64 {
        self.keys.key_spec_id
    }

    /// Which keyed hash this is.
    pub fn algorithm(&self) -> Algorithm {
        self.keys.algorithm
    }

    /// Fingerprint and digest of a fixed input: kept in every file, so that a build that hashes otherwise finds out
    /// before it judges a record.
    pub(crate) fn test_vector(&self) -> [u8; 24] {
        let mut input = [0; PREFIX_BYTES + 20];
        input[..PREFIX_BYTES].copy_from_slice(&self.keys.prefix);
        input[PREFIX_BYTES..].copy_from_slice(b"oncegate test vector");
        let mut vector = [0; 24];
        vector[..16].copy_from_slice(&self.fingerprint(&input).0);
        vector[16..].copy_from_slice(&self.digest(&input).0.to_le_bytes());
        vector
    }
}

fn sip(secret: &[u8; 192]) -> SipHasher24 {
    let mut key = [0; 16];
    key.copy_from_slice(&secret[..16]);
    SipHasher24::new_with_key(&key)
}

/// Another secret for digests, so that no digest says anything of a fingerprint.
fn derive_digest_secret(secret: &[u8; 192]) -> [u8; 192] {
    let mut input = Vec::with_capacity(secret.len() + 24);
    let mut derived = [0; 192];
    for (index, lane) in derived.chunks_exact_mut(16).enumerate() {
        input.clear();
        input.extend_from_slice(b"oncegate digest secret");
        input.push(index as u8);
        input.extend_from_slice(secret);
        lane.copy_from_slice(&sip(secret).hash(&input).as_bytes());
    }
    derived
}

fn key_id(algorithm: Algorithm, secret: &[u8; 192]) -> u32 {
    let mut input = Vec::with_capacity(1 + secret.len());
    input.push(algorithm as u8);
    input.extend_from_slice(secret);
    SipHasher24::new_with_key(b"oncegate key id\0").hash(&input).as_u64().0 as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(algorithm: Algorithm) -> Identity {
        Identity {
            route_id: std::array::from_fn(|i| i as u8),
            key_spec_id: 0x0102_0304_0506_0708,
            algorithm,
            secret: std::array::from_fn(|i| (i * 7 + 1) as u8),
        }
    }

    fn input(hasher: &Hasher, key: &[u8]) -> Vec<u8> {
        [hasher.prefix(), key].concat()
    }

    /// These bytes stand in stores and sinks: do not change them, add a recipe version or an algorithm.
    #[test]
    fn p1_golden_names() {
        let xxh3 = Hasher::new(&identity(Algorithm::Xxh3Secret));
        let sip = Hasher::new(&identity(Algorithm::SipHash24));
        assert_eq!(
            xxh3.prefix(),
            [1, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
        );
        let names = |hasher: &Hasher| {
            (
                hasher.fingerprint(&input(hasher, b"order-1")).to_string(),
                format!("{:014x}", hasher.digest(b"{\"id\":1}").0),
                format!("{:08x}", hasher.key_id()),
            )
        };
        let golden = |fingerprint: &str, digest: &str, key_id: &str| {
            (fingerprint.to_owned(), digest.to_owned(), key_id.to_owned())
        };
        assert_eq!(names(&xxh3), golden("984b9e00ee48774866a0a1adbb3684f4", "151055fb32f568", "986c7095"));
        assert_eq!(names(&sip), golden("acc17a5ddc82d7669cf1f23b992482eb", "a4434bf5da02a3", "d67e2996"));
    }

    #[test]
    fn sip_matches_the_reference_vector() {
        // SipHash-2-4-128 of 00..0e under the key 00..0f (reference implementation, vectors.h, row 15).
        let key: [u8; 16] = std::array::from_fn(|i| i as u8);
        let input: Vec<u8> = (0..15).collect();
        let hash = Fingerprint(SipHasher24::new_with_key(&key).hash(&input).as_bytes());
        assert_eq!(hash.to_string(), "5493e99933b0a8117e08ec0f97cfc3d9");
    }

    #[test]
    fn p1_every_part_of_the_identity_changes_the_name() {
        let base = identity(Algorithm::Xxh3Secret);
        let mut others = vec![base.clone(); 4];
        others[0].route_id[0] ^= 1;
        others[1].key_spec_id ^= 1;
        others[2].algorithm = Algorithm::SipHash24;
        others[3].secret[0] ^= 1;
        let base = Hasher::new(&base);
        for other in others.iter().map(Hasher::new) {
            assert_ne!(base.fingerprint(&input(&base, b"k")), other.fingerprint(&input(&other, b"k")));
            assert_ne!(base.test_vector(), other.test_vector());
        }
        assert_ne!(base.key_id(), Hasher::new(&others[2]).key_id());
        assert_ne!(base.key_id(), Hasher::new(&others[3]).key_id());
        assert_eq!(base.key_id(), Hasher::new(&others[0]).key_id());
    }

    #[test]
    fn digests_fit_56_bits_at_all_lengths() {
        for algorithm in [Algorithm::Xxh3Secret, Algorithm::SipHash24] {
            let hasher = Hasher::new(&identity(algorithm));
            let payload = vec![7; 1025];
            for len in 0..payload.len() {
                assert_eq!(hasher.digest(&payload[..len]).0 >> 56, 0);
                assert_ne!(hasher.digest(&payload[..len]), hasher.digest(&payload[..len + 1]));
            }
        }
    }

    #[test]
    fn debug_of_an_identity_keeps_its_secret() {
        let text = format!(
            "{:?} {:?}",
            identity(Algorithm::SipHash24),
            Hasher::new(&identity(Algorithm::SipHash24))
        );
        assert!(!text.contains("secret") && !text.contains("[1, 8"), "{text}");
    }
}
