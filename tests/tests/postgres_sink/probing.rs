//! Start-up checks.

use adapters::{
    postgres::{PostgresConfig, PostgresSink},
    sink::{Misfit, Mode, Sink},
};

use crate::rig::{Rig, config, database};

async fn misfits(ddl: &str, configure: impl FnOnce(&mut PostgresConfig)) -> Vec<Misfit> {
    let (_client, database) = database(ddl).await;
    let mut config = config(&database);
    configure(&mut config);
    PostgresSink::new(config).unwrap().probe().await.err().unwrap_or_default()
}

#[track_caller]
fn names(misfits: &[Misfit], expected: &[&str]) {
    let text = format!("{misfits:#?}");
    for expected in expected {
        assert!(misfits.iter().any(|misfit| misfit.what.contains(expected)), "{expected:?} is not in {text}");
    }
    assert_eq!(misfits.len(), expected.len(), "{text}");
    assert!(misfits.iter().all(|misfit| !misfit.remedy.is_empty()));
}

#[tokio::test]
async fn everything_that_does_not_fit_is_said_at_once() {
    let ddl = "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false); \
               CREATE UNLOGGED TABLE t (id int, f double precision NOT NULL, name text COLLATE ci NOT NULL, price money, need int NOT NULL, \
               g int GENERATED ALWAYS AS (id) STORED, v jsonb, r int); \
               CREATE RULE r AS ON INSERT TO t WHERE NEW.r = 1 DO ALSO NOTHING";
    let found = misfits(ddl, |config| {
        config.mode = Mode::UpsertIfNewer;
        config.row_key = vec!["id".into(), "f".into(), "name".into(), "nokey".into()];
        config.version = Some("v".into());
        config.columns =
            Some(["id", "f", "name", "price", "g", "v", "nope", "id"].map(String::from).to_vec());
    })
    .await;
    names(
        &found,
        &[
            "unlogged",
            "rewrite rules",
            "no column \"nope\"",
            "\"g\" of \"public\".\"t\" is always generated",
            "\"id\" is named twice",
            "type money",
            "\"need\" of",
            "\"id\" may be null",
            "type double precision, where equal values",
            "nondeterministic collation",
            "\"nokey\" is not among the columns",
            "type jsonb, which has no order",
        ],
    );
}

#[tokio::test]
async fn the_row_key_needs_a_unique_index_of_its_own() {
    for ddl in [
        "CREATE TABLE t (id int NOT NULL, b int NOT NULL)",
        "CREATE TABLE t (id int NOT NULL, b int NOT NULL, PRIMARY KEY (id, b))",
        "CREATE TABLE t (id int NOT NULL, b int NOT NULL); CREATE INDEX ON t (id)",
        "CREATE TABLE t (id int NOT NULL, b int NOT NULL); CREATE UNIQUE INDEX ON t (id) WHERE b > 0",
        "CREATE TABLE t (id int NOT NULL, b int NOT NULL); CREATE UNIQUE INDEX ON t ((id + 1))",
        "CREATE TABLE t (id int NOT NULL UNIQUE DEFERRABLE, b int NOT NULL)",
    ] {
        let found = misfits(ddl, |config| config.row_key = vec!["id".into()]).await;
        names(&found, &["no unique index"]);
        assert_eq!(found[0].remedy, "CREATE UNIQUE INDEX ON \"public\".\"t\" (\"id\");");
    }
    for ddl in [
        "CREATE TABLE t (id int NOT NULL, b int NOT NULL); CREATE UNIQUE INDEX ON t (id) INCLUDE (b)",
        "CREATE TABLE t (b int NOT NULL, id int PRIMARY KEY)",
    ] {
        names(&misfits(ddl, |config| config.row_key = vec!["id".into()]).await, &[]);
    }
}

