//! Parsers of bytes from outside, by name: for `fuzz/`, and for the test that replays its seeds. The store's and the sinks' are here too.

mod records;
#[cfg(test)]
mod tests;

use adapters::fuzzing::{Target, parts};

use crate::{
    config,
    door::http,
    key::{KeySpec, Pointer, parse_fingerprint},
    naming::{
        TimeUnit, event_ms, json,
        split::{ArraySplitter, Body, LineSplitter, SplitError},
    },
};

const OURS: &[Target] = &[
    ("config", config),
    ("http_head", http::fuzz_head),
    ("http_body", body),
    ("json", json_text),
    ("record", records::record),
    ("debezium", records::debezium),
    ("avro", records::avro),
    #[cfg(feature = "protobuf")]
    ("protobuf", records::protobuf),
];

/// All targets: name, and what reads the bytes. Panics if something does not hold.
pub fn targets() -> impl Iterator<Item = Target> {
    OURS.iter().copied().chain(adapters::fuzzing::TARGETS).chain(dedup_store::fuzzing::TARGETS)
}

/// Runs one of them.
///
/// # Panics
/// If there is none of that name, or if the target fails.
pub fn run(name: &str, bytes: &[u8]) {
    let (_, read) = targets().find(|(known, _)| *known == name).expect("a target of that name");
    read(bytes);
}

fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let lookup = |name: &str| (!name.starts_with('_')).then(|| "secret".to_owned());
    if let Err(errors) = config::load(text, lookup) {
        assert!(!errors.is_empty(), "a file that is refused is told why");
        errors.iter().for_each(|error| drop(error.to_string()));
    }
}

type Cut = Vec<Result<Vec<u8>, SplitError>>;

/// The records that a splitter cuts out of a body in pieces. Both splitters are asked in the same way.
macro_rules! cut {
    ($splitter:ident, $body:expr, $piece:expr, $limit:expr) => {{
        let (mut splitter, mut cut) = ($splitter::new($limit), Cut::new());
        for piece in $body.chunks($piece).map(Some).chain([None]) {
            match piece {
                Some(piece) => splitter.push(piece),
                None => splitter.finish(),
            }
            while let Some(record) = splitter.next_record() {
                cut.push(record.map(<[u8]>::to_vec));
            }
        }
        cut
    }};
}

/// A body, in pieces and whole: the same records come out. The first byte says of which size the pieces are, the second how long a
/// record may be.
fn body(bytes: &[u8]) {
    let [piece, limit, body @ ..] = bytes else { return };
    let (piece, limit) = (usize::from(piece % 17) + 1, usize::from(*limit) + 1);
    Body::sniff(body);
    let all = body.len().max(1);
    let whole = (cut!(LineSplitter, body, all, limit), cut!(ArraySplitter, body, all, limit));
    let pieces = (cut!(LineSplitter, body, piece, limit), cut!(ArraySplitter, body, piece, limit));
    assert_eq!(whole, pieces, "in pieces of {piece}");
    for record in whole.0.iter().chain(&whole.1).flatten() {
        assert!(record.len() <= limit);
    }
}

/// A pointer, and the JSON text that it is to point into; times and fingerprints.
fn json_text(bytes: &[u8]) {
    let [pointer, text] = parts(bytes).map(|part| std::str::from_utf8(part.unwrap_or_default()));
    let (Ok(pointer), Ok(text)) = (pointer, text) else { return };
    if let Some(fingerprint) = parse_fingerprint(pointer) {
        assert!(pointer.eq_ignore_ascii_case(&fingerprint.to_string()));
    }
    let pointer = Pointer::parse(pointer);
    let Ok(whole) = json::whole(text) else { return };
    if json::check(whole, json::MAX_DEPTH).is_err() {
        return;
    }
    if let Ok(pointer) = pointer
        && let Ok(Some(found)) = json::descend(whole, pointer.steps())
    {
        assert!(json::whole(found).is_ok(), "what is found is JSON");
    }
    drop(json::elements(whole));
    drop(json::members(whole));
    for unit in
        [None, Some(TimeUnit::Seconds), Some(TimeUnit::Millis), Some(TimeUnit::Micros), Some(TimeUnit::Nanos)]
    {
        drop(event_ms(whole, unit));
    }
    let spec = KeySpec::idempotency_key();
    for spec in [spec.clone(), spec.strict(true)] {
        if let Ok(key) = spec.canonical_idempotency_key(text.as_bytes()) {
            assert!((1..=255).contains(&key.len()));
        }
    }
}
