//! The stand-in's state: tables, transactions, the book of labels, and what is scripted.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fmt,
    net::SocketAddr,
    time::{Duration, Instant},
};

use adapters::stream_load::Dialect;
use http::{Method, StatusCode};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::json;

use super::{
    Asked, Done, PASSWORD, USER,
    table::{Parsed, Table, TableSpec},
};

/// What goes wrong with one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It is not taken; the connection ends.
    LostBefore,
    /// It is done; the connection ends.
    LostAfter,
    /// The connection ends, and it is done 300 ms later.
    Late,
    /// Committed, and visible only 300 ms later.
    PublishTimeout,
    /// Begun, the connection ends, and it is in after so many ms.
    StuckThenIn(u64),
    /// Begun, the connection ends, and it is aborted after so many ms.
    StuckThenAborted(u64),
    /// Aborted, and said so.
    Fail,
    /// In, and said to have failed: the back-end has lost the answer to its commit.
    FailThoughIn,
    /// Too many versions of a tablet.
    TooManyVersions,
    /// A gateway's 502, before or after it is done.
    Broken {
        /// It is done.
        done: bool,
    },
    /// No JSON, before or after it is done.
    Garbage {
        /// It is done.
        done: bool,
    },
    /// Said to be good, of fewer rows than were sent.
    Short,
    /// Said to be good, under a label of the server's own.
    OtherLabel,
    /// The front-end sends on to itself.
    Loop,
    /// The front-end sends on to something that is not HTTP.
    Elsewhere,
}

/// How a transaction stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TxnState {
    /// Begun.
    Prepare,
    /// Waits for its commit.
    Prepared,
    /// In, not visible.
    Committed,
    /// In.
    Visible,
    /// Nothing of it is in.
    Aborted,
}

/// One load.
#[derive(Debug)]
pub struct Txn {
    /// Its label.
    pub label: String,
    /// `database.table`.
    pub table: String,
    /// How it stands.
    pub state: TxnState,
    rows: Vec<Parsed>,
    /// `max_filter_ratio`.
    ratio: String,
    /// What becomes of it then.
    next: Option<(Instant, TxnState)>,
}

/// All of it.
pub struct Cluster {
    dialect: Dialect,
    front: SocketAddr,
    backs: [SocketAddr; 2],
    tables: BTreeMap<String, Table>,
    /// All that ever were; those of [`Self::forgotten`] labels too.
    pub txns: BTreeMap<i64, Txn>,
    /// The last transaction of each label that is remembered.
    labels: HashMap<String, i64>,
    finished: VecDeque<i64>,
    next: i64,
    /// The labels of so many loads are remembered.
    pub keep: usize,
    /// As `ADMIN SHOW FRONTEND CONFIG` tells; none if the user may not ask.
    pub settings: Option<Vec<(&'static str, String)>>,
    /// Step and fault, in turn: of `load` (a whole one, or Doris' first phase), `begin`, `append`, `prepare`, `commit`, `state`.
    pub faults: VecDeque<(&'static str, Fault)>,
    chaos: Option<(StdRng, u32)>,
    pages: Vec<String>,
    /// Loads with rows under labels of batches that a back-end was asked for.
    pub loads: usize,
    /// Loads that are never committed.
    pub trials: usize,
    /// Bodies of loads that the front-end was sent.
    pub misplaced: usize,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("dialect", &self.dialect).finish_non_exhaustive()
    }
}

fn good(body: serde_json::Value) -> Done {
    Done::Answer(StatusCode::OK, body.to_string())
}

impl Cluster {
    pub(super) fn new(dialect: Dialect, front: SocketAddr, backs: [SocketAddr; 2]) -> Self {
        let settings = match dialect {
            Dialect::StarRocks => vec![
                ("label_keep_max_second", "259200".to_owned()),
                ("label_keep_max_num", "1000".to_owned()),
            ],
            Dialect::Doris => vec![
                ("label_keep_max_second", "259200".to_owned()),
                ("streaming_label_keep_max_second", "43200".to_owned()),
                ("label_num_threshold", "2000".to_owned()),
            ],
        };
        Self {
            dialect,
            front,
            backs,
            tables: BTreeMap::new(),
            txns: BTreeMap::new(),
            labels: HashMap::new(),
            finished: VecDeque::new(),
            next: 1000,
            keep: match dialect {
                Dialect::StarRocks => 1000,
                Dialect::Doris => 2000,
            },
            settings: Some(settings),
            faults: VecDeque::new(),
            chaos: None,
            pages: Vec::new(),
            loads: 0,
            trials: 0,
            misplaced: 0,
        }
    }

