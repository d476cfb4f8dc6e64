//! What is to happen to one record, from what is known of its key: pure, one function, one match.

use adapters::sink::Mode;
use dedup_store::{Settled, Verdict};

use crate::{
    naming::Named,
    outcome::{Outcome, Problem},
};

/// Which door a record came through: decides what happens to a record that cannot be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Via {
    /// HTTP or the library: the caller is told and keeps the record.
    Call,
    /// A Kafka partition: nobody can be told, so the record goes to the dead letters.
    Relay,
}

/// `mismatch`: same key, other content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MismatchPolicy {
    /// HTTP 422; relay: dead letter.
    Reject,
    /// Counts as a duplicate.
    Ignore,
}

/// `late`: a miss below the admission floor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LatePolicy {
    /// HTTP 422; relay: counted and passed over.
    Reject,
    /// Kept with the dead letters.
    DeadLetter,
    /// Written on the staged path: the sink's own row key tells a copy.
    VerifyInSink,
}

/// `dead_letters`: where records go that a relay cannot write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeadLetterPolicy {
    /// Beside the rows, in the batch's transaction.
    Sink,
    /// A topic or a file, written durably before the batch is.
    External,
    /// The relay stops at the record.
    Stop,
}

/// `refused`: what a row that the sink refuses does to its key, for callers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RefusedPolicy {
    /// The key stays free: a corrected record with the same key is new.
    Free,
    /// The refusal is settled: copies are answered with it.
    Settle,
}

/// The route's rules, as far as lanes need them.
#[derive(Clone, Debug)]
pub struct Rules {
    /// How rows meet rows.
    pub mode: Mode,
    /// Same key, other content.
    pub mismatch: MismatchPolicy,
    /// Late records of callers.
    pub late_call: LatePolicy,
    /// Late records of a relay.
    pub late_relay: LatePolicy,
    /// Where a relay's bad records go.
    pub dead_letters: DeadLetterPolicy,
    /// Refused rows of callers.
    pub refused: RefusedPolicy,
    /// `when_store_unavailable = "pass"`: records go on unchecked, and are counted.
    pub pass_unchecked: bool,
    /// Copies of an event may come by any partition (`scope = "route"`): what one has forgotten none admits (P11).
    pub copies_anywhere: bool,
    /// The dedup key is a function of the row key, so that new keys are new rows (P9).
    pub key_within_row_key: bool,
    /// Records in a batch at most.
    pub max_records: usize,
    /// Bytes of rows in a batch at most.
    pub max_bytes: usize,
    /// How long a lane waits for a fuller batch when its queue ran dry, ms.
    pub linger_ms: u64,
    /// How long a copy in flight is waited for, ms.
    pub wait_ms: u64,
    /// How late a new record may come, ms; none with the arrival clock.
    pub lateness_ms: i64,
    /// How long copies are recognised, ms.
    pub window_ms: i64,
    /// How far ahead of now an event may lie, ms.
    pub max_ahead_ms: i64,
    /// How far the host's clock may be ahead of the sink's when a route by arrival opens, ms.
    pub max_clock_skew_ms: i64,
    /// How far it may be past all that the route knows and has not forgotten, ms.
    pub max_clock_jump_ms: i64,
}

impl Default for Rules {
    /// The defaults of the option table, for the arrival clock.
    fn default() -> Self {
        Self {
            mode: Mode::Insert,
            mismatch: MismatchPolicy::Reject,
            late_call: LatePolicy::Reject,
            late_relay: LatePolicy::DeadLetter,
            dead_letters: DeadLetterPolicy::Sink,
            refused: RefusedPolicy::Free,
            pass_unchecked: false,
            copies_anywhere: false,
            key_within_row_key: false,
            max_records: 20_000,
            max_bytes: 16 << 20,
            linger_ms: 0,
            wait_ms: 5_000,
            lateness_ms: 0,
            window_ms: 86_400_000,
            max_ahead_ms: 300_000,
            max_clock_skew_ms: 300_000,
            max_clock_jump_ms: 30 * 86_400_000,
        }
    }
}

