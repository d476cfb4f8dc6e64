//! Where a relay's dead letters go when they do not go beside the rows: [`DeadLetters`], and the file that keeps them.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Serialize;

/// A record that could not be written, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Letter<'a> {
    /// The route.
    pub route: &'a str,
    /// The shard that it came from.
    pub shard: &'a str,
    /// Kafka offset.
    pub position: Option<i64>,
    /// One of `rejected`, `mismatch`, `late`.
    pub kind: &'a str,
    /// What is wrong, where, the bound, what to do.
    pub reason: &'a str,
    /// The fingerprint, 16 bytes; empty when the record could not be named.
    pub key: &'a [u8],
    /// Event time, ms since the epoch, or the arrival if it has none.
    pub event_ms: i64,
    /// The payload as it came; none for a Kafka tombstone.
    pub payload: Option<&'a [u8]>,
}

impl Letter<'_> {
    /// The fingerprint in hex digits.
    pub fn key_hex(&self) -> String {
        hex(self.key)
    }
}

/// In hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("text can be written");
        hex
    })
}

/// Dead letters were not kept, or only perhaps: the position may not pass. The same letters may be written again (a letter is
/// named by its shard and position).
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("dead letters to {target}: {reason}")]
pub struct DeadLetterFault {
    /// The file or topic.
    pub target: String,
    /// What happened, what to do.
    pub reason: String,
}

/// Keeps dead letters durably (P10).
#[async_trait]
pub trait DeadLetters: Send {
    /// Keeps all `letters` in order; they are durable when it answers.
    ///
    /// # Cancel safety
    /// When the call is dropped some of the letters may have been kept.
    async fn write(&mut self, letters: &[Letter<'_>]) -> Result<(), DeadLetterFault>;
}

/// Dead letters as lines of JSON in a file that grows. Clones append to the same file.
#[derive(Clone, Debug)]
pub struct DeadLetterFile {
    path: PathBuf,
    file: Arc<Mutex<File>>,
}

#[derive(Serialize)]
struct Line<'a> {
    route: &'a str,
    shard: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<i64>,
    kind: &'a str,
    reason: &'a str,
    #[serde(skip_serializing_if = "String::is_empty")]
    key: String,
    event_ms: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

impl DeadLetterFile {
    /// Opens or makes the file at `path` and locks it against other processes. A torn last line of a crash is cut off: it was
    /// never acknowledged. Blocks.
    pub fn open(path: &Path) -> Result<Self, DeadLetterFault> {
        let fault = |reason: String| DeadLetterFault { target: path.display().to_string(), reason };
        let io = |doing: &'static str| move |error: std::io::Error| fault(format!("{doing}: {error}"));
        let new = !path.exists();
        let mut file = OpenOptions::new()
            .create(true)
            .read(true)
            .append(true)
            .open(path)
            .map_err(io("cannot be opened"))?;
        file.try_lock().map_err(|error| match error {
            std::fs::TryLockError::WouldBlock => {
                fault("another process writes to it: give each instance a file of its own".to_owned())
            }
            std::fs::TryLockError::Error(error) => fault(format!("cannot be locked: {error}")),
        })?;
        let whole = whole_lines(&mut file).map_err(io("cannot be read"))?;
        let length = file.metadata().map_err(io("cannot be read"))?.len();
        if whole < length {
            tracing::warn!(path = %path.display(), bytes = length - whole, "cut a torn last line off the dead letters");
            file.set_len(whole)
                .and_then(|()| file.sync_all())
                .map_err(io("its torn last line cannot be cut off"))?;
        }
        if new {
            let folder =
                path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(folder)
                .and_then(|folder| folder.sync_all())
                .map_err(io("its folder cannot be synced"))?;
        }
        Ok(Self { path: path.to_owned(), file: Arc::new(Mutex::new(file)) })
    }
}

#[async_trait]
impl DeadLetters for DeadLetterFile {
    async fn write(&mut self, letters: &[Letter<'_>]) -> Result<(), DeadLetterFault> {
        if letters.is_empty() {
            return Ok(());
        }
        let mut lines = vec![];
        for letter in letters {
            serde_json::to_writer(&mut lines, &line(letter)).expect("a line of text and numbers is JSON");
            lines.push(b'\n');
        }
        let (file, target) = (self.file.clone(), self.path.display().to_string());
        let appended = tokio::task::spawn_blocking(move || {
            append(&mut file.lock().unwrap_or_else(PoisonError::into_inner), &lines)
        });
        match appended.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(DeadLetterFault { target, reason: error.to_string() }),
            Err(error) => Err(DeadLetterFault { target, reason: error.to_string() }),
        }
    }
}

/// Appends and syncs; on an error the file is as it was, if that can be done.
fn append(file: &mut File, lines: &[u8]) -> std::io::Result<()> {
    let before = file.metadata()?.len();
    file.write_all(lines).and_then(|()| file.sync_data()).inspect_err(|_| {
        if let Err(error) = file.set_len(before) {
            tracing::error!(%error, "the dead letters may hold a torn line");
        }
    })
}

fn line<'a>(letter: &Letter<'a>) -> Line<'a> {
    let text = letter.payload.map(std::str::from_utf8);
    Line {
        route: letter.route,
        shard: letter.shard,
        position: letter.position,
        kind: letter.kind,
        reason: letter.reason,
        key: letter.key_hex(),
        event_ms: letter.event_ms,
        payload: text.and_then(Result::ok),
        payload_base64: text.and_then(Result::err).and(letter.payload).map(|bytes| STANDARD.encode(bytes)),
    }
}

