//! A target of the test's making behind the journal: it drops tokens that it knows, loses replies, refuses, forgets.

use std::{
    collections::{BTreeMap, VecDeque},
    path::PathBuf,
    sync::Arc,
    sync::atomic::{AtomicI64, Ordering},
};

use async_trait::async_trait;
use parking_lot::Mutex;
use rusqlite::Connection;
use tempfile::TempDir;

use super::{Cut, Hold, Identity, JournalConfig, JournalSession, Part, Remote, Sent, Tried};
use crate::sink::{
    Acquire, Batch, DeadLetter, MarkBlock, OnRefused, Receipts, Resolution, Row, RowKind, RowOutcome,
    Session, ShardId, ShardState, ShardStep, SinkError, Source,
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reply {
    /// It goes in.
    In,
    /// It does not, and says so.
    Out,
    /// It has rows that are never taken, and says so.
    Refused,
    /// It does not go in, and nobody is told.
    LostBefore,
    /// It goes in, and nobody is told.
    LostAfter,
    /// It goes in, and not as it was sent.
    Short,
}

#[derive(Default)]
struct World {
    /// Tokens it knows, oldest first.
    tokens: VecDeque<String>,
    rows: Vec<String>,
    /// Parts whose rows it has.
    parts: Vec<String>,
    /// The next replies; `In` once they are used up.
    replies: VecDeque<Reply>,
    sent: usize,
    /// It was told that rows are refused: the next cut finds those with a `?`.
    suspects: bool,
    forgets: bool,
    /// It forgets all once it was sent so many.
    forgets_after: Option<usize>,
    /// It can be asked what it holds.
    asked: bool,
    /// So often another one was put in its place.
    exchanged: usize,
    /// Each time something is sent, the book is copied: from where, to where.
    copies: Option<(PathBuf, PathBuf)>,
}

#[derive(Clone, Default)]
struct Target(Arc<Mutex<World>>);

/// Rows are text; their first letter is their partition. `!` is refused by the cut.
#[async_trait]
impl Remote for Target {
    async fn target(&mut self) -> Result<Identity, String> {
        Ok(Identity { name: "t".to_owned(), id: self.0.lock().exchanged.to_string() })
    }

    async fn cut(&mut self, batch: &Batch<'_>) -> Result<Cut, SinkError> {
        let mut cut = Cut::default();
        let mut parts: BTreeMap<u8, Vec<usize>> = BTreeMap::new();
        for (index, row) in batch.rows.iter().enumerate() {
            cut.outcomes.push(match row.bytes.first() {
                Some(b'!') => RowOutcome::Refused { reason: "no".to_owned() },
                Some(_) if self.0.lock().suspects && row.bytes.ends_with(b"?") => {
                    RowOutcome::Refused { reason: "not by the target".to_owned() }
                }
                first => {
                    parts.entry(first.copied().unwrap_or_default()).or_default().push(index);
                    RowOutcome::Written
                }
            });
        }
        cut.parts = parts.into_values().collect();
        Ok(cut)
    }

    fn statement(&self) -> String {
        "INSERT".to_owned()
    }

    fn body(&mut self, batch: &Batch<'_>, rows: &[usize], _token: &str) -> Result<Vec<u8>, String> {
        Ok(rows.iter().flat_map(|&row| [batch.rows[row].bytes, b"\n"].concat()).collect())
    }

    async fn blocks(&mut self) -> Result<Option<String>, String> {
        Ok(Some(self.0.lock().sent.to_string()))
    }

    async fn send(&mut self, statement: &str, part: &Part) -> Sent {
        assert_eq!(statement, "INSERT");
        let mut world = self.0.lock();
        world.sent += 1;
        if let Some((from, to)) = &world.copies {
            for ending in ["", "-wal"] {
                std::fs::copy(from.join(format!("book.db{ending}")), to.join(format!("book.db{ending}")))
                    .unwrap();
            }
        }
        let reply = world.replies.pop_front().unwrap_or(Reply::In);
        let under = part.under.as_ref().unwrap_or(&part.token);
        if matches!(reply, Reply::In | Reply::LostAfter | Reply::Short) && !world.tokens.contains(under) {
            world.tokens.push_back(under.clone());
            world.parts.push(part.token.clone());
            let text = std::str::from_utf8(&part.body).unwrap();
            world.rows.extend(text.lines().map(str::to_owned));
            assert_eq!(text.lines().count(), part.rows);
        }
        match reply {
            Reply::In => Sent::In,
            Reply::Out => Sent::Out { reason: "refused".to_owned(), retry: false },
            Reply::Refused => {
                world.suspects = true;
                Sent::Refused { reason: "rows are refused".to_owned() }
            }
            Reply::Short => Sent::Doubt { reason: "1 of 2 rows are in".to_owned() },
            Reply::LostBefore | Reply::LostAfter => Sent::Unknown { reason: "no reply".to_owned() },
        }
    }

    async fn knows_repeats(&mut self, _tried: Tried) -> Result<Result<(), String>, String> {
        let world = self.0.lock();
        Ok(if world.forgets || world.forgets_after.is_some_and(|sent| world.sent >= sent) {
            Err("half of the window has passed".to_owned())
        } else {
            Ok(())
        })
    }

    async fn holds(&mut self, part: &Part) -> Result<Option<bool>, String> {
        let world = self.0.lock();
        Ok(world.asked.then(|| world.parts.contains(&part.token)))
    }
}

impl Target {
    fn next(&self, replies: &[Reply]) {
        self.0.lock().replies = replies.iter().copied().collect();
    }

    fn rows(&self) -> Vec<String> {
        let mut rows = self.0.lock().rows.clone();
        rows.sort();
        rows
    }

    fn sent(&self) -> usize {
        self.0.lock().sent
    }
}

const SHARD: &str = "kafka/c/t/0";
const OTHER: &str = "kafka/c/t/1";

struct Bed {
    folder: TempDir,
    config: JournalConfig,
    target: Target,
    session: JournalSession,
    states: Vec<ShardState>,
}

fn source(payload: &[u8]) -> Source<'_> {
    Source { step: 0, position: Some(7), key: b"0123456789abcdef", payload: Some(payload), event_ms: 5 }
}

