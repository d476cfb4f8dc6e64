//! One lane: journal, drive, settle. What has nothing to do with a batch goes to the book as it is.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use async_trait::async_trait;
use rusqlite::Connection;
use tracing::{error, info, warn};

use super::{
    Hold, Identity, JournalConfig, Remote, Sent, Tried,
    book::{journal, name_of, remove, settle, settle_own, stand, stand_now, stands, unsynced},
    entry::{self, Entry, Part, Unread},
};
use crate::{
    bookkeeping::{
        marks::{Finish, write_finish},
        shards::fence,
    },
    sink::{
        Acquire, Batch, Life, Mark, OnRefused, Receipts, Resolution, RouteRow, RowOutcome, Session, ShardId,
        ShardState, ShardStep, SinkError,
    },
    sqlite::{
        SqliteConfig,
        deliver::{begin, commit},
        packed::Packed,
        rows::Stop,
        schema,
        session::SqliteSession,
        target::{Rows, Target},
        worker::{Db, Fault},
    },
};

/// How long a start waits before it drives an open batch again; then it is up to the caller.
const PAUSES_MS: [u64; 6] = [50, 200, 500, 1000, 2000, 2000];
/// How often a batch is cut again in one call, for rows that the target refuses.
const RECUTS: usize = 3;

/// One lane's book and its connection to the target.
pub(crate) struct JournalSession {
    config: Arc<JournalConfig>,
    file: Arc<SqliteConfig>,
    hold: Option<Arc<Hold>>,
    /// What earlier sessions left open has been settled.
    settled: Option<Arc<()>>,
    /// What the route writes into, once it was looked at.
    target: Option<Identity>,
    book: SqliteSession,
    remote: Box<dyn Remote>,
    route: Arc<str>,
    /// No batch was left half way.
    whole: bool,
    pub(super) pauses_ms: &'static [u64],
    pub(super) crash: Crash,
}

/// Asked before each step of a batch: tests let the process end there.
#[derive(Clone, Default)]
pub(super) struct Crash {
    /// So many steps are left.
    #[cfg(test)]
    pub(super) left: Option<Arc<std::sync::atomic::AtomicI64>>,
}

impl Crash {
    #[cfg_attr(not(test), expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "tests have more"))]
    fn point(&self) -> Result<(), SinkError> {
        #[cfg(test)]
        if let Some(left) = &self.left
            && left.fetch_sub(1, std::sync::atomic::Ordering::SeqCst) <= 0
        {
            return Err(SinkError::Unknown { reason: "a crash of the test's making".to_owned() });
        }
        Ok(())
    }
}

/// The book has no rows of its own.
struct NoRows;

impl Target for NoRows {
    fn open(&self, connection: &mut Connection, _route: &str) -> Result<Box<dyn Rows>, Fault> {
        entry::make(connection).map_err(|error| schema::fault("making the journal's tables", &error))?;
        Ok(Box::new(Self))
    }
}

impl Rows for NoRows {
    fn write(
        &mut self,
        _transaction: &Connection,
        _packed: &Packed,
        _refused: &std::collections::HashMap<usize, String>,
    ) -> Result<Vec<RowOutcome>, Stop> {
        Ok(Vec::new())
    }
}

/// What became of driving an entry.
enum Driven {
    /// All parts are in.
    In,
    /// Surely no part is, and none can come.
    Out { reason: String, retry: bool },
    /// The same, as often as it is sent.
    Refused { reason: String },
    /// Neither is sure.
    Unknown { reason: String },
}

impl JournalSession {
    pub(crate) fn new(config: Arc<JournalConfig>, remote: Box<dyn Remote>, route: &str, owner: &str) -> Self {
        let file = Arc::new(config.book());
        Self {
            book: SqliteSession::new(file.clone(), Arc::new(NoRows), route, owner),
            file,
            config,
            hold: None,
            settled: None,
            target: None,
            remote,
            route: route.into(),
            whole: false,
            pauses_ms: &PAUSES_MS,
            crash: Crash::default(),
        }
    }

