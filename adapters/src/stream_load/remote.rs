//! The table as the journal's target: one load a batch, its label, how long that is known, rows that are refused.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use async_trait::async_trait;
use bytes::Bytes;
use tracing::warn;

use super::{
    Dialect, Probed, StreamLoadConfig, encode,
    layout::{Layout, headers},
    load::{Load, Loader},
    reply::LabelState,
};
use crate::{
    collapse::{Copy, Plan},
    journal::{Cut, Identity, Part, Remote, Sent, Tried},
    sink::{Batch, Mode, RowOutcome, SinkError},
};

/// Bytes of a load: both bound JSON at 100 MB.
const MAX_BODY: usize = 95 << 20;

/// One lane's.
pub(super) struct Table {
    config: Arc<StreamLoadConfig>,
    loader: Loader,
    probed: Probed,
    layout: Option<Arc<Layout>>,
    /// The journal asks for a repeat: as it was first tried.
    tried: Option<Tried>,
    /// How the label of the part that is asked for stands.
    seen: Option<LabelState>,
    /// Rows of the last batch were refused: the next is tried out before it is journaled.
    suspects: bool,
}

impl Table {
    pub(super) fn new(config: Arc<StreamLoadConfig>, loader: Loader, probed: Probed) -> Self {
        Self { config, loader, probed, layout: None, tried: None, seen: None, suspects: false }
    }

    /// As the last probe saw it: rows were encoded for that.
    fn layout(&mut self) -> Result<Arc<Layout>, SinkError> {
        self.layout = self.probed.lock().clone();
        self.layout.clone().ok_or_else(|| SinkError::NotApplied {
            reason: "the table was not looked at yet: probe it first".to_owned(),
            retry: false,
        })
    }

    /// Whether a load under a label that is not known cannot have been forgotten; else why it may have been. Nothing is begun under it.
    async fn still_known(&mut self, headers: &[(String, String)], tried: &Tried) -> Result<(), String> {
        let keep = self.layout().map_err(|error| error.to_string())?.keep.loads;
        let now = self.loader.look(headers).await?;
        forgotten(tried.blocks.as_deref(), now, keep)
    }

    /// Those of `rows` that the servers refuse, with what they say: by loads that are never committed, of ever fewer rows.
    async fn refused(
        &mut self,
        layout: &Layout,
        rows: &[(usize, &[u8])],
    ) -> Result<HashMap<usize, String>, SinkError> {
        let lost = |why: String| SinkError::NotApplied {
            reason: format!("nothing was sent: which rows are refused is not known: {why}"),
            retry: true,
        };
        let mut refused = HashMap::new();
        let mut open = vec![rows];
        while let Some(rows) = open.pop() {
            let body = Bytes::from(body_of(layout.dialect, rows.iter().map(|(_, sent)| *sent)));
            let (count, reply) =
                self.loader.trial(&headers(&layout.statement), rows.len(), &body).await.map_err(lost)?;
            if count == Some(rows.len()) || (count.is_none() && rows.len() == 1) {
                let lines = self.loader.error_lines(&reply).await;
                let reason = lines.unwrap_or_else(|| format!("{} refuses it", layout.dialect.name()));
                refused.extend(rows.iter().map(|(row, _)| (*row, reason.clone())));
            } else if count != Some(0) {
                let (left, right) = rows.split_at(rows.len() / 2);
                open.extend([left, right]);
            }
        }
        Ok(refused)
    }
}

/// The bytes of a load of these rows.
fn body_of<'a>(dialect: Dialect, rows: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut body = Vec::new();
    match dialect {
        Dialect::StarRocks => {
            body.push(b'[');
            for (at, row) in rows.enumerate() {
                if at > 0 {
                    body.push(b',');
                }
                body.extend_from_slice(row);
            }
            body.push(b']');
        }
        Dialect::Doris => {
            for row in rows {
                body.extend_from_slice(row);
                body.push(b'\n');
            }
        }
    }
    body
}

/// Why a label that is not known may have been forgotten, by the numbers of transactions before the first attempt and now.
fn forgotten(before: Option<&str>, now: i64, keep: i64) -> Result<(), String> {
    let since = before.and_then(|before| before.parse::<i64>().ok()).map(|before| now.saturating_sub(before));
    let since = match since {
        Some(since) if (0..=keep / 2).contains(&since) => return Ok(()),
        Some(since) if since >= 0 => since.to_string(),
        _ => "an unknown number of".to_owned(),
    };
    Err(format!(
        "{since} transactions have begun since it was first tried, the labels of {keep} loads are kept (label_keep_max_num, label_num_threshold), \
         and its own is not known, so that it is not sent again: it could come in twice; look into the target, then set verdict in the journal \
         (docs/starrocks-doris.md)"
    ))
}

