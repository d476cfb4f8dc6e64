//! DuckDB's errors in the sink's words.
//!
//! DuckDB tells the kind of an error by the first words of its text alone, and quotes names, paths and values in what follows: what
//! stands in quotes may be anybody's, so that nothing is looked for in it, and values are never passed on.

use crate::{bookkeeping::worker::Fault, sink::SinkError};

/// What kind of failure an error is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    /// A row breaks a rule of the table, or an expression of it fails on a value.
    Row,
    /// It may go better the next time.
    Again,
    /// Memory or disk ran out.
    Full,
    /// The file, its lock or its permissions.
    Io,
    /// DuckDB gives the instance up.
    Fatal,
    /// The table or its columns are not what they were.
    Schema,
    Other,
}

/// An error's text, taken apart.
struct Said<'a> {
    /// `Constraint`, `IO`; empty if the text names none.
    kind: &'a str,
    /// What follows it.
    all: &'a str,
    /// The same without what stands in quotes.
    plain: String,
}

impl<'a> Said<'a> {
    fn of(text: &'a str) -> Self {
        let text = text.strip_prefix("Failed to append: ").unwrap_or(text);
        let (kind, all) = text
            .split_once(" Error: ")
            .filter(|(kind, _)| kind.chars().all(|c| c.is_ascii_alphabetic() || c == ' '))
            .unwrap_or(("", text));
        let plain = match (all.find('"'), all.rfind('"')) {
            (Some(first), Some(last)) if first < last => [&all[..first], "..", &all[last + 1..]].concat(),
            (Some(first), _) => format!("{}..", &all[..first]),
            _ => all.to_owned(),
        };
        Self { kind, all, plain }
    }

    fn class(&self) -> Class {
        let has = |part: &str| self.plain.contains(part);
        match self.kind {
            "Constraint" | "Conversion" | "Out of Range" | "Invalid Input" | "Mismatch Type"
            | "Divide by Zero" | "Decimal" | "Object Size" => Class::Row,
            "FATAL" | "INTERNAL" => Class::Fatal,
            "IO" | "Permission" if has("No space left") || has("full") => Class::Full,
            "IO" | "Permission" => Class::Io,
            "Out of Memory" => Class::Full,
            "TransactionContext" => Class::Again,
            "Catalog" | "Binder" | "Parser" => Class::Schema,
            "" if self.broken_rule().is_some() => Class::Row,
            "" if has("has been invalidated") => Class::Fatal,
            "" if has("onflict on ") => Class::Again,
            _ => Class::Other,
        }
    }

    /// Which rule of the table was broken, without values.
    fn broken_rule(&self) -> Option<String> {
        if !matches!(self.kind, "Constraint" | "") {
            return None;
        }
        // Both name the table, and a column or an expression, and no value.
        if ["NOT NULL constraint failed", "CHECK constraint failed"]
            .iter()
            .any(|rule| self.all.starts_with(rule))
        {
            let rule = self.all.lines().next().unwrap_or_default();
            return Some(rule.trim_end_matches('.').to_owned());
        }
        let has = |part: &str| self.plain.contains(part);
        if has("still referenced") {
            Some("a foreign key of another table refers to the row".to_owned())
        } else if has("foreign key constraint") {
            Some("a foreign key refers to a row that is not there".to_owned())
        } else if has("violates primary key constraint") {
            Some("another row has this primary key".to_owned())
        } else if has("violates unique constraint") || has("duplicate key") || has("Duplicate key") {
            Some("another row has this key of a PRIMARY KEY or UNIQUE constraint".to_owned())
        } else {
            None
        }
    }

    /// A commit was refused because of what others have written, or of a constraint. The cause stands before all that is quoted.
    fn refuses_commit(&self) -> bool {
        self.kind == "TransactionContext"
            && self.all.strip_prefix("Failed to commit: ").is_some_and(|why| {
                let cause = why.split('"').next().unwrap_or_default();
                ["constraint violation", "onflict", "onstraint"].iter().any(|part| cause.contains(part))
            })
    }

    /// For logs and callers.
    fn shown(&self) -> String {
        let all = match self.class() {
            // Names and paths, which are needed to mend it.
            Class::Io | Class::Full | Class::Fatal | Class::Schema => self.all,
            Class::Row | Class::Again | Class::Other => self.plain.as_str(),
        };
        let line = all.lines().next().unwrap_or_default();
        if self.kind.is_empty() { line.to_owned() } else { format!("{} Error: {line}", self.kind) }
    }
}

/// All of an error's text.
fn whole(error: &duckdb::Error) -> String {
    match error {
        duckdb::Error::DuckDBFailure(_, Some(message)) => message.clone(),
        other => other.to_string(),
    }
}

pub(super) fn classify(error: &duckdb::Error) -> Class {
    Said::of(&whole(error)).class()
}

/// The commit was refused, and nothing of it is left.
pub(super) fn refuses_commit(error: &duckdb::Error) -> bool {
    Said::of(&whole(error)).refuses_commit()
}

