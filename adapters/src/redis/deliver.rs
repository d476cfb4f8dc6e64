//! One batch, one script: fence, rows, dead letters, marks.

use std::collections::HashMap;

use super::{Kind, keys::Keys};
use super::{
    MAX_ROWS,
    connect::{Fault, Link, again},
    encode::{Fields, Layout},
    pack,
    reply::{self, Class},
    script::{Call, Script},
    session::{RedisSession, refusal_of, stays},
};
use crate::sink::{
    Batch, MarkBlock, Mode, OnRefused, Receipts, RowKind, RowOutcome, ShardStep, SinkError, Source,
};

/// A batch is sealed anew so often, if other writers change its rows between the look and the write.
const ATTEMPTS: usize = 8;

/// The rows of a batch that are sent, in the order in which they are written, and those that are not.
pub(super) struct Plan<'a> {
    /// Indices into the batch's rows.
    order: Vec<usize>,
    fields: Vec<Fields<'a>>,
    /// Why a row is not sent.
    unfit: HashMap<usize, String>,
}

impl<'a> Plan<'a> {
    /// In order of arrival; of copies of one row key the highest version first, so that the others meet it and are stale.
    pub(super) fn of(layout: &Layout, batch: &Batch<'a>, max_row_bytes: usize) -> Result<Self, SinkError> {
        let mut fields = Vec::with_capacity(batch.rows.len());
        let mut unfit = HashMap::new();
        let mut order = Vec::with_capacity(batch.rows.len());
        for (index, row) in batch.rows.iter().enumerate() {
            let read = Fields::read(row.bytes).filter(|_| !row.row_key.is_empty()).ok_or_else(|| {
                let reason = format!("row {index} is none of this sink's encoder");
                SinkError::NotApplied { reason, retry: false }
            })?;
            if read.packed.len() > max_row_bytes {
                let most =
                    read.longest().map_or(String::new(), |name| format!(", most of it in column {name:?}"));
                let reason = format!(
                    "the row has {} bytes{most}, above max_row_size ({max_row_bytes})",
                    read.packed.len()
                );
                unfit.insert(index, reason);
            } else {
                order.push(index);
            }
            fields.push(read);
        }
        if let (Mode::UpsertIfNewer, Some(version)) = (layout.mode, layout.version) {
            let kind = layout.kinds[version];
            order.sort_by(|&a, &b| {
                let newest_first = || compare(kind, fields[b].version, fields[a].version);
                batch.rows[a].row_key.cmp(batch.rows[b].row_key).then_with(newest_first)
            });
        }
        Ok(Self { order, fields, unfit })
    }

    /// All of them would be new.
    fn all_new(&self) -> String {
        "w".repeat(self.order.len())
    }

    /// One outcome a row of the batch.
    fn outcomes(&self, letters: &str, reasons: &HashMap<usize, String>, rows: usize) -> Vec<RowOutcome> {
        let mut outcomes = vec![RowOutcome::Stale; rows];
        for (&index, reason) in &self.unfit {
            outcomes[index] = RowOutcome::Refused { reason: reason.clone() };
        }
        for (place, (&index, letter)) in self.order.iter().zip(letters.bytes()).enumerate() {
            outcomes[index] = match letter {
                b'w' => RowOutcome::Written,
                b'u' => RowOutcome::Updated,
                b's' => RowOutcome::Stale,
                _ => RowOutcome::Refused { reason: reasons.get(&place).cloned().unwrap_or_default() },
            };
        }
        outcomes
    }
}

/// As the script compares versions.
fn compare(kind: Kind, a: &[u8], b: &[u8]) -> std::cmp::Ordering {
    let number = |text: &[u8]| std::str::from_utf8(text).ok()?.parse::<i64>().ok();
    match kind {
        Kind::Integer => number(a).cmp(&number(b)),
        _ => a.cmp(b),
    }
}

/// What goes with the rows.
struct Sealed {
    letters: Vec<Vec<u8>>,
    marks: Vec<MarkBlock>,
}

impl Sealed {
    /// Dead letters of the batch, then those of refused rows if the batch wants them; and the marks.
    fn of(batch: &Batch<'_>, outcomes: &[RowOutcome]) -> Self {
        let mut letters: Vec<Vec<u8>> = batch
            .dead_letters
            .iter()
            .map(|dead| letter(batch.steps, &dead.source, dead.kind, &dead.reason))
            .collect();
        if batch.on_refused == OnRefused::DeadLetter {
            letters.extend(batch.rows.iter().zip(outcomes).filter_map(|(row, outcome)| match outcome {
                RowOutcome::Refused { reason } => Some(letter(batch.steps, &row.source, "rejected", reason)),
                _ => None,
            }));
        }
        Self { letters, marks: (batch.seal)(outcomes) }
    }
}

