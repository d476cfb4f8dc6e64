//! Planted faults: each is found, by which invariant, and after how many seeds.

use super::{run_seeds, super::invariant::Invariant};
use crate::planted::Bug;

/// Seeds that a fault may take.
const MOST: u64 = 4_000;

#[test]
fn model_finds_each_planted_fault() {
    let only = std::env::var("ONCEGATE_BUG").ok();
    let mut missed = Vec::new();
    println!("| planted | invariant that falls | seeds |\n| --- | --- | --- |");
    for &bug in Bug::ALL {
        if only.as_ref().is_some_and(|only| *only != format!("{bug:?}")) {
            continue;
        }
        let found = run_seeds(1, MOST, Some(bug), 1);
        match found.first() {
            Some((seed, fell)) => {
                let invariant: Invariant = fell.invariant;
                println!("| {} | `{invariant}` | {seed} |", bug.what());
            }
            None => {
                println!("| {} | none | more than {MOST} |", bug.what());
                missed.push(bug);
            }
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
