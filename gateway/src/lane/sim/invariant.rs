//! What must hold, by name. The same names stand in docs/proof.md, and are for models and property tests to use.

use std::fmt;

macro_rules! invariants {
    ($($(#[doc = $what:literal])+ $name:ident = $text:literal,)*) => {
        /// See the module.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        pub(super) enum Invariant {
            $($(#[doc = $what])+ $name,)*
        }

        impl fmt::Display for Invariant {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Invariant::$name => $text,)*
                })
            }
        }
    };
}

invariants! {
    /// An event takes effect at most once, whatever copies of it come, by whichever shard and instance (rules 1 to 3, P6, P7).
    Once = "once",
    /// An event that has to take effect has done so.
    NothingLost = "nothing_lost",
    /// Nothing takes effect that should not: refused, unreadable, too far ahead.
    NothingMadeUp = "nothing_made_up",
    /// Effects on one row come in the order of their partition (P8).
    OrderInKey = "order_in_key",
    /// The table ends as the workload says (P8).
    RowsEndRight = "rows_end_right",
    /// Of each record that a relay cannot write there is one dead letter, and of no other (rule 10, P10).
    LetterKept = "letter_kept",
    /// Each record has one outcome, and is counted once.
    OneOutcome = "one_outcome",
    /// A caller is told what became of its record.
    RightAnswer = "right_answer",
    /// Each caller hears in the end.
    Answered = "answered",
    /// The position in the sink passes no record that has no outcome there (rule 8).
    PositionPrefix = "position_prefix",
    /// The group's offset is never ahead of the sink's position (rule 8).
    OffsetFollows = "offset_follows",
    /// A shard moves by one sequence under the epoch of its owner, and by nobody else (P4).
    FenceHolds = "fence_holds",
    /// A batch of unknown outcome is asked about before anything else is done with its shards (rule 3, P5).
    UnknownNeverRecut = "unknown_never_recut",
    /// Nothing new takes effect below its shard's floor and a window (P11).
    FloorSafe = "floor_safe",
    /// A key that was taken back is new, also for whoever learns the marks (P12).
    ForgottenIsNew = "forgotten_is_new",
    /// When all is at rest no key is claimed any more.
    ClaimsEnd = "claims_end",
    /// Once nothing is struck any more, each partition comes to its end.
    ComesToRest = "comes_to_rest",
    /// Gates end when they are told to.
    Closes = "closes",
    /// Nothing panics.
    NoPanic = "no_panic",
}

/// One that fell, and how.
#[derive(Clone, Debug)]
pub(super) struct Broken {
    pub(super) invariant: Invariant,
    pub(super) what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)
    }
}

/// `Err` with this text.
pub(super) fn broken<T>(invariant: Invariant, what: impl Into<String>) -> Result<T, Broken> {
    Err(Broken { invariant, what: what.into() })
}