    /// Before anything is done with the book.
    fn hold(&mut self) -> Result<Arc<Hold>, SinkError> {
        if let Some(hold) = &self.hold {
            return Ok(hold.clone());
        }
        let hold = Hold::take(&self.config.folder)
            .map_err(|misfit| SinkError::NotApplied { reason: misfit.to_string(), retry: true })?;
        self.hold = Some(hold.clone());
        Ok(hold)
    }

    /// What is open of the route while no session of it lives was left by an earlier process (or gate). It is settled before this one learns
    /// or checks anything: a copy may come in another shard than the record that is in an open batch.
    async fn settle_left(&mut self) -> Result<(), SinkError> {
        let hold = self.hold()?;
        self.look_at_target().await?;
        if self.settled.is_some() {
            return Ok(());
        }
        let mut settled = hold.settled.lock().await;
        self.settled = settled.get(&*self.route).and_then(Weak::upgrade);
        if self.settled.is_none() {
            self.settle_patiently(None).await?;
            let done = Arc::new(());
            settled.insert(self.route.to_string(), Arc::downgrade(&done));
            self.settled = Some(done);
        }
        Ok(())
    }

    /// The marks in the book say what is in one target: under another they would keep records out that it has not.
    async fn look_at_target(&mut self) -> Result<(), SinkError> {
        if self.target.is_some() {
            return Ok(());
        }
        let found =
            self.remote.target().await.map_err(|reason| SinkError::NotApplied { reason, retry: true })?;
        let asked = found.clone();
        let known = self
            .job_connected(move |connection, route| {
                entry::target_of(connection, route, &asked)
                    .map_err(|error| schema::fault("reading the route's target", &error))
            })
            .await?;
        if known.id != found.id {
            let (route, book) = (&self.route, self.file.path.display());
            let reason = format!(
                "the journal is of another table: route {route} has written into {known}, and the sink names {found}; records that the other \
                 one has would be left out as copies. Name the other one again; or, for a table without its rows, use a new journal folder; \
                 or, if this one has all of its rows, stop the gateway and DELETE FROM oncegate_journal_targets WHERE route = '{route}' in \
                 {book}"
            );
            return Err(SinkError::NotApplied { reason, retry: false });
        }
        self.target = Some(found);
        Ok(())
    }

    /// As [`Self::settle_open`], several times if need be.
    async fn settle_patiently(&mut self, shards: Option<Vec<ShardId>>) -> Result<bool, SinkError> {
        let mut pauses = self.pauses_ms.iter();
        loop {
            match (self.settle_open(shards.clone()).await, pauses.next()) {
                (Ok(any), _) => return Ok(any),
                (Err(_), Some(&pause)) => tokio::time::sleep(Duration::from_millis(pause)).await,
                (Err(SinkError::Unknown { reason }), None) => {
                    let reason = format!("an earlier batch must be settled first: {reason}");
                    return Err(SinkError::NotApplied { reason, retry: true });
                }
                (Err(error), None) => return Err(error),
            }
        }
    }

    /// Runs `job` on the book's connection, which must be there.
    pub(super) async fn job<T: Send + 'static>(
        &mut self,
        job: impl FnOnce(&mut Connection, &str) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, SinkError> {
        let (file, route) = (self.file.clone(), self.route.clone());
        self.book.run(move |db| job(&mut db.ready(&file)?.connection, &route)).await
    }

    /// The same; a connection is made if there is none.
    async fn job_connected<T: Send + 'static>(
        &mut self,
        job: impl FnOnce(&mut Connection, &str) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, SinkError> {
        let (file, route) = (self.file.clone(), self.route.clone());
        self.book
            .run(move |db: &mut Db| job(&mut db.connect(&file, &NoRows, &route)?.connection, &route))
            .await
    }

    /// A batch with rows that the target refuses goes without them, once it is known which those are.
    async fn deliver_whole(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        let mut refused = String::new();
        for _ in 0..RECUTS {
            match self.deliver_cut(batch).await? {
                Ok(receipts) => return Ok(receipts),
                Err(reason) => refused = reason,
            }
        }
        Err(SinkError::NotApplied { reason: refused, retry: true })
    }

