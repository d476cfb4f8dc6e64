//! Rows of the sink in memory: four columns as text, one row key.

use std::sync::OnceLock;

use adapters::{
    sink::{Column, Encode, RowKind},
    value::{BadValue, Value},
};

/// A value that the encoder refuses.
pub(super) const BAD: &str = "bad";
/// A value that the sink refuses, row by row.
pub(super) const POISON: &str = "poison";

/// One row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct RowValue {
    pub(super) id: String,
    pub(super) row: String,
    pub(super) val: String,
    pub(super) ver: i64,
}

impl RowValue {
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let text = std::str::from_utf8(bytes).unwrap();
        let mut parts = text.split('\x1f').map(str::to_owned);
        let mut next = || parts.next().unwrap();
        Self { id: next(), row: next(), val: next(), ver: next().parse().unwrap() }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct FakeEncode {
    /// The table has a row key: column `row`.
    pub(super) keyed: bool,
}

fn text(value: &Value<'_>) -> String {
    match value {
        Value::Json(json) => json.trim_matches('"').to_owned(),
        Value::Missing => String::new(),
        other => panic!("the sink in memory takes JSON only, not {other:?}"),
    }
}

impl Encode for FakeEncode {
    fn columns(&self) -> &[Column] {
        static COLUMNS: OnceLock<Vec<Column>> = OnceLock::new();
        COLUMNS.get_or_init(|| {
            let column = |name: &str| Column {
                name: name.into(),
                type_name: "text".into(),
                nullable: true,
                has_default: true,
            };
            ["id", "row", "val", "ver"].map(column).into()
        })
    }

    fn encode(
        &self,
        _kind: RowKind,
        values: &[Value<'_>],
        row: &mut Vec<u8>,
        row_key: &mut Vec<u8>,
    ) -> Result<(), BadValue> {
        let [id, key, val, ver] = [0, 1, 2, 3].map(|at| text(&values[at]));
        if val == BAD {
            return Err(BadValue { column: "val".into(), column_type: "text".into(), reason: "bad".into() });
        }
        let ver = if ver.is_empty() { "0" } else { &ver };
        row.extend_from_slice(format!("{id}\x1f{key}\x1f{val}\x1f{ver}").as_bytes());
        if self.keyed {
            row_key.extend_from_slice(key.as_bytes());
        }
        Ok(())
    }
}
