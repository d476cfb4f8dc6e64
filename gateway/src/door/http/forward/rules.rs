//! What an answer means for its key, and what a copy gets. Pure.

use std::sync::Arc;

use adapters::upstream::{Found, Kept, Sent, UpstreamAnswer};
use bytes::Bytes;

/// What is done with a key whose outcome is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnUnknown {
    /// It is never sent again.
    #[default]
    Stop,
    /// It is sent again under the same `Idempotency-Key`: the service says that it honours that.
    Retry,
}

/// What 5xx and 408 mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ServerErrors {
    /// The request may have been applied.
    #[default]
    Unknown,
    /// An answer like others.
    Final,
    /// The service applied nothing: the key is free again.
    Retry,
}

/// How a route judges answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AnswerRules {
    /// Of keys whose outcome is not known.
    pub on_unknown: OnUnknown,
    /// Of 5xx and 408.
    pub server_errors: ServerErrors,
    /// Statuses by which the service says that it applied nothing.
    pub not_applied: Vec<u16>,
    /// With [`OnUnknown::Retry`] a request is sent so often before its caller is told that the outcome is unknown.
    pub attempts: u32,
    /// A copy with other content is answered like one with the same.
    pub ignore_mismatch: bool,
}

impl Default for AnswerRules {
    fn default() -> Self {
        Self {
            on_unknown: OnUnknown::Stop,
            server_errors: ServerErrors::Unknown,
            not_applied: vec![401, 407, 425, 429],
            attempts: 3,
            ignore_mismatch: false,
        }
    }
}

/// What a status means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    Final,
    NotApplied,
    Unknown,
}

impl AnswerRules {
    /// `open`: an earlier attempt with the key may have been applied.
    fn class(&self, status: u16, open: bool) -> Class {
        match status {
            status if self.not_applied.contains(&status) => Class::NotApplied,
            ..200 => Class::Unknown,
            // The draft's word for "the first request with this key is still at work".
            409 if open => Class::Unknown,
            408 | 500.. => match self.server_errors {
                ServerErrors::Unknown => Class::Unknown,
                ServerErrors::Final => Class::Final,
                ServerErrors::Retry => Class::NotApplied,
            },
            // It says nothing of the earlier attempt: a service may refuse before it looks for the key.
            400..=499 if open => Class::NotApplied,
            _ => Class::Final,
        }
    }
}

/// What a request with a key gets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// It goes to the service under this `Idempotency-Key`; `open`: an earlier attempt may have been applied.
    Send { sent_key: Bytes, open: bool },
    /// The answer of the first.
    Replay(Arc<Kept>),
    /// Its key has other content.
    Mismatch,
    /// The first has no outcome, and nothing is sent again.
    Stopped,
    /// There is no room for its key.
    Full,
}

/// Decides by what the book has.
pub(super) fn next(found: Found, digest: u64, sent_key: &Bytes, rules: &AnswerRules) -> Next {
    let differs = |first: u64| first != digest && !rules.ignore_mismatch;
    match found {
        Found::New => Next::Send { sent_key: sent_key.clone(), open: false },
        Found::Full => Next::Full,
        Found::Answered(kept) if differs(kept.digest) => Next::Mismatch,
        Found::Answered(kept) => Next::Replay(kept),
        // Sent again, it must be what was sent.
        Found::Begun { digest: first, .. }
            if first != digest && (differs(first) || rules.on_unknown == OnUnknown::Retry) =>
        {
            Next::Mismatch
        }
        Found::Begun { sent_key, .. } => match rules.on_unknown {
            OnUnknown::Stop => Next::Stopped,
            // It went out before the route said `retry`, and the service cannot know it again.
            OnUnknown::Retry if sent_key.is_empty() => Next::Stopped,
            OnUnknown::Retry => Next::Send { sent_key, open: true },
        },
    }
}

/// What becomes of a key after an attempt.
#[derive(Debug)]
pub(super) enum After {
    /// The answer is kept, then given.
    Keep(UpstreamAnswer),
    /// The service applied nothing, now or before: the key is free, then its answer is given.
    Free(UpstreamAnswer),
    /// The service applied nothing this time, and may have before: its answer is given, the key stays begun.
    Pass(UpstreamAnswer),
    /// Nothing was sent, now or before: the key is free.
    NotSent(String),
    /// Nothing is known.
    Unknown { reason: String, late: bool },
}