    /// The error in the answer: nothing went in, for rows that the target refuses.
    async fn deliver_cut(&mut self, batch: &Batch<'_>) -> Result<Result<Receipts, String>, SinkError> {
        let cut = self.remote.cut(batch).await?;
        if batch.on_refused == OnRefused::Abort
            && let Some((row, reason)) =
                cut.outcomes.iter().enumerate().find_map(|(row, outcome)| match outcome {
                    RowOutcome::Refused { reason } => Some((row, reason.clone())),
                    _ => None,
                })
        {
            return Err(SinkError::Refused { row, reason });
        }
        let finish = Finish::of(batch, &cut.outcomes);
        let steps = batch.steps.to_vec();
        if cut.parts.is_empty() {
            self.job(move |connection, route| {
                let transaction = begin(connection)?;
                stand(&transaction, route, &steps)?;
                fence(&transaction, route, &steps)?;
                write_finish(&transaction, route, &steps, &finish)?;
                commit(transaction)
            })
            .await?;
            return Ok(Ok(Receipts { rows: cut.outcomes }));
        }
        let blocks = self.remote.blocks().await.map_err(|reason| SinkError::NotApplied {
            reason: format!("nothing was sent: {reason}"),
            retry: true,
        })?;
        let name = self.job(|connection, _| name_of(connection)).await?;
        let mut parts = Vec::with_capacity(cut.parts.len());
        for (number, rows) in cut.parts.iter().enumerate() {
            let bytes = rows.iter().filter_map(|&row| batch.rows.get(row)).map(|row| row.bytes);
            let token = entry::token(&name, &self.route, batch.steps, number, bytes);
            let body = self.remote.body(batch, rows, &token).map_err(|reason| SinkError::NotApplied {
                reason: format!("nothing was sent: {reason}"),
                retry: true,
            })?;
            parts.push(Part {
                token,
                rows: rows.len(),
                body: body.into(),
                done: false,
                absent: false,
                under: None,
            });
        }
        let entry = Entry {
            id: 0,
            steps,
            statement: self.remote.statement(),
            target: self.target.as_ref().map(Identity::to_string),
            first_ms: 0,
            blocks,
            parts,
            finish,
            verdict: None,
            doubt: None,
        };
        self.crash.point()?;
        if planted!(SentBeforeJournaled) {
            self.drive_parts(&mut entry.clone(), true).await;
        }
        let bound = self.config.max_bytes;
        let mut entry =
            self.job(move |connection, route| journal(connection, route, entry, &name, bound)).await?;
        self.crash.point()?;
        match self.drive(&mut entry, true).await {
            Driven::In => {}
            Driven::Unknown { reason } if planted!(EntryGoneWhileUnknown) => {
                self.take_out(&entry, &reason).await?;
                return Err(SinkError::Unknown { reason });
            }
            Driven::Unknown { reason } => return Err(SinkError::Unknown { reason }),
            Driven::Out { reason, retry } => {
                self.take_out(&entry, &reason).await?;
                return Err(SinkError::NotApplied { reason, retry });
            }
            Driven::Refused { reason } => {
                self.take_out(&entry, &reason).await?;
                return Ok(Err(reason));
            }
        }
        self.crash.point()?;
        let settled = self.job(move |connection, route| settle_own(connection, route, &entry)).await;
        self.crash.point()?;
        match settled {
            Ok(()) => Ok(Ok(Receipts { rows: cut.outcomes })),
            // The rows are in. Whoever has the shard now finds them in the journal, or has settled them.
            Err(error) => Err(SinkError::Unknown {
                reason: format!(
                    "the rows are in the target and the journal, and are not settled yet: {error}"
                ),
            }),
        }
    }

    /// Nothing of the entry is in the target: it goes, if the shards are still ours.
    async fn take_out(&mut self, entry: &Entry, reason: &str) -> Result<(), SinkError> {
        self.crash.point()?;
        let (id, steps) = (entry.id, entry.steps.clone());
        let gone = self
            .job(move |connection, route| {
                let transaction = begin(connection)?;
                for step in &steps {
                    stands(&transaction, route, step)?;
                }
                remove(&transaction, id)?;
                commit(transaction)
            })
            .await;
        self.crash.point()?;
        gone.map_err(|error| SinkError::Unknown {
            reason: format!("{reason}; and the batch could not be taken out of the journal: {error}"),
        })
    }