impl Rules {
    /// The late policy that holds for records that came through `via`.
    pub(crate) fn late(&self, via: Via) -> LatePolicy {
        match via {
            Via::Call => self.late_call,
            Via::Relay => self.late_relay,
        }
    }
}

/// What is to happen to a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    /// Goes into the batch; its key is claimed. `late`: only the sink can tell whether it is new.
    Deliver {
        /// See [`LatePolicy::VerifyInSink`].
        late: bool,
    },
    /// Has its outcome now.
    Answer {
        /// Which.
        outcome: Outcome,
        /// Of the first record with this key.
        first: Option<Settled>,
        /// Why it was not written.
        problem: Option<Problem>,
    },
    /// Goes to the dead letters with the batch.
    DeadLetter {
        /// `rejected`, `mismatch` or `late`.
        kind: &'static str,
        /// For whoever looks at it later.
        reason: String,
        /// Its key is settled as dead-lettered (copies are duplicates), if it has one.
        settle: bool,
    },
    /// Its key is in flight: taken up again when that is settled or released (P7).
    Park,
    /// The relay stops here.
    Stop(String),
}

/// The fate of a record that could not be named or encoded.
pub(crate) fn judge_unwritable(problem: &Problem, via: Via, rules: &Rules) -> Fate {
    if *problem == Problem::Passed {
        return Fate::Answer { outcome: Outcome::Duplicate, first: None, problem: None };
    }
    unwritable("rejected", Outcome::Rejected, problem.clone(), None, true, via, rules)
}

/// The fate of a named record, given the store's verdict (P7).
pub(crate) fn judge(verdict: Verdict, named: &Named, via: Via, rules: &Rules) -> Fate {
    match verdict {
        Verdict::New { late } => Fate::Deliver { late },
        Verdict::Duplicate(first) => duplicate(first),
        Verdict::Mismatch(first) if planted!(MismatchIgnored) => duplicate(first),
        Verdict::Mismatch(first) => match rules.mismatch {
            MismatchPolicy::Ignore => duplicate(first),
            MismatchPolicy::Reject => {
                unwritable("mismatch", Outcome::Mismatch, Problem::Mismatch, Some(first), false, via, rules)
            }
        },
        Verdict::InFlight { .. } if planted!(ClaimIsProof) => duplicate(Settled::Written),
        Verdict::InFlight { .. } if planted!(ParkedDelivered) => Fate::Deliver { late: false },
        Verdict::InFlight { .. } => Fate::Park,
        Verdict::Late { floor_ms } => {
            let problem = Problem::Late(format!(
                "event time {} lies before {}, the oldest time at which the route can still tell a new record from a copy \
                 (watermark minus lateness); resend sooner, or raise lateness and window",
                time(named.event_ms),
                time(floor_ms)
            ));
            match (rules.late(via), via, rules.dead_letters) {
                // `dead_letters = "stop"` stops a relay; a caller keeps the record and is told.
                (LatePolicy::Reject, _, _) | (_, Via::Call, DeadLetterPolicy::Stop) => {
                    Fate::Answer { outcome: Outcome::Late, first: None, problem: Some(problem) }
                }
                (LatePolicy::DeadLetter | LatePolicy::VerifyInSink, _, _) => {
                    dead_letter("late", &problem, false, rules)
                }
            }
        }
        Verdict::Ahead { limit_ms } => {
            let problem = Problem::Ahead(format!(
                "event time {} lies after {}, now plus max_ahead; check the producer's clock and time_unit",
                time(named.event_ms),
                time(limit_ms)
            ));
            unwritable("rejected", Outcome::Rejected, problem, None, false, via, rules)
        }
    }
}

fn duplicate(first: Settled) -> Fate {
    Fate::Answer { outcome: Outcome::Duplicate, first: Some(first), problem: None }
}

