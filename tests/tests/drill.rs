//! `oncegate drill` against tables like a user's: what it proves, what it finds, what it refuses, and that it leaves nothing behind.

use std::{
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use oncegate_tests::{
    eventually,
    gateway::binary,
    servers::{Clickhouse, Postgres, Redis},
};
use rusqlite::Connection;
use serde_json::Value;
use tempfile::TempDir;

/// Runs a drill in `folder`, which holds `oncegate.toml`; its temporary files go there too.
fn command(folder: &Path, arguments: &[&str]) -> Command {
    let temporary = folder.join("temporary");
    fs::create_dir_all(&temporary).expect("the folder can be written");
    let mut command = Command::new(binary());
    command.arg("drill").args(arguments).current_dir(folder).env("TMPDIR", &temporary).stdin(Stdio::null());
    command
}

fn drill(folder: &Path, arguments: &[&str]) -> Output {
    command(folder, arguments).output().expect("the program starts")
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|fault| panic!("{fault}: {}", said(output)))
}

fn count(report: &Value, fault: &str) -> u64 {
    let all = report["faults"].as_array().expect("a list");
    all.iter()
        .filter(|entry| entry["fault"].as_str().is_some_and(|word| word.starts_with(fault)))
        .map(|entry| entry["struck"].as_u64().unwrap_or_default())
        .sum()
}

/// All held, through so many kills and at least a pause, with copies that were told apart.
fn assert_held(output: &Output, kills: u64) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", said(output));
    let report = report(output);
    assert_eq!(report["held"], true, "{report:#}");
    assert_eq!(report["left"], Value::Array(vec![]), "{report:#}");
    assert_eq!(count(&report, "kill"), kills, "{report:#}");
    assert!(count(&report, "pause") >= 1, "{report:#}");
    assert!(report["events"].as_u64() > Some(100), "{report:#}");
    assert_eq!(report["events"], report["acknowledged"], "{report:#}");
    assert_eq!(report["rows"], report["rows_found"], "{report:#}");
    assert!(report["outcomes"]["duplicate"].as_u64() >= Some(100), "{report:#}");
    report
}

fn nothing_temporary(folder: &Path) {
    let left: Vec<_> = fs::read_dir(folder.join("temporary")).expect("a folder").collect();
    assert!(left.is_empty(), "{left:?}");
}

const SQLITE: &str = r#"
[sinks.orders]
type = "sqlite"
path = "shop.db"
table = "orders"
mode = "upsert"
row_key = ["order_id"]

[routes.orders]
sink = "orders"
key = ["/order_id", "/changed_at"]
event_time = "/changed_at"
http = { bearer = "a-token-of-the-real-route" }
"#;

fn sqlite_shop() -> (TempDir, Connection) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("oncegate.toml"), SQLITE).expect("the folder can be written");
    let connection = Connection::open(folder.path().join("shop.db")).expect("a file");
    let ddl = "CREATE TABLE orders (order_id TEXT PRIMARY KEY, paid BOOLEAN NOT NULL, amount DECIMAL(10,2), weight REAL, \
               picture BLOB, meta JSON, changed_at TIMESTAMP NOT NULL, note VARCHAR(30)) WITHOUT ROWID; \
               CREATE INDEX by_time ON orders (changed_at)";
    connection.execute_batch(ddl).expect("the DDL is right");
    (folder, connection)
}

fn names(connection: &Connection) -> Vec<String> {
    // SQLite's own tables cannot be dropped, those that gateways use are not.
    let query = "SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite%' AND name NOT LIKE 'oncegate%' ORDER BY name";
    let mut statement = connection.prepare(query).expect("a file");
    let names = statement.query_map([], |row| row.get(0)).expect("names");
    names.collect::<Result<_, _>>().expect("names")
}

