//! What a session does, on its own thread: taking shards over, keeping them, their floors.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    error::{KafkaError, RDKafkaErrorCode},
};

use super::{
    KafkaSinkConfig,
    book::{ANSWER, Book, Holder},
    config::Limits,
    ledger::Shard,
    line::{Kind, Line, State, route_bytes},
    writer::{Broken, Plain, Writer, fence},
};
use crate::{
    kafka::Membership,
    sink::{Acquire, Life, Mark, Resolution, RouteRow, ShardId, ShardState, ShardStep, SinkError},
};

/// An open transaction of another process is left to end by itself for so long.
const GRACE: Duration = Duration::from_secs(2);
/// Attempts to take shards over from others who take them too.
const ATTEMPTS: usize = 50;
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
    raised: HashMap<ShardId, i64>,
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

fn asking(what: &str, error: &KafkaError) -> SinkError {
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
    fn of(shard: &ShardId, state: &State) -> Self {
        Self {
            shard: shard.clone(),
            epoch: state.epoch,
            sequence: state.sequence,
            position: state.position,
            watermark_ms: state.watermark_ms,
            floor_ms: state.floor_ms,
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
    fn group_of(&self, shard: &str) -> Option<String> {
        let membership = self.place.membership.as_ref()?;
        let here = shard.strip_prefix("kafka/")?.split('/').next()? == self.cluster.as_deref()?;
        membership.of(shard).filter(|_| here)?;
        Some(membership.group()?.to_string())
    }

    /// The last owner's batches are fenced by the group that gave the shard to us.
    fn is_group_fenced(&self, shard: &str, state: &State) -> bool {
        state.group.is_some() && state.group == self.group_of(shard)
    }

    pub(super) fn life(&self) -> Option<Life> {
        self.writer.as_ref().map(|writer| writer.pulse.life())
    }

    pub(super) fn ready(&self) -> Result<&Writer, SinkError> {
        let none = || not_applied("there is no connection: acquire the shards first".to_owned());
        self.writer.as_ref().ok_or_else(none)
    }

    /// Takes the transactional id over, if that is not done: what an earlier run left open is aborted.
    fn connect(&mut self) -> Result<(), SinkError> {
        if self.writer.is_none() {
            self.owned.clear();
            let Place { config, limits, id, book, .. } = &self.place;
            let writer = Writer::new(config, limits, id)
                .map_err(|error| asking(&format!("taking transactional id {id:?}"), &error))?;
            book.lock().live.insert(id.clone());
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
        let look = |desk: &Self| {
            let mut book = desk.place.book.lock();
            book.refresh(&[0], desk.place.deadline(), |holder| desk.wait_for(holder, &[]))?;
            Ok::<_, SinkError>(book.ledger.route().cloned())
        };
        if let Some(row) = look(self)? {
            return Ok(row);
        }
        let line = Line::new(Kind::Route, &"".into(), State::unowned());
        self.write(&[(0, line, Some(route_bytes(proposed)))])?;
        look(self)?.ok_or_else(|| not_applied("the route's identity was written and is not there".to_owned()))
    }

    /// An open transaction holds decided lines back. Ends it if its owner is dead, or if shards are to be taken that it may hold.
    fn wait_for(&self, holder: &Holder, taking: &[ShardId]) -> Result<(), SinkError> {
        let Place { config, route, owner, id, .. } = &self.place;
        if holder.writer.is_empty() || holder.writer == *id || holder.live {
            return Ok(());
        }
        // Of an earlier run of this very instance.
        let ours = holder.writer.starts_with(&format!("oncegate/{route}/{owner}/"));
        if ours || (!taking.is_empty() && holder.waited >= GRACE) {
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

    /// The book, with all that is in the log of `shards`' partitions now, and what it says of each.
    fn look(&self, shards: &[ShardId], taking: bool) -> Result<MutexGuard<'_, Book>, SinkError> {
        let mut book = self.place.book.lock();
        let homes = shards.iter().map(|shard| book.home(shard)).collect::<Result<BTreeSet<i32>, _>>()?;
        let homes: Vec<i32> = homes.into_iter().collect();
        let taking = if taking { shards } else { &[] };
        book.refresh(&homes, self.place.deadline(), |holder| self.wait_for(holder, taking))?;
        Ok(book)
    }

    pub(super) fn shards(&mut self, prefix: &str) -> Result<Vec<ShardState>, SinkError> {
        let mut book = self.place.book.lock();
        let all = book.all()?;
        book.refresh(&all, self.place.deadline(), |holder| self.wait_for(holder, &[]))?;
        let found = book.ledger.shards().filter(|(shard, _)| shard.starts_with(prefix));
        Ok(found.map(|(shard, known)| ShardState::of(shard, &known.state)).collect())
    }

    pub(super) fn acquire(
        &mut self,
        shards: &[ShardId],
        how: &Acquire,
    ) -> Result<Vec<ShardState>, SinkError> {
        self.connect()?;
        let none = HashMap::new();
        self.take(shards, how, &none, &none)
    }

    /// Takes `shards` over, from at least the epochs `least`. `Fenced` if one is above its epoch in `ours`.
    fn take(
        &mut self,
        shards: &[ShardId],
        how: &Acquire,
        least: &HashMap<ShardId, i64>,
        ours: &HashMap<ShardId, i64>,
    ) -> Result<Vec<ShardState>, SinkError> {
        if shards.is_empty() {
            return Ok(Vec::new());
        }
        let mut fenced: HashSet<(ShardId, i64)> = HashSet::new();
        for _ in 0..ATTEMPTS {
            self.connect()?;
            let mut homes = Vec::with_capacity(shards.len());
            let mut found = Vec::with_capacity(shards.len());
            {
                let mut book = self.look(shards, true)?;
                for shard in shards {
                    let home = book.home(shard)?;
                    homes.push(home);
                    found.push(match book.ledger.shard(shard) {
                        None if book.ledger.is_cut(home) => self.lapsed(shard, home)?,
                        known => known.cloned(),
                    });
                }
            }
            for (shard, known) in shards.iter().zip(&found) {
                let (Some(known), Some(ours)) = (known, ours.get(shard)) else { continue };
                if known.state.epoch > *ours {
                    return Err(fenced_by(shard, &known.state));
                }
            }
            if let Acquire::IfFree { stale_after_ms } = how {
                self.held(shards, &found, *stale_after_ms)?;
            }
            // Whoever may still write for these shards may not any more; and what it had committed by then is read.
            let mut ids = BTreeSet::new();
            for (shard, known) in shards.iter().zip(&found) {
                let Some(Shard { state, .. }) = known else { continue };
                let other = state.writer != self.place.id && !self.is_group_fenced(shard, state);
                if other && fenced.insert((shard.clone(), state.epoch)) {
                    ids.insert(state.writer.clone());
                }
            }
            if !ids.is_empty() {
                for id in &ids {
                    tracing::info!(
                        route = &*self.place.route,
                        transactional_id = id,
                        "fencing the last owner's transactional id"
                    );
                    fence(&self.place.config, id)
                        .map_err(|error| asking(&format!("fencing {id:?}"), &error))?;
                }
                continue;
            }
            let claims = self.claims(shards, &homes, &found, least);
            match self.claim(&claims) {
                Ok(()) => {}
                Err(Broken::Dead { fenced: true, .. } | Broken::Unknown(_)) => {
                    // Somebody fenced us, or the claim may be in: all is looked at anew, under a new incarnation of our id.
                    self.writer = None;
                    continue;
                }
                Err(broken) => return Err(self.refused(broken)),
            }
            let book = self.look(shards, true)?;
            let holds = |(_, line): &(i32, Line)| {
                let known = book.ledger.shard(&line.shard).map(|known| &known.state);
                known
                    .is_some_and(|state| state.epoch == line.state.epoch && state.writer == line.state.writer)
            };
            if !claims.iter().all(holds) {
                continue;
            }
            let mut states = Vec::with_capacity(shards.len());
            let mut taken = Vec::with_capacity(shards.len());
            for shard in shards {
                let Some(known) = book.ledger.shard(shard) else { continue };
                states.push(ShardState::of(shard, &known.state));
                taken.push((shard.clone(), known.home, known.state.clone()));
            }
            drop(book);
            for (shard, home, state) in taken {
                let owned = Owned { home, state, lost: None, moved: false, written: Instant::now() };
                self.owned.insert(shard, owned);
            }
            return Ok(states);
        }
        Err(not_applied("others take the same shards all the time; try again".to_owned()))
    }

    /// A shard without lines, in a partition whose first lines are gone: it may be new, or have been without an owner for longer than
    /// the topic keeps lines. Then its group knows where it was; without this it would be read from its start again.
    fn lapsed(&self, shard: &ShardId, home: i32) -> Result<Option<Shard>, SinkError> {
        let Some(group) = self.group_of(shard) else { return Ok(None) };
        let mut parts = shard.rsplitn(3, '/');
        let (Some(partition), Some(topic)) =
            (parts.next().and_then(|number| number.parse().ok()), parts.next())
        else {
            return Ok(None);
        };
        let asked = || {
            let consumer: BaseConsumer = self
                .place
                .config
                .client()
                .set("group.id", &group)
                .set("isolation.level", "read_committed")
                .create()?;
            let mut list = TopicPartitionList::new();
            list.add_partition(topic, partition);
            let found = consumer.committed_offsets(list, ANSWER)?;
            let offset = found.find_partition(topic, partition).map(|element| element.offset());
            Ok(match offset {
                Some(Offset::Offset(offset)) => Some(offset),
                _ => None,
            })
        };
        let position = asked()
            .map_err(|error: KafkaError| asking(&format!("the group's offset of shard {shard}"), &error))?;
        let Some(position) = position else { return Ok(None) };
        tracing::warn!(
            route = &*self.place.route,
            shard = &**shard,
            position,
            "the marks topic holds no line of the shard any more; it goes on at the consumer group's offset"
        );
        Ok(Some(Shard::lapsed(home, position)))
    }

    /// Another owner's heartbeat is young.
    fn held(
        &mut self,
        shards: &[ShardId],
        found: &[Option<Shard>],
        stale_after_ms: i64,
    ) -> Result<(), SinkError> {
        let others: Vec<(&ShardId, &Shard)> = shards
            .iter()
            .zip(found)
            .filter_map(|(shard, known)| Some((shard, known.as_ref()?)))
            .filter(|(_, known)| *known.state.owner != *self.place.owner)
            .collect();
        if others.is_empty() {
            return Ok(());
        }
        let now_ms = self.now_ms()?;
        for (shard, known) in others {
            let seen_ms = now_ms.saturating_sub(known.seen_ms).max(0);
            if seen_ms < stale_after_ms {
                return Err(SinkError::Held {
                    shard: shard.to_string(),
                    owner: known.state.owner.clone(),
                    seen_ms,
                });
            }
        }
        Ok(())
    }

    fn claims(
        &self,
        shards: &[ShardId],
        homes: &[i32],
        found: &[Option<Shard>],
        least: &HashMap<ShardId, i64>,
    ) -> Vec<(i32, Line)> {
        let claim = |((shard, home), known): ((&ShardId, &i32), &Option<Shard>)| {
            let before = known.as_ref().map_or_else(State::unowned, |known| known.state.clone());
            let after = before.epoch;
            let state = State {
                epoch: after.max(least.get(shard).copied().unwrap_or(0)) + 1,
                owner: self.place.owner.to_string(),
                writer: self.place.id.clone(),
                group: self.group_of(shard),
                ..before
            };
            (*home, Line::new(Kind::Claim { after }, shard, state))
        };
        shards.iter().zip(homes).zip(found).map(claim).collect()
    }

    /// In a transaction of our own: that it commits proves that nobody has taken our id over.
    fn claim(&mut self, claims: &[(i32, Line)]) -> Result<(), Broken> {
        let Some(writer) = &self.writer else {
            return Err(Broken::Aborted("there is no connection".to_owned()));
        };
        writer.begin()?;
        for (home, line) in claims {
            writer.line(&self.place.route, &self.place.marks, *home, line, None)?;
        }
        writer.delivered()?;
        writer.commit()
    }

    /// What a broken transaction means to the caller. Before the commit was asked for, nothing is in.
    pub(super) fn refused(&mut self, broken: Broken) -> SinkError {
        match broken {
            Broken::Aborted(reason) | Broken::Generation(reason) => not_applied(reason),
            Broken::Refused(rows) => {
                not_applied(rows.into_iter().map(|(_, reason)| reason).collect::<Vec<_>>().join("; "))
            }
            Broken::Unknown(reason) => {
                self.writer = None;
                SinkError::Unknown { reason }
            }
            Broken::Dead { reason, fenced } => {
                self.writer = None;
                match fenced.then(|| self.find_lost()) {
                    Some(Ok(Some(fault)) | Err(fault)) => fault,
                    Some(Ok(None)) => {
                        not_applied(format!("{reason}: another process took our transactional id over"))
                    }
                    None => not_applied(reason),
                }
            }
        }
    }

    /// Looks who has taken shards of ours; the first of them.
    fn find_lost(&mut self) -> Result<Option<SinkError>, SinkError> {
        let mut shards: Vec<ShardId> = self.owned.keys().cloned().collect();
        shards.sort();
        // Whoever fenced us has yet to write its claim.
        let until = Instant::now() + GRACE * 2;
        loop {
            let book = self.look(&shards, false)?;
            let mut first = None;
            let mut lost = Vec::new();
            for shard in &shards {
                let Some(known) = book.ledger.shard(shard) else { continue };
                if self.owned.get(shard).is_some_and(|owned| known.state.epoch > owned.state.epoch) {
                    first.get_or_insert_with(|| fenced_by(shard, &known.state));
                    lost.push((shard.clone(), known.state.owner.clone(), known.state.epoch));
                }
            }
            drop(book);
            for (shard, owner, epoch) in lost {
                if let Some(owned) = self.owned.get_mut(&shard) {
                    owned.lost = Some((owner, epoch));
                }
            }
            if first.is_some() || Instant::now() > until {
                return Ok(first);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(super) fn resolve(
        &mut self,
        steps: &[ShardStep],
    ) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        self.writer = None;
        self.connect()?;
        let shards: Vec<ShardId> = steps.iter().map(|step| step.shard.clone()).collect();
        let of =
            |step: &ShardStep, raised: Option<&i64>| raised.copied().unwrap_or(step.epoch).max(step.epoch);
        let ours =
            steps.iter().map(|step| (step.shard.clone(), of(step, self.raised.get(&step.shard)))).collect();
        let least = steps.iter().map(|step| (step.shard.clone(), step.epoch)).collect();
        // A claim that was not heard of must not be taken for another owner's.
        for step in steps {
            let raised = self.raised.entry(step.shard.clone()).or_insert(step.epoch);
            *raised = (*raised).max(step.epoch);
        }
        let states = self.take(&shards, &Acquire::Force, &least, &ours)?;
        for state in &states {
            self.raised.insert(state.shard.clone(), state.epoch);
        }
        let applied =
            steps.iter().zip(&states).filter(|(step, state)| state.sequence >= step.sequence).count();
        let resolution = if applied == 0 {
            Resolution::NotApplied
        } else if applied < steps.len() {
            let reason = format!(
                "{applied} of {} shards of one batch have moved: lines of the marks topic are lost",
                steps.len()
            );
            return Err(SinkError::Unknown { reason });
        } else {
            let mut marks: Vec<(usize, Mark)> = Vec::new();
            for (index, step) in steps.iter().enumerate() {
                let found = self.place.book.lock().marks(&step.shard, step.sequence - 1)?;
                marks.extend(
                    found.into_iter().find(|mark| mark.sequence == step.sequence).map(|mark| (index, mark)),
                );
            }
            Resolution::Applied(marks)
        };
        for step in steps {
            self.raised.remove(&step.shard);
        }
        Ok((resolution, states))
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
        let book = self.look(&shards, false)?;
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
                if state.watermark_ms == i64::MIN {
                    owned.state.watermark_ms = state.watermark_ms;
                }
            }
        }
        Ok(())
    }

    pub(super) fn heartbeat(&mut self, owned: &[(ShardId, i64)]) -> Result<(), SinkError> {
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
        let book = self.look(&shards, false)?;
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
}

pub(super) fn fenced_by(shard: &str, state: &State) -> SinkError {
    SinkError::Fenced { shard: shard.to_owned(), owner: state.owner.clone(), epoch: state.epoch }
}