impl Bed {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = JournalConfig::new(folder.path().join("journal"));
        let target = Target::default();
        let session = Self::session_of(&config, &target, "orders");
        let mut bed = Self { folder, config, target, session, states: Vec::new() };
        bed.acquire(&[SHARD]).await.unwrap();
        bed
    }

    fn session_of(config: &JournalConfig, target: &Target, route: &str) -> JournalSession {
        let target = Box::new(target.clone());
        let mut session = JournalSession::new(Arc::new(config.clone()), target, route, "me");
        session.pauses_ms = &[];
        session
    }

    /// As after a restart.
    fn restart(&mut self) {
        self.session = Self::session_of(&self.config, &self.target, "orders");
    }

    async fn acquire(&mut self, shards: &[&str]) -> Result<(), SinkError> {
        let shards: Vec<ShardId> = shards.iter().map(|shard| ShardId::from(*shard)).collect();
        self.states = self.session.acquire(&shards, Acquire::Force).await?;
        Ok(())
    }

    fn steps(&self) -> Vec<ShardStep> {
        let step = |state: &ShardState| ShardStep {
            shard: state.shard.clone(),
            epoch: state.epoch,
            sequence: state.sequence + 1,
            position: Some((state.sequence + 1) * 10),
            watermark_ms: (state.sequence + 1) * 100,
        };
        self.states.iter().map(step).collect()
    }

    async fn deliver(&mut self, rows: &[&str]) -> Result<Receipts, SinkError> {
        self.deliver_so(rows, OnRefused::Report, &[]).await
    }

    async fn deliver_so(
        &mut self,
        rows: &[&str],
        on_refused: OnRefused,
        dead_letters: &[DeadLetter<'_>],
    ) -> Result<Receipts, SinkError> {
        let steps = self.steps();
        let rows: Vec<Row<'_>> = rows
            .iter()
            .map(|row| Row {
                kind: RowKind::Write,
                bytes: row.as_bytes(),
                row_key: &[],
                source: source(row.as_bytes()),
            })
            .collect();
        let seal = |outcomes: &[RowOutcome]| {
            let block = |(step, at): (usize, &ShardStep)| MarkBlock {
                step,
                min_ms: 1,
                max_ms: 2,
                count: outcomes.len(),
                block: format!("{} {}", at.shard, at.sequence).into(),
            };
            steps.iter().enumerate().map(block).collect()
        };
        let batch =
            Batch { steps: &steps, rows: &rows, dead_letters, on_refused, known_new: true, seal: &seal };
        let receipts = self.session.deliver(&batch).await?;
        for state in &mut self.states {
            state.sequence += 1;
        }
        Ok(receipts)
    }

    async fn resolve(&mut self) -> Result<Resolution, SinkError> {
        let steps = self.steps();
        let (resolution, states) = self.session.resolve(&steps).await?;
        self.states = states;
        Ok(resolution)
    }

    fn book(&self) -> Connection {
        let book = Connection::open(self.config.folder.join("book.db")).unwrap();
        book.busy_timeout(std::time::Duration::from_secs(5)).unwrap();
        book
    }

    fn count(&self, sql: &str) -> i64 {
        self.book().query_row(sql, [], |row| row.get(0)).unwrap()
    }

    fn open(&self) -> i64 {
        self.count("SELECT count(*) FROM oncegate_journal")
    }
}

