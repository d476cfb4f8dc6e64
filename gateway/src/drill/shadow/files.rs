//! A shadow folder of files. All that the sink keeps is in it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use adapters::files::FilesConfig;

use super::{Cleaned, SUFFIX, Survey};
use crate::drill::shape::Row;

/// A folder, and the one beside it.
pub(crate) struct FilesShadow {
    real: PathBuf,
    shadow: PathBuf,
    made: bool,
}

impl FilesShadow {
    pub(super) fn new(config: &FilesConfig) -> Self {
        let real = config.folder.clone();
        let mut name = real.file_name().unwrap_or_default().to_owned();
        name.push(SUFFIX);
        Self { shadow: real.with_file_name(name), real, made: false }
    }

    pub(super) fn folder(&self) -> String {
        self.shadow.display().to_string()
    }

    pub(super) fn survey(&self) -> Result<Survey, String> {
        let real = self.real.display();
        if !self.real.is_dir() {
            return Err(format!("{real} is no folder; make it first"));
        }
        if self.shadow.exists() {
            return Err(format!(
                "{} exists: another drill is at work, or one was killed; if none is, remove it",
                self.shadow.display()
            ));
        }
        Ok(Survey {
            place: format!("folder {real}"),
            local: true,
            has_rows: !finished(&self.real)?.is_empty() || self.real.join(".oncegate").exists(),
            makes: vec![format!("folder {}", self.shadow.display())],
        })
    }

    pub(super) fn make(&mut self) -> Result<(), String> {
        fs::create_dir(&self.shadow).map_err(|fault| format!("{}: {fault}", self.shadow.display()))?;
        self.made = true;
        Ok(())
    }

    pub(super) fn read(
        &self,
        each: &mut (dyn FnMut(Row) -> Result<(), String> + Send),
    ) -> Result<(), String> {
        for path in finished(&self.shadow)? {
            let text = fs::read_to_string(&path).map_err(|fault| format!("{}: {fault}", path.display()))?;
            for line in text.lines() {
                each(vec![Some(line.to_owned())])?;
            }
        }
        Ok(())
    }

    pub(super) fn lose_a_row(&self) -> Result<(), String> {
        let Some(path) = finished(&self.shadow)?.into_iter().next() else { return Ok(()) };
        let named = |fault: std::io::Error| format!("{}: {fault}", path.display());
        let text = fs::read_to_string(&path).map_err(named)?;
        fs::write(&path, text.split_once('\n').map_or("", |(_, rest)| rest)).map_err(named)
    }

    pub(super) fn clean(&mut self) -> Cleaned {
        let mut cleaned = Cleaned::default();
        if self.made {
            let shown = self.shadow.display();
            match fs::remove_dir_all(&self.shadow) {
                Ok(()) => cleaned.gone.push(format!("folder {shown}")),
                Err(fault) => cleaned.left.push(format!("folder {shown}: {fault}")),
            }
            self.made = self.shadow.exists();
        }
        cleaned
    }
}

/// The files that readers may take, in the order of their names.
fn finished(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let named = |fault: std::io::Error| format!("{}: {fault}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(named)? {
        let path = entry.map_err(named)?.path();
        if path.extension().is_some_and(|extension| extension == "ndjson") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
