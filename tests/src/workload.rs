//! Seeded workloads of orders, and the table that each must end in: [`Workload`].

use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio_postgres::Client;

use crate::servers::Produced;

/// One order as a record carries it and as the table shows it: every column as text, nothing rounded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Order {
    /// Row key.
    pub order_id: String,
    /// Also above 2^53.
    pub user_id: i64,
    /// A decimal with trailing zeros.
    pub amount: String,
    /// Three letters.
    pub currency: &'static str,
    /// A word.
    pub status: &'static str,
    /// Version and event time, microseconds since the epoch.
    pub updated_us: i64,
    /// Filler, with characters that need escapes.
    pub note: String,
}

/// The table that [`Order`] fits.
pub fn orders_table(name: &str) -> String {
    format!(
        "CREATE TABLE {name} (order_id text PRIMARY KEY, user_id bigint NOT NULL, amount numeric NOT NULL, \
         currency text NOT NULL, status text NOT NULL, updated_at timestamptz NOT NULL, note text NOT NULL)"
    )
}

impl Order {
    /// The record's payload, about 200 bytes.
    pub fn json(&self) -> String {
        format!(
            r#"{{"order_id":"{}","user_id":{},"amount":{},"currency":"{}","status":"{}","updated_at":"{}","note":{}}}"#,
            self.order_id,
            self.user_id,
            self.amount,
            self.currency,
            self.status,
            rfc3339(self.updated_us),
            serde_json::Value::from(self.note.as_str()),
        )
    }

    fn random(random: &mut StdRng, order_id: String, updated_us: i64) -> Self {
        let user_id = if random.random_bool(0.1) {
            i64::MAX - random.random_range(0..1000)
        } else {
            random.random_range(1..1_000_000)
        };
        let amount = format!("{}.{:04}", random.random_range(0..100_000), random.random_range(0..1000) * 10);
        let note: String = (0..60).map(|_| NOTE[random.random_range(0..NOTE.len())]).collect();
        let currency = ["EUR", "USD", "CHF", "JPY"][random.random_range(0..4)];
        let status = ["new", "paid", "shipped", "returned"][random.random_range(0..4)];
        Self { order_id, user_id, amount, currency, status, updated_us, note }
    }
}

const NOTE: [char; 12] = ['a', 'b', 'c', 'd', 'e', ' ', '"', '\\', '\n', '\t', 'é', '€'];

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.json())
    }
}

/// RFC 3339 in UTC with microseconds.
pub fn rfc3339(us: i64) -> String {
    let time = Timestamp::from_microsecond(us).expect("the tests' times lie in this era");
    format!("{time:.6}")
}

/// How rows meet the rows that are there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Each order comes once.
    Insert,
    /// Orders change; the last change of an order wins.
    Upsert,
    /// Orders change out of order and are deleted; the highest version wins.
    UpsertIfNewer,
}

impl Mode {
    /// As the config names it.
    pub fn word(self) -> &'static str {
        match self {
            Mode::Insert => "insert",
            Mode::Upsert => "upsert",
            Mode::UpsertIfNewer => "upsert-if-newer",
        }
    }
}

/// What one record says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// The order is now so.
    Put(Order),
    /// The order is gone.
    Delete {
        /// Which.
        order_id: String,
        /// Version and event time, microseconds since the epoch.
        updated_us: i64,
    },
}

impl Change {
    /// Row key.
    pub fn order_id(&self) -> &str {
        match self {
            Change::Put(order) => &order.order_id,
            Change::Delete { order_id, .. } => order_id,
        }
    }

    /// Version and event time, microseconds since the epoch.
    pub fn updated_us(&self) -> i64 {
        match self {
            Change::Put(order) => order.updated_us,
            Change::Delete { updated_us, .. } => *updated_us,
        }
    }

