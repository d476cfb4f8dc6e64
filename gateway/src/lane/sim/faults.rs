//! What goes wrong in the sink, and when: by script or by chance.

use std::collections::{BTreeSet, VecDeque};

use rand::{Rng, SeedableRng, rngs::SmallRng};

/// What befalls one delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DeliverFault {
    /// Nothing.
    None,
    /// Not applied; the connection stays.
    NotAppliedKept,
    /// Not applied; the connection is lost.
    NotAppliedLost,
    /// Not applied, and trying again does not help.
    Final,
    /// Applied, and the answer is lost with the connection.
    UnknownApplied,
    /// Not applied, and nobody says so.
    UnknownLost,
    /// The client is gone and the backend goes on (P5): it tries to commit `after_ms` later. `executed`: its statements are
    /// done, so that it holds the shard rows.
    UnknownLater { after_ms: u64, executed: bool },
    /// The sink answers with no outcome, and nothing is in.
    Silent,
}

/// Calls other than `deliver`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Call {
    Acquire,
    Resolve,
    Look,
    Keep,
}

/// What befalls another call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallFault {
    None,
    /// Nothing was done; the connection is lost.
    Before,
    /// It was done, and the answer is lost with the connection.
    After,
}

/// Chances in a thousand.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rates {
    pub(super) deliver: u32,
    pub(super) call: u32,
    /// Longest delay of a call, ms.
    pub(super) slow_ms: u64,
    /// One answer in so many is late, by up to so many ms.
    pub(super) late_answer: (u32, u64),
    /// An abandoned delivery goes on in the backend.
    pub(super) ghost: u32,
}

/// Scripted faults come first, then chance.
pub(super) struct Faults {
    pub(super) rng: SmallRng,
    pub(super) rates: Rates,
    pub(super) script: VecDeque<DeliverFault>,
    pub(super) calls: VecDeque<(Call, CallFault)>,
    /// Delays of the next deliveries, before and after they apply, ms.
    pub(super) delays: VecDeque<(u64, u64)>,
    /// A page of marks takes so long, ms.
    pub(super) page_ms: u64,
    /// Faults that chance has brought so far, by their number; and if so, the only ones that happen.
    pub(super) fired: u32,
    pub(super) only: Option<BTreeSet<u32>>,
}

impl Faults {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            rng: SmallRng::seed_from_u64(seed),
            rates: Rates::default(),
            script: VecDeque::new(),
            calls: VecDeque::new(),
            delays: VecDeque::new(),
            page_ms: 0,
            fired: 0,
            only: None,
        }
    }

    pub(super) fn chance(&mut self, in_a_thousand: u32) -> bool {
        in_a_thousand > 0 && self.rng.random_range(0..1000) < in_a_thousand
    }

    fn delay(&mut self) -> u64 {
        if self.rates.slow_ms == 0 {
            return 0;
        }
        let slow = self.rng.random_range(0..=self.rates.slow_ms);
        if self.chance(30) { slow * 20 } else { slow }
    }

    pub(super) fn deliver(&mut self) -> (DeliverFault, u64, u64) {
        let (before, after) = match self.delays.pop_front() {
            Some(delays) => delays,
            None => {
                let (before, mut after) = (self.delay(), self.delay());
                let (one_in, most_ms) = self.rates.late_answer;
                if one_in > 0 && self.rng.random_range(0..one_in) == 0 {
                    after += self.rng.random_range(0..most_ms);
                }
                (before, after)
            }
        };
        let fault = match self.script.pop_front() {
            Some(fault) => fault,
            None if self.chance(self.rates.deliver) => {
                let fault = self.any();
                if self.fires() { fault } else { DeliverFault::None }
            }
            None => DeliverFault::None,
        };
        (fault, before, after)
    }

    /// A smaller run of the same seed leaves faults out.
    fn fires(&mut self) -> bool {
        let number = self.fired;
        self.fired += 1;
        self.only.as_ref().is_none_or(|only| only.contains(&number))
    }

    fn any(&mut self) -> DeliverFault {
        match self.rng.random_range(0..11) {
            0 => DeliverFault::NotAppliedKept,
            1 => DeliverFault::NotAppliedLost,
            2 => DeliverFault::Final,
            3 | 4 => DeliverFault::UnknownApplied,
            5 | 6 => DeliverFault::UnknownLost,
            _ => {
                let after_ms = self.rng.random_range(0..400);
                DeliverFault::UnknownLater { after_ms, executed: self.rng.random() }
            }
        }
    }

    pub(super) fn call(&mut self, call: Call) -> (CallFault, u64) {
        let delay = self.delay();
        if self.calls.front().is_some_and(|(of, _)| *of == call)
            && let Some((_, fault)) = self.calls.pop_front()
        {
            return (fault, delay);
        }
        let fault = match self.chance(self.rates.call) {
            false => CallFault::None,
            true => {
                let fault = if self.rng.random() { CallFault::Before } else { CallFault::After };
                if self.fires() { fault } else { CallFault::None }
            }
        };
        (fault, delay)
    }
}
