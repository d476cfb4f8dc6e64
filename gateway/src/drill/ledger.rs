//! What was sent and what callers were told ([`Ledger`]), and how the sink must look after that ([`Comparison`]). Pure.

use std::collections::{BTreeMap, HashMap, HashSet};

use adapters::sink::Mode;

use super::shape::{Numbers, Row, Shape};

/// So many violations are shown whole; all are counted.
pub(crate) const SHOWN: usize = 20;

/// What is known of one event.
#[derive(Clone, Debug)]
struct Event {
    row: u64,
    version: u64,
    time_us: i64,
    /// An answer said that it took effect, or had done so before.
    settled: bool,
    /// An answer said that it will not take effect.
    refused: bool,
    /// It was sent, and the answer did not come or said nothing.
    uncertain: bool,
    /// Answers that said that it took effect just now.
    effects: u32,
}

/// An answer of the gateway, as far as it decides something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Told {
    /// `written`, `updated`, `stale`: it was settled now.
    Effect,
    /// `duplicate`: it was settled before.
    Copy,
    /// It takes no effect: any other outcome.
    No,
}

/// Everything that was sent.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    events: Vec<Event>,
    rows: u64,
    /// The last event time that was the time of day.
    latest_us: i64,
    /// Answers by their outcome's word.
    pub(crate) outcomes: BTreeMap<String, u64>,
    /// Requests that were sent, copies and repetitions included.
    pub(crate) requests: u64,
    /// Requests that were copies on purpose.
    pub(crate) copies: u64,
    /// Requests that were sent again for want of an answer.
    pub(crate) repeated: u64,
    /// Events whose copy had another outcome than a copy may have: event, and what was told.
    odd: Vec<(u64, String)>,
    odd_count: u64,
    /// Events of copies that had no answer though nothing was struck any more.
    silent: Vec<u64>,
    /// How the gateway ended though nobody had ended it.
    deaths: Vec<String>,
}

impl Ledger {
    /// A new row's number.
    pub(crate) fn new_row(&mut self) -> u64 {
        self.rows += 1;
        self.rows
    }

    /// Rows so far.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// Rows of which an event was sent.
    pub(crate) fn rows_sent(&self) -> u64 {
        self.events.iter().map(|event| event.row).collect::<HashSet<_>>().len() as u64
    }

    /// Events so far.
    pub(crate) fn events(&self) -> u64 {
        self.events.len() as u64
    }

    /// Writes an event down, before it is sent for the first time. Its event time is now, or `after_us` if that is later.
    pub(crate) fn open(&mut self, row: u64, version: u64, now_us: i64, after_us: i64) -> Numbers {
        let time_us = if after_us > now_us {
            after_us
        } else {
            // No two are alike: a table may want them to differ.
            self.latest_us = now_us.max(self.latest_us + 1);
            self.latest_us
        };
        self.events.push(Event {
            row,
            version,
            time_us,
            settled: false,
            refused: false,
            uncertain: false,
            effects: 0,
        });
        self.numbers(self.events.len() as u64)
    }

    /// Of an event: from 1.
    pub(crate) fn numbers(&self, event: u64) -> Numbers {
        let Event { row, version, time_us, .. } = self.events[event as usize - 1];
        Numbers { event, row, version, time_us }
    }

    /// No answer came for a request that may have reached the gateway, or one that says that nothing is known.
    pub(crate) fn unanswered(&mut self, event: u64) {
        self.events[event as usize - 1].uncertain = true;
    }

    /// An answer came, with this word of the outcome.
    pub(crate) fn answered(&mut self, event: u64, word: &str) -> Told {
        *self.outcomes.entry(word.to_owned()).or_default() += 1;
        let told = match word {
            "written" | "updated" | "stale" => Told::Effect,
            "duplicate" => Told::Copy,
            _ => Told::No,
        };
        let entry = &mut self.events[event as usize - 1];
        match told {
            Told::Effect => {
                entry.settled = true;
                entry.effects += 1;
            }
            Told::Copy => entry.settled = true,
            Told::No => {
                // Each copy is byte by byte the same, and a record that took effect stays one that did.
                if word == "mismatch" || entry.settled {
                    self.odd_count += 1;
                    if self.odd.len() < SHOWN {
                        self.odd.push((event, word.to_owned()));
                    }
                }
                entry.refused = true;
            }
        }
        told
    }

