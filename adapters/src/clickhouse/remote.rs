//! The table as the journal's target: parts of one partition, tokens, the window.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use async_trait::async_trait;

use super::{
    ClickhouseConfig, Probed,
    client::{Client, Failure, Meaning, meaning, parameters},
    encode,
    layout::{Layout, Partition, literal, quoted},
    packing::{Compression, Packer},
    values,
};
use crate::{
    collapse::{Copy, Plan},
    journal::{Cut, Identity, Part, Remote, Sent, Tried},
    sink::{Batch, Mode, RowOutcome, SinkError},
};

/// The number of blocks is asked for again after so long.
const BLOCKS_FOR: Duration = Duration::from_secs(5);
/// Values of partition columns that are remembered with their partitions, at most.
const KNOWN: usize = 200_000;
/// Bytes of such values in one question.
const QUESTION: usize = 1 << 20;

/// One connection, used by one lane.
pub(super) struct Table {
    config: Arc<ClickhouseConfig>,
    client: Client,
    probed: Probed,
    layout: Option<Arc<Layout>>,
    packer: Packer,
    blocks: Option<(String, Instant)>,
    /// Partitions by the bytes that decide them; none if the partition key's expression throws for them.
    partitions: HashMap<Vec<u8>, Option<Arc<str>>>,
}

impl Table {
    pub(super) fn new(config: Arc<ClickhouseConfig>, client: Client, probed: Probed) -> Self {
        Self {
            config,
            client,
            probed,
            layout: None,
            packer: Packer::default(),
            blocks: None,
            partitions: HashMap::new(),
        }
    }

    /// As the last probe saw it: rows were encoded for that.
    fn layout(&mut self) -> Result<Arc<Layout>, SinkError> {
        let found = self.probed.lock().clone();
        if found.is_none() {
            let reason = "the table was not looked at yet: probe it first".to_owned();
            return Err(SinkError::NotApplied { reason, retry: false });
        }
        if self.layout != found {
            self.partitions.clear();
            self.layout = found;
        }
        self.layout.clone().ok_or(SinkError::NotApplied { reason: String::new(), retry: false })
    }

    /// Learns the partitions of all these values: the engine says.
    async fn learn(&mut self, partition: &Partition, values: &[&[u8]]) -> Result<(), SinkError> {
        if self.partitions.len() > KNOWN {
            self.partitions.clear();
        }
        let mut unknown: Vec<&[u8]> =
            values.iter().copied().filter(|value| !self.partitions.contains_key(*value)).collect();
        unknown.sort_unstable();
        unknown.dedup();
        let mut asked = in_questions(&unknown);
        while let Some(values) = asked.pop() {
            match self.ask_partitions(partition, values).await {
                Ok(names) => {
                    for (value, name) in values.iter().zip(names) {
                        self.partitions.insert(value.to_vec(), Some(name));
                    }
                }
                Err(Failure::Server { code, .. }) if thrown_by_a_value(code) => match *values {
                    [value] => drop(self.partitions.insert(value.to_vec(), None)),
                    // One of them, or some: each half is asked by itself.
                    _ => asked.extend(<[_; 2]>::from(values.split_at(values.len() / 2))),
                },
                Err(failure) => {
                    return Err(SinkError::NotApplied {
                        reason: format!(
                            "nothing was sent: the partitions of the rows are not known: {}",
                            failure.plain()
                        ),
                        retry: true,
                    });
                }
            }
        }
        Ok(())
    }

    async fn ask_partitions(
        &mut self,
        partition: &Partition,
        values: &[&[u8]],
    ) -> Result<Vec<Arc<str>>, Failure> {
        let escaped: String =
            values.iter().flat_map(|value| value.iter()).map(|byte| format!("\\x{byte:02X}")).collect();
        let sql = format!(
            "SELECT toString(partitionId({})) FROM format(RowBinary, {}, '{escaped}') FORMAT TSV",
            partition.expression,
            literal(&partition.structure)
        );
        // One thread and one block keep the order.
        let settings = parameters([
            ("max_query_size", "100000000"),
            ("max_threads", "1"),
            ("max_block_size", "10000000"),
            ("input_format_parallel_parsing", "0"),
        ]);
        let answer = self.client.query(&sql, &settings).await?;
        let names: Vec<Arc<str>> =
            std::str::from_utf8(&answer.body).unwrap_or_default().lines().map(Arc::from).collect();
        if names.len() != values.len() {
            let what =
                format!("asked for {} partitions, ClickHouse answers with {}", values.len(), names.len());
            return Err(Failure::Unclear(what));
        }
        Ok(names)
    }