    /// The Kafka record: key, version header and timestamp always, payload unless it is a tombstone.
    pub fn produced(&self, partitions: u32) -> Produced {
        let payload = match self {
            Change::Put(order) => Some(order.json().into_bytes()),
            Change::Delete { .. } => None,
        };
        let hash =
            self.order_id().bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        Produced {
            partition: (hash % partitions).cast_signed(),
            key: Some(self.order_id().as_bytes().to_vec()),
            payload,
            headers: vec![("updated_at", rfc3339(self.updated_us()))],
            timestamp_ms: Some(self.updated_us().div_euclid(1000)),
        }
    }
}

/// What is sent, in order, copies included.
#[derive(Clone, Debug)]
pub struct Workload {
    /// How rows meet rows.
    pub mode: Mode,
    /// All records in order of arrival, copies included.
    pub sent: Vec<Change>,
    /// How many of them are first copies.
    pub distinct: usize,
}

impl Workload {
    /// `count` records that come out of `seed`, `copies` of 100 being a copy of an earlier one. Event times end at
    /// `until_us` and span a quarter of an hour.
    pub fn generate(mode: Mode, seed: u64, count: usize, copies: u32, until_us: i64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let (mut sent, mut originals) = (Vec::with_capacity(count), Vec::<usize>::new());
        let span_us = 15 * 60 * 1_000_000;
        let orders = (count / 4).max(1);
        for index in 0..count {
            if !originals.is_empty() && random.random_ratio(copies, 100) {
                // Most copies come soon, some come late.
                let back = if random.random_bool(0.8) { 200 } else { originals.len() };
                let from = originals.len().saturating_sub(back);
                let original = originals[random.random_range(from..originals.len())];
                let copy: Change = Clone::clone(&sent[original]);
                sent.push(copy);
                continue;
            }
            // The microsecond is the record's own, so that no two changes of an order have the same version.
            let share =
                i64::try_from(index).unwrap_or(0) * (span_us / 1_000_000) / i64::try_from(count).unwrap_or(1);
            let clock_us = (until_us - span_us).div_euclid(1_000_000) * 1_000_000 + share * 1_000_000;
            let own_us = i64::try_from(index).unwrap_or(0) % 1_000_000;
            let late_us =
                if mode == Mode::UpsertIfNewer { random.random_range(0..300) * 1_000_000 } else { 0 };
            let updated_us = clock_us + own_us - late_us;
            let number = if mode == Mode::Insert { index } else { random.random_range(0..orders) };
            let order_id = format!("o-{seed}-{number:08}");
            originals.push(index);
            sent.push(if mode == Mode::UpsertIfNewer && random.random_ratio(1, 20) {
                Change::Delete { order_id, updated_us }
            } else {
                Change::Put(Order::random(&mut random, order_id, updated_us))
            });
        }
        Self { mode, sent, distinct: originals.len() }
    }

    /// The table that it must end in: every change takes effect once, at its first coming.
    pub fn model(&self) -> BTreeMap<String, Order> {
        let mut known = std::collections::HashSet::new();
        let mut rows: BTreeMap<&str, &Change> = BTreeMap::new();
        for change in &self.sent {
            if !known.insert((change.order_id(), change.updated_us())) {
                continue;
            }
            let wins = match (self.mode, rows.get(change.order_id())) {
                (_, None) | (Mode::Upsert, _) => true,
                (Mode::Insert, Some(_)) => false,
                (Mode::UpsertIfNewer, Some(there)) => change.updated_us() > there.updated_us(),
            };
            if wins {
                rows.insert(change.order_id(), change);
            }
        }
        rows.into_iter()
            .filter_map(|(order_id, change)| match change {
                Change::Put(order) => Some((order_id.to_owned(), order.clone())),
                Change::Delete { .. } => None,
            })
            .collect()
    }
}

