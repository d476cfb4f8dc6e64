//! What a row may be, and a payload as a line. Pure.

use serde::de::IgnoredAny;

use crate::{
    sink::{Column, Encode, RowKind},
    value::{BadValue, Value},
};

/// Takes every record as it is: the row is the payload.
#[derive(Debug)]
pub(super) struct Encoder;

impl Encode for Encoder {
    fn columns(&self) -> &[Column] {
        &[]
    }

    fn encode(
        &self,
        kind: RowKind,
        _values: &[Value<'_>],
        _row: &mut Vec<u8>,
        _row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        match kind {
            RowKind::Write => Ok(()),
            RowKind::Delete => Err(BadValue {
                column: String::new(),
                column_type: "a line of a file".to_owned(),
                reason: "files are only appended to: a delete finds no row".to_owned(),
            }),
        }
    }

    fn whole(&self) -> bool {
        true
    }
}

/// Appends `payload` as one line. Line ends can only stand between the tokens of a JSON text, where a space means the same; all other
/// bytes are kept. On an error, which holds nothing of the payload, `lines` is as it was.
pub(super) fn put_line(payload: &[u8], lines: &mut Vec<u8>) -> Result<(), String> {
    let text = std::str::from_utf8(payload)
        .map_err(|fault| format!("the payload is not UTF-8 at byte {}", fault.valid_up_to()))?;
    serde_json::from_str::<IgnoredAny>(text).map_err(|fault| {
        format!("the payload is not one JSON text (line {}, column {})", fault.line(), fault.column())
    })?;
    let start = lines.len();
    lines.extend_from_slice(payload);
    for byte in &mut lines[start..] {
        if matches!(*byte, b'\n' | b'\r') {
            *byte = b' ';
        }
    }
    lines.push(b'\n');
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_payload_is_kept_byte_for_byte_on_one_line() {
        let mut lines = Vec::new();
        put_line(b"{\"a\" : 1.50,\r\n\"b\":\"x\\ny\"}", &mut lines).unwrap();
        put_line(b"123456789012345678901234567890.10", &mut lines).unwrap();
        assert_eq!(lines, b"{\"a\" : 1.50,  \"b\":\"x\\ny\"}\n123456789012345678901234567890.10\n");
    }

    #[test]
    fn what_is_not_one_json_text_is_refused_and_leaves_nothing() {
        for bad in [&b""[..], b"{", b"{} {}", b"{\"a\":\"\xff\"}", b"not", b"{\"a\":\"x\ny\"}"] {
            let mut lines = b"before\n".to_vec();
            let reason = put_line(bad, &mut lines).unwrap_err();
            assert!(reason.starts_with("the payload is not"), "{reason}");
            assert_eq!(lines, b"before\n");
        }
    }

    #[test]
    fn a_delete_is_a_bad_value() {
        let (mut row, mut key) = (Vec::new(), Vec::new());
        let bad = Encoder.encode(RowKind::Delete, &[], &mut row, &mut key).unwrap_err();
        assert!(bad.reason.contains("only appended to"), "{bad}");
    }

    proptest! {
        #[test]
        fn a_line_means_what_the_payload_means(text in any::<String>(), number in any::<i64>(), pretty: bool) {
            let value = serde_json::json!({ "text": text, "list": [number, null, { "x": true }] });
            let payload = if pretty { serde_json::to_vec_pretty(&value) } else { serde_json::to_vec(&value) };
            let mut lines = Vec::new();
            put_line(&payload.unwrap(), &mut lines).unwrap();
            prop_assert_eq!(lines.iter().filter(|byte| **byte == b'\n').count(), 1);
            prop_assert_eq!(serde_json::from_slice::<serde_json::Value>(&lines).unwrap(), value);
        }
    }
}
