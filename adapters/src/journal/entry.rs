//! What the journal keeps of a batch. All calls with the book's write lock held, but for [`read`].

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Transaction, params};
use xxhash_rust::xxh3::Xxh3;

use super::Identity;
use crate::{
    bookkeeping::marks::{Finish, OwnedDeadLetter, OwnedMark},
    sink::{ShardId, ShardStep},
    sqlite::schema::NOW_MS,
};

/// `verdict` is for people: `in` or `out`, once they have looked into the target, of an entry or of one of its parts. `doubt` is why they must.
const DDL: &str = "
CREATE TABLE IF NOT EXISTS oncegate_journal (
    id INTEGER PRIMARY KEY AUTOINCREMENT, route TEXT NOT NULL, statement TEXT NOT NULL, first_ms INTEGER NOT NULL,
    blocks_taken TEXT, bytes INTEGER NOT NULL, checksum BLOB NOT NULL, verdict TEXT CHECK (verdict IN ('in', 'out')), target TEXT, doubt TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS oncegate_journal_targets (route TEXT PRIMARY KEY, id TEXT NOT NULL, name TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS oncegate_journal_steps (
    route TEXT NOT NULL, shard TEXT NOT NULL, entry INTEGER NOT NULL REFERENCES oncegate_journal (id) ON DELETE CASCADE,
    step INTEGER NOT NULL, epoch INTEGER NOT NULL, sequence INTEGER NOT NULL, position INTEGER, watermark_ms INTEGER NOT NULL,
    PRIMARY KEY (route, shard)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS oncegate_journal_steps_entry ON oncegate_journal_steps (entry);
CREATE TABLE IF NOT EXISTS oncegate_journal_parts (
    id INTEGER PRIMARY KEY, entry INTEGER NOT NULL REFERENCES oncegate_journal (id) ON DELETE CASCADE, part INTEGER NOT NULL,
    token TEXT NOT NULL UNIQUE, done INTEGER NOT NULL, rows INTEGER NOT NULL, body BLOB NOT NULL,
    verdict TEXT CHECK (verdict IN ('in', 'out')), sent_under TEXT, UNIQUE (entry, part)
) STRICT;
CREATE TABLE IF NOT EXISTS oncegate_journal_marks (
    id INTEGER PRIMARY KEY, entry INTEGER NOT NULL REFERENCES oncegate_journal (id) ON DELETE CASCADE,
    step INTEGER NOT NULL, min_ms INTEGER NOT NULL, max_ms INTEGER NOT NULL, count INTEGER NOT NULL, block BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS oncegate_journal_marks_entry ON oncegate_journal_marks (entry);
CREATE TABLE IF NOT EXISTS oncegate_journal_letters (
    id INTEGER PRIMARY KEY, entry INTEGER NOT NULL REFERENCES oncegate_journal (id) ON DELETE CASCADE, step INTEGER NOT NULL,
    position INTEGER, key BLOB NOT NULL, event_ms INTEGER NOT NULL, kind TEXT NOT NULL, reason TEXT NOT NULL, payload BLOB
) STRICT;
CREATE INDEX IF NOT EXISTS oncegate_journal_letters_entry ON oncegate_journal_letters (entry);
CREATE TABLE IF NOT EXISTS oncegate_journal_book (only INTEGER PRIMARY KEY CHECK (only = 1), name BLOB NOT NULL) STRICT;
INSERT INTO oncegate_journal_book SELECT 1, randomblob(8) WHERE NOT EXISTS (SELECT 1 FROM oncegate_journal_book);
";

/// One batch between its first attempt and its settling.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Its number in the book; 0 before it has one.
    pub(super) id: i64,
    pub(super) steps: Vec<ShardStep>,
    pub(super) statement: String,
    /// What it was made for ([`super::Identity`]); none in books of before.
    pub(super) target: Option<String>,
    /// When it was journaled, by the book's clock.
    pub(super) first_ms: i64,
    /// What the target had taken before.
    pub(super) blocks: Option<String>,
    pub(super) parts: Vec<Part>,
    pub(super) finish: Finish,
    /// What someone who has looked says: all of it is in the target (`in`), or nothing of it (`out`).
    pub(super) verdict: Option<String>,
    /// The target has taken it, and not as it was sent: without a verdict it is neither sent again nor settled.
    pub(super) doubt: Option<String>,
}

/// What is taken whole or not at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) token: String,
    pub(crate) rows: usize,
    /// As it is sent.
    pub(crate) body: Bytes,
    /// It is known to be in.
    pub(super) done: bool,
    /// Someone who has looked says that nothing of it is in: it may be sent once, whatever the target has forgotten.
    pub(super) absent: bool,
    /// What it goes under since someone said so: the target may know its own token, and have no rows of it.
    pub(crate) under: Option<String>,
}

impl Entry {
    /// For messages.
    pub(super) fn name(&self, route: &str) -> String {
        let shards: Vec<String> = self
            .steps
            .iter()
            .map(|step| format!("shard {} sequence {}", step.shard, step.sequence))
            .collect();
        format!("journal entry {} of route {route} ({})", self.id, shards.join(", "))
    }

    /// What it takes in the book.
    pub(super) fn bytes(&self) -> u64 {
        let parts: usize = self.parts.iter().map(|part| part.body.len() + part.token.len()).sum();
        let marks: usize = self.finish.marks.iter().map(|mark| mark.block.len()).sum();
        let letters: usize =
            self.finish.dead_letters.iter().map(|letter| letter.payload.as_ref().map_or(0, Vec::len)).sum();
        (parts + marks + letters + self.statement.len()) as u64
    }

    /// Over all that is never to change.
    fn checksum(&self) -> [u8; 16] {
        let mut sum = Sum(Xxh3::new());
        sum.bytes(self.statement.as_bytes());
        if let Some(target) = &self.target {
            sum.bytes(target.as_bytes());
        }
        sum.number(self.first_ms);
        sum.number(i64::from(self.blocks.is_some()));
        sum.bytes(self.blocks.as_deref().unwrap_or_default().as_bytes());
        sum.number(self.steps.len() as i64);
        for step in &self.steps {
            sum.bytes(step.shard.as_bytes());
            sum.number(step.epoch);
            sum.number(step.sequence);
            sum.optional(step.position);
            sum.number(step.watermark_ms);
        }
        sum.number(self.parts.len() as i64);
        for part in &self.parts {
            sum.bytes(part.token.as_bytes());
            sum.number(part.rows as i64);
            sum.bytes(&part.body);
        }
        sum.number(self.finish.marks.len() as i64);
        for mark in &self.finish.marks {
            for number in [mark.step as i64, mark.min_ms, mark.max_ms, mark.count] {
                sum.number(number);
            }
            sum.bytes(&mark.block);
        }
        sum.number(self.finish.dead_letters.len() as i64);
        for letter in &self.finish.dead_letters {
            sum.number(letter.step as i64);
            sum.optional(letter.position);
            sum.bytes(&letter.key);
            sum.number(letter.event_ms);
            sum.bytes(letter.kind.as_bytes());
            sum.bytes(letter.reason.as_bytes());
            sum.number(i64::from(letter.payload.is_some()));
            sum.bytes(letter.payload.as_deref().unwrap_or_default());
        }
        sum.0.digest128().to_be_bytes()
    }
}

struct Sum(Xxh3);

impl Sum {
    fn number(&mut self, number: i64) {
        self.0.update(&number.to_le_bytes());
    }

    fn optional(&mut self, number: Option<i64>) {
        self.number(i64::from(number.is_some()));
        self.number(number.unwrap_or_default());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as i64);
        self.0.update(bytes);
    }
}

/// Names one part for ever: of which book, route and place, and of what content.
pub(super) fn token<'a>(
    book: &[u8],
    route: &str,
    steps: &[ShardStep],
    part: usize,
    rows: impl Iterator<Item = &'a [u8]>,
) -> String {
    let mut sum = Sum(Xxh3::new());
    sum.bytes(book);
    sum.bytes(route.as_bytes());
    for step in steps {
        sum.bytes(step.shard.as_bytes());
        sum.number(step.sequence);
    }
    sum.number(part as i64);
    for row in rows {
        sum.bytes(row);
    }
    let book: String = book.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{book}-{:032x}", sum.0.digest128())
}

