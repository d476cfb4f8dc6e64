//! Random histories against a model: after every batch the outcomes and the whole table must agree.
//!
//! `ONCEGATE_SEED=<n>` runs one history alone; a failure prints its seed.

use std::collections::{BTreeMap, BTreeSet};

use adapters::sink::{Mode, Resolution, RowKind, SinkError};
use rand::{Rng, SeedableRng, rngs::SmallRng};

use super::{Bed, Record, SHARD, Target, letters, write};

/// The table as it must be, and the versions of deleted rows.
struct Model {
    mode: Mode,
    rows: BTreeMap<String, (i64, i64, String)>,
    tombstones: BTreeMap<String, i64>,
}

impl Model {
    /// Applies a batch; one letter a record, as in [`letters`].
    fn apply(&mut self, records: &[Record]) -> String {
        let mut order: Vec<usize> = (0..records.len()).collect();
        if self.mode == Mode::UpsertIfNewer {
            // Of copies the highest version wins, the first among equals; the others meet it and are stale.
            order.sort_by_key(|&index| std::cmp::Reverse(records[index].version));
        }
        let mut outcomes = vec![' '; records.len()];
        for index in order {
            outcomes[index] = self.one(&records[index]);
        }
        outcomes.into_iter().collect()
    }

    fn one(&mut self, record: &Record) -> char {
        let there = self.rows.get(&record.id).cloned();
        if self.mode == Mode::UpsertIfNewer {
            let row = there.as_ref().map(|(version, _, _)| *version);
            let highest = row.max(self.tombstones.get(&record.id).copied());
            if highest.is_some_and(|highest| highest >= record.version) {
                return 's';
            }
        }
        if record.kind == RowKind::Delete {
            if self.mode == Mode::UpsertIfNewer {
                self.tombstones.insert(record.id.clone(), record.version);
            }
            return if self.rows.remove(&record.id).is_some() { 'u' } else { 'w' };
        }
        if there.is_some() && self.mode == Mode::Insert {
            return 's';
        }
        if record.amount < 0 {
            return 'r';
        }
        let note = record.note.clone();
        let kept = there.as_ref().map_or_else(|| "none".to_owned(), |(_, _, note)| note.clone());
        self.rows.insert(record.id.clone(), (record.version, record.amount, note.unwrap_or(kept)));
        if there.is_some() { 'u' } else { 'w' }
    }
}

/// A batch of up to `most` records over a small set of row keys. Bad rows have a row key of their own and the highest
/// version: where a copy would win over a bad row, sinks may differ in whether they look at the bad one at all.
fn batch(random: &mut SmallRng, mode: Mode, most: usize, clock: &mut i64) -> Vec<Record> {
    let keys = if random.random_bool(0.3) { 500 } else { 12 };
    let count = random.random_range(0..=most);
    let mut records: Vec<Record> = (0..count)
        .map(|_| {
            *clock += 1;
            let id = format!("k{}", random.random_range(0..keys));
            // Mostly rising, sometimes from the past, sometimes equal.
            let version = *clock / 2 - if random.random_bool(0.3) { random.random_range(0..50) } else { 0 };
            let mut record = write(&id, version, random.random_range(0..1000));
            if random.random_bool(0.2) {
                record.kind = RowKind::Delete;
            } else if random.random_bool(0.5) && mode != Mode::UpsertIfNewer {
                record = record.note(&format!("note {}", random.random_range(0..100)));
            }
            record
        })
        .collect();
    let mut seen = BTreeMap::new();
    for record in &records {
        *seen.entry(record.id.clone()).or_insert(0) += 1;
    }
    let alone: BTreeSet<String> =
        seen.into_iter().filter(|(_, count)| *count == 1).map(|(id, _)| id).collect();
    for record in &mut records {
        let write = record.kind == RowKind::Write && alone.contains(&record.id);
        if write && mode != Mode::Insert && random.random_bool(0.1) {
            (record.amount, record.version) = (-1, i64::MAX);
        }
    }
    records
}

async fn history<T: Target>(target: &T, mode: Mode, seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut bed = Bed::new(target, mode).await;
    let mut model = Model { mode, rows: BTreeMap::new(), tombstones: BTreeMap::new() };
    let mut clock = 100;
    for number in 0..25 {
        let at = format!("{mode:?}, seed {seed}, batch {number}");
        let most = if random.random_bool(0.15) { 700 } else { 30 };
        let records = batch(&mut random, mode, most, &mut clock);
        let steps = bed.steps();
        let answer = bed.deliver_at(&steps, &records).await.unwrap_or_else(|error| panic!("{at}: {error}"));
        let expected = model.apply(&records);
        let answer = letters(&answer);
        if let Some(index) = answer.chars().zip(expected.chars()).position(|(is, must)| is != must) {
            let id = &records[index].id;
            let copies: Vec<_> = records.iter().enumerate().filter(|(_, record)| record.id == *id).collect();
            panic!("{at}: row {index}:\nis   {answer}\nmust {expected}\ncopies: {copies:#?}");
        }
        assert_eq!(answer.len(), expected.len(), "{at}");
        assert_eq!(bed.table().await, model.rows, "{at}");
        match random.random_range(0..6) {
            // The same batch once more: it must not count twice.
            0 => {
                let again = bed.deliver_at(&steps, &records).await;
                assert!(matches!(again, Err(SinkError::Unknown { .. })), "{at}: {again:?}");
                let (resolution, states) = bed.session.resolve(&steps).await.expect("the sink can be asked");
                assert!(
                    matches!(&resolution, Resolution::Applied(marks) if marks.len() == 1),
                    "{at}: {resolution:?}"
                );
                bed.shards = states;
            }
            1 => bed.acquire(&[SHARD]).await,
            2 => bed = bed.rival(&format!("owner {number}"), &[SHARD]).await,
            _ => continue,
        }
        assert_eq!(bed.table().await, model.rows, "{at}");
    }
    let marks = bed.session.marks_since(&SHARD.into(), 0).await.expect("marks");
    assert_eq!(marks.iter().map(|mark| mark.sequence).collect::<Vec<_>>(), (1..=25).collect::<Vec<i64>>());
}

async fn histories<T: Target>(target: &T, mode: Mode) {
    if let Some(seed) = std::env::var("ONCEGATE_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return history(target, mode, seed).await;
    }
    let base: u64 = rand::rng().random_range(0..1 << 40);
    for seed in (0..target.histories()).chain((0..target.histories()).map(|n| base + n)) {
        println!("{mode:?}: seed {seed}");
        history(target, mode, seed).await;
    }
}

/// Mode `insert`.
pub async fn insert_agrees_with_the_model<T: Target>(target: &T) {
    histories(target, Mode::Insert).await;
}

/// Mode `upsert`.
pub async fn upsert_agrees_with_the_model<T: Target>(target: &T) {
    histories(target, Mode::Upsert).await;
}

/// Mode `upsert-if-newer`.
pub async fn upsert_if_newer_agrees_with_the_model<T: Target>(target: &T) {
    histories(target, Mode::UpsertIfNewer).await;
}