    pub(super) fn create(&mut self, database: &str, name: &str, spec: TableSpec) {
        self.tables.insert(format!("{database}.{name}"), Table::new(spec));
    }

    pub(super) fn rows(&self, table: &str, columns: &[&str]) -> Vec<String> {
        let text =
            |cell: Option<&Option<String>>| cell.cloned().flatten().unwrap_or_else(|| "\\N".to_owned());
        let table = self.tables.get(table).expect("a table of the test");
        let line = |row: &super::table::Row| {
            columns.iter().map(|name| text(row.get(*name))).collect::<Vec<_>>().join("\t")
        };
        table.rows().map(line).collect()
    }

    /// How many rows a table has.
    pub fn count(&self, table: &str) -> usize {
        self.tables.get(table).expect("a table of the test").count()
    }

    /// One request in `every` fails at random from now on; 0: none.
    pub fn chaos(&mut self, seed: u64, every: u32) {
        self.chaos = (every > 0).then(|| (StdRng::seed_from_u64(seed), every));
    }

    /// Other loads: so many small ones of somebody else.
    pub fn others(&mut self, count: usize) {
        for number in 0..count {
            let txn = self.begin(&format!("other-{}-{number}", self.next), "other.t");
            self.end(txn, TxnState::Visible);
        }
    }

    /// Batches' labels that are in, and how often.
    pub fn in_by_label(&self) -> BTreeMap<&str, usize> {
        let mut found = BTreeMap::new();
        for txn in self.txns.values().filter(|txn| txn.label.starts_with("oncegate-")) {
            if matches!(txn.state, TxnState::Committed | TxnState::Visible) {
                *found.entry(txn.label.as_str()).or_insert(0) += 1;
            }
        }
        found
    }

    fn begin(&mut self, label: &str, table: &str) -> i64 {
        self.next += 1;
        let txn = Txn {
            label: label.to_owned(),
            table: table.to_owned(),
            state: TxnState::Prepare,
            ratio: String::new(),
            rows: Vec::new(),
            next: None,
        };
        self.txns.insert(self.next, txn);
        self.labels.insert(label.to_owned(), self.next);
        self.next
    }

    /// Takes a transaction to its end.
    fn end(&mut self, number: i64, state: TxnState) {
        let Some(txn) = self.txns.get_mut(&number) else { return };
        let was = txn.state;
        txn.state = state;
        if matches!(was, TxnState::Prepare | TxnState::Prepared)
            && matches!(state, TxnState::Committed | TxnState::Visible)
        {
            let rows = std::mem::take(&mut txn.rows);
            if let Some(table) = self.tables.get_mut(&txn.table) {
                rows.iter().for_each(|parsed| table.apply(parsed));
            }
        }
        if matches!(state, TxnState::Visible | TxnState::Aborted) {
            self.finished.push_back(number);
        }
        while self.finished.len() > self.keep {
            if let Some(old) = self.finished.pop_front()
                && let Some(label) = self.txns.get(&old).map(|txn| txn.label.clone())
                && self.labels.get(&label) == Some(&old)
            {
                self.labels.remove(&label);
            }
        }
    }

    /// What has come due.
    fn tick(&mut self) {
        let now = Instant::now();
        let due: Vec<(i64, TxnState)> = self
            .txns
            .iter()
            .rev()
            .take(200)
            .filter_map(|(number, txn)| {
                txn.next.filter(|(at, _)| *at <= now).map(|(_, state)| (*number, state))
            })
            .collect();
        for (number, state) in due {
            if let Some(txn) = self.txns.get_mut(&number) {
                txn.next = None;
            }
            self.end(number, state);
        }
    }

