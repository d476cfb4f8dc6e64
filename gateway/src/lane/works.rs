//! The chunks a lane holds: who waits for their answers, and which records still lack one. Pure.

use std::sync::Arc;

use tokio::{sync::oneshot, time::Instant};

use super::judge::Via;
use crate::{
    naming::{Chunk, Named},
    outcome::Answer,
};

/// One record of one chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Taken {
    pub(crate) work: u32,
    pub(crate) index: u32,
    /// Counts up in the lane with every record that is queued.
    pub(crate) order: u64,
}

/// A chunk with whoever waits for it.
pub(crate) struct Work {
    pub(crate) chunk: Arc<Chunk>,
    pub(crate) via: Via,
    /// Relay: the slots' generations when the chunk was cut.
    generations: Option<Arc<[(u32, u64)]>>,
    pub(crate) received: Instant,
    answers: Vec<Option<Answer>>,
    open: usize,
    reply: Option<oneshot::Sender<Vec<Answer>>>,
}

/// Who hears the answers of which chunk.
#[cfg(test)]
pub(crate) type Heard = Vec<(u32, oneshot::Receiver<Vec<Answer>>)>;

/// A slab of chunks.
#[derive(Default)]
pub(crate) struct Works {
    slots: Vec<Option<Work>>,
    free: Vec<u32>,
    bytes: usize,
}

