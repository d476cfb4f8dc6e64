//! Lost connections, late replies, servers that die, freeze or go back (P5, P6).

use std::time::Duration;

use adapters::{
    redis::{Durability, RedisConfig},
    sink::{Acquire, Mode, Resolution, RowOutcome, SinkError},
};
use oncegate_tests::{
    conformance::{SHARD, block, delete, letters, write},
    eventually,
    redis_proxy::{RedisProxy, Snag},
    servers::Redis,
};

use crate::rig::{Owner, TIMEOUT, config, everything, server};

/// A batch of an unknown outcome is in, or can no longer come; the caller goes on accordingly.
async fn resolved(owner: &mut Owner) -> bool {
    let step = owner.step();
    let (resolution, mut states) = owner.session.resolve(&[step]).await.expect("the server can be asked");
    owner.state = states.remove(0);
    assert!(owner.session.connected());
    matches!(resolution, Resolution::Applied(_))
}

#[tokio::test(flavor = "multi_thread")]
async fn p5_a_batch_whose_connection_broke_is_in_once_or_not_at_all() {
    let redis = server();
    let proxy = RedisProxy::start(redis.port()).await;
    let config = config(&redis, Mode::Insert).await;
    let url = redis.url_through(proxy.port(), 1);
    let mut owner = Owner::new(RedisConfig { url, timeout: TIMEOUT, ..config }).await;
    let late = Snag::Late(2 * TIMEOUT);
    let snags = [Snag::Before, Snag::Half, Snag::After, Snag::Reply, late];
    for (round, snag) in snags.into_iter().cycle().take(20).enumerate() {
        let size = if round < 10 { 3 } else { 2000 };
        let batch: Vec<_> = (0..size).map(|n| write(&format!("{round}-{n}"), 1, 1)).collect();
        let step = owner.step();
        let life = owner.session.life();
        let sprung = proxy.snag(snag);
        let lost = owner.attempt(&batch).await;
        assert!(matches!(&lost, Err(SinkError::Unknown { .. })), "{snag:?}: {lost:?}");
        sprung.await.expect("the snag was met");
        assert!(!owner.session.connected() && !life.stands(), "{snag:?}");
        let applied = resolved(&mut owner).await;
        match snag {
            Snag::Before | Snag::Half => assert!(!applied, "{snag:?}"),
            Snag::After | Snag::Held(_) => {}
            Snag::Reply | Snag::Late(_) => assert!(applied, "{snag:?}"),
        }
        let count = redis.hashes(1, &format!("rows:{round}-")).len();
        assert_eq!(count, if applied { size } else { 0 }, "{snag:?}");
        if !applied {
            let outcomes = owner.attempt(&batch).await.expect("the same batch, under the new epoch");
            assert!(outcomes.iter().all(|outcome| *outcome == RowOutcome::Written), "{snag:?}");
        }
        let marks = owner.session.marks_since(&SHARD.into(), step.sequence - 1).await.expect("marks");
        assert_eq!(marks.len(), 1, "{snag:?}");
        assert_eq!(marks[0].block, block(&step, &vec![RowOutcome::Written; size]), "{snag:?}");
    }
}