    fn later(&mut self, number: i64, ms: u64, state: TxnState) {
        if let Some(txn) = self.txns.get_mut(&number) {
            txn.next = Some((Instant::now() + Duration::from_millis(ms), state));
        }
    }

    /// Done without any fault.
    pub(super) fn take_plainly(&mut self, asked: &Asked) {
        self.tick();
        drop(self.done(asked, None));
    }

    pub(super) fn take(&mut self, asked: &Asked) -> Done {
        self.tick();
        let step = step_of(asked);
        let ours = asked.header("label").starts_with("oncegate-")
            && !asked.header("label").starts_with("oncegate-try");
        let named = ours || step == "commit" || step == "state";
        // Where a front-end sends on is scripted as a step of its own.
        let place = if asked.node == 0 && step != "state" { "front" } else { step };
        let fault = self.fault(place, named || place == "front");
        match fault {
            Some(Fault::Loop) => Done::Redirect(format!("http://{}{}", self.front, asked.path)),
            Some(Fault::Elsewhere) => Done::Redirect("ftp://127.0.0.1/".to_owned()),
            Some(Fault::LostBefore) => Done::Cut,
            Some(Fault::Broken { done: false }) => {
                Done::Answer(StatusCode::BAD_GATEWAY, "bad gateway".to_owned())
            }
            Some(Fault::Garbage { done: false }) => Done::Answer(StatusCode::OK, "<html>".to_owned()),
            Some(Fault::Late) => Done::Late(Duration::from_millis(300)),
            Some(fault) => {
                let done = self.done(asked, Some(fault));
                match fault {
                    Fault::LostAfter | Fault::StuckThenIn(_) | Fault::StuckThenAborted(_) => Done::Cut,
                    Fault::Broken { .. } => Done::Answer(StatusCode::BAD_GATEWAY, "bad gateway".to_owned()),
                    Fault::Garbage { .. } => Done::Answer(StatusCode::OK, "<html>".to_owned()),
                    _ => done,
                }
            }
            None => self.done(asked, None),
        }
    }

    fn fault(&mut self, step: &str, may: bool) -> Option<Fault> {
        if !may {
            return None;
        }
        if self.faults.front().is_some_and(|(wanted, _)| *wanted == step) {
            return self.faults.pop_front().map(|(_, fault)| fault);
        }
        let (random, every) = self.chaos.as_mut()?;
        if step == "front" || step == "state" || !random.random_ratio(1, *every) {
            return None;
        }
        let any = [
            Fault::LostBefore,
            Fault::LostAfter,
            Fault::Late,
            Fault::Broken { done: false },
            Fault::Broken { done: true },
            Fault::Garbage { done: true },
        ];
        let of_loads = [
            Fault::PublishTimeout,
            Fault::StuckThenIn(200),
            Fault::StuckThenAborted(200),
            Fault::Fail,
            Fault::FailThoughIn,
            Fault::TooManyVersions,
        ];
        let at = random.random_range(0..any.len() + if step == "load" { of_loads.len() } else { 0 });
        Some(any.get(at).or_else(|| of_loads.get(at - any.len())).copied().unwrap_or(Fault::LostAfter))
    }

