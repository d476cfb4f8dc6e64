//! Model A: who owns a shard, what becomes of an unknown batch, and a sink that goes back (P3 to P6).

use super::{
    holds, holds_to, is_found,
    rig::{Faults, Setup, rec, rules},
    sink::Plant,
};

/// Two instances of one lane; the first has both partitions, and there is one copy.
pub(super) fn two_instances(faults: Faults) -> Setup {
    Setup {
        instances: 2,
        lanes: 1,
        partitions: vec![(vec![rec(1), rec(1)], Some(0)), (vec![rec(2)], Some(0))],
        calls: Vec::new(),
        rules: rules(2),
        faults,
        queue: 2,
        later: Vec::new(),
        moves: None,
        expires: false,
        whole: false,
        plant: None,
    }
}

/// Two lanes of one instance, which have one store; the sink may go back.
fn one_store(faults: Faults) -> Setup {
    Setup {
        instances: 1,
        lanes: 2,
        partitions: vec![(vec![rec(1), rec(2)], Some(0)), (vec![rec(3)], Some(1))],
        ..two_instances(faults)
    }
}

const TAKEN_OVER: Faults =
    Faults { cuts: 2, refusals: 1, crashes: 1, moves: 1, backs: 0, doubles: 1, all: 2 };
const GOES_BACK: Faults = Faults { moves: 0, backs: 1, ..TAKEN_OVER };

#[test]
fn p3_p5_owners_change_and_commits_are_unknown() {
    holds("A, owners", &two_instances(Faults { all: 1, ..TAKEN_OVER }));
}

#[test]
fn p3_p5_a_batch_is_unknown_while_its_shard_is_taken_over() {
    let faults = Faults { cuts: 1, moves: 1, all: 2, ..Faults::default() };
    let setup = Setup {
        partitions: vec![(vec![rec(1), rec(1)], Some(0)), (Vec::new(), Some(0))],
        ..two_instances(faults)
    };
    holds("A, unknown and taken over", &setup);
}

#[test]
fn p6_a_sink_goes_back() {
    holds("A, sink goes back", &one_store(Faults { all: 1, ..GOES_BACK }));
}

/// Minutes.
#[test]
#[ignore = "larger bounds: cargo test -p oncegate --lib models -- --ignored --nocapture"]
fn p3_p6_owners_and_a_sink_that_goes_back_within_larger_bounds() {
    holds("A, owners, larger", &two_instances(TAKEN_OVER));
    holds("A, sink goes back, larger", &one_store(GOES_BACK));
    holds("A, overwritten", &overwritten());
}

/// Two instances, of which the second may take the first one's shard; the sink may go back. Both have something to write there, so that
/// the sequences can come to agree.
fn overwritten() -> Setup {
    let partitions = vec![(vec![rec(1), rec(2)], Some(0)), (vec![rec(3)], Some(0))];
    let faults = Faults { moves: 1, backs: 1, all: 2, ..Faults::default() };
    Setup { partitions, moves: Some(0), ..two_instances(faults) }
}

/// The sink goes back, and before an instance looks again another one has taken its shard and written as many batches as were lost. The
/// sequences agreed, and the first instance kept facts that the sink did not have: a trace of 13 steps, which this model found.
#[test]
fn p6_a_history_that_was_overwritten_meanwhile_is_seen() {
    holds_to("A, overwritten, to 15 steps", &overwritten(), Some(15));
}

#[test]
fn owners_that_no_lineage_tells_of_are_found() {
    is_found(Plant::LineageNotKept, overwritten(), "store_not_ahead", 13);
}

#[test]
fn a_stale_epoch_that_passes_the_fence_is_found() {
    is_found(Plant::StaleEpoch, two_instances(TAKEN_OVER), "fenced_writes_nothing", 4);
}

#[test]
fn a_batch_that_comes_twice_past_the_fence_is_found() {
    is_found(Plant::AnySequence, two_instances(TAKEN_OVER), "once", 4);
}

#[test]
fn an_unknown_batch_that_counts_as_failed_is_found() {
    is_found(
        Plant::UnknownAsFailed,
        two_instances(Faults { all: 1, ..TAKEN_OVER }),
        "unknown_never_recut",
        4,
    );
}

#[test]
fn a_shard_that_is_taken_without_a_new_epoch_is_found() {
    is_found(Plant::SameEpoch, two_instances(TAKEN_OVER), "unknown_never_recut", 4);
}

#[test]
fn rows_without_their_mark_are_found() {
    is_found(Plant::NoMark, two_instances(Faults { crashes: 1, all: 1, ..Faults::default() }), "once", 7);
}

#[test]
fn marks_that_are_not_learnt_are_found() {
    is_found(
        Plant::NothingLearnt,
        two_instances(Faults { crashes: 1, all: 1, ..Faults::default() }),
        "once",
        7,
    );
}

#[test]
fn a_connection_that_outlives_the_sinks_history_is_found() {
    is_found(Plant::OldConnection, one_store(Faults { all: 1, ..GOES_BACK }), "store_not_ahead", 7);
}

#[test]
fn a_position_beyond_its_batch_is_found() {
    is_found(Plant::PositionAhead, one_store(GOES_BACK), "position_prefix", 3);
}

#[test]
fn a_record_read_before_a_seek_and_taken_after_it_is_found() {
    is_found(Plant::OldReading, one_store(GOES_BACK), "position_prefix", 7);
}
