//! Faults that the simulation plants, one at a time, to show that it finds each. Outside of this crate's tests `planted!` is `false`.

/// Whether this fault is planted.
#[cfg(not(test))]
macro_rules! planted {
    ($bug:ident) => {
        false
    };
}

#[cfg(test)]
macro_rules! planted {
    ($bug:ident) => {
        $crate::planted::is($crate::planted::Bug::$bug)
    };
}

#[cfg(test)]
pub(crate) use bugs::{Bug, is, plant};

#[cfg(test)]
mod bugs {
    use std::cell::Cell;

    use adapters::simulated;

    thread_local! {
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    macro_rules! bugs {
        ($($name:ident: $what:literal,)*) => {
            /// What is planted, and where it stands is what `planted!` names.
            #[derive(Clone, Copy, PartialEq, Eq, Debug)]
            pub(crate) enum Bug {
                $($name,)*
            }

            impl Bug {
                pub(crate) const ALL: &[Bug] = &[$(Bug::$name,)*];

                /// It takes more seeds than a plain `cargo test` has time for.
                pub(crate) fn is_rare(self) -> bool {
                    use Bug::{RebuildNotAwaited, RowOvertaken, SentBeforeJournaled, StaleBatchHoldsPosition};
                    matches!(self, RebuildNotAwaited | RowOvertaken | SentBeforeJournaled | StaleBatchHoldsPosition)
                }

                /// In a few words.
                pub(crate) fn what(self) -> &'static str {
                    match self {
                        $(Bug::$name => $what,)*
                    }
                }
            }
        };
    }

    bugs! {
        MarkBeforeWrite: "facts are settled before it is known that their batch is in",
        MarkLeftOut: "a batch's marks leave a key out",
        RecutAfterUnknown: "a batch of unknown outcome is taken for failed, and cut again",
        UnknownTakenAsApplied: "a batch of unknown outcome is taken for written",
        ClaimsFreeWhileUnknown: "claims are given back while a batch's outcome is unknown",
        PositionPastParked: "the position passes records that have no outcome yet",
        OffsetBeforePosition: "the group's offset runs ahead of the sink's position",
        StaleEpochTaken: "the sink's fence does not compare epochs",
        PositionNotSought: "a shard that the sink took back is not read again",
        FactsNotLearnt: "a shard is taken over without its facts",
        OldGenerationTaken: "records from before a seek are taken after it",
        RefusedKeyKept: "the key of a refused row stays claimed",
        ClaimsKeptAfterFailure: "claims of a batch that failed stay",
        ClaimIsProof: "a claim counts as delivery",
        ParkedDelivered: "a copy goes out before the first one is settled",
        RowOvertaken: "a record overtakes a parked one of its row key",
        BatchBehindParked: "a batch that is put back comes behind later records",
        ReplayCounted: "a record that is read again has a second outcome",
        LateIsNew: "a late miss is admitted as new",
        MismatchIgnored: "other content under a known key is a duplicate",
        LetterLeftOut: "a dead letter is not in its batch",
        StoreAheadTaken: "a sink that went back behind the store is not noticed",
        ForgetNotMarked: "a key is taken back in the store and not in the marks",
        AheadTaken: "an event time far ahead is taken",
        FloorNotHonoured: "a shard's floor is not honoured by its next owner",
        MarkSkipped: "a mark is skipped when facts are learnt",
        OthersNotLearnt: "a route opens without the facts of the relay's shards",
        RebuildNotAwaited: "verdicts do not wait until a rebuild has learnt all marks",
        StaleBatchHoldsPosition: "a batch put back after a rewind still counts as taken",
        LetterBeyondPosition: "a dead letter that settles no key goes out beyond the position",
        LookInsteadOfAcquire: "an unknown batch is looked for without taking its shards",
        EntryGoneWhileUnknown: "journal: a batch of unknown outcome is taken out",
        TokenChanged: "journal: what is sent again has another token",
        SentBeforeJournaled: "journal: a batch is sent before it is journaled",
        MarksLeftOut: "journal: a batch that is driven again is settled without its marks",
        PartSkipped: "journal: a part of a batch is not sent",
        FloorNotRaised: "marks expire and the shard's floor stays",
    }

    pub(crate) fn is(bug: Bug) -> bool {
        PLANTED.get() == Some(bug)
    }

    /// From now on, on this thread.
    pub(crate) fn plant(bug: Option<Bug>) {
        PLANTED.set(bug);
        simulated::plant(match bug {
            Some(Bug::EntryGoneWhileUnknown) => Some(simulated::Bug::EntryGoneWhileUnknown),
            Some(Bug::TokenChanged) => Some(simulated::Bug::TokenChanged),
            Some(Bug::SentBeforeJournaled) => Some(simulated::Bug::SentBeforeJournaled),
            Some(Bug::MarksLeftOut) => Some(simulated::Bug::MarksLeftOut),
            Some(Bug::PartSkipped) => Some(simulated::Bug::PartSkipped),
            _ => None,
        });
    }
}