/// All rows of `table`.
pub async fn table_rows(client: &Client, table: &str) -> Result<Vec<Order>, tokio_postgres::Error> {
    let query = format!(
        "SELECT order_id, user_id, amount::text, currency, status, note, \
         (extract(epoch FROM updated_at) * 1000000)::bigint FROM {table} ORDER BY order_id"
    );
    let rows = client.query(&query, &[]).await?;
    let word = |row: &tokio_postgres::Row, column, words: &[&'static str]| {
        let text: &str = row.get(column);
        words.iter().find(|word| **word == text).copied().unwrap_or("(another word)")
    };
    let order = |row: &tokio_postgres::Row| Order {
        order_id: row.get(0),
        user_id: row.get(1),
        amount: row.get(2),
        currency: word(row, 3, &["EUR", "USD", "CHF", "JPY"]),
        status: word(row, 4, &["new", "paid", "shipped", "returned"]),
        note: row.get(5),
        updated_us: row.get(6),
    };
    Ok(rows.iter().map(order).collect())
}

/// What stands between the table and the model; empty if they are equal.
pub fn differences(model: &BTreeMap<String, Order>, table: &[Order]) -> Vec<String> {
    let mut found = vec![];
    let mut seen: BTreeMap<&str, &Order> = BTreeMap::new();
    for row in table {
        if seen.insert(&row.order_id, row).is_some() {
            found.push(format!("twice       {row}"));
        }
        match model.get(&row.order_id) {
            None => found.push(format!("unexpected  {row}")),
            Some(expected) if expected != row => {
                found.push(format!("differs     {row}\n  expected  {expected}"))
            }
            Some(_) => {}
        }
    }
    found.extend(
        model
            .iter()
            .filter(|(key, _)| !seen.contains_key(key.as_str()))
            .map(|(_, row)| format!("missing     {row}")),
    );
    found
}

/// Panics with the first differences between `table` and `model`.
pub async fn assert_table_equals(client: &Client, table: &str, model: &BTreeMap<String, Order>) {
    let rows = table_rows(client, table).await.expect("the table can be read");
    let found = differences(model, &rows);
    assert!(
        found.is_empty(),
        "{table} has {} rows, the model {}; {} differences:\n{}",
        rows.len(),
        model.len(),
        found.len(),
        found[..found.len().min(10)].join("\n")
    );
}

/// Writes down every row that `table` was given or that was changed, in `<table>_effects`: so a write that takes effect
/// twice is seen even where the row ends the same.
pub fn effects_of(table: &str) -> String {
    let trigger = |event: &str, when: &str| {
        format!(
            "CREATE TRIGGER {table}_{event} AFTER {when} ON {table} REFERENCING NEW TABLE AS fresh \
             FOR EACH STATEMENT EXECUTE FUNCTION {table}_effect();"
        )
    };
    format!(
        "CREATE TABLE {table}_effects (order_id text NOT NULL, updated_at timestamptz NOT NULL); \
         CREATE FUNCTION {table}_effect() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         INSERT INTO {table}_effects SELECT order_id, updated_at FROM fresh; RETURN NULL; END $$; {} {}",
        trigger("inserted", "INSERT"),
        trigger("updated", "UPDATE")
    )
}

/// Panics if a change took effect twice; needs [`effects_of`].
pub async fn assert_each_effect_once(client: &Client, table: &str) {
    let query = format!(
        "SELECT order_id, updated_at::text, count(*) FROM {table}_effects \
         GROUP BY order_id, updated_at HAVING count(*) > 1 ORDER BY order_id LIMIT 10"
    );
    let twice = client.query(&query, &[]).await.expect("the effects can be read");
    let lines = twice
        .iter()
        .map(|row| format!("{} {} {}x", row.get::<_, &str>(0), row.get::<_, &str>(1), row.get::<_, i64>(2)));
    assert!(
        twice.is_empty(),
        "{table}: changes that took effect more than once:\n{}",
        lines.collect::<Vec<_>>().join("\n")
    );
}

