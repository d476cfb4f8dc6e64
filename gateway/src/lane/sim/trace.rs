//! What happened in a run, event by event, with the simulated time: for reading, and as a hash that two runs of one seed share.
//! Off unless a run asks for it. What the product logs is shown too.

use std::{
    cell::RefCell,
    io::{self, Write},
};

use adapters::sink::ShardStep;
use tokio::time::Instant;
use tracing_subscriber::fmt::MakeWriter;
use xxhash_rust::xxh3::Xxh3;

thread_local! {
    static TRACE: RefCell<Option<Trace>> = const { RefCell::new(None) };
}

#[derive(Default)]
pub(super) struct Trace {
    began: Option<Instant>,
    hash: Xxh3,
    pub(super) events: u64,
    lines: Option<Vec<String>>,
}

impl Trace {
    pub(super) fn hash(&self) -> u128 {
        self.hash.digest128()
    }

    pub(super) fn lines(self) -> Vec<String> {
        self.lines.unwrap_or_default()
    }

    fn note(&mut self, line: &str, counts: bool) {
        let began = *self.began.get_or_insert_with(Instant::now);
        let ms = began.elapsed().as_millis() as u64;
        if counts {
            self.events += 1;
            self.hash.update(&ms.to_le_bytes());
            self.hash.update(line.as_bytes());
        }
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{:>7}.{:03}  {line}", ms / 1_000, ms % 1_000));
        }
    }
}

/// Begins a trace on this thread; `keep`: its lines too.
pub(super) fn begin(keep: bool) {
    TRACE.set(Some(Trace { lines: keep.then(Vec::new), ..Trace::default() }));
}

pub(super) fn end() -> Option<Trace> {
    TRACE.take()
}

/// Something happened.
pub(super) fn note(what: impl FnOnce() -> String) {
    add(what, true);
}

fn add(what: impl FnOnce() -> String, counts: bool) {
    if TRACE.with_borrow(Option::is_some) {
        let line = what();
        TRACE.with_borrow_mut(|trace| trace.iter_mut().for_each(|trace| trace.note(&line, counts)));
    }
}

/// Steps in few letters: shard, epoch, sequence, position.
pub(super) fn told(steps: &[ShardStep]) -> String {
    let step = |step: &ShardStep| {
        let at = step.position.map_or_else(String::new, |position| format!(" @{position}"));
        format!("{} e{} s{}{at}", step.shard, step.epoch, step.sequence)
    };
    steps.iter().map(step).collect::<Vec<_>>().join(", ")
}

/// Runs `work` with what the product logs in the trace.
pub(super) fn with_log<T>(work: impl FnOnce() -> T) -> T {
    let log = tracing_subscriber::fmt()
        .with_writer(Lines)
        .with_ansi(false)
        .with_target(false)
        .with_level(false)
        .without_time()
        .with_max_level(tracing::Level::INFO)
        .finish();
    tracing::subscriber::with_default(log, work)
}

struct Lines;

impl MakeWriter<'_> for Lines {
    type Writer = Lines;

    fn make_writer(&self) -> Lines {
        Lines
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Not in the hash: whether a line is logged at all depends on what other threads have asked to be logged.
        add(|| format!("  log: {}", String::from_utf8_lossy(bytes).trim()), false);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
