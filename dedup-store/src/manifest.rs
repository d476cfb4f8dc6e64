//! Which files make up the store, and whose it is: [`Manifest`], kept in `manifest.redb`.

use std::collections::BTreeMap;

use redb::{Database, ReadableDatabase, TableDefinition};

use crate::{
    disk::{Container, Disk, Fail},
    fingerprint::{Algorithm, Hasher, Identity},
    rows::{self, Reader, Writer},
    run::RunMeta,
};

pub(crate) const NAME: &str = "manifest.redb";
/// The manifest on its way to be: renamed once it is whole.
pub(crate) const NEW_NAME: &str = "manifest.new";
const KIND: &str = "manifest";
const CACHE_BYTES: usize = 1 << 20;
const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("manifest");

/// What a tail holds once nothing is added to it any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sealed {
    /// Number of its last group.
    pub(crate) group: u64,
    /// Chained checksum of all its rows.
    pub(crate) chain: u64,
    /// Newest event time of its blocks, ms; none if it has no blocks.
    pub(crate) newest_ms: Option<i64>,
}

/// What holds the facts of one slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// A tail to which groups are added: the newest.
    Open,
    /// A tail to which nothing is added any more.
    Tail(Sealed),
    /// Sorted facts.
    Run(RunMeta),
}

/// What `manifest.redb` says. One row, replaced whole.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Manifest {
    /// None before the first bind.
    pub(crate) identity: Option<Identity>,
    /// Chosen when the store was made.
    pub(crate) width_ms: i64,
    /// Facts below it are forgotten, ms.
    pub(crate) floor_ms: i64,
    /// Counts openings: the fencing token of whoever opened it last.
    pub(crate) fence: u64,
    /// By generation.
    pub(crate) parts: BTreeMap<u64, Part>,
}

/// How often a manifest is looked up on a full disk before it counts as unreadable.
const LOOKS: usize = 3;

impl Manifest {
    pub(crate) fn new(width_ms: i64) -> Self {
        Manifest { identity: None, width_ms, floor_ms: i64::MIN, fence: 0, parts: BTreeMap::new() }
    }

    pub(crate) fn hasher(&self) -> Option<Hasher> {
        self.identity.as_ref().map(Hasher::new)
    }

    /// Whether a file of this name is a manifest, whole or not.
    pub(crate) fn is_named(name: &str) -> bool {
        name == NAME || name == NEW_NAME
    }

    /// Reads the manifest; none if there is none.
    pub(crate) fn load(disk: &dyn Disk, names: &[String]) -> Result<Option<Self>, Fail> {
        if names.iter().any(|name| name == NEW_NAME) {
            disk.remove(NEW_NAME)
                .map_err(|error| Fail::of_io("cannot remove an unfinished manifest", &error))?;
        }
        if names.iter().any(|name| name == NAME) { Self::read(disk).map(Some) } else { Ok(None) }
    }

    /// Reads the manifest that is there.
    pub(crate) fn read(disk: &dyn Disk) -> Result<Self, Fail> {
        let container = Container::open(disk, NAME, false, CACHE_BYTES)?;
        let manifest = Self::read_from(&container)?;
        match container.close() {
            // What was read stands: the close that fails leaves a repair to the next open.
            Err(Fail::Full(_)) | Ok(()) => Ok(manifest),
            Err(other) => Err(other),
        }
    }

    fn read_from(container: &Container) -> Result<Self, Fail> {
        let row = |name| read_row(container, &container.db, name);
        let content = row("content")?;
        let about = row("about")?;
        // The version decides whether the content can be read at all.
        let version = rows::check_about(&about, KIND, None);
        let manifest = match version {
            Err(text) if text.contains("format version") => return Err(container.unusable(text)),
            _ => Self::decode(&content).map_err(|text| container.unusable(text))?,
        };
        rows::check_about(&about, KIND, manifest.hasher().as_ref())
            .map_err(|text| container.unusable(text))?;
        Ok(manifest)
    }

    /// Makes the first manifest: whole under another name first, since a half-made one could not be told from a damaged one.
    pub(crate) fn make(&self, disk: &dyn Disk) -> Result<(), Fail> {
        let named = |error| Fail::of_io("cannot name the manifest", &error);
        disk.remove(NEW_NAME).map_err(named)?;
        let container = Container::open(disk, NEW_NAME, true, CACHE_BYTES)?;
        self.write_to(&container)?;
        container.close()?;
        disk.rename(NEW_NAME, NAME).map_err(named)?;
        disk.sync_folder().map_err(named)
    }

    /// Replaces the manifest. When it fails for lack of room, what is on disk is looked up: `Full` means that the old one stands. Where
    /// that cannot be told the store has to stop, for the files of either may be needed.
    pub(crate) fn replace(&self, disk: &dyn Disk) -> Result<(), Fail> {
        let container = Container::open(disk, NAME, false, CACHE_BYTES)?;
        match self.write_to(&container) {
            Ok(()) => {
                // A close that fails leaves a committed manifest that needs a repair when it is next opened.
                match container.close() {
                    Err(Fail::Full(_)) | Ok(()) => Ok(()),
                    Err(other) => Err(other),
                }
            }
            Err(full @ Fail::Full(_)) => {
                drop(container);
                for _ in 0..LOOKS {
                    match Self::read(disk) {
                        Ok(found) if found == *self => return Ok(()),
                        Ok(_) => return Err(full),
                        Err(Fail::Full(_)) => {}
                        Err(other) => return Err(other),
                    }
                }
                Err(Fail::Io(format!("{full}; whether the manifest was replaced cannot be told")))
            }
            Err(other) => Err(other),
        }
    }

