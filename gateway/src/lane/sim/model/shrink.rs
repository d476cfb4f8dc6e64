//! A run that fails, made smaller: parts of its plan are left out for as long as the same invariant falls (delta debugging). Each try
//! is a run of the same seed, so that the smallest plan can be run again by what it keeps.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use super::{
    Ran,
    plan::{Keep, Plan},
};
use crate::lane::sim::invariant::Invariant;

/// Tries that may be made, and how long they may take.
const TRIES: usize = 1_500;
const PATIENCE: Duration = Duration::from_secs(60);

struct Shrinking<'a> {
    plan: &'a Plan,
    invariant: Invariant,
    run: &'a dyn Fn(&Plan) -> Ran,
    best: Keep,
    tries: usize,
    until: Instant,
}

/// The smallest plan found, and how many runs that took.
pub(super) fn smallest(
    plan: &Plan,
    failed: &Ran,
    invariant: Invariant,
    run: &dyn Fn(&Plan) -> Ran,
) -> (Keep, usize) {
    let mut best = Keep::all(plan);
    best.faults = Some((0..failed.faults).collect());
    let until = Instant::now() + PATIENCE;
    let mut shrinking = Shrinking { plan, invariant, run, best, tries: 0, until };
    loop {
        let before = shrinking.best.clone();
        shrinking.lists();
        shrinking.faults();
        for change in [|keep: &mut Keep| keep.quick = true, |keep: &mut Keep| keep.one_lane = true] {
            let mut keep = shrinking.best.clone();
            change(&mut keep);
            shrinking.try_out(keep);
        }
        if shrinking.best == before || shrinking.is_over() {
            return (shrinking.best, shrinking.tries);
        }
    }
}

impl Shrinking<'_> {
    fn is_over(&self) -> bool {
        self.tries >= TRIES || Instant::now() >= self.until
    }

    /// Takes it over if the same invariant falls.
    fn try_out(&mut self, keep: Keep) -> bool {
        if keep == self.best || self.is_over() {
            return false;
        }
        self.tries += 1;
        let ran = (self.run)(&keep.apply(self.plan));
        let falls = ran.fell.is_some_and(|fell| fell.invariant == self.invariant);
        if falls {
            self.best = keep;
        }
        falls
    }

    /// Halves of all parts of all lists, then quarters, and so on.
    fn lists(&mut self) {
        let parts = |keep: &Keep| -> Vec<(usize, usize)> {
            let of = |(list, (_, kept)): (usize, &(String, Vec<bool>))| {
                kept.iter()
                    .enumerate()
                    .filter(|(_, kept)| **kept)
                    .map(move |(at, _)| (list, at))
                    .collect::<Vec<_>>()
            };
            keep.lists.iter().enumerate().flat_map(of).collect()
        };
        let mut size = parts(&self.best).len().div_ceil(2);
        while size > 0 {
            let mut from = 0;
            loop {
                let now = parts(&self.best);
                let Some(gone) = now.get(from..(from + size).min(now.len())).filter(|gone| !gone.is_empty())
                else {
                    break;
                };
                let mut keep = self.best.clone();
                gone.iter().for_each(|&(list, at)| keep.lists[list].1[at] = false);
                if !self.try_out(keep) {
                    from += size;
                }
            }
            size = if size == 1 { 0 } else { size.div_ceil(2) };
        }
    }

    fn faults(&mut self) {
        let mut size = self.best.faults.as_ref().map_or(0, BTreeSet::len).div_ceil(2);
        while size > 0 {
            let mut from = 0;
            loop {
                let now: Vec<u32> = self.best.faults.iter().flatten().copied().collect();
                let Some(gone) = now.get(from..(from + size).min(now.len())).filter(|gone| !gone.is_empty())
                else {
                    break;
                };
                let mut keep = self.best.clone();
                keep.faults.iter_mut().for_each(|faults| faults.retain(|fault| !gone.contains(fault)));
                if !self.try_out(keep) {
                    from += size;
                }
            }
            size = if size == 1 { 0 } else { size.div_ceil(2) };
        }
    }
}
