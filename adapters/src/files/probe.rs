//! Start-up checks, all misfits in one list.

use std::{
    fs, io,
    path::Path,
    sync::atomic::{AtomicU32, Ordering},
};

use super::{FilesConfig, book, sync_folder};
use crate::{
    sink::{Misfit, Mode},
    sqlite::{
        deliver::begin,
        schema::{self, OpenError},
    },
};

/// So many names are shown of those that are not ours.
const SHOWN: usize = 5;

fn misfit(what: impl Into<String>, remedy: impl Into<String>) -> Misfit {
    Misfit { what: what.into(), remedy: remedy.into() }
}

/// Everything that does not fit.
pub(super) fn probe(config: &FilesConfig) -> Result<(), Vec<Misfit>> {
    let mut misfits = Vec::new();
    if config.mode != Mode::Insert {
        misfits.push(misfit(
            "an upsert changes the row that is there, and files are only appended to",
            "use mode = \"insert\", and leave it to who reads the files to take the last row of a key",
        ));
    }
    let folder = config.folder.display();
    match fs::metadata(&config.folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            misfits.push(misfit(format!("folder {folder} does not exist"), "make it, or mount its disk"));
        }
        Err(error) => {
            misfits.push(misfit(format!("folder {folder}: {error}"), "check it and its permissions"));
        }
        Ok(there) if !there.is_dir() => {
            misfits.push(misfit(format!("{folder} is not a folder"), "name a folder"));
        }
        Ok(_) => match private(config) {
            Err(wrong) => misfits.push(wrong),
            Ok(()) => misfits.extend(book(config)),
        },
    }
    if misfits.is_empty() { Ok(()) } else { Err(misfits) }
}

/// Our own folder can be written to, and files can be renamed from there into the readers'.
fn private(config: &FilesConfig) -> Result<(), Misfit> {
    let private = config.private();
    let refused = |path: &Path, error: &io::Error| {
        misfit(
            format!("{} cannot be written to: {error}", path.display()),
            "give this process the right to make and rename files there, and room",
        )
    };
    match fs::create_dir(&private) {
        Ok(()) => sync_folder(&config.folder).map_err(|error| refused(&config.folder, &error))?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(refused(&private, &error)),
    }
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("probe-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let (from, to) = (private.join(&name), config.folder.join(format!(".oncegate-{name}")));
    fs::write(&from, b"\n").map_err(|error| refused(&private, &error))?;
    let moved = fs::rename(&from, &to);
    drop(fs::remove_file(if moved.is_ok() { &to } else { &from }));
    match moved {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => Err(misfit(
            format!("{} is on another file system than {}", private.display(), config.folder.display()),
            "have both on one: a file is finished by renaming it",
        )),
        Err(error) => Err(refused(&config.folder, &error)),
    }
}

/// The bookkeeping opens, and knows every file of the folder.
fn book(config: &FilesConfig) -> Vec<Misfit> {
    let path = config.book().path;
    let unusable = |why: String| {
        vec![misfit(
            format!("the bookkeeping {} cannot be used: {why}", path.display()),
            "restore the folder as a whole; or, if it is new, remove its folder .oncegate",
        )]
    };
    let mut connection = match schema::open(&config.book()) {
        Ok(connection) => connection,
        Err(OpenError::Sqlite(error)) => return unusable(schema::text(&error)),
        Err(OpenError::NotDurable(why)) => return unusable(why),
    };
    let mut looked = || -> Result<Vec<String>, String> {
        let sqlite = |error: rusqlite::Error| schema::text(&error);
        // With the lock, so that no file is on its way.
        let transaction = begin(&mut connection).map_err(|fault| fault.error.to_string())?;
        book::make(&transaction).map_err(sqlite)?;
        let mut foreign = Vec::new();
        for file in fs::read_dir(&config.folder).map_err(|error| error.to_string())? {
            let name = file.map_err(|error| error.to_string())?.file_name();
            let name = name.to_string_lossy();
            if name.ends_with(".ndjson") && !book::knows(&transaction, &name).map_err(sqlite)? {
                foreign.push(name.into_owned());
            }
        }
        book::forget_taken(&transaction, |name| fs::symlink_metadata(config.folder.join(name)).is_ok())
            .map_err(sqlite)?;
        transaction.commit().map_err(sqlite)?;
        Ok(foreign)
    };
    match looked() {
        Err(why) => unusable(why),
        Ok(foreign) if foreign.is_empty() => Vec::new(),
        Ok(mut foreign) => {
            foreign.sort();
            let more = foreign.len().saturating_sub(SHOWN);
            foreign.truncate(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            vec![misfit(
                format!(
                    "folder {} holds files that its bookkeeping does not know: {}{more}",
                    config.folder.display(),
                    foreign.join(", ")
                ),
                "name another folder or move them away; if they are of Oncegate, the bookkeeping (.oncegate) was lost or restored \
                 from an older state: restore it, or new rows may repeat theirs",
            )]
        }
    }
}