#[test]
fn a_drill_on_sqlite_holds_through_kills_and_a_pause_and_leaves_nothing_behind() {
    let (folder, connection) = sqlite_shop();
    let before = names(&connection);
    let output = drill(folder.path(), &["--kills", "3", "--seed", "5", "--format", "json"]);
    let report = assert_held(&output, 3);
    assert_eq!(count(&report, "cut"), 0, "{report:#}");
    assert_eq!(names(&connection), before);
    let mode: String = connection.query_row("PRAGMA journal_mode", [], |row| row.get(0)).expect("a mode");
    assert_eq!(mode, "delete");
    nothing_temporary(folder.path());
}

#[test]
fn a_drill_that_is_asked_to_end_compares_what_it_sent_and_cleans_up() {
    let (folder, connection) = sqlite_shop();
    let before = names(&connection);
    let mut command = command(folder.path(), &["--minutes", "5", "--format", "json"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let rows = "SELECT count(*) FROM orders_oncegate_drill";
    let deadline = Instant::now() + Duration::from_secs(30);
    while connection.query_row(rows, [], |row| row.get::<_, u64>(0)).unwrap_or_default() < 50 {
        assert!(Instant::now() < deadline, "no rows in the shadow");
        std::thread::sleep(Duration::from_millis(20));
    }
    let asked = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(asked.is_ok_and(|status| status.success()));
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let report = report(&output);
    assert_eq!(
        (&report["interrupted"], &report["held"]),
        (&Value::from(true), &Value::from(true)),
        "{report:#}"
    );
    assert_eq!(names(&connection), before);
    nothing_temporary(folder.path());
}

#[test]
fn what_cannot_be_drilled_is_refused_with_the_reason() {
    let (folder, connection) = sqlite_shop();
    let refused = |arguments: &[&str], words: &[&str]| {
        let output = drill(folder.path(), arguments);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    };
    refused(&["--kills", "0"], &["--kills"]);
    refused(&["--route", "clicks"], &["no route \"clicks\"", "orders"]);
    connection
        .execute("INSERT INTO orders VALUES ('a', 1, 2, 3.5, NULL, NULL, '2026-01-01T00:00:00Z', NULL)", [])
        .expect("a row");
    refused(&[], &["looks like production", "it has rows", "orders_oncegate_drill", "--yes"]);
    connection.execute("DELETE FROM orders", []).expect("no rows");
    // A rule that made-up records do not meet.
    let ddl = "DROP TABLE orders; CREATE TABLE orders (order_id TEXT PRIMARY KEY, changed_at TIMESTAMP NOT NULL, \
               mood TEXT NOT NULL CHECK (mood IN ('fine', 'sad')))";
    connection.execute_batch(ddl).expect("the DDL is right");
    refused(&[], &["CHECK", "--template"]);
    assert_eq!(names(&connection).iter().filter(|name| name.contains("oncegate")).count(), 0);
    let template = r#"{"order_id":"o-{n}","changed_at":"{time}","mood":"fine"}"#;
    fs::write(folder.path().join("record.json"), template).expect("the folder can be written");
    let arguments = ["--kills", "1", "--template", "record.json", "--format", "json"];
    let output = drill(folder.path(), &arguments);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert_eq!(report(&output)["held"], true);
    nothing_temporary(folder.path());
}

const ORDERS: &str = "
CREATE DOMAIN percent AS smallint CHECK (VALUE BETWEEN 0 AND 100);
CREATE TABLE orders (order_id uuid PRIMARY KEY, user_id bigint NOT NULL, small smallint, amount numeric(12, 3) NOT NULL,
    rate real, exact double precision NOT NULL, code char(8), name varchar(20), paid boolean NOT NULL, picture bytea,
    born date, at time, meta jsonb NOT NULL, plain json, changed_at timestamptz(3) NOT NULL, seen_at timestamp,
    tags text[], discount percent, made timestamptz NOT NULL DEFAULT now(), number bigint GENERATED ALWAYS AS IDENTITY);
CREATE UNIQUE INDEX ON orders (user_id)";

#[tokio::test(flavor = "multi_thread")]
async fn a_drill_on_postgres_holds_finds_what_is_lost_and_leaves_nothing_behind() {
    let postgres = Postgres::shared();
    let client = postgres.database("drill", ORDERS).await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = r#"
[sinks.orders]
type = "postgres"
url = "${SHOP_URL}"
table = "public.orders"
mode = "upsert-if-newer"
row_key = ["order_id"]
version = "changed_at"

[routes.orders]
sink = "orders"
key = ["/order_id", "/changed_at"]
event_time = "/changed_at"
columns = { made = "arrival" }
"#;
    fs::write(folder.path().join("oncegate.toml"), config).expect("the folder can be written");
    let run = |arguments: &[&str]| {
        let mut command = command(folder.path(), arguments);
        command.env("SHOP_URL", postgres.url("drill")).output().expect("the program starts")
    };
    let tables = async || {
        // Those that gateways use stay.
        let query = "SELECT relname::text FROM pg_class
                     WHERE relnamespace = 'public'::regnamespace AND relname NOT LIKE 'oncegate%' ORDER BY 1";
        let rows = client.query(query, &[]).await.expect("Postgres runs");
        rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>()
    };
    let before = tables().await;

    let report = assert_held(&run(&["--kills", "3", "--seed", "2", "--format", "json"]), 3);
    assert!(count(&report, "cut") >= 1, "{report:#}");
    let compared = report["columns"].as_array().expect("a list").len();
    assert_eq!(compared, 16, "{report:#}");
    assert_eq!(tables().await, before);
    for table in ["oncegate_shards", "oncegate_marks", "oncegate_routes"] {
        let query = format!("SELECT count(*) FROM {table}");
        let rows: i64 = client.query_one(&query, &[]).await.expect("the table stays").get(0);
        assert_eq!(rows, 0, "{table}");
    }

    // A row that goes behind the gateway's back is found and named.
    let output = run(&["--kills", "1", "--lose-a-row", "--format", "json"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let violations = &self::report(&output)["violations"];
    assert_eq!(
        (&violations["count"], &violations["by_kind"]["lost"]),
        (&Value::from(1), &Value::from(1)),
        "{violations:#}"
    );
    let lost = &violations["records"][0];
    assert_eq!((&lost["kind"], &lost["found"]), (&Value::from("lost"), &Value::from("no row")), "{lost:#}");
    let key = lost["key"]["order_id"].as_str().expect("the key of the row");
    assert!(lost["expected"].as_str().is_some_and(|row| row.contains(key)), "{lost:#}");
    assert_eq!(tables().await, before);

    // Rows of the real table are left alone, and nobody is drilled beside them unless asked.
    let insert = "INSERT INTO orders (order_id, user_id, amount, exact, paid, meta, changed_at) \
                  VALUES (gen_random_uuid(), 1, 1, 1, true, '{}', now())";
    client.execute(insert, &[]).await.expect("a row");
    let output = run(&[]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    for word in ["looks like production", "public.orders_oncegate_drill", "--yes"] {
        assert!(said(&output).contains(word), "{}", said(&output));
    }
    assert_eq!(tables().await, before);
    eventually("no connection of a drill", Duration::from_secs(10), async || {
        let query = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'drill' AND application_name LIKE 'oncegate%'";
        let open: i64 = client.query_one(query, &[]).await.expect("Postgres runs").get(0);
        if open == 0 { Ok(()) } else { Err(open) }
    })
    .await;
    nothing_temporary(folder.path());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drill_on_clickhouse_holds_and_leaves_nothing_behind() {
    let clickhouse = Clickhouse::shared();
    let columns = "(id String, n UInt64, small Int8, amount Decimal(18, 2), at DateTime64(3, 'UTC'), day Date, note Nullable(String), \
                   kind LowCardinality(String), tags Array(String) DEFAULT [], flag Bool, exact Float64, name UUID) ENGINE = MergeTree \
                   PARTITION BY n % 3 ORDER BY id SETTINGS non_replicated_deduplication_window = 10000";
    let table = clickhouse.table("drilled", columns).await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = format!(
        "[sinks.events]\ntype = \"clickhouse\"\nurl = \"{}\"\ntable = \"{table}\"\njournal = \"journal\"\nrequest_timeout = \"20s\"\n\
         \n[routes.events]\nsink = \"events\"\nkey = \"/id\"\n",
        clickhouse.url()
    );
    fs::write(folder.path().join("oncegate.toml"), config).expect("the folder can be written");
    let output = drill(folder.path(), &["--kills", "3", "--rate", "300", "--format", "json"]);
    let report = assert_held(&output, 3);
    assert!(count(&report, "cut") >= 1, "{report:#}");
    let compared = report["columns"].as_array().expect("a list").len();
    assert_eq!(compared, 11, "{report:#}");
    assert!(!folder.path().join("journal").exists());
    let name = table.rsplit('.').next().unwrap_or_default();
    let left = format!("SELECT count() FROM system.tables WHERE name LIKE '{name}_oncegate%' FORMAT TSV");
    assert_eq!(clickhouse.number(&left).await, 0);
    nothing_temporary(folder.path());
}

#[test]
fn a_drill_on_redis_holds_and_leaves_nothing_behind() {
    let server = Redis::shared();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = format!(
        "[sinks.profiles]\ntype = \"redis\"\nurl = \"{}\"\nprefix = \"profile:\"\nmode = \"upsert-if-newer\"\nrow_key = [\"user_id\"]\n\
         version = \"seen_at\"\ndurability = \"none\"\ncolumns = {{ user_id = \"uuid\", visits = \"integer\", seen_at = \"timestamp\", \
         spent = \"number\", active = \"boolean\", about = \"json\", picture = \"binary\", name = \"text\" }}\n\
         \n[routes.profiles]\nsink = \"profiles\"\nkey = [\"/user_id\", \"/seen_at\"]\nevent_time = \"/seen_at\"\n",
        server.url(9)
    );
    fs::write(folder.path().join("oncegate.toml"), config).expect("the folder can be written");
    server.command(9, &["HSET", "profile:somebody", "name", "else"]).expect("Redis runs");
    let output = drill(folder.path(), &["--kills", "3", "--format", "json"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("drill-of-profile:"), "{}", said(&output));
    let report = assert_held(&drill(folder.path(), &["--kills", "3", "--yes", "--format", "json"]), 3);
    assert!(count(&report, "cut") >= 1, "{report:#}");
    assert_eq!(report["columns"].as_array().map(Vec::len), Some(8), "{report:#}");
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut server.connect(9)).expect("Redis runs");
    let left: Vec<&String> = keys.iter().filter(|key| key.contains("drill")).collect();
    assert!(left.is_empty() && keys.iter().any(|key| key == "profile:somebody"), "{keys:?}");
    nothing_temporary(folder.path());
}

#[test]
fn a_drill_on_files_holds_finds_what_is_lost_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::create_dir(folder.path().join("archive")).expect("the folder can be written");
    let config = "[sinks.archive]\ntype = \"files\"\nfolder = \"archive\"\n\n[routes.archive]\nsink = \"archive\"\nkey = \"/id\"\n";
    fs::write(folder.path().join("oncegate.toml"), config).expect("the folder can be written");
    assert_held(&drill(folder.path(), &["--kills", "3", "--format", "json"]), 3);
    let output = drill(folder.path(), &["--kills", "1", "--lose-a-row"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("VIOLATED: 1 lost"), "{}", said(&output));
    let left: Vec<_> = fs::read_dir(folder.path().join("archive")).expect("a folder").collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!folder.path().join("archive_oncegate_drill").exists());
    nothing_temporary(folder.path());
}
