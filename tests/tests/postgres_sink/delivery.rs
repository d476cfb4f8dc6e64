//! Modes, deletes, copies of a row key, bad rows, dead letters.

use std::time::Duration;

use adapters::sink::{DeadLetter, Mode, OnRefused, RowOutcome, SinkError, Source};

use crate::rig::{Rig, Rows};

const KEYED: &str = "CREATE TABLE t (id int PRIMARY KEY, v int, x text CHECK (x <> 'bad'))";

async fn keyed(mode: Mode) -> Rig {
    Rig::new(KEYED, |config| {
        config.row_key = vec!["id".into()];
        config.mode = mode;
        config.version = (mode == Mode::UpsertIfNewer).then(|| "v".into());
    })
    .await
}

#[tokio::test]
async fn insert_keeps_the_row_that_is_there() {
    let mut rig = keyed(Mode::Insert).await;
    assert_eq!(rig.deliver(&[r#"{"id":1,"x":"a"}"#, r#"{"id":2,"x":"b"}"#]).await, "WW");
    assert_eq!(
        rig.deliver(&[r#"{"id":1,"x":"c"}"#, r#"{"id":3,"x":"d"}"#, r#"{"id":3,"x":"e"}"#]).await,
        "SWS"
    );
    rig.options.known_new = true;
    let records: Vec<String> = (2..600).map(|id| format!(r#"{{"id":{id}}}"#)).collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    assert_eq!(rig.deliver(&records).await, format!("SS{}", "W".repeat(596)), "straight, then staged");
    assert_eq!(rig.table().await.len(), 599);
    assert_eq!(rig.deliver(&[r#"-{"id":1}"#, r#"{"id":1,"x":"f"}"#, r#"-{"id":9999}"#]).await, "UWW");
    assert!(rig.table().await.contains(&r#"{"v": null, "x": "f", "id": 1}"#.to_owned()));
}

#[tokio::test]
async fn p9_without_row_key_rows_go_in_plainly() {
    let mut rig = Rig::new("CREATE TABLE t (id int, x text)", |_| {}).await;
    assert_eq!(rig.deliver(&[r#"{"id":1}"#, r#"{"id":1}"#]).await, "WW");
    let records = vec![r#"{"id":1}"#; 1000];
    assert_eq!(rig.deliver(&records).await, "W".repeat(1000));
    assert_eq!(rig.count("t").await, 1002);
    let delete = Rows::new(&*rig.encoder, &[r#"-{"id":1}"#]);
    assert!(delete.err().unwrap().reason.contains("row_key"));
}

#[tokio::test]
async fn upsert_takes_the_last_copy_and_deletes() {
    let mut rig = keyed(Mode::Upsert).await;
    let records = [r#"{"id":1,"x":"a"}"#, r#"{"id":2,"x":"b"}"#, r#"{"id":1,"x":"c"}"#, r#"-{"id":3}"#];
    assert_eq!(rig.deliver(&records).await, "WWUW");
    let records =
        [r#"{"id":1,"x":"d"}"#, r#"-{"id":1}"#, r#"-{"id":2}"#, r#"{"id":2,"x":"e"}"#, r#"{"id":2,"x":"f"}"#];
    assert_eq!(rig.deliver(&records).await, "UUUWU");
    assert_eq!(rig.table().await, [r#"{"v": null, "x": "f", "id": 2}"#]);
}

#[tokio::test]
async fn upsert_if_newer_honours_versions_and_tombstones_both_ways() {
    let mut rig = keyed(Mode::UpsertIfNewer).await;
    assert_eq!(rig.deliver(&[r#"{"id":1,"v":5}"#, r#"{"id":1,"v":9}"#, r#"{"id":1,"v":7}"#]).await, "SWS");
    assert_eq!(rig.deliver(&[r#"{"id":1,"v":9}"#]).await, "S", "equal is not newer");
    assert_eq!(rig.deliver(&[r#"-{"id":1,"v":8}"#]).await, "S", "an older delete");
    assert_eq!(rig.deliver(&[r#"-{"id":1,"v":10}"#, r#"-{"id":2,"v":3}"#]).await, "UW");
    assert_eq!(rig.deliver(&[r#"{"id":1,"v":10}"#, r#"{"id":2,"v":2}"#]).await, "SS", "the tombstones hold");
    assert_eq!(rig.deliver(&[r#"-{"id":2,"v":1}"#]).await, "S", "an older tombstone");
    assert_eq!(rig.deliver(&[r#"{"id":1,"v":11}"#, r#"{"id":2,"v":4}"#, r#"-{"id":3,"v":1}"#]).await, "WWW");
    assert_eq!(rig.table().await.len(), 2);
    assert_eq!(rig.deliver(&[r#"{"id":2,"v":4}"#, r#"-{"id":1,"v":12}"#, r#"{"id":1,"v":13}"#]).await, "SSU");
}

#[tokio::test]
async fn rule10_a_bad_row_costs_one_outcome_in_every_mode_and_size() {
    for mode in [Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer] {
        for (count, known_new) in [(3, false), (3, true), (700, false), (700, true)] {
            let mut rig = keyed(mode).await;
            rig.options.known_new = known_new;
            let bad = |id: usize| id == 1 || id == 500;
            let records: Vec<String> = (0..count)
                .map(|id| format!(r#"{{"id":{id},"v":1,"x":"{}"}}"#, if bad(id) { "bad" } else { "good" }))
                .collect();
            let records: Vec<&str> = records.iter().map(String::as_str).collect();
            let expected: String = (0..count).map(|id| if bad(id) { 'R' } else { 'W' }).collect();
            let outcomes = rig.try_deliver(&records).await.unwrap();
            assert_eq!(crate::rig::letters(&outcomes), expected, "{mode:?} {count}");
            let RowOutcome::Refused { reason } = &outcomes[1] else { panic!("{outcomes:?}") };
            assert!(
                reason.contains("t_x_check") && reason.contains("23514") && !reason.contains("bad"),
                "{reason}"
            );
            assert_eq!(rig.count("t").await as usize, expected.matches('W').count());
        }
    }
}

#[tokio::test]
async fn a_bad_copy_of_a_row_key_gives_way_to_the_next() {
    let bad_first =
        [r#"{"id":1,"v":3,"x":"bad"}"#, r#"{"id":1,"v":2,"x":"good"}"#, r#"{"id":1,"v":1,"x":"late"}"#];
    let bad_last =
        [r#"{"id":1,"v":1,"x":"early"}"#, r#"{"id":1,"v":2,"x":"good"}"#, r#"{"id":1,"v":3,"x":"bad"}"#];
    for (mode, records, outcomes) in [
        (Mode::Insert, bad_first, "RWS"),
        (Mode::Upsert, bad_last, "WUR"),
        (Mode::UpsertIfNewer, bad_first, "RWS"),
        (Mode::UpsertIfNewer, bad_last, "SWR"),
    ] {
        let mut rig = keyed(mode).await;
        assert_eq!(rig.deliver(&records).await, outcomes, "{mode:?}");
        assert!(rig.table().await[0].contains("good"));
    }
    let mut rig = keyed(Mode::Upsert).await;
    rig.deliver(&[r#"{"id":1,"x":"there"}"#]).await;
    assert_eq!(rig.deliver(&[r#"-{"id":1}"#, r#"{"id":1,"x":"bad"}"#]).await, "UR");
    assert!(rig.table().await.is_empty(), "the delete stays");
}

#[tokio::test]
async fn as_many_bad_copies_of_a_row_key_as_a_batch_holds_are_refused_one_by_one() {
    // A producer sent one order again and again, each time with the same bad field. Every refused copy was planned
    // inside the plan of the one before: the stack ran out, the process died, and died again at the next start.
    const COPIES: usize = 5000;
    for mode in [Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer] {
        let mut rig = keyed(mode).await;
        let mut records: Vec<String> =
            (0..COPIES).map(|v| format!(r#"{{"id":1,"v":{v},"x":"bad"}}"#)).collect();
        // The good one is the last that each mode comes to.
        let (good, version) = if mode == Mode::Insert { (COPIES - 1, COPIES) } else { (0, 0) };
        records[good] = format!(r#"{{"id":1,"v":{version},"x":"good"}}"#);
        let records: Vec<&str> = records.iter().map(String::as_str).collect();
        let mut expected = vec!["R"; COPIES];
        expected[good] = "W";
        let delivery = tokio::time::timeout(Duration::from_secs(60), rig.deliver(&records));
        let outcomes = delivery.await.expect("the work is bounded");
        assert!(outcomes == expected.concat(), "{mode:?}");
        assert_eq!(rig.table().await, [format!(r#"{{"v": {version}, "x": "good", "id": 1}}"#)]);
    }
}

#[tokio::test]
async fn a_refused_copy_gives_way_before_the_later_waves_of_its_row_key() {
    // Copies of unequal columns go in waves. If what stands behind a refused copy came after the later waves, an old
    // value would overwrite a new one.
    let ddl = "CREATE TABLE t (id int PRIMARY KEY, v int, x text DEFAULT 'none' CHECK (x <> 'bad'))";
    let mut rig = Rig::new(ddl, |config| {
        config.row_key = vec!["id".into()];
        config.mode = Mode::Upsert;
    })
    .await;
    let records = [
        r#"{"id":1,"v":1,"x":"old"}"#,
        r#"{"id":1,"v":2,"x":"bad"}"#,
        r#"{"id":1,"v":3}"#,
        r#"{"id":2,"v":1,"x":"bad"}"#,
        r#"{"id":2,"v":4}"#,
    ];
    assert_eq!(rig.deliver(&records).await, "WRURW");
    assert_eq!(
        rig.table().await,
        [r#"{"v": 3, "x": "old", "id": 1}"#.to_owned(), r#"{"v": 4, "x": "none", "id": 2}"#.to_owned()]
    );
}

#[tokio::test]
async fn a_code_that_a_trigger_chose_refuses_its_row_alone() {
    // A trigger raised U0001 for one bad order and named the card in its message: the route stopped, and the card
    // number stood in the log.
    let ddl = "CREATE TABLE t (id int PRIMARY KEY, code text); \
               CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.code IS NOT NULL THEN \
               RAISE EXCEPTION 'secret %', NEW.id USING ERRCODE = NEW.code; END IF; RETURN NEW; END $$; \
               CREATE TRIGGER tr BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()";
    let records = [
        r#"{"id":1}"#,
        r#"{"id":2,"code":"U0001"}"#,
        r#"{"id":3,"code":"38001"}"#,
        r#"{"id":4,"code":"39004"}"#,
    ];
    for known_new in [false, true] {
        let mut rig = Rig::new(ddl, |config| config.row_key = vec!["id".into()]).await;
        rig.options.known_new = known_new;
        let outcomes = rig.try_deliver(&records).await.unwrap();
        assert_eq!(crate::rig::letters(&outcomes), "WRRR");
        let told = format!("{outcomes:?}");
        assert!(told.contains("U0001") && !told.contains("secret"), "{told}");
    }
    let mut rig = Rig::new(ddl, |config| config.row_key = vec!["id".into()]).await;
    let error = rig.try_deliver(&[r#"{"id":6,"code":"HV000"}"#]).await.unwrap_err().to_string();
    assert!(error.contains("HV000") && !error.contains("secret"), "{error}");
}

#[tokio::test]
async fn p9_a_deferred_constraint_refuses_its_row_and_a_later_parent_is_found() {
    let ddl = "CREATE TABLE p (id int PRIMARY KEY); INSERT INTO p VALUES (1); \
               CREATE TABLE t (id int PRIMARY KEY, p int REFERENCES p DEFERRABLE INITIALLY DEFERRED, \
               parent int REFERENCES t DEFERRABLE INITIALLY DEFERRED)";
    for known_new in [false, true] {
        for padding in [0, 400] {
            let mut rig = Rig::new(ddl, |config| config.row_key = vec!["id".into()]).await;
            rig.options.known_new = known_new;
            let mut records: Vec<String> = [
                r#"{"id":1,"p":1}"#,
                r#"{"id":2,"p":77}"#,
                r#"{"id":3,"parent":900}"#,
                r#"{"id":900,"p":1}"#,
                r#"{"id":5,"parent":66}"#,
            ]
            .map(String::from)
            .to_vec();
            records.extend((0..padding).map(|id| format!(r#"{{"id":{}}}"#, 1000 + id)));
            let records: Vec<&str> = records.iter().map(String::as_str).collect();
            assert_eq!(rig.deliver(&records).await, format!("WRWWR{}", "W".repeat(padding)));
        }
    }
}

#[tokio::test]
async fn another_unique_index_refuses_and_a_dropping_trigger_is_stale_or_named() {
    let ddl = "CREATE TABLE t (id int PRIMARY KEY, code text UNIQUE, x text); INSERT INTO t VALUES (1, 'taken'); \
               CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.x = 'drop' THEN RETURN NULL; END IF; \
               IF NEW.x = 'raise' THEN RAISE EXCEPTION 'secret %', NEW.id; END IF; RETURN NEW; END $$; \
               CREATE TRIGGER tr BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()";
    let records =
        [r#"{"id":2,"code":"taken"}"#, r#"{"id":3,"x":"drop"}"#, r#"{"id":4,"x":"raise"}"#, r#"{"id":5}"#];
    let mut rig = Rig::new(ddl, |config| config.row_key = vec!["id".into()]).await;
    let outcomes = rig.try_deliver(&records).await.unwrap();
    assert_eq!(crate::rig::letters(&outcomes), "RSRW");
    assert!(!format!("{outcomes:?}").contains("secret") && format!("{outcomes:?}").contains("t_code_key"));
    let mut rig = Rig::new(ddl, |_| {}).await;
    assert_eq!(
        rig.deliver(&records).await,
        "RRRW",
        "without row key nothing names the dropped row but its turn"
    );
}

#[tokio::test]
async fn p10_dead_letters_go_in_with_the_batch_and_refused_rows_if_asked() {
    let mut rig = keyed(Mode::Insert).await;
    rig.options.on_refused = OnRefused::DeadLetter;
    let source =
        Source { step: 0, position: Some(41), key: b"kkkkkkkkkkkkkkkk", payload: None, event_ms: 123 };
    let letters = [DeadLetter { source, kind: "late", reason: "too\0late".into() }];
    let rows = Rows::new(&*rig.encoder, &[r#"{"id":1,"x":"bad"}"#, r#"{"id":2}"#]).unwrap();
    rig.deliver_rows(&rows, &letters).await.unwrap();
    rig.deliver_rows(&Rows::default(), &letters).await.unwrap();
    let query = "SELECT shard, position, kind, reason, payload, event_ms, route FROM oncegate_dead_letters ORDER BY id";
    let rows = rig.client.query(query, &[]).await.unwrap();
    assert_eq!(rows.len(), 3);
    assert_eq!((rows[0].get::<_, &str>(2), rows[0].get::<_, Option<i64>>(1)), ("late", Some(41)));
    assert_eq!((rows[0].get::<_, &str>(3), rows[0].get::<_, Option<&[u8]>>(4)), ("too\u{fffd}late", None));
    assert_eq!(rows[1].get::<_, &str>(2), "rejected");
    assert!(rows[1].get::<_, &str>(3).contains("t_x_check"));
    assert_eq!(rows[1].get::<_, Option<&[u8]>>(4), Some(&br#"{"id":1,"x":"bad"}"#[..]));
    assert_eq!((rows[1].get::<_, &str>(0), rows[1].get::<_, &str>(6)), ("http/0", "orders"));
}

#[tokio::test]
async fn abort_leaves_nothing_and_names_the_row() {
    let mut rig = keyed(Mode::Insert).await;
    rig.options.on_refused = OnRefused::Abort;
    let error = rig.try_deliver(&[r#"{"id":1}"#, r#"{"id":2,"x":"bad"}"#]).await.unwrap_err();
    let SinkError::Refused { row: 1, reason } = error else { panic!("{error}") };
    assert!(reason.contains("t_x_check"));
    assert_eq!((rig.count("t").await, rig.count("oncegate_marks").await), (0, 0));
    assert_eq!(rig.deliver(&[r#"{"id":1}"#]).await, "W", "the session goes on");
}

#[tokio::test]
async fn a_batch_without_rows_moves_the_shard() {
    let mut rig = keyed(Mode::Insert).await;
    assert_eq!(rig.deliver(&[]).await, "");
    assert_eq!((rig.acquire().await, rig.count("oncegate_marks").await), (1, 0));
}

#[tokio::test]
async fn a_partitioned_table_takes_every_mode() {
    let ddl = "CREATE TABLE t (id int, v int, x text CHECK (x <> 'bad'), PRIMARY KEY (id)) PARTITION BY RANGE (id); \
               CREATE TABLE t1 (x text CONSTRAINT t_x_check CHECK (x <> 'bad'), gone int, id int NOT NULL, v int); ALTER TABLE t1 DROP COLUMN gone; \
               ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (0) TO (100)";
    for mode in [Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer] {
        let mut rig = Rig::new(ddl, |config| {
            config.row_key = vec!["id".into()];
            config.mode = mode;
            config.version = (mode == Mode::UpsertIfNewer).then(|| "v".into());
        })
        .await;
        assert_eq!(
            rig.deliver(&[r#"{"id":1,"v":1}"#, r#"{"id":200,"v":1}"#]).await,
            "WR",
            "{mode:?}: no partition for it"
        );
        let again = if mode == Mode::Insert { "SW" } else { "UW" };
        assert_eq!(rig.deliver(&[r#"{"id":1,"v":2}"#, r#"{"id":2,"v":2}"#]).await, again, "{mode:?}");
        assert_eq!(rig.deliver(&[r#"-{"id":1,"v":3}"#]).await, "U");
    }
}

#[tokio::test]
async fn p9_nothing_is_left_on_the_connection_that_would_break_a_pooler() {
    let mut rig = Rig::new("CREATE TABLE t (id int PRIMARY KEY, a int[])", |config| {
        config.row_key = vec!["id".into()];
        config.mode = Mode::Upsert;
    })
    .await;
    assert_eq!(rig.deliver(&[r#"{"id":1,"a":[1]}"#, r#"{"id":2}"#]).await, "WW");
    assert_eq!(rig.deliver(&[r#"{"id":1,"a":[1]}"#, r#"{"id":2}"#]).await, "UU");
    assert_eq!(rig.count("pg_class WHERE relpersistence = 't'").await, 0);
    assert_eq!(rig.count("pg_locks l JOIN pg_database d ON d.oid = l.database WHERE d.datname = current_database() AND l.locktype = 'advisory'").await, 0);
    let states = "pg_stat_activity WHERE application_name LIKE 'oncegate/orders/%' AND datname = current_database() AND state <> 'idle'";
    assert_eq!(rig.count(states).await, 0);
}
