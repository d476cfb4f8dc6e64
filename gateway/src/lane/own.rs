//! Taking shards over, keeping them, losing them (P3 to P6, P13).

use std::{
    collections::{BTreeMap, HashMap},
    sync::atomic::Ordering,
    time::Duration,
};

use adapters::sink::{
    Acquire, Receipts, Resolution, RowOutcome, Session, ShardId, ShardState, ShardStep, SinkError,
};
use dedup_store::{Block, Fingerprint, Settled};
use tokio::time::Instant;
use tracing::{error, info, warn};

use super::{
    AssignedShard, FromLane, Wanted,
    run::{CALL_SLOT, Flight, InFlight, Lane},
    shard::{Last, OwnedShard, Standing},
};
use crate::{
    clock::wall_ms,
    heartbeat::{Beating, HEARTBEAT},
    route::{Behind, LearnError, Sight, shared_floor_ms},
};

const EXPIRE_MARKS: Duration = Duration::from_secs(30);
/// An owner whose heartbeat is older is dead. Three heartbeats, so that one slow commit does not count as death.
pub(crate) const STALE_OWNER_MS: i64 = 6_000;
/// A lane that is to end asks no longer than this what became of its last batch, or tries again to bring it in.
pub(super) const LAST_PATIENCE: Duration = Duration::from_secs(10);
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MOST: Duration = Duration::from_secs(2);

/// What became of a batch whose outcome was unknown.
pub(super) enum Resolved {
    /// It is in, with these outcomes and facts.
    Applied(Receipts, Vec<Block>),
    /// It is not, and can no longer come; or it is, and its facts are learnt.
    NotApplied,
    /// The lane ends before it could be known.
    Unresolved,
}