fn unwritable(
    kind: &'static str,
    outcome: Outcome,
    problem: Problem,
    first: Option<Settled>,
    settle: bool,
    via: Via,
    rules: &Rules,
) -> Fate {
    match via {
        Via::Call => Fate::Answer { outcome, first, problem: Some(problem) },
        Via::Relay => dead_letter(kind, &problem, settle, rules),
    }
}

fn dead_letter(kind: &'static str, problem: &Problem, settle: bool, rules: &Rules) -> Fate {
    match rules.dead_letters {
        DeadLetterPolicy::Stop => Fate::Stop(format!("{kind}: {problem}")),
        DeadLetterPolicy::Sink | DeadLetterPolicy::External => {
            Fate::DeadLetter { kind, reason: problem.to_string(), settle }
        }
    }
}

fn time(ms: i64) -> String {
    jiff::Timestamp::from_millisecond(ms).map_or_else(|_| format!("{ms} ms"), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        Rules { window_ms: 1_000, max_ahead_ms: 1_000, ..Rules::default() }
    }

    fn named() -> Named {
        Named {
            fingerprint: None,
            digest: dedup_store::Digest(0),
            event_ms: 5,
            kind: adapters::sink::RowKind::Write,
            payload: None,
            row: 0..0,
            row_key: 0..0,
            shard: 0,
            position: None,
            problem: None,
        }
    }

    #[test]
    fn rule1_only_a_settled_key_makes_a_duplicate() {
        let in_flight = judge(Verdict::InFlight { lane: 1, same: true }, &named(), Via::Call, &rules());
        assert_eq!(in_flight, Fate::Park, "a claim is no evidence of delivery");
        let settled = judge(Verdict::Duplicate(Settled::Written), &named(), Via::Call, &rules());
        assert!(matches!(settled, Fate::Answer { outcome: Outcome::Duplicate, .. }));
    }

    #[test]
    fn a_relay_loses_no_record_that_it_cannot_write() {
        for verdict in [
            Verdict::Mismatch(Settled::Written),
            Verdict::Late { floor_ms: 9 },
            Verdict::Ahead { limit_ms: 1 },
        ] {
            assert!(
                matches!(judge(verdict, &named(), Via::Relay, &rules()), Fate::DeadLetter { .. }),
                "{verdict:?}"
            );
            let stop = Rules { dead_letters: DeadLetterPolicy::Stop, ..rules() };
            assert!(matches!(judge(verdict, &named(), Via::Relay, &stop), Fate::Stop(_)), "{verdict:?}");
        }
    }

    #[test]
    fn p7_a_late_miss_is_never_delivered_unless_the_sink_verifies() {
        for late in [LatePolicy::Reject, LatePolicy::DeadLetter, LatePolicy::VerifyInSink] {
            let rules = Rules { late_call: late, late_relay: late, ..rules() };
            for via in [Via::Call, Via::Relay] {
                let fate = judge(Verdict::Late { floor_ms: 9 }, &named(), via, &rules);
                assert!(!matches!(fate, Fate::Deliver { .. }), "{late:?} {via:?}");
            }
        }
    }

    /// A late record over HTTP once stopped the callers' shard of a route whose relay is to stop at bad records, and its caller
    /// never heard of it.
    #[test]
    fn a_caller_is_told_where_a_relay_would_stop() {
        let rules =
            Rules { dead_letters: DeadLetterPolicy::Stop, late_call: LatePolicy::DeadLetter, ..rules() };
        let fate = judge(Verdict::Late { floor_ms: 9 }, &named(), Via::Call, &rules);
        assert!(matches!(fate, Fate::Answer { outcome: Outcome::Late, .. }), "{fate:?}");
    }

    #[test]
    fn mismatch_ignore_counts_as_a_duplicate() {
        let rules = Rules { mismatch: MismatchPolicy::Ignore, ..rules() };
        let fate = judge(Verdict::Mismatch(Settled::Updated), &named(), Via::Relay, &rules);
        assert_eq!(
            fate,
            Fate::Answer { outcome: Outcome::Duplicate, first: Some(Settled::Updated), problem: None }
        );
    }
}