    /// Now, not at the start: an error may be that of a view which was made since, with the rows in the table.
    async fn has_views(&mut self) -> Result<bool, Failure> {
        if self.layout.as_ref().is_none_or(|layout| layout.views) {
            return Ok(true);
        }
        let (database, table) = self.config.names();
        let sql = format!(
            "SELECT toInt64(sum(length(dependencies_table))) FROM system.tables WHERE database = {} AND name = {} FORMAT TSV",
            literal(database),
            literal(table)
        );
        Ok(self.number(&sql).await? > 0)
    }

    /// Which of these row keys the table has.
    async fn there<'a>(
        &mut self,
        layout: &Layout,
        keys: Vec<&'a [u8]>,
    ) -> Result<HashSet<&'a [u8]>, SinkError> {
        let names: Vec<String> = layout.key.iter().map(|&at| quoted(&layout.columns[at].name)).collect();
        let names = names.join(", ");
        let structure: Vec<String> = layout
            .key
            .iter()
            .map(|&at| format!("{} {}", quoted(&layout.columns[at].name), layout.columns[at].type_name))
            .collect();
        let structure = literal(&format!("oncegate_at UInt32, {}", structure.join(", ")));
        let table = format!("{}.{}", quoted(&layout.database), quoted(&layout.table));
        let sizes = parameters([("max_query_size", "100000000"), ("max_block_size", "10000000")]);
        let settings = format!("{sizes}&{}", parameters(WHOLE));
        let mut there = HashSet::new();
        for keys in in_questions(&keys) {
            let rows = (0_u32..).zip(keys).flat_map(|(at, key)| [&at.to_le_bytes(), *key].concat());
            let rows: String = rows.map(|byte| format!("\\x{byte:02X}")).collect();
            let asked = format!("format(RowBinary, {structure}, '{rows}')");
            let sql = format!(
                "SELECT oncegate_at FROM {asked} WHERE ({names}) IN (SELECT {names} FROM {table} WHERE ({names}) IN (SELECT {names} FROM {asked})) FORMAT TSV"
            );
            let answer =
                self.client.query(&sql, &settings).await.map_err(|failure| not_asked(&failure.plain()))?;
            for line in String::from_utf8_lossy(&answer.body).lines() {
                let key = line.parse().ok().and_then(|at: usize| keys.get(at));
                there.insert(*key.ok_or_else(|| not_asked("ClickHouse answers with something else"))?);
            }
        }
        Ok(there)
    }

    /// Whether a row that comes again is replaced by itself, whatever the engine remembers.
    async fn replaces(&mut self) -> Result<bool, String> {
        if self.config.mode != Mode::UpsertIfNewer {
            return Ok(false);
        }
        let views = self.has_views().await;
        views.map(|views| !views).map_err(|failure| failure.plain())
    }

    async fn send_under(&mut self, statement: &str, part: &Part, token: &str) -> Sent {
        // The query's name as well: while an earlier attempt is still at it, ClickHouse refuses another.
        let token = parameters([("insert_deduplication_token", token), ("query_id", &*part.token)]);
        let (packed, statement) = Compression::of(statement);
        match self.client.post(&format!("{statement}&{token}"), packed, part.body.clone()).await {
            // Whoever stands between may answer with a 200 too: only ClickHouse names the query.
            Ok(answer) if answer.query_id.as_deref() != Some(&*part.token) => Sent::Unknown {
                reason: "the answer to an insert is not ClickHouse's: it does not name the query".to_owned(),
            },
            Ok(answer) if answer.body.is_empty() => Sent::In,
            Ok(_) => Sent::Unknown { reason: "the answer to an insert holds something".to_owned() },
            Err(Failure::Unsent(reason)) => Sent::Out { reason, retry: true },
            Err(failure @ Failure::Unclear(_)) => Sent::Unknown { reason: failure.plain() },
            Err(failure @ Failure::Server { code, .. }) => {
                let retry = match meaning(code) {
                    Meaning::NotYet => true,
                    Meaning::Refused => false,
                    Meaning::Unknown => return Sent::Unknown { reason: failure.plain() },
                };
                match self.has_views().await {
                    Ok(false) => Sent::Out { reason: failure.plain(), retry },
                    Ok(true) => {
                        let reason = failure.plain();
                        Sent::Unknown {
                            reason: format!("{reason}; it may be a view's, with the rows in the table"),
                        }
                    }
                    Err(why) => Sent::Unknown { reason: format!("{}; and {}", failure.plain(), why.plain()) },
                }
            }
        }
    }

    async fn number(&mut self, sql: &str) -> Result<i64, Failure> {
        let answer = self.client.query(sql, &parameters(WHOLE)).await?;
        let text = String::from_utf8_lossy(&answer.body);
        text.trim().parse().map_err(|_| Failure::Unclear("ClickHouse answers with no number".to_owned()))
    }
}

