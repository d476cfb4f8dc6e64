//! HTTP and a relay into StarRocks and Doris (a stand-in for both) through kills of the gateway and faults of the servers at random:
//! answers lost before and after, late, 5xx, no JSON, publish time-outs, loads that hang, are aborted, or fail in words only. The table
//! holds each acknowledged record once, and nothing else.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    path::Path,
    time::{Duration, Instant},
};

use adapters::{sink::Mode, stream_load::Dialect};
use oncegate_tests::{
    callers::Callers,
    gateway::Gateway,
    servers::{
        Kafka, Produced, StreamLoad,
        stream_load::{Cluster, Model, TableSpec},
    },
};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// One record in so many is a copy of an earlier one, or bad, or refused by the server.
const COPY_EVERY: usize = 5;
const BAD_EVERY: usize = 500;
const REFUSED_EVERY: usize = 5000;
/// One request in so many fails.
const FAULT_EVERY: u32 = 8;

fn spec(mode: Mode) -> TableSpec {
    TableSpec {
        columns: vec![
            ("id", "varchar(20)", "NOT NULL"),
            ("n", "bigint", "NOT NULL"),
            ("amount", "decimal(18,2)", "NULL"),
            ("note", "varchar(40)", "NULL DEFAULT \"none\""),
        ],
        model: if mode == Mode::Insert { Model::Duplicate } else { Model::Keyed },
        key: 1,
        sequence: (mode == Mode::UpsertIfNewer).then_some("n"),
    }
}

fn sink(server: &StreamLoad, table: &str, journal: &Path, mode: Mode) -> String {
    let kind = match server.dialect() {
        Dialect::StarRocks => "starrocks",
        Dialect::Doris => "doris",
    };
    let mode = match mode {
        Mode::Insert => "",
        Mode::Upsert => "mode = \"upsert\"\nrow_key = [\"id\"]\n",
        Mode::UpsertIfNewer => "mode = \"upsert-if-newer\"\nrow_key = [\"id\"]\nversion = \"n\"\n",
    };
    format!(
        "[sinks.s]\ntype = \"{kind}\"\nurl = \"{}\"\ntable = \"{table}\"\njournal = \"{}\"\nrequest_timeout = \"2s\"\n{mode}",
        server.url(),
        journal.display()
    )
}

fn payload(n: usize) -> String {
    format!("{{\"id\":\"k{n:07}\",\"n\":{n},\"amount\":{n}.50}}")
}

