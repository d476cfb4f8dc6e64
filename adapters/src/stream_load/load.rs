//! The requests: one load, the two phases of one, the state of a label. What became of a load is never guessed: an answer that is not
//! plainly good is followed by the question how its label stands.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http::{Method, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use tracing::{error, warn};

use super::{
    Dialect, StreamLoadConfig,
    client::{Ask, Client, Failure, Knock},
    reply::{LabelState, Reply, label_state, without_values},
};
use crate::journal::Sent;

/// Names of databases and tables in a path.
const NAME: &AsciiSet = &NON_ALPHANUMERIC.remove(b'_').remove(b'-');

/// Asks one cluster about one table.
pub(super) struct Loader {
    pub(super) dialect: Dialect,
    client: Client,
    database: String,
    table: String,
    timeout: Duration,
    /// The newest transaction's number that was seen.
    pub(super) newest: Option<i64>,
}

/// A load that is to be sent.
#[derive(Clone, Copy)]
pub(super) struct Load<'a> {
    pub(super) headers: &'a [(String, String)],
    pub(super) label: &'a str,
    pub(super) rows: usize,
    pub(super) body: &'a Bytes,
}

/// A row of an answer to a question in SQL, by the columns' names in small letters.
pub(super) type SqlRow = HashMap<String, String>;

fn pair(name: &str, value: impl Into<String>) -> (String, String) {
    (name.to_owned(), value.into())
}

impl Loader {
    pub(super) fn new(config: &StreamLoadConfig, client: Client) -> Self {
        let (database, table) = config.names();
        Self {
            dialect: config.dialect,
            client,
            database: database.to_owned(),
            table: table.to_owned(),
            timeout: config.request_timeout,
            newest: None,
        }
    }

    /// How long the server lets a load or transaction go on.
    pub(super) fn timeout_header(&self) -> String {
        self.timeout.as_secs().max(1).to_string()
    }

    fn in_database(&self, rest: &str) -> String {
        format!("/api/{}{rest}", utf8_percent_encode(&self.database, NAME))
    }

    fn in_table(&self, rest: &str) -> String {
        self.in_database(&format!("/{}{rest}", utf8_percent_encode(&self.table, NAME)))
    }

    async fn reply(&mut self, ask: &Ask) -> Result<Reply, Failure> {
        let answer = self.client.ask(ask).await?;
        let reply = Reply::read(&answer.body);
        if let Some(txn) = reply.as_ref().and_then(|reply| reply.txn) {
            self.newest = Some(self.newest.map_or(txn, |newest| newest.max(txn)));
        }
        match reply {
            Some(reply) if !answer.status.is_server_error() => Ok(reply),
            _ => {
                Err(Failure::Unclear(format!("{} with no answer of {}", answer.status, self.dialect.name())))
            }
        }
    }

    /// One load under its label; `prepare`: it then waits for its commit (Doris).
    async fn stream(&mut self, load: Load<'_>, prepare: bool) -> Result<Reply, Failure> {
        let mut headers = load.headers.to_vec();
        headers.extend([pair("label", load.label), pair("expect", "100-continue")]);
        if prepare {
            headers.push(pair("two_phase_commit", "true"));
        }
        let path = self.in_table("/_stream_load");
        let ask = Ask { method: Method::PUT, path, headers, body: load.body.clone(), knock: Knock::Bare };
        self.reply(&ask).await
    }

    /// One step of a transaction (StarRocks).
    async fn step(&mut self, step: &str, label: &str, load: Option<Load<'_>>) -> Result<Reply, Failure> {
        let mut headers = load.map(|load| load.headers.to_vec()).unwrap_or_default();
        headers.retain(|(name, _)| name != "timeout");
        headers.extend([pair("label", label), pair("db", &*self.database), pair("table", &*self.table)]);
        headers.extend([pair("expect", "100-continue"), pair("timeout", self.timeout_header())]);
        headers.push(pair("idle_transaction_timeout", self.timeout_header()));
        let (method, knock) = match load {
            Some(_) => (Method::PUT, Knock::Named),
            None => (Method::POST, Knock::No),
        };
        let body = load.map(|load| load.body.clone()).unwrap_or_default();
        let ask = Ask { method, path: format!("/api/transaction/{step}"), headers, body, knock };
        self.reply(&ask).await
    }