/// Rows change after the look and before the write: the batch is sealed anew, with what is true then.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_whose_rows_change_under_it_says_what_is_true() {
    let redis = server();
    let proxy = RedisProxy::start(redis.port()).await;
    for mode in [Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer] {
        redis.command(1, &["FLUSHDB"]).expect("emptied");
        let config = config(&redis, mode).await;
        let mut owner = Owner::new(RedisConfig { url: redis.url_through(proxy.port(), 1), ..config }).await;
        redis.command(1, &["HSET", "rows:b", "id", "b", "version", "1"]).expect("set");
        let held = proxy.snag(Snag::Held(Duration::from_millis(150)));
        let meanwhile = async {
            held.await.expect("the write is on its way");
            redis.command(1, &["HSET", "rows:a", "id", "a", "version", "9"]).expect("set");
            redis.command(1, &["DEL", "rows:b"]).expect("deleted");
            redis.command(1, &["SET", "rows:c", "text"]).expect("set");
        };
        let (step, before) = (owner.step(), proxy.writes());
        let batch = ["a", "b", "c"].map(|id| write(id, 5, 1));
        let (outcomes, ()) = tokio::join!(owner.attempt(&batch), meanwhile);
        let outcomes = outcomes.expect("goes in");
        assert_eq!(letters(&outcomes), if mode == Mode::Upsert { "uwr" } else { "swr" }, "{mode:?}");
        assert_eq!(proxy.writes() - before, 2, "{mode:?}");
        let marks = owner.session.marks_since(&SHARD.into(), 0).await.expect("marks");
        assert_eq!(marks[0].block, block(&step, &outcomes));
        let rows = redis.command(1, &["HGET", "rows:a", "version"]).expect("a row");
        let kept = if mode == Mode::Upsert { "5" } else { "9" };
        assert_eq!(rows, redis::Value::BulkString(kept.into()), "{mode:?}");
    }
}

/// P4: builds before epochs rose by chance came to the same one again, for another owner, on a server that went back.
#[tokio::test]
async fn p4_another_owner_at_the_same_epoch_is_another_owner() {
    let redis = server();
    let mut owner = Owner::new(config(&redis, Mode::Insert).await).await;
    owner.attempt(&[write("a", 1, 1)]).await.expect("goes in");
    redis.command(1, &["HSET", "oncegate:{route}:shard:http/0", "owner", "second"]).expect("set");
    let owned = owner.owned();
    let step = owner.step();
    let said = [
        owner.attempt(&[write("b", 1, 1)]).await.map(drop),
        owner.session.heartbeat(&owned).await,
        owner.session.expire_marks(&owned, 5000).await.map(drop),
        owner.session.resolve(&[step]).await.map(drop),
    ];
    for said in said {
        assert!(matches!(&said, Err(SinkError::Fenced { owner, .. }) if owner == "second"), "{said:?}");
    }
    assert_eq!(redis.hashes(1, "rows:").len(), 1);
}

/// The server has the batch in its hands and stands still; it goes on while the batch is resolved.
#[tokio::test(flavor = "multi_thread")]
async fn p5_a_frozen_server_applies_a_batch_once_or_not_at_all() {
    let mut redis = server();
    let config = config(&redis, Mode::Insert).await;
    let mut owner = Owner::new(RedisConfig { timeout: TIMEOUT, connect_timeout: TIMEOUT, ..config }).await;
    for round in 0..4 {
        let batch = [write(&format!("k{round}"), 1, 1)];
        redis.freeze();
        let lost = owner.attempt(&batch).await;
        // A look alone is not applied.
        assert!(
            matches!(&lost, Err(SinkError::Unknown { .. } | SinkError::NotApplied { retry: true, .. })),
            "{lost:?}"
        );
        let step = owner.step();
        let asked = owner.session.resolve(&[step]).await;
        assert!(matches!(&asked, Err(SinkError::Unknown { .. })), "it does not answer: {asked:?}");
        redis.thaw();
        if !resolved(&mut owner).await {
            owner.attempt(&batch).await.expect("under the new epoch");
        }
    }
    assert_eq!(redis.hashes(1, "rows:").len(), 4);
    assert_eq!(owner.state.sequence, 4);
}

/// P6: a lane that has no shards yet makes its connection by acquiring none.
#[tokio::test]
async fn p6_acquiring_nothing_makes_the_connection() {
    let redis = server();
    let mut owner = Owner::new(config(&redis, Mode::Insert).await).await;
    assert_eq!(owner.session.resolve(&[]).await.expect("asked"), (Resolution::NotApplied, vec![]));
    assert!(owner.session.connected());
    assert_eq!(owner.session.acquire(&[], Acquire::Force).await.expect("asked"), []);
    owner.session.heartbeat(&[]).await.expect("nothing to show");
    assert_eq!(owner.session.expire_marks(&[], 5).await.expect("nothing to expire"), 0);
    owner.attempt(&[write("a", 1, 1)]).await.expect("goes in");
}

