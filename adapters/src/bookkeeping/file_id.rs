//! Which file a path leads to.

use std::path::Path;

/// Device and inode of the file (nothing where the system has none).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct FileId(Option<(u64, u64)>);

impl FileId {
    /// Of the file that now has this path.
    pub(crate) fn of(path: &Path) -> std::io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            Ok(Self(Some((meta.dev(), meta.ino()))))
        }
        #[cfg(not(unix))]
        {
            drop(meta);
            Ok(Self(None))
        }
    }
}