    fn done(&mut self, asked: &Asked, fault: Option<Fault>) -> Done {
        let parts: Vec<&str> = asked.path.trim_matches('/').split('/').collect();
        match (&asked.method, &parts[..], asked.node) {
            (&Method::POST, ["api", "v1", "catalogs", "default_catalog", "databases", _, "sql"], 0)
                if self.dialect == Dialect::StarRocks =>
            {
                self.sql(asked, "query")
            }
            (&Method::POST, ["api", "query", "internal", _], 0) if self.dialect == Dialect::Doris => {
                self.sql(asked, "stmt")
            }
            (&Method::GET, ["api", _, "get_load_state"], 0) => self.label_state(asked),
            (&Method::PUT, ["api", _, _, "_stream_load"], 0) => {
                self.misplaced += usize::from(!asked.body.is_empty());
                if asked.header("expect") != "100-continue" {
                    return good(json!({"status": "FAILED", "msg": "There is no 100-continue header"}));
                }
                self.redirect(asked)
            }
            (&Method::PUT, ["api", _, "_stream_load_2pc"], 0) | (_, ["api", "transaction", _], 0) => {
                self.misplaced += usize::from(!asked.body.is_empty());
                self.redirect(asked)
            }
            (&Method::PUT, ["api", database, table, "_stream_load"], _) => {
                let table = format!("{database}.{table}");
                self.load(asked, &table, fault)
            }
            (&Method::PUT, ["api", _, "_stream_load_2pc"], _) => self.second_phase(asked),
            (_, ["api", "transaction", step], _) if self.dialect == Dialect::StarRocks => {
                self.step(asked, step)
            }
            (&Method::GET, ["api", "_load_error_log"], 1 | 2) => {
                let page = asked
                    .query
                    .trim_start_matches("file=")
                    .parse()
                    .ok()
                    .and_then(|at: usize| self.pages.get(at));
                Done::Answer(StatusCode::OK, page.cloned().unwrap_or_default())
            }
            _ => Done::Answer(
                StatusCode::NOT_FOUND,
                "{\"status\":\"FAILED\",\"msg\":\"no such path\"}".to_owned(),
            ),
        }
    }

    fn redirect(&self, asked: &Asked) -> Done {
        // StarRocks keeps a transaction at one node.
        let seed: usize = asked.header("label").bytes().map(usize::from).sum();
        let back = self.backs[seed % 2];
        let user = match self.dialect {
            Dialect::Doris => format!("{USER}:{}@", PASSWORD.replace('@', "%40").replace(':', "%3A")),
            Dialect::StarRocks => String::new(),
        };
        let query = if asked.query.is_empty() { String::new() } else { format!("?{}", asked.query) };
        Done::Redirect(format!("http://{user}{back}{}{query}", asked.path))
    }

    fn sql(&self, asked: &Asked, member: &str) -> Done {
        let request: serde_json::Value = serde_json::from_slice(&asked.body).unwrap_or_default();
        let sql = request.get(member).and_then(serde_json::Value::as_str).unwrap_or_default();
        let (names, rows): (Vec<&str>, Vec<Vec<String>>) = if let Some(rest) =
            sql.strip_prefix("SHOW CREATE TABLE ")
        {
            let name = rest.replace(['`', ';'], "");
            let Some(table) = self.tables.get(name.trim()) else {
                return Done::Answer(
                    StatusCode::OK,
                    "{\"msg\":\"Error\",\"code\":1,\"data\":\"Unknown table\",\"status\":\"FAILED\"}"
                        .to_owned(),
                );
            };
            let short = name.rsplit('.').next().unwrap_or_default().trim().to_owned();
            (vec!["Table", "Create Table"], vec![vec![short.clone(), table.spec.ddl(self.dialect, &short)]])
        } else if sql.contains("information_schema.tables") {
            (vec!["CREATE_TIME"], vec![vec!["2026-01-01 00:00:00".to_owned()]])
        } else if sql.contains("ADMIN SHOW FRONTEND CONFIG") {
            let Some(settings) = &self.settings else {
                return Done::Answer(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "{\"msg\":\"Access denied\"}".to_owned(),
                );
            };
            let rows = settings.iter().map(|(name, value)| vec![(*name).to_owned(), value.clone()]);
            (vec!["Key", "Value"], rows.collect())
        } else {
            return Done::Answer(StatusCode::INTERNAL_SERVER_ERROR, "{\"msg\":\"syntax error\"}".to_owned());
        };
        let meta: Vec<_> = names.iter().map(|name| json!({"name": name, "type": "varchar"})).collect();
        Done::Answer(
            StatusCode::OK,
            match self.dialect {
                Dialect::Doris => {
                    json!({"msg": "success", "code": 0, "data": {"type": "result_set", "meta": meta, "data": rows, "time": 1}, "count": 0})
                        .to_string()
                }
                Dialect::StarRocks => {
                    let mut lines = vec![json!({"connectionId": 7}).to_string(), json!({ "meta": meta }).to_string()];
                    lines.extend(rows.iter().map(|row| json!({ "data": row }).to_string()));
                    lines.push(json!({"statistics": {"scanRows": 0}}).to_string());
                    lines.join("\n")
                }
            },
        )
    }