/// P6: the end of the server is heard without asking, and what it acknowledged is there when it is back.
#[tokio::test(flavor = "multi_thread")]
async fn p6_a_killed_server_is_noticed_at_once_and_keeps_what_it_acknowledged() {
    let mut redis = server();
    let config = RedisConfig { durability: Durability::Always, ..config(&redis, Mode::UpsertIfNewer).await };
    let mut owner = Owner::new(config).await;
    for round in 1..6 {
        owner.attempt(&[write("a", round, round), delete("b", round)]).await.expect("goes in");
        let (before, life) = (everything(&redis), owner.session.life());
        assert!(life.stands());
        redis.kill();
        eventually("the end of the connection", Duration::from_secs(2), async || {
            if life.stands() { Err("it stands") } else { Ok(()) }
        })
        .await;
        assert!(!owner.session.connected());
        let error = owner.attempt(&[write("c", 1, 1)]).await.expect_err("no server");
        assert!(matches!(error, SinkError::NotApplied { retry: true, .. }), "{error}");
        redis.run();
        assert_eq!(everything(&redis), before);
        owner.acquire().await.expect("it is back");
    }
}

/// P6: a server restored from older files says so by its sequences, and the lost batches go in again.
#[tokio::test(flavor = "multi_thread")]
async fn p6_a_restored_server_shows_the_older_sequence() {
    let mut redis = server();
    let config = config(&redis, Mode::Insert).await;
    let mut owner = Owner::new(config.clone()).await;
    owner.attempt(&[write("a", 1, 1)]).await.expect("goes in");
    redis.kill();
    redis.keep_files("early");
    redis.run();
    owner.acquire().await.expect("it is back");
    owner.attempt(&[write("b", 1, 1)]).await.expect("goes in");
    owner.attempt(&[write("c", 1, 1)]).await.expect("goes in");
    let (held, step) = (owner.state.clone(), owner.step());
    redis.kill();
    redis.restore("early");
    redis.run();
    // Another owner takes the shard on the older server. No epoch comes again, though it is the second of that shard there, too.
    let mut other = Owner::named(config, "second").await;
    assert_ne!(other.state.epoch, held.epoch);
    assert_eq!(other.state.sequence, 1);
    other.attempt(&[write("x", 1, 1)]).await.expect("goes in");
    let fenced = owner.session.resolve(&[step]).await;
    assert!(matches!(&fenced, Err(SinkError::Fenced { owner, .. }) if owner == "second"), "{fenced:?}");
    owner.acquire().await.expect("taken");
    assert_eq!(owner.state.sequence, 2, "behind the three that were acknowledged");
    let ours = |owner: &Owner| owner.state.lineage.has(2, held.epoch);
    assert!(!ours(&owner) && owner.state.lineage.has(2, other.state.epoch), "{:?}", owner.state.lineage);
}

