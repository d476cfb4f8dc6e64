use std::time::Duration;

use adapters::sink::Mode;
use proptest::prelude::*;

use super::*;
use crate::{
    key::{IdempotencyKey, OnMissing, Part, Pointer},
    lane::{LatePolicy, MismatchPolicy},
    naming::{ColumnSource, Constant, DigestOver, EventTime, TimeUnit, UnknownFields},
};

const EXAMPLE: &str = include_str!("../../../docs/oncegate.example.toml");

fn environment(name: &str) -> Option<String> {
    match name {
        "DATABASE_URL" => Some("postgres://app:hunter2@127.0.0.1:5432/app".into()),
        "REDIS_URL" => Some("redis://app:hunter2@127.0.0.1:6379/0".into()),
        "CLICKHOUSE_PASSWORD" | "STARROCKS_PASSWORD" => Some("hunter3".into()),
        "TOKEN" => Some("0123456789abcdef".into()),
        "NUMBER" => Some("7".into()),
        _ => None,
    }
}

const SINK: &str = "[sinks.s]\ntype = \"sqlite\"\npath = \"x.db\"\ntable = \"t\"\n";

/// A file of one route with `options`, with or without a relay.
fn with_route(options: &str, relay: bool) -> String {
    let kafka = "[routes.r.kafka]\nbrokers = \"b:1\"\ntopics = [\"t\"]\ngroup = \"g\"\n";
    let key = if options.contains("key =") { "" } else { "key = \"/id\"\n" };
    format!("[routes.r]\nsink = \"s\"\n{key}{options}\n{}{SINK}", if relay { kafka } else { "" })
}

fn route(options: &str, relay: bool) -> RouteConfig {
    let mut config =
        load(&with_route(options, relay), environment).unwrap_or_else(|errors| panic!("{errors:#?}"));
    config.routes.remove("r").unwrap()
}

fn errors(text: &str) -> Vec<String> {
    let shown = |error: &ConfigError| format!("{}:{}: {error}", error.line, error.column);
    load(text, environment).expect_err("it has errors").iter().map(shown).collect()
}

/// The only error of a route with `options`.
fn route_error(options: &str, relay: bool) -> String {
    let errors = errors(&with_route(options, relay));
    assert_eq!(errors.len(), 1, "{errors:#?}");
    errors[0].clone()
}

#[test]
#[cfg(all(feature = "kafka", feature = "postgres", feature = "redis"))]
fn the_example_loads_and_shows_the_defaults() {
    let example = load(EXAMPLE, environment).unwrap_or_else(|errors| panic!("{errors:#?}"));
    let orders = &example.routes["orders"];
    assert_eq!(example.sinks["orders"].mode, Mode::UpsertIfNewer);
    assert_eq!(orders.naming.row_key, ["order_id"]);
    assert_eq!((orders.rules.window_ms, orders.rules.lateness_ms), (86_400_000, 3_600_000));
    assert_eq!(orders.relay.as_ref().unwrap().options["session.timeout.ms"], "6000");
    assert_eq!(orders.relay.as_ref().unwrap().options["heartbeat.interval.ms"], "2000");
    assert!(!format!("{example:?}").contains("hunter2"), "no secret is shown");

    // A file that says nothing has what the example says, where that is marked as the default.
    let least = load(&with_route("", false), environment).unwrap();
    assert_eq!(format!("{:?}", least.server), format!("{:?}", example.server));
    assert_eq!(format!("{:?}", least.store), format!("{:?}", example.store));
    assert_eq!(format!("{:?}", least.log), format!("{:?}", example.log));
    let clicks = &example.routes["clicks"];
    assert_eq!(format!("{:?}", least.routes["r"].rules), format!("{:?}", clicks.rules));
    let rules = crate::lane::Rules {
        mode: Mode::UpsertIfNewer,
        lateness_ms: 3_600_000,
        late_relay: LatePolicy::Reject,
        ..clicks.rules.clone()
    };
    assert_eq!(format!("{:?}", orders.rules), format!("{rules:?}"));
    assert_eq!(clicks.http.max_body, orders.http.max_body);
    assert_eq!((orders.lanes, orders.idle_after), (clicks.lanes, clicks.idle_after));
}

