//! Every error that the door answers: status, type and title in one place.

use http::StatusCode;

use crate::outcome::{Answer, Outcome, Problem, settled_outcome};

/// What went wrong, by RFC 9457 problem type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The payload is not what the route takes.
    BadRecord,
    /// Not HTTP, or framed in a way that two parsers may read differently.
    BadRequest,
    /// The target of the request is too long.
    UriTooLong,
    /// The head of the request is too large.
    HeadTooLarge,
    /// The body ended early, or its framing is broken.
    BodyIncomplete,
    /// The body does not decode as `Content-Encoding` says.
    BodyUndecodable,
    /// A key part, or the `Idempotency-Key` that the route asks for, is not there.
    KeyMissing,
    /// A key is malformed or too long.
    KeyInvalid,
    /// No bearer token, or another one.
    Unauthorized,
    /// No such route.
    UnknownRoute,
    /// Only POST writes; to an upstream PUT, PATCH and DELETE too.
    MethodNotAllowed,
    /// The body did not come in time.
    RequestTimeout,
    /// A copy is in flight.
    InFlight,
    /// Body or record above the limit.
    BodyTooLarge,
    /// Another media type.
    UnsupportedMediaType,
    /// Another content coding.
    UnsupportedEncoding,
    /// An expectation other than `100-continue`.
    ExpectationFailed,
    /// Same key, other content.
    KeyMismatch,
    /// The sink refused the row.
    Refused,
    /// Below the admission floor.
    Late,
    /// Event time too far ahead.
    Ahead,
    /// Kept with the dead letters.
    DeadLettered,
    /// Too many requests or bytes in flight.
    TooManyRequests,
    /// Delivered, outcome not known.
    OutcomeUnknown,
    /// Store, sink or route is not available.
    Unavailable,
    /// The upstream may have applied the request, and it is not sent again.
    UpstreamUnknown,
    /// The same, because its answer did not come in time.
    UpstreamTimeout,
    /// The upstream's answer is final and was too large to keep.
    AnswerNotKept,
}

impl Kind {
    /// HTTP status, last part of the type URI, title.
    pub fn parts(self) -> (StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Kind::BadRecord => (S::BAD_REQUEST, "bad-record", "The record is not what the route takes"),
            Kind::BadRequest => (S::BAD_REQUEST, "bad-request", "The request is not valid HTTP/1.1"),
            Kind::UriTooLong => (S::URI_TOO_LONG, "uri-too-long", "The request's target is too long"),
            Kind::HeadTooLarge => {
                (S::REQUEST_HEADER_FIELDS_TOO_LARGE, "head-too-large", "The request's head is too large")
            }
            Kind::BodyIncomplete => (S::BAD_REQUEST, "body-incomplete", "The body is incomplete"),
            Kind::BodyUndecodable => {
                (S::BAD_REQUEST, "body-undecodable", "The body does not decode as Content-Encoding says")
            }
            Kind::KeyMissing => (S::BAD_REQUEST, "key-missing", "The dedup key is missing"),
            Kind::KeyInvalid => (S::BAD_REQUEST, "key-invalid", "The dedup key is invalid"),
            Kind::Unauthorized => (S::UNAUTHORIZED, "unauthorized", "A bearer token is needed"),
            Kind::UnknownRoute => (S::NOT_FOUND, "unknown-route", "There is no such route"),
            Kind::MethodNotAllowed => {
                (S::METHOD_NOT_ALLOWED, "method-not-allowed", "The method is not taken here")
            }
            Kind::RequestTimeout => (S::REQUEST_TIMEOUT, "request-timeout", "The body did not come in time"),
            Kind::InFlight => (S::CONFLICT, "in-flight", "A record with this key is in flight"),
            Kind::BodyTooLarge => (S::PAYLOAD_TOO_LARGE, "body-too-large", "The body is too large"),
            Kind::UnsupportedMediaType => {
                (S::UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", "The content type is not supported")
            }
            Kind::UnsupportedEncoding => {
                (S::UNSUPPORTED_MEDIA_TYPE, "unsupported-encoding", "The content coding is not supported")
            }
            Kind::ExpectationFailed => {
                (S::EXPECTATION_FAILED, "expectation-failed", "The expectation is not known")
            }
            Kind::KeyMismatch => {
                (S::UNPROCESSABLE_ENTITY, "key-mismatch", "The key was used with other content")
            }
            Kind::Refused => (S::UNPROCESSABLE_ENTITY, "refused", "The sink refused the row"),
            Kind::Late => (S::UNPROCESSABLE_ENTITY, "late", "The record is too old to be surely new"),
            Kind::Ahead => (S::UNPROCESSABLE_ENTITY, "ahead", "The record's event time is too far ahead"),
            Kind::DeadLettered => {
                (S::UNPROCESSABLE_ENTITY, "dead-lettered", "The record is kept with the dead letters")
            }
            Kind::TooManyRequests => (S::TOO_MANY_REQUESTS, "too-many-requests", "Too much is in flight"),
            Kind::OutcomeUnknown => (
                S::SERVICE_UNAVAILABLE,
                "outcome-unknown",
                "It is not known yet whether the record was written",
            ),
            Kind::UpstreamUnknown => (
                S::BAD_GATEWAY,
                "upstream-outcome-unknown",
                "It is not known whether the upstream applied the request",
            ),
            Kind::UpstreamTimeout => (
                S::GATEWAY_TIMEOUT,
                "upstream-timeout",
                "The upstream did not answer in time, and may have applied the request",
            ),
            Kind::AnswerNotKept => {
                (S::GONE, "answer-not-kept", "The request was answered, and its answer was not kept")
            }
            Kind::Unavailable => (S::SERVICE_UNAVAILABLE, "unavailable", "The route cannot take records now"),
        }
    }

