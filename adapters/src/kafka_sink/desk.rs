//! What a session does, on its own thread: taking shards over, keeping them, their floors.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use super::{
    KafkaSinkConfig,
    book::{Book, Holder},
    config::Limits,
    line::{Kind, Line, State, route_bytes},
    writer::{Broken, Plain, Writer, fence},
};
use crate::{
    kafka::Membership,
    sink::{Life, Mark, RouteRow, ShardId, ShardState, SinkError},
};

/// An open transaction of another process is left to end by itself for so long.
const GRACE: Duration = Duration::from_secs(2);
/// An owner that has a transaction open for so long, and did nothing else, is dead.
const SILENCE: Duration = Duration::from_secs(6);
/// Between two looks at an open transaction.
const LOOK_AGAIN: Duration = Duration::from_millis(5);
/// Lines about a shard are repeated so often, at most, so that the newest is never as old as the topic's retention.
const REPEAT: Duration = Duration::from_secs(600);

/// Where a session belongs.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) config: Arc<KafkaSinkConfig>,
    pub(super) route: Arc<str>,
    pub(super) owner: Arc<str>,
    /// The transactional id.
    pub(super) id: String,
    /// The marks topic.
    pub(super) marks: Arc<str>,
    pub(super) limits: Limits,
    pub(super) book: Arc<Mutex<Book>>,
    pub(super) membership: Option<Arc<Membership>>,
}

/// A session's own.
pub(super) struct Desk {
    pub(super) place: Place,
    pub(super) writer: Option<Writer>,
    plain: Option<Plain>,
    pub(super) owned: HashMap<ShardId, Owned>,
    /// Epochs that our own `resolve` may have set without being heard.
    pub(super) raised: HashMap<ShardId, i64>,
    /// The dead-letter topic was seen.
    pub(super) letters: bool,
    route_at: Option<Instant>,
    /// The cluster's id.
    cluster: Option<String>,
}

/// A shard that this session took over.
pub(super) struct Owned {
    pub(super) home: i32,
    pub(super) state: State,
    /// Who has it now.
    pub(super) lost: Option<(String, i64)>,
    /// A batch has shown since the last heartbeat that it still is ours.
    pub(super) moved: bool,
    /// When a line of it was last written.
    pub(super) written: Instant,
}

pub(super) fn not_applied(reason: String) -> SinkError {
    SinkError::NotApplied { reason, retry: true }
}

pub(super) fn asking(what: &str, error: &KafkaError) -> SinkError {
    use RDKafkaErrorCode as Code;
    let code = match error {
        KafkaError::Transaction(error) => Some(error.code()),
        other => other.rdkafka_error_code(),
    };
    let hopeless = matches!(
        code,
        Some(
            Code::InvalidTransactionTimeout
                | Code::TopicAuthorizationFailed
                | Code::GroupAuthorizationFailed
                | Code::ClusterAuthorizationFailed
                | Code::TransactionalIdAuthorizationFailed
        )
    ) || matches!(error, KafkaError::ClientConfig(..));
    SinkError::NotApplied { reason: format!("{what}: {error}"), retry: !hopeless }
}

impl ShardState {
    pub(super) fn of(shard: &ShardId, state: &State) -> Self {
        Self {
            shard: shard.clone(),
            epoch: state.epoch,
            sequence: state.sequence,
            position: state.position,
            watermark_ms: state.watermark_ms,
            floor_ms: state.floor_ms,
            lineage: state.lineage.clone(),
        }
    }
}

impl Place {
    fn deadline(&self) -> Instant {
        Instant::now() + self.config.transaction_timeout + Duration::from_secs(5)
    }
}

impl Desk {
    pub(super) fn new(place: Place) -> Self {
        Self {
            place,
            writer: None,
            plain: None,
            owned: HashMap::new(),
            raised: HashMap::new(),
            letters: false,
            route_at: None,
            cluster: None,
        }
    }

    /// The group whose generation fences our batches of `shard`, if one does: the shard is a partition of this very cluster.
    pub(super) fn group_of(&self, shard: &str) -> Option<String> {
        let membership = self.place.membership.as_ref()?;
        membership.of(shard).filter(|_| self.is_here(shard))?;
        Some(membership.group()?.to_string())
    }

    /// The shard is a partition of this very cluster.
    fn is_here(&self, shard: &str) -> bool {
        let cluster = shard.strip_prefix("kafka/").and_then(|rest| rest.split('/').next());
        cluster.is_some() && cluster == self.cluster.as_deref()
    }