#[test]
#[cfg(feature = "kafka")]
fn options_become_typed_rules() {
    let route = route(
        r#"key = ["/a/b", { header = "X-Id" }, { kafka = "key" }, { kafka_header = "h" }, { kafka = "position" }]
           on_missing = "allow"
           idempotency_key = "ignore"
           event_time = "/at"
           time_unit = "us"
           window = "2h"
           lateness = "30m"
           mismatch = "ignore"
           late = "reject"
           digest = ["/x", "/y/0"]
           unknown_fields = "ignore"
           delete_when = "/gone"
           wait = "250ms"
           lanes = 3
           dead_letters = { file = "dead.jsonl" }
           batch.max_records = 5
           batch.linger = "3ms"
           columns = { a = "/x", b = { constant = 1.50 }, c = { constant = true }, d = { constant = "t" }, e = "default",
                       f = { kafka = "topic" }, g = "", h = { constant = -3 } }"#,
        true,
    );
    let pointer = |text| Pointer::parse(text).unwrap();
    assert_eq!(
        route.naming.key.parts(),
        [
            Part::Pointer(pointer("/a/b")),
            Part::Header("X-Id".into()),
            Part::KafkaKey,
            Part::KafkaHeader("h".into()),
            Part::KafkaPosition
        ]
    );
    assert_eq!(
        (route.naming.key.missing(), route.naming.key.explicit()),
        (OnMissing::Allow, IdempotencyKey::Ignore)
    );
    assert_eq!(
        route.naming.event_time,
        EventTime::Pointer { pointer: pointer("/at"), unit: Some(TimeUnit::Micros) }
    );
    assert_eq!(route.naming.digest, DigestOver::Pointers(vec![pointer("/x"), pointer("/y/0")]));
    assert_eq!(route.naming.unknown_fields, UnknownFields::Ignore);
    assert_eq!(route.naming.delete_when.as_ref().unwrap().equals, "true");
    let columns = &route.naming.columns;
    assert_eq!(columns["a"], ColumnSource::Pointer(pointer("/x")));
    assert_eq!(columns["b"], ColumnSource::Constant(Constant::Json("1.50".into())));
    assert_eq!(columns["c"], ColumnSource::Constant(Constant::Json("true".into())));
    assert_eq!(columns["d"], ColumnSource::Constant(Constant::Text("t".into())));
    assert_eq!((&columns["e"], &columns["f"]), (&ColumnSource::Default, &ColumnSource::Topic));
    assert_eq!(columns["g"], ColumnSource::Pointer(pointer("")));
    assert_eq!(columns["h"], ColumnSource::Constant(Constant::Integer(-3)));
    assert_eq!(
        (route.rules.window_ms, route.rules.lateness_ms, route.rules.wait_ms),
        (7_200_000, 1_800_000, 250)
    );
    assert_eq!((route.rules.mismatch, route.rules.late_relay), (MismatchPolicy::Ignore, LatePolicy::Reject));
    assert_eq!((route.rules.max_records, route.rules.max_bytes, route.rules.linger_ms), (5, 16 << 20, 3));
    assert_eq!(route.lanes, Lanes { http: 3, relay: Some(3) });
    assert_eq!(route.dead_letters, DeadLettersTo::File("dead.jsonl".into()));
}

#[test]
fn a_short_window_shortens_the_default_lateness() {
    assert_eq!(route("event_time = \"/t\"\nwindow = \"10m\"", false).rules.lateness_ms, 600_000);
    assert_eq!(route("window = \"10m\"", false).rules.lateness_ms, 0);
}

#[test]
fn all_errors_of_a_file_come_in_one_run_with_their_places() {
    let text = r#"[server]
listen = "localhost"
max_bodyy = "1MiB"

[sinks.s]
type = "sqlite"
path = "x.db"
table = "t"
mode = "upsertt"

[routes.r]
sink = "z"
key = ["id", "/ok"]
window = "0s"
lanes = "two"
mismatch = 5
"#;
    assert_eq!(
        errors(text),
        [
            "2:10: server.listen: is no address (value: \"localhost\"); write IP:PORT, such as \"127.0.0.1:8080\" or \
             \"[::]:8080\", or \"off\"",
            "3:1: server: unknown key \"max_bodyy\"; did you mean `max_body`?",
            "9:8: sinks.s.mode: is none of the choices (value: \"upsertt\"), must be one of \"insert\", \"upsert\", \
             \"upsert-if-newer\"; did you mean \"upsert\"?",
            "12:8: routes.r.sink: is no sink of this file (value: \"z\"); add [sinks.z]",
            "13:8: routes.r.key[0]: is not a JSON pointer: it does not start with `/` (value: \"id\"); write it as \
             \"/member\" or \"/outer/inner\"",
            "14:10: routes.r.window: is out of bounds (value: \"0s\"), must be 1s to 366d; choose a duration within them",
            "15:9: routes.r.lanes: is a string, not a whole number (value: \"two\"); write a whole number",
            "16:12: routes.r.mismatch: is an integer, not one of \"reject\", \"ignore\" (value: 5); write one of \
             \"reject\", \"ignore\"",
        ]
    );
}

#[test]
fn syntax_errors_are_found_together_with_the_rest() {
    let errors = errors(&with_route("window = \nwait = 5\nwait = \"1s\"", false));
    assert!(errors.iter().any(|error| error.contains("not TOML: ")), "{errors:#?}");
    assert!(errors.iter().any(|error| error.contains("routes.r.wait: is an integer")), "{errors:#?}");
    assert!(errors.iter().any(|error| error.contains("duplicate key")), "{errors:#?}");
    assert!(load("", environment).unwrap_err()[0].what.contains("no route"));
}

