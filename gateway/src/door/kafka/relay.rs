//! The relay's thread: one loop that serves the group, the lanes and the records, and sleeps when there is nothing to do.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    task::{Context, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use adapters::{
    kafka::{Event, KafkaConfig, KafkaFault, KafkaSource, ReadFault, TopicPartition},
    sink::ShardId,
};
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, error, info, warn};

use super::{
    PartitionStatus, Phase, RelayGate, RelayOptions, RelayStatus, Scope, Shared, TopicStatus, align,
    counts::Counts,
    port::{LaneGone, Port},
    slot::{Slot, State},
};
use crate::{
    lane::{AssignedShard, FromLane},
    naming::{Headers, KafkaOrigin, Record},
};

/// Longest sleep: the group is served at least so often.
const NAP: Duration = Duration::from_millis(250);
/// Before something that did not work is tried again.
pub(super) const RETRY: Duration = Duration::from_secs(1);
/// Before a record whose schema was not here is read again.
const SCHEMA_WAIT: Duration = Duration::from_millis(100);
/// How often the status is brought up to date.
const STATUS_EVERY: Duration = Duration::from_millis(100);
/// How often it is looked at which partitions have more.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Records of one partition at a time, so that no partition starves the others of its lane.
const BURST: usize = 1024;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

/// Why a membership of the group is over.
pub(super) enum End {
    /// Another one may do better.
    Again(String),
    /// So is the relay.
    Failed(String),
}

/// The relay's thread, from connecting to leaving the group.
pub(super) fn main<G: RelayGate>(
    gate: &G,
    config: &KafkaConfig,
    options: &RelayOptions,
    mut events: mpsc::UnboundedReceiver<FromLane>,
    shared: &Shared,
) {
    let route = gate.route();
    let ended = catch_unwind(AssertUnwindSafe(|| {
        loop {
            let Some(source) = open(route, config, shared)? else { return Ok(()) };
            info!(route, cluster = source.cluster(), group = config.group, "the relay has joined");
            shared.status.lock().misfits = misfits(route, config, options);
            let mut at_work = AtWork::new(gate, source, config, options, &mut events, shared);
            match at_work.run() {
                Ok(()) => return Ok(()),
                Err(End::Failed(reason)) => {
                    at_work.abandon();
                    return Err(reason);
                }
                Err(End::Again(reason)) => {
                    warn!(route, reason, "the relay leaves the group and joins again");
                    at_work.abandon();
                    at_work.trouble = Some(reason);
                    at_work.publish(Phase::Connecting);
                }
            }
            thread::park_timeout(RETRY);
        }
    }));
    let reason = match ended {
        Ok(Ok(())) => None,
        Ok(Err(reason)) => Some(reason),
        Err(_) => Some("the relay's thread has panicked".to_owned()),
    };
    match &reason {
        None => info!(route, "the relay has stopped"),
        Some(reason) => error!(route, reason, "the relay has stopped"),
    }
    gate.awaits(&[]);
    let mut status = shared.status.lock();
    status.partitions.clear();
    status.phase = Phase::Ended(reason);
}

/// What of topics and group does not fit: said in one list, and nothing is stopped for it.
fn misfits(route: &str, config: &KafkaConfig, options: &RelayOptions) -> Vec<String> {
    match adapters::kafka::misfits(config, options.needs) {
        Ok(misfits) => {
            let all: Vec<String> = misfits.iter().map(ToString::to_string).collect();
            all.iter().for_each(|misfit| warn!(route, "does not fit: {misfit}"));
            all
        }
        Err(fault) => {
            warn!(route, %fault, "topics and group are not checked");
            vec![]
        }
    }
}

/// Connects; none if the relay is stopped before.
fn open(route: &str, config: &KafkaConfig, shared: &Shared) -> Result<Option<KafkaSource>, String> {
    let me = thread::current();
    let wake: Arc<dyn Fn() + Send + Sync> = Arc::new(move || me.unpark());
    while !shared.stop.load(Ordering::Acquire) {
        match KafkaSource::open(config, wake.clone()) {
            Ok(source) => return Ok(Some(source)),
            Err(fault @ KafkaFault::Configuration(_)) => return Err(fault.to_string()),
            Err(fault) => {
                let known = shared.status.lock().trouble.replace(fault.to_string());
                if known.as_ref() != Some(&fault.to_string()) {
                    warn!(route, %fault, "the relay cannot start yet; it tries again");
                }
                thread::park_timeout(RETRY);
            }
        }
    }
    Ok(None)
}

