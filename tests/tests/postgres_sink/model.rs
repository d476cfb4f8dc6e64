//! Random batches against a model that takes records one after another.

use std::collections::BTreeMap;

use adapters::sink::Mode;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::rig::Rig;

/// Row key to version of the row, and to version of the tombstone.
#[derive(Default)]
struct Model {
    rows: BTreeMap<i32, (i32, usize)>,
    tombstones: BTreeMap<i32, i32>,
}

impl Model {
    fn delete(&mut self, mode: Mode, key: i32, version: i32) {
        if mode == Mode::UpsertIfNewer {
            if self.rows.get(&key).is_some_and(|row| row.0 >= version) {
                return;
            }
            let grave = self.tombstones.entry(key).or_insert(version);
            *grave = version.max(*grave);
        }
        self.rows.remove(&key);
    }

    fn write(&mut self, mode: Mode, key: i32, version: i32, content: usize) {
        match mode {
            Mode::Insert => {
                self.rows.entry(key).or_insert((version, content));
            }
            Mode::Upsert => {
                self.rows.insert(key, (version, content));
            }
            Mode::UpsertIfNewer => {
                let known = self.rows.get(&key).map(|row| row.0).max(self.tombstones.get(&key).copied());
                if known.is_none_or(|known| version > known) {
                    self.rows.insert(key, (version, content));
                }
            }
        }
    }
}

#[tokio::test]
async fn random_batches_leave_the_table_as_one_after_another_would() {
    for (seed, mode) in [(1, Mode::Insert), (2, Mode::Upsert), (3, Mode::UpsertIfNewer)] {
        let mut random = StdRng::seed_from_u64(seed);
        let ddl = "CREATE TABLE t (k numeric, v int NOT NULL, c int NOT NULL CHECK (c >= 0), d int DEFAULT 3, PRIMARY KEY (k))";
        let mut rig = Rig::new(ddl, |config| {
            config.row_key = vec!["k".into()];
            config.mode = mode;
            config.version = (mode == Mode::UpsertIfNewer).then(|| "v".into());
        })
        .await;
        let mut model = Model::default();
        let mut content = 0;
        for batch in 0..120 {
            let size = if batch % 10 == 0 { 400 } else { random.random_range(0..30) };
            let mut records = Vec::new();
            let mut expected = String::new();
            for _ in 0..size {
                let (key, version) = (random.random_range(1..60), random.random_range(0..40));
                // Equal numbers in unequal forms are one row key.
                let form = [format!("{key}"), format!("{key}.0"), format!("{key}00e-2")];
                let key_text = &form[random.random_range(0..3)];
                content += 1;
                match random.random_range(0..20) {
                    0..4 => {
                        model.delete(mode, key, version);
                        records.push(format!(r#"-{{"k":{key_text},"v":{version}}}"#));
                        expected.push('?');
                    }
                    // Where a bad row would win, it is refused; where it would lose anyway, it may be called so instead.
                    4 => {
                        records.push(format!(r#"{{"k":{key_text},"v":{version},"c":-1}}"#));
                        expected.push('-');
                    }
                    more => {
                        model.write(mode, key, version, content);
                        let d = if more % 2 == 0 { ",\"d\":3" } else { "" };
                        records.push(format!(r#"{{"k":{key_text},"v":{version},"c":{content}{d}}}"#));
                        expected.push('?');
                    }
                }
            }
            let records: Vec<&str> = records.iter().map(String::as_str).collect();
            let outcomes = rig.deliver(&records).await;
            for (outcome, expected) in outcomes.chars().zip(expected.chars()) {
                assert!(expected == '-' || outcome != 'R', "a good row was refused");
            }
            let rows = rig.client.query("SELECT k::int, v, c, d FROM t", &[]).await.unwrap();
            let table: BTreeMap<i32, (i32, usize)> = rows
                .iter()
                .map(|row| {
                    assert_eq!(row.get::<_, i32>(3), 3);
                    (row.get(0), (row.get(1), row.get::<_, i32>(2) as usize))
                })
                .collect();
            assert_eq!(table, model.rows, "{mode:?}, batch {batch}");
        }
    }
}
