//! Small worlds, tried to the end: every order of events within their bounds, over the product's own lanes, route and store.
//!
//! `rig` copies lanes at rest and lets them act; `sink` is what they act upon; `search` tries everything, breadth first. A model holds
//! if none of its invariants breaks in any state, and if from each state some state can be reached in which all is done, without
//! further faults. Mutations ([`sink::Plant`]) show that it would be seen.
//!
//! The invariants, which have the same names in the simulation:
//!
//! | name | says |
//! | --- | --- |
//! | `once` | no key takes effect twice |
//! | `nothing_lost` | what was acknowledged is in the sink, or the sink went back |
//! | `order_in_key` | rows of one row key come in the order of their partition |
//! | `position_prefix` | every record below the sink's position has its outcome there |
//! | `fenced_writes_nothing` | no batch gets in under an epoch that is not the shard's |
//! | `unknown_never_recut` | while an unknown batch may still come, none of its records go again |
//! | `store_not_ahead` | when a verdict is given, the store knows nothing that the sink does not have |
//! | `forgotten_not_admitted` | what was forgotten is never taken for new (P11) |
//! | `in_time_not_late` | a record of a shard that is not idle, older by no more than the lateness than what came before it in its shard, is not refused as late |
//! | `one_outcome` | every record comes to its end, with one outcome |

mod floors;
mod order;
mod owners;
mod rig;
mod search;
mod sink;

use self::{
    rig::Setup,
    search::{Trace, search},
    sink::Plant,
};

/// More states are not meant.
const MOST_STATES: usize = 2_000_000;

fn holds(name: &str, setup: &Setup) {
    holds_to(name, setup, None);
}

/// With `deepest` only within so many steps.
fn holds_to(name: &str, setup: &Setup, deepest: Option<u32>) {
    let seen = search(setup, MOST_STATES, deepest);
    println!("{name}: {seen}");
    assert!(seen.found.is_none(), "{name}: {seen}");
    assert!(seen.states > 100, "{name}: that is no world");
}

/// The mutation breaks just this invariant, and the shortest trace to it has so many steps.
fn is_found(plant: Plant, setup: Setup, invariant: &str, steps: usize) {
    let seen = search(&Setup { plant: Some(plant), ..setup }, MOST_STATES, None);
    println!("{plant:?}: {seen}");
    let Some(Trace { broken, steps: trace }) = &seen.found else { panic!("{plant:?} is not found: {seen}") };
    assert_eq!((broken.invariant, trace.len()), (invariant, steps), "{plant:?}: {seen}");
}
