//! What the server refuses keeps a batch out whole: Redis takes nothing back of a script that fails half-way.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use adapters::{
    redis::RedisConfig,
    sink::{Mode, RowOutcome, SinkError},
};
use oncegate_tests::{
    conformance::{SHARD, block, delete, letters, write},
    servers::Redis,
};

use crate::rig::{Owner, config, everything, server};

/// Tells the server something.
fn set(redis: &Redis, words: &str) {
    let words: Vec<&str> = words.split(' ').collect();
    redis.command(0, &words).unwrap_or_else(|error| panic!("{words:?}: {error}"));
}

/// `error` says that nothing is in, why, and whether to try again.
fn assert_not_applied(error: &SinkError, word: &str, again: bool) {
    match error {
        SinkError::NotApplied { reason, retry } => {
            assert!(reason.contains(word), "{word}: {reason}");
            assert_eq!(*retry, again, "{reason}");
        }
        other => panic!("{word}: {other}"),
    }
}

#[tokio::test]
async fn full_memory_keeps_a_batch_out_whole_and_expiry_makes_room() {
    let redis = server();
    let mut owner = Owner::new(config(&redis, Mode::UpsertIfNewer).await).await;
    owner.attempt(&[write("a", 1, 1), write("b", 1, 1), delete("old", 3)]).await.expect("there is room");
    let before = everything(&redis);
    set(&redis, "CONFIG SET maxmemory 1");
    // Whatever a batch begins with: a delete needs no memory.
    for batch in
        [vec![write("c", 1, 1)], vec![delete("a", 2), write("c", 1, 1)], vec![delete("a", 2)], vec![]]
    {
        let error = owner.attempt(&batch).await.expect_err("no room");
        assert_not_applied(&error, "OOM", true);
        assert_eq!(everything(&redis), before, "{batch:?}");
        assert!(owner.session.connected(), "the connection is good");
    }
    let owned = owner.owned();
    owner.session.heartbeat(&owned).await.expect("the owner lives");
    owner.acquire().await.expect("the shard can be taken");
    assert_eq!(owner.session.expire_marks(&owner.owned(), 5000).await.expect("room is made"), 1);
    assert!(!everything(&redis).iter().any(|key| key.contains("marks") || key.contains("tombstones")));
    set(&redis, "CONFIG SET maxmemory 0");
    assert_eq!(letters(&owner.attempt(&[write("c", 1, 1)]).await.expect("there is room again")), "w");
}

/// P11: versions of deleted rows go with the marks; one that another route wrote since, on the same rows, is that route's.
#[tokio::test]
async fn p11_tombstones_go_with_the_marks_of_their_own_route() {
    let redis = server();
    let config = config(&redis, Mode::UpsertIfNewer).await;
    let mut owner = Owner::new(config.clone()).await;
    let mut deletes: Vec<_> = (0..1500).map(|n| delete(&format!("k{n}"), 5)).collect();
    deletes.push(delete("shared", 5));
    owner.attempt(&deletes).await.expect("goes in");
    let mut other = Owner::of_route(config, "another", "second").await;
    other.attempt(&[delete("shared", 6)]).await.expect("goes in");
    // Event time of all of them is 1000.
    owner.session.expire_marks(&owner.owned(), 1000).await.expect("ours");
    let stale = owner.attempt(&[write("k0", 5, 1)]).await.expect("goes in");
    assert_eq!(letters(&stale), "s", "1000 is not below 1000");
    owner.session.expire_marks(&owner.owned(), 1001).await.expect("ours");
    let tombs = redis.command(1, &["HKEYS", "oncegate:tombstones:rows:"]).expect("tombstones");
    assert_eq!(tombs, redis::Value::Array(vec![redis::Value::BulkString("rows:shared".into())]));
    let outcomes = owner.attempt(&[write("k0", 5, 1), write("shared", 6, 1)]).await.expect("goes in");
    assert_eq!(letters(&outcomes), "ws");
    other.session.expire_marks(&other.owned(), 1001).await.expect("ours");
    assert_eq!(letters(&owner.attempt(&[write("shared", 6, 1)]).await.expect("goes in")), "w");
    assert!(!everything(&redis).iter().any(|key| key.contains("tombstones")));
}

/// P11: one batch has one mark and many tombstones: who expires until nothing went has all of them gone.
#[tokio::test]
async fn p11_expiry_goes_on_while_tombstones_are_left() {
    let redis = server();
    let mut owner = Owner::new(config(&redis, Mode::UpsertIfNewer).await).await;
    let deletes: Vec<_> = (0..12_000).map(|n| delete(&format!("k{n}"), 5)).collect();
    owner.attempt(&deletes).await.expect("goes in");
    let tombs = || match redis.command(1, &["HLEN", "oncegate:tombstones:rows:"]).expect("tombstones") {
        redis::Value::Int(count) => count,
        other => panic!("{other:?}"),
    };
    assert_eq!(tombs(), 12_000);
    let mut calls = 0;
    while owner.session.expire_marks(&owner.owned(), 1001).await.expect("ours") > 0 {
        calls += 1;
        assert!(calls < 10, "each call has less to do");
    }
    assert_eq!(tombs(), 0);
    assert!(!everything(&redis).iter().any(|key| key.contains("tombstones")));
}