    /// Sends what is not known to be in. `first`: nobody has sent any of it before.
    async fn drive(&mut self, entry: &mut Entry, first: bool) -> Driven {
        let known = entry.parts.iter().filter(|part| part.done).count();
        let doubted = entry.doubt.is_some();
        let driven = self.drive_parts(entry, first).await;
        let done: Vec<usize> =
            entry.parts.iter().enumerate().filter(|(_, part)| part.done).map(|(at, _)| at).collect();
        if matches!(driven, Driven::Unknown { .. }) && done.len() > known {
            let id = entry.id;
            let noted = self
                .job_connected(move |connection, _| {
                    entry::note_done(connection, id, &done)
                        .map_err(|error| schema::fault("noting the parts that are in", &error))
                })
                .await;
            if let Err(error) = noted {
                warn!(route = %self.route, "the parts that are in are sent again: {error}");
            }
        }
        if let Some(doubt) = entry.doubt.clone().filter(|_| !doubted) {
            let id = entry.id;
            let noted = self
                .job_connected(move |connection, _| {
                    entry::note_doubt(connection, id, &doubt)
                        .map_err(|error| schema::fault("noting that someone has to look", &error))
                })
                .await;
            if let Err(error) = noted {
                error!(route = %self.route, "a restart will not know that someone has to look into {}: {error}", entry.name(&self.route));
            }
        }
        driven
    }

    async fn drive_parts(&mut self, entry: &mut Entry, first: bool) -> Driven {
        let (name, page) = (entry.name(&self.route), self.remote.page());
        let unknown = |reason: String| Driven::Unknown { reason: format!("{name}: {reason}") };
        if !first && let Some(made_for) = &entry.target {
            match self.remote.target().await {
                Ok(found) if found.to_string() == *made_for => {}
                Ok(found) => {
                    return unknown(format!(
                        "it was made for {made_for}, and there is {found} now: it is not sent; bring the other one back, or look into it and \
                         set verdict in {} ({page})",
                        self.file.path.display()
                    ));
                }
                Err(reason) => return unknown(reason),
            }
        }
        let look = |doubt: &str, path: &std::path::Path| {
            format!("{doubt}; look into the target, then set verdict in {} ({page})", path.display())
        };
        if let Some(doubt) = &entry.doubt {
            return unknown(look(doubt, &self.file.path));
        }
        let count = entry.parts.len();
        for at in 0..count {
            if entry.parts[at].done {
                continue;
            }
            let said_out = entry.parts[at].absent;
            let surely_out = first || said_out;
            if said_out {
                let id = entry.id;
                let taken = self
                    .job_connected(move |connection, _| {
                        entry::take_verdict(connection, id, at)
                            .map_err(|error| schema::fault("taking the verdict of a part", &error))
                    })
                    .await;
                match taken {
                    Ok(under) => entry.parts[at].under = Some(under),
                    Err(error) => return unknown(error.to_string()),
                }
                warn!(
                    "{name}: part {} of {count} is sent, as someone has said that nothing of it is in",
                    at + 1
                );
                entry.parts[at].absent = false;
            }
            // Each time: the parts before may have taken long.
            let forgotten = if surely_out { Ok(None) } else { self.forgotten(entry).await };
            let forgotten = match forgotten {
                Ok(forgotten) => forgotten,
                Err(reason) => return unknown(reason),
            };
            let part = &entry.parts[at];
            // Also within the window: a server that was killed may have kept rows without their token, or a token without its rows.
            let held = if surely_out { Ok(None) } else { self.remote.holds(part).await };
            let absent = said_out || matches!(held, Ok(Some(false)));
            match (held, &forgotten) {
                (Ok(Some(true)), _) => {
                    entry.parts[at].done = true;
                    continue;
                }
                (Ok(None), Some(why)) => {
                    return unknown(format!(
                        "{why}, so that part {} of {count} is not sent again: it could come in twice; look into the target, then set \
                         verdict of the part or of all in {} ({page})",
                        at + 1,
                        self.file.path.display()
                    ));
                }
                (Err(reason), _) => return unknown(reason),
                (Ok(_), _) => {}
            }
            if let Err(crash) = self.crash.point() {
                return unknown(crash.to_string());
            }
            let part = if !first && planted!(TokenChanged) {
                &Part { token: format!("{} again", part.token), ..part.clone() }
            } else {
                part
            };
            let sent = if at > 0 && planted!(PartSkipped) {
                Sent::In
            } else if first {
                self.remote.send(&entry.statement, part).await
            } else {
                self.remote.send_again(&entry.statement, part).await
            };
            if let Err(crash) = self.crash.point() {
                return unknown(crash.to_string());
            }
            match sent {
                Sent::In if absent => match self.remote.holds(&entry.parts[at]).await {
                    Ok(Some(false)) => {
                        return unknown(format!(
                            "the target says that it has part {} of {count}, and has no rows of it: either they were deleted (by hand, by a TTL, or a \
                             row policy hides them), which is 'in', or a crash of the server kept its token without its rows, which is 'out'; \
                             find out which, then set verdict in {} ({page})",
                            at + 1,
                            self.file.path.display()
                        ));
                    }
                    Ok(_) => entry.parts[at].done = true,
                    Err(reason) => return unknown(reason),
                },
                Sent::In => entry.parts[at].done = true,
                Sent::Out { reason, retry } if first && at == 0 => return Driven::Out { reason, retry },
                Sent::Out { reason, retry } => {
                    let rest = match (first, retry) {
                        (true, _) => "others are in",
                        (false, _) => "an earlier attempt may be in",
                    };
                    return unknown(format!(
                        "part {} of {count} does not go in, and {rest}: {reason}; it is tried again as it is",
                        at + 1
                    ));
                }
                Sent::Refused { reason } if entry.parts.iter().all(|part| !part.done) => {
                    return Driven::Refused { reason };
                }
                Sent::Refused { reason } => {
                    return unknown(format!(
                        "part {} of {count} is refused, and others are in: {reason}; it is tried again as it is",
                        at + 1
                    ));
                }
                Sent::Doubt { reason } => {
                    let doubt = format!("part {} of {count}: {reason}", at + 1);
                    let told = unknown(look(&doubt, &self.file.path));
                    entry.doubt = Some(doubt);
                    return told;
                }
                Sent::Unknown { reason } => return unknown(format!("part {} of {count}: {reason}", at + 1)),
            }
            if at + 1 < count {
                self.note_part(entry.id, at).await;
            }
        }
        Driven::In
    }