    /// The status alone.
    pub fn status(self) -> StatusCode {
        self.parts().0
    }

    /// A retry with the same key may do better: the answer carries `Retry-After`.
    pub fn retry(self) -> bool {
        matches!(self, Kind::InFlight | Kind::TooManyRequests | Kind::OutcomeUnknown | Kind::Unavailable)
    }

    /// What is known of the key.
    pub fn state(self) -> Option<&'static str> {
        match self {
            Kind::InFlight => Some("in_flight"),
            Kind::KeyMismatch | Kind::DeadLettered | Kind::Refused | Kind::AnswerNotKept => Some("completed"),
            Kind::OutcomeUnknown | Kind::UpstreamUnknown | Kind::UpstreamTimeout => Some("unknown"),
            _ => None,
        }
    }
}

/// A problem with its detail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trouble {
    /// Its type.
    pub kind: Kind,
    /// What, where, the bound, what to do.
    pub detail: String,
}

impl Trouble {
    pub(crate) fn new(kind: Kind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into() }
    }
}

impl From<&Problem> for Trouble {
    fn from(problem: &Problem) -> Self {
        let (kind, detail) = match problem {
            Problem::BadRecord(detail) => (Kind::BadRecord, detail.as_str()),
            Problem::KeyMissing(detail) => (Kind::KeyMissing, detail.as_str()),
            Problem::KeyInvalid(detail) => (Kind::KeyInvalid, detail.as_str()),
            Problem::Refused(detail) => (Kind::Refused, detail.as_str()),
            Problem::Late(detail) => (Kind::Late, detail.as_str()),
            Problem::Ahead(detail) => (Kind::Ahead, detail.as_str()),
            Problem::Unavailable(detail) => (Kind::Unavailable, detail.as_str()),
            // Never shown: the record is answered as a copy.
            Problem::Passed => (Kind::BadRecord, "the record has no payload"),
            Problem::Mismatch => {
                (Kind::KeyMismatch, "this key took effect with other content; use a new key for a new event")
            }
            Problem::InFlight => {
                (Kind::InFlight, "a copy is still on its way; send this record again with the same key")
            }
            Problem::OutcomeUnknown => (
                Kind::OutcomeUnknown,
                "it may or may not have been written; send it again with the same key, it takes effect once",
            ),
        };
        Trouble::new(kind, detail)
    }
}