/// A part of an answer would say that rows are not there which are: a user's profile may allow such answers.
const WHOLE: [(&str, &str); 4] = [
    ("read_overflow_mode", "throw"),
    ("timeout_overflow_mode", "throw"),
    ("set_overflow_mode", "throw"),
    ("result_overflow_mode", "throw"),
];

/// In questions of some length.
fn in_questions<'a, 'b>(values: &'b [&'a [u8]]) -> Vec<&'b [&'a [u8]]> {
    let mut asked = Vec::new();
    let mut rest = values;
    while !rest.is_empty() {
        let mut bytes = 0;
        let count = rest.iter().take_while(|value| {
            bytes += value.len();
            bytes <= QUESTION
        });
        let (some, later) = rest.split_at(count.count().max(1));
        asked.push(some);
        rest = later;
    }
    asked
}

fn not_asked(why: &str) -> SinkError {
    SinkError::NotApplied {
        reason: format!("nothing was sent: the table was not asked which rows it has: {why}"),
        retry: true,
    }
}

/// Whether an expression has thrown for what a row holds: CANNOT_PARSE_.., ARGUMENT_OUT_OF_BOUND, DECIMAL_OVERFLOW, ILLEGAL_DIVISION, ..
fn thrown_by_a_value(code: u32) -> bool {
    matches!(
        code,
        6 | 25
            | 26
            | 27
            | 36
            | 38
            | 41
            | 69
            | 70
            | 72
            | 117
            | 128
            | 131
            | 153
            | 321
            | 349
            | 395
            | 407
            | 676
            | 675
    )
}

/// How many blocks have come in between, at most; none if partitions were dropped, as what came into them cannot be told. `each`: each
/// partition counts its blocks by itself; else one counter is for all.
pub(super) fn since(before: &str, now: &str, each: bool) -> Option<i64> {
    fn read(text: &str) -> Option<HashMap<&str, i64>> {
        text.lines()
            .map(|line| line.split_once('\t').and_then(|(name, max)| Some((name, max.parse().ok()?))))
            .collect()
    }
    let (before, now) = (read(before)?, read(now)?);
    if before.iter().any(|(name, max)| now.get(name).is_none_or(|now| now < max)) {
        return None;
    }
    // Counting begins with 0 or 1.
    let top = |blocks: &HashMap<&str, i64>| blocks.values().copied().max().unwrap_or(-1);
    Some(match each {
        true => now.iter().map(|(name, max)| max - before.get(name).copied().unwrap_or(-1)).sum(),
        false => top(&now) - top(&before),
    })
}

/// What tells a table from another: its UUID. The copies of a Replicated table are one, whose path in Keeper names it; in databases
/// without UUIDs there is nothing but the name.
fn identity(name: &str, uuid: &str, engine_full: &str) -> String {
    let path = engine_full
        .strip_prefix("Replicated")
        .and_then(|engine| engine.split_once("MergeTree('"))
        .and_then(|(_, rest)| rest.split_once('\''))
        .map(|(path, _)| path.replace("{uuid}", uuid));
    match path {
        Some(path) => format!("replicated at {path}"),
        None if uuid.bytes().all(|byte| matches!(byte, b'0' | b'-')) => format!("name {name}"),
        None => format!("uuid {uuid}"),
    }
}

fn not_ours() -> SinkError {
    SinkError::NotApplied {
        reason: "the table has changed since the rows were encoded; restart to read it again".to_owned(),
        retry: false,
    }
}

#[async_trait]
impl Remote for Table {
    async fn target(&mut self) -> Result<Identity, String> {
        let (database, table) = self.config.names();
        let sql = format!(
            "SELECT toString(uuid), engine_full FROM system.tables WHERE database = {} AND name = {} FORMAT TSVRaw",
            literal(database),
            literal(table)
        );
        let answer = self.client.query(&sql, "").await.map_err(|failure| failure.plain())?;
        let answer = String::from_utf8_lossy(&answer.body);
        let (uuid, engine) = answer
            .split_once('\t')
            .ok_or_else(|| format!("table {database}.{table} is not there any more"))?;
        let name = format!("{database}.{table}");
        Ok(Identity { id: identity(&name, uuid, engine), name })
    }