    /// Commits or aborts what is prepared (Doris).
    async fn finish(&mut self, what: (String, String), operation: &str) -> Result<Reply, Failure> {
        let headers = vec![what, pair("txn_operation", operation), pair("expect", "100-continue")];
        let path = self.in_database("/_stream_load_2pc");
        self.reply(&Ask { method: Method::PUT, path, headers, body: Bytes::new(), knock: Knock::No }).await
    }

    /// How the load under a label stands: the leading front-end says.
    pub(super) async fn state(&mut self, label: &str) -> Result<LabelState, String> {
        let path = self.in_database(&format!("/get_load_state?label={label}"));
        let ask =
            Ask { method: Method::GET, path, headers: Vec::new(), body: Bytes::new(), knock: Knock::No };
        let answer = self.client.ask(&ask).await.map_err(Failure::text)?;
        if answer.status != StatusCode::OK {
            return Err(format!("the state of the label is not told: {}", answer.status));
        }
        label_state(&answer.body).map_err(|why| format!("the state of the label is not told: {why}"))
    }

    /// What a load became whose answer was not plainly good; `reply` if there was one.
    async fn by_state(&mut self, load: Load<'_>, reason: String, reply: Option<&Reply>) -> Sent {
        let state = match self.state(load.label).await {
            Ok(state) => state,
            Err(why) => return Sent::Unknown { reason: format!("{reason}; and {why}") },
        };
        match (state, reply) {
            (LabelState::In, _) => Sent::In,
            (LabelState::Aborted, Some(reply)) if reply.exists() => Sent::Out { reason, retry: true },
            // A request that is over, and has left nothing.
            (LabelState::Aborted | LabelState::Absent, Some(reply)) if !reply.exists() => {
                if reply.refuses_rows() {
                    let lines = self.error_lines(reply).await;
                    Sent::Refused { reason: lines.unwrap_or(reason) }
                } else {
                    Sent::Out { reason, retry: reply.may_pass() }
                }
            }
            (state, _) => Sent::Unknown { reason: format!("{reason}; its label is {state:?}") },
        }
    }

    /// The first lines of what the server says of the rows that it refuses, without the rows.
    pub(super) async fn error_lines(&mut self, reply: &Reply) -> Option<String> {
        let page = self.client.page(reply.error_url.as_deref()?).await?;
        let page = String::from_utf8_lossy(&page);
        let lines: Vec<String> =
            page.lines().take(3).map(without_values).filter(|line| !line.is_empty()).collect();
        (!lines.is_empty()).then(|| lines.join("; "))
    }

    /// A good answer is one of this load, and of all of its rows.
    fn whole(load: Load<'_>, reply: &Reply) -> Result<(), String> {
        if reply.label.as_deref() != Some(load.label) {
            return Err(
                "the answer is of another label: a proxy, or a group or merge commit, which takes no labels"
                    .to_owned(),
            );
        }
        match (reply.loaded, reply.differs(load.rows)) {
            (_, Some(why)) => Err(why),
            (None, None) => Err("the answer does not say how many rows are loaded".to_owned()),
            (Some(_), None) => Ok(()),
        }
    }

    /// In one phase.
    pub(super) async fn one(&mut self, load: Load<'_>) -> Sent {
        match self.stream(load, false).await {
            Err(Failure::Unsent(reason)) => Sent::Out { reason, retry: true },
            Err(Failure::Unclear(reason)) => self.by_state(load, reason, None).await,
            Ok(reply) if reply.is_good() || reply.is_late() => match Self::whole(load, &reply) {
                Ok(()) => Sent::In,
                Err(why) => {
                    error!("load {} is committed, and {why}: look into the table", load.label);
                    Sent::Doubt { reason: format!("it is committed, and {why}") }
                }
            },
            Ok(reply) => self.by_state(load, reply.plain(), Some(&reply)).await,
        }
    }

