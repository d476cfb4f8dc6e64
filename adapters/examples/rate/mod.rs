//! What the rates of sinks into files are measured with: records, a clock, and a session that delivers them.

use std::{sync::Arc, time::Instant};

use adapters::{
    sink::{
        Acquire, Batch, MarkBlock, OnRefused, Row, RowKind, RowOutcome, ShardStep, Sink, SinkError, Source,
    },
    value::Value,
};
use bytes::Bytes;

/// Rows of one.
pub(crate) const BATCH: usize = 10_000;

/// One record's values as JSON text.
fn record(n: u64) -> [String; 6] {
    let mixed = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    [
        format!("\"order-{mixed:016x}\""),
        format!("{}", n % 100_000),
        format!("{}.25", n % 1000),
        "\"shipped\"".to_owned(),
        format!("\"2024-01-01T00:00:{:02}.{:06}Z\"", n % 60, n % 1_000_000),
        format!("\"a note of some forty characters, {:08}\"", n % 99_999_999),
    ]
}

/// Wall and processor time of the whole process.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    wall: Instant,
    cpu: f64,
}

/// Rows a second of wall time, and of processor time (which a busy machine does not distort as much).
#[derive(Clone, Copy, Default)]
pub(crate) struct Rate {
    wall: f64,
    cpu: f64,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { wall: Instant::now(), cpu: cpu_seconds() }
    }

    pub(crate) fn add_to(self, rate: &mut Rate) {
        rate.wall += self.wall.elapsed().as_secs_f64();
        rate.cpu += cpu_seconds() - self.cpu;
    }
}

/// User and system time of all threads, in ticks of 10 ms.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

impl Rate {
    pub(crate) fn of(self, rows: f64) -> String {
        format!("{:9.0} {:9.0}", rows / self.wall, rows / self.cpu)
    }
}

/// One record's values, for the sink's rival.
pub(crate) type Plain = (String, i64, f64, String, String, String);

/// Batches of them.
pub(crate) fn plain_batches(batches: u64) -> Vec<Vec<Plain>> {
    let plain = |n: u64| {
        let r = record(n);
        let text = |s: &String| s.trim_matches('"').to_owned();
        let (customer, amount) = (r[1].parse().expect("integer"), r[2].parse().expect("double"));
        (text(&r[0]), customer, amount, text(&r[3]), text(&r[4]), text(&r[5]))
    };
    let batch = |batch: u64| (0..BATCH as u64).map(|n| plain(batch * BATCH as u64 + n)).collect();
    (0..batches).map(batch).collect()
}

/// Delivers so many batches, and with `twice` all of them a second time, which is then what counts.
pub(crate) async fn delivered(sink: &dyn Sink, batches: u64, twice: bool) -> Result<Rate, SinkError> {
    let encoder = sink.probe().await.expect("fits");
    let mut session = sink.session("r", "me");
    let state = session.acquire(&["s".into()], Acquire::Force).await?;
    let records: Vec<[String; 6]> = (0..batches * BATCH as u64).map(record).collect();
    let mut delivering = Rate::default();
    let mut sequence = 0;
    for round in 0..if twice { 2 } else { 1 } {
        if round == 1 {
            delivering = Rate::default();
        }
        for batch in records.chunks(BATCH) {
            let (mut bytes, mut keys) = (Vec::new(), Vec::new());
            let mut ends = Vec::with_capacity(BATCH);
            for record in batch {
                let values = record.each_ref().map(|json| Value::Json(json));
                encoder.encode(RowKind::Write, &values, &mut bytes, &mut keys).expect("encodes");
                ends.push((bytes.len(), keys.len()));
            }
            let source = Source { step: 0, position: None, key: &[], payload: None, event_ms: 0 };
            let mut at = (0, 0);
            let rows: Vec<Row<'_>> = ends
                .iter()
                .map(|&end| {
                    let row = Row {
                        kind: RowKind::Write,
                        bytes: &bytes[at.0..end.0],
                        row_key: &keys[at.1..end.1],
                        source,
                    };
                    at = end;
                    row
                })
                .collect();
            sequence += 1;
            let steps = [ShardStep {
                shard: Arc::from("s"),
                epoch: state[0].epoch,
                sequence,
                position: None,
                watermark_ms: 0,
            }];
            let block = Bytes::from(vec![7; 28 * BATCH]);
            let seal = move |outcomes: &[RowOutcome]| {
                vec![MarkBlock { step: 0, min_ms: 0, max_ms: 0, count: outcomes.len(), block: block.clone() }]
            };
            let start = Clock::start();
            session
                .deliver(&Batch {
                    steps: &steps,
                    rows: &rows,
                    dead_letters: &[],
                    on_refused: OnRefused::Report,
                    known_new: true,
                    seal: &seal,
                })
                .await?;
            start.add_to(&mut delivering);
        }
    }
    Ok(delivering)
}
