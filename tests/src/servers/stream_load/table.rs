//! Tables of the stand-in: what they take, and how rows meet.

use std::collections::BTreeMap;

use adapters::stream_load::Dialect;
use serde_json::Value;

/// How rows with equal keys meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Model {
    /// They stay beside each other.
    Duplicate,
    /// The last, or the newest, stays: PRIMARY KEY in StarRocks, UNIQUE KEY in Doris.
    Keyed,
}

/// What is made.
#[derive(Clone, Debug)]
pub struct TableSpec {
    /// Name, type, and the rest of the definition: `NOT NULL`, `NULL DEFAULT "x"`.
    pub columns: Vec<(&'static str, &'static str, &'static str)>,
    /// How rows meet.
    pub model: Model,
    /// The first so many columns are the key.
    pub key: usize,
    /// Doris' sequence column.
    pub sequence: Option<&'static str>,
}

impl TableSpec {
    /// The statement that makes it, and that is shown.
    pub fn ddl(&self, dialect: Dialect, name: &str) -> String {
        let columns: Vec<String> = self
            .columns
            .iter()
            .map(|(name, kind, rest)| format!("  `{name}` {kind} {rest} COMMENT \"\""))
            .collect();
        let key: Vec<String> =
            self.columns.iter().take(self.key).map(|(name, ..)| format!("`{name}`")).collect();
        let key = key.join(", ");
        let model = match (self.model, dialect) {
            (Model::Duplicate, _) => "DUPLICATE KEY",
            (Model::Keyed, Dialect::StarRocks) => "PRIMARY KEY",
            (Model::Keyed, Dialect::Doris) => "UNIQUE KEY",
        };
        let mut properties = "\"replication_num\" = \"1\"".to_owned();
        if let (Some(sequence), Dialect::Doris) = (self.sequence, dialect) {
            properties.push_str(&format!(",\n\"function_column.sequence_col\" = \"{sequence}\""));
        }
        format!(
            "CREATE TABLE `{name}` (\n{}\n) ENGINE=OLAP\n{model}({key})\nCOMMENT \"OLAP\"\nDISTRIBUTED BY HASH({key}) BUCKETS 1\n\
             PROPERTIES (\n{properties}\n)",
            columns.join(",\n")
        )
    }
}

/// A row: texts by column; none is null.
pub(super) type Row = BTreeMap<String, Option<String>>;

#[derive(Debug)]
pub(super) struct Table {
    pub(super) spec: TableSpec,
    plain: Vec<Row>,
    /// By key: the row, and whether it is gone.
    keyed: BTreeMap<Vec<Option<String>>, (Row, bool)>,
}

/// What a load says of its rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Parsed {
    /// Each with whether it is a delete.
    pub(super) rows: Vec<(Row, bool)>,
    /// Why rows are refused, one line each.
    pub(super) filtered: Vec<String>,
    /// The column that must not go back (StarRocks).
    pub(super) condition: Option<String>,
}

impl Table {
    pub(super) fn new(spec: TableSpec) -> Self {
        Self { spec, plain: Vec::new(), keyed: BTreeMap::new() }
    }

    /// Reads a load's body by its headers. The error fails the load as a whole.
    pub(super) fn parse(
        &self,
        dialect: Dialect,
        header: &dyn Fn(&str) -> String,
        body: &[u8],
    ) -> Result<Parsed, String> {
        if header("format") != "json" || header("strict_mode") != "true" {
            return Err("the stand-in knows JSON in strict mode only".to_owned());
        }
        let objects: Vec<Value> = match dialect {
            Dialect::StarRocks if header("strip_outer_array") == "true" && body.is_empty() => Vec::new(),
            Dialect::StarRocks if header("strip_outer_array") == "true" => {
                serde_json::from_slice(body).map_err(|fault| format!("not an array: {fault}"))?
            }
            Dialect::Doris if header("read_json_by_line") == "true" => body
                .split(|byte| *byte == b'\n')
                .filter(|line| !line.is_empty())
                .map(|line| {
                    serde_json::from_slice(line).map_err(|fault| format!("not a line of JSON: {fault}"))
                })
                .collect::<Result<_, _>>()?,
            _ => return Err("neither an array nor lines".to_owned()),
        };
        // Names as they come, and columns that are computed from them.
        let (mut names, mut computed) = (Vec::new(), Vec::new());
        for item in header("columns").split("`,`").flat_map(|part| part.split(",`")) {
            match item.split_once("`=to_binary(`") {
                Some((name, from)) => {
                    let from = from.split('`').next().unwrap_or_default();
                    computed.push((name.trim_matches('`').to_owned(), from.to_owned()));
                }
                None => names.push(item.trim_matches('`').to_owned()),
            }
        }
        let sign = match dialect {
            Dialect::StarRocks => "__op".to_owned(),
            Dialect::Doris if header("merge_type") == "MERGE" => {
                header("delete").trim_end_matches("=1").trim_matches('`').to_owned()
            }
            Dialect::Doris => String::new(),
        };
        let condition = Some(header("merge_condition")).filter(|name| !name.is_empty());
        if condition.is_some() && names.contains(&sign) {
            return Err("conditional update does not support delete".to_owned());
        }
        let mut parsed = Parsed { condition, ..Parsed::default() };
        for object in &objects {
            match self.row(object, &names, &computed, &sign) {
                Ok(row) => parsed.rows.push(row),
                Err(why) => parsed.filtered.push(why),
            }
        }
        Ok(parsed)
    }

