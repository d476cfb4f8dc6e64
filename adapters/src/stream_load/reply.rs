//! What answers and label states say. Pure.

use serde_json::Value;

/// An answer to a load, or to a step of its transaction.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Reply {
    /// In capitals.
    pub(super) status: String,
    pub(super) label: Option<String>,
    pub(super) txn: Option<i64>,
    /// May hold values.
    pub(super) message: String,
    /// Of the load that has the label.
    pub(super) existing: String,
    pub(super) loaded: Option<i64>,
    pub(super) filtered: i64,
    pub(super) unselected: i64,
    pub(super) error_url: Option<String>,
}

impl Reply {
    /// None if it is no answer of theirs. Both spellings of each member are theirs: front-ends and back-ends differ.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let json: Value = serde_json::from_slice(body).ok()?;
        let members = json.as_object()?;
        let member = |name: &str| {
            members.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
        };
        let text = |name: &str| member(name).and_then(Value::as_str).map(str::to_owned);
        let number = |name: &str| member(name).and_then(Value::as_i64);
        Some(Self {
            status: text("Status")?.to_uppercase(),
            label: text("Label").filter(|label| !label.is_empty()),
            txn: number("TxnId").filter(|txn| *txn > 0),
            message: text("Message").or_else(|| text("msg")).unwrap_or_default(),
            existing: text("ExistingJobStatus").unwrap_or_default(),
            loaded: number("NumberLoadedRows"),
            filtered: number("NumberFilteredRows").unwrap_or(0),
            unselected: number("NumberUnselectedRows").unwrap_or(0),
            error_url: text("ErrorURL").filter(|url| !url.is_empty()),
        })
    }

    /// A load, or a step, that went well.
    pub(super) fn is_good(&self) -> bool {
        matches!(self.status.as_str(), "SUCCESS" | "OK")
    }

    /// Committed, and not visible yet.
    pub(super) fn is_late(&self) -> bool {
        self.status == "PUBLISH TIMEOUT"
    }

    /// The label is in use.
    pub(super) fn exists(&self) -> bool {
        matches!(self.status.as_str(), "LABEL ALREADY EXISTS" | "LABEL_ALREADY_EXISTS")
    }

    /// Rows were looked at and refused.
    pub(super) fn refuses_rows(&self) -> bool {
        let message = self.message.to_lowercase();
        self.filtered > 0
            || [
                "too many filtered rows",
                "data_quality_error",
                "all partitions have no load data",
                // All of them were refused, and an empty load is an error.
                "no partitions have data available for loading",
            ]
            .iter()
            .any(|sign| message.contains(sign))
    }

    /// Not so many rows are in as were sent.
    pub(super) fn differs(&self, rows: usize) -> Option<String> {
        let loaded = self.loaded?;
        let whole = i64::try_from(rows) == Ok(loaded) && self.filtered == 0 && self.unselected == 0;
        (!whole).then(|| {
            format!(
                "{loaded} of {rows} rows are loaded, {} filtered, {} not selected",
                self.filtered, self.unselected
            )
        })
    }

    /// The transaction that has the label, which Doris tells in words.
    pub(super) fn related(&self) -> Option<i64> {
        let (_, rest) = self.message.split_once("relate to txn [")?;
        rest.split_once(']')?.0.parse().ok()
    }

    /// Whether trying again may help.
    pub(super) fn may_pass(&self) -> bool {
        let message = self.message.to_lowercase();
        !["denied", "unknown table", "unknown database", "does not exist", "unknown column", "no such column"]
            .iter()
            .any(|sign| message.contains(sign))
    }

    /// For people, without values.
    pub(super) fn plain(&self) -> String {
        let many = ["-235", "too many tablet versions", "too many versions", "too_many_version"];
        let lower = self.message.to_lowercase();
        if many.iter().any(|sign| lower.contains(sign)) {
            return format!(
                "{}: the table has too many versions (-235): loads are too small or too many",
                self.status
            );
        }
        let text = without_values(&self.message);
        if text.is_empty() { self.status.clone() } else { format!("{}: {text}", self.status) }
    }
}

/// The text without what stands in quotes or brackets, and without numbers and the row itself: those may be a record's values.
pub(super) fn without_values(text: &str) -> String {
    let mut end = text.len();
    for sign in ["src line", "src_raw", "row:", "tuple=", "line:", "\n"] {
        let lower = text.to_ascii_lowercase();
        end = end.min(lower.find(sign).unwrap_or(end));
    }
    let mut out = String::new();
    let mut until = None;
    let mut in_number = false;
    for mark in text[..end].chars() {
        if let Some(close) = until {
            if mark == close {
                until = None;
                out.push_str("..");
                out.push(mark);
            }
            continue;
        }
        match mark {
            '\'' | '"' | '`' => until = Some(mark),
            '[' => until = Some(']'),
            '{' => until = Some('}'),
            _ => {}
        }
        if mark.is_ascii_digit() {
            if !in_number {
                out.push('N');
            }
            in_number = true;
            continue;
        }
        in_number = false;
        out.push(mark);
    }
    out.trim().chars().take(200).collect()
}

