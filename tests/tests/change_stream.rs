//! Change streams as Debezium's Postgres connector sends them, through Kafka into Postgres: a snapshot with transactions open around
//! it, changes, deletes with their tombstones, connector restarts that send the last changes again, copies long after, and records
//! out of order; the gateway is killed meanwhile. The table equals the model of the source, row for row.

use std::{
    collections::BTreeMap,
    fmt::Write,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use oncegate_tests::{
    eventually,
    gateway::Gateway,
    servers::{Kafka, Postgres, Produced},
};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};
use tokio_postgres::Client;

const ROWS: i64 = 2_000;
const CHANGES: usize = 20_000;
const KILLS: usize = 6;
/// A restart sends so many of the last changes again.
const RESENT: usize = 300;
/// Records that lie so close to each other may change places.
const DISORDER: usize = 40;
const SNAPSHOT_LSN: u64 = 5_000_000;

/// One row as the source has it.
#[derive(Clone, Debug, PartialEq)]
struct Customer {
    name: String,
    cents: i64,
    at_us: i64,
}

/// One event: what the source's log says at a position.
#[derive(Clone, Debug)]
struct Event {
    id: i64,
    op: char,
    lsn: u64,
    row: Option<Customer>,
}

impl Event {
    /// As the sink compares them: streamed changes win against a snapshot.
    fn version(&self) -> (bool, u64) {
        (self.op != 'r', self.lsn)
    }
}

/// How events are written.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    WithSchema,
    Flat,
}