#[test]
fn rules_that_span_keys_are_checked() {
    for (options, relay, says) in [
        (
            "event_time = \"/t\"\nwindow = \"1h\"\nlateness = \"2h\"",
            false,
            "is longer than the window (value: \"2h\"), must be at most the window, 1h",
        ),
        ("lateness = \"1h\"", false, "has no meaning where the arrival is the event time"),
        ("time_unit = \"ms\"", false, "counts for numbers in the payload only"),
        ("event_time = { kafka = \"timestamp\" }", false, "the route has no relay"),
        ("key = { kafka = \"key\" }", false, "the route has no relay"),
        ("columns = { a = { kafka = \"key\" } }", false, "the route has no relay"),
        ("late = \"verify-in-sink\"", false, "needs a row key"),
        ("gap = \"skip\"", false, "counts for relays only"),
        ("lanes = { relay = 2 }", false, "counts for relays only"),
        ("dead_letters = { topic = \"dead\" }", false, "the route has no brokers"),
        ("dead_letters = \"store\"", true, "is not in this build"),
        ("dead_letters = { topic = \"a\", file = \"b\" }", true, "names neither one topic nor one file"),
        ("dead_letters = \"sinks\"", true, "must be \"sink\", { topic = \"NAME\" }"),
        ("marks = \"indexed\"", false, "\"indexed\" is not in this build"),
        ("key_change = \"dual\"", false, "\"dual\" is not in this build"),
        ("key = { cloudevent = true }", false, "routes.r.key.cloudevent: is not in this build"),
        (
            "key = { debezium = \"position\" }",
            false,
            "comes from a change event, but the route's format has none",
        ),
        ("columns = { a = { debezium = \"op\" } }", false, "comes from a change event"),
        ("event_time = { debezium = \"ts_ms\" }", false, "comes from a change event"),
        ("format = { type = \"debezium\", version = \"lsn\" }", false, "one of \"position\", \"ts_ms\""),
        ("format = { type = \"debezium\", prefix = \"_\" }", false, "unknown key \"prefix\""),
        ("format = { type = \"json\", tables = \"any\" }", false, "unknown key \"tables\""),
        ("format = { type = \"raw\" }", false, "the route has no relay"),
        ("format = { type = \"avr\" }", false, "routes.r.format.type: is none of the choices"),
        ("format = { type = \"avro\", registry = { url = \"http://a\" } }", false, "the route has no relay"),
        ("format = { type = \"avro\" }", true, "`registry` is missing"),
        (
            "format = { type = \"avro\", registry = { url = \"a:8081\" } }",
            true,
            "is no URL of a schema registry (value: ***)",
        ),
        (
            "format = { type = \"avro\", registry = { url = \"http://a\", user = \"me\" } }",
            true,
            "has no password beside it",
        ),
        (
            "format = { type = \"json\", registry = { url = \"http://a\" } }",
            false,
            "unknown key \"registry\"",
        ),
        ("format = { }", false, "`type` is missing"),
        (
            "format = { type = \"debezium\", types = { a = \"io.debezium.Nothing\" } }",
            false,
            "routes.r.format.types.a: is no declared type",
        ),
        (
            "format = { type = \"debezium\", types = { a = \"org.apache.kafka.connect.data.Decimal\" } }",
            false,
            "a Decimal is declared without its scale",
        ),
        ("key = []", false, "a key needs at least one part"),
        ("key = [\"/a\", \"/a\"]", false, "part 2 of the key is there already"),
        ("key = { header = \"a\", content = true }", false, "is no part of a key"),
        ("key = \"/a\"\nidempotency_key = \"require\"", false, "is never used"),
        (
            "unknown_fields = { column = \"x\" }\ncolumns = { x = \"/y\" }",
            false,
            "column \"x\" has a source already",
        ),
        ("columns = { x = \"y\" }", false, "is no source of a column"),
        ("delete_when = { pointer = \"/a\", equals = [1] }", false, "cannot be compared with"),
        (
            "hash_secret = \"00\"",
            false,
            "routes.r.hash_secret: is no hash secret (value: ***), must be 384 hex digits",
        ),
        ("http.bearer = \"short\"", false, "(value: ***), must be 16 or more visible ASCII characters"),
        (
            "http.max_record = \"32MiB\"\nhttp.max_body = \"1MiB\"\nhttp.max_stream = \"2MiB\"",
            false,
            "`max_record` is above both",
        ),
        ("windoww = \"1h\"", false, "unknown key \"windoww\"; did you mean `window`?"),
        ("on-missing = \"allow\"", false, "did you mean `on_missing`?"),
    ] {
        let error = route_error(options, relay && cfg!(feature = "kafka"));
        assert!(error.contains(says), "{options}: {error}");
    }
    let require = errors(&with_route("idempotency_key = \"require\"", true).replace("key = \"/id\"\n", ""));
    assert!(require[0].contains("records of Kafka have none"), "{require:?}");
    let none = errors(&with_route("", false).replace("key = \"/id\"\n", ""));
    assert!(none[0].contains("`key` is missing: nothing names a record; add key ="), "{none:?}");
}