/// How the load under a label stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LabelState {
    /// Its rows are in, visible or about to be.
    In,
    /// It may still come to be in.
    Running,
    /// It waits for its commit.
    Prepared,
    /// It is known, and nothing of it is in.
    Aborted,
    /// The label is not known.
    Absent,
}

/// As `get_load_state` answers.
pub(super) fn label_state(body: &[u8]) -> Result<LabelState, String> {
    let json: Value = serde_json::from_slice(body).map_err(|_| "the answer is no JSON".to_owned())?;
    let state = json.get("state").or_else(|| json.get("data")).and_then(Value::as_str);
    match state.map(str::to_uppercase).as_deref() {
        Some("VISIBLE" | "COMMITTED") => Ok(LabelState::In),
        Some("PREPARE") => Ok(LabelState::Running),
        Some("PREPARED" | "PRECOMMITTED") => Ok(LabelState::Prepared),
        Some("ABORTED") => Ok(LabelState::Aborted),
        Some("UNKNOWN") => Ok(LabelState::Absent),
        Some(_) => Err("a state that is not known to this build".to_owned()),
        None => {
            let said = json.get("msg").and_then(Value::as_str).unwrap_or("no state");
            Err(without_values(said))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_front_ends_and_back_ends_are_read() {
        let back = br#"{"TxnId":7,"Label":"l","Status":"Success","Message":"OK","NumberTotalRows":3,"NumberLoadedRows":3,
            "NumberFilteredRows":0,"NumberUnselectedRows":0,"ErrorURL":""}"#;
        let reply = Reply::read(back).expect("it is one");
        assert!(reply.is_good() && reply.differs(3).is_none() && reply.txn == Some(7));
        assert!(reply.differs(4).is_some_and(|why| why.contains("3 of 4 rows")));
        let front =
            Reply::read(br#"{"status":"FAILED","msg":"Access denied for user 'x'"}"#).expect("it is one");
        assert!(!front.may_pass() && front.plain() == "FAILED: Access denied for user '..'");
        let exists = Reply::read(
            br#"{"TxnId":-1,"Status":"Label Already Exists","ExistingJobStatus":"RUNNING","Message":"Label [l] has already been used, relate to txn [12]"}"#,
        )
        .expect("it is one");
        assert!(exists.exists() && exists.related() == Some(12) && exists.txn.is_none());
        assert!(Reply::read(b"{\"TxnId\":1}").is_none() && Reply::read(b"<html>").is_none());
        let late = Reply::read(br#"{"Status":"Publish Timeout","TxnId":3}"#).expect("it is one");
        assert!(late.is_late() && !late.is_good());
        let many =
            Reply::read(br#"{"Status":"Fail","Message":"tablet error: [E-235]too many tablet versions"}"#);
        assert!(many.expect("it is one").plain().contains("too many versions (-235)"));
    }

    #[test]
    fn p15_each_label_state_says_what_is_in() {
        for (body, state) in [
            (&br#"{"state":"VISIBLE","reason":"","status":"OK"}"#[..], LabelState::In),
            (br#"{"msg":"success","code":0,"data":"COMMITTED","count":0}"#, LabelState::In),
            (br#"{"data":"PREPARE"}"#, LabelState::Running),
            (br#"{"state":"PREPARED"}"#, LabelState::Prepared),
            (br#"{"data":"PRECOMMITTED"}"#, LabelState::Prepared),
            (br#"{"data":"ABORTED"}"#, LabelState::Aborted),
            (br#"{"state":"UNKNOWN"}"#, LabelState::Absent),
        ] {
            assert_eq!(label_state(body), Ok(state));
        }
        assert!(label_state(br#"{"state":"MAYBE"}"#).is_err() && label_state(b"<html>").is_err());
        assert_eq!(
            label_state(br#"{"msg":"unknown database 'd'"}"#),
            Err("unknown database '..'".to_owned())
        );
    }

    #[test]
    fn texts_are_told_without_values() {
        assert_eq!(
            without_values("Reason: column_name[a], value 'x 5' is out of range 12. src line [secret];"),
            "Reason: column_name[..], value '..' is out of range N."
        );
        assert_eq!(without_values("Error: null in k. Row: {\"a\":1}"), "Error: null in k.");
    }
}
