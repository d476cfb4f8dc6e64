//! Reads a closed store through and says all that is wrong with it: [`verify`].

use std::{
    collections::HashMap,
    fmt,
    path::{Path, PathBuf},
};

use crate::{
    block::Block,
    disk::{self, Disk, Fail, Folder},
    error::StoreError,
    files::{self, RESERVE_NAME},
    fingerprint::{Fingerprint, Hasher},
    manifest::{self, Manifest, Part},
    run::{self, Run, RunMeta},
    tail::{Tail, Visitor},
};

/// What to do about a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Remedy {
    /// Nothing: the next open sees to it, or it changes nothing.
    None,
    /// The filter must go; the next open builds it again.
    Filter,
    /// The folder cannot be used as it is.
    Rebuild,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Remedy::None => "harmless: nothing to do",
            Remedy::Filter => "delete this file: the next open builds it again",
            Remedy::Rebuild => {
                "restore the folder from a backup of the whole of it, or delete it: a Transactional sink rebuilds it from its \
                 marks; for any other sink its facts are lost"
            }
        })
    }
}

/// One thing that is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// File, place in it, value and bound.
    pub what: String,
    /// What to do.
    pub remedy: Remedy,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.what, self.remedy)
    }
}

/// One file that was read.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FileReport {
    /// Its name in the folder.
    pub file: String,
    /// Bytes that it takes up.
    pub bytes: u64,
    /// Blocks that are sound.
    pub blocks: u64,
    /// Facts in them.
    pub facts: u64,
}

/// What [`verify`] found. Prints as lines for a console.
#[derive(Clone, Debug)]
pub struct Report {
    /// The store's folder.
    pub folder: PathBuf,
    /// Route id (hex) and key id, if the store was bound.
    pub route: Option<(String, u32)>,
    /// Files that the manifest names, oldest first.
    pub files: Vec<FileReport>,
    /// All faults; empty if it is sound.
    pub faults: Vec<Fault>,
}

impl Report {
    /// Nothing is wrong that needs anything done.
    pub fn sound(&self) -> bool {
        self.faults.iter().all(|fault| fault.remedy == Remedy::None)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "store    {}", self.folder.display())?;
        match &self.route {
            Some((route, key_id)) => writeln!(f, "route    {route}, key id {key_id:08x}")?,
            None => writeln!(f, "route    none yet")?,
        }
        for file in &self.files {
            writeln!(
                f,
                "file     {}: {} bytes, {} blocks, {} facts",
                file.file, file.bytes, file.blocks, file.facts
            )?;
        }
        for fault in &self.faults {
            writeln!(f, "fault    {fault}")?;
        }
        writeln!(f, "{}", if self.sound() { "sound" } else { "NOT SOUND" })
    }
}

/// Reads every file of the store in `folder`: versions, key ids, test vectors, checksums, counts, chains and the order of
/// sequences. The store must not be open. Changes nothing, but that files left by a crash are repaired as an open would.
/// An error says that it could not be read at all.
pub fn verify(folder: &Path) -> Result<Report, StoreError> {
    if !folder.is_dir() {
        return Err(StoreError::Unusable(format!(
            "{} is no folder: there is no store to verify",
            folder.display()
        )));
    }
    let _lock = disk::lock(folder)?;
    verify_on(&Folder::new(folder))
}

fn verify_on(disk: &dyn Disk) -> Result<Report, StoreError> {
    let folder = disk.folder();
    let mut names =
        disk.list().map_err(|error| StoreError::Io(format!("cannot list {}: {error}", folder.display())))?;
    names.sort();
    let mut report = Report { folder: folder.to_owned(), route: None, files: Vec::new(), faults: Vec::new() };
    if !names.iter().any(|name| name == manifest::NAME) {
        report.add(format!("{} has no {}", folder.display(), manifest::NAME), Remedy::Rebuild);
        return Ok(report);
    }
    let manifest = match Manifest::read(disk) {
        Ok(manifest) => manifest,
        Err(fail) => {
            report.fail(fail)?;
            return Ok(report);
        }
    };
    report.files.push(FileReport { file: manifest::NAME.to_owned(), ..measured(disk, manifest::NAME)? });
    for name in &names {
        let leftover = match files::generation_of(name) {
            Some(generation) => !manifest.names(generation, name),
            None => Manifest::is_named(name) && name != manifest::NAME,
        };
        if leftover {
            report.add(format!("{name} is not in the manifest: an open removes it"), Remedy::None);
        } else if files::generation_of(name).is_none()
            && !Manifest::is_named(name)
            && !disk::is_lock(name)
            && name != RESERVE_NAME
        {
            report.add(format!("{name} is not the store's"), Remedy::None);
        }
    }
    let Some(hasher) = manifest.hasher() else { return Ok(report) };
    report.route = Some((Fingerprint(*hasher.route_id()).to_string(), hasher.key_id()));
    let mut sequences = HashMap::new();
    for (generation, part) in &manifest.parts {
        let name = part.file_name(*generation);
        if !names.contains(&name) {
            report.add(format!("{name} is missing, the manifest names it"), Remedy::Rebuild);
            continue;
        }
        let file = measured(disk, &name)?;
        let mut reader = Reader { file, sequences: &mut sequences, faults: Vec::new() };
        let read = match part {
            Part::Open => read_tail(disk, &hasher, *generation, None, &mut reader),
            Part::Tail(sealed) => read_tail(disk, &hasher, *generation, Some(sealed), &mut reader),
            Part::Run(meta) => read_run(disk, &hasher, *generation, meta, &mut reader),
        };
        let Reader { file, faults, .. } = reader;
        report.files.push(file);
        report.faults.extend(faults);
        if let Err(fail) = read {
            report.fail(fail)?;
        }
    }
    Ok(report)
}