    /// In two phases: the counts are looked at before the commit.
    pub(super) async fn two(&mut self, load: Load<'_>) -> Sent {
        match self.dialect {
            Dialect::StarRocks => self.transaction(load).await,
            Dialect::Doris => self.prepared(load).await,
        }
    }

    async fn transaction(&mut self, load: Load<'_>) -> Sent {
        match self.step("begin", load.label, None).await {
            Err(Failure::Unsent(reason)) => return Sent::Out { reason, retry: true },
            Err(Failure::Unclear(reason)) => return self.by_state(load, reason, None).await,
            Ok(reply) if !reply.is_good() => return self.by_state(load, reply.plain(), Some(&reply)).await,
            Ok(_) => {}
        }
        let prepared = match self.step("load", load.label, Some(load)).await {
            Ok(reply) if reply.is_good() => self.step("prepare", load.label, None).await,
            Ok(reply) => Ok(reply),
            Err(failure) => {
                // So that nobody has to wait for its time-out.
                self.rollback(load.label).await;
                Err(failure)
            }
        };
        let reply = match prepared {
            Ok(reply) if reply.is_good() => reply,
            Ok(reply) => {
                self.rollback(load.label).await;
                return self.by_state(load, reply.plain(), Some(&reply)).await;
            }
            Err(failure) => return self.by_state(load, failure.text(), None).await,
        };
        if let Err(why) = Self::whole(load, &reply) {
            self.rollback(load.label).await;
            return self.by_state(load, format!("it was rolled back: {why}"), Some(&reply)).await;
        }
        self.commit(load, None).await
    }

    async fn prepared(&mut self, load: Load<'_>) -> Sent {
        let reply = match self.stream(load, true).await {
            Err(Failure::Unsent(reason)) => return Sent::Out { reason, retry: true },
            Err(Failure::Unclear(reason)) => return self.by_state(load, reason, None).await,
            Ok(reply) => reply,
        };
        if !reply.is_good() {
            return self.by_state(load, reply.plain(), Some(&reply)).await;
        }
        let Some(txn) = reply.txn else {
            return Sent::Unknown {
                reason: "the answer to a load does not number its transaction".to_owned(),
            };
        };
        if let Err(why) = Self::whole(load, &reply) {
            self.abort(pair("txn_id", txn.to_string())).await;
            return self.by_state(load, format!("it was aborted: {why}"), Some(&reply)).await;
        }
        self.commit(load, Some(txn)).await
    }

    async fn commit(&mut self, load: Load<'_>, txn: Option<i64>) -> Sent {
        let committed = match (self.dialect, txn) {
            (Dialect::StarRocks, _) => self.step("commit", load.label, None).await,
            (Dialect::Doris, Some(txn)) => self.finish(pair("txn_id", txn.to_string()), "commit").await,
            (Dialect::Doris, None) => self.finish(pair("label", load.label), "commit").await,
        };
        match committed {
            Ok(reply) if reply.is_good() => Sent::In,
            Ok(reply) => self.by_state(load, reply.plain(), None).await,
            Err(failure) => self.by_state(load, failure.text(), None).await,
        }
    }