pub(super) struct Assigning {
    pub(super) lane: usize,
    /// Slot and assignment.
    pub(super) slots: Vec<(u32, u64)>,
    pub(super) reply: oneshot::Receiver<Result<Vec<AssignedShard>, String>>,
}

/// Partitions that are being drained.
pub(super) struct Leaving {
    pub(super) partitions: Vec<TopicPartition>,
    pub(super) slots: Vec<u32>,
    pub(super) replies: Vec<oneshot::Receiver<()>>,
    pub(super) deadline: Instant,
    /// Set once the lanes have let go.
    pub(super) last_commit_by: Option<Instant>,
    /// Another member may own them already.
    pub(super) lost: bool,
    /// Not the group's wish but ours: the relay ends.
    pub(super) last: bool,
}

pub(super) struct AtWork<'a, G> {
    pub(super) gate: &'a G,
    pub(super) options: &'a RelayOptions,
    pub(super) shared: &'a Shared,
    pub(super) events: &'a mut mpsc::UnboundedReceiver<FromLane>,
    pub(super) waker: Waker,
    pub(super) drain: Duration,
    pub(super) ports: Vec<Port>,
    pub(super) slots: BTreeMap<u32, Slot>,
    pub(super) numbers: HashMap<TopicPartition, u32>,
    pub(super) assignments: u64,
    pub(super) assigning: Vec<Assigning>,
    /// What the lanes say of the counts that were kept before.
    pub(super) counting: Vec<oneshot::Receiver<Vec<(u32, i64)>>>,
    pub(super) counts: Counts,
    /// The topics' ids, where the brokers have some.
    pub(super) ids: BTreeMap<String, Arc<str>>,
    pub(super) leaving: Option<Leaving>,
    /// Rebalances that came while partitions were drained.
    pub(super) deferred: VecDeque<Event>,
    pub(super) trouble: Option<String>,
    pub(super) records: u64,
    pub(super) skipped: u64,
    pub(super) waits: u64,
    drifts: u64,
    pub(super) committed_at: Instant,
    pub(super) published_at: Instant,
    looked_at: Instant,
    /// Up to where event time is read for now.
    limit_ms: Option<i64>,
    // Last: dropped after the slots' readers, and then leaves the group.
    pub(super) source: KafkaSource,
}

impl<'a, G: RelayGate> AtWork<'a, G> {
    fn new(
        gate: &'a G,
        source: KafkaSource,
        config: &KafkaConfig,
        options: &'a RelayOptions,
        events: &'a mut mpsc::UnboundedReceiver<FromLane>,
        shared: &'a Shared,
    ) -> Self {
        let now = Instant::now();
        // Counters go on through a new membership.
        let RelayStatus { records, skipped, waits, drifts, .. } = *shared.status.lock();
        Self {
            gate,
            options,
            shared,
            events,
            waker: Waker::from(Arc::new(Unpark(thread::current()))),
            drain: options.drain.min(config.max_poll_interval() / 2),
            ports: gate.lanes().iter().map(|lane| Port::new(lane.clone())).collect(),
            slots: BTreeMap::new(),
            numbers: HashMap::new(),
            assignments: 0,
            assigning: vec![],
            counting: vec![],
            counts: Counts::new(source.topics().iter().map(|(topic, count)| (topic.as_str(), *count))),
            ids: source.topic_ids().iter().map(|(topic, id)| (topic.clone(), id.as_str().into())).collect(),
            leaving: None,
            deferred: VecDeque::new(),
            trouble: None,
            records,
            skipped,
            waits,
            drifts,
            committed_at: now,
            published_at: now,
            looked_at: now,
            limit_ms: None,
            source,
        }
    }