/// A dead letter's fields, packed.
fn letter(steps: &[ShardStep], source: &Source<'_>, kind: &str, reason: &str) -> Vec<u8> {
    let step = steps.get(source.step);
    let mut fields: Vec<(&str, Vec<u8>)> = vec![
        ("shard", step.map_or("", |step| &step.shard).into()),
        ("sequence", step.map_or(0, |step| step.sequence).to_string().into()),
        ("key", crate::dead_letters::hex(source.key).into()),
        ("event_ms", source.event_ms.to_string().into()),
        ("kind", kind.into()),
        ("reason", reason.into()),
    ];
    fields.extend(source.position.map(|position| ("position", position.to_string().into())));
    fields.extend(source.payload.map(|payload| ("payload", payload.to_vec())));
    let mut packed = Vec::new();
    pack::list(fields.len() * 2, &mut packed);
    for (name, value) in &fields {
        pack::text(name.as_bytes(), &mut packed);
        pack::text(value, &mut packed);
    }
    packed
}

/// Keys and arguments of the script. Without `sealed` it only looks: then what the rows hold is not sent.
fn call_of(
    session: &RedisSession,
    batch: &Batch<'_>,
    plan: &Plan<'_>,
    expected: &str,
    sealed: Option<&Sealed>,
) -> Call {
    let (layout, keys) = (&session.shared.layout, &session.keys);
    let mut call = Call::default();
    call.key(keys.dead_letters()).key(keys.tombstones.as_str()).key(keys.tombstone_times.as_str());
    let version = layout.version.map(|version| (layout.kinds[version], &layout.columns[version].name));
    call.number(batch.steps.len()).number(plan.order.len());
    call.number(sealed.map_or(0, |sealed| sealed.marks.len()));
    call.number(sealed.map_or(0, |sealed| sealed.letters.len()));
    call.arg(match layout.mode {
        Mode::Insert => "insert",
        Mode::Upsert => "upsert",
        Mode::UpsertIfNewer => "upsert-if-newer",
    });
    call.arg(version.map_or("", |(kind, _)| kind.name())).arg(version.map_or("", |(_, name)| name));
    call.arg(session.owner.as_str()).arg(session.route.as_str());
    call.arg(if sealed.is_some() { "write" } else { "look" }).arg(expected);
    for step in batch.steps {
        put_step(keys, step, &mut call);
    }
    for &index in &plan.order {
        let row = &batch.rows[index];
        call.key(row.row_key);
        call.arg(packed_row(row.kind, &plan.fields[index], row.source.event_ms, sealed.is_some()));
    }
    if let Some(sealed) = sealed {
        for mark in &sealed.marks {
            let epoch = batch.steps.get(mark.step).map_or(0, |step| step.epoch);
            call.number(mark.step + 1);
            call.arg(format!("{epoch} {} {} {}", mark.min_ms, mark.max_ms, mark.count));
            call.number(mark.min_ms).number(mark.max_ms).arg(mark.block.as_ref());
        }
        for letter in &sealed.letters {
            call.arg(letter.as_slice());
        }
    }
    call
}

fn put_step(keys: &Keys, step: &ShardStep, call: &mut Call) {
    for key in keys.all_of(&step.shard) {
        call.key(key);
    }
    call.number(step.epoch).number(step.sequence.saturating_sub(1)).number(step.sequence);
    call.arg(step.position.map(|position| position.to_string()).unwrap_or_default());
    call.number(step.watermark_ms);
}

/// Kind, version, event time, how many fields are set and removed, and those.
fn packed_row(kind: RowKind, fields: &Fields<'_>, event_ms: i64, whole: bool) -> Vec<u8> {
    let (set, removed, body) =
        if whole { (fields.set, fields.removed, fields.packed) } else { (0, 0, &[][..]) };
    let mut packed = Vec::with_capacity(body.len() + fields.version.len() + 40);
    pack::list(5 + 2 * usize::from(set) + usize::from(removed), &mut packed);
    pack::text(if kind == RowKind::Delete { b"d" } else { b"w" }, &mut packed);
    pack::text(fields.version, &mut packed);
    pack::text(event_ms.to_string().as_bytes(), &mut packed);
    pack::number(set, &mut packed);
    pack::number(removed, &mut packed);
    packed.extend_from_slice(body);
    packed
}

/// What the script says of the rows: a letter each, and why it refuses some.
fn judged(parts: &[::redis::Value], layout: &Layout) -> Result<(String, HashMap<usize, String>), Fault> {
    let letters = reply::text(parts, 1)?.to_owned();
    let mut reasons = HashMap::new();
    for pair in reply::list(parts.get(2).unwrap_or(&::redis::Value::Nil))?.chunks(2) {
        let place = usize::try_from(reply::number(pair, 0)?).unwrap_or(0).wrapping_sub(1);
        let reason = match reply::text(pair, 1)? {
            "version" => {
                let column = layout.version.map_or("", |version| &layout.columns[version].name);
                format!(
                    "the row that is there has no integer in its version, column {column:?}, and cannot be compared"
                )
            }
            other => format!("its key holds a {other} where a row is a hash"),
        };
        reasons.insert(place, reason);
    }
    Ok((letters, reasons))
}