#[test]
fn sinks_are_checked_by_mode() {
    let sink = |lines: &str| format!("[routes.r]\nsink = \"s\"\nkey = \"/id\"\n{SINK}{lines}\n");
    for (lines, says) in [
        ("mode = \"upsert\"", "`row_key` is missing"),
        ("mode = \"upsert\"\nrow_key = []", "names no column"),
        ("mode = \"upsert-if-newer\"\nrow_key = [\"a\"]", "`version` is missing"),
        ("mode = \"upsert\"\nrow_key = [\"a\"]\nversion = \"v\"", "counts in mode \"upsert-if-newer\" only"),
        ("mode = \"upsert-if-newer\"\nrow_key = [\"a\"]\nversion = \"a\"", "is a row key column too"),
        ("row_key = [\"a\", \"a\"]", "is there twice"),
        ("user = \"me\"", "unknown key \"user\""),
    ] {
        let errors = errors(&sink(lines));
        assert!(errors.len() == 1 && errors[0].contains(says), "{lines}: {errors:?}");
    }
    #[cfg(not(feature = "duckdb"))]
    {
        let duckdb = sink("user = \"me\"").replace("sqlite", "duckdb");
        assert!(errors(&duckdb)[0].contains("this build leaves DuckDB out"));
    }
    let memory = sink("").replace("x.db", ":memory:");
    assert!(errors(&memory)[0].contains("is no file"));
    let verify = sink("mode = \"upsert\"\nrow_key = [\"a\"]")
        .replace("key = \"/id\"", "key = \"/id\"\nlate = \"verify-in-sink\"");
    assert!(errors(&verify)[0].contains("does not fit mode \"upsert\""));
}

#[cfg(feature = "stream-load")]
#[test]
fn starrocks_and_doris_sinks_have_front_ends_and_a_journal() {
    use adapters::stream_load::{Dialect, StreamLoadConfig};
    let sink = |lines: &str| {
        let named = "[sinks.s]\ntype = \"doris\"\ntable = \"d.t\"\n";
        format!("[routes.r]\nsink = \"s\"\nkey = \"/id\"\n{named}{lines}\n")
    };
    let read = |text: &str| load(text, environment).unwrap().sinks["s"].stream_load().expect("it is one");
    let one = sink("journal = \"j\"\nurl = \"http://me:hunter2@fe:8030\"");
    let plain = read(&one);
    assert_eq!(plain, StreamLoadConfig::new(Dialect::Doris, "http://me:hunter2@fe:8030", "d.t", "j"));
    assert!(!format!("{plain:?}").contains("hunter2"));
    assert_eq!(read(&one.replace("doris", "starrocks")).dialect, Dialect::StarRocks);
    let full = read(&sink(
        "journal = \"j\"\nurls = [\"http://a:1\", \"https://b\"]\nmode = \"upsert-if-newer\"\nrow_key = [\"a\"]\nversion = \"v\"\n\
         user = \"u\"\npassword = \"p\"\nload = \"two-phase\"\nlabel_keep = \"6h\"\nrequest_timeout = \"5s\"",
    ));
    assert_eq!((full.urls.len(), full.two_phase, full.request_timeout.as_secs()), (2, true, 5));
    assert_eq!(full.label_keep.map(|keep| keep.as_secs()), Some(21_600));
    assert_eq!((full.version.as_deref(), full.user), (Some("v"), Some(("u".to_owned(), "p".to_owned()))));
    for (lines, says) in [
        ("journal = \"j\"", "`url` is missing"),
        ("url = \"http://a\"", "`journal` is missing"),
        ("journal = \"j\"\nurl = \"http://a\"\nurls = [\"http://b\"]", "beside url"),
        ("journal = \"j\"\nurl = \"tcp://a\"", "is no URL of a Doris front-end"),
        ("journal = \"j\"\nurl = \"http://a\"\npassword = \"secret\"", "is of no user"),
        ("journal = \"j\"\nurl = \"http://a\"\nload = \"three-phase\"", "load"),
        ("journal = \"j\"\nurl = \"http://a\"\nlabel_keep = \"5m\"", "label_keep"),
    ] {
        let errors = errors(&sink(lines));
        assert!(errors.len() == 1 && errors[0].contains(says), "{lines}: {errors:?}");
        assert!(!errors[0].contains("secret"), "{errors:?}");
    }
    let short = one.replace("d.t", "t");
    assert!(errors(&short)[0].contains("is not DATABASE.TABLE"), "{:?}", errors(&short));
}