fn unknown<T: std::fmt::Debug>(result: Result<T, SinkError>) -> String {
    match result {
        Err(SinkError::Unknown { reason }) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_batch_goes_through_the_journal_and_leaves_its_marks() {
    let mut bed = Bed::new().await;
    let letter = DeadLetter { source: source(b"late"), kind: "late", reason: "too late".to_owned() };
    let receipts = bed.deliver_so(&["a1", "!", "b1", "a2"], OnRefused::DeadLetter, &[letter]).await.unwrap();
    assert!(matches!(receipts.rows[1], RowOutcome::Refused { .. }));
    assert_eq!(bed.target.rows(), ["a1", "a2", "b1"]);
    assert_eq!((bed.target.sent(), bed.open()), (2, 0));
    for (sql, expected) in [
        ("SELECT sequence FROM oncegate_shards", 1),
        ("SELECT position FROM oncegate_shards", 10),
        ("SELECT count(*) FROM oncegate_marks", 1),
        ("SELECT count(*) FROM oncegate_dead_letters", 2),
        ("SELECT count(*) FROM oncegate_journal_parts", 0),
        ("SELECT count(*) FROM oncegate_journal_steps", 0),
    ] {
        assert_eq!(bed.count(sql), expected, "{sql}");
    }
    let aborted = bed.deliver_so(&["a3", "!"], OnRefused::Abort, &[]).await.unwrap_err();
    assert!(matches!(aborted, SinkError::Refused { row: 1, .. }), "{aborted}");
    bed.deliver(&[]).await.unwrap();
    assert_eq!((bed.target.sent(), bed.count("SELECT sequence FROM oncegate_shards")), (2, 2));
}

#[tokio::test]
async fn p5_a_lost_reply_is_driven_again_with_the_same_token() {
    for reply in [Reply::LostBefore, Reply::LostAfter] {
        let mut bed = Bed::new().await;
        bed.target.next(&[Reply::In, reply]);
        let reason = unknown(bed.deliver(&["a1", "b1", "c1"]).await);
        assert!(reason.contains("part 2 of 3"), "{reason}");
        assert!(!bed.session.connected() && bed.open() == 1);
        let Resolution::Applied(marks) = bed.resolve().await.unwrap() else { panic!("it is in") };
        assert_eq!(&*marks[0].1.block, b"kafka/c/t/0 1");
        assert_eq!(bed.target.rows(), ["a1", "b1", "c1"]);
        // The first part was known to be in.
        assert_eq!(bed.target.sent(), 4);
        assert_eq!(bed.states[0].sequence, 1);
        bed.deliver(&["a2"]).await.unwrap();
    }
}

#[tokio::test]
async fn p15_one_batch_driven_fifty_times_has_one_effect() {
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::LostAfter; 50]);
    unknown(bed.deliver(&["a1"]).await);
    for turn in 0..49 {
        if turn % 7 == 3 {
            bed.restart();
            let failed = bed.acquire(&[SHARD]).await.unwrap_err();
            assert!(matches!(failed, SinkError::NotApplied { retry: true, .. }), "{failed}");
        } else {
            unknown(bed.resolve().await);
        }
    }
    bed.restart();
    bed.acquire(&[SHARD]).await.unwrap();
    assert_eq!((bed.target.sent(), bed.target.rows()), (51, vec!["a1".to_owned()]));
    assert_eq!(
        (bed.states[0].sequence, bed.states[0].position, bed.states[0].watermark_ms),
        (1, Some(10), 100)
    );
}

/// Rows that only the target refuses cost one outcome each, in the call that finds them, or once an earlier attempt was given back.
#[tokio::test]
async fn rule10_a_batch_with_rows_that_the_target_refuses_goes_without_them() {
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::Refused]);
    let receipts = bed.deliver_so(&["a1", "a2?", "a3"], OnRefused::DeadLetter, &[]).await.unwrap();
    assert!(matches!(
        receipts.rows[..],
        [RowOutcome::Written, RowOutcome::Refused { .. }, RowOutcome::Written]
    ));
    assert_eq!((bed.target.rows(), bed.open()), (vec!["a1".to_owned(), "a3".to_owned()], 0));
    assert_eq!(bed.count("SELECT count(*) FROM oncegate_dead_letters"), 1);

    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::LostBefore, Reply::Refused]);
    unknown(bed.deliver(&["a1", "a2?"]).await);
    assert_eq!(bed.resolve().await.unwrap(), Resolution::NotApplied);
    assert_eq!((bed.states[0].sequence, bed.open(), bed.target.rows().len()), (0, 0, 0));
    let receipts = bed.deliver(&["a1", "a2?"]).await.unwrap();
    assert!(matches!(receipts.rows[..], [RowOutcome::Written, RowOutcome::Refused { .. }]));

    // Behind a part that is in nothing can be given back: it stays, and is tried again.
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::In, Reply::Refused, Reply::In]);
    let reason = unknown(bed.deliver(&["a1", "b1?"]).await);
    assert!(reason.contains("part 2 of 2 is refused, and others are in"), "{reason}");
    assert!(matches!(bed.resolve().await.unwrap(), Resolution::Applied(_)));

    // One that never says which rows: so often, and then it is up to the caller.
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::Refused; 3]);
    let given_up = bed.deliver(&["a1"]).await.unwrap_err();
    assert!(matches!(given_up, SinkError::NotApplied { retry: true, .. }), "{given_up}");
    assert_eq!((bed.target.sent(), bed.open()), (3, 0));
}

#[tokio::test]
async fn what_is_surely_not_in_may_be_cut_again() {
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::Out]);
    let failed = bed.deliver(&["a1", "b1"]).await.unwrap_err();
    assert!(matches!(failed, SinkError::NotApplied { retry: false, .. }), "{failed}");
    assert!(bed.session.connected() && bed.open() == 0);
    bed.deliver(&["b1"]).await.unwrap();
    assert_eq!(bed.target.rows(), ["b1"]);
}

/// P15: of a batch that is in with one part and refused with another nothing is guessed.
#[tokio::test]
async fn p15_a_part_that_is_refused_behind_one_that_is_in_stops_the_lane() {
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::In, Reply::Out, Reply::Out, Reply::Out]);
    let reason = unknown(bed.deliver(&["a1", "b1"]).await);
    assert!(reason.contains("part 2 of 2 does not go in, and others are in: refused"), "{reason}");
    unknown(bed.resolve().await);
    bed.restart();
    bed.acquire(&[SHARD]).await.unwrap_err();
    assert_eq!(bed.open(), 1);
    // Once the cause is gone it goes on by itself.
    bed.acquire(&[SHARD]).await.unwrap();
    assert_eq!((bed.target.rows(), bed.states[0].sequence), (vec!["a1".to_owned(), "b1".to_owned()], 1));
}

