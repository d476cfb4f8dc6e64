//! What a store holds: [`Stats`].

use std::fmt;

use crate::{
    files::FileStats,
    floors::{Checkpoint, Floors},
    plan::Plan,
    slots::SlotStats,
};

/// A look at one store. Prints as lines for a console.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Settled keys.
    pub keys: u64,
    /// Keys claimed and not yet settled.
    pub claims: u64,
    /// Effects begun whose outcome is unknown.
    pub effects_pending: u64,
    /// Width of a slot, ms.
    pub slot_width_ms: i64,
    /// What will be needed when the window is full; none before a slot was closed since the store was opened.
    pub plan: Option<Plan>,
    /// Per slot, oldest first.
    pub slots: Vec<SlotStats>,
    /// Bytes of tables, filters, claims and settlements on their way to disk.
    pub memory_bytes: u64,
    /// Bytes of tails, runs and filters.
    pub disk_bytes: u64,
    /// Tails and runs, oldest first; empty for a store in memory.
    pub files: Vec<FileStats>,
    /// Watermark and retirement floor.
    pub floors: Floors,
    /// Facts below it are forgotten, ms; `i64::MIN` before the first expiry.
    pub floor_ms: i64,
    /// By shard.
    pub checkpoints: Vec<Checkpoint>,
    /// Group of the last settlement, and the last durable one.
    pub groups: (u64, u64),
    /// Why claims are refused for lack of room on the file system, if so.
    pub disk_full: Option<String>,
    /// The error that stopped the store, if so.
    pub stopped: Option<String>,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |ms: Option<i64>| match ms {
            None | Some(i64::MIN) => "none".to_owned(),
            Some(ms) => format!("{ms} ms"),
        };
        writeln!(
            f,
            "keys            {} settled, {} claimed, {} effects pending",
            self.keys, self.claims, self.effects_pending
        )?;
        writeln!(f, "memory          {} bytes", self.memory_bytes)?;
        writeln!(f, "disk            {} bytes in {} files of facts", self.disk_bytes, self.files.len())?;
        if let Some(plan) = &self.plan {
            writeln!(f, "plan            {plan}")?;
        }
        writeln!(f, "watermark       {}", time(self.floors.watermark_ms))?;
        writeln!(
            f,
            "floor           {} (may rise to {})",
            time(Some(self.floor_ms)),
            time(Some(self.floors.retire_ms))
        )?;
        writeln!(f, "groups          {} settled, {} durable", self.groups.0, self.groups.1)?;
        if let Some(text) = &self.disk_full {
            writeln!(f, "disk full       {text}")?;
        }
        if let Some(text) = &self.stopped {
            writeln!(f, "stopped         {text}")?;
        }
        for slot in &self.slots {
            let (oldest, newest) = slot.event_ms.unzip();
            writeln!(
                f,
                "slot            {}: {:?}, {} keys from {} to {}, {} bytes in memory, {} filter bits, {} false positives",
                slot.number,
                slot.kind,
                slot.keys,
                time(oldest),
                time(newest),
                slot.memory_bytes,
                slot.filter_bits,
                slot.false_positives
            )?;
        }
        for file in &self.files {
            let kind = if file.closed { "closed" } else { "open" };
            let newest = time(file.newest_ms);
            writeln!(f, "file            {}: {} bytes, {kind}, newest {newest}", file.file, file.bytes)?;
        }
        for checkpoint in &self.checkpoints {
            let position =
                checkpoint.position.map_or_else(|| "none".to_owned(), |position| position.to_string());
            writeln!(
                f,
                "shard           {}: sequence {}, position {position}, watermark {}, floor {}",
                checkpoint.shard,
                checkpoint.sequence,
                time(Some(checkpoint.watermark_ms)),
                time(Some(checkpoint.floor_ms)),
            )?;
        }
        Ok(())
    }
}