    /// So that a process that ends here leaves one part of which nobody knows, and not all that it has sent. Without a sync: it is no more
    /// than a help.
    async fn note_part(&mut self, id: i64, part: usize) {
        let noted = self
            .job_connected(move |connection, _| {
                unsynced(connection, |connection| {
                    entry::note_done(connection, id, &[part])
                        .map_err(|error| schema::fault("noting a part that is in", &error))
                })
            })
            .await;
        if let Err(error) = noted {
            warn!(route = %self.route, "a part that is in may be sent again: {error}");
        }
    }

    /// Why a repeat might not be known for one any more.
    async fn forgotten(&mut self, entry: &Entry) -> Result<Option<String>, String> {
        let now = self
            .job_connected(|connection, _| {
                entry::now(connection).map_err(|error| schema::fault("asking for the time", &error))
            })
            .await
            .map_err(|error| error.to_string())?;
        let tried = Tried { age_ms: now.saturating_sub(entry.first_ms), blocks: entry.blocks.clone() };
        Ok(self.remote.knows_repeats(tried).await?.err())
    }

    /// Drives and settles the open entries of these shards, whoever owns them: until they are settled the shards cannot move.
    /// All of the route if none are given.
    async fn settle_open(&mut self, shards: Option<Vec<ShardId>>) -> Result<bool, SinkError> {
        let page = self.remote.page();
        let entries = self
            .job_connected(move |connection, route| {
                let doing = |error: rusqlite::Error| schema::fault("looking into the journal", &error);
                let gone = entry::remove_orphans(connection, route).map_err(doing)?;
                if !gone.is_empty() {
                    warn!("route {route}: what was left in the journal of entries {gone:?}, which someone has taken out by hand, is removed");
                }
                let mut found: Vec<i64> = match &shards {
                    Some(_) => Vec::new(),
                    None => entry::of_route(connection, route).map_err(doing)?,
                };
                for shard in shards.iter().flatten() {
                    let open = entry::open_entry(connection, route, shard).map_err(doing)?;
                    found.extend(open.filter(|id| !found.contains(id)));
                }
                found
                    .into_iter()
                    .map(|id| match entry::read(connection, route, id) {
                        Ok(entry) => Ok(entry),
                        Err(Unread::Sqlite(error)) => Err(schema::fault(&format!("reading journal entry {id}"), &error)),
                        Err(Unread::Corrupt(what)) => Err(SinkError::Unknown {
                            reason: format!("{what}; restore the folder, or, once you have looked into the target, take the entry out by \
                                             hand ({page})"),
                        }
                        .into()),
                    })
                    .collect::<Result<Vec<Option<Entry>>, Fault>>()
            })
            .await?;
        let mut any = false;
        for mut entry in entries.into_iter().flatten() {
            any = true;
            let name = entry.name(&self.route);
            let applied = match entry.verdict.as_deref() {
                Some(verdict) => {
                    warn!("{name}: settled as someone has said: {verdict:?}");
                    verdict == "in"
                }
                None => match self.drive(&mut entry, false).await {
                    Driven::In => true,
                    // Whoever sends these rows finds those that are refused.
                    Driven::Refused { reason } => {
                        warn!("{name}: nothing of it is in: {reason}");
                        false
                    }
                    Driven::Out { reason, .. } | Driven::Unknown { reason } => {
                        return Err(SinkError::Unknown { reason });
                    }
                },
            };
            self.crash.point()?;
            self.job_connected(move |connection, route| settle(connection, route, &entry, applied)).await?;
            self.crash.point()?;
            info!("{name}: settled");
        }
        Ok(any)
    }