fn values(id: i64, row: Option<&Customer>) -> String {
    let Some(row) = row else { return format!(r#""id":{id},"name":null,"price":null,"at":null"#) };
    let bytes = row.cents.to_be_bytes();
    format!(r#""id":{id},"name":"{}","price":"{}","at":{}"#, row.name, STANDARD.encode(bytes), row.at_us)
}

impl Form {
    fn payload(self, topic: &str, event: &Event, sent_ms: u64) -> String {
        let Event { id, op, lsn, row } = event;
        let table = topic.rsplit('.').next().expect("a table");
        let snapshot = if *op == 'r' { "true" } else { "false" };
        if self == Form::Flat {
            let deleted = *op == 'd';
            return format!(
                r#"{{{},"__op":"{op}","__table":"{table}","__lsn":{lsn},"__source_ts_ms":1,"__ts_ms":{sent_ms},"__snapshot":"{snapshot}","__deleted":"{deleted}"}}"#,
                values(*id, row.as_ref())
            );
        }
        let image = |row: Option<&Customer>| format!("{{{}}}", values(*id, row));
        let (before, after) = match op {
            'd' => (image(None), "null".to_owned()),
            _ => ("null".to_owned(), image(row.as_ref())),
        };
        let fields = r#"[{"type":"int64","optional":false,"field":"id"},{"type":"string","optional":true,"field":"name"},{"type":"bytes","optional":true,"name":"org.apache.kafka.connect.data.Decimal","version":1,"parameters":{"scale":"2","connect.decimal.precision":"18"},"field":"price"},{"type":"int64","optional":true,"name":"io.debezium.time.MicroTimestamp","version":1,"field":"at"}]"#;
        let side = |name: &str| {
            format!(
                r#"{{"type":"struct","fields":{fields},"optional":true,"name":"{topic}.Value","field":"{name}"}}"#
            )
        };
        format!(
            r#"{{"schema":{{"type":"struct","fields":[{},{}],"optional":false,"name":"{topic}.Envelope"}},"payload":{{"before":{before},"after":{after},"source":{{"version":"3.0.0.Final","connector":"postgresql","name":"shop","ts_ms":1,"snapshot":"{snapshot}","db":"shop","sequence":"[null,\"{lsn}\"]","schema":"public","table":"{table}","txId":1,"lsn":{lsn},"xmin":null}},"transaction":null,"op":"{op}","ts_ms":{sent_ms}}}}}"#,
            side("before"),
            side("after")
        )
    }

    fn key(self, topic: &str, id: i64) -> Vec<u8> {
        match self {
            Form::Flat => format!(r#"{{"id":{id}}}"#),
            Form::WithSchema => format!(
                r#"{{"schema":{{"type":"struct","fields":[{{"type":"int64","optional":false,"field":"id"}}],"optional":false,"name":"{topic}.Key"}},"payload":{{"id":{id}}}}}"#
            ),
        }
        .into_bytes()
    }
}

/// The source's history: a snapshot, and changes some of which belong to transactions that were open around it.
fn history(random: &mut StdRng) -> Vec<Event> {
    let mut events = Vec::new();
    let row = |random: &mut StdRng, n: usize| Customer {
        name: format!("n{n}"),
        cents: random.random_range(-9_000_000_000_000_000..9_000_000_000_000_000),
        at_us: random.random_range(-1_000_000_000_000_000..4_000_000_000_000_000),
    };
    let snapshot =
        |id: i64, random: &mut StdRng| Event { id, op: 'r', lsn: SNAPSHOT_LSN, row: Some(row(random, 0)) };
    events.extend((0..ROWS / 2).map(|id| snapshot(id, random)));
    let mut alive: Vec<bool> = (0..ROWS).map(|id| id < ROWS / 2).collect();
    let mut open_lsn = SNAPSHOT_LSN - 1_000_000;
    let mut lsn = SNAPSHOT_LSN;
    for n in 1..=CHANGES {
        let id = random.random_range(0..ROWS);
        // The first changes began before the snapshot was taken, and were committed after it.
        let lsn = match n {
            ..500 => &mut open_lsn,
            _ => &mut lsn,
        };
        *lsn += random.random_range(1..200);
        let there = &mut alive[usize::try_from(id).expect("small")];
        let (op, after) = match (*there, random.random_range(0..4)) {
            (true, 0) => ('d', None),
            (true, _) => ('u', Some(row(random, n))),
            (false, _) => ('c', Some(row(random, n))),
        };
        *there = op != 'd';
        events.push(Event { id, op, lsn: *lsn, row: after });
    }
    events
}

fn model(events: &[Event]) -> BTreeMap<i64, Customer> {
    let mut newest: BTreeMap<i64, &Event> = BTreeMap::new();
    for event in events {
        let known = newest.entry(event.id).or_insert(event);
        if event.version() > known.version() {
            *known = event;
        }
    }
    newest.into_iter().filter_map(|(id, event)| Some((id, event.row.clone()?))).collect()
}

/// What the topic holds: the history with what goes wrong on its way.
fn sent(form: Form, topic: &str, events: &[Event], random: &mut StdRng) -> Vec<Produced> {
    let mut order: Vec<Option<&Event>> = Vec::new();
    for (at, event) in events.iter().enumerate() {
        order.push(Some(event));
        if at % 4_000 == 3_999 {
            order.extend(events[at.saturating_sub(RESENT)..=at].iter().map(Some));
        }
        if random.random_range(0..20) == 0 {
            order.push(Some(&events[random.random_range(0..=at)]));
        }
    }
    for window in order.chunks_mut(DISORDER) {
        window.shuffle(random);
    }
    let mut records = Vec::new();
    for (at, event) in order.into_iter().flatten().enumerate() {
        let record = |payload: Option<String>| Produced {
            partition: 0,
            key: Some(form.key(topic, event.id)),
            payload: payload.map(String::into_bytes),
            ..Produced::default()
        };
        records.push(record(Some(form.payload(topic, event, 1_700_000_000_000 + at as u64))));
        if event.op == 'd' && form == Form::WithSchema {
            records.push(record(None));
        }
    }
    records
}

async fn table(client: &Client, table: &str) -> BTreeMap<i64, Customer> {
    let query = format!(
        "SELECT id, name, (price * 100)::bigint, (extract(epoch FROM at) * 1000000)::bigint FROM {table}"
    );
    let rows = client.query(&query, &[]).await.expect("the table can be read");
    let row = |row: &tokio_postgres::Row| {
        (row.get(0), Customer { name: row.get(1), cents: row.get(2), at_us: row.get(3) })
    };
    rows.iter().map(row).collect()
}

fn config(url: &str, brokers: &str, name: &str, format: &str) -> String {
    format!(
        "[sinks.{name}]\ntype = \"postgres\"\nurl = \"{url}\"\ntable = \"public.{name}\"\nmode = \"upsert-if-newer\"\n\
         row_key = [\"id\"]\nversion = \"version\"\n\
         [routes.{name}]\nsink = \"{name}\"\n\
         [routes.{name}.format]\n{format}\n\
         [routes.{name}.kafka]\nbrokers = \"{brokers}\"\ntopics = [\"shop.public.{name}\"]\ngroup = \"{name}\"\ninstance = \"one\"\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_stream_ends_in_its_source_through_restarts_copies_and_disorder() {
    let (kafka, postgres) = (Kafka::shared(), Postgres::shared());
    let forms = [
        ("enveloped", Form::WithSchema, "type = \"debezium\""),
        (
            "flattened",
            Form::Flat,
            "type = \"debezium-flat\"\ntypes = { price = { name = \"org.apache.kafka.connect.data.Decimal\", scale = 2 }, \
             at = \"io.debezium.time.MicroTimestamp\" }",
        ),
    ];
    let mut ddl = String::new();
    for ((name, ..), version) in forms.iter().zip(["text COLLATE \"C\"", "numeric"]) {
        write!(
            ddl,
            "CREATE TABLE {name} (id bigint PRIMARY KEY, name text, price numeric(18,2), at timestamp, version {version} NOT NULL);"
        )
        .expect("text can be written to");
    }
    let client = postgres.database("change_stream", &ddl).await;
    let url = postgres.url("change_stream");
    let mut toml = String::new();
    let mut courses = Vec::new();
    for (seed, (name, form, format)) in (31..).zip(forms) {
        let topic = format!("shop.public.{name}");
        kafka.topic(&topic, 1).await;
        toml += &config(&url, &kafka.brokers(), name, format);
        let mut random = StdRng::seed_from_u64(seed);
        let events = history(&mut random);
        let records = sent(form, &topic, &events, &mut random);
        courses.push((name, topic, model(&events), records));
    }
    let mut gateway = Gateway::new(&toml);
    gateway.start().await;
    let begun = Instant::now();
    for round in 0..KILLS {
        for (_, topic, _, records) in &courses {
            let (from, to) = (records.len() * round / KILLS, records.len() * (round + 1) / KILLS);
            kafka.produce(topic, records[from..to].iter().cloned());
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        gateway.kill();
        gateway.spawn();
    }
    gateway.ready(Duration::from_secs(60)).await;
    for (name, _, model, _) in &courses {
        eventually(&format!("{name} equals its source"), Duration::from_secs(120), async || {
            let found = table(&client, name).await;
            let differ = model.iter().filter(|(id, row)| found.get(id) != Some(row)).count();
            let extra = found.keys().filter(|id| !model.contains_key(id)).count();
            match (differ, extra) {
                (0, 0) => Ok(()),
                _ => Err(format!("{differ} rows differ, {extra} should be gone")),
            }
        })
        .await;
    }
    let letters = client.query_one("SELECT count(*) FROM oncegate_dead_letters", &[]).await.expect("a count");
    assert_eq!(letters.get::<_, i64>(0), 0);
    println!(
        "{} records within {:?}",
        courses.iter().map(|course| course.3.len()).sum::<usize>(),
        begun.elapsed()
    );
    what_names_no_row_goes_to_the_dead_letters(kafka, &client).await;
}

/// A truncate, another table's change, and an envelope without its row cost one outcome each; what follows is written.
async fn what_names_no_row_goes_to_the_dead_letters(kafka: &Kafka, client: &Client) {
    let topic = "shop.public.enveloped";
    let row = Customer { name: "after".into(), cents: 1, at_us: 0 };
    let good = Event { id: 999_999, op: 'c', lsn: u64::MAX / 2, row: Some(row.clone()) };
    let payload = |event: &Event, topic: &str| Form::WithSchema.payload(topic, event, 1);
    let bad = [
        payload(&Event { op: 't', ..good.clone() }, topic),
        payload(&good, "shop.public.other"),
        payload(&good, topic).replace("\"after\":{", "\"afterwards\":{"),
    ];
    let record = |payload: String| Produced {
        key: Some(Form::WithSchema.key(topic, good.id)),
        payload: Some(payload.into_bytes()),
        ..Produced::default()
    };
    kafka.produce(topic, bad.into_iter().chain([payload(&good, topic)]).map(record));
    eventually("the record behind the bad ones", Duration::from_secs(30), async || {
        table(client, "enveloped")
            .await
            .get(&999_999)
            .filter(|found| **found == row)
            .map(drop)
            .ok_or("not there")
    })
    .await;
    let letters = client
        .query("SELECT reason FROM oncegate_dead_letters ORDER BY position", &[])
        .await
        .expect("letters");
    let reasons: Vec<String> = letters.iter().map(|row| row.get(0)).collect();
    assert_eq!(reasons.len(), 3, "{reasons:?}");
    for (reason, says) in
        reasons.iter().zip(["truncates a whole table", "public.other", "\"after\" is missing"])
    {
        assert!(reason.contains(says), "{reason}");
    }
}