#[tokio::test]
async fn p15_past_the_window_nothing_is_driven_blindly() {
    for held in [true, false] {
        let mut bed = Bed::new().await;
        bed.target.next(&[if held { Reply::LostAfter } else { Reply::LostBefore }]);
        unknown(bed.deliver(&["a1"]).await);
        bed.target.0.lock().forgets = true;
        if held {
            // It has forgotten the token too: a blind repeat would write twice.
            let reason = unknown(bed.resolve().await);
            assert!(
                reason.contains("half of the window has passed") && reason.contains("verdict"),
                "{reason}"
            );
            bed.restart();
            bed.acquire(&[SHARD]).await.unwrap_err();
            assert_eq!((bed.target.sent(), bed.open()), (1, 1));
        }
        bed.target.0.lock().asked = true;
        bed.restart();
        bed.acquire(&[SHARD]).await.unwrap();
        assert_eq!(bed.target.rows(), ["a1"]);
        assert_eq!((bed.target.sent(), bed.states[0].sequence), (if held { 1 } else { 2 }, 1));
    }
}

/// A server that is killed may keep rows without their token, or a token without its rows: where it can be asked, its rows count.
#[tokio::test]
async fn p15_rows_count_where_a_token_does_not_fit_them() {
    let mut bed = Bed::new().await;
    bed.target.0.lock().asked = true;
    bed.target.next(&[Reply::LostAfter]);
    unknown(bed.deliver(&["a1"]).await);
    bed.target.0.lock().tokens.clear();
    assert!(matches!(bed.resolve().await.unwrap(), Resolution::Applied(_)));
    assert_eq!((bed.target.rows(), bed.target.sent()), (vec!["a1".to_owned()], 1));

    bed.target.next(&[Reply::LostAfter]);
    unknown(bed.deliver(&["a2"]).await);
    {
        let mut world = bed.target.0.lock();
        world.parts.pop();
        world.rows.pop();
    }
    let reason = unknown(bed.resolve().await);
    assert!(reason.contains("has no rows of it"), "{reason}");
    bed.book().execute("UPDATE oncegate_journal SET verdict = 'out'", []).unwrap();
    assert!(matches!(bed.resolve().await.unwrap(), Resolution::NotApplied));
    bed.deliver(&["a2"]).await.unwrap();
    assert_eq!(bed.target.rows(), ["a1", "a2"], "under a token of its own");
}

/// What the target had taken otherwise than it was sent was known in memory only: after a restart it was sent again, or settled.
#[tokio::test]
async fn a_batch_in_doubt_is_neither_sent_nor_settled_after_a_restart_until_someone_has_looked() {
    for (verdict, applied) in [("in", true), ("out", false)] {
        let mut bed = Bed::new().await;
        bed.target.next(&[Reply::Short]);
        let reason = unknown(bed.deliver(&["a1"]).await);
        assert!(reason.contains("1 of 2 rows") && reason.contains("verdict"), "{reason}");
        for _ in 0..2 {
            bed.restart();
            let again = bed.acquire(&["kafka/c/t/0"]).await.unwrap_err().to_string();
            assert!(again.contains("1 of 2 rows") && again.contains("verdict"), "{again}");
        }
        assert_eq!((bed.target.sent(), bed.open()), (1, 1));
        bed.book().execute("UPDATE oncegate_journal SET verdict = ?1", [verdict]).unwrap();
        bed.acquire(&["kafka/c/t/0"]).await.unwrap();
        assert_eq!((bed.states[0].sequence, bed.target.sent()), (i64::from(applied), 1));
    }
}

#[tokio::test]
async fn p15_the_window_is_looked_at_before_each_part() {
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::LostAfter]);
    unknown(bed.deliver(&["a1", "b1", "c1"]).await);
    bed.target.0.lock().forgets_after = Some(2);
    let reason = unknown(bed.resolve().await);
    assert!(reason.contains("part 2 of 3 is not sent again"), "{reason}");
    assert_eq!(bed.target.sent(), 2);
}

#[tokio::test]
async fn p6_another_target_is_refused_and_gets_no_batch_of_the_one_before() {
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::LostAfter]);
    unknown(bed.deliver(&["a1"]).await);
    bed.target.0.lock().exchanged = 1;
    let reason = unknown(bed.resolve().await);
    assert!(reason.contains("made for t (0), and there is t (1) now"), "{reason}");
    for _ in 0..2 {
        bed.restart();
        let refused = bed.acquire(&[SHARD]).await.unwrap_err();
        assert!(
            matches!(&refused, SinkError::NotApplied { retry: false, reason } if reason.contains("of another table")),
            "{refused}"
        );
        bed.session.shards("").await.unwrap_err();
    }
    let way = "DELETE FROM oncegate_journal_targets WHERE route = 'orders'";
    assert_eq!(bed.book().execute(way, []).unwrap(), 1);
    bed.restart();
    let stopped = bed.acquire(&[SHARD]).await.unwrap_err();
    assert!(stopped.to_string().contains("it is not sent"), "{stopped}");
    bed.book().execute("UPDATE oncegate_journal SET verdict = 'in'", []).unwrap();
    bed.restart();
    bed.acquire(&[SHARD]).await.unwrap();
    assert_eq!((bed.target.sent(), bed.states[0].sequence), (1, 1));
}

