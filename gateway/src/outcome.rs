//! What became of a record: exactly one [`Outcome`] each, counted.

use dedup_store::{Fingerprint, Settled};

/// Exactly one per record.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Outcome {
    /// A row was made.
    Written,
    /// A row was changed (or deleted).
    Updated,
    /// A copy of a record that took effect.
    Duplicate,
    /// Same key as a record that took effect, other content.
    Mismatch,
    /// A row that wins was there: nothing changed.
    Stale,
    /// Not known, and too old to be surely new.
    Late,
    /// Bad input, or refused by the sink; settles nothing unless the route says so.
    Rejected,
    /// Kept with the dead letters.
    DeadLettered,
    /// Nothing is known of its effect (or it is still in flight); a retry is safe.
    Unknown,
}

impl Outcome {
    /// All, in the order of the design's table.
    pub const ALL: [Outcome; 9] = [
        Outcome::Written,
        Outcome::Updated,
        Outcome::Duplicate,
        Outcome::Mismatch,
        Outcome::Stale,
        Outcome::Late,
        Outcome::Rejected,
        Outcome::DeadLettered,
        Outcome::Unknown,
    ];

    /// The word used in config, metrics, logs, headers and bodies.
    pub fn word(self) -> &'static str {
        match self {
            Outcome::Written => "written",
            Outcome::Updated => "updated",
            Outcome::Duplicate => "duplicate",
            Outcome::Mismatch => "mismatch",
            Outcome::Stale => "stale",
            Outcome::Late => "late",
            Outcome::Rejected => "rejected",
            Outcome::DeadLettered => "dead_lettered",
            Outcome::Unknown => "unknown",
        }
    }
}

/// The outcome that is stored with a key, as a word of the same list.
pub fn settled_outcome(settled: Settled) -> Outcome {
    match settled {
        Settled::Written => Outcome::Written,
        Settled::Updated => Outcome::Updated,
        Settled::Stale => Outcome::Stale,
        Settled::Rejected => Outcome::Rejected,
        Settled::DeadLettered => Outcome::DeadLettered,
        Settled::Forgotten => Outcome::Unknown,
    }
}

/// What a door answers for one record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// What became of this record.
    pub outcome: Outcome,
    /// Its name; none if it could not be named.
    pub fingerprint: Option<Fingerprint>,
    /// For `Duplicate` and `Mismatch`: what the first record's outcome was.
    pub first: Option<Settled>,
    /// For everything that was not written, updated or a duplicate.
    pub problem: Option<Problem>,
}

impl Answer {
    /// Nothing is known of the record's effect, for this reason.
    pub fn unknown(fingerprint: Option<Fingerprint>, problem: Problem) -> Self {
        Self { outcome: Outcome::Unknown, fingerprint, first: None, problem: Some(problem) }
    }
}

/// Why a record was not written: decides the HTTP status and problem type in one place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Problem {
    /// It means nothing by its format (a tombstone behind a delete): its outcome is `duplicate`. 200.
    Passed,
    /// The payload is not what the route takes (syntax, members, types). 400.
    BadRecord(String),
    /// A key part is missing or null and the route rejects that. 400 key-missing.
    KeyMissing(String),
    /// The key itself is malformed or too long. 400 key-invalid.
    KeyInvalid(String),
    /// The sink refused the row (constraint, range). 422.
    Refused(String),
    /// Same key, other content. 422 key-mismatch.
    Mismatch,
    /// Below the admission floor. 422 late.
    Late(String),
    /// Event time further ahead than `max_ahead`. 422 ahead.
    Ahead(String),
    /// A copy is in flight for longer than `wait`. 409 + Retry-After.
    InFlight,
    /// Delivered, outcome not known yet; a retry with the same key is safe. 503 + Retry-After.
    OutcomeUnknown,
    /// Store, sink or route is not available; nothing was attempted. 503 + Retry-After.
    Unavailable(String),
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Problem::BadRecord(text)
            | Problem::KeyMissing(text)
            | Problem::KeyInvalid(text)
            | Problem::Refused(text)
            | Problem::Late(text)
            | Problem::Ahead(text)
            | Problem::Unavailable(text) => f.write_str(text),
            Problem::Passed => f.write_str("the record means nothing beside the one before it"),
            Problem::Mismatch => {
                f.write_str("the key was settled with other content; use a new key for a new event")
            }
            Problem::InFlight => f.write_str("a record with this key is in flight; retry later"),
            Problem::OutcomeUnknown => {
                f.write_str("the outcome is not known yet; a retry with the same key is safe")
            }
        }
    }
}

impl std::error::Error for Problem {}
