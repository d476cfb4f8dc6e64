//! What the start-up checks refuse, and what they say.

use std::time::Duration;

use adapters::{
    sink::{Mode, Sink},
    stream_load::{Dialect, StreamLoadConfig, StreamLoadSink},
};
use oncegate_tests::servers::{
    StreamLoad,
    stream_load::{Model, TableSpec},
};

use crate::rig::{BOTH, keyed, rows_of};

async fn misfits(server: &StreamLoad, spec: &TableSpec, change: impl Fn(&mut StreamLoadConfig)) -> String {
    let table = server.table(spec);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut config = StreamLoadConfig::new(server.dialect(), server.url(), table, folder.path());
    change(&mut config);
    match StreamLoadSink::new(config).expect("a good URL").probe().await {
        Ok(_) => String::new(),
        Err(misfits) => misfits.iter().map(|misfit| format!("{misfit}\n")).collect(),
    }
}

#[tokio::test]
async fn tables_that_do_not_fit_the_mode_are_refused() {
    for dialect in BOTH {
        let server = StreamLoad::shared(dialect);
        let (plain, by_key, newest) =
            (rows_of(Model::Duplicate, false), rows_of(Model::Keyed, false), rows_of(Model::Keyed, true));
        assert_eq!(misfits(server, &plain, |_| {}).await, "");
        assert_eq!(misfits(server, &by_key, keyed(Mode::Upsert)).await, "");
        assert_eq!(misfits(server, &newest, keyed(Mode::UpsertIfNewer)).await, "");
        assert!(misfits(server, &by_key, |_| {}).await.contains("needs a DUPLICATE KEY table"));
        assert!(
            misfits(server, &plain, keyed(Mode::Upsert))
                .await
                .contains("KEY table, and this one is Duplicate")
        );
        let other = misfits(server, &by_key, |config| {
            keyed(Mode::Upsert)(config);
            config.row_key = vec!["v".to_owned()];
        });
        assert!(other.await.contains("KEY is (id), and row_key is (v)"));
        let with_key = misfits(server, &plain, |config| config.row_key = vec!["id".to_owned()]);
        assert!(with_key.await.contains("does not look for the row that is there"));
        let version = misfits(server, &newest, |config| {
            keyed(Mode::UpsertIfNewer)(config);
            config.version = Some("note".to_owned());
        });
        assert!(version.await.contains("version \"note\" is no column of an integer type"));
        if dialect == Dialect::Doris {
            let none = misfits(server, &by_key, keyed(Mode::UpsertIfNewer)).await;
            assert!(
                none.contains("sequence column is missing") && none.contains("function_column.sequence_col"),
                "{none}"
            );
            assert!(misfits(server, &newest, keyed(Mode::Upsert)).await.contains("has a sequence column"));
        }
    }
}

#[tokio::test]
async fn types_and_names_that_cannot_be_written_are_named() {
    for dialect in BOTH {
        let server = StreamLoad::shared(dialect);
        let spec = TableSpec {
            columns: vec![
                ("id", "bigint", "NOT NULL"),
                ("b", "bitmap", "NULL"),
                ("a", "array<json>", "NULL"),
            ],
            model: Model::Duplicate,
            key: 1,
            sequence: None,
        };
        if server.stand_in().is_none() {
            return;
        }
        let said = misfits(server, &spec, |_| {}).await;
        assert!(said.contains("column \"b\" has type bitmap") && said.contains("array<json>"), "{said}");
    }
}

#[tokio::test]
async fn how_long_labels_are_kept_is_asked_and_looked_at() {
    for dialect in BOTH {
        let server = StreamLoad::start(dialect);
        let Some(stand_in) = server.stand_in() else { return };
        let (plain, seconds, loads) = match dialect {
            Dialect::StarRocks => {
                (rows_of(Model::Duplicate, false), "label_keep_max_second", "label_keep_max_num")
            }
            Dialect::Doris => {
                (rows_of(Model::Duplicate, false), "streaming_label_keep_max_second", "label_num_threshold")
            }
        };
        let set = |seconds_: &str, loads_: &str| {
            stand_in.cluster().settings =
                Some(vec![(seconds, seconds_.to_owned()), (loads, loads_.to_owned())]);
        };
        set("599", "1000");
        assert!(misfits(&server, &plain, |_| {}).await.contains("labels are kept for 599 s"));
        set("86400", "99");
        let few = misfits(&server, &plain, |_| {}).await;
        assert!(
            few.contains("the labels of 99 loads are kept") && few.contains("ADMIN SET FRONTEND CONFIG"),
            "{few}"
        );
        set("86400", "100000");
        let long = misfits(&server, &plain, |config| config.label_keep = Some(Duration::from_secs(86_401)));
        assert!(long.await.contains("label_keep is 86401 s, and the front-end keeps labels for 86400 s"));
        let slow = misfits(&server, &plain, |config| config.request_timeout = Duration::from_secs(22_000));
        assert!(slow.await.contains("a request could come in after that"));
        // Who may not ask takes the defaults, or what is given.
        stand_in.cluster().settings = None;
        assert_eq!(misfits(&server, &plain, |_| {}).await, "");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_or_keeps_us_out_is_said() {
    for dialect in BOTH {
        let server = StreamLoad::shared(dialect);
        let folder = tempfile::tempdir().unwrap();
        let of = |url: String, table: &str| StreamLoadConfig::new(dialect, url, table, folder.path());
        let probe = async |config| StreamLoadSink::new(config).unwrap().probe().await.unwrap_err();
        let missing = probe(of(server.url(), "oncegate_tests.nowhere")).await;
        assert!(missing[0].what.contains("cannot be asked for the table"), "{missing:?}");
        let mut stranger = of(server.url(), "a.b");
        stranger.user = Some(("nobody".to_owned(), "wrong".to_owned()));
        let kept_out = probe(stranger).await;
        assert!(
            kept_out[0].what.contains("401") && kept_out[0].remedy.contains("user and password"),
            "{kept_out:?}"
        );
        for (url, table) in [
            ("ftp://x", "a.b"),
            ("http://fe:8030", "b"),
            ("http://fe:8030", "a.b/c"),
            ("http://fe:8030", "a.b.c"),
        ] {
            assert!(StreamLoadSink::new(of(url.to_owned(), table)).is_err(), "{url} {table}");
        }
        let shown = format!("{:?}", of(server.url(), "a.b"));
        assert!(!shown.contains("word"), "a password is shown: {shown}");
    }
}