#[cfg(feature = "clickhouse")]
#[test]
fn a_clickhouse_sink_has_a_journal_of_its_own() {
    let sink = |lines: &str| {
        let named =
            "[sinks.s]\ntype = \"clickhouse\"\nurl = \"http://me:hunter2@ch:8123\"\ntable = \"d.t\"\n";
        format!("[routes.r]\nsink = \"s\"\nkey = \"/id\"\n{named}{lines}\n")
    };
    let read =
        |lines: &str| load(&sink(lines), environment).unwrap().sinks["s"].clickhouse().expect("it is one");
    let plain = read("journal = \"j\"");
    assert_eq!(plain, adapters::clickhouse::ClickhouseConfig::new("http://me:hunter2@ch:8123", "d.t", "j"));
    assert!(!format!("{plain:?}").contains("hunter2"));
    let full = read(
        "journal = \"j\"\njournal_max_size = \"2MiB\"\nmode = \"upsert-if-newer\"\nrow_key = [\"a\"]\nversion = \"v\"\n\
         user = \"u\"\npassword = \"p\"\nbatch_column = \"b\"\nviews = \"accept\"\nrequest_timeout = \"5s\"\ncompression = \"none\"",
    );
    assert_eq!(
        (full.journal.max_bytes, full.request_timeout.as_secs(), full.accept_views),
        (2 << 20, 5, true)
    );
    assert_eq!((full.version.as_deref(), full.batch_column.as_deref()), (Some("v"), Some("b")));
    assert_eq!(full.compression, adapters::clickhouse::Compression::None);
    assert_eq!(full.user, Some(("u".to_owned(), "p".to_owned())));
    for (lines, says) in [
        ("", "`journal` is missing"),
        ("journal = \"\"", "is empty"),
        ("journal = \"j\"\npassword = \"secret\"", "is of no user"),
        ("journal = \"j\"\nviews = \"maybe\"", "views"),
        ("journal = \"j\"\nmode = \"upsert-if-newer\"\nrow_key = [\"a\"]", "`version` is missing"),
    ] {
        let errors = errors(&sink(lines));
        assert!(errors.len() == 1 && errors[0].contains(says), "{lines}: {errors:?}");
        assert!(!errors[0].contains("secret"), "{errors:?}");
    }
    let nowhere = sink("journal = \"j\"").replace("http://", "tcp://");
    assert!(errors(&nowhere)[0].contains("is no URL of a ClickHouse server"), "{:?}", errors(&nowhere));
}

#[test]
fn a_files_sink_is_only_appended_to() {
    let sink = |lines: &str| {
        let named = "[sinks.s]\ntype = \"files\"\nfolder = \"out\"\n";
        format!("[routes.r]\nsink = \"s\"\nkey = \"/id\"\n{named}{lines}\n")
    };
    let read = |lines: &str| match load(&sink(lines), environment).unwrap().sinks["s"].target.clone() {
        crate::config::Target::Files(config) => config,
        other => panic!("{other:?}"),
    };
    assert_eq!(read(""), adapters::files::FilesConfig::new("out"));
    let rolled = read("mode = \"insert\"\nroll_size = \"1MiB\"\nroll_rows = 7\nroll_after = \"5m\"");
    assert_eq!((rolled.roll_bytes, rolled.roll_rows, rolled.roll_after.as_secs()), (1 << 20, 7, 300));
    for (lines, says) in [
        ("mode = \"upsert\"", "files are only appended to"),
        ("mode = \"upsert-if-newer\"", "files are only appended to"),
        ("row_key = [\"id\"]", "finds a row that is there"),
        ("version = \"v\"", "finds a row that is there"),
        ("roll_rows = 0", "roll_rows"),
        ("table = \"t\"", "unknown key \"table\""),
    ] {
        let errors = errors(&sink(lines));
        assert!(errors.len() == 1 && errors[0].contains(says), "{lines}: {errors:?}");
    }
    let nameless = sink("").replace("folder = \"out\"", "");
    assert!(errors(&nameless)[0].contains("folder"), "{:?}", errors(&nameless));
    let verify = sink("").replace("key = \"/id\"", "key = \"/id\"\nlate = \"verify-in-sink\"");
    assert!(errors(&verify)[0].contains("no rows to look into"));
    let raw = sink("").replace("key = \"/id\"", "key = { content = true }\nformat = { type = \"raw\" }");
    assert!(errors(&raw).iter().any(|error| error.contains("`format` is not JSON")), "{:?}", errors(&raw));
}

#[cfg(feature = "kafka")]
#[test]
fn a_kafka_sink_is_checked_whole() {
    use adapters::kafka_sink::{KeyFrom, PartitionFrom};
    let sink = |lines: &str| {
        let named = "[sinks.s]\ntype = \"kafka\"\nbrokers = [\"a:1\", \"b:1\"]\ntopic = \"out\"\n";
        format!("[routes.r]\nsink = \"s\"\nkey = \"/id\"\nwindow = \"2h\"\n{named}{lines}\n")
    };
    let read = |lines: &str| {
        let config = load(&sink(lines), environment).unwrap();
        config.sinks["s"].kafka(&config.routes["r"].rules).unwrap()
    };
    let plain = read("");
    assert_eq!(
        (plain.brokers.as_str(), plain.topic.as_str(), plain.key),
        ("a:1,b:1", "out", KeyFrom::Source)
    );
    assert_eq!(plain.keep.as_secs(), 2 * 3600 + 300, "window and max_ahead; by arrival nothing is late");
    let upsert =
        read("mode = \"upsert\"\nrow_key = [\"id\"]\npartition = \"key\"\noptions = { linger.ms = 1 }");
    assert_eq!((upsert.key, upsert.partition), (KeyFrom::RowKey, PartitionFrom::Key));
    assert_eq!(upsert.options["linger.ms"], "1");
    for (lines, says) in [
        ("mode = \"upsert\"", "`row_key` is missing"),
        ("mode = \"upsert-if-newer\"\nrow_key = [\"id\"]", "a topic has no rows"),
        ("key = \"row_key\"", "the sink names none"),
        ("mode = \"upsert\"\nrow_key = [\"id\"]\nkey = \"none\"", "changes no row"),
        ("transactions = false", "not in this build"),
        ("table = \"t\"", "unknown key \"table\""),
        ("marks_topic = \"out\"", "is `topic` too"),
        ("options = { acks = 1 }", "acks: is not passed on"),
        ("transaction_timeout = \"1h\"", "transaction_timeout"),
    ] {
        let errors = errors(&sink(lines));
        assert!(errors.len() == 1 && errors[0].contains(says), "{lines}: {errors:?}");
    }
    let verify =
        sink("row_key = [\"id\"]").replace("key = \"/id\"", "key = \"/id\"\nlate = \"verify-in-sink\"");
    assert!(errors(&verify)[0].contains("has no rows to look into"), "{:?}", errors(&verify));
}