    fn write_to(&self, container: &Container) -> Result<(), Fail> {
        let txn = container.db.begin_write().map_err(|error| container.fail(error))?;
        {
            let mut table = txn.open_table(TABLE).map_err(|error| container.fail(error))?;
            let about = rows::about(KIND, self.hasher().as_ref());
            table.insert("about", &*about).map_err(|error| container.fail(error))?;
            table.insert("content", &*self.encode()).map_err(|error| container.fail(error))?;
        }
        txn.commit().map_err(|error| container.fail(error))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let row = match &self.identity {
            None => Writer::default().u8(0),
            Some(identity) => Writer::default()
                .u8(identity.algorithm as u8)
                .bytes(&identity.route_id)
                .u64(identity.key_spec_id)
                .bytes(&identity.secret),
        };
        let row = row.i64(self.width_ms).i64(self.floor_ms).u64(self.fence).u32(self.parts.len() as u32);
        let parts = self.parts.iter().fold(row, |row, (generation, part)| {
            let row = row.u64(*generation);
            match part {
                Part::Open => row.u8(0),
                Part::Tail(sealed) => row.u8(1).u64(sealed.group).u64(sealed.chain).option(sealed.newest_ms),
                Part::Run(meta) => meta.write(row.u8(2)),
            }
        });
        parts.seal()
    }

    pub(crate) fn decode(row: &[u8]) -> Result<Self, String> {
        let mut row = Reader::open(row)?;
        let identity = match row.u8()? {
            0 => None,
            number => Some(Identity {
                algorithm: Algorithm::from_number(number)
                    .ok_or_else(|| format!("algorithm {number} is unknown to this build"))?,
                route_id: row.array()?,
                key_spec_id: row.u64()?,
                secret: row.array()?,
            }),
        };
        let mut manifest = Manifest { identity, ..Manifest::new(row.i64()?) };
        (manifest.floor_ms, manifest.fence) = (row.i64()?, row.u64()?);
        for _ in 0..row.u32()? {
            let generation = row.u64()?;
            let part = match row.u8()? {
                0 => Part::Open,
                1 => Part::Tail(Sealed { group: row.u64()?, chain: row.u64()?, newest_ms: row.option()? }),
                2 => Part::Run(RunMeta::read(&mut row)?),
                other => return Err(format!("part {generation} is of kind {other}, known are 0 to 2")),
            };
            manifest.parts.insert(generation, part);
        }
        row.end()?;
        Ok(manifest)
    }
}

/// One row of a `&str -> &[u8]` table named as the container's kind.
fn read_row(container: &Container, db: &Database, name: &str) -> Result<Vec<u8>, Fail> {
    let txn = db.begin_read().map_err(|error| container.fail(error))?;
    let table = txn.open_table(TABLE).map_err(|error| container.fail(error))?;
    let row = table.get(name).map_err(|error| container.fail(error))?;
    Ok(row.ok_or_else(|| container.unusable(format_args!("its row {name:?} is missing")))?.value().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::faulty::{FaultyDisk, Survival, Trouble};

    #[test]
    fn content_comes_back_as_it_was() {
        let identity =
            Identity { route_id: [3; 16], key_spec_id: 4, algorithm: Algorithm::SipHash24, secret: [5; 192] };
        let sealed = Sealed { group: 7, chain: 8, newest_ms: Some(-9) };
        let run = RunMeta {
            through: 1,
            keys: 2,
            blocks: 3,
            chain: 4,
            oldest_ms: -5,
            newest_ms: 6,
            filter_blocks: 7,
        };
        let parts = BTreeMap::from([
            (1, Part::Tail(Sealed { newest_ms: None, ..sealed })),
            (2, Part::Run(run)),
            (3, Part::Tail(sealed)),
            (4, Part::Open),
        ]);
        let full = Manifest { identity: Some(identity), floor_ms: -1, fence: 6, parts, ..Manifest::new(10) };
        for manifest in [Manifest::new(1), full] {
            assert!(Manifest::decode(&manifest.encode()).unwrap() == manifest);
        }
    }

    /// A commit failed for lack of room once it was on disk, and so did the look-up of what was there: it passed for not committed, the
    /// files that the manifest named by then were removed, and the store did not open again. Found by a crash at every change of random
    /// scenarios.
    #[test]
    fn p16_a_manifest_that_is_said_to_be_the_old_one_is_the_old_one() {
        let mut told = [0; 3];
        for (first, times) in (1..60).flat_map(|first| (1..6).map(move |times| (first, times))) {
            let disk = FaultyDisk::default();
            let old = Manifest::new(1_000);
            old.make(&disk).unwrap();
            let mut new = old.clone();
            new.floor_ms = 7;
            for operation in first..first + times {
                disk.trouble_at(disk.operations() + operation, Trouble::NoRoom);
            }
            let replaced = new.replace(&disk);
            let after = Manifest::read(&disk.after_crash(Survival::Everything)).unwrap();
            match replaced {
                Ok(()) => assert!(after == new, "operation {first}, {times} times"),
                Err(Fail::Full(_)) => assert!(after == old, "operation {first}, {times} times"),
                Err(Fail::Io(_)) => {}
                Err(other) => panic!("operation {first}, {times} times: {other}"),
            }
            told[match replaced {
                Ok(()) => 0,
                Err(Fail::Full(_)) => 1,
                Err(_) => 2,
            }] += 1;
        }
        assert!(told[0] > 0 && told[1] > 0, "{told:?}");
    }
}