/// As the sqlite3 shell does it, without `foreign_keys`.
#[tokio::test]
async fn an_entry_that_was_taken_out_by_hand_stops_nothing() {
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::LostBefore]);
    unknown(bed.deliver(&["a1"]).await);
    let book = bed.book();
    book.execute_batch("PRAGMA foreign_keys = OFF; DELETE FROM oncegate_journal").unwrap();
    assert_eq!(bed.count("SELECT count(*) FROM oncegate_journal_steps"), 1);
    bed.restart();
    bed.acquire(&[SHARD]).await.unwrap();
    assert_eq!(bed.count("SELECT count(*) FROM oncegate_journal_parts"), 0);
    bed.deliver(&["a2"]).await.unwrap();
    assert_eq!((bed.target.rows(), bed.states[0].sequence), (vec!["a2".to_owned()], 1));
}

#[tokio::test]
async fn a_verdict_settles_what_nobody_can_know() {
    for (verdict, sequence) in [("in", 1), ("out", 0)] {
        let mut bed = Bed::new().await;
        bed.target.next(&[Reply::LostAfter]);
        unknown(bed.deliver(&["a1"]).await);
        bed.target.0.lock().forgets = true;
        unknown(bed.resolve().await);
        bed.book().execute("UPDATE oncegate_journal SET verdict = ?1", [verdict]).unwrap();
        match bed.resolve().await.unwrap() {
            Resolution::Applied(marks) => assert_eq!((verdict, marks.len()), ("in", 1)),
            Resolution::NotApplied => assert_eq!(verdict, "out"),
        }
        assert_eq!((bed.target.sent(), bed.states[0].sequence, bed.open()), (1, sequence, 0));
    }
}

/// Of a batch over several parts that stopped half way, past the window, neither verdict is right as a whole: it is said of each part that
/// nobody knows of, and counts for one attempt.
#[tokio::test]
async fn p15_a_verdict_of_one_part_counts_once() {
    let mut bed = Bed::new().await;
    bed.target.0.lock().copies = Some((bed.config.folder.clone(), bed.folder.path().to_owned()));
    bed.target.next(&[Reply::In, Reply::In, Reply::LostAfter]);
    unknown(bed.deliver(&["a1", "b1", "c1", "d1"]).await);
    let copy = Connection::open(bed.folder.path().join("book.db")).unwrap();
    let noted =
        copy.query_row("SELECT sum(done) FROM oncegate_journal_parts", [], |row| row.get::<_, i64>(0));
    assert_eq!(noted.unwrap(), 2, "noted before the next is sent");
    {
        let mut world = bed.target.0.lock();
        world.forgets = true;
        world.copies = None;
    }
    let say = |bed: &Bed, part: i64, verdict: &str| {
        let say = "UPDATE oncegate_journal_parts SET verdict = ?2 WHERE part = ?1";
        assert_eq!(bed.book().execute(say, rusqlite::params![part, verdict]).unwrap(), 1);
    };
    let reason = unknown(bed.resolve().await);
    assert!(reason.contains("part 3 of 4 is not sent again"), "{reason}");
    say(&bed, 2, "in");
    let reason = unknown(bed.resolve().await);
    assert!(reason.contains("part 4 of 4 is not sent again"), "{reason}");
    // A crash of the target kept its token without its rows: under that one it would be dropped.
    let token = "SELECT token FROM oncegate_journal_parts WHERE part = 3";
    let token: String = bed.book().query_row(token, [], |row| row.get(0)).unwrap();
    bed.target.0.lock().tokens.push_back(token);
    say(&bed, 3, "out");
    bed.target.next(&[Reply::LostAfter]);
    unknown(bed.resolve().await);
    let reason = unknown(bed.resolve().await);
    assert!(reason.contains("part 4 of 4 is not sent again"), "it was sent since: {reason}");
    bed.restart();
    bed.acquire(&[SHARD]).await.unwrap_err();
    say(&bed, 3, "in");
    bed.acquire(&[SHARD]).await.unwrap();
    assert_eq!(bed.target.rows(), ["a1", "b1", "c1", "d1"]);
    assert_eq!((bed.states[0].sequence, bed.target.sent()), (1, 4));
}

#[tokio::test]
async fn a_corrupt_entry_is_named_and_stays() {
    for damage in [
        "UPDATE oncegate_journal_parts SET body = x'00'",
        "UPDATE oncegate_journal_marks SET block = x'00'",
        "UPDATE oncegate_journal_steps SET watermark_ms = 3",
        "UPDATE oncegate_journal SET statement = 'INSERT elsewhere'",
        "UPDATE oncegate_journal SET target = 't (9)'",
        "DELETE FROM oncegate_journal_parts",
    ] {
        let mut bed = Bed::new().await;
        bed.target.next(&[Reply::LostAfter]);
        unknown(bed.deliver(&["a1"]).await);
        assert_eq!(bed.book().execute(damage, []).unwrap(), 1);
        let reason = unknown(bed.resolve().await);
        assert!(
            reason.contains(
                "journal entry 1 of route orders (shard kafka/c/t/0 sequence 1) does not fit its checksum"
            ),
            "{damage}: {reason}"
        );
        bed.restart();
        let failed = bed.acquire(&[SHARD]).await.unwrap_err();
        assert!(failed.to_string().contains("checksum"), "{failed}");
        assert_eq!((bed.target.sent(), bed.open()), (1, 1), "nothing of it is sent, and it is not lost");
    }
}

