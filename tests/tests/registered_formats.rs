//! Records in Confluent's wire format through a live Kafka into Postgres, with a stand-in for the schema registry. The records are
//! written by the `apache-avro` crate, which the gateway does not use, and by hand.

use std::{collections::BTreeMap, time::Duration};

use apache_avro::{Schema, types::Value, writer::datum::GenericDatumWriter};
use http::StatusCode;
use oncegate_tests::{
    eventually,
    gateway::Gateway,
    servers::{Kafka, Postgres, Produced, Registry},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio_postgres::Client;

const RECORDS: i64 = 2_000;

fn wire(id: u32, body: &[u8]) -> Vec<u8> {
    [&[0], &id.to_be_bytes()[..], body].concat()
}

fn route(name: &str, sink: &str, url: &str, brokers: &str, format: &str, more: &str) -> String {
    format!(
        "[sinks.{name}]\ntype = \"postgres\"\nurl = \"{url}\"\ntable = \"public.{name}\"\n{sink}\n\
         [routes.{name}]\nsink = \"{name}\"\n{more}\n\
         [routes.{name}.format]\n{format}\n\
         [routes.{name}.kafka]\nbrokers = \"{brokers}\"\ntopics = [\"{name}\"]\ngroup = \"{name}\"\ninstance = \"one\"\n"
    )
}

async fn letters(client: &Client, route: &str) -> Vec<String> {
    let query = "SELECT reason FROM oncegate_dead_letters WHERE route = $1 ORDER BY position";
    let rows = client.query(query, &[&route]).await.expect("the letters can be read");
    rows.iter().map(|row| row.get(0)).collect()
}

const MONEY: &str = r#"{"type":"fixed","name":"Money","namespace":"shop","size":9,"logicalType":"decimal","precision":18,"scale":2}"#;
const ORDER: &str = r#"{"type":"record","name":"Order","namespace":"shop","fields":[
    {"name":"id","type":"long"},
    {"name":"note","type":["null","string"]},
    {"name":"amount","type":"Money"},
    {"name":"at","type":{"type":"long","logicalType":"timestamp-micros"}},
    {"name":"raw","type":"bytes"},
    {"name":"tags","type":{"type":"array","items":"string"}},
    {"name":"ratio","type":"double"}]}"#;

#[derive(Clone, Debug, PartialEq)]
struct Order {
    note: Option<String>,
    cents: i64,
    at_us: i64,
    raw: Vec<u8>,
    tags: Vec<String>,
    ratio: f64,
}

impl Order {
    fn random(random: &mut StdRng) -> Self {
        let word = |random: &mut StdRng| format!("é\"{}", random.random_range(0..1_000));
        Self {
            note: random.random_bool(0.7).then(|| word(random)),
            cents: random.random_range(-900_000_000_000_000_000..900_000_000_000_000_000),
            at_us: random.random_range(-60_000_000_000_000_000..200_000_000_000_000_000),
            raw: (0..random.random_range(0..40)).map(|_| random.random()).collect(),
            tags: (0..random.random_range(0..4)).map(|_| word(random)).collect(),
            ratio: random.random_range(-1e12..1e12),
        }
    }

    fn avro(&self, id: i64, schema: &Schema) -> Vec<u8> {
        let cents = i128::from(self.cents).to_be_bytes()[7..].to_vec();
        let note = match &self.note {
            Some(note) => Value::Union(1, Box::new(Value::String(note.clone()))),
            None => Value::Union(0, Box::new(Value::Null)),
        };
        let fields = [
            ("id", Value::Long(id)),
            ("note", note),
            ("amount", Value::Decimal(cents.into())),
            ("at", Value::TimestampMicros(self.at_us)),
            ("raw", Value::Bytes(self.raw.clone())),
            ("tags", Value::Array(self.tags.iter().cloned().map(Value::String).collect())),
            ("ratio", Value::Double(self.ratio)),
        ];
        let record =
            Value::Record(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect());
        datum(schema, record)
    }
}