impl Lane {
    /// Whether verdicts may be given: connected, owner of the call shard, and in the route's present history. Otherwise acquires
    /// again until they may; callers hear at once that they may not. False if the lane is to end first. `in_hand`: the lane has a
    /// batch that is in no queue.
    pub(super) async fn ready(&mut self, in_hand: bool) -> bool {
        let mut pause = RETRY_FIRST;
        loop {
            let owns = self.call_shard.is_none() || self.slots.contains_key(&CALL_SLOT);
            let current = *self.route.history.read() == self.history;
            if owns && current && !self.recheck && self.connected() {
                return true;
            }
            match self.reacquire().await {
                Ok(()) => return true,
                Err(reason) => {
                    self.route.set_trouble(self.id, Some(reason.clone()));
                    self.answer_unavailable(&reason);
                }
            }
            if self.stopping {
                return false;
            }
            self.set_busy(in_hand || self.has_records());
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MOST);
            self.take_in_all_offline();
        }
    }

    /// Takes in no more than a lane at work would: the sink may be away for long, and the inbox is the relay's back-pressure.
    fn take_in_all_offline(&mut self) {
        // A full inbox keeps the word to stop out.
        self.stopping |= self.route.closing.load(Ordering::Acquire);
        let most = self.route.rules.max_records;
        while self.queue.len() < most || self.hands_over() {
            match self.inbox.try_recv() {
                Ok(message) => self.take_in_offline(message),
                Err(tokio::sync::mpsc::error::TryRecvError::Empty) => return,
                Err(tokio::sync::mpsc::error::TryRecvError::Disconnected) => {
                    self.stopping = true;
                    return;
                }
            }
        }
    }

    /// Whether the connection stands on which the lane's shards were compared. The session may have made another one since: on that
    /// one nothing was compared (P6).
    pub(super) fn connected(&self) -> bool {
        self.life.stands() && self.session.connected()
    }

    /// Acquires all of the lane's shards, compares each with what is known here, and learns or rebuilds what differs, before
    /// any verdict. The text says why it could not.
    async fn reacquire(&mut self) -> Result<(), String> {
        let route = self.route.clone();
        self.route.sees(self.id, Sight::Lost);
        self.session.acquire(&[], Acquire::Force).await.map_err(|fault| fault.to_string())?;
        // All that follows is to be asked on one connection.
        let life = self.session.life();
        // Callers' shards first: they live while facts are learnt, which may take long. Partitions are given by the group.
        let mut taken: BTreeMap<u32, ShardState> = BTreeMap::new();
        for (slot, id) in self.wanted(true) {
            let how = Acquire::IfFree { stale_after_ms: STALE_OWNER_MS };
            taken.insert(slot, self.take(slot, &id, how).await?);
        }
        let owned: Vec<(ShardId, i64)> =
            taken.values().map(|state| (state.shard.clone(), state.epoch)).collect();
        // A rebuild that another lane began, or left half done, comes first: until it is whole, facts are missing.
        let learnt = route.complete(&mut self.beating(&owned)).await;
        let mut history = learnt.map_err(|fault| fault.to_string())?;
        if let Some(behind) = route.behind(&mut *self.session).await.map_err(|fault| fault.to_string())? {
            let rebuilt = route.went_back(&mut self.beating(&owned), &behind, history).await;
            history = rebuilt.map_err(|fault| fault.to_string())?;
        }
        let mut rewind_all = history != self.history;
        if rewind_all {
            self.discard_floors();
        }
        for (slot, id) in self.wanted(false) {
            taken.insert(slot, self.take(slot, &id, Acquire::Force).await?);
        }
        let mut rebuilt_here = false;
        'again: loop {
            for (slot, state) in &taken {
                let mine = self.slots.get(slot).map(|shard| shard.last);
                let known = match mine {
                    Some(last) if !rewind_all => last,
                    _ => self.route.known(&state.shard),
                };
                let standing = route.catch_up(&mut self.beating(&owned), state, known, history).await;
                match standing.map_err(|fault| fault.to_string())? {
                    Standing::Level => self.adopt(*slot, state, rewind_all),
                    Standing::SinkAhead => self.adopt(*slot, state, true),
                    standing @ (Standing::Regressed | Standing::Forgotten) => {
                        if std::mem::replace(&mut rebuilt_here, true) {
                            // It moved on while everything was learnt: as it was taken it does not stand any more.
                            return Err("another owner has taken a shard over while facts were learnt".into());
                        }
                        let behind = [Behind::new(known, state, standing)];
                        let rebuilt = route.went_back(&mut self.beating(&owned), &behind, history).await;
                        history = rebuilt.map_err(|fault| fault.to_string())?;
                        rewind_all = true;
                        self.discard_floors();
                        continue 'again;
                    }
                }
            }
            break;
        }
        if rewind_all {
            self.raise_shared_floors().await.map_err(|fault| fault.to_string())?;
        }
        if *self.route.history.read() != history {
            return Err("the sink went back again while shards were acquired".into());
        }
        if !life.stands() {
            return Err("the connection ended while shards were acquired".into());
        }
        self.history = history;
        self.recheck = false;
        self.heartbeat_at = Instant::now();
        self.life = life.clone();
        self.route.sees(self.id, Sight::Clear(life));
        self.route.set_trouble(self.id, None);
        Ok(())
    }

    /// The lane's callers' shards, or its partitions.
    fn wanted(&self, callers: bool) -> Vec<(u32, ShardId)> {
        let own = self.call_shard.iter().filter(|_| callers).map(|id| (CALL_SLOT, id.clone()));
        let held =
            self.slots.iter().filter(|(slot, shard)| **slot != CALL_SLOT && shard.is_callers() == callers);
        own.chain(held.map(|(slot, shard)| (*slot, shard.id.clone()))).collect()
    }

    async fn take(&mut self, slot: u32, id: &ShardId, how: Acquire) -> Result<ShardState, String> {
        match self.session.acquire(std::slice::from_ref(id), how).await {
            Ok(states) => {
                self.held_elsewhere = false;
                one(states, id)
            }
            Err(SinkError::Held { shard, owner, .. }) => {
                self.held_elsewhere = true;
                Err(self.lost(slot, &shard, &owner))
            }
            Err(fault) => Err(fault.to_string()),
        }
    }

    /// The session, shards that were taken over on its connection shown to live while it is asked for long.
    fn beating(&mut self, owned: &[(ShardId, i64)]) -> Beating<'_> {
        Beating::new(&mut *self.session, owned.to_vec(), &mut self.heartbeat_at)
    }

    /// Floors of a history that the sink has lost say nothing of the one that it has (P6).
    fn discard_floors(&mut self) {
        self.slots.values_mut().for_each(|shard| shard.floor_ms = i64::MIN);
    }

    /// As when the route was opened: [`crate::route::shared_floor_ms`].
    async fn raise_shared_floors(&mut self) -> Result<(), SinkError> {
        let anywhere = self.route.rules.copies_anywhere;
        let shares = |shard: &OwnedShard| shard.is_callers() || anywhere;
        if !self.slots.values().any(shares) {
            return Ok(());
        }
        let floor_ms = shared_floor_ms(&mut *self.session).await?;
        for shard in self.slots.values_mut().filter(|shard| shares(shard)) {
            shard.floor_ms = shard.floor_ms.max(floor_ms);
        }
        Ok(())
    }

    /// The sink's word on a shard holds. `rewind`: what was read of it since is read again.
    fn adopt(&mut self, slot: u32, state: &ShardState, rewind: bool) {
        let Some(shard) = self.slots.get_mut(&slot) else {
            self.slots.insert(slot, OwnedShard::new(state));
            return;
        };
        // What the route has forgotten stays forgotten where copies of it may come, whichever shard forgot it (P11).
        let shares = slot == CALL_SLOT || self.route.rules.copies_anywhere;
        let floor_ms = if shares { shard.floor_ms } else { i64::MIN };
        // Had another owner written in between, what lies below the position may be what it has read, and counted.
        let nobody_between = shard.alone_wrote(state);
        shard.adopt(state);
        shard.floor_ms = shard.floor_ms.max(floor_ms);
        if rewind && slot != CALL_SLOT && !planted!(PositionNotSought) {
            self.next_generation += 1;
            shard.rewind(self.next_generation);
            if nobody_between {
                self.count_covered(slot, state.position);
            }
            self.tally.remove(&slot);
            let Some(shard) = self.slots.get(&slot) else { return };
            let seek = FromLane::Seek { slot, generation: shard.generation, position: shard.position };
            if let Some(events) = &self.events {
                drop(events.send(seek));
            }
        }
    }

    /// Partitions were assigned: fence them, learn their facts, say where to read on.
    pub(super) async fn assign(&mut self, shards: Vec<Wanted>) -> Result<Vec<AssignedShard>, String> {
        if !self.connected() || self.recheck {
            self.reacquire().await?;
        }
        let ids: Vec<ShardId> = shards.iter().map(|wanted| wanted.shard.clone()).collect();
        let acquired = async {
            let states = self.session.acquire(&ids, Acquire::Force).await?;
            let sources = keep_sources(&mut *self.session, &shards, &states).await?;
            Ok::<_, SinkError>((states, sources))
        };
        let (states, mut sources) = match acquired.await {
            Ok(acquired) => acquired,
            Err(fault) => {
                self.recheck |= !self.connected();
                return Err(fault.to_string());
            }
        };
        self.tell_namesakes(&states);
        let (route, history) = (self.route.clone(), self.history);
        // In this lane's care beside its partitions.
        let callers = self.slots.values().filter(|shard| shard.is_callers());
        let owned: Vec<(ShardId, i64)> = callers.map(|shard| (shard.id.clone(), shard.epoch)).collect();
        let mut assigned = Vec::with_capacity(shards.len());
        for (wanted, mut state) in shards.into_iter().zip(states) {
            let (slot, id) = (wanted.slot, wanted.shard);
            let source = sources.remove(&id);
            let another = source.is_some() && source.as_deref() != wanted.source.as_deref();
            if another && wanted.renew {
                state.position = None;
            }
            let seen = *self.route.history.read();
            let known = if planted!(FactsNotLearnt) {
                Last::of(&state.lineage, state.sequence)
            } else {
                self.route.known(&id)
            };
            let standing = route.catch_up(&mut self.beating(&owned), &state, known, seen).await;
            let standing = standing.map_err(|fault| fault.to_string())?;
            if standing.is_lost() {
                let behind = [Behind::new(known, &state, standing)];
                let rebuilt = route.went_back(&mut self.beating(&owned), &behind, history).await;
                rebuilt.map_err(|fault| fault.to_string())?;
                // The lane's other shards belong to the lost history too.
                self.recheck = true;
            }
            let mut shard = OwnedShard::new(&state);
            let rules = &self.route.rules;
            if rules.copies_anywhere {
                // After its marks: one that expired before it was learnt has raised its floor by now.
                let floor_ms =
                    shared_floor_ms(&mut *self.session).await.map_err(|fault| fault.to_string())?;
                shard.floor_ms = shard.floor_ms.max(floor_ms);
            }
            let forgotten_ms = self.route.store.forgets_ms(wall_ms());
            if self.route.marks && shard.lags_behind(forgotten_ms, rules.lateness_ms, rules.window_ms) {
                // Nothing of what this shard needs is gone from the sink. Its owner was slower than this instance, or dead.
                info!(route = %self.route.name, shard = %id, watermark_ms = state.watermark_ms, forgotten_ms,
                      "the shard lags behind what this instance has forgotten");
                let rebuilt = route.rebuild(&mut self.beating(&owned), history).await;
                rebuilt.map_err(|fault| fault.to_string())?;
                self.recheck = true;
            }
            self.next_generation += 1;
            shard.rewind(self.next_generation);
            assigned.push(AssignedShard {
                slot,
                generation: shard.generation,
                position: state.position,
                source,
            });
            self.tally.remove(&slot);
            self.slots.insert(slot, shard);
        }
        // It owns something now that could have gone back (P6).
        self.route.sees(self.id, Sight::Clear(self.life.clone()));
        Ok(assigned)
    }

    /// Partitions that begin at their start although the sink had one of the same name in another cluster when the route was opened:
    /// perhaps the brokers are not those that are meant.
    fn tell_namesakes(&self, states: &[ShardState]) {
        let known = self.route.at_opening.lock();
        for ShardState { shard, .. } in states.iter().filter(|state| state.position.is_none()) {
            if let Some(namesake) = known.iter().find(|known| same_partition(known, shard)) {
                warn!(route = %self.route.name, lane = self.id, %shard, %namesake,
                    "the partition is read from its start; the sink has a position of a partition of the same name in another \
                     cluster: see that `brokers` are those that you mean");
            }
        }
    }

    /// Keeps the counts of partitions with the shards; answers with those that were kept before. None if the sink cannot be asked.
    pub(super) async fn keep_partitions(&mut self, counts: Vec<(u32, i64)>) -> Option<Vec<(u32, i64)>> {
        if !self.connected() {
            return None;
        }
        let owned: Vec<(u32, i64, &OwnedShard)> = counts
            .into_iter()
            .filter_map(|(slot, count)| Some((slot, count, self.slots.get(&slot)?)))
            .collect();
        let kept: Vec<(ShardId, i64, i64)> =
            owned.iter().map(|(_, count, shard)| (shard.id.clone(), shard.epoch, *count)).collect();
        let slots: Vec<u32> = owned.into_iter().map(|(slot, ..)| slot).collect();
        match self.session.keep_partitions(&kept).await {
            Ok(before) => {
                Some(slots.into_iter().zip(before).filter_map(|(slot, n)| Some((slot, n?))).collect())
            }
            Err(fault) => {
                warn!(route = %self.route.name, lane = self.id, "the number of partitions is not kept: {fault}");
                None
            }
        }
    }

    /// The shard is not this lane's any more: its records are dropped where they wait.
    pub(super) fn drop_slot(&mut self, slot: u32) {
        self.slots.remove(&slot);
        self.unpark = true;
    }

    /// The relay stops reading a shard.
    pub(super) fn stop_slot(&mut self, slot: u32, reason: &str) {
        let Some(shard) = self.slots.get(&slot) else { return };
        error!(route = %self.route.name, lane = self.id, shard = %shard.id, "stopped: {reason}");
        let generation = shard.generation;
        self.drop_slot(slot);
        if let Some(events) = &self.events {
            drop(events.send(FromLane::Stopped { slot, generation, reason: reason.into() }));
        }
    }

    /// Another owner has taken a shard over.
    pub(super) fn fenced(&mut self, shard: &str, owner: &str, epoch: i64) {
        let found = self.slots.iter().find(|(_, owned)| &*owned.id == shard);
        let found = found.map(|(&slot, owned)| (slot, owned.generation));
        let reason = format!("fenced: shard {shard} now belongs to {owner} (epoch {epoch})");
        // It may have taken it on a sink that went back: all is compared before the next verdict (P6).
        self.recheck = true;
        error!(route = %self.route.name, lane = self.id, "{reason}");
        match found {
            Some((CALL_SLOT, _)) => {
                self.drop_slot(CALL_SLOT);
                self.route.sees(self.id, Sight::Lost);
                self.route.set_trouble(self.id, Some(reason.clone()));
                self.answer_unavailable(&reason);
            }
            Some((slot, generation)) => {
                self.drop_slot(slot);
                if let Some(events) = &self.events {
                    drop(events.send(FromLane::Fenced { slot, generation, owner: owner.into(), reason }));
                }
            }
            None => {}
        }
    }

    /// A callers' shard has another live owner, as a new connection shows. Says so once; answers with why the lane has to wait,
    /// in words that stay the same while it waits.
    fn lost(&mut self, slot: u32, shard: &str, owner: &str) -> String {
        if self.slots.contains_key(&slot) {
            error!(route = %self.route.name, lane = self.id, "fenced: shard {shard} now belongs to {owner}");
            self.drop_slot(slot);
        }
        format!("shard {shard} is held by {owner}")
    }

    /// What is due while the lane is idle: heartbeats, expiry of marks, a new connection when the old one ended.
    pub(super) async fn tick(&mut self) {
        if self.slots.is_empty() && self.call_shard.is_none() {
            // It owns nothing that could have gone back: verdicts need not wait for it, nor for what was in its way.
            self.route.sees(self.id, Sight::Needless);
            self.route.set_trouble(self.id, None);
            return;
        }
        let owns = self.call_shard.is_none() || self.slots.contains_key(&CALL_SLOT);
        let current = *self.route.history.read() == self.history;
        if !self.connected() || self.recheck || !owns || !current {
            // Records may come meanwhile; not while another owner has the shard, for they are refused then.
            self.set_busy(!self.held_elsewhere);
            if let Err(reason) = self.reacquire().await {
                self.route.set_trouble(self.id, Some(reason));
                self.set_busy(self.has_records());
            }
            return;
        }
        if !self.has_records() {
            // Nothing stands in anybody's way.
            self.route.set_trouble(self.id, None);
        }
        let owned: Vec<(ShardId, i64)> =
            self.slots.values().map(|shard| (shard.id.clone(), shard.epoch)).collect();
        let floor = self.route.store.floors(wall_ms()).retire_ms;
        let expired = if self.expired_at.elapsed() >= EXPIRE_MARKS && floor > i64::MIN {
            match self.session.expire_marks(&owned, floor).await {
                Ok(gone) => {
                    // A call does bounded work. While it finds some, the next tick goes on: marks must not be made faster than
                    // they expire.
                    if gone > 0 {
                        info!(route = %self.route.name, lane = self.id, gone, "marks expired");
                    } else {
                        self.expired_at = Instant::now();
                    }
                    self.slots.values_mut().for_each(|shard| shard.floor_ms = shard.floor_ms.max(floor));
                    Ok(())
                }
                Err(fault) => {
                    self.expired_at = Instant::now();
                    Err(fault)
                }
            }
        } else {
            Ok(())
        };
        let done = if expired.is_err() {
            expired
        } else if self.heartbeat_at.elapsed() >= HEARTBEAT {
            self.heartbeat_at = Instant::now();
            self.session.heartbeat(&owned).await
        } else {
            Ok(())
        };
        match done {
            Ok(()) => {}
            Err(SinkError::Fenced { shard, owner, epoch }) => self.fenced(&shard, &owner, epoch),
            Err(fault) => warn!(route = %self.route.name, lane = self.id, "{fault}"),
        }
    }

    /// After `Unknown`: asks until it is known (P5). A shard that another owner has taken meanwhile can get nothing of the old
    /// attempt any more, and its marks say whether the batch is in.
    pub(super) async fn resolve(&mut self, flight: &Flight) -> Resolved {
        // Whatever comes out, the connection is a new one: all other shards are compared before the next verdict.
        self.recheck = true;
        self.route.sees(self.id, Sight::Lost);
        if planted!(ClaimsFreeWhileUnknown) {
            self.route.store.release_lane(self.id);
            self.route.changed.notify_waiters();
        }
        let mut pause = RETRY_FIRST;
        // Shards that were handed over meanwhile are asked about too: they are only taken if nobody else has.
        let mut ours: Vec<usize> = (0..flight.steps.len()).collect();
        let mut patience: Option<Instant> = None;
        loop {
            let reason = match self.ask(flight, &mut ours).await {
                Ok(Some(resolved)) => return resolved,
                Ok(None) => continue,
                Err(fault) => format!("asking what became of a batch: {fault}"),
            };
            self.route.set_trouble(self.id, Some(reason));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MOST);
            self.take_in_all_offline();
            if self.stopping && *patience.get_or_insert(Instant::now() + LAST_PATIENCE) <= Instant::now() {
                return Resolved::Unresolved;
            }
        }
    }

    /// Asks once. None: one of `ours` is another owner's now, ask about the rest.
    async fn ask(&mut self, flight: &Flight, ours: &mut Vec<usize>) -> Result<Option<Resolved>, LearnError> {
        let resolution = if ours.is_empty() {
            // Nothing of it can come any more. The facts are learnt before its keys are given back.
            self.session.acquire(&[], Acquire::Force).await?;
            Resolution::NotApplied
        } else {
            let steps: Vec<ShardStep> = ours.iter().map(|&at| flight.steps[at].clone()).collect();
            match self.session.resolve(&steps).await {
                Ok((resolution, states)) => {
                    for state in &states {
                        let owned = self.slots.values_mut().find(|shard| shard.id == state.shard);
                        if let Some(shard) = owned {
                            shard.epoch = shard.epoch.max(state.epoch);
                        }
                    }
                    resolution
                }
                Err(SinkError::Fenced { shard, owner, epoch }) => {
                    ours.retain(|&at| *flight.steps[at].shard != *shard);
                    if self.slots.values().any(|owned| *owned.id == *shard) {
                        self.fenced(&shard, &owner, epoch);
                    }
                    return Ok(None);
                }
                Err(fault) => return Err(fault.into()),
            }
        };
        // Of shards that are another's now, this process learns what the sink holds: its own batch, if that is in.
        let route = self.route.clone();
        for (at, step) in flight.steps.iter().enumerate() {
            if !ours.contains(&at) {
                route.learn_marks_of(&mut self.beating(&[]), &step.shard).await?;
            }
        }
        Ok(Some(match resolution {
            Resolution::NotApplied => {
                info!(route = %self.route.name, lane = self.id, "nothing of the unknown batch can come any more");
                Resolved::NotApplied
            }
            Resolution::Applied(marks) => {
                info!(route = %self.route.name, lane = self.id, "the unknown batch is in the sink");
                let marks = marks.into_iter().map(|(at, mark)| (ours[at], mark)).collect();
                self.read_back(flight, marks, ours)?
            }
        }))
    }

    /// Outcomes of an applied batch, as its marks tell them: those of `ours`, and of the other shards, which are in the same
    /// transaction, what was learnt into the store.
    fn read_back(
        &self,
        flight: &Flight,
        marks: Vec<(usize, adapters::sink::Mark)>,
        ours: &[usize],
    ) -> Result<Resolved, LearnError> {
        let blocks = marks
            .iter()
            .map(|(step, mark)| self.route.unpack(&flight.steps[*step].shard, mark))
            .collect::<Result<Vec<Block>, _>>()?;
        let settled: HashMap<Fingerprint, Settled> = blocks
            .iter()
            .flat_map(|block| &block.entries)
            .map(|entry| (entry.fingerprint, entry.settled))
            .collect();
        let outcome_of = |record: &InFlight| -> Result<Option<Settled>, LearnError> {
            let Some(fingerprint) = record.named().fingerprint else { return Ok(None) };
            if ours.contains(&record.step) {
                return Ok(settled.get(&fingerprint).copied());
            }
            Ok(self.route.ask_store(|store| store.peek(&fingerprint))?.map(|fact| fact.settled))
        };
        let lost = || "refused by the sink; the reason was lost with the connection".to_owned();
        let rows = flight.rows.iter().map(|record| {
            Ok(match outcome_of(record)? {
                Some(Settled::Written) => RowOutcome::Written,
                Some(Settled::Updated) => RowOutcome::Updated,
                Some(Settled::Stale) => RowOutcome::Stale,
                // A row without an entry was refused and its key left free.
                Some(Settled::Rejected | Settled::DeadLettered | Settled::Forgotten) | None => {
                    RowOutcome::Refused { reason: lost() }
                }
            })
        });
        Ok(Resolved::Applied(Receipts { rows: rows.collect::<Result<_, LearnError>>()? }, blocks))
    }
}