/// Waits until `table` equals `model`; panics with the differences once `patience` is over.
pub async fn await_table(client: &Client, table: &str, model: &BTreeMap<String, Order>, patience: Duration) {
    let deadline = Instant::now() + patience;
    let count = format!("SELECT count(*) FROM {table}");
    while Instant::now() < deadline {
        // The count is cheap and differs nearly always; the last changes of rows are seen by the whole comparison only.
        let rows: i64 = client.query_one(&count, &[]).await.map_or(-1, |row| row.get(0));
        if usize::try_from(rows) == Ok(model.len())
            && table_rows(client, table).await.is_ok_and(|rows| differences(model, &rows).is_empty())
        {
            return;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_table_equals(client, table, model).await;
}

/// Now, microseconds since the epoch.
pub fn now_us() -> i64 {
    Timestamp::now().as_microsecond()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::servers::Postgres;

    const UNTIL: i64 = 1_760_000_000_000_000;

    #[test]
    fn a_workload_is_made_of_its_seed_and_has_its_share_of_copies() {
        for mode in [Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer] {
            let one = Workload::generate(mode, 7, 20_000, 20, UNTIL);
            assert_eq!(one.sent, Workload::generate(mode, 7, 20_000, 20, UNTIL).sent);
            assert_ne!(one.sent, Workload::generate(mode, 8, 20_000, 20, UNTIL).sent);
            assert!((15_500..16_500).contains(&one.distinct), "{}", one.distinct);
            assert!(one.sent.iter().all(|change| change.updated_us() <= UNTIL));
            let bytes: usize =
                one.sent.iter().map(|change| change.produced(4).payload.map_or(0, |p| p.len())).sum();
            assert!((180..260).contains(&(bytes / one.sent.len())), "{}", bytes / one.sent.len());
            for change in &one.sent {
                if let Change::Put(order) = change {
                    serde_json::from_str::<serde_json::Value>(&order.json()).unwrap();
                }
            }
        }
        let deletes = Workload::generate(Mode::UpsertIfNewer, 7, 20_000, 20, UNTIL);
        let model = deletes.model();
        let touched: std::collections::BTreeSet<_> = deletes.sent.iter().map(Change::order_id).collect();
        assert!(model.len() > 4000 && model.len() < touched.len(), "{} of {}", model.len(), touched.len());
    }

    fn put(order_id: &str, updated_us: i64) -> Change {
        Change::Put(Order::random(
            &mut StdRng::seed_from_u64(updated_us.cast_unsigned()),
            order_id.into(),
            updated_us,
        ))
    }

    #[test]
    fn models_follow_their_mode() {
        let sent = vec![
            put("a", 5),
            put("a", 3),
            put("a", 5),
            put("b", 1),
            Change::Delete { order_id: "b".into(), updated_us: 2 },
        ];
        let versions = |mode| -> Vec<i64> {
            Workload { mode, sent: sent.clone(), distinct: 4 }
                .model()
                .values()
                .map(|order| order.updated_us)
                .collect()
        };
        assert_eq!(versions(Mode::Insert), [5, 1]);
        assert_eq!(versions(Mode::Upsert), [3], "the copy of 5 after 3 changes nothing");
        assert_eq!(versions(Mode::UpsertIfNewer), [5]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn differences_between_table_and_model_are_found() {
        let client = Postgres::shared().database("differences", &orders_table("orders")).await;
        let workload = Workload::generate(Mode::Insert, 3, 300, 20, UNTIL);
        let mut model = workload.model();
        let json: Vec<String> = model.values().map(Order::json).collect();
        let insert =
            "INSERT INTO orders SELECT * FROM jsonb_populate_recordset(NULL::orders, $1::text::jsonb)";
        client.execute(insert, &[&format!("[{}]", json.join(","))]).await.unwrap();
        assert_table_equals(&client, "orders", &model).await;

        let keys: Vec<String> = model.keys().take(3).cloned().collect();
        client.execute("DELETE FROM orders WHERE order_id = $1", &[&keys[0]]).await.unwrap();
        client
            .execute("UPDATE orders SET amount = amount + 0.0001 WHERE order_id = $1", &[&keys[1]])
            .await
            .unwrap();
        model.remove(&keys[2]);
        let found = differences(&model, &table_rows(&client, "orders").await.unwrap());
        let words: Vec<&str> = found.iter().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(words, ["differs", "unexpected", "missing"]);
    }
}