    async fn cut(&mut self, batch: &Batch<'_>) -> Result<Cut, SinkError> {
        let layout = self.layout()?;
        let rows: Vec<encode::Taken<'_>> = batch
            .rows
            .iter()
            .map(|row| encode::take(&layout, row.bytes).ok_or_else(not_ours))
            .collect::<Result<_, _>>()?;
        // Without a row key no row is a copy of another. Among equal versions the last stays, as it does among batches.
        let copies: Vec<Copy<'_, (i128, usize)>> = batch
            .rows
            .iter()
            .zip(&rows)
            .enumerate()
            .map(|(at, (row, taken))| Copy {
                kind: row.kind,
                row_key: row.row_key,
                version: taken.version.map(|version| (version, at)),
                shape: 0,
            })
            .collect();
        let mut outcomes = vec![None; rows.len()];
        let partitions = match &layout.partition {
            None => vec![None; rows.len()],
            Some(partition) => {
                let values: Vec<&[u8]> = rows.iter().map(|taken| taken.partition).collect();
                self.learn(partition, &values).await?;
                let known =
                    values.iter().map(|value| self.partitions.get(*value).cloned().ok_or_else(not_ours));
                known.collect::<Result<_, _>>()?
            }
        };
        // A row that is refused stands in no other's way.
        let mut fit: Vec<usize> = Vec::with_capacity(rows.len());
        for (row, partition) in partitions.iter().enumerate() {
            if layout.partition.is_some() && partition.is_none() {
                let reason = "the table's partition key cannot be computed from it".to_owned();
                outcomes[row] = Some(RowOutcome::Refused { reason });
            } else {
                fit.push(row);
            }
        }
        // What may be there already: late records, and those whose key does not tell the row key.
        if self.config.mode == Mode::Insert && !layout.key.is_empty() && !batch.known_new {
            let keys: HashSet<&[u8]> = fit.iter().map(|&row| batch.rows[row].row_key).collect();
            let there = self.there(&layout, keys.into_iter().collect()).await?;
            fit.retain(|&row| {
                let is_there = there.contains(batch.rows[row].row_key);
                if is_there {
                    outcomes[row] = Some(RowOutcome::Stale);
                }
                !is_there
            });
        }
        let plan = Plan::among(self.config.mode, &copies, &fit);
        let mut sent: Vec<usize> = Vec::with_capacity(fit.len());
        for op in plan.ops() {
            plan.assign(op, &copies, &RowOutcome::Written, &mut outcomes);
            sent.push(op.row);
        }
        if self.config.mode == Mode::Insert {
            sent.sort_unstable();
        }
        let mut parts: Vec<Vec<usize>> = Vec::new();
        let mut places: HashMap<Option<&str>, usize> = HashMap::new();
        for row in sent {
            let place = *places.entry(partitions[row].as_deref()).or_insert_with(|| {
                parts.push(Vec::new());
                parts.len() - 1
            });
            parts[place].push(row);
        }
        let outcomes = outcomes.into_iter().map(|outcome| outcome.unwrap_or(RowOutcome::Stale)).collect();
        Ok(Cut { outcomes, parts })
    }

    fn statement(&self) -> String {
        self.layout
            .as_ref()
            .map_or_else(String::new, |layout| self.config.compression.statement(&layout.statement))
    }

    fn body(&mut self, batch: &Batch<'_>, rows: &[usize], token: &str) -> Result<Vec<u8>, String> {
        let Some(layout) = &self.layout else { return Ok(Vec::new()) };
        let mut tail = Vec::new();
        if layout.batch.is_some() {
            tail.push(0);
            values::put_length(token.len(), &mut tail);
            tail.extend_from_slice(token.as_bytes());
        }
        let size: usize = rows.iter().map(|&row| batch.rows[row].bytes.len() + tail.len()).sum();
        let mut body = Vec::with_capacity(size);
        for &row in rows {
            if let Some(taken) = encode::take(layout, batch.rows[row].bytes) {
                body.extend_from_slice(taken.sent);
                body.extend_from_slice(&tail);
            }
        }
        self.packer
            .pack(self.config.compression, body)
            .map_err(|fault| format!("a body cannot be compressed: {fault}"))
    }