    /// What an earlier attempt has prepared is given up, and loaded again: whether it had all rows is known to nobody any more.
    pub(super) async fn resume(&mut self, load: Load<'_>) -> Sent {
        match self.dialect {
            Dialect::StarRocks => self.rollback(load.label).await,
            Dialect::Doris => {
                self.abort(pair("label", load.label)).await;
                // Older ones abort by number only, and tell it to who loads under the label.
                if self.state(load.label).await == Ok(LabelState::Prepared)
                    && let Ok(reply) = self.stream(load, true).await
                    && let Some(txn) = reply.related()
                {
                    self.abort(pair("txn_id", txn.to_string())).await;
                }
            }
        }
        match self.state(load.label).await {
            // The earlier attempt's commit was on its way, behind a look at its rows.
            Ok(LabelState::In) => Sent::In,
            // In one request: what the earlier attempt may have on the way into a transaction finds none.
            Ok(LabelState::Aborted) => self.one(load).await,
            Ok(state) => Sent::Unknown {
                reason: format!("it was prepared, and is not given up yet: its label is {state:?}"),
            },
            Err(why) => Sent::Unknown { reason: why },
        }
    }

    async fn rollback(&mut self, label: &str) {
        if let Err(failure) = self.step("rollback", label, None).await {
            warn!("load {label} is not rolled back, and ends by its time-out: {}", failure.text());
        }
    }

    /// `which`: by `txn_id`, or by `label`.
    async fn abort(&mut self, which: (String, String)) {
        let name = format!("{} {}", which.0, which.1);
        if let Err(failure) = self.finish(which, "abort").await {
            warn!("the transaction of {name} is not aborted, and ends by its time-out: {}", failure.text());
        }
    }

    /// How many of the rows are refused; none if some are, and it is not told how many: a load that is never committed.
    pub(super) async fn trial(
        &mut self,
        headers: &[(String, String)],
        rows: usize,
        body: &Bytes,
    ) -> Result<(Option<usize>, Reply), String> {
        let mut headers = headers.to_vec();
        headers.retain(|(name, _)| name != "max_filter_ratio");
        headers.push(pair("max_filter_ratio", "1"));
        let label = trial_label();
        let load = Load { headers: &headers, label: &label, rows, body };
        let reply = match self.dialect {
            Dialect::StarRocks => {
                let begun = self.step("begin", &label, None).await.map_err(Failure::text)?;
                if !begun.is_good() {
                    return Err(begun.plain());
                }
                let loaded = self.step("load", &label, Some(load)).await;
                let tried = match loaded {
                    Ok(reply) if reply.is_good() => self.step("prepare", &label, None).await,
                    other => other,
                };
                self.rollback(&label).await;
                tried.map_err(Failure::text)?
            }
            Dialect::Doris => {
                let reply = self.stream(load, true).await.map_err(Failure::text)?;
                if let (true, Some(txn)) = (reply.is_good(), reply.txn) {
                    self.abort(pair("txn_id", txn.to_string())).await;
                }
                reply
            }
        };
        let refused = usize::try_from(reply.filtered).unwrap_or(usize::MAX);
        match refused {
            // StarRocks counts only what goes well.
            0 if !reply.is_good() && reply.refuses_rows() => Ok((None, reply)),
            0 if !reply.is_good() => Err(reply.plain()),
            refused if refused <= rows => Ok((Some(refused), reply)),
            _ => Err("more rows are refused than were sent".to_owned()),
        }
    }

    /// Asks for the number of a transaction, with one that is given up.
    pub(super) async fn look(&mut self, headers: &[(String, String)]) -> Result<i64, String> {
        let label = trial_label();
        let reply = match self.dialect {
            Dialect::StarRocks => {
                let reply = self.step("begin", &label, None).await.map_err(Failure::text)?;
                if reply.is_good() {
                    self.rollback(&label).await;
                }
                reply
            }
            Dialect::Doris => {
                let load = Load { headers, label: &label, rows: 0, body: &Bytes::new() };
                let reply = self.stream(load, true).await.map_err(Failure::text)?;
                if let (true, Some(txn)) = (reply.is_good(), reply.txn) {
                    self.abort(pair("txn_id", txn.to_string())).await;
                }
                reply
            }
        };
        if reply.label.as_ref().is_some_and(|given| *given != label) {
            return Err("the answer is of another label: the server, or a proxy, takes none".to_owned());
        }
        reply.txn.ok_or_else(|| {
            format!("no transaction can be begun: {}", reply.message.chars().take(300).collect::<String>())
        })
    }