#[test]
#[cfg(feature = "redis")]
fn a_redis_sink_names_its_columns_and_its_row_key() {
    use adapters::redis::{Durability, Kind};
    const COLUMNS: &str = "columns = { id = \"text\", v = \"integer\", n = \"number\" }\n";
    const KEY: &str = "row_key = [\"id\"]\n";
    let sink = |lines: &str| {
        let named = "[sinks.s]\ntype = \"redis\"\nurl = \"redis://u:hunter2@h:1/2\"\nprefix = \"p:\"\n";
        format!("[routes.r]\nsink = \"s\"\nkey = \"/id\"\n{named}{lines}\n")
    };
    let lines = format!(
        "{KEY}{COLUMNS}mode = \"upsert-if-newer\"\nversion = \"v\"\ndurability = \"always\"\nwait_replicas = 2"
    );
    let loaded = load(&sink(&lines), environment).unwrap();
    assert!(!format!("{loaded:?}").contains("hunter2"));
    let crate::config::Target::Redis(config) = loaded.sinks["s"].target.clone() else { panic!("{loaded:?}") };
    assert_eq!((config.mode, config.row_key.as_slice()), (Mode::UpsertIfNewer, &["id".to_owned()][..]));
    assert_eq!((config.durability, config.wait_replicas), (Durability::Always, 2));
    assert!(config.columns.contains(&("n".to_owned(), Kind::Number)));
    for (lines, says) in [
        (COLUMNS.to_owned(), "`row_key` is missing"),
        (KEY.to_owned(), "`columns` is missing"),
        (format!("{KEY}columns = {{ id = \"bigint\" }}"), "\"text\""),
        (format!("{KEY}{COLUMNS}mode = \"upsert-if-newer\""), "`version` is missing"),
        (format!("{KEY}{COLUMNS}mode = \"upsert-if-newer\"\nversion = \"n\""), "no order"),
        (format!("row_key = [\"n\"]\n{COLUMNS}"), "written differently"),
        (format!("row_key = [\"x\"]\n{COLUMNS}"), "none of the columns"),
        (format!("{KEY}{COLUMNS}table = \"t\""), "unknown key \"table\""),
        (format!("{KEY}{COLUMNS}durability = \"sure\""), "\"everysec\""),
        (format!("{KEY}{COLUMNS}max_row_size = \"1B\""), "max_row_size"),
    ] {
        let errors = errors(&sink(&lines));
        assert!(errors.len() == 1 && errors[0].contains(says), "{lines}: {errors:?}");
    }
    let prefix = sink(&format!("{KEY}{COLUMNS}")).replace("\"p:\"", "\"oncegate:\"");
    assert!(errors(&prefix)[0].contains("own keys"), "{:?}", errors(&prefix));
    let url = sink(&format!("{KEY}{COLUMNS}")).replace("redis://u:hunter2@h", "http://u:hunter2@h");
    assert!(errors(&url)[0].contains("neither redis://") && !errors(&url)[0].contains("hunter2"));
    let batch = sink(&format!("{KEY}{COLUMNS}"))
        .replace("key = \"/id\"", "key = \"/id\"\nbatch = { max_records = 50001 }");
    assert!(errors(&batch)[0].contains("50000"), "{:?}", errors(&batch));
    let batch = batch.replace("max_records = 50001", "max_bytes = \"257MiB\"");
    assert!(errors(&batch)[0].contains("256MiB"), "{:?}", errors(&batch));
}

#[test]
fn variables_come_from_the_environment_and_are_not_shown() {
    let file = |listen: &str, rest: &str| {
        format!("[server]\ninstance = {listen}\n{rest}\n{}", with_route("", false))
    };
    let name = |listen: &str| load(&file(listen, ""), environment).unwrap().server.instance.unwrap();
    assert_eq!(name("\"a-${NUMBER}-${NUMBER}\""), "a-7-7");
    assert_eq!(name("\"$${NUMBER} $5 $\""), "${NUMBER} $5 $");
    assert_eq!(
        load(&file("\"i\"", "max_records = \"${NUMBER}\""), environment).unwrap().server.bodies.max_records,
        7
    );
    for (listen, says) in [
        (
            "\"${NOPE}\"",
            "2:12: server.instance: uses variable NOPE, which the environment does not have (value: \"${NOPE}\"); set NOPE",
        ),
        ("\"${NOPE\"", "has `${` without `}`"),
        ("\"${NO PE}\"", "whose name is not letters"),
        ("\"${}\"", "whose name is not letters"),
    ] {
        let errors = errors(&file(listen, ""));
        assert!(errors.len() == 1 && errors[0].contains(says), "{errors:?}");
    }
    let wrong = errors(&with_route("window = \"${TOKEN}\"", false));
    assert!(wrong[0].contains("(value: \"${TOKEN}\")") && !wrong[0].contains("0123"), "{wrong:?}");
}

