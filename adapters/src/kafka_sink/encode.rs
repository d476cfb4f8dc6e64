//! A record as it came, in the bytes of a row; and the row key's bytes. Pure.

use super::{HeadersFrom, KafkaSinkConfig, KeyFrom, PartitionFrom, TimestampFrom};
use crate::{
    sink::{Column, Encode, Mode, Original, RowKind},
    value::{BadValue, Value},
};

/// Encodes rows; shared by all lanes.
#[derive(Debug)]
pub(super) struct Encoder {
    columns: Vec<Column>,
    /// The row key is written to the record.
    keyed: bool,
    headers: bool,
    key: KeyFrom,
    partition: PartitionFrom,
    timestamp: TimestampFrom,
}

/// What is to be written, read from a row's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Sent<'a> {
    pub(super) key: Option<&'a [u8]>,
    pub(super) partition: Option<i32>,
    /// None: the time of writing.
    pub(super) timestamp_ms: Option<i64>,
    headers: &'a [u8],
}

impl Encoder {
    pub(super) fn new(config: &KafkaSinkConfig) -> Self {
        let column = |name: &String| Column {
            name: name.clone(),
            type_name: "json".to_owned(),
            nullable: false,
            has_default: false,
        };
        Self {
            columns: config.row_key.iter().map(column).collect(),
            keyed: config.mode != Mode::Insert || config.key == KeyFrom::RowKey,
            headers: config.headers == HeadersFrom::Source,
            key: config.key,
            partition: config.partition,
            timestamp: config.timestamp,
        }
    }

    /// One column: a string's text, or the JSON of another scalar. Several: a JSON object, in the columns' order.
    fn row_key(&self, values: &[Value<'_>], row_key: &mut Vec<u8>) -> Result<(), BadValue> {
        if self.columns.is_empty() {
            return Ok(());
        }
        let several = self.columns.len() > 1;
        for (at, column) in self.columns.iter().enumerate() {
            let bad = |reason: &str| BadValue {
                column: column.name.clone(),
                column_type: column.type_name.clone(),
                reason: reason.to_owned(),
            };
            let value = values.get(at).copied().unwrap_or(Value::Missing);
            if several {
                row_key.extend_from_slice(if at == 0 { b"{" } else { b"," });
                row_key
                    .extend_from_slice(serde_json::Value::from(column.name.as_str()).to_string().as_bytes());
                row_key.push(b':');
            }
            match value {
                Value::Missing => return Err(bad("a row key needs it")),
                Value::Json(json) => {
                    let json = json.trim();
                    match json.as_bytes().first() {
                        Some(b'"') => {
                            let text: String = serde_json::from_str(json)
                                .map_err(|_| bad("no text: it holds half of a character"))?;
                            put_text(&text, several, row_key);
                        }
                        Some(b'{' | b'[') => return Err(bad("a row key takes no object and no array")),
                        Some(b'n') => return Err(bad("null in a row key")),
                        _ => row_key.extend_from_slice(json.as_bytes()),
                    }
                }
                Value::Text(text) => put_text(text, several, row_key),
                Value::Bytes(bytes) if several => {
                    let text = std::str::from_utf8(bytes)
                        .map_err(|_| bad("not UTF-8, in a row key of several parts"))?;
                    put_text(text, true, row_key);
                }
                Value::Bytes(bytes) => row_key.extend_from_slice(bytes),
                Value::Integer(number) | Value::Micros(number) => {
                    row_key.extend_from_slice(number.to_string().as_bytes());
                }
            }
        }
        if several {
            row_key.push(b'}');
        }
        Ok(())
    }
}

fn put_text(text: &str, quoted: bool, row_key: &mut Vec<u8>) {
    if quoted {
        row_key.extend_from_slice(serde_json::Value::from(text).to_string().as_bytes());
    } else {
        row_key.extend_from_slice(text.as_bytes());
    }
}

impl Encode for Encoder {
    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn encode(
        &self,
        kind: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        self.encode_whole(kind, values, &Original::default(), row, row_key)
    }

    fn whole(&self) -> bool {
        true
    }

    fn headers(&self) -> bool {
        self.headers
    }

    fn encode_whole(
        &self,
        _kind: RowKind,
        values: &[Value<'_>],
        original: &Original<'_>,
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        let start = row_key.len();
        if self.keyed {
            let made = self.row_key(values, row_key);
            if made.is_err() {
                row_key.truncate(start);
                return made;
            }
        }
        let key = match self.key {
            KeyFrom::Source => original.key,
            KeyFrom::RowKey => Some(&row_key[start..]),
            KeyFrom::None => None,
        };
        put_optional(key, row);
        let partition = original.partition.filter(|_| self.partition == PartitionFrom::Source);
        row.extend_from_slice(&partition.unwrap_or(-1).to_le_bytes());
        let timestamp_ms = match self.timestamp {
            TimestampFrom::Source => original.timestamp_ms,
            TimestampFrom::Event => Some(original.event_ms),
            TimestampFrom::Now => None,
        };
        row.extend_from_slice(&timestamp_ms.unwrap_or(i64::MIN).to_le_bytes());
        if self.headers {
            for (name, value) in original.headers {
                put_optional(Some(name.as_bytes()), row);
                put_optional(*value, row);
            }
        }
        Ok(())
    }
}

/// Length and bytes; the highest length is none.
fn put_optional(bytes: Option<&[u8]>, row: &mut Vec<u8>) {
    let length = bytes.map_or(u32::MAX, |bytes| bytes.len() as u32);
    row.extend_from_slice(&length.to_le_bytes());
    row.extend_from_slice(bytes.unwrap_or_default());
}

fn take_optional(row: &[u8]) -> Option<(Option<&[u8]>, &[u8])> {
    let (length, rest) = row.split_first_chunk::<4>()?;
    match u32::from_le_bytes(*length) {
        u32::MAX => Some((None, rest)),
        length => rest.split_at_checked(length as usize).map(|(bytes, rest)| (Some(bytes), rest)),
    }
}

impl<'a> Sent<'a> {
    /// Of a row that [`Encoder`] made; none if it is not one.
    pub(super) fn read(row: &'a [u8]) -> Option<Self> {
        let (key, rest) = take_optional(row)?;
        let (partition, rest) = rest.split_first_chunk::<4>()?;
        let (timestamp, headers) = rest.split_first_chunk::<8>()?;
        let (partition, timestamp_ms) = (i32::from_le_bytes(*partition), i64::from_le_bytes(*timestamp));
        Some(Self {
            key,
            partition: (partition >= 0).then_some(partition),
            timestamp_ms: (timestamp_ms != i64::MIN).then_some(timestamp_ms),
            headers,
        })
    }