    pub(super) fn is_taken_back(&self, shard: &str) -> bool {
        let membership = self.place.membership.as_ref();
        membership.is_some_and(|membership| self.is_here(shard) && membership.of(shard).is_none())
    }

    /// A partition of our group that it has taken back has another owner: we must not claim it from there.
    pub(super) fn refuse_taken_back(&self, shards: &[ShardId]) -> Result<(), SinkError> {
        match shards.iter().find(|shard| self.is_taken_back(shard)) {
            Some(shard) => Err(not_applied(format!("the consumer group has taken shard {shard} back"))),
            None => Ok(()),
        }
    }

    pub(super) fn life(&self) -> Option<Life> {
        self.writer.as_ref().map(|writer| writer.pulse.life())
    }

    pub(super) fn ready(&self) -> Result<&Writer, SinkError> {
        let none = || not_applied("there is no connection: acquire the shards first".to_owned());
        self.writer.as_ref().ok_or_else(none)
    }

    /// Takes the transactional id over, if that is not done: what an earlier run left open is aborted.
    pub(super) fn connect(&mut self) -> Result<(), SinkError> {
        if self.writer.is_none() {
            self.owned.clear();
            let Place { config, limits, id, book, .. } = &self.place;
            book.lock().live.insert(id.clone());
            let writer = Writer::new(config, limits, id)
                .map_err(|error| asking(&format!("taking transactional id {id:?}"), &error))?;
            if self.cluster.is_none() {
                self.cluster = writer.cluster();
            }
            self.writer = Some(writer);
        }
        Ok(())
    }

    fn plain(&mut self) -> Result<&Plain, SinkError> {
        if self.plain.is_none() {
            let plain =
                Plain::new(&self.place.config).map_err(|error| asking("making a producer", &error))?;
            self.plain = Some(plain);
        }
        self.plain.as_ref().ok_or_else(|| not_applied("there is no producer".to_owned()))
    }

    /// Writes lines that need no transaction; answers with the broker's time.
    fn write(&mut self, lines: &[(i32, Line, Option<Vec<u8>>)]) -> Result<i64, SinkError> {
        let (route, topic) = (self.place.route.clone(), self.place.marks.clone());
        let written = self.plain()?.write(&route, &topic, lines);
        written.map_err(|error| asking("writing to the marks topic", &error))
    }

    pub(super) fn now_ms(&mut self) -> Result<i64, SinkError> {
        // Makes the topic, if need be.
        self.place.book.lock().all()?;
        self.write(&[(0, Line::new(Kind::Clock, &"".into(), State::unowned()), None)])
    }

    pub(super) fn register_route(&mut self, proposed: &RouteRow) -> Result<RouteRow, SinkError> {
        let known = |desk: &Self| desk.place.book.lock().ledger.route().cloned();
        // The first proposal holds, so one that is decided already waits for nobody.
        self.place.book.lock().glance(&[0])?;
        if let Some(row) = known(self) {
            return Ok(row);
        }
        self.follow(&[0], &[])?;
        if let Some(row) = known(self) {
            return Ok(row);
        }
        let line = Line::new(Kind::Route, &"".into(), State::unowned());
        self.write(&[(0, line, Some(route_bytes(proposed)))])?;
        self.follow(&[0], &[])?;
        known(self).ok_or_else(|| not_applied("the route's identity was written and is not there".to_owned()))
    }