    async fn blocks(&mut self) -> Result<Option<String>, String> {
        if let Some((blocks, asked)) = &self.blocks
            && asked.elapsed() < BLOCKS_FOR
        {
            return Ok(Some(blocks.clone()));
        }
        let (database, table) = self.config.names();
        let sql = format!(
            "SELECT partition_id, toInt64(max(max_block_number)) FROM system.parts
             WHERE database = {} AND table = {} GROUP BY partition_id ORDER BY partition_id FORMAT TSV",
            literal(database),
            literal(table)
        );
        let answer = self.client.query(&sql, "").await.map_err(|failure| failure.plain())?;
        let blocks = String::from_utf8_lossy(&answer.body).into_owned();
        self.blocks = Some((blocks.clone(), Instant::now()));
        Ok(Some(blocks))
    }

    async fn send(&mut self, statement: &str, part: &Part) -> Sent {
        self.send_under(statement, part, part.under.as_ref().unwrap_or(&part.token)).await
    }

    async fn send_again(&mut self, statement: &str, part: &Part) -> Sent {
        match self.replaces().await {
            Ok(true) => {}
            Ok(false) => return self.send(statement, part).await,
            Err(reason) => return Sent::Unknown { reason },
        }
        // The table may know the token of rows that a crash has taken from it, and would drop them.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let fresh = format!("{} again {}", part.token, now.as_nanos());
        self.send_under(statement, part, &fresh).await
    }

    async fn knows_repeats(&mut self, tried: Tried) -> Result<Result<(), String>, String> {
        let layout = self.layout().map_err(|error| error.to_string())?;
        if self.replaces().await? {
            return Ok(Ok(()));
        }
        if let Some(ms) = layout.window.ms
            && !(-60_000..=ms / 2).contains(&tried.age_ms)
        {
            return Ok(Err(format!(
                "it was first tried {} s ago, and the table remembers inserts for {} s (replicated_deduplication_window_seconds)",
                tried.age_ms / 1000,
                ms / 1000
            )));
        }
        self.blocks = None;
        let now = self.blocks().await?;
        let since = tried.blocks.zip(now).and_then(|(before, now)| since(&before, &now, layout.replicated));
        let since = since.unwrap_or(i64::MAX);
        if since > layout.window.blocks / 2 {
            let name = if layout.replicated { "replicated" } else { "non_replicated" };
            let since = if since == i64::MAX { "an unknown number of".to_owned() } else { since.to_string() };
            return Ok(Err(format!(
                "{since} blocks have come since it was first tried, and the table remembers {} ({name}_deduplication_window)",
                layout.window.blocks
            )));
        }
        Ok(Ok(()))
    }

    async fn holds(&mut self, part: &Part) -> Result<Option<bool>, String> {
        let layout = self.layout().map_err(|error| error.to_string())?;
        let Some(column) = &layout.batch else { return Ok(None) };
        let sql = format!(
            "SELECT toInt64(count()) FROM {}.{} WHERE {} = {} FORMAT TSV",
            quoted(&layout.database),
            quoted(&layout.table),
            quoted(column),
            literal(&part.token)
        );
        let count = self.number(&sql).await.map_err(|failure| failure.plain())?;
        Ok(match count {
            // This copy of the table may be behind the one that has it; and rows may have been replaced or dropped since.
            0 if !layout.plain => None,
            count => Some(count > 0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p15_blocks_of_dropped_partitions_hide_none_that_came() {
        assert_eq!(since("a\t5\nb\t9\n", "a\t5\nb\t12\nc\t11\n", false), Some(3));
        assert_eq!(since("a\t5\nb\t9\n", "a\t7\nb\t9\nc\t1\n", true), Some(4));
        // 1000 went with `a`, 900 came into `b`.
        assert_eq!(since("a\t1000\nb\t9\n", "b\t1909\n", false), None);
        assert_eq!(since("a\t1000\n", "a\t999\n", true), None);
        assert_eq!((since("", "a\t0\n", true), since("", "", false)), (Some(1), Some(0)));
        assert_eq!(since("7", "8", false), None);
    }

    #[test]
    fn a_table_is_told_from_another_by_what_stays_with_it() {
        assert_eq!(identity("d.t", "5-6", "MergeTree ORDER BY a"), "uuid 5-6");
        assert_eq!(identity("d.t", "00-00", "MergeTree"), "name d.t");
        let replicated = "ReplicatedSummingMergeTree('/t/{uuid}/{shard}', '{replica}') ORDER BY a";
        assert_eq!(identity("d.t", "5-6", replicated), "replicated at /t/5-6/{shard}");
        assert_eq!(identity("d.t", "5-6", "SharedMergeTree('/x', 'y')"), "uuid 5-6");
    }
}