/// How one record is answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// A receipt: the record, or the one that it is a copy of, took effect.
    Receipt {
        /// Of an answer to this record alone.
        status: StatusCode,
        /// What became of the first record with this key: what the receipt says.
        first: Outcome,
        /// This record is a copy.
        replayed: bool,
    },
    /// It did not.
    Trouble(Trouble),
}

impl Verdict {
    /// Decides; a copy is answered as the first record was.
    pub fn of(answer: &Answer) -> Self {
        if let Some(problem) = &answer.problem {
            return Verdict::Trouble(problem.into());
        }
        let first = answer.first.map_or(Outcome::Written, settled_outcome);
        match answer.outcome {
            Outcome::Written | Outcome::Updated | Outcome::Stale => Self::receipt(answer.outcome, false),
            // A mismatch without a problem is one that the route ignores: it is answered as a copy.
            Outcome::Duplicate | Outcome::Mismatch => Self::receipt(first, true),
            outcome @ (Outcome::Late | Outcome::Rejected | Outcome::DeadLettered | Outcome::Unknown) => {
                Self::receipt(outcome, false)
            }
        }
    }

    fn receipt(first: Outcome, replayed: bool) -> Self {
        match first {
            Outcome::Written | Outcome::Updated => {
                Verdict::Receipt { status: StatusCode::CREATED, first, replayed }
            }
            Outcome::Stale => Verdict::Receipt { status: StatusCode::OK, first, replayed },
            Outcome::Late => Verdict::Trouble(Trouble::new(Kind::Late, "too old to be surely new")),
            Outcome::Rejected => Verdict::Trouble(Trouble::new(
                Kind::Refused,
                "a record with this key was refused; mend the content and use a new key",
            )),
            Outcome::DeadLettered => Verdict::Trouble(Trouble::new(
                Kind::DeadLettered,
                "nothing was written; replay it from the dead letters once its cause is mended",
            )),
            Outcome::Duplicate | Outcome::Mismatch | Outcome::Unknown => {
                Verdict::Trouble((&Problem::OutcomeUnknown).into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dedup_store::Settled;

    use super::*;

    fn answer(outcome: Outcome, first: Option<Settled>, problem: Option<Problem>) -> Answer {
        Answer { outcome, fingerprint: None, first, problem }
    }

    #[test]
    fn a_copy_has_the_status_of_the_first() {
        for (settled, outcome) in [
            (Settled::Written, Outcome::Written),
            (Settled::Updated, Outcome::Updated),
            (Settled::Stale, Outcome::Stale),
            (Settled::Rejected, Outcome::Rejected),
            (Settled::DeadLettered, Outcome::DeadLettered),
        ] {
            let first = Verdict::of(&answer(outcome, None, None));
            let copy = Verdict::of(&answer(Outcome::Duplicate, Some(settled), None));
            match (first, copy) {
                (
                    Verdict::Receipt { status, first, replayed: false },
                    Verdict::Receipt { status: copy_status, first: copy_first, replayed: true },
                ) => assert_eq!((status, first), (copy_status, copy_first)),
                (first, copy) => assert_eq!(first, copy),
            }
        }
    }

    #[test]
    fn rule5_an_outcome_without_words_is_unknown_and_can_be_retried() {
        let Verdict::Trouble(trouble) = Verdict::of(&answer(Outcome::Unknown, None, None)) else { panic!() };
        assert_eq!(trouble.kind, Kind::OutcomeUnknown);
        assert!(trouble.kind.retry() && trouble.kind.status() == StatusCode::SERVICE_UNAVAILABLE);
    }

    #[test]
    fn problems_have_the_statuses_of_the_contract() {
        for (problem, status) in [
            (Problem::BadRecord(String::new()), 400),
            (Problem::KeyMissing(String::new()), 400),
            (Problem::KeyInvalid(String::new()), 400),
            (Problem::InFlight, 409),
            (Problem::Refused(String::new()), 422),
            (Problem::Mismatch, 422),
            (Problem::Late(String::new()), 422),
            (Problem::Ahead(String::new()), 422),
            (Problem::OutcomeUnknown, 503),
            (Problem::Unavailable(String::new()), 503),
        ] {
            assert_eq!(Trouble::from(&problem).kind.status().as_u16(), status, "{problem:?}");
        }
    }
}
