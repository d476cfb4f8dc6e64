//! What a drill found, as a table and as JSON ([`Report`]).

use std::{collections::BTreeMap, fmt, time::Duration};

use serde_json::{Value, json};

use super::ledger::Violations;

/// What a drill found.
#[derive(Debug, Default)]
pub struct Report {
    pub(crate) route: String,
    pub(crate) sink: String,
    pub(crate) seed: u64,
    pub(crate) took: Duration,
    pub(crate) interrupted: bool,
    /// By their names: how many, and how many of them struck.
    pub(crate) faults: BTreeMap<&'static str, (u64, u64)>,
    pub(crate) rows: u64,
    pub(crate) events: u64,
    pub(crate) acknowledged: u64,
    pub(crate) refused: u64,
    pub(crate) requests: u64,
    pub(crate) copies: u64,
    pub(crate) repeated: u64,
    pub(crate) outcomes: BTreeMap<String, u64>,
    pub(crate) rows_found: u64,
    /// Columns whose values were compared.
    pub(crate) compared: Vec<String>,
    pub(crate) violations: Violations,
    /// What a reader should know.
    pub(crate) notes: Vec<String>,
    /// What the drill has made and taken away.
    pub(crate) cleaned: Vec<String>,
    /// What it could not take away, and why.
    pub(crate) left: Vec<String>,
}

impl Report {
    /// Nothing was lost, nothing is there twice, nothing is wrong.
    pub fn held(&self) -> bool {
        self.violations.count() == 0
    }

    /// What could not be taken away, and why.
    pub fn left(&self) -> &[String] {
        &self.left
    }

    /// One object.
    pub fn json(&self) -> Value {
        let counts =
            self.violations.counts.iter().map(|(wrong, count)| (wrong.word().replace(' ', "_"), *count));
        let records = self.violations.shown.iter().map(|violation| {
            json!({
                "kind": violation.wrong.word().replace(' ', "_"),
                "key": violation.key,
                "expected": violation.expected,
                "found": violation.found,
            })
        });
        json!({
            "route": self.route,
            "sink": self.sink,
            "seed": self.seed,
            "took_ms": self.took.as_millis() as u64,
            "interrupted": self.interrupted,
            "held": self.held(),
            "faults": self.faults.iter().map(|(fault, (count, struck))| {
                json!({ "fault": fault, "count": count, "struck": struck })
            }).collect::<Vec<_>>(),
            "rows": self.rows,
            "events": self.events,
            "acknowledged": self.acknowledged,
            "refused": self.refused,
            "requests": self.requests,
            "copies": self.copies,
            "repeated": self.repeated,
            "outcomes": self.outcomes,
            "rows_found": self.rows_found,
            "columns": self.compared,
            "violations": {
                "count": self.violations.count(),
                "by_kind": counts.collect::<BTreeMap<_, _>>(),
                "records": records.collect::<Vec<_>>(),
            },
            "notes": self.notes,
            "cleaned": self.cleaned,
            "left": self.left,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "drill of route {} into {}, seed {}, {:.1} s",
            self.route,
            self.sink,
            self.seed,
            self.took.as_secs_f64()
        )?;
        if self.interrupted {
            writeln!(f, "ended before its time; what was sent until then was compared")?;
        }
        writeln!(f, "\n  {:<44} {:>10} {:>10}", "fault", "done", "struck")?;
        for (fault, (count, struck)) in &self.faults {
            writeln!(f, "  {fault:<44} {count:>10} {struck:>10}")?;
        }
        writeln!(f, "\n  {:<44} {:>10}", "answer", "count")?;
        for (word, count) in &self.outcomes {
            writeln!(f, "  {word:<44} {count:>10}")?;
        }
        writeln!(f)?;
        let figures = [
            ("events", self.events),
            ("  acknowledged", self.acknowledged),
            ("  refused", self.refused),
            ("requests", self.requests),
            ("  copies on purpose", self.copies),
            ("  sent again for want of an answer", self.repeated),
            ("rows that the events make", self.rows),
            ("rows found", self.rows_found),
        ];
        for (name, figure) in figures {
            writeln!(f, "  {name:<44} {figure:>10}")?;
        }
        writeln!(f, "  columns compared: {}", self.compared.join(", "))?;
        for note in &self.notes {
            writeln!(f, "  note: {note}")?;
        }
        writeln!(f)?;
        if self.held() {
            writeln!(f, "held: nothing lost, nothing twice, nothing wrong")?;
        } else {
            let counts: Vec<String> = self
                .violations
                .counts
                .iter()
                .map(|(wrong, count)| format!("{count} {}", wrong.word()))
                .collect();
            writeln!(f, "VIOLATED: {}", counts.join(", "))?;
            for violation in &self.violations.shown {
                let key: Vec<String> = violation
                    .key
                    .iter()
                    .map(|(column, value)| match value {
                        Some(value) => format!("{column}={value:?}"),
                        None => format!("{column}=null"),
                    })
                    .collect();
                let of = if key.is_empty() { String::new() } else { format!(": {}", key.join(", ")) };
                writeln!(f, "  {}{of}", violation.wrong.word())?;
                writeln!(f, "    expected: {}", violation.expected)?;
                writeln!(f, "    found:    {}", violation.found)?;
            }
            let more = self.violations.count() - self.violations.shown.len() as u64;
            if more > 0 {
                writeln!(f, "  and {more} more")?;
            }
        }
        for what in &self.left {
            writeln!(f, "not taken away: {what}")?;
        }
        Ok(())
    }
}
