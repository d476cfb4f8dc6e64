//! What a record holds for one column, before the sink's encoder gives it the column's type.

/// One column's value as the record carries it. JSON stays text until the encoder knows the type, so nothing is lost.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Value<'a> {
    /// The record has no such member (or header): the column's default applies.
    Missing,
    /// The raw JSON text of the value, valid JSON: `1.50`, `"a\u00e9"`, `null`, `{"x":1}`.
    Json(&'a str),
    /// Text from outside JSON: a header, a Kafka key, a constant.
    Text(&'a str),
    /// Bytes from outside JSON: a Kafka key or header that goes to a binary column.
    Bytes(&'a [u8]),
    /// An integer from outside JSON: an offset, a partition.
    Integer(i64),
    /// A time from outside JSON: arrival or the Kafka timestamp, microseconds since the epoch.
    Micros(i64),
}

/// Why a value does not fit its column. Never holds the value itself: values are private.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("column {column:?} ({column_type}): {reason}")]
pub struct BadValue {
    /// The column's name.
    pub column: String,
    /// The column's type, as the sink names it.
    pub column_type: String,
    /// What is wrong and the bound: `"integer 99999 is above 32767"` is not given, `"above 32767"` is.
    pub reason: String,
}