/// Bytes up to and with the last line feed.
fn whole_lines(file: &mut File) -> std::io::Result<u64> {
    const STEP: u64 = 64 << 10;
    let mut end = file.metadata()?.len();
    let mut buffer = vec![];
    while end > 0 {
        let start = end.saturating_sub(STEP);
        file.seek(SeekFrom::Start(start))?;
        buffer.clear();
        Read::take(&mut *file, end - start).read_to_end(&mut buffer)?;
        if let Some(at) = buffer.iter().rposition(|&byte| byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter<'a>(position: i64, payload: Option<&'a [u8]>) -> Letter<'a> {
        Letter {
            route: "orders",
            shard: "kafka/c/orders/0",
            position: Some(position),
            kind: "rejected",
            reason: "column \"n\" (integer): above 2147483647",
            key: &[0xab; 16],
            event_ms: 1_700_000_000_000,
            payload,
        }
    }

    fn lines(path: &Path) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[tokio::test]
    async fn p10_letters_are_one_line_each_and_lossless() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dead.ndjson");
        let mut file = DeadLetterFile::open(&path).unwrap();
        let payloads: [Option<&[u8]>; 4] =
            [Some(b"{\"a\":\"x\\ny\"}\n"), Some(b"\xff\x00\n"), None, Some(b"")];
        let letters: Vec<_> = payloads.iter().zip(0..).map(|(payload, n)| letter(n, *payload)).collect();
        file.write(&letters).await.unwrap();
        file.clone().write(&[]).await.unwrap();
        let found = lines(&path);
        assert_eq!(found.len(), 4);
        assert_eq!(found[0]["payload"], "{\"a\":\"x\\ny\"}\n");
        assert_eq!(found[1]["payload_base64"], STANDARD.encode(b"\xff\x00\n"));
        assert_eq!(found[1].get("payload"), None);
        assert_eq!((found[2].get("payload"), found[2].get("payload_base64")), (None, None));
        assert_eq!(found[3]["payload"], "");
        assert_eq!(found[3]["position"], 3);
        assert_eq!(found[3]["key"], "ab".repeat(16));
    }

    #[tokio::test]
    async fn p10_a_torn_line_of_a_crash_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dead.ndjson");
        DeadLetterFile::open(&path).unwrap().write(&[letter(1, None)]).await.unwrap();
        let whole = std::fs::read(&path).unwrap();
        let torn: Vec<u8> = whole.iter().copied().chain(vec![b'x'; 200_000]).collect();
        std::fs::write(&path, torn).unwrap();
        DeadLetterFile::open(&path).unwrap().write(&[letter(2, None)]).await.unwrap();
        let positions: Vec<_> = lines(&path).iter().map(|line| line["position"].as_i64().unwrap()).collect();
        assert_eq!(positions, [1, 2]);
    }

    #[test]
    fn a_file_has_one_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("dead.ndjson");
        let first = DeadLetterFile::open(&path).unwrap();
        let second = DeadLetterFile::open(&path).unwrap_err();
        assert!(second.to_string().contains("another process"), "{second}");
        drop(first);
        DeadLetterFile::open(&path).unwrap();
    }
}