#[test]
#[cfg(feature = "postgres")]
fn a_connection_string_is_checked_and_never_shown() {
    let text = with_route("", false).replace(
        "type = \"sqlite\"\npath = \"x.db\"",
        "type = \"postgres\"\nurl = \"postgres://u:hunter2@h:port/d\"",
    );
    let errors = errors(&text);
    assert!(errors[0].contains("sinks.s.url: "), "{errors:?}");
    assert!(!errors.iter().any(|error| error.contains("hunter2")), "{errors:?}");
}

#[test]
#[cfg(feature = "kafka")]
fn relay_options_are_passed_on_quoted_or_dotted_and_bad_ones_refused() {
    let with = |lines: &str| with_route("", true).replace("[sinks.s]", &format!("{lines}\n[sinks.s]"));
    let relay = |lines: &str| {
        load(&with(lines), environment).unwrap_or_else(|e| panic!("{e:#?}")).routes["r"]
            .relay
            .clone()
            .unwrap()
    };
    let config = relay(
        "start = 2026-01-31T00:00:00Z\nsession_timeout = \"9s\"\n[routes.r.kafka.options]\nfetch.wait.max.ms = 7\n\"client.id\" = \"me\"",
    );
    assert_eq!(config.options["fetch.wait.max.ms"], "7");
    assert_eq!(config.options["client.id"], "me");
    assert_eq!(
        (config.options["session.timeout.ms"].as_str(), config.options["heartbeat.interval.ms"].as_str()),
        ("9000", "3000")
    );
    assert_eq!(config.start, StartAt::Time(1_769_817_600_000));
    assert_eq!(relay("").start, StartAt::Earliest);
    for (lines, says) in [
        ("start = \"yesterday\"", "neither \"earliest\" nor \"latest\" nor a time"),
        ("[routes.r.kafka.options]\n\"enable.auto.commit\" = true", "enable.auto.commit: is not passed on"),
        ("[routes.r.kafka.options]\nno.such = 1", "no.such: "),
        ("isolation = \"dirty\"", "is none of the choices"),
    ] {
        let errors = errors(&with(lines));
        assert!(errors.iter().any(|error| error.contains(says)), "{lines}: {errors:?}");
    }
    let secret =
        errors(&with("[routes.r.kafka.options]\n\"sasl.password\" = [\"hunter2\"]\nx = \"hunter2\""));
    assert!(!secret.iter().any(|error| error.contains("hunter2")), "{secret:?}");
}

/// A second route was copied from the first with its relay, `instance` and all: the two joined as one static member, fenced each
/// other without end, and nothing in the file seemed wrong. Without `instance` each got half of the partitions.
#[test]
#[cfg(feature = "kafka")]
fn p13_two_relays_that_would_be_one_member_are_refused() {
    let file = |first: &str, second: &str| {
        let route = |name: &str, kafka: &str| {
            format!("[routes.{name}]\nsink = \"s\"\nkey = \"/id\"\n[routes.{name}.kafka]\n{kafka}\n")
        };
        format!("{}{}{SINK}", route("z", first), route("a", second))
    };
    let kafka = |brokers: &str, topic: &str, group: &str, instance: &str| {
        let instance =
            if instance.is_empty() { String::new() } else { format!("instance = \"{instance}\"\n") };
        format!("brokers = \"{brokers}\"\ntopics = [\"{topic}\"]\ngroup = \"{group}\"\n{instance}")
    };
    let first = kafka("b1:9092,b2:9092", "t", "g", "i");
    for brokers in ["b2:9092", "b3:1, B2", "PLAINTEXT://b1:9092"] {
        let errors = errors(&file(&first, &kafka(brokers, "u", "g", "i")));
        assert_eq!(errors.len(), 1, "{brokers}: {errors:?}");
        for says in ["13:", "routes.a.kafka: ", "instance \"i\"", "group \"g\"", "routes.z.kafka", "fence"] {
            assert!(errors[0].contains(says), "{says}: {errors:?}");
        }
    }
    for (a, b) in [("", ""), ("i", "j"), ("i", "")] {
        let errors = errors(&file(&kafka("b:1", "t", "g", a), &kafka("b:1", "t", "g", b)));
        assert!(errors.len() == 1 && errors[0].contains("reads topic \"t\""), "{a} {b}: {errors:?}");
    }
    for second in [
        kafka("b3:9092", "t", "g", "i"),
        kafka("b1:9093", "t", "g", "i"),
        kafka("b1:9092", "t", "h", "i"),
        kafka("b1:9092", "u", "g", "j"),
        kafka("b1:9092", "u", "g", ""),
    ] {
        load(&file(&first, &second), environment).unwrap_or_else(|errors| panic!("{second}: {errors:#?}"));
    }
}