    /// A copy of the event had no answer, long after the last fault.
    pub(crate) fn silent(&mut self, event: u64) {
        self.silent.push(event);
    }

    /// The gateway ended, and nobody had ended it.
    pub(crate) fn died(&mut self, how: String) {
        self.deaths.push(how);
    }

    /// Events that an answer says were settled.
    pub(crate) fn settled(&self) -> u64 {
        self.events.iter().filter(|event| event.settled).count() as u64
    }

    /// Events that callers were told will take no effect.
    pub(crate) fn refused(&self) -> u64 {
        self.events.iter().filter(|event| event.refused && !event.settled).count() as u64
    }

    /// Whether a copy of the event may be sent: it is settled.
    pub(crate) fn is_settled(&self, event: u64) -> bool {
        self.events[event as usize - 1].settled
    }
}

/// What must hold of one row.
#[derive(Debug)]
struct Expected {
    /// It must be there.
    must: bool,
    /// The events that it may show; the first is what it must show if all that is known is right.
    allowed: Vec<u64>,
    found: u32,
}

/// What is wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Wrong {
    /// Acknowledged, and not in the sink.
    Lost,
    /// More than one row, or more than one answer that it took effect.
    Twice,
    /// Another content than the last acknowledged one.
    Content,
    /// In the sink, and nobody was told so, or nobody sent it.
    Unexpected,
    /// An answer that no copy may get.
    Answer,
    /// No answer to the end.
    Unanswered,
    /// The gateway ended though nobody had ended it.
    Died,
}

impl Wrong {
    /// As reports name it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Wrong::Lost => "lost",
            Wrong::Twice => "twice",
            Wrong::Content => "wrong content",
            Wrong::Unexpected => "unexpected",
            Wrong::Answer => "wrong answer",
            Wrong::Unanswered => "unanswered",
            Wrong::Died => "gateway ended",
        }
    }
}

/// One record, and what is wrong with it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Violation {
    pub(crate) wrong: Wrong,
    /// Column and value of what names the row.
    pub(crate) key: BTreeMap<String, Option<String>>,
    pub(crate) expected: String,
    pub(crate) found: String,
}

/// All that is wrong: counted by kind, some shown.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Violations {
    pub(crate) counts: BTreeMap<Wrong, u64>,
    pub(crate) shown: Vec<Violation>,
}

impl Violations {
    fn add(&mut self, violation: Violation) {
        *self.counts.entry(violation.wrong).or_default() += 1;
        if self.shown.len() < SHOWN {
            self.shown.push(violation);
        }
    }

    /// How many in all.
    pub(crate) fn count(&self) -> u64 {
        self.counts.values().sum()
    }
}

/// The sink's rows against the ledger, one after the other.
pub(crate) struct Comparison<'a> {
    ledger: &'a Ledger,
    shape: &'a Shape,
    expected: HashMap<Vec<Option<String>>, Expected>,
    violations: Violations,
    rows_found: u64,
}

impl<'a> Comparison<'a> {
    /// For a sink of this mode.
    pub(crate) fn new(ledger: &'a Ledger, shape: &'a Shape, mode: Mode) -> Result<Self, String> {
        let mut by_row: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for (at, event) in ledger.events.iter().enumerate() {
            by_row.entry(event.row).or_default().push(at as u64 + 1);
        }
        let mut this = Self {
            ledger,
            shape,
            expected: HashMap::new(),
            violations: Violations::default(),
            rows_found: 0,
        };
        this.answers()?;
        for events in by_row.values_mut() {
            if mode == Mode::UpsertIfNewer {
                events.sort_by_key(|event| ledger.events[*event as usize - 1].version);
            }
            let Some(first) = events.first() else { continue };
            let row = this.row_of(*first)?;
            let key = shape.identity(&row).iter().map(|part| part.map(str::to_owned)).collect();
            this.expected.insert(key, expected(&ledger.events, events));
        }
        Ok(this)
    }

    fn row_of(&self, event: u64) -> Result<Row, String> {
        self.shape.row(&self.shape.record(&self.ledger.numbers(event)))
    }

