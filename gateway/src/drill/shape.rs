//! The records of a drill: made from the route's names and the table's columns, or from a template, so that they fit the user's own
//! table; and the row that each must become ([`Shape`]). Pure.

use std::collections::{BTreeMap, HashSet};

use adapters::sink::{Column, Mode};
use serde_json::{Map, Value};

use super::values::{Kind, moment};
use crate::{
    key::{IdempotencyKey, Part, Pointer},
    naming::{ColumnSource, Constant, DigestOver, EventTime, NamingRules, TimeUnit, UnknownFields},
};

/// So many versions of one row at most.
pub(crate) const VERSIONS: u64 = 4;

/// What tells one record from all others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Numbers {
    /// Of the event.
    pub(crate) event: u64,
    /// Of its row.
    pub(crate) row: u64,
    /// Of the row's versions, from 1.
    pub(crate) version: u64,
    /// Event time, microseconds since the epoch.
    pub(crate) time_us: i64,
}

/// What is sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Made {
    pub(crate) payload: String,
    pub(crate) headers: Vec<(String, String)>,
}

/// What a member depends on.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Class {
    Row,
    Event,
    Version,
    Time(Option<TimeUnit>),
    Plain,
    Fixed(Value),
}

#[derive(Debug)]
struct Member {
    pointer: Pointer,
    kind: Kind,
    class: Class,
}

/// A column whose values are compared.
#[derive(Clone, Debug)]
pub(crate) struct Compared {
    /// As the sink knows it.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    from: ColumnSource,
}

/// Values of the compared columns in their order; none: null.
pub(crate) type Row = Vec<Option<String>>;

/// What a shape is made from.
pub(crate) struct Asked<'a> {
    pub(crate) naming: &'a NamingRules,
    pub(crate) mode: Mode,
    pub(crate) row_key: &'a [String],
    pub(crate) version: Option<&'a str>,
    /// With what each takes, as far as it is known.
    pub(crate) columns: Vec<(Column, Option<Kind>)>,
    pub(crate) template: Option<&'a str>,
    pub(crate) seed: u64,
}

/// How records are made, and what they become.
#[derive(Debug)]
pub(crate) struct Shape {
    members: Vec<Member>,
    template: Option<String>,
    headers: Vec<(String, Class)>,
    key: Vec<Part>,
    idempotency_key: bool,
    columns: Vec<Compared>,
    /// Indices of the columns that tell rows apart.
    identity: Vec<usize>,
    versions: u64,
    rows_at_most: u64,
    seed: u64,
}

impl Shape {
    /// Or why no records can be made, and what to do.
    pub(crate) fn of(asked: &Asked<'_>) -> Result<Shape, String> {
        let naming = asked.naming;
        let mut shape = Shape {
            members: Vec::new(),
            template: asked.template.map(str::to_owned),
            headers: Vec::new(),
            key: naming.key.parts().to_vec(),
            idempotency_key: naming.key.explicit() == IdempotencyKey::Require,
            columns: Vec::new(),
            identity: Vec::new(),
            versions: 1,
            rows_at_most: u64::MAX,
            seed: asked.seed,
        };
        for (column, kind) in &asked.columns {
            shape.column(asked, column, kind.as_ref())?;
        }
        for part in naming.key.parts() {
            match part {
                Part::Pointer(pointer) if pointer.steps().is_empty() => {}
                Part::Pointer(pointer) => {
                    shape.add(pointer, Kind::Text(None, false), shape.class_of(asked, pointer, None))
                }
                Part::Header(name) => shape.header(name, Class::Event),
                Part::Content => {}
                Part::KafkaKey | Part::KafkaHeader(_) | Part::KafkaPosition | Part::Debezium(_) => {
                    return Err(format!(
                        "the route's key takes {part}, which a record over HTTP does not have"
                    ));
                }
            }
        }
        match &naming.event_time {
            EventTime::Pointer { pointer, unit } => {
                shape.add(pointer, Kind::Timestamp(6), Class::Time(*unit));
            }
            EventTime::Arrival => {}
            EventTime::KafkaTimestamp | EventTime::Debezium => {
                return Err(
                    "the route's event time is Kafka's, which a record over HTTP does not have".into()
                );
            }
        }
        if let DigestOver::Pointers(pointers) = &naming.digest {
            for pointer in pointers {
                shape.add(pointer, Kind::Text(None, false), Class::Plain);
            }
        }
        shape.members.sort_by_key(|member| member.pointer.steps().len());
        shape.identity = match asked.row_key {
            [] => (0..shape.columns.len()).collect(),
            names => {
                let at = |name: &String| shape.columns.iter().position(|column| column.name == *name);
                let found: Option<Vec<usize>> = names.iter().map(at).collect();
                found.ok_or("a column of the row key is not filled from the record, so that rows cannot be told apart")?
            }
        };
        shape.check(asked.mode)?;
        Ok(shape)
    }