/// A failover may bring a server of other settings: it is looked at with each connection, before anything is asked of it.
#[tokio::test(flavor = "multi_thread")]
async fn another_server_that_does_not_fit_is_refused_until_it_is_put_right() {
    let mut redis = server();
    let config = RedisConfig { durability: Durability::Always, ..config(&redis, Mode::Insert).await };
    let mut owner = Owner::new(config).await;
    owner.attempt(&[write("a", 1, 1)]).await.expect("goes in");
    for (round, (setting, wrong, says, right)) in [
        ("maxmemory-policy", "allkeys-lru", "noeviction", "noeviction"),
        ("appendfsync", "everysec", "set appendonly yes and appendfsync always", "always"),
        ("no-appendfsync-on-rewrite", "yes", "set no-appendfsync-on-rewrite no", "no"),
        ("proto-max-bulk-len", "1048576", "raise it", "536870912"),
    ]
    .into_iter()
    .enumerate()
    {
        redis.kill();
        redis.run();
        redis.command(0, &["CONFIG", "SET", setting, wrong]).expect("set");
        let (before, step) = (everything(&redis), owner.step());
        let refused = |what: &str, error: SinkError| match error {
            SinkError::NotApplied { reason, retry: true } | SinkError::Unknown { reason } => {
                assert!(reason.contains(setting) && reason.contains(says), "{what}: {reason}");
            }
            other => panic!("{what}, {setting}: {other}"),
        };
        refused("acquire", owner.acquire().await.expect_err(setting));
        refused("resolve", owner.session.resolve(&[step]).await.expect_err(setting));
        refused("time", owner.session.now_ms().await.expect_err(setting));
        assert!(!owner.session.connected());
        assert_eq!(everything(&redis), before, "{setting}");
        redis.command(0, &["CONFIG", "SET", setting, right]).expect("set");
        owner.acquire().await.expect("it was put right");
        owner.attempt(&[write(&format!("b{round}"), 1, 1)]).await.expect("goes in");
    }
}

/// P6: also on a connection that never broke.
#[tokio::test]
async fn p6_data_that_go_back_under_a_connection_are_noticed() {
    let redis = server();
    let config = config(&redis, Mode::Insert).await;
    let shard = "oncegate:{route}:shard:http/0";
    for gone in [vec!["FLUSHDB"], vec!["DEL", shard], vec!["HSET", shard, "sequence", "1"]] {
        redis.command(1, &["FLUSHDB"]).expect("emptied");
        for by_batch in [true, false] {
            let mut owner = Owner::new(config.clone()).await;
            for round in 0..3 {
                owner.attempt(&[write(&format!("k{round}"), 1, 1)]).await.expect("goes in");
            }
            redis.command(1, &gone).expect("done");
            let owned = owner.owned();
            let said = match by_batch {
                true => owner.attempt(&[write("x", 1, 1)]).await.map(drop),
                false => owner.session.heartbeat(&owned).await,
            };
            let Err(SinkError::NotApplied { reason, retry: true }) = &said else {
                panic!("{gone:?}: {said:?}")
            };
            assert!(reason.contains("went back"), "{reason}");
            assert!(!owner.session.connected());
            assert!(!redis.hashes(1, "rows:").contains_key("rows:x"));
            redis.command(1, &["FLUSHDB"]).expect("emptied");
        }
    }
}

/// `wait_replicas`: without its replica a batch is in, here, and not acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_waits_for_its_replicas() {
    let redis = server();
    let mut replica =
        Redis::start(&format!("replicaof 127.0.0.1 {}\nrepl-ping-replica-period 1", redis.port()));
    let linked = async || {
        let info = redis.command(0, &["INFO", "replication"]).expect("INFO");
        if format!("{info:?}").contains("state=online") { Ok(()) } else { Err("no replica") }
    };
    eventually("a replica", Duration::from_secs(20), linked).await;
    let config = config(&redis, Mode::Upsert).await;
    let mut owner = Owner::new(RedisConfig { wait_replicas: 1, timeout: TIMEOUT, ..config }).await;
    let outcomes = owner.attempt(&[write("a", 1, 1)]).await.expect("the replica has it");
    assert_eq!(letters(&outcomes), "w");
    assert_eq!(replica.hashes(1, "rows:").len(), 1);
    replica.freeze();
    let error = owner.attempt(&[write("b", 1, 1)]).await.expect_err("the replica stands still");
    assert!(matches!(&error, SinkError::Unknown { reason } if reason.contains("0 of 1 replicas")), "{error}");
    let step = owner.step();
    let asked = owner.session.resolve(&[step]).await;
    assert!(matches!(&asked, Err(SinkError::Unknown { .. })), "{asked:?}");
    replica.thaw();
    eventually("a replica", Duration::from_secs(20), linked).await;
    assert!(resolved(&mut owner).await);
    assert_eq!(replica.hashes(1, "rows:").len(), 2);
}
