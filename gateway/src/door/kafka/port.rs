//! One lane as the relay sees it: what waits to be sent, in order, and what is being cut.

use std::{
    collections::VecDeque,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tokio::sync::{
    mpsc::{OwnedPermit, error::SendError, error::TrySendError},
    oneshot,
};

use crate::{
    lane::{LaneHandle, ToLane},
    naming::Chunk,
};

type Room = Pin<Box<dyn Future<Output = Result<OwnedPermit<ToLane>, SendError<()>>> + Send>>;

/// The lane has ended.
#[derive(Debug)]
pub(super) struct LaneGone;

pub(super) struct Port {
    lane: LaneHandle,
    outbox: VecDeque<ToLane>,
    room: Option<Room>,
    /// The chunk that is being filled; empty between two passes.
    pub(super) chunk: Chunk,
    /// Slots of this lane.
    pub(super) slots: Vec<u32>,
    /// Whose turn it is to be read first.
    pub(super) turn: usize,
    /// Generations of [`Port::slots`], as the next chunk bears them.
    pub(super) generations: Arc<[(u32, u64)]>,
}

impl Port {
    pub(super) fn new(lane: LaneHandle) -> Self {
        Self {
            lane,
            outbox: VecDeque::new(),
            room: None,
            chunk: Chunk::default(),
            slots: vec![],
            turn: 0,
            generations: Arc::from([]),
        }
    }

    /// Whether the lane takes no more for now.
    pub(super) fn blocked(&self) -> bool {
        !self.outbox.is_empty()
    }

    pub(super) fn send(&mut self, message: ToLane) {
        self.outbox.push_back(message);
    }

    /// Has the lane let slots go, all of an earlier membership's if none are named; answered when it has.
    pub(super) fn revoke(&mut self, slots: Option<Vec<u32>>) -> oneshot::Receiver<()> {
        let (reply, answer) = oneshot::channel();
        self.send(ToLane::Revoke { slots, hand_over: self.lane.hand_over(), reply });
        answer
    }

    /// Moves the chunk, if any, to the outbox.
    pub(super) fn cut(&mut self) {
        if !self.chunk.records.is_empty() {
            // The next one is likely of the same size.
            let next = Chunk {
                bytes: Vec::with_capacity(self.chunk.bytes.len()),
                records: Vec::with_capacity(self.chunk.records.len()),
            };
            let chunk = std::mem::replace(&mut self.chunk, next);
            self.send(ToLane::Relay { chunk, generations: self.generations.clone() });
        }
    }

    /// Sends what the lane has room for; `cx` is woken when it has room for the rest.
    pub(super) fn flush(&mut self, cx: &mut Context<'_>) -> Result<(), LaneGone> {
        if self.lane.queue.is_closed() {
            return Err(LaneGone);
        }
        while let Some(message) = self.outbox.pop_front() {
            if let Some(room) = &mut self.room {
                match room.as_mut().poll(cx) {
                    Poll::Pending => {
                        self.outbox.push_front(message);
                        return Ok(());
                    }
                    Poll::Ready(Err(_)) => return Err(LaneGone),
                    Poll::Ready(Ok(permit)) => {
                        self.room = None;
                        permit.send(message);
                    }
                }
            } else {
                match self.lane.queue.try_send(message) {
                    Ok(()) => {}
                    Err(TrySendError::Closed(_)) => return Err(LaneGone),
                    Err(TrySendError::Full(message)) => {
                        self.outbox.push_front(message);
                        self.room = Some(Box::pin(self.lane.queue.clone().reserve_owned()));
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        task::{Wake, Waker},
    };

    use tokio::sync::mpsc;

    use super::*;

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn slot(message: &ToLane) -> u32 {
        let ToLane::Revoke { slots: Some(slots), .. } = message else { panic!("another message") };
        slots[0]
    }

    #[test]
    fn a_full_lane_keeps_the_order_and_wakes_when_it_has_room() {
        let (queue, mut lane) = mpsc::channel(2);
        let mut port = Port::new(LaneHandle::new(queue));
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let mut cx = Context::from_waker(&waker);
        (0..5).for_each(|slot| drop(port.revoke(Some(vec![slot]))));
        port.flush(&mut cx).unwrap();
        assert!(port.blocked());
        let mut seen = vec![];
        for _ in 0..5 {
            let before = count.0.load(Ordering::Relaxed);
            seen.push(slot(&lane.try_recv().unwrap()));
            assert!(!port.blocked() || count.0.load(Ordering::Relaxed) > before);
            port.flush(&mut cx).unwrap();
        }
        assert_eq!(seen, [0, 1, 2, 3, 4]);
        assert!(!port.blocked());
        drop(lane);
        assert!(port.flush(&mut cx).is_err());
    }
}