    /// What a member at `pointer` depends on, if it is no column's (`name`).
    fn class_of(&self, asked: &Asked<'_>, pointer: &Pointer, name: Option<&str>) -> Class {
        let naming = asked.naming;
        if let EventTime::Pointer { pointer: time, unit } = &naming.event_time
            && time == pointer
        {
            return Class::Time(*unit);
        }
        if name.is_some_and(|name| asked.row_key.iter().any(|key| key == name)) {
            return Class::Row;
        }
        if name.is_some() && name == asked.version {
            return Class::Version;
        }
        if naming.key.parts().iter().any(|part| matches!(part, Part::Pointer(key) if key == pointer)) {
            return Class::Event;
        }
        match &naming.delete_when {
            Some(delete) if delete.pointer == *pointer => {
                Class::Fixed(if delete.equals == "false" { Value::from(true) } else { Value::from(false) })
            }
            _ => Class::Plain,
        }
    }

    fn column(&mut self, asked: &Asked<'_>, column: &Column, kind: Option<&Kind>) -> Result<(), String> {
        if matches!(&asked.naming.unknown_fields, UnknownFields::Column(extra) if *extra == column.name) {
            return Ok(());
        }
        let own = ColumnSource::Pointer(Pointer::member(&column.name));
        let from = asked.naming.columns.get(&column.name).cloned().unwrap_or(own);
        let needed = !column.nullable && !column.has_default
            || asked.row_key.contains(&column.name)
            || asked.version == Some(column.name.as_str());
        let mut compared = true;
        match &from {
            // Where the record is the row, something of it is each record's own.
            ColumnSource::Pointer(pointer) if pointer.steps().is_empty() => {
                if asked.columns.len() == 1 {
                    self.add(&Pointer::member("drill"), Kind::Text(None, false), Class::Event);
                }
            }
            ColumnSource::Pointer(pointer) => match (kind, &self.template) {
                (Some(kind), None) => {
                    let class = self.class_of(asked, pointer, Some(&column.name));
                    let class = match class {
                        // Only a truth can be the wrong one.
                        Class::Fixed(_) if *kind != Kind::Bool => Class::Plain,
                        class => class,
                    };
                    if class == Class::Row {
                        let most = if self.rows_at_most == u64::MAX { 0 } else { self.rows_at_most };
                        self.rows_at_most = most.max(kind.capacity());
                    }
                    self.add(pointer, kind.clone(), class);
                }
                (None, None) if needed => {
                    return Err(format!(
                        "column {:?} has type {}, for which a drill makes no values; give a record with --template",
                        column.name, column.type_name
                    ));
                }
                _ => {}
            },
            ColumnSource::Header(name) => {
                let class = if asked.row_key.contains(&column.name) { Class::Row } else { Class::Event };
                self.header(name, class);
            }
            ColumnSource::Constant(_) => {}
            ColumnSource::Arrival | ColumnSource::Default => compared = false,
            ColumnSource::KafkaKey
            | ColumnSource::KafkaHeader(_)
            | ColumnSource::KafkaTimestamp
            | ColumnSource::Topic
            | ColumnSource::Partition
            | ColumnSource::Offset
            | ColumnSource::Debezium(_) => {
                compared = false;
                if needed {
                    return Err(format!(
                        "column {:?} takes what only a Kafka record has, and cannot be null",
                        column.name
                    ));
                }
            }
        }
        if let (true, Some(kind)) = (compared, kind) {
            self.columns.push(Compared { name: column.name.clone(), kind: kind.clone(), from });
        }
        Ok(())
    }

    fn add(&mut self, pointer: &Pointer, kind: Kind, class: Class) {
        if self.template.is_none() && !self.members.iter().any(|member| member.pointer == *pointer) {
            self.members.push(Member { pointer: pointer.clone(), kind, class });
        }
    }