#[tokio::test]
async fn a_server_that_became_a_replica_takes_nothing_and_is_looked_at_anew() {
    let redis = server();
    let mut owner = Owner::new(config(&redis, Mode::Upsert).await).await;
    owner.attempt(&[write("a", 1, 1)]).await.expect("a primary");
    let before = everything(&redis);
    let mut admin = redis.connect(0);
    // Of nobody: its data stay as they are.
    set(&redis, "REPLICAOF 127.0.0.1 1");
    let error = owner.attempt(&[delete("a", 1), write("b", 1, 1)]).await.expect_err("a replica");
    assert_not_applied(&error, "READONLY", true);
    assert!(!owner.session.connected());
    assert_not_applied(&owner.acquire().await.expect_err("still one"), "\"slave\"", true);
    set(&redis, "CONFIG SET replica-serve-stale-data no");
    assert_not_applied(&owner.acquire().await.expect_err("without its primary"), "\"slave\"", true);
    redis::cmd("REPLICAOF").arg("NO").arg("ONE").query::<()>(&mut admin).expect("a primary again");
    assert_eq!(everything(&redis), before);
    owner.acquire().await.expect("a primary again");
    owner.attempt(&[write("b", 1, 1)]).await.expect("a primary again");
}

#[tokio::test]
async fn too_few_replicas_and_a_failing_disk_keep_a_batch_out() {
    let redis = server();
    let mut owner = Owner::new(config(&redis, Mode::Upsert).await).await;
    let before = everything(&redis);
    set(&redis, "CONFIG SET min-replicas-to-write 1");
    assert_not_applied(
        &owner.attempt(&[write("a", 1, 1)]).await.expect_err("no replica"),
        "NOREPLICAS",
        true,
    );
    set(&redis, "CONFIG SET min-replicas-to-write 0");
    assert_eq!(everything(&redis), before);
    // A snapshot that cannot be written stops writes while snapshots are asked for.
    redis.command(0, &["CONFIG", "SET", "save", "3600 1"]).expect("set");
    redis.block_snapshots();
    assert!(redis.command(0, &["BGSAVE"]).is_ok());
    oncegate_tests::eventually("a failed snapshot", Duration::from_secs(10), async || {
        let info = redis.command(0, &["INFO", "persistence"]).expect("INFO");
        if format!("{info:?}").contains("rdb_last_bgsave_status:err") { Ok(()) } else { Err("not yet") }
    })
    .await;
    assert_not_applied(&owner.attempt(&[write("a", 1, 1)]).await.expect_err("no snapshot"), "MISCONF", true);
    assert_eq!(everything(&redis), before);
    set(&redis, "CONFIG SET stop-writes-on-bgsave-error no");
    owner.attempt(&[write("a", 1, 1)]).await.expect("the server takes writes");
}

#[tokio::test]
async fn a_busy_server_has_not_run_the_batch() {
    let redis = server();
    let mut owner = Owner::new(config(&redis, Mode::Upsert).await).await;
    let before = everything(&redis);
    let mut other = redis.connect(0);
    let script = std::thread::spawn(move || {
        redis::cmd("EVAL").arg("while true do end").arg(0).query::<()>(&mut other).expect_err("killed")
    });
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_not_applied(&owner.attempt(&[write("a", 1, 1)]).await.expect_err("busy"), "BUSY", true);
    let kill = redis::Client::open(redis.url(0)).expect("a good URL").get_connection();
    if let Ok(mut kill) = kill {
        redis::cmd("SCRIPT").arg("KILL").query::<()>(&mut kill).expect("it has not written");
    }
    script.join().expect("it was killed");
    assert_eq!(everything(&redis), before);
    owner.attempt(&[write("a", 1, 1)]).await.expect("the server is free");
}

#[tokio::test]
async fn a_server_that_forgot_the_scripts_is_told_again() {
    let redis = server();
    let mut owner = Owner::new(config(&redis, Mode::Upsert).await).await;
    set(&redis, "SCRIPT FLUSH");
    owner.attempt(&[write("a", 1, 1)]).await.expect("told again");
    set(&redis, "SCRIPT FLUSH");
    let owned = owner.owned();
    owner.session.heartbeat(&owned).await.expect("told again");
}