impl RedisSession {
    pub(super) async fn deliver_batch(&mut self, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        let mut link = self.acquired()?;
        let result = Box::pin(self.attempt(&mut link, batch)).await;
        match &result {
            Ok(_) => {
                for step in batch.steps {
                    self.seen.insert(step.shard.clone(), step.sequence);
                }
                self.link = Some(link);
            }
            Err(error) if stays(error) => self.link = Some(link),
            Err(_) => {}
        }
        result
    }

    async fn attempt(&self, link: &mut Link, batch: &Batch<'_>) -> Result<Receipts, SinkError> {
        let config = &self.shared.config;
        let never = |reason: String| Err(SinkError::NotApplied { reason, retry: false });
        if batch.steps.is_empty() {
            return never("a batch without a shard step cannot be fenced".to_owned());
        }
        if batch.rows.len() > MAX_ROWS {
            return never(format!(
                "a batch of {} rows is above {MAX_ROWS}, for the server does nothing else while it is written; lower batch.max_records",
                batch.rows.len()
            ));
        }
        let plan = Plan::of(&self.shared.layout, batch, config.max_row_bytes)?;
        let mut known = (batch.known_new || plan.order.is_empty()).then(|| (plan.all_new(), HashMap::new()));
        for _ in 0..ATTEMPTS {
            let Some((expected, reasons)) = &known else {
                known = Some(match self.send(link, batch, &plan, "", None).await? {
                    Said::Applied => {
                        return Err(SinkError::Unknown {
                            reason: "a look was answered as a write".to_owned(),
                        });
                    }
                    Said::Outcomes(letters, reasons) => (letters, reasons),
                });
                continue;
            };
            let outcomes = plan.outcomes(expected, reasons, batch.rows.len());
            if batch.on_refused == OnRefused::Abort {
                let refused = outcomes.iter().enumerate().find_map(|(row, outcome)| match outcome {
                    RowOutcome::Refused { reason } => {
                        Some(SinkError::Refused { row, reason: reason.clone() })
                    }
                    _ => None,
                });
                if let Some(refused) = refused {
                    return Err(refused);
                }
            }
            let sealed = Sealed::of(batch, &outcomes);
            match self.send(link, batch, &plan, expected, Some(&sealed)).await? {
                Said::Outcomes(letters, reasons) => known = Some((letters, reasons)),
                Said::Applied => {
                    return match self.replicated(link).await {
                        Ok(()) => Ok(Receipts { rows: outcomes }),
                        // It is in, here; a failover may still take it away.
                        Err(reason) => Err(SinkError::Unknown { reason }),
                    };
                }
            }
        }
        Err(again(format!(
            "other writers changed the batch's rows {ATTEMPTS} times between a look and the write"
        )))
    }

    async fn send(
        &self,
        link: &mut Link,
        batch: &Batch<'_>,
        plan: &Plan<'_>,
        expected: &str,
        sealed: Option<&Sealed>,
    ) -> Result<Said, SinkError> {
        let call = call_of(self, batch, plan, expected, sealed);
        let doubt = |reason: String| match sealed {
            Some(_) => SinkError::Unknown { reason },
            None => again(reason),
        };
        let reply = match link.run(Script::Deliver, &call, self.shared.config.timeout).await {
            Ok(reply) => reply,
            Err(Fault::Lost(reason)) => return Err(doubt(reason)),
            Err(Fault::Server(error)) => {
                let text = reply::text_of(&error);
                return Err(match reply::classify(&text) {
                    Class::Refused { retry, advice } => {
                        SinkError::NotApplied { reason: format!("{text}; {advice}"), retry }
                    }
                    Class::Doubt => doubt(text),
                });
            }
        };
        let names = |index: usize| batch.steps.get(index).map_or("?", |step| &step.shard).to_owned();
        let said = || {
            if let Some(error) = refusal_of(&reply, &names)? {
                return Ok(Err(error));
            }
            let parts = reply::list(&reply)?;
            if reply::text(parts, 0)? == "applied" {
                return Ok(Ok(Said::Applied));
            }
            judged(parts, &self.shared.layout).map(|(letters, reasons)| Ok(Said::Outcomes(letters, reasons)))
        };
        match said() {
            Ok(said) => said,
            Err(Fault::Lost(reason)) => Err(doubt(reason)),
            Err(Fault::Server(error)) => Err(doubt(reply::text_of(&error))),
        }
    }
}

/// What the script did.
enum Said {
    /// Everything is in.
    Applied,
    /// Nothing: these are the rows' outcomes, by their place in the plan.
    Outcomes(String, HashMap<usize, String>),
}
