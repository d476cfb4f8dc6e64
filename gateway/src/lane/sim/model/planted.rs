//! Planted faults: each is found, by which invariant, and after how many seeds.

use super::{asked_bug, run_seeds};
use crate::planted::Bug;

/// Seeds that a fault may take.
const MOST: u64 = 3_000;
/// Those of a plain `cargo test`, which leaves out what takes longer.
const FEW: u64 = 150;

/// A table of the faults: what is planted, what falls, at which seed.
fn find_all(bugs: &[Bug], most: u64) -> Vec<Bug> {
    let mut missed = Vec::new();
    println!("| planted | invariant that falls | seeds |\n| --- | --- | --- |");
    for &bug in bugs {
        match run_seeds(1, most, Some(bug), 1).first() {
            Some((seed, fell)) => println!("| {} | `{}` | {seed} |", bug.what(), fell.invariant),
            None => missed.push(bug),
        }
    }
    missed
}

#[test]
fn model_finds_planted_faults_within_few_seeds() {
    let quick: Vec<Bug> = Bug::ALL.iter().copied().filter(|bug| !bug.is_rare()).collect();
    assert!(quick.len() >= 20, "{quick:?}");
    let missed = find_all(&quick, FEW);
    assert!(missed.is_empty(), "not found: {missed:?}");
}

/// All of them, in some minutes: `cargo test -p oncegate --lib model_finds -- --ignored --nocapture`; `ONCEGATE_BUG=MarkLeftOut` asks
/// for one.
#[test]
#[ignore = "takes minutes; prints the table of docs/proof.md"]
fn model_finds_each_planted_fault() {
    let only = asked_bug();
    let bugs: Vec<Bug> =
        Bug::ALL.iter().copied().filter(|bug| only.is_none_or(|only| only == *bug)).collect();
    let missed = find_all(&bugs, MOST);
    assert!(missed.is_empty(), "not found: {missed:?}");
}
