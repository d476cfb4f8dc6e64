//! Model B: parked records, copies, refusals, positions and hand-overs (P7, P8, P13).

use super::{
    holds, is_found,
    owners::two_instances,
    rig::{Faults, Rec, Setup},
    sink::Plant,
};

/// A record of one row.
fn of_row(key: u8, row: u8) -> Rec {
    Rec { key, row, poison: false, event_ms: 0 }
}

fn poison(key: u8, row: u8) -> Rec {
    Rec { poison: true, ..of_row(key, row) }
}

/// Two lanes of one instance, a partition each.
fn two_lanes(first: Vec<Rec>, second: Vec<Rec>, faults: Faults) -> Setup {
    Setup {
        instances: 1,
        lanes: 2,
        partitions: vec![(first, Some(0)), (second, Some(1))],
        ..two_instances(faults)
    }
}

/// A copy in the other partition and one in the same, and a row that two keys write.
fn copies(faults: Faults) -> Setup {
    two_lanes(vec![of_row(1, 1), of_row(1, 1)], vec![of_row(1, 1), of_row(2, 1)], faults)
}

/// What the sink refuses, between others of its row.
fn refused(faults: Faults) -> Setup {
    two_lanes(vec![poison(1, 1), of_row(2, 1)], vec![poison(1, 1), of_row(2, 1)], faults)
}

/// Each key first in one partition, then in the other: whoever waited while it holds claims would wait for ever.
fn crosswise(faults: Faults) -> Setup {
    two_lanes(vec![of_row(1, 1), of_row(2, 2)], vec![of_row(2, 2), of_row(1, 1)], faults)
}

/// Calls through two lanes: of the first key the first copy is refused, and its key left free.
fn calls(faults: Faults) -> Setup {
    Setup {
        partitions: Vec::new(),
        calls: vec![(0, vec![poison(1, 1), of_row(1, 1)]), (1, vec![of_row(1, 1), of_row(2, 1)])],
        ..two_lanes(Vec::new(), Vec::new(), faults)
    }
}

const NONE: Faults = Faults { cuts: 0, refusals: 0, crashes: 0, moves: 0, backs: 0, doubles: 0, all: 0 };
const SOME: Faults = Faults { cuts: 1, refusals: 1, moves: 1, all: 1, ..NONE };
const CALLS: Faults = Faults { moves: 0, ..SOME };

#[test]
fn p7_copies_wait_and_positions_stop_at_them() {
    holds("B, copies", &copies(Faults { cuts: 0, ..SOME }));
}

#[test]
fn p7_refused_records_are_letters_once() {
    holds("B, refused", &refused(Faults { moves: 0, ..SOME }));
}

#[test]
fn p7_no_lane_waits_while_it_holds_claims() {
    holds("B, crosswise", &crosswise(Faults { refusals: 1, all: 1, ..NONE }));
}

#[test]
fn p7_each_call_has_one_outcome() {
    holds("B, calls", &calls(CALLS));
}

/// A partition goes to another instance while its batch is on its way.
#[test]
fn p13_a_batch_is_on_its_way_at_a_hand_over() {
    let partitions = vec![(vec![of_row(1, 1), of_row(2, 1)], Some(0)), (vec![of_row(3, 1)], Some(1))];
    holds("B, hand-over", &Setup { partitions, ..two_instances(Faults { moves: 1, all: 1, ..NONE }) });
}

/// Minutes.
#[test]
#[ignore = "larger bounds: cargo test -p oncegate --lib models -- --ignored --nocapture"]
fn p7_p13_order_within_larger_bounds() {
    holds("B, copies, larger", &copies(Faults { all: 2, ..SOME }));
    holds("B, refused, larger", &refused(Faults { all: 2, ..SOME }));
    holds("B, crosswise, larger", &crosswise(Faults { all: 2, ..SOME }));
    holds("B, calls, larger", &calls(Faults { all: 2, ..CALLS }));
}

#[test]
fn claims_that_are_dropped_too_early_are_found() {
    is_found(Plant::ClaimsDropped, copies(NONE), "once", 6);
}

#[test]
fn claims_that_are_kept_too_long_are_found() {
    is_found(Plant::ClaimsKept, copies(Faults { refusals: 1, all: 1, ..NONE }), "one_outcome", 12);
}

#[test]
fn a_position_that_passes_a_parked_record_is_found() {
    let setup = two_lanes(vec![of_row(1, 1), of_row(2, 2)], vec![of_row(1, 1), of_row(3, 3)], NONE);
    is_found(Plant::ParkedPassed, setup, "position_prefix", 5);
}

#[test]
fn records_that_go_again_in_another_order_are_found() {
    let setup =
        two_lanes(vec![of_row(1, 1), of_row(2, 1)], Vec::new(), Faults { refusals: 1, all: 1, ..NONE });
    is_found(Plant::AgainReversed, setup, "order_in_key", 6);
}

#[test]
fn a_refusal_that_is_said_to_be_written_is_found() {
    is_found(Plant::RefusedAsWritten, calls(NONE), "nothing_lost", 4);
}