/// The bytes of a book as builds before compression have left it, checksum included.
#[tokio::test]
async fn an_entry_of_an_earlier_build_is_read_and_sent_as_it_is() {
    let mut bed = Bed::new().await;
    bed.book()
        .execute_batch(
            "INSERT INTO oncegate_journal (id, route, statement, first_ms, blocks_taken, bytes, checksum, target)
             VALUES (7, 'orders', 'INSERT', 1700000000000, '3', 20, x'c5775a4ed517c59fc5bcf519165d82d2', 't (0)');
             INSERT INTO oncegate_journal_steps (route, shard, entry, step, epoch, sequence, position, watermark_ms)
             VALUES ('orders', 'kafka/c/t/0', 7, 0, 1, 1, 10, 100);
             INSERT INTO oncegate_journal_parts (entry, part, token, done, rows, body)
             VALUES (7, 0, '00-11', 0, 2, x'61310a61320a'), (7, 1, '00-12', 0, 1, x'62310a');
             INSERT INTO oncegate_journal_marks (entry, step, min_ms, max_ms, count, block) VALUES (7, 0, 1, 2, 3, x'6d61726b');
             INSERT INTO oncegate_journal_letters (entry, step, position, key, event_ms, kind, reason, payload)
             VALUES (7, 0, 9, x'30', 5, 'late', 'too late', x'7b7d');",
        )
        .unwrap();
    bed.restart();
    bed.acquire(&[SHARD]).await.unwrap();
    assert_eq!((bed.target.rows(), bed.target.sent()), (["a1", "a2", "b1"].map(str::to_owned).to_vec(), 2));
    let found = (bed.states[0].sequence, bed.count("SELECT count(*) FROM oncegate_marks"));
    assert_eq!((found, bed.count("SELECT count(*) FROM oncegate_dead_letters"), bed.open()), ((1, 1), 1, 0));
}

#[tokio::test]
async fn p4_an_owner_of_before_settles_nothing_and_learns_what_became_of_its_batch() {
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::LostAfter]);
    unknown(bed.deliver(&["a1"]).await);
    let steps = bed.steps();
    let mut rival = Bed::session_of(&bed.config, &bed.target, "orders");
    let states = rival.acquire(&[SHARD.into()], Acquire::Force).await.unwrap();
    assert_eq!((states[0].sequence, bed.open()), (1, 0), "who takes over settles first");
    let fenced = bed.session.resolve(&steps).await.unwrap_err();
    assert!(matches!(fenced, SinkError::Fenced { .. }), "{fenced}");
    let marks = bed.session.marks_since(&SHARD.into(), 0).await.unwrap();
    assert_eq!(marks.len(), 1, "the batch's marks are there to be learnt");
    let fenced = bed.session.resolve(&steps).await.unwrap_err();
    assert!(matches!(fenced, SinkError::Fenced { .. }), "{fenced}");
    assert_eq!(bed.target.rows(), ["a1"]);
}

/// The other order: the new owner has raised the epoch, and it is the old one that settles what is open.
#[tokio::test]
async fn p4_who_lost_a_shard_leaves_its_marks_before_it_gives_keys_back() {
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::LostAfter, Reply::LostBefore]);
    unknown(bed.deliver(&["a1"]).await);
    let steps = bed.steps();
    let mut rival = Bed::session_of(&bed.config, &bed.target, "orders");
    rival.acquire(&[SHARD.into()], Acquire::Force).await.unwrap_err();
    let fenced = bed.session.resolve(&steps).await.unwrap_err();
    assert!(matches!(fenced, SinkError::Fenced { .. }), "{fenced}");
    assert_eq!(bed.session.marks_since(&SHARD.into(), 0).await.unwrap().len(), 1);
    let states = rival.acquire(&[SHARD.into()], Acquire::Force).await.unwrap();
    assert_eq!((states[0].sequence, bed.target.rows()), (1, vec!["a1".to_owned()]));
}

/// P13: one of two shards moves to another owner while their batch is open.
#[tokio::test]
async fn p13_an_open_batch_of_two_shards_is_settled_by_who_takes_one() {
    let mut bed = Bed::new().await;
    bed.acquire(&[SHARD, OTHER]).await.unwrap();
    bed.target.next(&[Reply::LostAfter]);
    unknown(bed.deliver(&["a1"]).await);
    bed.restart();
    bed.acquire(&[OTHER]).await.unwrap();
    assert_eq!(bed.states[0].sequence, 1);
    bed.acquire(&[SHARD]).await.unwrap();
    assert_eq!((bed.states[0].sequence, bed.states[0].position, bed.open()), (1, Some(10), 0));
    assert_eq!(
        (bed.target.rows(), bed.count("SELECT count(*) FROM oncegate_marks")),
        (vec!["a1".to_owned()], 2)
    );
}

#[tokio::test]
async fn two_routes_with_the_same_rows_share_no_token() {
    let mut bed = Bed::new().await;
    bed.deliver(&["a1"]).await.unwrap();
    let mut other = Bed::new().await;
    other.target = bed.target.clone();
    other.restart();
    other.acquire(&[SHARD]).await.unwrap();
    other.deliver(&["a1"]).await.unwrap();
    bed.session = Bed::session_of(&bed.config, &bed.target, "others");
    bed.acquire(&[SHARD]).await.unwrap();
    bed.deliver(&["a1"]).await.unwrap();
    assert_eq!(bed.target.rows(), ["a1", "a1", "a1"], "of another book, and of another route");
}

/// A book that went back gives sequences again: their rows must not be dropped for those that had them before.
#[tokio::test]
async fn p6_a_restored_book_loses_no_new_rows() {
    let mut bed = Bed::new().await;
    let copy = bed.folder.path().join("copy.db");
    bed.book().execute("VACUUM INTO ?1", [copy.to_str().unwrap()]).unwrap();
    bed.deliver(&["a1"]).await.unwrap();
    drop(std::mem::replace(&mut bed.session, Bed::session_of(&bed.config, &bed.target, "orders")));
    for ending in ["", "-wal", "-shm"] {
        drop(std::fs::remove_file(bed.config.folder.join(format!("book.db{ending}"))));
    }
    std::fs::copy(&copy, bed.config.folder.join("book.db")).unwrap();
    bed.acquire(&[SHARD]).await.unwrap();
    assert_eq!(bed.states[0].sequence, 0);
    bed.deliver(&["a9"]).await.unwrap();
    assert_eq!(bed.target.rows(), ["a1", "a9"]);
}