    fn row(
        &self,
        object: &Value,
        names: &[String],
        computed: &[(String, String)],
        sign: &str,
    ) -> Result<(Row, bool), String> {
        let given = |name: &str| match object.get(name) {
            None | Some(Value::Null) => None,
            Some(Value::String(text)) => Some(text.clone()),
            Some(other) => Some(other.to_string()),
        };
        let mut row = Row::new();
        for (column, kind, rest) in &self.spec.columns {
            let from = computed.iter().find(|(name, _)| name == column).map(|(_, from)| from.as_str());
            let value = match (from, names.iter().any(|name| name == column)) {
                (Some(from), _) => given(from),
                (None, true) => given(column),
                (None, false) => None,
            };
            match &value {
                None if rest.contains("NOT NULL") && !rest.contains("AUTO_INCREMENT") => {
                    return Err(format!(
                        "Reason: column_name[{column}], null value for not null column. src line [{object}];"
                    ));
                }
                Some(text) if !takes(kind, text) => {
                    return Err(format!(
                        "Reason: column_name[{column}], value '{text}' is out of range. src line [{object}];"
                    ));
                }
                _ => {}
            }
            row.insert((*column).to_owned(), value);
        }
        Ok((row, given(sign).as_deref() == Some("1")))
    }

    pub(super) fn apply(&mut self, parsed: &Parsed) {
        for (row, gone) in &parsed.rows {
            if self.spec.model == Model::Duplicate {
                self.plain.push(row.clone());
                continue;
            }
            let key: Vec<Option<String>> = self
                .spec
                .columns
                .iter()
                .take(self.spec.key)
                .map(|(name, ..)| row.get(*name).cloned().flatten())
                .collect();
            let order = parsed.condition.as_deref().or(self.spec.sequence);
            let older = order.is_some_and(|order| {
                let there = self.keyed.get(&key).and_then(|(there, _)| there.get(order).cloned().flatten());
                there.is_some_and(|there| before(row.get(order).cloned().flatten().as_deref(), &there))
            });
            if older {
                continue;
            }
            // Without an order a delete leaves nothing.
            if *gone && order.is_none() {
                self.keyed.remove(&key);
            } else {
                self.keyed.insert(key, (row.clone(), *gone));
            }
        }
    }

    pub(super) fn count(&self) -> usize {
        self.rows().count()
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.plain.iter().chain(self.keyed.values().filter(|(_, gone)| !gone).map(|(row, _)| row))
    }
}

fn before(new: Option<&str>, there: &str) -> bool {
    let Some(new) = new else { return true };
    match (new.parse::<i128>(), there.parse::<i128>()) {
        (Ok(new), Ok(there)) => new < there,
        _ => new < there,
    }
}

/// Whether a value is one of the type.
fn takes(kind: &str, text: &str) -> bool {
    let (name, inside) =
        kind.split_once('(').map_or((kind, ""), |(name, rest)| (name, rest.trim_end_matches(')')));
    let int = |bits: u32| {
        let bound = 1i128 << (bits - 1);
        text.parse::<i128>().is_ok_and(|number| (-bound..bound).contains(&number))
    };
    match name {
        "tinyint" => int(8),
        "smallint" => int(16),
        "int" => int(32),
        "bigint" => int(64),
        "largeint" => text.parse::<i128>().is_ok(),
        // So that a row can be refused that the encoder has taken: real tables have partitions.
        "varchar" => {
            inside.parse::<usize>().is_ok_and(|most| text.len() <= most) && !text.contains("no partition")
        }
        "boolean" => matches!(text, "true" | "false"),
        "decimal" => {
            let digits = text.trim_start_matches('-');
            let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
            let (precision, scale) = inside.split_once(',').unwrap_or((inside, "0"));
            let number = |text: &str| text.trim().parse::<usize>().unwrap_or(0);
            let plain = whole.bytes().chain(fraction.bytes()).all(|digit| digit.is_ascii_digit());
            plain
                && !whole.is_empty()
                && fraction.len() <= number(scale)
                && whole.len()
                    <= number(precision) - number(scale).min(number(precision)) + usize::from(whole == "0")
        }
        "date" => text.len() == 10 && text.as_bytes()[4] == b'-',
        "datetime" => text.len() >= 19 && text.as_bytes()[10] == b' ',
        _ => true,
    }
}
