//! The sink against real folders. What holds for every sink is in the conformance suite of the `tests` package.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    sync::atomic::{AtomicI64, Ordering},
};

use bytes::Bytes;
use rusqlite::Connection;
use tempfile::TempDir;

use super::*;
use crate::sink::{
    Acquire, Batch, DeadLetter, MarkBlock, OnRefused, Receipts, Resolution, Row, RowKind, RowOutcome,
    ShardId, ShardStep, SinkError, Source,
};

const SHARD: &str = "http/0";

/// A folder, its sink, and one session that owns [`SHARD`].
struct Bed {
    folder: TempDir,
    config: FilesConfig,
    session: Box<dyn Session>,
    epoch: i64,
    sequence: i64,
}

impl Bed {
    async fn new(change: impl FnOnce(&mut FilesConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = FilesConfig::new(folder.path());
        config.busy_timeout = Duration::from_millis(200);
        change(&mut config);
        let sink = FilesSink::new(config.clone());
        sink.probe().await.unwrap();
        let mut bed = Self { folder, config, session: sink.session("orders", "me"), epoch: 0, sequence: 0 };
        bed.acquire().await.unwrap();
        bed
    }

    async fn acquire(&mut self) -> Result<(), SinkError> {
        let states = self.session.acquire(&[ShardId::from(SHARD)], Acquire::Force).await?;
        (self.epoch, self.sequence) = (states[0].epoch, states[0].sequence);
        Ok(())
    }

    /// As after a restart.
    async fn again(&mut self) -> Result<(), SinkError> {
        self.session = FilesSink::new(self.config.clone()).session("orders", "me");
        self.acquire().await
    }

    fn step(&self) -> ShardStep {
        ShardStep {
            shard: SHARD.into(),
            epoch: self.epoch,
            sequence: self.sequence + 1,
            position: None,
            watermark_ms: 0,
        }
    }

    async fn deliver(&mut self, payloads: &[&str]) -> Result<Receipts, SinkError> {
        self.deliver_so(payloads, OnRefused::Report, &[]).await
    }

    async fn deliver_so(
        &mut self,
        payloads: &[&str],
        on_refused: OnRefused,
        dead_letters: &[DeadLetter<'_>],
    ) -> Result<Receipts, SinkError> {
        let rows: Vec<Row<'_>> = payloads
            .iter()
            .map(|payload| Row { kind: RowKind::Write, bytes: b"", row_key: b"", source: source(payload) })
            .collect();
        let seal = |outcomes: &[RowOutcome]| {
            let block = Bytes::from(format!("{} outcomes", outcomes.len()));
            vec![MarkBlock { step: 0, min_ms: 0, max_ms: 0, count: outcomes.len(), block }]
        };
        let steps = [self.step()];
        let batch =
            Batch { steps: &steps, rows: &rows, dead_letters, on_refused, known_new: false, seal: &seal };
        let receipts = self.session.deliver(&batch).await?;
        self.sequence += 1;
        Ok(receipts)
    }

    /// Name and text of the files that readers see.
    fn files(&self) -> Vec<(String, String)> {
        let mut files: Vec<(String, String)> = fs::read_dir(self.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_file())
            .map(|path| {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                (name, fs::read_to_string(&path).unwrap())
            })
            .collect();
        files.sort();
        files
    }

    fn texts(&self) -> Vec<String> {
        self.files().into_iter().map(|(_, text)| text).collect()
    }

    fn part(&self, number: u32) -> PathBuf {
        self.folder.path().join(format!(".oncegate/orders-{number:012}.ndjson.part"))
    }

    fn book(&self) -> Connection {
        Connection::open(self.config.book().path).unwrap()
    }
}

fn source(payload: &str) -> Source<'_> {
    Source {
        step: 0,
        position: Some(7),
        key: b"0123456789abcdef",
        payload: Some(payload.as_bytes()),
        event_ms: 1,
    }
}

#[tokio::test]
async fn readers_see_finished_files_only() {
    let mut bed = Bed::new(|config| config.roll_rows = 3).await;
    bed.deliver(&["{\"n\":1}", "{\"n\":2}"]).await.unwrap();
    assert_eq!(bed.files(), []);
    bed.deliver(&["{\"n\":3}", "{\"n\":4}"]).await.unwrap();
    let first =
        ("orders-000000000001.ndjson".to_owned(), "{\"n\":1}\n{\"n\":2}\n{\"n\":3}\n{\"n\":4}\n".to_owned());
    assert_eq!(bed.files(), std::slice::from_ref(&first));
    bed.deliver(&["{\"n\":5}"]).await.unwrap();
    assert_eq!(bed.files(), [first], "a finished file does not change any more");
    assert_eq!(fs::read_to_string(bed.part(2)).unwrap(), "{\"n\":5}\n");
}

#[tokio::test]
async fn files_are_finished_by_size_and_by_age() {
    let mut bed = Bed::new(|config| config.roll_bytes = 10).await;
    bed.deliver(&["1"]).await.unwrap();
    assert_eq!(bed.files().len(), 0);
    bed.deliver(&["\"12345678\""]).await.unwrap();
    assert_eq!(bed.texts(), ["1\n\"12345678\"\n"]);

    bed.config.roll_after = Duration::from_millis(50);
    bed.again().await.unwrap();
    bed.deliver(&["2"]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(80)).await;
    let owned = [(ShardId::from(SHARD), bed.epoch)];
    bed.session.heartbeat(&owned).await.unwrap();
    assert_eq!(bed.texts(), ["1\n\"12345678\"\n", "2\n"], "nothing more has to come");
    bed.deliver(&["3"]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(80)).await;
    bed.again().await.unwrap();
    assert_eq!(bed.texts().len(), 3, "a start finishes it too");
}

#[tokio::test]
async fn what_a_crash_left_is_cut_off_and_removed() {
    let mut bed = Bed::new(|config| config.roll_rows = 3).await;
    bed.deliver(&["1"]).await.unwrap();
    // A batch was appended whole, another in part, and neither was committed.
    fs::write(bed.part(1), b"1\n\"lost\"\n\"torn").unwrap();
    fs::write(bed.part(9), b"\"of a file that was never listed\"\n").unwrap();
    bed.again().await.unwrap();
    assert!(!bed.part(9).exists());
    bed.deliver(&["2", "3"]).await.unwrap();
    assert_eq!(bed.texts(), ["1\n2\n3\n"]);
    // The same for a file that is finished by its age, without another batch.
    bed.deliver(&["4"]).await.unwrap();
    fs::write(bed.part(2), b"4\n\"torn").unwrap();
    bed.config.roll_after = Duration::ZERO;
    bed.again().await.unwrap();
    assert_eq!(bed.texts(), ["1\n2\n3\n", "4\n"]);
}

#[tokio::test]
async fn a_rename_that_a_crash_cut_off_is_done_by_the_next_start() {
    let mut bed = Bed::new(|config| config.roll_rows = 2).await;
    bed.deliver(&["1", "2"]).await.unwrap();
    let (name, _) = bed.files().remove(0);
    // As it is between the commit and the rename.
    let finished = |bed: &Bed| {
        let set = "UPDATE oncegate_files SET state = 'finished'";
        assert_eq!(bed.book().execute(set, []).unwrap(), 1);
    };
    finished(&bed);
    fs::rename(bed.folder.path().join(&name), bed.part(1)).unwrap();
    bed.again().await.unwrap();
    assert_eq!(bed.texts(), ["1\n2\n"]);
    // As it is between the rename and the note that it was done.
    finished(&bed);
    bed.again().await.unwrap();
    assert_eq!(bed.texts(), ["1\n2\n"]);
    let state: String =
        bed.book().query_row("SELECT state FROM oncegate_files", [], |row| row.get(0)).unwrap();
    assert_eq!(state, "published");
}

#[tokio::test]
async fn nothing_is_written_over() {
    let mut bed = Bed::new(|config| config.roll_rows = 2).await;
    let name = bed.folder.path().join("orders-000000000001.ndjson");
    fs::write(&name, "another's\n").unwrap();
    bed.deliver(&["1", "2"]).await.expect("it is committed");
    assert_eq!(fs::read_to_string(&name).unwrap(), "another's\n");
    let refused = bed.again().await.unwrap_err();
    assert!(
        matches!(&refused, SinkError::NotApplied { reason, .. } if reason.contains("not from here")),
        "{refused}"
    );
    fs::remove_file(&name).unwrap();
    bed.again().await.unwrap();
    assert_eq!(fs::read_to_string(&name).unwrap(), "1\n2\n");
}

#[tokio::test]
async fn p10_refused_rows_and_dead_letters_come_with_their_batch() {
    let mut bed = Bed::new(|_| {}).await;
    let letter = DeadLetter { source: source("late one"), kind: "late", reason: "too late".to_owned() };
    let letters = [letter];
    let aborted = bed.deliver_so(&["1", "{"], OnRefused::Abort, &letters).await.unwrap_err();
    assert!(matches!(aborted, SinkError::Refused { row: 1, .. }), "{aborted}");
    assert!(!bed.part(1).exists(), "nothing is begun for it");
    let receipts = bed.deliver_so(&["1", "{", "2"], OnRefused::DeadLetter, &letters).await.unwrap();
    assert!(matches!(
        &receipts.rows[..],
        [RowOutcome::Written, RowOutcome::Refused { .. }, RowOutcome::Written]
    ));
    assert_eq!(fs::read_to_string(bed.part(1)).unwrap(), "1\n2\n");
    let kept: Vec<(String, Vec<u8>)> = bed
        .book()
        .prepare("SELECT kind, payload FROM oncegate_dead_letters ORDER BY id")
        .unwrap()
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    assert_eq!(kept, [("late".to_owned(), b"late one".to_vec()), ("rejected".to_owned(), b"{".to_vec())]);
}

/// P5: what failed before the commit is not applied, and the same batch goes in once the cause is gone.
#[tokio::test]
async fn p5_a_folder_that_refuses_keeps_the_whole_batch_out() {
    let mut bed = Bed::new(|config| config.roll_rows = 100).await;
    bed.deliver(&["1"]).await.unwrap();
    let aside = bed.folder.path().join("aside");
    fs::rename(bed.part(1), &aside).unwrap();
    let failed = bed.deliver(&["2"]).await.unwrap_err();
    assert!(matches!(failed, SinkError::NotApplied { retry: true, .. }), "{failed}");
    // Shorter than what is committed: it must not be filled up again.
    fs::write(bed.part(1), b"1").unwrap();
    let failed = bed.deliver(&["2"]).await.unwrap_err();
    assert!(
        matches!(&failed, SinkError::NotApplied { retry: false, reason } if reason.contains("2 are committed")),
        "{failed}"
    );
    fs::rename(&aside, bed.part(1)).unwrap();
    bed.deliver(&["2"]).await.unwrap();
    assert_eq!(fs::read_to_string(bed.part(1)).unwrap(), "1\n2\n");
    let steps = [ShardStep { sequence: bed.sequence, ..bed.step() }];
    let (resolution, _) = bed.session.resolve(&steps).await.unwrap();
    assert!(matches!(resolution, Resolution::Applied(marks) if marks[0].1.sequence == 2));
}

/// P4: who was taken over while it slept appends nothing and finishes nothing.
#[tokio::test]
async fn p4_an_owner_of_before_touches_no_file() {
    let mut bed = Bed::new(|config| config.roll_rows = 2).await;
    bed.deliver(&["1"]).await.unwrap();
    let mut sleeper =
        std::mem::replace(&mut bed.session, FilesSink::new(bed.config.clone()).session("orders", "another"));
    let epoch = bed.epoch;
    bed.acquire().await.unwrap();
    std::mem::swap(&mut bed.session, &mut sleeper);
    let new_epoch = std::mem::replace(&mut bed.epoch, epoch);
    let fenced = bed.deliver(&["\"zombie\""]).await.unwrap_err();
    assert!(matches!(fenced, SinkError::Fenced { .. }), "{fenced}");
    assert_eq!(fs::read_to_string(bed.part(1)).unwrap(), "1\n");
    std::mem::swap(&mut bed.session, &mut sleeper);
    bed.epoch = new_epoch;
    bed.deliver(&["2"]).await.unwrap();
    assert_eq!(bed.texts(), ["1\n2\n"]);
}

#[tokio::test]
async fn two_routes_share_a_folder_and_no_file() {
    let mut bed = Bed::new(|config| config.roll_rows = 1).await;
    bed.deliver(&["1"]).await.unwrap();
    let orders =
        std::mem::replace(&mut bed.session, FilesSink::new(bed.config.clone()).session("a/b ü", "me"));
    bed.acquire().await.unwrap();
    bed.deliver(&["2"]).await.unwrap();
    drop(orders);
    let names: Vec<String> = bed.files().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["a_b__-000000000002.ndjson", "orders-000000000001.ndjson"]);
}