    /// Folds all that is in the log of these partitions now, decided or not: waits for open transactions (P14), ends those of dead
    /// processes where it may, and past its deadline names the one that it waits for. The book is free meanwhile.
    fn follow(&self, partitions: &[i32], taking: &[ShardId]) -> Result<(), SinkError> {
        let deadline = self.place.deadline();
        let ends = self.place.book.lock().ends(partitions)?;
        let mut waiting: Option<(Holder, Instant)> = None;
        let mut dead = HashSet::new();
        loop {
            let held = self.place.book.lock().advance(&ends)?;
            let Some(holder) = held else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(holder.fault(&self.place.marks));
            }
            let since =
                waiting.filter(|(before, _)| *before == holder).map_or_else(Instant::now, |(_, since)| since);
            self.wait_for(&holder, since.elapsed(), taking, &mut dead)?;
            waiting = Some((holder, since));
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// An open transaction holds decided lines back. Ends it if its owner is dead, or if shards are to be taken that it may hold:
    ///
    /// | the transaction | is ended |
    /// | --- | --- |
    /// | of a session at work in this process, or of one that cannot be told | never |
    /// | of an earlier run of this instance | at once |
    /// | in the way of shards that are taken, or of a partition that the group gave us | after 2 s |
    /// | of others, whose owner has done nothing else meanwhile | after 6 s; further ones of that instance at once |
    ///
    /// The last is for who starts beside a dead instance: before it has looked it is in no group, and nobody else may be there to take
    /// the shards. An owner that was alive after all has written nothing of the batch, and takes its shards anew.
    fn wait_for(
        &self,
        holder: &Holder,
        waited: Duration,
        taking: &[ShardId],
        dead: &mut HashSet<String>,
    ) -> Result<(), SinkError> {
        let Place { config, route, owner, id, .. } = &self.place;
        if holder.writer.is_empty() || holder.writer == *id || holder.live {
            return Ok(());
        }
        // Of an earlier run of this very instance.
        let ours = holder.writer.starts_with(&format!("oncegate/{route}/{owner}/"));
        let given = || !taking.is_empty() || self.group_of(&holder.shard).is_some();
        let instance = holder.writer.rsplit_once('/').map_or(&*holder.writer, |(instance, _)| instance);
        let silent = waited >= SILENCE || dead.contains(instance);
        if ours || (waited >= GRACE && given()) || silent {
            if silent {
                dead.insert(instance.to_owned());
            }
            tracing::warn!(
                route = &**route,
                shard = &*holder.shard,
                transactional_id = holder.writer,
                "a transaction that was left open is ended"
            );
            fence(config, &holder.writer)
                .map_err(|error| asking(&format!("ending the transaction of {:?}", holder.writer), &error))?;
        }
        Ok(())
    }

    /// The partitions that hold the lines of `shards`.
    fn homes(&self, shards: &[ShardId]) -> Result<Vec<i32>, SinkError> {
        let mut book = self.place.book.lock();
        let homes = shards.iter().map(|shard| book.home(shard)).collect::<Result<BTreeSet<i32>, _>>()?;
        Ok(homes.into_iter().collect())
    }

    /// The book, with all that is in the log of `shards`' partitions now.
    pub(super) fn look(&self, shards: &[ShardId], taking: bool) -> Result<MutexGuard<'_, Book>, SinkError> {
        self.follow(&self.homes(shards)?, if taking { shards } else { &[] })?;
        Ok(self.place.book.lock())
    }