#[test]
fn names_are_fit_for_urls_and_folders() {
    for bad in ["\"a/b\"", "\"\"", "\"..\"", "_a", "-a", "\"é\"", "\"a b\""] {
        let text = with_route("", false).replace("routes.r", &format!("routes.{bad}"));
        let errors = errors(&text);
        assert!(errors.len() == 1 && errors[0].contains("is no name"), "{bad}: {errors:?}");
    }
}

#[test]
fn durations_reach_the_store() {
    let config = load(&with_route("window = \"1h\"\nidle_after = \"2s\"", false), environment).unwrap();
    let options = config.routes["r"].store(&config.store);
    assert_eq!((options.window_ms, options.idle_after_ms, options.commit_interval_ms), (3_600_000, 2000, 5));
    assert_eq!(config.store.commit_interval, Duration::from_millis(5));
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(text in "\\PC{0,200}") {
        if let Err(errors) = load(&text, environment) {
            prop_assert!(!errors.is_empty());
        }
    }

    #[test]
    fn text_of_toml_like_pieces_never_panics(text in r#"(\[|\]|\{|\}|=|"|'|,|\.|\n|#|\$\{|a|1|routes|sinks|server|key|kafka| |"""|2026-01-01|"1s"|true){0,60}"#) {
        if let Err(errors) = load(&text, environment) {
            prop_assert!(!errors.is_empty());
        }
    }

    /// The example with one piece cut out, doubled or replaced: an answer, whatever it is, and every error has a place in the file.
    #[test]
    fn a_mangled_example_never_panics(at in 0..EXAMPLE.len(), length in 0_usize..40, put in r#"["\[\]{}=\n#$a0.]{0,4}"#) {
        let (Some(before), Some(after)) = (EXAMPLE.get(..at), EXAMPLE.get((at + length).min(EXAMPLE.len())..)) else {
            return Ok(());
        };
        let text = format!("{before}{put}{after}");
        if let Err(errors) = load(&text, environment) {
            prop_assert!(!errors.is_empty());
            let lines = text.split('\n').count();
            prop_assert!(errors.iter().all(|error| (1..=lines).contains(&error.line) && error.column >= 1), "{errors:?}");
            let shown = format!("{errors:?}");
            prop_assert!(!shown.contains("hunter2"));
        }
    }
}

const UPSTREAM: &str = "[sinks.s]\ntype = \"http\"\nurl = \"http://h:1/base\"\nanswers = \"a\"\n";

#[test]
fn a_route_to_an_http_service_has_options_of_its_own() {
    use crate::door::http::forward::{OnUnknown, ServerErrors};
    let file = |sink: &str, route: &str| format!("{UPSTREAM}{sink}\n[routes.r]\nsink = \"s\"\n{route}\n");
    let by_key = "idempotency_key = \"require\"";
    let config = load(&file("", by_key), environment).unwrap_or_else(|errors| panic!("{errors:#?}"));
    assert!(config.routes.is_empty() && config.sinks.is_empty());
    let forward = &config.forwards["r"];
    assert_eq!(forward.book, std::path::Path::new("a/r"));
    assert_eq!(forward.rules, crate::door::http::forward::AnswerRules::default());
    assert_eq!((forward.window, forward.wait), (Duration::from_secs(86_400), Duration::from_secs(5)));
    let sink = "on_unknown = \"retry\"\nattempts = 1\nserver_errors = \"final\"\nnot_applied = [503]";
    let config = load(&file(sink, "key = \"/id\"\nkeyless = \"pass\""), environment).unwrap();
    let forward = &config.forwards["r"];
    assert_eq!((forward.rules.on_unknown, forward.rules.attempts), (OnUnknown::Retry, 1));
    assert_eq!((forward.rules.server_errors, &forward.rules.not_applied), (ServerErrors::Final, &vec![503]));
    assert!(forward.pass_keyless);
    for (sink, route, told) in [
        ("", "", "`key` is missing"),
        ("attempts = 2", by_key, "counts with on_unknown = \"retry\" only"),
        ("not_applied = [200]", by_key, "must be 400 to 599"),
        ("table = \"t\"", by_key, "unknown key \"table\""),
        ("", "key = \"/id\"\nwindow = \"10s\"", "is shorter than a request may take"),
        ("", "key = \"/id\"\nlateness = \"10s\"", "unknown key \"lateness\""),
        ("", "key = \"/id\"\nkafka = { brokers = \"b:1\" }", "does not fit an HTTP service"),
        ("", "key = { kafka = \"key\" }", "the route has no relay"),
    ] {
        let errors = errors(&file(sink, route));
        assert!(errors.len() == 1 && errors[0].contains(told), "{sink} {route}: {errors:#?}");
    }
    let with_user = file("", by_key).replace("http://h", "http://me:hunter2@h");
    let errors = errors(&with_user);
    assert!(errors[0].contains("user or password") && !errors[0].contains("hunter2"), "{errors:#?}");
}