impl Bed {
    /// As after a restart; files can be changed so many times.
    fn session_until_crash(&mut self, left: &Arc<AtomicI64>) {
        let target = parts::Folder {
            config: Arc::new(self.config.clone()),
            crash: parts::Crash { left: Some(left.clone()) },
        };
        let book = Arc::new(self.config.book());
        self.session = Box::new(SqliteSession::new(book, Arc::new(target), "orders", "me"));
    }
}

/// The process ends before each change of a file in turn, also of those that a start makes; the next one goes on with what its
/// predecessor left. Batches of one to three rows into files of four.
#[tokio::test]
async fn a_crash_before_any_change_of_a_file_loses_and_doubles_nothing() {
    const BATCHES: i64 = 6;
    let (mut behind_commit, mut before_commit, mut in_start) = (0, 0, 0);
    for gap in 0.. {
        let mut bed = Bed::new(|config| config.roll_rows = 4).await;
        let left = Arc::new(AtomicI64::new(gap));
        bed.session_until_crash(&left);
        let mut alive = bed.acquire().await.is_ok();
        let (mut model, mut crashes) = (Vec::new(), 0);
        for batch in 0..BATCHES {
            let (mut lines, mut attempt) = (Vec::new(), 0);
            loop {
                if alive && bed.sequence == batch {
                    // A batch that is not in may be cut anew: the next attempt is shorter, and must not leave the rest of this one.
                    let rows = if attempt == 0 { 0..=batch % 3 } else { 0..=0 };
                    let long = if attempt == 0 { ", at first" } else { "" };
                    lines = rows.map(|n| format!("\"row {batch}.{n}{long}\"")).collect::<Vec<_>>();
                    attempt += 1;
                    let payloads: Vec<&str> = lines.iter().map(String::as_str).collect();
                    let applied = bed.deliver(&payloads).await.is_ok();
                    // Behind the commit nobody is told.
                    alive = left.load(Ordering::SeqCst) >= 0;
                    behind_commit += usize::from(applied && !alive);
                    before_commit += usize::from(!applied);
                    assert!(applied || !alive, "gap {gap}, batch {batch}: failed without a crash");
                }
                if alive {
                    assert_eq!(bed.sequence, batch + 1, "gap {gap}, batch {batch}");
                    break;
                }
                for text in bed.texts() {
                    assert!(text.ends_with('\n') && text.lines().count() >= 4, "gap {gap}: {text:?}");
                }
                // A little later than the last time, so that crashes fall on a start first.
                crashes += 1;
                left.store(crashes, Ordering::SeqCst);
                bed.session_until_crash(&left);
                alive = bed.acquire().await.is_ok();
                in_start += usize::from(!alive);
            }
            model.extend(lines);
        }
        // The last start is not cut off.
        bed.again().await.unwrap();
        let open = "SELECT name, bytes FROM oncegate_files WHERE state = 'open'";
        let open: Option<(String, usize)> =
            bed.book().query_row(open, [], |row| Ok((row.get(0)?, row.get(1)?))).ok();
        let mut all = bed.texts().concat();
        if let Some((name, bytes)) = &open {
            let part = fs::read(bed.config.private().join(book::part_of(name))).unwrap();
            all.push_str(std::str::from_utf8(&part[..*bytes]).unwrap());
        }
        assert_eq!(all.lines().collect::<Vec<_>>(), model, "gap {gap}, {crashes} crashes");
        let parts = fs::read_dir(bed.config.private()).unwrap();
        let parts =
            parts.filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|e| e == "part"));
        assert_eq!(parts.count(), usize::from(open.is_some()), "gap {gap}: nothing else is left");
        if crashes == 0 {
            assert!(gap > 25, "only {gap} changes in all");
            break;
        }
    }
    println!("crashes: {before_commit} before a commit, {behind_commit} behind one, {in_start} in a start");
    assert!(before_commit > 50 && behind_commit > 10 && in_start > 5);
}