/// Whether two shards are partitions of the same name in two clusters.
fn same_partition(one: &str, other: &str) -> bool {
    fn parts(shard: &str) -> Option<(&str, &str)> {
        shard.strip_prefix("kafka/")?.split_once('/')
    }
    let (Some((cluster, name)), Some((another, namesake))) = (parts(one), parts(other)) else { return false };
    name == namesake && cluster != another
}

/// Keeps the sources that are known with their shards; answers with those that were kept before.
async fn keep_sources(
    session: &mut dyn Session,
    shards: &[Wanted],
    states: &[ShardState],
) -> Result<HashMap<ShardId, String>, SinkError> {
    let mut before = HashMap::new();
    for renew in [false, true] {
        let sources: Vec<(ShardId, i64, String)> = shards
            .iter()
            .zip(states)
            .filter(|(wanted, _)| wanted.renew == renew)
            .filter_map(|(wanted, state)| {
                Some((wanted.shard.clone(), state.epoch, wanted.source.as_ref()?.to_string()))
            })
            .collect();
        if !sources.is_empty() {
            let kept = session.keep_sources(&sources, renew).await?;
            let kept = sources.into_iter().zip(kept).filter_map(|((shard, ..), kept)| Some((shard, kept?)));
            before.extend(kept);
        }
    }
    Ok(before)
}

fn one(mut states: Vec<ShardState>, id: &ShardId) -> Result<ShardState, String> {
    match states.pop() {
        Some(state) if states.is_empty() && state.shard == *id => Ok(state),
        _ => Err(format!("the sink did not answer for shard {id}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p3_a_partition_of_the_same_name_in_another_cluster_is_another_shard() {
        assert!(same_partition("kafka/a/orders/3", "kafka/b/orders/3"));
        for (one, other) in [
            ("kafka/a/orders/3", "kafka/a/orders/3"),
            ("kafka/a/orders/3", "kafka/b/orders/4"),
            ("kafka/a/orders/3", "kafka/b/prices/3"),
            ("http/0", "http/0"),
        ] {
            assert!(!same_partition(one, other), "{one} {other}");
        }
    }
}