/// The table, once it has as many rows as the model; and a while later.
async fn equals(server: &StreamLoad, table: &str, model: &BTreeMap<String, usize>, gateway: &Gateway) {
    let stand_in = server.stand_in().expect("faults are scripted");
    let deadline = Instant::now() + Duration::from_secs(240);
    loop {
        let count = stand_in.cluster().count(table);
        if count >= model.len() {
            break;
        }
        assert!(Instant::now() < deadline, "{count} rows of {}: {}", model.len(), gateway.log_tail(5));
        // The servers are left alone in between: they are of this process.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // What would come twice, or late, would come now.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let rows = server.rows(table, &["id", "n", "amount", "note"]);
    let twice = rows.windows(2).filter(|pair| pair[0] == pair[1]).count();
    assert_eq!((rows.len(), twice), (model.len(), 0), "rows, and those that are there twice");
    let expected: Vec<String> = model.iter().map(|(id, n)| format!("{id}\t{n}\t{n}.5\tnone")).collect();
    assert!(rows == expected, "the table does not equal the model");
    let cluster = stand_in.cluster();
    assert!(cluster.in_by_label().values().all(|count| *count == 1), "a label is in twice");
}

async fn over_http(dialect: Dialect) {
    let server = StreamLoad::start(dialect);
    let Some(stand_in) = server.stand_in() else { return };
    let table = server.table(&spec(Mode::Insert));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let route = "[routes.events]\nsink = \"s\"\nkey = \"/id\"\nlanes = { http = 2 }\n";
    let mut gateway =
        Gateway::new(&(sink(&server, &table, &folder.path().join("journal"), Mode::Insert) + route));
    gateway.start().await;
    stand_in.cluster().chaos(17, FAULT_EVERY);
    let callers = Callers::start(gateway.listen(), "/v1/events", payload);
    let mut random = StdRng::seed_from_u64(11);
    let kills = oncegate_tests::kills(3);
    for _ in 0..kills {
        tokio::time::sleep(Duration::from_millis(random.random_range(100..600))).await;
        gateway.kill();
        gateway.spawn();
        gateway.ready(Duration::from_secs(60)).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    stand_in.cluster().chaos(0, 0);
    let acknowledged = callers.end().await;
    let model: BTreeMap<String, usize> = acknowledged.into_iter().map(|n| (format!("k{n:07}"), n)).collect();
    println!(
        "{dialect:?}: {kills} kills, {} loads, {} keys acknowledged",
        stand_in.cluster().loads,
        model.len()
    );
    assert!(model.len() > 100, "only {} keys", model.len());
    equals(&server, &table, &model, &gateway).await;
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_acknowledged_record_is_one_row_of_starrocks_through_kills() {
    over_http(Dialect::StarRocks).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_acknowledged_record_is_one_row_of_doris_through_kills() {
    over_http(Dialect::Doris).await;
}

async fn relay(
    topic: &'static str,
    dialect: Dialect,
    mode: Mode,
    two_phase: bool,
    records: usize,
    kills: usize,
) {
    let kafka = Kafka::shared();
    let server = StreamLoad::start(dialect);
    let Some(stand_in) = server.stand_in() else { return };
    kafka.topic(topic, 2).await;
    let table = server.table(&spec(mode));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let journal = folder.path().join("journal");
    let mut config = sink(&server, &table, &journal, mode);
    if two_phase {
        config.push_str("load = \"two-phase\"\n");
    }
    write!(
        config,
        "[routes.{topic}]\nkey = \"/id\"\nevent_time = {{ kafka = \"timestamp\" }}\nsink = \"s\"\nbatch = {{ max_records = 2000 }}\n\
         [routes.{topic}.kafka]\nbrokers = \"{}\"\ntopics = [\"{topic}\"]\ngroup = \"{topic}\"\ninstance = \"one\"\n",
        kafka.brokers()
    )
    .expect("a string takes all");
    let mut gateway = Gateway::new(&config);
    gateway.start().await;
    stand_in.cluster().chaos(17, FAULT_EVERY);
    let mut random = StdRng::seed_from_u64(7);
    let (mut model, mut letters, mut refused) = (BTreeMap::new(), 0, BTreeSet::new());
    for round in 0..kills {
        let part = records * round / kills..records * (round + 1) / kills;
        let produced = part.map(|n| {
            // A copy comes in the other partition as well.
            let copy = n % COPY_EVERY == COPY_EVERY - 1;
            let n = if copy { n - 1 - random.random_range(0..3) } else { n };
            let payload = if n % BAD_EVERY == 7 {
                letters += 1;
                "{\"no\":\"id\"}".to_owned()
            } else if n % REFUSED_EVERY == 11 {
                // A copy of one that was refused has the same answer, and no letter of its own.
                refused.insert(n);
                format!("{{\"id\":\"k{n:07}\",\"n\":{n},\"note\":\"no partition\"}}")
            } else {
                model.insert(format!("k{n:07}"), n);
                payload(n)
            };
            let partition = random.random_range(0..2);
            Produced { partition, payload: Some(payload.into_bytes()), ..Produced::default() }
        });
        kafka.produce(topic, produced.collect::<Vec<_>>());
        tokio::time::sleep(Duration::from_millis(random.random_range(100..700))).await;
        gateway.kill();
        gateway.spawn();
        gateway.ready(Duration::from_secs(60)).await;
    }
    stand_in.cluster().chaos(0, 0);
    equals(&server, &table, &model, &gateway).await;
    let counts = |cluster: &Cluster| (cluster.loads, cluster.trials);
    let (loads, trials) = counts(&stand_in.cluster());
    println!("{dialect:?} {mode:?}: {kills} kills, {loads} loads, {trials} trials, {} rows", model.len());
    let book = rusqlite::Connection::open(journal.join("book.db")).expect("the book opens");
    let found: usize = book
        .query_row("SELECT count(*) FROM oncegate_dead_letters", [], |row| row.get(0))
        .expect("the dead letters can be counted");
    assert_eq!(found, letters + refused.len(), "one dead letter for each bad or refused record");
}

/// 300,000 records and 50 kills for each database and mode, half of them in two phases, a minute or two each:
/// `cargo test -p oncegate-tests --test stream_load_crash -- --ignored --test-threads 1 --nocapture at_length`.
macro_rules! at_length {
    ($($name:ident: $dialect:ident, $mode:ident, $two_phase:literal);+ $(;)?) => {
        $(
            #[tokio::test(flavor = "multi_thread")]
            #[ignore = "takes minutes: the command stands above"]
            async fn $name() {
                relay(stringify!($name), Dialect::$dialect, Mode::$mode, $two_phase, 300_000, oncegate_tests::kills(50)).await;
            }
        )+
    };
}

at_length! {
    starrocks_inserts_at_length: StarRocks, Insert, false;
    starrocks_upserts_at_length: StarRocks, Upsert, true;
    starrocks_keeps_the_newest_at_length: StarRocks, UpsertIfNewer, false;
    doris_inserts_at_length: Doris, Insert, true;
    doris_upserts_at_length: Doris, Upsert, false;
    doris_keeps_the_newest_at_length: Doris, UpsertIfNewer, true;
}
