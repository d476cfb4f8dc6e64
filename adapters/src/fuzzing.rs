//! The parsers of this crate, as fuzzing calls them.

use crate::decode;

/// Name, and what reads the bytes. Panics if something does not hold.
pub type Target = (&'static str, fn(&[u8]));

/// All of this crate.
pub const TARGETS: [Target; 5] = [
    ("values", values),
    ("marks_line", crate::kafka_sink::fuzz),
    ("replies", replies),
    ("addresses", addresses),
    ("journal_entry", crate::journal::fuzz),
];

/// What stands between the parts of an input.
const SEPARATOR: &[u8] = b"\n~~\n";

/// The parts of an input; those that are missing are none.
pub fn parts<const N: usize>(bytes: &[u8]) -> [Option<&[u8]>; N] {
    let mut rest = Some(bytes);
    std::array::from_fn(|at| {
        let all = rest.take()?;
        let end = all.windows(SEPARATOR.len()).position(|window| window == SEPARATOR);
        match end.filter(|_| at + 1 < N) {
            Some(end) => {
                rest = Some(&all[end + SEPARATOR.len()..]);
                Some(&all[..end])
            }
            None => Some(all),
        }
    })
}

/// Values of records on their way to a column: JSON texts, and texts from outside JSON.
fn values(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (mut scratch, mut out) = (String::new(), Vec::new());
    if let Ok(decimal) = decode::Decimal::parse(text) {
        let significant = decimal.significant();
        assert_eq!(significant.len(), significant.digits().count());
        assert!(decimal.written_scale() >= 0 || text.contains(['e', 'E']));
    }
    if let Ok(value) = decode::integer(text, i64::MIN, i64::MAX) {
        assert_eq!(decode::integer(&value.to_string(), i64::MIN, i64::MAX), Ok(value));
    }
    if let Ok(value) = decode::double(text) {
        assert!(value.is_finite(), "what is no number is refused");
    }
    drop(decode::single(text));
    drop(decode::bytes(text, &mut out));
    drop(decode::uuid(text));
    for read in [decode::date, decode::time, decode::timestamp, decode::local_timestamp] {
        drop(read(text));
        drop(decode::nanos(text, read));
    }
    if !serde_json::from_str::<&serde_json::value::RawValue>(text).is_ok_and(|raw| raw.get() == text) {
        return;
    }
    decode::kind_of(text);
    drop(decode::boolean(text));
    drop(decode::number_text(text, &mut scratch));
    out.clear();
    let appended = decode::append_string(text, &mut out);
    let read = decode::string(text, &mut scratch);
    assert_eq!(appended.is_ok(), read.is_ok());
    if let Ok(read) = read {
        assert_eq!(out, read.as_bytes(), "a string is appended as it is read");
    }
}

/// What servers say of their tables and of what was sent to them.
fn replies(bytes: &[u8]) {
    crate::stream_load::fuzz(bytes);
    crate::clickhouse::fuzz(bytes);
    crate::redis::fuzz(bytes);
}

/// URLs of the configuration.
fn addresses(bytes: &[u8]) {
    let Ok(url) = std::str::from_utf8(bytes) else { return };
    if let Ok(place) = crate::http_client::Place::parse(url, "a server") {
        assert!(!place.host.is_empty());
    }
    crate::redis::fuzz_address(url);
}