    fn of_label(&self, label: &str) -> Option<(i64, TxnState)> {
        let number = *self.labels.get(label)?;
        self.txns.get(&number).map(|txn| (number, txn.state))
    }

    fn label_state(&self, asked: &Asked) -> Done {
        let label = asked.query.trim_start_matches("label=");
        let state = match self.of_label(label).map(|(_, state)| state) {
            None => "UNKNOWN",
            Some(TxnState::Prepare) => "PREPARE",
            Some(TxnState::Prepared) if self.dialect == Dialect::Doris => "PRECOMMITTED",
            Some(TxnState::Prepared) => "PREPARED",
            Some(TxnState::Committed) => "COMMITTED",
            Some(TxnState::Visible) => "VISIBLE",
            Some(TxnState::Aborted) => "ABORTED",
        };
        good(match self.dialect {
            Dialect::Doris => json!({"msg": "success", "code": 0, "data": state, "count": 0}),
            Dialect::StarRocks => json!({"state": state, "reason": "", "status": "OK", "msg": "Success"}),
        })
    }

    /// The answer to a label that is in use; none if it is free.
    fn used(&self, label: &str, spelled: &str) -> Option<Done> {
        let (number, state) = self.of_label(label).filter(|(_, state)| *state != TxnState::Aborted)?;
        let existing = match state {
            TxnState::Prepare => "RUNNING",
            TxnState::Prepared => "PRECOMMITTED",
            _ => "FINISHED",
        };
        Some(good(json!({"TxnId": -1, "Label": label, "Status": spelled, "ExistingJobStatus": existing,
            "Message": format!("errCode = 2, detailMessage = Label [{label}] has already been used, relate to txn [{number}]")})))
    }

    /// Rows that are refused beyond the ratio fail a load.
    fn too_many(ratio: &str, parsed: &[Parsed]) -> bool {
        let filtered: usize = parsed.iter().map(|parsed| parsed.filtered.len()).sum();
        let total: usize = filtered + parsed.iter().map(|parsed| parsed.rows.len()).sum::<usize>();
        let ratio: f64 = ratio.parse().unwrap_or(0.0);
        filtered as f64 > ratio * total as f64 || (filtered > 0 && filtered == total)
    }

    fn counts(&mut self, number: i64, label: &str, parsed: &[Parsed]) -> serde_json::Value {
        let filtered: Vec<&str> =
            parsed.iter().flat_map(|parsed| parsed.filtered.iter().map(String::as_str)).collect();
        let loaded: usize = parsed.iter().map(|parsed| parsed.rows.len()).sum();
        let mut reply = json!({"TxnId": number, "Label": label, "Status": "Success", "Message": "OK", "NumberTotalRows": loaded + filtered.len(),
            "NumberLoadedRows": loaded, "NumberFilteredRows": filtered.len(), "NumberUnselectedRows": 0, "LoadBytes": 1, "LoadTimeMs": 1});
        if !filtered.is_empty() {
            self.pages.push(filtered.join("\n"));
            reply["ErrorURL"] =
                format!("http://{}/api/_load_error_log?file={}", self.backs[0], self.pages.len() - 1).into();
        }
        reply
    }

