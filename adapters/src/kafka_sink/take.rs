//! Taking shards over (P3, P5, P14): nobody else can commit for them any more, the log is read, the claim holds.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    time::Instant,
};

use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    error::KafkaError,
};

use super::{
    config::ANSWER,
    desk::{Desk, Owned, asking, fenced_by, not_applied},
    ledger::Shard,
    line::{Kind, Line, State},
    writer::{Broken, fence},
};
use crate::{
    lineage::{applied, epoch_above},
    sink::{Acquire, Mark, Resolution, ShardId, ShardState, ShardStep, SinkError},
};

/// Attempts to take shards over from others who take them too.
const ATTEMPTS: usize = 50;

impl Desk {
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
            self.refuse_taken_back(shards)?;
            if let Acquire::IfFree { stale_after_ms } = how {
                // Before anybody's open transaction is waited for, or ended: who only asks disturbs no living owner.
                let found: Vec<Option<Shard>> = {
                    let book = self.glance(shards)?;
                    shards.iter().map(|shard| book.ledger.shard(shard).cloned()).collect()
                };
                self.held(shards, &found, *stale_after_ms)?;
            }
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
                if state.writer != self.place.id && fenced.insert((shard.clone(), state.epoch)) {
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
            let epoch = epoch_above(after.max(least.get(shard).copied().unwrap_or(0)));
            let mut lineage = before.lineage.clone();
            lineage.taken(before.sequence, epoch);
            let state = State {
                epoch,
                lineage,
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

    pub(super) fn resolve(
        &mut self,
        steps: &[ShardStep],
    ) -> Result<(Resolution, Vec<ShardState>), SinkError> {
        self.writer = None;
        self.connect()?;
        // Our id was just taken anew: nothing of the attempt can be committed any more. Whoever has a partition that the group has taken
        // back keeps it.
        if let Some(step) = steps.iter().find(|step| self.is_taken_back(&step.shard)) {
            return Err(SinkError::Fenced {
                shard: step.shard.to_string(),
                owner: "another member of the consumer group".to_owned(),
                epoch: step.epoch,
            });
        }
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
        let resolution = if !applied(steps, &states)? {
            Resolution::NotApplied
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
}