    fn run(&mut self) -> Result<(), End> {
        if self.ports.is_empty() {
            return Err(End::Failed("the route has no lanes".to_owned()));
        }
        // An earlier membership may have ended before its last word was heard.
        for port in &mut self.ports {
            drop(port.revoke(None));
        }
        loop {
            if self.shared.stop.load(Ordering::Acquire)
                && self.leaving.as_ref().is_none_or(|leaving| !leaving.last)
            {
                self.leave_for_good();
            }
            self.serve_group()?;
            self.serve_lanes()?;
            self.flush()?;
            self.place_one();
            let more = self.read()?;
            let now = Instant::now();
            if now >= self.committed_at + self.options.commit_every {
                self.committed_at = now;
                self.commit();
            }
            if now >= self.looked_at + LOOK_EVERY {
                self.look_around(now);
            }
            if now >= self.published_at + STATUS_EVERY {
                self.publish(Phase::Running);
            }
            if self.finish_leaving(now) {
                return Ok(());
            }
            if !more {
                thread::park_timeout(self.nap(Instant::now()));
            }
        }
    }

    /// Says which partitions have more (P11).
    pub(super) fn look_around(&mut self, now: Instant) {
        self.looked_at = now;
        let more: Vec<ShardId> =
            self.slots.values().filter(|slot| slot.has_more(now)).map(|slot| slot.shard.clone()).collect();
        self.gate.awaits(&more);
    }

    /// Lets those wait that are far ahead, and those go on that are not any more.
    fn align(&mut self) {
        let max_drift_ms = i64::try_from(self.options.max_drift.as_millis()).unwrap_or(i64::MAX);
        let now = Instant::now();
        self.limit_ms = align::limit(self.slots.values().map(|slot| slot.come(now)), max_drift_ms);
        for slot in self.slots.values_mut() {
            let waits = align::waits(slot.come_ms, self.limit_ms);
            if waits != slot.waits {
                slot.waits = waits;
                debug!(route = self.gate.route(), partition = %slot.at, waits, "far ahead of other partitions");
            }
        }
    }

    /// Until something has to be looked at without being woken.
    pub(super) fn nap(&self, now: Instant) -> Duration {
        let slots = self.slots.values().filter_map(|slot| match slot.state {
            State::Acquiring { again, .. } => again,
            State::Placing { at, .. } => Some(at),
            State::Proving { again, .. } => Some(again),
            State::Reading | State::Stopped { .. } | State::Leaving => None,
        });
        let deadline =
            self.leaving.as_ref().map(|leaving| leaving.last_commit_by.unwrap_or(leaving.deadline));
        let until = slots.chain(deadline).map(|at| at.saturating_duration_since(now)).min();
        until.map_or(NAP, |until| until.min(NAP))
    }

    pub(super) fn flush(&mut self) -> Result<(), End> {
        let mut cx = Context::from_waker(&self.waker);
        for (lane, port) in self.ports.iter_mut().enumerate() {
            port.flush(&mut cx).map_err(|LaneGone| gone(lane))?;
        }
        Ok(())
    }

    /// Why nothing may be read now: copies may be in any partition, and some are not ours, or what came through them is not learnt yet.
    fn partial(&self) -> Option<String> {
        if self.options.scope == Scope::Partition {
            return None;
        }
        let all: i64 = self.counts.all().map(|(_, now, _)| now).sum();
        let ours = |slot: &&Slot| !matches!(slot.state, State::Acquiring { .. } | State::Leaving);
        let count = self.slots.values().filter(ours).count() as i64;
        (count < all).then(|| {
            format!(
                "{count} of {all} partitions are this instance's, and it reads only while it has all of them (scope = \"route\"): run \
                 one instance of the group, or set scope = \"partition\" if all copies of an event are in one partition"
            )
        })
    }

    /// One pass over all partitions whose lane takes more; whether there is more to read.
    fn read(&mut self) -> Result<bool, End> {
        let mut more = false;
        if self.partial().is_some() {
            return Ok(false);
        }
        self.align();
        for lane in 0..self.ports.len() {
            if self.ports[lane].slots.is_empty() || self.ports[lane].blocked() {
                continue;
            }
            more |= self.read_lane(lane);
            let port = &mut self.ports[lane];
            port.cut();
            let mut cx = Context::from_waker(&self.waker);
            port.flush(&mut cx).map_err(|LaneGone| gone(lane))?;
            if port.blocked() {
                self.waits += 1;
            }
        }
        Ok(more)
    }