    /// Asks in SQL: questions that hold no record's values.
    pub(super) async fn sql(&mut self, sql: &str) -> Result<Vec<SqlRow>, Failure> {
        let database = utf8_percent_encode(&self.database, NAME);
        let (path, body) = match self.dialect {
            Dialect::StarRocks => (
                format!("/api/v1/catalogs/default_catalog/databases/{database}/sql"),
                json!({ "query": format!("{sql};") }),
            ),
            Dialect::Doris => (format!("/api/query/internal/{database}"), json!({ "stmt": sql })),
        };
        let headers = vec![pair("content-type", "application/json")];
        let body = Bytes::from(body.to_string());
        let answer =
            self.client.ask(&Ask { method: Method::POST, path, headers, body, knock: Knock::No }).await?;
        let said = || String::from_utf8_lossy(&answer.body).chars().take(300).collect::<String>();
        if answer.status != StatusCode::OK {
            return Err(Failure::Unclear(format!("{}: {}", answer.status, said())));
        }
        rows(self.dialect, &answer.body).ok_or_else(|| Failure::Unclear(said()))
    }
}

/// The rows of an answer; none if it is no answer to a question.
pub(super) fn rows(dialect: Dialect, body: &[u8]) -> Option<Vec<SqlRow>> {
    let name = |meta: &Value| Some(meta.get("name")?.as_str()?.to_lowercase());
    let row = |names: &[String], cells: &Value| -> Option<SqlRow> {
        let text = |cell: &Value| match cell {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        let pairs = names.iter().cloned().zip(cells.as_array()?);
        Some(pairs.filter_map(|(name, cell)| Some((name, text(cell)?))).collect())
    };
    match dialect {
        // One object a line: the names, then the rows.
        Dialect::StarRocks => {
            let (mut names, mut found) = (None, Vec::new());
            for line in body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                let line: Value = serde_json::from_slice(line).ok()?;
                if let Some(meta) = line.get("meta") {
                    names = meta.as_array()?.iter().map(name).collect::<Option<Vec<String>>>();
                } else if let Some(cells) = line.get("data") {
                    found.push(row(names.as_deref()?, cells)?);
                }
            }
            names.map(|_| found)
        }
        Dialect::Doris => {
            let answer: Value = serde_json::from_slice(body).ok()?;
            let data = answer.get("data")?;
            let names = data.get("meta")?.as_array()?.iter().map(name).collect::<Option<Vec<String>>>()?;
            data.get("data")?.as_array()?.iter().map(|cells| row(&names, cells)).collect()
        }
    }
}

/// A label that nothing is ever committed under.
fn trial_label() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("oncegate-try-{since:x}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_both_are_read() {
        let starrocks = b"{\"connectionId\":7}\n{\"meta\":[{\"name\":\"Key\",\"type\":\"varchar\"},{\"name\":\"Value\"}]}\n{\"data\":[\"a\",null]}\n\
                          {\"data\":[\"b\",5]}\n{\"statistics\":{}}\n";
        let found = rows(Dialect::StarRocks, starrocks).expect("rows");
        assert_eq!((found.len(), found[0].get("value"), &found[1]["value"]), (2, None, &"5".to_owned()));
        let doris = br#"{"msg":"success","code":0,"data":{"type":"result_set","meta":[{"name":"Key"}],"data":[["x"]],"time":1},"count":0}"#;
        assert_eq!(rows(Dialect::Doris, doris).expect("rows")[0]["key"], "x");
        assert!(rows(Dialect::Doris, b"{\"msg\":\"no\",\"code\":1,\"data\":\"denied\"}").is_none());
        assert!(
            rows(Dialect::StarRocks, b"{\"status\":\"FAILED\"}").is_none()
                && rows(Dialect::StarRocks, b"<html>").is_none()
        );
    }
}