async fn orders(client: &Client) -> BTreeMap<i64, Order> {
    let query = "SELECT id, note, (amount * 100)::bigint, (extract(epoch FROM at) * 1000000)::bigint, raw, tags, ratio FROM orders";
    let rows = client.query(query, &[]).await.expect("the table can be read");
    let order = |row: &tokio_postgres::Row| Order {
        note: row.get(1),
        cents: row.get(2),
        at_us: row.get(3),
        raw: row.get(4),
        tags: row.get(5),
        ratio: row.get(6),
    };
    rows.iter().map(|row| (row.get(0), order(row))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn avro_is_read_exactly_and_waits_for_a_registry_that_does_not_answer() {
    let (kafka, postgres, registry) = (Kafka::shared(), Postgres::shared(), Registry::start().await);
    let ddl = "CREATE TABLE orders (id bigint PRIMARY KEY, note text, amount numeric(18,2), at timestamptz, raw bytea, tags text[], ratio double precision)";
    let client = postgres.database("avro", ddl).await;
    kafka.topic("orders", 2).await;
    let format = format!(
        "type = \"avro\"\nregistry = {{ url = \"{}\", user = \"me\", password = \"secret\", timeout = \"2s\" }}",
        registry.url()
    );
    let toml = route(
        "orders",
        "row_key = [\"id\"]",
        &postgres.url("avro"),
        &kafka.brokers(),
        &format,
        "key = \"/id\"",
    );
    registry.protect("Basic bWU6c2VjcmV0");
    registry.fail(Some((StatusCode::SERVICE_UNAVAILABLE, "")));
    registry.register(7, "AVRO", ORDER, &[("shop.Money", "shop/money")]);
    registry.subject("shop%2Fmoney", "AVRO", MONEY, &[]);
    // The writer has the one inside the other.
    let schema = Schema::parse_str(&ORDER.replace("\"Money\"", MONEY)).expect("a good schema");
    let mut random = StdRng::seed_from_u64(41);
    let model: BTreeMap<i64, Order> = (0..RECORDS).map(|id| (id, Order::random(&mut random))).collect();
    let produced = |id: i64, payload: Vec<u8>| Produced {
        partition: (id % 2) as i32,
        payload: Some(payload),
        ..Produced::default()
    };
    let good: Vec<Produced> =
        model.iter().map(|(id, order)| produced(*id, wire(7, &order.avro(*id, &schema)))).collect();
    kafka.produce("orders", good.iter().take(1_500).cloned());
    let mut gateway = Gateway::new(&toml);
    gateway.spawn();
    gateway.logged(&["waits for a schema", "503"], Duration::from_secs(60)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(orders(&client).await.len(), 0);
    assert_eq!(
        letters(&client, "orders").await,
        Vec::<String>::new(),
        "no record is refused for a registry that is away"
    );
    registry.fail(None);
    gateway.ready(Duration::from_secs(60)).await;

    // What is damaged costs one outcome each; what comes behind it is written.
    let one = wire(7, &model[&0].avro(0, &schema));
    let huge = [&wire(7, &[0])[..], &[2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]].concat();
    let bad = [
        (one[..one.len() - 3].to_vec(), "bytes are wanted"),
        (b"{\"id\":1}".to_vec(), "magic byte 0"),
        (vec![0, 0, 0], "3 bytes"),
        (wire(4_242, &one[5..]), "schema 4242"),
        (huge, "field note"),
        ([&one[..], &[0]].concat(), "left behind"),
    ];
    kafka.produce("orders", bad.iter().map(|(payload, _)| produced(0, payload.clone())));
    kafka.produce("orders", good.iter().skip(1_500).cloned());
    kafka.produce("orders", good.iter().take(100).cloned());
    eventually("the table equals what was written", Duration::from_secs(90), async || {
        let found = orders(&client).await;
        if found == model { Ok(()) } else { Err(format!("{} rows, want {}", found.len(), model.len())) }
    })
    .await;
    let reasons = letters(&client, "orders").await;
    assert_eq!(reasons.len(), bad.len(), "{reasons:?}");
    for (reason, (_, says)) in reasons.iter().zip(&bad) {
        assert!(reason.contains(says), "{says}: {reason}");
    }
    assert_eq!(registry.asked("/subjects/shop%2Fmoney/versions/1"), 1);
}

const KEY: &str = r#"{"type":"record","name":"Key","namespace":"shop.public.customers","fields":[{"name":"id","type":"long"}],"connect.name":"shop.public.customers.Key"}"#;

/// As Confluent's Avro converter writes the schema of Debezium's envelope.
const ENVELOPE: &str = r#"{"type":"record","name":"Envelope","namespace":"shop.public.customers","fields":[
    {"name":"before","type":["null",{"type":"record","name":"Value","fields":[
        {"name":"id","type":"long"},
        {"name":"credit","type":["null",{"type":"bytes","scale":2,"precision":64,"connect.version":1,"connect.parameters":{"scale":"2","connect.decimal.precision":"10"},"connect.name":"org.apache.kafka.connect.data.Decimal","logicalType":"decimal"}],"default":null},
        {"name":"at","type":["null",{"type":"long","connect.version":1,"connect.name":"io.debezium.time.MicroTimestamp"}],"default":null}],"connect.name":"shop.public.customers.Value"}],"default":null},
    {"name":"after","type":["null","Value"],"default":null},
    {"name":"source","type":{"type":"record","name":"Source","namespace":"io.debezium.connector.postgresql","fields":[
        {"name":"connector","type":"string"},{"name":"name","type":"string"},{"name":"ts_ms","type":"long"},
        {"name":"snapshot","type":[{"type":"string","connect.version":1,"connect.parameters":{"allowed":"true,last,false,incremental"},"connect.default":"false","connect.name":"io.debezium.data.Enum"},"null"],"default":"false"},
        {"name":"db","type":"string"},{"name":"schema","type":"string"},{"name":"table","type":"string"},
        {"name":"lsn","type":["null","long"],"default":null}]}},
    {"name":"op","type":"string"},
    {"name":"ts_ms","type":["null","long"],"default":null}],"connect.name":"shop.public.customers.Envelope"}"#;

fn datum(schema: &Schema, value: Value) -> Vec<u8> {
    let writer = GenericDatumWriter::builder(schema).build().expect("a writer");
    writer.write_value_to_vec(value).expect("the value fits its schema")
}

fn event(schema: &Schema, op: &str, id: i64, lsn: i64, credit: Option<i64>) -> Vec<u8> {
    let some = |value: Value| Value::Union(1, Box::new(value));
    let none = || Value::Union(0, Box::new(Value::Null));
    let record = |fields: Vec<(&str, Value)>| {
        Value::Record(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    };
    let image = |credit: Option<i64>| {
        some(record(vec![
            ("id", Value::Long(id)),
            (
                "credit",
                credit.map_or_else(none, |cents| some(Value::Decimal(cents.to_be_bytes().to_vec().into()))),
            ),
            ("at", credit.map_or_else(none, |cents| some(Value::Long(cents)))),
        ]))
    };
    let (before, after) = if op == "d" { (image(None), none()) } else { (none(), image(credit)) };
    let text = |text: &str| Value::String(text.to_owned());
    let snapshot = Value::Union(0, Box::new(text(if op == "r" { "true" } else { "false" })));
    let source = record(vec![
        ("connector", text("postgresql")),
        ("name", text("shop")),
        ("ts_ms", Value::Long(1)),
        ("snapshot", snapshot),
        ("db", text("shop")),
        ("schema", text("public")),
        ("table", text("customers")),
        ("lsn", some(Value::Long(lsn))),
    ]);
    let event = record(vec![
        ("before", before),
        ("after", after),
        ("source", source),
        ("op", text(op)),
        ("ts_ms", some(Value::Long(lsn))),
    ]);
    datum(schema, event)
}

#[tokio::test(flavor = "multi_thread")]
async fn debeziums_events_in_avro_end_in_the_newest_rows() {
    let (kafka, postgres, registry) = (Kafka::shared(), Postgres::shared(), Registry::start().await);
    let ddl = "CREATE TABLE customers (id bigint PRIMARY KEY, credit numeric(18,2), at timestamp, version numeric NOT NULL)";
    let client = postgres.database("avro_changes", ddl).await;
    kafka.topic("customers", 1).await;
    registry.register(1, "AVRO", KEY, &[]);
    registry.register(2, "AVRO", ENVELOPE, &[]);
    let format =
        format!("type = \"debezium\"\nencoding = \"avro\"\nregistry = {{ url = \"{}\" }}", registry.url());
    let sink = "mode = \"upsert-if-newer\"\nrow_key = [\"id\"]\nversion = \"version\"";
    let toml = route("customers", sink, &postgres.url("avro_changes"), &kafka.brokers(), &format, "");
    let (key, envelope) =
        (Schema::parse_str(KEY).expect("a schema"), Schema::parse_str(ENVELOPE).expect("a schema"));
    let record = |op: &str, id: i64, lsn: i64, credit: Option<i64>| Produced {
        key: Some(wire(1, &datum(&key, Value::Record(vec![("id".to_owned(), Value::Long(id))])))),
        payload: (!op.is_empty()).then(|| wire(2, &event(&envelope, op, id, lsn, credit))),
        ..Produced::default()
    };
    kafka.produce(
        "customers",
        [
            record("r", 1, 500, Some(100)),
            record("u", 1, 400, Some(-12_345)),
            record("c", 2, 600, Some(1)),
            record("d", 2, 700, None),
            record("", 2, 0, None),
            record("c", 2, 600, Some(1)),
            record("u", 2, 650, Some(2)),
            record("u", 3, 800, Some(9_000_000_000_000_001)),
            record("u", 3, 790, Some(3)),
        ],
    );
    let mut gateway = Gateway::new(&toml);
    gateway.start().await;
    let rows = async || {
        let query = "SELECT id || ' ' || credit || ' ' || at FROM customers ORDER BY id";
        let rows = client.query(query, &[]).await.expect("the table can be read");
        rows.iter().map(|row| row.get(0)).collect::<Vec<String>>()
    };
    let wanted = ["1 -123.45 1969-12-31 23:59:59.987655", "3 90000000000000.01 2255-03-14 16:00:00.000001"];
    eventually("the newest rows", Duration::from_secs(60), async || {
        let found = rows().await;
        if found == wanted { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
    // Everything has its outcome: nothing comes after that changes the table.
    eventually("all outcomes", Duration::from_secs(30), async || {
        match gateway.metric("oncegate_records_total", &[]).await {
            Some(9.0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    assert_eq!(rows().await, wanted);
    assert_eq!(letters(&client, "customers").await, Vec::<String>::new());
}

const PROTO: &str = r#"syntax = "proto3"; package shop; import "money.proto"; import "google/protobuf/timestamp.proto";
    message Ignored {}
    message Payment { int64 id = 1; optional string note = 2; Money money = 3; google.protobuf.Timestamp at = 4; bytes raw = 5; }"#;
const PROTO_MONEY: &str = r#"syntax = "proto3"; package shop; message Money { sint64 cents = 1; }"#;

/// A payment as Protobuf's wire format has it: field numbers, types and lengths written by hand.
fn payment(id: i64, cents: i64) -> Vec<u8> {
    let varint = |mut rest: u64| {
        let mut bytes = Vec::new();
        while rest > 0x7f {
            bytes.push(u8::try_from(rest & 0x7f).expect("7 bits") | 0x80);
            rest >>= 7;
        }
        bytes.push(u8::try_from(rest).expect("7 bits"));
        bytes
    };
    let field =
        |number: u64, bytes: &[u8]| [&varint(number << 3 | 2), &varint(bytes.len() as u64), bytes].concat();
    let money = [vec![0x08], varint((cents << 1 ^ cents >> 63).cast_unsigned())].concat();
    let at = [vec![0x08], varint(id.cast_unsigned()), vec![0x10], varint(1_000)].concat();
    let note = if id % 2 == 0 { field(2, format!("é{id}").as_bytes()) } else { vec![] };
    [
        vec![0x08],
        varint(id.cast_unsigned()),
        note,
        field(3, &money),
        field(4, &at),
        field(5, &id.to_be_bytes()),
    ]
    .concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn protobuf_is_read_by_the_message_that_its_indexes_name() {
    let (kafka, postgres, registry) = (Kafka::shared(), Postgres::shared(), Registry::start().await);
    let ddl = "CREATE TABLE payments (id bigint PRIMARY KEY, note text, cents bigint NOT NULL, at timestamptz, raw bytea)";
    let client = postgres.database("protobuf", ddl).await;
    kafka.topic("payments", 1).await;
    registry.register(3, "PROTOBUF", PROTO, &[("money.proto", "money.proto")]);
    registry.subject("money.proto", "PROTOBUF", PROTO_MONEY, &[]);
    registry.register(4, "AVRO", KEY, &[]);
    let format = format!("type = \"protobuf\"\nregistry = {{ url = \"{}\" }}", registry.url());
    let toml = route(
        "payments",
        "row_key = [\"id\"]",
        &postgres.url("protobuf"),
        &kafka.brokers(),
        &format,
        "key = \"/id\"\nunknown_fields = \"ignore\"\ncolumns = { cents = \"/money/cents\" }",
    );
    let produced = |payload: Vec<u8>| Produced { payload: Some(payload), ..Produced::default() };
    let good = |id: i64| produced(wire(3, &[&[2, 2][..], &payment(id, -id)].concat()));
    let bad = [
        (wire(3, &[2, 8]), "index 4 at level 1"),
        (wire(3, &[&[2, 2][..], &payment(1, 1), &[0x78, 1]].concat()), "field number 15"),
        (wire(3, &[&[2, 2][..], &payment(1, 1)[..9]].concat()), "shop.Payment"),
        (wire(4, &[2]), "a schema in Avro"),
    ];
    kafka.produce("payments", (1..500).map(good));
    kafka.produce("payments", bad.iter().map(|(payload, _)| produced(payload.clone())));
    kafka.produce("payments", (400..1_000).map(good));
    let mut gateway = Gateway::new(&toml);
    gateway.start().await;
    let query = "SELECT count(*), count(*) FILTER (WHERE cents = -id AND raw = int8send(id) AND note IS NOT DISTINCT FROM
                 CASE WHEN id % 2 = 0 THEN 'é' || id END AND at = to_timestamp(id) + interval '1 microsecond') FROM payments";
    eventually("every payment, exactly", Duration::from_secs(60), async || {
        let row = client.query_one(query, &[]).await.map_err(|fault| fault.to_string())?;
        let found: (i64, i64) = (row.get(0), row.get(1));
        if found == (999, 999) { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
    let reasons = letters(&client, "payments").await;
    assert_eq!(reasons.len(), bad.len(), "{reasons:?}");
    for (reason, (_, says)) in reasons.iter().zip(&bad) {
        assert!(reason.contains(says), "{says}: {reason}");
    }
}