    fn read_lane(&mut self, lane: usize) -> bool {
        let port = &mut self.ports[lane];
        let count = port.slots.len();
        let mut more = false;
        port.turn = (port.turn + 1) % count;
        for index in 0..count {
            let number = port.slots[(port.turn + index) % count];
            let Some(slot) = self.slots.get_mut(&number) else { continue };
            if !matches!(slot.state, State::Reading) || slot.waits {
                continue;
            }
            let (arrival_us, reads_headers) = (self.gate.arrival_us(), self.gate.reads_headers());
            let mut burst = 0;
            loop {
                let chunk = &mut port.chunk;
                if chunk.records.len() >= self.options.chunk_records
                    || chunk.bytes.len() >= self.options.chunk_bytes
                {
                    return true;
                }
                if burst == BURST {
                    more = true;
                    break;
                }
                let Some(next) = slot.reader.next() else {
                    slot.dry_at = Some(Instant::now());
                    break;
                };
                let found = match next {
                    Ok(found) => found,
                    Err(ReadFault::OutOfRange) => {
                        slot.out_of_range = true;
                        slot.state =
                            State::Placing { position: Some(slot.next), at: Instant::now(), reason: None };
                        more = true;
                        break;
                    }
                    Err(ReadFault::End) => {
                        slot.ended = true;
                        continue;
                    }
                    Err(ReadFault::Trouble(reason)) => {
                        if self.trouble.is_none() {
                            warn!(route = self.gate.route(), partition = %slot.at, reason, "trouble with a partition");
                        }
                        self.trouble = Some(reason);
                        continue;
                    }
                };
                let offset = found.offset();
                if offset < slot.next {
                    continue;
                }
                slot.next = offset + 1;
                slot.ended = false;
                burst += 1;
                self.records += 1;
                let mut pairs = vec![];
                if reads_headers {
                    found.headers(&mut pairs);
                }
                let record = Record {
                    payload: found.payload(),
                    headers: Headers::Pairs(&pairs),
                    kafka: Some(KafkaOrigin {
                        topic: &slot.at.topic,
                        partition: slot.at.partition,
                        offset,
                        key: found.key(),
                        timestamp_ms: found.timestamp_ms(),
                        shard: number,
                    }),
                    arrival_us,
                    tenant: "",
                    index: None,
                };
                if let Some(reason) = self.gate.unreadable_yet(&record) {
                    // Nothing is refused for it: the partition waits, and reads on from here.
                    let at = Instant::now() + SCHEMA_WAIT;
                    slot.next = offset;
                    self.records -= 1;
                    slot.state = State::Placing { position: Some(offset), at, reason: Some(reason) };
                    break;
                }
                let before = chunk.records.len();
                self.gate.name(&record, chunk);
                assert_eq!(chunk.records.len(), before + 1, "one record has one name");
                let event_ms = align::counted(chunk.records[before].event_ms, arrival_us / 1000);
                slot.come_ms = Some(slot.come_ms.map_or(event_ms, |come| come.max(event_ms)));
                if align::waits(slot.come_ms, self.limit_ms) {
                    slot.waits = true;
                    self.drifts += 1;
                    break;
                }
            }
        }
        more
    }

    fn publish(&mut self, phase: Phase) {
        self.published_at = Instant::now();
        let partitions = self.slots.values().map(|slot| PartitionStatus {
            at: slot.at.clone(),
            shard: slot.shard.clone(),
            state: slot.word(),
            reason: slot.state.reason().map(str::to_owned),
            position: slot.offsets.durable,
            next: slot.next,
            end: slot.end,
        });
        let mut status = self.shared.status.lock();
        status.partitions = partitions.collect();
        let topic = |(topic, partitions, before): (&str, i64, Option<i64>)| TopicStatus {
            topic: topic.to_owned(),
            partitions,
            before,
        };
        status.topics = self.counts.all().map(topic).collect();
        status.phase =
            if self.leaving.as_ref().is_some_and(|leaving| leaving.last) { Phase::Leaving } else { phase };
        status.trouble = self.trouble.clone().or_else(|| self.partial());
        status.records = self.records;
        status.skipped = self.skipped;
        status.waits = self.waits;
        status.drifts = self.drifts;
    }
}

pub(super) fn gone(lane: usize) -> End {
    End::Failed(format!("lane {lane} has ended"))
}