#[tokio::test]
async fn rule10_a_key_of_another_type_costs_one_outcome() {
    let redis = server();
    for mode in [Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer] {
        redis.command(1, &["FLUSHDB"]).expect("emptied");
        let mut owner = Owner::new(config(&redis, mode).await).await;
        redis.command(1, &["SET", "rows:s", "text"]).expect("set");
        redis.command(1, &["ZADD", "rows:z", "1", "member"]).expect("set");
        let batch = [write("a", 1, 1), write("s", 1, 1), delete("z", 1), write("b", 1, 1)];
        let outcomes = owner.attempt(&batch).await.expect("the rest goes in");
        assert_eq!(letters(&outcomes), "wrrw", "{mode:?}");
        let RowOutcome::Refused { reason } = &outcomes[1] else { panic!("refused") };
        assert_eq!(reason, "its key holds a string where a row is a hash");
        let all = everything(&redis);
        let has = |start: &str| all.iter().any(|key| key.starts_with(start));
        assert!(has("rows:a ") && has("rows:b ") && has("rows:s ") && has("rows:z "), "{all:?}");
        let marks = owner.session.marks_since(&SHARD.into(), 0).await.expect("marks");
        assert!(marks[0].block.ends_with(b" wrrw"), "the mark knows");
    }
}

#[tokio::test]
async fn rule10_a_version_that_cannot_be_compared_costs_one_outcome() {
    let redis = server();
    let mut owner = Owner::new(config(&redis, Mode::UpsertIfNewer).await).await;
    for (key, version) in [("rows:bad", "1.5"), ("rows:old", "0041"), ("rows:new", "43")] {
        redis.command(1, &["HSET", key, "id", "x", "version", version]).expect("set");
    }
    redis.command(1, &["HSET", "rows:none", "id", "x"]).expect("set");
    let batch = ["bad", "old", "new", "none"].map(|id| write(id, 42, 1));
    let outcomes = owner.attempt(&batch).await.expect("the rest goes in");
    assert_eq!(letters(&outcomes), "rusu");
    assert!(matches!(&outcomes[0], RowOutcome::Refused { reason } if reason.contains("\"version\"")));
}

/// Each of the bookkeeping's keys in turn is of another type: found before the first write.
#[tokio::test]
async fn a_bookkeeping_key_of_another_type_keeps_the_batch_out_whole() {
    let redis = server();
    let keys = [
        "oncegate:{route}:dead_letters",
        "oncegate:tombstones:rows:",
        "oncegate:{route}:tombstones:rows:",
        "oncegate:{route}:marks:http/0",
        "oncegate:{route}:marks_by_sequence:http/0",
        "oncegate:{route}:marks_by_time:http/0",
        "oncegate:{route}:shard:http/0",
    ];
    for key in keys {
        redis.command(1, &["FLUSHDB"]).expect("emptied");
        let mut owner = Owner::new(config(&redis, Mode::UpsertIfNewer).await).await;
        redis.command(1, &["DEL", key]).expect("deleted");
        redis.command(1, &["SET", key, "text"]).expect("set");
        redis.command(1, &["HSET", "rows:b", "version", "1"]).expect("set");
        let count = redis.hashes(1, "rows:").len();
        let error = owner.attempt(&[write("a", 1, 1), delete("b", 2)]).await.expect_err(key);
        // Where the shard itself is meant the server says so.
        let word = if key.contains("}:shard:") { "WRONGTYPE" } else { key };
        assert_not_applied(&error, word, false);
        assert_eq!(redis.hashes(1, "rows:").len(), count, "{key}");
    }
}

/// Permissions that are taken away from a running gateway, command by command and key by key.
#[tokio::test]
async fn a_permission_that_is_missing_keeps_the_batch_out_whole() {
    let redis = server();
    let all = "on >secret ~* &* +@all";
    set(&redis, &format!("ACL SETUSER gate {all}"));
    let config = config(&redis, Mode::UpsertIfNewer).await;
    let url = redis.url(1).replace("redis://", "redis://gate:secret@");
    let mut owner = Owner::new(RedisConfig { url, ..config.clone() }).await;
    owner.attempt(&[write("b", 1, 1)]).await.expect("all is allowed");
    // Its write is refused, which makes a dead letter.
    redis.command(1, &["SET", "rows:s", "text"]).expect("set");
    let batch = [write("a", 1, 1), delete("b", 2), write("c", 1, 1), write("s", 1, 1)];
    let before = everything(&redis);
    for rule in [
        "-unlink",
        "-hset",
        "-hdel",
        "-zadd",
        "-zrem",
        "-xadd",
        "-evalsha",
        "resetkeys ~oncegate:* ~rows:a",
        "resetkeys ~rows:*",
    ] {
        set(&redis, &format!("ACL SETUSER gate reset {all}"));
        set(&redis, &format!("ACL SETUSER gate {rule}"));
        let error = owner.attempt(&batch).await.expect_err(rule);
        assert_not_applied(&error, "NOPERM", false);
        assert_eq!(everything(&redis), before, "{rule}");
        set(&redis, &format!("ACL SETUSER gate reset {all}"));
        owner.acquire().await.expect("all is allowed");
    }
    assert_eq!(letters(&owner.attempt(&batch).await.expect("goes in")), "wuwr");

    set(&redis, "ACL SETUSER gate reset on >other ~* &* +@all");
    let sink = adapters::redis::RedisSink::new(RedisConfig {
        url: redis.url(1).replace("redis://", "redis://gate:secret@"),
        ..config
    });
    let mut session = adapters::sink::Sink::session(&sink.expect("good"), "route", "second");
    let error = session.acquire(&[SHARD.into()], adapters::sink::Acquire::Force).await.expect_err("wrong");
    assert_not_applied(&error, "WRONGPASS", false);
}