/// Why DuckDB refused a row, without its values.
pub(super) fn refusal(table: &str, error: &duckdb::Error) -> String {
    match Said::of(&whole(error)).broken_rule() {
        Some(rule) => format!("{rule} (table {table:?})"),
        None => {
            format!("an expression of table {table:?} (a default, a check or an index) fails on its values")
        }
    }
}

/// An error from outside COMMIT: nothing of the transaction can come any more, for a DuckDB file has no server that might still be
/// at it.
pub(super) fn fault(doing: &str, error: &duckdb::Error) -> Fault {
    let text = whole(error);
    let said = Said::of(&text);
    let (retry, lost, advice) = match said.class() {
        Class::Again => (true, false, "it is tried again"),
        Class::Full => (true, false, "make room on the disk or in memory"),
        Class::Io => (true, true, "check the file, its folder and their permissions"),
        Class::Fatal => (true, true, "the file is opened again"),
        Class::Row | Class::Schema | Class::Other => {
            (false, false, "check the table and the oncegate_* tables against the start-up checks")
        }
    };
    let what = match said.class() {
        Class::Row => said.broken_rule().unwrap_or_else(|| "an expression fails".to_owned()),
        _ => said.shown(),
    };
    Fault { error: SinkError::NotApplied { reason: format!("{doing}: {what}; {advice}"), retry }, lost }
}

/// The error in one line, without values.
pub(super) fn shown(error: &duckdb::Error) -> String {
    Said::of(&whole(error)).shown()
}

/// The error in one line, as DuckDB says it: for statements in which there is nobody's value.
pub(super) fn text(error: &duckdb::Error) -> String {
    whole(error).lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(text: &str) -> Class {
        Said::of(text).class()
    }

    #[test]
    fn rule10_what_a_text_quotes_decides_nothing() {
        for value in [
            "a conflict on x",
            "has been invalidated",
            "No space left",
            "NOT NULL constraint failed: t.x",
            "IO Error: x",
            "q\"q",
            "a\nb",
        ] {
            for (text, expected) in [
                (
                    format!("Constraint Error: Duplicate key \"u: {value}\" violates unique constraint."),
                    Class::Row,
                ),
                (
                    format!(
                        "Failed to append: Constraint Error: Duplicate key \"u: {value}\" violates unique constraint."
                    ),
                    Class::Row,
                ),
                (format!("Duplicate key \"u: {value}\" violates unique constraint."), Class::Row),
                (format!("Conversion Error: Could not convert string '{value}' to INT32"), Class::Row),
                (format!("IO Error: Could not write file \"{value}\": Input/output error"), Class::Io),
                (
                    format!(
                        "TransactionContext Error: Failed to commit: write-write conflict on key: \"{value}\""
                    ),
                    Class::Again,
                ),
                (format!("Sequence Error: \"{value}\""), Class::Other),
            ] {
                let said = Said::of(&text);
                assert_eq!(said.class(), expected, "{text}");
                assert!(
                    matches!(expected, Class::Io | Class::Row) || !said.shown().contains(value),
                    "{}",
                    said.shown()
                );
                let rule = said.broken_rule();
                assert!(
                    rule.as_ref().is_none_or(|rule| rule.starts_with("another row has this key")),
                    "{rule:?}"
                );
            }
        }
    }

    #[test]
    fn the_kind_stands_first() {
        assert_eq!(
            class("FATAL Error: Failed: database has been invalidated because of a previous fatal error."),
            Class::Fatal
        );
        assert_eq!(class("IO Error: Could not write file \"/a/b\": No space left on device"), Class::Full);
        assert_eq!(
            class(
                "Constraint Error: CHECK constraint failed on table t with expression CHECK((\"a b\" > 0))"
            ),
            Class::Row
        );
        let check = Said::of(
            "Constraint Error: CHECK constraint failed on table t with expression CHECK((\"a b\" > 0))",
        )
        .broken_rule();
        assert!(check.unwrap().ends_with("CHECK((\"a b\" > 0))"));
    }

    #[test]
    fn p5_a_path_is_no_reason_to_call_a_commit_refused() {
        for path in ["/data/conflicts.db.wal", "/constraint violation/x", "/a\"conflict\"/x"] {
            let text = format!(
                "TransactionContext Error: Failed to commit: Could not write file \"{path}\": Input/output error"
            );
            assert!(!Said::of(&text).refuses_commit(), "{text}");
        }
        for refused in [
            "TransactionContext Error: Failed to commit: PRIMARY KEY or UNIQUE constraint violation: duplicate key \"id: 3\"",
            "TransactionContext Error: Failed to commit: write-write conflict on key: \"3\"",
        ] {
            assert!(Said::of(refused).refuses_commit(), "{refused}");
        }
        assert!(!Said::of("FATAL Error: Failed to commit: constraint").refuses_commit());
    }
}