/// Reads a run and its filter: every checksum, the order, the counts, and that the filter knows every key.
fn read_run(
    disk: &dyn Disk,
    hasher: &Hasher,
    generation: u64,
    meta: &RunMeta,
    reader: &mut Reader<'_>,
) -> Result<(), Fail> {
    let run = Run::open(disk, hasher, generation, meta)?;
    let name = run::filter_name(generation);
    let filter = match run::read_filter(disk, hasher, &run) {
        Ok(filter) => Some(filter),
        Err(Fail::Unusable(what)) => {
            reader.faults.push(Fault { what, remedy: Remedy::None });
            None
        }
        Err(other) => return Err(other),
    };
    let mut denied = 0u64;
    run.read_all(|fingerprint, _| {
        reader.file.facts += 1;
        denied += u64::from(filter.as_ref().is_some_and(|filter| !filter.may_hold(fingerprint)));
    })?;
    reader.file.blocks = meta.blocks;
    if denied > 0 {
        reader.faults.push(Fault {
            what: format!("{name} denies {denied} of the {} keys of its run", meta.keys),
            remedy: Remedy::Filter,
        });
    }
    Ok(())
}

fn read_tail(
    disk: &dyn Disk,
    hasher: &Hasher,
    generation: u64,
    sealed: Option<&manifest::Sealed>,
    reader: &mut Reader<'_>,
) -> Result<(), Fail> {
    let (mut tail, _) = Tail::open(disk, hasher, generation)?;
    tail.replay(hasher, reader)?;
    if let Some(sealed) = sealed {
        tail.newest_ms = sealed.newest_ms;
        tail.check_sealed(sealed)?;
    }
    tail.close()
}

fn measured(disk: &dyn Disk, name: &str) -> Result<FileReport, StoreError> {
    let bytes =
        disk.bytes(name).map_err(|error| StoreError::Io(format!("cannot measure {name}: {error}")))?;
    Ok(FileReport { file: name.to_owned(), bytes, ..FileReport::default() })
}

impl Report {
    fn add(&mut self, what: String, remedy: Remedy) {
        self.faults.push(Fault { what, remedy });
    }

    /// A file that is unsound is a finding; one that cannot be read is an error.
    fn fail(&mut self, fail: Fail) -> Result<(), StoreError> {
        match fail {
            Fail::Unusable(text) => self.add(text, Remedy::Rebuild),
            other => return Err(other.into()),
        }
        Ok(())
    }
}

struct Reader<'a> {
    file: FileReport,
    /// Last sequence by shard.
    sequences: &'a mut HashMap<String, i64>,
    faults: Vec<Fault>,
}

impl Visitor for Reader<'_> {
    fn block(&mut self, group: u64, index: usize, block: &Block) -> Result<Option<i64>, Fail> {
        self.file.blocks += 1;
        self.file.facts += block.entries.len() as u64;
        let last = self.sequences.entry(block.shard.to_string()).or_insert(block.sequence);
        if block.sequence < *last {
            self.faults.push(Fault {
                what: format!(
                    "{}, group {group}, block {index}: sequence {} of shard {:?} comes after {last}: it was learnt twice",
                    self.file.file, block.sequence, block.shard
                ),
                remedy: Remedy::None,
            });
        }
        *last = block.sequence.max(*last);
        Ok(None)
    }

    fn fault(&mut self, fault: Fail) -> Result<(), Fail> {
        match fault {
            Fail::Unusable(what) => self.faults.push(Fault { what, remedy: Remedy::Rebuild }),
            other => return Err(other),
        }
        Ok(())
    }
}