fn not_ours() -> SinkError {
    SinkError::NotApplied {
        reason: "the table has changed since the rows were encoded; restart to read it again".to_owned(),
        retry: false,
    }
}

/// The label of a part.
fn label(part: &Part) -> String {
    format!("oncegate-{}", part.token)
}

#[async_trait]
impl Remote for Table {
    fn page(&self) -> &'static str {
        "docs/starrocks-doris.md"
    }

    async fn target(&mut self) -> Result<Identity, String> {
        let (database, table) = self.config.names();
        let sql = format!(
            "SELECT CREATE_TIME FROM information_schema.tables WHERE TABLE_SCHEMA = '{database}' AND TABLE_NAME = '{table}'"
        );
        let rows = self.loader.sql(&sql).await.map_err(super::client::Failure::text)?;
        let row = rows.first().ok_or_else(|| format!("table {database}.{table} is not there any more"))?;
        let name = format!("{database}.{table}");
        let created = row.get("create_time").ok_or_else(|| {
            format!("information_schema does not tell when table {name} was made, so that it is not told from another of its name")
        })?;
        Ok(Identity { id: format!("created {created}"), name })
    }

    async fn cut(&mut self, batch: &Batch<'_>) -> Result<Cut, SinkError> {
        let layout = self.layout()?;
        // What was asked of an earlier batch.
        (self.tried, self.seen) = (None, None);
        let rows: Vec<encode::Taken<'_>> = batch
            .rows
            .iter()
            .map(|row| encode::take(&layout, row.bytes).ok_or_else(not_ours))
            .collect::<Result<_, _>>()?;
        // Without a row key no row is a copy of another.
        let copies: Vec<Copy<'_, i128>> = batch
            .rows
            .iter()
            .zip(&rows)
            .map(|(row, taken)| Copy {
                kind: row.kind,
                row_key: row.row_key,
                version: taken.version,
                shape: 0,
            })
            .collect();
        let mut refused: HashMap<usize, String> = HashMap::new();
        let mut good: HashSet<usize> = HashSet::new();
        let plan = loop {
            // A row that is refused stands in no other's way.
            let fit: Vec<usize> = (0..rows.len()).filter(|row| !refused.contains_key(row)).collect();
            let plan = Plan::among(self.config.mode, &copies, &fit);
            if !self.suspects {
                break plan;
            }
            let unknown: Vec<(usize, &[u8])> = plan
                .ops()
                .iter()
                .filter(|op| !good.contains(&op.row))
                .map(|op| (op.row, rows[op.row].sent))
                .collect();
            if unknown.is_empty() {
                break plan;
            }
            let found = self.refused(&layout, &unknown).await?;
            good.extend(unknown.iter().map(|(row, _)| *row).filter(|row| !found.contains_key(row)));
            refused.extend(found);
        };
        if self.suspects {
            warn!("{} of {} rows are refused by {}", refused.len(), rows.len(), layout.dialect.name());
        }
        self.suspects = false;
        let mut outcomes = vec![None; rows.len()];
        let mut sent: Vec<usize> = Vec::with_capacity(rows.len());
        for op in plan.ops() {
            plan.assign(op, &copies, &RowOutcome::Written, &mut outcomes);
            sent.push(op.row);
        }
        for (row, reason) in refused {
            outcomes[row] = Some(RowOutcome::Refused { reason });
        }
        if self.config.mode == Mode::Insert {
            sent.sort_unstable();
        }
        let bytes: usize = sent.iter().map(|&row| rows[row].sent.len() + 1).sum();
        if bytes > MAX_BODY {
            return Err(SinkError::NotApplied {
                reason: format!(
                    "the batch is {bytes} bytes of JSON, and a load takes {MAX_BODY}: lower the route's batch.max_bytes"
                ),
                retry: false,
            });
        }
        let outcomes = outcomes.into_iter().map(|outcome| outcome.unwrap_or(RowOutcome::Stale)).collect();
        Ok(Cut { outcomes, parts: if sent.is_empty() { Vec::new() } else { vec![sent] } })
    }

    fn statement(&self) -> String {
        self.layout.as_ref().map(|layout| layout.statement.clone()).unwrap_or_default()
    }

    fn body(&mut self, batch: &Batch<'_>, rows: &[usize], _token: &str) -> Result<Vec<u8>, String> {
        let Some(layout) = &self.layout else { return Ok(Vec::new()) };
        let rows = rows.iter().filter_map(|&row| encode::take(layout, batch.rows[row].bytes));
        Ok(body_of(layout.dialect, rows.map(|taken| taken.sent)))
    }

    async fn blocks(&mut self) -> Result<Option<String>, String> {
        let newest = match self.loader.newest {
            Some(newest) => newest,
            None => {
                let layout = self.layout().map_err(|error| error.to_string())?;
                self.loader.look(&headers(&layout.statement)).await?
            }
        };
        Ok(Some(newest.to_string()))
    }

    async fn send(&mut self, statement: &str, part: &Part) -> Sent {
        let (headers, label) = (headers(statement), label(part));
        let load = Load { headers: &headers, label: &label, rows: part.rows, body: &part.body };
        let sent = match (self.tried.take(), self.seen.take()) {
            (Some(_), Some(LabelState::Prepared)) => self.loader.resume(load).await,
            // The label is known, so that no load under it was forgotten: none is begun under it once it may have been. In one request:
            // what an earlier attempt may have on the way into a transaction finds none.
            (Some(_), Some(LabelState::Aborted)) => self.loader.one(load).await,
            (Some(tried), _) => match self.still_known(&headers, &tried).await {
                Ok(()) if self.config.two_phase => self.loader.two(load).await,
                Ok(()) => self.loader.one(load).await,
                Err(reason) => Sent::Unknown { reason },
            },
            (None, _) if self.config.two_phase => self.loader.two(load).await,
            (None, _) => self.loader.one(load).await,
        };
        self.suspects |= matches!(sent, Sent::Refused { .. });
        sent
    }

    async fn knows_repeats(&mut self, tried: Tried) -> Result<Result<(), String>, String> {
        let keep = self.layout().map_err(|error| error.to_string())?.keep;
        let age_ms = tried.age_ms;
        self.tried = Some(tried);
        if (-60_000..=keep.ms / 2).contains(&age_ms) {
            return Ok(Ok(()));
        }
        Ok(Err(format!(
            "it was first tried {} s ago, and labels are kept for {} s (label_keep_max_second, streaming_label_keep_max_second)",
            age_ms / 1000,
            keep.ms / 1000
        )))
    }

    async fn holds(&mut self, part: &Part) -> Result<Option<bool>, String> {
        let label = label(part);
        let state = self.loader.state(&label).await?;
        self.seen = Some(state);
        match state {
            LabelState::In => Ok(Some(true)),
            LabelState::Running => Err(format!(
                "load {label} is still under way at the servers, or waits there for its time-out"
            )),
            LabelState::Prepared | LabelState::Aborted => Ok(Some(false)),
            LabelState::Absent => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p15_a_label_that_is_not_known_is_taken_for_new_up_to_half_of_what_is_kept() {
        assert_eq!(forgotten(Some("100"), 600, 1000), Ok(()));
        assert_eq!(forgotten(Some("100"), 100, 0), Ok(()));
        assert!(forgotten(Some("100"), 601, 1000).is_err_and(|why| why.contains("501 transactions")));
        // Behind a fail-over or a restore numbers may go back; and one may not be told.
        for (before, now) in [(Some("100"), 99), (None, 5), (Some("x"), 5)] {
            assert!(
                forgotten(before, now, 1000).is_err_and(|why| why.contains("unknown number")),
                "{before:?}"
            );
        }
        assert_eq!(forgotten(Some("1"), 9_000_000, i64::MAX), Ok(()));
    }

    /// Of ours the time counts, as of ClickHouse.
    #[tokio::test]
    async fn p15_past_half_of_the_time_that_labels_are_kept_no_repeat_is_surely_known() {
        use super::super::{StreamLoadSink, layout::Keep};
        let config = StreamLoadConfig::new(Dialect::Doris, "http://fe:8030", "d.t", "/nowhere");
        let sink = StreamLoadSink::new(config.clone()).expect("a good URL");
        let layout = Layout {
            dialect: Dialect::Doris,
            columns: Vec::new(),
            kinds: Vec::new(),
            defaults: Vec::new(),
            key: Vec::new(),
            version: None,
            deletes: None,
            statement: String::new(),
            tag: 0,
            keep: Keep { ms: 43_200_000, loads: 2000 },
        };
        *sink.probed.lock() = Some(Arc::new(layout));
        let mut table = Table::new(Arc::new(config), sink.loader(), sink.probed.clone());
        for (age_ms, known) in
            [(0, true), (21_600_000, true), (21_600_001, false), (-30_000, true), (-60_001, false)]
        {
            let answer = table.knows_repeats(Tried { age_ms, blocks: None }).await.expect("no one is asked");
            assert_eq!(answer.is_ok(), known, "{age_ms}");
            assert!(known || answer.is_err_and(|why| why.contains("labels are kept for 43200 s")));
        }
    }

    #[test]
    fn a_body_is_an_array_or_lines() {
        let rows = || [&b"{\"a\":1}"[..], b"{}"].into_iter();
        assert_eq!(body_of(Dialect::StarRocks, rows()), b"[{\"a\":1},{}]");
        assert_eq!(body_of(Dialect::Doris, rows()), b"{\"a\":1}\n{}\n");
    }
}