    fn header(&mut self, name: &str, class: Class) {
        if !self.headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(name)) {
            self.headers.push((name.to_owned(), class));
        }
    }

    /// Records differ where they must: tried out on a thousand.
    fn check(&mut self, mode: Mode) -> Result<(), String> {
        if self.columns.is_empty() {
            return Err("no column is filled from the record, so that rows cannot be told apart".into());
        }
        let at = |event: u64, row: u64, version: u64| Numbers {
            event,
            row,
            version,
            time_us: 1_700_000_000_000_000 + event as i64 * 1_000_000,
        };
        let (mut rows, mut names) = (HashSet::new(), HashSet::new());
        for number in 1..=1_000 {
            let made = self.record(&at(number, number, 1));
            let row = self.row(&made)?;
            rows.insert(self.identity(&row).iter().map(|part| part.map(str::to_owned)).collect::<Vec<_>>());
            names.insert(self.name(&made)?);
        }
        let remedy = match self.template {
            Some(_) => "put {n} into it",
            None => "give a record with --template, with {n} in it",
        };
        if rows.len() < 1_000 {
            return Err(format!(
                "the records of a drill do not differ in the columns that tell rows apart; {remedy}"
            ));
        }
        if names.len() < 1_000 {
            return Err(format!("the records of a drill do not differ in the route's dedup key; {remedy}"));
        }
        if mode != Mode::Insert {
            let (first, second) = (self.record(&at(1, 1, 1)), self.record(&at(2, 1, 2)));
            let (before, after) = (self.row(&first)?, self.row(&second)?);
            let differ = self.name(&first)? != self.name(&second)?;
            if differ && self.identity(&before) == self.identity(&after) {
                self.versions = VERSIONS;
            }
        }
        Ok(())
    }

    /// The columns that are compared.
    pub(crate) fn columns(&self) -> &[Compared] {
        &self.columns
    }

    /// How many versions a row may have: 1 if the dedup key names the row.
    pub(crate) fn versions(&self) -> u64 {
        self.versions
    }

    /// The least by which two event times differ once they are written down, microseconds.
    pub(crate) fn time_step_us(&self) -> i64 {
        let step = |member: &Member| match (&member.class, &member.kind) {
            (Class::Time(Some(unit)), Kind::Int(_) | Kind::Decimal(..) | Kind::Float(_)) => match unit {
                TimeUnit::Seconds => 1_000_000,
                TimeUnit::Millis => 1_000,
                TimeUnit::Micros | TimeUnit::Nanos => 1,
            },
            (Class::Time(_), Kind::Timestamp(digits)) => 10i64.pow(6 - (*digits).min(6)),
            _ => 1,
        };
        self.members.iter().map(step).max().unwrap_or(1)
    }

    /// So many rows can be told apart.
    pub(crate) fn rows_at_most(&self) -> u64 {
        self.rows_at_most
    }

    /// What tells the row from others.
    pub(crate) fn identity<'r>(&self, row: &'r Row) -> Vec<Option<&'r str>> {
        self.identity.iter().map(|at| row.get(*at).and_then(Option::as_deref)).collect()
    }

    /// As messages name a row.
    pub(crate) fn shown_identity(&self, row: &Row) -> BTreeMap<String, Option<String>> {
        self.identity.iter().map(|at| (self.columns[*at].name.clone(), row[*at].clone())).collect()
    }

    /// The record of these numbers: the same each time.
    pub(crate) fn record(&self, numbers: &Numbers) -> Made {
        let payload = match &self.template {
            Some(template) => template
                .replace("{n}", &numbers.row.to_string())
                .replace("{version}", &numbers.version.to_string())
                .replace("{time}", &moment(numbers.time_us, 6)),
            None => {
                let mut object = Map::new();
                for member in &self.members {
                    put(&mut object, member.pointer.steps(), self.value(member, numbers));
                }
                Value::Object(object).to_string()
            }
        };
        let mut headers: Vec<(String, String)> = Vec::new();
        for (name, class) in &self.headers {
            let number = if *class == Class::Row { numbers.row } else { numbers.event };
            headers.push((name.clone(), format!("drill-{:x}-{number}", self.seed)));
        }
        if self.idempotency_key {
            headers
                .push(("idempotency-key".to_owned(), format!("\"drill-{:x}-{}\"", self.seed, numbers.event)));
        }
        Made { payload, headers }
    }

    fn value(&self, member: &Member, numbers: &Numbers) -> Value {
        const FILLERS: [&str; 4] = ["", " plain", " \"quoted\" \\ and\ta tab", " Grüße, 東京 €"];
        let filler = FILLERS[(numbers.event ^ self.seed) as usize % FILLERS.len()];
        match &member.class {
            Class::Row => member.kind.value(numbers.row, ""),
            Class::Event => member.kind.value(numbers.event, ""),
            Class::Version => member.kind.value(numbers.version, ""),
            Class::Time(unit) => time(&member.kind, *unit, numbers.time_us),
            Class::Plain => member.kind.spread(numbers.event, filler),
            Class::Fixed(value) => value.clone(),
        }
    }

    /// The values of the compared columns that this record leads to.
    pub(crate) fn row(&self, made: &Made) -> Result<Row, String> {
        let payload: Value = serde_json::from_str(&made.payload).map_err(|fault| {
            format!("the record is not JSON once the placeholders are filled in: {fault}")
        })?;
        let value = |column: &Compared| match &column.from {
            ColumnSource::Pointer(pointer) => match payload.pointer(pointer.as_str()) {
                None | Some(Value::Null) => None,
                Some(value) => column.kind.expected(value),
            },
            ColumnSource::Header(name) => {
                let found = made.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
                found.map(|(_, text)| column.kind.normal(text))
            }
            ColumnSource::Constant(constant) => Some(match constant {
                Constant::Text(text) => column.kind.normal(text),
                Constant::Integer(number) => column.kind.normal(&number.to_string()),
                Constant::Json(text) => column.kind.normal(text),
            }),
            _ => None,
        };
        Ok(self.columns.iter().map(value).collect())
    }

    /// The dedup key's parts, as text.
    fn name(&self, made: &Made) -> Result<Vec<String>, String> {
        let payload: Value = serde_json::from_str(&made.payload).map_err(|fault| {
            format!("the record is not JSON once the placeholders are filled in: {fault}")
        })?;
        let header = |name: &str| {
            let found = made.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
            found.map(|(_, text)| text.clone()).unwrap_or_default()
        };
        if self.idempotency_key {
            return Ok(vec![header("idempotency-key")]);
        }
        self.key
            .iter()
            .map(|part| match part {
                Part::Pointer(pointer) => {
                    payload.pointer(pointer.as_str()).map(Value::to_string).ok_or_else(|| {
                        format!("the record has nothing at {pointer}, which the route's key takes")
                    })
                }
                Part::Header(name) => Ok(header(name)),
                _ => Ok(made.payload.clone()),
            })
            .collect()
    }

    /// Forgets the columns that the template leaves to themselves: their values are not known.
    pub(crate) fn without_unset(&mut self) -> Result<(), String> {
        if self.template.is_none() {
            return Ok(());
        }
        let made = self.record(&Numbers { event: 1, row: 1, version: 1, time_us: 0 });
        let row = self.row(&made)?;
        let kept: Vec<usize> =
            (0..row.len()).filter(|at| row[*at].is_some() || self.identity.contains(at)).collect();
        self.identity =
            self.identity.iter().filter_map(|at| kept.iter().position(|kept| kept == at)).collect();
        self.columns = kept.iter().map(|at| self.columns[*at].clone()).collect();
        Ok(())
    }
}