async fn misfits(config: &FilesConfig) -> String {
    let misfits = FilesSink::new(config.clone()).probe().await.unwrap_err();
    misfits.iter().map(|misfit| format!("{misfit}\n")).collect()
}

#[tokio::test]
async fn the_probe_names_what_does_not_fit() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = FilesConfig::new(folder.path().join("none"));
    config.mode = Mode::Upsert;
    let both = misfits(&config).await;
    assert!(both.contains("only appended to") && both.contains("does not exist"), "{both}");
    config.mode = Mode::Insert;
    fs::write(&config.folder, "").unwrap();
    assert!(misfits(&config).await.contains("is not a folder"));

    let config = FilesConfig::new(folder.path());
    for n in 0..7 {
        fs::write(folder.path().join(format!("foreign-{n}.ndjson")), "").unwrap();
    }
    let foreign = misfits(&config).await;
    assert!(
        foreign.contains("foreign-4.ndjson and 2 more") && foreign.contains("another folder"),
        "{foreign}"
    );
    for n in 0..7 {
        fs::remove_file(folder.path().join(format!("foreign-{n}.ndjson"))).unwrap();
    }
    fs::write(folder.path().join("notes.txt"), "").unwrap();
    FilesSink::new(config.clone()).probe().await.expect("other names are no matter");
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "the check leaves nothing: {left:?}");

    fs::write(config.book().path, "no database at all, but long enough to be looked at as one").unwrap();
    assert!(misfits(&config).await.contains("the bookkeeping"));
    // Root may write anywhere.
    fs::remove_dir_all(config.private()).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o500)).unwrap();
    if fs::write(folder.path().join("x"), "").is_err() {
        assert!(misfits(&config).await.contains("cannot be written to"));
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
}

/// P6: a folder whose bookkeeping was lost is not begun anew over the files that are there.
#[tokio::test]
async fn p6_files_without_their_bookkeeping_are_refused_and_taken_ones_are_not() {
    let mut bed = Bed::new(|config| config.roll_rows = 1).await;
    bed.deliver(&["1"]).await.unwrap();
    bed.deliver(&["2"]).await.unwrap();
    let sink = FilesSink::new(bed.config.clone());
    fs::remove_file(bed.folder.path().join("orders-000000000001.ndjson")).unwrap();
    sink.probe().await.expect("readers may take files away");
    bed.again().await.unwrap();
    bed.deliver(&["3"]).await.unwrap();
    assert_eq!(bed.texts(), ["2\n", "3\n"], "and no name comes again");
    fs::remove_dir_all(bed.config.private()).unwrap();
    let failed = bed.deliver(&["4"]).await.unwrap_err();
    assert!(matches!(failed, SinkError::NotApplied { .. }), "{failed}");
    assert!(misfits(&bed.config).await.contains("bookkeeping does not know"));
}
