//! What the start-up checks refuse, and what they say.

use adapters::{
    clickhouse::{ClickhouseConfig, ClickhouseSink, Compression},
    sink::{Mode, Sink},
};
use oncegate_tests::{proxy::http::HttpProxy, servers::Clickhouse};

async fn misfits(columns: &str, change: impl FnOnce(&mut ClickhouseConfig)) -> String {
    let server = Clickhouse::shared();
    let table = server.table("p", columns).await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut config = ClickhouseConfig::new(server.url(), table, folder.path());
    change(&mut config);
    match ClickhouseSink::new(config).expect("a good URL").probe().await {
        Ok(_) => String::new(),
        Err(misfits) => misfits.iter().map(|misfit| format!("{misfit}\n")).collect(),
    }
}

fn newest(config: &mut ClickhouseConfig) {
    config.mode = Mode::UpsertIfNewer;
    config.row_key = vec!["id".to_owned()];
    config.version = Some("v".to_owned());
}

const WINDOW: &str = "SETTINGS non_replicated_deduplication_window = 1000";

#[tokio::test]
async fn engines_and_windows_that_cannot_keep_copies_out_are_refused_with_what_to_run() {
    let none = misfits("(id UInt64) ENGINE = MergeTree ORDER BY id", |_| {}).await;
    assert!(none.contains("remembers no inserts: non_replicated_deduplication_window = 0"), "{none}");
    assert!(none.contains("MODIFY SETTING non_replicated_deduplication_window = 10000"), "{none}");
    let few = "(id UInt64) ENGINE = MergeTree ORDER BY id SETTINGS non_replicated_deduplication_window = 99";
    assert!(misfits(few, |_| {}).await.contains("remembers too few inserts"));
    for engine in ["Memory", "Log", "Null"] {
        let refused = misfits(&format!("(id UInt64) ENGINE = {engine}"), |_| {}).await;
        assert!(refused.contains(&format!("the table's engine is {engine}")), "{refused}");
    }
    assert_eq!(
        misfits(&format!("(id UInt64) ENGINE = SummingMergeTree ORDER BY id {WINDOW}"), |_| {}).await,
        ""
    );
}

#[tokio::test]
async fn what_a_replacing_table_must_be_is_said() {
    let good = format!(
        "(id UInt64, v UInt64, gone UInt8) ENGINE = ReplacingMergeTree(v, gone) ORDER BY id {WINDOW}"
    );
    assert_eq!(misfits(&good, newest).await, "");
    for (columns, says) in [
        ("(id UInt64, v UInt64) ENGINE = MergeTree ORDER BY id", "needs ReplacingMergeTree"),
        ("(id UInt64, v UInt64) ENGINE = ReplacingMergeTree ORDER BY id", "the table's version is missing"),
        (
            "(id UInt64, v UInt64, w UInt64) ENGINE = ReplacingMergeTree(w) ORDER BY id",
            "version is w, and the sink's is v",
        ),
        (
            "(id UInt64, v UInt64) ENGINE = ReplacingMergeTree(v) ORDER BY (id, v)",
            "ORDER BY is (id, v), and row_key is (id)",
        ),
        (
            "(id UInt64, v DateTime) ENGINE = ReplacingMergeTree(v) PARTITION BY toDate(v) ORDER BY id",
            "computed from column \"v\", which is not in row_key",
        ),
    ] {
        let refused = misfits(&format!("{columns} {WINDOW}"), newest).await;
        assert!(refused.contains(says), "{columns}: {refused}");
    }
    let upsert = misfits(&good, |config| {
        newest(config);
        config.mode = Mode::Upsert;
    });
    assert!(upsert.await.contains("use mode = \"upsert-if-newer\""));
    let keyed = |config: &mut ClickhouseConfig| config.row_key = vec!["id".to_owned()];
    let refused = misfits(&good, keyed).await;
    assert!(refused.contains("ReplacingMergeTree cannot be asked which rows it has"), "{refused}");
    assert_eq!(misfits(&format!("(id UInt64) ENGINE = MergeTree ORDER BY id {WINDOW}"), keyed).await, "");
}

#[tokio::test]
async fn columns_constraints_and_views_that_do_not_fit_are_named() {
    let json = misfits(
        &format!(
            "(id UInt64, j JSON, a AggregateFunction(sum, UInt8)) ENGINE = MergeTree ORDER BY id {WINDOW}"
        ),
        |_| {},
    )
    .await;
    assert!(json.contains("column \"j\"") && json.contains("use a String column"), "{json}");
    assert!(json.contains("AggregateFunction is not known"), "{json}");
    let check = format!("(id UInt64, CONSTRAINT c CHECK id > 5) ENGINE = MergeTree ORDER BY id {WINDOW}");
    assert!(misfits(&check, |_| {}).await.contains("CHECK constraints"));
    let plain = format!("(id UInt64) ENGINE = MergeTree ORDER BY id {WINDOW}");
    let batch = misfits(&plain, |config| config.batch_column = Some("batch".to_owned()));
    assert!(batch.await.contains("ADD COLUMN `batch` String"));

    let server = Clickhouse::shared();
    let table = server.table("v", &format!("(id UInt64) ENGINE = MergeTree ORDER BY id {WINDOW}")).await;
    let view = format!(
        "CREATE MATERIALIZED VIEW {table}_view ENGINE = MergeTree ORDER BY id AS SELECT id FROM {table}"
    );
    server.query(&view).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut config = ClickhouseConfig::new(server.url(), &table, folder.path());
    let refused = ClickhouseSink::new(config.clone()).unwrap().probe().await.unwrap_err();
    assert!(refused[0].what.contains(&format!("{table}_view")), "{refused:?}");
    config.accept_views = true;
    ClickhouseSink::new(config).unwrap().probe().await.unwrap();
}

#[tokio::test]
async fn a_table_or_server_that_is_not_there_is_said() {
    let server = Clickhouse::shared();
    let folder = tempfile::tempdir().unwrap();
    let config = ClickhouseConfig::new(server.url(), "oncegate_tests.nowhere", folder.path());
    let missing = ClickhouseSink::new(config).unwrap().probe().await.unwrap_err();
    assert!(missing[0].what.contains("oncegate_tests.nowhere does not exist"), "{missing:?}");
    let port = oncegate_tests::free_port();
    let config = ClickhouseConfig::new(format!("http://127.0.0.1:{port}"), "a.b", folder.path());
    let away = ClickhouseSink::new(config).unwrap().probe().await.unwrap_err();
    assert!(away[0].what.contains("cannot be asked") && away[0].remedy.contains("url"), "{away:?}");
}

/// It would take packed bytes for rows.
#[tokio::test]
async fn a_server_that_is_not_told_how_bodies_are_packed_is_refused() {
    let server = Clickhouse::shared();
    let table = server
        .table(
            "t",
            "(id UInt64) ENGINE = MergeTree ORDER BY id SETTINGS non_replicated_deduplication_window = 1000",
        )
        .await;
    let proxy = HttpProxy::start(server.port()).await;
    proxy.hide_encoding();
    let folder = tempfile::tempdir().unwrap();
    let mut config = ClickhouseConfig::new(server.url_through(proxy.port()), table, folder.path());
    let refused = ClickhouseSink::new(config.clone()).unwrap().probe().await.unwrap_err();
    assert!(
        refused.len() == 1
            && refused[0].what.contains("does not unpack the bodies")
            && refused[0].remedy.contains("compression = \"none\""),
        "{refused:?}"
    );
    config.compression = Compression::None;
    ClickhouseSink::new(config).unwrap().probe().await.unwrap();
}
