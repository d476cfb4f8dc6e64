//! Model C: what is forgotten, what is late, and shards that move to whoever has forgotten more or less (P11).

use super::{
    holds, is_found,
    owners::two_instances,
    rig::{Faults, NOW_MS, Rec, Setup, rules},
    sink::Plant,
};
use crate::lane::judge::Rules;

/// Of a time, s.
fn at(key: u8, s: i64) -> Rec {
    Rec { key, row: key, poison: false, event_ms: NOW_MS + s * 1_000 }
}

/// Further ahead than may be.
fn far_ahead(key: u8) -> Rec {
    at(key, 4_000_000)
}

/// 10 s of window, 2 s of lateness: a record of 20 s forgets what is older than 8 s.
fn spans() -> Rules {
    Rules { window_ms: 10_000, lateness_ms: 2_000, ..rules(2) }
}

/// One instance with two partitions. The second is idle when a copy of the first one's record comes.
fn idle(faults: Faults) -> Setup {
    Setup {
        instances: 1,
        partitions: vec![(vec![at(1, 0), at(2, 20)], Some(0)), (vec![at(3, 0), at(1, 0)], Some(0))],
        later: vec![0, 1],
        whole: true,
        expires: true,
        rules: spans(),
        ..two_instances(faults)
    }
}

/// Two instances, a partition each; the second one lags behind what the first one forgets.
fn lags(faults: Faults) -> Setup {
    Setup {
        partitions: vec![(vec![at(1, 0), at(2, 20)], Some(0)), (vec![at(4, 0), at(5, -1)], Some(1))],
        moves: Some(1),
        expires: true,
        queue: 1,
        rules: spans(),
        ..two_instances(faults)
    }
}

/// One partition, whose first record is further ahead than may be.
fn ahead(faults: Faults) -> Setup {
    Setup {
        instances: 1,
        partitions: vec![(vec![far_ahead(3), at(4, 0), at(5, -1), at(4, 0)], Some(0))],
        queue: 2,
        ..lags(faults)
    }
}

const NONE: Faults = Faults { cuts: 0, refusals: 0, crashes: 0, moves: 0, backs: 0, doubles: 0, all: 0 };
const CRASH: Faults = Faults { crashes: 1, all: 1, ..NONE };
const MOVE: Faults = Faults { moves: 1, all: 1, ..NONE };

#[test]
fn p11_what_was_forgotten_is_not_new_whoever_lost_his_store() {
    holds("C, idle", &idle(CRASH));
}

#[test]
fn p11_a_shard_that_lags_is_not_late_whoever_takes_it() {
    holds("C, lags", &lags(MOVE));
}

#[test]
fn p11_a_record_too_far_ahead_makes_no_other_late() {
    holds("C, ahead", &ahead(Faults { crashes: 1, cuts: 1, all: 1, ..NONE }));
}

/// Minutes.
#[test]
#[ignore = "larger bounds: cargo test -p oncegate --lib models -- --ignored --nocapture"]
fn p11_floors_within_larger_bounds() {
    holds("C, idle, larger", &idle(Faults { crashes: 1, cuts: 1, refusals: 1, all: 2, ..NONE }));
    holds("C, lags, larger", &Setup { queue: 2, moves: None, ..lags(MOVE) });
    holds("C, lags and crashes", &lags(Faults { crashes: 1, moves: 1, all: 2, ..NONE }));
}

#[test]
fn a_floor_that_is_not_kept_with_the_shard_is_found() {
    is_found(Plant::FloorNotKept, idle(CRASH), "forgotten_not_admitted", 16);
}

#[test]
fn a_floor_that_a_new_owner_is_not_told_is_found() {
    is_found(Plant::FloorNotTold, idle(CRASH), "forgotten_not_admitted", 16);
}

#[test]
fn marks_that_expire_too_early_are_found() {
    is_found(Plant::MarksTooEarly, idle(CRASH), "forgotten_not_admitted", 13);
}

#[test]
fn a_watermark_ahead_of_what_came_is_found() {
    is_found(Plant::WatermarkAhead, lags(MOVE), "in_time_not_late", 7);
}

#[test]
fn a_lagging_shard_that_is_taken_as_it_is_is_found() {
    is_found(Plant::LagIgnored, lags(MOVE), "in_time_not_late", 16);
}

/// What the model found: a partition that was taken over after another one's marks had expired, and lagged behind, was taken over with
/// a store that was learnt anew, and took for new what the other one had forgotten.
#[test]
fn a_floor_that_other_partitions_do_not_share_is_found() {
    is_found(Plant::OwnFloorOnly, idle(CRASH), "forgotten_not_admitted", 16);
}