impl Works {
    /// Bytes of all chunks.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn submit(
        &mut self,
        chunk: Chunk,
        reply: oneshot::Sender<Vec<Answer>>,
        received: Instant,
    ) -> Option<u32> {
        let open = chunk.records.len();
        if open == 0 {
            // Nobody listening is no fault: a dropped connection cancels nothing (rule 4).
            drop(reply.send(Vec::new()));
            return None;
        }
        Some(self.insert(Work {
            chunk: Arc::new(chunk),
            via: Via::Call,
            generations: None,
            received,
            answers: vec![None; open],
            open,
            reply: Some(reply),
        }))
    }

    pub(crate) fn relay(
        &mut self,
        chunk: Chunk,
        generations: Arc<[(u32, u64)]>,
        received: Instant,
    ) -> Option<u32> {
        let open = chunk.records.len();
        (open > 0).then(|| {
            self.insert(Work {
                chunk: Arc::new(chunk),
                via: Via::Relay,
                generations: Some(generations),
                received,
                answers: Vec::new(),
                open,
                reply: None,
            })
        })
    }

    /// The same once more, and who hears the answers of the callers' chunks in it.
    #[cfg(test)]
    pub(crate) fn twin(&self) -> (Self, Heard) {
        let mut heard = Vec::new();
        let twin_of = |(id, work): (usize, &Option<Work>)| {
            let work = work.as_ref()?;
            let reply = work.reply.is_some().then(|| {
                let (reply, answers) = oneshot::channel();
                heard.push((id as u32, answers));
                reply
            });
            Some(Work {
                chunk: work.chunk.clone(),
                generations: work.generations.clone(),
                answers: work.answers.clone(),
                reply,
                ..*work
            })
        };
        let slots = self.slots.iter().enumerate().map(twin_of).collect();
        (Self { slots, free: self.free.clone(), bytes: self.bytes }, heard)
    }

    /// All chunks count as cut since the last seek.
    #[cfg(test)]
    pub(crate) fn forget_generations(&mut self) {
        self.slots.iter_mut().flatten().for_each(|work| work.generations = None);
    }

    fn insert(&mut self, work: Work) -> u32 {
        self.bytes += work.chunk.bytes.len();
        match self.free.pop() {
            Some(id) => {
                self.slots[id as usize] = Some(work);
                id
            }
            None => {
                self.slots.push(Some(work));
                (self.slots.len() - 1) as u32
            }
        }
    }

    /// The chunk of a record that has no answer yet.
    pub(crate) fn get(&self, id: u32) -> &Work {
        self.slots[id as usize].as_ref().expect("a queued or parked record keeps its chunk alive")
    }

    pub(crate) fn named(&self, taken: Taken) -> &Named {
        &self.get(taken.work).chunk.records[taken.index as usize]
    }

    /// Whether the record belongs to the slot's current generation.
    pub(crate) fn is_current(&self, taken: Taken, slot: u32, generation: u64) -> bool {
        match &self.get(taken.work).generations {
            None => true,
            Some(list) => list.iter().any(|&(s, g)| s == slot && g == generation),
        }
    }

    /// Gives the record its answer; the chunk's caller hears of it once every record has one.
    pub(crate) fn answer(&mut self, taken: Taken, answer: Answer) {
        let Some(Some(work)) = self.slots.get_mut(taken.work as usize) else { return };
        if let Some(place) = work.answers.get_mut(taken.index as usize) {
            debug_assert!(place.is_none(), "one outcome per record");
            *place = Some(answer);
        }
        self.close(taken.work);
    }

    /// The record needs no answer (a relay's, or one that is read again).
    pub(crate) fn drop_record(&mut self, taken: Taken) {
        self.close(taken.work);
    }

    fn close(&mut self, id: u32) {
        let Some(Some(work)) = self.slots.get_mut(id as usize) else { return };
        work.open -= 1;
        if work.open > 0 {
            return;
        }
        if let Some(mut work) = self.slots[id as usize].take() {
            self.free.push(id);
            self.bytes -= work.chunk.bytes.len();
            if let Some(reply) = work.reply.take() {
                drop(reply.send(work.answers.into_iter().flatten().collect()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Outcome;

    fn chunk(records: usize) -> Chunk {
        let named = Named {
            fingerprint: None,
            digest: dedup_store::Digest(0),
            event_ms: 0,
            kind: adapters::sink::RowKind::Write,
            payload: None,
            row: 0..0,
            row_key: 0..0,
            shard: 3,
            position: None,
            problem: None,
        };
        Chunk { records: vec![named; records], ..Chunk::default() }
    }

    fn answer(outcome: Outcome) -> Answer {
        Answer { outcome, fingerprint: None, first: None, problem: None }
    }

    #[test]
    fn answers_come_in_the_order_of_the_records_once_all_are_there() {
        let mut works = Works::default();
        let (tx, mut rx) = oneshot::channel();
        let id = works.submit(chunk(2), tx, Instant::now()).unwrap();
        works.answer(Taken { work: id, index: 1, order: 1 }, answer(Outcome::Duplicate));
        assert!(rx.try_recv().is_err());
        works.answer(Taken { work: id, index: 0, order: 0 }, answer(Outcome::Written));
        let outcomes: Vec<_> = rx.try_recv().unwrap().into_iter().map(|a| a.outcome).collect();
        assert_eq!(outcomes, [Outcome::Written, Outcome::Duplicate]);
    }

    #[test]
    fn an_empty_chunk_is_answered_at_once() {
        let (tx, mut rx) = oneshot::channel();
        assert!(Works::default().submit(chunk(0), tx, Instant::now()).is_none());
        assert_eq!(rx.try_recv().unwrap(), vec![]);
    }

    #[test]
    fn a_chunk_of_an_older_generation_is_not_current() {
        let mut works = Works::default();
        let id = works.relay(chunk(1), Arc::from([(3, 1)]), Instant::now()).unwrap();
        let taken = Taken { work: id, index: 0, order: 0 };
        assert!(works.is_current(taken, 3, 1));
        assert!(!works.is_current(taken, 3, 2));
    }

    #[test]
    fn a_finished_chunk_gives_its_place_back() {
        let mut works = Works::default();
        for _ in 0..3 {
            let chunk = Chunk { bytes: vec![0; 10], ..chunk(1) };
            let id = works.relay(chunk, Arc::from([]), Instant::now()).unwrap();
            assert_eq!((id, works.bytes()), (0, 10));
            works.drop_record(Taken { work: id, index: 0, order: 0 });
            assert_eq!(works.bytes(), 0);
        }
    }
}