    /// Name and value of each header, in order.
    pub(super) fn headers(&self) -> impl Iterator<Item = (&'a str, Option<&'a [u8]>)> {
        let mut rest = self.headers;
        std::iter::from_fn(move || {
            let (name, after) = take_optional(rest)?;
            let (value, after) = take_optional(after)?;
            rest = after;
            Some((std::str::from_utf8(name?).ok()?, value))
        })
    }

    /// Bytes of key and headers, and of what stands around them in a record.
    pub(super) fn size(&self) -> usize {
        let each = 12;
        let headers = self.headers().map(|(name, value)| name.len() + value.map_or(0, <[u8]>::len) + each);
        self.key.map_or(0, <[u8]>::len) + headers.sum::<usize>() + each * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoder(change: impl FnOnce(&mut KafkaSinkConfig)) -> Encoder {
        let mut config = KafkaSinkConfig::new("b:1", "t");
        change(&mut config);
        Encoder::new(&config)
    }

    const ORIGINAL: Original<'_> = Original {
        key: Some(b"k"),
        headers: &[("a", Some(b"1")), ("b", None), ("a", Some(b""))],
        timestamp_ms: Some(5),
        event_ms: 7,
        partition: Some(3),
    };

    fn row(encoder: &Encoder, values: &[Value<'_>], original: &Original<'_>) -> (Vec<u8>, Vec<u8>) {
        let (mut row, mut key) = (Vec::new(), Vec::new());
        encoder.encode_whole(RowKind::Write, values, original, &mut row, &mut key).unwrap();
        (row, key)
    }

    #[test]
    fn a_record_is_written_as_it_came() {
        let (row, key) = row(&encoder(|_| {}), &[], &ORIGINAL);
        let sent = Sent::read(&row).unwrap();
        assert_eq!((sent.key, sent.partition, sent.timestamp_ms), (Some(&b"k"[..]), Some(3), Some(5)));
        assert_eq!(sent.headers().collect::<Vec<_>>(), ORIGINAL.headers);
        assert!(key.is_empty());
    }

    #[test]
    fn what_came_from_elsewhere_has_nothing_to_keep() {
        let (row, _) = row(&encoder(|_| {}), &[], &Original::default());
        let sent = Sent::read(&row).unwrap();
        assert_eq!((sent.key, sent.partition, sent.timestamp_ms), (None, None, None));
        assert_eq!(sent.headers().count(), 0);
    }

    #[test]
    fn the_route_chooses() {
        let chosen = encoder(|config| {
            (config.key, config.headers) = (KeyFrom::None, HeadersFrom::None);
            (config.partition, config.timestamp) = (PartitionFrom::Key, TimestampFrom::Event);
        });
        assert!(!chosen.headers());
        let (row, _) = row(&chosen, &[], &ORIGINAL);
        let sent = Sent::read(&row).unwrap();
        assert_eq!((sent.key, sent.partition, sent.timestamp_ms), (None, None, Some(7)));
        assert_eq!(sent.headers().count(), 0);
    }

    #[test]
    fn a_row_key_of_one_column_is_its_text_and_of_several_an_object() {
        let one = encoder(|config| {
            (config.row_key, config.key) = (vec!["id".to_owned()], KeyFrom::RowKey);
        });
        for (json, bytes) in [("\"a\\u00e9\"", "aé"), ("12", "12"), ("1.50", "1.50"), ("true", "true")] {
            let (row, key) = row(&one, &[Value::Json(json)], &ORIGINAL);
            assert_eq!(
                (Sent::read(&row).unwrap().key, key.as_slice()),
                (Some(bytes.as_bytes()), bytes.as_bytes())
            );
        }
        let two = encoder(|config| {
            (config.row_key, config.mode) = (vec!["a".to_owned(), "b".to_owned()], Mode::Upsert);
        });
        let (_, key) = row(&two, &[Value::Json("1"), Value::Text("x\"")], &ORIGINAL);
        assert_eq!(key, br#"{"a":1,"b":"x\""}"#);
        for bad in [Value::Missing, Value::Json("null"), Value::Json("[1]"), Value::Json("\"\\ud800\"")] {
            let (mut row, mut key) = (b"r".to_vec(), b"k".to_vec());
            let error = one.encode_whole(RowKind::Write, &[bad], &ORIGINAL, &mut row, &mut key).unwrap_err();
            assert_eq!((error.column.as_str(), row.as_slice(), key.as_slice()), ("id", &b"r"[..], &b"k"[..]));
        }
    }

    #[test]
    fn a_torn_row_is_none() {
        let (row, _) = row(&encoder(|_| {}), &[], &Original { headers: &[], ..ORIGINAL });
        for length in 0..row.len() {
            assert_eq!(Sent::read(&row[..length]), None, "{length}");
        }
    }
}