/// Makes the tables if they are missing.
pub(super) fn make(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(DDL)?;
    // Books of before.
    for (table, column, rule) in [
        ("oncegate_journal", "target", ""),
        ("oncegate_journal", "blocks_taken", ""),
        ("oncegate_journal", "doubt", ""),
        ("oncegate_journal_parts", "verdict", "CHECK (verdict IN ('in', 'out'))"),
        ("oncegate_journal_parts", "sent_under", ""),
    ] {
        let has = "SELECT count(*) FROM pragma_table_info(?1) WHERE name = ?2";
        if connection.query_row(has, [table, column], |row| row.get::<_, i64>(0))? == 0 {
            connection.execute_batch(&format!("ALTER TABLE {table} ADD COLUMN {column} TEXT {rule}"))?;
        }
    }
    Ok(())
}

/// The target that the route has written into: this one, if it is the first. Its id and name.
pub(super) fn target_of(
    connection: &Connection,
    route: &str,
    target: &Identity,
) -> rusqlite::Result<Identity> {
    connection.execute(
        "INSERT INTO oncegate_journal_targets (route, id, name) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING",
        [route, &target.id, &target.name],
    )?;
    connection.query_row("SELECT id, name FROM oncegate_journal_targets WHERE route = ?1", [route], |row| {
        Ok(Identity { id: row.get(0)?, name: row.get(1)? })
    })
}