/// Rows that others change all the time: what the marks say is what was answered, and what the script did.
#[tokio::test(flavor = "multi_thread")]
async fn marks_say_what_became_of_rows_that_others_change_meanwhile() {
    let redis = server();
    let mut owner = Owner::new(config(&redis, Mode::Upsert).await).await;
    static OVER: AtomicBool = AtomicBool::new(false);
    let mut other = redis.connect(1);
    let writer = std::thread::spawn(move || {
        let mut turns = 0u64;
        while !OVER.load(Ordering::Relaxed) {
            turns += 1;
            let (word, key) = (["HSET", "DEL"][turns as usize % 2], format!("rows:k{}", turns % 7));
            let mut command = redis::cmd(word);
            command.arg(key);
            if word == "HSET" {
                command.arg("id").arg("x");
            }
            command.query::<()>(&mut other).expect("the server answers");
        }
        turns
    });
    let (mut given_up, mut done) = (0, Vec::new());
    for round in 0..150 {
        let batch: Vec<_> = (0..3).map(|n| write(&format!("k{}", (round + n) % 7), 1, round)).collect();
        let step = owner.step();
        match owner.attempt(&batch).await {
            Ok(outcomes) => done.push(block(&step, &outcomes)),
            Err(error) => {
                assert_not_applied(&error, "other writers", true);
                given_up += 1;
            }
        }
    }
    OVER.store(true, Ordering::Relaxed);
    let turns = writer.join().expect("no panic");
    println!("{} batches, {given_up} given up, {turns} turns of the other writer", done.len());
    assert!(done.len() > 50, "{given_up} given up");
    assert!(done.iter().any(|block| block.ends_with(b"u")), "rows were met");
    let marks = owner.session.marks_since(&SHARD.into(), 0).await.expect("marks");
    assert_eq!(marks.into_iter().map(|mark| mark.block).collect::<Vec<_>>(), done);
}

/// How long the server serves nobody else, as it measures it itself.
#[tokio::test]
async fn a_large_batch_holds_the_server_for_less_than_its_bound_on_scripts() {
    const ROWS: i64 = 20_000;
    let redis = server();
    set(&redis, "CONFIG SET slowlog-log-slower-than 1000");
    for mode in [Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer] {
        redis.command(1, &["FLUSHDB"]).expect("emptied");
        let mut owner = Owner::new(config(&redis, mode).await).await;
        let rows = |version| -> Vec<_> {
            (0..ROWS)
                .map(|n| write(&format!("row-{n:08}"), version, n).note("thirty characters of a note.."))
                .collect()
        };
        for (version, outcome) in [(1, 'w'), (2, if mode == Mode::Insert { 's' } else { 'u' })] {
            set(&redis, "SLOWLOG RESET");
            let outcomes = owner.attempt(&rows(version)).await.expect("goes in");
            assert!(letters(&outcomes).chars().all(|letter| letter == outcome), "{mode:?}");
            let slow = redis.command(0, &["SLOWLOG", "GET"]).expect("the log");
            let redis::Value::Array(slow) = slow else { panic!("a list, not {slow:?}") };
            let took: Vec<i64> = slow
                .iter()
                .filter_map(|entry| match entry {
                    redis::Value::Array(parts) => match (&parts[2], format!("{:?}", parts[3])) {
                        (redis::Value::Int(micros), command) if command.contains("EVALSHA") => Some(*micros),
                        _ => None,
                    },
                    _ => None,
                })
                .collect();
            println!("{mode:?}, {ROWS} rows, {outcome}: the server was held for {took:?} us");
            // Its default bound, after which it says that it is busy.
            assert!(took.iter().all(|micros| *micros < 5_000_000), "{took:?}");
        }
    }
}