    /// What callers were told.
    fn answers(&mut self) -> Result<(), String> {
        for (at, event) in self.ledger.events.iter().enumerate() {
            let number = at as u64 + 1;
            let (wrong, expected, found) = if event.effects > 1 {
                let found = format!("{} answers that it took effect just now", event.effects);
                (Wrong::Twice, "one answer that it took effect; copies are told \"duplicate\"", found)
            } else if !event.settled && event.refused {
                // Its like were taken before the first fault.
                (Wrong::Answer, "an answer that it took effect", "it was refused, and never taken".to_owned())
            } else if !event.settled {
                (Wrong::Unanswered, "an answer", "none until the end of the drill".to_owned())
            } else {
                continue;
            };
            let key = self.shape.shown_identity(&self.row_of(number)?);
            self.violations.add(Violation { wrong, key, expected: expected.to_owned(), found });
        }
        for (event, word) in &self.ledger.odd {
            let key = self.shape.shown_identity(&self.row_of(*event)?);
            self.violations.add(Violation {
                wrong: Wrong::Answer,
                key,
                expected: "\"duplicate\", or the first answer".to_owned(),
                found: format!("{word:?}"),
            });
        }
        for event in &self.ledger.silent {
            let key = self.shape.shown_identity(&self.row_of(*event)?);
            self.violations.add(Violation {
                wrong: Wrong::Unanswered,
                key,
                expected: "\"duplicate\", for a copy after the last fault".to_owned(),
                found: "no answer".to_owned(),
            });
        }
        for how in &self.ledger.deaths {
            self.violations.add(Violation {
                wrong: Wrong::Died,
                key: BTreeMap::new(),
                expected: "a gateway that runs until it is ended".to_owned(),
                found: how.clone(),
            });
        }
        let more = self.ledger.odd_count - self.ledger.odd.len() as u64;
        if more > 0 {
            *self.violations.counts.entry(Wrong::Answer).or_default() += more;
        }
        Ok(())
    }

    /// A row that is in the sink: the compared columns, in their order.
    pub(crate) fn found(&mut self, row: &Row) -> Result<(), String> {
        self.rows_found += 1;
        let row: Row = row
            .iter()
            .zip(self.shape.columns())
            .map(|(value, column)| value.as_deref().map(|text| column.kind.normal(text)))
            .collect();
        let key: Vec<Option<String>> =
            self.shape.identity(&row).iter().map(|part| part.map(str::to_owned)).collect();
        let shown = |this: &Self| this.shape.shown_identity(&row);
        let Some(expected) = self.expected.get_mut(&key) else {
            let key = shown(self);
            self.violations.add(Violation {
                wrong: Wrong::Unexpected,
                key,
                expected: "no row: nothing of that name was sent".to_owned(),
                found: text_of(self.shape, &row),
            });
            return Ok(());
        };
        expected.found += 1;
        let (found, allowed) = (expected.found, expected.allowed.clone());
        if found > 1 {
            let key = shown(self);
            self.violations.add(Violation {
                wrong: Wrong::Twice,
                key,
                expected: "one row".to_owned(),
                found: format!("{found} rows"),
            });
            return Ok(());
        }
        let Some(first) = allowed.first() else {
            let key = shown(self);
            self.violations.add(Violation {
                wrong: Wrong::Unexpected,
                key,
                expected: "no row: each answer said that it is not written".to_owned(),
                found: text_of(self.shape, &row),
            });
            return Ok(());
        };
        for event in &allowed {
            if self.row_of(*event)? == row {
                return Ok(());
            }
        }
        let expected = text_of(self.shape, &self.row_of(*first)?);
        let key = shown(self);
        let found = text_of(self.shape, &row);
        self.violations.add(Violation { wrong: Wrong::Content, key, expected, found });
        Ok(())
    }

    /// All that is wrong, and how many rows there were.
    pub(crate) fn finish(mut self) -> Result<(Violations, u64), String> {
        let mut lost: Vec<u64> = self
            .expected
            .values()
            .filter(|expected| expected.must && expected.found == 0)
            .filter_map(|expected| expected.allowed.first().copied())
            .collect();
        lost.sort_unstable();
        for event in lost {
            let row = self.row_of(event)?;
            self.violations.add(Violation {
                wrong: Wrong::Lost,
                key: self.shape.shown_identity(&row),
                expected: text_of(self.shape, &row),
                found: "no row".to_owned(),
            });
        }
        Ok((self.violations, self.rows_found))
    }
}

