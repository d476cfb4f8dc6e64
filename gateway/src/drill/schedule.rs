//! Which faults come when, from a seed: [`Schedule`]. Pure.

use rand::{Rng, SeedableRng, rngs::StdRng};

/// What befalls the gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// `kill -9`.
    Kill {
        /// It starts again with a store that knows nothing.
        empty_store: bool,
        /// How long it is away.
        away_ms: u64,
        /// The next fault waits until it is ready again; else it may strike while it starts.
        until_ready: bool,
    },
    /// SIGSTOP, and SIGCONT after so long.
    Pause {
        /// So long.
        ms: u64,
    },
    /// A connection to the sink is closed.
    Cut {
        /// Where on its way.
        at: CutAt,
        /// After so many pieces that still pass.
        pieces: u32,
    },
}

/// Where a request to the sink is when its connection is closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CutAt {
    /// Nothing of it has passed.
    Before,
    /// Its first half has passed.
    Inside,
    /// It has passed; its answer does not come back.
    After,
}

impl Fault {
    /// As reports name it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Fault::Kill { empty_store: false, .. } => "kill -9, same store",
            Fault::Kill { empty_store: true, .. } => "kill -9, empty store",
            Fault::Pause { .. } => "pause",
            Fault::Cut { at: CutAt::Before, .. } => "cut before a request",
            Fault::Cut { at: CutAt::Inside, .. } => "cut inside a request",
            Fault::Cut { at: CutAt::After, .. } => "cut after a request",
        }
    }
}

/// A fault, and how long there is peace before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Step {
    pub(crate) peace_ms: u64,
    pub(crate) fault: Fault,
}

/// Faults without end; the same for the same seed. Every other one is a kill; the others come in turn.
#[derive(Debug)]
pub(crate) struct Schedule {
    random: StdRng,
    cuts: bool,
    turn: usize,
}

impl Schedule {
    /// `cuts`: there are connections that can be cut.
    pub(crate) fn new(seed: u64, cuts: bool) -> Self {
        Self { random: StdRng::seed_from_u64(seed), cuts, turn: 0 }
    }
}

impl Iterator for Schedule {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let (round, kill) = (self.turn / 2, self.turn.is_multiple_of(2));
        self.turn += 1;
        let random = &mut self.random;
        let pieces = random.random_range(0..12);
        let fault = if kill {
            Fault::Kill {
                // The second one at the latest, so that a short drill has both.
                empty_store: round == 1 || round > 1 && random.random_bool(0.4),
                away_ms: random.random_range(0..300),
                until_ready: random.random_bool(0.75),
            }
        } else {
            match round % 4 {
                1 if self.cuts => Fault::Cut { at: CutAt::After, pieces },
                2 if self.cuts => Fault::Cut { at: CutAt::Inside, pieces },
                3 if self.cuts => Fault::Cut { at: CutAt::Before, pieces },
                _ => Fault::Pause { ms: random.random_range(100..1_500) },
            }
        };
        Some(Step { peace_ms: random.random_range(150..900), fault })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_says_all_and_another_one_says_else() {
        let take = |seed| Schedule::new(seed, true).take(40).collect::<Vec<_>>();
        assert_eq!(take(7), take(7));
        assert_ne!(take(7), take(8));
    }

    #[test]
    fn a_short_drill_has_every_kind_of_fault() {
        let words = |cuts, count| {
            let mut words: Vec<_> =
                Schedule::new(1, cuts).take(count).map(|step| step.fault.word()).collect();
            words.sort_unstable();
            words.dedup();
            words
        };
        assert_eq!(words(true, 8).len(), 6);
        assert_eq!(words(false, 4), ["kill -9, empty store", "kill -9, same store", "pause"]);
        assert_eq!(words(false, 40).len(), 3);
    }
}