    /// The book, with what is decided of `shards` now: waits for nobody.
    pub(super) fn glance(&self, shards: &[ShardId]) -> Result<MutexGuard<'_, Book>, SinkError> {
        let homes = self.homes(shards)?;
        let mut book = self.place.book.lock();
        book.glance(&homes)?;
        Ok(book)
    }

    pub(super) fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        let all = self.place.book.lock().all()?;
        self.follow(&all, &[])?;
        let book = self.place.book.lock();
        let found = book.ledger.shards().filter(|(shard, _)| shard.starts_with(prefix));
        Ok(found.map(|(shard, known)| ShardState::of(shard, &known.state)).collect())
    }

    /// What a broken transaction means to the caller. Before the commit was asked for, nothing is in.
    pub(super) fn refused(&mut self, broken: Broken) -> SinkError {
        match broken {
            Broken::Aborted(reason) => not_applied(reason),
            // Put out of the group, or overtaken by a rebalance: who has the shards now may be known already.
            Broken::Generation(reason) => {
                self.find_lost(Duration::ZERO).ok().flatten().unwrap_or(not_applied(reason))
            }
            Broken::Refused(rows) => {
                not_applied(rows.into_iter().map(|(_, reason)| reason).collect::<Vec<_>>().join("; "))
            }
            Broken::Unknown(reason) => {
                self.writer = None;
                SinkError::Unknown { reason }
            }
            Broken::Dead { reason, fenced } => {
                self.writer = None;
                // Whoever fenced us has yet to write its claim.
                match fenced.then(|| self.find_lost(GRACE * 2)) {
                    Some(Ok(Some(fault)) | Err(fault)) => fault,
                    Some(Ok(None)) => {
                        not_applied(format!("{reason}: another process took our transactional id over"))
                    }
                    None => not_applied(reason),
                }
            }
        }
    }

    /// Looks who has taken shards of ours, for so long at most; the first of them.
    fn find_lost(&mut self, patience: Duration) -> Result<Option<SinkError>, SinkError> {
        let mut shards: Vec<ShardId> = self.owned.keys().cloned().collect();
        shards.sort();
        let until = Instant::now() + patience;
        loop {
            let book = self.glance(&shards)?;
            let mut lost: Vec<(ShardId, State)> = Vec::new();
            for shard in &shards {
                let Some(known) = book.ledger.shard(shard) else { continue };
                if self.owned.get(shard).is_some_and(|owned| known.state.epoch > owned.state.epoch) {
                    lost.push((shard.clone(), known.state.clone()));
                }
            }
            drop(book);
            for (shard, state) in &lost {
                if let Some(owned) = self.owned.get_mut(shard) {
                    owned.lost = Some((state.owner.clone(), state.epoch));
                }
            }
            if let Some((shard, state)) = lost.first() {
                return Ok(Some(fenced_by(shard, state)));
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            std::thread::sleep(LOOK_AGAIN * 4);
        }
    }

    pub(super) fn marks_since(&mut self, shard: &ShardId, sequence: i64) -> Result<Vec<Mark>, SinkError> {
        self.ready()?;
        let found = self.place.book.lock().marks(shard, sequence)?;
        if !found.is_empty() {
            return Ok(found);
        }
        let mut book = self.look(std::slice::from_ref(shard), false)?;
        book.marks(shard, sequence)
    }

    /// All of `owned` still are ours, as the log says now; else `Fenced`.
    fn still_ours(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        self.ready()?;
        let shards: Vec<ShardId> = owned.iter().map(|(shard, _)| shard.clone()).collect();
        let book = self.glance(&shards)?;
        for (shard, epoch) in owned {
            match book.ledger.shard(shard).map(|known| &known.state) {
                Some(state) if state.epoch == *epoch && state.writer == self.place.id => {}
                Some(state) if state.epoch >= *epoch => return Err(fenced_by(shard, state)),
                _ => {
                    drop(book);
                    self.writer = None;
                    return Err(not_applied(format!(
                        "shard {shard} is not at epoch {epoch}: the marks topic went back; acquire it again"
                    )));
                }
            }
        }
        Ok(())
    }

    /// P11: what is below the floor that the line says is gone; the topic's retention frees the space.
    pub(super) fn expire_marks(&mut self, owned: &[(ShardId, i64)], floor_ms: i64) -> Result<u64, SinkError> {
        self.still_ours(owned)?;
        let book = self.place.book.lock();
        let (mut lines, mut gone) = (Vec::new(), 0);
        for (shard, _) in owned {
            let Some(known) = book.ledger.shard(shard) else { continue };
            let below = known.below(floor_ms);
            if below > 0 {
                gone += below as u64;
                let state = State { floor_ms, ..known.state.clone() };
                lines.push((known.home, Line::new(Kind::Beat, shard, state), None));
            }
        }
        drop(book);
        self.write_and_look(owned, lines)?;
        Ok(gone)
    }

    pub(super) fn forget_all(&mut self, owned: &[(ShardId, i64)]) -> Result<u64, SinkError> {
        self.still_ours(owned)?;
        let book = self.place.book.lock();
        let (mut lines, mut gone) = (Vec::new(), 0);
        for (shard, _) in owned {
            let Some(known) = book.ledger.shard(shard) else { continue };
            gone += known.marks.len() as u64;
            lines.push((known.home, Line::new(Kind::Forget, shard, known.state.clone()), None));
        }
        drop(book);
        self.write_and_look(owned, lines)?;
        Ok(gone)
    }

    /// Writes, and takes over what has come of it.
    fn write_and_look(
        &mut self,
        owned: &[(ShardId, i64)],
        lines: Vec<(i32, Line, Option<Vec<u8>>)>,
    ) -> Result<(), SinkError> {
        if lines.is_empty() {
            return Ok(());
        }
        self.write(&lines)?;
        self.still_ours(owned)?;
        let book = self.place.book.lock();
        let states: Vec<(ShardId, State)> = owned
            .iter()
            .filter_map(|(shard, _)| Some((shard.clone(), book.ledger.shard(shard)?.state.clone())))
            .collect();
        drop(book);
        for (shard, state) in states {
            if let Some(owned) = self.owned.get_mut(&shard) {
                owned.state.floor_ms = state.floor_ms;
                owned.state.partitions = state.partitions;
                if owned.state.source != state.source {
                    (owned.state.source, owned.state.position) = (state.source, state.position);
                }
                if state.watermark_ms == i64::MIN {
                    owned.state.watermark_ms = state.watermark_ms;
                }
            }
        }
        Ok(())
    }

    pub(super) fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        let done = self.beat(owned);
        if let Err(SinkError::NotApplied { .. }) = done {
            // A cluster that cannot be asked may be another one when it can (P6).
            self.writer = None;
        }
        done
    }

    fn beat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
        self.ready()?;
        // A batch that went in shows as much, and better.
        let idle = |desk: &Self, shard: &ShardId| desk.owned.get(shard).is_none_or(|owned| !owned.moved);
        let ask: Vec<(ShardId, i64)> = owned.iter().filter(|(shard, _)| idle(self, shard)).cloned().collect();
        let mut lines = Vec::new();
        if !ask.is_empty() {
            self.still_ours(&ask)?;
            let book = self.place.book.lock();
            for (shard, _) in &ask {
                let Some(known) = book.ledger.shard(shard) else { continue };
                lines.push((known.home, Line::new(Kind::Beat, shard, known.state.clone()), None));
            }
        }
        // Partitions are given by the group, whether or not their owner is heard: only their state must not expire.
        let old = |desk: &Self, shard: &ShardId| {
            desk.owned.get(shard).is_none_or(|owned| owned.written.elapsed() >= REPEAT)
        };
        lines.retain(|(_, line, _)| !line.shard.starts_with("kafka/") || old(self, &line.shard));
        if self.route_at.is_none_or(|at| at.elapsed() >= REPEAT) {
            let row = self.place.book.lock().ledger.route().map(route_bytes);
            let line = Line::new(Kind::RouteAgain, &"".into(), State::unowned());
            lines.extend(row.map(|row| (0, line, Some(row))));
            self.route_at = Some(Instant::now());
        }
        if !lines.is_empty() {
            self.write(&lines)?;
        }
        for (shard, _) in owned {
            if let Some(owned) = self.owned.get_mut(shard) {
                if lines.iter().any(|(_, line, _)| line.shard == *shard) {
                    owned.written = Instant::now();
                }
                owned.moved = false;
            }
        }
        Ok(())
    }

    pub(super) fn keep_partitions(
        &mut self,
        counts: &[(ShardId, i64, i64)],
    ) -> Result<Vec<Option<i64>>, SinkError> {
        self.ready()?;
        let shards: Vec<ShardId> = counts.iter().map(|(shard, ..)| shard.clone()).collect();
        let book = self.glance(&shards)?;
        let (mut before, mut lines, mut ours) = (Vec::new(), Vec::new(), Vec::new());
        for (shard, epoch, count) in counts {
            let known = book.ledger.shard(shard);
            let known =
                known.filter(|known| known.state.epoch == *epoch && known.state.writer == self.place.id);
            before.push(known.and_then(|known| known.state.partitions));
            if let Some(known) = known.filter(|known| known.state.partitions != Some(*count)) {
                let state = State { partitions: Some(*count), ..known.state.clone() };
                lines.push((known.home, Line::new(Kind::Beat, shard, state), None));
                ours.push((shard.clone(), *epoch));
            }
        }
        drop(book);
        self.write_and_look(&ours, lines)?;
        Ok(before)
    }

    pub(super) fn keep_sources(
        &mut self,
        sources: &[(ShardId, i64, String)],
        renew: bool,
    ) -> Result<Vec<Option<String>>, SinkError> {
        self.ready()?;
        let shards: Vec<ShardId> = sources.iter().map(|(shard, ..)| shard.clone()).collect();
        let book = self.glance(&shards)?;
        let (mut before, mut lines, mut ours) = (Vec::new(), Vec::new(), Vec::new());
        for (shard, epoch, source) in sources {
            let known = book.ledger.shard(shard);
            let known =
                known.filter(|known| known.state.epoch == *epoch && known.state.writer == self.place.id);
            let kept = known.and_then(|known| known.state.source.clone());
            let kind = match &kept {
                None => Some(Kind::Beat),
                Some(kept) if renew && kept != source => Some(Kind::Renew),
                Some(_) => None,
            };
            if let (Some(known), Some(kind)) = (known, kind) {
                let mut state = State { source: Some(source.clone()), ..known.state.clone() };
                if kind == Kind::Renew {
                    state.position = None;
                }
                lines.push((known.home, Line::new(kind, shard, state), None));
                ours.push((shard.clone(), *epoch));
            }
            before.push(kept);
        }
        drop(book);
        self.write_and_look(&ours, lines)?;
        Ok(before)
    }
}

pub(super) fn fenced_by(shard: &str, state: &State) -> SinkError {
    SinkError::Fenced { shard: shard.to_owned(), owner: state.owner.clone(), epoch: state.epoch }
}