/// Decides by what came of it. `open`: an earlier attempt with the key may have been applied.
pub(super) fn after(sent: Sent, open: bool, rules: &AnswerRules) -> After {
    match sent {
        Sent::Answer(answer) => match rules.class(answer.status.as_u16(), open) {
            Class::Final => After::Keep(answer),
            Class::NotApplied if open => After::Pass(answer),
            Class::NotApplied => After::Free(answer),
            Class::Unknown => {
                let reason = format!("it answered {}", answer.status.as_u16());
                After::Unknown { reason, late: false }
            }
        },
        Sent::NotSent(reason) if open => After::Unknown { reason, late: false },
        Sent::NotSent(reason) => After::NotSent(reason),
        Sent::Unknown { reason, late } => After::Unknown { reason, late },
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, StatusCode};

    use super::*;

    fn answer(status: u16) -> Sent {
        let status = StatusCode::from_u16(status).unwrap();
        Sent::Answer(UpstreamAnswer { status, headers: HeaderMap::new(), body: Some(Bytes::new()) })
    }

    fn word(after: &After) -> &'static str {
        match after {
            After::Keep(_) => "keep",
            After::Free(_) => "free",
            After::Pass(_) => "pass",
            After::NotSent(_) => "not sent",
            After::Unknown { .. } => "unknown",
        }
    }

    #[test]
    fn an_answer_means_what_its_class_says() {
        let rules = AnswerRules::default();
        for (status, first, again) in [
            (101, "unknown", "unknown"),
            (200, "keep", "keep"),
            (204, "keep", "keep"),
            (307, "keep", "keep"),
            (400, "keep", "pass"),
            (404, "keep", "pass"),
            (409, "keep", "unknown"),
            (422, "keep", "pass"),
            (401, "free", "pass"),
            (425, "free", "pass"),
            (429, "free", "pass"),
            (408, "unknown", "unknown"),
            (500, "unknown", "unknown"),
            (503, "unknown", "unknown"),
            (599, "unknown", "unknown"),
        ] {
            assert_eq!(word(&after(answer(status), false, &rules)), first, "{status}");
            assert_eq!(word(&after(answer(status), true, &rules)), again, "{status} again");
        }
        for (server_errors, first) in [(ServerErrors::Final, "keep"), (ServerErrors::Retry, "free")] {
            let rules = AnswerRules { server_errors, ..rules.clone() };
            assert_eq!(word(&after(answer(500), false, &rules)), first);
        }
        let rules = AnswerRules { not_applied: vec![503], ..rules };
        assert_eq!(word(&after(answer(503), false, &rules)), "free");
        assert_eq!(word(&after(answer(429), false, &rules)), "keep");
    }

    #[test]
    fn a_key_is_free_only_if_no_attempt_can_have_been_applied() {
        let rules = AnswerRules { on_unknown: OnUnknown::Retry, ..AnswerRules::default() };
        let refused = || Sent::NotSent("refused".into());
        assert_eq!(word(&after(refused(), false, &rules)), "not sent");
        assert_eq!(word(&after(refused(), true, &rules)), "unknown");
        let cut = Sent::Unknown { reason: "cut".into(), late: false };
        assert_eq!(word(&after(cut, false, &rules)), "unknown");
    }

    #[test]
    fn what_a_copy_gets() {
        let (stop, ours) = (AnswerRules::default(), Bytes::from_static(b"ours"));
        let retry = AnswerRules { on_unknown: OnUnknown::Retry, ..stop.clone() };
        let kept = Arc::new(Kept { digest: 1, until_ms: 9, status: 201, head: vec![], body: None });
        let begun = || Found::Begun { digest: 1, sent_key: "theirs".into() };
        let decide = |found, digest, rules| next(found, digest, &ours, rules);
        assert_eq!(decide(Found::New, 1, &stop), Next::Send { sent_key: ours.clone(), open: false });
        assert_eq!(decide(Found::Answered(kept.clone()), 1, &stop), Next::Replay(kept.clone()));
        assert_eq!(decide(Found::Answered(kept.clone()), 2, &stop), Next::Mismatch);
        assert_eq!(decide(begun(), 1, &stop), Next::Stopped);
        assert_eq!(decide(begun(), 2, &stop), Next::Mismatch);
        // Sent again under the key that it had, however the copy writes it.
        assert_eq!(decide(begun(), 1, &retry), Next::Send { sent_key: "theirs".into(), open: true });
        let ignore = AnswerRules { ignore_mismatch: true, ..retry.clone() };
        assert_eq!(decide(Found::Answered(kept.clone()), 2, &ignore), Next::Replay(kept));
        assert_eq!(
            decide(begun(), 2, &ignore),
            Next::Mismatch,
            "other content is never sent under a used key"
        );
        assert_eq!(decide(Found::Full, 1, &ignore), Next::Full);
        let bare = Found::Begun { digest: 1, sent_key: Bytes::new() };
        assert_eq!(decide(bare, 1, &retry), Next::Stopped, "the service could not know it again");
    }
}