    fn load(&mut self, asked: &Asked, name: &str, fault: Option<Fault>) -> Done {
        let label = match asked.header("label") {
            "" => format!("generated-{}", self.next),
            label => label.to_owned(),
        };
        if label.starts_with("oncegate-try") {
            self.trials += 1;
        } else if !asked.body.is_empty() {
            self.loads += 1;
        }
        if let Some(used) = self.used(&label, "Label Already Exists") {
            return used;
        }
        let Some(table) = self.tables.get(name) else {
            return good(json!({"TxnId": -1, "Label": label, "Status": "Fail", "Message": "unknown table"}));
        };
        let parsed = table.parse(self.dialect, &|name| asked.header(name).to_owned(), &asked.body);
        let number = self.begin(&label, name);
        let failed =
            |message: &str| json!({"TxnId": number, "Label": label, "Status": "Fail", "Message": message});
        let mut parsed = match parsed {
            Ok(parsed) => vec![parsed],
            Err(why) => {
                self.end(number, TxnState::Aborted);
                return good(failed(&why));
            }
        };
        let mut reply = self.counts(number, &label, &parsed);
        if Self::too_many(asked.header("max_filter_ratio"), &parsed) {
            self.end(number, TxnState::Aborted);
            reply["Status"] = "Fail".into();
            reply["Message"] = "[DATA_QUALITY_ERROR]too many filtered rows".into();
            return good(reply);
        }
        if fault == Some(Fault::Short)
            && let Some(parsed) = parsed.first_mut()
        {
            parsed.rows.pop();
            reply["NumberLoadedRows"] = parsed.rows.len().into();
            reply["NumberUnselectedRows"] = 1.into();
        }
        if let Some(txn) = self.txns.get_mut(&number) {
            txn.rows = parsed;
        }
        if asked.header("two_phase_commit") == "true" && self.dialect == Dialect::Doris {
            if let Some(Fault::Fail | Fault::TooManyVersions) = fault {
                self.end(number, TxnState::Aborted);
                return good(failed("tablet error: [E-235]too many tablet versions"));
            }
            self.end(number, TxnState::Prepared);
            return good(reply);
        }
        match fault {
            Some(Fault::StuckThenIn(ms)) => self.later(number, ms, TxnState::Visible),
            Some(Fault::StuckThenAborted(ms)) => self.later(number, ms, TxnState::Aborted),
            Some(Fault::Fail | Fault::TooManyVersions) => {
                self.end(number, TxnState::Aborted);
                let many = fault == Some(Fault::TooManyVersions);
                return good(failed(if many {
                    "tablet error: [E-235]too many tablet versions"
                } else {
                    "cancelled: a back-end is down"
                }));
            }
            Some(Fault::FailThoughIn) => {
                self.end(number, TxnState::Visible);
                return good(failed("commit transaction: RPC timed out"));
            }
            Some(Fault::PublishTimeout) => {
                self.end(number, TxnState::Committed);
                self.later(number, 300, TxnState::Visible);
                reply["Status"] = "Publish Timeout".into();
            }
            Some(Fault::OtherLabel) => {
                self.end(number, TxnState::Visible);
                reply["Label"] = "group_commit_1".into();
            }
            _ => self.end(number, TxnState::Visible),
        }
        good(reply)
    }

    /// Doris.
    fn second_phase(&mut self, asked: &Asked) -> Done {
        let number = match asked.header("txn_id").parse::<i64>() {
            Ok(number) => number,
            Err(_) => match self.labels.get(asked.header("label")) {
                Some(number) => *number,
                None => return good(json!({"status": "Fail", "msg": "No transaction id selected."})),
            },
        };
        let (state, to) = match (self.txns.get(&number).map(|txn| txn.state), asked.header("txn_operation")) {
            (Some(state), "commit") => (state, TxnState::Visible),
            (Some(state), "abort") => (state, TxnState::Aborted),
            _ => {
                return good(
                    json!({"status": "Fail", "msg": format!("errCode = 2, detailMessage = transaction [{number}] not found")}),
                );
            }
        };
        if state != TxnState::Prepared {
            let word = if state == TxnState::Visible { "visible" } else { "aborted" };
            return good(
                json!({"status": "Fail", "msg": format!("errCode = 2, detailMessage = transaction [{number}] is already {word}, not pre-committed.")}),
            );
        }
        self.end(number, to);
        good(
            json!({"status": "Success", "msg": format!("transaction [{number}] {} successfully.", asked.header("txn_operation"))}),
        )
    }