/// Of the events of one row, in the order in which they win.
fn expected(all: &[Event], events: &[u64]) -> Expected {
    let at = |event: &u64| &all[*event as usize - 1];
    let last = events.iter().rposition(|event| at(event).settled);
    let mut allowed: Vec<u64> = last.map(|last| events[last]).into_iter().collect();
    // What may have got in behind it without anybody having been told.
    let behind = &events[last.map_or(0, |last| last + 1)..];
    allowed.extend(behind.iter().filter(|event| at(event).uncertain && !at(event).refused));
    Expected { must: last.is_some(), allowed, found: 0 }
}

/// `column=value, ..`, of the compared columns.
fn text_of(shape: &Shape, row: &Row) -> String {
    let parts: Vec<String> = shape
        .columns()
        .iter()
        .zip(row)
        .map(|(column, value)| match value {
            Some(value) => format!("{}={value:?}", column.name),
            None => format!("{}=null", column.name),
        })
        .collect();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use adapters::sink::Column;

    use super::*;
    use crate::{
        drill::{shape::Asked, values::Kind},
        key::KeySpec,
        naming::NamingRules,
    };

    fn shape(mode: Mode) -> Shape {
        let naming = NamingRules::new(KeySpec::pointers(["/id", "/version"]).unwrap());
        let column = |name: &str| {
            let column =
                Column { name: name.into(), type_name: "TEXT".into(), nullable: false, has_default: false };
            (column, Some(Kind::Text(None, false)))
        };
        let row_key = ["id".to_owned()];
        let version = (mode == Mode::UpsertIfNewer).then_some("version");
        let columns = vec![column("id"), column("version")];
        Shape::of(&Asked {
            naming: &naming,
            mode,
            row_key: &row_key,
            version,
            columns,
            template: None,
            seed: 1,
        })
        .unwrap()
    }

    struct Rig {
        shape: Shape,
        ledger: Ledger,
        mode: Mode,
    }

    impl Rig {
        fn new(mode: Mode) -> Self {
            Self { shape: shape(mode), ledger: Ledger::default(), mode }
        }

        fn sent(&mut self, row: u64, version: u64, words: &[&str]) -> u64 {
            let event = self.ledger.open(row, version, 0, 0).event;
            for word in words {
                if *word == "none" {
                    self.ledger.unanswered(event);
                } else {
                    self.ledger.answered(event, word);
                }
            }
            event
        }

        fn row(&self, event: u64) -> Row {
            self.shape.row(&self.shape.record(&self.ledger.numbers(event))).unwrap()
        }

        fn wrong(&self, rows: &[Row]) -> Vec<(Wrong, u64)> {
            let mut comparison = Comparison::new(&self.ledger, &self.shape, self.mode).unwrap();
            for row in rows {
                comparison.found(row).unwrap();
            }
            comparison.finish().unwrap().0.counts.into_iter().collect()
        }
    }

    #[test]
    fn what_was_acknowledged_and_is_there_once_is_well() {
        let mut rig = Rig::new(Mode::Insert);
        let events = [rig.sent(1, 1, &["written", "duplicate"]), rig.sent(2, 1, &["none", "duplicate"])];
        let rows: Vec<Row> = events.iter().map(|event| rig.row(*event)).collect();
        assert_eq!(rig.wrong(&rows), []);
        assert_eq!((rig.ledger.settled(), rig.ledger.refused()), (2, 0));
    }

    /// A gateway that refused everything after the trial, or what it had applied before its answer was lost, was said to have held.
    #[test]
    fn a_record_that_is_refused_and_never_taken_is_named_and_its_row_is_nobodys() {
        let mut rig = Rig::new(Mode::Insert);
        rig.sent(1, 1, &["late"]);
        assert_eq!(rig.wrong(&[]), [(Wrong::Answer, 1)]);
        let applied = rig.sent(2, 1, &["none", "late"]);
        let row = rig.row(applied);
        assert_eq!(rig.wrong(&[row]), [(Wrong::Unexpected, 1), (Wrong::Answer, 2)]);
    }

    #[test]
    fn a_lost_a_doubled_and_a_strange_row_are_each_named() {
        let mut rig = Rig::new(Mode::Insert);
        let (lost, twice) = (rig.sent(1, 1, &["written"]), rig.sent(2, 1, &["written"]));
        let refused = rig.sent(3, 1, &["rejected"]);
        let strange: Row = vec![Some("not of the drill".into()), Some("1".into())];
        let rows = [rig.row(twice), rig.row(twice), rig.row(refused), strange];
        assert_eq!(
            rig.wrong(&rows),
            [(Wrong::Lost, 1), (Wrong::Twice, 1), (Wrong::Unexpected, 2), (Wrong::Answer, 1)]
        );
        let mut comparison = Comparison::new(&rig.ledger, &rig.shape, Mode::Insert).unwrap();
        comparison.found(&rig.row(twice)).unwrap();
        let (violations, rows) = comparison.finish().unwrap();
        assert_eq!(rows, 1);
        let named = violations.shown.iter().find(|shown| shown.wrong == Wrong::Lost).unwrap().key["id"]
            .clone()
            .unwrap();
        assert_eq!(Some(named), rig.row(lost)[0]);
    }

    /// A gateway that crashed on some record between two faults was started again with the next fault, and a copy that was never answered
    /// after the last one counted as sent: both drills held.
    #[test]
    fn a_gateway_that_ends_by_itself_and_a_copy_without_an_answer_are_violations() {
        let mut rig = Rig::new(Mode::Insert);
        let event = rig.sent(1, 1, &["written"]);
        rig.ledger.silent(event);
        rig.ledger.died("it ended by itself with signal 6".to_owned());
        let row = rig.row(event);
        assert_eq!(rig.wrong(&[row]), [(Wrong::Unanswered, 1), (Wrong::Died, 1)]);
    }

    #[test]
    fn two_answers_of_an_effect_are_a_double_even_if_the_table_shows_one_row() {
        let mut rig = Rig::new(Mode::Upsert);
        let event = rig.sent(1, 1, &["written", "updated"]);
        assert_eq!(rig.wrong(&[rig.row(event)]), [(Wrong::Twice, 1)]);
    }

    #[test]
    fn the_last_acknowledged_version_is_what_a_row_must_show() {
        let mut rig = Rig::new(Mode::Upsert);
        let old = rig.sent(1, 1, &["written"]);
        let new = rig.sent(1, 2, &["none", "updated"]);
        assert_eq!(rig.wrong(&[rig.row(new)]), []);
        assert_eq!(rig.wrong(&[rig.row(old)]), [(Wrong::Content, 1)]);
    }

    #[test]
    fn the_highest_version_wins_in_whatever_order_it_came() {
        let mut rig = Rig::new(Mode::UpsertIfNewer);
        let high = rig.sent(1, 3, &["written"]);
        let low = rig.sent(1, 2, &["stale"]);
        assert_eq!(rig.wrong(&[rig.row(high)]), []);
        assert_eq!(rig.wrong(&[rig.row(low)]), [(Wrong::Content, 1)]);
    }

    #[test]
    fn what_nobody_was_told_of_may_be_there_or_not_but_is_named() {
        let mut rig = Rig::new(Mode::Upsert);
        let told = rig.sent(1, 1, &["written"]);
        let open = rig.sent(1, 2, &["none"]);
        for event in [told, open] {
            assert_eq!(rig.wrong(&[rig.row(event)]), [(Wrong::Unanswered, 1)]);
        }
    }

    #[test]
    fn a_copy_that_is_told_something_else_is_named() {
        let mut rig = Rig::new(Mode::Insert);
        let event = rig.sent(1, 1, &["written", "mismatch"]);
        assert_eq!(rig.wrong(&[rig.row(event)]), [(Wrong::Answer, 1)]);
    }

    #[test]
    fn the_list_is_bounded_and_the_count_is_whole() {
        let mut rig = Rig::new(Mode::Insert);
        for row in 1..=100 {
            rig.sent(row, 1, &["written"]);
        }
        let comparison = Comparison::new(&rig.ledger, &rig.shape, Mode::Insert).unwrap();
        let (violations, _) = comparison.finish().unwrap();
        assert_eq!((violations.count(), violations.shown.len()), (100, SHOWN));
    }
}