#[tokio::test]
async fn a_text_version_must_compare_bytewise() {
    let version = |config: &mut PostgresConfig| {
        config.row_key = vec!["id".into()];
        config.mode = Mode::UpsertIfNewer;
        config.version = Some("v".into());
    };
    names(
        &misfits("CREATE TABLE t (id int PRIMARY KEY, v text)", version).await,
        &["does not compare bytewise"],
    );
    let mut rig = Rig::new("CREATE TABLE t (id int PRIMARY KEY, v text COLLATE \"C\")", version).await;
    assert_eq!(rig.deliver(&[r#"{"id":1,"v":"Z"}"#, r#"{"id":1,"v":"a"}"#]).await, "SW");
    assert_eq!(rig.deliver(&[r#"{"id":1,"v":"b"}"#]).await, "U");
    assert_eq!(rig.deliver(&[r#"{"id":1,"v":"a\u0001"}"#]).await, "S");
}

#[tokio::test]
async fn a_missing_table_a_view_or_a_missing_right_is_a_misfit() {
    names(&misfits("", |_| {}).await, &["does not exist"]);
    names(&misfits("CREATE VIEW t AS SELECT 1 AS id", |_| {}).await, &["is a view"]);
    let (client, database) = database("CREATE TABLE t (id int PRIMARY KEY)").await;
    client
        .batch_execute(&format!("CREATE ROLE weak_{database} LOGIN; GRANT SELECT ON t TO weak_{database}"))
        .await
        .unwrap();
    let mut config = config(&database);
    config.url = config.url.replace("postgres@", &format!("weak_{database}@"));
    let found = PostgresSink::new(config).unwrap().probe().await.unwrap_err();
    names(&found, &["bookkeeping tables are missing", "no INSERT"]);
    assert!(
        found[0].remedy.contains("CREATE TABLE IF NOT EXISTS \"public\".oncegate_marks"),
        "{}",
        found[0].remedy
    );
}

#[tokio::test]
async fn p6_another_table_under_the_same_name_is_refused() {
    let rig = Rig::new("CREATE TABLE t (id int PRIMARY KEY)", |_| {}).await;
    rig.client.batch_execute("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY)").await.unwrap();
    let found = PostgresSink::new(rig.config.clone()).unwrap().probe().await.unwrap_err();
    names(&found, &["another one than before"]);
    rig.client.batch_execute("DELETE FROM oncegate_targets WHERE target = 'public.t'").await.unwrap();
    PostgresSink::new(rig.config.clone()).unwrap().probe().await.unwrap();
}

#[tokio::test]
async fn p6_a_weak_synchronous_commit_is_raised_for_our_transactions() {
    let (client, database) = database(
        "CREATE TABLE t (id int PRIMARY KEY, setting text); \
         CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.setting = current_setting('synchronous_commit'); RETURN NEW; END $$; \
         CREATE TRIGGER tr BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()",
    )
    .await;
    client.batch_execute(&format!("ALTER DATABASE {database} SET synchronous_commit = off")).await.unwrap();
    let config = config(&database);
    let sink = PostgresSink::new(config.clone()).unwrap();
    let encoder = sink.probe().await.unwrap();
    let session = sink.session("orders", "test/1");
    let mut rig = Rig {
        client,
        database,
        config,
        sink,
        encoder,
        session,
        epoch: 0,
        sequence: 0,
        options: crate::rig::Options { known_new: true, on_refused: adapters::sink::OnRefused::Report },
    };
    rig.acquire().await;
    let records: Vec<String> = (0..500).map(|id| format!(r#"{{"id":{id}}}"#)).collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    rig.deliver(&records).await;
    assert_eq!(rig.count("t WHERE setting = 'on'").await, 500);
    assert_eq!(rig.deliver(&[r#"{"id":1000}"#]).await, "W");
}

#[tokio::test]
async fn names_that_need_quotes_and_a_schema_of_its_own_work() {
    let ddl = r#"CREATE SCHEMA "My Meta"; CREATE SCHEMA "S""x"; CREATE TABLE "S""x"."T able's" ("I D" int PRIMARY KEY, "select" text)"#;
    let (client, database) = database(ddl).await;
    let mut config = config(&database);
    config.table = "S\"x.T able's".into();
    config.meta_schema = Some("My Meta".into());
    config.row_key = vec!["I D".into()];
    config.mode = Mode::Upsert;
    let sink = PostgresSink::new(config.clone()).unwrap();
    let encoder = sink.probe().await.unwrap();
    let session = sink.session("orders", "test/1");
    client.batch_execute("SET search_path = 'My Meta'").await.unwrap();
    let options = crate::rig::Options { known_new: false, on_refused: adapters::sink::OnRefused::Report };
    let mut rig = Rig { client, database, config, sink, encoder, session, epoch: 0, sequence: 0, options };
    rig.acquire().await;
    assert_eq!(rig.deliver(&[r#"{"I D":1,"select":"a"}"#, r#"-{"I D":2}"#]).await, "WW");
    assert_eq!(rig.deliver(&[r#"{"I D":1,"select":"b"}"#]).await, "U");
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_a_misfit_within_the_time_out() {
    let mut config = config("nowhere");
    names(&PostgresSink::new(config.clone()).unwrap().probe().await.unwrap_err(), &["nowhere"]);
    config.url = format!("postgres://postgres@127.0.0.1:{}/x", oncegate_tests::free_port());
    names(&PostgresSink::new(config.clone()).unwrap().probe().await.unwrap_err(), &["cannot connect"]);
    config.url.push_str("?sslmode=require");
    assert!(PostgresSink::new(config).unwrap().probe().await.is_err());
}