    async fn take_over(&mut self, shards: &[ShardId], how: Acquire) -> Result<Vec<ShardState>, SinkError> {
        self.settle_left().await?;
        let states = self.book.acquire(shards, how).await?;
        let any = self.settle_patiently(Some(shards.to_vec())).await?;
        if !any {
            return Ok(states);
        }
        self.job(move |connection, route| {
            states.iter().map(|state| stand_now(connection, route, state)).collect()
        })
        .await
    }
}

#[async_trait]
impl Session for JournalSession {
    async fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        self.hold()?;
        self.book.register_route(proposed).await
    }

    async fn acquire(&mut self, shards: &[ShardId], how: Acquire) -> Result<Vec<ShardState>, SinkError> {
        self.whole = false;
        let states = self.take_over(shards, how).await?;
        self.whole = true;
        Ok(states)
    }

    async fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        self.settle_left().await?;
        self.book.shards(prefix).await
    }

    async fn deliver(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        if !self.connected() {
            let reason = "there is no connection: acquire the shards first".to_owned();
            return Err(SinkError::NotApplied { reason, retry: true });
        }
        self.whole = false;
        let result = self.deliver_whole(batch).await;
        self.whole = !matches!(result, Err(SinkError::Unknown { .. }));
        result
    }

    async fn resolve(&mut self, steps: &[ShardStep]) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        self.whole = false;
        self.hold()?;
        // First, so that also who has lost the shard finds its marks in the book.
        self.settle_open(Some(steps.iter().map(|step| step.shard.clone()).collect())).await?;
        let found = self.book.resolve(steps).await?;
        self.whole = true;
        Ok(found)
    }

    async fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        self.book.marks_since(shard, sequence).await
    }

    async fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError> {
        self.book.expire_marks(owned, floor_ms).await
    }

    async fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        self.book.heartbeat(owned).await
    }

    async fn forget_all(&mut self, owned: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        self.book.forget_all(owned).await
    }

    async fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError> {
        self.book.keep_partitions(counts).await
    }

    async fn keep_sources(
        &mut self,
        sources: &[(ShardId, i64, String)],
        renew: bool,
    ) -> Result<Vec<Option<String>>, SinkError> {
        self.book.keep_sources(sources, renew).await
    }

    async fn now_ms(&mut self) -> Result<i64, SinkError> {
        self.hold()?;
        self.book.now_ms().await
    }

    fn connected(&self) -> bool {
        self.whole && self.book.connected()
    }

    fn life(&self) -> Life {
        self.book.life()
    }
}