/// An event time as the member's kind has it.
fn time(kind: &Kind, unit: Option<TimeUnit>, micros: i64) -> Value {
    match (kind, unit) {
        (Kind::Int(_) | Kind::Decimal(..) | Kind::Float(_), Some(unit)) => Value::from(match unit {
            TimeUnit::Seconds => micros.div_euclid(1_000_000),
            TimeUnit::Millis => micros.div_euclid(1_000),
            TimeUnit::Micros => micros,
            TimeUnit::Nanos => micros.saturating_mul(1_000),
        }),
        (Kind::Timestamp(digits), _) => Value::from(moment(micros, *digits)),
        _ => Value::from(moment(micros, 6)),
    }
}

fn put(object: &mut Map<String, Value>, steps: &[String], value: Value) {
    match steps {
        [] => {}
        [last] => {
            object.insert(last.clone(), value);
        }
        [first, rest @ ..] => {
            let inner = object.entry(first.clone()).or_insert_with(|| Value::Object(Map::new()));
            if !inner.is_object() {
                *inner = Value::Object(Map::new());
            }
            if let Value::Object(inner) = inner {
                put(inner, rest, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::KeySpec;

    fn column(name: &str, type_name: &str, nullable: bool) -> (Column, Option<Kind>) {
        let column = Column { name: name.into(), type_name: type_name.into(), nullable, has_default: false };
        let kind = if type_name == "mood" { None } else { Some(Kind::sqlite(type_name)) };
        (column, kind)
    }

    fn orders(mood: bool) -> Vec<(Column, Option<Kind>)> {
        let mut columns = vec![
            column("order_id", "TEXT", false),
            column("user_id", "BIGINT", false),
            column("updated_at", "TIMESTAMP", false),
            column("note", "TEXT", true),
        ];
        columns.push(column("mood", "mood", mood));
        columns
    }

    fn asked<'a>(naming: &'a NamingRules, row_key: &'a [String], mode: Mode) -> Asked<'a> {
        Asked { naming, mode, row_key, version: None, columns: orders(true), template: None, seed: 3 }
    }

    fn rules(key: &[&str]) -> NamingRules {
        let mut naming = NamingRules::new(KeySpec::pointers(key.iter().copied()).unwrap());
        let pointer = Pointer::member("updated_at");
        naming.event_time = EventTime::Pointer { pointer, unit: None };
        naming
    }

    fn numbers(event: u64, row: u64, version: u64) -> Numbers {
        Numbers { event, row, version, time_us: 1_700_000_000_000_000 + event as i64 * 1_000_000 }
    }

    #[test]
    fn a_record_fills_the_columns_that_it_can_and_names_itself() {
        let (naming, row_key) = (rules(&["/order_id", "/updated_at"]), ["order_id".to_owned()]);
        let shape = Shape::of(&asked(&naming, &row_key, Mode::Upsert)).unwrap();
        assert_eq!(shape.versions(), VERSIONS);
        let made = shape.record(&numbers(5, 2, 3));
        assert_eq!(made, shape.record(&numbers(5, 2, 3)));
        let payload: Value = serde_json::from_str(&made.payload).unwrap();
        let members: Vec<&String> = payload.as_object().unwrap().keys().collect();
        assert_eq!(members, ["note", "order_id", "updated_at", "user_id"]);
        assert_eq!(payload["order_id"], "drill-000000000002");
        let row = shape.row(&made).unwrap();
        assert_eq!(shape.identity(&row), [Some("drill-000000000002")]);
        assert_eq!(row[2].as_deref(), Some("2023-11-14T22:13:25.000000Z"));
    }

    #[test]
    fn a_key_within_the_row_key_leaves_one_version() {
        let (naming, row_key) = (rules(&["/order_id"]), ["order_id".to_owned()]);
        let shape = Shape::of(&asked(&naming, &row_key, Mode::Upsert)).unwrap();
        assert_eq!(shape.versions(), 1);
    }

    #[test]
    fn without_row_key_all_columns_tell_rows_apart() {
        let naming = rules(&["/meta/id"]);
        let shape = Shape::of(&asked(&naming, &[], Mode::Insert)).unwrap();
        let row = shape.row(&shape.record(&numbers(1, 1, 1))).unwrap();
        assert_eq!(shape.identity(&row).len(), 4);
        assert!(shape.record(&numbers(1, 1, 1)).payload.contains(r#""meta":{"id":""#));
    }

    #[test]
    fn what_cannot_be_made_up_asks_for_a_template() {
        let (naming, row_key) = (rules(&["/order_id"]), ["order_id".to_owned()]);
        let mut asked = asked(&naming, &row_key, Mode::Insert);
        asked.columns = orders(false);
        let fault = Shape::of(&asked).unwrap_err();
        assert!(fault.contains("mood") && fault.contains("--template"), "{fault}");
        asked.template = Some(r#"{"order_id":"o-{n}","user_id":7,"updated_at":"{time}","mood":"fine"}"#);
        let mut shape = Shape::of(&asked).unwrap();
        shape.without_unset().unwrap();
        let names: Vec<&str> = shape.columns().iter().map(|column| column.name.as_str()).collect();
        assert_eq!(names, ["order_id", "user_id", "updated_at"]);
        let row = shape.row(&shape.record(&numbers(9, 4, 1))).unwrap();
        assert_eq!(shape.identity(&row), [Some("o-4")]);
        asked.template = Some(r#"{"order_id":"o","user_id":{n}}"#);
        let fault = Shape::of(&asked).unwrap_err();
        assert!(fault.contains("{n}"), "{fault}");
    }

    #[test]
    fn a_key_of_kafka_is_refused_by_name() {
        let mut naming = rules(&["/order_id"]);
        naming.key = KeySpec::new(vec![Part::KafkaKey]).unwrap();
        let fault = Shape::of(&asked(&naming, &[], Mode::Insert)).unwrap_err();
        assert!(fault.contains("Kafka key"), "{fault}");
    }
}
