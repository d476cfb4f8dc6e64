//! Replies and errors of the server in the sink's words. Pure.

use ::redis::{RedisError, Value};

use super::connect::Fault;
use crate::sink::SinkError;

/// What an error of the server leaves behind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    /// Nothing was written.
    Refused {
        /// Trying again may help.
        retry: bool,
        advice: &'static str,
    },
    /// Perhaps something was.
    Doubt,
}

/// Of the error's text, which begins with its code. The scripts try what these refuse before all other writes, so that none of them
/// comes half-way.
pub(super) fn classify(text: &str) -> Class {
    let refused = |retry, advice| Class::Refused { retry, advice };
    // A script can be killed until it writes.
    if text.contains("Script killed by user") {
        return refused(true, "it is tried again");
    }
    match bare(text).split([' ', ':']).next().unwrap_or_default() {
        "OOM" => refused(true, "raise the server's maxmemory, or make room"),
        "BUSY" => refused(
            true,
            "a script of someone else's runs for long: SCRIPT KILL ends it unless it has written",
        ),
        "READONLY" | "MASTERDOWN" => {
            refused(true, "the server is a replica: name the primary, or wait for the failover to end")
        }
        "LOADING" => refused(true, "the server is starting"),
        "MISCONF" => refused(true, "the server cannot write its files: see its log"),
        "NOREPLICAS" => refused(true, "the server has fewer replicas than min-replicas-to-write"),
        "NOSCRIPT" => refused(true, "it is tried again"),
        // Where a script runs into it, it may have done so after a write.
        "NOPERM" if text.contains("script") => Class::Doubt,
        "NOAUTH" | "WRONGPASS" | "NOPERM" => refused(false, "check the user, its password and its ACL"),
        "MOVED" | "ASK" | "CROSSSLOT" | "CLUSTERDOWN" | "TRYAGAIN" => refused(
            false,
            "Redis Cluster cannot hold rows and marks in one script: use a server without cluster mode",
        ),
        "WRONGTYPE" => refused(false, "a key of Oncegate's holds something else: move it away"),
        _ => Class::Doubt,
    }
}

/// Without where it came up: version 6 puts that before the code of what a script ran into.
pub(super) fn bare(text: &str) -> &str {
    match text.split_once("@user_script") {
        Some((before, inner)) if before.is_empty() || before.starts_with("ERR Error running script") => {
            inner.trim_start_matches(|c: char| matches!(c, ':' | ' ' | '-' | '@') || c.is_ascii_digit())
        }
        _ => text.trim_start_matches('-'),
    }
}

/// The error in one line, its code first where it is the server's.
pub(super) fn text_of(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) if detail.starts_with(code) => detail.to_owned(),
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        (Some(code), None) => code.to_owned(),
        (None, _) => error.to_string(),
    }
}

/// A line of `INFO`.
pub(super) fn info<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim_end)
}

/// Of a reply that no script gives.
fn strange() -> Fault {
    Fault::Lost("a script was answered by something else than its reply; report this as a bug".to_owned())
}

/// The parts of a list.
pub(super) fn list(value: &Value) -> Result<&[Value], Fault> {
    if let Value::Array(parts) = value { Ok(parts) } else { Err(strange()) }
}

/// Bytes; none for nothing.
pub(super) fn maybe(value: &Value) -> Result<Option<&[u8]>, Fault> {
    match value {
        Value::Nil => Ok(None),
        Value::BulkString(bytes) => Ok(Some(bytes)),
        Value::SimpleString(text) => Ok(Some(text.as_bytes())),
        _ => Err(strange()),
    }
}

/// Bytes of one part.
pub(super) fn bytes(parts: &[Value], at: usize) -> Result<&[u8], Fault> {
    maybe(parts.get(at).ok_or_else(strange)?)?.ok_or_else(strange)
}

/// Text of one part.
pub(super) fn text(parts: &[Value], at: usize) -> Result<&str, Fault> {
    std::str::from_utf8(bytes(parts, at)?).map_err(|_| strange())
}

/// A number of one part.
pub(super) fn number(parts: &[Value], at: usize) -> Result<i64, Fault> {
    text(parts, at)?.parse().map_err(|_| strange())
}

/// A number of one part, none if it is not there.
pub(super) fn maybe_number(parts: &[Value], at: usize) -> Result<Option<i64>, Fault> {
    match maybe(parts.get(at).ok_or_else(strange)?)? {
        None => Ok(None),
        Some(_) => number(parts, at).map(Some),
    }
}

/// Names the shards that a script counts.
pub(super) type Names<'a> = dyn Fn(usize) -> String + Send + Sync + 'a;

/// What the scripts answer where they wrote nothing, as an error: `names` are the shards that they count.
pub(super) fn refusal(parts: &[Value], names: &Names<'_>) -> Result<Option<SinkError>, Fault> {
    let shard = || Ok(names(usize::try_from(number(parts, 1)?).map_err(|_| strange())?.wrapping_sub(1)));
    Ok(Some(match text(parts, 0)? {
        "fenced" => SinkError::Fenced {
            shard: shard()?,
            owner: String::from_utf8_lossy(bytes(parts, 2)?).into_owned(),
            epoch: number(parts, 3)?,
        },
        "held" => SinkError::Held {
            shard: shard()?,
            owner: String::from_utf8_lossy(bytes(parts, 2)?).into_owned(),
            seen_ms: number(parts, 3)?.max(0),
        },
        "ahead" => SinkError::Unknown {
            reason: format!(
                "shard {} is at sequence {} already: an earlier attempt may be in",
                shard()?,
                text(parts, 3)?
            ),
        },
        "back" => {
            let (shard, epoch, sequence) = (shard()?, text(parts, 2)?, text(parts, 3)?);
            let at = match epoch {
                "" => "gone".to_owned(),
                epoch => format!("at epoch {epoch}, sequence {sequence}"),
            };
            SinkError::NotApplied {
                reason: format!("the server went back: shard {shard} is {at}"),
                retry: true,
            }
        }
        "type" => SinkError::NotApplied {
            reason: format!(
                "the key {:?} holds a {}, and Oncegate keeps something else there; move it away",
                String::from_utf8_lossy(bytes(parts, 1)?),
                text(parts, 2)?
            ),
            retry: false,
        },
        "refused" => {
            let said = bare(text(parts, 1)?).trim_end().to_owned();
            match classify(&said) {
                Class::Refused { retry, advice } => {
                    SinkError::NotApplied { reason: format!("{said}; {advice}"), retry }
                }
                Class::Doubt => SinkError::NotApplied { reason: said, retry: true },
            }
        }
        _ => return Ok(None),
    }))
}