/// The book's own number.
pub(super) fn book(connection: &Connection) -> rusqlite::Result<Vec<u8>> {
    connection.query_row("SELECT name FROM oncegate_journal_book", [], |row| row.get(0))
}

/// From now on no token is one that was given before.
pub(super) fn rename(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute("UPDATE oncegate_journal_book SET name = randomblob(8)", []).map(drop)
}

pub(super) fn now(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row(&format!("SELECT {NOW_MS}"), [], |row| row.get(0))
}

/// What all open entries of the book take.
pub(super) fn taken(connection: &Connection) -> rusqlite::Result<u64> {
    let bytes: i64 = connection
        .prepare_cached("SELECT coalesce(sum(bytes), 0) FROM oncegate_journal")?
        .query_row([], |row| row.get(0))?;
    Ok(bytes.max(0).unsigned_abs())
}

/// The open entry of a shard.
pub(super) fn open_entry(connection: &Connection, route: &str, shard: &str) -> rusqlite::Result<Option<i64>> {
    connection
        .prepare_cached("SELECT entry FROM oncegate_journal_steps WHERE route = ?1 AND shard = ?2")?
        .query_row([route, shard], |row| row.get(0))
        .optional()
}

/// Steps whose entry is gone, which a hand that left `foreign_keys` off has taken out: they go too. Answers with their entries.
pub(super) fn remove_orphans(connection: &Connection, route: &str) -> rusqlite::Result<Vec<i64>> {
    let mut gone: Vec<i64> = connection
        .prepare_cached(
            "DELETE FROM oncegate_journal_steps WHERE route = ?1 AND entry NOT IN (SELECT id FROM oncegate_journal) RETURNING entry",
        )?
        .query_map([route], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    gone.sort_unstable();
    gone.dedup();
    for entry in &gone {
        for table in ["parts", "marks", "letters"] {
            connection.execute(&format!("DELETE FROM oncegate_journal_{table} WHERE entry = ?1"), [entry])?;
        }
    }
    Ok(gone)
}

/// All open entries of a route, oldest first.
pub(super) fn of_route(connection: &Connection, route: &str) -> rusqlite::Result<Vec<i64>> {
    connection
        .prepare_cached("SELECT id FROM oncegate_journal WHERE route = ?1 ORDER BY id")?
        .query_map([route], |row| row.get(0))?
        .collect()
}

/// Keeps it; answers with its number.
pub(super) fn insert(transaction: &Transaction<'_>, route: &str, entry: &Entry) -> rusqlite::Result<i64> {
    transaction
        .prepare_cached(
            "INSERT INTO oncegate_journal (route, statement, first_ms, blocks_taken, bytes, checksum, target) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?
        .execute(params![
            route,
            entry.statement,
            entry.first_ms,
            entry.blocks,
            i64::try_from(entry.bytes()).unwrap_or(i64::MAX),
            entry.checksum(),
            entry.target
        ])?;
    let id = transaction.last_insert_rowid();
    let mut step = transaction.prepare_cached(
        "INSERT INTO oncegate_journal_steps (route, shard, entry, step, epoch, sequence, position, watermark_ms)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?;
    for (at, one) in entry.steps.iter().enumerate() {
        let at = at as i64;
        step.execute(params![
            route,
            &*one.shard,
            id,
            at,
            one.epoch,
            one.sequence,
            one.position,
            one.watermark_ms
        ])?;
    }
    let mut part = transaction.prepare_cached(
        "INSERT INTO oncegate_journal_parts (entry, part, token, done, rows, body) VALUES (?1, ?2, ?3, 0, ?4, ?5)",
    )?;
    for (at, one) in entry.parts.iter().enumerate() {
        part.execute(params![id, at as i64, one.token, one.rows as i64, &*one.body])?;
    }
    let mut mark = transaction.prepare_cached(
        "INSERT INTO oncegate_journal_marks (entry, step, min_ms, max_ms, count, block) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?;
    for one in &entry.finish.marks {
        mark.execute(params![id, one.step as i64, one.min_ms, one.max_ms, one.count, &*one.block])?;
    }
    let mut letter = transaction.prepare_cached(
        "INSERT INTO oncegate_journal_letters (entry, step, position, key, event_ms, kind, reason, payload)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?;
    for one in &entry.finish.dead_letters {
        let step = one.step as i64;
        letter.execute(params![
            id,
            step,
            one.position,
            one.key,
            one.event_ms,
            one.kind,
            one.reason,
            one.payload
        ])?;
    }
    Ok(id)
}

/// These parts are known to be in.
pub(super) fn note_done(connection: &Connection, entry: i64, done: &[usize]) -> rusqlite::Result<()> {
    for &part in done {
        connection
            .prepare_cached("UPDATE oncegate_journal_parts SET done = 1 WHERE entry = ?1 AND part = ?2")?
            .execute(params![entry, part as i64])?;
    }
    Ok(())
}

/// What was said of a part counts for one attempt. From now on it goes under the token that this answers with.
pub(super) fn take_verdict(connection: &Connection, entry: i64, part: usize) -> rusqlite::Result<String> {
    connection
        .prepare_cached(
            "UPDATE oncegate_journal_parts SET verdict = NULL, sent_under = token || ' ' || lower(hex(randomblob(8)))
             WHERE entry = ?1 AND part = ?2 RETURNING sent_under",
        )?
        .query_row(params![entry, part as i64], |row| row.get(0))
}

/// Why someone has to look before anything becomes of it.
pub(super) fn note_doubt(connection: &Connection, entry: i64, doubt: &str) -> rusqlite::Result<()> {
    connection
        .prepare_cached("UPDATE oncegate_journal SET doubt = ?2 WHERE id = ?1")?
        .execute(params![entry, doubt])
        .map(drop)
}

/// It goes; false if it had gone before.
pub(super) fn remove(connection: &Connection, entry: i64) -> rusqlite::Result<bool> {
    let gone = connection.prepare_cached("DELETE FROM oncegate_journal WHERE id = ?1")?.execute([entry])?;
    Ok(gone > 0)
}

/// Why there is no entry to go on with.
pub(super) enum Unread {
    Sqlite(rusqlite::Error),
    /// Names what does not fit.
    Corrupt(String),
}

impl From<rusqlite::Error> for Unread {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// The whole entry, if it is still open.
pub(super) fn read(connection: &Connection, route: &str, id: i64) -> Result<Option<Entry>, Unread> {
    let head = connection
        .query_row(
            "SELECT statement, first_ms, blocks_taken, checksum, verdict, target, doubt FROM oncegate_journal WHERE id = ?1 AND route = ?2",
            params![id, route],
            |row| {
                let entry = Entry {
                    id,
                    steps: Vec::new(),
                    statement: row.get(0)?,
                    target: row.get(5)?,
                    first_ms: row.get(1)?,
                    blocks: row.get(2)?,
                    parts: Vec::new(),
                    finish: Finish::default(),
                    verdict: row.get(4)?,
                    doubt: row.get(6)?,
                };
                Ok((entry, row.get::<_, Vec<u8>>(3)?))
            },
        )
        .optional()?;
    let Some((mut entry, checksum)) = head else { return Ok(None) };
    let index = |value: i64| usize::try_from(value).unwrap_or(usize::MAX);
    entry.steps = connection
        .prepare(
            "SELECT shard, epoch, sequence, position, watermark_ms FROM oncegate_journal_steps WHERE entry = ?1 ORDER BY step",
        )?
        .query_map([id], |row| {
            Ok(ShardStep {
                shard: ShardId::from(row.get::<_, String>(0)?),
                epoch: row.get(1)?,
                sequence: row.get(2)?,
                position: row.get(3)?,
                watermark_ms: row.get(4)?,
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    entry.parts = connection
        .prepare(
            "SELECT token, rows, body, done, verdict, sent_under FROM oncegate_journal_parts WHERE entry = ?1 ORDER BY part",
        )?
        .query_map([id], |row| {
            let verdict: Option<String> = row.get(4)?;
            Ok(Part {
                token: row.get(0)?,
                rows: index(row.get(1)?),
                body: row.get::<_, Vec<u8>>(2)?.into(),
                done: row.get::<_, bool>(3)? || verdict.as_deref() == Some("in"),
                absent: verdict.as_deref() == Some("out"),
                under: row.get(5)?,
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    entry.finish.marks = connection
        .prepare("SELECT step, min_ms, max_ms, count, block FROM oncegate_journal_marks WHERE entry = ?1 ORDER BY id")?
        .query_map([id], |row| {
            Ok(OwnedMark {
                step: index(row.get(0)?),
                min_ms: row.get(1)?,
                max_ms: row.get(2)?,
                count: row.get(3)?,
                block: row.get::<_, Vec<u8>>(4)?.into(),
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    entry.finish.dead_letters = connection
        .prepare(
            "SELECT step, position, key, event_ms, kind, reason, payload FROM oncegate_journal_letters WHERE entry = ?1 ORDER BY id",
        )?
        .query_map([id], |row| {
            Ok(OwnedDeadLetter {
                step: index(row.get(0)?),
                position: row.get(1)?,
                key: row.get(2)?,
                event_ms: row.get(3)?,
                kind: row.get::<_, String>(4)?.into(),
                reason: row.get(5)?,
                payload: row.get(6)?,
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    if *checksum != entry.checksum() {
        return Err(Unread::Corrupt(format!(
            "{} does not fit its checksum: the book was damaged or changed from outside",
            entry.name(route)
        )));
    }
    Ok(Some(entry))
}

/// See [`super::fuzz`].
#[cfg(feature = "fuzzing")]
pub(super) fn fuzz(bytes: &[u8]) {
    thread_local! {
        static BOOK: std::cell::RefCell<Connection> = std::cell::RefCell::new({
            let book = Connection::open_in_memory().expect("a book in memory");
            book.execute_batch(DDL).expect("its tables");
            book
        });
    }
    let numbers: Vec<i64> =
        bytes.chunks_exact(8).map(|eight| i64::from_le_bytes(eight.try_into().unwrap_or_default())).collect();
    let number = |at: usize| numbers.get(at).copied().unwrap_or(at as i64);
    let [statement, shard, token, body, block, payload] =
        crate::fuzzing::parts(bytes).map(|part| part.unwrap_or_default());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let entry = Entry {
        id: 0,
        steps: vec![ShardStep {
            shard: text(shard).as_str().into(),
            epoch: number(0),
            sequence: number(1),
            position: (number(2) % 2 == 0).then_some(number(2)),
            watermark_ms: number(3),
        }],
        statement: text(statement),
        target: (number(4) % 2 == 0).then(|| text(token)),
        first_ms: number(4),
        blocks: (number(5) % 2 == 0).then(|| text(block)),
        parts: vec![Part {
            token: text(token),
            rows: body.len(),
            body: Bytes::copy_from_slice(body),
            done: false,
            absent: false,
            under: None,
        }],
        finish: Finish {
            marks: vec![OwnedMark {
                step: 0,
                min_ms: number(6),
                max_ms: number(7),
                count: number(8),
                block: Bytes::copy_from_slice(block),
            }],
            dead_letters: vec![OwnedDeadLetter {
                step: 0,
                position: (number(9) % 2 == 0).then_some(number(9)),
                key: shard.to_vec(),
                event_ms: number(10),
                kind: text(token).into(),
                reason: text(payload),
                payload: (number(11) % 2 == 0).then(|| payload.to_vec()),
            }],
        },
        verdict: None,
        doubt: None,
    };
    BOOK.with_borrow_mut(|book| {
        let transaction = book.transaction().expect("a transaction");
        let id = insert(&transaction, "r", &entry).expect("an entry is kept");
        let found = read(&transaction, "r", id).ok().flatten().expect("what was kept is there");
        assert_eq!(found.checksum(), entry.checksum());
        assert_eq!((&found.parts, &found.statement), (&entry.parts, &entry.statement));
        let damage = "UPDATE oncegate_journal_parts SET body = zeroblob(length(body) + 1)";
        transaction.execute(damage, []).expect("the book can be changed");
        assert!(matches!(read(&transaction, "r", id), Err(Unread::Corrupt(_))), "damage is found out");
    });
}