/// No sync waits for a settle: a power cut takes it back, though callers have heard. What was synced before the batch was sent holds all of it.
#[tokio::test]
async fn p15_a_settle_that_went_with_the_power_is_made_again() {
    let mut bed = Bed::new().await;
    bed.deliver(&["a0"]).await.unwrap();
    bed.target.0.lock().copies = Some((bed.config.folder.clone(), bed.folder.path().to_owned()));
    let letter = DeadLetter { source: source(b"late"), kind: "late", reason: "too late".to_owned() };
    bed.deliver_so(&["a1", "b1"], OnRefused::Report, &[letter]).await.unwrap();
    let level =
        |book: &Connection| book.query_row("PRAGMA synchronous", [], |row| row.get::<_, i64>(0)).unwrap();
    let synced = bed.session.job(move |book, _| Ok(level(book))).await.unwrap();
    assert_eq!(synced, 2, "the next batch is synced again");
    let settled = bed.states.clone();
    let all = |bed: &Bed| {
        let of = |sql| bed.count(sql);
        [
            of("SELECT sequence FROM oncegate_shards"),
            of("SELECT position FROM oncegate_shards"),
            of("SELECT watermark_ms FROM oncegate_shards"),
            of("SELECT count(*) FROM oncegate_marks"),
            of("SELECT count(*) FROM oncegate_dead_letters"),
            bed.open(),
        ]
    };
    let before = all(&bed);
    assert_eq!(before, [2, 20, 200, 2, 1, 0]);
    drop(std::mem::replace(&mut bed.session, Bed::session_of(&bed.config, &bed.target, "orders")));
    // The session's thread closes the book in its own time, and writes to it when it does.
    let wal = bed.config.folder.join("book.db-wal");
    for _ in 0..1_000 {
        if !wal.exists() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert!(!wal.exists(), "the book is closed");
    drop(std::fs::remove_file(bed.config.folder.join("book.db-shm")));
    for ending in ["", "-wal"] {
        let name = format!("book.db{ending}");
        std::fs::copy(bed.folder.path().join(&name), bed.config.folder.join(&name)).unwrap();
    }
    assert_eq!((bed.open(), bed.count("SELECT sequence FROM oncegate_shards")), (1, 1), "it is taken back");
    let shards = bed.session.shards("").await.unwrap();
    assert_eq!(shards[0].sequence, settled[0].sequence, "settled before anything is learnt");
    bed.acquire(&[SHARD]).await.unwrap();
    assert_eq!(all(&bed), before);
    assert_eq!(
        (bed.target.rows(), bed.target.sent()),
        (vec!["a0".to_owned(), "a1".to_owned(), "b1".to_owned()], 4)
    );
    bed.deliver(&["a2"]).await.unwrap();
}

#[tokio::test]
async fn the_journal_is_bounded() {
    let mut bed = Bed::new().await;
    let mut other = Bed::session_of(&bed.config, &bed.target, "orders");
    other.acquire(&[OTHER.into()], Acquire::Force).await.unwrap();
    bed.target.next(&[Reply::LostAfter]);
    unknown(bed.deliver(&["a-row-of-some-length"]).await);
    bed.config.max_bytes = bed.count("SELECT bytes FROM oncegate_journal").unsigned_abs() + 20;
    bed.session = Bed::session_of(&bed.config, &bed.target, "orders");
    let open = bed.states.clone();
    bed.acquire(&[OTHER]).await.unwrap();
    let full = bed.deliver(&["a1"]).await.unwrap_err();
    assert!(
        matches!(&full, SinkError::NotApplied { retry: true, reason } if reason.contains("full")),
        "{full}"
    );
    assert!(bed.session.connected(), "the lane goes on");
    let large = "a".repeat(300);
    let full = bed.deliver(&[&large]).await.unwrap_err();
    assert!(matches!(&full, SinkError::NotApplied { retry: false, .. }), "{full}");
    bed.states = open;
    bed.resolve().await.unwrap();
    bed.acquire(&[OTHER]).await.unwrap();
    bed.deliver(&["a1"]).await.unwrap();
}

/// A lane that forgot to ask is told so; it cannot write past an open batch.
#[tokio::test]
async fn nothing_passes_an_open_batch() {
    let mut bed = Bed::new().await;
    bed.target.next(&[Reply::LostAfter]);
    unknown(bed.deliver(&["a1"]).await);
    let failed = bed.deliver(&["a2"]).await.unwrap_err();
    assert!(matches!(failed, SinkError::NotApplied { .. }), "{failed}");
    let mut other = Bed::session_of(&bed.config, &bed.target, "orders");
    other.acquire(&[OTHER.into()], Acquire::Force).await.unwrap();
    std::mem::swap(&mut bed.session, &mut other);
    let failed = bed.deliver(&["a2"]).await.unwrap_err();
    assert!(failed.to_string().contains("open in the journal"), "{failed}");
    assert_eq!(bed.target.rows(), ["a1"]);
}

/// Another process cannot hold the folder: as a lock of another open file shows, which the system treats alike.
#[tokio::test]
async fn one_process_holds_the_folder() {
    let mut bed = Bed::new().await;
    let shared = Hold::take(&bed.config.folder).unwrap();
    let again = Hold::take(&bed.folder.path().join("./journal")).unwrap();
    assert!(Arc::ptr_eq(&shared, &again), "sinks of one process share it");
    drop((shared, again));
    bed.restart();
    let file = std::fs::File::options().write(true).open(bed.config.folder.join("lock")).unwrap();
    file.try_lock().unwrap();
    let held = bed.acquire(&[SHARD]).await.unwrap_err();
    assert!(
        matches!(&held, SinkError::NotApplied { retry: true, reason } if reason.contains("another process")),
        "{held}"
    );
    let held = bed.config.probe().unwrap_err();
    assert!(held.what.contains("held by another process"), "{held}");
    drop(file);
    bed.acquire(&[SHARD]).await.unwrap();
}

/// The process ends before each step in turn, also in a start; replies are lost and parts refused meanwhile. What is in the target in the
/// end is each batch once.
#[tokio::test]
async fn a_crash_before_any_step_loses_and_doubles_nothing() {
    use Reply::{In, LostAfter, LostBefore, Out};
    const BATCHES: i64 = 3;
    let scripts: [&[Reply]; 3] = [
        &[LostAfter, In, LostBefore, In, LostAfter, LostAfter],
        &[Out, In, Out, LostAfter, Out, In, Out],
        &[In, LostBefore, Out, Out, LostAfter, In, Out, LostBefore],
    ];
    let (mut crashes, mut resolved) = (0, 0);
    for script in scripts {
        for gap in 0.. {
            let mut bed = Bed::new().await;
            bed.target.next(script);
            let left = Arc::new(AtomicI64::new(gap));
            bed.session.crash.left = Some(left.clone());
            let (mut model, mut ended) = (Vec::new(), 0);
            let mut alive = true;
            for batch in 0..BATCHES {
                let mut rows: Vec<String> = Vec::new();
                let mut attempt = 0;
                while bed.states[0].sequence == batch {
                    if alive {
                        // What is not in may be cut again.
                        attempt += 1;
                        rows = (0..=batch % 3)
                            .map(|n| format!("{}{batch}.{n} {attempt}", ["a", "b"][n as usize % 2]))
                            .collect();
                        let texts: Vec<&str> = rows.iter().map(String::as_str).collect();
                        match bed.deliver(&texts).await {
                            Ok(_) => break,
                            Err(SinkError::NotApplied { .. }) => continue,
                            Err(SinkError::Unknown { .. }) if left.load(Ordering::SeqCst) >= 0 => {
                                while left.load(Ordering::SeqCst) >= 0 {
                                    match bed.resolve().await {
                                        Ok(Resolution::Applied(_)) => {
                                            resolved += 1;
                                            break;
                                        }
                                        Ok(Resolution::NotApplied) => panic!("gap {gap}: it was journaled"),
                                        Err(SinkError::Unknown { .. }) => {}
                                        Err(other) => panic!("gap {gap}: {other}"),
                                    }
                                }
                            }
                            Err(SinkError::Unknown { .. }) => {}
                            Err(other) => panic!("gap {gap}: {other}"),
                        }
                        alive = left.load(Ordering::SeqCst) >= 0;
                    }
                    if !alive {
                        // A little later than the last time, so that crashes fall on a start first.
                        ended += 1;
                        crashes += 1;
                        left.store(ended, Ordering::SeqCst);
                        bed.restart();
                        bed.session.crash.left = Some(left.clone());
                        while !alive && left.load(Ordering::SeqCst) >= 0 {
                            alive = bed.acquire(&[SHARD]).await.is_ok();
                        }
                        alive &= left.load(Ordering::SeqCst) >= 0;
                    }
                }
                assert_eq!(bed.count("SELECT sequence FROM oncegate_shards"), batch + 1, "gap {gap}");
                model.extend(rows);
            }
            bed.restart();
            bed.acquire(&[SHARD]).await.unwrap();
            model.sort();
            assert_eq!(bed.target.rows(), model, "gap {gap}, {ended} crashes");
            assert_eq!((bed.count("SELECT count(*) FROM oncegate_marks"), bed.open()), (BATCHES, 0));
            if ended == 0 {
                break;
            }
        }
    }
    println!("{crashes} crashes, {resolved} batches resolved");
    assert!(crashes > 80 && resolved > 20);
}

/// A copy may come in another shard than the record of an open batch: what an earlier process left open is settled before anything is
/// learnt or checked, whichever shard comes first.
#[tokio::test]
async fn p6_what_an_earlier_process_left_open_is_settled_before_any_shard_is_read() {
    for reads in [true, false] {
        let mut bed = Bed::new().await;
        bed.target.next(&[Reply::LostAfter, Reply::LostBefore]);
        unknown(bed.deliver(&["a1"]).await);
        bed.restart();
        let early = match reads {
            true => bed.session.shards("").await.map(drop),
            false => bed.acquire(&[OTHER]).await,
        };
        let early = early.unwrap_err();
        assert!(matches!(&early, SinkError::NotApplied { retry: true, .. }), "{early}");
        match reads {
            true => assert_eq!(bed.session.shards("").await.unwrap()[0].sequence, 1),
            false => bed.acquire(&[OTHER]).await.unwrap(),
        }
        assert_eq!((bed.open(), bed.target.rows()), (0, vec!["a1".to_owned()]));
    }
}