    /// StarRocks.
    fn step(&mut self, asked: &Asked, step: &str) -> Done {
        let label = asked.header("label").to_owned();
        let table = format!("{}.{}", asked.header("db"), asked.header("table"));
        let failed = |message: &str| good(json!({"Label": label, "Status": "FAILED", "Message": message}));
        if step == "begin" {
            if label.starts_with("oncegate-try") {
                self.trials += 1;
            }
            if let Some(used) = self.used(&label, "LABEL_ALREADY_EXISTS") {
                return used;
            }
            let number = self.begin(&label, &table);
            // Idle transactions end by themselves.
            let ms = asked.header("idle_transaction_timeout").parse::<u64>().unwrap_or(600) * 1000;
            self.later(number, ms, TxnState::Aborted);
            return good(
                json!({"Status": "OK", "Message": "", "Label": label, "TxnId": number, "BeginTxnTimeMs": 0}),
            );
        }
        let Some((number, state)) = self.of_label(&label) else { return failed("TXN_NOT_EXISTS") };
        match (step, state) {
            ("load", TxnState::Prepare) => {
                if !label.starts_with("oncegate-try") && !asked.body.is_empty() {
                    self.loads += 1;
                }
                let Some(rows) = self.tables.get(&table) else { return failed("unknown table") };
                if asked.body.is_empty() {
                    return good(json!({"TxnId": number, "Label": label, "Status": "OK"}));
                }
                match rows.parse(self.dialect, &|name| asked.header(name).to_owned(), &asked.body) {
                    // The load goes on by itself: what becomes of its rows is said by `prepare`.
                    Ok(parsed) => {
                        if let Some(txn) = self.txns.get_mut(&number) {
                            txn.rows.push(parsed);
                            txn.ratio = asked.header("max_filter_ratio").to_owned();
                        }
                        good(json!({"TxnId": number, "Label": label, "Status": "OK", "Message": ""}))
                    }
                    Err(why) => {
                        self.end(number, TxnState::Aborted);
                        failed(&why)
                    }
                }
            }
            ("prepare", TxnState::Prepare) => {
                if let Some(txn) = self.txns.get_mut(&number) {
                    txn.next = None;
                }
                let (rows, ratio) = self
                    .txns
                    .get(&number)
                    .map(|txn| (txn.rows.clone(), txn.ratio.clone()))
                    .unwrap_or_default();
                let mut reply = self.counts(number, &label, &rows);
                if Self::too_many(&ratio, &rows) {
                    // Counts are told of what goes well only.
                    self.end(number, TxnState::Aborted);
                    let left = rows.iter().any(|parsed| !parsed.rows.is_empty());
                    let why = if left || ratio != "1" {
                        "too many filtered rows"
                    } else {
                        "No partitions have data available for loading."
                    };
                    return good(
                        json!({"Label": label, "Status": "FAILED", "Message": why, "ErrorURL": reply["ErrorURL"]}),
                    );
                }
                self.end(number, TxnState::Prepared);
                reply["Status"] = "OK".into();
                good(reply)
            }
            ("commit", TxnState::Prepared) => {
                self.end(number, TxnState::Visible);
                good(json!({"TxnId": number, "Label": label, "Status": "OK", "Message": ""}))
            }
            ("commit", TxnState::Visible | TxnState::Committed) => good(
                json!({"TxnId": number, "Label": label, "Status": "OK", "Message": "Transaction already commited"}),
            ),
            ("rollback", TxnState::Prepare | TxnState::Prepared) => {
                if let Some(txn) = self.txns.get_mut(&number) {
                    txn.next = None;
                }
                self.end(number, TxnState::Aborted);
                good(json!({"TxnId": number, "Label": label, "Status": "OK", "Message": ""}))
            }
            _ => failed("Transcation State Invalid"),
        }
    }
}

/// As faults are scripted.
fn step_of(asked: &Asked) -> &'static str {
    match asked.path.rsplit('/').next().unwrap_or_default() {
        "_stream_load" => "load",
        "_stream_load_2pc" if asked.header("txn_operation") == "commit" => "commit",
        "begin" => "begin",
        "load" => "append",
        "prepare" => "prepare",
        "commit" => "commit",
        "get_load_state" => "state",
        _ => "other",
    }
}
